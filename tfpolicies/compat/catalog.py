"""`ModelCatalog`: the register of models and distributions under their old name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import keras
import tensorflow as tf

from tfpolicies.compat.adapter import TFModelFactory
from tfpolicies.compat.preprocessors import Preprocessor, get_preprocessor
from tfpolicies.compat.tf_model import FullyConnectedNetwork, TFModelV2, VisionNetwork
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.catalog import NormalizedColumns
from tfpolicies.models.distributions import ActionDistribution, Distribution
from tfpolicies.models.distributions.base import register_box_distribution
from tfpolicies.models.network import model_source
from tfpolicies.models.registry import register_model
from tfpolicies.models.settings import model_settings
from tfpolicies.models.spaces import action_leaves, is_float_box


class ModelCatalog:
    """Where models and action distributions get names."""

    @staticmethod
    def register_custom_model(model_name: str, model_class: Any) -> None:
        """Gives a model a name, which `model={"custom_model": model_name}` then takes.

        Args:
            model_name: a non-empty text.
            model_class: a subclass of `TFModelV2`; or a factory `f(observation_space, num_outputs,
                **custom_model_config)` of Keras models, such as a subclass of `keras.Model` with
                that constructor.

        Raises:
            ModelSettingError: if it is neither.
        """
        is_ported = isinstance(model_class, type) and issubclass(model_class, TFModelV2)
        register_model(model_name, TFModelFactory(model_class) if is_ported else model_class)

    @staticmethod
    def register_custom_action_dist(action_dist_name: str, action_dist_class: Any) -> None:
        """Gives a distribution a name, which `model={"custom_action_dist": name}` then takes.

        Args:
            action_dist_name: a non-empty text.
            action_dist_class: a subclass of `tfpolicies.models.distributions.Distribution`; it is
                taken for Boxes of floats.

        Raises:
            ConfigError: for another class. RLlib's distributions draw their own chance; here noise
                comes in, so that a seed gives the same actions on all runtimes and in exports.
        """
        if not (
            isinstance(action_dist_class, type) and issubclass(action_dist_class, Distribution)
        ):
            raise ConfigError(
                f"The distribution {action_dist_name!r} must be a subclass of "
                "tfpolicies.models.distributions.Distribution, which turns noise into actions: "
                "num_inputs(space), noise_size(space), sample(noise), logp(actions), entropy(), "
                f"kl(other); got {action_dist_class!r}."
            )
        register_box_distribution(action_dist_name, action_dist_class)

    @staticmethod
    def get_action_dist(
        action_space: gym.Space, config: Mapping[str, Any] | None = None, **ignored: Any
    ) -> tuple[ActionDistribution, int]:
        """Returns the distribution of an action space, and how many numbers a row of it takes.

        Args:
            action_space: the space.
            config: `model` settings, of which `custom_action_dist` is read.
            **ignored: accepted for ported code (`framework`).
        """
        dist_class = ActionDistribution.of(action_space, (config or {}).get("custom_action_dist"))
        return dist_class, dist_class.num_inputs

    @staticmethod
    def get_model_v2(
        obs_space: gym.Space,
        action_space: gym.Space,
        num_outputs: int,
        model_config: Mapping[str, Any],
        framework: str = "tf",
        name: str = "default_model",
        model_interface: type[TFModelV2] | None = None,
    ) -> keras.Model | TFModelV2:
        """Returns a new Keras model with a value, as a policy's `make_model` gives it.

        Args:
            obs_space: the environment's, or the one that a `TFModelV2` is told.
            action_space: the environment's.
            num_outputs: must be what the action distribution takes.
            model_config: `model` settings.
            framework: accepted for ported code.
            name: of a model with an interface.
            model_interface: a `TFModelV2` without `forward`: the result is an object of it that is
                a `FullyConnectedNetwork`, or a `VisionNetwork`, too. Its constructor decides about
                `num_outputs`.

        Raises:
            ModelError: if `num_outputs` is another number.
        """
        del framework
        settings = model_settings(model_config)
        if model_interface is not None:
            is_image = len(obs_space.shape or ()) > 1
            network = VisionNetwork if is_image else FullyConnectedNetwork
            joint = f"{model_interface.__name__}_as_{network.__name__}"
            kind = type(joint, (model_interface, network), {})
            width = None if num_outputs is None else int(num_outputs)  # Keras wants Python's
            return kind(obs_space, action_space, width, settings, name)
        dist_class, width = ModelCatalog.get_action_dist(action_space, settings)
        if num_outputs != width:
            raise ModelError(
                f"num_outputs must be {width}, what the distribution of {action_space} takes, got "
                f"{num_outputs!r}. For a model of another width make a FullyConnectedNetwork."
            )
        space = getattr(obs_space, "original_space", obs_space)
        return model_source(space, dist_class, settings, with_value=True).make()

    @staticmethod
    def get_preprocessor(
        env: Any, options: Mapping[str, Any] | None = None, include_multi_binary: bool = False
    ) -> Preprocessor:
        """Returns what `get_preprocessor_for_space` does.

        Args:
            env: an environment with an `observation_space`, or the space.
            options: see there.
            include_multi_binary: see there.
        """
        space = getattr(env, "observation_space", env)
        return ModelCatalog.get_preprocessor_for_space(space, options, include_multi_binary)

    @staticmethod
    def get_preprocessor_for_space(
        observation_space: gym.Space,
        options: Mapping[str, Any] | None = None,
        include_multi_binary: bool = False,
    ) -> Preprocessor:
        """Returns what makes arrays of the observations of a space; see `Preprocessor`.

        Args:
            observation_space: the environment's.
            options: `model` settings; checked, and of no effect.
            include_multi_binary: whether a MultiBinary becomes a Box of floats.

        Raises:
            SpaceError: if it is no space that policies can use.
            ModelSettingError: if an option is no model setting, or out of its range.
        """
        kind = get_preprocessor(observation_space, include_multi_binary)
        return kind(observation_space, options)

    @staticmethod
    def get_action_shape(
        action_space: gym.Space, framework: str = "tf"
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns the dtype and shape of a batch of actions as RLlib has them.

        Those of a nested space are in one row there: float32, or int32 if all are Discrete.
        Batches here keep them nested.

        Args:
            action_space: the environment's.
            framework: accepted for ported code.

        >>> ModelCatalog.get_action_shape(gym.spaces.Box(-1.0, 1.0, (2,)))
        (tf.float32, (None, 2))
        """
        del framework
        found = action_leaves(action_space)
        if isinstance(action_space, gym.spaces.Dict | gym.spaces.Tuple):
            whole = all(isinstance(leaf.space, gym.spaces.Discrete) for leaf in found)
            width = sum(math.prod(leaf.shape) for leaf in found)
            return tf.int32 if whole else tf.float32, (None, width)
        dtype: Any = action_space.dtype
        if isinstance(action_space, gym.spaces.Box):
            dtype = tf.float32 if is_float_box(action_space) else tf.int32
        return dtype, (None, *found[0].shape)

    @staticmethod
    def register_custom_preprocessor(preprocessor_name: str, preprocessor_class: Any) -> None:
        """Raises a `ConfigError`: observations are changed by a wrapper of the environment."""
        raise ConfigError(
            f"The preprocessor {preprocessor_name!r} ({preprocessor_class!r}) cannot be registered:"
            " change observations with a gymnasium.ObservationWrapper, a connector, or inside the "
            "model."
        )


def normc_initializer(std: float = 1.0) -> Callable[..., Any]:
    """Returns the Keras initializer of normal kernels whose columns have the norm `std`."""
    return NormalizedColumns(std)


def with_common_config(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a complete dict of settings: the defaults, and `extra_config` over them.

    Settings that `AlgorithmConfig` does not have are kept: `build_tf_policy` makes them a class's
    own.

    >>> config = with_common_config({"lr": 0.5, "my_weight": 2.0})
    >>> config["lr"], config["gamma"], config["my_weight"]
    (0.5, 0.99, 2.0)
    """
    known = AlgorithmConfig()
    names = [key for key in extra_config if key not in known and key != "multiagent"]
    own = {key: extra_config[key] for key in names}
    common = {key: value for key, value in extra_config.items() if key not in own}
    return {**known.update_from_dict(common).to_dict(), **own}
