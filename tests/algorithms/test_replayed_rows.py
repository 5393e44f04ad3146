"""What replayed rows are: true transitions, to the last of each episode, whatever resets it."""

import pickle
import resource
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import MODES, CountingEnv, counting_creator
from helpers.multi_agent_envs import World, flags
from tfpolicies import DQNConfig, DQNTF2Policy
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.replay.allocator import BufferAllocator
from tfpolicies.rollout.rollout_worker import RolloutWorker

pytestmark = pytest.mark.usefixtures("kept_programs")


def tiny(env, *, fragment=4, envs=3, **training):
    settings = {
        "model": {"fcnet_hiddens": [4]},
        "hiddens": [],
        "gamma": 0.5,
        "num_steps_sampled_before_learning_starts": 10**6,
        "store_buffer_in_checkpoints": True,
        "replay_buffer_config": {"capacity": 500},
        **training,
    }
    return (
        DQNConfig()
        .environment(env)
        .rollouts(num_envs_per_worker=envs, rollout_fragment_length=fragment)
        .training(**settings)
        .framework(inference="tf", jit_compile=False)
        .reporting(min_sample_timesteps_per_iteration=0)
        .debugging(seed=4, log_level="ERROR")
    )


def replayed(algorithm, steps, policy_id="default_policy"):
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
    lengths = (4, 1, 6)
    env = counting_creator(mode, 3, lengths)
    algorithm = tiny(env, n_step=n_step).build()
    batch = replayed(algorithm, 9)
    ends = 0
    for obs, new_obs, terminated in distinct_transitions(batch):
        number, episode, now = obs
        game = CountingEnv(int(number), lengths)
        length = game.length(int(episode))
        assert new_obs == (number, episode, min(now + n_step, length))
        ended = new_obs[2] == length
        assert terminated == (ended and not game.truncates(int(episode)))
        ends += ended and not terminated
    assert ends >= 5 * n_step  # rows that reach the end of truncated episodes
    algorithm.stop()


def distinct_transitions(batch):
    for row in distinct(batch, "obs", "new_obs", "terminateds"):
        yield row[:3], row[3:6], bool(row[6])


