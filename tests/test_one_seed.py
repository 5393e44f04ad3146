"""One seed gives one sequence of actions, on every runtime and for every distribution."""

import numpy as np
import pytest
import tiny
from gymnasium import spaces
from marking import telling

from tfpolicies import PPOTF1Policy, PPOTF2Policy

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
DISTRIBUTIONS = {
    "Categorical": (spaces.Discrete(5, start=3), None),
    "MultiCategorical": (spaces.MultiDiscrete([[2, 3], [4, 2]]), None),
    "MultiCategorical of a Box": (spaces.Box(-1, 2, (2,), np.int64), None),
    "Bernoulli": (spaces.MultiBinary(4), None),
    "DiagGaussian": (BOX, None),
    "SquashedGaussian": (BOX, "squashed_gaussian"),
    "Deterministic": (BOX, "deterministic"),
    "product": (
        spaces.Dict(a=spaces.Tuple([spaces.Discrete(3), BOX]), b=spaces.MultiBinary(2)),
        None,
    ),
}
RUNTIMES = {
    "function": (PPOTF2Policy, "tf"),
    "session": (PPOTF1Policy, "tf"),
    "onnx": (PPOTF2Policy, "onnx"),
}


def sequence(policy, observations):
    rng = np.random.default_rng(1)
    weights = policy.get_weights()
    policy.set_weights({key: w + 0.5 * rng.normal(size=w.shape) for key, w in weights.items()})
    actions = [policy.compute_actions(obs).actions for obs in observations]
    return [np.concatenate(leaf) for leaf in zip(*map(leaves_of, actions), strict=True)]


def leaves_of(actions):
    if isinstance(actions, dict):
        return [leaf for part in actions.values() for leaf in leaves_of(part)]
    if isinstance(actions, tuple):
        return [leaf for part in actions for leaf in leaves_of(part)]
    return [actions]


TELLING = [DISTRIBUTIONS[name] for name in ("Categorical", "SquashedGaussian", "product")]


@pytest.mark.parametrize(
    ("actions", "custom"), telling(DISTRIBUTIONS.values(), *TELLING), ids=DISTRIBUTIONS
)
def test_one_seed_gives_one_sequence_of_actions_on_all_runtimes(actions, custom):
    rng = np.random.default_rng(0)
    sizes = [1, 4, 1, 7] * 10
    observations = [rng.uniform(-1, 1, (n, 3)).astype(np.float32) for n in sizes]
    found = {
        name: sequence(
            tiny.make(
                cls,
                actions=actions,
                inference=inference,
                seed=11,
                model={"fcnet_hiddens": [4], "custom_action_dist": custom},
            ),
            observations,
        )
        for name, (cls, inference) in RUNTIMES.items()
    }
    for name in ("session", "onnx"):
        for ours, wanted in zip(found[name], found["function"], strict=True):
            assert ours.dtype == wanted.dtype
            if wanted.dtype.kind == "f":
                np.testing.assert_allclose(ours, wanted, atol=1e-5, rtol=1e-5)
            else:
                np.testing.assert_array_equal(ours, wanted)
