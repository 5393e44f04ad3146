"""Overrides of methods of the Policy page, which samplers, evaluation and algorithms call."""

import copy
import itertools
import logging
from unittest import mock

import numpy as np
import pytest
from gymnasium import spaces

from helpers.constant_policies import ConstantPolicy
from helpers.environments import CountingEnv
from helpers.factories import OBS, TWO, assert_close, batch_for, make
from helpers.marks import telling
from helpers.short_envs import PairEnv
from helpers.workers import make_config
from tfpolicies import (
    DQNConfig,
    DQNTF2Policy,
    PolicyMap,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    RolloutWorker,
)
from tfpolicies.errors import UsageError
from tfpolicies.policy import overrides

ACTING = ("compute_actions", "compute_actions_from_input_dict")
SAMPLING = (*ACTING, "get_initial_state", "is_recurrent", "num_state_tensors")
SAMPLING += ("postprocess_trajectory",)
LEARNING = ("learn_on_batch", "compute_gradients", "apply_gradients", "load_batch_into_buffer")
LEARNING += ("learn_on_loaded_batch", "get_num_samples_loaded_into_buffer", "on_global_var_update")
EVALUATION = ("get_weights", "set_weights", *ACTING)


def record_calls(policy_class, *names):
    """Returns a subclass whose methods of these names note that they run, and call super's."""
    recorder = type(f"Own{policy_class.__name__}", (policy_class,), {"called": []})

    def make_method(name):
        def method(self, *args, **kwargs):
            recorder.called.append(name)
            return getattr(super(recorder, self), name)(*args, **kwargs)

        return method

    for name in names:
        setattr(recorder, name, make_method(name))
    return type(recorder.__name__, (recorder,), {})


def make_small_config(config_class=PPOConfig, **settings):
    sizes = {"train_batch_size": 8, "rollout_fragment_length": 8, "evaluation_duration": 1}
    if config_class is PPOConfig:
        sizes |= {"sgd_minibatch_size": 4, "num_sgd_iter": 2}
    else:
        sizes |= {"num_steps_sampled_before_learning_starts": 4}
    return make_config(lambda context: CountingEnv(), config_class, **{**sizes, **settings})


def make_algorithm(policy_class, **settings):
    config_class = DQNConfig if issubclass(policy_class, DQNTF2Policy) else PPOConfig

    class Own(config_class().algo_class):
        @classmethod
        def get_default_policy_class(cls, config):
            return policy_class

    return Own(make_small_config(config_class, **settings))


MEMORY = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4], "max_seq_len": 2}
MEMORY |= {"lstm_use_prev_action": True}
TELLING = ("compute_actions", "learn_on_batch", "postprocess_trajectory")
IN_GRAPH_MODE = ("compute_actions", "learn_on_loaded_batch", "apply_gradients")
ON_REPLAYED_ROWS = ("compute_actions_from_input_dict", "compute_gradients")
WITH_A_MEMORY = {"learn_on_batch": 6, "learn_on_loaded_batch": 4, "compute_actions": 6}
CALLS = [
    *((PPOTF2Policy, name, None, 4) for name in sorted({*SAMPLING, *LEARNING})),
    *((PPOTF1Policy, name, None, 4) for name in IN_GRAPH_MODE),
    *((DQNTF2Policy, name, None, 125) for name in ON_REPLAYED_ROWS),  # of 1000 steps, 8 at a time
    *((PPOTF2Policy, name, MEMORY, updates) for name, updates in WITH_A_MEMORY.items()),
]


@pytest.mark.parametrize(
    ("policy_class", "name", "model", "updates"),
    telling(CALLS, *((PPOTF2Policy, name, None, 4) for name in TELLING)),
)
def test_training_calls_the_methods_that_a_subclass_overrides(policy_class, name, model, updates):
    recorder = record_calls(policy_class, name)
    algorithm = make_algorithm(recorder, model=model or {"fcnet_hiddens": [4]})
    recorder.called.clear()
    result = algorithm.train()
    assert name in recorder.called
    stats = result["info"]["learner"]["default_policy"]["learner_stats"]
    assert policy_class is DQNTF2Policy or np.isfinite(stats["total_loss"])
    assert algorithm.get_policy().num_grad_updates == updates
    algorithm.stop()


