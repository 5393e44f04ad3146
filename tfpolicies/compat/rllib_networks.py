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

from tfpolicies.compat.rllib_checkpoint_config import is_unset, require_valid_values
from tfpolicies.errors import CheckpointError
from tfpolicies.models.catalog.q_network import QHeads
from tfpolicies.models.preprocessing import is_image
from tfpolicies.models.spaces import flat_size, leaves
from tfpolicies.storage.keras_weights import KerasWeights, LayerWeights, NamedArray

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
_VALUE_PREFIXES = (
    "fc_value_",
    "conv_value_",
    "value_out",
)  # prefixes of layers that only the value has
_DEFAULT_FEATURES = 256  # units before DQN's heads if `fcnet_hiddens` is empty
_PIXEL_SCALE = 255.0  # this package divides images by it, RLlib does not
_ONE_PIXEL_CONVOLUTIONS = (
    "conv_out",
    "conv_value_out",
)  # convolutions that are dense layers in this package

LayerPath = list[str | None]  # layer names from input to output; None for one without weights


class RLlibNetwork(NamedTuple):
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
    layer_names: dict[str, str]
    scaled: frozenset[str] = frozenset()
    noisy: frozenset[str] = frozenset()
    is_named: bool = True

    @property
    def array_roles(self) -> list[tuple[str, str]]:
        """The layer and the role of each array, in order."""
        return [(layer, role) for layer in self.order for role in self.get_roles(layer)]

    def get_roles(self, layer: str) -> Sequence[str]:
        """Returns the names of a layer's arrays in this package, in order."""
        if layer in (_LOG_STD, _LOG_ALPHA):
            return (layer,)
        return _LSTM if layer == "lstm" else _NOISY if layer in self.noisy else ("kernel", "bias")


TEMPERATURE = RLlibNetwork({}, [_LOG_ALPHA], {_LOG_ALPHA: "temperature"}, is_named=False)
"""The temperature of SAC."""


def make_network(
    model: Mapping[str, Any], model_space: spaces.Space, action_space: spaces.Space
) -> RLlibNetwork:
    """Returns the network that RLlib makes from a `model` config.

    Args:
        model: the whole `model` config of a checkpoint.
        model_space: the space of the model's inputs, with the `original_space` that it was made
            from.
        action_space: the space of actions.

    Raises:
        CheckpointError: if it cannot be built in this package; the message names the reason.
    """
    require_default(model)
    if not isinstance(model_space, spaces.Box) or len(model_space.shape) not in (1, 3):
        raise make_unsupported_error(
            f"the ComplexInputNetwork for the observation space {model_space}"
        )
    _require_same_flattening(getattr(model_space, "original_space", model_space), model_space)
    inner = (
        _make_vision_network(model, model_space)
        if len(model_space.shape) == 3
        else _make_dense_network(model)
    )
    return _add_lstm(model, inner) if model.get("use_lstm") else inner


def require_default(model: Mapping[str, Any]) -> None:
    """Checks that a `model` config describes one of RLlib's own networks, with valid values.

    Raises:
        CheckpointError: if it describes another one.
        ModelSettingError: if a setting has an invalid value.
    """
    for name in ("custom_model", "custom_preprocessor", "custom_action_dist", "use_attention"):
        if not is_unset(model.get(name)):
            raise make_unsupported_error(
                f"model[{name!r}]={getattr(model[name], 'name', model[name])!r:.80}"
            )
    require_valid_values(model)


def make_unsupported_error(piece: str) -> CheckpointError:
    """Returns the error for a part that cannot be imported."""
    return CheckpointError(
        f"The checkpoint needs {piece}, which cannot be imported. Build the network in Keras, and "
        "give its weights to `policy.import_model_from_h5`."
    )


def _require_same_flattening(original: spaces.Space, model_space: spaces.Box) -> None:
    """Checks that RLlib flattened observations in the same way as this package."""
    if original is model_space:
        return
    if isinstance(original, spaces.Box):
        raise make_unsupported_error(
            f"RLlib's preprocessor of {original.shape} {original.dtype} frames"
        )
    space_leaves = leaves(original)
    for leaf in space_leaves:
        if isinstance(leaf.space, spaces.Box) and len(leaf.shape) > 1:
            raise make_unsupported_error(
                f"the ComplexInputNetwork for {leaf.name('obs')} {leaf.shape}"
            )
    if sum(map(flat_size, space_leaves)) != model_space.shape[0]:
        raise CheckpointError(
            f"The checkpoint's observations are flattened to {model_space.shape}, which does not "
            f"match {original}."
        )


