"""How `tfpolicies train` ends: nothing is lost, and the status says what ended it."""

import os
import re
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.processes import start_program
from tfpolicies import Algorithm
from tfpolicies.cli import main
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.reporting.run_folder import RunFolder, find_runs
from tfpolicies.storage.checkpoint import read_checkpoint
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST
from tfpolicies.system.signal_handling import ShutdownHandler, SignalInterrupt, get_active_handler

pytestmark = pytest.mark.usefixtures("kept_programs")

BATCH = 20  # steps of an iteration
WORLD = """
import os, signal, sys, time
import gymnasium as gym
import numpy as np

class World(gym.Env):
    '''Episodes of 5 steps; `HAPPENS` says what happens in step `AT` of the process.'''

    observation_space = gym.spaces.Box(0.0, 5.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    steps = 0
    _skip_env_checking = True  # steps are counted

    def __init__(self, config):
        if os.environ.get("HAPPENS") == "exits when made":
            sys.exit(0)

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        World.steps += 1
        if World.steps == int(os.environ.get("AT", 0)):
            self.happen(os.environ["HAPPENS"])
        self.now += 1
        return np.array([self.now], np.float32), 1.0, self.now == 5, False, {}

    def happen(self, what):
        if what == "exit":
            sys.exit(0)
        elif what == "raise":
            raise ZeroDivisionError("the wheel came off")
        elif what == "swallow":
            while True:
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.2)
                except BaseException:
                    continue
        else:
            os.kill(os.getpid(), getattr(signal, what))
"""
ENV = "world_of_a_user:World"
SETTINGS = [f"train_batch_size={BATCH}", "rollout_fragment_length=5", "model.fcnet_hiddens=[4]"]
SETTINGS += ["jit_compile=False", "inference=tf"]
TRAIN = ["train", ENV, "--algo", "PG", "--num-envs", "1", "--seed", "3"]
TRAIN += [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.fixture
def here(here, monkeypatch):
    """A current folder with the module of `ENV`, which has not been imported."""
    (here / "world_of_a_user.py").write_text(WORLD)
    monkeypatch.delitem(sys.modules, "world_of_a_user", raising=False)
    return here


@pytest.fixture
def train(here, monkeypatch):
    """Returns a function that trains while something happens in a step of the environment."""

    def run(happens, at, *words):
        monkeypatch.setenv("HAPPENS", happens)
        monkeypatch.setenv("AT", str(at))
        status = main([*TRAIN, "--steps", "4000", *words])
        monkeypatch.setenv("AT", "0")
        return status

    return run


def the_run(folder: Path) -> RunFolder:
    (run,) = find_runs(folder / "runs")
    return run


def iterations(run: RunFolder) -> list[float]:
    return [row["iteration"] for row in read_progress(run.progress_csv)]


def goes_on(run: RunFolder, errors: str, done: int) -> None:
    """Checks that the command which was printed goes on after `done` iterations."""
    command = shlex.split(errors.splitlines()[-1])
    assert command[-3:] == [ENV, "--resume", f"runs/{run.path.name}"]
    assert main([*command[command.index("train") :], "--steps", str(BATCH * (done + 2))]) == 0
    assert iterations(run) == [*range(1, done + 3)]


@pytest.fixture(autouse=True)
def _heeds_hangups():
    """Under `nohup` this process ignores SIGHUP, and so would those that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


MAIN = "import sys; from tfpolicies.cli import main; sys.exit(main())"


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        ("exit", r"`step\(.\)` of environment 0 of worker 0 tried .* process: SystemExit\(0\)"),
        ("raise", r"ZeroDivisionError: the wheel came off \(.*world_of_a_user.py:\d+, in happen\)"),
    ],
)
def test_a_fault_of_the_environment_saves_the_last_iteration(here, capsys, happens, message, train):
    assert train(happens, 3 * BATCH + 7, "--checkpoint-every", "1000") == 3
    run, errors = the_run(here), capsys.readouterr().err
    assert re.search(message, errors)
    assert f"Saved in runs/{run.path.name}/checkpoints/latest." in errors
    assert "Traceback" not in errors
    assert "Traceback" in run.error_txt.read_text()
    assert iterations(run) == [1, 2, 3]
    goes_on(run, errors, 3)


def test_a_fault_in_the_middle_of_an_iteration_saves_what_was_before_it(here, monkeypatch):
    def half(algorithm: Algorithm) -> Any:
        actual = learn(algorithm)
        if algorithm.iteration == 2:
            raise MemoryError("in the middle")
        return actual

    learn = Algorithm._learn_and_sync
    assert main([*TRAIN, "--steps", str(2 * BATCH), "--run-dir", "whole"]) == 0
    monkeypatch.setattr(Algorithm, "_learn_and_sync", half)
    assert main([*TRAIN, "--steps", "4000", "--run-dir", "half"]) == 3
    whole, broken = (
        read_checkpoint(find_runs(name)[0].latest, ALGORITHM_MANIFEST, kind="Algorithm")
        for name in ("whole", "half")
    )
    assert broken.manifest["progress"]["iteration"] == 2
    (expected,), (saved,) = (actual.policies.values() for actual in (whole, broken))
    assert saved.manifest["state"]["rng"] == expected.manifest["state"]["rng"]
    for group, arrays in expected.arrays.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(saved.arrays[group][name], array)


def test_a_fault_in_the_first_iteration_leaves_no_checkpoint(here, capsys, refuse, train):
    assert train("raise", 3) == 3
    errors = capsys.readouterr().err
    assert "Nothing was trained yet." in errors, errors
    assert not the_run(here).has_checkpoint
    path = the_run(here).path.relative_to(here)
    hint = f"To restart {path}, use `tfpolicies train --resume {path}`."
    assert hint in refuse(["train", ENV, "--resume"])
    text = refuse(["evaluate", "runs"])
    assert "No run in 'runs' has a checkpoint yet. Restart the newest one with `tfpolicies" in text


def test_a_start_that_fails_leaves_no_folder(here, capsys, train):
    assert train("exits when made", 0) == 3
    assert "the process was to end by SystemExit(0) (" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_a_run_that_another_process_trains_is_refused_unchanged(here, capsys):
    assert main([*TRAIN, "--steps", "40"]) == 0
    run = the_run(here)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    words = ["train", ENV, "--resume", str(run.path), "--steps", "80"]
    with run.acquire():
        before[run.path / "lock"] = f"{os.getpid()}\n".encode()
        assert main(words) == 5
        assert f"is in use by process {os.getpid()}" in capsys.readouterr().err
        assert main(["evaluate", str(run.path), "--env", ENV, "--episodes", "1"]) == 0
        assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    assert main(words) == 0
    assert iterations(run) == [1, 2, 3, 4]


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [("SIGINT", 130, "Interrupted"), ("SIGTERM", 143, "Terminated"), ("SIGHUP", 129, "Hung up")],
)
def test_a_signal_lets_the_iteration_end_and_saves(here, capfd, name, status, message, train):
    results = [signal.getsignal(number) for number in (2, 15, 1)]
    assert train(name, 2 * BATCH + 3, "--checkpoint-every", "1000") == status
    assert [signal.getsignal(number) for number in (2, 15, 1)] == results
    run, errors = the_run(here), capfd.readouterr().err
    assert f"{message}: training saves and ends after this iteration." in errors
    assert f"{message}. Saved in runs/{run.path.name}/checkpoints/latest." in errors
    assert iterations(run) == [1, 2, 3]
    goes_on(run, errors, 3)


@pytest.mark.soak
def test_an_environment_that_swallows_interruptions_is_named_and_left(here, monkeypatch):
    monkeypatch.setenv("HAPPENS", "swallow")
    monkeypatch.setenv("AT", str(2 * BATCH + 3))
    words = [*TRAIN, "--steps", "4000", "--checkpoint-every", "1000"]
    with start_program(MAIN, *words) as process:
        _, errors = process.communicate(timeout=300)
    monkeypatch.setenv("AT", "0")
    assert process.returncode == 130
    run = the_run(here)
    assert "Interrupted: World (world_of_a_user.py:" in errors
    assert "in happen) swallowed the interruption, so the process was ended. Saved in" in errors
    assert iterations(run) == [1, 2]
    goes_on(run, errors, 2)


@pytest.mark.parametrize(
    ("number", "module"),
    [
        (signal.SIGINT, "tfpolicies.cli"),
        (signal.SIGINT, "tfpolicies.system.gpu_memory"),
        (signal.SIGINT, "tfpolicies.cli.arguments"),
        (signal.SIGINT, "numpy._core.multiarray"),
        (signal.SIGTERM, "tfpolicies.cli.arguments"),
        (signal.SIGHUP, "tfpolicies.cli.arguments"),
    ],
)
def test_a_signal_while_modules_are_imported_is_one_line(number, module):
    code = f"""
import os, signal, sys
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), {int(number)})
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Sends())
from tfpolicies.__main__ import main
sys.exit(main())
"""
    with start_program(code, "train", "CartPole-v1") as process:
        shown, errors = process.communicate(timeout=60)
    assert (process.returncode, shown) == (128 + number, "")
    assert errors in ("Interrupted.\n", "Terminated.\n", "Hung up.\n")


def test_ignored_signals_stay_ignored_and_other_threads_change_nothing():
    before = signal.getsignal(signal.SIGTERM)
    result = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ShutdownHandler():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not before
            handler = signal.getsignal(signal.SIGTERM)

            def enter() -> None:
                with ShutdownHandler():
                    assert signal.getsignal(signal.SIGTERM) is handler

            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            with ShutdownHandler():
                assert signal.getsignal(signal.SIGTERM) is handler
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGHUP, result)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_comes_in_a_destructor_is_not_lost(capfd):
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def die() -> None:
        with ShutdownHandler():
            Dying()  # Python ignores what is raised here
            time.sleep(10.0)

    hook = sys.unraisablehook
    with pytest.raises(SignalInterrupt):
        die()
    assert "ignored" not in capfd.readouterr().err
    assert sys.unraisablehook is hook


def test_the_destructor_of_what_a_signal_left_half_made_reports_nothing():
    code = """
