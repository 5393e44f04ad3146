"""One test for each method and argument of the pages RolloutWorker, add_policy and multi_agent.

`python -m tools.worker_pages` prints them as a table.
"""

import socket
import threading

import gymnasium as gym
import numpy as np
import pytest

from algorithms.test_many_policies import (
    Staged,
    a_and_b,
    all_left,
    all_new,
    config_of,
    only_left,
    same,
)
from helpers.environments import SeededEnv
from helpers.multi_agent_envs import SPACE, THREE, Staggered
from tfpolicies import (
    AlgorithmConfig,
    DefaultCallbacks,
    MultiAgentBatch,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    RolloutWorker,
    SampleBatch,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.errors import ConfigError, PolicyExistsError, UnknownPolicyError, UsageError
from tfpolicies.policy_map.policy_map import PolicyMap

TINY = {"model": {"fcnet_hiddens": [4]}, "inference": "tf", "jit_compile": False}


def single_config():
    config = PPOConfig().update_from_dict(TINY).rollouts(rollout_fragment_length=8)
    return config.debugging(seed=1, log_level="ERROR")


def single(config=None, policy_class=PPOTF2Policy, **arguments):
    """A worker with one policy in one environment."""
    arguments.setdefault("env_creator", lambda context: SeededEnv())
    config = single_config() if config is None else config
    return RolloutWorker(config=config, default_policy_class=policy_class, **arguments)


def several(**multi_agent):
    """A worker with the policies "left" and "right"."""
    return RolloutWorker(config=config_of(**multi_agent), default_policy_class=PPOTF2Policy)


def named(*ids):
    """Episodes of `Staggered` have the agents a and b."""
    return {policy_id: PolicySpec() for policy_id in ids}


# -- RolloutWorker(...) ----------------------------------------------------------------------


def test_init_env_creator():
    contexts = []

    def create(context):
        contexts.append((context.vector_index, dict(context)))
        return SeededEnv()

    config = single_config().rollouts(num_envs_per_worker=2)
    single(config.environment(env_config={"size": 3}), env_creator=create)
    assert contexts == [(0, {"size": 3}), (1, {"size": 3})]


def test_init_validate_env():
    def refuse(env, context):
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        single(validate_env=refuse)


def test_init_config():
    assert single(single_config().training(gamma=0.5)).get_policy().config["gamma"] == 0.5
    assert single({**TINY, "gamma": 0.25}).get_policy().config["gamma"] == 0.25
    plain = RolloutWorker(
        env_creator=lambda context: gym.make("CartPole-v1"), default_policy_class=PPOTF1Policy
    )
    assert plain.get_policy().config["gamma"] == 0.99


def test_init_worker_index():
    seeds = []
    for i in (1, 2):
        worker = RolloutWorker(
            config=config_of(), worker_index=i, num_workers=0, default_policy_class=PPOTF2Policy
        )
        worker.sample()
        seeds.append(worker.env.seeds[0])
    assert seeds == [1 + 1001, 1 + 2002]


def test_init_num_workers():
    config = config_of()
    worker = RolloutWorker(
        config=config,
        num_workers=2,
        spaces={"__env__": (SPACE, THREE)},
        default_policy_class=PPOTF2Policy,
    )
    assert worker.num_workers == 2
    assert worker.env is None  # the other workers sample


def test_init_recreated_worker():
    contexts = []

    def create(context):
        contexts.append(context.recreated_worker)
        return SeededEnv()

    single(env_creator=create, recreated_worker=True)
    assert contexts == [True]


def test_init_log_dir(tmp_path):
    worker = single(log_dir=str(tmp_path))
    assert worker.log_dir == worker.creation_args()["log_dir"] == str(tmp_path)


def test_init_spaces():
    worker = RolloutWorker(
        config=single_config(),
        spaces={DEFAULT_POLICY_ID: (SPACE, THREE)},
        default_policy_class=PPOTF2Policy,
    )
    assert worker.get_policy().observation_space == SPACE


def test_init_default_policy_class():
    assert type(single(policy_class=PGTF2Policy, config=dict(TINY)).get_policy()) is PGTF2Policy


def test_init_dataset_shards():
    with pytest.raises(ConfigError, match="dataset_shards"):
        single(dataset_shards=[1])


def test_init_tf_session_creator():
    with pytest.raises(ValueError, match="tf_session_creator"):
        single(tf_session_creator=lambda: None)


# -- methods ----------------------------------------------------------------------------------


def test_method_add_policy():
    assert several().add_policy("new", PPOTF2Policy) is not None


def test_method_apply():
    assert single().apply(lambda worker, x, y: (worker.worker_index, x + y), 1, y=2) == (0, 3)


def test_method_apply_gradients():
    worker = single()
    batch, before = worker.sample(), worker.get_weights()[DEFAULT_POLICY_ID]
    worker.apply_gradients(worker.compute_gradients(batch)[0])
    assert not same(before, worker.get_weights()[DEFAULT_POLICY_ID])


def test_method_compute_gradients():
    worker = several()
    gradients, infos = worker.compute_gradients(worker.sample())
    assert set(gradients) == {"left", "right"}
    assert infos["batch_count"] == 7
    with pytest.raises(UsageError, match="single_agent"):
        worker.compute_gradients(worker.sample(), single_agent=True)


def test_method_creation_args():
    assert single(worker_index=3).creation_args()["worker_index"] == 3


def test_method_find_free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", single().find_free_port()))


def test_method_for_policy():
    assert several().for_policy(lambda policy, x: x + 1, "left", x=1) == 2
    with pytest.raises(UnknownPolicyError):
        several().for_policy(print, "nobody")


def test_method_foreach_env():
    worker = single(single_config().rollouts(num_envs_per_worker=2))
    assert worker.foreach_env(lambda env: type(env.unwrapped)) == [SeededEnv, SeededEnv]


def test_method_foreach_env_with_context():
    worker = single(single_config().rollouts(num_envs_per_worker=2))
    assert worker.foreach_env_with_context(lambda env, ctx: ctx.vector_index) == [0, 1]


def test_method_foreach_policy():
    result = several().foreach_policy(lambda policy, policy_id, x: (policy_id, x), x=1)
    assert sorted(result) == [("left", 1), ("right", 1)]


def test_method_foreach_policy_to_train():
    worker = several(policies_to_train=["left"])
    assert worker.foreach_policy_to_train(lambda policy, policy_id: policy_id) == ["left"]


def test_method_get_filters():
    config = single_config().rollouts(observation_filter="MeanStdFilter")
    worker = single(config)
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
    assert several(policies_to_train=only_left).get_policies_to_train() == {"left"}


def test_method_get_policy():
    worker = several()
    assert isinstance(worker.get_policy("left"), PPOTF2Policy)
    assert worker.get_policy("nobody") is None


def test_method_get_weights():
    assert set(several().get_weights(["right", "nobody"])) == {"right"}


def test_method_learn_on_batch():
    worker = several()
    results = worker.learn_on_batch(worker.sample())
    assert results["left"]["num_agent_steps_trained"] == 7
    assert results["right"]["num_agent_steps_trained"] == 4


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
    worker = single()
    worker.par_iter_init(lambda batches: iter(range(6)))
    assert [worker.par_iter_slice(2, i) for i in (0, 1, 0, 1)] == [0, 1, 2, 3]


def test_method_par_iter_slice_batch():
    worker = single()
    worker.par_iter_init(lambda batches: iter(range(6)))
    assert worker.par_iter_slice_batch(2, 1, 200) == [1, 3, 5]


def test_method_ping():
    assert single().ping() == "pong"


def test_method_remove_policy():
    worker = several()
    worker.remove_policy(policy_id="right", policy_mapping_fn=all_left)
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
    batch, count = single().sample_with_count()
    assert count == batch.count == 8


def test_method_set_global_vars():
    worker = single()
    worker.set_global_vars({"timestep": 5, "num_grad_updates_per_policy": {DEFAULT_POLICY_ID: 2}})
    assert worker.get_policy().global_timestep == 5
    assert worker.get_policy().num_grad_updates == 2
    with pytest.raises(KeyError):
        worker.set_global_vars({})


def test_method_set_is_policy_to_train():
    worker = several()
    worker.set_is_policy_to_train(("right",))
    assert worker.get_policies_to_train() == {"right"}


def test_method_set_policy_mapping_fn():
    worker = several()
    worker.set_policy_mapping_fn(all_left)
    worker.set_policy_mapping_fn(None)
    assert worker.policy_mapping_fn is all_left
    with pytest.raises(ValueError, match="policy_mapping_fn"):
        worker.set_policy_mapping_fn("left")


def test_method_set_weights():
    worker, other = several(), several()
    worker.learn_on_batch(worker.sample())
    other.set_weights(worker.get_weights(), {"timestep": 7}, weights_seq_no=3)
    assert same(worker.get_weights()["left"], other.get_weights()["left"])
    assert other.get_global_vars()["timestep"] == 7
    assert other.weights_seq_no == 3


def test_method_setup_torch_data_parallel():
    with pytest.raises(ValueError, match="does not support torch distributed"):
        single().setup_torch_data_parallel("url", 0, 1, "gloo")


def test_method_stop():
    worker = single()
    worker.stop()
    worker.stop()
    with pytest.raises(UsageError, match="stopped"):
        worker.sample()


def test_method_sync_filters():
    config = single_config().rollouts(observation_filter="MeanStdFilter")
    one, other = single(config), single(config.copy(copy_frozen=False))
    one.sample()
    one.observation_filters.flush()
    other.sync_filters(one.get_filters())
    (mine,), (theirs,) = (x.filters[DEFAULT_POLICY_ID].get_scalings() for x in (one, other))
    assert (mine.mean == theirs.mean).all()


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


def test_add_policy_undone_if_a_callback_fails():
    class Refusing(DefaultCallbacks):
        def on_create_policy(self, *, policy_id, policy):
            if policy_id == "new":
                raise RuntimeError("not this one")

    config = config_of().callbacks(Refusing)
    worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    with pytest.raises(RuntimeError, match="not this one"):
        worker.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new, policies_to_train=[])
    assert set(worker.policy_map) == set(worker.policy_dict) == {"left", "right"}
    assert worker.get_policies_to_train() == {"left", "right"}
    assert worker.policy_mapping_fn is not all_new


