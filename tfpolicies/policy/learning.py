"""Compiled learning: converts batches, runs updates, and names their results."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from tfpolicies.base.finite_checks import NON_NUMERIC_KINDS
from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.callbacks import overrides
from tfpolicies.errors import BatchError, NonFiniteError, WeightsError
from tfpolicies.policy.batch_utils import make_dummy_batch, require_actions
from tfpolicies.policy.driver import validate_result
from tfpolicies.policy.hooks import TFPolicyHooks
from tfpolicies.policy.overrides import LOADING_METHODS, UPDATE_METHODS
from tfpolicies.program.learn_batch import LearnBatch, reduction_for, to_loss_columns
from tfpolicies.program.minibatches import draw_minibatches
from tfpolicies.program.updates import UpdateResult

logger = logging.getLogger("tfpolicies")


class PolicyLearner:
    """Updates a policy by its Program. References the policy weakly, so that it can be freed.

    Args:
        policy: the policy to update.

    Attributes:
        loading_seconds: seconds spent on converting batches since it was last set to 0.
    """

    def __init__(self, policy: TFPolicyHooks) -> None:
        self._reference = weakref.ref(policy)
        self._state = policy._state
        self._program = policy.program
        self._updates = policy.program.updates
        self._has_warned = False  # that an update was not finite
        spec = policy.program.spec
        names = {f"cur_{name}": name for name in spec.learning_rates} | policy._coefficient_stats
        indices = [(stat, spec.hyperparameters.index(name)) for stat, name in names.items()]
        self._hyperparameter_stats = tuple(
            indices
        )  # names in `learner_stats`, indices in `state.hyperparameters`
        self.loading_seconds = 0.0

    @property
    def _policy(self) -> Any:
        return self._reference()

    def discover_columns(self) -> None:
        """Runs the loss once on a small batch of zeros, unless the Program already did."""
        if not self._updates.is_discovered:
            program, batch = self._program, make_dummy_batch(self._policy)
            self._updates.discover(to_loss_columns(program.spec, program.ports, batch))

    def read(self, batch: Mapping[str, Any]) -> LearnBatch:
        """Returns the columns of a batch that the loss reads.

        Raises:
            MissingColumnError: if the batch lacks a column that the loss reads.
            BatchError: if it is empty, or its number of rows does not fit an update.
        """
        return self._read(self._policy, batch, None)

    def _read(
        self, policy: TFPolicyHooks, batch: Mapping[str, Any], minibatch_size: int | None
    ) -> LearnBatch:
        started = time.perf_counter()
        learn_batch = self._updates.reader.read(batch)
        self.loading_seconds += time.perf_counter() - started
        divisor = policy.get_batch_divisibility_req()
        for size in (learn_batch.count, minibatch_size or 0):
            if size % divisor:
                raise BatchError(
                    f"The rows of each update of {policy!r} must be a multiple of {divisor} "
                    f"(get_batch_divisibility_req), got {size}."
                )
        return learn_batch

    # -- updates ------------------------------------------------------------------------------

    def learn(
        self, batch: Mapping[str, Any], num_epochs: int, minibatch_size: int, *, shuffle: bool
    ) -> dict[str, Any]:
        """Updates by all minibatches of all epochs; see `TFPolicy.learn_epochs`."""
        if num_epochs < 1 or minibatch_size < 1:
            raise BatchError(
                f"num_epochs and minibatch_size must be at least 1, got {num_epochs} and "
                f"{minibatch_size}."
            )
        require_actions(self._program.spec.action_leaves, batch)
        overridden = self._policy._overridden
        if not overridden.isdisjoint(LOADING_METHODS):
            learn = self.update_from_buffer
        elif self.has_minibatch_callback() or not overridden.isdisjoint(UPDATE_METHODS):
            learn = self.update_per_minibatch
        else:
            learn = self.update_epochs
        return learn(batch, num_epochs, minibatch_size, shuffle=shuffle)

    def update_epochs(
        self,
        batch: Mapping[str, Any],
        num_epochs: int,
        minibatch_size: int | None,  # None: all rows
        *,
        shuffle: bool,
        update_targets: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Updates by all minibatches of all epochs; see `TFPolicy.learn_epochs`.

        Target networks are updated after the updates that `update_targets`, 0/1 `[K]`, names.
        """
        self._state.require_not_frozen()
        policy = self._policy
        self.discover_columns()
        custom_metrics = _call_learn_callbacks(policy, batch)
        learn_batch = self._read(policy, batch, minibatch_size)
        options = {"num_epochs": num_epochs, "minibatch_size": minibatch_size, "shuffle": shuffle}
        result = self._update(
            policy, learn_batch, learn_batch.count, **options, update_targets=update_targets
        )
        sampled_at = getattr(batch, "num_grad_updates", None) or 0
        result["diff_num_grad_updates_vs_sampler_policy"] -= sampled_at
        return {**result, "custom_metrics": custom_metrics}

    def has_minibatch_callback(self) -> bool:
        callbacks = self._policy.callbacks
        return callbacks is not None and overrides(callbacks, "on_learn_on_batch")

    def update_per_minibatch(
        self, batch: Mapping[str, Any], num_epochs: int, minibatch_size: int, *, shuffle: bool
    ) -> dict[str, Any]:
        """Calls `learn_on_batch` for each minibatch, in the order of `epochs`."""
        self._state.require_not_frozen()
        sample_batch = batch if isinstance(batch, SampleBatch) else SampleBatch(batch)
        if not sample_batch.count:
            raise BatchError("The batch is empty; learning needs at least one row.")
        items, size = sample_batch.count, minibatch_size
        if SampleBatch.SEQ_LENS in sample_batch:
            items, size = len(sample_batch[SampleBatch.SEQ_LENS]), self._updates.count_items(size)
        size = min(size, items)
        state_before, rng_state_before = (
            self._state.copy(),
            self._state.learning_rng.bit_generator.state,
        )
        rng = self._state.learning_rng if shuffle else None
        minibatches = draw_minibatches(items, num_epochs, size, rng)
        results: list[Mapping[str, Any]] = []
        try:
            for rows, mask in zip(minibatches.rows, minibatches.mask, strict=True):
                result = self._policy.learn_on_batch(_take_items(sample_batch, rows[mask > 0]))
                results.append(validate_result(self._policy, "learn_on_batch", result))
        except BaseException as error:
            if isinstance(error, NonFiniteError):
                error.add(f"It was in minibatch {len(results) + 1} of {minibatches.steps}.")
            self._state.write(state_before.arrays)
            self._state.num_grad_updates = state_before.num_grad_updates
            self._state.learning_rng.bit_generator.state = rng_state_before
            raise
        return _merge_results(results, sample_batch.count)

    def update_from_buffer(
        self, batch: Mapping[str, Any], num_epochs: int, minibatch_size: int, *, shuffle: bool
    ) -> dict[str, Any]:
        """Loads a batch and calls `learn_on_loaded_batch` for each minibatch of each epoch.

        Rows are shuffled once (those of sequences are not), and minibatches in each epoch.
        """
        self._state.require_not_frozen()
        self._state.flush_noise_buffer()
        policy, rng = self._policy, self._state.learning_rng
        sample_batch = batch if isinstance(batch, SampleBatch) else SampleBatch(batch)
        if shuffle and SampleBatch.SEQ_LENS not in sample_batch:
            sample_batch = sample_batch._take_rows(rng.permutation(sample_batch.count))
        policy.load_batch_into_buffer(sample_batch, 0)
        rows = policy.get_num_samples_loaded_into_buffer(0)
        if not rows:
            raise BatchError("The batch is empty; learning needs at least one row.")
        offsets = np.arange(0, rows, min(minibatch_size, rows))
        name = "learn_on_loaded_batch"
        results = [
            validate_result(policy, name, policy.learn_on_loaded_batch(int(offset), 0))
            for _ in range(num_epochs)
            for offset in (rng.permutation(offsets) if shuffle else offsets)
        ]
        return _merge_results(results, sample_batch.count)

    def update_by_gradients(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Updates by `compute_gradients` and `apply_gradients`; see `TFPolicy.learn_on_batch`."""
        self._state.require_not_frozen()
        policy, updates_before = self._policy, self._state.num_grad_updates
        custom_metrics = _call_learn_callbacks(policy, batch)
        gradients, info = policy.compute_gradients(batch)
        policy.apply_gradients(gradients)
        self._state.num_grad_updates += 1
        return {
            "num_agent_steps_trained": len(batch[SampleBatch.ACTIONS]),
            "num_grad_updates_lifetime": self._state.num_grad_updates,
            "diff_num_grad_updates_vs_sampler_policy": float(updates_before),
            **info,
            "custom_metrics": custom_metrics,
        }

    def _update(
        self, policy: TFPolicyHooks, batch: LearnBatch, rows: int, **options: Any
    ) -> dict[str, Any]:
        """Updates by `rows` rows of a batch; see `UpdateRunner.learn` for the options."""
        state, updates = self._state, self._updates
        policy._update_lr_schedule()
        updates_before = state.num_grad_updates
        with updates.lock_for_update(state):
            result = updates.learn(state, batch, **options)
            self._require_finite(result)
            updates.commit(state, result)
        return {
            "learner_stats": self._add_hyperparameter_stats(result.stats),
            "num_agent_steps_trained": rows,
            "num_grad_updates_lifetime": state.num_grad_updates,
            "diff_num_grad_updates_vs_sampler_policy": float(updates_before),
            **result.fetches,
        }

    def _add_hyperparameter_stats(self, stats: dict[str, float]) -> dict[str, float]:
        values = self._state.hyperparameters.tolist()
        for name, index in self._hyperparameter_stats:
            stats[name] = values[index]
        return stats

    def _require_finite(self, result: UpdateResult) -> None:
        """Raises if an update is not finite, or warns once with `on_nan="warn"`.

        Raises:
            NonFiniteError: naming the policy and the first term that was not finite.
        """
        if result.is_finite:
            return
        is_error = self._policy.config["on_nan"] == "raise"
        if self._has_warned and not is_error:
            return
        cause, policy_id = result.explain(), self._policy.policy_id
        location = cause.where and f" in {cause.where}"
        message = (
            f"The update of policy {policy_id!r} is not finite: the first term to fail was "
            f"{cause.term}{location}."
        )
        if not is_error:
            self._has_warned = True
            logger.warning("%s Training continues because of on_nan='warn'.", message)
            return
        error = NonFiniteError(
            f"{message} The policy is unchanged. Lower lr, set grad_clip, or look for the cause in "
            "rewards, observations and the loss; debugging(on_nan='warn') continues anyway."
        )
        error.term, error.policy_id = cause.term, policy_id
        raise error

    # -- loaded batches -----------------------------------------------------------------------

    def update_on_loaded_batch(self, batch: LearnBatch, offset: int, size: int) -> dict[str, Any]:
        """Updates by `size` rows from `offset` of a loaded batch; by all rows if it has no more."""
        self._state.require_not_frozen()
        rows, items = batch.count, None
        if size < rows:
            items = batch.select_range(offset, offset + size)
            rows = batch.count_rows(items)
        policy, custom_metrics = self._policy, {}
        if policy.callbacks is not None:
            custom_metrics = _call_learn_callbacks(
                policy, batch.columns if items is None else batch.take(items)
            )
        options = {} if items is None else {"items": items, "minibatch_size": size}
        return {**self._update(policy, batch, rows, **options), "custom_metrics": custom_metrics}

    # -- gradients ----------------------------------------------------------------------------

    def compute_gradients(
        self, batch: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the gradients of one batch and their info; changes nothing."""
        self.discover_columns()
        gradients, result = self._updates.compute_gradients(self._state, self.read(batch))
        self._require_finite(result)
        return gradients, {
            "learner_stats": self._add_hyperparameter_stats(result.stats),
            **result.fetches,
        }

    def apply_gradients(self, gradients: Sequence[np.ndarray | None]) -> None:
        """Updates the weights with gradients in the order of the trainable variables, loss by loss.

        Raises:
            WeightsError: if number or shapes differ; nothing is changed then.
            NonFiniteError: if the weights would not be finite; nothing is changed then.
        """
        variables = self._program.functions.optimizers.gradient_variables
        if len(gradients) != len(variables):
            raise WeightsError(
                f"Unexpected number of gradients: {len(gradients)} for {len(variables)} variables."
            )
        arrays = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            shape = tuple(variable.shape)
            array = np.zeros(shape, np.float32) if gradient is None else np.asarray(gradient)
            if array.shape != shape:
                raise WeightsError(f"gradients[{i}] must have shape {shape}, got {array.shape}.")
            if array.dtype.kind in NON_NUMERIC_KINDS:
                raise WeightsError(f"gradients[{i}] must be real numbers, got {array.dtype}.")
            arrays.append(array.astype(np.float32, copy=False))
        self._policy._update_lr_schedule()
        with self._updates.lock_for_update(self._state):
            result = self._updates.apply_gradients(self._state, arrays)
            self._require_finite(result)
            self._updates.commit(self._state, result)


def _call_learn_callbacks(policy: TFPolicyHooks, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Calls the callbacks' `on_learn_on_batch`; returns the custom metrics they add."""
    custom_metrics: dict[str, Any] = {}
    if policy.callbacks is not None:
        policy.callbacks.on_learn_on_batch(policy=policy, train_batch=batch, result=custom_metrics)
    return custom_metrics


def _take_items(batch: SampleBatch, items: np.ndarray) -> SampleBatch:
    """Returns some rows of a batch, or some sequences if it consists of sequences."""
    if SampleBatch.SEQ_LENS not in batch:
        return batch._take_rows(items)
    sequences = batch.copy(shallow=True)
    sequences.enable_slicing_by_batch_id()
    parts = cast(SampleBatch, concat_samples([sequences[i : i + 1] for i in items.tolist()]))
    parts.disable_slicing_by_batch_id()
    return parts


def _merge_results(results: Sequence[Mapping[str, Any]], rows: int) -> dict[str, Any]:
    values_by_name: dict[str, list[Any]] = {}
    for result in results:
        for name, value in (result.get("learner_stats") or {}).items():
            values_by_name.setdefault(name, []).append(value)
    return {
        **results[-1],
        "learner_stats": {
            name: float(_get_reduction(name)(values)) for name, values in values_by_name.items()
        },
        "num_agent_steps_trained": rows,
    }


def _get_reduction(name: str) -> Any:
    return {"min": np.nanmin, "max": np.nanmax, "mean": np.nanmean}[reduction_for(name)]
