"""The Program: what policies of one kind share, made once and used by all of them.

Programs live in a weak registry under their spec's key. A Program holds one network with one
optimizer (the *resident* variables), the traced functions, and the converted act function. Policies
hand it their state with every call. One lock is held for load, update and read-back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.errors import BatchError, ConfigError, MissingColumnError, near_matches
from tfpolicies.finite import NO_NUMBERS, all_finite, first_bad
from tfpolicies.models.extent import is_built_from_file, require_room
from tfpolicies.models.layer_tree import idle_seeds
from tfpolicies.models.network import FreshWeights, variable_keys
from tfpolicies.models.ports import SEQ_LENS, InputPorts, Port
from tfpolicies.program import stacked
from tfpolicies.program.devices import CPU
from tfpolicies.program.failed_update import Met, Reason, Update, first_term, last_sound
from tfpolicies.program.functions import (
    LOSS,
    ActInputs,
    Differentiated,
    ProgramFunctions,
    no_totals,
)
from tfpolicies.program.minibatches import Minibatches, draw_minibatches, padded_rows
from tfpolicies.program.outputs import ActLayout
from tfpolicies.program.pace import Pace
from tfpolicies.program.runtimes.function import FunctionRuntime
from tfpolicies.program.runtimes.onnx import OnnxActor, convert
from tfpolicies.program.runtimes.runtime import Runtime
from tfpolicies.program.runtimes.session import SessionRuntime
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.stacked import StackedActor
from tfpolicies.program.update_forms import Form, form_of, work_of
from tfpolicies.program.view import LOSS_MASK
from tfpolicies.state import ACTING, PolicyState, Slot, StateLayout
from tfpolicies.system.forks import require_tensorflow

logger = logging.getLogger("tfpolicies")

_TOLERANCE = 1e-4
"""How far two ways of acting may be apart, as a share of an output's largest number, or of 1."""

_LARGE_IMAGE, _LARGE_KERNELS = 64 * 64, 100_000  # pixels, numbers

_UPDATED = ("model/", "learner/")
"""How the names of the segments begin that an update changes."""

_registry: weakref.WeakValueDictionary[tuple, Program] = weakref.WeakValueDictionary()
_registry_lock = threading.Lock()
_kept: deque[Program] = deque(maxlen=4)  # asked for last, of those that stay without a policy


class LearnerSignature(NamedTuple):
    """What the loss turned out to need when it first ran on a small batch."""

    columns: dict[str, Any]  # tf.TensorSpec (nested for nested columns), by name
    stat_names: tuple[str, ...]
    fetches: tuple[str, ...]  # names of what `extra_learn_fetches_fn` gives
    masked: bool  # whether the loss reads the row mask, so that minibatches may be padded


