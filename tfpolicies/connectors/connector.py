"""`Connector`, a preprocessing step between an environment and a policy, and the registry of them.

Connectors work on the rows of all environments at once: arrays `[N, ...]`, with the environment
(and the agent) of each row. Their states are JSON and hold constructor arguments, never data:
`reset` drops the data of running episodes.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import ConfigError, UsageError, suggest_similar_names


class AgentStep(NamedTuple):
    """Observations and rewards after a step, one row per agent."""

    obs: Any  # [N, *shape], nested as the observation space
    env_ids: np.ndarray  # int [N], from 0
    rewards: np.ndarray | None = None  # float [N]; None where there are none yet
    agents: np.ndarray | None = None  # int [N], from 0: the agent's index in its episode; None: 0


class ActionStep(NamedTuple):
    """Actions, one row per agent."""

    actions: Any  # [N, *shape], nested as the action space
    env_ids: np.ndarray  # int [N], from 0
    agents: np.ndarray | None = None  # int [N], from 0; None: 0


class Connector(abc.ABC):
    """One step between an environment and a policy.

    A subclass takes JSON values as keyword arguments, and returns them from `params`. To be
    restored it must be registered: decorate it with `register_connector`.
    """

    _space: spaces.Space | None = None

    @property
    def name(self) -> str:
        """The name of the connector's class."""
        return type(self).__name__

    @property
    def space(self) -> spaces.Space:
        """The observation or action space of the input rows.

        Raises:
            UsageError: before `connect`.
        """
        if self._space is None:
            raise UsageError(
                f"{self.name} has no space yet. Call `connect(space)`; a pipeline does that for "
                "its connectors."
            )
        return self._space

    @property
    def is_connected(self) -> bool:
        """True after `connect`."""
        return self._space is not None

    def connect(self, space: spaces.Space) -> spaces.Space:
        """Prepares the connector for rows of `space`, and drops its data of running episodes.

        Args:
            space: the observation space of the connector's input, or the action space.

        Returns:
            The space of the output rows.

        Raises:
            SpaceError: if the connector cannot be used for the space.
        """
        result = self.output_space(space)
        self._space = space
        return result

    def output_space(self, space: spaces.Space) -> spaces.Space:
        """Returns the space of the output rows for input rows of `space`, without changes."""
        return space

    @abc.abstractmethod
    def __call__(self, step: Any) -> Any:
        """Returns the step with its rows changed; never writes into the input arrays."""

    def reset(self, env_ids: ArrayLike) -> None:  # noqa: B027 - most connectors remember nothing
        """Drops the data of the running episodes of some environments.

        Args:
            env_ids: one environment's id, or several, int `[K]`; unknown ones are ignored.
        """

    @property
    def is_stateful(self) -> bool:
        """True if it keeps data of running episodes, that is, if its class overrides `reset`."""
        return type(self).reset is not Connector.reset

    def params(self) -> dict[str, Any]:
        """Returns the constructor's arguments, as JSON values."""
        return {}

    def to_state(self) -> list[Any]:
        """Returns `[name, params]`, JSON values that `restore` takes."""
        return [self.name, self.params()]

    @classmethod
    def from_params(cls, params: Json) -> Connector:
        """Returns a new connector with the given arguments.

        Raises:
            ConfigError: if they are not this class's arguments.
        """
        names = list(inspect.signature(cls).parameters)
        if not isinstance(params, Mapping) or not set(params) <= set(names):
            raise ConfigError(
                f"The state of {cls.__name__} must be a dict with keys of {names}, but got "
                f"{params!r}. Restore what `to_state` returned."
            )
        try:
            return cls(**params)
        except TypeError as error:
            raise ConfigError(
                f"{cls.__name__} cannot be created from {dict(params)!r}: {error}. Restore what "
                "`to_state` returned."
            ) from error

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.params().items())
        return f"{self.name}({arguments})"


class AgentConnector(Connector):
    """A connector between an environment's output and a policy's input.

    Attributes:
        changes_observations: False for a connector that changes only rewards, which callers that
            act manually can ignore.
    """

    changes_observations: ClassVar[bool] = True

    @abc.abstractmethod
    def __call__(self, step: AgentStep) -> AgentStep: ...

    def apply_without_update(self, step: AgentStep) -> AgentStep:
        """Transforms rows that do not belong to a sampled episode, without learning from them."""
        return self(step)

    def observation_space(self, space: spaces.Space) -> spaces.Space:
        """Returns the space of the observations that a policy after the connector gets."""
        return space

    def output_space(self, space: spaces.Space) -> spaces.Space:
        return self.observation_space(space)


class ActionConnector(Connector):
    """A connector between a policy and the environment; returns elements of the action space."""

    @abc.abstractmethod
    def __call__(self, step: ActionStep) -> ActionStep: ...


_Class = TypeVar("_Class", bound=type[Connector])
_REGISTRY: dict[str, type[Connector]] = {}


def register_connector(cls: _Class) -> _Class:
    """Registers a connector class by its name, so that its states can be restored.

    Returns:
        The class itself, so that this can be used as a decorator.

    Raises:
        UsageError: if another class has that name, or it is not a connector class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Connector)):
        raise UsageError(f"Only subclasses of Connector can be registered, but got {cls!r}.")
    registered = _REGISTRY.get(cls.__name__, cls)
    if registered.__module__ != cls.__module__ or registered.__qualname__ != cls.__qualname__:
        raise UsageError(
            f"The connector {cls.__name__!r} is registered already, as "
            f"{registered.__module__}.{registered.__qualname__}. Rename the new class."
        )
    _REGISTRY[cls.__name__] = cls
    return cls


def restore(name: Json, state: Json, base_class: type[Connector] = Connector) -> Connector:
    """Returns a new connector, not connected yet, from the result of `to_state`.

    Args:
        name: of a registered class.
        state: its params.
        base_class: required base class, checked before anything is created.

    Raises:
        ConfigError: if the name is unknown, the class has another base class, or the state does not
            fit the class.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ConfigError(
            f"There is no connector {name!r}; registered are "
            f"{sorted(_REGISTRY)}.{suggest_similar_names(name, _REGISTRY)} Import the module that "
            "defines it, decorated with `@register_connector`."
        )
    connector_class = _REGISTRY[name]
    if not issubclass(connector_class, base_class):
        raise ConfigError(
            f"The connector {name!r} is not an {base_class.__name__}; give one of those."
        )
    return connector_class.from_params(state)
