"""PPO's loss, gradients, Adam and whole updates against a NumPy reference in double precision.

The reference is written from the papers, with gradients by hand: Schulman et al. 2017
(arXiv:1707.06347) for the loss, Kingma and Ba 2015 (arXiv:1412.6980) for Adam. The package computes
in float32, whose rounding (1e-7 of each term) Adam carries into steps of size `lr` wherever a
gradient is tiny; so weights are compared to 1e-5 with `lr` at 1e-3, and losses to a relative 1e-5.
"""

import copy
from typing import NamedTuple

import numpy as np
import pytest

from helpers.factories import PLANE, make
from tfpolicies import SampleBatch
from tfpolicies.program.compile_mode import CompileMode

NAMES = [
    f"{layer}/{role}"
    for layer in ("fc_1", "fc_out", "fc_value_1", "value_out")
    for role in ("kernel", "bias")
]
COLUMNS = ("obs", "actions", "action_logp", "action_dist_inputs", "advantages", "value_targets")


class Settings(NamedTuple):
    lr: float = 1e-3
    clip_param: float = 0.3
    vf_clip_param: float = 10.0
    vf_loss_coeff: float = 1.0
    entropy_coeff: float = 0.0
    kl_coeff: float = 0.2
    grad_clip: float | None = None


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


class Reference:
    """PPO with a discrete actor and a critic of one tanh layer each, and Adam."""

    def __init__(self, policy, settings):
        paths = [variable.path for variable in policy.model.variables]
        arrays = dict(zip(paths, policy.get_weights().values(), strict=True))
        self.order = paths
        self.w = {name: arrays[name].astype(np.float64) for name in NAMES}
        self.m = {name: np.zeros_like(w) for name, w in self.w.items()}
        self.v = {name: np.zeros_like(w) for name, w in self.w.items()}
        self.steps = 0
        self.s = settings

    def weights(self):
        return [self.w[name] for name in self.order]

    def loss(self, batch):
        """Returns the terms of the loss and the gradient of each weight."""
        w, s, n = self.w, self.s, len(batch["obs"])
        x = batch["obs"].astype(np.float64)
        hidden = np.tanh(x @ w["fc_1/kernel"] + w["fc_1/bias"])
        log_p = log_softmax(hidden @ w["fc_out/kernel"] + w["fc_out/bias"])
        critic = np.tanh(x @ w["fc_value_1/kernel"] + w["fc_value_1/bias"])
        values = (critic @ w["value_out/kernel"] + w["value_out/bias"])[:, 0]

        p, rows = np.exp(log_p), np.arange(n)
        chosen, advantages = batch["actions"], batch["advantages"].astype(np.float64)
        ratio = np.exp(log_p[rows, chosen] - batch["action_logp"])
        free = advantages * ratio
        clipped = advantages * np.clip(ratio, 1 - s.clip_param, 1 + s.clip_param)
        surrogate = np.minimum(free, clipped)
        entropy = -(p * log_p).sum(-1)
        log_q = log_softmax(batch["action_dist_inputs"].astype(np.float64))
        q = np.exp(log_q)
        kl = (q * (log_q - log_p)).sum(-1)
        error = values - batch["value_targets"]
        squared = np.minimum(error**2, s.vf_clip_param)
        terms = {
            "policy_loss": -surrogate.mean(),
            "entropy": entropy.mean(),
            "kl": kl.mean(),
            "vf_loss": squared.mean(),
        }
        terms["total_loss"] = (
            terms["policy_loss"]
            + s.vf_loss_coeff * terms["vf_loss"]
            - s.entropy_coeff * terms["entropy"]
            + s.kl_coeff * terms["kl"]
        )
        one_hot = np.eye(p.shape[1])[chosen]
        by_logp = np.where(free <= clipped, free, 0.0)  # d(A r) / d log p = A r
        d_logits = -by_logp[:, None] * (one_hot - p)
        d_logits += s.entropy_coeff * p * (log_p + entropy[:, None])
        d_logits += s.kl_coeff * (p - q)
        d_values = s.vf_loss_coeff * np.where(error**2 <= s.vf_clip_param, 2 * error, 0.0)
        gradients = {}
        for output, layer, below, d_out in (
            ("fc_out", "fc_1", hidden, d_logits / n),
            ("value_out", "fc_value_1", critic, d_values[:, None] / n),
        ):
            gradients[f"{output}/kernel"] = below.T @ d_out
            gradients[f"{output}/bias"] = d_out.sum(0)
            d_below = (d_out @ w[f"{output}/kernel"].T) * (1 - below**2)
            gradients[f"{layer}/kernel"] = x.T @ d_below
            gradients[f"{layer}/bias"] = d_below.sum(0)
        return terms, gradients

    def step(self, batch):
        terms, gradients = self.loss(batch)
        if self.s.grad_clip is not None:
            norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
            gradients = {k: g * min(1.0, self.s.grad_clip / norm) for k, g in gradients.items()}
        self.steps += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.999 * self.v[name] + 0.001 * g**2
            unbiased = np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
            step = self.s.lr * unbiased * self.m[name] / (np.sqrt(self.v[name]) + 1e-7)
            self.w[name] = self.w[name] - step
        return terms

    def learn_epochs(self, batch, epochs, size, rng):
        """Does every minibatch of every epoch, over the shuffles that `rng` draws."""
        results = []
        for _ in range(epochs):
            rows = rng.permutation(len(batch["obs"]))
            for start in range(0, len(rows), size):
                chosen = rows[start : start + size]
                results.append(self.step({name: batch[name][chosen] for name in COLUMNS}))
        return {name: np.mean([terms[name] for terms in results]) for name in results[0]}


