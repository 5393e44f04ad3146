"""An override of a method of the Policy page is what samplers, evaluation and algorithms call."""

import copy
import logging
from unittest import mock

import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import CountingEnv
from helpers.factories import OBS, TWO, assert_close, batch_for, make
from helpers.marks import telling
from tfpolicies import (
    DQNConfig,
    DQNTF2Policy,
    MultiAgentEnv,
    Policy,
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


def recording(policy_class, *names):
    """Returns a subclass whose methods of these names note that they run, and call super's."""
    made = type(f"Own{policy_class.__name__}", (policy_class,), {"called": []})

    def noting(name):
        def method(self, *args, **kwargs):
            made.called.append(name)
            return getattr(super(made, self), name)(*args, **kwargs)

        return method

    for name in names:
        setattr(made, name, noting(name))
    return type(made.__name__, (made,), {})


def config_of(kind=PPOConfig, **training):
    sizes = {"train_batch_size": 8, "model": {"fcnet_hiddens": [4]}}
    if kind is PPOConfig:
        sizes |= {"sgd_minibatch_size": 4, "num_sgd_iter": 2}
    else:
        sizes |= {"num_steps_sampled_before_learning_starts": 4}
    return (
        kind()
        .environment(lambda context: CountingEnv())
        .rollouts(rollout_fragment_length=8)
        .training(**{**sizes, **training})
        .framework(inference="tf", jit_compile=False)
        .debugging(seed=3, log_level="ERROR")
        .evaluation(evaluation_duration=1)
    )


def algorithm_of(policy_class, kind=PPOConfig, **training):
    class Own(kind().algo_class):
        @classmethod
        def get_default_policy_class(cls, config):
            return policy_class

    return Own(config_of(kind, **training))


class Pair(MultiAgentEnv):
    """Two agents, who observe the step; episodes of three steps."""

    observation_space = spaces.Dict(a=OBS, b=OBS)
    action_space = spaces.Dict(a=TWO, b=TWO)

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.seen(), {}

    def seen(self):
        return {agent: np.full(3, self.now, np.float32) for agent in "ab"}

    def step(self, actions):
        self.now += 1
        flags = dict.fromkeys(("a", "b", "__all__"), self.now == 3)
        infos = {agent: {"now": self.now, "of": agent} for agent in "ab"}
        return self.seen(), {"a": 1.0, "b": 2.0}, flags, dict.fromkeys(flags, False), infos


# -- the whole page -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    telling(
        sorted({*SAMPLING, *LEARNING}),
        *("compute_actions", "learn_on_batch", "postprocess_trajectory"),
    ),
)
def test_what_a_subclass_overrides_is_what_training_calls(name):
    policy_class = recording(PPOTF2Policy, name)
    algorithm = algorithm_of(policy_class)
    policy_class.called.clear()
    result = algorithm.train()
    assert name in policy_class.called
    assert np.isfinite(result["info"]["learner"]["default_policy"]["learner_stats"]["total_loss"])
    assert algorithm.get_policy().num_grad_updates == 4
    algorithm.stop()


@pytest.mark.parametrize("name", EVALUATION)
def test_what_a_subclass_overrides_is_what_evaluation_calls(name):
    policy_class = recording(PPOTF2Policy, name)
    algorithm = algorithm_of(policy_class)
    algorithm.evaluate()
    policy_class.called.clear()
    algorithm.evaluate()
    assert name in policy_class.called
    algorithm.stop()


def test_saving_and_restoring_call_the_overrides_of_states(tmp_path):
    policy_class = recording(PPOTF2Policy, "get_state", "set_state", "compute_single_action")
    algorithm = algorithm_of(policy_class)
    path = algorithm.save(str(tmp_path)).checkpoint.path
    assert "get_state" in policy_class.called
    algorithm.restore(path)
    assert "set_state" in policy_class.called
    algorithm.compute_single_action(np.zeros(3, np.float32))
    assert policy_class.called[-1] == "compute_single_action"
    algorithm.stop()


@pytest.mark.parametrize("name", ["compute_actions", "learn_on_loaded_batch", "apply_gradients"])
def test_overrides_are_called_in_graph_mode(name):
    policy_class = recording(PPOTF1Policy, name)
    algorithm = algorithm_of(policy_class)
    algorithm.train()
    assert name in policy_class.called
    algorithm.stop()


@pytest.mark.parametrize("name", ["compute_actions_from_input_dict", "compute_gradients"])
def test_overrides_are_called_where_rows_are_replayed(name):
    policy_class = recording(DQNTF2Policy, name)
    algorithm = algorithm_of(policy_class, DQNConfig)
    algorithm.train()
    assert name in policy_class.called
    assert algorithm.get_policy().num_grad_updates
    algorithm.stop()


def test_overrides_are_called_for_each_of_several_agents_and_after_a_policy_was_away(tmp_path):
    policy_class = recording(PPOTF2Policy, "compute_actions")
    config = config_of().environment(Pair).rollouts(rollout_fragment_length=6)
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


