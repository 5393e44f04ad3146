"""The function runtime: the Program's functions under `tf.function`, optionally compiled by XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.program.devices import CPU, contexts, on_device
from tfpolicies.program.functions import ProgramFunctions
from tfpolicies.program.outputs import ActLayout
from tfpolicies.program.runtimes.runtime import FirstCalls, Resident, Runtime, concrete
from tfpolicies.state import PolicyState
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


class _Acting(_Traced):
    """A function that acts: it takes one list of tensors, so that there is nothing to bind either.

    The first call, in which XLA may compile, runs in a thread that nobody has to wait for.
    """

    _call: Any = None
    _captured: Sequence[Any] = ()

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if self._call is not None:
            return self._call(*tensors, *self._captured)
        concrete = self.trace()
        first = BackgroundCall(functools.partial(concrete, tensors))
        first.start()
        found = first.result()
        self._captured = concrete.captured_inputs
        self._call = concrete.inference_fn.call_flat
        return found


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
        self._resident = Resident()
        self._weights: tuple[PolicyState, int, list[tf.Tensor]] | None = None
        self._make_functions(self.signatures.acting_segments)

    def _made(
        self, function: Any, signature: Sequence[Any], *, acts: bool = False, jit: bool = False
    ) -> Any:
        on = on_device(function, CPU if acts else self.functions.device)
        kind = _Acting if acts else _Traced
        return kind(on, signature, jit=jit) if self.traced else on

    # -- acting -------------------------------------------------------------------------------

    def _called(
        self, function: Any, state: PolicyState, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        if forks.forked_from is not None:
            forks.require_tensorflow()
        with contexts()(CPU):
            tensors = [*self._flat_weights(state), *map(tf.constant, arrays)]
            return [*map(np.array, function(tensors))]

    def _flat_weights(self, state: PolicyState) -> list[tf.Tensor]:
        known = self._weights
        if known is not None and known[0] is state and known[1] == state.version:
            return known[2]
        version, names = state.version, self.signatures.acting_segments
        flat = [tf.constant(state.segments[name]) for name in names]
        self._weights = (state, version, flat)
        return flat

    # -- learning -----------------------------------------------------------------------------

    def _prepared(
        self, function: Any, state: PolicyState, given: Sequence[Any]
    ) -> tuple[FirstCalls, Callable[[], Any]]:
        call = functools.partial(function, tf.constant(state.hyper), *given)
        return self._first_calls, call

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