@pytest.mark.parametrize("name", EVALUATION)
def test_evaluation_calls_the_methods_that_a_subclass_overrides(name):
    policy_class = record_calls(PPOTF2Policy, name)
    algorithm = make_algorithm(policy_class)
    algorithm.evaluate()
    policy_class.called.clear()
    algorithm.evaluate()
    assert name in policy_class.called
    algorithm.stop()


def test_saving_and_restoring_call_the_overrides_of_states(tmp_path):
    policy_class = record_calls(PPOTF2Policy, "get_state", "set_state", "compute_single_action")
    algorithm = make_algorithm(policy_class)
    path = algorithm.save(str(tmp_path)).checkpoint.path
    assert "get_state" in policy_class.called
    algorithm.restore(path)
    assert "set_state" in policy_class.called
    algorithm.compute_single_action(np.zeros(3, np.float32))
    assert policy_class.called[-1] == "compute_single_action"
    algorithm.stop()


def test_overrides_are_called_for_each_of_several_agents_and_after_a_policy_was_away(tmp_path):
    policy_class = record_calls(PPOTF2Policy, "compute_actions")
    config = make_small_config(rollout_fragment_length=6).environment(PairEnv)
    config.multi_agent(
        policies={"a": (policy_class, None, None, {}), "b": (PPOTF2Policy, None, None, {})},
        policy_mapping_fn=lambda agent, episode, **kwargs: agent,
        policy_map_capacity=1,
    )
    worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    batch = worker.sample()
    assert len(policy_class.called) == 6
    assert {pid: part.count for pid, part in batch.policy_batches.items()} == {"a": 6, "b": 6}
    worker.stop()


@pytest.mark.core
@pytest.mark.parametrize("space", [TWO, spaces.Discrete(3, start=5), spaces.Box(2.0, 6.0, (2,))])
def test_acting_by_methods_gives_what_the_program_gives(space):
    custom, plain = make(record_calls(PPOTF2Policy, *ACTING), actions=space), make(actions=space)
    obs = [np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)]
    expected, columns = plain.driver.acting.act(obs)
    actual, custom_columns = custom.driver.acting.act(obs)
    assert custom.called == ["compute_actions_from_input_dict", "compute_actions"]
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert actual.dtype == expected.dtype == space.dtype
    for name in columns:
        np.testing.assert_allclose(custom_columns[name], columns[name], atol=1e-6)


def test_the_environment_takes_the_actions_of_an_override():
    class Right(PPOTF2Policy):
        def compute_actions(self, obs_batch, *args, **kwargs):
            result = super().compute_actions(obs_batch, *args, **kwargs)
            return result._replace(actions=np.full(len(obs_batch), 2))

    worker = RolloutWorker(config=make_small_config(), default_policy_class=Right)
    assert worker.sample()["actions"].tolist() == [2] * 8
    assert worker.env.actions == [2] * 8


@pytest.mark.core
@pytest.mark.parametrize("name", ["learn_on_batch", "compute_gradients", "compute_actions"])
def test_learning_by_methods_gives_what_the_program_gives(name):
    custom, plain = make(record_calls(PPOTF2Policy, name), lr=0.01), make(lr=0.01)
    batch = batch_for(plain, 10)
    stats = [policy.learn_epochs(batch, 2, 4)["learner_stats"] for policy in (custom, plain)]
    assert stats[0] == pytest.approx(stats[1], rel=1e-4)
    assert_close(custom.get_weights(), plain.get_weights(), atol=1e-6)
    assert name != "compute_actions" or custom.driver.acting.stackable is None


@pytest.mark.parametrize("name", ["learn_on_batch", "learn_on_loaded_batch"])
def test_an_override_without_a_result_is_an_error(name):
    policy = make(type("Own", (PPOTF2Policy,), {name: lambda self, *args: None}))
    with pytest.raises(UsageError, match=f"Own.{name} must return a dict of results.*got None"):
        policy.learn_epochs(batch_for(policy, 8), 1, 4)