import signal
from tfpolicies.system.signal_handling import ShutdownHandler, SignalInterrupt

class HalfMade:
    def __init__(self):
        signal.raise_signal(signal.SIGTERM)
        self.handle = 1

    def __del__(self):
        print("deleted", flush=True)
        del self.handle

with ShutdownHandler():
    try:
        HalfMade()
    except SignalInterrupt:
        print("ended", flush=True)
"""
    with start_program(code) as process:
        shown, errors = process.communicate(timeout=60)
    assert (shown, errors) == ("ended\ndeleted\n", "")


def test_a_signal_is_held_back_until_the_end_of_the_block_and_a_second_one_is_not(capfd):
    reached = []

    def send(number: int) -> None:
        with get_active_handler().defer(lambda what: None):
            os.kill(os.getpid(), number)
            reached.append(get_active_handler().requested)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # the thread that sees signals does not run before this one ends
    try:
        with ShutdownHandler():
            with pytest.raises(SignalInterrupt, match="Terminated"):
                send(signal.SIGTERM)
            with pytest.raises(SignalInterrupt, match="Terminated"):
                send(signal.SIGINT)
    finally:
        sys.setswitchinterval(interval)
    assert reached == [signal.SIGTERM]
    line = (
        "Terminated: training saves and ends after this iteration. A second signal ends it at "
        "once.\n"
    )
    assert capfd.readouterr().err == line


def test_a_forked_child_has_the_signals_that_were_found():
    code = """
