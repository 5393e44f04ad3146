"""Recurrent and attention policies against NumPy, step by step, acting and learning.

The references are written from the papers (GTrXL: arXiv:1910.06764, section 3.2; with a bias per
head and distance, arXiv:1910.10683, section 2.1; LSTM: doi:10.1162/neco.1997.9.8.1735) in double
precision. They walk through episodes one step at a time, with nothing but a list of what came
before, whereas the package works on padded sequences.
"""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import A2CConfig, A2CTF2Policy, RolloutWorker

pytestmark = pytest.mark.usefixtures("kept_programs")

LENGTHS = (5, 1, 7, 3, 10, 2)  # of episodes, in turn; fragments have 6 steps, sequences at most 4


class Waves(gym.Env):
    """Episodes of set lengths whose observations and rewards vary."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, config=None):
        self.episode = -1 + 3 * config.vector_index if config is not None else -1

    def _observe(self):
        return np.sin([self.now + self.episode, 2.0 * self.now]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.now = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action):
        self.now += 1
        is_over = self.now == LENGTHS[self.episode % len(LENGTHS)]
        terminates = is_over and self.episode % 2 == 0
        reward = float(action) - 0.3 * self.now
        return self._observe(), reward, terminates, is_over and not terminates, {}


ATTENTION = {
    "use_attention": True,
    "attention_num_transformer_units": 2,
    "attention_dim": 4,
    "attention_num_heads": 2,
    "attention_head_dim": 3,
    "attention_memory_inference": 3,
    "attention_memory_training": 3,
    "attention_position_wise_mlp_dim": 5,
}
LSTM = {"use_lstm": True, "lstm_cell_size": 4}
MODELS = {
    "attention": ATTENTION,
    "attention, previous": {
        **ATTENTION,
        "attention_use_n_prev_actions": 2,
        "attention_use_n_prev_rewards": 3,
    },
    "lstm": LSTM,
    "lstm, action": {**LSTM, "lstm_use_prev_action": True},
    "lstm, action and reward": {
        **LSTM,
        "lstm_use_prev_action": True,
        "lstm_use_prev_reward": True,
    },
}

QUICK = ("attention, previous", "lstm, action and reward")
MODEL = pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            settings, id=name, marks=pytest.mark.core if name in QUICK else pytest.mark.soak
        )
        for name, settings in MODELS.items()
    ],
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


class StepByStep:
    """A policy's network in NumPy: one step after the other.

    Args:
        policy: gives weights and settings.
    """

    def __init__(self, policy):
        variables = [x for x in policy.model.variables if "seed" not in x.path]
        weights = zip(variables, policy.get_weights().values(), strict=True)
        self.w = {variable.path: np.float64(array) for variable, array in weights}
        self.settings = policy.config["model"]

    def dense(self, x, name):
        bias = self.w.get(f"{name}/bias", 0.0)
        return x @ self.w[f"{name}/kernel"] + bias

    def norm(self, x, name):
        centred = x - x.mean()
        scaled = centred / np.sqrt((centred**2).mean() + 1e-5)
        return scaled * self.w[f"{name}/gamma"] + self.w[f"{name}/beta"]

    def gate(self, x, y, name):
        new, old = y @ self.w[f"{name}/new_kernel"], x @ self.w[f"{name}/gate_kernel"]
        n = len(x)
        reset = sigmoid(new[:n] + old[:n])
        update = sigmoid(new[n : 2 * n] + old[n:] - self.w[f"{name}/bias"])
        candidate = np.tanh(new[2 * n :] + (reset * x) @ self.w[f"{name}/kernel"])
        return (1 - update) * x + update * candidate

    def unit(self, x, earlier, name):
        """One transformer unit for the step `x`, after the inputs `earlier`, the newest last."""
        heads, width = self.settings["attention_num_heads"], self.settings["attention_head_dim"]
        steps = [self.norm(each, f"{name}/norm_1") for each in (*earlier, x)]
        query = self.dense(steps[-1], f"{name}/query")
        keys = [self.dense(each, f"{name}/key") for each in steps]
        values = [self.dense(each, f"{name}/value") for each in steps]
        parts = []
        for head in range(heads):
            own = slice(head * width, (head + 1) * width)
            distances = np.arange(len(steps))[::-1]
            bias = self.w[f"{name}/distance_bias"][head][distances]
            scores = np.array([key[own] @ query[own] for key in keys]) / np.sqrt(width) + bias
            parts.append(softmax(scores) @ np.array([value[own] for value in values]))
        attended = self.dense(np.concatenate(parts), f"{name}/project")
        y = self.gate(x, relu(attended), f"{name}/gate_1")
        hidden = relu(self.dense(self.norm(y, f"{name}/norm_2"), f"{name}/expand"))
        return self.gate(y, relu(self.dense(hidden, f"{name}/contract")), f"{name}/gate_2")

    def previous(self, actions, rewards):
        """What is read of the past of a step: before an episode begins, action 0 and reward 0."""
        s, extras = self.settings, []
        count = int(s["lstm_use_prev_action"] or s["attention_use_n_prev_actions"])
        if count:
            past = [np.eye(3)[a] for a in [0] * count + list(actions)]
            extras += past[len(past) - count :]
        count = int(s["lstm_use_prev_reward"] or s["attention_use_n_prev_rewards"])
        if count:
            past = [0.0] * count + list(rewards)
            extras.append(np.array(past[len(past) - count :]))
        return np.concatenate(extras) if extras else np.zeros(0)

    def start(self):
        if self.settings["use_attention"]:
            return [[] for _ in range(self.settings["attention_num_transformer_units"])]
        return [np.zeros(4), np.zeros(4)]

    def memory_of(self, states):
        """Returns the memory that a batch recorded, as `start` gives it."""
        if not self.settings["use_attention"]:
            return [np.float64(x) for x in states]
        count = round(float(states[-1][0]))
        return [[np.float64(x) for x in unit[len(unit) - count :]] for unit in states[:-1]]

    def step(self, obs, actions, rewards, memory):
        """Returns logits, value and the memory after a step."""
        x = np.tanh(self.dense(np.float64(obs), "fc_1"))
        x = np.concatenate([x, self.previous(actions, rewards)])
        if self.settings["use_attention"]:
            x, after = self.dense(x, "embedding"), []
            for i, earlier in enumerate(memory, start=1):
                after.append([*earlier, x][-self.settings["attention_memory_inference"] :])
                x = self.unit(x, earlier, f"transformer_{i}")
        else:
            h, c = memory
            names = ("kernel", "recurrent_kernel", "bias")
            kernel, recurrent, bias = (
                next(w for path, w in self.w.items() if "lstm" in path and path.endswith(f"/{n}"))
                for n in names
            )
            i, f, g, o = np.split(x @ kernel + h @ recurrent + bias, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            x = h = sigmoid(o) * np.tanh(c)
            after = [h, c]
        return self.dense(x, "fc_out"), self.dense(x, "value_out")[0], after


def make_worker(model):
    config = A2CConfig().environment(Waves).debugging(seed=2)
    model = {"fcnet_hiddens": [4], "max_seq_len": 4, "vf_share_layers": True, **model}
    config.training(model=model, gamma=0.9, lambda_=0.8, entropy_coeff=0.1, grad_clip=None)
    config.framework(jit_compile=False, inference="tf")
    config.rollouts(num_envs_per_worker=2, rollout_fragment_length=6)
    worker = RolloutWorker(config=config, default_policy_class=A2CTF2Policy)
    change_weights(worker.get_policy(), 3)
    return worker


def change_weights(policy, seed):
    rng = np.random.default_rng(seed)
    weights = policy.get_weights()
    policy.set_weights({k: w + 0.4 * rng.normal(size=w.shape) for k, w in weights.items()})


@MODEL
def test_acting_is_that_of_the_papers_step_by_step_through_episodes_and_fragments(model):
    worker = make_worker(model)
    network, episodes, lengths = StepByStep(worker.get_policy()), {}, set()
    for _ in range(4):
        batch = worker.sample()
        for row in range(batch.count):
            key = int(batch["eps_id"][row])
            if batch["t"][row] == 0:
                episodes[key] = ([], [], network.start())
            actions, rewards, memory = episodes[key]
            assert len(actions) == batch["t"][row]
            logits, value, memory = network.step(batch["obs"][row], actions, rewards, memory)
            np.testing.assert_allclose(batch["action_dist_inputs"][row], logits, atol=1e-4)
            np.testing.assert_allclose(batch["vf_preds"][row], value, atol=1e-4)
            actions.append(int(batch["actions"][row]))
            rewards.append(float(batch["rewards"][row]))
            episodes[key] = (actions, rewards, memory)
            if batch["terminateds"][row] or batch["truncateds"][row]:
                lengths.add(len(actions))
    assert lengths >= {1, 5, 7}


@MODEL
def test_the_loss_of_chopped_sequences_is_that_of_the_papers_step_by_step(model):
    worker = make_worker(model)
    policy = worker.get_policy()
    worker.sample()
    batch = worker.sample()  # episodes go on in it
    change_weights(policy, 5)  # the memory at the beginning of sequences stays that of acting
    network = StepByStep(policy)
    lengths = batch["seq_lens"]
    assert len(set(lengths)) > 1  # so that some are padded
    begins = np.cumsum(lengths) - lengths
    states = [batch[f"state_in_{i}"] for i in range(len(policy.get_initial_state()))]
    logps, entropies, errors = [], [], []
    past = {}  # of what acting saw, by episode; before the batch it is in the recorded views
    sequence = -1
    for row in range(batch.count):
        if row in begins:
            sequence += 1
            memory = network.memory_of([x[sequence] for x in states])
        key = int(batch["eps_id"][row])
        if key not in past:
            past[key] = known_past(batch, row)
        actions, rewards = past[key]
        logits, value, memory = network.step(batch["obs"][row], actions, rewards, memory)
        logp = np.log(softmax(logits))
        action = int(batch["actions"][row])
        logps.append(logp[action])
        entropies.append(-(np.exp(logp) * logp).sum())
        errors.append(value - batch["value_targets"][row])
        actions.append(action)
        rewards.append(float(batch["rewards"][row]))
    advantages = np.float64(batch["advantages"])
    stats = policy.learn_on_batch(batch)["learner_stats"]
    assert stats["policy_loss"] == pytest.approx(-(np.array(logps) * advantages).mean(), abs=1e-3)
    assert stats["policy_entropy"] == pytest.approx(np.mean(entropies), abs=1e-4)
    assert stats["vf_loss"] == pytest.approx(0.5 * np.square(errors).mean(), rel=1e-3)


def known_past(batch, row):
    """Returns the actions and rewards before a row, as far as the batch recorded them."""
    if batch["t"][row] == 0:
        return [], []
    actions = rewards = ()
    for name in ("prev_actions", "prev_n_actions"):
        if name in batch:
            actions = np.atleast_1d(batch[name][row])[-int(batch["t"][row]) :]
    for name in ("prev_rewards", "prev_n_rewards"):
        if name in batch:
            rewards = np.atleast_1d(batch[name][row])[-int(batch["t"][row]) :]
    return [int(a) for a in actions], [float(r) for r in rewards]
