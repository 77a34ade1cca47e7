"""Selectors by vectors, and the controls: native against the specification, caches of every type.

The cache, the plans and the drawn keys are those of `test_anchors`.
"""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import Backend, BlockLists, Segment, SparsePlan
from kvsieve.kernels.layout import summary_layout
from kvsieve.kernels.native import NativeBackend, supported_isas
from kvsieve.kernels.reference.backend import ReferenceBackend
from kvsieve.types import CacheType
from tests.kernels.test_anchors import HEAD_DIM, KV_HEADS, Context, plan

ISAS = [name for name, supported in supported_isas().items() if supported]
VECTORS = ["minmax", "mean", "meanstd"]
NEW = [*VECTORS, "oracle", "random"]


class Chosen(Context):
    """A `Context` with the index of one selector, poisoned, or none."""

    def __init__(self, selector: str, num_tokens: int, **fields: object) -> None:
        super().__init__(num_tokens, **fields)  # type: ignore[arg-type]
        layout = summary_layout(selector, head_dim=self.segment.layout.head_dim)
        index = None
        if layout is not None:
            kv_heads = self.segment.pages.shape[2]
            shape = (1, layout.num_groups(num_tokens), kv_heads, layout.record_bytes)
            index = np.full(shape, 255, np.uint8)
        self.segment = replace(self.segment, index_layout=layout, index=index)
        self.selector = selector

    def sparse(self, **changes: object) -> SparsePlan:
        return plan(selector=self.selector, **changes)

    def fill(self, backend: Backend, *, chunk: int = 64, end: int | None = None) -> "Chosen":
        for start in range(0, len(self.q), chunk):
            rows = slice(start, min(start + chunk, len(self.q)))
            part = self.rows(rows.start, rows.stop, self.sparse(), is_prefill=True)
            backend.append(part, 0, self.k[rows], self.v[rows])
            backend.select(part, 0, self.q[rows], scale=self.scale)
        return self


def same(got: BlockLists | None, expected: BlockLists | None) -> None:
    if got is None or expected is None:
        assert got is expected
        return
    np.testing.assert_array_equal(got.indptr, expected.indptr)
    np.testing.assert_array_equal(got.indices, expected.indices)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k_type", ["q8_0", "q4_0", "f16", "f32"])
@pytest.mark.parametrize("selector", VECTORS)
def test_the_index_is_the_specifications_byte_for_byte(
    isa: str, k_type: CacheType, selector: str
) -> None:
    native = Chosen(selector, 333, k_type=k_type).fill(NativeBackend(isa=isa, threads=2))
    reference = Chosen(selector, 333, k_type=k_type).fill(ReferenceBackend())
    np.testing.assert_array_equal(native.records(), reference.records())


def test_bounds_are_rounded_alike_however_small_the_keys_are() -> None:
    native, reference = Chosen("minmax", 160), Chosen("minmax", 160)
    for context, backend in ((native, NativeBackend(threads=1)), (reference, ReferenceBackend())):
        context.segment = replace(
            context.segment, layout=replace(context.segment.layout, k_type="f32")
        )
        layout = context.segment.layout
        pages = np.full((1, 6, KV_HEADS, layout.page_bytes), 255, np.uint8)
        context.segment = replace(context.segment, pages=pages)
        context.k[:32] *= 1e-43  # denormals, a scale of 0 among them
        context.k[32:64] = 0
        context.k[64:96, :, 1::2] = 0
        context.fill(backend)
    np.testing.assert_array_equal(native.records(), reference.records())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("selector", NEW)
@pytest.mark.parametrize("share", ["head", "group"])
def test_a_decoded_token_reads_the_same_blocks(isa: str, selector: str, share: str) -> None:
    native, reference = NativeBackend(isa=isa, threads=2), ReferenceBackend()
    # 2 blocks and one token; open, full and just begun blocks; 17 blocks and more fill a group.
    # The oracle's arithmetic is slow.
    for num_tokens in (65, 97, 577) if selector == "oracle" else (65, 96, 97, 128, 333, 545, 577):
        context = Chosen(selector, num_tokens, seed=num_tokens).fill(native)
        for k, size in ((1, 32), (2, 32), (3, 64), (5, 32), (4, 96), (100, 32)):
            segment, q = context.decode(context.sparse(k=k, share=share, block_size=size))
            got = native.select(segment, 0, q, scale=context.scale)
            same(got, reference.select(segment, 0, q, scale=context.scale))
            if got is not None:
                assert (got.indices[got.indptr[1:] - 1] == (num_tokens - 1) // 32).all()
            scores = native.score_blocks(segment, 0, q, scale=context.scale)
            expected = reference.score_blocks(segment, 0, q, scale=context.scale)
            if selector == "oracle":
                np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-9)
            else:
                np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize("selector", NEW)
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("start", [0, 320, 333])
def test_prompt_tiles_read_the_same_blocks(selector: str, block_size: int, start: int) -> None:
    native, reference = NativeBackend(threads=2), ReferenceBackend()
    context = Chosen(selector, 700).fill(native)
    for k in (1, 2, 6):
        sparse = context.sparse(k=k, block_size=block_size, exact_from_tile=20)
        segment = context.rows(start, 700, sparse, is_prefill=True)
        got = native.select(segment, 0, context.q[start:], scale=context.scale)
        same(got, reference.select(segment, 0, context.q[start:], scale=context.scale))
        assert got is not None


