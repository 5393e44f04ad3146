"""The specification of a Program: policies with equal keys share one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf

from tfpolicies.base.extensions import EXTENSIONS
from tfpolicies.errors import ConfigError, SpaceError
from tfpolicies.exploration.transform import Transform
from tfpolicies.models.action_mapping import ActionMapping
from tfpolicies.models.architecture import compute_fingerprint
from tfpolicies.models.distributions import ActionDistribution, DiagGaussian, SquashedGaussian
from tfpolicies.models.learning_rates import resolve_schedule
from tfpolicies.models.mean_std_filters import check_filter_name, get_filtered_leaves
from tfpolicies.models.model_config import complete_model_config, without_memory
from tfpolicies.models.model_source import ModelSource
from tfpolicies.models.spaces import MASK, Leaf, has_mask, leaves, space_key
from tfpolicies.program.devices import CPU, device_scope
from tfpolicies.program.networks import NetworkPlan, check_plans
from tfpolicies.program.tf_environment import check_tf_environment
from tfpolicies.program.traced_arguments import TracedConfig
from tfpolicies.program.traced_context import TracedContext
from tfpolicies.system.gpu_memory import limit_gpus

_GRAD_CLIP = "grad_clip"
"""The hyperparameter that limits the norm of gradients."""


@dataclass(frozen=True, eq=False)
class ProgramSpec:
    """Everything that policies with the same Program have in common.

    Attributes:
        policy_class: the class whose `loss`, `stats_fn` and so on are traced.
        observation_space: as the environment has it, possibly nested.
        action_space: as the environment has it, possibly nested.
        hyperparameters: names of the real-valued settings, in the order of the state's vector.
        static: the settings that change code or shapes.
        dist_class: the action distribution.
        explorer: turns noise into actions; it skips the noise columns of a noisy network.
        source: creates the networks.
    """

    policy_class: Any
    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    hyperparameters: tuple[str, ...]
    static: Mapping[str, Any]
    dist_class: ActionDistribution
    explorer: Transform
    source: ModelSource = None  # type: ignore[assignment]  # set last

    @classmethod
    def from_policy(
        cls,
        policy_class: Any,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: Mapping[str, Any],
        explorer: Transform,
    ) -> ProgramSpec:
        """Derives the spec of a policy from its class, spaces and complete config.

        Raises:
            ConfigError: if settings contradict each other, or global modes of TensorFlow are not
                the defaults; see `check_tf_environment`.
            SpaceError: if the mask does not fit the action space.
            ModelError: if the model does not fit.
            ForkError: if this process was forked after TensorFlow had started.
        """
        check_tf_environment()
        static = get_static_settings(policy_class, config)
        limit_gpus(uses_gpu=bool(static["num_gpus"]))  # before any operation of a policy runs
        dist_class = policy_class._get_distribution(action_space, static)
        gaussians = (DiagGaussian,), (SquashedGaussian,)
        if static["model"]["free_log_std"] and dist_class.leaf_classes not in gaussians:
            raise ConfigError(
                f"model['free_log_std'] needs a Box of floats as the action space, got "
                f"{action_space}. Leave it False."
            )
        if static["model"]["log_std_init"] and not static["model"]["free_log_std"]:
            raise ConfigError(
                f"model['log_std_init']={static['model']['log_std_init']} is the initial value of "
                "a free log standard deviation. Also set model['free_log_std']=True."
            )
        _check_mask(observation_space, dist_class)
        _check_overrides(policy_class)
        spaces, names = (observation_space, action_space), tuple(policy_class.hyperparameters)
        spec = cls(policy_class, *spaces, names, static, dist_class, explorer)
        source_settings = static
        if policy_class._overrides("make_model"):
            factory = _MakeModelFactory(policy_class, spec.make_traced_self())
            model = {**static["model"], "custom_model": factory, "custom_model_config": {}}
            source_settings = {
                **static,
                "model": without_memory(model),
            }  # `make_model` adds its own
        with device_scope(CPU):  # models are only inspected here, and compared with their copies
            source = policy_class._get_model_source(observation_space, dist_class, source_settings)
        return replace(spec, source=source, explorer=explorer.with_network_noise(source.noise_size))

    def make_traced_self(self, hyperparameters: tf.Tensor | None = None) -> Any:
        """Returns the `self` of traced code of the class; its `context` may be extended.

        Args:
            hyperparameters: their values `[H]`, or H scalars; None if the code cannot read them.
        """
        owner = self.policy_class.__name__
        context = TracedContext(
            config=TracedConfig(self.hyperparameters, hyperparameters, self.static, owner=owner),
            observation_space=self.observation_space,
            action_space=self.action_space,
            dist_class=self.dist_class,
        )
        return self.policy_class._make_traced_view(context)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The key of the Program. Custom models differ by the source, not by their names."""
        model = {k: v for k, v in self.static["model"].items() if k != "custom_model"}
        return (
            self.policy_class,
            space_key(self.observation_space),
            space_key(self.action_space),
            compute_fingerprint({**self.static, "model": model}),
            self.dist_class.leaf_classes,
            self.explorer.key,
            self.source.key,
            tuple(plan.key for plan in self.networks.values()),
        )

    @cached_property
    def networks(self) -> dict[str, NetworkPlan]:
        """The plan of each network, by name; the network that acts, "model", is the first."""
        cls, spaces = self.policy_class, (self.observation_space, self.dist_class)
        plans = cls.network_plans(*spaces, self.static)
        check_plans(plans, cls.__name__, self.hyperparameters)
        return dict(plans)

    @cached_property
    def learning_rates(self) -> tuple[str, ...]:
        """The hyperparameters that are learning rates of networks, each once."""
        return tuple(dict.fromkeys(plan.lr for plan in self.networks.values()))

    def get_unset_rates(self, config: Mapping[str, Any]) -> list[str]:
        """Returns the learning rates that are None in a config, so that `lr` is used for them."""
        return [name for name in self.learning_rates if config[name] is None]

    @property
    def noise_size(self) -> int:
        """The number of noise values per row in learning."""
        return int(self.policy_class.learning_noise_size(self.dist_class, self.static))

    @property
    def update_noise_size(self) -> int:
        """The number of noise values per update."""
        return int(self.policy_class._update_noise_size(self.source, self.static))

    @property
    def has_learning_rng(self) -> bool:
        """Returns whether learning draws from another generator than acting."""
        uses_noise = self.policy_class._overrides("learning_noise_size")
        return uses_noise or self.update_noise_size > 0

    @cached_property
    def obs_leaves(self) -> tuple[Leaf, ...]:
        return leaves(self.observation_space)

    @cached_property
    def action_leaves(self) -> tuple[Leaf, ...]:
        return tuple(self.dist_class.leaves)

    @cached_property
    def indices_of_filtered_leaves(self) -> tuple[int, ...]:
        """The indices of the observation leaves that are normalised by running statistics."""
        if self.static["observation_filter"] == "NoFilter":
            return ()
        check_filter_name(self.static["observation_filter"])
        return get_filtered_leaves(self.observation_space)

    @cached_property
    def action_mapping(self) -> ActionMapping:
        return ActionMapping(
            self.action_space, self.static["normalize_actions"], self.static["clip_actions"]
        )

    @property
    def has_values(self) -> bool:
        return bool(self.policy_class.wants_value(self.static))

    @property
    def max_seq_len(self) -> int:
        """The length of training sequences, for recurrent models."""
        return int(self.static["model"]["max_seq_len"])

    def get_hyperparameter_values(self, config: Mapping[str, Any]) -> list[float]:
        """Returns the hyperparameters of a config as numbers; None becomes infinity (no limit).

        A learning rate schedule gives its first value; the rate of a network is `lr` if it is None.
        Raises a `ConfigError` for anything but a number.
        """
        values = []
        for name in self.hyperparameters:
            value = config["lr" if name in self.get_unset_rates(config) else name]
            schedule = resolve_schedule(value) if name in ("lr", *self.learning_rates) else None
            if schedule is not None:
                value = schedule.value(0)
            if not config.get(self.policy_class._enabling_settings.get(name), True):
                value = 0.0
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise ConfigError(f"{name} must be a number or None, got {value!r}.")
            values.append(float("inf") if value is None else float(value))
        return values

    def clips_gradients(self, hyperparameters: np.ndarray) -> bool:
        """Returns whether hyperparameters `[H]` limit gradients."""
        names = self.hyperparameters
        return _GRAD_CLIP in names and bool(hyperparameters[names.index(_GRAD_CLIP)] != math.inf)

    def disable_clipping(self, hyperparameters: tf.Tensor) -> list[tf.Tensor]:
        """Returns hyperparameters `[H]` as scalars, with infinity as the limit of gradients."""
        names = self.hyperparameters
        return [
            tf.constant(math.inf) if x == _GRAD_CLIP else hyperparameters[i]
            for i, x in enumerate(names)
        ]


