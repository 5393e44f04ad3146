"""Batches and view requirements under names that only ported code has."""

import json

import numpy as np
import pytest
from gymnasium import spaces

import tfpolicies
from helpers.environments import NestedCountingEnv
from helpers.quick_configs import quick_config
from tfpolicies import DefaultCallbacks, PPOTF2Policy, SampleBatch, ViewRequirement, compat
from tfpolicies.errors import BatchError, BatchUsageError, MissingColumnError

NOW, BEFORE = ViewRequirement("obs"), ViewRequirement("actions", shift=-1)


def three_rows(**more):
    return SampleBatch(obs=[[1.0], [2.0], [3.0]], actions=[4, 5, 6], **more)


class Fills(DefaultCallbacks):
    """Writes into rows, as RLlib's example of a centralized critic does."""

    def on_postprocess_trajectory(self, *, postprocessed_batch, **kwargs):
        obs = postprocessed_batch["obs"]
        assert obs.shape == (postprocessed_batch.count, 66)
        np.testing.assert_array_equal(obs[:, 65:], obs["step"])
        obs[:, :64] = np.eye(64)[5]
        reached = postprocessed_batch["new_obs"][:]
        reached[:, 65] += 2
        postprocessed_batch["new_obs"] = reached


def test_callbacks_change_nested_observations_as_flat_rows():
    config = quick_config(env=lambda context: NestedCountingEnv(3), rollout_fragment_length=4)
    batch = config.callbacks(Fills).build().worker.sample()
    assert type(batch["obs"]) is type(batch["new_obs"]) is dict
    assert batch["obs"]["where"][0].tolist() == [5] * 4
    assert batch["obs"]["step"][:, 0].tolist() == [0, 1, 2, 3]
    assert batch["new_obs"]["where"][0].tolist() == [3] * 4
    assert batch["new_obs"]["step"][:, 0].tolist() == [3, 4, 5, 6]


def test_a_batch_of_one_policy_has_its_rows_by_the_policy_s_id():
    batch = three_rows()
    ((policy_id, result),) = batch.policy_batches.items()
    assert policy_id == "default_policy"
    assert result is batch
    assert batch.policy_batches.keys() == batch.as_multi_agent().policy_batches.keys()


class CountsByPolicy(DefaultCallbacks):
    def on_sample_end(self, *, worker, samples, **kwargs):
        for batch in samples.policy_batches.values():
            batch["rewards"] = np.full(batch.count, 7.0, np.float32)


def test_callbacks_written_for_many_agents_run_with_one():
    config = quick_config(env="CartPole-v1", rollout_fragment_length=4).callbacks(CountsByPolicy)
    assert config.build().worker.sample()["rewards"].tolist() == [7.0] * 4


def test_the_step_after_a_trajectory_observes_new_obs_of_its_last_row():
    batch = three_rows(new_obs=[[2.0], [3.0], [9.0]])
    step = batch.get_single_step_input_dict({"obs": NOW, "prev_actions": BEFORE})
    assert isinstance(step, SampleBatch)
    assert step["obs"].tolist() == [[9.0]]
    assert step["prev_actions"].tolist() == [6]
    assert step["seq_lens"].tolist() == [1]


def test_a_step_within_a_trajectory_has_the_inputs_of_acting():
    batch = three_rows()
    views = {"obs": NOW, "prev_actions": BEFORE}
    for index, obs, action in ((0, 1.0, 0), (1, 2.0, 4), (-1, 3.0, 5)):
        step = batch.get_single_step_input_dict(views, index)
        assert step["obs"].tolist() == [[obs]]
        assert step["prev_actions"].tolist() == [action]


def test_windows_of_a_step_begin_in_the_window_of_the_first_row():
    batch = three_rows(new_obs=[[2.0], [3.0], [9.0]])

    def get_window(index="last"):
        views = {"last_5": ViewRequirement("obs", shift="-4:0")}
        (window,) = batch.get_single_step_input_dict(views, index)["last_5"]
        return window.ravel().tolist()

    assert get_window() == [0, 1, 2, 3, 9]
    batch["last_5"] = np.reshape([[5, 6, 7, 8, 1], [6, 7, 8, 1, 2], [7, 8, 1, 2, 3]], (3, 5, 1))
    assert get_window() == [8, 1, 2, 3, 9]
    assert get_window(1) == [6, 7, 8, 1, 2]


@pytest.mark.parametrize(("rows", "expected"), [(1, [0, 0, 0, 0, 1]), (12, [8, 9, 10, 11, 12])])
def test_windows_of_the_memory_are_made_of_its_outputs(rows, expected):
    views = {
        "state_in_0": ViewRequirement("state_out_0", shift="-5:-1", batch_repeat_value=5),
        "state_out_0": ViewRequirement(used_for_compute_actions=False),
    }
    batch = SampleBatch(state_in_0=np.zeros((rows, 5)), state_out_0=np.arange(1, rows + 1))
    step = batch.get_single_step_input_dict(views, index="last")
    assert step["state_in_0"].tolist() == [expected]
    assert "state_out_0" not in step


