"""One Keras model per kind of policy: where it comes from, what it must give, how it is called."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.errors import ModelError
from tfpolicies.models.catalog import build_mlp
from tfpolicies.models.preprocessing import encode_all, encoded_shape
from tfpolicies.models.spaces import Leaf


class NetworkOutputs(NamedTuple):
    """What a network computes for a batch."""

    dist_inputs: tf.Tensor  # [B, num_outputs]
    values: tf.Tensor | None  # [B]


@keras.saving.register_keras_serializable(package="tfpolicies")
class ActorCritic(keras.Model):
    """An actor model and a separate critic model, behind one call.

    Args:
        actor: gives the inputs of the action distribution, `[B, num_outputs]`.
        critic: gives values, `[B, 1]`.
    """

    def __init__(self, actor: keras.Model, critic: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.actor = actor
        self.critic = critic

    def call(self, inputs: Any, training: bool = False) -> tuple[Any, Any]:
        return self.actor(inputs, training=training), self.critic(inputs, training=training)

    def get_config(self) -> dict[str, Any]:
        parts = {"actor": self.actor, "critic": self.critic}
        return {name: keras.saving.serialize_keras_object(part) for name, part in parts.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ActorCritic:
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects)
            for name in ("actor", "critic")
        }
        return cls(**parts)


class ModelSource(NamedTuple):
    """Where the networks of one kind of policy come from."""

    key: tuple  # equal for equal architectures, whatever their names
    make: Callable[[int], keras.Model]  # seed -> a new model
    template: keras.Model | None  # an instance whose weights its first policy takes


def model_source(
    observation_space: gym.Space,
    space_leaves: Sequence[Leaf],
    num_outputs: int,
    config: Mapping[str, Any],
    *,
    with_value: bool,
) -> ModelSource:
    """Resolves the `model` config to a source of networks.

    `custom_model` is a `keras.Model` (the template), or a factory
    `f(observation_space, num_outputs, **custom_model_config) -> keras.Model`, or None for a
    multi-layer perceptron.

    Raises:
        ModelError: if it is none of these.
    """
    custom = config["custom_model"]

    def complete(model: keras.Model) -> keras.Model:
        return _complete(model, space_leaves, num_outputs, config, with_value=with_value)

    if custom is None:
        shapes = tuple(encoded_shape(leaf) for leaf in space_leaves)
        settings = {k: v for k, v in config.items() if not k.startswith("custom_model")}
        key = ("mlp", shapes, num_outputs, with_value, fingerprint(settings))

        def make(seed: int) -> keras.Model:
            return build_mlp(space_leaves, num_outputs, config, with_value=with_value, seed=seed)

        return ModelSource(key, make, None)
    value_settings = [config[k] for k in ("fcnet_hiddens", "fcnet_activation", "ortho_init")]
    value_key = (with_value, fingerprint(value_settings))
    if isinstance(custom, keras.Model):
        return _instance_source(custom, complete, value_key, space_leaves)
    if callable(custom):
        arguments = dict(config["custom_model_config"])

        def make_custom(seed: int) -> keras.Model:
            del seed  # fresh weights are drawn from the layers' own initializers
            model = custom(observation_space, num_outputs, **arguments)
            if not isinstance(model, keras.Model):
                raise ModelError(
                    f"The factory custom_model={custom!r} must return a keras.Model, but returned "
                    f"{type(model).__name__}."
                )
            return complete(model)

        factory_key = ("factory", custom, fingerprint(arguments), num_outputs, *value_key)
        return ModelSource(factory_key, make_custom, None)
    raise ModelError(
        "custom_model must be a keras.Model or a factory f(observation_space, num_outputs, "
        f"**custom_model_config) that returns one; got {custom!r}."
    )


def _instance_source(
    instance: keras.Model,
    complete: Callable[[keras.Model], keras.Model],
    value_key: tuple,
    space_leaves: Sequence[Leaf],
) -> ModelSource:
    call_with_zeros(instance, space_leaves)
    try:
        config = keras.saving.serialize_keras_object(instance)
        _clone(instance, config)
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        key = ("instance", id(instance), *value_key)
        return ModelSource(key, lambda seed: complete(instance), instance)

    classes = tuple(
        type(layer)
        for layer in _all_layers(instance)
        if not type(layer).__module__.startswith("keras.")
    )
    key = ("architecture", fingerprint(anonymous(config)), classes, *value_key)
    return ModelSource(key, lambda seed: complete(_clone(instance, config)), instance)


def _clone(instance: keras.Model, config: dict[str, Any]) -> keras.Model:
    known = {type(layer).__name__: type(layer) for layer in _all_layers(instance)}
    with keras.saving.custom_object_scope(known):
        # Keras empties a functional model's config while it reads it, so it gets a copy.
        return keras.saving.deserialize_keras_object(copy.deepcopy(config), custom_objects=known)


def _all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    found: list[keras.layers.Layer] = [model]
    for layer in getattr(model, "layers", []):
        found.extend(_all_layers(layer))
    return found


_NAMES = ("name", "keras_history", "input_layers", "output_layers")
_NOT_ARCHITECTURE = ("registered_name", "build_config", "compile_config")


def anonymous(config: Any) -> Any:
    """Returns a Keras config without names, which differ between equal architectures.

    Names become numbers, where a layer has its name and where others refer to it; the same word
    elsewhere (an activation) stays.
    """
    names: dict[str, str] = {}

    def walk(value: Any, *, is_name: bool) -> Any:
        if isinstance(value, Mapping):
            if "DTypePolicy" in str(value.get("class_name")):
                return value["config"]
            kept = {str(k): v for k, v in value.items() if k not in _NOT_ARCHITECTURE}
            return {k: walk(v, is_name=k in _NAMES) for k, v in kept.items()}
        if isinstance(value, list | tuple):
            return [walk(v, is_name=is_name) for v in value]
        if is_name and isinstance(value, str):
            return names.setdefault(value, f"#{len(names)}")
        return value

    return walk(config, is_name=False)


def fingerprint(value: Any) -> str:
    """Returns a short stable hash of a JSON-like value."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _complete(
    model: keras.Model,
    space_leaves: Sequence[Leaf],
    num_outputs: int,
    config: Mapping[str, Any],
    *,
    with_value: bool,
) -> keras.Model:
    """Builds and checks a user's model, and gives it a critic if one is needed and missing."""
    outputs = call_with_zeros(model, space_leaves)
    if with_value and _value_of(outputs) is None:
        settings = {**config, "free_log_std": False}
        critic = build_mlp(space_leaves, 1, settings, with_value=False)
        model = ActorCritic(model, critic)
        outputs = call_with_zeros(model, space_leaves)
    check_outputs(model, outputs, num_outputs)
    return model


