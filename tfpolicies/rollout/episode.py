"""Episodes for callbacks and mapping functions, and the metrics of finished episodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.base.extensions import EXTENSIONS, Extensible
from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.leaves import map_leaves
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.envs.vector_adapters import StepResult
from tfpolicies.errors import UsageError

SINGLE_AGENT = "agent0"

RunCallback = Callable[[str, Any, int], None]
Infos = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A list of infos, or a vector environment's dict of columns."""

_EMPTY: Mapping[Any, Any] = {}


@dataclass
class Episode(Extensible):
    """One episode of one environment.

    Attributes:
        episode_id: a random integer below 10^18.
        env_index: the index of the environment in its worker.
        worker: the worker that samples.
        length: environment steps so far.
        total_reward: sum of the rewards so far.
        custom_metrics: the user's numbers, reported when the episode ends.
        user_data: any data of the user, not reported.
        hist_data: lists of numbers, reported unchanged.
        media: any data, reported unchanged.
        last_infos: the last info of each agent that had one, by agent id.
    """

    episode_id: int
    env_index: int
    worker: Any
    length: int = 0
    total_reward: float = 0.0
    custom_metrics: dict[str, float] = field(default_factory=dict)
    user_data: dict[str, Any] = field(default_factory=dict)
    hist_data: dict[str, list[float]] = field(default_factory=dict)
    media: dict[str, Any] = field(default_factory=dict)
    last_infos: dict[Any, Mapping[str, Any]] = field(default_factory=dict)
    _last_obs: dict[Any, Any] = field(default_factory=dict)
    _last_actions: dict[Any, Any] = field(default_factory=dict)
    _last_rewards: dict[Any, float] = field(default_factory=dict)
    _prev_actions: dict[Any, Any] = field(default_factory=dict)
    _prev_rewards: dict[Any, float] = field(default_factory=dict)
    _terminateds: dict[Any, bool] = field(default_factory=dict)
    _truncateds: dict[Any, bool] = field(default_factory=dict)
    _acted: dict[Any, tuple[Mapping[str, np.ndarray], int]] = field(default_factory=dict)

    @property
    def agent_rewards(self) -> dict[tuple[Any, str], float]:
        """The sum of rewards by agent and policy."""
        return {(SINGLE_AGENT, DEFAULT_POLICY_ID): self.total_reward}

    def policy_for(self, agent_id: Hashable = SINGLE_AGENT) -> str:
        """Returns the id of the policy that acts for an agent."""
        del agent_id
        return DEFAULT_POLICY_ID

    def get_agents(self) -> list[Any]:
        """Returns the ids of the agents that have appeared so far."""
        return [SINGLE_AGENT]

    def last_info_for(self, agent_id: Hashable = SINGLE_AGENT) -> Mapping[str, Any]:
        """Returns the last info of an agent, `{}` if it had none."""
        return self.last_infos.get(agent_id, {})

    def last_observation_for(self, agent_id: Hashable = SINGLE_AGENT) -> Any:
        """Returns the last observation of an agent, before filters; None if it had none yet.

        At an episode's start a vector environment may not have returned it. With several agents, it
        is the result of `observation_fn`.
        """
        return self._last_obs.get(agent_id)

    def last_raw_obs_for(self, agent_id: Hashable = SINGLE_AGENT) -> Any:
        """Returns `last_observation_for`: observations are encoded in the policy."""
        return self.last_observation_for(agent_id)

    def last_action_for(self, agent_id: Hashable = SINGLE_AGENT) -> Any:
        """Returns an agent's last action as sent to the environment; None before the first."""
        return self._last_actions.get(agent_id)

    def last_reward_for(self, agent_id: Hashable = SINGLE_AGENT) -> float:
        """Returns the last reward of an agent from the environment; 0 before the first."""
        return float(self._last_rewards.get(agent_id, 0.0))

    def record_step(
        self,
        obs: Mapping[Any, Any],
        actions: Mapping[Any, Any] = _EMPTY,
        rewards: Mapping[Any, float] = _EMPTY,
        terminateds: Mapping[Any, bool] = _EMPTY,
        truncateds: Mapping[Any, bool] = _EMPTY,
    ) -> None:
        """Records the last observations, actions, rewards and end flags by agent id."""
        if EXTENSIONS.records_steps:
            _shift_to_previous(self._last_actions, self._prev_actions, actions)
            _shift_to_previous(self._last_rewards, self._prev_rewards, rewards)
            self._terminateds.update(terminateds)
            self._truncateds.update(truncateds)
        self._last_obs.update(obs)
        self._last_actions.update(actions)
        self._last_rewards.update(rewards)

    def record_acting(
        self, agents: Sequence[Any], columns: Mapping[str, np.ndarray], first: int
    ) -> None:
        """Records the outputs of acting of agents: the rows of `columns` from `first`.

        Args:
            agents: their ids.
            columns: the outputs of acting, from `copy_columns`.
            first: the row of the first agent.
        """
        self._acted.update({agent: (columns, row) for row, agent in enumerate(agents, first)})