def test_nested_observations_and_memories_of_sequences_are_inputs_of_a_step():
    nested = {"a": np.array([[1.0], [2.0]]), "b": (np.array([3, 4]),)}
    reached = {"a": np.array([[2.0], [5.0]]), "b": (np.array([4, 6]),)}
    batch = SampleBatch(obs=nested, new_obs=reached, seq_lens=[2], state_in_0=[[1.5]])
    batch["state_out_0"] = np.array([[2.5], [3.5]])
    views = {"obs": NOW, "state_in_0": ViewRequirement("state_out_0", shift=-1)}
    step = batch.get_single_step_input_dict(views)
    assert step["obs"]["a"].tolist() == [[5.0]]
    assert step["obs"]["b"][0].tolist() == [6]
    assert step["state_in_0"].tolist() == [[3.5]]
    first = batch.get_single_step_input_dict(views, 0)
    assert first["state_in_0"].tolist() == [[1.5]]


class ComputesNextValue(PPOTF2Policy):
    """Computes its value after each trajectory from the input of that step."""

    values: list = []

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        step = sample_batch.get_single_step_input_dict(self.view_requirements)
        value = self.compute_actions_from_input_dict(step, explore=False).extras["vf_preds"]
        batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
        if episode is not None and not sample_batch["terminateds"][-1]:
            self.values.append((value.item(), batch["values_bootstrapped"][-1].item()))
        return batch


def test_the_value_after_a_trajectory_is_that_of_its_input():
    model = {"use_lstm": True, "lstm_cell_size": 3}
    model |= {"lstm_use_prev_action": True, "lstm_use_prev_reward": True}
    config = quick_config(env="CartPole-v1", model=model, seed=1, rollout_fragment_length=7)
    worker = tfpolicies.RolloutWorker(config=config, default_policy_class=ComputesNextValue)
    for _ in range(3):
        worker.sample()
    values, bootstrapped = np.transpose(ComputesNextValue.values)
    assert len(values) >= 3
    np.testing.assert_allclose(values, bootstrapped, rtol=1e-4)


def test_a_step_that_is_not_in_the_batch_is_refused():
    views = {"obs": NOW}
    with pytest.raises(MissingColumnError, match="after the last row observes 'new_obs'"):
        three_rows().get_single_step_input_dict(views)
    for index in (3, -4, "first"):
        with pytest.raises(BatchError, match='"last" or one of 3 rows, but got'):
            three_rows().get_single_step_input_dict(views, index)
    padded = three_rows(seq_lens=[2, 1]).right_zero_pad(2)
    with pytest.raises(BatchError, match="before padding"):
        padded.get_single_step_input_dict(views, 0)


@pytest.mark.parametrize("shift", [0, -2, [-3, -1], "-3:-1"])
def test_a_view_requirement_goes_through_json(shift):
    space = spaces.Dict(a=spaces.Box(0.0, np.inf, (2,)), b=spaces.Discrete(3))
    view = ViewRequirement("obs", space, shift, batch_repeat_value=4, used_for_training=False)
    stored = json.loads(json.dumps(view.to_dict()))
    assert stored["data_col"] == "obs"
    assert stored["space"]["space"] == "dict"
    assert not stored["used_for_training"]
    assert ViewRequirement.from_dict(stored) == view
    assert stored == view.to_dict()


def test_a_record_without_a_field_of_a_view_requirement_is_refused():
    stored = ViewRequirement().to_dict()
    del stored["shift"]
    with pytest.raises(BatchUsageError, match=r"`d` must have .*'shift'.* got"):
        ViewRequirement.from_dict(stored)
    with pytest.raises(AttributeError, match=r"ViewRequirement' has no .* 'from_dit'"):
        _ = ViewRequirement.from_dit
    with pytest.raises(AttributeError, match="'ViewRequirement' object has no attribute 'to_dit'"):
        _ = ViewRequirement().to_dit


def test_functions_of_rllibs_batches_exist():
    both = compat.concat_samples_into_ma_batch([three_rows(), three_rows()])
    assert compat.convert_ma_batch_to_sample_batch(both)["actions"].tolist() == [4, 5, 6] * 2
    batch = three_rows(state_in_0=[[0.0], [1.0], [2.0]])
    compat.pad_batch_to_sequences_of_same_size(batch, 2)
    assert batch["actions"].tolist() == [4, 5, 6, 0]
    assert callable(compat.chop_into_sequences)
