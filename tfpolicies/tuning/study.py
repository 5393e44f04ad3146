"""The trials of a search in Optuna's journal: sampled, reported, pruned and read back.

The sampler is Optuna's multivariate TPE, whose random numbers depend only on the seed and the
number of the trial, so that a resumed study samples the same trials as an uninterrupted one. The
pruner is the median rule: the best evaluation so far of a trial's first seed must be at least the
median of the earlier trials' evaluations at the same time.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError, MissingPackageError
from tfpolicies.storage.json_values import decode_value, encode_value
from tfpolicies.system.installed_distributions import get_install_command
from tfpolicies.system.regular_files import read_regular
from tfpolicies.tuning.ranges import Choice, Range
from tfpolicies.tuning.search_space import SearchSpace, Settings

COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"

MIN_TRIALS_FOR_PRUNING = 5
"""Complete trials before one is pruned."""

_WARMUP_SHARE = 1 / 3  # of the evaluations of a trial, in which it is not pruned
_NAME = "tfpolicies"  # of the study in the journal
_MIN_TRIALS_FOR_IMPORTANCE = 8
_MIN_DIFFERENCE = 1e-6  # between the highest and the lowest importance, if they tell anything
_BETTER_SHARE = 1 / 3  # of the trials, which PED-ANOVA compares with all
_MAX_JOURNAL_BYTES = 1 << 28


class TrialRow(NamedTuple):
    """A finished trial.

    Attributes:
        number: from 0; trial 0 has the settings that the study began with.
        state: `"complete"`, `"pruned"` or `"failed"`.
        mean_return: over its seeds; None unless it is complete.
        returns: of each seed that ended, the mean return of its last evaluation.
        settings: that differ from those of the study's config, by name.
        seconds: that it took.
        error: the reason of a failure; "" otherwise.
        repairs: settings that were changed after sampling, as texts.
        folders: of its runs, one for each seed that began.
    """

    number: int
    state: str
    mean_return: float | None
    returns: tuple[float, ...]
    settings: Settings
    seconds: float
    error: str
    repairs: tuple[str, ...]
    folders: tuple[Path, ...]


class _NoLock:
    """The lock of a journal that one process writes, which holds the study's folder."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        """Does nothing."""


