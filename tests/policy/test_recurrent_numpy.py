"""Recurrent and attention policies against NumPy, step by step, acting and learning.

The references are written from the papers (GTrXL: arXiv:1910.06764, section 3.2; with a bias per
head and distance, arXiv:1910.10683, section 2.1; LSTM: doi:10.1162/neco.1997.9.8.1735) in double
precision. They walk through episodes one step at a time, with nothing but a list of what came
before, whereas the package works on padded sequences.
"""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import varied
from helpers.marks import telling
from helpers.probability import sigmoid, softmax
from helpers.short_envs import ShortEnv
from helpers.workers import make_worker
from tfpolicies import A2CConfig, A2CTF2Policy

pytestmark = pytest.mark.usefixtures("kept_programs")

LENGTHS = (5, 1, 7, 3, 10, 2)  # of episodes, in turn; fragments have 6 steps, sequences at most 4


class Waves(ShortEnv):
    """Episodes of set lengths whose observations and rewards vary."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, config=None):
        self.episode = -1 + 3 * config.vector_index if config is not None else -1

    def observe(self):
        return np.sin([self.t + self.episode, 2.0 * self.t]).astype(np.float32)

    def pay(self, action):
        return float(action) - 0.3 * self.t

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.length = LENGTHS[self.episode % len(LENGTHS)]
        self.terminates = self.episode % 2 == 0
        return super().reset(seed=seed)


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
    "lstm, action and reward": {**LSTM, "lstm_use_prev_action": True, "lstm_use_prev_reward": True},
}

CORE = ("attention, previous", "lstm, action and reward")
SOAK = MODELS.keys() - {*CORE}
MODEL = pytest.mark.parametrize("name", telling(MODELS, *CORE, soak=SOAK))


def relu(x):
    return np.maximum(x, 0)


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
        steps = [self.norm(step, f"{name}/norm_1") for step in (*earlier, x)]
        query = self.dense(steps[-1], f"{name}/query")
        keys = [self.dense(step, f"{name}/key") for step in steps]
        values = [self.dense(step, f"{name}/value") for step in steps]
        parts = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            distances = np.arange(len(steps))[::-1]
            bias = self.w[f"{name}/distance_bias"][head][distances]
            scores = np.array([key[part] @ query[part] for key in keys]) / np.sqrt(width) + bias
            parts.append(softmax(scores) @ np.array([value[part] for value in values]))
        attended = self.dense(np.concatenate(parts), f"{name}/project")
        y = self.gate(x, relu(attended), f"{name}/gate_1")
        hidden = relu(self.dense(self.norm(y, f"{name}/norm_2"), f"{name}/expand"))
        return self.gate(y, relu(self.dense(hidden, f"{name}/contract")), f"{name}/gate_2")

    def previous(self, actions, rewards):
        """Returns the views of the past of a step; before an episode, action 0 and reward 0."""
        views = []
        for name, past in (("action", [np.eye(3)[a] for a in actions]), ("reward", rewards)):
            count = self.settings[f"attention_use_n_prev_{name}s"]
            count = int(self.settings[f"lstm_use_prev_{name}"] or count)
            past = [np.eye(3)[0] if name == "action" else 0.0] * count + past
            views += [np.atleast_1d(x) for x in past[len(past) - count :]]
        return np.concatenate([np.zeros(0), *views])

    def start(self):
        if self.settings["use_attention"]:
            return [[] for _ in range(self.settings["attention_num_transformer_units"])]
        return [np.zeros(4), np.zeros(4)]

    def read_memory(self, states):
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


def make_wave_worker(model):
    model = {"fcnet_hiddens": [4], "max_seq_len": 4, "vf_share_layers": True, **model}
    settings = {"model": model, "gamma": 0.9, "lambda_": 0.8, "entropy_coeff": 0.1}
    settings |= {"grad_clip": None, "seed": 2, "config_class": A2CConfig}
    sizes = {"num_envs_per_worker": 2, "rollout_fragment_length": 6}
    worker = make_worker(Waves, A2CTF2Policy, **settings, **sizes)
    varied(worker.get_policy(), 3)
    return worker


@MODEL
def test_acting_is_that_of_the_papers_step_by_step_through_episodes_and_fragments(name):
    worker = make_wave_worker(MODELS[name])
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
def test_the_loss_of_chopped_sequences_is_that_of_the_papers_step_by_step(name):
    worker = make_wave_worker(MODELS[name])
    policy = worker.get_policy()
    worker.sample()
    batch = worker.sample()  # continues episodes
    varied(policy, 5)  # the memory at the beginning of sequences stays that of acting
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
            memory = network.read_memory([x[sequence] for x in states])
        key = int(batch["eps_id"][row])
        if key not in past:
            past[key] = get_past(batch, row)
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


def get_past(batch, row):
    """Returns the actions and rewards before a row that the batch recorded."""
    past = {"actions": (), "rewards": ()}
    for name in past if batch["t"][row] else ():
        for view in (f"prev_{name}", f"prev_n_{name}"):
            if view in batch:
                past[name] = np.atleast_1d(batch[view][row])[-int(batch["t"][row]) :]
    return [int(a) for a in past["actions"]], [float(r) for r in past["rewards"]]
