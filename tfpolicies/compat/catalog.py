"""`ModelCatalog`: the register of models and distributions under their old name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.compat.adapter import TFModelFactory
from tfpolicies.compat.tf_model import TFModelV2
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.errors import ConfigError
from tfpolicies.models.catalog import NormalizedColumns
from tfpolicies.models.distributions import Distribution
from tfpolicies.models.distributions.action_distribution import register_box_distribution
from tfpolicies.models.registry import register_model


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
    """Returns a complete dict of settings: the defaults, and `extra_config` over them."""
    return AlgorithmConfig.from_dict(extra_config).to_dict()
