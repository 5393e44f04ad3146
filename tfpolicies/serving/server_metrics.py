"""Prometheus metrics of a server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tfpolicies.errors import RequestError

CLIENT_CLOSED_REQUEST = 499
"""The status that is counted for clients that disconnect."""

_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServerMetrics:
    """Counters of one server, in a separate registry.

    Attributes:
        requests: answered requests for actions, by model, protocol and status.
        seconds: latency from reading a request to its response, by model.
        batch_rows: rows of each batch, by model.
        loads: versions that were loaded or refused, by model and outcome.
        sequences: number of active sequences, by model.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        by_status = ("model", "protocol", "status")
        self.requests = self._make_metric(
            Counter, "requests", "Answered requests for actions", *by_status
        )
        seconds = "Seconds from a request to its response"
        self.seconds = self._make_metric(
            Histogram, "request_seconds", seconds, "model", buckets=_SECONDS_BUCKETS
        )
        rows = "Rows per batch"
        self.batch_rows = self._make_metric(
            Histogram, "batch_rows", rows, "model", buckets=_ROWS_BUCKETS
        )
        loads = "Versions that were loaded or refused"
        self.loads = self._make_metric(Counter, "loads", loads, "model", "outcome")
        self.sequences = self._make_metric(Gauge, "sequences", "Active sequences", "model")

    def _make_metric(
        self, metric_class: Any, name: str, help: str, *labels: str, **settings: object
    ) -> Any:
        return metric_class(f"tfpolicies_{name}", help, labels, registry=self._registry, **settings)

    @contextlib.contextmanager
    def measure(
        self, model: str, protocol: str, disconnect_error: type[BaseException]
    ) -> Iterator[None]:
        """Counts the enclosed code as one request for actions, with its status.

        Args:
            model: the name of the model.
            protocol: "http" or "grpc".
            disconnect_error: the exception that is raised if the client has disconnected.
        """
        start, status = time.perf_counter(), 500
        try:
            yield
            status = 200
        except RequestError as error:
            status = error.status
            raise
        except disconnect_error:
            status = CLIENT_CLOSED_REQUEST
            raise
        finally:
            self.requests.labels(model, protocol, status).inc()
            self.seconds.labels(model).observe(time.perf_counter() - start)

    def to_text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
