"""The rollout worker: its arguments, their errors, seeds, and its documented methods."""

import socket
import weakref

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import CountingEnv, SeededEnv, TwoArmsEnv
from tfpolicies import (
    AlgorithmConfig,
    DefaultCallbacks,
    PGConfig,
    PGTF2Policy,
    Policy,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
    SampleBatch,
)
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import ConfigError, EnvError, UnknownPolicyError, UsageError
from tfpolicies.policy.policy import ActionBatch

OBS, ACTIONS = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)


class Zero(Policy):
    """Always takes action 0."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})


def tiny(**debugging):
    return (
        PPOConfig()
        .training(model={"fcnet_hiddens": [8]}, train_batch_size=16, sgd_minibatch_size=8)
        .rollouts(rollout_fragment_length=8, num_envs_per_worker=2)
        .framework(inference="tf", jit_compile=False)
        .debugging(**{"seed": 3, **debugging})
    )


def worker(config=None, env=SeededEnv, policy=PPOTF2Policy, **arguments):
    return RolloutWorker(
        env_creator=None if env is None else (lambda context: env()),
        config=tiny() if config is None else config,
        default_policy_class=policy,
        **arguments,
    )


def assert_equal_batches(one, other):
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


# -- arguments --------------------------------------------------------------------------------


@pytest.mark.core
def test_a_worker_without_config_takes_the_defaults_of_its_policy_class():
    made = RolloutWorker(env_creator=lambda context: SeededEnv(), default_policy_class=PPOTF2Policy)
    assert isinstance(made.config, PPOConfig)
    assert made.config["framework"] == "tf2"
    assert made.config.lr == PPOConfig().lr
    assert made.get_policy().config["clip_param"] == PPOConfig().clip_param


def test_a_dict_of_settings_is_merged_over_the_defaults_and_left_as_it_is():
    settings = {"rollout_fragment_length": 4, "lambda": 0.5, "model": {"fcnet_hiddens": [4]}}
    kept = {**settings, "model": {"fcnet_hiddens": [4]}}
    made = worker({**settings})
    assert made.config.get_fragment_length() == 4
    assert made.get_policy().config["lambda"] == 0.5
    assert made.config.model["fcnet_activation"] == "tanh"
    assert settings == kept
    assert made.sample().count == 4


@pytest.mark.core
def test_the_config_is_frozen_by_the_worker():
    config = tiny()
    worker(config)
    assert config.is_frozen


def test_a_config_of_another_class_gives_the_policy_what_it_knows():
    config = AlgorithmConfig().training(gamma=0.5, lr=0.25).debugging(seed=1)
    made = worker(config).get_policy()
    assert (made.config["gamma"], made.config["lr"]) == (0.5, 0.25)
    assert made.config["clip_param"] == PPOConfig().clip_param


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tf_session_creator": None}, "PolicyMap"),
        ({"dataset_shards": []}, "dataset_shards"),
        ({"policy": None}, "default_policy_class"),
        ({"config": {"gama": 0.9}}, "Did you mean 'gamma'"),
        ({"config": {"gamma": 2.0}}, "gamma"),
        ({"config": 7}, "config"),
        ({"policy": dict}, "default_policy_class"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, words):
    with pytest.raises(ConfigError, match=words):
        worker(**arguments)


def test_all_arguments_are_keywords():
    with pytest.raises(TypeError):
        RolloutWorker(lambda context: SeededEnv())


def test_without_environment_and_spaces_the_missing_space_is_named():
    with pytest.raises(ValueError, match="observation_space not provided"):
        worker(env=None)
    with pytest.raises(ValueError, match="action_space not provided"):
        worker(tiny().environment(observation_space=OBS), env=None)


@pytest.mark.parametrize("key", ["default_policy", "__env__"])
def test_spaces_serve_where_there_is_no_environment(key):
    made = worker(env=None, spaces={key: (OBS, ACTIONS)})
    assert made.get_policy().observation_space == OBS
    assert made.policy_dict["default_policy"].action_space == ACTIONS
    assert made.env is None
    assert made.sampler is None
    assert made.get_metrics() == []
    assert made.foreach_env(lambda env: env) == []
    assert made.foreach_env_with_context(lambda env, context: env) == []
    with pytest.raises(ValueError, match="no input_reader"):
        made.sample()


def test_a_creator_may_give_no_environment_where_there_are_spaces():
    spaces_of = {"default_policy": (OBS, ACTIONS)}
    made = RolloutWorker(
        env_creator=lambda context: None if context.worker_index == 0 else SeededEnv(),
        config=tiny(),
        default_policy_class=PPOTF2Policy,
        spaces=spaces_of,
    )
    assert (made.env, made.sampler, made.get_metrics()) == (None, None, [])
    with pytest.raises(UsageError, match="no input_reader"):
        made.sample()
    with pytest.raises(EnvError, match="but gave NoneType"):
        RolloutWorker(env_creator=lambda context: None, default_policy_class=PPOTF2Policy)


def test_spaces_of_the_config_serve_where_there_is_nothing_else():
    made = worker(tiny().environment(observation_space=OBS, action_space=ACTIONS), env=None)
    assert made.get_policy().action_space == ACTIONS


def test_the_environment_may_come_from_the_config():
    made = RolloutWorker(
        config=tiny().environment(TwoArmsEnv, env_config={"arms": 2}),
        default_policy_class=PPOTF2Policy,
    )
    assert [env.config["arms"] for env in made.foreach_env(lambda env: env)] == [2, 2]
    assert made.env is made.foreach_env(lambda env: env)[0]


@pytest.mark.core
def test_each_environment_gets_a_context_of_its_own():
    contexts = []

    def create(context):
        contexts.append(context)
        return SeededEnv()

    made = RolloutWorker(
        env_creator=create,
        config=tiny().environment(env_config={"size": 7}),
        default_policy_class=PPOTF2Policy,
        worker_index=2,
        num_workers=4,
        recreated_worker=True,
    )
    assert [dict(context) for context in contexts] == [{"size": 7}] * 2
    assert [context.vector_index for context in contexts] == [0, 1]
    assert {(c.worker_index, c.num_workers, c.recreated_worker) for c in contexts} == {(2, 4, True)}
    result = made.foreach_env_with_context(lambda env, context: (env, context))
    assert [c.vector_index for _, c in result] == [0, 1]
    assert {(c.worker_index, c.num_workers, c.recreated_worker) for _, c in result} == {
        (2, 4, True)
    }
    assert [c["size"] for _, c in result] == [7, 7]


def test_validate_env_sees_each_environment_and_its_error_gets_out():
    seen = []
    worker(validate_env=lambda env, context: seen.append((env, context.vector_index)))
    assert [index for _, index in seen] == [0, 1]
    assert all(isinstance(env, SeededEnv) for env, _ in seen)

    def reject(env, context):
        raise RuntimeError("not this one")

    with pytest.raises(RuntimeError, match="not this one"):
        worker(validate_env=reject)


def test_an_unknown_environment_of_the_config_lists_near_matches():
    with pytest.raises(EnvError, match="CartPole"):
        RolloutWorker(config={"env": "CartPol-v1"}, default_policy_class=PPOTF2Policy)


def test_construction_calls_back_for_environments_and_then_for_the_policy():
    calls = []

    class Noting(DefaultCallbacks):
        def on_sub_environment_created(self, *, worker, sub_environment, env_context, env_index):
            calls.append(("env", env_index, env_context.vector_index))

        def on_create_policy(self, *, policy_id, policy):
            calls.append(("policy", policy_id, type(policy)))

    worker(tiny().callbacks(Noting))
    assert calls == [
        ("env", 0, 0),
        ("env", 1, 1),
        ("policy", "default_policy", PPOTF2Policy),
    ]


def test_creation_args_are_what_was_given():
    config = tiny()
    made = worker(config, worker_index=1, num_workers=2, log_dir="logs")
    result = made.creation_args()
    assert result["config"] is config
    assert (result["worker_index"], result["num_workers"], result["log_dir"]) == (1, 2, "logs")
    assert result["default_policy_class"] is PPOTF2Policy
    assert set(result) == {
        "env_creator",
        "validate_env",
        "config",
        "worker_index",
        "num_workers",
        "recreated_worker",
        "log_dir",
        "spaces",
        "default_policy_class",
        "dataset_shards",
        "tf_session_creator",
    }


# -- seeds ------------------------------------------------------------------------------------


@pytest.mark.core
def test_one_seed_gives_equal_workers():
    one, other = worker(), worker()
    for _ in range(4):
        assert_equal_batches(one.sample(), other.sample())
    result, same = ([m._replace(perf_stats={}) for m in w.get_metrics()] for w in (one, other))
    assert result == same != []


def test_the_worker_index_changes_experience_but_not_weights():
    one, other = worker(worker_index=1), worker(worker_index=2)
    for key, value in one.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(value, other.get_weights()["default_policy"][key])
    a, b = one.sample(), other.sample()
    assert not np.array_equal(a["obs"], b["obs"])
    assert not np.array_equal(a["actions"], b["actions"])


def test_environment_seeds_follow_the_documented_formula():
    made = worker(tiny(seed=1), env=CountingEnv, policy=Zero, worker_index=2)
    made.sample()
    assert made.foreach_env(lambda env: env.seeds[0]) == [2003, 2004]
    assert all(seed is None for seeds in made.foreach_env(lambda e: e.seeds[1:]) for seed in seeds)


def test_without_a_seed_environments_are_not_seeded_and_workers_differ():
    made = worker(tiny(seed=None), env=CountingEnv, policy=Zero)
    made.sample()
    assert {seed for seeds in made.foreach_env(lambda env: env.seeds) for seed in seeds} == {None}
    a, b = worker(tiny(seed=None)).sample(), worker(tiny(seed=None)).sample()
    assert not np.array_equal(a["obs"], b["obs"])
    assert not np.array_equal(a["eps_id"], b["eps_id"])


def test_new_episodes_take_new_seeds():
    made = worker(env=CountingEnv, policy=Zero)
    made.sample()
    first = made.foreach_env(lambda env: env.seeds[0])
    made.reset_episodes()
    second = made.foreach_env(lambda env: env.seeds[-1])
    assert len({*first, *second}) == 4
    assert made.sample()["t"][0] == 0


@pytest.mark.core
def test_episodes_begin_with_the_first_sample():
    called = []

    class Callbacks(DefaultCallbacks):
        def on_episode_created(self, *, env_index, **kwargs):
            called.append(env_index)

    made = worker(tiny().callbacks(Callbacks), env=CountingEnv, policy=Zero)
    assert (made.foreach_env(lambda env: env.seeds), called) == ([[], []], [])
    assert not made.has_episodes
    made.sample()
    assert called[:2] == [0, 1]


# -- methods ----------------------------------------------------------------------------------


@pytest.mark.core
def test_sample_counts_and_calls_back_and_metrics_empty():
    ended = []

    class Noting(DefaultCallbacks):
        def on_sample_end(self, *, worker, samples):
            ended.append((worker, samples.count))

    made = worker(tiny().callbacks(Noting))
    batch, count = made.sample_with_count()
    assert isinstance(batch, SampleBatch)
    assert count == batch.count == 16
    assert ended == [(made, 16)]
    assert [m.episode_length for m in made.get_metrics()] == [5, 5]
    assert made.get_metrics() == []


@pytest.mark.core
@pytest.mark.parametrize("broken", ["env", "callback"])
def test_after_an_error_the_next_sample_begins_new_episodes(broken):
    """The first environment was stepped, the second was not: no row may join the two."""
    state = {"fails": False}

    class Flaky(CountingEnv):
        def step(self, action):
            if self.number and broken == "env" and state["fails"]:
                raise RuntimeError("out of order")
            return super().step(action)

    class Callbacks(DefaultCallbacks):
        def on_episode_step(self, **kwargs):
            if broken == "callback" and state["fails"]:
                raise RuntimeError("out of order")

    made = RolloutWorker(
        env_creator=lambda context: Flaky(context.vector_index),
        config=tiny().rollouts(rollout_fragment_length=5).callbacks(Callbacks),
        default_policy_class=PPOTF2Policy,
    )
    made.sample()
    state["fails"] = True
    with pytest.raises(RuntimeError, match="out of order"):
        made.sample()
    state["fails"] = False
    batch = made.sample()
    assert batch["t"][::5].tolist() == [0, 0]
    np.testing.assert_array_equal(batch["obs"][:, 2], batch["t"])
    np.testing.assert_array_equal(batch["new_obs"][:, 2], batch["t"] + 1)


@pytest.mark.parametrize("how", [True, "bulk"])
def test_compressed_observations_are_those_of_an_uncompressed_worker(how):
    plain, packed = worker(), worker(tiny().rollouts(compress_observations=how))
    expected, batch = plain.sample(), packed.sample()
    assert getattr(batch["obs"], "dtype", None) != np.float32
    assert_equal_batches(batch.decompress_if_needed(), expected)


def test_a_worker_learns_on_its_compressed_batches_as_on_others():
    plain, packed = worker(), worker(tiny().rollouts(compress_observations=True))
    plain.learn_on_batch(plain.sample())
    packed.learn_on_batch(packed.sample())
    weights = [w.get_weights()["default_policy"] for w in (plain, packed)]
    for key, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][key])


def test_policies_are_reached_by_their_id():
    made = worker()
    policy = made.get_policy()
    assert made.get_policy("nobody") is None
    assert made.for_policy(lambda p, extra: (p, extra), extra=1) == (policy, 1)
    assert made.foreach_policy(lambda p, pid, extra: (p, pid, extra), extra=2) == [
        (policy, "default_policy", 2)
    ]
    with pytest.raises(KeyError, match=r"'nobody'.*default_policy"):
        made.for_policy(lambda p: p, "nobody")


@pytest.mark.core
def test_weights_travel_between_workers():
    one, other = worker(), worker(tiny(seed=9))
    weights = one.get_weights()
    assert list(weights) == ["default_policy"]
    other.set_weights(weights, {"timestep": 77})
    for key, value in other.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(value, weights["default_policy"][key])
    assert other.get_global_vars()["timestep"] == 77
    assert other.get_policy().global_timestep == 77


def test_weights_are_chosen_by_id_and_unknown_ids_are_ignored():
    made = worker()
    assert list(made.get_weights("default_policy")) == ["default_policy"]
    assert list(made.get_weights(["default_policy", "nobody"])) == ["default_policy"]
    assert made.get_weights(["nobody"]) == {}
    assert made.get_weights("not_the_default_policy") == {}


def test_weights_for_an_unknown_policy_are_refused_and_change_nothing():
    made = worker()
    before = made.get_weights()["default_policy"]
    zeros = {key: np.zeros_like(value) for key, value in before.items()}
    with pytest.raises(UnknownPolicyError, match="nobody"):
        made.set_weights({"default_policy": zeros, "nobody": zeros})
    for key, value in made.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.core
def test_gradients_computed_and_applied_are_an_update():
    one, other = worker(), worker()
    batch = one.sample()
    gradients, info = one.compute_gradients(batch, single_agent=True)
    assert info["batch_count"] == 16
    assert "policy_loss" in info["learner_stats"]
    one.apply_gradients(gradients)
    other.learn_on_batch(batch)
    for key, value in one.get_weights()["default_policy"].items():
        result = other.get_weights()["default_policy"][key]
        np.testing.assert_allclose(value, result, rtol=1e-4, atol=1e-6)


def test_gradients_may_be_given_by_policy_id():
    one, other = worker(), worker()
    gradients, info = one.compute_gradients(one.sample())
    assert set(gradients) == {"default_policy"}
    assert set(info) == {"default_policy", "batch_count"}
    other.apply_gradients(gradients)
    gradients = gradients["default_policy"]
    one.apply_gradients(gradients)
    for key, value in one.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(value, other.get_weights()["default_policy"][key])
    with pytest.raises(UnknownPolicyError, match="nobody"):
        one.apply_gradients({"nobody": gradients})


def test_filters_are_synchronised_for_the_policies_that_have_them_or_not_at_all():
    plain, filtered = worker(), worker(tiny().rollouts(observation_filter="MeanStdFilter"))
    plain.sync_filters({})
    for made, values, words in (
        (plain, {"x": 1}, r"\[\]; missing: \[\], unknown: \['x'\]"),
        (filtered, {"x": 1}, r"missing: \['default_policy'\], unknown: \['x'\]"),
        (filtered, {}, r"missing: \['default_policy'\], unknown: \[\]"),
    ):
        with pytest.raises(AssertionError, match=words):
            made.sync_filters(values)
        with pytest.raises(ValueError, match="new_filters"):
            made.sync_filters(values)


def test_weights_are_not_set_without_the_time_step_of_their_global_variables():
    made = worker()
    before = made.get_weights()["default_policy"]
    zeros = {"default_policy": {key: np.zeros_like(x) for key, x in before.items()}}
    with pytest.raises(KeyError, match="timestep"):
        made.set_weights(zeros, {"num_grad_updates_per_policy": {}}, weights_seq_no=1)
    assert made.weights_seq_no is None
    for key, value in made.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(value, before[key])
    made.set_weights(zeros, {})
    assert not any(x.any() for x in made.get_weights()["default_policy"].values())
    assert made.get_global_vars()["timestep"] == 0


class Learner(Zero):
    """Remembers the rows that it learned from."""

    def learn_on_batch(self, samples):
        self.learned = [*getattr(self, "learned", []), samples["t"].tolist()]
        return {"rows": samples.count, "reward": float(samples["rewards"].mean())}


def test_a_hand_written_policy_learns_in_shuffled_minibatches():
    config = {"rollout_fragment_length": 6, "seed": 1}
    one, other = (
        worker(config, env=lambda: CountingEnv(0, (9,)), policy=Learner) for _ in range(2)
    )
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


def test_a_fake_sampler_gives_its_first_batch_again():
    made = worker({"fake_sampler": True, "rollout_fragment_length": 6}, CountingEnv, Zero)
    batch = made.sample()
    assert made.sample() is batch
    assert len(made.env.unwrapped.actions) == 6


def test_slices_share_what_was_drawn_and_keep_nothing_that_was_handed_out():
    made = worker(env=CountingEnv, policy=Zero)
    made.par_iter_init(lambda batches: iter(range(9)))
    assert [made.par_iter_slice(3, i) for i in (1, 0)] == [1, 0]
    assert made.par_iter_next() == 3
    assert [made.par_iter_slice(3, i) for i in (2, 2, 0)] == [2, 6, 4]
    assert made.par_iter_slice_batch(3, 1, 200) == [5, 8]
    with pytest.raises(StopIteration):
        made.par_iter_slice(3, 2)
    made.par_iter_init(lambda batches: (np.array(i) for i in range(2)))
    handed_out = weakref.ref(made.par_iter_slice(1, 0))
    assert handed_out() is None
    with pytest.raises(UsageError, match="start must be from 0 to step - 1, got 3 of 3"):
        made.par_iter_slice(3, 3)


def test_a_worker_tells_its_seed_and_whether_it_has_several_policies():
    made = worker(worker_index=2, num_workers=0)
    assert (made.seed, made.multiagent) == (3 + 2, False)
    assert worker(tiny(seed=None)).seed is None
    made.add_policy("other", Zero)
    assert made.multiagent


def test_learning_gives_results_by_policy_id():
    made = worker()
    result = made.learn_on_batch(made.sample())
    assert list(result) == ["default_policy"]
    assert result["default_policy"]["num_agent_steps_trained"] == 16
    assert made.learn_on_batch(made.sample().as_multi_agent())["default_policy"]


def test_global_variables_are_taken_over_and_reach_the_policy():
    config = tiny().training(lr_schedule=[[0, 1.0], [100, 0.0]])
    made = worker(config)
    assert made.get_global_vars() == {"timestep": 0, "num_grad_updates_per_policy": {}}
    values = {"timestep": 25, "num_grad_updates_per_policy": {"default_policy": 6}}
    made.set_global_vars(values)
    assert made.get_global_vars() == values
    assert made.get_policy().num_grad_updates == 6
    assert made.get_policy().get_hyperparameter("lr") == pytest.approx(0.75)
    values["num_grad_updates_per_policy"]["default_policy"] = 9
    assert made.get_global_vars()["num_grad_updates_per_policy"]["default_policy"] == 6
    with pytest.raises(KeyError):
        made.set_global_vars({})


def test_small_questions_get_small_answers():
    made = worker()
    assert made.ping() == "pong"
    assert made.get_host() == socket.gethostname()
    assert made.apply(lambda w, a, b: (w, a, b), 1, b=2) == (made, 1, 2)


def test_stop_closes_the_environments_once_and_may_be_called_again():
    made = worker(env=CountingEnv, policy=Zero)
    envs = made.foreach_env(lambda env: env)
    made.stop()
    made.stop()
    assert [env.closed for env in envs] == [1, 1]
    assert made.env is None
    assert made.get_metrics() == []
    with pytest.raises(UsageError, match="stopped"):
        made.sample()


@pytest.mark.core
def test_a_hand_written_policy_samples_too():
    made = worker(env=CountingEnv, policy=Zero, config={"rollout_fragment_length": 7})
    batch = made.sample()
    assert batch.count == 7
    assert (batch["actions"] == 0).all()
    assert "advantages" not in batch
    assert made.get_policy().config["rollout_fragment_length"] == 7


class Scripted(Policy):
    """Gives what its script says, call after call."""

    script = ()

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.calls = getattr(self, "calls", -1) + 1
        return self.script[self.calls % len(self.script)]


@pytest.mark.core
@pytest.mark.parametrize("env", [SeededEnv, lambda: make_multi_agent("CartPole-v1")({})])
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
def test_what_a_hand_written_policy_gives_is_checked(env, script, words):
    kind = type("Own", (Scripted,), {"script": script})
    made = worker(tiny().rollouts(num_envs_per_worker=1), env=env, policy=kind)
    with pytest.raises(UsageError, match=words):
        made.sample()


@pytest.mark.parametrize("env", [SeededEnv, lambda: make_multi_agent("CartPole-v1")({})])
def test_a_hand_written_policy_may_give_lists(env):
    kind = type("Own", (Scripted,), {"script": [([1], [], {"x": [2.5]})]})
    made = worker(tiny().rollouts(num_envs_per_worker=1), env=env, policy=kind)
    batch = made.sample().as_multi_agent()["default_policy"]
    assert batch["actions"].tolist() == [1] * 8
    assert batch["x"].tolist() == [2.5] * 8


@pytest.mark.parametrize("env", [SeededEnv, lambda: make_multi_agent("CartPole-v1")({})])
def test_a_postprocessing_that_gives_no_batch_is_named(env):
    class Forgetful(Zero):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            sample_batch["twice"] = 2 * sample_batch["rewards"]

    with pytest.raises(UsageError, match=r"Forgetful.postprocess_trajectory must return a Sample"):
        worker(env=env, policy=Forgetful).sample()


def test_a_policy_that_acts_on_a_dict_space_by_hand_gets_nested_batches():
    class ByName(Policy):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(obs_batch["choose"], [], {"seen": obs_batch["size"][:, 0]})

    class Telling(gym.Env):
        observation_space = spaces.Dict(
            choose=spaces.Discrete(4), size=spaces.Box(0, 9, (1,), np.float32)
        )
        action_space = spaces.Discrete(4)

        def reset(self, *, seed=None, options=None):
            return {"choose": 2, "size": np.array([5.0], np.float32)}, {}

        def step(self, action):
            return self.reset()[0], float(action), False, False, {}

    batch = worker(env=Telling, policy=ByName, config={"rollout_fragment_length": 3}).sample()
    assert batch["actions"].tolist() == [2, 2, 2]
    assert batch["rewards"].tolist() == [2.0, 2.0, 2.0]
    assert batch["seen"].tolist() == [5.0, 5.0, 5.0]


def test_policy_gradient_samples_whole_episodes_with_their_returns():
    config = PGConfig().training(gamma=0.5, train_batch_size=12).debugging(seed=0)
    made = worker(config.framework(inference="tf"), policy=PGTF2Policy)
    batch = made.sample()
    assert batch.count == 15  # three episodes of five steps
    rewards = batch["rewards"].reshape(3, 5)
    expected = np.zeros((3, 6), np.float32)
    for t in reversed(range(5)):
        expected[:, t] = rewards[:, t] + 0.5 * expected[:, t + 1]
    np.testing.assert_allclose(batch["advantages"].reshape(3, 5), expected[:, :5], rtol=1e-6)