if sys.version_info >= (3, 11):  # older ones have no EnvPool wheel

    @pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
    @pytest.mark.filterwarnings("ignore:EnvPool seeds are fixed:UserWarning")
    def test_envpools_truncated_episodes_reach_their_final_observations():
        envpool = pytest.importorskip("envpool")

        def poles(context):
            return envpool.make(
                "CartPole-v1", env_type="gymnasium", num_envs=3, seed=1, max_episode_steps=4
            )

        algorithm = tiny(poles).build()
        batch = replayed(algorithm, 10)
        moved = batch["obs"][:, [0, 2]] + 0.02 * batch["obs"][:, [1, 3]]  # by velocities
        np.testing.assert_allclose(batch["new_obs"][:, [0, 2]], moved, atol=1e-6)
        assert not batch["terminateds"].any()
        starts = np.abs(batch["new_obs"]).max(1) <= 0.05
        assert not starts.all()
        algorithm.stop()


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
    algorithm = tiny(ramp, fragment=3, envs=envs, n_step=3).build()
    added = []
    for _ in range(7):
        batch = replayed(algorithm, 1)
        added.append(algorithm.replay_buffer.num_added // envs)
    assert distinct(batch, *COLUMNS) == THREE_STEPS
    assert added == [1, 4, 7, 10, 14, 16, 21]  # but for two rows of a running episode
    assert algorithm.counters["num_env_steps_sampled"] == 21 * envs
    algorithm.stop()


def test_rows_that_wait_are_in_checkpoints(tmp_path):
    config = tiny(ramp, fragment=3, envs=2, n_step=3)
    algorithm = config.build()
    replayed(algorithm, 3)
    algorithm.save(tmp_path)
    restored = config.copy(copy_frozen=False).build()
    restored.restore(tmp_path)
    one, other = replayed(algorithm, 2), replayed(restored, 2)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    assert distinct(other, *COLUMNS) == THREE_STEPS
    for each in (algorithm, restored):
        each.stop()


@pytest.mark.parametrize("kept_in", ["memory", "files"])
def test_images_are_in_checkpoints_and_travel_by_pickle(tmp_path, kept_in):
    config = tiny(lambda context: Screens(), fragment=4, envs=2, n_step=3)
    limit = {"memory_limit_bytes": 0, "storage_path": str(tmp_path)} if kept_in == "files" else {}
    config.training(
        model={"conv_filters": [[4, [8, 8], 8]], "fcnet_hiddens": [4]},
        num_steps_sampled_before_learning_starts=8,
        train_batch_size=4,
        replay_buffer_config={"capacity": 30, **limit},
    )
    algorithm = config.build()
    replayed(algorithm, 6)
    restored = config.copy(copy_frozen=False).build()
    for name in ("first", "second"):
        algorithm.save(tmp_path / name)
    shutil.rmtree(tmp_path / "first")
    algorithm.replay_buffer.sample(5, "default_policy")  # the state is that of the checkpoint
    restored.restore(tmp_path / "second")
    restored.replay_buffer.sample(5, "default_policy")
    state = pickle.loads(pickle.dumps(algorithm.get_extra_state()))
    shutil.rmtree(tmp_path / "second")
    twin = config.copy(copy_frozen=False).build()
    twin.set_extra_state(state)
    drawn = [
        each.replay_buffer.sample(40, "default_policy") for each in (algorithm, restored, twin)
    ]
    for other in drawn[1:]:
        for name in drawn[0]:
            np.testing.assert_array_equal(drawn[0][name], other[name])
    room = algorithm.replay_buffer.allocator
    assert (room.bytes_in_files > 0) == (kept_in == "files")
    for each in (algorithm, restored, twin):
        each.stop()


def test_fragments_may_be_shorter_than_the_sums():
    config = tiny(ramp, fragment=1, n_step=3)
    worker = RolloutWorker(env_creator=ramp, default_policy_class=DQNTF2Policy, config=config)
    batches = [worker.sample() for _ in range(16)]
    assert [batch.count // 3 for batch in batches[:8]] == [0, 0, 1, 1, 1, 1, 3, 0]
    rows = [row for batch in batches if batch.count for row in distinct(batch, *COLUMNS)]
    assert sorted(set(rows)) == THREE_STEPS
    worker.stop()


def test_callbacks_see_each_row_once_and_whole():
    seen = []

    class Watching(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, **kwargs):
            seen.append(postprocessed_batch)

    algorithm = tiny(ramp, fragment=3, envs=2, n_step=3).callbacks(Watching).build()
    replayed(algorithm, 7)
    assert sum(batch.count for batch in seen) == 2 * 21
    assert {row for batch in seen for row in distinct(batch, *COLUMNS)} == set(THREE_STEPS)
    algorithm.stop()


class Two(World):
    """Agent "a" earns t + 1 in step t of seven; "b" ten times that, but leaves after five."""

    def play(self, actions):
        earned = float(self.now)
        rewards = {"a": earned, "b": 10 * earned}
        over = {"b": True} if self.now == 5 else {}
        agents = [x for x in "ab" if x in actions]
        own_rewards = {agent: rewards[agent] for agent in agents}
        return self.obs(*agents), own_rewards, flags(self.now == 7, **over), flags(), {}


@pytest.mark.core
@pytest.mark.parametrize("fragment", [3, 4])
def test_sums_of_several_agents_go_on_for_each_alone(fragment):
    config = tiny(lambda context: Two(), fragment=fragment, envs=2, n_step=3)
    config.multi_agent(policies={"p"}, policy_mapping_fn=lambda agent, *args, **kwargs: "p")
    algorithm = config.build()
    batch = replayed(algorithm, 10, "p")
    rows = distinct(batch, *COLUMNS)
    mine = {(row[0], row[2], *row[3:5], row[7]) for row in rows}  # agent, time, sum, steps, reached
    alone = {(0.0, *row) for row in THREE_STEPS}
    other = {
        (1.0, 0.0, 27.5, 3.0, 3.0),
        (1.0, 1.0, 45.0, 3.0, 4.0),
        (1.0, 2.0, 62.5, 3.0, 5.0),
        (1.0, 3.0, 65.0, 2.0, 5.0),  # 40 + 50 / 2
        (1.0, 4.0, 50.0, 1.0, 5.0),
    }
    assert mine == alone | other
    for row in rows:  # nothing reaches into another episode or another agent
        assert row[:2] == row[5:7]
    algorithm.stop()


class Sometimes(Ramp):
    """A ramp that says in steps 3 to 5 not to learn from them."""

    def step(self, action):
        *result, _ = super().step(action)
        return *result, {"training_enabled": not 3 <= self.now <= 5}


def test_rows_whose_next_ones_must_not_be_learned_from_wait_no_longer():
    algorithm = tiny(lambda context: Sometimes(), fragment=3, envs=1, n_step=3).build()
    batch = replayed(algorithm, 14)
    assert set(distinct(batch, *COLUMNS)) <= set(THREE_STEPS)
    algorithm.stop()


# -- memory ---------------------------------------------------------------------------------------


def resident():
    """The megabytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def test_the_system_has_the_memory_back_of_arrays_that_are_let_go_of():
    np.ones(2**24, np.uint8)  # from then on the C library puts 8 MB among small arrays
    room, kept, between = BufferAllocator(), [], []
    for _ in range(8):
        kept.append(room.allocate((2**23,), np.uint8))
        kept[-1][:] = 1
        between.append(np.ones(2**20, np.uint8))
    most = resident()
    kept.clear()
    assert most - resident() > 60  # of 64 megabytes
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
    config = tiny((lambda context: Screens()) if screens else env, fragment=16, envs=8, n_step=3)
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
            most[rows] = max(most.get(rows, 0), resident())
    assert most[25_000] - most[15_000] < 9  # megabytes; 8 of frames are let go of at a time
    algorithm.stop()
