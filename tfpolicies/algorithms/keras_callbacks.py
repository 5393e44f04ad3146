"""Keras callbacks in a training: an iteration is an epoch, and a policy is the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfpolicies.algorithms.callback_model import CallbackModel
from tfpolicies.algorithms.monitored_metrics import (
    LOSS,
    check_metric,
    check_metric_in_logs,
    find_direction,
)
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.config.migration_hints import suggest_callback
from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_row import find_loss

logger = logging.getLogger("tfpolicies")

_NOT_OFFERED = (
    *("BackupAndRestore", "OrbaxCheckpoint", "ProgbarLogger", "SwapEMAWeights"),
    *("TensorBoard", "TerminateOnNaN"),
)
_SETS_RATE = ("LearningRateScheduler", "ReduceLROnPlateau")
_EPOCH_METHODS = ("on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end")


class KerasCallbacks(DefaultCallbacks):
    """Calls Keras callbacks in `learn`: `on_train_begin/end`, and `on_epoch_begin/end`.

    An iteration is an epoch; its number is that of the iteration, from 0. The logs of an epoch are
    its row of `progress.csv` and `loss`, the policy's loss. A callback that monitors a metric is
    called only after iterations that have it. `mode="auto"` is "max" for returns and "min" for
    losses.

    `learn(callbacks=[...])` also takes Keras callbacks directly. This class is for runs with
    several policies, or several learning rates.

    Args:
        callbacks: Keras callbacks.
        policy_id: the policy that is their `model`; None: the only one that learns.
        learning_rate: the hyperparameter that `model.optimizer.learning_rate` is, or several that
            change in proportion; None: the only one.

    Raises:
        UsageError: if one of them is not a Keras callback, or has no meaning here.
    """

    def __init__(
        self,
        callbacks: keras.callbacks.Callback | Sequence[keras.callbacks.Callback],
        *,
        policy_id: str | None = None,
        learning_rate: str | Sequence[str] | None = None,
    ) -> None:
        self._callbacks: list[Any] = (
            [*callbacks] if isinstance(callbacks, list | tuple) else [callbacks]
        )
        for callback in self._callbacks:
            _require_supported(callback)
        self._policy_id = policy_id
        rates = [learning_rate] if isinstance(learning_rate, str) else learning_rate
        self._learning_rates = tuple(rates or ())
        self._columns: dict[str, float] = {}  # NaN for each column so far
        self._model: CallbackModel | None = None
        self._has_ended = False

    def check(self, algorithm: Any) -> CallbackModel:
        """Checks that the callbacks have a meaning in a run, and resolves their `mode="auto"`.

        Returns:
            Their model.

        Raises:
            UsageError: if one of them has not.
        """
        policy_id = self._find_policy_id(algorithm)
        policy = algorithm.get_policy(policy_id)
        if policy.driver.acting.inference is None:
            raise UsageError(
                f"Keras callbacks need a policy with a Keras model, but {policy_id!r} is a "
                f"{type(policy).__name__}. Use a function f(algorithm, result) or DefaultCallbacks."
            )
        model = CallbackModel(policy, self._learning_rates)
        policy_ids = [*algorithm.worker.policy_map]
        evaluates = algorithm.config.evaluation_interval is not None
        for callback in self._callbacks:
            name = type(callback).__name__
            if _uses_monitor(callback):
                check_metric(callback.monitor, name, policy_ids, evaluates=evaluates)
            _resolve_mode(callback)
            if _is_keras_class(callback, _SETS_RATE):
                model.optimizer.require_settable()
        return model

    def on_run_start(self, *, algorithm: Any, run_dir: Path | None) -> None:
        model = self._model = self.check(algorithm)
        self._policy_id = self._find_policy_id(algorithm)
        params = {"verbose": 0, "epochs": None, "steps": None}  # how many there will be is unknown
        for callback in self._callbacks:
            _warn_of_batch_methods(callback)
            callback.set_params(params)
            callback.set_model(model)
        self._begin_training()

    def _begin_training(self) -> None:
        self._has_ended = False
        for callback in self._callbacks:
            callback.on_train_begin({})

    def on_iteration_start(self, *, algorithm: Any) -> None:
        if self._has_ended:  # a command trains longer if the exported policy missed its target
            self._begin_training()
        for callback in self._callbacks:
            callback.on_epoch_begin(algorithm.iteration, {})

    def on_iteration_end(self, *, algorithm: Any, row: dict[str, float]) -> bool | None:
        model = self._get_model()
        self._columns |= dict.fromkeys(row, math.nan)
        prefix = f"learner/{self._policy_id}/"
        logs = {**self._columns, **row}
        logs[LOSS] = find_loss({name: x for name, x in row.items() if name.startswith(prefix)})
        has_learned = any(name.startswith(prefix) for name in row)
        for callback in self._callbacks:
            if _uses_monitor(callback):
                if has_learned:
                    check_metric_in_logs(callback.monitor, type(callback).__name__, logs)
                if math.isnan(logs.get(callback.monitor, math.nan)):
                    continue
            callback.on_epoch_end(algorithm.iteration - 1, dict(logs))
        return False if model.stop_training else None

    def on_training_end(self, *, algorithm: Any, ended_by: str) -> None:
        self._has_ended = True
        for callback in self._callbacks:
            callback.on_train_end({})
        self._get_model().stop_training = False

    def _get_model(self) -> CallbackModel:
        if self._model is None:
            raise UsageError("KerasCallbacks work in `learn` and `tfpolicies train`.")
        return self._model

    def _find_policy_id(self, algorithm: Any) -> str:
        policy_map = algorithm.worker.policy_map
        if self._policy_id is not None:
            if self._policy_id not in policy_map:
                raise UsageError(
                    f"policy_id must be one of {sorted(policy_map)}, got {self._policy_id!r}."
                )
            return self._policy_id
        trained = sorted(algorithm.worker.get_policies_to_train())
        if len(trained) != 1:
            raise UsageError(
                f"This run trains the policies {trained}, but Keras callbacks have one model. "
                f"Choose: callbacks=[KerasCallbacks([...], policy_id={next(iter(trained), '')!r})]."
            )
        return trained[0]


def is_keras_callback(callback: object) -> bool:
    return isinstance(callback, keras.callbacks.Callback)


def _require_supported(callback: object) -> None:
    if not is_keras_callback(callback):
        raise UsageError(f"callbacks must be Keras callbacks, got {callback!r:.200}.")
    name = type(callback).__name__
    if _is_keras_class(callback, _NOT_OFFERED):
        raise UsageError(f"{name} has no meaning here.{suggest_callback(callback)}")
    save_freq = getattr(callback, "save_freq", "epoch")
    if save_freq != "epoch":
        raise UsageError(
            f"{name} has save_freq={save_freq!r}, a number of batches, but an iteration is an "
            "epoch whose batches callbacks do not see. Use save_freq='epoch'."
        )


def _is_keras_class(callback: object, names: Sequence[str]) -> bool:
    return any(
        base.__name__ in names and base.__module__.partition(".")[0] == "keras"
        for base in type(callback).__mro__
    )


def _uses_monitor(callback: Any) -> bool:
    """Returns whether a callback depends on the value of a metric."""
    has_monitor = isinstance(getattr(callback, "monitor", None), str)
    return has_monitor and getattr(callback, "save_best_only", True)


def _resolve_mode(callback: Any) -> None:
    """Replaces `mode="auto"` by the direction in which the metric improves.

    Keras would look for the metric among those of a compiled model; earlier versions guess from
    its name, and take a return for a loss.
    """
    if not isinstance(getattr(callback, "monitor", None), str):
        return
    direction = find_direction(callback.monitor)
    if not hasattr(callback, "mode"):
        _correct_early_choice(callback, direction)
    elif callback.mode not in ("min", "max"):
        if direction is None and _uses_monitor(callback):
            raise UsageError(
                f"{type(callback).__name__} monitors {callback.monitor!r} with mode='auto', but "
                "whether it should rise or fall depends on the task. Pass mode='max' or mode='min'."
            )
        callback.mode = direction or "min"


def _correct_early_choice(callback: Any, direction: str | None) -> None:
    """Corrects a callback whose constructor has chosen a direction already (Keras 3.8).

    It does not tell "auto" from "min", but a return that should fall is not meant.
    """
    chooses_lowest = getattr(callback.monitor_op, "__name__", "") == "less"
    if direction == "max" and chooses_lowest and _uses_monitor(callback):
        callback.monitor_op = np.greater
        callback.best = -math.inf if callback.best == math.inf else callback.best


def _warn_of_batch_methods(callback: Any) -> None:
    """Warns of a user's methods that are never called, such as `on_train_batch_end`."""
    uncalled = [
        name
        for name in dir(keras.callbacks.Callback)
        if name.startswith("on_")
        and name not in _EPOCH_METHODS
        and not getattr(callback, name).__module__.startswith("keras.")
    ]
    if uncalled:
        logger.warning(
            "%s: %s will not be called. An iteration is an epoch, whose batches Keras callbacks "
            "do not see; use on_epoch_begin and on_epoch_end.",
            type(callback).__name__,
            ", ".join(uncalled),
        )
