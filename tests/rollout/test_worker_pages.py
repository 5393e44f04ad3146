"""One test for each method and argument of the pages RolloutWorker, add_policy and multi_agent.

`python -m tools.worker_pages` prints them as a table.
"""

import inspect
import socket
import threading
import weakref

import gymnasium as gym
import numpy as np
import pytest

from helpers.custom_policies import ZeroPolicy
from helpers.environments import CountingEnv, SeededEnv
from helpers.factories import assert_equal
from helpers.multi_agent_envs import SPACE, THREE, Staggered
from helpers.two_policies import a_and_b
from helpers.workers import (
    assert_equal_weights,
    make_callbacks,
    make_config,
    make_worker,
    map_all_to,
)
from tfpolicies import (
    AlgorithmConfig,
    MultiAgentBatch,
    PGTF2Policy,
    PolicySpec,
    PPOTF1Policy,
    PPOTF2Policy,
    RolloutWorker,
    SampleBatch,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.errors import ConfigError, PolicyExistsError, UnknownPolicyError, UsageError
from tfpolicies.policy_map.policy_map import PolicyMap

TINY = {"model": {"fcnet_hiddens": [4]}, "inference": "tf", "jit_compile": False}


def single(policy_class=PPOTF2Policy, env=SeededEnv, **settings):
    """Makes a worker with one policy in one environment."""
    settings = {"rollout_fragment_length": 8, "seed": 1, **settings}
    return make_worker(env, policy_class, **settings)


def several(**settings):
    """Makes a worker with the policies "left" and "right"."""
    mapping = {"policies": {"left", "right"}, "policy_mapping_fn": a_and_b}
    learning = {"train_batch_size": 14, "sgd_minibatch_size": 8, "num_sgd_iter": 2, "lr": 0.01}
    settings = {**mapping, **learning, "rollout_fragment_length": 7, "seed": 1, **settings}
    return make_worker(Staggered, **settings)


# -- RolloutWorker(...) ----------------------------------------------------------------------


def test_init_env_creator():
    contexts = []

    def create(context):
        contexts.append((context.vector_index, dict(context)))
        return SeededEnv()

    single(env=None, env_creator=create, num_envs_per_worker=2, env_config={"size": 3})
    assert contexts == [(0, {"size": 3}), (1, {"size": 3})]


def test_init_validate_env():
    calls = []
    single(validate_env=lambda *args: calls.append(args), num_envs_per_worker=2)
    pairs = [(type(env), context.vector_index) for env, context in calls]
    assert pairs == [(SeededEnv, 0), (SeededEnv, 1)]

    def refuse(env, context):
        raise RuntimeError("not this one")

    with pytest.raises(RuntimeError, match="not this one"):
        single(validate_env=refuse)


def test_init_config():
    assert single(gamma=0.5).get_policy().config["gamma"] == 0.5
    settings = {"default_policy_class": PPOTF2Policy, "env_creator": lambda context: SeededEnv()}
    worker = RolloutWorker(config={**TINY, "gamma": 0.25}, **settings)
    assert worker.get_policy().config["gamma"] == 0.25
    plain = RolloutWorker(
        env_creator=lambda context: gym.make("CartPole-v1"), default_policy_class=PPOTF1Policy
    )
    assert plain.get_policy().config["gamma"] == 0.99


def test_init_worker_index():
    for index, seed in ((1, 1 + 1001), (2, 1 + 2002)):
        worker = several(worker_index=index, num_workers=0)
        worker.sample()
        assert worker.env.seeds[0] == seed


def test_init_num_workers():
    worker = several(num_workers=2, spaces={"__env__": (SPACE, THREE)})
    assert worker.num_workers == 2
    assert worker.env is None  # the other workers sample


def test_init_recreated_worker():
    contexts = []
    settings = {"worker_index": 2, "num_workers": 4, "recreated_worker": True}
    worker = single(
        env=lambda context: contexts.append(context) or SeededEnv(),
        num_envs_per_worker=2,
        **settings,
    )
    contexts += worker.foreach_env_with_context(lambda env, context: context)
    assert [context.vector_index for context in contexts] == [0, 1, 0, 1]
    for context in contexts:
        assert {name: getattr(context, name) for name in settings} == settings


def test_init_log_dir(tmp_path):
    worker = single(log_dir=str(tmp_path))
    assert worker.log_dir == worker.creation_args()["log_dir"] == str(tmp_path)


def test_init_spaces():
    for key in (DEFAULT_POLICY_ID, "__env__"):
        worker = single(env=None, spaces={key: (SPACE, THREE)})
        assert worker.get_policy().observation_space == SPACE
        assert worker.policy_dict[DEFAULT_POLICY_ID].action_space == THREE
        assert (worker.env, worker.sampler, worker.get_metrics()) == (None, None, [])
        assert worker.foreach_env(lambda env: env) == []
        assert worker.foreach_env_with_context(lambda env, context: env) == []
        with pytest.raises(ValueError, match="no input_reader"):
            worker.sample()


def test_init_default_policy_class():
    assert type(single(PGTF2Policy).get_policy()) is PGTF2Policy


def test_init_dataset_shards():
    for shards in ([], "logs.parquet"):
        with pytest.raises(ConfigError, match=r"dataset_shards must be a list.*index 0"):
            single(dataset_shards=shards)
    assert single(dataset_shards=[None]).sampler is None
    columns = {"obs": np.ones((3, 4)), "actions": np.array([0, 1, 0])}
    worker = single(PGTF2Policy, dataset_shards=[columns])
    with pytest.raises(ValueError, match=r"'advantages'.*postprocess_inputs=True"):
        worker.sample()


def test_init_tf_session_creator():
    for creator in (None, lambda: None):
        with pytest.raises(ValueError, match=r"tf_session_creator.*PolicyMap"):
            single(tf_session_creator=creator)


# -- methods ----------------------------------------------------------------------------------


def test_method_add_policy():
    assert several().add_policy("new", PPOTF2Policy) is not None


def test_method_apply():
    assert single().apply(lambda worker, x, y: (worker.worker_index, x + y), 1, y=2) == (0, 3)


def test_method_apply_gradients():
    one, other = single(), single()
    batch = one.sample()
    gradients, info = one.compute_gradients(batch, single_agent=True)
    assert info["batch_count"] == 8
    assert "policy_loss" in info["learner_stats"]
    one.apply_gradients(gradients)
    other.apply_gradients({DEFAULT_POLICY_ID: gradients})
    assert_equal_weights(one, other)
    learner = single(num_sgd_iter=1)
    learner.learn_on_batch(batch)
    weights, expected = (x.get_weights()[DEFAULT_POLICY_ID] for x in (one, learner))
    assert list(weights) == list(expected)
    for key, value in weights.items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-4, atol=1e-6)
    with pytest.raises(UnknownPolicyError, match="unknown"):
        one.apply_gradients({"unknown": gradients})


