"""RLlib's readers and writers of recorded experience, in scripts that were written for RLlib."""

import base64
import gc
import json
import pickle
import pickletools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import lz4.frame
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.environments import TwoArmsEnv
from helpers.factories import OBS, TWO, assert_equal, batch_for, make
from helpers.quick_configs import quick_config
from tfpolicies import (
    DEFAULT_POLICY_ID,
    BCConfig,
    BCTF2Policy,
    MARWILConfig,
    MultiAgentBatch,
    PGTF1Policy,
    PGTF2Policy,
    PolicySpec,
    PPOConfig,
    RolloutWorker,
    SACConfig,
    SampleBatch,
)
from tfpolicies.compat import (
    Categorical,
    DatasetReader,
    DatasetWriter,
    FullyConnectedNetwork,
    InputReader,
    IOContext,
    JsonReader,
    JsonWriter,
    MixedInput,
    ModelCatalog,
    NoopOutput,
    OutputWriter,
    SampleBatchBuilder,
    ShuffledInput,
    TFModelV2,
    convert_ma_batch_to_sample_batch,
    get_dataset_and_shards,
    register_input,
    registry_contains_input,
    registry_get_input,
)
from tfpolicies.errors import BatchError, ConfigError, MissingColumnError, UsageError
from tfpolicies.offline.input_registry import INPUTS

pytestmark = pytest.mark.usefixtures("kept_programs")


