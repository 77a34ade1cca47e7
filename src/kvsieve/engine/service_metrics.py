"""Counters of a service, kept by its engine's thread and read by anyone."""

from bisect import bisect_left
from collections import Counter

from kvsieve.engine.outputs import AttentionReport, BlockReads, Completion
from kvsieve.engine.requests import HistogramValue

# vLLM's buckets, so that boards made for it show these.
_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
            240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
                   7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)

_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)


class Histogram:
    """Counts observations per bucket; an observation on a bound belongs below it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    @property
    def value(self) -> HistogramValue:
        """The counts as they are now."""
        return HistogramValue(bounds=self.bounds, counts=tuple(self._counts), total=self._total)


class Counters:
    """What `ServiceMetrics` counts since the service began."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.prompt_ns = 0
        self.generated_tokens = 0
        self.generated_ns = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.largest_sequence = 0
        self.steps = 0
        self.step_sequences = 0
        self.finished: Counter[str] = Counter()
        self.attention: Counter[str] = Counter()
        self.reads = {"prefill": BlockReads(), "decode": BlockReads()}
        self.kept_mass = Histogram(_SHARES)
        self.seconds_per_request = 1.0
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_FIRST_TOKEN),
            "inter_token_latency_seconds": Histogram(_BETWEEN_TOKENS),
            "e2e_request_latency_seconds": Histogram(_SECONDS),
            "request_queue_time_seconds": Histogram(_SECONDS),
            "request_prefill_time_seconds": Histogram(_SECONDS),
            "request_decode_time_seconds": Histogram(_SECONDS),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_generation_tokens": Histogram(_TOKENS),
        }

    def observe(self, name: str, value: float) -> None:
        """Count `value` in a histogram."""
        self.histograms[name].observe(value)

    def finish(self, completion: Completion, *, seconds: float, running_seconds: float) -> None:
        """Count a request that ended, `seconds` after it was submitted."""
        self.finished[completion.finish_reason] += 1
        self.observe("e2e_request_latency_seconds", seconds)
        self.observe("request_prefill_time_seconds", completion.timings.prompt_ms / 1e3)
        self.observe("request_decode_time_seconds", completion.timings.predicted_ms / 1e3)
        self.observe("request_prompt_tokens", completion.prompt_tokens)
        self.observe("request_generation_tokens", completion.completion_tokens)
        self._count_attention(completion.attention)
        # Of the latest requests: what somebody who is turned away should expect.
        self.seconds_per_request += 0.2 * (running_seconds - self.seconds_per_request)

    def _count_attention(self, report: AttentionReport) -> None:
        self.attention[report.mode] += 1
        for phase, reads in (("prefill", report.prefill), ("decode", report.decode)):
            self.reads[phase] = self.reads[phase] + reads
        if report.kept_mass is not None:
            self.kept_mass.observe(report.kept_mass.mean)
