"""One Keras model per kind of policy: where it comes from, what it must give, how it is called."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.errors import ModelError
from tfpolicies.models.calling import ZERO_ROWS, all_layers, call_model, call_with_zeros, zeros
from tfpolicies.models.catalog import (
    QHeads,
    RememberingModel,
    build_model,
    build_q_model,
    build_remembering,
    initializer_of,
    memory_of,
    q_noise_size,
)
from tfpolicies.models.comparing import require_equal
from tfpolicies.models.distributions import (
    ActionDistribution,
    Categorical,
    SquashedDeterministic,
    SquashedGaussian,
)
from tfpolicies.models.extent import is_built_from_file, require_room
from tfpolicies.models.filters import normalize
from tfpolicies.models.ports import NOISE, SEQ_LENS, InputPorts, model_leaves, plain_leaves
from tfpolicies.models.preprocessing import encode, encoded_shape, is_image
from tfpolicies.models.registry import model_given
from tfpolicies.models.settings import has_memory
from tfpolicies.models.spaces import pick
from tfpolicies.models.tanh_heads import ends_in_tanh, warn_of_tanh
from tfpolicies.models.views import declared, views_of

logger = logging.getLogger("tfpolicies")


class NetworkInputs(NamedTuple):
    """What a network is called with; see `InputPorts` for the order."""

    obs: Sequence[tf.Tensor]  # each [N, *shape]
    seen: Sequence[tf.Tensor] = ()  # the leaves of the views, each [N, *shape]
    states: Sequence[tf.Tensor] = ()  # each [S, *shape]
    seq_lens: tf.Tensor | None = None  # int32 [S]; None: all sequences have T steps
    time_steps: Any = 1  # T, with N = S * T
    noise: tf.Tensor | None = None  # [N, k] or [1, k] for a noisy network; None for zeros


class NetworkOutputs(NamedTuple):
    """What a network computes for N rows."""

    dist_inputs: tf.Tensor  # [N, num_inputs], masked
    outputs: tf.Tensor  # [N, num_outputs], masked: what they are computed from
    values: tf.Tensor | None  # [N]
    states: list[tf.Tensor]  # the memory after each sequence, [S, ...] each


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
        self.built = actor.built and critic.built

    def call(self, inputs: Any, training: bool = False) -> tuple[Any, Any]:
        return (
            call_actor(self.actor, inputs, training=training),
            call_model(self.critic, inputs, training=training),
        )

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
    make: Callable[[], keras.Model]  # a new one with each call
    template: keras.Model | None = None  # an instance whose weights its first policy takes
    is_catalog: bool = False  # whether settings alone describe it
    noise_size: int = 0  # numbers of noise that noisy ones take for each row


def model_source(
    observation_space: gym.Space,
    dist_class: ActionDistribution,
    config: Mapping[str, Any],
    *,
    with_value: bool,
) -> ModelSource:
    """Resolves the `model` config to a source of networks.

    `custom_model` is a `keras.Model` (the template), or a factory
    `f(observation_space, num_outputs, **custom_model_config) -> keras.Model`, or the name of a
    registered one; or None for a model of the catalog. A factory with parameters `action_space` or
    `model_config` is given these, too; one without any parameter is called as it is.

    With `use_lstm`, `use_gru` or `use_attention` a custom model gives features, of any number, to
    the memory around it; `num_outputs` is then the width of the memory.

    Raises:
        ModelError: if it is none of these.
    """
    custom, num_outputs = model_given(config["custom_model"]), dist_class.num_outputs
    role = _Role(observation_space, dist_class, config, with_value)
    if custom is None:
        how = {"with_value": with_value, "action_leaves": dist_class.leaves}
        return _catalog_source(build_model, observation_space, num_outputs, config, how)
    value_settings = [config[k] for k in ("fcnet_hiddens", "fcnet_activation", "ortho_init")]
    value_key = (with_value, fingerprint(value_settings))
    if isinstance(custom, keras.Model):
        ports = ports_of(custom, observation_space, dist_class)
        unbuilt = None if custom.built else Architecture.of(custom)
        if unbuilt is not None:
            _require_room(unbuilt, ports, custom.name)
        if unbuilt is not None or not isinstance(custom, keras.Function | keras.Sequential):
            call_with_zeros(custom, ports)  # builds it; `complete` tries each copy that is made
        architecture = Architecture.of(custom)
        _require_kept_views(custom, architecture)
        if architecture is not None and custom not in _compared and not is_built_from_file():
            require_equal(custom, architecture.build(), ports)
            _compared.add(custom)
        return _instance_source(custom, architecture, role.complete, value_key)
    if isinstance(custom, keras.Layer):
        raise ModelError(
            f"model must be a keras.Model or a factory of one; got the layer {custom.name!r}. "
            "Write keras.Sequential([layer])."
        )
    if callable(custom):
        arguments = dict(config["custom_model_config"])
        context = context_of(custom, dist_class.space, config)

        width = num_outputs if not has_memory(config) else _width_of_memory(config)

        def make_custom() -> keras.Model:
            told = {**arguments, **context}
            return role.complete(model_of(custom, observation_space, width, told))

        given = fingerprint([arguments, context.get("model_config")])
        factory_key = ("factory", custom, given, num_outputs, *value_key)
        return ModelSource(factory_key, make_custom)
    raise ModelError(
        "custom_model must be a keras.Model or a factory f(observation_space, num_outputs, "
        f"**custom_model_config) that returns one; got {custom!r}."
    )


def require_float32() -> None:
    """Checks that layers which say nothing else, as those of the catalog, compute in float32."""
    chosen = keras.config.dtype_policy()
    if chosen.compute_dtype != "float32":
        raise ModelError(
            f"Policies are float32 only, but Keras's global dtype policy is {chosen.name!r}. Call "
            "keras.config.set_dtype_policy('float32')."
        )


def q_model_source(
    observation_space: gym.Space, num_actions: int, static: Mapping[str, Any]
) -> ModelSource:
    """Returns the source of the catalog's Q-networks; see `build_q_model`.

    Args:
        observation_space: as the environment has it.
        num_actions: how many values, or distributions, are estimated.
        static: with the complete `model` config, and the settings of `QHeads`.

    Raises:
        ModelError: if Keras's global dtype is not float32.
    """
    heads = QHeads.of(static)
    noise_size = q_noise_size(model_leaves(observation_space), num_actions, static["model"], heads)
    source = _catalog_source(
        build_q_model, observation_space, num_actions, static["model"], {"heads": heads}
    )
    return source._replace(noise_size=noise_size)


def _catalog_source(
    build: Callable[..., keras.Model],
    observation_space: gym.Space,
    num_outputs: int,
    config: Mapping[str, Any],
    how: Mapping[str, Any],
) -> ModelSource:
    """Returns the source of models that `build` makes of a complete `model` config."""
    require_float32()
    found = model_leaves(observation_space)
    shapes = tuple((encoded_shape(leaf), leaf.path) for leaf in found)
    settings = {k: v for k, v in config.items() if not k.startswith("custom_model")}
    key = ("catalog", build, shapes, num_outputs, fingerprint([settings, how]))
    make = functools.partial(build, found, num_outputs, config, **how)
    return ModelSource(key, make, is_catalog=True)


def context_of(
    factory: Callable[..., Any], action_space: gym.Space, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what a factory is given beside its own arguments, if it names it."""
    offered = {"action_space": action_space, "model_config": {**config, "custom_model": None}}
    try:
        named = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable whose signature Python cannot tell
        return {}
    return {name: value for name, value in offered.items() if name in named}