def _shift_to_previous(
    last: dict[Any, Any], previous: dict[Any, Any], new: Mapping[Any, Any]
) -> None:
    """Copies the last values to `previous` for the agents that get new ones."""
    previous.update({agent: last[agent] for agent in new if agent in last})


class RolloutMetrics(NamedTuple):
    """The metrics of one finished episode.

    `connector_metrics` has the results of `Policy.get_connector_metrics`, mean times so far, by
    policy id, for the policies with connectors that acted in it.
    """

    episode_length: int = 0
    episode_reward: float = 0.0
    agent_rewards: Mapping[tuple[Any, str], float] = {}
    custom_metrics: Mapping[str, float] = {}
    perf_stats: Mapping[str, float] = {}
    hist_data: Mapping[str, list[float]] = {}
    media: Mapping[str, Any] = {}
    episode_faulty: bool = False
    connector_metrics: Mapping[str, Mapping[str, Mapping[str, float]]] = {}


class EpisodeTracker:
    """Maintains an `Episode` for each environment and calls the callbacks about episodes.

    It works row by row, so it is used only if a callback about single episodes is overridden, or a
    policy reads the episodes that it acts in.

    Args:
        run_callback: `f(callback_name, episode_or_error, env_index)`, calls a callback about an
            episode or the error that ended it.
        worker: the worker that samples.
        num_envs: N.
        rng: draws episode ids.
    """

    def __init__(
        self, run_callback: RunCallback, worker: object, num_envs: int, rng: np.random.Generator
    ) -> None:
        self._run_callback = run_callback
        self._worker = worker
        self._rng = rng
        self._episodes: list[Episode] = []
        self._finished: list[list[Episode]] = [[] for _ in range(num_envs)]

    def start_all(self, obs: Structure) -> None:
        """Starts a new episode in each environment; `obs` are their first observations."""
        self._finished = [[] for _ in self._finished]
        self._episodes = [self._start_episode(i, obs) for i in range(len(self._finished))]

    def _start_episode(self, index: int, obs: Structure | None = None) -> Episode:
        episode = Episode(int(self._rng.integers(10**18)), index, self._worker)
        self._run_callback("on_episode_created", episode, index)
        if obs is not None:
            episode.record_step({SINGLE_AGENT: _copy_row(obs, index)})
        self._run_callback("on_episode_start", episode, index)
        return episode

    def step(self, step: StepResult, actions: Structure, columns: Mapping[str, np.ndarray]) -> None:
        """Records one step of all environments, with actions and outputs of acting `[N, ...]`."""
        acting_columns = copy_columns(columns)
        indices, final_obs = step.final_obs or ((), ())
        final_rows = {int(index): k for k, index in enumerate(indices)}
        for i, episode in enumerate(self._episodes):
            if step.reset_only is not None and step.reset_only[i]:
                episode.record_step({SINGLE_AGENT: _copy_row(step.obs, i)})
                continue
            next_obs = (
                _copy_row(final_obs, final_rows[i]) if i in final_rows else _copy_row(step.obs, i)
            )
            reward = float(step.rewards[i])
            ends = step.terminateds[i], step.truncateds[i]
            values = [next_obs, _copy_row(actions, i), reward]
            if acting_columns:
                values += ends
                episode.record_acting((SINGLE_AGENT,), acting_columns, i)
            episode.record_step(*[{SINGLE_AGENT: value} for value in values])
            episode.length += 1
            episode.total_reward += reward
            episode.last_infos[SINGLE_AGENT] = get_last_info(step.infos, i)
            self._run_callback("on_episode_step", episode, i)
            if any(ends):
                self._run_callback("on_episode_end", episode, i)
                self._finished[i].append(episode)
                self._episodes[i] = self._start_episode(i, step.obs if i in final_rows else None)

    def get_context(self, rows: Iterable[int] | None = None) -> dict[str, Any]:
        """Returns the running episodes and their last infos, as inputs of acting.

        Args:
            rows: indices of environments; None for all.
        """
        episodes = self._episodes if rows is None else [self._episodes[i] for i in rows]
        return {
            "infos": [episode.last_info_for() for episode in episodes],
            "episodes": list(episodes),
        }

    def on_env_failure(self, env_index: int, error: Exception) -> None:
        """Ends the episode of an environment that failed: `on_episode_end` gets the error."""
        self._run_callback("on_episode_end", error, env_index)
        self._episodes[env_index] = self._start_episode(env_index)

    def pop_finished(self, env_index: int) -> Episode:
        return self._finished[env_index].pop(0)

    def oldest(self, env_index: int) -> Episode:
        return (self._finished[env_index] or self._episodes[env_index : env_index + 1])[0]


