"""`ModelCatalog`: RLlib's interface to the registries of models and distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import keras
import tensorflow as tf

from tfpolicies.compat.preprocessors import Preprocessor, get_preprocessor, make_preprocessed_space
from tfpolicies.compat.tf_action_dist import find_distribution_class
from tfpolicies.compat.tf_model import FullyConnectedNetwork, TFModelV2, VisionNetwork
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.catalog.encoders import is_convolved
from tfpolicies.models.catalog.initializers import NormalizedColumns
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.distributions.base import register_box_distribution
from tfpolicies.models.model_config import complete_model_config, has_memory
from tfpolicies.models.model_source import make_model_source
from tfpolicies.models.registry import register_model
from tfpolicies.models.spaces import action_leaves, is_float_box, leaves


class ModelCatalog:
    """Registers models and action distributions by name, and makes them."""

    @staticmethod
    def register_custom_model(model_name: str, model_class: Any) -> None:
        """Registers a model under a name for `model={"custom_model": model_name}`.

        Args:
            model_name: a non-empty text.
            model_class: a subclass of `TFModelV2`; or of `keras.Model` with the constructor
                `(input_space, action_space, num_outputs, *, name, **custom_model_config)`; or a
                factory `f(observation_space, num_outputs, **custom_model_config)` of Keras models.

        Raises:
            ModelSettingError: if it is none of these.
        """
        register_model(model_name, model_class)

    @staticmethod
    def register_custom_action_dist(action_dist_name: str, action_dist_class: Any) -> None:
        """Registers a distribution under a name for `model={"custom_action_dist": name}`.

        Args:
            action_dist_name: a non-empty text.
            action_dist_class: a subclass of `ActionDistribution`, used for the whole action space;
                or of `tfpolicies.models.distributions.Distribution`, used for Boxes of floats.

        Raises:
            ConfigError: for another class.
        """
        register_box_distribution(action_dist_name, action_dist_class)

    @staticmethod
    def get_action_dist(
        action_space: gym.Space,
        config: Mapping[str, Any] | None = None,
        dist_type: Any = None,
        **ignored: Any,
    ) -> tuple[Any, int]:
        """Returns the distribution class of an action space, and the number of its inputs per row.

        It is called with `(inputs, model)`: a class of `tfpolicies.compat`, or a partial of one.

        Args:
            action_space: the space.
            config: `model` settings; only `custom_action_dist` is read.
            dist_type: None for the default; "deterministic" or "gumbel_softmax".
            **ignored: accepted for ported code (`framework`).

        >>> ModelCatalog.get_action_dist(gym.spaces.Discrete(3), {})
        (<class 'tfpolicies.compat.tf_action_dist.Categorical'>, 3)
        """
        return find_distribution_class(action_space, config or {}, dist_type)

    @staticmethod
    def get_model_v2(
        obs_space: gym.Space,
        action_space: gym.Space,
        num_outputs: int,
        model_config: Mapping[str, Any],
        framework: str = "tf",
        name: str = "default_model",
        model_interface: type[TFModelV2] | None = None,
    ) -> TFModelV2 | keras.Model:
        """Returns a new model with a value, which a policy's `make_model` may return.

        The default is a `VisionNetwork` for an image, and a `FullyConnectedNetwork` for other
        observations without images. Recurrent models, models of several images, and custom ones are
        Keras models.

        Args:
            obs_space: the environment's, or the one that a `TFModelV2` gets.
            action_space: the environment's.
            num_outputs: must be the number of inputs of the action distribution.
            model_config: `model` settings.
            framework: accepted for ported code.
            name: the model's name.
            model_interface: a `TFModelV2` without `forward`: the result is an object of this class
                that is also a `FullyConnectedNetwork` or a `VisionNetwork`. Its constructor chooses
                `num_outputs`.

        Raises:
            ModelError: if `num_outputs` is another number.
        """
        del framework
        settings = complete_model_config(model_config)
        space = getattr(obs_space, "original_space", obs_space)
        images = [is_convolved(leaf, settings) for leaf in leaves(space)]
        kind = VisionNetwork if any(images) else FullyConnectedNetwork
        if model_interface is not None:
            class_name = f"{model_interface.__name__}_as_{kind.__name__}"
            width = (
                None if num_outputs is None else int(num_outputs)
            )  # Keras accepts only Python's int
            model_class = type(class_name, (model_interface, kind), {})
            return model_class(obs_space, action_space, width, settings, name)
        custom = settings["custom_action_dist"]
        dist_class = ActionDistribution.for_space(action_space, custom, settings)
        width = dist_class.num_inputs
        if num_outputs != width:
            raise ModelError(
                f"num_outputs must be {width} for the distribution of {action_space}, got "
                f"{num_outputs!r}. For a model of another width make a FullyConnectedNetwork."
            )
        is_plain = settings["custom_model"] is None and not has_memory(settings)
        if is_plain and (images == [True] or not any(images)):
            return kind(make_preprocessed_space(space), action_space, num_outputs, settings, name)
        return make_model_source(space, dist_class, settings, with_value=True).make()

    @staticmethod
    def get_preprocessor(
        env: Any, options: Mapping[str, Any] | None = None, include_multi_binary: bool = False
    ) -> Preprocessor:
        """Returns the preprocessor of an environment's or a space's observations.

        Args:
            env: an environment with an `observation_space`, or the space.
            options: see `get_preprocessor_for_space`.
            include_multi_binary: see `get_preprocessor_for_space`.
        """
        space = getattr(env, "observation_space", env)
        return ModelCatalog.get_preprocessor_for_space(space, options, include_multi_binary)

    @staticmethod
    def get_preprocessor_for_space(
        observation_space: gym.Space,
        options: Mapping[str, Any] | None = None,
        include_multi_binary: bool = False,
    ) -> Preprocessor:
        """Returns the preprocessor that converts observations of a space to arrays.

        Args:
            observation_space: the environment's.
            options: `model` settings; validated, but without effect.
            include_multi_binary: whether a MultiBinary becomes a Box of floats.

        Raises:
            SpaceError: if policies cannot use the space.
            ModelSettingError: if an option is not a model setting, or out of its range.
        """
        kind = get_preprocessor(observation_space, include_multi_binary)
        return kind(observation_space, options)

    @staticmethod
    def get_action_shape(
        action_space: gym.Space, framework: str = "tf"
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns the dtype and shape of a batch of actions in RLlib's form.

        RLlib concatenates the actions of a nested space in one row: float32, or int32 if all are
        Discrete. Batches of this package keep them nested.

        Args:
            action_space: the environment's.
            framework: accepted for ported code.

        >>> ModelCatalog.get_action_shape(gym.spaces.Box(-1.0, 1.0, (2,)))
        (tf.float32, (None, 2))
        """
        del framework
        space_leaves = action_leaves(action_space)
        if isinstance(action_space, gym.spaces.Dict | gym.spaces.Tuple):
            all_discrete = all(isinstance(leaf.space, gym.spaces.Discrete) for leaf in space_leaves)
            width = sum(math.prod(leaf.shape) for leaf in space_leaves)
            return tf.int32 if all_discrete else tf.float32, (None, width)
        dtype: Any = action_space.dtype
        if isinstance(action_space, gym.spaces.Box):
            dtype = tf.float32 if is_float_box(action_space) else tf.int32
        return dtype, (None, *space_leaves[0].shape)

    @staticmethod
    def register_custom_preprocessor(preprocessor_name: str, preprocessor_class: Any) -> None:
        """Raises a `ConfigError`: use an observation wrapper of the environment instead."""
        raise ConfigError(
            f"The preprocessor {preprocessor_name!r} ({preprocessor_class!r}) cannot be registered:"
            " change observations with a gymnasium.ObservationWrapper, a connector, or inside the "
            "model."
        )


def normc_initializer(std: float = 1.0) -> Callable[..., Any]:
    """Returns a Keras initializer of normal kernels whose columns have the norm `std`."""
    return NormalizedColumns(std)


def with_common_config(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a complete dict of settings: the defaults, updated with `extra_config`.

    Settings that `AlgorithmConfig` does not have are kept: `build_tf_policy` makes them settings of
    the class.

    >>> config = with_common_config({"lr": 0.5, "my_weight": 2.0})
    >>> config["lr"], config["gamma"], config["my_weight"]
    (0.5, 0.99, 2.0)
    """
    defaults = AlgorithmConfig()
    names = [key for key in extra_config if key not in defaults and key != "multiagent"]
    extra_settings = {key: extra_config[key] for key in names}
    common = {key: value for key, value in extra_config.items() if key not in extra_settings}
    return {**defaults.update_from_dict(common).to_dict(), **extra_settings}