def test_add_policy_observation_space():
    space = gym.spaces.Box(0, 1, (7,))
    added = several().add_policy("new", PPOTF2Policy, observation_space=space)
    assert added.observation_space == space


def test_add_policy_action_space():
    added = several().add_policy("new", PPOTF2Policy, action_space=gym.spaces.Discrete(9))
    assert added.action_space == gym.spaces.Discrete(9)


def test_add_policy_config():
    assert (
        several().add_policy("new", PPOTF2Policy, config={"gamma": 0.5}).get_hyperparameter("gamma")
        == 0.5
    )


def test_add_policy_policy_state():
    worker = several()
    state = worker.get_policy("left").get_state()
    added = worker.add_policy("new", PPOTF2Policy, policy_state=state)
    assert same(added.get_weights(), state["weights"])


def test_add_policy_policy_mapping_fn():
    worker = several()
    worker.sample()
    worker.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new)
    assert set(worker.sample().policy_batches) == {"left", "right"}  # it was begun before
    assert set(worker.sample().policy_batches) == {"new"}


def test_the_schedules_of_an_added_policy_begin_where_the_run_is():
    worker = several()
    worker.set_global_vars({"timestep": 100})
    schedule = {"lr_schedule": [[0, 0.5], [200, 0.0]]}
    assert worker.add_policy("new", PPOTF2Policy, config=schedule).get_hyperparameter("lr") == 0.25


