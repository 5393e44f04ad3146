"""The result of a search: its trials, and settings that `tfpolicies train --config` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.description import encode_settings, find_changes
from tfpolicies.storage.import_paths import UnresolvedObject
from tfpolicies.storage.json_values import decode_value
from tfpolicies.tuning.search_space import nest
from tfpolicies.tuning.study import TrialRow

_OF_THE_SEARCH = ("env", "seed", "evaluation_duration", "evaluation_interval", "callbacks")
_GREEDY = {"explore": False}


class TuneResult(NamedTuple):
    """The return value of `tune`.

    Attributes:
        best_return: mean return of the best trial, over its seeds.
        best_settings: the changes of the best trial, as `config.update_from_dict` takes them; empty
            if no trial was better than the settings that the search began with.
        trials: all finished trials, in the order of their numbers.
        importances: share of each searched setting in the differences between returns, highest
            first; empty with fewer than 8 trials.
        folder: of the search, absolute, with the folder `trials` of the runs.
        best_json: all settings of the best trial that differ from defaults, for `tfpolicies train
            --config`.
        trials_csv: the trials as a table.
        picture: returns by trial, and importances, as a PNG.
    """

    best_return: float
    best_settings: dict[str, Any]
    trials: list[TrialRow]
    importances: dict[str, float]
    folder: Path
    best_json: Path
    trials_csv: Path
    picture: Path

    def __repr__(self) -> str:
        """Returns a one-line summary, since the trials are many."""
        return (
            f"TuneResult(best_return={self.best_return:.4g}, {len(self.trials)} trials, "
            f"folder={str(self.folder)!r})"
        )


def find_best(rows: Sequence[TrialRow]) -> TrialRow | None:
    """Returns the complete trial with the highest mean return, the first one of equals; or None."""
    complete = [row for row in rows if row.mean_return is not None]
    return max(complete, key=lambda row: (row.mean_return, -row.number), default=None)


def make_best_json(
    config: AlgorithmConfig, row: TrialRow, bases: Sequence[AlgorithmConfig]
) -> bytes:
    """Returns the settings of a trial as JSON, which give the same config on top of any base.

    Classes and functions are left out: the command line names them by options.

    Args:
        config: of the search, without the trial's settings.
        row: the trial.
        bases: configs of the same algorithm.
    """
    config = config.copy(copy_frozen=False).update_from_dict(nest(row.settings))
    settings = encode_settings(config.to_dict())
    changed: dict[str, Any] = {}
    for base in bases:
        _merge(changed, find_changes(settings, encode_settings(base.to_dict())))
    changed = {name: x for name, x in changed.items() if name not in _OF_THE_SEARCH}
    if changed.get("evaluation_config") == _GREEDY:
        del changed["evaluation_config"]  # the command's own
    return (json.dumps(_drop_code(decode_value(changed)), indent=2) + "\n").encode()


def _merge(target: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = value


def _drop_code(value: Any) -> Any:
    """Returns a value without the objects that JSON cannot hold, or None for one of them."""
    if isinstance(value, Mapping):
        kept = {str(name): _drop_code(x) for name, x in value.items() if not _is_code(x)}
        return kept
    if isinstance(value, list | tuple):
        return [_drop_code(x) for x in value if not _is_code(x)]
    return value


def _is_code(value: Any) -> bool:
    is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple | Mapping)
    return isinstance(value, UnresolvedObject) or not is_plain
