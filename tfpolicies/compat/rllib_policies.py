"""Converts the networks and weights of RLlib's policies, algorithm by algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from tfpolicies.compat.rllib_checkpoint_config import (
    CheckpointSettings,
    convert_model_settings,
    get_dict,
)
from tfpolicies.compat.rllib_networks import (
    TEMPERATURE,
    RLlibNetwork,
    convert_network_weights,
    make_count_error,
    make_network,
    make_network_without_value,
    make_q_network,
    make_unsupported_error,
    require_default,
    to_list,
)
from tfpolicies.models.catalog.q_network import QHeads
from tfpolicies.models.critics import Critics
from tfpolicies.models.weight_mapping import match_weights


class PolicyNetworks(NamedTuple):
    """The networks of an RLlib policy.

    Attributes:
        settings: settings of this package that make the same networks.
        parts: the networks in the order of the checkpoint's arrays.
    """

    settings: dict[str, Any]
    parts: list[RLlibNetwork]


def make_policy_networks(
    settings: CheckpointSettings, model_space: spaces.Space, action_space: spaces.Space
) -> PolicyNetworks:
    """Returns the networks of a policy.

    Args:
        settings: the checkpoint's settings of the policy.
        model_space: the space of its models' inputs, with the `original_space` that it was made
            from.
        action_space: the space of actions.

    Raises:
        CheckpointError: if one of them cannot be built in this package; the message names the
            reason.
        ModelSettingError: if a setting has an invalid value.
    """
    if settings.algorithm == "SAC":
        return _make_actor_and_critics(settings, model_space, action_space)
    model = get_dict(settings.stored, "model")
    if settings.algorithm == "DQN":
        _require_no_normalization(settings.stored)
        network = make_q_network(
            QHeads.from_settings(settings.config.to_dict()), model, model_space, action_space
        )
    else:
        network = make_network(model, model_space, action_space)
    return PolicyNetworks({"model": convert_model_settings(model, network.settings)}, [network])


def _require_no_normalization(stored: Mapping[str, Any]) -> None:
    exploration = stored.get("exploration_config")
    if isinstance(exploration, Mapping) and str(exploration.get("type")) == "ParameterNoise":
        raise make_unsupported_error(
            "the LayerNormalization that ParameterNoise puts into DQN's heads"
        )


def _make_actor_and_critics(
    settings: CheckpointSettings, model_space: spaces.Space, action_space: spaces.Space
) -> PolicyNetworks:
    stored, config = settings.stored, settings.config
    if stored.get("_use_beta_distribution") is True and config["normalize_actions"]:
        raise make_unsupported_error("SAC with _use_beta_distribution")
    common = get_dict(stored, "model")
    require_default(common)
    actor_config = {**common, **get_dict(stored, "policy_model_config")}
    critic_config = {**common, **get_dict(stored, "q_model_config")}
    critic_space = (
        model_space
        if isinstance(action_space, spaces.Discrete)
        else _make_critic_space(model_space, action_space)
    )
    actor = make_network_without_value(actor_config, model_space, action_space)
    critic = make_network_without_value(critic_config, critic_space, action_space, "q_out")
    new_settings = {
        "model": convert_model_settings(actor_config, actor.settings),
        "q_model_config": convert_model_settings(critic_config, critic.settings),
    }
    return PolicyNetworks(new_settings, [actor, *[critic] * (1 + config["twin_q"]), TEMPERATURE])


def _make_critic_space(model_space: spaces.Space, action_space: spaces.Space) -> spaces.Box:
    original = getattr(model_space, "original_space", model_space)
    if not isinstance(original, spaces.Box) or len(original.shape) != 1:
        raise make_unsupported_error(f"SAC's critics for the observation space {original}")
    width = original.shape[0] + int(np.prod(action_space.shape or ()))
    return spaces.Box(-np.inf, np.inf, (width,))


def convert_policy_weights(
    stored: Any, parts: Sequence[RLlibNetwork], policy: Any, source: str
) -> dict[str, np.ndarray]:
    """Returns the weights of a checkpoint by their keys in a policy state.

    Args:
        stored: the checkpoint's weights, by name or in order.
        parts: their networks.
        policy: the new policy, with the same networks.
        source: the checkpoint, for messages.

    Raises:
        CheckpointError: if they do not belong to the networks; the message names them.
        ModelImportError: if arrays do not fit a model.
    """
    arrays_by_network = [stored] if len(parts) == 1 else _split_arrays(stored, parts)
    result: dict[str, np.ndarray] = {}
    for part, network_arrays, (model, keys) in zip(
        parts, arrays_by_network, _iterate_models(policy.program), strict=True
    ):
        result |= match_weights(
            convert_network_weights(network_arrays, part), model, keys, source
        ).arrays
    return result


def _split_arrays(stored: Any, parts: Sequence[RLlibNetwork]) -> list[list[Any]]:
    offsets = [*accumulate((len(part.array_roles) for part in parts), initial=0)]
    arrays = to_list(stored)
    if not isinstance(arrays, list | tuple) or len(arrays) != offsets[-1]:
        raise make_count_error(offsets[-1], arrays)
    return [[*arrays[begin:end]] for begin, end in pairwise(offsets)]


def _iterate_models(program: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yields the models of a Program's networks with their keys in a state, critics separately."""
    for name, network in program.functions.networks.items():
        keys = iter(slot.key for slot in program.layout.get_slots(name))
        network_model = network.model
        for model in (
            network_model.critics if isinstance(network_model, Critics) else [network_model]
        ):
            yield model, [*islice(keys, len(model.variables))]
