"""Command lines of scripts."""

from __future__ import annotations

import argparse
from typing import Any


def parse_options(description: str | None, **options: Any) -> argparse.Namespace:
    """Parses the command line of a script, whose options have the types of their defaults.

    Args:
        description: the docstring of the script.
        options: a default by name, perhaps with a help text: `seed=0`, `count=(9, "of each")`. A
            flag is False; a choice of some of several names is the list of all of them.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in options.items():
        default, text = option if isinstance(option, tuple) else (option, None)
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", choices=default, default=default, help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser.parse_args()
