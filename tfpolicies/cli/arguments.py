"""Parses the command line.

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
from importlib import resources
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tfpolicies._version import __version__
from tfpolicies.algorithms.registry import algorithm_names
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

RUNS = "runs"  # the folder of all runs, unless another one is named

_Number = Callable[[str], float]
_DEBUG: Any = {"action": "store_true", "help": "show the traceback of an error"}


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, and names similar options."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = action.choices or ()
        if choices and value not in choices:
            name = action.metavar or "/".join(action.option_strings) or action.dest
            raise UsageError(f"{name}: {not_among(value, list(choices))}")

    def options(self) -> list[str]:
        return list(self._option_string_actions)

    def add_word(self, name: str, metavar: str | None, help: str, **settings: Any) -> None:
        """Adds an argument or option with a text value, which `type` may convert."""
        self.add_argument(name, metavar=metavar, help=help, **settings)

    def add_number(
        self, name: str, default: float | None, help: str, kind: _Number = positive, **settings: Any
    ) -> None:
        """Adds an option with a number, parsed by a function of `cli/values.py`."""
        self.add_argument(name, type=kind, default=default, help=help, **settings)

    def add_switch(self, name: str, help: str) -> None:
        self.add_argument(name, action="store_true", help=help)

    def add_repeatable(self, name: str, metavar: str, help: str) -> None:
        self.add_argument(name, action="append", default=[], metavar=metavar, help=help)


class _Command(NamedTuple):
    summary: str
    add_arguments: Callable[[_Parser], None]
    module: str  # of `cli/`, imported to run it unless the arguments set `run`: has its function


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Raises:
        UsageError: for unknown arguments; the message names similar ones.
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
        epilog=resources.files(__package__).joinpath("epilog.txt").read_text("utf-8"),
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


_EVALUATE = "play episodes with a trained policy"
_PLAY_EXPORTED = "play episodes with an exported ONNX file, without TensorFlow"
_PREDICT = "add an exported policy's actions to the rows of a Parquet file"


def _commands(used: str) -> dict[str, _Command]:
    """Returns all commands; of other packages, only the requested one is imported."""
    own = {
        "train": _Command("train a policy on an environment", _train, "training"),
        "evaluate": _Command(_EVALUATE, partial(_add_playing, episodes=100), "commands"),
        "record": _Command("make a video of a trained policy", _record, "recording"),
        "watch": _Command("watch a trained policy play in a window", _add_looking, "recording"),
        "export": _Command("write a policy as SavedModel, ONNX or LiteRT", _export, "commands"),
        "play-exported": _Command(_PLAY_EXPORTED, _play_exported, "commands"),
        "serve": _Command("serve exported policies over HTTP and gRPC", _serve, "serve"),
        "predict": _Command(_PREDICT, _predict, "predict"),
        "tuned": _Command("list tuned settings and their sources", _tuned, "commands"),
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
    run = import_needed(f"`tfpolicies {args.command}`", f"{__package__}.{module}")
    return int(getattr(run, args.command.replace("-", "_"))(args))


def _train(parser: _Parser) -> None:
    groups = {word.group: parser.add_argument_group(word.group) for word in WORDS.values()}
    env = "registered name, or module:Class"
    groups[WHAT].add_argument("env", nargs="?", metavar="ENV", help=env)
    for name, word in WORDS.items():
        groups[word.group].add_argument(flag(name), help=word.help, **word.argument())
    groups[WHAT].add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    runs = f"folder of all runs (default {RUNS})"
    groups[RUN].add_argument("--run-dir", metavar="DIR", help=runs)
    groups[RUN].add_argument("--resume", nargs="?", metavar="RUN", help=_RESUME_HELP)
    work = "with --resume: factor on the computation limit of a stored Keras model (default 1)"
    groups[RUN].add_argument("--model-work-limit", type=float, metavar="TIMES", help=work)


_CONFIG_HELP = (
    'a JSON file of settings, such as {"gamma": 0.98, "model": {"use_lstm": true}}; --set and the '
    "options above override it"
)
_RESUME_HELP = (
    "resume a run, or the newest one of a folder of runs (default: that of --run-dir); stopping "
    "criteria may be changed"
)


def _record(parser: _Parser) -> None:
    _add_looking(parser)
    to = "a file that ends in .mp4 or .gif, or a folder (default: the run's folder videos)"
    parser.add_word("--to", "FILE_OR_DIR", to)
    parser.add_switch("--gif", "also write a GIF")
    fps = "steps per second (default: render_fps of the environment, or 30)"
    parser.add_number("--fps", None, fps, above_zero)


def _add_looking(parser: _Parser) -> None:
    _add_playing(parser, episodes=3)
    steps = "truncate an episode after this many steps (default 10,000)"
    parser.add_number("--max-steps", 10_000, steps)


def _export(parser: _Parser) -> None:
    _add_source(parser)
    parser.add_word("--to", "DIR", "folder to write into", required=True)
    parser.add_word("--policy", "ID", "which policy, if the run has several")
    onnx = f"write only ONNX; opset from {OPSETS[0]} to {OPSETS[-1]}"
    parser.add_word("--onnx", "OPSET", onnx, nargs="?", type=opset, const=True)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--saved-model", action="store_true", help="write only a SavedModel")
    layouts = ("tf-serving", "triton", "mlserver", "kserve", "kubernetes")
    layout = "write the files of this engine into DIR; kubernetes: for `tfpolicies serve`"
    form.add_argument("--layout", choices=layouts, help=layout)
    litert = "write only LiteRT, optionally with weights rounded to this type"
    form.add_argument("--litert", nargs="?", choices=("float16", "int8"), const=True, help=litert)
    web = "write ONNX with a page that runs it in a browser"
    form.add_argument("--web", action="store_true", help=web)
    ort_web = "copy the runtime from this dist folder of onnxruntime-web (default: use a CDN)"
    parser.add_word("--ort-web", "FOLDER", ort_web)


def _play_exported(parser: _Parser) -> None:
    parser.add_word("exported", "DIR_OR_FILE", "an ONNX file, or its folder")
    parser.add_word("--env", "NAME", "environment to play in", required=True)
    parser.add_word("--env-config", "JSON", "settings of the environment", type=json_object)
    parser.add_number("--episodes", 100, "number of episodes (default 100)")
    parser.add_number("--seed", 0, "seed of the episodes (default 0)", count)
    _add_device(parser)


def _add_runtime(parser: _Parser) -> None:
    parser.add_number("--threads", 1, "threads of one ONNX Runtime call (default 1)")
    _add_device(parser)


def _add_device(parser: _Parser) -> None:
    where = "device of ONNX Runtime; auto: a GPU if there is a usable one (default cpu)"
    parser.add_word("--device", None, where, choices=("cpu", "cuda", "auto"), default="cpu")


def _serve(parser: _Parser) -> None:
    parser.add_word("sources", "EXPORT_OR_RUN", _SOURCES_HELP, nargs="+")
    parser.add_word("--host", None, "address (default 127.0.0.1)", default="127.0.0.1")
    parser.add_number("--port", 8000, "HTTP port (default 8000); 0: any free one", port)
    parser.add_number("--grpc-port", 8001, "gRPC port (default 8001); 0: any free one", port)
    pin = "serve this version even if there are newer ones (default: the highest number)"
    parser.add_repeatable("--pin", "[NAME=]VERSION", pin)
    parser.add_number("--max-batch", 256, "rows per batch (default 256)", metavar="ROWS")
    sequences = "rows of sequences whose recurrent state is kept (default 10000)"
    parser.add_number("--max-sequences", 10_000, sequences, metavar="N")
    idle = "time without a step after which a sequence is dropped (default 600)"
    parser.add_number("--sequence-idle", 600, idle, metavar="SECONDS")
    body = "size of a request (default 8e6); all arriving requests together: 8 times as many"
    parser.add_number("--max-body", 8_000_000, body, metavar="BYTES")
    seconds = "time limit of a model for a batch, or for its trial run on loading (default 20)"
    parser.add_number("--max-seconds", 20, seconds, metavar="SECONDS")
    _add_runtime(parser)
    drain = "keep answering after SIGTERM, but report that the server is not ready (default 5)"
    parser.add_number("--drain-seconds", 5, drain, count, metavar="SECONDS")
    parser.add_switch("--control", "let requests load and unload models")
    token = "file with a token that each request must have (Authorization: Bearer TOKEN)"
    parser.add_word("--token-file", "FILE", token, type=Path)
    parser.add_switch("--access-log", "print a line for each request (default: off)")
    lines = "format of the lines on standard output (default text)"
    parser.add_word("--log-format", None, lines, choices=("text", "json"), default="text")
    certificate = "the server's certificate in PEM, for HTTPS and for gRPC with TLS"
    parser.add_word("--tls-cert", "FILE", certificate, type=Path)
    parser.add_word("--tls-key", "FILE", "the private key of --tls-cert in PEM", type=Path)
    parser.add_repeatable("--allowed-host", "NAME", _ALLOWED_HOST_HELP)
    origin = "allow web pages of this origin, such as https://example.com, to use the server"
    parser.add_repeatable("--allowed-origin", "ORIGIN", origin)


_SOURCES_HELP = (
    "a folder with an ONNX export or with numbered versions, or a run or checkpoint, which is "
    "exported first; NAME=FOLDER names the model"
)
_ALLOWED_HOST_HELP = (
    "allow a further Host in requests; defaults: localhost, 127.0.0.1 and [::1] on a loopback "
    "address, any on other addresses"
)
_PREDICT_EPILOG = """\
Rows are independent observations. The inputs of the export are read from columns with their names:
obs, or obs_<path> for each part of a Dict or Tuple, and action_mask. Such a column has a number in
each row, or a list of the numbers of an array in row-major order. --columns names other columns.
The actions are written to the column action, or to action_<path> for each part of a Dict or Tuple.
Needs pyarrow: pip install 'tfpolicies[data]'. Use only Parquet files that you trust.
"""


def _predict(parser: _Parser) -> None:
    parser.epilog = _PREDICT_EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_word("exported", "EXPORT", "an ONNX file, or its folder")
    parser.add_word("data", "FILE", "a Parquet file with observations")
    parser.add_word("--to", "FILE", "the Parquet file to write (default: FILE.actions.parquet)")
    columns = "input columns: one for each input, or one for each number of a single input"
    parser.add_word("--columns", "A,B,...", columns, type=column_names)
    keep = "columns of FILE to copy to the output (default: all; '': none)"
    parser.add_word("--keep", "A,B,...", keep, type=column_names)
    parser.add_switch("--explore", "sample actions; default: greedy")
    parser.add_number("--seed", 0, "seed of --explore (default 0)", count)
    parser.add_number("--batch", None, "rows per batch (default: 16 MB of rows)", metavar="ROWS")
    _add_runtime(parser)


def _tuned(parser: _Parser) -> None:
    names, only = algorithm_names(), "only of this algorithm"
    parser.add_word("--algo", None, only, type=algorithm_word, choices=names)
    parser.add_word("--env", "PART", "only environments whose name contains PART", default="")


def _add_playing(parser: _Parser, episodes: int) -> None:
    _add_source(parser)
    parser.add_number("--episodes", episodes, f"number of episodes (default {episodes})")
    parser.add_switch("--explore", "sample actions; default: greedy")
    parser.add_word("--env", "NAME", "environment, if not that of training")
    mapping = "maps agents to policies, as in training; for a run with several policies"
    parser.add_word("--policy-mapping", "MODULE:FUNCTION", mapping)
    spaces = "accept other dtypes or action bounds of the environment; actions keep the policy's"
    parser.add_switch("--allow-other-spaces", spaces)
    parser.add_number("--seed", 0, "seed of the episodes (default 0)", count)


def _add_source(parser: _Parser) -> None:
    source = "a run folder, a folder of runs (the newest is used), or a checkpoint"
    parser.add_word("source", "RUN_OR_CHECKPOINT", source)
    parser.add_switch("--best", "use the best checkpoint of a run")
    model = "the model of the training, if Keras cannot rebuild it from the checkpoint"
    parser.add_word("--model", "MODULE:FACTORY", model)
    parser.add_word("--algo", "MODULE:CLASS", "the algorithm of the training, if it is custom")
    work = "factor on the computation limit of a stored Keras model (default 1)"
    parser.add_number("--model-work-limit", 1.0, work, float, metavar="TIMES")
