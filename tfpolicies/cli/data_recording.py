"""The command `data record`: plays episodes and writes them as recorded experience."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.batch.leaves import expand_batch_axis, map_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.cli.exit_codes import DONE
from tfpolicies.cli.run_lookup import find_checkpoint, load_tensorflow_with_status, print_files
from tfpolicies.cli.show_policy import make_title, open_recording_source
from tfpolicies.envs.env_factory import EnvContext, check_env_name, make_environments
from tfpolicies.envs.vector_adapters import StepResult, VectorEnvAdapter
from tfpolicies.errors import UsageError
from tfpolicies.models.spaces import action_leaves, batch_leaves, is_float_box, leaves, unflatten
from tfpolicies.offline.json_writer import JsonLinesWriter
from tfpolicies.offline.parquet_files import import_parquet
from tfpolicies.offline.parquet_writer import write_table
from tfpolicies.reporting.progress_display import (
    CommandConsole,
    format_count,
    make_summary_table,
)
from tfpolicies.system.paths import resolve_path

_MAX_ENVS = 16
_PARQUET, _JSON = (".parquet", ".pq"), (".json", ".jsonl")

Act = Callable[[Any, StepResult | None], tuple[Any, Mapping[str, np.ndarray]]]
"""Given observations and the last step, returns the environments' actions, and columns `[N]`."""


def record_data(args: argparse.Namespace) -> int:
    """Plays episodes with a policy, or at random, and writes them into a file."""
    console = CommandConsole()
    target = _find_target(args.to)
    if (args.source is None) != args.random:
        raise UsageError(
            "data record takes either a run or checkpoint, whose policy plays, or --random with "
            "--env NAME."
        )
    if args.random:
        if args.env is None:
            raise UsageError("--random needs --env NAME, the environment to play in.")
        check_env_name(args.env)
        load_tensorflow_with_status(console)
        context = EnvContext(args.env_config or {})
        envs = make_environments(args.env, min(args.episodes, _MAX_ENVS), context)
        title = "Random actions"
        with console.status(f"playing {format_count(args.episodes, 'episode')}"):
            recorder = _play_at_random(envs, args.episodes, args.seed)
    else:
        checkpoint = find_checkpoint(args.source, best=args.best)
        with open_recording_source(args, checkpoint, console) as setup:
            if not setup.is_single_policy:
                raise UsageError(
                    "data record plays with one policy, but there are several policies or agents. "
                    "Record them in Python: config.offline_data(output=FOLDER)."
                )
            title = make_title(setup)
            with console.status(f"playing {format_count(args.episodes, 'episode')}"):
                recorder = _play_with_policy(setup, args.episodes, args.seed)
    columns = recorder.make_columns()
    if target.suffix.lower() in _JSON:
        _write_json_lines(target, columns)
    else:
        write_table(target, columns, (recorder.observation_space, recorder.action_space))
    console.print(make_summary_table(title, _summarize(columns)))
    print_files(console, {"data": target})
    return DONE


def _find_target(path: str) -> Path:
    target = resolve_path(path)
    endings = (*_PARQUET, *_JSON)
    if target.suffix.lower() not in endings or target.is_dir() or not target.parent.is_dir():
        raise UsageError(
            f"--to takes a file that ends in {', '.join(endings)}, in a folder that exists, got "
            f"{path!r}."
        )
    if target.suffix.lower() in _PARQUET:
        import_parquet()
    return target


def _summarize(columns: Mapping[str, Any]) -> dict[str, Any]:
    starts = np.flatnonzero(columns["t"] == 0)
    returns = np.add.reduceat(columns["rewards"].astype(np.float64), starts)
    return {
        "episodes": len(starts),
        "rows": len(columns["t"]),
        "mean return": float(returns.mean()),
        "standard deviation": float(returns.std()),
        "lowest": float(returns.min()),
        "highest": float(returns.max()),
        "mean length": len(columns["t"]) / len(starts),
    }


# -- playing --------------------------------------------------------------------------------------


