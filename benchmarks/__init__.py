"""Measurements of tfpolicies against its peers and against the bare environment."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
RESULTS = FOLDER / "results"
