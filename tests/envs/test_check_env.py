"""Checks of environments: `check_env`, and the trial before training."""

import logging
import random
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import CountingEnv, NestedCountingEnv
from helpers.multi_agent_envs import SPACE, Staggered
from helpers.workers import make_config, make_worker
from tfpolicies import DefaultCallbacks
from tfpolicies.compat import RandomPolicy
from tfpolicies.envs import check_env
from tfpolicies.envs.multi_agent_env import MultiAgentEnv, make_multi_agent
from tfpolicies.errors import EnvError
from tfpolicies.rollout import worker_environments
from tfpolicies.testing.environments import MaskedEnv, MemoryEnv, RandomEnv


@pytest.mark.parametrize(
    "env",
    [
        CountingEnv(),
        MaskedEnv(),
        MemoryEnv(),
        RandomEnv(
            spaces.Dict(a=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))), b=SPACE),
            spaces.MultiDiscrete([2, 3]),
        ),
        Staggered(),
        make_multi_agent("CartPole-v1")({"num_agents": 3}),
    ],
    ids=lambda env: type(env).__name__,
)
@pytest.mark.core
def test_environments_that_keep_the_contract_pass(env):
    check_env(env, steps=60, repeatable=not isinstance(env, CountingEnv | Staggered))


OBS, INFO = np.zeros(2, np.float32), {}


