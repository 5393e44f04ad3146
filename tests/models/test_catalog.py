"""The catalogue's models without memory: layers, shapes, numbers of weights, fresh values."""

import re

import keras
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.build import build_model
from tfpolicies.models.catalog.initializers import NormalizedColumns, get_initializer
from tfpolicies.models.catalog.inspection import get_extra_inputs, get_state_shapes
from tfpolicies.models.preprocessing import get_encoded_shape
from tfpolicies.models.spaces import leaves, port_names
from tfpolicies.program.runtimes.onnx import convert

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
MIXED = spaces.Dict(
    camera=spaces.Box(0, 255, (10, 10, 2), np.uint8),
    kind=spaces.Discrete(4),
    pair=spaces.Tuple([VECTOR, spaces.Box(-1, 1, (2, 2), np.float32)]),
)


def image(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


def model_of(space, num_outputs=2, with_value=True, seed=0, **config):
    return build_model(leaves(space), num_outputs, config, with_value=with_value, seed=seed)


def shapes_of(model):
    """Returns the shape of each kernel by the name of its layer."""
    results = {v.path.rpartition("/")[0]: tuple(v.shape) for v in model.trainable_variables}
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    assert set(results) == {v.path.rpartition("/")[0] for v in kernels}
    return {v.path.rpartition("/")[0]: tuple(v.shape) for v in kernels}


def rows_for(space, rows, seed=0):
    """Returns encoded observations as the model of a space takes them."""
    rng = np.random.default_rng(seed)
    parts = leaves(space)
    arrays = [
        rng.normal(size=(rows, *get_encoded_shape(leaf))).astype(np.float32) for leaf in parts
    ]
    if parts[0].path:
        return dict(zip(port_names(parts, "obs"), map(tf.constant, arrays), strict=True))
    return tf.constant(arrays[0])


# -- vectors --------------------------------------------------------------------------------------


@pytest.mark.core
def test_an_mlp_has_its_hidden_layers_then_the_post_layers_then_linear_outputs():
    model = model_of(VECTOR, fcnet_hiddens=[5, 4], post_fcnet_hiddens=[6], vf_share_layers=False)
    assert shapes_of(model) == {
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


def test_a_model_for_a_space_that_is_not_nested_takes_one_tensor():
    assert model_of(VECTOR).input.name == "obs"
    assert model_of(spaces.Discrete(6)).input.shape == (None, 6)
    assert (
        model_of(spaces.Box(-1, 1, ())).count_params()
        == model_of(spaces.Box(-1, 1, (1,))).count_params()
    )


def test_without_a_value_a_model_gives_one_tensor():
    model = model_of(VECTOR, with_value=False, vf_share_layers=False, fcnet_hiddens=[4])
    assert model(rows_for(VECTOR, 5)).shape == (5, 2)
    assert set(shapes_of(model)) == {"fc_1", "fc_out"}


def test_without_a_final_linear_layer_the_last_hidden_one_is_the_output():
    model = model_of(VECTOR, 6, fcnet_hiddens=[5, 99], no_final_linear=True)
    assert shapes_of(model) == {"fc_1": (3, 5), "fc_out": (5, 6), "value_out": (5, 1)}
    assert model.get_layer("fc_out").activation.__name__ == "tanh"
    norms = np.linalg.norm(model.get_layer("fc_out").kernel.numpy(), axis=0)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)
    with pytest.raises(ModelError, match="no hidden layer"):
        model_of(VECTOR, fcnet_hiddens=[], no_final_linear=True)


@pytest.mark.parametrize("key", ["fcnet_activation", "post_fcnet_activation", "conv_activation"])
def test_an_activation_that_keras_does_not_know_is_refused(key):
    with pytest.raises(ModelError, match=rf"{key}.*nope"):
        model_of(VECTOR, **{key: "nope"})


# -- images ---------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("size", "channels", "features"),
    [(84, 4, 256), (96, 3, 256), (64, 3, 3 * 3 * 256), (42, 1, 256), (10, 4, 32)],
)
def test_images_of_known_sizes_get_convolutions_and_no_fully_connected_layers(
    size, channels, features
):
    model = model_of(image(size, size, channels), 3, fcnet_hiddens=[7])
    shapes = shapes_of(model)
    assert shapes["conv_1"][2] == channels
    assert shapes["fc_out"] == (features, 3)
    assert shapes["value_out"] == (features, 1)
    convolutions = len(shapes) - 2
    assert list(shapes) == [f"conv_{i + 1}" for i in range(convolutions)] + ["fc_out", "value_out"]


