"""The columns of recorded experience that a policy needs."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfpolicies.errors import ConfigError, MissingColumnError
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.step_columns import (
    ACTIONS,
    EPISODE_COLUMNS,
    NEW_OBS,
    OBS,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
)
from tfpolicies.policy.policy import Policy

RAW_COLUMNS = (OBS, NEW_OBS, ACTIONS, REWARDS, *EPISODE_COLUMNS)
ACTING_COLUMNS = ("action_logp", "action_dist_inputs", "vf_preds")  # of the policy that acted
_COMPUTED_COLUMNS = ("weights", "unroll_id")


class ColumnPlan(NamedTuple):
    """The columns that a policy needs.

    Attributes:
        names: of columns to read.
        needed: those that must exist.
        has_episodes: whether rows are read as trajectories.
        needs_next_obs: whether next observations are read or rebuilt.
    """

    names: tuple[str, ...]
    needed: tuple[str, ...]
    has_episodes: bool
    needs_next_obs: bool

    @classmethod
    def for_policy(
        cls, policy: Any, column_map: ColumnMap, *, postprocess: bool, reads_all: bool
    ) -> ColumnPlan:
        """Returns the columns that a policy's loss and postprocessing read.

        Args:
            policy: the policy.
            column_map: of the data.
            postprocess: whether trajectories are postprocessed.
            reads_all: whether all columns of steps are read.

        Raises:
            MissingColumnError: if the loss reads a column that the data do not have.
            ConfigError: if it needs trajectories, but they are not postprocessed.
        """
        learning = policy.driver.learning
        available = dict.fromkeys((*RAW_COLUMNS, *column_map.available))
        loss_columns = set(learning.select_columns(available))
        if policy.driver.program is None:  # a custom policy: its columns are unknown
            usual = (*RAW_COLUMNS, *ACTING_COLUMNS, *column_map.batch_columns)
            loss_columns = {name for name in usual if column_map.has(name)}
        needed = {OBS, ACTIONS} | {name for name in (REWARDS, TERMINATEDS) if name in loss_columns}
        names = needed | {name for name in loss_columns if name not in _COMPUTED_COLUMNS}
        names |= {f"state_in_{i}" for i in range(len(policy.get_initial_state()))}
        if reads_all:
            names |= {name for name in RAW_COLUMNS if column_map.has(name)}
        needs_next_obs = NEW_OBS in loss_columns or NEW_OBS in names
        if postprocess:
            needed |= _get_postprocessed_columns(policy)
            needs_next_obs |= needed > {OBS, ACTIONS}
            names |= {name for name in ACTING_COLUMNS if column_map.has(name)}
        elif learning.lookahead:
            raise ConfigError(
                f"n_step={policy.config['n_step']} needs trajectories: recorded rows are single "
                "steps. Set offline_data(postprocess_inputs=True), or n_step=1."
            )
        else:
            _require_loss_columns(policy, column_map, loss_columns)
        reads_views = bool(policy.driver.acting.views)
        has_episodes = (
            (postprocess and needed > {OBS, ACTIONS})
            or policy.is_recurrent()
            or reads_views
            or bool(learning.freeze_views())
            or (needs_next_obs and not column_map.has(NEW_OBS))
        )
        if has_episodes:
            names |= {*EPISODE_COLUMNS}
        if has_episodes or needs_next_obs:
            names |= {TERMINATEDS, TRUNCATEDS}
        if needs_next_obs:
            names.add(NEW_OBS)
        if reads_views or has_episodes:
            names.add(REWARDS)
        return cls(
            tuple(sorted(names | needed)), tuple(sorted(needed)), has_episodes, needs_next_obs
        )


def _get_postprocessed_columns(policy: Policy) -> set[str]:
    """Returns the columns that postprocessing needs; none if it does nothing."""
    learning: Any = policy.driver.learning
    if not learning.postprocesses:
        return set()
    return {OBS, ACTIONS, REWARDS, TERMINATEDS}


def _require_loss_columns(policy: Policy, column_map: ColumnMap, loss_columns: set[str]) -> None:
    """Checks that columns which only postprocessing computes are recorded.

    Raises:
        MissingColumnError: if one is not.
    """
    computed = set(getattr(type(policy), "_column_defaults", {}))
    missing = [
        name
        for name in sorted(loss_columns - computed - {*RAW_COLUMNS, *_COMPUTED_COLUMNS})
        if not column_map.has(name) and not name.startswith(("state_in_", "seq_lens"))
    ]
    views = {view.name for view in policy.driver.acting.views}
    missing = [name for name in missing if name not in views]
    acting = [name for name in missing if name in ACTING_COLUMNS]
    if acting:
        raise MissingColumnError(
            f"The loss of {type(policy).__name__} reads {acting[0]!r} of the policy that "
            f"acted, which the data do not have; they have "
            f"{[*column_map.available]!s:.300}. Record it, or use an algorithm that "
            "learns from any policy's steps: BC, MARWIL, DQN or SAC."
        )
    if missing:
        raise MissingColumnError(
            f"The loss of {type(policy).__name__} reads {missing[0]!r}, which the data do not "
            f"have; they have {[*column_map.available]!s:.300}. Set "
            "offline_data(postprocess_inputs=True) if postprocessing computes it."
        )