def import_optuna() -> Any:
    """Returns the package optuna.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingPackageError(
            "Tuning needs Optuna, which is not installed. Install it: "
            f"{get_install_command('tune')}."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Study:
    """The trials of one search, in a journal file that this process alone writes.

    Args:
        journal: the file; it is made if it is missing.
        space: the ranges.
        seed: of the sampler.
        num_evaluations: of each run.

    Raises:
        MissingPackageError: if Optuna is not installed.
        CheckpointError: if the journal is damaged.
    """

    def __init__(self, journal: Path, space: SearchSpace, seed: int, num_evaluations: int) -> None:
        self._optuna = optuna = import_optuna()
        self._space = space
        self._seed = seed
        _remove_incomplete_line(journal)
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=MIN_TRIALS_FOR_PRUNING,
            n_warmup_steps=1 + math.floor(num_evaluations * _WARMUP_SHARE),
        )
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(journal), _NoLock())
            self._study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name=_NAME,
                direction="maximize",
                pruner=pruner,
                load_if_exists=True,
            )
        except (ValueError, LookupError, TypeError, AssertionError) as error:
            raise CheckpointError(
                f"The journal {str(journal)!r} is damaged: {error}. Start a new search."
            ) from error
        self._trials: dict[int, Any] = {}

    @property
    def num_trials(self) -> int:
        """Trials that began."""
        return len(self._study.get_trials(deepcopy=False))

    def get_unfinished(self) -> list[int]:
        """Returns the numbers of trials without a result, as after a process was killed."""
        running = self._optuna.trial.TrialState.RUNNING
        return [x.number for x in self._study.get_trials(deepcopy=False, states=(running,))]

    def begin(self) -> tuple[int, dict[str, Any]]:
        """Begins a new trial; returns its number, and its values by the names of the ranges.

        Trial 0 has no values.
        """
        number = self.num_trials
        self._seed_sampler(number)
        trial = self._study.ask(self._make_distributions() if number else {})
        self._trials[number] = trial
        return number, self._read_values(trial)

    def reopen(self, number: int) -> dict[str, Any]:
        """Begins an unfinished trial again; returns its values, which are those of its start."""
        (frozen,) = [x for x in self._study.get_trials(deepcopy=False) if x.number == number]
        self._seed_sampler(number)
        trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
        for name, distribution in (self._make_distributions() if number else {}).items():
            trial._suggest(name, distribution)  # a stored value, or a new one if there is none
        self._trials[number] = trial
        return self._read_values(trial)

    def report(self, number: int, evaluation: int, mean_return: float) -> bool:
        """Records an evaluation of a trial's first seed; returns whether to prune the trial.

        Trial 0, and trials whose evaluation is not finite, are not pruned.
        """
        trial = self._trials[number]
        if not math.isfinite(mean_return):
            return False
        if evaluation not in self._read(number).intermediate_values:  # else of a killed process
            trial.report(mean_return, evaluation)
        return bool(number and trial.should_prune())

    def finish(self, row: TrialRow, folder: Path) -> None:
        """Records the result of a trial.

        Optuna counts a failed trial as one with a return of minus infinity, so that its settings
        are avoided, and does not count trial 0, whose settings were not sampled.

        Args:
            row: the result.
            folder: of the study; the paths are stored relative to it.
        """
        states = self._optuna.trial.TrialState
        trial = self._trials.pop(row.number)
        record = row._asdict() | {"folders": [str(x.relative_to(folder)) for x in row.folders]}
        trial.set_user_attr("row", encode_value(record))
        if not row.number:
            self._study.tell(trial, state=states.FAIL)
        elif row.state == PRUNED:
            self._study.tell(trial, state=states.PRUNED)
        else:
            self._study.tell(trial, -math.inf if row.mean_return is None else row.mean_return)

    def read_rows(self, folder: Path) -> list[TrialRow]:
        """Returns the finished trials in the order of their numbers.

        Args:
            folder: of the study.
        """
        records = [
            x.user_attrs["row"]
            for x in self._study.get_trials(deepcopy=False)
            if x.state.is_finished() and "row" in x.user_attrs
        ]
        return [_decode_row(record, folder) for record in records]

    def compute_importances(self) -> dict[str, float]:
        """Returns the share of each range in the differences between returns, highest first.

        They are those of PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255), which compares the
        better third of the trials with all of them. A pruned trial counts with its last evaluation,
        and a failed one does not. Empty with fewer than 8 trials, and if all shares are equal, as
        when most returns are.
        """
        optuna = self._optuna
        results = [(x, _get_last_return(x)) for x in self._study.get_trials(deepcopy=False)]
        values = {value for _, value in results if value is not None}
        trials = [
            optuna.trial.create_trial(params=x.params, distributions=x.distributions, value=value)
            for x, value in results
            if value is not None and x.params
        ]
        if len(trials) < _MIN_TRIALS_FOR_IMPORTANCE or len(values) < 2:
            return {}
        study = optuna.create_study(direction="maximize")
        study.add_trials(trials)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_BETTER_SHARE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rare values make a share uncertain
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
        importances = {name: float(share) for name, share in shares.items()}
        is_telling = len(importances) < 2 or np.ptp([*importances.values()]) > _MIN_DIFFERENCE
        return importances if is_telling else {}

    def _read(self, number: int) -> Any:
        return self._study.get_trials(deepcopy=False)[number]

    def _seed_sampler(self, number: int) -> None:
        seeds = np.random.SeedSequence((self._seed, number)).generate_state(1)
        self._study.sampler = self._optuna.samplers.TPESampler(seed=int(seeds[0]))

    def _make_distributions(self) -> dict[str, Any]:
        return {
            name: _make_distribution(self._optuna.distributions, x)
            for name, x in self._space.ranges.items()
        }

    def _read_values(self, trial: Any) -> dict[str, Any]:
        values = {}
        for name, value in trial.params.items():
            setting_range = self._space.ranges[name]
            if isinstance(setting_range, Choice):
                value = setting_range.values[setting_range.labels.index(value)]
            values[name] = value
        return values


def _get_last_return(trial: Any) -> float | None:
    """Returns the result of a sampled trial, or the last evaluation of a pruned one."""
    if not trial.state.is_finished():
        return None
    values = trial.intermediate_values
    value = trial.values[0] if trial.values else values[max(values)] if values else math.nan
    return float(value) if math.isfinite(value) else None


def _make_distribution(distributions: Any, setting_range: Range) -> Any:
    if isinstance(setting_range, Choice):
        return distributions.CategoricalDistribution(setting_range.labels)
    low, high = setting_range.low, setting_range.high
    if setting_range.is_integer:
        return distributions.IntDistribution(int(low), int(high))
    return distributions.FloatDistribution(low, high, log=setting_range.is_log)


def _decode_row(record: Json, folder: Path) -> TrialRow:
    try:
        values: Mapping[str, Any] = decode_value(record)
        row = TrialRow(**values)
        return row._replace(
            returns=tuple(row.returns),
            repairs=tuple(row.repairs),
            folders=tuple(folder / name for name in row.folders),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The journal in {str(folder)!r} is damaged: {error}. Start a new search."
        ) from error


def _remove_incomplete_line(journal: Path) -> None:
    """Removes the end of a journal whose writer was killed within a line."""
    if journal.exists():
        content = read_regular(journal, _MAX_JOURNAL_BYTES)
        os.truncate(journal, content.rfind(b"\n") + 1)
