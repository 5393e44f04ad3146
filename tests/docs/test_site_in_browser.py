"""The site in Chromium: readable on phones and in the dark, accessible, searchable offline.

Set `SITE_PICTURES` to a folder to get a picture of each page.
"""

import os
from pathlib import Path

import pytest

from helpers.chromium import served
from tools.site import build

pytestmark = pytest.mark.browser

PAGES = [
    "index.html",
    "start/first-policy.html",
    "tutorials/data.html",
    "howto/serving.html",
    "howto/extending/loss.html",
    "migrate/rllib.html",
    "concepts/runtimes.html",
    "reference/settings.html",
    "reference/api/policies.html",
    "tables/tuned.html",
]


@pytest.fixture(scope="module")
def site():
    if not (build.SITE / "index.html").exists():
        build.build()
    with served(build.SITE) as address:
        yield address


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_readable_and_accessible(chromium, browser_tools, site, page, width, dark):
    chromium.do("open", url=site + page, width=width, height=900, dark=dark)
    chromium.do("wait", until="document.readyState === 'complete'")
    pictures = os.environ.get("SITE_PICTURES")
    if pictures:
        name = (
            f"{page.replace('/', '-').removesuffix('.html')}-{width}{'-dark' if dark else ''}.png"
        )
        chromium.do("picture", path=str(Path(pictures, name)), full=False)
    assert chromium.do("run", script="return document.documentElement.scrollWidth") <= width
    axe = (browser_tools / "node_modules" / "axe-core" / "axe.min.js").read_text()
    script = f"{axe}\nreturn (await axe.run()).violations"
    serious = [
        (violation["id"], [node["html"][:120] for node in violation["nodes"][:3]])
        for violation in chromium.do("run", script=script)
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []
    assert chromium.do("complaints") == []


@pytest.mark.parametrize("source", ["server", "file system"])
def test_the_search_finds_a_setting(chromium, site, source):
    home = site if source == "server" else f"{build.SITE.as_uri()}/"
    chromium.do("open", url=f"{home}index.html", width=1200, height=900)
    chromium.do("click", at=".md-search__button")
    chromium.do("fill", at='input[aria-label="Search"]', text="sgd_minibatch_size")
    assert int(chromium.do("text", at="text=/\\d+ results?/").split()[0]) > 0
    assert chromium.do("complaints") == []
