"""Table of settings that learn, by algorithm and environment; `tuned.py` gives access to it.

Each entry names its source, the environment steps and mean return of the source, and the deviations
from it. `docs/tables/tuned.md` shows all of them.

RL Baselines3 Zoo means release 2.9.0a2: `hyperparams/<algorithm>.yml` for the settings and
`benchmark.md` for the returns. Settings that are not in an entry of the Zoo have
Stable-Baselines3's defaults: `_PPO`, `_A2C`, `_DQN`, `_SAC`, `_TD3` and `_DDPG` below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

Settings = Mapping[str, Any]


class TunedSettings(NamedTuple):
    """Settings for one algorithm in one environment.

    Attributes:
        settings: of the algorithm's config, by name.
        source: their file or paper.
        steps: environment steps that the source trains for.
        threshold: the mean return of an episode that the source reports; None if it reports none.
        deviations: how the settings differ from the source, each in a few words.
    """

    settings: Settings
    source: str
    steps: int
    threshold: float | None = None
    deviations: tuple[str, ...] = ()


TUNED: dict[tuple[str, str], TunedSettings] = {}
"""By the algorithm's name and the environment's registered name."""

_ZOO = "RL Baselines3 Zoo 2.9.0a2, hyperparams/{}.yml"
_COMMON_DEVIATIONS = {
    "PPO": ("advantages are standardised over the train batch, not over each minibatch",),
    "A2C": (),
    "DQN": ("before learning starts, actions follow epsilon",),
    "SAC": ("actor and critics are updated in one step, not one after the other (`update_order`)",),
    "TD3": ("actor and critics are updated in one step, not one after the other (`update_order`)",),
    "DDPG": ("actor and critic are updated in one step, not one after the other (`update_order`)",),
}
_CONSTANT = "the learning rate is constant"
_CLIP = "the clip range is constant"
_NO_SDE = "each step has independent noise instead of gSDE"


def _merge(*parts: Settings) -> dict[str, Any]:
    """Merges settings; later parts override earlier ones, dicts key by key."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = (
                {**merged.get(name, {}), **value} if isinstance(value, Mapping) else value
            )
    return merged


def _linear_lr(rate: float, steps: float) -> Settings:
    """Returns a learning rate that falls linearly to 0."""
    return {"lr": rate, "lr_schedule": [[0, rate], [int(steps), 0.0]]}


def _epsilon(steps: int, final: float) -> Settings:
    strategy = {"type": "EpsilonGreedy", "initial_epsilon": 1.0, "final_epsilon": final}
    return {"exploration_config": {**strategy, "epsilon_timesteps": steps}}


def _learning_starts(steps: int) -> Settings:
    return {"num_steps_sampled_before_learning_starts": steps}


def _replay(capacity: int) -> Settings:
    buffer = {"type": "MultiAgentReplayBuffer", "capacity": capacity}
    return {"replay_buffer_config": buffer}


def _add(
    algo: str,
    base: Settings,
    env: str,
    steps: float,
    threshold: float,
    *parts: Settings,
    notes: Sequence[str] = (),
) -> None:
    """Adds an entry of the Zoo for an environment; `|` in its name separates version suffixes."""
    name, _, versions = env.partition("|")
    deviations = (*_COMMON_DEVIATIONS[algo], *notes)
    source = _ZOO.format(algo.lower())
    entry = TunedSettings(_merge(base, *parts), source, int(steps), threshold, deviations)
    TUNED.update({(algo, name + version): entry for version in versions.split("|")})


_NORMALISED = {"observation_filter": "MeanStdFilter", "reward_filter": "ReturnStdFilter"}
_FREE_LOG_STD = {"model": {"free_log_std": True}}
_STOCHASTIC = {"type": "StochasticSampling"}
_CONSTANT_SCALE = {"initial_scale": 1.0, "final_scale": 1.0, "scale_timesteps": 1}
_GAUSSIAN_NOISE = {"type": "GaussianNoise", "stddev": 0.1, **_CONSTANT_SCALE}
_ORNSTEIN_UHLENBECK = {  # Ornstein-Uhlenbeck: theta 0.15, sigma 0.5 and steps of 0.01 seconds
    "type": "OrnsteinUhlenbeckNoise",
    "ou_base_scale": 0.5,
    "ou_theta": 0.0015,
    "ou_sigma": 0.05,
    **_CONSTANT_SCALE,
}
_OTHER_VERSION = "the return is that of the environment's version {}"
_MUJOCO = "|-v4|-v5"

