"""The code of all pages runs, with small numbers."""

import pytest

from tools.site.code_blocks import ROOT, get_pages, read_code_blocks
from tools.site.run_page import run_in_process
from tools.site.warm_start import WarmStart

SLOW = ["docs/tutorials/ray.md", "docs/howto/compare.md", "docs/howto/tuning.md", "README.md"]
"""Pages that start many processes: they come first, so that no worker is left with one."""

PAGES = sorted(
    (page for page in get_pages() if any(not b.not_run for b in read_code_blocks(page))),
    key=lambda page: str(page.relative_to(ROOT)) not in SLOW,
)


@pytest.fixture(scope="session")
def programs():
    with WarmStart() as warm_start:
        yield warm_start.bin


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, programs, tmp_path):
    result = run_in_process(page, tmp_path, quick=True, programs=programs)
    assert result.returncode == 0, result.stdout[-5000:]
