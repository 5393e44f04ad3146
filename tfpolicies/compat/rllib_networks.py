"""Maps RLlib's default networks to models of the catalog: layers and the order of their weights.

Graph policies store weights by name. Eager policies store a list, in the order in which Keras 2
lists the layers of a functional model: by their distance from the outputs, the largest first, and
at the same distance those of the actor first. Names that depend on other layers built in the
process (`dense_6`, `fc_1_2`) are ambiguous; if there are any, graph policies are also read by
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from tfpolicies.compat.rllib_settings import is_nothing, require_known_values
from tfpolicies.errors import CheckpointError
from tfpolicies.keras_weights import KerasWeights, LayerWeights, NamedArray
from tfpolicies.models.catalog.q_network import QHeads
from tfpolicies.models.preprocessing import is_image
from tfpolicies.models.spaces import flat_size, leaves

_FILTERS: dict[tuple[int, ...], list[list[int]]] = {
    (96, 96): [[16, 8, 4], [32, 4, 2], [256, 11, 2]],
    (84, 84): [[16, 8, 4], [32, 4, 2], [256, 11, 1]],
    (64, 64): [[32, 4, 2], [64, 4, 2], [128, 4, 2], [256, 4, 2]],
    (42, 42): [[16, 4, 2], [32, 4, 2], [256, 11, 1]],
    (10, 10): [[16, 5, 2], [32, 5, 2]],
}
"""RLlib's default convolutions, by height and width of the image."""

_LSTM = ("kernel", "recurrent_kernel", "bias")
_NOISY = ("kernel_sigma", "bias_sigma", "kernel", "bias")
_LOG_STD, _LOG_ALPHA = "log_std", "log_alpha"
_OF_VALUE = ("fc_value_", "conv_value_", "value_out")  # prefixes of layers that only the value has
_FEATURES = 256  # units before DQN's heads if `fcnet_hiddens` is empty
_WHITE = 255.0  # this package divides images by it, RLlib does not
_PIXELS = ("conv_out", "conv_value_out")  # convolutions that are dense layers in this package

Path = list[str | None]  # layer names from input to output; None for one without weights


class Network(NamedTuple):
    """One of RLlib's networks.

    Attributes:
        settings: the `model` config that builds it in this package.
        order: the names of its layers in the order of an eager policy's weights.
        layer_names: the name of each layer in this package; other layers are not imported.
        scaled: the layers that read an image of 0 to 255 in RLlib, and of 0 to 1 in this package.
        noisy: the noisy layers.
        is_named: whether the names in a graph policy identify the layers.
    """

    settings: dict[str, Any]
    order: list[str]
    ours: dict[str, str]
    scaled: frozenset[str] = frozenset()
    noisy: frozenset[str] = frozenset()
    is_named: bool = True

    @property
    def places(self) -> list[tuple[str, str]]:
        """The layer and the role of each array, in order."""
        return [(layer, role) for layer in self.order for role in self.roles(layer)]

    def roles(self, layer: str) -> Sequence[str]:
        """Returns the names of a layer's arrays in this package, in order."""
        if layer in (_LOG_STD, _LOG_ALPHA):
            return (layer,)
        return _LSTM if layer == "lstm" else _NOISY if layer in self.noisy else ("kernel", "bias")


TEMPERATURE = Network({}, [_LOG_ALPHA], {_LOG_ALPHA: "temperature"}, is_named=False)
"""The temperature of SAC."""


def network_of(model: Mapping[str, Any], seen: spaces.Space, acted: spaces.Space) -> Network:
    """Returns the network that RLlib makes from a `model` config.

    Args:
        model: the whole `model` config of a checkpoint.
        model_space: the space of the model's inputs, with the `original_space` that it was made from.
        action_space: the space of actions.

    Raises:
        CheckpointError: if it cannot be built in this package; the message names the reason.
    """
    require_default(model)
    if not isinstance(seen, spaces.Box) or len(seen.shape) not in (1, 3):
        raise unsupported(f"the ComplexInputNetwork for the observation space {seen}")
    _require_plain(getattr(seen, "original_space", seen), seen)
    inner = _vision(model, seen) if len(seen.shape) == 3 else _dense(model)
    return _behind_lstm(model, inner) if model.get("use_lstm") else inner


