"""Environments that raise, return wrong values or hang: the errors, and how sampling continues."""

import logging
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from helpers.workers import make_worker
from tfpolicies import DefaultCallbacks, MultiAgentEnv
from tfpolicies.envs.fault_tolerance import EnvSupervisor
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import EnvError
from tfpolicies.rollout.evaluation import play

BAD_OBSERVATIONS = {
    "shape": np.zeros(3, np.float32),
    "nan": np.array([0.0, np.nan], np.float32),
    "infinite": np.array([np.inf, 0.0], np.float32),
    "none": None,
    "ragged": [[0.0], [1.0, 2.0]],
}


class Breaking(gym.Env):
    """Episodes of 4 steps, observing (environment, step); one of the first lives breaks once.

    `kind` says how, in step 3 of the second episode of environment 1 (or in its second reset).
    """

    observation_space = spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    instances = []

    def __init__(self, config):
        self.kind, self.number = config["kind"], config.vector_index
        self.always = config.get("always", False)
        self.life = sum(env.number == self.number for env in self.instances)
        self.instances.append(self)
        self.episode, self.now, self.closed = -1, 0, False

    def breaks(self, kind):
        due = self.life == 0 and self.number == 1 and self.episode == 1
        return self.kind == kind and (due or self.always)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.now = self.episode + 1, 0
        if self.breaks("reset"):
            raise RuntimeError("no episode today")
        return self.observation(), {}

    def observation(self):
        return np.array([self.number + 10 * self.life, self.now], np.float32)

    def step(self, action):
        self.now += 1
        if self.kind == "stuck" and self.number == 0:
            raise RuntimeError("the wheel came off")
        obs, reward = self.observation(), 1.0
        if self.now == 3:
            if self.breaks("step"):
                raise RuntimeError("the wheel came off")
            if self.breaks("reward"):
                reward = float("nan")
            if self.breaks("exit"):
                sys.exit(0)
            if self.breaks("tuple"):
                return obs, reward
            if self.breaks("hang"):
                time.sleep(1.0)
            for kind, bad in BAD_OBSERVATIONS.items():
                obs = bad if self.breaks(kind) else obs
        return obs, reward, self.now == 4, False, {}

    def close(self):
        self.closed = True


class Team(MultiAgentEnv):
    """Two agents in a `Breaking` environment; kinds of its own are about agents."""

    observation_space = Breaking.observation_space
    action_space = Breaking.action_space
    _agent_ids = ("a", "b")

    def __init__(self, config):
        self.inner = Breaking(config)

    def reset(self, *, seed=None, options=None):
        obs, _ = self.inner.reset(seed=seed)
        return {"a": obs, "b": obs}, {}

    def step(self, action_dict):
        result = self.inner.step(0)
        obs, reward, over, _, _ = result if len(result) == 5 else (*result, False, False, {})
        obs_by_agent = {"a": self.inner.observation(), "b": obs}
        ends = {"__all__": over}
        if self.inner.now == 2 and self.inner.breaks("agents"):
            ends["a"] = True  # and gives an observation of it in the next step
        if self.inner.now == 3 and self.inner.breaks("flags"):
            ends = {}
        infos = {"c": {}} if self.inner.now == 3 and self.inner.breaks("infos") else {}
        return obs_by_agent, {"a": 1.0, "b": reward}, ends, {"__all__": False}, infos

    def close(self):
        self.inner.close()


class Recorder(DefaultCallbacks):
    ends, created = [], []

    def on_sub_environment_created(self, *, worker, sub_environment, env_context, env_index):
        assert env_index == env_context.vector_index
        self.created.append((sub_environment, env_index))

    def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
        self.ends.append((env_index, episode))


