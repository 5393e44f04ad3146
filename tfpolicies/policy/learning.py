"""How a policy with a Program learns: batches become columns, updates run, results get names."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tfpolicies.batch.postprocessing import standardized
from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.config.callbacks import overrides
from tfpolicies.config.sectioned import tell_if_resolved_anew
from tfpolicies.errors import BatchError, NonFiniteError, WeightsError
from tfpolicies.finite import NO_NUMBERS
from tfpolicies.policy import by_methods
from tfpolicies.policy.learning_batches import dummy_batch
from tfpolicies.program.columns import LearnBatch, kind_of, travelling_columns
from tfpolicies.program.failed_update import Reason
from tfpolicies.program.minibatches import draw_minibatches
from tfpolicies.program.update_forms import Form

logger = logging.getLogger("tfpolicies")


@dataclasses.dataclass
class Notes:
    """What a policy remembers of its updates, for itself alone."""

    seconds_loading: float = 0.0  # spent on making columns of batches, not told yet
    has_warned: bool = False  # that an update was not finite


class ProgramLearning(by_methods.LearningByMethods):
    """Lets a policy learn by its Program; see `parts.Learning`.

    Args:
        policy: whose state learns, and whose methods, callbacks and postprocessing are used.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.finds_non_finite = "learn_on_batch" not in policy._overridden
        self.state = policy._state
        self.updates = policy.program.updates

    @property
    def compiled_as(self) -> str:
        """How updates are compiled, in words; "tf.function" before that was decided."""
        return (self.updates.form or Form.PLAIN).value

    @property
    def lookahead(self) -> int:
        """How many rows ahead the class's `postprocess_fragments` reads."""
        return 0 if self.by_trajectory else int(self._policy._lookahead)

    def columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns the columns that the loss reads; all but infos where methods of its own learn."""
        if self._policy._overridden.isdisjoint((*by_methods.UPDATING, *by_methods.LOADING)):
            self.prepare()
            return list(self.updates.signature.columns)
        return super().columns(batch)

    def train(
        self, batch: Any, *how: Any, standardize: Collection[str] = (), **more: Any
    ) -> Mapping[str, Any]:
        """Standardizes columns as far as the batch has them, then calls `learn_epochs`."""
        for name in standardize:
            if name in batch:
                batch[name] = standardized(batch[name])
        return self.update(batch, *how, **more)

    def update(self, batch: Any, *how: Any, rng: Any = None, **more: Any) -> dict[str, Any]:
        """Calls `learn_epochs`; the policy's own generator shuffles."""
        del rng
        result: dict[str, Any] = self._policy.learn_epochs(batch, *how, **more)
        return result

    def replay(
        self, batch: Any, minibatch_size: int | None, follows: np.ndarray
    ) -> Mapping[str, Any]:
        """Updates by replayed rows in one compiled call, in which target networks move, too."""
        policy = self._policy
        follows = policy._followed(follows)
        by_hand = policy._overridden & {*by_methods.UPDATING, *by_methods.LOADING, "learn_epochs"}
        kind = type(policy)
        moves = getattr(kind, "update_target", None)
        moves_inside = "follows" in policy.program.runtime.signatures.along
        own = moves is not kind._moves_target or (moves is not None and not moves_inside)
        by_hand = bool(by_hand) or self.sees_minibatches()
        if own and not by_hand and minibatch_size is None:
            result = self.epochs(batch, 1, None, shuffle=False)
            if follows.any():
                policy.update_target()
            return result
        if by_hand or own:
            return super().replay(batch, minibatch_size, follows)
        return self.epochs(batch, 1, minibatch_size, shuffle=False, follows=follows)

    def adapt(self, result: Mapping[str, Any]) -> None:
        """Adapts the policy's coefficients as its class says."""
        self._policy._adapt(result)

    # -- filters ------------------------------------------------------------------------------

    def observe(self, obs: Sequence[np.ndarray], columns: Mapping[str, np.ndarray]) -> None:
        """Takes the rows of a sample into the filters; a frozen policy takes in nothing."""
        if self.state.frozen_as is not None:
            return
        super().observe(obs, columns)
        policy, acting = self._policy, self._policy._acting
        if acting.follows_episodes:
            ports = policy.program.ports
            more = [columns[port.name] for port in (*ports.seen, *ports.states)]
            inputs = [*obs, *more, columns["action_dist_inputs"]]
            *rows, disturbed = (x.reshape(-1, *x.shape[2:]) for x in inputs)
            policy.exploration.adapt(acting.dist_inputs(rows), disturbed)

    def flush_filters(self) -> None:
        """Lets what was observed take effect: in acting, in learning, in exports.

        A frozen policy stays as it is.
        """
        if self.state.frozen_as is not None:
            return
        observed = self._policy.filter
        has_changed = observed is not None and observed.pending_count
        super().flush_filters()
        if has_changed:
            self._policy.holding.apply_filters()

    def seen(self, obs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns observation leaves as they are: the Program filters them."""
        return obs

    # -- getting ready ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Runs the loss once on a small batch of zeros, if no policy of the kind did."""
        if not self.updates.is_discovered:
            program, batch = self._policy.program, dummy_batch(self._policy)
            self.updates.discover(travelling_columns(program.spec, program.ports, batch))

    def resolve(self) -> None:
        """Decides in the config what every "auto" becomes, as the first use would."""
        policy = self._policy
        self.prepare()
        policy.config["jit_compile"] = self.updates.resolve_form(self.state) is not Form.PLAIN
        _ = policy._acting.inference
        for name, before in policy.automatic.items():
            tell_if_resolved_anew(name, before, policy.config[name])
            policy.automatic[name] = policy.config[name]

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int | None) -> None:
        """Traces and compiles acting and learning for batches of `rows`; changes no numbers."""
        self.prepare()
        acting = self._policy._acting.tries_onnx
        sizes = rows, num_epochs, minibatch_size
        self._policy.program.warm_up(self.state.hyper, *sizes, acting=acting)
        self.resolve()

    def take_seconds_loading(self) -> float:
        """Returns the seconds spent on making columns of batches since the last call."""
        notes = self._policy._notes
        seconds, notes.seconds_loading = notes.seconds_loading, 0.0
        return float(seconds)

    def read(self, batch: Mapping[str, Any], minibatch_size: int | None = None) -> LearnBatch:
        """Returns what the loss takes of a batch.

        Raises:
            MissingColumnError: if the batch lacks a column that the loss reads.
            BatchError: if it is empty, or has rows that no update can be made of.
        """
        started = time.perf_counter()
        ready: LearnBatch = self.updates.reader.read(batch)
        self._policy._notes.seconds_loading += time.perf_counter() - started
        unit = self._policy.get_batch_divisibility_req()
        for size in (ready.count, minibatch_size or 0):
            if size % unit:
                raise BatchError(
                    f"The rows of each update of {self._policy!r} must be a multiple of {unit} "
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
        ready = self.read(batch, minibatch_size)
        how = {"num_epochs": num_epochs, "minibatch_size": minibatch_size, "shuffle": shuffle}
        result = self._update(ready, ready.count, **how, follows=follows)
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
                result = self._policy.learn_on_batch(_taken(whole, rows[mask > 0]))
                results.append(by_methods.updated(self._policy, "learn_on_batch", result))
        except BaseException as error:
            if isinstance(error, NonFiniteError):
                error.add(f"It was in minibatch {len(results) + 1} of {drawn.steps}.")
            self.state.write(before.arrays)
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
        self.state.settle()
        policy, rng = self._policy, self.state.learning_rng
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
        custom, before, policy = self._announced(batch), self.state.num_grad_updates, self._policy
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
        policy = self._policy
        if policy.callbacks is not None:
            policy.callbacks.on_learn_on_batch(policy=policy, train_batch=batch, result=custom)
        return custom

    def _update(self, batch: LearnBatch, rows: int, **how: Any) -> dict[str, Any]:
        """Updates by `rows` rows of a batch; see `Updates.learn` for how."""
        state = self.state
        policy = self._policy
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
        stops = self._policy.config["on_nan"] == "stop"
        notes = self._policy._notes
        if notes.has_warned and not stops:
            return
        reason, policy_id = find(), self._policy.policy_id
        where = reason.where and f" in {reason.where}"
        what = (
            f"The update of policy {policy_id!r} is not finite: the first term to fail was "
            f"{reason.term}{where}."
        )
        if not stops:
            notes.has_warned = True
            logger.warning("%s Training goes on, as on_nan='warn' says.", what)
            return
        error = NonFiniteError(
            f"{what} The policy is as it was before. Lower lr, set grad_clip, or look for the "
            "cause in rewards, observations and the loss; debugging(on_nan='warn') goes on."
        )
        error.term, error.policy_id = reason.term, policy_id
        raise error

    # -- loaded batches -----------------------------------------------------------------------

    def loaded(self, batch: LearnBatch, offset: int, size: int) -> dict[str, Any]:
        """Updates by `size` rows from `offset` of a loaded batch; by all if it has no more."""
        self.state.require_changeable()
        rows, items = batch.count, None
        if size < rows:
            items = batch.between(offset, offset + size)
            rows = batch.rows_of(items)
        custom: dict[str, Any] = {}
        if self._policy.callbacks is not None:
            custom = self._announced(batch.columns if items is None else batch.taken(items))
        part = {} if items is None else {"items": items, "minibatch_size": size}
        return {**self._update(batch, rows, **part), "custom_metrics": custom}

    # -- gradients ----------------------------------------------------------------------------

    def gradients(self, batch: Mapping[str, Any]) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the gradients of one batch and their info; changes nothing."""
        self.prepare()
        found, learned = self.updates.gradients(self.state, self.read(batch), self._met)
        stats = {**learned.stats, **self._policy._hyper_stats()}
        return found, {"learner_stats": stats, **learned.fetches}

    def apply(self, gradients: Sequence[np.ndarray | None]) -> None:
        """Updates the weights with gradients in the order of the trainable variables, loss by loss.

        Raises:
            WeightsError: if number or shapes differ; nothing is changed then.
            NonFiniteError: if the weights would not be finite; likewise.
        """
        variables = self._policy.program.functions.optimizer.differentiated
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