def _play_with_policy(setup: Any, episodes: int, seed: int) -> _RecordingEnv:
    from tfpolicies.algorithms.episode_playback import get_env_source
    from tfpolicies.policy.recurrent_state import RecurrentState
    from tfpolicies.rollout.connector_env import connect_environments

    policy = setup.player
    env, context = get_env_source(setup)
    num_envs = min(episodes, _MAX_ENVS)
    recorder = _RecordingEnv(make_environments(env, num_envs, context), episodes)
    try:
        envs = connect_environments(recorder, policy, allow_other_spaces=setup.allow_other_spaces)
        recurrent_state = RecurrentState(policy, num_envs)
        space_leaves = leaves(envs.observation_space)
        certain = {"action_logp": np.zeros(num_envs, np.float32)}

        def act(obs: Any, step: StepResult | None) -> tuple[Any, Mapping[str, np.ndarray]]:
            if step is not None and recurrent_state.is_needed:
                ended = step.terminateds | step.truncateds
                recurrent_state.record_step(step.rewards, ended, step.reset_only)
            batch = batch_leaves(space_leaves, obs, "the environment's observation")
            env_actions, columns = recurrent_state.act(batch)
            return env_actions, columns if setup.explore else certain

        return _play(envs, recorder, act, seed)
    finally:
        recorder.close()


def _play_at_random(envs: VectorEnvAdapter, episodes: int, seed: int) -> _RecordingEnv:
    recorder = _RecordingEnv(envs, episodes)
    space = envs.action_space
    space.seed(seed)
    logp = _get_random_logp(space)
    count = envs.num_envs
    columns = {} if logp is None else {"action_logp": np.full(count, logp, np.float32)}

    def act(obs: Any, step: StepResult | None) -> tuple[Any, Mapping[str, np.ndarray]]:
        del obs, step
        samples = [space.sample() for _ in range(count)]
        parts = [
            batch_leaves(action_leaves(space), expand_batch_axis(x), "actions") for x in samples
        ]
        arrays = [np.concatenate(part) for part in zip(*parts, strict=True)]
        return unflatten(space, arrays), columns

    try:
        return _play(recorder, recorder, act, seed)
    finally:
        recorder.close()


def _get_random_logp(space: spaces.Space[Any]) -> float | None:
    """Returns the log-density of uniform actions; None if the space is not bounded."""
    total = 0.0
    for leaf in action_leaves(space):
        part: Any = leaf.space
        if isinstance(part, spaces.Discrete):
            total -= math.log(int(part.n))
        elif isinstance(part, spaces.MultiDiscrete):
            total -= float(np.log(part.nvec).sum())
        elif isinstance(part, spaces.MultiBinary):
            total -= math.log(2.0) * math.prod(part.shape)
        elif is_float_box(part) and part.is_bounded():
            total -= float(np.log(part.high.astype(np.float64) - part.low).sum())
        else:
            return None
    return total if math.isfinite(total) else None


def _play(envs: VectorEnvAdapter, recorder: _RecordingEnv, act: Act, seed: int) -> _RecordingEnv:
    """Plays until each environment has played its share of the episodes."""
    obs, step = envs.reset([seed + i for i in range(envs.num_envs)]), None
    while not recorder.is_complete:
        env_actions, columns = act(obs, step)
        recorder.set_policy_columns(columns)
        step = envs.step(env_actions)
        obs = step.obs
    return recorder