def test_a_mapping_given_right_after_construction_is_in_the_first_episodes():
    added, mapped = several(), several()
    added.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new)
    assert set(added.sample().policy_batches) == {"new"}
    mapped.set_policy_mapping_fn(all_left)
    assert set(mapped.sample().policy_batches) == {"left"}


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
    assert config.policies == named("x", "y")
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
    assert set(several(policy_mapping_fn=all_left).sample().policy_batches) == {"left"}
    assert set(several(policy_mapping_fn=a_and_b).sample().policy_batches) == {"left", "right"}


def test_multi_agent_policies_to_train():
    config = config_of().multi_agent(policies_to_train=["nobody"])
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
    config = config_of(count_steps_by="agent_steps").rollouts(rollout_fragment_length=5)
    batch = RolloutWorker(config=config, default_policy_class=PPOTF2Policy).sample()
    assert batch.agent_steps() >= 5 > batch.env_steps()
    with pytest.raises(ValueError, match="count_steps_by"):
        AlgorithmConfig().multi_agent(count_steps_by="steps")


@pytest.mark.parametrize(
    "name", ["algorithm_config_overrides_per_module", "replay_mode", "policy_map_cache"]
)
def test_multi_agent_deprecated(name):
    with pytest.raises(ValueError, match=name):
        AlgorithmConfig().multi_agent(**{name: 1})


def test_the_worlds_of_these_tests_are_what_they_say():
    assert issubclass(Staged, Staggered)
    assert issubclass(PPOTF2Policy, Policy)
