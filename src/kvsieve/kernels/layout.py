"""Bytes of a cache page and of the selector index: one description for both backends.

A *page* holds one block (32 tokens) of one KV head: keys, values and their scales.
Integers are stored in the order the dot-product instructions want, so that neither
prefill nor decode repacks:

========  ==========================================  ==========================================
type      keys                                        values
========  ==========================================  ==========================================
``q8_0``  ``u8 [D/4][32][4]``: dim ``4c+i`` of token  ``i8 [8][D][4]``: token ``4a+i`` of
          ``t`` at ``[c][t][i]``, stored ``+128``;    channel ``d`` at ``[a][d][i]``;
          scales ``f32 [32]``                         scales ``f32 [32]``
``q4_0``  ``u8 [D/8][32][4]``, codes stored ``+8``:   ``u8 [4][D][4]``, codes stored ``+8``:
          low nibble of ``[c]`` is chunk ``c`` of     low nibble of ``[a]`` is token group ``a``
          the q8 layout, high nibble ``c + D/8``;     of the q8 layout, high nibble ``a + 4``;
          scales ``f32 [D/32][32]``                   scales ``f32 [D/32][32]``
``f16``   ``f16 [D][32]`` (transposed)                ``f16 [32][D]``
``f32``   ``f32 [D][32]`` (transposed)                ``f32 [32][D]``
========  ==========================================  ==========================================

Order inside a page: keys, key scales, values, value scales; the page is padded to 64 bytes.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from kvsieve.errors import ConfigError
from kvsieve.types import BLOCK_SIZE, CACHE_TYPES, CacheType

LANES = 16
"""Blocks that share one vector of the selector index (one lane each)."""

GROUP = 32
"""Values that share a scale in a q4 cache, in a weight and in a quantised activation."""


def _data_bytes(cache_type: CacheType, head_dim: int) -> int:
    return {
        "f32": 4 * BLOCK_SIZE * head_dim,
        "f16": 2 * BLOCK_SIZE * head_dim,
        "q8_0": BLOCK_SIZE * head_dim,
        "q4_0": BLOCK_SIZE * head_dim // 2,
    }[cache_type]


def _scale_bytes(cache_type: CacheType, head_dim: int) -> int:
    groups = {"f32": 0, "f16": 0, "q8_0": 1, "q4_0": head_dim // GROUP}[cache_type]
    return 4 * BLOCK_SIZE * groups


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Where keys, values and scales lie in a page of ``page_bytes`` bytes.

    ``head_dim`` is a multiple of 16 (of 32 for a q4_0 side).
    """

    k_type: CacheType
    v_type: CacheType
    head_dim: int

    def __post_init__(self) -> None:
        for side, cache_type in (("k", self.k_type), ("v", self.v_type)):
            if cache_type not in CACHE_TYPES:
                raise ConfigError(
                    f"[PageLayout] {side}_type: expected one of {', '.join(CACHE_TYPES)}, "
                    f"got {cache_type!r}"
                )
            step = GROUP if cache_type == "q4_0" else 16
            if self.head_dim <= 0 or self.head_dim % step:
                raise ConfigError(
                    f"[PageLayout] head_dim: expected a multiple of {step} for a {cache_type} "
                    f"cache, got {self.head_dim}"
                )

    @property
    def k_offset(self) -> int:
        return 0

    @property
    def k_scale_offset(self) -> int:
        return _data_bytes(self.k_type, self.head_dim)

    @property
    def v_offset(self) -> int:
        return self.k_scale_offset + _scale_bytes(self.k_type, self.head_dim)

    @property
    def v_scale_offset(self) -> int:
        return self.v_offset + _data_bytes(self.v_type, self.head_dim)

    @property
    def page_bytes(self) -> int:
        end = self.v_scale_offset + _scale_bytes(self.v_type, self.head_dim)
        return -(-end // 64) * 64


@dataclass(frozen=True, kw_only=True)
class IndexLayout:
    """The packed keys that a strided selector reads, beside a q8_0 key cache.

    Entry ``j`` of selection block ``b`` is the key at position ``b * block_size + j * step``.
    16 selection blocks form a group, one lane each. A group's record, one per KV head:
    ``u8 [entries][D/4][16][4]`` (keys ``+128``), then ``f32 [entries][16]`` scales.
    An array of records has shape ``[num_groups, Hkv, record_bytes]``. An entry is written
    when its token is appended; only blocks that are full are read from here.
    """

    head_dim: int
    block_size: int
    num_probes: int

    @property
    def step(self) -> int:
        return max(1, self.block_size // max(1, self.num_probes))

    @property
    def entries(self) -> int:
        return -(-self.block_size // self.step)

    @property
    def record_bytes(self) -> int:
        return self.entries * LANES * (self.head_dim + 4)

    def num_groups(self, num_tokens: int) -> int:
        return -(-num_tokens // (self.block_size * LANES))


NUM_ANCHORS = 2
"""Keys of a block that stand for themselves in its record: kept mass rises by .01 from 1 to 2."""

NUM_BANDS = 4
"""Runs of channels with a spread of their own: rotation makes low channels spread more."""


@dataclass(frozen=True, kw_only=True)
class AnchorLayout:
    """What the selector ``anchors`` reads, beside keys of any type.

    For each block of 32: its `NUM_ANCHORS` most attended keys and the mean of the others as q8
    rows, and the mean squared distance of the others from their mean in each of `NUM_BANDS` runs
    of channels. 16 blocks form a group, one lane each. A group's record, one per KV head:
    ``u8 [vectors][D/4][16][4]`` (codes ``+128``), ``f32 [vectors][16]`` scales, ``f32
    [bands][16]`` spreads. An array of records has shape ``[num_groups, Hkv, record_bytes]``. A
    block's lane is written once, when the last row of the block behind it runs.
    """

    head_dim: int

    @property
    def block_size(self) -> int:
        """Tokens that a record stands for."""
        return BLOCK_SIZE

    @property
    def vectors(self) -> int:
        return NUM_ANCHORS + 1

    @property
    def record_bytes(self) -> int:
        return LANES * (self.vectors * (self.head_dim + 4) + 4 * NUM_BANDS)

    def num_groups(self, num_tokens: int) -> int:
        return -(-num_tokens // (BLOCK_SIZE * LANES))


VectorRule = Literal["minmax", "mean", "meanstd"]
"""What the vectors of a block are: bounds of its keys, their mean, or mean and spread."""


@dataclass(frozen=True, kw_only=True)
class VectorLayout:
    """What the selectors ``minmax``, ``mean`` and ``meanstd`` read, beside keys of any type.

    For each block of 32 `entries` q8 rows. 16 blocks form a group, one lane each. A group's
    record, one per KV head: ``u8 [entries][D/4][16][4]`` (codes ``+128``), ``f32 [entries][16]``
    scales. An array of records has shape ``[num_groups, Hkv, record_bytes]``. A block's lane is
    written when its last token is appended; only blocks that are full are read from here.
    """

    head_dim: int
    rule: VectorRule

    def __post_init__(self) -> None:
        if self.rule not in get_args(VectorRule):
            raise ConfigError(
                f"[VectorLayout] rule: expected one of {', '.join(get_args(VectorRule))}, "
                f"got {self.rule!r}"
            )

    @property
    def block_size(self) -> int:
        """Tokens that a record stands for."""
        return BLOCK_SIZE

    @property
    def entries(self) -> int:
        return 1 if self.rule == "mean" else 2

    @property
    def record_bytes(self) -> int:
        return LANES * self.entries * (self.head_dim + 4)

    def num_groups(self, num_tokens: int) -> int:
        return -(-num_tokens // (BLOCK_SIZE * LANES))


SelectorIndex = IndexLayout | AnchorLayout | VectorLayout
"""Layout of what a selector keeps packed beside the cache."""


def summary_layout(selector: str, *, head_dim: int) -> AnchorLayout | VectorLayout | None:
    """Layout of the summaries of blocks that a selector cannot do without; None: it has none."""
    if selector == "anchors":
        return AnchorLayout(head_dim=head_dim)
    for rule in get_args(VectorRule):
        if selector == rule:
            return VectorLayout(head_dim=head_dim, rule=rule)
    return None
