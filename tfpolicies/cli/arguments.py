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
from tfpolicies.algorithms.algorithm_registry import get_algorithm_names
from tfpolicies.base.acting_runtimes import ONNX_OPSETS
from tfpolicies.base.name_registry import describe_entry_point, get_entry_points, load_entry_point
from tfpolicies.cli.arg_types import (
    column_names,
    describe_invalid_choice,
    json_object,
    non_negative_int,
    onnx_opset,
    parse_columns,
    parse_seeds,
    port_number,
    positive_float,
    positive_int,
)
from tfpolicies.cli.train_options import MODEL_GROUP, OPTIONS, RUN_GROUP, get_flag, parse_algorithm
from tfpolicies.cli.tune_arguments import add_tune_arguments
from tfpolicies.errors import ConfigError, UsageError, suggest_similar_names
from tfpolicies.system.installed_distributions import import_or_explain

COMMANDS = "tfpolicies.commands"
"""The group of entry points."""

RUNS = "runs"  # the folder of all runs, unless another one is named

_Number = Callable[[str], float]
_DEBUG_KWARGS: Any = {"action": "store_true", "help": "show the traceback of an error"}


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, and names similar options.

    Attributes:
        subparsers: of the subcommands, by name.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.subparsers: dict[str, _Parser] = {}

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        choices = action.choices or ()
        if choices and value not in choices:
            name = action.metavar or "/".join(action.option_strings) or action.dest
            raise UsageError(f"{name}: {describe_invalid_choice(value, list(choices))}")

    def options(self) -> list[str]:
        options = list(self._option_string_actions)
        return options + [x for parser in self.subparsers.values() for x in parser.options()]

    def add_value(self, name: str, metavar: str | None, help: str, **settings: Any) -> None:
        """Adds an argument or option with a text value, which `type` may convert."""
        self.add_argument(name, metavar=metavar, help=help, **settings)

    def add_number(
        self,
        name: str,
        default: float | None,
        help: str,
        kind: _Number = positive_int,
        **settings: Any,
    ) -> None:
        """Adds an option with a number, parsed by a function of `cli/arg_types.py`."""
        self.add_argument(name, type=kind, default=default, help=help, **settings)

    def add_switch(self, name: str, help: str) -> None:
        self.add_argument(name, action="store_true", help=help)

    def add_repeatable(self, name: str, metavar: str, help: str) -> None:
        self.add_argument(name, action="append", default=[], metavar=metavar, help=help)


class _Command(NamedTuple):
    summary: str
    add_arguments: Callable[[_Parser], None]
    module: str  # of `cli/`, imported to run it unless the arguments set `run`: has its function
    function: str = ""  # its name, if not that of the command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser, commands = _make_parsers(next((word for word in argv or () if word[:1] != "-"), ""))
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        return argparse.Namespace(command=None, debug=args.debug, help=parser.format_help())
    if unknown:
        command_parser = commands[args.command]
        subcommand = str(getattr(args, "subcommand", ""))
        command_parser = command_parser.subparsers.get(subcommand, command_parser)
        word = unknown[0].partition("=")[0]
        hint = suggest_similar_names(word, command_parser.options()) if word.startswith("-") else ""
        raise UsageError(
            f"{command_parser.prog} does not take {unknown[0]!r}.{hint} See "
            f"`{command_parser.prog} --help`."
        )
    return args


