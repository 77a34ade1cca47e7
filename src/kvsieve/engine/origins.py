"""How each block of a sequence is computed, so that only what a cold run would compute the same
way is reused (docs/selection.md, 2 and 6; decision 6).

Exact rows have the same bits whether they were read in a prompt or generated. A sparse tile of a
prompt depends on the plan and on all of its rows. Rows that sparse decoding generated are what no
prompt would compute. They are reused if the user asks for it, and so are tiles of an exact tail: a
conversation then goes on where it was, and not quite as if it had been read anew.
"""

from dataclasses import asdict

from kvsieve.attention.config import SparseAttention
from kvsieve.cache.kv_cache import blocks_for
from kvsieve.cache.prefix_cache import EXACT
from kvsieve.engine.plan import sparse_plan
from kvsieve.engine.sequence import Sequence
from kvsieve.types import BLOCK_SIZE


def prompt_origins(
    sparse: SparseAttention | None, *, prompt_len: int, any_way: bool = False
) -> list[bytes]:
    """Origin of each block that a prompt of `prompt_len` tokens touches, were it read now.

    `any_way`: what the same settings computed in whatever way will do.
    """
    num_blocks = blocks_for(prompt_len)
    if any_way and sparse is not None:
        return [f"any way, {sparse!r}".encode()] * num_blocks
    plan = sparse_plan(sparse, prompt_len=prompt_len, is_prefill=True)
    if plan is None:
        return [EXACT] * num_blocks
    # Where the exact tail begins decides which tiles are sparse, not how.
    settings = {k: v for k, v in asdict(plan).items() if k != "exact_from_tile"}
    sparse_origin = repr(sorted(settings.items())).encode()
    return [sparse_origin if plan.tile_is_sparse(tile) else EXACT for tile in range(num_blocks)]


def reusable_tokens(sequence: Sequence) -> tuple[int, list[bytes]]:
    """How many of the first tokens of `sequence` others may reuse, and their blocks' origins."""
    done, prompt_len = sequence.cache.num_tokens, sequence.prompt_len
    any_way = sequence.reuses_generated
    if any_way and sequence.sparse is not None:
        whole = done // BLOCK_SIZE * BLOCK_SIZE
        return whole, prompt_origins(sequence.sparse, prompt_len=whole, any_way=True)
    origins = prompt_origins(sequence.sparse, prompt_len=prompt_len)
    if done < prompt_len:
        # A chunk may have ended within a tile only where the prompt does.
        reusable = done // BLOCK_SIZE * BLOCK_SIZE
        return reusable, origins[: blocks_for(reusable)]
    # An open last tile of the prompt is exact: the exact tail begins with it at the latest.
    decode = sparse_plan(sequence.sparse, prompt_len=prompt_len, is_prefill=False)
    # What one token sees, all later ones see too: if the last was exact, all of them were.
    reusable = prompt_len if decode is not None and decode.decode_is_sparse(done) else done
    return reusable, origins + [EXACT] * (blocks_for(reusable) - len(origins))
