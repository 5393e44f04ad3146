"""The arguments of the command `tune`."""

from __future__ import annotations

import argparse

from tfpolicies.cli.arg_types import positive_int
from tfpolicies.cli.train_options import OPTIONS, get_flag


def add_tune_arguments(parser: argparse.ArgumentParser, *, config_help: str, runs: str) -> None:
    """Adds the arguments of `tune`.

    Args:
        parser: of the command.
        config_help: describes `--config`.
        runs: the folder of all runs.
    """
    parser.epilog = _TUNE_EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("env", nargs="?", metavar="ENV", help="registered name, or module:Class")
    search = parser.add_argument_group("search")
    for name, metavar, help in _TUNE_NUMBERS:
        search.add_argument(f"--{name}", type=positive_int, metavar=metavar, help=help)
    search.add_argument("--until", type=float, metavar="RETURN", help=_TUNE_UNTIL_HELP)
    search.add_argument("--space", metavar="FILE", help=_SPACE_HELP)
    show_space = "print the algorithm's search space as JSON for --space, and exit"
    search.add_argument("--show-space", action="store_true", help=show_space)
    to = f"folder of the search (default: a new one in {runs})"
    search.add_argument("--to", metavar="FOLDER", help=to)
    resume = f"resume a search (default: the newest one in {runs})"
    search.add_argument("--resume", nargs="?", metavar="FOLDER", help=resume)
    trials = parser.add_argument_group("settings of all trials")
    for name in TUNE_OPTIONS:
        option = OPTIONS[name]
        trials.add_argument(get_flag(name), help=option.help, **option.make_argparse_kwargs())
    trials.add_argument("--config", metavar="FILE", help=config_help)


TUNE_OPTIONS = (
    *("algo", "seed", "num_envs", "lr", "set", "no_tuned", "eval_episodes", "data", "columns"),
    *("trusted_data", "callbacks", "model", "policy_mapping"),
)
"""Options of `train` that `tune` has as well."""

_TUNE_NUMBERS = (
    ("trials", "N", "settings to try, with the ones to start with (default 30)"),
    ("seeds", "N", "runs of each trial, whose mean return counts (default 1)"),
    ("steps", "N", "environment steps of each run (default 100,000), or rows of --data"),
    ("jobs", "N", "trials that train at the same time, each in its process (default 1)"),
)
_TUNE_UNTIL_HELP = "stop when the mean return of a trial reaches this"
_SPACE_HELP = (
    'a JSON file of ranges, such as {"lr": {"log_uniform": [1e-5, 1e-2]}, "model.fcnet_hiddens": '
    '{"choice": [[64, 64], [256, 256]]}}; also uniform, int_uniform and share_of_steps; plain '
    "values are constants (default: the space of the algorithm, without settings that you give)"
)
_TUNE_EPILOG = """\
A trial is pruned if its greedy episodes are worse than the median of earlier trials at the same
time. best.json in the folder of the search has the best settings: tfpolicies train ENV --config
best.json. Needs Optuna: pip install 'tfpolicies[tune]'.
"""
