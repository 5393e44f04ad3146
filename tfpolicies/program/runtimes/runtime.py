"""The interfaces of the runtimes of a Program, and their shared code."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import tensorflow as tf

from tfpolicies.base.type_aliases import Structure
from tfpolicies.program.act_outputs import ActOutputLayout
from tfpolicies.program.compile_mode import CompileMode
from tfpolicies.program.devices import CPU
from tfpolicies.program.functions import ActInputs, ActOutputs, ProgramFunctions, split_segments
from tfpolicies.program.minibatches import StepInputs
from tfpolicies.program.policy_state import ACTING_PARTS, PolicyState
from tfpolicies.system.background_call import BackgroundCall


class ActingRuntime(abc.ABC):
    """Acts for states of one Program by one inference backend.

    It is created once per Program, by its line in `ways.py`, and its outputs are compared to those
    of TensorFlow before its first use. It has no state: it must use the weights of the state's
    current `version` in each call. The caller holds the lock of the state.
    """

    @abc.abstractmethod
    def run(
        self,
        states: Any,
        inputs: Sequence[np.ndarray],
        noise: np.ndarray,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts on N rows.

        Args:
            states: one `PolicyState`. A stacked runtime takes a sequence of P states and acquires
                their locks itself; all other arguments and results then have a leading axis P. (A
                single state is not treated as a stack of one: the extra axis would cost as much as
                a small model.)
            inputs: one array `[N, *shape]` per input port of the Program, in the ports' dtypes.
            noise: float32 `[N, noise_size]`; zeros for the greedy actions.
            params: float32 `[num_params]`, of the exploration.

        Returns:
            NumPy arrays; see `ActOutputs`. Valid until the thread's next call.
        """


class RuntimeSpec(NamedTuple):
    """An inference backend, for `ways.py`; its functions take the `Inference` of a Program.

    A backend that converts functions gets them, their signatures and the outputs of acting from the
    `eager` runtime. `build` and `stack` may raise any error about unsupported operations; both are
    called at most once for a Program.
    """

    name: str  # in messages
    is_preferred: Callable[[Any], bool]  # whether "auto" uses it, if it can be built
    build: Callable[[Any], ActingRuntime]
    build_stacked: Callable[[Any], Any] = lambda inference: (
        None
    )  # a `StackedRuntime`; None: one by one


