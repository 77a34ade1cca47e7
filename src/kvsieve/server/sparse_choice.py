"""Attention of one request: the operator's setting, and what the request may change of it."""

from dataclasses import replace
from typing import Any

from kvsieve.attention.config import CONTROLS, SparseAttention
from kvsieve.errors import ConfigError
from kvsieve.server.config import SparsePolicy
from kvsieve.server.errors import ApiError, from_engine, invalid
from kvsieve.server.protocol import SparseFields


def sparse_attention(fields: SparseFields | None, policy: SparsePolicy) -> SparseAttention | None:
    """Attention of a request: the operator's default, with what the request may change."""
    if fields is None:
        return policy.default
    changes = fields.model_dump(exclude_none=True)
    enabled = changes.pop("enabled", bool(changes) or policy.default is not None)
    if not changes and enabled == (policy.default is not None):
        return policy.default
    if not policy.per_request:
        raise ApiError(
            403,
            "sparse: expected none, because this server's setting is fixed, got one",
            param="sparse",
        )
    if not enabled:
        _check_exact(changes, policy)
        return None
    if "k" in changes and "mass" in changes:
        raise invalid("sparse", expected="one of k and mass", got="both")
    base = policy.default or SparseAttention()
    if changes.get("selector") in CONTROLS and changes["selector"] not in policy.selectors:
        raise ApiError(
            403,
            f"sparse.selector: expected one of {', '.join(policy.selectors)}, "
            f"got {changes['selector']} (for evaluation only)",
            param="sparse.selector",
        )
    try:
        chosen = replace(base, **_with_consequences(changes, base=base, policy=policy))
    except ConfigError as error:
        raise from_engine(error, param="sparse") from error
    if "k" in changes and not policy.min_k <= chosen.k <= (policy.max_k or chosen.k):
        most = "" if policy.max_k is None else f" to {policy.max_k}"
        raise invalid(
            "sparse.k", expected=f"{policy.min_k}{most or ' or more'} blocks", got=chosen.k
        )
    return chosen


def asked_of(sparse: SparseAttention) -> dict[str, Any]:
    """A setting in the fields that requests have."""
    return {name: getattr(sparse, name) for name in ("selector", "share", "k", "mass")}


def _check_exact(changes: dict[str, Any], policy: SparsePolicy) -> None:
    if changes:
        raise invalid("sparse.enabled", expected="true beside other settings", got=False)
    if policy.max_k is not None:
        raise ApiError(
            403,
            f"sparse.enabled: expected true (at most {policy.max_k} blocks per query), got false",
            param="sparse",
        )


def _with_consequences(
    changes: dict[str, Any], *, base: SparseAttention, policy: SparsePolicy
) -> dict[str, Any]:
    """The changes, and what they mean for fields that a request leaves out.

    A budget of blocks takes the place of one of mass, and the other way round; the blocks of one of
    mass stay within the operator's bounds. Only `anchors` estimates mass.
    """
    changes = dict(changes)
    if base.profile:
        # It was measured with the other setting.
        changes |= {"exact_layers": (), "layer_k": (), "profile": ""}
    if "mass" in changes:
        changes["layer_k"] = ()
        changes.setdefault("selector", "anchors")
        most = min(base.k_max, policy.max_k or base.k_max)
        changes["k_max"] = max(most, policy.min_k)
        changes["k_min"] = min(max(base.k_min, policy.min_k), changes["k_max"])
    if "k" in changes:
        changes["mass"] = None
    selector = changes.get("selector", base.selector)
    if selector != "anchors":
        changes.setdefault("mass", None)
        changes["warn_mass"] = 0.0
    if selector != "random":
        changes["seed"] = 0
    return changes
