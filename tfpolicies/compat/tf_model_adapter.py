"""Adapter that turns a `TFModelV2` into the Keras model that a policy uses."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.compat.preprocessors import make_preprocessed_space
from tfpolicies.compat.rllib_keras_model import get_tf_model_factory, is_rllib_keras_class
from tfpolicies.compat.tf_model import InputDict, TFModelV2, find_parts
from tfpolicies.errors import ModelError
from tfpolicies.models.custom_model import get_input_ports
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.model_calls import call_with_zeros, make_zero_inputs
from tfpolicies.models.model_config import has_memory
from tfpolicies.models.ports import ACTIONS, OBS, SEQ_LENS, InputPorts, ViewInput
from tfpolicies.models.preprocessing import get_encoded_shape, is_image
from tfpolicies.models.spaces import Leaf, unflatten
from tfpolicies.models.view_requirements import get_view_inputs

_CHECKED_CLASSES: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of models that were checked to make separate layers."""


@dataclass(frozen=True)
class TFModelFactory:
    """Factory of the Keras models that run an RLlib model class; equal for equal classes.

    Attributes:
        model_class: a subclass of `TFModelV2`, or a Keras model's class, see `KerasAsTFModel`.
    """

    model_class: type

    def __call__(
        self,
        observation_space: gym.Space,
        num_outputs: int,
        *,
        action_space: gym.Space,
        model_config: Mapping[str, Any],
        **custom_model_config: Any,
    ) -> keras.Model:
        """Makes a `TFModelV2` and the Keras model around it.

        The constructor gets the `custom_model_config` as keyword arguments if it accepts them, and
        always in `model_config`. If an LSTM or attention is added after the model, `num_outputs` is
        None: the model chooses its number of features, and its `value_function` is not called.
        """
        kind, make = self.model_class, get_tf_model_factory(self.model_class)
        obs_space = make_preprocessed_space(observation_space)
        adds_memory = has_memory(model_config)  # by an LSTM or attention around it
        output_size = None if adds_memory else num_outputs
        arguments = (obs_space, action_space, output_size, dict(model_config), kind.__name__)
        extra = custom_model_config if _accepts(make, arguments, custom_model_config) else {}
        _require_no_reuse(kind)
        try:
            inner = make(*arguments, **extra)
        except Exception as error:
            raise ModelError(
                f"{kind.__name__} could not be constructed: {error}{_find_hint(error)}"
            ) from error
        if kind not in _CHECKED_CLASSES:
            _require_separate_layers(kind, inner, make(*arguments, **extra))
            _CHECKED_CLASSES.add(kind)
        return make_adapter(inner, observation_space, action_space, with_value=not adds_memory)


def make_model_factory(custom_model: Any) -> Any:
    """Returns a model factory for an RLlib model class; other arguments are returned unchanged."""
    is_tf_model = isinstance(custom_model, type) and issubclass(custom_model, TFModelV2)
    is_ported = is_tf_model or is_rllib_keras_class(custom_model)
    return TFModelFactory(custom_model) if is_ported else custom_model


def wrap_model(model: Any, observation_space: gym.Space, action_space: gym.Space) -> Any:
    """Returns the Keras model that runs a `TFModelV2`; other arguments are returned unchanged."""
    is_ported = isinstance(model, TFModelV2)
    return make_adapter(model, observation_space, action_space) if is_ported else model


def make_adapter(
    inner: TFModelV2,
    observation_space: gym.Space,
    action_space: gym.Space,
    *,
    with_value: bool = True,
) -> TFModelAdapter:
    """Returns the Keras model, built, that runs a `TFModelV2`.

    Args:
        inner: the model; from now on the result owns it.
        observation_space: the environment's.
        action_space: the environment's.
        with_value: whether values are computed, if it has a `value_function`.

    Raises:
        ModelError: if it has a form that is not supported.
    """
    model = TFModelAdapter(inner, InputPorts(observation_space), with_value=with_value)
    model.views = get_view_inputs(model, observation_space, action_space)
    _build(model, observation_space, action_space)
    return model


