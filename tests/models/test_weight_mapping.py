"""Weights of Keras files find their variables, or an error says why not."""

import h5py
import keras
import numpy as np
import pytest

from soak.fuzz_files import sample_model, write_keras2
from tfpolicies.errors import ModelImportError
from tfpolicies.models.actor_critic_model import ActorCritic
from tfpolicies.models.weight_mapping import match_weights
from tfpolicies.storage.keras_h5 import read_keras_weights
from tfpolicies.storage.keras_weights import KerasWeights, LayerWeights, NamedArray

# Keras's own saving: NumPy's newer protocol, and the legacy format.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5"),
]

L = keras.layers
WRITERS = ("weights", "archive", "legacy", "keras2")


class Subclassed(keras.Model):
    """Attributes in another order than they are used in."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.z_first = L.Dense(3)
        self.a_second = L.Dense(3)
        self.blocks = [L.Dense(3), L.Dense(3)]
        self.scale = self.add_weight(shape=(3,), name="scale")

    def call(self, inputs):
        outputs = self.a_second(self.z_first(inputs))
        for block in self.blocks:
            outputs = block(outputs)
        return outputs * self.scale


def convolutional():
    layers = [keras.Input((6, 6, 1)), L.Conv2D(2, 3), L.BatchNormalization(), L.Conv2D(2, 3)]
    return keras.Sequential([*layers, L.Flatten(), L.Dense(8), L.Dense(8), L.Dense(2)])


def two_directions():
    inputs = keras.Input((5, 4))
    hidden = L.Bidirectional(L.GRU(4, return_sequences=True))(inputs)
    return keras.Model(
        inputs, L.Dense(2)(L.LSTM(4)(L.Bidirectional(L.GRU(4, return_sequences=True))(hidden)))
    )


def embedded():
    inputs = keras.Input((4,), dtype="int32")
    return keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling1D()(L.Embedding(7, 3)(inputs))))


def mlp(*units, n=4, name=None, last="logits"):
    layers = [L.Dense(u) for u in units[:-1]] + [L.Dense(units[-1], name=last)]
    return keras.Sequential([keras.Input((n,)), *layers], name=name)


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 3)))
    return model


def numbered(model):
    """Gives every weight values of its own."""
    for i, variable in enumerate(model.weights):
        variable.assign(100 * i + np.arange(np.prod(variable.shape)).reshape(variable.shape))
    return model


def written(model, folder, writer):
    path = folder / {"weights": "x.weights.h5", "archive": "x.keras"}.get(writer, "x.h5")
    if writer == "weights":
        model.save_weights(path)
    elif writer == "keras2":
        write_keras2(path, model, whole=False)
    else:
        model.save(path)
    return path


def keys_of(model):
    return [f"key_{i}" for i in range(len(model.variables))]


def mapped(path, model, **options):
    return match_weights(read_keras_weights(path), model, keys_of(model), path, **options)


def assert_same(mapping, model, original):
    assert len(mapping.arrays) == len(model.weights)
    keys = {
        id(variable): key for key, variable in zip(keys_of(model), model.variables, strict=True)
    }
    for mine, theirs in zip(model.weights, original.weights, strict=True):
        np.testing.assert_array_equal(mapping.arrays[keys[id(mine)]], np.asarray(theirs))


def in_memory(*layers, kind="keras2 weights"):
    """Layers as (name, array, ...)."""
    made = [
        LayerWeights(name, None, [NamedArray(str(i), np.asarray(a)) for i, a in enumerate(arrays)])
        for name, *arrays in layers
    ]
    return KerasWeights(kind, made)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("make", [sample_model, convolutional, two_directions, embedded])
def test_a_file_of_the_same_architecture_fills_every_variable(make, writer, tmp_path):
    original = numbered(make())

    model = make()
    mapping = mapped(written(original, tmp_path, writer), model)

    assert_same(mapping, model, original)
    assert [entry.variable for entry in mapping.report] == list(mapping.arrays)


@pytest.mark.parametrize("writer", ["weights", "archive"])
def test_attributes_of_a_subclassed_model_lead_to_their_layers(writer, tmp_path):
    original = numbered(subclassed())

    model = subclassed()

    assert_same(mapped(written(original, tmp_path, writer), model), model, original)


@pytest.mark.parametrize("writer", ["weights", "archive"])
def test_files_of_keras_versions_that_stored_no_names_load(writer, tmp_path):
    original = numbered(convolutional())
    path = written(original, tmp_path, "weights")
    with h5py.File(path, "a") as file:
        file.visititems(lambda _, item: [item.attrs.pop(key) for key in list(item.attrs)] and None)

    model = convolutional()

    assert_same(mapped(path, model), model, original)


def test_made_up_names_of_another_process_do_not_shift_layers(tmp_path):
    layers = [
        (f"dense_{i}", np.full((8, 8), i, np.float32), np.zeros(8, np.float32)) for i in (1, 2, 3)
    ]
    model = keras.Sequential(
        [keras.Input((8,)), *[L.Dense(8, name=f"dense_{i}") for i in (2, 3, 4)]]
    )

    mapping = match_weights(in_memory(*layers), model, keys_of(model), "x.h5")

    assert [mapping.arrays[f"key_{2 * i}"][0, 0] for i in range(3)] == [1, 2, 3]
    assert {entry.matched_by for entry in mapping.report} == {"order"}


def test_the_place_in_a_keras_3_file_counts_more_than_made_up_names(tmp_path):
    def make(first, second):
        names = (first, second)
        return keras.Sequential([keras.Input((4,)), *[L.Dense(4, name=name) for name in names]])

    original, model = numbered(make("dense_7", "dense_8")), make("dense_8", "dense_7")

    mapping = mapped(written(original, tmp_path, "weights"), model)

    assert_same(mapping, model, original)
    assert {entry.matched_by for entry in mapping.report} == {"order"}


def test_given_names_go_before_order():
    one, two = np.full((4, 4), 1.0), np.full((4, 4), 2.0)
    model = keras.Sequential(
        [keras.Input((4,)), *[L.Dense(4, use_bias=False, name=name) for name in ("eye", "ear")]]
    )

    mapping = match_weights(in_memory(("ear", two), ("eye", one)), model, keys_of(model), "x.h5")

    assert [array[0, 0] for array in mapping.arrays.values()] == [1.0, 2.0]
    assert str(mapping.report).splitlines() == [
        "file   policy  by    shape",
        "eye/0  key_0   name  (4, 4)",
        "ear/0  key_1   name  (4, 4)",
    ]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_of_an_actor_fills_the_actor_and_says_what_stayed(writer, tmp_path):
    original = numbered(mlp(8, 8, 2))
    path = written(original, tmp_path, writer)
    actor = mlp(8, 8, 2)
    model = ActorCritic(actor, mlp(8, 8, 1, last="value"))
    model(np.zeros((1, 4), np.float32))

    mapping = mapped(path, model)
    assert len(mapping.report.kept) == 3
    assert all(name.startswith(model.critic.name) for name in mapping.report.kept)
    assert str(mapping.report).splitlines()[-1].startswith("not in the file, and unchanged")
    assert mapped(path, model, allow_missing=True).report == mapping.report
    with pytest.raises(ModelImportError, match=r"no weights.*'.*dense.*allow_missing"):
        mapped(written(numbered(mlp(8, 2)), tmp_path, writer), model)

    keys = {
        id(variable): key for key, variable in zip(keys_of(model), model.variables, strict=True)
    }
    assert set(mapping.arrays) == {keys[id(variable)] for variable in actor.weights}
    for mine, theirs in zip(actor.weights, original.weights, strict=True):
        np.testing.assert_array_equal(mapping.arrays[keys[id(mine)]], np.asarray(theirs))


@pytest.mark.parametrize("writer", ["weights", "archive"])
def test_layers_that_normalise_inputs_are_passed_over(writer, tmp_path):
    filtered = L.Normalization()
    filtered.adapt(np.arange(8.0, dtype=np.float32).reshape(2, 4))
    original = numbered(keras.Sequential([keras.Input((4,)), filtered, *mlp(8, 2).layers]))
    mapping = mapped(written(original, tmp_path, writer), mlp(8, 2))
    assert [array.shape for array in mapping.arrays.values()] == [(4, 8), (8,), (8, 2), (2,)]
    assert mapping.report.kept == ()
    again = keras.Sequential([keras.Input((4,)), L.Normalization(), *mlp(8, 2).layers])
    assert len(mapped(written(original, tmp_path, writer), again).arrays) >= 6


def test_two_places_that_fit_alike_are_refused():
    model = ActorCritic(mlp(4, 4, 4, last="one"), mlp(4, 4, 1, last="two"))
    model(np.zeros((1, 4), np.float32))
    source = in_memory(("fc", np.zeros((4, 4)), np.zeros(4)))

    with pytest.raises(ModelImportError, match=r"'fc'.*\(4, 4\) \(4,\) fits more than one layer"):
        match_weights(source, model, keys_of(model), "x.h5", allow_missing=True)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_shape_that_differs_is_named_with_file_layer_and_both_shapes(writer, tmp_path):
    path = written(mlp(8, 3), tmp_path, writer)
    model = mlp(8, 2)
    before = [np.asarray(weight) for weight in model.weights]

    with pytest.raises(ModelImportError) as caught:
        mapped(path, model)

    for part in (repr(str(path)), "'logits'", "(8, 3) (3,)", "(8, 2) (2,)", "same name"):
        assert part in str(caught.value)
    for weight, old in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, old)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_layer_too_many_or_too_few_is_refused(writer, tmp_path):
    path = written(mlp(8, 8, 2), tmp_path, writer)

    with pytest.raises(ModelImportError, match=r"layer '.*dense.*' .* shapes \(8, 8\) \(8,\)"):
        mapped(path, mlp(8, 2))
    with pytest.raises(ModelImportError, match=r"(no weights|has weights) of shapes"):
        mapped(path, mlp(8, 8, 8, 2))


def test_gamma_is_not_taken_for_beta():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, L.BatchNormalization(scale=False, name="norm")(inputs))
    arrays = [NamedArray(n, np.ones(2)) for n in ("gamma", "moving_mean", "moving_variance")]
    source = KerasWeights("keras2 weights", [LayerWeights("norm", None, arrays)])

    with pytest.raises(ModelImportError, match="'norm'"):
        match_weights(source, model, keys_of(model), "x.h5")


def test_numbers_are_cast_to_the_variable_or_refused():
    model = mlp(2, n=1)

    def arrays(kernel):
        source = in_memory(("logits", kernel, np.zeros(2)))
        return match_weights(source, model, keys_of(model), "x.h5").arrays

    for kernel in (np.array([[0.5, 2]], np.float16), np.array([[0.5, 2]], np.float64)):
        assert arrays(kernel)["key_0"].dtype == np.float32
        assert arrays(kernel)["key_0"].tolist() == [[0.5, 2.0]]
    assert arrays(np.array([[3, 4]]))["key_0"].tolist() == [[3.0, 4.0]]
    for bad, problem in ((np.nan, "NaN"), (np.inf, "NaN"), (1e300, "float64 values that float32")):
        with pytest.raises(ModelImportError, match=rf"x\.h5.*'logits/0'.*{problem}"):
            arrays(np.array([[0.0, bad]]))
    with pytest.raises(ModelImportError, match="int64 values that float32 cannot hold"):
        arrays(np.array([[0, 2**40 + 1]]))


def test_seeds_of_dropout_are_neither_needed_nor_touched(tmp_path):
    def make():
        return keras.Sequential([keras.Input((4,)), L.Dropout(0.5), L.Dense(2, name="logits")])

    model = make()
    mapping = mapped(written(numbered(make()), tmp_path, "weights"), model)

    assert len(model.variables) == 3
    assert len(mapping.arrays) == 2
