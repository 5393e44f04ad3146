"""The reference of file formats, from the docstrings of the code that writes them."""

from __future__ import annotations

import inspect
import re

from tfpolicies.offline import json_lines, parquet_files
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.storage import checkpoint, json_values, stash

SECTIONS: dict[str, object] = {
    "Run folder": RunFolder,
    "Checkpoint": checkpoint,
    "Values in JSON": json_values,
    "Stash of policies": stash,
    "Parquet files of experience": parquet_files,
    "JSON lines of experience": json_lines,
}
"""The object whose docstring describes a format, by title."""

_INTRODUCTION = """# File formats

All files are JSON, HDF5, CSV, Parquet, ONNX or SavedModel, or raw numbers after a header. None of
them is a pickle, and reading one executes no code. [Metrics](metrics.md) lists the columns of
`progress.csv`.
"""
_GOOGLE_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$", re.MULTILINE)


def make_file_formats_page() -> dict[str, str]:
    """Returns the page by its path in the site's source."""
    sections = [
        f"\n## {title}\n\n{convert_docstring(inspect.getdoc(item) or '')}\n"
        for title, item in SECTIONS.items()
    ]
    return {"reference/file-formats.md": _INTRODUCTION + "".join(sections)}


def convert_docstring(text: str) -> str:
    r"""Returns the description of a docstring as Markdown, without its sections of arguments.

    >>> print(convert_docstring("Writes::\n\n    a 1\n\nArgs:\n    x: a number."))
    Writes:
    <BLANKLINE>
    ```text
    a 1
    ```
    """
    description = _GOOGLE_SECTION.split(text)[0].rstrip()
    lines: list[str] = []
    is_literal = is_table = False
    for line in description.splitlines():
        if re.fullmatch(r"=+( +=+)*", line):
            lines += [] if is_table else ["```text"]
            is_table = True
            continue
        if is_literal and line and not line.startswith("    "):
            lines[-1:] = ["```", ""]
            is_literal = False
        if line.endswith("::") and not is_table:
            lines += [line[:-1], "", "```text"]
            is_literal = True
        elif not (is_literal and lines[-1] == "```text" and not line):
            lines.append(line[4:] if is_literal else line)
    if is_literal or is_table:
        lines.append("```")
    return "\n".join(lines)
