"""The inputs of a policy as named ports, in one fixed order.

First come the leaves of the observation space (`obs`, `obs_<path>`, and `action_mask` for a mask),
then the previous action and reward of models that read them, then the memory `state_in_<i>`.
Runtimes, samplers and exports all use these names and this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.models.spaces import MASK, OBSERVATIONS, Leaf, has_mask, leaves, port_names

SEQ_LENS = "seq_lens"


class Port(NamedTuple):
    """One named input or output of a policy."""

    name: str
    shape: tuple[int, ...]  # of one row; of one sequence for the memory
    dtype: np.dtype
    path: tuple[str, ...] = ()  # where a leaf lies in its space

    @property
    def tensor_spec(self) -> tf.TensorSpec:
        """The tensor with its dynamic batch."""
        return tf.TensorSpec([None, *self.shape], self.dtype, name=self.name)

    def zeros(self, rows: int) -> np.ndarray:
        """Returns a batch of zeros, `[rows, *shape]`."""
        return np.zeros((rows, *self.shape), self.dtype)


def model_leaves(space: spaces.Space) -> tuple[Leaf, ...]:
    """Returns the leaves that a model sees: all but the mask, with their paths below it.

    >>> box, mask = spaces.Box(-1, 1, (3,)), spaces.MultiBinary(2)
    >>> [leaf.path for leaf in model_leaves(spaces.Dict(observations=box, action_mask=mask))]
    [()]
    """
    if has_mask(space):
        space = space[OBSERVATIONS]  # type: ignore[index]
    return leaves(space)


@dataclass(frozen=True)
class InputPorts:
    """The inputs of one kind of policy.

    Attributes:
        space: the observation space.
        action_leaves: the leaves of the action space.
        reads_actions: whether the model reads the previous action.
        reads_rewards: whether it reads the previous reward.
        memory: the shapes of its state tensors.
    """

    space: spaces.Space
    action_leaves: tuple[Leaf, ...]
    reads_actions: bool = False
    reads_rewards: bool = False
    memory: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def obs_leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the observation space, masks included."""
        return leaves(self.space)

    @cached_property
    def is_mask(self) -> tuple[bool, ...]:
        """For each observation leaf, whether it is an action mask."""
        masked = has_mask(self.space)
        return tuple(masked and leaf.path[0] == MASK for leaf in self.obs_leaves)

    @cached_property
    def obs(self) -> tuple[Port, ...]:
        """One port per observation leaf."""
        names = iter(port_names(model_leaves(self.space), "obs"))
        masks = [
            leaf._replace(path=leaf.path[1:])
            for leaf, mask in zip(self.obs_leaves, self.is_mask, strict=True)
            if mask
        ]
        mask_names = iter(port_names(masks, MASK))
        return tuple(
            Port(next(mask_names if mask else names), leaf.shape, leaf.dtype, leaf.path)
            for leaf, mask in zip(self.obs_leaves, self.is_mask, strict=True)
        )

    @cached_property
    def prev(self) -> tuple[Port, ...]:
        """The previous action's leaves and the previous reward, where the model reads them."""
        ports: tuple[Port, ...] = ()
        if self.reads_actions:
            ports = action_ports("prev_actions", self.action_leaves)
        if self.reads_rewards:
            ports += (Port("prev_rewards", (), np.dtype(np.float32)),)
        return ports

    @cached_property
    def states(self) -> tuple[Port, ...]:
        """The memory, one port per state tensor."""
        kind = np.dtype(np.float32)
        return tuple(Port(f"state_in_{i}", shape, kind) for i, shape in enumerate(self.memory))

    @cached_property
    def all(self) -> tuple[Port, ...]:
        """All inputs of acting, in order."""
        return (*self.obs, *self.prev, *self.states)

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has a memory."""
        return bool(self.memory)

    def split(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits inputs in the order of `all` into observations, previous ones and memory."""
        first, second = len(self.obs), len(self.obs) + len(self.prev)
        return list(inputs[:first]), list(inputs[first:second]), list(inputs[second:])


def action_ports(prefix: str, action_leaves: Sequence[Leaf]) -> tuple[Port, ...]:
    """Returns one port per action leaf: `prefix`, or `prefix_<path>`."""
    names = port_names(action_leaves, prefix)
    return tuple(
        Port(name, leaf.shape, leaf.dtype, leaf.path)
        for name, leaf in zip(names, action_leaves, strict=True)
    )
