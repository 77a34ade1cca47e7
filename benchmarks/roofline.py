"""How near decode comes to the memory: bytes read per second of each part, beside a plain read.

    python benchmarks/roofline.py -m smollm2 -t 2 --depths 512,4096,8000 --rounds 5

Bytes are counted (`kvsieve.lab`, packed weights), times are the engine's own. Exact and sparse
(k=32, even, shared by group) alternate; a plain read of 256 MiB by as many threads runs before each
round. Figures are medians over rounds, of medians over tokens. Prefill is given in operations per
second, 2 per multiplication and addition: its bound is the dot-product instruction.
"""

import argparse
import math
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter

import numpy as np

from kvsieve import LLM, SamplingParams, SparseAttention
from kvsieve.engine.memory import weights_bytes
from kvsieve.engine.model_loader import resolve_model
from kvsieve.lab.ledger import ledger
from kvsieve.lab.reading import Rule
from kvsieve.lab.shape import ModelShape
from kvsieve.models.gguf import GgufFile

SPARSE = SparseAttention(k=32, selector="even", share="group")
ARMS = {"exact": None, "sparse": SPARSE}
TOKENS = 24
READ_BYTES = 256 * 2**20


def plain_read(buffer: np.ndarray, pool: ThreadPoolExecutor, threads: int) -> float:
    """GB/s of the fastest of five reads of `buffer`, shared out among `threads`."""
    parts = np.array_split(buffer, threads)
    best = float("inf")
    for _ in range(5):
        start = perf_counter()
        list(pool.map(np.bitwise_or.reduce, parts))
        best = min(best, perf_counter() - start)
    return buffer.nbytes / best / 1e9


def layer_values(model: str) -> int:
    """Values of the matrices in the layers: one multiplication and addition each per token."""
    with GgufFile.open(resolve_model(model)) as file:
        return sum(
            math.prod(tensor.shape)
            for name, tensor in file.tensors.items()
            if name.startswith("blk.") and len(tensor.shape) > 1
        )


def run_once(llm: LLM, ids: list[int], arm: str) -> dict[str, float]:
    """Milliseconds by part: a decoded token's medians, and the whole prompt's."""
    params = SamplingParams(max_tokens=TOKENS + 1, ignore_eos=True)
    done = llm.generate(ids, params, sparse=ARMS[arm])
    times = done.timings
    return {
        "dense": median(t.dense_ms for t in done.tokens),
        "attention": median(t.attention_ms for t in done.tokens),
        "select": median(t.select_ms for t in done.tokens),
        "total": median(t.total_ms for t in done.tokens),
        "prompt dense": times.prompt_dense_ms,
        "prompt attention": times.prompt_attention_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--depths", default="512,4096,8000")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    depths = [int(part) for part in args.depths.split(",")]
    llm = LLM(args.model, threads=args.threads, ctx_size=max(depths) + TOKENS + 1)
    config = llm.config
    shape = ModelShape.from_config(config, k_type="q8_0", v_type="q8_0")
    values = layer_values(args.model)
    with GgufFile.open(resolve_model(args.model)) as file:
        weights = weights_bytes(file.tensors, config)
    prompts = {
        d: np.random.default_rng(d).integers(0, config.vocab_size, d).tolist() for d in depths
    }
    buffer = np.ones(READ_BYTES // 8, np.int64)
    found: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    reads = []
    with ThreadPoolExecutor(args.threads) as pool:
        for number in range(args.rounds):
            reads.append(plain_read(buffer, pool, args.threads))
            for depth in depths:
                for arm in ARMS:
                    for part, ms in run_once(llm, prompts[depth], arm).items():
                        found[depth, arm][part].append(ms)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    read = median(reads)
    print(f"{config.name}, {llm.info.isa}, {args.threads} threads; plain read {read:.1f} GB/s\n")
    print("| depth | part | MB | ms | GB/s | of a plain read |")
    print("| --- | --- | --- | --- | --- | --- |")
    for depth in depths:
        times = {arm: {p: median(ms) for p, ms in found[depth, arm].items()} for arm in ARMS}
        costs = ledger(shape, Rule(sparse=SPARSE), n_tokens=depth + TOKENS // 2)
        rows = [
            ("dense", weights, times["exact"]["dense"]),
            ("exact attention", costs.exact_token.cache_bytes, times["exact"]["attention"]),
            ("sparse attention", costs.rule_token.cache_bytes, times["sparse"]["attention"]),
        ]
        if times["sparse"]["select"] > 0:
            rows.append(("selection", costs.rule_token.index_bytes, times["sparse"]["select"]))
        for part, size, ms in rows:
            rate = size / ms / 1e6
            shown = f"{size / 1e6:.1f} | {ms:.2f} | {rate:.1f} | {rate / read:.0%}"
            print(f"| {depth:,} | {part} | {shown} |")
        for arm in ARMS:
            print(f"| {depth:,} | whole token, {arm} | | {times[arm]['total']:.2f} | | |")
    print("\n| depth | part of exact prefill | G operations | ms | G operations/s |")
    print("| --- | --- | --- | --- | --- |")
    for depth in depths:
        times = {p: median(ms) for p, ms in found[depth, "exact"].items()}
        flop = ledger(shape, Rule(sparse=SPARSE), n_tokens=depth).exact_prompt.attention_flop
        for part, work in (("dense", 2 * values * depth), ("attention", flop)):
            ms = times[f"prompt {part}"]
            print(f"| {depth:,} | {part} | {work / 1e9:.0f} | {ms:.0f} | {work / ms / 1e6:.0f} |")


if __name__ == "__main__":
    main()
