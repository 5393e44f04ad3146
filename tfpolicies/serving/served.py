"""A served policy, with its newest version or a pinned one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.errors import RequestError
from tfpolicies.serving.calls import Answer, Call
from tfpolicies.serving.metrics import Metrics
from tfpolicies.serving.running import Running
from tfpolicies.serving.sequences import Sequences
from tfpolicies.serving.tensors import Port
from tfpolicies.serving.texts import quote
from tfpolicies.serving.time_limits import OverdueError, TimeLimits
from tfpolicies.serving.versions import Version, find_version, looks_of


class Limits(NamedTuple):
    """Limits and settings of a server.

    Attributes:
        max_batch: rows of a batch of several requests; a single request may have more.
        max_sequences: rows of sequences that are kept per model; most sequences have one.
        sequence_idle: seconds without a step after which a sequence is dropped.
        max_body: bytes of a request.
        threads: of one ONNX Runtime call.
        max_seconds: time limit of a model for one batch, or for its trial run on loading.
        providers: of ONNX Runtime, the preferred one first; see `OnnxPolicy`.
    """

    max_batch: int = 256
    max_sequences: int = 10_000
    sequence_idle: float = 600.0
    max_body: int = 8_000_000
    threads: int = 1
    max_seconds: float = 20.0
    providers: tuple[str, ...] = ("CPUExecutionProvider",)


LIMITS = Limits()


class ServedModel:
    """A policy with the name that clients use.

    Attributes:
        name: of the model.
        folder: checked for newer versions.
        reason: why it is not ready; "" if it is.

    Args:
        name: of the model.
        folder: checked for newer versions.
        executor: runs batches.
        loader: loads versions.
        limits: of requests and models.
        time_limits: stops models that take too long.
        metrics: the counters.
        log: called with a line for each version that is loaded or refused.
        pin: the version that is served even if there are newer ones; "" for the newest.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        executor: Executor,
        loader: Executor,
        limits: Limits,
        time_limits: TimeLimits,
        metrics: Metrics,
        say: Callable[[str], object] = print,
        pin: str = "",
    ) -> None:
        self.name, self.folder, self.reason = name, folder, "It was not loaded yet."
        self._executor, self._loader = executor, loader
        self._limits, self._time_limits, self._say = limits, time_limits, say
        self._loads, self._pin = metrics.loads, pin
        self._note = metrics.batch_rows.labels(name).observe
        self._running: Running | None = None
        self._sequences = Sequences(limits.max_sequences, limits.sequence_idle)
        metrics.sequences.labels(name).set_function(lambda: len(self._sequences))
        self._seen: Any = None  # file signature of the version that was loaded or refused
        self._glimpsed: Any = None  # file signature of the last check
        self._loading = asyncio.Lock()

    @property
    def version(self) -> Version:
        """The active version.

        Raises:
            RequestError: if there is none.
        """
        return self._newest().version

    @property
    def is_ready(self) -> bool:
        return self._running is not None

    async def infer(self, call: Call) -> Answer:
        """Answers a request for actions.

        Raises:
            RequestError: if it is invalid or takes too long, or the version is not available.
        """
        newest = self._newest()
        try:
            if call.options.sequence is not None:
                return await self._sequences.step(call.options.sequence, call, newest)
            self.require_version(call.version)
            return await newest.answer(call)
        except OverdueError as error:
            raise RequestError(
                f"The model {self.name!r} did not answer within {self._limits.max_seconds:g} "
                "seconds (--max-seconds). Send fewer rows or steps at once.",
                504,
            ) from error

    def require_version(self, name: str) -> None:
        """Refuses a request for another version than the active one.

        Raises:
            RequestError: if it is another one.
        """
        current = self.version.name
        if name not in ("", current):
            raise RequestError(
                f"There is no version {quote(name)} of the model {self.name!r}: the active one is "
                f"{current!r}. Leave the version out.",
                404,
            )

    def metadata(self) -> dict[str, Any]:
        """Returns the protocol's metadata of the model."""
        version = self.version
        return {
            "name": self.name,
            "versions": [version.name],
            "platform": "onnxruntime_onnx",
            "inputs": [port.metadata() for port in version.inputs],
            "outputs": [port.metadata() for port in version.outputs],
        }

    def config(self) -> dict[str, Any]:
        """Returns the protocol's configuration: batching, and inputs and outputs of a step."""
        version = self.version
        found: dict[str, Any] = {
            "name": self.name,
            "platform": "onnxruntime_onnx",
            "max_batch_size": self._limits.max_batch,
            "input": [_config_of(port) for port in version.step_inputs],
            "output": [_config_of(port) for port in version.step_outputs],
        }
        if version.looks_back:
            idle = round(self._limits.sequence_idle * 1e6)
            most = self._limits.max_sequences
            found["sequence_batching"] = {
                "max_sequence_idle_microseconds": idle,
                "oldest": {"max_candidate_sequences": most},
            }
        else:
            found["dynamic_batching"] = {}
        return found

    async def look(self) -> None:
        """Loads a newer version, once its files were unchanged in two checks.

        A broken version is refused with a log line, and the previous one stays active.
        """
        self._sequences.forget_idle()
        if self._running is None and self._seen is not None:
            return  # it was unloaded
        looks = await self._in_thread(_looks_within, self.folder, self._pin)
        is_settled, self._glimpsed = looks == self._glimpsed, looks
        if is_settled and looks != self._seen:
            try:
                await self.load()
            except ValueError as error:
                kept = self._running.version.name if self._running else "none"
                self._tell(f"{self.name}: refused a new version, {kept} stays active. {error}")

    async def load(self) -> None:
        """Loads the version that is in the folder now.

        Raises:
            RequestError: if it is broken; the previous one stays active.
        """
        async with self._loading:
            self._seen = await self._in_thread(_looks_within, self.folder, self._pin)
            try:
                version = await self._in_thread(self._read)
            except Exception as error:
                self._loads.labels(self.name, "refused").inc()
                self.reason = self.reason and f"{type(error).__name__}: {error}"
                raise RequestError(f"{type(error).__name__}: {error}") from error
            self._take_up(version)

    def unload(self) -> None:
        """Unloads the model; running requests are finished."""
        self._running, self.reason = None, "It was unloaded."
        self._sequences = Sequences(self._limits.max_sequences, self._limits.sequence_idle)

    def _take_up(self, version: Version) -> None:
        if self._running is not None and self._running.version.content == version.content:
            return
        limits, self.reason = self._limits, ""
        self._running = Running(
            version, self._executor, limits.max_batch, self._note, limits.max_seconds
        )
        self._loads.labels(self.name, "taken_up").inc()
        self._tell(f"model {self.name}, version {version.name}, from {version.folder}")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # standard output may be closed
            self._say(line)

    def _read(self) -> Version:
        limits = self._limits
        folder = find_version(self.folder, self._pin)
        how = limits.threads, self._time_limits, limits.max_seconds, limits.providers
        version = Version(folder, *how)
        if self._pin not in ("", version.name):
            raise ValueError(
                f"{str(folder)!r} holds the version {version.name}, but --pin names "
                f"{quote(self._pin)}."
            )
        return version

    def _newest(self) -> Running:
        if self._running is None:
            raise RequestError(f"The model {self.name!r} is not ready. {self.reason}", 503)
        return self._running

    async def _in_thread(self, function: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._loader, function, *args)


def _looks_within(folder: Path, pin: str) -> Any:
    """Returns the file signature of the served version in a folder, or the error."""
    try:
        return looks_of(find_version(folder, pin))
    except (OSError, ValueError) as error:
        return str(error)


def _config_of(port: Port) -> dict[str, Any]:
    found = {"name": port.name, "data_type": f"TYPE_{port.datatype}", "dims": port.sizes[1:]}
    return found | ({"optional": True} if port.is_optional else {})
