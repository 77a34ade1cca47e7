"""A `Segment` as the C++ core takes it: plain numbers and arrays, every bound checked first."""

from typing import Any

import numpy as np

from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import Segment
from kvsieve.kernels.checks import check_segment
from kvsieve.kernels.layout import AnchorLayout, VectorLayout
from kvsieve.types import BLOCK_SIZE, F32


def segment_fields(segment: Segment) -> dict[str, Any]:
    """The values of a Segment as the core takes them; every bound it relies on is checked here."""
    layout = segment.layout
    check_segment("begin_step", segment)
    result: dict[str, Any] = {
        "start": segment.start,
        "q_len": segment.q_len,
        "is_prefill": segment.is_prefill,
        "is_sparse": segment.sparse is not None,
        "k_type": layout.k_type,
        "v_type": layout.v_type,
        "head_dim": layout.head_dim,
        "k_scale_offset": layout.k_scale_offset,
        "v_offset": layout.v_offset,
        "v_scale_offset": layout.v_scale_offset,
        "page_bytes": layout.page_bytes,
        "num_kv_heads": segment.pages.shape[2],
        "pages": segment.pages,
        "layer_page_bytes": segment.pages.strides[0],
        "block_table": segment.block_table,
        "index": None,
        "importance": None,
        "importance_tokens": 0,
        "record_importance": False,
    }
    if segment.sparse is not None:
        plan = segment.sparse
        result |= {
            "selector": plan.selector,
            "k": plan.k,
            "block_size": plan.block_size,
            "num_probes": plan.num_probes,
            "share_group": plan.share == "group",
            "exact_from_tile": plan.exact_from_tile,
            "mass": plan.mass,
            "k_min": plan.k_min,
            "exact_layers": list(plan.exact_layers),
            "layer_k": list(plan.layer_k),
            "seed": plan.seed,
        }
    result |= _index_fields(segment)
    if segment.importance is not None:
        result |= {
            "importance": segment.importance,
            "importance_tokens": segment.importance.shape[1],
            "record_importance": segment.record_importance and segment.is_prefill,
        }
    return result


def _index_fields(segment: Segment) -> dict[str, Any]:
    layout, plan = segment.index_layout, segment.sparse
    if layout is None or segment.index is None:  # check_segment has refused one without the other
        return {}
    found: dict[str, Any] = {
        "index": segment.index,
        "layer_index_bytes": segment.index.strides[0],
        "index_is_anchors": False,
        "index_rule": "none",
    }
    if isinstance(layout, AnchorLayout):
        return found | {
            "index_block": BLOCK_SIZE,
            "index_step": 1,
            "index_entries": layout.vectors,
            "index_is_anchors": True,
        }
    if isinstance(layout, VectorLayout):
        return found | {
            "index_block": BLOCK_SIZE,
            "index_step": 1,
            "index_entries": layout.entries,
            "index_rule": layout.rule,
        }
    if plan is not None and (plan.block_size, plan.num_probes) != (
        layout.block_size,
        layout.num_probes,
    ):
        raise ConfigError(
            f"[Segment] index: expected one for blocks of {plan.block_size} and {plan.num_probes} "
            f"probes, got {layout.block_size} and {layout.num_probes}"
        )
    return found | {
        "index_block": layout.block_size,
        "index_step": layout.step,
        "index_entries": layout.entries,
    }


def kept_mass(step: Any, segment: int) -> F32 | None:
    """``[layers run, Hq]``, None where nobody estimates."""
    layers: list[list[float]] = step.kept_mass(segment)
    return np.array(layers, np.float32) if layers else None
