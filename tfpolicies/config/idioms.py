"""What other libraries call things, and what to write here: for messages alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tfpolicies.models.defaults import MODEL_DEFAULTS

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ENVS = "rollouts(num_envs_per_worker=...)"
_EXPLORATION = "exploration(exploration_config={'type': 'EpsilonGreedy', ...})"
_BATCH = "training(sgd_minibatch_size=...) for PPO, training(train_batch_size=...) for others"
_UPDATES = "training(training_intensity=...), the rows trained per row sampled"

SETTINGS: Mapping[str, str] = {
    "activation_fn": "training(model={'fcnet_activation': 'relu'})",
    "batch_size": _BATCH,
    "buffer_size": "training(replay_buffer_config={'capacity': ...})",
    "clip_range": "training(clip_param=...)",
    "clip_range_vf": "training(vf_clip_param=...), which bounds the squared error of the value; "
    "float('inf') is None there",
    "device": "resources(num_gpus=1)",
    "ent_coef": "training(entropy_coeff=...)",
    "epochs": "training(num_sgd_iter=...)",
    "eval_freq": "evaluation(evaluation_interval=...), in iterations",
    "exploration_final_eps": _EXPLORATION,
    "exploration_fraction": _EXPLORATION,
    "exploration_initial_eps": _EXPLORATION,
    "gae_lambda": "training(lambda_=...)",
    "gradient_steps": _UPDATES,
    "learning_rate": "training(lr=...)",
    "learning_starts": "training(num_steps_sampled_before_learning_starts=...)",
    "max_grad_norm": "training(grad_clip=...)",
    "n_envs": _ENVS,
    "n_epochs": "training(num_sgd_iter=...)",
    "n_eval_episodes": "evaluation(evaluation_duration=...)",
    "n_steps": "training(train_batch_size=n_steps * environments); each environment then does "
    "n_steps steps, since rollout_fragment_length is 'auto'",
    "net_arch": "training(model={'fcnet_hiddens': [64, 64]})",
    "norm_obs": "rollouts(observation_filter='MeanStdFilter')",
    "norm_reward": "rollouts(reward_filter='ReturnStdFilter')",
    "num_envs": _ENVS,
    "policy_kwargs": "training(model={'fcnet_hiddens': [64, 64], ...})",
    "target_kl": "training(kl_target=...), the target of a penalty (kl_coeff) that adapts; no "
    "update stops early",
    "target_update_interval": "training(target_network_update_freq=...)",
    "tensorboard_log": "algorithm.learn(total_timesteps, run_dir='runs/mine'): the folder holds "
    "TensorBoard events",
    "total_timesteps": "an argument of `algorithm.learn(total_timesteps)`",
    "train_freq": "rollouts(rollout_fragment_length=...)",
    "use_sde": "not offered: each step has noise of its own",
    "verbose": "debugging(log_level='INFO')",
    "vf_coef": "training(vf_loss_coeff=...)",
}
"""Settings of Stable-Baselines3, Keras and others, by name."""

LEARN_ARGUMENTS: Mapping[str, str] = {
    "callback": "callbacks=[f]; f(algorithm, result) ends training by returning False",
    "epochs": "total_timesteps; epochs over each train batch are training(num_sgd_iter=...)",
    "log_interval": "not needed: each iteration is a row of progress.csv in run_dir",
    "progress_bar": "progress=True, the default",
    "reset_num_timesteps": "not needed: earlier steps always count, and config.build() begins anew",
    "tb_log_name": "run_dir='runs/mine': the folder holds TensorBoard events",
    "tensorboard_log": "run_dir='runs/mine': the folder holds TensorBoard events",
    "verbose": "progress=True, the default",
}
"""Arguments of what learns in Stable-Baselines3, by name."""

EVALUATE_ARGUMENTS: Mapping[str, str] = {
    "deterministic": "explore=False",
    "n_eval_episodes": "episodes",
    "num_episodes": "episodes",
    "render": "`record_video(algorithm, file)`",
    "return_episode_rewards": "not needed: each return is in hist_stats['episode_reward']",
}
"""Arguments of what evaluates in Stable-Baselines3 and others, by name."""

METHODS: Mapping[str, str] = {
    "compile": "Give the learning rate and the optimizer to the config: `config.training(lr=...)`.",
    "fit": "Call `algorithm.learn(total_timesteps)`.",
    "get_env": "Workers have the environments: `algorithm.workers.foreach_env(f)`.",
    "load": "Use `from_checkpoint(folder)`.",
    "load_weights": "Use `policy.import_model_from_h5(file)`.",
    "logdir": "An algorithm writes where you say: `learn(..., run_dir=...)` or `save(folder)`.",
    "num_timesteps": "Read `timesteps_total` in what `train()` returns.",
    "policy": "Use `get_policy()`.",
    "predict": "Use `get_policy().predict(obs)`.",
    "save_weights": "Use `policy.to_keras().save_weights(file)`.",
    "set_env": "Give the environment to the config: `config.environment(env)`.",
}
"""Methods of algorithms and policies there."""

KERAS_CALLBACKS: Mapping[str, str] = {
    "EarlyStopping": "Give a function f(algorithm, result) that returns False to end training.",
    "LearningRateScheduler": "Give config.training(lr=f), with f a function of environment steps.",
    "ModelCheckpoint": "learn(..., run_dir=..., keep_best=True) keeps checkpoints.",
    "ReduceLROnPlateau": "Give a function f(algorithm, result) that calls "
    "algorithm.get_policy().set_hyper('lr', ...).",
    "TensorBoard": "learn(..., run_dir=...) writes TensorBoard events into the run folder.",
}
"""Callbacks of `keras.Model.fit`, by the name of their class."""


def setting_hint(name: str) -> str:
    """Returns what to write for a setting of another library; empty if it is none.

    >>> setting_hint("learning_rate"), setting_hint("lr")
    (' Here it is training(lr=...).', '')
    """
    if name in MODEL_DEFAULTS:
        return f" It is a setting of the model: model={{{name!r}: ...}}, --set model.{name}=... ."
    return f" Here it is {SETTINGS[name]}." if name in SETTINGS else ""


def answering(
    answers: Mapping[str, str], advice: str = ""
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a method that is given keywords of another library say what to write instead.

    Args:
        answers: what to write, by keyword.
        advice: what the message ends with; `{0}` is the class of the object.
    """

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        taken = set(inspect.signature(method).parameters)

        @functools.wraps(method)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            unknown = [name for name in kwargs if name not in taken]
            if unknown:
                owner = type(args[0]).__name__
                called = owner if method.__name__ == "__init__" else f"{owner}.{method.__name__}"
                known = [name for name in unknown if name in answers]
                told = [f" Here {name!r} is {answers[name]}." for name in known]
                raise TypeError(
                    f"{called}() got unexpected keywords: {', '.join(unknown)}."
                    f"{''.join(told)}{advice.format(owner)}"
                )
            return method(*args, **kwargs)

        return checked

    return decorate