def model_of(factory: Any, space: gym.Space, num_outputs: int, arguments: Any) -> keras.Model:
    """Returns what a factory of models gives for a space and its own arguments.

    Raises:
        ModelError: if it does not take them, or returns no Keras model.
    """
    signature = _signature(factory)
    if signature is not None and not arguments and not signature.parameters:
        model = factory()
    else:
        if signature is not None:
            _require_call(factory, signature, space, num_outputs, arguments)
        model = factory(space, num_outputs, **arguments)
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"The factory custom_model={factory!r} must return a keras.Model, but returned "
            f"{type(model).__name__}."
        )
    return model


def _signature(factory: Any) -> inspect.Signature | None:
    """Returns what a factory of models takes, without `self`; None if Python cannot tell."""
    is_model_class = isinstance(factory, type) and issubclass(factory, keras.Model)
    try:
        signature = inspect.signature(factory.__init__ if is_model_class else factory)
    except (TypeError, ValueError):
        return None
    return signature.replace(parameters=list(signature.parameters.values())[is_model_class:])


def _require_call(
    factory: Any, signature: inspect.Signature, space: gym.Space, num_outputs: int, arguments: Any
) -> None:
    """Checks that a factory takes what it will be called with.

    Raises:
        ModelError: if it does not; it shows the signature.
    """
    try:
        signature.bind(space, num_outputs, **arguments)
    except TypeError as error:
        name = getattr(factory, "__name__", repr(factory))
        what = "The model class" if isinstance(factory, type) else "The factory of models"
        raise ModelError(
            f"{what} {name}{signature} is called with (observation_space, num_outputs, "
            f"**custom_model_config), but {error}. Give a model instance, or a function that makes "
            f"the model: lambda observation_space, num_outputs: {name}(...)."
        ) from error


