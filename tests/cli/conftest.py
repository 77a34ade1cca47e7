from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvsieve.cli.app import main
from tests.tiny_model import write_tiny_gguf


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run of the program left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(
        tmp_path_factory.mktemp("model") / "tiny.gguf", heads=2, kv_heads=1, context=544
    )


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the program in this process: ``run("generate", "-p", "x")``."""
    for name in ("KVSIEVE_ISA", "KVSIEVE_DEBUG"):
        monkeypatch.delenv(name, raising=False)

    def run_main(*arguments: str) -> Ran:
        code = main(arguments)
        out, err = capfd.readouterr()
        return Ran(code=code, out=out, err=err)

    return run_main


@pytest.fixture
def on_tiny(run: Run, model: Path) -> Run:
    """The same, with the tiny model on the specification."""
    return lambda *arguments: run(*arguments, "-m", str(model), "--backend", "reference")
