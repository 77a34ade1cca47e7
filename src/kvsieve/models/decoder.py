"""The model: a loop over layers, each one call into the backend."""

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from kvsieve.errors import ModelFileError, NumericalError, ShapeError
from kvsieve.kernels.backend import Backend, LayerShape, LayerWeights, Segment, StepStats
from kvsieve.models.balance import balanced_norms
from kvsieve.models.config import ModelConfig
from kvsieve.models.model_file import TensorFile
from kvsieve.models.rope import RopeTable
from kvsieve.models.split_step import SplitStep, chooses_in_python
from kvsieve.models.tensors import (
    ROPE_FACTORS,
    embedding_name,
    is_norm,
    layer_matrices,
    layer_shape,
    layer_vectors,
    optional_vectors,
    output_name,
    output_norm_name,
    tensor_shapes,
)
from kvsieve.models.weights import (
    EmbeddingTable,
    WeightMode,
    check_finite,
    check_mode,
    check_tensor,
    vector,
    weight_kind,
    weight_source,
)
from kvsieve.types import F32, I32, I64

ROWS_KEPT = 512
"""Embeddings read before the mapping's pages are given back: each may keep 4 KiB in memory."""

Progress = Callable[[int, int], None]
"""Called with how much of something is done, and how much there is."""


class Decoder:
    """A decoder-only model whose weights are packed for `backend` as `weights` says.

    The embedding stays in the mapped `file`, which must stay open. ``weights="f32"`` is slow and
    large: for golden tests.

    Building it checks all tensors (names, shapes, types, finite values) before any is packed.
    `on_progress` is called with (tensors done, all of them), checking and packing each counted.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        file: TensorFile,
        *,
        weights: WeightMode = "auto",
        on_progress: Progress | None = None,
    ) -> None:
        check_mode("Decoder", weights)
        fingerprint = file.fingerprint()
        self._progress = _Counter(on_progress, total=2 * len(file.tensors))
        _check_tensors(config, file, self._progress)
        self.config = config
        self.backend = backend
        self.fingerprint = fingerprint
        self._file = file
        self._rows_read = 0
        self._mode: WeightMode = weights
        table = (config.vocab_size, config.hidden_size)
        self._embedding = EmbeddingTable(
            file, embedding_name(config), expect=table, scale=config.embedding_scale
        )
        self._ropes, self._rope_of_layer = _rope_tables(config, file)
        self._parts: list[tuple[LayerShape, LayerWeights]] = []
        self._layers = [self._built(layer) for layer in range(config.num_layers)]
        self._output_norm = self._vector(output_norm_name(config), config.hidden_size, norm=True)
        # With 4-bit layers too the output keeps 8 bits: every logit comes straight from it.
        mode: WeightMode = "auto" if weights == "q4" else weights
        self._output = self._pack(output_name(config), table, mode=mode)
        file.forget_pages()
        self._progress.finish()

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
        # Layers that rotate by other angles have a step of their own over the same rows.
        steps = [self._begin(segments, *rope.rows(positions)) for rope in self._ropes]
        # Behind the last layer's attention only the rows whose logits are wanted matter.
        wanted = np.unique(np.asarray(logit_rows or [], np.int32))
        last = len(self._layers) - 1
        for index in range(len(self._layers)):
            kept = wanted if index == last and len(wanted) < len(hidden) else None
            self._run_layer(index, hidden, steps[self._rope_of_layer[index]], kept=kept)
            if on_layer is not None:
                on_layer()
        stats = _added([self._stats(step) for step in steps])
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

    def _built(self, layer: int) -> Any:
        """The backend's layer; what it is made of stays at hand for split steps."""
        parts = layer_shape(self.config, layer), self._layer_weights(layer)
        self._parts.append(parts)
        return self.backend.build_layer(*parts)

    def _begin(self, segments: Sequence[Segment], cos: F32, sin: F32) -> Any:
        if chooses_in_python(segments):
            return SplitStep.begin(self.backend, segments, cos, sin)
        return self.backend.begin_step(segments, cos, sin)

    def _run_layer(self, index: int, hidden: F32, step: Any, *, kept: I32 | None) -> None:
        layer = self._layers[index]
        if isinstance(step, SplitStep):
            step.run_layer(layer, self._parts[index], index, hidden=hidden, kept=kept)
        else:
            self.backend.run_layer(layer, index, hidden, step, kept=kept)

    def _stats(self, step: Any) -> StepStats:
        return step.stats() if isinstance(step, SplitStep) else self.backend.step_stats(step)

    def _layer_weights(self, layer: int) -> LayerWeights:
        matrices = {
            field: self._pack(name, shape, mode=self._mode)
            for field, (name, shape) in layer_matrices(self.config, layer).items()
        }
        there_may_be = optional_vectors(self.config, layer)
        vectors = {
            field: self._vector(name, length, norm=is_norm(field))
            for field, (name, length) in (there_may_be | layer_vectors(self.config, layer)).items()
            if field not in there_may_be or name in self._file.tensors
        }
        if "q_norm" in vectors and "k_norm" in vectors:
            vectors["q_norm"], vectors["k_norm"] = balanced_norms(
                vectors["q_norm"],
                vectors["k_norm"],
                rope_dim=self.config.rope_dim,
                interleaved=self.config.rope_interleaved,
            )
        # Packed by now: the file's pages need not stay in memory beside the copy.
        self._file.forget_pages()
        return LayerWeights(**matrices, **vectors)

    def _vector(self, name: str, length: int, *, norm: bool) -> F32:
        self._progress.advance()
        offset = self.config.norm_offset if norm else 0.0
        return vector(self._file, name, length=length, offset=offset)

    def _pack(self, name: str, shape: tuple[int, int], *, mode: WeightMode) -> Any:
        self._progress.advance()
        source = weight_source(self._file, name, expect=shape, mode=mode)
        return self.backend.pack_weight(source, kind=weight_kind(self._file.tensors[name], mode))