def zeros(space_leaves: Sequence[Leaf], rows: int) -> Any:
    """Returns encoded observations of zeros, as a model takes them."""
    arrays = [np.zeros((rows, *encoded_shape(leaf)), np.float32) for leaf in space_leaves]
    return arrays[0] if len(arrays) == 1 else arrays


def call_with_zeros(model: keras.Model, space_leaves: Sequence[Leaf]) -> Any:
    """Builds a model by calling it on two rows of zeros; returns its outputs.

    Raises:
        ModelError: if the model does not take such observations.
    """
    inputs = zeros(space_leaves, 2)
    try:
        return model(inputs)
    except Exception as error:
        shapes = [f"[B, {', '.join(map(str, encoded_shape(x)))}]" for x in space_leaves]
        raise ModelError(
            f"The model {model.name!r} could not be called with encoded observations of shape "
            f"{' and '.join(shapes)} (float32; discrete parts are one-hot): {error}"
        ) from error


def _value_of(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("vf_preds")
    if isinstance(outputs, list | tuple) and len(outputs) == 2:
        return outputs[1]
    return None


def _dist_inputs_of(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("action_dist_inputs")
    return outputs[0] if isinstance(outputs, list | tuple) and outputs else outputs


def check_outputs(model: keras.Model, outputs: Any, num_outputs: int) -> None:
    """Checks what a model gave for two rows.

    Raises:
        ModelError: naming the shape that was expected and the one that came.
    """
    dist_inputs, values = _dist_inputs_of(outputs), _value_of(outputs)
    shape = getattr(dist_inputs, "shape", None)
    if shape is None or tuple(shape) != (2, num_outputs):
        got = "no such output" if shape is None else f"[B, {', '.join(map(str, shape[1:]))}]"
        raise ModelError(
            f"The model {model.name!r} must give action-distribution inputs of shape "
            f"[B, {num_outputs}] (its only output, the first of a pair, or the key "
            f"'action_dist_inputs' of a dict); got {got}. Give its last layer {num_outputs} units."
        )
    if values is not None and tuple(values.shape) not in ((2, 1), (2,)):
        raise ModelError(
            f"The second output of the model {model.name!r} is the value and must have the shape "
            f"[B, 1] or [B]; got [B, {', '.join(map(str, values.shape[1:]))}]."
        )
    policies = {str(layer.compute_dtype) for layer in _all_layers(model)}
    if policies - {"float32"}:
        raise ModelError(
            f"The model {model.name!r} computes in {sorted(policies)}; policies are float32 only. "
            "Build it under the dtype policy 'float32'."
        )


class Network:
    """A built Keras model, called on encoded leaves, with its own variables or with others.

    Attributes:
        model: the Keras model.
        variables: all of its variables, in a fixed order (trainable or not, seed generators too).
    """

    def __init__(self, model: keras.Model, space_leaves: Sequence[Leaf]) -> None:
        self.model = model
        self.variables = list(model.variables)
        self._leaves = tuple(space_leaves)

    def __call__(self, obs: Sequence[tf.Tensor], *, training: bool) -> NetworkOutputs:
        """Runs the model with its own variables on raw observation leaves."""
        return self._named(self.model(encode_all(self._leaves, obs), training=training))

    def stateless(self, weights: Sequence[tf.Tensor], obs: Sequence[tf.Tensor]) -> NetworkOutputs:
        """Runs the model with the given weights, in the order of `variables`, for inference."""
        # Unlike `stateless_call`, a call works where the model's `call` takes no `training`.
        mapping = list(zip(self.variables, weights, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self(obs, training=False)

    @staticmethod
    def _named(outputs: Any) -> NetworkOutputs:
        values = _value_of(outputs)
        if values is not None:
            values = tf.reshape(values, [-1])
        return NetworkOutputs(_dist_inputs_of(outputs), values)


def variable_keys(variables: Sequence[Any]) -> list[str]:
    """Returns canonical keys: the position of a variable's layer and the variable's role.

    Names such as `dense_4/kernel` count up with every layer a process makes; keys do not.
    """
    layers: dict[str, int] = {}
    keys: list[str] = []
    for variable in variables:
        layer, _, role = variable.path.rpartition("/")
        key = f"layer_{layers.setdefault(layer, len(layers))}/{role}"
        copies = sum(k == key or k.startswith(f"{key}#") for k in keys)
        keys.append(f"{key}#{copies}" if copies else key)
    return keys


def fresh_weights(model: keras.Model, seed: int, start: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Draws new values for all variables of a model from its layers' own initializers.

    The same seed and architecture give the same values. Variables whose layer names no initializer
    (counters, a bare `add_weight`) get their value in `start`, the values of the model when new.
    """
    seeds = np.random.SeedSequence(seed).generate_state(len(model.variables)).tolist()
    initializers = _initializers(model)
    values = []
    for variable, variable_seed, first in zip(model.variables, seeds, start, strict=True):
        role = variable.path.rpartition("/")[2]
        if role == "seed_generator_state":
            values.append(np.array([variable_seed, 0], "uint32").astype(variable.dtype))
            continue
        initializer = initializers.get(id(variable))
        if initializer is None:
            values.append(first)
            continue
        values.append(_draw(initializer, variable, variable_seed))
    return values


def _initializers(model: keras.Model) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        try:
            config = layer.get_config()
        except NotImplementedError:  # a class of the user's own
            config = {}
        for variable in layer._trainable_variables + layer._non_trainable_variables:
            name = f"{variable.name}_initializer"
            spec = getattr(layer, name, None) or config.get(name)
            if spec is not None:
                found[id(variable)] = spec
    return found


def _draw(spec: Any, variable: Any, seed: int) -> np.ndarray:
    initializer = keras.initializers.get(spec)
    if isinstance(initializer, keras.initializers.Initializer):
        config = initializer.get_config()
        if "seed" in config:
            initializer = type(initializer).from_config({**config, "seed": seed})
    if hasattr(initializer, "draw"):
        return initializer.draw(variable.shape, np.random.default_rng(seed))
    return np.asarray(initializer(variable.shape, dtype=variable.dtype))
