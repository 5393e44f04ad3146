"""Trains several seeds side by side, each in a process of its own, in one folder of runs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil
from rich.console import Console

from tfpolicies.cli.arguments import RUNS
from tfpolicies.cli.exit_codes import DONE, FAILED, NOT_FINITE, TARGET_MISSED, USAGE
from tfpolicies.cli.run_lookup import find_run
from tfpolicies.cli.run_settings import (
    change_settings,
    describe_reason,
    format_resume_command,
    make_new_settings,
    make_run_json,
    print_hint,
)
from tfpolicies.cli.train_options import OPTIONS, TrainSettings, get_flag
from tfpolicies.errors import TfPoliciesError, UsageError
from tfpolicies.reporting.progress_csv import read_last_row
from tfpolicies.reporting.progress_display import CommandConsole, format_count
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.reporting.seed_folder import SeedFolder
from tfpolicies.reporting.seed_progress import SeedProgress
from tfpolicies.system.paths import resolve_path, shorten_path
from tfpolicies.system.regular_files import read_regular
from tfpolicies.system.signal_handling import (
    SignalInterrupt,
    describe_signal,
    get_active_handler,
    print_to_stderr,
)
from tfpolicies.system.system_memory import get_available_memory

_POLL_SECONDS = 0.2
_LOAD_SECONDS = 0.5  # for measuring the load of the machine
_MEMORY_PER_SEED = 1 << 30  # bytes that a process is expected to need
_MAX_LOG_BYTES = 1 << 24
_THREAD_VARIABLES = (
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
)
_REPEATABLE = [
    name for name, option in OPTIONS.items() if option.argparse_kwargs.get("action") == "append"
]
_STATUS_TEXTS = {TARGET_MISSED: "target missed", NOT_FINITE: "NaN or infinity"}


def trains_seeds(arguments: Mapping[str, Any]) -> bool:
    """Whether the options of `train` are for several seeds, of a new run or of a resumed one."""
    return "seeds" in arguments or (
        "resume" in arguments and _find_seed_folder(arguments) is not None
    )


def train_seeds(arguments: dict[str, Any]) -> int:
    """Trains several seeds, or resumes them; returns the exit status.

    Args:
        arguments: the options of the command, by name.
    """
    console = CommandConsole()
    parallel = arguments.pop("parallel", None)
    if "resume" in arguments:
        training = _prepare_resumed(arguments, console)
    else:
        training = _prepare_new(arguments, console)
    if not training.commands:
        console.print(f"{shorten_path(training.folder.path)}: all seeds are finished.")
        resume = format_resume_command(training.folder.path, training.settings)
        print_hint(console, "To train longer, use:", [*resume, "--steps", "..."])
        return DONE
    count = len(training.commands)
    if parallel is None:
        parallel = count_free_cores()
        if parallel < count:
            console.print(
                f"Free cores and memory suffice for {parallel} of {count} seeds at once; "
                "--parallel sets another number.",
                highlight=False,
                soft_wrap=True,
            )
    training.run(min(parallel, count))
    return training.report()


def count_free_cores() -> int:
    """Returns how many seeds can train at once: free cores, as far as there is memory."""
    cores = len(os.sched_getaffinity(0))
    idle = cores * (1 - psutil.cpu_percent(_LOAD_SECONDS) / 100)
    return max(1, min(round(idle), get_available_memory() // _MEMORY_PER_SEED))


def _count_threads(parallel: int) -> int:
    """Returns the threads of each process: its share of the cores, unless the user sets them."""
    text = os.environ.get(_THREAD_VARIABLES[0], "")
    cores = len(os.sched_getaffinity(0))
    return int(text) if text.isdecimal() and int(text) else max(1, cores // parallel)


# -- preparing --------------------------------------------------------------------------------


def _find_seed_folder(arguments: Mapping[str, Any]) -> SeedFolder | None:
    """Returns the folder of seeds that `--resume` names, or that has the newest run, or None."""
    path = arguments["resume"]
    path = arguments.get("run_dir", RUNS) if path is None else path
    folder = SeedFolder.find(path)
    if folder is None and not RunFolder(path).run_json.exists():
        run = find_run(path)
        folder = None if run is None else SeedFolder.find(run.path.parent)
    return folder


def _prepare_new(arguments: dict[str, Any], console: Console) -> SeedTraining:
    seeds = arguments.pop("seeds")
    if "seed" in arguments:
        raise UsageError("--seed and --seeds both set the seed. Leave one of them out.")
    words = {name: arguments[name] for name in arguments}
    parent = resolve_path(arguments.pop("run_dir", RUNS))
    arguments.pop("model_work_limit", None)
    settings = make_new_settings({**arguments, "seed": seeds[0]})
    console.print(settings.describe_tuned(), highlight=False, soft_wrap=True)
    folder = SeedFolder.create(parent, settings.run_name, seeds, settings.as_json())
    words.pop("run_dir", None)
    commands = {
        seed: make_words({**words, "seed": seed, "run_folder": folder.get_run(seed).path})
        for seed in seeds
    }
    return SeedTraining(folder, settings, commands, console)


def _prepare_resumed(arguments: dict[str, Any], console: Console) -> SeedTraining:
    if "seeds" in arguments:
        raise UsageError("--seeds cannot be given with --resume, which resumes the same seeds.")
    folder = _find_seed_folder(arguments)
    if folder is None:
        raise UsageError("--resume needs a folder of seeds here.")
    del arguments["resume"]
    arguments.pop("run_dir", None)
    stored = TrainSettings.from_json(folder.settings, str(folder.path / "seeds.json"))
    changes = {name: x for name, x in arguments.items() if name != "model_work_limit"}
    settings = change_settings(folder.path, stored, changes)
    commands = {}
    for seed in folder.seeds:
        run = folder.get_run(seed)
        if not run.run_json.exists():
            RunFolder.create_at(run.path, _make_missing_run(folder, seed)).release()
        elif not changes and run.settings.get("finished") is not None:
            continue
        commands[seed] = make_words({**arguments, "resume": run.path})
    return SeedTraining(folder, settings, commands, console)


def _make_missing_run(folder: SeedFolder, seed: int) -> dict[str, Any]:
    """Returns the settings of a seed that was not started: those of another, which are complete."""
    runs = (folder.get_run(other) for other in folder.seeds)
    started = next((run for run in runs if run.run_json.exists()), None)
    content = folder.settings if started is None else started.settings.get("train", {})
    settings = TrainSettings.from_json({**content, "seed": seed}, str(folder.path))
    return make_run_json(settings)


def make_words(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the command line of `train` for some options.

    >>> make_words({"env": "CartPole-v1", "export": True, "set": ["gamma=0.9"], "until": 475.0})
    ['train', 'CartPole-v1', '--export', '--set', 'gamma=0.9', '--until', '475.0']
    """
    words = ["train"]
    if arguments.get("env") is not None:
        words.append(arguments["env"])
    for name, value in arguments.items():
        if name == "env" or value is None or value is False:
            continue
        flag = get_flag(name)
        if value is True:
            words.append(flag)
        elif name in _REPEATABLE:
            words += [word for text in value for word in (flag, text)]
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


