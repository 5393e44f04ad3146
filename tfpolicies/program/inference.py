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

from tfpolicies.base.acting_runtimes import ACTING_RUNTIMES
from tfpolicies.errors import ConfigError
from tfpolicies.models.eager_mode import EagerLock, ensure_eager
from tfpolicies.models.ports import PolicyPort
from tfpolicies.models.spaces import Leaf
from tfpolicies.program.act_outputs import ActOutputLayout
from tfpolicies.program.devices import CPU, device_scope
from tfpolicies.program.functions import ActInputs, ProgramFunctions
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.runtimes import onnx, stacked
from tfpolicies.program.runtimes.function import FunctionRuntime
from tfpolicies.program.runtimes.runtime import ActingRuntime, RuntimeSpec, TFRuntime
from tfpolicies.program.runtimes.session import SessionRuntime
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork

logger = logging.getLogger("tfpolicies")

_MAX_DIFFERENCE = 1e-4
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
        self.layout = ActOutputLayout.from_spec(
            spec, self.ports.states, _make_extra_ports(functions)
        )
        self.eager = FunctionRuntime(functions, self.layout, traced=spec.static["eager_tracing"])
        self.runtime: TFRuntime = self.eager
        if spec.policy_class.runtime == "session":
            self.runtime = SessionRuntime(functions, self.layout, lock)
        self._new_state = new_state
        self._lock = lock
        self._runtimes: dict[str, ActingRuntime] = {}
        self._stacked_runtimes: dict[str, stacked.StackedRuntime | None] = {}

    @cached_property
    @ensure_eager()
    def auto_runtimes(self) -> Sequence[str]:
        """The `RUNTIMES` that "auto" may use, the best one first."""
        return [name for name, runtime_spec in RUNTIMES.items() if runtime_spec.is_preferred(self)]

    def get_runtime(self, inference: str) -> ActingRuntime:
        """Returns the runtime of one of the `RUNTIMES`, built and checked on first use.

        Raises:
            ConfigError: if it cannot be built, or its outputs differ from those of TensorFlow.
        """
        with self._lock:
            if inference not in self._runtimes:
                check_tensorflow_survived_fork()
                self._runtimes[inference] = self._build_runtime(RUNTIMES[inference])
            return self._runtimes[inference]

    def _build_runtime(self, runtime_spec: RuntimeSpec) -> ActingRuntime:
        try:
            runtime = runtime_spec.build(self)
            difference = None if runtime is self.runtime else self._compare_to_tensorflow(runtime)
        except Exception as error:
            raise ConfigError(
                f"the model cannot run in {runtime_spec.name}; use inference='tf' for it. Reason: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        if difference is not None:
            raise ConfigError(
                f"{runtime_spec.name} gives different {difference[0]} than TensorFlow for this "
                f"model (largest difference {difference[1]:.3g}); use inference='tf' for it."
            )
        return runtime

    def _compare_to_tensorflow(self, runtime: ActingRuntime) -> tuple[str, float] | None:
        rng, explorer = np.random.default_rng(0), self.functions.spec.explorer
        state, params = self._new_state(0), np.zeros(explorer.num_params, np.float32)
        for rows in (1, 7):
            inputs = self.draw_random_inputs(rows, rng)
            noise = explorer.draw_noise(rng, rows, params)
            outputs, reference = (
                acting_runtime.run(state, inputs, noise, params)
                for acting_runtime in (runtime, self.runtime)
            )
            difference = self.layout.find_difference(outputs, reference, _MAX_DIFFERENCE)
            if difference is not None:
                return difference
        return None

    def get_stacked_runtime(self, inference: str) -> stacked.StackedRuntime | None:
        """Returns the runtime that acts for many states at once, built and checked on first use.

        Args:
            inference: one of `RUNTIMES`.

        Returns:
            None if states have to act one by one: in graph mode, untraced, or if the stacked
            function cannot be built or its outputs differ.
        """
        with self._lock:
            if inference not in self._stacked_runtimes:
                check_tensorflow_survived_fork()
                self._stacked_runtimes[inference] = self._build_stacked_runtime(inference)
            return self._stacked_runtimes[inference]

    def _build_stacked_runtime(self, inference: str) -> stacked.StackedRuntime | None:
        try:
            runtime: stacked.StackedRuntime | None = RUNTIMES[inference].build_stacked(self)
            if runtime is None:
                return None
            difference = self._compare_to_single(runtime, self.get_runtime(inference))
        except Exception as error:
            logger.info("policies of this Program act one by one (%s): %s", inference, error)
            return None
        if difference is not None:
            logger.info(
                "policies of this Program act one by one: stacked, %s differ by %g", *difference
            )
            return None
        return runtime

    def _compare_to_single(
        self, stacked_runtime: stacked.StackedRuntime, single_runtime: ActingRuntime
    ) -> tuple[str, float] | None:
        """Compares stacked acting of states with different weights to acting one by one."""
        rng, explorer = np.random.default_rng(0), self.functions.spec.explorer
        states, rows = [self._new_state(seed) for seed in range(2)], 3
        params = np.array([[0.25], [0.75]], np.float32).repeat(explorer.num_params, axis=1)
        inputs = [self.draw_random_inputs(rows, rng) for _ in states]
        noise = np.stack([explorer.draw_noise(rng, rows, row) for row in params])
        stacked_outputs = stacked_runtime.run(
            states, [np.stack(x) for x in zip(*inputs, strict=True)], noise, params
        )
        for i, state in enumerate(states):
            reference = single_runtime.run(state, inputs[i], noise[i], params[i])
            outputs = self.layout.select_state(stacked_outputs, i, rows)
            difference = self.layout.find_difference(outputs, reference, _MAX_DIFFERENCE)
            if difference is not None:
                return difference
        return None

    def draw_random_inputs(self, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Returns random inputs of acting that fit the ports; masks allow everything."""
        ports = self.ports
        obs = [
            np.ones((rows, *leaf.shape), leaf.dtype) if mask else _draw_rows(leaf, rows, rng)
            for leaf, mask in zip(ports.obs_leaves, ports.is_mask, strict=True)
        ]
        views = [port.zeros(rows) for port in ports.view_ports]
        states = [0.5 * rng.standard_normal((rows, *port.shape)) for port in ports.states]
        return [*obs, *views, *(x.astype(np.float32) for x in states)]


ONNX = RuntimeSpec(
    "ONNX Runtime",
    lambda it: onnx.prefers_onnx(it.eager),
    lambda it: onnx.make_onnx_runtime(it.eager),
    lambda it: stacked.make_stacked_onnx_runtime(it.eager),
)
TENSORFLOW = RuntimeSpec(
    "TensorFlow",
    lambda it: True,
    lambda it: it.runtime,
    lambda it: stacked.make_stacked_function_runtime(it.runtime),
)

RUNTIMES: dict[str, RuntimeSpec] = {
    name: pkgutil.resolve_name(path) for name, path in ACTING_RUNTIMES.items()
}
"""The runtimes by the value of `inference`."""


def _make_extra_ports(functions: ProgramFunctions) -> list[PolicyPort]:
    """Returns the ports of `extra_action_out_fn`, which is run once on zeros."""
    spec, network = functions.spec, functions.network
    if not spec.policy_class._overrides("extra_action_out_fn"):
        return []
    with device_scope(CPU):
        inputs = [tf.constant(port.zeros(2)) for port in network.ports.all]
        noise = tf.zeros([2, spec.explorer.noise_size])
        act_inputs = ActInputs(inputs, noise, tf.zeros([spec.explorer.num_params]))
        weights = [tf.convert_to_tensor(variable) for variable in network.variables]
        extras = functions.act(weights, act_inputs).extras
    return [
        PolicyPort(name, tuple(x.shape[1:]), np.dtype(x.dtype.as_numpy_dtype))
        for name, x in sorted(extras.items())
    ]


def _draw_rows(leaf: Leaf, rows: int, rng: np.random.Generator) -> np.ndarray:
    if leaf.dtype == np.float32:
        return rng.standard_normal((rows, *leaf.shape)).astype(np.float32)
    space = copy.deepcopy(leaf.space)  # so that the generator of the environment is not used
    space.seed(int(rng.integers(2**31)))
    return np.stack([np.asarray(space.sample(), leaf.dtype) for _ in range(rows)])
