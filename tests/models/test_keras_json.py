"""What of Keras a checkpoint may name: layers on a list, and what the caller or process knows."""

import copy

import keras
import numpy as np
import pytest
from keras import layers, ops

from helpers.factories import make
from tfpolicies import Algorithm, Policy, PPOConfig
from tfpolicies.config.settings_allowlist import decode_settings
from tfpolicies.errors import CheckpointError
from tfpolicies.models.keras_allowlist import get_categories
from tfpolicies.models.keras_json import model_from_json, model_to_json
from tfpolicies.storage.json_values import find_unresolved

pytestmark = pytest.mark.core


@keras.saving.register_keras_serializable(package="tests")
class Scaled(keras.layers.Layer):
    """A registered layer that has an initializer, and an object of any kind, in its config."""

    def __init__(self, start="ones", inner=None, **kwargs):
        super().__init__(**kwargs)
        self.start, self.inner = keras.initializers.get(start), inner

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer=self.start, name="scale")

    def call(self, inputs):
        return inputs * self.scale

    def get_config(self):
        return {**super().get_config(), "start": keras.saving.serialize_keras_object(self.start)}


class Unknown(Scaled):
    """A layer that nobody has registered."""


@keras.saving.register_keras_serializable(package="tests")
def doubled(inputs):
    return 2 * inputs


def stored(*inner):
    return model_to_json(keras.Sequential([keras.Input((3,)), *inner, layers.Dense(2)]))


def record(module, name, config=None, **more):
    return {"module": module, "class_name": name, "config": config or {}, **more}


def with_layer(inner):
    config = copy.deepcopy(stored())
    config["config"]["layers"].insert(1, inner)
    return config


def dense(**config):
    return record("keras.layers", "Dense", {"units": 3, **config})


def function(module, name):
    return record(module, "function", name, registered_name=name)


SET_FLOATX = {"name": "x", "function": function("keras.config", "set_floatx")}


@pytest.mark.parametrize(
    "inner",
    [
        record("keras", "layers.Lambda", SET_FLOATX),
        record("keras.layers", "Lambda", SET_FLOATX),
        record("keras.src.layers.core.lambda_layer", "Lambda", SET_FLOATX),
        record("keras.layers", "TFSMLayer", {"filepath": "/tmp"}),
        record("keras.layers", "TorchModuleWrapper", {"module": "x"}),
        record("keras.layers", "StringLookup", {"vocabulary": "/etc/passwd"}),
        record("keras.layers", "SpectralNormalization", {"power_iterations": 10**9}),
        record("keras.saving", "load_model", {"filepath": "/tmp"}),
        record("keras.src.ops.core", "Map", {}),
        record("subprocess", "Popen", {"args": "true"}),
        record(None, "Dense", {"units": 3}),
        record("keras", "layers.Dense", {"units": 3}),
        record("keras.layers", "Dense", {"units": 3}, registered_name="tests>Other"),
        record("tests", "Dense", {}, registered_name="tests>doubled"),
        record("keras.layers", "TimeDistributed", {"layer": record("keras", "layers.Lambda")}),
        record("keras.layers", "RNN", {"cell": [record("keras", "layers.Lambda")]}),
        record("keras.layers", "LSTM", {"units": 2, "unroll": True}),
        dense(activation="set_floatx"),
        dense(activation="tests>Scaled"),
        dense(activation=function("keras.config", "set_floatx")),
        dense(activation=function("keras.activations", "get")),
        dense(activation=record("keras", "layers.Lambda", SET_FLOATX)),
        dense(kernel_initializer=record("keras.layers", "Dense", {"units": 3})),
        dense(kernel_initializer=record("tests", "Scaled", {}, registered_name="tests>Scaled")),
        dense(kernel_initializer="tests>Scaled"),
        dense(kernel_regularizer=record("keras.initializers", "Zeros")),
        dense(activity_regularizer="orthogonal_regularizer"),
        dense(activity_regularizer=record("keras.regularizers", "OrthogonalRegularizer")),
        dense(name=record("keras.layers", "Dense", {"units": 3})),
        dense(activation={"class_name": "__lambda__", "config": {"value": ["x"]}}),
        record("keras.layers", "Rescaling", {"scale": {"class_name": "__numpy__", "config": {
            "value": [1], "dtype": "V1000000000"}}}),
    ],
)  # fmt: skip
def test_what_is_not_on_the_list_is_refused_before_anything_is_called(inner, monkeypatch):
    def called(*_, **__):
        raise AssertionError("Keras made something of what was refused")

    config = with_layer(inner)
    monkeypatch.setattr(keras.saving, "deserialize_keras_object", called)
    with pytest.raises(CheckpointError, match="cannot be rebuilt: it names"):
        model_from_json(config)


