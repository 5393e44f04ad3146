"""Finds runs and checkpoints by path, loads policies and environments, and exports policies."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from tfpolicies.algorithms.algorithm_registry import get_algorithm_names
from tfpolicies.analysis.run_card import make_run_card
from tfpolicies.analysis.run_record import read_run
from tfpolicies.cli.train_options import (
    TrainSettings,
    get_algorithm_class,
    import_option,
    is_custom_algorithm,
)
from tfpolicies.config.settings_allowlist import check_environment_name
from tfpolicies.errors import CheckpointError, ConfigError, UsageError
from tfpolicies.export.model_card import ModelCard, export_facts
from tfpolicies.reporting.run_folder import RunFolder, find_newest_run, find_runs
from tfpolicies.storage.checkpoint import make_missing_checkpoint_error, read_manifest
from tfpolicies.storage.json_values import UnresolvedObject
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST, POLICIES
from tfpolicies.system.log_suppression import load_tensorflow
from tfpolicies.system.paths import resolve_path, shorten_path

if TYPE_CHECKING:
    from tfpolicies.export.spec_writer import ExportResult
    from tfpolicies.policy.tf_policy import TFPolicy


class ExportedPolicy(NamedTuple):
    """The files of an exported policy, and its results."""

    files: Mapping[str, Path]
    figures: Mapping[str, str]
    mean_return: float | None = None  # of the exported policy; None without --play


def find_run(path: str) -> RunFolder | None:
    """Returns the run at `path`, or the newest one in it with a checkpoint, or None."""
    return RunFolder.open(path) if RunFolder(path).run_json.exists() else find_newest_run(path)


def find_checkpoint(path: str, *, best: bool = False) -> Path:
    """Returns the checkpoint folder for the path of a run, a folder of runs or a checkpoint."""
    run = find_run(path)
    if run is None:
        unsaved_runs = find_runs(path)
        if unsaved_runs:
            raise CheckpointError(
                f"No run in {path!r} has a checkpoint yet. Restart the newest one with "
                f"`tfpolicies train --resume {shorten_path(unsaved_runs[0].path)}`."
            )
        if best:
            raise UsageError(f"--best needs a run folder, but {path!r} is not one.")
        folder = resolve_path(path)
        is_policy_id = folder.parent.name == POLICIES and any(folder.parents[1].glob("*.json"))
        if not (folder.exists() or is_policy_id):
            raise make_missing_checkpoint_error(path, folder)
        return folder
    folder = run.best if best else run.latest
    if not (folder.exists() if best else run.has_checkpoint):
        advice = (
            "Train with --keep-best." if best else "Resume it with `tfpolicies train --resume`."
        )
        raise CheckpointError(
            f"The run {shorten_path(run.path)} has no {folder.name} checkpoint. {advice}"
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
    """Loads the policy from a checkpoint of a policy or of an algorithm.

    Args:
        folder: the checkpoint.
        console: shows a status while TensorFlow is loading.
        source: has `model`, the `module:factory` of a model that the checkpoint does not contain;
            `algo`, the value of `--algo`, or None to use the run's; and optionally
            `policy_class`, the `module:Class` of policies of the user, and `model_work_limit`, how
            many times the usual work a stored Keras model may take.
        explore: whether the policy samples its actions.
        policy_id: which policy to load, if the algorithm has several.

    Raises:
        CheckpointError: if it is missing, damaged or of another format, or has several policies and
            no `policy_id` is given.
        UnknownPolicyError: if it has no policy of that id.
        UsageError: if the model cannot be imported.
    """
    if policy_id is None:
        _require_single_policy(folder)
    load_tensorflow_with_status(console)
    settings: dict[str, Any] = {"explore": explore}
    if source.model is not None:
        settings["model"] = {"custom_model": import_option("model", source.model)}
    from tfpolicies.models.work import limit_work
    from tfpolicies.policy.policy import Policy
    from tfpolicies.policy.policy_checkpoints import load_policies

    policy_class: Any = Policy
    ids = None if policy_id is None else [policy_id]
    run_algorithm = _get_run_algorithm(folder)
    algorithm_name = source.algo or (
        run_algorithm if run_algorithm in get_algorithm_names() else None
    )
    policy_classes = import_policy_classes(source)
    if algorithm_name is not None:
        policy_classes += get_algorithm_class(algorithm_name).policy_classes.values()
    try:
        with limit_work(getattr(source, "model_work_limit", 1.0)):
            policies = load_policies(
                folder, ids, policy_class, settings, extra_classes=policy_classes
            )
    except CheckpointError as error:
        if "policies" in error.settings and is_custom_algorithm(run_algorithm):
            error.settings = {"algo": run_algorithm}  # the advice is to name it again
        raise
    return next(iter(policies.values())) if isinstance(policies, dict) else policies


def import_policy_classes(source: argparse.Namespace | TrainSettings) -> list[type]:
    """Returns the classes of `--policy-class`, for commands that have it.

    Raises:
        UsageError: if one cannot be imported.
    """
    paths: Sequence[str] = getattr(source, "policy_class", ())
    return [import_option("policy_class", path) for path in paths]


def _require_single_policy(checkpoint: Path) -> None:
    """Refuses the checkpoint of an algorithm with several policies."""
    if not (checkpoint / ALGORITHM_MANIFEST).exists():
        return
    names = sorted(read_manifest(checkpoint, ALGORITHM_MANIFEST, kind="Algorithm")[POLICIES])
    if len(names) != 1:
        short_path = shorten_path(checkpoint)
        commands = " and ".join(format_export_command(short_path, name) for name in names)
        raise CheckpointError(
            f"{short_path} holds the policies {', '.join(names)}. Export each of them: {commands}."
        )


def format_export_command(source: str, policy_id: str) -> str:
    """Returns the command that exports one policy of several, for messages.

    >>> format_export_command("runs/a", "cat")
    '`tfpolicies export runs/a --policy cat --to cat`'
    """
    arguments = ["tfpolicies", "export", source, "--policy", policy_id, "--to", policy_id]
    return f"`{shlex.join(arguments)}`"


def _get_run_algorithm(folder: Path) -> str:
    """Returns the algorithm in the run.json of a checkpoint's run; "" if there is no run."""
    run = find_run_folder(folder)
    settings = {} if run is None else run.settings
    train_settings = settings.get("train")
    return str(
        train_settings.get("algo", "")
        if isinstance(train_settings, dict)
        else settings.get("learn", "")
    )


