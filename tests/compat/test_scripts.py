"""Algorithms, environments, callbacks and training loops in the idioms of RLlib's users."""

import gymnasium as gym
import numpy as np
import pytest

from helpers.environments import CountingEnv
from helpers.factories import OBS, TWO, assert_equal
from helpers.multi_agent_envs import Staggered
from tfpolicies import (
    PG,
    PPO,
    Algorithm,
    AlgorithmConfig,
    DefaultCallbacks,
    MultiAgentBatch,
    PGConfig,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
)
from tfpolicies.compat import (
    DQNTrainer,
    Episode,
    MultiAgentCartPole,
    MultiAgentReplayBuffer,
    ParallelPettingZooEnv,
    RandomPolicy,
    RolloutMetrics,
    TaskSettableEnv,
    build_trainer,
    collect_metrics,
    get_trainable_cls,
    get_trainer_class,
    multi_gpu_train_one_step,
    synchronous_parallel_sample,
    train_one_step,
    tune,
)
from tfpolicies.errors import (
    ConfigError,
    EnvError,
    UnknownPolicyError,
    UnsupportedMethodError,
    UsageError,
)
from tfpolicies.policy.recurrent_state import RecurrentState

QUICK = {"inference": "tf", "jit_compile": False, "seed": 0, "log_level": "ERROR"}
SMALL = {"model": {"fcnet_hiddens": [4]}, "train_batch_size": 12}


def counting(context):
    return CountingEnv(context.vector_index)


def config_of(config_class=PGConfig, env=counting, **settings):
    more = {"sgd_minibatch_size": 12, "num_sgd_iter": 1} if config_class is PPOConfig else {}
    config = config_class().environment(env).update_from_dict({**QUICK, **SMALL, **more})
    return config.rollouts(batch_mode="truncate_episodes").update_from_dict(settings)


# -- algorithms ---------------------------------------------------------------------------------


@pytest.mark.core
def test_an_algorithm_of_ones_own_is_asked_what_rllib_asks():
    class Mine(PGTF2Policy):
        """Of whoever names none."""

    class MyAlgorithm(PG):
        @classmethod
        def get_default_policy_class(cls, config):
            return Mine if config["framework"] == "tf2" else None

        @classmethod
        def get_default_config(cls):
            return config_of()

        def setup(self, config):
            super().setup(config)
            self.learning_rate = config.lr

        def training_step(self):
            batch = synchronous_parallel_sample(worker_set=self.workers, max_env_steps=20)
            self._counters["num_env_steps_sampled"] += batch.env_steps()
            self._counters["mine"] += 1
            return train_one_step(self, batch.as_multi_agent())

    algorithm = MyAlgorithm({"lr": 0.5, "env": None}, env=counting)
    assert type(algorithm.get_policy()) is Mine
    assert algorithm.learning_rate == 0.5
    result = algorithm.train()
    assert result["timesteps_total"] == result["num_agent_steps_trained"] == 24
    assert result["counters"]["mine"] == 1
    algorithm.stop()


def test_an_environment_is_given_once():
    with pytest.raises(ConfigError, match="'a' as an argument and 'b' in the config"):
        PPO(PPOConfig().environment("b"), env="a")


def test_algorithms_have_names():
    assert get_trainable_cls("PPO") is get_trainer_class("PPO") is PPO
    assert get_trainable_cls("PG").get_default_config() == PGConfig()
    with pytest.raises(ConfigError, match=r"no algorithm 'PP0'.*Did you mean 'PPO'"):
        get_trainable_cls("PP0")
    assert tune.make_trainable(print, {"x": 1}) == (print, {"x": 1})
    pytest.importorskip("ray.tune")
    made, space = tune.make_trainable("DQN", {"gamma": 0.5, "lr": {"grid_search": [0.1, 0.2]}})
    assert (made.__name__, space) == ("DQN", {"lr": {"grid_search": [0.1, 0.2]}})
    assert tune.make_trainable(DQNTrainer, PPOConfig.overrides(gamma=0.5))[1] == {}
    with pytest.raises(ConfigError, match="gama"):
        tune.make_trainable("PPO", {"gama": 0.5})


