"""Drawings of the concept pages, as SVG that follows the page's colours."""

from __future__ import annotations


def make_drawings() -> dict[str, str]:
    """Returns drawings by their path in the site's source."""
    return {}
