"""Selector `anchors`: native against the specification, over caches of every type."""

from dataclasses import replace

import numpy as np
import pytest

from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import Backend, Segment, SparsePlan
from kvsieve.kernels.layout import AnchorLayout, PageLayout
from kvsieve.kernels.native import NativeBackend, supported_isas
from kvsieve.kernels.reference.backend import ReferenceBackend
from kvsieve.kernels.reference.logits import fold_queries
from kvsieve.kernels.reference.pages import read_keys
from kvsieve.types import F32, CacheType
from tests.kernels.test_native_layer import angles, build, layer_shape

ISAS = [name for name, supported in supported_isas().items() if supported]
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32


def plan(**changes: object) -> SparsePlan:
    usual = SparsePlan(
        selector="anchors",
        k=4,
        block_size=32,
        num_probes=8,
        share="head",
        exact_from_tile=1000,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


class Context:
    """A cache of one layer whose keys, values and queries are drawn from a seed."""

    def __init__(
        self,
        num_tokens: int,
        *,
        k_type: CacheType = "q8_0",
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        head_dim: int = HEAD_DIM,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        shape = (num_tokens, kv_heads, head_dim)
        common = 2 * random.standard_normal(head_dim)  # keys and queries lean one way, as real ones
        self.k = (random.standard_normal(shape) + common).astype(np.float32)
        self.v = random.standard_normal(shape).astype(np.float32)
        queries = random.standard_normal((num_tokens, heads, head_dim))
        self.q = (2 * queries + common).astype(np.float32)
        layout = PageLayout(k_type=k_type, v_type="f32", head_dim=head_dim)
        index_layout = AnchorLayout(head_dim=head_dim)
        blocks = -(-num_tokens // 32)
        self.segment = Segment(
            start=0,
            q_len=num_tokens,
            is_prefill=True,
            layout=layout,
            pages=np.full((1, blocks + 1, kv_heads, layout.page_bytes), 255, np.uint8),
            block_table=np.roll(np.arange(blocks + 1, dtype=np.int32), 1)[:blocks],
            index_layout=index_layout,
            index=np.full(
                (1, index_layout.num_groups(num_tokens), kv_heads, index_layout.record_bytes),
                255,
                np.uint8,
            ),
        )
        self.scale = head_dim**-0.5

    def rows(self, start: int, end: int, sparse: SparsePlan, *, is_prefill: bool) -> Segment:
        return replace(
            self.segment, start=start, q_len=end - start, sparse=sparse, is_prefill=is_prefill
        )

    def fill(self, backend: Backend, *, chunk: int = 64, end: int | None = None) -> "Context":
        """Append and select in chunks, as an engine does with a prompt."""
        stop = len(self.q) if end is None else end
        for start in range(0, stop, chunk):
            rows = slice(start, min(start + chunk, stop))
            part = self.rows(rows.start, rows.stop, plan(), is_prefill=True)
            backend.append(part, 0, self.k[rows], self.v[rows])
            backend.select(part, 0, self.q[rows], scale=self.scale)
        return self

    def decode(self, sparse: SparsePlan) -> tuple[Segment, F32]:
        last = len(self.q) - 1
        return self.rows(last, last + 1, sparse, is_prefill=False), self.q[last:]

    def true_masses(self, segment: Segment, head: int, q: F32 | None = None) -> np.ndarray:
        """exp(logit) over the tokens of each block for the last row, from the keys as stored.

        `q` is f32 ``[D]`` with the scale folded in, or None: this head's of the last row.
        """
        blocks = np.arange(-(-len(self.k) // 32), dtype=np.int32)
        keys = read_keys(segment, 0, head * KV_HEADS // HEADS, blocks).floats().astype(np.float64)
        if q is None:
            folded = fold_queries(self.q[-1:], self.segment.layout.k_type, scale=self.scale)
            q = folded.floats()[0, head]
        weights = np.exp(keys[: len(self.k)] @ q.astype(np.float64))
        return np.asarray(np.add.reduceat(weights, 32 * blocks))

    def true_shares(self, segment: Segment, head: int) -> np.ndarray:
        masses = self.true_masses(segment, head)
        return np.asarray(masses / masses.sum())

    def records(self) -> np.ndarray:
        assert self.segment.index is not None
        return self.segment.index


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k_type", ["q8_0", "q4_0", "f16", "f32"])
def test_the_index_is_the_specifications_byte_for_byte(isa: str, k_type: CacheType) -> None:
    native = Context(333, k_type=k_type).fill(NativeBackend(isa=isa, threads=2))
    reference = Context(333, k_type=k_type).fill(ReferenceBackend())
    np.testing.assert_array_equal(native.records(), reference.records())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize(
    "num_tokens", [65, 96, 97, 127, 128, 129, 333, 545, 576, 577]
)  # 2 blocks and one token; open, full and just begun blocks; 17 blocks and more fill a group
def test_a_decoded_token_reads_the_same_blocks(isa: str, share: str, num_tokens: int) -> None:
    context = Context(num_tokens, seed=num_tokens)
    native, reference = NativeBackend(isa=isa, threads=2), ReferenceBackend()
    context.fill(native)
    for k in (1, 2, 3, 5, 100):
        segment, q = context.decode(plan(k=k, share=share))
        got = native.select(segment, 0, q, scale=context.scale)
        expected = reference.select(segment, 0, q, scale=context.scale)
        if expected is None:
            assert got is None
            continue
        assert got is not None
        np.testing.assert_array_equal(got.indices, expected.indices)
        np.testing.assert_array_equal(got.indptr, expected.indptr)
        assert (got.indices[got.indptr[1:] - 1] == (num_tokens - 1) // 32).all()
    shares = native.score_blocks(segment, 0, q, scale=context.scale)
    np.testing.assert_allclose(
        shares, reference.score_blocks(segment, 0, q, scale=context.scale), rtol=1e-5, atol=1e-9
    )
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("mass", [0.0, 0.7])
@pytest.mark.parametrize("block_size", [32, 64])
def test_prompt_tiles_read_the_same_blocks(mass: float, block_size: int) -> None:
    context = Context(700)
    native, reference = NativeBackend(threads=2), ReferenceBackend()
    context.fill(native)
    sparse = plan(mass=mass, k_min=2, k=6, block_size=block_size, exact_from_tile=20)
    segment = context.rows(0, 700, sparse, is_prefill=True)
    got = native.select(segment, 0, context.q, scale=context.scale)
    expected = reference.select(segment, 0, context.q, scale=context.scale)
    assert got is not None
    assert expected is not None
    np.testing.assert_array_equal(got.indptr, expected.indptr)
    np.testing.assert_array_equal(got.indices, expected.indices)


@pytest.mark.parametrize("share", ["head", "group"])
def test_a_mass_budget_takes_what_it_needs(share: str) -> None:
    context = Context(640)
    native, reference = NativeBackend(threads=1), ReferenceBackend()
    context.fill(native)
    lengths = []
    for mass in (0.3, 0.6, 0.9):
        sparse = plan(mass=mass, k_min=2, k=18, share=share)
        segment, q = context.decode(sparse)
        got = native.select(segment, 0, q, scale=context.scale)
        expected = reference.select(segment, 0, q, scale=context.scale)
        assert got is not None
        assert expected is not None
        np.testing.assert_array_equal(got.indices, expected.indices)
        if share == "head":
            for head in range(HEADS):
                shares = context.true_shares(segment, head)  # all 20 blocks are few: known exactly
                read = got.indices[got.indptr[head] : got.indptr[head + 1]]
                assert shares[read].sum() >= mass - 1e-5 or len(read) == 18
                free = np.setdiff1d(read, [0, 18, 19])
                if len(free) and len(read) > 2:  # without its worst block it would fall short
                    assert shares[read].sum() - shares[free].min() < mass + 1e-5
        lengths.append(len(got.indices))
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize("chunk", [1, 31, 32, 64, 96, 333])
def test_the_index_does_not_depend_on_chunks(chunk: int) -> None:
    native = NativeBackend(threads=2)
    whole = Context(333).fill(native, chunk=512).records()
    np.testing.assert_array_equal(Context(333).fill(native, chunk=chunk).records(), whole)


def test_running_on_after_a_cut_gives_the_same_records() -> None:
    """What was written for rows that are run again is overwritten with the same bytes."""
    native = NativeBackend(threads=2)
    straight = Context(333).fill(native)
    cut = Context(333).fill(native)
    other = Context(333, seed=1)
    rows = slice(130, 333)  # another text from there on, then the first one again
    for source in (other, straight):
        part = cut.rows(rows.start, rows.stop, plan(), is_prefill=True)
        native.append(part, 0, source.k[rows], source.v[rows])
        native.select(part, 0, source.q[rows], scale=cut.scale)
    np.testing.assert_array_equal(cut.records(), straight.records())


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_change_nothing(threads: int) -> None:
    context = Context(577)
    one = NativeBackend(threads=1)
    context.fill(one)
    segment, q = context.decode(plan())
    expected = one.select(segment, 0, q, scale=context.scale)
    many = NativeBackend(threads=threads)
    np.testing.assert_array_equal(Context(577).fill(many).records(), context.records())
    got = many.select(segment, 0, q, scale=context.scale)
    assert got is not None
    assert expected is not None
    np.testing.assert_array_equal(got.indices, expected.indices)


@pytest.mark.parametrize("selector", ["anchors", "window", "even", "probe"])
@pytest.mark.parametrize("num_tokens", [1, 10, 31, 32, 33, 50, 64, 97])
def test_all_blocks_are_read_where_they_fit(selector: str, num_tokens: int) -> None:  # ATT-06
    context = Context(num_tokens)
    native = NativeBackend(threads=1)
    context.fill(native)
    sparse = plan(selector=selector, k=4)
    segment, q = context.decode(sparse)
    if selector != "anchors":
        segment = replace(segment, index=None, index_layout=None)
    assert native.select(segment, 0, q, scale=context.scale) is None


@pytest.mark.parametrize("backend", [NativeBackend(threads=1), ReferenceBackend()])
def test_a_window_is_the_last_blocks_and_the_first(backend: Backend) -> None:
    context = Context(333)
    backend.append(context.segment, 0, context.k, context.v)
    for k, expected in ((1, [10]), (2, [0, 10]), (4, [0, 8, 9, 10])):
        segment, q = context.decode(plan(selector="window", k=k, share="group"))
        segment = replace(segment, index=None, index_layout=None)
        lists = backend.select(segment, 0, q, scale=context.scale)
        assert lists is not None
        assert lists.indices.tolist() == expected * KV_HEADS


def test_an_exact_layer_reads_everything_and_still_fills_its_index() -> None:
    native, reference = NativeBackend(threads=1), ReferenceBackend()
    context = Context(333).fill(native)
    for backend in (native, reference):
        segment, q = context.decode(plan(exact_layers=(0,)))
        assert backend.select(segment, 0, q, scale=context.scale) is None


def test_anchors_need_their_index() -> None:
    context = Context(333)
    segment, q = context.decode(plan())
    for backend in (NativeBackend(threads=1), ReferenceBackend()):
        with pytest.raises(ConfigError, match="expected one of anchors, got none"):
            backend.select(
                replace(segment, index=None, index_layout=None), 0, q, scale=context.scale
            )


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("mass", [0.0, 0.6])
@pytest.mark.parametrize("block_size", [32, 64])
def test_a_long_context_is_refined_as_the_specification_says(
    share: str, mass: float, block_size: int
) -> None:
    context = Context(120 * block_size + 5, seed=4)  # 121 blocks, of which 64 to 121 are refined
    native, reference = NativeBackend(threads=2), ReferenceBackend()
    context.fill(native)
    for k in (1, 4, 40, 118):  # with 118 all are
        segment, q = context.decode(
            plan(k=k, share=share, mass=mass, k_min=1, block_size=block_size)
        )
        got = native.select(segment, 0, q, scale=context.scale)
        expected = reference.select(segment, 0, q, scale=context.scale)
        assert got is not None
        assert expected is not None
        np.testing.assert_array_equal(got.indptr, expected.indptr)
        np.testing.assert_array_equal(got.indices, expected.indices)


def test_few_blocks_are_chosen_by_their_true_mass() -> None:
    """Up to 64 blocks the estimate plays no part, whatever the index holds."""
    context = Context(64 * 32)
    native = NativeBackend(threads=1)
    context.fill(native)
    context.records()[:] = 0
    segment, q = context.decode(plan(k=8))
    lists = native.select(segment, 0, q, scale=context.scale)
    assert lists is not None
    for head in range(HEADS):
        masses = context.true_masses(segment, head)
        masses[[0, 62, 63]] = np.inf  # the guards
        best = np.sort(np.argsort(-masses)[:8])
        got = lists.indices[lists.indptr[head] : lists.indptr[head + 1]]
        np.testing.assert_array_equal(got, best)


def test_a_needle_among_the_refined_is_found() -> None:
    """One key in a block of many: three vectors do not show it, its own logit does."""
    context = Context(80 * 32, seed=2)
    context.k[41 * 32 + 9] = 1.2 * context.q[-1].reshape(KV_HEADS, -1, HEAD_DIM).mean(axis=1)
    native = NativeBackend(threads=1)
    context.fill(native)
    segment, q = context.decode(plan(k=4, share="group"))
    estimate = native.score_blocks(segment, 0, q, scale=context.scale)
    assert ((estimate > estimate[:, 41:42]).sum(axis=1) >= 5).all()
    lists = native.select(segment, 0, q, scale=context.scale)
    assert lists is not None
    assert lists.indices.reshape(KV_HEADS, 4).tolist() == [[0, 41, 78, 79]] * KV_HEADS


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_layer_reports_the_kept_mass(isa: str, share: str) -> None:
    context = Context(70 * 32 + 7)
    last = len(context.k) - 1
    context.fill(NativeBackend(threads=2), end=last)
    segment = context.rows(last, last + 1, plan(k=6, share=share), is_prefill=False)
    hidden = np.random.default_rng(5).standard_normal((1, 96), np.float32)
    found = []
    for backend in (NativeBackend(isa=isa, threads=2), ReferenceBackend()):
        layer = build(backend, layer_shape(), kind="q8")
        step = backend.begin_step([segment], *angles(layer_shape(), last, 1))
        backend.run_layer(layer, 0, hidden.copy(), step)
        kept = backend.step_stats(step).segments[0].kept_mass
        trace = backend.last_attention(segment, num_q_heads=HEADS)
        assert kept is not None
        assert kept.shape == (1, HEADS)
        found.append((kept[0], trace))
    (native, trace), (reference, expected) = found
    assert trace.lists is not None
    assert expected.lists is not None
    np.testing.assert_array_equal(trace.lists.indices, expected.lists.indices)
    np.testing.assert_allclose(native, reference, rtol=1e-3)
    sharing = HEADS // trace.lists.num_heads
    for head in range(HEADS):
        begin, end = trace.lists.indptr[head // sharing : head // sharing + 2]
        masses = context.true_masses(segment, head, q=trace.q[0, head])
        true = masses[trace.lists.indices[begin:end]].sum() / masses.sum()
        assert 0.05 < true < 0.9
        assert abs(native[head] - true) < 0.03