def require_default(model: Mapping[str, Any]) -> None:
    """Checks that a `model` config describes one of RLlib's own networks, with valid values.

    Raises:
        CheckpointError: if it describes another one.
        ModelSettingError: if a setting has an invalid value.
    """
    for name in ("custom_model", "custom_preprocessor", "custom_action_dist", "use_attention"):
        if not is_nothing(model.get(name)):
            raise unsupported(f"model[{name!r}]={getattr(model[name], 'name', model[name])!r:.80}")
    require_known_values(model)


def unsupported(piece: str) -> CheckpointError:
    """Returns the error for a part that cannot be imported."""
    return CheckpointError(
        f"The checkpoint needs {piece}, which cannot be imported. Build the network in Keras, and "
        "give its weights to `policy.import_model_from_h5`."
    )


def _require_plain(original: spaces.Space, seen: spaces.Box) -> None:
    """Checks that RLlib flattened observations in the same way as this package."""
    if original is seen:
        return
    if isinstance(original, spaces.Box):
        raise unsupported(f"RLlib's preprocessor of {original.shape} {original.dtype} frames")
    found = leaves(original)
    for leaf in found:
        if isinstance(leaf.space, spaces.Box) and len(leaf.shape) > 1:
            raise unsupported(f"the ComplexInputNetwork for {leaf.name('obs')} {leaf.shape}")
    if sum(map(flat_size, found)) != seen.shape[0]:
        raise CheckpointError(
            f"The checkpoint's observations are flattened to {seen.shape}, which does not match "
            f"{original}."
        )


# -- fully connected ------------------------------------------------------------------------------


def _dense(model: Mapping[str, Any]) -> Network:
    hidden, post = [*model.get("fcnet_hiddens", ())], [*model.get("post_fcnet_hiddens", ())]
    units, wrapped = hidden + post, bool(model.get("use_lstm"))
    free, shared = bool(model.get("free_log_std")), model.get("vf_share_layers") is True
    activated = bool(model.get("no_final_linear")) and not wrapped
    names = [f"fc_{i + 1}" for i in range(len(units))]
    actor: Path = [*names[: len(names) - activated], *["fc_out"] * (not wrapped), *[None] * free]
    value: Path = [*(name.replace("fc_", "fc_value_") for name in names if not shared), "value_out"]
    order = [_LOG_STD] * free + _keras_order(actor, value)
    used = names if wrapped else order
    settings = {
        "fcnet_hiddens": units,
        "fcnet_activation": model.get(
            "fcnet_activation" if hidden else "post_fcnet_activation", "tanh"
        ),
        "post_fcnet_hiddens": [],
        "no_final_linear": activated,
    }
    return Network(settings, order, {name: name for name in used})


# -- convolutions ---------------------------------------------------------------------------------


def _vision(model: Mapping[str, Any], seen: spaces.Box) -> Network:
    filters = model.get("conv_filters") or _FILTERS.get(seen.shape[:2])
    if filters is None:
        raise CheckpointError(
            "The checkpoint's config must have model['conv_filters'] for images of the shape "
            f"{seen.shape}, but has none."
        )
    post, wrapped = [*model.get("post_fcnet_hiddens", ())], bool(model.get("use_lstm"))
    shared = model.get("vf_share_layers") is True
    if model.get("no_final_linear") and not wrapped:
        raise unsupported("a VisionNetwork with model['no_final_linear']")
    if post and not (shared or wrapped):
        raise unsupported("a VisionNetwork with post_fcnet_hiddens whose value shares no layers")
    convolutions = [f"conv{i + 1}" for i in range(len(filters))]
    # some dense layers of the actor are convolutions of one pixel
    first = not wrapped
    behind = ["conv_out"] * first + [f"post_fcnet_{i + first}" for i in range(len(post))]
    actor: Path = [*convolutions, *[None] * wrapped, *behind]
    value: Path = [None] * (not wrapped) + ["value_out"]
    if not shared:
        value = [*(f"conv_value_{i + 1}" for i in range(len(filters))), "conv_value_out", None]
    dense = [f"fc_{i + 1}" for i in range(len(post))] + ["fc_out"] * (not wrapped)
    ours = {name: name.replace("conv", "conv_") for name in convolutions}
    ours |= dict(zip(behind, dense, strict=True))
    if not wrapped:
        of_value = {"conv_value_out": "value_out"}
        ours |= {name: of_value.get(name, name) for name in value if name}
    settings = {
        "conv_filters": filters,
        "channels_first": False,
        "post_fcnet_hiddens": post,
        "no_final_linear": False,
    }
    scaled = {"conv1", "conv_value_1"} if is_image(seen) else ()
    return Network(settings, _keras_order(actor, value), ours, frozenset(scaled))


