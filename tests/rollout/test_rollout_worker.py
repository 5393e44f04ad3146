"""Arguments of the rollout worker, its seeds, learning, and policies without TensorFlow."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.custom_policies import ZeroPolicy
from helpers.environments import CountingEnv, SeededEnv
from helpers.factories import assert_equal
from helpers.workers import (
    assert_equal_batches,
    assert_equal_weights,
    make_callbacks,
    make_config,
    make_worker,
)
from tfpolicies import (
    AlgorithmConfig,
    PGConfig,
    PGTF2Policy,
    Policy,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
)
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import ConfigError, EnvError, UnknownPolicyError, UsageError
from tfpolicies.policy.policy import ActionBatch

OBS, ACTIONS = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
TINY = {"train_batch_size": 16, "sgd_minibatch_size": 8, "seed": 3}
TINY |= {"rollout_fragment_length": 8, "num_envs_per_worker": 2}


def tiny(env=SeededEnv, policy_class=PPOTF2Policy, **settings):
    return make_worker(env, policy_class, **{**TINY, **settings})


def single_env(policy_class, env=CountingEnv, length=8, **settings):
    settings |= {"num_envs_per_worker": 1, "rollout_fragment_length": length}
    return tiny(env, policy_class, **settings)


@pytest.mark.core
def test_a_worker_without_config_has_the_defaults_of_its_policy_class():
    worker = RolloutWorker(env_creator=lambda _: SeededEnv(), default_policy_class=PPOTF2Policy)
    assert isinstance(worker.config, PPOConfig)
    assert worker.config["framework"] == "tf2"
    assert worker.config.lr == PPOConfig().lr
    assert worker.get_policy().config["clip_param"] == PPOConfig().clip_param


def test_a_dict_of_settings_is_merged_over_the_defaults_and_left_as_it_is():
    settings = {"env": SeededEnv, "rollout_fragment_length": 4, "lambda": 0.5}
    settings["model"] = {"fcnet_hiddens": [4]}
    copy = {**settings, "model": {"fcnet_hiddens": [4]}}
    worker = RolloutWorker(config=settings, default_policy_class=PPOTF2Policy)
    assert worker.config.get_fragment_length() == 4
    assert worker.get_policy().config["lambda"] == 0.5
    assert worker.config.model["fcnet_activation"] == "tanh"
    assert settings == copy
    assert worker.sample().count == 4


@pytest.mark.core
def test_the_worker_freezes_its_config():
    config = make_config(SeededEnv)
    RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    assert config.is_frozen


def test_a_policy_gets_settings_from_a_config_of_another_class():
    settings = {"config_class": AlgorithmConfig, "gamma": 0.5, "lr": 0.25}
    policy = make_worker(SeededEnv, **settings).get_policy()
    assert (policy.config["gamma"], policy.config["lr"]) == (0.5, 0.25)
    assert policy.config["clip_param"] == PPOConfig().clip_param


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"default_policy_class": None}, "default_policy_class"),
        ({"config": {"gama": 0.9}}, "Did you mean 'gamma'"),
        ({"config": {"gamma": 2.0}}, "gamma"),
        ({"config": 7}, "config"),
        ({"default_policy_class": dict}, "default_policy_class"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, words):
    defaults = {"env_creator": lambda _: SeededEnv(), "default_policy_class": PPOTF2Policy}
    with pytest.raises(ConfigError, match=words):
        RolloutWorker(**{"config": make_config(), **defaults, **arguments})


def test_all_arguments_are_keywords():
    with pytest.raises(TypeError):
        RolloutWorker(lambda context: SeededEnv())


def test_without_environment_and_spaces_the_missing_space_is_named():
    with pytest.raises(ValueError, match="observation_space not provided"):
        tiny(None)
    with pytest.raises(ValueError, match="action_space not provided"):
        tiny(None, observation_space=OBS)
    worker = tiny(None, observation_space=OBS, action_space=ACTIONS)
    assert worker.get_policy().action_space == ACTIONS


def test_a_creator_may_give_no_environment_where_there_are_spaces():
    def create(context):
        return None if context.worker_index == 0 else SeededEnv()

    worker = tiny(None, env_creator=create, spaces={"default_policy": (OBS, ACTIONS)})
    assert (worker.env, worker.sampler, worker.get_metrics()) == (None, None, [])
    with pytest.raises(UsageError, match="no input_reader"):
        worker.sample()
    with pytest.raises(EnvError, match="but gave NoneType"):
        tiny(None, env_creator=create)


def test_construction_calls_back_for_environments_and_then_for_the_policy():
    calls = []

    def on_sub_environment_created(worker, sub_environment, env_context, env_index):
        calls.append(("env", env_index, env_context.vector_index))

    def on_create_policy(policy_id, policy):
        calls.append(("policy", policy_id, type(policy)))

    methods = (on_sub_environment_created, on_create_policy)
    tiny(callbacks=make_callbacks(**{method.__name__: method for method in methods}))
    policy = ("policy", "default_policy", PPOTF2Policy)
    assert calls == [("env", 0, 0), ("env", 1, 1), policy]


@pytest.mark.core
def test_one_seed_gives_equal_workers():
    one, other = tiny(), tiny()
    for _ in range(4):
        assert_equal_batches(one.sample(), other.sample())
    metrics = [[m._replace(perf_stats={}) for m in w.get_metrics()] for w in (one, other)]
    assert metrics[0] == metrics[1] != []


def test_the_worker_index_changes_experience_but_not_weights():
    one, other = tiny(worker_index=1), tiny(worker_index=2)
    assert_equal_weights(one, other)
    a, b = one.sample(), other.sample()
    assert not np.array_equal(a["obs"], b["obs"])
    assert not np.array_equal(a["actions"], b["actions"])


def test_environment_seeds_follow_the_documented_formula():
    worker = tiny(CountingEnv, ZeroPolicy, seed=1, worker_index=2)
    worker.sample()
    seeds = worker.foreach_env(lambda env: env.seeds)
    assert [first for first, *_ in seeds] == [2003, 2004]
    assert all(seed is None for _, *later in seeds for seed in later)


def test_without_a_seed_environments_are_not_seeded_and_workers_differ():
    worker = tiny(CountingEnv, ZeroPolicy, seed=None)
    worker.sample()
    assert {seed for seeds in worker.foreach_env(lambda env: env.seeds) for seed in seeds} == {None}
    a, b = (tiny(seed=None).sample() for _ in range(2))
    assert not np.array_equal(a["obs"], b["obs"])
    assert not np.array_equal(a["eps_id"], b["eps_id"])


@pytest.mark.core
def test_episodes_begin_with_the_first_sample_and_new_ones_take_new_seeds():
    indices = []
    callbacks = make_callbacks(on_episode_created=lambda env_index, **_: indices.append(env_index))
    worker = tiny(CountingEnv, ZeroPolicy, callbacks=callbacks)
    assert (worker.foreach_env(lambda env: env.seeds), indices) == ([[], []], [])
    assert not worker.has_episodes
    worker.sample()
    assert indices[:2] == [0, 1]
    first = worker.foreach_env(lambda env: env.seeds[0])
    worker.reset_episodes()
    second = worker.foreach_env(lambda env: env.seeds[-1])
    assert len({*first, *second}) == 4
    assert worker.sample()["t"][0] == 0


@pytest.mark.core
@pytest.mark.parametrize("broken", ["env", "callback"])
def test_after_an_error_the_next_sample_begins_new_episodes(broken):
    """The first environment was stepped, the second was not: no row may join the two."""
    broken_parts = set()

    def fail(part):
        if part in broken_parts:
            raise RuntimeError("out of order")

    class Flaky(CountingEnv):
        def step(self, action):
            fail("env" if self.number else None)
            return super().step(action)

    callbacks = make_callbacks(on_episode_step=lambda **kwargs: fail("callback"))
    settings = {"rollout_fragment_length": 5, "callbacks": callbacks}
    worker = tiny(lambda context: Flaky(context.vector_index), **settings)
    worker.sample()
    broken_parts.add(broken)
    with pytest.raises(RuntimeError, match="out of order"):
        worker.sample()
    broken_parts.clear()
    batch = worker.sample()
    assert batch["t"][::5].tolist() == [0, 0]
    np.testing.assert_array_equal(batch["obs"][:, 2], batch["t"])
    np.testing.assert_array_equal(batch["new_obs"][:, 2], batch["t"] + 1)


@pytest.mark.parametrize("mode", [True, "bulk"])
def test_compressed_observations_are_those_of_an_uncompressed_worker(mode):
    plain, packed = tiny(), tiny(compress_observations=mode)
    expected, batch = plain.sample(), packed.sample()
    assert getattr(batch["obs"], "dtype", None) != np.float32
    plain.learn_on_batch(expected)
    packed.learn_on_batch(batch)
    assert_equal_weights(packed, plain)
    assert_equal_batches(batch.decompress_if_needed(), expected)


def test_weights_that_cannot_be_set_change_nothing():
    worker = tiny()
    before = worker.get_weights()["default_policy"]
    zeros = {key: np.zeros_like(value) for key, value in before.items()}
    with pytest.raises(UnknownPolicyError, match="unknown"):
        worker.set_weights({"default_policy": zeros, "unknown": zeros})
    zeros = {"default_policy": zeros}
    with pytest.raises(KeyError, match="timestep"):
        worker.set_weights(zeros, {"num_grad_updates_per_policy": {}}, weights_seq_no=1)
    assert worker.weights_seq_no is None
    assert_equal(worker.get_weights()["default_policy"], before)
    worker.set_weights(zeros, {})
    assert not any(x.any() for x in worker.get_weights()["default_policy"].values())
    assert worker.get_global_vars()["timestep"] == 0


def test_filters_are_synchronised_for_the_policies_that_have_them_or_not_at_all():
    plain, filtered = tiny(), tiny(observation_filter="MeanStdFilter")
    plain.sync_filters({})
    for worker, values, words in (
        (plain, {"x": 1}, r"\[\]; missing: \[\], unknown: \['x'\]"),
        (filtered, {"x": 1}, r"missing: \['default_policy'\], unknown: \['x'\]"),
        (filtered, {}, r"missing: \['default_policy'\], unknown: \[\]"),
    ):
        with pytest.raises(AssertionError, match=words):
            worker.sync_filters(values)
        with pytest.raises(ValueError, match="new_filters"):
            worker.sync_filters(values)


class Learner(ZeroPolicy):
    """Remembers the rows that it learned from."""

    def learn_on_batch(self, samples):
        self.learned = [*getattr(self, "learned", []), samples["t"].tolist()]
        return {"rows": samples.count, "reward": float(samples["rewards"].mean())}


def test_a_custom_policy_learns_in_shuffled_minibatches():
    one, other = (single_env(Learner, lambda _: CountingEnv(0, (9,)), 6) for _ in range(2))
    results, count = one.sample_and_learn(6, 2, 4, ["rewards"])
    assert (count, results["default_policy"]["rows"]) == (6, 2)
    learned = one.get_policy().learned
    assert [len(rows) for rows in learned] == [4, 2, 4, 2]
    assert sorted(learned[0] + learned[1]) == sorted(learned[2] + learned[3]) == [0, 1, 2, 3, 4, 5]
    assert learned[:2] != learned[2:]
    other.sample_and_learn(6, 2, 4, [])
    assert other.get_policy().learned == learned
    with pytest.raises(KeyError, match="advantages"):
        one.sample_and_learn(6, 1, 0, ["advantages"])
    assert len(one.get_policy().learned) == 4


def test_a_fake_sampler_repeats_its_first_batch():
    worker = single_env(ZeroPolicy, fake_sampler=True)
    batch = worker.sample()
    assert worker.sample() is batch
    assert len(worker.env.unwrapped.actions) == 8


def test_a_worker_has_a_seed_and_knows_whether_it_has_several_policies():
    worker = tiny(worker_index=2, num_workers=0)
    assert (worker.seed, worker.multiagent) == (3 + 2, False)
    assert tiny(seed=None).seed is None
    worker.add_policy("other", ZeroPolicy)
    assert worker.multiagent


@pytest.mark.core
def test_a_custom_policy_samples():
    worker = single_env(ZeroPolicy, length=7)
    batch = worker.sample()
    assert batch.count == 7
    assert (batch["actions"] == 0).all()
    assert "advantages" not in batch
    assert worker.get_policy().config["rollout_fragment_length"] == 7


class Scripted(Policy):
    """Returns the items of `script`, call after call."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.calls = getattr(self, "calls", -1) + 1
        return self.script[self.calls % len(self.script)]