# -- what comes of it -----------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("space", [TWO, spaces.Discrete(3, start=5), spaces.Box(2.0, 6.0, (2,))])
def test_acting_by_methods_gives_what_the_program_gives(space):
    plain, own = (make(x, actions=space) for x in (PPOTF2Policy, recording(PPOTF2Policy, *ACTING)))
    obs = [np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)]
    expected, columns = plain.driver.acting.act(obs)
    actual, own_columns = own.driver.acting.act(obs)
    assert own.called == ["compute_actions_from_input_dict", "compute_actions"]
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert actual.dtype == expected.dtype == space.dtype
    for name in columns:
        np.testing.assert_allclose(own_columns[name], columns[name], atol=1e-6)


def test_an_override_decides_what_the_environment_is_given():
    class Right(PPOTF2Policy):
        def compute_actions(self, obs_batch, *args, **kwargs):
            result = super().compute_actions(obs_batch, *args, **kwargs)
            return result._replace(actions=np.full(len(obs_batch), 2))

    worker = RolloutWorker(config=config_of(), default_policy_class=Right)
    assert worker.sample()["actions"].tolist() == [2] * 8
    assert worker.env.actions == [2] * 8


@pytest.mark.parametrize("names", [("learn_on_batch",), ("compute_gradients",)])
def test_learning_by_methods_gives_what_the_program_gives(names):
    own, plain = make(recording(PPOTF2Policy, *names), lr=0.01), make(lr=0.01)
    batch = batch_for(plain, 10)
    stats = [policy.learn_epochs(batch, 2, 4)["learner_stats"] for policy in (own, plain)]
    assert stats[0] == pytest.approx(stats[1], rel=1e-4)
    assert_close(own.get_weights(), plain.get_weights(), atol=1e-6)


@pytest.mark.parametrize("name", ["learn_on_batch", "learn_on_loaded_batch", "compute_actions"])
def test_overrides_are_called_for_policies_with_a_memory(name):
    policy_class = recording(PPOTF2Policy, name)
    model = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4], "max_seq_len": 2}
    algorithm = algorithm_of(policy_class, model={**model, "lstm_use_prev_action": True})
    algorithm.train()
    assert name in policy_class.called
    assert algorithm.get_policy().num_grad_updates >= 4
    algorithm.stop()


@pytest.mark.parametrize("name", ["learn_on_batch", "learn_on_loaded_batch"])
def test_an_override_that_forgets_its_result_is_told_to_return_it(name):
    class Forgetful(PPOTF2Policy):
        pass

    setattr(Forgetful, name, lambda self, *args: None)
    policy = make(type("Own", (Forgetful,), {}))
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
    own = make(recording(PPOTF2Policy, "learn_on_loaded_batch", "learn_on_batch"), lr=0.01)
    plain, batch = make(lr=0.01), batch_for(own, 128 * 2 + 4)
    own.learn_epochs(batch, 1, 128, shuffle=False)
    plain.learn_epochs(batch, 1, 128, shuffle=False)
    assert own.called == ["learn_on_loaded_batch", "learn_on_batch"] * 3
    assert_close(own.get_weights(), plain.get_weights(), atol=1e-6)


def test_a_copy_has_loaded_batches_of_its_own():
    own = make(recording(PPOTF2Policy, "learn_on_batch"), lr=0.01)
    own.load_batch_into_buffer(batch_for(own, 8))
    twin = own.copy()
    assert twin.get_num_samples_loaded_into_buffer() == 0
    assert twin.load_batch_into_buffer(batch_for(own, 4)) == 4
    assert twin.learn_on_loaded_batch()["num_agent_steps_trained"] == 4
    assert own.called == ["learn_on_batch"]
    assert own.get_num_samples_loaded_into_buffer() == 8


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
def test_a_model_that_has_been_called_names_the_tensors_there_are():
    class Asks(PPOTF2Policy):
        def extra_action_out_fn(self):
            return {"x": self.model({"obs": self.dist_inputs})[0]}

    class Reads(PPOTF2Policy):
        def extra_action_out_fn(self):
            return {"x": self.model.base_model}

    for policy_class in (Asks, Reads):
        with pytest.raises(AttributeError, match=r"self\.dist_inputs and self\.values"):
            make(policy_class).compute_actions(np.ones((4, 3), np.float32))


def test_what_extra_action_out_fn_gives_is_a_column_that_the_loss_may_read():
    class Own(PPOTF2Policy):
        def extra_action_out_fn(self):
            return {"twice": 2.0 * self.dist_inputs}

        def loss(self, model, dist_class, train_batch):
            read = train_batch["twice"]
            return super().loss(model, dist_class, train_batch) + 0.0 * read[0, 0]

    worker = RolloutWorker(config=config_of(), default_policy_class=Own)
    batch = worker.sample()
    np.testing.assert_allclose(batch["twice"], 2 * batch["action_dist_inputs"], rtol=1e-6)
    worker.learn_on_batch(batch)
    replaying = RolloutWorker(config=config_of(DQNConfig), default_policy_class=DQNTF2Policy)
    assert "q_values" not in replaying.sample()