def missing_attribute(owner: Any, name: str) -> str:
    """Returns the message of an `AttributeError` about a method of another library, or any name."""
    hint = METHODS.get(name)
    return f"{type(owner).__name__!r} object has no attribute {name!r}" + (
        "" if hint is None else f". {hint}"
    )


def positional_config(algorithm: str, given: Any) -> str:
    """Returns what to write where an algorithm was called as those of Stable-Baselines3 are."""
    return (
        f"{algorithm} takes a config, got {given!r:.100}. Write {algorithm}Config()"
        ".environment(env).training(model={'fcnet_hiddens': [64, 64]}).build(); an image gets "
        "convolutions by itself."
    )


def keras_callback_hint(given: Any) -> str:
    """Returns what to write for a callback of Keras; empty if it is none.

    >>> class EarlyStopping:
    ...     __module__ = "keras.callbacks"
    >>> keras_callback_hint(EarlyStopping())
    ' Give a function f(algorithm, result) that returns False to end training.'
    """
    for kind in type(given).__mro__:
        if kind.__module__.partition(".")[0] == "keras" and kind.__name__ in KERAS_CALLBACKS:
            return f" {KERAS_CALLBACKS[kind.__name__]}"
    return ""


def optimizer_settings(given: Any) -> str | None:
    """Returns how a Keras optimizer is given here; None if it is something else."""
    if not hasattr(given, "get_config") or not hasattr(given, "apply_gradients"):
        return None
    kind, own = type(given), given.get_config()
    try:
        default = kind().get_config()
    except TypeError:  # one around another one
        return "lr=..., optimizer={'type': 'adam', ...}"
    changed = {name: x for name, x in own.items() if x != default.get(name) and name != "name"}
    rate = changed.pop("learning_rate", own["learning_rate"])
    if isinstance(rate, Mapping):
        rate = _schedule(rate["class_name"], rate["config"])
    else:
        rate = float(f"{rate:.7g}")  # which Keras keeps as a float32
    return f"lr={rate!r}, optimizer={ {'type': kind.__name__.lower(), **changed}!r}"


def described_schedule(lr: Any) -> Any:
    """Returns a learning rate as a config keeps it: a schedule of Keras's own as a dict.

    What is no such schedule is returned as it is.
    """
    kind = type(lr)
    is_schedule = any(base.__name__ == "LearningRateSchedule" for base in kind.__mro__)
    if not is_schedule or not kind.__module__.startswith("keras."):
        return lr
    return _schedule(kind.__name__, lr.get_config())


def _schedule(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: x for name, x in settings.items() if name != "name"}
    return {"type": kind, **{name: _plain(x) for name, x in kept.items()}}


def _plain(value: Any) -> Any:
    """Returns numbers as Python has them, which may come as those of NumPy or as tensors."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return np.asarray(value).tolist()
