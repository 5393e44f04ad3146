"""Names that ported code imports: environments, policies from functions, helpers, trainers."""

import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import tfpolicies
from helpers.custom_policies import ZeroPolicy
from helpers.factories import OBS, TWO, assert_equal, batch_for, make, rows_of
from helpers.multi_agent_envs import Staggered
from helpers.quick_configs import Corridor, quick_config
from tfpolicies import Algorithm, PGConfig, PPOConfig, PPOTF1Policy, PPOTF2Policy, compat
from tfpolicies.envs.env_factory import EnvContext, check_env_name, make_any_environments
from tfpolicies.errors import ConfigError, EnvError, PolicyOwnedError, UnsupportedMethodError
from tfpolicies.models.mean_std_filters import MeanStdFilter

FIVE = rows_of(OBS, 5, seed=3)


class WideModel(compat.FullyConnectedNetwork):
    """A ported model in a module that workers can import."""


@pytest.mark.core
def test_a_registered_environment_is_found_by_its_name():
    compat.register_env("corridor", lambda env_config: Corridor(env_config))
    config = quick_config(env="corridor", env_config={"length": 3})
    algorithm = config.rollouts(num_envs_per_worker=2, rollout_fragment_length=8).build()
    assert algorithm.train()["timesteps_total"] == 16
    assert algorithm.worker.foreach_env(lambda env: (env.length, env.worker_index)) == [(3, 0)] * 2


def test_a_registered_environment_may_have_several_agents():
    compat.register_env("two.of:them", lambda env_config: Staggered())
    check_env_name("two.of:them")
    envs = make_any_environments("two.of:them", 2, EnvContext({}))
    assert len(envs.get_sub_environments()) == 2
    envs.close()


def test_registering_a_name_again_replaces_it_and_shadows_gymnasiums():
    compat.register_env("CartPole-v1", lambda env_config: Corridor(EnvContext({"length": 1})))
    compat.register_env("CartPole-v1", lambda env_config: Corridor(EnvContext({"length": 2})))
    envs = make_any_environments("CartPole-v1", 1, EnvContext({}))
    assert envs.get_sub_environments()[0].length == 2
    tfpolicies.envs.env_registry.ENVIRONMENTS.pop("CartPole-v1")


def test_wrong_registrations_and_unknown_names_are_refused():
    compat.register_env("corridor", Corridor)
    with pytest.raises(EnvError, match=r"Did you mean 'corridor'\?"):
        check_env_name("coridor")
    with pytest.raises(EnvError, match="non-empty str, got None"):
        compat.register_env(None, Corridor)
    with pytest.raises(EnvError, match="must be an environment class or f"):
        compat.register_env("corridor", Corridor(EnvContext({"length": 1})))


def get_policy_ids(worker):
    return sorted(worker.policy_map)


@pytest.mark.usefixtures("ray_cluster")
def test_names_reach_workers_in_other_processes():
    lock = threading.Lock()
    compat.register_env("corridor", Corridor)
    compat.register_env("not picklable", lambda env_config: lock)
    compat.ModelCatalog.register_custom_model("wide", WideModel)
    config = quick_config(env="corridor", env_config={"length": 3}, model={"custom_model": "wide"})
    algorithm = config.rollouts(num_rollout_workers=1, rollout_fragment_length=16).build()
    assert algorithm.train()["timesteps_total"] == 16
    compat.ModelCatalog.register_custom_model("registered later", WideModel)
    model = {"custom_model": "registered later"}
    algorithm.add_policy("other", PPOTF2Policy, config={"model": model})
    assert algorithm.workers.foreach_worker(get_policy_ids) == [["default_policy", "other"]] * 2
    algorithm.stop()


def squared_loss(policy, model, dist_class, train_batch):
    logits, _ = model(train_batch)
    policy.logp = dist_class(logits, model).logp(train_batch["actions"])
    policy.values = model.value_function()
    returns = train_batch[compat.Postprocessing.ADVANTAGES]
    critic = tf.reduce_mean(tf.square(returns - policy.values))
    return policy.config["my_weight"] * critic - tf.reduce_mean(policy.logp * returns)