# -- recurrent networks ---------------------------------------------------------------------------


def _behind_lstm(model: Mapping[str, Any], inner: Network) -> Network:
    own = {"lstm": "lstm/lstm_cell", "logits": "fc_out", "values": "value_out"}
    settings = {**inner.settings, "free_log_std": False}
    return inner._replace(settings=settings, order=[*inner.order, *own], ours={**inner.ours, **own})


def _keras_order(actor: Path, value: Path) -> list[str]:
    """Returns the layers of two towers in the order of Keras 2; `actor` has the shared layers."""
    placed = [
        (len(path) - i, tower, name)
        for tower, path in enumerate((actor, value))
        for i, name in enumerate(path)
        if name
    ]
    return [name for _, _, name in sorted(placed, key=lambda each: (-each[0], each[1]))]


# -- values of actions ----------------------------------------------------------------------------


def q_network_of(
    heads: QHeads, model: Mapping[str, Any], seen: spaces.Space, acted: spaces.Space
) -> Network:
    """Returns the network of RLlib's DQN.

    Args:
        heads: the heads after its encoder.
        model: its whole `model` config.
        model_space: as in `network_of`.
        action_space: as in `network_of`.

    Raises:
        CheckpointError: if it cannot be built in this package; the message names the reason.
        ModelSettingError: if a setting has an invalid value.
    """
    if not heads.hiddens:
        if heads.noisy or heads.dueling or heads.num_atoms > 1:
            raise unsupported("DQN with hiddens=[] and dueling, noisy or num_atoms")
        return only_acting(model, seen, acted, "q_out")
    encoder = _encoder(model, seen, acted)
    layers = [
        f"{head}_{i}"
        for head in (("advantage", "value") if heads.dueling else ("q",))
        for i in [*range(1, len(heads.hiddens) + 1), "out"]
    ]  # names in this package
    named = {f"heads/{layer}": layer for layer in layers}
    return encoder._replace(
        order=[*encoder.order, *named],
        ours={**encoder.ours, **named},
        noisy=frozenset(named if heads.noisy else ()),
    )


def only_acting(
    model: Mapping[str, Any], seen: spaces.Space, acted: spaces.Space, output: str = "fc_out"
) -> Network:
    """Returns a network without its value output.

    Args:
        model: as in `network_of`.
        model_space: as in `network_of`.
        action_space: as in `network_of`.
        output: the name of its last layer in this package.

    Raises:
        CheckpointError: as in `network_of`.
        ModelSettingError: if a setting has an invalid value.
    """
    require_default(model)
    for name in ("use_lstm", "no_final_linear"):
        if model.get(name):
            raise unsupported(f"model[{name!r}] of an algorithm that replays single steps")
    if model.get("free_log_std") and isinstance(acted, spaces.Discrete):
        raise unsupported("model['free_log_std'] with Discrete actions")
    return _without_value(network_of(model, seen, acted), output)


def _without_value(found: Network, output: str) -> Network:
    ours = {
        name: output if own == "fc_out" else own
        for name, own in found.ours.items()
        if not name.startswith(_OF_VALUE)
    }
    return found._replace(ours=ours, is_named=False)


def _encoder(model: Mapping[str, Any], seen: spaces.Space, acted: spaces.Space) -> Network:
    """Returns the network before the heads of DQN.

    The width of its last layer is the last entry of `fcnet_hiddens`, or 256.
    """
    plain = only_acting({**model, "no_final_linear": False}, seen, acted)
    hidden, post = [*model.get("fcnet_hiddens", ())], [*model.get("post_fcnet_hiddens", ())]
    width = [_FEATURES, *hidden][-1]
    if len(seen.shape or ()) == 3:
        if post:
            raise unsupported("a VisionNetwork with post_fcnet_hiddens before DQN's heads")
        return _features_of_images(model, plain, width)
    units = [*(hidden + post)[:-1], width]
    activated = network_of({**model, "no_final_linear": True}, seen, acted)
    found = _without_value(activated, f"fc_{len(units)}")
    settings = {**found.settings, "fcnet_hiddens": units, "no_final_linear": False}
    return found._replace(settings=settings)


