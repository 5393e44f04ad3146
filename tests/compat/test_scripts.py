"""Algorithms, environments, callbacks and training loops in the idioms of RLlib's users."""

import gymnasium as gym
import numpy as np
import pytest

from helpers.environments import CountingEnv
from helpers.factories import OBS, TWO, assert_equal
from helpers.multi_agent_envs import Staggered
from helpers.quick_configs import counting, quick_config
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
    compat,
)
from tfpolicies.compat import tune
from tfpolicies.errors import (
    ConfigError,
    EnvError,
    UnknownPolicyError,
    UnsupportedMethodError,
    UsageError,
)
from tfpolicies.policy.recurrent_state import RecurrentState


def make_config(env=counting, config_class=PGConfig, **settings):
    return quick_config(config_class, env, batch_mode="truncate_episodes", **settings)


@pytest.mark.core
def test_a_custom_algorithm_overrides_the_methods_of_rllib():
    class MyPolicy(PGTF2Policy):
        pass

    class MyAlgorithm(PG):
        @classmethod
        def get_default_policy_class(cls, config):
            return MyPolicy if config["framework"] == "tf2" else None

        @classmethod
        def get_default_config(cls):
            return make_config()

        def setup(self, config):
            super().setup(config)
            self.learning_rate = config.lr

        def training_step(self):
            batch = compat.synchronous_parallel_sample(worker_set=self.workers, max_env_steps=20)
            self._counters["num_env_steps_sampled"] += batch.env_steps()
            self._counters["mine"] += 1
            return compat.train_one_step(self, batch.as_multi_agent())

    algorithm = MyAlgorithm({"lr": 0.5, "env": None}, env=counting)
    assert type(algorithm.get_policy()) is MyPolicy
    assert algorithm.learning_rate == 0.5
    result = algorithm.train()
    assert result["timesteps_total"] == result["num_agent_steps_trained"] == 32
    assert result["counters"]["mine"] == 1


def test_algorithms_have_names():
    assert compat.get_trainable_cls("PPO") is compat.get_trainer_class("PPO") is PPO
    assert compat.get_trainable_cls("PG").get_default_config() == PGConfig()
    with pytest.raises(ConfigError, match=r"no algorithm 'PP0'.*Did you mean 'PPO'"):
        compat.get_trainable_cls("PP0")
    assert tune.make_trainable(print, {"x": 1}) == (print, {"x": 1})
    pytest.importorskip("ray.tune")
    searched = {"lr": {"grid_search": [0.1, 0.2]}}
    trainable, space = tune.make_trainable("DQN", {"gamma": 0.5, **searched})
    assert (trainable.__name__, space) == ("DQN", searched)
    assert tune.make_trainable(compat.DQNTrainer, PPOConfig.overrides(gamma=0.5))[1] == {}
    with pytest.raises(ConfigError, match="gama"):
        tune.make_trainable("PPO", {"gama": 0.5})


def test_a_trainer_is_built_of_a_policy_class():
    defaults = {"inference": "tf", "jit_compile": False, "train_batch_size": 12, "lr": 0.25}
    trainer_class = compat.build_trainer(
        "Mine", default_policy=PGTF2Policy, default_config=defaults
    )
    trainer = trainer_class({"env": counting, "gamma": 0.5})
    assert (trainer.config.lr, trainer.config.gamma) == (0.25, 0.5)
    assert trainer.train()["num_env_steps_trained"] >= 12
    with pytest.raises(ConfigError, match="Other has no policy class"):
        compat.build_trainer("Other")({"env": counting})


def by_agent(agent_id, episode, worker, **kwargs):
    return f"of_{agent_id}"


def build_two_policies(**settings):
    config = make_config(Staggered, AlgorithmConfig, rollout_fragment_length=7, **settings)
    spec = (PPOTF2Policy, None, None, make_config(None, PPOConfig))
    specs = dict.fromkeys(("of_a", "of_b"), spec)
    return Algorithm(config.multi_agent(policies=specs, policy_mapping_fn=by_agent))


