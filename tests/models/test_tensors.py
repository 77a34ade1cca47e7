"""Names and shapes of tensors, for every architecture, against the `gguf` package's lists."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest

from kvsieve.kernels.backend import LayerWeights
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf import GgufFile
from kvsieve.models.registry import ARCHITECTURES
from kvsieve.models.tensors import layer_matrices, layer_norms, layer_shape, tensor_shapes
from tests.tiny_model import write_tiny_gguf

FORMAT = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
HEAD_NORMS = {"llama": set(), "qwen3": {"q_norm", "k_norm"}}


def tiny(tmp_path: Path, **options: Any) -> GgufFile:
    return GgufFile.open(write_tiny_gguf(tmp_path / "tiny.gguf", **options))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tie", [True, False])
def test_tensors_of_a_file(tmp_path: Path, architecture: Any, tie: bool) -> None:
    file = tiny(
        tmp_path, architecture=architecture, tie=tie, head_dim=32, kv_heads=1, layers=3, heads=5
    )
    required, optional = tensor_shapes(ModelConfig.from_gguf(file))
    assert required == {name: info.shape for name, info in file.tensors.items()}
    assert optional == ({"rope_freqs.weight": (16,)} if architecture == "llama" else {})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_the_formats(tmp_path: Path, architecture: Any) -> None:
    wanted = {
        gguf.TENSOR_NAMES[tensor].format(bid=1) + ".weight"
        for tensor in gguf.MODEL_TENSORS[FORMAT[architecture]]
    }
    config = ModelConfig.from_gguf(tiny(tmp_path, architecture=architecture, tie=False))
    required, optional = tensor_shapes(config)
    names = {name for name in (*required, *optional) if not name.startswith("blk.0.")}
    assert names <= wanted
    # What is left over: experts and biases of other models of the name, and tables nobody writes.
    unused = {name for name in wanted - names if "exp" not in name and "rot_embd" not in name}
    assert unused <= {"rope_freqs.weight", "blk.1.ffn_gate_inp.weight"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_of_a_layer_has_a_tensor(tmp_path: Path, architecture: Any) -> None:
    config = ModelConfig.from_gguf(tiny(tmp_path, architecture=architecture))
    fields = {*layer_matrices(config, 0), *layer_norms(config, 0)}
    always = {f.name for f in dataclasses.fields(LayerWeights) if f.default is dataclasses.MISSING}
    assert fields == always | HEAD_NORMS[architecture]


def test_layer_shape_follows_the_configuration(tmp_path: Path) -> None:
    rope = {"llama.rope.dimension_count": 16}
    shape = layer_shape(ModelConfig.from_gguf(tiny(tmp_path, head_dim=32, **rope)))
    assert (shape.hidden_size, shape.intermediate_size) == (64, 96)
    assert (shape.num_q_heads, shape.num_kv_heads, shape.group_size) == (4, 2, 2)
    assert (shape.head_dim, shape.rope_dim, shape.rope_interleaved) == (32, 16, True)
    assert shape.attention_scale == pytest.approx(32**-0.5)


def test_qwen3_rotates_halves(tmp_path: Path) -> None:
    shape = layer_shape(ModelConfig.from_gguf(tiny(tmp_path, architecture="qwen3", head_dim=32)))
    assert (shape.head_dim, shape.rope_dim, shape.rope_interleaved) == (32, 32, False)
    assert shape.attention_scale == pytest.approx(32**-0.5)
