"""Ordinary classes, functions and objects as environments, and refusals of unusual ones."""

import importlib
from functools import partial
from typing import Any, Dict, Optional  # noqa: UP035

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from helpers.environments import CountingEnv, counting_vector
from helpers.workers import make_config, make_worker
from tfpolicies import MultiAgentEnv
from tfpolicies.envs.env_factory import EnvContext, make_any_environments, make_environments
from tfpolicies.envs.env_registry import register_environment
from tfpolicies.errors import EnvError
from tfpolicies.export import player

BOX, TWO = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2)


class Grid(gym.Env):
    """What an ordinary class looks like."""

    metadata = {"render_modes": ["human"]}
    observation_space, action_space = BOX, TWO

    def __init__(self, render_mode: Optional[str] = None, size: int = 5):  # noqa: UP045
        assert render_mode is None or render_mode in self.metadata["render_modes"]
        self.render_mode, self.size, self.steps = render_mode, size, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps >= self.size, False, {}


def make_class(parameters):
    """Makes a class whose constructor has these parameters, and records their values."""
    names = {"Any": Any, "Dict": Dict, "EnvContext": EnvContext, "Optional": Optional}  # noqa: UP006
    code = f"def __init__(self, {parameters}):\n    self.arguments = {{**locals()}}"
    exec(code, names)
    return type("Recorder", (Grid,), {"__init__": names["__init__"]})


SIZE = {"size": 4}
ORDINARY = "render_mode=None, size=5"
CALLS = [
    ("env_config", SIZE, {"env_config": SIZE}),
    ("config=None, size=3", SIZE, {"config": SIZE, "size": 3}),
    ("settings: dict = None", SIZE, {"settings": SIZE}),
    ("settings: Optional[Dict[str, Any]] = None", SIZE, {"settings": SIZE}),
    ("settings: 'dict[str, int] | None' = None", SIZE, {"settings": SIZE}),
    ("settings: EnvContext = None", SIZE, {"settings": SIZE}),
    ("", {}, {}),
    ("settings", {}, {"settings": {}}),
    ("settings", SIZE, {"settings": SIZE}),
    ("settings, **others", SIZE, {"settings": SIZE, "others": {}}),
    (ORDINARY, {}, {"render_mode": None, "size": 5}),
    (ORDINARY, SIZE, {"render_mode": None, "size": 4}),
    ("**others", SIZE, {"others": SIZE}),
    ("*, size, depth=2", SIZE, {"size": 4, "depth": 2}),
    ("size", SIZE, SIZE),
]
REFUSED = [
    (ORDINARY, {"sise": 4}, r"\(render_mode=None, size=5\) .* 'sise'"),
    ("*, size, depth=2", {}, r"\(\*, size, depth=2\) .* 'size'"),
    (ORDINARY, {3: 4}, r"\(render_mode=None, size=5\) .*\{3: 4\}"),
    ("", SIZE, r"Recorder\(\) .* 'size'"),
    ("a, b", {"a": 1}, r"\(a, b\) .* 'b'"),
]


def make_one(source, env_config):
    return make_environments(source, 1, EnvContext(env_config))


@pytest.mark.parametrize(("parameters", "env_config", "expected"), CALLS)
def test_the_signature_of_a_class_decides_how_it_is_called(parameters, env_config, expected):
    cls = make_class(parameters)
    envs = make_one(cls, env_config).get_sub_environments()
    for env in (*envs, *(player.make_env(source, env_config) for source in (cls, partial(cls)))):
        assert env.arguments == {"self": env, **expected}


@pytest.mark.parametrize(("parameters", "env_config", "words"), REFUSED)
def test_settings_that_fit_no_signature_are_refused_with_it(parameters, env_config, words):
    for error, call in ((EnvError, make_one), (ValueError, player.make_env)):
        with pytest.raises(error, match=words):
            call(make_class(parameters), env_config)


def test_a_wrong_key_is_refused_with_the_right_one():
    with pytest.raises(EnvError, match="Did you mean 'size'"):
        make_one(Grid, {"sise": 4})


def test_functions_texts_and_classes_are_called_alike(monkeypatch):
    module = importlib.import_module("helpers.environments")
    monkeypatch.setattr(module, "Grid", Grid, raising=False)
    paths = ("helpers.environments:Grid", "helpers.environments.Grid")
    for source in (Grid, *paths, lambda size=5: Grid(size=size)):
        assert make_one(source, SIZE).get_sub_environments()[0].size == 4
        assert player.make_env(source, SIZE).size == 4
    assert make_one(lambda _: Grid(), SIZE).get_sub_environments()[0].size == 5