def test_method_compute_gradients():
    worker = several()
    gradients, infos = worker.compute_gradients(worker.sample())
    assert set(gradients) == {"left", "right"}
    assert infos["batch_count"] == 7
    with pytest.raises(UsageError, match="single_agent"):
        worker.compute_gradients(worker.sample(), single_agent=True)
    worker = single()
    gradients, infos = worker.compute_gradients(worker.sample())
    assert set(gradients) == {DEFAULT_POLICY_ID}
    assert set(infos) == {DEFAULT_POLICY_ID, "batch_count"}


def test_method_creation_args():
    settings = {"worker_index": 1, "num_workers": 2, "log_dir": "logs", "spaces": None}
    worker = single(**settings, recreated_worker=True, validate_env=None)
    arguments = worker.creation_args()
    assert arguments["config"] is worker.config
    assert {name: arguments[name] for name in settings} == settings
    assert arguments["default_policy_class"] is PPOTF2Policy
    assert set(arguments) == {*inspect.signature(RolloutWorker).parameters}


def test_method_find_free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", single().find_free_port()))


def test_method_for_policy():
    worker = single()
    assert worker.for_policy(lambda policy, x: (policy, x), x=1) == (worker.get_policy(), 1)
    assert several().for_policy(lambda policy, x: x + 1, "left", x=1) == 2
    with pytest.raises(UnknownPolicyError, match=r"'unknown'.*default_policy"):
        worker.for_policy(print, "unknown")


