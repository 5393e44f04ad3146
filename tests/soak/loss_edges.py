"""Losses and gradients at their edges, beside NumPy in double precision.

SAC (Box and Discrete), TD3, A2C (Discrete and Box) and DQN each learn from batches at the edges:
one row, one row that counts beside others that only fill up, huge and tiny observations, rewards,
weights and importance weights, rows that terminate, are truncated or go on, n-step rows. The
reference is written from the papers that the modules of the package name, without TensorFlow;
gradients are its central differences. Each case is right, or refused with nothing changed where the
reference leaves the range of float32. Then `--samplers` of each hand over their rows in the three
autoreset modes of Gymnasium, with episodes of any length that end where fragments end, too:
rewards, ends, n-step sums and advantages are written out again from what the environments do.

Run: `python -m soak.loss_edges --cases 500`. Exits with 1 if a case differs.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from helpers.continuous_actions import mlp
from helpers.scripts import parse_options
from tfpolicies import (
    A2CConfig,
    A2CTF2Policy,
    DQNConfig,
    DQNTF2Policy,
    RolloutWorker,
    SACConfig,
    SACTF2Policy,
    SampleBatch,
    TD3Config,
    TD3TF2Policy,
)
from tfpolicies.errors import NonFiniteError

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
PLANE, THREE = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3)
LARGEST = float(np.finfo(np.float32).max)
FULL = 8  # rows of a minibatch, most of which may only fill up
QUICK = {
    "seed": 0,
    "inference": "tf",
    "jit_compile": False,
    "grad_clip": None,
    "optimizer": {"type": "sgd"},
    "train_batch_size": FULL,
}

Weights = Mapping[str, np.ndarray]


# The mathematics of the papers --------------------------------------------------------------------


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def log_slope_of_tanh(u: np.ndarray) -> np.ndarray:
    """Returns log(1 - tanh(u)^2)."""
    return 2.0 * (math.log(2.0) - np.abs(u) - np.log1p(np.exp(-2.0 * np.abs(u))))


def huber(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) <= 1.0, 0.5 * x * x, np.abs(x) - 0.5)


def with_prefix(weights: Weights, prefix: str) -> list[np.ndarray]:
    return [w for key, w in weights.items() if key.startswith(prefix)]


def critics(weights: Weights, prefix: str, *inputs: np.ndarray) -> np.ndarray:
    """Returns the outputs of one critic or of two, stacked along the last axis."""
    x = np.concatenate(inputs, -1)
    parts = [(key, w) for key, w in weights.items() if key.startswith(prefix)]
    layers = [[w for key, w in parts if ("#" in key) == is_second] for is_second in (False, True)]
    return np.stack([mlp(critic, x) for critic in layers if critic], -1)


class Reference:
    """The losses of one batch as functions of weights.

    Args:
        policy: gives settings.
        targets: the weights of target networks.
        batch: columns as float64.
        noise: standard normal, of the rows.
    """

    networks: tuple[str, ...] = ("",)  # prefixes of the weights that each loss is minimised over

    def __init__(self, policy: Any, targets: Weights, batch: Any, noise: np.ndarray) -> None:
        self.config = policy.config
        self.targets, self.batch, self.noise = targets, batch, noise
        self.largest = 0.0  # magnitude of anything that was computed

    def weigh(self, q: np.ndarray, targets: np.ndarray, is_huber: bool) -> np.ndarray:
        """Returns the weighted losses of critics, one for each row."""
        self.errors = q - targets[:, None]
        losses = huber(self.errors) if is_huber else 0.5 * self.errors**2
        self.see(targets, q, losses)
        weighted = (self.batch["weights"][:, None] * losses).sum(-1)
        self.see(weighted.sum())
        return weighted

    def see(self, *numbers: Any) -> None:
        for x in numbers:
            size = np.max(np.abs(x), initial=0.0)
            self.largest = max(self.largest, size if np.isfinite(size) else np.inf)

    @property
    def goes_on(self) -> np.ndarray:
        gamma = self.config["gamma"] ** self.batch["n_steps"]
        return gamma * (1.0 - self.batch["terminateds"])

    def losses(self, weights: Weights, frozen: Weights) -> list[float]:
        """Returns each network's loss; what a loss holds constant comes from `frozen`."""
        raise NotImplementedError

    def own_weights(self, weights: Weights, network: str) -> list[str]:
        if network:
            return [key for key in weights if key.startswith(network)]
        others = tuple(x for x in self.networks if x)
        return [key for key in weights if not key.startswith(others)]


