"""Construction, acting, learning and state of a policy, across runtimes and spaces."""

import copy

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import OBS, PLANE, TWO, assert_close, assert_equal, batch_for, make, rows_of
from tfpolicies import PGTF2Policy, Policy, PPOConfig, PPOTF2Policy, errors
from tfpolicies.policy.policy import ActionBatch

pytestmark = pytest.mark.usefixtures("kept_programs")

BOX = spaces.Box(np.array([0.0, -2.0], np.float32), np.array([10.0, 2.0], np.float32))
RUNTIMES = pytest.mark.parametrize("inference", ["tf", "onnx", "session"])
SPACES = {
    "box": OBS,
    "discrete": spaces.Discrete(3, start=2),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "multibinary": spaces.MultiBinary(3),
    "image": spaces.Box(0, 255, (10, 10, 3), np.uint8),
    "dict": spaces.Dict(a=OBS, b=TWO, c=spaces.Tuple([TWO, spaces.Box(0, 1, (2, 2))])),
}


def test_a_config_object_may_be_given_instead_of_a_dict():
    config = PPOConfig().training(lr=0.5, model={"fcnet_hiddens": [4]}).debugging(seed=1)
    policy = PPOTF2Policy(OBS, TWO, config)
    assert policy.config["lr"] == 0.5
    # A class with another config takes what was changed, and its own defaults for the rest.
    other = PGTF2Policy(OBS, TWO, PPOConfig().training(gamma=0.5, clip_param=0.1))
    assert (other.config["gamma"], other.config["lr"]) == (0.5, 4e-4)


def test_spaces_that_do_not_fit_are_refused():
    with pytest.raises(errors.SpaceError, match="Gymnasium spaces"):
        PPOTF2Policy((3,), TWO, {})
    with pytest.raises(errors.UnsupportedSpaceError, match="Text"):
        make(actions=spaces.Tuple([spaces.Text(3)]))
    with pytest.raises(errors.UnsupportedSpaceError, match="Text"):
        make(obs=spaces.Text(3))


@pytest.mark.core
@RUNTIMES
@pytest.mark.parametrize("actions", [TWO, PLANE, spaces.Box(-1, 1, ()), spaces.Box(-1, 1, (2, 2))])
def test_actions_and_extras_have_the_documented_shapes_and_types(inference, actions):
    policy = make(actions=actions, inference=inference)
    n = policy.dist_class.num_inputs
    for rows in (5, 1, 0):
        acted = policy.compute_actions(rows_of(OBS, rows))
        assert isinstance(acted, ActionBatch)
        assert acted.state_outs == []
        assert acted.actions.shape == (rows, *actions.shape)
        assert acted.actions.dtype == (np.int64 if actions is TWO else np.float32)
        shapes = {name: (x.shape, x.dtype.name) for name, x in acted.extras.items()}
        assert shapes == {
            "action_logp": ((rows,), "float32"),
            "action_prob": ((rows,), "float32"),
            "action_dist_inputs": ((rows, n), "float32"),
            "vf_preds": ((rows,), "float32"),
        }
    assert policy.global_timestep == 6


@RUNTIMES
@pytest.mark.parametrize("name", SPACES)
def test_any_observation_space_acts_and_learns(name, inference):
    policy = make(obs=SPACES[name], inference=inference, lr=0.01)
    before = policy.get_weights()
    result = policy.learn_on_batch(batch_for(policy, 6))
    assert (result["num_grad_updates_lifetime"], result["num_agent_steps_trained"]) == (1, 6)
    assert any(not np.array_equal(before[k], w) for k, w in policy.get_weights().items())
    first = rows_of(SPACES[name], 1)
    one = policy.compute_actions(first, explore=False).actions[0]
    loaded = policy.load_batch_into_buffer(batch_for(policy, 6))
    assert loaded == 6
    policy.learn_on_loaded_batch()
    assert policy.num_grad_updates == 2
    assert one in (0, 1)


@pytest.mark.core
@RUNTIMES
def test_without_exploration_the_mode_is_taken_with_certainty(inference):
    policy = make(actions=PLANE, inference=inference)
    obs = rows_of(OBS, 6)
    greedy = policy.compute_actions(obs, explore=False)
    np.testing.assert_allclose(greedy.actions, greedy.extras["action_dist_inputs"][:, :2])
    assert not greedy.extras["action_logp"].any()
    assert (greedy.extras["action_prob"] == 1).all()
    by_config = make(actions=PLANE, inference=inference, explore=False)
    np.testing.assert_allclose(by_config.compute_actions(obs).actions, greedy.actions)
    sampled = by_config.compute_actions(obs, explore=True)
    assert not np.allclose(sampled.actions, greedy.actions)
    np.testing.assert_allclose(
        np.exp(sampled.extras["action_logp"]), sampled.extras["action_prob"], rtol=1e-5
    )


