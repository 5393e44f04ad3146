"""Models of users compute in a policy what they compute by themselves, or are refused."""

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from tfpolicies import DQNTF2Policy, PPOTF1Policy, PPOTF2Policy, import_policy
from tfpolicies.errors import ModelError

pytestmark = pytest.mark.usefixtures("kept_programs")

LINE = spaces.Box(-100.0, 100.0, (1,), np.float32)
TWELVE = np.float32([[12]])
RIGHT = [[1.0, -1.0]]  # (12 - 10) / 2, times the kernel


def normalizing(form, tmp_path=None):
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


def policy_of(model, mode="tf", cls=PPOTF2Policy):
    model = {"custom_model": model}
    if mode == "graph":
        return PPOTF1Policy(LINE, factories.TWO, {"model": model})
    more = {"hiddens": [], "dueling": False} if cls is DQNTF2Policy else {}
    return cls(
        LINE, factories.TWO, {"model": model, "inference": mode, "jit_compile": False, **more}
    )


def outputs(policy):
    extras = policy.compute_actions(TWELVE, explore=False).extras
    return extras.get("q_values", extras["action_dist_inputs"]).tolist()


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
@pytest.mark.parametrize("form", ["sequential", "functional", "file"])
@pytest.mark.parametrize("mode", ["tf", "onnx", "graph"])
def test_a_normalization_that_was_adapted_normalises(form, mode, tmp_path):
    model = normalizing(form, tmp_path)
    policy = policy_of(model, mode)
    twin = policy_of(normalizing(form, tmp_path), mode)
    weights = policy.get_weights()
    weights["layer_0/mean"] = np.float32([11.0])
    twin.set_weights(weights)
    assert (outputs(policy), outputs(twin)) == (RIGHT, [[0.5, -0.5]])
    assert np.asarray(policy.to_keras()(TWELVE)[0]).tolist() == RIGHT
    assert np.asarray(twin.to_keras()(TWELVE)[0]).tolist() == [[0.5, -0.5]]
    assert np.asarray(model(TWELVE)).tolist() == RIGHT  # the user's own, as it was


@pytest.mark.core
def test_exports_and_updates_normalise_too(tmp_path):
    policy = policy_of(normalizing("sequential"))
    policy.export_model(tmp_path, onnx=True)
    result = import_policy(tmp_path / "model.onnx").compute_actions(TWELVE, explore=False)
    assert result.extras["action_dist_inputs"].tolist() == RIGHT
    for cls in (PPOTF2Policy, DQNTF2Policy):
        policy = policy_of(normalizing("sequential"), cls=cls)
        assert outputs(policy) == RIGHT
        rows = factories.batch_for(policy, 8)
        rows["obs"] = np.full((8, 1), 12, np.float32)
        gradients, _ = policy.compute_gradients(rows)
        (kernel,) = [x for x in gradients if np.shape(x) == (1, 2)]
        rows["obs"] = np.full((8, 1), 10, np.float32)  # the mean, which is nothing to the kernel
        (none,) = [x for x in policy.compute_gradients(rows)[0] if np.shape(x) == (1, 2)]
        assert np.abs(kernel).max() > 0 == np.abs(none).max()


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


def with_attribute(form):
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
def test_an_attribute_that_copies_lack_is_found_with_its_layer(form, layer, mode):
    words = rf"outputs of the copy differ{layer}\. An attribute .* or pass a factory, model=lambda"
    with pytest.raises(ModelError, match=words):
        policy_of(with_attribute(form), mode)
    policy = policy_of(lambda space, num_outputs: with_attribute(form), mode)
    assert policy.compute_actions(TWELVE).actions.shape == (1,)


def test_what_gives_other_numbers_each_time_is_taken():
    @keras.saving.register_keras_serializable("taken")
    class Drawing(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x))

    policy = policy_of(keras.Sequential([Drawing(), keras.layers.Dense(2)]))
    assert policy.compute_actions(TWELVE).actions.shape == (1,)


@pytest.mark.core
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5", "model.h5"])
@pytest.mark.parametrize("mode", ["tf", "onnx", "graph"])
def test_an_imported_normalization_normalises(mode, file, tmp_path):
    trained = normalizing("sequential")
    (trained.save_weights if ".weights" in file else trained.save)(tmp_path / file)
    scaled, dense = keras.layers.Normalization(), keras.layers.Dense(2, use_bias=False)
    scaled.adapt(np.float32([[-1], [1]]))
    policy = policy_of(keras.Sequential([keras.Input((1,)), scaled, dense]), mode)
    assert outputs(policy) != RIGHT
    policy.import_model_from_h5(tmp_path / file)
    assert outputs(policy) == RIGHT
    assert np.asarray(policy.to_keras()(TWELVE)[0]).tolist() == RIGHT