def _features_of_images(model: Mapping[str, Any], plain: Network, width: int) -> Network:
    """Returns the convolutions before DQN's heads.

    Args:
        model: the whole `model` config.
        base_network: the network with an output layer after the convolutions.
        width: the number of features of the last convolution instead.
    """
    filters = [*plain.settings["conv_filters"]]
    filters[-1] = [width, *filters[-1][1:]]
    ours = {f"conv{i}": f"conv_{i}" for i in range(1, len(filters))}
    ours["conv_out"] = f"conv_{len(filters)}"
    actor: Path = [*ours, None, None]
    value: Path = ["value_out"]
    if model.get("vf_share_layers") is not True:
        actor = [*ours]
        value = [*(f"conv_value_{i + 1}" for i in range(len(filters))), "conv_value_out", None]
    scaled = frozenset([*ours][:1] if plain.scaled else ())
    settings = {**plain.settings, "conv_filters": filters}
    order = _keras_order(actor, value)
    return plain._replace(settings=settings, order=order, ours=ours, scaled=scaled)


# -- weights --------------------------------------------------------------------------------------


def weights_of(stored: Any, network: Network) -> KerasWeights:
    """Returns the weights of a checkpoint by the names of the layers in this package.

    Args:
        stored: arrays by name for a graph policy, or a list for an eager one.
        network: the network of the weights.

    Raises:
        CheckpointError: if they do not belong to the network; the message names them.
    """
    goes_by_name = isinstance(stored, Mapping) and network.is_named
    named = _by_name(stored, network) if goes_by_name else _by_order(stored, network)
    layers = [
        LayerWeights(
            ours, None, [NamedArray(*each) for each in _converted(named[name], name, network)]
        )
        for name, ours in network.ours.items()
    ]
    return KerasWeights("RLlib's weights", layers)


_Arrays = dict[str, np.ndarray]  # a layer's arrays by role


def _by_name(stored: Mapping[Any, Any], network: Network) -> dict[str, _Arrays]:
    found: dict[str, _Arrays] = {}
    for layer in network.ours:
        inner = "lstm/lstm_cell" if layer == "lstm" else "" if layer == _LOG_STD else layer
        for role in network.roles(layer):
            wanted = f"{inner}/{role}".lstrip("/")
            hits = [key for key in stored if f"/{key}".endswith(f"/{wanted}")]
            if len(hits) != 1:
                raise _not_of_network(f"{wanted!r} occurs {len(hits)} times", [*map(str, stored)])
            found.setdefault(layer, {})[role] = _array(stored[hits[0]], wanted)
    return found


def listed(stored: Any) -> Any:
    """Returns stored weights as a list, without their names."""
    return [*stored.values()] if isinstance(stored, Mapping) else stored


def _by_order(stored: Any, network: Network) -> dict[str, _Arrays]:
    places, stored = network.places, listed(stored)
    if not isinstance(stored, list | tuple) or len(stored) != len(places):
        raise unfit(len(places), stored)
    found: dict[str, _Arrays] = {}
    for (layer, role), array in zip(places, stored, strict=True):
        found.setdefault(layer, {})[role] = _array(array, f"{layer}/{role}")
    return found


def _array(value: Any, name: str) -> np.ndarray:
    found = np.array(value) if isinstance(value, float) else value
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":
        kind = found.dtype if isinstance(found, np.ndarray) else type(value).__name__
        raise CheckpointError(
            f"The checkpoint's weight {name!r} must be an array of numbers, got {kind}."
        )
    return found


def unfit(due: int, stored: Any) -> CheckpointError:
    """Returns the error for a wrong number of weight arrays."""
    count = len(stored) if isinstance(stored, list | tuple) else 0
    told = [str(np.shape(each)) for each in stored] if count else []
    return _not_of_network(f"{due} arrays are expected, and there are {count}", told)


def _not_of_network(problem: str, given: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint's weights are not those of the network that its config describes: "
        f"{problem}. It has {', '.join(given[:40]) or 'none'}. Build a custom model in "
        "Keras, and give its weights to `policy.import_model_from_h5`."
    )


def _converted(arrays: _Arrays, layer: str, network: Network) -> list[tuple[str, np.ndarray]]:
    """Returns a layer's arrays in this package's form: a convolution of one pixel becomes dense."""
    found = dict(arrays)
    is_dense = layer in _PIXELS and not network.ours[layer].startswith("conv_")
    if layer in network.scaled:
        found["kernel"] = found["kernel"] * np.float32(_WHITE)
    elif is_dense and found["kernel"].shape[:-2] == (1, 1):
        found["kernel"] = found["kernel"][0, 0]
    return [*found.items()]