def test_method_foreach_env():
    worker = single(num_envs_per_worker=2)
    envs = worker.foreach_env(lambda env: env)
    assert [type(env.unwrapped) for env in envs] == [SeededEnv, SeededEnv]
    assert worker.env is envs[0]


def test_method_foreach_env_with_context():
    worker = single(num_envs_per_worker=2)
    assert worker.foreach_env_with_context(lambda env, ctx: ctx.vector_index) == [0, 1]


def test_method_foreach_policy():
    result = several().foreach_policy(lambda policy, policy_id, x: (policy_id, x), x=1)
    assert sorted(result) == [("left", 1), ("right", 1)]


def test_method_foreach_policy_to_train():
    worker = several(policies_to_train=["left"])
    assert worker.foreach_policy_to_train(lambda policy, policy_id: policy_id) == ["left"]


def test_method_get_filters():
    worker = single(observation_filter="MeanStdFilter")
    worker.sample()
    assert worker.get_filters(flush_after=True)[DEFAULT_POLICY_ID].pending_count == 8
    assert worker.get_filters()[DEFAULT_POLICY_ID].pending_count == 0


def test_method_get_global_vars():
    assert single().get_global_vars() == {"timestep": 0, "num_grad_updates_per_policy": {}}


def test_method_get_host():
    assert single().get_host() == socket.gethostname()


def test_method_get_metrics():
    worker = several()
    worker.sample()
    (metrics,) = worker.get_metrics()
    assert metrics.episode_length == 7
    assert metrics.agent_rewards == {("a", "left"): 7.0, ("b", "right"): 7.0}
    assert worker.get_metrics() == []


def test_method_get_node_ip():
    socket.inet_aton(single().get_node_ip())


def test_method_get_policies_to_train():
    worker = several(policies_to_train=lambda policy_id, batch=None: policy_id == "left")
    assert worker.get_policies_to_train() == {"left"}


def test_method_get_policy():
    worker = several()
    assert isinstance(worker.get_policy("left"), PPOTF2Policy)
    assert worker.get_policy("unknown") is None


def test_method_get_weights():
    worker = several()
    assert set(worker.get_weights(["right", "unknown"])) == {"right"}
    assert set(worker.get_weights("right")) == {"right"}
    assert worker.get_weights(["unknown"]) == worker.get_weights("unknown") == {}


def test_method_learn_on_batch():
    worker = several()
    results = worker.learn_on_batch(worker.sample())
    assert results["left"]["num_agent_steps_trained"] == 7
    assert results["right"]["num_agent_steps_trained"] == 4
    worker = single()
    for batch in (worker.sample(), worker.sample().as_multi_agent()):
        results = worker.learn_on_batch(batch)
        assert list(results) == [DEFAULT_POLICY_ID]
        assert results[DEFAULT_POLICY_ID]["num_agent_steps_trained"] == 8


def test_method_lock():
    worker, order = single(), []
    worker.lock()
    waiting = threading.Thread(target=lambda: (worker.lock(), order.append(2), worker.unlock()))
    waiting.start()
    order.append(1)
    worker.unlock()
    waiting.join(10)
    assert order == [1, 2]


def test_method_par_iter_init():
    worker = single()
    with pytest.raises(UsageError, match="par_iter_init"):
        worker.par_iter_next()
    worker.par_iter_init(lambda batches: (batch.count for batch in batches))
    assert worker.par_iter_next() == 8


def test_method_par_iter_next():
    worker = single()
    worker.par_iter_init(iter)
    assert isinstance(worker.par_iter_next(), SampleBatch)


def test_method_par_iter_next_batch():
    worker = single()
    worker.par_iter_init(lambda batches: iter([1, 2, 3]))
    assert worker.par_iter_next_batch(200) == [1, 2, 3]


