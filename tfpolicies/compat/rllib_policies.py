"""Converts the networks and weights of RLlib's policies, algorithm by algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from tfpolicies.compat.rllib_networks import (
    TEMPERATURE,
    Network,
    listed,
    network_of,
    only_acting,
    q_network_of,
    require_default,
    unfit,
    unsupported,
    weights_of,
)
from tfpolicies.compat.rllib_settings import Settings, dict_in, model_settings_of
from tfpolicies.models.catalog.q_network import QHeads
from tfpolicies.models.critics import Critics
from tfpolicies.models.weight_mapping import match_weights


class Networks(NamedTuple):
    """The networks of an RLlib policy.

    Attributes:
        settings: settings of this package that make the same networks.
        parts: the networks in the order of the checkpoint's arrays.
    """

    settings: dict[str, Any]
    parts: list[Network]


def networks_of(settings: Settings, seen: spaces.Space, acted: spaces.Space) -> Networks:
    """Returns the networks of a policy.

    Args:
        settings: the checkpoint's settings of the policy.
        model_space: the space of its models' inputs, with the `original_space` that it was made from.
        action_space: the space of actions.

    Raises:
        CheckpointError: if one of them cannot be built in this package; the message names the
            reason.
        ModelSettingError: if a setting has an invalid value.
    """
    if settings.algorithm == "SAC":
        return _actor_and_critics(settings, seen, acted)
    model = dict_in(settings.stored, "model")
    if settings.algorithm == "DQN":
        _require_no_normalization(settings.stored)
        network = q_network_of(QHeads.of(settings.config.to_dict()), model, seen, acted)
    else:
        network = network_of(model, seen, acted)
    return Networks({"model": model_settings_of(model, network.settings)}, [network])


def _require_no_normalization(stored: Mapping[str, Any]) -> None:
    explored = stored.get("exploration_config")
    if isinstance(explored, Mapping) and str(explored.get("type")) == "ParameterNoise":
        raise unsupported("the LayerNormalization that ParameterNoise puts into DQN's heads")


def _actor_and_critics(settings: Settings, seen: spaces.Space, acted: spaces.Space) -> Networks:
    stored, config = settings.stored, settings.config
    if stored.get("_use_beta_distribution") is True and config["normalize_actions"]:
        raise unsupported("SAC with _use_beta_distribution")
    common = dict_in(stored, "model")
    require_default(common)
    acting = {**common, **dict_in(stored, "policy_model_config")}
    valuing = {**common, **dict_in(stored, "q_model_config")}
    valued = seen if isinstance(acted, spaces.Discrete) else _joined(seen, acted)
    actor = only_acting(acting, seen, acted)
    critic = only_acting(valuing, valued, acted, "q_out")
    made = {
        "model": model_settings_of(acting, actor.settings),
        "q_model_config": model_settings_of(valuing, critic.settings),
    }
    return Networks(made, [actor, *[critic] * (1 + config["twin_q"]), TEMPERATURE])


def _joined(seen: spaces.Space, acted: spaces.Space) -> spaces.Box:
    """Returns the space of concatenated observations and actions."""
    original = getattr(seen, "original_space", seen)
    if not isinstance(original, spaces.Box) or len(original.shape) != 1:
        raise unsupported(f"SAC's critics for the observation space {original}")
    width = original.shape[0] + int(np.prod(acted.shape or ()))
    return spaces.Box(-np.inf, np.inf, (width,))


def arrays_of(
    stored: Any, parts: Sequence[Network], policy: Any, source: str
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
    shares = [stored] if len(parts) == 1 else _split(stored, parts)
    found: dict[str, np.ndarray] = {}
    for part, own, (model, keys) in zip(parts, shares, _models(policy.program), strict=True):
        found |= match_weights(weights_of(own, part), model, keys, source).arrays
    return found


def _split(stored: Any, parts: Sequence[Network]) -> list[list[Any]]:
    borders = [*accumulate((len(part.places) for part in parts), initial=0)]
    arrays = listed(stored)
    if not isinstance(arrays, list | tuple) or len(arrays) != borders[-1]:
        raise unfit(borders[-1], arrays)
    return [[*arrays[begin:end]] for begin, end in pairwise(borders)]


def _models(program: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yields the models of a Program's networks with their keys in a state, critics separately."""
    for name, network in program.functions.networks.items():
        keys = iter(slot.key for slot in program.layout.of(name))
        own = network.model
        for model in own.critics if isinstance(own, Critics) else [own]:
            yield model, [*islice(keys, len(model.variables))]
