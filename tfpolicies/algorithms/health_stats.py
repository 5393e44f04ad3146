"""Statistics of a run and of its policies after an iteration, for the rules of health.

The same classes are made from a result of `Algorithm.train` and from a row of `progress.csv`, so
that a rule does not know whether a run is training or was read back from its folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np

from tfpolicies.batch.leaves import iterate_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.envs.env_registry import get_env_name
from tfpolicies.models.spaces import action_leaves, choices_per_cell, is_float_box
from tfpolicies.reporting.progress_row import has_constant_sum
from tfpolicies.rollout.episode import RolloutMetrics

NORMAL_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
"""The entropy of a normal distribution with standard deviation 1, in nats."""

_NUM_MEASURED_ROWS = 64  # rows of a batch used to measure observations
_IMPROVEMENT_STDS = 1.0  # standard deviations of the first returns that count as an improvement
_MIN_EQUAL_GAIN_STDS = 0.5  # of them, for a return that all episodes have


class Settings(Protocol):
    """A config, or a dict of settings."""

    def get(self, name: str, default: Any, /) -> Any: ...


class FirstReturns(NamedTuple):
    """Mean and standard deviation of the returns of the first episodes of a run."""

    mean: float
    std: float

    @classmethod
    def from_episodes(cls, returns: Sequence[float]) -> FirstReturns:
        return cls(float(np.mean(returns)), float(np.std(returns)))

    def are_exceeded_by(self, mean: float) -> bool:
        """Returns whether a later mean return is higher by one standard deviation."""
        spread = max(_IMPROVEMENT_STDS * self.std, 1e-6 * abs(self.mean))
        return bool(mean > self.mean + spread)

    def are_below(self, equal_return: float) -> bool:
        """Returns whether a later return, the same in all episodes, is a gain.

        Half a standard deviation is enough for it: it has no spread of its own.
        """
        gain = equal_return - self.mean
        return bool(gain > _MIN_EQUAL_GAIN_STDS * self.std > 0)


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """The statistics of a whole run after an iteration.

    Attributes:
        settings: of the algorithm.
        env_name: the name of the environment.
        num_envs: environments of all workers together.
        env_steps: environment steps so far.
        steps_sampled: steps sampled in the iteration, in the unit of the run; NaN if unknown.
        steps_trained: steps trained in the iteration; NaN if unknown.
        has_learned: whether the iteration updated a policy.
        episodes_total: episodes that have ended so far.
        window: how many of them are the newest ones.
        equal_return: the return of the newest episodes if it is the same for all of them and all of
            their agents, else NaN.
        length_mean: mean length of the newest episodes; NaN without episodes.
        length_max: the largest length of the newest episodes; NaN if unknown.
        mean: mean return of the newest episodes; NaN without episodes.
        recent_mean: mean return of the most recent ones of these.
        first_returns: those of the first episodes; None if unknown.
        policy_means: mean returns of the newest episodes by policy, if there are several.
        has_constant_sum: whether the newest episodes have the same return, though those of
            policies differ, from each other or by episode.
    """

    settings: Settings
    env_name: str
    num_envs: int
    env_steps: int
    steps_sampled: float = math.nan
    steps_trained: float = math.nan
    has_learned: bool = True
    episodes_total: int = 0
    window: int = 0
    equal_return: float = math.nan
    length_mean: float = math.nan
    length_max: float = math.nan
    mean: float = math.nan
    recent_mean: float = math.nan
    first_returns: FirstReturns | None = None
    policy_means: Mapping[str, float] = field(default_factory=dict)
    has_constant_sum: bool = False

    @classmethod
    def from_result(
        cls,
        result: Mapping[str, Any],
        settings: Any,
        episodes: Sequence[RolloutMetrics],
        num_envs: int,
        first_returns: Sequence[float] | None,
    ) -> RunStats:
        """Makes the statistics of an iteration.

        Args:
            result: of the iteration.
            settings: the config of the algorithm.
            episodes: the newest ones.
            num_envs: of all workers.
            first_returns: of the first episodes; None if a checkpoint did not have them.
        """
        unit = settings.get("count_steps_by", None)
        lengths = result.get("hist_stats", {}).get("episode_lengths", ())
        return cls(
            settings=settings,
            env_name=get_env_name(settings.get("env", None)),
            num_envs=num_envs,
            env_steps=result["num_env_steps_sampled"],
            steps_sampled=result[f"num_{unit}_sampled_this_iter"],
            steps_trained=result[f"num_{unit}_trained_this_iter"],
            has_learned=bool(result["info"]["learner"]),
            episodes_total=result["episodes_total"],
            window=len(episodes),
            equal_return=_find_equal_return(episodes),
            length_mean=result.get("episode_len_mean", math.nan),
            length_max=max(lengths, default=math.nan),
            mean=result.get("episode_reward_mean", math.nan),
            recent_mean=result.get("recent_returns", {}).get("mean", math.nan),
            first_returns=_summarize_first_returns(first_returns),
            policy_means=result.get("policy_reward_mean", {}),
            has_constant_sum=_has_constant_sum(result),
        )

    def has_improved(self) -> bool:
        """Returns whether recent returns exceed the first ones, or this cannot be known."""
        if self.first_returns is None or self.has_constant_sum:
            return True
        return self.first_returns.are_exceeded_by(self.recent_mean)

    def get_number(self, name: str) -> float:
        """Returns a numeric setting; NaN if there is none."""
        return to_float(self.settings.get(name, None))


def _find_equal_return(episodes: Sequence[RolloutMetrics]) -> float:
    if not episodes:
        return math.nan
    first = episodes[0]
    for episode in reversed(episodes):
        if episode.episode_reward != first.episode_reward:
            return math.nan
    first_rewards = dict(first.agent_rewards)
    is_equal = all(dict(episode.agent_rewards) == first_rewards for episode in episodes)
    return float(first.episode_reward) if is_equal else math.nan


def _has_constant_sum(result: Mapping[str, Any]) -> bool:
    """Looks at the returns of all policies together: they may differ from each other only."""
    names = ("mean", "min", "max")
    columns = {f"episode_reward_{x}": [result.get(f"episode_reward_{x}", math.nan)] for x in names}
    returns = [x for name in names for x in result.get(f"policy_reward_{name}", {}).values()]
    return has_constant_sum({**columns, "policy/any/return_mean": returns})


def _summarize_first_returns(returns: Sequence[float] | None) -> FirstReturns | None:
    if returns is None:
        return None
    return FirstReturns.from_episodes(returns) if returns else FirstReturns(math.nan, math.nan)


@dataclass(frozen=True, kw_only=True)
class PolicyStats:
    """The statistics of one policy after an iteration.

    Attributes:
        policy_id: its id.
        stats: its `learner_stats`.
        settings: its settings.
        actions: facts about its actions.
        run: the statistics of the run.
        metrics: its further figures, `policy_metrics` of the result.
        equal_return: the return of its agents in all newest episodes if they are the same, else
            NaN.
        window: in how many of the newest episodes it had agents.
    """

    policy_id: str
    stats: Mapping[str, Any]
    settings: Settings
    actions: ActionFacts
    run: RunStats
    metrics: Mapping[str, float] = field(default_factory=dict)
    equal_return: float = math.nan
    window: int = 0

    @classmethod
    def from_result(
        cls,
        result: Mapping[str, Any],
        policy_id: str,
        settings: Settings,
        actions: ActionFacts,
        run: RunStats,
    ) -> PolicyStats:
        """Makes the statistics of a policy that learned in an iteration.

        Args:
            result: of the iteration.
            policy_id: its id.
            settings: its settings.
            actions: facts about its actions.
            run: the statistics of the run.
        """
        returns = result.get("hist_stats", {}).get(f"policy_{policy_id}_reward", ())
        return cls(
            policy_id=policy_id,
            stats=result["info"]["learner"][policy_id].get("learner_stats") or {},
            settings=settings,
            actions=actions,
            run=run,
            metrics=result["policy_metrics"][policy_id],
            equal_return=returns[0] if len({*returns}) == 1 else math.nan,
            window=len(returns),
        )

    def get_stat(self, name: str) -> float:
        """Returns a statistic; NaN, so that comparisons are false, if there is none."""
        return to_float(self.stats.get(name))

    def get_metric(self, name: str) -> float:
        """Returns a figure of `metrics`; NaN if there is none."""
        return to_float(self.metrics.get(name))

    def get_number(self, name: str) -> float:
        """Returns a numeric setting; NaN if there is none."""
        return to_float(self.settings.get(name, None))

    def get_learning_rates(self) -> dict[str, float]:
        """Returns the current learning rates by the name of their setting."""
        names = [name for name in self.stats if name.startswith("cur_") and name.endswith("lr")]
        return {name.removeprefix("cur_"): self.get_stat(name) for name in names}

    def get_entropy(self) -> float:
        """Returns the entropy of the policy in nats, by either of its names."""
        entropy = self.get_stat("entropy")
        return self.get_stat("policy_entropy") if math.isnan(entropy) else entropy


def to_float(value: object) -> float:
    """Converts a number; NaN for everything else.

    >>> to_float(2), to_float("2"), to_float(True)
    (2.0, nan, nan)
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