@RUNTIMES
def test_rows_may_be_lists_or_of_another_float_type(inference):
    policy = make(inference=inference)
    obs = rows_of(OBS, 3)
    expected = policy.compute_actions(obs, explore=False).extras["action_dist_inputs"]
    for form in (obs.tolist(), obs.astype(np.float64), list(obs), obs[:, ::-1][:, ::-1]):
        actual = policy.compute_actions(form, explore=False).extras["action_dist_inputs"]
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.core
@RUNTIMES
def test_observations_that_do_not_fit_are_refused_and_counted_nowhere(inference):
    policy = make(inference=inference)
    for wrong in (np.zeros((2, 4)), np.zeros(3), (np.zeros(3), {})):
        with pytest.raises(errors.ObservationError):
            policy.compute_actions(wrong)
    with pytest.raises(errors.ObservationError, match="unpack it"):
        policy.compute_single_action((np.zeros(3), {}))
    assert policy.global_timestep == 0
    nested = make(obs=SPACES["dict"], inference=inference)
    with pytest.raises(errors.ObservationError, match="'b'"):
        nested.compute_actions({"a": np.zeros((1, 3))})


@pytest.mark.parametrize("other", ["onnx", "session"])
def test_one_seed_gives_the_same_weights_after_5_updates_on_all_runtimes(other):
    policies = by_tf, by_other = [make(inference=x, seed=11, lr=1e-3) for x in ("tf", other)]
    batch = batch_for(by_tf, 200)
    for policy in policies:
        for _ in range(5):
            policy.compute_actions(batch["obs"])
            policy.learn_epochs(batch, 2, 64)
    assert_close(by_tf.get_weights(), by_other.get_weights(), atol=1e-5)


def test_the_noise_depends_on_the_worker_index_and_the_weights_on_the_seed():
    first, second = make(worker_index=1), make(worker_index=2)
    assert_equal(first.get_weights(), second.get_weights())
    obs = rows_of(OBS, 50)
    assert (first.compute_actions(obs).actions != second.compute_actions(obs).actions).any()
    first, second = (make(seed=None).get_weights()["layer_0/kernel"] for _ in range(2))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("shape", "filters", "expected"),
    [
        ((10, 10, 3), [[4, 3, 1]], "onnx"),
        ((64, 64, 3), [[4, 8, 4]], "tf"),
        ((10, 10, 3), [[4, 3, 1], [300, 10, 1]], "onnx"),  # the second covers its image
        ((10, 10, 3), [[4, 3, 1], [400, 8, 1], [4, 10, 1]], "tf"),  # 4 * 8 * 8 * 400 numbers
        ((64, 64, 3), [], "onnx"),
    ],
)
def test_auto_takes_tensorflow_where_much_is_convolved(shape, filters, expected):
    image = spaces.Box(0, 255, shape, np.uint8)
    model = {"conv_filters": filters, "fcnet_hiddens": [4]}
    assert make(obs=image, inference="auto", model=model).driver.acting.inference == expected


def test_policies_of_one_program_act_through_onnx_with_their_own_weights_in_turn():
    policies = [make(seed=i, inference="onnx") for i in range(3)]
    obs = rows_of(OBS, 4)
    alone = [p.compute_actions(obs, explore=False).extras["action_dist_inputs"] for p in policies]
    for _ in range(2):
        for policy, expected in zip(policies, alone, strict=True):
            actual = policy.compute_actions(obs, explore=False).extras["action_dist_inputs"]
            np.testing.assert_array_equal(actual, expected)
    policies[0].set_weights(policies[1].get_weights())
    actual = policies[0].compute_actions(obs, explore=False).extras["action_dist_inputs"]
    np.testing.assert_array_equal(actual, alone[1])