def test_a_trainer_is_built_of_a_policy_class():
    trainer_class = build_trainer(
        "Mine", default_policy=PGTF2Policy, default_config={**QUICK, **SMALL, "lr": 0.25}
    )
    trainer = trainer_class({"env": counting, "gamma": 0.5})
    assert (trainer.config.lr, trainer.config.gamma) == (0.25, 0.5)
    assert trainer.train()["num_env_steps_trained"] >= 12
    trainer.stop()
    with pytest.raises(ConfigError, match="Other has no policy class"):
        build_trainer("Other")({"env": counting})


def by_agent(agent_id, episode, worker, **kwargs):
    return f"of_{agent_id}"


def two_policies(algorithm=AlgorithmConfig, **settings):
    config = config_of(algorithm, Staggered, rollout_fragment_length=7, **settings)
    ids = ["of_a", "of_b"]
    specs = {pid: (PPOTF2Policy, None, None, config_of(PPOConfig, None)) for pid in ids}
    return config.multi_agent(policies=specs, policy_mapping_fn=by_agent), ids


def test_policies_that_name_their_classes_need_no_default():
    config, ids = two_policies()
    algorithm = Algorithm(config)
    batches = synchronous_parallel_sample(worker_set=algorithm.workers, concat=False)
    assert [type(batch) for batch in batches] == [MultiAgentBatch]
    one = synchronous_parallel_sample(worker_set=algorithm.workers, max_agent_steps=12)
    assert (one.env_steps(), one.agent_steps()) == (14, 22)
    with pytest.raises(UsageError, match="either max_agent_steps or max_env_steps"):
        synchronous_parallel_sample(
            worker_set=algorithm.workers, max_agent_steps=1, max_env_steps=1
        )

    buffer = MultiAgentReplayBuffer(capacity=100, num_shards=1, seed=0)
    buffer.add(one)
    drawn = buffer.sample(num_items=5)
    assert {pid: rows.count for pid, rows in drawn.policy_batches.items()} == dict.fromkeys(ids, 5)
    assert {pid: len(rows) for pid, rows in buffer.sample(3, ids[0]).policy_batches.items()} == {
        ids[0]: 3
    }
    with pytest.raises(UsageError, match="num_shards must be 1, got 2"):
        MultiAgentReplayBuffer(num_shards=2)

    result = train_one_step(algorithm, one, [ids[0]])
    assert {pid: r["num_agent_steps_trained"] for pid, r in result.items()} == {ids[0]: 14}
    assert set(multi_gpu_train_one_step(algorithm, one)) == set(ids)
    with pytest.raises(UnknownPolicyError, match="rows of a policy 'nobody'"):
        train_one_step(algorithm, MultiAgentBatch({"nobody": one[ids[0]]}, 14))
    assert algorithm.workers.remote_workers() == []
    algorithm.stop()


def test_a_policy_is_found_in_an_algorithms_checkpoint_by_its_id(tmp_path):
    config, (first, _) = two_policies()
    algorithm = Algorithm(config)
    algorithm.save(tmp_path)
    policy = Policy.from_checkpoint(tmp_path / "policies" / first)
    assert_equal(policy.get_weights(), algorithm.get_policy(first).get_weights())
    algorithm.stop()
    with pytest.raises(UnknownPolicyError, match="nobody"):
        Policy.from_checkpoint(tmp_path / "policies" / "nobody")


@pytest.mark.core
@pytest.mark.parametrize("mapping", [lambda agent_id: "a", lambda agent_id, **kwargs: "a"])
def test_a_mapping_that_cannot_be_called_as_it_will_be_is_refused(mapping):
    with pytest.raises(ConfigError, match=r"\(agent_id, episode, worker, \*\*kwargs\).*too many"):
        PPOConfig().multi_agent(policies=["a"], policy_mapping_fn=mapping)


