"""Runs one model version in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from tfpolicies.serving.batching import LONG, Arrays, Batcher
from tfpolicies.serving.calls import Answer, Call, Way
from tfpolicies.serving.memory import Memory
from tfpolicies.serving.tensors import require_outputs
from tfpolicies.serving.versions import Version


class Running:
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
        version: Version,
        executor: Executor,
        max_rows: int,
        note: Callable[[int], object] = lambda rows: None,
        seconds: float = 60.0,
    ) -> None:
        self.version, self.memory = version, Memory(version.greedy)
        self._calls: dict[Way, Batcher] = {}
        self._steps: dict[Way, Batcher] = {}
        for way, cost in version.costs.items():
            policy = version.policy(way)
            of_calls = LONG if version.has_time else cost
            step = partial(self.memory.step, policy)
            make = partial(Batcher, limit=version.time_limits.limit, seconds=seconds)
            self._calls[way] = make(policy.infer, executor, of_calls, max_rows, note)
            self._steps[way] = make(step, executor, cost, max_rows, note, cancellable=False)

    async def answer(self, call: Call) -> Answer:
        """Answers a request without a sequence.

        Raises:
            RequestError: if it is invalid.
        """
        version = self.version
        require_outputs(version.outputs, call.outputs)
        feed = version.feed(call.inputs, call.options)
        return Answer.to(call, version.name, await self._calls[Way.of(call)].run(feed))

    def step(self, feed: Arrays, way: Way) -> asyncio.Future[Arrays]:
        """Returns a future of the outputs of one step of a sequence; see `Memory.step`."""
        return self._steps[way].run(feed)
