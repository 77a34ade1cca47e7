"""docs/selection.md read aloud: the rules of sections 2 to 6, one block and one row at a time.

Plain Python on lists, slow, sharing nothing with the package. Tests feed it small integers, for
which every score is exact in any arithmetic, so that equal scores are equal on both sides.
"""

import numpy as np

Lists = list[list[list[int]]]
"""Blocks of 32 by [head][tile]."""


def block_score(q: np.ndarray, keys: np.ndarray, num_probes: int, scale: float) -> float:
    """Section 3, step 1, for the keys of one block."""
    step = max(1, len(keys) // max(1, num_probes))
    return max(float(np.dot(q, keys[at])) * scale for at in range(0, len(keys), step))


def scores_of(
    q: np.ndarray, keys: np.ndarray, *, block: int, num_probes: int, scale: float
) -> list[float]:
    starts = range(0, len(keys), block)
    return [block_score(q, keys[p0 : p0 + block], num_probes, scale) for p0 in starts]


def best(scores: dict[int, float]) -> int:
    """The block with the highest score; of equals the lower index."""
    return min(scores, key=lambda b: (-scores[b], b))


def fill(chosen: list[int], scores: list[float], k: int) -> list[int]:
    added: list[int] = []
    while len(chosen) + len(added) < k:
        left = {b: s for b, s in enumerate(scores) if b not in chosen and b not in added}
        if not left:
            break
        added.append(best(left))
    return added


def probe_rule(scores: list[float], importance: list[int] | None, k: int) -> list[int]:
    """Section 3, steps 2 to 4; `importance` by block."""
    num_blocks = len(scores)
    reserved: list[int] = []
    if importance is not None:
        reserved = fill([], [float(mass) for mass in importance], min((k + 1) // 2, num_blocks))
    filled = fill(reserved, scores, k)
    if num_blocks - 1 not in reserved + filled and filled:
        worst = min(filled, key=lambda b: (scores[b], -b))
        filled[filled.index(worst)] = num_blocks - 1
    return sorted(reserved + filled)


def guarded_rule(guards: list[int], scores: list[float], k: int) -> list[int]:
    kept: list[int] = []
    for guard in guards:
        if guard >= 0 and guard not in kept and len(kept) < k:
            kept.append(guard)
    return sorted(kept + fill(kept, scores, k))


def merged(rows: list[list[float]], compared: int) -> list[float]:
    """Max over rows of (score - that row's maximum over its first `compared` blocks)."""
    shifted = [[score - max(row[:compared]) for score in row] for row in rows]
    return [max(column) for column in zip(*shifted, strict=True)]


def in_blocks_of_32(chosen: list[int], block: int, num_blocks: int) -> list[int]:
    wide = [b * (block // 32) + i for b in chosen for i in range(block // 32)]
    return [b for b in wide if b < num_blocks]


def decode(
    q: np.ndarray,
    keys: np.ndarray,
    *,
    k: int,
    selector: str,
    share: str,
    scale: float,
    block: int = 32,
    num_probes: int = 8,
    importance: np.ndarray | None = None,
) -> Lists:
    """``q [Hq, D]``, ``keys [Hkv, n, D]``; lists per query head, or KV head under share group."""
    num_kv_heads, n, _ = keys.shape
    group = len(q) // num_kv_heads
    num_blocks = -(-n // 32)
    if not (n > 2 * 32 and -(-n // block) > k):
        return [[list(range(num_blocks))] for _ in range(num_kv_heads)]
    rows = [
        scores_of(q[h], keys[h // group], block=block, num_probes=num_probes, scale=scale)
        for h in range(len(q))
    ]
    if share == "group":
        closed = n // block  # all blocks but the open one
        rows = [merged(rows[kv * group : (kv + 1) * group], closed) for kv in range(num_kv_heads)]
    mass = None
    if importance is not None:
        mass = [int(sum(importance[p0 : p0 + block])) for p0 in range(0, n, block)]
    last = -(-n // block) - 1
    chosen = [
        probe_rule(row, mass, k)
        if selector == "probe"
        else guarded_rule([last, 0, last - 1], row, k)
        for row in rows
    ]
    return [[in_blocks_of_32(blocks, block, num_blocks)] for blocks in chosen]


def prefill(
    q: np.ndarray,
    keys: np.ndarray,
    *,
    k: int,
    scale: float,
    block: int = 32,
    num_probes: int = 8,
    exact_from: int,
) -> Lists:
    """``q [Hq, Tq, D]``, ``keys [Hkv, n, D]``; lists by [KV head][tile]."""
    num_kv_heads, n, _ = keys.shape
    group = len(q) // num_kv_heads
    start = n - q.shape[1]
    lists: Lists = []
    for kv in range(num_kv_heads):
        lists.append([])
        for tile in range(start // 32, -(-n // 32)):
            own = tile * 32 // block
            if tile < 2 or own + 1 <= k or tile >= exact_from:
                lists[kv].append(list(range(tile + 1)))
                continue
            past = keys[kv, : own * block]
            rows = [
                scores_of(q[h, p - start], past, block=block, num_probes=num_probes, scale=scale)
                for h in range(kv * group, (kv + 1) * group)
                for p in range(tile * 32, min(tile * 32 + 32, n))
            ]
            chosen = guarded_rule([own, own - 1, 0], merged(rows, own), k)
            lists[kv].append(in_blocks_of_32(chosen, block, tile + 1))
    return lists
