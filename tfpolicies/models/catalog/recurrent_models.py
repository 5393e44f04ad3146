"""Models with a recurrent state: after the catalog's encoder, or around a user's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.encoders import flatten_rows
from tfpolicies.models.catalog.gated_transformer import build_attention_core
from tfpolicies.models.catalog.initializers import KernelInitializers
from tfpolicies.models.catalog.inspection import (
    PREV_ACTIONS,
    PREV_N_ACTIONS,
    PREV_N_REWARDS,
    PREV_REWARDS,
    SEQ_LENS,
    STATE_IN,
)
from tfpolicies.models.catalog.layers import (
    FoldTime,
    NamedTensors,
    RecurrentCore,
    SequenceMask,
    Tensor,
    UnfoldTime,
    apply_action_outputs,
    apply_value_output,
)
from tfpolicies.models.model_config import Settings
from tfpolicies.models.preprocessing import get_encoded_shape
from tfpolicies.models.spaces import Leaves, port_names


class _UnrolledSingleStep:
    """A Keras recurrent layer that runs a single step without a loop.

    A step costs ONNX Runtime half the time without it. Longer sequences keep the loop: unrolled,
    20 steps take XLA six times as long to compile and run no faster.
    """

    unroll: bool

    def inner_loop(self, sequences: Tensor, *args: object, **kwargs: object) -> Any:
        saved = self.unroll
        self.unroll = saved or sequences.shape[1] == 1
        try:
            return super().inner_loop(sequences, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.unroll = saved


@keras.saving.register_keras_serializable(package="tfpolicies")
class LSTM(_UnrolledSingleStep, keras.layers.LSTM):
    """Keras's LSTM, without a loop if there is only one step."""


@keras.saving.register_keras_serializable(package="tfpolicies")
class GRU(_UnrolledSingleStep, keras.layers.GRU):
    """Keras's GRU, without a loop if there is only one step."""


def build_recurrent_core(
    x: Tensor, seq_lens: Tensor, settings: Settings, kernels: KernelInitializers
) -> RecurrentCore:
    """Applies Keras's LSTM or GRU to `x`, with `lstm_cell_size` units.

    LSTM: Hochreiter & Schmidhuber 1997, with a forget gate that starts open; states h and c. GRU:
    Cho et al. 2014 (arXiv:1406.1078) with the reset gate applied after the product (Keras's
    `reset_after`, as in cuDNN); state h. Padding after the end of a sequence leaves the state
    unchanged.

    Args:
        x: sequences `[B, T, F]`.
        seq_lens: true lengths, `[B]` int32.
        settings: the complete model config.
        kernels: the kernel initializers.

    Returns:
        The outputs `[B, T, units]`, the state inputs and the states after the sequences, each
        `[B, units]`.
    """
    units = int(settings["lstm_cell_size"])
    is_lstm = settings["use_lstm"]
    layer = (LSTM if is_lstm else GRU)(
        units,
        return_sequences=True,
        return_state=True,
        use_cudnn=False,  # one code path, which XLA and ONNX also support
        kernel_initializer=kernels.glorot(),
        recurrent_initializer=kernels.orthogonal(),
        name="lstm" if is_lstm else "gru",
    )
    states = [
        keras.Input((units,), name=f"{STATE_IN}{i}", dtype="float32")
        for i in range(2 if is_lstm else 1)
    ]
    mask = SequenceMask(name="mask")([x, seq_lens])
    outputs, *new_states = layer(x, initial_state=states, mask=mask)
    return outputs, states, new_states


@keras.saving.register_keras_serializable(package="tfpolicies")
class RememberingModel(keras.Model):
    """A memory around a user's model, as a functional model; it has that model's attributes."""

    @property
    def features(self) -> keras.Model:
        """The user's model, whose outputs are the inputs of the memory."""
        return next(layer for layer in self.layers if isinstance(layer, keras.Model))

    def __getattr__(self, name: str) -> Any:
        """Returns the attribute of the user's model."""
        if name.startswith("_") or not vars(self).get("built"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.features, name)


def make_sequence_inputs(shapes: Mapping[str, Sequence[int]]) -> NamedTensors:
    """Returns inputs of sequences `[B, T, ...]`, given the shape of a step of each."""
    return {
        name: keras.Input((None, *shape), name=name, dtype="float32")
        for name, shape in shapes.items()
    }


