"""Registry of custom models, for `model={"custom_model": name}`. Does not import Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpolicies.base.extensions import EXTENSIONS
from tfpolicies.base.name_registry import NameRegistry
from tfpolicies.base.type_aliases import Setting
from tfpolicies.errors import ModelSettingError

MODELS = NameRegistry("A model", ModelSettingError)


def register_model(name: str, factory: Callable[..., Any]) -> None:
    """Registers a factory of models under a name, for `model={"custom_model": name}`.

    Registering a name again replaces the factory for policies created later. The registry belongs
    to the process: to load a checkpoint in another process, register the factory there as well.

    Args:
        name: a non-empty string.
        factory: `f(observation_space, num_outputs, **custom_model_config) -> keras.Model`.

    Raises:
        ModelSettingError: if the name is not a string or the factory cannot be called.
    """
    if not callable(factory):
        raise ModelSettingError(
            f"The model {name!r} must be a factory f(observation_space, num_outputs, "
            f"**custom_model_config) that returns a keras.Model, got {factory!r}."
        )
    MODELS.add(name, factory)


def resolve_custom_model(custom_model: Setting) -> Any:
    """Returns the model or factory that a setting `custom_model` refers to.

    That is the object registered under a name, or the value itself; an extension may wrap it in a
    factory.
    """
    registered = MODELS.find(custom_model)
    return EXTENSIONS.make_model_factory(custom_model if registered is None else registered)