class DQNReference(Reference):
    """Mnih et al. 2015, van Hasselt et al. 2016, Wang et al. 2016."""

    def q(self, weights: Weights, obs: np.ndarray) -> np.ndarray:
        layers = list(weights.values())
        hidden = np.tanh(obs @ layers[0] + layers[1])
        if not self.config["dueling"]:
            return mlp(layers[2:], hidden)
        advantages = mlp(layers[2:6], hidden)
        values = mlp(layers[6:], hidden)
        return values + advantages - advantages.mean(-1, keepdims=True)

    def losses(self, weights: Weights, frozen: Weights) -> list[float]:
        b = self.batch
        rows, actions = np.arange(len(b["obs"])), b["actions"].astype(int)
        after = self.q(self.targets, b["new_obs"])
        chooser = self.q(frozen, b["new_obs"]) if self.config["double_q"] else after
        best = after[rows, chooser.argmax(-1)]
        targets = b["rewards"] + self.goes_on * best
        chosen = self.q(weights, b["obs"])[rows, actions]
        self.errors = chosen - targets
        is_huber = self.config["td_error_loss_fn"] == "huber"
        each = huber(self.errors) if is_huber else self.errors**2
        self.see(after, targets, chosen, each, b["weights"] * each, (b["weights"] * each).sum())
        gaps = np.sort(chooser, -1)
        self.is_close = bool((gaps[:, -1] - gaps[:, -2] < 1e-4 * (1 + np.abs(gaps).max())).any())
        self.stats = {"mean_q": chosen.mean(), "mean_td_error": self.errors.mean()}
        return [float((b["weights"] * each).mean())]


class SACReference(Reference):
    """Haarnoja et al. 2018, for Boxes."""

    networks = ("", "critic/", "temperature/")

    def sample(self, weights: Weights, obs: np.ndarray, noise: np.ndarray) -> Any:
        mean, log_std = np.split(mlp(with_prefix(weights, "layer"), obs), 2, -1)
        log_std = np.clip(log_std, -5, 2)
        u = mean + np.exp(log_std) * noise
        density = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - log_slope_of_tanh(u)
        self.see(mean, u, density)
        return np.tanh(u), density.sum(-1)

    def losses(self, weights: Weights, frozen: Weights) -> list[float]:
        b, noise = self.batch, np.split(self.noise, 2, -1)
        log_alpha = frozen["temperature/layer_0/log_alpha"]
        alpha = np.exp(log_alpha)
        next_actions, next_logp = self.sample(frozen, b["new_obs"], noise[1])
        after = critics(self.targets, "critic_target/", b["new_obs"], next_actions)[:, 0].min(-1)
        targets = b["rewards"] + self.goes_on * (after - alpha * next_logp)
        q = critics(weights, "critic/", b["obs"], b["actions"])[:, 0]
        weighted = self.weigh(q, targets, self.config["td_error_loss_fn"] == "huber")
        actions, logp = self.sample(weights, b["obs"], noise[0])
        best = critics(frozen, "critic/", b["obs"], actions)[:, 0].min(-1)
        entropy = self.config["target_entropy"]
        entropy = -2.0 if entropy in (None, "auto") else entropy
        _, logp_now = self.sample(frozen, b["obs"], noise[0])
        gap = logp_now.mean() + entropy
        self.see(alpha, alpha * next_logp, alpha * logp, best)
        return [
            float((alpha * logp - best).mean()),
            float(weighted.mean()),
            float(-weights["temperature/layer_0/log_alpha"] * gap),
        ]


