"""Names of RLlib's TensorFlow stack, for ported code only.

Nothing else in the package uses this subpackage; `docs/migrate/rllib.md` lists the names to use
instead in new code. Names are imported on first use.
"""

from __future__ import annotations

from typing import Any

from tfpolicies.algorithms.algorithm_registry import get_registered_names
from tfpolicies.base.extensions import register_extension
from tfpolicies.base.lazy_imports import resolve_lazy_attribute

_NAMES = {
    "tfpolicies.compat.action_dist": "ActionDistribution",
    "tfpolicies.compat.agents": (
        "build_trainer get_algorithm_class get_trainable_cls get_trainer_class "
        + " ".join(f"{name}Trainer {name}_DEFAULT_CONFIG" for name in get_registered_names())
    ),
    "tfpolicies.compat.annotations": (
        "AlgorithmConfigDict Deprecated EnvActionType EnvObsType EnvType ModelConfigDict "
        "ModelWeights MultiAgentDict PartialAlgorithmConfigDict ResultDict TensorStructType "
        "TensorType"
    ),
    "tfpolicies.compat.attention": "GTrXLNet",
    "tfpolicies.compat.catalog": "ModelCatalog normc_initializer with_common_config",
    "tfpolicies.compat.envs": (
        "BaseEnv ENV_STATE EpisodeV2 MultiAgentCartPole ParallelPettingZooEnv PettingZooEnv "
        "register_env TaskSettableEnv TaskType"
    ),
    "tfpolicies.compat.execution": (
        "discount LAST_TARGET_UPDATE_TS LEARNER_INFO LEARNER_STATS_KEY "
        "multi_gpu_train_one_step NUM_AGENT_STEPS_SAMPLED NUM_AGENT_STEPS_TRAINED "
        "NUM_ENV_STEPS_SAMPLED NUM_ENV_STEPS_TRAINED NUM_TARGET_UPDATES "
        "synchronous_parallel_sample train_one_step"
    ),
    "tfpolicies.compat.experience_readers": (
        "DatasetReader get_dataset_and_shards InputReader IOContext JsonReader MixedInput "
        "register_input registry_contains_input registry_get_input ShuffledInput"
    ),
    "tfpolicies.compat.experience_writers": (
        "DatasetWriter JsonWriter NoopOutput OutputWriter SampleBatchBuilder"
    ),
    "tfpolicies.compat.rllib_filters": "Filter MeanStdFilter",
    "tfpolicies.compat.metrics_summary": (
        "collect_episodes collect_metrics pretty_print summarize_episodes"
    ),
    "tfpolicies.compat.mixins": (
        "compute_gae_for_sample_batch DynamicTFPolicyV2 EagerTFPolicyV2 EntropyCoeffSchedule "
        "KLCoeffMixin LearningRateSchedule ValueNetworkMixin"
    ),
    "tfpolicies.compat.random_policy": "RandomPolicy",
    "tfpolicies.compat.policy_map_utils": "create_policy_for_framework validate_policy_id",
    "tfpolicies.compat.policy_template": "build_tf_policy",
    "tfpolicies.compat.preprocessors": (
        "AtariRamPreprocessor DictFlatteningPreprocessor GenericPixelPreprocessor "
        "get_preprocessor MultiBinaryPreprocessor NoPreprocessor OneHotPreprocessor Preprocessor "
        "TupleFlatteningPreprocessor"
    ),
    "tfpolicies.compat.replay_buffers": (
        "_ALL_POLICIES MultiAgentPrioritizedReplayBuffer MultiAgentReplayBuffer "
        "PrioritizedReplayBuffer ReplayBuffer ReplayMode ReservoirReplayBuffer StorageUnit"
    ),
    "tfpolicies.compat.schedule_classes": (
        "ConstantSchedule ExponentialSchedule LinearSchedule PiecewiseSchedule PolynomialSchedule "
        "Schedule"
    ),
    "tfpolicies.compat.tf_action_dist": (
        "Beta Categorical Deterministic DiagGaussian Dirichlet "
        "get_categorical_class_with_temperature GumbelSoftmax MultiActionDistribution "
        "MultiCategorical SquashedGaussian TFActionDistribution"
    ),
    "tfpolicies.compat.tf_model": (
        "add_time_dimension DistributionalQTFModel FullyConnectedNetwork ModelV2 "
        "RecurrentNetwork restore_original_dimensions TFModelV2 VisionNetwork"
    ),
    "tfpolicies.compat.utils": (
        "batch convert_to_numpy explained_variance flatten_space FLOAT_MAX FLOAT_MIN from_config "
        "get_tf_eager_cls_if_necessary LARGE_INTEGER make_tf_callable MAX_LOG_NN_OUTPUT "
        "MIN_LOG_NN_OUTPUT one_hot override SMALL_NUMBER softmax try_import_tf try_import_torch "
        "unbatch UnsupportedSpaceException warn_if_infinite_kl_divergence"
    ),
    "tfpolicies.compat.rllib_vector_env": "VectorEnv",
    "tfpolicies.batch.postprocessing": "adjust_nstep discount_cumsum Postprocessing standardized",
    "tfpolicies.batch.sample_batch": (
        "concat_samples_into_ma_batch convert_ma_batch_to_sample_batch"
    ),
    "tfpolicies.batch.rnn_sequencing": "chop_into_sequences pad_batch_to_sequences_of_same_size",
    "tfpolicies.config.callbacks": "make_multi_callbacks",
    "tfpolicies.envs.env_checker": "check_env",
    "tfpolicies.envs.env_factory": "EnvContext",
    "tfpolicies.envs.multi_agent_env": "make_multi_agent",
    "tfpolicies.errors": "EnvError",
    "tfpolicies.models.defaults": "MODEL_DEFAULTS",
    "tfpolicies.rollout.episode": "Episode RolloutMetrics",
}
"""Exported names by the module that defines them."""

_MODULE_BY_NAME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULE_BY_NAME]


register_extension(f"{__name__}.rllib_extension:RLlibExtension")


def __getattr__(name: str) -> Any:
    from tfpolicies.compat.rllib_names import ALTERNATIVES

    if name in ALTERNATIVES:  # `from ... import` would drop an AttributeError's text
        raise ImportError(
            f"{__name__} has no {name}. {ALTERNATIVES[name]} See docs/migrate/rllib.md."
        )
    return resolve_lazy_attribute(name, _MODULE_BY_NAME, globals())


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_BY_NAME})
