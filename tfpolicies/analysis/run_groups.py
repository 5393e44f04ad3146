"""Collects runs from folders, and groups those that differ only in their seed."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.analysis.run_record import RunRecord, read_run
from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.reporting.run_folder import SEED_PREFIX, RunFolder, find_run_paths
from tfpolicies.storage.checkpoint import read_manifest
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST
from tfpolicies.system.paths import resolve_path, shorten_path

DEFAULT = "default"
"""The text of a setting that has the default of the algorithm."""

NO_ENV = "recorded experience"
"""The text of the environment of runs without one."""

UNKNOWN_ENV = "unknown environment"
"""The text of the environment of runs of earlier versions, which do not record it."""

_MAX_LABEL_SETTINGS = 3
_LABEL_ORDER = ("lr", "gamma", "train_batch_size", "sgd_minibatch_size", "num_sgd_iter")
_MAX_TEXT = 60  # characters of a value
_MAX_DEPTH = 30  # levels of settings and places
_OPTIONS_WITH_SETTINGS = ("num_envs", "lr", "set", "from_file", "no_tuned", "model", "data")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunGroup:
    """Runs with the same algorithm, environment and settings, apart from the seed.

    Attributes:
        label: its name; or the algorithm and the settings in which it differs from others on its
            environment.
        algorithm: as in `RunRecord`.
        env: as in `RunRecord`, or "recorded experience" or "unknown environment".
        settings: those that differ from the algorithm's defaults, as texts by dotted name.
        runs: by seed and time.
        checkpoint_settings: all settings in the newest checkpoint of a run, as texts; empty
            without one.
    """

    label: str
    algorithm: str
    env: str
    settings: Mapping[str, str]
    runs: tuple[RunRecord, ...]
    checkpoint_settings: Mapping[str, str] = field(default_factory=dict)

    def get_setting(self, name: str) -> str:
        """Returns the text of a setting; "default" if its value is not known."""
        return self.settings.get(name, self.checkpoint_settings.get(name, DEFAULT))

    @property
    def key(self) -> str:
        """The label and the environment, which no other group has."""
        return f"{self.label} on {self.env}"

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def duplicate_seeds(self) -> tuple[int, ...]:
        """Seeds of more than one run."""
        seeds = [seed for seed in self.seeds if seed is not None]
        return tuple(sorted({seed for seed in seeds if seeds.count(seed) > 1}))

    def __repr__(self) -> str:
        return f"RunGroup({self.label!r} on {self.env!r}, {len(self.runs)} runs)"


class RunsRead(NamedTuple):
    """The result of `read_runs`.

    Attributes:
        records: the runs, oldest first.
        damaged: the reasons why others cannot be read, by path.
        names: the names that the caller gave to runs, by folder.
    """

    records: list[RunRecord]
    damaged: dict[str, str]
    names: dict[Path, str]


def read_runs(
    paths: Iterable[str | PathLike[str]] | Mapping[str, Iterable[str | PathLike[str]]],
) -> RunsRead:
    """Reads the runs at some paths, and those in folders of runs.

    Args:
        paths: the paths; or by name, "" for none.

    Raises:
        CheckpointError: if a path neither is a run nor holds one.
        UsageError: if there are no paths.
    """
    named_paths = paths if isinstance(paths, Mapping) else {"": paths}
    names = {
        folder: name
        for name, paths_of_name in named_paths.items()
        for path in paths_of_name
        for folder in _find_folders(path)
    }
    if not names:
        raise UsageError("paths must name at least one run folder or folder of runs, got none.")
    records, damaged = [], {}
    for folder in names:
        try:
            records.append(_read_shallow_run(folder))
        except CheckpointError as error:
            damaged[show_text(shorten_path(folder), 300)] = show_text(str(error), 500)
    records.sort(key=lambda record: (record.created.replace(tzinfo=None), str(record.folder.path)))
    return RunsRead(records, damaged, names)


def _read_shallow_run(folder: Path) -> RunRecord:
    """Reads a run; refuses settings that are nested so deeply that showing them would fail."""
    record = read_run(folder)
    if _is_too_deep([record.config, record.command, record.places]):
        raise CheckpointError(
            f"{str(record.folder.run_json)!r} is nested more than {_MAX_DEPTH} levels deep, "
            "which no training writes. Restore the file."
        )
    return record


def _is_too_deep(value: Sequence[Any]) -> bool:
    """Returns whether a JSON value is nested too deeply to be shown."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [x for value in level for x in _get_children(value)]
    return bool(level)