class Program:
    """Everything policies of one kind share; get it with `Program.of(spec)`.

    Attributes:
        spec: what makes the policies be of one kind.
        layout: the layout of their states.
        functions: the tensor functions; `functions.traces` counts the traces of each.
        lock: held while the resident variables are in use.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec
        self.lock = threading.RLock()
        _require_room(spec)
        self.functions = ProgramFunctions.of(spec)
        network, optimizer = self.functions.network, self.functions.optimizer
        self.layout = StateLayout(_slots(self.functions), _idle_keys(self.functions))
        self._model_start = [np.array(v.numpy()) for v in network.variables]
        self._optimizer_start = [np.array(v.numpy()) for v in optimizer.variables]
        self.act_layout = ActLayout.of(spec, network.ports.states, self._extra_outputs())
        parts = self.functions, self.layout, self.act_layout
        self._eager = FunctionRuntime(*parts, traced=spec.static["eager_tracing"])
        in_graph = spec.policy_class.runtime == "session"
        self.runtime: Runtime = SessionRuntime(*parts, self.lock) if in_graph else self._eager
        self._fresh: FreshWeights | None = None
        self._signature: LearnerSignature | None = None
        self._steps: dict[bool, Any] = {}  # traced, by whether for XLA
        self._learners: dict[Form, Any] = {}
        self._singles: dict[bool, Any] = {}  # by whether XLA compiles it
        self._gradients: Any = None
        self._capacity: dict[tuple[int, int], int] = {}
        self._onnx: OnnxActor | None = None
        self._stacked: dict[str, StackedActor | None] = {}
        self._templates_taken: weakref.WeakSet[Any] = weakref.WeakSet()
        self.form: Form | None = None  # resolved on first use
        self._pace = Pace()
        self._jit_works = False

    @classmethod
    def of(cls, spec: ProgramSpec) -> Program:
        """Returns the Program of this kind, making it if no policy of the kind lives."""
        with _registry_lock:
            program = _registry.get(spec.key)
            if program is None:
                program = _registry[spec.key] = cls(spec)
            if program.runtime.is_kept:
                if program in _kept:
                    _kept.remove(program)
                _kept.append(program)
            return program

    @property
    def ports(self) -> InputPorts:
        """The inputs of acting."""
        return self.functions.network.ports

    def _extra_outputs(self) -> list[Port]:
        """Returns what `extra_action_out_fn` adds, by running it once on zeros."""
        spec, network = self.spec, self.functions.network
        if not spec.policy_class._overrides("extra_action_out_fn"):
            return []
        inputs = [tf.constant(port.zeros(2)) for port in network.ports.all]
        noise = tf.zeros([2, spec.explorer.noise_size])
        given = ActInputs(inputs, noise, tf.zeros([spec.explorer.num_params]))
        weights = [tf.convert_to_tensor(variable) for variable in network.variables]
        extras = self.functions.act(weights, given).extras
        return [
            Port(name, tuple(x.shape[1:]), np.dtype(x.dtype.as_numpy_dtype))
            for name, x in sorted(extras.items())
        ]

    # -- states -------------------------------------------------------------------------------

    def new_state(
        self, hyper: Sequence[float], weight_seed: int, rng_seed: int, template: Any = None
    ) -> PolicyState:
        """Returns the state of a new policy.

        Its weights are drawn from the layers' initializers with `weight_seed`; but the first policy
        made with a model instance, the `template`, starts with that instance's weights.
        """
        state = PolicyState(self.layout, hyper, np.random.default_rng(rng_seed))
        if self._fresh is None:
            model = self.functions.network.model
            self._fresh = FreshWeights(model, self._model_start[: len(model.variables)])
        values = self._fresh.draw(weight_seed)
        if template is not None and template not in self._templates_taken:
            self._templates_taken.add(template)
            for i, variable in enumerate(template.variables):
                values[i] = np.array(variable.numpy())
        values += self._model_start[len(values) :]  # the filters
        for part, found in ((ACTING, values), (("learner",), self._optimizer_start)):
            keys = [slot.key for slot in self.layout.of(*part)]
            state.write(dict(zip(keys, found, strict=True)))
        state.copy_part("model", "target", 1.0)
        return state

    def model_of(self, state: PolicyState) -> Any:
        """Returns the Keras model with a state in it, until another one takes its place."""
        require_tensorflow()
        with state.lock, self.lock:
            self._eager.load(state)
            return self.functions.network.model

    # -- acting -------------------------------------------------------------------------------

    @property
    def has_values(self) -> bool:
        """Whether the network estimates values."""
        return self.spec.with_value

    @property
    def convolves_much(self) -> bool:
        """Whether the network convolves large images, or with large kernels.

        TensorFlow is the faster one there: with weights that are inputs, ONNX Runtime brings the
        kernels into its own layout in each call (10 ns a number), and it has one thread.
        """
        kernels = [math.prod(slot.shape) for slot in self.layout.of(*ACTING) if len(slot.shape) > 3]
        images = [leaf.shape[:-1] for leaf in self.ports.obs_leaves if len(leaf.shape) > 2]
        large_image = any(math.prod(image) >= _LARGE_IMAGE for image in images)
        return sum(kernels) >= _LARGE_KERNELS or (bool(kernels) and large_image)

    def onnx_actor(self) -> OnnxActor:
        """Returns the converted act function, converting and checking it on first use.

        Raises:
            ConfigError: if it cannot be converted, or gives other numbers than TensorFlow.
        """
        with self.lock:
            if self._onnx is None:
                require_tensorflow()
                self._onnx = self._convert_act()
            return self._onnx

    def _convert_act(self) -> OnnxActor:
        spec, slots, ports = self.spec, self.layout.of(*ACTING), self.ports.all
        weights = [
            tf.TensorSpec(slot.shape, slot.dtype, name=f"weights_{i}")
            for i, slot in enumerate(slots)
        ]
        given = self.runtime.signatures.act
        named = [port._replace(name=f"input_{i}").tensor_spec for i, port in enumerate(ports)]
        signature = [*weights, *named, given.noise, given.params]

        def act(*tensors: tf.Tensor) -> list[tf.Tensor]:
            self.functions.traces.note("act (onnx)", *tensors)
            count = len(weights)
            *inputs, noise, params = tensors[count:]
            outputs = self.functions.act(tensors[:count], ActInputs(inputs, noise, params))
            return [tf.identity(x) for x in self.act_layout.flatten(outputs)]

        try:
            model = convert(
                tf.function(act, input_signature=signature, autograph=False),
                signature,
                [port.name for port in self.act_layout.ports()],
            )
            actor = OnnxActor(
                model,
                [slot.key for slot in slots],
                ports,
                spec.explorer.noise_size,
                spec.explorer.num_params,
                self.act_layout,
            )
        except Exception as error:
            raise ConfigError(
                "the model cannot run in ONNX Runtime; use inference='tf' for it. Reason: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        self._check_actor(actor)
        return actor

    def _check_actor(self, actor: OnnxActor) -> None:
        rng = np.random.default_rng(0)
        state, explorer = self.new_state_for_checks(), self.spec.explorer
        params = np.zeros(explorer.num_params, np.float32)
        for rows in (1, 7):
            inputs = self.random_inputs(rows, rng)
            noise = explorer.draw_noise(rng, rows, params)
            ours, wanted = (
                runner.run(state, inputs, noise, params) for runner in (actor, self.runtime)
            )
            found = self.act_layout.first_difference(ours, wanted, _TOLERANCE)
            if found is not None:
                raise ConfigError(
                    f"ONNX Runtime gives other {found[0]} than TensorFlow for this model "
                    f"(largest difference {found[1]:.3g}); use inference='tf' for it."
                )

    def stacked_actor(self, inference: str) -> StackedActor | None:
        """Returns what acts for many states in one call, made and checked on first use.

        Args:
            inference: the runtime that acts, "onnx" or "tf".

        Returns:
            None where states have to act one by one: in graph mode, untraced, or if the stacked
            function cannot be made or gives other numbers.
        """
        with self.lock:
            if inference not in self._stacked:
                require_tensorflow()
                self._stacked[inference] = self._stack_up(inference)
            return self._stacked[inference]

    def _stack_up(self, inference: str) -> StackedActor | None:
        onnx = inference == "onnx"
        if not onnx and (self.runtime is not self._eager or not self.runtime.traced):
            return None
        build = stacked.onnx_actor if onnx else stacked.traced_actor
        parts = self.functions, self.layout, self.act_layout
        try:
            actor = build(*parts, self.runtime.signatures.act)
            found = self._stack_difference(actor, self.onnx_actor() if onnx else self.runtime)
        except Exception as error:
            logger.info("policies of this kind act one by one (%s): %s", inference, error)
            return None
        if found is not None:
            logger.info("policies of this kind act one by one: stacked, %s differ by %g", *found)
            return None
        return actor

    def _stack_difference(self, actor: StackedActor, runner: Any) -> tuple[str, float] | None:
        """Compares stacked acting to acting one by one, with weights of their own each."""
        rng, explorer = np.random.default_rng(0), self.spec.explorer
        hyper, rows = [0.0] * len(self.spec.hyperparameters), 3
        states = [self.new_state(hyper, seed, 0) for seed in range(2)]
        params = np.array([[0.25], [0.75]], np.float32).repeat(explorer.num_params, axis=1)
        inputs = [self.random_inputs(rows, rng) for _ in states]
        noise = np.stack([explorer.draw_noise(rng, rows, row) for row in params])
        ours = actor.run(states, [np.stack(x) for x in zip(*inputs, strict=True)], noise, params)
        for i, state in enumerate(states):
            wanted = runner.run(state, inputs[i], noise[i], params[i])
            mine = self.act_layout.unflatten([x[i] for x in self.act_layout.flatten(ours)])
            found = self.act_layout.first_difference(mine, wanted, _TOLERANCE)
            if found is not None:
                return found
        return None

    def random_inputs(self, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Returns inputs of acting that fit the ports; masks allow everything."""
        ports = self.ports
        obs = [
            np.ones((rows, *leaf.shape), leaf.dtype) if mask else _random_rows(leaf, rows, rng)
            for leaf, mask in zip(ports.obs_leaves, ports.is_mask, strict=True)
        ]
        prev = [port.zeros(rows) for port in ports.prev]
        states = [0.5 * rng.standard_normal((rows, *port.shape)) for port in ports.states]
        return [*obs, *prev, *(x.astype(np.float32) for x in states)]

    def new_state_for_checks(self) -> PolicyState:
        """Returns a state with fresh weights that belongs to no policy."""
        return self.new_state([0.0] * len(self.spec.hyperparameters), 0, 0)

    # -- learning -----------------------------------------------------------------------------

    @property
    def signature(self) -> LearnerSignature:
        """The columns and statistics of the loss; `discover` must have run."""
        if self._signature is None:
            raise ConfigError("the loss of this Program has not run yet; call `discover` first.")
        return self._signature

    @property
    def is_discovered(self) -> bool:
        """Whether the loss has run once, so that its columns are known."""
        return self._signature is not None

    def discover(self, columns: Mapping[str, Any]) -> None:
        """Runs the loss once on a small batch, to see which columns and statistics it has.

        Args:
            columns: NumPy columns of every name that a batch may have after postprocessing.
        """
        with self.lock:
            if self._signature is not None:
                return
            require_tensorflow()
            self._eager.forget()  # layers may update themselves in training mode
            tensors = tf.nest.map_structure(tf.constant, dict(columns))
            rows = len(tf.nest.flatten(tensors)[0])
            rows_of_loss = self.functions.loss_columns(tensors, tf.ones([rows], tf.float32))
            hyper = tf.ones([len(self.spec.hyperparameters)], tf.float32)
            found = self.functions.loss_and_gradients(hyper, rows_of_loss)
            signature = _signature_of(found, tensors)
            weighs = signature.masked or found.batch.reads_lengths
            if self.ports.is_recurrent and not weighs:
                who = f"{self.spec.policy_class.__name__}.loss"
                if found.batch.ignores_mask and LOSS_MASK in found.batch.accessed_keys:
                    who = "custom_loss of the model"
                raise ConfigError(
                    f"{who} does not read train_batch[{LOSS_MASK!r}], which a model with a memory "
                    f"needs: its sequences are padded. Use `tfpolicies.models.losses."
                    f"masked_mean(x, train_batch[{LOSS_MASK!r}])` for its means."
                )
            self._signature = signature

    def learn_epochs(
        self,
        state: PolicyState,
        columns: Mapping[str, Any],
        num_epochs: int,
        minibatch_size: int | None,
        *,
        shuffle: bool,
        met: Met,
    ) -> dict[str, np.ndarray]:
        """Updates a state by every minibatch of every epoch, in one compiled call.

        Args:
            state: of a policy of this kind.
            columns: what `select_columns` returned.
            num_epochs: passes over the batch.
            minibatch_size: rows per update; None for all rows at once.
            shuffle: whether the state's generator shuffles the rows for each epoch.
            met: what is done if the loss or the weights are not finite.

        Returns:
            `mean`, `min` and `max` of the statistics over the minibatches, each float32 `[S]`.
        """
        rows = count_rows(columns)
        size = rows if minibatch_size is None else self.items_of(minibatch_size)
        if self.resolve_form() is Form.PLAIN:  # XLA would compile anew for each smaller size
            size = min(size, rows)
        with self._updating(state, met) as update:
            minibatches = draw_minibatches(rows, num_epochs, size, state.rng if shuffle else None)
            totals = self._run(self._run_minibatches, state, columns, rows, minibatches)
            update.steps, update.loss = minibatches.steps, totals[0, -1]
            update.reason = functools.partial(
                self._reason_in_epochs, state, columns, rows, minibatches
            )
        return dict(zip(("mean", "min", "max"), totals[:, :-1], strict=True))

    @contextlib.contextmanager
    def _updating(self, state: PolicyState, met: Met) -> Iterator[Update]:
        """Has a state in the resident variables while an update runs, and reads it back.

        Until then the state is what it was; an update that fails leaves it and its generator so.

        Args:
            state: of a policy of this kind.
            met: what is done if the loss or the weights are not finite.
        """
        update = Update()
        with state.changing(), self.lock:
            drawn_before = state.rng.bit_generator.state
            try:
                self.runtime.begin_update(state)
                yield update
                after = self.runtime.read(state)
                is_finite = math.isfinite(update.loss) and _is_sound(after)
                if not is_finite:
                    met(functools.partial(update.reason, after))
            except BaseException:
                state.rng.bit_generator.state = drawn_before
                raise
            state.write_segments(after)
            if is_finite:  # looking for a reason leaves other states in the variables
                self.runtime.note(state)
            state.num_grad_updates += update.steps

    def _reason_in_epochs(
        self,
        state: PolicyState,
        columns: Mapping[str, Any],
        rows: int,
        minibatches: Minibatches,
        after: Mapping[str, np.ndarray],
    ) -> Reason:
        """Returns why the minibatches of an update gave what is not finite."""

        def anew(steps: int) -> tuple[PolicyState, bool]:
            twin = state.copy()
            self.runtime.begin_update(twin)
            shorter = minibatches._replace(steps=steps)
            totals = self._run(self._run_minibatches, twin, columns, rows, shorter)
            found = self.runtime.read(twin)
            twin.write_segments(found)
            return twin, math.isfinite(totals[0, -1]) and _is_sound(found)

        before, done = last_sound(state, minibatches.steps, anew)
        chosen = minibatches.rows[done][minibatches.mask[done] > 0]
        minibatch = tf.nest.map_structure(lambda column: column[chosen], dict(columns))
        reason = self._reason(before, minibatch, after)
        if minibatches.steps > 1:
            reason = reason._replace(where=f"minibatch {done + 1} of {minibatches.steps}")
        return reason

    def _reason(
        self, state: PolicyState, columns: Mapping[str, Any], after: Mapping[str, np.ndarray]
    ) -> Reason:
        """Returns why one minibatch gave what is not finite.

        Args:
            state: before.
            columns: of the minibatch.
            after: what the update left, by segment.
        """
        self._eager.begin_update(state)
        found = first_term(self.functions, state, columns) or self._left_bad(after)
        return Reason("the loss, but only traced" if found is None else "{} ({})".format(*found))

    def _left_bad(self, after: Mapping[str, np.ndarray]) -> tuple[str, float] | None:
        """Returns what is not finite of that which an update left, where nothing was before."""
        views = self.layout.views(after) if after else {}
        return first_bad({f"{key!r} behind the update": x for key, x in views.items()})

    def items_of(self, rows: int) -> int:
        """Returns how many items of a batch have about so many rows: rows, or sequences."""
        return max(1, rows // self.spec.time_steps) if self.ports.is_recurrent else rows

    def rows_of(self, columns: Mapping[str, Any]) -> int:
        """Returns the rows of selected columns, without those that only fill up sequences."""
        items = count_rows(columns)
        return int(columns[SEQ_LENS].sum()) if self.ports.is_recurrent else items

    def items_between(self, columns: Mapping[str, Any], start: int, stop: int) -> Any:
        """Returns the index of the rows `[start, stop)`, or of the sequences that begin there."""
        if not self.ports.is_recurrent:
            return slice(start, stop)
        first = np.cumsum(columns[SEQ_LENS]) - columns[SEQ_LENS]
        return np.flatnonzero((first >= start) & (first < stop))

    def learn_once(
        self, state: PolicyState, columns: Mapping[str, Any], met: Met
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Updates a state by one minibatch of all items; returns its statistics and fetches.

        Fetches of the loss's length come back with one entry per row of the batch.
        """
        items = count_rows(columns)

        def run(form: Form, state: PolicyState) -> tuple[Any, Any, int]:
            width, jit = items, form is not Form.PLAIN
            if jit:
                width = padded_rows(items, 1, self._capacity.get((0, 0), 0))
                self._capacity[0, 0] = width
            if jit not in self._singles:
                self._singles[jit] = self.runtime.single_learner(self.signature.columns, jit=jit)
            mask = (np.arange(width) < items).astype(np.float32)
            return *self._singles[jit](state, _pad(columns, width), mask), width

        with self._updating(state, met) as update:
            stats, fetches, width = self._run(run, state)
            update.steps, update.loss = 1, float(stats[LOSS])
            update.reason = functools.partial(self._reason, state, columns)
        values = np.array([float(stats[name]) for name in self.signature.stat_names], np.float32)
        valid = self._valid_rows(columns, items, width)
        found = {name: _of_rows(x, valid) for name, x in fetches.items()}
        return dict.fromkeys(("mean", "min", "max"), values), found

    def _valid_rows(self, columns: Mapping[str, Any], items: int, width: int) -> np.ndarray:
        if not self.ports.is_recurrent:
            return np.arange(width) < items
        steps = np.zeros(width, np.int64)
        steps[:items] = columns[SEQ_LENS]
        return (np.arange(self.spec.time_steps) < steps[:, None]).reshape(-1)

    def _run(self, update: Callable[..., Any], state: PolicyState, *given: Any) -> Any:
        """Runs an update on the resident state; without XLA from here on if it cannot compile.

        Args:
            update: called as `update(form, state, *given)`; returns what this returns.
            state: the resident state.
            *given: what else it takes.
        """
        form = self.resolve_form()
        try:
            found = update(form, state, *given)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            is_wanted = self.spec.static["jit_compile"] is True
            if form is Form.PLAIN or self._jit_works or is_wanted:
                raise
            reason = str(error).splitlines()[0]
            logger.warning("learning runs without XLA, which cannot compile it: %s", reason)
            self.form = Form.PLAIN
            self.runtime.begin_update(state)  # afresh
            return update(Form.PLAIN, state, *given)
        self._jit_works = form is not Form.PLAIN
        return found

    def _run_minibatches(
        self,
        form: Form,
        state: PolicyState,
        columns: Mapping[str, Any],
        rows: int,
        minibatches: Minibatches,
        meanwhile: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Runs minibatches in one call, or in several where one would take long.

        Between two of them a signal is seen to, which may end the update.
        """
        if form is not Form.PLAIN:
            kind = (minibatches.epochs, 0 if minibatches.whole else minibatches.size)
            capacity = padded_rows(rows, minibatches.size, self._capacity.get(kind, 0))
            self._capacity[kind] = capacity
            minibatches = minibatches.padded_to(capacity)
            columns = _pad(columns, capacity)
        learner, size = self._learner(form), minibatches.size
        given = self.runtime.placed([dict(columns), minibatches.rows, minibatches.mask])
        totals, first, steps = no_totals(self.signature.stat_names), 0, minibatches.steps
        while True:
            began = time.perf_counter()
            last = min(first + self._pace.minibatches(size), steps)
            piece = np.array([first, last], np.int32)
            totals = learner(state, *given, piece, totals, meanwhile=meanwhile)
            if last > first:
                self._pace.took(size, last - first, time.perf_counter() - began)
            if last == steps:
                return totals
            first, meanwhile = last, None

    def resolve_form(self) -> Form:
        """Decides once how learning is compiled, by what its traced step does.

        XLA compiles only if the loss reads the row mask, so that padded minibatches stay exact.

        Raises:
            ConfigError: if `jit_compile=True` and the loss cannot run on padded minibatches.
        """
        if self.form is None:
            wanted, masked = self.spec.static["jit_compile"], self.signature.masked
            if wanted is True and not masked:
                owner, column = self.spec.policy_class.__name__, f"train_batch[{LOSS_MASK!r}]"
                raise ConfigError(
                    f"jit_compile=True needs a loss that weighs rows by {column}, and {owner}.loss "
                    f"or custom_loss of the model does not read it. Use `masked_mean(x, {column})` "
                    "for its means, or jit_compile=False."
                )
            if wanted is False or not masked or not self.runtime.traced:
                self.form = Form.PLAIN
            else:
                automatic = wanted == "auto"
                work = work_of(self._traced_step(for_xla=not automatic).graph)
                on_cpu = self.functions.device == CPU
                self.form = form_of(work, may_be_plain=automatic, on_cpu=on_cpu)
                if automatic and not work.branches:  # then XLA takes the same trace
                    self._steps[True] = self._steps[False]
        return self.form

    def _traced_step(self, *, for_xla: bool) -> Any:
        """Returns the update by one minibatch, traced on first use."""
        if for_xla not in self._steps:
            signature = self.signature
            self._steps[for_xla] = self.runtime.step(
                signature.columns, signature.stat_names, for_xla=for_xla
            )
        return self._steps[for_xla]

    def _learner(self, form: Form) -> Any:
        if form not in self._learners:
            step = self._traced_step(for_xla=form is not Form.PLAIN)
            exact_rows = not self.signature.masked
            self._learners[form] = self.runtime.learner(
                self.signature.columns, step, form, exact_rows=exact_rows
            )
        return self._learners[form]

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int, *, acting: bool) -> None:
        """Traces and compiles the update for a batch of `rows`, without updating anything.

        With `acting`, the act function is converted for ONNX Runtime while XLA compiles, which
        needs no Python: on two cores the second costs nothing.
        """
        items = self.items_of(rows)
        columns = {
            name: tf.nest.map_structure(lambda s: np.zeros((items, *s.shape[1:]), s.dtype.name), x)
            for name, x in self.signature.columns.items()
        }
        size = min(self.items_of(minibatch_size), items)
        nothing = draw_minibatches(items, num_epochs, size, None)
        require_tensorflow()
        state = self.new_state_for_checks()

        def convert() -> None:
            with contextlib.suppress(ConfigError):  # raised again when a policy asks for it
                self.onnx_actor()

        with self.lock:
            # A compiled step is compiled when it runs; the state that it changes is nobody's.
            steps = int(self.resolve_form() is Form.STEP)
            self.runtime.begin_update(state)
            nothing = nothing._replace(steps=steps)
            meanwhile = convert if acting else None
            self._run(self._run_minibatches, state, columns, rows, nothing, meanwhile)

    def gradients(
        self, state: PolicyState, columns: Mapping[str, Any], met: Met
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Returns the gradients of one batch, in the order of the trainable variables."""
        count_rows(columns)
        with state.lock, self.lock:
            self.runtime.begin_update(state)
            if self._gradients is None:
                self._gradients = self.runtime.gradient_function(self.signature.columns)
            gradients, found = self._gradients(state, dict(columns))
            stats = {name: float(value) for name, value in found.items()}
            if not (math.isfinite(stats.pop(LOSS)) and all_finite(gradients)):
                met(functools.partial(self._reason, state, columns, {}))
        return list(gradients), stats

    def apply_gradients(
        self, state: PolicyState, gradients: Sequence[np.ndarray], met: Met
    ) -> None:
        """Updates a state with given gradients."""

        def reason(after: Mapping[str, np.ndarray]) -> Reason:
            given = {f"gradients[{i}]": x for i, x in enumerate(gradients)}
            found = first_bad(given) or self._left_bad(after)
            return Reason("{} ({})".format(*found))  # type: ignore[misc]

        with self._updating(state, met) as update:
            self.runtime.apply_gradients(state, list(gradients))
            update.reason = reason

    def select_columns(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns the loss reads, in the dtypes it was traced with.

        Raises:
            MissingColumnError: if the batch lacks one of them.
            BatchError: if a column does not fit what the loss was traced with; it is named.
        """
        selected = {}
        for name, spec in self.signature.columns.items():
            if name not in batch:
                raise MissingColumnError(
                    f"The batch has no column {name!r}, which the loss of "
                    f"{self.spec.policy_class.__name__} reads; it has {sorted(batch)}."
                    f"{near_matches(name, batch)} `postprocess_trajectory` adds derived columns."
                )
            selected[name] = _fit(name, spec, batch[name])
        return selected


def _is_sound(segments: Mapping[str, np.ndarray]) -> bool:
    """Whether weights and optimizer slots, all that an update changes, are finite."""
    return all_finite(x for name, x in segments.items() if name.startswith(_UPDATED))


def count_rows(columns: Mapping[str, Any]) -> int:
    """Returns the rows of selected columns.

    Raises:
        BatchError: if there are none, or the columns have different numbers of rows.
    """
    counts = {
        name: sorted({len(leaf) for leaf in tf.nest.flatten(column)})
        for name, column in columns.items()
    }
    found = {count for column in counts.values() for count in column}
    if len(found) > 1:
        raise BatchError(
            f"All columns of a batch need the same number of rows, but they have {counts}."
        )
    if found in (set(), {0}):
        raise BatchError("The batch is empty; learning needs at least one row.")
    return found.pop()


def _require_room(spec: ProgramSpec) -> None:
    """Checks that there is room for the network of a kind, before it is made.

    A factory is the user's own, and called once; but if a file gives its arguments, it is measured.
    """
    if spec.source.is_catalog or is_built_from_file():
        require_room(lambda: spec.source.make(0), f"The model of {spec.policy_class.__name__}")


def _slots(functions: ProgramFunctions) -> list[Slot]:
    network, target, optimizer = functions.network, functions.target, functions.optimizer
    keys = variable_keys(network.model.variables)
    slots = [_slot(v, key, "model") for key, v in zip(keys, network.model.variables, strict=True)]
    for variable in network.filter_variables:
        slots.append(_slot(variable, f"filter/{variable.name.partition(':')[0]}", "filter"))
    if target is not None:
        pairs = zip(keys, target.model.variables, strict=True)
        slots += [_slot(v, f"target/{key}", "target") for key, v in pairs]
    for i, variable in enumerate(optimizer.variables):
        role = variable.path.rpartition("/")[2]
        if i >= 2:  # a slot of a weight: its name repeats the weight's auto-numbered one
            role = role.rpartition("_")[2]
        slots.append(_slot(variable, f"optimizer/{i:03d}_{role}", "learner"))
    return slots


def _idle_keys(functions: ProgramFunctions) -> set[str]:
    """Returns the keys of variables that no layer reads."""
    variables = functions.network.model.variables
    idle = idle_seeds(functions.network.model)
    keys = [
        key for key, v in zip(variable_keys(variables), variables, strict=True) if id(v) in idle
    ]
    return {f"{prefix}{key}" for key in keys for prefix in ("", "target/")}


def _slot(variable: Any, key: str, part: str) -> Slot:
    return Slot(key, tuple(variable.shape), tf.as_dtype(variable.dtype).name, part)


def _signature_of(found: Differentiated, columns: Mapping[str, Any]) -> LearnerSignature:
    read = found.batch.accessed_keys
    specs = {
        name: tf.nest.map_structure(
            lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), columns[name]
        )
        for name in sorted(read - {LOSS_MASK})
    }
    masked = found.batch.is_weighed
    return LearnerSignature(specs, tuple(sorted(found.stats)), tuple(sorted(found.fetches)), masked)


def _fit(name: str, spec: Any, column: Any) -> Any:
    if isinstance(spec, Mapping):
        return {key: _fit(f"{name}/{key}", part, column[key]) for key, part in spec.items()}
    array = np.asarray(column)
    if array.dtype.kind in NO_NUMBERS:
        raise BatchError(f"Column {name!r} must be real numbers, but has the dtype {array.dtype}.")
    shape = tuple(spec.shape[1:])
    if array.ndim == 0 or array.shape[1:] != shape:
        raise BatchError(
            f"Column {name!r} has rows of shape {array.shape[1:]}; the loss was traced for rows of "
            f"shape {shape}. Give all batches of a policy the same shapes."
        )
    return array.astype(spec.dtype.name, copy=False)


def _pad(columns: Mapping[str, Any], capacity: int) -> dict[str, Any]:
    def pad(array: np.ndarray) -> np.ndarray:
        if len(array) == capacity:
            return array
        padded = np.zeros((capacity, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        return padded

    return tf.nest.map_structure(pad, dict(columns))


def _of_rows(array: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return array[valid] if array.shape[:1] == valid.shape else array


def _random_rows(leaf: Any, rows: int, rng: np.random.Generator) -> np.ndarray:
    if leaf.dtype == np.float32:
        return rng.standard_normal((rows, *leaf.shape)).astype(np.float32)
    space = copy.deepcopy(leaf.space)  # the environment's own generator stays where it is
    space.seed(int(rng.integers(2**31)))
    return np.stack([np.asarray(space.sample(), leaf.dtype) for _ in range(rows)])