class DiscreteSACReference(Reference):
    """Christodoulou 2019."""

    networks = ("", "critic/", "temperature/")

    def losses(self, weights: Weights, frozen: Weights) -> list[float]:
        b, rows = self.batch, np.arange(len(self.batch["obs"]))
        alpha = np.exp(frozen["temperature/layer_0/log_alpha"])

        def log_probs(w: Weights, obs: np.ndarray) -> np.ndarray:
            return log_softmax(mlp(with_prefix(w, "layer"), obs))

        after = critics(self.targets, "critic_target/", b["new_obs"]).min(-1)
        next_logp = log_probs(frozen, b["new_obs"])
        soft = (np.exp(next_logp) * (after - alpha * next_logp)).sum(-1)
        targets = b["rewards"] + self.goes_on * soft
        q = critics(weights, "critic/", b["obs"])[rows, b["actions"].astype(int)]
        weighted = self.weigh(q, targets, self.config["td_error_loss_fn"] == "huber")
        logp = log_probs(weights, b["obs"])
        least = critics(frozen, "critic/", b["obs"]).min(-1)
        now = log_probs(frozen, b["obs"])
        entropy = self.config["target_entropy"]
        entropy = 0.98 * math.log(3) if entropy in (None, "auto") else entropy
        gap = (np.exp(now) * now).sum(-1).mean() + entropy
        self.see(alpha * next_logp, alpha * logp, after, least)
        return [
            float((np.exp(logp) * (alpha * logp - least)).sum(-1).mean()),
            float(weighted.mean()),
            float(-weights["temperature/layer_0/log_alpha"] * gap),
        ]


class TD3Reference(Reference):
    """Fujimoto et al. 2018."""

    networks = ("", "critic/")

    def losses(self, weights: Weights, frozen: Weights) -> list[float]:
        b, config = self.batch, self.config
        limit = config["target_noise_clip"]
        drift = np.clip(config["target_noise"] * self.noise, -limit, limit)
        outputs = mlp(with_prefix(self.targets, "target/layer"), b["new_obs"])
        next_actions = np.clip(np.tanh(outputs) + drift, -1, 1)
        after = critics(self.targets, "critic_target/", b["new_obs"], next_actions)[:, 0].min(-1)
        targets = b["rewards"] + self.goes_on * after
        q = critics(weights, "critic/", b["obs"], b["actions"])[:, 0]
        weighted = self.weigh(q, targets, config["use_huber"])
        actions = np.tanh(mlp(with_prefix(weights, "layer"), b["obs"]))
        values = critics(frozen, "critic/", b["obs"], actions)[:, 0, 0]
        self.see(outputs, after, values)
        return [float(-values.mean()), float(weighted.mean())]


class A2CReference(Reference):
    """Mnih et al. 2016."""

    def losses(self, weights: Weights, frozen: Weights) -> list[float]:
        del frozen
        b, config = self.batch, self.config
        w = list(weights.values())  # two hidden layers side by side, then two outputs
        outputs = np.tanh(b["obs"] @ w[0] + w[1]) @ w[4] + w[5]
        values = (np.tanh(b["obs"] @ w[2] + w[3]) @ w[6] + w[7])[:, 0]
        if outputs.shape[-1] == 3:
            logps = log_softmax(outputs)
            logp = logps[np.arange(len(logps)), b["actions"].astype(int)]
            entropy = -(np.exp(logps) * logps).sum(-1)
        else:
            mean, log_std = np.split(outputs, 2, -1)
            z = (b["actions"] - mean) * np.exp(-log_std)
            density = -0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)
            logp = density.sum(-1)
            entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
            self.see(z**2, np.exp(-2 * log_std) * z)
        squares = (values - b["value_targets"]) ** 2
        self.see(outputs, logp, squares.sum(), values, np.abs(outputs).max() * b["advantages"])
        self.see(np.var(b["value_targets"]) * len(squares))
        self.stats = {
            "policy_loss": -(logp * b["advantages"]).mean(),
            "vf_loss": 0.5 * squares.mean(),
            "policy_entropy": entropy.mean(),
        }
        loss = self.stats["policy_loss"] + config["vf_loss_coeff"] * self.stats["vf_loss"]
        return [float(loss - config["entropy_coeff"] * entropy.mean())]


# Cases --------------------------------------------------------------------------------------------


def scale(rng: np.random.Generator, *choices: float) -> float:
    return float(rng.choice(choices))


