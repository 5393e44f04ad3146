"""Compiled learning: converts batches, runs updates, and names their results."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.callbacks import overrides
from tfpolicies.errors import BatchError, NonFiniteError, WeightsError
from tfpolicies.finite import NO_NUMBERS
from tfpolicies.policy.driver import validate_result
from tfpolicies.policy.kind import PolicyKind
from tfpolicies.policy.learning_batches import dummy_batch, require_actions
from tfpolicies.policy.overrides import LOADING, UPDATING
from tfpolicies.program.columns import LearnBatch, kind_of, travelling_columns
from tfpolicies.program.minibatches import draw_minibatches
from tfpolicies.program.updates import UpdateResult

logger = logging.getLogger("tfpolicies")


class Learner:
    """Updates a policy by its Program. References the policy weakly, so that it can be freed.

    Args:
        policy: the policy to update.

    Attributes:
        loading_seconds: seconds spent on converting batches since it was last set to 0.
    """

    def __init__(self, policy: PolicyKind) -> None:
        self._reference = weakref.ref(policy)
        self._state = policy._state
        self._program = policy.program
        self._updates = policy.program.updates
        self._has_warned = False  # that an update was not finite
        spec = policy.program.spec
        names = {f"cur_{name}": name for name in spec.rates} | policy._coefficient_stats
        indices = [(stat, spec.hyperparameters.index(name)) for stat, name in names.items()]
        self._hyper_stats = tuple(indices)  # names in `learner_stats`, indices in `state.hyper`
        self.seconds_loading = 0.0

    @property
    def _policy(self) -> Any:
        return self._reference()

    def discover(self) -> None:
        """Runs the loss once on a small batch of zeros, unless the Program already did."""
        if not self._updates.is_discovered:
            program, batch = self._program, dummy_batch(self._policy)
            self._updates.discover(travelling_columns(program.spec, program.ports, batch))

    def read(self, batch: Mapping[str, Any]) -> LearnBatch:
        """Returns the columns of a batch that the loss reads.

        Raises:
            MissingColumnError: if the batch lacks a column that the loss reads.
            BatchError: if it is empty, or its number of rows does not fit an update.
        """
        return self._read(self._policy, batch, None)

    def _read(
        self, policy: PolicyKind, batch: Mapping[str, Any], minibatch_size: int | None
    ) -> LearnBatch:
        started = time.perf_counter()
        ready = self._updates.reader.read(batch)
        self.seconds_loading += time.perf_counter() - started
        unit = policy.get_batch_divisibility_req()
        for size in (ready.count, minibatch_size or 0):
            if size % unit:
                raise BatchError(
                    f"The rows of each update of {policy!r} must be a multiple of {unit} "
                    f"(get_batch_divisibility_req), got {size}."
                )
        return ready

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
        if not overridden.isdisjoint(LOADING):
            learn = self.loaded_epochs
        elif self.sees_minibatches() or not overridden.isdisjoint(UPDATING):
            learn = self.minibatches
        else:
            learn = self.epochs
        return learn(batch, num_epochs, minibatch_size, shuffle=shuffle)

    def epochs(
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
        self._state.require_changeable()
        policy = self._policy
        self.discover()
        custom = _announce(policy, batch)
        ready = self._read(policy, batch, minibatch_size)
        how = {"num_epochs": num_epochs, "minibatch_size": minibatch_size, "shuffle": shuffle}
        result = self._update(policy, ready, ready.count, **how, update_targets=update_targets)
        sampled_at = getattr(batch, "num_grad_updates", None) or 0
        result["diff_num_grad_updates_vs_sampler_policy"] -= sampled_at
        return {**result, "custom_metrics": custom}

    def sees_minibatches(self) -> bool:
        """Whether a callback must see every minibatch."""
        callbacks = self._policy.callbacks
        return callbacks is not None and overrides(callbacks, "on_learn_on_batch")

    def minibatches(
        self, batch: Mapping[str, Any], num_epochs: int, minibatch_size: int, *, shuffle: bool
    ) -> dict[str, Any]:
        """Calls `learn_on_batch` for each minibatch, in the order of `epochs`."""
        self._state.require_changeable()
        whole = batch if isinstance(batch, SampleBatch) else SampleBatch(batch)
        if not whole.count:
            raise BatchError("The batch is empty; learning needs at least one row.")
        items, size = whole.count, minibatch_size
        if SampleBatch.SEQ_LENS in whole:
            items, size = len(whole[SampleBatch.SEQ_LENS]), self._updates.items_of(size)
        size = min(size, items)
        before, drawn_before = self._state.copy(), self._state.learning_rng.bit_generator.state
        rng = self._state.learning_rng if shuffle else None
        drawn = draw_minibatches(items, num_epochs, size, rng)
        results: list[Mapping[str, Any]] = []
        try:
            for rows, mask in zip(drawn.rows, drawn.mask, strict=True):
                result = self._policy.learn_on_batch(_taken(whole, rows[mask > 0]))
                results.append(validate_result(self._policy, "learn_on_batch", result))
        except BaseException as error:
            if isinstance(error, NonFiniteError):
                error.add(f"It was in minibatch {len(results) + 1} of {drawn.steps}.")
            self._state.write(before.arrays)
            self._state.num_grad_updates = before.num_grad_updates
            self._state.learning_rng.bit_generator.state = drawn_before
            raise
        return _joined(results, whole.count)

    def loaded_epochs(
        self, batch: Mapping[str, Any], num_epochs: int, minibatch_size: int, *, shuffle: bool
    ) -> dict[str, Any]:
        """Loads a batch and calls `learn_on_loaded_batch` for each minibatch of each epoch.

        Rows are shuffled once (those of sequences are not), and minibatches in each epoch.
        """
        self._state.require_changeable()
        self._state.settle()
        policy, rng = self._policy, self._state.learning_rng
        whole = batch if isinstance(batch, SampleBatch) else SampleBatch(batch)
        if shuffle and SampleBatch.SEQ_LENS not in whole:
            whole = whole._take(rng.permutation(whole.count))
        policy.load_batch_into_buffer(whole, 0)
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
        return _joined(results, whole.count)

    def by_gradients(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Updates by `compute_gradients` and `apply_gradients`; see `TFPolicy.learn_on_batch`."""
        self._state.require_changeable()
        policy, before = self._policy, self._state.num_grad_updates
        custom = _announce(policy, batch)
        gradients, info = policy.compute_gradients(batch)
        policy.apply_gradients(gradients)
        self._state.num_grad_updates += 1
        return {
            "num_agent_steps_trained": len(batch[SampleBatch.ACTIONS]),
            "num_grad_updates_lifetime": self._state.num_grad_updates,
            "diff_num_grad_updates_vs_sampler_policy": float(before),
            **info,
            "custom_metrics": custom,
        }

    def _update(
        self, policy: PolicyKind, batch: LearnBatch, rows: int, **how: Any
    ) -> dict[str, Any]:
        """Updates by `rows` rows of a batch; see `Updates.learn` for the options."""
        state, updates = self._state, self._updates
        policy._follow_updates()
        before = state.num_grad_updates
        with updates.updating(state):
            result = updates.learn(state, batch, **how)
            self._require_finite(result)
            updates.commit(state, result)
        return {
            "learner_stats": self._add_hyper_stats(result.stats),
            "num_agent_steps_trained": rows,
            "num_grad_updates_lifetime": state.num_grad_updates,
            "diff_num_grad_updates_vs_sampler_policy": float(before),
            **result.fetches,
        }

    def _add_hyper_stats(self, stats: dict[str, float]) -> dict[str, float]:
        values = self._state.hyper.tolist()
        for name, index in self._hyper_stats:
            stats[name] = values[index]
        return stats

    def _require_finite(self, result: UpdateResult) -> None:
        """Raises if an update is not finite, or warns once with `on_nan="warn"`.

        Raises:
            NonFiniteError: naming the policy and the first term that was not finite.
        """
        if result.is_finite:
            return
        stops = self._policy.config["on_nan"] == "stop"
        if self._has_warned and not stops:
            return
        reason, policy_id = result.explain(), self._policy.policy_id
        where = reason.where and f" in {reason.where}"
        what = (
            f"The update of policy {policy_id!r} is not finite: the first term to fail was "
            f"{reason.term}{where}."
        )
        if not stops:
            self._has_warned = True
            logger.warning("%s Training continues because of on_nan='warn'.", what)
            return
        error = NonFiniteError(
            f"{what} The policy is unchanged. Lower lr, set grad_clip, or look for the cause in "
            "rewards, observations and the loss; debugging(on_nan='warn') continues anyway."
        )
        error.term, error.policy_id = reason.term, policy_id
        raise error

    # -- loaded batches -----------------------------------------------------------------------

    def loaded(self, batch: LearnBatch, offset: int, size: int) -> dict[str, Any]:
        """Updates by `size` rows from `offset` of a loaded batch; by all rows if it has no more."""
        self._state.require_changeable()
        rows, items = batch.count, None
        if size < rows:
            items = batch.between(offset, offset + size)
            rows = batch.rows_of(items)
        policy, custom = self._policy, {}
        if policy.callbacks is not None:
            custom = _announce(policy, batch.columns if items is None else batch.taken(items))
        part = {} if items is None else {"items": items, "minibatch_size": size}
        return {**self._update(policy, batch, rows, **part), "custom_metrics": custom}

    # -- gradients ----------------------------------------------------------------------------

    def gradients(self, batch: Mapping[str, Any]) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the gradients of one batch and their info; changes nothing."""
        self.discover()
        gradients, result = self._updates.gradients(self._state, self.read(batch))
        self._require_finite(result)
        return gradients, {"learner_stats": self._add_hyper_stats(result.stats), **result.fetches}

    def apply(self, gradients: Sequence[np.ndarray | None]) -> None:
        """Updates the weights with gradients in the order of the trainable variables, loss by loss.

        Raises:
            WeightsError: if number or shapes differ; nothing is changed then.
            NonFiniteError: if the weights would not be finite; nothing is changed then.
        """
        variables = self._program.functions.optimizer.differentiated
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
            if array.dtype.kind in NO_NUMBERS:
                raise WeightsError(f"gradients[{i}] must be real numbers, got {array.dtype}.")
            arrays.append(array.astype(np.float32, copy=False))
        self._policy._follow_updates()
        with self._updates.updating(self._state):
            result = self._updates.apply_gradients(self._state, arrays)
            self._require_finite(result)
            self._updates.commit(self._state, result)


def _announce(policy: PolicyKind, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Calls the callbacks' `on_learn_on_batch`; returns the custom metrics they add."""
    custom: dict[str, Any] = {}
    if policy.callbacks is not None:
        policy.callbacks.on_learn_on_batch(policy=policy, train_batch=batch, result=custom)
    return custom


def _taken(batch: SampleBatch, items: np.ndarray) -> SampleBatch:
    """Returns some rows of a batch, or some sequences if it consists of sequences."""
    if SampleBatch.SEQ_LENS not in batch:
        return batch._take(items)
    sequences = batch.copy(shallow=True)
    sequences.enable_slicing_by_batch_id()
    parts = cast(SampleBatch, concat_samples([sequences[i : i + 1] for i in items.tolist()]))
    parts.disable_slicing_by_batch_id()
    return parts


def _joined(results: Sequence[Mapping[str, Any]], rows: int) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for result in results:
        for name, value in (result.get("learner_stats") or {}).items():
            found.setdefault(name, []).append(value)
    return {
        **results[-1],
        "learner_stats": {name: float(_reduction(name)(each)) for name, each in found.items()},
        "num_agent_steps_trained": rows,
    }


def _reduction(name: str) -> Any:
    return {"min": np.nanmin, "max": np.nanmax, "mean": np.nanmean}[kind_of(name)]
