"""OpenVINO GenAI reading the GGUF file; it takes text, so its count of prompt tokens is its own."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import openvino_genai as genai
from json_lines import serve

CACHE_GB = 2


class Engine:
    def __init__(self, *, model: str, threads: int, sparse_mode: str | None, batch: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = batch
        # A second run of a prompt must read it again.
        scheduler.enable_prefix_caching = False
        if sparse_mode is not None:
            scheduler.use_sparse_attention = True
            sparse = genai.SparseAttentionConfig()
            sparse.mode = getattr(genai.SparseAttentionMode, sparse_mode)
            scheduler.sparse_attention_config = sparse
        self._pipeline = genai.LLMPipeline(
            model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads
        )

    def measure(self, *, token_ids: Sequence[int], text: str, decode_tokens: int) -> dict[str, Any]:
        result = self._generate(text, decode_tokens + 1, ignore_eos=True)
        metrics = result.perf_metrics
        return {
            "prompt_tokens": metrics.get_num_input_tokens(),
            "prefill_s": metrics.get_ttft().mean / 1e3,
            "decode_ms": metrics.get_tpot().mean,
        }

    def answer(self, *, token_ids: Sequence[int], text: str, max_tokens: int) -> dict[str, Any]:
        return {"text": self._generate(text, max_tokens, ignore_eos=False).texts[0]}

    def _generate(self, text: str, max_tokens: int, *, ignore_eos: bool) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = ignore_eos
        config.do_sample = False
        config.apply_chat_template = False
        return self._pipeline.generate([text], config)


if __name__ == "__main__":
    serve(lambda settings: (Engine(**settings), version("openvino-genai")))
