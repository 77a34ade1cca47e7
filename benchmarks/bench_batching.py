"""Decode of several sequences together against the same ones in turn, in alternating rounds.

Both arms go through the service: in turn with one slot, together with as many as there are
sequences. Only decode steps count, from the first token to the last; in the together arm from the
moment when the last sequence has its first token to the moment when the first one ends.

    python benchmarks/bench_batching.py -m smollm2 --sequences 4 --tokens 512 --rounds 3
"""

import argparse
import threading
from statistics import median
from time import perf_counter

import numpy as np

from kvsieve import LLM, SamplingParams
from kvsieve.engine.requests import Failed, Finished, GenerationRequest, TokenEvent
from kvsieve.engine.service import Service


class Stream:
    """One request's token times."""

    def __init__(self, service: Service, ids: list[int], *, max_tokens: int) -> None:
        self.times: list[float] = []
        self.token_ids: list[int] = []
        self._ended = threading.Event()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        service.submit(GenerationRequest(prompt_ids=tuple(ids), params=params), self._take)

    def _take(self, event: object) -> None:
        if isinstance(event, TokenEvent):
            self.times.append(perf_counter())
            self.token_ids.append(event.token_id)
        elif isinstance(event, (Finished, Failed)):
            self._ended.set()

    def wait(self) -> "Stream":
        self._ended.wait()
        return self


def in_turn(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of one sequence after the other."""
    with Service(llm, max_sequences=1, cache_ram_bytes=0) as service:
        streams = [Stream(service, ids, max_tokens=max_tokens).wait() for ids in prompts]
    seconds = sum(one.times[-1] - one.times[0] for one in streams)
    return len(prompts) * (max_tokens - 1) / seconds, [one.token_ids for one in streams]


def together(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens per second while all sequences are being generated."""
    with Service(llm, max_sequences=len(prompts), cache_ram_bytes=0) as service:
        streams = [Stream(service, ids, max_tokens=max_tokens) for ids in prompts]
        for one in streams:
            one.wait()
    begin = max(one.times[0] for one in streams)
    end = min(one.times[-1] for one in streams)
    count = sum(begin < time <= end for one in streams for time in one.times)
    # All of them run for as long as the last one to begin has tokens ahead of the first to end.
    return count / (end - begin), [one.token_ids for one in streams]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-t", "--threads", type=int, default=None)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("-n", "--predict", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with LLM(options.model, threads=options.threads) as llm:
        prompts = [
            rng.integers(300, llm.config.vocab_size, options.tokens).tolist()
            for _ in range(options.sequences)
        ]
        rates: dict[str, list[float]] = {"in turn": [], "together": []}
        for _ in range(options.rounds):
            alone, said_alone = in_turn(llm, prompts, options.predict)
            # The first sequences wait for the last prompt: they need tokens for that long.
            batch, said = together(llm, prompts, 3 * options.predict)
            same = [one[: options.predict] for one in said]
            if same != said_alone:
                raise SystemExit("the two arms did not say the same tokens")
            rates["in turn"].append(alone)
            rates["together"].append(batch)
    for name, values in rates.items():
        spread = ", ".join(f"{value:.0f}" for value in values)
        print(f"{name:9} {median(values):7.1f} tokens/s   (rounds: {spread})")
    ratio = median(rates["together"]) / median(rates["in turn"])
    print(f"{options.sequences} sequences of {options.tokens} tokens together: {ratio:.2f} times")


if __name__ == "__main__":
    main()
