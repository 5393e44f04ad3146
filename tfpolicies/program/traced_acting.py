"""Runs the code of a policy class that acts, while it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.errors import ConfigError
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.distributions.base import is_whole_space_distribution
from tfpolicies.models.network import Network, NetworkInputs, NetworkOutputs
from tfpolicies.models.ports import NOISE, SEQ_LENS
from tfpolicies.models.spaces import get_at_path, unflatten
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.traced_arguments import TracedModel


class ActionSample(NamedTuple):
    """The checked results of `action_sampler_fn` for N rows."""

    actions: list[tf.Tensor]  # one per leaf of the action space, [N, *shape], normalised
    logp: tf.Tensor  # [N] float32
    dist_inputs: tf.Tensor  # [N, n] float32
    states: list[tf.Tensor]  # the new recurrent state, [S, ...] each


class _StatelessNetwork:
    """A network that runs with given weights, for inference."""

    def __init__(self, network: Network, weights: Sequence[tf.Tensor]) -> None:
        self.ports = network.ports
        self.model = network.model
        self._network = network
        self._weights = weights

    def __call__(self, inputs: NetworkInputs, *, training: bool) -> NetworkOutputs:
        return self._network.call_stateless(self._weights, inputs)


def make_distribution(
    traced_self: Any, model: Any, dist_inputs: tf.Tensor, dist_class: type[ActionDistribution]
) -> Any:
    """Returns the distributions of a batch from the results of `action_distribution_fn`.

    Args:
        traced_self: the `self` of the class's code.
        model: that computed the inputs.
        dist_inputs: float32 `[N, n]`.
        dist_class: the distribution of the class; or a `WholeSpaceDistribution`, or a partial of
            one.

    Raises:
        ConfigError: unless the distribution of the class accepts `dist_inputs`.
    """
    check_dist_inputs(traced_self, dist_inputs)
    base_class = getattr(dist_class, "func", dist_class)
    if is_whole_space_distribution(base_class):
        arguments = getattr(dist_class, "keywords", {})
        dist_class = base_class.for_space(
            traced_self.action_space, traced_self.config["model"], **arguments
        )
    return dist_class(dist_inputs, model)


def check_dist_inputs(traced_self: Any, dist_inputs: tf.Tensor) -> None:
    """Raises a `ConfigError` unless the distribution of a class accepts `dist_inputs`."""
    shape, width = tuple(dist_inputs.shape), traced_self.dist_class.num_inputs
    if len(shape) != 2 or shape[1] != width:
        raise ConfigError(
            f"{type(traced_self).__name__} gave dist_inputs of shape {shape}; `self.dist_class` "
            f"needs [N, {width}]. For another width, set `model['custom_action_dist']`."
        )


class TracedActing:
    """The inputs of acting by name, and the model that runs on them with given weights.

    Args:
        spec: of the Program.
        network: the network.
        weights: all of its variables, in order.
        inputs: one tensor per input port.
        seq_lens: int32 `[S]`, the number of valid steps of each sequence; None: all are valid.
        time_steps: the steps T of each of the S = N / T sequences.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        network: Network,
        weights: Sequence[tf.Tensor],
        inputs: Sequence[tf.Tensor],
        seq_lens: tf.Tensor | None = None,
        time_steps: tf.Tensor | int = 1,
    ) -> None:
        self._spec = spec
        self._num_rows = tf.shape(inputs[0])[0]
        stateless = _StatelessNetwork(network, weights)
        self._network, self._weights = network, weights
        self._model = TracedModel(stateless, time_steps, training=False)
        obs, view_arrays, self._states = network.ports.split(inputs)
        input_dict: dict[str, Any] = {"obs": unflatten(spec.observation_space, obs)}
        arrays = iter(view_arrays)
        for view in network.ports.views:
            input_dict[view.name] = view.unflatten([next(arrays) for _ in view.ports])
        if network.ports.is_recurrent:
            if seq_lens is None:
                seq_lens = tf.fill([tf.shape(self._states[0])[0]], time_steps)
            ports = network.ports.states
            input_dict |= {port.name: x for port, x in zip(ports, self._states, strict=True)}
            input_dict[SEQ_LENS] = seq_lens
        self._input_dict = input_dict

    def _hook_arguments(self) -> dict[str, Any]:
        input_dict = self._input_dict
        return {
            "obs_batch": input_dict["obs"],
            "state_batches": self._states,
            "input_dict": input_dict,
        }

    def sample_actions(self, traced_self: Any, **kwargs: Any) -> ActionSample:
        """Calls `action_sampler_fn` of a class with `noise`, `params` and `explorer`."""
        if self._network.ports.noise_size:
            self._input_dict[NOISE] = kwargs["noise"][:, : self._network.ports.noise_size]
        with self._network.use_weights(self._weights):
            result = traced_self.action_sampler_fn(self._model, **self._hook_arguments(), **kwargs)
        actions, logp, dist_inputs, states = result
        width = self._spec.dist_class.num_inputs
        if logp is None:
            logp = tf.zeros([self._num_rows])
        if dist_inputs is None:
            dist_inputs = tf.zeros([self._num_rows, width])
        check_dist_inputs(traced_self, dist_inputs)
        action_leaves = [
            tf.cast(get_at_path(actions, leaf.path), leaf.dtype)
            for leaf in self._spec.action_leaves
        ]
        return ActionSample(action_leaves, logp, dist_inputs, list(states))

    def logp(self, traced_self: Any, actions: TensorStructure) -> tf.Tensor:
        """Returns the log-probability of actions, nested as their space is, float32 `[N]`.

        Their distribution is the result of `action_distribution_fn` of a class.
        """
        policy_class = self._spec.policy_class
        if policy_class._overrides("action_sampler_fn") and not policy_class._overrides(
            "action_distribution_fn"
        ):
            raise ConfigError(
                f"{policy_class.__name__} overrides `action_sampler_fn`, so the distribution of "
                "its actions is not known. Also override `action_distribution_fn`."
            )
        with self._network.use_weights(self._weights):
            result = traced_self.action_distribution_fn(self._model, **self._hook_arguments())
            return make_distribution(traced_self, self._model, *result[:2]).logp(actions)

    def values(self) -> tf.Tensor:
        return self._model.value_function()
