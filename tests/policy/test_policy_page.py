"""Further parts of the Policy page: states, checkpoints, views, and custom policies."""

import copy
import logging
from dataclasses import replace

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers.constant_policies import ConstantPolicy
from helpers.factories import OBS, PLANE, TWO, assert_equal, batch_for, make, rows_of
from tfpolicies import PGTF2Policy, Policy, PPOTF2Policy, SampleBatch, TFPolicy, ViewRequirement
from tfpolicies.connectors.agent_connectors import ClipObservations
from tfpolicies.connectors.pipelines import AgentConnectorPipeline
from tfpolicies.errors import (
    BatchError,
    ConfigError,
    UnsupportedMethodError,
    UsageError,
    WeightsError,
)
from tfpolicies.program.networks import NetworkPlan

pytestmark = pytest.mark.usefixtures("kept_programs")


class Aiming(PPOTF2Policy):
    """PPO that has a target network, which its loss looks at."""

    @classmethod
    def network_plans(cls, observation_space, dist_class, static):
        return {"model": NetworkPlan(target=True)}


@pytest.mark.core
def test_a_state_has_the_documented_keys():
    keys = "weights _optimizer_variables _exploration_state global_timestep num_grad_updates "
    keys += "hyperparameters rng policy_spec current_kl_coeff"
    plain = {*keys.split()}
    state = make().get_state()
    assert set(state) == plain
    filtered = make(Aiming, observation_filter="MeanStdFilter")
    assert set(filtered.get_state()) == plain | {"target_weights", "filter"}
    assert set(make(PGTF2Policy).get_state()) == plain - {"current_kl_coeff"}
    keys = "policy_class observation_space action_space config"
    assert set(state["policy_spec"]) == {*keys.split()}


@pytest.mark.core
def test_the_kl_coefficient_is_stored_under_its_old_name():
    policy = make(kl_coeff=0.25)
    state = policy.get_state()
    assert state["current_kl_coeff"] == 0.25
    assert "kl_coeff" not in state["hyperparameters"]
    values = {**state, "current_kl_coeff": 0.75}
    for _ in range(2):  # the dict is the same after its use
        policy.set_state(values)
        assert policy.get_hyperparameter("kl_coeff") == 0.75
    assert values["current_kl_coeff"] == 0.75
    policy.set_state({key: x for key, x in state.items() if key != "current_kl_coeff"})
    assert policy.get_hyperparameter("kl_coeff") == 0.75


def test_a_target_network_is_restored_and_takes_new_weights():
    policy, other = make(Aiming, lr=0.1), make(Aiming, seed=3)
    start = policy.get_weights()
    policy.learn_on_batch(batch_for(policy, 6))
    state = policy.get_state()
    for key, weights in start.items():
        np.testing.assert_array_equal(state["target_weights"][f"target/{key}"], weights)
    other.set_state(state)
    assert_equal(other.get_state()["target_weights"], state["target_weights"])
    other.set_weights(policy.get_weights())
    for key, weights in policy.get_weights().items():
        np.testing.assert_array_equal(other.get_state()["target_weights"][f"target/{key}"], weights)


