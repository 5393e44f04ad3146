"""`build_tf_policy`: makes a policy class from functions instead of methods."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from tfpolicies.compat.preprocessors import make_preprocessed_space
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.sections import TrainingSettings
from tfpolicies.errors import ConfigError
from tfpolicies.policy.policy_config import complete_config
from tfpolicies.policy.tf_policy import TFPolicy

Hook = Callable[..., Any] | None


def build_tf_policy(
    name: str,
    *,
    loss_fn: Hook,
    get_default_config: Callable[[], Any] | None = None,
    postprocess_fn: Hook = None,
    stats_fn: Hook = None,
    optimizer_fn: Hook = None,
    compute_gradients_fn: Hook = None,
    apply_gradients_fn: Hook = None,
    grad_stats_fn: Hook = None,
    extra_action_out_fn: Hook = None,
    extra_learn_fetches_fn: Hook = None,
    validate_spaces: Hook = None,
    before_init: Hook = None,
    before_loss_init: Hook = None,
    after_init: Hook = None,
    make_model: Hook = None,
    action_sampler_fn: Hook = None,
    action_distribution_fn: Hook = None,
    mixins: Sequence[type] | None = None,
    get_batch_divisibility_req: Hook = None,
) -> Any:
    """Returns a subclass of `TFPolicy` whose methods are the given functions.

    Each function gets the policy first, and then the arguments of the method of `TFPolicy`. Traced
    functions can read `policy.config`, but not the state of one policy; `docs/migrate/rllib.md`
    lists them. The model estimates values, so a loss may call `model.value_function()`.

    Args:
        name: the class's name.
        loss_fn: `(policy, model, dist_class, train_batch)`: the loss; None for policies that only
            act.
        get_default_config: returns a dict, or an `AlgorithmConfig`, of default settings. Settings
            that `AlgorithmConfig` lacks become settings of the class: numbers are hyperparameters,
            others are static.
        postprocess_fn: `(policy, sample_batch, other_agent_batches, episode)`: the batch.
        stats_fn: `(policy, train_batch)`: scalar tensors by name.
        optimizer_fn: `(policy, config)`: a Keras optimizer.
        compute_gradients_fn: `(policy, optimizer, loss)`: pairs (gradient, variable).
        apply_gradients_fn: `(policy, optimizer, grads)`.
        grad_stats_fn: `(policy, train_batch, grads)`: scalar tensors by name.
        extra_action_out_fn: `(policy)`: tensors `[N, ...]` by name. `policy.model` has
            `value_function()` and `last_output()` in it.
        extra_learn_fetches_fn: `(policy)`: tensors by name.
        validate_spaces: `(policy, observation_space, action_space, config)`; raises.
        before_init: `(policy, observation_space, action_space, config)`, called first.
        before_loss_init: the same arguments, called after the policy was made.
        after_init: the same arguments, called last.
        make_model: `(policy, observation_space, action_space, config)`: a new Keras model or
            `TFModelV2`. The observation space is the one that a `TFModelV2` gets.
        action_sampler_fn: `(policy, model, **inputs)`, see `TFPolicyHooks.action_sampler_fn`.
        action_distribution_fn: `(policy, model, **inputs)`, see
            `TFPolicyHooks.action_distribution_fn`.
        mixins: further base classes, before `TFPolicy`; their constructors are not called.
        get_batch_divisibility_req: `(policy)`: a number.

    Raises:
        ConfigError: if the default config is neither a dict nor an `AlgorithmConfig`.
    """
    functions = {key: value for key, value in locals().items() if key != "name"}
    methods = {"loss": loss_fn, **{method: functions[method] for method in _SAME_NAME_METHODS}}
    members: dict[str, Any] = {
        method: _make_method(method, function)
        for method, function in methods.items()
        if function is not None
    }
    if postprocess_fn is not None:
        members["postprocess_trajectory"] = _make_postprocess_trajectory(postprocess_fn)
    if optimizer_fn is not None:
        members["optimizer"] = lambda self: optimizer_fn(self, self.config)
    if make_model is not None:
        members["make_model"] = _make_make_model(make_model)
    members["__init__"] = _make_constructor(before_init, before_loss_init, after_init)
    members["wants_value"] = classmethod(lambda cls, static: True)
    members["with_updates"] = staticmethod(
        lambda **changes: build_tf_policy(**{"name": name, **functions, **changes})
    )
    members["as_eager"] = classmethod(lambda cls: cls)
    members["__doc__"] = f"{name}, made of functions by `build_tf_policy`."
    members["__module__"] = sys._getframe(1).f_globals.get("__name__", __name__)
    if get_default_config is not None:
        members |= _make_settings_members(name, get_default_config())
    return type(name, (*(mixins or ()), TFPolicy), members)


_SAME_NAME_METHODS = (
    *("stats_fn", "grad_stats_fn", "compute_gradients_fn", "apply_gradients_fn"),
    *("extra_action_out_fn", "extra_learn_fetches_fn", "validate_spaces"),
    *("action_sampler_fn", "action_distribution_fn", "get_batch_divisibility_req"),
)
"""Functions that become methods of the same name."""


def _make_method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, getattr(TFPolicy, name).__doc__
    return method


def _make_postprocess_trajectory(function: Callable[..., Any]) -> Callable[..., Any]:
    def postprocess_trajectory(
        self: Any, sample_batch: Any, other_agent_batches: Any = None, episode: Any = None
    ) -> Any:
        return function(self, sample_batch, other_agent_batches, episode)

    return postprocess_trajectory


def _make_make_model(function: Callable[..., Any]) -> Callable[..., Any]:
    def make_model(self: Any) -> Any:
        space = make_preprocessed_space(self.observation_space)
        return function(self, space, self.action_space, self.config)

    return make_model


def _make_constructor(
    before_init: Hook, before_loss_init: Hook, after_init: Hook
) -> Callable[..., None]:
    def __init__(
        self: Any, observation_space: gym.Space, action_space: gym.Space, config: Any = None
    ) -> None:
        if before_init is not None:
            complete, _ = complete_config(type(self), config)
            before_init(self, observation_space, action_space, complete)
        TFPolicy.__init__(self, observation_space, action_space, config)
        for hook in (before_loss_init, after_init):
            if hook is not None:
                hook(self, observation_space, action_space, self.config)

    return __init__


def _make_settings_members(name: str, default: Any) -> dict[str, Any]:
    if isinstance(default, AlgorithmConfig):
        base: Any = type(default)
        default = default.to_dict()
    elif isinstance(default, Mapping):
        base = AlgorithmConfig
    else:
        raise ConfigError(
            f"get_default_config of {name} must return a dict or an AlgorithmConfig, got "
            f"{default!r}."
        )
    base_config = base()
    extra_settings = {key: value for key, value in default.items() if key not in base_config}
    numbers = [key for key, value in extra_settings.items() if _is_number(value)]
    section = dataclasses.make_dataclass(
        "Training",
        [(key, Any, _make_field(value)) for key, value in extra_settings.items()],
        bases=(base_config.training_section,),
        frozen=True,
        kw_only=True,
    )
    section.__module__ = TrainingSettings.__module__

    class Config(base):
        """The settings of a policy class that `build_tf_policy` made."""

        training_section = section

        def __init__(self, algo_class: type | None = None) -> None:
            super().__init__(algo_class)
            self.update_from_dict(default)

    Config.__name__ = Config.__qualname__ = f"{name}Config"
    return {
        "config_class": Config,
        "hyperparameters": (*TFPolicy.hyperparameters, *numbers),
        "static_keys": (
            *TFPolicy.static_keys,
            *[key for key in extra_settings if key not in numbers],
        ),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _make_field(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)
