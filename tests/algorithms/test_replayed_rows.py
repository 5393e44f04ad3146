"""Replayed rows: true transitions to the last of each episode, n-step sums, memory."""

import pickle
import shutil
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import MODES, CountingEnv, counting_creator
from helpers.factories import assert_equal
from helpers.multi_agent_envs import World, flags
from helpers.off_policy import make_config
from soak.memory import resident_megabytes
from tfpolicies import DQNTF2Policy
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.replay.allocator import BufferAllocator
from tfpolicies.rollout.rollout_worker import RolloutWorker

pytestmark = pytest.mark.usefixtures("kept_programs")


def make_filling(env, *, fragment=4, envs=3, **training):
    """Returns a config of a DQN that does not learn but fills its buffer."""
    settings = {
        "gamma": 0.5,
        "num_steps_sampled_before_learning_starts": 10**6,
        "replay_buffer_config": {"capacity": 500},
        **training,
    }
    return make_config(env, fragment=fragment, envs=envs, **settings)


def fill(algorithm, steps, policy_id="default_policy"):
    """Returns all rows that are in the buffer after some training steps, each many times."""
    for _ in range(steps):
        algorithm.training_step()
    return algorithm.replay_buffer.sample(3000, policy_id)


def distinct(batch, *names):
    """Returns the distinct rows of some columns, sorted, as tuples of numbers."""
    parts = [np.asarray(batch[name], np.float64).reshape(batch.count, -1) for name in names]
    return sorted({tuple(row) for row in np.concatenate(parts, 1).tolist()})


# -- final observations ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_step", [1, 3])
def test_the_last_row_of_an_episode_reaches_its_final_observation(mode, n_step):
    algorithm = make_filling(counting_creator(mode), n_step=n_step).build()
    batch = fill(algorithm, 9)
    if n_step == 1:
        batch["n_steps"] = np.ones(batch.count)
    ends = 0
    for row in distinct(batch, "obs", "new_obs", "terminateds", "rewards", "n_steps"):
        (number, episode, now), new_obs, (terminated, reward, count) = row[:3], row[3:6], row[6:]
        game = CountingEnv(int(number))
        length = game.length(int(episode))
        assert new_obs == (number, episode, min(now + n_step, length))
        assert count == new_obs[2] - now
        ended = new_obs[2] == length
        assert terminated == (ended and not game.truncates(int(episode)))
        ends += ended and not terminated
        discounts = 0.5 ** np.arange(count)
        least = sum(x * game.reward(episode, now + k, 0) for k, x in enumerate(discounts))
        assert 0 <= reward - least <= 0.5 * discounts.sum()  # by the actions
    assert ends >= 5 * n_step  # rows that reach the end of truncated episodes


if sys.version_info >= (3, 11):  # older ones have no EnvPool wheel

    @pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
    @pytest.mark.filterwarnings("ignore:EnvPool seeds are fixed:UserWarning")
    def test_envpools_truncated_episodes_reach_their_final_observations():
        envpool = pytest.importorskip("envpool")

        def poles(context):
            return envpool.make(
                "CartPole-v1", env_type="gymnasium", num_envs=3, seed=1, max_episode_steps=4
            )

        algorithm = make_filling(poles).build()
        batch = fill(algorithm, 10)
        moved = batch["obs"][:, [0, 2]] + 0.02 * batch["obs"][:, [1, 3]]  # by velocities
        np.testing.assert_allclose(batch["new_obs"][:, [0, 2]], moved, atol=1e-6)
        assert not batch["terminateds"].any()
        starts = np.abs(batch["new_obs"]).max(1) <= 0.05
        assert not starts.all()


# -- n-step sums across the borders of fragments --------------------------------------------------


