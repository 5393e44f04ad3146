"""Replayed images: each frame is kept once, and samples are the rows that were added."""

import numpy as np
import pytest

from helpers.factories import assert_equal
from tfpolicies.batch.sample_batch import SampleBatch, concat_samples
from tfpolicies.errors import CheckpointError
from tfpolicies.replay.allocator import BufferAllocator
from tfpolicies.replay.frame_store import FrameStore
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.replay.prioritized import PrioritizedReplayBuffer
from tfpolicies.replay.ring_buffer import ReplayBuffer

SIDE = 64  # 64 x 64 bytes are enough to be kept as frames


def frame(number):
    """An image that no other number has."""
    image = np.zeros((SIDE, SIDE), np.uint8)
    image[0, :8] = np.frombuffer(np.int64(number).tobytes(), np.uint8)
    return image


def stack(newest, first, axis):
    """Four frames, as a stack of an episode's frames: `first` stands in for those before it."""
    return np.stack([frame(max(first, newest - k)) for k in (3, 2, 1, 0)], axis)


class Game:
    """Steps of an environment whose frames are numbered; episodes of five steps."""

    def __init__(self, number, axis):
        self.now = self.first = 1000 * number
        self.axis, self.steps = axis, 0

    def row(self, n=1):
        """Returns the next transition of n steps (fewer at the end of the episode)."""
        obs = stack(self.now, self.first, self.axis)
        reached = min(self.now + n, self.first + 5)
        new_obs = stack(reached, self.first, self.axis)
        row = SampleBatch(obs=obs[None], new_obs=new_obs[None], id=[self.now], to=[reached])
        self.now += 1
        if self.now == self.first + 5:
            self.now = self.first = self.first + 100
        return row


def get_first(number):
    return number - number % 100


def require_whole(batch, axis):
    for k in range(batch.count):
        number, reached = int(batch["id"][k]), int(batch["to"][k])
        np.testing.assert_array_equal(batch["obs"][k], stack(number, get_first(number), axis))
        np.testing.assert_array_equal(batch["new_obs"][k], stack(reached, get_first(number), axis))


def fill(buffer, axis, *, games, steps, adds, n=1):
    """Adds what some games give, `steps` rows of each in a batch."""
    playing = [Game(k + 1, axis) for k in range(games)]
    for _ in range(adds):
        buffer.add(concat_samples([game.row(n) for game in playing for _ in range(steps)]))
    return buffer


@pytest.mark.parametrize(("games", "steps"), [(1, 1), (3, 1), (2, 7)])
@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_samples_are_the_rows_that_were_added(games, steps, axis, n):
    buffer = ReplayBuffer(10, seed=0)
    fill(buffer, axis, games=games, steps=steps, adds=40 // (games * steps), n=n)
    batch = buffer.sample(60)
    require_whole(batch, axis)
    assert len(set(batch["id"].tolist())) == 10


def test_each_frame_is_kept_once():
    buffer = fill(ReplayBuffer(1000, seed=0), 2, games=4, steps=1, adds=50)
    frames = buffer._rows._frame_stores["obs"]
    assert frames.next == 4 * 10 * 6  # ten episodes of six frames in each of four games
    assert buffer.row_bytes == 2 * 4 * SIDE * SIDE + 2 * 8


def test_frames_that_no_row_has_any_more_are_let_go():
    buffer, game = ReplayBuffer(50, seed=0), Game(1, 2)
    sizes = []
    for _ in range(60):
        buffer.add(concat_samples([game.row() for _ in range(100)]))
        sizes.append(buffer.stats()["size_bytes"])
        require_whole(buffer.sample(3), 2)
    assert max(sizes) < 2500 * SIDE * SIDE  # 2 x 1024 frames to compare with, and the rows' own
    assert buffer._rows._frame_stores["obs"].first > 2000  # of 3600


def test_different_frames_with_the_same_sum_are_distinguished():
    frames = FrameStore((2, 8), np.uint8, BufferAllocator())
    frames._hash_factors[:] = 1
    one, other = np.zeros((2, 2, 8), np.uint8)
    one[0, 0], other[1, 0] = 1, 1
    assert frames.add(np.stack([one, other, one])).tolist() == [0, 1, 2]
    np.testing.assert_array_equal(frames[1], other)


def test_frames_of_any_size_and_type_are_known_again():
    frames = FrameStore((3, 7), np.float32, BufferAllocator())
    image = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32)
    assert frames.add(image[[0, 1, 0]]).tolist() == [0, 1, 0]
    np.testing.assert_array_equal(frames[1], image[1])


