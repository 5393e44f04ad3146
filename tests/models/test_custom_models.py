"""Keras models of users in policies: inputs by name, mistakes, copies, layers with state."""

import json

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from helpers.keras_files import WRITERS, write_model
from helpers.keras_models import make_mlp
from helpers.processes import run_python
from tfpolicies import DQNTF2Policy, PGTF2Policy, PPOTF2Policy, import_policy
from tfpolicies.errors import ModelError

pytestmark = pytest.mark.usefixtures("kept_programs")

OBS_SPACE, ACTION_SPACE = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2)
OBS = np.array([[0.1, -0.2, 0.3, 0.4], [-1.0, 0.5, 0.0, 1.0]], np.float32)


def make_policy(model, policy_class=PPOTF2Policy, inference="tf", space=OBS_SPACE, **settings):
    model = {"custom_model": model, "fcnet_hiddens": [4], **settings}
    return policy_class(space, ACTION_SPACE, {"seed": 1, "inference": inference, "model": model})


@pytest.mark.core
@pytest.mark.parametrize(
    ("policy_class", "inference"),
    [(PPOTF2Policy, "tf"), (PGTF2Policy, "tf"), (PGTF2Policy, "onnx")],
)
def test_each_policy_starts_with_the_weights_that_its_model_has_then(policy_class, inference):
    model = make_mlp(n=4, hidden=8, values=1)
    for factor in (1.0, 0.5):
        model.set_weights([factor * weight for weight in model.get_weights()])
        policy = make_policy(model, policy_class, inference)
        extras = policy.compute_actions(OBS, explore=False).extras
        logits, values = (np.asarray(x) for x in model(OBS))
        np.testing.assert_allclose(extras["action_dist_inputs"], logits, rtol=1e-5, atol=1e-6)
        assert policy.driver.acting.inference == inference
        if policy_class is PPOTF2Policy:
            np.testing.assert_allclose(extras["vf_preds"], values[:, 0], rtol=1e-5, atol=1e-6)
        else:
            assert "vf_preds" not in extras


def test_policies_from_equal_models_with_other_weights_share_a_program_but_no_weights():
    models = [make_mlp(n=4, hidden=8, values=1) for _ in range(2)]
    policies = [make_policy(model) for model in models]
    assert policies[0].program is policies[1].program
    for policy, model in zip(policies, models, strict=True):
        inputs = policy.compute_actions(OBS, explore=False).extras["action_dist_inputs"]
        np.testing.assert_allclose(inputs, np.asarray(model(OBS)[0]), rtol=1e-5, atol=1e-6)


def test_the_keys_of_a_nested_space_may_have_slashes_and_paths_that_look_alike():
    box = spaces.Box(-1.0, 1.0, (1,))
    space = spaces.Dict({"a_b": box, "a": spaces.Dict(b=box), "left/arm": box})
    policy = PPOTF2Policy(space, ACTION_SPACE, {"seed": 1, "inference": "tf"})
    batch = {"a_b": np.ones((2, 1)), "a": {"b": np.zeros((2, 1))}, "left/arm": np.ones((2, 1))}
    assert policy.compute_actions(batch).actions.shape == (2,)


PLACES = spaces.Dict({"goal": spaces.Box(-1.0, 1.0, (2,)), "place": spaces.Box(-1.0, 1.0, (2,))})
SEEN = {"goal": np.array([[0.1, 0.2]], np.float32), "place": np.array([[0.3, 0.4]], np.float32)}


def act_at_places(inputs, outputs):
    policy = make_policy(keras.Model(inputs, outputs), space=PLACES)
    return policy.compute_actions(SEEN).extras["action_dist_inputs"]


