"""A run read back from its folder, as the rules of diagnosis see it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.algorithms.algorithm_registry import find_algorithm, get_algorithm_names
from tfpolicies.algorithms.health_stats import (
    ActionFacts,
    FirstReturns,
    PolicyStats,
    RunStats,
    to_float,
)
from tfpolicies.algorithms.tuned_hyperparameters import find_tuned
from tfpolicies.analysis.run_record import RunRecord
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.errors import CheckpointError
from tfpolicies.reporting.progress_row import (
    RECENT_PREFIX,
    find_policies_with_returns,
    get_policy_range,
    has_constant_sum,
)
from tfpolicies.storage.checkpoint import read_manifest
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST, POLICIES
from tfpolicies.storage.spaces_json import decode_space

_LEARNER_PREFIX, _POLICY_PREFIX = "learner/", "policy/"
_EVALUATION_STD = "evaluation/episode_reward_std"
_WINDOW_SHARE = 0.1  # share of the points of a curve over which it is smoothed
_SHORT_SHARE = 0.2  # share of the steps of tuned settings below which a run has just begun
_MIN_FIRST_EPISODES = 5  # episodes of the first mean return
_MAX_FORGOTTEN_SHARE = 0.5  # share of an improvement that a run may lose again
_POLICY_GAIN_SHARE = 0.25  # share of the range of a policy's returns that is an improvement
_OPPONENTS_CORRELATION = (
    -0.5
)  # of the changes of their returns, above which policies are not opponents
_MIN_CHANGES = 8  # of returns, for a correlation
_MIN_GOAL_SHARE = 0.25  # share of the way to the goal below which a flat curve is stuck


class Curve(NamedTuple):
    """Returns over the environment steps of a run, smoothed.

    Attributes:
        steps: float64 `[n]`.
        values: smoothed returns, float64 `[n]`.
        std: typical standard deviation of single returns; NaN if unknown.
    """

    steps: np.ndarray
    values: np.ndarray
    std: float = math.nan

    @classmethod
    def smooth(cls, steps: np.ndarray, values: np.ndarray, std: float = math.nan) -> Curve:
        """Makes a curve of trailing means; points that are not finite are left out."""
        is_finite = np.isfinite(values)
        steps, values = steps[is_finite], values[is_finite]
        width = max(1, round(_WINDOW_SHARE * len(values)))
        sums = np.concatenate([[0.0], np.cumsum(values)])
        ends = np.arange(1, len(values) + 1)
        starts = np.maximum(ends - width, 0)
        return cls(steps, (sums[ends] - sums[starts]) / (ends - starts), std)

    @property
    def last(self) -> float:
        return float(self.values[-1]) if len(self.values) else math.nan

    @property
    def best(self) -> float:
        return float(self.values.max()) if len(self.values) else math.nan

    @property
    def best_step(self) -> int:
        return int(self.steps[self.values.argmax()]) if len(self.values) else 0

    def get_gain_of_last_half(self) -> float:
        """Returns the mean of the last quarter minus that of the quarter before."""
        quarter = len(self.values) // 4
        if not quarter:
            return math.nan
        return float(self.values[-quarter:].mean() - self.values[-2 * quarter : -quarter].mean())


class RunHistory:
    """The iterations of a run, its settings and its curves.

    Args:
        record: of the run; it has iterations.
        is_training: whether a process still trains it.

    Attributes:
        settings: all settings of the algorithm, with plain values.
        policy_ids: of the policies that learned or had returns.
        returns: of training episodes.
        evaluation: the mean returns of evaluations.
        first_returns: of the first episodes, or the first evaluation of recorded experience.
        reads_data: whether it learns only from recorded experience.
        goal: the return that counts as learned; NaN if unknown.
        judged_policy: the policy that `returns` and `first_returns` are of: the only one of
            several that learns, or of opponents that learn the one that gained most. Else "".
        is_self_play: whether there is one, and its returns need not rise when it learns, since its
            opponents learn as well.
        is_training: as given.
    """

    def __init__(self, record: RunRecord, *, is_training: bool) -> None:
        self.record = record
        self.settings, self._policy_facts = _read_settings(record)
        self.steps = record.get_column("env_steps")
        self.policy_ids = _find_policy_ids(record.columns)
        self.reads_data = not needs_environment(self.settings.get("input_", "sampler"))
        std = _median(record.get_column(f"{RECENT_PREFIX}std"))
        self.returns = Curve.smooth(self.steps, record.get_returns(), std)
        std = std if self.reads_data is False else _median(record.get_column(_EVALUATION_STD))
        self.evaluation = Curve.smooth(self.steps, record.get_evaluation_returns(), std)
        self.first_returns = self._get_first_returns()
        self._first_evaluation = self.first_returns
        self.goal = self._get_goal()
        self.judged_policy, self.is_self_play = "", False
        self._judge_by_policy()
        self.is_training = is_training

    @property
    def score(self) -> Curve:
        """The curve that shows learning: evaluations if it learns from recorded experience."""
        return self.evaluation if self.reads_data else self.returns

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])

    @property
    def num_envs(self) -> int:
        envs, workers = (
            to_float(self.settings.get(name)) for name in ("num_envs_per_worker", "num_workers")
        )
        return int(envs * max(1.0, workers)) if math.isfinite(envs * workers) else 1

    def _get_first_returns(self) -> FirstReturns:
        """Returns mean and deviation of the earliest iteration with enough episodes."""
        values = self.record.get_column(f"{RECENT_PREFIX}mean")
        if self.reads_data or not np.isfinite(values).any():
            values = (
                self.record.get_evaluation_returns()
                if self.reads_data
                else (self.record.get_returns())
            )
            finite = values[np.isfinite(values)]
            return FirstReturns(float(finite[0]) if len(finite) else math.nan, 0.0)
        episodes = np.nan_to_num(self.record.get_column(f"{RECENT_PREFIX}episodes"))
        is_enough = np.flatnonzero((episodes >= _MIN_FIRST_EPISODES) & np.isfinite(values))
        row = is_enough[0] if len(is_enough) else np.flatnonzero(np.isfinite(values))[-1]
        stds = self.record.get_column(f"{RECENT_PREFIX}std")[: row + 1 + len(values) // 5]
        # A few episodes hardly show the spread: that of the first fifth of the run counts as well
        std = np.nanmax([0.0, stds[row], _median(stds)])
        return FirstReturns(float(values[row]), float(std))

    def _judge_by_policy(self) -> None:
        """Takes the returns of a policy instead of their sum, if that does not show learning."""
        columns = self.record.columns
        policy_ids = find_policies_with_returns(columns)
        learner_ids = [pid for pid in policy_ids if self.has_learned(pid)]
        is_constant = has_constant_sum(columns)
        is_only_learner = len(learner_ids) == 1 < len(policy_ids) and math.isnan(self.goal)
        if not (is_constant or is_only_learner or _are_opponents(columns, policy_ids)):
            return
        curves = {
            pid: Curve.smooth(self.steps, self.get_column(pid, "return_mean"))
            for pid in learner_ids or policy_ids
        }
        pid = max(curves, key=lambda x: _order(curves[x].last - self._get_first_mean(x)))
        spread = _POLICY_GAIN_SHARE * get_policy_range(columns, pid)
        self.judged_policy, self.returns = pid, curves[pid]
        self.first_returns = FirstReturns(self._get_first_mean(pid), spread)
        self.is_self_play = len(learner_ids) > 1 or len(policy_ids) == 1
        self.goal = math.nan  # it is one of the sum
        first = self.evaluation.values[0] if len(self.evaluation.values) else math.nan
        std = _median(self.record.get_column(_EVALUATION_STD))
        self._first_evaluation = FirstReturns(float(first), 0.0 if math.isnan(std) else std)

    def _get_first_mean(self, policy_id: str) -> float:
        values = self.get_column(policy_id, "return_mean")
        episodes = np.nan_to_num(self.record.get_column("episodes"))
        finite = values[np.isfinite(values) & (episodes >= _MIN_FIRST_EPISODES)]
        return float(finite[0]) if len(finite) else math.nan

    def has_learned(self, policy_id: str) -> bool:
        """Returns whether an iteration updated a policy."""
        prefix = f"{_LEARNER_PREFIX}{policy_id}/"
        return any(
            name.startswith(prefix) and bool(np.isfinite(values).any())
            for name, values in self.record.columns.items()
        )

    def _get_goal(self) -> float:
        """Returns the target of the command, else of tuned settings or the environment."""
        until, env = to_float(self.record.command.get("until")), self.record.env or ""
        if not math.isnan(until) or self.record.config.get("env_config"):
            return until
        tuned, spec = find_tuned(self.record.algorithm, env), gym.registry.get(env)
        thresholds = [tuned.threshold] if tuned is not None else []
        thresholds += [spec.reward_threshold] if spec is not None else []
        return next((float(goal) for goal in thresholds if goal is not None), math.nan)

    # -- how far it has learned ---------------------------------------------------------------

    def has_improved(self) -> bool:
        """Returns whether the last returns exceed the first ones, in training or evaluation."""
        return self.has_improved_in_training() or self._first_evaluation.are_exceeded_by(
            self.evaluation.last
        )

    def has_improved_in_training(self) -> bool:
        """Returns whether the last returns of training exceed the first ones."""
        if self.first_returns.are_below(self._get_equal_return(-1)):
            return True
        return self.first_returns.are_exceeded_by(self.returns.last)

    def has_reached_goal(self) -> bool:
        """Returns whether the last returns are those that count as learned."""
        spread = max(0.05 * abs(self.goal), 0.0 if math.isnan(self.score.std) else self.score.std)
        return max(self.returns.last, self.evaluation.last, key=_order) > self.goal - spread

    def has_forgotten(self) -> bool:
        """Returns whether most of an improvement is lost again."""
        if self.is_self_play:
            return False  # its opponents have improved
        score = self.score
        loss, gain = score.best - score.last, score.best - self.first_returns.mean
        spread = max(self.first_returns.std, 0.0 if math.isnan(score.std) else score.std)
        had_improved = self.first_returns.are_exceeded_by(score.best)
        return had_improved and loss > max(_MAX_FORGOTTEN_SHARE * gain, spread)

    def is_stuck(self) -> bool:
        """Returns whether the run learns nothing, or hardly anything on the way to its goal."""
        if self.has_reached_goal() or (self.reads_data and math.isnan(self.goal)):
            return False  # imitation may be as good as the data from the first evaluation on
        if not self.has_improved():
            return not self.is_self_play
        gain, distance = (
            self.score.best - self.first_returns.mean,
            self.goal - self.first_returns.mean,
        )
        return self.is_flat() and gain < _MIN_GOAL_SHARE * distance

    def may_be_stuck(self) -> bool:
        """Returns whether the returns grew and stopped growing, and no goal says where."""
        return math.isnan(self.goal) and not self.reads_data and self.is_flat()

    def is_short(self) -> bool:
        """Returns whether tuned settings train for many times as many steps."""
        tuned = find_tuned(self.record.algorithm, self.record.env or "")
        return tuned is not None and self.last_step < _SHORT_SHARE * tuned.steps

    def is_flat(self) -> bool:
        """Returns whether the last half of the returns does not rise."""
        gain, total = self.score.get_gain_of_last_half(), self.score.best - self.first_returns.mean
        return not gain > max(0.1 * total, 0.0)

    # -- iterations ---------------------------------------------------------------------------

    def get_run_stats(self, row: int) -> RunStats:
        """Returns the statistics of the run after an iteration, by the index of its row."""
        record = self.record

        def get(name: str) -> float:
            return float(record.get_column(name)[row])

        def get_increase(name: str) -> float:
            return get(name) - (float(record.get_column(name)[row - 1]) if row else 0.0)

        episodes = int(np.nan_to_num(get("episodes")))
        smoothing = to_float(self.settings.get("metrics_num_episodes_for_smoothing", 100))
        lengths = record.get_column("episode_len_mean")[: row + 1]
        several = len(self.policy_ids) > 1
        return RunStats(
            settings=self.settings,
            env_name=record.env or "",
            num_envs=self.num_envs,
            env_steps=int(get("env_steps")),
            steps_sampled=get_increase("env_steps"),
            steps_trained=get_increase("env_steps_trained"),
            has_learned=any(
                name.startswith(_LEARNER_PREFIX) and not math.isnan(values[row])
                for name, values in record.columns.items()
            ),
            episodes_total=episodes,
            window=int(min(episodes, smoothing)),
            equal_return=self._get_equal_return(row),
            length_mean=get("episode_len_mean"),
            length_max=float(np.nanmax(lengths)) if np.isfinite(lengths).any() else math.nan,
            mean=get("episode_reward_mean"),
            recent_mean=float(record.get_returns()[row]),
            first_returns=self.first_returns,
            policy_means={
                pid: get(f"{_POLICY_PREFIX}{pid}/return_mean") for pid in self.policy_ids if several
            },
        )

    def _get_equal_return(self, row: int) -> float:
        """Returns the return of the newest episodes if it is the same for all agents, else NaN."""
        prefixes = ["episode_reward_", *(f"{_POLICY_PREFIX}{x}/return_" for x in self.policy_ids)]
        for prefix in prefixes:
            low, high = (self.record.get_column(f"{prefix}{x}")[row] for x in ("min", "max"))
            if low != high and not (math.isnan(low) and prefix != prefixes[0]):
                return math.nan
        return float(self.record.get_column("episode_reward_min")[row])

    def get_policy_stats(self, row: int, policy_id: str, run: RunStats) -> PolicyStats:
        """Returns the statistics of a policy after an iteration."""
        metrics = self._get_figures(f"{_POLICY_PREFIX}{policy_id}/", row)
        low, high = (metrics.get(f"return_{x}", math.nan) for x in ("min", "max"))
        return PolicyStats(
            policy_id=policy_id,
            stats=self._get_figures(f"{_LEARNER_PREFIX}{policy_id}/", row),
            settings=self.get_policy_settings(policy_id),
            actions=self.get_action_facts(policy_id),
            run=run,
            metrics=metrics,
            equal_return=low if low == high else math.nan,
            window=run.window,
        )

    def _get_figures(self, prefix: str, row: int) -> dict[str, float]:
        return {
            name.removeprefix(prefix): float(values[row])
            for name, values in self.record.columns.items()
            if name.startswith(prefix) and not math.isnan(values[row])
        }

    def get_column(self, policy_id: str, *names: str) -> np.ndarray:
        """Returns the first of some statistics of a policy that the run has; NaNs without one."""
        paths = [f"{prefix}{policy_id}/{name}" for name in names for prefix in _PREFIXES]
        path = next((path for path in paths if path in self.record.columns), paths[0])
        return self.record.get_column(path)

    def get_changed_settings(self) -> Mapping[str, Any]:
        """Returns the settings that differ from the defaults of the algorithm."""
        changes: dict[str, Any] = _simplify(dict(self.record.config))
        return changes

    def get_policy_settings(self, policy_id: str) -> Mapping[str, Any]:
        """Returns the settings of a policy: those of the algorithm, and its own."""
        if policy_id in self._policy_facts:
            return self._policy_facts[policy_id].settings
        policies = self.settings.get("policies")
        spec = policies.get(policy_id) if isinstance(policies, Mapping) else None
        changes = spec[-1] if isinstance(spec, list) and spec else None
        return {**self.settings, **changes} if isinstance(changes, Mapping) else self.settings

    def get_action_facts(self, policy_id: str) -> ActionFacts:
        """Returns the known facts about the actions of a policy."""
        space = self.get_action_space(policy_id)
        return ActionFacts() if space is None else ActionFacts.from_space(space)

    def get_action_space(self, policy_id: str) -> gym.Space[Any] | None:
        """Returns the action space of a policy, from the newest checkpoint; None without one."""
        facts = self._policy_facts.get(policy_id)
        return None if facts is None else facts.action_space

    def get_observation_space(self, policy_id: str) -> gym.Space[Any] | None:
        """Returns the observation space of a policy; None without a checkpoint."""
        facts = self._policy_facts.get(policy_id)
        return None if facts is None else facts.observation_space


class _PolicyFacts(NamedTuple):
    """Facts about a policy, from a checkpoint."""

    settings: Mapping[str, Any]
    observation_space: gym.Space[Any] | None = None
    action_space: gym.Space[Any] | None = None


_PREFIXES = (_LEARNER_PREFIX, _POLICY_PREFIX)


def _find_policy_ids(columns: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    ids = {
        name.removeprefix(prefix).rpartition("/")[0]
        for name in columns
        for prefix in _PREFIXES
        if name.startswith(prefix)
    }
    return tuple(sorted(ids - {""}))


def _order(value: float) -> float:
    """Returns a key by which NaN is the smallest number."""
    return -math.inf if math.isnan(value) else value


def _are_opponents(columns: Mapping[str, np.ndarray], policy_ids: Sequence[str]) -> bool:
    """Returns whether some policies lose in the iterations in which others gain.

    >>> up = np.array([0.0, 2.0, 1.0, 3.0, 2.0, 4.0, 3.0, 5.0, 4.0, 6.0])
    >>> columns = {"policy/a/return_mean": up, "policy/b/return_mean": 1.0 - up}
    >>> _are_opponents(columns, ["a", "b"]), _are_opponents(columns, ["a"])
    (True, False)
    """
    if len(policy_ids) < 2:
        return False
    means = np.array([columns[f"{_POLICY_PREFIX}{pid}/return_mean"] for pid in policy_ids])
    changes = np.diff(means)[:, 1:]
    changes = changes[:, np.isfinite(changes).all(axis=0)]
    if changes.shape[1] < _MIN_CHANGES or (changes.std(axis=1) == 0).any():
        return False
    return bool(np.corrcoef(changes).min() < _OPPONENTS_CORRELATION)


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _read_settings(record: RunRecord) -> tuple[dict[str, Any], dict[str, _PolicyFacts]]:
    """Returns the settings of a run, and facts about its policies by id.

    They are those of the newest checkpoint. A run without one has the settings that it recorded,
    and the defaults of this version; nothing is known of its policies then.
    """
    try:
        return _read_checkpoint(record)
    except (CheckpointError, KeyError, TypeError, AttributeError):
        pass  # there is none, or it is damaged
    defaults: Mapping[str, Any] = {}
    if record.algorithm in get_algorithm_names():
        from tfpolicies.config.description import encode_settings

        default_config = find_algorithm(record.algorithm).get_default_config()
        defaults = encode_settings(default_config.to_dict())
    settings = _simplify(_merge(defaults, record.config))
    settings |= {name: record.config[name] for name in ("policies",) if name in record.config}
    return _simplify(settings), {}


def _read_checkpoint(record: RunRecord) -> tuple[dict[str, Any], dict[str, _PolicyFacts]]:
    latest = record.folder.latest
    manifest = read_manifest(latest, ALGORITHM_MANIFEST, kind="Algorithm")
    policies = {}
    for policy_id, entry in manifest[POLICIES].items():
        part = read_manifest(latest / entry["folder"], entry["manifest"], kind="Policy")
        spaces = (part.get(f"{name}_space") for name in ("observation", "action"))
        policies[policy_id] = _PolicyFacts(
            _simplify(part["config"]["settings"]),
            *(space and decode_space(space) for space in spaces),
        )
    return _simplify(manifest["config"]["settings"]), policies


def _merge(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merges settings; in nested ones, the changes are the keys that differ."""
    merged = dict(defaults)
    for name, value in changes.items():
        old = merged.get(name)
        are_dicts = isinstance(value, dict) and isinstance(old, dict)
        merged[name] = _merge(old, value) if are_dicts and old else value
    return merged


def _simplify(value: Any) -> Any:
    """Decodes numbers that JSON lacks, and tuples; names of objects stay as they are."""
    if isinstance(value, list):
        return [_simplify(x) for x in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$float"}:
        try:
            return float(value["$float"])
        except (TypeError, ValueError):
            return math.nan
    if value.keys() == {"$tuple"}:
        return _simplify(value["$tuple"])
    return {name: _simplify(x) for name, x in value.items()}
