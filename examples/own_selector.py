"""A selector of your own, run by the engine beside the built-in ones.

    python examples/own_selector.py

A block is scored by its longest key and its first one. Everything else comes from `Selector`: the
gate, the guards, the budget, what a group of heads or a prompt's tile shares.
"""

from dataclasses import dataclass

import numpy as np

from kvsieve import LLM, SamplingParams, SparseAttention
from kvsieve.attention.selectors.base import Selector
from kvsieve.evals.tasks import passkey
from kvsieve.types import F32


@dataclass(frozen=True, kw_only=True)
class LongestKey(Selector):
    """Score a block by the better logit of its longest key and its first one."""

    def score(self, q: F32, k: F32, *, scale: float) -> F32:
        """``f32 [Hq, R, blocks]`` of queries ``[Hq, R, D]`` and keys ``[Hkv, n, D]``."""
        starts = np.arange(0, k.shape[1], self.block_size)
        lengths = np.linalg.norm(k, axis=2)
        longest = [
            start + lengths[:, start : start + self.block_size].argmax(axis=1) for start in starts
        ]
        first = np.broadcast_to(starts, (len(k), len(starts)))
        heads = q.reshape(len(k), -1, q.shape[2])  # the rows that read each KV head
        logits = [
            heads @ np.take_along_axis(k, positions[..., None], axis=1).swapaxes(1, 2)
            for positions in (first, np.stack(longest, axis=1))
        ]
        best = np.maximum(*logits) * np.float32(scale)
        return best.reshape(*q.shape[:2], -1)


def main() -> None:
    """Ask for a pass key in 2,000 tokens, of which a query reads a quarter."""
    settings = {
        "LongestKey": SparseAttention(rule=LongestKey(), k=16, share="group"),
        "even": SparseAttention(selector="even", k=16, share="group"),
    }
    with LLM("smollm2") as llm:
        task = passkey(llm.tokenizer, length=2000, depth=0.5)
        for name, sparse in settings.items():
            reply = llm.generate(
                task.token_ids, SamplingParams(max_tokens=task.reply_tokens), sparse=sparse
            )
            read = reply.attention.decode.density
            print(
                f"{name}: {reply.text!r}, read {read:.2f} of the blocks, "
                f"{reply.timings.predicted_per_second:.1f} tokens per second"
            )


if __name__ == "__main__":
    main()