class Answers(gym.Env):
    """Returns the values that it was constructed with."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, reset=(OBS, INFO), step=(OBS, 0.0, False, False, INFO), **attributes):
        self.answers = reset, step
        for name, value in attributes.items():
            setattr(self, name, value)

    def reset(self, *, seed=None, options=None):
        return self.answers[0]

    def step(self, action):
        if isinstance(self.answers[1], Exception):
            raise self.answers[1]
        return self.answers[1]


def step_with(obs=OBS, reward=0.0, terminated=False, truncated=False, info=INFO):
    return {"step": (obs, reward, terminated, truncated, info)}


FAULTS = [
    ({"reset": (np.array(["a", "b"]), {})}, r"has the dtype <U1, but its space has float32"),
    ({"reset": OBS}, r"`reset` must return a pair .* got an array of shape \(2,\)"),
    ({"reset": (np.zeros(3, np.float32), {})}, r"of `reset` has the shape \(3,\).* has \(2,\)"),
    ({"step": (OBS, 0.0, False, {})}, "`step` must return .* got a tuple of 4 values"),
    (step_with(np.zeros(2)), "dtype float64, but its space has float32. Return `x.astype"),
    (step_with(np.array([0, np.nan], np.float32)), r"has a NaN at \(1,\)"),
    (step_with(np.array([0, 2], np.float32)), r"has 2.0 at \(1,\), which is not in \[-1.0, 1.0\]"),
    (step_with([0.0, 0.0]), r"must be an array: got the list \[0.0, 0.0\]"),
    (
        step_with(reward=np.float64("nan")),
        "The reward must be a finite number, got nan for the action .*zero, and for roots or log",
    ),
    (step_with(reward="1"), "The reward must be a finite number, got '1'"),
    (step_with(terminated=None), "`terminated` must be True or False, got None"),
    (step_with(info=None), "The info must be a dict, got the NoneType None"),
    ({"step": KeyError("door")}, "`step` raised KeyError for the action .*'door'"),
    ({"action_space": 3}, "`action_space` of Answers must be a gymnasium space, got the int 3"),
]


@pytest.mark.parametrize(("answers", "message"), FAULTS)
def test_a_fault_is_explained(answers, message):
    with pytest.raises(EnvError, match=message):
        check_env(Answers(**answers))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_fractions_do_not_fit_a_space_of_whole_numbers(dtype):
    space = spaces.Box(0, 255, (2,), dtype)
    halves = Answers(reset=(np.array([1.0, 0.5]), {}), observation_space=space)
    name = np.dtype(dtype).name
    with pytest.raises(EnvError, match=rf"has 0.5 at \(1,\), but its space has {name}, .* it 0"):
        check_env(halves)
    with pytest.raises(EnvError, match=r"0.5 at \(1,\).*dtype=np.float32"):  # not only a warning
        make_config(lambda config: halves).build()


def test_parts_of_nested_observations_are_named():
    env = NestedCountingEnv()
    parts = dict(env.observation_space.items())
    for space, words in (
        (
            {**parts, "step": spaces.Box(0, 255, (2,), "uint8")},
            r"part 'step', has the shape \(1,\)",
        ),
        (
            {**parts, "where": spaces.Tuple((SPACE, SPACE))},
            "'where/0', must be an array: got the int 0",
        ),
        ({"where": parts["where"]}, r"has the keys \['where', 'step'\], but its space has"),
    ):
        env.observation_space = spaces.Dict(space)
        with pytest.raises(EnvError, match=words):
            check_env(env)


class Wrong(Staggered):
    """A correct world except for changes of its steps; None replaces a part by {}."""

    def __init__(self, **changes):
        super().__init__()
        self.changes = changes

    def play(self, actions):
        names = ("obs", "rewards", "terminateds", "truncateds", "infos")
        answer = dict(zip(names, super().play(actions), strict=True))
        for name, change in self.changes.items():
            answer[name] = {} if change is None else {**answer[name], **change}
        return tuple(answer.values())


SILENT = {"obs": None, "rewards": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"terminateds": None}, r"`terminateds` .* must have the key '__all__'"),
        (
            {**SILENT, "terminateds": {"__all__": False}},
            "No agent had an observation for 100 steps",
        ),
        ({"obs": {"b": np.zeros(2)}}, r"agent 'b' in `step` has the shape \(2,\)"),
        ({"obs": {"z": OBS}}, r"'z' has an observation of `step`, but is not among the agents"),
        ({"obs": {"a": np.full(3, np.nan, np.float32)}}, "agent 'a' .* NaN"),
        ({"rewards": {"z": 1.0}}, "'z' has a reward, but is not among the agents"),
        ({"rewards": {"a": None}}, "reward of agent 'a' must be a finite number, got None"),
        ({"infos": {"b": {}}}, r"infos of agents without an observation: \['b'\]"),
        ({"terminateds": {"a": 1}}, r"`terminateds\['a'\]` must be True or False, got 1"),
        ({"terminateds": {"a": True}}, "Agent 'a' got an observation in `step` after it was done"),
        ({"truncateds": dict.fromkeys("abcd", True), "obs": {}}, "All agents are done"),
    ],
)
def test_faults_of_agents_name_them(changes, message):
    with pytest.raises(EnvError, match=message):
        check_env(Wrong(**changes))


class Walk(gym.Env):
    """Goes a random distance in each of ten steps, one part of it drawn from a given generator."""

    observation_space = spaces.Dict(place=spaces.Box(-99.0, 99.0, (1,), np.float32))
    action_space = spaces.Discrete(2)
    seeded = True
    total_steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed if self.seeded else None)
        self.place, self.steps = self.np_random.random(), 0
        return self.observe(), {}

    def observe(self):
        return {"place": np.array([self.place], np.float32)}

    def move(self, action):
        return int(action) + self.np_random.random()

    def pay(self):
        return self.place

    def step(self, action):
        self.place += self.move(action)
        self.steps += 1
        return self.observe(), self.pay(), self.steps == 10, False, {}


class Unseeded(Walk):
    """Forgets the seed of `reset`."""

    seeded = False


class GlobalNoise(Walk):
    """Draws from the generator of the process."""

    def move(self, action):
        return int(action) + np.random.rand()


class Tired(Walk):
    """Pays less in later episodes."""

    def pay(self):
        self.total_steps += 1
        return -float(self.total_steps)


class LateNoise(Walk):
    """Draws from the generator of the process in its last step."""

    def move(self, action):
        return np.random.rand() if self.steps == 9 else 1.0


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Unseeded, r"repeatable with seed=0 and the same actions. The observation of `reset` was"),
        (GlobalNoise, r"The observation in step 1 was .*place.*super\(\).*`self.np_random`"),
        (Tired, r"not repeatable.*The reward in step 1 was -1.0, then -61.0. Begin `reset`"),
        (LateNoise, r"The observation in step 10 was.*give repeatable=False"),
    ],
)
def test_results_must_be_the_same_for_the_same_seed(env, message):
    check_env(Walk(), steps=60)
    with pytest.raises(EnvError, match=f"(?s){message}"):
        check_env(env(), steps=60)
    check_env(env(), steps=60, repeatable=False)


class Flock(MultiAgentEnv):
    """Agents walk at random; which ones appear may depend on the generator of the process."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    _agent_ids = ("a", "b")

    def __init__(self, fault=""):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self):
        generator = np.random if self.fault == "obs" else self.np_random
        return {agent: generator.random(1).astype(np.float32) for agent in "ab"}

    def step(self, actions):
        self.steps += 1
        noise = np.random.rand() if self.fault == "rewards" else 0.0
        rewards = {"a": float(self.np_random.random()), "b": noise}
        ended = {"__all__": self.steps == 30}
        return self.observe(), rewards, ended, {"__all__": False}, {}


