"""Where names of RLlib are here: the one table that `tfpolicies port` and the guide go by."""

from __future__ import annotations

from collections.abc import Iterator

import tfpolicies
from tfpolicies.algorithms.registry import exported_names

_ALGORITHMS = "tfpolicies.algorithms."
_TUNE = "tfpolicies.compat.tune"

_UTILITIES = "override softmax SMALL_NUMBER try_import_tf try_import_torch"
_LIMITS = "LARGE_INTEGER MAX_LOG_NN_OUTPUT MIN_LOG_NN_OUTPUT"
_EXPORTED = "MultiAgentEnv Policy RolloutWorker SampleBatch TFPolicy"

_SCHEDULES = (
    "ConstantSchedule ExponentialSchedule LinearSchedule PiecewiseSchedule PolynomialSchedule "
    "Schedule"
)

_BY_HAND = {
    "ray": "tune",
    "ray.rllib": f"{_EXPORTED} BaseEnv VectorEnv",
    "ray.rllib.agents.a3c": "A2CTrainer",
    "ray.rllib.agents.a3c.a2c": "A2CTrainer",
    "ray.rllib.agents.callbacks": "DefaultCallbacks",
    "ray.rllib.agents.registry": "get_trainer_class",
    "ray.rllib.agents.trainer": "with_common_config",
    "ray.rllib.agents.trainer_template": "build_trainer",
    "ray.rllib.algorithms": "Algorithm AlgorithmConfig",
    "ray.rllib.algorithms.algorithm": "Algorithm AlgorithmConfig",
    "ray.rllib.algorithms.algorithm_config": "AlgorithmConfig",
    "ray.rllib.algorithms.callbacks": "DefaultCallbacks make_multi_callbacks",
    "ray.rllib.algorithms.dqn.distributional_q_tf_model": "DistributionalQTFModel",
    "ray.rllib.algorithms.registry": "get_algorithm_class",
    "ray.rllib.env": (
        "BaseEnv EnvContext MultiAgentEnv ParallelPettingZooEnv PettingZooEnv VectorEnv"
    ),
    "ray.rllib.env.apis.task_settable_env": "TaskSettableEnv TaskType",
    "ray.rllib.env.base_env": "BaseEnv",
    "ray.rllib.env.env_context": "EnvContext",
    "ray.rllib.env.multi_agent_env": "ENV_STATE make_multi_agent MultiAgentEnv",
    "ray.rllib.env.vector_env": "VectorEnv",
    "ray.rllib.env.wrappers.pettingzoo_env": "ParallelPettingZooEnv PettingZooEnv",
    "ray.rllib.evaluation": (
        "collect_metrics compute_advantages Episode MultiAgentBatch RolloutWorker SampleBatch"
    ),
    "ray.rllib.evaluation.episode": "Episode",
    "ray.rllib.evaluation.episode_v2": "EpisodeV2",
    "ray.rllib.evaluation.metrics": (
        "collect_episodes collect_metrics RolloutMetrics summarize_episodes"
    ),
    "ray.rllib.evaluation.postprocessing": (
        "adjust_nstep compute_advantages compute_gae_for_sample_batch discount discount_cumsum "
        "Postprocessing"
    ),
    "ray.rllib.evaluation.rollout_worker": "RolloutWorker",
    "ray.rllib.evaluation.worker_set": "WorkerSet",
    "ray.rllib.examples.env.multi_agent": "make_multi_agent MultiAgentCartPole",
    "ray.rllib.examples.policy.random_policy": "RandomPolicy",
    "ray.rllib.execution": "synchronous_parallel_sample",
    "ray.rllib.execution.rollout_ops": "standardized synchronous_parallel_sample",
    "ray.rllib.execution.train_ops": "multi_gpu_train_one_step train_one_step",
    "ray.rllib.models": "ActionDistribution MODEL_DEFAULTS ModelCatalog ModelV2 Preprocessor",
    "ray.rllib.models.action_dist": "ActionDistribution",
    "ray.rllib.models.catalog": "MODEL_DEFAULTS ModelCatalog",
    "ray.rllib.models.modelv2": "ModelV2 restore_original_dimensions",
    "ray.rllib.models.preprocessors": (
        "AtariRamPreprocessor DictFlatteningPreprocessor GenericPixelPreprocessor "
        "get_preprocessor MultiBinaryPreprocessor NoPreprocessor OneHotPreprocessor Preprocessor "
        "TupleFlatteningPreprocessor"
    ),
    "ray.rllib.models.tf": "FullyConnectedNetwork RecurrentNetwork TFModelV2 VisionNetwork",
    "ray.rllib.models.tf.attention_net": "GTrXLNet",
    "ray.rllib.models.tf.fcnet": "FullyConnectedNetwork",
    "ray.rllib.models.tf.misc": "normc_initializer",
    "ray.rllib.models.tf.recurrent_net": "RecurrentNetwork",
    "ray.rllib.models.tf.tf_action_dist": (
        "ActionDistribution Beta Categorical Deterministic DiagGaussian Dirichlet "
        "get_categorical_class_with_temperature GumbelSoftmax MultiActionDistribution "
        "MultiCategorical SquashedGaussian TFActionDistribution"
    ),
    "ray.rllib.models.tf.tf_modelv2": "TFModelV2",
    "ray.rllib.models.tf.visionnet": "VisionNetwork",
    "ray.rllib.policy": "build_tf_policy Policy TFPolicy",
    "ray.rllib.policy.dynamic_tf_policy_v2": "DynamicTFPolicyV2",
    "ray.rllib.policy.eager_tf_policy_v2": "EagerTFPolicyV2",
    "ray.rllib.policy.policy": "Policy PolicySpec ViewRequirement",
    "ray.rllib.policy.policy_map": "PolicyMap",
    "ray.rllib.policy.rnn_sequencing": (
        "add_time_dimension chop_into_sequences pad_batch_to_sequences_of_same_size"
    ),
    "ray.rllib.policy.sample_batch": (
        "concat_samples concat_samples_into_ma_batch convert_ma_batch_to_sample_batch "
        "DEFAULT_POLICY_ID MultiAgentBatch SampleBatch"
    ),
    "ray.rllib.policy.tf_mixins": (
        "EntropyCoeffSchedule KLCoeffMixin LearningRateSchedule ValueNetworkMixin"
    ),
    "ray.rllib.policy.tf_policy": "TFPolicy",
    "ray.rllib.policy.tf_policy_template": "build_tf_policy",
    "ray.rllib.policy.view_requirement": "ViewRequirement",
    "ray.rllib.utils": f"{_UTILITIES} {_LIMITS} check_env",
    "ray.rllib.utils.annotations": "Deprecated override",
    "ray.rllib.utils.deprecation": "Deprecated",
    "ray.rllib.utils.error": "EnvError UnsupportedSpaceException",
    "ray.rllib.utils.from_config": "from_config",
    "ray.rllib.utils.filter": "Filter MeanStdFilter",
    "ray.rllib.utils.framework": "TensorType try_import_tf try_import_torch",
    "ray.rllib.utils.metrics": (
        "LAST_TARGET_UPDATE_TS LEARNER_STATS_KEY NUM_AGENT_STEPS_SAMPLED NUM_AGENT_STEPS_TRAINED "
        "NUM_ENV_STEPS_SAMPLED NUM_ENV_STEPS_TRAINED NUM_TARGET_UPDATES"
    ),
    "ray.rllib.utils.metrics.learner_info": "LEARNER_INFO LEARNER_STATS_KEY",
    "ray.rllib.utils.numpy": f"{_LIMITS} convert_to_numpy one_hot SMALL_NUMBER softmax",
    "ray.rllib.utils.policy": "create_policy_for_framework validate_policy_id",
    "ray.rllib.utils.pre_checks.env": "check_env",
    "ray.rllib.utils.replay_buffers": "MultiAgentReplayBuffer",
    "ray.rllib.utils.replay_buffers.multi_agent_replay_buffer": "MultiAgentReplayBuffer",
    "ray.rllib.utils.schedules": _SCHEDULES,
    **{
        f"ray.rllib.utils.schedules.{name.removesuffix('Schedule').lower()}_schedule": name
        for name in _SCHEDULES.split()[:-1]
    },
    "ray.rllib.utils.schedules.schedule": "Schedule",
    "ray.rllib.utils.sgd": "standardized",
    "ray.rllib.utils.spaces.space_utils": "batch flatten_space unbatch",
    "ray.rllib.utils.tf_utils": (
        "explained_variance get_tf_eager_cls_if_necessary make_tf_callable one_hot "
        "warn_if_infinite_kl_divergence"
    ),
    "ray.rllib.utils.torch_utils": "FLOAT_MAX FLOAT_MIN",
    "ray.rllib.utils.typing": (
        "AlgorithmConfigDict EnvActionType EnvObsType EnvType ModelConfigDict ModelWeights "
        "MultiAgentDict PartialAlgorithmConfigDict ResultDict TensorStructType TensorType"
    ),
    "ray.tune.logger": "pretty_print",
    "ray.tune.registry": "get_trainable_cls register_env",
}

