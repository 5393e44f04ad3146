"""The command `train`: one run in this process, or several seeds in processes of their own."""

from __future__ import annotations

import argparse

from tfpolicies.cli import training_seeds
from tfpolicies.cli.train_options import require_no_duplicate_settings
from tfpolicies.errors import UsageError

_NON_SETTING_ARGUMENTS = ("command", "debug", "run")


def train(args: argparse.Namespace) -> int:
    """Trains; see `tfpolicies train --help`."""
    arguments = {
        name: value for name, value in vars(args).items() if name not in _NON_SETTING_ARGUMENTS
    }
    require_no_duplicate_settings(arguments)
    if training_seeds.trains_seeds(arguments):
        return training_seeds.train_seeds(arguments)
    if "parallel" in arguments:
        raise UsageError("--parallel needs --seeds, or --resume with a folder of seeds.")
    from tfpolicies.cli import training  # imports TensorFlow

    return training.train(arguments, debug=args.debug)
