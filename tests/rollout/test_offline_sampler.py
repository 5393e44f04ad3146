"""Batches of recorded experience are those of the sampler that recorded it."""

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.multi_agent_envs import Staggered, World, flags
from helpers.workers import make_config, make_worker
from tfpolicies import (
    A2CConfig,
    DQNConfig,
    PGConfig,
    PPOConfig,
    SACConfig,
)
from tfpolicies.errors import BatchError, ConfigError, MissingColumnError, ObservationError

pytestmark = pytest.mark.usefixtures("kept_programs")


class Walk(gym.Env):
    """A walk whose steps are drawn from a Box that is not symmetric, or one of three choices.

    Episodes terminate at 3, and are truncated after 7 steps.
    """

    observation_space = spaces.Dict(
        at=spaces.Box(-99.0, 99.0, (2,), np.float32), side=spaces.Discrete(3, start=1)
    )

    def __init__(self, config):
        self.action_space = config.get("actions") or spaces.Box(-1.0, 3.0, (1,), np.float32)

    def observe(self):
        return {"at": np.array([self.at, self.t], np.float32), "side": 1 + self.t % 3}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.t = float(self.np_random.uniform(-1, 0)), 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        self.at += 0.5 * float(np.sum(np.asarray(action, np.float64)))
        return self.observe(), self.at, self.at > 3, self.t == 7, {}


def record(config_class, output, samples=4, **settings):
    """Returns what a worker sampled while it recorded, and the worker."""
    config = {"env_config": settings.pop("env_config", {}), "num_envs_per_worker": 3}
    config |= {"rollout_fragment_length": 10, "output": str(output), **settings}
    policy_class = config_class().algo_class.policy_classes["tf2"]
    worker = make_worker(Walk, policy_class, config_class=config_class, **config)
    batches = [worker.sample() for _ in range(samples)]
    return batches, worker


def read(worker, config_class, path, **settings):
    """Returns a worker with the weights of another one, which reads recorded experience."""
    policy = worker.get_policy()
    settings = {"train_batch_size": 10_000, **settings}
    reader = make_worker(
        None,
        type(policy),
        config_class=config_class,
        input_=str(path),
        observation_space=policy.observation_space,
        action_space=policy.action_space,
        **settings,
    )
    reader.set_weights(worker.get_weights())
    return reader


def rows_by_step(batches, names):
    """Returns rows by episode and time step."""
    rows = {}
    for batch in batches:
        for i in range(batch.count):
            key = int(batch["eps_id"][i]), int(batch["t"][i])
            values = []
            for name in names:
                column = batch[name]
                if name == "actions" and column.dtype.kind == "f":  # as the environment took them
                    column = np.clip(column, -1.0, 1.0)
                parts = column.values() if isinstance(column, dict) else [column]
                values += [np.asarray(part[i]) for part in parts]
            rows[key] = values
    return rows


def assert_same_rows(read_batches, sampled_batches, names, minimum):
    """Asserts that rows which both have are equal up to rounding; returns their number."""
    read_rows, sampled_rows = (
        rows_by_step(read_batches, names),
        rows_by_step(sampled_batches, names),
    )
    common = read_rows.keys() & sampled_rows.keys()
    assert len(common) >= minimum
    for key in common:
        for actual, expected in zip(read_rows[key], sampled_rows[key], strict=True):
            np.testing.assert_allclose(actual, expected, atol=2e-6, err_msg=str(key))


FORMATS = [("parquet", {}), ("json", {"output_compress_columns": []}), ("rllib", {})]


