"""The words of the command line.

Another package adds a command by an entry point::

    [options.entry_points]
    tfpolicies.commands =
        NAME = my_package.my_module

The module has `SUMMARY`, a line of text; `add_arguments(parser)`; and `run(args)`, which returns
the exit status. It is imported when the command is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tfpolicies._version import __version__
from tfpolicies.algorithms.registry import algorithm_names
from tfpolicies.cli.ends import STATUSES
from tfpolicies.cli.settings import RUN, WHAT, WORDS, algorithm_word, flag
from tfpolicies.cli.values import (
    above_zero,
    column_names,
    count,
    json_object,
    not_among,
    opset,
    port,
    positive,
)
from tfpolicies.errors import ConfigError, UsageError, near_matches
from tfpolicies.registers import import_installed, installed, told
from tfpolicies.system.distributions import import_needed
from tfpolicies.ways import OPSETS

COMMANDS = "tfpolicies.commands"
"""The group of entry points."""

_CLI = "tfpolicies.cli"
RUNS = "runs"  # the folder of all runs, unless another one is named

_DEBUG: Any = {"action": "store_true", "help": "show the traceback of an error"}

_EXAMPLES = """\
examples:
  tfpolicies train CartPole-v1 --until 475 --export --play 100
  tfpolicies train my_package.my_module:MyEnv --steps 200000 --set gamma=0.95
  tfpolicies train HalfCheetah-v5 --algo SAC      by tuned settings
  tfpolicies tuned --algo SAC                     what there are of them, and their sources
  tfpolicies train --resume                       go on with the newest run
  tfpolicies evaluate runs --episodes 100         the newest run's policy
  tfpolicies record runs --gif                    videos of it, in its run folder
  tfpolicies export runs --to exported
  tfpolicies play-exported exported --env CartPole-v1 --episodes 100
  tfpolicies serve exported                       over HTTP and gRPC, by the Open Inference Protocol
  tfpolicies predict exported data.parquet        actions for the rows of a table
  tfpolicies port script.py --diff                what changes of a script for RLlib
"""


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process, and names near matches."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices or ()
        if choices and value not in choices:
            name = action.metavar or "/".join(action.option_strings) or action.dest
            raise UsageError(f"{name}: {not_among(value, list(choices))}")

    def options(self) -> list[str]:
        """Returns the names of all options."""
        return list(self._option_string_actions)


class _Command(NamedTuple):
    summary: str
    add_arguments: Callable[[_Parser], None]
    module: str  # imported to run it, unless the arguments set `run`: has a function of its name


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Raises:
        UsageError: for what is not understood; near matches are named.
    """
    parser, commands = _parsers(next((word for word in argv or () if word[:1] != "-"), ""))
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        return argparse.Namespace(command=None, debug=args.debug, help=parser.format_help())
    if unknown:
        used = commands[args.command]
        word = unknown[0].partition("=")[0]
        hint = near_matches(word, used.options()) if word.startswith("-") else ""
        raise UsageError(
            f"{used.prog} does not take {unknown[0]!r}.{hint} See `{used.prog} --help`."
        )
    return args


def _parsers(used: str = "") -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="tfpolicies",
        description="Train, evaluate, export and play reinforcement-learning policies.",
        epilog=f"{_EXAMPLES}\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tfpolicies {__version__}")
    parser.add_argument("--debug", **_DEBUG)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    made = {}
    for name, (summary, add_arguments, module) in _commands(used).items():
        made[name] = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            argument_default=argparse.SUPPRESS if name == "train" else None,
            allow_abbrev=False,
        )
        made[name].add_argument("--debug", default=argparse.SUPPRESS, **_DEBUG)
        made[name].set_defaults(run=partial(_run_own, module))
        add_arguments(made[name])
    return parser, made