def test_metrics_of_one_worker_are_collected():
    algorithm = config_of().build()
    algorithm.worker.sample()
    assert collect_metrics(algorithm.worker)["episodes_this_iter"] > 0
    algorithm.workers.sample()
    assert collect_metrics(algorithm.workers)["episodes_this_iter"] > 0
    algorithm.stop()


# -- episodes -----------------------------------------------------------------------------------


class Watching(DefaultCallbacks):
    """Compares what episodes tell to what the environment knows."""

    def on_episode_start(
        self, *, worker, base_env, policies, episode: Episode, env_index, **kwargs
    ):
        env = base_env.get_sub_environments()[env_index]
        assert (episode.last_action_for(), episode.last_reward_for()) == (None, 0.0)
        np.testing.assert_array_equal(episode.last_observation_for(), env.observation())
        episode.user_data["rows"] = []

    def on_episode_step(self, *, base_env, episode, env_index, **kwargs):
        env = base_env.get_sub_environments()[env_index]
        assert episode.last_action_for() == env.actions[-1]
        number, _, now = episode.last_raw_obs_for()
        assert (number, now) == (env.number, episode.length)
        expected = env.reward(int(episode.last_observation_for()[1]), int(now) - 1, env.actions[-1])
        assert episode.last_reward_for() == pytest.approx(expected)
        episode.user_data["rows"].append(now)

    def on_episode_end(self, *, episode, **kwargs):
        assert episode.user_data["rows"] == [1 + i for i in range(episode.length)]
        episode.custom_metrics["seen"] = episode.length

    def on_postprocess_trajectory(self, *, episode, postprocessed_batch, **kwargs):
        notes = episode.custom_metrics
        notes["rows"] = notes.get("rows", 0) + postprocessed_batch.count
        episode.user_data.setdefault("first", postprocessed_batch["obs"][0, 1])
        assert (postprocessed_batch["obs"][:, 1] == episode.user_data["first"]).all()


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_episodes_tell_what_was_seen_done_and_earned_last(batch_mode):
    config = config_of().callbacks(Watching)
    config.rollouts(num_envs_per_worker=2, batch_mode=batch_mode, rollout_fragment_length=5)
    algorithm = config.build()
    metrics = []
    for _ in range(6):
        algorithm.worker.sample()
        metrics += algorithm.worker.get_metrics()
    assert len(metrics) > 5
    for one in metrics:
        assert isinstance(one, RolloutMetrics)
        assert one.custom_metrics == {"seen": one.episode_length, "rows": one.episode_length}
    algorithm.stop()


def test_agents_of_an_episode_tell_what_they_saw_did_and_earned_last():
    seen = []

    class Each(DefaultCallbacks):
        def on_episode_step(self, *, base_env, episode, env_index, **kwargs):
            env = base_env.get_sub_environments()[env_index]
            for agent, action in env.acted[-1].items():
                assert episode.last_action_for(agent) == action
            seen.append([float(episode.last_observation_for(agent)[2]) for agent in "ab"])
            assert episode.last_reward_for("a") == 1.0
            assert episode.last_observation_for("nobody") is None

    algorithm = Algorithm(two_policies()[0].callbacks(Each))
    algorithm.worker.sample()
    # "a" observes each of the seven steps, "b" every second and the last
    assert seen == [[1, 0], [2, 2], [3, 2], [4, 4], [5, 4], [6, 6], [7, 7]]
    algorithm.stop()


class Stubborn(Policy):
    """Remembers a number that it drew at an episode's beginning."""

    drawn = 0

    def get_initial_state(self):
        self.drawn += 1
        return [np.array([self.drawn])]

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return [0 for _ in obs_batch], state_batches, {}


