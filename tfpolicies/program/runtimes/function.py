"""The function runtime: the Program's functions under `tf.function`, optionally compiled by XLA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.program.functions import LOSS_MASK, ProgramFunctions, unpack
from tfpolicies.state import PolicyState, StateLayout


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


class FunctionRuntime:
    """Runs the functions of one Program, eagerly outside and traced inside.

    Each function is traced once: its signature comes from the spaces and columns, with a dynamic
    batch. With `traced=False` the same Python code runs untraced, for a debugger.

    Args:
        functions: the Program's functions over the resident variables.
        layout: the layout of the states that are loaded.
        traced: whether to trace.
    """

    def __init__(self, functions: ProgramFunctions, layout: StateLayout, *, traced: bool) -> None:
        self.functions = functions
        self.layout = layout
        self.traced = traced
        self._model_segments = layout.segments("model")
        slots = layout.of("model")
        self._model_order = [self._model_segments.index(slot.segment) for slot in slots]
        self._model_shapes = [
            [slot.shape for slot in slots if slot.segment == name] for name in self._model_segments
        ]
        spec = functions.spec
        flat = [
            tf.TensorSpec([layout.sizes[name]], name.split("/")[1]) for name in self._model_segments
        ]
        obs = [tf.TensorSpec([None, *x.shape], x.dtype) for x in spec.obs_leaves]
        noise = tf.TensorSpec([None, spec.dist_class.noise_size], tf.float32)
        leaf = spec.action_leaf
        actions = tf.TensorSpec([None, *leaf.shape], leaf.dtype)
        whole = {name: tf.TensorSpec([n], name.split("/")[1]) for name, n in layout.sizes.items()}
        hyper = tf.TensorSpec([len(spec.hyperparameters)], tf.float32)
        gradients = [tf.TensorSpec(v.shape, v.dtype) for v in self._trainable()]
        self._act = self.trace(self._act_flat, [flat, obs, noise])
        # One row costs less than dispatching its few dozen operations: XLA runs them as one.
        self._act_one: Any = None
        if traced and spec.static["jit_compile"] is not False:
            one = [tf.TensorSpec([1, *x.shape[1:]], x.dtype) for x in (*obs, noise)]
            self._act_one = self.trace(self._act_row, [flat, one[:-1], one[-1]], jit=True)
        self._log_likelihoods = self.trace(self._log_likelihoods_flat, [flat, obs, actions])
        self._load = self.trace(functions.load, [whole])
        self._read = self.trace(functions.read, [])
        self._apply = self.trace(functions.apply_gradients, [hyper, gradients])
        self._weights: tuple[PolicyState, int, list[tf.Tensor]] | None = None

    def trace(self, function: Any, signature: Sequence[Any], *, jit: bool = False) -> Any:
        """Returns `function` as a traced function of exactly this signature."""
        return _Traced(function, signature, jit=jit) if self.traced else function

    def _trainable(self) -> list[Any]:
        return self.functions.network.model.trainable_variables

    def _weights_of(self, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the variables of the model, in the layout's order, from its flat segments."""
        parts = [iter(found) for found in unpack(flat, self._model_shapes)]
        return [next(parts[which]) for which in self._model_order]

    def _act_flat(self, flat: Sequence[tf.Tensor], obs: Any, noise: tf.Tensor) -> Any:
        self.functions.traces["act"] += 1
        return self._act_packed(flat, obs, noise)

    def _act_row(self, flat: Sequence[tf.Tensor], obs: Any, noise: tf.Tensor) -> Any:
        self.functions.traces["act (one row)"] += 1
        return self._act_packed(flat, obs, noise)

    def _act_packed(
        self, flat: Sequence[tf.Tensor], obs: Any, noise: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor]:
        """Returns actions, those for the environment if they differ, and all floats in one.

        Each output of a traced function costs microseconds, so floats travel as one `[B, k]`.
        """
        outputs = self.functions.act(self._weights_of(flat), obs, noise)
        floats = [outputs.logp[:, None], outputs.prob[:, None], outputs.dist_inputs]
        if outputs.values is not None:
            floats.append(outputs.values[:, None])
        same = self.functions.spec.pipeline.is_identity
        env_actions = None if same else outputs.env_actions
        return outputs.actions, env_actions, tf.concat(floats, axis=1)

    def _log_likelihoods_flat(self, flat: Sequence[tf.Tensor], obs: Any, actions: Any) -> Any:
        return self.functions.log_likelihoods(self._weights_of(flat), obs, actions)

    # -- acting -------------------------------------------------------------------------------

    def run(
        self, state: PolicyState, obs: Sequence[np.ndarray], noise: np.ndarray | None
    ) -> list[np.ndarray]:
        """Acts for `state` on observation leaves `[B, ...]`; `noise=None` is greedy.

        Returns the outputs of `act` that exist, in the order of `ActOutputs`.
        """
        if noise is None:
            size = self.functions.spec.dist_class.noise_size
            noise = np.zeros((len(obs[0]), size), np.float32)
        inputs = self._flat_weights(state), [tf.constant(x) for x in obs], tf.constant(noise)
        actions, env_actions, floats = self._run_act(inputs, rows=len(noise))
        chosen, numbers = actions.numpy(), floats.numpy()
        for_env = chosen if env_actions is None else env_actions.numpy()
        found = [chosen, for_env, numbers[:, 0], numbers[:, 1]]
        if not self.functions.spec.with_value:
            return [*found, numbers[:, 2:]]
        return [*found, numbers[:, 2:-1], numbers[:, -1]]

    def _run_act(self, inputs: Any, *, rows: int) -> Any:
        if rows != 1 or self._act_one is None:
            return self._act(*inputs)
        try:
            return self._act_one(*inputs)
        except tf.errors.OpError:  # XLA does not know one of the model's operations
            self._act_one = None
            return self._act(*inputs)

    def log_likelihoods(
        self, state: PolicyState, obs: Sequence[np.ndarray], actions: np.ndarray
    ) -> np.ndarray:
        """Returns the log-probability of normalised actions, float32 `[B]`."""
        flat = self._flat_weights(state)
        obs_tensors = [tf.constant(x) for x in obs]
        return self._log_likelihoods(flat, obs_tensors, tf.constant(actions)).numpy()

    def _flat_weights(self, state: PolicyState) -> list[tf.Tensor]:
        known = self._weights
        if known is not None and known[0] is state and known[1] == state.version:
            return known[2]
        flat = [tf.constant(state.segments[name]) for name in self._model_segments]
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

        hyper = tf.TensorSpec([len(self.functions.spec.hyperparameters)], tf.float32)
        index, mask = (tf.TensorSpec([None, None], dtype) for dtype in (tf.int32, tf.float32))
        signature = [hyper, dict(columns), index, mask, tf.TensorSpec([], tf.int32)]
        return self.trace(learn_epochs, signature, jit=jit)

    def gradient_function(self, columns: Mapping[str, Any]) -> Any:
        """Returns the traced `gradients` for batches with these columns and a loss mask."""
        hyper = tf.TensorSpec([len(self.functions.spec.hyperparameters)], tf.float32)
        mask = tf.TensorSpec([None], tf.float32)
        signature = [hyper, {**columns, LOSS_MASK: mask}]
        return self.trace(self.functions.gradients, signature)

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
