"""Action masks: `{"observations": ..., "action_mask": ...}` forbids actions everywhere."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from tfpolicies import PPOConfig, PPOTF2Policy, RolloutWorker
from tfpolicies.errors import ObservationError, SpaceError

SEEN = spaces.Box(-1, 1, (3,), np.float32)


def masked(size, inner=SEEN):
    return spaces.Dict(observations=inner, action_mask=spaces.MultiBinary(size))


def masked_policy(actions, size, **config):
    policy = factories.make(obs=masked(size), actions=actions, **config)
    rng = np.random.default_rng(4)
    policy.set_weights({k: w + rng.normal(size=w.shape) for k, w in policy.get_weights().items()})
    return policy


def observations(rows, size, seed=0):
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, size)) < 0.4).astype(np.int8)
    mask[np.arange(rows), rng.integers(size, size=rows)] = 1
    return {
        "observations": rng.uniform(-1, 1, (rows, 3)).astype(np.float32),
        "action_mask": mask,
    }


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_masked_action_is_never_drawn_in_a_million(inference):
    policy = masked_policy(spaces.Discrete(5, start=-2), 5, inference=inference)
    drawn = 0
    for seed in range(100):
        obs = observations(10_000, 5, seed)
        actions, _, extras = policy.compute_actions(obs)
        assert obs["action_mask"][np.arange(len(actions)), actions].all()
        assert np.isfinite(extras["action_logp"]).all()
        drawn += len(actions)
    assert drawn == 1_000_000


@pytest.mark.core
def test_greedy_and_single_actions_respect_the_mask_and_extremes():
    policy = masked_policy(spaces.Discrete(5), 5)
    for only in range(5):
        mask = np.zeros(5, np.int8)
        mask[only] = 1
        obs = {"observations": np.ones(3, np.float32), "action_mask": mask}
        action, _, extras = policy.compute_single_action(obs)
        assert action == only
        assert extras["action_logp"] == pytest.approx(0.0, abs=1e-6)
        assert policy.compute_single_action(obs, explore=False)[0] == only


def test_each_component_of_factored_actions_has_its_own_mask():
    actions = spaces.Tuple(
        [spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,)), spaces.Discrete(2)]
    )
    policy = masked_policy(actions, 7)
    obs = observations(2000, 7)
    obs["action_mask"][:, [1, 3, 6]] = 1  # something is allowed in each component
    cells, _, last = policy.compute_actions(obs).actions
    mask, rows = obs["action_mask"], np.arange(2000)
    assert mask[rows, cells[:, 0]].all()
    assert mask[rows, 2 + cells[:, 1]].all()
    assert mask[rows, 5 + last].all()


def test_learning_under_masks_keeps_everything_finite():
    policy = masked_policy(spaces.Discrete(5), 5, lr=0.01, kl_coeff=0.2, entropy_coeff=0.01)
    obs = observations(64, 5)
    actions, _, extras = policy.compute_actions(obs)
    batch = {
        "obs": obs,
        "actions": actions,
        **extras,
        "advantages": np.linspace(-1, 1, 64, dtype=np.float32),
        "value_targets": np.ones(64, np.float32),
    }
    for _ in range(3):
        stats = policy.learn_on_batch(batch)["learner_stats"]
        assert np.isfinite(list(stats.values())).all()
    assert 0.0 < stats["entropy"] < np.log(5)
    assert all(np.isfinite(w).all() for w in policy.get_weights().values())


def test_a_mask_of_another_size_is_refused_when_the_policy_is_made():
    with pytest.raises(SpaceError, match=r"action_mask'\] has 4 numbers, .* has 5 choices"):
        factories.make(obs=masked(4), actions=spaces.Discrete(5))


def test_a_worker_samples_masked_environments():
    from tfpolicies.testing.environments import MaskedEnv

    config = PPOConfig().environment(lambda context: MaskedEnv()).debugging(seed=0)
    config.framework(inference="tf", jit_compile=False)
    config.rollouts(num_envs_per_worker=2, rollout_fragment_length=50)
    batch = RolloutWorker(config=config, default_policy_class=PPOTF2Policy).sample()
    mask = batch["obs"]["action_mask"]
    assert mask[np.arange(100), batch["actions"]].all()
    assert not mask.all()


def test_a_mask_under_the_names_of_pettingzoo_is_refused_with_ours():
    policy, obs = masked_policy(spaces.Discrete(5), 5), observations(2, 5)
    theirs = {"observation": obs["observations"], "action_mask": obs["action_mask"]}
    with pytest.raises(ObservationError, match=r"pass \{'observations': obs\['observation'\]"):
        policy.compute_actions(theirs)
    one = {name: part[0] for name, part in theirs.items()}
    with pytest.raises(ObservationError, match=r"pass \{'observations': obs\['observation'\]"):
        policy.compute_single_action(one)
    with pytest.raises(ObservationError, match=r"not dict\.$"):
        policy.compute_actions({"action_mask": obs["action_mask"]})
