"""`TFModelV2` and related classes: base classes of RLlib's TensorFlow models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.compat import keras_tf_ops as keras_tf_ops  # models may use TensorFlow functions
from tfpolicies.compat.preprocessors import make_flat_space
from tfpolicies.errors import ModelError, UnsupportedMethodError
from tfpolicies.models.catalog.build import build_model
from tfpolicies.models.model_config import complete_model_config, without_memory
from tfpolicies.models.preprocessing import get_encoded_shape
from tfpolicies.models.spaces import flat_size, leaves, unflatten

Columns = dict[str, Any]
"""The inputs of `forward`, by name."""

StateTensors = list[tf.Tensor]
ForwardOutputs = tuple[tf.Tensor, StateTensors]
"""The result of `forward`."""


class InputDict(dict[str, Any]):
    """The inputs of `forward`, by column name.

    `obs` is encoded (float32; discrete parts one-hot) and nested as the observation space is;
    `obs_flat` `[N, F]` has the same values in one tensor. Each view that a model requires is a
    separate column, such as `prev_actions` and `prev_rewards` `[N]`, or `prev_n_obs` `[N, n, ...]`.
    Views of observations have the form of `obs`, and actions are integers. All entries of an action
    mask are 1: the mask is applied to the outputs of `forward`.

    Attributes:
        is_training: whether layers such as Dropout are in training mode; also an item.
    """

    def __init__(self, columns: Mapping[str, Any], *, is_training: bool = False) -> None:
        super().__init__(columns)
        self.is_training = is_training
        self["is_training"] = is_training


class TFModelV2:
    """A model in RLlib's form: `forward` and `value_function` use layers in attributes.

    Register the class by `ModelCatalog.register_custom_model`. Make layers, Keras models and other
    `TFModelV2` objects in the constructor, and keep them as attributes (also in lists and
    dicts): those are trained.

    Args:
        obs_space: the observations of `forward`: a Box itself; for other spaces a flat Box whose
            `original_space` is the environment's.
        action_space: the environment's.
        num_outputs: the number of outputs of `forward` per row.
        model_config: the complete `model` config.
        name: a name.

    Attributes:
        view_requirements: further inputs of the model while it acts, by name: `obs` up to shift 0,
            `actions` and `rewards` up to -1. With `used_for_compute_actions=False` only the loss
            gets them.
    """

    def __init__(
        self,
        obs_space: gym.Space,
        action_space: gym.Space,
        num_outputs: int | None,
        model_config: Mapping[str, Any],
        name: str,
    ) -> None:
        self.obs_space: Any = obs_space
        self.action_space: Any = action_space
        self.num_outputs = num_outputs
        self.model_config = dict(model_config)
        self.name = name
        self.framework = "tf"
        self.time_major = False
        self.view_requirements = {"obs": ViewRequirement(shift=0)}
        self._last_output: Any = None

    def __call__(
        self,
        input_dict: Mapping[str, Any],
        state: Sequence[tf.Tensor] | None = None,
        seq_lens: tf.Tensor | None = None,
    ) -> ForwardOutputs:
        """Adds `obs_flat` to the inputs, and returns the result of `forward`.

        Args:
            input_dict: has `obs`, nested as the original of `obs_space` is, or flat `[N, F]`.
            state: the recurrent state before, `[S, ...]` each.
            seq_lens: int32 `[S]`.

        Raises:
            ModelError: if `forward` does not return a pair, or `obs` is flat with another width.
        """
        training = bool(input_dict.get("is_training", False))
        columns = InputDict(input_dict, is_training=training)
        columns["obs"] = restore_original_dimensions(columns["obs"], self.obs_space)
        columns["obs_flat"] = flatten_observation(columns["obs"])
        result = self.forward(columns, list(state or []), seq_lens)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ModelError(
                f"{type(self).__name__}.forward must return a pair (outputs [N, num_outputs], "
                f"state), got {type(result).__name__}. Write `return outputs, state`."
            )
        outputs, next_state = result
        self._last_output = outputs
        return outputs, list(next_state) or list(state or [])

    def forward(
        self, input_dict: Columns, state: StateTensors, seq_lens: tf.Tensor | None
    ) -> ForwardOutputs:
        """Returns `(outputs [N, num_outputs], next state [S, ...])`; to be overridden.

        Args:
            input_dict: see `InputDict`. For recurrent models N = S * T rows are S sequences of
                T steps, one after the other.
            state: the recurrent state before, `[S, ...]` each.
            seq_lens: int32 `[S]`, the true lengths; None for models that are not recurrent.
        """
        raise UnsupportedMethodError(
            f"{type(self).__name__} has no `forward(self, input_dict, state, seq_lens)`; it must "
            "return (outputs [N, num_outputs], state)."
        )

    def value_function(self) -> tf.Tensor:
        """Returns the values `[N]` of the last `forward`.

        If a model does not override it and the algorithm needs values, the catalog adds a separate
        value network.
        """
        raise UnsupportedMethodError(
            f"{type(self).__name__} has no `value_function(self)`; keep the values in `forward` "
            "and return them, of shape [N]."
        )

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns zeros of the shapes of the recurrent state, without a batch axis; [] for none."""
        return []

    def register_variables(self, variables: Sequence[Any]) -> None:
        """Does nothing: variables of layers in attributes are found automatically."""

    def custom_loss(
        self, policy_loss: list[tf.Tensor], loss_inputs: Mapping[str, Any]
    ) -> list[tf.Tensor] | tf.Tensor:
        """Returns the losses to minimise, given those of the policy; traced, as `forward` is.

        By default, returns `policy_loss`. Tensors stored by `forward` are from the last call in the
        loss.

        Args:
            policy_loss: a list of scalars, one unless the policy class has several optimizers.
            loss_inputs: the columns of the minibatch as tensors `[N, ...]`; `obs` and `new_obs` in
                the form that `forward` gets. Weight rows by `loss_mask` `[N]`: recurrent models
                require it, and others learn faster, since XLA can compile that.

        Returns:
            The same number of scalars; a single one need not be in a list.
        """
        del loss_inputs
        return policy_loss

    def metrics(self) -> dict[str, Any]:
        """Returns scalars by name, reported as the learning statistics `model/<name>`.

        It is called after `custom_loss`, and traced with it: store tensors in `custom_loss`, and
        return them here.
        """
        return {}

    @property
    def class_name(self) -> str:
        """The name of the user's class."""
        return type(self).__name__

    @property
    def has_custom_loss(self) -> bool:
        """Whether `custom_loss` is overridden."""
        return getattr(self.custom_loss, "__func__", None) is not TFModelV2.custom_loss

    @property
    def has_value_function(self) -> bool:
        """Whether `value_function` is overridden."""
        return type(self).value_function is not TFModelV2.value_function

    @property
    def inference_view_requirements(self) -> dict[str, ViewRequirement]:
        """The `view_requirements` that acting reads."""
        return select_acting_views(self.view_requirements)

    def is_time_major(self) -> bool:
        """Returns False: rows are S sequences of T steps."""
        return False

    def last_output(self) -> Any:
        """Returns the outputs of the last call."""
        return self._last_output

    def context(self) -> AbstractContextManager[None]:
        """Returns a no-op context."""
        return nullcontext()

    def variables(self, as_dict: bool = False) -> Any:
        """Returns the variables of all layers, as a list or by name: `attribute.layer.kernel:0`."""
        return _get_variables(self, "variables", as_dict)

    def trainable_variables(self, as_dict: bool = False) -> Any:
        """Returns the trainable variables, as a list or by name."""
        return _get_variables(self, "trainable_variables", as_dict)


