"""The models of a server, by name."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from tfpolicies.errors import ExportError, RequestError, UsageError, suggest_similar_names
from tfpolicies.serving.request_texts import quote, require_short
from tfpolicies.serving.served_model import DEFAULT_LIMITS, ServedModel, ServingLimits
from tfpolicies.serving.server_metrics import ServerMetrics
from tfpolicies.serving.time_limits import TimeLimits
from tfpolicies.serving.upload_budget import UploadBudget

_CHECK_SECONDS = 1.0  # seconds between two checks of a folder
_NAME_PATTERN = re.compile(r"[^/\\?#%\s]+")
_THREADS_PER_MODEL = 2  # separate for each model, so that a slow model does not delay others


_Parsed = TypeVar("_Parsed")


class ModelRepository:
    """Served models, each from a folder that is checked for new versions.

    Attributes:
        metrics: the counters.
        limits: of requests and models.
        upload_budget: the memory budget of requests that are being received.
        time_limits: stops models that take too long.
        models: by name.
        is_draining: whether the server is about to stop, so that it is not ready any more.

    Args:
        folders: of exports, by the models' names.
        limits: of requests and models.
        log: called with a line for each version that is loaded or refused.
        pins: by model name, versions that are served even if there are newer ones.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        limits: ServingLimits = DEFAULT_LIMITS,
        log: Callable[[str], object] = print,
        pins: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.metrics, self.limits = ServerMetrics(), limits
        self.is_draining = False
        self.upload_budget = UploadBudget(limits.max_body)
        self.time_limits = TimeLimits()
        self._parser, self._loader = (ThreadPoolExecutor(1, x) for x in ("requests", "versions"))
        self._executors = {
            name: ThreadPoolExecutor(_THREADS_PER_MODEL, name, self.time_limits.allow_yielding)
            for name in folders
        }
        common = self._loader, limits, self.time_limits, self.metrics, log
        self.models = {
            name: ServedModel(name, folder, self._executors[name], *common, pins.get(name, ""))
            for name, folder in folders.items()
        }

    def __getitem__(self, name: str) -> ServedModel:
        model = self.models.get(name)
        if model is None:
            require_short("a model", name)
            raise RequestError(
                f"There is no model {quote(name)}.{suggest_similar_names(name, self.models)} This "
                f"server has {', '.join(map(repr, self.models))}.",
                404,
            )
        return model

    def find(self, name: str, version: str) -> ServedModel:
        """Returns a model, if it answers with a version; "" for any.

        Raises:
            RequestError: if there is no such model, or it answers with another version.
        """
        model = self[name]
        model.require_version(version)
        return model

    @property
    def is_ready(self) -> bool:
        """Whether all models are loaded and the server is not draining."""
        return not self.is_draining and all(model.is_ready for model in self.models.values())

    async def load(self) -> None:
        for model in self.models.values():
            try:
                await model.load()
            except RequestError as error:
                raise ExportError(f"The model {model.name!r} cannot be served. {error}") from error

    async def poll_versions(self) -> None:
        """Checks for newer versions, until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            for model in self.models.values():
                await model.update_version()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """A context in which all models are loaded and checked for new versions.

        Raises:
            ExportError: if one cannot be loaded.
        """
        polling: asyncio.Task[None] | None = None
        try:
            await self.load()
            polling = asyncio.create_task(self.poll_versions())
            yield
        finally:
            if polling is not None:
                polling.cancel()
            self.time_limits.stop()
            for executor in (*self._executors.values(), self._loader, self._parser):
                executor.shutdown()

    async def parse(self, read: Callable[..., _Parsed], *args: object) -> _Parsed:
        """Parses a large request in a thread, one at a time, because each may need much memory."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, read, *args)

    def list_models(self, *, ready: bool = False) -> list[dict[str, Any]]:
        return [
            {
                "name": model.name,
                "version": model.version.name if model.is_ready else "",
                "state": "READY" if model.is_ready else "UNAVAILABLE",
                "reason": model.reason,
            }
            for model in self.models.values()
            if model.is_ready or not ready
        ]


def make_unique_names(sources: Sequence[tuple[str, Path]]) -> dict[str, Path]:
    """Returns folders by unique names; a repeated name gets a number.

    >>> [*make_unique_names([("cart", Path("a/cart")), ("cart", Path("b/cart"))])]
    ['cart', 'cart-2']
    """
    folders: dict[str, Path] = {}
    for name, folder in sources:
        if not _NAME_PATTERN.fullmatch(name):
            raise UsageError(
                f"A model's name is part of URLs, so it must not have spaces or any of /\\?#%, got "
                f"{name!r}. Give another name: NAME={folder}."
            )
        number, unique = 1, name
        while unique in folders:
            number += 1
            unique = f"{name}-{number}"
        folders[unique] = folder
    return folders
