"""The numbers at /metrics: the engine's own counters as they came through the seam, and what the server times.

Names are those of vLLM with the prefix `graphrt:` where the meaning is the same, so that dashboards carry over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphrt.api.histogram import Histogram, histogram_family
from graphrt.seam.records import QUEUE_BOUNDS_S, Stats

PREFIX = "graphrt:"
FINISH_REASONS = ("stop", "length", "abort", "error", "timeout", "refused")
_TTFT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
_E2E = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

# Name, help, reader.
Reader = Callable[[Stats], float]
_GAUGES: tuple[tuple[str, str, Reader], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda s: s.running),
    ("num_requests_waiting", "Requests waiting for a slot.", lambda s: s.waiting),
    ("slots_used", "Slots of the engine that hold a request.", lambda s: s.slots_used),
    (
        "kv_cache_usage_perc",
        "Share of KV blocks held by live requests, 0 to 1.",
        lambda s: s.blocks_used / s.blocks_total if s.blocks_total else 0.0,
    ),
)
_COUNTERS: tuple[tuple[str, str, Reader], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("prompt_tokens", "Prompt tokens processed.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("num_preemptions", "Requests sent back to the queue for want of KV blocks.", lambda s: s.preemptions),
    ("decode_steps", "Decode steps.", lambda s: s.decode_steps),
    ("prefill_steps", "Steps that processed prompt tokens.", lambda s: s.prefill_steps),
    ("eager_steps", "Steps that ran outside a captured graph.", lambda s: s.eager_steps),
)
# Name, help, factor to seconds, readers of p50 and p99.
_QUANTILES: tuple[tuple[str, str, float, Reader, Reader], ...] = (
    ("step_time_seconds", "Wall time of recent steps.", 1e-3, lambda s: s.step_ms_p50, lambda s: s.step_ms_p99),
    (
        "host_time_per_step_seconds",
        "Engine CPU time of recent steps outside waits and the step itself.",
        1e-6,
        lambda s: s.host_us_p50,
        lambda s: s.host_us_p99,
    ),
    (
        "device_idle_per_step_seconds",
        "Between a recent step's end on the device and the next one's beginning.",
        1e-6,
        lambda s: s.idle_us_p50,
        lambda s: s.idle_us_p99,
    ),
)


class Metrics(Collector):
    """One server's numbers in a registry of their own. `stats` gives the engine's latest, `alive` its health."""

    def __init__(
        self, model_name: str, stats: Callable[[], Stats], alive: Callable[[], bool], max_batch: int = 0
    ) -> None:
        self._labels = {"model_name": model_name}
        self._stats = stats
        self._alive = alive
        self._max_batch = max_batch
        self.first_token = Histogram(
            PREFIX + "time_to_first_token_seconds", "From the request to its first token.", _TTFT
        )
        self.inter_token = Histogram(PREFIX + "inter_token_latency_seconds", "Between tokens of a request.", _ITL)
        self.end_to_end = Histogram(PREFIX + "e2e_request_latency_seconds", "From the request to its end.", _E2E)
        self.decode = Histogram(
            PREFIX + "request_decode_time_seconds", "From a request's first token to its last.", _E2E
        )
        self.per_output_token = Histogram(
            PREFIX + "request_time_per_output_token_seconds", "A request's decode time over its tokens but one.", _ITL
        )
        self.prompt_length = Histogram(PREFIX + "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = Histogram(PREFIX + "request_generation_tokens", "Tokens of a reply.", _TOKENS)
        self.finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.http: Counter[tuple[str, str]] = Counter()  # by route and status
        self.refused: Counter[str] = Counter()  # by reason: keys and limits
        self.by_key: Counter[str] = Counter()  # by the key's name
        self.live: Callable[[], int] = lambda: 0
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        stats = self._stats()
        names, values = list(self._labels), list(self._labels.values())
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=names)
            gauge.add_metric(values, read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=names)
            counter.add_metric(values, read(stats))
            yield counter
        for name, text, unit, p50, p99 in _QUANTILES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=[*names, "quantile"])
            gauge.add_metric([*values, "0.5"], p50(stats) * unit)
            gauge.add_metric([*values, "0.99"], p99(stats) * unit)
            yield gauge
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "KV blocks by state.", labels=[*names, "state"])
        free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
        for state, count in (("used", stats.blocks_used), ("cached", stats.blocks_cached), ("free", free)):
            blocks.add_metric([*values, state], count)
        yield blocks
        up = GaugeMetricFamily(PREFIX + "engine_up", "1 while the engine lives.", labels=names)
        up.add_metric(values, float(self._alive()))
        yield up
        if self._max_batch:
            occupancy = GaugeMetricFamily(PREFIX + "batch_occupancy", "Share of slots in use, 0 to 1.", labels=names)
            occupancy.add_metric(values, stats.slots_used / self._max_batch)
            yield occupancy
        live = GaugeMetricFamily(PREFIX + "sequences_live", "Sequences that the server waits for.", labels=names)
        live.add_metric(values, self.live())
        yield live
        yield self._counts("request_success", "Sequences that ended, by reason.", "finished_reason", self.finished)
        yield self._counts("engine_finished", "The same as the engine saw it.", "finished_reason", stats.finished)
        yield self._counts("requests_refused", "Requests turned away at the door, by reason.", "reason", self.refused)
        yield self._counts("key_requests", "Requests let in, by the name of their API key.", "key", self.by_key)
        http = CounterMetricFamily(PREFIX + "http_requests", "HTTP requests answered.", labels=["route", "status"])
        for (route, status), count in self.http.items():
            http.add_metric([route, status], count)
        yield http
        yield histogram_family(
            PREFIX + "request_queue_time_seconds",
            "From a request's arrival at the engine to its admission.",
            QUEUE_BOUNDS_S,
            stats.queue_counts or [0] * (len(QUEUE_BOUNDS_S) + 1),
            stats.queue_sum_s,
            self._labels,
        )
        for histogram in (
            self.first_token,
            self.inter_token,
            self.end_to_end,
            self.decode,
            self.per_output_token,
            self.prompt_length,
            self.output_length,
        ):
            yield histogram.family(self._labels)

    def count_malformed(self, status: int) -> None:
        """Count an answer to bytes that made no request."""
        self.http[("none", str(status))] += 1

    def sequence_ended(self, reason: str, prompt: int, output: int, whole_s: float, decode_s: float) -> None:
        """Count a sequence that ended: its tokens, the time since its request came and since its first token."""
        self.finished[reason] += 1
        self.end_to_end.observe(whole_s)
        self.prompt_length.observe(prompt)
        self.output_length.observe(output)
        if output:
            self.decode.observe(decode_s)
        if output > 1:
            self.per_output_token.observe(decode_s / (output - 1))

    def _counts(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=[*self._labels, label])
        for value, count in counts.items():
            family.add_metric([*self._labels.values(), value], count)
        return family
