"""What a server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counters of one server, in a registry of their own.

    Attributes:
        requests: answered requests for actions, by model, protocol and status.
        seconds: how long they took from being read to being answered, by model.
        batch_rows: rows of each batch that ran, by model.
        loads: versions that were taken up or refused, by model and outcome.
        sequences: how many sequences are remembered, by model.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tfpolicies_requests",
            "Answered requests for actions",
            ("model", "protocol", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "tfpolicies_request_seconds",
            "Seconds from a request to its answer",
            ("model",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.batch_rows = Histogram(
            "tfpolicies_batch_rows",
            "Rows that ran together",
            ("model",),
            buckets=_ROWS,
            registry=self._registry,
        )
        self.loads = Counter(
            "tfpolicies_loads",
            "Versions that were taken up or refused",
            ("model", "outcome"),
            registry=self._registry,
        )
        self.sequences = Gauge(
            "tfpolicies_sequences",
            "Sequences that are remembered",
            ("model",),
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Returns all of them in Prometheus's text format."""
        return generate_latest(self._registry)