class _Counter:
    """Tells whoever wants to know how far loading is."""

    def __init__(self, callback: Progress | None, *, total: int) -> None:
        self._callback = callback
        self._total = total
        self._done = 0

    def advance(self) -> None:
        self._done += 1
        if self._callback is not None:
            self._callback(min(self._done, self._total), self._total)

    def finish(self) -> None:
        """Everything is done, whatever was not packed (an embedding, or what serves no one)."""
        self._done = self._total - 1
        self.advance()


def _added(parts: Sequence[StepStats]) -> StepStats:
    total = parts[0]
    for part in parts[1:]:
        total.dense_ns += part.dense_ns
        total.attention_ns += part.attention_ns
        total.select_ns += part.select_ns
        for segment, more in zip(total.segments, part.segments, strict=True):
            segment.pairs_attended += more.pairs_attended
            segment.pairs_causal += more.pairs_causal
    return total


def _rope_tables(config: ModelConfig, file: TensorFile) -> tuple[list[RopeTable], list[int]]:
    """The tables there are, and which one each layer uses."""
    plain = RopeTable(
        rope_dim=config.rope_dim,
        theta=config.rope_theta,
        factors=_rope_factors(config, file),
        scaling=config.rope_scaling,
    )
    if config.local_rope_theta is None or not any(config.windows):
        return [plain], [0] * config.num_layers
    local = RopeTable(rope_dim=config.rope_dim, theta=config.local_rope_theta)
    return [plain, local], [int(window > 0) for window in config.windows]


def _check_tensors(config: ModelConfig, file: TensorFile, progress: _Counter) -> None:
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
        progress.advance()


def _rope_factors(config: ModelConfig, file: TensorFile) -> F32 | None:
    if config.source != "gguf" or ROPE_FACTORS not in file.tensors:
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