# -- fully connected ------------------------------------------------------------------------------


def _make_dense_network(model: Mapping[str, Any]) -> RLlibNetwork:
    hidden, post = [*model.get("fcnet_hiddens", ())], [*model.get("post_fcnet_hiddens", ())]
    units, wrapped = hidden + post, bool(model.get("use_lstm"))
    free, shared = bool(model.get("free_log_std")), model.get("vf_share_layers") is True
    has_no_output_layer = bool(model.get("no_final_linear")) and not wrapped
    names = [f"fc_{i + 1}" for i in range(len(units))]
    actor: LayerPath = [
        *names[: len(names) - has_no_output_layer],
        *["fc_out"] * (not wrapped),
        *[None] * free,
    ]
    value: LayerPath = [
        *(name.replace("fc_", "fc_value_") for name in names if not shared),
        "value_out",
    ]
    order = [_LOG_STD] * free + _sort_like_keras(actor, value)
    imported = names if wrapped else order
    settings = {
        "fcnet_hiddens": units,
        "fcnet_activation": model.get(
            "fcnet_activation" if hidden else "post_fcnet_activation", "tanh"
        ),
        "post_fcnet_hiddens": [],
        "no_final_linear": has_no_output_layer,
    }
    return RLlibNetwork(settings, order, {name: name for name in imported})


# -- convolutions ---------------------------------------------------------------------------------


def _make_vision_network(model: Mapping[str, Any], image_space: spaces.Box) -> RLlibNetwork:
    filters = model.get("conv_filters") or _FILTERS.get(image_space.shape[:2])
    if filters is None:
        raise CheckpointError(
            "The checkpoint's config must have model['conv_filters'] for images of the shape "
            f"{image_space.shape}, but has none."
        )
    post, wrapped = [*model.get("post_fcnet_hiddens", ())], bool(model.get("use_lstm"))
    shared = model.get("vf_share_layers") is True
    if model.get("no_final_linear") and not wrapped:
        raise make_unsupported_error("a VisionNetwork with model['no_final_linear']")
    if post and not (shared or wrapped):
        raise make_unsupported_error(
            "a VisionNetwork with post_fcnet_hiddens whose value shares no layers"
        )
    convolutions = [f"conv{i + 1}" for i in range(len(filters))]
    # some dense layers of the actor are convolutions of one pixel
    has_output = not wrapped
    dense_layers = ["conv_out"] * has_output + [
        f"post_fcnet_{i + has_output}" for i in range(len(post))
    ]
    actor: LayerPath = [*convolutions, *[None] * wrapped, *dense_layers]
    value: LayerPath = [None] * (not wrapped) + ["value_out"]
    if not shared:
        value = [*(f"conv_value_{i + 1}" for i in range(len(filters))), "conv_value_out", None]
    dense = [f"fc_{i + 1}" for i in range(len(post))] + ["fc_out"] * (not wrapped)
    layer_names = {name: name.replace("conv", "conv_") for name in convolutions}
    layer_names |= dict(zip(dense_layers, dense, strict=True))
    if not wrapped:
        value_names = {"conv_value_out": "value_out"}
        layer_names |= {name: value_names.get(name, name) for name in value if name}
    settings = {
        "conv_filters": filters,
        "channels_first": False,
        "post_fcnet_hiddens": post,
        "no_final_linear": False,
    }
    scaled = {"conv1", "conv_value_1"} if is_image(image_space) else ()
    return RLlibNetwork(settings, _sort_like_keras(actor, value), layer_names, frozenset(scaled))


# -- recurrent networks ---------------------------------------------------------------------------


def _add_lstm(model: Mapping[str, Any], inner: RLlibNetwork) -> RLlibNetwork:
    lstm_layers = {"lstm": "lstm/lstm_cell", "logits": "fc_out", "values": "value_out"}
    settings = {**inner.settings, "free_log_std": False}
    return inner._replace(
        settings=settings,
        order=[*inner.order, *lstm_layers],
        layer_names={**inner.layer_names, **lstm_layers},
    )


def _sort_like_keras(actor: LayerPath, value: LayerPath) -> list[str]:
    """Returns the layers of two towers in the order of Keras 2; `actor` has the shared layers."""
    layers = [
        (len(path) - i, tower, name)
        for tower, path in enumerate((actor, value))
        for i, name in enumerate(path)
        if name
    ]
    return [name for _, _, name in sorted(layers, key=lambda each: (-each[0], each[1]))]


