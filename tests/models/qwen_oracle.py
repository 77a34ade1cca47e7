"""A Qwen3 forward pass in float64: a Llama whose heads are normalised, and whose rows stay put."""

from pathlib import Path

import numpy as np

from tests.models.llama_oracle import LlamaOracle


class QwenOracle(LlamaOracle):
    """What wrong loaders would compute instead:

    ``reorder_rows``  rows of queries and keys taken for those of a Llama file
    ``head_norms``    False: the norms of queries and keys left out
    ``norm_first``    False: these norms taken after the rotation
    """

    architecture = "qwen3"

    def __init__(
        self,
        path: Path,
        *,
        reorder_rows: bool = False,
        head_norms: bool = True,
        norm_first: bool = True,
    ) -> None:
        super().__init__(path, restore_rows=reorder_rows)
        self.head_norms = head_norms
        self.norm_first = norm_first

    def _prepare(self, heads: np.ndarray, layer: dict[str, np.ndarray], which: str) -> np.ndarray:
        if not self.head_norms:
            return heads
        weight = layer[f"attn_{which}_norm"]
        if self.norm_first:
            return self._norm(heads, weight)
        # The caller rotates once more, so a turn back goes before it.
        return self._swap(self._rotate(self._swap(self._norm(self._rotate(heads), weight))))

    def _swap(self, heads: np.ndarray) -> np.ndarray:
        """Halves exchanged: a rotation between two swaps goes the other way."""
        half = self.rope_dim // 2
        parts = heads[..., half : self.rope_dim], heads[..., :half], heads[..., self.rope_dim :]
        return np.concatenate(parts, axis=-1)
