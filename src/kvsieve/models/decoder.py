"""The model: a loop over layers, each one call into the backend."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, get_args

import numpy as np

from kvsieve.errors import ConfigError, ModelFileError, NumericalError, ShapeError
from kvsieve.kernels.backend import Backend, LayerWeights, Segment, StepStats
from kvsieve.models.config import EMBEDDING, OUTPUT, ModelConfig
from kvsieve.models.gguf import GgufFile
from kvsieve.models.rope import RopeTable
from kvsieve.models.tensors import (
    OUTPUT_NORM,
    ROPE_FACTORS,
    layer_matrices,
    layer_norms,
    layer_shape,
    tensor_shapes,
)
from kvsieve.models.weights import (
    EmbeddingTable,
    WeightMode,
    check_finite,
    check_tensor,
    vector,
    weight_kind,
    weight_source,
)
from kvsieve.types import F32, I32, I64

ROWS_KEPT = 512
"""Embeddings read before the mapping's pages are given back: each may keep 4 KiB in memory."""


class Decoder:
    """A decoder-only model whose weights are packed for `backend`.

    The embedding stays in the mapped `file`, which must stay open. ``weights="f32"`` keeps every
    matrix as f32 instead of 4 or 8 bits: slow and large, for golden tests.

    Building it checks all tensors (names, shapes, types, finite values) before any is packed.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        file: GgufFile,
        *,
        weights: WeightMode = "packed",
    ) -> None:
        if weights not in get_args(WeightMode):
            raise ConfigError(
                f"[Decoder] weights: expected one of {', '.join(get_args(WeightMode))}, "
                f"got {weights!r}"
            )
        fingerprint = file.fingerprint()
        _check_tensors(config, file)
        self.config = config
        self.backend = backend
        self.fingerprint = fingerprint
        self._file = file
        self._rows_read = 0
        self._mode: WeightMode = weights
        table = (config.vocab_size, config.hidden_size)
        self._embedding = EmbeddingTable(file, EMBEDDING, expect=table)
        self._rope = RopeTable(
            rope_dim=config.rope_dim, theta=config.rope_theta, factors=_rope_factors(config, file)
        )
        shape = layer_shape(config)
        self._layers = [
            backend.build_layer(shape, self._layer_weights(layer))
            for layer in range(config.num_layers)
        ]
        self._output_norm = vector(file, OUTPUT_NORM, length=config.hidden_size)
        self._output = self._pack(EMBEDDING if config.tie_embeddings else OUTPUT, table)
        file.forget_pages()

    def forward(
        self,
        token_ids: I32,
        segments: Sequence[Segment],
        *,
        positions: I32 | I64 | None = None,
        logit_rows: Sequence[int] | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> tuple[F32 | None, StepStats]:
        """Run one step: append the tokens to their caches, and give logits of the rows asked for.

        Parameters
        ----------
        token_ids : i32 [T]
            The segments' tokens, one segment after the other (``T = sum of q_len``).
        segments : what each sequence contributes, and its cache
        positions : integers [T] or None
            Position of each token in its sequence; None: ``start, start + 1, ...`` per segment.
        logit_rows : indices into the T rows, or None for no logits
        on_layer : called after each layer; what it raises ends the step
            The caches then hold rows of some layers only, and the step has to be run again.

        Returns
        -------
        logits : f32 [len(logit_rows), vocab_size] or None
        stats : StepStats
            The output norm and projection count as dense.

        Raises
        ------
        ShapeError, ConfigError
            Token ids, positions or rows that do not fit; nothing has run.
        NumericalError
            A logit is NaN or infinite.
        """
        positions = _check_step(token_ids, segments, positions, logit_rows)
        hidden = self._embedding.rows(token_ids)
        self._rows_read += len(token_ids)
        if self._rows_read >= ROWS_KEPT:
            self._file.forget_pages()
            self._rows_read = 0
        cos, sin = self._rope.rows(positions)
        step = self.backend.begin_step(segments, cos, sin)
        # Behind the last layer's attention only the rows whose logits are wanted matter.
        wanted = np.unique(np.asarray(logit_rows or [], np.int32))
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            kept = wanted if index == last and len(wanted) < len(hidden) else None
            self.backend.run_layer(layer, index, hidden, step, kept=kept)
            if on_layer is not None:
                on_layer()
        stats = self.backend.step_stats(step)
        if logit_rows is None:
            return None, stats
        start = perf_counter_ns()
        logits = self._logits(hidden[np.asarray(logit_rows, np.int64)])
        stats.dense_ns += perf_counter_ns() - start
        return logits, stats

    def _logits(self, hidden: F32) -> F32:
        if not len(hidden):
            return np.empty((0, self.config.vocab_size), np.float32)
        normed = self.backend.rms_norm(hidden, self._output_norm, eps=self.config.rms_norm_eps)
        logits = self.backend.project(normed, self._output)
        # NaN and infinity survive a sum, which takes a fifth of the time of looking at each.
        if not np.isfinite(logits.sum()) and not np.isfinite(logits).all():
            raise NumericalError(
                "[Decoder.forward] logits: expected finite numbers, got NaN or inf"
            )
        return logits

    def _layer_weights(self, layer: int) -> LayerWeights:
        matrices = {
            field: self._pack(name, shape)
            for field, (name, shape) in layer_matrices(self.config, layer).items()
        }
        norms = {
            field: vector(self._file, name, length=length)
            for field, (name, length) in layer_norms(self.config, layer).items()
        }
        # Packed by now: the file's pages need not stay in memory beside the copy.
        self._file.forget_pages()
        return LayerWeights(**matrices, **norms)

    def _pack(self, name: str, shape: tuple[int, int]) -> Any:
        source = weight_source(self._file, name, expect=shape, mode=self._mode)
        kind = weight_kind(self._file.tensors[name], self._mode)
        return self.backend.pack_weight(source, kind=kind)


def _check_tensors(config: ModelConfig, file: GgufFile) -> None:
    """Every tensor there must be is there and sound, and there is none we would not use."""
    required, optional = tensor_shapes(config)
    unknown = [name for name in file.tensors if name not in required and name not in optional]
    if unknown:
        raise ModelFileError(
            f"[Decoder] {file.path}: expected the tensors of a {config.architecture} model of "
            f"{config.num_layers} layers, got also {unknown[0]!r} ({len(unknown)} such)"
        )
    present = {name: shape for name, shape in optional.items() if name in file.tensors}
    for name, shape in {**required, **present}.items():
        check_tensor(file, name, expect=shape)
    for name in file.tensors:
        check_finite(file, [name])
        file.forget_pages()


def _rope_factors(config: ModelConfig, file: GgufFile) -> F32 | None:
    if ROPE_FACTORS not in file.tensors:
        return None
    factors = vector(file, ROPE_FACTORS, length=config.rope_dim // 2)
    if not (factors > 0).all():
        raise ModelFileError(
            f"[Decoder] {file.path}: tensor {ROPE_FACTORS!r}: expected positive numbers, "
            f"got {factors.min()}"
        )
    return factors


def _check_step(
    token_ids: I32,
    segments: Sequence[Segment],
    positions: I32 | I64 | None,
    logit_rows: Sequence[int] | None,
) -> I32 | I64:
    num_rows = sum(segment.q_len for segment in segments)
    if num_rows < 1:
        raise ShapeError("[Decoder.forward] segments: expected at least one row, got none")
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu" or len(token_ids) != num_rows:
        raise ShapeError(
            f"[Decoder.forward] token_ids: expected integers [{num_rows}], "
            f"got {token_ids.dtype} {token_ids.shape}"
        )
    if positions is None:
        positions = np.concatenate(
            [np.arange(s.start, s.start + s.q_len, dtype=np.int64) for s in segments]
        )
    if positions.shape != (num_rows,) or positions.dtype.kind not in "iu":
        raise ShapeError(
            f"[Decoder.forward] positions: expected integers [{num_rows}], "
            f"got {positions.dtype} {positions.shape}"
        )
    if any(not 0 <= row < num_rows for row in logit_rows or ()):
        raise ShapeError(
            f"[Decoder.forward] logit_rows: expected rows below {num_rows}, got {logit_rows}"
        )
    return positions