def test_policies_that_name_their_classes_need_no_default():
    algorithm, ids = build_two_policies(), ["of_a", "of_b"]
    workers = algorithm.workers
    batches = compat.synchronous_parallel_sample(worker_set=workers, concat=False)
    assert [type(batch) for batch in batches] == [MultiAgentBatch]
    one = compat.synchronous_parallel_sample(worker_set=workers, max_agent_steps=12)
    assert (one.env_steps(), one.agent_steps()) == (14, 22)
    with pytest.raises(UsageError, match="either max_agent_steps or max_env_steps"):
        compat.synchronous_parallel_sample(worker_set=workers, max_agent_steps=1, max_env_steps=1)

    buffer = compat.MultiAgentReplayBuffer(capacity=100, num_shards=1, seed=0)
    buffer.add(one)
    samples = buffer.sample(num_items=5).policy_batches
    assert {pid: rows.count for pid, rows in samples.items()} == dict.fromkeys(ids, 5)
    samples = buffer.sample(3, ids[0]).policy_batches
    assert {pid: len(rows) for pid, rows in samples.items()} == {ids[0]: 3}
    with pytest.raises(UsageError, match="num_shards must be 1, got 2"):
        compat.MultiAgentReplayBuffer(num_shards=2)

    result = compat.train_one_step(algorithm, one, [ids[0]])
    assert {pid: r["num_agent_steps_trained"] for pid, r in result.items()} == {ids[0]: 14}
    assert set(compat.multi_gpu_train_one_step(algorithm, one)) == set(ids)
    with pytest.raises(UnknownPolicyError, match="rows of a policy 'nobody'"):
        compat.train_one_step(algorithm, MultiAgentBatch({"nobody": one[ids[0]]}, 14))
    assert workers.remote_workers() == []


def test_a_policy_is_loaded_from_an_algorithms_checkpoint_by_its_id(tmp_path):
    algorithm = build_two_policies()
    algorithm.save(tmp_path)
    policy = Policy.from_checkpoint(tmp_path / "policies" / "of_a")
    assert_equal(policy.get_weights(), algorithm.get_policy("of_a").get_weights())
    with pytest.raises(UnknownPolicyError, match="nobody"):
        Policy.from_checkpoint(tmp_path / "policies" / "nobody")


@pytest.mark.core
@pytest.mark.parametrize("mapping", [lambda agent_id: "a", lambda agent_id, **kwargs: "a"])
def test_a_mapping_with_another_signature_is_refused(mapping):
    with pytest.raises(ConfigError, match=r"\(agent_id, episode, worker, \*\*kwargs\).*too many"):
        PPOConfig().multi_agent(policies=["a"], policy_mapping_fn=mapping)


def test_metrics_of_one_worker_are_collected():
    algorithm = make_config().build()
    algorithm.worker.sample()
    assert compat.collect_metrics(algorithm.worker)["episodes_this_iter"] > 0
    algorithm.workers.sample()
    assert compat.collect_metrics(algorithm.workers)["episodes_this_iter"] > 0


