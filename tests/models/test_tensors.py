"""Names and shapes of tensors, for every architecture, against the `gguf` package's lists."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest

from kvsieve.kernels.backend import LayerWeights
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf import GgufFile
from kvsieve.models.model_file import open_model_file, read_config
from kvsieve.models.registry import ARCHITECTURES
from kvsieve.models.tensors import (
    layer_matrices,
    layer_shape,
    layer_vectors,
    optional_vectors,
    tensor_shapes,
)
from tests.checkpoints import (
    CONFIGS,
    NOT_IN_A_GGUF,
    gguf_architecture,
    write_folder,
    write_gguf,
)
from tests.tiny_model import write_tiny_gguf

FORMAT = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
HEAD_NORMS = {"q_norm", "k_norm"}
BIASES = {"q_bias", "k_bias", "v_bias"}
PARTS = {
    "llama": set(),
    "qwen2": BIASES,
    "qwen3": HEAD_NORMS,
    "qwen3vl": HEAD_NORMS,
    "gemma3": HEAD_NORMS | {"attn_post_norm", "ffn_post_norm"},
}
GGUFS = {gguf_architecture(n): n for n in reversed(list(CONFIGS)) if n not in NOT_IN_A_GGUF}
"""The plainest model of each architecture."""


def tiny(tmp_path: Path, **options: Any) -> GgufFile:
    return GgufFile.open(write_tiny_gguf(tmp_path / "tiny.gguf", **options))


def gguf_config(tmp_path: Path, architecture: str) -> ModelConfig:
    path = write_gguf(tmp_path / "tiny.gguf", GGUFS[architecture])
    return ModelConfig.from_gguf(GgufFile.open(path))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_of_a_file(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "gguf" and name in NOT_IN_A_GGUF:
        pytest.skip("this model does not fit a GGUF")
    write = {"folder": write_folder, "gguf": write_gguf}[kind]
    file = open_model_file(write(tmp_path / "model", name))
    required, optional = tensor_shapes(read_config(file))
    found = {name: info.shape for name, info in file.tensors.items()}
    assert required.items() <= found.items() <= {**required, **optional}.items()


@pytest.mark.parametrize("tie", [True, False])
def test_tensors_that_some_files_have(tmp_path: Path, tie: bool) -> None:
    file = tiny(tmp_path, tie=tie, head_dim=32, kv_heads=1, layers=1, heads=5)
    required, optional = tensor_shapes(ModelConfig.from_gguf(file))
    assert required == {name: info.shape for name, info in file.tensors.items()}
    assert optional == {
        "rope_freqs.weight": (16,),
        "blk.0.attn_q.bias": (160,),
        "blk.0.attn_k.bias": (32,),
        "blk.0.attn_v.bias": (32,),
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_the_formats(tmp_path: Path, architecture: Any) -> None:
    wanted = {
        gguf.TENSOR_NAMES[tensor].format(bid=1) + ".weight"
        for tensor in gguf.MODEL_TENSORS[FORMAT[architecture]]
    }
    config = gguf_config(tmp_path, architecture)
    required, optional = tensor_shapes(config)
    names = {name for name in (*required, *optional) if name.startswith(("blk.1.", "out", "tok"))}
    assert {name for name in names if not name.endswith(".bias")} <= wanted
    assert {name.replace(".bias", ".weight") for name in names} <= wanted
    # What is left over: experts of other models of the name, tables nobody writes, and the output
    # matrix where it is the embedding.
    unused = {name for name in wanted - names if "exp" not in name and "rot_embd" not in name}
    assert unused <= {"rope_freqs.weight", "blk.1.ffn_gate_inp.weight", "output.weight"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_of_a_layer_has_a_tensor(tmp_path: Path, architecture: Any) -> None:
    config = gguf_config(tmp_path, architecture)
    fields = {*layer_matrices(config, 0), *layer_vectors(config, 0)}
    always = {f.name for f in dataclasses.fields(LayerWeights) if f.default is dataclasses.MISSING}
    assert fields == always | PARTS[architecture]
    may_have = set() if architecture in ("qwen2", "gemma3") else BIASES
    assert set(optional_vectors(config, 0)) == may_have


def test_layer_shape_follows_the_configuration(tmp_path: Path) -> None:
    rope = {"llama.rope.dimension_count": 16}
    shape = layer_shape(ModelConfig.from_gguf(tiny(tmp_path, head_dim=32, **rope)))
    assert (shape.hidden_size, shape.intermediate_size) == (64, 96)
    assert (shape.num_q_heads, shape.num_kv_heads, shape.group_size) == (4, 2, 2)
    assert (shape.head_dim, shape.rope_dim, shape.rope_interleaved) == (32, 16, True)
    assert (shape.gate, shape.window) == ("silu", 0)
    assert shape.attention_scale == pytest.approx(32**-0.5)


def test_qwen3_rotates_halves(tmp_path: Path) -> None:
    shape = layer_shape(ModelConfig.from_gguf(tiny(tmp_path, architecture="qwen3", head_dim=32)))
    assert (shape.head_dim, shape.rope_dim, shape.rope_interleaved) == (32, 32, False)
    assert shape.attention_scale == pytest.approx(32**-0.5)


def test_gemma3_has_a_window_in_five_of_six_layers(tmp_path: Path) -> None:
    config = gguf_config(tmp_path, "gemma3")
    shapes = [layer_shape(config, layer) for layer in range(7)]
    assert [shape.window for shape in shapes] == [40, 40, 40, 40, 40, 0, 40]
    assert {shape.gate for shape in shapes} == {"gelu"}
