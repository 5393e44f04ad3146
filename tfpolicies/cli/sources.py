"""What the commands share: the runs, checkpoints and policies that a user names, and exporting."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from tfpolicies.algorithms.registry import algorithm_names
from tfpolicies.cli.settings import TrainSettings, algorithm_of, imported, is_own
from tfpolicies.config.stored_settings import environment_of_file
from tfpolicies.errors import CheckpointError, ConfigError, UsageError
from tfpolicies.reporting.run_folder import RunFolder, find_runs, newest_run
from tfpolicies.storage.checkpoint import missing_checkpoint
from tfpolicies.storage.json_values import Missing
from tfpolicies.storage.manifest import POLICIES
from tfpolicies.system.paths import resolve_path, shown
from tfpolicies.system.quiet import load_tensorflow

if TYPE_CHECKING:
    from tfpolicies.export.result import ExportResult
    from tfpolicies.policy.tf_policy import TFPolicy


class Shipped(NamedTuple):
    """What was exported, and how it did."""

    files: Mapping[str, Path]
    figures: Mapping[str, str]
    mean_return: float | None = None  # of the exported policy; None if it did not play


def find_run(path: str) -> RunFolder | None:
    """Returns the run at `path`, or the newest one in it with a checkpoint, or None."""
    return RunFolder.open(path) if RunFolder(path).run_json.exists() else newest_run(path)


def find_checkpoint(path: str, *, best: bool = False) -> Path:
    """Returns the checkpoint folder that a run, a folder of runs or a checkpoint folder means.

    Raises:
        CheckpointError: if there is none.
    """
    run = find_run(path)
    if run is None:
        begun = find_runs(path)
        if begun:
            raise CheckpointError(
                f"No run in {path!r} has a checkpoint yet. Begin the newest one anew with "
                f"`tfpolicies train --resume {shown(begun[0].path)}`."
            )
        if best:
            raise UsageError(f"--best asks for a run folder, but {path!r} is none.")
        folder = resolve_path(path)
        is_policy_id = folder.parent.name == POLICIES and any(folder.parents[1].glob("*.json"))
        if not (folder.exists() or is_policy_id):
            raise missing_checkpoint(path, folder)
        return folder
    folder = run.best if best else run.latest
    if not (folder.exists() if best else run.has_checkpoint):
        advice = (
            "Train with --keep-best." if best else "Train it on with `tfpolicies train --resume`."
        )
        raise CheckpointError(
            f"The run {shown(run.path)} has no {folder.name} checkpoint. {advice}"
        )
    return folder


def load_policy(
    folder: Path,
    console: Console,
    source: argparse.Namespace | TrainSettings,
    *,
    explore: bool = False,
    policy_id: str | None = None,
) -> Any:
    """Returns the policy of a checkpoint of a policy or of an algorithm.

    Args:
        folder: the checkpoint.
        console: where it is shown that TensorFlow is loading.
        source: has `model`, a `module:factory` of a model that the checkpoint does not hold;
            `algo`, the algorithm as `--algo` names it, None if the run says it; and maybe
            `model_work_limit`, how many times the usual work a stored Keras model may take.
        explore: whether the policy samples its actions.
        policy_id: of an algorithm with several policies, the one that is meant.

    Raises:
        CheckpointError: if it is missing, damaged or foreign, or holds several policies and none
            of them is named.
        UnknownPolicyError: if it has no policy of that id.
        UsageError: if the model cannot be imported.
    """
    load(console)
    settings: dict[str, Any] = {"explore": explore}
    if source.model is not None:
        settings["model"] = {"custom_model": imported("model", source.model)}
    from tfpolicies.models.work import limit_work
    from tfpolicies.policy.checkpoints import load_policies
    from tfpolicies.policy.policy import Policy

    base: Any = Policy
    ids = None if policy_id is None else [policy_id]
    trained = _algorithm_of_run(folder)
    named = source.algo or (trained if trained in algorithm_names() else None)
    known = [] if named is None else [*algorithm_of(named).policy_classes.values()]
    try:
        with limit_work(getattr(source, "model_work_limit", 1.0)):
            found = load_policies(folder, ids, base, settings, known=known)
    except CheckpointError as error:
        if "algo" in error.settings and is_own(trained):
            error.settings = {"algo": trained}  # the user's own word says it once more
        raise
    if not isinstance(found, dict):
        return found
    if len(found) != 1:
        raise CheckpointError(
            f"{shown(folder)} holds the policies {', '.join(sorted(found))}. Export one after the "
            f"other: {' and '.join(export_command(shown(folder), pid) for pid in sorted(found))}."
        )
    return next(iter(found.values()))


def export_command(source: str, policy_id: str) -> str:
    """Returns the command that exports one policy of several, as it stands in messages.

    >>> export_command("runs/a", "cat")
    '`tfpolicies export runs/a --policy cat --to cat`'
    """
    words = ["tfpolicies", "export", source, "--policy", policy_id, "--to", policy_id]
    return f"`{shlex.join(words)}`"


def _algorithm_of_run(folder: Path) -> str:
    """Returns what the run of a checkpoint says of its algorithm; "" if there is none."""
    run = run_of(folder)
    settings = {} if run is None else run.settings
    train = settings.get("train")
    return str(train.get("algo", "") if isinstance(train, dict) else settings.get("learn", ""))


def run_of(checkpoint: Path) -> RunFolder | None:
    """Returns the run that a checkpoint, or a part of one, lies in; None if it lies in none."""
    for parent in checkpoint.parents:
        if parent.name == "checkpoints":
            with contextlib.suppress(CheckpointError):
                return RunFolder.open(parent.parent)
    return None


def environment_for(config: Mapping[str, Any], given: str | None) -> Any:
    """Returns where a policy plays: what is given, or else what its config says.

    Raises:
        ConfigError: if neither says it, or if the config's would have to be imported.
    """
    source = environment_of_file(config["env"]) if given is None else given
    if isinstance(source, Missing):
        raise ConfigError(
            f"The policy was trained in {source.name!r}, but no file chooses what is imported. "
            f"Give --env {source.name}."
        )
    if not (isinstance(source, str) or callable(source)):
        raise ConfigError("The checkpoint does not say where to play. Give --env NAME.")
    return source


def export_policy(
    policy: TFPolicy, folder: Path, console: Console, forms: Mapping[str, Any]
) -> Shipped:
    """Exports a policy, each format verified against it.

    An engine's layout goes right into `folder`, of ONNX of the opset that `onnx` names; the others
    have a folder in it.

    Args:
        policy: what is exported.
        folder: where to.
        console: where it is shown what is written.
        forms: what the options of `tfpolicies export` say that name forms, by name.
    """
    onnx, layout, litert = (forms.get(name) for name in ("onnx", "layout", "litert"))
    results: dict[str, ExportResult] = {}

    def export(name: str, what: str, *place: Any, **options: Any) -> None:
        with console.status(f"exporting {what}"):
            results[name] = policy.export_model(*place, **options)

    if forms.get("saved_model"):
        export("SavedModel", "a SavedModel", folder / "saved_model")
    if layout:
        export(layout, f"for {layout}", folder, onnx, layout=layout)
    elif onnx or forms.get("web"):
        web, ort_web = bool(forms.get("web")), forms.get("ort_web")
        export("ONNX", "ONNX", folder / "onnx", onnx or True, web=web, ort_web=ort_web)
    if litert:
        export("LiteRT", "LiteRT", folder / "litert", litert=litert)
    figures = {name: _verified(result) for name, result in results.items()}
    return Shipped({name: Path(result.path) for name, result in results.items()}, figures)


def _verified(result: ExportResult) -> str:
    """Says how well an export agrees with its policy."""
    told = f"differs from the policy by at most {result.parity.largest_difference:.1e}"
    if result.agreement is None:
        return f"verified: {told}"
    acting = result.agreement
    share = f"{acting.equal_actions:.1%} of its actions on {acting.observations}"
    return f"verified: {told}; {share} random observations are the policy's"


def load(console: Console) -> None:
    """Imports TensorFlow, which takes a while."""
    with console.status("loading TensorFlow"):
        load_tensorflow()


def print_files(console: Console, files: Mapping[str, Path]) -> None:
    """Prints paths in lines that are never broken, so that they can be copied."""
    there = {name: path for name, path in files.items() if path.exists()}
    width = max(map(len, there), default=0)
    for name, path in there.items():
        line = Text.assemble((f"{name:{width}}  ", "dim"), shown(path))
        console.print(line, soft_wrap=True, highlight=False)
