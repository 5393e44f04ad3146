"""The program of a process that trains the trials of a study, one run after the other."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.envs.env_process import SerializedError
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.system.atomic import write_atomically
from tfpolicies.system.gpu_memory import claim_process
from tfpolicies.system.log_suppression import load_tensorflow
from tfpolicies.system.parent_process import end_with_parent

_NEVER = 10**9  # iterations between checkpoints: a trial that was killed starts again

Report = Callable[[int, float], bool]
"""Reports the number of an evaluation and its mean return; returns whether to continue."""


class RunRequest(NamedTuple):
    """One training run of a trial.

    Attributes:
        settings: that override those of the study's config, as `update_from_dict` takes them.
        seed: of the run.
        steps: environment steps.
        num_evaluations: evenly spread over the steps, the last one at the end.
        run_dir: the folder of the run.
    """

    settings: dict[str, Any]
    seed: int
    steps: int
    num_evaluations: int
    run_dir: Path


class EvaluationMessage(NamedTuple):
    """The mean return of an evaluation; the process waits for a bool: whether to continue."""

    number: int  # from 1
    mean_return: float


class ResultMessage(NamedTuple):
    """The end of a run or of a check.

    Attributes:
        mean_return: of the last evaluation; None if the run was pruned or failed.
        error: the reason of a failure in one line; "" if there was none.
    """

    mean_return: float | None
    error: str = ""


class CheckMessage(NamedTuple):
    """The result of building the algorithm once.

    Attributes:
        has_box_actions: whether the action space is a Box of floats.
        error: raised by the build; None if it succeeded.
    """

    has_box_actions: bool
    error: SerializedError | None = None


class _Evaluations(DefaultCallbacks):
    """Evaluates the policies during a run and reports their mean return.

    Attributes:
        is_stopped: whether the report asked to stop.
        mean_return: of the last evaluation; NaN before the first.
    """

    def __init__(self, request: RunRequest, report: Report) -> None:
        super().__init__()
        self.is_stopped = False
        self.mean_return = math.nan
        self._request = request
        self._report = report
        self._number = 0

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Evaluates when the next part of the steps is complete; puts the metrics into `result`."""
        count, steps = self._request.num_evaluations, self._request.steps
        number = min(count, int(result["num_env_steps_sampled"] * count / steps))
        if number <= self._number:
            return
        result.update(algorithm.evaluate())
        self._number = number
        mean_return = result["evaluation"].get("episode_reward_mean", math.nan)
        self.mean_return = float(mean_return)
        self.is_stopped = not self._report(number, self.mean_return)


def train(config: AlgorithmConfig, request: RunRequest, report: Report) -> float | None:
    """Trains one run; returns the mean return of its last evaluation, None if it was stopped."""
    config = config.copy(copy_frozen=False).update_from_dict(request.settings)
    config.debugging(seed=request.seed)
    evaluations = _Evaluations(request, report)
    algorithm = config.build(use_copy=False)
    try:
        algorithm.warns_about_unserializable = False
        algorithm.learn(
            request.steps,
            run_dir=request.run_dir,
            progress=False,
            checkpoint_every=_NEVER,
            callbacks=[evaluations, lambda algorithm, result: not evaluations.is_stopped],
        )
    finally:
        algorithm.stop()
    return None if evaluations.is_stopped else evaluations.mean_return


def serve(connection_file: int) -> None:
    """Answers the requests of a study's process until that closes the connection.

    Args:
        connection_file: descriptor of the socket.
    """
    end_with_parent()
    claim_process()
    connection = Connection(connection_file)
    load_tensorflow()
    from tfpolicies.distributed.registry_sync import register_packed

    with contextlib.suppress(EOFError, OSError):
        pickled_config, registries = connection.recv()
        register_packed(registries)
        try:
            config = pickle.loads(pickled_config)
            message = _check(config)
        except Exception as error:
            message = CheckMessage(False, SerializedError.from_exception(error))
        connection.send(message)
        while True:
            connection.send(_answer(config, connection.recv(), connection))


def _check(config: AlgorithmConfig) -> CheckMessage:
    algorithm = config.build()
    space = algorithm.config.action_space
    if space is None:
        space = getattr(algorithm.get_policy(), "action_space", None)
    algorithm.stop()
    is_box = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)
    return CheckMessage(bool(is_box))


def _answer(config: AlgorithmConfig, request: RunRequest, connection: Connection) -> ResultMessage:
    def report(number: int, mean_return: float) -> bool:
        connection.send(EvaluationMessage(number, mean_return))
        return bool(connection.recv())

    try:
        mean_return = train(config, request, report)
    except (Exception, SystemExit) as error:
        return ResultMessage(None, _record_error(error, request))
    if mean_return is not None and not math.isfinite(mean_return):
        return ResultMessage(None, "no episode of the evaluation has ended")
    return ResultMessage(mean_return)


def _record_error(error: BaseException, request: RunRequest) -> str:
    """Writes the traceback into the run's folder, and returns a line about the error."""
    trace = "".join(traceback.format_exception(error))
    logging.getLogger("tfpolicies").error("%s failed:\n%s", request.run_dir.name, trace)
    with contextlib.suppress(OSError):
        request.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(RunFolder(request.run_dir).error_txt, trace.encode(errors="replace"))
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
