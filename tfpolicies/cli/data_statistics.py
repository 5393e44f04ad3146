"""Statistics of recorded experience, updated chunk by chunk in bounded memory."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.models.spaces import is_float_box

_SAMPLE_ROWS = 1 << 14  # of a reservoir
_SAMPLE_VALUES = 1 << 21
_MAX_COMPONENTS = 64  # of a leaf, in tables and pictures
_MAX_CHOICES = 10_000  # different actions that are counted
_MAX_OPEN_EPISODES = 1 << 14  # of files in which episodes alternate


class Reservoir:
    """A random sample of rows, of bounded size (Vitter 1985)."""

    def __init__(self, rows: int = _SAMPLE_ROWS) -> None:
        self._rows = rows
        self._rng = np.random.default_rng(0)
        self._seen = 0
        self._parts: list[np.ndarray] = []
        self._sample: np.ndarray | None = None

    def add(self, rows: np.ndarray) -> None:
        if self._sample is None:
            width = max(1, int(np.prod(rows.shape[1:])))
            self._rows = max(64, min(self._rows, _SAMPLE_VALUES // width))
            self._sample = np.empty((0, *rows.shape[1:]), rows.dtype)
        if rows.shape[1:] != self._sample.shape[1:]:
            return
        fill = rows[: self._rows - len(self._sample)]
        self._sample = np.concatenate([self._sample, fill]) if len(fill) else self._sample
        rest = rows[len(fill) :]
        numbers = np.arange(self._seen + len(fill), self._seen + len(rows))
        self._seen += len(rows)
        if len(rest):
            slots = self._rng.integers(0, numbers + 1)
            chosen = np.flatnonzero(slots < self._rows)
            self._sample[slots[chosen]] = rest[chosen]

    def get(self) -> np.ndarray:
        """Returns the sample, `[rows, ...]`."""
        return np.zeros((0,)) if self._sample is None else self._sample


class ValueStats:
    """Statistics of all numbers of a column.

    Attributes:
        dtype: of the column, as a text.
        shape: of a row.
        missing: how many numbers are not finite.
    """

    def __init__(self) -> None:
        self.dtype = ""
        self.shape: tuple[int, ...] = ()
        self.missing = 0
        self.low, self.high = math.inf, -math.inf
        self._count, self._total = 0, 0.0

    def add(self, array: np.ndarray) -> None:
        self.dtype = "text" if array.dtype.kind in "OUS" else str(array.dtype)
        self.shape = array.shape[1:]
        if array.dtype.kind not in "biuf":
            return
        values = array.reshape(-1)
        if array.dtype.kind == "f":
            is_valid = np.isfinite(values)
            self.missing += int((~is_valid).sum())
            values = values[is_valid]
        if values.size:
            self.low = min(self.low, float(values.min()))
            self.high = max(self.high, float(values.max()))
            self._count += values.size
            self._total += float(values.sum(dtype=np.float64))

    @property
    def mean(self) -> float:
        """The mean of the finite numbers; NaN without any."""
        return self._total / self._count if self._count else math.nan


class ComponentStats:
    """Smallest and largest value, mean and standard deviation of each component of a leaf."""

    def __init__(self) -> None:
        self.low: np.ndarray | None = None
        self.high: np.ndarray | None = None
        self._count = 0
        self._total: Any = 0.0
        self._squares: Any = 0.0
        self._origin: Any = None
        self.sample = Reservoir()

    def add(self, array: np.ndarray) -> None:
        values = array.reshape(len(array), -1).astype(np.float64)
        values = values[np.isfinite(values).all(axis=1)]
        if not len(values):
            return
        low, high = values.min(axis=0), values.max(axis=0)
        if self.low is None or self.high is None:
            self.low, self.high, self._origin = low, high, values.mean(axis=0)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        centered = values - self._origin
        self._count += len(values)
        self._total = self._total + centered.sum(axis=0)
        self._squares = self._squares + np.square(centered).sum(axis=0)
        self.sample.add(values[:, :_MAX_COMPONENTS])

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self._origin + self._total / max(1, self._count))

    @property
    def std(self) -> np.ndarray:
        count = max(1, self._count)
        return np.sqrt(np.maximum(0.0, self._squares / count - np.square(self._total / count)))


class ActionCoverage:
    """Coverage of an action space by recorded actions.

    Args:
        space: of the leaf; None if it is unknown.

    Attributes:
        counts: how often each integer occurs; empty for floats.
        components: of floats, or of several integers in an action; None otherwise.
    """

    def __init__(self, space: spaces.Space[Any] | None) -> None:
        self.space = space
        self.counts: Counter[int] = Counter()
        self.components: ComponentStats | None = None
        self._rows = 0
        self._at_bounds: Any = 0

    def add(self, array: np.ndarray) -> None:
        self._rows += len(array)
        is_single = math.prod(array.shape[1:]) == 1
        if array.dtype.kind in "biu" and is_single:
            values, counts = np.unique(array, return_counts=True)
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                if value in self.counts or len(self.counts) < _MAX_CHOICES:
                    self.counts[int(value)] += count
            return
        if self.components is None:
            self.components = ComponentStats()
        self.components.add(array)
        if self.space is not None and is_float_box(self.space):
            low, high = (x.reshape(-1) for x in (self.space.low, self.space.high))
            values = array.reshape(len(array), -1)
            self._at_bounds = self._at_bounds + ((values <= low) | (values >= high)).sum(axis=0)

    @property
    def share_at_bounds(self) -> np.ndarray | None:
        """The share of each component that is at a bound of the space; None for choices."""
        if self.components is None or self.space is None or not is_float_box(self.space):
            return None
        return np.asarray(self._at_bounds) / max(1, self._rows)

    def get_shares(self) -> dict[int, float]:
        """Returns the share of each choice, also of those of the space that never occur."""
        total = sum(self.counts.values()) or 1
        choices = dict.fromkeys(sorted(self.counts), 0)
        if isinstance(self.space, spaces.Discrete) and self.space.n <= _MAX_CHOICES:
            start = int(self.space.start)
            choices = dict.fromkeys(range(start, start + int(self.space.n)), 0) | choices
        return {choice: self.counts[choice] / total for choice in sorted(choices)}


class EpisodeStats:
    """Returns, lengths and ends of episodes.

    Attributes:
        count: of episodes.
        terminated: how many ended by termination.
        truncated: how many were truncated.
        has_returns: whether the data have rewards.
        sample: return and length of a sample of episodes.
    """

    def __init__(self) -> None:
        self.count = self.terminated = self.truncated = 0
        self.has_returns = False
        self.returns, self.lengths = ComponentStats(), ComponentStats()
        self.sample = Reservoir()
        self._open: OrderedDict[Any, tuple[float, int, bool, bool]] = OrderedDict()

    @property
    def cut_off(self) -> int:
        """The number of episodes that end without a flag."""
        return self.count - self.terminated - self.truncated

    def add(
        self,
        starts: np.ndarray,
        rewards: np.ndarray | None,
        terminateds: np.ndarray,
        truncateds: np.ndarray,
        keys: np.ndarray | None,
    ) -> None:
        """Adds rows.

        Args:
            starts: bool `[rows]`: where an episode starts.
            rewards: `[rows]`; None without rewards.
            terminateds: bool `[rows]`.
            truncateds: bool `[rows]`.
            keys: `[rows, k]`, which identify episodes that alternate; None if rows of an episode
                follow each other.
        """
        self.has_returns |= rewards is not None
        rows = len(starts)
        bounds = np.flatnonzero(starts)
        if not len(bounds) or bounds[0] > 0:
            bounds = np.concatenate([[0], bounds])
        rewards = np.zeros(rows) if rewards is None else rewards.astype(np.float64)
        totals = np.add.reduceat(rewards, bounds)
        last = np.append(bounds[1:], rows) - 1
        lengths = last - bounds + 1
        segments = zip(
            *(x.tolist() for x in (bounds, totals, lengths, terminateds[last], truncateds[last])),
            strict=True,
        )
        closed = []
        for start, total, length, terminated, truncated in segments:
            key = None if keys is None else tuple(keys[start].tolist())
            if key is None and starts[start]:
                closed += self._pop_open(key)
            self._extend(key, total, length, terminated, truncated)
            if key is not None and (terminated or truncated):
                closed += self._pop_open(key)
        while len(self._open) > _MAX_OPEN_EPISODES:
            closed += self._pop_open(next(iter(self._open)))
        self._close(closed)

    def finish(self) -> None:
        """Closes the episodes that are still open."""
        self._close([*self._open.values()])
        self._open.clear()

    def _extend(
        self, key: Any, total: float, length: int, terminated: bool, truncated: bool
    ) -> None:
        before = self._open.get(key, (0.0, 0, False, False))
        self._open[key] = before[0] + total, before[1] + length, terminated, truncated

    def _pop_open(self, key: Any) -> list[tuple[float, int, bool, bool]]:
        episode = self._open.pop(key, None)
        return [] if episode is None else [episode]

    def _close(self, episodes: list[tuple[float, int, bool, bool]]) -> None:
        if not episodes:
            return
        array = np.array([[x[0], x[1]] for x in episodes])
        self.count += len(episodes)
        self.terminated += sum(x[2] for x in episodes)
        self.truncated += sum(x[3] and not x[2] for x in episodes)
        self.returns.add(array[:, :1])
        self.lengths.add(array[:, 1:])
        self.sample.add(array)
