"""Renders chat templates in a process of its own, which can be ended when one does not end.

The sandbox counts what a template does, but it counts in the process that serves everybody: a
template from a stranger runs here instead, with bounds on processor time and memory that the
system enforces. The two processes exchange JSON with its length in front; neither runs what the
other sends.
"""

import contextlib
import json
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from kvsieve.engine.chat_template import ChatTemplate
from kvsieve.engine.template_sandbox import MAX_OUTPUT_CHARS
from kvsieve.errors import ConfigError, TemplateError

MAX_MEMORY_BYTES = 1 << 30
"""Address space of the worker: a Python with Jinja takes 0.1 GiB, the longest text 0.1 more."""

MAX_REPLY_BYTES = 8 * MAX_OUTPUT_CHARS
"""A character of JSON takes at most six bytes of ASCII (twelve for a pair)."""

_LENGTH = struct.Struct(">Q")
_COMMAND = "from kvsieve.engine.template_worker import main; main()"


class TemplateWorker:
    """A `ChatTemplate` at arm's length: the same `render`, in another process.

    cpu_s   processor time of one rendering; the system ends the worker beyond it
    wall_s  time of one rendering by the clock: a last resort, for a worker that hangs

    TemplateError if the template does not compile. After a worker was ended, the next rendering
    starts another. Shared by threads, which take turns.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        cpu_s: int = 5,
        wall_s: float = 600.0,
    ) -> None:
        if not isinstance(cpu_s, int) or cpu_s < 1:
            raise ConfigError(f"[TemplateWorker] cpu_s: expected at least 1 second, got {cpu_s!r}")
        self.source = source
        self._opening = {
            "source": source,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "cpu_s": cpu_s,
        }
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation, as `ChatTemplate.render` gives it.

        TemplateError if the template fails, refuses the messages, or outlives its bounds.
        """
        values = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
            "extra": dict(extra or {}),
        }
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(values)

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal goes to a whole session: the server ends its worker itself.
            start_new_session=True,
        )
        try:
            self._ask(self._opening)
        except TemplateError:
            self._end()
            raise

    def _ask(self, values: Mapping[str, Any]) -> str:
        process = self._process
        assert process is not None  # made by the callers
        assert process.stdin is not None  # made with pipes, above
        assert process.stdout is not None
        alarm = threading.Timer(self._wall_s, process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            _write(process.stdin, values)
            reply = _read(process.stdout, limit=MAX_REPLY_BYTES)
        except OSError:
            reply = None
        finally:
            alarm.cancel()
        if reply is None:
            self._end()
            raise TemplateError(
                "[ChatTemplate] source: expected to end within "
                f"{self._cpu_s} s of processor time and {MAX_MEMORY_BYTES >> 20} MiB, got more"
            )
        if "error" in reply:
            raise TemplateError(str(reply["error"]))
        return str(reply["text"])

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # What was written to a process that is gone cannot be flushed any more.
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


def main() -> None:
    """The worker's side: a template first, then one conversation after the other."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MAX_MEMORY_BYTES)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    # What a library prints must not end up between the replies.
    sys.stdout = sys.stderr
    opening = _read(requests, limit=None)
    if opening is None:
        return
    cpu_s = opening.pop("cpu_s")
    _allow(cpu_s)
    try:
        template = ChatTemplate(**opening)
    except TemplateError as error:
        _write(replies, {"error": str(error)})
        return
    _write(replies, {"text": ""})
    while (values := _read(requests, limit=None)) is not None:
        _allow(cpu_s)
        try:
            reply = {"text": template.render(values.pop("messages"), **values)}
        except TemplateError as error:
            reply = {"error": str(error)}
        _write(replies, reply)


def _allow(cpu_s: int) -> None:
    """Let this process use so many more seconds of processor time, after which it is ended."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + cpu_s + 1)


def _limit(what: int, value: int) -> None:
    """Set a soft limit, as far as the hard one that this process was given allows."""
    hard = resource.getrlimit(what)[1]
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (allowed, hard))


def _write(pipe: IO[bytes], values: Mapping[str, Any]) -> None:
    data = json.dumps(values).encode("ascii")
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes], *, limit: int | None) -> dict[str, Any] | None:
    """The next message; None if the other side is gone or says more than `limit` bytes."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if limit is not None and length > limit:
        return None
    data = pipe.read(length)
    if len(data) < length:
        return None
    values: dict[str, Any] = json.loads(data)
    return values
