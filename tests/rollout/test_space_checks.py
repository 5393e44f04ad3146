"""Checks of the spaces of policies against those of their agents."""

import gc

import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import SeededEnv
from helpers.factories import make
from helpers.marks import telling
from helpers.multi_agent_envs import SPACE, THREE, Staggered, Walker, flags, sampler_of
from helpers.workers import make_config, make_worker, map_all_to, sampler_with
from tfpolicies import Algorithm, PolicySpec
from tfpolicies.errors import SpaceError
from tfpolicies.rollout.space_checks import (
    AgentSpaceChecker,
    contains_space,
    find_difference,
    require_compatible_spaces,
)

pytestmark = pytest.mark.usefixtures("kept_programs")

TWO, FIVE = spaces.Discrete(2), spaces.Discrete(5)
FLOATS, DOUBLES = spaces.Box(-1, 1, (3,)), spaces.Box(-9, 9, (3,), np.float64)
PIXELS = spaces.Box(0, 255, (3,), np.uint8)
PAIR = spaces.MultiDiscrete([2, 3])


class Apart(Staggered):
    """Each agent has its own spaces, except "d", which has none."""

    observation_space = spaces.Dict(dict.fromkeys("abc", SPACE))
    action_space = spaces.Dict(a=THREE, b=TWO, c=FIVE)


def map_to_own(agent_id, episode=None, worker=None, **kwargs):
    return agent_id


def worker_of(env, **spec):
    settings = {"policies": {"p": PolicySpec(**spec)}, "policy_mapping_fn": map_all_to("p")}
    return make_worker(env, rollout_fragment_length=7, **settings)


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (TWO, TWO, True),
        (FIVE, TWO, True),
        (TWO, FIVE, False),
        (TWO, spaces.Discrete(2, start=1), False),
        (spaces.Discrete(3, start=-1), spaces.Discrete(2, start=0), True),
        (FLOATS, DOUBLES, True),  # bounds and precisions may differ
        (DOUBLES, FLOATS, True),
        (FLOATS, spaces.Box(-1, 1, (4,)), False),
        (FLOATS, spaces.Box(-1, 1, (3, 1)), False),
        (FLOATS, PIXELS, True),
        (PIXELS, FLOATS, False),
        (PAIR, spaces.MultiDiscrete([2, 2]), True),
        (PAIR, spaces.MultiDiscrete([3, 2]), False),
        (PAIR, spaces.MultiBinary(2), True),
        (spaces.MultiBinary(2), PAIR, False),
        (PAIR, TWO, False),
        (TWO, FLOATS, False),
        (TWO, spaces.Box(0, 9, (), np.int64), True),  # a Box's bounds are often loose
        (FLOATS, spaces.Dict(a=FLOATS), False),
        (spaces.Dict(a=FIVE), spaces.Dict(a=TWO), True),
        (spaces.Dict(a=FIVE), spaces.Dict(b=TWO), False),
        (spaces.Dict(a=FIVE), spaces.Dict(a=TWO, b=TWO), False),
        (spaces.Tuple([FIVE, FLOATS]), spaces.Tuple([TWO, DOUBLES]), True),
        (spaces.Tuple([TWO, FLOATS]), spaces.Tuple([FIVE, DOUBLES]), False),
        (spaces.Text(3), TWO, True),  # unknown
        (spaces.Dict(a=spaces.Text(3)), spaces.Dict(a=FLOATS), True),
    ],
)
def test_spaces_that_contain_others(wide, narrow, expected):
    assert contains_space(wide, narrow) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (TWO, TWO, None),
        (TWO, FIVE, "number of values"),
        (TWO, spaces.Discrete(2, start=1), "bounds"),
        (FLOATS, spaces.Box(-1, 1, (3,)), None),
        (FLOATS, spaces.Box(-2, 1, (3,)), "bounds"),
        (FLOATS, DOUBLES, "dtype"),
        (FLOATS, PIXELS, "dtype"),
        (FLOATS, spaces.Box(-1, 1, (4,)), "shape"),
        (FLOATS, spaces.Discrete(3), "kind"),
        (PAIR, spaces.MultiDiscrete([2, 3]), None),
        (PAIR, spaces.MultiDiscrete([3, 2]), "number of values"),
        (PAIR, spaces.MultiBinary(2), "kind"),
        (spaces.MultiBinary(2), spaces.MultiBinary(3), "shape"),
        (spaces.Dict(a=TWO, b=FLOATS), spaces.Dict(a=TWO, b=FLOATS), None),
        (spaces.Dict(a=TWO, b=FLOATS), spaces.Dict(a=TWO, b=DOUBLES), "dtype"),
        (spaces.Dict(a=TWO, b=FLOATS), spaces.Dict(a=FIVE, b=DOUBLES), "number of values"),
        (spaces.Dict(a=TWO), spaces.Dict(b=TWO), "parts"),
        (spaces.Dict(a=TWO), spaces.Tuple([TWO]), "parts"),
        (spaces.Dict(a=TWO), TWO, "kind"),
    ],
)
def test_differences_of_two_spaces(one, other, expected):
    assert find_difference(one, other) == expected