def test_one_line_says_once_for_each_class_what_runs(caplog):
    own = recording(PPOTF2Policy, "compute_actions", "learn_on_batch")
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        for _ in range(2):
            make(own)
        make()
    (line,) = caplog.messages
    assert line.startswith(
        "OwnPPOTF2Policy overrides compute_actions, learn_on_batch: this replaces"
    )


def test_a_memory_of_ones_own_is_asked_for_in_each_episode():
    class Warm(PPOTF2Policy):
        asked_for = 0

        def get_initial_state(self):
            type(self).asked_for += 1
            return [np.full(4, self.asked_for, np.float32) for _ in range(2)]

    config = config_of(model={"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4})
    batch = RolloutWorker(config=config, default_policy_class=Warm).sample()
    starts = batch["state_in_0"][:, 0]
    assert len(set(starts.tolist())) == len(starts)


def test_policies_act_together_by_their_own_methods():
    own, plain = recording(PPOTF2Policy, "compute_actions"), PPOTF2Policy
    with PolicyMap(capacity=1) as policies:
        for pid, kind in (("a", own), ("b", plain), ("c", plain)):
            policies[pid] = make(kind, __policy_id=pid)
        result = policies.compute_actions({pid: np.zeros((2, 3), np.float32) for pid in "abc"})
    assert set(result) == set("abc")
    assert own.called == ["compute_actions"]


def test_every_method_that_is_driven_by_the_page_is_in_this_file():
    driven = {
        *overrides.ACTING_METHODS,
        *overrides.LOADING_METHODS,
        *overrides.UPDATE_METHODS,
        *overrides.WEIGHT_METHODS,
    }
    assert driven <= {*SAMPLING, *LEARNING, *EVALUATION}


def test_a_policy_that_overrides_nothing_is_driven_by_its_program():
    assert PPOTF2Policy._overridden == frozenset()
    policy = make()
    assert policy.driver.acting is policy.driver.acting.stackable


def acting_ones():
    """Returns a `compute_actions` that always gives the action 1."""
    return mock.Mock(side_effect=lambda obs, *rest, **kwargs: (np.ones(len(obs), int), [], {}))


@pytest.mark.core
def test_a_method_that_is_replaced_on_one_policy_is_what_runs_until_it_is_taken_back():
    policy, other = make(__policy_id="one"), make(__policy_id="other")
    session, obs = policy.session(), np.zeros(3, np.float32)
    compiled = policy.driver.acting
    policy.compute_actions = acting_ones()
    assert [int(session.act(obs)) for _ in range(5)] == [1] * 5
    assert int(policy.compute_single_action(obs)[0]) == int(policy.predict(obs)) == 1
    assert policy.compute_actions.call_count == 7
    assert other.driver.acting is other._acting
    del policy.compute_actions
    assert policy.driver.acting is compiled
    assert policy.compute_actions(obs[None]).actions.shape == (1,)


@pytest.mark.core
def test_a_method_that_is_replaced_on_a_class_is_what_runs_in_policies_that_were_made_before():
    before, rows = make(), batch_for(make(), 8)
    before.learn_epochs(rows, 1, 4)
    with mock.patch.object(
        PPOTF2Policy, "learn_on_batch", return_value={"learner_stats": {}}
    ) as own:
        before.learn_epochs(rows, 2, 4)
        before.driver.learning.update(rows, 1, 8)
        assert own.call_count == 2 * 2 + 1
    assert PPOTF2Policy._overridden == frozenset()
    assert before.learn_epochs(rows, 1, 4)["num_grad_updates_lifetime"] == 4


@pytest.mark.core
def test_a_subclass_that_overrides_acting_alone_learns_by_its_program():
    own, plain = make(recording(PPOTF2Policy, "compute_actions"), seed=3), make(seed=3)
    results = [each.driver.learning.train(batch_for(each, 8), 2, 4) for each in (own, plain)]
    assert results[0]["learner_stats"] == pytest.approx(results[1]["learner_stats"], rel=1e-5)
    assert own.driver.acting.stackable is None


@pytest.mark.core
def test_a_policy_without_a_hash_has_a_driver():
    class Constant(Policy):
        __hash__ = None

        def __eq__(self, other):
            return self.action == other.action

        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return np.full(len(obs_batch), 1), [], {}

    assert int(Constant(OBS, TWO, {}).session().act(np.zeros(3, np.float32))) == 1


@pytest.mark.core
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_has_a_driver_of_its_own(copied):
    class Always(Policy):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return np.full(len(obs_batch), self.action), [], {}

    policy = Always(OBS, TWO, {})
    policy.action = 0
    driver = policy.driver
    twin = copied(policy)
    twin.action = 1
    assert policy.driver is driver is not twin.driver
    assert [int(x.session().act(np.zeros(3, np.float32))) for x in (policy, twin)] == [0, 1]
