"""Default view requirements, for policies whose model and loss require no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import gymnasium
import numpy as np
from gymnasium import spaces

from tfpolicies.batch.layout import INFOS, STATE_IN, STATE_OUT
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement


def make_default_view_requirements(
    observation_space: gymnasium.Space, action_space: gymnasium.Space
) -> dict[str, ViewRequirement]:
    """Returns the columns of a policy without a recurrent state, by name.

    Acting may read the columns that exist before the action: observations, ids, `t`, and the
    previous action and reward. Training may read all but `infos`.
    """

    def make_training_view(data_col: str | None = None, **arguments: object) -> ViewRequirement:
        return ViewRequirement(data_col, used_for_compute_actions=False, **arguments)  # type: ignore[arg-type]

    integer = spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (), np.int64)
    flag = spaces.Discrete(2)
    names = SampleBatch
    return {
        names.OBS: ViewRequirement(space=observation_space),
        names.NEXT_OBS: make_training_view(names.OBS, space=observation_space, shift=1),
        names.ACTIONS: make_training_view(space=action_space),
        names.PREV_ACTIONS: ViewRequirement(names.ACTIONS, space=action_space, shift=-1),
        names.REWARDS: make_training_view(),
        names.PREV_REWARDS: ViewRequirement(names.REWARDS, shift=-1),
        names.TERMINATEDS: make_training_view(space=flag),
        names.TRUNCATEDS: make_training_view(space=flag),
        INFOS: make_training_view(used_for_training=False),
        names.EPS_ID: ViewRequirement(space=integer),
        names.UNROLL_ID: ViewRequirement(space=integer),
        names.AGENT_INDEX: ViewRequirement(space=integer),
        names.T: ViewRequirement(space=integer),
    }


def add_state_views(
    requirements: Mapping[str, ViewRequirement],
    initial_state: Sequence[np.ndarray],
    *,
    max_seq_len: int,
    shift: int | str | Sequence[int] = -1,
) -> dict[str, ViewRequirement]:
    """Returns `requirements` with `state_in_i` and `state_out_i` for each state tensor.

    Those that `requirements` already has are kept.

    Args:
        requirements: for example those of `make_default_view_requirements`.
        initial_state: one array per state tensor, without a batch axis, as
            `policy.get_initial_state()` returns it; for its shape and dtype.
        max_seq_len: the rows of a sequence: training reads one `state_in_i` for each.
        shift: the earlier `state_out_i` that is `state_in_i`: -1 for a recurrent model, a range
            such as `"-50:-1"` for attention over the last 50.
    """
    state_views = {}
    for i, state in enumerate(map(np.asarray, initial_state)):
        space = spaces.Box(-np.inf, np.inf, state.shape, state.dtype.type)
        state_views[f"{STATE_IN}{i}"] = ViewRequirement(
            f"{STATE_OUT}{i}", space=space, shift=shift, batch_repeat_value=max_seq_len
        )
        state_views[f"{STATE_OUT}{i}"] = ViewRequirement(
            space=space, used_for_compute_actions=False
        )
    return {**requirements, **{k: v for k, v in state_views.items() if k not in requirements}}