class Task(SeededEnv):
    """An environment with any spaces."""

    def __init__(self, context):
        self.observation_space = context.get("observed", spaces.Box(-1, 1, (3,)))
        self.action_space = context.get("done", spaces.Box(-1, 1, (2,)))

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample() * 0, 0.0, False, False, {}


def algorithm_of(**env_config):
    settings = {"train_batch_size": 8, "sgd_minibatch_size": 8, "log_level": "WARN", "seed": 1}
    return make_config(Task, env_config=env_config, **settings).build()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The checkpoint of a policy for observations Box(-1, 1, (3,)) and actions Box(-1, 1, (2,))."""
    folder = tmp_path_factory.mktemp("trained")
    algorithm_of().save(folder)
    return folder


OTHERS = [
    ("done", "other bounds", spaces.Box(-2, 3, (2,))),
    ("done", "another dtype", spaces.Box(-1, 1, (2,), np.float64)),
    ("done", "another shape", spaces.Box(-1, 1, (3,))),
    ("done", "another kind", spaces.MultiDiscrete([2, 2])),
    ("observed", "another dtype", spaces.Box(-1, 1, (3,), np.float64)),
    ("observed", "another shape", spaces.Box(-1, 1, (5,))),
    ("observed", "another kind", spaces.MultiBinary(3)),
]


@pytest.mark.parametrize(("which", "what", "space"), telling(OTHERS, OTHERS[0]))
def test_an_environment_with_other_spaces_than_in_training_is_refused(trained, which, what, space):
    config = {"env": Task, "env_config": {which: space}}
    fits = what in ("other bounds", "another dtype")
    advice = "allow_other_spaces=True" if fits else "Its weights cannot be used there"
    name = "action_space" if which == "done" else "observation_space"
    words = f"was trained with the {name} Box.*"
    with pytest.raises(SpaceError, match=f"{words}{type(space).__name__}.* {what}.*{advice}"):
        Algorithm.from_checkpoint(trained, config=config)
    algorithm = algorithm_of(**{which: space})
    before = algorithm.get_weights()
    with pytest.raises(SpaceError, match=words):
        algorithm.restore(trained)
    np.testing.assert_equal(algorithm.get_weights(), before)
    if not fits:
        with pytest.raises(SpaceError, match=words):
            Algorithm.from_checkpoint(trained, config=config, allow_other_spaces=True)
        return
    algorithm.restore(trained, allow_other_spaces=True)
    restored = Algorithm.from_checkpoint(trained, config=config, allow_other_spaces=True)
    for run in (algorithm, restored):
        assert getattr(run.get_policy(), name) == space
        assert run.train()["training_iteration"] == 1
    np.testing.assert_equal(restored.get_weights().keys(), before.keys())


def test_other_bounds_of_observations_are_logged_in_one_line(trained, caplog):
    config = {"env": Task, "env_config": {"observed": spaces.Box(-9, 9, (3,))}}
    again = Algorithm.from_checkpoint(trained, config=config)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "has other bounds: Box(-9.0, 9.0, (3,), float32)." in message
    assert "\n" not in message
    assert again.train()["training_iteration"] == 1


def test_observations_may_have_extra_parts():
    more = spaces.Dict(observations=FLOATS, action_mask=spaces.MultiBinary(2), extra=TWO)
    fewer = spaces.Dict(observations=DOUBLES, action_mask=spaces.Box(0, 1, (2,), np.int8))
    assert contains_space(fewer, more, allow_extra_parts=True)
    assert not contains_space(more, fewer, allow_extra_parts=True)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"action_space": FIVE},
            r"action_space Discrete\(5\), but agent 'a' of Staggered has D.*3\)",
        ),
        (
            {"observation_space": spaces.Box(-1, 1, (4,))},
            r"\(4,\).*agent 'a' of Staggered has Box.*3",
        ),
        ({"observation_space": spaces.MultiDiscrete([2] * 3)}, "which it cannot read"),
    ],
)
def test_a_spec_that_no_agent_can_use_is_refused_when_they_meet(spec, words):
    worker = worker_of(Staggered, **spec)
    with pytest.raises(SpaceError, match=f"Policy 'p' has the .*{words}"):
        worker.sample()


def test_bounds_precision_and_fewer_actions_are_accepted():
    wide = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    batch = worker_of(Staggered, observation_space=wide, action_space=TWO).sample()
    assert batch["p"].count == 11
    assert set(batch["p"]["actions"]) <= {0, 1}


def test_after_an_observation_fn_only_actions_are_compared():
    def last_two(agent_obs, **kwargs):
        return {agent: obs[1:] for agent, obs in agent_obs.items()}

    def sampler(actions, **settings):
        policy = make(obs=spaces.Box(-1, 1e6, (2,)), actions=actions)
        return sampler_with(policy, Staggered(), length=7, **settings)

    assert sampler(THREE, observation_fn=last_two).sample()["p"].count == 11
    with pytest.raises(SpaceError, match="agent 'a' of Staggered"):
        sampler(THREE)
    with pytest.raises(SpaceError, match=r"Discrete\(5\)"):
        sampler(FIVE, observation_fn=last_two)


class Late(Apart):
    """Agent `name` comes in the second step."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def first(self):
        return self.obs("a")

    def play(self, actions):
        over = self.now == 3
        agents = ("a", self.name) if self.now == 2 or over else ("a",)
        return self.obs(*agents), {}, flags(over), flags(), {}


