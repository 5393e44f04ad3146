"""Draws the subpackages and their imports: `python -m tools.subpackages` writes the picture.

Arrows show which subpackage imports which, without those that a longer way shows as well. A test
compares the picture in `docs/images` with the code.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import html
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfpolicies"
PICTURE = ROOT / "docs" / "images" / "subpackages.svg"

LAYERS = {
    "Base": ("base", "system"),
    "Data and models": (
        *("batch", "config", "connectors", "envs", "exploration", "models"),
        *("offline", "replay", "reporting", "storage"),
    ),
    "Programs and runtimes": ("program", "export"),
    "Policies": ("policy", "policy_map", "importers"),
    "Rollout, training, serving": (
        "rollout",
        "distributed",
        "algorithms",
        "analysis",
        "loggers",
        "testing",
        "tuning",
        "serving",
    ),
    "Applications": ("compat", "extending", "cli", "__main__"),
}
"""Layers from the lowest to the highest: each imports itself and those below it."""

EVERYWHERE = ("errors", "_version")
"""Modules that import nothing and that all may import."""

Graph = dict[str, set[str]]

_WIDTH, _BOX, _ROW, _MARGIN, _LABEL = 960, 104, 62, 14, 200


@functools.cache
def imported_names(path: Path) -> frozenset[str]:
    """Returns everything of the package that a file imports, in functions and annotations too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(name for name in names if name.startswith("tfpolicies."))


def get_subpackage(path: Path) -> str:
    """Returns the subpackage or root module that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    """Returns the package's files but for its `__init__`."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def import_graph() -> Graph:
    """Returns the subpackages with those that each of them imports."""
    graph: Graph = {name: set() for layer in LAYERS.values() for name in layer}
    for path in modules():
        importer = get_subpackage(path)
        if importer not in EVERYWHERE:
            imported = {name.split(".")[1] for name in imported_names(path)}
            graph[importer] |= imported - {importer, *EVERYWHERE, "__version__"}
    return graph


def reduce_transitively(graph: Graph) -> Graph:
    """Removes each import that a longer way of imports implies.

    Raises:
        graphlib.CycleError: if subpackages import each other in a circle.
    """
    reachable: Graph = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        reachable[name] = set(graph[name]).union(*(reachable[below] for below in graph[name]))
    return {
        name: {one for one in below if not any(one in reachable[other] for other in below)}
        for name, below in graph.items()
    }


def draw(graph: Graph) -> str:
    """Returns the picture as SVG: a band for each layer, the lowest at the bottom."""
    graph = reduce_transitively(graph)
    rows = _arrange(graph)
    places = {
        name: (_LABEL + (_WIDTH - _LABEL) * (column + 0.5) / len(row), _MARGIN + index * _ROW)
        for index, (_, row) in enumerate(rows)
        for column, name in enumerate(row)
    }
    height = len(rows) * _ROW + 2 * _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="14">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#778"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    lines += _draw_bands(rows)
    for name in sorted(graph):
        lines += [_draw_arrow(places[name], places[below]) for below in sorted(graph[name])]
    lines += [_draw_box(name, *places[name]) for name in sorted(places)]
    return "\n".join([*lines, "</svg>", ""])


def _arrange(graph: Graph) -> list[tuple[str, list[str]]]:
    """Returns rows from the top to the bottom: the title of a layer, and names side by side."""
    rows: list[tuple[str, list[str]]] = []
    for title, layer in LAYERS.items():
        depths: dict[str, int] = {}
        for name in graphlib.TopologicalSorter(graph).static_order():
            if name in layer:
                below = [depths[other] for other in graph[name] if other in layer]
                depths[name] = max(below, default=-1) + 1
        for depth in range(max(depths.values()) + 1):
            rows.append((title, [name for name in layer if depths[name] == depth]))
    return rows[::-1]


def _draw_bands(rows: list[tuple[str, list[str]]]) -> Iterator[str]:
    for number, title in enumerate(reversed(LAYERS)):
        indices = [index for index, (name, _) in enumerate(rows) if name == title]
        top = _MARGIN / 2 + indices[0] * _ROW
        shade = "#f2f5f9" if number % 2 else "#e6ebf2"
        yield (
            f'<rect x="0" y="{top:g}" width="{_WIDTH}" height="{len(indices) * _ROW}" '
            f'fill="{shade}"/>'
        )
        middle = top + len(indices) * _ROW / 2 + 5
        yield f'<text x="10" y="{middle:g}" fill="#334">{html.escape(title)}</text>'


def _draw_arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = (start[0], start[1] + 34), end
    bend = (y2 - y1) / 2
    return (
        f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} '
        f'{x2:.0f} {y2:.0f}" fill="none" stroke="#778" marker-end="url(#head)"/>'
    )


def _draw_box(name: str, x: float, y: float) -> str:
    return (
        f'<rect x="{x - _BOX / 2:.0f}" y="{y:.0f}" width="{_BOX}" height="34" rx="5" '
        f'fill="white" stroke="#345"/><text x="{x:.0f}" y="{y + 22:.0f}" '
        f'text-anchor="middle">{html.escape(name)}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(import_graph()))
