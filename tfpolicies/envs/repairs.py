"""Environments that break: which one it was and what it gave, and a new one in its place.

An environment breaks when `reset` or `step` raises, takes longer than it may, or returns what is no
observation of its space, no reward, or not finite.
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

from tfpolicies.errors import EnvError
from tfpolicies.finite import NO_NUMBERS, all_finite
from tfpolicies.type_aliases import Scalar, Structure

logger = logging.getLogger("tfpolicies")

_FRAMES = 8  # of the stack that are shown of a call that hangs
BREAKS = (Exception, SystemExit)
"""What counts as the breaking of an environment, which must not end the process it runs in."""

_FIRST_TRIES = 10  # to reset an environment where none has been reset so far
_LONGEST_PAUSE = 5.0  # seconds between two tries to reset a new environment
_MOST_IN_A_ROW = 200  # breaks of an environment without a completed step


def hint_for(error: BaseException) -> str:
    """Returns what to do about an error that an environment raised, with a space before; or ""."""
    if isinstance(error, ValueError) and "read-only" in str(error):
        return " Actions are read-only: write to a copy, `action = action.copy()`."
    return ""


def describe_slow_call(what: str, seconds: float, limit: float) -> str:
    """Returns the message about a call that took longer than `env_step_timeout_s`."""
    return f"{what} took {seconds:.1f} seconds; env_step_timeout_s={limit:g}."


class Watchdog:
    """Notices calls that take too long, in a thread of its own.

    A call cannot be ended from outside. While it lasts, the log has where it hangs, and `trouble`
    says so; if it returns after all, it counts as broken. A remote worker that hangs is replaced.

    Args:
        limit: seconds that a call may take.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._running: tuple[str, float, int] | None = None  # what, since when, thread
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def call(self, what: str, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Returns `function(*args, **kwargs)`.

        Raises:
            EnvError: if it took too long.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        since = time.monotonic()
        self._running = what, since, threading.get_ident()
        try:
            result = function(*args, **kwargs)
        finally:
            self._running = None
        seconds = time.monotonic() - since
        if seconds > self.limit:
            raise EnvError(describe_slow_call(what, seconds, self.limit))
        return result

    def trouble(self) -> str | None:
        """Says what takes too long at present; None if nothing does."""
        running = self._running
        if running is None:
            return None
        seconds = time.monotonic() - running[1]
        if seconds <= self.limit:
            return None
        return f"{running[0]} hangs for {seconds:.1f} seconds; env_step_timeout_s={self.limit:g}"

    def _watch(self) -> None:
        reported = None
        while not self._closed.wait(min(1.0, self.limit / 4)):
            running = self._running
            trouble = self.trouble()
            if running is None or trouble is None or running is reported:
                continue
            reported = running
            frame = sys._current_frames().get(running[2])
            stack = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else ""
            logger.error("%s. It is here:\n%s", trouble, stack)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()


@dataclass(eq=False)
class Repairs:
    """Says which environment broke, and makes a new one where that is asked for.

    Attributes:
        make: makes the environment of an index anew; None: what breaks is an error.
        worker_index: of the worker that the environments belong to, for messages.
        watchdog: looks after how long calls take; None: they may take any time.
        limit: times that an environment may break without finishing an episode; None: any number.
        on_made: called with each environment that was made anew, and its index.
        first_index: what messages call the environment of index 0.
        breaks: how many there were, in all environments.
    """

    make: Callable[[int], Any] | None = None
    worker_index: int | None = None
    watchdog: Watchdog | None = None
    limit: int | None = None
    on_made: Callable[[Any, int], None] = lambda env, index: None
    first_index: int = 0

    def __post_init__(self) -> None:
        self.breaks = self._episodes = 0  # of all environments; only whole episodes count
        self._has_started = False  # whether one of them has been reset
        self._place = "" if self.worker_index is None else f" of worker {self.worker_index}"
        self._times: dict[int, int] = {}  # that one broke since its last whole episode
        self._in_a_row: Counter[int] = Counter()  # likewise, since its last completed step

    def name(self, index: int) -> str:
        """Returns how messages call an environment."""
        return f"Environment {self.first_index + index}{self._place}"

    def call(self, index: int, method: str) -> str:
        """Returns how messages call a method of an environment."""
        return f"`{method}` of {self.name(index).lower()}"

    def watched(self, index: int, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method of an environment that the watchdog looks after."""
        if self.watchdog is None:
            return function
        return functools.partial(self.watchdog.call, self.call(index, method), function)

    def broke(self, index: int, call: str, error: BaseException) -> Exception:
        """Reports an environment that broke.

        Args:
            index: which one.
            call: what was called.
            error: what it raised, or an `EnvError` about what it returned.

        Returns:
            `error`, or an `EnvError` instead of a `SystemExit`.

        Raises:
            Exception: `error`, unless environments are made anew.
            EnvError: if it broke too often without finishing an episode, or completing a step.
        """
        if not isinstance(error, Exception):
            explained = EnvError(
                f"`{call}` of {self.name(index).lower()} was to end the process: {error!r}. "
                "Let it end the episode (`terminated`, `truncated`), or raise an error."
            )
            explained.__cause__ = error
            error = explained
        name, reason = self.name(index), f"broke in {call}: {type(error).__name__}: {error}"
        reason += hint_for(error)
        if self.make is None:
            if hasattr(error, "add_note"):
                error.add_note(
                    f"{name} broke in {call}.{hint_for(error)} "
                    "fault_tolerance(restart_failed_sub_environments=True) makes it anew."
                )
            else:
                logger.error("%s %s", name, reason)
            raise error
        self._has_started |= call.startswith("step")
        self._count(index, reason, error)
        return error

    def mended(self, index: int, call: str, error: Exception) -> None:
        """Takes down that an environment broke, and has been made anew without our doing.

        Raises:
            EnvError: if it broke too often without finishing an episode, or completing a step.
        """
        self._count(index, f"broke in {call}: {type(error).__name__}: {error}", error)

    def _count(self, index: int, reason: str, error: BaseException) -> None:
        """Counts a break, and says so unless there were many of them.

        Raises:
            EnvError: if there were more in a row than there may be.
        """
        self.breaks += 1
        if _is_round(self.breaks):
            logger.warning(
                "%s is made anew, and its episode is dropped: it %s. So far there were %d breaks "
                "and %d whole episodes.",
                *(self.name(index), reason, self.breaks, self._episodes),
            )
        times = self._times[index] = self._times.get(index, 0) + 1
        if self.limit is not None and times > self.limit:
            raise EnvError(
                f"{self.name(index)} broke {times} times without a whole episode, and "
                f"max_num_sub_environment_restarts={self.limit}; at last it {reason}"
            ) from error
        self._in_a_row[index] += 1
        if self._in_a_row[index] >= _MOST_IN_A_ROW:
            raise EnvError(
                f"{self.name(index)} broke {_MOST_IN_A_ROW} times in a row without completing a "
                f"step; at last it {reason}"
            ) from error

    def stepped(self, index: int | None = None) -> None:
        """Takes down that an environment completed a step; None: that all of them did."""
        if index is None:
            self._in_a_row.clear()
        else:
            self._in_a_row.pop(index, None)

    def worked(self, index: int, episodes: int = 1) -> None:
        """Takes down that an environment finished an episode, or several."""
        self._has_started = True
        self._episodes += episodes
        self._times.pop(index, None)

    def renewed(self, index: int, old: Any, start: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Returns a new environment and what `start(environment)` gave.

        A new one that cannot be made or reset has broken, too, and is replaced in its turn, after a
        pause that grows.

        Args:
            index: which one.
            old: is closed first.
            start: resets the new one, and checks what that gives.

        Raises:
            EnvError: if it broke too often, or if no environment here was ever reset.
        """
        if self.make is None:
            raise EnvError(f"{self.name(index)} cannot be made anew.")
        for tries in itertools.count(1):
            try:
                old.close()
            except BREAKS as error:
                logger.warning("%s broke in close(): %r", self.name(index), error)
            try:
                old = self.make(index)
            except BREAKS as error:
                self._failed_again(index, tries, error)
                continue
            self.on_made(old, index)
            try:
                found = start(old)
            except BREAKS as error:
                self._failed_again(index, tries, error)
                continue
            self._has_started = True
            return old, found
        raise AssertionError("an endless loop ended")

    def _failed_again(self, index: int, tries: int, error: BaseException) -> None:
        """Counts a new environment that cannot be made or reset, and waits.

        Raises:
            EnvError: if it broke too often, or if no environment here was ever reset.
        """
        if tries == _FIRST_TRIES and not self._has_started:
            raise EnvError(
                f"{self.name(index)} was made anew {tries} times, but could not be reset: "
                f"{error!r}."
            ) from error
        reason = f"broke when it was made or first reset: {type(error).__name__}: {error}"
        self._count(index, reason, error)
        time.sleep(min(0.001 * 2**tries, _LONGEST_PAUSE))


class EnvCopies:
    """Copies of an environment, whose calls are watched, and which are made anew when they break.

    Attributes:
        envs: the copies.
        repairs: what is done about copies that break.
    """

    envs: list[Any]
    repairs: Repairs

    def guard(self, repairs: Repairs) -> None:
        """Takes what is done about copies that break."""
        self.repairs = repairs
        self._watch_calls()

    def _watch_calls(self) -> None:
        watched, envs = self.repairs.watched, self.envs
        self._steps = [watched(i, "step", env.step) for i, env in enumerate(envs)]
        self._resets = [watched(i, "reset", env.reset) for i, env in enumerate(envs)]

    def _renew(self, index: int, begin: Callable[[int], Any]) -> Any:
        """Puts a new copy in the place of one that broke; returns what `begin(index)` gives."""

        def start(env: gym.Env) -> Any:
            self.envs[index] = env
            self._watch_calls()
            return begin(index)

        return self.repairs.renewed(index, self.envs[index], start)[1]

    def get_sub_environments(self) -> list[Any]:
        """Returns the copies, by index, for callers that want to talk to them."""
        return list(self.envs)

    def close(self) -> None:
        """Closes all copies."""
        for env in self.envs:
            env.close()


def _is_round(count: int) -> bool:
    """Whether a count is worth a line: 1 to 10, 20, 30, ..., 100, 200, ...

    >>> [count for count in range(1, 400) if _is_round(count)][8:]
    [9, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 200, 300]
    """
    return count % 10 ** (len(str(count)) - 1) == 0


def are_sound(array: np.ndarray) -> bool:
    """Whether an array has real numbers, and neither NaN nor infinity among them.

    >>> are_sound(np.array([1.0, 1e200])), are_sound(np.array([1.0, np.nan]))
    (True, False)
    >>> are_sound(np.array(["1.0"]))
    False
    """
    kind = array.dtype.kind
    return all_finite((array,)) if kind == "f" else kind in "biu"


def are_flags(values: Sequence[Any]) -> bool:
    """Whether values that say which episodes ended are all True or False, or 1 or 0.

    >>> are_flags([True, 0]), are_flags(["False", True]), are_flags([2.0])
    (True, False, False)
    """
    try:
        return values.count(True) + values.count(False) == len(values)
    except ValueError:  # an array with several numbers
        return False


def as_flags(array: np.ndarray) -> np.ndarray | None:
    """Returns the flags of a vector environment as a bool array; None if there are others."""
    if array.dtype.kind == "b":
        return array
    return array.astype(bool) if are_flags(array.tolist()) else None


def sound_check(space: gym.Space) -> Callable[[Any], bool]:
    """Returns a function that says whether observations, one or a batch, can be of a space.

    Floats must be finite, elements of discrete spaces within their bounds. Boxes of integers, which
    are mostly images, are not looked through, nor are the bounds of floats.

    >>> can_be = sound_check(gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Box(0, 1)))
    >>> can_be({"a": np.array([2, 0]), "b": np.array([[0.5], [7.0]])})
    True
    >>> can_be({"a": np.array([2, 3]), "b": np.array([[0.5], [0.5]])})
    False
    """
    low: Any
    high: Any
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        keyed = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        parts = [(key, sound_check(part)) for key, part in keyed]
        return lambda nested: all(check(nested[key]) for key, check in parts)
    if isinstance(space, gym.spaces.Discrete):
        low, high = space.start, space.start + space.n - 1
    elif isinstance(space, gym.spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, gym.spaces.MultiBinary):
        low, high = 0, 1
    else:
        return are_sound
    return lambda array: bool(((array >= low) & (array <= high)).all())


def unsound(space: gym.Space) -> str:
    """Returns how messages say that `sound_check` found something."""
    return "is not finite" if isinstance(space, gym.spaces.Box) else f"is not in {space}"


def check_observation(space: gym.Space, obs: Any, what: str) -> None:
    """Raises an `EnvError` unless all parts of `obs` are there, of their shape, and finite."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        for key, sub in parts:
            try:
                part = obs[key]
            except (KeyError, IndexError, TypeError) as error:
                raise EnvError(
                    f"The {what} has no part {key!r}, but its space is {space}. Return what "
                    "`observation_space.contains` accepts."
                ) from error
            check_observation(sub, part, f"part {key!r} of the {what}")
    elif _shape(obs) != (space.shape or ()):
        raise EnvError(
            f"The {what} has the shape {_shape(obs)}, but its space is {space} with the shape "
            f"{space.shape or ()}: {obs!r:.200}. Return what `observation_space.contains` accepts."
        )
    elif np.asarray(obs).dtype.kind in NO_NUMBERS:
        raise EnvError(
            f"The {what} must be real numbers, but has the dtype {np.asarray(obs).dtype}: "
            f"{obs!r:.200}. Return what `observation_space.contains` accepts."
        )
    elif not sound_check(space)(np.asarray(obs)):
        raise EnvError(f"The {what} {unsound(space)}: {obs!r:.500}.")


def _shape(value: ArrayLike) -> Any:
    try:
        return np.shape(value)
    except ValueError:  # of lists of several lengths
        return "(ragged)"


def require_space(owner: object, name: str) -> gym.Space:
    """Returns a space of an environment.

    Raises:
        EnvError: if the environment does not have it.
    """
    space = getattr(owner, name, None)
    if not isinstance(space, gym.Space):
        kind = type(getattr(owner, "unwrapped", owner)).__name__
        raise EnvError(
            f"{kind} has no {name}: it must be one of gymnasium.spaces, got {space!r:.100}. Set "
            f"self.{name} in `__init__`."
        )
    return space


def explain_seed(reset: Callable[..., Any], what: str) -> None:
    """Says what is wrong if a call of `reset(seed=...)` failed for its signature.

    Args:
        reset: what was called.
        what: how messages call it.

    Raises:
        EnvError: if it takes no `seed`.
    """
    try:
        inspect.signature(reset).bind(seed=0)
    except ValueError:  # Python cannot tell its signature
        return
    except TypeError as error:
        raise EnvError(
            f"{what} takes no `seed`. Write `def reset(self, *, seed=None, options=None)`, and "
            "begin it with `super().reset(seed=seed)`."
        ) from error


def check_reward(reward: Structure, what: str) -> None:
    """Raises an `EnvError` unless a reward is a finite number."""
    array = np.asarray(reward)
    if array.shape != ():
        raise EnvError(
            f"{what} gave the reward {reward!r:.200}; a reward is one number. Return float(reward)."
        )
    if array.dtype.kind not in "biuf" or not np.isfinite(array):
        raise EnvError(f"{what} gave the reward {reward!r}; a reward is a finite number.")


def check_flag(flag: Scalar, name: str, what: str) -> None:
    """Raises an `EnvError` unless what says whether an episode ended is a bool, 0 or 1."""
    if np.shape(flag) != () or not are_flags([flag]):
        shown = flag.item() if isinstance(flag, np.generic) else flag
        raise EnvError(f"{what} gave {name}={shown!r}; it must be True or False.")