def copy_columns(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies the outputs of acting; returns `{}` if no extension records them."""
    return {name: x.copy() for name, x in columns.items()} if EXTENSIONS.records_steps else {}


def add_callback_metrics(metrics: RolloutMetrics, episode: Episode) -> RolloutMetrics:
    """Adds the custom metrics, `hist_data` and media of an episode to its metrics."""
    custom, lists = episode.custom_metrics, episode.hist_data
    for name, value in custom.items():
        if not _is_real(value):
            raise UsageError(
                f"episode.custom_metrics[{name!r}] must be a number, got {value!r:.60}. Use "
                "`episode.hist_data` for lists of numbers, and `episode.media` for other data."
            )
    for name, values in lists.items():
        is_list = isinstance(values, Iterable) and getattr(values, "ndim", 1) == 1
        if not (is_list and all(map(_is_real, values))):
            raise UsageError(
                f"episode.hist_data[{name!r}] must be a list of numbers, got {values!r:.60}."
            )
    return metrics._replace(custom_metrics=custom, hist_data=lists, media=episode.media)


def _is_real(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str | bytes)


def _copy_row(batch: Structure, index: int) -> Any:
    """Copies one row, nested like the batch."""
    return map_leaves(lambda leaf: np.asarray(leaf)[index].copy(), batch)


def get_last_info(infos: Infos, index: int) -> Mapping[str, Any]:
    """Returns the info of an environment's step, not of the reset that may have followed it."""
    info = _get_info(infos, index)
    last: Mapping[str, Any] = info.get("final_info", info)
    return last


def find_excluded(infos: Infos, count: int) -> list[int]:
    """Returns the indices of environments whose info excludes the trajectory from learning.

    Such an info has a false `training_enabled`.
    """
    if isinstance(infos, Mapping):
        if not infos.keys() & {"training_enabled", "final_info"}:
            return []
        infos = [_get_info(infos, i) for i in range(count)]
    last_infos = (info.get("final_info", info) for info in infos)
    return [i for i, info in enumerate(last_infos) if not info.get("training_enabled", True)]


def _get_info(infos: Infos, index: int) -> Mapping[str, Any]:
    """Returns the info of one environment, from a list or from a vector environment's dict."""
    if isinstance(infos, Sequence):
        return infos[index]
    info: dict[str, Any] = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        is_mask = key.startswith("_") and key[1:] in infos
        if is_mask or (mask is not None and not mask[index]):
            continue
        if isinstance(values, Mapping):
            info[key] = _get_info(values, index)
        elif isinstance(values, np.ndarray) and values.ndim and index < len(values):
            info[key] = values[index]
    return info