@pytest.mark.parametrize("k_type", ["q4_0", "f16", "f32"])
@pytest.mark.parametrize("selector", NEW)
def test_other_caches_read_the_same_blocks(k_type: CacheType, selector: str) -> None:
    native, reference = NativeBackend(threads=1), ReferenceBackend()
    context = Chosen(selector, 333, k_type=k_type).fill(native)
    for size in (32, 64):
        segment, q = context.decode(context.sparse(share="group", block_size=size, k=3))
        got = native.select(segment, 0, q, scale=context.scale)
        same(got, reference.select(segment, 0, q, scale=context.scale))


@pytest.mark.parametrize("selector", [*VECTORS, "oracle"])
def test_equal_blocks_go_to_the_lower_index(selector: str) -> None:
    context = Chosen(selector, 640)
    context.k[:] = np.tile(context.k[:32], (20, 1, 1))
    for backend in (NativeBackend(threads=2), ReferenceBackend()):
        context.fill(backend)
        segment, q = context.decode(context.sparse(k=6))
        lists = backend.select(segment, 0, q, scale=context.scale)
        assert lists is not None
        assert lists.indices.reshape(-1, 6).tolist() == [[0, 1, 2, 3, 18, 19]] * 6


@pytest.mark.parametrize("selector", VECTORS)
@pytest.mark.parametrize("chunk", [1, 31, 96, 333])
def test_the_index_does_not_depend_on_chunks(selector: str, chunk: int) -> None:
    native = NativeBackend(threads=2)
    whole = Chosen(selector, 333).fill(native, chunk=512).records()
    np.testing.assert_array_equal(Chosen(selector, 333).fill(native, chunk=chunk).records(), whole)


@pytest.mark.parametrize("selector", VECTORS)
@pytest.mark.parametrize("backend", [NativeBackend(threads=2), ReferenceBackend()])
def test_running_on_after_a_cut_gives_the_same_records(selector: str, backend: Backend) -> None:
    """Cut inside a block that was full: its record is another text's until it is full again."""
    straight, cut = Chosen(selector, 333).fill(backend), Chosen(selector, 333).fill(backend)
    other = Chosen(selector, 333, seed=1)
    for source in (other, straight):
        for start, end in ((130, 140), (140, 141), (141, 333)):
            rows = slice(start, end)
            part = cut.rows(start, end, cut.sparse(), is_prefill=end - start > 1)
            backend.append(part, 0, source.k[rows], source.v[rows])
            got = backend.select(part, 0, source.q[rows], scale=cut.scale)
            if source is straight and end == 141:  # 4 full blocks, and what stays of the fifth
                fresh = Chosen(selector, 141)
                fresh.k[:], fresh.q[:] = straight.k[:141], straight.q[:141]
                segment, q = fresh.fill(backend).decode(fresh.sparse())
                same(got, backend.select(segment, 0, q, scale=fresh.scale))
    np.testing.assert_array_equal(cut.records(), straight.records())


@pytest.mark.parametrize("selector", NEW)
@pytest.mark.parametrize("threads", [1, 3, 16])
def test_threads_change_nothing(selector: str, threads: int) -> None:
    one, many = NativeBackend(threads=1), NativeBackend(threads=threads)
    context, other = Chosen(selector, 577).fill(one), Chosen(selector, 577).fill(many)
    for part, backend in ((context, one), (other, many)):
        segment, q = part.decode(part.sparse())
        part.lists = backend.select(segment, 0, q, scale=part.scale)  # type: ignore[attr-defined]
    same(other.lists, context.lists)  # type: ignore[attr-defined]
    if context.segment.index is not None:
        np.testing.assert_array_equal(other.records(), context.records())


