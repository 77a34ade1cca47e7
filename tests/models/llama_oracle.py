"""A Llama forward pass in float64, as the original checkpoints define it; no code of ours in it.

Weights come from the file through the `gguf` package. Query and key rows are put back from the
file's order, where neighbours rotate together, into the checkpoint's, where dimension ``i``
rotates with ``i + rope_dim / 2``: so that an error in either order cannot cancel itself.
"""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np


def checkpoint_order(rows: np.ndarray, head_dim: int, rope_dim: int) -> np.ndarray:
    """Rows of a query or key matrix in the checkpoint's order, head by head.

    In a head of 8 the file holds the checkpoint's rows 0, 4, 1, 5, 2, 6, 3, 7.
    """
    heads = rows.reshape(-1, head_dim, rows.shape[-1])
    restored = heads.copy()
    half = rope_dim // 2
    for pair in range(half):
        restored[:, pair] = heads[:, 2 * pair]
        restored[:, pair + half] = heads[:, 2 * pair + 1]
    return restored.reshape(rows.shape)


class LlamaOracle:
    """``restore_rows=False`` leaves out the reordering: what a wrong loader would compute."""

    architecture = "llama"

    def __init__(self, path: Path, *, restore_rows: bool = True) -> None:
        reader = gguf.GGUFReader(path)

        def value(name: str, default: float | None = None) -> float:
            field = reader.get_field(f"{self.architecture}.{name}")
            return default if field is None else field.contents()  # type: ignore[return-value]

        self.heads = int(value("attention.head_count"))
        self.kv_heads = int(value("attention.head_count_kv"))
        self.layers = int(value("block_count"))
        self.eps = value("attention.layer_norm_rms_epsilon")
        self.theta = value("rope.freq_base")
        self.weights = {
            tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            for tensor in reader.tensors
        }
        self.head_dim = len(self.weights["blk.0.attn_q.weight"]) // self.heads
        self.rope_dim = int(value("rope.dimension_count", self.head_dim))
        self.restore_rows = restore_rows

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """``f64 [len(ids), vocab]``"""
        w = self.weights
        x = w["token_embd.weight"][list(ids)]
        for i in range(self.layers):
            layer = {
                name.split(".")[2]: value
                for name, value in w.items()
                if name.startswith(f"blk.{i}.")
            }
            x = x + self._attention(layer, self._norm(x, layer["attn_norm"]))
            h = self._norm(x, layer["ffn_norm"])
            gate, up = h @ layer["ffn_gate"].T, h @ layer["ffn_up"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["ffn_down"].T
        output = w.get("output.weight", w["token_embd.weight"])
        return self._norm(x, w["output_norm.weight"]) @ output.T

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def _attention(self, layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        n, d = len(x), self.head_dim
        wq, wk = layer["attn_q"], layer["attn_k"]
        if self.restore_rows:
            wq = checkpoint_order(wq, d, self.rope_dim)
            wk = checkpoint_order(wk, d, self.rope_dim)
        q = self._rotate(self._prepare((x @ wq.T).reshape(n, self.heads, d), layer, "q"))
        k = self._rotate(self._prepare((x @ wk.T).reshape(n, self.kv_heads, d), layer, "k"))
        v = (x @ layer["attn_v"].T).reshape(n, self.kv_heads, d)
        out = np.zeros((n, self.heads, d))
        for head in range(self.heads):
            kv = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, kv].T / np.sqrt(d)
            scores[np.triu_indices(n, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, kv]
        return out.reshape(n, -1) @ layer["attn_output"].T

    def _prepare(self, heads: np.ndarray, layer: dict[str, np.ndarray], which: str) -> np.ndarray:
        """What happens to queries or keys before they are rotated: nothing, in a Llama."""
        return heads

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        half = self.rope_dim // 2
        frequencies = self.theta ** (-np.arange(half) * 2 / self.rope_dim)
        if "rope_freqs.weight" in self.weights:
            frequencies = frequencies / self.weights["rope_freqs.weight"]
        angles = np.arange(len(x))[:, None, None] * frequencies
        a, b = x[..., :half], x[..., half : self.rope_dim]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate(
            [a * cos - b * sin, b * cos + a * sin, x[..., self.rope_dim :]], axis=-1
        )