ModelV2 = TFModelV2
"""RLlib's base class of models of all frameworks, for example in `@override(ModelV2)`."""


class RecurrentNetwork(TFModelV2):
    """A recurrent model that processes sequences in `forward_rnn`."""

    def forward(
        self, input_dict: Columns, state: StateTensors, seq_lens: tf.Tensor | None
    ) -> ForwardOutputs:
        sequences = add_time_dimension(input_dict["obs_flat"], seq_lens=seq_lens)
        outputs, next_state = self.forward_rnn(sequences, state, seq_lens)
        return tf.reshape(outputs, [-1, outputs.shape[-1]]), next_state

    def forward_rnn(
        self, inputs: tf.Tensor, state: StateTensors, seq_lens: tf.Tensor
    ) -> ForwardOutputs:
        """Returns `(outputs [S, T, num_outputs], next state)`; to be overridden.

        Steps after a sequence's true length must not change the state: mask them.

        Args:
            inputs: observations `[S, T, F]`.
            state: the recurrent state before, `[S, ...]` each.
            seq_lens: int32 `[S]`, the true lengths.
        """
        raise UnsupportedMethodError(
            f"{type(self).__name__} has no `forward_rnn(self, inputs, state, seq_lens)`; it must "
            "return (outputs [S, T, num_outputs], state)."
        )


