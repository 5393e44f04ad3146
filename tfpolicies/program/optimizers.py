"""The Keras optimizers of one Program: one for each network, or for each of several losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.program.networks import NetworkPlan, ResidentNetwork
from tfpolicies.program.view import TapeOptimizer, by_variable


class Learner(NamedTuple):
    """One optimizer and its variables."""

    network: str
    plan: NetworkPlan
    optimizer: Any
    variables: list[Any]  # for which it was built, all of one network


class Optimizers:
    """The optimizers of one Program, each built for the trainable variables of its network.

    Args:
        make: returns a new optimizer; it is called once for each network. If there is only one
            network, it may return a list of them, one for each of several losses.
        networks: by name.

    Attributes:
        has_several: whether there is more than one, so that hooks get lists.
        skips_updates: whether some of them skip updates.

    Raises:
        ConfigError: for a list although there are several networks.
    """

    def __init__(self, make: Callable[[], Any], networks: Mapping[str, ResidentNetwork]) -> None:
        self._all: list[Learner] = []
        self.are_several = len(networks) > 1
        for name, (plan, model, _) in networks.items():
            made, variables = make(), list(model.trainable_variables)
            listed = isinstance(made, list | tuple)
            if listed and len(networks) > 1:
                raise ConfigError(
                    f"`optimizer` returned a list of {len(made)}, but it is called for each of the "
                    f"{len(networks)} networks. Return one optimizer."
                )
            self.are_several |= listed
            for optimizer in made if listed else [made]:
                optimizer.build(variables)
                self._all.append(Learner(name, plan, optimizer, variables))
        self.skip = any(each.plan.every != 1 for each in self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def variables(self) -> dict[str, list[Any]]:
        """The variables of the optimizers, in order, by the name of their network."""
        found: dict[str, list[Any]] = {}
        for each in self._all:
            found.setdefault(each.network, []).extend(each.optimizer.variables)
        return found

    @property
    def network_names(self) -> list[str]:
        return [each.network for each in self._all]

    @property
    def differentiated(self) -> list[Any]:
        """The variable of each gradient: the trainable ones of each loss's network."""
        return [variable for each in self._all for variable in each.variables]

    def taken(self, update: int) -> list[bool]:
        """Returns for each optimizer whether it applies an update, counted from 0."""
        return [update % each.plan.every == 0 for each in self._all]

    def set_learning_rates(self, rates: Mapping[str, tf.Tensor]) -> None:
        for each in self._all:
            each.optimizer.learning_rate.assign(rates[each.plan.lr])

    def losses(self, loss: tf.Tensor | Sequence[tf.Tensor]) -> list[Any]:
        """Returns the loss of each optimizer; a single loss is used for all networks."""
        listed = isinstance(loss, list | tuple)
        found = list(loss) if listed else [loss]
        if not listed and len(set(self.network_names)) == len(self._all):
            found *= len(self._all)
        if len(found) != len(self._all) or listed != (listed and self.are_several):
            given = f"a list of {len(loss)}" if listed else "one loss"
            wanted = f"a list of {len(self._all)}" if self.are_several else "one"
            raise ConfigError(
                f"`loss` returned {given}, but `optimizer` {wanted}. Return one loss for each "
                "optimizer, as a list in their order; a single one for a single optimizer."
            )
        return found

    def on_tape(
        self, tape: tf.GradientTape | None, takes: Sequence[Any] | None = None
    ) -> list[TapeOptimizer]:
        """Returns the `optimizer` arguments of hooks, one for each optimizer; see `hooked`.

        The tape is None if gradients are given; `active` has 0/1 flags of the optimizers that step.
        """
        flags = [None] * len(self._all) if takes is None else takes
        return [
            TapeOptimizer(tape, each.optimizer, each.variables, flag)
            for each, flag in zip(self._all, flags, strict=True)
        ]

    def hooked(self, items: list[Any]) -> Any:
        """Returns a hook argument with an item for each loss: a list only for several losses."""
        return items if self.are_several else items[0]

    def by_variable(self, pairs: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the gradients of pairs in the order of `differentiated`, zeros if missing."""
        parts = zip(pairs if self.are_several else [pairs], self._all, strict=True)
        gradients = [x for part, each in parts for x in by_variable(part, each.variables)]
        return [tf.convert_to_tensor(x) for x in gradients]

    def with_pairs(
        self, gradients: Sequence[tf.Tensor], takes: tf.Tensor | None = None
    ) -> tuple[Any, Any]:
        """Returns `apply_gradients_fn`'s arguments for gradients in `differentiated`'s order."""
        given, pairs = iter(gradients), []
        for each in self._all:
            pairs.append([(next(given), variable) for variable in each.variables])
        return self.hooked(self.on_tape(None, takes)), self.hooked(pairs)


def gradients_of(pairs: Sequence[Any]) -> list[Any]:
    """Returns the gradients of pairs, nested as the pairs are."""
    return [gradients_of(x) if isinstance(x, list) else x[0] for x in pairs]
