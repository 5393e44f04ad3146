"""Reads recorded experience once: checks each row, and collects statistics of bounded size."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.batch.sample_batch import DEFAULT_POLICY_ID
from tfpolicies.cli.data_statistics import (
    ActionCoverage,
    ComponentStats,
    EpisodeStats,
    ValueStats,
)
from tfpolicies.cli.exit_codes import describe_error
from tfpolicies.errors import BatchError, MissingColumnError, SpaceError, TfPoliciesError
from tfpolicies.models.spaces import action_leaves, leaves
from tfpolicies.offline.column_checks import require_order
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.data_source import Chunk, DataSource, ReadRequest, join_chunks
from tfpolicies.offline.data_spaces import infer_spaces, iter_chunks
from tfpolicies.offline.step_columns import (
    ACTIONS,
    AGENT_INDEX,
    EPISODE_COLUMNS,
    EPS_ID,
    NEW_OBS,
    OBS,
    REWARDS,
    SEPARATOR,
    TERMINATEDS,
    TRUNCATEDS,
    T,
    name_part,
)
from tfpolicies.offline.trajectories import group_by_episode

_FLAT = (REWARDS, TERMINATEDS, TRUNCATEDS, EPS_ID, AGENT_INDEX, T)
_CHECKED = (OBS, NEW_OBS, ACTIONS, *_FLAT)
_MAX_PROBLEMS = 50
_REWARDS = "\0rewards"  # checked rewards among the columns of a table


class EpisodeCursor:
    """Finds where episodes start, also at the first row of a chunk, and checks their order.

    Args:
        column_map: of the table.
        is_contiguous: whether the rows of an episode follow each other.
    """

    def __init__(self, column_map: ColumnMap, *, is_contiguous: bool) -> None:
        self._column_map = column_map
        self._is_contiguous = is_contiguous
        self._last: dict[tuple[str, str | None], Chunk] = {}  # last row, by table and policy
        self.names = column_map.find_sources(EPISODE_COLUMNS, ())

    @property
    def has_episodes(self) -> bool:
        """Whether the table says where episodes end."""
        return any(self._column_map.has(name) for name in (EPS_ID, TERMINATEDS, TRUNCATEDS))

    def select(self, chunk: Chunk, rewards: np.ndarray | None = None) -> Chunk:
        """Returns the columns of episodes, episode after episode, and `rewards` if given."""
        names = chunk.columns if self.names is None else self.names
        columns = {name: chunk.columns[name] for name in names if name in chunk.columns}
        if rewards is not None:
            columns[_REWARDS] = rewards
        chunk = dataclasses.replace(chunk, columns=columns)
        return chunk if self._is_contiguous else group_by_episode(chunk, self._column_map)

    def find_starts(self, chunk: Chunk) -> np.ndarray:
        """Returns where episodes start, bool `[rows]`, and checks that time steps increase.

        Args:
            chunk: from `select`, in the order of the table.

        Raises:
            BatchError: if time steps do not increase within an episode.
        """
        columns = {name: x for name, x in chunk.columns.items() if name != _REWARDS}
        chunk = dataclasses.replace(chunk, columns=columns)
        key = chunk.table, chunk.policy_id
        last = self._last.pop(key, None) if self._is_contiguous else None
        joined = chunk if last is None else join_chunks([last, chunk])
        self._last = {key: chunk.take(slice(chunk.rows - 1, None))}
        starts = self._column_map.find_starts(joined)
        if self._column_map.has(T):
            require_order(joined, self._column_map.read_column(joined, T), starts)
        return starts if last is None else starts[1:]


class RowCheck:
    """Checks all rows as training would, before it begins.

    Args:
        source: the data.
        columns: where columns of batches come from.
        policies: the policies that learn, by id.
        postprocesses: whether trajectories are postprocessed.

    Attributes:
        note: a sentence about a fault that does not disturb training; "" without one.

    Raises:
        ConfigError: if `columns` is wrong.
        MissingColumnError: if it names a column that the table lacks.
    """

    def __init__(
        self,
        source: DataSource,
        columns: Mapping[str, Any] | None,
        policies: Mapping[str, Any],
        *,
        postprocesses: bool,
    ) -> None:
        self._source = source
        self._policies = policies
        self._column_map = ColumnMap(source.column_names, columns)
        self._has_trajectories = any(
            self._reads_trajectories(policy, postprocesses=postprocesses)
            for policy in policies.values()
        )
        self._cursor = EpisodeCursor(self._column_map, is_contiguous=source.has_contiguous_episodes)
        self.note = ""

    def run(self) -> None:
        """Reads all rows.

        Raises:
            TfPoliciesError: for the first row that training would refuse.
        """
        names = {OBS, ACTIONS}
        for policy in self._policies.values():
            names |= {*policy.driver.learning.select_columns({})} & {*_CHECKED}
        if self._has_trajectories:
            names |= {REWARDS, *EPISODE_COLUMNS}
        read_names = names | {*EPISODE_COLUMNS} if self._cursor.has_episodes else names
        decoded = self._column_map.find_sources(sorted(read_names), (OBS, ACTIONS))
        for chunk in iter_chunks(self._source, decoded):
            policy = self._policies.get(chunk.policy_id or DEFAULT_POLICY_ID)
            if policy is not None:
                pair = policy.observation_space, policy.action_space
                self._column_map.read(chunk, pair, sorted(names))
            self._check_order(chunk)

    def _reads_trajectories(self, policy: Any, *, postprocesses: bool) -> bool:
        """Returns whether the order of rows counts."""
        learning = policy.driver.learning
        rebuilds = NEW_OBS in learning.select_columns({}) and not self._column_map.has(NEW_OBS)
        return (
            (postprocesses and learning.postprocesses)
            or rebuilds
            or policy.is_recurrent()
            or bool(policy.driver.acting.views)
        )

    def _check_order(self, chunk: Chunk) -> None:
        if not self._cursor.has_episodes or self.note:
            return
        try:
            self._cursor.find_starts(self._cursor.select(chunk))
        except BatchError as error:
            if self._has_trajectories:
                raise
            self.note = f"{error} This algorithm does not need the order."


@dataclasses.dataclass
class DataReport:
    """The result of a survey.

    Attributes:
        files: the number of tables.
        rows: the number of rows that could be read.
        columns: statistics of each column of the tables.
        observation_space: stated by the files, or inferred; None if unknown.
        action_space: as `observation_space`.
        has_stated_spaces: whether the files state them.
        observations: statistics of each component of the observations, by leaf.
        actions: coverage of the actions, by leaf.
        episodes: statistics of episodes; None if the table does not say where they end.
        available: columns of batches that can be read.
        source_names: the table's column of each component, by column of batches, where each
            component has one.
        problems: faults that training would report, each once.
    """

    files: int
    rows: int = 0
    columns: dict[str, ValueStats] = dataclasses.field(default_factory=dict)
    observation_space: spaces.Space[Any] | None = None
    action_space: spaces.Space[Any] | None = None
    has_stated_spaces: bool = False
    observations: dict[str, ComponentStats] = dataclasses.field(default_factory=dict)
    actions: dict[str, ActionCoverage] = dataclasses.field(default_factory=dict)
    episodes: EpisodeStats | None = None
    available: tuple[str, ...] = ()
    source_names: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def get_component_names(self, label: str, stats: ComponentStats) -> list[str]:
        """Returns a name for each component of a leaf."""
        count = 0 if stats.low is None else len(stats.low)
        names = self.source_names.get(label, [])
        if len(names) == count:
            return names
        return [label] if count == 1 else [f"{label}[{i}]" for i in range(count)]

    def add_problem(self, error: TfPoliciesError | str) -> None:
        """Adds a problem, unless it is listed already."""
        text = error if isinstance(error, str) else f"{describe_error(error)}."
        if text not in self.problems and len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(text)


class DataSurvey:
    """Surveys recorded experience; faults are collected, not raised.

    Args:
        source: the data.
        columns: where columns of batches come from.
        stated_spaces: `observation_space` and `action_space`, if the user states them.
    """

    def __init__(
        self,
        source: DataSource,
        columns: Mapping[str, Any] | None,
        stated_spaces: Mapping[str, spaces.Space[Any]],
    ) -> None:
        self._source = source
        self._stated_spaces = dict(stated_spaces)
        self.report = DataReport(len(source.tables))
        self._missing: set[str] = set()  # columns of batches whose source the table lacks
        self._columns = self._drop_missing_columns(columns or {})
        self._column_map = ColumnMap(source.column_names, self._columns)
        self._cursor = EpisodeCursor(self._column_map, is_contiguous=source.has_contiguous_episodes)
        self._failed: set[str] = set()  # columns of batches with a problem

    def run(self) -> DataReport:
        """Reads all rows; returns the report."""
        report, column_map = self.report, self._column_map
        for name in (OBS, ACTIONS):
            if not column_map.has(name) and name not in self._missing:
                try:
                    column_map.find_sources((), (name,))
                except MissingColumnError as error:
                    report.add_problem(error)
        report.source_names = {
            name: [source] if isinstance(source, str) else [*source]
            for name, source in self._columns.items()
            if isinstance(source, str | list | tuple)
        }
        report.available = tuple(name for name in _CHECKED if column_map.has(name))
        if self._cursor.has_episodes:
            report.episodes = EpisodeStats()
        self._find_spaces()
        for chunk in iter_chunks(self._source, None, self._read_columns):
            self._add(chunk)
        if report.episodes is not None:
            report.episodes.finish()
        return report

    def _drop_missing_columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        result = {}
        for name, source in columns.items():
            try:
                ColumnMap(self._source.column_names, {name: source})
                result[name] = source
            except MissingColumnError as error:
                self._missing.add(name)
                self.report.add_problem(error)
        return result

    def _find_spaces(self) -> None:
        report, column_map = self.report, self._column_map
        stated = {"observation_space", "action_space"} <= {*self._source.metadata}
        report.has_stated_spaces = stated and not self._columns
        if column_map.has(OBS) and column_map.has(ACTIONS):
            with contextlib.suppress(TfPoliciesError):  # then each of them is inferred
                pair = infer_spaces(self._source, self._columns, **self._stated_spaces, logs=False)
                report.observation_space, report.action_space = pair
                return
        placeholder = spaces.Discrete(1)
        for name, attribute, other in (
            (OBS, "observation_space", "action_space"),
            (ACTIONS, "action_space", "observation_space"),
        ):
            if not column_map.has(name):
                continue
            try:
                assumed = self._stated_spaces | {other: placeholder}
                pair = infer_spaces(self._source, self._columns, **assumed, logs=False)
                setattr(report, attribute, pair[name == ACTIONS])
            except SpaceError as error:
                self._failed.add(name)
                report.add_problem(error)
            except TfPoliciesError:  # a damaged row is described when it is read
                continue

    # -- reading ------------------------------------------------------------------------------

    def _read_columns(self, request: ReadRequest, error: BatchError) -> Chunk | None:
        """Reads the columns of a request one by one; None if rows cannot be counted."""
        parts: list[Chunk] = []
        for name in self._source.column_names:
            try:
                parts += self._source.read(request._replace(names=(name,))).chunks
            except BatchError as column_error:
                self.report.add_problem(column_error)
        if not parts or parts[0].first_row < 0:
            self.report.add_problem(error)
            return None
        rows = min(part.rows for part in parts)
        columns = {name: column[:rows] for part in parts for name, column in part.columns.items()}
        return dataclasses.replace(parts[0], columns=columns, rows=rows)

    # -- statistics ---------------------------------------------------------------------------

    def _add(self, chunk: Chunk) -> None:
        report = self.report
        report.rows += chunk.rows
        for name, column in chunk.columns.items():
            report.columns.setdefault(name, ValueStats()).add(column)
        self._add_parts(chunk, OBS, report.observation_space)
        self._add_parts(chunk, ACTIONS, report.action_space)
        values = {name: self._read_column(chunk, name) for name in _FLAT}
        if NEW_OBS in report.available and report.observation_space is not None:
            self._read_leaves(chunk, NEW_OBS)
        self._add_episodes(chunk, values[REWARDS])

    def _has_columns(self, chunk: Chunk, name: str) -> bool:
        names = self._column_map.find_sources((name,), ())
        return self._column_map.has(name) and (
            names is None or all(x in chunk.columns for x in names)
        )

    def _read_leaves(self, chunk: Chunk, name: str) -> list[np.ndarray] | None:
        report, unknown = self.report, spaces.Discrete(1)
        pair = report.observation_space or unknown, report.action_space or unknown
        try:
            steps = self._column_map.read(chunk, pair, (name,))
        except TfPoliciesError as error:
            if name not in self._failed:
                self._failed.add(name)
                report.add_problem(error)
            return None
        return steps.actions if name == ACTIONS else steps.obs

    def _read_column(self, chunk: Chunk, name: str) -> np.ndarray | None:
        if not self._has_columns(chunk, name):
            return None
        try:
            return self._column_map.read_column(chunk, name)
        except TfPoliciesError as error:
            if name not in self._failed:
                self._failed.add(name)
                self.report.add_problem(error)
            return None

    def _add_parts(self, chunk: Chunk, name: str, space: spaces.Space[Any] | None) -> None:
        if not self._has_columns(chunk, name):
            return
        arrays = None if space is None else self._read_leaves(chunk, name)
        if arrays is not None:
            space_leaves = action_leaves(space) if name == ACTIONS else leaves(space)  # type: ignore[arg-type]
            for leaf, array in zip(space_leaves, arrays, strict=True):
                self._add_component(name, SEPARATOR.join((name, *leaf.path)), leaf.space, array)
            return
        for part, array in self._column_map.read_parts(chunk, name).items():
            if array.dtype.kind in "biuf":
                label = name_part(name, part)
                self._add_component(name, label, None, array)

    def _add_component(self, name: str, label: str, space: Any, array: np.ndarray) -> None:
        if name == OBS:
            self.report.observations.setdefault(label, ComponentStats()).add(array)
        else:
            self.report.actions.setdefault(label, ActionCoverage(space)).add(array)

    def _add_episodes(self, chunk: Chunk, rewards: np.ndarray | None) -> None:
        episodes = self.report.episodes
        if episodes is None or any(not self._has_columns(chunk, x) for x in self._get_flags()):
            return
        part = self._cursor.select(chunk, rewards)
        try:
            starts = self._cursor.find_starts(part)
        except BatchError as error:
            self.report.add_problem(error)
            starts = self._column_map.find_starts(part)
        except TfPoliciesError as error:
            self.report.add_problem(error)
            return
        terminateds, truncateds = (self._read_flags(part, x) for x in (TERMINATEDS, TRUNCATEDS))
        ids = [self._column_map.read_column(part, x) for x in self._get_ids()]
        keys = None if self._source.has_contiguous_episodes or not ids else np.stack(ids, axis=1)
        episodes.add(starts, part.columns.get(_REWARDS), terminateds, truncateds, keys)

    def _get_flags(self) -> list[str]:
        return [x for x in (EPS_ID, TERMINATEDS, TRUNCATEDS) if self._column_map.has(x)]

    def _get_ids(self) -> list[str]:
        return [x for x in (EPS_ID, AGENT_INDEX) if self._column_map.has(x)]

    def _read_flags(self, chunk: Chunk, name: str) -> np.ndarray:
        if not self._column_map.has(name):
            return np.zeros(chunk.rows, bool)
        return self._column_map.read_column(chunk, name)


def find_missing(report: DataReport) -> dict[str, Sequence[str]]:
    """Returns the columns that each algorithm needs and the data lack, by algorithm."""
    has = set(report.available)
    missing: dict[str, Sequence[str]] = {}
    imitation = [x for x in (OBS, ACTIONS) if x not in has]
    values = [*imitation, *[x for x in (REWARDS, TERMINATEDS) if x not in has]]
    missing["BC"] = imitation
    missing["MARWIL"] = values
    is_choice = isinstance(report.action_space, spaces.Discrete)
    has_next = NEW_OBS in has or {EPS_ID, TERMINATEDS, TRUNCATEDS} & has
    transitions = [*values, *([] if has_next else [f"{NEW_OBS} or {EPS_ID}"])]
    if is_choice or report.action_space is None:
        missing["DQN"] = transitions
    missing["SAC"] = transitions
    return missing
