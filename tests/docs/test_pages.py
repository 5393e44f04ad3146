"""The code of all pages runs, with small numbers."""

import pytest

from tools.site.code_blocks import ROOT, get_pages, read_code_blocks
from tools.site.run_page import run_in_process

PAGES = [page for page in get_pages() if any(not b.not_run for b in read_code_blocks(page))]


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path):
    result = run_in_process(page, tmp_path, quick=True)
    assert result.returncode == 0, result.stdout[-5000:]