@pytest.mark.core
@pytest.mark.parametrize("names", [("place", "goal"), ("obs_place", "obs_goal")])
@pytest.mark.parametrize("as_dict", [False, True])
def test_inputs_that_are_named_like_keys_get_those_parts_in_any_order(names, as_dict):
    place, goal = (keras.Input((2,), name=name) for name in names)
    inputs = dict(zip(names, (place, goal), strict=True)) if as_dict else [place, goal]
    logits = act_at_places(inputs, keras.layers.Subtract()([place, goal]))
    np.testing.assert_allclose(logits, [[0.2, 0.2]], atol=1e-6)


def test_a_model_may_leave_parts_out_but_its_inputs_must_name_parts():
    where, goal = keras.Input((2,), name="where"), keras.Input((2,), name="goal")
    np.testing.assert_allclose(act_at_places(goal, keras.layers.Identity()(goal)), SEEN["goal"])
    with pytest.raises(ModelError, match=r"inputs \['where', 'goal'\].*name='obs_goal'"):
        act_at_places([where, goal], keras.layers.Subtract()([where, goal]))


def test_the_input_of_a_model_of_one_part_may_have_any_name():
    x = keras.Input((4,), name="anything")
    logits = keras.layers.Dense(2)(x)
    for inputs in ([x], {"anything": x}, x):
        assert make_policy(keras.Model(inputs, logits)).compute_actions(OBS).actions.shape == (2,)


IMAGES = spaces.Box(0, 255, (12, 12, 3), np.uint8)


def image_policy(*layers, conv_filters=()):
    layers = [*layers, keras.layers.Flatten(), keras.layers.Dense(2)]
    return make_policy(keras.Sequential(layers), space=IMAGES, conv_filters=conv_filters)


@pytest.mark.parametrize("kind", [keras.Model, keras.Sequential])
def test_an_input_of_integers_where_images_are_fractions_is_refused(kind):
    x = keras.Input((12, 12, 3), dtype="uint8", name="pixels")
    layers = [keras.layers.Flatten(), keras.layers.Dense(2)]
    is_sequential = kind is keras.Sequential
    model = kind([x, *layers]) if is_sequential else kind(x, layers[1](layers[0](x)))
    with pytest.raises(ModelError, match=r"'pixels'.*dtype uint8, but .*divided by 255"):
        make_policy(model, space=IMAGES, conv_filters=[])


def test_the_error_of_a_separate_critic_names_it():
    words = r"no value, so a separate critic is .*'conv_filters'.*as a second"
    with pytest.raises(ModelError, match=words):
        image_policy(conv_filters=None)


def test_a_second_rescaling_of_images_is_logged(caplog):
    caplog.set_level("WARNING", "tfpolicies")
    image_policy(keras.layers.Rescaling(2.0, offset=-1.0))
    assert not caplog.records
    image_policy(keras.layers.Rescaling(1 / 255, name="to_fractions"))
    assert "'to_fractions' multiplies by 0.0039, but images" in caplog.text