def test_priorities_draw_images():
    buffer = fill(PrioritizedReplayBuffer(10, seed=0), 2, games=2, steps=3, adds=5)
    batch = buffer.sample(8)
    require_whole(batch, 2)
    buffer.update_priorities(batch["batch_indexes"], np.ones(8))
    require_whole(buffer.sample(8), 2)


def test_dicts_of_images_and_vectors_share_frames_leaf_by_leaf():
    buffer = ReplayBuffer(4, seed=0)
    images, rows = np.stack([frame(k) for k in range(6)]), np.arange(6.0)[:, None]
    obs, new_obs = ({"eye": images[k : k + 5], "arm": rows[k : k + 5]} for k in (0, 1))
    buffer.add(SampleBatch(obs=obs, new_obs=new_obs))
    batch = buffer.sample(20)
    for name, ahead in (("obs", 0), ("new_obs", 1)):
        for k, image in zip(batch["obs"]["arm"][:, 0], batch[name]["eye"], strict=True):
            np.testing.assert_array_equal(image, frame(int(k) + ahead))
    assert buffer._rows._frame_stores["obs/eye"].next == 5


# -- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ReplayBuffer, PrioritizedReplayBuffer])
def test_a_restored_buffer_of_images_continues_exactly(kind):
    buffer = fill(kind(30, seed=3), 2, games=3, steps=2, adds=9)
    restored = kind(30, seed=8)
    restored.set_state(buffer.get_state())
    game = Game(9, 2)
    rows = concat_samples([game.row() for _ in range(12)])
    for each in (buffer, restored):
        each.add(rows)
    one, other = buffer.sample(25), restored.sample(25)
    require_whole(one, 2)
    assert_equal(dict(one), dict(other))


def test_a_state_of_before_there_were_frames_is_read():
    game = Game(1, 2)
    rows = concat_samples([game.row() for _ in range(7)])
    buffer = ReplayBuffer(5, seed=1)
    buffer.add(rows)
    places = [5, 6, 2, 3, 4]  # as a ring of five rows has the last of seven
    state = buffer.get_state()
    old = {name: state[name] for name in ("capacity", "num_added", "num_sampled", "rng")}
    old["columns"] = {name: column[places] for name, column in rows.items()}
    restored = ReplayBuffer(5)
    restored.set_state(old)
    one, other = buffer.sample(20), restored.sample(20)
    require_whole(other, 2)
    np.testing.assert_array_equal(one["id"], other["id"])


def test_a_damaged_state_of_images_is_refused_and_changes_nothing():
    buffer = fill(ReplayBuffer(20, seed=3), 2, games=1, steps=10, adds=3)
    good = buffer.get_state()
    frames = good["frames"]["obs"]
    start, segment = good["rows"][0]
    bad = [
        {**good, "frames": {}},
        {**good, "frames": {"obs": {**frames, "floors": []}}},
        {**good, "frames": {"obs": {**frames, "floors": [[0, 10**9]]}}},
        {**good, "rows": []},
        {**good, "rows": 5},
        {**good, "rows": [(start, None)]},
        {**good, "rows": [(start + 1, segment)]},
        {**good, "rows": [(start, segment), (25, segment)]},
        {**good, "frames": {"obs": {**frames, "next": frames["next"] + 1}}},
        {**good, "frames": {"obs": {**frames, "segments": [(frames["first"], segment)]}}},
        {**good, "frames": {"obs": {**frames, "first": 0, "next": 0, "segments": []}}},
    ]
    for state in bad:
        with pytest.raises(CheckpointError):
            buffer.set_state(state)
    require_whole(buffer.sample(20), 2)


# -- beyond the memory ----------------------------------------------------------------------------


def test_rows_beyond_the_limit_lie_in_a_file_without_a_name(tmp_path):
    buffer = MultiAgentReplayBuffer(400, seed=0, memory_limit_bytes=10_000, storage_path=tmp_path)
    plain = MultiAgentReplayBuffer(400, seed=0)
    for each in (buffer, plain):
        fill(each, 2, games=2, steps=10, adds=5)
    assert buffer.allocator.bytes_in_memory <= 10_000 < buffer.allocator.bytes_in_files
    assert plain.allocator.bytes_in_files == 0
    assert list(tmp_path.iterdir()) == []
    one, other = (each.sample(20, "default_policy") for each in (buffer, plain))
    require_whole(one, 2)
    np.testing.assert_array_equal(one["id"], other["id"])
    allocator = buffer.allocator
    del buffer
    assert (allocator.bytes_in_memory, allocator.bytes_in_files) == (0, 0)
