"""The parts behind a policy: whoever drives one asks for a part, and not what sort it is."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

import tfpolicies
from helpers.environments import CountingEnv
from helpers.factories import OBS, TWO, batch_for, make
from tfpolicies import (
    Algorithm,
    MultiAgentEnv,
    Policy,
    PolicyMap,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
)
from tfpolicies.connectors.agent_connectors import ClipObservations
from tfpolicies.errors import UsageError
from tfpolicies.policy.policy import ActionBatch

PACKAGE = Path(tfpolicies.__file__).parent
ARGUMENTS = {
    "algorithms/policy_recording.py": 1,
    "policy_map/policy_map.py": 1,
    "rollout/policy_changes.py": 1,
}
"""Where what users give is checked, and how often."""


class ByHand(Policy):
    """Always the same, and counts what it learns from; its constructor does not call super's."""

    def __init__(self, observation_space, action_space, config):
        self.observation_space, self.action_space = observation_space, action_space
        self.config = dict(config)
        self.policy_id = "by_hand"
        self.agent_connectors = self.action_connectors = None
        self.learned = []

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.ones(len(obs_batch), np.int64), [], {})

    def learn_on_batch(self, samples):
        self.learned.append(samples.count)
        return {"learner_stats": {"rows": samples.count}}


class Overriding(PPOTF2Policy):
    """Does what its Program does, by a method of its own."""

    def compute_actions(self, *args, **kwargs):
        return super().compute_actions(*args, **kwargs)


SORTS = pytest.mark.parametrize("kind", [ByHand, PPOTF2Policy, Overriding])


class Pair(MultiAgentEnv):
    """Two agents; episodes of three steps."""

    observation_space = spaces.Dict(a=OBS, b=OBS)
    action_space = spaces.Dict(a=TWO, b=TWO)

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return {agent: np.zeros(3, np.float32) for agent in "ab"}, {}

    def step(self, actions):
        self.now += 1
        flags = dict.fromkeys(("a", "b", "__all__"), self.now == 3)
        cuts = dict.fromkeys(flags, False)
        obs = {agent: np.full(3, self.now, np.float32) for agent in "ab"}
        return obs, dict.fromkeys("ab", 1.0), flags, cuts, {}


def config_of(kind, env=CountingEnv, **rollouts):
    sizes = {"train_batch_size": 8, "sgd_minibatch_size": 4, "num_sgd_iter": 2}
    return (
        PPOConfig()
        .environment(lambda context: env())
        .rollouts(rollout_fragment_length=8, **rollouts)
        .training(**sizes, model={"fcnet_hiddens": [4]})
        .framework(inference="tf", jit_compile=False)
        .multi_agent(policies={"default_policy": (kind, None, None, {})})
        .evaluation(evaluation_duration=1)
        .debugging(seed=3, log_level="ERROR")
    )


ASKED = re.compile(
    r"""isinstance\([^()]*Policy\)
    | \b(getattr|hasattr)\((self\.)?_?policy,\ "
    | \btype\((self\.)?_?policy\)\.\w+\ is""",
    re.VERBOSE,
)
"""A question what sort of policy there is."""


@pytest.mark.core
def test_nobody_asks_what_sort_of_policy_there_is():
    results = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name, asked = path.relative_to(PACKAGE).as_posix(), ASKED.findall(path.read_text())
        if asked and not name.startswith("policy/"):
            results[name] = len(asked)
    assert results == ARGUMENTS


@pytest.mark.core
def test_questions_of_sort_are_found():
    for line in (
        "if isinstance(policy, TFPolicy):",
        'getattr(policy, "filter", None)',
        'if hasattr(self.policy, "generator"):',
        "if type(policy).learn_on_batch is TFPolicy.learn_on_batch:",
    ):
        assert ASKED.search(line), line


