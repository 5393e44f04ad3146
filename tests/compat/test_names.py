"""Old names that ported code imports: environments, policies from functions, helpers, trainers."""

import json
import threading

import gymnasium as gym
import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import tfpolicies
from helpers.factories import OBS, TWO, assert_equal, batch_for, make, rows_of
from tfpolicies import (
    Algorithm,
    DefaultCallbacks,
    MultiAgentEnv,
    PGConfig,
    Policy,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    SampleBatch,
    compat,
)
from tfpolicies.compat import (
    FullyConnectedNetwork,
    PGTrainer,
    Postprocessing,
    PPOTrainer,
    UnsupportedSpaceException,
    batch,
    build_tf_policy,
    create_policy_for_framework,
    explained_variance,
    flatten_space,
    get_tf_eager_cls_if_necessary,
    one_hot,
    override,
    register_env,
    softmax,
    try_import_tf,
    try_import_torch,
    unbatch,
    validate_policy_id,
    with_common_config,
)
from tfpolicies.envs.env_factory import EnvContext, check_env_name, make_any_environments
from tfpolicies.errors import ConfigError, EnvError, PolicyOwnedError, UnsupportedMethodError
from tfpolicies.models.mean_std_filters import MeanStdFilter

FIVE = rows_of(OBS, 5, seed=3)


