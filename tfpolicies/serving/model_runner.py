"""Runs one model version in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from tfpolicies.serving.batching import UNBOUNDED_COST, Arrays, Batcher
from tfpolicies.serving.infer_requests import InferRequest, InferResponse, InferVariant
from tfpolicies.serving.model_version import ModelVersion
from tfpolicies.serving.sequence_state import SequenceStates
from tfpolicies.serving.tensor_checks import require_outputs


class ModelRunner:
    """A model version with the batchers for its requests.

    Attributes:
        version: the model version.
        states: the states of its sequences.

    Args:
        version: the model version.
        executor: provides the threads.
        max_rows: of one batch.
        on_batch: called with the number of rows of each batch.
        seconds: time limit of a batch.
    """

    def __init__(
        self,
        version: ModelVersion,
        executor: Executor,
        max_rows: int,
        on_batch: Callable[[int], object] = lambda rows: None,
        seconds: float = 60.0,
    ) -> None:
        self.version, self.states = version, SequenceStates(version.greedy)
        self._request_batchers: dict[InferVariant, Batcher] = {}
        self._step_batchers: dict[InferVariant, Batcher] = {}
        for variant, cost in version.costs.items():
            policy = version.get_policy(variant)
            request_cost = UNBOUNDED_COST if version.has_time_axis else cost
            step = partial(self.states.step, policy)
            make_batcher = partial(Batcher, limit=version.time_limits.limit, seconds=seconds)
            self._request_batchers[variant] = make_batcher(
                policy.infer, executor, request_cost, max_rows, on_batch
            )
            self._step_batchers[variant] = make_batcher(
                step, executor, cost, max_rows, on_batch, cancellable=False
            )

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answers a request without a sequence.

        Raises:
            RequestError: if it is invalid.
        """
        version = self.version
        require_outputs(version.outputs, request.outputs)
        feed = version.make_feed(request.inputs, request.options)
        return InferResponse.from_outputs(
            request,
            version.name,
            await self._request_batchers[InferVariant.for_request(request)].run(feed),
        )

    def step(self, feed: Arrays, variant: InferVariant) -> asyncio.Future[Arrays]:
        """Returns a future of the outputs of one step of a sequence; see `SequenceStates.step`."""
        return self._step_batchers[variant].run(feed)