def test_actions_of_the_environment_are_normalised_first_if_told():
    policy = make(actions=BOX)
    obs = rows_of(OBS, 3)
    normalised = np.array([[-1, 0], [0.5, 1], [0, 0]], np.float32)
    in_space = np.array([[0, 0], [7.5, 2], [5, 0]], np.float32)
    expected = policy.compute_log_likelihoods(normalised, obs)
    actual = policy.compute_log_likelihoods(in_space, obs, actions_normalized=False)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    shifted = make(actions=spaces.Discrete(2, start=5))
    np.testing.assert_array_equal(
        shifted.compute_log_likelihoods([5, 6, 5], obs, actions_normalized=False),
        shifted.compute_log_likelihoods([0, 1, 0], obs),
    )


def test_the_likelihood_of_an_action_that_does_not_exist_is_refused():
    policy = make()
    for wrong in (2, -1):
        with pytest.raises(errors.ObservationError, match=rf"from 0 to 1 .* got {wrong}"):
            policy.compute_log_likelihoods([0, wrong], np.zeros((2, 3)))


@pytest.mark.core
def test_a_learn_result_has_the_documented_keys():
    policy = make()
    batch = batch_for(policy, 10)
    keys = "learner_stats custom_metrics num_agent_steps_trained num_grad_updates_lifetime "
    keys += "diff_num_grad_updates_vs_sampler_policy"
    assert set(policy.learn_on_batch(batch)) == set(keys.split())
    result = policy.learn_epochs(batch, 3, 4)
    assert policy.num_grad_updates == result["num_grad_updates_lifetime"] == 1 + 3 * 3
    assert result["num_agent_steps_trained"] == 10
    assert result["diff_num_grad_updates_vs_sampler_policy"] == 1.0
    with pytest.raises(errors.BatchError, match="at least 1, got 0 and 4"):
        policy.learn_epochs(batch, 0, 4)


def test_an_override_of_learn_on_batch_sees_every_minibatch_and_may_report_nothing():
    class Own(PPOTF2Policy):
        def learn_on_batch(self, samples):
            sizes.append(samples.count)
            super().learn_on_batch(samples)
            return {}

    sizes, policy, other = [], make(Own, lr=0.01), make(lr=0.01)
    batch = batch_for(policy, 10)
    assert policy.learn_epochs(batch, 2, 4)["learner_stats"] == {}
    assert sizes == [4, 4, 2, 4, 4, 2]
    other.learn_epochs(batch, 2, 4)
    assert_close(policy.get_weights(), other.get_weights(), atol=1e-6)
    with pytest.raises(errors.BatchError, match="empty"):
        policy.learn_epochs({key: column[:0] for key, column in batch.items()}, 1, 4)


def test_a_callback_sees_each_update_and_its_result_is_reported():
    class Callbacks:
        def on_learn_on_batch(self, *, policy, train_batch, result):
            result["rows"] = len(train_batch["actions"])

    policy = make(callbacks=Callbacks)
    result = policy.learn_on_batch(batch_for(policy, 5))
    assert result["custom_metrics"] == {"rows": 5}


def test_warming_up_changes_no_numbers():
    policy, other = make(inference="onnx"), make(inference="onnx")
    before = policy.get_state()
    policy.driver.learning.warm_up(64, 2, 16)
    after = policy.get_state()
    assert_equal(before["weights"], after["weights"])
    assert after["rng"] == before["rng"]
    assert after["global_timestep"] == after["num_grad_updates"] == 0
    assert (policy.config["inference"], policy.config["jit_compile"]) == ("onnx", False)
    batch = batch_for(policy, 64)
    for copied in (policy, other):
        copied.learn_epochs(batch, 2, 16)
    assert_equal(policy.get_weights(), other.get_weights())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w[:-1], "has 7 arrays, but this policy has 8"),
        (lambda w: [*w[:-1], np.zeros(9)], r"must have shape \(1,\), got \(9,\)"),
        (lambda w: 5, "must be a dict or a list of arrays, got int"),
        (lambda w: [*w[:-1], ["x"]], "must be an array of float32"),
        (lambda w: [[[1.0], [1.0, 2.0]], *w[1:]], "must be an array of float32"),
        (lambda w: {}, "has 0 arrays"),
    ],
    ids=["too few", "wrong shape", "no list", "text", "ragged", "empty"],
)
def test_weights_that_do_not_fit_change_nothing(spoil, words):
    policy = make()
    before = policy.get_weights()
    with pytest.raises(errors.WeightsError, match=words):
        policy.set_weights(spoil([w + 1 for w in before.values()]))
    assert_equal(policy.get_weights(), before)


