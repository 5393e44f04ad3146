"""Keras models in checkpoints: of listed layers, and of registered or given classes."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from helpers.factories import assert_equal, make
from helpers.keras_models import make_mlp
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
    """A layer that is not registered."""


@keras.saving.register_keras_serializable(package="tests")
def doubled(inputs):
    return 2 * inputs


ROWS = np.array([[0.1, -0.2, 0.3]], np.float32)


def make_model(*inner, n=3):
    return keras.Sequential([keras.Input((n,)), *inner, layers.Dense(2)])


def store(*inner):
    return model_to_json(make_model(*inner))


def compute_logits(policy):
    return policy.compute_actions(ROWS, explore=False)[2]["action_dist_inputs"]


def assert_rebuilt(model):
    """Asserts that a model that is stored computes the same; returns that model."""
    rebuilt = model_from_json(model_to_json(model))
    rebuilt.set_weights(model.get_weights())
    np.testing.assert_allclose(rebuilt(ROWS), model(ROWS), rtol=1e-6)
    return rebuilt


def record(module, name, config=None, **more):
    return {"module": module, "class_name": name, "config": config or {}, **more}


def with_layer(inner):
    config = store()
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
def test_names_that_are_not_on_the_list_are_refused_before_anything_is_called(inner, monkeypatch):
    config = with_layer(inner)
    monkeypatch.setattr(keras.saving, "deserialize_keras_object", pytest.fail)
    with pytest.raises(CheckpointError, match="cannot be rebuilt: it names"):
        model_from_json(config)


def test_names_of_the_list_are_those_of_their_classes_and_activations():
    classes = get_categories()["layer"].keras_classes
    public = {name: cls for (module, name), cls in classes.items() if module == "keras.layers"}
    assert all(cls is getattr(keras.layers, name) for name, cls in public.items())
    assert all(issubclass(cls, keras.Operation) for cls in classes.values())
    assert len(public) > 80
    assert classes["keras.src.models.functional", "Functional"] is type(make_mlp())
    for kind, module in (("initializer", keras.initializers), ("constraint", keras.constraints)):
        classes = get_categories()[kind].keras_classes
        assert all(cls is getattr(module, name) for (_, name), cls in classes.items())
    allowed = get_categories()["activation"].allowed_names
    names = [name for name in allowed if hasattr(keras.activations, name)]
    assert len(names) > 25
    assert all(callable(keras.activations.get(name)) for name in names)


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
    model = make_model(inner)
    model.compile("adam", "mse")
    assert not assert_rebuilt(model).compiled


def test_a_functional_model_with_operators_is_rebuilt():
    inputs = keras.Input((3,))
    x, y = layers.Dense(3)(inputs), layers.Dense(3)(inputs)
    outputs = ops.tanh(x + y) * 2.0 - ops.where(x > 0, x, y) / (1 + ops.exp(y))
    outputs = ops.concatenate([outputs[:, :2], ops.mean(x, axis=-1, keepdims=True)], axis=-1)
    assert_rebuilt(keras.Model(inputs, ops.clip(outputs + np.ones(3, "float32"), -1, 1)))


def test_layers_that_are_not_registered_or_hold_code_are_not_stored():
    code = layers.Lambda(ops.tanh)
    for layer in (Unknown(), code, layers.SpectralNormalization(layers.Dense(3))):
        assert store(layer) is None


def test_a_model_of_very_many_layers_is_refused():
    inner = [record("keras.layers", "Activation", {"activation": "relu"})] * 200
    config = with_layer(record("keras", "Sequential", {"layers": inner}))
    with pytest.raises(CheckpointError, match=r"a Sequential of 200 layers, which is more than 64"):
        model_from_json(config)


def test_a_custom_object_must_be_of_the_class_that_its_place_needs():
    config = store(Scaled())  # now as if its layer was registered in another process only
    config["config"]["layers"][1].update(class_name="Foreign", registered_name="elsewhere>Foreign")
    with pytest.raises(CheckpointError, match=r"Foreign, which is neither .*custom_objects="):
        model_from_json(config)
    with keras.saving.custom_object_scope({"Foreign": Scaled}):
        assert isinstance(model_from_json(config).layers[0], Scaled)
    for other in (keras.initializers.Zeros, dict):
        scope = keras.saving.custom_object_scope({"Foreign": other})
        with scope, pytest.raises(CheckpointError, match="must be a Keras layer"):
            model_from_json(config)


def test_objects_inside_the_config_of_a_registered_class_are_checked():
    config = store(Scaled())
    config["config"]["layers"][1]["config"]["inner"] = record("keras", "layers.Lambda", SET_FLOATX)
    with pytest.raises(CheckpointError, match=r"names keras.layers.Lambda"):
        model_from_json(config)


def test_a_policy_with_registered_layers_comes_back_by_its_checkpoint_alone(tmp_path, monkeypatch):
    model = make_model(Scaled())
    policy = make(model={"custom_model": model})
    policy.export_checkpoint(tmp_path)
    expected = compute_logits(policy)
    np.testing.assert_array_equal(compute_logits(Policy.from_checkpoint(tmp_path)), expected)
    registered = keras.saving.get_custom_objects()
    monkeypatch.delitem(registered, "tests>Scaled")  # as in another process
    with pytest.raises(CheckpointError, match=r"custom_objects=\{'Scaled': ...\}"):
        Policy.from_checkpoint(tmp_path)
    copy = Policy.from_checkpoint(tmp_path, custom_objects={"Scaled": Scaled})
    np.testing.assert_array_equal(compute_logits(copy), expected)
    whole = Policy.from_checkpoint(tmp_path, config={"model": model})
    assert whole.get_weights().keys() == policy.get_weights().keys()


def test_an_algorithm_takes_custom_objects(tmp_path, monkeypatch):
    model = make_model(Scaled(), n=4)
    config = PPOConfig().environment("CartPole-v1").training(model={"custom_model": model})
    algorithm = config.framework(inference="tf", jit_compile=False).build()
    algorithm.save(tmp_path)
    algorithm.stop()
    monkeypatch.delitem(keras.saving.get_custom_objects(), "tests>Scaled")
    with pytest.raises(CheckpointError, match=r"custom_objects=\{'Scaled': ...\}"):
        Algorithm.from_checkpoint(tmp_path)
    for values in ({"custom_objects": {"Scaled": Scaled}}, {"config": {"model": model}}):
        copy = Algorithm.from_checkpoint(tmp_path, **values)
        assert_equal(*(x.get_policy().get_weights() for x in (copy, algorithm)))
        copy.stop()


@pytest.mark.parametrize(
    ("settings", "unresolved"),
    [
        ({"type": "sgd", "momentum": 0.9}, []),
        ({"type": "Adam"}, []),
        ({"type": "tests>Scaled"}, ["tests>Scaled"]),
        ({"type": "tfpolicies>ActorCritic"}, ["tfpolicies>ActorCritic"]),
        ({"type": {"class_name": "Adam"}}, ["{'class_name': 'Adam'}"]),
        ({"weight_decay": [{"class_name": "Adam"}]}, ["[{'class_name': 'Adam'}] for an optimizer"]),
    ],
)
def test_a_file_chooses_among_the_optimizers_of_keras_and_those_registered(settings, unresolved):
    result = find_unresolved(decode_settings({"optimizer": settings}))
    assert [missing.name for missing in result.values()] == unresolved
