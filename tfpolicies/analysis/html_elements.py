"""Builds HTML from elements; all text is escaped unless it is `Html` already."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

_VOID = frozenset({"img", "meta", "source"})


class Html(str):
    """Text that is HTML markup; other texts are escaped when they become the content of one."""

    __slots__ = ()


def element(name: str, /, *content: object, **attributes: str | bool) -> Html:
    """Returns an element.

    Args:
        name: such as `"p"`.
        content: texts, which are escaped; `Html`; or numbers. None is left out.
        attributes: by name; `_` becomes `-`, and one at the end is dropped (`class_`). True is an
            attribute without a value, and False leaves it out.

    >>> element("p", "a < b", element("b", "c"), class_="x", hidden=True)
    '<p class="x" hidden>a &lt; b<b>c</b></p>'
    """
    texts = []
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is True:
            texts.append(f" {attribute}")
        elif value is not False:
            texts.append(f' {attribute}="{_escape(str(value))}"')
    start = f"<{name}{''.join(texts)}>"
    return Html(start if name in _VOID else f"{start}{join(content)}</{name}>")


def join(content: Iterable[object]) -> Html:
    """Returns texts and elements one after the other; texts are escaped."""
    parts = (part for part in content if part is not None)
    return Html("".join(x if isinstance(x, Html) else _escape(str(x)) for x in parts))


def _escape(text: str) -> str:
    """Escapes a text, and replaces control characters."""
    shown = (x if x.isprintable() or x in "\n\t" else "\ufffd" for x in text)
    return html.escape("".join(shown))


def make_table(
    caption: str,
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    numbers: bool = True,
) -> Html:
    """Returns a table in a region that scrolls on narrow pages.

    Args:
        caption: a short description of the table.
        header: of the columns.
        rows: of cells; the first cell is the header of its row.
        numbers: whether the cells after the first are aligned as numbers.
    """
    head = element("tr", *(element("th", text, scope="col") for text in header))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", x) for x in row[1:]))
        for row in rows
    ]
    table = element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *body),
        class_="numbers" if numbers else False,
    )
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def make_data_url(content: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
