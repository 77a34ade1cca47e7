"""What a decoder layer does before and after its attention, by whatever computes the primitives.

The reference runs its layers so; and so does a backend whose layer is split because blocks are
chosen in Python in between. One arithmetic: the bits are those of the whole call.
"""

from typing import Any, Protocol

import numpy as np

from kvsieve.kernels.backend import LayerShape, LayerWeights
from kvsieve.types import F32


class Primitives(Protocol):
    """A backend, or the reference's module `dense`."""

    def project(self, x: F32, weight: Any) -> F32: ...
    def rms_norm(self, x: F32, weight: F32, *, eps: float) -> F32: ...
    def rope(self, x: F32, cos: F32, sin: F32, *, interleaved: bool) -> F32: ...
    def silu_mul(self, gate: F32, up: F32) -> F32: ...
    def gelu_mul(self, gate: F32, up: F32) -> F32: ...


def before_attention(
    primitives: Primitives,
    shape: LayerShape,
    weights: LayerWeights,
    *,
    hidden: F32,
    cos: F32,
    sin: F32,
) -> tuple[F32, F32, F32]:
    """Norm, projections, norms of heads, rotation.

    Parameters
    ----------
    hidden : f32 ``[T, W]``
    cos, sin : f32 ``[T, rope_dim / 2]``

    Returns
    -------
    q f32 ``[T, Hq, D]``, k and v f32 ``[T, Hkv, D]``
    """
    x = primitives.rms_norm(hidden, weights.attn_norm, eps=shape.rms_norm_eps)

    def heads(weight: Any, bias: F32 | None, num_heads: int) -> F32:
        y = primitives.project(x, weight)
        if bias is not None:
            y = y + bias
        return y.reshape(len(x), num_heads, -1)

    def rotated(rows: F32, norm: F32 | None) -> F32:
        if norm is not None:
            flat = rows.reshape(-1, rows.shape[2])
            normed = primitives.rms_norm(flat, norm, eps=shape.rms_norm_eps)
            rows = normed.reshape(rows.shape)
        return primitives.rope(rows, cos, sin, interleaved=shape.rope_interleaved)

    q = heads(weights.q_proj, weights.q_bias, shape.num_q_heads)
    k = heads(weights.k_proj, weights.k_bias, shape.num_kv_heads)
    v = heads(weights.v_proj, weights.v_bias, shape.num_kv_heads)
    return rotated(q, weights.q_norm), rotated(k, weights.k_norm), v


def after_attention(
    primitives: Primitives, shape: LayerShape, weights: LayerWeights, *, hidden: F32, attended: F32
) -> F32:
    """Output projection and MLP; hidden f32 ``[N, W]``, attended f32 ``[N, Hq, D]``."""

    def normed(x: F32, weight: F32 | None) -> F32:
        if weight is None:
            return x
        return primitives.rms_norm(x, weight, eps=shape.rms_norm_eps)

    rows = np.ascontiguousarray(attended).reshape(len(hidden), -1)
    hidden = hidden + normed(primitives.project(rows, weights.o_proj), weights.attn_post_norm)
    x = primitives.rms_norm(hidden, weights.ffn_norm, eps=shape.rms_norm_eps)
    activate = primitives.gelu_mul if shape.gate == "gelu" else primitives.silu_mul
    gated = activate(
        primitives.project(x, weights.gate_proj), primitives.project(x, weights.up_proj)
    )
    return hidden + normed(primitives.project(gated, weights.down_proj), weights.ffn_post_norm)
