"""Write docs/cli.md from the commands themselves: ``python scripts/make_cli_docs.py``.

Only what the project declares goes in (names, metavars, defaults, help), so the page does not
depend on the release of typer that reads it.
"""

import inspect
from pathlib import Path
from typing import Any

import typer

from kvsieve.cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

HEAD = """# The command line

<!-- Written by scripts/make_cli_docs.py from the help of the commands: change those instead. -->

Errors are one line on stderr, `kvsieve: error: ...`. Exit codes: 0, 2 (a bad option, file or
prompt), 130 (Ctrl-C), 70 (a mistake of ours; `KVSIEVE_DEBUG=1` shows where).
"""


def page() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    return HEAD + "".join(_section(name, command) for name, command in _leaves("kvsieve", root))


def _leaves(name: str, command: Any) -> list[tuple[str, Any]]:
    """A command and all below it, in the order in which they were added."""
    found = [(name, command)]
    for child, sub in getattr(command, "commands", {}).items():
        found += _leaves(f"{name} {child}", sub)
    return found


def _section(name: str, command: Any) -> str:
    text = inspect.cleandoc(command.help or "")
    paragraphs = [_paragraph(part) for part in text.split("\n\n")]
    blocks = [f"## {name}", *paragraphs]
    for panel, options in _panels(command).items():
        table = ["| option | default | |", "| --- | --- | --- |", *map(_row, options)]
        blocks += [f"**{panel}**", "\n".join(table)]
    return "".join(f"\n{block}\n" for block in blocks)


def _paragraph(text: str) -> str:
    """Prose as it is; what follows a backspace character keeps its lines."""
    if not text.startswith("\b"):
        return text
    title, *lines = text.removeprefix("\b\n").splitlines()
    return f"{title}\n\n```\n{inspect.cleandoc(chr(10).join(['', *lines]))}\n```"


def _panels(command: Any) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if "--help" not in parameter.opts:
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append(parameter)
    return panels


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    value = f" {option.metavar}" if option.metavar else ""
    return f"| {names}{value} | {_default(option)} | {_escaped(option.help)} |"


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return _escaped(option.show_default)
    if option.default is None or option.default is False or option.default == []:
        return ""
    return _escaped(f"{option.default}")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
