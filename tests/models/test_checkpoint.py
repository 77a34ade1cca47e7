"""Folders of safetensors: the index decides, and what is missing is named before weights load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvsieve.errors import ModelFileError
from kvsieve.models.checkpoint import Checkpoint
from kvsieve.models.model_file import notes, open_model_file, read_config
from tests.checkpoints import write_folder

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def full(value: float) -> np.ndarray:
    return np.full((2, 32), value, np.float32)


def folder_of(tmp_path: Path, shards: dict[str, dict[str, np.ndarray]], weight_map: Any) -> Path:
    (tmp_path / "config.json").write_text("{}")
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    if weight_map is not None:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def values(file: Checkpoint, name: str) -> np.ndarray:
    return file.raw(name).view(np.float32)


# -- case STS-02 -----------------------------------------------------------------------------


def test_sts_02_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {ONE: {"a": full(1)}}, {"a": ONE, "b": TWO})
    with pytest.raises(ModelFileError, match=f"got none called {TWO}$"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("stray", ["model.safetensors", "consolidated.safetensors"])
def test_sts_02_a_stray_file_is_not_looked_at(tmp_path: Path, stray: str) -> None:
    shards = {ONE: {"a": full(1)}, TWO: {"b": full(2)}, stray: {"a": full(9), "c": full(9)}}
    file = Checkpoint.open(folder_of(tmp_path, shards, {"a": ONE, "b": TWO}))
    assert list(file.tensors) == ["a", "b"]
    assert (values(file, "a") == 1).all()
    (tmp_path / stray).write_bytes(b"not even a safetensors file")
    assert list(Checkpoint.open(tmp_path).tensors) == ["a", "b"]


def test_sts_02_the_index_decides_where_two_shards_have_a_name(tmp_path: Path) -> None:
    shards = {ONE: {"a": full(1), "b": full(1)}, TWO: {"b": full(2)}}
    file = Checkpoint.open(folder_of(tmp_path, shards, {"a": ONE, "b": TWO}))
    assert (values(file, "b") == 2).all()


def test_sts_02_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    shards = {ONE: {"a": full(1)}, TWO: {"b": full(2)}}
    folder = folder_of(tmp_path, shards, {"a": ONE, "b": TWO, "c": ONE, "d": TWO})
    with pytest.raises(ModelFileError, match=rf"expected 'c' in {ONE}.*\(2 such\)"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "place",
    ["../model.safetensors", "sub/x.safetensors", "/etc/passwd", "..", "", 3, "model.bin", "a\\b"],
)
def test_sts_02_a_shard_is_a_file_in_the_folder(tmp_path: Path, place: Any) -> None:
    save_file({"a": full(1)}, tmp_path / "model.safetensors")
    (tmp_path / "inner").mkdir()
    folder = folder_of(tmp_path / "inner", {}, {"a": place})
    with pytest.raises(ModelFileError, match="'a': expected the name of a safetensors file"):
        Checkpoint.open(folder)


def test_sts_02_one_file_needs_no_index(tmp_path: Path) -> None:
    file = Checkpoint.open(folder_of(tmp_path, {"model.safetensors": {"a": full(4)}}, None))
    assert (values(file, "a") == 4).all()
    assert file.file_bytes == (tmp_path / "model.safetensors").stat().st_size


# -- what else may be wrong with a folder --------------------------------------------------------


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [({}, "weight_map: expected an object"), ([], "weight_map"), (None, "got none called model.s")],
)
def test_no_weights(tmp_path: Path, weight_map: Any, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        Checkpoint.open(folder_of(tmp_path, {}, weight_map))


def test_config_json_must_be_there_and_an_object(tmp_path: Path) -> None:
    save_file({"a": full(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"config\.json: expected a readable file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"config\.json: the file: expected a JSON object"):
        Checkpoint.open(tmp_path)


def test_the_language_model_of_a_larger_one(tmp_path: Path) -> None:
    """Qwen3-VL and both layouts of Gemma 3: plain names, the image tower left out and counted."""
    tensors = {
        "model.language_model.norm.weight": full(1),
        "language_model.model.embed_tokens.weight": full(2),
        "language_model.lm_head.weight": full(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": full(4),
        "model.visual.patch.weight": full(5),
        "vision_tower.patch.weight": full(5),
        "multi_modal_projector.weight": full(5),
    }
    file = Checkpoint.open(folder_of(tmp_path, {"model.safetensors": tensors}, None))
    wanted = {"model.norm.weight": 1, "model.embed_tokens.weight": 2, "lm_head.weight": 3}
    assert {name: values(file, name)[0] for name in file.tensors} == wanted
    assert file.skipped_vision == 3
    assert notes(file) == ("text only: 3 tensors of the image tower are left out",)
    doubled = tensors | {"model.norm.weight": full(1)}
    with pytest.raises(ModelFileError, match=r"expected one tensor 'model\.norm\.weight'"):
        Checkpoint.open(folder_of(tmp_path, {"model.safetensors": doubled}, None))


def test_fingerprints_tell_checkpoints_apart(tmp_path: Path) -> None:
    first = open_model_file(write_folder(tmp_path / "a", "llama"))
    same = open_model_file(write_folder(tmp_path / "b", "llama"))
    assert first.fingerprint() == same.fingerprint()
    other = open_model_file(write_folder(tmp_path / "c", "linear-rope"))
    changed = write_folder(tmp_path / "d", "llama", changes={"rope_theta": 5e5})
    prints = {one.fingerprint() for one in (first, other, open_model_file(changed))}
    assert len(prints) == 3
    assert all(len(one) == 16 for one in prints)


def test_a_name_is_the_folders(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "My-Model-1B", "qwen2")
    config = read_config(open_model_file(folder))
    assert (config.name, config.source, config.architecture) == (
        "My-Model-1B",
        "checkpoint",
        "qwen2",
    )
