"""The function runtime: the Program's functions under `tf.function`, optionally compiled by XLA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.program.functions import ActInputs, ActOutputs, ProgramFunctions, unpack
from tfpolicies.program.outputs import ActLayout
from tfpolicies.state import ACTING, PolicyState, StateLayout


class _Traced:
    """A function traced on its first call, and called without TensorFlow's look-up after it.

    The look-up by signature costs as much as a small model; with one signature there is nothing to
    look up.
    """

    def __init__(self, function: Any, signature: Sequence[Any], *, jit: bool) -> None:
        # Without AutoGraph a trace takes half the time, and its errors point into the user's code.
        self._function = tf.function(function, jit_compile=jit or None, autograph=False)
        self._signature = signature
        self._concrete: Any = None

    def trace(self) -> Any:
        """Traces the function if it was not traced yet; returns the concrete one."""
        if self._concrete is None:
            self._concrete = self._function.get_concrete_function(*self._signature)
        return self._concrete

    def __call__(self, *inputs: Any) -> Any:
        return (self._concrete or self.trace())(*inputs)


class Signatures:
    """What the functions of a Program take, as `tf.TensorSpec`s; the same for every runtime."""

    def __init__(self, functions: ProgramFunctions, layout: StateLayout) -> None:
        spec, ports = functions.spec, functions.network.ports
        self.segments = {
            name: tf.TensorSpec([n], name.split("/")[1]) for name, n in layout.sizes.items()
        }
        self.acting_segments = [self.segments[name] for name in layout.segments(*ACTING)]
        explorer = spec.explorer
        self.act = ActInputs(
            [port.tensor_spec for port in ports.all],
            tf.TensorSpec([None, explorer.noise_size], tf.float32, name="noise"),
            tf.TensorSpec([explorer.num_params], tf.float32, name="params"),
        )
        self.actions = [
            tf.TensorSpec([None, *leaf.shape], leaf.dtype) for leaf in spec.action_leaves
        ]
        self.hyper = tf.TensorSpec([len(spec.hyperparameters)], tf.float32)
        trainable = functions.network.model.trainable_variables
        self.gradients = [tf.TensorSpec(v.shape, v.dtype) for v in trainable]
        self.index = tf.TensorSpec([None, None], tf.int32)
        self.mask = tf.TensorSpec([None, None], tf.float32)
        self.steps = tf.TensorSpec([], tf.int32)


class FlatActing:
    """Acting with the weights as flat segments and with few outputs, as runtimes want it.

    Each output of a traced function costs microseconds, so floats travel as one `[N, k]`.
    """

    def __init__(self, functions: ProgramFunctions, layout: StateLayout, act: ActLayout) -> None:
        self.functions = functions
        self._act = act
        slots, segments = layout.of(*ACTING), layout.segments(*ACTING)
        self._order = [segments.index(slot.segment) for slot in slots]
        self._shapes = [
            [slot.shape for slot in slots if slot.segment == name] for name in segments
        ]

    def weights(self, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the variables of the network, in the layout's order, from flat segments."""
        parts = [iter(found) for found in unpack(flat, self._shapes)]
        return [next(parts[which]) for which in self._order]

    def many(self, flat: Sequence[tf.Tensor], given: ActInputs) -> Any:
        """Acts on any number of rows."""
        self.functions.traces["act"] += 1
        return self._act.pack(self.functions.act(self.weights(flat), given))

    def one(self, flat: Sequence[tf.Tensor], given: ActInputs) -> Any:
        """Acts on one row, for XLA."""
        self.functions.traces["act (one row)"] += 1
        return self._act.pack(self.functions.act(self.weights(flat), given))

    def log_likelihoods(self, flat: Sequence[tf.Tensor], inputs: Any, actions: Any) -> tf.Tensor:
        """Returns the log-probability of normalised actions, `[N]`."""
        return self.functions.log_likelihoods(self.weights(flat), inputs, actions)


