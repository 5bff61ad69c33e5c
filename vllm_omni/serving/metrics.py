"""What `/metrics` tells Prometheus, from a registry of its own. It measures requests at the door; stages report their own gauges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the lines, and nobody reads them
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics(Collector):
    """The counters of one server."""

    def __init__(self, running: Collection[object]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("vllm_omni_requests", "Answered requests.", ("endpoint", "status"), registry=self.registry)
        self._first = Histogram(
            "vllm_omni_time_to_first_chunk_seconds", "From a request's arrival to the first bytes of a good answer.", ("endpoint",),
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        Gauge("vllm_omni_requests_in_flight", "Requests being computed.", registry=self.registry).set_function(lambda: len(running))
        self._stats: Mapping[str, Mapping[str, float]] = {}
        self.registry.register(self)

    def answered(self, endpoint: str, status: int, seconds: float | None) -> None:
        """Count an answer; `seconds` to its first bytes, None for one that nothing was computed for."""
        self._requests.labels(endpoint, str(status)).inc()
        if seconds is not None and status < 400:
            self._first.labels(endpoint).observe(seconds)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One gauge for each figure that the processes report."""
        for name in sorted({name for gauges in self._stats.values() for name in gauges}):
            family = GaugeMetricFamily(f"vllm_omni_process_{name}", f"{name} of a process.", labels=("process",))
            for process, gauges in self._stats.items():
                if name in gauges:
                    family.add_metric((process,), gauges[name])
            yield family

    def render(self, stats: Mapping[str, Mapping[str, float]]) -> bytes:
        """Prometheus' text format, with the processes' gauges as they are now."""
        self._stats = stats
        return generate_latest(self.registry)