def test_exploration_resumes_from_a_state():
    noisy = {"type": "OrnsteinUhlenbeckNoise", "random_timesteps": 0, "scale_timesteps": 50}
    policy, other = (make(actions=PLANE, exploration_config=noisy, seed=i) for i in (1, 2))
    obs = rows_of(OBS, 4)
    for _ in range(3):
        policy.compute_actions(obs)
    other.set_state(policy.get_state())
    assert other.get_exploration_state()["last_timestep"] == 8
    np.testing.assert_array_equal(policy.compute_actions(obs)[0], other.compute_actions(obs)[0])
    with pytest.raises(WeightsError, match="StochasticSampling has no state"):
        make(actions=PLANE).set_state(policy.get_state())


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_filter_acts_when_applied_and_travels_with_the_state(inference, tmp_path):
    settings = {"observation_filter": "MeanStdFilter", "inference": inference}
    policy, plain = make(**settings), make(inference=inference)
    assert plain.filter is None
    plain.driver.apply_filters()
    obs = np.array([[1, 2, 3], [3, 6, 3], [5, 10, 3]], np.float32)
    policy.filter.observe([obs])
    policy.filter.flush()
    policy.driver.apply_filters()
    plain.set_weights(policy.get_weights())
    seen = np.array([[-1, -1, 0], [0, 0, 0], [1, 1, 0]], np.float32)
    expected = plain.compute_actions(seen, explore=False).extras["action_dist_inputs"]
    policy.export_checkpoint(tmp_path)
    by_state, by_file = make(**settings, seed=5), PPOTF2Policy.from_checkpoint(tmp_path)
    by_state.set_state(policy.get_state())
    for restored in (policy, by_state, by_file):
        actual = restored.compute_actions(obs, explore=False).extras["action_dist_inputs"]
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        assert restored.filter.statistics[0].count == 3


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda s: s.pop("weights"), KeyError, "weights"),
        (lambda s: s.pop("global_timestep"), KeyError, "global_timestep"),
        (lambda s: s["weights"].popitem(), WeightsError, "weights"),
        (lambda s: s["_optimizer_variables"].popitem(), WeightsError, "optimizer"),
        (lambda s: s["hyperparameters"].update(speed=1.0), WeightsError, "speed"),
        (lambda s: s.update(global_timestep="soon"), WeightsError, "global_timestep"),
        (lambda s: s.update(num_grad_updates=-1), WeightsError, "num_grad_updates"),
        (lambda s: s.update(rng={"state": 1}), WeightsError, "'rng'"),
        (lambda s: s.update(_exploration_state={"cur_epsilon": 1}), WeightsError, "has no state"),
        (lambda s: s["filter"].pop("frozen/0/mean"), WeightsError, "state of a filter"),
        (lambda s: s["target_weights"].popitem(), WeightsError, "target_weights"),
        (
            lambda s: s.update(current_kl_coeff="much"),
            WeightsError,
            "kl_coeff in a state must be a",
        ),
        (lambda s: s.update(connector_configs={"agent": 1}), ConfigError, "connector_configs"),
    ],
)
def test_a_part_that_does_not_fit_is_named_and_changes_nothing(spoil, error, words):
    settings = {"observation_filter": "MeanStdFilter", "lr": 0.1}
    policy, other = (make(Aiming, **settings, seed=i) for i in (1, 2))
    policy.learn_on_batch(batch_for(policy, 4))
    other.filter.observe([rows_of(OBS, 5)])
    other.filter.flush()
    other.driver.apply_filters()
    before, state = policy.get_state(), other.get_state()
    spoil(state)
    with pytest.raises(error, match=words):
        policy.set_state(state)
    after = policy.get_state()
    for key in ("weights", "target_weights", "filter", "_optimizer_variables"):
        assert_equal(before[key], after[key])
    for key in ("rng", "hyperparameters", "global_timestep", "num_grad_updates"):
        assert before[key] == after[key]


def test_a_state_of_other_spaces_warns_and_the_policy_keeps_its_own_spaces_and_config(caplog):
    wide = spaces.Box(-9.0, 9.0, (3,), np.float32)
    policy, other = make(), make(obs=wide, lr=0.5)
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        policy.set_state(policy.get_state())
        assert not caplog.records
        policy.set_state(other.get_state())
    assert "observation_space" in caplog.text
    assert policy.observation_space == OBS
    assert policy.config["lr"] == 5e-5
    assert policy.get_hyperparameter("lr") == 0.5  # a hyperparameter in force is state
    assert_equal(policy.get_weights(), other.get_weights())


