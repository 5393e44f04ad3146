"""Pipelines: connectors in sequence, timed; and the pair of pipelines of a policy."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, TypeAlias, TypeGuard, TypeVar

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from tfpolicies.batch.leaves import first_row, iterate_leaves, with_batch_axis
from tfpolicies.connectors.connector import (
    ActionConnector,
    ActionStep,
    AgentConnector,
    AgentStep,
    Connector,
    register_connector,
    restore,
)
from tfpolicies.errors import (
    CheckpointError,
    ConfigError,
    SpaceError,
    UnsupportedSpaceError,
    UsageError,
)
from tfpolicies.storage.spaces_json import decode_space, encode_space
from tfpolicies.type_aliases import Json, Structure

logger = logging.getLogger("tfpolicies")
_Pipeline = TypeVar("_Pipeline", bound="ConnectorPipeline")


@dataclass(slots=True)
class _Timer:
    """Seconds and calls of one connector."""

    seconds: float = 0.0
    calls: int = 0


class ConnectorPipeline(Connector):
    """Connectors that are called one after another.

    A pipeline has at most one connector of each name. A change that fails leaves it unchanged; one
    that succeeds reconnects the connectors, which drops their data of running episodes.

    Args:
        connectors: in the order of their calls.

    Raises:
        UsageError: for a connector of the wrong class, or two of one name.
    """

    kind: ClassVar[type[Connector]]
    _told: ClassVar[set[str]] = {"connectors"}  # the allowed keys of `params`

    def __init__(self, connectors: Iterable[Connector] = ()) -> None:
        self._connectors: tuple[Connector, ...] = ()
        self._timers: dict[str, _Timer] = {}
        self._replace(tuple(connectors))

    def connect(self, space: spaces.Space) -> spaces.Space:
        result = self.output_space(space)
        self._space = space
        for connector in self._connectors:
            space = connector.connect(space)
        return result

    def output_space(self, space: spaces.Space) -> spaces.Space:
        for connector in self._connectors:
            space = connector.output_space(space)
        return space

    def __call__(self, step: Any) -> Any:
        for connector, timer in zip(self._connectors, self._timers.values(), strict=True):
            given, start = step, perf_counter()
            step = connector(given)
            timer.seconds += perf_counter() - start
            timer.calls += 1
            _require_step(connector, step, given)
        return step

    def reset(self, env_ids: ArrayLike) -> None:
        for connector in self._connectors:
            connector.reset(env_ids)

    @property
    def remembers(self) -> bool:
        return any(connector.remembers for connector in self._connectors)

    def require_no_memory(self) -> None:
        """Checks that the pipeline can process a single row outside a running episode.

        Raises:
            UsageError: if a connector keeps data of running episodes.
        """
        names = [connector.name for connector in self._connectors if connector.remembers]
        if names:
            raise UsageError(
                f"{', '.join(names)} needs a whole episode, step by step, not one row of it. Play "
                "episodes with `evaluate()`, or call your own pipeline in each step: "
                f"`{self.name}.from_params(pipeline.params())`, then `connect(space)`."
            )

    @property
    def timers(self) -> dict[str, float]:
        """The mean time of each connector in ms, by its name with `_ms`; 0 without calls."""
        return {
            f"{name}_ms": 1e3 * timer.seconds / max(timer.calls, 1)
            for name, timer in self._timers.items()
        }

    def append(self, connector: Connector) -> None:
        """Adds a connector at the end."""
        self.insert(len(self), connector)

    def prepend(self, connector: Connector) -> None:
        """Adds a connector at the beginning."""
        self.insert(0, connector)

    def insert(self, index: int, connector: Connector) -> None:
        """Inserts a connector before the one at `index`."""
        connectors = list(self._connectors)
        connectors.insert(index, connector)
        self._replace(tuple(connectors))

    def insert_before(self, name: str, connector: Connector) -> None:
        """Inserts a connector before the one called `name`.

        Raises:
            UsageError: if there is none.
        """
        self.insert(self._index(name), connector)

    def insert_after(self, name: str, connector: Connector) -> None:
        """Inserts a connector after the one called `name`.

        Raises:
            UsageError: if there is none.
        """
        self.insert(self._index(name) + 1, connector)

    def remove(self, name: str) -> None:
        """Removes the connector called `name`.

        Raises:
            UsageError: if there is none.
        """
        index = self._index(name)
        self._replace(self._connectors[:index] + self._connectors[index + 1 :])

    def __getitem__(self, key: int | str) -> Connector:
        return self._connectors[self._index(key) if isinstance(key, str) else key]

    def __len__(self) -> int:
        return len(self._connectors)

    def __iter__(self) -> Iterator[Connector]:
        return iter(self._connectors)

    def params(self) -> dict[str, Any]:
        return {"connectors": [connector.to_state() for connector in self._connectors]}

    @classmethod
    def from_params(cls: type[_Pipeline], params: Any) -> _Pipeline:
        """Creates a pipeline from the result of `params`; connects it if that has a space.

        Raises:
            ConfigError: if the parameters are malformed, or the connectors do not fit the space.
        """
        fits = isinstance(params, Mapping) and {"connectors"} <= set(params) <= cls._told
        states = params["connectors"] if fits else None
        if not isinstance(states, list) or not all(map(_is_state, states)):
            raise ConfigError(
                f"The state of {cls.__name__} must be {{'connectors': [[name, params], ...]}}, "
                f"but got {params!r}. Restore what `to_state` returned."
            )
        try:
            made = cls([restore(name, state, cls.kind) for name, state in states])
            if "space" in params:
                made.connect(decode_space(params["space"]))
        except (UsageError, SpaceError, CheckpointError) as error:
            raise ConfigError(f"The state of {cls.__name__} cannot be used: {error}") from error
        return made

    def __repr__(self) -> str:
        return f"{self.name}({list(self._connectors)})"

    def _index(self, name: str) -> int:
        names = [connector.name for connector in self._connectors]
        if name not in names:
            raise UsageError(f"{self.name} has no connector {name!r}, only {names}.")
        return names.index(name)

    def _replace(self, connectors: tuple[Connector, ...]) -> None:
        for connector in connectors:
            if not isinstance(connector, self.kind) or isinstance(connector, ConnectorPipeline):
                raise UsageError(
                    f"{self.name} takes instances of subclasses of {self.kind.__name__}, but got "
                    f"{connector!r}."
                )
        names = [connector.name for connector in connectors]
        if len(set(names)) < len(names):
            raise UsageError(
                f"{self.name} takes one connector of each name, but got {names}. Remove one, or "
                "subclass it under another name."
            )
        if self._space is not None:
            space = self._space
            for connector in connectors:  # may raise; nothing has changed then
                space = connector.output_space(space)
        self._connectors = connectors
        self._timers = {name: self._timers.get(name, _Timer()) for name in names}
        if self._space is not None:
            self.connect(self._space)


@register_connector
class AgentConnectorPipeline(ConnectorPipeline):
    """The connectors for observations and rewards before a policy gets them."""

    kind = AgentConnector
    _told: ClassVar = {"connectors", "space"}

    def observation_space(self, space: spaces.Space) -> spaces.Space:
        """Returns the space of the observations that the policy gets."""
        return self.output_space(space)

    def params(self) -> dict[str, Any]:
        """Returns the states of the connectors, and the space that the pipeline is connected to.

        The policy itself does not know that space. Custom space classes, which JSON cannot
        represent, are omitted.
        """
        found = super().params()
        if self._space is not None:
            with contextlib.suppress(UnsupportedSpaceError):
                found["space"] = encode_space(self._space)
        return found

    def seen(self, observation: Structure) -> Any:
        """Transforms one observation for a policy; neither has a batch axis.

        Raises:
            UsageError: if a connector keeps data of running episodes.
        """
        self.require_no_memory()
        step = AgentStep(with_batch_axis(observation), np.zeros(1, int))
        for connector in self:
            given, step = step, connector.alone(step)  # type: ignore[attr-defined]
            _require_step(connector, step, given)
        return first_row(step.obs)


@register_connector
class ActionConnectorPipeline(ConnectorPipeline):
    """The connectors for a policy's actions before the environment gets them."""

    kind = ActionConnector

    def done(self, action: Structure) -> Any:
        """Transforms one action for the environment; neither has a batch axis.

        Raises:
            UsageError: if a connector keeps data of running episodes.
        """
        self.require_no_memory()
        return first_row(self(ActionStep(with_batch_axis(action), np.zeros(1, int))).actions)