@pytest.mark.core
@pytest.mark.parametrize(("file_format", "settings"), FORMATS, ids=[x for x, _ in FORMATS])
@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
def test_recorded_steps_are_read_as_they_were_sampled(file_format, settings, trusted, tmp_path):
    settings = {"output_config": {"format": file_format}, **settings}
    batches, worker = record(
        PGConfig, tmp_path / "data", batch_mode="complete_episodes", **settings
    )
    worker.stop()
    reader = read(
        worker,
        PGConfig,
        tmp_path / "data",
        postprocess_inputs=True,
        input_config={"trusted": trusted},
        train_batch_size=sum(batch.count for batch in batches),
    )
    names = ["obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "advantages"]
    assert_same_rows([reader.sample()], batches, names, sum(batch.count for batch in batches))
    reader.stop()


ALGORITHMS = [
    (PGConfig, "advantages", {}),
    (A2CConfig, "advantages", {}),
    (PPOConfig, "value_targets", {}),
    (DQNConfig, "rewards", {"n_step": 3, "env_config": {"actions": spaces.Discrete(3)}}),
    (SACConfig, "rewards", {"n_step": 2}),
]


@pytest.mark.parametrize(
    ("config_class", "name", "settings"), ALGORITHMS, ids=lambda x: str(x)[:40]
)
def test_postprocessing_gives_the_columns_of_the_sampler(config_class, name, settings, tmp_path):
    """Fragments are cut elsewhere, so only complete episodes have the same rows."""
    settings = dict(settings)
    env_config = settings.pop("env_config", {})
    output_config = {"output_config": {"format": "parquet"}}
    batches, worker = record(
        config_class,
        tmp_path,
        6,
        batch_mode="complete_episodes",
        env_config=env_config,
        **settings,
        **output_config,
    )
    worker.stop()
    reader = read(worker, config_class, tmp_path, postprocess_inputs=True, **settings)
    batch = reader.sample()
    names = ["obs", "new_obs", "actions", name, "terminateds"]
    assert_same_rows([batch], batches, names, 100)
    reader.stop()


def make_log(episodes=4, length=5):
    """Makes a log of `episodes` episodes, whose observations count the rows."""
    rows = episodes * length
    return {
        "obs": np.arange(rows, dtype=np.float32)[:, None],
        "actions": np.arange(rows) % 2,
        "rewards": np.ones(rows, np.float32),
        "terminateds": np.arange(rows) % length == length - 1,
        "eps_id": np.arange(rows) // length,
        "t": np.arange(rows) % length,
    }


def make_reader(log, policy_class=None, **settings):
    spaces_ = {
        "observation_space": spaces.Box(-1e6, 1e6, (1,), np.float32),
        "action_space": spaces.Discrete(2),
    }
    config_class = settings.pop("config_class", PGConfig)
    policy_class = policy_class or config_class().algo_class.policy_classes["tf2"]
    return make_worker(
        None,
        policy_class,
        config_class=config_class,
        **{"input_": log, "postprocess_inputs": True, **spaces_, **settings},
    )


@pytest.mark.core
def test_returns_are_those_of_whole_episodes():
    worker = make_reader(make_log(), train_batch_size=20, gamma=0.5)
    batch = worker.sample()
    expected = [1.9375, 1.875, 1.75, 1.5, 1.0]
    assert batch["advantages"].tolist() == 4 * expected
    assert batch["new_obs"][:4, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_samples_in_order_have_whole_trajectories_if_episodes_are_to_be_complete():
    worker = make_reader(make_log(), train_batch_size=7, batch_mode="complete_episodes")
    samples = [worker.sample() for _ in range(3)]
    assert [batch.count for batch in samples] == [10, 10, 10]
    assert [sorted({*batch["eps_id"].tolist()}) for batch in samples] == [[0, 1], [2, 3], [0, 1]]
    cut = make_reader(make_log(), train_batch_size=7, batch_mode="truncate_episodes")
    assert cut.sample().count == 7


def test_each_row_is_read_once_per_epoch_in_random_order():
    worker = make_reader(make_log(), train_batch_size=7, shuffle_buffer_size=10, seed=3)
    rows = np.concatenate([worker.sample()["obs"][:, 0] for _ in range(20)])
    epochs = rows.reshape(7, 20).tolist()
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != list(range(20))
    again = make_reader(make_log(), train_batch_size=7, shuffle_buffer_size=10, seed=3)
    assert (
        np.concatenate([again.sample()["obs"][:, 0] for _ in range(20)]).tolist() == rows.tolist()
    )


def test_a_worker_goes_on_from_a_stored_state():
    first = make_reader(make_log(), train_batch_size=7, shuffle_buffer_size=10)
    for _ in range(4):
        first.sample()
    state = first.sampler.get_state()
    second = make_reader(make_log(), train_batch_size=7, shuffle_buffer_size=10)
    second.sampler.set_state(state)
    for _ in range(10):
        expected, actual = first.sample(), second.sample()
        assert {name: x.tolist() for name, x in expected.items()} == {
            name: x.tolist() for name, x in actual.items()
        }


def test_mixtures_sample_both_sources_by_their_weights(tmp_path):
    _, worker = record(PGConfig, tmp_path, batch_mode="complete_episodes")
    worker.stop()
    mixture = {"sampler": 0.75, str(tmp_path): 0.25}
    settings = {"train_batch_size": 5, "rollout_fragment_length": 5, "postprocess_inputs": True}
    worker = make_worker(
        Walk, type(worker.get_policy()), config_class=PGConfig, input_=mixture, **settings
    )
    recorded = [worker.sample()["unroll_id"][0] for _ in range(8)]
    assert len(recorded) == 8
    assert worker.get_metrics()


def test_actions_outside_their_space_are_named_with_file_and_row():
    log = {**make_log(), "actions": 1 + np.arange(20) % 2}
    with pytest.raises(
        ObservationError, match=r"actions.* is 2 in row 1 of the data\. .*counts from 1"
    ):
        make_reader(log).sample()


def test_time_steps_out_of_order_are_named():
    log = make_log()
    log["t"][[7, 8]] = log["t"][[8, 7]]
    with pytest.raises(BatchError, match=r"in order within an episode, but t is 2 in row 8"):
        make_reader(log).sample()


def test_missing_columns_are_named_with_the_setting_that_computes_them():
    log = make_log()
    del log["rewards"]
    with pytest.raises(
        MissingColumnError, match=r"'rewards', which is needed.*columns=\{'rewards'"
    ):
        make_reader(log).sample()
    with pytest.raises(MissingColumnError, match=r"reads 'advantages'.*postprocess_inputs=True"):
        make_reader(make_log(), postprocess_inputs=False).sample()


def test_n_step_returns_need_trajectories():
    worker = make_reader(make_log(), config_class=DQNConfig, n_step=3, postprocess_inputs=False)
    with pytest.raises(ConfigError, match=r"n_step=3 needs trajectories.*postprocess_inputs=True"):
        worker.sample()


def test_rows_at_the_end_of_a_cut_off_episode_are_left_out_if_they_have_no_next_observation(caplog):
    log = make_log()
    log["terminateds"][:] = False
    worker = make_reader(log, config_class=DQNConfig, postprocess_inputs=False, train_batch_size=16)
    batch = worker.sample()
    assert batch["obs"][:, 0].tolist() == [x for x in range(20) if x % 5 != 4]
    assert batch["new_obs"][:, 0].tolist() == [x + 1 for x in range(20) if x % 5 != 4]
    assert batch["truncateds"].tolist() == 4 * [False, False, False, True]
    assert "4 of 20 rows of the data have no next observation" in caplog.text


def test_a_run_records_into_its_folder(tmp_path):
    config = make_config(Walk, PGConfig, output="logdir", num_envs_per_worker=2)
    algorithm = config.training(train_batch_size=20).build()
    with pytest.raises(ConfigError, match=r"output='logdir' records into the folder of a run"):
        algorithm.train()
    algorithm.learn(60, run_dir=tmp_path / "run", progress=False)
    algorithm.stop()
    assert len([*(tmp_path / "run").glob("output-*_worker-0_0.json")]) == 1


def test_steps_of_several_policies_are_recorded_and_read(tmp_path):
    mapping = {"policies": {"left", "right"}, "policy_mapping_fn": pick_side}
    recording = {**mapping, "output": str(tmp_path), "output_config": {"format": "json"}}
    policy_class = PGConfig().algo_class.policy_classes["tf2"]
    worker = make_worker(
        Staggered, policy_class, config_class=PGConfig, batch_mode="complete_episodes", **recording
    )
    sampled = worker.sample()
    worker.stop()
    settings = {
        **mapping,
        "input_": str(tmp_path),
        "postprocess_inputs": True,
        "train_batch_size": 8,
    }
    reader = make_worker(Staggered, policy_class, config_class=PGConfig, **settings)
    batch = reader.sample()
    assert set(batch.policy_batches) <= set(sampled.policy_batches)
    assert batch.agent_steps() >= 8
    for policy_id, part in batch.policy_batches.items():
        names = ["obs", "actions", "rewards"]
        expected = rows_by_step([sampled.policy_batches[policy_id]], names)
        assert rows_by_step([part], names).keys() <= expected.keys()
    reader.stop()


class TakingTurns(World):
    """Four steps, in which "a" and "b" act in turn; both observe the end."""

    def first(self):
        return self.obs("a")

    def play(self, actions):
        over = self.now == 4
        seen = self.obs("a", "b") if over else self.obs("ab"[self.now % 2])
        return seen, dict.fromkeys(seen, 1.0), flags(over), flags(), {}


def test_a_line_of_agents_that_take_turns_counts_the_steps_of_the_environment(tmp_path):
    mapping = {"policies": {"left", "right"}, "policy_mapping_fn": pick_side}
    settings = {"batch_mode": "complete_episodes", "rollout_fragment_length": 8, **mapping}
    policy_class = PGConfig().algo_class.policy_classes["tf2"]
    worker = make_worker(
        TakingTurns, policy_class, config_class=PGConfig, output=str(tmp_path), **settings
    )
    sampled = worker.sample()
    worker.stop()
    (file,) = tmp_path.iterdir()
    line = json.loads(file.read_text())
    assert line["count"] == sampled.env_steps() == 8
    rows = {policy_id: len(x["rewards"]) for policy_id, x in line["policy_batches"].items()}
    assert rows == {"left": 4, "right": 4}


def pick_side(agent_id, episode=None, worker=None, **kwargs):
    return "left" if str(agent_id) in ("a", "0") else "right"


@pytest.mark.core
def test_sequences_begin_with_episodes_and_keep_their_order():
    model = {"use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 3, "fcnet_hiddens": [4]}
    worker = make_reader(make_log(), model=model, train_batch_size=10, shuffle_buffer_size=4)
    batch = worker.sample()
    assert sorted({*batch["seq_lens"].tolist()}) == [2, 3]
    starts = np.cumsum(batch["seq_lens"]) - batch["seq_lens"]
    assert batch["obs"][starts, 0].astype(int).tolist() == [
        int(x) for x in batch["obs"][starts, 0] if x % 5 in (0, 3)
    ]
    assert batch["state_in_0"].shape == (len(starts), 4)
    assert "advantages" in batch