class ActionFacts(NamedTuple):
    """Facts about the actions of a policy.

    Attributes:
        max_entropy: the entropy of random discrete actions, in nats; NaN if unknown.
        components: how many components are continuous; 0 if unknown.
    """

    max_entropy: float = math.nan
    components: int = 0

    @classmethod
    def from_space(cls, action_space: gym.Space) -> ActionFacts:
        max_entropy, components = 0.0, 0
        for leaf in action_leaves(action_space):
            if is_float_box(leaf.space):
                components += math.prod(leaf.shape)
            else:
                max_entropy += sum(map(math.log, choices_per_cell(leaf.space)))
        return cls(max_entropy, components)

    def get_entropy(self, share: float, std: float) -> float:
        """Returns the entropy of actions that are random to a certain degree.

        Args:
            share: of the largest entropy of discrete actions.
            std: standard deviation of continuous components, in units of the policy.
        """
        return share * self.max_entropy + self.components * (NORMAL_ENTROPY + math.log(std))

    def describe_entropy(self, entropy: float) -> dict[str, float]:
        """Returns the entropy of a policy in units that can be compared.

        These are `entropy_share`, the share of the largest one, if all actions are discrete, and
        `action_std`, the mean standard deviation in units of the policy, if all are continuous.
        """
        if math.isnan(entropy) or math.isnan(self.max_entropy):
            return {}
        if self.components and not self.max_entropy:
            return {"action_std": math.exp(entropy / self.components - NORMAL_ENTROPY)}
        if self.max_entropy and not self.components:
            return {"entropy_share": entropy / self.max_entropy}
        return {}


