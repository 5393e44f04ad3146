"""Arrays of actions that left the package are never written again: sessions, environments."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from tfpolicies import PPOConfig
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import EnvError
from tfpolicies.policy.policy import Policy

pytestmark = pytest.mark.usefixtures("kept_programs")

LINE = spaces.Box(-1.0, 1.0, (1,), np.float32)
NESTED = spaces.Dict({"push": LINE, "pair": spaces.Tuple([spaces.Discrete(3), factories.PLANE])})
MEMORY = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 5}


def halving(inference):
    """A policy whose mean action is half of its observation."""
    policy = factories.make(
        obs=LINE, actions=LINE, model={"fcnet_hiddens": []}, inference=inference
    )
    weights = policy.get_weights()
    for x in weights.values():
        x[...] = 0.0
        if x.shape == (1, 2):  # from the observation to mean and logarithm of the deviation
            x[0, 0] = 0.5
    policy.set_weights(weights)
    return policy


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx", "session"])
def test_a_session_gives_each_action_in_an_array_of_its_own(inference):
    session = halving(inference).session()
    actions = [session.act(np.float32([x]), explore=False) for x in (0.0, 0.5, 1.0)]
    assert actions == [[0.0], [0.25], [0.5]]
    assert all(action.flags.writeable for action in actions)


@pytest.mark.parametrize("inference", ["tf", "onnx"])
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize(
    "actions", [factories.TWO, factories.PLANE, NESTED], ids=["one", "Box", "nested"]
)
@pytest.mark.parametrize("model", [{"fcnet_hiddens": [4]}, MEMORY], ids=["plain", "memory"])
def test_what_a_session_gave_stays_as_it_was(inference, batch_size, actions, model):
    policy = factories.varied(factories.make(actions=actions, model=model, inference=inference))
    session = policy.session(batch_size)
    rows = [factories.rows_of(factories.OBS, batch_size or 1, seed) for seed in range(4)]
    results = [session.act(x if batch_size else x[0]) for x in rows]
    before = repr(results)
    for x in rows:
        session.act(x if batch_size else x[0])
    assert repr(results) == before
    assert len({repr(x) for x in results}) > 1


class OwnBuffer(Policy):
    """Gives one and the same array at every call."""

    buffer = np.zeros((1, 1), np.float32)

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.buffer[...] = obs_batch
        return self.buffer, [], {}


def test_a_session_copies_what_a_policy_written_by_hand_gives():
    session = OwnBuffer(LINE, LINE, {}).session()
    actions = [session.act(np.float32([x])) for x in (0.0, 0.5, 1.0)]
    assert actions == [[0.0], [0.5], [1.0]]
    session.act(np.float32([0.25]))[0] = 9.0
    assert OwnBuffer.buffer.tolist() == [[0.25]]


class Keeping(gym.Env):
    """Keeps the actions that it gets, and copies of them."""

    observation_space = LINE
    kept: list = []

    def __init__(self, env_config=None):
        self.action_space = (env_config or {}).get("actions", LINE)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.kept.append((action, repr(action)))
        self.t += 1
        return np.float32([self.t / 10]), 1.0, self.t == 10, False, {}


def arrays_of(action):
    parts = action.values() if isinstance(action, dict) else action
    if isinstance(action, dict | tuple):
        return [x for part in parts for x in arrays_of(part)]
    return [action] if isinstance(action, np.ndarray) else []


@pytest.mark.parametrize(
    "actions", [LINE, factories.TWO, NESTED], ids=["Box", "Discrete", "nested"]
)
@pytest.mark.parametrize("several", [False, True], ids=["one agent", "two agents"])
@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_what_environments_get_is_read_only_and_stays_as_it_was(
    actions, several, inference, monkeypatch
):
    monkeypatch.setattr(Keeping, "kept", [])
    env = make_multi_agent(lambda config: Keeping({"actions": actions})) if several else Keeping
    config = PPOConfig().environment(env, env_config={"actions": actions})
    config = config.training(train_batch_size=40, sgd_minibatch_size=20)
    config = config.framework(jit_compile=False, inference=inference)
    config = config.rollouts(num_envs_per_worker=2).evaluation(evaluation_duration=1)
    if several:
        config = config.multi_agent(policies={"p"}, policy_mapping_fn=lambda *_, **__: "p")
    algorithm = config.build()
    algorithm.train()
    algorithm.evaluate()
    algorithm.stop()
    assert len(Keeping.kept) > 40
    for action, then in Keeping.kept:
        assert repr(action) == then
        assert not any(x.flags.writeable for x in arrays_of(action))


class Writing(Keeping):
    def step(self, action):
        action += 1
        return super().step(action)


@pytest.mark.parametrize("several", [False, True], ids=["one agent", "two agents"])
def test_an_environment_that_writes_to_its_actions_is_named(several, caplog):
    env = make_multi_agent(lambda config: Writing()) if several else Writing
    message = "Actions are read-only: write to a copy, `action = action.copy()`."
    with pytest.raises(EnvError, match="`step` raised ValueError for the action") as result:
        PPOConfig().environment(env).build()
    assert message in str(result.value)
    algorithm = PPOConfig().environment(env, disable_env_checking=True).build()
    with pytest.raises(ValueError, match="read-only") as result:
        algorithm.train()
    noted = "".join([*getattr(result.value, "__notes__", []), caplog.text])
    assert "Environment 0 of worker 0 failed in step(" in noted
    assert message in noted
