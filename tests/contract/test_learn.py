"""The course in docs/learn: snippets run and print what the page says; figures have a source."""

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.contract.project import ROOT

FOLDER = ROOT / "docs" / "learn"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(
    importlib.util.find_spec("kvsieve._native") is None, reason="needs the C++ core"
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run_and_print_what_the_page_says(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, in one namespace; the text block after a snippet is what it prints."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "learn"}
    printed = ""
    for match in BLOCK.finditer(text):
        line, (language, content) = text.count("\n", 0, match.start(2)), match.groups()
        if language == "python":
            exec(compile("\n" * line + content, str(page), "exec"), names)
            printed = capsys.readouterr().out
        else:
            assert printed == content


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_snippet_and_an_exercise_with_its_answer(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lesson, _, exercise = text.partition("**Exercise.**")
    assert "```python" in lesson
    assert "```text" in lesson
    answer = exercise.split("<details><summary>Answer</summary>")[1]
    checked = answer.split("```python")[1]
    assert "assert " in checked
    assert checked.rstrip().endswith("</details>")


def test_the_index_lists_the_pages_in_order() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\((\d[\w-]*\.md)\)", index) == [page.name for page in PAGES]
    titles = [page.read_text(encoding="utf-8").splitlines()[0] for page in PAGES]
    assert [f"# {title}" for title in re.findall(r"\[(\d\. [^\]]+)\]", index)] == titles
    assert len(PAGES) == 8


def figures() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "make_learn_figures.py"))


def test_every_figure_is_drawn_by_the_script_and_shown_on_a_page() -> None:
    shown = {
        name
        for page in FOLDER.glob("*.md")
        for name in re.findall(r"\]\(figures/([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    drawn = set(figures()["FIGURES"])
    assert shown == drawn == {path.name for path in (FOLDER / "figures").iterdir()}


def test_the_figures_can_be_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures()["main"](tmp_path / "figures")
    for path in (FOLDER / "figures").iterdir():
        again = (tmp_path / "figures" / path.name).read_bytes()
        assert again[:24] == path.read_bytes()[:24], f"{path.name}: another size"