def test_statistics_that_some_minibatches_lack_are_means_over_the_others():
    class Own(PPOTF2Policy):
        updates = 0

        def learn_on_batch(self, samples):
            self.updates += 1
            results = {"at": float(self.updates)} if self.updates != 2 else {"other": 7.0}
            return {"learner_stats": results}

    policy = make(Own)
    stats = policy.learn_epochs(batch_for(policy, 12), 1, 4)["learner_stats"]
    assert stats == {"at": 2.0, "other": 7.0}


def test_a_loaded_batch_is_learned_from_in_order_through_all_overrides():
    custom = make(record_calls(PPOTF2Policy, "learn_on_loaded_batch", "learn_on_batch"), lr=0.01)
    plain, batch = make(lr=0.01), batch_for(custom, 128 * 2 + 4)
    custom.learn_epochs(batch, 1, 128, shuffle=False)
    plain.learn_epochs(batch, 1, 128, shuffle=False)
    assert custom.called == ["learn_on_loaded_batch", "learn_on_batch"] * 3
    assert_close(custom.get_weights(), plain.get_weights(), atol=1e-6)


def test_a_copy_has_loaded_batches_of_its_own():
    custom = make(record_calls(PPOTF2Policy, "learn_on_batch"), lr=0.01)
    custom.load_batch_into_buffer(batch_for(custom, 8))
    copied = custom.copy()
    assert copied.get_num_samples_loaded_into_buffer() == 0
    assert copied.load_batch_into_buffer(batch_for(custom, 4)) == 4
    assert copied.learn_on_loaded_batch()["num_agent_steps_trained"] == 4
    assert custom.called == ["learn_on_batch"]
    assert custom.get_num_samples_loaded_into_buffer() == 8


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_an_overridden_apply_gradients_fn_applies_given_gradients(policy_class):
    class Halved(policy_class):
        def apply_gradients_fn(self, optimizer, grads):
            super().apply_gradients_fn(optimizer, [(0.0 * g, v) for g, v in grads])

    policy = make(Halved, lr=0.1)
    gradients, _ = policy.compute_gradients(batch_for(policy, 8))
    before = policy.get_weights()
    policy.apply_gradients([gradient + 1 for gradient in gradients])
    assert_close(policy.get_weights(), before, atol=0)


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_extra_action_out_fn_has_the_values_of_the_model(policy_class):
    class Doubled(policy_class):
        def extra_action_out_fn(self):
            result = super().extra_action_out_fn()
            assert result["vf_preds"] is self.model.value_function()
            result["twice"] = 2.0 * result["vf_preds"]
            result["logits"] = self.model.last_output()
            return result

    extras = make(Doubled).compute_actions(np.ones((4, 3), np.float32)).extras
    assert extras["vf_preds"].shape == (4,)
    np.testing.assert_array_equal(extras["twice"], 2.0 * extras["vf_preds"])
    np.testing.assert_array_equal(extras["logits"], extras["action_dist_inputs"])


@pytest.mark.core
@pytest.mark.parametrize(
    "read",
    [lambda x: x.model({"obs": x.dist_inputs})[0], lambda x: x.model.base_model],
    ids=["call", "attribute"],
)
def test_a_model_that_has_been_called_names_the_existing_tensors(read):
    reading = type("Reading", (PPOTF2Policy,), {"extra_action_out_fn": lambda x: {"x": read(x)}})
    with pytest.raises(AttributeError, match=r"self\.dist_inputs and self\.values"):
        make(reading).compute_actions(np.ones((4, 3), np.float32))


def test_outputs_of_extra_action_out_fn_are_columns_that_the_loss_may_read():
    class Own(PPOTF2Policy):
        def extra_action_out_fn(self):
            return {"twice": 2.0 * self.dist_inputs}

        def loss(self, model, dist_class, train_batch):
            loss = super().loss(model, dist_class, train_batch)
            return loss + 0.0 * train_batch["twice"][0, 0]

    worker = RolloutWorker(config=make_small_config(), default_policy_class=Own)
    batch = worker.sample()
    np.testing.assert_allclose(batch["twice"], 2 * batch["action_dist_inputs"], rtol=1e-6)
    worker.learn_on_batch(batch)
    config = make_small_config(DQNConfig)
    replaying = RolloutWorker(config=config, default_policy_class=DQNTF2Policy)
    assert "q_values" not in replaying.sample()


