"""Run folders with hand-made numbers."""

import csv
import math

from tfpolicies.reporting.progress_row import EVALUATION_MEAN, FIXED_COLUMNS
from tfpolicies.reporting.run_folder import RunFolder

VERSIONS = {"tfpolicies": "0.1.0", "tensorflow": "2.21.0"}
MACHINE = {"processor": "Some CPU", "cores": 4}


def write_run(
    path,
    returns,
    *,
    steps=None,
    evaluations=None,
    columns=None,
    algorithm="PPO",
    env="CartPole-v1",
    seed=0,
    config=None,
    ended_by="steps",
    error=None,
    versions=VERSIONS,
):
    """Writes a run with one row for each return, 100 steps and 2 seconds apart; returns it."""
    run = RunFolder.create_at(path, {"learn": algorithm, "finished": ended_by})
    facts = {"algorithm": algorithm, "env": env, "seed": seed, "config": config or {}}
    run.describe(facts, versions, MACHINE)
    rows = []
    for i, mean in enumerate(returns):
        row = dict.fromkeys(FIXED_COLUMNS, 1)
        row |= {
            "iteration": i + 1,
            "env_steps": 100 * (i + 1) if steps is None else steps[i],
            "time_s": 2.0 * (i + 1),
            "episode_reward_mean": mean,
            "recent_returns/mean": mean,
            **{name: values[i] for name, values in (columns or {}).items()},
        }
        if evaluations is not None and evaluations[i] is not None:
            row[EVALUATION_MEAN] = evaluations[i]
        rows.append({name: x for name, x in row.items() if not math.isnan(x)})
    names = [*FIXED_COLUMNS, *sorted({name for row in rows for name in row} - {*FIXED_COLUMNS})]
    with run.progress_csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if error is not None:
        run.error_txt.write_text(error)
    run.release()
    return run