_RUNS = "CheckpointConfig FailureConfig RunConfig"
_OF_TUNE = {
    "ray.air": _RUNS,
    "ray.air.config": _RUNS,
    "ray.train": f"{_RUNS} get_checkpoint get_context report",
    "ray.tune": "register_env run Tuner",
}
"""Names of `compat.tune`, by where scripts have them from; Ray's other ones there stay Ray's."""

_OWN = {
    home.removeprefix(_ALGORITHMS): [
        name for name, other in exported_names().items() if other == home
    ]
    for home in exported_names().values()
}
"""The names of each algorithm, by its module."""

MODULES = {"ray.tune": _TUNE} | {
    f"ray.rllib.algorithms.{module}": f"{_ALGORITHMS}{own}"
    for own in _OWN
    for module in (own, f"{own}.{own}")
}
"""Modules that are one here, too."""


def _of_algorithms() -> Iterator[tuple[str, str]]:
    """Yields modules of RLlib with the names that registered algorithms give them."""
    for own, names in _OWN.items():
        package = f"ray.rllib.algorithms.{own}"
        for name in names:
            is_policy = name.endswith("Policy")
            yield package, name
            yield f"{package}.{own}{'_tf_policy' if is_policy else ''}", name
            if not is_policy:
                yield "ray.rllib.algorithms", name
        for module in (own, f"{own}.{own}"):
            yield f"ray.rllib.agents.{module}", f"{own.upper()}Trainer"


