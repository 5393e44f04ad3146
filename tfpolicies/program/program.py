"""The Program: what policies of one kind share, made once and used by all of them.

Programs live in a weak registry under their spec's key. A Program holds one network with one
optimizer (the *resident* variables), the traced functions, and the converted act function. Policies
hand it their state with every call. One lock is held for load, update and read-back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.errors import BatchError, ConfigError, MissingColumnError, near_matches
from tfpolicies.models.network import Network, fresh_weights, variable_keys
from tfpolicies.program.functions import LOSS_MASK, ProgramFunctions
from tfpolicies.program.minibatches import Minibatches, draw_minibatches, padded_rows
from tfpolicies.program.runtimes.function import FunctionRuntime
from tfpolicies.program.runtimes.onnx import OnnxActor, convert
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.view import TrainBatch
from tfpolicies.state import PolicyState, Slot, StateLayout

logger = logging.getLogger("tfpolicies")

ACT_OUTPUTS = ("actions", "env_actions", "logp", "prob", "dist_inputs", "values")

_registry: weakref.WeakValueDictionary[tuple, Program] = weakref.WeakValueDictionary()
_registry_lock = threading.Lock()


class LearnerSignature(NamedTuple):
    """What the loss turned out to need when it first ran on a small batch."""

    columns: dict[str, Any]  # tf.TensorSpec (nested for nested columns), by name
    stat_names: tuple[str, ...]
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
        model = spec.source.make(0)
        network = Network(model, spec.obs_leaves)
        optimizer = spec.policy_class.make_optimizer(spec.static)
        optimizer.build(model.trainable_variables)
        self.functions = ProgramFunctions(spec, network, optimizer)
        self.layout = StateLayout(_slots(network, optimizer))
        self._model_start = [np.array(v.numpy()) for v in network.variables]
        self._optimizer_start = [np.array(v.numpy()) for v in optimizer.variables]
        self.runtime = FunctionRuntime(
            self.functions, self.layout, traced=spec.static["eager_tracing"]
        )
        self._resident: tuple[weakref.ref[PolicyState], int] | None = None
        self._signature: LearnerSignature | None = None
        self._learners: dict[bool, Any] = {}
        self._gradients: Any = None
        self._capacity: dict[tuple[int, int], int] = {}
        self._onnx: OnnxActor | None = None
        self._templates_taken: weakref.WeakSet[Any] = weakref.WeakSet()
        self.jit: bool | None = None  # resolved on first use
        self._jit_works = False

    @classmethod
    def of(cls, spec: ProgramSpec) -> Program:
        """Returns the Program of this kind, making it if no policy of the kind lives."""
        with _registry_lock:
            program = _registry.get(spec.key)
            if program is None:
                program = _registry[spec.key] = cls(spec)
            return program

    # -- states -------------------------------------------------------------------------------

    def new_state(
        self, hyper: Sequence[float], weight_seed: int, rng_seed: int, template: Any = None
    ) -> PolicyState:
        """Returns the state of a new policy.

        Its weights are drawn from the layers' initializers with `weight_seed`; but the first policy
        made with a model instance, the `template`, starts with that instance's weights.
        """
        state = PolicyState(self.layout, hyper, np.random.default_rng(rng_seed))
        model = self.functions.network.model
        values = fresh_weights(model, weight_seed, self._model_start)
        if template is not None and template not in self._templates_taken:
            self._templates_taken.add(template)
            for i, variable in enumerate(template.variables):
                values[i] = np.array(variable.numpy())
        keys = [slot.key for slot in self.layout.of("model")]
        state.write(dict(zip(keys, values, strict=True)))
        keys = [slot.key for slot in self.layout.of("learner")]
        state.write(dict(zip(keys, self._optimizer_start, strict=True)))
        return state

    def make_resident(self, state: PolicyState) -> None:
        """Loads a state into the resident variables unless it is there; the lock must be held."""
        known = self._resident
        if known is not None and known[0]() is state and known[1] == state.version:
            return
        self.runtime.load(state)
        self._resident = (weakref.ref(state), state.version)

    def _read_back(self, state: PolicyState) -> None:
        self.runtime.read_into(state)
        self._resident = (weakref.ref(state), state.version)

    # -- acting -------------------------------------------------------------------------------

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of what acting returns: values only where the network has them."""
        return ACT_OUTPUTS if self.has_values else ACT_OUTPUTS[:-1]

    @property
    def has_values(self) -> bool:
        """Whether the network estimates values."""
        return self.spec.with_value

    def output_shapes(self) -> list[tuple[str, tuple[int, ...], np.dtype]]:
        """Returns name, shape without the batch, and dtype of each output of acting."""
        leaf, floats = self.spec.action_leaf, np.dtype(np.float32)
        shapes = {"actions": leaf.shape, "env_actions": leaf.shape}
        shapes["dist_inputs"] = (self.spec.dist_class.num_inputs,)
        is_float = np.issubdtype(leaf.dtype, np.floating)
        env_dtype = np.dtype(leaf.space.dtype) if is_float else leaf.dtype
        kinds = {"actions": leaf.dtype, "env_actions": env_dtype}
        return [(n, shapes.get(n, ()), kinds.get(n, floats)) for n in self.output_names]

    def onnx_actor(self) -> OnnxActor:
        """Returns the converted act function, converting and checking it on first use.

        Raises:
            ConfigError: if it cannot be converted, or gives other numbers than TensorFlow.
        """
        with self.lock:
            if self._onnx is None:
                self._onnx = self._convert_act()
            return self._onnx

    def _convert_act(self) -> OnnxActor:
        spec, slots = self.spec, self.layout.of("model")
        weights = [
            tf.TensorSpec(slot.shape, slot.dtype, name=f"weights_{i}")
            for i, slot in enumerate(slots)
        ]
        obs = [
            tf.TensorSpec([None, *leaf.shape], leaf.dtype, name=f"obs_{i}")
            for i, leaf in enumerate(spec.obs_leaves)
        ]
        noise = tf.TensorSpec([None, spec.dist_class.noise_size], tf.float32, name="noise")

        def act(*inputs: tf.Tensor) -> list[tf.Tensor]:
            self.functions.traces["act (onnx)"] += 1
            count = len(weights)
            outputs = self.functions.act(inputs[:count], inputs[count:-1], inputs[-1])
            return [tf.identity(x) for x in outputs if x is not None]

        signature = [*weights, *obs, noise]
        try:
            model = convert(
                tf.function(act, input_signature=signature, autograph=False),
                signature,
                self.output_names,
            )
            actor = OnnxActor(
                model,
                [slot.key for slot in slots],
                [(leaf.shape, leaf.dtype) for leaf in spec.obs_leaves],
                spec.dist_class.noise_size,
                self.output_shapes(),
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
        state = self.new_state_for_checks()
        for rows in (1, 7):
            obs = [_random_rows(leaf, rows, rng) for leaf in self.spec.obs_leaves]
            noise = self.spec.dist_class.draw_noise(rng, rows)
            ours = actor.run(state, obs, noise)
            wanted = self.runtime.run(state, obs, noise)
            for name, a, b in zip(self.output_names, ours, wanted, strict=True):
                difference = float(np.max(np.abs(a.astype(np.float64) - b), initial=0.0))
                scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
                if not difference <= 1e-4 * scale:
                    raise ConfigError(
                        f"ONNX Runtime gives other {name} than TensorFlow for this model (largest "
                        f"difference {difference:.3g}); use inference='tf' for it."
                    )

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
            self._resident = None  # layers may update themselves in training mode
            tensors = tf.nest.map_structure(tf.constant, dict(columns))
            rows = len(tf.nest.flatten(tensors)[0])
            tensors[LOSS_MASK] = tf.ones([rows], tf.float32)
            hyper = tf.ones([len(self.spec.hyperparameters)], tf.float32)
            _, stats, batch, _ = self.functions.loss_and_gradients(hyper, tensors)
            self._signature = _signature_of(batch, stats)

    def learn_epochs(
        self,
        state: PolicyState,
        columns: Mapping[str, Any],
        num_epochs: int,
        minibatch_size: int | None,
        *,
        shuffle: bool,
    ) -> dict[str, np.ndarray]:
        """Updates a state by every minibatch of every epoch, in one compiled call.

        Args:
            state: of a policy of this kind.
            columns: what `select_columns` returned.
            num_epochs: passes over the batch.
            minibatch_size: rows per update; None for all rows at once.
            shuffle: whether the state's generator shuffles the rows for each epoch.

        Returns:
            `mean`, `min` and `max` of the statistics over the minibatches, each float32 `[S]`.
        """
        rows = count_rows(columns)
        size = rows if minibatch_size is None else minibatch_size
        if not self.resolve_jit():  # XLA would compile anew for each smaller size
            size = min(size, rows)
        minibatches = draw_minibatches(rows, num_epochs, size, state.rng if shuffle else None)
        with self.lock:
            self.make_resident(state)
            self._resident = None  # until it is read back: an update may fail half-way
            totals = self._run(state, columns, rows, minibatches)
            self._read_back(state)
        state.num_grad_updates += minibatches.steps
        return dict(zip(("mean", "min", "max"), totals, strict=True))

    def _run(
        self,
        state: PolicyState,
        columns: Mapping[str, Any],
        rows: int,
        minibatches: Minibatches,
    ) -> np.ndarray:
        """Runs minibatches on the resident state; without XLA from here on if it cannot compile."""
        jit = self.resolve_jit()
        try:
            totals = self._run_learner(state, columns, rows, minibatches, jit=jit)
        except (tf.errors.OpError, TypeError, ValueError) as error:
            settled = not jit or self._jit_works or self.spec.static["jit_compile"] is True
            if settled:
                raise
            reason = str(error).splitlines()[0]
            logger.warning("learning runs without XLA, which cannot compile it: %s", reason)
            self.jit, self._resident = False, None
            self.make_resident(state)
            self._resident = None
            return self._run_learner(state, columns, rows, minibatches, jit=False)
        self._jit_works = jit
        return totals

    def _run_learner(
        self,
        state: PolicyState,
        columns: Mapping[str, Any],
        rows: int,
        minibatches: Minibatches,
        *,
        jit: bool,
    ) -> np.ndarray:
        if jit:
            kind = (minibatches.epochs, 0 if minibatches.whole else minibatches.size)
            capacity = padded_rows(rows, minibatches.size, self._capacity.get(kind, 0))
            self._capacity[kind] = capacity
            minibatches = minibatches.padded_to(capacity)
            columns = _pad(columns, capacity)
        return self._learner(jit)(
            tf.constant(state.hyper),
            tf.nest.map_structure(tf.constant, dict(columns)),
            tf.constant(minibatches.rows),
            tf.constant(minibatches.mask),
            tf.constant(minibatches.steps, tf.int32),
        ).numpy()

    def resolve_jit(self) -> bool:
        """Decides once whether learning is compiled by XLA.

        "auto" compiles if the loss reads the row mask, so that padded minibatches stay exact, and
        if XLA can.

        Raises:
            ConfigError: if `jit_compile=True` and the loss cannot run on padded minibatches.
        """
        if self.jit is None:
            wanted, masked = self.spec.static["jit_compile"], self.signature.masked
            if wanted is True and not masked:
                owner, column = self.spec.policy_class.__name__, f"train_batch[{LOSS_MASK!r}]"
                raise ConfigError(
                    f"jit_compile=True needs a loss that weighs rows by {column}, and {owner}.loss "
                    f"does not read it. Use `masked_mean(x, {column})` for its means, or "
                    "jit_compile=False."
                )
            self.jit = bool(wanted) and masked and self.runtime.traced
        return self.jit

    def _learner(self, jit: bool) -> Any:
        if jit not in self._learners:
            signature = self.signature
            self._learners[jit] = self.runtime.learner(
                signature.columns, signature.stat_names, jit=jit, exact_rows=not signature.masked
            )
        return self._learners[jit]

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int, *, acting: bool) -> None:
        """Traces and compiles the update for a batch of `rows`, without updating anything.

        With `acting`, the act function is converted for ONNX Runtime while XLA compiles, which
        needs no Python: on two cores the second costs nothing.
        """
        columns = {
            name: tf.nest.map_structure(lambda s: np.zeros((rows, *s.shape[1:]), s.dtype.name), x)
            for name, x in self.signature.columns.items()
        }
        nothing = draw_minibatches(rows, num_epochs, min(minibatch_size, rows), None)
        nothing = nothing._replace(steps=0)
        state = self.new_state_for_checks()
        with self.lock, ThreadPoolExecutor(1) as pool:
            self.make_resident(state)
            if self.runtime.traced:
                self._learner(self.resolve_jit()).trace()
            compiling = pool.submit(self._run, state, columns, rows, nothing)
            if acting:
                with contextlib.suppress(ConfigError):  # raised again when a policy asks for it
                    self.onnx_actor()
            compiling.result()
            self._resident = None

    def gradients(
        self, state: PolicyState, columns: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Returns the gradients of one batch, in the order of the trainable variables."""
        rows = count_rows(columns)
        with self.lock:
            self.make_resident(state)
            self._resident = None  # layers may update themselves in training mode
            if self._gradients is None:
                self._gradients = self.runtime.gradient_function(self.signature.columns)
            tensors = tf.nest.map_structure(tf.constant, dict(columns))
            tensors[LOSS_MASK] = tf.ones([rows], tf.float32)
            gradients, stats = self._gradients(tf.constant(state.hyper), tensors)
        values = {name: float(value) for name, value in stats.items()}
        return [g.numpy() for g in gradients], values

    def apply_gradients(self, state: PolicyState, gradients: Sequence[np.ndarray]) -> None:
        """Updates a state with given gradients."""
        with self.lock:
            self.make_resident(state)
            self._resident = None
            self.runtime.apply_gradients(state.hyper, gradients)
            self._read_back(state)

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


def _slots(network: Network, optimizer: Any) -> list[Slot]:
    keys = variable_keys(network.variables)
    slots = [
        Slot(key, tuple(v.shape), tf.as_dtype(v.dtype).name, "model")
        for key, v in zip(keys, network.variables, strict=True)
    ]
    for i, variable in enumerate(optimizer.variables):
        role = variable.path.rpartition("/")[2]
        if i >= 2:  # a slot of a weight: its name repeats the weight's auto-numbered one
            role = role.rpartition("_")[2]
        key = f"optimizer/{i:03d}_{role}"
        dtype = tf.as_dtype(variable.dtype).name
        slots.append(Slot(key, tuple(variable.shape), dtype, "learner"))
    return slots


def _signature_of(batch: TrainBatch, stats: Mapping[str, Any]) -> LearnerSignature:
    columns = {
        name: tf.nest.map_structure(
            lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), dict.__getitem__(batch, name)
        )
        for name in sorted(batch.accessed_keys - {LOSS_MASK})
    }
    return LearnerSignature(columns, tuple(sorted(stats)), LOSS_MASK in batch.accessed_keys)


def _fit(name: str, spec: Any, column: Any) -> Any:
    if isinstance(spec, Mapping):
        return {key: _fit(f"{name}/{key}", part, column[key]) for key, part in spec.items()}
    array = np.asarray(column)
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


def _random_rows(leaf: Any, rows: int, rng: np.random.Generator) -> np.ndarray:
    if leaf.dtype == np.float32:
        return rng.standard_normal((rows, *leaf.shape)).astype(np.float32)
    leaf.space.seed(int(rng.integers(2**31)))
    return np.stack([np.asarray(leaf.space.sample(), leaf.dtype) for _ in range(rows)])