def draw_columns(rng: np.random.Generator, rows: int, space: Any, n_step: int) -> dict[str, Any]:
    """Returns random columns, each of a magnitude of its own."""
    obs = rng.normal(size=(2, rows, 3)) * scale(rng, 0.0, 1e-30, 1e-6, 1.0, 1.0, 30.0, 1e6, 1e15)
    rewards = rng.normal(size=rows) * scale(rng, 0.0, 1e-38, 1e-8, 1.0, 1.0, 1e3, 1e8, 1e18, 1e30)
    if isinstance(space, spaces.Discrete):
        actions = rng.integers(space.n, size=rows)
    else:
        actions = np.clip(rng.normal(size=(rows, 2)), -1, 1).astype(np.float32)
    weight = scale(rng, 0.0, 1e-12, 1.0, 1.0, 1e6)
    ends = rng.choice([0.0, 0.5, 1.0])
    return {
        "obs": obs[0].astype(np.float32),
        "new_obs": obs[1].astype(np.float32),
        "actions": actions,
        "rewards": rewards.astype(np.float32),
        "terminateds": rng.random(rows) < ends,
        "truncateds": rng.random(rows) < 0.3,
        "weights": (weight * rng.uniform(0.5, 1.5, rows)).astype(np.float32),
        "n_steps": rng.integers(1, n_step + 1, rows).astype(np.int32),
        "advantages": (rng.normal(size=rows) * scale(rng, 0, 1e-20, 1, 1e6, 1e20)).astype("f4"),
        "value_targets": (rng.normal(size=rows) * scale(rng, 0, 1e-20, 1, 1e6, 1e18)).astype("f4"),
    }


def draw_weights(rng: np.random.Generator, weights: Weights) -> dict[str, np.ndarray]:
    size = scale(rng, 1e-6, 0.5, 0.5, 0.5, 3.0, 100.0)
    new = {key: rng.normal(size=w.shape) * size for key, w in weights.items()}
    for key in new:
        if "log_alpha" in key:
            new[key] = np.asarray(scale(rng, -30.0, -5.0, 0.0, 2.0, 20.0))
    return {key: w.astype(np.float32) for key, w in new.items()}


Case = tuple[type, Any, Any, dict[str, Any]]
NETS: dict[str, Any] = {"model": {"fcnet_hiddens": [4]}}
CRITICS = {**NETS, "q_model_config": {"fcnet_hiddens": [5]}}
Q_NETS, PLAIN = {**NETS, "hiddens": [3]}, {"dueling": False, "td_error_loss_fn": "mse"}
SPLIT = {"model": {"fcnet_hiddens": [4], "vf_share_layers": False}}
TD3_NETS = {"actor_hiddens": [4], "critic_hiddens": [5], "policy_delay": 1}

KINDS: dict[str, list[Case]] = {
    "DQN": [
        (DQNTF2Policy, DQNReference, THREE, {**Q_NETS}),
        (DQNTF2Policy, DQNReference, THREE, {**Q_NETS, **PLAIN, "n_step": 3}),
        (DQNTF2Policy, DQNReference, THREE, {**Q_NETS, "double_q": False}),
    ],
    "SAC": [
        (SACTF2Policy, SACReference, PLANE, {**CRITICS, "td_error_loss_fn": "mse"}),
        (SACTF2Policy, SACReference, PLANE, {**CRITICS, "twin_q": False, "n_step": 3}),
        (SACTF2Policy, DiscreteSACReference, THREE, {**CRITICS, "target_entropy": -0.5}),
    ],
    "TD3": [
        (TD3TF2Policy, TD3Reference, PLANE, {**TD3_NETS, "target_noise": 0.4}),
        (TD3TF2Policy, TD3Reference, PLANE, {**TD3_NETS, "use_huber": True, "n_step": 3}),
    ],
    "A2C": [
        (A2CTF2Policy, A2CReference, THREE, {**SPLIT, "entropy_coeff": 0.1}),
        (A2CTF2Policy, A2CReference, PLANE, {**SPLIT, "vf_loss_coeff": 2.0}),
    ],
}


def make_policies(name: str) -> list[tuple[Any, Any]]:
    return [
        (kind(OBS, actions, {**QUICK, "gamma": 0.9, **config}), reference)
        for kind, reference, actions, config in KINDS[name]
    ]


def get_noise(policy: Any, rows: int) -> np.ndarray:
    """Returns the noise that the next update of a policy draws for so many rows."""
    size = policy.program.spec.noise_size
    generator = np.random.default_rng()
    generator.bit_generator.state = policy.get_state().get(
        "learning_rng", policy.get_state()["rng"]
    )
    return generator.standard_normal((rows, size), np.float32) if size else np.zeros((rows, 0))


