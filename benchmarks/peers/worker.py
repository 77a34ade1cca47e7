"""An engine in a process of its own, spoken to in JSON, one line each way.

A peer that crashes, hangs or needs another interpreter then costs its own figures and no others.
"""

import json
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from peers.arms import ArmError, Prompt, Speed

SCRIPTS = Path(__file__).parent / "workers"
LIMIT_S = 1800


class Worker:
    """A running script of `workers/`."""

    def __init__(self, python: str, script: str, settings: dict[str, Any]) -> None:
        command = [python, str(SCRIPTS / script), json.dumps(settings)]
        self._messages = tempfile.TemporaryFile(  # noqa: SIM115 (closed by close)
            mode="w+", encoding="utf-8", errors="replace"
        )
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._messages,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            self._messages.close()
            raise ArmError(f"{python}: {error.strerror}") from error
        try:
            self.version = str(self._read()["version"])
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            code = self._process.wait()
            raise ArmError(f"its process ended ({code}): {self._last_message()}") from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise ArmError(f"its process ended ({self._process.wait()}): {self._last_message()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ArmError(first_line(reply["error"]))
        return reply

    def _last_message(self) -> str:
        self._messages.seek(0)
        lines = [line.strip() for line in self._messages.read().splitlines() if line.strip()]
        return lines[-1] if lines else "no message"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._messages.close()


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


class WorkerArm:
    """What the arms that live in a process share: the two requests."""

    is_peer = True
    prompts_per_run = 1

    def __init__(self, name: str, worker: Worker) -> None:
        self.name, self._worker = name, worker
        self.version = worker.version

    def measure(self, prompt: Prompt, decode_tokens: int) -> Speed:
        reply = self._worker.ask(do="measure", decode_tokens=decode_tokens, **vars(prompt))
        return Speed(**reply)

    def answer(self, prompt: Prompt, max_tokens: int) -> str | None:
        reply = self._worker.ask(do="answer", max_tokens=max_tokens, **vars(prompt))
        return str(reply["text"])

    def close(self) -> None:
        self._worker.close()