@dataclass
class _Range:
    """The smallest and largest value of each component of the observations of a policy."""

    low: list[np.ndarray]
    high: list[np.ndarray]


class RowMeter:
    """Measures the observations and rewards that policies learn from.

    Its figures are `obs_magnitude`, the root mean square of the largest component of this
    iteration's observations; `obs_range`, the largest difference so far between two values of a
    component; and `reward_magnitude`, the largest absolute reward so far. Only observations of
    floats and integers wider than a byte are measured: the magnitude of bytes is 0.
    """

    def __init__(self) -> None:
        self._obs: dict[str, float] = {}
        self._rewards: dict[str, float] = {}
        self._ranges: dict[str, _Range] = {}

    def begin_iteration(self) -> None:
        self._obs.clear()

    def get_state(self) -> list[Any]:
        """Returns the ranges and rewards of each policy, for the figures of a whole run."""
        ranges = [[policy_id, [*x.low], [*x.high]] for policy_id, x in self._ranges.items()]
        return [ranges, [[*x] for x in self._rewards.items()]]

    def set_state(self, state: Sequence[Any]) -> None:
        """Restores a state of `get_state`; an empty one measures from the beginning.

        Raises:
            TypeError: if it is malformed; also a ValueError or an AttributeError.
        """
        ranges, rewards = state or ((), ())
        self._rewards = {str(policy_id): float(reward) for policy_id, reward in rewards}
        self._ranges = {str(policy_id): _Range([*low], [*high]) for policy_id, low, high in ranges}
        for bounds in self._ranges.values():
            shapes = [[x.shape for x in leaves] for leaves in (bounds.low, bounds.high)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"different shapes {shapes}")

    def measure(self, policy_id: str, batch: SampleBatch) -> None:
        """Measures the observations of the first batch of an iteration, and all rewards."""
        if policy_id not in self._obs and SampleBatch.OBS in batch:
            leaves = [_select_rows(leaf) for leaf in iterate_leaves(batch[SampleBatch.OBS])]
            measured = [leaf for leaf in leaves if leaf is not None]
            magnitudes = [
                0.0 if leaf is None else math.sqrt(np.square(leaf).mean(axis=0).max())
                for leaf in leaves
            ]
            self._obs[policy_id] = max(magnitudes, default=math.nan)
            if len(measured) == len(leaves):
                self._extend_range(policy_id, measured)
        rewards = batch.get(SampleBatch.REWARDS)
        if rewards is not None and len(rewards):
            largest = float(np.abs(rewards).max())
            self._rewards[policy_id] = max(largest, self._rewards.get(policy_id, 0.0))

    def _extend_range(self, policy_id: str, leaves: list[np.ndarray]) -> None:
        low, high = ([getattr(x, name)(axis=0) for x in leaves] for name in ("min", "max"))
        old = self._ranges.get(policy_id)
        if old is not None and all(x.shape == y.shape for x, y in zip(low, old.low, strict=False)):
            low = [np.minimum(x, y) for x, y in zip(low, old.low, strict=False)]
            high = [np.maximum(x, y) for x, y in zip(high, old.high, strict=False)]
        self._ranges[policy_id] = _Range(low, high)

    def get(self, policy_id: str) -> dict[str, float]:
        """Returns the figures of a policy; without those that were not measured."""
        figures = {
            "obs_magnitude": self._obs.get(policy_id),
            "reward_magnitude": self._rewards.get(policy_id),
        }
        bounds = self._ranges.get(policy_id)
        if bounds is not None and bounds.low:
            pairs = zip(bounds.low, bounds.high, strict=True)
            figures["obs_range"] = max(float((high - low).max()) for low, high in pairs)
        return {name: value for name, value in figures.items() if value is not None}


def _select_rows(leaf: Any) -> np.ndarray | None:
    """Returns some rows of observations as float64; None if they are not measured."""
    rows = np.asarray(leaf)
    if rows.ndim < 2 or rows.dtype.kind not in "fi" or not rows.size:
        return None
    stride = max(1, len(rows) // _NUM_MEASURED_ROWS) | 1  # odd, as periods are often even
    return rows[::stride].astype(np.float64)
