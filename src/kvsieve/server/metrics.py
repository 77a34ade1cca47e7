"""``/metrics``: the engine's counts in Prometheus' format, by llama.cpp's and vLLM's names."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvsieve.engine.requests import GenerationService, HistogramValue, ServiceMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_COUNTERS: Mapping[str, tuple[str, str]] = {
    "llamacpp:prompt_tokens": ("prompt_tokens", "Prompt tokens that went through the model."),
    "llamacpp:prompt_seconds": ("prompt_seconds", "Seconds spent on prompts."),
    "llamacpp:tokens_predicted": ("generated_tokens", "Tokens generated."),
    "llamacpp:tokens_predicted_seconds": ("generated_seconds", "Seconds spent on generating."),
    "llamacpp:n_decode": ("steps", "Passes through the model."),
}
_VLLM_COUNTERS: Mapping[str, tuple[str, str]] = {
    "vllm:prompt_tokens": ("prefix_queries", "Prompt tokens, those from the cache included."),
    "vllm:generation_tokens": ("generated_tokens", "Tokens generated."),
    "vllm:prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the cache."),
    "vllm:prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the cache."),
}


class EngineCollector(Collector):
    """Asks the engine when it is asked."""

    def __init__(self, service: GenerationService, *, model: str) -> None:
        self._service = service
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        now = self._service.metrics()
        for name, (field, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(now, field))
        for name, value, text in _gauges(now):
            yield GaugeMetricFamily(name, text, value=value)
        for name, (field, text) in _VLLM_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], getattr(now, field))
            yield counter
        for name, value, text in _vllm_gauges(now):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        yield self._finished(now)
        for name, histogram in now.histograms.items():
            yield self._histogram(f"vllm:{name}", histogram)
        yield from _attention(now)
        if now.kept_mass is not None:
            yield self._histogram("kvsieve:attention_kept_mass", now.kept_mass)

    def _finished(self, now: ServiceMetrics) -> Metric:
        counter = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by the reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in now.finished.items():
            counter.add_metric([self._model, reason], count)
        return counter

    def _histogram(self, name: str, value: HistogramValue) -> Metric:
        said = name.partition(":")[2].replace("_", " ").capitalize()
        family = HistogramMetricFamily(name, f"{said}.", labels=["model_name"])
        buckets, below = [], 0
        for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(below)))
        family.add_metric([self._model], buckets=buckets, sum_value=value.total)
        return family


def exposition(service: GenerationService, *, model: str) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(service, model=model))
    return generate_latest(registry)


def _attention(now: ServiceMetrics) -> Iterator[Metric]:
    """What attention read; density is the rate of blocks read over that of causal ones."""
    replies = CounterMetricFamily(
        "kvsieve:replies", "Replies, by the attention that ran.", labels=["attention"]
    )
    for mode, count in now.attention.items():
        replies.add_metric([mode], count)
    read = CounterMetricFamily(
        "kvsieve:attention_blocks_read",
        "Blocks that queries read, per layer and KV head.",
        labels=["phase"],
    )
    causal = CounterMetricFamily(
        "kvsieve:attention_blocks_causal",
        "Blocks that exact attention would have read.",
        labels=["phase"],
    )
    for phase, reads in now.reads.items():
        read.add_metric([phase], reads.attended)
        causal.add_metric([phase], reads.causal)
    yield from (replies, read, causal)


def _gauges(now: ServiceMetrics) -> list[tuple[str, float, str]]:
    return [
        ("llamacpp:prompt_tokens_seconds", _rate(now.prompt_tokens, now.prompt_seconds),
         "Mean prompt tokens per second."),
        ("llamacpp:predicted_tokens_seconds", _rate(now.generated_tokens, now.generated_seconds),
         "Mean tokens generated per second."),
        ("llamacpp:requests_processing", now.running, "Requests that run."),
        ("llamacpp:requests_deferred", now.waiting, "Requests that wait."),
        ("llamacpp:n_tokens_max", now.largest_sequence, "Longest sequence so far, in tokens."),
        ("llamacpp:n_busy_slots_per_decode", _rate(now.step_sequences, now.steps),
         "Mean sequences per pass through the model."),
        ("kvsieve:prefix_cache_bytes", now.cached_bytes, "Bytes that the prefix cache holds."),
    ]  # fmt: skip


def _vllm_gauges(now: ServiceMetrics) -> list[tuple[str, float, str]]:
    return [
        ("vllm:num_requests_running", now.running, "Requests that run."),
        ("vllm:num_requests_waiting", now.waiting, "Requests that wait."),
        (
            "vllm:kv_cache_usage_perc",
            now.kv_usage,
            "Share of the cache that requests hold, 0 to 1.",
        ),
    ]


def _rate(count: float, of: float) -> float:
    return count / of if of else 0.0
