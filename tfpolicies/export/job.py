"""What is exported and how: the options that the writers of all forms share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.export.web import WebPage
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.onnx import OPSET
from tfpolicies.state import PolicyState


class ExportJob(NamedTuple):
    """A policy to export, and where to."""

    program: Program
    state: PolicyState  # a copy, which learning elsewhere does not change
    target: Path  # the folder; made if missing
    opset: int = OPSET  # of ONNX's operators
    page: WebPage | None = None  # for the browser, beside the ONNX files
    weights: str = "float32"  # how LiteRT stores them
    observations: Any = None  # to compare actions of LiteRT on; None for random ones
