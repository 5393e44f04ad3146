"""Losses of SAC, of SAC for Discrete actions and of TD3, as the papers have them, in float64."""

import copy
import math

import numpy as np

from helpers.continuous_actions import mlp


class Reference:
    """The losses of a policy on a batch in its next update, whose noise it draws as well."""

    noise_width = 0  # for each dimension of the actions

    def __init__(self, policy, batch):
        state = policy.get_state()
        self.weights = {key: np.float64(w) for key, w in state["weights"].items()}
        self.target_weights = {key: np.float64(w) for key, w in state["target_weights"].items()}
        self.batch = {name: np.asarray(x, np.float64) for name, x in batch.items()}
        self.policy, self.config = policy, policy.config
        if self.noise_width:
            rng = np.random.default_rng()
            rng.bit_generator.state = state["learning_rng"]
            width = self.noise_width * policy.action_space.shape[0]
            noise = rng.standard_normal((batch.count, width), np.float32)
            self.noise = np.float64(noise)

    def with_weights(self, weights):
        """Returns the reference for other weights and the same targets and noise."""
        other = copy.copy(self)
        other.weights = {key: np.float64(w) for key, w in weights.items()}
        return other

    def get_values(self, weights, prefix, *inputs):
        """Returns the values by each critic, which is the last axis of the result."""
        critics = [(key, w) for key, w in weights.items() if key.startswith(prefix)]
        layers = [
            [w for key, w in critics if ("#" in key) == is_second] for is_second in (False, True)
        ]
        x = np.concatenate(inputs, axis=-1)
        return np.stack([mlp(critic, x) for critic in layers if critic], axis=-1)

    def get_targets(self, gamma=None):
        gamma = self.policy.get_hyperparameter("gamma") if gamma is None else gamma
        discount = gamma * (1 - self.batch["terminateds"])
        return self.batch["rewards"] + discount * self.get_next_values()

    def get_losses(self, targets=None):
        """Returns those of the actor, the critics, and of SAC's temperature.

        `q` and `errors` are those of the last call, by critic.
        """
        self.q = self.get_chosen_values()
        self.errors = self.q - (self.get_targets() if targets is None else targets)[:, None]
        size = np.abs(self.errors)
        losses = 0.5 * size**2
        if self.config.get("use_huber", self.config.get("td_error_loss_fn") == "huber"):
            threshold = self.config.get("huber_threshold", 1.0)
            linear = threshold * (size - 0.5 * threshold)
            losses = np.where(size <= threshold, losses, linear)
        critic = (self.batch["weights"][:, None] * losses).mean(0).sum()
        actor, *others = self.get_actor_losses()
        return np.array([actor, critic, *others])

    def get_td_errors(self, targets=None):
        """Returns the error of each row that an update returns."""
        self.get_losses(targets)
        return np.abs(self.errors).mean(-1)

    def get_chosen_values(self):
        inputs = self.batch["obs"], self.batch["actions"]
        return self.get_values(self.weights, "critic/", *inputs)[:, 0]


class SACReference(Reference):
    """SAC for actions in [-1, 1]."""

    noise_width = 2

    def __init__(self, policy, batch):
        super().__init__(policy, batch)
        setting, space = self.config["target_entropy"], policy.action_space
        automatic = 0.98 * math.log(space.n) if hasattr(space, "n") else -space.shape[0]
        self.target_entropy = automatic if setting in (None, "auto") else setting

    def act(self, obs, noise):
        outputs = mlp([w for key, w in self.weights.items() if "/layer" not in key], obs)
        mean, log_std = np.split(outputs, 2, axis=-1)
        log_std = np.clip(log_std, -5, 2)
        actions = np.tanh(mean + np.exp(log_std) * noise)
        density = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - np.log(1 - actions**2)
        return actions, density.sum(-1)

    @property
    def log_alpha(self):
        return self.weights["temperature/layer_0/log_alpha"]

    def get_next_values(self):
        obs, noise = self.batch["new_obs"], np.split(self.noise, 2, axis=-1)[1]
        actions, logp = self.act(obs, noise)
        values = self.get_values(self.target_weights, "critic_target/", obs, actions)[:, 0]
        return values.min(-1) - np.exp(self.log_alpha) * logp

    def get_actor_losses(self):
        obs, noise = self.batch["obs"], np.split(self.noise, 2, axis=-1)[0]
        actions, logp = self.act(obs, noise)
        values = self.get_values(self.weights, "critic/", obs, actions)[:, 0].min(-1)
        yield (np.exp(self.log_alpha) * logp - values).mean()
        yield -self.log_alpha * (logp + self.target_entropy).mean()


class DiscreteSACReference(SACReference):
    """SAC for Discrete actions, which takes means over all of them and draws nothing."""

    noise_width = 0

    def get_log_probs(self, obs):
        logits = mlp([w for key, w in self.weights.items() if "/layer" not in key], obs)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def get_chosen_values(self):
        values = self.get_values(self.weights, "critic/", self.batch["obs"])
        return values[np.arange(len(values)), self.batch["actions"].astype(int)]

    def get_next_values(self):
        obs = self.batch["new_obs"]
        logp = self.get_log_probs(obs)
        values = self.get_values(self.target_weights, "critic_target/", obs).min(-1)
        return (np.exp(logp) * (values - np.exp(self.log_alpha) * logp)).sum(-1)

    def get_actor_losses(self):
        obs = self.batch["obs"]
        logp, values = self.get_log_probs(obs), self.get_values(self.weights, "critic/", obs)
        soft = np.exp(logp) * (np.exp(self.log_alpha) * logp - values.min(-1))
        yield soft.sum(-1).mean()
        yield -self.log_alpha * ((np.exp(logp) * logp).sum(-1) + self.target_entropy).mean()


class TD3Reference(Reference):
    """TD3, and DDPG, for actions in [-1, 1]."""

    noise_width = 1

    def act(self, weights, prefix, obs):
        return np.tanh(mlp(get_actor_weights(weights, prefix), obs))

    def get_next_values(self):
        obs, config = self.batch["new_obs"], self.config
        actions = self.act(self.target_weights, "target/", obs)
        if config["smooth_target_policy"]:
            limit = config["target_noise_clip"]
            actions += np.clip(config["target_noise"] * self.noise, -limit, limit)
        inputs = obs, np.clip(actions, -1, 1)
        return self.get_values(self.target_weights, "critic_target/", *inputs)[:, 0].min(-1)

    def get_losses(self, targets=None):
        decay = [self.get_decay(prefix) for prefix in ("", "critic/")]
        return super().get_losses(targets) + decay

    def get_actor_losses(self):
        obs = self.batch["obs"]
        actions = self.act(self.weights, "", obs)
        yield -self.get_values(self.weights, "critic/", obs, actions)[:, 0, 0].mean()

    def get_decay(self, prefix):
        kernels = [w for w in get_actor_weights(self.weights, prefix) if w.ndim > 1]
        return 0.5 * self.config["l2_reg"] * sum((w**2).sum() for w in kernels)

    def get_td_errors(self, targets=None):
        self.get_losses(targets)
        return self.errors[:, 0]


def get_actor_weights(weights, prefix=""):
    """Returns the weights of TD3's actor, or with "target/" of its target, out of all."""
    return [w for key, w in weights.items() if key.startswith(f"{prefix}layer")]
