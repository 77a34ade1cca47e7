"""What every file of the project keeps to: its size, and that it speaks of no machine."""

import ast
import re
from pathlib import Path

import pytest

from tests.contract.project import ROOT, project_files

MAX_LINES = 400
MAX_FUNCTION_LINES = 60

_TEXT = {".py", ".cpp", ".h", ".md", ".toml", ".sh", ".txt", ".json", ".jsonl", ".cmake", ""}

_MACHINE = {
    "a path of one machine": r"/(?:work|farm|root|home/\w+|Users/\w+)/|/tmp/\w",
    "the address of a package registry": r"--(?:extra-)?index-url|pypi\.org|pythonhosted\.org",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_file_is_long() -> None:
    long = {
        relative(path): lines
        for path in project_files(".py", ".cpp", ".h", ".sh")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"more than {MAX_LINES} lines (is a noun missing?): {long}"


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring, which grows with the arrays it describes."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and ast.get_docstring(function, clean=False)
    described = first.end_lineno - first.lineno + 1 if documented and first.end_lineno else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - described


def test_no_function_is_long() -> None:
    long = {}
    for path in project_files(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (lines := code_lines(node)) > MAX_FUNCTION_LINES:
                long[f"{relative(path)}:{node.name}"] = lines
    assert not long, f"more than {MAX_FUNCTION_LINES} lines: {long}"


def machine_words(text: str) -> list[str]:
    return [
        f"{what}: {match.group()}"
        for what, pattern in _MACHINE.items()
        for match in re.finditer(pattern, text)
    ]


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = {
        relative(path): words
        for path in project_files()
        if path.suffix in _TEXT and (words := machine_words(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "open('/home/" + "ann/model.gguf')",
        "pip install --index" + "-url x",
        "https://pypi" + ".org/p",
    ],
)
def test_a_machine_is_recognised(text: str) -> None:
    assert machine_words(text)


def test_scripts_are_executable() -> None:
    scripts = [
        "demo",
        "test",
        ".ci/run",
        "scripts/setup.sh",
        "scripts/lint.sh",
        "scripts/test_arm.sh",
        "scripts/test_clients.sh",
        "scripts/test_transformers.sh",
    ]
    assert [name for name in scripts if not (ROOT / name).stat().st_mode & 0o100] == []
