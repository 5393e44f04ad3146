"""RLlib's PPO on its old TensorFlow stack (2.10) in its own interpreter.

Variant "tf2" is the traced eager policy, "tf1" the graph policy. Run by `main_job`; by hand:
`RLLIB_PYTHON benchmarks/overview/peer_rllib.py acting --variant tf2`.
"""

import random
import time
from typing import Any

import numpy as np

from benchmarks import probe

probe.hush()

import gymnasium as gym  # noqa: E402
import ray  # noqa: E402
import tensorflow as tf  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.algorithms.ppo.ppo_tf_policy import PPOTF1Policy, PPOTF2Policy  # noqa: E402
from ray.rllib.evaluation.rollout_worker import RolloutWorker  # noqa: E402
from ray.rllib.policy.policy_map import PolicyMap  # noqa: E402
from ray.rllib.policy.sample_batch import DEFAULT_POLICY_ID, SampleBatch  # noqa: E402
from ray.rllib.utils.policy import create_policy_for_framework  # noqa: E402
from ray.rllib.utils.sgd import do_minibatch_sgd  # noqa: E402
from ray.rllib.utils.tf_utils import get_tf_eager_cls_if_necessary  # noqa: E402

tf.get_logger().setLevel("ERROR")


def worker_of(variant: str, num_envs: int = 1) -> RolloutWorker:
    """Returns a worker whose policy has 2x64 tanh networks, on CartPole."""
    framework, policy_class = {"tf1": ("tf", PPOTF1Policy), "tf2": ("tf2", PPOTF2Policy)}[variant]
    if framework == "tf":
        tf.compat.v1.disable_eager_execution()
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .framework(framework, eager_tracing=True)
        .rollouts(
            num_rollout_workers=0,
            num_envs_per_worker=num_envs,
            rollout_fragment_length=probe.FRAGMENT,
        )
        .training(
            model={"fcnet_hiddens": probe.HIDDEN, "vf_share_layers": False},
            train_batch_size=probe.ROWS,
            sgd_minibatch_size=probe.MINIBATCH,
            num_sgd_iter=probe.EPOCHS,
            lr=3e-4,
            clip_param=0.2,
            kl_coeff=0.0,
            vf_loss_coeff=0.5,
            grad_clip=0.5,
        )
        .debugging(seed=0, log_level="ERROR")
    )
    return RolloutWorker(
        env_creator=lambda context: gym.make("CartPole-v1"),
        config=config,
        default_policy_class=policy_class,
    )


def acting(request: probe.Request) -> probe.Figures:
    policy = worker_of(request.variant).get_policy()

    def figure(batch: int) -> float:
        obs = probe.observations(batch)
        return probe.microseconds(lambda: policy.compute_actions(obs), request.seconds)

    return {str(batch): figure(batch) for batch in probe.BATCH_SIZES}


def one_update(request: probe.Request) -> probe.Figures:
    policy = worker_of(request.variant).get_policy()

    def figure(rows: int) -> float:
        def learn() -> None:
            # RLlib pads and marks the batch that it is given, so each call gets a fresh one.
            policy.learn_on_batch(whole.slice(0, rows).copy(shallow=True))

        whole = SampleBatch(probe.training_rows())
        return probe.microseconds(learn, request.seconds) / 1e3

    return {str(rows): figure(rows) for rows in probe.ONE_UPDATE_ROWS}


def sampling(request: probe.Request) -> probe.Figures:
    def figure(num_envs: int) -> float:
        worker = worker_of(request.variant, num_envs)
        return probe.rate(lambda: worker.sample().env_steps(), request.seconds)

    return {str(num_envs): figure(num_envs) for num_envs in probe.ENV_COUNTS}


def update(request: probe.Request) -> probe.Figures:
    worker = worker_of(request.variant)
    learn = {"tf1": _learn_loaded, "tf2": _learn_minibatches}[request.variant]

    def one() -> float:
        batch = SampleBatch(probe.training_rows())
        before = time.perf_counter()
        learn(worker, batch)
        return time.perf_counter() - before

    return probe.update_figures(one, request.seconds)


def _learn_minibatches(worker: RolloutWorker, batch: SampleBatch) -> None:
    """Learns as RLlib's PPO does under "tf2" (`train_one_step`)."""
    policies = {DEFAULT_POLICY_ID: worker.get_policy()}
    do_minibatch_sgd(batch, policies, worker, probe.EPOCHS, probe.MINIBATCH, [])


def _learn_loaded(worker: RolloutWorker, batch: SampleBatch) -> None:
    """Learns as RLlib's PPO does under "tf" (`multi_gpu_train_one_step`)."""
    policy: Any = worker.get_policy()
    minibatches = policy.load_batch_into_buffer(batch, buffer_index=0) // probe.MINIBATCH
    for _ in range(probe.EPOCHS):
        for index in np.random.permutation(minibatches):
            policy.learn_on_loaded_batch(int(index) * probe.MINIBATCH, buffer_index=0)


def league(request: probe.Request) -> probe.Figures:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    worker = worker_of("tf2")
    policy, config = worker.get_policy(), worker.config.to_dict()
    policy_class = get_tf_eager_cls_if_necessary(PPOTF2Policy, config)
    swappable = "swappable" in request.variant

    def add(policies: PolicyMap, name: str) -> None:
        spaces = policy.observation_space, policy.action_space
        policies[name] = create_policy_for_framework(name, policy_class, dict(config), *spaces)

    def snapshot(policies: PolicyMap, name: str) -> None:
        add(policies, name)
        policies[name].set_state(policies["main"].get_state())

    def new_map(capacity: int) -> PolicyMap:
        return PolicyMap(capacity=capacity, policy_states_are_swappable=swappable)

    return probe.league_figures(new_map, add, snapshot, request.seconds)


if __name__ == "__main__":
    random.seed(0)
    probe.serve(
        ["ray", "tensorflow-cpu", "tensorflow-probability", "gymnasium", "numpy"],
        {
            "acting": acting,
            "one_update": one_update,
            "sampling": sampling,
            "update": update,
            "league": league,
        },
    )