def test_the_number_of_weights_of_the_network_for_small_grids_is_what_one_counts():
    model = model_of(image(10, 10, 4), 3)
    first, second = 5 * 5 * 4 * 16 + 16, 5 * 5 * 16 * 32 + 32
    assert model.count_params() == first + second + (32 * 3 + 3) + (32 + 1)


def test_any_size_goes_with_filters_and_the_last_feature_map_is_flattened():
    filters = [[4, [2, 3], 2], [8, 3, [1, 2]]]
    model = model_of(image(6, 9, 1), conv_filters=filters, post_fcnet_hiddens=[5])
    # "same" with stride 2: 6x9 -> 3x5; "valid" 3x3 with strides 1 and 2: -> 1x2.
    assert shapes_of(model) == {
        "conv_1": (2, 3, 1, 4),
        "conv_2": (3, 3, 4, 8),
        "fc_1": (1 * 2 * 8, 5),
        "fc_out": (5, 2),
        "value_out": (5, 1),
    }
    assert model.get_layer("fc_1").activation.__name__ == "relu"
    assert model(rows_for(image(6, 9, 1), 2))[0].shape == (2, 2)


def test_a_separate_value_has_convolutions_of_its_own():
    model = model_of(image(10, 10, 1), vf_share_layers=False)
    expected = ["conv_1", "conv_2", "conv_value_1", "conv_value_2", "fc_out", "value_out"]
    assert sorted(shapes_of(model)) == expected


@pytest.mark.core
def test_an_unknown_size_is_refused_with_filters_that_work():
    space = image(32, 32, 3)
    with pytest.raises(ModelError, match=r"'obs'.*\(32, 32, 3\).*\[\] flattens") as caught:
        model_of(space)
    proposed = [[16, 4, 2], [32, 4, 2], [256, 8, 1]]
    assert str(proposed) in str(caught.value)
    assert shapes_of(model_of(space, conv_filters=proposed))["fc_out"] == (256, 2)
    with pytest.raises(ModelError, match=r"\(3, 32, 32\).*\[256, 8, 1\]"):
        model_of(image(3, 32, 32))


def floats(*shape):
    return spaces.Box(0, 1, shape, np.float32)


def has_convolutions(space, **config):
    return any(name.startswith("conv") for name in shapes_of(model_of(space, **config)))


@pytest.mark.core
@pytest.mark.parametrize(
    ("space", "config", "expected"),
    [
        (image(84, 84, 4), {}, True),
        (floats(84, 84, 4), {}, True),
        (spaces.Box(-1, 1, (10, 10, 4), np.int64), {}, True),
        (floats(84, 84, 4), {"conv_filters": []}, False),
        (spaces.Box(0, 1, (3, 3, 2), np.int8), {}, False),
        (spaces.Box(0, 1, (6, 7, 2), np.int8), {}, False),
        (image(9, 64, 3), {}, False),
        (floats(20, 20, 3), {}, False),
        (floats(1, 28, 28), {}, False),
        (spaces.Box(0, 1, (6, 7, 2), np.int8), {"conv_filters": [[4, [6, 7], 1]]}, True),
    ],
)
def test_a_box_of_rank_3_is_an_image_by_its_filters_or_by_its_size(space, config, expected):
    assert has_convolutions(space, **config) is expected