def _home(name: str) -> str:
    return "tfpolicies" if name in tfpolicies.__all__ else "tfpolicies.compat"


def _placed() -> dict[tuple[str, str], tuple[str, str]]:
    by_hand = ((module, name) for module, text in _BY_HAND.items() for name in text.split())
    tune = ((module, name) for module, text in _OF_TUNE.items() for name in text.split())
    found = {(module, name): (_home(name), name) for module, name in by_hand}
    found |= {(module, name): (_home(name), name) for module, name in _of_algorithms()}
    return found | {(module, name): (_TUNE, name) for module, name in tune}


PLACES = _placed()
"""By RLlib's module and name, the module and name here."""

_UNIFORM = "replay_buffer_config={'capacity': ...}: replay is uniform"
ELSEWHERE = {
    "AgentCollector": "RolloutWorker.sample(), or SampleBatch({'obs': ..., ...}), of whole columns",
    "JsonReader": "policy.learn_on_batch(batch), with batches that you read",
    "JsonWriter": (
        "RolloutWorker.sample(), whose batches are dicts of NumPy arrays that you may keep"
    ),
    "MinSegmentTree": _UNIFORM,
    "MultiAgentEnvWrapper": "environment(MyEnv), whose copies a worker steps together",
    "SampleBatchBuilder": "SampleBatch({'obs': ..., ...}), of whole columns",
    "SegmentTree": _UNIFORM,
    "SlateMultiCategorical": "MultiCategorical, which picks for each place by itself",
    "SumSegmentTree": _UNIFORM,
    "get_global_worker": "the worker that callbacks and foreach_worker are given",
}
"""What stands for names of RLlib that are not here."""

SECTIONS = {
    "ray.rllib": "Names",
    "ray.rllib.algorithms": "Not offered",
    "ray.rllib.algorithms.algorithm_config": "Configs",
    "ray.rllib.connectors": "Connectors",
    "ray.rllib.core": "Not offered",
    "ray.rllib.env": "Environments",
    "ray.rllib.env.multi_agent_env_runner": "Not offered",
    "ray.rllib.env.single_agent_env_runner": "Not offered",
    "ray.rllib.models": "A custom model",
    "ray.rllib.models.action_dist": "A custom action distribution",
    "ray.rllib.models.tf.tf_action_dist": "A custom action distribution",
    "ray.rllib.models.torch": "Not offered",
    "ray.rllib.offline": "Not offered",
    "ray.rllib.policy": "A custom policy",
    "ray.rllib.utils.exploration": "Configs",
    "ray.rllib.utils.replay_buffers": "DQN and SAC",
    "ray.rllib.utils.schedules": "Schedules",
    "ray.tune": "Ray Tune",
}
"""The section of `docs/porting.md` for what has no place here, by the beginning of its module."""


def section_for(module: str) -> str:
    """Returns the section of the guide for a module of RLlib.

    >>> section_for("ray.rllib.models.tf.attention_net"), section_for("ray.rllib.core")
    ('A custom model', 'Not offered')
    """
    while module not in SECTIONS and "." in module:
        module = module.rpartition(".")[0]
    return SECTIONS.get(module, "Names")