def ports_of(
    model: keras.Model, observation_space: gym.Space, dist_class: ActionDistribution
) -> InputPorts:
    """Returns the inputs of a policy with this model: it decides about memory and the rest."""
    ports = InputPorts(
        observation_space,
        views_of(model, observation_space, dist_class.space),
        tuple(tuple(shape) for shape in memory_of(model)),
    )
    names = [port.name for port in ports.all]
    twice = [port.name for port in ports.seen if names.count(port.name) > 1]
    if twice:
        raise ModelError(
            f"The model {model.name!r} has a view {twice[0]!r}, but that is what a part of the "
            "observation is called. Give the view another name."
        )
    return ports


def _require_room(architecture: Architecture, ports: InputPorts, name: str) -> None:
    """Checks the size that a model of an architecture will have when it is built."""

    def built() -> keras.Model:
        model = architecture.build()
        call_with_zeros(model, ports)
        return model

    require_room(built, f"The model {name!r}", may_fail=True)


def _require_kept_views(instance: keras.Model, architecture: Architecture | None) -> None:
    """Checks that the views a model instance requires are those of its copies, too.

    Raises:
        ModelError: if Keras does not know of them.
    """
    required = declared(instance)
    if required and architecture is not None and declared(architecture.build()) != required:
        raise ModelError(
            f"The model {instance.name!r} has view_requirements that Keras leaves out of copies. "
            "Give a factory that sets them, or set them in the constructor of the model's class."
        )


def _instance_source(
    instance: keras.Model,
    architecture: Architecture | None,
    complete: Callable[[keras.Model], keras.Model],
    value_key: tuple,
) -> ModelSource:
    if architecture is None:
        key = ("instance", id(instance), *value_key)
        return ModelSource(key, lambda: complete(instance), instance)

    classes = tuple(
        type(layer)
        for layer in all_layers(instance)
        if not type(layer).__module__.startswith("keras.")
    )
    key = ("architecture", fingerprint(anonymous(architecture.config)), classes, *value_key)
    return ModelSource(key, lambda: complete(architecture.build()), instance)


_compared: weakref.WeakSet[keras.Model] = weakref.WeakSet()
"""Models of users whose copies were found to compute the same."""


class Architecture(NamedTuple):
    """A Keras model without its weights; pickle takes it where it finds the classes by name."""

    config: dict[str, Any]
    classes: dict[str, type]  # of the model and its layers, as the config names them

    @classmethod
    def of(cls, model: keras.Model) -> Architecture | None:
        """Returns the architecture of a model; None if Keras cannot rebuild it."""
        classes = {type(layer).__name__: type(layer) for layer in all_layers(model)}
        try:
            found = cls(keras.saving.serialize_keras_object(model), classes)
            found.build()
        except (NotImplementedError, TypeError, ValueError, AttributeError):
            return None
        return found

    def build(self) -> keras.Model:
        """Returns a new model of the architecture."""
        with keras.saving.custom_object_scope(self.classes):
            # Keras empties a functional model's config while it reads it, so it gets a copy.
            config = copy.deepcopy(self.config)
            return keras.saving.deserialize_keras_object(config, custom_objects=self.classes)


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


