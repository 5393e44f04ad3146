"""The Keras optimizers of one Program: one for each network, or for each of several losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.program.networks import NetworkPlan, ResidentNetwork
from tfpolicies.program.traced_arguments import TapeOptimizer, order_gradients


class NetworkOptimizer(NamedTuple):
    """One optimizer and its variables."""

    network: str
    plan: NetworkPlan
    optimizer: Any
    variables: list[Any]  # for which it was built, all of one network


class Optimizers:
    """The optimizers of one Program, each built for the trainable variables of its network.

    A network for learning only whose variables are not trainable has no optimizer.

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
        self._items: list[NetworkOptimizer] = []
        trained = {
            name: network
            for name, network in networks.items()
            if name == "model" or network.model.trainable_variables
        }
        self.has_several = len(trained) > 1
        for name, (plan, model, _) in trained.items():
            result, variables = make(), list(model.trainable_variables)
            is_list = isinstance(result, list | tuple)
            if is_list and len(trained) > 1:
                raise ConfigError(
                    f"`optimizer` returned a list of {len(result)}, but it is called for each of "
                    f"the {len(trained)} networks. Return one optimizer."
                )
            self.has_several |= is_list
            for optimizer in result if is_list else [result]:
                optimizer.build(variables)
                self._items.append(NetworkOptimizer(name, plan, optimizer, variables))
        self.skips_updates = any(item.plan.every != 1 for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def variables(self) -> dict[str, list[Any]]:
        """The variables of the optimizers, in order, by the name of their network."""
        variables: dict[str, list[Any]] = {}
        for item in self._items:
            variables.setdefault(item.network, []).extend(item.optimizer.variables)
        return variables

    @property
    def network_names(self) -> list[str]:
        return [item.network for item in self._items]

    @property
    def class_names(self) -> dict[str, list[str]]:
        """The names of the optimizers' classes, by the name of their network."""
        names: dict[str, list[str]] = {}
        for item in self._items:
            names.setdefault(item.network, []).append(type(item.optimizer).__name__)
        return names

    @property
    def gradient_variables(self) -> list[Any]:
        """The variable of each gradient: the trainable ones of each loss's network."""
        return [variable for item in self._items for variable in item.variables]

    def get_active(self, update: int) -> list[bool]:
        """Returns for each optimizer whether it applies an update, counted from 0."""
        return [update % item.plan.every == 0 for item in self._items]

    def set_learning_rates(self, rates: Mapping[str, tf.Tensor]) -> None:
        for item in self._items:
            item.optimizer.learning_rate.assign(rates[item.plan.lr])

    def match_losses(self, loss: tf.Tensor | Sequence[tf.Tensor]) -> list[Any]:
        """Returns the loss of each optimizer; a single loss is used for all networks."""
        is_list = isinstance(loss, list | tuple)
        losses = list(loss) if is_list else [loss]
        if not is_list and len(set(self.network_names)) == len(self._items):
            losses *= len(self._items)
        if len(losses) != len(self._items) or is_list != (is_list and self.has_several):
            actual = f"a list of {len(loss)}" if is_list else "one loss"
            expected = f"a list of {len(self._items)}" if self.has_several else "one"
            raise ConfigError(
                f"`loss` returned {actual}, but `optimizer` {expected}. Return one loss for each "
                "optimizer, as a list in their order; a single one for a single optimizer."
            )
        return losses

    def make_tape_optimizers(
        self, tape: tf.GradientTape | None, active: Sequence[Any] | None = None
    ) -> list[TapeOptimizer]:
        """Returns the `optimizer` arguments of hooks, one for each optimizer.

        The tape is None if gradients are given; `active` has 0/1 flags of the optimizers that step.
        """
        flags = [None] * len(self._items) if active is None else active
        return [
            TapeOptimizer(tape, item.optimizer, item.variables, flag)
            for item, flag in zip(self._items, flags, strict=True)
        ]

    def list_or_single(self, items: list[Any]) -> Any:
        """Returns a hook argument with an item for each loss: a list only for several losses."""
        return items if self.has_several else items[0]

    def order_gradients(self, pairs: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the gradients of pairs in the order of `differentiated`, zeros if missing."""
        parts = zip(pairs if self.has_several else [pairs], self._items, strict=True)
        gradients = [x for part, item in parts for x in order_gradients(part, item.variables)]
        return [tf.convert_to_tensor(x) for x in gradients]

    def make_apply_arguments(
        self, gradients: Sequence[tf.Tensor], active: tf.Tensor | None = None
    ) -> tuple[Any, Any]:
        """Returns `apply_gradients_fn`'s arguments for gradients in `differentiated`'s order."""
        gradient_iterator, pairs = iter(gradients), []
        for item in self._items:
            pairs.append([(next(gradient_iterator), variable) for variable in item.variables])
        return self.list_or_single(self.make_tape_optimizers(None, active)), self.list_or_single(
            pairs
        )


def strip_variables(pairs: Sequence[Any]) -> list[Any]:
    """Returns the gradients of pairs, nested as the pairs are."""
    return [strip_variables(x) if isinstance(x, list) else x[0] for x in pairs]
