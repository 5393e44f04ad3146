"""One Keras optimizer, or one for each of several losses, behind one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.program.view import TapeOptimizer

FLAG = "_tf_policy_handles_more_than_one_loss"


class Optimizers:
    """The optimizers of one Program, built for all trainable variables.

    Args:
        made: what `optimizer()` of the policy class returned: an optimizer, or a list of them.
        variables: the trainable variables.
        allowed: whether the config allows more than one loss.

    Attributes:
        are_several: whether there is a list of them, and so of losses.

    Raises:
        ConfigError: for a list that the config does not allow.
    """

    def __init__(self, made: Any, variables: Sequence[Any], *, allowed: bool) -> None:
        self.are_several = isinstance(made, list | tuple)
        if self.are_several and not allowed:
            raise ConfigError(
                f"`optimizer` returned {len(made)} optimizers; set "
                f"`config.experimental({FLAG}=True)` for a class with several losses."
            )
        self._all = list(made) if self.are_several else [made]
        self._trained = list(variables)
        for optimizer in self._all:
            optimizer.build(self._trained)

    @property
    def variables(self) -> list[Any]:
        """The variables of all optimizers, in order."""
        return [variable for optimizer in self._all for variable in optimizer.variables]

    @property
    def differentiated(self) -> list[Any]:
        """The variable of each gradient: the trainable ones, once for each loss."""
        return self._trained * len(self._all)

    def set_learning_rate(self, value: tf.Tensor) -> None:
        """Sets the learning rate of all of them."""
        for optimizer in self._all:
            optimizer.learning_rate.assign(value)

    def check(self, loss: Any) -> None:
        """Raises a `ConfigError` unless there is one optimizer for each loss."""
        listed = isinstance(loss, list | tuple)
        if listed != self.are_several or (listed and len(loss) != len(self._all)):
            given = f"a list of {len(loss)}" if listed else "one loss"
            wanted = f"a list of {len(self._all)}" if self.are_several else "one"
            raise ConfigError(
                f"`loss` returned {given}, but `optimizer` {wanted}. Return one optimizer for each "
                "loss, both as lists or neither."
            )

    def on_tape(self, tape: tf.GradientTape) -> Any:
        """Returns what hooks get as `optimizer`: a `TapeOptimizer`, or a list of them."""
        found = [TapeOptimizer(tape, optimizer, self._trained) for optimizer in self._all]
        return found if self.are_several else found[0]

    def by_variable(self, pairs: Any) -> list[tf.Tensor]:
        """Returns the gradients of `(gradient, variable)` pairs in the order of `differentiated`.

        Args:
            pairs: a list of them; for several losses, a list of lists. Missing ones become zeros.
        """
        gradients = []
        for part in pairs if self.are_several else [pairs]:
            known = {id(variable): gradient for gradient, variable in part}
            for variable in self._trained:
                gradient = known.get(id(variable))
                zeros = gradient is None
                gradients.append(
                    tf.zeros(variable.shape) if zeros else tf.convert_to_tensor(gradient)
                )
        return gradients

    def with_pairs(self, gradients: Sequence[tf.Tensor]) -> tuple[Any, Any]:
        """Returns `apply_gradients_fn`'s arguments for gradients in the order of `differentiated`.

        That is what hooks get as `optimizer`, without a tape, and the `(gradient, variable)` pairs;
        for several losses both are lists.
        """
        count, trained = len(self._trained), self._trained
        optimizers = [TapeOptimizer(None, optimizer, trained) for optimizer in self._all]
        starts = (i * count for i in range(len(self._all)))
        pairs = [list(zip(gradients[i : i + count], trained, strict=True)) for i in starts]
        return (optimizers, pairs) if self.are_several else (optimizers[0], pairs[0])


def gradients_of(pairs: Any) -> list[Any]:
    """Returns pairs without their variables, nested as they are."""
    return [gradients_of(x) if isinstance(x, list) else x[0] for x in pairs]