def _get_children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _find_folders(path: str | PathLike[str]) -> list[Path]:
    folder = resolve_path(path)
    if (folder / "run.json").exists():
        return [folder]
    parents = [folder, *(path for path in sorted(folder.glob("*")) if path.is_dir())]
    folders = {path: None for parent in parents for path in find_run_paths(parent)}
    if not folders:
        RunFolder.open(folder)  # raises, and says why it is none
    return [*folders]


def group_runs(
    records: Sequence[RunRecord], names: Mapping[Path, str]
) -> dict[str, list[RunGroup]]:
    """Returns the groups by environment; both in the order of their first run.

    Args:
        records: the runs.
        names: of runs, by folder; runs of different names are in different groups.
    """
    by_env: dict[str, dict[Any, list[RunRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        settings = get_settings(record)
        name = names.get(record.folder.path, "")
        key = (name, record.algorithm, tuple(sorted(settings.items())))
        by_env[get_env_text(record)][key].append(record)
    return {env: _make_groups(env, runs_by_key) for env, runs_by_key in by_env.items()}


def _make_groups(env: str, runs_by_key: Mapping[Any, list[RunRecord]]) -> list[RunGroup]:
    groups = [
        RunGroup(
            label="",
            algorithm=algorithm,
            env=env,
            settings=dict(items),
            runs=tuple(sorted(runs, key=lambda run: -1 if run.seed is None else run.seed)),
            checkpoint_settings=_read_checkpoint_settings(runs),
        )
        for (_, algorithm, items), runs in runs_by_key.items()
    ]
    labels = _add_names(_make_labels(groups), [name for name, _, _ in runs_by_key])
    return [replace(group, label=label) for group, label in zip(groups, labels, strict=True)]


def _read_checkpoint_settings(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Returns the settings in the newest checkpoint of the first run that has a sound one."""
    for run in runs:
        with contextlib.suppress(CheckpointError, KeyError, TypeError, AttributeError):
            manifest = read_manifest(run.folder.latest, ALGORITHM_MANIFEST, kind="Algorithm")
            settings = manifest["config"]["settings"]
            if not _is_too_deep([settings]):
                return dict(_flatten(settings))
    return {}


def _make_labels(groups: Sequence[RunGroup]) -> list[str]:
    """Returns a different label for each group of an environment."""
    labels: list[str] = []
    for group in groups:
        same_algorithm = [x.settings for x in groups if x.algorithm == group.algorithm]
        names = sorted(find_differences(same_algorithm), key=_get_label_rank)
        texts = [f"{name}={_shorten_number(group.get_setting(name))}" for name in names]
        if len(texts) > _MAX_LABEL_SETTINGS:
            texts = [*texts[:_MAX_LABEL_SETTINGS], f"{len(texts) - _MAX_LABEL_SETTINGS} more"]
        label = ", ".join([get_algorithm_text(group.algorithm), *texts])
        same = sum(other.partition(" #")[0] == label for other in labels)
        labels.append(f"{label} #{same + 1}" if same else label)
    return labels


def _add_names(labels: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns labels in which names replace the rest, where only one group has the name.

    >>> _add_names(["PPO, lr=0.1", "PPO, lr=0.2", "PPO, lr=0.3"], ["best", "", "best"])
    ['best: PPO, lr=0.1', 'PPO, lr=0.2', 'best: PPO, lr=0.3']
    >>> _add_names(["PPO, lr=0.1", "PPO, lr=0.2"], ["best", "default"])
    ['best', 'default']
    """
    named = [
        (name if names.count(name) == 1 else f"{name}: {label}") if name else label
        for label, name in zip(labels, names, strict=True)
    ]
    return [f"{x} #{named[:i].count(x) + 1}" if x in named[:i] else x for i, x in enumerate(named)]


def _shorten_number(text: str) -> str:
    """Returns the text of a number with at most four digits; any other text unchanged.

    >>> _shorten_number("7.333887161380886e-05"), _shorten_number("0.9999"), _shorten_number("8192")
    ('7.334e-05', '0.9999', '8192')
    >>> _shorten_number("default")
    'default'
    """
    if text.isdigit():
        return text
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def _get_label_rank(name: str) -> int:
    """Returns the place of a setting in labels: best-known settings first."""
    if name in _LABEL_ORDER:
        return _LABEL_ORDER.index(name)
    return len(_LABEL_ORDER) + name.startswith("evaluation")


def find_differences(settings: Iterable[Mapping[str, str]]) -> list[str]:
    """Returns the names of the settings that differ, sorted.

    >>> find_differences([{"lr": "0.1", "gamma": "0.9"}, {"lr": "0.2", "gamma": "0.9"}, {}])
    ['gamma', 'lr']
    """
    settings = list(settings)
    names = sorted({name for each in settings for name in each})
    return [name for name in names if len({each.get(name) for each in settings}) > 1]


def get_settings(record: RunRecord) -> dict[str, str]:
    """Returns the settings of a run that differ from defaults, as texts by dotted name.

    Runs of earlier versions, which do not record them, have the options of their command.
    """
    config = record.config
    if not config and not record.places:
        options = {name: record.command.get(name) for name in _OPTIONS_WITH_SETTINGS}
        config = {name: value for name, value in options.items() if value}
    return {show_text(name, _MAX_TEXT): text for name, text in _flatten(config)}


def _flatten(settings: Mapping[str, Json], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict) and value and not _is_encoded(value):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", format_setting(value)


def _is_encoded(value: Mapping[str, Json]) -> bool:
    """Whether an object stands for a value that JSON does not have, such as infinity."""
    return any(name.startswith("$") for name in value)


def format_setting(value: Json) -> str:
    """Formats a JSON value of a setting in one line.

    >>> format_setting([64, 64]), format_setting({"$float": "inf"}), format_setting("tanh")
    ('[64, 64]', 'inf', 'tanh')
    """
    if isinstance(value, dict) and len(value) == 1 and _is_encoded(value):
        (value,) = value.values()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return show_text(text, _MAX_TEXT)


def show_text(text: str, limit: int) -> str:
    """Returns a text of a file for display: one line without control characters, not too long.

    >>> show_text("one  two" + chr(27), 100) == "one two" + chr(0xFFFD)
    True
    """
    line = " ".join(text[: 10 * limit].split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    return line if len(line) <= limit else f"{line[: limit - 1]}\u2026"


def get_algorithm_text(algorithm: str) -> str:
    """Returns the name of an algorithm for display.

    >>> get_algorithm_text("mine.learning:Best"), get_algorithm_text("")
    ('Best', 'unknown algorithm')
    """
    return show_text(algorithm.rpartition(":")[2], _MAX_TEXT) or "unknown algorithm"


def get_run_text(record: RunRecord) -> str:
    """Returns the name of a run for display; of one of several seeds, with that of their folder."""
    path = record.folder.path
    name = f"{path.parent.name}/{path.name}" if path.name.startswith(SEED_PREFIX) else path.name
    return show_text(name, _MAX_TEXT + 20)


def get_env_text(record: RunRecord) -> str:
    if record.env:
        return show_text(record.env, _MAX_TEXT)
    is_described = bool(record.places or record.command)
    return NO_ENV if is_described else UNKNOWN_ENV
