"""The catalogue's models without memory: layers, shapes, numbers of weights, fresh values."""

import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.arrays import assert_arrays_close, assert_arrays_equal
from helpers.keras_models import vary_weights
from helpers.onnx_runtime import load_in_onnx_runtime
from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.build import build_model
from tfpolicies.models.catalog.initializers import NormalizedColumns, get_initializer
from tfpolicies.models.catalog.inspection import get_extra_inputs, get_state_shapes
from tfpolicies.models.preprocessing import get_encoded_shape
from tfpolicies.models.spaces import leaves, port_names

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
MIXED = spaces.Dict(
    camera=spaces.Box(0, 255, (10, 10, 2), np.uint8),
    kind=spaces.Discrete(4),
    pair=spaces.Tuple([VECTOR, spaces.Box(-1, 1, (2, 2), np.float32)]),
)


def image(*shape, dtype=np.uint8):
    return spaces.Box(0, 255, shape, dtype)


def board(*shape):
    return spaces.Box(0, 1, shape, np.int8)


def make(space, num_outputs=2, with_value=True, seed=0, **config):
    return build_model(leaves(space), num_outputs, config, with_value=with_value, seed=seed)


def get_shapes(model):
    """Returns the shape of each kernel by the name of its layer."""
    results = {v.path.rpartition("/")[0]: tuple(v.shape) for v in model.trainable_variables}
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    assert set(results) == {v.path.rpartition("/")[0] for v in kernels}
    return {v.path.rpartition("/")[0]: tuple(v.shape) for v in kernels}


def rows_for(space, rows):
    """Returns encoded observations as the model of a space takes them."""
    rng = np.random.default_rng(0)
    parts = leaves(space)
    arrays = [
        rng.normal(size=(rows, *get_encoded_shape(leaf))).astype(np.float32) for leaf in parts
    ]
    if parts[0].path:
        return dict(zip(port_names(parts, "obs"), map(tf.constant, arrays), strict=True))
    return tf.constant(arrays[0])


@pytest.mark.core
def test_an_mlp_has_its_hidden_layers_then_the_post_layers_then_linear_outputs():
    model = make(VECTOR, fcnet_hiddens=[5, 4], post_fcnet_hiddens=[6], vf_share_layers=False)
    assert get_shapes(model) == {
        "fc_1": (3, 5),
        "fc_2": (5, 4),
        "fc_3": (4, 6),
        "fc_out": (6, 2),
        "fc_value_1": (3, 5),
        "fc_value_2": (5, 4),
        "fc_value_3": (4, 6),
        "value_out": (6, 1),
    }
    activations = [model.get_layer(f"fc_{i}").activation.__name__ for i in (1, 2, 3)]
    assert activations == ["tanh", "tanh", "relu"]
    assert model.get_layer("fc_out").activation.__name__ == "linear"
    logits, values = model(rows_for(VECTOR, 7))
    assert (logits.shape, values.shape) == ((7, 2), (7, 1))


def test_a_model_takes_one_tensor_of_a_plain_space_and_gives_one_without_a_value():
    assert make(VECTOR).input.name == "obs"
    assert make(spaces.Discrete(6)).input.shape == (None, 6)
    scalar, line = (make(spaces.Box(-1, 1, shape)) for shape in ((), (1,)))
    assert scalar.count_params() == line.count_params()
    model = make(VECTOR, with_value=False, vf_share_layers=False, fcnet_hiddens=[4])
    assert model(rows_for(VECTOR, 5)).shape == (5, 2)
    assert set(get_shapes(model)) == {"fc_1", "fc_out"}