# -- values of actions ----------------------------------------------------------------------------


def make_q_network(
    heads: QHeads, model: Mapping[str, Any], model_space: spaces.Space, action_space: spaces.Space
) -> RLlibNetwork:
    """Returns the network of RLlib's DQN.

    Args:
        heads: the heads after its encoder.
        model: its whole `model` config.
        model_space: as in `make_network`.
        action_space: as in `make_network`.

    Raises:
        CheckpointError: if it cannot be built in this package; the message names the reason.
        ModelSettingError: if a setting has an invalid value.
    """
    if not heads.hiddens:
        if heads.noisy or heads.dueling or heads.num_atoms > 1:
            raise make_unsupported_error("DQN with hiddens=[] and dueling, noisy or num_atoms")
        return make_network_without_value(model, model_space, action_space, "q_out")
    encoder = _make_encoder(model, model_space, action_space)
    layers = [
        f"{head}_{i}"
        for head in (("advantage", "value") if heads.dueling else ("q",))
        for i in [*range(1, len(heads.hiddens) + 1), "out"]
    ]  # names in this package
    layer_names = {f"heads/{layer}": layer for layer in layers}
    return encoder._replace(
        order=[*encoder.order, *layer_names],
        layer_names={**encoder.layer_names, **layer_names},
        noisy=frozenset(layer_names if heads.noisy else ()),
    )


def make_network_without_value(
    model: Mapping[str, Any],
    model_space: spaces.Space,
    action_space: spaces.Space,
    output: str = "fc_out",
) -> RLlibNetwork:
    """Returns a network without its value output.

    Args:
        model: as in `make_network`.
        model_space: as in `make_network`.
        action_space: as in `make_network`.
        output: the name of its last layer in this package.

    Raises:
        CheckpointError: as in `make_network`.
        ModelSettingError: if a setting has an invalid value.
    """
    require_default(model)
    for name in ("use_lstm", "no_final_linear"):
        if model.get(name):
            raise make_unsupported_error(
                f"model[{name!r}] of an algorithm that replays single steps"
            )
    if model.get("free_log_std") and isinstance(action_space, spaces.Discrete):
        raise make_unsupported_error("model['free_log_std'] with Discrete actions")
    return _remove_value(make_network(model, model_space, action_space), output)


def _remove_value(network: RLlibNetwork, output: str) -> RLlibNetwork:
    layer_names = {
        name: output if new_name == "fc_out" else new_name
        for name, new_name in network.layer_names.items()
        if not name.startswith(_VALUE_PREFIXES)
    }
    return network._replace(layer_names=layer_names, is_named=False)


def _make_encoder(
    model: Mapping[str, Any], model_space: spaces.Space, action_space: spaces.Space
) -> RLlibNetwork:
    """Returns the network before the heads of DQN.

    The width of its last layer is the last entry of `fcnet_hiddens`, or 256.
    """
    base_network = make_network_without_value(
        {**model, "no_final_linear": False}, model_space, action_space
    )
    hidden, post = [*model.get("fcnet_hiddens", ())], [*model.get("post_fcnet_hiddens", ())]
    width = [_DEFAULT_FEATURES, *hidden][-1]
    if len(model_space.shape or ()) == 3:
        if post:
            raise make_unsupported_error(
                "a VisionNetwork with post_fcnet_hiddens before DQN's heads"
            )
        return _make_image_encoder(model, base_network, width)
    units = [*(hidden + post)[:-1], width]
    activated = make_network({**model, "no_final_linear": True}, model_space, action_space)
    encoder = _remove_value(activated, f"fc_{len(units)}")
    settings = {**encoder.settings, "fcnet_hiddens": units, "no_final_linear": False}
    return encoder._replace(settings=settings)


def _make_image_encoder(
    model: Mapping[str, Any], base_network: RLlibNetwork, width: int
) -> RLlibNetwork:
    """Returns the convolutions before DQN's heads.

    Args:
        model: the whole `model` config.
        base_network: the network with an output layer after the convolutions.
        width: the number of features of the last convolution instead.
    """
    filters = [*base_network.settings["conv_filters"]]
    filters[-1] = [width, *filters[-1][1:]]
    layer_names = {f"conv{i}": f"conv_{i}" for i in range(1, len(filters))}
    layer_names["conv_out"] = f"conv_{len(filters)}"
    actor: LayerPath = [*layer_names, None, None]
    value: LayerPath = ["value_out"]
    if model.get("vf_share_layers") is not True:
        actor = [*layer_names]
        value = [*(f"conv_value_{i + 1}" for i in range(len(filters))), "conv_value_out", None]
    scaled = frozenset([*layer_names][:1] if base_network.scaled else ())
    settings = {**base_network.settings, "conv_filters": filters}
    order = _sort_like_keras(actor, value)
    return base_network._replace(
        settings=settings, order=order, layer_names=layer_names, scaled=scaled
    )