class Watching(DefaultCallbacks):
    """Compares the last steps of episodes to those of the environment."""

    def on_episode_start(
        self, *, worker, base_env, policies, episode: compat.Episode, env_index, **kwargs
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
def test_episodes_have_their_last_observation_action_and_reward(batch_mode):
    config = make_config(num_envs_per_worker=2, rollout_fragment_length=5).callbacks(Watching)
    algorithm = config.rollouts(batch_mode=batch_mode).build()
    metrics = []
    for _ in range(6):
        algorithm.worker.sample()
        metrics += algorithm.worker.get_metrics()
    assert len(metrics) > 5
    for one in metrics:
        assert isinstance(one, compat.RolloutMetrics)
        assert one.custom_metrics == {"seen": one.episode_length, "rows": one.episode_length}


def test_agents_of_an_episode_have_their_last_observations_actions_and_rewards():
    times = []

    class Each(DefaultCallbacks):
        def on_episode_step(self, *, base_env, episode, env_index, **kwargs):
            env = base_env.get_sub_environments()[env_index]
            for agent, action in env.acted[-1].items():
                assert episode.last_action_for(agent) == action
            times.append([float(episode.last_observation_for(agent)[2]) for agent in "ab"])
            assert episode.last_reward_for("a") == 1.0
            assert episode.last_observation_for("nobody") is None

    build_two_policies(callbacks=Each).worker.sample()
    # "a" observes each of the seven steps, "b" every second and the last
    assert times == [[1, 0], [2, 2], [3, 2], [4, 4], [5, 4], [6, 6], [7, 7]]


class CountsEpisodes(Policy):
    """Keeps the number of its episode as recurrent state."""

    episodes = 0

    def get_initial_state(self):
        self.episodes += 1
        return [np.array([self.episodes])]

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return [0 for _ in obs_batch], state_batches, {}


def test_a_custom_policy_creates_its_memory_for_each_episode():
    policy = CountsEpisodes(OBS, TWO, {})
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
    policy, twin = (compat.RandomPolicy(OBS, space, {"seed": 3}) for _ in range(2))
    actions, states, extras = policy.compute_actions(np.zeros((4, 3)), None, None)
    assert (states, extras) == ([], {})
    rows = zip(actions["a"], *actions["b"], strict=True)
    assert all(space.contains({"a": a, "b": (b, c)}) for a, b, c in rows)
    assert str(twin.compute_actions(np.zeros((4, 3)))[0]) == str(actions)


def test_a_random_policy_may_ignore_bounds():
    box = gym.spaces.Box(1.0, 1.5, (2,), np.float32)
    for normalize in (True, False):
        config = {"ignore_action_bounds": True, "normalize_actions": normalize, "seed": 1}
        actions = compat.RandomPolicy(OBS, box, config).compute_actions(np.zeros((50, 3))).actions
        assert abs(actions.mean()) < 0.5 < actions.std() < 1.5
    spec = PolicySpec(compat.RandomPolicy, config={"ignore_action_bounds": True})
    config = AlgorithmConfig().environment("Pendulum-v1", clip_actions=True)
    config.multi_agent(policies={"default_policy": spec}).debugging(seed=1)
    worker = RolloutWorker(config=config.rollouts(rollout_fragment_length=50))
    assert np.abs(worker.sample()["actions"]).max() > 1.0  # as drawn: the environment's are clipped


class Levels(CountingEnv, compat.TaskSettableEnv):
    def __init__(self, context):
        super().__init__(lengths=(2,))

    def get_task(self):
        return self.lengths[0]

    def set_task(self, task):
        self.lengths = (task,)


def test_environments_get_the_task_that_a_function_returns():
    calls = []

    def curriculum(train_results, task_settable_env, env_ctx):
        calls.append((train_results["training_iteration"], env_ctx.vector_index))
        return 2 + train_results["training_iteration"]

    algorithm = make_config(Levels, env_task_fn=curriculum, num_envs_per_worker=2).build()
    for _ in range(2):
        algorithm.train()
    assert calls == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert algorithm.worker.foreach_env(lambda env: env.get_task()) == [4, 4]
    with pytest.raises(UnsupportedMethodError, match="sample_tasks"):
        Levels(None).sample_tasks(1)
    corridors = type("Corridors", (compat.TaskSettableEnv,), {"action_space": TWO})()
    assert isinstance(corridors, gym.Env)
    assert corridors.unwrapped.action_space == TWO


def test_environments_without_tasks_or_agents_are_named():
    algorithm = make_config(env_task_fn=lambda *values: 1).build()
    with pytest.raises(UsageError, match=r"get_task\(\) and set_task\(task\), got <.*CountingEnv"):
        algorithm.train()
    with pytest.raises(ConfigError, match="env_task_fn must be None or a function"):
        PPOConfig().environment(env_task_fn=3)
    with pytest.raises(EnvError, match="possible_agents"):
        compat.ParallelPettingZooEnv(gym.make("CartPole-v1"))
    assert sorted(compat.MultiAgentCartPole({"num_agents": 2}).reset()[0]) == [0, 1]
