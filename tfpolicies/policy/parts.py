"""What drives a policy: three parts, which samplers, algorithms and maps talk to.

Each part has two implementations: one for policies with a Program (`acting.py`, `learning.py`,
`program_parts.py`), and one that calls the methods of the Policy page (`by_methods.py`), for
policies written by hand and for classes that override what the other one would bypass. A class
decides which one its policies have, so nobody asks what sort of policy there is. What returns
nothing does nothing where an implementation leaves it out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.models.ports import View


class Acting(Protocol):
    """Acts for those who step environments: samplers, sessions, evaluation, stacked acting.

    The memory at the start of an episode is `Policy.get_initial_state`.
    """

    @property
    def views(self) -> Sequence[View]:
        """What values and the model read besides the observation and the memory."""

    @property
    def given(self) -> Sequence[View]:
        """What `columns` is to be given of that."""

    @property
    def starts_alike(self) -> bool:
        """Whether all episodes begin with the same memory; else each asks for its own."""

    @property
    def asks_for_episodes(self) -> bool:
        """Whether `columns` is to be given the last infos and the episodes of its rows."""

    @property
    def follows_episodes(self) -> bool:
        """Whether `next_episode` must be called when an episode ends."""

    @property
    def inference(self) -> str | None:
        """The runtime that acts, "onnx" or "tf", with "auto" resolved; None without a Program."""

    @property
    def shared(self) -> Any:
        """What can act in one call with others of its kind; None where there is no such thing."""

    def columns(
        self,
        obs: Sequence[np.ndarray],
        seen: Sequence[np.ndarray] = (),
        states: Sequence[np.ndarray] = (),
        *,
        explore: bool | None = None,
        infos: Sequence[Any] | None = None,
        episodes: Sequence[Any] | None = None,
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Acts on inputs that are known to fit.

        Args:
            obs: observation leaves `[N, ...]`.
            seen: the leaves of the views that `given` names.
            states: the memory, `[N, ...]` each.
            explore: sample or be greedy; None takes `config["explore"]`.
            infos: the last info of each row, where `asks_for_episodes`.
            episodes: the episode of each row, likewise.

        Returns:
            Actions for the environment, and the columns to keep of each row: `actions` (one column
            per leaf), extras, and the new memory `state_out_<i>`. The arrays are valid until the
            next call.
        """

    def ahead(self, rows: int) -> AbstractContextManager[None]:
        """Returns a context in which acting is cheaper; what it gives stays the same.

        Args:
            rows: on which `columns` is to act in it, in all.
        """

    def to_env(
        self,
        actions: Sequence[np.ndarray],
        *,
        unsquash: bool | None = None,
        clip: bool | None = None,
    ) -> list[np.ndarray]:
        """Returns leaves of the policy's own actions as the environment takes them.

        Args:
            actions: `[N, *shape]` each.
            unsquash: see `Policy.env_action`.
            clip: likewise.
        """

    def next_episode(self) -> None:
        """Is told that an episode ended and the next one begins."""


