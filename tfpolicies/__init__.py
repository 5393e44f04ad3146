"""Reinforcement-learning policies on TensorFlow 2 and Keras 3: train, run and ship them.

Names are imported on first use, so `import tfpolicies` loads neither TensorFlow nor ONNX Runtime.
"""

from __future__ import annotations

from tfpolicies._version import __version__
from tfpolicies.algorithms.algorithm_registry import get_exported_names
from tfpolicies.base.lazy_imports import resolve_lazy_attribute
from tfpolicies.system.quiet_start import quiet_tensorflow_start

TYPE_CHECKING = False  # as in `typing`, whose import would take half of the time of this one
if TYPE_CHECKING:
    from tfpolicies.algorithms.a2c import *
    from tfpolicies.algorithms.algorithm import Algorithm as Algorithm
    from tfpolicies.algorithms.bc import *
    from tfpolicies.algorithms.ddpg import *
    from tfpolicies.algorithms.dqn import *
    from tfpolicies.algorithms.episode_playback import record_video as record_video
    from tfpolicies.algorithms.keras_callbacks import KerasCallbacks as KerasCallbacks
    from tfpolicies.algorithms.marwil import *
    from tfpolicies.algorithms.pg import *
    from tfpolicies.algorithms.ppo import *
    from tfpolicies.algorithms.sac import *
    from tfpolicies.algorithms.td3 import *
    from tfpolicies.analysis.comparison import compare_runs as compare_runs
    from tfpolicies.analysis.diagnosis import diagnose as diagnose
    from tfpolicies.batch.postprocessing import compute_advantages as compute_advantages
    from tfpolicies.batch.sample_batch import MultiAgentBatch as MultiAgentBatch
    from tfpolicies.batch.sample_batch import SampleBatch as SampleBatch
    from tfpolicies.batch.sample_batch import concat_samples as concat_samples
    from tfpolicies.batch.view_requirement import ViewRequirement as ViewRequirement
    from tfpolicies.config.algorithm_config import AlgorithmConfig as AlgorithmConfig
    from tfpolicies.config.callbacks import DefaultCallbacks as DefaultCallbacks
    from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID as DEFAULT_POLICY_ID
    from tfpolicies.config.policy_spec import PolicySpec as PolicySpec
    from tfpolicies.distributed.worker_set import WorkerSet as WorkerSet
    from tfpolicies.envs.multi_agent_env import MultiAgentEnv as MultiAgentEnv
    from tfpolicies.importers.import_policy import import_policy as import_policy
    from tfpolicies.loggers.mlflow_logger import MLflowLogger as MLflowLogger
    from tfpolicies.loggers.wandb_logger import WandbLogger as WandbLogger
    from tfpolicies.policy.policy import Policy as Policy
    from tfpolicies.policy.tf_policy import TFPolicy as TFPolicy
    from tfpolicies.policy_map.policy_map import PolicyMap as PolicyMap
    from tfpolicies.rollout.rollout_worker import RolloutWorker as RolloutWorker
    from tfpolicies.tuning.tuner import tune as tune

_MODULES = {
    **get_exported_names(),
    "Algorithm": "tfpolicies.algorithms.algorithm",
    "AlgorithmConfig": "tfpolicies.config.algorithm_config",
    "DEFAULT_POLICY_ID": "tfpolicies.config.policy_spec",
    "DefaultCallbacks": "tfpolicies.config.callbacks",
    "KerasCallbacks": "tfpolicies.algorithms.keras_callbacks",
    "MLflowLogger": "tfpolicies.loggers.mlflow_logger",
    "MultiAgentBatch": "tfpolicies.batch.sample_batch",
    "MultiAgentEnv": "tfpolicies.envs.multi_agent_env",
    "Policy": "tfpolicies.policy.policy",
    "PolicyMap": "tfpolicies.policy_map.policy_map",
    "PolicySpec": "tfpolicies.config.policy_spec",
    "RolloutWorker": "tfpolicies.rollout.rollout_worker",
    "SampleBatch": "tfpolicies.batch.sample_batch",
    "TFPolicy": "tfpolicies.policy.tf_policy",
    "ViewRequirement": "tfpolicies.batch.view_requirement",
    "WandbLogger": "tfpolicies.loggers.wandb_logger",
    "WorkerSet": "tfpolicies.distributed.worker_set",
    "compare_runs": "tfpolicies.analysis.comparison",
    "compute_advantages": "tfpolicies.batch.postprocessing",
    "concat_samples": "tfpolicies.batch.sample_batch",
    "diagnose": "tfpolicies.analysis.diagnosis",
    "import_policy": "tfpolicies.importers.import_policy",
    "record_video": "tfpolicies.algorithms.episode_playback",
    "tune": "tfpolicies.tuning.tuner",
}

__all__ = [*_MODULES, "__version__"]

quiet_tensorflow_start()


def __getattr__(name: str) -> object:
    return resolve_lazy_attribute(name, _MODULES, globals())


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
