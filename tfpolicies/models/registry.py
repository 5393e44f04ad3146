"""Names for models of one's own, which `model={"custom_model": name}` takes. Knows no Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpolicies.errors import ModelSettingError
from tfpolicies.extensions import EXTENSIONS
from tfpolicies.registers import Register
from tfpolicies.type_aliases import Setting

MODELS = Register("A model", ModelSettingError)


def register_model(name: str, factory: Callable[..., Any]) -> None:
    """Gives a factory of models a name, which `model={"custom_model": name}` then takes.

    Registering a name again replaces the factory for policies made later. The register belongs to
    the process: whoever loads a checkpoint in another one registers there.

    Args:
        name: a non-empty text.
        factory: `f(observation_space, num_outputs, **custom_model_config) -> keras.Model`.

    Raises:
        ModelSettingError: if the name is no text or the factory cannot be called.
    """
    if not callable(factory):
        raise ModelSettingError(
            f"The model {name!r} must be a factory f(observation_space, num_outputs, "
            f"**custom_model_config) that returns a keras.Model, got {factory!r}."
        )
    MODELS.add(name, factory)


def model_given(custom_model: Setting) -> Any:
    """Returns what a setting `custom_model` stands for.

    That is what is registered under a name, or what was given; an extension may make a factory of
    it.
    """
    found = MODELS.find(custom_model)
    return EXTENSIONS.make_model_factory(custom_model if found is None else found)
