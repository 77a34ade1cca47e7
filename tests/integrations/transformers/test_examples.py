"""The example that needs no model runs, and says what its text promises."""

import runpy

import pytest

pytest.importorskip("torch", reason="make test-transformers installs it")
pytest.importorskip("transformers", reason="make test-transformers installs it")

from tests.contract.project import ROOT


def test_the_tiny_qwen3_vl(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "transformers_qwen3_vl.py"), run_name="__main__")
    head, exact, eight_bits, sparse = capsys.readouterr().out.splitlines()
    assert head == "516 tokens, 64 of them the picture's"
    errors = [float(line.split(" by ")[1].split(";")[0]) for line in (exact, eight_bits, sparse)]
    assert errors[0] < 1e-5 < errors[1] < errors[2]
    assert "ran sparse" in sparse
