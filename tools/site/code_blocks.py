"""The code of a documentation page, and the comments in the page that direct how it is run.

A page's blocks of Python and shell commands run in order, in one folder. Comments before a block,
which readers do not see, direct it:

``<!-- quick: 200_000 -> 2_000 -->``
    In a quick run, the first text is replaced by the second; it must be in the block.
``<!-- not run: needs a Kubernetes cluster -->``
    The block is not run, for this reason.
``<!-- picture: runs/robot/learning_curve.png -> robots.png -->``
    A full run copies this file of its folder to the pictures of the tutorials.
``<!-- file: my_env.py -->``
    The block is saved in this file, instead of being run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("python", "sh")
"""The languages that are run; others, such as `text` or `json`, are shown only."""

_FENCE = re.compile(r"^( *)```(\w*).*$")
_DIRECTIVE = re.compile(r"^ *<!-- (quick|not run|picture|file): (.*?) -->$")
_UNPUBLISHED = ("decisions", "drafts", "images")  # folders of `docs` without pages of the site


class PageError(Exception):
    """A page's directives are wrong; the message has the page and the line."""


@dataclass(frozen=True)
class CodeBlock:
    """A block of code of a page.

    Attributes:
        page: the file.
        line: of the first line of code, from 1.
        language: "python" or "sh".
        code: the text, without the page's indentation.
        replacements: pairs of texts for a quick run.
        not_run: why the block is not run; "" if it is.
        pictures: pairs of a file that the page writes and its name in the documentation.
        file: the file in which the code is saved instead of being run; "" if it is run.
    """

    page: Path
    line: int
    language: str
    code: str
    replacements: tuple[tuple[str, str], ...] = ()
    not_run: str = ""
    pictures: tuple[tuple[str, str], ...] = ()
    file: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def get_quick_code(self) -> str:
        """Returns the code with its replacements.

        Raises:
            PageError: if a text to replace is not in the code.
        """
        code = self.code
        for old, new in self.replacements:
            if old not in code:
                raise PageError(
                    f"{self}: the code does not contain {old!r}, which is to be replaced."
                )
            code = code.replace(old, new)
        return code


def get_pages() -> list[Path]:
    """Returns the README and all pages of the site."""
    pages = [path for path in sorted(DOCS.rglob("*.md")) if is_published(path)]
    return [ROOT / "README.md", *pages]


def is_published(path: Path) -> bool:
    """Returns whether a file in `docs` becomes a page of the site."""
    return path.relative_to(DOCS).parts[0] not in _UNPUBLISHED


def read_code_blocks(page: Path) -> list[CodeBlock]:
    """Returns the blocks of Python and shell commands of a page, in order.

    Raises:
        PageError: for a block without an end, and for a comment that directs no block.
    """
    blocks, directives = [], []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if directive := _DIRECTIVE.match(line):
            directives.append((directive[1], directive[2]))
        elif fence := _FENCE.match(line):
            start, indent = number, fence[1]
            while number < len(lines) and lines[number].strip() != "```":
                number += 1
            if number == len(lines):
                raise PageError(f"{page}:{start}: the block of code has no end.")
            if fence[2] in LANGUAGES:
                code = "".join(f"{text.removeprefix(indent)}\n" for text in lines[start:number])
                blocks.append(_make_block(page, start + 1, fence[2], code, directives))
                directives = []
            number += 1
        elif line.strip() and directives:
            raise PageError(f"{page}:{number}: no block of code follows the comment before it.")
    return blocks


def _make_block(
    page: Path, line: int, language: str, code: str, directives: list[tuple[str, str]]
) -> CodeBlock:
    return CodeBlock(
        page,
        line,
        language,
        code,
        tuple(_split(page, line, text) for kind, text in directives if kind == "quick"),
        "; ".join(text for kind, text in directives if kind == "not run"),
        tuple(_split(page, line, text) for kind, text in directives if kind == "picture"),
        next((text for kind, text in directives if kind == "file"), ""),
    )


def _split(page: Path, line: int, text: str) -> tuple[str, str]:
    left, arrow, right = text.partition(" -> ")
    if not arrow:
        raise PageError(f"{page}:{line}: the comment before it must be `A -> B`, got {text!r}.")
    return left, right