def test_without_a_final_linear_layer_the_last_hidden_one_is_the_output():
    model = make(VECTOR, 6, fcnet_hiddens=[5, 99], no_final_linear=True)
    assert get_shapes(model) == {"fc_1": (3, 5), "fc_out": (5, 6), "value_out": (5, 1)}
    assert model.get_layer("fc_out").activation.__name__ == "tanh"
    norms = np.linalg.norm(model.get_layer("fc_out").kernel.numpy(), axis=0)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)
    with pytest.raises(ModelError, match="no hidden layer"):
        make(VECTOR, fcnet_hiddens=[], no_final_linear=True)


@pytest.mark.parametrize("key", ["fcnet_activation", "post_fcnet_activation", "conv_activation"])
def test_an_activation_that_keras_does_not_know_is_refused(key):
    with pytest.raises(ModelError, match=rf"{key}.*nope"):
        make(VECTOR, **{key: "nope"})


@pytest.mark.core
@pytest.mark.parametrize(
    ("size", "channels", "features"),
    [(84, 4, 256), (96, 3, 256), (64, 3, 3 * 3 * 256), (42, 1, 256), (10, 4, 32)],
)
def test_images_of_known_sizes_get_convolutions_and_no_fully_connected_layers(
    size, channels, features
):
    model = make(image(size, size, channels), 3, fcnet_hiddens=[7])
    shapes = get_shapes(model)
    assert shapes["conv_1"][2] == channels
    assert shapes["fc_out"] == (features, 3)
    assert shapes["value_out"] == (features, 1)
    convolutions = len(shapes) - 2
    assert list(shapes) == [f"conv_{i + 1}" for i in range(convolutions)] + ["fc_out", "value_out"]
    if size == 10:
        first, second = 5 * 5 * 4 * 16 + 16, 5 * 5 * 16 * 32 + 32
        assert model.count_params() == first + second + (32 * 3 + 3) + (32 + 1)


def test_filters_fit_any_size_and_the_last_feature_map_is_flattened():
    filters = [[4, [2, 3], 2], [8, 3, [1, 2]]]
    model = make(image(6, 9, 1), conv_filters=filters, post_fcnet_hiddens=[5])
    # "same" with stride 2: 6x9 -> 3x5; "valid" 3x3 with strides 1 and 2: -> 1x2.
    assert get_shapes(model) == {
        "conv_1": (2, 3, 1, 4),
        "conv_2": (3, 3, 4, 8),
        "fc_1": (1 * 2 * 8, 5),
        "fc_out": (5, 2),
        "value_out": (5, 1),
    }
    assert model.get_layer("fc_1").activation.__name__ == "relu"
    assert model(rows_for(image(6, 9, 1), 2))[0].shape == (2, 2)


@pytest.mark.core
def test_unknown_sizes_and_large_kernels_are_refused_with_filters_that_work():
    space = image(32, 32, 3)
    with pytest.raises(ModelError, match=r"'obs'.*\(32, 32, 3\).*\[\] flattens") as error:
        make(space)
    proposed = [[16, 4, 2], [32, 4, 2], [256, 8, 1]]
    assert str(proposed) in str(error.value)
    assert get_shapes(make(space, conv_filters=proposed))["fc_out"] == (256, 2)
    with pytest.raises(ModelError, match=r"\(3, 32, 32\).*\[256, 8, 1\]"):
        make(image(3, 32, 32))
    with pytest.raises(ModelError, match=r"last kernel \(11, 11\).*'obs'.*10x10 pixels"):
        make(image(20, 20, 1), conv_filters=[[4, 4, 2], [8, 11, 1]])


def floats(*shape):
    return spaces.Box(0, 1, shape, np.float32)


