"""Environments that raise, return garbage or hang: what a user sees, and how sampling goes on."""

import logging
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tfpolicies import DefaultCallbacks, MultiAgentEnv, PPOConfig, PPOTF2Policy, RolloutWorker
from tfpolicies.envs.fault_tolerance import EnvSupervisor
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import EnvError
from tfpolicies.rollout.evaluation import play

GOOD = np.zeros(2, np.float32)
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
    made = []

    def __init__(self, config):
        self.kind, self.number = config["kind"], config.vector_index
        self.always = config.get("always", False)
        self.life = sum(env.number == self.number for env in self.made)
        self.made.append(self)
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
        seen = {"a": self.inner.observation(), "b": obs}
        ends = {"__all__": over}
        if self.inner.now == 2 and self.inner.breaks("agents"):
            ends["a"] = True  # and gives an observation of it in the next step
        if self.inner.now == 3 and self.inner.breaks("flags"):
            ends = {}
        infos = {"c": {}} if self.inner.now == 3 and self.inner.breaks("infos") else {}
        return seen, {"a": 1.0, "b": reward}, ends, {"__all__": False}, infos

    def close(self):
        self.inner.close()


class Noting(DefaultCallbacks):
    ends, created = [], []

    def on_sub_environment_created(self, *, worker, sub_environment, env_context, env_index):
        assert env_index == env_context.vector_index
        self.created.append((sub_environment, env_index))

    def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
        self.ends.append((env_index, episode))


