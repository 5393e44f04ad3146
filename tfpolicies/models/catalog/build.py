"""Builds models from the `model` config."""

from __future__ import annotations

import keras

from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.encoders import Encoder
from tfpolicies.models.catalog.initializers import KernelInitializers
from tfpolicies.models.catalog.layers import apply_action_outputs, apply_value_output
from tfpolicies.models.catalog.recurrent_models import (
    build_memory_model,
    make_previous_step_inputs,
    make_sequence_inputs,
)
from tfpolicies.models.model_config import Settings, complete_model_config, has_memory
from tfpolicies.models.preprocessing import get_encoded_shape
from tfpolicies.models.spaces import Leaves, port_names


def build_model(
    space_leaves: Leaves,
    num_outputs: int,
    config: Settings,
    *,
    with_value: bool,
    seed: int = 0,
    action_leaves: Leaves = (),
) -> keras.Model:
    """Builds the Keras model that a `model` config describes.

    Without memory it maps encoded observations, one tensor `[B, ...]` or for a nested space a dict
    of them by input name (`obs_<path>`), to `[B, num_outputs]`, or with a value to the pair
    (`[B, num_outputs]`, `[B, 1]`).

    With `use_lstm`, `use_gru` or `use_attention` it maps a dict of sequences to a dict. The inputs
    are `obs` or `obs_<path>` `[B, T, ...]`, `state_in_i` `[B, ...]`, `seq_lens` `[B]` int32 and, if
    the config requests them, `prev_actions[_path]` `[B, T, F]` (encoded and flattened) and
    `prev_rewards` `[B, T, 1]` (or `prev_n_actions[_path]` `[B, T, n, ...]` and `prev_n_rewards`
    `[B, T, n]` for n > 1). The outputs are `action_dist_inputs` `[B, T, num_outputs]`, `vf_preds`
    `[B, T, 1]` and `state_out_i`, the states after the last real step of each sequence. Actor and
    value share the memory, whatever `vf_share_layers` is: two memories would double the state.

    Args:
        space_leaves: the leaves of the observation space, without an action mask.
        num_outputs: inputs of the action distribution per row.
        config: any `model` settings; missing ones get their defaults.
        with_value: whether the model also estimates values.
        seed: seeds the initial weights.
        action_leaves: the leaves of the action space; needed for previous actions only.

    Raises:
        ModelError: if a setting is wrong (then a `ModelSettingError`), there are no default
            convolutions for an image's size, or they do not fit it.
    """
    settings = complete_model_config(config)
    kernels = KernelInitializers(ortho_init=settings["ortho_init"], seed=seed)
    names = port_names(space_leaves, "obs")
    encoder = Encoder(space_leaves, names, settings, kernels)
    if has_memory(settings):
        pairs = zip(names, space_leaves, strict=True)
        obs_inputs = make_sequence_inputs({name: get_encoded_shape(leaf) for name, leaf in pairs})
        previous = make_previous_step_inputs(settings, action_leaves)
        return build_memory_model(
            lambda rows: encoder.add_hidden_layers(
                encoder.encode(rows), encoder.dense_layers, "fc"
            ),
            *(obs_inputs, previous, num_outputs, settings, kernels),
            with_value=with_value,
        )
    return _build_feedforward(encoder, kernels, num_outputs, settings, with_value=with_value)


def _build_feedforward(
    encoder: Encoder,
    kernels: KernelInitializers,
    num_outputs: int,
    settings: Settings,
    *,
    with_value: bool,
) -> keras.Model:
    inputs = encoder.make_inputs()
    features = encoder.encode(inputs)
    layers = encoder.dense_layers
    actor_layers, final_activation = layers, None
    if settings["no_final_linear"]:
        if not layers:
            raise ModelError(
                "model['no_final_linear'] must be False if there is no hidden layer to become "
                "the output, got True. Add one to fcnet_hiddens (after an image: to "
                "post_fcnet_hiddens)."
            )
        actor_layers, final_activation = layers[:-1], layers[-1][1]
    hidden = encoder.add_hidden_layers(features, actor_layers, "fc")
    outputs = apply_action_outputs(kernels, hidden, num_outputs, settings, final_activation)
    if not with_value:
        return encoder.make_model(inputs, outputs, "policy")
    if not settings["vf_share_layers"]:
        critic_features = encoder.encode(inputs, "value_") if encoder.has_images else features
        hidden = encoder.add_hidden_layers(critic_features, layers, "fc_value")
    return encoder.make_model(inputs, [outputs, apply_value_output(kernels, hidden)], "policy")