def test_method_par_iter_slice():
    worker = single(ZeroPolicy, CountingEnv)
    worker.par_iter_init(lambda batches: iter(range(9)))
    assert [worker.par_iter_slice(3, i) for i in (1, 0)] == [1, 0]
    assert worker.par_iter_next() == 3
    assert [worker.par_iter_slice(3, i) for i in (2, 2, 0)] == [2, 6, 4]
    assert worker.par_iter_slice_batch(3, 1, 200) == [5, 8]
    with pytest.raises(StopIteration):
        worker.par_iter_slice(3, 2)
    worker.par_iter_init(lambda batches: (np.array(i) for i in range(2)))
    reference = weakref.ref(worker.par_iter_slice(1, 0))
    assert reference() is None  # the worker keeps nothing that it returned
    with pytest.raises(UsageError, match="start must be from 0 to step - 1, got 3 of 3"):
        worker.par_iter_slice(3, 3)


def test_method_par_iter_slice_batch():
    worker = single()
    worker.par_iter_init(lambda batches: iter(range(6)))
    assert worker.par_iter_slice_batch(2, 1, 200) == [1, 3, 5]


def test_method_ping():
    assert single().ping() == "pong"


def test_method_remove_policy():
    worker = several()
    worker.remove_policy(policy_id="right", policy_mapping_fn=map_all_to("left"))
    assert set(worker.sample().policy_batches) == {"left"}


def test_method_sample():
    assert single().sample().count == 8
    assert isinstance(several().sample(), MultiAgentBatch)


def test_method_sample_and_learn():
    worker = single()
    results, count = worker.sample_and_learn(8, 2, 4, ["advantages"])
    assert count == 8
    assert worker.get_policy().num_grad_updates == 4
    assert set(results) == {DEFAULT_POLICY_ID}
    with pytest.raises(AssertionError, match="9"):
        worker.sample_and_learn(9, 1, 4, [])


def test_method_sample_with_count():
    calls = []

    def record(worker, samples):
        calls.append((worker, samples.count))

    callbacks = make_callbacks(on_sample_end=record)
    worker = single(num_envs_per_worker=2, callbacks=callbacks)
    batch, count = worker.sample_with_count()
    assert isinstance(batch, SampleBatch)
    assert count == batch.count == 16
    assert calls == [(worker, 16)]
    assert [metrics.episode_length for metrics in worker.get_metrics()] == [5, 5]
    assert worker.get_metrics() == []


def test_method_set_global_vars():
    worker = single(lr_schedule=[[0, 1.0], [100, 0.0]])
    values = {"timestep": 25, "num_grad_updates_per_policy": {DEFAULT_POLICY_ID: 6}}
    worker.set_global_vars(values)
    assert worker.get_global_vars() == values
    policy = worker.get_policy()
    assert (policy.global_timestep, policy.num_grad_updates) == (25, 6)
    assert policy.get_hyperparameter("lr") == pytest.approx(0.75)
    values["num_grad_updates_per_policy"][DEFAULT_POLICY_ID] = 9
    assert worker.get_global_vars()["num_grad_updates_per_policy"][DEFAULT_POLICY_ID] == 6
    with pytest.raises(KeyError):
        worker.set_global_vars({})


def test_method_set_is_policy_to_train():
    worker = several()
    worker.set_is_policy_to_train(("right",))
    assert worker.get_policies_to_train() == {"right"}


def test_method_set_policy_mapping_fn():
    worker, all_left = several(), map_all_to("left")
    worker.set_policy_mapping_fn(all_left)
    worker.set_policy_mapping_fn(None)
    assert worker.policy_mapping_fn is all_left
    with pytest.raises(ValueError, match="policy_mapping_fn"):
        worker.set_policy_mapping_fn("left")


