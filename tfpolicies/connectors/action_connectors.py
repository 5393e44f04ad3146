"""Connectors that convert a policy's outputs to elements of the action space."""

from __future__ import annotations

import abc

import numpy as np

from tfpolicies.connectors.connector import ActionConnector, ActionStep, register_connector
from tfpolicies.errors import UsageError
from tfpolicies.models.action_mapping import ActionMapping
from tfpolicies.models.spaces import Leaf, get_at_path, is_float_box, leaves, unflatten


class _LeafwiseActions(ActionConnector):
    """An action connector that treats each leaf of the action space separately."""

    def __call__(self, step: ActionStep) -> ActionStep:
        arrays = []
        for leaf in leaves(self.space):
            try:
                actions = np.asarray(get_at_path(step.actions, leaf.path))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise UsageError(
                    _make_mismatch_message(leaf, type(step.actions).__name__)
                ) from error
            if actions.shape[1:] != leaf.shape or actions.ndim == 0:
                raise UsageError(_make_mismatch_message(leaf, f"shape {actions.shape}"))
            arrays.append(self._map_leaf(leaf, actions))
        return step._replace(actions=unflatten(self.space, arrays))

    @abc.abstractmethod
    def _map_leaf(self, leaf: Leaf, actions: np.ndarray) -> np.ndarray:
        """Returns the mapped actions `[N, *leaf.shape]` of one leaf."""


@register_connector
class ClipActions(_LeafwiseActions):
    """Clips float Boxes of actions to their bounds; other leaves stay unchanged."""

    def _map_leaf(self, leaf: Leaf, actions: np.ndarray) -> np.ndarray:
        if not is_float_box(leaf.space):
            return actions
        return ActionMapping(leaf.space, normalize=False, clip=True).leaf_to_env(leaf, actions)


@register_connector
class UnsquashActions(_LeafwiseActions):
    """Maps normalized actions into the action space, as a policy with `normalize_actions` does.

    Float Boxes: [-1, 1] becomes [low, high] if both bounds are finite, and actions are clipped to
    finite bounds. Discrete and MultiDiscrete: `start` is added. Integer Boxes: `low` is added if it
    is finite.
    """

    def _map_leaf(self, leaf: Leaf, actions: np.ndarray) -> np.ndarray:
        return ActionMapping(leaf.space, normalize=True, clip=False).leaf_to_env(leaf, actions)


def _make_mismatch_message(leaf: Leaf, received: str) -> str:
    shape = ", ".join(("N", *map(str, leaf.shape)))
    where = f" at {'/'.join(leaf.path)!r}" if leaf.path else ""
    return (
        f"Actions must be nested as the action space, with arrays [{shape}]{where}, but got "
        f"{received}. Give one action a batch axis."
    )