def find_run_folder(checkpoint: Path) -> RunFolder | None:
    """Returns the run that contains a checkpoint, or a part of one; None if there is none."""
    for parent in checkpoint.parents:
        if parent.name == "checkpoints":
            with contextlib.suppress(CheckpointError):
                return RunFolder.open(parent.parent)
    return None


def make_checkpoint_card(checkpoint: Path) -> ModelCard:
    """Returns the facts of a checkpoint's policy in its run folder; none if there is no run."""
    folder = find_run_folder(checkpoint)
    if folder is None:
        return ModelCard()

    root = next(x for x in (checkpoint, *checkpoint.parents) if x.parent == folder.checkpoints)
    manifest = read_manifest(root, ALGORITHM_MANIFEST, kind="Algorithm")
    card = make_run_card(read_run(folder.path), int(manifest["progress"]["iteration"]))
    if len(manifest[POLICIES]) == 1:
        return card
    return replace(card, training=None, evaluation=None, settings=None)  # those of all policies


def get_environment(config: Mapping[str, Any], env: str | None) -> Any:
    """Returns the environment to play in: the given one, or else that of the config."""
    source = check_environment_name(config["env"]) if env is None else env
    if isinstance(source, UnresolvedObject):
        raise ConfigError(
            f"The policy was trained in {source.name!r}, which is not imported without your "
            f"consent. Give --env {source.name}."
        )
    if not (isinstance(source, str) or callable(source)):
        raise ConfigError(
            "The checkpoint names no environment. Give --env NAME, for example --env CartPole-v1, "
            "or --env my_module:MyEnv for a class of yours."
        )
    return source


def export_policy(
    policy: TFPolicy,
    folder: Path,
    console: Console,
    formats: Mapping[str, Any],
    card: ModelCard,
) -> ExportedPolicy:
    """Exports a policy and verifies each format against it.

    A layout for an engine is written directly into `folder`, with the ONNX opset of `onnx`; other
    formats get a subfolder.

    Args:
        policy: the policy.
        folder: the destination.
        console: shows a status for each format.
        formats: the values of those options of `tfpolicies export` that choose formats, by name.
        card: facts for the model cards that the policy does not know.
    """
    onnx, layout, litert = (formats.get(name) for name in ("onnx", "layout", "litert"))
    results: dict[str, ExportResult] = {}

    def export(name: str, description: str, *arguments: Any, **options: Any) -> None:
        with console.status(f"exporting {description}"), export_facts(card):
            results[name] = policy.export_model(*arguments, **options)

    if formats.get("saved_model"):
        export("SavedModel", "a SavedModel", folder / "saved_model")
    if layout:
        export(layout, f"for {layout}", folder, onnx, layout=layout)
    elif onnx or formats.get("web"):
        web, ort_web = bool(formats.get("web")), formats.get("ort_web")
        export("ONNX", "ONNX", folder / "onnx", onnx or True, web=web, ort_web=ort_web)
    if litert:
        export("LiteRT", "LiteRT", folder / "litert", litert=litert)
    figures = {name: _describe_verification(result) for name, result in results.items()}
    return ExportedPolicy({name: Path(result.path) for name, result in results.items()}, figures)


def _describe_verification(result: ExportResult) -> str:
    """Describes how well an export agrees with its policy."""
    difference = f"largest relative difference {result.parity.largest_difference:.1e}"
    if result.agreement is None:
        return f"verified: {difference}"
    agreement = result.agreement
    share = f"{agreement.equal_actions:.1%} of its actions on {agreement.observations}"
    return f"verified: {difference}; {share} random observations are the policy's"


def load_tensorflow_with_status(console: Console) -> None:
    """Imports TensorFlow, which takes a while."""
    with console.status("loading TensorFlow"):
        load_tensorflow()


def print_files(
    console: Console, files: Mapping[str, Path], notes: Mapping[str, str] | None = None
) -> None:
    """Prints paths without line breaks, so that they can be copied.

    Args:
        console: to print to.
        files: the paths by name; those that do not exist are left out.
        notes: texts after paths, by name.
    """
    existing = {name: path for name, path in files.items() if path.exists()}
    width = max(map(len, existing), default=0)
    for name, path in existing.items():
        note = f"  {notes[name]}" if notes and name in notes else ""
        line = Text.assemble((f"{name:{width}}  ", "dim"), shorten_path(path), (note, "dim"))
        console.print(line, soft_wrap=True, highlight=False)