_SQUASHED = (SquashedGaussian, SquashedDeterministic)


class _Role(NamedTuple):
    """What a model of a user's is to be: the network of a policy, whose value may be needed."""

    observation_space: gym.Space
    dist_class: ActionDistribution
    config: Mapping[str, Any]
    with_value: bool

    def complete(self, model: keras.Model) -> keras.Model:
        """Builds and checks a user's model, and gives it a critic if one is needed and missing."""
        if has_memory(self.config):
            model = self._put_memory_around(model)
        ports = ports_of(model, self.observation_space, self.dist_class)
        outputs = call_with_zeros(model, ports)
        check_outputs(model, outputs, self.dist_class.num_outputs, ports)
        if self.with_value and value_of(outputs) is None:
            if ports.memory or ports.views:
                raise ModelError(
                    f"The model {model.name!r} has a memory or reads previous steps, so it has to "
                    "estimate the values itself: let it return them as 'vf_preds', of shape "
                    f"{'[B, T, 1]' if ports.memory else '[B, 1]'}."
                )
            require_float32()
            model = ActorCritic(model, _critic(model.name, self.observation_space, self.config))
        if any(is_image(leaf.space) for leaf in ports.obs_leaves):
            _warn_of_rescaling(model)
        if Categorical in self.dist_class.kinds and _are_probabilities(_dist_inputs_of(outputs)):
            _warn_of_probabilities(model.name.rstrip("0123456789_"))
        squashes = any(issubclass(kind, _SQUASHED) for kind in self.dist_class.kinds)
        if squashes and ends_in_tanh(users_model(model)):
            warn_of_tanh(model.name.rstrip("0123456789_"))
        return model

    def _put_memory_around(self, model: keras.Model) -> keras.Model:
        """Builds a user's model, and puts the memory that the settings ask for around it.

        Raises:
            ModelError: if it has a memory already, or gives no rows of features.
        """
        require_float32()
        ports = ports_of(model, self.observation_space, self.dist_class)
        if ports.memory:
            raise ModelError(
                f"The model {model.name!r} already has a memory. Leave use_lstm, use_gru and "
                "use_attention False; or give a model without inputs state_in_0, ..."
            )
        tried = zeros(ports)
        features = _dist_inputs_of(call_with_zeros(model, ports))
        shape: tuple[int, ...] = tuple(getattr(features, "shape", ()))
        if len(shape) != 2 or shape[0] != ZERO_ROWS:
            raise ModelError(
                f"The model {model.name!r} must give features of shape [B, n] to the memory around "
                "it, as its only output, the first of a pair, or 'action_dist_inputs' of a dict; "
                f"got {shape} for {ZERO_ROWS} rows. Flatten them."
            )
        return build_remembering(
            model,
            functools.partial(call_actor, model),
            {name: array.shape[1:] for name, array in tried.items()},
            self.dist_class.num_outputs,
            self.config,
            with_value=self.with_value,
            action_leaves=self.dist_class.leaves,
        )


def _width_of_memory(config: Mapping[str, Any]) -> int:
    return int(config["attention_dim" if config["use_attention"] else "lstm_cell_size"])


def users_model(model: keras.Model) -> keras.Model:
    """Returns a user's own model: without the critic beside it, or the memory around it.

    It is the model itself where there is neither.
    """
    if isinstance(model, RememberingModel):
        return model.features
    return model.actor if isinstance(model, ActorCritic) else model


def _are_probabilities(dist_inputs: Any) -> bool:
    """Whether rows sum to 1, as behind a softmax; False where nothing is computed yet."""
    if not tf.executing_eagerly() or dist_inputs.shape[-1] < 2:
        return False
    rows = np.asarray(dist_inputs)
    return bool((rows >= 0).all() and np.allclose(rows.sum(axis=-1), 1.0, atol=1e-5))


def _critic(name: str, observation_space: gym.Space, config: Mapping[str, Any]) -> keras.Model:
    settings = {**config, "free_log_std": False, "custom_model": None}
    try:
        critic = build_model(model_leaves(observation_space), 1, settings, with_value=False, seed=0)
    except ModelError as error:
        raise ModelError(
            f"The model {name!r} gives no value, so a critic is built beside it, but {error} Or "
            "let the model give the value itself, as a second output of shape [B, 1]."
        ) from error
    critic.name = "critic"
    return critic


