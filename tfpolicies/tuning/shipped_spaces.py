"""Search spaces of algorithms, in this package's names, with their sources.

Zoo means the samplers of RL Baselines3 Zoo 2.9.0a2 (`rl_zoo3/hyperparams_opt.py`). Where a line
differs from it, its comment says how. Constants are the defaults of Stable-Baselines3, which the
Zoo's ranges assume: they replace settings that still have RLlib's defaults, such as PPO's
`vf_clip_param=10`, which stops learning where returns are large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tfpolicies.algorithms.tuned_hyperparameters_table import SB3_DEFAULTS
from tfpolicies.errors import ConfigError
from tfpolicies.tuning.ranges import (
    Range,
    choice,
    log_uniform,
    share_of_steps,
    uniform,
)
from tfpolicies.tuning.search_space import SearchSpace, Settings, split_names

if TYPE_CHECKING:
    from tfpolicies.config.algorithm_config import AlgorithmConfig

_ZOO = "RL Baselines3 Zoo 2.9.0a2, rl_zoo3/hyperparams_opt.py"
_OURS = "tfpolicies: no sampling ranges are published"

_GAMMA = choice([0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999])
_LAMBDA = choice([0.8, 0.9, 0.92, 0.95, 0.98, 0.99, 1.0])
_SMALL_NETWORKS = choice([[64], [64, 64], [256, 256]])
_NETWORKS = choice([[64, 64], [256, 256], [400, 300]])
_ACTIVATION = choice(["tanh", "relu"])
_LR = log_uniform(1e-5, 1e-2)  # Zoo: up to 1
_CAPACITY = choice([10_000, 100_000, 1_000_000])
_TAU = choice([0.001, 0.005, 0.01, 0.02, 0.05, 0.08])
_START = "num_steps_sampled_before_learning_starts"
_RANDOM = "exploration_config.random_timesteps"


class ShippedSpace(NamedTuple):
    """The ranges of an algorithm and their source.

    Attributes:
        ranges: by name, as in `SearchSpace`.
        source: the file or paper.
    """

    ranges: Mapping[str, Range]
    source: str


_ACTOR_CRITIC: dict[str, Range] = {
    "gamma": _GAMMA,  # Zoo: 0.97 to 0.9999; these are the values of its other samplers
    "lambda": _LAMBDA,  # Zoo: 0.9 to 0.9999; these are the values of its sampler of TRPO
    "lr": log_uniform(1e-5, 2e-3),
    "entropy_coeff": log_uniform(1e-8, 0.1),
    "grad_clip": uniform(0.3, 2.0),
    "model.fcnet_hiddens": _SMALL_NETWORKS,
    "model.fcnet_activation": _ACTIVATION,
}

_TD3: dict[str, Range] = {
    "gamma": _GAMMA,
    "lr": _LR,
    "train_batch_size": choice([16, 32, 64, 100, 128, 256, 512]),  # Zoo: up to 2048
    "replay_buffer_config.capacity": _CAPACITY,
    "tau": _TAU,
    "rollout_fragment_length": choice([1, 4, 8, 16, 32, 64]),  # Zoo: up to 512
    f"{_START}, {_RANDOM}": choice([100, 1000, 10_000]),  # Zoo: 100, the default
    "exploration_config.stddev": uniform(0.0, 1.0),  # Zoo: also Ornstein-Uhlenbeck noise
    "actor_hiddens, critic_hiddens": _NETWORKS,
}

SHIPPED_SPACES: dict[str, ShippedSpace] = {
    "PPO": ShippedSpace(
        {
            **_ACTOR_CRITIC,
            # Zoo: 32 to 2048 steps of each environment; these are those of 8 environments
            "train_batch_size": choice([256, 512, 1024, 2048, 4096, 8192, 16_384]),
            "sgd_minibatch_size": choice([32, 64, 128, 256, 512]),
            "num_sgd_iter": choice([1, 5, 10, 20]),
            "clip_param": choice([0.1, 0.2, 0.3, 0.4]),
        },
        _ZOO,
    ),
    "A2C": ShippedSpace(
        {
            **_ACTOR_CRITIC,
            # Zoo: 32 to 2048 steps; these are 5 (the default of A2C) to 256 of 8 environments
            "train_batch_size": choice([40, 64, 128, 256, 512, 1024, 2048]),
        },
        _ZOO,
    ),
    "DQN": ShippedSpace(
        {
            "gamma": _GAMMA,
            "lr": _LR,
            "train_batch_size": choice([16, 32, 64, 100, 128, 256, 512]),
            "replay_buffer_config.capacity": choice([10_000, 50_000, 100_000, 1_000_000]),
            "exploration_config.final_epsilon": uniform(0.0, 0.2),
            "exploration_config.epsilon_timesteps": share_of_steps(0.0, 0.5),
            # Zoo: 1 and 1000 to 20,000, for longer runs
            "target_network_update_freq": choice([1, 250, 500, 1000, 5000, 10_000]),
            _START: choice([100, 1000, 5000, 10_000]),  # Zoo: 0 to 20,000
            "rollout_fragment_length": choice([1, 4, 8, 16, 128, 256]),  # Zoo: also 1000
            "updates_per_step": choice([1.0, 0.5, 0.25, 0.125]),
            "model.fcnet_hiddens": _SMALL_NETWORKS,
        },
        _ZOO,
    ),
    "SAC": ShippedSpace(
        {
            "gamma": _GAMMA,
            "lr": _LR,
            "train_batch_size": choice([16, 32, 64, 128, 256, 512]),  # Zoo: up to 2048
            "replay_buffer_config.capacity": _CAPACITY,
            "tau": _TAU,
            "rollout_fragment_length": choice([1, 4, 8, 16, 32, 64]),  # Zoo: up to 512
            f"{_START}, {_RANDOM}": choice([100, 1000, 10_000]),  # Zoo: 0 to 20,000
            "model.fcnet_hiddens, q_model_config.fcnet_hiddens": _NETWORKS,
        },
        _ZOO,
    ),
    "TD3": ShippedSpace(_TD3, _ZOO),
    "DDPG": ShippedSpace(_TD3, _ZOO),
    "PG": ShippedSpace(
        {
            "gamma": _GAMMA,
            "lr": log_uniform(1e-5, 1e-2),
            "train_batch_size": choice([200, 500, 1000, 2000, 4000]),
            "model.fcnet_hiddens": _SMALL_NETWORKS,
            "model.fcnet_activation": _ACTIVATION,
        },
        _OURS,
    ),
    "BC": ShippedSpace(
        {
            "lr": log_uniform(1e-5, 1e-2),
            "train_batch_size": choice([256, 512, 1024, 2048, 4096]),
            "sgd_minibatch_size": choice([32, 64, 128, 256, 512]),
            "model.fcnet_hiddens": _SMALL_NETWORKS,
            "model.fcnet_activation": _ACTIVATION,
        },
        _OURS,
    ),
    "MARWIL": ShippedSpace(
        {
            "lr": log_uniform(1e-5, 1e-2),
            "gamma": _GAMMA,
            "beta": uniform(0.0, 1.0),
            "vf_coeff": log_uniform(0.1, 10.0),
            "train_batch_size": choice([512, 1024, 2048, 4096]),
            "model.fcnet_hiddens": _SMALL_NETWORKS,
            "model.fcnet_activation": _ACTIVATION,
        },
        _OURS,
    ),
}
"""By the name of the algorithm."""

_ON_POLICY = {"num_envs_per_worker": 8}
_OFF_POLICY = {"num_envs_per_worker": 1, "updates_per_step": 1.0}
_GAUSSIAN = {"exploration_config.type": "GaussianNoise", "exploration_config.final_scale": 1.0}
_EXTRA_CONSTANTS: dict[str, Settings] = {
    "PPO": _ON_POLICY,
    "A2C": {**_ON_POLICY, "rollout_fragment_length": "auto"},
    "DQN": {"num_envs_per_worker": 1},
    "SAC": _OFF_POLICY,
    "TD3": {**_OFF_POLICY, **_GAUSSIAN},
    "DDPG": {**_OFF_POLICY, **_GAUSSIAN},
}


def get_search_space(config: AlgorithmConfig) -> SearchSpace:
    """Returns the search space of the algorithm of a config, or of its nearest base class.

    Raises:
        ConfigError: if there is none.
    """
    bases = [base.__name__ for base in getattr(config.algo_class, "__mro__", ())]
    name = next((base for base in bases if base in SHIPPED_SPACES), None)
    if name is None:
        raise ConfigError(
            f"There is no search space for {bases[0] if bases else config.algo_class!r}; there are "
            f"those of {', '.join(SHIPPED_SPACES)}. Give a space: "
            '{"lr": log_uniform(1e-5, 1e-2)}; or, in a file for --space, '
            '{"lr": {"log_uniform": [1e-5, 1e-2]}}.'
        )
    shipped = SHIPPED_SPACES[name]
    constants = {**_flatten(SB3_DEFAULTS.get(name, {})), **_EXTRA_CONSTANTS.get(name, {})}
    searched = {part for key in shipped.ranges for part in split_names(key)}
    unset = {key: x for key, x in constants.items() if _has_default(config, key)}
    return SearchSpace(
        shipped.ranges,
        {key: x for key, x in unset.items() if key not in searched},
        f"{name}: {shipped.source}",
    )


def add_free_log_std(space: SearchSpace, config: AlgorithmConfig) -> SearchSpace:
    """Adds the free log standard deviation of Stable-Baselines3's Gaussian policies.

    Args:
        space: of the algorithm.
        config: with a Box of floats as the action space.
    """
    name = "model.free_log_std"
    is_ppo_like = space.source.startswith(("PPO:", "A2C:"))
    if not is_ppo_like or not _has_default(config, name):
        return space
    return SearchSpace(space.ranges, {**space.constants, name: True}, space.source)


def _flatten(settings: Mapping[str, Any]) -> Settings:
    """Returns settings of nested dicts by dotted names, but optimizers as they are.

    >>> _flatten({"lr": 1, "model": {"ortho_init": True}})
    {'lr': 1, 'model.ortho_init': True}
    """
    result: Settings = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and name != "optimizer":
            result |= {f"{name}.{key}": x for key, x in value.items()}
        else:
            result[name] = value
    return result


def _has_default(config: AlgorithmConfig, name: str) -> bool:
    """Whether a config has the algorithm's default for a setting, as far as it has the setting."""
    name = "training_intensity" if name == "updates_per_step" else name
    head, _, key = name.partition(".")
    default = type(config)()
    values = [each.get(head) for each in (config, default)]
    if key:
        values = [each.get(key) if isinstance(each, Mapping) else None for each in values]
    return bool(values[0] == values[1])