@pytest.mark.core
@pytest.mark.parametrize("separate", [False, True])
def test_an_image_with_its_channels_first_gives_what_it_gives_with_them_last(separate):
    first = model_of(image(3, 64, 64), vf_share_layers=not separate)
    last = model_of(image(64, 64, 3), vf_share_layers=not separate)
    assert shapes_of(first) == shapes_of(last)
    assert sum(layer.name == "channels_last" for layer in first.layers) == 1
    last.set_weights(first.get_weights())
    x = np.random.default_rng(0).random((2, 64, 64, 3), np.float32)
    for one, other in zip(first(x.transpose(0, 3, 1, 2)), last(x), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.core
def test_where_the_channels_are_can_be_said():
    filters = [[4, 12, 1]]
    assert shapes_of(model_of(image(12, 12, 12), conv_filters=filters))["conv_1"] == (12, 12, 12, 4)
    named = {"conv_filters": filters, "channels_first": True}
    assert shapes_of(model_of(image(5, 12, 12), **named))["conv_1"] == (12, 12, 5, 4)
    named = {"conv_filters": [[4, [3, 12], 1]], "channels_first": False}
    assert shapes_of(model_of(image(3, 12, 12), **named))["conv_1"] == (3, 12, 12, 4)


def test_a_board_that_is_flattened_is_told_once_and_not_if_that_was_asked_for(caplog):
    caplog.set_level("WARNING", "tfpolicies")
    board = spaces.Box(0, 1, (5, 8, 2), np.int8)
    model_of(board, conv_filters=[])
    assert not caplog.records
    model_of(board)
    model_of(board)
    (record,) = caplog.records
    assert "'obs' of shape (5, 8, 2) is flattened" in record.getMessage()
    assert "'conv_filters': [[256, [5, 8], 1]]" in record.getMessage()


@pytest.mark.parametrize(
    ("shape", "dtype", "advice"),
    [
        ((4, 16, 16, 1), np.uint8, r"stay from 0 to 255: .* Concatenate .* as the connector Fr"),
        ((2, 12, 12, 3), np.float32, r"Concatenate stacked frames along the channels"),
        ((12, 14), np.uint8, r"Add an axis of channels, as the connector FrameStack\(1\) does"),
        ((6, 16, 1), np.uint8, r"For convolutions set model=\{'conv_filters': \[\[16, 4, 2\]"),
    ],
)
def test_an_image_that_no_convolution_takes_is_named_in_one_line(shape, dtype, advice, caplog):
    caplog.set_level("WARNING", "tfpolicies")
    box = spaces.Box(0, 255, shape, dtype)
    model_of(box, conv_filters=[])
    assert not caplog.records
    for _ in range(2):
        assert shapes_of(model_of(box, fcnet_hiddens=[5]))["fc_1"] == (np.prod(shape), 5)
    (record,) = caplog.records
    assert record.message.startswith(f"'obs' of shape {shape} is flattened")
    assert re.search(advice, record.message)


def test_filters_that_no_part_of_the_observation_takes_are_named(caplog):
    caplog.set_level("WARNING", "tfpolicies")
    model_of(spaces.Box(0, 255, (3, 11, 11, 1), np.uint8), conv_filters=[[4, 3, 1]])
    (record,) = caplog.records
    assert "'obs' of shape (3, 11, 11, 1) is flattened" in record.message


def test_boxes_that_are_no_images_get_no_line(caplog):
    caplog.set_level("INFO", "tfpolicies")
    for shape, dtype in (((4, 4), np.float32), ((84, 84), np.float32), ((4, 4), np.uint8)):
        model_of(spaces.Box(0, 1, shape, dtype))
    model_of(spaces.Box(0, 255, (128,), np.uint8))
    model_of(spaces.MultiBinary((2, 3, 4)))
    assert not caplog.records


def test_a_last_kernel_larger_than_what_is_left_is_refused():
    with pytest.raises(ModelError, match=r"last kernel \(11, 11\).*'obs'.*10x10 pixels"):
        model_of(image(20, 20, 1), conv_filters=[[4, 4, 2], [8, 11, 1]])


def test_images_can_be_flattened_and_matrices_always_are():
    model = model_of(image(4, 4, 3), conv_filters=[], fcnet_hiddens=[5])
    assert shapes_of(model)["fc_1"] == (48, 5)
    matrix = spaces.Box(0, 1, (84, 84), np.float32)
    assert shapes_of(model_of(matrix, fcnet_hiddens=[5]))["fc_1"] == (84 * 84, 5)


# -- nested observations --------------------------------------------------------------------------


@pytest.mark.core
def test_each_part_of_a_nested_observation_is_encoded_by_itself_and_joined_in_order():
    model = model_of(MIXED, fcnet_hiddens=[5], vf_share_layers=False)
    assert set(model.input) == {"obs_camera", "obs_kind", "obs_pair_0", "obs_pair_1"}
    shapes = shapes_of(model)
    assert shapes["obs_camera_conv_1"] == (5, 5, 2, 16)
    assert shapes["obs_camera_conv_value_2"] == (5, 5, 16, 32)
    assert shapes["fc_1"] == shapes["fc_value_1"] == (32 + 4 + 3 + 4, 5)
    logits, values = model(rows_for(MIXED, 3))
    assert (logits.shape, values.shape) == ((3, 2), (3, 1))


def test_an_image_under_a_key_is_a_pure_image_but_two_images_are_joined():
    one = model_of(spaces.Dict(camera=image(10, 10, 1)), fcnet_hiddens=[5])
    assert set(one.input) == {"obs_camera"}
    assert "fc_1" not in shapes_of(one)
    two = spaces.Tuple([image(10, 10, 1), image(10, 10, 2)])
    assert shapes_of(model_of(two, fcnet_hiddens=[5]))["fc_1"] == (64, 5)


def test_each_input_has_a_name_of_its_own_whatever_the_keys():
    space = spaces.Dict({"a_b": VECTOR, "a": spaces.Dict(b=VECTOR), "left/arm": VECTOR})
    model = model_of(space)
    assert set(model.input) == {"obs_a_b", "obs_a_b_1", "obs_left_arm"}
    assert port_names(leaves(spaces.Dict({"é": VECTOR})), "obs") == ["obs__"]


# -- weights --------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_models_and_other_seeds_others():
    first, same, other = (model_of(MIXED, seed=s, fcnet_hiddens=[4]) for s in (1, 1, 2))
    for a, b, c in zip(*(m.get_weights() for m in (first, same, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.ndim == 1 or not np.array_equal(a, c)


def test_orthogonal_convolutions_have_the_gain_of_hidden_layers():
    model = model_of(image(10, 10, 1), ortho_init=True)
    kernel = model.get_layer("conv_1").kernel.numpy().reshape(-1, 16)
    np.testing.assert_allclose(kernel.T @ kernel, 2 * np.eye(16), atol=1e-5)


@pytest.mark.core
def test_initializers_are_found_for_every_variable_of_recurrent_layers():
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


def test_initializers_of_other_layers_are_found_too_and_none_where_there_is_none():
    separable = keras.layers.SeparableConv1D(2, 1, pointwise_initializer="ones")
    separable.build((None, 4, 3))
    pointwise = get_initializer(separable, separable.pointwise_kernel)
    assert type(keras.initializers.get(pointwise)).__name__ == "Ones"

    class Own(keras.layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.scale = self.add_weight(name="scale", shape=(units,))

    layer = Own(2)
    assert get_initializer(layer, layer.scale) is None


# -- other ways to run ----------------------------------------------------------------------------


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
    model = model_of(space, **config)
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(size=w.shape) * 0.3 for w in model.get_weights()])
    parts = leaves(space)
    names = port_names(parts, "obs")
    is_nested = bool(parts[0].path)

    def run(*obs):
        return model(dict(zip(names, obs, strict=True)) if is_nested else obs[0], training=False)

    signature = [
        tf.TensorSpec([None, *get_encoded_shape(leaf)], name=name)
        for leaf, name in zip(parts, names, strict=True)
    ]
    onnx = convert(tf.function(run, autograph=False), signature, ["logits", "values"])
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    for rows in (1, 5):
        inputs = rows_for(space, rows)
        fed = inputs if is_nested else {"obs": inputs}
        result = session.run(None, {name: np.asarray(x) for name, x in fed.items()})
        for ours, theirs in zip(model(inputs), result, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


# -- what a model says about itself ---------------------------------------------------------------


class Subclassed(keras.Model):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.core
def test_a_model_without_memory_has_no_states_and_no_extra_inputs():
    sequential = keras.Sequential([keras.layers.Dense(2)])  # not built: has no inputs yet
    for model in (model_of(VECTOR), model_of(MIXED), sequential, Subclassed()):
        assert get_state_shapes(model) == []
        assert get_extra_inputs(model) == ()


def own_functional(states=("state_in_0", "state_in_1"), as_dict=True, width=5):
    inputs = [keras.Input((None, 3), name="obs"), keras.Input((None, 2), name="prev_actions_arm")]
    inputs += [keras.Input((None, 1), name="prev_rewards")]
    inputs += [keras.Input((width,), name=name) for name in states]
    inputs += [keras.Input((), name="seq_lens", dtype="int32")]
    named = {x.name: x for x in inputs}
    outputs = keras.layers.Dense(2)(named["obs"])
    return keras.Model(named if as_dict else inputs, outputs)


@pytest.mark.core
@pytest.mark.parametrize("as_dict", [True, False])
def test_a_functional_model_tells_its_memory_by_the_names_of_its_inputs(as_dict):
    model = own_functional(as_dict=as_dict)
    assert get_state_shapes(model) == [(5,), (5,)]
    assert sorted(get_extra_inputs(model)) == ["prev_actions_arm", "prev_rewards", "seq_lens"]


def test_a_subclassed_model_tells_its_memory_by_attributes():
    model = Subclassed(state_shapes=[(4,), (2, 3)], extra_inputs=["prev_rewards"])
    assert get_state_shapes(model) == [(4,), (2, 3)]
    assert get_extra_inputs(model) == ("prev_rewards", "seq_lens")
    assert get_extra_inputs(Subclassed(extra_inputs=["prev_actions"])) == ("prev_actions",)


@pytest.mark.parametrize(
    ("make_model", "words"),
    [
        (lambda: own_functional(states=("state_in_0", "state_in_2")), "named state_in_0, state_i"),
        (lambda: own_functional(width=None), "state_in_0 .* known shape"),
        (lambda: Subclassed(state_shapes=[(None, 3)]), "state_in_0 .* known shape"),
        (lambda: Subclassed(state_shapes=7), r"state_shapes .* list of shapes .* got 7"),
    ],
)
def test_a_memory_that_cannot_be_understood_is_refused(make_model, words):
    with pytest.raises(ModelError, match=words):
        get_state_shapes(make_model())


def test_an_extra_input_that_does_not_exist_is_refused():
    with pytest.raises(ModelError, match=r"may name prev_actions, prev_rewards.*got 'rewards'"):
        get_extra_inputs(Subclassed(extra_inputs=["rewards"]))


def test_a_kernel_of_one_row_stays_finite_where_a_draw_is_zero():
    class Draws:
        """A generator whose draws are given."""

        def standard_normal(self, shape, dtype):
            return np.array([[0.0, -2.0, 0.5]], dtype).reshape(shape)

    assert NormalizedColumns(0.25).draw((1, 3), Draws()).tolist() == [[0.0, -0.25, 0.25]]
