"""Names that exist only so that code written for RLlib's TensorFlow stack ports.

Nothing else in the package needs this room, and `docs/porting.md` has the names that do without it.
Like the package itself it imports them on first use.
"""

from __future__ import annotations

from typing import Any

from tfpolicies import ported
from tfpolicies.lazy import lazily

_HOMES = {
    "AlgorithmConfigDict": "tfpolicies.compat.annotations",
    "BaseEnv": "tfpolicies.compat.envs",
    "DQNTrainer": "tfpolicies.compat.agents",
    "Deprecated": "tfpolicies.compat.annotations",
    "DistributionalQTFModel": "tfpolicies.compat.tf_model",
    "DynamicTFPolicyV2": "tfpolicies.compat.mixins",
    "ENV_STATE": "tfpolicies.compat.envs",
    "EagerTFPolicyV2": "tfpolicies.compat.mixins",
    "EntropyCoeffSchedule": "tfpolicies.compat.mixins",
    "EnvActionType": "tfpolicies.compat.annotations",
    "EnvContext": "tfpolicies.envs.making",
    "EnvError": "tfpolicies.errors",
    "EnvObsType": "tfpolicies.compat.annotations",
    "EnvType": "tfpolicies.compat.annotations",
    "Episode": "tfpolicies.rollout.episode",
    "EpisodeV2": "tfpolicies.compat.envs",
    "FLOAT_MAX": "tfpolicies.compat.utils",
    "FLOAT_MIN": "tfpolicies.compat.utils",
    "FullyConnectedNetwork": "tfpolicies.compat.tf_model",
    "KLCoeffMixin": "tfpolicies.compat.mixins",
    "LAST_TARGET_UPDATE_TS": "tfpolicies.compat.execution",
    "LEARNER_INFO": "tfpolicies.compat.execution",
    "LEARNER_STATS_KEY": "tfpolicies.compat.execution",
    "LearningRateSchedule": "tfpolicies.compat.mixins",
    "MODEL_DEFAULTS": "tfpolicies.models.defaults",
    "ModelCatalog": "tfpolicies.compat.catalog",
    "ModelConfigDict": "tfpolicies.compat.annotations",
    "ModelV2": "tfpolicies.compat.tf_model",
    "ModelWeights": "tfpolicies.compat.annotations",
    "MultiAgentCartPole": "tfpolicies.compat.envs",
    "MultiAgentDict": "tfpolicies.compat.annotations",
    "MultiAgentReplayBuffer": "tfpolicies.compat.replay",
    "NUM_AGENT_STEPS_SAMPLED": "tfpolicies.compat.execution",
    "NUM_AGENT_STEPS_TRAINED": "tfpolicies.compat.execution",
    "NUM_ENV_STEPS_SAMPLED": "tfpolicies.compat.execution",
    "NUM_ENV_STEPS_TRAINED": "tfpolicies.compat.execution",
    "NUM_TARGET_UPDATES": "tfpolicies.compat.execution",
    "PGTrainer": "tfpolicies.compat.agents",
    "PPOTrainer": "tfpolicies.compat.agents",
    "ParallelPettingZooEnv": "tfpolicies.compat.envs",
    "PartialAlgorithmConfigDict": "tfpolicies.compat.annotations",
    "PettingZooEnv": "tfpolicies.compat.envs",
    "Postprocessing": "tfpolicies.batch.postprocessing",
    "Preprocessor": "tfpolicies.compat.preprocessors",
    "RandomPolicy": "tfpolicies.compat.policies",
    "RecurrentNetwork": "tfpolicies.compat.tf_model",
    "ResultDict": "tfpolicies.compat.annotations",
    "RolloutMetrics": "tfpolicies.rollout.episode",
    "SMALL_NUMBER": "tfpolicies.compat.utils",
    "TFModelV2": "tfpolicies.compat.tf_model",
    "TaskSettableEnv": "tfpolicies.compat.envs",
    "TaskType": "tfpolicies.compat.envs",
    "TensorStructType": "tfpolicies.compat.annotations",
    "TensorType": "tfpolicies.compat.annotations",
    "UnsupportedSpaceException": "tfpolicies.compat.utils",
    "ValueNetworkMixin": "tfpolicies.compat.mixins",
    "VectorEnv": "tfpolicies.compat.vector_env",
    "VisionNetwork": "tfpolicies.compat.tf_model",
    "add_time_dimension": "tfpolicies.compat.tf_model",
    "adjust_nstep": "tfpolicies.batch.postprocessing",
    "batch": "tfpolicies.compat.utils",
    "build_tf_policy": "tfpolicies.compat.policy_template",
    "build_trainer": "tfpolicies.compat.finding",
    "check_env": "tfpolicies.envs.checking",
    "collect_episodes": "tfpolicies.compat.metrics",
    "collect_metrics": "tfpolicies.compat.metrics",
    "compute_gae_for_sample_batch": "tfpolicies.compat.mixins",
    "convert_to_numpy": "tfpolicies.compat.utils",
    "create_policy_for_framework": "tfpolicies.compat.policy_map_utils",
    "discount": "tfpolicies.compat.execution",
    "discount_cumsum": "tfpolicies.batch.postprocessing",
    "explained_variance": "tfpolicies.compat.utils",
    "flatten_space": "tfpolicies.compat.utils",
    "get_algorithm_class": "tfpolicies.compat.finding",
    "get_preprocessor": "tfpolicies.compat.preprocessors",
    "get_trainable_cls": "tfpolicies.compat.finding",
    "get_trainer_class": "tfpolicies.compat.finding",
    "make_multi_agent": "tfpolicies.envs.multi_agent_env",
    "make_multi_callbacks": "tfpolicies.config.callbacks",
    "make_tf_callable": "tfpolicies.compat.utils",
    "multi_gpu_train_one_step": "tfpolicies.compat.execution",
    "normc_initializer": "tfpolicies.compat.catalog",
    "one_hot": "tfpolicies.compat.utils",
    "override": "tfpolicies.compat.utils",
    "pretty_print": "tfpolicies.compat.metrics",
    "register_env": "tfpolicies.compat.envs",
    "restore_original_dimensions": "tfpolicies.compat.tf_model",
    "softmax": "tfpolicies.compat.utils",
    "standardized": "tfpolicies.compat.execution",
    "summarize_episodes": "tfpolicies.compat.metrics",
    "synchronous_parallel_sample": "tfpolicies.compat.execution",
    "train_one_step": "tfpolicies.compat.execution",
    "try_import_tf": "tfpolicies.compat.utils",
    "try_import_torch": "tfpolicies.compat.utils",
    "unbatch": "tfpolicies.compat.utils",
    "validate_policy_id": "tfpolicies.compat.policy_map_utils",
    "warn_if_infinite_kl_divergence": "tfpolicies.compat.utils",
    "with_common_config": "tfpolicies.compat.catalog",
}

