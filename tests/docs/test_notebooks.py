"""The notebooks run, with small numbers, and show a bar, pictures and videos."""

import pytest

pytestmark = pytest.mark.docs

OUTPUTS = {
    "quick_start": ["<progress", "image/png", "video/mp4"],
    "your_own_model": ["<progress", "image/png", "video/mp4"],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_notebook_runs_and_shows_its_results(name):
    from tools.site.notebooks import FOLDER, run_notebook

    notebook = run_notebook(FOLDER / f"{name}.ipynb", quick=True)
    text = str([cell.get("outputs") for cell in notebook.cells])
    assert [part for part in OUTPUTS[name] if part not in text] == []