def vector_of(config):
    """Makes two `Breaking` environments that step together."""
    makers = [lambda n=n: Breaking(config.copy_with_overrides(vector_index=n)) for n in range(2)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture(autouse=True)
def _fresh(caplog):
    caplog.set_level(logging.WARNING, "tfpolicies")  # other tests may have left another one
    Breaking.instances, Recorder.ends, Recorder.created = [], [], []


@pytest.fixture
def worker_with():
    """Makes workers, which are stopped after the test, for environments that break by `kind`."""
    workers = []

    def make(source, kind, *, restart=True, always=False, **settings):
        defaults = {"train_batch_size": 64, "sgd_minibatch_size": 64, "callbacks": Recorder}
        defaults |= {"num_envs_per_worker": 2, "rollout_fragment_length": 6, "log_level": "WARN"}
        workers.append(
            make_worker(
                env_creator=source,
                env_config={"kind": kind, "always": always},
                restart_failed_sub_environments=restart,
                **{**defaults, **settings},
            )
        )
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()


one_or_two_agents = pytest.mark.parametrize("source", [Breaking, Team])
SINGLE = ("step", "exit", "reward", "tuple", *BAD_OBSERVATIONS)
SEVERAL = ("step", "exit", "reward", *BAD_OBSERVATIONS, "agents", "flags", "infos")
WORDS = {
    "step": "the wheel came off",
    "exit": r"`step\(.*\)` of environment 1.* tried to end the process: SystemExit\(0\)",
    "reset": "no episode today",
    "reward": "nan",
    "tuple": "must return",
    "shape": r"shape \(3,\)",
    "nan": "not finite.*nan",
    "infinite": "not finite.*inf",
    "none": r"shape \(\)",
    "ragged": r"shape \(ragged\)",
    "agents": "agent 'a'.* done before",
    "flags": "must have the key '__all__'",
    "infos": r"infos of agents without an observation: \['c'\]",
}
CASES = [(Breaking, kind) for kind in SINGLE] + [(Team, kind) for kind in SEVERAL]


@pytest.mark.core
@pytest.mark.parametrize(("source", "kind"), [*CASES, (Breaking, "reset"), (Team, "reset")])
def test_a_fault_is_an_error_that_names_it_and_the_environment(worker_with, source, kind):
    worker = worker_with(source, kind, restart=False)
    with pytest.raises((EnvError, RuntimeError), match=WORDS[kind]) as result:
        sample(worker)
    notes = " ".join(getattr(result.value, "__notes__", ["environment 1"]))
    assert "nvironment 1" in f"{result.value} {notes}"


def sample(worker, count=4):
    batches = [worker.sample().as_multi_agent()["default_policy"] for _ in range(count)]
    return batches, worker.get_metrics()


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize(("source", "kind"), CASES)
def test_a_broken_episode_is_dropped_and_sampling_continues(worker_with, source, kind, mode):
    worker = worker_with(source, kind, batch_mode=mode)
    batches, metrics = sample(worker)
    faulty = [m for m in metrics if m.episode_faulty]
    assert len(faulty) == 1
    assert [m.episode_length for m in metrics if not m.episode_faulty] == [4] * (len(metrics) - 1)
    broken = [env for env in Breaking.instances if (env.number, env.life) == (1, 0)]
    assert [env.closed for env in broken] == [True]
    assert [env.number for env in Breaking.instances] == [0, 1, 1]
    (index, error), *_ = [(i, e) for i, e in Recorder.ends if isinstance(e, Exception)]
    assert index == 1
    assert isinstance(error, RuntimeError if kind == "step" else EnvError)
    for batch in batches:
        for name in batch:
            assert np.isfinite(np.asarray(batch[name], np.float64)).all(), name
        if mode == "truncate_episodes" and source is Breaking:
            assert batch.count == 12
    rows = np.concatenate([np.column_stack([b["eps_id"], b["t"], b["obs"]]) for b in batches])
    np.testing.assert_array_equal(rows[:, 1], rows[:, 3])  # t is the step that is observed
    for episode in np.unique(rows[:, 0]):
        assert len(np.unique(rows[rows[:, 0] == episode, 2])) == 1  # all of one life


@one_or_two_agents
def test_a_reset_that_fails_is_done_again_in_a_new_environment(worker_with, source, caplog):
    worker = worker_with(source, "reset")
    batches, metrics = sample(worker)
    assert [m.episode_faulty for m in metrics] == [False] * len(metrics)
    assert [env.number for env in Breaking.instances] == [0, 1, 1]
    assert "Environment 1 of worker 0 is re-created" in caplog.text
    assert "failed in reset(seed=None): RuntimeError: no episode today" in caplog.text
    assert all(np.isfinite(batch["obs"]).all() for batch in batches)


@pytest.mark.core
def test_an_environment_may_break_any_number_of_times_and_the_rate_is_logged(caplog):
    repairs = EnvSupervisor(make=Breaking, worker_index=3)
    repairs.on_episode_done(0, episodes=7)
    for _ in range(250):
        repairs.on_failure(1, "step(0)", RuntimeError("the wheel came off"))
        repairs.on_step(1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 10 + 9 + 1  # 1 to 10, 20 to 100, and 200
    *_, last = lines
    assert last.startswith("Environment 1 of worker 3 is re-created, and its episode is dropped")
    assert last.endswith("So far there were 200 failures and 7 whole episodes.")


STUCK = "Environment 0 of worker 0 failed 200 times in a row without completing a step"
UNRESETTABLE = "Environment 0 of worker 0 was re-created 10 times"


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        *((source, "stuck", STUCK) for source in (Breaking, Team, vector_of)),
        *((source, "reset", UNRESETTABLE) for source in (Breaking, Team)),
    ],
)
def test_environments_that_never_complete_a_step_are_given_up(worker_with, source, kind, words):
    with pytest.raises(EnvError, match=words):
        worker_with(source, kind, always=True).sample()


@pytest.mark.core
@one_or_two_agents
def test_an_environment_is_given_up_where_a_limit_is_set(worker_with, source):
    worker = worker_with(source, "step", always=True, max_num_sub_environment_restarts=4)
    words = r"failed 5 times without a whole episode, and max_num_sub_environment_restarts=4; at"
    with pytest.raises(EnvError, match=words):
        sample(worker, 20)
    assert [env.number for env in Breaking.instances].count(0) == 5