def _warn_of_rescaling(model: keras.Model) -> None:
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.Rescaling) and np.max(layer.scale) < 0.1:
            _warn_of_rescaling_once(layer.name.rstrip("0123456789_"), np.max(layer.scale))


@functools.cache
def _warn_of_rescaling_once(name: str, scale: float) -> None:
    logger.warning(
        "The layer %r multiplies by %.2g, but images of uint8 are divided by 255 before the model "
        "sees them, so that it would see nearly nothing. Leave the layer out.",
        name,
        scale,
    )


@functools.cache
def _warn_of_probabilities(name: str) -> None:
    logger.warning(
        "The model %r gives probabilities, as if its last layer were a softmax. Its outputs are "
        "taken for logits, so the policy can hardly prefer an action. Leave the softmax out: "
        "Dense(n) without an activation.",
        name,
    )


def call_actor(model: keras.Model, inputs: Any, *, training: bool = False) -> Any:
    """Calls a model like `call_model`; returns the inputs of the action distribution alone."""
    return _dist_inputs_of(call_model(model, inputs, training=training))


def variables_of_actor(model: keras.Model) -> list[Any] | None:
    """Returns the variables that the inputs of the action distribution depend on.

    None where that is not known, or where there is nothing else.
    """
    actor = model.actor if isinstance(model, ActorCritic) else None
    outputs = getattr(model, "_outputs_struct", None)
    if outputs is not None and len(keras.tree.flatten(outputs)) > 1:
        actor = keras.Model(model.inputs, _dist_inputs_of(outputs), name="actor")
    return None if actor is None else list(actor.variables)


def value_of(outputs: Any) -> Any:
    """Returns the value of what a model gave; None if it gives none."""
    if isinstance(outputs, Mapping):
        return outputs.get("vf_preds", outputs.get("value"))
    if isinstance(outputs, list | tuple) and len(outputs) == 2:
        return outputs[1]
    return None


