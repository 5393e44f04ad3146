"""Run folders with hand-made iterations."""

import math

import numpy as np

from tfpolicies.reporting.progress_csv import ProgressCsv
from tfpolicies.reporting.progress_row import FIXED_COLUMNS
from tfpolicies.reporting.run_folder import RunFolder

NUM_ROWS = 40
STEPS = 1000
"""Environment steps of an iteration."""

SOUND_PPO = {
    "kl": 0.01,
    "cur_kl_coeff": 0.2,
    "cur_lr": 1e-3,
    "entropy": 0.5,
    "entropy_coeff": 0.0,
    "policy_loss": -0.01,
    "vf_loss": 10.0,
    "vf_explained_var": 0.6,
    "vf_clipped": 0.0,
}
SOUND_DQN = {"cur_lr": 1e-3, "mean_q": 10.0, "max_q": 20.0, "min_q": 0.0, "mean_td_error": 0.1}


def make_run(
    path,
    config=None,
    columns=None,
    *,
    algorithm="PPO",
    env="Unknown-v0",
    returns=20.0,
    std=3.0,
    length=20.0,
    policies=("default_policy",),
    learner=None,
    has_checkpoint=True,
    command=None,
    rows=NUM_ROWS,
):
    """Writes a run folder whose returns do not grow; returns its path.

    Args:
        path: of the folder.
        config: settings that differ from the defaults.
        columns: further columns; a number or one per row.
        algorithm: its name.
        env: the environment.
        returns: mean returns of the rows.
        std: of the returns of recent episodes.
        length: of episodes.
        policies: ids of the policies that learn.
        learner: statistics that differ from those of a sound policy.
        has_checkpoint: whether there is one, which cannot be read.
        command: the options of `tfpolicies train`.
        rows: how many iterations.
    """
    settings = {"learn": algorithm} if command is None else {"train": command}
    run = RunFolder.create_at(path, settings)
    facts = {"algorithm": algorithm, "env": env, "seed": 0, "config": config or {}}
    run.describe(facts, {"tfpolicies": "1"}, {"cores": 1})
    sound = SOUND_DQN if algorithm in ("DQN", "SAC", "TD3") else SOUND_PPO
    all_columns = {
        f"learner/{policy_id}/{name}": value
        for policy_id in policies
        for name, value in {**sound, **(learner or {})}.items()
        if value is not None
    }
    all_columns |= {"recent_returns/episodes": 30, "recent_returns/std": std, **(columns or {})}
    means = np.broadcast_to(np.asarray(returns, float), rows)
    csv = ProgressCsv(run.progress_csv)
    for i in range(rows):
        steps = (i + 1) * STEPS
        fixed = {**dict.fromkeys(FIXED_COLUMNS, math.nan), "iteration": i + 1, "env_steps": steps}
        fixed |= {"episode_reward_mean": means[i], "episode_len_mean": length}
        fixed |= {"episode_reward_min": means[i] - 10, "episode_reward_max": means[i] + 10}
        fixed |= {"episodes": int(steps / length), "recent_returns/mean": means[i]}
        row = fixed | {
            name: float(np.broadcast_to(np.asarray(value, float), rows)[i])
            for name, value in all_columns.items()
        }
        row["episodes"] = int(row["episodes"])
        csv.append(row)
    if has_checkpoint:
        run.latest.mkdir(parents=True)
        (run.latest / "algorithm.json").write_text("{}")
    run.release()
    return run.path