class _CatalogNetwork(TFModelV2):
    """A catalog model with a value; `_get_input` computes its input."""

    def __init__(
        self,
        obs_space: gym.Space,
        action_space: gym.Space,
        num_outputs: int | None,
        model_config: Mapping[str, Any],
        name: str,
    ) -> None:
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        space = self._get_input_space(obs_space)
        self.base_model, self.num_outputs = _build_catalog_model(space, num_outputs, model_config)
        self._value: Any = None

    def _get_input_space(self, obs_space: gym.Space) -> gym.Space:
        return make_flat_space(obs_space)

    def _get_input(self, input_dict: Columns) -> tf.Tensor:
        """Returns the catalog model's input, float32 `[N, ...]`."""
        return input_dict["obs_flat"]

    def forward(
        self, input_dict: Columns, state: StateTensors, seq_lens: tf.Tensor | None
    ) -> ForwardOutputs:
        outputs, self._value = self.base_model(self._get_input(input_dict))
        return outputs, state

    def value_function(self) -> tf.Tensor:
        return tf.reshape(self._value, [-1])


class FullyConnectedNetwork(_CatalogNetwork):
    """The catalog's dense layers and a value, as a part of other models or as a whole model.

    Args:
        obs_space: the space; it is flattened.
        action_space: stored.
        num_outputs: units of the output; None: the output is the last hidden layer.
        model_config: `model` settings. Missing ones disable their feature, so that `{}` gives one
            linear layer for the output and one for the value: no hidden layers, no activation.
        name: a name.
    """


class VisionNetwork(_CatalogNetwork):
    """The catalog's convolutions and a value, with the arguments of `FullyConnectedNetwork`.

    The observation is an image, its pixels from 0 to 255 if they are uint8.
    """

    def _get_input_space(self, obs_space: gym.Space) -> gym.Space:
        return obs_space

    def _get_input(self, input_dict: dict[str, Any]) -> tf.Tensor:
        scale = 255.0 if self.obs_space.dtype == np.uint8 else 1.0
        return tf.cast(input_dict["obs"], tf.float32) / scale


class DistributionalQTFModel(TFModelV2):
    """A model for DQN: `forward` gives features `[N, num_outputs]`, or with `hiddens=[]` Q-values.

    The arguments that follow `name` belong to RLlib's own heads and are not used.
    """

    def __init__(
        self,
        obs_space: gym.Space,
        action_space: gym.Space,
        num_outputs: int | None,
        model_config: Mapping[str, Any],
        name: str,
        **heads: Any,
    ) -> None:
        super().__init__(obs_space, action_space, num_outputs, model_config, name)


def restore_original_dimensions(obs: Any, obs_space: Any, tensorlib: Any = None) -> Any:
    """Returns observations nested as the original space is.

    Args:
        obs: a flat tensor or array `[..., F]`; nested observations are returned unchanged.
        obs_space: the original space, or one with the attribute `original_space`. If it is not a
            Dict or Tuple, `obs` is returned unchanged.
        tensorlib: `"numpy"`, or NumPy itself, gives arrays; otherwise tensors.

    Raises:
        ModelError: if the number of columns of `obs` is not that of the space.

    >>> both = gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (2, 1))])
    >>> restore_original_dimensions(np.array([[0, 1, 5, 6]]), both, "numpy")
    (array([[0, 1]]), array([[[5],
            [6]]]))
    """
    space = getattr(obs_space, "original_space", obs_space)
    is_nested = isinstance(space, gym.spaces.Dict | gym.spaces.Tuple)
    if not is_nested or isinstance(obs, Mapping | tuple | list):
        return obs
    space_leaves = leaves(space)
    sizes = [flat_size(leaf) for leaf in space_leaves]
    if obs.shape[-1] != sum(sizes):
        raise ModelError(
            f"Flat observations of {space} must have {sum(sizes)} columns, got the shape "
            f"{tuple(obs.shape)}. Give input_dict['obs'] or ['obs_flat'] of the model."
        )
    parts = zip(space_leaves, tf.split(obs, sizes, axis=-1), strict=True)
    nested = unflatten(
        space, [_reshape_rows(part, get_encoded_shape(leaf)) for leaf, part in parts]
    )
    return tf.nest.map_structure(np.asarray, nested) if tensorlib in ("numpy", np) else nested


