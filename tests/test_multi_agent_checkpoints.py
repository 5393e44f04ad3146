"""An algorithm with many agents goes on from a checkpoint as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multi_agent_worlds import Staggered, own_policy

from tfpolicies import PPO, PPOConfig


class SavedStaggered(Staggered):
    """A world that can be saved and restored."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def get_state(self) -> dict[str, int]:
        return {"episode": self.episode, "now": self.now}

    def set_state(self, state: dict[str, int]) -> None:
        self.episode, self.now = state["episode"], state["now"]


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_running_episodes_are_part_of_a_checkpoint(tmp_path: Path, mode: str) -> None:
    config = (
        PPOConfig()
        .environment(SavedStaggered)
        .framework("tf2", inference="tf", jit_compile=False)
        .rollouts(num_envs_per_worker=2, rollout_fragment_length=5, batch_mode=mode)
        .training(
            train_batch_size=10,
            sgd_minibatch_size=8,
            num_sgd_iter=1,
            model={"fcnet_hiddens": [4]},
        )
        .multi_agent(policies={"p", "q"}, policy_mapping_fn=own_policy)
        .debugging(seed=3)
    )
    algorithm = config.build()
    algorithm.train()
    algorithm.save(tmp_path)
    other = PPO.from_checkpoint(
        tmp_path, config={"env": SavedStaggered}, policy_mapping_fn=own_policy
    )
    for _ in range(2):
        left, right = (x.worker.sample() for x in (algorithm, other))
        assert set(left.policy_batches) == set(right.policy_batches)
        for policy_id, part in left.policy_batches.items():
            for name, column in part.items():
                np.testing.assert_array_equal(column, right[policy_id][name], err_msg=name)