def _commands(used: str) -> dict[str, _Command]:
    """Returns all commands; of other packages, only the one that is used is imported."""
    own: dict[str, _Command] = {
        "train": _Command("train a policy on an environment", _train, f"{_CLI}.training"),
        "evaluate": _Command("play episodes with a trained policy", _evaluate, f"{_CLI}.commands"),
        "record": _Command(
            "make a video of a trained policy that plays", _record, f"{_CLI}.recording"
        ),
        "watch": _Command("watch a trained policy play in a window", _watch, f"{_CLI}.recording"),
        "export": _Command(
            "write a policy as SavedModel, ONNX or LiteRT", _export, f"{_CLI}.commands"
        ),
        "play-exported": _Command(
            "play episodes with an exported ONNX file alone", _play_exported, f"{_CLI}.commands"
        ),
        "serve": _Command("serve exported policies over HTTP and gRPC", _serve, f"{_CLI}.serve"),
        "predict": _Command(
            "add an exported policy's actions to the rows of a Parquet file",
            _predict,
            f"{_CLI}.predict",
        ),
        "tuned": _Command(
            "list the settings that are known to learn well", _tuned, f"{_CLI}.commands"
        ),
    }
    if used in own:
        return own
    others = {name: _installed(found, used) for name, found in installed(COMMANDS).items()}
    return own | others | own


def _installed(entry_point: EntryPoint, used: str) -> _Command:
    if entry_point.name != used and not entry_point.value.startswith("tfpolicies."):
        package = entry_point.dist.name if entry_point.dist else "a package"
        return _Command(f"a command of {package}", lambda parser: None, "")
    module = import_installed("command", entry_point)
    lacking = [name for name in ("SUMMARY", "add_arguments", "run") if not hasattr(module, name)]
    if lacking:
        raise ConfigError(f"{told('command', entry_point)} lacks {', '.join(lacking)}.")

    def add_arguments(parser: _Parser) -> None:
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)

    return _Command(module.SUMMARY, add_arguments, "")


def _run_own(module: str, args: argparse.Namespace) -> int:
    """Runs a command of this package; returns its exit status.

    Raises:
        MissingPackageError: if it needs a package that is not installed.
    """
    run = import_needed(f"`tfpolicies {args.command}`", module)
    return int(getattr(run, args.command.replace("-", "_"))(args))


def _train(parser: _Parser) -> None:
    groups = {word.group: parser.add_argument_group(word.group) for word in WORDS.values()}
    groups[WHAT].add_argument(
        "env", nargs="?", metavar="ENV", help="registered name, or module:Class"
    )
    for name, word in WORDS.items():
        groups[word.group].add_argument(flag(name), help=word.help, **word.argument())
    groups[WHAT].add_argument(
        "--config",
        metavar="FILE",
        help='a JSON file of settings, such as {"gamma": 0.98, "model": {"use_lstm": true}}; '
        "--set and the options above override it",
    )
    groups[RUN].add_argument(
        "--run-dir", metavar="DIR", help=f"folder of all runs (default {RUNS})"
    )
    groups[RUN].add_argument(
        "--resume",
        nargs="?",
        const=None,
        metavar="RUN",
        help="go on with a run, or with the newest one of a folder of runs (default: that of "
        "--run-dir); goals may be changed",
    )
    groups[RUN].add_argument(
        "--model-work-limit",
        type=float,
        default=argparse.SUPPRESS,
        metavar="TIMES",
        help="with --resume: how many times the usual work a stored Keras model may take (default "
        "1)",
    )


def _evaluate(parser: _Parser) -> None:
    _add_playing(parser, episodes=100)


def _record(parser: _Parser) -> None:
    _add_looking(parser)
    parser.add_argument(
        "--to",
        metavar="FILE_OR_DIR",
        help="a file that ends in .mp4 or .gif, or a folder (default: the run's folder videos)",
    )
    parser.add_argument("--gif", action="store_true", help="write a GIF beside the MP4")
    parser.add_argument(
        "--fps", type=above_zero, help="steps a second (default: what the environment says, or 30)"
    )


