"""The snippets of docs/transformers.md run, one after the other, on a tiny Llama."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
pytest.importorskip("transformers", reason="make test-transformers installs it")

from tests.contract.project import ROOT, code_blocks  # noqa: E402
from tests.integrations.transformers.tiny import CACHE, llama, token_ids  # noqa: E402

PAGE = ROOT / "docs" / "transformers.md"


def test_the_snippets_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    names: dict[str, Any] = {
        "model": model,
        "folder": tmp_path,
        "inputs": {"input_ids": token_ids(1, 1200), "max_new_tokens": 3, "do_sample": False},
    }
    first, second = (code for _, code in code_blocks(PAGE, "python"))
    exec(compile(first.replace(", max_new_tokens=64", ""), str(PAGE), "exec"), names)
    assert capsys.readouterr().out.startswith("sparse 0.")
    exec(compile(second.replace("cache=cache", f"{CACHE}=cache"), str(PAGE), "exec"), names)
    assert capsys.readouterr().out.startswith("{'mode': 'sparse', 'selector': 'anchors'")
