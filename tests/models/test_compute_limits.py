"""Limits of the work that Keras models in files ask for, checked before anything is computed."""

import copy
import dataclasses
import math
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
from gymnasium.spaces import Box
from keras import layers, ops

from helpers.checkpoints import edit_manifest
from helpers.factories import TWO, make
from tfpolicies import Algorithm, PGConfig, Policy, PolicyMap, PPOConfig, import_policy
from tfpolicies.cli import main as run_command
from tfpolicies.errors import CheckpointError, ConfigError, ModelImportError, StashError
from tfpolicies.models import work as work_module
from tfpolicies.models.keras_allowlist import get_categories
from tfpolicies.models.keras_json import model_from_json, model_to_json
from tfpolicies.models.work import TRIAL_ROWS, WORK_LIMITS, check_work

SAVES = pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # within Keras

BIG = 1 << 24


def build_model(shape, *inner):
    """Returns a functional model that calls layers, or functions of tensors, in a row."""
    x = inputs = keras.Input(shape)
    for layer in inner:
        x = layer(x)
    return keras.Model(inputs, x)


def nest_doubles(depth):
    """Returns the config of a model that calls an inner one twice, at each of so many depths."""
    inner = build_model((3,), layers.Activation("tanh"))
    config, outer = model_to_json(inner), model_to_json(build_model((3,), inner, inner))
    kinds = [layer["class_name"] for layer in outer["config"]["layers"]]
    index = kinds.index("Functional")
    for _ in range(depth):
        level = copy.deepcopy(outer)
        level["config"]["layers"][index]["config"] = config["config"]
        config = level
    return config


