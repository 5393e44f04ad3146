"""Vector environments without an autoreset mode in their metadata: detected, or refused."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

from helpers.environments import CountingEnv, NestedCountingEnv, counting_vector
from helpers.workers import make_worker
from tfpolicies.envs.vector_adapters import GymVectorEnvAdapter
from tfpolicies.errors import EnvError

SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP


class Paying(CountingEnv):
    """Earns 1 + step at each step, so that a step differs from a reset."""

    def reward(self, episode, step, action):
        return 1.0 + step


class PayingLater(CountingEnv):
    """Earns at the second step of an episode and later."""

    def reward(self, episode, step, action):
        return float(step)


class Unsaid(VectorEnv):
    """A vector environment without a mode in its metadata, whose infos are as `form` says."""

    metadata = {"render_modes": []}

    def __init__(self, mode, form="final_obs", kind=Paying, lengths=(3,), count=2):
        self.inner = counting_vector(mode, count, lengths, kind)
        self.num_envs, self.form = count, form
        for name in ("observation_space", "action_space"):
            setattr(self, name, getattr(self.inner, name))
            setattr(self, f"single_{name}", getattr(self.inner, f"single_{name}"))

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed, options=options)

    def step(self, actions):
        *result, infos = self.inner.step(actions)
        final = infos.get("final_obs")
        if final is None or self.form == "none":
            return (*result, {})
        if self.form == "list":  # as SuperSuit has it
            results = [{} if x is None else {"terminal_observation": x} for x in final]
            return (*result, results)
        if self.form == "array":
            return (*result, {"final_obs": np.stack(list(final))})
        return (*result, {self.form: final})


def sample(env):
    """Samples 8 steps of each environment."""
    return make_worker(env, rollout_fragment_length=8).sample()


@pytest.mark.parametrize("kind", [Paying, PayingLater, NestedCountingEnv])
@pytest.mark.parametrize("form", ["final_obs", "final_observation", "list"])
def test_infos_with_last_observations_mean_resets_in_the_same_step(form, kind):
    envs = GymVectorEnvAdapter(Unsaid(SAME, form, kind, lengths=(2,)))
    envs.reset(None)
    assert envs.mode is None
    envs.step(np.zeros(2, int))
    step = envs.step(np.zeros(2, int))
    assert envs.mode is SAME
    indices, last = step.final_obs
    assert indices.tolist() == [0, 1]
    reached = last["step"] if kind is NestedCountingEnv else last[:, 2]
    assert reached.ravel().tolist() == [2, 2]
    assert envs.step(np.zeros(2, int)).reset_only is None


@pytest.mark.parametrize("form", ["final_obs", "list", "array"])
def test_last_observations_keep_the_order_of_their_environments(form):
    envs = GymVectorEnvAdapter(Unsaid(SAME, form, lengths=(2,), count=3))
    envs.reset(None)
    envs.step(np.zeros(3, int))
    indices, last = envs.step(np.zeros(3, int)).final_obs
    assert indices.tolist() == [0, 1, 2]
    assert last.tolist() == [[0, 0, 2], [1, 0, 2], [2, 0, 2]]


def test_a_step_without_reward_after_an_end_is_a_reset():
    envs = GymVectorEnvAdapter(Unsaid(NEXT, lengths=(2,)))
    envs.reset(None)
    rewards = [envs.step(np.zeros(2, int)).rewards.tolist() for _ in range(2)]
    assert rewards == [[1.0, 1.0], [2.0, 2.0]]
    step = envs.step(np.zeros(2, int))
    assert envs.mode is NEXT
    assert step.reset_only.tolist() == [True, True]
    assert step.obs[:, 2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("mode", "kind", "why"),
    [
        (SAME, Paying, "steps continue after an episode's end without a reset"),
        (NEXT, PayingLater, "its rewards do not distinguish a reset from a step"),
        (SAME, PayingLater, "its rewards do not distinguish a reset from a step"),
    ],
)
def test_modes_that_cannot_be_detected_are_refused(mode, kind, why):
    with pytest.raises(EnvError, match=rf"{why}\. Declare the mode in its class: metadata ="):
        sample(lambda context: Unsaid(mode, "none", kind))


def test_samples_of_both_modes_have_the_same_rows():
    expected = [[e, t] for e in range(2) for t in range(3)]
    for mode in (SAME, NEXT):
        batch = sample(lambda context, mode=mode: Unsaid(mode))
        first = batch["obs"][:, 0] == 0.0
        assert batch["obs"][first][:6, 1:].tolist() == expected
        assert batch["new_obs"][first][:6, 1:].tolist() == [[e, t + 1] for e, t in expected]


def test_a_mode_that_gymnasium_does_not_have_is_named():
    env = gym.vector.SyncVectorEnv([CountingEnv])
    env.metadata = {"autoreset_mode": "Sometimes"}
    with pytest.raises(EnvError, match=r"must be an AutoresetMode.*got 'Sometimes'"):
        GymVectorEnvAdapter(env)
