"""The tokenizer of a model folder: ``tokenizer.json``, and what stands beside it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvsieve.engine.bpe import JsonEncoder
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.engine.vocabulary import BYTE_TOKEN, TokenKind, Vocabulary, end_ids
from kvsieve.errors import ModelFileError
from kvsieve.models.safetensors import read_json

DEFINITION = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"

_MAX_JSON_BYTES = 1 << 28
_MAX_TEMPLATE_BYTES = 1 << 20
_MODELS = ("BPE", "Unigram")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder brings its tokens' texts, in a form that can be read."""
    if (folder / DEFINITION).exists():
        return True
    if (folder / "tokenizer.model").exists():
        raise ModelFileError(
            f"[Tokenizer] {folder}: expected {DEFINITION} (the Transformers library writes it with "
            "save_pretrained), got tokenizer.model alone"
        )
    return False


def folder_tokenizer(
    folder: Path, *, vocab_size: int, eos_ids: frozenset[int] = frozenset()
) -> Tokenizer:
    """Read it; `ModelFileError` names what is wrong.

    vocab_size  rows of the embedding: ids beyond the file's own are tokens nobody uses
    eos_ids     end tokens that ``config.json`` names; those of the other files are added
    """
    definition = read_json(folder / DEFINITION, max_bytes=_MAX_JSON_BYTES)
    model = definition.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in _MODELS:
        raise ModelFileError(
            f"[Tokenizer] {folder / DEFINITION}: model.type: expected {' or '.join(_MODELS)}, "
            f"got {kind!r:.60}"
        )
    settings = _optional_json(folder / SETTINGS)
    encoder = JsonEncoder(definition)
    ids = encoder.ids
    largest = max(ids.values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise ModelFileError(
            f"[Tokenizer] {folder / DEFINITION}: expected token ids below {vocab_size}, the rows "
            f"of the embedding, got {largest}"
        )
    bos_id = _special_id(settings, "bos_token", ids)
    eos_id = _special_id(settings, "eos_token", ids)
    ends = eos_ids | _generation_ends(folder, vocab_size) | end_ids(ids)
    tokens, kinds = _texts_and_kinds(definition, ids, vocab_size)
    vocabulary = Vocabulary(
        tokens=tokens,
        kinds=kinds,
        ids=ids,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=ends if eos_id is None else ends | {eos_id},
        byte_alphabet="ByteLevel" in set(_types(definition)),
    )
    adds_bos = bos_id is not None and encoder.begins_with(bos_id)
    wanted = settings.get("add_bos_token")
    if isinstance(wanted, bool) and bos_id is not None:
        adds_bos = wanted
    return Tokenizer(vocabulary=vocabulary, encoder=encoder, add_bos=adds_bos)


def folder_chat_template(folder: Path) -> str | None:
    """The chat template: a file of its own, or part of the tokenizer's settings."""
    path = folder / TEMPLATE
    if path.exists():
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ModelFileError(
                f"[Tokenizer] {path}: expected at most {_MAX_TEMPLATE_BYTES} bytes, "
                f"got {path.stat().st_size}"
            )
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as failure:
            raise ModelFileError(f"[Tokenizer] {path}: expected a text, got: {failure}") from None
    template = _optional_json(folder / SETTINGS).get("chat_template")
    if isinstance(template, list):
        # Several, by name; the others are for tools and documents.
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional_json(path: Path) -> Mapping[str, Any]:
    return read_json(path, max_bytes=_MAX_JSON_BYTES) if path.exists() else {}


def _texts_and_kinds(
    definition: Mapping[str, Any], ids: Mapping[str, int], vocab_size: int
) -> tuple[list[str], bytes]:
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    kinds = bytearray([TokenKind.UNUSED]) * vocab_size
    spelled_in_bytes = bool(definition["model"].get("byte_fallback"))
    for text, token_id in ids.items():
        tokens[token_id] = text
        is_byte = spelled_in_bytes and BYTE_TOKEN.fullmatch(text)
        kinds[token_id] = TokenKind.BYTE if is_byte else TokenKind.NORMAL
    for added in definition.get("added_tokens") or []:
        special = added.get("special")
        kinds[added["id"]] = TokenKind.CONTROL if special else TokenKind.USER_DEFINED
    return tokens, bytes(kinds)


def _special_id(settings: Mapping[str, Any], name: str, ids: Mapping[str, int]) -> int | None:
    token = settings.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return ids.get(token) if isinstance(token, str) else None


def _generation_ends(folder: Path, vocab_size: int) -> frozenset[int]:
    found = _optional_json(folder / GENERATION).get("eos_token_id")
    several = found if isinstance(found, list) else [found]
    return frozenset(one for one in several if type(one) is int and 0 <= one < vocab_size)


def _types(value: Any) -> Iterator[str]:
    """Types of all the steps that a definition names, its vocabulary left out."""
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value["type"]
        for name, inner in value.items():
            if name not in ("vocab", "merges", "added_tokens"):
                yield from _types(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _types(inner)