_DISTRIBUTION = (
    "a subclass of tfpolicies.models.distributions.Distribution, which turns noise into actions"
)
_SAMPLES = "RolloutWorker.sample(), whose batches are dicts of NumPy arrays that you may keep"
_ELSEWHERE = {
    "ActionDistribution": _DISTRIBUTION,
    "Categorical": "tfpolicies.models.distributions.Categorical",
    "Deterministic": "tfpolicies.models.distributions.Deterministic",
    "DiagGaussian": "tfpolicies.models.distributions.DiagGaussian",
    "JsonReader": "policy.learn_on_batch(batch), with batches that you read",
    "JsonWriter": _SAMPLES,
    "MultiCategorical": "tfpolicies.models.distributions.MultiCategorical",
    "SampleBatchBuilder": "SampleBatch({'obs': ..., ...}), of whole columns",
    "SquashedGaussian": "tfpolicies.models.distributions.SquashedGaussian",
    "TFActionDistribution": _DISTRIBUTION,
}
"""What stands for names of RLlib that are not here."""

__all__ = [*_HOMES]


ported.register(f"{__name__}.attributes")


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:  # an AttributeError would lose its text in `from ... import`
        raise ImportError(f"{__name__} has no {name}. Use {_ELSEWHERE[name]}: see docs/porting.md.")
    return lazily(name, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
