"""What ported callbacks and mapping functions ask episodes."""

import numpy as np
import pytest

from helpers.environments import CountingEnv
from helpers.multi_agent_envs import Scripted, Staggered, flags
from tfpolicies import DefaultCallbacks, PPOConfig, PPOTF2Policy, RolloutWorker
from tfpolicies.compat import Episode
from tfpolicies.errors import UsageError

LSTM = {"use_lstm": True, "lstm_cell_size": 3, "fcnet_hiddens": [4], "lstm_use_prev_action": True}
QUICK = {"inference": "tf", "jit_compile": False, "seed": 0, "log_level": "ERROR"}


def counting(context):
    return CountingEnv(context.vector_index)


def single(env=counting, **settings):
    config = PPOConfig().environment(env).training(model=LSTM)
    return config.update_from_dict({**QUICK, "num_envs_per_worker": 2, **settings})


def many(world, **settings):
    config = single(lambda context: world(), **settings)
    return config.multi_agent(policies=["of_a", "of_b"], policy_mapping_fn=by_agent)


def by_agent(agent_id, episode, worker, **kwargs):
    return f"of_{agent_id}"


def sample(config, callbacks, times=3):
    algorithm = config.callbacks(callbacks).rollouts(rollout_fragment_length=7).build()
    for _ in range(times):
        algorithm.worker.sample()
    return algorithm


class TakesNotes(DefaultCallbacks):
    """Compares what episodes told in each step to the rows of batches."""

    compared = 0

    def on_episode_start(self, *, episode, **kwargs):
        episode.user_data["noted"] = {}

    def on_episode_step(self, *, episode, **kwargs):
        for agent in episode.get_agents():
            memory = np.copy(episode.rnn_state_for(agent))
            outs = episode.last_extra_action_outs_for(agent)
            episode.user_data["noted"][agent, episode.length - 1] = memory, outs

    def on_postprocess_trajectory(self, *, episode, agent_id, postprocessed_batch, **kwargs):
        for row in postprocessed_batch.rows():
            memory, outs = episode.user_data["noted"][agent_id, row["t"]]
            np.testing.assert_array_equal(memory, [row["state_out_0"], row["state_out_1"]])
            assert sorted(outs) == ["action_dist_inputs", "action_logp", "action_prob", "vf_preds"]
            for name in ("action_dist_inputs", "action_logp", "vf_preds"):
                np.testing.assert_array_equal(outs[name], row[name])
            assert outs["action_prob"] == pytest.approx(np.exp(row["action_logp"]))
            type(self).compared += 1


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_an_episode_tells_the_memory_and_what_the_last_action_came_with(inference):
    class Notes(TakesNotes):
        pass

    sample(single(inference=inference), Notes).stop()
    assert Notes.compared == 3 * 2 * 7


def test_agents_tell_the_memory_and_what_their_last_actions_came_with():
    class Notes(TakesNotes):
        pass

    sample(many(Staggered), Notes).stop()
    assert Notes.compared == 3 * 2 * (7 + 4)


def test_an_episode_tells_what_was_before_the_last_step():
    seen = []

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
            seen.append((episode.last_terminated_for(), episode.last_truncated_for()))
            assert seen[-1][1] == env.truncates(int(episode.last_observation_for()[1]))

    sample(single(), Looks, times=4).stop()
    assert set(seen) == {(True, False), (False, True)}


def test_agents_tell_whether_they_or_all_are_done():
    seen = []

    def script():
        first = ("a", "b"), {"a": 1.0, "b": 2.0}, flags(a=True), flags()
        return Scripted([first, (("b",), {"b": 4.0}, flags(), flags(True))])

    class Looks(DefaultCallbacks):
        def on_episode_step(self, *, episode, **kwargs):
            results = (
                episode.last_terminated_for,
                episode.last_truncated_for,
                episode.prev_reward_for,
            )
            seen.append([[tell(agent) for tell in results] for agent in "ab"])
            assert episode.policy_mapping_fn is by_agent
            assert episode.prev_action_for("a") is None

    sample(many(script, num_envs_per_worker=1), Looks, times=1).stop()
    assert seen[:2] == [
        [[True, False, 0.0], [False, False, 0.0]],
        [[True, True, 0.0], [False, True, 2.0]],
    ]


class AsksWhilePostprocessing(PPOTF2Policy):
    """Asks episodes in a place that alone does not make anybody take notes."""

    told: list = []

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        if episode is not None:
            with pytest.raises(UsageError, match="Override on_episode_step, even by one that does"):
                episode.rnn_state_for()
            self.told.append(episode.env_id)
        return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)


def test_episodes_that_nobody_followed_say_so():
    worker = RolloutWorker(
        env_creator=counting, config=single(), default_policy_class=AsksWhilePostprocessing
    )
    worker.sample()
    assert set(AsksWhilePostprocessing.told) == {0, 1}
    worker.stop()


def test_a_mapping_function_may_ask_where_its_episode_runs():
    asked = []

    class Nothing(DefaultCallbacks):
        def on_episode_step(self, **kwargs):
            pass

    def by_place(agent_id, episode, worker, **kwargs):
        if episode is not None:
            asked.append((episode.env_id, sorted(episode.policy_map), episode.started))
        return f"of_{agent_id}"

    config = many(Staggered).multi_agent(policy_mapping_fn=by_place)
    sample(config, Nothing, times=1).stop()
    assert asked[:2] == [(0, ["of_a", "of_b"], False)] * 2


def test_rows_of_an_episode_are_in_batches():
    with pytest.raises(AttributeError, match=r"'batch_builder': episodes hold no rows\. Read them"):
        _ = Episode(0, 0, None).batch_builder
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = Episode(0, 0, None).nothing
