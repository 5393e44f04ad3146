"""Rounding in exports is judged by the policy in double precision."""

import json

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import TWO
from tfpolicies import PGTF1Policy, PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import ExportError
from tfpolicies.export.reference_runtime import ReferenceRuntime
from tfpolicies.export.verify import (
    ERROR_FACTOR,
    ERROR_SLACK,
    TOLERANCE,
    Comparison,
    verify,
    verify_onnx,
)

POSITIVE = spaces.Box(0.5, 1.0, (2,), np.float32)
OBS = np.float32([[0.5, 1.0], [1.0, 0.75]])


def make_cancelling(policy_class=PGTF2Policy):
    """A policy whose logits are (1000 x0 + x1) - 1000 x0 and 0: float32 rounds x1 to 5 digits."""
    settings = {"fcnet_hiddens": [2], "fcnet_activation": "relu"}
    policy = policy_class(POSITIVE, TWO, {"inference": "tf", "model": settings})
    first, last = np.float32([[1000, 1000], [1, 0]]), np.float32([[1, 0], [-1, 0]])
    policy.set_weights([first, np.zeros(2), last, np.zeros(2)])
    return policy


def run_policy(policy, inputs, *, double_precision):
    """Runs a policy without exploration, by the reference and as it acts itself."""
    program, rows = policy.program, len(inputs[0])
    noise = np.zeros((rows, program.spec.explorer.noise_size), np.float32)
    reference = ReferenceRuntime(program, double_precision=double_precision)
    return [
        runtime.run(policy.driver.acting.state, inputs, noise, np.zeros(0, np.float32))
        for runtime in (reference, program.runtime)
    ]


@pytest.mark.parametrize("policy_class", [PGTF2Policy, PGTF1Policy])
def test_double_precision_computes_what_float32_rounds(policy_class):
    policy = make_cancelling(policy_class)
    obs = np.random.default_rng(0).uniform(0.5, 1.0, (50, 2)).astype(np.float32)
    exact, _ = run_policy(policy, [obs], double_precision=True)
    rounded = policy.compute_actions(obs, explore=False).extras["action_dist_inputs"]
    assert exact.dist_inputs.dtype == np.float64
    np.testing.assert_allclose(exact.dist_inputs[:, 0], obs[:, 1].astype(np.float64), atol=1e-12)
    assert 1e-5 < np.abs(rounded[:, 0] - obs[:, 1]).max() < 1e-4


@pytest.mark.parametrize("memory", ["use_lstm", "use_attention"])
def test_double_precision_has_memories_loops_and_functions(memory):
    policy = PPOTF2Policy(POSITIVE, TWO, {"inference": "tf", "model": {memory: True}})
    states = [np.stack([x, x]) for x in policy.get_initial_state()]
    inputs = [OBS, *policy.program.ports.split([OBS, *states])[1], *states]
    exact, acted = run_policy(policy, inputs, double_precision=True)
    assert exact.states[0].dtype == np.float64
    for state, expected in zip(exact.states, acted.states, strict=True):
        np.testing.assert_allclose(state, expected, atol=1e-5)
    np.testing.assert_allclose(exact.values, acted.values, atol=1e-5)


def test_a_policy_that_acts_elsewhere_is_compared_on_the_cpu():
    reference, acted = run_policy(make_cancelling(), [OBS], double_precision=False)
    for output, expected in zip(reference[:5], acted[:5], strict=True):
        np.testing.assert_array_equal(np.asarray(output), np.asarray(expected))


def artefact(change):
    """Gives the exact logits of `make_cancelling`, changed, and what follows from them."""

    def run(signature, inputs):
        exact = inputs["obs"][:, 1].astype(np.float64)
        logits = np.stack([change(exact), np.zeros_like(exact)], 1).astype(np.float32)
        actions = logits.argmax(axis=1)
        best = logits[np.arange(len(logits)), actions]
        logp = best - np.log(np.exp(logits).sum(axis=1))
        outputs = {"actions": actions, "actions_normalized": actions, "action_logp": logp}
        return {**outputs, "action_dist_inputs": logits}

    return run


def verify_change(change):
    policy = make_cancelling()
    return verify(artefact(change), policy.program, policy.driver.acting.state, ["serving_default"])


def test_an_export_that_rounds_less_than_the_policy_passes_and_one_further_off_does_not():
    parity = verify_change(lambda x: x)
    result = parity.differences["serving_default"]["action_dist_inputs"]
    assert result.relative > TOLERANCE
    assert result.error < 1e-7
    assert TOLERANCE < result.own_error < 1e-4
    json.dumps(parity.to_json())
    limit = ERROR_FACTOR * result.own_error + ERROR_SLACK
    verify_change(lambda x: x + 0.5 * limit)
    with pytest.raises(ExportError, match=r"against double precision is .* allowed is"):
        verify_change(lambda x: x + 2.0 * limit)
    with pytest.raises(ExportError, match=r"largest relative difference is 0\.00[12]"):
        verify_change(lambda x: x + 2e-3)


def test_memories_that_a_policy_comes_to_are_disturbed_unless_they_are_whole_numbers():
    policy = PPOTF2Policy(POSITIVE, TWO, {"inference": "tf", "model": {"use_lstm": True}})
    comparison = Comparison(lambda *_: {}, policy.program, policy.driver.acting.state)
    reached, counted = np.full((4, 2), 0.5, np.float32), np.float32([[0], [1], [2], [3]])
    comparison._add_noise([reached, counted])
    np.testing.assert_array_equal(reached[::2], 0.5)
    assert (reached[1::2] != 0.5).all()
    np.testing.assert_array_equal(counted, np.float32([[0], [1], [2], [3]]))


def test_a_wrong_weight_of_a_memory_is_found_though_the_policy_hardly_remembers(tmp_path):
    model = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 8}
    policy = PPOTF2Policy(POSITIVE, TWO, {"inference": "tf", "seed": 1, "model": model})
    weights = {**policy.get_weights()}
    weights["layer_0/kernel"] = 0.002 * weights["layer_0/kernel"]
    policy.set_weights(weights)
    kernel = weights["layer_1/recurrent_kernel"].copy()
    kernel[np.unravel_index(np.abs(kernel).argmax(), kernel.shape)] *= 1.01
    wrong = policy.copy()
    wrong.set_weights({**weights, "layer_1/recurrent_kernel": kernel})
    wrong.export_model(tmp_path, onnx=True)
    with pytest.raises(ExportError, match=r"against double precision|relative difference"):
        verify_onnx(tmp_path, policy.program, policy.driver.acting.state)
