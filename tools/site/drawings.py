"""Drawings of the concept pages, as SVG that takes its colours from the page.

A page includes a drawing by `--8<-- "drawings/<name>.svg"`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field

_TEXT_SIZE, _LINE = 13, 18
_BOLD = ' font-weight="600"'
_STYLE = 'font-family="inherit" font-size="{size}" fill="currentColor"'


@dataclass(frozen=True)
class Box:
    """A box with lines of text; the first one is its title.

    Attributes:
        x: of the left side, in pixels.
        y: of the upper side.
        width: in pixels.
        lines: of text.
        is_strong: whether it is emphasised by a thicker border.
    """

    x: int
    y: int
    width: int
    lines: tuple[str, ...]
    is_strong: bool = False

    @property
    def height(self) -> int:
        return _LINE * len(self.lines) + 16

    def get_side(self, side: str) -> tuple[int, int]:
        """Returns the middle of a side: "left", "right", "top" or "bottom"."""
        middle_x, middle_y = self.x + self.width // 2, self.y + self.height // 2
        return {
            "left": (self.x, middle_y),
            "right": (self.x + self.width, middle_y),
            "top": (middle_x, self.y),
            "bottom": (middle_x, self.y + self.height),
        }[side]


@dataclass(frozen=True)
class Arrow:
    """An arrow between the sides of two boxes, with a label at its middle."""

    start: str  # "name.side"
    end: str
    label: str = ""
    is_double: bool = False


@dataclass(frozen=True)
class Drawing:
    """Boxes by name, and arrows between them.

    Attributes:
        title: for screen readers, with all that the drawing says.
        width: in pixels.
        height: in pixels.
        boxes: by name.
        arrows: between them.
    """

    title: str
    width: int
    height: int
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...] = field(default=())

    def to_svg(self, name: str) -> str:
        """Returns the drawing as an element of a page."""
        title = html.escape(self.title)
        parts = [
            '<div class="tfp-drawing" tabindex="0" role="region" aria-label="Drawing">'
            f'<svg role="img" aria-labelledby="{name}-title" '
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" xmlns="http://www.w3.org/2000/svg">',
            f'<title id="{name}-title">{title}</title>',
            f'<defs><marker id="{name}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse">'
            '<path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker></defs>',
            *(self._draw_box(box) for box in self.boxes.values()),
            *(self._draw_arrow(arrow, name) for arrow in self.arrows),
            "</svg></div>",
        ]
        return "".join(parts) + "\n"

    def _draw_box(self, box: Box) -> str:
        width = 2.5 if box.is_strong else 1.2
        text = "".join(
            f'<text x="{box.x + 12}" y="{box.y + 22 + _LINE * i}" {_STYLE.format(size=_TEXT_SIZE)}'
            f"{_BOLD if i == 0 else ''}>{html.escape(line)}</text>"
            for i, line in enumerate(box.lines)
        )
        return (
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" '
            f'fill="var(--md-code-bg-color, none)" stroke="currentColor" stroke-width="{width}"/>'
            f"{text}"
        )

    def _draw_arrow(self, arrow: Arrow, name: str) -> str:
        (x1, y1), (x2, y2) = self._get_point(arrow.start), self._get_point(arrow.end)
        start = f' marker-start="url(#{name}-head)"' if arrow.is_double else ""
        line = (
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="currentColor" '
            f'stroke-width="1.5"{start} marker-end="url(#{name}-head)"/>'
        )
        if not arrow.label:
            return line
        is_vertical = abs(x1 - x2) < abs(y1 - y2)
        x, y = (x1 + x2) // 2, (y1 + y2) // 2
        x, y, anchor = (x + 8, y + 4, "start") if is_vertical else (x, y - 6, "middle")
        return (
            f'{line}<text x="{x}" y="{y}" text-anchor="{anchor}" {_STYLE.format(size=12)}>'
            f"{html.escape(arrow.label)}</text>"
        )

    def _get_point(self, text: str) -> tuple[int, int]:
        box, _, side = text.partition(".")
        return self.boxes[box].get_side(side)


DRAWINGS = {
    "program-and-state": Drawing(
        "Three policies, each with its own state of arrays, share one Program, whose functions are "
        "compiled once.",
        700,
        250,
        {
            "main": Box(
                10, 10, 200, ("state of main", "weights, optimizer,", "random generator, ...")
            ),
            "v1": Box(10, 90, 200, ("state of main_v1 (frozen)", "weights")),
            "v2": Box(
                10, 152, 200, ("state of main_v2", "weights, optimizer,", "random generator, ...")
            ),
            "program": Box(
                *(330, 58, 160),
                ("Program", "choose actions", "loss and gradients", "update"),
                True,
            ),
            "runtime": Box(580, 67, 110, ("Runtimes", "tf.function", "session", "onnx (acting)")),
        },
        (
            Arrow("main.right", "program.left"),
            Arrow("v1.right", "program.left"),
            Arrow("v2.right", "program.left"),
            Arrow("program.right", "runtime.left", "runs on"),
        ),
    ),
    "runtimes": Drawing(
        "The functions of a Program run as traced functions, in graph mode, or in ONNX Runtime. "
        "The same noise gives the same actions.",
        700,
        250,
        {
            "noise": Box(10, 30, 180, ("noise", "from the policy's", "random generator")),
            "weights": Box(10, 132, 180, ("state", "weights and", "hyperparameters")),
            "program": Box(280, 82, 140, ("Program", "one code for", "all runtimes"), True),
            "function": Box(500, 10, 190, ("function", "tf.function and XLA:", "acts and learns")),
            "session": Box(500, 92, 190, ("session", "graph mode:", "acts and learns")),
            "onnx": Box(500, 174, 190, ("onnx", "ONNX Runtime:", "acts, on the CPU")),
        },
        (
            Arrow("noise.right", "program.left"),
            Arrow("weights.right", "program.left"),
            Arrow("program.right", "function.left"),
            Arrow("program.right", "session.left"),
            Arrow("program.right", "onnx.left"),
        ),
    ),
    "paging": Drawing(
        "Handles of policies stay valid. Their states are in memory up to the capacity of the map, "
        "otherwise in files of the stash. One state at a time is loaded for learning.",
        700,
        210,
        {
            "handles": Box(10, 62, 170, ("handles", 'map["main"]', 'map["main_v1"]', "...")),
            "memory": Box(
                270,
                62,
                180,
                (
                    "states in memory",
                    "at most the capacity,",
                    "of the policies that",
                    "were used last",
                ),
            ),
            "learner": Box(530, 10, 160, ("learner", "variables of the", "Program")),
            "stash": Box(530, 130, 160, ("stash", "files that processes", "share")),
        },
        (
            Arrow("handles.right", "memory.left"),
            Arrow("memory.right", "learner.left", is_double=True),
            Arrow("memory.right", "stash.left", is_double=True),
        ),
    ),
    "checkpoints": Drawing(
        "A checkpoint is written in three steps: array files with names of their content, then the "
        "manifest, which replaces the old one atomically, then the removal of files without use.",
        700,
        110,
        {
            "arrays": Box(
                10, 20, 200, ("1. array files", "HDF5, named by content,", "flushed to disk")
            ),
            "manifest": Box(
                250, 20, 200, ("2. manifest", "JSON with checksums,", "replaced atomically"), True
            ),
            "cleanup": Box(
                490, 20, 200, ("3. removal", "of files that the new", "manifest does not name")
            ),
        },
        (
            Arrow("arrays.right", "manifest.left"),
            Arrow("manifest.right", "cleanup.left"),
        ),
    ),
    "actions": Drawing(
        "An observation passes connectors, the observation filter and the encoding to the network. "
        "Its outputs and noise give an action of the policy, which is mapped to the environment's.",
        700,
        230,
        {
            "obs": Box(10, 20, 130, ("observation", "raw, possibly", "nested")),
            "connectors": Box(190, 20, 130, ("connectors", "if configured,", "not exported")),
            "encode": Box(370, 20, 140, ("filter, encoding", "running mean and", "variance")),
            "model": Box(560, 20, 130, ("network", "inputs of the", "distribution")),
            "sample": Box(560, 140, 130, ("action", "mode, or sample", "from noise"), True),
            "map": Box(
                340, 140, 160, ("normalize_actions", "from [-1, 1] to the", "bounds of the Box")
            ),
            "env": Box(130, 140, 150, ("environment", "gets an action of", "its action space")),
        },
        (
            Arrow("obs.right", "connectors.left"),
            Arrow("connectors.right", "encode.left"),
            Arrow("encode.right", "model.left"),
            Arrow("model.bottom", "sample.top"),
            Arrow("sample.left", "map.right"),
            Arrow("map.left", "env.right"),
        ),
    ),
}


def make_drawings() -> dict[str, str]:
    """Returns the drawings by their path in the site's source."""
    return {f"drawings/{name}.svg": drawing.to_svg(name) for name, drawing in DRAWINGS.items()}