_Agent: TypeAlias = AgentConnectorPipeline | None
_Action: TypeAlias = ActionConnectorPipeline | None


def connector_metrics(agent: _Agent, action: _Action) -> dict[str, dict[str, float]]:
    """Returns the mean times in milliseconds, as `Policy.get_connector_metrics` reports them.

    >>> connector_metrics(None, None)
    {'agent_connectors': {}, 'action_connectors': {}}
    """
    return {
        "agent_connectors": {} if agent is None else agent.timers,
        "action_connectors": {} if action is None else action.timers,
    }


def tell_left_out(what: str, agent: _Agent, action: _Action) -> None:
    """Logs once which connectors an object does not include.

    Args:
        subject: the object, as the subject of a sentence.
        agent_pipeline: before the policy; connectors that keep observations unchanged are ignored.
        action_pipeline: after the policy.
    """
    names = [each.name for each in agent or () if each.changes_observations]  # type: ignore[attr-defined]
    _tell(what, agent, names, "give it observations that have passed through them")
    names = [each.name for each in action or ()]
    _tell(what, action, names, "pass its actions through them before you step the environment")


_told: dict[str, weakref.WeakSet[ConnectorPipeline]] = defaultdict(weakref.WeakSet)


def _tell(what: str, pipeline: ConnectorPipeline | None, names: list[str], advice: str) -> None:
    if pipeline is not None and names and pipeline not in _told[what]:
        _told[what].add(pipeline)
        told = ", ".join(names)
        logger.warning("%s does not include the connectors %s: %s.", what, told, advice)


