"""Model files damaged at random: everything that reads them ends in a named error, or works.

Beyond the headers' own tests: configuration, tokenizer, chat template and weights see what got
through. A crash of the process or a huge allocation would end the run.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsieve.engine.memory import weights_bytes
from kvsieve.engine.no_vocabulary import NoVocabulary, chat_template_of, tokenizer_of
from kvsieve.errors import KvsieveError
from kvsieve.kernels.native import NativeBackend
from kvsieve.models.decoder import Decoder
from kvsieve.models.gguf import GgufFile
from kvsieve.models.model_file import notes, open_model_file, read_config
from tests.checkpoints import CONFIGS, write_folder, write_gguf
from tests.tiny_model import write_tiny_gguf

FEW, MANY = 40, 1500
SIZES = [0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
VALUES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**70, 1e308, -1.5, float("nan"), "", "silu", [], [1], {},
    {"a": 1}, [[]], "full_attention", [2**80],
]  # fmt: skip
FOLDERS = ["llama3-rope", "yarn-rope", "mistral", "qwen2", "qwen3-vl", "gemma3"]


def load(path: Path) -> None:
    """Everything that looks at a file before the first token."""
    with open_model_file(path) as file:
        config = read_config(file)
        weights_bytes(file.tensors, config)
        notes(file)
        tokenizer = tokenizer_of(file, config)
        chat_template_of(file)
        Decoder(config, NativeBackend(threads=1), file)
        if not isinstance(tokenizer, NoVocabulary):
            tokenizer.decode(tokenizer.encode("Hello, wörld <|im_end|> 12"))


def damaged_bytes(data: bytes, header_bytes: int, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 4])):
        at, kind = dice.randrange(header_bytes), dice.randrange(5)
        if kind == 0:
            changed[at] = dice.randrange(256)
        elif kind == 1:
            changed[at] ^= 1 << dice.randrange(8)
        elif kind == 2:
            width = dice.choice([4, 8])
            size = dice.choice(SIZES) & (1 << 8 * width) - 1
            changed[at : at + width] = size.to_bytes(width, "little")
        elif kind == 3:
            del changed[at : at + dice.randrange(1, 9)]
        else:
            changed[at:at] = dice.randbytes(dice.randrange(1, 9))
    return bytes(changed)


def damaged_json(value: Any, dice: random.Random) -> Any:
    """One value somewhere inside, replaced."""
    copy = json.loads(json.dumps(value))
    inside = copy
    while True:
        key = dice.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        if not isinstance(inside[key], dict | list) or not inside[key] or dice.random() < 0.3:
            inside[key] = dice.choice(VALUES)
            return copy
        inside = inside[key]


def damaged_ggufs(folder: Path, dice: random.Random) -> Iterator[Path]:
    whole = [write_tiny_gguf(folder / "tiny.gguf"), write_gguf(folder / "g.gguf", "gemma3")]
    files = [(path.read_bytes(), GgufFile.open(path).header.header_bytes) for path in whole]
    while True:
        data, header_bytes = dice.choice(files)
        (folder / "damaged.gguf").write_bytes(damaged_bytes(data, header_bytes, dice))
        yield folder / "damaged.gguf"


def damaged_folders(folder: Path, dice: random.Random) -> Iterator[Path]:
    whole = {
        name: (write_folder(folder / name, name) / "model.safetensors").read_bytes()
        for name in FOLDERS
    }
    while True:
        name = dice.choice(FOLDERS)
        config, data = CONFIGS[name], whole[name]
        length = int.from_bytes(data[:8], "little")
        kind = dice.randrange(3)
        if kind == 0:
            config = damaged_json(config, dice)
        elif kind == 1:
            data = damaged_bytes(data, 8 + length, dice)
        else:
            header = json.dumps(damaged_json(json.loads(data[8 : 8 + length]), dice)).encode()
            data = len(header).to_bytes(8, "little") + header + data[8 + length :]
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes(data)
        yield folder / name


@pytest.mark.parametrize("files", [damaged_ggufs, damaged_folders])
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_every_damage_is_a_named_error_or_harmless(
    tmp_path: Path, files: Callable[[Path, random.Random], Iterator[Path]], count: int
) -> None:
    damaged = files(tmp_path, random.Random(count))
    messages = [error_of(next(damaged)) for _ in range(count)]
    refused = [message for message in messages if message is not None]
    assert all("expected" in message for message in refused)
    assert count * 0.6 < len(refused) < count


def error_of(path: Path) -> str | None:
    """What is wrong with a file; anything but an error of ours gets through."""
    try:
        load(path)
    except KvsieveError as error:
        return str(error)
    return None
