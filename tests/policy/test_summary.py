"""`policy.summary()` and `algorithm.summary()`: the parts of a policy, as Keras shows models."""

import keras
import pytest

from helpers import two_policies
from helpers.custom_policies import ZeroPolicy
from helpers.workers import make_small_config
from tfpolicies import DQNConfig, PPOConfig, SACConfig

pytestmark = pytest.mark.usefixtures("kept_programs")


def summarize(owner):
    lines = []
    owner.summary(lines.append)
    return lines


def find_row(lines, start):
    """Returns the cells of the only line that starts with a text."""
    (line,) = [line for line in lines if line.strip().startswith(start)]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.mark.core
def test_a_policy_shows_spaces_networks_memory_and_what_acts_and_learns(capsys):
    policy = make_small_config("CartPole-v1", lr=0.25).build().get_policy()
    lines = summarize(policy)
    assert lines[0] == "Policy: PPOTF2Policy"
    assert find_row(lines, "observations")[1] == "Box((4,), float32)"
    assert find_row(lines, "actions")[1] == "Discrete(2) from Categorical"
    assert find_row(lines, "acts")[1] == "through TensorFlow on /cpu:0"
    assert find_row(lines, "learns")[1] == "through tf.function on /cpu:0; 0 updates so far"
    # (4 * 4 + 4) + (4 * 2 + 2) for the actor, and (4 * 4 + 4) + (4 + 1) for the critic
    assert find_row(lines, "model (acts)") == ["model (acts)", "55", "55", "no", "Adam", "lr=0.25"]
    assert find_row(lines, "fc_1 (Dense)") == ["fc_1 (Dense)", "(None, 4)", "20"]
    assert find_row(lines, "value_out (Dense)") == ["value_out (Dense)", "(None, 1)", "5"]
    assert find_row(lines, "memory")[1].endswith("(weights 220 B, optimizers 452 B)")
    policy.summary()
    assert capsys.readouterr().out.splitlines()[-len(lines) :] == lines


def test_several_networks_have_target_copies_and_a_sum():
    config = make_small_config("Pendulum-v1", SACConfig, q_model_config={"fcnet_hiddens": [4]})
    policy = config.training(critic_lr=0.5, lr=0.25).build().get_policy()
    lines = summarize(policy)
    # the actor: (3 * 4 + 4) + (4 * 2 + 2); two critics: (4 * 4 + 4) + (4 + 1) each
    assert find_row(lines, "model (acts)")[1:] == ["26", "26", "no", "Adam", "lr=0.25"]
    assert find_row(lines, "critic  ")[1:] == ["50", "50", "yes", "Adam", "critic_lr=0.5"]
    assert find_row(lines, "temperature")[1:] == ["1", "1", "no", "Adam", "lr=0.25"]
    assert find_row(lines, "together")[1] == "77"
    assert "target copies 200 B" in find_row(lines, "memory")[1]
    assert "Layers of 'critic':" in lines


def test_the_summary_follows_the_policy():
    algorithm = make_small_config("CartPole-v1").build()
    algorithm.train()  # twice in halves
    assert find_row(summarize(algorithm.get_policy()), "learns")[1].endswith("; 4 updates so far")
    config = make_small_config("CartPole-v1", DQNConfig)
    config.training(replay_buffer_config={"capacity": 10})
    assert find_row(summarize(config.build().get_policy()), "model (acts)")[3] == "yes"


def test_layers_of_a_model_of_the_user_are_shown_as_they_are_nested():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="in")], name="inside")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2, name="out")(inner(inputs)))
    policy = make_small_config("CartPole-v1", PPOConfig, model=model).build().get_policy()
    lines = summarize(policy)
    assert find_row(lines, "in (Dense)")[2] == "15"
    assert find_row(lines, "out (Dense)")[2] == "8"
    (outer,) = [line for line in lines if "inside (Sequential)" in line]
    (nested,) = [line for line in lines if "in (Dense)" in line]
    assert len(nested) - len(nested.lstrip()) == len(outer) - len(outer.lstrip()) + 2


def test_an_algorithm_describes_policies_with_the_same_networks_once():
    algorithm = two_policies.make_config().build()
    spaces = [
        getattr(algorithm.get_policy("left"), f"{x}_space") for x in ("observation", "action")
    ]
    algorithm.add_policy("zero", policy=ZeroPolicy(*spaces, {}), policies_to_train=["left"])
    algorithm.train()
    lines = summarize(algorithm)
    assert lines[:3] == [
        "Algorithm: PPO on Staged",
        "  environments  1 in this process",
        "  trained       1 iterations, 14 environment steps",
    ]
    assert [line for line in lines if line.startswith("Policy:")] == [
        "Policy: PPOTF2Policy 'left', 'right'",
        "Policy: ZeroPolicy 'zero'",
    ]