@pytest.mark.parametrize("num_tokens", [1, 10, 31, 32, 33, 50, 64, 97])
@pytest.mark.parametrize("selector", [*NEW, "anchors"])
def test_all_blocks_are_read_where_they_fit(selector: str, num_tokens: int) -> None:  # ATT-06
    native, reference = NativeBackend(threads=1), ReferenceBackend()
    context = Chosen(selector, num_tokens).fill(native)
    segment, q = context.decode(context.sparse(k=4))
    for backend in (native, reference):
        assert backend.select(segment, 0, q, scale=context.scale) is None
    scores = native.score_blocks(segment, 0, q, scale=context.scale)
    assert scores.shape == (6, -(-num_tokens // 32))
    expected = reference.score_blocks(segment, 0, q, scale=context.scale)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    if segment.index is not None:
        bare = replace(segment, index=None, index_layout=None)
        with pytest.raises(ConfigError, match=f"expected one of {selector}, got none"):
            native.score_blocks(bare, 0, q, scale=context.scale)


@pytest.mark.parametrize("selector", VECTORS)
def test_a_selector_needs_its_index(selector: str) -> None:
    context = Chosen(selector, 333)
    segment, q = context.decode(context.sparse())
    other = summary_layout("mean" if selector == "minmax" else "minmax", head_dim=HEAD_DIM)
    for backend in (NativeBackend(threads=1), ReferenceBackend()):
        for wrong in (
            replace(segment, index=None, index_layout=None),
            replace(segment, index_layout=other),
        ):
            with pytest.raises(ConfigError, match=f"expected one of {selector}, got "):
                backend.select(wrong, 0, q, scale=context.scale)


def test_a_strided_selector_leaves_an_index_of_vectors_alone() -> None:
    """A sequence keeps one index; another rule over it reads the pages."""
    native, reference = NativeBackend(threads=1), ReferenceBackend()
    context = Chosen("mean", 333).fill(native)
    segment, q = context.decode(plan(selector="even", k=3))
    got = native.select(segment, 0, q, scale=context.scale)
    same(got, reference.select(segment, 0, q, scale=context.scale))


class TestOracle:
    """The controls by what they promise."""

    def exact(self, context: Context, segment: Segment, backend: Backend) -> np.ndarray:
        """Attention of the last row per block and query head, in float64, from the cache."""
        from tests.kernels.reference.caches import stored

        whole = replace(segment, start=0, q_len=segment.start + segment.q_len)
        group = context.q.shape[1] // KV_HEADS
        rows = []
        for head in range(context.q.shape[1]):
            keys = stored(whole, head // group, "k")
            logits = keys @ context.q[-1, head].astype(np.float64) * context.scale
            weights = np.exp(logits - logits.max())
            starts = np.arange(0, len(keys), 32)
            rows.append(np.add.reduceat(weights, starts) / weights.sum())
        return np.stack(rows)

    @pytest.mark.parametrize("backend", [NativeBackend(threads=2), ReferenceBackend()])
    def test_its_scores_are_the_attention_of_each_block(self, backend: Backend) -> None:
        context = Chosen("oracle", 333, k_type="f32").fill(backend)
        segment, q = context.decode(context.sparse())
        scores = backend.score_blocks(segment, 0, q, scale=context.scale)
        np.testing.assert_allclose(scores, self.exact(context, segment, backend), rtol=2e-4)

    @pytest.mark.parametrize("share", ["head", "group"])
    def test_a_mass_budget_takes_what_it_needs(self, share: str) -> None:
        context, native = Chosen("oracle", 640), NativeBackend(threads=1)
        context.fill(native)
        sparse = context.sparse(mass=0.6, k_min=2, k=18, share=share)
        segment, q = context.decode(sparse)
        got = native.select(segment, 0, q, scale=context.scale)
        same(got, ReferenceBackend().select(segment, 0, q, scale=context.scale))


class TestRandom:
    def draw(self, backend: Backend, *, seed: int = 0, layer: int = 0, n: int = 3200) -> set[int]:
        context = Chosen("random", n)
        pages = np.zeros((3, *context.segment.pages.shape[1:]), np.uint8)
        context.segment = replace(context.segment, pages=pages)
        segment, q = context.decode(context.sparse(seed=seed, k=20, share="group"))
        lists = backend.select(segment, layer, q, scale=1.0)
        assert lists is not None
        return set(lists.indices[:20].tolist())

    @pytest.mark.parametrize("backend", [NativeBackend(threads=2), ReferenceBackend()])
    def test_guards_are_kept_and_the_rest_is_drawn_anew(self, backend: Backend) -> None:
        usual = self.draw(backend)
        assert {0, 98, 99} <= usual
        changes: tuple[dict[str, int], ...] = ({"seed": 1}, {"layer": 1}, {"n": 3199})
        others = [self.draw(backend, **change) for change in changes]
        assert all(len(usual & other) < 15 for other in others)

    def test_these_blocks_and_no_others(self) -> None:
        """Frozen: from splitting the hash by hand in Python integers (see docs/selection.md)."""

        def mix(x: int) -> int:
            x = (x + 0x9E3779B97F4A7C15) % 2**64
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            return x ^ x >> 31

        key = mix(mix(mix(mix(5) ^ 2) ^ 0) ^ 3199)
        numbers = {b: mix(key ^ b) >> 40 for b in range(1, 98)}
        best = sorted(numbers, key=lambda b: (-numbers[b], b))[:17]
        assert self.draw(NativeBackend(threads=1), seed=5, layer=2) == {0, 98, 99, *best}
