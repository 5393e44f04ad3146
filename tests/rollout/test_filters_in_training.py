"""Running filters as a part of the policy: the same statistics wherever it acts."""

import runpy

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from helpers.workers import make_config
from tfpolicies import PPO, PPOTF2Policy, RolloutWorker
from tfpolicies.models.mean_std_filters import RewardFilter
from tfpolicies.models.spaces import batch_leaves, leaves, unflatten


class Shifted(gym.Env):
    """Observations around (100, -3) with deviations (20, 0.1); rewards around 50."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config=None):
        self.rng = np.random.default_rng(0)

    def _obs(self):
        return (np.array([100.0, -3.0]) + self.rng.normal(0, [20.0, 0.1])).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        return self._obs(), self.rng.normal(50.0, 10.0), self.count == 20, False, {}


def config(**settings):
    training = {"train_batch_size": 200, "sgd_minibatch_size": 100, "num_sgd_iter": 2}
    return make_config(Shifted, **training, observation_filter="MeanStdFilter", **settings)


@pytest.fixture(scope="module")
def trained():
    algorithm = config(reward_filter="MeanStdFilter").build()
    batches = []
    for _ in range(3):
        batches.append(algorithm.sample_train_batch()["default_policy"])
        algorithm.train()
    return algorithm, batches


def test_statistics_are_those_of_all_observations_that_were_trained_on(trained):
    algorithm, batches = trained
    policy = algorithm.get_policy()
    (stat,) = policy.filter.statistics
    assert stat.count == 1200  # three batches of the fixture, three of training
    np.testing.assert_allclose(stat.mean, [100.0, -3.0], rtol=0.05)
    np.testing.assert_allclose(stat.std, [20.0, 0.1], rtol=0.1)
    assert np.abs(batches[0]["obs"][:, 0]).mean() > 50  # batches keep what the environment showed


def test_learning_and_acting_see_the_same_inputs():
    algorithm = config(num_envs_per_worker=2).build()
    for _ in range(3):
        batch = algorithm.sample_train_batch()["default_policy"]
        info = algorithm.get_policy().compute_gradients(batch)[1]
        assert info["learner_stats"]["kl"] == pytest.approx(0.0, abs=1e-6)
        algorithm.train()


def test_evaluation_and_single_actions_use_the_same_numbers_and_change_none(trained):
    algorithm, _ = trained
    policy = algorithm.get_policy()
    before, stat = policy.filter.get_state(), policy.filter.statistics[0]
    algorithm.evaluate()
    other = algorithm.evaluation_worker.get_policy()
    obs = np.array([[120.0, -3.1], [80.0, -2.9]], np.float32)
    scaled = np.clip((obs - stat.mean) / (stat.std + 1e-8), -10, 10).astype(np.float32)
    plain = factories.make(obs=spaces.Box(-10, 10, (2,)))
    for filtering in (policy, other):
        plain.set_weights(filtering.get_weights())
        logits, expected = (
            acting.compute_actions(rows, explore=False)[2]["action_dist_inputs"]
            for acting, rows in ((filtering, obs), (plain, scaled))
        )
        np.testing.assert_allclose(logits, expected, atol=1e-5)
    factories.assert_equal(policy.filter.get_state(), before)


def test_rewards_are_learned_from_at_their_running_scale_and_reported_raw(trained):
    algorithm, batches = trained
    assert batches[0]["rewards"].mean() == pytest.approx(10.0)  # not scaled yet, but clipped
    assert 4.0 < batches[-1]["rewards"].mean() < 6.0  # 50 / 10
    assert algorithm.train()["episode_reward_mean"] == pytest.approx(1000.0, rel=0.05)


def test_checkpoints_and_exports_have_the_filter(trained, tmp_path):
    algorithm, _ = trained
    policy = algorithm.get_policy()
    algorithm.save(tmp_path / "run")
    copy = PPO.from_checkpoint(tmp_path / "run", config={"env": Shifted}).get_policy()
    obs = np.array([[120.0, -3.1], [80.0, -2.9]], np.float32)
    actions, _, extras = policy.compute_actions(obs, explore=False)
    np.testing.assert_array_equal(
        copy.compute_actions(obs, explore=False)[2]["action_dist_inputs"],
        extras["action_dist_inputs"],
    )
    assert copy.filter.pending_count == policy.filter.pending_count
    result = policy.export_model(tmp_path / "onnx", onnx=True)
    client = runpy.run_path(tmp_path / "onnx" / "play.py")["OnnxPolicy"](result.path)
    np.testing.assert_array_equal(client.act(obs), actions)


def test_a_single_worker_applies_its_statistics_from_sample_to_sample():
    worker = RolloutWorker(config=config(), default_policy_class=PPOTF2Policy)
    policy = worker.get_policy()
    worker.sample()
    assert policy.filter.statistics[0].count == 0
    worker.sample()
    assert policy.filter.statistics[0].count == 200


NESTED = spaces.Dict(
    place=spaces.Box(-np.inf, np.inf, (2,), np.float32),
    kind=spaces.Discrete(3),
    speed=spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
)


def filtered(space, **model):
    """A policy that has seen observations around 100, and some that are clipped."""
    settings = {"fcnet_hiddens": [4], **model}
    policy = factories.make(obs=space, observation_filter="MeanStdFilter", model=settings)
    rows = batch_leaves(leaves(space), factories.rows_of(space, 50), "rows")
    rows = [100 + 20 * x if x.dtype == np.float32 else x for x in rows]
    policy.filter.observe(rows)
    policy.driver.learning.flush_filters()
    obs = [np.concatenate([x[:8], 50 * x[:2]]) if x.dtype == np.float32 else x[:10] for x in rows]
    return policy, unflatten(space, obs)


def encoded(obs):
    if not isinstance(obs, dict):
        return obs
    kind = np.eye(3, dtype=np.float32)[obs["kind"]]
    return {"obs_place": obs["place"], "obs_kind": kind, "obs_speed": obs["speed"]}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
@pytest.mark.core
@pytest.mark.parametrize("space", [NESTED, NESTED["place"]], ids=["dict", "box"])
def test_a_keras_copy_normalises_as_the_policy_does_and_is_saved_whole(space, tmp_path):
    policy, obs = filtered(space, vf_share_layers=False)
    extras = policy.compute_actions(obs, explore=False).extras
    copy = policy.to_keras()
    copy.save(tmp_path / "copy.keras")
    names = {f"{name}_normalization" for name in ("obs", "obs_place", "obs_speed")}
    for model in (copy, keras.models.load_model(tmp_path / "copy.keras")):
        logits, values = model(encoded(obs))
        np.testing.assert_allclose(logits, extras["action_dist_inputs"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(values[:, 0], extras["vf_preds"], rtol=1e-5, atol=1e-6)
        results = [layer for layer in model.layers if layer.name in names]
        assert len(results) == len(policy.program.spec.indices_of_filtered_leaves)
        assert not any(layer.trainable or layer.variables for layer in results)
        normalized = results[0](np.asarray(obs["place"] if space is NESTED else obs))
        assert np.abs(normalized).max() == 10.0  # exactly the input of the policy's model
        (mean, scale), *_ = policy.filter.get_scalings()
        raw = obs["place"] if space is NESTED else obs
        np.testing.assert_array_equal(normalized, np.clip((raw - mean) * scale, -10, 10))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
@pytest.mark.core
@pytest.mark.parametrize("suffix", ["keras", "weights.h5"])
def test_the_weights_of_a_keras_copy_with_a_filter_go_back_into_policies(suffix, tmp_path):
    policy, _ = filtered(NESTED, vf_share_layers=False)
    copy, path = policy.to_keras(), tmp_path / f"copy.{suffix}"
    copy.save(path) if suffix == "keras" else copy.save_weights(path)
    other, _ = filtered(NESTED, vf_share_layers=False)
    other.set_weights([np.zeros_like(array) for array in other.get_weights().values()])
    report = other.import_model_from_h5(path)
    assert report.kept == ()
    factories.assert_equal(other.get_weights(), policy.get_weights())


@pytest.mark.core
def test_a_keras_copy_with_a_memory_normalises_sequences():
    policy, obs = filtered(NESTED["place"], use_lstm=True, lstm_cell_size=3)
    memory = np.zeros((10, 3), np.float32)
    extras = policy.compute_actions(obs, [memory, memory], explore=False).extras
    inputs = {"obs": obs[:, None], "seq_lens": np.ones(10, np.int32)}
    inputs |= {"state_in_0": memory, "state_in_1": memory}
    outputs = policy.to_keras()(inputs)
    logits = np.asarray(outputs["action_dist_inputs"])[:, 0]
    np.testing.assert_allclose(logits, extras["action_dist_inputs"], rtol=1e-5, atol=1e-6)


@pytest.mark.core
def test_filters_are_called_with_observations():
    policy, obs = filtered(NESTED)
    call, stat = policy.filter, policy.filter.statistics[0]
    mean, scale = policy.filter.get_scalings()[0]
    batch = call(obs, update=False)
    np.testing.assert_array_equal(batch["place"], np.clip((obs["place"] - mean) * scale, -10, 10))
    np.testing.assert_array_equal(batch["kind"], obs["kind"])
    one = call({key: part[3] for key, part in obs.items()})
    np.testing.assert_array_equal(one["speed"], batch["speed"][3])
    assert (call.pending_count, call.statistics[0].count) == (0, stat.count)
    call({key: part[3] for key, part in obs.items()}, update=True)
    assert (call.pending_count, call.statistics[0].count) == (1, stat.count)
    rewards = RewardFilter()
    assert rewards([2.0, 3.0], update=True).tolist() == [2.0, 3.0]
    assert rewards.pending_count == 2
