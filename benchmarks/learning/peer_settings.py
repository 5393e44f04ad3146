"""What Stable-Baselines3 and SBX are told, so that they train by the settings of this package.

Plain data from plain data: it runs in every interpreter.
"""

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]
_KERAS_EPSILON = 1e-7  # of Adam where settings do not say


def arguments(algorithm: str, settings: Settings, steps: int) -> dict[str, Any]:
    """Returns the peer's arguments, in its own names.

    Classes are given by name: `activation_fn`, `optimizer_class`. `action_noise` is the standard
    deviation, and a `learning_rate` that is a list has pairs of a step and a rate.

    Args:
        algorithm: its name.
        settings: of this package's config.
        steps: of the training, which the peer gives fractions of.
    """
    results = {
        "learning_rate": settings.get("lr_schedule", settings["lr"]),
        "gamma": settings["gamma"],
        **_OF[algorithm](settings, steps),
    }
    return {**results, "policy_kwargs": _network(algorithm, settings)}


def normalised(settings: Settings) -> dict[str, bool]:
    """Returns what the peer normalises; empty if nothing."""
    observations = settings.get("observation_filter") == "MeanStdFilter"
    rewards = settings.get("reward_filter") == "ReturnStdFilter"
    return {"norm_obs": observations, "norm_reward": rewards} if observations or rewards else {}


def is_orthogonal(settings: Settings) -> bool:
    """Whether weights begin orthogonal; else their columns have one norm."""
    return bool(settings.get("model", {}).get("ortho_init"))


def hidden_units(algorithm: str, settings: Settings) -> Any:
    """Returns the units of hidden layers, by network where there are several."""
    if algorithm == "TD3":
        return {"pi": settings["actor_hiddens"], "qf": settings["critic_hiddens"]}
    hidden = settings["model"]["fcnet_hiddens"]
    if algorithm == "SAC":
        return {"pi": hidden, "qf": settings["q_model_config"]["fcnet_hiddens"]}
    return hidden


def _network(algorithm: str, settings: Settings) -> dict[str, Any]:
    usual = "tanh" if algorithm in ("PPO", "A2C") else "relu"
    optimizer = settings.get("optimizer", {})
    usual_epsilon = 1e-8 if algorithm == "DQN" else _KERAS_EPSILON
    results: dict[str, Any] = {
        "net_arch": hidden_units(algorithm, settings),
        "activation_fn": settings.get("model", {}).get("fcnet_activation", usual),
        "optimizer_kwargs": {"eps": optimizer.get("epsilon", usual_epsilon)},
    }
    if algorithm in ("PPO", "A2C"):
        results["ortho_init"] = is_orthogonal(settings)
        results["log_std_init"] = settings["model"].get("log_std_init", 0.0)
    if optimizer.get("type") == "rmsprop":  # Keras has epsilon under the root
        results["optimizer_class"] = "RMSprop"
        results["optimizer_kwargs"] = {
            "alpha": optimizer["rho"],
            "eps": optimizer["epsilon"] ** 0.5,
        }
    return results


def _ppo(settings: Settings, steps: int) -> dict[str, Any]:
    del steps
    return {
        "n_steps": settings["train_batch_size"] // settings["num_envs_per_worker"],
        "batch_size": settings["sgd_minibatch_size"],
        "n_epochs": settings["num_sgd_iter"],
        "clip_range": settings["clip_param"],
        "vf_coef": settings["vf_loss_coeff"],
        **_on_policy(settings),
    }


def _a2c(settings: Settings, steps: int) -> dict[str, Any]:
    del steps
    half_square = settings["vf_loss_coeff"]
    return {
        "n_steps": settings["rollout_fragment_length"],
        "vf_coef": half_square / 2,
        "use_rms_prop": False,  # the optimizer is among policy_kwargs
        **_on_policy(settings),
    }


def _on_policy(settings: Settings) -> dict[str, Any]:
    return {
        "gae_lambda": settings["lambda"],
        "ent_coef": settings.get("entropy_coeff", 0.0),
        "max_grad_norm": settings["grad_clip"],
    }


def _off_policy(settings: Settings, updates: int) -> dict[str, Any]:
    return {
        "batch_size": settings["train_batch_size"],
        "buffer_size": settings["replay_buffer_config"]["capacity"],
        "learning_starts": settings["num_steps_sampled_before_learning_starts"],
        "tau": settings["tau"],
        "train_freq": settings.get("rollout_fragment_length", 1),
        "gradient_steps": updates,
    }


def _dqn(settings: Settings, steps: int) -> dict[str, Any]:
    sampled = settings["rollout_fragment_length"] * settings["num_envs_per_worker"]
    updates = settings["training_intensity"] * sampled / settings["train_batch_size"]
    exploration = settings["exploration_config"]
    return {
        **_off_policy(settings, round(updates)),
        "target_update_interval": settings["target_network_update_freq"],
        "max_grad_norm": settings["grad_clip"],
        "exploration_fraction": exploration["epsilon_timesteps"] / steps,
        "exploration_initial_eps": exploration["initial_epsilon"],
        "exploration_final_eps": exploration["final_epsilon"],
    }


def _sac(settings: Settings, steps: int) -> dict[str, Any]:
    del steps
    return _off_policy(settings, 1)


def _td3(settings: Settings, steps: int) -> dict[str, Any]:
    del steps
    return {**_off_policy(settings, 1), "action_noise": settings["exploration_config"]["stddev"]}


_OF = {"PPO": _ppo, "A2C": _a2c, "DQN": _dqn, "SAC": _sac, "TD3": _td3}