def test_method_set_weights():
    worker, other = several(), several()
    worker.learn_on_batch(worker.sample())
    other.set_weights(worker.get_weights(), {"timestep": 7}, weights_seq_no=3)
    assert list(worker.get_weights()) == list(other.get_weights())
    assert_equal(worker.get_weights()["left"], other.get_weights()["left"])
    assert other.get_global_vars()["timestep"] == 7
    assert other.get_policy("left").global_timestep == 7
    assert other.weights_seq_no == 3


def test_method_setup_torch_data_parallel():
    with pytest.raises(ValueError, match="does not support torch distributed"):
        single().setup_torch_data_parallel("url", 0, 1, "gloo")


def test_method_stop():
    worker = single(ZeroPolicy, CountingEnv)
    envs = worker.foreach_env(lambda env: env)
    worker.stop()
    worker.stop()
    assert [env.closed for env in envs] == [1]
    assert worker.env is None
    assert worker.get_metrics() == []
    with pytest.raises(UsageError, match="stopped"):
        worker.sample()


def test_method_sync_filters():
    one, other = (single(observation_filter="MeanStdFilter") for _ in range(2))
    one.sample()
    one.observation_filters.flush()
    other.sync_filters(one.get_filters())
    (scaling,), (expected,) = (x.filters[DEFAULT_POLICY_ID].get_scalings() for x in (other, one))
    assert (scaling.mean == expected.mean).all()


def test_method_unlock():
    worker = single()
    with pytest.raises(RuntimeError):
        worker.unlock()


# -- add_policy(...) --------------------------------------------------------------------------


def test_add_policy_policy_id():
    worker = several()
    worker.add_policy("new", PPOTF2Policy)
    with pytest.raises(PolicyExistsError):
        worker.add_policy("new", PPOTF2Policy)
    with pytest.raises(ConfigError):
        worker.add_policy("no/name", PPOTF2Policy)


def test_add_policy_policy_cls():
    assert type(several().add_policy("new", PGTF2Policy)) is PGTF2Policy


def test_add_policy_policy():
    policy = PPOTF2Policy(SPACE, THREE, dict(TINY))
    worker = several()
    assert worker.add_policy("new", policy=policy) is policy
    with pytest.raises(ValueError, match="Only one of"):
        worker.add_policy("other", PPOTF2Policy, policy)
    for wrong in ("a name", PPOTF2Policy, {}):
        with pytest.raises(UsageError, match="policy must be a Policy"):
            worker.add_policy("other", policy=wrong)
    assert "other" not in worker.policy_map


def test_an_added_policy_that_a_callback_refuses_leaves_no_trace():
    def refuse(policy_id, policy):
        if policy_id == "new":
            raise RuntimeError("not this one")

    worker = several(callbacks=make_callbacks(on_create_policy=refuse))
    before = worker.policies.mapping_and_trainable
    settings = {"policy_mapping_fn": map_all_to("new"), "policies_to_train": []}
    with pytest.raises(RuntimeError, match="not this one"):
        worker.add_policy("new", PPOTF2Policy, **settings)
    assert set(worker.policy_map) == set(worker.policy_dict) == {"left", "right"}
    assert worker.policies.mapping_and_trainable == before


def test_add_policy_observation_space():
    space = gym.spaces.Box(0, 1, (7,))
    added = several().add_policy("new", PPOTF2Policy, observation_space=space)
    assert added.observation_space == space


def test_add_policy_action_space():
    added = several().add_policy("new", PPOTF2Policy, action_space=gym.spaces.Discrete(9))
    assert added.action_space == gym.spaces.Discrete(9)


def test_add_policy_config():
    added = several().add_policy("new", PPOTF2Policy, config={"gamma": 0.5})
    assert added.get_hyperparameter("gamma") == 0.5


def test_add_policy_policy_state():
    worker = several()
    state = worker.get_policy("left").get_state()
    added = worker.add_policy("new", PPOTF2Policy, policy_state=state)
    assert_equal(added.get_weights(), state["weights"])


def test_add_policy_policy_mapping_fn():
    worker = several()
    worker.sample()
    worker.add_policy("new", PPOTF2Policy, policy_mapping_fn=map_all_to("new"))
    assert set(worker.sample().policy_batches) == {"left", "right"}  # it was begun before
    assert set(worker.sample().policy_batches) == {"new"}


