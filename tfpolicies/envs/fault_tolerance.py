"""Fault tolerance of environments: reports failures, and replaces environments that failed.

An environment fails when `reset` or `step` raises, exceeds its time limit, or returns an invalid
observation, reward or flag.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import ArrayLike

from tfpolicies.base.finite_checks import NON_NUMERIC_KINDS, all_finite
from tfpolicies.base.type_aliases import Scalar, Structure
from tfpolicies.errors import EnvError

logger = logging.getLogger("tfpolicies")

_SHOWN_FRAMES = 8  # stack frames shown of a call that hangs
ENV_FAILURES = (Exception, SystemExit)
"""Exceptions that count as failures of an environment; they must not end the process."""

_FIRST_TRIES = 10  # tries to reset an environment if none has been reset so far
_LONGEST_PAUSE = 5.0  # seconds between two tries to reset a new environment
_MAX_FAILURES_IN_A_ROW = 200  # failures of an environment without a completed step


def get_failure_hint(error: BaseException) -> str:
    """Returns a hint for an error that an environment raised, starting with a space; or ""."""
    if isinstance(error, ValueError) and "read-only" in str(error):
        return " Actions are read-only: write to a copy, `action = action.copy()`."
    return ""


def describe_slow_call(call: str, seconds: float, limit: float) -> str:
    """Returns the message about a call that took longer than `env_step_timeout_s`."""
    return f"{call} took {seconds:.1f} seconds; env_step_timeout_s={limit:g}."


class Watchdog:
    """Detects calls that take too long, in a separate thread.

    A call cannot be ended from outside. While it lasts, the stack is logged, and `status`
    describes it; if it returns after all, it counts as failed. A remote worker that hangs is
    replaced.

    Args:
        timeout: seconds that a call may take.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._current_call: tuple[str, float, int] | None = None  # description, start, thread id
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def call(
        self, description: str, function: Callable[..., Any], *args: object, **kwargs: object
    ) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        since = time.monotonic()
        self._current_call = description, since, threading.get_ident()
        try:
            result = function(*args, **kwargs)
        finally:
            self._current_call = None
        seconds = time.monotonic() - since
        if seconds > self.timeout:
            raise EnvError(describe_slow_call(description, seconds, self.timeout))
        return result

    def status(self) -> str | None:
        """Describes the call that takes too long at present; returns None if there is none."""
        running = self._current_call
        if running is None:
            return None
        seconds = time.monotonic() - running[1]
        if seconds <= self.timeout:
            return None
        return f"{running[0]} hangs for {seconds:.1f} seconds; env_step_timeout_s={self.timeout:g}"

    def _watch(self) -> None:
        reported = None
        while not self._closed.wait(min(1.0, self.timeout / 4)):
            running = self._current_call
            status = self.status()
            if running is None or status is None or running is reported:
                continue
            reported = running
            frame = sys._current_frames().get(running[2])
            stack = (
                "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:]) if frame is not None else ""
            )
            logger.error("%s. It is here:\n%s", status, stack)

    def close(self) -> None:
        self._closed.set()


