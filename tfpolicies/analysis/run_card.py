"""Facts of the policy of a run, read from its folder, for the model cards of exports."""

from __future__ import annotations

import math

import numpy as np

from tfpolicies.analysis.run_record import RunRecord
from tfpolicies.export.model_card import ModelCard, ReturnFigure
from tfpolicies.reporting.progress_row import RECENT_PREFIX

_DEFAULT_INPUT = "sampler"


def make_run_card(run: RunRecord, iteration: int | None = None) -> ModelCard:
    """Returns the facts of the policy of a run after an iteration.

    Args:
        run: the run.
        iteration: of the exported checkpoint; None for the last one.
    """
    iterations = run.get_column("iteration")
    rows = len(iterations) if iteration is None else int(np.sum(iterations <= iteration))
    is_interactive = run.config.get("input_", _DEFAULT_INPUT) == _DEFAULT_INPUT
    return ModelCard(
        algorithm=run.algorithm or None,
        environment=None if run.env is None or "<" in run.env else run.env,
        seed=run.seed,
        env_steps=_get_last(run, "env_steps", rows) if is_interactive else None,
        training=_make_training_figure(run, rows),
        evaluation=_make_evaluation_figure(run, rows),
        commit=run.commit,
        versions=dict(run.places[-1]["versions"]) if run.places else None,
        settings=run.config or None,
    )


def _get_last(run: RunRecord, column: str, rows: int) -> int | None:
    values = run.get_column(column)[:rows]
    return int(values[-1]) if len(values) and not math.isnan(values[-1]) else None


def _make_training_figure(run: RunRecord, rows: int) -> ReturnFigure | None:
    returns = run.get_returns()[:rows]
    if not len(returns) or math.isnan(returns[-1]):
        return None
    episodes = _get_last(run, f"{RECENT_PREFIX}episodes", rows)
    return ReturnFigure(mean_return=float(returns[-1]), episodes=episodes)


def _make_evaluation_figure(run: RunRecord, rows: int) -> ReturnFigure | None:
    """Returns the evaluation of that iteration; an older one is not of these weights."""
    returns = run.get_evaluation_returns()[:rows]
    if not len(returns) or math.isnan(returns[-1]):
        return None
    changes = run.config.get("evaluation_config")
    explores = changes.get("explore", False) if isinstance(changes, dict) else False
    return ReturnFigure(mean_return=float(returns[-1]), explores=bool(explores))
