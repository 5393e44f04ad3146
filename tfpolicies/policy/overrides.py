"""Detection of methods that a policy overrides, in its class or by later assignment.

The driver of a policy with a Program does not call `compute_actions` and similar methods, except
where a subclass overrides them or they are replaced later on a class or on a single policy.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from tfpolicies.base.extensions import ExtensibleMeta

logger = logging.getLogger("tfpolicies")

ACTING_METHODS = ("compute_actions", "compute_actions_from_input_dict")
LOADING_METHODS = (
    "load_batch_into_buffer",
    "get_num_samples_loaded_into_buffer",
    "learn_on_loaded_batch",
)
GRADIENT_METHODS = ("compute_gradients", "apply_gradients")
UPDATE_METHODS = ("learn_on_batch", *GRADIENT_METHODS)
WEIGHT_METHODS = ("get_weights", "set_weights")
_SLOW_METHODS = (*ACTING_METHODS, *LOADING_METHODS, *UPDATE_METHODS)
OVERRIDABLE_METHODS = frozenset(
    (
        *_SLOW_METHODS,
        *WEIGHT_METHODS,
        "compute_single_action",
        "get_initial_state",
        "learn_epochs",
        "postprocess_trajectory",
    )
)
"""The methods that a driver with a Program calls only if a policy overrides them."""

_warned_classes: weakref.WeakSet[type] = weakref.WeakSet()
_policies_by_id: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The policies that have a driver, by `id`, because a custom class may not be hashable."""


class PolicyMeta(ExtensibleMeta):
    """Metaclass of policies: detects methods that are replaced on a class."""

    def __setattr__(cls, name: str, value: object) -> None:
        super().__setattr__(name, value)
        _on_method_changed(cls, name)

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        _on_method_changed(cls, name)


def _on_method_changed(policy_class: Any, name: str) -> None:
    if name in OVERRIDABLE_METHODS:
        for cls in (policy_class, *_find_subclasses(policy_class)):
            cls._inspect_methods()
        for policy in [*_policies_by_id.values()]:
            if isinstance(policy, policy_class):
                policy._inspect_instance_methods()


def _find_subclasses(policy_class: type) -> list[type]:
    direct: list[type] = type.__subclasses__(policy_class)
    return [*direct, *(indirect for subclass in direct for indirect in _find_subclasses(subclass))]


def register_policy(policy: object) -> None:
    """Registers a policy to be notified when a method of its class is replaced."""
    _policies_by_id[id(policy)] = policy


def get_base_methods(base: type) -> dict[str, Any]:
    """Returns the methods of a base class that subclasses may override, by name."""
    return {name: _find_method(base, name) for name in OVERRIDABLE_METHODS}


def _find_method(policy_class: type, name: str) -> Any:
    """Returns the attribute that a class or its bases define, without asking extensions."""
    return next((vars(cls)[name] for cls in policy_class.__mro__ if name in vars(cls)), None)


def find_overridden(policy_class: type, methods: dict[str, Any]) -> frozenset[str]:
    """Returns the names of the methods that a class overrides.

    Args:
        policy_class: the class.
        methods: those of the base class, from `get_base_methods`.
    """
    return frozenset(
        name for name, method in methods.items() if _find_method(policy_class, name) is not method
    )


def warn_slower(policy_class: type, overridden: frozenset[str]) -> None:
    """Logs, once for each class, that overriding methods replace compiled functions."""
    slower = [name for name in _SLOW_METHODS if name in overridden]
    if slower and policy_class not in _warned_classes:
        _warned_classes.add(policy_class)
        logger.warning(
            "%s overrides %s: this replaces the compiled functions, and is slower.",
            policy_class.__name__,
            ", ".join(slower),
        )


class ActSignature(NamedTuple):
    """Arguments that a policy's `compute_actions` accepts.

    Attributes:
        names: of the parameters.
        accepts_kwargs: whether it also accepts others by **kwargs.
        reads_episodes: whether `episodes` or the last infos are among them.
    """

    names: frozenset[str]
    accepts_kwargs: bool
    reads_episodes: bool

    @classmethod
    def from_owner(cls, owner: Any, default: Callable[..., Any]) -> ActSignature:
        """Returns the signature of a policy, or of a class of policies.

        Args:
            owner: the policy or class.
            default: the base class's `compute_actions_from_input_dict`, which passes on the
                arguments that `compute_actions` names.
        """
        parameters = inspect.signature(owner.compute_actions).parameters
        accepts_kwargs = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
        names, dict_method = {*parameters}, owner.compute_actions_from_input_dict
        if getattr(dict_method, "__func__", dict_method) is not default:
            names |= {*inspect.signature(dict_method).parameters}
        reads_episodes = bool(names & {"info_batch", "episodes"})
        return cls(frozenset(parameters), accepts_kwargs, reads_episodes)
