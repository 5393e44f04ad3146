"""Logs runs to Weights & Biases."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tfpolicies.errors import MissingPackageError, UsageError
from tfpolicies.loggers.background_logger import BackgroundLogger, LoggedRow, RunFacts, Tracker
from tfpolicies.reporting.progress_row import select_known_numbers
from tfpolicies.reporting.video import VIDEO_SUFFIXES
from tfpolicies.system.installed_distributions import get_install_command

_STEPS = "env_steps"
_MODES = ("online", "offline", "disabled")


class WandbLogger(BackgroundLogger):
    """Logs runs to Weights & Biases (W&B).

    All settings, versions and the machine are in the run's config, and the columns of
    `progress.csv` are its metrics, over environment steps. If `learn` has a `run_dir`, a resumed
    run continues its W&B run, and W&B's own files are in the run folder.

    Args:
        project: the project; None: W&B's setting, from `WANDB_PROJECT`.
        entity: the user or team; None: W&B's setting.
        run_name: the name of the run; None: that of the run folder.
        tags: labels of the run.
        mode: "online", "offline" (`wandb sync` uploads later) or "disabled"; None: W&B's setting,
            from `WANDB_MODE`.
        files: "learning_curve" and "videos" become pictures and videos of the run, "checkpoints"
            and "export" artifacts.
        close_seconds: seconds that the end of a run may wait for the server.

    Raises:
        MissingPackageError: if W&B is not installed.
        UsageError: for another mode, or if W&B has no API key.
    """

    service, key = "W&B", "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        entity: str | None = None,
        run_name: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
        files: Collection[str] = (),
        close_seconds: float = 60.0,
    ) -> None:
        super().__init__(files=files, close_seconds=close_seconds)
        if find_spec("wandb") is None:
            raise MissingPackageError(
                f"WandbLogger needs the package wandb. Install it: {get_install_command('wandb')}"
            )
        if mode not in (None, *_MODES):
            raise UsageError(f"mode must be None or one of {', '.join(_MODES)}, got {mode!r}.")
        _require_key(mode)
        self._mode = mode
        self._run_name = run_name
        self._arguments = {"project": project, "entity": entity, "tags": [*tags] or None}

    def open_tracker(self, facts: RunFacts) -> Tracker:
        name = self._run_name or facts.name
        return _WandbRun({**self._arguments, "mode": self._mode, "name": name}, facts)


def _require_key(mode: str | None) -> None:
    import wandb

    is_online = (mode or wandb.setup().settings.mode) == "online"
    if is_online and not wandb.login(prompt=False, verify=False):
        raise UsageError(
            "W&B has no API key. Run `wandb login`, set WANDB_API_KEY, or log to files with "
            "WandbLogger(mode='offline') or WANDB_MODE=offline."
        )


class _WandbRun(Tracker):
    """A run of W&B, which is not `wandb.run`, so that your own run is not touched."""

    def __init__(self, arguments: dict[str, Any], facts: RunFacts) -> None:
        import wandb

        run_id = facts.stored.get("run_id")
        is_offline = (arguments["mode"] or wandb.setup().settings.mode) == "offline"
        self._run = wandb.init(
            **arguments,
            id=run_id,
            resume=None if run_id is None or is_offline else "allow",
            dir=None if facts.run_dir is None else str(facts.run_dir),
            config={**facts.settings, "versions": facts.versions, "machine": facts.machine},
            allow_val_change=True,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        )
        self._run.define_metric("*", step_metric=_STEPS)

    def get_stored(self) -> dict[str, str]:
        return {"run_id": self._run.id}

    def write(self, rows: Sequence[LoggedRow]) -> None:
        for row in rows:
            self._run.log({**select_known_numbers(row.numbers), "_timestamp": row.time})

    def upload(self, path: Path, name: str) -> None:
        import wandb

        if path.suffix in VIDEO_SUFFIXES:
            video = wandb.Video(str(path), caption=path.stem, format=path.suffix[1:])
            self._run.log({"videos": video})
        elif path.is_file():
            self._run.log({path.stem: wandb.Image(str(path))})
        else:
            kind = name.partition("/")[0]
            artifact = wandb.Artifact(f"{self._run.id}-{path.name}", type=kind)
            for file in sorted(x for x in path.rglob("*") if x.is_file()):  # `add_dir` prints
                artifact.add_file(str(file), name=str(file.relative_to(path)))
            self._run.log_artifact(artifact)

    def close(self, ended_by: str) -> None:
        self._run.finish(exit_code=1 if ended_by in ("error", "signal") else 0)