# -- weights --------------------------------------------------------------------------------------


def convert_network_weights(stored: Any, network: RLlibNetwork) -> KerasWeights:
    """Returns the weights of a checkpoint by the names of the layers in this package.

    Args:
        stored: arrays by name for a graph policy, or a list for an eager one.
        network: the network of the weights.

    Raises:
        CheckpointError: if they do not belong to the network; the message names them.
    """
    goes_by_name = isinstance(stored, Mapping) and network.is_named
    arrays = _match_by_name(stored, network) if goes_by_name else _match_by_order(stored, network)
    layers = [
        LayerWeights(
            new_name,
            None,
            [NamedArray(*pair) for pair in _convert_layer(arrays[name], name, network)],
        )
        for name, new_name in network.layer_names.items()
    ]
    return KerasWeights("RLlib's weights", layers)


_Arrays = dict[str, np.ndarray]  # a layer's arrays by role


def _match_by_name(stored: Mapping[Any, Any], network: RLlibNetwork) -> dict[str, _Arrays]:
    result: dict[str, _Arrays] = {}
    for layer in network.layer_names:
        stored_layer = "lstm/lstm_cell" if layer == "lstm" else "" if layer == _LOG_STD else layer
        for role in network.get_roles(layer):
            array_name = f"{stored_layer}/{role}".lstrip("/")
            matches = [key for key in stored if f"/{key}".endswith(f"/{array_name}")]
            if len(matches) != 1:
                raise _make_mismatch_error(
                    f"{array_name!r} occurs {len(matches)} times", [*map(str, stored)]
                )
            result.setdefault(layer, {})[role] = _require_array(stored[matches[0]], array_name)
    return result


def to_list(stored: Any) -> Any:
    """Returns stored weights as a list, without their names."""
    return [*stored.values()] if isinstance(stored, Mapping) else stored


def _match_by_order(stored: Any, network: RLlibNetwork) -> dict[str, _Arrays]:
    array_roles, stored = network.array_roles, to_list(stored)
    if not isinstance(stored, list | tuple) or len(stored) != len(array_roles):
        raise make_count_error(len(array_roles), stored)
    result: dict[str, _Arrays] = {}
    for (layer, role), array in zip(array_roles, stored, strict=True):
        result.setdefault(layer, {})[role] = _require_array(array, f"{layer}/{role}")
    return result


def _require_array(value: Any, name: str) -> np.ndarray:
    array = np.array(value) if isinstance(value, float) else value
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        kind = array.dtype if isinstance(array, np.ndarray) else type(value).__name__
        raise CheckpointError(
            f"The checkpoint's weight {name!r} must be an array of numbers, got {kind}."
        )
    return array


def make_count_error(expected: int, stored: Any) -> CheckpointError:
    """Returns the error for a wrong number of weight arrays."""
    count = len(stored) if isinstance(stored, list | tuple) else 0
    shapes = [str(np.shape(array)) for array in stored] if count else []
    return _make_mismatch_error(f"{expected} arrays are expected, and there are {count}", shapes)


def _make_mismatch_error(problem: str, stored_names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint's weights are not those of the network that its config describes: "
        f"{problem}. It has {', '.join(stored_names[:40]) or 'none'}. Build a custom model in "
        "Keras, and give its weights to `policy.import_model_from_h5`."
    )


def _convert_layer(
    arrays: _Arrays, layer: str, network: RLlibNetwork
) -> list[tuple[str, np.ndarray]]:
    """Returns a layer's arrays in this package's form: a convolution of one pixel becomes dense."""
    result = dict(arrays)
    is_dense = layer in _ONE_PIXEL_CONVOLUTIONS and not network.layer_names[layer].startswith(
        "conv_"
    )
    if layer in network.scaled:
        result["kernel"] = result["kernel"] * np.float32(_PIXEL_SCALE)
    elif is_dense and result["kernel"].shape[:-2] == (1, 1):
        result["kernel"] = result["kernel"][0, 0]
    return [*result.items()]