import os, signal, time, warnings
from tfpolicies.system.signal_handling import ShutdownHandler
warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
with ShutdownHandler():
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    print(os.waitpid(child, 0)[1], flush=True)
"""
    with start_program(code) as process:
        shown, errors = process.communicate(timeout=60)
    assert (shown, errors) == (f"{int(signal.SIGTERM)}\n", "")


# -- standard files -------------------------------------------------------------------------------


@pytest.mark.soak
def test_output_that_nobody_reads_ends_the_training_with_a_checkpoint(here):
    with start_program(
        MAIN, *TRAIN, "--steps", "100000000", "--checkpoint-every", "1000000"
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("Run folder:"):
            pass
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141
    assert "tfpolicies: error: the output pipe was closed. Saved in runs/" in errors
    run = the_run(here)
    goes_on(run, errors, len(iterations(run)))


def test_standard_files_that_are_closed_stay_nothing(tmp_path):
    code = """
import os, sys
os.closerange(0, 3)
sys.stdin = sys.stdout = sys.stderr = None
from tfpolicies.system.log_suppression import suppress_native_stderr
with suppress_native_stderr():
    pass
from tfpolicies.cli import main
sys.argv[1:] = ["--help"]
status = main()
opened = os.open(sys.argv[0] + "new", os.O_CREAT)
print("told", file=sys.stderr, flush=True)
os._exit(100 + status if opened > 2 else 1)
"""
    with start_program(code, cwd=tmp_path) as process:
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 100


def test_help_tells_every_exit_status(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out.partition("exit status:\n")[2]
    results = [line.split()[0] for line in output.splitlines() if line.startswith("  ")]
    assert results[:10] == ["0", "1", "2", "3", "4", "5", "129", "130", "141", "143"]
