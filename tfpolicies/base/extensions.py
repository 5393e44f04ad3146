"""Extensions: attributes and hooks that another package adds to objects of this one, on demand.

A package subclasses `Extension`, and registers its subclass by the import path:
`register_extension("my_package.extension:MyExtension")`. The subclass is imported when code reads
an attribute that the core does not have, or when the core reaches one of the hooks. Existing
objects are not changed.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tfpolicies.base.porting_tables import find_required_import
from tfpolicies.errors import ConfigError

if TYPE_CHECKING:
    import gymnasium as gym
    import keras

Getters = Mapping[type, Mapping[str, Callable[[Any], Any]]]
"""Functions that take the object and return its attribute, by class and name."""


class Extension:
    """Base class of extensions; subclass it and override the parts that you need.

    One instance per process is made, without arguments. A getter that raises a `LookupError`
    reports that the attribute does not exist. Subclasses of the listed classes have the attributes
    as well.

    Attributes:
        attributes: additional attributes of objects.
        class_attributes: additional attributes of the classes themselves.
        records_steps: whether episodes keep each agent's previous action and reward, the ends of
            its episode and the outputs of acting.
    """

    attributes: ClassVar[Getters] = {}
    class_attributes: ClassVar[Getters] = {}
    records_steps: ClassVar[bool] = False

    def make_model_factory(self, custom_model: object) -> Any:
        """Returns a factory of Keras models for a `custom_model`, or the argument itself."""
        return custom_model

    def wrap_model(
        self, model: keras.Model, observation_space: gym.Space, action_space: gym.Space
    ) -> Any:
        """Returns a Keras model that runs what `make_model` returned, or the argument itself."""
        del observation_space, action_space
        return model

    def prepare_model(self, policy: object, model: keras.Model) -> None:
        """Called with the Keras model each time `policy.model` is read."""

    def complete_recurrent_state(
        self, policy: object, states: Sequence[Any] | None
    ) -> tuple[list[Any], Callable[[list[Any]], list[Any]]] | None:
        """Converts a recurrent state that does not fit the policy, `[B, ...]` per array.

        Returns:
            A recurrent state that fits, and a function that converts the next one back; None if the
            state has another form.
        """
        del policy, states
        return None

    def read_statistics(
        self, view: object, train_batch: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Returns statistics that `loss` left in attributes of `self`, scalar tensors by name.

        Args:
            view: the `self` of `loss`.
            train_batch: tensors by column.

        Returns:
            None if the extension reads no attributes.
        """
        del view, train_batch
        return None

    def edit_batch(self, batch: Any, space: gym.Space) -> contextlib.AbstractContextManager[None]:
        """Returns a context around `on_postprocess_trajectory`, which may read and change a batch.

        Args:
            batch: the rows of one trajectory. After the context they have their original form
                again.
            space: the observation space.
        """
        del batch, space
        return contextlib.nullcontext()


