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

from tfpolicies.base.type_aliases import Json, Structure
from tfpolicies.batch.leaves import expand_batch_axis, get_first_row, iterate_leaves
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

    connector_class: ClassVar[type[Connector]]
    _state_keys: ClassVar[set[str]] = {"connectors"}  # the allowed keys of `params`

    def __init__(self, connectors: Iterable[Connector] = ()) -> None:
        self._connectors: tuple[Connector, ...] = ()
        self._timers: dict[str, _Timer] = {}
        self._set_connectors(tuple(connectors))

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
            input_step, start = step, perf_counter()
            step = connector(input_step)
            timer.seconds += perf_counter() - start
            timer.calls += 1
            _require_step(connector, step, input_step)
        return step

    def reset(self, env_ids: ArrayLike) -> None:
        for connector in self._connectors:
            connector.reset(env_ids)

    @property
    def is_stateful(self) -> bool:
        return any(connector.is_stateful for connector in self._connectors)

    def require_stateless(self) -> None:
        """Checks that the pipeline can process a single row outside a running episode.

        Raises:
            UsageError: if a connector keeps data of running episodes.
        """
        names = [connector.name for connector in self._connectors if connector.is_stateful]
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
        self._set_connectors(tuple(connectors))

    def insert_before(self, name: str, connector: Connector) -> None:
        """Inserts a connector before the one called `name`.

        Raises:
            UsageError: if there is none.
        """
        self.insert(self._get_index(name), connector)

    def insert_after(self, name: str, connector: Connector) -> None:
        """Inserts a connector after the one called `name`.

        Raises:
            UsageError: if there is none.
        """
        self.insert(self._get_index(name) + 1, connector)

    def remove(self, name: str) -> None:
        """Removes the connector called `name`.

        Raises:
            UsageError: if there is none.
        """
        index = self._get_index(name)
        self._set_connectors(self._connectors[:index] + self._connectors[index + 1 :])

    def __getitem__(self, key: int | str) -> Connector:
        return self._connectors[self._get_index(key) if isinstance(key, str) else key]

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
        is_valid = isinstance(params, Mapping) and {"connectors"} <= set(params) <= cls._state_keys
        states = params["connectors"] if is_valid else None
        if not isinstance(states, list) or not all(map(_is_state, states)):
            raise ConfigError(
                f"The state of {cls.__name__} must be {{'connectors': [[name, params], ...]}}, "
                f"but got {params!r}. Restore what `to_state` returned."
            )
        try:
            pipeline = cls([restore(name, state, cls.connector_class) for name, state in states])
            if "space" in params:
                pipeline.connect(decode_space(params["space"]))
        except (UsageError, SpaceError, CheckpointError) as error:
            raise ConfigError(f"The state of {cls.__name__} cannot be used: {error}") from error
        return pipeline

    def __repr__(self) -> str:
        return f"{self.name}({list(self._connectors)})"

    def _get_index(self, name: str) -> int:
        names = [connector.name for connector in self._connectors]
        if name not in names:
            raise UsageError(f"{self.name} has no connector {name!r}, only {names}.")
        return names.index(name)

    def _set_connectors(self, connectors: tuple[Connector, ...]) -> None:
        for connector in connectors:
            if not isinstance(connector, self.connector_class) or isinstance(
                connector, ConnectorPipeline
            ):
                raise UsageError(
                    f"{self.name} takes instances of subclasses of "
                    f"{self.connector_class.__name__}, but got {connector!r}."
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

    connector_class = AgentConnector
    _state_keys: ClassVar = {"connectors", "space"}

    def observation_space(self, space: spaces.Space) -> spaces.Space:
        """Returns the space of the observations that the policy gets."""
        return self.output_space(space)

    def params(self) -> dict[str, Any]:
        """Returns the states of the connectors, and the space that the pipeline is connected to.

        The policy itself does not know that space. Custom space classes, which JSON cannot
        represent, are omitted.
        """
        params = super().params()
        if self._space is not None:
            with contextlib.suppress(UnsupportedSpaceError):
                params["space"] = encode_space(self._space)
        return params

    def transform_observation(self, observation: Structure) -> Any:
        """Transforms one observation for a policy; neither has a batch axis.

        Raises:
            UsageError: if a connector keeps data of running episodes.
        """
        self.require_stateless()
        step = AgentStep(expand_batch_axis(observation), np.zeros(1, int))
        for connector in self:
            input_step, step = step, connector.apply_without_update(step)  # type: ignore[attr-defined]
            _require_step(connector, step, input_step)
        return get_first_row(step.obs)


@register_connector
class ActionConnectorPipeline(ConnectorPipeline):
    """The connectors for a policy's actions before the environment gets them."""

    connector_class = ActionConnector

    def transform_action(self, action: Structure) -> Any:
        """Transforms one action for the environment; neither has a batch axis.

        Raises:
            UsageError: if a connector keeps data of running episodes.
        """
        self.require_stateless()
        return get_first_row(self(ActionStep(expand_batch_axis(action), np.zeros(1, int))).actions)


_Agent: TypeAlias = AgentConnectorPipeline | None
_Action: TypeAlias = ActionConnectorPipeline | None


def connector_metrics(
    agent_pipeline: _Agent, action_pipeline: _Action
) -> dict[str, dict[str, float]]:
    """Returns the mean times in milliseconds, as `Policy.get_connector_metrics` reports them.

    >>> connector_metrics(None, None)
    {'agent_connectors': {}, 'action_connectors': {}}
    """
    return {
        "agent_connectors": {} if agent_pipeline is None else agent_pipeline.timers,
        "action_connectors": {} if action_pipeline is None else action_pipeline.timers,
    }


def warn_skipped_connectors(subject: str, agent_pipeline: _Agent, action_pipeline: _Action) -> None:
    """Logs once which connectors an object does not include.

    Args:
        subject: the object, as the subject of a sentence.
        agent_pipeline: before the policy; connectors that keep observations unchanged are ignored.
        action_pipeline: after the policy.
    """
    names = [connector.name for connector in agent_pipeline or () if connector.changes_observations]  # type: ignore[attr-defined]
    _warn_once(subject, agent_pipeline, names, "give it observations that have passed through them")
    names = [connector.name for connector in action_pipeline or ()]
    _warn_once(
        subject,
        action_pipeline,
        names,
        "pass its actions through them before you step the environment",
    )


_warned_pipelines: dict[str, weakref.WeakSet[ConnectorPipeline]] = defaultdict(weakref.WeakSet)


def _warn_once(
    subject: str, pipeline: ConnectorPipeline | None, names: list[str], advice: str
) -> None:
    if pipeline is not None and names and pipeline not in _warned_pipelines[subject]:
        _warned_pipelines[subject].add(pipeline)
        listed_names = ", ".join(names)
        logger.warning("%s does not include the connectors %s: %s.", subject, listed_names, advice)


def pipelines_to_state(agent_pipeline: _Agent, action_pipeline: _Action) -> dict[str, Any]:
    """Returns the JSON state of both pipelines: `connector_configs` of a policy's state."""
    pipelines = {"agent": agent_pipeline, "action": action_pipeline}
    return {key: pipeline.to_state() for key, pipeline in pipelines.items() if pipeline is not None}


def pipelines_from_state(state: Any) -> tuple[_Agent, _Action]:
    """Inverse of `pipelines_to_state`; agent connectors know their space if the state has it.

    Raises:
        ConfigError: if the state is malformed.
    """
    pipeline_classes: dict[str, type[ConnectorPipeline]] = {
        "agent": AgentConnectorPipeline,
        "action": ActionConnectorPipeline,
    }
    pipelines: dict[str, Any] = {}
    for key, entry in state.items() if isinstance(state, Mapping) else [(None, state)]:
        if (
            key not in pipeline_classes
            or not _is_state(entry)
            or entry[0] != pipeline_classes[key].__name__
        ):
            raise ConfigError(
                "`connector_configs` must be {'agent': ['AgentConnectorPipeline', params], "
                f"'action': ['ActionConnectorPipeline', params]}}, but got {state!r}."
            )
        pipelines[key] = restore(entry[0], entry[1], pipeline_classes[key])
    return pipelines.get("agent"), pipelines.get("action")


def choose_restored_pipeline(
    current: _Pipeline | None, restored: _Pipeline | None
) -> _Pipeline | None:
    """Returns the pipeline to use after restoring a state.

    It is the present one, with its data of running episodes, if it equals the restored one, or if
    none was restored. A restored one that is not connected is connected to the present one's space.

    Raises:
        SpaceError: if that is not possible; the present one stays unchanged.
    """
    if current is None or restored is None:
        return current if restored is None else restored
    if current.is_connected and not restored.is_connected:
        restored.connect(current.space)
    return current if restored.to_state() == current.to_state() else restored


def _is_state(entry: Json) -> TypeGuard[Sequence[Any]]:
    return isinstance(entry, list | tuple) and len(entry) == 2


def _require_step(connector: Connector, step: Any, input_step: AgentStep | ActionStep) -> None:
    if type(step) is not type(input_step):
        raise UsageError(
            f"{connector.name} must return the {type(input_step).__name__} that it got, changed by "
            f"`step._replace(...)`; it returned {step!r:.60}."
        )
    rows = len(input_step.env_ids)
    counts = [np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in iterate_leaves(step[0])]
    wrong_count = next((count for count in counts if count != rows), None)
    if wrong_count is not None:
        raise UsageError(
            f"{connector.name} must return one row of {step._fields[0]} for each of the {rows} "
            f"rows that it got; it returned {wrong_count}."
        )
    rewards = step.rewards if isinstance(step, AgentStep) else None
    if rewards is not None and np.shape(rewards) != (rows,):
        raise UsageError(
            f"{connector.name} must return rewards [{rows}], a number for each row; it returned "
            f"the shape {list(np.shape(rewards))}."
        )
