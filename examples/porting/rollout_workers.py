"""Rollout workers without an algorithm: CartPole, and cars and traffic lights with 3 policies.

    python examples/porting/rollout_workers.py

prints a batch of each.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import gymnasium as gym
from gymnasium.spaces import Box, Discrete

from tfpolicies import AlgorithmConfig, PGTFPolicy, PPOTF1Policy, RolloutWorker

sys.path.append(str(Path(__file__).parents[1]))
from traffic import MultiAgentTrafficGrid


def one_policy():
    # Create a rollout worker and use it to collect experiences.
    worker = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v1"),
        default_policy_class=PPOTF1Policy,
    )
    return worker.sample()


def three_policies():
    worker = RolloutWorker(
        env_creator=lambda _: MultiAgentTrafficGrid(num_cars=25),
        config=AlgorithmConfig().multi_agent(
            policies={
                # Use an ensemble of two policies for car agents
                "car_policy1": (
                    PGTFPolicy,
                    Box(0.0, 1.0, (5,)),
                    Discrete(2),
                    AlgorithmConfig.overrides(gamma=0.99),
                ),
                "car_policy2": (
                    PGTFPolicy,
                    Box(0.0, 1.0, (5,)),
                    Discrete(2),
                    AlgorithmConfig.overrides(gamma=0.95),
                ),
                # Use a single shared policy for all traffic lights
                "traffic_light_policy": (PGTFPolicy, Box(0.0, 1.0, (4,)), Discrete(2), {}),
            },
            policy_mapping_fn=(
                lambda agent_id, episode, **kwargs: (
                    random.choice(["car_policy1", "car_policy2"])
                    if agent_id.startswith("car_")
                    else "traffic_light_policy"
                )
            ),
        ),
    )
    return worker.sample()


def main():
    cart_pole, traffic = one_policy(), three_policies()
    print(cart_pole)
    for policy_id, rows in sorted(traffic.policy_batches.items()):
        print(f"{policy_id}: {rows}")
    return cart_pole, traffic


if __name__ == "__main__":
    main()