class FunctionRuntime:
    """Runs the functions of one Program, eagerly outside and traced inside.

    Each function is traced once: its signature comes from the spaces and columns, with a dynamic
    batch. With `traced=False` the same Python code runs untraced, for a debugger.

    Args:
        functions: the Program's functions over the resident variables.
        layout: the layout of the states that are loaded.
        act: the outputs of acting.
        traced: whether to trace.
    """

    def __init__(
        self, functions: ProgramFunctions, layout: StateLayout, act: ActLayout, *, traced: bool
    ) -> None:
        self.functions = functions
        self.traced = traced
        self._act_layout = act
        self._segments = layout.segments(*ACTING)
        flat = FlatActing(functions, layout, act)
        self.signatures = signatures = Signatures(functions, layout)
        weights = signatures.acting_segments
        self._act = self.trace(flat.many, [weights, signatures.act])
        # One row costs less than dispatching its few dozen operations: XLA runs them as one.
        self._act_one: Any = None
        if traced and functions.spec.static["jit_compile"] is not False:
            one = tf.nest.map_structure(_one_row, signatures.act._replace(params=[]))
            one = one._replace(params=signatures.act.params)
            self._act_one = self.trace(flat.one, [weights, one], jit=True)
        inputs = signatures.act.inputs
        self._log_likelihoods = self.trace(
            flat.log_likelihoods, [weights, inputs, signatures.actions]
        )
        self._load = self.trace(functions.load, [signatures.segments])
        self._read = self.trace(functions.read, [])
        self._apply = self.trace(
            functions.apply_gradients, [signatures.hyper, signatures.gradients]
        )
        self._weights: tuple[PolicyState, int, list[tf.Tensor]] | None = None

    def trace(self, function: Any, signature: Sequence[Any], *, jit: bool = False) -> Any:
        """Returns `function` as a traced function of exactly this signature."""
        return _Traced(function, signature, jit=jit) if self.traced else function

    # -- acting -------------------------------------------------------------------------------

    def run(
        self,
        state: PolicyState,
        inputs: Sequence[np.ndarray],
        noise: np.ndarray,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts for `state`; see `ActInputs`. Returns NumPy arrays."""
        given = ActInputs([tf.constant(x) for x in inputs], tf.constant(noise), tf.constant(params))
        packed = self._run_act(self._flat_weights(state), given, rows=len(noise))
        return self._act_layout.unpack([x.numpy() for x in packed])

    def _run_act(self, flat: Any, given: ActInputs, *, rows: int) -> Any:
        if rows != 1 or self._act_one is None:
            return self._act(flat, given)
        try:
            return self._act_one(flat, given)
        except tf.errors.OpError:  # XLA does not know one of the model's operations
            self._act_one = None
            return self._act(flat, given)

    def log_likelihoods(
        self,
        state: PolicyState,
        inputs: Sequence[np.ndarray],
        actions: Sequence[np.ndarray],
    ) -> np.ndarray:
        """Returns the log-probability of normalised actions, one leaf each, float32 `[N]`."""
        flat = self._flat_weights(state)
        tensors = [[tf.constant(x) for x in part] for part in (inputs, actions)]
        return self._log_likelihoods(flat, *tensors).numpy()

    def _flat_weights(self, state: PolicyState) -> list[tf.Tensor]:
        known = self._weights
        if known is not None and known[0] is state and known[1] == state.version:
            return known[2]
        flat = [tf.constant(state.segments[name]) for name in self._segments]
        self._weights = (state, state.version, flat)
        return flat

    # -- learning -----------------------------------------------------------------------------

    def learner(self, columns: Mapping[str, Any], stat_names: Sequence[str], **kw: bool) -> Any:
        """Returns the traced `learn_epochs` for batches with these columns.

        Args:
            columns: `tf.TensorSpec` per column, nested as the columns are.
            stat_names: the names of the statistics.
            **kw: `jit` and `exact_rows`.
        """
        jit, exact_rows = kw["jit"], kw["exact_rows"]

        def learn_epochs(hyper: Any, columns: Any, index: Any, mask: Any, steps: Any) -> Any:
            return self.functions.learn_epochs(
                hyper, columns, index, mask, steps, stat_names=stat_names, exact_rows=exact_rows
            )

        s = self.signatures
        return self.trace(
            learn_epochs, [s.hyper, dict(columns), s.index, s.mask, s.steps], jit=jit
        )

    def single_learner(self, columns: Mapping[str, Any], *, jit: bool) -> Any:
        """Returns the traced `learn_once` for batches with these columns."""
        mask = tf.TensorSpec([None], tf.float32)
        signature = [self.signatures.hyper, dict(columns), mask]
        return self.trace(self.functions.learn_once, signature, jit=jit)

    def gradient_function(self, columns: Mapping[str, Any]) -> Any:
        """Returns the traced `gradients` for batches with these columns."""
        return self.trace(self.functions.gradients, [self.signatures.hyper, dict(columns)])

    def apply_gradients(self, hyper: np.ndarray, gradients: Sequence[np.ndarray]) -> None:
        """Updates the resident variables with given gradients."""
        self._apply(tf.constant(hyper), [tf.constant(g) for g in gradients])

    def load(self, state: PolicyState) -> None:
        """Copies a state into the resident variables."""
        self._load({name: tf.constant(array) for name, array in state.segments.items()})

    def read_into(self, state: PolicyState) -> None:
        """Copies the resident variables into a state."""
        for name, values in self._read().items():
            state.segments[name][...] = values.numpy()
        state.version += 1


def _one_row(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([1, *spec.shape[1:]], spec.dtype)
