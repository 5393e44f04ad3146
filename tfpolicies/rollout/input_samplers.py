"""Samplers of users' readers, and of mixtures of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.errors import ConfigError, UsageError
from tfpolicies.offline.experience_io import ExperienceReader
from tfpolicies.rollout.episode import Episode
from tfpolicies.rollout.sampler import Sampler


class _EnvironmentInput(ExperienceReader):
    """Returns the batches of a sampler of environments."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def next(self) -> SampleBatch | MultiAgentBatch:
        return self._sampler.sample()


class _MaySample:
    """A sampler that may have a sampler of environments as a part."""

    _env_sampler: Any = None

    @property
    def envs(self) -> Any:
        """The environments; None without any."""
        return None if self._env_sampler is None else self._env_sampler.envs

    @property
    def num_envs(self) -> int:
        """The number of environments."""
        return 0 if self.envs is None else int(self.envs.num_envs)

    @property
    def metrics(self) -> list[Any]:
        """The metrics of episodes that ended in environments."""
        return [] if self._env_sampler is None else self._env_sampler.metrics

    @metrics.setter
    def metrics(self, metrics: list[Any]) -> None:
        if self._env_sampler is not None:
            self._env_sampler.metrics = metrics

    @property
    def running_episodes(self) -> Sequence[Episode]:
        """The episodes that run in environments."""
        return () if self._env_sampler is None else self._env_sampler.running_episodes

    def reset(self, seeds: Sequence[int] | None) -> None:
        """Starts new episodes in environments; reading of data continues."""
        if self._env_sampler is not None:
            self._env_sampler.reset(seeds)


class ReaderSampler(_MaySample):
    """Returns the batches of a user's reader, which the first sample creates.

    Args:
        make_reader: creates the reader.
        start_env_sampler: creates a sampler of environments and starts their episodes; called if
            the reader asks for one.
        rng: stored, as for other samplers.
    """

    state_kind = "reader"

    def __init__(
        self,
        make_reader: Callable[[], Any],
        start_env_sampler: Callable[[], Sampler | None],
        rng: np.random.Generator,
    ) -> None:
        self.rng = rng
        self._make_reader = make_reader
        self._start_env_sampler = start_env_sampler
        self._reader: ExperienceReader | None = None

    def _get_reader(self) -> Any:
        if self._reader is None:
            reader = self._make_reader()
            if not callable(getattr(reader, "next", None)):
                raise ConfigError(
                    "input_ must return a reader, an object with a method next() that returns a "
                    f"batch, got {reader!r:.200}. Subclass tfpolicies.offline.ExperienceReader."
                )
            self._reader = reader
        return self._reader

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns the reader's next batch.

        Raises:
            UsageError: if it is not a batch with rows.
        """
        batch = self._get_reader().next()
        if isinstance(batch, Mapping) and not isinstance(batch, SampleBatch):
            batch = SampleBatch(batch)
        if not isinstance(batch, SampleBatch | MultiAgentBatch) or not batch.count:
            raise UsageError(
                f"{type(self._reader).__name__}.next() must return a SampleBatch or a "
                f"MultiAgentBatch with rows, got {batch!r:.200}."
            )
        return batch

    def make_sampler_input(self) -> ExperienceReader | None:
        """Returns a reader that samples environments; None without an environment."""
        if self._env_sampler is None:
            self._env_sampler = self._start_env_sampler()
        return None if self._env_sampler is None else _EnvironmentInput(self._env_sampler)

    def close(self) -> None:
        """Closes the reader and the environments, if there are any."""
        for part in (self._reader, self._env_sampler):
            if hasattr(part, "close"):
                part.close()  # type: ignore[union-attr]

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the reader, if it has one; running episodes have none."""
        get_state = getattr(self._reader, "get_state", None)
        state = None if get_state is None else get_state()
        rng = self.rng.bit_generator.state
        return {"kind": self.state_kind, "envs": None, "rng": rng, "reader": state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; episodes begin again."""
        self.rng.bit_generator.state = state["rng"]
        self.reset(None)
        if state.get("reader") is not None:
            self._get_reader().set_state(state["reader"])


class MixedSampler(_MaySample):
    """Returns batches of several samplers, chosen at random.

    Args:
        samplers: the samplers.
        weights: their probabilities.
        rng: chooses.
    """

    state_kind = "mixture"

    def __init__(
        self, samplers: Sequence[Any], weights: Sequence[float], rng: np.random.Generator
    ) -> None:
        self._samplers = samplers
        self._weights = np.array(weights, float)
        self._weights /= self._weights.sum()
        self.rng = rng
        with_envs = [sampler for sampler in samplers if sampler.envs is not None]
        self._env_sampler = with_envs[0] if with_envs else None

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns the batch of one of the samplers."""
        index = int(self.rng.choice(len(self._samplers), p=self._weights))
        batch: SampleBatch | MultiAgentBatch = self._samplers[index].sample()
        return batch

    def close(self) -> None:
        """Closes files."""
        for sampler in self._samplers:
            if hasattr(sampler, "close"):
                sampler.close()

    def get_position(self) -> list[Any]:
        """Returns the positions of the samplers of data; None for others."""
        return [get_position_or_none(sampler) for sampler in self._samplers]

    def set_position(self, position: Sequence[Any]) -> None:
        """Continues at positions of `get_position`."""
        for sampler, part in zip(self._samplers, position, strict=True):
            if part is not None:
                sampler.set_position(part)

    def get_state(self) -> dict[str, Any]:
        """Returns the states of all samplers; running episodes may have none."""
        states = [sampler.get_state() for sampler in self._samplers]
        envs = [None if state is None else state.pop("envs") for state in states]
        rng = self.rng.bit_generator.state
        return {"kind": self.state_kind, "envs": envs, "rng": rng, "parts": states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; episodes without a state begin again."""
        self.rng.bit_generator.state = state["rng"]
        for sampler, part, envs in zip(self._samplers, state["parts"], state["envs"], strict=True):
            if part is None:
                sampler.reset(None)
            else:
                rng = sampler.rng.bit_generator.state
                sampler.set_state({"rng": rng, **part, "envs": envs})


def get_position_or_none(sampler: Any) -> Any:
    get_position = getattr(sampler, "get_position", None)
    return None if get_position is None else get_position()