class _RecordingEnv(VectorEnvAdapter):
    """Records the steps of environments, without connectors.

    Each environment records a fixed share of the episodes, as evaluations play them: the episodes
    that end first would favour short ones.

    Args:
        envs: the environments; closed with this object.
        episodes: how many to record.
    """

    def __init__(self, envs: VectorEnvAdapter, episodes: int) -> None:
        self._envs = envs
        self.num_envs = envs.num_envs
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self._obs_leaves = leaves(envs.observation_space)
        self._action_leaves = action_leaves(envs.action_space)
        self._shares = (episodes + self.num_envs - 1 - np.arange(self.num_envs)) // self.num_envs
        self._ended = np.zeros(self.num_envs, np.int64)
        self._obs: list[np.ndarray] = []
        self._policy_columns: dict[str, np.ndarray] = {}
        self._steps: list[dict[str, Any]] = []

    @property
    def is_complete(self) -> bool:
        return bool((self._ended >= self._shares).all())

    def set_policy_columns(self, columns: Mapping[str, np.ndarray]) -> None:
        """Sets the log-likelihoods of the next actions, if the columns have them."""
        self._policy_columns = {}
        if "action_logp" in columns:
            logp = np.array(columns["action_logp"], np.float32)
            self._policy_columns = {"action_logp": logp, "action_prob": np.exp(logp)}

    def reset(self, seeds: Sequence[int] | None) -> Any:
        obs = self._envs.reset(seeds)
        self._obs = self._copy_observations(obs)
        return obs

    def step(self, actions: Any) -> StepResult:
        action_arrays = batch_leaves(self._action_leaves, actions, "actions")
        actions_before = [np.array(x) for x in action_arrays]
        step = self._envs.step(actions)
        obs = self._copy_observations(step.obs)
        next_obs = [leaf.copy() for leaf in obs]
        if step.final_obs is not None:
            indices, final = step.final_obs
            for leaf, rows in zip(next_obs, self._copy_observations(final), strict=True):
                leaf[indices] = rows
        is_step = np.ones(self.num_envs, bool) if step.reset_only is None else ~step.reset_only
        is_recorded = is_step & (self._ended < self._shares)
        self._steps.append(
            {
                "obs": self._obs,
                "new_obs": next_obs,
                "actions": actions_before,
                "rewards": np.array(step.rewards, np.float32),
                "terminateds": np.array(step.terminateds, bool),
                "truncateds": np.array(step.truncateds, bool),
                "recorded": is_recorded,
                **self._policy_columns,
            }
        )
        self._ended += is_step & (step.terminateds | step.truncateds)
        self._obs = obs
        return step

    def get_sub_environments(self) -> list[Any]:
        return self._envs.get_sub_environments()

    def close(self) -> None:
        self._envs.close()

    def make_columns(self) -> dict[str, Any]:
        """Returns the recorded rows, episode after episode."""
        recorded = np.stack([step["recorded"] for step in self._steps], axis=1)  # [N, T]

        def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack(arrays, axis=1)[recorded]

        def join_leaves(name: str) -> list[np.ndarray]:
            parts = zip(*(step[name] for step in self._steps), strict=True)
            return [join(list(part)) for part in parts]

        flat = [x for x in self._steps[0] if x not in ("obs", "new_obs", "actions", "recorded")]
        columns = {name: join([step[name] for step in self._steps]) for name in flat}
        ended = columns["terminateds"] | columns["truncateds"]
        starts = np.append(True, ended[:-1])
        ids = np.cumsum(starts) - 1
        first_rows = np.flatnonzero(starts)
        return {
            "obs": unflatten(self.observation_space, join_leaves("obs")),
            "actions": unflatten(self.action_space, join_leaves("actions")),
            **columns,
            "new_obs": unflatten(self.observation_space, join_leaves("new_obs")),
            "eps_id": ids,
            "t": np.arange(len(ids)) - first_rows[ids],
        }

    def _copy_observations(self, obs: Any) -> list[np.ndarray]:
        arrays = batch_leaves(self._obs_leaves, obs, "the environment's observation")
        return [np.array(x) for x in arrays]


def _write_json_lines(target: Path, columns: dict[str, Any]) -> None:
    """Writes one line for each episode; the file appears complete, or not at all."""
    starts = np.flatnonzero(columns["t"] == 0).tolist()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".recording-") as folder:
        writer = JsonLinesWriter(folder, max_file_size=1 << 62)
        for start, stop in zip(starts, [*starts[1:], len(columns["t"])], strict=True):
            writer.write(SampleBatch(map_leaves(itemgetter(slice(start, stop)), columns)))
        writer.close()
        (file,) = Path(folder).iterdir()
        os.replace(file, target)
