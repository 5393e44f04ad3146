"""A built Keras model with a policy's input ports: encoding, filters, sequences, masks, heads."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfpolicies.models.actor_critic import get_dist_inputs, value_of
from tfpolicies.models.calling import call_model
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.filters import normalize
from tfpolicies.models.ports import NOISE, SEQ_LENS, InputPorts, plain_leaves
from tfpolicies.models.preprocessing import encode, encoded_shape
from tfpolicies.models.spaces import pick
from tfpolicies.type_aliases import TensorStructure

Tensors: TypeAlias = Sequence[tf.Tensor]


class NetworkInputs(NamedTuple):
    """The inputs of a network; see `InputPorts` for the order."""

    obs: Tensors  # each [N, *shape]
    seen: Tensors = ()  # the leaves of the views, each [N, *shape]
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
        self._plain = plain_leaves(ports.space)
        self._filtered = tuple(filtered)
        self.filtered_names = tuple(self._names[i] for i in filtered)
        self.filter_variables = [
            tf.Variable(
                start(encoded_shape(self._leaves[i]), np.float32),
                trainable=False,
                name=f"{self._names[i]}/{role}",
            )
            for i in filtered
            for role, start in (("mean", np.zeros), ("scale", np.ones))
        ]
        self.variables = [*model.variables, *self.filter_variables]

    def like(self, model: keras.Model) -> Network:
        """Returns a network of another model of this architecture, with the same filters."""
        twin = copy.copy(self)
        twin.model, twin.variables = model, [*model.variables, *self.filter_variables]
        return twin

    def __call__(self, inputs: NetworkInputs, *, training: bool) -> NetworkOutputs:
        """Runs the model with its own variables."""
        return self._run(inputs, self.filter_variables, training=training)

    def with_weights(self, weights: Tensors) -> keras.StatelessScope:
        """Returns a context in which the model and its layers have these weights of `variables`."""
        own = self.model.variables
        return keras.StatelessScope(state_mapping=list(zip(own, weights[: len(own)], strict=True)))

    def stateless(self, weights: Tensors, inputs: NetworkInputs) -> NetworkOutputs:
        """Runs the model with the given weights, in the order of `variables`, for inference."""
        # Unlike `stateless_call`, this works if the model's `call` has no argument `training`.
        with self.with_weights(weights):
            return self._run(inputs, weights[len(self.model.variables) :], training=False)

    def _run(self, inputs: NetworkInputs, filters: Tensors, *, training: bool) -> NetworkOutputs:
        seen = self._encode_inputs(inputs, filters)
        outputs = call_model(self.model, seen, training=training)
        logits, values = get_dist_inputs(outputs), value_of(outputs)
        states = [outputs[f"state_out_{i}"] for i in range(len(self.ports.states))]
        if self.ports.is_recurrent:
            logits = tf.reshape(logits, [-1, logits.shape[-1]])
        masks = [x for x, mask in zip(inputs.obs, self.ports.is_mask, strict=True) if mask]
        if masks:
            flat = [tf.reshape(x, [tf.shape(x)[0], math.prod(x.shape[1:])]) for x in masks]
            mask = flat[0] if len(flat) == 1 else tf.concat(flat, axis=-1)
            logits = self._dist_class.masked(logits, mask)
        if values is not None:
            values = tf.reshape(values, [-1])
        return NetworkOutputs(self._dist_class.inputs_of(logits), logits, values, states)

    def _encode_inputs(self, inputs: NetworkInputs, filters: Tensors) -> dict[str, tf.Tensor]:
        seen = self._encode_obs(inputs.obs, filters)
        arrays = iter(inputs.seen)
        for view in self.ports.views:
            steps = [next(arrays) for _ in view.ports]
            seen |= view.encoded(steps, lambda i, x: self._normalize(self._plain[i], x, filters))
        if self.ports.is_recurrent:
            seen = {name: _fold(x, inputs.time_steps) for name, x in seen.items()}
            names = (port.name for port in self.ports.states)
            seen |= zip(names, inputs.states, strict=True)
            lengths = inputs.seq_lens
            if lengths is None:
                lengths = tf.fill([tf.shape(inputs.states[0])[0]], inputs.time_steps)
            seen[SEQ_LENS] = tf.cast(lengths, tf.int32)
        if self.ports.noise_size:
            mean = inputs.noise is None
            seen[NOISE] = tf.zeros([1, self.ports.noise_size]) if mean else inputs.noise
        return seen

    def encoded(self, obs: TensorStructure) -> dict[str, tf.Tensor]:
        """Encodes rows of observations, nested as their space is; returns them by port.

        Action masks are left out.
        """
        leaves = [pick(obs, leaf.path) for leaf in self._leaves]
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
        at = 2 * self._filtered.index(leaf)
        return normalize(encoded, filters[at], filters[at + 1])


def _fold(rows: tf.Tensor, time_steps: int | tf.Tensor) -> tf.Tensor:
    """Reshapes rows `[S * T, ...]` to sequences `[S, T, ...]`."""
    shape = rows.shape[1:]
    static = time_steps if isinstance(time_steps, int) else None
    return tf.ensure_shape(tf.reshape(rows, [-1, time_steps, *shape]), [None, static, *shape])
