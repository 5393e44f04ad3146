"""The options that the writers of all formats share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.export.model_card import ModelCard
from tfpolicies.export.web import WebPage
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.onnx import OPSET


class ExportJob(NamedTuple):
    """A policy to export, its destination and options."""

    program: Program
    state: PolicyState  # a copy, so that learning does not change it
    target: Path  # the folder; created if missing
    opset: int = OPSET  # of ONNX's operators
    page: WebPage | None = None  # for the browser, next to the ONNX files
    weights: str = "float32"  # their dtype in LiteRT files
    observations: Any = None  # to compare actions of LiteRT; None for random ones
    card: ModelCard = ModelCard()  # the known facts of the policy
