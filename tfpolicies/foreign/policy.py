"""A policy that acts with an imported model, and never changes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import (
    CheckpointError,
    FrozenPolicyError,
    ModelImportError,
    NotOfferedError,
)
from tfpolicies.foreign.model import ForeignModel
from tfpolicies.foreign.wiring import LOGITS, Wiring, choices
from tfpolicies.models.action_mapping import ActionMapping
from tfpolicies.models.spaces import action_leaves, batch_leaves, leaves, nest
from tfpolicies.policy.policy import ActionBatch, Policy
from tfpolicies.type_aliases import Structure

IMPORTED = "imported"
"""The setting that holds a policy's model."""


class Imported(NamedTuple):
    """An imported model with the mapping of its inputs and outputs."""

    model: ForeignModel
    wiring: Wiring


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
        found = config.get(IMPORTED)
        if not isinstance(found, Imported):
            raise CheckpointError(
                "A checkpoint does not hold the model of an imported policy. Import it again by "
                "`import_policy`, and give config={'imported': policy.config['imported']}."
            )
        super().__init__(observation_space, action_space, config)
        self.generator = np.random.default_rng(config.get("seed"))
        self._model, self._wiring = found
        self._seen, self._acted = leaves(observation_space), action_leaves(action_space)
        self._dtypes = {x.name: x.dtype for x in self._model.inputs}

    def _not_offered(self, method: str) -> NotOfferedError:
        return NotOfferedError(
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
        obs = batch_leaves(self._seen, obs_batch, "obs_batch")
        rows, wiring = len(obs[0]), self._wiring
        memory = state_batches or [np.repeat(x[None], rows, 0) for x in wiring.memory]
        given = dict(zip(wiring.obs, obs, strict=True))
        given |= self._before(prev_action_batch, prev_reward_batch, rows)
        if wiring.has_time:
            given = {name: x[:, None] for name, x in given.items()}
        given |= dict(zip(wiring.memory_in, memory, strict=True))
        given |= {name: np.full(rows, value) for name, value in wiring.constants.items()}
        feed = {name: np.asarray(x, self._dtypes[name]) for name, x in given.items()}
        found = self._model.in_rows(feed, rows)
        self._require_rows(found, rows)
        after = [found[name] for name in wiring.memory_out]
        outputs = {name: found[output] for name, output in wiring.extras.items()}
        extras = {name: x[:, 0] if wiring.has_time else x for name, x in outputs.items()}
        explore = bool(self.config.get("explore")) if explore is None else explore
        chosen = nest(self.action_space, self._chosen(found, rows, explore))
        return ActionBatch(chosen, after, extras)

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns the recurrent state at the start of an episode."""
        return [x.copy() for x in self._wiring.memory]

    def compute_gradients(
        self, postprocessed_batch: SampleBatch
    ) -> tuple[list[Any], dict[str, Any]]:
        """Raises a `FrozenPolicyError`: an imported policy does not learn."""
        raise self._frozen()

    def apply_gradients(self, gradients: Sequence[Any]) -> None:
        """Raises a `FrozenPolicyError`: an imported policy does not learn."""
        raise self._frozen()

    def set_weights(self, weights: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> None:
        """Raises a `FrozenPolicyError` unless `weights` is empty: the model cannot be changed."""
        if weights:
            raise self._frozen()

    def __deepcopy__(self, memo: dict[int, Any]) -> ImportedPolicy:
        """Returns a copy that shares the model, which never changes."""
        twin = copy.copy(self)
        twin.config = {**self.config}
        twin.generator = copy.deepcopy(self.generator, memo)
        return twin

    def _frozen(self) -> FrozenPolicyError:
        return FrozenPolicyError(
            f"The policy {self.policy_id!r} is imported: it acts, but neither learns nor accepts "
            "other weights. Leave it out of `policies_to_train`; to continue training, give the "
            "network as model={'custom_model': ...} to a policy of this package."
        )

    def _before(
        self, actions: Structure | None, rewards: Structure | None, rows: int
    ) -> dict[str, np.ndarray]:
        """Returns the inputs from the last step that the model reads; zeros where they are None."""
        earned = np.zeros(rows) if rewards is None else np.asarray(rewards)
        found = dict.fromkeys(self._wiring.rewards, earned)
        if not self._wiring.previous:
            return found
        if actions is None:
            last = [np.zeros((rows, *leaf.shape)) for leaf in self._acted]
        else:
            mapping = ActionMapping(self.action_space, normalize=True, clip=False)
            last = mapping.from_env(batch_leaves(self._acted, actions, "prev_action_batch"))
        return found | dict(zip(self._wiring.previous, last, strict=True))

    def _require_rows(self, outputs: Mapping[str, np.ndarray], rows: int) -> None:
        """Checks the shapes of the outputs, since a file may declare other shapes.

        Raises:
            ModelImportError: if an output has another number of rows, or rows of another size.
        """
        wiring = self._wiring
        if wiring.kind == LOGITS:
            sizes = {wiring.outputs[0]: sum(choices(self.action_space))}
        else:
            pairs = zip(wiring.outputs, self._acted, strict=True)
            sizes = {name: math.prod(leaf.shape) for name, leaf in pairs}
        memory = zip(wiring.memory_out, wiring.memory, strict=True)
        sizes |= {name: each.size for name, each in memory}
        for name in [*sizes, *wiring.extras.values()]:
            shape, size = outputs[name].shape, sizes.get(name)
            if shape[:1] != (rows,) or size not in (None, math.prod(shape[1:])):
                raise ModelImportError(
                    f"{self._model.source} does not match its signature: its output {name!r} has "
                    f"the shape {list(shape)} for {rows} rows. Save it again."
                )

    def _chosen(
        self, found: Mapping[str, np.ndarray], rows: int, explore: bool
    ) -> list[np.ndarray]:
        if self._wiring.kind == LOGITS:
            return [self._drawn(found[self._wiring.outputs[0]], explore)]
        pairs = zip(self._wiring.outputs, self._acted, strict=True)
        return [found[name].reshape(rows, *leaf.shape).astype(leaf.dtype) for name, leaf in pairs]

    def _drawn(self, logits: np.ndarray, explore: bool) -> np.ndarray:
        """Returns the most likely choices, or samples with `explore`, in the environment's units.

        Samples are the argmax of logits plus Gumbel noise.
        """
        (leaf,), sizes = self._acted, choices(self.action_space)
        noisy = logits + self.generator.gumbel(size=logits.shape) if explore else logits
        parts = np.split(noisy, np.cumsum(sizes)[:-1], axis=1)
        best = np.stack([part.argmax(axis=1) for part in parts], axis=1)
        chosen = best.reshape(len(logits), *leaf.shape) + getattr(leaf.space, "start", 0)
        return chosen.astype(leaf.dtype)
