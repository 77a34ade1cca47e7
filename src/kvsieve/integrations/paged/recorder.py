"""What attention read while a host's model ran, in the engine's own words and counts."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from kvsieve.attention.block_mask import BlockMask
from kvsieve.attention.config import SparseAttention
from kvsieve.engine.outputs import AttentionReport, BlockReads, KeptMass
from kvsieve.engine.plan import why_exact
from kvsieve.integrations.paged.layer_rows import Read
from kvsieve.kernels.backend import BlockLists, Segment
from kvsieve.types import BLOCK_SIZE, F32

NOT_CAUSAL = "the model's mask is not causal there, so it was read exactly under that mask"
"""Of a layer that ran under a token mask."""


@dataclass(frozen=True, kw_only=True)
class ReadBlocks:
    """Which blocks the queries of one row read in one layer, in one call.

    row    row of the batch, whose blocks count from its first real token
    phase  ``prefill`` or ``decode``
    """

    layer: int
    row: int
    phase: Literal["prefill", "decode"]
    mask: BlockMask


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What ran. ``attention`` is what a completion of the engine reports, over the paged layers.

    sparse_layers  layers in which a query was read sparsely
    exact_layers   the other layers of kvsieve
    host_layers    layers whose keys the host's own cache held (sliding windows), by layer
    notes          what was computed in a slower way than asked for, and why
    """

    attention: AttentionReport
    sparse_layers: tuple[int, ...]
    exact_layers: tuple[int, ...]
    host_layers: dict[int, str]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **self.attention.to_json(),
            "sparse_layers": list(self.sparse_layers),
            "exact_layers": list(self.exact_layers),
            "host_layers": {str(layer): why for layer, why in self.host_layers.items()},
            "notes": list(self.notes),
        }


@dataclass(kw_only=True)
class _Phase:
    attended: int = 0
    causal: int = 0
    queries: int = 0

    @property
    def reads(self) -> BlockReads:
        return BlockReads(attended=self.attended, causal=self.causal, queries=self.queries)


