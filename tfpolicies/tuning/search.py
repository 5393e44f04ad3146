"""Runs the trials of a search in several processes until all are finished."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.errors import ConfigError
from tfpolicies.tuning.options import TuneOptions
from tfpolicies.tuning.repairs import complete_settings
from tfpolicies.tuning.search_folder import SearchFolder
from tfpolicies.tuning.search_results import find_best
from tfpolicies.tuning.search_space import SearchSpace, Settings, nest
from tfpolicies.tuning.study import COMPLETE, FAILED, PRUNED, Study, TrialRow
from tfpolicies.tuning.trial_process import ProcessSetup, TrialProcess
from tfpolicies.tuning.trial_program import EvaluationMessage, RunRequest

_RUNS_PER_PROCESS = 25  # then a new one starts: compiled code of dropped networks stays in memory
_MAX_FAILURES = 5  # trials that fail before one succeeds
_POLL_SECONDS = 1.0


class Observer(Protocol):
    """Shows the progress of a search."""

    def on_evaluation(self, number: int, share: float, mean_return: float) -> None:
        """Called after an evaluation, with the trial and the share of its steps."""

    def on_trial(self, row: TrialRow, best: TrialRow | None) -> None:
        """Called after a trial, with the best one so far."""


@dataclass
class _ActiveTrial:
    """A trial that a process trains, one seed after the other."""

    number: int
    settings: Settings
    repairs: list[str]
    started_at: float
    returns: list[float] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    def make_row(self, state: str, error: str = "") -> TrialRow:
        is_complete = state == COMPLETE
        mean_return = math.fsum(self.returns) / len(self.returns) if is_complete else None
        return TrialRow(
            number=self.number,
            state=state,
            mean_return=mean_return,
            returns=tuple(self.returns),
            settings=self.settings,
            seconds=time.monotonic() - self.started_at,
            error=error,
            repairs=tuple(self.repairs),
            folders=tuple(self.folders),
        )


class Search:
    """Runs the trials of a search.

    Args:
        folder: of the search, held by this process.
        config: without the settings of trials.
        space: the ranges.
        options: of the search.
        setup: of the processes.
        process: one that has built the algorithm already.
        observer: shows the progress.

    Attributes:
        rows: the finished trials.
    """

    def __init__(
        self,
        folder: SearchFolder,
        config: AlgorithmConfig,
        space: SearchSpace,
        options: TuneOptions,
        setup: ProcessSetup,
        process: TrialProcess,
        observer: Observer,
    ) -> None:
        self._folder, self._config, self._space = folder, config, space
        self._options, self._setup, self._observer = options, setup, observer
        count = options.num_evaluations
        self.study = Study(folder.journal, space, options.seed, count)
        self.rows = self.study.read_rows(folder.path)
        self._unfinished = self.study.get_unfinished()
        self._idle = [process]
        self._active: dict[TrialProcess, _ActiveTrial] = {}

    @property
    def has_reached_target(self) -> bool:
        best, until = find_best(self.rows), self._options.until
        if best is None or best.mean_return is None or until is None:
            return False
        return best.mean_return >= until

    def run(self) -> None:
        """Trains until all trials are finished or one has reached the target.

        If it is interrupted, running trials stay unfinished, and another search in the same folder
        runs them again.

        Raises:
            ConfigError: if the first trials all fail.
        """
        try:
            while self._start_trials():
                for connection in wait([x.connection for x in self._active], _POLL_SECONDS):
                    (process,) = [x for x in self._active if x.connection is connection]
                    self._handle(process)
        finally:
            for process in (*self._active, *self._idle):
                process.close()

    def _start_trials(self) -> bool:
        """Starts as many trials as there are jobs; returns whether one is running."""
        while len(self._active) < self._options.jobs and not self.has_reached_target:
            if self._unfinished:
                number = self._unfinished.pop(0)
                values = self.study.reopen(number)
            elif self.study.num_trials < self._options.trials:
                number, values = self.study.begin()
            else:
                break
            self._start(number, values)
        return bool(self._active) and not self.has_reached_target

    def _start(self, number: int, values: Mapping[str, Any]) -> None:
        steps = self._options.steps
        settings = self._space.make_settings(values, steps) if number else {}
        trial = _ActiveTrial(number, settings, [], time.monotonic())
        try:
            if number:
                trial.settings, trial.repairs = complete_settings(self._config, settings, steps)
        except ConfigError as error:
            self._finish(trial, FAILED, str(error))
            return
        process = self._idle.pop() if self._idle else None
        if process is not None and process.num_runs >= _RUNS_PER_PROCESS:
            process.close()
            process = None
        if process is None:
            process = TrialProcess(self._setup)
            with contextlib.suppress(Exception):  # the run reports it
                process.receive_check()
        self._active[process] = trial
        self._start_run(process, trial)

    def _start_run(self, process: TrialProcess, trial: _ActiveTrial) -> None:
        options = self._options
        seed = options.seed + len(trial.returns)
        run_dir = self._folder.get_run_dir(trial.number, seed)
        shutil.rmtree(run_dir, ignore_errors=True)  # left by a process that was killed
        trial.folders.append(run_dir)
        settings = nest(trial.settings)
        process.start(RunRequest(settings, seed, options.steps, options.num_evaluations, run_dir))

    def _handle(self, process: TrialProcess) -> None:
        """Handles one message of a process."""
        trial, message = self._active[process], process.receive()
        if isinstance(message, EvaluationMessage):
            process.answer(self._report(trial, message))
            return
        if message.mean_return is not None:
            trial.returns.append(message.mean_return)
            if len(trial.returns) < self._options.seeds:
                self._start_run(process, trial)
                return
        del self._active[process]
        if not process.is_closed:
            self._idle.append(process)
        if message.mean_return is not None:
            self._finish(trial, COMPLETE)
        else:
            self._finish(trial, FAILED if message.error else PRUNED, message.error)

    def _report(self, trial: _ActiveTrial, message: EvaluationMessage) -> bool:
        """Records an evaluation; returns whether the run continues."""
        options = self._options
        share = (len(trial.returns) + message.number / options.num_evaluations) / options.seeds
        self._observer.on_evaluation(trial.number, share, message.mean_return)
        is_first_seed, is_last = not trial.returns, message.number >= options.num_evaluations
        if not is_first_seed:
            return True
        prune = self.study.report(trial.number, message.number, message.mean_return)
        return is_last or not prune

    def _finish(self, trial: _ActiveTrial, state: str, error: str = "") -> None:
        row = trial.make_row(state, error)
        self.study.finish(row, self._folder.path)
        self.rows = sorted([*self.rows, row])
        self._folder.write_rows(self.rows)
        self._observer.on_trial(row, find_best(self.rows))
        if len(self.rows) >= _MAX_FAILURES and all(x.state == FAILED for x in self.rows):
            raise ConfigError(
                f"The first {len(self.rows)} trials failed, the last one by: {error}. Fix that, or "
                "the search space, and start a new search."
            )
