"""Observations as one vector per row: convolutions for images, then fully connected layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from gymnasium import spaces

from tfpolicies.base.type_aliases import Setting
from tfpolicies.base.warn_once import warn_once
from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.initializers import KernelInitializers
from tfpolicies.models.catalog.layers import NamedTensors, Tensor, apply_dense
from tfpolicies.models.model_config import Settings, as_pair
from tfpolicies.models.preprocessing import get_encoded_shape
from tfpolicies.models.spaces import Leaf, Leaves

# By (height, width); the filters reduce each to one pixel, except 64 x 64 to 3 x 3.
CONV_FILTERS: dict[tuple[int, int], list[list[int]]] = {
    (84, 84): [[16, 8, 4], [32, 4, 2], [256, 11, 1]],
    (64, 64): [[32, 4, 2], [64, 4, 2], [128, 4, 2], [256, 4, 2]],
    (42, 42): [[16, 4, 2], [32, 4, 2], [256, 11, 1]],
    (96, 96): [[16, 8, 4], [32, 4, 2], [256, 11, 2]],
    (10, 10): [[16, 5, 2], [32, 5, 2]],
}

_MIN_IMAGE_SIDE = 10  # pixels; smaller inputs, such as boards, are images only with `conv_filters`
_IMAGE_CHANNELS = (1, 3, 4)  # numbers of channels by which the axis of channels is recognised


class Encoder:
    """Builds the layers from observations to the last hidden layer.

    Every leaf is encoded separately: images (`is_convolved`) by convolutions, with their channels
    moved to the end, everything else (vectors, one-hot rows, matrices, and images if `conv_filters`
    is []) by flattening. The parts are concatenated in the order of the space. `fcnet_hiddens` and
    `post_fcnet_hiddens` follow; if the observation is a single image, only `post_fcnet_hiddens`.

    Args:
        space_leaves: the leaves of the observation space.
        names: the name of each leaf's input.
        config: the complete model config.
        kernels: the kernel initializers.
        setting: the name of `config` in errors.
    """

    def __init__(
        self,
        space_leaves: Leaves,
        names: Sequence[str],
        config: Settings,
        kernels: KernelInitializers,
        setting: str = "model",
    ) -> None:
        for key in ("fcnet_activation", "post_fcnet_activation", "conv_activation"):
            check_activation(f"{setting}[{key!r}]", config[key])
        self._leaves = list(zip(space_leaves, names, strict=True))
        self._config = config
        self._kernels = kernels
        self._filters = {
            name: get_filters(leaf, name, config, setting)
            for leaf, name in self._leaves
            if is_convolved(leaf, config)
        }
        self._channels_last: dict[str, Any] = {}  # transposed images by input, for both towers
        flattens_images = config["conv_filters"] is not None and not config["conv_filters"]
        for leaf, name in self._leaves:
            if name not in self._filters and _may_be_image(leaf) and not flattens_images:
                _warn_flattened(name, leaf.shape, leaf.dtype == np.uint8)

    @property
    def has_images(self) -> bool:
        """True if any leaf is encoded by convolutions."""
        return bool(self._filters)

    @property
    def dense_layers(self) -> list[tuple[int, Any]]:
        """Units and activation of each fully connected layer."""
        post = [
            (n, self._config["post_fcnet_activation"])
            for n in _get_hidden_units(self._config, "post_")
        ]
        if len(self._leaves) == 1 and self.has_images:
            return post
        return [
            (n, self._config["fcnet_activation"]) for n in _get_hidden_units(self._config, "")
        ] + post

    @property
    def num_features(self) -> int:
        """The number of outputs of `dense_layers` per row."""
        hidden = self.dense_layers
        return (
            hidden[-1][0]
            if hidden
            else sum(self._get_encoded_size(*leaf_and_name) for leaf_and_name in self._leaves)
        )

    def _get_encoded_size(self, leaf: Leaf, name: str) -> int:
        if name not in self._filters:
            return math.prod(get_encoded_shape(leaf))
        *padded_layers, (channels, kernel, stride) = self._filters[name]
        strides = [stride_size for _, _, stride_size in padded_layers]
        sides = zip(
            _shrink_sides(_get_sides(leaf, self._config), strides),
            as_pair(kernel),
            as_pair(stride),
            strict=True,
        )
        return channels * math.prod(
            (side - size) // stride_size + 1 for side, size, stride_size in sides
        )

    def make_inputs(self) -> NamedTensors:
        return {
            name: keras.Input(get_encoded_shape(leaf), name=name, dtype="float32")
            for leaf, name in self._leaves
        }

    def make_model(
        self, inputs: NamedTensors, outputs: Tensor | Sequence[Tensor], name: str
    ) -> keras.Model:
        """Returns a model; if the space is not nested, it takes its only leaf directly."""
        is_nested = len(inputs) > 1 or bool(self._leaves[0][0].path)
        return keras.Model(inputs if is_nested else inputs["obs"], outputs, name=name)

    def encode(self, rows: Mapping[str, Any], tower: str = "") -> Any:
        """Encodes each leaf `[B, ...]` separately and concatenates the parts to `[B, F]`.

        Args:
            rows: the encoded observation leaves by input name.
            tower: a prefix in the names of convolutions: "" or "value_".
        """
        parts = [self._encode_leaf(leaf, name, rows[name], tower) for leaf, name in self._leaves]
        return parts[0] if len(parts) == 1 else keras.layers.Concatenate(name=f"{tower}join")(parts)

    def add_hidden_layers(self, x: Tensor, layers: Sequence[tuple[int, Any]], prefix: str) -> Any:
        """Applies dense layers `<prefix>_1`, ... to `x`."""
        for i, (units, activation) in enumerate(layers, start=1):
            x = apply_dense(self._kernels, x, units, f"{prefix}_{i}", "hidden", activation)
        return x

    def _encode_leaf(self, leaf: Leaf, name: str, x: Tensor, tower: str) -> Any:
        if name in self._filters:
            prefix = f"{name}_" if leaf.path else ""
            if has_channels_first(leaf, self._config):
                if name not in self._channels_last:
                    layer = keras.layers.Permute((2, 3, 1), name=f"{prefix}channels_last")
                    self._channels_last[name] = layer(x)
                x = self._channels_last[name]
            x = self._add_convolutions(x, self._filters[name], f"{prefix}conv_{tower}")
        return flatten_rows(x)

    def _add_convolutions(self, x: Tensor, filters: Sequence[Any], prefix: str) -> Any:
        for i, (channels, kernel, stride) in enumerate(filters, start=1):
            layer = keras.layers.Conv2D(
                channels,
                as_pair(kernel),
                as_pair(stride),
                padding="valid" if i == len(filters) else "same",
                data_format="channels_last",
                activation=self._config["conv_activation"],
                kernel_initializer=self._kernels.conv(),
                name=f"{prefix}{i}",
            )
            x = layer(x)
        return x


def flatten_rows(x: Tensor) -> Any:
    """Returns rows `[B, ...]` as `[B, F]`."""
    return x if len(x.shape) == 2 else keras.layers.Flatten()(x)


def check_activation(setting: str, activation: Setting) -> None:
    """Raises a `ModelError` that names the setting unless Keras knows the activation."""
    try:
        keras.activations.get(activation)
    except ValueError as error:
        raise ModelError(f"{setting}: {error}") from error


def get_filters(leaf: Leaf, name: str, config: Settings, setting: str = "model") -> Sequence[Any]:
    """Returns the convolutions `[channels, kernel, stride]` of an image.

    All but the last are padded ("same"), the last one is not ("valid").
    """
    height, width = _get_sides(leaf, config)
    filters = config["conv_filters"]
    if filters is None:
        filters = CONV_FILTERS.get((height, width))
    if filters is None:
        example = _make_example_filters(height, width)
        raise ModelError(
            f"{setting}['conv_filters'] must be set for {name!r}, an image of shape "
            f"{leaf.shape}: there are defaults only for {_format_default_sizes()}; [] flattens "
            "images."
        ).add_advice(
            f"Try {setting}={{'conv_filters': {example}}}.", {f"{setting}.conv_filters": example}
        )
    height, width = _shrink_sides((height, width), [stride for _, _, stride in filters[:-1]])
    kernel = as_pair(filters[-1][1])
    if kernel[0] > height or kernel[1] > width:
        raise ModelError(
            f"The last kernel {kernel} of {setting}['conv_filters'] must not be larger than its "
            f"input: the layers before it reduce {name!r}, an image of shape {leaf.shape}, to "
            f"{height}x{width} pixels. Make the kernel or the strides before it smaller."
        )
    return filters


def is_convolved(leaf: Leaf, config: Settings) -> bool:
    """Returns whether a leaf is encoded by convolutions.

    It must be a Box of rank 3. Then either `conv_filters` is set and not empty, or both sides
    have at least 10 pixels and it is uint8 or of a size with default filters.

    >>> from tfpolicies.models.spaces import leaves
    >>> board, screen = spaces.Box(0, 1, (6, 7, 2)), spaces.Box(0, 255, (4, 84, 84), np.uint8)
    >>> config = {"conv_filters": None, "channels_first": None}
    >>> is_convolved(leaves(board)[0], config), is_convolved(leaves(screen)[0], config)
    (False, True)
    """
    filters = config["conv_filters"]
    if not _has_rank_3(leaf) or filters is not None:
        return _has_rank_3(leaf) and len(filters) > 0
    sides = _get_sides(leaf, config)
    return min(sides) >= _MIN_IMAGE_SIDE and (leaf.dtype == np.uint8 or sides in CONV_FILTERS)


def has_channels_first(leaf: Leaf, config: Settings) -> bool:
    """Returns whether the first axis of an image is its channels: by `channels_first`, or by shape.

    By shape they are first if that axis has size 1, 3 or 4, the last one has not, and both sides
    have at least 10 pixels.
    """
    setting, (first, *sides) = config["channels_first"], leaf.shape
    if setting is not None:
        return bool(setting)
    return (
        first in _IMAGE_CHANNELS
        and sides[-1] not in _IMAGE_CHANNELS
        and min(sides) >= _MIN_IMAGE_SIDE
    )


def _has_rank_3(leaf: Leaf) -> bool:
    return isinstance(leaf.space, spaces.Box) and len(leaf.shape) == 3


def _get_sides(leaf: Leaf, config: Settings) -> tuple[int, int]:
    first, second, third = leaf.shape
    return (second, third) if has_channels_first(leaf, config) else (first, second)


def _may_be_image(leaf: Leaf) -> bool:
    """Returns whether a leaf may hold images: rank 3 or more, or a large uint8 matrix."""
    if not isinstance(leaf.space, spaces.Box) or len(leaf.shape) < 2:
        return False
    return len(leaf.shape) > 2 or (leaf.dtype == np.uint8 and min(leaf.shape) >= _MIN_IMAGE_SIDE)


def _warn_flattened(name: str, shape: tuple[int, ...], is_uint8: bool) -> None:
    if len(shape) == 3:
        warn_once(
            "%r of shape %s is flattened: without conv_filters only an image gets convolutions, "
            "with sides of at least %d pixels, and of uint8 or of a size with default filters "
            "(%s). For convolutions set model={'conv_filters': %s}.",
            name,
            shape,
            _MIN_IMAGE_SIDE,
            _format_default_sizes(),
            str(_make_example_filters(*shape[:2])),
        )
        return
    advice = (
        "Add an axis of channels, as the connector FrameStack(1) does"
        if len(shape) == 2
        else "Concatenate stacked frames along the channels, as the connector FrameStack does"
    )
    warn_once(
        "%r of shape %s is flattened%s: only a Box [height, width, channels] is an image. %s, or "
        "pass a custom model (model={'custom_model': ...}). model={'conv_filters': []} "
        "flattens it without this warning.",
        name,
        shape,
        ", and its numbers stay from 0 to 255" if is_uint8 else "",
        advice,
    )


def _shrink_sides(sides: Sequence[int], strides: Sequence[Any]) -> list[int]:
    """Returns the sides of an image after padded convolutions with these strides."""
    for stride in strides:
        sides = [-(-n // s) for n, s in zip(sides, as_pair(stride), strict=True)]
    return list(sides)


def _format_default_sizes() -> str:
    return ", ".join(f"{height}x{width}" for height, width in CONV_FILTERS)


def _get_hidden_units(config: Settings, prefix: str) -> list[int]:
    return [int(units) for units in config[f"{prefix}fcnet_hiddens"]]


def _make_example_filters(height: int, width: int) -> list[list[Any]]:
    """Returns filters that reduce an image to one pixel.

    >>> _make_example_filters(32, 32), _make_example_filters(5, 7)
    ([[16, 4, 2], [32, 4, 2], [256, 8, 1]], [[256, [5, 7], 1]])
    """
    filters: list[list[Any]] = []
    channels = 16
    while max(height, width) > 11:
        filters.append([channels, 4, 2])
        height, width, channels = -(-height // 2), -(-width // 2), min(2 * channels, 128)
    return [*filters, [256, height if height == width else [height, width], 1]]
