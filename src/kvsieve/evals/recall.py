"""Mass recall: how much of full attention falls on the blocks that were read while decoding.

The queries, the lists and the cache are those of the run itself (`Walk.step`, `on_attention`);
only what full attention would have been is computed here. Source: docs/selection.md, section 8.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvsieve.attention.stats import relative_error, summarize_kept_mass
from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.engine.walk import Walk
from kvsieve.errors import ConfigError
from kvsieve.evals.corpus import Passage
from kvsieve.evals.passages import check_passage, decode_passage
from kvsieve.evals.reads import attend_bytes, choose_bytes
from kvsieve.evals.settings import Trial
from kvsieve.kernels.backend import AttentionTrace, BlockLists
from kvsieve.types import BLOCK_SIZE, F32, F64, Bool

QUERIES = 64
"""Decoded positions at the end of the text whose attention is measured."""


@dataclass(frozen=True, kw_only=True)
class RecallRow:
    """What one setting kept of full attention, over all layers that ran sparsely, or one of them.

    ``layer`` and ``head`` are None in a row over all of them. ``kept_mass`` is the mean over
    (layer, head, query) of the full-attention probability that fell on the blocks read,
    ``kept_mass_p5`` its 5th percentile; ``oracle_mass`` what the best blocks by true mass would
    have kept, as many for each head and query as were read. ``estimate`` is the mean of the kept
    mass that the engine estimated as it went, ``estimate_mae`` the mean absolute error of these
    estimates, ``estimate_bias`` their mean minus the true one (above 0: too optimistic); None where
    the selector does not estimate. ``output_error``: mean relative L2 distance of the attention
    output from the full one, by selection alone. ``blocks`` is the mean length of a list.
    ``choose_bytes`` are bytes read to choose, per token of the context and KV
    head; ``read_bytes`` those of the blocks read, mean per query token, layer and KV head.
    ``exact_layers``: layers that read everything all the same, left out of the means.
    """

    attn: str
    setting: str
    text: str
    length: int
    queries: int
    layer: int | None
    head: int | None
    kept_mass: float
    kept_mass_p5: float
    oracle_mass: float
    estimate: float | None
    estimate_mae: float | None
    estimate_bias: float | None
    output_error: float
    blocks: float
    choose_bytes: float
    read_bytes: float | None
    density: float | None
    exact_layers: int


@dataclass(frozen=True, kw_only=True)
class LayerRecall:
    """One layer's measurements, each f64 ``[Hq, queries]``.

    ``estimate`` is what the engine said of ``kept``; None where nobody estimated.
    """

    kept: F64
    oracle: F64
    error: F64
    blocks: F64
    estimate: F64 | None = None

    def of_head(self, head: int) -> "LayerRecall":
        """One query head's measurements, f64 ``[1, queries]``."""
        parts = {name: each for name, each in vars(self).items() if each is not None}
        return LayerRecall(**{name: each[head : head + 1] for name, each in parts.items()})


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Measurements by layer, for those that ran sparsely."""

    layers: dict[int, LayerRecall]
    num_layers: int
    choose_bytes: float
    read_bytes: float | None
    density: float | None


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """Keeps what attention of every decode step ran with, by layer."""

    traces: dict[int, list[AttentionTrace]] = field(default_factory=dict)

    def hear(self, layer: int, trace: AttentionTrace) -> None:
        """For `Walk.step`."""
        self.traces.setdefault(layer, []).append(trace)


def measure_recall(
    llm: LLM,
    passage: Passage,
    *,
    trial: Trial,
    queries: int = QUERIES,
    on_progress: Progress | None = None,
) -> Recall:
    """Read all but the last `queries` tokens as the setting says, decode those, and measure.

    Raises ConfigError for an exact trial, which keeps everything by definition, and for a sparse
    one that read everything.
    """
    if trial.arm.sparse is None:
        raise ConfigError(f"[recall] trial: expected a sparse setting, got {trial.name}")
    check_passage(trial, passage, positions=queries)
    recorder = Recorder()
    with decode_passage(
        llm, passage, trial=trial, positions=queries, on_progress=on_progress
    ) as walk:
        for token in passage.token_ids[-queries:]:
            walk.step(token, on_attention=recorder.hear)
        report = walk.report
        trial.check_sparse(report)
        sparse_layers = {
            layer: traces
            for layer, traces in recorder.traces.items()
            if all(trace.lists is not None for trace in traces)
        }
        if not sparse_layers:
            raise ConfigError(
                f"[recall] {trial.name}: expected lists of blocks from some layer, got none"
            )
        measured = {
            layer: replace(
                layer_recall(walk, layer, traces), estimate=_estimate(walk, layer, queries=queries)
            )
            for layer, traces in sparse_layers.items()
        }
    layout = walk.cache.pool.layout
    return Recall(
        layers=measured,
        num_layers=llm.config.num_layers,
        choose_bytes=choose_bytes(
            trial.arm.sparse,
            layout,
            num_kv_heads=llm.config.num_kv_heads,
            num_tokens=len(passage.token_ids),
        ),
        read_bytes=attend_bytes(report.decode, layout),
        density=report.decode.density,
    )


def recall_rows(
    recall: Recall, passage: Passage, *, trial: Trial, by: str = "all"
) -> Iterator[RecallRow]:
    """One row over everything (``all``), or one per ``layer`` or per ``head`` of a layer."""
    if by not in ("all", "layer", "head"):
        raise ConfigError(f"[recall] by: expected one of all, layer, head, got {by!r}")
    layers = list(recall.layers.items())
    parts: list[tuple[int | None, int | None, list[LayerRecall]]] = []
    if by == "all":
        parts.append((None, None, list(recall.layers.values())))
    elif by == "layer":
        parts += [(layer, None, [one]) for layer, one in layers]
    else:
        parts += [
            (layer, head, [one.of_head(head)])
            for layer, one in layers
            for head in range(len(one.kept))
        ]
    for layer, head, chosen in parts:
        kept = np.concatenate([one.kept.ravel() for one in chosen])
        summary = summarize_kept_mass(kept)
        estimate, mae, bias = estimate_error(chosen)
        yield RecallRow(
            attn=trial.arm.label,
            setting=trial.setting,
            text=passage.source,
            length=len(passage.token_ids),
            queries=chosen[0].kept.shape[1],
            layer=layer,
            head=head,
            kept_mass=round(summary.mean, 6),
            kept_mass_p5=round(summary.p5, 6),
            oracle_mass=_mean([one.oracle for one in chosen]),
            estimate=estimate,
            estimate_mae=mae,
            estimate_bias=bias,
            output_error=_mean([one.error for one in chosen]),
            blocks=_mean([one.blocks for one in chosen]),
            choose_bytes=round(recall.choose_bytes, 3),
            read_bytes=recall.read_bytes,
            density=recall.density,
            exact_layers=recall.num_layers - len(layers),
        )


def estimate_error(
    layers: Sequence[LayerRecall],
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Mean estimate of the kept mass, its mean absolute error, and its bias."""
    found = [(one.estimate, one.kept) for one in layers if one.estimate is not None]
    if not found:
        return None, None, None
    estimate = np.concatenate([each.ravel() for each, _ in found])
    wrong = estimate - np.concatenate([kept.ravel() for _, kept in found])
    mean, mae, bias = float(estimate.mean()), float(np.abs(wrong).mean()), float(wrong.mean())
    return round(mean, 6), round(mae, 6), round(bias, 6)


