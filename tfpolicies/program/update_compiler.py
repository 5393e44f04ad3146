"""Compiles the update functions of a Program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.program.columns import LearnerSignature
from tfpolicies.program.devices import CPU
from tfpolicies.program.runtimes.runtime import Runtime
from tfpolicies.program.update_forms import Form, form_of, work_of
from tfpolicies.program.view import LOSS_MASK


class UpdateCompiler:
    """Compiles the update functions of one Program, each on first use.

    There are two versions of each, with and without a limit of gradients (`grad_clip`): in a small
    update, XLA takes a twentieth of the time for the norms of gradients that are not clipped.

    Args:
        runtime: runs the functions.
        signature: of the loss.
    """

    def __init__(self, runtime: Runtime, signature: LearnerSignature) -> None:
        self._runtime, self._signature = runtime, signature
        self._steps: dict[tuple[bool, bool], Any] = {}  # by: for XLA, with clipping
        self._learners: dict[tuple[Form, bool, bool], Callable[..., Any]] = {}

    def choose_form(self, hyper: np.ndarray) -> Form:
        """Returns how learning is compiled, depending on the operations of its traced step.

        XLA compiles only if the loss reads the row mask, so that padded minibatches stay exact.

        Args:
            hyper: the hyper-parameters of a policy, float32 `[H]`.

        Raises:
            ConfigError: if `jit_compile=True` and the loss cannot run on padded minibatches.
        """
        functions = self._runtime.functions
        spec, masked = functions.spec, self._signature.masked
        setting = spec.static["jit_compile"]
        if setting is True and not masked:
            owner, column = spec.policy_class.__name__, f"train_batch[{LOSS_MASK!r}]"
            raise ConfigError(
                f"jit_compile=True needs a loss that weighs rows by {column}, and {owner}.loss "
                f"or custom_loss of the model does not read it. Use `masked_mean(x, {column})` "
                "for its means, or jit_compile=False."
            )
        if setting is False or not masked or not self._runtime.traced:
            return Form.PLAIN
        automatic, clips = setting == "auto", spec.clips(hyper)
        work = work_of(self._step(for_xla=not automatic, clips=clips).graph)
        if automatic and not work.branches:  # then XLA can use the same trace
            self._steps[True, clips] = self._steps[False, clips]
        return form_of(work, may_be_plain=automatic, on_cpu=functions.device == CPU)

    def learner(self, form: Form, *, fetches: bool, clips: bool) -> Callable[..., Any]:
        key = form, fetches, clips
        if key not in self._learners:
            step = self._step(for_xla=form is not Form.PLAIN, clips=clips)
            if form is Form.STEP:
                step = tf.function(step, jit_compile=True, autograph=False)
            functions, exact = self._runtime.functions, not self._signature.masked

            def learn(*inputs: Any) -> Any:
                return functions.learn(*inputs, step=step, exact_rows=exact, fetches=fetches)

            s = self._runtime.signatures
            inputs = [self._signature.columns, s.index, s.mask, s.step_inputs, s.piece, s.totals]
            self._learners[key] = self._runtime.compiled(learn, inputs, form)
        return self._learners[key]

    def _step(self, *, for_xla: bool, clips: bool) -> Any:
        if (for_xla, clips) not in self._steps:
            functions, signature = self._runtime.functions, self._signature
            name = "learn_step (XLA)" if for_xla else "learn_step"

            def learn_step(*inputs: Any) -> Any:
                functions.traces.note(name, *inputs)
                return functions.learn_step(*inputs, stat_names=signature.stat_names, clips=clips)

            weights, s = tf.TensorSpec([None], tf.float32), self._runtime.signatures
            one = s.step_inputs.map(lambda x: tf.TensorSpec(x.shape[1:], x.dtype))
            inputs = [s.hyper, signature.columns, weights, one]
            self._steps[for_xla, clips] = self._runtime.inner(learn_step, inputs, for_xla=for_xla)
        return self._steps[for_xla, clips]

    @functools.cached_property
    def gradients(self) -> Callable[..., Any]:
        inputs = [self._signature.columns, self._runtime.signatures.step_inputs]
        return self._runtime.compiled(self._runtime.functions.gradients, inputs)