def differentiate(reference: Reference, weights: Weights, index: int) -> dict[str, np.ndarray]:
    """Returns the central differences of one loss by the weights of its network."""
    gradients = {}
    for key in reference.own_weights(weights, reference.networks[index]):
        gradient = np.zeros(weights[key].shape)
        for place in np.ndindex(gradient.shape):
            values = []
            step = 1e-6 * max(1e-3, abs(float(weights[key][place])))
            for sign in (1, -1):
                moved = {k: w.copy() for k, w in weights.items()}
                moved[key][place] += sign * step
                values.append(reference.losses(moved, weights)[index])
            gradient[place] = (values[0] - values[1]) / (2 * step)
        gradients[key] = gradient
    return gradients


def rounding_of_differences(reference: Reference, weights: Weights, index: int, key: str) -> float:
    """Returns how far off a central difference may be, by rounding."""
    step = 1e-6 * max(1e-3, float(np.abs(weights[key]).min()))
    return 1e-15 * max(abs(x) for x in reference.losses(weights, weights)) / step


def largest_gradient(reference: Reference, weights: Weights) -> float:
    results = [differentiate(reference, weights, i) for i in range(len(reference.networks))]
    return max(float(np.abs(x).max()) for each in results for x in each.values())


class Verdict(Exception):
    """What is wrong with a case."""


def compare(what: str, number: Any, expected: Any, size: float, tolerance: float = 2e-4) -> None:
    gap = np.abs(np.float64(number) - expected)
    allowed = tolerance * (np.abs(expected) + size) + 1e-7
    if not (gap <= allowed).all():
        raise Verdict(f"{what}: {number}, not {expected} (within {allowed})")


def run_case(policy: Any, kind: type, rng: np.random.Generator) -> str:
    """Runs one case; returns what kind of end it had, or raises a Verdict."""
    rows = int(rng.choice([1, 1, 2, 5, FULL]))
    is_filled = rng.random() < 0.4
    columns = draw_columns(
        rng, FULL + 1 if is_filled else rows, policy.action_space, policy.config.get("n_step", 1)
    )
    state = policy.get_state()
    for part in ("weights", "target_weights"):
        if part in state:
            state[part] = draw_weights(rng, state[part])
    state["_optimizer_variables"] = policy.get_state()["_optimizer_variables"]
    policy.set_state(state)
    weights = {key: np.asarray(w, np.float64) for key, w in state["weights"].items()}
    targets = {key: np.asarray(w, np.float64) for key, w in state.get("target_weights", {}).items()}
    counted = slice(FULL, FULL + 1) if is_filled else slice(None)
    batch = {key: np.float64(x[counted]) for key, x in columns.items()}
    noise = np.float64(get_noise(policy, FULL if is_filled else rows))[: len(batch["obs"])]
    reference = kind(policy, targets, batch, noise)
    with np.errstate(all="ignore"):
        losses = reference.losses(weights, weights)
    largest = max(reference.largest, *map(abs, losses)) if np.isfinite(losses).all() else np.inf
    inputs = SampleBatch(
        {k: x for k, x in columns.items() if k != "n_steps" or policy.config.get("n_step", 1) > 1}
    )
    before = policy.get_weights()
    try:
        if is_filled:
            policy.load_batch_into_buffer(inputs)
            result = policy.learn_on_loaded_batch(FULL)
            gradients = None
        else:
            gradients, result = policy.compute_gradients(inputs)
    except NonFiniteError as error:
        if largest < 1e34 and largest_gradient(reference, weights) < 1e34:
            how = "beside rows that fill up" if is_filled else f"{rows} rows"
            raise Verdict(f"refused ({how}), though {largest:.3g} is all: {error}") from None
        for key, w in policy.get_weights().items():
            if not np.array_equal(w, before[key]):
                raise Verdict(f"refused, but {key} has changed") from None
        return "refused"
    if largest > LARGEST * 10 and gradients is not None:
        if all(np.isfinite(g).all() for g in gradients if g is not None):
            return "beyond float32, finite"
        return "beyond float32"
    if largest > 1e30:
        return "near the end of float32"
    stats = result["learner_stats"]
    for name, x in stats.items():
        if not np.isfinite(x):
            raise Verdict(f"the statistic {name} is {x}, though nothing exceeds {largest:.3g}")
    size = 1e-3 * reference.largest if reference.largest > 1e3 else 0.0
    for name, value in getattr(reference, "stats", {}).items():
        compare(name, stats[name], value, size)
    if kind in (SACReference, DiscreteSACReference, TD3Reference):
        count = 1 if kind is TD3Reference else reference.errors.shape[-1]
        compare("actor_loss", stats["actor_loss"], losses[0], size)
        compare("critic_loss", stats["critic_loss"], losses[1] / count, size)
    if "alpha_loss" in stats:
        compare("alpha_loss", stats["alpha_loss"], losses[2], size)
    if largest > 3e3 or getattr(reference, "is_close", False):
        return "losses"
    check_gradients(policy, reference, weights, gradients, before, is_filled)
    return "one row among others that fill up" if is_filled else "losses and gradients"


