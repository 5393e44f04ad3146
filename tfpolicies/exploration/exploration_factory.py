"""Creates strategies from `exploration_config`."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from tfpolicies.base.validators import is_one_of
from tfpolicies.errors import ConfigError, suggest_similar_names
from tfpolicies.exploration import strategies
from tfpolicies.exploration.exploration import Exploration, ExplorationContext
from tfpolicies.exploration.parameter_noise import ParameterNoise
from tfpolicies.models.distributions import ActionDistribution

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
    >>> dist_class = ActionDistribution.for_space(spaces.Discrete(3))
    >>> greedy = make_exploration({"type": "EpsilonGreedy", "epsilon_timesteps": 100}, dist_class)
    >>> greedy.transform.noise_size, greedy.get_params(timestep=50, explore=True)
    (2, array([0.525], dtype=float32))
    """
    return _make(
        config, ExplorationContext(dist_class, _make, worker_index, num_workers, normalize_actions)
    )


def _make(config: Mapping[str, Any] | None, context: ExplorationContext) -> Exploration:
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"`exploration_config` must be a dict {{'type': ..., **settings}}, got {config!r}."
        )
    settings = dict(config or {})
    strategy_type = settings.pop("type", None)
    is_default = is_one_of(strategy_type, None, "")
    strategy = _get_strategy(strategies.StochasticSampling if is_default else strategy_type)
    names = _get_setting_names(strategy)
    unknown = [name for name in settings if name not in names]
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} is not a setting of {strategy.__name__}."
            f"{suggest_similar_names(unknown[0], names)} In `exploration_config` it has "
            f"{', '.join(names) if names else 'none'}."
        )
    return strategy(context, **settings)  # type: ignore[arg-type]


def _get_setting_names(strategy: type[Exploration]) -> list[str]:
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


def _get_strategy(strategy_type: str | type[Exploration]) -> type[Exploration]:
    strategy = strategy_type
    if isinstance(strategy_type, str):
        strategy = STRATEGIES.get(strategy_type) or _import_or_none(strategy_type)
    if not isinstance(strategy, type) or not issubclass(strategy, Exploration):
        names = ", ".join(STRATEGIES)
        raise ConfigError(
            f"exploration_config['type'] is {strategy_type!r}, which is not a "
            f"strategy.{suggest_similar_names(str(strategy_type), STRATEGIES)} There are {names}; "
            "for your own strategy, give a subclass of "
            "tfpolicies.exploration.exploration.Exploration, or its import path: "
            "'package.module.Class'."
        )
    return strategy


def _import_or_none(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None