def vector_of(config):
    def made(number):
        return lambda: Breaking(config.copy_with_overrides(vector_index=number))

    return SyncVectorEnv([made(0), made(1)], autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.fixture(autouse=True)
def _fresh(caplog):
    caplog.set_level(logging.WARNING, "tfpolicies")  # other tests may have left another one
    Breaking.made, Noting.ends, Noting.created = [], [], []


def worker_of(
    source,
    kind,
    *,
    restart=True,
    mode="truncate_episodes",
    always=False,
    observation_fn=None,
    **settings,
):
    config = (
        PPOConfig()
        .environment(env_config={"kind": kind, "always": always})
        .framework("tf2", inference="tf", jit_compile=False)
        .training(model={"fcnet_hiddens": [4]}, train_batch_size=64, sgd_minibatch_size=64)
        .rollouts(num_envs_per_worker=2, rollout_fragment_length=6, batch_mode=mode)
        .fault_tolerance(restart_failed_sub_environments=restart, **settings)
        .multi_agent(observation_fn=observation_fn)
        .callbacks(Noting)
        .debugging(seed=0)
    )
    return RolloutWorker(env_creator=source, config=config, default_policy_class=PPOTF2Policy)


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
def test_what_breaks_is_an_error_that_says_what_and_which(source, kind):
    worker = worker_of(source, kind, restart=False)
    with pytest.raises((EnvError, RuntimeError), match=WORDS[kind]) as result:
        sampled(worker)
    notes = " ".join(getattr(result.value, "__notes__", ["environment 1"]))
    assert "nvironment 1" in f"{result.value} {notes}"
    worker.stop()


def sampled(worker, count=4):
    parts = [worker.sample().as_multi_agent().policy_batches for _ in range(count)]
    return [part["default_policy"] for part in parts], worker.get_metrics()


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize(("source", "kind"), CASES)
def test_a_broken_episode_is_dropped_and_sampling_goes_on(source, kind, mode):
    worker = worker_of(source, kind, mode=mode)
    batches, metrics = sampled(worker)
    faulty = [m for m in metrics if m.episode_faulty]
    assert len(faulty) == 1
    assert [m.episode_length for m in metrics if not m.episode_faulty] == [4] * (len(metrics) - 1)
    broken = [env for env in Breaking.made if (env.number, env.life) == (1, 0)]
    assert [env.closed for env in broken] == [True]
    assert [env.number for env in Breaking.made] == [0, 1, 1]
    (index, error), *_ = [(i, e) for i, e in Noting.ends if isinstance(e, Exception)]
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
    worker.stop()


@pytest.mark.parametrize("source", [Breaking, Team])
def test_a_reset_that_fails_is_done_again_in_a_new_environment(source, caplog):
    worker = worker_of(source, "reset")
    batches, metrics = sampled(worker)
    assert [m.episode_faulty for m in metrics] == [False] * len(metrics)
    assert [env.number for env in Breaking.made] == [0, 1, 1]
    assert "Environment 1 of worker 0 is re-created" in caplog.text
    assert "failed in reset(seed=None): RuntimeError: no episode today" in caplog.text
    assert all(np.isfinite(batch["obs"]).all() for batch in batches)
    worker.stop()


@pytest.mark.core
def test_an_environment_may_break_any_number_of_times_and_the_rate_is_told(caplog):
    repairs = EnvSupervisor(make=Breaking, worker_index=3)
    repairs.on_episode_done(0, episodes=7)
    for _ in range(250):
        repairs.on_failure(1, "step(0)", RuntimeError("the wheel came off"))
        repairs.on_step(1)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 10 + 9 + 1  # 1 to 10, 20 to 100, and 200
    assert lines[-1].startswith(
        "Environment 1 of worker 3 is re-created, and its episode is dropped"
    )
    assert lines[-1].endswith("So far there were 200 failures and 7 whole episodes.")


class Stuck(Breaking):
    """Environment 0 breaks in every step, the other one in no step."""

    def step(self, action):
        if self.number == 0:
            raise RuntimeError("the wheel came off")
        return super().step(action)


class StuckTeam(Team):
    def step(self, action_dict):
        if self.inner.number == 0:
            raise RuntimeError("the wheel came off")
        return super().step(action_dict)


def stuck_vector(config):
    return SyncVectorEnv([lambda: Stuck(config)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("source", [Stuck, StuckTeam, stuck_vector])
def test_an_environment_that_never_completes_a_step_is_given_up(source):
    worker = worker_of(source, "none of these")
    words = "Environment 0 of worker 0 failed 200 times in a row without completing a step"
    with pytest.raises(EnvError, match=words):
        worker.sample()
    worker.stop()


@pytest.mark.core
@pytest.mark.parametrize("source", [Breaking, Team])
def test_an_environment_is_given_up_where_a_limit_is_set(source):
    worker = worker_of(source, "step", always=True, max_num_sub_environment_restarts=4)
    words = r"failed 5 times without a whole episode, and max_num_sub_environment_restarts=4; at"
    with pytest.raises(EnvError, match=words):
        sampled(worker, 20)
    worker.stop()
    assert [env.number for env in Breaking.made].count(0) == 5


@pytest.mark.core
def test_what_a_callback_raises_about_a_new_environment_is_no_break_of_it(monkeypatch):
    worker = worker_of(Breaking, "step")

    def refuse(self, *, env_index, **kwargs):
        raise KeyError("mine")

    monkeypatch.setattr(Noting, "on_sub_environment_created", refuse)
    with pytest.raises(KeyError, match="mine"):
        sampled(worker)
    worker.stop()


@pytest.mark.parametrize("source", [Breaking, Team])
def test_environments_of_which_none_can_be_reset_are_given_up(source):
    worker = worker_of(source, "reset", always=True)
    with pytest.raises(EnvError, match="Environment 0 of worker 0 was re-created 10 times"):
        worker.sample()
    worker.stop()


def test_a_vector_environment_that_breaks_is_made_anew_as_a_whole():
    worker = worker_of(vector_of, "step")
    batches, metrics = sampled(worker)
    assert sum(m.episode_faulty for m in metrics) == 2
    assert [env.number for env in Breaking.made] == [0, 1, 0, 1]
    assert Noting.created == [(env, env.number) for env in Breaking.made]
    assert [batch.count for batch in batches] == [12] * 4
    worker.stop()
    Breaking.made.clear()
    worker = worker_of(vector_of, "nan", restart=False)
    with pytest.raises(EnvError, match=r"environment 1 is not finite.*nan"):
        sampled(worker)
    worker.stop()


class Places(gym.Env):
    """Shows a place out of three; the fourth step gives the number 3."""

    observation_space = spaces.Dict(
        place=spaces.Discrete(3), parts=spaces.MultiDiscrete([2, 3]), on=spaces.MultiBinary(2)
    )
    action_space = spaces.Discrete(2)
    wrong = "place"

    def __init__(self, config=None):
        self.now = 0

    def seen(self):
        seen = {"place": 2, "parts": np.array([1, 2]), "on": np.array([0, 1], np.int8)}
        return {**seen, self.wrong: seen[self.wrong] + 1} if self.now == 4 else seen

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.seen(), {}

    def step(self, action):
        self.now += 1
        return self.seen(), 1.0, False, self.now == 6, {}


@pytest.mark.parametrize(
    ("part", "space"),
    [("place", r"Discrete\(3\)"), ("parts", r"MultiDiscrete"), ("on", r"MultiBinary\(2\)")],
)
@pytest.mark.parametrize("form", ["plain", "vector", "several agents"])
def test_what_is_not_in_a_discrete_space_is_named(part, space, form):
    class Wrong(Places):
        wrong = part

    sources = {
        "plain": lambda context: Wrong(),
        "vector": lambda context: SyncVectorEnv([Wrong]),
        "several agents": lambda context: make_multi_agent(lambda config: Wrong())({}),
    }
    worker = worker_of(sources[form], "none", restart=False)
    with pytest.raises(EnvError, match=rf"{part}.* is not in {space}"):
        sampled(worker)
    worker.stop()


@pytest.mark.parametrize("source", [Breaking, Team])
def test_a_step_that_takes_too_long_is_reported_while_it_lasts_and_counts_as_broken(source, caplog):
    worker = worker_of(source, "hang", env_step_timeout_s=0.4)
    with caplog.at_level(logging.ERROR):
        _, metrics = sampled(worker)
    assert sum(m.episode_faulty for m in metrics) == 1
    assert "`step` of environment 1 of worker 0 hangs for " in caplog.text
    assert "time.sleep(1.0)" in caplog.text
    assert worker.watchdog.status() is None
    worker.stop()
    Breaking.made.clear()
    strict = worker_of(source, "hang", restart=False, env_step_timeout_s=0.4)
    with pytest.raises(EnvError, match=r"took \d+\.\d seconds; env_step_timeout_s=0.4"):
        sampled(strict)
    strict.stop()


@pytest.mark.core
@pytest.mark.parametrize(("source", "agents"), [(Breaking, 1), (Team, 2)])
@pytest.mark.parametrize("by_episodes", [True, False])
def test_an_evaluation_counts_no_steps_of_broken_episodes(source, agents, by_episodes):
    worker = worker_of(source, "step")
    played = play(worker, 6 if by_episodes else 24, by_episodes=by_episodes)
    assert [episode.episode_faulty for episode in played.episodes].count(True) == 1
    assert played.get_amount(by_episodes=True) == 6
    assert played.get_amount(by_episodes=False) == 24  # an episode has 4
    assert played.agent_steps == 24 * agents


@pytest.mark.core
def test_an_observation_fn_is_called_once_for_each_observation_where_copies_may_break():
    seen = []

    def observation_fn(agent_obs, episode, **kwargs):
        seen.append((episode.env_index, episode.episode_id, episode.length))
        return agent_obs

    worker = worker_of(Team, "shape", observation_fn=observation_fn)
    worker.sample()
    assert len(seen) == len(set(seen)) > 12
    assert [length for index, _, length in seen if not index] == [0, 1, 2, 3, 4, 0, 1, 2]


def test_what_an_observation_fn_raises_is_no_fault_of_the_environment():
    def observation_fn(agent_obs, episode, **kwargs):
        if episode.length == 2:
            raise KeyError("a bug of mine")
        return agent_obs

    worker = worker_of(Team, "no kind", observation_fn=observation_fn)
    with pytest.raises(KeyError, match="a bug of mine"):
        worker.sample()
    assert len(Breaking.made) == 2  # nothing was made anew
