"""Rounds in which every engine runs once at every depth, in an order that rotates."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kvsieve.errors import KvsieveError
from kvsieve.evals.corpus import PasskeyPrompt
from kvsieve.evals.passkey import ANSWER_TOKENS, is_hit
from peers.arms import Arm, ArmError, Prompt, Speed
from peers.figures import Answer

T = TypeVar("T")
Speeds = dict[int, dict[str, list[Speed]]]

WARM_UP_TOKENS = 512
WARM_UP_STEPS = 4
SETTLE_S = 0.3
"""Between runs: threads of the engine before may still spin in wait for work."""

ATTENTION_DOUBLES_AT = 4000
"""For the estimate only: SmolLM2's exact attention costs about as much as the rest from here."""


def rotated(items: Sequence[T], by: int) -> list[T]:
    at = by % len(items)
    return [*items[at:], *items[:at]]


def run_seconds(warm: Speed, depth: int, *, decode_tokens: int, prompts_per_run: int = 1) -> float:
    """A guess at one run from how fast a short one went."""
    growth = 1 + depth / ATTENTION_DOUBLES_AT
    prefill_ms = prompts_per_run * depth * warm.prefill_ms
    return growth * (prefill_ms + decode_tokens * warm.decode_ms) / 1e3


class Rounds:
    """Runs arms and keeps their figures; an arm that fails is left out from there on."""

    def __init__(self, arms: Sequence[Arm], *, decode_tokens: int) -> None:
        self.arms, self._decode_tokens = list(arms), decode_tokens
        self.left_out: list[str] = []
        self._warm: dict[str, Speed] = {}

    def leave_out(self, name: str, why: str) -> None:
        self.left_out.append(f"{name}: {why}")
        say(f"left out {name}: {why}")

    def _try(self, what: str, run: Callable[[], T]) -> T | None:
        """The figures of a run, or None after one line that says why there are none."""
        time.sleep(SETTLE_S)
        try:
            return run()
        except (ArmError, KvsieveError, ValueError, KeyError, TypeError) as error:
            self.leave_out(what, str(error))
            return None

    def warm_up(self, prompt: Prompt) -> None:
        for arm in list(self.arms):
            speed = self._try(arm.name, partial(arm.measure, prompt, WARM_UP_STEPS))
            if speed is None:
                self.arms.remove(arm)
            else:
                self._warm[arm.name] = speed

    def estimate(self, depths: Sequence[int]) -> float:
        """Seconds that one run of every arm at every one of `depths` may take."""
        return sum(
            SETTLE_S
            + run_seconds(
                self._warm[arm.name],
                depth,
                decode_tokens=self._decode_tokens,
                prompts_per_run=arm.prompts_per_run,
            )
            for arm in self.arms
            for depth in depths
        )

    def time_all(self, prompts: Mapping[int, Prompt], rounds: int) -> Speeds:
        """``speeds[depth][arm name]``: one Speed per round."""
        speeds: Speeds = {depth: {arm.name: [] for arm in self.arms} for depth in prompts}
        start = time.perf_counter()
        for i in range(rounds):
            for depth, prompt in prompts.items():
                for arm in rotated(self.arms, i):
                    if arm.name in speeds[depth]:
                        self._time_one(arm, prompt, speeds[depth], f"round {i + 1}/{rounds}")
            spent = time.perf_counter() - start
            if i + 1 < rounds:
                say(f"about {minutes(spent / (i + 1) * (rounds - i - 1))} to go")
        return speeds

    def _time_one(
        self, arm: Arm, prompt: Prompt, speeds: dict[str, list[Speed]], place: str
    ) -> None:
        depth = len(prompt.token_ids)
        run = self._try(
            f"{arm.name} at {depth:,}", partial(arm.measure, prompt, self._decode_tokens)
        )
        if run is None:
            # A ratio needs both sides of every round.
            del speeds[arm.name]
            return
        speeds[arm.name].append(run)
        figures = f"prefill {1e3 / run.prefill_ms:,.0f} tokens/s, decode {run.decode_ms:.2f} ms"
        say(f"{place}, {depth:,} tokens, {arm.name}: {figures}")

    def ask_all(self, questions: Sequence[PasskeyPrompt]) -> list[Answer]:
        answers: list[Answer] = []
        for question in questions:
            prompt = Prompt(token_ids=question.token_ids, text=question.text)
            for arm in self.arms:
                what = f"{arm.name}, pass key in {len(question.token_ids):,} tokens"
                reply = self._try(what, partial(arm.answer, prompt, ANSWER_TOKENS))
                if reply is None:
                    continue
                hit = is_hit(reply, question.key)
                say(f"{what}: {'found' if hit else 'lost'}")
                answers.append(
                    Answer(
                        engine=arm.name,
                        prompt_tokens=len(question.token_ids),
                        depth=question.depth,
                        key=question.key,
                        reply=" ".join(reply.split()),
                        hit=hit,
                    )
                )
        return answers


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
