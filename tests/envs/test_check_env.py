"""`check_env` says what is wrong with an environment, and nothing about one that is right."""

import logging
import random

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import CountingEnv, NestedCountingEnv
from helpers.multi_agent_envs import SPACE, Staggered
from tfpolicies import DefaultCallbacks, PPOConfig, RolloutWorker
from tfpolicies.compat import RandomPolicy
from tfpolicies.envs import check_env
from tfpolicies.envs.multi_agent_env import make_multi_agent
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
    check_env(env, steps=60)


OBS, INFO = np.zeros(2, np.float32), {}


class Answers(gym.Env):
    """Answers as it is told to."""

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


def stepped(obs=OBS, reward=0.0, terminated=False, truncated=False, info=INFO):
    return {"step": (obs, reward, terminated, truncated, info)}


FAULTS = [
    ({"reset": OBS}, r"`reset` must return a pair .* got an array of shape \(2,\)"),
    ({"reset": (np.zeros(3, np.float32), {})}, r"of `reset` has the shape \(3,\).* has \(2,\)"),
    ({"step": (OBS, 0.0, False, {})}, "`step` must return .* got a tuple of 4 values"),
    (stepped(np.zeros(2)), "dtype float64, but its space has float32. Return `x.astype"),
    (stepped(np.array([0, np.nan], np.float32)), r"has a NaN at \(1,\)"),
    (stepped(np.array([0, 2], np.float32)), r"has 2.0 at \(1,\), which is not in \[-1.0, 1.0\]"),
    (stepped([0.0, 0.0]), r"must be an array: got the list \[0.0, 0.0\]"),
    (stepped(reward=float("nan")), "The reward must be a finite number, got nan"),
    (stepped(reward="1"), "The reward must be a finite number, got '1'"),
    (stepped(terminated=None), "`terminated` must be True or False, got None"),
    (stepped(info=None), "The info must be a dict, got the NoneType None"),
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
        PPOConfig().environment(lambda config: halves).build()


def test_text_in_place_of_numbers_is_explained_too():
    with pytest.raises(EnvError, match=r"has the dtype <U1, but its space has float32"):
        check_env(Answers(reset=(np.array(["a", "b"]), {})))


def test_parts_of_nested_observations_are_named():
    env = NestedCountingEnv()
    good = env.observation_space
    env.observation_space = spaces.Dict(where=good["where"], step=spaces.Box(0, 255, (2,), "uint8"))
    with pytest.raises(EnvError, match=r"part 'step', has the shape \(1,\)"):
        check_env(env)
    env.observation_space = spaces.Dict(where=spaces.Tuple((SPACE, SPACE)), step=good["step"])
    with pytest.raises(EnvError, match="part 'where/0', must be an array: got the int 0"):
        check_env(env)
    env.observation_space = spaces.Dict(where=good["where"])
    with pytest.raises(EnvError, match=r"has the keys \['where', 'step'\], but its space has"):
        check_env(env)


class Wrong(Staggered):
    """A good world but for one change of its steps."""

    def __init__(self, **changes):
        super().__init__()
        self.changes = changes

    def play(self, actions):
        names = ("obs", "rewards", "terminateds", "truncateds", "infos")
        answer = dict(zip(names, super().play(actions), strict=True))
        for name, change in self.changes.items():
            answer[name] = {**answer[name], **change}
        return tuple(answer.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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


def test_a_missing_end_for_all_is_named():
    class Endless(Staggered):
        def play(self, actions):
            obs, rewards, _, truncateds, infos = super().play(actions)
            return obs, rewards, {}, truncateds, infos

    with pytest.raises(EnvError, match=r"`terminateds` .* must have the key '__all__'"):
        check_env(Endless())


def test_a_game_in_which_nobody_can_move_is_named():
    class Stuck(Staggered):
        def play(self, actions):
            return {}, {}, {"__all__": False}, {"__all__": False}, {}

    with pytest.raises(EnvError, match="No agent had an observation for 100 steps"):
        check_env(Stuck())


def test_something_else_is_refused():
    with pytest.raises(EnvError, match=r"check_env takes a gymnasium.Env.* got type"):
        check_env(CountingEnv)


# -- before training --------------------------------------------------------------------------


class Noted(CountingEnv):
    """Notes its instances; draws from the generators that a process has, as some do."""

    made: list[CountingEnv] = []

    def __init__(self, context):
        super().__init__()
        self.made.append(self)

    def step(self, action):
        random.random(), np.random.rand()
        return super().step(action)


class Outgrown(Noted):
    """Leaves its observation space in the second step."""

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)


class Told(DefaultCallbacks):
    created: list[CountingEnv] = []

    def on_sub_environment_created(self, *, worker, sub_environment, env_context, **kwargs):
        self.created.append(sub_environment)


@pytest.fixture
def made():
    Noted.made.clear()
    Told.created.clear()
    return Noted.made


def built(env, **settings):
    config = PPOConfig().environment(env, **settings)
    config.training(model={"fcnet_hiddens": [4]}, train_batch_size=128).callbacks(Told)
    return config.framework(inference="tf", jit_compile=False).debugging(log_level="ERROR")


def test_building_plays_an_environment_of_its_own_and_changes_nothing(made):
    CountingEnv.action_space.seed(5)
    expected = [CountingEnv.action_space.sample() for _ in range(3)]
    CountingEnv.action_space.seed(5)
    random.seed(3), np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    algorithm = built(Noted).build()
    trained, checked = made
    assert (trained.actions, trained.closed) == ([], 0)
    assert (len(checked.actions), checked.closed) == (3, 1)
    assert Told.created == [trained]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert [CountingEnv.action_space.sample() for _ in range(3)] == expected
    algorithm.stop()


class Cut(Noted):
    """Shows less than its space says in the second step."""

    def step(self, action):
        obs, *rest = super().step(action)
        return (obs if len(self.actions) < 2 else obs[:2]), *rest


def test_building_names_what_is_wrong_with_an_environment(made):
    with pytest.raises(EnvError, match=r"has the shape \(2,\).*disable_env_checking=True\) skips"):
        built(Cut).build()
    assert [env.closed for env in made] == [1, 1]


class Wide(Noted):
    """Gives float64 where its space has float32."""

    def step(self, action):
        obs, *rest = super().step(action)
        return obs.astype(np.float64), *rest


@pytest.mark.parametrize(
    ("env", "text"), [(Outgrown, "has 2.0 at (2,)"), (Wide, "has the dtype float64")]
)
def test_building_warns_of_what_sampling_takes(made, caplog, env, text):
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        algorithm = built(env).debugging(log_level="WARN").build()
    assert [message for message in caplog.messages if text in message]
    assert algorithm.train()["num_env_steps_sampled"] == 128
    algorithm.stop()


class Excused(Outgrown):
    """Asks not to be checked, as RLlib's examples do."""

    _skip_env_checking = True


def test_an_environment_may_ask_not_to_be_checked(made):
    built(Excused).build().stop()
    assert [env.actions for env in made] == [[], []]


class Deaf(Staggered):
    """Gives a reward that is none."""

    def step(self, action_dict):
        obs, rewards, *rest = super().step(action_dict)
        return obs, dict.fromkeys(rewards, "much"), *rest


def test_building_names_the_agent_of_whom_something_is_wrong():
    with pytest.raises(EnvError, match=r"The reward of agent '?\w+'? must be a finite number"):
        built(lambda context: Deaf()).build()


class Masked(gym.Env):
    """Shows a mask beside more than one other part; a forbidden action is an error."""

    observation_space = spaces.Dict(
        cart=SPACE, embeddings=SPACE, action_mask=spaces.Box(0, 1, (5,), np.int8)
    )
    action_space = spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.allowed = int(self.np_random.integers(5))
        mask = np.eye(5, dtype=np.int8)[self.allowed]
        return {"cart": SPACE.sample(), "embeddings": SPACE.sample(), "action_mask": mask}, {}

    def step(self, action):
        if action != self.allowed:
            raise ValueError("forbidden")
        return self.reset()[0], 0.0, False, False, {}


def test_a_mask_beside_any_other_parts_is_respected():
    check_env(Masked(), steps=5)


@pytest.mark.parametrize(
    "settings",
    [
        {"disable_env_checking": True},
        {"restart_failed_sub_environments": True},
        {"recreate_failed_workers": True},
        {"env_step_timeout_s": 60.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_where_faults_are_expected_building_looks_for_none(made, settings):
    algorithm = built(Outgrown).update_from_dict(settings).build()
    assert len(made) == 1
    algorithm.stop()


def test_an_environment_that_takes_long_to_make_is_made_once(made, monkeypatch):
    monkeypatch.setattr(worker_environments, "_MAX_CREATION_SECONDS", 0.0)
    built(Outgrown).build().stop()
    assert len(made) == 1


@pytest.mark.parametrize(
    "env",
    [Outgrown({}), lambda context: gym.vector.SyncVectorEnv([lambda: Outgrown({})])],
    ids=["an instance", "a vector environment"],
)
def test_an_environment_of_which_there_is_one_is_not_played(made, env):
    built(env).build().stop()
    assert all(each.actions == [] for each in made)


class Parametric(gym.Env):
    """Allows one action of three, which its observation names under a key."""

    action_space = spaces.Discrete(3)

    def __init__(self, key):
        self.key = key
        self.observation_space = spaces.Dict({key: spaces.MultiBinary(3), "n": spaces.Discrete(2)})

    def _seen(self):
        self.allowed = (getattr(self, "allowed", 0) + 1) % 3
        return {self.key: np.eye(3, dtype=np.int8)[self.allowed], "n": 0}

    def reset(self, *, seed=None, options=None):
        return self._seen(), {}

    def step(self, action):
        if action != self.allowed:
            raise ValueError("forbidden")
        return self._seen(), 0.0, False, False, {}


@pytest.mark.core
def test_the_mask_under_a_configured_key_is_respected():
    check_env(Parametric("action_mask"), steps=20)
    check_env(Parametric("valid"), steps=20, action_mask_key="valid")
    with pytest.raises(EnvError, match="forbidden"):
        check_env(Parametric("valid"), steps=20)
    settings = {"custom_model": lambda observation_space, num_outputs: None}
    config = PPOConfig().environment(lambda context: Parametric("valid"), action_mask_key="valid")
    worker = RolloutWorker(
        config=config.training(model=settings), default_policy_class=RandomPolicy
    )
    worker_environments.check_environment(worker)