class TFModelAdapter(keras.Model):
    """An `WrappedModel`: calls a `TFModelV2` with named rows, and returns the core's outputs.

    Args:
        inner: the model.
        ports: the inputs; the observation's are used.
        with_value: whether values are computed, if it has a `value_function`.

    Attributes:
        state_shapes: the shapes of the recurrent state.
        view_requirements: those of the inner model.
        views: its inputs besides the observation and the recurrent state.
        trims_padding: whether sequences are trimmed to the longest length in the batch before the
            model reads them, because its mask is that long.
    """

    def __init__(self, inner: TFModelV2, ports: InputPorts, *, with_value: bool) -> None:
        super().__init__(name=inner.class_name)
        self.inner = inner
        self.state_shapes = _get_state_shapes(inner)
        self.view_requirements = dict(inner.view_requirements)
        self.views: tuple[ViewInput, ...] = ()
        self.trims_padding = False
        self._ports = ports
        self._with_value = with_value

    def bind_policy(self, policy: Any) -> None:
        """Sets the policy whose weights are used by methods that are looked up from now on."""
        object.__setattr__(self, "_owner", weakref.ref(policy))

    def __getattr__(self, name: str) -> Any:
        """Returns the inner model's attribute of that name, such as `base_model`."""
        inner = None if name.startswith("_") else vars(self).get("inner")
        if inner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attribute = getattr(inner, name)
        owner = vars(self).get("_owner")
        policy = None if owner is None else owner()
        return (
            attribute
            if policy is None or not inspect.ismethod(attribute)
            else _PolicyMethod(policy, name)
        )

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the inner model with a policy's arguments, or with those of RLlib's users.

        The latter are `model(input_dict, state, seq_lens)`, or a dict with only `obs`, and return
        `(outputs, state)`.
        """
        if args or (isinstance(inputs, Mapping) and [*inputs] == [OBS]):
            return self.inner(inputs, *args)
        return super().__call__(inputs, **kwargs)

    def build(self, input_shape: Any = None) -> None:
        """Does nothing: calling the inner model builds its layers; unused layers stay unbuilt."""
        del input_shape
        self.built = True

    def collect_parts(self) -> None:
        """Registers the layers and variables of the inner model as those of this model."""
        parts = find_parts(self.inner)
        for part in parts:
            if isinstance(part, tf.Variable):
                raise ModelError(
                    f"{self.name} holds the tf.Variable {part.name!r}, to which a policy's "
                    "weights cannot be assigned. Make it a keras.Variable(initial_value, name=...)."
                )
        self.parts = parts

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns outputs, with values if the model has them; a dict if it is recurrent."""
        columns = dict(inputs) if isinstance(inputs, Mapping) else {self._get_only_input(): inputs}
        if not self.state_shapes:
            outputs, _ = self.inner(self._make_input_dict(columns, training))
            return (outputs, self._compute_values([-1, 1])) if self._has_value else outputs
        state = [columns.pop(f"state_in_{i}") for i in range(len(self.state_shapes))]
        seq_lens = columns.pop(SEQ_LENS)
        full_shape = leading_shape = tf.shape(next(iter(columns.values())))[:2]
        if self.trims_padding:
            leading_shape = tf.stack([full_shape[0], tf.reduce_max(seq_lens)])
            columns = {name: x[:, : leading_shape[1]] for name, x in columns.items()}
        rows = {name: tf.reshape(x, [-1, *x.shape[2:]]) for name, x in columns.items()}
        input_dict = self._make_input_dict(rows, training)
        input_dict |= {f"state_in_{i}": x for i, x in enumerate(state)} | {SEQ_LENS: seq_lens}
        outputs, next_state = self.inner(input_dict, state, seq_lens)
        width = tf.constant([outputs.shape[-1]])
        result = {"action_dist_inputs": tf.reshape(outputs, tf.concat([leading_shape, width], 0))}
        if self._has_value:
            result["vf_preds"] = self._compute_values(tf.concat([leading_shape, [1]], 0))
        if self.trims_padding:
            missing = [[0, 0], [0, full_shape[1] - leading_shape[1]], [0, 0]]
            result = {name: tf.pad(x, missing) for name, x in result.items()}
        return result | {f"state_out_{i}": x for i, x in enumerate(next_state)}

    @property
    def custom_loss(self) -> Callable[[list[tf.Tensor], Mapping[str, Any]], Any] | None:
        """The inner model's `custom_loss` for encoded observations, or None if not overridden."""
        return self._custom_loss if self.inner.has_custom_loss else None

    def _custom_loss(self, policy_loss: list[tf.Tensor], loss_inputs: Mapping[str, Any]) -> Any:
        return self.inner.custom_loss(
            policy_loss, _LossInputs(loss_inputs, self._encode_observations)
        )

    def custom_metrics(self) -> dict[str, Any]:
        return dict(self.inner.metrics())

    def _encode_observations(self, obs: Any) -> Any:
        rows = dict(obs) if isinstance(obs, Mapping) else {self._get_only_input(): obs}
        return self._nest_observations(rows)

    def _get_only_input(self) -> str:
        pairs = zip(self._ports.obs, self._ports.is_mask, strict=True)
        return next(port.name for port, mask in pairs if not mask)

    @property
    def _has_value(self) -> bool:
        return self._with_value and self.inner.has_value_function

    def _compute_values(self, shape: Any) -> tf.Tensor:
        return tf.reshape(self.inner.value_function(), shape)

    def _nest_observations(self, rows: Mapping[str, tf.Tensor]) -> Any:
        """Nests the named rows like the observation space, with ones in place of action masks."""
        ports = self._ports
        count = tf.shape(next(iter(rows.values())))[0]
        parts = []
        for port, leaf, mask in zip(ports.obs, ports.obs_leaves, ports.is_mask, strict=True):
            if mask:
                part = tf.ones(tf.concat([[count], get_encoded_shape(leaf)], 0))
                parts.append(tf.ensure_shape(part, [None, *get_encoded_shape(leaf)]))
            else:
                x = rows[port.name]
                parts.append(x * 255.0 if is_image(leaf.space) else x)
        return unflatten(ports.space, parts)

    def _make_input_dict(self, rows: Mapping[str, tf.Tensor], training: bool) -> InputDict:
        result = InputDict({"obs": self._nest_observations(rows)}, is_training=training)
        for view in self.views:
            encoded = [rows[port.name] for port in view.ports]
            pairs = zip(view.source_leaves, view.leaves, encoded, strict=True)
            result[view.name] = view.unflatten(
                [_decode_view(view, *arguments) for arguments in pairs]
            )
        return result


