"""What every runtime of a Program is asked for, and what they share."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import tensorflow as tf

from tfpolicies.program.devices import CPU
from tfpolicies.program.functions import ActInputs, ActOutputs, ProgramFunctions, unpack
from tfpolicies.program.minibatches import StepInputs
from tfpolicies.program.outputs import ActLayout
from tfpolicies.program.update_forms import Form
from tfpolicies.state import ACTING, PolicyState
from tfpolicies.system.interruptible import BackgroundCall
from tfpolicies.type_aliases import Structure


class Actor(abc.ABC):
    """Acts for states of one Program: the act function, made ready for one way of running it.

    An actor is made once for a Program, by its line in `ways.py`; what it gives is compared to what
    TensorFlow does before anybody uses it. It keeps no state: the weights are read from the state
    in each call, so it must see to it that they are those of the state's present `version`. The
    lock of the state is held by the caller.
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
            states: one `PolicyState`. A stacked actor takes a sequence of P of them, whose locks
                it takes by itself, and the other arguments and all results have P in front. (One
                state is no stack of one, for an axis more costs what a small model does.)
            inputs: one array `[N, *shape]` per input port of the Program, in the ports' dtypes.
            noise: float32 `[N, noise_size]`; zeros for the greedy actions.
            params: float32 `[num_params]`, of the exploration.

        Returns:
            NumPy arrays; see `ActOutputs`. Valid until the thread's next call.
        """


class Way(NamedTuple):
    """A runtime that acts, for `ways.py`; its functions take the `Inference` of a Program.

    What is converted takes its functions, their signatures and the outputs of acting from the
    `eager` runtime of a Program's inference. `build` and `stack` may raise anything for what they
    cannot do; both are called at most once for a Program.
    """

    name: str  # in messages
    fits: Callable[[Any], bool]  # whether "auto" takes it, if it can be built
    build: Callable[[Any], Actor]
    stack: Callable[[Any], Any] = lambda inference: None  # a `StackedActor`, or one by one


class Runtime(Actor):
    """Runs all functions of one Program: NumPy arrays go in and come out.

    Learning happens in *resident* variables, into which a state is loaded before. What an update
    leaves of them comes out of it, so that they are never read otherwise.

    Args:
        functions: the Program's functions over resident variables.
        act: the outputs of acting.

    Attributes:
        functions: the functions that it runs: in graph mode those of the graph.
        act_layout: the outputs of acting.
        signatures: what the functions take.
        traced: whether functions are traced, and so may be compiled by XLA.
        is_kept: whether the Program stays for a while when the last policy of its kind goes.
    """

    traced = True
    is_kept = False

    _act_one: Any = None

    def __init__(self, functions: ProgramFunctions, act: ActLayout) -> None:
        self.functions = functions
        self.signatures = Signatures(functions)
        self.act_layout = act

    def _make_functions(self, weights: Mapping[str, tf.TensorSpec]) -> None:
        """Makes what acts, and what loads a state.

        Args:
            weights: the segments that acting is given; none where it reads resident variables.
        """
        signatures, flat = self.signatures, FlatActing(self.functions, self.act_layout, weights)

        def acting(function: Callable[..., Any], *given: object, jit: bool = False) -> Any:
            signature = tf.nest.flatten([list(weights.values()), given])
            return self._made(function, [signature], acts=True, jit=jit)

        self._act = acting(flat.many, signatures.act)  # any number of rows
        on_cpu = self.functions.acting_device == CPU
        if self.traced and on_cpu and self.functions.spec.static["jit_compile"] is not False:
            # One row: XLA runs its few dozen operations as one.
            self._act_one = acting(flat.one, signatures.one_row, jit=True)
        inputs, actions = signatures.act.inputs, signatures.actions
        self._log_likelihoods = acting(flat.log_likelihoods, inputs, actions)
        self._load = self._made(self.functions.load, [signatures.segments])

    @abc.abstractmethod
    def _made(
        self,
        function: Callable[..., Any],
        signature: Sequence[Any],
        *,
        acts: bool = False,
        jit: bool = False,
    ) -> Any:
        """Returns a function as this runtime runs it.

        Args:
            function: takes what `signature` says; if it acts, one list of tensors, and gives one.
            signature: nests of `tf.TensorSpec`.
            acts: whether it acts.
            jit: whether XLA compiles it.
        """

    # -- acting -------------------------------------------------------------------------------

    @final
    def run(
        self,
        states: PolicyState,
        inputs: Sequence[np.ndarray],
        noise: np.ndarray,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts for one state; see `Actor.run`."""
        given = [*inputs, noise, params]
        if len(noise) == 1 and self._act_one is not None:
            try:
                return self.act_layout.unpack(self._called(self._act_one, states, given))
            except (tf.errors.OpError, TimeoutError):  # XLA does not know one of the operations
                self._act_one = None
        return self.act_layout.unpack(self._called(self._act, states, given))

    @abc.abstractmethod
    def _called(
        self, function: Callable[..., Any], state: PolicyState, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns what a function that acts gives for one state.

        Args:
            function: what `_made` gave.
            state: whose weights it takes.
            arrays: what else.
        """

    @final
    def log_likelihoods(
        self,
        state: PolicyState,
        inputs: Sequence[np.ndarray],
        actions: Sequence[np.ndarray],
    ) -> np.ndarray:
        """Returns the log-probability of normalised actions, one leaf each, float32 `[N]`."""
        (found,) = self._called(self._log_likelihoods, state, [*inputs, *actions])
        return found

    # -- the resident variables ---------------------------------------------------------------

    @abc.abstractmethod
    def resident(self, state: PolicyState) -> Resident:
        """Returns what remembers which state lies in the variables that serve this one."""

    @abc.abstractmethod
    def load(self, state: PolicyState) -> None:
        """Copies a state into the resident variables, unless it is there."""

    def begin_update(self, state: PolicyState) -> None:
        """Has a state in the resident variables, and forgets it: they are about to change."""
        self.load(state)
        self.resident(state).forget()

    def session(self, state: PolicyState) -> Any:
        """Returns the `tf.compat.v1.Session` of a state; None where there are no sessions."""
        del state

    def open_sessions_with(self, state: PolicyState, create: Callable[[], Any]) -> None:
        """Says what makes the session of a state, where there are sessions."""
        del state, create

    def open(self, state: PolicyState) -> None:
        """Opens the session of a state by its creator, where there are sessions."""
        del state

    def release(self, state: PolicyState) -> None:
        """Leaves what is held for one state to others of the Program; a later use takes it anew."""
        del state

    def drop_idle(self, create: Callable[[], Any]) -> None:
        """Gives back what nobody took of what was left to others, of one session creator."""
        del create

    def close(self, state: PolicyState) -> None:
        """Gives back what is held for one state; a later use takes it anew."""
        del state

    # -- learning -----------------------------------------------------------------------------

    @final
    def compiled(
        self, function: Callable[..., Any], signature: Sequence[Any], form: Form = Form.PLAIN
    ) -> Callable[..., Any]:
        """Returns an update function that works on the resident variables.

        Args:
            function: takes the hyper-parameters `[H]` and then what `signature` says.
            signature: nests of `tf.TensorSpec`.
            form: `LOOP` has XLA compile it; `STEP` says that it compiles what it calls.

        Returns:
            A function `f(state, *given, shapes=None, meanwhile=None)` that takes what `placed` gave
            and gives arrays or tensors. Before the first call with other `shapes`, where anything
            is compiled, a rehearsal runs in another thread, so that its caller can be interrupted,
            and `meanwhile()` in this one. It raises a `NotCompiledError` if that fails.
        """
        takes = [self.signatures.hyper, *signature]
        made = self._made(function, takes, jit=form is Form.LOOP)

        def update(
            state: PolicyState,
            *given: object,
            shapes: Hashable = None,
            meanwhile: Callable[[], None] | None = None,
        ) -> Any:
            key = None if form is Form.PLAIN else (made, shapes)
            if key is not None:
                made.trace()  # in this thread
            self._rehearse(key, made, state, given, meanwhile)
            return self._update(made, state, given)

        return update

    @abc.abstractmethod
    def _rehearse(
        self,
        key: Hashable,
        function: Callable[..., Any],
        state: PolicyState,
        given: Sequence[Any],
        meanwhile: Callable[[], None] | None,
    ) -> None:
        """Has XLA compile an update function; changes no variable that the state is read from.

        Args:
            key: of what is compiled; None if nothing is.
            function: what `_made` gave, traced.
            state: in the resident variables.
            given: what the function is called with.
            meanwhile: called in this thread in any case.

        Raises:
            NotCompiledError: if XLA cannot compile it, or takes longer than `COMPILE_SECONDS`.
        """

    @abc.abstractmethod
    def _update(
        self, function: Callable[..., Any], state: PolicyState, given: Sequence[Any]
    ) -> Any:
        """Calls an update function on the resident variables."""

    @abc.abstractmethod
    def inner(
        self, function: Callable[..., Any], signature: Sequence[Any], *, for_xla: bool
    ) -> Any:
        """Returns a function for other functions to call; see `concrete`. Untraced if none is."""

    def placed(self, arrays: Structure) -> Any:
        """Returns nested arrays where update functions take them from, as copies if those last."""
        return arrays

    def lent(self, arrays: Structure) -> Any:
        """Returns arrays in dicts and tuples that nobody changes while one update runs, for it."""
        return arrays


def concrete(function: Callable[..., Any], signature: Sequence[Any], *, for_xla: bool) -> Any:
    """Traces a function that other functions call, in the present graph.

    Args:
        function: what is traced.
        signature: nests of `tf.TensorSpec`.
        for_xla: trace loops and branches as XLA needs them. They run slower then without XLA, and
            with XLA not at all otherwise.
    """
    if not for_xla:
        return tf.function(function, autograph=False).get_concrete_function(*signature)
    found = []

    def around() -> None:  # what is traced while XLA's function is being traced is for XLA, too
        found.append(concrete(function, signature, for_xla=False))

    tf.function(around, jit_compile=True, autograph=False).get_concrete_function()
    return found[0]


COMPILE_SECONDS = 60.0
"""How long XLA may compile one shape of a function before another form takes its place."""


class NotCompiledError(Exception):
    """XLA could not compile a function, or took too long; its callers run another form of it."""


class Rehearsals:
    """Makes a first call of each compiled shape where its caller can be interrupted.

    Such a call takes seconds, most of them XLA's. It works on variables that nothing else reads,
    so a caller who is interrupted, or waits no longer, need not care when it ends.
    """

    def __init__(self) -> None:
        self._compiled: set[Hashable] = {None}
        self._running: dict[Hashable, BackgroundCall[Any]] = {}

    def run(
        self, key: Hashable, call: Callable[[], Any], meanwhile: Callable[[], None] | None
    ) -> bool:
        """Makes a call in another thread, if none with this key has ended well before.

        Returns False if one has.

        Args:
            key: of what is compiled; None if nothing is.
            call: the call; it takes no lock.
            meanwhile: called in this thread in any case.

        Raises:
            NotCompiledError: if the call fails, or takes longer than `COMPILE_SECONDS`.
        """
        is_new = key not in self._compiled
        if is_new and key not in self._running:  # it runs if a caller was interrupted
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


class Resident:
    """Remembers which version of which state lies in a set of variables."""

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[PolicyState], int] | None = None

    def is_there(self, state: PolicyState) -> bool:
        """Whether the variables hold a state as it is now."""
        known = self._known
        return known is not None and known[0]() is state and known[1] == state.version

    def note(self, state: PolicyState) -> None:
        """Says that the variables hold a state as it is now."""
        self._known = (weakref.ref(state), state.version)

    def forget(self) -> None:
        """Says that the variables hold no known state."""
        self._known = None


class Signatures:
    """What the functions of a Program take, as `tf.TensorSpec`s; the same for every runtime."""

    def __init__(self, functions: ProgramFunctions) -> None:
        spec, ports, layout = functions.spec, functions.network.ports, functions.layout
        self.segments = {
            name: tf.TensorSpec([n], name.split("/")[1]) for name, n in layout.sizes.items()
        }
        self.acting_segments = {name: self.segments[name] for name in layout.segments(*ACTING)}
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
        differentiated = functions.optimizer.differentiated
        self.gradients = [tf.TensorSpec(v.shape, v.dtype) for v in differentiated]
        self.index = tf.TensorSpec([None, None], tf.int32)
        self.mask = tf.TensorSpec([None, None], tf.float32)
        self.step_inputs = _step_inputs(functions)
        self.piece = tf.TensorSpec([2], tf.int32)
        self.totals = tf.TensorSpec([3, None], tf.float32)

    @property
    def one_row(self) -> ActInputs:
        """What acting on one row takes."""
        rows: ActInputs = tf.nest.map_structure(_one_row, self.act._replace(params=[]))
        return rows._replace(params=self.act.params)


class FlatActing:
    """Acting from one list of tensors to another, as runtimes want it.

    Weights come first, as flat segments. Each output of a traced function costs microseconds, so
    floats travel as one `[N, k]`.

    Args:
        functions: the Program's functions.
        act: the outputs of acting.
        segments: the names of the segments; without any, weights are the resident variables.
    """

    def __init__(
        self, functions: ProgramFunctions, act: ActLayout, segments: Collection[str]
    ) -> None:
        self._functions = functions
        self._act = act
        self._segments = list(segments)
        self._slots = functions.layout.acting

    def _split(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the variables of the network, in the layout's order, and what else is given."""
        count = len(self._segments)
        if not count:
            return [tf.convert_to_tensor(v) for v in self._functions.network.variables], [*tensors]
        segments = dict(zip(self._segments, tensors[:count], strict=True))
        return unpack(segments, self._slots), [*tensors[count:]]

    def many(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Acts on any number of rows."""
        return self._acted("act", tensors)

    def one(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Acts on one row, for XLA."""
        return self._acted("act (one row)", tensors)

    def _acted(self, name: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        weights, given = self._split(tensors)
        self._functions.traces.note(name, given)
        *inputs, noise, params = given
        return self._act.pack(self._functions.act(weights, ActInputs(inputs, noise, params)))

    def log_likelihoods(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the log-probability of normalised actions, `[N]`, alone in a list."""
        weights, given = self._split(tensors)
        count = len(self._functions.network.ports.all)
        return [self._functions.log_likelihoods(weights, given[:count], given[count:])]


def _step_inputs(functions: ProgramFunctions) -> StepInputs:
    """Returns the specs of what comes with minibatches."""
    spec, inputs = functions.spec, StepInputs()
    if functions.layout.followers and "tau" in spec.hyperparameters:
        inputs = inputs._replace(update_targets=tf.TensorSpec([None], tf.float32))
    if functions.optimizer.skip:
        shape = [None, len(functions.optimizer)]
        inputs = inputs._replace(active_optimizers=tf.TensorSpec(shape, tf.float32))
    if spec.noise_size:
        steps = [spec.time_steps] if functions.network.ports.is_recurrent else []
        shape = [None, None, *steps, spec.noise_size]
        inputs = inputs._replace(noise=tf.TensorSpec(shape, tf.float32))
    if spec.update_noise_size:
        shape = [None, spec.update_noise_size]
        inputs = inputs._replace(update_noise=tf.TensorSpec(shape, tf.float32))
    return inputs


def _one_row(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([1, *spec.shape[1:]], spec.dtype)


def signature_with_weights(runtime: Runtime, lead: Sequence[None] = ()) -> list[tf.TensorSpec]:
    """Returns what acting takes where the weights are inputs, each with a name.

    These are `weights_<i>`, one per slot of the acting part, `input_<i>`, one per port, `noise` and
    `params`; with the axes `lead` in front.
    """
    given, slots = runtime.signatures.act, runtime.functions.layout.acting
    found = [(f"weights_{i}", slot.shape, slot.dtype) for i, slot in enumerate(slots)]
    found += [(f"input_{i}", spec.shape, spec.dtype) for i, spec in enumerate(given.inputs)]
    found += [(spec.name, spec.shape, spec.dtype) for spec in (given.noise, given.params)]
    return [tf.TensorSpec([*lead, *shape], dtype, name) for name, shape, dtype in found]


def acted(
    runtime: Runtime,
    tensors: Sequence[tf.Tensor],
    flatten: Callable[[ActOutputs], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Acts on what `signature_with_weights` says; `flatten` makes a list of the outputs."""
    count = len(runtime.functions.layout.acting)
    *inputs, noise, params = tensors[count:]
    outputs = runtime.functions.act(tensors[:count], ActInputs(inputs, noise, params))
    return [tf.identity(x) for x in flatten(outputs)]


def act_with_weights(runtime: Runtime, where: str) -> Any:
    """Returns the act function of a Program as a traced one for converters: the weights are inputs.

    It takes what `signature_with_weights` says, and gives a list of outputs, as
    `runtime.act_layout` has them.

    Args:
        runtime: of the Program.
        where: the runtime that is to act, for the count of traces.
    """

    def act(*tensors: tf.Tensor) -> list[tf.Tensor]:
        runtime.functions.traces.note(f"act ({where})", *tensors)
        return acted(runtime, tensors, runtime.act_layout.flatten)

    signature = signature_with_weights(runtime)
    return tf.function(act, input_signature=signature, autograph=False)