def test_a_model_class_or_function_without_parameters_makes_models():
    class Bare(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(2)

        def call(self, x):
            return self.out(x)

    for factory in (Bare, lambda: keras.Sequential([keras.layers.Dense(2)])):
        assert make_policy(factory).compute_actions(OBS).actions.shape == (2,)


def test_a_single_layer_and_outputs_under_other_names_are_refused_with_the_remedy():
    with pytest.raises(ModelError, match=r"the layer 'lonely'. Write keras.Sequential"):
        make_policy(keras.layers.Dense(2, name="lonely"))
    x = keras.Input((4,))
    outputs = {"policy": keras.layers.Dense(2)(x), "v": keras.layers.Dense(1)(x)}
    with pytest.raises(ModelError, match=r"Rename a key: it returns \['policy', 'v'\]"):
        make_policy(keras.Model(x, outputs))
    alone = keras.Model(x, {"logits": outputs["policy"]})
    assert make_policy(alone).compute_actions(OBS).extras["vf_preds"].shape == (2,)
    with pytest.raises(ModelError, match="'use_lstm': True"):
        make_policy(keras.Sequential([keras.layers.LSTM(3), keras.layers.Dense(2)]))


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
    actor = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])
    paths, expected = [], []
    for i, policy in enumerate([make_policy(actor), make_policy(None)]):
        copy = policy.to_keras()
        assert [tuple(x.shape) for x in copy.inputs] == [(None, 4)]
        paths.append(str(tmp_path / f"copy{i}.keras"))
        copy.save(paths[-1])
        expected.append(policy.compute_actions(OBS, explore=False).extras)
    output = run_python(LOADED, json.dumps(OBS.tolist()), *paths).stdout
    for line, extras in zip(output.splitlines()[-2:], expected, strict=True):
        logits, values = json.loads(line)
        np.testing.assert_allclose(logits, extras["action_dist_inputs"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.ravel(values), extras["vf_preds"], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
@pytest.mark.parametrize("names", [("place", "goal"), ("obs_place", "obs_goal")])
@pytest.mark.parametrize("observation_filter", ["NoFilter", "MeanStdFilter"])
@pytest.mark.parametrize("makes_dict", [False, True])
def test_a_copy_has_the_input_names_of_the_users_model(
    names, observation_filter, makes_dict, tmp_path
):
    inputs = {name: keras.Input((2,), name=name) for name in names}
    logits = keras.layers.Dense(2)(keras.layers.Concatenate()([*inputs.values()]))
    model = keras.Model(inputs if makes_dict else [*inputs.values()], logits)
    settings = {"seed": 1, "inference": "tf", "observation_filter": observation_filter}
    policy = PPOTF2Policy(PLACES, ACTION_SPACE, {**settings, "model": {"custom_model": model}})
    copy = policy.to_keras()
    assert sorted(tensor.name for tensor in copy.inputs) == sorted(names)
    copy.save(tmp_path / "copy.keras")
    loaded = keras.saving.load_model(tmp_path / "copy.keras")
    expected = policy.compute_actions(SEEN, explore=False).extras["action_dist_inputs"]
    keys = dict(zip(names, ("place", "goal"), strict=True))
    result, _ = loaded({name: SEEN[key] for name, key in keys.items()})
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


LINE = spaces.Box(-100.0, 100.0, (1,), np.float32)
TWELVE = np.float32([[12]])
RIGHT = [[1.0, -1.0]]  # (12 - 10) / 2, times the kernel


def make_normalizing(form, tmp_path=None):
    """A model that normalises by mean 10 and variance 4, with the kernel [[1, -1]]."""
    scaled = keras.layers.Normalization()
    scaled.adapt(np.float32([[8], [12]]))
    dense = keras.layers.Dense(2, use_bias=False)
    if form == "sequential":
        model = keras.Sequential([keras.Input((1,)), scaled, dense])
    else:
        x = keras.Input((1,))
        model = keras.Model(x, dense(scaled(x)))
    dense.set_weights([np.float32([[1, -1]])])
    if form == "file":
        model.save(tmp_path / "model.keras")
        model = keras.saving.load_model(tmp_path / "model.keras")
    assert np.asarray(model(TWELVE)).tolist() == RIGHT
    return model


def make_line_policy(model, mode="tf", cls=PPOTF2Policy):
    settings = {"hiddens": [], "dueling": False} if cls is DQNTF2Policy else {}
    mode = "session" if mode == "graph" else mode
    model = {"custom_model": model}
    return factories.make(cls, LINE, model=model, inference=mode, **settings)


def compute_outputs(policy):
    extras = policy.compute_actions(TWELVE, explore=False).extras
    return extras.get("q_values", extras["action_dist_inputs"]).tolist()


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
@pytest.mark.parametrize("form", ["sequential", "functional", "file"])
@pytest.mark.parametrize("mode", ["tf", "onnx", "graph"])
def test_a_normalization_that_was_adapted_normalises(form, mode, tmp_path):
    model = make_normalizing(form, tmp_path)
    policy = make_line_policy(model, mode)
    other = make_line_policy(make_normalizing(form, tmp_path), mode)
    other.set_weights(policy.get_weights() | {"layer_0/mean": np.float32([11.0])})
    for actor, expected in ((policy, RIGHT), (other, [[0.5, -0.5]])):
        assert compute_outputs(actor) == expected
        assert np.asarray(actor.to_keras()(TWELVE)[0]).tolist() == expected
    assert np.asarray(model(TWELVE)).tolist() == RIGHT  # the user's model is unchanged


@pytest.mark.core
def test_exports_and_updates_normalise_too(tmp_path):
    policy = make_line_policy(make_normalizing("sequential"))
    policy.export_model(tmp_path, onnx=True)
    result = import_policy(tmp_path / "model.onnx").compute_actions(TWELVE, explore=False)
    assert result.extras["action_dist_inputs"].tolist() == RIGHT
    for cls in (PPOTF2Policy, DQNTF2Policy):
        policy = make_line_policy(make_normalizing("sequential"), cls=cls)
        assert compute_outputs(policy) == RIGHT
        rows = factories.batch_for(policy, 8)
        rows["obs"] = np.full((8, 1), 12, np.float32)
        gradients, _ = policy.compute_gradients(rows)
        (kernel,) = [x for x in gradients if np.shape(x) == (1, 2)]
        rows["obs"] = np.full((8, 1), 10, np.float32)  # the mean: no gradient
        (zeros,) = [x for x in policy.compute_gradients(rows)[0] if np.shape(x) == (1, 2)]
        assert np.abs(kernel).max() > 0 == np.abs(zeros).max()


@keras.saving.register_keras_serializable("taken")
class Scaled(keras.layers.Layer):
    factor = 1.0

    def call(self, x):
        return x * self.factor


@keras.saving.register_keras_serializable("taken")
class Whole(keras.Model):
    factor = 1.0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x) * self.factor


def make_with_attribute(form):
    scaled = Scaled(name="scale")
    if form == "sequential":
        model = keras.Sequential([keras.layers.Dense(3), scaled, keras.layers.Dense(2)])
    elif form == "functional":
        x = keras.Input((1,))
        model = keras.Model(x, keras.layers.Dense(2)(scaled(x)))
    else:
        model = scaled = Whole()
    scaled.factor = 3.0
    return model


@pytest.mark.parametrize(
    ("form", "layer"),
    [("sequential", ", first in its layer 'scale'"), ("functional", ", .*'scale'"), ("class", "")],
)
@pytest.mark.parametrize("mode", ["tf", "graph"])
def test_an_attribute_that_copies_lack_is_named_with_its_layer(form, layer, mode):
    words = rf"outputs of the copy differ{layer}\. An attribute .* or pass a factory, model=lambda"
    with pytest.raises(ModelError, match=words):
        make_line_policy(make_with_attribute(form), mode)
    policy = make_line_policy(lambda space, num_outputs: make_with_attribute(form), mode)
    assert policy.compute_actions(TWELVE).actions.shape == (1,)


def test_a_model_that_draws_random_numbers_is_accepted():
    @keras.saving.register_keras_serializable("taken")
    class Drawing(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x))

    policy = make_line_policy(keras.Sequential([Drawing(), keras.layers.Dense(2)]))
    assert policy.compute_actions(TWELVE).actions.shape == (1,)


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
@pytest.mark.parametrize("writer", WRITERS[:3])
@pytest.mark.parametrize("mode", ["tf", "onnx", "graph"])
def test_an_imported_normalization_normalises(mode, writer, tmp_path):
    path = write_model(make_normalizing("sequential"), tmp_path, writer)
    scaled, dense = keras.layers.Normalization(), keras.layers.Dense(2, use_bias=False)
    scaled.adapt(np.float32([[-1], [1]]))
    policy = make_line_policy(keras.Sequential([keras.Input((1,)), scaled, dense]), mode)
    assert compute_outputs(policy) != RIGHT
    policy.import_model_from_h5(path)
    assert compute_outputs(policy) == RIGHT
    assert np.asarray(policy.to_keras()(TWELVE)[0]).tolist() == RIGHT