def _watch(parser: _Parser) -> None:
    _add_looking(parser)


def _add_looking(parser: _Parser) -> None:
    _add_playing(parser, episodes=3)
    parser.add_argument(
        "--max-steps",
        type=positive,
        default=10_000,
        help="cut an episode after this many steps (default 10,000)",
    )


def _export(parser: _Parser) -> None:
    _add_source(parser)
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write into")
    parser.add_argument("--policy", metavar="ID", help="of a run with several policies: this one")
    parser.add_argument(
        "--onnx",
        nargs="?",
        type=opset,
        const=True,
        metavar="OPSET",
        help=f"write ONNX only, of this opset if one is given, from {OPSETS[0]} to {OPSETS[-1]}",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--saved-model", action="store_true", help="write a SavedModel only")
    form.add_argument(
        "--layout",
        choices=("tf-serving", "triton", "mlserver", "kserve", "kubernetes"),
        help="write what this engine reads, right into DIR; kubernetes: for `tfpolicies serve`",
    )
    form.add_argument(
        "--litert",
        nargs="?",
        choices=("float16", "int8"),
        const=True,
        help="write LiteRT only, with weights rounded to this if it is given",
    )
    form.add_argument(
        "--web", action="store_true", help="write ONNX with a page that runs it in a browser"
    )
    parser.add_argument(
        "--ort-web",
        metavar="FOLDER",
        help="dist folder of the npm package onnxruntime-web, to copy in; default: a CDN",
    )


def _play_exported(parser: _Parser) -> None:
    parser.add_argument("exported", metavar="DIR_OR_FILE", help="an ONNX file, or its folder")
    parser.add_argument("--env", required=True, metavar="NAME", help="where to play")
    parser.add_argument("--env-config", type=json_object, metavar="JSON", help="its settings")
    parser.add_argument("--episodes", type=positive, default=100, help="default 100")
    parser.add_argument("--seed", type=count, default=0, help="of the episodes (default 0)")
    _add_device(parser)


def _add_runtime(parser: _Parser) -> None:
    """Adds how ONNX Runtime computes for many requests or rows."""
    parser.add_argument(
        "--threads", type=positive, default=1, help="of one call of ONNX Runtime (default 1)"
    )
    _add_device(parser)


def _add_device(parser: _Parser) -> None:
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "auto"),
        default="cpu",
        help="where ONNX Runtime computes; auto: on a GPU if it can (default cpu)",
    )


def _serve(parser: _Parser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="EXPORT_OR_RUN",
        help="a folder with an ONNX export or numbered versions of one, or a run or checkpoint, "
        "which is exported first; NAME=FOLDER gives the model a name",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=port, default=8000, help="of HTTP (default 8000); 0: any that is free"
    )
    parser.add_argument(
        "--grpc-port", type=port, default=8001, help="of gRPC (default 8001); 0: any that is free"
    )
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="[NAME=]VERSION",
        help="serve this version even if there are newer ones (default: the highest number)",
    )
    parser.add_argument(
        "--max-batch", type=positive, default=256, metavar="ROWS", help="run together (default 256)"
    )
    parser.add_argument(
        "--max-sequences",
        type=positive,
        default=10_000,
        metavar="N",
        help="rows that a policy with a memory remembers (default 10000)",
    )
    parser.add_argument(
        "--sequence-idle",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="without a step, after which one is forgotten (default 600)",
    )
    parser.add_argument(
        "--max-body",
        type=positive,
        default=8_000_000,
        metavar="BYTES",
        help="of a request (default 8e6); all that arrive may together take 8 times as many",
    )
    parser.add_argument(
        "--max-seconds",
        type=positive,
        default=20,
        metavar="SECONDS",
        help="that a model may take for a batch, or for its trial when it is loaded (default 20)",
    )
    _add_runtime(parser)
    parser.add_argument(
        "--drain-seconds",
        type=count,
        default=5,
        metavar="SECONDS",
        help="for which it answers after SIGTERM, but says that it is not ready (default 5)",
    )
    parser.add_argument(
        "--control", action="store_true", help="let requests load and unload models"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="with a token that requests must bring (Authorization: Bearer TOKEN)",
    )
    parser.add_argument(
        "--access-log", action="store_true", help="print a line for each request (default: none)"
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="of the lines on standard output (default text)",
    )
    parser.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="with the server's certificate in PEM, for HTTPS and for gRPC with TLS",
    )
    parser.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="with the private key of --tls-cert, in PEM"
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further Host that requests may name; on loopback these are localhost, 127.0.0.1 "
        "and [::1], elsewhere all unless this is given",
    )
    parser.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="whose web pages may use the server, such as https://example.com; others may not",
    )