def test_a_module_and_a_registered_name_are_taken_as_gymnasium_takes_them(monkeypatch, tmp_path):
    text = f"import gymnasium\ngymnasium.register('Grid-v0', '{__name__}:Grid')\n"
    (tmp_path / "registering.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        envs = make_environments("registering:Grid-v0", 2, EnvContext({"size": 3})).envs
        assert [env.unwrapped.size for env in envs] == [3, 3]
    finally:
        gym.registry.pop("Grid-v0", None)


def test_a_registered_creator_always_gets_the_context():
    arguments = []

    def create(size=5):
        arguments.append(size)
        return Grid()

    register_environment("registered grid", create)
    make_one("registered grid", SIZE)
    assert arguments == [SIZE]
    assert isinstance(arguments[0], EnvContext)


def test_a_multi_agent_class_gets_keywords():
    class Pair(MultiAgentEnv):
        def __init__(self, size=2):
            self.size = size

    assert make_any_environments(Pair, 2, EnvContext(SIZE)).get_sub_environments()[1].size == 4


def small_config(env, **settings):
    training = {"train_batch_size": 16, "sgd_minibatch_size": 16, "num_sgd_iter": 1, "lr": 1e-3}
    return make_config(env, **{**training, **settings})


def test_an_ordinary_class_trains_and_is_evaluated_with_its_settings():
    evaluation = {"evaluation_interval": 1, "evaluation_duration": 2}
    config = small_config(Grid, num_envs_per_worker=2, env_config=SIZE, **evaluation)
    result = config.build().train()
    assert result["episode_len_mean"] == result["evaluation"]["episode_len_mean"] == 4.0


def test_an_instance_is_used_where_one_is_enough():
    env = CountingEnv()
    algorithm = small_config(env).build()
    assert algorithm.worker.env is env
    algorithm.train()
    algorithm.stop()
    assert env.closed == 1
    vector = counting_vector(AutoresetMode.NEXT_STEP, 3)
    assert make_one(vector, {}).num_envs == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_envs_per_worker": 2}, "2 environments"),
        ({"num_rollout_workers": 2}, "2 remote workers"),
        ({"evaluation_interval": 1}, "evaluation needs"),
    ],
)
def test_an_instance_is_refused_where_more_are_needed(settings, words):
    with pytest.raises(EnvError, match=f"env is one CountingEnv object, but {words}.*its class"):
        small_config(CountingEnv(), **settings).build()


def test_an_evaluation_without_a_setting_refuses_the_environment_of_training():
    algorithm = small_config(CountingEnv()).build()
    with pytest.raises(EnvError, match="evaluation needs separate environments"):
        algorithm.evaluate()


def test_a_creator_that_gives_one_environment_again_is_refused():
    one = CountingEnv()
    with pytest.raises(EnvError, match="returned the same environment twice, but 2"):
        make_environments(lambda env_config: one, 2, EnvContext({}))


def broken(**attributes):
    return type("Broken", (Grid,), attributes)


def raise_type_error(self, *, seed=None, options=None):
    raise TypeError("mine")


def array_reward(self, action):
    return np.zeros(2, np.float32), np.array([1.0]), False, False, {}


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (broken(observation_space=None), "Broken has no observation_space.*gymnasium.spaces"),
        (broken(action_space="left or right"), "Broken has no action_space.*'left or right'"),
        (
            broken(reset=lambda self: ({}, {})),
            r"`reset` of environment 0.*takes no `seed`.*reset\(self, \*",
        ),
        (broken(step=array_reward), r"reward array\(\[1.\]\).*float\(reward\)"),
    ],
    ids=["no observation space", "no action space", "no seed", "array as reward"],
)
def test_an_environment_that_breaks_the_contract_is_refused_with_advice(cls, words):
    with pytest.raises(EnvError, match=words):
        begin_and_step(cls)


def begin_and_step(cls):
    envs = make_one(cls, {})
    envs.reset([1])
    envs.step(np.array([0]))


def test_a_multi_agent_reset_without_a_seed_is_explained():
    class Old(MultiAgentEnv):
        def reset(self):
            return {}, {}

    with pytest.raises(EnvError, match="`reset` of environment 0 takes no `seed`"):
        make_any_environments(Old, 1, EnvContext({})).reset(0, 5)


def test_a_type_error_of_reset_itself_is_not_changed():
    with pytest.raises(TypeError, match="mine"):
        begin_and_step(broken(reset=raise_type_error))


def test_a_vector_environment_without_spaces_is_refused():
    env = counting_vector(AutoresetMode.NEXT_STEP, 2)
    env.single_action_space = None
    with pytest.raises(EnvError, match="has no single_action_space"):
        make_one(env, {})


def test_the_old_name_of_the_particle_environments_leads_to_the_new_one():
    for name in ("mpe:simple_spread_v3", "pettingzoo:mpe/simple_spread_v3"):
        with pytest.raises(EnvError, match="mpe2:simple_spread_v3"):
            make_any_environments(name, 1, EnvContext({}))


def test_a_worker_accepts_a_creator_of_an_existing_instance():
    env = CountingEnv()
    worker = make_worker(env_creator=lambda context: env, rollout_fragment_length=4)
    assert worker.sample().count == 4
    worker.stop()