def add_returns(policy, sample_batch, other_agent_batches=None, episode=None):
    sample_batch["advantages"] = compat.discount_cumsum(
        sample_batch["rewards"], policy.config["gamma"]
    )
    return sample_batch


class Counting:
    def __init__(self, start):
        self.count = start


MyPolicy = compat.build_tf_policy(
    name="MyPolicy",
    loss_fn=squared_loss,
    get_default_config=lambda: compat.with_common_config(
        {"my_weight": 0.5, "lr": 0.1, "my_kind": "x"}
    ),
    postprocess_fn=add_returns,
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


@pytest.mark.core
def test_a_policy_of_functions_acts_and_learns_by_them():
    policy = make(MyPolicy, my_weight=2.0)
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
    policies = make(kind), make(MyPolicy)
    assert policies[0].get_session() is not None
    outputs = [act_twice(policy) for policy in policies]
    np.testing.assert_allclose(*outputs, atol=1e-6)
    batch = batch_for(policies[0], 4)
    stats = [policy.learn_on_batch(batch)["learner_stats"] for policy in policies]
    assert stats[0]["mean_logp"] == pytest.approx(stats[1]["mean_logp"], abs=1e-6)


def act_twice(policy):
    return policy.compute_actions(FIVE, explore=False).extras["twice"]


def test_numbers_among_custom_settings_of_a_policy_of_functions_are_hyperparameters():
    one, two = make(MyPolicy), make(MyPolicy, my_weight=3.0)
    assert one.program is two.program
    assert make(MyPolicy, my_kind="y").program is not one.program
    with pytest.raises(ConfigError, match="my_weigth"):
        make(MyPolicy, my_weigth=1.0)


def test_a_policy_of_functions_comes_back_from_its_checkpoint(tmp_path):
    policy = make(MyPolicy)
    assert f"{MyPolicy.__module__}.{MyPolicy.__qualname__}" == f"{__name__}.MyPolicy"
    policy.export_checkpoint(tmp_path)
    restored = MyPolicy.from_checkpoint(tmp_path)
    np.testing.assert_array_equal(act_twice(restored), act_twice(policy))


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
    values = []

    def make_model(policy, obs_space, action_space, config):
        settings = {"fcnet_hiddens": [3], "fcnet_activation": "tanh", "vf_share_layers": True}
        return compat.FullyConnectedNetwork(obs_space, action_space, 2, settings, "mine")

    def check(policy, obs_space, action_space, config):
        if not isinstance(obs_space, spaces.Discrete):
            raise compat.UnsupportedSpaceException("only Discrete")

    kind = compat.build_tf_policy(
        "Mine",
        loss_fn=None,
        make_model=make_model,
        validate_spaces=check,
        before_init=lambda policy, obs, actions, config: values.append(config["gamma"]),
        after_init=lambda policy, obs, actions, config: values.append(policy.num_grad_updates),
        get_batch_divisibility_req=lambda policy: 2,
        action_distribution_fn=lambda policy, model, **values: (
            -model(values["input_dict"])[0],
            policy.dist_class,
            [],
        ),
    )
    policy = kind(spaces.Discrete(5), TWO, {"inference": "tf", "gamma": 0.5})
    assert values == [0.5, 0]
    assert policy.get_batch_divisibility_req() == 2
    kernel, bias, out, out_bias, *_ = policy.get_weights().values()
    assert kernel.shape == (5, 3)
    extras = policy.compute_actions(np.array([1])).extras
    expected = -(np.tanh(kernel[1] + bias) @ out + out_bias)
    np.testing.assert_allclose(extras["action_dist_inputs"][0], expected, atol=1e-6)
    with pytest.raises(compat.UnsupportedSpaceException, match="only Discrete"):
        kind(OBS, TWO, {})


def test_traced_functions_that_read_an_attribute_of_one_policy_are_refused():
    def loss(policy, model, dist_class, train_batch):
        return policy.count * tf.reduce_mean(model(train_batch)[0])

    policy = make(MyPolicy.with_updates(name="Wrong", loss_fn=loss))
    with pytest.raises(PolicyOwnedError, match=r"read self\.count"):
        policy.learn_on_batch(batch_for(policy, 4))


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_a_policy_made_by_itself_has_its_id_and_seed(policy_class):
    arguments = (policy_class, {"model": {"fcnet_hiddens": [4]}}, OBS, TWO)
    one = compat.create_policy_for_framework("p", *arguments, worker_index=2, seed=1)
    two = compat.create_policy_for_framework("p", *arguments, seed=1)
    other = compat.create_policy_for_framework("q", *arguments, seed=1)
    assert one.policy_id == "p"
    first, same, different = (next(iter(p.get_weights().values())) for p in (one, two, other))
    np.testing.assert_array_equal(first, same)
    assert np.any(first != different)
    whole = PGConfig().training(lr=0.5)
    with_config = compat.create_policy_for_framework("p", policy_class, whole, OBS, TWO)
    assert with_config.config["lr"] == 0.5
    with pytest.raises(ConfigError, match="A policy id must be"):
        compat.create_policy_for_framework("a/b", *arguments)


def test_a_custom_policy_is_created_for_a_framework():
    policy = compat.create_policy_for_framework("one", ZeroPolicy, PPOConfig(), OBS, TWO)
    assert policy.compute_actions(FIVE)[0].tolist() == [0] * 5
    assert policy.config["lr"] == 5e-5


def test_helpers_give_the_results_of_rllibs():
    tf1, tf2, version = compat.try_import_tf()
    assert (tf1, tf2, version) == (tf.compat.v1, tf, 2)
    assert tf.executing_eagerly()
    y = tf.constant([1.0, 2.0, 3.0])
    assert compat.explained_variance(y, y).numpy() == pytest.approx(1.0)
    assert compat.explained_variance(y, tf.zeros(3)).numpy() == pytest.approx(0.0, abs=1e-5)
    probabilities = compat.softmax([[0.0, 0.0], [0.0, -100.0]])
    assert probabilities.tolist() == [[0.5, 0.5], [1.0, 1e-6]]  # at least 1e-6
    torch, nn = compat.try_import_torch()

    class TorchModel(nn.Module):
        pass

    assert torch is None
    with pytest.raises(UnsupportedMethodError, match="TorchModel is a model of PyTorch"):
        TorchModel()
    compat.validate_policy_id("main", error=True)
    assert tfpolicies.SampleBatch.CUR_OBS == "obs"

    @compat.override(dict)
    def keys(self):
        return None

    assert keys(None) is None
    settings = compat.with_common_config({"multiagent": {"policies": {"p"}}})
    assert settings["policies"].keys() == {"p"}


@pytest.mark.core
def test_actions_become_one_hot_by_their_space_or_a_depth():
    assert compat.one_hot([2, 1], spaces.Discrete(2, start=1)).numpy().tolist() == [[0, 1], [1, 0]]
    parts = compat.one_hot(np.array([[1, 0]]), spaces.MultiDiscrete([2, 3])).numpy()
    assert parts.tolist() == [[0, 1, 1, 0, 0]]
    assert compat.one_hot(np.array([[0], [2]]), depth=3).tolist() == [[[1, 0, 0]], [[0, 0, 1]]]
    assert compat.one_hot(1, 2).tolist() == [0, 1]
    words = r"one_hot takes a Discrete space.*Box"
    with pytest.raises(compat.UnsupportedSpaceException, match=words):
        compat.one_hot([[0.5]], OBS)


def test_nested_observations_are_batched_and_come_apart_again():
    rows = [{"a": np.array([i, i + 1.0]), "b": (i, -i)} for i in range(3)]
    batched = compat.batch(rows)
    assert batched["a"].shape == (3, 2)
    assert [part.tolist() for part in batched["b"]] == [[0, 1, 2], [0, -1, -2]]
    for result, row in zip(compat.unbatch(batched), rows, strict=True):
        assert_equal({"a": result["a"], "b": result["b"]}, row)
    nested = spaces.Dict({"a": OBS, "b": spaces.Tuple([TWO, TWO])})
    assert compat.flatten_space(nested) == [OBS, TWO, TWO]


@pytest.mark.core
def test_a_trainer_of_a_dict_and_an_environment_comes_back_from_its_checkpoint(tmp_path):
    compat.register_env("corridor", Corridor)
    config = compat.PGTrainer.get_default_config()
    config |= {"env_config": {"length": 2}, "num_workers": 0, "train_batch_size": 8}
    config |= {"model": {"fcnet_hiddens": [4]}, "batch_mode": "truncate_episodes"}
    config |= {"inference": "tf", "jit_compile": False}
    trainer = compat.PGTrainer(config=config, env="corridor")
    assert trainer.train()["timesteps_total"] >= 8
    assert trainer.get_policy().config["lr"] == PGConfig().lr
    trainer.save(tmp_path)
    restored = Algorithm.from_checkpoint(tmp_path)
    assert (type(restored), restored.iteration) == (compat.PGTrainer, 1)


def test_a_default_config_is_the_one_of_the_trainer():
    assert compat.TD3Trainer.get_default_config() == compat.TD3_DEFAULT_CONFIG
    assert compat.TD3_DEFAULT_CONFIG is compat.TD3_DEFAULT_CONFIG
    with pytest.raises(AttributeError, match="OTHER_DEFAULT_CONFIG"):
        _ = compat.OTHER_DEFAULT_CONFIG


def test_a_trainer_refuses_contradicting_environments():
    for config in ({"env": "b"}, PPOConfig().environment("b")):
        with pytest.raises(ConfigError, match="'a' as an argument and 'b' in the config"):
            compat.PPOTrainer(config, env="a")
    with pytest.raises(ConfigError, match="logger_creator must be None"):
        compat.PPOTrainer({}, logger_creator=print)


@pytest.mark.core
def test_names_of_compat_are_documented_and_missing_ones_have_alternatives():
    assert set(compat.__all__) <= set(dir(compat))
    for name in compat.__all__:
        assert getattr(compat, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'TorchModelV2'"):
        _ = compat.TorchModelV2
    with pytest.raises(ImportError, match=r"no D4RLReader\. Use Minari: offline_data\("):
        from tfpolicies.compat import D4RLReader  # noqa: F401
    with pytest.raises(ImportError, match=r"Use MultiCategorical, which picks for each place"):
        _ = compat.SlateMultiCategorical


def test_policies_have_the_weights_counters_and_class_methods_that_scripts_read():
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
    assert compat.get_tf_eager_cls_if_necessary(PPOTF2Policy, {}) is PPOTF2Policy
    with pytest.raises(AttributeError, match="'PPOTF2Policy' has no attribute 'as_lazy'"):
        _ = PPOTF2Policy.as_lazy


def test_filters_have_their_statistics_and_are_copied():
    first = MeanStdFilter(OBS)
    first.observe([np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]], np.float32)])
    twin = first.copy()
    assert (first.running_stats.n, first.buffer.n) == (2, 2)
    np.testing.assert_allclose(first.running_stats.mean, [1.0, 1.0, 1.0])
    first.reset_buffer()
    assert (first.running_stats.n, twin.as_serializable().buffer.n) == (0, 2)
    with pytest.raises(AttributeError, match="has no attribute 'rs'"):
        _ = first.rs


def test_arguments_have_rllibs_names():
    two = compat.make_multi_agent(env_name_or_creator="CartPole-v1")({"num_agents": 2})
    assert two.get_agent_ids() == {0, 1}
    both = compat.make_multi_callbacks(callback_class_list=[tfpolicies.DefaultCallbacks] * 2)
    assert len(both().parts) == 2
    context = EnvContext({"a": {"b": 1}}, worker_index=2)
    other = context.copy_with_overrides(env_config={"c": 3}, vector_index=1, worker_index=None)
    assert (other, other.worker_index, other.vector_index) == ({"c": 3}, 2, 1)
    with pytest.raises(EnvError, match=r"got \['place'\]. Give settings of the environment as"):
        context.copy_with_overrides(place=1)
