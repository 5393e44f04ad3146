"""Acting: `RUNTIMES` has each inference backend, and the cases that it supports.

A backend that converts or stacks the act function is compared to TensorFlow before its first use.
"""

from __future__ import annotations

import copy
import logging
import pkgutil
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.models.eager_mode import EagerLock, ensure_eager
from tfpolicies.models.ports import Port
from tfpolicies.models.spaces import Leaf
from tfpolicies.program.devices import CPU, placed
from tfpolicies.program.functions import ActInputs, ProgramFunctions
from tfpolicies.program.outputs import ActLayout
from tfpolicies.program.runtimes import onnx, stacked
from tfpolicies.program.runtimes.function import FunctionRuntime
from tfpolicies.program.runtimes.runtime import Actor, Runtime, Way
from tfpolicies.program.runtimes.session import SessionRuntime
from tfpolicies.state import PolicyState
from tfpolicies.system.forks import require_tensorflow
from tfpolicies.ways import WAYS

logger = logging.getLogger("tfpolicies")

_TOLERANCE = 1e-4
"""Allowed difference of two backends, relative to an output's largest number, or to 1."""


class Inference:
    """The inference backends of one Program.

    Args:
        functions: the tensor functions over eager variables.
        new_state: creates states for checks from a seed of the weights.
        lock: of the Program.

    Attributes:
        layout: the outputs of acting.
        runtime: runs all functions, also those of learning: in graph mode a `SessionRuntime`.
        eager: the runtime over eager variables; the same object unless in graph mode.
    """

    def __init__(
        self,
        functions: ProgramFunctions,
        new_state: Callable[[int], PolicyState],
        lock: EagerLock,
    ) -> None:
        spec = functions.spec
        self.functions = functions
        self.ports = functions.network.ports
        self.layout = ActLayout.of(spec, self.ports.states, _extra_outputs(functions))
        self.eager = FunctionRuntime(functions, self.layout, traced=spec.static["eager_tracing"])
        self.runtime: Runtime = self.eager
        if spec.policy_class.runtime == "session":
            self.runtime = SessionRuntime(functions, self.layout, lock)
        self._new_state = new_state
        self._lock = lock
        self._actors: dict[str, Actor] = {}
        self._stacked: dict[str, stacked.StackedActor | None] = {}

    @cached_property
    @ensure_eager()
    def fitting(self) -> Sequence[str]:
        """The `RUNTIMES` that "auto" may use, the best one first."""
        return [name for name, way in RUNTIMES.items() if way.fits(self)]

    def actor(self, inference: str) -> Actor:
        """Returns the runtime of one of the `RUNTIMES`, built and checked on first use.

        Raises:
            ConfigError: if it cannot be built, or its outputs differ from those of TensorFlow.
        """
        with self._lock:
            if inference not in self._actors:
                require_tensorflow()
                self._actors[inference] = self._made(RUNTIMES[inference])
            return self._actors[inference]

    def _made(self, way: Way) -> Actor:
        try:
            actor = way.build(self)
            found = None if actor is self.runtime else self._difference(actor)
        except Exception as error:
            raise ConfigError(
                f"the model cannot run in {way.name}; use inference='tf' for it. Reason: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        if found is not None:
            raise ConfigError(
                f"{way.name} gives different {found[0]} than TensorFlow for this model "
                f"(largest difference {found[1]:.3g}); use inference='tf' for it."
            )
        return actor

    def _difference(self, actor: Actor) -> tuple[str, float] | None:
        rng, explorer = np.random.default_rng(0), self.functions.spec.explorer
        state, params = self._new_state(0), np.zeros(explorer.num_params, np.float32)
        for rows in (1, 7):
            inputs = self.random_inputs(rows, rng)
            noise = explorer.draw_noise(rng, rows, params)
            ours, wanted = (
                each.run(state, inputs, noise, params) for each in (actor, self.runtime)
            )
            found = self.layout.first_difference(ours, wanted, _TOLERANCE)
            if found is not None:
                return found
        return None

    def stacked_actor(self, inference: str) -> stacked.StackedActor | None:
        """Returns the runtime that acts for many states at once, built and checked on first use.

        Args:
            inference: one of `RUNTIMES`.

        Returns:
            None if states have to act one by one: in graph mode, untraced, or if the stacked
            function cannot be built or its outputs differ.
        """
        with self._lock:
            if inference not in self._stacked:
                require_tensorflow()
                self._stacked[inference] = self._stack_up(inference)
            return self._stacked[inference]

    def _stack_up(self, inference: str) -> stacked.StackedActor | None:
        try:
            actor: stacked.StackedActor | None = RUNTIMES[inference].stack(self)
            if actor is None:
                return None
            found = self._stack_difference(actor, self.actor(inference))
        except Exception as error:
            logger.info("policies of this Program act one by one (%s): %s", inference, error)
            return None
        if found is not None:
            logger.info("policies of this Program act one by one: stacked, %s differ by %g", *found)
            return None
        return actor

    def _stack_difference(
        self, actor: stacked.StackedActor, single: Actor
    ) -> tuple[str, float] | None:
        """Compares stacked acting of states with different weights to acting one by one."""
        rng, explorer = np.random.default_rng(0), self.functions.spec.explorer
        states, rows = [self._new_state(seed) for seed in range(2)], 3
        params = np.array([[0.25], [0.75]], np.float32).repeat(explorer.num_params, axis=1)
        inputs = [self.random_inputs(rows, rng) for _ in states]
        noise = np.stack([explorer.draw_noise(rng, rows, row) for row in params])
        ours = actor.run(states, [np.stack(x) for x in zip(*inputs, strict=True)], noise, params)
        for i, state in enumerate(states):
            wanted = single.run(state, inputs[i], noise[i], params[i])
            mine = self.layout.one_of(ours, i, rows)
            found = self.layout.first_difference(mine, wanted, _TOLERANCE)
            if found is not None:
                return found
        return None

    def random_inputs(self, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Returns random inputs of acting that fit the ports; masks allow everything."""
        ports = self.ports
        obs = [
            np.ones((rows, *leaf.shape), leaf.dtype) if mask else _random_rows(leaf, rows, rng)
            for leaf, mask in zip(ports.obs_leaves, ports.is_mask, strict=True)
        ]
        seen = [port.zeros(rows) for port in ports.seen]
        states = [0.5 * rng.standard_normal((rows, *port.shape)) for port in ports.states]
        return [*obs, *seen, *(x.astype(np.float32) for x in states)]


ONNX = Way(
    "ONNX Runtime",
    lambda it: onnx.fits(it.eager),
    lambda it: onnx.actor(it.eager),
    lambda it: stacked.onnx_actor(it.eager),
)
TENSORFLOW = Way(
    "TensorFlow",
    lambda it: True,
    lambda it: it.runtime,
    lambda it: stacked.traced_actor(it.runtime),
)

RUNTIMES: dict[str, Way] = {name: pkgutil.resolve_name(path) for name, path in WAYS.items()}
"""The runtimes by the value of `inference`."""


def _extra_outputs(functions: ProgramFunctions) -> list[Port]:
    """Returns the ports of `extra_action_out_fn`, which is run once on zeros."""
    spec, network = functions.spec, functions.network
    if not spec.policy_class._overrides("extra_action_out_fn"):
        return []
    with placed(CPU):
        inputs = [tf.constant(port.zeros(2)) for port in network.ports.all]
        noise = tf.zeros([2, spec.explorer.noise_size])
        given = ActInputs(inputs, noise, tf.zeros([spec.explorer.num_params]))
        weights = [tf.convert_to_tensor(variable) for variable in network.variables]
        extras = functions.act(weights, given).extras
    return [
        Port(name, tuple(x.shape[1:]), np.dtype(x.dtype.as_numpy_dtype))
        for name, x in sorted(extras.items())
    ]


def _random_rows(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    if leaf.dtype == np.float32:
        return rng.standard_normal((rows, *leaf.shape)).astype(np.float32)
    space = copy.deepcopy(leaf.space)  # so that the generator of the environment is not used
    space.seed(int(rng.integers(2**31)))
    return np.stack([np.asarray(space.sample(), leaf.dtype) for _ in range(rows)])
