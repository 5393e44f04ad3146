"""`env_processes`: the environments of a worker in separate processes, without Ray."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.vector import AutoresetMode

from helpers.environments import SavedCountingEnv, SeededEnv, counting_vector
from helpers.process_envs import Faulty, NeedsC, NestedActions, Team, Unlike
from helpers.processes import HOME, is_running, run_python, wait_until
from helpers.workers import make_config
from tfpolicies import Algorithm, PGConfig, PGTF2Policy, RolloutWorker
from tfpolicies.cli import main
from tfpolicies.envs.env_factory import EnvContext, make_environments
from tfpolicies.envs.env_registry import ENVIRONMENTS, register_environment
from tfpolicies.envs.subprocess_adapter import make_process_environments
from tfpolicies.errors import ConfigError, EnvError

pytestmark = pytest.mark.usefixtures("kept_programs")


def config_of(source, env_config=None, *, processes=2, envs=3, **settings):
    defaults = {"rollout_fragment_length": 6, "batch_mode": "truncate_episodes", "seed": 5}
    defaults |= {"env_processes": processes, "num_envs_per_worker": envs}
    defaults |= {"train_batch_size": 6 * envs, "env_config": env_config or {}}
    return make_config(source, PGConfig, **{"log_level": "WARN", **defaults, **settings})


def make_worker(*args, **kwargs):
    return RolloutWorker(config=config_of(*args, **kwargs), default_policy_class=PGTF2Policy)


@pytest.fixture
def worker_for():
    """`make_worker`, whose workers are stopped after the test."""
    workers = []

    def make(*args, **kwargs):
        workers.append(make_worker(*args, **kwargs))
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()


def sample(worker, count):
    return [worker.sample() for _ in range(count)]


def process_ids(worker):
    return sorted({env.process_id() for env in worker.environments.get_sub_environments()})


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("source", [SeededEnv, NestedActions])
def test_rows_are_those_of_environments_in_the_process_of_the_worker(worker_for, source, mode):
    batches = {}
    for processes in (0, 1, 2, 5):
        worker = worker_for(source, processes=processes, envs=5, batch_mode=mode)
        batches[processes] = [worker.sample() for _ in range(3)], worker.get_metrics()

    expected, episodes = batches.pop(0)
    assert len(episodes) >= 5
    for samples, metrics in batches.values():
        assert [x.episode_reward for x in metrics] == [x.episode_reward for x in episodes]
        for actual, other in zip(samples, expected, strict=True):
            assert actual.keys() == other.keys()
            for name in other:
                columns = (tf.nest.flatten(batch[name]) for batch in (actual, other))
                for x, y in zip(*columns, strict=True):
                    assert x.dtype == y.dtype, name
                    np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.core
def test_a_name_with_a_vector_implementation_gives_the_rows_of_single_environments():
    context = EnvContext({})
    here = make_environments(lambda env_config: gym.make("CartPole-v1"), 4, context)
    there = make_process_environments("CartPole-v1", 4, 2, context)
    seeds = [3, 4, 5, 6]
    np.testing.assert_array_equal(there.reset(seeds), here.reset(seeds))
    ends = 0
    for t in range(60):
        actions = np.array([0, 1, t % 2, 0])
        actual, expected = there.step(actions), here.step(actions)
        np.testing.assert_array_equal(actual.obs, expected.obs)
        np.testing.assert_array_equal(actual.terminateds, expected.terminateds)
        assert (actual.final_obs is None) == (expected.final_obs is None)
        if actual.final_obs is not None:
            ends += len(actual.final_obs[0])
            for x, y in zip(actual.final_obs, expected.final_obs, strict=True):
                np.testing.assert_array_equal(x, y)
    assert ends > 5
    there.close()


def test_returned_observations_stay_unchanged():
    envs = make_process_environments(SeededEnv, 2, 2, EnvContext({}))
    first = envs.reset([1, 2])
    before = first.copy()
    step = envs.step(np.zeros(2, np.int64))
    after = step.obs.copy()
    envs.step(np.ones(2, np.int64))
    np.testing.assert_array_equal(first, before)
    np.testing.assert_array_equal(step.obs, after)
    assert step.rewards.tolist() == [0.0, 0.0]
    envs.close()


def test_every_way_to_name_an_environment_works():
    offset = 3.0

    class Inner(NeedsC):
        pass

    actions = np.zeros(2, np.int64)
    register_environment("needs-c", lambda context: NeedsC(1, context["c"]))
    gym.register("NeedsC-v0", entry_point=NeedsC)
    try:
        for source, settings, expected in (
            (NeedsC, {"a": 1, "c": 0.5}, 0.5),
            ("helpers.process_envs:NeedsC", {"a": 1, "c": 0.25}, 0.25),
            (lambda env_config: NeedsC(1, offset), {}, 3.0),
            (Inner, {"a": 1, "c": 0.5}, 0.5),
            ("needs-c", {"c": 0.75}, 0.75),
            ("NeedsC-v0", {"a": 1, "c": 0.5}, 0.5),
        ):
            envs = make_process_environments(source, 2, 2, EnvContext(settings))
            envs.reset(None)
            assert envs.step(actions).final_obs[1].tolist() == [[expected]] * 2, source
            envs.close()
    finally:
        del ENVIRONMENTS["needs-c"], gym.registry["NeedsC-v0"]


def make_vector(context):
    return counting_vector(AutoresetMode.SAME_STEP)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Team, "has several agents, but env_processes supports environments with one"),
        (make_vector, "is a vector environment, so its environments cannot be spread"),
        (NeedsC(1, 1.0), "env_processes=2 makes environments in other processes"),
        ("helpers.process_envs:Absent", "could not be imported"),
        ("NoSuchEnv-v0", "No environment 'NoSuchEnv-v0' is registered"),
        (lambda context: 3, "must give a gymnasium.Env"),
        (Unlike, r"Environment 1 has the action space Discrete\(3\), but the first one"),
    ],
)
def test_environments_that_cannot_be_spread_are_refused(source, words):
    with pytest.raises(EnvError, match=words):
        make_process_environments(source, 2, 2, EnvContext({}))


def test_a_setting_that_cannot_be_sent_is_named():
    words = r"but env_config\['lock'\] = .*lock.* cannot be: TypeError"
    with pytest.raises(EnvError, match=words):
        make_process_environments(NeedsC, 2, 2, EnvContext({"c": 1, "lock": threading.Lock()}))


def test_a_creator_that_gives_none_leaves_the_worker_without_environments():
    envs = make_process_environments(lambda context: None, 2, 2, EnvContext({}), may_be_none=True)
    assert envs is None


def test_more_processes_than_environments_are_refused_with_the_number_to_write():
    config = config_of(SeededEnv, processes=16, envs=1)
    words = r"env_processes=16 is more than num_envs_per_worker=1.*num_envs_per_worker=16"
    with pytest.raises(ConfigError, match=words):
        config.validate()
    with pytest.raises(ConfigError, match=words):
        RolloutWorker(config=config, default_policy_class=PGTF2Policy)


def test_a_script_without_a_main_guard_uses_its_own_classes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import gymnasium as gym
import numpy as np
from tfpolicies.envs.env_factory import EnvContext
from tfpolicies.envs.subprocess_adapter import make_process_environments

print("script begins")
factor = 10.0

class LightError(Exception):
    pass

class Lamp(gym.Env):
    observation_space = gym.spaces.Box(-99.0, 99.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size):
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.size * factor], np.float32), {}

    def step(self, action):
        raise LightError("out")

envs = make_process_environments(Lamp, 2, 2, EnvContext({"size": 3}))
print(envs.reset(None).tolist())
try:
    envs.step(np.zeros(2, int))
except LightError as error:
    print("caught", error)
envs.close()
""")
    lines = run_python(script).stdout.splitlines()
    assert lines == ["script begins", "[[30.0], [30.0]]", "caught out"]