class PlaneEnv(gym.Env):
    """An environment whose actions are floats from 0 to 4."""

    observation_space = OBS
    action_space = spaces.Box(0.0, 4.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, True, False, {}


def make_line(number, rows=3, **columns):
    """Makes one episode, whose numbers are all `number`."""
    ends = np.arange(rows) == rows - 1
    return SampleBatch(
        {
            "obs": np.full((rows, 3), number / 8, np.float32),
            "actions": np.full(rows, number % 2),
            "rewards": np.full(rows, 1.0, np.float32),
            "terminateds": ends,
            "truncateds": np.zeros(rows, bool),
            "eps_id": np.full(rows, number),
            "t": np.arange(rows),
            **columns,
        }
    )


def write(folder, lines, **kwargs):
    writer = JsonWriter(str(folder), **kwargs)
    for line in lines:
        writer.write(make_line(line) if isinstance(line, int) else line)
    writer.close()
    return str(folder)


def read_numbers(reader, count):
    return [int(reader.next()["eps_id"][0]) for _ in range(count)]


# -- writing --------------------------------------------------------------------------------------


def test_a_line_has_packed_and_plain_columns_in_the_form_of_rllib(tmp_path):
    write(tmp_path, [5])
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("output-20")
    assert file.name.endswith("_worker-0_0.json")
    record = json.loads(file.read_text())
    assert record["type"] == "SampleBatch"
    assert record["terminateds"] == [False, False, True]
    pickled = lz4.frame.decompress(base64.b64decode(record["obs"]))
    np.testing.assert_array_equal(pickle.loads(pickled), np.full((3, 3), 0.625, np.float32))
    names = [arg for code, arg, _ in pickletools.genops(pickled) if code.name == "GLOBAL"]
    assert names[0] == "numpy.core.multiarray _reconstruct"  # which NumPy 1 also has


def test_files_end_at_their_size_and_are_named_after_the_worker(tmp_path):
    write(tmp_path, range(20), ioctx=IOContext(worker_index=3), max_file_size=2000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) > 2
    assert all("_worker-3_" in name for name in names)
    one = tmp_path / "one"
    writer = JsonWriter(f"file://{one}", compress_columns=[])
    assert [*one.iterdir()] == []
    for line in (0, 1):
        writer.write(make_line(line))
    assert len([*one.iterdir()]) == 1


def test_a_dataset_writer_writes_json_lines_or_parquet(tmp_path):
    def make_context(**options):
        config = PPOConfig().offline_data(output="dataset", output_config=options)
        worker = SimpleNamespace(policy_map={DEFAULT_POLICY_ID: make(PGTF2Policy)})
        return IOContext(config=config, worker=worker)

    for file_format in ("json", "parquet"):
        folder = tmp_path / file_format
        writer = DatasetWriter(make_context(format=file_format, path=str(folder)), ["obs"])
        for line in (0, 1):
            writer.write(make_line(line, agent_index=np.zeros(3, int)))
        writer.close()
        dataset, _ = get_dataset_and_shards(
            {"input": "dataset", "input_config": {"format": file_format, "paths": str(folder)}}
        )
        assert dataset.count() == 6
        np.testing.assert_array_equal(
            next(DatasetReader(dataset).read_all_files())["obs"][0], np.zeros(3)
        )
    with pytest.raises(ConfigError, match=r"needs output_config=.'path': a folder"):
        DatasetWriter(make_context(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"needs output_config=.'path': a folder"):
        DatasetWriter()
    context = IOContext(config={"output_config": {"format": "parquet", "path": str(tmp_path)}})
    with pytest.raises(ConfigError, match="needs a context with a worker"):
        DatasetWriter(context)


def test_a_dataset_writer_that_is_not_closed_writes_its_rows_at_its_end(tmp_path):
    worker = SimpleNamespace(policy_map={DEFAULT_POLICY_ID: make(PGTF2Policy)})
    options = {"format": "parquet", "path": str(tmp_path)}
    writer = DatasetWriter(IOContext(config={"output_config": options}, worker=worker))
    writer.write(make_line(0, agent_index=np.zeros(3, int)))
    assert [*tmp_path.iterdir()] == []
    del writer
    gc.collect()
    config = {"input": "dataset", "input_config": {"format": "parquet", "paths": str(tmp_path)}}
    assert get_dataset_and_shards(config)[0].count() == 3


def test_no_output_and_own_writers_are_output_writers():
    NoopOutput().write(make_line(0))
    assert issubclass(JsonWriter, OutputWriter)


def test_a_builder_makes_batches_of_rows(tmp_path):
    builder = SampleBatchBuilder()
    for t in range(2):
        builder.add_values(t=t, obs=np.full(3, t, np.float32), rewards=0.5, infos={"t": t})
    builder.add_batch(SampleBatch(t=[2], obs=[[2, 2, 2]], rewards=[1.0], infos=[{}]))
    assert builder.count == 3
    batch = builder.build_and_reset()
    assert batch["obs"][:, 0].tolist() == [0.0, 1.0, 2.0]
    assert batch["rewards"].dtype == np.float32
    builder.add_values(t=0)
    assert builder.build_and_reset()["unroll_id"][0] == batch["unroll_id"][0] + 1
    write(tmp_path, [batch])
    assert "infos" not in JsonReader(str(tmp_path)).next()
    builder.add_values(a=1)
    builder.add_values(b=1)
    with pytest.raises(BatchError):
        builder.build_and_reset()


# -- reading without a worker ---------------------------------------------------------------------


def test_each_line_is_read_once_in_each_epoch(tmp_path):
    folder = write(tmp_path, range(30), max_file_size=1500)
    assert len([*tmp_path.iterdir()]) > 2
    reader = JsonReader(folder + "/*.json")
    first, second = read_numbers(reader, 30), read_numbers(reader, 30)
    assert sorted(first) == sorted(second) == [*range(30)]
    assert first != second  # files are in random order
    assert read_numbers(JsonReader(folder), 30) == first
    other = JsonReader(folder, IOContext(config={"seed": 5}, worker_index=2))
    assert read_numbers(other, 30) not in (first, second)
    batches = [*reader.read_all_files()]
    assert [int(batch["eps_id"][0]) for batch in batches] == [*range(30)]


def test_a_batch_has_whole_lines_up_to_the_size_of_a_workers_train_batch(tmp_path):
    folder = write(tmp_path, range(8))
    assert JsonReader(folder).next().count == 3
    config = PPOConfig().training(train_batch_size=10)
    assert JsonReader([folder], IOContext(config=config)).next().count == 12
    shared = IOContext(config=config.rollouts(num_rollout_workers=3))
    assert JsonReader(folder, shared).next().count == 6
    assert JsonReader(folder, IOContext(config={"train_batch_size": 9})).next().count == 9


def test_a_reader_continues_at_its_position(tmp_path):
    folder = write(tmp_path, range(12), max_file_size=1500)
    reader = JsonReader(folder)
    read_numbers(reader, 7)
    state = json.loads(json.dumps(reader.get_state()))
    expected = read_numbers(reader, 10)
    reader.close()
    other = JsonReader(folder)
    other.set_state(state)
    assert read_numbers(other, 10) == expected


def test_values_come_back_to_the_bit(tmp_path):
    rng = np.random.default_rng(0)
    batch = make_line(
        1,
        obs={"a": rng.normal(size=(3, 2)).astype(np.float32), "b": {"c": np.arange(3)}},
        rewards=rng.normal(size=3).astype(np.float32),
        eps_id=np.array([2**62 + 1] * 3),
    )
    for columns in ([], ["obs", "rewards"]):
        folder = tmp_path / str(len(columns))
        result = JsonReader(write(folder, [batch], compress_columns=columns)).next()
        assert [*result] == [*batch]
        np.testing.assert_array_equal(result["obs"]["a"].astype(np.float32), batch["obs"]["a"])
        np.testing.assert_array_equal(result["obs"]["b"]["c"], batch["obs"]["b"]["c"])
        assert (result["obs"]["a"].dtype == np.float32) == (columns != [])
        np.testing.assert_array_equal(result["rewards"].astype(np.float32), batch["rewards"])
        np.testing.assert_array_equal(result["eps_id"], batch["eps_id"])


def test_lines_of_several_policies_are_multi_agent_batches(tmp_path):
    parts = {"p0": make_line(0, rows=2), "p1": make_line(0, rows=3)}
    folder = write(tmp_path, [MultiAgentBatch(parts, 3)])
    batch = JsonReader(folder).next()
    assert {pid: part.count for pid, part in batch.policy_batches.items()} == {"p0": 2, "p1": 3}
    assert batch.env_steps() == 3
    only = write(tmp_path / "one", [MultiAgentBatch({DEFAULT_POLICY_ID: make_line(4)}, 3)])
    assert convert_ma_batch_to_sample_batch(JsonReader(only).next())["eps_id"][0] == 4


def test_paths_are_files_folders_patterns_lists_and_archives(tmp_path):
    folder = write(tmp_path / "logs", [7])
    (file,) = (tmp_path / "logs").iterdir()
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", folder)
    for inputs in (str(file), folder, folder + "/*", [str(file)], [f"file://{file}"], archive):
        assert read_numbers(JsonReader(inputs), 1) == [7]
    for inputs, words in (
        (str(tmp_path / "nowhere"), "There is no file of recorded experience at"),
        ([], r"must be a path or a list of paths, got \[\]"),
        (5, "must be a path or a list of paths, got 5"),
    ):
        with pytest.raises(ValueError, match=words):
            JsonReader(inputs)


def test_empty_lines_and_cut_off_ends_are_skipped_and_damage_is_named(tmp_path):
    folder = write(tmp_path / "logs", [0, 1], compress_columns=[])
    (file,) = (tmp_path / "logs").iterdir()
    text = file.read_text()
    (tmp_path / "empty").write_text("")
    (tmp_path / "blank").write_text("\n\n" + text + "\n" + text[:80])
    reader = JsonReader([str(tmp_path / "empty"), str(tmp_path / "blank")])
    assert read_numbers(reader, 4) == [0, 1, 0, 1]
    file.write_text(text[:80] + "\n" + text)
    with pytest.raises(BatchError, match=r"Line 1 of .* cannot be parsed as JSON"):
        JsonReader(folder).next()
    with pytest.raises(ValueError, match="There is no row"):
        JsonReader([str(tmp_path / "empty")]).next()


def test_dones_of_old_files_are_terminateds(tmp_path):
    (tmp_path / "old.json").write_text(
        '{"type": "SampleBatch", "obs": [[1.0], [2.0]], "dones": [false, true]}\n'
    )
    assert JsonReader(str(tmp_path)).next()["terminateds"].tolist() == [False, True]


# -- reading for a worker -------------------------------------------------------------------------


def make_data_config(config_class, folder, env=TwoArmsEnv, **settings):
    return quick_config(
        config_class,
        env,
        train_batch_size=12,
        input_=lambda ioctx: JsonReader(folder, ioctx),
        **settings,
    )


def write_for(env, folder, lines=8):
    obs_space, rng = env.observation_space, np.random.default_rng(1)
    batches = [
        make_line(
            i,
            obs=np.stack([obs_space.sample() * 0 for _ in range(3)]),
            actions=rng.uniform(0.0, 4.0, (3, 2)).astype(np.float32),
        )
        for i in range(lines)
    ]
    write(folder, batches)
    return str(folder)


def test_with_a_worker_rows_are_as_the_loss_reads_them(tmp_path):
    folder = write_for(PlaneEnv, tmp_path)
    recorded = np.concatenate([x["actions"] for x in JsonReader(folder).read_all_files()])
    for normalized, expected in ((False, recorded / 2 - 1), (True, recorded)):
        config = make_data_config(MARWILConfig, folder, PlaneEnv, gamma=0.5, shuffle_buffer_size=0)
        worker = config.offline_data(actions_in_input_normalized=normalized).build().worker
        batch = worker.sample()
        assert batch.count == 12
        np.testing.assert_allclose(batch["actions"], expected[:12], atol=1e-6)
        np.testing.assert_allclose(batch["advantages"][:3], [1.75, 1.5, 1.0])
        assert {"rewards", "terminateds", "eps_id"} <= set(batch)
    worker.stop()


@pytest.mark.parametrize("config_class", [BCConfig, MARWILConfig, SACConfig])
def test_algorithms_learn_from_a_reader_of_a_script(tmp_path, config_class):
    folder = write_for(PlaneEnv, tmp_path)
    config = make_data_config(config_class, folder, PlaneEnv)
    if config_class is SACConfig:
        config.training(num_steps_sampled_before_learning_starts=0)
        config.reporting(min_sample_timesteps_per_iteration=12)
    algorithm = config.build()
    for _ in range(2):
        result = algorithm.train()
    assert result["timesteps_total"] == 24
    assert np.isnan(result["episode_reward_mean"])
    stats = result["info"]["learner"][DEFAULT_POLICY_ID]["learner_stats"]
    assert np.isfinite([*stats.values()]).all()
    algorithm.stop()


@pytest.mark.parametrize("buffer_size", [0, 3])
def test_a_run_resumes_at_the_position_of_its_reader(tmp_path, buffer_size):
    folder = write_for(PlaneEnv, tmp_path / "logs")
    config = make_data_config(BCConfig, folder, PlaneEnv, shuffle_buffer_size=2)
    config.offline_data(input_=lambda ioctx: ShuffledInput(JsonReader(folder, ioctx), buffer_size))
    algorithm = config.build()
    algorithm.train()
    checkpoint = algorithm.save(tmp_path / "run").checkpoint.path
    expected = algorithm.train()["info"]["learner"]
    restored = type(algorithm).from_checkpoint(checkpoint, config={"input_": config.input_})
    assert_equal(restored.train()["info"]["learner"], expected)
    for each in (algorithm, restored):
        each.stop()


class FilesReader(JsonReader):
    """A reader that a script derives from RLlib's."""

    def __init__(self, ioctx):
        super().__init__(ioctx.input_config["input_files"], ioctx)


def make_shuffled(ioctx):
    return ShuffledInput(FilesReader(ioctx))


def test_inputs_are_registered_names_functions_and_paths_of_classes(tmp_path):
    folder = write_for(PlaneEnv, tmp_path)
    register_input("my logs", make_shuffled)
    assert registry_contains_input("my logs")
    assert registry_get_input("my logs") is make_shuffled
    losses = [
        train_once(input_, folder)
        for input_ in ("my logs", make_shuffled, f"{__name__}.FilesReader")
    ]
    assert losses[0] == losses[1] == losses[2]
    del INPUTS["my logs"]
    with pytest.raises(ConfigError, match=r"No input is registered as 'my logs'; there are \["):
        registry_get_input("my logs")
    with pytest.raises(ConfigError, match="must be a function"):
        register_input("my logs", 5)
    with pytest.raises(ConfigError, match="input_config has no key 'input_files'"):
        BCConfig().offline_data(input_="a.json", input_config={"input_files": folder})


def train_once(input_, folder, **settings):
    config = quick_config(BCConfig, PlaneEnv, train_batch_size=12, **settings)
    config.offline_data(input_=input_, input_config={"input_files": folder})
    algorithm = config.build()
    result = algorithm.train()
    algorithm.stop()
    return result["info"]["learner"][DEFAULT_POLICY_ID]["learner_stats"]


@pytest.mark.parametrize("input_", ["my logs", make_shuffled, f"{__name__}.FilesReader"])
def test_filters_leave_the_batches_of_readers_as_they_are(tmp_path, caplog, input_):
    folder = write_for(PlaneEnv, tmp_path)
    register_input("my logs", make_shuffled)
    expected = train_once(input_, folder, log_level="WARN")
    assert "observation_filter" not in caplog.text
    filtered = train_once(input_, folder, log_level="WARN", observation_filter="MeanStdFilter")
    assert filtered == expected
    assert "observation_filter and reward_filter do not change the batches" in caplog.text
    del INPUTS["my logs"]


@pytest.mark.usefixtures("ray_cluster")
def test_registered_inputs_reach_workers_in_other_processes(tmp_path):
    folder = write_for(PlaneEnv, tmp_path, lines=40)
    register_input("my logs", make_shuffled)
    config = quick_config(BCConfig, PlaneEnv, num_rollout_workers=2, train_batch_size=24)
    config.offline_data(input_="my logs", input_config={"input_files": folder})
    algorithm = config.build()
    assert algorithm.train()["timesteps_total"] == 24
    algorithm.stop()
    del INPUTS["my logs"]


# -- recordings of algorithms --------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["tf2", "tf"])
def test_ppo_learns_from_what_it_recorded_and_is_evaluated_in_an_environment(tmp_path, framework):
    config = quick_config(PPOConfig, "CartPole-v1", train_batch_size=64)
    recording = (
        config.copy()
        .framework(framework)
        .offline_data(output=str(tmp_path), output_config={"format": "rllib"})
    )
    algorithm = recording.build()
    for _ in range(3):
        algorithm.train()
    algorithm.stop()
    batch = JsonReader(str(tmp_path)).next()
    assert {"obs", "new_obs", "actions", "action_logp", "eps_id", "t"} <= set(batch)
    assert not {"advantages", "value_targets", "infos"} & set(batch)
    assert sum(x.count for x in JsonReader(str(tmp_path)).read_all_files()) == 3 * 64

    config.framework(framework).offline_data(input_=str(tmp_path), postprocess_inputs=True)
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration=2,
        evaluation_config=PPOConfig.overrides(input_="sampler"),
    )
    algorithm = config.build()
    result = algorithm.train()
    assert result["timesteps_total"] == 64
    assert np.isnan(result["episode_reward_mean"])
    assert result["evaluation"]["episode_reward_mean"] > 0.0
    algorithm.stop()
    rows = {"obs": np.zeros((3, 4), np.float32)}
    config.offline_data(input_=write(tmp_path / "others", [make_line(0, **rows)]))
    algorithm = config.build()
    with pytest.raises(MissingColumnError, match=r"PPOTF.Policy reads 'vf_preds', which the data"):
        algorithm.train()
    algorithm.stop()


def test_several_policies_learn_from_one_recording(tmp_path):
    parts = {"a": make_line(0), "b": make_line(1)}
    folder = write(tmp_path, [MultiAgentBatch(parts, 3)] * 8)
    for config_class in (BCConfig, MARWILConfig):
        config = quick_config(config_class, train_batch_size=24)
        config.multi_agent(
            policies={pid: PolicySpec(None, OBS, TWO, {}) for pid in ("a", "b")},
            policy_mapping_fn=lambda agent_id, *args, **kwargs: agent_id,
        )
        config.offline_data(input_=lambda ioctx: JsonReader(folder, ioctx))
        algorithm = config.build()
        assert set(algorithm.train()["info"]["learner"]) == {"a", "b"}
        algorithm.stop()


def test_the_reader_of_the_guide_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "migrate" / "rllib.md").read_text()
    section = page.partition("\n## Recorded experience\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    rows = {"obs": np.zeros((3, 4), np.float32)}
    write(tmp_path / "logs", [make_line(i, **rows) for i in range(8)])
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    algorithm = names["config"].training(train_batch_size=12).build()
    assert algorithm.train()["timesteps_total"] == 12
    algorithm.stop()
    del INPUTS["my_logs"]


# -- combinations ---------------------------------------------------------------------------------


class Numbers(InputReader):
    """Counts from 0."""

    def __init__(self, ioctx=None):
        self.number = -1

    def next(self):
        self.number += 1
        return make_line(self.number, rows=1)


def test_a_mixture_draws_by_weights(tmp_path):
    register_input("numbers", Numbers)
    folder = write(tmp_path, [100])
    context = IOContext(config={"seed": 3})
    reader = MixedInput({"numbers": 0.25, folder: 0.75}, context)
    numbers = read_numbers(reader, 400)
    assert 80 < sum(number != 100 for number in numbers) < 120
    assert read_numbers(MixedInput({Numbers: 0.25, folder: 0.75}, context), 400) == numbers
    reader.close()
    del INPUTS["numbers"]


def test_wrong_mixtures_are_refused(tmp_path):
    context = IOContext()
    for weights in ({Numbers: 0.5}, {Numbers: 1.5, "sampler": -0.5}):
        with pytest.raises(ConfigError, match=r"must not be negative and sum to 1, got (0\.5|1): "):
            MixedInput(weights, context)
    assert MixedInput({Numbers: 0.1 + 0.2, lambda ioctx: Numbers(): 0.7}, context)
    with pytest.raises(ConfigError, match="needs an environment"):
        MixedInput({"sampler": 1.0}, context)
    with pytest.raises(ConfigError, match=r"not supported\. .* Minari"):
        MixedInput({"d4rl.hopper-medium-v2": 1.0}, context)
    with pytest.raises(ConfigError, match="must be the class itself"):
        MixedInput({"package.readers.Reader": 1.0}, context)


def test_a_mixture_with_the_sampler_reports_its_episodes(tmp_path):
    folder = write(tmp_path, range(8))

    def make_mixed(ioctx):
        return MixedInput({folder: 0.5, "sampler": 0.5}, ioctx)

    config = quick_config(BCConfig, "CartPole-v1", input_=make_mixed, rollout_fragment_length=50)
    config.environment(observation_space=None)
    folder = write(tmp_path / "cart", [make_line(i, obs=np.zeros((3, 4))) for i in range(8)])
    algorithm = config.build()
    results = [algorithm.train() for _ in range(8)]
    counts = np.diff([0, *(result["timesteps_total"] for result in results)])
    assert {*counts} == {16, 50}
    assert results[-1]["episode_reward_mean"] > 1.0
    algorithm.stop()


def test_a_shuffled_input_returns_each_batch_once():
    numbers = read_numbers(ShuffledInput(Numbers(), 4), 40)
    assert numbers != [*range(40)]
    assert len({*numbers}) == 40
    assert {*range(30)} <= {*numbers}
    assert read_numbers(ShuffledInput(Numbers(), 4), 40) == numbers
    assert read_numbers(ShuffledInput(Numbers(), 4, seed=1), 40) != numbers
    assert read_numbers(ShuffledInput(Numbers(), 1), 5) == [*range(5)]


@pytest.mark.parametrize("multi_agent", [False, True])
def test_combinations_continue_at_their_position(tmp_path, multi_agent):
    lines = [make_line(i) for i in range(12)]
    if multi_agent:
        lines = [MultiAgentBatch({"a": line}, 3) for line in lines]
    folder = write(tmp_path, lines)

    def make_reader():
        mixture = MixedInput({folder: 0.5, lambda ioctx: JsonReader(folder): 0.5}, IOContext())
        return ShuffledInput(mixture, 3)

    def read(reader, count):
        batches = [reader.next().as_multi_agent() for _ in range(count)]
        return [int(next(iter(x.policy_batches.values()))["eps_id"][0]) for x in batches]

    reader = make_reader()
    read(reader, 7)
    state = reader.get_state()
    expected = read(reader, 10)
    other = make_reader()
    other.set_state(state)
    assert read(other, 10) == expected
    own = ShuffledInput(Numbers(), 2)
    assert own.get_state()["child"] is None  # its reader has no state
    own.set_state(own.get_state())


# -- datasets -------------------------------------------------------------------------------------


def make_dataset_config(folder, **options):
    return {"input": "dataset", "input_config": {"format": "json", "paths": folder, **options}}


def test_shards_have_all_rows_and_none_is_for_the_local_worker(tmp_path):
    folder = write(tmp_path, range(24), max_file_size=1500)
    dataset, shards = get_dataset_and_shards(make_dataset_config(folder))
    assert shards == [dataset]
    assert dataset.count() == 72
    config = BCConfig().offline_data(
        input_="dataset", input_config={"paths": folder, "format": "json"}
    )
    _, shards = get_dataset_and_shards(config, num_workers=4)
    assert shards[0] is None
    sent = [pickle.loads(pickle.dumps(shard)) for shard in shards[1:]]
    numbers = [
        {int(batch["eps_id"][0]) for batch in DatasetReader(shard).read_all_files()}
        for shard in sent
    ]
    assert sum(map(len, numbers)) == len(set.union(*numbers)) == 24
    assert "shard=(1, 4)" in repr(sent[1])
    with pytest.raises(UsageError, match="is a shard of a dataset"):
        sent[0].split(2)


def test_a_worker_reads_its_shard(tmp_path):
    folder = write(tmp_path, range(24), max_file_size=1500)
    _, shards = get_dataset_and_shards(make_dataset_config(folder), num_workers=2)
    numbers = []
    for index in (1, 2):
        config = quick_config(BCConfig, train_batch_size=10)
        config.environment(observation_space=OBS, action_space=TWO)
        config.offline_data(input_="dataset", shuffle_buffer_size=0)
        worker = RolloutWorker(
            config=config,
            default_policy_class=BCTF2Policy,
            worker_index=index,
            num_workers=2,
            dataset_shards=shards,
        )
        numbers.append({float(x) for _ in range(20) for x in worker.sample()["obs"][:, 0]})
        worker.stop()
    assert numbers[0] | numbers[1] == {i / 8 for i in range(24)}
    assert not numbers[0] & numbers[1]


def test_a_loader_function_returns_any_data():
    columns = dict(make_line(1))
    dataset, shards = get_dataset_and_shards(
        {"input": "dataset", "input_config": {"loader_fn": lambda: columns}}, num_workers=3
    )
    assert dataset.count() == 3
    assert [shard.count() for shard in shards[1:]] == [1, 1, 1]
    reader = DatasetReader(dataset, IOContext(config={"train_batch_size": 5}))
    assert reader.next().count >= 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "csv"}, r"must be one of \('json', 'parquet'\), got 'csv'"),
        ({"loader_fn": dict}, "must have either 'format' and 'paths', or 'loader_fn'"),
        ({"paths": None}, "must have either 'format' and 'paths', or 'loader_fn'"),
    ],
)
def test_wrong_datasets_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        get_dataset_and_shards(make_dataset_config(str(tmp_path), **options))


