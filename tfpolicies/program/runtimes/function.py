"""The function runtime: the Program's functions under `tf.function`, optionally compiled by XLA."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.program.devices import CPU, contexts, lender, on_device, placed
from tfpolicies.program.functions import ProgramFunctions
from tfpolicies.program.outputs import ActLayout
from tfpolicies.program.runtimes.runtime import (
    COMPILE_SECONDS,
    Rehearsals,
    Resident,
    Runtime,
    concrete,
)
from tfpolicies.state import PolicyState
from tfpolicies.system import forks
from tfpolicies.system.interruptible import BackgroundCall
from tfpolicies.type_aliases import Structure


class Traced:
    """A function that is traced on its first call, and then called as a graph.

    TensorFlow's own call binds arguments and looks up captured tensors each time, which takes as
    long as a small model. A graph takes flat tensors, and with one signature there is nothing to
    look up.

    Args:
        function: takes the inputs that `signature` describes.
        signature: nests of `tf.TensorSpec`.
        device: where it is traced and called.
        jit: whether XLA compiles it.
    """

    _call: Any = None
    _captured: Sequence[Any] = ()
    _variables: Sequence[tf.Variable] = ()

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Sequence[Any],
        device: str,
        *,
        jit: bool = False,
    ) -> None:
        on = on_device(function, device)

        def flat(tensors: Sequence[tf.Tensor]) -> Any:
            return on(*tf.nest.pack_sequence_as(signature, tensors))

        self._device, self._jit = device, jit

        # Without AutoGraph a trace takes half the time, and its errors point into the user's code.
        self._function = tf.function(flat, jit_compile=jit or None, autograph=False)
        self._signature = tf.nest.flatten(signature)

    def trace(self) -> None:
        if self._call is None:
            concrete = self._function.get_concrete_function(self._signature)
            self._captured = concrete.captured_inputs
            self._variables = concrete.graph.variables
            self._call = concrete.inference_fn.call_preflattened

    def __call__(self, *inputs: tf.Tensor) -> Any:
        """Calls it with tensors of the nesting and dtypes of the signature."""
        if self._call is None:
            self.trace()
        with contexts()(self._device):
            return self._call([*tf.nest.flatten(inputs), *self._captured])

    def rehearse(self, *inputs: tf.Tensor) -> None:
        """Calls it, traced, on copies of its variables: XLA compiles, and no variable changes."""
        with contexts()(self._device):
            copies = {id(x.handle): tf.Variable(x, trainable=False) for x in self._variables}
            captured = [copies[id(x)].handle if id(x) in copies else x for x in self._captured]
            self._call([*tf.nest.flatten(inputs), *captured])


def _mapped(place: Callable[[Any], Any], arrays: Structure) -> Any:
    """Does the same as `tf.nest.map_structure` with dicts, lists and tuples, in less time."""
    if not isinstance(arrays, dict | list | tuple):
        return place(arrays)
    if not arrays:
        return arrays
    items = arrays.values() if isinstance(arrays, dict) else arrays
    parts = [place(x) if isinstance(x, np.ndarray) else _mapped(place, x) for x in items]
    if isinstance(arrays, dict):
        return dict(zip(arrays, parts, strict=True))
    return arrays._make(parts) if hasattr(arrays, "_make") else type(arrays)(parts)


@contextlib.contextmanager
def _eager_on(device: str) -> Iterator[None]:
    with ensure_eager(), placed(device):
        yield


class _Acting(Traced):
    """A function that acts: like its graph it takes one list of tensors and returns one.

    The first call, in which XLA may compile, runs in a background thread with a time limit.
    """

    _has_run = False

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if self._has_run:
            return self._call([*tensors, *self._captured])
        self.trace()

        def call() -> Any:
            with contexts()(self._device):  # the current device is per thread
                return self._call([*tensors, *self._captured])

        first = BackgroundCall(call)
        first.start()
        found = first.result(COMPILE_SECONDS if self._jit else math.inf)
        self._has_run = True
        return found


class FunctionRuntime(Runtime):
    """Runs the functions of one Program: called eagerly, and traced inside.

    Each function is traced once: its signature comes from the spaces and columns, with a dynamic
    batch size. With `traced=False` the same Python code runs untraced, for a debugger.

    Args:
        functions: the Program's functions over the resident variables.
        act_layout: the outputs of acting.
        traced: whether to trace.
    """

    def __init__(self, functions: ProgramFunctions, act: ActLayout, *, traced: bool) -> None:
        super().__init__(functions, act)
        self.traced = traced
        self._rehearsals = Rehearsals()
        self._resident = Resident()
        self._lend = lender()
        self._acting_device = functions.acting_device
        self._weights: tuple[PolicyState, int, list[tf.Tensor]] | None = None
        self._make_functions(self.signatures.acting_segments)

    def _made(
        self,
        function: Callable[..., Any],
        signature: Sequence[Any],
        *,
        acts: bool = False,
        jit: bool = False,
    ) -> Any:
        device = self.functions.acting_device if acts else self.functions.device
        if not self.traced:
            return on_device(function, device)
        return (_Acting if acts else Traced)(function, signature, device, jit=jit)

    # -- acting -------------------------------------------------------------------------------

    def _called(
        self, function: Callable[..., Any], state: PolicyState, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        if forks.forked_from is not None:
            forks.require_tensorflow()
        device = self._acting_device
        with contexts()(device) if tf.executing_eagerly() else _eager_on(device):
            known = self._weights
            if known is None or known[0] is not state or known[1] != state.version:
                known = self._weights = self._placed_weights(state)
            return [*map(np.array, function([*known[2], *map(self._lend, arrays)]))]

    def _placed_weights(self, state: PolicyState) -> tuple[PolicyState, int, list[tf.Tensor]]:
        """Returns the weights as tensors: copies, unless `acting` has already copied them."""
        copies = state.left is None or self._acting_device != CPU
        place = tf.constant if copies else self._lend
        segments = state.acting
        weights = [place(segments[name]) for name in self.signatures.acting_segments]
        return state, state.version, weights

    # -- learning -----------------------------------------------------------------------------

    def _rehearse(
        self,
        key: Hashable,
        function: Any,
        state: PolicyState,
        given: Sequence[Any],
        meanwhile: Callable[[], None] | None,
    ) -> None:
        def call() -> None:
            function.rehearse(self.lent(state.hyper.copy()), *given)

        self._rehearsals.run(key, call, meanwhile)

    def _update(
        self, function: Callable[..., Any], state: PolicyState, given: Sequence[Any]
    ) -> Any:
        return function(self.lent(state.hyper.copy()), *given)

    def inner(
        self, function: Callable[..., Any], signature: Sequence[Any], *, for_xla: bool
    ) -> Any:
        on = on_device(function, self.functions.device)
        return concrete(on, signature, for_xla=for_xla) if self.traced else on

    def placed(self, arrays: Structure) -> Any:
        with placed(self.functions.device):
            return _mapped(tf.constant, arrays)

    def lent(self, arrays: Structure) -> Any:
        """Returns nested arrays as tensors for learning; on the CPU they may share memory."""
        if self.functions.device != CPU:  # a loop is where what it reads is
            return self.placed(arrays)
        return _mapped(self._lend, arrays)

    def load(self, state: PolicyState) -> None:
        forks.require_tensorflow()
        if not self._resident.is_there(state):
            self._load(self.placed(dict(state.segments)))
            self._resident.note(state)

    def forget(self) -> None:
        self._resident.forget()

    def resident(self, state: PolicyState) -> Resident:
        return self._resident