class Extensions(dict[str, Any], Extension):
    """The registered extensions by name, combined into one; each is loaded on first use.

    Its values are import paths, or classes. Workers in other processes get a copy.
    """

    def _load_all(self) -> list[Extension]:
        return [_load(value) for value in self.values()]

    def get_attribute(self, owner: Any, name: str) -> Any:
        """Returns an additional attribute of an object or a class."""
        is_class = isinstance(owner, type)
        for extension in self._load_all():
            getters = extension.class_attributes if is_class else extension.attributes
            for base in (owner if is_class else type(owner)).__mro__:
                with contextlib.suppress(LookupError):
                    return getters[base][name](owner)
        raise LookupError(name)

    @property
    def records_steps(self) -> bool:  # type: ignore[override]  # of all of them
        """Whether one of them needs the steps of episodes."""
        return bool(self) and any(extension.records_steps for extension in self._load_all())

    def make_model_factory(self, custom_model: object) -> Any:
        for extension in self._load_all():
            custom_model = extension.make_model_factory(custom_model)
        return custom_model

    def wrap_model(
        self, model: keras.Model, observation_space: gym.Space, action_space: gym.Space
    ) -> Any:
        for extension in self._load_all():
            model = extension.wrap_model(model, observation_space, action_space)
        return model

    def prepare_model(self, policy: object, model: keras.Model) -> None:
        for extension in self._load_all():
            extension.prepare_model(policy, model)

    def complete_recurrent_state(
        self, policy: object, states: Sequence[Any] | None
    ) -> tuple[list[Any], Callable[[list[Any]], list[Any]]] | None:
        results = (
            extension.complete_recurrent_state(policy, states) for extension in self._load_all()
        )
        return next((result for result in results if result is not None), None)

    def read_statistics(
        self, view: object, train_batch: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        results = [extension.read_statistics(view, train_batch) for extension in self._load_all()]
        reported = [result for result in results if result is not None]
        return {name: x for result in reported for name, x in result.items()} if reported else None

    @contextlib.contextmanager
    def edit_batch(self, batch: Any, space: gym.Space) -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            for extension in self._load_all():
                contexts.enter_context(extension.edit_batch(batch, space))
            yield


EXTENSIONS = Extensions()
"""The extensions of this process."""


def register_extension(extension: str | type[Extension]) -> None:
    """Adds an extension to this process, and to workers that it starts later.

    Args:
        extension: the path of a subclass of `Extension`, such as
            `"my_package.extension:MyExtension"`, which is imported on first use; or the class.

    Raises:
        ConfigError: if it is neither.
    """
    is_class = isinstance(extension, type) and issubclass(extension, Extension)
    if not is_class and not (isinstance(extension, str) and extension.count(":") == 1):
        raise ConfigError(
            f"An extension must be a subclass of Extension, or its path 'module:Class', got "
            f"{extension!r}."
        )
    EXTENSIONS[extension if isinstance(extension, str) else _make_path(extension)] = extension


def _make_path(extension: type) -> str:
    return f"{extension.__module__}:{extension.__qualname__}"


@functools.cache
def _load(extension: str | type[Extension]) -> Extension:
    """Returns the instance of an extension.

    Raises:
        ImportError: if its module cannot be imported.
        ConfigError: if the path does not name a subclass of `Extension`.
    """
    loaded: Any = extension
    if isinstance(extension, str):
        module, _, name = extension.partition(":")
        loaded = getattr(importlib.import_module(module), name, None)
    if not (isinstance(loaded, type) and issubclass(loaded, Extension)):
        raise ConfigError(f"{extension!r} must be a subclass of Extension, got {loaded!r}.")
    return loaded()


def describe_missing(owner: Any, name: str) -> str:
    """Returns the message of an `AttributeError`.

    >>> describe_missing(3, "real_part"), describe_missing(int, "zero")
    ("'int' object has no attribute 'real_part'", "type object 'int' has no attribute 'zero'")
    """
    is_class = isinstance(owner, type)
    kind = f"type object {owner.__name__!r}" if is_class else f"{type(owner).__name__!r} object"
    return f"{kind} has no attribute {name!r}"


def describe_import(owner: object, name: str) -> str:
    """Returns the end of an error message that names the import that adds an attribute; or "".

    Args:
        owner: the object, or its class.
        name: the attribute.
    """
    statement = find_required_import(owner if isinstance(owner, type) else type(owner), name)
    return statement and f". Code written for RLlib finds it after `{statement}`"


def _get_or_raise(owner: object, cls: type[Extensible], name: str) -> Any:
    if name.startswith("__"):  # which Python, NumPy and others ask of any object
        raise AttributeError(describe_missing(owner, name))
    with contextlib.suppress(LookupError):
        return EXTENSIONS.get_attribute(owner, name)
    raise AttributeError(f"{cls._describe_missing(owner, name)}{describe_import(owner, name)}")


class ExtensibleMeta(abc.ABCMeta):
    """Metaclass of classes that extensions may add attributes to."""

    if not TYPE_CHECKING:  # it would let any name pass

        def __getattr__(cls, name: str) -> Any:
            return _get_or_raise(cls, cls, name)


class Extensible:
    """Base of classes whose objects extensions may add attributes to."""

    @staticmethod
    def _describe_missing(owner: object, name: str) -> str:
        """Returns the message for an attribute that an object, or the class, does not have."""
        return describe_missing(owner, name)

    if not TYPE_CHECKING:  # it would let any name pass

        def __getattr__(self, name: str) -> Any:
            return _get_or_raise(self, type(self), name)
