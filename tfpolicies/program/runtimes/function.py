"""The function runtime: the Program's functions under `tf.function`, optionally compiled by XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.program.devices import CPU, contexts, on_device
from tfpolicies.program.functions import ActInputs, ProgramFunctions
from tfpolicies.program.outputs import ActLayout
from tfpolicies.program.runtimes.runtime import FirstCalls, FlatActing, Resident, Runtime, concrete
from tfpolicies.program.update_forms import Form
from tfpolicies.state import ACTING, PolicyState
from tfpolicies.system import forks
from tfpolicies.system.interruptible import BackgroundCall


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


class _OneShape(_Traced):
    """A function that XLA compiles, for one shape: in a thread that nobody has to wait for."""

    _is_compiled = False

    def __call__(self, *inputs: Any) -> Any:
        if self._is_compiled:
            return self._concrete(*inputs)
        call = BackgroundCall(functools.partial(self.trace(), *inputs))
        call.start()
        found = call.result()
        self._is_compiled = True
        return found


class _Update:
    """An update function that takes a state and arrays, and gives arrays."""

    def __init__(self, function: Any, form: Form, first_calls: FirstCalls) -> None:
        self._function = function
        self._form = form
        self._first_calls = first_calls

    def trace(self) -> None:
        """Traces the function if it is one to be traced and was not traced yet."""
        if isinstance(self._function, _Traced):
            self._function.trace()

    def __call__(
        self,
        state: PolicyState,
        *given: Any,
        shapes: Any = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        call = functools.partial(self._function, tf.constant(state.hyper), *given)
        key = None if self._form is Form.PLAIN else (self, shapes)
        return self._first_calls.run(key, call, meanwhile, self.trace)


class FunctionRuntime(Runtime):
    """Runs the functions of one Program, eagerly outside and traced inside.

    Each function is traced once: its signature comes from the spaces and columns, with a dynamic
    batch. With `traced=False` the same Python code runs untraced, for a debugger.

    Args:
        functions: the Program's functions over the resident variables.
        act: the outputs of acting.
        traced: whether to trace.
    """

    def __init__(self, functions: ProgramFunctions, act: ActLayout, *, traced: bool) -> None:
        super().__init__(functions, act)
        self.traced = traced
        self._first_calls = FirstCalls()
        self._segments = functions.layout.segments(*ACTING)
        flat, signatures = FlatActing(functions, act), self.signatures
        weights = signatures.acting_segments
        self._act = self._trace(on_device(flat.many, CPU), [weights, signatures.act])
        if traced and functions.spec.static["jit_compile"] is not False:
            one_row = [weights, signatures.one_row]
            self._act_one = _OneShape(on_device(flat.one, CPU), one_row, jit=True)
        inputs = signatures.act.inputs
        self._log_likelihoods = self._trace(
            on_device(flat.log_likelihoods, CPU), [weights, inputs, signatures.actions]
        )
        device = functions.device
        self._load = self._trace(on_device(functions.load, device), [signatures.segments])
        self._weights: tuple[PolicyState, int, dict[str, tf.Tensor]] | None = None
        self._resident = Resident()

    def _trace(self, function: Any, signature: Sequence[Any], *, jit: bool = False) -> Any:
        """Returns `function` as a traced function of exactly this signature."""
        return _Traced(function, signature, jit=jit) if self.traced else function

    # -- acting -------------------------------------------------------------------------------

    def _called(
        self, function: Any, state: PolicyState, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        if forks.forked_from is not None:
            forks.require_tensorflow()
        with contexts()(CPU):
            *inputs, noise, params = map(tf.constant, arrays)
            given = ActInputs(inputs, noise, params)
            return [*map(np.array, function(self._flat_weights(state), given))]

    def log_likelihoods(
        self,
        state: PolicyState,
        inputs: Sequence[np.ndarray],
        actions: Sequence[np.ndarray],
    ) -> np.ndarray:
        """Returns the log-probability of normalised actions, one leaf each, float32 `[N]`."""
        forks.require_tensorflow()
        flat = self._flat_weights(state)
        tensors = [[tf.constant(x) for x in part] for part in (inputs, actions)]
        return self._log_likelihoods(flat, *tensors).numpy()

    def _flat_weights(self, state: PolicyState) -> Mapping[str, tf.Tensor]:
        known = self._weights
        if known is not None and known[0] is state and known[1] == state.version:
            return known[2]
        version = state.version
        flat = {name: tf.constant(state.segments[name]) for name in self._segments}
        self._weights = (state, version, flat)
        return flat

    # -- learning -----------------------------------------------------------------------------

    def compiled(self, function: Any, signature: Sequence[Any], form: Form = Form.PLAIN) -> Any:
        """Returns an update function; see `Runtime.compiled`."""
        on = on_device(function, self.functions.device)
        traced = self._trace(on, [self.signatures.hyper, *signature], jit=form is Form.LOOP)
        return _Update(traced, form, self._first_calls)

    def inner(self, function: Any, signature: Sequence[Any], *, for_xla: bool) -> Any:
        """Returns a function for other functions to call; see `Runtime.inner`."""
        on = on_device(function, self.functions.device)
        return concrete(on, signature, for_xla=for_xla) if self.traced else on

    def placed(self, arrays: Any) -> Any:
        """Returns nested arrays as tensors."""
        return tf.nest.map_structure(tf.constant, arrays)

    def load(self, state: PolicyState) -> None:
        """Copies a state into the resident variables, unless it is there."""
        forks.require_tensorflow()
        if not self._resident.is_there(state):  # nor is it while a call is left behind
            self._first_calls.settle()
            self._load({name: tf.constant(array) for name, array in state.segments.items()})
            self._resident.note(state)

    def forget(self) -> None:
        """Says that the resident variables are about to hold no state."""
        self._first_calls.settle()
        self._resident.forget()

    def resident(self, state: PolicyState) -> Resident:
        """Returns what remembers which state lies in the variables."""
        del state
        return self._resident