@pytest.mark.core
@pytest.mark.parametrize(
    ("space", "config", "expected"),
    [
        (image(84, 84, 4), {}, True),
        (floats(84, 84, 4), {}, True),
        (spaces.Box(-1, 1, (10, 10, 4), np.int64), {}, True),
        (floats(84, 84, 4), {"conv_filters": []}, False),
        (image(4, 4, 3), {"conv_filters": []}, False),
        (board(3, 3, 2), {}, False),
        (board(6, 7, 2), {}, False),
        (board(6, 7, 2), {"conv_filters": [[4, [6, 7], 1]]}, True),
        (image(9, 64, 3), {}, False),
        (floats(20, 20, 3), {}, False),
        (floats(1, 28, 28), {}, False),
        (floats(84, 84), {}, False),
    ],
)
def test_a_box_of_rank_3_is_an_image_by_its_filters_or_by_its_size(space, config, expected):
    shapes = get_shapes(make(space, fcnet_hiddens=[5], **config))
    assert any(name.startswith("conv") for name in shapes) is expected
    assert expected or shapes["fc_1"] == (np.prod(space.shape), 5)


@pytest.mark.core
@pytest.mark.parametrize("separate", [False, True])
def test_an_image_with_its_channels_first_gives_what_it_gives_with_them_last(separate):
    first = make(image(3, 64, 64), vf_share_layers=not separate)
    last = make(image(64, 64, 3), vf_share_layers=not separate)
    assert get_shapes(first) == get_shapes(last)
    assert separate == ("conv_value_1" in get_shapes(last))
    assert sum(layer.name == "channels_last" for layer in first.layers) == 1
    last.set_weights(first.get_weights())
    x = np.random.default_rng(0).random((2, 64, 64, 3), np.float32)
    assert_arrays_equal(first(x.transpose(0, 3, 1, 2)), last(x))


@pytest.mark.core
@pytest.mark.parametrize(
    ("shape", "kernel", "config", "expected"),
    [
        ((12, 12, 12), 12, {}, (12, 12, 12, 4)),
        ((5, 12, 12), 12, {"channels_first": True}, (12, 12, 5, 4)),
        ((3, 12, 12), [3, 12], {"channels_first": False}, (3, 12, 12, 4)),
    ],
)
def test_the_place_of_the_channels_is_a_setting(shape, kernel, config, expected):
    model = make(image(*shape), conv_filters=[[4, kernel, 1]], **config)
    assert get_shapes(model)["conv_1"] == expected


@pytest.mark.parametrize(
    ("shape", "dtype", "advice"),
    [
        ((5, 8, 2), np.int8, r"'conv_filters': \[\[256, \[5, 8\], 1\]\]"),
        ((4, 16, 16, 1), np.uint8, r"stay from 0 to 255: .* Concatenate .* as the connector Fr"),
        ((2, 12, 12, 3), np.float32, r"Concatenate stacked frames along the channels"),
        ((12, 14), np.uint8, r"Add an axis of channels, as the connector FrameStack\(1\) does"),
        ((6, 16, 1), np.uint8, r"For convolutions set model=\{'conv_filters': \[\[16, 4, 2\]"),
    ],
)
def test_a_board_or_an_image_that_is_flattened_is_logged_once(shape, dtype, advice, caplog):
    caplog.set_level("WARNING", "tfpolicies")
    box = spaces.Box(0, 1, shape, dtype) if dtype == np.int8 else image(*shape, dtype=dtype)
    make(box, conv_filters=[])
    assert not caplog.records
    for _ in range(2):
        assert get_shapes(make(box, fcnet_hiddens=[5]))["fc_1"] == (np.prod(shape), 5)
    (record,) = caplog.records
    assert record.message.startswith(f"'obs' of shape {shape} is flattened")
    assert re.search(advice, record.message)


def test_other_boxes_are_not_logged_but_filters_without_an_image_are(caplog):
    caplog.set_level("INFO", "tfpolicies")
    for shape, dtype in (((4, 4), np.float32), ((84, 84), np.float32), ((4, 4), np.uint8)):
        make(spaces.Box(0, 1, shape, dtype))
    make(image(128))
    make(spaces.MultiBinary((2, 3, 4)))
    assert not caplog.records
    make(image(3, 11, 11, 1), conv_filters=[[4, 3, 1]])
    (record,) = caplog.records
    assert "'obs' of shape (3, 11, 11, 1) is flattened" in record.message


