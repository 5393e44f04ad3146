"""Reinforcement-learning policies on TensorFlow 2 and Keras 3: train, run and ship them.

Names are imported on first use, so `import tfpolicies` loads neither TensorFlow nor ONNX Runtime.
"""

from __future__ import annotations

from tfpolicies._version import __version__
from tfpolicies.lazy import lazily

TYPE_CHECKING = False  # as in `typing`, whose import would take half of the time of this one
if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm import Algorithm
    from tfpolicies.algorithms.dqn import DQN, DQNConfig, DQNTF1Policy, DQNTF2Policy, DQNTFPolicy
    from tfpolicies.algorithms.pg import PG, PGConfig, PGTF1Policy, PGTF2Policy, PGTFPolicy
    from tfpolicies.algorithms.ppo import PPO, PPOConfig, PPOTF1Policy, PPOTF2Policy
    from tfpolicies.batch.postprocessing import compute_advantages
    from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch, concat_samples
    from tfpolicies.batch.view_requirement import ViewRequirement
    from tfpolicies.config.algorithm_config import AlgorithmConfig
    from tfpolicies.config.callbacks import DefaultCallbacks
    from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID, PolicySpec
    from tfpolicies.distributed.worker_set import WorkerSet
    from tfpolicies.envs.multi_agent_env import MultiAgentEnv
    from tfpolicies.policy.policy import Policy
    from tfpolicies.policy.policy_map import PolicyMap
    from tfpolicies.policy.tf_policy import TFPolicy
    from tfpolicies.rollout.rollout_worker import RolloutWorker

_HOMES = {
    "Algorithm": "tfpolicies.algorithms.algorithm",
    "AlgorithmConfig": "tfpolicies.config.algorithm_config",
    "DEFAULT_POLICY_ID": "tfpolicies.config.policy_spec",
    "DQN": "tfpolicies.algorithms.dqn",
    "DQNConfig": "tfpolicies.algorithms.dqn",
    "DQNTF1Policy": "tfpolicies.algorithms.dqn",
    "DQNTF2Policy": "tfpolicies.algorithms.dqn",
    "DQNTFPolicy": "tfpolicies.algorithms.dqn",
    "DefaultCallbacks": "tfpolicies.config.callbacks",
    "MultiAgentBatch": "tfpolicies.batch.sample_batch",
    "MultiAgentEnv": "tfpolicies.envs.multi_agent_env",
    "PG": "tfpolicies.algorithms.pg",
    "PGConfig": "tfpolicies.algorithms.pg",
    "PGTF1Policy": "tfpolicies.algorithms.pg",
    "PGTF2Policy": "tfpolicies.algorithms.pg",
    "PGTFPolicy": "tfpolicies.algorithms.pg",
    "PPO": "tfpolicies.algorithms.ppo",
    "PPOConfig": "tfpolicies.algorithms.ppo",
    "PPOTF1Policy": "tfpolicies.algorithms.ppo",
    "PPOTF2Policy": "tfpolicies.algorithms.ppo",
    "Policy": "tfpolicies.policy.policy",
    "PolicyMap": "tfpolicies.policy.policy_map",
    "PolicySpec": "tfpolicies.config.policy_spec",
    "RolloutWorker": "tfpolicies.rollout.rollout_worker",
    "SampleBatch": "tfpolicies.batch.sample_batch",
    "TFPolicy": "tfpolicies.policy.tf_policy",
    "ViewRequirement": "tfpolicies.batch.view_requirement",
    "WorkerSet": "tfpolicies.distributed.worker_set",
    "compute_advantages": "tfpolicies.batch.postprocessing",
    "concat_samples": "tfpolicies.batch.sample_batch",
}

__all__ = [
    "DEFAULT_POLICY_ID",
    "DQN",
    "PG",
    "PPO",
    "Algorithm",
    "AlgorithmConfig",
    "DQNConfig",
    "DQNTF1Policy",
    "DQNTF2Policy",
    "DQNTFPolicy",
    "DefaultCallbacks",
    "MultiAgentBatch",
    "MultiAgentEnv",
    "PGConfig",
    "PGTF1Policy",
    "PGTF2Policy",
    "PGTFPolicy",
    "PPOConfig",
    "PPOTF1Policy",
    "PPOTF2Policy",
    "Policy",
    "PolicyMap",
    "PolicySpec",
    "RolloutWorker",
    "SampleBatch",
    "TFPolicy",
    "ViewRequirement",
    "WorkerSet",
    "__version__",
    "compute_advantages",
    "concat_samples",
]


def __getattr__(name: str) -> object:
    return lazily(name, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