@dataclass(eq=False)
class EnvSupervisor:
    """Records failures of environments, and re-creates failed environments if configured.

    Attributes:
        make: re-creates the environment of an index; None: a failure is an error.
        worker_index: of the worker that the environments belong to, for messages.
        watchdog: monitors the duration of calls; None: unlimited.
        max_restarts: failures without a finished episode that an environment may have; None: any
            number.
        on_recreated: called with each re-created environment, and its index.
        first_index: index of the first environment, for messages.
        failures: number of failures in all environments.
    """

    make: Callable[[int], Any] | None = None
    worker_index: int | None = None
    watchdog: Watchdog | None = None
    max_restarts: int | None = None
    on_recreated: Callable[[Any, int], None] = lambda env, index: None
    first_index: int = 0

    def __post_init__(self) -> None:
        self.failures = self._episodes = 0  # of all environments; only whole episodes count
        self._has_started = False  # whether any environment has been reset
        self._worker_suffix = "" if self.worker_index is None else f" of worker {self.worker_index}"
        self._restarts: dict[int, int] = {}  # failures by index since the last whole episode
        self._failures_in_a_row: Counter[int] = Counter()  # failures since the last completed step

    def describe_env(self, index: int) -> str:
        """Returns how messages call an environment."""
        return f"Environment {self.first_index + index}{self._worker_suffix}"

    def describe_call(self, index: int, method: str) -> str:
        """Returns how messages call a method of an environment."""
        return f"`{method}` of {self.describe_env(index).lower()}"

    def watch(self, index: int, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method of an environment, monitored by the watchdog."""
        if self.watchdog is None:
            return function
        return functools.partial(self.watchdog.call, self.describe_call(index, method), function)

    def on_failure(self, index: int, call: str, error: BaseException) -> Exception:
        """Records the failure of an environment.

        Args:
            index: of the environment.
            call: the call that failed.
            error: the exception that it raised, or an `EnvError` about its result.

        Returns:
            `error`, or an `EnvError` instead of a `SystemExit`.

        Raises:
            Exception: `error`, unless environments are re-created.
            EnvError: if it failed too often without finishing an episode, or completing a step.
        """
        if not isinstance(error, Exception):
            env_error = EnvError(
                f"`{call}` of {self.describe_env(index).lower()} tried to end the process: "
                f"{error!r}. Let it end the episode (`terminated`, `truncated`), or raise an error."
            )
            env_error.__cause__ = error
            error = env_error
        name, reason = (
            self.describe_env(index),
            f"failed in {call}: {type(error).__name__}: {error}",
        )
        reason += get_failure_hint(error)
        if self.make is None:
            if hasattr(error, "add_note"):
                error.add_note(
                    f"{name} failed in {call}.{get_failure_hint(error)} "
                    "fault_tolerance(restart_failed_sub_environments=True) re-creates it."
                )
            else:
                logger.error("%s %s", name, reason)
            raise error
        self._has_started |= call.startswith("step")
        self._record_failure(index, reason, error)
        return error

    def on_self_restart(self, index: int, call: str, error: Exception) -> None:
        """Records that an environment failed and has re-created itself.

        Raises:
            EnvError: if it failed too often without finishing an episode, or completing a step.
        """
        self._record_failure(index, f"failed in {call}: {type(error).__name__}: {error}", error)

    def _record_failure(self, index: int, reason: str, error: BaseException) -> None:
        """Counts a failure, logs the first ones and then fewer; raises if the limit is exceeded."""
        self.failures += 1
        if _is_round_number(self.failures):
            logger.warning(
                "%s is re-created, and its episode is dropped: it %s. So far there were %d "
                "failures and %d whole episodes.",
                *(self.describe_env(index), reason, self.failures, self._episodes),
            )
        restarts = self._restarts[index] = self._restarts.get(index, 0) + 1
        if self.max_restarts is not None and restarts > self.max_restarts:
            raise EnvError(
                f"{self.describe_env(index)} failed {restarts} times without a whole episode, and "
                f"max_num_sub_environment_restarts={self.max_restarts}; at last it {reason}"
            ) from error
        self._failures_in_a_row[index] += 1
        if self._failures_in_a_row[index] >= _MAX_FAILURES_IN_A_ROW:
            raise EnvError(
                f"{self.describe_env(index)} failed {_MAX_FAILURES_IN_A_ROW} times in a row "
                f"without completing a step; at last it {reason}"
            ) from error

    def on_step(self, index: int | None = None) -> None:
        """Records that an environment completed a step; None: all of them did."""
        if index is None:
            self._failures_in_a_row.clear()
        else:
            self._failures_in_a_row.pop(index, None)

    def on_episode_done(self, index: int, episodes: int = 1) -> None:
        """Records that an environment finished one or more episodes."""
        self._has_started = True
        self._episodes += episodes
        self._restarts.pop(index, None)

    def recreate(self, index: int, env: Any, start: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Returns a new environment and the result of `start(environment)`.

        If the new one cannot be made or reset, that is a failure as well, and it is replaced
        after a pause that grows.

        Args:
            index: of the environment.
            env: is closed first.
            start: resets the new one, and checks the result.
        """
        if self.make is None:
            raise EnvError(f"{self.describe_env(index)} cannot be re-created.")
        for tries in itertools.count(1):
            try:
                env.close()
            except ENV_FAILURES as error:
                logger.warning("%s failed in close(): %r", self.describe_env(index), error)
            try:
                env = self.make(index)
            except ENV_FAILURES as error:
                self._record_failed_restart(index, tries, error)
                continue
            self.on_recreated(env, index)
            try:
                result = start(env)
            except ENV_FAILURES as error:
                self._record_failed_restart(index, tries, error)
                continue
            self._has_started = True
            return env, result
        raise AssertionError("an endless loop ended")

    def _record_failed_restart(self, index: int, tries: int, error: BaseException) -> None:
        """Counts a new environment that cannot be made or reset, and waits; raises after many."""
        if tries == _FIRST_TRIES and not self._has_started:
            raise EnvError(
                f"{self.describe_env(index)} was re-created {tries} times, but could not be reset: "
                f"{error!r}."
            ) from error
        reason = f"failed when it was made or first reset: {type(error).__name__}: {error}"
        self._record_failure(index, reason, error)
        time.sleep(min(0.001 * 2**tries, _LONGEST_PAUSE))


class EnvCopies:
    """Copies of an environment, whose calls are monitored, and which are re-created after failures.

    Attributes:
        envs: the copies.
        supervisor: handles failures of the copies.
    """

    envs: list[Any]
    supervisor: EnvSupervisor

    def set_supervisor(self, supervisor: EnvSupervisor) -> None:
        self.supervisor = supervisor
        self._watch_calls()

    def _watch_calls(self) -> None:
        watch, envs = self.supervisor.watch, self.envs
        self._steps = [watch(i, "step", env.step) for i, env in enumerate(envs)]
        self._resets = [watch(i, "reset", env.reset) for i, env in enumerate(envs)]

    def _replace_copy(self, index: int, begin: Callable[[int], Any]) -> Any:
        """Replaces a copy that failed by a new one; returns the result of `begin(index)`."""

        def start(env: gym.Env) -> Any:
            self.envs[index] = env
            self._watch_calls()
            return begin(index)

        return self.supervisor.recreate(index, self.envs[index], start)[1]

    def get_sub_environments(self) -> list[Any]:
        """Returns the copies, by index."""
        return list(self.envs)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _is_round_number(count: int) -> bool:
    """Returns True if a count is worth a log line: 1 to 10, 20, 30, ..., 100, 200, ...

    >>> [count for count in range(1, 400) if _is_round_number(count)][8:]
    [9, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300]
    """
    return count % 10 ** (len(str(count)) - 1) == 0


def are_finite_numbers(array: np.ndarray) -> bool:
    """Returns True if an array has real numbers, and neither NaN nor infinity among them.

    >>> are_finite_numbers(np.array([1.0, 1e200])), are_finite_numbers(np.array([1.0, np.nan]))
    (True, False)
    >>> are_finite_numbers(np.array(["1.0"]))
    False
    """
    kind = array.dtype.kind
    return all_finite((array,)) if kind == "f" else kind in "biu"


def are_flags(values: Sequence[Any]) -> bool:
    """Returns True if values (flags of ended episodes) are all True or False, or 1 or 0.

    >>> are_flags([True, 0]), are_flags(["False", True]), are_flags([2.0])
    (True, False, False)
    """
    try:
        return values.count(True) + values.count(False) == len(values)
    except ValueError:  # an array with several numbers
        return False


def as_flags(array: np.ndarray) -> np.ndarray | None:
    """Returns the flags of a vector environment as a bool array; None if there are other values."""
    if array.dtype.kind == "b":
        return array
    return array.astype(bool) if are_flags(array.tolist()) else None


def make_obs_check(space: gym.Space) -> Callable[[Any], bool]:
    """Returns a function that checks observations of a space, single ones or a batch.

    Floats must be finite, elements of discrete spaces within their bounds. Boxes of integers, which
    are mostly images, and bounds of floats are not checked.

    >>> can_be = make_obs_check(gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Box(0, 1)))
    >>> can_be({"a": np.array([2, 0]), "b": np.array([[0.5], [7.0]])})
    True
    >>> can_be({"a": np.array([2, 3]), "b": np.array([[0.5], [0.5]])})
    False
    """
    low: Any
    high: Any
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        keyed = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        parts = [(key, make_obs_check(part)) for key, part in keyed]
        return lambda nested: all(check(nested[key]) for key, check in parts)
    if isinstance(space, gym.spaces.Discrete):
        low, high = space.start, space.start + space.n - 1
    elif isinstance(space, gym.spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, gym.spaces.MultiBinary):
        low, high = 0, 1
    else:
        return are_finite_numbers
    return lambda array: bool(((array >= low) & (array <= high)).all())


def describe_invalid_obs(space: gym.Space) -> str:
    """Returns how messages describe an observation that `make_obs_check` rejects."""
    return "is not finite" if isinstance(space, gym.spaces.Box) else f"is not in {space}"


def check_observation(space: gym.Space, obs: Any, subject: str) -> None:
    """Raises an `EnvError` unless all parts of `obs` exist, have their shape, and are finite."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        for key, sub in parts:
            try:
                part = obs[key]
            except (KeyError, IndexError, TypeError) as error:
                raise EnvError(
                    f"The {subject} has no part {key!r}, but its space is {space}. Return what "
                    "`observation_space.contains` accepts."
                ) from error
            check_observation(sub, part, f"part {key!r} of the {subject}")
    elif _shape(obs) != (space.shape or ()):
        raise EnvError(
            f"The {subject} has the shape {_shape(obs)}, but its space is {space} with the shape "
            f"{space.shape or ()}: {obs!r:.200}. Return what `observation_space.contains` accepts."
        )
    elif np.asarray(obs).dtype.kind in NON_NUMERIC_KINDS:
        raise EnvError(
            f"The {subject} must be real numbers, but has the dtype {np.asarray(obs).dtype}: "
            f"{obs!r:.200}. Return what `observation_space.contains` accepts."
        )
    elif not make_obs_check(space)(np.asarray(obs)):
        raise EnvError(f"The {subject} {describe_invalid_obs(space)}: {obs!r:.500}.")


def _shape(value: ArrayLike) -> Any:
    try:
        return np.shape(value)
    except ValueError:  # lists of different lengths
        return "(ragged)"


def require_space(owner: object, name: str) -> gym.Space:
    space = getattr(owner, name, None)
    if not isinstance(space, gym.Space):
        kind = type(getattr(owner, "unwrapped", owner)).__name__
        raise EnvError(
            f"{kind} has no {name}: it must be one of gymnasium.spaces, got {space!r:.100}. Set "
            f"self.{name} in `__init__`."
        )
    return space


def check_accepts_seed(reset: Callable[..., Any], subject: str) -> None:
    """Checks that `reset` takes a `seed`, after a call of `reset(seed=...)` raised a `TypeError`.

    Args:
        reset: the method.
        subject: how messages call it.
    """
    try:
        inspect.signature(reset).bind(seed=0)
    except ValueError:  # Python cannot determine its signature
        return
    except TypeError as error:
        raise EnvError(
            f"{subject} takes no `seed`. Write `def reset(self, *, seed=None, options=None)`, and "
            "begin it with `super().reset(seed=seed)`."
        ) from error


def describe_invalid_reward(reward: Any, action: Structure | None = None) -> str:
    """Returns the end of a message about a reward that is not a finite number.

    Args:
        reward: the value.
        action: that led to it; None if unknown.

    >>> describe_invalid_reward("1")
    "'1'. Return a float."
    >>> describe_invalid_reward(np.float64("nan"), 2)[:35]
    'nan for the action 2. Look for divi'
    """
    array = np.asarray(reward)
    if array.shape != () or array.dtype.kind != "f":
        return f"{reward!r:.200}. Return a float."
    for_action = "" if action is None else f" for the action {action!r:.200}"
    return (
        f"{float(array)}{for_action}. Look for divisions by zero, and for roots or logarithms of "
        "numbers out of their domain."
    )


def check_reward(reward: Structure, subject: str, action: Structure | None = None) -> None:
    """Raises an `EnvError` unless a reward is a finite number.

    Args:
        reward: the value.
        subject: the call that returned it.
        action: that led to it; None if unknown.
    """
    array = np.asarray(reward)
    if array.shape != ():
        raise EnvError(
            f"{subject} gave the reward {reward!r:.200}; a reward is one number. Return "
            "float(reward)."
        )
    if array.dtype.kind not in "biuf" or not np.isfinite(array):
        raise EnvError(
            f"The reward of {subject} must be a finite number, got "
            f"{describe_invalid_reward(reward, action)}"
        )


def check_flag(flag: Scalar, name: str, subject: str) -> None:
    """Raises an `EnvError` unless a flag of an ended episode is a bool, 0 or 1."""
    if np.shape(flag) != () or not are_flags([flag]):
        plain_flag = flag.item() if isinstance(flag, np.generic) else flag
        raise EnvError(f"{subject} gave {name}={plain_flag!r}; it must be True or False.")
