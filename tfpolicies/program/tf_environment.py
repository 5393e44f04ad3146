"""Checks that TensorFlow's global modes are the defaults."""

from __future__ import annotations

import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.models.eager_mode import is_eager_process
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork


def check_tf_environment() -> None:
    """Checks that TensorFlow's global modes are the defaults, as in a fresh process.

    Raises:
        ConfigError: if a global mode of TensorFlow, or the surrounding block, is not supported. The
            message names it and says how to undo it.
        ForkError: if this process was forked after TensorFlow had started.
    """
    check_tensorflow_survived_fork()
    if not tf.executing_eagerly():
        raise ConfigError(_INSIDE_TF_FUNCTION if is_eager_process() else _EAGER_DISABLED)
    for name, is_on in _REQUIRED_MODES.items():
        if not is_on():
            raise ConfigError(
                f"tf.compat.v1.disable_{name}() was called, but policies need this mode. "
                f"Remove the call, or call tf.compat.v1.enable_{name}()."
            )
    if tf.distribute.has_strategy():
        name = type(tf.distribute.get_strategy()).__name__
        raise ConfigError(
            f"A policy cannot be made inside the scope of a {name}: it learns on one device. Make "
            "it outside of `with strategy.scope():`; to sample in several processes use "
            "config.rollouts(num_rollout_workers=...)."
        )


_EAGER_DISABLED = (
    "Eager execution is disabled in this process, but policies need it, also in graph mode. Remove "
    "tf.compat.v1.disable_eager_execution() or tf.compat.v1.disable_v2_behavior(); choose graph "
    'mode with config.framework("tf") or a TF1 class.'
)
_INSIDE_TF_FUNCTION = (
    "A policy cannot be made inside a tf.function. Make it outside of the function; in graph mode "
    "it has a graph of its own (policy.get_session().graph)."
)
_REQUIRED_MODES = {
    "resource_variables": tf.compat.v1.resource_variables_enabled,
    "v2_tensorshape": lambda: isinstance(tf.TensorShape([1])[0], int),
    "control_flow_v2": tf.compat.v1.control_flow_v2_enabled,
}
"""Modes of TensorFlow 2 that `tf.compat.v1.disable_<name>` turns off, each with its check."""