@dataclass(frozen=True)
class _PolicyMethod:
    """A method of a policy's `TFModelV2`; each call uses that policy's weights."""

    policy: Any
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.policy.model.inner, self.name)(*args, **kwargs)


class _LossInputs(Mapping[str, Any]):
    """The columns of a train batch, with observations in the form that `forward` gets."""

    def __init__(self, columns: Mapping[str, Any], encode: Callable[[Any], Any]) -> None:
        self._columns = columns
        self._encode = encode

    def __getitem__(self, key: str) -> Any:
        value = self._columns[key]
        return self._encode(value) if key in ("obs", "new_obs") else value

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _require_separate_layers(kind: type[TFModelV2], first: TFModelV2, second: TFModelV2) -> None:
    """Raises a `ModelError` if two models of a class share a layer."""
    layers = [
        {id(x): x for part in find_parts(m) for x in getattr(part, "_flatten_layers", list)()}
        for m in (first, second)
    ]
    common = [layer.name for key, layer in layers[0].items() if key in layers[1]]
    if common:
        raise ModelError(
            f"Each {kind.__name__} must make separate layers, but all objects share {common}. "
            "Each policy has separate weights: map agents that should share weights to one "
            "policy, or copy weights from one policy to another in on_train_result."
        )


def _require_no_reuse(kind: type[TFModelV2]) -> None:
    """Raises a `ModelError` if a model's constructor asks TensorFlow 1 to reuse variables.

    Layers of Keras 3 ignore this, so models that share weights in RLlib would not share them here.
    """
    for owner in kind.__mro__:
        code = getattr(vars(owner).get("__init__"), "__code__", None)
        names = set() if code is None else {*code.co_names, *_get_keywords(code)}
        if "variable_scope" in names and names & {"AUTO_REUSE", "reuse"}:
            raise ModelError(
                f"{owner.__name__} makes layers in a variable_scope with reuse, which Keras 3 "
                "ignores: they would not share the weights of another model. Map agents that "
                "should share weights to one policy, or copy weights from one policy to another "
                "in on_train_result, and leave the variable_scope out."
            )