def pipelines_to_state(agent: _Agent, action: _Action) -> dict[str, Any]:
    """Returns the JSON state of both pipelines: `connector_configs` of a policy's state."""
    pipelines = {"agent": agent, "action": action}
    return {key: pipe.to_state() for key, pipe in pipelines.items() if pipe is not None}


def pipelines_from_state(state: Any) -> tuple[_Agent, _Action]:
    """Inverse of `pipelines_to_state`; agent connectors know their space if the state has it.

    Raises:
        ConfigError: if the state is malformed.
    """
    kinds: dict[str, type[ConnectorPipeline]] = {
        "agent": AgentConnectorPipeline,
        "action": ActionConnectorPipeline,
    }
    found: dict[str, Any] = {}
    for key, entry in state.items() if isinstance(state, Mapping) else [(None, state)]:
        if key not in kinds or not _is_state(entry) or entry[0] != kinds[key].__name__:
            raise ConfigError(
                "`connector_configs` must be {'agent': ['AgentConnectorPipeline', params], "
                f"'action': ['ActionConnectorPipeline', params]}}, but got {state!r}."
            )
        found[key] = restore(entry[0], entry[1], kinds[key])
    return found.get("agent"), found.get("action")


def successor(present: _Pipeline | None, restored: _Pipeline | None) -> _Pipeline | None:
    """Returns the pipeline to use after restoring a state.

    It is the present one, with its data of running episodes, if it equals the restored one, or if
    none was restored. A restored one that is not connected is connected to the present one's space.

    Raises:
        SpaceError: if that is not possible; the present one stays unchanged.
    """
    if present is None or restored is None:
        return present if restored is None else restored
    if present.is_connected and not restored.is_connected:
        restored.connect(present.space)
    return present if restored.to_state() == present.to_state() else restored


def _is_state(entry: Json) -> TypeGuard[Sequence[Any]]:
    return isinstance(entry, list | tuple) and len(entry) == 2


def _require_step(connector: Connector, step: Any, given: AgentStep | ActionStep) -> None:
    if type(step) is not type(given):
        raise UsageError(
            f"{connector.name} must return the {type(given).__name__} that it got, changed by "
            f"`step._replace(...)`; it returned {step!r:.60}."
        )
    rows = len(given.env_ids)
    counts = [np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in iterate_leaves(step[0])]
    wrong = next((count for count in counts if count != rows), None)
    if wrong is not None:
        raise UsageError(
            f"{connector.name} must return one row of {step._fields[0]} for each of the {rows} "
            f"rows that it got; it returned {wrong}."
        )
    rewards = step.rewards if isinstance(step, AgentStep) else None
    if rewards is not None and np.shape(rewards) != (rows,):
        raise UsageError(
            f"{connector.name} must return rewards [{rows}], a number for each row; it returned "
            f"the shape {list(np.shape(rewards))}."
        )