class Learning(Protocol):
    """Lets a policy learn, and prepares what it learns from: for algorithms and workers."""

    @property
    def learns(self) -> bool:
        """Whether the class says how it learns."""

    @property
    def finds_non_finite(self) -> bool:
        """Whether an update that is not finite is found by the update itself."""

    @property
    def compiled_as(self) -> str | None:
        """How updates are compiled, in words; None without a Program."""

    @property
    def by_trajectory(self) -> bool:
        """Whether `postprocess_trajectory` must be called for each trajectory."""

    @property
    def lookahead(self) -> int:
        """How many rows behind a row its postprocessing reads, beyond the end of a fragment."""

    def settled_views(self) -> Mapping[str, ViewRequirement]:
        """Returns which views batches are to have; from now on that cannot be changed."""

    def columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns which columns of a batch are kept to learn from them later."""

    def train(
        self,
        batch: Any,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        standardize: Collection[str] = (),
    ) -> Mapping[str, Any]:
        """Learns from a whole train batch; returns the result as `learn_on_batch` gives it.

        Args:
            batch: a postprocessed batch of N rows.
            num_epochs: passes over the batch, where they are not the policy's own affair.
            minibatch_size: rows per update, likewise.
            shuffle: whether rows are shuffled, likewise.
            standardize: columns that get mean 0 and standard deviation 1 first, likewise.
        """

    def update(
        self,
        batch: Any,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        rng: np.random.Generator | None = None,
    ) -> Mapping[str, Any]:
        """Updates by all minibatches of all epochs; returns the result.

        Args:
            batch: a postprocessed batch of N rows.
            num_epochs: passes over the batch.
            minibatch_size: rows per update.
            shuffle: whether rows are shuffled.
            rng: shuffles the rows of a policy without a generator of its own.
        """

    def adapt(self, result: Mapping[str, Any]) -> None:
        """Adapts the policy's coefficients to what `train` returned, as its class says."""

    def replay(
        self, batch: Any, minibatch_size: int | None, follows: np.ndarray
    ) -> Mapping[str, Any]:
        """Updates by replayed rows, one minibatch after the other; returns the result.

        Args:
            batch: `[K * minibatch_size]` rows.
            minibatch_size: rows per update; None for one update of all, whose result also has what
                the loss records of each row.
            follows: bool `[K]`, whether target networks move behind each update.
        """

    def observe(self, obs: Sequence[np.ndarray], columns: Mapping[str, np.ndarray]) -> None:
        """Takes the rows of a sample into the filters, if there are any, until their next flush.

        Args:
            obs: observation leaves, `[N, T, ...]` each.
            columns: the other columns, `[N, T, ...]` each; rewards are the environment's.
        """

    def flush_filters(self) -> None:
        """Lets running statistics take effect, between two rounds of training."""

    def seen(self, obs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns observation leaves `[..., *shape]` as batches are to have them."""

    def scaled(self, rewards: np.ndarray) -> np.ndarray:
        """Returns rewards as batches are to have them: at the scale of a reward filter, if any."""

    def resolve(self) -> None:
        """Decides in the config what every "auto" becomes, as the first use would."""

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int | None) -> None:
        """Traces and compiles acting and learning for batches of `rows`; changes no numbers."""

    def take_seconds_loading(self) -> float:
        """Returns the seconds that loading batches for learning took since the last call."""


class Holding(Protocol):
    """Takes care of what a policy owns: for maps, paging, remote workers and checkpoints.

    `Policy.get_state`, `set_state`, `copy` and `close` are those of the page.
    """

    @property
    def state(self) -> Any:
        """The `PolicyState` that a `PolicyMap` may send to its stash; None if there is none."""

    @property
    def program(self) -> Any:
        """The `Program` that the policy shares with its kind; None if there is none."""

    @property
    def spaces(self) -> tuple[Any, Any]:
        """The spaces of observations and of actions; None for one that is not told."""

    @property
    def automatic(self) -> Collection[str]:
        """The settings that were "auto"."""

    @property
    def version(self) -> Any:
        """What is equal as long as the policy's numbers are; None if it does not tell."""

    @property
    def is_frozen(self) -> bool:
        """Whether the policy only acts; see `PolicyMap.freeze`."""

    @property
    def generator(self) -> np.random.Generator | None:
        """Draws action noise, and the order of minibatches; None if nobody knows of one.

        Learning that may overlap sampling has another generator for its own draws.
        """

    @property
    def filters(self) -> Mapping[str, Any]:
        """The running statistics `filter` (observations) and `reward_filter`, as far as there."""

    def acting_weights(self) -> Mapping[str, np.ndarray] | None:
        """Returns copies of what sampling needs of the weights; None if it needs all of them."""

    def apply_filters(self) -> None:
        """Acts and learns with the filters' present statistics from now on."""

    def accepting_non_finite(self) -> AbstractContextManager[None]:
        """Has `set_weights` and `set_state` take NaN and infinity for a while."""

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks that a state fits, and changes nothing; see `Policy.set_state` for the errors."""

    def require_changeable(self) -> None:
        """Checks that hyper-parameters may be changed.

        Raises:
            FrozenPolicyError: if the policy is frozen.
            UsageError: if nobody knows of hyper-parameters here.
        """

    def hyper(self, name: str) -> float:
        """Returns the value in force of a hyper-parameter.

        Raises:
            ConfigError: if there is none of this name.
            UsageError: if nobody knows of hyper-parameters here.
        """

    def set_hyper(self, name: str, value: float | None) -> None:
        """Sets a hyper-parameter of this policy alone; see `hyper` for the errors."""

    def take_over(self, other: Any) -> None:
        """Takes over from a policy of the same kind all that acting depends on.

        Raises:
            UsageError: if the other has another model; nothing is changed then.
        """

    def twin(self, state: Any) -> Any:
        """Returns another policy of the class, spaces and config, with a state of `get_state`."""

    def changed_copy(self, policy_id: str, changes: Mapping[str, Any], *, anew: bool) -> Any:
        """Returns a copy with other settings.

        Args:
            policy_id: of the copy.
            changes: settings that replace those of the config.
            anew: whether the constructor must read them, so that a policy with a Program is made
                anew, with the connectors and the further attributes of the present one.
        """