def random_batch(rows, seed=0, num_actions=2):
    """Returns a batch whose old policy differs much from a fresh one, so that all clips bite."""
    rng = np.random.default_rng(seed)
    old = rng.normal(size=(rows, num_actions)).astype(np.float32)
    actions = rng.integers(num_actions, size=rows)
    return SampleBatch(
        obs=rng.normal(size=(rows, 3)).astype(np.float32),
        actions=actions,
        action_dist_inputs=old,
        action_logp=log_softmax(old.astype(np.float64))[np.arange(rows), actions].astype(
            np.float32
        ),
        advantages=rng.normal(size=rows).astype(np.float32),
        value_targets=(4 * rng.normal(size=rows)).astype(np.float32),
    )


def scale_up(policy):
    """Gives the output layers larger weights: those of a fresh policy are nearly zero."""
    paths = [variable.path for variable in policy.model.variables]
    weights = [
        values * (80.0 if "out" in path else 1.0)
        for path, values in zip(paths, policy.get_weights().values(), strict=True)
    ]
    policy.set_weights(weights)
    return policy


def assert_same_weights(policy, reference, atol=1e-5):
    weights = policy.get_weights().values(), reference.weights()
    for path, actual, expected in zip(reference.order, *weights, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=path)


VARIANTS = [
    Settings(),
    Settings(clip_param=0.05, kl_coeff=0.0),
    Settings(vf_clip_param=0.5, vf_loss_coeff=0.5),
    Settings(entropy_coeff=0.3, kl_coeff=2.0),
    Settings(vf_loss_coeff=0.0, vf_clip_param=float("inf"), clip_param=1e6),
]


@pytest.mark.core
@pytest.mark.parametrize("settings", VARIANTS)
def test_loss_and_gradients_are_those_of_the_paper(settings):
    policy = scale_up(make(**settings._asdict()))
    batch = random_batch(32)
    terms, expected = Reference(policy, settings).loss(batch)
    gradients, info = policy.compute_gradients(batch)
    for name, value in terms.items():
        np.testing.assert_allclose(info["learner_stats"][name], value, rtol=1e-5, err_msg=name)
    for variable, gradient in zip(policy.model.trainable_variables, gradients, strict=True):
        np.testing.assert_allclose(
            gradient, expected[variable.path], rtol=1e-4, atol=1e-6, err_msg=variable.path
        )


