"""A policy that acts with an imported model, and never changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import (
    CheckpointError,
    FrozenPolicyError,
    ModelImportError,
    UnsupportedMethodError,
)
from tfpolicies.importers.imported_model import ImportedModel
from tfpolicies.importers.io_mapping import LOGITS, IOMapping, count_choices
from tfpolicies.models.action_mapping import ActionMapping
from tfpolicies.models.spaces import action_leaves, batch_leaves, leaves, unflatten
from tfpolicies.policy.policy import ActionBatch, Policy

MODEL_SETTING = "imported"
"""The setting that holds a policy's model."""


class MappedModel(NamedTuple):
    """An imported model with the mapping of its inputs and outputs."""

    model: ImportedModel
    io_mapping: IOMapping


class ImportedPolicy(Policy):
    """Acts with an imported model: in evaluations, in a policy map, and as an opponent.

    It never learns. `import_policy` makes it. A checkpoint holds its settings, but not the model.
    Pass the model when loading it: `config={"imported": policy.config["imported"]}`.

    Args:
        observation_space: the space of the model's observations.
        action_space: the space of its actions.
        config: settings; `imported` is the model.

    Raises:
        CheckpointError: if there is no model.
    """

    def __init__(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        mapped_model = config.get(MODEL_SETTING)
        if not isinstance(mapped_model, MappedModel):
            raise CheckpointError(
                "A checkpoint does not hold the model of an imported policy. Import it again by "
                "`import_policy`, and give config={'imported': policy.config['imported']}."
            )
        super().__init__(observation_space, action_space, config)
        self.generator = np.random.default_rng(config.get("seed"))
        self._model, self._io_mapping = mapped_model
        self._obs_leaves, self._action_leaves = (
            leaves(observation_space),
            action_leaves(action_space),
        )
        self._dtypes = {x.name: x.dtype for x in self._model.inputs}

    def _not_offered_error(self, method: str) -> UnsupportedMethodError:
        return UnsupportedMethodError(
            f"Imported policies have no `{method}`: their model cannot be changed. Use the file "
            "that you imported, or build a policy around a Keras model, by "
            "model={'custom_model': ...}."
        )

    def compute_actions(
        self,
        obs_batch: Structure,
        state_batches: Sequence[np.ndarray] | None = None,
        prev_action_batch: Structure | None = None,
        prev_reward_batch: Structure | None = None,
        info_batch: Any = None,
        episodes: Any = None,
        explore: bool | None = None,
        timestep: int | None = None,
        **kwargs: object,
    ) -> ActionBatch:
        """Chooses one action for each row; see `Policy.compute_actions`.

        With `explore`, actions are drawn if the model gives logits; otherwise they are its outputs.

        Raises:
            ModelImportError: if the model returns another number of rows, or rows of another size.
        """
        obs = batch_leaves(self._obs_leaves, obs_batch, "obs_batch")
        rows, io_mapping = len(obs[0]), self._io_mapping
        state = state_batches or [np.repeat(x[None], rows, 0) for x in io_mapping.initial_state]
        inputs = dict(zip(io_mapping.obs, obs, strict=True))
        inputs |= self._make_previous_inputs(prev_action_batch, prev_reward_batch, rows)
        if io_mapping.has_time_axis:
            inputs = {name: x[:, None] for name, x in inputs.items()}
        inputs |= dict(zip(io_mapping.state_inputs, state, strict=True))
        inputs |= {name: np.full(rows, value) for name, value in io_mapping.constants.items()}
        feed = {name: np.asarray(x, self._dtypes[name]) for name, x in inputs.items()}
        model_outputs = self._model.run_rows(feed, rows)
        self._require_rows(model_outputs, rows)
        next_state = [model_outputs[name] for name in io_mapping.state_outputs]
        outputs = {name: model_outputs[output] for name, output in io_mapping.extras.items()}
        extras = {name: x[:, 0] if io_mapping.has_time_axis else x for name, x in outputs.items()}
        explore = bool(self.config.get("explore")) if explore is None else explore
        actions = unflatten(self.action_space, self._choose_actions(model_outputs, rows, explore))
        return ActionBatch(actions, next_state, extras)

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns the recurrent state at the start of an episode."""
        return [x.copy() for x in self._io_mapping.initial_state]

    def compute_gradients(
        self, postprocessed_batch: SampleBatch
    ) -> tuple[list[Any], dict[str, Any]]:
        """Raises a `FrozenPolicyError`: an imported policy does not learn."""
        raise self._make_frozen_error()

    def apply_gradients(self, gradients: Sequence[Any]) -> None:
        """Raises a `FrozenPolicyError`: an imported policy does not learn."""
        raise self._make_frozen_error()

    def set_weights(self, weights: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> None:
        """Raises a `FrozenPolicyError` unless `weights` is empty: the model cannot be changed."""
        if weights:
            raise self._make_frozen_error()

    def __deepcopy__(self, memo: dict[int, Any]) -> ImportedPolicy:
        """Returns a copy that shares the model, which never changes."""
        result = copy.copy(self)
        result.config = {**self.config}
        result.generator = copy.deepcopy(self.generator, memo)
        return result

    def _make_frozen_error(self) -> FrozenPolicyError:
        return FrozenPolicyError(
            f"The policy {self.policy_id!r} is imported: it acts, but neither learns nor accepts "
            "other weights. Leave it out of `policies_to_train`; to continue training, give the "
            "network as model={'custom_model': ...} to a policy of this package."
        )

    def _make_previous_inputs(
        self, actions: Structure | None, rewards: Structure | None, rows: int
    ) -> dict[str, np.ndarray]:
        """Returns the inputs from the last step that the model reads; zeros where they are None."""
        previous_rewards = np.zeros(rows) if rewards is None else np.asarray(rewards)
        result = dict.fromkeys(self._io_mapping.rewards, previous_rewards)
        if not self._io_mapping.previous_actions:
            return result
        if actions is None:
            previous_actions = [np.zeros((rows, *leaf.shape)) for leaf in self._action_leaves]
        else:
            mapping = ActionMapping(self.action_space, normalize=True, clip=False)
            previous_actions = mapping.from_env(
                batch_leaves(self._action_leaves, actions, "prev_action_batch")
            )
        return result | dict(zip(self._io_mapping.previous_actions, previous_actions, strict=True))

    def _require_rows(self, outputs: Mapping[str, np.ndarray], rows: int) -> None:
        """Checks the shapes of the outputs, since a file may declare other shapes."""
        io_mapping = self._io_mapping
        if io_mapping.kind == LOGITS:
            sizes = {io_mapping.outputs[0]: sum(count_choices(self.action_space))}
        else:
            pairs = zip(io_mapping.outputs, self._action_leaves, strict=True)
            sizes = {name: math.prod(leaf.shape) for name, leaf in pairs}
        state_pairs = zip(io_mapping.state_outputs, io_mapping.initial_state, strict=True)
        sizes |= {name: array.size for name, array in state_pairs}
        for name in [*sizes, *io_mapping.extras.values()]:
            shape, size = outputs[name].shape, sizes.get(name)
            if shape[:1] != (rows,) or size not in (None, math.prod(shape[1:])):
                raise ModelImportError(
                    f"{self._model.source} does not match its signature: its output {name!r} has "
                    f"the shape {list(shape)} for {rows} rows. Save it again."
                )

    def _choose_actions(
        self, outputs: Mapping[str, np.ndarray], rows: int, explore: bool
    ) -> list[np.ndarray]:
        if self._io_mapping.kind == LOGITS:
            return [self._sample_choices(outputs[self._io_mapping.outputs[0]], explore)]
        pairs = zip(self._io_mapping.outputs, self._action_leaves, strict=True)
        return [outputs[name].reshape(rows, *leaf.shape).astype(leaf.dtype) for name, leaf in pairs]

    def _sample_choices(self, logits: np.ndarray, explore: bool) -> np.ndarray:
        """Returns the most likely choices, or samples with `explore`, in the environment's units.

        Samples are the argmax of logits plus Gumbel noise.
        """
        (leaf,), sizes = self._action_leaves, count_choices(self.action_space)
        scores = logits + self.generator.gumbel(size=logits.shape) if explore else logits
        parts = np.split(scores, np.cumsum(sizes)[:-1], axis=1)
        best = np.stack([part.argmax(axis=1) for part in parts], axis=1)
        actions = best.reshape(len(logits), *leaf.shape) + getattr(leaf.space, "start", 0)
        return actions.astype(leaf.dtype)