# -- PPO --------------------------------------------------------------------------------------

_PPO: Settings = {
    "num_envs_per_worker": 1,
    "train_batch_size": 2048,
    "sgd_minibatch_size": 64,
    "num_sgd_iter": 10,
    "lr": 3e-4,
    "gamma": 0.99,
    "lambda": 0.95,
    "clip_param": 0.2,
    "kl_coeff": 0.0,
    "entropy_coeff": 0.0,
    "vf_loss_coeff": 0.5,
    "vf_clip_param": float("inf"),
    "grad_clip": 0.5,
    "optimizer": {"type": "adam", "epsilon": 1e-5},
    "model": {"fcnet_hiddens": [64, 64], "ortho_init": True},
}
_ppo = partial(_add, "PPO", _PPO)


def _batch(envs: int, steps_each: int, **changes: object) -> Settings:
    sizes = {"num_envs_per_worker": envs, "train_batch_size": envs * steps_each}
    return {**sizes, **{name.rstrip("_"): value for name, value in changes.items()}}


_add(
    "PPO",
    {},
    "CartPole-v1",
    1e5,
    500.0,
    {
        "num_envs_per_worker": 8,
        "train_batch_size": 256,
        "sgd_minibatch_size": 256,
        "num_sgd_iter": 20,
        "lr": 1e-3,
        "gamma": 0.98,
        "lambda": 0.8,
        "clip_param": 0.2,
        "kl_coeff": 0.0,
        "vf_loss_coeff": 0.5,
        "vf_clip_param": float("inf"),
        "grad_clip": 0.5,
        "model": {"fcnet_hiddens": [64, 64]},
    },
    notes=[
        _CONSTANT,
        _CLIP,
        "initial weights have normalised columns, not orthogonal ones; Adam's epsilon is 1e-7",
    ],
)
_ppo("Acrobot-v1", 1e6, -73.506, _batch(16, 256, num_sgd_iter=4, lambda_=0.94), _NORMALISED)
_ppo("MountainCar-v0", 1e6, -110.423, _batch(16, 16, num_sgd_iter=4, lambda_=0.98), _NORMALISED)
_LANDER = _batch(16, 1024, num_sgd_iter=4, gamma=0.999, lambda_=0.98, entropy_coeff=0.01)
_ppo("LunarLander-v3", 1e6, 242.119, _LANDER, notes=[_OTHER_VERSION.format("v2")])
_ppo(
    "LunarLanderContinuous-v3",
    1e6,
    270.863,
    _LANDER,
    _FREE_LOG_STD,
    notes=[_OTHER_VERSION.format("v2")],
)
_WALKER = _batch(32, 2048, gamma=0.999, clip_param=0.18)
_ppo("BipedalWalker-v3", 5e6, 287.939, _WALKER, _FREE_LOG_STD, _NORMALISED)
_PENDULUM = _batch(4, 1024, gamma=0.9, lr=1e-3)
_ppo("Pendulum-v1", 1e5, -172.225, _PENDULUM, _FREE_LOG_STD, notes=[_NO_SDE])