def test_a_process_starts_without_packages_that_take_time_to_import():
    code = "import sys, tfpolicies.envs.env_process; print(*sys.modules)"
    modules = run_python(code).stdout.split()
    assert "gymnasium" in modules
    heavy = {"cloudpickle", "importlib.metadata", "keras", "onnxruntime", "rich", "tensorflow"}
    assert heavy.intersection(modules) == set()


def test_processes_have_no_tensorflow_and_know_that_they_are_remote(worker_for):
    worker = worker_for(Faulty, {"kind": "none"})
    assert "tensorflow" in sys.modules
    assert worker.foreach_env(lambda env: env.has_tensorflow()) == [False, False, False]
    assert worker.foreach_env(lambda env: env.is_remote) == [True, True, True]
    assert worker.foreach_env(lambda env: env.number) == [0, 1, 2]
    assert len(process_ids(worker)) == 2


RESTART = {"restart_failed_sub_environments": True}
SHARED = "The process of environments 0 to 1 of worker 0 has ended in `step` of environment 1"
FAULTS = {
    "raise": (ZeroDivisionError, "the wheel came off"),
    "own error": (EnvError, "WheelError: 3 wheels came off on the left"),
    "exit": (EnvError, r"`step\(.\)` of environment 1 of worker 0 tried to end .* SystemExit\(2\)"),
    "nan": (EnvError, "observation that `step` of environment 1 of worker 0 gave is not finite"),
    "killed": (EnvError, rf"{SHARED}: SIGKILL\. .* memory runs out"),
    "crash": (EnvError, rf"{SHARED}: SIGSEGV\."),
    "hang": (EnvError, rf"{SHARED}: it hung for .* env_step_timeout_s=0.4"),
    "native hang": (EnvError, rf"{SHARED}: it hung for .* env_step_timeout_s=0.4"),
    "slow": (EnvError, "`step` of environment 1 of worker 0 took 0.* env_step_timeout_s=0.4"),
    "unsendable info": (EnvError, "An info of environments 0 to 1 cannot be sent"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_an_error_that_names_the_environment(worker_for, kind, caplog):
    limit = 0.4 if "hang" in kind or kind == "slow" else None
    worker = worker_for(Faulty, {"kind": kind}, env_step_timeout_s=limit)
    error_class, words = FAULTS[kind]
    with pytest.raises(error_class, match=words) as raised:
        sample(worker, 3)

    notes = " ".join(getattr(raised.value, "__notes__", ()))
    if kind != "unsendable info":
        assert "nvironment 1" in f"{raised.value} {notes}"
    if kind in ("raise", "own error"):
        assert "process_envs.py" in str(raised.value.__cause__)
        assert "failed in step(" in notes
    if kind in ("hang", "native hang", "crash"):
        assert "process_envs.py" in caplog.text  # the line where it was


@pytest.mark.parametrize("kind", ["raise", "own error", "nan", "exit", "slow"])
def test_sampling_continues_without_the_episode_of_a_broken_environment(worker_for, kind, tmp_path):
    faults = {**RESTART, "env_step_timeout_s": 0.4 if kind == "slow" else None}
    config = {"kind": kind, "place": str(tmp_path)}
    counts = {}
    for processes in (0, 2):
        (tmp_path / "happened").unlink(missing_ok=True)
        worker = worker_for(Faulty, config, processes=processes, **faults)
        batches = [worker.sample() for _ in range(3)]
        metrics = worker.get_metrics()
        rows = np.concatenate([batch["obs"] for batch in batches]).tolist()
        counts[processes] = sum(x.episode_faulty for x in metrics), len(metrics), rows

    assert counts[0][0] == (2 if kind == "nan" else 1)
    assert counts[2] == counts[0]


@pytest.mark.parametrize("kind", ["killed", "hang"])
def test_another_process_takes_the_place_of_one_that_ended(worker_for, kind, tmp_path, caplog):
    faults = {**RESTART, "env_step_timeout_s": 0.4 if kind == "hang" else None}
    worker = worker_for(Faulty, {"kind": kind, "place": str(tmp_path)}, **faults)
    before = process_ids(worker)
    batches = [worker.sample() for _ in range(4)]
    after = process_ids(worker)
    assert [batch.count for batch in batches] == [18] * 4
    metrics = worker.get_metrics()
    assert sum(x.episode_faulty for x in metrics) == 2  # of both environments of the process
    assert all(x.episode_length == 4 for x in metrics if not x.episode_faulty)
    assert len(set(before) & set(after)) == 1
    assert "Environment 1 of worker 0 is re-created" in caplog.text


def test_a_process_that_keeps_ending_is_an_error_at_the_limit(worker_for):
    faults = {**RESTART, "max_num_sub_environment_restarts": 2}
    worker = worker_for(Faulty, {"kind": "killed", "episode": 0}, processes=3, **faults)
    with pytest.raises(EnvError, match=r"failed 3 times without a whole episode") as raised:
        sample(worker, 20)
    assert "nvironment 1" in str(raised.value)


def test_a_missing_argument_is_named_as_in_one_process():
    for make in (
        lambda: make_environments(NeedsC, 2, EnvContext({"a": 1})),
        lambda: make_process_environments(NeedsC, 2, 2, EnvContext({"a": 1})),
    ):
        with pytest.raises(EnvError, match="missing a required argument: 'c'") as raised:
            make()
        assert "cannot be called with env_config={'a': 1}" in str(raised.value)


def test_a_constructor_that_fails_is_reported_with_its_process():
    with pytest.raises(ConnectionError, match="no simulator at port 2000") as raised:
        make_process_environments(Faulty, 4, 2, EnvContext({"kind": "constructor", "faulty": 3}))
    assert "environments 2 to 3 of worker 0" in " ".join(raised.value.__notes__)
    assert "process_envs.py" in str(raised.value.__cause__)


def test_after_an_error_the_answers_belong_to_the_requests_again(worker_for):
    worker = worker_for(Faulty, {"kind": "raise", "faulty": 0}, processes=3)
    with pytest.raises(ZeroDivisionError):
        sample(worker, 3)
    batch = worker.sample()
    assert batch["obs"][::6].tolist() == [[number, 2, 0] for number in (0, 1, 2)]


def test_answers_of_an_interrupted_step_are_dropped(monkeypatch):
    envs = make_process_environments(Faulty, 3, 3, EnvContext({"kind": "none"}))
    envs.reset(None)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(envs, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.zeros(3, np.int64))

    assert envs.reset(None).tolist() == [[0, 1, 0], [1, 1, 0], [2, 1, 0]]
    assert envs.step(np.zeros(3, np.int64)).obs.tolist() == [[0, 1, 1], [1, 1, 1], [2, 1, 1]]
    envs.close()


def test_records_of_the_processes_reach_the_loggers_of_the_worker(worker_for, caplog):
    worker = worker_for(Faulty, {"kind": "log"})
    for _ in range(2):
        worker.sample()

    assert ("world", logging.WARNING, "rain in world 1") in caplog.record_tuples


def test_the_check_before_training_plays_in_a_process():
    class Late(NeedsC):
        def __init__(self):
            super().__init__(0, 2.0)  # outside of its space

        def step(self, action):
            return np.full(1, 0.5, np.float32), "much", True, False, {}

    with pytest.raises(EnvError, match=r"much.*It was found by playing 3 steps before training"):
        config_of(Late, envs=2).build()


def test_environments_are_read_set_and_called_where_they_are(worker_for):
    worker = worker_for(Faulty, {"kind": "none"})
    first = worker.env
    first.set_task(7)
    first.unwrapped.task += 1
    assert worker.foreach_env(lambda env: env.get_task()) == [8, 0, 0]
    assert not hasattr(first, "no_such_attribute")
    assert repr(first) == "<environment 0 in another process>"
    with pytest.raises(EnvError, match="The value of lock of an environment cannot be sent"):
        first.lock  # noqa: B018


def test_a_curriculum_sets_tasks_in_the_processes():
    def get_task(result, env, context):
        return 10 + context.vector_index

    algorithm = config_of(Faulty, {"kind": "none"}, env_task_fn=get_task).build()
    algorithm.train()
    assert algorithm.workers.foreach_env(lambda env: env.get_task()) == [[10, 11, 12]]
    algorithm.stop()


def test_a_restored_run_has_its_processes_and_continues_its_episodes(tmp_path):
    numbers = {}
    for processes in (0, 2):
        settings = {"processes": processes, "rollout_fragment_length": 5}
        algorithm = config_of(SavedCountingEnv, **settings).build()
        algorithm.train()
        path = algorithm.save(tmp_path / f"{processes}")
        after = algorithm.train()
        algorithm.stop()
        again = Algorithm.from_checkpoint(path, config={"env": SavedCountingEnv})
        assert again.config.env_processes == processes
        result = again.train()
        numbers[processes] = after["episode_reward_mean"], result["episode_reward_mean"]
        again.stop()

    assert numbers[0] == numbers[2]
    assert numbers[2][0] == numbers[2][1]


def test_an_evaluation_has_as_many_processes_as_episodes_at_most():
    settings = {"processes": 3, "evaluation_duration": 2}
    algorithm = config_of(Faulty, {"kind": "none"}, **settings).build()
    result = algorithm.evaluate()
    workers = algorithm.evaluation_workers.local_worker()
    assert workers.config.env_processes == 2
    assert len(process_ids(workers)) == 2
    assert result["evaluation"]["episode_reward_mean"] == 4.0
    algorithm.stop()


def test_the_command_line_takes_the_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "helpers.process_envs:NeedsC", "--algo", "PG"]
    words += ["--steps", "20", "--num-envs", "2"]
    settings = ["env_processes=2", "train_batch_size=20", "rollout_fragment_length=10"]
    settings += ["env_config.a=1", "model.fcnet_hiddens=[4]", "jit_compile=False", "inference=tf"]
    words += [word for setting in settings for word in ("--set", setting)]
    status = main([*words, "--set", "env_config.c=0.5"])
    assert status == 0, capsys.readouterr().err
    assert main(words) == 2
    assert "missing a required argument: 'c'" in capsys.readouterr().err


def test_stopping_a_worker_ends_its_processes_and_their_children(worker_for):
    worker = worker_for(Faulty, {"kind": "none"})
    others = worker.foreach_env(lambda env: env.start_another_process())
    processes = [*process_ids(worker), *others]
    assert all(map(is_running, processes))
    worker.stop()
    worker.stop()
    assert wait_until(lambda: not any(map(is_running, processes)))


def test_environments_that_are_not_closed_end_with_their_last_reference():
    worker = make_worker(Faulty, {"kind": "none"})
    processes = process_ids(worker)
    worker.environments = worker.sampler = None
    gc.collect()
    assert wait_until(lambda: not any(map(is_running, processes)))


PARENT = """
import sys, threading, time
import numpy as np
from helpers.process_envs import Faulty
from tfpolicies.envs.env_factory import EnvContext
from tfpolicies.envs.subprocess_adapter import make_process_environments

envs = make_process_environments(Faulty, 3, 3, EnvContext({"kind": sys.argv[1]}))
envs.reset(None)
parts = envs.get_sub_environments()
pids = [part.process_id() for part in parts] + [part.start_another_process() for part in parts]
print(*pids, flush=True)
if sys.argv[2] == "end":
    sys.exit()
if sys.argv[2] == "raise":
    raise ZeroDivisionError
while True:
    envs.step(np.zeros(3, np.int64))
"""


def shared_files():
    """Returns the files of shared memory; semaphores belong to tests in parallel."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


KILLED = [(kind, "kill") for kind in ("none", "hang", "native hang")]


@pytest.mark.parametrize(("kind", "end"), [*KILLED, ("none", "end"), ("none", "raise")])
def test_nothing_remains_when_the_process_of_the_worker_ends(kind, end):
    files = shared_files()
    path = os.pathsep.join([str(HOME), str(Path(__file__).parents[1])])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind, end],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 6
        if end == "kill":
            time.sleep(0.5)  # in the midst of steps, or of a call that hangs
            assert all(map(is_running, pids))
            os.kill(parent.pid, signal.SIGKILL)
        assert parent.wait(60) == {"kill": -9, "end": 0, "raise": 1}[end]

    assert wait_until(lambda: not any(map(is_running, pids)))
    assert shared_files() - files == set()


@pytest.mark.ray
def test_each_ray_worker_has_its_own_processes(ray_cluster):
    settings = {"num_rollout_workers": 2, "envs": 2, "num_cpus_per_worker": 0}
    algorithm = config_of(Faulty, {"kind": "none"}, **settings).build()
    result = algorithm.train()
    pairs = algorithm.workers.foreach_env(lambda env: env.process_id())
    processes = {pid for pair in pairs for pid in pair}
    assert result["episode_reward_mean"] == 4.0
    assert len(processes) == 4
    algorithm.stop()
    assert wait_until(lambda: not any(map(is_running, processes)))