def _make_parsers(used_command: str = "") -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="tfpolicies",
        description="Train, evaluate, export and play reinforcement-learning policies.",
        epilog=resources.files(__package__).joinpath("epilog.txt").read_text("utf-8"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tfpolicies {__version__}")
    parser.add_argument("--debug", **_DEBUG_KWARGS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    parsers = {}
    for name, command in _get_commands(used_command).items():
        summary, add_arguments, module, function = command
        parsers[name] = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            argument_default=argparse.SUPPRESS if name in ("train", "tune") else None,
            allow_abbrev=False,
        )
        parsers[name].add_argument("--debug", default=argparse.SUPPRESS, **_DEBUG_KWARGS)
        parsers[name].set_defaults(run=partial(_run_command, module, function))
        add_arguments(parsers[name])
    return parser, parsers


_EVALUATE = "play episodes with a trained policy"
_PLAY_EXPORTED = "play episodes with an exported ONNX file, without TensorFlow"
_PREDICT = "add an exported policy's actions to the rows of a Parquet file"


def _get_commands(used_command: str) -> dict[str, _Command]:
    """Returns all commands; of other packages, only the requested one is imported."""
    builtin_commands = {
        "train": _Command(
            "train a policy on an environment", _add_train_arguments, "train_command"
        ),
        "tune": _Command(
            "search settings with which an algorithm learns well", _add_tune_arguments, "tuning"
        ),
        "evaluate": _Command(_EVALUATE, partial(_add_play_arguments, episodes=100), "commands"),
        "compare": _Command("compare runs side by side", _add_compare_arguments, "compare"),
        "record": _Command(
            "make a video of a trained policy", _add_record_arguments, "show_policy"
        ),
        "watch": _Command(
            "watch a trained policy play in a window", _add_display_arguments, "show_policy"
        ),
        "export": _Command(
            "write a policy as SavedModel, ONNX or LiteRT", _add_export_arguments, "commands"
        ),
        "play-exported": _Command(_PLAY_EXPORTED, _add_play_exported_arguments, "commands"),
        "serve": _Command(
            "serve exported policies over HTTP and gRPC", _add_serve_arguments, "serve"
        ),
        "predict": _Command(_PREDICT, _add_predict_arguments, "predict"),
        "data": _Command(
            "show or record experience to learn from", _add_data_arguments, "data_commands"
        ),
        "doctor": _Command("say why a run does not learn", _add_doctor_arguments, "doctor"),
        "list": _Command(
            "list algorithms, environments and tuned settings",
            _add_list_arguments,
            "listing",
            "show_list",
        ),
    }
    if used_command in builtin_commands:
        return builtin_commands
    other_commands = {
        name: _load_installed_command(entry_point, used_command)
        for name, entry_point in get_entry_points(COMMANDS).items()
    }
    return builtin_commands | other_commands | builtin_commands


def _load_installed_command(entry_point: EntryPoint, used_command: str) -> _Command:
    if entry_point.name != used_command and not entry_point.value.startswith("tfpolicies."):
        package = entry_point.dist.name if entry_point.dist else "a package"
        return _Command(f"a command of {package}", lambda parser: None, "")
    module = load_entry_point("command", entry_point)
    missing = [name for name in ("SUMMARY", "add_arguments", "run") if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{describe_entry_point('command', entry_point)} lacks {', '.join(missing)}."
        )

    def add_arguments(parser: _Parser) -> None:
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)

    return _Command(module.SUMMARY, add_arguments, "")


def _run_command(module: str, function: str, args: argparse.Namespace) -> int:
    """Runs a command of this package; returns its exit status.

    Raises:
        MissingPackageError: if it needs a package that is not installed.
    """
    command_module = import_or_explain(f"`tfpolicies {args.command}`", f"{__package__}.{module}")
    return int(getattr(command_module, function or args.command.replace("-", "_"))(args))


def _add_train_arguments(parser: _Parser) -> None:
    groups = {word.group: parser.add_argument_group(word.group) for word in OPTIONS.values()}
    env_help = "registered name, or module:Class"
    groups[MODEL_GROUP].add_argument("env", nargs="?", metavar="ENV", help=env_help)
    for name, word in OPTIONS.items():
        groups[word.group].add_argument(
            get_flag(name), help=word.help, **word.make_argparse_kwargs()
        )
    groups[MODEL_GROUP].add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    run_dir_help = f"folder of all runs (default {RUNS})"
    groups[RUN_GROUP].add_argument("--run-dir", metavar="DIR", help=run_dir_help)
    groups[MODEL_GROUP].add_argument(
        "--seeds", type=parse_seeds, metavar="N_OR_LIST", help=_SEEDS_HELP
    )
    groups[MODEL_GROUP].add_argument(
        "--parallel", type=positive_int, metavar="N", help=_PARALLEL_HELP
    )
    parser.add_argument("--run-folder", help=argparse.SUPPRESS)  # of one of several seeds
    groups[RUN_GROUP].add_argument("--resume", nargs="?", metavar="RUN", help=_RESUME_HELP)
    limit_help = (
        "with --resume: factor on the computation limit of a stored Keras model (default 1)"
    )
    groups[RUN_GROUP].add_argument(
        "--model-work-limit", type=float, metavar="TIMES", help=limit_help
    )


