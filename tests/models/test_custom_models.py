"""Models of the user's own: what kinds a policy takes, and what makes two of them one kind."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import ModelError

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
    assert policy.driver.acting.inference == "onnx"


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


# -- inputs by name -------------------------------------------------------------------------------

PLACES = spaces.Dict({"goal": spaces.Box(-1.0, 1.0, (2,)), "place": spaces.Box(-1.0, 1.0, (2,))})
SEEN = {"goal": np.array([[0.1, 0.2]], np.float32), "place": np.array([[0.3, 0.4]], np.float32)}


def places_policy(inputs, outputs, **config):
    model = {"custom_model": keras.Model(inputs, outputs), "fcnet_hiddens": [4]}
    config = {"seed": 1, "inference": "tf", "model": model, **config}
    return PPOTF2Policy(PLACES, ACTION_SPACE, config)


@pytest.mark.core
@pytest.mark.parametrize("names", [("place", "goal"), ("obs_place", "obs_goal")])
@pytest.mark.parametrize("as_dict", [False, True])
def test_inputs_that_are_named_like_keys_get_those_parts_in_any_order(names, as_dict):
    place, goal = (keras.Input((2,), name=name) for name in names)
    inputs = dict(zip(names, (place, goal), strict=True)) if as_dict else [place, goal]
    policy = places_policy(inputs, keras.layers.Subtract()([place, goal]))
    logits = policy.compute_actions(SEEN).extras["action_dist_inputs"]
    np.testing.assert_allclose(logits, [[0.2, 0.2]], atol=1e-6)


def test_a_model_may_leave_parts_of_an_observation_out():
    goal = keras.Input((2,), name="goal")
    policy = places_policy(goal, keras.layers.Identity()(goal))
    logits = policy.compute_actions(SEEN).extras["action_dist_inputs"]
    np.testing.assert_allclose(logits, SEEN["goal"])


def test_inputs_that_name_no_part_are_refused_since_their_order_would_decide():
    first, second = keras.Input((2,), name="where"), keras.Input((2,), name="goal")
    with pytest.raises(ModelError, match=r"inputs \['where', 'goal'\].*name='obs_goal'"):
        places_policy([first, second], keras.layers.Subtract()([first, second]))


def test_the_input_of_a_model_of_one_part_may_have_any_name():
    x = keras.Input((4,), name="anything")
    logits = keras.layers.Dense(2)(x)
    for inputs in ([x], {"anything": x}, x):
        assert policy_of(keras.Model(inputs, logits)).compute_actions(OBS).actions.shape == (2,)


# -- mistakes that would teach nothing ------------------------------------------------------------

IMAGES = spaces.Box(0, 255, (12, 12, 3), np.uint8)


def image_policy(model, **settings):
    settings = {"conv_filters": [], "fcnet_hiddens": [4], **settings}
    config = {"inference": "tf", "model": {"custom_model": model, **settings}}
    return PPOTF2Policy(IMAGES, ACTION_SPACE, config)


def test_an_input_of_integers_where_images_are_fractions_is_refused():
    x = keras.Input((12, 12, 3), dtype="uint8", name="pixels")
    model = keras.Model(x, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
    with pytest.raises(ModelError, match=r"'pixels'.*dtype uint8, but .*divided by 255"):
        image_policy(model)


def test_a_critic_that_cannot_be_built_beside_a_model_is_told_as_such():
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(2)])
    words = r"no value, so a separate critic is .*'conv_filters'.*as a second"
    with pytest.raises(ModelError, match=words):
        image_policy(model, conv_filters=None)


def test_a_second_rescaling_of_images_is_told(caplog):
    caplog.set_level("WARNING", "tfpolicies")
    layers = [keras.layers.Flatten(), keras.layers.Dense(2)]
    image_policy(keras.Sequential([keras.layers.Rescaling(2.0, offset=-1.0), *layers]))
    assert not caplog.records
    layers = [keras.layers.Flatten(), keras.layers.Dense(2)]
    shrinking = keras.layers.Rescaling(1 / 255, name="to_fractions")
    image_policy(keras.Sequential([shrinking, *layers]))
    assert "'to_fractions' multiplies by 0.0039, but images" in caplog.text


def test_a_model_class_or_function_without_parameters_makes_models():
    class Bare(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(2)

        def call(self, x):
            return self.out(x)

    for factory in (Bare, lambda: keras.Sequential([keras.layers.Dense(2)])):
        assert policy_of(factory).compute_actions(OBS).actions.shape == (2,)


def test_a_single_layer_and_outputs_under_other_names_are_answered():
    with pytest.raises(ModelError, match=r"the layer 'lonely'. Write keras.Sequential"):
        policy_of(keras.layers.Dense(2, name="lonely"))
    x = keras.Input((4,))
    outputs = {"policy": keras.layers.Dense(2)(x), "v": keras.layers.Dense(1)(x)}
    with pytest.raises(ModelError, match=r"Rename a key: it returns \['policy', 'v'\]"):
        policy_of(keras.Model(x, outputs))
    alone = keras.Model(x, {"logits": outputs["policy"]})
    assert policy_of(alone).compute_actions(OBS).extras["vf_preds"].shape == (2,)


def test_a_recurrent_layer_in_a_plain_model_is_answered_with_use_lstm():
    model = keras.Sequential([keras.layers.LSTM(3), keras.layers.Dense(2)])
    with pytest.raises(ModelError, match="'use_lstm': True"):
        policy_of(model)


# -- a copy to keep -------------------------------------------------------------------------------

LOADED = """
import json, sys
import keras
import numpy as np
obs, *paths = sys.argv[1:]
for path in paths:
    logits, values = keras.models.load_model(path)(np.array(json.loads(obs), "float32"))
    print(json.dumps([np.asarray(logits).tolist(), np.asarray(values).tolist()]))
assert not any(name.startswith("tfpolicies") for name in sys.modules)
"""


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
@pytest.mark.core
def test_keras_alone_loads_a_copy_in_another_process(tmp_path):
    actor_alone = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    models = {"custom_model": actor_alone, "fcnet_hiddens": [4]}, {"fcnet_hiddens": [4]}
    paths, expected = [], []
    for i, model in enumerate(models):
        policy = PPOTF2Policy(OBS_SPACE, ACTION_SPACE, {"inference": "tf", "model": model})
        copy = policy.to_keras()
        assert [tuple(x.shape) for x in copy.inputs] == [(None, 4)]
        paths.append(str(tmp_path / f"copy{i}.keras"))
        copy.save(paths[-1])
        expected.append(policy.compute_actions(OBS, explore=False).extras)
    command = [sys.executable, "-c", LOADED, json.dumps(OBS.tolist()), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line, extras in zip(done.stdout.splitlines()[-2:], expected, strict=True):
        logits, values = json.loads(line)
        np.testing.assert_allclose(logits, extras["action_dist_inputs"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.ravel(values), extras["vf_preds"], rtol=1e-5, atol=1e-6)