def test_names_of_the_list_lead_to_the_classes_they_say():
    known = get_categories()["layer"].keras_classes
    public = {name: result for (module, name), result in known.items() if module == "keras.layers"}
    assert all(result is getattr(keras.layers, name) for name, result in public.items())
    assert all(issubclass(result, keras.Operation) for result in known.values())
    assert len(public) > 80
    assert known["keras.src.models.functional", "Functional"] is type(stored_model())
    for kind, module in (("initializer", keras.initializers), ("constraint", keras.constraints)):
        own = get_categories()[kind].keras_classes
        assert all(result is getattr(module, name) for (_, name), result in own.items())


def stored_model():
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(2)(inputs))


def test_every_name_of_an_activation_on_the_list_is_one():
    known = [
        name
        for name in get_categories()["activation"].allowed_names
        if hasattr(keras.activations, name)
    ]
    assert len(known) > 25
    assert all(callable(keras.activations.get(name)) for name in known)


@pytest.mark.parametrize(
    "inner",
    [
        layers.Dense(3, activation="tanh", kernel_regularizer="l2", kernel_constraint="max_norm"),
        layers.Dense(3, activation="leaky_relu", kernel_initializer="he_normal"),
        layers.Dense(3, activation=doubled),
        layers.BatchNormalization(),
        layers.Rescaling(np.array([1.0, 2.0, 3.0])),
        Scaled(start=keras.initializers.Constant(2.0)),
        keras.Sequential([layers.Reshape((1, 3)), layers.LSTM(3)]),
        keras.Sequential([layers.Reshape((1, 3)), layers.TimeDistributed(layers.Dense(3)),
                          layers.Bidirectional(layers.GRU(2)), layers.Dropout(0.1, seed=3)]),
        keras.Sequential([layers.Reshape((1, 3)),
                          layers.RNN([layers.GRUCell(2), layers.LSTMCell(3)])]),
    ],
)  # fmt: skip
def test_a_model_of_listed_and_registered_layers_is_rebuilt(inner):
    model = keras.Sequential([keras.Input((3,)), inner, layers.Dense(2)])
    model.compile("adam", "mse")
    rebuilt = model_from_json(model_to_json(model))
    rebuilt.set_weights(model.get_weights())
    rows = np.array([[0.1, -0.2, 0.3]], np.float32)
    np.testing.assert_allclose(rebuilt(rows), model(rows), rtol=1e-6)
    assert not rebuilt.compiled


def test_a_functional_model_with_operators_is_rebuilt():
    inputs = keras.Input((3,))
    x, y = layers.Dense(3)(inputs), layers.Dense(3)(inputs)
    outputs = ops.tanh(x + y) * 2.0 - ops.where(x > 0, x, y) / (1 + ops.exp(y))
    outputs = ops.concatenate([outputs[:, :2], ops.mean(x, axis=-1, keepdims=True)], axis=-1)
    model = keras.Model(inputs, ops.clip(outputs + np.ones(3, "float32"), -1, 1))
    rebuilt = model_from_json(model_to_json(model))
    rebuilt.set_weights(model.get_weights())
    rows = np.array([[0.1, -0.2, 0.3]], np.float32)
    np.testing.assert_allclose(rebuilt(rows), model(rows), rtol=1e-6)


def test_layers_that_are_not_registered_or_hold_code_are_not_stored():
    assert stored(Unknown()) is None
    assert stored(layers.Lambda(ops.tanh)) is None
    assert stored(layers.SpectralNormalization(layers.Dense(3))) is None


def test_a_model_of_very_many_layers_is_refused():
    inner = [record("keras.layers", "Activation", {"activation": "relu"})] * 200
    config = with_layer(record("keras", "Sequential", {"layers": inner}))
    with pytest.raises(CheckpointError, match=r"a Sequential of 200 layers, which is more than 64"):
        model_from_json(config)