@pytest.mark.parametrize("settings", VARIANTS[:1])
def test_the_gradients_by_hand_are_those_of_finite_differences(settings):
    reference = Reference(scale_up(make(**settings._asdict())), settings)
    batch, h = random_batch(32), 1e-6
    _, gradients = reference.loss(batch)
    for name in NAMES:
        for place in np.ndindex(reference.w[name].shape):
            losses = []
            for sign in (1, -1):
                reference.w[name][place] += sign * h
                losses.append(reference.loss(batch)[0]["total_loss"])
                reference.w[name][place] -= sign * h
            slope = (losses[0] - losses[1]) / (2 * h)
            np.testing.assert_allclose(gradients[name][place], slope, atol=1e-6)


@pytest.mark.core
def test_the_surrogate_is_clipped_on_the_side_that_would_help():
    # A fresh policy has zero logits for zero observations: log p = log 0.5 for each action.
    ratios = np.array([2.0, 2.0, 0.5, 0.5, 1.1])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 3.0])
    batch = SampleBatch(
        obs=np.zeros((5, 3), np.float32),
        actions=np.zeros(5, np.int64),
        action_dist_inputs=np.zeros((5, 2), np.float32),
        action_logp=(np.log(0.5) - np.log(ratios)).astype(np.float32),
        advantages=advantages.astype(np.float32),
        value_targets=np.array([0.0, 1.0, -2.0, 3.0, 9.0], np.float32),
    )
    policy = make(clip_param=0.2, vf_clip_param=5.0, kl_coeff=0.7, entropy_coeff=0.25)
    stats = policy.compute_gradients(batch)[1]["learner_stats"]
    # min(r A, clip(r, 0.8, 1.2) A): 1.2, -2, 0.5, -0.8, 3.3
    assert stats["policy_loss"] == pytest.approx(-(1.2 - 2 + 0.5 - 0.8 + 3.3) / 5, rel=1e-5)
    # Squared errors 0, 1, 4, 9, 81, none above 5.
    assert stats["vf_loss"] == pytest.approx((0 + 1 + 4 + 5 + 5) / 5, rel=1e-5)
    assert stats["entropy"] == pytest.approx(np.log(2), rel=1e-5)
    assert stats["kl"] == pytest.approx(0.0, abs=1e-6)
    total = stats["policy_loss"] + stats["vf_loss"] - 0.25 * stats["entropy"]
    assert stats["total_loss"] == pytest.approx(total, rel=1e-5)
    # Values are all 0, so they explain nothing: 1 - Var[y] / (Var[y] + 1e-6).
    assert stats["vf_explained_var"] == pytest.approx(0.0, abs=1e-5)


def test_gaussian_actions_have_the_loss_and_gradient_of_the_formulas():
    policy = make(actions=PLANE, entropy_coeff=0.1, kl_coeff=0.5, model={"fcnet_hiddens": []})
    rng = np.random.default_rng(1)
    old = (0.3 * rng.normal(size=(16, 4))).astype(np.float32)
    batch = SampleBatch(
        obs=rng.normal(size=(16, 3)).astype(np.float32),
        actions=rng.normal(size=(16, 2)).astype(np.float32),
        action_dist_inputs=old,
        action_logp=rng.normal(-2.0, 0.3, size=16).astype(np.float32),
        advantages=rng.normal(size=16).astype(np.float32),
        value_targets=np.zeros(16, np.float32),
    )

    def loss(kernel, bias):
        mean, log_std = np.split(batch["obs"] @ kernel + bias, 2, axis=-1)
        z = (batch["actions"] - mean) / np.exp(log_std)
        logp = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
        ratio, a = np.exp(logp - batch["action_logp"]), batch["advantages"]
        surrogate = np.minimum(ratio * a, np.clip(ratio, 0.7, 1.3) * a)
        entropy = (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)
        m, s = np.split(old.astype(np.float64), 2, axis=-1)
        spread = (np.exp(2 * s) + (m - mean) ** 2) / (2 * np.exp(2 * log_std))
        kl = (log_std - s + spread - 0.5).sum(-1)
        return (-surrogate - 0.1 * entropy + 0.5 * kl).mean()

    places = {v.path: i for i, v in enumerate(policy.model.trainable_variables)}
    weights = [w.astype(np.float64) for w in policy.get_weights().values()]
    gradients, info = policy.compute_gradients(batch)
    kernel, bias = (weights[places[f"fc_out/{role}"]] for role in ("kernel", "bias"))
    stats = info["learner_stats"]
    np.testing.assert_allclose(
        stats["total_loss"] - stats["vf_loss"], loss(kernel, bias), rtol=1e-5
    )
    h = 1e-6
    for place in np.ndindex(kernel.shape):
        step = np.zeros_like(kernel)
        step[place] = h
        slope = (loss(kernel + step, bias) - loss(kernel - step, bias)) / (2 * h)
        np.testing.assert_allclose(gradients[places["fc_out/kernel"]][place], slope, atol=1e-5)


