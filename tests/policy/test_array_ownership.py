"""Arrays of actions that sessions return and environments get, which stay as they are."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import OBS, PLANE, TWO, make, rows_of, varied
from helpers.linear_policies import make_linear
from helpers.short_envs import ShortEnv
from helpers.workers import make_config
from tfpolicies import PPOConfig
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import EnvError
from tfpolicies.policy.policy import Policy

pytestmark = pytest.mark.usefixtures("kept_programs")

LINE = spaces.Box(-1.0, 1.0, (1,), np.float32)
NESTED = spaces.Dict({"push": LINE, "pair": spaces.Tuple([spaces.Discrete(3), PLANE])})
MEMORY = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 5}


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx", "session"])
def test_a_session_gives_each_action_in_an_array_of_its_own(inference):
    session = make_linear(0.5, obs=LINE, actions=LINE, inference=inference).session()
    actions = [session.act(np.float32([x]), explore=False) for x in (0.0, 0.5, 1.0)]
    assert actions == [[0.0], [0.25], [0.5]]
    assert all(action.flags.writeable for action in actions)


@pytest.mark.parametrize("inference", ["tf", "onnx"])
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("actions", [TWO, PLANE, NESTED], ids=["one", "Box", "nested"])
@pytest.mark.parametrize("model", [{"fcnet_hiddens": [4]}, MEMORY], ids=["plain", "memory"])
def test_results_of_a_session_stay_as_they_are(inference, batch_size, actions, model):
    policy = varied(make(actions=actions, model=model, inference=inference))
    session = policy.session(batch_size)
    rows = [rows_of(OBS, batch_size or 1, seed) for seed in range(4)]
    results = [session.act(x if batch_size else x[0]) for x in rows]
    before = repr(results)
    for x in rows:
        session.act(x if batch_size else x[0])
    assert repr(results) == before
    assert len({repr(x) for x in results}) > 1


class OwnBuffer(Policy):
    buffer = np.zeros((1, 1), np.float32)

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.buffer[...] = obs_batch
        return self.buffer, [], {}


def test_a_session_copies_the_arrays_of_a_custom_policy():
    session = OwnBuffer(LINE, LINE, {}).session()
    actions = [session.act(np.float32([x])) for x in (0.0, 0.5, 1.0)]
    assert actions == [[0.0], [0.5], [1.0]]
    session.act(np.float32([0.25]))[0] = 9.0
    assert OwnBuffer.buffer.tolist() == [[0.25]]


class Keeping(ShortEnv):
    """Keeps the actions that it gets, and texts of them."""

    observation_space, length = LINE, 10
    actions: list = []

    def __init__(self, env_config=None):
        self.action_space = (env_config or {}).get("actions", LINE)

    def observe(self):
        return np.float32([self.t / 10])

    def pay(self, action):
        self.actions.append((action, repr(action)))
        return 1.0


def get_arrays(action):
    parts = action.values() if isinstance(action, dict) else action
    if isinstance(action, dict | tuple):
        return [x for part in parts for x in get_arrays(part)]
    return [action] if isinstance(action, np.ndarray) else []


@pytest.mark.parametrize("actions", [LINE, TWO, NESTED], ids=["Box", "Discrete", "nested"])
@pytest.mark.parametrize("several", [False, True], ids=["one agent", "two agents"])
@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_actions_for_environments_are_read_only_and_stay_as_they_are(
    actions, several, inference, monkeypatch
):
    monkeypatch.setattr(Keeping, "actions", [])
    env = make_multi_agent(lambda config: Keeping({"actions": actions})) if several else Keeping
    sizes = {"train_batch_size": 40, "sgd_minibatch_size": 20, "num_envs_per_worker": 2}
    config = make_config(env, **sizes, inference=inference, evaluation_duration=1)
    config.environment(env_config={"actions": actions})
    if several:
        config.multi_agent(policies={"p"}, policy_mapping_fn=lambda *_, **__: "p")
    algorithm = config.build()
    algorithm.train()
    algorithm.evaluate()
    algorithm.stop()
    assert len(Keeping.actions) > 40
    for action, text in Keeping.actions:
        assert repr(action) == text
        assert not any(x.flags.writeable for x in get_arrays(action))


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
    notes = "".join([*getattr(result.value, "__notes__", []), caplog.text])
    assert "Environment 0 of worker 0 failed in step(" in notes
    assert message in notes
