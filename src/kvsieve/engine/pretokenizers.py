"""How text is cut into pieces before byte-pair merging: one record per rule that a GGUF can name.

The regular expressions are those of the models' own tokenizers, in the form llama.cpp applies
them; `tests/engine/test_tokenizer.py` compares the ids with llama.cpp's. Classes such as
``[sS]`` stand for case-insensitive matching, which would also fold letters beyond ASCII.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvsieve.errors import ModelFileError

_GPT2_WORDS = (
    r"'s|'t|'re|'ve|'m|'ll|'d"
    r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"


def _cased_words(numbers: str) -> str:
    """The rule that Llama 3 and Qwen 2 share but for how many digits stay together."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """``patterns`` cut one after the other: each cuts the pieces the one before it left.

    ``ignore_merges`` takes a piece that is a token as it stands, without merging;
    ``add_bos`` holds where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA_BPE = PreTokenizer(patterns=(_cased_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(patterns=(_cased_words(r"\p{N}"),))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "smollm": PreTokenizer(patterns=(r"\p{N}", _GPT2_WORDS)),
        "gpt-2": PreTokenizer(patterns=(_GPT2_WORDS,)),
        "llama-bpe": _LLAMA_BPE,
        "llama3": _LLAMA_BPE,
        "llama-v3": _LLAMA_BPE,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
    }
)


def pre_tokenizer_named(name: object) -> PreTokenizer:
    """Return the rule a file names in ``tokenizer.ggml.pre``; ModelFileError for any other."""
    rule = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        came = "nothing" if name is None else repr(name)
        raise ModelFileError(
            f"[Tokenizer] tokenizer.ggml.pre: expected one of {', '.join(PRE_TOKENIZERS)}, "
            f"got {came}"
        )
    return rule
