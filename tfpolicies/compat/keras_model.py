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
from tfpolicies.batch.view_defaults import with_memory
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.compat.tf_model import Columns, Memory, Outputs, TFModelV2, acting
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.actor_critic import value_of
from tfpolicies.models.adapted import AdaptedModel
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.models.views import ViewsRead, declared


def is_ported_class(given: Any) -> bool:
    """Returns whether a class is a Keras model made from `input_space` and `action_space`."""
    is_class = isinstance(given, type) and issubclass(given, keras.Model)
    return is_class and "input_space" in inspect.signature(given.__init__).parameters


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
        self.view_requirements.update(declared(self.base_model))
        self._values: Any = None

    def __getattr__(self, name: str) -> Any:
        """Returns the Keras model's attribute of that name."""
        if name.startswith("_") or "base_model" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base_model, name)

    @property
    def class_name(self) -> str:
        """The name of the Keras model's class."""
        return type(self.base_model).__name__

    @property
    def gives_value(self) -> bool:
        """Whether the last call returned values."""
        return self._values is not None

    def forward(self, input_dict: Columns, state: Memory, seq_lens: tf.Tensor | None) -> Outputs:
        given = {name: x for name, x in input_dict.items() if name != "is_training"}
        given |= {f"{STATE_IN}{i}": x for i, x in enumerate(state)}
        if seq_lens is not None:
            given[SEQ_LENS] = seq_lens
        found = self.base_model(given, **self._training(input_dict))
        if not isinstance(found, tuple | list) or len(found) not in (2, 3):
            raise ModelError(
                f"{self.name}.call must return (outputs [N, num_outputs], state, extras), got "
                f"{type(found).__name__}. Write `return outputs, [], {{'vf_preds': values}}`."
            )
        outputs, after, *extras = found
        self._values = extras[0].get("vf_preds") if extras else None
        return outputs, list(after)

    def _training(self, input_dict: Mapping[str, Any]) -> dict[str, bool]:
        takes = "training" in inspect.signature(self.base_model.call).parameters
        return {"training": input_dict["is_training"]} if takes else {}

    def value_function(self) -> tf.Tensor:
        return tf.reshape(self._values, [-1])

    def get_initial_state(self) -> list[np.ndarray]:
        begin = getattr(type(self.base_model), "get_initial_state", None)
        return [] if begin is None else list(begin(self.base_model))


def as_tf_model(kind: type) -> Callable[..., TFModelV2]:
    """Returns a callable that makes a `TFModelV2` of a ported class, with the same arguments."""
    return kind if issubclass(kind, TFModelV2) else functools.partial(KerasAsTFModel, kind)


# -- attributes of `policy.model` -----------------------------------------------------------------


def prepare_model(policy: Any, model: keras.Model) -> None:
    """Adds the attributes of a `TFModelV2` to a policy's Keras model, for ported code.

    They are `base_model`, `view_requirements`, `inference_view_requirements`, `is_time_major()`,
    and `value_function()`: the values `[N]` of the last call that was not traced. Its attributes
    are not part of the model: they are neither stored nor copied with it.
    """
    if isinstance(model, AdaptedModel) or "is_time_major" in vars(model):
        return
    views = ViewsRead(_views_read(policy, model))
    last = _LastCall(model)
    read = {
        "base_model": model,
        "view_requirements": views,
        "inference_view_requirements": acting(views),
        "is_time_major": lambda: False,
        "value_function": last.values,
    }
    object.__setattr__(model, "call", last.call)  # Keras would keep track of attributes
    for name in (name for name in read if not hasattr(model, name)):
        object.__setattr__(model, name, read[name])


def _views_read(policy: Any, model: keras.Model) -> dict[str, ViewRequirement]:
    found = {"obs": ViewRequirement(space=policy.observation_space), **declared(model)}
    for view in policy.driver.acting.views:
        shift = view.shifts if view.is_window else view.shifts[0]
        found.setdefault(view.name, ViewRequirement(view.source, shift=shift))
    length = policy.config["model"]["max_seq_len"]
    return with_memory(found, policy.get_initial_state(), max_seq_len=length)


class _LastCall:
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
        given = inputs["obs"] if is_row_dict and not self._takes_dict else inputs
        outputs = self._call(given, *args, **kwargs)
        if tf.executing_eagerly():
            self._outputs = outputs
        return outputs

    def values(self) -> tf.Tensor:
        """Returns the values `[N]` of the last call.

        Raises:
            ConfigError: if there was none, or the model gives no values.
        """
        values = value_of(self._outputs)
        if values is None:
            what = "was not called yet" if self._outputs is None else "has no value output"
            raise ConfigError(
                f"policy.model.value_function(): the model {self._name!r} {what}. Call "
                "policy.model({'obs': rows}) of a policy with values first."
            )
        return tf.reshape(values, [-1])