def test_overridden_methods_are_logged_once_for_each_class(caplog):
    custom = record_calls(PPOTF2Policy, "compute_actions", "learn_on_batch")
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        for _ in range(2):
            make(custom)
        make()
    (line,) = caplog.messages
    assert line.startswith("OwnPPOTF2Policy overrides compute_actions, learn_on_batch: this repl")


def test_each_episode_begins_with_the_initial_state_of_an_override():
    class Warm(PPOTF2Policy):
        calls = 0

        def get_initial_state(self):
            type(self).calls += 1
            return [np.full(4, self.calls, np.float32) for _ in range(2)]

    config = make_small_config(model={"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4})
    batch = RolloutWorker(config=config, default_policy_class=Warm).sample()
    starts = batch["state_in_0"][:, 0]
    assert len(set(starts.tolist())) == len(starts)


def test_policies_act_together_by_their_own_methods():
    custom, plain = record_calls(PPOTF2Policy, "compute_actions"), PPOTF2Policy
    with PolicyMap(capacity=1) as policies:
        for pid, kind in (("a", custom), ("b", plain), ("c", plain)):
            policies[pid] = make(kind, __policy_id=pid)
        result = policies.compute_actions({pid: np.zeros((2, 3), np.float32) for pid in "abc"})
    assert set(result) == set("abc")
    assert custom.called == ["compute_actions"]


def test_every_method_that_is_driven_by_the_page_is_in_this_file():
    groups = (overrides.ACTING_METHODS, overrides.LOADING_METHODS, overrides.UPDATE_METHODS)
    names = {*itertools.chain(*groups, overrides.WEIGHT_METHODS)}
    assert names <= {*SAMPLING, *LEARNING, *EVALUATION}


def test_a_policy_that_overrides_nothing_is_driven_by_its_program():
    policy = make()
    assert policy.driver.acting is policy.driver.acting.stackable


@pytest.mark.core
def test_a_method_that_is_replaced_on_one_policy_runs_until_it_is_restored():
    policy, other = make(__policy_id="one"), make(__policy_id="other")
    session, obs = policy.session(), np.zeros(3, np.float32)
    compiled = policy.driver.acting
    policy.compute_actions = mock.Mock(
        side_effect=lambda obs, *args, **kwargs: (np.ones(len(obs), int), [], {})
    )
    assert [int(session.act(obs)) for _ in range(5)] == [1] * 5
    assert int(policy.compute_single_action(obs)[0]) == int(policy.predict(obs)) == 1
    assert policy.compute_actions.call_count == 7
    assert other.driver.acting is other.driver.acting.stackable
    del policy.compute_actions
    assert policy.driver.acting is compiled
    assert policy.compute_actions(obs[None]).actions.shape == (1,)


@pytest.mark.core
def test_a_method_that_is_replaced_on_a_class_runs_in_its_existing_policies():
    before, rows = make(), batch_for(make(), 8)
    before.learn_epochs(rows, 1, 4)
    result = {"learner_stats": {}}
    with mock.patch.object(PPOTF2Policy, "learn_on_batch", return_value=result) as method:
        before.learn_epochs(rows, 2, 4)
        before.driver.learning.update(rows, 1, 8)
        assert method.call_count == 2 * 2 + 1
    assert before.learn_epochs(rows, 1, 4)["num_grad_updates_lifetime"] == 4


@pytest.mark.core
def test_a_policy_without_a_hash_has_a_driver():
    class Constant(ConstantPolicy):
        __hash__ = None
        action = 1

        def __eq__(self, other):
            return self.action == other.action

    assert int(Constant(OBS, TWO, {}).session().act(np.zeros(3, np.float32))) == 1


@pytest.mark.core
@pytest.mark.parametrize("copy_policy", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_has_a_driver_of_its_own(copy_policy):
    policy = ConstantPolicy(OBS, TWO, {})
    driver = policy.driver
    copied = copy_policy(policy)
    copied.action = 1
    assert policy.driver is driver is not copied.driver
    assert [int(x.session().act(np.zeros(3, np.float32))) for x in (policy, copied)] == [0, 1]
