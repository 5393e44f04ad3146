"""A policy that is served: its newest version answers, or the one that is pinned."""

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
    """What a server takes and keeps.

    Attributes:
        max_batch: rows of several requests that run together; one request may have more.
        max_sequences: rows of sequences that are remembered of a model; most have one.
        sequence_idle: seconds without a step after which one is forgotten.
        max_body: bytes of a request.
        threads: that one call of ONNX Runtime may use.
        max_seconds: that a model may take for one batch, or for its trial when it is loaded.
        providers: what ONNX Runtime computes with, the best one first; see `OnnxPolicy`.
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
    """A policy under the name that clients call it by.

    Attributes:
        name: of the model.
        folder: what is looked at for newer versions.
        reason: why it does not answer; "" if it does.

    Args:
        name: likewise.
        folder: likewise.
        executor: where it runs.
        loader: where versions are loaded.
        limits: what it takes.
        time_limits: ends what takes too long.
        metrics: what counts.
        say: is told, in a line each, what was taken up and what was refused.
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
        self._seen: Any = None  # how the folder looked when its version was taken up or refused
        self._glimpsed: Any = None  # how it looked last
        self._loading = asyncio.Lock()

    @property
    def version(self) -> Version:
        """The version that answers.

        Raises:
            RequestError: if there is none.
        """
        return self._newest().version

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return self._running is not None

    async def infer(self, call: Call) -> Answer:
        """Answers a request for actions.

        Raises:
            RequestError: if it does not fit, takes too long, or no version may answer.
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
        """Refuses a request for another version than the one that answers.

        Raises:
            RequestError: if it is another one.
        """
        current = self.version.name
        if name not in ("", current):
            raise RequestError(
                f"There is no version {quote(name)} of the model {self.name!r}: {current!r} is the "
                "one that answers. Leave the version out.",
                404,
            )

    def metadata(self) -> dict[str, Any]:
        """Returns what the protocol says of a model."""
        version = self.version
        return {
            "name": self.name,
            "versions": [version.name],
            "platform": "onnxruntime_onnx",
            "inputs": [port.metadata() for port in version.inputs],
            "outputs": [port.metadata() for port in version.outputs],
        }

    def config(self) -> dict[str, Any]:
        """Returns how the model is served: in what batches, and what sequences take and give."""
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
        """Takes up a newer version, once its files have been the same for two looks.

        One that is broken is refused, in a line, and the one before goes on.
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
                self._tell(f"{self.name}: refused a new version, {kept} goes on. {error}")

    async def load(self) -> None:
        """Takes up the version that is in the folder now.

        Raises:
            RequestError: if it is broken; the one before goes on.
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
        """Answers no more until it is loaded again; what runs is finished."""
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
        with contextlib.suppress(OSError):  # nobody reads what the server prints
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
    """Returns how the version in a folder looks that is served, or the error if there is none."""
    try:
        return looks_of(find_version(folder, pin))
    except (OSError, ValueError) as error:
        return str(error)


def _config_of(port: Port) -> dict[str, Any]:
    found = {"name": port.name, "data_type": f"TYPE_{port.datatype}", "dims": port.sizes[1:]}
    return found | ({"optional": True} if port.is_optional else {})
