"""Lets tox find the interpreters that pyenv installed: its shims only know the chosen ones."""

import os
from pathlib import Path

_ROOT = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
_FOLDERS = sorted(str(path) for path in _ROOT.glob("versions/3.*/bin"))
os.environ["PATH"] = os.pathsep.join([*os.environ.get("PATH", "").split(os.pathsep), *_FOLDERS])