_CONFIG_HELP = (
    'a JSON file of settings, such as {"gamma": 0.98, "model": {"use_lstm": true}}, or a YAML file '
    "of RL Baselines3 Zoo for the algorithm; --set and the options above override it"
)
_SEEDS_HELP = (
    "train several seeds side by side, in one folder, and compare them: a number of seeds from 0, "
    "or a list such as 3,7,11. Options such as --until and --export apply to each seed"
)
_PARALLEL_HELP = "with --seeds: how many train at once (default: as many as cores are free)"
_RESUME_HELP = (
    "resume a run, or the newest one of a folder of runs (default: that of --run-dir); stopping "
    "criteria may be changed"
)


def _add_tune_arguments(parser: _Parser) -> None:
    add_tune_arguments(parser, config_help=_CONFIG_HELP, runs=RUNS)


def _add_compare_arguments(parser: _Parser) -> None:
    runs = "run folders, or folders of runs; of one run it is a report. A name is that of the group"
    parser.add_value("runs", "[NAME=]RUNS", runs, nargs="+")
    to = "folder to write the page and the pictures into (default: comparison)"
    parser.add_value("--to", "DIR", to, default="comparison")
    by = "x axis: environment steps, or seconds of training (default steps)"
    parser.add_value("--by", None, by, choices=("steps", "time"), default="steps")
    estimate = "estimate over seeds; iqm: interquartile mean (default iqm)"
    parser.add_value("--estimate", None, estimate, choices=("iqm", "median", "mean"), default="iqm")


def _add_record_arguments(parser: _Parser) -> None:
    _add_display_arguments(parser)
    to = "a file that ends in .mp4 or .gif, or a folder (default: the run's folder videos)"
    parser.add_value("--to", "FILE_OR_DIR", to)
    parser.add_switch("--gif", "also write a GIF")
    fps = "steps per second (default: render_fps of the environment, or 30)"
    parser.add_number("--fps", None, fps, positive_float)


def _add_display_arguments(parser: _Parser) -> None:
    _add_play_arguments(parser, episodes=3)
    steps = "truncate an episode after this many steps (default 10,000)"
    parser.add_number("--max-steps", 10_000, steps)


def _add_export_arguments(parser: _Parser) -> None:
    _add_source_arguments(parser)
    parser.add_value("--to", "DIR", "folder to write into", required=True)
    parser.add_value("--policy", "ID", "which policy, if the run has several")
    onnx = f"write only ONNX; opset from {ONNX_OPSETS[0]} to {ONNX_OPSETS[-1]}"
    parser.add_value("--onnx", "OPSET", onnx, nargs="?", type=onnx_opset, const=True)
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--saved-model", action="store_true", help="write only a SavedModel")
    layouts = ("tf-serving", "triton", "mlserver", "kserve", "kubernetes")
    layout = "write the files of this engine into DIR; kubernetes: for `tfpolicies serve`"
    formats.add_argument("--layout", choices=layouts, help=layout)
    litert = "write only LiteRT, optionally with weights rounded to this type"
    formats.add_argument(
        "--litert", nargs="?", choices=("float16", "int8"), const=True, help=litert
    )
    web = "write ONNX with a page that runs it in a browser"
    formats.add_argument("--web", action="store_true", help=web)
    ort_web = "copy the runtime from this dist folder of onnxruntime-web (default: use a CDN)"
    parser.add_value("--ort-web", "FOLDER", ort_web)


