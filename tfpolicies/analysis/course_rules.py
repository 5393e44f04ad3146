"""Rules about the course of a run: its end, its length, evaluations and forgetting."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from tfpolicies.algorithms.health_checks import describe_too_short
from tfpolicies.algorithms.health_rules import LEARNING_START, Finding
from tfpolicies.algorithms.health_stats import to_float
from tfpolicies.algorithms.tuned_hyperparameters import find_tuned
from tfpolicies.analysis.history_rule import HistoryRule, Located, divide
from tfpolicies.analysis.run_history import RunHistory
from tfpolicies.analysis.usual_settings import find_differences
from tfpolicies.reporting.progress_display import format_count

_CLOCK_SECONDS = 1.0  # by which the times of files may differ
_MAX_ERROR_LENGTH = 300  # characters of an error
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b", re.MULTILINE)
_MAX_START_SHARE = 0.5  # share of a run that may pass before learning starts
_MIN_ITERATIONS = 10  # iterations of an on-policy algorithm, each of which changes little
_MAX_GAP_SHARE = 0.5  # of the improvement, by which evaluations may differ from training


def find_error(history: RunHistory) -> Iterator[Located]:
    if (error := get_last_error(history)) and "NonFiniteError" not in error:
        yield Located(
            Finding(
                evidence=f"The training ended with an error: {error}",
                advice=f"{history.record.folder.error_txt.name} in the run folder has the "
                "traceback. Resume the run when the error is fixed.",
            )
        )


def find_non_finite_error(history: RunHistory) -> Iterator[Located]:
    """Finds an update that gave NaN or infinity, which other rules may explain."""
    if "NonFiniteError" in (error := get_last_error(history)):
        yield Located(
            Finding(
                evidence=f"The training ended since an update was not finite: {error}",
                advice="Lower lr, set grad_clip=0.5, and look for large or non-finite rewards and "
                "observations.",
                settings={"lr": history.settings.get("lr")},
            )
        )


def get_last_error(history: RunHistory) -> str:
    """Returns the message of the error that ended a run; "" if it was resumed since."""
    folder, error = history.record.folder, history.record.error
    is_newest = folder.error_txt.exists() and (
        folder.error_txt.stat().st_mtime >= folder.progress_csv.stat().st_mtime - _CLOCK_SECONDS
    )
    if not error or history.record.ended_by or not is_newest:
        return ""
    return get_error_message(error)


def get_error_message(traceback: str) -> str:
    r"""Returns the class and the message of the last exception of a traceback, in one line.

    >>> get_error_message("Traceback ...\n  line\nmine.MyError: too\nlong\n")
    'mine.MyError: too long'
    """
    starts = [match.start() for match in _EXCEPTION.finditer(traceback)]
    return " ".join(traceback[starts[-1] if starts else 0 :].split())[:_MAX_ERROR_LENGTH]


def find_non_finite(history: RunHistory) -> Iterator[Located]:
    """Finds losses that are not finite, in a run with on_nan="warn"."""
    for policy_id in history.policy_ids:
        has_learned = np.isfinite(history.get_column(policy_id, "cur_lr", "cur_actor_lr"))
        loss = history.get_column(policy_id, "total_loss", "critic_loss", "policy_loss", "mean_q")
        is_bad = has_learned & ~np.isfinite(loss)
        if is_bad.any() and not is_bad.all():
            iteration = int(history.record.get_column("iteration")[is_bad.argmax()])
            yield Located(
                Finding(
                    evidence=f"The loss is not finite from iteration {iteration} on.",
                    advice="Lower lr or set grad_clip=0.5, and look for large or non-finite "
                    "rewards and observations; on_nan='raise' ends the training there.",
                    settings={"on_nan": history.settings.get("on_nan")},
                ),
                policy_id,
            )


def find_no_checkpoint(history: RunHistory) -> Iterator[Located]:
    record = history.record
    has_ended = record.folder.has_checkpoint or history.is_training or get_last_error(history)
    if has_ended:
        return
    every = record.command.get("checkpoint_every", 20)
    yield Located(
        Finding(
            evidence=f"The run ended after {format_count(record.num_iterations, 'iteration')}, "
            "before its first checkpoint, so it cannot be resumed: it was killed, or its script "
            "failed.",
            advice=f"Save earlier: a checkpoint is written every {every} iterations and at the "
            "end (--checkpoint-every, learn(checkpoint_every=...)).",
            figures={"iteration": record.num_iterations},
        )
    )


def find_killed(history: RunHistory) -> Iterator[Located]:
    """Finds a run of the command that did not come to its last step."""
    record, steps = history.record, to_float(history.record.command.get("steps"))
    if record.ended_by or history.is_training or not history.last_step < 0.95 * steps:
        return
    yield Located(
        Finding(
            evidence=f"The run was ended after {history.last_step:,} of {steps:,.0f} steps.",
            advice="Resume it with tfpolicies train --resume.",
            figures={"env_steps": history.last_step},
        )
    )


def find_no_episode(history: RunHistory) -> Iterator[Located]:
    if history.reads_data or np.nan_to_num(history.record.get_column("episodes"))[-1]:
        return
    steps = history.last_step // max(1, history.num_envs)
    yield Located(
        Finding(
            evidence=f"No episode has ended in {steps:,} steps of each environment, so there are "
            "no returns.",
            advice="If episodes never end, give the environment a time limit: "
            "gymnasium.wrappers.TimeLimit(env, max_episode_steps=1000). If they are longer than "
            "that, train for more steps.",
            figures={"episodes": 0, "env_steps": history.last_step},
        )
    )


def find_no_learning_yet(history: RunHistory) -> Iterator[Located]:
    steps = history.last_step
    if history.policy_ids and any(history.has_learned(x) for x in history.policy_ids):
        return
    reason = describe_too_short(history.settings, steps)
    if reason is not None:
        evidence, _, advice = reason.partition(". ")
        yield Located(
            Finding(
                evidence=f"No update was done: {evidence}.",
                advice=advice,
                figures={"env_steps": steps},
                settings={LEARNING_START: history.settings.get(LEARNING_START)},
            )
        )


def find_late_learning(history: RunHistory) -> Iterator[Located]:
    start = to_float(history.settings.get(LEARNING_START))
    is_late = _MAX_START_SHARE * history.last_step < start < history.last_step
    if is_late and not history.is_training:
        yield Located(
            Finding(
                evidence=f"Learning started after {start:,.0f} of {history.last_step:,} steps.",
                advice=f"Train for more steps, or lower {LEARNING_START}.",
                figures={"env_steps": history.last_step},
                settings={LEARNING_START: start},
            )
        )


def find_short_run(history: RunHistory) -> Iterator[Located]:
    tuned = find_tuned(history.record.algorithm, history.record.env or "")
    is_early = history.is_short() and not history.has_forgotten()
    if tuned is not None and is_early and not history.reads_data:
        yield Located(
            Finding(
                evidence=f"The run has {history.last_step:,} steps; tuned settings for this "
                f"environment train for {tuned.steps:,}. Learning has only just begun.",
                advice="Train for more steps (--steps, or resume the run with --resume).",
                figures={"env_steps": history.last_step},
            )
        )


def find_few_iterations(history: RunHistory) -> Iterator[Located]:
    rows = history.record.num_iterations
    batch_size = to_float(history.settings.get("train_batch_size"))
    is_on_policy = "num_sgd_iter" in history.settings or "lambda" in history.settings
    if history.reads_data or not is_on_policy or LEARNING_START in history.settings:
        return
    if history.is_training or not history.record.folder.has_checkpoint:
        return  # it is not meant to be that short
    updates = divide(history.last_step, batch_size)
    if updates < _MIN_ITERATIONS:
        yield Located(
            Finding(
                evidence=f"With train_batch_size={batch_size:,.0f} the {history.last_step:,} steps "
                f"of the run make only {max(1, round(updates))} iterations, and each one changes "
                "the policy a little.",
                advice="Lower train_batch_size, or train for more steps.",
                figures={"iteration": rows, "env_steps": history.last_step},
                settings={"train_batch_size": batch_size},
            )
        )


def find_differences_from_tuned(history: RunHistory) -> Iterator[Located]:
    tuned = find_tuned(history.record.algorithm, history.record.env or "")
    if tuned is None:
        return
    differences = [*find_differences(history.settings, tuned.settings).items()][:4]
    if not differences:
        return
    text = ", ".join(f"{name}={value:g} (tuned: {other:g})" for name, (value, other) in differences)
    yield Located(
        Finding(
            evidence=f"Settings differ from those that are known to learn in this environment: "
            f"{text}.",
            advice=f"Start from {history.record.algorithm}Config.from_tuned("
            f"{history.record.env!r}), and change one setting at a time.",
            settings={name: value for name, (value, _) in differences},
        )
    )


def find_no_progress(history: RunHistory) -> Iterator[Located]:
    score, first = history.score, history.first_returns
    if math.isnan(score.last):
        return
    change = "has grown little" if history.has_improved() else "has not grown"
    goal = "" if math.isnan(history.goal) else f"; {history.goal:.4g} counts as learned"
    yield Located(
        Finding(
            evidence=f"The mean return {change}: it was {first.mean:.4g} at first, "
            f"{score.best:.4g} at best and is {score.last:.4g} now{goal}.",
            advice="The columns show no cause. Check that observations contain what decisions "
            "need, with numbers near 1, and that rewards say what you want: play an episode and "
            "print both.",
            figures={"first_return": first.mean, "last_return": score.last},
        ),
        history.judged_policy,
    )


def find_evaluation_gap(history: RunHistory) -> Iterator[Located]:
    training, evaluation = history.returns, history.evaluation
    if history.reads_data or not len(evaluation.values) or not len(training.values):
        return
    if history.judged_policy:
        return  # evaluations have the sum
    gain = training.last - history.first_returns.mean
    std = 0.0 if math.isnan(training.std) else training.std
    gap = training.last - evaluation.last
    if not (history.has_improved_in_training() and gap > max(_MAX_GAP_SHARE * gain, 2 * std)):
        return
    changes = history.settings.get("evaluation_config")
    changes = changes if isinstance(changes, Mapping) else {}
    own_env = history.settings.get("env_config")
    figures = {
        "recent_returns/mean": training.last,
        "evaluation/episode_reward_mean": evaluation.last,
    }
    evidence = (
        f"Evaluations have a mean return of {evaluation.last:.4g}, training episodes of "
        f"{training.last:.4g}"
    )
    if "env" in changes or changes.get("env_config", own_env) != own_env:
        name = "env" if "env" in changes else "env_config"
        yield Located(
            Finding(
                evidence=f"{evidence}: evaluation_config sets another environment "
                f"({name}={changes[name]}, training has {history.settings.get(name)}).",
                advice=f"Evaluate in the environment of training: leave {name} out of "
                "evaluation_config.",
                figures=figures,
                settings={f"evaluation_config.{name}": changes[name]},
            )
        )
        return
    others = {
        name: value
        for name, value in changes.items()
        if name != "explore" and history.settings.get(name) != value
    }
    reason = f", and evaluation_config sets {others}" if others else ""
    is_greedy = changes.get("explore") is False
    advice = "Check what differs between training and evaluation: wrappers, seeds, time limits."
    if is_greedy and not others:
        advice = (
            "Evaluations act greedily. Evaluate with evaluation_config={'explore': True} as well; "
            "if that is as good as training, the policy relies on random actions."
        )
    yield Located(
        Finding(
            evidence=f"{evidence}{reason}.",
            advice=advice,
            figures=figures,
            settings={f"evaluation_config.{name}": value for name, value in changes.items()},
        )
    )


def find_forgetting(history: RunHistory) -> Iterator[Located]:
    score = history.score
    if not history.has_forgotten():
        return
    yield Located(
        Finding(
            evidence=f"The mean return was {score.best:.4g} after {score.best_step:,} steps and is "
            f"{score.last:.4g} now: the run has forgotten its best policy.",
            advice="Lower lr, or let it fall (lr_schedule); with PPO lower num_sgd_iter, with "
            "replay raise the capacity of the buffer. --keep-best keeps the best checkpoint.",
            figures={"best_return": score.best, "last_return": score.last},
            settings={"lr": history.settings.get("lr")},
        ),
        history.judged_policy,
    )


RULES = (
    HistoryRule(
        name="non_finite_error",
        title="An update was not finite",
        find=find_non_finite_error,
        is_symptom=True,
        needs_stuck=False,
    ),
    HistoryRule(
        name="no_episode",
        title="No episode has ended",
        find=find_no_episode,
    ),
    HistoryRule(
        name="killed",
        title="The run was ended early",
        find=find_killed,
        is_symptom=True,
    ),
    HistoryRule(
        name="error",
        title="An error ended the training",
        find=find_error,
        needs_stuck=False,
    ),
    HistoryRule(
        name="no_checkpoint",
        title="The run ended before its first checkpoint",
        find=find_no_checkpoint,
        needs_stuck=False,
    ),
    HistoryRule(
        name="no_learning_yet",
        title="Learning never started",
        find=find_no_learning_yet,
        needs_stuck=False,
    ),
    HistoryRule(
        name="evaluation_gap",
        title="Evaluations are far below training",
        find=find_evaluation_gap,
        needs_stuck=False,
    ),
    HistoryRule(
        name="few_iterations",
        title="Too few iterations",
        find=find_few_iterations,
    ),
    HistoryRule(
        name="late_learning",
        title="Learning started late",
        find=find_late_learning,
    ),
    HistoryRule(
        name="non_finite",
        title="The loss is not finite",
        find=find_non_finite,
        is_symptom=True,
        needs_stuck=False,
    ),
    HistoryRule(
        name="short_run",
        title="The run is short",
        find=find_short_run,
        is_symptom=True,
    ),
    HistoryRule(
        name="forgetting",
        title="The run forgets",
        find=find_forgetting,
        is_symptom=True,
    ),
    HistoryRule(
        name="differences_from_tuned",
        title="Settings differ from tuned ones",
        find=find_differences_from_tuned,
        is_symptom=True,
    ),
    HistoryRule(
        name="no_progress",
        title="The returns do not grow",
        find=find_no_progress,
        is_symptom=True,
    ),
)
