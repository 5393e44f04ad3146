"""Episodes as ported callbacks and mapping functions read them."""

import numpy as np
import pytest

from helpers.multi_agent_envs import Scripted, Staggered, flags
from helpers.quick_configs import counting, quick_config
from tfpolicies import DefaultCallbacks, PPOTF2Policy, RolloutWorker
from tfpolicies.compat import Episode
from tfpolicies.errors import UsageError

LSTM = {"use_lstm": True, "lstm_cell_size": 3, "fcnet_hiddens": [4], "lstm_use_prev_action": True}


def single(env=counting, count=2, **settings):
    config = quick_config(env=env, model=LSTM, **settings)
    config.training(train_batch_size=7 * count, sgd_minibatch_size=7)
    return config.rollouts(num_envs_per_worker=count, rollout_fragment_length=7)


def many(world, count=2):
    config = single(lambda context: world(), count)
    return config.multi_agent(policies=["of_a", "of_b"], policy_mapping_fn=by_agent)


def by_agent(agent_id, episode, worker, **kwargs):
    return f"of_{agent_id}"


def sample(config, callbacks, times=3):
    algorithm = config.callbacks(callbacks).build()
    for _ in range(times):
        algorithm.worker.sample()


class ComparesRows(DefaultCallbacks):
    compared = 0

    def on_episode_start(self, *, episode, **kwargs):
        episode.user_data["steps"] = {}

    def on_episode_step(self, *, episode, **kwargs):
        for agent in episode.get_agents():
            memory = np.copy(episode.rnn_state_for(agent))
            outs = episode.last_extra_action_outs_for(agent)
            episode.user_data["steps"][agent, episode.length - 1] = memory, outs

    def on_postprocess_trajectory(self, *, episode, agent_id, postprocessed_batch, **kwargs):
        for row in postprocessed_batch.rows():
            memory, outs = episode.user_data["steps"][agent_id, row["t"]]
            np.testing.assert_array_equal(memory, [row["state_out_0"], row["state_out_1"]])
            assert sorted(outs) == ["action_dist_inputs", "action_logp", "action_prob", "vf_preds"]
            for name in ("action_dist_inputs", "action_logp", "vf_preds"):
                np.testing.assert_array_equal(outs[name], row[name])
            assert outs["action_prob"] == pytest.approx(np.exp(row["action_logp"]))
            type(self).compared += 1


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (single(inference="tf"), 7),
        (single(inference="onnx"), 7),
        (many(Staggered), 7 + 4),
    ],
    ids=["tf", "onnx", "two agents"],
)
def test_episodes_have_the_memory_and_the_outputs_of_the_last_action(config, rows):
    callbacks = type("Callbacks", (ComparesRows,), {})
    sample(config, callbacks)
    assert callbacks.compared == 3 * 2 * rows


def test_an_episode_has_the_action_and_reward_before_the_last_step():
    ends = []

    class Looks(DefaultCallbacks):
        def on_episode_start(self, *, episode, **kwargs):
            assert not episode.started
            assert (episode.prev_action_for(), episode.prev_reward_for()) == (None, 0.0)
            assert not episode.last_terminated_for()
            assert not episode.last_truncated_for()
            assert [x.tolist() for x in episode.rnn_state_for()] == [[0.0] * 3] * 2
            assert episode.last_extra_action_outs_for() == {}
            episode.user_data["last"] = None, 0.0

        def on_episode_step(self, *, episode, env_index, worker, **kwargs):
            assert episode.started
            assert episode.env_id == env_index
            assert episode.policy_map is worker.policy_map
            assert episode.policy_mapping_fn is worker.policy_mapping_fn
            before = episode.prev_action_for(), episode.prev_reward_for()
            assert before == episode.user_data["last"]
            episode.user_data["last"] = episode.last_action_for(), episode.last_reward_for()

        def on_episode_end(self, *, episode, env_index, base_env, **kwargs):
            env = base_env.get_sub_environments()[env_index]
            ends.append((episode.last_terminated_for(), episode.last_truncated_for()))
            assert ends[-1][1] == env.truncates(int(episode.last_observation_for()[1]))

    sample(single(), Looks, times=4)
    assert set(ends) == {(True, False), (False, True)}


def test_an_episode_has_the_ends_and_previous_rewards_of_agents():
    steps = []

    def script():
        first = ("a", "b"), {"a": 1.0, "b": 2.0}, flags(a=True), flags()
        return Scripted([first, (("b",), {"b": 4.0}, flags(), flags(True))])

    class Looks(DefaultCallbacks):
        def on_episode_step(self, *, episode, **kwargs):
            names = ("last_terminated_for", "last_truncated_for", "prev_reward_for")
            steps.append([[getattr(episode, name)(agent) for name in names] for agent in "ab"])
            assert episode.policy_mapping_fn is by_agent
            assert episode.prev_action_for("a") is None

    sample(many(script, count=1), Looks, times=1)
    assert steps[:2] == [
        [[True, False, 0.0], [False, False, 0.0]],
        [[True, True, 0.0], [False, True, 2.0]],
    ]


class AsksWhilePostprocessing(PPOTF2Policy):
    """Reads a memory that is recorded only for callbacks."""

    env_ids: set = set()

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        if episode is not None:
            with pytest.raises(UsageError, match="Override on_episode_step, even by one that does"):
                episode.rnn_state_for()
            self.env_ids.add(episode.env_id)
        return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)


def test_episodes_without_records_name_the_callback_to_override():
    RolloutWorker(config=single(), default_policy_class=AsksWhilePostprocessing).sample()
    assert AsksWhilePostprocessing.env_ids == {0, 1}


def test_a_mapping_function_may_read_where_its_episode_runs():
    calls = []

    class Nothing(DefaultCallbacks):
        def on_episode_step(self, **kwargs):
            pass

    def by_place(agent_id, episode, worker, **kwargs):
        if episode is not None:
            calls.append((episode.env_id, sorted(episode.policy_map), episode.started))
        return f"of_{agent_id}"

    sample(many(Staggered).multi_agent(policy_mapping_fn=by_place), Nothing, times=1)
    assert calls[:2] == [(0, ["of_a", "of_b"], False)] * 2


def test_missing_attributes_of_an_episode_are_named():
    with pytest.raises(AttributeError, match=r"'batch_builder': episodes hold no rows\. Read them"):
        _ = Episode(0, 0, None).batch_builder
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = Episode(0, 0, None).nothing