@pytest.mark.core
@RUNTIMES
def test_a_state_restores_everything_that_comes_after(inference):
    policy = make(inference=inference, lr=0.01, kl_coeff=0.3)
    batch = batch_for(policy, 20)
    policy.compute_actions(batch["obs"])
    policy.learn_epochs(batch, 2, 8)
    policy.update_kl(10.0)
    state = policy.get_state()
    frozen = copy.deepcopy({k: v for k, v in state.items() if k != "policy_spec"})

    def act_and_learn(policy):
        actions = policy.compute_actions(batch["obs"]).actions
        stats = policy.learn_epochs(batch, 2, 8)["learner_stats"]
        return actions.tolist(), stats, policy.global_timestep, policy.num_grad_updates

    expected, final = act_and_learn(policy), policy.get_weights()
    other = make(inference=inference, lr=0.5, seed=9, __policy_id="other")
    other.set_state(state)
    assert act_and_learn(other) == expected
    assert_equal(other.get_weights(), final)
    policy.set_state(state)  # back in time; the dict was not changed by its use
    assert act_and_learn(policy) == expected
    assert_equal(state["weights"], frozen["weights"])
    for key in ("rng", "global_timestep", "num_grad_updates"):
        assert state[key] == frozen[key]


def test_hyper_parameters_belong_to_one_policy():
    first, second = make(lr=0.1), make(lr=0.1)
    first.set_hyperparameter("lr", 0.5)
    assert first.get_hyperparameter("lr") == 0.5
    assert second.get_hyperparameter("lr") == pytest.approx(0.1)
    assert first.learn_on_batch(batch_for(first, 4))["learner_stats"]["cur_lr"] == 0.5
    with pytest.raises(
        errors.ConfigError, match="'seed' is not a hyperparameter; those are lr, gamma"
    ):
        first.set_hyperparameter("seed", 1)
    for wrong in (float("nan"), "fast", True):
        with pytest.raises(errors.ConfigError, match="lr must be a number or None"):
            first.set_hyperparameter("lr", wrong)
    assert first.get_hyperparameter("lr") == 0.5
    first.set_hyperparameter("grad_clip", None)
    assert first.get_hyperparameter("grad_clip") == float("inf")


class Threshold(Policy):
    """Goes right where the first number is positive; remembers how often it learned."""

    updates = 0

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        rows = np.asarray(obs_batch)
        return ActionBatch(
            (rows[:, 0] > 0).astype(int), list(state_batches or []), {"seen": rows[:, 0]}
        )

    def learn_on_batch(self, samples):
        self.updates += 1
        return {"learner_stats": {"updates": self.updates}}


@pytest.mark.core
def test_a_custom_policy_has_every_method():
    policy = Threshold(OBS, TWO, {"explore": True})
    assert policy.compute_actions([[1, 0, 0], [-1, 0, 0]]).actions.tolist() == [1, 0]
    action, state, extras = policy.compute_single_action([0.5, 0, 0], state=[np.array([3.0])])
    assert (action, state[0].tolist(), extras) == (1, [3.0], {"seen": 0.5})
    by_dict = policy.compute_actions_from_input_dict(
        {"obs": np.ones((2, 3)), "state_in_1": np.ones((2, 1)), "state_in_0": np.zeros((2, 1))}
    )
    assert [part[0, 0] for part in by_dict.state_outs] == [0, 1]
    env_actions, columns = policy.driver.acting.act([np.ones((2, 3))])
    assert env_actions.tolist() == columns["actions"].tolist() == [1, 1]
    assert policy.to_env_action(1) == 1
    assert policy.learn_on_batch({}) == {"learner_stats": {"updates": 1}}
    batch = {"obs": np.ones((2, 3))}
    assert policy.postprocess_trajectory(batch) is batch
    assert policy.driver.learning.postprocesses_trajectories is False
    assert policy.get_state()["weights"] == {}
    policy.set_state(policy.get_state())
    with pytest.raises(errors.UsageError, match="Threshold has no weights to set; got 1"):
        policy.set_weights({"a": 1})
    policy.on_global_var_update({"timestep": 3})
    assert repr(policy) == "Threshold(Box((3,), float32), Discrete(2))"
    assert policy.num_grad_updates == 0


def test_a_policy_must_say_how_it_acts():
    with pytest.raises(TypeError, match="compute_actions"):
        Policy(OBS, TWO, {})