# -- training ---------------------------------------------------------------------------------


class SeedTraining:
    """Runs a command for each seed, some at once, and follows their progress.

    Args:
        folder: of the seeds.
        settings: of all of them, apart from the seed.
        commands: the arguments of `tfpolicies` by seed.
        console: for output.

    Attributes:
        statuses: the exit status of each seed that has ended.
    """

    def __init__(
        self,
        folder: SeedFolder,
        settings: TrainSettings,
        commands: Mapping[int, Sequence[str]],
        console: Console,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.commands = commands
        self.console = console
        self.statuses: dict[int, int] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._interrupt: int | None = None

    def run(self, parallel: int) -> None:
        """Trains all seeds; after a signal, all of them save and end.

        Args:
            parallel: how many train at once.
        """
        threads = _count_threads(parallel)
        self.console.print(
            f"Folder of seeds: {shorten_path(self.folder.path)}  (seeds "
            f"{', '.join(map(str, self.commands))}; {parallel} at once, "
            f"{format_count(threads, 'thread')} each)",
            highlight=False,
            soft_wrap=True,
        )
        signals = get_active_handler()
        waiting = list(self.commands)
        try:
            with (
                signals.defer(lambda what: None),
                SeedProgress([*self.commands], self.settings.until, self.console) as progress,
            ):
                while (waiting or self._processes) and signals.requested is None:
                    while waiting and len(self._processes) < parallel:
                        self._start(waiting.pop(0), threads)
                    time.sleep(_POLL_SECONDS)
                    self._follow(progress)
                    if self._is_unusable():
                        waiting.clear()
                if signals.requested is not None:
                    with signals.allow_unlimited_time():
                        self._end_all(signals.requested)
        except KeyboardInterrupt as error:
            self._interrupt = error.number if isinstance(error, SignalInterrupt) else signal.SIGINT
            self._end_all(self._interrupt)
        except BaseException:  # such as a process that cannot be started
            self._end_all(signal.SIGTERM)
            raise
        finally:
            for process in self._processes.values():
                process.kill()

    def _start(self, seed: int, threads: int) -> None:
        program = [sys.executable, "-m", "tfpolicies.cli.seed_process", str(os.getpid())]
        limits = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        with self.folder.get_log(seed).open("ab") as log:
            self._processes[seed] = subprocess.Popen(
                [*program, *self.commands[seed]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**limits, **os.environ},
                start_new_session=True,  # Ctrl-C is for this process, which passes it on
            )

    def _follow(self, progress: SeedProgress) -> None:
        for seed, process in [*self._processes.items()]:
            status = process.poll()
            if status is None:
                row = read_last_row(self.folder.get_run(seed).progress_csv)
                progress.update(seed, row, self._get_total(seed))
            else:
                self._record_end(seed, status)
                progress.finish(seed, self._describe(seed))

    def _record_end(self, seed: int, status: int) -> None:
        self._processes.pop(seed)
        self.statuses[seed] = 128 - status if status < 0 else status

    def _get_total(self, seed: int) -> int | None:
        """Returns the steps at which a seed ends, as its run folder says once it is there."""
        try:
            return int(self.folder.get_run(seed).settings["train"]["steps"])
        except (TfPoliciesError, KeyError, TypeError, ValueError):
            return None

    def _is_unusable(self) -> bool:
        """Whether the command itself is wrong: no seed has a run, and one was refused."""
        return USAGE in self.statuses.values() and not any(
            self.folder.get_run(seed).run_json.exists() for seed in self.commands
        )

    def _end_all(self, number: int) -> None:
        """Passes a signal on to all seeds, and waits until they have saved and ended."""
        for process in self._processes.values():
            process.send_signal(number)
        while self._processes:  # each of them ends in seconds, unless it saves
            time.sleep(_POLL_SECONDS / 4)
            for seed, process in [*self._processes.items()]:
                if (status := process.poll()) is not None:
                    self._record_end(seed, status)

    # -- the report -----------------------------------------------------------------------------

    def report(self) -> int:
        """Prints how the seeds ended, and writes their comparison; returns the exit status."""
        if self._is_unusable():
            seed = next(seed for seed, status in self.statuses.items() if status == USAGE)
            print_to_stderr(self._read_message(seed))
            shutil.rmtree(self.folder.path, ignore_errors=True)
            return USAGE
        if self._interrupt is not None:
            get_active_handler().acknowledge()
            started = sum(self.folder.get_run(seed).has_checkpoint for seed in self.folder.seeds)
            print_to_stderr(
                f"{describe_signal(self._interrupt)}. {started} of {len(self.folder.seeds)} seeds "
                f"are saved in {shorten_path(self.folder.path)}."
            )
            self._print_failures(self._get_failures())
            self._print_resume_command()
            return 128 + self._interrupt
        self._write_comparison()
        failures = self._get_failures()
        self._print_failures(failures)
        if failures:
            self._print_resume_command()
            return NOT_FINITE if set(failures.values()) == {NOT_FINITE} else FAILED
        return max(self.statuses.values(), default=DONE)

    def _get_failures(self) -> dict[int, int]:
        fine = {DONE, TARGET_MISSED}
        if self._interrupt is not None:
            fine.add(128 + self._interrupt)
        return {seed: x for seed, x in sorted(self.statuses.items()) if x not in fine}

    def _print_failures(self, failures: Mapping[int, int]) -> None:
        for seed, status in failures.items():
            log = shorten_path(self.folder.get_log(seed))
            print_to_stderr(
                f"Seed {seed} failed (exit status {status}): {self._read_message(seed)}\n"
                f"  Its output is in {log}"
            )

    def _print_resume_command(self) -> None:
        command = format_resume_command(self.folder.path, self.settings)
        print_to_stderr(f"Resume with:\n  {shlex.join(command)}")

    def _write_comparison(self) -> None:
        from tfpolicies.analysis.comparison import compare_runs  # imports scipy
        from tfpolicies.cli.compare import print_comparison, print_comparison_files

        self.console.print()
        try:
            with self.console.status("comparing the seeds"):
                comparison = compare_runs(self.folder.path)
                files = comparison.write(self.folder.comparison)
        except (TfPoliciesError, OSError) as error:
            print_to_stderr(f"There is no comparison: {error}")
            return
        print_comparison(self.console, comparison)
        print_comparison_files(self.console, files)

    def _describe(self, seed: int) -> str:
        """Describes how a seed ended, in a few words."""
        status = self.statuses[seed]
        if status == DONE:
            finished = str(self.folder.get_run(seed).settings.get("finished"))
            return describe_reason(self.settings, finished)
        if status > 128:
            return f"ended by {signal.Signals(status - 128).name}"
        return _STATUS_TEXTS.get(status, "failed")

    def _read_message(self, seed: int) -> str:
        """Returns the last message of a seed's output, which is its error if it failed."""
        try:
            content = read_regular(self.folder.get_log(seed), _MAX_LOG_BYTES)
        except OSError as error:
            return f"its output cannot be read ({error})"
        lines = content.decode("utf-8", errors="replace").splitlines()
        return _find_message(lines)


def _find_message(lines: Iterable[str]) -> str:
    lines = [line for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith("tfpolicies: error:")]
    return (errors or lines or ["no message"])[-1]
