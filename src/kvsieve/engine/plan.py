"""From what a user asked for (`SparseAttention`) to what a step may read (`SparsePlan`)."""

from kvsieve.attention.config import SparseAttention
from kvsieve.kernels.backend import SparsePlan
from kvsieve.kernels.layout import IndexLayout, PageLayout, SelectorIndex, summary_layout
from kvsieve.types import BLOCK_SIZE


def sparse_plan(
    sparse: SparseAttention | None, *, prompt_len: int, is_prefill: bool
) -> SparsePlan | None:
    """Plan of a step, or None where the phase runs exactly whatever the length."""
    if sparse is None or sparse.phase == ("decode" if is_prefill else "prefill"):
        return None
    return SparsePlan(
        selector=sparse.selector,
        k=sparse.largest_budget,
        block_size=sparse.block_size,
        num_probes=sparse.num_probes,
        share=sparse.sharing,
        exact_from_tile=max(0, prompt_len - sparse.dense_tail) // BLOCK_SIZE,
        mass=sparse.mass or 0.0,
        k_min=sparse.k_min,
        exact_layers=sparse.exact_layers,
        layer_k=sparse.layer_budgets,
        seed=sparse.seed,
        rule=sparse.rule,
    )


def selector_index(sparse: SparseAttention, layout: PageLayout) -> SelectorIndex | None:
    """What the selector reads, packed beside the cache; None: the pages, or nothing.

    Evenly spaced keys are packed beside a q8_0 key cache only.
    """
    if sparse.rule is not None:
        return None
    if sparse.selector not in ("probe", "even"):
        return summary_layout(sparse.selector, head_dim=layout.head_dim)
    if layout.k_type != "q8_0":
        return None
    return IndexLayout(
        head_dim=layout.head_dim, block_size=sparse.block_size, num_probes=sparse.num_probes
    )


def can_be_sparse(sparse: SparseAttention | None, *, max_tokens: int) -> bool:
    """Whether a sequence of at most `max_tokens` tokens can outgrow the budget at all.

    Where it cannot, importance and the selector's index need not be kept.
    """
    return (
        sparse is not None
        and max_tokens > 2 * BLOCK_SIZE
        and _blocks(max_tokens, sparse.block_size) > sparse.smallest_budget
    )


def why_exact(sparse: SparseAttention, *, prompt_len: int, num_tokens: int) -> str | None:
    """Why a run that was asked to be sparse read everything, or None if some query was sparse.

    `num_tokens` went through the model, prompt and generated together; a cancelled run may have
    ended within its prompt.
    """
    prompt_done = min(prompt_len, num_tokens)
    if _prefill_was_sparse(sparse, prompt_len, prompt_done):
        return None
    if _decode_was_sparse(sparse, prompt_len, num_tokens):
        return None
    blocks = _blocks(num_tokens, sparse.block_size)
    if blocks <= sparse.smallest_budget:
        return f"{_all(blocks)} the budget of {sparse.smallest_budget}"
    if num_tokens <= 2 * BLOCK_SIZE:
        return f"up to {2 * BLOCK_SIZE} tokens are always read exactly"
    if sparse.phase == "decode":
        return "the prompt is read exactly in phase decode, and no token was decoded after it"
    prompt_blocks = _blocks(prompt_done, sparse.block_size)
    if prompt_blocks <= sparse.smallest_budget:
        return (
            f"{_all(prompt_blocks)} the budget of {sparse.smallest_budget} in the prompt, "
            "and generated tokens are read exactly in phase prefill"
        )
    return (
        f"the prompt of {prompt_len} tokens outgrows the budget only "
        f"in its exact tail of {sparse.dense_tail} tokens"
    )


def _prefill_was_sparse(sparse: SparseAttention, prompt_len: int, prompt_done: int) -> bool:
    plan = sparse_plan(sparse, prompt_len=prompt_len, is_prefill=True)
    if plan is None:
        return False
    # Later tiles see more blocks: if any tile before the exact tail is sparse, the last one is.
    last = min(_blocks(prompt_done, BLOCK_SIZE), plan.exact_from_tile) - 1
    return plan.tile_is_sparse(last)


def _decode_was_sparse(sparse: SparseAttention, prompt_len: int, num_tokens: int) -> bool:
    plan = sparse_plan(sparse, prompt_len=prompt_len, is_prefill=False)
    return plan is not None and num_tokens > prompt_len and plan.decode_is_sparse(num_tokens)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _all(blocks: int) -> str:
    return "the only block fits" if blocks == 1 else f"all {blocks} blocks fit"