def test_a_hand_written_policy_draws_its_memory_for_each_episode():
    policy = Stubborn(OBS, TWO, {})
    assert policy._create_exploration() is None
    memory = RecurrentState(policy, 2)
    (states,) = memory.get_inputs([np.zeros((2, *OBS.shape), np.float32)])[1]
    first = states[:, 0].tolist()
    memory.reset(np.array([False, True]))
    memory.grow(3)
    obs = [np.zeros((3, *OBS.shape), np.float32)]
    after = memory.get_inputs(obs)[1][0][:, 0].tolist()
    assert after[0] == first[0]
    assert len({*first, *after}) == 4


def test_random_policies_draw_from_any_space():
    space = gym.spaces.Dict(a=TWO, b=gym.spaces.Tuple([OBS, gym.spaces.Discrete(3, start=5)]))
    policy, twin = (RandomPolicy(OBS, space, {"seed": 3}) for _ in range(2))
    actions, states, extras = policy.compute_actions(np.zeros((4, 3)), None, None)
    assert (states, extras) == ([], {})
    assert all(space.contains(one) for one in _rows(actions))
    assert str(twin.compute_actions(np.zeros((4, 3)))[0]) == str(actions)


def test_a_random_policy_may_ignore_bounds():
    box = gym.spaces.Box(1.0, 1.5, (2,), np.float32)
    for normalize in (True, False):
        config = {"ignore_action_bounds": True, "normalize_actions": normalize, "seed": 1}
        actions = RandomPolicy(OBS, box, config).compute_actions(np.zeros((50, 3))).actions
        assert abs(actions.mean()) < 0.5 < actions.std() < 1.5
    spec = PolicySpec(RandomPolicy, config={"ignore_action_bounds": True})
    config = AlgorithmConfig().environment("Pendulum-v1", clip_actions=True)
    config.multi_agent(policies={"default_policy": spec}).debugging(seed=1)
    worker = RolloutWorker(config=config.rollouts(rollout_fragment_length=50))
    assert np.abs(worker.sample()["actions"]).max() > 1.0  # as drawn: the environment's are clipped


def _rows(actions):
    for i in range(4):
        first, second = actions["b"]
        yield {"a": actions["a"][i], "b": (first[i], second[i])}


# -- environments -------------------------------------------------------------------------------


class Levels(CountingEnv, TaskSettableEnv):
    """Has episodes as long as its level says."""

    def __init__(self, context):
        super().__init__(lengths=(2,))

    def get_task(self):
        return self.lengths[0]

    def set_task(self, task):
        self.lengths = (task,)


def test_environments_get_the_task_that_a_function_says():
    asked = []

    def curriculum(train_results, task_settable_env, env_ctx):
        asked.append((train_results["training_iteration"], env_ctx.vector_index))
        return 2 + train_results["training_iteration"]

    config = config_of(env=Levels).environment(env_task_fn=curriculum)
    algorithm = config.rollouts(num_envs_per_worker=2).build()
    for _ in range(2):
        algorithm.train()
    assert asked == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert algorithm.worker.foreach_env(lambda env: env.get_task()) == [4, 4]
    algorithm.stop()
    with pytest.raises(UnsupportedMethodError, match="sample_tasks"):
        Levels(None).sample_tasks(1)


def test_a_task_settable_environment_is_one_of_gymnasium():
    class Corridors(TaskSettableEnv):
        observation_space, action_space = OBS, TWO

    assert isinstance(Corridors(), gym.Env)
    assert Corridors().unwrapped.action_space == TWO


def test_environments_without_tasks_are_named():
    algorithm = config_of().environment(env_task_fn=lambda *values: 1).build()
    with pytest.raises(UsageError, match=r"get_task\(\) and set_task\(task\), got <.*CountingEnv"):
        algorithm.train()
    algorithm.stop()
    with pytest.raises(ConfigError, match="env_task_fn must be None or a function"):
        PPOConfig().environment(env_task_fn=3)


def test_classes_of_environments_have_their_old_names():
    assert sorted(MultiAgentCartPole({"num_agents": 2}).reset()[0]) == [0, 1]
    with pytest.raises(EnvError, match="possible_agents"):
        ParallelPettingZooEnv(gym.make("CartPole-v1"))
