"""Files of Keras 2 and 3 with layers of many kinds."""

import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from helpers.keras_files import WRITERS, map_file, strip_names, write_model
from helpers.keras_models import vary_weights
from tfpolicies import PPOTF1Policy, PPOTF2Policy, import_policy
from tfpolicies.errors import ModelImportError
from tfpolicies.models.weight_mapping import match_weights
from tfpolicies.storage.keras_weights import KerasWeights, LayerWeights, NamedArray

# Keras's own saving: NumPy's newer protocol, and the legacy format.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5"),
    pytest.mark.usefixtures("kept_programs"),
]

L = keras.layers
KERAS_2 = Path(__file__).parents[1] / "stored" / "keras2" / "files.zip"
KERAS_3 = WRITERS[:3]


def functional(shape, compute):
    x = keras.Input(shape)
    return keras.Model(x, L.Dense(2)(L.Flatten()(compute(x))))


def attend(x):
    y = L.MultiHeadAttention(2, 3)(x, x)
    return L.MultiHeadAttention(2, 3, name="look")(y, x)


def normalise(x):
    y = L.SpectralNormalization(L.Dense(3))(x)
    y = L.TimeDistributed(L.SpectralNormalization(L.Dense(3, use_bias=False)))(y)
    return keras.Sequential([L.SpectralNormalization(L.Conv1D(3, 2)), L.Dense(3)])(y)


MODELS = {
    "attention": lambda: functional((5, 4), attend),
    "grouped": lambda: functional((5, 4), lambda x: L.GroupQueryAttention(3, 4, 2)(x, x)),
    "spectral": lambda: functional((5, 4), normalise),
    "depthwise": lambda: functional((5, 5, 2), lambda x: L.DepthwiseConv2D(2)(x)),
}


def keras_2_model():
    x = keras.Input((4, 2))
    y = L.DepthwiseConv1D(2, depth_multiplier=2)(x)
    y = L.MultiHeadAttention(2, 2)(y, y)
    y = L.SpectralNormalization(L.Dense(3))(y)
    y = L.DepthwiseConv2D(2)(L.Reshape((3, 3, 1))(y))
    return keras.Model(x, L.Dense(2)(L.Flatten()(y)))


def rows_for(model):
    return np.random.default_rng(1).normal(size=(3, *model.input_shape[1:])).astype(np.float32)


def load(path, model):
    mapping = map_file(path, model)
    for key, array in mapping.arrays.items():
        model.variables[int(key.removeprefix("key_"))].assign(array)
    return mapping


def assert_same_outputs(model, original):
    rows = rows_for(model)
    np.testing.assert_array_equal(np.asarray(model(rows)), np.asarray(original(rows)))


@pytest.mark.core
@pytest.mark.parametrize("form", KERAS_3)
@pytest.mark.parametrize("kind", MODELS)
def test_a_file_of_keras_3_fills_the_same_architecture(kind, form, tmp_path):
    original, model = vary_weights(MODELS[kind]()), MODELS[kind]()
    mapping = load(write_model(original, tmp_path, form), model)
    assert len(mapping.arrays) == len(mapping.report) == len(model.weights)
    assert_same_outputs(model, original)


