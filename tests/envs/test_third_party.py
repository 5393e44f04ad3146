"""Environments of other packages by name: EnvPool, MinAtar, Box2D and MuJoCo."""

import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from helpers.workers import make_callbacks, make_worker
from tfpolicies.config.settings_allowlist import check_environment_name
from tfpolicies.envs.env_factory import EnvContext, check_env_name, make_environments
from tfpolicies.envs.envpool import EnvPoolAdapter, make_envpool_environments
from tfpolicies.envs.third_party import register_namespace
from tfpolicies.errors import EnvError

HAS_ENVPOOL = sys.version_info >= (3, 11)  # older ones have no wheel
needs_envpool = pytest.mark.skipif(not HAS_ENVPOOL, reason="no EnvPool wheel")
# EnvPool makes its space from float64 bounds.
PRECISION = pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")


class Lives(VectorEnv):
    """Two games with lives: the first has 6 steps and 3 lives, the second 4 steps and one life.

    A life of the first is lost in its steps 2 and 4. Each step earns 1.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = 2
    single_observation_space = spaces.Box(0, 10, (1,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, seed):
        self.seed = seed
        self.now = np.zeros(2, int)

    def _observe(self):
        lives = np.array([3 - min(self.now[0], 5) // 2, 1])
        return self.now[:, None].astype(np.float32), {"lives": lives}

    def reset(self, *, seed=None, options=None):
        self.now[:] = 0
        return self._observe()

    def step(self, actions):
        fresh = self.now == [6, 4]
        self.now = np.where(fresh, 0, self.now + 1)
        obs, infos = self._observe()
        ended = self.now == [6, 4]
        return obs, np.where(fresh, 0.0, 1.0), ended, np.zeros(2, bool), infos


def test_a_lost_life_is_reported_and_does_not_end_the_game():
    envs = EnvPoolAdapter(Lives, zero_on_loss=True)
    envs.reset([7, 8])
    assert envs.env.seed == 7
    lost, ended = [], []
    for _ in range(14):
        step = envs.step(np.zeros(2, int))
        lost.append(step.life_lost is not None and step.life_lost.tolist())
        ended.append(step.terminateds.tolist())
    assert [t for t, flags in enumerate(lost) if flags] == [1, 3, 8, 10]
    assert all(flags == [True, False] for flags in lost if flags)
    assert [t for t, (first, _) in enumerate(ended) if first] == [5, 12]
    envs = EnvPoolAdapter(Lives, zero_on_loss=False)
    assert all(envs.step(np.zeros(2, int)).life_lost is None for _ in range(3))


def worker_with_lives(monkeypatch, **settings):
    """Returns a worker of `Lives` whose lost lives end episodes for learning."""
    settings |= {"rollout_fragment_length": 9, "batch_mode": "truncate_episodes"}
    worker = make_worker(lambda context: Lives(0), gamma=1.0, lambda_=1.0, **settings)
    monkeypatch.setattr(worker.sampler, "envs", EnvPoolAdapter(Lives, zero_on_loss=True))
    worker.sampler.reset(None)
    return worker


def test_learning_sees_lost_lives_as_ends_and_results_whole_games(monkeypatch):
    worker = worker_with_lives(monkeypatch)
    batch = worker.sample()
    assert batch.count == 18
    first = slice(0, 9)
    assert batch["obs"][first, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert np.flatnonzero(batch["terminateds"][first]).tolist() == [1, 3, 5, 7]
    assert batch["new_obs"][1, 0] == 2  # the game continues
    # gamma and lambda are 1: the targets are what is still earned in a life
    targets = batch["value_targets"][first]
    np.testing.assert_allclose(targets[:8], [2, 1, 2, 1, 2, 1, 2, 1], atol=1e-5)
    assert len(set(batch["eps_id"][:6].tolist())) == 1
    assert len(set(batch["unroll_id"][:6].tolist())) == 3
    returns = [episode.episode_reward for episode in worker.get_metrics()]
    assert sorted(returns) == [4, 4, 6]


def test_a_callback_sees_the_trajectories_between_lost_lives(monkeypatch):
    calls = []

    def record(episode, postprocessed_batch, **kwargs):
        calls.append((episode.episode_id, postprocessed_batch.count))

    callbacks = make_callbacks(on_postprocess_trajectory=record)
    worker = worker_with_lives(monkeypatch, callbacks=callbacks)
    worker.sample()
    assert [count for _, count in calls[:4]] == [2, 2, 2, 2]
    assert len({number for number, _ in calls[:3]}) == 1


@needs_envpool
@PRECISION
@pytest.mark.core
def test_a_task_of_envpool_is_made_by_name_with_its_settings_and_seeds():
    context = EnvContext({"max_episode_steps": 7})
    envs = make_environments("envpool:CartPole-v1", 3, context)
    assert envs.num_envs == 3
    first = envs.reset([5, 6, 7]).copy()
    assert not np.array_equal(envs.reset([8, 9, 10]), first)
    np.testing.assert_array_equal(envs.reset([5, 6, 7]), first)
    cut = [envs.step(np.array([k % 2] * 3)).truncateds.all() for k in range(7)]
    assert cut == [False] * 6 + [True]


@needs_envpool
def test_wrong_names_and_settings_of_envpool_are_explained():
    with pytest.raises(EnvError, match=r"no task 'CartPoel-v1'. Did you mean 'CartPole-v1'"):
        check_env_name("envpool:CartPoel-v1")
    with pytest.raises(EnvError, match=r"cannot have 'num_envs': num_envs_per_worker says"):
        make_environments("envpool:CartPole-v1", 3, EnvContext({"num_envs": 2}))
    with pytest.raises(EnvError, match=r"does not make 'CartPole-v1' with \{'nothing': 2\}"):
        make_environments("envpool:CartPole-v1", 3, EnvContext({"nothing": 2}))
    assert check_environment_name("envpool:CartPole-v1") == "envpool:CartPole-v1"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(EnvError, match=r"need the package envpool: .* pip install envpool\."):
        make_envpool_environments("envpool:CartPole-v1", 1, {})
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(EnvError, match=r"'ALE/Nothing-v0' needs the package ale-py: .*install ale"):
        register_namespace("ALE/Nothing-v0")


@needs_envpool
@pytest.mark.soak
def test_atari_by_envpool_reports_lost_lives():
    settings = {"zero_discount_on_life_loss": True, "frame_skip": 4, "stack_num": 4}
    envs = make_environments("envpool:Breakout-v5", 4, EnvContext(settings))
    assert envs.observation_space.shape == (4, 84, 84)
    envs.reset([1, 2, 3, 4])
    rng, lost, ended = np.random.default_rng(0), 0, 0
    for _ in range(400):
        step = envs.step(rng.integers(4, size=4))
        lost += 0 if step.life_lost is None else int(step.life_lost.sum())
        ended += int(step.terminateds.sum())
    assert ended >= 4
    assert lost >= 4 * ended  # of five lives, the last one ends the game


@pytest.mark.filterwarnings("ignore:builtin type .*Swig:DeprecationWarning")  # of Box2D
@pytest.mark.filterwarnings("ignore:builtin type swig:DeprecationWarning")
@pytest.mark.parametrize("name", ["MinAtar/Breakout-v1", "LunarLander-v3", "HalfCheetah-v5"])
def test_environments_of_the_extra_are_made_by_name(name):
    envs = make_environments(name, 2, EnvContext({}))
    envs.reset([1, 2])
    step = envs.step(np.stack([envs.action_space.sample() for _ in range(2)]))
    assert step.rewards.shape == (2,)
    envs.close()
    assert gym.spec(name).id == name
