"""How the outputs of acting become an `ActionBatch`: the only place where they do."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
import numpy as np

from tfpolicies.models.spaces import nest
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.program.functions import ActOutputs
from tfpolicies.program.outputs import ActLayout


class Results:
    """Picks, names and nests what acting of one Program gives.

    Args:
        layout: the outputs.
        space: the action space.
    """

    def __init__(self, layout: ActLayout, space: gym.Space) -> None:
        self._space = space
        self._actions = len(layout.actions)
        self._flat = self._actions == 1 and not layout.actions[0].path
        self._first_extra = self._actions + len(layout.states)
        names = ["action_logp", "action_prob", "action_dist_inputs"]
        names += [port.name for port in layout.extras]
        self._names = [*names, "vf_preds"] if layout.with_value else names

    def arrays(self, outputs: ActOutputs, *, explore: bool, own: bool) -> list[np.ndarray]:
        """Returns the arrays that belong into an `ActionBatch`, `[..., N, *shape]` each.

        Args:
            outputs: NumPy arrays.
            explore: whether the actions were sampled; else their log-probabilities are 0.
            own: whether the outputs are the caller's own; else they are copied.
        """
        found = [*outputs.actions, *outputs.states]
        found += [outputs.logp, outputs.prob, outputs.dist_inputs, *outputs.extras.values()]
        if outputs.values is not None:
            found.append(outputs.values)
        if not own:
            found = [*map(np.ndarray.copy, found)]
        if not explore:
            found[self._first_extra][...], found[self._first_extra + 1][...] = 0.0, 1.0
        return found

    def batch(self, arrays: Sequence[np.ndarray]) -> ActionBatch:
        """Returns the `ActionBatch` of N rows.

        Args:
            arrays: `[N, *shape]` each, in the order of `arrays`.
        """
        count, first = self._actions, self._first_extra
        actions = arrays[0] if self._flat else nest(self._space, arrays[:count])
        extras = dict(zip(self._names, arrays[first:], strict=True))
        return ActionBatch(actions, [*arrays[count:first]], extras)
