"""A stand-in for the model that says a given list of tokens, so that the loop around it can be
tested alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.kv_cache import KVCache
from kvsieve.engine.generation import Generation
from kvsieve.engine.outputs import EngineInfo
from kvsieve.engine.reply import Engine
from kvsieve.engine.runner import Runner
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.scheduler import Scheduler
from kvsieve.engine.sequence import Sequence as TokenSequence
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.kernels.backend import Segment, SegmentStats, StepStats
from kvsieve.kernels.layout import PageLayout
from kvsieve.models.gguf import GgufFile
from tests.tiny_model import write_tiny_gguf

NUM_LAYERS, NUM_KV_HEADS = 3, 2
# Times and counts that each step of the stand-in reports.
DENSE_NS, ATTENTION_NS, SELECT_NS, ATTENDED, CAUSAL = 5_000_000, 3_000_000, 1_000_000, 7, 11


class ScriptedDecoder:
    """Its logits favour the tokens of `script` in turn, and its second choice is `runner_up`."""

    def __init__(self, script: Sequence[int], *, vocab_size: int, runner_up: int = 0) -> None:
        self.script = list(script)
        self.vocab_size = vocab_size
        self.runner_up = runner_up
        self.segments: list[Segment] = []
        self.token_ids: list[list[int]] = []

    def forward(
        self,
        token_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        logit_rows: Sequence[int] | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> tuple[np.ndarray | None, StepStats]:
        for _ in range(NUM_LAYERS):
            if on_layer is not None:
                on_layer()
        self.segments += segments
        self.token_ids.append(token_ids.tolist())
        counts = [SegmentStats(pairs_attended=ATTENDED, pairs_causal=CAUSAL) for _ in segments]
        stats = StepStats(
            dense_ns=DENSE_NS, attention_ns=ATTENTION_NS, select_ns=SELECT_NS, segments=counts
        )
        if logit_rows is None:
            return None, stats
        logits = np.zeros((len(logit_rows), self.vocab_size), np.float32)
        for row in logits:
            row[self.runner_up] = 1
            row[self.script.pop(0)] = 2
        return logits, stats


def tiny_tokenizer(folder: Path) -> Tokenizer:
    with GgufFile.open(write_tiny_gguf(folder / "tiny.gguf")) as file:
        return Tokenizer.from_metadata(file.metadata)


def make_generation(
    decoder: ScriptedDecoder,
    tokenizer: Tokenizer,
    *,
    params: SamplingParams | None = None,
    prompt_len: int = 5,
    max_new_tokens: int | None = None,
    num_blocks: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
    should_cancel: Callable[[], bool] | None = None,
) -> Generation:
    params = SamplingParams() if params is None else params
    layout = PageLayout(k_type="f32", v_type="f32", head_dim=16)
    pool = BlockPool(
        layout, num_layers=NUM_LAYERS, num_kv_heads=NUM_KV_HEADS, num_blocks=num_blocks
    )
    cache = KVCache(pool, max_tokens=32 * num_blocks)
    info = EngineInfo(
        model_name="scripted", fingerprint="0" * 16, isa="none", threads=1, version="0"
    )
    return Generation(
        TokenSequence(prompt_ids=np.arange(10, 10 + prompt_len, dtype=np.int32), cache=cache),
        params,
        engine=Engine(
            scheduler=Scheduler(prefill_chunk=32),
            runner=Runner(decoder),  # type: ignore[arg-type]
            tokenizer=tokenizer,
            info=info,
        ),
        max_new_tokens=params.max_tokens if max_new_tokens is None else max_new_tokens,
        on_progress=on_progress,
        should_cancel=should_cancel,
    )