class Ramp(gym.Env):
    """Episodes of seven steps, then truncated; step t observes t and earns t + 1."""

    observation_space = spaces.Box(0.0, 10.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.now += 1
        return np.full(1, self.now, np.float32), float(self.now), False, self.now == 7, {}

    def get_state(self):
        return {"now": self.now}

    def set_state(self, state):
        self.now = state["now"]


# gamma 0.5: 1 + 2/2 + 3/4 and so on; (obs, sum, steps in it, reached)
THREE_STEPS = [
    (0.0, 2.75, 3.0, 3.0),
    (1.0, 4.5, 3.0, 4.0),
    (2.0, 6.25, 3.0, 5.0),
    (3.0, 8.0, 3.0, 6.0),
    (4.0, 9.75, 3.0, 7.0),
    (5.0, 9.5, 2.0, 7.0),
    (6.0, 7.0, 1.0, 7.0),
]
COLUMNS = ("obs", "rewards", "n_steps", "new_obs")


def ramp(context):
    return Ramp()


@pytest.mark.parametrize("envs", [1, 2])
def test_sums_go_on_across_the_borders_of_fragments(envs):
    algorithm = make_filling(ramp, fragment=3, envs=envs, n_step=3).build()
    added = []
    for _ in range(7):
        batch = fill(algorithm, 1)
        added.append(algorithm.replay_buffer.num_added // envs)
    assert distinct(batch, *COLUMNS) == THREE_STEPS
    assert added == [1, 4, 7, 10, 14, 16, 21]  # but for two rows of a running episode
    assert algorithm.counters["num_env_steps_sampled"] == 21 * envs


def test_rows_that_wait_are_in_checkpoints(tmp_path):
    config = make_filling(ramp, fragment=3, envs=2, n_step=3)
    algorithm = config.build()
    fill(algorithm, 3)
    algorithm.save(tmp_path)
    restored = config.copy(copy_frozen=False).build()
    restored.restore(tmp_path)
    one, other = fill(algorithm, 2), fill(restored, 2)
    assert_equal(dict(one), dict(other))
    assert distinct(other, *COLUMNS) == THREE_STEPS


@pytest.mark.parametrize("kept_in", ["memory", "files"])
def test_images_are_in_checkpoints_and_travel_by_pickle(tmp_path, kept_in):
    config = make_filling(lambda context: Screens(), fragment=4, envs=2, n_step=3)
    limit = {"memory_limit_bytes": 0, "storage_path": str(tmp_path)} if kept_in == "files" else {}
    config.training(
        model={"conv_filters": [[4, [8, 8], 8]], "fcnet_hiddens": [4]},
        num_steps_sampled_before_learning_starts=8,
        train_batch_size=4,
        replay_buffer_config={"capacity": 30, **limit},
    )
    algorithm = config.build()
    fill(algorithm, 6)
    restored = config.copy(copy_frozen=False).build()
    for name in ("first", "second"):
        algorithm.save(tmp_path / name)
    shutil.rmtree(tmp_path / "first")
    algorithm.replay_buffer.sample(5, "default_policy")  # the state is that of the checkpoint
    restored.restore(tmp_path / "second")
    restored.replay_buffer.sample(5, "default_policy")
    state = pickle.loads(pickle.dumps(algorithm.get_extra_state()))
    shutil.rmtree(tmp_path / "second")
    unpickled = config.copy(copy_frozen=False).build()
    unpickled.set_extra_state(state)
    algorithms = (algorithm, restored, unpickled)
    drawn = [each.replay_buffer.sample(40, "default_policy") for each in algorithms]
    for other in drawn[1:]:
        assert_equal(dict(drawn[0]), dict(other))
    assert (algorithm.replay_buffer.allocator.bytes_in_files > 0) == (kept_in == "files")


def test_fragments_may_be_shorter_than_the_sums():
    config = make_filling(ramp, fragment=1, n_step=3)
    worker = RolloutWorker(env_creator=ramp, default_policy_class=DQNTF2Policy, config=config)
    batches = [worker.sample() for _ in range(16)]
    assert [batch.count // 3 for batch in batches[:8]] == [0, 0, 1, 1, 1, 1, 3, 0]
    rows = [row for batch in batches if batch.count for row in distinct(batch, *COLUMNS)]
    assert sorted(set(rows)) == THREE_STEPS


def test_callbacks_see_each_row_once_and_whole():
    batches = []

    class Watching(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, **kwargs):
            batches.append(postprocessed_batch)

    algorithm = make_filling(ramp, fragment=3, envs=2, n_step=3).callbacks(Watching).build()
    fill(algorithm, 7)
    assert sum(batch.count for batch in batches) == 2 * 21
    assert {row for batch in batches for row in distinct(batch, *COLUMNS)} == set(THREE_STEPS)


class Two(World):
    """Agent "a" earns t + 1 in step t of seven; "b" ten times that, but leaves after five."""

    def play(self, actions):
        rewards = {agent: self.now * (10.0 if agent == "b" else 1.0) for agent in actions}
        over = {"b": True} if self.now == 5 else {}
        return self.obs(*actions), rewards, flags(self.now == 7, **over), flags(), {}


@pytest.mark.core
@pytest.mark.parametrize("fragment", [3, 4])
def test_sums_of_several_agents_go_on_for_each_alone(fragment):
    config = make_filling(lambda context: Two(), fragment=fragment, envs=2, n_step=3)
    config.multi_agent(policies={"p"}, policy_mapping_fn=lambda agent, *args, **kwargs: "p")
    algorithm = config.build()
    batch = fill(algorithm, 10, "p")
    rows = distinct(batch, *COLUMNS)
    sums = {(row[0], row[2], *row[3:5], row[7]) for row in rows}  # agent, time, sum, steps, reached
    alone = {(0.0, *row) for row in THREE_STEPS}
    other = {
        (1.0, 0.0, 27.5, 3.0, 3.0),
        (1.0, 1.0, 45.0, 3.0, 4.0),
        (1.0, 2.0, 62.5, 3.0, 5.0),
        (1.0, 3.0, 65.0, 2.0, 5.0),  # 40 + 50 / 2
        (1.0, 4.0, 50.0, 1.0, 5.0),
    }
    assert sums == alone | other
    for row in rows:  # nothing reaches into another episode or another agent
        assert row[:2] == row[5:7]


class Sometimes(Ramp):
    """A ramp that says in steps 3 to 5 not to learn from them."""

    def step(self, action):
        *result, _ = super().step(action)
        return *result, {"training_enabled": not 3 <= self.now <= 5}


def test_rows_whose_next_ones_must_not_be_learned_from_wait_no_longer():
    algorithm = make_filling(lambda context: Sometimes(), fragment=3, envs=1, n_step=3).build()
    batch = fill(algorithm, 14)
    assert set(distinct(batch, *COLUMNS)) <= set(THREE_STEPS)


# -- memory ---------------------------------------------------------------------------------------


def test_the_memory_of_released_arrays_returns_to_the_system():
    np.ones(2**24, np.uint8)  # from then on the C library puts 8 MB among small arrays
    allocator, arrays, between = BufferAllocator(), [], []
    for _ in range(8):
        arrays.append(allocator.allocate((2**23,), np.uint8))
        arrays[-1][:] = 1
        between.append(np.ones(2**20, np.uint8))
    most = resident_megabytes()
    arrays.clear()
    assert most - resident_megabytes() > 60  # of 64 megabytes
    assert len(between) == 8  # still there


class Screens(gym.Env):
    """Stacks of four frames of noise; episodes of twenty steps."""

    observation_space = spaces.Box(0, 255, (64, 64, 4), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        self.frames = [self.frame()] * 4
        return np.stack(self.frames, -1), {}

    def frame(self):
        return self.np_random.integers(256, size=(64, 64), dtype=np.uint8)

    def step(self, action):
        self.now += 1
        self.frames = [*self.frames[1:], self.frame()]
        return np.stack(self.frames, -1), 0.0, False, self.now == 20, {}


@pytest.mark.soak
@pytest.mark.parametrize("env", ["CartPole-v1", "screens"])
def test_a_run_takes_no_more_memory_once_its_buffer_is_full(env):
    screens = env == "screens"
    config = make_filling(
        (lambda context: Screens()) if screens else env, fragment=16, envs=8, n_step=3
    )
    config.training(
        num_steps_sampled_before_learning_starts=100,
        train_batch_size=8,
        replay_buffer_config={"capacity": 4000},
    )
    if screens:
        config.training(model={"conv_filters": [[4, [8, 8], 8]], "fcnet_hiddens": [4]})
    algorithm = config.build()
    most = {}
    for rows in (10_000, 15_000, 25_000):  # the buffer is full at 4000
        while algorithm.replay_buffer.num_added < rows:
            algorithm.train()
            most[rows] = max(most.get(rows, 0), resident_megabytes())
    assert most[25_000] - most[15_000] < 9  # megabytes; 8 of frames are let go of at a time
