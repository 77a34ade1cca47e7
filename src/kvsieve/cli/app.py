"""The program ``kvsieve``: its commands, and what becomes of their errors."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from kvsieve.cli.bench import bench
from kvsieve.cli.calibrate import calibrate
from kvsieve.cli.chat import chat
from kvsieve.cli.cost import cost
from kvsieve.cli.demo import demo
from kvsieve.cli.evals.measures import divergence, perplexity, recall
from kvsieve.cli.evals.questions import copy, kv, passkey, vartrack
from kvsieve.cli.evals.sweep import report, sweep
from kvsieve.cli.generate import generate
from kvsieve.cli.info import info
from kvsieve.cli.lab import lab
from kvsieve.cli.serve import serve
from kvsieve.errors import KvsieveError
from kvsieve.version import __version__

BAD_USE = 2
INTERRUPTED = 130
BROKEN_PIPE = 1
INTERNAL = 70
"""Exit codes: the user's mistake; Ctrl-C (128 + SIGINT); nobody reads our output any more (typer's
own choice); our own mistake (EX_SOFTWARE)."""

# typer carries a copy of click of its own in recent releases and uses the real one in earlier
# ones: the class of all usage errors is reached through a name that both have.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

_PROGRAM: dict[str, Any] = {
    "add_completion": False,
    "invoke_without_command": True,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": "rich",
}

app = typer.Typer(**_PROGRAM)
evals = typer.Typer(**_PROGRAM)
app.add_typer(evals, name="eval")


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvsieve {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run language models on CPUs, reading only what matters of a long context.

    \b
    Start here:
      kvsieve demo                      exact beside sparse attention
      kvsieve generate -p "Once upon"   continue a prompt
      kvsieve chat                      talk with a model
      kvsieve serve                     answer OpenAI's clients over HTTP
      kvsieve COMMAND --help            every option, with examples

    Environment: KVSIEVE_ISA forces an instruction set (see kvsieve info);
    KVSIEVE_DEBUG=1 shows where an error came from.
    """
    _help_if_alone(context)


@evals.callback()
def _evals(context: typer.Context) -> None:
    """Check what a model still finds, keeps and says when it reads only some blocks."""
    _help_if_alone(context)


for command in (generate, chat, serve, bench, calibrate, info, demo, lab, cost):
    app.command()(command)
for command in (passkey, kv, vartrack, copy, recall, divergence, perplexity, sweep, report):
    evals.command()(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; every error is one line on stderr."""
    try:
        # Not standalone: typer would print its own boxes around errors and leave by itself.
        code = app(args=arguments, standalone_mode=False, prog_name="kvsieve")
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer must not be written again when Python leaves.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    if os.environ.get("KVSIEVE_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    if isinstance(error, _UsageError):
        message = cast("typer.BadParameter", error).format_message()
    elif isinstance(error, KvsieveError):
        message = str(error)
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        message = f"{where}{error.strerror or error}"
    elif isinstance(error, MemoryError):
        message = "expected enough memory, got none left"
    else:
        message = f"internal error: {type(error).__name__}: {error} (KVSIEVE_DEBUG=1 shows more)"
        print(f"kvsieve: {' '.join(message.split())}", file=sys.stderr)
        return INTERNAL
    print(f"kvsieve: error: {' '.join(message.split())}", file=sys.stderr)
    return BAD_USE
