"""The Program: everything that policies with the same code and shapes share.

Programs are in a weak registry, under the key of their spec. A Program holds the networks of a
policy with their optimizers (the *resident* variables) and the tensor functions over them:
`inference` for acting, `updates` for learning. Policies pass their state to every call. One lock
is held while the resident variables are in use.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfpolicies.errors import ConfigError
from tfpolicies.models.eager_mode import EagerLock
from tfpolicies.models.ports import InputPorts
from tfpolicies.models.size_check import check_memory, is_built_from_file
from tfpolicies.models.weight_initializer import WeightInitializer
from tfpolicies.program.devices import CPU, device_scope
from tfpolicies.program.functions import ProgramFunctions
from tfpolicies.program.inference import Inference
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.runtimes.runtime import TFRuntime
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.updates import UpdateRunner
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork

if TYPE_CHECKING:
    import keras

_registry: weakref.WeakValueDictionary[tuple[Any, ...], Program] = weakref.WeakValueDictionary()
_registry_lock = threading.Lock()
_recent_programs: deque[Program] = deque(
    maxlen=4
)  # the latest ones of those that outlive their policies


class Program:
    """The functions that policies with the same spec share; see `Program.get_or_create`.

    Attributes:
        spec: the class, spaces and static settings that these policies share.
        layout: the layout of their states.
        act_layout: the outputs of acting.
        ports: the inputs of acting.
        functions: the tensor functions; `functions.traces` counts the traces of each.
        runtime: runs the functions.
        inference: the backends for acting.
        updates: the updates of learning.
        lock: held while the resident variables are in use; its holder executes eagerly.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec
        self.lock = EagerLock()
        _check_memory(spec)
        self.functions = ProgramFunctions.build(spec)
        self.layout = self.functions.layout
        self.ports: InputPorts = self.functions.network.ports
        self._state_factory = _StateFactory(self.functions)
        self.inference = Inference(self.functions, self._state_factory.make_scratch, self.lock)
        self.act_layout = self.inference.layout
        self.runtime: TFRuntime = self.inference.runtime
        self.updates = UpdateRunner(self.runtime, self.inference.eager, self.lock)

    @classmethod
    def get_or_create(cls, spec: ProgramSpec) -> Program:
        """Returns the Program of a spec, creating it if no policy with this spec exists."""
        with _registry_lock:
            program = _registry.get(spec.key)
            if program is None:
                program = _registry[spec.key] = cls(spec)
            if program.runtime.outlives_policies:
                if program in _recent_programs:
                    _recent_programs.remove(program)
                _recent_programs.append(program)
            return program

    @property
    def has_values(self) -> bool:
        return self.spec.has_values

    def new_state(
        self,
        hyperparameters: Sequence[float] | np.ndarray,
        weight_seed: int,
        rng_seed: int,
        template: keras.Model | None = None,
    ) -> PolicyState:
        """Returns the state of a new policy.

        With a `template`, a model instance, its model starts with the weights that the instance
        has now. All other weights are drawn from the layers' initializers with `weight_seed`.
        """
        return self._state_factory.make(hyperparameters, weight_seed, rng_seed, template)

    def thaw_state(self, frozen: PolicyState, weight_seed: int, rng_seed: int) -> PolicyState:
        """Returns a state that can learn, with the variables that a frozen state acts with.

        Its optimizers are new, and so are networks that acting does not read, with weights drawn
        with `weight_seed`.
        """
        state = self.new_state(frozen.hyperparameters, weight_seed, rng_seed)
        with frozen.lock:
            state.write(frozen.arrays)
        state.update_targets(1.0, frozen.layout.networks)
        state.copy_counters_from(frozen)
        return state

    def load_model(self, state: PolicyState) -> Any:
        """Returns the Keras model with the weights of a state, until another state is loaded."""
        check_tensorflow_survived_fork()
        with state.lock, self.lock:
            self.inference.eager.load(state)
            return self.functions.network.model

    def warm_up(
        self,
        hyperparameters: np.ndarray,
        rows: int,
        num_epochs: int,
        minibatch_size: int | None,
        *,
        acting: bool,
    ) -> None:
        """Traces and compiles the update for a batch of `rows`, without updating anything.

        Args:
            hyperparameters: the hyperparameters of a policy, `[H]`.
            rows: the size of the batch.
            num_epochs: passes over it.
            minibatch_size: rows per update; None for one update with all rows.
            acting: whether the act function is converted for ONNX Runtime while XLA compiles.
        """

        def convert() -> None:
            with contextlib.suppress(ConfigError):  # raised again when a policy uses it
                self.inference.get_runtime("onnx")

        meanwhile = convert if acting else None
        state = self._state_factory.make_scratch(0)
        state.hyperparameters[...] = hyperparameters
        self.updates.warm_up(state, rows, num_epochs, minibatch_size, meanwhile)


class _StateFactory:
    """Creates the states of policies with the same Program, whose variables have initial values."""

    def __init__(self, functions: ProgramFunctions) -> None:
        self._layout, self._spec = functions.layout, functions.spec
        self._networks = functions.networks
        self._initial_values = [np.array(v.numpy()) for v in functions.resident]

    @functools.cached_property
    def _fresh_weights(self) -> dict[str, WeightInitializer]:
        values = dict(zip(self._layout.slots, self._initial_values, strict=True))
        return {
            part: WeightInitializer(
                network.model, [values[slot] for slot in self._layout.get_slots(part)]
            )
            for part, network in self._networks.items()
        }

    def make(
        self,
        hyperparameters: Sequence[float] | np.ndarray,
        weight_seed: int,
        rng_seed: int,
        template: keras.Model | None,
    ) -> PolicyState:
        state = PolicyState(self._layout, hyperparameters, np.random.default_rng(rng_seed))
        if self._spec.has_learning_rng:
            state.spawn_learning_rng()
        keys = [slot.key for slot in self._layout.slots]
        arrays = dict(zip(keys, self._initial_values, strict=True))
        for i, (part, fresh) in enumerate(self._fresh_weights.items()):
            with device_scope(CPU):  # so that a seed gives the same weights on every machine
                values = fresh.draw([weight_seed, i] if i else weight_seed)
            if part == "model" and template is not None:
                template_values = [np.array(variable.numpy()) for variable in template.variables]
                values[: len(template_values)] = template_values
            slots = self._layout.get_slots(part)
            arrays |= {slot.key: x for slot, x in zip(slots, values, strict=True)}
        state.write(arrays)
        state.update_targets(1.0)
        return state

    def make_scratch(self, weight_seed: int) -> PolicyState:
        """Returns a state with fresh weights that belongs to no policy."""
        return self.make([0.0] * len(self._spec.hyperparameters), weight_seed, 0, None)


def _check_memory(spec: ProgramSpec) -> None:
    """Checks that the networks fit into memory, before they are created.

    A user's factory is called once only, so it is not measured, unless a file gives its arguments.
    """
    if spec.source.is_catalog or is_built_from_file():
        check_memory(spec.source.make, f"The model of {spec.policy_class.__name__}")
    for name, plan in spec.networks.items():
        if plan.make is not None:
            check_memory(plan.make, f"The network {name!r} of {spec.policy_class.__name__}")