@pytest.mark.core
def test_a_checkpoint_holds_the_whole_state(tmp_path):
    policy = make(Aiming, lr=0.1, exploration_config={"type": "EpsilonGreedy"})
    policy.compute_actions(rows_of(OBS, 5))
    policy.learn_on_batch(batch_for(policy, 6))
    policy.agent_connectors = AgentConnectorPipeline([ClipObservations(-1.0, 1.0)])
    state = policy.get_state()
    policy.export_checkpoint(tmp_path)
    back = Aiming.from_checkpoint(tmp_path).get_state()
    assert set(back) == set(state)
    for key in ("weights", "target_weights", "_optimizer_variables"):
        assert_equal(back[key], state[key])
    for key in set(state) - {"weights", "target_weights", "_optimizer_variables", "policy_spec"}:
        assert back[key] == state[key], key


def test_native_model_files_follow_a_checkpoint_if_asked_for(tmp_path):
    make(export_native_model_files=True).export_checkpoint(tmp_path)
    assert (tmp_path / "policy.json").exists()
    assert list((tmp_path / "model").rglob("saved_model.pb"))
    make().export_checkpoint(tmp_path / "without")
    assert not (tmp_path / "without" / "model").exists()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
def test_weights_of_a_keras_file_are_copied_to_the_target_network(tmp_path):
    class AimingPG(PGTF2Policy):
        network_plans = Aiming.network_plans

    model, network = (keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]) for _ in "ab")
    policy = make(AimingPG, model={"custom_model": model})
    network.save_weights(tmp_path / "net.weights.h5")
    policy.import_model_from_h5(tmp_path / "net.weights.h5")
    kernel, bias = network.get_weights()
    state = policy.get_state()
    for arrays in (state["weights"], state["target_weights"]):
        for array, expected in zip(arrays.values(), (kernel, bias), strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.core
def test_view_requirements_name_what_is_read_for_acting_and_for_training():
    policy = make()
    views = policy.view_requirements
    assert views is policy.view_requirements
    acting = {name for name, view in views.items() if view.used_for_compute_actions}
    training = {name for name, view in views.items() if view.used_for_training}
    assert acting == {"obs"}
    loss = {"obs", "actions", "action_logp", "action_dist_inputs", "advantages", "value_targets"}
    collected = {"eps_id", "agent_index", "unroll_id", "terminateds", "truncateds", "rewards", "t"}
    assert training - {"vf_preds"} == loss | collected
    assert not views["infos"].used_for_training
    assert not views["new_obs"].used_for_training  # read by postprocessing only
    assert "action_prob" not in views
    assert "prev_actions" not in views
    assert views["action_dist_inputs"].space.shape == (2,)
    assert policy.num_grad_updates == policy.global_timestep == 0


@pytest.mark.core
@pytest.mark.parametrize("kind", ["compiled", "custom", "copy"])
def test_views_can_be_added_and_taken_out_but_not_what_every_batch_has(kind):
    policy = Counting(OBS, TWO, {}) if kind == "custom" else make()
    before = dict(policy.view_requirements)
    old_obs = ViewRequirement("obs", shift="-3:-1")
    policy.view_requirements["old_obs"] = old_obs
    policy = policy.copy() if kind == "copy" else policy
    later = {"later": ViewRequirement("obs", shift=1)}
    policy.view_requirements = later
    added = {"old_obs": old_obs, **later}
    added = {n: replace(view, used_for_compute_actions=False) for n, view in added.items()}
    policy.init_view_requirements()
    assert dict(policy.view_requirements) == {**before, **added}
    for change in (
        lambda: policy.view_requirements.pop("obs"),
        lambda: policy.view_requirements.update(rewards=ViewRequirement("rewards", shift=-1)),
    ):
        with pytest.raises(UnsupportedMethodError, match=r"'(obs|rewards)'\]"):
            change()
    del policy.view_requirements["old_obs"]
    assert "old_obs" not in policy.view_requirements


def test_a_memory_and_previous_actions_are_in_the_view_requirements():
    model = {"use_lstm": True, "lstm_cell_size": 5, "max_seq_len": 7, "fcnet_hiddens": [4]}
    policy = make(model={**model, "lstm_use_prev_action": True})
    views = policy.view_requirements
    assert views["state_in_0"].batch_repeat_value == 7
    assert views["state_in_0"].space.shape == (5,)
    acting = {name for name, view in views.items() if view.used_for_compute_actions}
    assert acting == {"obs", "state_in_0", "state_in_1", "prev_actions"}
    assert views["prev_actions"].used_for_training
    assert (policy.is_recurrent(), policy.num_state_tensors()) == (True, 2)


def test_a_class_without_a_loss_has_views_for_acting_only():
    views = make(TFPolicy).view_requirements
    assert {name for name, view in views.items() if view.used_for_compute_actions} == {"obs"}


def test_spaces_are_also_given_as_nested_dicts_and_tuples():
    nested = spaces.Dict(a=OBS, b=spaces.Tuple([TWO, spaces.Dict(c=TWO)]))
    policy = make(obs=nested)
    assert policy.observation_space_struct == {"a": OBS, "b": (TWO, {"c": TWO})}
    assert policy.action_space_struct == TWO
    assert policy.devices == ["/cpu:0"]


class Counting(ConstantPolicy):
    """Its only weight is a number, which it learns by its mean."""

    def __init__(self, *args):
        super().__init__(*args)
        self.number = np.zeros(1)

    def compute_gradients(self, postprocessed_batch):
        rows = postprocessed_batch["rewards"]
        return [rows.mean(keepdims=True)], {"learner_stats": {"rows": len(rows)}}

    def apply_gradients(self, gradients):
        self.number += gradients[0]
        self.num_grad_updates += 1

    def get_weights(self):
        return {"number": self.number.copy()}

    def set_weights(self, weights):
        self.number = weights["number"].copy()


@pytest.mark.core
def test_a_policy_that_gives_gradients_learns_in_every_way(tmp_path):
    policy = Counting(OBS, TWO, {"sgd_minibatch_size": 2})
    batch = SampleBatch(rewards=np.array([1.0, 3.0, 5.0]))
    assert policy.learn_on_batch(batch) == {"learner_stats": {"rows": 3}}
    assert policy.get_num_samples_loaded_into_buffer() == 0
    with pytest.raises(BatchError, match="must call load_batch_into_buffer"):
        policy.learn_on_loaded_batch()
    assert policy.load_batch_into_buffer(dict(batch)) == 3
    policy.learn_on_loaded_batch(0)
    assert policy.learn_on_loaded_batch(2) == {"learner_stats": {"rows": 1}}
    with pytest.raises(BatchError, match=r"offset must be in \[0, 3\)"):
        policy.learn_on_loaded_batch(3)
    assert policy.number == 3 + 2 + 5
    assert policy.num_grad_updates == 3
    policy.on_global_var_update({"timestep": 12, "num_grad_updates": None})
    copied = Policy.from_state(copy.deepcopy(policy.get_state()))
    policy.export_checkpoint(tmp_path)
    for restored in (copied, Counting.from_checkpoint(tmp_path)):
        assert type(restored) is Counting
        assert (restored.number, restored.global_timestep, restored.num_grad_updates) == (10, 12, 3)
    with pytest.raises(KeyError, match="global_timestep"):
        copied.set_state({"weights": {}})


def test_a_policy_that_does_not_learn_has_every_method_too():
    policy = ConstantPolicy(OBS, TWO, {})
    assert policy.learn_on_batch({}) == {}
    assert policy.compute_gradients({}) == ([], {})
    policy.apply_gradients([])
    with pytest.raises(UsageError, match="ConstantPolicy has no weights to update; got 1"):
        policy.apply_gradients([1])
    for call in (
        lambda: policy.loss(None, None, {}),
        lambda: policy.compute_log_likelihoods([0], [[0, 0, 0]]),
        lambda: policy.export_model("nowhere"),
        lambda: policy.import_model_from_h5("nowhere"),
        policy.make_rl_module,
    ):
        with pytest.raises(UnsupportedMethodError, match="Override it in ConstantPolicy") as raised:
            call()
        assert isinstance(raised.value, NotImplementedError)
    assert {"obs", "new_obs", "prev_actions", "infos"} <= set(policy.view_requirements)
    assert (policy.get_session(), policy.devices) == (None, ["/cpu:0"])