def sampler_of_late(name, policies):
    return sampler_of(Late(name), policies=policies, mapping=map_to_own, rollout_fragment_length=3)


def test_an_agent_that_comes_later_is_checked_then():
    policies = {agent: Walker() for agent in "abcd"}  # three actions each
    assert sampler_of_late("c", policies).sample()["c"].count == 1
    policies["c"].action_space = spaces.Discrete(6)
    sampler = sampler_of_late("c", policies)
    with pytest.raises(SpaceError, match=r"Policy 'c' has .*agent 'c' of Late has Discrete\(5\)"):
        sampler.sample()


def test_an_agent_without_a_space_is_not_compared():
    policies = {agent: Walker() for agent in "ad"}
    assert sampler_of_late("d", policies).sample()["d"].count == 1


def test_a_pair_is_compared_once():
    class Counted(Apart):
        calls = 0

        def get_action_space(self, agent_id):
            Counted.calls += 1
            return super().get_action_space(agent_id)

    policies = {"p": Walker(), "q": Walker()}
    policies["p"].action_space = policies["q"].action_space = TWO
    envs = [Counted(), Counted()]
    sampler = sampler_of(*envs, policies=policies, rollout_fragment_length=7)
    for _ in range(3):
        sampler.sample()
    assert Counted.calls == 2  # "a" and "b", with a policy each


def test_results_of_comparisons_are_dropped_with_the_policy():
    checker, policy = AgentSpaceChecker(policies_observe_env=True), Walker()
    for agent in range(5000):
        checker.check(Staggered(), agent, "p", policy)
    assert sum(map(len, checker._checked_agents.values())) < 4097
    del policy
    gc.collect()
    assert not checker._checked_agents


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"action_space": spaces.Discrete(9)}, r"'default_policy' has the action_space D.*\(9\)"),
        ({"observation_space": spaces.Box(-1, 1, (7,))}, "observation_space Box.*it cannot read"),
    ],
)
def test_the_policy_of_a_single_agent_is_checked_by_the_constructor_of_the_worker(spec, words):
    with pytest.raises(SpaceError, match=words):
        make_worker(SeededEnv, policies={"default_policy": PolicySpec(**spec)})


def test_a_policy_without_gymnasium_spaces_is_not_compared():
    policy = Walker()
    policy.observation_space = policy.action_space = None
    require_compatible_spaces("p", policy, "the environment", SPACE, THREE)
    require_compatible_spaces("p", Walker(), "the environment", None, None)