_DEEP = {
    "model": {
        "fcnet_hiddens": [256, 256],
        "fcnet_activation": "relu",
        "ortho_init": False,
        "log_std_init": -2.0,
    }
}
_PPO_MUJOCO: dict[str, tuple[float, Settings, Settings]] = {
    "HalfCheetah": (
        5819.099,
        _DEEP,
        {
            "gamma": 0.98,
            "lr": 2.0633e-05,
            "entropy_coeff": 0.000401762,
            "clip_param": 0.1,
            "num_sgd_iter": 20,
            "lambda": 0.92,
            "grad_clip": 0.8,
            "vf_loss_coeff": 0.58096,
        },
    ),
    "Hopper": (
        2410.435,
        _DEEP,
        {
            "sgd_minibatch_size": 32,
            "gamma": 0.999,
            "lr": 9.80828e-05,
            "entropy_coeff": 0.00229519,
            "num_sgd_iter": 5,
            "lambda": 0.99,
            "grad_clip": 0.7,
            "vf_loss_coeff": 0.835671,
        },
    ),
    "Walker2d": (
        3478.798,
        {},
        {
            "sgd_minibatch_size": 32,
            "lr": 5.05041e-05,
            "entropy_coeff": 0.000585045,
            "clip_param": 0.1,
            "num_sgd_iter": 20,
            "grad_clip": 1.0,
            "vf_loss_coeff": 0.871923,
        },
    ),
    "Ant": (1327.158, {}, {"train_batch_size": 2048}),
}
for _env, (_return, _model, _overrides) in _PPO_MUJOCO.items():
    _parts = ({"train_batch_size": 512}, _FREE_LOG_STD, _NORMALISED, _model, _overrides)
    _ppo(_env + _MUJOCO, 1e6, _return, *_parts, notes=[_OTHER_VERSION.format("v3")])

_NATURE = {"conv_filters": [[32, 8, 4], [64, 4, 2], [64, 3, 1]], "post_fcnet_hiddens": [512]}
_ATARI = {
    "clip_rewards": True,
    "env_config": {
        "stack_num": 4,
        "frame_skip": 4,
        "noop_max": 30,
        "use_fire_reset": True,
        "zero_discount_on_life_loss": True,
    },
}
_LIFE_LOSS = (
    "a lost life ends an episode only for learning: the game continues, without pressing FIRE"
)
_FIRST_LAYERS = "the first two convolutions are padded"
_IMAGES = _batch(8, 128, sgd_minibatch_size=256, num_sgd_iter=4, clip_param=0.1)
_ATARI_RATES = {**_linear_lr(2.5e-4, 1e7), "entropy_coeff": 0.01}
_SHARED_LAYERS = {"model": {**_NATURE, "vf_share_layers": True}}
for _env, _return in (("Pong", 20.989), ("Breakout", 398.033)):
    _notes = (_FIRST_LAYERS, _LIFE_LOSS, _CLIP)
    _ppo(
        f"envpool:{_env}-v5",
        1e7,
        _return,
        _IMAGES,
        _ATARI_RATES,
        _ATARI,
        _SHARED_LAYERS,
        notes=_notes,
    )

# -- A2C --------------------------------------------------------------------------------------

_A2C: Settings = {
    "num_envs_per_worker": 1,
    "rollout_fragment_length": 5,
    "train_batch_size": 5,
    "lr": 7e-4,
    "gamma": 0.99,
    "lambda": 1.0,
    "entropy_coeff": 0.0,
    "vf_loss_coeff": 1.0,  # of half the square
    "grad_clip": 0.5,
    # Keras adds epsilon under the root, to the mean square
    "optimizer": {"type": "rmsprop", "rho": 0.99, "epsilon": 1e-10},
    "model": {"fcnet_hiddens": [64, 64], "vf_share_layers": False, "ortho_init": True},
}
_a2c = partial(_add, "A2C", _A2C)
_a2c("CartPole-v1", 5e5, 500.0, _batch(8, 5))
_a2c("Acrobot-v1", 5e5, -83.353, _batch(16, 5), _NORMALISED)
_a2c("MountainCar-v0", 1e6, -111.263, _batch(16, 5), _NORMALISED)
_LONG = {**_batch(8, 5, gamma=0.995, entropy_coeff=1e-5), **_linear_lr(8.3e-4, 2e5)}
_a2c("LunarLander-v3", 2e5, 155.751, _LONG, notes=[_OTHER_VERSION.format("v2")])

# -- DQN --------------------------------------------------------------------------------------

