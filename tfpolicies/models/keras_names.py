"""What of Keras a file may name: the allow-list behind `keras_json`.

The lists name what holds no code, opens no file and keeps no vocabulary, and whose work follows
from shapes and settings, as `work.py` measures it. So there is no Lambda, no layer that wraps
another framework, none with a state from `adapt`, and none that repeats its work a given number of
times.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import keras

_LAYERS = (
    *("Activation", "ActivityRegularization", "Add", "AdditiveAttention", "AlphaDropout"),
    *("Attention", "Average", "AveragePooling1D", "AveragePooling2D", "AveragePooling3D"),
    *("BatchNormalization", "Bidirectional", "CategoryEncoding", "CenterCrop", "Concatenate"),
    *("Conv1D", "Conv1DTranspose", "Conv2D", "Conv2DTranspose", "Conv3D", "Conv3DTranspose"),
    *("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "Cropping1D", "Cropping2D", "Cropping3D"),
    *("Dense", "DepthwiseConv1D", "DepthwiseConv2D", "Dot", "Dropout", "ELU", "EinsumDense"),
    *("Embedding", "Flatten", "GRU", "GRUCell", "GaussianDropout", "GaussianNoise"),
    *("GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D"),
    *("GlobalMaxPooling1D", "GlobalMaxPooling2D", "GlobalMaxPooling3D", "GroupNormalization"),
    *("GroupQueryAttention", "Identity", "InputLayer", "LSTM", "LSTMCell", "LayerNormalization"),
    *("LeakyReLU", "Masking", "MaxPooling1D", "MaxPooling2D", "MaxPooling3D", "Maximum"),
    *("Minimum", "MultiHeadAttention", "Multiply", "PReLU", "Permute", "RMSNormalization", "RNN"),
    *("ReLU", "RepeatVector", "Rescaling", "Reshape", "Resizing", "SeparableConv1D"),
    *("SeparableConv2D", "SimpleRNN", "SimpleRNNCell", "Softmax", "SpatialDropout1D"),
    *("SpatialDropout2D", "SpatialDropout3D", "StackedRNNCells", "Subtract", "TimeDistributed"),
    *("UnitNormalization", "UpSampling1D", "UpSampling2D", "UpSampling3D"),
    *("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D"),
)
_INSIDE = {  # what has no public name: models, and nodes written as `x + y` or with `keras.ops`
    "keras": ("Sequential",),
    "keras.src.models.sequential": ("Sequential",),
    "keras.src.models.functional": ("Functional",),
    "keras.src.ops.core": ("Cast", "StopGradient"),
    "keras.src.ops.nn": (
        *("Elu", "Gelu", "HardSigmoid", "HardSilu", "LeakyRelu", "LogSigmoid", "LogSoftmax"),
        *("Normalize", "OneHot", "Relu", "Relu6", "Selu", "Sigmoid", "Silu", "Softmax"),
        *("Softplus", "Softsign"),
    ),
    "keras.src.ops.numpy": (
        *("Abs", "Absolute", "Add", "All", "Amax", "Amin", "Any", "Arctan", "Arctan2", "Argmax"),
        *("Argmin", "Ceil", "Clip", "Concatenate", "Conj", "Cos", "Cosh", "Divide", "Dot"),
        *("Einsum", "Equal", "Exp", "ExpandDims", "Expm1", "Flip", "Floor", "FloorDivide"),
        *("GetItem", "Greater", "GreaterEqual", "Less", "LessEqual", "Log", "Log1p", "Log2"),
        *("LogicalAnd", "LogicalNot", "LogicalOr", "Logaddexp", "Matmul", "Max", "Maximum"),
        *("Mean", "Min", "Minimum", "Mod", "Moveaxis", "Multiply", "Negative", "NotEqual"),
        *("OnesLike", "Power", "Prod", "Ravel", "Reciprocal", "Reshape", "Round", "Sign", "Sin"),
        *("Sinh", "Split", "Sqrt", "Square", "Squeeze", "Stack", "Std", "Subtract", "Sum"),
        *("Swapaxes", "Take", "Tan", "Tanh", "Transpose", "TrueDivide", "Var", "Where"),
        "ZerosLike",
    ),
}
_INITIALIZERS = (
    *("Constant", "GlorotNormal", "GlorotUniform", "HeNormal", "HeUniform", "Identity"),
    *("IdentityInitializer", "LecunNormal", "LecunUniform", "Ones", "Orthogonal"),
    *("OrthogonalInitializer", "RandomNormal", "RandomUniform", "TruncatedNormal"),
    *("VarianceScaling", "Zeros"),
)
_REGULARIZERS = ("L1", "L1L2", "L2", "OrthogonalRegularizer")
_CONSTRAINTS = ("MaxNorm", "MinMaxNorm", "NonNeg", "UnitNorm")
_ACTIVATIONS = (
    *("celu", "elu", "exponential", "gelu", "glu", "hard_shrink", "hard_sigmoid", "hard_silu"),
    *("hard_swish", "hard_tanh", "leaky_relu", "linear", "log_sigmoid", "log_softmax", "mish"),
    *("relu", "relu6", "selu", "sigmoid", "silu", "soft_shrink", "softmax", "softplus"),
    *("softsign", "sparse_plus", "sparse_sigmoid", "sparsemax", "squareplus", "swish", "tanh"),
    *("tanh_shrink", "threshold"),
)
_OPTIMIZERS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion"),
    *("lossscaleoptimizer", "muon", "nadam", "rmsprop", "sgd"),
)
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "float64"),
)


class Kind(NamedTuple):
    """What may stand in one kind of place."""

    what: str  # in a word
    base: Any  # what a class of somebody else's must be derived from
    own: Mapping[tuple[str, str], type]  # Keras's own classes, by module and name
    names: frozenset[str]  # texts that Keras makes an object of


@cache
def kinds() -> dict[str, Kind]:
    """Returns the kinds of places, by the ending of their keys; "" is for those of any kind."""
    layers = _classes({"keras.layers": _LAYERS, **_INSIDE})
    found = {
        "layer": Kind("layer", keras.Operation, layers, frozenset()),
        "activation": Kind("activation", keras.Layer, layers, frozenset(_ACTIVATIONS)),
        "initializer": _kind("initializer", keras.Initializer, _INITIALIZERS),
        "regularizer": _kind("regularizer", keras.Regularizer, _REGULARIZERS),
        "constraint": _kind("constraint", keras.constraints.Constraint, _CONSTRAINTS),
        "dtype": Kind(
            "dtype policy",
            keras.DTypePolicy,
            _classes({"keras": ("DTypePolicy",)}),
            frozenset({*DTYPES, "mixed_float16", "mixed_bfloat16"}),
        ),
    }
    every = {pair: each for kind in found.values() for pair, each in kind.own.items()}
    bases = tuple(kind.base for kind in found.values())
    return {**found, "": Kind("object", bases, every, frozenset())}


def is_optimizer(name: Any) -> bool:
    """Whether a name is that of an optimizer of Keras's own, or registered in this process."""
    if not isinstance(name, str):
        return False
    found = keras.saving.get_registered_object(name)
    if found is None:
        return name.lower() in _OPTIMIZERS
    return isinstance(found, type) and issubclass(found, keras.optimizers.Optimizer)


def _kind(what: str, base: type, names: tuple[str, ...]) -> Kind:
    texts = {text for name in names for text in (name, _snake_case(name))}
    return Kind(what, base, _classes({f"keras.{what}s": names}), frozenset(texts))


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _classes(names: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], type]:
    """Returns the classes of these names that this version of Keras has, by module and name."""
    found = {
        (module, name): getattr(importlib.import_module(module), name, None)
        for module, listed in names.items()
        for name in listed
    }
    return {pair: each for pair, each in found.items() if isinstance(each, type)}
