"""Models from a config: what each part gives to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.attention import attention_core
from tfpolicies.models.catalog.encoders import Encoder, flattened
from tfpolicies.models.catalog.initializers import Kernels
from tfpolicies.models.catalog.inspection import PREV_ACTIONS, PREV_REWARDS, SEQ_LENS, STATE_IN
from tfpolicies.models.catalog.layers import FoldTime, FreeLogStd, UnfoldTime
from tfpolicies.models.catalog.recurrent import recurrent_core
from tfpolicies.models.preprocessing import encoded_shape
from tfpolicies.models.settings import model_settings
from tfpolicies.models.spaces import Leaf, port_names

Named = dict[str, Any]  # Keras tensors by name


def build_model(
    space_leaves: Sequence[Leaf],
    num_outputs: int,
    config: Mapping[str, Any],
    *,
    with_value: bool,
    seed: int = 0,
    action_leaves: Sequence[Leaf] = (),
) -> keras.Model:
    """Builds the Keras model that a `model` config describes.

    Without memory it maps encoded observations, one tensor `[B, ...]` or for a nested space a dict
    of them by input name (`obs_<path>`), to `[B, num_outputs]`, or with a value to the pair
    (`[B, num_outputs]`, `[B, 1]`).

    With `use_lstm`, `use_gru` or `use_attention` it maps a dict of sequences to a dict: `obs` or
    `obs_<path>` `[B, T, ...]`, `prev_actions[_path]` `[B, T, F]` (encoded and flattened) and
    `prev_rewards` `[B, T, 1]` where asked for, `state_in_i` `[B, ...]` and `seq_lens` `[B]` int32
    to `action_dist_inputs` `[B, T, num_outputs]`, `vf_preds` `[B, T, 1]` and `state_out_i`, the
    states after the last real step of each sequence. Actor and value both read the memory, whatever
    `vf_share_layers` says: two memories would double the state.

    Args:
        space_leaves: the leaves of the observation space, without an action mask.
        num_outputs: inputs of the action distribution per row.
        config: any `model` settings; missing ones get their defaults.
        with_value: whether the model also estimates values.
        seed: seeds the initial weights.
        action_leaves: the leaves of the action space; needed for previous actions only.

    Raises:
        ModelError: if a setting is wrong (then a `ModelSettingError`), no convolutions are known
            for an image's size, or they do not fit it.
    """
    settings = model_settings(config)
    kernels = Kernels(ortho_init=settings["ortho_init"], seed=seed)
    names = port_names(space_leaves, "obs")
    encoder = Encoder(space_leaves, names, settings, kernels)
    if settings["use_lstm"] or settings["use_gru"] or settings["use_attention"]:
        inputs = _sequence_inputs(space_leaves, names, settings, action_leaves)
        return _memory_model(encoder, kernels, inputs, names, num_outputs, settings, with_value)
    inputs = encoder.inputs()
    outputs = _feedforward(encoder, inputs, num_outputs, settings, with_value=with_value)
    return encoder.model(inputs, outputs, "policy")


def _feedforward(
    encoder: Encoder,
    inputs: Named,
    num_outputs: int,
    settings: Mapping[str, Any],
    *,
    with_value: bool,
) -> Any:
    joined = encoder.joined(inputs)
    layers = encoder.hidden_layers
    actor_layers, final = layers, None
    if settings["no_final_linear"]:
        if not layers:
            raise ModelError(
                "model['no_final_linear'] must be False where there is no hidden layer to become "
                "the output, got True. Add one to fcnet_hiddens (behind an image: to "
                "post_fcnet_hiddens)."
            )
        actor_layers, final = layers[:-1], layers[-1][1]
    hidden = encoder.fully_connected(joined, actor_layers, "fc")
    outputs = _outputs(encoder, hidden, num_outputs, settings, final)
    if not with_value:
        return outputs
    if not settings["vf_share_layers"]:
        own = encoder.joined(inputs, "value_") if encoder.has_images else joined
        hidden = encoder.fully_connected(own, layers, "fc_value")
    return [outputs, encoder.dense(hidden, 1, "value_out", "value")]


def _outputs(
    encoder: Encoder, x: Any, num_outputs: int, settings: Mapping[str, Any], final: Any = None
) -> Any:
    """Puts the inputs of the action distribution behind `x`: linear ones, or activated by `final`.

    With `free_log_std` only their first half is computed from `x`.
    """
    free = settings["free_log_std"]
    units = num_outputs // 2 if free else num_outputs
    role = "action" if not settings["no_final_linear"] else "hidden"
    outputs = encoder.dense(x, units, "fc_out", role, final)
    return FreeLogStd(name="log_std")(outputs) if free else outputs


def _sequence_inputs(
    space_leaves: Sequence[Leaf],
    names: Sequence[str],
    settings: Mapping[str, Any],
    action_leaves: Sequence[Leaf],
) -> Named:
    """Returns the inputs of a model with memory, all but its states."""
    ports = list(zip(space_leaves, names, strict=True))
    if settings["lstm_use_prev_action"] or settings["attention_use_n_prev_actions"]:
        if not action_leaves:
            raise ModelError(
                "A model that reads the previous action needs to know the action space: give "
                "action_leaves=leaves(action_space)."
            )
        ports += zip(action_leaves, port_names(action_leaves, PREV_ACTIONS), strict=True)
    inputs = {
        name: keras.Input((None, *encoded_shape(leaf)), name=name, dtype="float32")
        for leaf, name in ports
    }
    if settings["lstm_use_prev_reward"] or settings["attention_use_n_prev_rewards"]:
        inputs[PREV_REWARDS] = keras.Input((None, 1), name=PREV_REWARDS, dtype="float32")
    return inputs


def _memory_model(
    encoder: Encoder,
    kernels: Kernels,
    inputs: Named,
    names: Sequence[str],
    num_outputs: int,
    settings: Mapping[str, Any],
    with_value: bool,
) -> keras.Model:
    rows = {name: FoldTime(name=f"{name}_rows")(x) for name, x in inputs.items()}
    features = encoder.fully_connected(encoder.joined(rows), encoder.hidden_layers, "fc")
    extras = [flattened(x) for name, x in rows.items() if name not in names]
    if extras:
        features = keras.layers.Concatenate(name="with_previous")([features, *extras])
    x = UnfoldTime(name="sequences")([features, inputs[names[0]]])
    seq_lens = keras.Input((), name=SEQ_LENS, dtype="int32")
    core = attention_core if settings["use_attention"] else recurrent_core
    remembered, states_in, states_out = core(x, seq_lens, settings, kernels)
    outputs = {"action_dist_inputs": _outputs(encoder, remembered, num_outputs, settings)}
    if with_value:
        outputs["vf_preds"] = encoder.dense(remembered, 1, "value_out", "value")
    outputs |= {f"state_out_{i}": state for i, state in enumerate(states_out)}
    inputs = {**inputs, **{f"{STATE_IN}{i}": s for i, s in enumerate(states_in)}}
    return keras.Model({**inputs, SEQ_LENS: seq_lens}, outputs, name="policy")
