"""Mean times of the parts of a sampler's steps."""

from __future__ import annotations

from time import perf_counter_ns as now

__all__ = ["StepTimes", "now"]

_MS_PER_NS = 1e-6
_NAMES = (
    "mean_raw_obs_processing_ms",
    "mean_inference_ms",
    "mean_action_processing_ms",
    "mean_env_wait_ms",
)


class StepTimes:
    """The mean time of each part of a step of all environments.

    The mean is over all steps. With a coefficient it is an exponential moving average, which adapts
    to changes: `make = (1 - ema_coef) * old + ema_coef * step`, where the steps added between two
        calls of
    `means` all count with their mean. While there are fewer than `1 / ema_coef` steps it is the
    plain mean, so that the first step, in which functions are traced, does not get a larger weight.

    Args:
        ema_coef: the weight of the last step, in (0, 1]; None for the plain mean.

    >>> times = StepTimes()
    >>> times.add(1, 0, 1_000_000, 0, 4_000_000)
    >>> times.add(3, 0, 9_000_000, 0, 12_000_000)
    >>> times.means()["mean_inference_ms"], times.means()["mean_env_wait_ms"]
    (2.5, 4.0)
    """

    def __init__(self, ema_coef: float | None = None) -> None:
        self._decay = 1.0 if ema_coef is None else 1.0 - ema_coef  # weight of the previous mean
        self._steps = 0
        self._means = [0.0] * 4
        self._clear_pending()

    def _clear_pending(self) -> None:
        self._pending_steps = self._observation_ns = self._inference_ns = self._action_ns = (
            self._env_wait_ns
        ) = 0

    def add(
        self, steps: int, observations: int, inference: int, actions: int, env_wait: int
    ) -> None:
        """Adds steps of all environments; times are sums over them, in nanoseconds.

        Args:
            steps: the number of steps.
            observations: time to process and store observations and actions.
            inference: time of the policies.
            actions: time to process actions before they reach the environments.
            env_wait: time of the environments.
        """
        self._pending_steps += steps
        self._observation_ns += observations
        self._inference_ns += inference
        self._action_ns += actions
        self._env_wait_ns += env_wait

    def means(self) -> dict[str, float]:
        """Returns the means in milliseconds by RLlib's names; `{}` before the first step.

        Preprocessing, filters, and mapping actions to the environment's bounds run in the policies'
        Programs, so they count as inference; connectors count as processing of observations and
        actions. Samplers do not render, so that time is 0.
        """
        if self._pending_steps:
            self._steps += self._pending_steps
            weight = max(self._pending_steps / self._steps, 1.0 - self._decay**self._pending_steps)
            sums = self._observation_ns, self._inference_ns, self._action_ns, self._env_wait_ns
            for i, total in enumerate(sums):
                self._means[i] += weight * (total / self._pending_steps - self._means[i])
            self._clear_pending()
        if not self._steps:
            return {}
        means = dict(zip(_NAMES, (_MS_PER_NS * mean for mean in self._means), strict=True))
        return {**means, "mean_env_render_ms": 0.0}