def test_schedules_of_an_added_policy_begin_at_the_time_step_of_the_run():
    worker = several()
    worker.set_global_vars({"timestep": 100})
    schedule = {"lr_schedule": [[0, 0.5], [200, 0.0]]}
    assert worker.add_policy("new", PPOTF2Policy, config=schedule).get_hyperparameter("lr") == 0.25


def test_a_mapping_set_right_after_construction_holds_for_the_first_episodes():
    worker = several()
    worker.add_policy("new", PPOTF2Policy, policy_mapping_fn=map_all_to("new"))
    assert set(worker.sample().policy_batches) == {"new"}
    worker = several()
    worker.set_policy_mapping_fn(map_all_to("left"))
    assert set(worker.sample().policy_batches) == {"left"}


def test_add_policy_policies_to_train():
    worker = several()
    worker.add_policy("new", PPOTF2Policy, policies_to_train=lambda pid, batch=None: pid == "new")
    assert worker.get_policies_to_train() == {"new"}


def test_add_policy_module_spec():
    worker = several()
    with pytest.raises(ValueError, match="module_spec"):
        worker.add_policy("new", PPOTF2Policy, module_spec=1)
    assert "new" not in worker.policy_map


# -- AlgorithmConfig.multi_agent(...) ---------------------------------------------------------


def test_multi_agent_policies():
    config = AlgorithmConfig().multi_agent(policies=["x", "y"])
    assert config.policies == dict.fromkeys("xy", PolicySpec())
    config.multi_agent(policies={"z": (PGTF2Policy, SPACE, THREE, {"gamma": 0.5})})
    assert config.policies["z"] == PolicySpec(PGTF2Policy, SPACE, THREE, {"gamma": 0.5})
    with pytest.raises(ValueError, match="tuples"):
        config.multi_agent(policies={"z": (PGTF2Policy, SPACE)})


def test_multi_agent_policy_map_capacity():
    worker = several(policy_map_capacity=1)
    assert isinstance(worker.policy_map, PolicyMap)
    assert worker.policy_map.statistics.in_memory == 1
    assert worker.sample().agent_steps() == 11


def test_multi_agent_policy_mapping_fn():
    worker = several(policy_mapping_fn=map_all_to("left"))
    assert set(worker.sample().policy_batches) == {"left"}
    assert set(several().sample().policy_batches) == {"left", "right"}


def test_multi_agent_policies_to_train():
    config = make_config(Staggered, policies={"left"}, policies_to_train=["unknown"])
    with pytest.raises(ConfigError, match="not defined"):
        config.validate()
    with pytest.raises(AssertionError, match="policies_to_train"):
        AlgorithmConfig().multi_agent(policies_to_train="left")


def test_multi_agent_policy_states_are_swappable():
    worker = several(policy_states_are_swappable=True)
    assert worker.policy_map.policy_states_are_swappable
    with pytest.raises(ConfigError):
        AlgorithmConfig().multi_agent(policy_states_are_swappable="yes")


def test_multi_agent_observation_fn():
    def doubled(agent_obs, worker, base_env, policies, episode, **kwargs):
        return {agent: 2 * x for agent, x in agent_obs.items()}

    plain, changed = several().sample(), several(observation_fn=doubled).sample()
    assert np.array_equal(2 * plain["left"]["obs"], changed["left"]["obs"])


def test_multi_agent_count_steps_by():
    batch = several(count_steps_by="agent_steps", rollout_fragment_length=5).sample()
    assert batch.agent_steps() >= 5 > batch.env_steps()
    with pytest.raises(ValueError, match="count_steps_by"):
        AlgorithmConfig().multi_agent(count_steps_by="steps")


@pytest.mark.parametrize(
    "name", ["algorithm_config_overrides_per_module", "replay_mode", "policy_map_cache"]
)
def test_multi_agent_deprecated(name):
    with pytest.raises(ValueError, match=name):
        AlgorithmConfig().multi_agent(**{name: 1})