@pytest.mark.core
def test_the_parts_of_a_nested_observation_are_encoded_separately_and_joined_in_order():
    model = make(MIXED, fcnet_hiddens=[5], vf_share_layers=False)
    assert set(model.input) == {"obs_camera", "obs_kind", "obs_pair_0", "obs_pair_1"}
    shapes = get_shapes(model)
    assert shapes["obs_camera_conv_1"] == (5, 5, 2, 16)
    assert shapes["obs_camera_conv_value_2"] == (5, 5, 16, 32)
    assert shapes["fc_1"] == shapes["fc_value_1"] == (32 + 4 + 3 + 4, 5)
    logits, values = model(rows_for(MIXED, 3))
    assert (logits.shape, values.shape) == ((3, 2), (3, 1))


def test_an_image_under_a_key_is_a_pure_image_two_are_joined_and_names_differ():
    one = make(spaces.Dict(camera=image(10, 10, 1)), fcnet_hiddens=[5])
    assert set(one.input) == {"obs_camera"}
    assert "fc_1" not in get_shapes(one)
    two = spaces.Tuple([image(10, 10, 1), image(10, 10, 2)])
    assert get_shapes(make(two, fcnet_hiddens=[5]))["fc_1"] == (64, 5)
    space = spaces.Dict({"a_b": VECTOR, "a": spaces.Dict(b=VECTOR), "left/arm": VECTOR})
    model = make(space)
    assert set(model.input) == {"obs_a_b", "obs_a_b_1", "obs_left_arm"}
    assert port_names(leaves(spaces.Dict({"é": VECTOR})), "obs") == ["obs__"]


