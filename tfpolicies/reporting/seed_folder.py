"""The folder of runs of one training with several seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.errors import CheckpointError
from tfpolicies.reporting.run_folder import SEED_PREFIX, RunFolder, make_dated_folder
from tfpolicies.system.atomic import write_atomically
from tfpolicies.system.paths import resolve_path
from tfpolicies.system.regular_files import read_regular

_FORMAT, _FORMAT_VERSION = "tfpolicies-seeds", 1
_FILE_NAME = "seeds.json"
_MAX_BYTES = 1 << 20


class SeedFolder(NamedTuple):
    """A folder with a run for each seed.

    Its files are::

        ppo-CartPole-v1-2025-01-31-142501/
            seeds.json          the seeds, and the settings of the command
            seed-0/             a run folder
            seed-0.log          the output of the training of this seed
            ...
            comparison/         of the seeds, once all have ended

    Attributes:
        path: absolute.
        seeds: in order.
        settings: of the command, as JSON values, whose seed is the first one.
    """

    path: Path
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]

    @classmethod
    def create(
        cls,
        parent: str | PathLike[str],
        name: str,
        seeds: Sequence[int],
        settings: Mapping[str, Any],
    ) -> SeedFolder:
        """Creates the new folder `<name>-<date>-<time>`; see `RunFolder.create`."""
        path = make_dated_folder(parent, name, datetime.now())
        content = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "seeds": [*seeds],
            "settings": dict(settings),
        }
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        write_atomically(path / _FILE_NAME, text.encode())
        return cls(path, tuple(seeds), settings)

    @classmethod
    def find(cls, path: str | PathLike[str]) -> SeedFolder | None:
        """Opens a folder of seeds; returns None if it is something else.

        Raises:
            CheckpointError: if its `seeds.json` is damaged, or of another version.
        """
        folder = resolve_path(path)
        file = folder / _FILE_NAME
        if not file.exists():
            return None
        try:
            content = json.loads(read_regular(file, _MAX_BYTES))
            if (content["format"], content["format_version"]) != (_FORMAT, _FORMAT_VERSION):
                raise ValueError(
                    f"its format is {content['format']!r:.60}, version "
                    f"{content['format_version']!r:.60}"
                )
            seeds, settings = content["seeds"], content["settings"]
            if not (isinstance(settings, dict) and _are_seeds(seeds)):
                raise ValueError("its seeds or settings are missing")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{str(file)!r} is damaged, or of another version of tfpolicies: {error}. Resume "
                f"each seed by itself: `tfpolicies train --resume {folder / SEED_PREFIX}...`."
            ) from error
        return cls(folder, tuple(seeds), settings)

    def get_run(self, seed: int) -> RunFolder:
        """Returns the run of a seed, which may be missing."""
        return RunFolder(self.path / f"{SEED_PREFIX}{seed}")

    def get_log(self, seed: int) -> Path:
        return self.path / f"{SEED_PREFIX}{seed}.log"

    @property
    def comparison(self) -> Path:
        return self.path / "comparison"


def _are_seeds(seeds: Any) -> bool:
    return (
        isinstance(seeds, list)
        and bool(seeds)
        and all(type(seed) is int and seed >= 0 for seed in seeds)
        and len(set(seeds)) == len(seeds)
    )
