"""Builds the documentation site: `python -m tools.site.build`.

The pages in `docs` and the files of the project that are pages too are copied to
`build/site_source`, with their links adjusted. Generated pages are added, and Zensical makes the
site in `build/site`. A warning of Zensical, a link without a target and a request to another host
are errors.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

from tools.site.algorithms_page import make_algorithms_page
from tools.site.api_pages import make_api_pages
from tools.site.code_blocks import DOCS, ROOT, is_published
from tools.site.command_line_page import make_command_line_page
from tools.site.drawings import make_drawings
from tools.site.errors_page import make_errors_page
from tools.site.file_formats_page import make_file_formats_page
from tools.site.metrics_page import make_metrics_page
from tools.site.settings_page import make_settings_page

CONFIG = ROOT / "mkdocs.yml"
STAGING = ROOT / "build" / "site_source"
SITE = ROOT / "build" / "site"

PROJECT_PAGES = {  # files outside `docs` that are pages of the site
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "tables/speed.md",
    "examples/README.md": "examples/index.md",
}
REDIRECTS = {  # former pages
    "README.html": "index.html",
    "browser.html": "howto/browser.html",
    "data.html": "tutorials/data.html",
    "engines.html": "howto/engines.html",
    "extending.html": "howto/extending/index.html",
    "importing.html": "migrate/importing.html",
    "learning.html": "tables/learning.html",
    "models.html": "howto/models.html",
    "porting.html": "migrate/rllib.html",
    "serving.html": "howto/serving.html",
    "testing.html": "howto/testing.html",
    "tuned.html": "tables/tuned.html",
}

GENERATORS: tuple[Callable[[], dict[str, str]], ...] = (
    make_api_pages,
    make_settings_page,
    make_metrics_page,
    make_command_line_page,
    make_errors_page,
    make_file_formats_page,
    make_algorithms_page,
    make_drawings,
)
"""Functions that return the text of generated files by their path in the site's source."""

_LINK = re.compile(r"(!?\[[^\]\n]*\]\()([^)\s]+)(\))|^( *\[[^\]]+\]: )(\S+)(.*)")
_WORKER_SHIM = "https://unpkg.com/iframe-worker/shim"  # in pages that Zensical makes
_FENCE = re.compile(r"^ *```")


class SiteError(Exception):
    """The site has faults; the message lists them."""


def stage() -> None:
    """Writes the source of the site to `STAGING`."""
    shutil.rmtree(STAGING, ignore_errors=True)
    sources = _get_sources()
    for source, target in sorted(sources.items()):
        path = STAGING / target
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            path.write_text(_adjust_links(source, sources), encoding="utf-8")
        else:
            shutil.copyfile(source, path)
    for generate in GENERATORS:
        for name, text in generate().items():
            path = STAGING / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _get_sources() -> dict[Path, str]:
    """Returns the target of each file of the site's source, relative to `STAGING`."""
    sources = {ROOT / name: target for name, target in PROJECT_PAGES.items()}
    for path in DOCS.rglob("*"):
        is_page = path.suffix == ".md" and is_published(path)
        if path.is_file() and (is_page or path.suffix != ".md"):
            sources[path] = path.relative_to(DOCS).as_posix()
    for path in (DOCS / "decisions").glob("*.md"):
        sources[path] = f"project/decisions/{path.name}"
    tracked = subprocess.run(
        ["git", "ls-files", "examples"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in tracked.stdout.split():
        sources.setdefault(ROOT / name, name)
    return sources


def _adjust_links(source: Path, targets: Mapping[Path, str]) -> str:
    """Returns a page whose relative links lead to the targets of the linked files.

    Args:
        source: the page.
        targets: of all files of the site; see `_get_sources`.

    Raises:
        SiteError: if a linked file is not part of the site.
    """
    target, faults = targets[source], []

    def adjust(match: re.Match[str]) -> str:
        left, link, right = (match[i] or match[i + 3] for i in (1, 2, 3))
        path, hash_sign, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        linked = Path(os.path.normpath(source.parent / path))
        if linked.is_dir():
            linked /= "README.md"
        if linked in targets:
            relative = posixpath.relpath(targets[linked], posixpath.dirname(target))
            return f"{left}{relative}{hash_sign}{anchor}{right}"
        if not _is_generated(target, path):
            faults.append(f"{source.relative_to(ROOT)}: {link}")
        return match[0]

    lines, is_code = [], False
    for line in source.read_text(encoding="utf-8").splitlines(keepends=True):
        is_fence = _FENCE.match(line) is not None
        is_code ^= is_fence
        lines.append(line if is_code or is_fence else _LINK.sub(adjust, line))
    if faults:
        raise SiteError("Links to files that the site does not have:\n" + "\n".join(faults))
    return "".join(lines)


def _is_generated(target: str, link: str) -> bool:
    """Returns whether a link of a page may lead to a generated page; Zensical checks these."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(target), link))
    return path.startswith(("reference/", "tables/algorithms", "drawings/"))


def build() -> None:
    """Builds the site in `SITE`.

    Raises:
        SiteError: if a page has a fault.
    """
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(CONFIG)]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if result.returncode:
        raise SiteError("Zensical reported faults.")
    for page in SITE.rglob("*.html"):
        home = posixpath.relpath(".", page.relative_to(SITE).parent.as_posix())
        html = page.read_text(encoding="utf-8")
        html = html.replace(_WORKER_SHIM, f"{home}/assets/file-worker.js")
        page.write_text(html, encoding="utf-8")
    for old, new in REDIRECTS.items():
        if not (SITE / new).exists():
            raise SiteError(f"{old} leads to {new}, which does not exist.")
        (SITE / old).write_text(_make_redirect(new), encoding="utf-8")
    faults = [
        f"{page.relative_to(SITE)}: {url}"
        for page in sorted(SITE.rglob("*.html"))
        for url in find_outside_requests(page.read_text(encoding="utf-8"))
    ]
    if faults:
        raise SiteError("Requests to other hosts:\n" + "\n".join(faults))


def _make_redirect(target: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Moved</title>'
        f'<meta http-equiv="refresh" content="0; url={target}">'
        f'<p>This page has moved to <a href="{target}">{target}</a>.</p></html>\n'
    )


def find_outside_requests(html: str) -> Iterator[str]:
    """Yields the addresses on other hosts that a browser loads to show a page."""
    parser = _RequestParser()
    parser.feed(html)
    yield from parser.urls


class _RequestParser(HTMLParser):
    _ATTRIBUTES = ("src", "srcset", "data", "poster")
    _LOADED = ("stylesheet", "icon", "preconnect", "prefetch", "preload", "dns-prefetch")

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        urls = [values[name] for name in self._ATTRIBUTES if name in values]
        if tag == "link" and any(kind in self._LOADED for kind in values.get("rel", "").split()):
            urls.append(values.get("href", ""))
        urls += re.findall(r"url\(['\"]?([^'\")]+)", values.get("style", ""))
        self.urls += [url for url in urls if re.match(r"(https?:)?//", url)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", action="store_true", help="only write the source of the site")
    args = parser.parse_args()
    try:
        stage() if args.stage else build()
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
