"""A built Keras model with a policy's input ports: encoding, filters, sequences, masks, heads."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.models.actor_critic_model import get_dist_inputs, get_value
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.mean_std_filters import normalize
from tfpolicies.models.model_calls import call_model
from tfpolicies.models.ports import NOISE, SEQ_LENS, InputPorts, get_unmasked_leaf_indices
from tfpolicies.models.preprocessing import encode, get_encoded_shape
from tfpolicies.models.spaces import get_at_path

Tensors: TypeAlias = Sequence[tf.Tensor]


class NetworkInputs(NamedTuple):
    """The inputs of a network; see `InputPorts` for the order."""

    obs: Tensors  # each [N, *shape]
    views: Tensors = ()  # the leaves of the views, each [N, *shape]
    states: Tensors = ()  # each [S, *shape]
    seq_lens: tf.Tensor | None = None  # int32 [S]; None: all sequences have T steps
    time_steps: Any = 1  # T, with N = S * T
    noise: tf.Tensor | None = None  # [N, k] or [1, k] for a noisy network; None for zeros


class NetworkOutputs(NamedTuple):
    """The outputs of a network for N rows."""

    dist_inputs: tf.Tensor  # [N, num_inputs], masked
    outputs: tf.Tensor  # [N, num_outputs], masked; `dist_inputs` are computed from them
    values: tf.Tensor | None  # [N]
    states: list[tf.Tensor]  # the memory after each sequence, [S, ...] each


class Network:
    """A built Keras model with a policy's input ports; runs with its own or with other weights.

    Inputs and outputs are rows `[N, ...]`. A model with a memory sees sequences: N = S * T rows are
    S sequences of T steps, one after the other, and the memory has S rows.

    Attributes:
        model: the Keras model.
        ports: the inputs.
        filtered_names: the inputs whose observations are normalised.
        variables: all of its variables in a fixed order: trainable or not, also seed generators,
            then mean and scale of each filtered observation leaf.
    """

    def __init__(
        self,
        model: keras.Model,
        ports: InputPorts,
        dist_class: ActionDistribution,
        filtered: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.ports = ports
        self._dist_class = dist_class
        self._leaves = ports.obs_leaves
        self._names = [port.name for port in ports.obs]
        self._unmasked_leaves = get_unmasked_leaf_indices(ports.space)
        self._filtered = tuple(filtered)
        self.filtered_names = tuple(self._names[i] for i in filtered)
        self.filter_variables = [
            tf.Variable(
                start(get_encoded_shape(self._leaves[i]), np.float32),
                trainable=False,
                name=f"{self._names[i]}/{role}",
            )
            for i in filtered
            for role, start in (("mean", np.zeros), ("scale", np.ones))
        ]
        self.variables = [*model.variables, *self.filter_variables]

    def with_model(self, model: keras.Model) -> Network:
        """Returns a network of another model of this architecture, with the same filters."""
        network = copy.copy(self)
        network.model, network.variables = model, [*model.variables, *self.filter_variables]
        return network

    def __call__(self, inputs: NetworkInputs, *, training: bool) -> NetworkOutputs:
        return self._run(inputs, self.filter_variables, training=training)

    def use_weights(self, weights: Tensors) -> keras.StatelessScope:
        """Returns a context in which the model and its layers have these weights of `variables`."""
        model_variables = self.model.variables
        return keras.StatelessScope(
            state_mapping=list(zip(model_variables, weights[: len(model_variables)], strict=True))
        )

    def call_stateless(self, weights: Tensors, inputs: NetworkInputs) -> NetworkOutputs:
        """Runs the model with the given weights, in the order of `variables`, for inference."""
        # Unlike `stateless_call`, this works if the model's `call` has no argument `training`.
        with self.use_weights(weights):
            return self._run(inputs, weights[len(self.model.variables) :], training=False)

    def _run(self, inputs: NetworkInputs, filters: Tensors, *, training: bool) -> NetworkOutputs:
        encoded = self._encode_inputs(inputs, filters)
        outputs = call_model(self.model, encoded, training=training)
        logits, values = get_dist_inputs(outputs), get_value(outputs)
        states = [outputs[f"state_out_{i}"] for i in range(len(self.ports.states))]
        if self.ports.is_recurrent:
            logits = tf.reshape(logits, [-1, logits.shape[-1]])
        masks = [x for x, mask in zip(inputs.obs, self.ports.is_mask, strict=True) if mask]
        if masks:
            flat = [tf.reshape(x, [tf.shape(x)[0], math.prod(x.shape[1:])]) for x in masks]
            mask = flat[0] if len(flat) == 1 else tf.concat(flat, axis=-1)
            logits = self._dist_class.apply_mask(logits, mask)
        if values is not None:
            values = tf.reshape(values, [-1])
        return NetworkOutputs(self._dist_class.compute_inputs(logits), logits, values, states)

    def _encode_inputs(self, inputs: NetworkInputs, filters: Tensors) -> dict[str, tf.Tensor]:
        encoded = self._encode_obs(inputs.obs, filters)
        arrays = iter(inputs.views)
        for view in self.ports.views:
            steps = [next(arrays) for _ in view.ports]
            encoded |= view.encode_view(
                steps, lambda i, x: self._normalize(self._unmasked_leaves[i], x, filters)
            )
        if self.ports.is_recurrent:
            encoded = {name: _to_sequences(x, inputs.time_steps) for name, x in encoded.items()}
            names = (port.name for port in self.ports.states)
            encoded |= zip(names, inputs.states, strict=True)
            lengths = inputs.seq_lens
            if lengths is None:
                lengths = tf.fill([tf.shape(inputs.states[0])[0]], inputs.time_steps)
            encoded[SEQ_LENS] = tf.cast(lengths, tf.int32)
        if self.ports.noise_size:
            use_mean = inputs.noise is None
            encoded[NOISE] = tf.zeros([1, self.ports.noise_size]) if use_mean else inputs.noise
        return encoded

    def encode_obs(self, obs: TensorStructure) -> dict[str, tf.Tensor]:
        """Encodes rows of observations, nested as their space is; returns them by port.

        Action masks are left out.
        """
        leaves = [get_at_path(obs, leaf.path) for leaf in self._leaves]
        return self._encode_obs(leaves, self.filter_variables)

    def _encode_obs(self, obs: Tensors, filters: Tensors) -> dict[str, tf.Tensor]:
        parts = zip(self._names, self._leaves, obs, self.ports.is_mask, strict=True)
        return {
            name: self._normalize(i, encode(leaf, x), filters)
            for i, (name, leaf, x, mask) in enumerate(parts)
            if not mask
        }

    def _normalize(self, leaf: int, encoded: tf.Tensor, filters: Tensors) -> tf.Tensor:
        """Returns rows of an encoded leaf, normalised if it is filtered.

        Args:
            leaf: its index.
            encoded: `[N, ...]`.
            filters: mean and scale of each filtered leaf.
        """
        if leaf not in self._filtered:
            return encoded
        index = 2 * self._filtered.index(leaf)
        return normalize(encoded, filters[index], filters[index + 1])


def _to_sequences(rows: tf.Tensor, time_steps: int | tf.Tensor) -> tf.Tensor:
    """Reshapes rows `[S * T, ...]` to sequences `[S, T, ...]`."""
    shape = rows.shape[1:]
    num_steps = time_steps if isinstance(time_steps, int) else None
    return tf.ensure_shape(tf.reshape(rows, [-1, time_steps, *shape]), [None, num_steps, *shape])