def _estimate(walk: Walk, layer: int, *, queries: int) -> F64 | None:
    """What the engine estimated of the last decode steps: ``[Hq, queries]``."""
    _, decode = walk.totals
    if len(decode.kept_mass) < queries:
        return None
    steps = [step[layer] for step in decode.kept_mass[-queries:]]
    return np.stack(steps, axis=1).astype(np.float64)


def layer_recall(walk: Walk, layer: int, traces: Sequence[AttentionTrace]) -> LayerRecall:
    """Compare the lists of one layer's decode steps, the walk's last ones, with full attention.

    The cache by now holds all tokens; a query sees those up to its own position.
    """
    keys, values = walk.cache.read(layer)
    num_kv_heads, num_tokens, _ = keys.shape
    q = np.stack([trace.q[0] for trace in traces], axis=1)
    group = len(q) // num_kv_heads
    start = num_tokens - len(traces)
    visible = np.arange(num_tokens)[None, :] <= np.arange(start, num_tokens)[:, None]
    found: list[LayerRecall] = []
    for head in range(len(q)):
        kv_head = head // group
        read = np.zeros((len(traces), -(-num_tokens // BLOCK_SIZE)), bool)
        for row, trace in enumerate(traces):
            assert trace.lists is not None  # measured layers ran sparsely
            read[row, head_blocks(trace.lists, head, num_q_heads=len(q))] = True
        found.append(
            head_recall(q[head], keys[kv_head], values[kv_head], read=read, visible=visible)
        )
    names = ("kept", "oracle", "error", "blocks")
    return LayerRecall(**{n: np.stack([getattr(one, n) for one in found]) for n in names})


def head_blocks(lists: BlockLists, head: int, *, num_q_heads: int) -> F32:
    """Blocks that a query head of a decode step read: its own list, or its group's."""
    row = head * lists.num_heads // num_q_heads
    return np.asarray(lists.indices[lists.indptr[row] : lists.indptr[row + 1]])


def head_recall(q: F32, keys: F32, values: F32, *, read: Bool, visible: Bool) -> LayerRecall:
    """One head's measurements.

    Parameters
    ----------
    q : f32 ``[R, D]``, the softmax scale folded in
    keys, values : f32 ``[T, D]``
    read : bool ``[R, ceil(T / 32)]``, the blocks that each query read
    visible : bool ``[R, T]``, causality

    Returns
    -------
    LayerRecall of f64 arrays ``[R]``. Products are f32, sums over tokens f64.
    """
    logits = np.where(visible, q @ keys.T, np.float32(-np.inf))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs = weights / weights.sum(axis=1, keepdims=True)
    starts = np.arange(0, probs.shape[1], BLOCK_SIZE)
    mass = np.add.reduceat(probs, starts, axis=1, dtype=np.float64)
    kept = np.where(read, mass, 0.0).sum(axis=1)
    best = np.sort(mass, axis=1)[:, ::-1].cumsum(axis=1)
    counts = read.sum(axis=1)
    tokens = np.repeat(read, BLOCK_SIZE, axis=1)[:, : probs.shape[1]]
    selected = np.where(tokens, probs, np.float32(0)) @ values / kept[:, None]
    return LayerRecall(
        kept=kept,
        oracle=best[np.arange(len(best)), counts - 1],
        error=relative_error(selected, probs @ values),
        blocks=counts.astype(np.float64),
    )


def _mean(arrays: Sequence[F64]) -> float:
    return round(float(np.mean([array.mean() for array in arrays])), 6)
