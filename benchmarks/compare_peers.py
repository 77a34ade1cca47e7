"""Speed of kvsieve beside other CPU engines, on the same file, in alternating rounds of one run.

    python benchmarks/compare_peers.py --depths 512,4096 --rounds 3

Arms: kvsieve exact and sparse (q8_0 cache), and llama.cpp through `llama-cpp-python` where that is
installed (f16 and q8_0 cache, flash attention on). Every round runs every arm once at every depth.
A figure is the median over rounds, a ratio the median of the per-round ratios to the named base
arm, with its lowest and highest value. Other work on the machine disturbs both sides.
"""

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvsieve import LLM, SamplingParams, SparseAttention
from kvsieve.engine.model_loader import resolve_model

DECODE_TOKENS = 24


@dataclass(frozen=True)
class Speed:
    prefill_s: float
    decode_ms: float


class KvsieveArm:
    """Our engine with one attention setting."""

    def __init__(self, llm: LLM, name: str, sparse: SparseAttention | None) -> None:
        self.name, self._llm, self._sparse = name, llm, sparse

    def measure(self, tokens: Sequence[int]) -> Speed:
        params = SamplingParams(max_tokens=DECODE_TOKENS + 1, ignore_eos=True)
        done = self._llm.generate(list(tokens), params, sparse=self._sparse)
        wants_sparse = self._sparse is not None and len(tokens) > 32 * self._sparse.k + 128
        if wants_sparse and done.attention.mode != "sparse":
            raise RuntimeError(f"{self.name} ran exactly: {done.attention.exact_because}")
        decode = statistics.median(token.total_ms for token in done.tokens)
        return Speed(done.timings.prompt_ms / 1e3, decode)


class LlamaCppArm:
    """llama.cpp by package, through its C interface: no Python between tokens."""

    def __init__(self, model: Path, cache_type: str, threads: int) -> None:
        import llama_cpp

        self._lib, self._threads = llama_cpp, threads
        self.name = f"llama.cpp {cache_type}"
        self._type = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}[cache_type]
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)

    def measure(self, tokens: Sequence[int]) -> Speed:
        lib = self._lib
        params = lib.llama_context_default_params()
        params.n_ctx = len(tokens) + DECODE_TOKENS + 8
        params.n_batch, params.n_ubatch = 2048, 512
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = 1
        params.type_k = params.type_v = self._type
        context = lib.llama_init_from_model(self._model, params)
        try:
            start = time.perf_counter()
            for at in range(0, len(tokens), 2048):
                self._decode(context, tokens[at : at + 2048])
            prefill = time.perf_counter() - start
            steps = [self._step(context, token) for token in tokens[:DECODE_TOKENS]]
        finally:
            lib.llama_free(context)
        return Speed(prefill, statistics.median(steps))

    def _step(self, context: object, token: int) -> float:
        start = time.perf_counter()
        self._decode(context, [token])
        self._lib.llama_get_logits(context)
        return 1e3 * (time.perf_counter() - start)

    def _decode(self, context: object, tokens: Sequence[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        code = self._lib.llama_decode(context, self._lib.llama_batch_get_one(array, len(tokens)))
        if code:
            raise RuntimeError(f"llama_decode returned {code}")


def build_arms(model: Path, threads: int, wanted: Sequence[str]) -> list[KvsieveArm | LlamaCppArm]:
    llm = LLM(model, threads=threads)
    sparse = SparseAttention(k=32, selector="even", share="group")
    makers: dict[str, Callable[[], KvsieveArm | LlamaCppArm]] = {
        "exact": lambda: KvsieveArm(llm, "kvsieve exact", None),
        "sparse": lambda: KvsieveArm(llm, "kvsieve sparse k=32", sparse),
        "llama-f16": lambda: LlamaCppArm(model, "f16", threads),
        "llama-q8_0": lambda: LlamaCppArm(model, "q8_0", threads),
    }
    arms = []
    for name in wanted:
        try:
            arms.append(makers[name]())
        except ImportError as error:
            print(f"left out {name}: {error}", file=sys.stderr)
    return arms


def run(arms: Sequence[KvsieveArm | LlamaCppArm], depths: Sequence[int], rounds: int) -> dict:
    """speeds[depth][arm name] -> one Speed per round; the first round is a warm-up and not kept."""
    rng = np.random.default_rng(0)
    prompts = {depth: rng.integers(100, 30_000, depth).tolist() for depth in depths}
    speeds = {depth: {arm.name: [] for arm in arms} for depth in depths}
    for round_number in range(rounds + 1):
        for depth in depths:
            for arm in arms:
                speed = arm.measure(prompts[depth] if round_number else prompts[depth][:256])
                if round_number:
                    speeds[depth][arm.name].append(speed)
                print(
                    f"\rround {round_number}/{rounds}, {depth} tokens, {arm.name:24}",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
    print(file=sys.stderr)
    return speeds


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(speeds: dict, base: str) -> str:
    lines = [
        f"| depth | engine | prefill tokens/s | decode ms | prefill against {base} | decode |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for depth, by_arm in speeds.items():
        for name, rounds in by_arm.items():
            prefill = statistics.median(depth / speed.prefill_s for speed in rounds)
            decode = statistics.median(speed.decode_ms for speed in rounds)
            ratios = ["", ""]
            if base in by_arm and name != base:
                pairs = list(zip(rounds, by_arm[base], strict=True))
                ratios = [
                    spread([other.prefill_s / own.prefill_s for own, other in pairs]),
                    spread([other.decode_ms / own.decode_ms for own, other in pairs]),
                ]
            cells = [f"{depth:,}", name, f"{prefill:,.0f}", f"{decode:.2f}", *ratios]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{cpu}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--depths", default="512,4096")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arms", default="exact,sparse,llama-f16")
    parser.add_argument("--base", default="llama.cpp f16", help="the arm that ratios are against")
    parser.add_argument("--json", type=Path, help="also write every round's figures here")
    args = parser.parse_args()
    arms = build_arms(resolve_model(args.model), args.threads, args.arms.split(","))
    speeds = run(arms, [int(depth) for depth in args.depths.split(",")], args.rounds)
    print(f"{machine()}; {args.threads} threads, {args.rounds} rounds\n")
    print(report(speeds, args.base))
    if args.json:
        plain = {
            depth: {name: [vars(speed) for speed in rounds] for name, rounds in by_arm.items()}
            for depth, by_arm in speeds.items()
        }
        args.json.write_text(json.dumps({"machine": machine(), "speeds": plain}, indent=1) + "\n")


if __name__ == "__main__":
    main()