def test_agents_results_must_be_the_same_for_the_same_seed():
    check_env(Flock())
    with pytest.raises(
        EnvError, match=r"repeatable with seed=0.*The observation of agent 'a' of `reset` was"
    ):
        check_env(Flock("obs"))
    with pytest.raises(EnvError, match=r"not repeatable.*The reward of agent 'b' in step 1 was"):
        check_env(Flock("rewards"))


def test_the_first_20_steps_are_repeated(monkeypatch):
    env = Flock()
    monkeypatch.setattr(env, "reset", Mock(wraps=env.reset))
    monkeypatch.setattr(env, "step", Mock(wraps=env.step))
    check_env(env, steps=25, seed=7)
    assert [call.kwargs["seed"] for call in env.reset.call_args_list] == [7, 7]
    played = [call.args[0] for call in env.step.call_args_list]
    assert len(played) == 45
    assert played[25:] == played[:20]


def test_a_class_is_refused():
    with pytest.raises(EnvError, match=r"check_env takes a gymnasium.Env.* got type"):
        check_env(CountingEnv)


class Noted(CountingEnv):
    """Records its instances; draws from the generators of the process, as some environments do."""

    instances: list[CountingEnv] = []

    def __init__(self, context):
        super().__init__()
        self.instances.append(self)

    def step(self, action):
        random.random(), np.random.rand()
        return super().step(action)


class Outgrown(Noted):
    """Leaves its observation space in the second step."""

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)


class Recorder(DefaultCallbacks):
    created: list[CountingEnv] = []

    def on_sub_environment_created(self, *, worker, sub_environment, env_context, **kwargs):
        self.created.append(sub_environment)


@pytest.fixture
def instances():
    Noted.instances.clear()
    Recorder.created.clear()
    return Noted.instances


def build(env, **settings):
    return make_config(env, train_batch_size=128, callbacks=Recorder, **settings).build()


def test_building_plays_a_separate_environment_and_changes_nothing(instances):
    CountingEnv.action_space.seed(5)
    expected = [CountingEnv.action_space.sample() for _ in range(3)]
    CountingEnv.action_space.seed(5)
    random.seed(3), np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    algorithm = build(Noted)
    trained, checked = instances
    assert (trained.actions, trained.closed) == ([], 0)
    assert (len(checked.actions), checked.closed) == (3, 1)
    assert Recorder.created == [trained]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert [CountingEnv.action_space.sample() for _ in range(3)] == expected
    algorithm.stop()


class Cut(Noted):
    """Shows less than its space says in the second step."""

    def step(self, action):
        obs, *rest = super().step(action)
        return (obs if len(self.actions) < 2 else obs[:2]), *rest


def test_building_names_a_fault_of_an_environment(instances):
    with pytest.raises(EnvError, match=r"has the shape \(2,\).*disable_env_checking=True\) skips"):
        build(Cut)
    assert [env.closed for env in instances] == [1, 1]


