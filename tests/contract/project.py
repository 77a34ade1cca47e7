"""The project's own files, as the contract tests read them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]

_MADE = {
    ".git",
    ".venv",
    "build",
    "dist",
    "report",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    ".import_linter_cache",
}


def project_files(*suffixes: str) -> list[Path]:
    """Files of the project with one of `suffixes` (none given: all), made ones left out.

    Git's list where there is one, new files included; else everything that no tool made.
    """
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        paths = [ROOT / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for p in ROOT.rglob("*") if not _MADE & set(p.relative_to(ROOT).parts)]
    return sorted(p for p in paths if p.is_file() and (not suffixes or p.suffix in suffixes))


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def code_blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Fenced blocks of `language` in a Markdown page: (line of the first line of code, code)."""
    text = page.read_text(encoding="utf-8")
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in fence.finditer(text)]