_PREDICT = """\
Rows are independent observations. The inputs of the export are read from columns of their names:
obs, or obs_<path> for each part of a Dict or Tuple, and action_mask. Such a column has a number in
each row, or a list of the numbers of an array in row-major order. --columns names other columns.
The actions are written to the column action, or to action_<path> for each part of a Dict or Tuple.
Needs pyarrow: pip install 'tfpolicies[data]'. The file is trusted.
"""


def _predict(parser: _Parser) -> None:
    parser.epilog, parser.formatter_class = _PREDICT, argparse.RawDescriptionHelpFormatter
    parser.add_argument("exported", metavar="EXPORT", help="an ONNX file, or its folder")
    parser.add_argument("data", metavar="FILE", help="a Parquet file with observations")
    parser.add_argument(
        "--to", metavar="FILE", help="the Parquet file to write (default: FILE.actions.parquet)"
    )
    parser.add_argument(
        "--columns",
        type=column_names,
        metavar="A,B,...",
        help="what to read: a column for each input, or one for each number of a single input",
    )
    parser.add_argument(
        "--keep",
        type=column_names,
        metavar="A,B,...",
        help="the columns of FILE to write beside the actions (default: all; '': none)",
    )
    parser.add_argument("--explore", action="store_true", help="sample actions; default: greedy")
    parser.add_argument("--seed", type=count, default=0, help="of --explore (default 0)")
    parser.add_argument(
        "--batch", type=positive, metavar="ROWS", help="run together (default: 16 MB of them)"
    )
    _add_runtime(parser)


def _tuned(parser: _Parser) -> None:
    parser.add_argument(
        "--algo",
        type=algorithm_word,
        choices=algorithm_names(),
        help="of this algorithm alone",
    )
    parser.add_argument("--env", default="", metavar="PART", help="where ENV has this in its name")


def _add_playing(parser: _Parser, episodes: int) -> None:
    _add_source(parser)
    told = f"default {episodes}"
    parser.add_argument("--episodes", type=positive, default=episodes, help=told)
    parser.add_argument("--explore", action="store_true", help="sample actions; default: greedy")
    parser.add_argument("--env", metavar="NAME", help="another environment than in training")
    parser.add_argument(
        "--policy-mapping",
        metavar="MODULE:FUNCTION",
        help="of a run with several policies: which one acts for an agent, as in training",
    )
    parser.add_argument(
        "--allow-other-spaces",
        action="store_true",
        help="go on if its dtypes or action bounds differ; the policy acts in its own bounds",
    )
    parser.add_argument("--seed", type=count, default=0, help="of the episodes (default 0)")


def _add_source(parser: _Parser) -> None:
    parser.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        help="a run folder, a folder of runs (its newest is taken), or a checkpoint",
    )
    parser.add_argument("--best", action="store_true", help="of a run: the best checkpoint")
    parser.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="the model it was trained with, if Keras cannot rebuild it from the checkpoint",
    )
    parser.add_argument(
        "--algo", metavar="MODULE:CLASS", help="the algorithm it was trained by, if it is yours"
    )
    parser.add_argument(
        "--model-work-limit",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="of a stored Keras model: how many times the usual work it may take (default 1)",
    )