def test_a_dataset_needs_its_input():
    with pytest.raises(ConfigError, match=r"needs offline_data\(input_='dataset'\)"):
        get_dataset_and_shards(PPOConfig())


# -- rows in the loss of a model ------------------------------------------------------------------


class Imitating(TFModelV2):
    """Adds the likelihood of recorded actions to the loss of a policy."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.network = FullyConnectedNetwork(
            obs_space, action_space, num_outputs, model_config, "network"
        )

    def forward(self, input_dict, state, seq_lens):
        return self.network(input_dict, state, seq_lens)

    def value_function(self):
        return self.network.value_function()

    def custom_loss(self, policy_loss, loss_inputs):
        reader = JsonReader(self.model_config["custom_model_config"]["files"])
        rows = reader.tf_input_ops()
        logits, _ = self.forward({"obs": tf.cast(rows["obs"], tf.float32)}, [], None)
        self.imitation = -tf.reduce_mean(Categorical(logits, self).logp(rows["actions"]))
        self.episode = tf.reduce_max(rows["eps_id"])
        mask = loss_inputs["loss_mask"]  # read, so that XLA could compile the rest
        return policy_loss + 10.0 * self.imitation * tf.reduce_max(mask)

    def metrics(self):
        return {"imitation": self.imitation, "episode": self.episode}


@pytest.mark.parametrize("policy_class", [PGTF2Policy, PGTF1Policy])
def test_each_update_reads_further_rows(tmp_path, policy_class):
    folder = write(tmp_path, [make_line(i, actions=np.full(3, i // 3)) for i in range(6)])
    ModelCatalog.register_custom_model("imitating", Imitating)
    model = {"custom_model": "imitating", "custom_model_config": {"files": folder}}
    policy = make(policy_class, model={**model, "fcnet_hiddens": [4]}, lr=0.05)
    batch = batch_for(policy, 8)
    batch["advantages"] = np.zeros(8, np.float32)
    stats = [policy.learn_on_batch(batch)["learner_stats"] for _ in range(60)]
    assert policy.program.updates.compile_mode.value == "tf.function"
    episodes = [int(x["model/episode"]) for x in stats]
    assert episodes[1:7] == [(episodes[0] + 1 + i) % 6 for i in range(6)]
    first, last = (
        np.mean([x["model/imitation"] for x in part]) for part in (stats[:6], stats[-6:])
    )
    assert last < 0.9 * first
    compiled = policy_class(OBS, TWO, {**policy.config, "jit_compile": True})
    if policy_class is PGTF2Policy:
        with pytest.raises(ConfigError, match="jit_compile=True needs a loss without calls of Pyt"):
            compiled.learn_on_batch(batch)


def test_rows_are_tensors_with_any_number_of_rows():
    rows = Numbers().tf_input_ops()
    assert int(rows["eps_id"][0]) == 0
    assert rows["obs"].shape == (1, 3)
    assert "terminateds" not in rows  # only numbers, as in RLlib

    class Several(InputReader):
        def next(self):
            return MultiAgentBatch({"a": make_line(0), "b": make_line(1)}, 3)

    with pytest.raises(BatchError, match=r"batches of one policy, got those of \['a', 'b'\]"):
        Several().tf_input_ops()


def test_nested_rows_and_changed_sizes():
    class Growing(InputReader):
        count = 0

        def next(self):
            self.count += 1
            return SampleBatch({"obs": {"a": np.ones((self.count, 2)), "b": np.arange(self.count)}})

    reader = Growing()

    @tf.function
    def sum_rows():
        rows = reader.tf_input_ops()
        return tf.reduce_sum(rows["obs"]["a"]), tf.shape(rows["obs"]["b"])[0]

    assert [tuple(map(float, sum_rows())) for _ in range(3)] == [(2.0, 1), (4.0, 2), (6.0, 3)]