def make_previous_step_inputs(settings: Settings, action_leaves: Leaves) -> NamedTensors:
    """Returns the inputs of previous actions and rewards that a memory reads besides features."""
    actions, rewards = (
        int(settings[f"lstm_use_prev_{column}"] or settings[f"attention_use_n_prev_{column}s"])
        for column in ("action", "reward")
    )
    if actions and not action_leaves:
        raise ModelError(
            "A model that reads the previous action needs the action space: pass "
            "action_leaves=leaves(action_space)."
        )
    shapes: dict[str, Sequence[int]] = {}
    if actions:
        names = port_names(action_leaves, PREV_ACTIONS if actions == 1 else PREV_N_ACTIONS)
        steps = () if actions == 1 else (actions,)
        for leaf, name in zip(action_leaves, names, strict=True):
            shapes[name] = (*steps, *get_encoded_shape(leaf))
    if rewards:
        shapes[PREV_REWARDS if rewards == 1 else PREV_N_REWARDS] = (rewards,)
    return make_sequence_inputs(shapes)


def build_memory_model(
    features: Callable[[NamedTensors], Any],
    feature_inputs: NamedTensors,
    previous: NamedTensors,
    num_outputs: int,
    settings: Settings,
    kernels: KernelInitializers,
    *,
    with_value: bool,
    kind: type[keras.Model] = keras.Model,
) -> keras.Model:
    """Returns a model with the memory that the settings ask for; see `build_model`.

    Args:
        features: computes `[N, F]` from rows `[N, ...]` by name.
        feature_inputs: the inputs of `features`, sequences by name.
        previous: the further inputs of the memory, sequences by name.
        num_outputs: inputs of the action distribution per row.
        settings: a complete `model` config.
        kernels: the kernel initializers.
        with_value: whether the model also estimates values.
        kind: the class of the model.
    """
    inputs = {**feature_inputs, **previous, **feature_inputs}  # an input that both read is `own`'s
    rows = {name: FoldTime(name=f"{name}_rows")(x) for name, x in inputs.items()}
    feature_rows = features({name: rows[name] for name in feature_inputs})
    extras = [flatten_rows(rows[name]) for name in previous]
    if extras:
        feature_rows = keras.layers.Concatenate(name="with_previous")([feature_rows, *extras])
    x = UnfoldTime(name="sequences")([feature_rows, next(iter(inputs.values()))])
    seq_lens = keras.Input((), name=SEQ_LENS, dtype="int32")
    core = build_attention_core if settings["use_attention"] else build_recurrent_core
    core_outputs, states_in, states_out = core(x, seq_lens, settings, kernels)
    outputs = {
        "action_dist_inputs": apply_action_outputs(kernels, core_outputs, num_outputs, settings)
    }
    if with_value:
        outputs["vf_preds"] = apply_value_output(kernels, core_outputs)
    outputs |= {f"state_out_{i}": state for i, state in enumerate(states_out)}
    inputs |= {f"{STATE_IN}{i}": state for i, state in enumerate(states_in)}
    return kind({**inputs, SEQ_LENS: seq_lens}, outputs, name="policy")


def build_with_memory(
    model: keras.Model,
    features: Callable[[NamedTensors], Any],
    shapes: Mapping[str, Sequence[int]],
    num_outputs: int,
    settings: Settings,
    *,
    with_value: bool,
    action_leaves: Leaves,
) -> RememberingModel:
    """Builds a memory around a user's model; inputs and outputs are as in `build_model`.

    Args:
        model: the user's built model; it becomes a part of the result.
        features: calls the model: computes `[N, F]` from rows `[N, ...]` by name.
        shapes: the shape of a row of each input of the model, by name.
        num_outputs: inputs of the action distribution per row.
        settings: a complete `model` config.
        with_value: whether the result also estimates values.
        action_leaves: the leaves of the action space.
    """
    feature_inputs, previous = (
        make_sequence_inputs(shapes),
        make_previous_step_inputs(settings, action_leaves),
    )
    for name in feature_inputs.keys() & previous.keys():
        if feature_inputs[name].shape != previous[name].shape:
            raise ModelError(
                f"The model {model.name!r} reads {name!r} of the shape "
                f"{feature_inputs[name].shape[2:]}, but the memory around it "
                f"{previous[name].shape[2:]}. Let both read the same number of steps."
            )
    kernels = KernelInitializers(ortho_init=settings["ortho_init"], seed=0)
    options: dict[str, Any] = {"with_value": with_value, "kind": RememberingModel}
    try:
        return build_memory_model(
            features, feature_inputs, previous, num_outputs, settings, kernels, **options
        )
    except Exception as error:
        raise ModelError(
            f"No memory can be built around the model {model.name!r}: {error} Give it another name "
            "if a layer of the memory has the same name; or write a model that has its own memory, "
            "see 'Memory' in docs/howto/models.md."
        ) from error
