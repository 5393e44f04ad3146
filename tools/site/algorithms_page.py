"""The table of algorithms by the spaces, models and runtimes that they take."""

from __future__ import annotations

from tfpolicies.algorithms.capabilities import ACTIONS, Capabilities, read_capabilities

_COLUMNS = ("masks", "memory", "agents")


def make_algorithms_page() -> dict[str, str]:
    """Returns the page by its path in the site's source."""
    algorithms = read_capabilities()
    columns = [*ACTIONS, *_COLUMNS, "runtimes"]
    header = f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
    rows = "".join(_make_row(name, algorithm) for name, algorithm in algorithms.items())
    methods = "".join(f"| {name} | {x.summary} |\n" for name, x in algorithms.items())
    return {"tables/algorithms.md": _PAGE.format(table=header + rows, methods=methods)}


def _make_row(name: str, algorithm: Capabilities) -> str:
    flags = [kind in algorithm.actions for kind in ACTIONS]
    flags += [algorithm.masks, algorithm.memory, algorithm.several_agents]
    cells = ["yes" if flag else "no" for flag in flags]
    link = f"[{name}](../reference/api/{name}.md)"
    return f"| {' | '.join([link, *cells, ', '.join(algorithm.runtimes)])} |\n"


_PAGE = """# Algorithms

Each answer was found by building a policy. All algorithms take observations that are vectors,
images, discrete, or nested in a Dict or Tuple.

{table}
| column | meaning |
|---|---|
| discrete | one choice: `Discrete` |
| multi-discrete | several choices: `MultiDiscrete`, `MultiBinary` |
| continuous | a vector of numbers: `Box` |
| nested | a `Dict` or `Tuple` of actions |
| masks | observations `{{"observations": ..., "action_mask": ...}}` forbid actions |
| memory | recurrent and attention models, such as `model={{"use_lstm": True}}` |
| agents | environments with several agents |
| runtimes | [runtimes](../concepts/runtimes.md) on which its policies act |

## Methods

| algorithm | source |
|---|---|
{methods}
Text, Graph and Sequence spaces are not supported. `--algo my_module:Algorithm` trains
[your own algorithm](../howto/extending/algorithm.md).

## On the command line

```sh
tfpolicies list                                    # an overview
tfpolicies list algorithms
tfpolicies list environments --filter cheetah      # names that contain "cheetah"
tfpolicies list tuned --algo SAC                   # tuned settings, with their sources
```

`--json` prints JSON for programs. Each name of `list environments` works in `tfpolicies train NAME`
and in `environment(NAME)`. The list has the environments of Gymnasium, MinAtar, Atari (ALE),
EnvPool, PettingZoo and MPE2, and those that other installed packages register with Gymnasium. Your
own environment needs no registration: `tfpolicies train my_module:MyEnv`.
"""