def check_gradients(
    policy: Any,
    reference: Reference,
    weights: Weights,
    gradients: Any,
    before: Weights,
    is_filled: bool,
) -> None:
    keys = list(weights)
    after = policy.get_weights() if is_filled else {}
    for index in range(len(reference.networks)):
        for key, expected in differentiate(reference, weights, index).items():
            size = float(np.abs(expected).max(initial=0.0))
            size += 1e3 * rounding_of_differences(reference, weights, index, key)
            # float32 rounds the slope of a tanh that is nearly one.
            widest = max(np.abs(w).max() for w in weights.values())
            size += 1e-4 * widest**2 * max(widest, np.abs(reference.batch["obs"]).max())
            size += 1e-3 * reference.largest  # float32 rounds what it is the difference of
            if is_filled:  # by plain gradient descent
                rate = policy.get_hyperparameter("lr")
                number = (np.float64(before[key]) - after[key]) / rate
                noise = 2e-7 * np.abs(weights[key]).max() / rate
                compare(f"d loss / d {key}", number, expected, 10 * size + 5e3 * noise, 1e-3)
            else:
                compare(f"d loss / d {key}", gradients[keys.index(key)], expected, size, 2e-3)


# What samplers hand over --------------------------------------------------------------------------


class Numbered(gym.Env):
    """Observes its number, the episode and the step; the three say what a step earns and ends."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, number: int, action_space: Any, longest: int) -> None:
        self.number, self.action_space, self.longest = number, action_space, longest
        self.episode = -1

    @staticmethod
    def reward(number: Any, episode: Any, step: Any) -> Any:
        return np.sin(1.0 + number + 10.0 * episode + 100.0 * step)

    def ends(self, episode: int) -> tuple[int, bool]:
        """Returns how long an episode is, and whether it terminates."""
        chosen = np.random.default_rng([self.number, episode, self.longest])
        return int(chosen.integers(1, self.longest + 1)), bool(chosen.integers(2))

    def _observe(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.step_number], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.episode, self.step_number = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        reward = float(self.reward(self.number, self.episode, self.step_number))
        self.step_number += 1
        length, terminates = self.ends(self.episode)
        is_over = self.step_number == length
        return self._observe(), reward, is_over and terminates, is_over and not terminates, {}


SAMPLED: dict[str, tuple[type, type, Any, dict[str, Any]]] = {
    "DQN": (DQNConfig, DQNTF2Policy, THREE, {**Q_NETS, "n_step": 3}),
    "SAC": (SACConfig, SACTF2Policy, PLANE, CRITICS),
    "TD3": (TD3Config, TD3TF2Policy, PLANE, {**TD3_NETS, "n_step": 2}),
    "A2C": (A2CConfig, A2CTF2Policy, THREE, {**SPLIT, "lambda_": 0.9}),
}


def make_worker(name: str, mode: AutoresetMode, longest: int, fragment: int) -> RolloutWorker:
    config_class, policy_class, actions, training = SAMPLED[name]
    config = config_class().training(gamma=0.8, **training).debugging(seed=0)
    config.framework(inference="tf", jit_compile=False)
    config.rollouts(num_envs_per_worker=3, rollout_fragment_length=fragment)
    makers = [functools.partial(Numbered, i, actions, longest) for i in range(3)]
    return RolloutWorker(
        env_creator=lambda context: SyncVectorEnv(makers, autoreset_mode=mode),
        config=config,
        default_policy_class=policy_class,
    )


def check_sample(worker: RolloutWorker, batch: SampleBatch, name: str, longest: int) -> int:
    """Compares the rows of a sample with what the environments do, and returns their number."""
    policy, gamma = worker.get_policy(), 0.8
    envs = [Numbered(i, None, longest) for i in range(3)]
    steps = SAMPLED[name][3].get("n_step", 1)
    rows = [tuple(int(x) for x in row) for row in batch["obs"]]
    if len(set(rows)) < len(rows):
        raise Verdict("a step comes twice")
    for i, (number, episode, step) in enumerate(rows):
        length, terminates = envs[number].ends(episode)
        count = min(steps, length - step)
        if name != "A2C" and steps > 1:
            count = int(batch["n_steps"][i])
            if count != min(steps, length - step):
                raise Verdict(f"row {rows[i]} sums {count} rewards of {length - step}")
        rewards = [Numbered.reward(number, episode, step + k) * gamma**k for k in range(count)]
        expected = [number, episode, step + count]
        if batch["new_obs"][i].tolist() != expected:
            raise Verdict(f"row {rows[i]} reaches {batch['new_obs'][i]}, not {expected}")
        compare(f"the reward of {rows[i]}", batch["rewards"][i], sum(rewards), 1.0, 1e-5)
        is_over = step + count == length
        ends = [bool(batch["terminateds"][i]), bool(batch["truncateds"][i])]
        if ends != [is_over and terminates, is_over and not terminates]:
            raise Verdict(f"row {rows[i]} of {length} steps ends as {ends}")
    if name == "A2C":
        check_advantages(policy, batch, rows, gamma)
    return len(rows)


def check_advantages(policy: Any, batch: SampleBatch, rows: list[Any], gamma: float) -> None:
    """Compares advantages with sums of discounted errors, written out (arXiv:1506.02438, 16)."""
    w = [np.float64(x) for x in policy.get_weights().values()]

    def value(obs: np.ndarray) -> float:
        return float((np.tanh(np.float64(obs) @ w[2] + w[3]) @ w[6] + w[7])[0])

    places = {row: i for i, row in enumerate(rows)}
    for (number, episode, step), i in places.items():
        total, k = 0.0, 0
        while (number, episode, step + k) in places:
            j = places[number, episode, step + k]
            after = 0.0 if batch["terminateds"][j] else value(batch["new_obs"][j])
            error = batch["rewards"][j] + gamma * after - value(batch["obs"][j])
            total += (gamma * 0.9) ** k * error
            k += 1
        compare(f"the advantage of {rows[i]}", batch["advantages"][i], total, 1.0, 1e-4)
        target = total + value(batch["obs"][i])
        compare(f"the target of {rows[i]}", batch["value_targets"][i], target, 1.0, 1e-4)


def run_modes(name: str, cases: int, seed: int) -> int:
    rng = np.random.default_rng(seed)
    rows = wrong = 0
    for case in range(cases):
        mode = list(AutoresetMode)[case % 3]
        fragment = int(rng.choice([3, 4, 5]))
        longest = int(rng.choice([1, 2, fragment, 2 * fragment]))
        worker = make_worker(name, mode, longest, fragment)
        try:
            for _ in range(4):
                rows += check_sample(worker, worker.sample(), name, longest)
        except Verdict as verdict:
            wrong += 1
            print(f"{name}, {mode.value}, fragments of {fragment}: {verdict}", flush=True)
    print(f"{name}: {cases} samplers in three modes, {rows} rows, {wrong} wrong", flush=True)
    return wrong


def run(name: str, cases: int, seed: int) -> int:
    rng, policies, ends = np.random.default_rng(seed), make_policies(name), Counter[str]()
    for case in range(cases):
        policy, kind = policies[case % len(policies)]
        try:
            ends[run_case(policy, kind, rng)] += 1
        except Verdict as verdict:
            print(f"{name}, case {case} ({kind.__name__}): {verdict}", flush=True)
    wrong = cases - ends.total()
    words = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    print(f"{name}: {cases} cases, {wrong} wrong; {words}", flush=True)
    return wrong


def main() -> None:
    each = "of each algorithm"
    options = parse_options(
        __doc__, cases=(60, each), only=list(KINDS), seed=0, samplers=(12, each)
    )
    wrong = sum(run(name, options.cases, options.seed) for name in options.only)
    wrong += sum(run_modes(name, options.samplers, options.seed) for name in options.only)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
