"""The words of the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn

from tfpolicies._version import __version__
from tfpolicies.algorithms.registry import algorithm_names
from tfpolicies.cli.ends import STATUSES
from tfpolicies.cli.settings import TrainSettings
from tfpolicies.errors import UsageError, near_matches

RUNS = "runs"  # the folder of all runs, unless another one is named

_EXAMPLES = """\
examples:
  tfpolicies train CartPole-v1 --until 475 --export --play 100
  tfpolicies train my_package.my_module:MyEnv --steps 200000 --set gamma=0.95
  tfpolicies train --resume                       go on with the newest run
  tfpolicies evaluate runs --episodes 100         the newest run's policy
  tfpolicies export runs --to exported
  tfpolicies play-exported exported --env CartPole-v1 --episodes 100
"""


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process, and names near matches."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = list(action.choices or ())
        if choices and value not in choices:
            name = action.metavar or "/".join(action.option_strings) or action.dest
            raise UsageError(
                f"{name}: there is no {value!r}.{near_matches(str(value), choices)} "
                f"Choose one of {', '.join(choices)}."
            )

    def options(self) -> list[str]:
        """Returns the names of all options."""
        return list(self._option_string_actions)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Raises:
        UsageError: for what is not understood; near matches are named.
    """
    parser, commands = _parsers()
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        return argparse.Namespace(command=None, debug=args.debug, help=parser.format_help())
    if unknown:
        used = commands[args.command]
        word = unknown[0].partition("=")[0]
        hint = near_matches(word, used.options()) if word.startswith("-") else ""
        raise UsageError(f"{used.prog} does not take {unknown[0]!r}.{hint} See `{used.prog} -h`.")
    return args


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(
        prog="tfpolicies",
        description="Train, evaluate, export and play reinforcement-learning policies.",
        epilog=f"{_EXAMPLES}\n{STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tfpolicies {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    made = {}
    for name, summary, add_arguments in (
        ("train", "train a policy on an environment", _train),
        ("evaluate", "play episodes with a trained policy", _evaluate),
        ("export", "write a policy as SavedModel and ONNX", _export),
        ("play-exported", "play episodes with an exported ONNX file alone", _play_exported),
    ):
        made[name] = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            argument_default=argparse.SUPPRESS if name == "train" else None,
            allow_abbrev=False,
        )
        made[name].add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )
        add_arguments(made[name])
    return parser, made


def _train(parser: _Parser) -> None:
    default = TrainSettings
    what = parser.add_argument_group("what is trained")
    what.add_argument("env", nargs="?", metavar="ENV", help="registered name, or module:Class")
    what.add_argument(
        "--algo", choices=algorithm_names(), help=f"algorithm (default {default.algo})"
    )
    what.add_argument("--seed", type=_count, help="of everything (default: drawn and recorded)")
    what.add_argument("--num-envs", type=_positive, help="environments stepped together")
    what.add_argument("--lr", type=float, help="step size of the optimizer")
    what.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        help="any other setting, such as clip_param=0.1 or model.fcnet_hiddens=[64,64]; repeatable",
    )
    what.add_argument(
        "--config",
        metavar="FILE",
        help='a JSON file of settings, such as {"gamma": 0.98, "model": {"use_lstm": true}}; '
        "--set and the options above override it",
    )
    own = parser.add_argument_group("code of yours, imported as `python -m` finds it")
    own.add_argument("--callbacks", metavar="MODULE:CLASS", help="a subclass of DefaultCallbacks")
    own.add_argument(
        "--model", metavar="MODULE:FACTORY", help="f(observation_space, num_outputs) -> keras.Model"
    )
    own.add_argument(
        "--policy-mapping",
        metavar="MODULE:FUNCTION",
        help="f(agent_id, episode, worker, **kwargs) -> the id of the policy that acts; the "
        'policies stand in --config: {"policies": ["left", "right"]}',
    )
    end = parser.add_argument_group("when it ends")
    end.add_argument(
        "--steps",
        type=_positive,
        help=f"environment steps at most (default {default.steps:,}, with --until 1,000,000)",
    )
    end.add_argument(
        "--until",
        type=float,
        metavar="RETURN",
        help="stop when the mean return of the last 100 training episodes reaches this",
    )
    way = parser.add_argument_group("on the way")
    way.add_argument(
        "--eval-every",
        type=_positive,
        metavar="N",
        help="play greedy episodes every N iterations (default: never)",
    )
    way.add_argument(
        "--eval-episodes",
        type=_positive,
        metavar="N",
        help=f"episodes of an evaluation (default {default.eval_episodes})",
    )
    way.add_argument(
        "--keep-best",
        action="store_true",
        help="keep apart a checkpoint of the weights with the best evaluation (or those that "
        "sampled the iteration with the best training mean)",
    )
    way.add_argument(
        "--checkpoint-every",
        type=_positive,
        metavar="N",
        help=f"iterations between checkpoints (default {default.checkpoint_every})",
    )
    after = parser.add_argument_group("afterwards")
    after.add_argument("--export", action="store_true", help="write SavedModel and ONNX, verified")
    after.add_argument(
        "--play",
        type=_count,
        metavar="N",
        help="play N episodes with the exported ONNX file in a process of its own",
    )
    runs = parser.add_argument_group("the run folder")
    runs.add_argument("--run-dir", metavar="DIR", help=f"folder of all runs (default {RUNS})")
    runs.add_argument(
        "--resume",
        nargs="?",
        const=None,
        metavar="RUN",
        help="go on with a run, or with the newest one of a folder of runs (default: that of "
        "--run-dir); goals may be changed",
    )
    runs.add_argument(
        "--allow-other-spaces",
        action="store_true",
        help="go on though the environment's dtypes or action bounds have changed",
    )


def _evaluate(parser: _Parser) -> None:
    _add_source(parser)
    parser.add_argument("--episodes", type=_positive, default=100, help="default 100")
    parser.add_argument("--explore", action="store_true", help="sample actions; default: greedy")
    parser.add_argument("--env", metavar="NAME", help="another environment than in training")
    parser.add_argument(
        "--allow-other-spaces",
        action="store_true",
        help="go on if its dtypes or action bounds differ; the policy acts in its own bounds",
    )
    parser.add_argument("--seed", type=_count, default=0, help="of the episodes (default 0)")


def _export(parser: _Parser) -> None:
    _add_source(parser)
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write into")
    parser.add_argument(
        "--onnx",
        nargs="?",
        type=_positive,
        const=True,
        metavar="OPSET",
        help="write ONNX only, of this opset if one is given",
    )
    parser.add_argument("--saved-model", action="store_true", help="write a SavedModel only")


def _play_exported(parser: _Parser) -> None:
    parser.add_argument("exported", metavar="DIR_OR_FILE", help="an ONNX file, or its folder")
    parser.add_argument("--env", required=True, metavar="NAME", help="where to play")
    parser.add_argument("--env-config", type=_json, metavar="JSON", help="its settings")
    parser.add_argument("--episodes", type=_positive, default=100, help="default 100")
    parser.add_argument("--seed", type=_count, default=0, help="of the episodes (default 0)")


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


def _whole(text: str) -> int:
    """Returns the integer that is written as 100000, 100_000 or 1e5."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _count(text: str) -> int:
    number = _whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return number


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


_count.__name__ = _positive.__name__ = "integer"  # argparse shows it in its messages