class TFRuntime(ActingRuntime):
    """Runs all functions of one Program on NumPy arrays.

    Learning changes *resident* variables, into which a state is loaded before. An update returns
    their new values, so that they are never read otherwise.

    Args:
        functions: the Program's functions over resident variables.
        act_layout: the outputs of acting.

    Attributes:
        functions: the functions that it runs: in graph mode those of the graph.
        act_layout: the outputs of acting.
        signatures: the inputs of the functions.
        traced: whether functions are traced, and so may be compiled by XLA.
        outlives_policies: whether the Program stays for a while after its last policy is deleted.
    """

    traced = True
    outlives_policies = False

    _act_one_row: Any = None

    def __init__(self, functions: ProgramFunctions, act_layout: ActOutputLayout) -> None:
        self.functions = functions
        self.signatures = Signatures(functions)
        self.act_layout = act_layout

    def _make_functions(self, weights: Mapping[str, tf.TensorSpec]) -> None:
        """Prepares the functions that act, on the segments `weights` or the resident variables."""
        signatures, flat_functions = (
            self.signatures,
            FlatActFunctions(self.functions, self.act_layout, weights),
        )

        def prepare_acting(function: Callable[..., Any], *specs: object, jit: bool = False) -> Any:
            signature = tf.nest.flatten([list(weights.values()), specs])
            return self._prepare(function, [signature], acts=True, jit=jit)

        self._act = prepare_acting(flat_functions.act, signatures.act)  # any number of rows
        on_cpu = self.functions.acting_device == CPU
        if self.traced and on_cpu and self.functions.spec.static["jit_compile"] is not False:
            # For one row: XLA fuses its few dozen operations.
            self._act_one_row = prepare_acting(
                flat_functions.act_one_row, signatures.one_row, jit=True
            )
        inputs, actions = signatures.act.inputs, signatures.actions
        self._log_likelihoods = prepare_acting(flat_functions.log_likelihoods, inputs, actions)
        self._load = self._prepare(self.functions.load, [signatures.segments])

    @abc.abstractmethod
    def _prepare(
        self,
        function: Callable[..., Any],
        signature: Sequence[Any],
        *,
        acts: bool = False,
        jit: bool = False,
    ) -> Any:
        """Prepares a function for this runtime; acting ones take and return a list of tensors."""

    # -- acting -------------------------------------------------------------------------------

    @final
    def run(
        self,
        states: PolicyState,
        inputs: Sequence[np.ndarray],
        noise: np.ndarray,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts for one state; see `ActingRuntime.run`."""
        arrays = [*inputs, noise, params]
        if len(noise) == 1 and self._act_one_row is not None:
            try:
                return self.act_layout.unpack(self._call_acting(self._act_one_row, states, arrays))
            except (tf.errors.OpError, TimeoutError):  # XLA does not support an operation
                self._act_one_row = None
        return self.act_layout.unpack(self._call_acting(self._act, states, arrays))

    @abc.abstractmethod
    def _call_acting(
        self, function: Callable[..., Any], state: PolicyState, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Calls a traced function that acts, with the weights of a state."""

    @final
    def log_likelihoods(
        self,
        state: PolicyState,
        inputs: Sequence[np.ndarray],
        actions: Sequence[np.ndarray],
    ) -> np.ndarray:
        """Returns the log-probability of normalised actions, one leaf each, float32 `[N]`."""
        (logp,) = self._call_acting(self._log_likelihoods, state, [*inputs, *actions])
        return logp

    # -- the resident variables ---------------------------------------------------------------

    @abc.abstractmethod
    def get_resident_state(self, state: PolicyState) -> ResidentState:
        """Returns the record of which state the variables hold that this state uses."""

    @abc.abstractmethod
    def load(self, state: PolicyState) -> None:
        """Copies a state into the resident variables, unless they hold it already."""

    def begin_update(self, state: PolicyState) -> None:
        """Loads a state into the resident variables and marks them as modified."""
        self.load(state)
        self.get_resident_state(state).clear()

    def get_session(self, state: PolicyState) -> Any:
        """Returns the `tf.compat.v1.Session` of a state; None unless in graph mode."""
        del state

    def set_session_creator(self, state: PolicyState, create: Callable[[], Any]) -> None:
        """Sets the function that creates the session of a state, in graph mode."""
        del state, create

    def open_session(self, state: PolicyState) -> None:
        """Opens the session of a state by its creator, in graph mode."""
        del state

    def release_session(self, state: PolicyState) -> None:
        """Releases the session of a state for use by others. It is acquired again on demand."""
        del state

    def close_idle_sessions(self, create: Callable[[], Any]) -> None:
        del create

    def close_session(self, state: PolicyState) -> None:
        """Closes the session of a state. A later use opens a new one."""
        del state

    # -- learning -----------------------------------------------------------------------------

    @final
    def compile_update(
        self,
        function: Callable[..., Any],
        signature: Sequence[Any],
        mode: CompileMode = CompileMode.PLAIN,
    ) -> Callable[..., Any]:
        """Returns an update function that works on the resident variables.

        Args:
            function: takes the hyperparameters `[H]` and then the inputs of `signature`.
            signature: nests of `tf.TensorSpec`.
            mode: `LOOP`: XLA compiles it; `STEP`: it calls a function that XLA compiles.

        Returns:
            A function `f(state, *given, shapes=None, meanwhile=None)` that takes results of
                `placed` and
            returns arrays or tensors. If it is compiled, the first call with other `shapes` is
                preceded by
            a warm-up call in another thread, so that the caller can be interrupted, with
                `meanwhile()` in
            this thread. It raises a `NotCompiledError` if the warm-up fails.
        """
        full_signature = [self.signatures.hyperparameters, *signature]
        prepared = self._prepare(function, full_signature, jit=mode is CompileMode.LOOP)

        def update(
            state: PolicyState,
            *inputs: object,
            shapes: Hashable = None,
            meanwhile: Callable[[], None] | None = None,
        ) -> Any:
            key = None if mode is CompileMode.PLAIN else (prepared, shapes)
            if key is not None:
                prepared.trace()  # in this thread
            self._warm_up(key, prepared, state, inputs, meanwhile)
            return self._call_update(prepared, state, inputs)

        return update

    @abc.abstractmethod
    def _warm_up(
        self,
        key: Hashable,
        function: Callable[..., Any],
        state: PolicyState,
        inputs: Sequence[Any],
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """Compiles an update function by XLA; changes no variable from which the state is read.

        `key` identifies function and shapes; it is None if nothing is compiled. `meanwhile` is
        called in this thread in any case. Raises a `NotCompiledError` if XLA cannot compile it in
        `COMPILE_SECONDS`.
        """

    @abc.abstractmethod
    def _call_update(
        self, function: Callable[..., Any], state: PolicyState, inputs: Sequence[Any]
    ) -> Any:
        """Calls an update function on the resident variables."""

    @abc.abstractmethod
    def prepare_inner(
        self, function: Callable[..., Any], signature: Sequence[Any], *, for_xla: bool
    ) -> Any:
        """Returns a function for other functions to call; it may be untraced."""

    def to_device(self, arrays: Structure) -> Any:
        """Returns nested arrays as inputs of update functions; they may be kept."""
        return arrays

    def share_with_device(self, arrays: Structure) -> Any:
        """Returns nested arrays as inputs of one update; they may share memory until it ends."""
        return arrays


def trace_concrete(function: Callable[..., Any], signature: Sequence[Any], *, for_xla: bool) -> Any:
    """Traces a function that other functions call, in the current graph.

    XLA needs loops and branches traced differently (`for_xla`); they then run slower without XLA.
    """
    if not for_xla:
        return tf.function(function, autograph=False).get_concrete_function(*signature)
    traced = []

    def trace_for_xla() -> None:  # functions that are traced within one for XLA are traced for XLA
        traced.append(trace_concrete(function, signature, for_xla=False))

    tf.function(trace_for_xla, jit_compile=True, autograph=False).get_concrete_function()
    return traced[0]


COMPILE_SECONDS = 60.0
"""The time limit for XLA to compile one shape of a function, after which a fallback is used."""


class NotCompiledError(Exception):
    """XLA could not compile a function, or took too long; callers use a fallback."""


class WarmUpCalls:
    """Runs the first call of each compiled shape in a thread, so that callers can be interrupted.

    Such a call takes seconds, mostly for XLA. It works on variables that nothing else reads, so
    callers that are interrupted or time out can leave it running.
    """

    def __init__(self) -> None:
        self._compiled: set[Hashable] = {None}
        self._running: dict[Hashable, BackgroundCall[Any]] = {}

    def run(
        self, key: Hashable, call: Callable[[], Any], meanwhile: Callable[[], None] | None
    ) -> bool:
        """Runs a call in another thread, unless one with this key has succeeded; returns whether.

        `meanwhile` is called in this thread in any case. The call must acquire no lock. Raises a
        `NotCompiledError` if it fails, or takes longer than `COMPILE_SECONDS`.
        """
        is_new = key not in self._compiled
        if is_new and key not in self._running:  # it may run on after a caller was interrupted
            self._running[key] = BackgroundCall(call)
            self._running[key].start()
        if meanwhile is not None:
            meanwhile()
        if not is_new:
            return False
        try:
            self._running[key].result(COMPILE_SECONDS)
        except Exception as error:
            del self._running[key]
            text = str(error) or type(error).__name__
            raise NotCompiledError(text.splitlines()[0]) from error
        except BaseException:
            if self._running[key].cancel():
                del self._running[key]
            raise
        del self._running[key]
        self._compiled.add(key)
        return True


class ResidentState:
    """Records which version of which state a set of variables holds."""

    def __init__(self) -> None:
        self._state_and_version: tuple[weakref.ref[PolicyState], int] | None = None

    def holds(self, state: PolicyState) -> bool:
        entry = self._state_and_version
        return entry is not None and entry[0]() is state and entry[1] == state.version

    def record(self, state: PolicyState) -> None:
        self._state_and_version = (weakref.ref(state), state.version)

    def clear(self) -> None:
        self._state_and_version = None


class Signatures:
    """The inputs of the functions of a Program, as `tf.TensorSpec`s; the same for every runtime."""

    def __init__(self, functions: ProgramFunctions) -> None:
        spec, ports, layout = functions.spec, functions.network.ports, functions.layout
        self.segments = {
            name: tf.TensorSpec([n], name.split("/")[1]) for name, n in layout.segment_sizes.items()
        }
        self.acting_segments = {
            name: self.segments[name] for name in layout.get_segment_names(*ACTING_PARTS)
        }
        explorer = spec.explorer
        self.act = ActInputs(
            [port.tensor_spec for port in ports.all],
            tf.TensorSpec([None, explorer.noise_size], tf.float32, name="noise"),
            tf.TensorSpec([explorer.num_params], tf.float32, name="params"),
        )
        self.actions = [
            tf.TensorSpec([None, *leaf.shape], leaf.dtype) for leaf in spec.action_leaves
        ]
        self.hyperparameters = tf.TensorSpec([len(spec.hyperparameters)], tf.float32)
        differentiated = functions.optimizers.gradient_variables
        self.gradients = [tf.TensorSpec(v.shape, v.dtype) for v in differentiated]
        self.index = tf.TensorSpec([None, None], tf.int32)
        self.mask = tf.TensorSpec([None, None], tf.float32)
        self.step_inputs = _make_step_specs(functions)
        self.chunk = tf.TensorSpec([2], tf.int32)
        self.totals = tf.TensorSpec([3, None], tf.float32)

    @property
    def one_row(self) -> ActInputs:
        rows: ActInputs = tf.nest.map_structure(_to_one_row, self.act._replace(params=[]))
        return rows._replace(params=self.act.params)


class FlatActFunctions:
    """The functions that act, from one list of tensors to another, for runtimes.

    Weights come first, as flat segments. Each output of a traced function costs microseconds, so
    all floats are one tensor `[N, k]`.

    Args:
        functions: the Program's functions.
        output_layout: the outputs of acting.
        segments: the names of the segments; if empty, weights are the resident variables.
    """

    def __init__(
        self, functions: ProgramFunctions, output_layout: ActOutputLayout, segments: Collection[str]
    ) -> None:
        self._functions = functions
        self._output_layout = output_layout
        self._segments = list(segments)
        self._slots = functions.layout.acting_slots

    def _split_inputs(
        self, tensors: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the variables of the network, in the layout's order, and the other inputs."""
        count = len(self._segments)
        if not count:
            return [tf.convert_to_tensor(v) for v in self._functions.network.variables], [*tensors]
        segments = dict(zip(self._segments, tensors[:count], strict=True))
        return split_segments(segments, self._slots), [*tensors[count:]]

    def act(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._run_act("act", tensors)

    def act_one_row(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._run_act("act (one row)", tensors)

    def _run_act(self, name: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        weights, act_inputs = self._split_inputs(tensors)
        self._functions.traces.record(name, act_inputs)
        *inputs, noise, params = act_inputs
        return self._output_layout.pack(
            self._functions.act(weights, ActInputs(inputs, noise, params))
        )

    def log_likelihoods(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns a list with the log-probability of normalised actions, `[N]`."""
        weights, act_inputs = self._split_inputs(tensors)
        count = len(self._functions.network.ports.all)
        return [self._functions.log_likelihoods(weights, act_inputs[:count], act_inputs[count:])]


def _make_step_specs(functions: ProgramFunctions) -> StepInputs:
    spec, inputs = functions.spec, StepInputs()
    if functions.layout.targets and "tau" in spec.hyperparameters:
        inputs = inputs._replace(update_targets=tf.TensorSpec([None], tf.float32))
    if functions.optimizers.skips_updates:
        shape = [None, len(functions.optimizers)]
        inputs = inputs._replace(active_optimizers=tf.TensorSpec(shape, tf.float32))
    if spec.noise_size:
        steps = [spec.max_seq_len] if functions.network.ports.is_recurrent else []
        shape = [None, None, *steps, spec.noise_size]
        inputs = inputs._replace(noise=tf.TensorSpec(shape, tf.float32))
    if spec.update_noise_size:
        shape = [None, spec.update_noise_size]
        inputs = inputs._replace(update_noise=tf.TensorSpec(shape, tf.float32))
    return inputs


def _to_one_row(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([1, *spec.shape[1:]], spec.dtype)


def make_signature_with_weights(
    runtime: TFRuntime, leading_axes: Sequence[None] = ()
) -> list[tf.TensorSpec]:
    """Returns the named inputs of an act function that takes the weights as inputs.

    These are `weights_<i>`, one per slot of the acting part, `input_<i>`, one per port, `noise` and
    `params`; with the leading axes `leading_axes`.
    """
    act_signature, slots = runtime.signatures.act, runtime.functions.layout.acting_slots
    fields = [(f"weights_{i}", slot.shape, slot.dtype) for i, slot in enumerate(slots)]
    fields += [
        (f"input_{i}", spec.shape, spec.dtype) for i, spec in enumerate(act_signature.inputs)
    ]
    fields += [
        (spec.name, spec.shape, spec.dtype) for spec in (act_signature.noise, act_signature.params)
    ]
    return [tf.TensorSpec([*leading_axes, *shape], dtype, name) for name, shape, dtype in fields]


def run_act(
    runtime: TFRuntime,
    tensors: Sequence[tf.Tensor],
    flatten: Callable[[ActOutputs], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Acts on the inputs of `make_signature_with_weights`; `flatten` lists the outputs."""
    count = len(runtime.functions.layout.acting_slots)
    *inputs, noise, params = tensors[count:]
    outputs = runtime.functions.act(tensors[:count], ActInputs(inputs, noise, params))
    return [tf.identity(x) for x in flatten(outputs)]


def make_act_with_weights(runtime: TFRuntime, runtime_name: str) -> Any:
    """Returns the act function of a Program for converters: a traced one, with weights as inputs.

    It takes the inputs of `make_signature_with_weights`, and returns the outputs of
    `runtime.act_layout`. `runtime_name` is the name of the runtime that will act, for the count of
    traces.
    """

    def act(*tensors: tf.Tensor) -> list[tf.Tensor]:
        runtime.functions.traces.record(f"act ({runtime_name})", *tensors)
        return run_act(runtime, tensors, runtime.act_layout.flatten)

    signature = make_signature_with_weights(runtime)
    return tf.function(act, input_signature=signature, autograph=False)