def _add_play_exported_arguments(parser: _Parser) -> None:
    parser.add_value("exported", "DIR_OR_FILE", "an ONNX file, or its folder")
    parser.add_value("--env", "NAME", "environment to play in", required=True)
    parser.add_value("--env-config", "JSON", "settings of the environment", type=json_object)
    parser.add_number("--episodes", 100, "number of episodes (default 100)")
    parser.add_number("--seed", 0, "seed of the episodes (default 0)", non_negative_int)
    _add_device_argument(parser)


def _add_runtime_arguments(parser: _Parser) -> None:
    parser.add_number("--threads", 1, "threads of one ONNX Runtime call (default 1)")
    _add_device_argument(parser)


def _add_device_argument(parser: _Parser) -> None:
    where = "device of ONNX Runtime; auto: a GPU if there is a usable one (default cpu)"
    parser.add_value("--device", None, where, choices=("cpu", "cuda", "auto"), default="cpu")


def _add_serve_arguments(parser: _Parser) -> None:
    parser.add_value("sources", "EXPORT_OR_RUN", _SOURCES_HELP, nargs="+")
    parser.add_value("--host", None, "address (default 127.0.0.1)", default="127.0.0.1")
    parser.add_number("--port", 8000, "HTTP port (default 8000); 0: any free one", port_number)
    parser.add_number("--grpc-port", 8001, "gRPC port (default 8001); 0: any free one", port_number)
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
    _add_runtime_arguments(parser)
    drain = "keep answering after SIGTERM, but report that the server is not ready (default 5)"
    parser.add_number("--drain-seconds", 5, drain, non_negative_int, metavar="SECONDS")
    parser.add_switch("--control", "let requests load and unload models")
    token = "file with a token that each request must have (Authorization: Bearer TOKEN)"
    parser.add_value("--token-file", "FILE", token, type=Path)
    parser.add_switch("--access-log", "print a line for each request (default: off)")
    log_format = "format of the lines on standard output (default text)"
    parser.add_value("--log-format", None, log_format, choices=("text", "json"), default="text")
    certificate = "the server's certificate in PEM, for HTTPS and for gRPC with TLS"
    parser.add_value("--tls-cert", "FILE", certificate, type=Path)
    parser.add_value("--tls-key", "FILE", "the private key of --tls-cert in PEM", type=Path)
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


def _add_predict_arguments(parser: _Parser) -> None:
    parser.epilog = _PREDICT_EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_value("exported", "EXPORT", "an ONNX file, or its folder")
    parser.add_value("data", "FILE", "a Parquet file with observations")
    parser.add_value("--to", "FILE", "the Parquet file to write (default: FILE.actions.parquet)")
    columns = "input columns: one for each input, or one for each number of a single input"
    parser.add_value("--columns", "A,B,...", columns, type=column_names)
    keep = "columns of FILE to copy to the output (default: all; '': none)"
    parser.add_value("--keep", "A,B,...", keep, type=column_names)
    parser.add_switch("--explore", "sample actions; default: greedy")
    parser.add_number("--seed", 0, "seed of --explore (default 0)", non_negative_int)
    parser.add_number("--batch", None, "rows per batch (default: 16 MB of rows)", metavar="ROWS")
    _add_runtime_arguments(parser)


def _add_data_arguments(parser: _Parser) -> None:
    subcommands = parser.add_subparsers(
        dest="subcommand", metavar="SUBCOMMAND", required=True, parser_class=_Parser
    )
    for name, (summary, add_arguments) in _DATA_COMMANDS.items():
        subparser = subcommands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        subparser.add_argument("--debug", default=argparse.SUPPRESS, **_DEBUG_KWARGS)
        add_arguments(subparser)
        parser.subparsers[name] = subparser


