"""A grid on the tiny model: its cells, going on after a stop, and the page that shows it."""

import re
from pathlib import Path

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.llm import LLM
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.evals import sweep as module
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.report import html_table, summary, write_report
from kvsieve.evals.store import Identity, ResultStore
from kvsieve.evals.sweep import TASKS, Grid, Sweep, grid_arms, identity_of

SMALL = {
    "settings": ["B"],
    "lengths": [300],
    "depths": [0.5],
    "positions": 4,
    "queries": 4,
    "texts": ["natural"],
}


def grid(**changes) -> Grid:  # type: ignore[no-untyped-def]
    arms = grid_arms(["even", "probe"], [3], sparse=SparseAttention(dense_tail=0))
    return Grid(**{"tasks": ["passkey"], "arms": arms, **SMALL, **changes})


def test_the_grid_is_every_selector_with_every_budget_beside_exact() -> None:
    arms = grid_arms(["even", "probe"], [4, 8], sparse=SparseAttention(share="group"))
    assert [arm.label for arm in arms] == [
        "exact",
        "sparse:k=4,selector=even,share=group",
        "sparse:k=8,selector=even,share=group",
        "sparse:k=4,selector=probe,share=group",
        "sparse:k=8,selector=probe,share=group",
    ]
    with pytest.raises(ConfigError, match="selector"):
        grid_arms(["best"], [4], sparse=SparseAttention())


def test_cells_are_all_different_and_each_task_has_its_settings(llm: LLM) -> None:
    made = Sweep(llm, grid(tasks=list(TASKS), settings=["B", "C"], depths=[0.1, 0.9]))
    counts = {task: sum(cell.task == task for cell in made.cells) for task in TASKS}
    # Exact and 2 arms in 2 settings: 5 trials, at 2 depths; recall has no exact one, divergence
    # is relative to it; perplexity and speed run in setting C alone.
    assert counts == {
        "passkey": 10, "kv": 10, "vartrack": 10, "copy": 10,
        "recall": 4, "divergence": 4, "perplexity": 3, "speed": 3,
    }  # fmt: skip
    assert len({cell.key for cell in made.cells}) == len(made.cells)


def test_a_sweep_goes_on_where_it_stopped(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.db"
    whole = grid(tasks=["passkey", "recall"], depths=[0.1, 0.9])
    started: list[str] = []
    with ResultStore.create(path, identity_of(llm)) as store:
        for number, _ in enumerate(Sweep(llm, whole).run(store)):
            if number == 3:  # the row that was just given is kept
                break
    with ResultStore.create(path, identity_of(llm)) as store:
        rest = Sweep(llm, whole)
        assert len(rest.cells) == 8
        rows = list(
            rest.run(store, on_cell=lambda cell, done: started.append(f"{done} {cell.name}"))
        )
    assert len(rows) == 4
    assert started[0].startswith("4 passkey, 300 tokens, depth 0.9")
    assert started[-1].startswith("7 recall")
    monkeypatch.setattr(module, "ask", None)
    monkeypatch.setattr(module, "measure_recall", None)
    with ResultStore.create(path, identity_of(llm)) as store:
        assert list(Sweep(llm, whole).run(store)) == []
        assert (len(store.rows("passkey")), len(store.rows("recall"))) == (6, 2)


def test_cells_that_would_compare_exact_with_exact_are_refused_or_left_out(llm: LLM) -> None:
    arms = parse_arms(["exact", "sparse:k=4,tail=32", "sparse:k=16,tail=32"])
    for task in TASKS:
        with pytest.raises(ConfigError, match="fit the budget of 16"):
            Sweep(llm, grid(tasks=[task], arms=arms))
        left = Sweep(llm, grid(tasks=[task], arms=arms, skip_exact=True)).cells
        assert {cell.trial.arm.label for cell in left} - {"exact"} == {"sparse:k=4,tail=32"}


def test_what_a_grid_cannot_be_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="tasks: expected some of passkey, kv"):
        grid(tasks=["riddle"])
    with pytest.raises(ConfigError, match="a depth, got none"):
        grid(depths=[])
    for task in ("kv", "recall"):
        with pytest.raises(CapacityError, match="at most 5"):
            Sweep(llm, grid(tasks=[task], lengths=[300, 600]))


@pytest.fixture(scope="module")
def results(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "results.db"
    arms = grid_arms(["even"], [3, 6], sparse=SparseAttention(dense_tail=0))
    with ResultStore.create(path, identity_of(llm)) as store:
        rows = [row for _, row in Sweep(llm, grid(tasks=list(TASKS), arms=arms)).run(store)]
    assert {row["setting"] for row in rows} == {"any", "B", "C"}
    return path


def test_the_page_needs_no_other_file_and_shows_every_task(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with ResultStore.read(results) as store:
        page, *pictures = write_report(store, tmp_path / "report")
        identity = str(store.identity)
    html = page.read_text(encoding="utf-8")
    assert identity in html
    assert {path.stem for path in pictures} == set(TASKS) - {"perplexity"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert len(sources) == len(pictures)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert html.count("<table>") == len(TASKS)
    assert "sparse:k=6,selector=even,tail=0" in html


def test_an_empty_file_of_results_has_no_page(tmp_path: Path) -> None:
    who = Identity(model="m", fingerprint="f", version="v", cache_type="q8_0")
    store = ResultStore.create(tmp_path / "r.db", who)
    with store, pytest.raises(ConfigError, match="at least one row"):
        write_report(store, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def answer(attn: str, setting: str, length: int, **changes):  # type: ignore[no-untyped-def]
    return {
        "task": "kv", "attn": attn, "setting": setting, "length": length, "depth": 0.5, "seed": 0,
        "answer": "7", "hit": True, "score": 1.0, "logprob": -1.0, "top1": 1.0, "density": 0.5,
        **changes,
    }  # fmt: skip


def test_a_summary_counts_by_length_and_compares_answers_with_exact() -> None:
    lines = summary([
        answer("exact", "any", 100), answer("exact", "any", 200, answer="8", hit=False, score=0.0),
        answer("sparse", "B", 100, logprob=-3.0),
        answer("sparse", "B", 200, answer="9", hit=False, score=0.5),
        answer("sparse", "C", 200, answer="8", hit=False, score=0.0),
    ])  # fmt: skip
    exact, b, c = lines
    assert (exact["right"], exact["right at 100"], exact["right at 200"]) == (
        "1 of 2", "1 of 1", "0 of 1",
    )  # fmt: skip
    assert (b["right"], b["as_exact"], b["score"], b["logprob"]) == ("1 of 2", 0.5, 0.75, -2.0)
    assert (c["right at 100"], c["as_exact"]) == ("", 1.0)


def test_cells_of_a_table_are_text_not_html() -> None:
    table = html_table([{"attn": "<b>&", "kl": 0.25, "none": None}])
    assert "&lt;b&gt;&amp;" in table
    assert "none" not in table