@SORTS
@pytest.mark.parametrize("env", [CountingEnv, Pair])
def test_workers_sample_with_any_policy(kind, env):
    config = config_of(kind, env, agent_connectors=[ClipObservations(-1.0, 1.0)])
    worker = RolloutWorker(config=config)
    batch = worker.sample().as_multi_agent().policy_batches["default_policy"]
    assert batch.count == (8 if env is CountingEnv else 16)
    assert batch["obs"].max() <= 1.0
    state = worker.get_state()
    worker.set_state(state)
    results, _ = worker.sample_and_learn(worker.sample().count, 2, 4, ["rewards"])
    assert "learner_stats" in results["default_policy"]
    worker.stop()


@SORTS
def test_algorithms_train_evaluate_and_save_any_policy(kind, tmp_path):
    algorithm = config_of(kind).build()
    result = algorithm.train()
    assert "learner_stats" in result["info"]["learner"]["default_policy"]
    assert algorithm.evaluate()["evaluation"]["episodes_this_iter"] == 1
    algorithm.save(tmp_path)
    algorithm.stop()
    policies = {"default_policy": PolicySpec(policy_class=kind)}
    settings = {"env": lambda context: CountingEnv(), "policies": policies}
    mapping = config_of(kind).policy_mapping_fn
    again = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=mapping, config=settings)
    assert type(again.get_policy()) is kind
    again.train()
    again.stop()


@SORTS
def test_a_map_holds_any_policy(kind):
    policy = kind(OBS, TWO, {"model": {"fcnet_hiddens": [4]}} if kind is not ByHand else {})
    with PolicyMap(capacity=1) as policies:
        policies["one"] = policy
        policies["other"] = make()
        assert policies["one"] is policy
        obs = {name: np.zeros((2, 3), np.float32) for name in policies}
        assert set(policies.compute_actions(obs)) == {"one", "other"}
        policies.copy_policy("one", "copy")
        if kind is ByHand:
            with pytest.raises(UsageError, match="no known hyperparameters"):
                policies.perturb("one", "lr")
        else:
            assert policies.perturb("one", "lr", factors=(2.0,))["lr"] > 0


@SORTS
def test_a_session_acts_by_the_part_that_acts(kind):
    policy = kind(OBS, TWO, {"model": {"fcnet_hiddens": [4]}, "inference": "tf"})
    assert TWO.contains(int(policy.session().act(np.zeros(3, np.float32))))
    assert (policy.driver.acting.stackable is None) == (kind is not PPOTF2Policy)
    assert (policy.driver.program is None) == (policy.driver.acting.inference is None)


@SORTS
def test_remote_workers_take_any_policy(kind, ray_cluster):
    config = config_of(kind).rollouts(num_rollout_workers=1, rollout_fragment_length=8)
    algorithm = config.build()
    result = algorithm.train()
    assert "learner_stats" in result["info"]["learner"]["default_policy"]
    algorithm.stop()


@pytest.mark.core
def test_an_update_of_a_policy_by_hand_is_told_of_each_minibatch():
    policy, rows = ByHand(OBS, TWO, {}), batch_for(make(), 8)
    policy.driver.learning.update(rows, 2, 4, rng=np.random.default_rng(0))
    assert policy.learned == [4, 4, 4, 4]
    policy.driver.learning.train(rows, 2, 4)
    assert policy.learned[4:] == [8]


@pytest.mark.core
def test_a_policy_is_freed_with_its_last_reference():
    import gc
    import weakref

    for kind in (ByHand, PPOTF2Policy, Overriding):
        policy = kind(OBS, TWO, {"model": {"fcnet_hiddens": [4]}})
        policy.driver.learning.flush_filters()
        policy.driver.apply_filters()
        policy.session()
        gc.disable()
        try:
            alive = weakref.ref(policy)
            del policy
            assert alive() is None, kind
        finally:
            gc.enable()


def test_names_of_ported_code_are_found_once_compat_is_there():
    code = """
import gymnasium as gym, numpy as np
from tfpolicies import Policy
class Always(Policy):
    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return np.zeros(len(obs_batch)), [], {}
space = gym.spaces.Discrete(2)
policy = Always(space, space, {})
try:
    policy._create_exploration
except AttributeError as error:
    print("compat" in str(error))
import tfpolicies.compat
print(policy._create_exploration())
print(hasattr(policy, "loss_initialized"), hasattr(policy, "nothing"))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:3] == ["True", "None", "False False"]