def _dist_inputs_of(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        return outputs.get("action_dist_inputs", outputs.get("logits"))
    return outputs[0] if isinstance(outputs, list | tuple) and outputs else outputs


def check_outputs(model: keras.Model, outputs: Any, num_outputs: int, ports: InputPorts) -> None:
    """Checks what a model gave for inputs of zeros.

    Raises:
        ModelError: naming the shape that was expected and the one that came.
    """
    rows = (ZERO_ROWS, ZERO_ROWS) if ports.is_recurrent else (ZERO_ROWS,)
    axes = "B, T" if ports.is_recurrent else "B"
    dist_inputs, values = _dist_inputs_of(outputs), value_of(outputs)

    def got(x: Any) -> str:
        shape = getattr(x, "shape", None)
        if shape is None:
            return "no such output"
        return f"[{', '.join([axes, *map(str, tuple(shape)[len(rows) :])])}]"

    if tuple(getattr(dist_inputs, "shape", ())) != (*rows, num_outputs):
        remedy = f"Give its last layer {num_outputs} units."
        if dist_inputs is None:
            remedy = f"Rename a key: it gives {sorted(outputs)}."
        raise ModelError(
            f"The model {model.name!r} must give action-distribution inputs of shape "
            f"[{axes}, {num_outputs}] (its only output, the first of a pair, or the key "
            f"'action_dist_inputs' or 'logits' of a dict); got {got(dist_inputs)}. {remedy}"
        )
    if values is not None and tuple(values.shape) not in ((*rows, 1), rows):
        raise ModelError(
            f"The second output of the model {model.name!r} is the value and must have the shape "
            f"[{axes}, 1] or [{axes}]; got {got(values)}."
        )
    for i, port in enumerate(ports.states):
        after = outputs.get(f"state_out_{i}") if isinstance(outputs, Mapping) else None
        if tuple(getattr(after, "shape", ())) != (ZERO_ROWS, *port.shape):
            shape = "no such output" if after is None else f"{tuple(after.shape[1:])}"
            raise ModelError(
                f"The model {model.name!r} takes {port.name!r} of shape {port.shape} per sequence, "
                f"so it must return a dict with 'state_out_{i}' of the same shape; got {shape}."
            )
    policies = {str(layer.compute_dtype) for layer in all_layers(model)}
    if policies - {"float32"}:
        raise ModelError(
            f"The model {model.name!r} computes in {sorted(policies)}; policies are float32 only. "
            "Build it under the dtype policy 'float32'."
        )


class Network:
    """A built Keras model behind the ports of a policy, with its own variables or with others.

    Outside, everything is rows `[N, ...]`. A model with a memory sees sequences: N = S * T rows are
    S sequences of T steps, one after the other, and the memory has S rows.

    Attributes:
        model: the Keras model.
        ports: the inputs.
        filtered_names: the inputs whose observations are normalised.
        variables: all of its variables in a fixed order: trainable or not, seed generators too,
            then mean and scale of each filtered observation leaf.
    """

    def __init__(
        self,
        model: keras.Model,
        ports: InputPorts,
        dist_class: ActionDistribution,
        filtered: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.ports = ports
        self._dist_class = dist_class
        self._leaves = ports.obs_leaves
        self._names = [port.name for port in ports.obs]
        self._plain = plain_leaves(ports.space)
        self._filtered = tuple(filtered)
        self.filtered_names = tuple(self._names[i] for i in filtered)
        self.filter_variables = [
            tf.Variable(start, trainable=False, name=f"{self._names[i]}/{role}")
            for i in filtered
            for role, start in _identity_filter(encoded_shape(self._leaves[i]))
        ]
        self.variables = [*model.variables, *self.filter_variables]

    def like(self, model: keras.Model) -> Network:
        """Returns a network of another model of this architecture, with the same filters."""
        twin = copy.copy(self)
        twin.model, twin.variables = model, [*model.variables, *self.filter_variables]
        return twin

    def __call__(self, inputs: NetworkInputs, *, training: bool) -> NetworkOutputs:
        """Runs the model with its own variables."""
        return self._run(inputs, self.filter_variables, training=training)

    def with_weights(self, weights: Sequence[tf.Tensor]) -> keras.StatelessScope:
        """Returns a context in which the model and its layers have weights of `variables`."""
        own = self.model.variables
        return keras.StatelessScope(state_mapping=list(zip(own, weights[: len(own)], strict=True)))

    def stateless(self, weights: Sequence[tf.Tensor], inputs: NetworkInputs) -> NetworkOutputs:
        """Runs the model with the given weights, in the order of `variables`, for inference."""
        # Unlike `stateless_call`, a call works where the model's `call` takes no `training`.
        with self.with_weights(weights):
            return self._run(inputs, weights[len(self.model.variables) :], training=False)

    def _run(
        self, inputs: NetworkInputs, filters: Sequence[Any], *, training: bool
    ) -> NetworkOutputs:
        seen = self._encoded(inputs.obs, filters)
        recurrent = self.ports.is_recurrent
        arrays = iter(inputs.seen)
        for view in self.ports.views:
            steps = [next(arrays) for _ in view.ports]
            seen |= view.encoded(steps, lambda i, x: self._normalized(self._plain[i], x, filters))
        if recurrent:
            seen = {name: _fold(x, inputs.time_steps) for name, x in seen.items()}
            for port, state in zip(self.ports.states, inputs.states, strict=True):
                seen[port.name] = state
            lengths = inputs.seq_lens
            if lengths is None:
                lengths = tf.fill([tf.shape(inputs.states[0])[0]], inputs.time_steps)
            seen[SEQ_LENS] = tf.cast(lengths, tf.int32)
        if self.ports.noise_size:
            mean = inputs.noise is None
            seen[NOISE] = tf.zeros([1, self.ports.noise_size]) if mean else inputs.noise
        outputs = call_model(self.model, seen, training=training)
        found, values = _dist_inputs_of(outputs), value_of(outputs)
        states = [outputs[f"state_out_{i}"] for i in range(len(self.ports.states))]
        if recurrent:
            found = tf.reshape(found, [-1, found.shape[-1]])
        masks = [x for x, mask in zip(inputs.obs, self.ports.is_mask, strict=True) if mask]
        if masks:
            flat = [tf.reshape(x, [tf.shape(x)[0], math.prod(x.shape[1:])]) for x in masks]
            mask = flat[0] if len(flat) == 1 else tf.concat(flat, axis=-1)
            found = self._dist_class.masked(found, mask)
        if values is not None:
            values = tf.reshape(values, [-1])
        return NetworkOutputs(self._dist_class.inputs_of(found), found, values, states)

    def encoded(self, obs: Any) -> dict[str, tf.Tensor]:
        """Returns rows of observations, nested as their space is, as the model sees them, by port.

        Action masks are left out.
        """
        return self._encoded([pick(obs, leaf.path) for leaf in self._leaves], self.filter_variables)

    def _encoded(self, obs: Sequence[tf.Tensor], filters: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Returns what the model sees of an observation, by port name."""
        encoded: dict[int, tf.Tensor] = {
            i: encode(leaf, x)
            for i, (leaf, x, mask) in enumerate(
                zip(self._leaves, obs, self.ports.is_mask, strict=True)
            )
            if not mask
        }
        return {self._names[i]: self._normalized(i, x, filters) for i, x in encoded.items()}

    def _normalized(self, leaf: int, encoded: tf.Tensor, filters: Sequence[Any]) -> tf.Tensor:
        """Returns rows of an encoded leaf at the scale that the filter gives them, if there is one.

        Args:
            leaf: its number.
            encoded: `[N, ...]`.
            filters: mean and scale of each filtered leaf.
        """
        if leaf not in self._filtered:
            return encoded
        at = 2 * self._filtered.index(leaf)
        return normalize(encoded, filters[at], filters[at + 1])


def _fold(rows: tf.Tensor, time_steps: Any) -> tf.Tensor:
    """Reshapes rows `[S * T, ...]` to sequences `[S, T, ...]`."""
    shape = rows.shape[1:]
    static = time_steps if isinstance(time_steps, int) else None
    return tf.ensure_shape(tf.reshape(rows, [-1, time_steps, *shape]), [None, static, *shape])


def _identity_filter(shape: tuple[int, ...]) -> list[tuple[str, np.ndarray]]:
    return [("mean", np.zeros(shape, np.float32)), ("scale", np.ones(shape, np.float32))]


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


class FreshWeights:
    """Draws new values for all variables of a model from its layers' own initializers.

    The same seed and architecture give the same values. Variables whose layer names no initializer
    (counters, a bare `add_weight`) get their value in `start`.

    Args:
        model: the model.
        start: the values of its variables when new.
    """

    def __init__(self, model: keras.Model, start: Sequence[np.ndarray]) -> None:
        initializers = _initializers(model)
        self._variables = [
            (tuple(v.shape), np.dtype(v.dtype), _role(v), initializers.get(id(v)), first)
            for v, first in zip(model.variables, start, strict=True)
        ]

    def draw(self, seed: int | Sequence[int]) -> list[np.ndarray]:
        """Returns an array per variable, in order."""
        seeds = np.random.SeedSequence(seed).generate_state(len(self._variables)).tolist()
        values = []
        for (shape, dtype, role, initializer, first), own in zip(
            self._variables, seeds, strict=True
        ):
            if role == "seed_generator_state":
                values.append(np.array([own, 0], "uint32").astype(dtype))
            elif initializer is None:
                values.append(first)
            else:
                values.append(_draw(initializer, shape, dtype, own))
        return values


def _role(variable: Any) -> str:
    return str(variable.path.rpartition("/")[2])


def _initializers(model: keras.Model) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for variable in layer._trainable_variables + layer._non_trainable_variables:
            spec = initializer_of(layer, variable)
            if spec is not None:
                found[id(variable)] = keras.initializers.get(spec)
    return found


def _draw(initializer: Any, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    if isinstance(initializer, keras.initializers.Zeros):
        return np.zeros(shape, dtype)
    if isinstance(initializer, keras.initializers.Initializer):
        config = initializer.get_config()
        if "seed" in config:
            initializer = type(initializer).from_config({**config, "seed": seed})
    if hasattr(initializer, "draw"):
        return initializer.draw(shape, np.random.default_rng(seed))
    return np.asarray(initializer(shape, dtype=dtype.name))
