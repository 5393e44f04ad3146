"""Creates strategies from `exploration_config`."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from tfpolicies.errors import ConfigError, near_matches
from tfpolicies.exploration import strategies
from tfpolicies.exploration.exploration import Exploration, Setting
from tfpolicies.exploration.parameter_noise import ParameterNoise
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.rules import is_one_of

STRATEGIES: dict[str, type[Exploration]] = {
    strategy.__name__: strategy
    for strategy in (
        strategies.StochasticSampling,
        strategies.Random,
        strategies.EpsilonGreedy,
        strategies.PerWorkerEpsilonGreedy,
        strategies.SoftQ,
        strategies.GaussianNoise,
        strategies.OrnsteinUhlenbeckNoise,
        ParameterNoise,
    )
}


def make_exploration(
    config: Mapping[str, Any] | None,
    dist_class: ActionDistribution,
    *,
    worker_index: int = 0,
    num_workers: int = 0,
    normalize_actions: bool = False,
) -> Exploration:
    """Creates the strategy that `exploration_config` describes.

    Args:
        config: `{"type": ..., **settings}`. The type is a name in `STRATEGIES`, a subclass of
            `Exploration` or its import path, "package.module.Class". None, or no type, means
            StochasticSampling.
        dist_class: the policy's `ActionDistribution`.
        worker_index: of the worker that acts; 0 is the local one.
        num_workers: number of workers besides the local one.
        normalize_actions: whether the policy's own actions are in [-1, 1] for bounded Boxes, so
            that random and clipped ones must also be.

    Raises:
        ConfigError: if the type or a setting is unknown or out of range, or does not support the
            action space.

    >>> from gymnasium import spaces
    >>> from tfpolicies.models.distributions import ActionDistribution
    >>> dist_class = ActionDistribution.of(spaces.Discrete(3))
    >>> greedy = make_exploration({"type": "EpsilonGreedy", "epsilon_timesteps": 100}, dist_class)
    >>> greedy.transform.noise_size, greedy.params(timestep=50, explore=True)
    (2, array([0.525], dtype=float32))
    """
    return _make(config, Setting(dist_class, _make, worker_index, num_workers, normalize_actions))


def _make(config: Mapping[str, Any] | None, setting: Setting) -> Exploration:
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"`exploration_config` must be a dict {{'type': ..., **settings}}, got {config!r}."
        )
    settings = dict(config or {})
    kind = settings.pop("type", None)
    is_default = is_one_of(kind, None, "")
    strategy = _strategy(strategies.StochasticSampling if is_default else kind)
    known = _settings_of(strategy)
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} is not a setting of {strategy.__name__}."
            f"{near_matches(unknown[0], known)} In `exploration_config` it has "
            f"{', '.join(known) if known else 'none'}."
        )
    return strategy(setting, **settings)  # type: ignore[arg-type]


def _settings_of(strategy: type[Exploration]) -> list[str]:
    """Returns the keywords of the constructor, and of bases to which it passes `**kwargs`."""
    names: dict[str, None] = {}
    for cls in strategy.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        names |= {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in names if name not in strategy.fixed_settings]


def _strategy(kind: str | type[Exploration]) -> type[Exploration]:
    found = kind
    if isinstance(kind, str):
        found = STRATEGIES.get(kind) or _imported(kind)
    if not isinstance(found, type) or not issubclass(found, Exploration):
        names = ", ".join(STRATEGIES)
        raise ConfigError(
            f"exploration_config['type'] is {kind!r}, which is not a strategy."
            f"{near_matches(str(kind), STRATEGIES)} There are {names}; for your own strategy, "
            "give a subclass of tfpolicies.exploration.exploration.Exploration, or its import "
            "path: 'package.module.Class'."
        )
    return found


def _imported(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None
