"""Seeds of a worker's generators, and of its environments for each round of new episodes."""

from __future__ import annotations

from tfpolicies.config.algorithm_config import AlgorithmConfig

_EVALUATION_SEED = 10_000


class EpisodeSeeds:
    """Generates new seeds for a worker's environments in each call.

    Args:
        config: of the worker; without a seed there are none.
        worker_index: of the worker.

    Attributes:
        num_calls: the number of calls so far.
    """

    def __init__(self, config: AlgorithmConfig, worker_index: int) -> None:
        self._config = config
        self._worker_index = worker_index
        self.num_calls = 0

    @property
    def worker_seed(self) -> int | None:
        """The config's seed plus the worker's index (plus 10000 in evaluation), or None."""
        seed = self._config.seed
        if seed is None:
            return None
        return int(seed + self._worker_index + _EVALUATION_SEED * self._config.in_evaluation)

    def get_generator_seed(self, purpose: str) -> list[int] | None:
        if self._config.seed is None:
            return None
        return [self._config.seed, self._worker_index, sum(purpose.encode())]

    def next(self, num_envs: int, *, evaluation: bool = False) -> list[int] | None:
        """Returns a new seed for each environment, or None if the config has no seed.

        They depend on the seed, the worker's index, the environment's index, and the number of
        calls.
        """
        calls, self.num_calls = self.num_calls, self.num_calls + 1
        seed = self._config.seed
        if seed is None or not num_envs:
            return None
        seed += 1001 * self._worker_index + 1_000_003 * calls
        seed += _EVALUATION_SEED if evaluation else 0
        return [seed + i for i in range(num_envs)]
