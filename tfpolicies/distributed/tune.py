"""Algorithms as trainables of Ray Tune."""

from __future__ import annotations

import os
import sys
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.errors import ConfigError
from tfpolicies.system.gpu_memory import claim_process
from tfpolicies.system.log_suppression import extend_sys_path, load_tensorflow


def import_ray_tune() -> Any:
    try:
        from ray import tune
    except ImportError as error:
        raise ConfigError(
            "Ray Tune is not installed, or incomplete: run `pip install 'ray[tune]>=2.50'`."
        ) from error
    return tune


def make_default_config(algorithm: Any) -> AlgorithmConfig:
    """Returns the default config of an algorithm class, which can build the algorithm."""
    defaults = algorithm.get_default_config()
    if isinstance(defaults, AlgorithmConfig):
        config = defaults.copy(copy_frozen=False)  # an override may return a shared object
    else:  # a dict, as ported classes return it
        config = algorithm.config_class().update_from_dict(dict(defaults))
    config.algo_class = algorithm
    return config


def get_worker_resources(config: AlgorithmConfig) -> dict[str, float]:
    resources = {"CPU": config.num_cpus_per_worker, "GPU": config.num_gpus_per_worker}
    return {**resources, **config.custom_resources_per_worker}


def make_resource_request(config: AlgorithmConfig) -> Any:
    """Returns the resources of a run as a `PlacementGroupFactory`: the learner, then each worker.

    Raises:
        ConfigError: if Ray Tune is not installed.
    """
    learner = {"CPU": config.num_cpus_for_local_worker, "GPU": config.num_gpus}
    count = config.num_rollout_workers + config.evaluation_num_workers
    bundles = [
        {resource: amount for resource, amount in bundle.items() if amount}
        for bundle in [learner, *[get_worker_resources(config)] * count]
    ]
    return import_ray_tune().PlacementGroupFactory(bundles, strategy=config.placement_strategy)


def tune_trainable(base: AlgorithmConfig | type) -> type:
    """Returns a class for `ray.tune.Tuner` whose trials train an algorithm.

    A trial's settings override those of `base`, under their own names or nested as in
    `config.to_dict()`. Each step is one `Algorithm.train()`, whose result is reported. Checkpoints
    are those of `Algorithm.save`, which `Algorithm.from_checkpoint` also reads. A trial requests
    the result of `default_resource_request` of the algorithm's class: `num_cpus_for_local_worker`
    CPUs, `num_gpus` GPUs, and the resources of its remote workers.

    Args:
        base: a config that can be built; or an algorithm class, for its defaults.

    Raises:
        ConfigError: if Ray Tune is not installed.

    Example::

        config = PPOConfig().environment("CartPole-v1")
        space = {"lr": tune.grid_search([1e-3, 3e-4])}
        run_config = tune.RunConfig(stop={"training_iteration": 20})
        tune.Tuner(tune_trainable(config), param_space=space, run_config=run_config).fit()
    """
    tune: Any = import_ray_tune()
    from ray import cloudpickle

    from tfpolicies.distributed.registry_sync import pack_registries, register_packed

    algorithm_class: Any = base
    base_config = (
        base if isinstance(base, AlgorithmConfig) else make_default_config(algorithm_class)
    )
    name = getattr(base_config.algo_class, "__name__", "Algorithm")
    pickled = cloudpickle.dumps(base_config.copy(copy_frozen=False))
    names = pack_registries()
    paths = [os.path.abspath(path) for path in sys.path]

    def make_config(settings: dict[str, Any]) -> AlgorithmConfig:
        # Pickled separately: unpickling may need modules that only `paths` has.
        extend_sys_path(paths)
        load_tensorflow()
        register_packed(names)
        return cloudpickle.loads(pickled).update_from_dict(settings)

    class Trainable(tune.Trainable):
        """One trial, which trains an algorithm."""

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> Any:
            """Returns the resources that the algorithm of a trial requests."""
            algorithm_config = make_config(config)
            request = getattr(
                algorithm_config.algo_class, "default_resource_request", make_resource_request
            )
            return request(algorithm_config)

        def setup(self, config: dict[str, Any]) -> None:
            """Builds the algorithm of a trial."""
            claim_process()
            self.algorithm = make_config(config).build(use_copy=False)

        def step(self) -> dict[str, Any]:
            """Returns the result of an iteration, without the config, which Tune already has."""
            result = self.algorithm.train()
            return {key: value for key, value in result.items() if key != "config"}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            """Writes a checkpoint into a folder."""
            self.algorithm.save(checkpoint_dir)

        def load_checkpoint(self, checkpoint: str) -> None:
            """Resumes from a checkpoint."""
            self.algorithm.restore(checkpoint)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            """Builds another algorithm in the same process."""
            self.algorithm.stop()
            self.setup(new_config)
            return True

        def cleanup(self) -> None:
            """Stops the algorithm."""
            self.algorithm.stop()

    Trainable.__name__ = Trainable.__qualname__ = name
    return Trainable