def _add_data_show_arguments(parser: _Parser) -> None:
    paths = "Parquet files, JSON lines, folders of them, or patterns"
    parser.add_value("paths", "PATH", paths, nargs="+")
    columns = OPTIONS["columns"]
    parser.add_value("--columns", "FILE_OR_JSON", columns.help, type=parse_columns)
    parser.add_switch("--trusted-data", OPTIONS["trusted_data"].help)
    for name in ("observation", "action"):
        space = f"the {name} space, such as 'Box(-1, 1, (2,))' (default: inferred)"
        parser.add_value(f"--{name}-space", "SPACE", space)
    parser.add_value("--to", "FILE.png", "also draw a picture")
    parser.add_switch("--json", "print JSON instead of tables")


def _add_data_record_arguments(parser: _Parser) -> None:
    _add_play_arguments(parser, episodes=100, source_is_optional=True)
    to = "file to write: Parquet (.parquet) or JSON lines (.json)"
    parser.add_value("--to", "FILE", to, required=True)
    random = "act at random in --env, without RUN_OR_CHECKPOINT"
    parser.add_switch("--random", random)


_DATA_COMMANDS = {
    "show": (
        "show rows, episodes, returns, spaces and faults of recorded experience",
        _add_data_show_arguments,
    ),
    "record": ("play episodes with a trained policy and write them", _add_data_record_arguments),
}


def _add_doctor_arguments(parser: _Parser) -> None:
    run = f"a run folder, or a folder of runs (the newest is used; default {RUNS})"
    parser.add_value("run_folder", "RUN", run, nargs="?", default=RUNS)
    parser.add_switch("--json", "print the diagnosis as JSON")


def _add_list_arguments(parser: _Parser) -> None:
    subjects = ("algorithms", "environments", "tuned")
    what = f"one of {', '.join(subjects)} (default: an overview)"
    parser.add_value("subject", "WHAT", what, nargs="?", choices=subjects)
    names, algo_help = get_algorithm_names(), "only this algorithm, or its tuned settings"
    parser.add_value("--algo", None, algo_help, type=parse_algorithm, choices=names)
    part = "only names with PART in them; of tuned settings, those of environments"
    parser.add_value("--filter", "PART", part, default="")
    parser.add_switch("--json", "print JSON instead of tables")


def _add_play_arguments(
    parser: _Parser, episodes: int, *, source_is_optional: bool = False
) -> None:
    _add_source_arguments(parser, is_optional=source_is_optional)
    parser.add_number("--episodes", episodes, f"number of episodes (default {episodes})")
    parser.add_switch("--explore", "sample actions; default: greedy")
    parser.add_value("--env", "NAME", "environment, if not that of training")
    env_config = "settings of the environment, if not those of training"
    parser.add_value("--env-config", "JSON", env_config, type=json_object)
    mapping = "maps agents to policies, as in training; for a run with several policies"
    parser.add_value("--policy-mapping", "MODULE:FUNCTION", mapping)
    spaces = "accept other dtypes or action bounds of the environment; actions keep the policy's"
    parser.add_switch("--allow-other-spaces", spaces)
    parser.add_number("--seed", 0, "seed of the episodes (default 0)", non_negative_int)


def _add_source_arguments(parser: _Parser, *, is_optional: bool = False) -> None:
    source = "a run folder, a folder of runs (the newest is used), or a checkpoint"
    nargs = {"nargs": "?"} if is_optional else {}
    parser.add_value("source", "RUN_OR_CHECKPOINT", source, **nargs)
    parser.add_switch("--best", "use the best checkpoint of a run")
    model = "the model of the training, if Keras cannot rebuild it from the checkpoint"
    parser.add_value("--model", "MODULE:FACTORY", model)
    parser.add_value("--algo", "MODULE:CLASS", "the algorithm of the training, if it is custom")
    policy_class = "a policy class of the training, if it is custom; repeatable"
    parser.add_repeatable("--policy-class", "MODULE:CLASS", policy_class)
    limit_help = "factor on the computation limit of a stored Keras model (default 1)"
    parser.add_number("--model-work-limit", 1.0, limit_help, float, metavar="TIMES")
