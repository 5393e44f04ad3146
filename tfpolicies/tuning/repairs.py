"""Repairs of sampled settings that cannot work together, or not within the steps of a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfpolicies.tuning.search_space import Settings, expand_updates_per_step, nest, split_names

if TYPE_CHECKING:
    from tfpolicies.config.algorithm_config import AlgorithmConfig

_MAX_START_SHARE = 0.1  # of the steps of a trial, before learning starts
_START_SETTINGS = (
    "num_steps_sampled_before_learning_starts",
    "exploration_config.random_timesteps",
)
_WITH_SCHEDULES = ("lr", "entropy_coeff")
_CAPACITY = "replay_buffer_config.capacity"

_Change = Callable[[str, str, int, str], None]


def complete_settings(
    config: AlgorithmConfig, settings: Mapping[str, Any], steps: int
) -> tuple[Settings, list[str]]:
    """Returns sampled settings that a config accepts, and a text for each one that was changed.

    * A minibatch is at most the train batch, and a train batch at most the steps of a trial.
    * Learning starts, and random acting ends, within the first tenth of the steps.
    * A replay buffer holds a train batch or more.
    * `updates_per_step` becomes `training_intensity`.
    * A schedule of a sampled setting, such as `lr_schedule`, keeps its shape and gets its value as
      the highest one.

    Settings that were not sampled are never changed.

    Args:
        config: of the trials, without the sampled settings; it is not changed.
        settings: the sampled settings and constants, by name.
        steps: of the trial.

    Raises:
        ConfigError: if the config does not accept them.
    """
    result, notes = dict(settings), []
    names = {part: name for name in settings for part in split_names(name)}

    def get(part: str) -> Any:
        if part in names:
            return result[names[part]]
        head, _, key = part.partition(".")
        value = config.get(head)
        return value.get(key) if key and isinstance(value, Mapping) else value

    def change(part: str, rule: str, value: int, reason: str) -> None:
        old = get(part)
        wrong = old > value if rule == "at most" else old < value
        if part in names and wrong:
            result[names[part]] = value
            notes.append(f"{part} {old:,} becomes {value:,}: {rule} {reason}")

    _repair_batches(get, change, steps)
    _repair_replay(get, change, steps)
    result = expand_updates_per_step(result, get("train_batch_size"))
    result |= _scale_schedules(config, result)
    config.copy(copy_frozen=False).update_from_dict(nest(result))
    return result, notes


def _scale_schedules(config: AlgorithmConfig, settings: Mapping[str, Any]) -> Settings:
    """Returns the config's schedules of sampled settings, which would override these, scaled."""
    result: Settings = {}
    for name in _WITH_SCHEDULES:
        schedule = config.get(f"{name}_schedule")
        is_table = isinstance(schedule, list | tuple) and f"{name}_schedule" not in settings
        if name in settings and is_table:
            highest = max(value for _, value in schedule)
            factor = settings[name] / highest if highest else 0.0
            result[f"{name}_schedule"] = [[step, value * factor] for step, value in schedule]
    return result


def _repair_batches(get: Callable[[str], Any], change: _Change, steps: int) -> None:
    change("train_batch_size", "at most", steps, "the steps of a trial")
    if isinstance(minibatch := get("sgd_minibatch_size"), int):
        batch = get("train_batch_size")
        change("sgd_minibatch_size", "at most", batch, "train_batch_size")
        minibatch = get("sgd_minibatch_size")
        change("train_batch_size", "at least", minibatch, "sgd_minibatch_size")


def _repair_replay(get: Callable[[str], Any], change: _Change, steps: int) -> None:
    first = max(1, round(_MAX_START_SHARE * steps))
    for name in _START_SETTINGS:
        if isinstance(get(name), int):
            change(name, "at most", first, "a tenth of the steps of a trial")
    if isinstance(get(_CAPACITY), int):
        change(_CAPACITY, "at least", get("train_batch_size"), "train_batch_size")