@dataclass(kw_only=True)
class Recorder:
    """Counts of everything that ran under one set of settings. ``masks`` only if asked for."""

    sparse: SparseAttention | None = None
    keep_masks: bool = False
    masks: list[ReadBlocks] = field(default_factory=list)
    _prefill: _Phase = field(default_factory=_Phase)
    _decode: _Phase = field(default_factory=_Phase)
    _layers: dict[int, bool] = field(default_factory=dict)
    _host_layers: dict[int, str] = field(default_factory=dict)
    _kept: dict[int, list[F32]] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)
    _longest: tuple[int, int] = (0, 0)

    def count(self, read: Read, *, layer: int, row: int, prompt_len: int) -> None:
        """Count one call of the kernels."""
        segment, lists = read.segment, read.lists
        phase = self._prefill if segment.is_prefill else self._decode
        causal = causal_pairs(segment)
        phase.causal += causal
        phase.attended += causal if lists is None else listed_pairs(segment, lists)
        phase.queries += segment.q_len * segment.pages.shape[2]
        self._layers[layer] = self._layers.get(layer, False) or lists is not None
        if read.kept_mass is not None and lists is not None:
            self._kept.setdefault(layer, []).append(read.kept_mass)
        self._longest = max(self._longest, (segment.start + segment.q_len, prompt_len))
        if self.keep_masks:
            self.masks.append(
                ReadBlocks(
                    layer=layer,
                    row=row,
                    phase="prefill" if segment.is_prefill else "decode",
                    mask=block_mask(segment, lists),
                )
            )

    def count_exact(self, *, layer: int, num_tokens: int, q_len: int, num_kv_heads: int) -> None:
        """Count the last `q_len` of `num_tokens`, which ran under a token mask, as exact."""
        positions = np.arange(num_tokens - q_len, num_tokens)
        pairs = int((positions // BLOCK_SIZE + 1).sum()) * num_kv_heads
        self._prefill.causal += pairs
        self._prefill.attended += pairs
        self._prefill.queries += q_len * num_kv_heads
        self._layers.setdefault(layer, False)

    def note(self, text: str) -> None:
        """Remember, once, that something ran in another way than asked for."""
        self._notes[text] = None

    def host_layer(self, layer: int, why: str) -> None:
        """Remember that the host's own code runs `layer`; the first reason stays."""
        self._host_layers.setdefault(layer, why)

    def report(self) -> HostReport:
        """What has run so far."""
        sparse = self.sparse
        ran_sparse = any(self._layers.values())
        sparse_layers = tuple(sorted(n for n, ran in self._layers.items() if ran))
        return HostReport(
            attention=AttentionReport(
                mode="sparse" if ran_sparse else "exact",
                selector=sparse.selector if sparse else None,
                share=sparse.sharing if sparse else None,
                k=sparse.k if sparse else None,
                block_size=sparse.block_size if sparse else None,
                prefill=self._prefill.reads,
                decode=self._decode.reads,
                exact_because=None if sparse is None or ran_sparse else self._why_exact(sparse),
                sparse_layers=sparse_layers,
                mass=sparse.mass if sparse else None,
                exact_layers=sparse.exact_layers if sparse else (),
                layer_k=sparse.layer_k if sparse else (),
                profile=(sparse.profile or None) if sparse else None,
                kept_mass=self._kept_mass(),
                warn_mass=sparse.warn_mass if sparse else 0.0,
            ),
            sparse_layers=sparse_layers,
            exact_layers=tuple(sorted(n for n, ran in self._layers.items() if not ran)),
            host_layers=dict(sorted(self._host_layers.items())),
            notes=tuple(self._notes),
        )

    def _kept_mass(self) -> KeptMass | None:
        """Over the decoded tokens that every sparse layer read sparsely."""
        if not self._kept:
            return None
        layers = sorted(self._kept)
        steps = min(len(self._kept[layer]) for layer in layers)
        kept = np.stack([np.stack(self._kept[layer][:steps]) for layer in layers], axis=1)
        found = KeptMass.of(kept)
        return replace(found, worst_layer=layers[found.worst_layer])

    def _why_exact(self, sparse: SparseAttention) -> str:
        num_tokens, prompt_len = self._longest
        if not num_tokens:
            return "no layer of kvsieve has run" if not self._layers else NOT_CAUSAL
        because = why_exact(sparse, prompt_len=prompt_len, num_tokens=num_tokens)
        return because or NOT_CAUSAL


def causal_pairs(segment: Segment) -> int:
    """(query, block of 32) pairs that exact attention reads, once per KV head."""
    positions = np.arange(segment.start, segment.start + segment.q_len)
    return int((positions // BLOCK_SIZE + 1).sum()) * int(segment.pages.shape[2])


def listed_pairs(segment: Segment, lists: BlockLists) -> int:
    """(query, block) pairs that the lists read: per KV head, the union over its query heads."""
    num_kv_heads = int(segment.pages.shape[2])
    edges = np.arange(lists.num_tiles + 1) * BLOCK_SIZE + segment.start // BLOCK_SIZE * BLOCK_SIZE
    rows = np.diff(edges.clip(segment.start, segment.start + segment.q_len))
    if lists.num_heads == num_kv_heads:
        lengths = np.diff(lists.indptr).reshape(num_kv_heads, lists.num_tiles)
        return int((lengths * rows).sum())
    return block_mask(segment, lists).pairs_attended


def block_mask(segment: Segment, lists: BlockLists | None) -> BlockMask:
    """The lists of a segment as a mask."""
    num_kv_heads = int(segment.pages.shape[2])
    kv_len = segment.start + segment.q_len
    if lists is None:
        return BlockMask.full(q_len=segment.q_len, kv_len=kv_len, num_kv_heads=num_kv_heads)
    return BlockMask(
        indptr=lists.indptr,
        indices=lists.indices,
        num_kv_heads=num_kv_heads,
        num_tiles=lists.num_tiles,
        q_len=segment.q_len,
        kv_len=kv_len,
        lists_per_kv_head=lists.num_heads // num_kv_heads,
    )
