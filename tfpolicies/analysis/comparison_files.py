"""Writes the page and the pictures of a comparison."""

from __future__ import annotations

from pathlib import Path

from tfpolicies.analysis.comparison_page import SectionPictures, make_page
from tfpolicies.analysis.comparison_plots import draw_curves, draw_final_returns, draw_statistics
from tfpolicies.analysis.comparison_results import (
    ComparisonFiles,
    ComparisonResult,
    EnvComparison,
    Findings,
)
from tfpolicies.analysis.comparison_videos import read_videos
from tfpolicies.analysis.run_summary import choose_statistics
from tfpolicies.reporting.run_folder import to_file_name
from tfpolicies.system.atomic import make_folder, write_atomically

_PAGE = "index.html"


def write_files(comparison: ComparisonResult, folder: Path, find: Findings) -> ComparisonFiles:
    """Writes the page, and the curves and the final returns of each environment as PNG."""
    make_folder(folder)
    drawn = [_draw(comparison, section) for section in comparison.sections]
    pictures = {}
    for name, section in zip(_make_names(comparison), drawn, strict=True):
        pictures[folder / f"curves-{name}.png"] = section.curves.png
        pictures[folder / f"final-{name}.png"] = section.final.png
    for path, png in pictures.items():
        write_atomically(path, png)
    videos = read_videos(result.group for result in comparison.groups)
    page = make_page(comparison, drawn, videos, find)
    write_atomically(folder / _PAGE, page.encode("utf-8", errors="replace"))
    return ComparisonFiles(folder / _PAGE, tuple(pictures))


def _draw(comparison: ComparisonResult, section: EnvComparison) -> SectionPictures:
    runs = [run for result in section.groups for run in result.group.runs]
    names = choose_statistics(runs)
    return SectionPictures(
        draw_curves(comparison, section),
        draw_final_returns(section),
        draw_statistics(comparison, section, names) if names and len(section.grid) else None,
        names,
    )


def _make_names(comparison: ComparisonResult) -> list[str]:
    """Returns a different file name for each environment."""
    names: list[str] = []
    for section in comparison.sections:
        name = to_file_name(f"env-{section.env}").removeprefix("env-")
        names.append(f"{name}-{len(names)}" if name in names else name)
    return names