class Corridor(gym.Env):
    """Walk right to the end; the length comes from the config."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = TWO

    def __init__(self, config):
        self.length = config["length"]
        self.worker_index = config.worker_index

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.at += 1 if action == 1 else -1
        done = self.at >= self.length
        return np.full(1, np.tanh(self.at), np.float32), float(done) - 0.1, done, False, {}


class Pair(MultiAgentEnv):
    """Two agents act once, then it is over."""

    def __init__(self):
        super().__init__()
        self._agent_ids = {"a", "b"}
        self.observation_space, self.action_space = OBS, TWO

    def reset(self, *, seed=None, options=None):
        return dict.fromkeys("ab", np.zeros(3, np.float32)), {}

    def step(self, action_dict):
        over = {"__all__": True}
        obs = dict.fromkeys("ab", np.zeros(3, np.float32))
        return obs, {"a": 1.0, "b": 2.0}, over, {"__all__": False}, {}


class WideModel(FullyConnectedNetwork):
    """A ported model in a module that workers can import."""


# -- environments -------------------------------------------------------------------------------


@pytest.mark.core
def test_a_registered_environment_is_found_by_its_name():
    register_env("corridor", lambda env_config: Corridor(env_config))
    config = PPOConfig().environment("corridor", env_config={"length": 3})
    config.rollouts(num_envs_per_worker=2, rollout_fragment_length=5).training(
        train_batch_size=10, sgd_minibatch_size=10, num_sgd_iter=1, model={"fcnet_hiddens": [4]}
    ).framework(inference="tf", jit_compile=False)
    algorithm = config.build()
    assert algorithm.train()["timesteps_total"] == 10
    assert algorithm.worker.foreach_env(lambda env: (env.length, env.worker_index)) == [(3, 0)] * 2
    algorithm.stop()


def test_a_registered_environment_may_have_several_agents():
    register_env("two.of:them", lambda env_config: Pair())
    check_env_name("two.of:them")
    made = make_any_environments("two.of:them", 2, EnvContext({}))
    assert len(made.get_sub_environments()) == 2
    made.close()


def test_registering_a_name_again_replaces_it_and_shadows_gymnasiums():
    register_env("CartPole-v1", lambda env_config: Corridor(EnvContext({"length": 1})))
    register_env("CartPole-v1", lambda env_config: Corridor(EnvContext({"length": 2})))
    made = make_any_environments("CartPole-v1", 1, EnvContext({}))
    assert made.get_sub_environments()[0].length == 2
    tfpolicies.envs.env_registry.ENVIRONMENTS.pop("CartPole-v1")


def test_wrong_registrations_and_unknown_names_are_refused():
    register_env("corridor", Corridor)
    with pytest.raises(EnvError, match=r"Did you mean 'corridor'\?"):
        check_env_name("coridor")
    with pytest.raises(EnvError, match="non-empty str, got None"):
        register_env(None, Corridor)
    with pytest.raises(EnvError, match="must be an environment class or f"):
        register_env("corridor", Corridor(EnvContext({"length": 1})))


@pytest.mark.core
def test_every_environment_of_all_workers_is_reached_by_worker():
    config = PPOConfig().environment(lambda context: gym.make("CartPole-v1"), env_config={"a": 1})
    config.framework(inference="tf", jit_compile=False).debugging(seed=0)
    algorithm = config.rollouts(num_envs_per_worker=2).build()
    result = algorithm.workers.foreach_env(lambda env: env.spec.id)
    assert result == [["CartPole-v1", "CartPole-v1"]]
    result = algorithm.workers.foreach_env_with_context(lambda env, at: (at["a"], at.vector_index))
    assert result == [[(1, 0), (1, 1)]]
    algorithm.stop()


def policy_ids(worker):
    return sorted(worker.policy_map)


@pytest.mark.usefixtures("ray_cluster")
def test_names_reach_workers_in_other_processes():
    lock = threading.Lock()
    register_env("corridor", Corridor)
    register_env("not picklable", lambda env_config: lock)
    compat.ModelCatalog.register_custom_model("wide", WideModel)
    config = PPOConfig().environment("corridor", env_config={"length": 3})
    config.rollouts(num_rollout_workers=1, rollout_fragment_length=8)
    config.training(train_batch_size=8, sgd_minibatch_size=8, model={"custom_model": "wide"})
    algorithm = config.framework(inference="tf", jit_compile=False).build()
    assert algorithm.train()["timesteps_total"] == 8
    compat.ModelCatalog.register_custom_model("registered later", WideModel)
    model = {"custom_model": "registered later"}
    algorithm.add_policy("other", PPOTF2Policy, config={"model": model})
    assert algorithm.workers.foreach_worker(policy_ids) == [["default_policy", "other"]] * 2
    algorithm.stop()


# -- policies from functions --------------------------------------------------------------------


def squared_loss(policy, model, dist_class, train_batch):
    logits, _ = model(train_batch)
    policy.logp = dist_class(logits, model).logp(train_batch["actions"])
    policy.values = model.value_function()
    returns = train_batch[Postprocessing.ADVANTAGES]
    critic = tf.reduce_mean(tf.square(returns - policy.values))
    return policy.config["my_weight"] * critic - tf.reduce_mean(policy.logp * returns)


def returns_of(policy, sample_batch, other_agent_batches=None, episode=None):
    sample_batch["advantages"] = compat.discount_cumsum(
        sample_batch["rewards"], policy.config["gamma"]
    )
    return sample_batch


class Counting:
    def __init__(self, start):
        self.count = start


MyPolicy = build_tf_policy(
    name="MyPolicy",
    loss_fn=squared_loss,
    get_default_config=lambda: with_common_config({"my_weight": 0.5, "lr": 0.1, "my_kind": "x"}),
    postprocess_fn=returns_of,
    stats_fn=lambda policy, train_batch: {"mean_logp": tf.reduce_mean(policy.logp)},
    grad_stats_fn=lambda policy, train_batch, grads: {"parts": float(len(grads))},
    optimizer_fn=lambda policy, config: keras.optimizers.SGD(),
    compute_gradients_fn=lambda policy, optimizer, loss: optimizer.compute_gradients(loss),
    apply_gradients_fn=lambda policy, optimizer, grads: optimizer.apply_gradients(grads),
    extra_learn_fetches_fn=lambda policy: {"logp": policy.logp},
    extra_action_out_fn=lambda policy: {
        "vf_preds": policy.model.value_function(),
        "twice": 2 * policy.model.last_output(),
    },
    before_loss_init=lambda policy, obs, actions, config: Counting.__init__(policy, 5),
    mixins=[Counting],
)


def quick(**config):
    model = {"fcnet_hiddens": [4]}
    return {"seed": 0, "inference": "tf", "jit_compile": False, "model": model, **config}


@pytest.mark.core
def test_a_policy_of_functions_acts_and_learns_as_they_say():
    policy = MyPolicy(OBS, TWO, quick(my_weight=2.0))
    assert (policy.config["lr"], policy.config["my_kind"], policy.count) == (0.1, "x", 5)
    extras = policy.compute_actions(FIVE).extras
    np.testing.assert_allclose(extras["twice"], 2 * extras["action_dist_inputs"])

    batch = batch_for(policy, 4)
    assert batch["advantages"][-1] == pytest.approx(batch["rewards"][-1])
    grads, info = policy.compute_gradients(batch)
    logp = policy.compute_log_likelihoods(batch["actions"], batch["obs"])
    assert info["learner_stats"]["mean_logp"] == pytest.approx(logp.mean(), abs=1e-6)
    before = list(policy.get_weights().values())
    result = policy.learn_on_batch(batch)
    np.testing.assert_allclose(result["logp"], logp, atol=1e-6)
    assert result["learner_stats"]["parts"] == len(grads)
    for old, new, grad in zip(before, policy.get_weights().values(), grads, strict=True):
        np.testing.assert_allclose(new, old - 0.1 * grad, atol=1e-6)  # plain SGD, lr 0.1


def test_a_policy_of_functions_runs_in_graph_mode_if_a_subclass_says_so():
    kind = type("InGraph", (MyPolicy,), {"runtime": "session"})
    policy, eager = kind(OBS, TWO, quick()), MyPolicy(OBS, TWO, quick())
    assert policy.get_session() is not None
    np.testing.assert_allclose(
        policy.compute_actions(FIVE, explore=False).extras["twice"],
        eager.compute_actions(FIVE, explore=False).extras["twice"],
        atol=1e-6,
    )
    batch = batch_for(policy, 4)
    stats = [each.learn_on_batch(batch)["learner_stats"] for each in (policy, eager)]
    assert stats[0]["mean_logp"] == pytest.approx(stats[1]["mean_logp"], abs=1e-6)


def test_own_settings_of_a_policy_of_functions_are_hyperparameters_if_they_are_numbers():
    one, two = MyPolicy(OBS, TWO, quick()), MyPolicy(OBS, TWO, quick(my_weight=3.0))
    assert one.program is two.program
    assert MyPolicy(OBS, TWO, quick(my_kind="y")).program is not one.program
    with pytest.raises(ConfigError, match="my_weigth"):
        MyPolicy(OBS, TWO, quick(my_weigth=1.0))


def test_a_policy_of_functions_comes_back_from_its_checkpoint(tmp_path):
    policy = MyPolicy(OBS, TWO, quick())
    assert f"{MyPolicy.__module__}.{MyPolicy.__qualname__}" == f"{__name__}.MyPolicy"
    policy.export_checkpoint(tmp_path)
    restored = MyPolicy.from_checkpoint(tmp_path)
    np.testing.assert_array_equal(
        restored.compute_actions(FIVE, explore=False).extras["twice"],
        policy.compute_actions(FIVE, explore=False).extras["twice"],
    )


def test_updates_of_a_policy_of_functions_keep_the_rest():
    base = PPOConfig().training(lr=0.25)
    changed = MyPolicy.with_updates(name="Changed", get_default_config=lambda: base)
    assert changed.__name__ == "Changed"
    assert changed.as_eager() is changed
    assert changed.config_class().lr == 0.25
    assert isinstance(changed.config_class(), PPOConfig)
    with pytest.raises(ConfigError, match="must return a dict or an AlgorithmConfig, got 5"):
        MyPolicy.with_updates(get_default_config=lambda: 5)


def test_a_policy_of_functions_may_make_its_model_and_look_at_its_spaces():
    seen = []

    def make_model(policy, obs_space, action_space, config):
        settings = {"fcnet_hiddens": [3], "fcnet_activation": "tanh", "vf_share_layers": True}
        return FullyConnectedNetwork(obs_space, action_space, 2, settings, "mine")

    def check(policy, obs_space, action_space, config):
        if not isinstance(obs_space, spaces.Discrete):
            raise UnsupportedSpaceException("only Discrete")

    kind = build_tf_policy(
        "Mine",
        loss_fn=None,
        make_model=make_model,
        validate_spaces=check,
        before_init=lambda policy, obs, actions, config: seen.append(config["gamma"]),
        after_init=lambda policy, obs, actions, config: seen.append(policy.num_grad_updates),
        get_batch_divisibility_req=lambda policy: 2,
        action_distribution_fn=lambda policy, model, **values: (
            -model(values["input_dict"])[0],
            policy.dist_class,
            [],
        ),
    )
    policy = kind(spaces.Discrete(5), TWO, {"inference": "tf", "gamma": 0.5})
    assert seen == [0.5, 0]
    assert policy.get_batch_divisibility_req() == 2
    kernel, bias, out, out_bias, *_ = policy.get_weights().values()
    assert kernel.shape == (5, 3)
    extras = policy.compute_actions(np.array([1])).extras
    expected = -(np.tanh(kernel[1] + bias) @ out + out_bias)
    np.testing.assert_allclose(extras["action_dist_inputs"][0], expected, atol=1e-6)
    with pytest.raises(UnsupportedSpaceException, match="only Discrete"):
        kind(OBS, TWO, {})


def test_traced_functions_that_read_what_one_policy_owns_are_told():
    def loss(policy, model, dist_class, train_batch):
        return policy.count * tf.reduce_mean(model(train_batch)[0])

    policy = MyPolicy.with_updates(name="Wrong", loss_fn=loss)(OBS, TWO, quick())
    with pytest.raises(PolicyOwnedError, match=r"read self\.count"):
        policy.learn_on_batch(batch_for(policy, 4))


# -- policies one by one, and helpers -------------------------------------------------------------


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_a_policy_made_by_itself_has_its_id_and_seed(policy_class):
    arguments = (policy_class, {"model": {"fcnet_hiddens": [4]}}, OBS, TWO)
    one = create_policy_for_framework("p", *arguments, worker_index=2, seed=1)
    two = create_policy_for_framework("p", *arguments, seed=1)
    other = create_policy_for_framework("q", *arguments, seed=1)
    assert one.policy_id == "p"
    first, same, different = (next(iter(p.get_weights().values())) for p in (one, two, other))
    np.testing.assert_array_equal(first, same)
    assert np.any(first != different)
    whole = PGConfig().training(lr=0.5)
    assert create_policy_for_framework("p", policy_class, whole, OBS, TWO).config["lr"] == 0.5
    with pytest.raises(ConfigError, match="A policy id must be"):
        create_policy_for_framework("a/b", *arguments)


class Always(Policy):
    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return np.ones(len(obs_batch), np.int64), [], {}


def test_a_hand_written_policy_is_made_by_itself_too():
    policy = create_policy_for_framework("one", Always, PPOConfig(), OBS, TWO)
    assert policy.compute_actions(FIVE)[0].tolist() == [1] * 5
    assert policy.config["lr"] == 5e-5


def test_helpers_do_what_they_did():
    tf1, tf2, version = try_import_tf()
    assert (tf1, tf2, version) == (tf.compat.v1, tf, 2)
    assert tf.executing_eagerly()
    y = tf.constant([1.0, 2.0, 3.0])
    assert explained_variance(y, y).numpy() == pytest.approx(1.0)
    assert explained_variance(y, tf.zeros(3)).numpy() == pytest.approx(0.0, abs=1e-5)
    torch, nn = try_import_torch()

    class TorchModel(nn.Module):
        """What stands beside the TensorFlow model in many scripts."""

    assert torch is None
    with pytest.raises(UnsupportedMethodError, match="TorchModel is a model of PyTorch"):
        TorchModel()
    validate_policy_id("main", error=True)
    assert SampleBatch.CUR_OBS == "obs"

    @override(dict)
    def keys(self):
        return None

    assert keys(None) is None
    assert with_common_config({"multiagent": {"policies": {"p"}}})["policies"].keys() == {"p"}


@pytest.mark.core
def test_actions_become_one_hot_as_their_space_says():
    assert one_hot([2, 1], spaces.Discrete(2, start=1)).numpy().tolist() == [[0, 1], [1, 0]]
    parts = one_hot(np.array([[1, 0]]), spaces.MultiDiscrete([2, 3])).numpy()
    assert parts.tolist() == [[0, 1, 1, 0, 0]]
    with pytest.raises(UnsupportedSpaceException, match=r"one_hot takes a Discrete space.*Box"):
        one_hot([[0.5]], OBS)


def test_nested_observations_are_batched_and_come_apart_again():
    rows = [{"a": np.array([i, i + 1.0]), "b": (i, -i)} for i in range(3)]
    batched = batch(rows)
    assert batched["a"].shape == (3, 2)
    assert [part.tolist() for part in batched["b"]] == [[0, 1, 2], [0, -1, -2]]
    for result, row in zip(unbatch(batched), rows, strict=True):
        assert_equal({"a": result["a"], "b": result["b"]}, row)
    nested = spaces.Dict({"a": OBS, "b": spaces.Tuple([TWO, TWO])})
    assert flatten_space(nested) == [OBS, TWO, TWO]


def test_probabilities_have_a_least_value():
    assert softmax([[0.0, 0.0], [0.0, -100.0]]).tolist() == [[0.5, 0.5], [1.0, 1e-6]]


# -- trainers -----------------------------------------------------------------------------------


@pytest.mark.core
def test_a_trainer_takes_a_dict_and_an_environment_and_comes_back_from_its_checkpoint(tmp_path):
    register_env("corridor", Corridor)
    config = PGTrainer.get_default_config()
    config |= {"env_config": {"length": 2}, "num_workers": 0, "train_batch_size": 8}
    config |= {"model": {"fcnet_hiddens": [4]}, "batch_mode": "truncate_episodes"}
    config |= {"inference": "tf", "jit_compile": False}
    trainer = PGTrainer(config=config, env="corridor")
    assert trainer.train()["timesteps_total"] >= 8
    assert trainer.get_policy().config["lr"] == PGConfig().lr
    trainer.save(tmp_path)
    trainer.stop()
    restored = Algorithm.from_checkpoint(tmp_path)
    assert (type(restored), restored.iteration) == (PGTrainer, 1)
    restored.stop()


def test_a_trainer_refuses_what_contradicts_itself():
    with pytest.raises(ConfigError, match="'a' as an argument and 'b' in the config"):
        PPOTrainer({"env": "b"}, env="a")
    with pytest.raises(ConfigError, match="'a' as an argument and 'b' in the config"):
        PPOTrainer(PPOConfig().environment("b"), env="a")
    with pytest.raises(ConfigError, match="logger_creator must be None"):
        PPOTrainer({}, logger_creator=print)


# -- the room -----------------------------------------------------------------------------------


@pytest.mark.core
def test_every_old_name_is_there():
    assert set(compat.__all__) <= set(dir(compat))
    for name in compat.__all__:
        assert getattr(compat, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'TorchModelV2'"):
        _ = compat.TorchModelV2


@pytest.mark.core
def test_a_name_that_something_else_stands_for_says_what():
    with pytest.raises(ImportError, match=r"no JsonWriter\. Use RolloutWorker\.sample\(\), "):
        from tfpolicies.compat import JsonWriter  # noqa: F401
    with pytest.raises(ImportError, match=r"Use MultiCategorical, which picks for each place"):
        _ = compat.SlateMultiCategorical


# -- policies and filters -------------------------------------------------------------------------


def test_policies_have_what_scripts_ask_variables_and_classes_for():
    policy = make()
    weights = policy.get_weights()
    listed = policy.get_weights(as_dict=False)
    assert [x.tobytes() for x in listed] == [x.tobytes() for x in weights.values()]
    policy.set_weights(listed)
    assert policy.get_weights(as_dict=True).keys() == weights.keys()
    policy.compute_actions(np.zeros((3, 3), np.float32))
    assert policy.global_timestep.numpy() == int(policy.global_timestep) == 3
    assert json.dumps(policy.global_timestep) == "3"
    assert PPOTF2Policy.with_tracing() is PPOTF2Policy.as_eager() is PPOTF2Policy
    assert get_tf_eager_cls_if_necessary(PPOTF2Policy, {}) is PPOTF2Policy
    with pytest.raises(AttributeError, match="'PPOTF2Policy' has no attribute 'as_lazy'"):
        _ = PPOTF2Policy.as_lazy


def test_filters_tell_their_statistics_and_are_copied():
    held = MeanStdFilter(OBS)
    rows = np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]], np.float32)
    held.observe([rows])
    twin = held.copy()
    assert (held.running_stats.n, held.buffer.n) == (2, 2)
    np.testing.assert_allclose(held.running_stats.mean, [1.0, 1.0, 1.0])
    held.reset_buffer()
    assert (held.running_stats.n, twin.as_serializable().buffer.n) == (0, 2)
    with pytest.raises(AttributeError, match="has no attribute 'rs'"):
        _ = held.rs


def test_arguments_have_rllibs_names():
    two = compat.make_multi_agent(env_name_or_creator="CartPole-v1")({"num_agents": 2})
    assert two.get_agent_ids() == {0, 1}
    both = compat.make_multi_callbacks(callback_class_list=[DefaultCallbacks, DefaultCallbacks])
    assert len(both().parts) == 2
    context = EnvContext({"a": {"b": 1}}, worker_index=2)
    other = context.copy_with_overrides(env_config={"c": 3}, vector_index=1, worker_index=None)
    assert (other, other.worker_index, other.vector_index) == ({"c": 3}, 2, 1)
    with pytest.raises(EnvError, match=r"got \['place'\]. Give settings of the environment as"):
        context.copy_with_overrides(place=1)
