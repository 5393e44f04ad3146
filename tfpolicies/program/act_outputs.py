"""The outputs of acting: names, shapes and dtypes, and their packing into few tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.models.ports import PolicyPort, make_leaf_ports
from tfpolicies.program.functions import ActOutputs
from tfpolicies.program.spec import ProgramSpec

_FLOAT = np.dtype(np.float32)


class ActOutputLayout(NamedTuple):
    """The outputs of acting of one Program.

    Attributes:
        actions: a port per leaf of the action space, normalised.
        env_actions: the same, as the environment takes them.
        num_dist_inputs: the number of distribution inputs.
        has_values: whether values are estimated.
        states: the recurrent state, one port per tensor.
        extras: the outputs that the policy class adds.
        extra_names: their names.
        shares_actions: whether the environment takes the policy's actions unchanged.
    """

    actions: tuple[PolicyPort, ...]
    env_actions: tuple[PolicyPort, ...]
    num_dist_inputs: int
    has_values: bool
    states: tuple[PolicyPort, ...]
    extras: tuple[PolicyPort, ...]
    extra_names: tuple[str, ...]
    shares_actions: bool

    @classmethod
    def from_spec(
        cls, spec: ProgramSpec, states: Sequence[PolicyPort], extras: Sequence[PolicyPort]
    ) -> ActOutputLayout:
        env_actions = make_leaf_ports("env_actions", spec.action_leaves)
        env_actions = tuple(
            port._replace(dtype=np.dtype(leaf.space.dtype))
            for port, leaf in zip(env_actions, spec.action_leaves, strict=True)
        )
        return cls(
            make_leaf_ports("actions", spec.action_leaves),
            env_actions,
            spec.dist_class.num_inputs,
            spec.has_values,
            tuple(p._replace(name=p.name.replace("_in_", "_out_")) for p in states),
            tuple(extras),
            tuple(port.name for port in extras),
            spec.action_mapping.is_identity,
        )

    def get_ports(self) -> list[PolicyPort]:
        fixed = [PolicyPort("logp", (), _FLOAT), PolicyPort("prob", (), _FLOAT)]
        fixed.append(PolicyPort("dist_inputs", (self.num_dist_inputs,), _FLOAT))
        values = [PolicyPort("values", (), _FLOAT)] if self.has_values else []
        return [*self.actions, *self.env_actions, *fixed, *values, *self.states, *self.extras]

    def flatten(self, outputs: ActOutputs) -> list[Any]:
        floats = [outputs.logp, outputs.prob, outputs.dist_inputs]
        values = [] if outputs.values is None else [outputs.values]
        extras = [outputs.extras[name] for name in self.extra_names]
        head = [*outputs.actions, *outputs.env_actions]
        return [*head, *floats, *values, *outputs.states, *extras]

    def unflatten(self, arrays: Sequence[Any]) -> ActOutputs:
        count = len(self.actions)
        fixed = 2 * count
        states = fixed + 3 + self.has_values
        extras = states + len(self.states)
        logp, prob, dist_inputs = arrays[fixed : fixed + 3]
        return ActOutputs(
            list(arrays[:count]),
            list(arrays[count:fixed]),
            logp,
            prob,
            dist_inputs,
            arrays[states - 1] if self.has_values else None,
            list(arrays[states:extras]),
            dict(zip(self.extra_names, arrays[extras:], strict=True)),
        )

    def pack(self, outputs: ActOutputs) -> list[tf.Tensor]:
        """Returns few tensors: actions, those of the environment if different, and all floats."""
        count, flat = len(self.actions), self.flatten(outputs)
        acted, states = count if self.shares_actions else 2 * count, 2 * count + 3 + self.has_values
        floats = [x if x.shape.rank == 2 else x[:, None] for x in flat[2 * count : states]]
        return [*flat[:acted], tf.concat(floats, axis=1), *flat[states:]]

    def unpack(self, arrays: Sequence[np.ndarray]) -> ActOutputs:
        """Inverts `pack`, on NumPy arrays with any axes before the rows."""
        count = len(self.actions)
        acted = count if self.shares_actions else 2 * count
        floats = arrays[acted]
        columns = [floats[..., 0], floats[..., 1], floats[..., 2 : 2 + self.num_dist_inputs]]
        if self.has_values:
            columns.append(floats[..., -1])
        env_actions = arrays[acted - count : acted]
        return self.unflatten([*arrays[:count], *env_actions, *columns, *arrays[acted + 1 :]])

    def select_state(self, outputs: ActOutputs, index: int, rows: int) -> ActOutputs:
        """Returns the first `rows` rows of one of P stacked states, as views."""
        return self.unflatten([array[index, :rows] for array in self.flatten(outputs)])

    def find_difference(
        self, outputs: ActOutputs, reference: ActOutputs, tolerance: float
    ) -> tuple[str, float] | None:
        """Returns name and largest difference of the first output that differs, or None.

        Equal infinities do not differ. `prob` is compared to `exp(logp)` of the same outputs, up to
        the largest float32: it magnifies the rounding of large densities. The tolerance is relative
        to an output's largest number, or to 1.
        """
        largest = np.finfo(np.float32).max
        with np.errstate(over="ignore"):
            expected = np.minimum(np.exp(outputs.logp.astype(np.float64)), largest)
        outputs = outputs._replace(prob=np.minimum(outputs.prob, largest))
        reference = reference._replace(prob=expected)
        pairs = zip(self.get_ports(), self.flatten(outputs), self.flatten(reference), strict=True)
        for port, a, b in pairs:
            with np.errstate(invalid="ignore"):
                differences = np.where(a == b, 0.0, np.abs(a.astype(np.float64) - b))
            difference = float(np.max(differences, initial=0.0))
            scale = float(np.max(np.abs(b), where=np.isfinite(b), initial=1.0))
            if not difference <= tolerance * scale:
                return port.name, difference
        return None
