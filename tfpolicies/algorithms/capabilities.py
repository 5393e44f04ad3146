"""Lists which spaces, models and environments each algorithm takes.

`capabilities.json` has the answers for the algorithms of this package, so that they can be listed
without TensorFlow; `python -m tools.capabilities` writes it with `find_capabilities`, which builds
a policy for each answer.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.base.type_aliases import Json
from tfpolicies.envs.multi_agent_env import MultiAgentEnv
from tfpolicies.errors import ConfigError, SpaceError

_FILE = "capabilities.json"
_VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
_CHOICE = spaces.Discrete(3)
_MASKED = {"observations": _VECTOR, "action_mask": spaces.MultiBinary(3)}

ACTIONS: dict[str, spaces.Space] = {
    "discrete": _CHOICE,
    "multi-discrete": spaces.MultiDiscrete([3, 2]),
    "continuous": _VECTOR,
    "nested": spaces.Dict(choice=_CHOICE, vector=_VECTOR),
}
"""An action space of each kind that an algorithm may take: one choice, several choices, a vector of
numbers, and a Dict or Tuple of them."""

OBSERVATIONS: dict[str, spaces.Space] = {
    "vector": _VECTOR,
    "image": spaces.Box(0, 255, (42, 42, 4), np.uint8),
    "discrete": _CHOICE,
    "nested": spaces.Dict(choice=_CHOICE, vector=_VECTOR),
}
"""An observation space of each kind."""

_SMALL = {"fcnet_hiddens": [4], "conv_filters": [[4, [8, 8], 4]]}


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The spaces, models and environments that an algorithm takes.

    Attributes:
        summary: a line that names the method and its source.
        actions: the kinds of action spaces, of `ACTIONS`.
        observations: the kinds of observation spaces, of `OBSERVATIONS`.
        masks: whether observations may have an `action_mask`.
        memory: whether models may be recurrent.
        several_agents: whether environments may have several agents.
        runtimes: those that its policies act on: "function", "session", "onnx".
    """

    summary: str
    actions: tuple[str, ...]
    observations: tuple[str, ...]
    masks: bool
    memory: bool
    several_agents: bool
    runtimes: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        """Returns the attributes as JSON values."""
        return {name: _to_json(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Capabilities:
        """Returns what `to_json` describes."""
        values: dict[str, Any] = {}
        for name, value in record.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def _to_json(value: Any) -> Json:
    return list(value) if isinstance(value, tuple) else value


def read_capabilities() -> dict[str, Capabilities]:
    """Returns the capabilities of the algorithms of this package, by name."""
    text = resources.files(__package__).joinpath(_FILE).read_text("utf-8")
    return {name: Capabilities.from_json(record) for name, record in json.loads(text).items()}


def find_capabilities(algorithm: Any) -> Capabilities:
    """Finds the capabilities of an algorithm by building its policies; takes seconds.

    Args:
        algorithm: its class.
    """
    policy_classes = algorithm.policy_classes
    policy_class = policy_classes["tf2"]

    def builds(observations: spaces.Space, actions: spaces.Space, **settings: Any) -> bool:
        model = {**_SMALL, **settings.pop("model", {})}
        return _works(lambda: policy_class(observations, actions, {"model": model, **settings}))

    actions = [kind for kind, space in ACTIONS.items() if builds(_VECTOR, space)]
    action_space = ACTIONS[actions[0]]
    runtimes = dict.fromkeys(policy_class.runtime for policy_class in policy_classes.values())
    if _works(lambda: _act(policy_class(_VECTOR, action_space, {"inference": "onnx"}))):
        runtimes["onnx"] = None
    return Capabilities(
        summary=_get_summary(algorithm),
        actions=tuple(actions),
        observations=tuple(k for k, space in OBSERVATIONS.items() if builds(space, action_space)),
        masks=any(builds(spaces.Dict(_MASKED), ACTIONS[kind]) for kind in actions),
        memory=builds(_VECTOR, action_space, model={"use_lstm": True, "lstm_cell_size": 4}),
        several_agents=_works(lambda: _build_for_two_agents(algorithm, action_space)),
        runtimes=tuple(runtimes),
    )


def _works(build: Callable[[], object]) -> bool:
    try:
        build()
    except (SpaceError, ConfigError):
        return False
    return True


def _act(policy: Any) -> None:
    policy.compute_single_action(_VECTOR.sample())


def _get_summary(algorithm: Any) -> str:
    text = importlib.import_module(algorithm.__module__).__doc__ or algorithm.__doc__ or ""
    return text.strip().partition("\n")[0]


class _TwoAgents(MultiAgentEnv):
    """Two agents that act once."""

    _agent_ids = ("a", "b")

    def __init__(self, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = _VECTOR, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {agent: np.zeros(3, np.float32) for agent in self._agent_ids}, {}

    def step(self, actions: Any) -> Any:
        obs, _ = self.reset()
        flags = {**dict.fromkeys(obs, True), "__all__": True}
        return obs, dict.fromkeys(obs, 1.0), flags, dict.fromkeys(flags, False), {}


def _build_for_two_agents(algorithm: Any, action_space: spaces.Space) -> None:
    config = algorithm.get_default_config()
    config.environment(lambda context: _TwoAgents(action_space)).multi_agent(
        policies={"a", "b"}, policy_mapping_fn=lambda agent_id, *args, **kwargs: agent_id
    )
    config.training(model=_SMALL).debugging(log_level="ERROR").build().stop()
