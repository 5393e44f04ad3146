"""The options of a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of a search.

    Attributes:
        trials: how many there are, with trial 0.
        seeds: runs of each trial.
        steps: environment steps of each run.
        seed: of the sampler and of each trial's first run; the others have the next numbers.
        jobs: processes that train at the same time.
        until: mean return at which the search ends; None: none.
        eval_episodes: greedy episodes of each evaluation.
        num_evaluations: of each run, evenly spread; the last one is the result of the run.
    """

    trials: int = 30
    seeds: int = 1
    steps: int = 100_000
    seed: int = 0
    jobs: int = 1
    until: float | None = None
    eval_episodes: int = 10
    num_evaluations: int = 10