one_or_several_agents = pytest.mark.parametrize(
    "env", [SeededEnv, lambda context: make_multi_agent("CartPole-v1")({})]
)


@pytest.mark.core
@one_or_several_agents
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([None], r"must return \(actions, state_outs, extras\).* Got None"),
        ([([0, 1, 1], [], {})], r"got \d observations, but returned actions of the shape .3,."),
        ([([0], [], {"x": [1.0, 2.0, 3.0]})], r"but returned x of the shape .3,."),
        ([([0], [], {"x": [1.0]}), ([0], [], {})], r"returned the columns .* but .*'x'"),
        ([([0], [], {}), ([0], [], {"x": [1.0]})], r"returned the columns .*'x'.* but "),
    ],
)
def test_results_of_a_custom_policy_are_checked(env, script, words):
    worker = single_env(type("Custom", (Scripted,), {"script": script}), env)
    with pytest.raises(UsageError, match=words):
        worker.sample()


@one_or_several_agents
def test_a_custom_policy_may_return_lists(env):
    worker = single_env(type("Custom", (Scripted,), {"script": [([1], [], {"x": [2.5]})]}), env)
    batch = worker.sample().as_multi_agent()["default_policy"]
    assert batch["actions"].tolist() == [1] * 8
    assert batch["x"].tolist() == [2.5] * 8