def _get_keywords(code: CodeType) -> set[str]:
    """Returns the names of keyword arguments in the calls of a function."""
    groups = [x for x in code.co_consts if isinstance(x, tuple)]
    return {name for group in groups for name in group if isinstance(name, str)}


def _accepts(make: Any, arguments: Sequence[Any], extra: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(make).bind(*arguments, **extra)
    except TypeError:
        return False
    return True


def _find_hint(error: Exception) -> str:
    return next((hint for sign, hint in _HINTS.items() if sign in str(error)), "")


_HINTS = {
    "KerasTensor": (
        " Functional models are made of layers and of functions of Keras and TensorFlow: write "
        "keras.ops.square for np.square, or keep such calls in `forward`."
    ),
    "'sequences'": (
        " The input of a recurrent layer of Keras 3 is called `sequences`: leave the name "
        "`inputs=` out."
    ),
}
"""Advice about errors of Keras 3, by a part of their message."""


def _get_state_shapes(inner: TFModelV2) -> list[tuple[int, ...]]:
    start = list(inner.get_initial_state())
    for i, part in enumerate(start):
        constant = part if isinstance(part, np.ndarray | list | float) else None
        if constant is not None and np.any(constant):
            raise ModelError(
                f"{type(inner).__name__}.get_initial_state()[{i}] must be zeros: recurrent "
                "states start at zero. Add their initial values in `forward`."
            )
    return [tuple(int(n) for n in np.shape(part)) for part in start]


def _decode_view(view: ViewInput, step: Leaf, row: Leaf, x: tf.Tensor) -> tf.Tensor:
    """Returns a leaf of a view in the form that `forward` gets.

    Actions are integers instead of one-hot, rewards have no feature axis, and images are not
    divided by 255.

    Args:
        view: the view.
        step: the leaf of one step.
        row: the leaf of a row.
        x: `[N, ...]`, encoded.
    """
    if view.source == OBS:
        return x * 255.0 if is_image(step.space) else x
    space: Any = step.space
    if isinstance(space, spaces.Discrete) and view.source == ACTIONS:
        return tf.argmax(x, -1)
    if isinstance(space, spaces.MultiDiscrete):
        parts = tf.split(x, space.nvec.reshape(-1).tolist(), axis=-1)
        x = tf.stack([tf.argmax(part, -1) for part in parts], -1)
    return tf.reshape(x, [-1, *row.shape])


def _uses_longest_length(model: TFModelAdapter, example_inputs: Mapping[str, tf.Tensor]) -> bool:
    """Returns whether a model computes the longest length, as `tf.sequence_mask(seq_lens)` does.

    Its mask is only that long, because RLlib pads to the longest sequence of a batch.
    """
    specs = {name: tf.TensorSpec(x.shape, x.dtype, name) for name, x in example_inputs.items()}
    graph = tf.function(model.call, autograph=False).get_concrete_function(specs).graph
    pending = [x for x in graph.inputs if x.op.name == SEQ_LENS]
    while pending:
        readers = pending.pop().consumers()
        if any(op.type == "Max" for op in readers):
            return True
        pending += [op.outputs[0] for op in readers if op.type in ("Cast", "Identity", "Reshape")]
    return False


def _build(model: TFModelAdapter, observation_space: gym.Space, action_space: gym.Space) -> None:
    """Builds a model by two calls, the second of which must not make variables.

    The first call bypasses Keras, which does not accept new layers after a model was called.
    """
    ports = get_input_ports(model, observation_space, ActionDistribution.for_space(action_space))
    example_inputs = {name: tf.convert_to_tensor(x) for name, x in make_zero_inputs(ports).items()}
    try:
        model.call(example_inputs)
        if model.state_shapes:
            model.trims_padding = _uses_longest_length(model, example_inputs)
    except Exception as error:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in example_inputs.items())
        message = f"{model.name} could not be called with {shapes}: {error}{_find_hint(error)}"
        raise ModelError(message) from error
    model.collect_parts()

    def refuse(next_creator: Any, **kwargs: Any) -> Any:
        raise ModelError(
            f"{model.name}.forward makes a variable in each call ({kwargs.get('name')!r}), which "
            "would never be trained. Make layers in the constructor and keep them as attributes."
        )

    with tf.variable_creator_scope(refuse):
        call_with_zeros(model, ports)
