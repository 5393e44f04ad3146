"""A version that answers: what is asked of it runs in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from tfpolicies.serving.batching import Arrays, Batcher
from tfpolicies.serving.calls import Answer, Call, Way
from tfpolicies.serving.tensors import require_outputs
from tfpolicies.serving.versions import Version


class Running:
    """A version with what puts its calls together.

    Attributes:
        version: what answers.

    Args:
        version: likewise.
        executor: where it runs.
        max_rows: of one batch.
        note: is told the rows of each batch.
    """

    def __init__(
        self,
        version: Version,
        executor: Executor,
        max_rows: int,
        note: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self.version = version
        self._batchers = {
            way: Batcher(version.policy(way).infer, executor, cost, max_rows, note)
            for way, cost in version.costs.items()
        }

    def run(self, feed: Arrays, way: Way) -> asyncio.Future[dict]:
        """Returns a future of the export's outputs for its inputs."""
        return self._batchers[way].run(feed)

    async def answer(self, call: Call) -> Answer:
        """Answers a call that stands for itself.

        Raises:
            RequestError: if it does not fit.
        """
        version = self.version
        require_outputs(version.outputs, call.outputs)
        feed = version.feed(call.inputs, call.options)
        return Answer.to(call, version.name, await self.run(feed, Way.of(call)))