@one_or_several_agents
def test_a_postprocessing_that_returns_no_batch_is_named(env):
    class Forgetful(ZeroPolicy):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            sample_batch["twice"] = 2 * sample_batch["rewards"]

    with pytest.raises(UsageError, match=r"Forgetful.postprocess_trajectory must return a Sample"):
        tiny(env, Forgetful).sample()


def test_a_custom_policy_gets_nested_batches_of_a_dict_space():
    class ByName(Policy):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(obs_batch["choose"], [], {"seen": obs_batch["size"][:, 0]})

    class Constant(gym.Env):
        action_space = spaces.Discrete(4)
        observation_space = spaces.Dict(choose=action_space, size=spaces.Box(0, 9, (1,)))
        obs = {"choose": 2, "size": np.array([5.0], np.float32)}

        def reset(self, *, seed=None, options=None):
            return self.obs, {}

        def step(self, action):
            return self.obs, float(action), False, False, {}

    batch = single_env(ByName, Constant, 3).sample()
    assert batch["actions"].tolist() == [2, 2, 2]
    assert batch["rewards"].tolist() == [2.0, 2.0, 2.0]
    assert batch["seen"].tolist() == [5.0, 5.0, 5.0]


def test_policy_gradient_samples_whole_episodes_with_their_returns():
    settings = {"gamma": 0.5, "train_batch_size": 12}
    batch = make_worker(SeededEnv, PGTF2Policy, config_class=PGConfig, **settings).sample()
    assert batch.count == 15  # three episodes of five steps
    rewards = batch["rewards"].reshape(3, 5)
    expected = np.zeros((3, 6), np.float32)
    for t in reversed(range(5)):
        expected[:, t] = rewards[:, t] + 0.5 * expected[:, t + 1]
    np.testing.assert_allclose(batch["advantages"].reshape(3, 5), expected[:, :5], rtol=1e-6)
