"""A served policy, with its newest version or a pinned one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.errors import RequestError
from tfpolicies.serving.infer_requests import InferRequest, InferResponse
from tfpolicies.serving.model_runner import ModelRunner
from tfpolicies.serving.model_version import ModelVersion, find_version, get_file_signature
from tfpolicies.serving.request_texts import quote
from tfpolicies.serving.sequence_store import SequenceStore
from tfpolicies.serving.server_metrics import ServerMetrics
from tfpolicies.serving.tensor_checks import TensorMetadata
from tfpolicies.serving.time_limits import ModelTimeoutError, TimeLimits


class ServingLimits(NamedTuple):
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


DEFAULT_LIMITS = ServingLimits()


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
        limits: ServingLimits,
        time_limits: TimeLimits,
        metrics: ServerMetrics,
        log: Callable[[str], object] = print,
        pin: str = "",
    ) -> None:
        self.name, self.folder, self.reason = name, folder, "It was not loaded yet."
        self._executor, self._loader = executor, loader
        self._limits, self._time_limits, self._log_line = limits, time_limits, log
        self._loads, self._pin = metrics.loads, pin
        self._on_batch = metrics.batch_rows.labels(name).observe
        self._runner: ModelRunner | None = None
        self._sequences = SequenceStore(limits.max_sequences, limits.sequence_idle)
        metrics.sequences.labels(name).set_function(lambda: len(self._sequences))
        # File signature of the version that was loaded or refused
        self._handled_signature: Any = None
        self._last_signature: Any = None  # file signature of the last check
        self._load_lock = asyncio.Lock()

    @property
    def version(self) -> ModelVersion:
        """The active version.

        Raises:
            RequestError: if there is none.
        """
        return self._get_runner().version

    @property
    def is_ready(self) -> bool:
        return self._runner is not None

    async def infer(self, request: InferRequest) -> InferResponse:
        newest = self._get_runner()
        try:
            if request.options.sequence is not None:
                return await self._sequences.step(request.options.sequence, request, newest)
            self.require_version(request.version)
            return await newest.infer(request)
        except ModelTimeoutError as error:
            raise RequestError(
                f"The model {self.name!r} did not answer within {self._limits.max_seconds:g} "
                "seconds (--max-seconds). Send fewer rows or steps at once.",
                504,
            ) from error

    def require_version(self, name: str) -> None:
        """Refuses a request for another version than the active one."""
        current = self.version.name
        if name not in ("", current):
            raise RequestError(
                f"There is no version {quote(name)} of the model {self.name!r}: the active one is "
                f"{current!r}. Leave the version out.",
                404,
            )

    def metadata(self) -> dict[str, Any]:
        version = self.version
        return {
            "name": self.name,
            "versions": [version.name],
            "platform": "onnxruntime_onnx",
            "inputs": [port.to_protocol() for port in version.inputs],
            "outputs": [port.to_protocol() for port in version.outputs],
        }

    def config(self) -> dict[str, Any]:
        """Returns the protocol's configuration: batching, and inputs and outputs of a step."""
        version = self.version
        config: dict[str, Any] = {
            "name": self.name,
            "platform": "onnxruntime_onnx",
            "max_batch_size": self._limits.max_batch,
            "input": [_make_tensor_config(port) for port in version.step_inputs],
            "output": [_make_tensor_config(port) for port in version.step_outputs],
        }
        if version.uses_history:
            idle = round(self._limits.sequence_idle * 1e6)
            max_sequences = self._limits.max_sequences
            config["sequence_batching"] = {
                "max_sequence_idle_microseconds": idle,
                "oldest": {"max_candidate_sequences": max_sequences},
            }
        else:
            config["dynamic_batching"] = {}
        return config

    async def update_version(self) -> None:
        """Loads a newer version, once its files were unchanged in two checks.

        A broken version is refused with a log line, and the previous one stays active.
        """
        self._sequences.drop_idle()
        if self._runner is None and self._handled_signature is not None:
            return  # it was unloaded
        signature = await self._run_in_loader(_get_signature_or_error, self.folder, self._pin)
        is_stable, self._last_signature = signature == self._last_signature, signature
        if is_stable and signature != self._handled_signature:
            try:
                await self.load()
            except ValueError as error:
                current_name = self._runner.version.name if self._runner else "none"
                self._log(
                    f"{self.name}: refused a new version, {current_name} stays active. {error}"
                )

    async def load(self) -> None:
        """Loads the version that is in the folder now."""
        async with self._load_lock:
            self._handled_signature = await self._run_in_loader(
                _get_signature_or_error, self.folder, self._pin
            )
            try:
                version = await self._run_in_loader(self._load_version)
            except Exception as error:
                self._loads.labels(self.name, "refused").inc()
                self.reason = self.reason and f"{type(error).__name__}: {error}"
                raise RequestError(f"{type(error).__name__}: {error}") from error
            self._activate(version)

    def unload(self) -> None:
        self._runner, self.reason = None, "It was unloaded."
        self._sequences = SequenceStore(self._limits.max_sequences, self._limits.sequence_idle)

    def _activate(self, version: ModelVersion) -> None:
        if self._runner is not None and self._runner.version.content_hash == version.content_hash:
            return
        limits, self.reason = self._limits, ""
        self._runner = ModelRunner(
            version, self._executor, limits.max_batch, self._on_batch, limits.max_seconds
        )
        self._loads.labels(self.name, "taken_up").inc()
        self._log(f"model {self.name}, version {version.name}, from {version.folder}")

    def _log(self, line: str) -> None:
        with contextlib.suppress(OSError):  # standard output may be closed
            self._log_line(line)

    def _load_version(self) -> ModelVersion:
        limits = self._limits
        folder = find_version(self.folder, self._pin)
        options = limits.threads, self._time_limits, limits.max_seconds, limits.providers
        version = ModelVersion(folder, *options)
        if self._pin not in ("", version.name):
            raise ValueError(
                f"{str(folder)!r} holds the version {version.name}, but --pin names "
                f"{quote(self._pin)}."
            )
        return version

    def _get_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RequestError(f"The model {self.name!r} is not ready. {self.reason}", 503)
        return self._runner

    async def _run_in_loader(self, function: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._loader, function, *args)


def _get_signature_or_error(folder: Path, pin: str) -> Any:
    """Returns the file signature of the served version in a folder, or the error."""
    try:
        return get_file_signature(find_version(folder, pin))
    except (OSError, ValueError) as error:
        return str(error)


def _make_tensor_config(tensor: TensorMetadata) -> dict[str, Any]:
    config = {"name": tensor.name, "data_type": f"TYPE_{tensor.datatype}", "dims": tensor.sizes[1:]}
    return config | ({"optional": True} if tensor.is_optional else {})