@pytest.mark.core
def test_adam_is_adam():
    settings = Settings(lr=0.01)
    policy = scale_up(make(**settings._asdict()))
    reference = Reference(policy, settings)
    for i in range(5):
        batch = random_batch(64, seed=i)
        policy.learn_on_batch(batch)
        reference.step(batch)
    assert_same_weights(policy, reference)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "xla"])
def test_updates_of_any_number_of_rows_equal_the_reference(jit, monkeypatch):
    settings = Settings(entropy_coeff=0.01)
    policy = scale_up(make(jit_compile=jit, **settings._asdict()))
    reference = Reference(policy, settings)
    policy._learner.discover_columns()
    compiler, shapes = policy.program.updates._compiler, set()
    mode = CompileMode.LOOP if jit else CompileMode.PLAIN
    learn = compiler.get_learn_function(mode, fetches=False, clips_gradients=False)

    def record_shapes(state, columns, index, mask, *args, **kwargs):
        shapes.add(tuple(tuple(x.shape) for x in (*columns.values(), index, mask)))
        return learn(state, columns, index, mask, *args, **kwargs)

    monkeypatch.setitem(compiler._learn_functions, (mode, False, False), record_shapes)
    for i, rows in enumerate((2047, 2048, 2049, 2100)):
        batch = random_batch(rows, seed=i)
        rng = copy.deepcopy(policy.driver.acting.state.rng)
        result = policy.learn_epochs(batch, 2, 256)
        terms = reference.learn_epochs(batch, 2, 256, rng)
        assert_same_weights(policy, reference)
        assert rng.bit_generator.state == policy.get_state()["rng"]
        for name, value in terms.items():
            assert result["learner_stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert result["num_agent_steps_trained"] == rows
    assert policy.num_grad_updates == reference.steps == 2 * (8 + 8 + 9 + 9)
    assert policy.program.functions.traces["learn_epochs"] == 1
    if jit:  # XLA compiles a function again for each combination of input shapes, and only then
        assert len(shapes) == 2


def test_two_policies_of_one_program_equal_their_own_references():
    variants = [
        Settings(lr=1e-3, clip_param=0.3, grad_clip=None),
        Settings(lr=3e-4, clip_param=0.05, kl_coeff=1.5, grad_clip=0.2, vf_clip_param=1.0),
    ]
    policies = [
        scale_up(make(seed=i, gamma=0.9 + i / 20, **settings._asdict()))
        for i, settings in enumerate(variants)
    ]
    assert policies[0].program is policies[1].program
    references = [Reference(p, s) for p, s in zip(policies, variants, strict=True)]
    for i in range(3):
        for policy, reference in zip(policies, references, strict=True):
            batch = random_batch(100, seed=i)
            rng = copy.deepcopy(policy.driver.acting.state.rng)
            policy.learn_epochs(batch, 2, 32)
            reference.learn_epochs(batch, 2, 32, rng)
            assert_same_weights(policy, reference)
