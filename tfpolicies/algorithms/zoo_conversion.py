"""Converts an entry of RL Baselines3 Zoo to settings of this package.

`base/porting_tables.md` shows the relations. Each name of an entry is converted, or named by a
warning, or an error that says what to do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tfpolicies.algorithms.tuned_hyperparameters_table import SB3_DEFAULTS
from tfpolicies.algorithms.zoo_expressions import parse_expression
from tfpolicies.errors import ConfigError, show_value, suggest_similar_names

SUPPORTED = ("PPO", "A2C", "DQN", "SAC", "TD3", "DDPG")
"""Algorithms whose files are read."""

_ON_POLICY = ("PPO", "A2C")
_CONTINUOUS = ("SAC", "TD3", "DDPG")

# Defaults of Stable-Baselines3 by their names there; `SB3_DEFAULTS` has the others.
_REPLAY_DEFAULTS = {"buffer_size": 1_000_000, "learning_starts": 100, "gradient_steps": 1}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "PPO": {"n_steps": 2048, "batch_size": 64},
    "A2C": {"n_steps": 5},
    "DQN": {
        **_REPLAY_DEFAULTS,
        "batch_size": 32,
        "train_freq": 4,
        "learning_rate": 1e-4,
        "target_update_interval": 10_000,
        "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.05,
        "policy_kwargs": {"net_arch": [64, 64]},
    },
    **{name: {**_REPLAY_DEFAULTS, "batch_size": 256, "train_freq": 1} for name in _CONTINUOUS},
}

_SAME = {"gamma": "gamma"}
_SAME_ON_POLICY = {
    **_SAME,
    "gae_lambda": "lambda",
    "ent_coef": "entropy_coeff",
    "max_grad_norm": "grad_clip",
}
_SAME_NAMES = {
    "PPO": {
        **_SAME_ON_POLICY,
        "vf_coef": "vf_loss_coeff",
        "n_epochs": "num_sgd_iter",
        "batch_size": "sgd_minibatch_size",
    },
    "A2C": _SAME_ON_POLICY,
    "DQN": {
        **_SAME,
        "max_grad_norm": "grad_clip",
        "tau": "tau",
        "target_update_interval": "target_network_update_freq",
    },
    "SAC": {**_SAME, "tau": "tau"},
    "TD3": {
        **_SAME,
        "tau": "tau",
        "policy_delay": "policy_delay",
        "target_policy_noise": "target_noise",
        "target_noise_clip": "target_noise_clip",
    },
    "DDPG": {**_SAME, "tau": "tau"},
}
"""Names whose values are the same, by algorithm."""

_WARNINGS = {
    "use_sde": "each step has independent noise instead of gSDE",
    "use_sde_at_warmup": "each step has independent noise instead of gSDE",
    "sde_sample_freq": "each step has independent noise instead of gSDE",
    "optimize_memory_usage": "replay buffers always keep a frame once",
    "normalize_advantage": "PPO always standardises advantages, and A2C never does",
    "device": "choose the device by --set num_gpus",
    "verbose": "choose the output by --set log_level",
    "tensorboard_log": "each run folder has TensorBoard events",
    "monitor_kwargs": "episodes are always monitored",
}
_HARMLESS = {  # values of the names above that change nothing
    "use_sde": (False,),
    "use_sde_at_warmup": (False,),
    "optimize_memory_usage": (False,),
}
_WRAP = (
    "Wrap the environment in a class or function of your own, name it on the command line, as in "
    "`tfpolicies train my_module:make_env`, and delete the line"
)
_ERRORS = {
    "env_wrapper": _WRAP + "; envpool:Pong-v5 and the like have Atari's wrappers already",
    "vec_env_wrapper": _WRAP,
    "frame_stack": (
        "In Python, give rollouts(agent_connectors=[FrameStack(n)]); envpool:Pong-v5 and the like "
        "take --set env_config.stack_num=n. Then delete the line"
    ),
    "callback": "Give a subclass of DefaultCallbacks by --callbacks, and delete the line",
    "replay_buffer_class": "Hindsight replay is not offered. Choose another entry",
    "replay_buffer_kwargs": "Hindsight replay is not offered. Choose another entry",
    "target_kl": (
        "No update stops early here: give kl_coeff and kl_target of a penalty by --set, and delete "
        "the line"
    ),
    "clip_range_vf": (
        "The value's change is not clipped here: vf_clip_param bounds its squared error. Delete "
        "the line"
    ),
    "n_quantiles": "Distributional critics are not offered. Choose another entry",
}
_ACTIVATIONS = {
    "Tanh": "tanh",
    "ReLU": "relu",
    "ELU": "elu",
    "LeakyReLU": "leaky_relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_NATURE = {"conv_filters": [[32, 8, 4], [64, 4, 2], [64, 3, 1]], "post_fcnet_hiddens": [512]}
_POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy")


def convert_entry(algo: str, entry: Mapping[str, Any]) -> tuple[dict[str, Any], int, list[str]]:
    """Returns the settings of an entry, the steps of training, and warnings.

    Args:
        algo: one of `SUPPORTED`.
        entry: the names and values of the file.

    Raises:
        ConfigError: for a name or value without an equivalent.

    >>> settings, steps, warnings = convert_entry("PPO", {
    ...     "n_timesteps": 1e5, "policy": "MlpPolicy", "n_envs": 8, "n_steps": 32,
    ...     "learning_rate": "lin_0.001", "clip_range": 0.2})
    >>> settings["train_batch_size"], settings["lr_schedule"], steps, warnings
    (256, [[0, 0.001], [100000, 0.0]], 100000, [])
    """
    return _Conversion(algo, entry).convert()


class _Conversion:
    """One conversion: names are taken from `entry` until it is empty."""

    def __init__(self, algo: str, entry: Mapping[str, Any]) -> None:
        self._algo = algo
        self._entry = {**_DEFAULTS[algo], **entry}
        kwargs = _DEFAULTS[algo].get("policy_kwargs", {})
        self._entry["policy_kwargs"] = {**kwargs, **_parse_dict("policy_kwargs", entry)}
        self._settings: dict[str, Any] = copy.deepcopy(dict(SB3_DEFAULTS[algo]))
        self._warnings: list[str] = []

    def convert(self) -> tuple[dict[str, Any], int, list[str]]:
        for name, next_step in _ERRORS.items():
            if self._entry.pop(name, None) is not None:
                raise ConfigError(f"{name} is not converted. {next_step}.")
        if "n_timesteps" not in self._entry:
            raise ConfigError("n_timesteps, the steps of training, is missing. Add it.")
        steps = self._take_int("n_timesteps", 0)
        self._num_envs = self._take_int("n_envs", 1)
        self._settings["num_envs_per_worker"] = self._num_envs
        self._convert_rates(steps)
        self._convert_environment()
        if self._algo in _ON_POLICY:
            self._convert_on_policy()
        else:
            self._convert_replay()
            self._convert_exploration(steps)
        self._convert_networks()
        for name, setting in _SAME_NAMES[self._algo].items():
            if name in self._entry:
                self._settings[setting] = self._take_number(name)
        self._require_empty()
        return self._settings, steps, self._warnings

    # -- values -------------------------------------------------------------------------------

    def _take_number(self, name: str, default: float | None = None) -> Any:
        value = self._entry.pop(name, default)
        try:
            number = float(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"{name} must be a number, got {show_value(value)}.")
        is_whole = isinstance(number, float) and number.is_integer()
        return int(number) if is_whole and _is_count(name) else number

    def _take_int(self, name: str, default: int) -> int:
        number = self._take_number(name, default)
        if not float(number).is_integer() or number < 1:
            raise ConfigError(f"{name} must be a whole number, 1 or more, got {number!r}.")
        return int(number)

    def _take_schedule(self, name: str) -> tuple[float, bool]:
        """Returns the value of a schedule, and whether it falls linearly to 0."""
        value = self._entry[name]
        is_linear = isinstance(value, str) and value.startswith("lin_")
        if is_linear:
            self._entry[name] = value.removeprefix("lin_")
        return float(self._take_number(name)), is_linear

    # -- parts --------------------------------------------------------------------------------

    def _convert_rates(self, steps: int) -> None:
        if "learning_rate" in self._entry:
            rate, is_linear = self._take_schedule("learning_rate")
            self._settings["lr"] = rate
            if is_linear:
                self._settings["lr_schedule"] = [[0, rate], [steps, 0.0]]
        if "clip_range" in self._entry and self._algo == "PPO":
            self._settings["clip_param"], is_linear = self._take_schedule("clip_range")
            if is_linear:
                self._warnings.append(
                    "clip_range: the clip range is constant, not linear; set it by --set clip_param"
                )

    def _convert_environment(self) -> None:
        normalize = self._entry.pop("normalize", False)
        if normalize:
            options = (
                {} if normalize is True else _parse_dict("normalize", {"normalize": normalize})
            )
            if options.pop("norm_obs", True):
                self._settings["observation_filter"] = "MeanStdFilter"
            if options.pop("norm_reward", True):
                self._settings["reward_filter"] = "ReturnStdFilter"
            for name in options:
                self._warnings.append(f"normalize: {name} is not used; filters have one form")
        env_config = _parse_dict("env_kwargs", self._entry)
        self._entry.pop("env_kwargs", None)
        if env_config:
            self._settings["env_config"] = env_config
        if "seed" in self._entry:
            self._settings["seed"] = self._take_number("seed")

    def _convert_on_policy(self) -> None:
        length = self._take_int("n_steps", 1)
        self._settings["train_batch_size"] = length * self._num_envs
        if self._algo == "A2C":
            self._settings["rollout_fragment_length"] = length
            if "vf_coef" in self._entry:  # of the square there, of half the square here
                self._settings["vf_loss_coeff"] = 2 * self._take_number("vf_coef")
            if self._entry.pop("use_rms_prop", True) is False:
                self._settings["optimizer"] = {"type": "adam", "epsilon": 1e-5}

    def _convert_replay(self) -> None:
        frequency = self._entry.pop("train_freq")
        if isinstance(frequency, list | tuple):
            if len(frequency) != 2 or frequency[1] != "step":
                raise ConfigError(
                    f"train_freq counts steps here, not episodes, got {frequency!r}. Give steps."
                )
            frequency = frequency[0]
        self._entry["train_freq"] = frequency
        length = self._take_int("train_freq", 1)
        updates = self._take_number("gradient_steps")
        rows = length * self._num_envs
        updates = rows if updates == -1 else updates
        batch_size = self._take_int("batch_size", 1)
        self._settings |= {
            "train_batch_size": batch_size,
            "rollout_fragment_length": length,
            "training_intensity": updates * batch_size / rows,
            "num_steps_sampled_before_learning_starts": max(
                batch_size, int(self._entry["learning_starts"])
            ),
            "replay_buffer_config": {
                "type": "MultiAgentReplayBuffer",
                "capacity": self._take_int("buffer_size", 1),
            },
        }

    def _convert_exploration(self, steps: int) -> None:
        start = self._take_number("learning_starts")
        if self._algo == "DQN":
            share = self._take_number("exploration_fraction")
            self._settings["exploration_config"] = {
                "type": "EpsilonGreedy",
                "initial_epsilon": self._take_number("exploration_initial_eps"),
                "final_epsilon": self._take_number("exploration_final_eps"),
                "epsilon_timesteps": max(1, round(share * steps)),
            }
            return
        if self._algo == "SAC":
            self._convert_temperature()
            noise: dict[str, Any] = {"type": "StochasticSampling"}
        else:
            noise = self._convert_noise()
        self._settings["exploration_config"] = {**noise, "random_timesteps": int(start)}

    def _convert_temperature(self) -> None:
        coefficient = self._entry.pop("ent_coef", "auto")
        if isinstance(coefficient, str) and coefficient.startswith("auto"):
            initial = coefficient.removeprefix("auto").removeprefix("_")
            if initial:
                self._entry["ent_coef"] = initial
                self._settings["initial_alpha"] = float(self._take_number("ent_coef"))
        else:
            self._entry["ent_coef"] = coefficient
            self._settings["initial_alpha"] = float(self._take_number("ent_coef"))
            self._settings["entropy_lr"] = 0.0
        if self._entry.pop("target_entropy", "auto") != "auto":
            raise ConfigError("target_entropy must be 'auto'. Give it by --set target_entropy.")

    def _convert_noise(self) -> dict[str, Any]:
        kind = str(self._entry.pop("noise_type", None) or "none").strip()
        stddev = float(self._take_number("noise_std", 0.0))
        constant = {"initial_scale": 1.0, "final_scale": 1.0, "scale_timesteps": 1}
        if kind in ("normal", "none"):
            return {"type": "GaussianNoise", "stddev": stddev, **constant}
        if kind != "ornstein-uhlenbeck":
            raise ConfigError(
                f"noise_type must be 'normal' or 'ornstein-uhlenbeck', got {kind!r:.60}."
            )
        return {  # theta 0.15 and steps of 0.01 seconds
            "type": "OrnsteinUhlenbeckNoise",
            "ou_base_scale": stddev,
            "ou_theta": 0.0015,
            "ou_sigma": 0.1 * stddev,
            **constant,
        }

    def _convert_networks(self) -> None:
        policy = self._entry.pop("policy", "MlpPolicy")
        if policy not in _POLICIES:
            raise ConfigError(
                f"policy must be one of {', '.join(_POLICIES)}, got {show_value(policy)}. For a "
                "recurrent network give --set model.use_lstm=true, and write MlpPolicy."
            )
        kwargs = self._entry.pop("policy_kwargs")
        model = self._settings.setdefault("model", {})
        if policy == "CnnPolicy":
            model |= {**_NATURE, "vf_share_layers": True} if self._algo in _ON_POLICY else _NATURE
        if "net_arch" in kwargs and policy != "CnnPolicy":
            self._set_layers(*_split_layers(kwargs["net_arch"]))
        kwargs.pop("net_arch", None)
        if "activation_fn" in kwargs:
            self._set_activation(kwargs.pop("activation_fn"))
        if self._algo in _ON_POLICY:
            model |= {name: kwargs.pop(name) for name in ("ortho_init",) if name in kwargs}
        if "log_std_init" in kwargs:
            self._set_log_std(kwargs.pop("log_std_init"))
        if kwargs.pop("n_critics", 2) not in (1, 2):
            raise ConfigError("policy_kwargs: n_critics must be 1 or 2. Choose another entry.")
        for name in kwargs:
            self._warnings.append(f"policy_kwargs: {name} is not used; give it by --set model")

    def _set_layers(self, actor: list[int], critic: list[int]) -> None:
        if self._algo in ("TD3", "DDPG"):
            self._settings |= {"actor_hiddens": actor, "critic_hiddens": critic}
        elif self._algo == "SAC":
            self._settings["model"] = {"fcnet_hiddens": actor}
            self._settings["q_model_config"] = {"fcnet_hiddens": critic}
        elif actor != critic:
            raise ConfigError(
                "policy_kwargs: net_arch gives actor and critic different layers, "
                f"{actor} and {critic}, which the catalog does not build. Give both the same."
            )
        else:
            self._settings["model"]["fcnet_hiddens"] = actor

    def _set_activation(self, name: Any) -> None:
        activation = _ACTIVATIONS.get(name)
        if activation is None:
            raise ConfigError(
                f"policy_kwargs: activation_fn must be one of {', '.join(_ACTIVATIONS)}, got "
                f"{show_value(name)}."
            )
        if self._algo in ("TD3", "DDPG"):
            names = ("actor_hidden_activation", "critic_hidden_activation")
            self._settings |= dict.fromkeys(names, activation)
            return
        self._settings["model"]["fcnet_activation"] = activation
        if self._algo == "SAC":
            self._settings["q_model_config"]["fcnet_activation"] = activation

    def _set_log_std(self, value: Any) -> None:
        if self._algo in _ON_POLICY:
            self._settings["model"] |= {"free_log_std": True, "log_std_init": float(value)}
        else:
            self._warnings.append(
                f"policy_kwargs: log_std_init is not used; {_WARNINGS['use_sde']}"
            )

    def _require_empty(self) -> None:
        for name in list(self._entry):
            if name in _WARNINGS:
                value = self._entry.pop(name)
                if value not in _HARMLESS.get(name, ()):
                    self._warnings.append(f"{name} is not used: {_WARNINGS[name]}")
        for name in self._entry:
            names = [*_SAME_NAMES[self._algo], *_DEFAULTS[self._algo], "learning_rate", "n_envs"]
            hint = suggest_similar_names(name, names)
            raise ConfigError(
                f"{self._algo} has no {name!r}.{hint} Is it the file of another algorithm? Choose "
                "that by --algo; or delete the line."
            )


def _is_count(name: str) -> bool:
    return name.startswith("n_") or name.endswith(("_size", "_steps", "_freq", "_interval"))


def _parse_dict(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a value that is a dict or an expression of one; an empty dict if there is none."""
    value = entry.get(name) or {}
    if isinstance(value, str):
        value = parse_expression(name, value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be dict(...), got {show_value(value)}.")
    return dict(value)


def _split_layers(net_arch: Any) -> tuple[list[int], list[int]]:
    """Returns the layers of actor and critic.

    >>> _split_layers([{"pi": [64], "vf": [32]}]), _split_layers([256, 256])
    (([64], [32]), ([256, 256], [256, 256]))
    """
    if isinstance(net_arch, list) and len(net_arch) == 1 and isinstance(net_arch[0], Mapping):
        net_arch = net_arch[0]
    if isinstance(net_arch, Mapping):
        critic_name = next((name for name in ("vf", "qf") if name in net_arch), "pi")
        layers = net_arch.get("pi"), net_arch.get(critic_name)
    else:
        layers = net_arch, net_arch
    if not all(isinstance(x, list) and all(_is_size(size) for size in x) for x in layers):
        raise ConfigError(
            "policy_kwargs: net_arch must be a list of sizes, such as [64, 64], or "
            f"dict(pi=[64], vf=[64]), got {show_value(net_arch)}."
        )
    return layers  # type: ignore[return-value]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
