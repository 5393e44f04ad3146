"""Ordinary classes, functions and objects as environments, and what is said of unusual ones."""

import functools
import importlib
from typing import Any, Dict, Optional  # noqa: UP035

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from helpers.environments import CountingEnv, counting_vector
from tfpolicies import MultiAgentEnv, PPOConfig, RolloutWorker
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


def told(create):
    """Returns a class whose objects keep what they were called with, by a signature of theirs."""
    return type("Told", (Grid,), {"__init__": create})


def named(self, env_config):
    self.told = env_config


def named_with_more(self, config=None, size=3):
    self.told = config


def annotated(self, settings: dict = None):  # noqa: RUF013
    self.told = settings


def annotated_optionally(self, settings: Optional[Dict[str, Any]] = None):  # noqa: UP006, UP045
    self.told = settings


def annotated_by_text(self, settings: "dict[str, int] | None" = None):
    self.told = settings


def annotated_as_context(self, settings: EnvContext = None):
    self.told = settings


def one_required(self, settings):
    self.told = settings


def required_before_any(self, settings, **more):
    self.told = settings


def ordinary(self, render_mode=None, size=5):
    self.told = {"render_mode": render_mode, "size": size}


def any_keywords(self, **more):
    self.told = more


def keyword_only(self, *, size, depth=2):
    self.told = {"size": size, "depth": depth}


def required_key(self, size):
    self.told = {"size": size}


SIZE = {"size": 4}
CALLS = [
    (named, SIZE, SIZE),
    (named_with_more, SIZE, SIZE),
    (annotated, SIZE, SIZE),
    (annotated_optionally, SIZE, SIZE),
    (annotated_by_text, SIZE, SIZE),
    (annotated_as_context, SIZE, SIZE),
    (one_required, {}, {}),
    (one_required, SIZE, SIZE),
    (required_before_any, SIZE, SIZE),
    (ordinary, {}, {"render_mode": None, "size": 5}),
    (ordinary, SIZE, {"render_mode": None, "size": 4}),
    (any_keywords, SIZE, SIZE),
    (keyword_only, SIZE, {"size": 4, "depth": 2}),
    (required_key, SIZE, SIZE),
]
REFUSED = [
    (ordinary, {"sise": 4}, r"\(render_mode=None, size=5\) .* 'sise'"),
    (keyword_only, {}, r"\(\*, size, depth=2\) .* 'size'"),
    (ordinary, {3: 4}, r"\(render_mode=None, size=5\) .*\{3: 4\}"),
    (lambda self: None, SIZE, r"Told\(\) .* 'size'"),
    (lambda self, a, b: None, {"a": 1}, r"\(a, b\) .* 'b'"),
]


@pytest.mark.parametrize(("create", "env_config", "expected"), CALLS)
def test_the_signature_decides_how_a_class_is_called_here_and_in_the_player(
    create, env_config, expected
):
    cls = told(create)
    env = make_environments(cls, 1, EnvContext(env_config)).get_sub_environments()[0]
    assert env.told == expected
    assert player.make_env(cls, env_config).told == expected
    assert player.make_env(functools.partial(cls), env_config).told == expected


@pytest.mark.parametrize(("create", "env_config", "words"), REFUSED)
def test_settings_that_fit_no_signature_are_refused_and_the_signature_is_shown(
    create, env_config, words
):
    for error, call in ((EnvError, make_one), (ValueError, player.make_env)):
        with pytest.raises(error, match=words):
            call(told(create), env_config)


def make_one(source, env_config):
    return make_environments(source, 1, EnvContext(env_config))


def test_a_wrong_key_is_told_with_the_right_one():
    with pytest.raises(EnvError, match="Did you mean 'size'"):
        make_one(Grid, {"sise": 4})


def test_functions_texts_and_classes_are_called_alike(monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("helpers.environments"), "Grid", Grid, raising=False
    )
    sources = [
        Grid,
        "helpers.environments:Grid",
        "helpers.environments.Grid",
        lambda size=5: Grid(size=size),
    ]
    for source in sources:
        assert make_one(source, SIZE).get_sub_environments()[0].size == 4
        assert player.make_env(source, SIZE).size == 4
    assert make_one(lambda _: Grid(), SIZE).get_sub_environments()[0].size == 5


