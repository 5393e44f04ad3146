"""Models of the user's own: what kinds a policy takes, and what makes two of them one kind."""

import keras
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import PGTF2Policy, PPOTF2Policy

OBS_SPACE, ACTION_SPACE = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2)
OBS = np.array([[0.1, -0.2, 0.3, 0.4], [-1.0, 0.5, 0.0, 1.0]], np.float32)


def functional(units, activation="tanh"):
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(units, activation=activation)(inputs)
    outputs = [keras.layers.Dense(2)(hidden), keras.layers.Dense(1)(hidden)]
    return keras.Model(inputs, outputs)


def policy_of(model, policy_class=PPOTF2Policy):
    config = {"seed": 1, "inference": "tf", "model": {"custom_model": model}}
    return policy_class(OBS_SPACE, ACTION_SPACE, config)


@pytest.mark.core
def test_a_functional_model_is_a_template_and_the_first_policy_acts_with_its_weights():
    model = functional(8)
    extras = policy_of(model).compute_actions(OBS, explore=False).extras
    logits, values = (np.asarray(x) for x in model(OBS))
    np.testing.assert_allclose(extras["action_dist_inputs"], logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(extras["vf_preds"], values[:, 0], rtol=1e-5, atol=1e-6)


def test_functional_models_of_other_architecture_are_of_another_kind():
    first, same = policy_of(functional(8)), policy_of(functional(8))
    other = policy_of(functional(8, "relu"))
    assert first.program is same.program
    assert first.program is not other.program


def test_a_model_with_a_value_that_its_policy_does_not_need_acts_through_onnx_all_the_same():
    model = functional(8)
    config = {"seed": 1, "inference": "onnx", "model": {"custom_model": model}}
    policy = PGTF2Policy(OBS_SPACE, ACTION_SPACE, config)
    extras = policy.compute_actions(OBS, explore=False).extras
    logits = np.asarray(model(OBS)[0])
    np.testing.assert_allclose(extras["action_dist_inputs"], logits, rtol=1e-5, atol=1e-6)
    assert "vf_preds" not in extras
    assert policy.inference == "onnx"


def test_each_model_instance_gives_its_weights_to_the_first_policy_made_from_it():
    models = [functional(8), functional(8)]
    policies = [policy_of(model) for model in models]
    assert policies[0].program is policies[1].program
    for policy, model in zip(policies, models, strict=True):
        for ours, theirs in zip(policy.get_weights().values(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    kernel = next(iter(policy_of(models[0]).get_weights().values()))
    assert not np.array_equal(kernel, models[0].get_weights()[0])


def test_the_keys_of_a_nested_space_may_have_slashes_and_paths_that_look_alike():
    box = spaces.Box(-1.0, 1.0, (1,))
    space = spaces.Dict({"a_b": box, "a": spaces.Dict(b=box), "left/arm": box})
    policy = PPOTF2Policy(space, ACTION_SPACE, {"seed": 1, "inference": "tf"})
    batch = {"a_b": np.ones((2, 1)), "a": {"b": np.zeros((2, 1))}, "left/arm": np.ones((2, 1))}
    assert policy.compute_actions(batch).actions.shape == (2,)