@pytest.mark.core
def test_an_error_of_a_callback_about_a_new_environment_is_not_its_fault(worker_with, monkeypatch):
    worker = worker_with(Breaking, "step")

    def refuse(self, *, env_index, **kwargs):
        raise KeyError("mine")

    monkeypatch.setattr(Recorder, "on_sub_environment_created", refuse)
    with pytest.raises(KeyError, match="mine"):
        sample(worker)


def test_a_vector_environment_that_breaks_is_recreated_as_a_whole(worker_with):
    worker = worker_with(vector_of, "step")
    batches, metrics = sample(worker)
    assert sum(m.episode_faulty for m in metrics) == 2
    assert [env.number for env in Breaking.instances] == [0, 1, 0, 1]
    assert Recorder.created == [(env, env.number) for env in Breaking.instances]
    assert [batch.count for batch in batches] == [12] * 4
    Breaking.instances.clear()
    worker = worker_with(vector_of, "nan", restart=False)
    with pytest.raises(EnvError, match=r"environment 1 is not finite.*nan"):
        sample(worker)


class Places(gym.Env):
    """Observes three discrete parts, of which `wrong` leaves its space in the fourth step."""

    observation_space = spaces.Dict(
        place=spaces.Discrete(3), parts=spaces.MultiDiscrete([2, 3]), on=spaces.MultiBinary(2)
    )
    action_space = spaces.Discrete(2)

    def __init__(self, wrong):
        self.wrong, self.now = wrong, 0

    def observe(self):
        obs = {"place": 2, "parts": np.array([1, 2]), "on": np.array([0, 1], np.int8)}
        return {**obs, self.wrong: obs[self.wrong] + 1} if self.now == 4 else obs

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.observe(), {}

    def step(self, action):
        self.now += 1
        return self.observe(), 1.0, False, self.now == 6, {}


@pytest.mark.parametrize(
    ("part", "space"),
    [("place", r"Discrete\(3\)"), ("parts", r"MultiDiscrete"), ("on", r"MultiBinary\(2\)")],
)
@pytest.mark.parametrize("form", ["plain", "vector", "several agents"])
def test_an_observation_outside_a_discrete_space_is_named(worker_with, part, space, form):
    sources = {
        "plain": lambda context: Places(part),
        "vector": lambda context: SyncVectorEnv([lambda: Places(part)]),
        "several agents": lambda context: make_multi_agent(lambda config: Places(part))({}),
    }
    worker = worker_with(sources[form], "none", restart=False)
    with pytest.raises(EnvError, match=rf"{part}.* is not in {space}"):
        sample(worker)


@one_or_two_agents
def test_a_step_that_takes_too_long_is_reported_while_it_lasts_and_counts_as_broken(
    worker_with, source, caplog
):
    worker = worker_with(source, "hang", env_step_timeout_s=0.4)
    with caplog.at_level(logging.ERROR):
        _, metrics = sample(worker)
    assert sum(m.episode_faulty for m in metrics) == 1
    assert "`step` of environment 1 of worker 0 hangs for " in caplog.text
    assert "time.sleep(1.0)" in caplog.text
    assert worker.watchdog.status() is None
    Breaking.instances.clear()
    strict = worker_with(source, "hang", restart=False, env_step_timeout_s=0.4)
    with pytest.raises(EnvError, match=r"took \d+\.\d seconds; env_step_timeout_s=0.4"):
        sample(strict)


@pytest.mark.core
@pytest.mark.parametrize(("source", "agents"), [(Breaking, 1), (Team, 2)])
@pytest.mark.parametrize("by_episodes", [True, False])
def test_an_evaluation_counts_no_steps_of_broken_episodes(worker_with, source, agents, by_episodes):
    worker = worker_with(source, "step")
    played = play(worker, 6 if by_episodes else 24, by_episodes=by_episodes)
    assert [episode.episode_faulty for episode in played.episodes].count(True) == 1
    assert played.get_amount(by_episodes=True) == 6
    assert played.get_amount(by_episodes=False) == 24  # an episode has 4
    assert played.agent_steps == 24 * agents


@pytest.mark.core
def test_an_observation_fn_is_called_once_for_each_observation_where_copies_may_break(worker_with):
    calls = []

    def observation_fn(agent_obs, episode, **kwargs):
        calls.append((episode.env_index, episode.episode_id, episode.length))
        return agent_obs

    worker = worker_with(Team, "shape", observation_fn=observation_fn)
    worker.sample()
    assert len(calls) == len(set(calls)) > 12
    assert [length for index, _, length in calls if not index] == [0, 1, 2, 3, 4, 0, 1, 2]


def test_an_error_of_an_observation_fn_is_not_a_fault_of_the_environment(worker_with):
    def observation_fn(agent_obs, episode, **kwargs):
        if episode.length == 2:
            raise KeyError("a bug of mine")
        return agent_obs

    worker = worker_with(Team, "no kind", observation_fn=observation_fn)
    with pytest.raises(KeyError, match="a bug of mine"):
        worker.sample()
    assert len(Breaking.instances) == 2  # none was re-created
