"""The networks of a policy class: their plans, and their resident variables.

The first network, "model", is the one that acts; it is a `models.network.Network`. Others are Keras
models or layers that only learning uses: critics, a temperature. Each may have a target network,
and has an optimizer for its variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.base.validators import POSITIVE_INT
from tfpolicies.errors import ConfigError
from tfpolicies.models.layer_tree import find_unused_seeds
from tfpolicies.models.model_calls import call_model
from tfpolicies.models.network import Network
from tfpolicies.models.weight_initializer import make_variable_keys
from tfpolicies.program.policy_state import NetworkParts, Slot, StateLayout

_NAME = re.compile("[a-z][a-z0-9_]*")
_RESERVED_SUFFIXES = ("filter", "target", "learner", "optimizer")  # names of other parts of a state


class NetworkPlan(NamedTuple):
    """The plan of one network of a policy class; see `TFPolicy.network_plans`."""

    make: Callable[[], Any] | None = None
    """Returns a new Keras model or layer with its variables; None for the network that acts."""
    target: bool = False
    """True if it has a target network, which moves towards it by the fraction `tau`."""
    lr: str = "lr"
    """The hyperparameter that is the learning rate of its optimizer."""
    every: int = 1
    """Its optimizer applies every n-th update, beginning with the first."""
    key: Hashable = None
    """A value that tells networks apart if `make` depends on more than the class, the spaces and
    the static settings; policies with different keys share no compiled functions."""


def check_plans(
    plans: Mapping[str, NetworkPlan], owner: str, hyperparameters: Sequence[str]
) -> None:
    """Checks the network plans of a policy class.

    Args:
        plans: the result of its `network_plans`.
        owner: the class, for messages.
        hyperparameters: of the class.
    """
    if not isinstance(plans, Mapping) or next(iter(plans), None) != "model":
        result = list(plans) if isinstance(plans, Mapping) else plans
        raise ConfigError(
            f"{owner}.network_plans must return a dict of NetworkPlans whose first key is 'model', "
            f"the network that acts; got {result!r:.80}."
        )
    for name, plan in plans.items():
        label = f"{owner}.network_plans: the plan of {name!r}"
        if not isinstance(plan, NetworkPlan):
            raise ConfigError(f"{label} must be a NetworkPlan, got {plan!r:.80}.")
        if (plan.make is None) != (name == "model"):
            rule = "must have a `make`, a function that returns a new network"
            if name == "model":
                rule = (
                    "must not have a `make`; override `make_model` to build the network that acts"
                )
            raise ConfigError(f"{label} {rule}.")
        if not _NAME.fullmatch(str(name)) or name.rpartition("_")[2] in _RESERVED_SUFFIXES:
            raise ConfigError(
                f"{label} needs another name: a word in lower case that does not end in "
                f"{', '.join(_RESERVED_SUFFIXES)}."
            )
        if not POSITIVE_INT.is_valid(plan.every):
            raise ConfigError(
                f"{label} needs an `every` that is {POSITIVE_INT.description}, got {plan.every!r}."
            )
        if plan.lr not in ("lr", *hyperparameters):
            raise ConfigError(
                f"{label} has lr={plan.lr!r}, which is not in {owner}.hyperparameters: "
                f"{', '.join(hyperparameters)}. Add it there, and to the training section of the "
                "config."
            )


class ResidentNetwork(NamedTuple):
    """One network with its variables."""

    plan: NetworkPlan
    model: Any  # a Keras model, or a layer
    target: Any  # its target network, or None


def collect_slots(
    networks: Mapping[str, ResidentNetwork],
    filters: Sequence[Any],
    optimizers: Mapping[str, Sequence[Any]],
) -> dict[Slot, Any]:
    """Returns all variables by their slots in a state, in its order.

    The variables of optimizers (`optimizers`) are given by the name of their network.
    """
    slots: dict[Slot, Any] = {}

    def add(part: str, keys: Sequence[str], variables: Sequence[Any]) -> None:
        for key, variable in zip(keys, variables, strict=True):
            dtype = tf.as_dtype(variable.dtype).name
            slots[Slot(key, tuple(variable.shape), dtype, part)] = variable

    def make_keys(name: str, prefix: str) -> list[str]:
        return [prefix + key for key in make_variable_keys(networks[name].model.variables)]

    add("model", make_keys("model", ""), networks["model"].model.variables)
    add("filter", [f"filter/{v.name.partition(':')[0]}" for v in filters], filters)
    for name, network in networks.items():
        if name != "model":
            add(name, make_keys(name, f"{name}/"), network.model.variables)
    for name, network in networks.items():
        if network.target is not None:
            part = NetworkParts.for_network(name).target
            add(part, make_keys(name, f"{part}/"), network.target.variables)
    for name, variables in optimizers.items():
        prefix = "optimizer" if name == "model" else f"{name}_optimizer"
        add(
            NetworkParts.for_network(name).optimizer,
            _make_optimizer_keys(prefix, variables),
            variables,
        )
    return slots


def _make_optimizer_keys(prefix: str, variables: Sequence[Any]) -> list[str]:
    keys = []
    for i, variable in enumerate(variables):
        role = variable.path.rpartition("/")[2]
        if i >= 2:  # a slot of a weight: its name contains the weight's auto-numbered one
            role = role.rpartition("_")[2]
        keys.append(f"{prefix}/{i:03d}_{role}")
    return keys


def make_layout(networks: Mapping[str, ResidentNetwork], slots: Sequence[Slot]) -> StateLayout:
    unused: set[str] = set()
    for name, network in networks.items():
        variables, unused_ids = network.model.variables, find_unused_seeds(network.model)
        parts = NetworkParts.for_network(name)
        for key, variable in zip(make_variable_keys(variables), variables, strict=True):
            if id(variable) in unused_ids:
                unused |= {key if name == "model" else f"{name}/{key}", f"{parts.target}/{key}"}
    return StateLayout(slots, unused, tuple(networks))


def update_targets(networks: Mapping[str, ResidentNetwork], tau: tf.Tensor) -> None:
    """Moves all target networks in place: t <- rate s + (1 - rate) t; integer variables are copied.

    A rate of 0 changes nothing.
    """
    for network in networks.values():
        if network.target is None:
            continue
        for old, new in zip(network.target.variables, network.model.variables, strict=True):
            if tf.as_dtype(old.dtype).is_floating:
                old.assign(tf.where(tau > 0.0, tau * new + (1.0 - tau) * old, old))
            else:
                old.assign(tf.where(tau > 0.0, tf.convert_to_tensor(new), old))


@dataclass(frozen=True, eq=False)
class NetworkHandle:
    """A network for learning only, in `loss`: call it on observations and its other inputs.

    `self.networks["critic"](train_batch["obs"], actions=a)` gives the model's output for the
    encoded, normalised observations and the actions `a`. A functional model names its inputs:
    `obs`, or `obs_<key>` for the parts of nested observations, and `actions`. Without observations,
    a model gets only the named inputs, and a layer without inputs is called by its `call()`.

    Args:
        model: a Keras model or layer.
        encoder: encodes observations as for the network that acts.
        training: whether layers such as Dropout are in training mode.
    """

    model: Any
    encoder: Network
    training: bool

    def __call__(self, obs: TensorStructure | None = None, **inputs: tf.Tensor) -> Any:
        encoded = {} if obs is None else self.encoder.encode_obs(obs)
        model_inputs = {**encoded, **inputs}
        if not model_inputs:
            return self.model.call()
        return call_model(self.model, model_inputs, training=self.training)
