"""The function runtime: the Program's functions under `tf.function`, optionally compiled by XLA."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.base.type_aliases import Structure
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.program.act_outputs import ActOutputLayout
from tfpolicies.program.devices import (
    CPU,
    device_scope,
    get_device_context,
    get_zero_copy_factory,
    pin_to_device,
)
from tfpolicies.program.functions import ProgramFunctions
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.runtimes.runtime import (
    COMPILE_SECONDS,
    ResidentState,
    TFRuntime,
    WarmUpCalls,
    trace_concrete,
)
from tfpolicies.system import fork_guard
from tfpolicies.system.background_call import BackgroundCall


class TracedFunction:
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
        pinned = pin_to_device(function, device)

        def flat(tensors: Sequence[tf.Tensor]) -> Any:
            return pinned(*tf.nest.pack_sequence_as(signature, tensors))

        self._device, self._jit = device, jit

        # Without AutoGraph a trace takes half the time, and its errors point into the user's code.
        self._function = tf.function(flat, jit_compile=jit or None, autograph=False)
        self._signature = tf.nest.flatten(signature)

    def trace(self) -> None:
        if self._call is None:
            concrete_function = self._function.get_concrete_function(self._signature)
            self._captured = concrete_function.captured_inputs
            self._variables = concrete_function.graph.variables
            self._call = concrete_function.inference_fn.call_preflattened

    def __call__(self, *inputs: tf.Tensor) -> Any:
        """Calls it with tensors of the nesting and dtypes of the signature."""
        if self._call is None:
            self.trace()
        with get_device_context()(self._device):
            return self._call([*tf.nest.flatten(inputs), *self._captured])

    def warm_up(self, *inputs: tf.Tensor) -> None:
        """Calls it, traced, on copies of its variables: XLA compiles, and no variable changes."""
        with get_device_context()(self._device):
            copies = {id(x.handle): tf.Variable(x, trainable=False) for x in self._variables}
            captured = [copies[id(x)].handle if id(x) in copies else x for x in self._captured]
            self._call([*tf.nest.flatten(inputs), *captured])


def _map_structure(convert: Callable[[Any], Any], arrays: Structure) -> Any:
    """Does the same as `tf.nest.map_structure` with dicts, lists and tuples, in less time."""
    if not isinstance(arrays, dict | list | tuple):
        return convert(arrays)
    if not arrays:
        return arrays
    items = arrays.values() if isinstance(arrays, dict) else arrays
    parts = [convert(x) if isinstance(x, np.ndarray) else _map_structure(convert, x) for x in items]
    if isinstance(arrays, dict):
        return dict(zip(arrays, parts, strict=True))
    return arrays._make(parts) if hasattr(arrays, "_make") else type(arrays)(parts)


@contextlib.contextmanager
def _eager_on_device(device: str) -> Iterator[None]:
    with ensure_eager(), device_scope(device):
        yield


class _TracedActing(TracedFunction):
    """A function that acts: like its graph it takes one list of tensors and returns one.

    The first call, in which XLA may compile, runs in a background thread with a time limit.
    """

    _has_run = False

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if self._has_run:
            return self._call([*tensors, *self._captured])
        self.trace()

        def call() -> Any:
            with get_device_context()(self._device):  # the current device is per thread
                return self._call([*tensors, *self._captured])

        first = BackgroundCall(call)
        first.start()
        result = first.result(COMPILE_SECONDS if self._jit else math.inf)
        self._has_run = True
        return result


class FunctionRuntime(TFRuntime):
    """Runs the functions of one Program: called eagerly, and traced inside.

    Each function is traced once: its signature comes from the spaces and columns, with a dynamic
    batch size. With `traced=False` the same Python code runs untraced, for a debugger.

    Args:
        functions: the Program's functions over the resident variables.
        act_layout: the outputs of acting.
        traced: whether to trace.
    """

    def __init__(
        self, functions: ProgramFunctions, act_layout: ActOutputLayout, *, traced: bool
    ) -> None:
        super().__init__(functions, act_layout)
        self.traced = traced
        self._warm_up_calls = WarmUpCalls()
        self._resident_state = ResidentState()
        self._share = get_zero_copy_factory()
        self._acting_device = functions.acting_device
        self._weights: tuple[PolicyState, int, list[tf.Tensor]] | None = None
        self._make_functions(self.signatures.acting_segments)

    def _prepare(
        self,
        function: Callable[..., Any],
        signature: Sequence[Any],
        *,
        acts: bool = False,
        jit: bool = False,
    ) -> Any:
        device = self.functions.acting_device if acts else self.functions.device
        if not self.traced:
            return pin_to_device(function, device)
        return (_TracedActing if acts else TracedFunction)(function, signature, device, jit=jit)

    # -- acting -------------------------------------------------------------------------------

    def _call_acting(
        self, function: Callable[..., Any], state: PolicyState, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        if fork_guard.forked_from_pid is not None:
            fork_guard.check_tensorflow_survived_fork()
        device = self._acting_device
        with get_device_context()(device) if tf.executing_eagerly() else _eager_on_device(device):
            cached = self._weights
            if cached is None or cached[0] is not state or cached[1] != state.version:
                cached = self._weights = self._make_weight_tensors(state)
            return [*map(np.array, function([*cached[2], *map(self._share, arrays)]))]

    def _make_weight_tensors(self, state: PolicyState) -> tuple[PolicyState, int, list[tf.Tensor]]:
        """Returns the weights as tensors: copies, unless `acting` has already copied them."""
        copies = state.pending_update is None or self._acting_device != CPU
        convert = tf.constant if copies else self._share
        segments = state.acting_segments
        weights = [convert(segments[name]) for name in self.signatures.acting_segments]
        return state, state.version, weights

    # -- learning -----------------------------------------------------------------------------

    def _warm_up(
        self,
        key: Hashable,
        function: Any,
        state: PolicyState,
        inputs: Sequence[Any],
        meanwhile: Callable[[], None] | None,
    ) -> None:
        def call() -> None:
            function.warm_up(self.share_with_device(state.hyperparameters.copy()), *inputs)

        self._warm_up_calls.run(key, call, meanwhile)

    def _call_update(
        self, function: Callable[..., Any], state: PolicyState, inputs: Sequence[Any]
    ) -> Any:
        return function(self.share_with_device(state.hyperparameters.copy()), *inputs)

    def prepare_inner(
        self, function: Callable[..., Any], signature: Sequence[Any], *, for_xla: bool
    ) -> Any:
        pinned = pin_to_device(function, self.functions.device)
        return trace_concrete(pinned, signature, for_xla=for_xla) if self.traced else pinned

    def to_device(self, arrays: Structure) -> Any:
        with device_scope(self.functions.device):
            return _map_structure(tf.constant, arrays)

    def share_with_device(self, arrays: Structure) -> Any:
        """Returns nested arrays as tensors for learning; on the CPU they may share memory."""
        if self.functions.device != CPU:  # a loop runs on the device of its inputs
            return self.to_device(arrays)
        return _map_structure(self._share, arrays)

    def load(self, state: PolicyState) -> None:
        fork_guard.check_tensorflow_survived_fork()
        if not self._resident_state.holds(state):
            self._load(self.to_device(self.functions.layout.complete_segments(state.segments)))
            self._resident_state.record(state)

    def clear_resident_state(self) -> None:
        self._resident_state.clear()

    def get_resident_state(self, state: PolicyState) -> ResidentState:
        return self._resident_state
