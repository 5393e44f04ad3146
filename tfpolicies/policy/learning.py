"""How a policy with a Program learns: batches become columns, updates run, results get names."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.callbacks import overrides
from tfpolicies.errors import BatchError, NonFiniteError, WeightsError
from tfpolicies.finite import NO_NUMBERS
from tfpolicies.policy import by_methods
from tfpolicies.policy.learning_batches import dummy_batch
from tfpolicies.policy.policy import require_loaded
from tfpolicies.program.columns import LearnBatch, kind_of, travelling_columns
from tfpolicies.program.failed_update import Reason
from tfpolicies.program.minibatches import draw_minibatches
from tfpolicies.program.program import Program
from tfpolicies.state import PolicyState

logger = logging.getLogger("tfpolicies")


class Learning:
    """Runs the learn functions of a Program for one policy, and keeps its loaded batches.

    Args:
        policy: whose callbacks and postprocessing are used; referred to weakly, as it owns this.
        program: what the policy shares with its kind.
        state: what it owns.
    """

    def __init__(self, policy: Any, program: Program, state: PolicyState) -> None:
        self._policy: Callable[[], Any] = weakref.ref(policy)
        self.program = program
        self.updates = program.updates
        self.state = state
        self._buffers: dict[int, LearnBatch] = {}
        self._seconds_loading = 0.0
        self._has_warned = False

    @property
    def policy(self) -> Any:
        """The policy that learns."""
        return self._policy()

    def prepare(self) -> None:
        """Runs the loss once on a small batch of zeros, if no policy of the kind did."""
        if not self.updates.is_discovered:
            batch = dummy_batch(self.policy)
            self.updates.discover(travelling_columns(self.program.spec, self.program.ports, batch))

    def take_seconds_loading(self) -> float:
        """Returns the seconds spent on making columns of batches since this was called last."""
        seconds, self._seconds_loading = self._seconds_loading, 0.0
        return seconds

    def _read(self, batch: Mapping[str, Any], minibatch_size: int | None = None) -> LearnBatch:
        started = time.perf_counter()
        ready = self.updates.reader.read(batch)
        self._seconds_loading += time.perf_counter() - started
        unit = self._policy().get_batch_divisibility_req()
        for size in (ready.rows, minibatch_size or 0):
            if size % unit:
                raise BatchError(
                    f"The rows of each update of {self.policy!r} must be a multiple of {unit} "
                    f"(get_batch_divisibility_req), got {size}."
                )
        return ready

    # -- updates ------------------------------------------------------------------------------

    def epochs(
        self,
        batch: Mapping[str, Any],
        num_epochs: int,
        minibatch_size: int | None,  # None: all rows
        *,
        shuffle: bool,
        follows: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Updates by all minibatches of all epochs; see `TFPolicy.learn_epochs`.

        Followers move behind the updates for which `follows`, 0/1 `[K]`, says so.
        """
        self.state.require_changeable()
        self.prepare()
        custom = self._announced(batch)
        ready = self._read(batch, minibatch_size)
        how = {"num_epochs": num_epochs, "minibatch_size": minibatch_size, "shuffle": shuffle}
        result = self._update(ready, ready.rows, **how, follows=follows)
        sampled_at = getattr(batch, "num_grad_updates", None) or 0
        result["diff_num_grad_updates_vs_sampler_policy"] -= sampled_at
        return {**result, "custom_metrics": custom}

    def sees_minibatches(self) -> bool:
        """Whether a callback must see every minibatch."""
        callbacks = self.policy.callbacks
        return callbacks is not None and overrides(callbacks, "on_learn_on_batch")

    def minibatches(
        self, batch: Mapping[str, Any], num_epochs: int, minibatch_size: int, *, shuffle: bool
    ) -> dict[str, Any]:
        """Calls `learn_on_batch` for each minibatch, in the order of `epochs`."""
        self.state.require_changeable()
        whole = batch if isinstance(batch, SampleBatch) else SampleBatch(batch)
        if not whole.count:
            raise BatchError("The batch is empty; learning needs at least one row.")
        items, size = whole.count, minibatch_size
        if SampleBatch.SEQ_LENS in whole:
            items, size = len(whole[SampleBatch.SEQ_LENS]), self.updates.items_of(size)
        size = min(size, items)
        before, drawn_before = self.state.copy(), self.state.learning_rng.bit_generator.state
        rng = self.state.learning_rng if shuffle else None
        drawn = draw_minibatches(items, num_epochs, size, rng)
        results: list[Mapping[str, Any]] = []
        try:
            for rows, mask in zip(drawn.rows, drawn.mask, strict=True):
                result = self.policy.learn_on_batch(_taken(whole, rows[mask > 0]))
                results.append(by_methods.updated(self.policy, "learn_on_batch", result))
        except BaseException as error:
            if isinstance(error, NonFiniteError):
                error.add(f"It was in minibatch {len(results) + 1} of {drawn.steps}.")
            self.state.write_segments(before.segments)
            self.state.num_grad_updates = before.num_grad_updates
            self.state.learning_rng.bit_generator.state = drawn_before
            raise
        return _joined(results, whole.count)

    def loaded_epochs(
        self, batch: Mapping[str, Any], num_epochs: int, minibatch_size: int, *, shuffle: bool
    ) -> dict[str, Any]:
        """Loads a batch and calls `learn_on_loaded_batch` for each minibatch of each epoch.

        Shuffled are the rows (those of sequences are not) once, and the minibatches in each epoch.
        """
        self.state.require_changeable()
        policy, rng = self.policy, self.state.learning_rng
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
            by_methods.updated(policy, name, policy.learn_on_loaded_batch(int(offset), 0))
            for _ in range(num_epochs)
            for offset in (rng.permutation(offsets) if shuffle else offsets)
        ]
        return _joined(results, whole.count)

    def by_gradients(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Updates by `compute_gradients` and `apply_gradients`; see `TFPolicy.learn_on_batch`."""
        self.state.require_changeable()
        custom, before, policy = self._announced(batch), self.state.num_grad_updates, self.policy
        gradients, info = policy.compute_gradients(batch)
        policy.apply_gradients(gradients)
        self.state.num_grad_updates += 1
        return {
            "num_agent_steps_trained": len(batch[SampleBatch.ACTIONS]),
            "num_grad_updates_lifetime": self.state.num_grad_updates,
            "diff_num_grad_updates_vs_sampler_policy": float(before),
            **info,
            "custom_metrics": custom,
        }

    def _announced(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Tells the callbacks of an update; returns the custom metrics they give."""
        custom: dict[str, Any] = {}
        policy = self._policy()
        if policy.callbacks is not None:
            policy.callbacks.on_learn_on_batch(policy=policy, train_batch=batch, result=custom)
        return custom

    def _update(self, batch: LearnBatch, rows: int, **how: Any) -> dict[str, Any]:
        """Updates by `rows` rows of a batch; see `Updates.learn` for how."""
        state = self.state
        policy = self._policy()
        policy._follow_updates()
        before = state.num_grad_updates
        stats, fetches = self.updates.learn(state, batch, self._met, **how)
        return {
            "learner_stats": {**stats, **policy._hyper_stats()},
            "num_agent_steps_trained": rows,
            "num_grad_updates_lifetime": state.num_grad_updates,
            "diff_num_grad_updates_vs_sampler_policy": float(before),
            **fetches,
        }

    def _met(self, find: Callable[[], Reason]) -> None:
        """Meets an update that is not finite: by an error, or with `on_nan="warn"` by one warning.

        Raises:
            NonFiniteError: naming the policy and what was the first not to be finite.
        """
        stops = self.policy.config["on_nan"] == "stop"
        if self._has_warned and not stops:
            return
        reason, policy_id = find(), self.policy.policy_id
        where = reason.where and f" in {reason.where}"
        what = (
            f"The update of policy {policy_id!r} is not finite: the first term to fail was "
            f"{reason.term}{where}."
        )
        if not stops:
            self._has_warned = True
            logger.warning("%s Training goes on, as on_nan='warn' says.", what)
            return
        error = NonFiniteError(
            f"{what} The policy is as it was before. Lower lr, set grad_clip, or look for the "
            "cause in rewards, observations and the loss; debugging(on_nan='warn') goes on."
        )
        error.term, error.policy_id = reason.term, policy_id
        raise error

    # -- loaded batches -----------------------------------------------------------------------

    def load(self, batch: Mapping[str, Any], buffer_index: int) -> int:
        """Keeps a batch; returns its number of rows."""
        self.prepare()
        self._buffers[buffer_index] = self._read(batch)
        return self.rows_loaded(buffer_index)

    def rows_loaded(self, buffer_index: int) -> int:
        """Returns the rows of a loaded batch, 0 before loading."""
        batch = self._buffers.get(buffer_index)
        return 0 if batch is None else batch.rows

    def loaded(self, offset: int, buffer_index: int, size: int) -> dict[str, Any]:
        """Updates by `size` rows from `offset` of a loaded batch; by all if it has no more.

        Raises:
            BatchError: if no batch is loaded, or `offset` lies behind its end.
        """
        self.state.require_changeable()
        rows = self.rows_loaded(buffer_index)
        require_loaded(rows, offset if size < rows else 0, buffer_index)
        batch, items = self._buffers[buffer_index], None
        if size < rows:
            items = batch.between(offset, offset + size)
            rows = batch.rows_of(items)
        custom: dict[str, Any] = {}
        if self._policy().callbacks is not None:
            custom = self._announced(batch.columns if items is None else batch.taken(items))
        part = {} if items is None else {"items": items, "minibatch_size": size}
        return {**self._update(batch, rows, **part), "custom_metrics": custom}

    # -- gradients ----------------------------------------------------------------------------

    def gradients(self, batch: Mapping[str, Any]) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the gradients of one batch and their info; changes nothing."""
        self.prepare()
        gradients, stats = self.updates.gradients(self.state, self._read(batch), self._met)
        return gradients, {"learner_stats": {**stats, **self.policy._hyper_stats()}}

    def apply(self, gradients: Sequence[np.ndarray | None]) -> None:
        """Updates the weights with gradients in the order of the trainable variables, loss by loss.

        Raises:
            WeightsError: if number or shapes differ; nothing is changed then.
            NonFiniteError: if the weights would not be finite; likewise.
        """
        variables = self.program.functions.optimizer.differentiated
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
        self.policy._follow_updates()
        self.updates.apply_gradients(self.state, arrays, self._met)


def _taken(batch: SampleBatch, items: np.ndarray) -> SampleBatch:
    """Returns some rows of a batch, or some of its sequences where it is cut into these."""
    if SampleBatch.SEQ_LENS not in batch:
        return batch._take(items)
    sequences = batch.copy(shallow=True)
    sequences.enable_slicing_by_batch_id()
    parts = cast(SampleBatch, concat_samples([sequences[i : i + 1] for i in items.tolist()]))
    parts.disable_slicing_by_batch_id()
    return parts


def _joined(results: Sequence[Mapping[str, Any]], rows: int) -> dict[str, Any]:
    """Returns the result of an update from those of its minibatches."""
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
