"""Compiles the update functions of a Program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.program.compile_mode import CompileMode, analyze_graph, choose_compile_mode
from tfpolicies.program.devices import CPU
from tfpolicies.program.learn_batch import LossSignature
from tfpolicies.program.runtimes.runtime import TFRuntime
from tfpolicies.program.traced_arguments import LOSS_MASK


class UpdateCompiler:
    """Compiles the update functions of one Program, each on first use.

    There are two versions of each, with and without a limit of gradients (`grad_clip`): in a small
    update, XLA takes a twentieth of the time for the norms of gradients that are not clipped.

    Args:
        runtime: runs the functions.
        signature: of the loss.
    """

    def __init__(self, runtime: TFRuntime, signature: LossSignature) -> None:
        self._runtime, self._signature = runtime, signature
        self._steps: dict[tuple[bool, bool], Any] = {}  # by: for XLA, with clipping
        self._learn_functions: dict[tuple[CompileMode, bool, bool], Callable[..., Any]] = {}

    def choose_compile_mode(self, hyperparameters: np.ndarray) -> CompileMode:
        """Returns how learning is compiled, depending on the operations of its traced step.

        XLA compiles only if the loss reads the row mask, so that padded minibatches stay exact.

        Args:
            hyperparameters: the hyperparameters of a policy, float32 `[H]`.
        """
        functions = self._runtime.functions
        spec, reads_mask = functions.spec, self._signature.reads_mask
        setting = spec.static["jit_compile"]
        if setting is True and not reads_mask:
            owner, column = spec.policy_class.__name__, f"train_batch[{LOSS_MASK!r}]"
            raise ConfigError(
                f"jit_compile=True needs a loss that weighs rows by {column}, and {owner}.loss "
                f"or custom_loss of the model does not read it. Use `masked_mean(x, {column})` "
                "for its means, or jit_compile=False."
            )
        if setting is False or not reads_mask or not self._runtime.traced:
            return CompileMode.PLAIN
        automatic, clips_gradients = setting == "auto", spec.clips_gradients(hyperparameters)
        stats = analyze_graph(
            self._get_step(for_xla=not automatic, clips_gradients=clips_gradients).graph
        )
        if stats.calls_python and not automatic:
            raise ConfigError(
                "jit_compile=True needs a loss without calls of Python (tf.py_function, "
                "tf.numpy_function, tf_input_ops of a reader), which XLA cannot compile. Set "
                "jit_compile='auto' or False."
            )
        if automatic and not stats.has_control_flow:  # then XLA can use the same trace
            self._steps[True, clips_gradients] = self._steps[False, clips_gradients]
        return choose_compile_mode(stats, allow_plain=automatic, on_cpu=functions.device == CPU)

    def get_learn_function(
        self, mode: CompileMode, *, fetches: bool, clips_gradients: bool
    ) -> Callable[..., Any]:
        key = mode, fetches, clips_gradients
        if key not in self._learn_functions:
            step = self._get_step(
                for_xla=mode is not CompileMode.PLAIN, clips_gradients=clips_gradients
            )
            if mode is CompileMode.STEP:
                step = tf.function(step, jit_compile=True, autograph=False)
            functions, exact_rows = self._runtime.functions, not self._signature.reads_mask

            def learn(*inputs: Any) -> Any:
                return functions.learn(*inputs, step=step, exact_rows=exact_rows, fetches=fetches)

            signatures = self._runtime.signatures
            inputs = [
                self._signature.columns,
                signatures.index,
                signatures.mask,
                signatures.step_inputs,
                signatures.chunk,
                signatures.totals,
            ]
            self._learn_functions[key] = self._runtime.compile_update(learn, inputs, mode)
        return self._learn_functions[key]

    def _get_step(self, *, for_xla: bool, clips_gradients: bool) -> Any:
        if (for_xla, clips_gradients) not in self._steps:
            functions, signature = self._runtime.functions, self._signature
            name = "learn_step (XLA)" if for_xla else "learn_step"

            def learn_step(*inputs: Any) -> Any:
                functions.traces.record(name, *inputs)
                return functions.learn_step(
                    *inputs, stat_names=signature.stat_names, clips_gradients=clips_gradients
                )

            weights, signatures = tf.TensorSpec([None], tf.float32), self._runtime.signatures
            minibatch_inputs = signatures.step_inputs.map(
                lambda x: tf.TensorSpec(x.shape[1:], x.dtype)
            )
            inputs = [signatures.hyperparameters, signature.columns, weights, minibatch_inputs]
            self._steps[for_xla, clips_gradients] = self._runtime.prepare_inner(
                learn_step, inputs, for_xla=for_xla
            )
        return self._steps[for_xla, clips_gradients]

    @functools.cached_property
    def compute_gradients(self) -> Callable[..., Any]:
        inputs = [self._signature.columns, self._runtime.signatures.step_inputs]
        return self._runtime.compile_update(
            self._runtime.functions.compute_minibatch_gradients, inputs
        )
