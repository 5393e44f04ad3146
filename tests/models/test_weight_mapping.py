"""Mapping of the weights in Keras files to the variables of a model."""

from itertools import product

import h5py
import keras
import numpy as np
import pytest

from helpers.arrays import assert_arrays_equal
from helpers.keras_files import (
    WRITERS,
    assert_mapped,
    make_keys,
    map_file,
    strip_names,
    write_model,
)
from soak.fuzz_files import sample_model
from tfpolicies.errors import ModelImportError
from tfpolicies.models.actor_critic_model import ActorCritic
from tfpolicies.models.weight_mapping import match_weights
from tfpolicies.storage.keras_weights import KerasWeights, LayerWeights, NamedArray

# Keras's own saving: NumPy's newer protocol, and the legacy format.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5"),
]

L = keras.layers


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
    x = inputs = keras.Input((5, 4))
    for _ in range(2):
        x = L.Bidirectional(L.GRU(4, return_sequences=True))(x)
    return keras.Model(inputs, L.Dense(2)(L.LSTM(4)(x)))


def embedded():
    inputs = keras.Input((4,), dtype="int32")
    return keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling1D()(L.Embedding(7, 3)(inputs))))


def mlp(*units, n=4, last="logits"):
    layers = [L.Dense(u) for u in units[:-1]] + [L.Dense(units[-1], name=last)]
    return keras.Sequential([keras.Input((n,)), *layers])


def denses(*names, n=4, **options):
    layers = [L.Dense(n, name=name, **options) for name in names]
    return keras.Sequential([keras.Input((n,)), *layers])


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 3)))
    return model


def number_weights(model):
    """Gives all weights different values."""
    for i, variable in enumerate(model.weights):
        variable.assign(100 * i + np.arange(np.prod(variable.shape)).reshape(variable.shape))
    return model


def map_layers(layers, model, **options):
    """Maps the weights of layers, each (name, array, ...), as those of a file of Keras 2."""
    source = [
        LayerWeights(name, None, [NamedArray(str(i), np.asarray(a)) for i, a in enumerate(arrays)])
        for name, *arrays in layers
    ]
    source = KerasWeights("keras2 weights", source)
    return match_weights(source, model, make_keys(model), "x.h5", **options)


@pytest.mark.parametrize(
    ("make", "writer"),
    [
        *product([sample_model, convolutional, two_directions, embedded], WRITERS),
        *product([subclassed], ["weights", "archive"]),
    ],
)
def test_a_file_of_the_same_architecture_fills_every_variable(make, writer, tmp_path):
    original, model = number_weights(make()), make()
    mapping = map_file(write_model(original, tmp_path, writer), model)
    assert_mapped(mapping, model.weights, model, original)
    assert [entry.variable for entry in mapping.report] == list(mapping.arrays)


def test_files_of_keras_versions_that_stored_no_names_load(tmp_path):
    original, model = number_weights(convolutional()), convolutional()
    path = write_model(original, tmp_path, "weights")
    with h5py.File(path, "a") as file:
        strip_names(file)
    assert_mapped(map_file(path, model), model.weights, model, original)


def test_made_up_names_of_another_process_do_not_shift_layers():
    bias = np.zeros(8, np.float32)
    layers = [(f"dense_{i}", np.full((8, 8), i, np.float32), bias) for i in (1, 2, 3)]
    model = denses("dense_2", "dense_3", "dense_4", n=8)
    mapping = map_layers(layers, model)
    assert [mapping.arrays[f"key_{2 * i}"][0, 0] for i in range(3)] == [1, 2, 3]
    assert {entry.matched_by for entry in mapping.report} == {"order"}


def test_the_place_in_a_keras_3_file_counts_more_than_made_up_names(tmp_path):
    original, model = number_weights(denses("dense_7", "dense_8")), denses("dense_8", "dense_7")
    mapping = map_file(write_model(original, tmp_path, "weights"), model)
    assert_mapped(mapping, model.weights, model, original)
    assert {entry.matched_by for entry in mapping.report} == {"order"}


