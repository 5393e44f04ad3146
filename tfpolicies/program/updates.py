"""Runs the updates of a Program.

It discovers the inputs of the loss, chooses the compile mode, and runs every update by `learn`,
whether of one minibatch or of many epochs. The state that learns is loaded into the resident
variables of the runtime. Their new values are an output of the compiled call and so part of the
`UpdateResult`. The state gets them when the caller commits the result.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.base.finite_checks import all_finite, find_first_non_finite
from tfpolicies.errors import ConfigError
from tfpolicies.models.eager_mode import EagerLock, ensure_eager
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.program.chunking import ChunkSizer
from tfpolicies.program.compile_mode import CompileMode
from tfpolicies.program.devices import CPU, device_scope
from tfpolicies.program.functions import LOSS, make_initial_totals
from tfpolicies.program.learn_batch import BatchReader, LearnBatch, LossSignature
from tfpolicies.program.minibatches import (
    Minibatches,
    StepInputs,
    compute_capacity,
    draw_minibatches,
    is_input,
    make_minibatch,
)
from tfpolicies.program.nan_diagnosis import (
    NaNCause,
    bisect_last_finite,
    find_first_non_finite_term,
)
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.runtimes.function import FunctionRuntime
from tfpolicies.program.runtimes.runtime import NotCompiledError, TFRuntime
from tfpolicies.program.traced_arguments import LOSS_MASK
from tfpolicies.program.update_compiler import UpdateCompiler
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork

logger = logging.getLogger("tfpolicies")


class UpdateResult(NamedTuple):
    """The result of an update. It is not in the state before `UpdateRunner.commit`.

    Attributes:
        stats: of the loss.
        fetches: of the loss, if there was one minibatch; one entry per row of the batch.
        is_finite: whether the loss and all changed variables are finite.
        explain: returns why the update is not finite; call it before `UpdateRunner.lock_for_update`
            ends.
        buffers: the new values of the changed variables, by buffer of the layout.
        steps: the number of minibatches.
    """

    stats: dict[str, float]
    fetches: dict[str, np.ndarray]
    is_finite: bool
    explain: Callable[[], NaNCause]
    buffers: Mapping[str, Any] = {}
    steps: int = 0


class UpdateRunner:
    """Runs the updates of one Program.

    Args:
        runtime: runs the functions.
        eager: the runtime that may run them untraced.
        lock: of the Program; held while the resident variables are in use.

    Attributes:
        compile_mode: how an update is compiled; None until that is decided.
        is_discovered: whether the loss has run once, so that its columns are known.
        reader: converts batches for the loss; set by `discover`.
    """

    reader: BatchReader

    def __init__(self, runtime: TFRuntime, eager: FunctionRuntime, lock: EagerLock) -> None:
        functions = eager.functions
        self._functions, self._spec = functions, functions.spec
        self._is_recurrent = functions.network.ports.is_recurrent
        self._runtime, self._eager, self._lock = runtime, eager, lock
        self._signature: LossSignature | None = None
        self._capacities: dict[tuple[int, int], int] = {}
        self._place_chunk = functools.lru_cache(64)(
            lambda first, last: runtime.to_device(np.array([first, last], np.int32))
        )
        self._chunk_sizer = ChunkSizer()
        self.compile_mode: CompileMode | None = None
        self.is_discovered = False
        self._jit_works = False

    # -- the inputs of the loss ---------------------------------------------------------------

    @property
    def signature(self) -> LossSignature:
        """The columns and statistics of the loss; call `discover` before."""
        if self._signature is None:
            raise ConfigError("the loss of this Program has not run yet; call `discover` first.")
        return self._signature

    def discover(self, columns: Mapping[str, Any]) -> None:
        """Runs the loss once on a small batch, to discover its columns and statistics.

        The batch needs NumPy columns of every name that a batch may have after postprocessing.
        """
        with self._lock:
            if self.is_discovered:
                return
            check_tensorflow_survived_fork()
            self._eager.clear_resident_state()  # layers may change their variables in training mode
            with device_scope(self._functions.device):
                tensors = tf.nest.map_structure(tf.constant, dict(columns))
                rows = len(tf.nest.flatten(tensors)[0])
                hyperparameters = tf.ones([len(self._spec.hyperparameters)], tf.float32)
                loss = self._functions.differentiate_minibatch(
                    hyperparameters, tensors, self._make_step_inputs(None, 1, rows)
                )
            signature = LossSignature.from_loss(loss, tensors)
            masks_padding = signature.reads_mask or loss.batch.reads_lengths
            if self._is_recurrent and not masks_padding:
                label = f"{self._spec.policy_class.__name__}.loss"
                if loss.batch.ignores_mask and LOSS_MASK in loss.batch.accessed_keys:
                    label = "custom_loss of the model"
                raise ConfigError(
                    f"{label} does not read train_batch[{LOSS_MASK!r}], which a recurrent model "
                    f"needs: its sequences are padded. Use `tfpolicies.models.losses."
                    f"masked_mean(x, train_batch[{LOSS_MASK!r}])` for its means."
                )
            ports = self._functions.network.ports
            self.reader = BatchReader(self._spec, ports, signature)
            self._signature = signature
            self._reductions = list(zip(signature.stat_names, signature.reductions, strict=True))
            self._has_fetches = bool(signature.fetches)
            self.is_discovered = True

    def count_items(self, rows: int) -> int:
        """Returns the number of items, rows or sequences, that have about `rows` rows."""
        return max(1, rows // self._spec.max_seq_len) if self._is_recurrent else rows

    # -- compilation --------------------------------------------------------------------------

    @functools.cached_property
    def _compiler(self) -> UpdateCompiler:
        return UpdateCompiler(self._runtime, self.signature)

    @functools.cached_property
    def _apply_gradients(self) -> Any:
        inputs = [self._runtime.signatures.gradients, self._runtime.signatures.step_inputs]
        return self._runtime.compile_update(self._runtime.functions.apply_gradients, inputs)

    @ensure_eager()
    def resolve_compile_mode(self, state: PolicyState) -> CompileMode:
        """Decides once how learning is compiled; see `UpdateCompiler.choose_compile_mode`."""
        if self.compile_mode is None:
            self.compile_mode = self._compiler.choose_compile_mode(state.hyperparameters)
        return self.compile_mode

    # -- updates ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock_for_update(self, state: PolicyState) -> Iterator[None]:
        """Holds a state and the Program for one update; restores the generator after errors."""
        with state.lock_for_change(), self._lock:
            rng_state = state.learning_rng.bit_generator.state
            try:
                self._runtime.begin_update(state)
                yield
            except BaseException:
                state.learning_rng.bit_generator.state = rng_state
                raise

    def commit(self, state: PolicyState, result: UpdateResult) -> None:
        """Sets the result of an update in its state; call it in `lock_for_update`."""
        state.set_pending_update(result.buffers)
        if result.is_finite:  # finding the cause of NaN has loaded other states
            self._runtime.get_resident_state(state).record(state)
        state.num_grad_updates += result.steps

    def learn(
        self,
        state: PolicyState,
        batch: LearnBatch,
        *,
        num_epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle: bool = False,
        items: np.ndarray | None = None,
        update_targets: np.ndarray | None = None,
    ) -> UpdateResult:
        """Runs an update with every minibatch of every epoch, or with one minibatch.

        Call it in `lock_for_update`. It changes nothing of the state but its generator.

        Args:
            state: of a policy of this Program.
            batch: from `reader`.
            num_epochs: passes over the batch.
            minibatch_size: rows per update; None for one update with all rows.
            shuffle: whether the state's generator shuffles the rows for each epoch.
            items: int32, the items of one update with a part of the batch: about `minibatch_size`.
                None for updates with all items.
            update_targets: 0/1 `[K]`, whether target networks are updated after each of the K
                updates; None: after none.
        """
        if items is not None:
            num_drawn = len(items)
            minibatches = make_minibatch(
                items, self._get_padded_size(state, items, minibatch_size or 1)
            )
        else:
            size = batch.num_items
            if minibatch_size is not None:
                size = self.count_items(minibatch_size)
                if (
                    self.resolve_compile_mode(state) is CompileMode.PLAIN
                ):  # XLA recompiles for each smaller size
                    size = min(size, batch.num_items)
            num_drawn = min(size, batch.num_items)
            rng = state.learning_rng if shuffle else None
            minibatches = draw_minibatches(batch.num_items, num_epochs, size, rng)
        shape = minibatches.rows.shape
        inputs = self._make_step_inputs(
            state, *shape, num_drawn=num_drawn, update_targets=update_targets
        )
        is_single = minibatch_size is None or items is not None
        fetches = is_single and self._has_fetches
        return self._run(state, batch, minibatches._replace(inputs=inputs), fetches=fetches)

    def _make_step_inputs(
        self,
        state: PolicyState | None,
        steps: int,
        size: int,
        *,
        num_drawn: int | None = None,
        update_targets: np.ndarray | None = None,
    ) -> StepInputs:
        """Returns the other inputs of minibatches.

        Args:
            state: of a policy of this Program; its generator draws noise. None gives zeros.
            steps: K.
            size: of a minibatch.
            num_drawn: the number of items per minibatch for which noise is drawn, so that padding
                does not change the generator; None: all.
            update_targets: 0/1 `[K]`; None for zeros.
        """
        specs, result = self._runtime.signatures.step_inputs, StepInputs()
        if specs == result:
            return result
        if is_input(specs.update_targets):
            flags = np.zeros(steps) if update_targets is None else np.asarray(update_targets)
            result = result._replace(update_targets=flags.astype(np.float32, copy=False))
        if is_input(specs.active_optimizers):
            before = 0 if state is None else state.num_grad_updates
            active = [self._functions.optimizers.get_active(before + k) for k in range(steps)]
            result = result._replace(active_optimizers=np.array(active, np.float32))
        if is_input(specs.noise):
            noise = np.zeros((steps, size, *specs.noise.shape[2:]), np.float32)
            if state is not None:
                part = noise[:, : size if num_drawn is None else num_drawn]
                part[...] = state.learning_rng.standard_normal(part.shape, np.float32)
            result = result._replace(noise=noise)
        if is_input(specs.update_noise):
            noise = np.zeros((steps, *specs.update_noise.shape[1:]), np.float32)
            if state is not None and size:
                noise[...] = state.learning_rng.standard_normal(noise.shape, np.float32)
            result = result._replace(update_noise=noise)
        return result

    def _get_padded_size(self, state: PolicyState, items: np.ndarray, minibatch_size: int) -> int:
        if self.resolve_compile_mode(state) is CompileMode.PLAIN:
            return len(items)
        needed = max(self.count_items(minibatch_size), self._capacities.get((0, 0), 0))
        size = self._capacities[0, 0] = compute_capacity(len(items), 1, needed)
        return size

    def _run(
        self,
        state: PolicyState,
        batch: LearnBatch,
        minibatches: Minibatches,
        meanwhile: Callable[[], None] | None = None,
        *,
        fetches: bool,
    ) -> UpdateResult:
        """Runs minibatches on the resident state; falls back to the next form if XLA fails."""
        mode = self.compile_mode or self.resolve_compile_mode(state)
        try:
            totals, arrays, buffers = self._run_chunks(
                mode, state, batch, minibatches, meanwhile, fetches=fetches
            )
        except (NotCompiledError, tf.errors.OpError, TypeError, ValueError) as error:
            is_late = self._jit_works and not isinstance(error, NotCompiledError)
            if mode is CompileMode.PLAIN or is_late:
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self.compile_mode = mode.fallback
            logger.warning(_FALLBACK_MESSAGES[self.compile_mode], reason)
            self._runtime.begin_update(state)  # load it again
            return self._run(state, batch, minibatches, meanwhile, fetches=fetches)
        self._jit_works = mode is not CompileMode.PLAIN
        by_reduction, stats = totals.tolist(), {}
        for i, (name, reduction) in enumerate(self._reductions):
            stats[name] = by_reduction[reduction][i]
        is_finite = math.isfinite(by_reduction[0][-1]) and self._is_finite(buffers)
        explain = functools.partial(self._explain, state, batch, minibatches, buffers)
        return UpdateResult(stats, arrays, is_finite, explain, buffers, minibatches.steps)

    def _run_chunks(
        self,
        mode: CompileMode,
        state: PolicyState,
        batch: LearnBatch,
        minibatches: Minibatches,
        meanwhile: Callable[[], None] | None,
        *,
        fetches: bool,
    ) -> tuple[np.ndarray, Any, Any]:
        """Runs minibatches in one call, or in several if one would take long.

        Signals are handled between two calls and may abort the update.
        """
        capacity = batch.num_items
        if mode is not CompileMode.PLAIN:
            size = minibatches.rows.shape[1]
            capacity_key = (minibatches.epochs, 0 if minibatches.is_full_batch else size)
            capacity = compute_capacity(capacity, size, self._capacities.get(capacity_key, 0))
            self._capacities[capacity_key] = capacity
            minibatches = minibatches.pad_to(capacity)
        learn = self._compiler.get_learn_function(
            mode, fetches=fetches, clips_gradients=self._spec.clips_gradients(state.hyperparameters)
        )
        to_device = self._runtime.to_device if batch.is_reused else self._runtime.share_with_device
        columns = batch.place(capacity, to_device)
        index, mask = self._runtime.share_with_device((minibatches.rows, minibatches.mask))
        inputs = minibatches.inputs.map(self._runtime.share_with_device)
        shapes = capacity, *minibatches.rows.shape
        totals, first, steps = self._initial_totals, 0, minibatches.steps
        while True:
            began = time.perf_counter()
            last = min(first + self._chunk_sizer.get_chunk_size(shapes[2]), steps)
            inputs_of_call = columns, index, mask, inputs, self._place_chunk(first, last), totals
            totals, fetched, buffers = learn(
                state, *inputs_of_call, shapes=shapes, meanwhile=meanwhile
            )
            array = np.asarray(totals)
            if last > first:
                self._chunk_sizer.record(shapes[2], last - first, time.perf_counter() - began)
            if last == steps:
                arrays = self._select_fetches(fetched, batch, minibatches) if fetched else {}
                return array, arrays, buffers
            first, meanwhile = last, None

    @functools.cached_property
    def _initial_totals(self) -> Any:
        return self._runtime.to_device(make_initial_totals(self.signature.stat_names))

    def _select_fetches(
        self, fetches: Mapping[str, Any], batch: LearnBatch, minibatches: Minibatches
    ) -> dict[str, np.ndarray]:
        """Returns fetches; those of the loss's length get one entry per row of the batch."""
        valid = minibatches.mask[0] > 0
        if self._is_recurrent:
            lengths = batch.columns[SEQ_LENS][minibatches.rows[0]] * valid
            valid = (np.arange(self._spec.max_seq_len) < lengths[:, None]).reshape(-1)
        arrays = {name: np.asarray(x) for name, x in fetches.items()}
        return {name: x[valid] if x.shape[:1] == valid.shape else x for name, x in arrays.items()}

    def warm_up(
        self,
        state: PolicyState,
        rows: int,
        num_epochs: int,
        minibatch_size: int | None,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """Traces and compiles the update for a batch of `rows`.

        Args:
            state: a scratch state with the hyperparameters of a policy; it may be changed.
            rows: the size of the batch.
            num_epochs: passes over it.
            minibatch_size: rows per update; None for one update with all rows.
            meanwhile: called while XLA compiles, which does not need Python: with two cores it
                costs nothing.
        """
        items = self.count_items(rows)
        columns = {
            name: tf.nest.map_structure(lambda s: np.zeros((items, *s.shape[1:]), s.dtype.name), x)
            for name, x in self.signature.columns.items()
        }
        size = min(self.count_items(minibatch_size or rows), items)
        fetches = minibatch_size is None and self._has_fetches
        minibatches = draw_minibatches(items, num_epochs, size, None)
        minibatches = minibatches._replace(
            inputs=self._make_step_inputs(None, *minibatches.rows.shape)
        )
        check_tensorflow_survived_fork()
        with self._lock:
            # A compiled step is compiled when it runs; it changes only the scratch state.
            minibatches = minibatches._replace(
                steps=int(self.resolve_compile_mode(state) is CompileMode.STEP)
            )
            self._runtime.begin_update(state)
            batch = LearnBatch(columns, is_recurrent=self._is_recurrent)
            self._run(state, batch, minibatches, meanwhile, fetches=fetches)

    # -- gradients ----------------------------------------------------------------------------

    def compute_gradients(
        self, state: PolicyState, batch: LearnBatch
    ) -> tuple[list[np.ndarray], UpdateResult]:
        """Returns the gradients of one batch, in the order of the trainable variables."""
        with state.lock, self._lock:
            self._runtime.begin_update(state)
            columns = batch.place(batch.num_items, self._runtime.to_device)
            inputs = self._make_step_inputs(state, 1, batch.num_items)
            tensors, named, fetched = self._compiler.compute_gradients(
                state, columns, self._runtime.to_device(inputs)
            )
            gradients = [np.array(x) for x in tensors]
        stats = {name: float(value) for name, value in named.items()}
        is_finite = math.isfinite(stats.pop(LOSS)) and all_finite(gradients)
        explain = functools.partial(self._explain_minibatch, state, batch.columns, inputs, {})
        minibatch = make_minibatch(np.arange(batch.num_items, dtype=np.int32), batch.num_items)
        fetches = self._select_fetches(fetched, batch, minibatch)
        return gradients, UpdateResult(stats, fetches, is_finite, explain)

    def apply_gradients(self, state: PolicyState, gradients: Sequence[np.ndarray]) -> UpdateResult:
        """Runs an update with given gradients; call it in `lock_for_update`."""
        place = self._runtime.to_device
        inputs = place(self._make_step_inputs(state, 1, 0))
        buffers = self._apply_gradients(state, place(list(gradients)), inputs)

        def explain() -> NaNCause:
            by_name = {f"gradients[{i}]": x for i, x in enumerate(gradients)}
            return NaNCause.from_term(
                find_first_non_finite(by_name) or self._first_non_finite(buffers)
            )

        return UpdateResult({}, {}, self._is_finite(buffers), explain, buffers)

    # -- NaN and infinity ---------------------------------------------------------------------

    def _is_finite(self, buffers: Mapping[str, Any]) -> bool:
        """Returns whether the new weights and optimizer slots are finite.

        On a GPU they stay there if the sum of their squares is finite: copying a network for images
        to the CPU takes as long as a small update.
        """
        arrays = list(buffers.values())
        if self._functions.device != CPU and all(map(tf.is_tensor, arrays)):
            with device_scope(self._functions.device):
                if math.isfinite(self._sum_squares(arrays)):
                    return True
        return all_finite(map(np.asarray, arrays))

    @functools.cached_property
    def _sum_squares(self) -> Any:
        def sum_squares(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
            return tf.add_n([tf.nn.l2_loss(tf.cast(x, tf.float32)) for x in tensors])

        return tf.function(sum_squares, autograph=False)

    def _explain(
        self,
        state: PolicyState,
        batch: LearnBatch,
        minibatches: Minibatches,
        buffers: Mapping[str, Any],
    ) -> NaNCause:
        def repeat(steps: int) -> tuple[PolicyState, bool]:
            copy = state.copy()
            self._runtime.begin_update(copy)
            result = self._run(copy, batch, minibatches._replace(steps=steps), fetches=False)
            copy.set_pending_update(result.buffers)
            return copy, result.is_finite

        before, index = bisect_last_finite(state, minibatches.steps, repeat)
        valid = minibatches.mask[index] > 0
        inputs = minibatches.inputs.map(lambda x: x[index : index + 1])
        if is_input(inputs.noise):
            inputs = inputs._replace(noise=inputs.noise[:, valid])
        rows = batch.take(minibatches.rows[index][valid])
        reason = self._explain_minibatch(before, rows, inputs, buffers)
        if minibatches.steps > 1:
            reason = reason._replace(where=f"minibatch {index + 1} of {minibatches.steps}")
        return reason

    def _explain_minibatch(
        self,
        state: PolicyState,
        columns: Mapping[str, Any],
        inputs: StepInputs,
        buffers: Mapping[str, Any],
    ) -> NaNCause:
        with self._lock, device_scope(self._functions.device):
            self._eager.begin_update(state)
            term = find_first_non_finite_term(self._functions, state, columns, inputs)
        return NaNCause.from_term(term or self._first_non_finite(buffers))

    def _first_non_finite(self, buffers: Mapping[str, Any]) -> tuple[str, float] | None:
        """Returns the first variable that is not finite after an update, and the number."""
        views = self._functions.layout.unpack_buffers(buffers)
        return find_first_non_finite({f"{key!r} after the update": x for key, x in views.items()})


_FALLBACK_MESSAGES = {
    CompileMode.STEP: "learning is compiled step by step, since XLA cannot compile its loop: %s",
    CompileMode.PLAIN: "learning runs without XLA, which cannot compile it: %s",
}
