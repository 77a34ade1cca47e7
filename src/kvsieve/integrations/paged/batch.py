"""One layer of a padded batch: positions as the host counts them outside, real tokens inside."""

from dataclasses import dataclass

import numpy as np

from kvsieve.errors import ShapeError
from kvsieve.integrations.paged.host import AttentionHost
from kvsieve.integrations.paged.layer_rows import LayerRows
from kvsieve.integrations.paged.padding import RowMask
from kvsieve.integrations.paged.recorder import NOT_CAUSAL
from kvsieve.types import F32, Bool


@dataclass(frozen=True, kw_only=True)
class PromptPart:
    """Of some new tokens of a row: how many belong to the prompt, and how long that is."""

    num_prompt: int
    prompt_len: int


class BatchLayer:
    """Pages of one layer for every row of a batch, and which positions of each row are real.

    ``real`` is ``bool [B, T]`` over all positions so far, padding included.
    """

    def __init__(
        self,
        host: AttentionHost,
        *,
        layer: int,
        num_rows: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self.host = host
        self.layer = layer
        self.rows = LayerRows(
            host.settings,
            num_rows=num_rows,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            layer=layer,
        )
        self.real: Bool = np.zeros((num_rows, 0), np.bool_)
        self._prompt_ends = [0] * num_rows

    def append(self, k: F32, v: F32, masks: list[RowMask]) -> None:
        """Write the real ones among new tokens; k, v f32 ``[B, T, Hkv, D]``."""
        q_len = k.shape[1]
        for row, mask in enumerate(masks):
            new = mask.real[-q_len:]
            self.rows.append(row, _picked(k[row], new), _picked(v[row], new))
        self.real = np.stack([mask.real for mask in masks])

    def attend(
        self,
        q: F32,
        masks: list[RowMask],
        *,
        prompt_len: int | None,
        scale: float,
        record: bool = True,
    ) -> F32:
        """Attention of the last T positions, whose keys are written.

        Parameters
        ----------
        q : f32 ``[B, T, Hq, D]``
        masks : of all positions up to the last; outputs of padding are 0
        prompt_len : positions of the whole prompt, padding included. None: several positions at
            once are a prompt that ends here, a single one is decoded unless it is the first.
        scale : factor of the logits
        record : whether a prompt's queries add to the importance of what they read

        Returns
        -------
        f32 ``[B, T, Hq, D]``
        """
        if q.shape[2] % self.rows.num_kv_heads:
            raise ShapeError(
                f"[kvsieve attention] query: expected a multiple of {self.rows.num_kv_heads} KV "
                f"heads, got {q.shape[2]} heads"
            )
        q_len = q.shape[1]
        out: F32 = np.zeros(q.shape, np.float32)
        for row, mask in enumerate(masks):
            new = mask.real[-q_len:]
            if not new.any():
                continue
            rows = _picked(q[row], new)
            start = self.rows.num_tokens(row) - len(rows)
            part = self._prompt_part(row, mask.real, q_len=q_len, prompt_len=prompt_len)
            if mask.tokens is not None:
                out[row, new] = self._attend_tokens(row, rows, mask.tokens, scale=scale)
                continue
            out[row, new], reads = self.rows.attend(
                row,
                rows,
                start=start,
                num_prompt=part.num_prompt,
                prompt_len=part.prompt_len,
                scale=scale,
                record=record,
            )
            for read in reads:
                self.host.recorder.count(
                    read, layer=self.layer, row=row, prompt_len=part.prompt_len
                )
        return out

    def truncate(self, num_positions: int) -> None:
        """Forget every position from `num_positions` on."""
        self.real = self.real[:, :num_positions]
        for row, held in enumerate(self.real.sum(axis=1)):
            self.rows.truncate(row, int(held))

    def pick(self, rows: list[int]) -> None:
        """Let the batch be these rows, in this order."""
        self.rows.pick(rows)
        self.real = self.real[rows]
        self._prompt_ends = [self._prompt_ends[row] for row in rows]

    # -- inside ------------------------------------------------------------------------------
    def _attend_tokens(self, row: int, q: F32, tokens: Bool, *, scale: float) -> F32:
        self.host.recorder.note(NOT_CAUSAL)
        self.host.recorder.count_exact(
            layer=self.layer,
            num_tokens=self.rows.num_tokens(row),
            q_len=len(q),
            num_kv_heads=self.rows.num_kv_heads,
        )
        return self.rows.attend_tokens(row, q, tokens=tokens, scale=scale)

    def _prompt_part(
        self, row: int, real: Bool, *, q_len: int, prompt_len: int | None
    ) -> PromptPart:
        """In real tokens; `prompt_len` counts positions."""
        past, total = len(real) - q_len, len(real)
        if prompt_len is None:
            is_prompt = q_len > 1 or not real[:past].any()
            if is_prompt:
                self._prompt_ends[row] = int(real.sum())
            return PromptPart(
                num_prompt=int(real[past:].sum()) if is_prompt else 0,
                prompt_len=self._prompt_ends[row],
            )
        # Positions of the prompt that are still to come are real: padding stands before it.
        to_come = max(0, prompt_len - total)
        return PromptPart(
            num_prompt=int(real[past : max(past, prompt_len)].sum()),
            prompt_len=int(real[:prompt_len].sum()) + to_come,
        )


def _picked(rows: F32, wanted: Bool) -> F32:
    return rows if wanted.all() else np.ascontiguousarray(rows[wanted])
