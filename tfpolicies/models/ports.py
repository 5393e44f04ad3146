"""The inputs of a policy as named ports, in one fixed order.

A port is a named input or output of a policy. First come the leaves of the observation space
(`obs`, `obs_<path>`, and `action_mask` for a mask), then the views that the model reads, such as
the previous action and reward, then the memory `state_in_<i>`. Runtimes, samplers and exports use
these names and this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.base.type_aliases import Structure, TensorStructure
from tfpolicies.models.preprocessing import encode, encode_action, get_encoded_shape
from tfpolicies.models.spaces import (
    MASK,
    OBSERVATIONS,
    Leaf,
    Leaves,
    action_leaves,
    get_at_path,
    has_mask,
    leaves,
    port_names,
    unflatten,
)

SEQ_LENS = "seq_lens"
NOISE = "noise"
"""The input of a noisy network, `[B, k]`, or `[1, k]` for all rows; zeros give mean weights."""
OBS, ACTIONS, REWARDS = "obs", "actions", "rewards"
PREVIOUS_STEP_SOURCES = {"prev_actions": ACTIONS, "prev_rewards": REWARDS}
"""The views of one step back, which are arguments of `compute_actions`."""
REWARD_SPACE = spaces.Box(-np.inf, np.inf, (), np.float32)
"""The space of a reward."""


Arrays: TypeAlias = Sequence[np.ndarray]


class PolicyPort(NamedTuple):
    """One named input or output of a policy."""

    name: str
    shape: tuple[int, ...]  # of one row; of one sequence for the memory
    dtype: np.dtype
    path: tuple[str, ...] = ()  # of a leaf in its space

    @property
    def tensor_spec(self) -> tf.TensorSpec:
        """The `tf.TensorSpec`, with a dynamic batch axis."""
        return tf.TensorSpec([None, *self.shape], self.dtype, name=self.name)

    def zeros(self, rows: int) -> np.ndarray:
        """Returns a batch of zeros, `[rows, *shape]`."""
        return np.zeros((rows, *self.shape), self.dtype)


@dataclass(frozen=True)
class ViewInput:
    """Steps of a collected column, relative to the current one; zeros before an episode.

    Attributes:
        name: of the view, and of its column in a batch.
        source: the collected column: `obs`, `actions` or `rewards`.
        space: the space of one step of it, without an action mask.
        shifts: the steps: 0 is the current one, which only `obs` has.
        is_window: whether rows have an axis of steps, `[N, shifts, ...]`; else there is one step.
    """

    name: str
    source: str
    space: spaces.Space
    shifts: tuple[int, ...] = (-1,)
    is_window: bool = False

    @cached_property
    def source_leaves(self) -> tuple[Leaf, ...]:
        return action_leaves(self.space) if self.source == ACTIONS else leaves(self.space)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of a row: those of a step, with the axis of steps for a window."""
        lead = (len(self.shifts),) if self.is_window else ()
        return tuple(leaf._replace(shape=(*lead, *leaf.shape)) for leaf in self.source_leaves)

    @cached_property
    def ports(self) -> tuple[PolicyPort, ...]:
        return make_leaf_ports(self.name, self.leaves)

    @property
    def depth(self) -> int:
        """The number of steps before the current one that the view reaches back."""
        return -min(self.shifts)

    @cached_property
    def next_step_view(self) -> ViewInput | None:
        """The view to store for computing the next step's view; None if this view suffices.

        The next step has at shift -3 the value that this one has at -2: the range
        `[-3, -2, -1]` contains it, `[-3, -1]` does not.
        """
        next_shifts = [shift + 1 for shift in self.shifts if shift < -1]
        if set(next_shifts) <= set(self.shifts):
            return None
        shifts = tuple(min(shift + 1, -1) for shift in self.shifts)
        return ViewInput(f"new_{self.name}", self.source, self.space, shifts, self.is_window)

    def flatten(self, column: Structure | TensorStructure) -> list[Any]:
        """Returns the leaves of a nested column."""
        return [get_at_path(column, leaf.path) for leaf in self.leaves]

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        return unflatten(self.space, arrays)

    def advance(self, views: Arrays, current: Arrays, next_obs: Arrays) -> list[np.ndarray]:
        """Returns the view one step after the given rows, a leaf `[R, ...]` each.

        Args:
            views: leaves `[R, ...]` of the rows' view, or of `next_step_view` if there is one.
            current: leaves of the source at the rows.
            next_obs: leaves of the next observations.
        """
        positions = {shift: i for i, shift in enumerate(self.shifts)}

        def step(i: int, position: int, shift: int) -> np.ndarray:
            if shift >= -1:
                return current[i] if shift else next_obs[i]
            position = position if self.next_step_view else positions[shift + 1]
            return views[i][:, position] if self.is_window else views[i]

        arrays = []
        for i in range(len(self.leaves)):
            steps = [step(i, place, shift) for place, shift in enumerate(self.shifts)]
            arrays.append(np.stack(steps, axis=1) if self.is_window else steps[0])
        return arrays

    def get_encoded_shapes(self) -> list[tuple[int, ...]]:
        if self.source == REWARDS:
            return [self.leaves[0].shape or (1,)]
        lead = (len(self.shifts),) if self.is_window else ()
        return [(*lead, *get_encoded_shape(leaf)) for leaf in self.source_leaves]

    def encode_view(
        self, arrays: Sequence[tf.Tensor], normalize: Callable[[int, tf.Tensor], tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Encodes rows of each leaf; returns them by port.

        Args:
            arrays: a leaf `[N, ...]` each.
            normalize: normalises an encoded leaf of the observation, given its index.
        """
        encoded = {}
        for i, (port, shape) in enumerate(zip(self.ports, self.get_encoded_shapes(), strict=True)):
            steps, leaf = arrays[i], self.source_leaves[i]
            if self.source == REWARDS:
                encoded[port.name] = steps if self.is_window else steps[:, None]
                continue
            if self.is_window:
                steps = tf.reshape(steps, [-1, *leaf.shape])
            is_obs = self.source == OBS
            steps = normalize(i, encode(leaf, steps)) if is_obs else encode_action(leaf, steps)
            if self.is_window:
                steps = tf.ensure_shape(tf.reshape(steps, [-1, *shape]), [None, *shape])
            encoded[port.name] = steps
        return encoded


def make_previous_step_views(space: spaces.Space) -> tuple[ViewInput, ViewInput]:
    """Returns the views of the previous action, of this space, and of the previous reward."""
    actions, rewards = PREVIOUS_STEP_SOURCES
    return ViewInput(actions, ACTIONS, space), ViewInput(rewards, REWARDS, REWARD_SPACE)


def get_model_space(space: spaces.Space) -> spaces.Space:
    """Returns the part of an observation space that a model sees: all except an action mask."""
    return space[OBSERVATIONS] if has_mask(space) else space  # type: ignore[index]


def get_unmasked_leaf_indices(space: spaces.Space) -> list[int]:
    """Returns the indices of the leaves of an observation space that are not an action mask."""
    has_action_mask = has_mask(space)
    return [
        i for i, leaf in enumerate(leaves(space)) if not (has_action_mask and leaf.path[0] == MASK)
    ]


def get_model_leaves(space: spaces.Space) -> tuple[Leaf, ...]:
    """Returns the leaves that a model sees: all except the mask, with their paths below it.

    >>> box, mask = spaces.Box(-1, 1, (3,)), spaces.MultiBinary(2)
    >>> [leaf.path for leaf in get_model_leaves(spaces.Dict(observations=box, action_mask=mask))]
    [()]
    """
    return leaves(get_model_space(space))


@dataclass(frozen=True)
class InputPorts:
    """The inputs of policies with the same program.

    Attributes:
        space: the observation space.
        views: the views that the model reads besides the current observation and its memory.
        memory: the shapes of its state tensors.
        noise_size: the number of noise values per row of a noisy network; they are not a port,
            but the first columns of the noise for acting.
    """

    space: spaces.Space
    views: tuple[ViewInput, ...] = ()
    memory: tuple[tuple[int, ...], ...] = ()
    noise_size: int = 0

    @cached_property
    def obs_leaves(self) -> tuple[Leaf, ...]:
        """The leaves of the observation space, masks included."""
        return leaves(self.space)

    @cached_property
    def is_mask(self) -> tuple[bool, ...]:
        """For each observation leaf, whether it is an action mask."""
        has_action_mask = has_mask(self.space)
        return tuple(has_action_mask and leaf.path[0] == MASK for leaf in self.obs_leaves)

    @cached_property
    def obs(self) -> tuple[PolicyPort, ...]:
        """One port per observation leaf."""
        names = iter(port_names(get_model_leaves(self.space), "obs"))
        masks = [
            leaf._replace(path=leaf.path[1:])
            for leaf, mask in zip(self.obs_leaves, self.is_mask, strict=True)
            if mask
        ]
        mask_names = iter(port_names(masks, MASK))
        return tuple(
            PolicyPort(next(mask_names if mask else names), leaf.shape, leaf.dtype, leaf.path)
            for leaf, mask in zip(self.obs_leaves, self.is_mask, strict=True)
        )

    @cached_property
    def view_ports(self) -> tuple[PolicyPort, ...]:
        return tuple(port for view in self.views for port in view.ports)

    @cached_property
    def states(self) -> tuple[PolicyPort, ...]:
        """The memory, one port per state tensor."""
        dtype = np.dtype(np.float32)
        return tuple(
            PolicyPort(f"state_in_{i}", shape, dtype) for i, shape in enumerate(self.memory)
        )

    @cached_property
    def all(self) -> tuple[PolicyPort, ...]:
        return (*self.obs, *self.view_ports, *self.states)

    @property
    def is_recurrent(self) -> bool:
        return bool(self.memory)

    def split(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits inputs in the order of `all` into observations, views and memory."""
        num_obs, num_obs_and_views = len(self.obs), len(self.obs) + len(self.view_ports)
        return (
            list(inputs[:num_obs]),
            list(inputs[num_obs:num_obs_and_views]),
            list(inputs[num_obs_and_views:]),
        )


def make_leaf_ports(prefix: str, space_leaves: Leaves) -> tuple[PolicyPort, ...]:
    """Returns one port per leaf: `prefix`, or `prefix_<path>`."""
    names = port_names(space_leaves, prefix)
    return tuple(
        PolicyPort(name, leaf.shape, leaf.dtype, leaf.path)
        for name, leaf in zip(names, space_leaves, strict=True)
    )