class Wide(Noted):
    """Gives float64 where its space has float32."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs.astype(np.float64), *rest


@pytest.mark.parametrize(
    ("env", "text"), [(Outgrown, "has 2.0 at (2,)"), (Wide, "has the dtype float64")]
)
def test_building_warns_of_observations_that_sampling_accepts(instances, caplog, env, text):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        algorithm = build(env, log_level="WARN")
    assert [message for message in caplog.messages if text in message]
    assert algorithm.train()["num_env_steps_sampled"] == 128


class Excused(Outgrown):
    """Asks not to be checked, as RLlib's examples do."""

    _skip_env_checking = True


def test_an_environment_may_ask_not_to_be_checked(instances):
    build(Excused)
    assert [env.actions for env in instances] == [[], []]


def test_building_names_the_agent_of_a_fault():
    with pytest.raises(EnvError, match=r"The reward of agent 'a' must be a finite number"):
        build(lambda context: Wrong(rewards={"a": "much"}))


NAN_IN_TRAINING = [
    (lambda context: Answers(**step_with(reward=np.nan)), r"got nan for the action [01]\. Look"),
    (
        lambda context: gym.vector.SyncVectorEnv([lambda: Answers(**step_with(reward=np.inf))]),
        r"got inf for the action (np\.int64\()?[01]\)?\. Look for divisions by zero",
    ),
    (
        lambda context: Wrong(rewards={"a": np.nan}),
        r"agent 'a' is nan\. Look for .* The actions were {'a': [012], 'b': [012]}\.",
    ),
]


@pytest.mark.parametrize(("env", "message"), NAN_IN_TRAINING, ids=["plain", "vector", "agents"])
def test_training_names_the_action_of_a_reward_that_is_not_finite(instances, env, message):
    algorithm = build(env, disable_env_checking=True)
    with pytest.raises(EnvError, match=message):
        algorithm.train()


EXPECTING = ["restart_failed_sub_environments", "recreate_failed_workers", "env_step_timeout_s"]


@pytest.mark.parametrize("name", ["disable_env_checking", *EXPECTING])
def test_where_faults_are_expected_building_makes_no_check(instances, name):
    build(Outgrown, **{name: 60.0 if name == "env_step_timeout_s" else True})
    assert len(instances) == 1


def test_an_environment_that_takes_long_to_make_is_made_once(instances, monkeypatch):
    monkeypatch.setattr(worker_environments, "_MAX_CREATION_SECONDS", 0.0)
    build(Outgrown)
    assert len(instances) == 1


@pytest.mark.parametrize(
    "env",
    [Outgrown({}), lambda context: gym.vector.SyncVectorEnv([lambda: Outgrown({})])],
    ids=["an instance", "a vector environment"],
)
def test_an_environment_of_which_there_is_one_is_not_played(instances, env):
    build(env)
    assert all(env.actions == [] for env in instances)


class Parametric(gym.Env):
    """Allows one action of three, which its observation names under a key, next to other parts."""

    action_space = spaces.Discrete(3)

    def __init__(self, key):
        self.key = key
        mask = spaces.MultiBinary(3) if key == "valid" else spaces.Box(0, 1, (3,), np.int8)
        self.observation_space = spaces.Dict({key: mask, "a": SPACE, "b": SPACE})

    def _observe(self):
        self.allowed = (getattr(self, "allowed", 0) + 1) % 3
        mask = np.eye(3, dtype=np.int8)[self.allowed]
        return {self.key: mask, "a": SPACE.sample(), "b": SPACE.sample()}

    def reset(self, *, seed=None, options=None):
        return self._observe(), {}

    def step(self, action):
        if action != self.allowed:
            raise ValueError("forbidden")
        return self._observe(), 0.0, False, False, {}


@pytest.mark.core
def test_a_mask_is_respected_under_a_configured_key():
    check_env(Parametric("action_mask"), steps=20, repeatable=False)
    check_env(Parametric("valid"), steps=20, action_mask_key="valid", repeatable=False)
    with pytest.raises(EnvError, match="forbidden"):
        check_env(Parametric("valid"), steps=20)
    model = {"custom_model": lambda observation_space, num_outputs: None}
    worker = make_worker(
        lambda context: Parametric("valid"), RandomPolicy, action_mask_key="valid", model=model
    )
    worker_environments.check_environment(worker)
