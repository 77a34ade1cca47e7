import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "make_cli_docs.py"))
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == script["page"](), "run: python scripts/make_cli_docs.py"


def test_help_lines_fit_a_terminal_of_80_columns() -> None:
    from typer.main import get_command

    from kvsieve.cli.app import app

    def helps(command) -> list[str]:  # type: ignore[no-untyped-def]
        found = [command.help or ""]
        for child in getattr(command, "commands", {}).values():
            found += helps(child)
        return found

    for text in helps(get_command(app)):
        # Rich keeps line breaks: a line that is too long would be broken twice.
        assert max(map(len, text.splitlines())) <= 78