_DQN: Settings = {
    "num_envs_per_worker": 1,
    "gamma": 0.99,
    "tau": 1.0,
    "double_q": False,
    "dueling": False,
    "hiddens": [],
    "td_error_loss_fn": "huber",
    "grad_clip": 10.0,
    "grad_clip_by": "global_norm",
    "model": {"fcnet_hiddens": [256, 256], "fcnet_activation": "relu"},
}
_dqn = partial(_add, "DQN", _DQN)


def _updates(steps: int, updates: int, rows: int, **changes: object) -> Settings:
    settings = {
        "rollout_fragment_length": steps,
        "train_batch_size": rows,
        "training_intensity": updates * rows / steps,
    }
    return {**settings, **changes}


_dqn(
    "CartPole-v1",
    5e4,
    500.0,
    _updates(256, 128, 64, lr=2.3e-3, target_network_update_freq=256),
    _learning_starts(1000),
    _replay(100_000),
    _epsilon(8000, 0.04),
    notes=["the target network is updated once per 256 steps; it effectively is there as well"],
)
_dqn(
    "MountainCar-v0",
    1.2e5,
    -100.849,
    _updates(16, 8, 128, lr=4e-3, gamma=0.98, target_network_update_freq=600),
    _learning_starts(1000),
    _replay(10_000),
    _epsilon(24_000, 0.07),
)
_FREQUENT_UPDATES = _updates(4, 4, 128, lr=6.3e-4, target_network_update_freq=250)
_PARTS = (_FREQUENT_UPDATES, _learning_starts(128), _replay(50_000), _epsilon(12_000, 0.1))
_FIRST_MINIBATCH = "learning starts with the first whole minibatch"
_dqn("Acrobot-v1", 1e5, -76.639, *_PARTS, notes=[_FIRST_MINIBATCH])
_dqn("LunarLander-v3", 1e5, 154.382, *_PARTS, notes=[_FIRST_MINIBATCH, _OTHER_VERSION.format("v2")])
for _env, _return in (("Pong", 20.602), ("Breakout", 358.327)):
    _dqn(
        f"envpool:{_env}-v5",
        1e7,
        _return,
        _updates(1, 2, 32, lr=1e-4, target_network_update_freq=1000),
        {"num_envs_per_worker": 8, "training_intensity": 8.0},
        _learning_starts(100_000),
        _replay(100_000),
        _epsilon(1_000_000, 0.01),
        _ATARI,
        {"model": _NATURE},
        notes=[
            "8 environments step together, with two updates per 8 steps: the same ratio",
            _FIRST_LAYERS,
            _LIFE_LOSS,
        ],
    )

_MINATAR = TunedSettings(
    _merge(
        _DQN,
        _updates(1, 1, 32, lr=2.5e-4, target_network_update_freq=1000),
        {
            "grad_clip": None,
            # Keras adds epsilon under the root: the square of the paper's 0.01
            "optimizer": {"type": "rmsprop", "rho": 0.95, "epsilon": 1e-4, "centered": True},
            "model": {"conv_filters": [[16, 3, 1]], "post_fcnet_hiddens": [128]},
            **_learning_starts(5000),
        },
        _replay(100_000),
        _epsilon(100_000, 0.1),
    ),
    "Young and Tian 2019 (arXiv:1903.03176), section 3 and table 1",
    5_000_000,
    deviations=_COMMON_DEVIATIONS["DQN"],
)
for _game in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"):
    TUNED["DQN", f"MinAtar/{_game}-v0"] = _MINATAR
    TUNED["DQN", f"MinAtar/{_game}-v1"] = _MINATAR._replace(
        deviations=(*_MINATAR.deviations, "only the actions that the game uses")
    )

# -- SAC, TD3 and DDPG ------------------------------------------------------------------------

