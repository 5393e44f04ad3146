"""Observations as one vector per row: convolutions for images, then fully connected layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from gymnasium import spaces

from tfpolicies.errors import ModelError
from tfpolicies.models.catalog.initializers import Kernels
from tfpolicies.models.preprocessing import encoded_shape
from tfpolicies.models.settings import pair
from tfpolicies.models.spaces import Leaf

# By (height, width); a model reduces each of them to one pixel, but 64 x 64 to 3 x 3.
CONV_FILTERS: dict[tuple[int, int], list[list[int]]] = {
    (84, 84): [[16, 8, 4], [32, 4, 2], [256, 11, 1]],
    (64, 64): [[32, 4, 2], [64, 4, 2], [128, 4, 2], [256, 4, 2]],
    (42, 42): [[16, 4, 2], [32, 4, 2], [256, 11, 1]],
    (96, 96): [[16, 8, 4], [32, 4, 2], [256, 11, 2]],
    (10, 10): [[16, 5, 2], [32, 5, 2]],
}


class Encoder:
    """Makes the layers from observations to the last hidden layer.

    Every leaf is encoded by itself: images (Boxes of rank 3, channels last) by convolutions,
    everything else (vectors, one-hot rows, matrices, also images if `conv_filters` is []) by
    flattening. The parts are joined in the order of the space. Then come `fcnet_hiddens` and
    `post_fcnet_hiddens`; behind an observation that is nothing but one image `post_fcnet_hiddens`
    alone.

    Args:
        space_leaves: the leaves of the observation space.
        names: the name of each leaf's input.
        config: the complete model config.
        kernels: gives kernel initializers.
    """

    def __init__(
        self,
        space_leaves: Sequence[Leaf],
        names: Sequence[str],
        config: Mapping[str, Any],
        kernels: Kernels,
    ) -> None:
        for key in ("fcnet_activation", "post_fcnet_activation", "conv_activation"):
            check_activation(key, config[key])
        self._leaves = list(zip(space_leaves, names, strict=True))
        self._config = config
        self._kernels = kernels
        self._filters = {
            name: filters_for(leaf, name, config)
            for leaf, name in self._leaves
            if _is_image(leaf, config)
        }

    @property
    def has_images(self) -> bool:
        """Whether any leaf goes through convolutions."""
        return bool(self._filters)

    @property
    def hidden_layers(self) -> list[tuple[int, Any]]:
        """Units and activation of each fully connected layer."""
        post = [(n, self._config["post_fcnet_activation"]) for n in _ints(self._config, "post_")]
        if len(self._leaves) == 1 and self.has_images:
            return post
        return [(n, self._config["fcnet_activation"]) for n in _ints(self._config, "")] + post

    def joined(self, rows: Mapping[str, Any], tower: str = "") -> Any:
        """Encodes each leaf `[B, ...]` by itself and joins the parts to `[B, F]`.

        Args:
            rows: the encoded observation leaves by input name.
            tower: put into the names of convolutions: "" or "value_".
        """
        parts = [self._part(leaf, name, rows[name], tower) for leaf, name in self._leaves]
        return parts[0] if len(parts) == 1 else keras.layers.Concatenate(name=f"{tower}join")(parts)

    def fully_connected(self, x: Any, layers: Sequence[tuple[int, Any]], prefix: str) -> Any:
        """Puts dense layers `<prefix>_1`, ... behind `x`."""
        for i, (units, activation) in enumerate(layers, start=1):
            x = self.dense(x, units, f"{prefix}_{i}", "hidden", activation)
        return x

    def dense(self, x: Any, units: int, name: str, role: str, activation: Any = None) -> Any:
        """Puts one dense layer behind `x`; its role decides about the fresh weights."""
        kernel = self._kernels.dense(role)
        layer = keras.layers.Dense(
            units, activation=activation, kernel_initializer=kernel, name=name
        )
        return layer(x)

    def _part(self, leaf: Leaf, name: str, x: Any, tower: str) -> Any:
        if name in self._filters:
            where = f"{name}_" if leaf.path else ""
            x = self._convolutions(x, self._filters[name], f"{where}conv_{tower}")
        return x if len(x.shape) == 2 else keras.layers.Flatten()(x)

    def _convolutions(self, x: Any, filters: Sequence[Any], prefix: str) -> Any:
        for i, (channels, kernel, stride) in enumerate(filters, start=1):
            layer = keras.layers.Conv2D(
                channels,
                pair(kernel),
                pair(stride),
                padding="valid" if i == len(filters) else "same",
                data_format="channels_last",
                activation=self._config["conv_activation"],
                kernel_initializer=self._kernels.conv(),
                name=f"{prefix}{i}",
            )
            x = layer(x)
        return x


def check_activation(key: str, activation: Any) -> None:
    """Raises a `ModelError` unless Keras knows the activation."""
    try:
        keras.activations.get(activation)
    except ValueError as error:
        raise ModelError(f"model[{key!r}]: {error}") from error


def filters_for(leaf: Leaf, name: str, config: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the convolutions `[channels, kernel, stride]` of an image.

    All but the last are padded ("same"), the last one is not ("valid").

    Raises:
        ModelError: if none are given and none are known for the size, or if the image has shrunk
            below the last kernel.
    """
    height, width, channels = encoded_shape(leaf)
    filters = config["conv_filters"]
    if filters is None:
        filters = CONV_FILTERS.get((height, width))
    if filters is None:
        hint = ""
        if height in (1, 3, 4) and channels > 4:
            hint = " The shape looks like channels first; images are [height, width, channels]."
        raise ModelError(
            f"model['conv_filters'] must be given for {name!r}, an image of shape "
            f"{(height, width, channels)}: there are defaults only for "
            f"{', '.join(f'{h}x{w}' for h, w in CONV_FILTERS)}. Try model={{'conv_filters': "
            f"{_example(height, width)}}}, or [] to flatten images as vectors.{hint}"
        )
    for _, _, stride in filters[:-1]:
        height, width = (-(-n // s) for n, s in zip((height, width), pair(stride), strict=True))
    kernel = pair(filters[-1][1])
    if kernel[0] > height or kernel[1] > width:
        raise ModelError(
            f"The last kernel {kernel} of model['conv_filters'] must fit what is left of {name!r}, "
            f"an image of shape {encoded_shape(leaf)}: {height}x{width} pixels. Make it at most "
            "that, or the strides before it smaller."
        )
    return filters


def _is_image(leaf: Leaf, config: Mapping[str, Any]) -> bool:
    is_flattened = config["conv_filters"] is not None and len(config["conv_filters"]) == 0
    return isinstance(leaf.space, spaces.Box) and len(leaf.shape) == 3 and not is_flattened


def _ints(config: Mapping[str, Any], which: str) -> list[int]:
    return [int(units) for units in config[f"{which}fcnet_hiddens"]]


def _example(height: int, width: int) -> list[list[Any]]:
    """Returns filters that reduce an image to one pixel.

    >>> _example(32, 32), _example(5, 7)
    ([[16, 4, 2], [32, 4, 2], [256, 8, 1]], [[256, [5, 7], 1]])
    """
    filters: list[list[Any]] = []
    channels = 16
    while max(height, width) > 11:
        filters.append([channels, 4, 2])
        height, width, channels = -(-height // 2), -(-width // 2), min(2 * channels, 128)
    return [*filters, [256, height if height == width else [height, width], 1]]
