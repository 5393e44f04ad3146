"""Keras models in ported code: classes in RLlib's form, and attributes of `policy.model`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpolicies.batch.layout import STATE_IN
from tfpolicies.batch.view_defaults import add_state_views
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.compat.tf_model import (
    Columns,
    ForwardOutputs,
    StateTensors,
    TFModelV2,
    select_acting_views,
)
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.actor_critic_model import get_value
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.models.view_requirements import DerivedViewRequirements, get_view_requirements
from tfpolicies.models.wrapped_model import WrappedModel


def is_rllib_keras_class(model_class: Any) -> bool:
    """Returns whether a class is a Keras model made from `input_space` and `action_space`."""
    is_class = isinstance(model_class, type) and issubclass(model_class, keras.Model)
    return is_class and "input_space" in inspect.signature(model_class.__init__).parameters


class KerasAsTFModel(TFModelV2):
    """A `TFModelV2` that calls a Keras model in RLlib's form.

    The Keras model is called with a dict of the inputs of `forward` that are tensors: rows `[N,
    ...]` of `obs` and others, with `state_in_0`, ... and `seq_lens` for recurrent models. The state
    has the form of its `get_initial_state`. It returns `(outputs [N, num_outputs], next state)`,
    and optionally a dict as a third part, in which `vf_preds` `[N]` are the values.

    Args:
        kind: the class of the Keras model.
        *arguments: those of a `TFModelV2`.
        **custom_model_config: for `kind`.
    """

    def __init__(
        self, kind: type[keras.Model], *arguments: Any, **custom_model_config: Any
    ) -> None:
        super().__init__(*arguments)
        self.base_model = kind(
            input_space=self.obs_space,
            action_space=self.action_space,
            num_outputs=self.num_outputs,
            name=self.name,
            **custom_model_config,
        )
        self.view_requirements.update(get_view_requirements(self.base_model))
        self._values: Any = None

    def __getattr__(self, name: str) -> Any:
        """Returns the Keras model's attribute of that name."""
        if name.startswith("_") or "base_model" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base_model, name)

    @property
    def class_name(self) -> str:
        return type(self.base_model).__name__

    @property
    def has_value_function(self) -> bool:
        """Whether the last call returned values."""
        return self._values is not None

    def forward(
        self, input_dict: Columns, state: StateTensors, seq_lens: tf.Tensor | None
    ) -> ForwardOutputs:
        columns = {name: x for name, x in input_dict.items() if name != "is_training"}
        columns |= {f"{STATE_IN}{i}": x for i, x in enumerate(state)}
        if seq_lens is not None:
            columns[SEQ_LENS] = seq_lens
        result = self.base_model(columns, **self._get_training_argument(input_dict))
        if not isinstance(result, tuple | list) or len(result) not in (2, 3):
            raise ModelError(
                f"{self.name}.call must return (outputs [N, num_outputs], state, extras), got "
                f"{type(result).__name__}. Write `return outputs, [], {{'vf_preds': values}}`."
            )
        outputs, next_state, *extras = result
        self._values = extras[0].get("vf_preds") if extras else None
        return outputs, list(next_state)

    def _get_training_argument(self, input_dict: Mapping[str, Any]) -> dict[str, bool]:
        accepts_training = "training" in inspect.signature(self.base_model.call).parameters
        return {"training": input_dict["is_training"]} if accepts_training else {}

    def value_function(self) -> tf.Tensor:
        return tf.reshape(self._values, [-1])

    def get_initial_state(self) -> list[np.ndarray]:
        method = getattr(type(self.base_model), "get_initial_state", None)
        return [] if method is None else list(method(self.base_model))


def get_tf_model_factory(kind: type) -> Callable[..., TFModelV2]:
    """Returns a callable that makes a `TFModelV2` of a ported class, with the same arguments."""
    return kind if issubclass(kind, TFModelV2) else functools.partial(KerasAsTFModel, kind)


# -- attributes of `policy.model` -----------------------------------------------------------------


def prepare_model(policy: Any, model: keras.Model) -> None:
    """Adds the attributes of a `TFModelV2` to a policy's Keras model, for ported code.

    They are `base_model`, `view_requirements`, `inference_view_requirements`, `is_time_major()`,
    and `value_function()`: the values `[N]` of the last call that was not traced. Its attributes
    are not part of the model: they are neither stored nor copied with it.
    """
    if isinstance(model, WrappedModel) or "is_time_major" in vars(model):
        return
    views = DerivedViewRequirements(_collect_views(policy, model))
    recorder = _CallRecorder(model)
    attributes = {
        "base_model": model,
        "view_requirements": views,
        "inference_view_requirements": select_acting_views(views),
        "is_time_major": lambda: False,
        "value_function": recorder.get_values,
    }
    object.__setattr__(model, "call", recorder.call)  # Keras would keep track of attributes
    for name in (name for name in attributes if not hasattr(model, name)):
        object.__setattr__(model, name, attributes[name])


def _collect_views(policy: Any, model: keras.Model) -> dict[str, ViewRequirement]:
    result = {
        "obs": ViewRequirement(space=policy.observation_space),
        **get_view_requirements(model),
    }
    for view in policy.driver.acting.views:
        shift = view.shifts if view.is_window else view.shifts[0]
        result.setdefault(view.name, ViewRequirement(view.source, shift=shift))
    length = policy.config["model"]["max_seq_len"]
    return add_state_views(result, policy.get_initial_state(), max_seq_len=length)


class _CallRecorder:
    """Records the outputs of the last eager call of a Keras model.

    Args:
        model: the model; its calls must go through `call`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._name = model.name
        self._call = model.call
        self._takes_dict = isinstance(getattr(model, "_inputs_struct", None), Mapping)
        self._outputs: Any = None

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; `{"obs": rows}` is accepted in place of the rows."""
        is_row_dict = isinstance(inputs, Mapping) and [*inputs] == ["obs"]
        model_input = inputs["obs"] if is_row_dict and not self._takes_dict else inputs
        outputs = self._call(model_input, *args, **kwargs)
        if tf.executing_eagerly():
            self._outputs = outputs
        return outputs

    def get_values(self) -> tf.Tensor:
        values = get_value(self._outputs)
        if values is None:
            problem = "was not called yet" if self._outputs is None else "has no value output"
            raise ConfigError(
                f"policy.model.value_function(): the model {self._name!r} {problem}. Call "
                "policy.model({'obs': rows}) of a policy with values first."
            )
        return tf.reshape(values, [-1])
