"""The command `list`: algorithms, environments and tuned settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from tfpolicies.algorithms.algorithm_registry import (
    find_algorithm,
    get_algorithm_names,
    get_registered_names,
)
from tfpolicies.algorithms.capabilities import (
    ACTIONS,
    Capabilities,
    find_capabilities,
    read_capabilities,
)
from tfpolicies.algorithms.tuned_hyperparameters import get_tuned_entries
from tfpolicies.algorithms.tuned_hyperparameters_table import TunedSettings
from tfpolicies.cli.exit_codes import DONE
from tfpolicies.cli.run_lookup import load_tensorflow_with_status
from tfpolicies.envs.env_listing import EnvGroup, list_environments
from tfpolicies.errors import ConfigError, UsageError
from tfpolicies.reporting.progress_display import (
    CommandConsole,
    format_count,
    make_summary_table,
)
from tfpolicies.storage.json_values import encode_value

_MAX_NAMES = 24  # of a group of environments, unless a filter is given

_Entries = Mapping[tuple[str, str], TunedSettings]


def show_list(args: argparse.Namespace) -> int:
    """Lists what `args.subject` names; without it, an overview."""
    if args.algo is not None and args.subject not in ("algorithms", "tuned"):
        raise UsageError("--algo is for `list algorithms` and `list tuned`. Leave it out.")
    console = CommandConsole()
    content: dict[str, Any] = {}
    if args.subject in (None, "algorithms"):
        algorithms = _find_algorithms(args, console)
        content["algorithms"] = {name: x.to_json() for name, x in algorithms.items()}
        if not args.json:
            _print_algorithms(algorithms, console)
    if args.subject in (None, "environments"):
        groups = _find_environments(args.filter, console)
        content["environments"] = [group._asdict() for group in groups]
        if not args.json:
            _print_environments(groups, console, args, is_overview=args.subject is None)
    if args.subject in (None, "tuned"):
        entries = _find_tuned(args)
        content["tuned"] = [_to_json(pair, entry) for pair, entry in entries.items()]
        if not args.json:
            _print_tuned(entries, console, is_overview=args.subject is None)
    if args.json:
        shown = content if args.subject is None else content[args.subject]
        print(json.dumps(shown, indent=2, allow_nan=False))
    return DONE


def _find_algorithms(args: argparse.Namespace, console: CommandConsole) -> dict[str, Capabilities]:
    """Returns the capabilities of algorithms; those of other packages are found by building."""
    names = [args.algo] if args.algo is not None else get_algorithm_names()
    names = [name for name in names if args.filter.lower() in name.lower()]
    if not names:
        raise ConfigError(
            f"No algorithm has {args.filter!r} in its name; there are "
            f"{', '.join(get_algorithm_names())}. Leave --filter out."
        )
    stored = read_capabilities()
    if not stored.keys() >= set(names):
        load_tensorflow_with_status(console)
    return {
        name: stored[name] if name in stored else find_capabilities(find_algorithm(name))
        for name in names
    }


def _print_algorithms(algorithms: Mapping[str, Capabilities], console: CommandConsole) -> None:
    columns = (*ACTIONS, "masks", "memory", "agents")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title in ("", *columns):
        table.add_column(title, no_wrap=True)
    for name, capabilities in algorithms.items():
        flags = {kind: kind in capabilities.actions for kind in ACTIONS}
        flags |= {"masks": capabilities.masks, "memory": capabilities.memory}
        cells = {column: "yes" if flag else "-" for column, flag in flags.items()}
        cells["agents"] = "several" if capabilities.several_agents else "one"
        table.add_row(name, *(cells[column] for column in columns))
    console.print(Group(Text("Algorithms, and the actions they take", style="bold"), table))
    sources = {name: x.summary.removesuffix(".") for name, x in algorithms.items()}
    console.print(make_summary_table("\nMethods", sources))
    for attribute, words in (("observations", "Observations"), ("runtimes", "Runtimes")):
        values = {getattr(x, attribute) for x in algorithms.values()}
        if len(values) == 1:
            console.print(f"{words} of all: {', '.join(*values)}.", highlight=False)


def _find_environments(part: str, console: CommandConsole) -> list[EnvGroup]:
    with console.status("importing environments"):
        groups = list_environments(part)
    if not groups:
        raise ConfigError(
            f"No environment has {part!r} in its name. `tfpolicies list environments` lists all "
            "groups; your own environment is named by `module:Class`."
        )
    return groups


def _print_environments(
    groups: list[EnvGroup], console: CommandConsole, args: argparse.Namespace, *, is_overview: bool
) -> None:
    if is_overview:
        counts = {x.title: f"{len(x.names):,}" for x in groups if x.names}
        counts |= {x.title: x.install for x in groups if not x.names}
        console.print(make_summary_table("\nEnvironments: tfpolicies list environments", counts))
        return
    for group in groups:
        if not group.names:
            continue
        names = group.names if args.filter else group.names[:_MAX_NAMES]
        more = len(group.names) - len(names)
        console.print(Text(f"{group.title} ({len(group.names):,})", style="bold"))
        hint = f" and {more:,} more: --filter PART" if more else ""
        console.print(Text(f"{'  '.join(names)}{hint}"), highlight=False)
    missing = {group.title: group.install for group in groups if not group.names}
    if missing:
        console.print(make_summary_table("Not installed", missing))


def _find_tuned(args: argparse.Namespace) -> _Entries:
    if args.algo not in (None, *get_registered_names()):
        find_algorithm(args.algo)  # importing another package registers its tuned settings
    entries = get_tuned_entries(args.algo or "", args.filter)
    if not entries and args.subject is not None:
        raise ConfigError(
            f"No tuned settings are for an environment with {args.filter!r} in its name. Leave "
            "--filter out to see all."
        )
    return entries


def _print_tuned(entries: _Entries, console: CommandConsole, *, is_overview: bool) -> None:
    if is_overview:
        counts: dict[str, int] = {}
        for algo, _ in entries:
            counts[algo] = counts.get(algo, 0) + 1
        words = {algo: format_count(count, "environment") for algo, count in counts.items()}
        console.print(make_summary_table("\nTuned settings: tfpolicies list tuned", words))
        return
    widths = [max(map(len, names)) for names in zip(*entries, strict=True)]
    for (algo, env), entry in entries.items():
        goal = "no score" if entry.threshold is None else f"score {entry.threshold:,.1f}"
        console.print(
            f"{algo:{widths[0]}}  {env:{widths[1]}}  {goal:>14}  {entry.steps:>10,} steps  "
            f"{entry.source}",
            highlight=False,
            soft_wrap=True,
        )
    if len(entries) == 1:
        (entry,) = entries.values()
        console.print(make_summary_table("Settings", entry.settings))
        for deviation in entry.deviations:
            console.print(f"Unlike the source: {deviation}.", highlight=False, soft_wrap=True)


def _to_json(pair: tuple[str, str], entry: TunedSettings) -> dict[str, Any]:
    settings = encode_value(dict(entry.settings))
    return {"algorithm": pair[0], "environment": pair[1], **entry._asdict(), "settings": settings}