def _reshape_rows(rows: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns rows `[..., F]` as `[..., *shape]`."""
    return tf.reshape(rows, tf.concat([tf.shape(rows)[:-1], tf.constant(shape, tf.int32)], 0))


def add_time_dimension(
    padded_inputs: tf.Tensor, *, seq_lens: Any, framework: str = "tf", time_major: bool = False
) -> tf.Tensor:
    """Reshapes rows `[S * T, ...]` to sequences `[S, T, ...]`.

    Args:
        padded_inputs: rows, sequence by sequence.
        seq_lens: `[S]`; its length is the number of sequences.
        framework: accepted for ported code.
        time_major: must be False.

    Raises:
        ModelError: if `time_major` is True.
    """
    del framework
    if time_major:
        raise ModelError("time_major must be False, got True: sequences are always [S, T, ...].")
    shape = tf.shape(padded_inputs)
    count = tf.shape(seq_lens)[0]
    leading_shape = tf.stack([count, shape[0] // tf.maximum(count, 1)])
    folded = tf.reshape(padded_inputs, tf.concat([leading_shape, shape[1:]], axis=0))
    return tf.ensure_shape(folded, [None, None, *padded_inputs.shape[1:]])


def flatten_observation(obs: Any) -> tf.Tensor:
    """Returns an observation, nested or not, as one tensor `[N, F]`, in its own order."""
    if isinstance(obs, Mapping | tuple | list):
        parts = obs.values() if isinstance(obs, Mapping) else obs
        return tf.concat([flatten_observation(part) for part in parts], axis=-1)
    rows = tf.cast(obs, tf.float32)
    return tf.reshape(rows, [tf.shape(rows)[0], math.prod(rows.shape[1:])])


def select_acting_views(views: Mapping[str, ViewRequirement]) -> dict[str, ViewRequirement]:
    """Returns the view requirements that acting reads, by name."""
    return {name: view for name, view in views.items() if view.used_for_compute_actions}


def find_named_parts(model: TFModelV2) -> list[tuple[str, Any]]:
    """Returns the Keras layers and variables, and TensorFlow variables, in a model, with names.

    Attributes of `TFModelV2` objects, lists, tuples and dicts are searched, each only once. A
    name is `attribute`, `list_0`, `dict_key` or `model.attribute`.
    """
    result: list[tuple[str, Any]] = []
    visited: set[int] = set()

    def walk(name: str, value: Any) -> None:
        if id(value) in visited:
            return
        visited.add(id(value))
        if isinstance(value, keras.layers.Layer | keras.Variable | tf.Variable):
            result.append((name, value))
        elif isinstance(value, TFModelV2):
            for key, part in vars(value).items():
                walk(f"{name}.{key}" if name else key, part)
        elif isinstance(value, Mapping | list | tuple):
            items = value if isinstance(value, Mapping) else dict(enumerate(value))
            for number, part in items.items():
                walk(f"{name}_{number}", part)

    walk("", model)
    return result


def find_parts(model: TFModelV2) -> list[Any]:
    """Returns the layers and variables in a model, see `find_named_parts`."""
    return [part for _, part in find_named_parts(model)]


def _get_variables(model: TFModelV2, kind: str, as_dict: bool) -> Any:
    variables_by_name = {
        f"{name}.{variable.path.replace('/', '.')}:0": variable
        for name, part in find_named_parts(model)
        for variable in getattr(part, kind, [])
    }
    return variables_by_name if as_dict else list(variables_by_name.values())


_SETTINGS_IF_MISSING: dict[str, Any] = {
    "fcnet_hiddens": [],
    "fcnet_activation": None,
    "post_fcnet_activation": None,
    "conv_activation": None,
    "vf_share_layers": False,
}
"""Values of settings that are missing in the `model_config` of a part of a model."""


def _build_catalog_model(
    space: gym.Space, num_outputs: int | None, config: Mapping[str, Any]
) -> tuple[Any, int]:
    """Returns a model of the catalog with a value, and its number of outputs."""
    merged = {**_SETTINGS_IF_MISSING, **config, "custom_model": None, "custom_model_config": {}}
    settings = without_memory(merged)  # the whole model may add an LSTM or attention
    if num_outputs is None:
        hidden = [*complete_model_config(settings)["fcnet_hiddens"]]
        hidden += complete_model_config(settings)["post_fcnet_hiddens"]
        if not hidden:
            raise ModelError(
                "num_outputs must be an integer if no hidden layer can become the output, got None."
            )
        num_outputs, settings["no_final_linear"] = hidden[-1], True
    return build_model(leaves(space), num_outputs, settings, with_value=True), num_outputs