def measure(model):
    """Returns the work of a model, as its limits are checked against."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_module, "check_work_limits", lambda work, what: results.append(work))
        check_work([(model, None)], "The model")
    return results[0]


@pytest.fixture
def nothing_is_computed(monkeypatch):
    """Makes calls of layers on arrays an error, but not those on symbolic tensors."""
    original = keras.layers.Layer.__call__

    def call(layer, *args, **kwargs):
        tensors = keras.tree.flatten((args, kwargs))
        assert not any(isinstance(x, np.ndarray) for x in tensors)
        return original(layer, *args, **kwargs)

    monkeypatch.setattr(keras.layers.Layer, "__call__", call)


@pytest.mark.parametrize("depth", [8, 15, 17, 20, 60])
def test_inner_models_are_counted_as_often_as_they_are_called(depth, monkeypatch):
    config = nest_doubles(depth)
    monkeypatch.setattr(keras.saving, "deserialize_keras_object", pytest.fail)
    words = "calls of layers, or steps of them, but a file may ask for 256"
    with pytest.raises(CheckpointError, match=words):
        model_from_json(config)


def test_inner_models_that_are_called_a_few_times_are_accepted():
    model = model_from_json(nest_doubles(5))
    assert measure(model).calls > 2**5
    np.testing.assert_array_equal(model(np.zeros((1, 3), "float32")), np.zeros((1, 3)))


def attend(kind, **config):
    return lambda x: kind(**config)([x, x])


def attend_heads(kind, **config):
    return lambda x: kind(**config)(x, x)


def times(count, make_layer):
    return [make_layer() for _ in range(count)]


ORTHOGONAL_ROWS = keras.regularizers.OrthogonalRegularizer(mode="rows")
ORTHOGONAL_COLUMNS = keras.regularizers.OrthogonalRegularizer(mode="columns")


def convolve(kind, dims, **config):
    return getattr(layers, f"{kind}{dims}D")(**{"kernel_size": 3, **config})


HOSTILE = {
    # those of the attack
    "Activation": ("numbers", (BIG,), times(20, lambda: layers.Activation("relu"))),
    "Attention": ("numbers", (1,), [layers.RepeatVector(8192), attend(layers.Attention)]),
    "TimeDistributed": (
        "calls", (1,), [layers.RepeatVector(1000), layers.TimeDistributed(layers.Dense(1))]),
    "MaxPooling1D": (
        "num_operations", (1,),
        [layers.RepeatVector(1 << 16), layers.MaxPooling1D(1 << 16, 1, padding="same")]),
    "Dense": ("numbers", (1 << 15,), [layers.Dense(1, kernel_regularizer=ORTHOGONAL_ROWS)]),
    # their siblings
    "Dense, columns": (
        "numbers", (1,), [layers.Dense(1 << 15, kernel_regularizer=ORTHOGONAL_COLUMNS)]),
    "Dense, activity": (
        "numbers", (1,), [layers.Dense(1 << 15, activity_regularizer=ORTHOGONAL_COLUMNS)]),
    "Dense, Orthogonal": (
        "num_operations", (8192,), [layers.Dense(8192, kernel_initializer="orthogonal")]),
    "Dense, positions": (
        "num_operations", (4096,), [layers.RepeatVector(1024), layers.Dense(4096)]),
    "Attention, concat": (
        "numbers", (64,),
        [layers.RepeatVector(1024), attend(layers.Attention, score_mode="concat")]),
    "AdditiveAttention": (
        "numbers", (64,), [layers.RepeatVector(1024), attend(layers.AdditiveAttention)]),
    "MultiHeadAttention": (
        "numbers", (2,),
        [layers.RepeatVector(1024),
         attend_heads(layers.MultiHeadAttention, num_heads=64, key_dim=1)]),
    "MultiHeadAttention, axes": (
        "numbers", (2,),
        [layers.RepeatVector(1 << 14), layers.Reshape((128, 128, 2)),
         attend_heads(layers.MultiHeadAttention, num_heads=1, key_dim=1)]),
    "GroupQueryAttention": (
        "numbers", (2,),
        [layers.RepeatVector(1024), attend_heads(layers.GroupQueryAttention, head_dim=1,
         num_query_heads=64, num_key_value_heads=1)]),
    "RepeatVector": ("numbers", (16,), [layers.RepeatVector(BIG)]),
    "UpSampling1D": ("numbers", (4, 4), [layers.UpSampling1D(BIG)]),
    "UpSampling2D": ("numbers", (4, 4, 1), [layers.UpSampling2D(4096)]),
    "UpSampling3D": ("numbers", (2, 2, 2, 1), [layers.UpSampling3D(256)]),
    "ZeroPadding1D": ("numbers", (4, 2), [layers.ZeroPadding1D(BIG)]),
    "ZeroPadding2D": ("numbers", (4, 4, 1), [layers.ZeroPadding2D(4096)]),
    "ZeroPadding3D": ("numbers", (2, 2, 2, 1), [layers.ZeroPadding3D(256)]),
    "Resizing": ("numbers", (4, 4, 1), [layers.Resizing(8192, 8192)]),
    "CenterCrop": ("numbers", (4, 4, 1), [layers.CenterCrop(8192, 8192)]),
    "CategoryEncoding": (
        "numbers", (1 << 13,), [layers.CategoryEncoding(1 << 13, output_mode="multi_hot")]),
    "Embedding": ("numbers", (1 << 20,), [layers.Embedding(2, 64)]),
    "Dropout": ("numbers", (3,), [layers.Dropout(0.5, noise_shape=(1 << 14, 1 << 14))]),
    "GaussianDropout": ("numbers", (BIG,), times(20, lambda: layers.GaussianDropout(0.5))),
    "AlphaDropout": ("numbers", (3,), [layers.AlphaDropout(0.5, noise_shape=(1 << 14, 1 << 14))]),
    "LSTM": ("calls", (1,), [layers.RepeatVector(8192), layers.LSTM(1)]),
    "GRU": ("calls", (1,), [layers.RepeatVector(8192), layers.GRU(1)]),
    "SimpleRNN": ("calls", (1,), [layers.RepeatVector(8192), layers.SimpleRNN(1)]),
    "RNN": (
        "calls", (1,),
        [layers.RepeatVector(512), layers.RNN([layers.GRUCell(1) for _ in range(16)])]),
    "Bidirectional": (
        "calls", (1,), [layers.RepeatVector(4096), layers.Bidirectional(layers.GRU(1))]),
    "LSTM, wide": ("num_operations", (64,), [layers.RepeatVector(250), layers.LSTM(3000)]),
    "LSTM, Orthogonal": ("num_operations", (1, 1), [layers.LSTM(4096)]),
    "ConvLSTM1D": (
        "numbers", (8192,), [layers.RepeatVector(100), layers.Reshape((100, 8192, 1)),
         convolve("ConvLSTM", 1, filters=4)]),
    "ConvLSTM2D": (
        "num_operations", (64,), [layers.RepeatVector(240), layers.Reshape((240, 8, 8, 1)),
         convolve("ConvLSTM", 2, filters=200)]),
    "ConvLSTM3D": (
        "num_operations", (512,), [layers.RepeatVector(100), layers.Reshape((100, 8, 8, 8, 1)),
         convolve("ConvLSTM", 3, filters=64)]),
    "Conv1D": (
        "num_operations", (1 << 12, 512), times(2, lambda: convolve("Conv", 1, filters=1024))),
    "Conv1D, dilated": (
        "numbers", (64, 64), times(8, lambda: convolve(
            "Conv", 1, filters=64, dilation_rate=60000, padding="same"))),
    "Conv2D": (
        "num_operations", (128, 128, 256), times(2, lambda: convolve("Conv", 2, filters=256))),
    "Conv3D": (
        "num_operations", (32, 32, 32, 64), times(2, lambda: convolve("Conv", 3, filters=128))),
    "Conv1DTranspose": ("numbers", (1024, 8), [layers.Conv1DTranspose(8, 3, strides=1 << 14)]),
    "Conv2DTranspose": ("numbers", (16, 16, 8), [layers.Conv2DTranspose(8, 3, strides=256)]),
    "Conv3DTranspose": ("numbers", (8, 8, 8, 8), [layers.Conv3DTranspose(8, 3, strides=32)]),
    "DepthwiseConv1D": ("num_operations", (1 << 22, 2), [layers.DepthwiseConv1D(256)]),
    "DepthwiseConv2D": ("num_operations", (2048, 2048, 2), [layers.DepthwiseConv2D(16)]),
    "SeparableConv1D": ("num_operations", (1 << 20, 4), [layers.SeparableConv1D(4, 1024)]),
    "SeparableConv2D": ("num_operations", (1024, 1024, 4), [layers.SeparableConv2D(4, 32)]),
    "AveragePooling1D": ("num_operations", (1 << 20, 1), [layers.AveragePooling1D(1 << 13, 1)]),
    "AveragePooling2D": ("num_operations", (1024, 1024, 1), [layers.AveragePooling2D(64, 1)]),
    "AveragePooling3D": ("num_operations", (128, 128, 128, 1), [layers.AveragePooling3D(16, 1)]),
    "MaxPooling2D": ("num_operations", (1024, 1024, 1), [layers.MaxPooling2D(64, 1)]),
    "MaxPooling3D": ("num_operations", (128, 128, 128, 1), [layers.MaxPooling3D(16, 1)]),
    "EinsumDense": (
        "num_operations", (1 << 11, 1 << 11), [layers.EinsumDense("abc,cd->abd", (1 << 11, 2048))]),
    "Dot": ("numbers", (1 << 14, 1), [lambda x: layers.Dot(axes=2)([x, x])]),
    "Add": ("numbers", (1 << 13, 1), [lambda x: layers.Add()([x, layers.Permute((2, 1))(x)])]),
    "Add, often": ("num_operations", (BIG,), [lambda x: layers.Add()([x] * 100)]),
    "Concatenate": ("numbers", (1 << 20,), [lambda x: layers.Concatenate()([x] * 64)]),
    "op Matmul": ("numbers", (1 << 13, 1), [lambda x: ops.matmul(x, ops.transpose(x, (0, 2, 1)))]),
    "op Einsum": (
        "numbers", (1 << 12,), [lambda x: ops.einsum("ab,ac,ad->a", x, x, x)]),
    "op Add": ("numbers", (1 << 13, 1), [lambda x: x + ops.transpose(x, (0, 2, 1))]),
    "op OneHot": ("numbers", (1 << 10,), [lambda x: ops.one_hot(ops.cast(x, "int32"), 1 << 16)]),
    "op Concatenate": ("numbers", (1 << 20,), [lambda x: ops.concatenate([x] * 64)]),
    "op Stack": ("numbers", (1 << 20,), [lambda x: ops.stack([x] * 64)]),
}  # fmt: skip


@pytest.mark.parametrize(("amount", "shape", "inner"), HOSTILE.values(), ids=HOSTILE)
def test_layers_that_multiply_work_are_refused(amount, shape, inner, nothing_is_computed):
    config = without_weights(lambda: model_to_json(build_model(shape, *inner)))
    description = re.escape(work_module._DESCRIPTIONS[amount])
    with pytest.raises(CheckpointError, match=f"[0-9] {description}.* pass model_work_limit="):
        model_from_json(config)


def without_weights(call):
    """Calls a function; in a thread, where Keras forgets weights that are never drawn."""

    def scoped():
        with keras.StatelessScope(initialize_variables=False):
            return call()

    with ThreadPoolExecutor(1) as scratch:
        return scratch.submit(scoped).result()


UNBOUNDED = {
    "InputLayer", "Identity", "Flatten", "Masking", "Reshape", "Permute", "Rescaling",
    *("ActivityRegularization", "BatchNormalization", "GaussianNoise", "GroupNormalization"),
    *("LayerNormalization", "RMSNormalization", "UnitNormalization", "PReLU", "LeakyReLU", "ReLU"),
    *("ELU", "Softmax", "Average", "Maximum", "Minimum", "Multiply", "Subtract"),
    *("Cropping1D", "Cropping2D", "Cropping3D", "SpatialDropout1D", "SpatialDropout2D"),
    *("SpatialDropout3D", "GlobalAveragePooling1D", "GlobalAveragePooling2D"),
    *("GlobalAveragePooling3D", "GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D"),
    *("GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells"),
}  # fmt: skip
"""Layers with no setting that multiplies: their work follows from what they take and give."""


def test_every_layer_that_a_file_may_name_is_tried_or_has_nothing_to_multiply():
    classes = get_categories()["layer"].keras_classes
    allowed = {name for module, name in classes if module == "keras.layers"}
    tried = {name.partition(",")[0] for name in HOSTILE}
    assert allowed <= tried | UNBOUNDED
    assert not tried & UNBOUNDED


def test_work_agrees_with_counts_by_hand():
    inner = keras.Sequential([layers.Dense(2), layers.Dense(2)])
    model = build_model((10, 3), layers.TimeDistributed(inner), layers.GRU(2))
    assert measure(model).calls == 1 + (1 + 10 * 3) + (1 + 10)
    products, elements = TRIAL_ROWS * 4 * 3, 32 * TRIAL_ROWS * (4 + 3)
    sorting = 32 * 60 * TRIAL_ROWS * 3
    for activation, operations, numbers in ((None, 0, 1), ("sparsemax", sorting, 1 + 5)):
        model = build_model((4,), layers.Dense(3, activation, use_bias=False))
        expected = (2, products + elements + operations, numbers * TRIAL_ROWS * 3)
        assert measure(model) == work_module.ModelWork(*expected)
    model = build_model((5, 2), attend(layers.Attention))
    scores = TRIAL_ROWS * 5 * 5
    assert measure(model).numbers == 4 * scores + TRIAL_ROWS * 5 * 2


def honest_attention():
    def attend(x):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 32)(y, y)
        return x + layers.Dense(128)(layers.Dense(512, "gelu")(layers.LayerNormalization()(x)))

    return build_model((512, 128), *[attend] * 4)


HONEST = {
    "ResNet-50": lambda: keras.applications.ResNet50(weights=None),
    "EfficientNet-B0": lambda: keras.applications.EfficientNetB0(weights=None),
    "CNN of Nature": lambda: build_model(
        (84, 84, 4), layers.Conv2D(32, 8, 4), layers.Conv2D(64, 4, 2), layers.Conv2D(64, 3),
        layers.Flatten(), layers.Dense(512, "relu"), layers.Dense(18)),
    "attention over 512 steps": honest_attention,
    "LSTM of 1024 units, 100 steps": lambda: build_model((100, 128), layers.LSTM(1024)),
    "100 million weights": lambda: build_model(
        (5000,), *times(4, lambda: layers.Dense(5000, "relu")), layers.Dense(10)),
}  # fmt: skip


@pytest.mark.parametrize("make_model", HONEST.values(), ids=HONEST)
def test_honest_models_stay_below_the_limits(make_model):
    work = without_weights(lambda: measure(make_model()))
    work_module.check_work_limits(work, "The model")
    assert 0 < work.calls <= WORK_LIMITS.calls


LINE = Box(-1, 1, (1,), np.float32)
TWO_ROWS = np.zeros((2, 1), np.float32)
LOGITS: dict[str, Any] = {"action_space": TWO, "names": {"logits": "logits"}}


def long_model(n=1):
    logits = layers.Dense(2, name="logits")
    return build_model((n,), layers.RepeatVector(30), layers.GRU(1), logits)


def make_long_policy():
    return make(obs=LINE, model={"custom_model": long_model()})


def build_long_algorithm(config):
    config.environment("CartPole-v1").framework(inference="tf", jit_compile=False)
    return config.training(model={"custom_model": long_model(4)}).build()


@pytest.fixture
def few_calls(monkeypatch):
    """Lowers the limit of calls, so that a small model exceeds it."""
    monkeypatch.setattr(work_module, "WORK_LIMITS", dataclasses.replace(WORK_LIMITS, calls=20))


@pytest.fixture(scope="module")
def giant(tmp_path_factory):
    """A checkpoint of a policy that takes more calls than `few_calls` lets a file ask for."""
    folder = tmp_path_factory.mktemp("giant")
    make_long_policy().export_checkpoint(folder)
    return folder


def test_a_policy_is_refused_until_the_caller_allows_its_work(giant, few_calls):
    with pytest.raises(CheckpointError, match=r"3\d calls .* pass model_work_limit=2 "):
        Policy.from_checkpoint(giant)
    policy = Policy.from_checkpoint(giant, model_work_limit=2)
    assert policy.compute_actions(TWO_ROWS)[0].shape == (2,)
    assert Policy.from_checkpoint(giant, model_work_limit=math.inf).get_weights().keys()
    with pytest.raises(CheckpointError, match="model_work_limit"):
        Policy.from_checkpoint(giant)


@pytest.mark.parametrize("limit", [0, -1, math.nan, None, "2", True])
def test_a_limit_is_a_number_above_0(limit, giant):
    with pytest.raises(ConfigError, match="model_work_limit must be a number above 0"):
        Policy.from_checkpoint(giant, model_work_limit=limit)


def test_a_model_whose_sizes_are_open_is_measured_with_those_of_the_observations(tmp_path):
    def average(x):
        return layers.GlobalAveragePooling1D()(layers.Attention()([x, x]))

    model = build_model((None, 2), average, layers.Dense(2))
    policy = make(obs=Box(-1, 1, (8, 2), np.float32), model={"custom_model": model})
    policy.export_checkpoint(tmp_path)
    with edit_manifest(tmp_path / "policy.json") as manifest:
        manifest["observation_space"].update(shape=[8192, 2])
    with pytest.raises(CheckpointError, match="numbers in outputs and intermediate results"):
        Policy.from_checkpoint(tmp_path)


@SAVES
def test_a_keras_file_is_refused_until_the_caller_allows_its_work(tmp_path, few_calls):
    spaces = {"observation_space": LINE, **LOGITS}
    long_model().save(tmp_path / "long.keras")
    with pytest.raises(ModelImportError, match=r"3\d calls .* pass model_work_limit=2 "):
        import_policy(tmp_path / "long.keras", **spaces)
    policy = import_policy(tmp_path / "long.keras", model_work_limit=2, **spaces)
    assert policy.compute_actions(TWO_ROWS)[0].shape == (2,)


@SAVES
def test_a_keras_file_with_open_sizes_is_measured_when_it_acts(tmp_path):
    model = build_model((None, 1), attend(layers.Attention), layers.GlobalMaxPooling1D(),
                        layers.Dense(2, name="logits"))  # fmt: skip
    model.save(tmp_path / "open.keras")
    few, many = (Box(-1, 1, (n, 1), np.float32) for n in (8, 8192))
    policy = import_policy(tmp_path / "open.keras", observation_space=few, **LOGITS)
    assert policy.compute_actions(np.zeros((2, 8, 1), np.float32))[0].shape == (2,)
    policy = import_policy(tmp_path / "open.keras", observation_space=many, **LOGITS)
    with pytest.raises(ModelImportError, match="numbers in outputs and intermediate results"):
        policy.compute_actions(np.zeros((2, 8192, 1), np.float32))


@SAVES
def test_a_keras_file_describes_no_more_weights_than_it_holds(tmp_path):
    path = tmp_path / "small.keras"
    build_model((3,), layers.Dense(2)).save(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["config.json"] = parts["config.json"].replace(b'"units": 2', b'"units": 1000000')
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(ModelImportError, match=r"weight of shape \(3, 1000000\), but no array"):
        import_policy(path, observation_space=Box(-1, 1, (3,)), action_space=TWO)


def test_a_stash_is_refused_until_the_caller_allows_its_work(tmp_path, few_calls):
    with PolicyMap(capacity=1, path=tmp_path) as policies:
        policies["long"] = make_long_policy()
        policies.flush()
    refusal = pytest.raises(StashError, match="model_work_limit=2")
    with PolicyMap(path=tmp_path) as policies, refusal:
        policies["long"]
    with PolicyMap(path=tmp_path, model_work_limit=2) as policies:
        assert policies["long"].policy_id == "long"


def test_an_algorithm_is_refused_until_the_caller_allows_its_work(tmp_path, few_calls):
    algorithm = build_long_algorithm(PPOConfig())
    algorithm.save(tmp_path)
    algorithm.restore(tmp_path)  # keeps its model
    algorithm.stop()
    with pytest.raises(CheckpointError, match="pass model_work_limit=2"):
        Algorithm.from_checkpoint(tmp_path)
    algorithm = Algorithm.from_checkpoint(tmp_path, model_work_limit=2)
    algorithm.stop()
    assert algorithm.get_policy().get_weights()


def test_a_run_is_evaluated_once_the_caller_allows_its_work(tmp_path, few_calls, capsys):
    config = PGConfig().training(train_batch_size=20).rollouts(rollout_fragment_length=20)
    algorithm = build_long_algorithm(config)
    algorithm.learn(20, run_dir=tmp_path / "run", progress=False)
    algorithm.stop()
    evaluate = ["evaluate", str(tmp_path / "run"), "--episodes", "1"]
    assert run_command(evaluate) != 0
    assert "--model-work-limit" in capsys.readouterr().err
    assert run_command([*evaluate, "--model-work-limit", "2"]) == 0
    assert "episode" in capsys.readouterr().out
