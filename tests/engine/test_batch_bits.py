"""BAT-01: a sequence's logits are the same bits alone, in a batch, and behind a cached prefix."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.service import Service
from kvsieve.kernels.backend import StepStats
from kvsieve.types import F32
from tests.engine.serving import MODES, Client, make_ids
from tests.tiny_model import write_tiny_gguf

THREADS = (1, 2, 3, 7, 16)
PROMPTS = (200, 33, 131, 64)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("kvsieve._native", reason="the C++ core is not built")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, head_dim=32, weight_type="Q8_0", context=256)


class Recorder:
    """Notes the logits of every sequence, by the length of its prompt."""

    def __init__(self, llm: LLM) -> None:
        self.logits: dict[int, list[F32]] = {}
        self.largest_batch = 0
        self._runner = llm.engine.runner
        self._forward = self._runner.forward
        self._runner.forward = self._note  # type: ignore[method-assign]

    def _note(self, batch: object, **settings: object) -> tuple[list[F32 | None], StepStats]:
        logits, stats = self._forward(batch, **settings)  # type: ignore[arg-type]
        self.largest_batch = max(self.largest_batch, len(batch.steps))  # type: ignore[attr-defined]
        for step, rows in zip(batch.steps, logits, strict=True):  # type: ignore[attr-defined]
            if rows is not None:
                self.logits.setdefault(step.sequence.prompt_len, []).append(rows.copy())
        return logits, stats

    def take(self) -> dict[int, list[bytes]]:
        taken = {length: [one.tobytes() for one in rows] for length, rows in self.logits.items()}
        self.logits.clear()
        return taken


@pytest.fixture(params=THREADS)
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(path, threads=request.param, prefill_chunk=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(path: Path) -> dict[str, dict[int, list[bytes]]]:
    """Logits of each mode and prompt, one at a time, on one thread."""
    found = {}
    with LLM(path, threads=1) as llm:
        recorder = Recorder(llm)
        for name, sparse in MODES.items():
            with Service(llm, max_sequences=1, cache_ram_bytes=0) as service:
                for count in PROMPTS:
                    Client(service, make_ids(count, seed=count), sparse=sparse).wait()
            found[name] = recorder.take()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_alone_in_a_batch_and_from_the_cache(
    llm: LLM, alone: dict[str, dict[int, list[bytes]]], mode: str
):
    recorder = Recorder(llm)
    with Service(llm, cache_ram_bytes=1 << 24) as service:
        for _ in range(2):
            clients = [
                Client(service, make_ids(count, seed=count), sparse=MODES[mode])
                for count in PROMPTS
            ]
            for client in clients:
                client.wait()
            # The second round begins behind what the first one left.
            assert recorder.take() == alone[mode]
        assert all(client.cached for client in clients)
    assert recorder.largest_batch > 1


def test_the_recorder_sees_differences(alone: dict[str, dict[int, list[bytes]]]):
    assert alone["exact"][200] != alone["even"][200]
    first = np.frombuffer(alone["exact"][200][0], np.float32)
    assert np.isfinite(first).all()
    assert len(alone["exact"][200]) == 8