def unregistered(config):
    """Makes a stored model look as if its layer was registered in another process only."""
    text = copy.deepcopy(config)
    text["config"]["layers"][1].update(class_name="Foreign", registered_name="elsewhere>Foreign")
    return text


def test_a_class_that_is_given_must_be_what_belongs_to_its_place():
    config = unregistered(stored(Scaled()))
    with pytest.raises(CheckpointError, match=r"Foreign, which is neither .*custom_objects="):
        model_from_json(config)
    with keras.saving.custom_object_scope({"Foreign": Scaled}):
        assert isinstance(model_from_json(config).layers[0], Scaled)
    for other in (keras.initializers.Zeros, dict):
        scope = keras.saving.custom_object_scope({"Foreign": other})
        with scope, pytest.raises(CheckpointError, match="must be a Keras layer"):
            model_from_json(config)


def test_objects_inside_the_config_of_a_registered_class_are_checked_too():
    config = stored(Scaled())
    config["config"]["layers"][1]["config"]["inner"] = record("keras", "layers.Lambda", SET_FLOATX)
    with pytest.raises(CheckpointError, match=r"names keras.layers.Lambda"):
        model_from_json(config)


def test_a_policy_with_registered_layers_comes_back_by_its_checkpoint_alone(tmp_path, monkeypatch):
    model = keras.Sequential([keras.Input((3,)), Scaled(), layers.Dense(2)])
    policy = make(model={"custom_model": model})
    policy.export_checkpoint(tmp_path)
    rows = np.array([[0.1, -0.2, 0.3]], np.float32)
    expected = policy.compute_actions(rows, explore=False)[2]["action_dist_inputs"]
    twin = Policy.from_checkpoint(tmp_path)
    actual = twin.compute_actions(rows, explore=False)[2]["action_dist_inputs"]
    np.testing.assert_array_equal(actual, expected)

    registered = keras.saving.get_custom_objects()
    monkeypatch.delitem(registered, "tests>Scaled")  # as in another process
    with pytest.raises(CheckpointError, match=r"custom_objects=\{'Scaled': ...\}"):
        Policy.from_checkpoint(tmp_path)
    again = Policy.from_checkpoint(tmp_path, custom_objects={"Scaled": Scaled})
    actual = again.compute_actions(rows, explore=False)[2]["action_dist_inputs"]
    np.testing.assert_array_equal(actual, expected)
    whole = Policy.from_checkpoint(tmp_path, config={"model": model})
    assert whole.get_weights().keys() == policy.get_weights().keys()


def test_an_algorithm_takes_custom_objects(tmp_path, monkeypatch):
    model = keras.Sequential([keras.Input((4,)), Scaled(), layers.Dense(2)])
    config = PPOConfig().environment("CartPole-v1").training(model={"custom_model": model})
    algorithm = config.framework(inference="tf", jit_compile=False).build()
    algorithm.save(tmp_path)
    algorithm.stop()
    monkeypatch.delitem(keras.saving.get_custom_objects(), "tests>Scaled")
    with pytest.raises(CheckpointError, match=r"custom_objects=\{'Scaled': ...\}"):
        Algorithm.from_checkpoint(tmp_path)
    for values in ({"custom_objects": {"Scaled": Scaled}}, {"config": {"model": model}}):
        twin = Algorithm.from_checkpoint(tmp_path, **values)
        actual, expected = (x.get_policy().get_weights() for x in (twin, algorithm))
        assert all(np.array_equal(actual[name], expected[name]) for name in expected)
        twin.stop()


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"type": "sgd", "momentum": 0.9}, []),
        ({"type": "Adam"}, []),
        ({"type": "tests>Scaled"}, ["tests>Scaled"]),
        ({"type": "tfpolicies>ActorCritic"}, ["tfpolicies>ActorCritic"]),
        ({"type": {"class_name": "Adam"}}, ["{'class_name': 'Adam'}"]),
        (
            {"weight_decay": [{"class_name": "Adam"}]},
            ["[{'class_name': 'Adam'}] for an optimizer"],
        ),
    ],
)
def test_a_file_chooses_among_the_optimizers_of_keras_and_those_registered(settings, held):
    result = find_unresolved(decode_settings({"optimizer": settings}))
    assert [missing.name for missing in result.values()] == held
