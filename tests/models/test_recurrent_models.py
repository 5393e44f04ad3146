"""The catalogue's models with memory: LSTM, GRU and attention over the last steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.arrays import assert_arrays_close, assert_arrays_equal
from helpers.factories import assert_equal
from helpers.keras_models import vary_weights
from helpers.onnx_runtime import load_in_onnx_runtime
from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.build import build_model
from tfpolicies.models.catalog.gated_transformer import GruGate
from tfpolicies.models.catalog.inspection import get_extra_inputs, get_state_shapes
from tfpolicies.models.spaces import leaves
from tfpolicies.models.weight_initializer import WeightInitializer

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (10, 10, 1), np.uint8)
NESTED = spaces.Dict(camera=IMAGE, speed=VECTOR)
ACTIONS = spaces.Dict(arm=spaces.Box(-1, 1, (2, 2), np.float32), gear=spaces.Discrete(4))

SMALL = {
    "fcnet_hiddens": [6],
    "lstm_cell_size": 4,
    "attention_dim": 5,
    "attention_num_heads": 2,
    "attention_head_dim": 3,
    "attention_memory_inference": 3,
    "attention_position_wise_mlp_dim": 7,
}
KINDS = {
    "lstm": {"use_lstm": True},
    "gru": {"use_gru": True},
    "attention": {"use_attention": True},
}
N_PREVIOUS = ("attention_use_n_prev_actions", "attention_use_n_prev_rewards")
TWO_UNITS = {"use_attention": True, "attention_num_transformer_units": 2}
T = 6
LENGTHS = np.array([6, 4, 1, 0], np.int32)


def make(kind, space=VECTOR, *, varied=True, **config):
    """Builds a small model, with weights for which every input counts."""
    settings = {**SMALL, **(KINDS[kind] if isinstance(kind, str) else kind), **config}
    model = build_model(
        leaves(space), 2, settings, with_value=True, seed=1, action_leaves=leaves(ACTIONS)
    )
    return vary_weights(model, 0.4, seed=2) if varied else model


def fresh_state(model, rows):
    return [np.zeros((rows, *shape), np.float32) for shape in get_state_shapes(model)]


def used_state(model, rows, seed=3):
    """Returns states as they are in the middle of episodes; the counts of attention are 0 to 3."""
    rng = np.random.default_rng(seed)
    states = [rng.normal(size=(rows, *s)).astype(np.float32) for s in get_state_shapes(model)]
    if get_state_shapes(model)[-1] == (1,):
        states[-1] = (np.arange(rows, dtype=np.float32) % 4)[:, None]
    return states


def sequences(model, rows, steps, seed=4):
    """Returns random sequences for all inputs of a model but its states and lengths."""
    rng = np.random.default_rng(seed)
    shapes = {name: tuple(x.shape[2:]) for name, x in model.input.items() if len(x.shape) > 2}
    return {
        name: rng.normal(size=(rows, steps, *shape)).astype(np.float32)
        for name, shape in shapes.items()
        if not name.startswith("state_in_")
    }


def run(model, inputs, states, lengths):
    fed = {**inputs, "seq_lens": lengths}
    fed |= {f"state_in_{i}": state for i, state in enumerate(states)}
    outputs = model({name: tf.convert_to_tensor(x) for name, x in fed.items()}, training=False)
    return {name: x.numpy() for name, x in outputs.items()}


def cut_to_lengths(rows):
    return [row[:length] for row, length in zip(rows, LENGTHS, strict=True)]


def get_states(outputs):
    return [outputs[f"state_out_{i}"] for i in range(len(outputs) - 2)]


def step_by_step(model, inputs, states, lengths):
    """Runs a model as acting does: one step at a time, with the state carried on."""
    results = []
    for t in range(next(iter(inputs.values())).shape[1]):
        step = {name: x[:, t : t + 1] for name, x in inputs.items()}
        results.append(run(model, step, states, (lengths > t).astype(np.int32)))
        states = get_states(results[-1])
    joined = {
        name: np.concatenate([outputs[name] for outputs in results], axis=1)
        for name in ("action_dist_inputs", "vf_preds")
    }
    return joined, states


HEADS = (4 * 2 + 2) + (4 + 1)
ENCODER = 3 * 6 + 6
EMBEDDING, BIAS, NORMS = 6 * 5 + 5, 2 * (3 + 1), 2 * (5 + 5)
UNIT = BIAS + NORMS + 3 * (5 * 6) + (6 * 5 + 5) + (5 * 7 + 7) + (7 * 5 + 5) + 2 * (6 * 5 * 5 + 5)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "state_shapes", "num_weights"),
    [
        ("lstm", [(4,), (4,)], ENCODER + 4 * (6 * 4 + 4 * 4 + 4) + HEADS),
        ("gru", [(4,)], ENCODER + 3 * (6 * 4 + 4 * 4 + 2 * 4) + HEADS),
        ("attention", [(3, 5), (1,)], ENCODER + EMBEDDING + UNIT + (5 * 2 + 2) + (5 + 1)),
    ],
)
def test_inputs_outputs_and_number_of_weights(kind, state_shapes, num_weights):
    model = make(kind)
    assert get_state_shapes(model) == state_shapes
    assert get_extra_inputs(model) == ("seq_lens",)
    states = [f"state_in_{i}" for i in range(len(state_shapes))]
    assert sorted(model.input) == ["obs", "seq_lens", *states]
    outputs = run(model, sequences(model, 2, T), fresh_state(model, 2), np.full(2, T))
    assert outputs["action_dist_inputs"].shape == (2, T, 2)
    assert outputs["vf_preds"].shape == (2, T, 1)
    assert [x.shape for x in get_states(outputs)] == [(2, *shape) for shape in state_shapes]
    assert sum(int(np.prod(w.shape)) for w in model.trainable_variables) == num_weights


def test_layers_have_the_names_that_keras_users_expect():
    names = {variable.path.split("/")[0] for variable in make("lstm").trainable_variables}
    assert names == {"fc_1", "lstm", "fc_out", "value_out"}
    assert isinstance(make("lstm").get_layer("lstm"), keras.layers.LSTM)
    assert isinstance(make("gru").get_layer("gru"), keras.layers.GRU)
    two = {variable.path.split("/")[0] for variable in make(TWO_UNITS).trainable_variables}
    assert two == {"fc_1", "embedding", "transformer_1", "transformer_2", "fc_out", "value_out"}
    assert get_state_shapes(make(TWO_UNITS)) == [(3, 5), (3, 5), (1,)]


@pytest.mark.parametrize(
    ("kind", "layer", "config"),
    [
        ("lstm", "lstm", {"lstm_use_prev_action": True, "lstm_use_prev_reward": True}),
        ("attention", "embedding", dict.fromkeys(N_PREVIOUS, 1)),
    ],
)
def test_previous_actions_and_rewards_are_inputs_that_change_the_outputs(kind, layer, config):
    model = make(kind, **config)
    names = ["prev_actions_arm", "prev_actions_gear", "prev_rewards", "seq_lens"]
    assert sorted(get_extra_inputs(model)) == names
    assert model.input["prev_actions_arm"].shape == (None, None, 2, 2)
    assert model.input["prev_actions_gear"].shape == (None, None, 4)
    assert model.get_layer(layer).weights[0].shape[0] == 6 + 4 + 4 + 1
    inputs, lengths = sequences(model, 2, T), np.full(2, T)
    before = run(model, inputs, fresh_state(model, 2), lengths)["action_dist_inputs"]
    for name in names[:3]:
        other = {**inputs, name: inputs[name] + 1}
        after = run(model, other, fresh_state(model, 2), lengths)["action_dist_inputs"]
        assert np.abs(after - before).min() > 0
    with pytest.raises(ModelError, match="action_leaves"):
        build_model(leaves(VECTOR), 2, {**KINDS[kind], **config}, with_value=False)


def test_images_and_nested_observations_are_encoded_before_the_memory():
    model = make("gru", IMAGE)
    assert model.get_layer("gru").cell.kernel.shape[0] == 32  # no fully connected layer
    model = make("lstm", NESTED)
    assert model.get_layer("fc_1").kernel.shape == (32 + 3, 6)
    inputs = sequences(model, 4, T)
    whole = run(model, inputs, fresh_state(model, 4), LENGTHS)
    steps, _ = step_by_step(model, inputs, fresh_state(model, 4), LENGTHS)
    np.testing.assert_allclose(whole["vf_preds"][0], steps["vf_preds"][0], atol=1e-5)


def test_gaussians_may_have_a_trained_deviation_after_the_memory():
    config = {**SMALL, "use_gru": True, "free_log_std": True}
    model = build_model(leaves(VECTOR), 4, config, with_value=False)
    inputs = {"obs": tf.ones((2, 3, 3)), "state_in_0": tf.zeros((2, 4))}
    outputs = model({**inputs, "seq_lens": tf.constant([3, 3])})
    assert sorted(outputs) == ["action_dist_inputs", "state_out_0"]
    assert outputs["action_dist_inputs"].shape == (2, 3, 4)
    assert not np.any(outputs["action_dist_inputs"][:, :, 2:])


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_weights_have_the_scale_and_the_biases_of_a_new_model(kind):
    model = make(kind, varied=False, lstm_cell_size=32, attention_dim=32)
    start = [variable.numpy() for variable in model.variables]
    drawn = WeightInitializer(model, [np.full_like(x, 7) for x in start]).draw(5)
    for variable, first, fresh in zip(model.variables, start, drawn, strict=True):
        if variable.name == "seed_generator_state":
            continue
        if first.std() > 0 and variable.name != "bias":  # random: other numbers of the same size
            assert not np.array_equal(first, fresh), variable.path
            np.testing.assert_allclose(fresh.std(), first.std(), rtol=0.5, err_msg=variable.path)
        else:
            np.testing.assert_array_equal(fresh, first, err_msg=variable.path)


@pytest.mark.core
@pytest.mark.parametrize("kind", [*KINDS, TWO_UNITS], ids=str)
@pytest.mark.parametrize("begin", [fresh_state, used_state])
def test_a_sequence_at_once_equals_single_steps_with_carried_state(kind, begin):
    model = make(kind)
    inputs, states = sequences(model, 4, T), begin(model, 4)
    whole = run(model, inputs, states, LENGTHS)
    steps, after = step_by_step(model, inputs, states, LENGTHS)
    for name in ("action_dist_inputs", "vf_preds"):
        assert_arrays_close(cut_to_lengths(whole[name]), cut_to_lengths(steps[name]))
    assert_arrays_close(get_states(whole), after)


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_the_length_and_later_steps_change_nothing(kind):
    model = make(kind)
    inputs, states = sequences(model, 4, T), used_state(model, 4)
    before = run(model, inputs, states, LENGTHS)
    other = inputs["obs"].copy()
    for row, length in enumerate(LENGTHS):
        other[row, length:] = 9.0
    after = run(model, {"obs": other}, states, LENGTHS)
    assert_arrays_equal(get_states(after), get_states(before))
    assert_arrays_equal(cut_to_lengths(after["vf_preds"]), cut_to_lengths(before["vf_preds"]))
    # The last sequence has no steps.
    assert_arrays_equal([x[-1] for x in get_states(before)], [x[-1] for x in states])


def test_attention_reaches_back_as_far_as_its_memory_and_keeps_its_newest_inputs():
    model = make("attention")  # 3 steps and the present one
    inputs, states = sequences(model, 1, T), fresh_state(model, 1)
    before = run(model, inputs, states, np.array([T]))["vf_preds"][0, :, 0]
    inputs["obs"][0, 1] += 1.0
    after = run(model, inputs, states, np.array([T]))["vf_preds"][0, :, 0]
    assert (before != after).tolist() == [False, True, True, True, True, False]
    zeros = fresh_state(model, 4)
    memory, count = get_states(run(model, sequences(model, 4, T), zeros, LENGTHS))
    np.testing.assert_array_equal(count[:, 0], [3, 3, 1, 0])
    assert [np.any(memory[2, i]) for i in range(3)] == [False, False, True]
    encoded = model.get_layer("fc_1")(sequences(model, 4, T)["obs"])
    embedded = model.get_layer("embedding")(encoded).numpy()
    np.testing.assert_allclose(memory[0], embedded[0, 3:6], atol=1e-6)
    np.testing.assert_allclose(memory[1], embedded[1, 1:4], atol=1e-6)


def test_memory_that_does_not_count_is_not_read():
    model = make("attention")
    memory, count = used_state(model, 4)  # counts 0, 1, 2, 3: the newest are the last slots
    inputs, lengths = sequences(model, 4, T), np.full(4, T)
    before = run(model, inputs, [memory, count], lengths)["vf_preds"]
    for row in range(4):
        memory[row, : 3 - row] = 9.0
    after = run(model, inputs, [memory, count], lengths)["vf_preds"]
    np.testing.assert_array_equal(before, after)
    memory[1, 2] = 9.0
    assert np.any(run(model, inputs, [memory, count], lengths)["vf_preds"][1] != before[1])


def test_a_gate_lets_its_input_pass_with_a_large_bias_and_follows_its_formula():
    gate = GruGate(50.0, seed=0)
    x, y = np.array([[0.5, -2.0]], np.float32), np.array([[1.0, 3.0]], np.float32)
    gate.build((None, 2))
    np.testing.assert_allclose(gate([x, y]), x, atol=1e-6)
    gate.set_weights([np.zeros((2, 6)), np.zeros((2, 4)), np.eye(2), np.zeros(2)])
    # r = z = 1/2, h = tanh(x / 2): the mean of x and h.
    np.testing.assert_allclose(gate([x, y]), (x + np.tanh(x / 2)) / 2, atol=1e-6)


def test_an_lstm_is_the_one_of_the_textbook():
    model = make("lstm")
    inputs = sequences(model, 1, 2)
    h, c = (np.zeros(4) for _ in range(2))
    x = np.tanh(inputs["obs"][0] @ model.get_layer("fc_1").kernel + model.get_layer("fc_1").bias)
    kernel, recurrent, bias = (w.numpy() for w in model.get_layer("lstm").trainable_variables)
    for step in x:
        i, f, g, o = np.split(step @ kernel + h @ recurrent + bias, 4)
        i, f, o = (1 / (1 + np.exp(-gate)) for gate in (i, f, o))
        c = f * c + i * np.tanh(g)
        h = o * np.tanh(c)
    result = get_states(run(model, inputs, fresh_state(model, 1), np.array([2])))
    np.testing.assert_allclose(result, [h[None], c[None]], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_the_sequence(kind):
    model = make(kind)
    x = tf.constant(sequences(model, 1, 3)["obs"])
    states = {f"state_in_{i}": tf.constant(s) for i, s in enumerate(used_state(model, 1))}
    states |= {"state_in_1": tf.constant([[3.0]])} if kind == "attention" else {}
    with tf.GradientTape() as tape:
        tape.watch([x, *states.values()])
        outputs = model({"obs": x, **states, "seq_lens": tf.constant([3])}, training=True)
        last = outputs["vf_preds"][0, -1, 0]
    result = tape.gradient(last, [x, *states.values(), *model.trainable_variables])
    assert np.abs(result[0]).min() > 0  # the last value depends on every step
    if kind == "attention":
        assert result[1] is None  # a memory is no way back
    else:
        assert np.abs(result[1]).min() > 0
    weights = result[1 + len(states) :]
    used = [
        v.path
        for v, g in zip(model.trainable_variables, weights, strict=True)
        if g is not None and np.any(tf.convert_to_tensor(g))
    ]
    unused = {v.path for v in model.trainable_variables} - set(used)
    assert unused == {"fc_out/kernel", "fc_out/bias"}
    assert not any(isinstance(g, tf.IndexedSlices) for g in weights)


def make_signature(model, steps=T):
    """Returns the names and specs of the inputs of a model of vectors."""
    shapes = {f"state_in_{i}": shape for i, shape in enumerate(get_state_shapes(model))}
    states = [tf.TensorSpec([None, *shape], name=name) for name, shape in shapes.items()]
    obs = tf.TensorSpec([None, steps, 3], name="obs")
    return ["obs", *shapes, "seq_lens"], [obs, *states, tf.TensorSpec([None], tf.int32, "seq_lens")]


@pytest.mark.parametrize("kind", KINDS)
def test_learning_compiled_by_xla_agrees_with_plain_learning(kind):
    model = make(kind)
    names, signature = make_signature(model)

    def gradients(*inputs):
        with tf.GradientTape() as tape:
            outputs = model(dict(zip(names, inputs, strict=True)), training=True)
            loss = tf.reduce_sum(outputs["action_dist_inputs"] ** 2)
            loss += tf.reduce_sum(outputs["vf_preds"])
        result = tape.gradient(loss, model.trainable_variables)
        return [outputs[name] for name in sorted(outputs)], result

    inputs = [sequences(model, 4, T)["obs"], *used_state(model, 4), LENGTHS]
    plain, compiled = (
        tf.function(gradients, input_signature=signature, autograph=False, jit_compile=jit)(*inputs)
        for jit in (None, True)
    )
    assert_arrays_close(tf.nest.flatten(compiled), tf.nest.flatten(plain), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "steps"), [(k, s) for k in KINDS for s in (None, 1)], ids=lambda x: str(x)
)
def test_models_compute_the_same_in_onnx_runtime_for_any_batch_and_length(kind, steps):
    model = make(kind)
    names, signature = make_signature(model, steps)

    def flat(*inputs):
        outputs = model(dict(zip(names, inputs, strict=True)), training=False)
        return [outputs[name] for name in sorted(outputs)]

    outputs = sorted(model.output)
    run_graph = load_in_onnx_runtime(tf.function(flat, autograph=False), signature, outputs)
    for rows, time in ((4, T), (1, 1), (3, 2)) if steps is None else ((1, 1), (4, 1)):
        lengths = np.minimum(LENGTHS[:rows], time)
        state = used_state(model, rows)
        inputs = sequences(model, rows, time)
        results = run_graph(dict(zip(names, [inputs["obs"], *state, lengths], strict=True)))
        expected = run(model, inputs, state, lengths)
        assert_arrays_close(results, [expected[name] for name in outputs])


@pytest.mark.core
@pytest.mark.parametrize("kind", [*KINDS, TWO_UNITS], ids=str)
def test_models_can_be_cloned_through_their_keras_config(kind):
    model = make(kind, varied=False)
    clone = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
    assert_arrays_equal(clone.get_weights(), model.get_weights())  # the config has the seeds
    inputs, states = sequences(model, 4, T), used_state(model, 4)
    assert_equal(*(run(m, inputs, states, LENGTHS) for m in (clone, model)))
