"""Reads the long description; all other metadata is in `setup.cfg`.

A package index shows the README without the repository, where relative links lead nowhere. So they
become plain text, and relative pictures are left out. With a `Source` in the `project_urls` of
`setup.cfg`, links lead there instead.
"""

import configparser
import re
from pathlib import Path

from setuptools import setup


def make_long_description() -> str:
    """Returns the README without relative links and pictures."""
    config = configparser.ConfigParser(interpolation=None)
    config.read("setup.cfg", encoding="utf-8")
    urls = config.get("metadata", "project_urls", fallback="")
    source = re.search(r"^\s*Source\s*=\s*(\S+?)/?$", urls, re.MULTILINE)
    text = Path("README.md").read_text(encoding="utf-8")
    picture, link = r"!\[[^]]*\]\((?!https?:)[^)]*\)", r"\[([^]]*)\]\((?!https?:|#)([^)]*)\)"
    lines = [line for line in text.splitlines() if not re.search(picture, line)]
    text = re.sub(r"\n\| \| \|\n\|[-|]*\n(?!\|)", "\n", "\n".join(lines) + "\n")  # empty tables
    return re.sub(link, rf"[\1]({source[1]}/blob/main/\2)" if source else r"\1", text)


setup(
    long_description=make_long_description(),
    long_description_content_type="text/markdown",
)
