"""Names of environments that come from a file, which may not choose what is imported."""

from __future__ import annotations

import re
from typing import Any

from tfpolicies.envs.making import is_import_path
from tfpolicies.envs.pettingzoo import is_pettingzoo_name
from tfpolicies.envs.registry import ENVIRONMENTS
from tfpolicies.storage.import_paths import Missing

_FORWARDING = re.compile(r"GymV\d+Environment")  # Gymnasium's: makes what `env_config` names
_MODULE = re.compile(r"[A-Za-z]\w*_v\d+")  # of an environment, in packages like PettingZoo's


def environment_of_file(source: Any) -> Any:
    """Returns an environment that a file names, or a `Missing` if making it would import something.

    Names that are registered, here, with Gymnasium or with PettingZoo, stay, since the file only
    chooses among what is there. An import path ("package.module:Class", "package.module.Class" and
    Gymnasium's "module:EnvId") does not, and this package has no environment to be made by one.

    Args:
        source: what the file holds; what is no text is returned as it is.

    >>> environment_of_file("CartPole-v1"), environment_of_file("pettingzoo:classic/tictactoe_v3")
    ('CartPole-v1', 'pettingzoo:classic/tictactoe_v3')
    >>> environment_of_file("antigravity:CartPole-v1")
    Missing(name='antigravity:CartPole-v1', importable=True)
    """
    if not isinstance(source, str) or ENVIRONMENTS.find(source) is not None:
        return source
    if _FORWARDING.match(source):
        return Missing(source)
    if not is_import_path(source) or _is_of_pettingzoo(source):
        return source
    return Missing(source, importable=True)


def _is_of_pettingzoo(name: str) -> bool:
    """Whether a name is one of PettingZoo's; where it is imported, an environment's module."""
    package, _, rest = name.partition(":")
    return is_pettingzoo_name(name) and (
        package == "pettingzoo" or _MODULE.fullmatch(rest) is not None
    )
