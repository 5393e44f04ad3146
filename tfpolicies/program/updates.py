"""Runs the updates of a Program.

It discovers the inputs of the loss, decides what is compiled, and runs every update by `learn`,
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

from tfpolicies.errors import ConfigError
from tfpolicies.finite import all_finite, first_bad
from tfpolicies.models.eager_mode import EagerLock, ensure_eager
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.program.columns import BatchReader, LearnBatch, LearnerSignature
from tfpolicies.program.devices import CPU, placed
from tfpolicies.program.failed_update import Reason, first_term, last_sound
from tfpolicies.program.functions import LOSS, no_totals
from tfpolicies.program.minibatches import (
    Minibatches,
    StepInputs,
    draw_minibatches,
    is_input,
    one_minibatch,
    padded_rows,
)
from tfpolicies.program.pace import Pace
from tfpolicies.program.runtimes.function import FunctionRuntime
from tfpolicies.program.runtimes.runtime import NotCompiledError, Runtime
from tfpolicies.program.update_compiler import UpdateCompiler
from tfpolicies.program.update_forms import Form
from tfpolicies.program.view import LOSS_MASK
from tfpolicies.state import PolicyState
from tfpolicies.system.forks import require_tensorflow

logger = logging.getLogger("tfpolicies")


class UpdateResult(NamedTuple):
    """The result of an update. It is not in the state before `Updates.commit`.

    Attributes:
        stats: of the loss.
        fetches: of the loss, if there was one minibatch; one entry per row of the batch.
        is_finite: whether the loss and all changed variables are finite.
        explain: returns why the update is not finite; call it before `Updates.updating` ends.
        buffers: the new values of the changed variables, by buffer of the layout.
        steps: the number of minibatches.
    """

    stats: dict[str, float]
    fetches: dict[str, np.ndarray]
    is_finite: bool
    explain: Callable[[], Reason]
    buffers: Mapping[str, Any] = {}
    steps: int = 0


class Updates:
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

    def __init__(self, runtime: Runtime, eager: FunctionRuntime, lock: EagerLock) -> None:
        functions = eager.functions
        self._functions, self._spec = functions, functions.spec
        self._is_recurrent = functions.network.ports.is_recurrent
        self._runtime, self._eager, self._lock = runtime, eager, lock
        self._signature: LearnerSignature | None = None
        self._capacity: dict[tuple[int, int], int] = {}
        self._placed_piece = functools.lru_cache(64)(
            lambda first, last: runtime.placed(np.array([first, last], np.int32))
        )
        self._pace = Pace()
        self.form: Form | None = None
        self.is_discovered = False
        self._jit_works = False

    # -- the inputs of the loss ---------------------------------------------------------------

    @property
    def signature(self) -> LearnerSignature:
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
            require_tensorflow()
            self._eager.forget()  # layers may change their variables in training mode
            with placed(self._functions.device):
                tensors = tf.nest.map_structure(tf.constant, dict(columns))
                rows = len(tf.nest.flatten(tensors)[0])
                hyper = tf.ones([len(self._spec.hyperparameters)], tf.float32)
                found = self._functions.differentiated(
                    hyper, tensors, self._step_inputs(None, 1, rows)
                )
            signature = LearnerSignature.of(found, tensors)
            weighs = signature.masked or found.batch.reads_lengths
            if self._is_recurrent and not weighs:
                who = f"{self._spec.policy_class.__name__}.loss"
                if found.batch.ignores_mask and LOSS_MASK in found.batch.accessed_keys:
                    who = "custom_loss of the model"
                raise ConfigError(
                    f"{who} does not read train_batch[{LOSS_MASK!r}], which a recurrent model "
                    f"needs: its sequences are padded. Use `tfpolicies.models.losses."
                    f"masked_mean(x, train_batch[{LOSS_MASK!r}])` for its means."
                )
            ports = self._functions.network.ports
            self.reader = BatchReader(self._spec, ports, signature)
            self._signature = signature
            self._kinds = list(zip(signature.stat_names, signature.kinds, strict=True))
            self._has_fetches = bool(signature.fetches)
            self.is_discovered = True

    def items_of(self, rows: int) -> int:
        """Returns the number of items, rows or sequences, that have about `rows` rows."""
        return max(1, rows // self._spec.time_steps) if self._is_recurrent else rows

    # -- compilation --------------------------------------------------------------------------

    @functools.cached_property
    def _compiler(self) -> UpdateCompiler:
        return UpdateCompiler(self._runtime, self.signature)

    @functools.cached_property
    def _apply(self) -> Any:
        inputs = [self._runtime.signatures.gradients, self._runtime.signatures.step_inputs]
        return self._runtime.compiled(self._runtime.functions.apply_gradients, inputs)

    @ensure_eager()
    def resolve_form(self, state: PolicyState) -> Form:
        """Decides once how learning is compiled; see `UpdateCompiler.choose_form`."""
        if self.form is None:
            self.form = self._compiler.choose_form(state.hyper)
        return self.form

    # -- updates ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self, state: PolicyState) -> Iterator[None]:
        """Holds a state and the Program for one update; restores the generator after errors."""
        with state.changing(), self._lock:
            drawn_before = state.learning_rng.bit_generator.state
            try:
                self._runtime.begin_update(state)
                yield
            except BaseException:
                state.learning_rng.bit_generator.state = drawn_before
                raise

    def commit(self, state: PolicyState, result: UpdateResult) -> None:
        """Sets the result of an update in its state; call it in `updating`."""
        state.leave(result.buffers)
        if result.is_finite:  # finding the cause of NaN has loaded other states
            self._runtime.resident(state).note(state)
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

        Call it in `updating`. It changes nothing of the state but its generator.

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
            drawn = len(items)
            minibatches = one_minibatch(items, self._width(state, items, minibatch_size or 1))
        else:
            size = batch.items
            if minibatch_size is not None:
                size = self.items_of(minibatch_size)
                if self.resolve_form(state) is Form.PLAIN:  # XLA recompiles for each smaller size
                    size = min(size, batch.items)
            drawn = min(size, batch.items)
            rng = state.learning_rng if shuffle else None
            minibatches = draw_minibatches(batch.items, num_epochs, size, rng)
        shape = minibatches.rows.shape
        inputs = self._step_inputs(state, *shape, drawn=drawn, update_targets=update_targets)
        is_single = minibatch_size is None or items is not None
        fetches = is_single and self._has_fetches
        return self._run(state, batch, minibatches._replace(inputs=inputs), fetches=fetches)

    def _step_inputs(
        self,
        state: PolicyState | None,
        steps: int,
        size: int,
        *,
        drawn: int | None = None,
        update_targets: np.ndarray | None = None,
    ) -> StepInputs:
        """Returns the other inputs of minibatches.

        Args:
            state: of a policy of this Program; its generator draws noise. None gives zeros.
            steps: K.
            size: of a minibatch.
            num_drawn: the number of items per minibatch for which noise is drawn, so that padding does
                not change the generator; None: all.
            update_targets: 0/1 `[K]`; None for zeros.
        """
        specs, result = self._runtime.signatures.step_inputs, StepInputs()
        if specs == result:
            return result
        if is_input(specs.update_targets):
            moves = np.zeros(steps) if update_targets is None else np.asarray(update_targets)
            result = result._replace(update_targets=moves.astype(np.float32, copy=False))
        if is_input(specs.active_optimizers):
            before = 0 if state is None else state.num_grad_updates
            active = [self._functions.optimizer.taken(before + k) for k in range(steps)]
            result = result._replace(active_optimizers=np.array(active, np.float32))
        if is_input(specs.noise):
            noise = np.zeros((steps, size, *specs.noise.shape[2:]), np.float32)
            if state is not None:
                part = noise[:, : size if drawn is None else drawn]
                part[...] = state.learning_rng.standard_normal(part.shape, np.float32)
            result = result._replace(noise=noise)
        if is_input(specs.update_noise):
            noise = np.zeros((steps, *specs.update_noise.shape[1:]), np.float32)
            if state is not None and size:
                noise[...] = state.learning_rng.standard_normal(noise.shape, np.float32)
            result = result._replace(update_noise=noise)
        return result

    def _width(self, state: PolicyState, items: np.ndarray, minibatch_size: int) -> int:
        if self.resolve_form(state) is Form.PLAIN:
            return len(items)
        known = max(self.items_of(minibatch_size), self._capacity.get((0, 0), 0))
        width = self._capacity[0, 0] = padded_rows(len(items), 1, known)
        return width

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
        form = self.form or self.resolve_form(state)
        try:
            totals, arrays, buffers = self._run_as(
                form, state, batch, minibatches, meanwhile, fetches=fetches
            )
        except (NotCompiledError, tf.errors.OpError, TypeError, ValueError) as error:
            is_late = self._jit_works and not isinstance(error, NotCompiledError)
            if form is Form.PLAIN or is_late:
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            self.form = form.next
            logger.warning(_GIVES_WAY[self.form], reason)
            self._runtime.begin_update(state)  # load it again
            return self._run(state, batch, minibatches, meanwhile, fetches=fetches)
        self._jit_works = form is not Form.PLAIN
        by_kind, stats = totals.tolist(), {}
        for i, (name, kind) in enumerate(self._kinds):
            stats[name] = by_kind[kind][i]
        is_finite = math.isfinite(by_kind[0][-1]) and self._is_sound(buffers)
        explain = functools.partial(self._explain, state, batch, minibatches, buffers)
        return UpdateResult(stats, arrays, is_finite, explain, buffers, minibatches.steps)

    def _run_as(
        self,
        form: Form,
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
        capacity = batch.items
        if form is not Form.PLAIN:
            size = minibatches.rows.shape[1]
            kind = (minibatches.epochs, 0 if minibatches.whole else size)
            capacity = padded_rows(capacity, size, self._capacity.get(kind, 0))
            self._capacity[kind] = capacity
            minibatches = minibatches.padded_to(capacity)
        learner = self._compiler.learner(form, fetches=fetches, clips=self._spec.clips(state.hyper))
        place = self._runtime.placed if batch.is_kept else self._runtime.lent
        columns = batch.placed(capacity, place)
        index, mask = self._runtime.lent((minibatches.rows, minibatches.mask))
        inputs = minibatches.inputs.map(self._runtime.lent)
        shapes = capacity, *minibatches.rows.shape
        totals, first, steps = self._no_totals, 0, minibatches.steps
        while True:
            began = time.perf_counter()
            last = min(first + self._pace.minibatches(shapes[2]), steps)
            given = columns, index, mask, inputs, self._placed_piece(first, last), totals
            totals, fetched, buffers = learner(state, *given, shapes=shapes, meanwhile=meanwhile)
            array = np.asarray(totals)
            if last > first:
                self._pace.took(shapes[2], last - first, time.perf_counter() - began)
            if last == steps:
                arrays = self._of_rows(fetched, batch, minibatches) if fetched else {}
                return array, arrays, buffers
            first, meanwhile = last, None

    @functools.cached_property
    def _no_totals(self) -> Any:
        return self._runtime.placed(no_totals(self.signature.stat_names))

    def _of_rows(
        self, fetches: Mapping[str, Any], batch: LearnBatch, minibatches: Minibatches
    ) -> dict[str, np.ndarray]:
        """Returns fetches; those of the loss's length get one entry per row of the batch."""
        valid = minibatches.mask[0] > 0
        if self._is_recurrent:
            lengths = batch.columns[SEQ_LENS][minibatches.rows[0]] * valid
            valid = (np.arange(self._spec.time_steps) < lengths[:, None]).reshape(-1)
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
            state: a scratch state with the hyper-parameters of a policy; it may be changed.
            rows: the size of the batch.
            num_epochs: passes over it.
            minibatch_size: rows per update; None for one update with all rows.
            meanwhile: called while XLA compiles, which does not need Python: with two cores it
                costs nothing.
        """
        items = self.items_of(rows)
        columns = {
            name: tf.nest.map_structure(lambda s: np.zeros((items, *s.shape[1:]), s.dtype.name), x)
            for name, x in self.signature.columns.items()
        }
        size = min(self.items_of(minibatch_size or rows), items)
        fetches = minibatch_size is None and self._has_fetches
        nothing = draw_minibatches(items, num_epochs, size, None)
        nothing = nothing._replace(inputs=self._step_inputs(None, *nothing.rows.shape))
        require_tensorflow()
        with self._lock:
            # A compiled step is compiled when it runs; it changes only the scratch state.
            nothing = nothing._replace(steps=int(self.resolve_form(state) is Form.STEP))
            self._runtime.begin_update(state)
            batch = LearnBatch(columns, is_recurrent=self._is_recurrent)
            self._run(state, batch, nothing, meanwhile, fetches=fetches)

    # -- gradients ----------------------------------------------------------------------------

    def gradients(
        self, state: PolicyState, batch: LearnBatch
    ) -> tuple[list[np.ndarray], UpdateResult]:
        """Returns the gradients of one batch, in the order of the trainable variables."""
        with state.lock, self._lock:
            self._runtime.begin_update(state)
            columns = batch.placed(batch.items, self._runtime.placed)
            inputs = self._step_inputs(state, 1, batch.items)
            tensors, named, fetched = self._compiler.gradients(
                state, columns, self._runtime.placed(inputs)
            )
            gradients = [np.array(x) for x in tensors]
        stats = {name: float(value) for name, value in named.items()}
        is_finite = math.isfinite(stats.pop(LOSS)) and all_finite(gradients)
        explain = functools.partial(self._explain_minibatch, state, batch.columns, inputs, {})
        whole = one_minibatch(np.arange(batch.items, dtype=np.int32), batch.items)
        fetches = self._of_rows(fetched, batch, whole)
        return gradients, UpdateResult(stats, fetches, is_finite, explain)

    def apply_gradients(self, state: PolicyState, gradients: Sequence[np.ndarray]) -> UpdateResult:
        """Runs an update with given gradients; call it in `updating`."""
        place = self._runtime.placed
        inputs = place(self._step_inputs(state, 1, 0))
        buffers = self._apply(state, place(list(gradients)), inputs)

        def explain() -> Reason:
            by_name = {f"gradients[{i}]": x for i, x in enumerate(gradients)}
            return Reason.of(first_bad(by_name) or self._bad_of(buffers))

        return UpdateResult({}, {}, self._is_sound(buffers), explain, buffers)

    # -- NaN and infinity ---------------------------------------------------------------------

    def _is_sound(self, buffers: Mapping[str, Any]) -> bool:
        """Returns whether the new weights and optimizer slots are finite.

        On a GPU they stay there if the sum of their squares is finite: copying a network for images
        to the CPU takes as long as a small update.
        """
        pieces = list(buffers.values())
        if self._functions.device != CPU and all(map(tf.is_tensor, pieces)):
            with placed(self._functions.device):
                if math.isfinite(self._squares(pieces)):
                    return True
        return all_finite(map(np.asarray, pieces))

    @functools.cached_property
    def _squares(self) -> Any:
        def squares(pieces: Sequence[tf.Tensor]) -> tf.Tensor:
            return tf.add_n([tf.nn.l2_loss(tf.cast(x, tf.float32)) for x in pieces])

        return tf.function(squares, autograph=False)

    def _explain(
        self,
        state: PolicyState,
        batch: LearnBatch,
        minibatches: Minibatches,
        buffers: Mapping[str, Any],
    ) -> Reason:
        def repeat(steps: int) -> tuple[PolicyState, bool]:
            copy = state.copy()
            self._runtime.begin_update(copy)
            result = self._run(copy, batch, minibatches._replace(steps=steps), fetches=False)
            copy.leave(result.buffers)
            return copy, result.is_finite

        before, done = last_sound(state, minibatches.steps, repeat)
        valid = minibatches.mask[done] > 0
        inputs = minibatches.inputs.map(lambda x: x[done : done + 1])
        if is_input(inputs.noise):
            inputs = inputs._replace(noise=inputs.noise[:, valid])
        rows = batch.taken(minibatches.rows[done][valid])
        reason = self._explain_minibatch(before, rows, inputs, buffers)
        if minibatches.steps > 1:
            reason = reason._replace(where=f"minibatch {done + 1} of {minibatches.steps}")
        return reason

    def _explain_minibatch(
        self,
        state: PolicyState,
        columns: Mapping[str, Any],
        inputs: StepInputs,
        buffers: Mapping[str, Any],
    ) -> Reason:
        with self._lock, placed(self._functions.device):
            self._eager.begin_update(state)
            term = first_term(self._functions, state, columns, inputs)
        return Reason.of(term or self._bad_of(buffers))

    def _bad_of(self, buffers: Mapping[str, Any]) -> tuple[str, float] | None:
        """Returns the first variable that is not finite after an update, and the number."""
        views = self._functions.layout.unpacked(buffers)
        return first_bad({f"{key!r} after the update": x for key, x in views.items()})


_GIVES_WAY = {
    Form.STEP: "learning is compiled step by step, since XLA cannot compile its loop: %s",
    Form.PLAIN: "learning runs without XLA, which cannot compile it: %s",
}
