"""The `model` that Keras callbacks see: a policy with the interface of a Keras model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import keras
import numpy as np

from tfpolicies.errors import UsageError

_TRAINING_METHODS = ("compile", "evaluate", "fit", "train_on_batch", "test_on_batch")


class PolicyWeights(list[np.ndarray]):
    """The weights of a policy as a list, with the statistics of its filters.

    Attributes:
        filters: the filters' part of `Policy.get_state`; empty without a filter.
    """

    filters: Mapping[str, Any]


class CallbackModel:
    """A policy as the `model` of Keras callbacks.

    Files are those of a plain Keras model, see `TFPolicy.to_keras`. Other attributes are those of
    `policy.model`, which is for reading only.

    Args:
        policy: a `TFPolicy`.
        learning_rates: hyperparameters that `optimizer.learning_rate` stands for; empty for all.

    Attributes:
        stop_training: ends training after the iteration if a callback sets it to True.
        optimizer: has the learning rate.
    """

    built = True

    def __init__(self, policy: Any, learning_rates: Sequence[str] = ()) -> None:
        self._policy = policy
        self.stop_training = False
        self.optimizer = CallbackOptimizer(policy, learning_rates)

    def get_weights(self) -> PolicyWeights:
        """Returns copies of the variables of all networks, without target networks."""
        weights = PolicyWeights(self._policy.get_weights(as_dict=False))
        state = self._policy.get_state() if self._policy.driver.filters else {}
        weights.filters = {name: state[name] for name in self._policy.driver.filters}
        return weights

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Sets what `get_weights` returned, or the variables of the network that acts.

        Target networks become equal to their sources.
        """
        filters = getattr(weights, "filters", {})
        if not filters:
            self._policy.set_weights(weights)
            return
        state = {**self._policy.get_state(), "weights": list(weights), **filters}
        state.pop("target_weights", None)
        self._policy.set_state(state)

    def save(self, filepath: str | PathLike[str], overwrite: bool = True, **kwargs: Any) -> None:
        """Writes the policy's network as a plain Keras model."""
        self._policy.to_keras().save(filepath, overwrite=overwrite, **kwargs)

    def save_weights(self, filepath: str | PathLike[str], overwrite: bool = True) -> None:
        """Writes the weights of the plain Keras model."""
        self._policy.to_keras().save_weights(filepath, overwrite=overwrite)

    def load_weights(self, filepath: str | PathLike[str], **kwargs: Any) -> None:
        """Sets the weights of the network that acts from a file of `save_weights`."""
        model = self._policy.to_keras()
        model.load_weights(filepath, **kwargs)
        self._policy.set_weights(_select_weights(model))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_policy", "jax_state_sync"):
            raise AttributeError(name)
        if name in _TRAINING_METHODS:
            raise UsageError(
                f"A callback called model.{name}, but its model is a policy, which `learn` trains. "
                "For a Keras model that you may train, use policy.to_keras()."
            )
        return getattr(self._policy.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._policy.model(*args, **kwargs)

    def __repr__(self) -> str:
        return f"CallbackModel({self._policy!r})"


def _select_weights(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(weight) for weight in model.get_weights()]


class AssignableRate(np.ndarray):
    """A learning rate, float32 `[]`, with the methods of a variable that Keras callbacks call."""

    _optimizer: CallbackOptimizer

    @classmethod
    def of_optimizer(cls, value: float, optimizer: CallbackOptimizer) -> AssignableRate:
        rate = np.asarray(value, np.float32).view(cls)
        rate._optimizer = optimizer
        return rate

    def assign(self, value: float) -> None:
        self._optimizer.learning_rate = value

    def numpy(self) -> np.float32:
        return np.float32(self)


class CallbackOptimizer:
    """The `optimizer` that Keras callbacks see: the learning rate of a policy.

    Args:
        policy: a `TFPolicy`.
        learning_rates: the hyperparameters that the rate stands for; empty for all.
    """

    def __init__(self, policy: Any, learning_rates: Sequence[str] = ()) -> None:
        self._policy = policy
        self._chosen = tuple(learning_rates)

    @property
    def iterations(self) -> int:
        """Gradient updates so far."""
        return int(self._policy.num_grad_updates)

    @property
    def learning_rate(self) -> AssignableRate:
        """The learning rate.

        Setting it changes the policy from the next update on. If it stands for several
        hyperparameters, it is the first, and the others change in proportion.

        Raises:
            UsageError: if the policy has several rates and none is chosen; on setting, also if a
                schedule sets it.
        """
        rate = self._policy.get_hyperparameter(self._get_names()[0])
        return AssignableRate.of_optimizer(rate, self)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.require_settable()
        names, rate = self._get_names(), float(keras.ops.convert_to_numpy(value))
        first = self._policy.get_hyperparameter(names[0])
        for name in names[1:]:
            other = self._policy.get_hyperparameter(name)
            self._policy.set_hyperparameter(name, other * rate / first if first else rate)
        self._policy.set_hyperparameter(names[0], rate)

    def require_settable(self) -> None:
        """Checks that the learning rate is unique, and that no schedule sets it.

        Raises:
            UsageError: if it does not.
        """
        config = self._policy.config
        for name in self._get_names():
            is_schedule = not isinstance(config.get(name), int | float | None)
            if is_schedule or config.get(f"{name}_schedule") is not None:
                setting = name if is_schedule else f"{name}_schedule"
                raise UsageError(
                    f"A Keras callback sets the learning rate, but {setting} sets {name} after "
                    f"each iteration. Leave out the callback, or {setting} in the config."
                )

    def _get_names(self) -> tuple[str, ...]:
        spec, config = self._policy.program.spec, self._policy.config
        plans = self._policy.program.functions.networks.values()
        unset = spec.get_unset_rates(config)
        used = dict.fromkeys("lr" if n.plan.lr in unset else n.plan.lr for n in plans)
        unknown = [name for name in self._chosen if name not in used]
        if unknown:
            raise UsageError(
                f"learning_rate must name learning rates of {type(self._policy).__name__}, "
                f"{', '.join(used)}; got {unknown[0]!r}."
            )
        if len(used) > 1 and not self._chosen:
            values = [f"{name}={self._policy.get_hyperparameter(name):g}" for name in used]
            raise UsageError(
                f"A Keras callback uses the learning rate, but {type(self._policy).__name__} has "
                f"several: {', '.join(values)}. Choose: callbacks=[KerasCallbacks([...], "
                f"learning_rate={next(iter(used))!r})], or a list of them, which change in "
                "proportion."
            )
        return self._chosen or tuple(used)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The optimizer that callbacks see has learning_rate and iterations, not {name!r}. Its "
            "variables are in policy.get_state()['_optimizer_variables']."
        )
