"""Controls must fail: what looks at no key loses a key in the middle, what looks at keys finds it.

A cache of 4,000 random tokens with one key that the query asks for, planted in block 62 of 125.
"""

import numpy as np
import pytest

from kvsieve.kernels.native import NativeBackend
from tests.kernels.test_anchors import plan
from tests.kernels.test_vectors import Chosen

TOKENS, NEEDLE = 4000, 62
K = 16


def haystack(selector: str, *, offset: int) -> Chosen:
    context = Chosen(selector, TOKENS, heads=4, kv_heads=2)
    random = np.random.default_rng(3)
    # Of one length, so that no key of the haystack is a needle by chance.
    for array, length in ((context.k, 1.0), (context.q, 6.0)):
        array[:] = random.standard_normal(array.shape)
        array *= length * array.shape[2] ** 0.5 / np.linalg.norm(array, axis=2, keepdims=True)
    needle = context.k[NEEDLE * 32 + offset]
    needle[:] = random.standard_normal(needle.shape)
    needle *= 2 * 32**0.5 / np.linalg.norm(needle, axis=1, keepdims=True)
    asked = 3 * np.repeat(needle, 2, axis=0)
    context.q[-1] = asked
    context.q[(NEEDLE + 2) * 32 - 1] = asked  # the row that chooses anchors attends to it
    return context.fill(NativeBackend(threads=2), chunk=512)


def finds(context: Chosen, **settings: object) -> float:
    """Share of the query heads whose list holds the needle's block."""
    segment, q = context.decode(plan(selector=context.selector, k=K, **settings))
    lists = NativeBackend(threads=1).select(segment, 0, q, scale=context.scale)
    assert lists is not None
    rows = np.split(lists.indices, lists.indptr[1:-1])
    assert all(len(row) == K for row in rows)
    return float(np.mean([NEEDLE in row for row in rows]))


@pytest.mark.parametrize(
    "selector", ["probe", "even", "anchors", "minmax", "mean", "meanstd", "oracle"]
)
@pytest.mark.parametrize("share", ["head", "group"])
def test_who_looks_at_keys_finds_the_needle(selector: str, share: str) -> None:
    assert finds(haystack(selector, offset=16), share=share) == 1


@pytest.mark.parametrize("selector", ["anchors", "minmax", "meanstd", "oracle"])
def test_wherever_in_its_block_it_lies(selector: str) -> None:
    """Evenly spaced keys see 8 of 32; what stands for all keys sees any."""
    assert finds(haystack(selector, offset=17)) == 1
    assert finds(haystack("even", offset=17)) < 1


@pytest.mark.parametrize("share", ["head", "group"])
def test_controls_lose_it(share: str) -> None:
    assert finds(haystack("window", offset=16), share=share) == 0
    context = haystack("random", offset=16)
    found = [finds(context, share=share, seed=seed) for seed in range(200)]
    # 13 of the 122 blocks beside the guards are drawn.
    assert 0.07 < np.mean(found) < 0.15