_SAC: Settings = {
    "td_error_loss_fn": "mse",
    "num_envs_per_worker": 1,
    "train_batch_size": 256,
    "lr": 3e-4,
    "gamma": 0.99,
    "tau": 0.005,
    "model": {"fcnet_hiddens": [256, 256]},
    "q_model_config": {"fcnet_hiddens": [256, 256]},
}
_sac = partial(_add, "SAC", _SAC)
_WIDE_LAYERS = {
    "model": {"fcnet_hiddens": [400, 300]},
    "q_model_config": {"fcnet_hiddens": [400, 300]},
}
_MUJOCO_RETURNS = {
    "HalfCheetah": (9535.451, 9655.666),
    "Hopper": (2325.547, 3606.39),
    "Walker2d": (3863.203, 4717.823),
    "Ant": (4615.791, 5813.274),
}


def _explore_with(start: int, noise: Settings, capacity: int = 1_000_000) -> Settings:
    """Returns the settings of learning start, exploration noise and buffer capacity."""
    strategy = {"exploration_config": {**noise, "random_timesteps": start}}
    return {**_learning_starts(start), **strategy, **_replay(capacity)}


_sac("Pendulum-v1", 2e4, -156.995, _explore_with(100, _STOCHASTIC), {"lr": 1e-3})
_sac(
    "LunarLanderContinuous-v3",
    5e5,
    260.39,
    {**_explore_with(10_000, _STOCHASTIC), "tau": 0.01, **_linear_lr(7.3e-4, 5e5), **_WIDE_LAYERS},
    notes=[_OTHER_VERSION.format("v2")],
)
_sac(
    "BipedalWalker-v3",
    5e5,
    297.668,
    _explore_with(10_000, _STOCHASTIC, 300_000),
    {"lr": 7.3e-4, "gamma": 0.98, "tau": 0.02, **_WIDE_LAYERS},
    notes=[_NO_SDE, "one update after each step instead of 64 after every 64 steps"],
)
for _env, (_return, _) in _MUJOCO_RETURNS.items():
    _noise_settings = _explore_with(10_000, _STOCHASTIC)
    _sac(_env + _MUJOCO, 1e6, _return, _noise_settings, notes=[_OTHER_VERSION.format("v3")])

_TD3: Settings = {
    "num_envs_per_worker": 1,
    "train_batch_size": 256,
    "lr": 1e-3,
    "gamma": 0.99,
    "tau": 0.005,
    "actor_hiddens": [400, 300],
    "critic_hiddens": [400, 300],
}
_DDPG = {**_TD3, "l2_reg": 0.0}
for _algo, _base, _returns in (
    ("TD3", _TD3, (-151.855, 207.451, 305.99, 93.483)),
    ("DDPG", _DDPG, (-152.099, 230.217, 197.486, 93.512)),
):
    _gaussian_settings = {**_explore_with(10_000, _GAUSSIAN_NOISE, 200_000), "gamma": 0.98}
    _ou_settings = _explore_with(100, _ORNSTEIN_UHLENBECK)
    _add_entry = partial(_add, _algo, _base)
    _add_entry("Pendulum-v1", 2e4, _returns[0], _gaussian_settings)
    _add_entry(
        "LunarLanderContinuous-v3",
        3e5,
        _returns[1],
        _gaussian_settings,
        notes=[_OTHER_VERSION.format("v2")],
    )
    _add_entry("BipedalWalker-v3", 1e6, _returns[2], _gaussian_settings)
    _add_entry("MountainCarContinuous-v0", 3e5, _returns[3], _ou_settings)
_td3 = partial(_add, "TD3", _TD3)
for _env, (_, _return) in _MUJOCO_RETURNS.items():
    _noise_settings = _explore_with(10_000, _GAUSSIAN_NOISE)
    _td3(_env + _MUJOCO, 1e6, _return, _noise_settings, notes=[_OTHER_VERSION.format("v3")])

SB3_DEFAULTS: Mapping[str, Settings] = {
    "PPO": _PPO,
    "A2C": _A2C,
    "DQN": _DQN,
    "SAC": _SAC,
    "TD3": _TD3,
    "DDPG": _DDPG,
}
"""The defaults of Stable-Baselines3 that differ from those of this package, by algorithm."""
