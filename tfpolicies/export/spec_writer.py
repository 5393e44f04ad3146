"""Shared by all exports: the spec file, the result and the errors."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies._version import __version__
from tfpolicies.errors import ExportError
from tfpolicies.export.action_agreement import Agreement
from tfpolicies.export.distribution import describe_distribution
from tfpolicies.export.model_card import (
    CARD_FILE,
    ModelCard,
    format_card,
    format_spec,
    make_card_entry,
)
from tfpolicies.export.serving_functions import ServingFunctions, ServingPort
from tfpolicies.export.spec_file import SPEC_FILE
from tfpolicies.export.verify import Parity
from tfpolicies.models.distributions.noise import merge_blocks
from tfpolicies.models.ports import NOISE
from tfpolicies.storage.manifest import sha256
from tfpolicies.storage.spaces_json import encode_space

FORMAT = "tfpolicies.policy_spec"
FORMAT_VERSION = 2
_PACKAGES = {
    "saved_model": (),
    "onnx": ("tf2onnx", "onnx", "onnxruntime"),
    "litert": ("ai_edge_litert",),
}
"""The packages that wrote each kind of artefact, besides TensorFlow and Keras."""


class ExportResult(NamedTuple):
    """The path of an export, and its agreement with the policy."""

    path: Path  # a version folder, a folder for an engine, or a file such as model.onnx
    parity: Parity
    use: str  # a sentence: how to load it
    agreement: Agreement | None = None  # of greedy actions, for LiteRT

    def __str__(self) -> str:
        """Returns a text with the path, the agreement, and how to load it."""
        parity, agreement = self.parity, self.agreement
        text = (
            f"{self.path}: agrees with the policy on {parity.observations} observations, to "
            f"{parity.largest_difference:.1e}."
        )
        if agreement is not None:
            kind = "given" if agreement.given else "random"
            text += (
                f" {agreement.equal_actions:.1%} of its actions on {agreement.observations} {kind} "
                "observations are the policy's."
            )
        return f"{text} {self.use}"


def write_spec(
    folder: Path,
    artefact: str,
    serving: ServingFunctions,
    parity: Parity,
    card: ModelCard,
    files: Mapping[str, str] | None = None,
    **entries: object,
) -> None:
    """Writes `policy_spec.json`, with everything that a program needs to use the export.

    Also writes `MODEL_CARD.md`, for readers.

    Args:
        folder: of the files.
        artefact: "saved_model", "onnx" or "litert".
        serving: has inputs and outputs, spaces and policy class.
        parity: the result of the verification.
        card: the known facts of the policy.
        files: of each signature, in the folder; None for a SavedModel.
        **entries: additional entries of this format.
    """
    program = serving.program
    spec = program.spec
    if files is not None:
        digests = {name: sha256((folder / name).read_bytes()) for name in files.values()}
        entries = {"files": files, "sha256": digests, **entries}
    blocks = merge_blocks([("normal", program.ports.noise_size), *spec.dist_class.noise_blocks])
    outputs = [_port_to_json(port) for port in serving.outputs]
    packages = "tensorflow", "keras", *_PACKAGES[artefact]
    versions = {name: importlib.import_module(name).__version__ for name in packages}
    record: Mapping[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "artefact": artefact,
        **entries,
        "policy_class": spec.policy_class.__name__,
        "versions": {"tfpolicies": __version__, **versions},
        "observation_space": encode_space(spec.observation_space),
        "action_space": encode_space(spec.action_space),
        "signatures": {
            name: {"inputs": [_port_to_json(port) for port in ports], "outputs": outputs}
            for name, ports in serving.inputs.items()
        },
        "views": [
            {
                "name": view.name,
                "column": view.source,
                "shifts": list(view.shifts),
                "window": view.is_window,
                "inputs": [port.name for port in view.ports],
            }
            for view in program.ports.views
        ],
        "noise": {
            "input": NOISE,
            "blocks": [list(block) for block in blocks],
            "size": serving.explorer.noise_size,
        },
        "distribution": describe_distribution(program),
        "parity": parity.to_json(),
        "card": make_card_entry(card),
    }
    (folder / SPEC_FILE).write_text(format_spec(record), encoding="utf-8")
    (folder / CARD_FILE).write_text(format_card(record), encoding="utf-8")


def _port_to_json(serving_port: ServingPort) -> dict[str, Any]:
    port, axes = serving_port
    record = {
        "name": port.name,
        "dtype": port.dtype.name,
        "shape": [*["batch", "time"][:axes], *port.shape],
    }
    return {**record, "path": list(port.path)}


@contextlib.contextmanager
def wrap_export_errors(label: str, target: Path) -> Iterator[None]:
    """Converts any error in the block to an `ExportError` that names the target."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ExportError(
            f"The policy could not be exported as {label} to {str(target)!r}, which is unchanged. "
            f"Reason: {type(error).__name__}: {reason}"
        ) from error
