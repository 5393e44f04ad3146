"""Action masks in `{"observations": ..., "action_mask": ...}`."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import OBS, make, varied
from helpers.workers import make_worker
from tfpolicies.errors import ObservationError, SpaceError
from tfpolicies.testing.environments import MaskedEnv

FIVE = spaces.Discrete(5)


def make_space(size):
    return spaces.Dict(observations=OBS, action_mask=spaces.MultiBinary(size))


def make_masked(actions=FIVE, size=5, **config):
    return varied(make(obs=make_space(size), actions=actions, **config), 4)


def draw_observations(rows, size, seed=0):
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, size)) < 0.4).astype(np.int8)
    mask[np.arange(rows), rng.integers(size, size=rows)] = 1
    return {"observations": rng.uniform(-1, 1, (rows, 3)).astype(np.float32), "action_mask": mask}


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_masked_action_is_never_drawn_in_a_million(inference):
    policy = make_masked(spaces.Discrete(5, start=-2), 5, inference=inference)
    for seed in range(100):
        obs = draw_observations(10_000, 5, seed)
        actions, _, extras = policy.compute_actions(obs)
        assert obs["action_mask"][np.arange(len(actions)), actions].all()
        assert len(actions) == 10_000
        assert np.isfinite(extras["action_logp"]).all()


@pytest.mark.core
def test_greedy_and_single_actions_respect_the_mask_and_extremes():
    policy = make_masked()
    for only, mask in enumerate(np.eye(5, dtype=np.int8)):
        obs = {"observations": np.ones(3, np.float32), "action_mask": mask}
        action, _, extras = policy.compute_single_action(obs)
        assert action == only
        assert extras["action_logp"] == pytest.approx(0.0, abs=1e-6)
        assert policy.compute_single_action(obs, explore=False)[0] == only


def test_each_component_of_factored_actions_has_its_own_mask():
    actions = spaces.Tuple(
        [spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,)), spaces.Discrete(2)]
    )
    policy = make_masked(actions, 7)
    obs = draw_observations(2000, 7)
    obs["action_mask"][:, [1, 3, 6]] = 1  # something is allowed in each component
    cells, _, last = policy.compute_actions(obs).actions
    mask, rows = obs["action_mask"], np.arange(2000)
    assert mask[rows, cells[:, 0]].all()
    assert mask[rows, 2 + cells[:, 1]].all()
    assert mask[rows, 5 + last].all()


def test_learning_under_masks_keeps_everything_finite():
    policy = make_masked(lr=0.01, kl_coeff=0.2, entropy_coeff=0.01)
    obs = draw_observations(64, 5)
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
        make_masked(size=4)


def test_a_worker_samples_masked_environments():
    settings = {"num_envs_per_worker": 2, "rollout_fragment_length": 50}
    batch = make_worker(lambda context: MaskedEnv(), **settings).sample()
    mask = batch["obs"]["action_mask"]
    assert mask[np.arange(100), batch["actions"]].all()
    assert not mask.all()


def test_a_mask_under_the_names_of_pettingzoo_is_refused_with_ours():
    policy, obs = make_masked(), draw_observations(2, 5)
    rows = {"observation": obs["observations"], "action_mask": obs["action_mask"]}
    row = {name: part[0] for name, part in rows.items()}
    for act, values in ((policy.compute_actions, rows), (policy.compute_single_action, row)):
        with pytest.raises(ObservationError, match=r"pass \{'observations': obs\['observation'\]"):
            act(values)
    with pytest.raises(ObservationError, match=r"not dict\.$"):
        policy.compute_actions({"action_mask": obs["action_mask"]})
