"""The driver of a policy, through which the package uses custom and compiled policies alike."""

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import tfpolicies
from helpers.constant_policies import ConstantPolicy
from helpers.environments import CountingEnv
from helpers.factories import OBS, TWO, batch_for, make
from helpers.short_envs import PairEnv
from helpers.workers import make_config
from tfpolicies import Algorithm, PolicyMap, PolicySpec, PPOTF2Policy, RolloutWorker
from tfpolicies.connectors.agent_connectors import ClipObservations
from tfpolicies.errors import UsageError

PACKAGE = Path(tfpolicies.__file__).parent
ARGUMENTS = {
    "algorithms/episode_playback.py": 1,
    "policy_map/policy_map.py": 1,
    "rollout/policy_changes.py": 1,
}
"""Modules that check the type of a policy which a user passes, and how often."""


class CustomPolicy(ConstantPolicy):
    """Keeps the sizes of the batches it learns from; its constructor does not call super's."""

    def __init__(self, observation_space, action_space, config):
        self.observation_space, self.action_space = observation_space, action_space
        self.config = dict(config)
        self.policy_id = "custom"
        self.agent_connectors = self.action_connectors = None
        self.learned = []

    def learn_on_batch(self, samples):
        self.learned.append(samples.count)
        return {"learner_stats": {"rows": samples.count}}


class Overriding(PPOTF2Policy):
    def compute_actions(self, *args, **kwargs):
        return super().compute_actions(*args, **kwargs)


ALL_CLASSES = pytest.mark.parametrize("policy_class", [CustomPolicy, PPOTF2Policy, Overriding])
NETWORK = {"model": {"fcnet_hiddens": [4]}, "inference": "tf"}


def make_driver_config(policy_class, env=CountingEnv, **settings):
    sizes = {"train_batch_size": 8, "sgd_minibatch_size": 4, "num_sgd_iter": 2}
    sizes |= {"rollout_fragment_length": 8, "evaluation_duration": 1}
    policies = {"default_policy": (policy_class, None, None, {})}
    return make_config(lambda context: env(), **sizes, policies=policies, **settings)


TYPE_CHECK = re.compile(
    r"""isinstance\([^()]*Policy\)
    | \b(getattr|hasattr)\((self\.)?_?policy,\ "
    | \btype\((self\.)?_?policy\)\.\w+\ is""",
    re.VERBOSE,
)


@pytest.mark.core
def test_the_package_checks_the_type_of_a_policy_only_where_users_pass_one():
    counts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name, checks = path.relative_to(PACKAGE).as_posix(), TYPE_CHECK.findall(path.read_text())
        if checks and not name.startswith("policy/"):
            counts[name] = len(checks)
    assert counts == ARGUMENTS


@pytest.mark.core
@pytest.mark.parametrize(
    "line",
    [
        "if isinstance(policy, TFPolicy):",
        'getattr(policy, "filter", None)',
        'if hasattr(self.policy, "generator"):',
        "if type(policy).learn_on_batch is TFPolicy.learn_on_batch:",
    ],
)
def test_type_checks_are_recognized(line):
    assert TYPE_CHECK.search(line)


@ALL_CLASSES
@pytest.mark.parametrize("env", [CountingEnv, PairEnv])
def test_workers_sample_with_any_policy(policy_class, env):
    config = make_driver_config(policy_class, env, agent_connectors=[ClipObservations(-1.0, 1.0)])
    worker = RolloutWorker(config=config)
    batch = worker.sample().as_multi_agent().policy_batches["default_policy"]
    assert batch.count == (8 if env is CountingEnv else 16)
    assert batch["obs"].max() <= 1.0
    state = worker.get_state()
    worker.set_state(state)
    results, _ = worker.sample_and_learn(worker.sample().count, 2, 4, ["rewards"])
    assert "learner_stats" in results["default_policy"]
    worker.stop()


@ALL_CLASSES
def test_algorithms_train_evaluate_and_save_any_policy(policy_class, tmp_path):
    algorithm = make_driver_config(policy_class).build()
    result = algorithm.train()
    assert "learner_stats" in result["info"]["learner"]["default_policy"]
    assert algorithm.evaluate()["evaluation"]["episodes_this_iter"] == 1
    algorithm.save(tmp_path)
    algorithm.stop()
    policies = {"default_policy": PolicySpec(policy_class=policy_class)}
    settings = {"env": lambda context: CountingEnv(), "policies": policies}
    mapping = make_driver_config(policy_class).policy_mapping_fn
    restored = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=mapping, config=settings)
    assert type(restored.get_policy()) is policy_class
    restored.train()
    restored.stop()


@ALL_CLASSES
def test_a_map_holds_any_policy(policy_class):
    policy = policy_class(OBS, TWO, {} if policy_class is CustomPolicy else NETWORK)
    with PolicyMap(capacity=1) as policies:
        policies["one"] = policy
        policies["other"] = make()
        assert policies["one"] is policy
        obs = {name: np.zeros((2, 3), np.float32) for name in policies}
        assert set(policies.compute_actions(obs)) == {"one", "other"}
        policies.copy_policy("one", "copy")
        if policy_class is CustomPolicy:
            with pytest.raises(UsageError, match="no known hyperparameters"):
                policies.perturb("one", "lr")
        else:
            assert policies.perturb("one", "lr", factors=(2.0,))["lr"] > 0


@ALL_CLASSES
def test_a_session_acts_through_the_driver(policy_class):
    policy = policy_class(OBS, TWO, NETWORK)
    assert TWO.contains(int(policy.session().act(np.zeros(3, np.float32))))
    assert (policy.driver.acting.stackable is None) == (policy_class is not PPOTF2Policy)
    assert (policy.driver.program is None) == (policy.driver.acting.inference is None)


@ALL_CLASSES
def test_remote_workers_take_any_policy(policy_class, ray_cluster):
    algorithm = make_driver_config(policy_class, num_rollout_workers=1).build()
    result = algorithm.train()
    assert "learner_stats" in result["info"]["learner"]["default_policy"]
    algorithm.stop()


@pytest.mark.core
def test_an_update_of_a_custom_policy_calls_it_for_each_minibatch():
    policy, rows = CustomPolicy(OBS, TWO, {}), batch_for(make(), 8)
    policy.driver.learning.update(rows, 2, 4, rng=np.random.default_rng(0))
    assert policy.learned == [4, 4, 4, 4]
    policy.driver.learning.train(rows, 2, 4)
    assert policy.learned[4:] == [8]


@pytest.mark.core
def test_a_policy_is_freed_with_its_last_reference():
    for policy_class in (CustomPolicy, PPOTF2Policy, Overriding):
        policy = policy_class(OBS, TWO, NETWORK)
        policy.driver.learning.flush_filters()
        policy.driver.apply_filters()
        policy.session()
        gc.disable()
        try:
            alive = weakref.ref(policy)
            del policy
            assert alive() is None, policy_class
        finally:
            gc.enable()


def test_names_of_ported_code_resolve_after_compat_is_imported():
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