@dataclass(frozen=True)
class _MakeModelFactory:
    """The model factory of a class that overrides `make_model`; equal for equal classes."""

    policy_class: Any
    traced_self: Any = field(compare=False)

    def __call__(self, observation_space: gym.Space[Any], num_outputs: int) -> Any:
        model, traced_self = self.traced_self.make_model(), self.traced_self
        return EXTENSIONS.wrap_model(model, traced_self.observation_space, traced_self.action_space)


def _check_overrides(policy_class: Any) -> None:
    for name in ("action_sampler_fn", "action_distribution_fn"):
        if policy_class._overrides(name) and not policy_class._overrides("make_model"):
            raise ConfigError(
                f"{policy_class.__name__} overrides `{name}` but not `make_model`. Its samples "
                "depend on the model, so it must build its own model: also override "
                "`make_model(self) -> keras.Model`."
            )


def get_static_settings(policy_class: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that change code or shapes, with all settings of the model."""
    static = {key: config[key] for key in policy_class.static_keys}
    static |= policy_class._derive_static_settings(config)
    return static | {"model": complete_model_config(config["model"])}


def _check_mask(space: gym.Space[Any], dist_class: ActionDistribution) -> None:
    if not has_mask(space):
        return
    size = sum(math.prod(x.shape) for x in leaves(space) if x.path[0] == MASK)
    if size != dist_class.mask_size:
        raise SpaceError(
            f"observation_space['action_mask'] has {size} numbers, but the action space "
            f"{dist_class.space} has {dist_class.mask_size} choices that can be masked. Give one "
            "number per choice, in the order of the action space's leaves; 0 forbids it."
        )


def program_fingerprint(
    spec: ProgramSpec, slots: Sequence[Any], saved: Collection[str] | None = None
) -> str:
    """Returns a hash that a checkpoint and a policy must share to fit.

    Args:
        spec: of the policy's Program.
        slots: the variables of its state.
        saved: the hyperparameters in the checkpoint, the only ones to be hashed; None for all.
    """
    names = [name for name in spec.hyperparameters if saved is None or name in saved]
    shapes = [(slot.key, list(slot.shape), slot.dtype) for slot in slots]
    return compute_fingerprint([spec.policy_class.__qualname__, names, shapes])
