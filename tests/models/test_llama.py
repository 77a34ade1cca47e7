"""Names and shapes of a Llama's tensors, against the list that the `gguf` package keeps."""

from pathlib import Path

import gguf
import pytest

from kvsieve.kernels.backend import LayerWeights
from kvsieve.models.config import ModelConfig
from kvsieve.models.gguf import GgufFile
from kvsieve.models.llama import MATRICES, NORMS, layer_shape, tensor_shapes
from tests.tiny_model import write_tiny_gguf


def test_tensors_of_a_file(tmp_path: Path) -> None:
    for tie in (True, False):
        path = write_tiny_gguf(tmp_path / "tiny.gguf", tie=tie, head_dim=32, kv_heads=1, layers=3)
        file = GgufFile.open(path)
        required, optional = tensor_shapes(ModelConfig.from_gguf(file))
        assert required == {name: info.shape for name, info in file.tensors.items()}
        assert optional == {"rope_freqs.weight": (16,)}


def test_names_are_the_formats() -> None:
    wanted = {
        gguf.TENSOR_NAMES[tensor] + ".weight"
        for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.LLAMA]
    }
    for part in (*MATRICES.values(), *NORMS.values()):
        assert f"blk.{{bid}}.{part}.weight" in wanted
    assert {"token_embd.weight", "output.weight", "output_norm.weight"} <= wanted
    assert "rope_freqs.weight" in wanted


def test_every_weight_of_a_layer_has_a_tensor() -> None:
    assert set(LayerWeights.__dataclass_fields__) == {*MATRICES, *NORMS}


def test_layer_shape_follows_the_configuration(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", head_dim=32, **{"llama.rope.dimension_count": 16}
    )
    shape = layer_shape(ModelConfig.from_gguf(GgufFile.open(path)))
    assert (shape.hidden_size, shape.intermediate_size) == (64, 96)
    assert (shape.num_q_heads, shape.num_kv_heads, shape.group_size) == (4, 2, 2)
    assert (shape.head_dim, shape.rope_dim, shape.rope_interleaved) == (32, 16, True)
    assert shape.attention_scale == pytest.approx(32**-0.5)