@pytest.mark.core
@pytest.mark.parametrize("form", ["model.keras", "model.h5", "weights.h5", "v3.weights.h5"])
def test_a_file_of_keras_2_fills_the_same_architecture(form, tmp_path):
    zipfile.ZipFile(KERAS_2).extractall(tmp_path)
    model = keras_2_model()
    load(tmp_path / form, model)
    stored = np.load(tmp_path / "rows.npz")
    np.testing.assert_allclose(np.asarray(model(stored["rows"])), stored["outputs"], atol=1e-5)


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy], ids=["tf2", "graph"])
@pytest.mark.parametrize("version", [2, 3])
def test_a_policy_acts_as_the_model_of_the_file(policy_class, version, tmp_path):
    if version == 2:
        zipfile.ZipFile(KERAS_2).extractall(tmp_path)
        path, stored = tmp_path / "model.keras", np.load(tmp_path / "rows.npz")
        rows, outputs = stored["rows"], stored["outputs"]
    else:
        model = vary_weights(keras_2_model())
        path, rows = write_model(model, tmp_path, "weights"), rows_for(model)
        outputs = np.asarray(model(rows))
    space = spaces.Box(-10.0, 10.0, (4, 2), np.float32)
    policy = policy_class(space, factories.TWO, {"model": {"custom_model": keras_2_model()}})
    policy.import_model_from_h5(path)
    extras = policy.compute_actions(rows, explore=False).extras
    np.testing.assert_allclose(extras["action_dist_inputs"], outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("layer", [L.DepthwiseConv1D, L.DepthwiseConv2D])
def test_depthwise_kernels_of_keras_2_are_kernels(layer, tmp_path):
    dims = 1 if layer is L.DepthwiseConv1D else 2
    model = keras.Sequential([keras.Input((3,) * dims + (2,)), layer(2, name="conv")])
    kernel, bias = vary_weights(model).get_weights()
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["layer_names"] = np.asarray([b"conv"])
        group = file.create_group("conv")
        names = ("conv/depthwise_kernel:0", "conv/bias:0")
        group.attrs["weight_names"] = np.asarray([name.encode() for name in names])
        group[names[0]], group[names[1]] = kernel, bias
    mapping = map_file(tmp_path / "x.h5", model)
    factories.assert_equal(mapping.arrays, {"key_0": kernel, "key_1": bias})


def dense(**options):
    return keras.Sequential([keras.Input((4,)), L.Dense(3, **options), L.Dense(2, **options)])


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`:UserWarning")
@pytest.mark.parametrize("form", ["weights", "archive"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_quantized_model_is_refused_in_one_line(form, use_bias, tmp_path):
    original = dense(use_bias=use_bias)
    original.quantize("int8")
    path = write_model(original, tmp_path, form)
    with pytest.raises(ModelImportError, match=r"quantized model: .*int8.*before") as error:
        load(path, dense())  # without biases, scales would fit them
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200 + len(str(tmp_path))
    if form == "archive":
        space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        with pytest.raises(ModelImportError, match=r"quantized model: .*int8.*before"):
            import_policy(path, observation_space=space, action_space=factories.TWO)


def test_two_values_for_one_variable_are_refused():
    model = keras.Sequential([keras.Input((4,)), L.SpectralNormalization(L.Dense(3), name="norm")])
    zeros, ones = np.zeros((4, 3)), np.ones((4, 3))

    def map_both(outer, inner):
        name = "spectral_normalization"
        layers = {name: [outer, np.ones((1, 3))], f"{name}/layer": [inner, np.zeros(3)]}
        source = []
        for path, arrays in layers.items():
            named = [NamedArray(str(i), array) for i, array in enumerate(arrays)]
            source.append(LayerWeights(f"layers/{path}", name, named, f"layers/{path}", False))
        keys = [variable.name for variable in model.variables]
        return match_weights(KerasWeights("keras3 weights", source), model, keys, "x.h5").arrays

    assert map_both(ones, ones)["kernel"].tolist() == ones.tolist()
    with pytest.raises(ModelImportError, match=r"'x\.h5' has two values for one variable"):
        map_both(ones, zeros)


def test_private_names_of_attributes_lead_to_their_layers_wherever_the_model_is(tmp_path):
    def make():  # all weights of one shape, so that only places tell them apart
        shape = {"num_heads": 2, "key_dim": 2, "use_bias": False}
        x = keras.Input((5, 4))
        y = L.MultiHeadAttention(**shape)(x, x)
        return keras.Model(x, L.MultiHeadAttention(**shape)(y, x))

    original, inner = vary_weights(make()), make()
    path = write_model(original, tmp_path, "weights")
    with h5py.File(path, "a") as file:  # as Keras 2 has them
        for layer in ("multi_head_attention", "multi_head_attention_1"):
            for name in ("query", "key", "value", "output"):
                file.move(f"layers/{layer}/{name}_dense", f"layers/{layer}/_{name}_dense")
        strip_names(file)
    x = keras.Input((5, 4))
    for model in (inner, keras.Model(x, L.Rescaling(1.0)(inner(x)))):
        load(path, model)
        assert_same_outputs(model, original)


def test_attributes_with_and_without_an_underscore_stay_apart(tmp_path):
    class Both(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner, self._inner = L.Dense(4), L.Dense(4)

        def call(self, x):
            return self._inner(keras.ops.tanh(self.inner(x)))

    def make():
        return functional((5, 4), lambda x: Both()(x))

    for form in KERAS_3:
        original, model = vary_weights(make()), make()
        load(write_model(original, tmp_path, form), model)
        assert_same_outputs(model, original)
