"""Loads the model while the server already listens, and answers that it is not ready yet."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from fastapi import FastAPI

from kvsieve.engine.requests import GenerationService
from kvsieve.server.app import attach
from kvsieve.server.config import ServerConfig
from kvsieve.server.served import Served

Progress = Callable[[int, int], None]

_PATIENCE_S = 10.0
"""Seconds in which a load that is not wanted any more should have noticed."""


class _NotWantedError(Exception):
    """Raised inside a load when the server is told to stop; never leaves this module."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A loaded model, and the settings of the server with what is known since."""

    served: Served
    config: ServerConfig


class Startup:
    """A model that comes to an application, and goes when the server has ended.

    load       opens the model, and closes it at its end; it gets a function to call now and then
               with how far it is
    on_loaded  called when requests can be answered
    on_failed  called when that will not be; `close` raises why
    """

    def __init__(
        self,
        app: FastAPI,
        load: Callable[[Progress], AbstractContextManager[Ready]],
        *,
        on_loaded: Callable[[Ready], None],
        on_failed: Callable[[], None],
    ) -> None:
        self._app = app
        self._load = load
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._is_over = threading.Event()
        self._service: GenerationService | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvsieve-load", daemon=True)

    def begin(self) -> None:
        """Load, in a thread of its own."""
        self._thread.start()

    def end_requests(self) -> None:
        """End what runs and waits."""
        if self._service is not None:
            self._service.close()

    def close(self) -> None:
        """Give the model back, or stop loading it; raises what went wrong with that."""
        self._is_over.set()
        if self._thread.ident is not None:
            # A service that was drained ends at once; only loading may take its time.
            self._thread.join(_PATIENCE_S if self._service is None else None)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with self._load(self._check) as ready:
                self._service = ready.served.service
                attach(self._app, ready.served, ready.config)
                self._on_loaded(ready)
                self._is_over.wait()
        except _NotWantedError:
            pass
        except BaseException as error:
            self._error = error
            self._on_failed()

    def _check(self, _done: int, _total: int) -> None:
        if self._is_over.is_set():
            raise _NotWantedError