def test_a_module_and_a_registered_name_are_taken_as_gymnasium_takes_them(monkeypatch, tmp_path):
    text = "import gymnasium\ngymnasium.register('Told-v0', 'envs.test_env_classes:Grid')\n"
    (tmp_path / "telling.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        made = make_environments("telling:Told-v0", 2, EnvContext({"size": 3}))
        assert [env.unwrapped.size for env in made.envs] == [3, 3]
    finally:
        gym.registry.pop("Told-v0", None)


def test_a_registered_creator_always_gets_the_context():
    seen = []

    def create(size=5):
        seen.append(size)
        return Grid()

    register_environment("registered grid", create)
    make_one("registered grid", SIZE)
    assert seen == [SIZE]
    assert isinstance(seen[0], EnvContext)


def test_a_multi_agent_class_gets_keywords_too():
    class Pair(MultiAgentEnv):
        def __init__(self, size=2):
            self.size = size

    assert make_any_environments(Pair, 2, EnvContext(SIZE)).get_sub_environments()[1].size == 4


def small_ppo(env, **rollouts):
    config = PPOConfig().environment(env, env_config=SIZE).debugging(seed=0)
    config.rollouts(**rollouts).framework(inference="tf", jit_compile=False)
    model = {"fcnet_hiddens": [4]}
    return config.training(
        train_batch_size=16, sgd_minibatch_size=16, num_sgd_iter=1, model=model, lr=1e-3
    )


def test_an_ordinary_class_trains_and_is_evaluated_with_its_settings():
    config = small_ppo(Grid, num_envs_per_worker=2)
    config.evaluation(evaluation_interval=1, evaluation_duration=2)
    algorithm = config.build()
    result = algorithm.train()
    algorithm.stop()
    assert result["episode_len_mean"] == result["evaluation"]["episode_len_mean"] == 4.0


def test_an_environment_is_taken_itself_where_one_is_enough():
    env = CountingEnv()
    worker_config = small_ppo(env).environment(env_config={})
    algorithm = worker_config.build()
    assert algorithm.worker.env is env
    algorithm.train()
    algorithm.stop()
    assert env.closed == 1
    vector = counting_vector(AutoresetMode.NEXT_STEP, 3)
    assert make_one(vector, {}).num_envs == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config.rollouts(num_envs_per_worker=2), "2 environments"),
        (lambda config: config.rollouts(num_rollout_workers=2), "2 remote workers"),
        (lambda config: config.evaluation(evaluation_interval=1), "evaluation needs"),
    ],
)
def test_an_environment_itself_is_refused_where_more_are_needed(change, words):
    config = change(small_ppo(CountingEnv()))
    with pytest.raises(EnvError, match=f"env is one CountingEnv object, but {words}.*its class"):
        config.build()


def test_an_evaluation_that_nobody_announced_refuses_the_environment_of_training():
    algorithm = small_ppo(CountingEnv()).environment(env_config={}).build()
    with pytest.raises(EnvError, match="evaluation needs separate environments"):
        algorithm.evaluate()
    algorithm.stop()


def test_a_creator_that_gives_one_environment_again_is_refused():
    one = CountingEnv()
    with pytest.raises(EnvError, match="returned the same environment twice, but 2"):
        make_environments(lambda env_config: one, 2, EnvContext({}))


# -- what is said of environments that break the contract --------------------------------------


def broken(**attributes):
    return type("Broken", (Grid,), attributes)


def old_reset(self):
    return np.zeros(2, np.float32), {}


def array_reward(self, action):
    return np.zeros(2, np.float32), np.array([1.0]), False, False, {}


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (broken(observation_space=None), "Broken has no observation_space.*gymnasium.spaces"),
        (broken(action_space="left or right"), "Broken has no action_space.*'left or right'"),
        (broken(reset=old_reset), r"`reset` of environment 0.*takes no `seed`.*reset\(self, \*"),
        (broken(step=array_reward), r"reward array\(\[1.\]\).*float\(reward\)"),
    ],
    ids=["no observation space", "no action space", "no seed", "array as reward"],
)
def test_an_environment_that_breaks_the_contract_is_told_how_to_keep_it(cls, words):
    with pytest.raises(EnvError, match=words):
        begin_and_step(cls)


def begin_and_step(cls):
    envs = make_environments(cls, 1, EnvContext({}))
    envs.reset([1])
    envs.step(np.array([0]))


def test_a_multi_agent_reset_without_a_seed_is_explained():
    class Old(MultiAgentEnv):
        def reset(self):
            return {}, {}

    with pytest.raises(EnvError, match="`reset` of environment 0 takes no `seed`"):
        make_any_environments(Old, 1, EnvContext({})).reset(0, 5)


def test_a_type_error_of_ones_own_in_reset_stays_what_it_is():
    def reset(self, *, seed=None, options=None):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        make_environments(broken(reset=reset), 1, EnvContext({})).reset([1])


def test_a_vector_environment_without_spaces_is_told_so():
    env = counting_vector(AutoresetMode.NEXT_STEP, 2)
    env.single_action_space = None
    with pytest.raises(EnvError, match="has no single_action_space"):
        make_one(env, {})


def test_the_old_name_of_the_particle_environments_leads_to_the_new_one():
    for name in ("mpe:simple_spread_v3", "pettingzoo:mpe/simple_spread_v3"):
        with pytest.raises(EnvError, match="mpe2:simple_spread_v3"):
            make_any_environments(name, 1, EnvContext({}))


def test_a_worker_takes_an_environment_itself():
    env = CountingEnv()
    config = small_ppo(None).environment(env_config={}).rollouts(rollout_fragment_length=4)
    from tfpolicies import PPOTF2Policy

    worker = RolloutWorker(
        env_creator=lambda context: env, config=config, default_policy_class=PPOTF2Policy
    )
    assert worker.sample().count == 4
    worker.stop()