def test_given_names_go_before_order():
    one, two = np.full((4, 4), 1.0), np.full((4, 4), 2.0)
    model = denses("eye", "ear", use_bias=False)
    mapping = map_layers([("ear", two), ("eye", one)], model)
    assert [array[0, 0] for array in mapping.arrays.values()] == [1.0, 2.0]
    rows = ["eye/0  key_0   name  (4, 4)", "ear/0  key_1   name  (4, 4)"]
    assert str(mapping.report).splitlines() == ["file   policy  by    shape", *rows]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_of_an_actor_fills_the_actor_and_reports_the_other_variables(writer, tmp_path):
    original = number_weights(mlp(8, 8, 2))
    path = write_model(original, tmp_path, writer)
    actor = mlp(8, 8, 2)
    model = ActorCritic(actor, mlp(8, 8, 1, last="value"))
    model(np.zeros((1, 4), np.float32))
    mapping = map_file(path, model)
    assert len(mapping.report.kept) == 3
    assert all(name.startswith(model.critic.name) for name in mapping.report.kept)
    assert str(mapping.report).splitlines()[-1].startswith("not in the file, and unchanged")
    assert map_file(path, model, allow_missing=True).report == mapping.report
    with pytest.raises(ModelImportError, match=r"no weights.*'.*dense.*allow_missing"):
        map_file(write_model(number_weights(mlp(8, 2)), tmp_path, writer), model)
    assert_mapped(mapping, actor.weights, model, original)


@pytest.mark.parametrize("writer", ["weights", "archive"])
def test_layers_that_normalise_inputs_are_passed_over(writer, tmp_path):
    filtered = L.Normalization()
    filtered.adapt(np.arange(8.0, dtype=np.float32).reshape(2, 4))
    original = number_weights(keras.Sequential([keras.Input((4,)), filtered, *mlp(8, 2).layers]))
    mapping = map_file(write_model(original, tmp_path, writer), mlp(8, 2))
    assert [array.shape for array in mapping.arrays.values()] == [(4, 8), (8,), (8, 2), (2,)]
    assert mapping.report.kept == ()
    model = keras.Sequential([keras.Input((4,)), L.Normalization(), *mlp(8, 2).layers])
    assert len(map_file(write_model(original, tmp_path, writer), model).arrays) >= 6


def test_two_places_that_fit_alike_are_refused():
    model = ActorCritic(mlp(4, 4, 4, last="one"), mlp(4, 4, 1, last="two"))
    model(np.zeros((1, 4), np.float32))
    layers = [("fc", np.zeros((4, 4)), np.zeros(4))]
    with pytest.raises(ModelImportError, match=r"'fc'.*\(4, 4\) \(4,\) fits more than one layer"):
        map_layers(layers, model, allow_missing=True)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_shape_that_differs_is_named_with_file_layer_and_both_shapes(writer, tmp_path):
    path = write_model(mlp(8, 3), tmp_path, writer)
    model = mlp(8, 2)
    before = [np.asarray(weight) for weight in model.weights]
    with pytest.raises(ModelImportError) as error:
        map_file(path, model)
    for part in (repr(str(path)), "'logits'", "(8, 3) (3,)", "(8, 2) (2,)", "same name"):
        assert part in str(error.value)
    assert_arrays_equal(model.weights, before)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_layer_too_many_or_too_few_is_refused(writer, tmp_path):
    path = write_model(mlp(8, 8, 2), tmp_path, writer)
    with pytest.raises(ModelImportError, match=r"layer '.*dense.*' .* shapes \(8, 8\) \(8,\)"):
        map_file(path, mlp(8, 2))
    with pytest.raises(ModelImportError, match=r"(no weights|has weights) of shapes"):
        map_file(path, mlp(8, 8, 8, 2))


def test_gamma_is_not_taken_for_beta():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, L.BatchNormalization(scale=False, name="norm")(inputs))
    arrays = [NamedArray(n, np.ones(2)) for n in ("gamma", "moving_mean", "moving_variance")]
    source = KerasWeights("keras2 weights", [LayerWeights("norm", None, arrays)])
    with pytest.raises(ModelImportError, match="'norm'"):
        match_weights(source, model, make_keys(model), "x.h5")


def test_numbers_are_cast_to_the_variable_or_refused():
    model = mlp(2, n=1)

    def arrays(kernel):
        return map_layers([("logits", kernel, np.zeros(2))], model).arrays

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
    original, model = (
        keras.Sequential([keras.Input((4,)), L.Dropout(0.5), *mlp(2).layers]) for _ in range(2)
    )
    mapping = map_file(write_model(number_weights(original), tmp_path, "weights"), model)
    assert len(model.variables) == 3
    assert len(mapping.arrays) == 2
