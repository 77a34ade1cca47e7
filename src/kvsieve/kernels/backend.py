"""The closed set of numeric primitives, and the values they take.

Two implementations, `reference` (NumPy: the specification) and `native` (the C++ core), have
the same names and signatures and give the same results within a stated tolerance. Integer
results (page bytes, packed index, selected blocks) are equal whenever their float inputs are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from kvsieve.kernels.layout import PageLayout, SelectorIndex
from kvsieve.types import BLOCK_SIZE, F32, I32, I64, U8, AnyArray

WeightFormat = Literal["f32", "q4_0", "q4_1", "q8_0"]
SelectorKind = Literal[
    "probe", "even", "anchors", "minmax", "mean", "meanstd", "window", "oracle", "random"
]
WeightKind = Literal["f32", "q4", "q8"]
Gate = Literal["silu", "gelu"]
"""Activation of the gated MLP; ``gelu`` in its tanh form."""


class RowSource(Protocol):
    """A matrix that comes slice by slice: never whole in memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, rows: slice, /) -> AnyArray: ...


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A matrix ``[rows, cols]`` as a file holds it; ``y = x @ W.T``.

    ``data`` is ``f32 [rows, cols]`` for format ``f32`` and ``u8 [rows, row_bytes]`` of GGUF
    blocks (32 values each) for ``q4_0``, ``q4_1``, ``q8_0``. ``cols`` is a multiple of 32.
    Both may come as a `RowSource`.
    """

    data: AnyArray | RowSource
    format: WeightFormat
    rows: int
    cols: int


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What distinguishes one decoder layer from another; data for the kernels, not code."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_interleaved: bool
    """True: pairs are (2i, 2i+1), as in a GGUF of Llama; False: (i, i + rope_dim/2)."""
    rope_dim: int
    attention_scale: float
    gate: Gate = "silu"
    window: int = 0
    """Tokens that a row reads, its own included, whatever the sparse plan; 0: all up to its own."""

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def vector_lengths(self) -> dict[str, int]:
        """Length of each vector of `LayerWeights`, by field."""
        hidden, dim = self.hidden_size, self.head_dim
        return {
            "attn_norm": hidden,
            "ffn_norm": hidden,
            "q_norm": dim,
            "k_norm": dim,
            "q_bias": self.num_q_heads * dim,
            "k_bias": self.num_kv_heads * dim,
            "v_bias": self.num_kv_heads * dim,
            "attn_post_norm": hidden,
            "ffn_post_norm": hidden,
        }

    @property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """``(rows, cols)`` of each matrix, by field of `LayerWeights`."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (q_size, hidden),
            "k_proj": (kv_size, hidden),
            "v_proj": (kv_size, hidden),
            "o_proj": (hidden, q_size),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Packed matrices (`Backend.pack_weight`) and f32 vectors of one decoder layer.

    Lengths as in `LayerShape.vector_lengths`; None: the layer has no such part. ``q_bias``,
    ``k_bias``, ``v_bias`` are added to the projections; ``q_norm`` and ``k_norm`` scale each
    head's RMS norm before rope; ``attn_post_norm`` and ``ffn_post_norm`` norm what attention and
    the MLP add to the hidden state.
    """

    attn_norm: F32
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    ffn_norm: F32
    gate_proj: Any
    up_proj: Any
    down_proj: Any
    q_norm: F32 | None = None
    k_norm: F32 | None = None
    q_bias: F32 | None = None
    k_bias: F32 | None = None
    v_bias: F32 | None = None
    attn_post_norm: F32 | None = None
    ffn_post_norm: F32 | None = None


@dataclass(frozen=True, kw_only=True)
class SparsePlan:
    """Which blocks a sequence may read in this step; made once per step, used by every layer.

    ``k`` counts selection blocks of ``block_size`` tokens (a multiple of 32). With ``mass``
    (of selectors `by_shares`) blocks are taken until their share of the attention reaches it, at
    least ``k_min`` and at most ``k``; 0: always ``k``. Layers in ``exact_layers`` run exactly,
    those in ``layer_k``, pairs (layer, k), have that budget. ``seed`` is for ``random``. A ``rule``
    takes the selector's place; the backends themselves refuse one.
    """

    selector: SelectorKind
    k: int
    block_size: int
    num_probes: int
    share: Literal["head", "group"]
    exact_from_tile: int
    """Prefill tiles (blocks of 32 positions) with this index or a higher one run exactly."""
    mass: float = 0.0
    k_min: int = 1
    exact_layers: tuple[int, ...] = ()
    layer_k: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    rule: "BlockRule | None" = None

    @property
    def by_shares(self) -> bool:
        """Whether the selector's scores are shares of the attention, estimated or true."""
        return self.selector in ("anchors", "oracle")

    @property
    def smallest_budget(self) -> int:
        """Up to so many selection blocks a context is read whole, in every layer."""
        return self.k_min if self.mass else min([self.k, *(k for _, k in self.layer_k)])

    def of_layer(self, layer: int) -> "SparsePlan":
        """The plan as that layer follows it: its own budget is ``k``."""
        if not self.layer_k:
            return self
        return replace(self, k=dict(self.layer_k).get(layer, self.k), layer_k=())

    def decode_is_sparse(self, num_tokens: int) -> bool:
        """Whether a decoded token that sees `num_tokens` tokens, itself included, is sparse."""
        return (
            num_tokens > 2 * BLOCK_SIZE and -(-num_tokens // self.block_size) > self.smallest_budget
        )

    def tile_is_sparse(self, tile: int) -> bool:
        """Whether prefill tile `tile` passes the gate: beyond 64 tokens and beyond the budget."""
        num_selection_blocks = -(-(tile + 1) * BLOCK_SIZE // self.block_size)
        return 2 <= tile < self.exact_from_tile and num_selection_blocks > self.smallest_budget


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The rows that one sequence contributes to a step, and its cache.

    pages       ``u8 [L, num_pages, Hkv, page_bytes]``: the pool, shared by all sequences
    block_table ``i32 [>= ceil((start + q_len) / 32)]``: page of each block, in order
    index       ``u8 [L, groups, Hkv, record_bytes]`` or None; of the layout given beside it
    importance  ``i64 [L, >= start + q_len]`` in units of 2**-24, or None: added to in prefill
                when `record_importance`, read by the selector `probe` in decode
    """

    start: int
    q_len: int
    is_prefill: bool
    layout: PageLayout
    pages: U8
    block_table: I32
    sparse: SparsePlan | None = None
    index_layout: SelectorIndex | None = None
    index: U8 | None = None
    importance: I64 | None = None
    record_importance: bool = False


@dataclass(kw_only=True)
class SegmentStats:
    """What attention read for one segment, summed over the layers run so far.

    A pair is (query token, block of 32 tokens), counted once per KV head: the union over its
    query group. ``pairs_causal`` counts the blocks that exact attention would have read: in a
    layer with a window, those of the window.

    ``kept_mass`` f32 ``[layers run, Hq]`` is there for a decoded token with a selector by shares:
    the share of all attention that falls on the blocks that were read, 1 in an exact layer. What
    was read is known, the rest is estimated from the index.
    """

    pairs_attended: int = 0
    pairs_causal: int = 0
    kept_mass: F32 | None = None


@dataclass(kw_only=True)
class StepStats:
    """Wall time of a step by what it was spent on, and per-segment counts.

    ``attention_ns`` leaves out ``select_ns`` (scoring and choosing blocks); ``dense_ns`` is the
    rest of the layers.
    """

    dense_ns: int = 0
    attention_ns: int = 0
    select_ns: int = 0
    segments: list[SegmentStats] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BlockLists:
    """Blocks of 32 chosen for each row, in CSR form, sorted and unique within a row.

    Row ``head * num_tiles + tile``; ``num_heads`` is Hkv (one list per group) or Hq (one per
    query head).
    ``tile`` counts from the tile of the segment's first row.
    """

    num_heads: int
    num_tiles: int
    indptr: I64
    indices: I32


class BlockRule(Protocol):
    """Chooses blocks in Python, between the two halves of a layer."""

    def block_lists(
        self, q: F32, k: F32, *, plan: SparsePlan, is_prefill: bool, scale: float
    ) -> BlockLists | None:
        """Blocks for queries f32 ``[Hq, Tq, D]``, the last positions of keys f32 ``[Hkv, n, D]``.

        Called where `plan` lets some of the rows be sparse; None: everything.
        """


@dataclass(frozen=True, kw_only=True)
class AttentionTrace:
    """What attention of one layer ran with, for one segment: the evidence that evaluation reads.

    ``q`` f32 ``[Tq, Hq, D]`` after norm and rope, the softmax scale folded in; ``out`` likewise,
    what attention gave; ``lists`` are those that were read, None where the segment was exact.
    """

    q: F32
    out: F32
    lists: BlockLists | None


class Backend(Protocol):
    """Numeric primitives of the engine. All arrays are C-contiguous."""

    @property
    def name(self) -> str: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

    # -- dense ---------------------------------------------------------------------------
    def pack_weight(self, source: WeightSource, *, kind: WeightKind | None = None) -> Any: ...
    def project(self, x: F32, weight: Any) -> F32: ...
    def rms_norm(self, x: F32, weight: F32, *, eps: float) -> F32: ...
    def rope(self, x: F32, cos: F32, sin: F32, *, interleaved: bool) -> F32: ...
    def silu_mul(self, gate: F32, up: F32) -> F32: ...
    def gelu_mul(self, gate: F32, up: F32) -> F32: ...

    # -- cache, selection, attention: one layer of one segment ------------------------------
    def append(self, segment: Segment, layer: int, k: F32, v: F32) -> None: ...
    def score_blocks(self, segment: Segment, layer: int, q: F32, *, scale: float) -> F32: ...
    def select(
        self, segment: Segment, layer: int, q: F32, *, scale: float
    ) -> BlockLists | None: ...
    def attend(
        self, segment: Segment, layer: int, q: F32, *, scale: float, lists: BlockLists | None
    ) -> F32: ...

    # -- the whole layer: one call ----------------------------------------------------------
    def build_layer(self, shape: LayerShape, weights: LayerWeights) -> Any: ...
    def begin_step(self, segments: Sequence[Segment], cos: F32, sin: F32) -> Any: ...
    def run_layer(
        self, layer: Any, index: int, hidden: F32, step: Any, *, kept: I32 | None = None
    ) -> None: ...
    def step_stats(self, step: Any) -> StepStats: ...
    def last_attention(self, segment: Segment, *, num_q_heads: int) -> AttentionTrace: ...
