"""Signs of life on stderr, and only where stderr is a terminal."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class StatusBar:
    """One line with a bar that is gone when it ends; silent unless stderr is a terminal.

    A context manager. `begin` names what runs, `advance` says how far it is, `close` takes the
    line away before something is printed; the next `begin` brings it back.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # Rich would send what is printed meanwhile to stderr, even if stdout is a file.
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> "StatusBar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self, description: str, *, total: int | None = None) -> None:
        """Name what runs now; a bar without a total only shows that something does."""
        self._progress.start()
        self._progress.reset(self._task, description=description, total=total)

    def advance(self, done: int, total: int) -> None:
        """How far a prompt is: the shape of the engine's `on_progress`."""
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Take the line away, so that text may follow on the same terminal."""
        self._progress.stop()