def test_equal_seeds_give_equal_models_and_other_seeds_others():
    first, same, other = (make(MIXED, seed=s, fcnet_hiddens=[4]) for s in (1, 1, 2))
    for a, b, c in zip(*(m.get_weights() for m in (first, same, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.ndim == 1 or not np.array_equal(a, c)


def test_orthogonal_convolutions_have_the_gain_of_hidden_layers():
    model = make(image(10, 10, 1), ortho_init=True)
    kernel = model.get_layer("conv_1").kernel.numpy().reshape(-1, 16)
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(16), atol=1e-5)


@pytest.mark.core
def test_initializers_are_found_for_every_variable_of_layers_that_have_one():
    lstm = keras.layers.LSTM(2)
    lstm.build((None, None, 3))
    cell = lstm.cell
    results = {v.name: get_initializer(cell, v) for v in cell.trainable_variables}
    assert type(results["kernel"]).__name__ == "GlorotUniform"
    assert type(results["recurrent_kernel"]).__name__ in ("Orthogonal", "OrthogonalInitializer")
    bias = np.asarray(results["bias"](cell.bias.shape, dtype="float32"))
    np.testing.assert_array_equal(bias, [0, 0, 1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(bias, cell.bias.numpy())
    gru = keras.layers.GRU(2).cell
    gru.build((None, 3))
    assert gru.bias.shape == (2, 6)
    drawn = keras.initializers.get(get_initializer(gru, gru.bias))(gru.bias.shape)
    assert not np.asarray(drawn).any()
    separable = keras.layers.SeparableConv1D(2, 1, pointwise_initializer="ones")
    separable.build((None, 4, 3))
    pointwise = get_initializer(separable, separable.pointwise_kernel)
    assert type(keras.initializers.get(pointwise)).__name__ == "Ones"
    layer = keras.layers.Layer()
    assert get_initializer(layer, layer.add_weight(name="scale", shape=(2,))) is None


@pytest.mark.parametrize(
    ("space", "config"),
    [
        (VECTOR, {"fcnet_hiddens": [6]}),
        (image(10, 10, 2), {}),
        (MIXED, {"fcnet_hiddens": [6], "vf_share_layers": False}),
    ],
    ids=["mlp", "cnn", "nested"],
)
def test_models_compute_the_same_in_onnx_runtime(space, config):
    model = vary_weights(make(space, **config), 0.3)
    parts = leaves(space)
    names = port_names(parts, "obs")
    is_nested = bool(parts[0].path)

    def run(*obs):
        return model(dict(zip(names, obs, strict=True)) if is_nested else obs[0], training=False)

    signature = [
        tf.TensorSpec([None, *get_encoded_shape(leaf)], name=name)
        for leaf, name in zip(parts, names, strict=True)
    ]
    function = tf.function(run, autograph=False)
    run_graph = load_in_onnx_runtime(function, signature, ["logits", "values"])
    for rows in (1, 5):
        inputs = rows_for(space, rows)
        outputs = run_graph(inputs if is_nested else {"obs": inputs})
        assert_arrays_close(outputs, model(inputs))


class Subclassed(keras.Model):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.core
def test_a_model_without_memory_has_no_states_and_no_extra_inputs():
    sequential = keras.Sequential([keras.layers.Dense(2)])  # not built: has no inputs yet
    for model in (make(VECTOR), make(MIXED), sequential, Subclassed()):
        assert get_state_shapes(model) == []
        assert get_extra_inputs(model) == ()


def functional_with_memory(states=("state_in_0", "state_in_1"), as_dict=True, width=5):
    widths = {"obs": 3, "prev_actions_arm": 2, "prev_rewards": 1}
    inputs = {name: keras.Input((None, size), name=name) for name, size in widths.items()}
    inputs |= {name: keras.Input((width,), name=name) for name in states}
    inputs["seq_lens"] = keras.Input((), name="seq_lens", dtype="int32")
    outputs = keras.layers.Dense(2)(inputs["obs"])
    return keras.Model(inputs if as_dict else list(inputs.values()), outputs)


@pytest.mark.core
@pytest.mark.parametrize("as_dict", [True, False])
def test_the_memory_of_a_functional_model_follows_from_the_names_of_its_inputs(as_dict):
    model = functional_with_memory(as_dict=as_dict)
    assert get_state_shapes(model) == [(5,), (5,)]
    assert sorted(get_extra_inputs(model)) == ["prev_actions_arm", "prev_rewards", "seq_lens"]


def test_the_memory_of_a_subclassed_model_follows_from_its_attributes():
    model = Subclassed(state_shapes=[(4,), (2, 3)], extra_inputs=["prev_rewards"])
    assert get_state_shapes(model) == [(4,), (2, 3)]
    assert get_extra_inputs(model) == ("prev_rewards", "seq_lens")
    assert get_extra_inputs(Subclassed(extra_inputs=["prev_actions"])) == ("prev_actions",)
    with pytest.raises(ModelError, match=r"may name prev_actions, prev_rewards.*got 'rewards'"):
        get_extra_inputs(Subclassed(extra_inputs=["rewards"]))


@pytest.mark.parametrize(
    ("make_model", "words"),
    [
        (lambda: functional_with_memory(["state_in_0", "state_in_2"]), "named state_in_0, state_i"),
        (lambda: functional_with_memory(width=None), "state_in_0 .* known shape"),
        (lambda: Subclassed(state_shapes=[(None, 3)]), "state_in_0 .* known shape"),
        (lambda: Subclassed(state_shapes=7), r"state_shapes .* list of shapes .* got 7"),
    ],
)
def test_a_memory_without_clear_names_and_shapes_is_refused(make_model, words):
    with pytest.raises(ModelError, match=words):
        get_state_shapes(make_model())


def test_a_kernel_of_one_row_stays_finite_where_a_draw_is_zero():
    draws = SimpleNamespace(standard_normal=lambda *_: np.float32([[0.0, -2.0, 0.5]]))
    assert NormalizedColumns(0.25).draw((1, 3), draws).tolist() == [[0.0, -0.25, 0.25]]
