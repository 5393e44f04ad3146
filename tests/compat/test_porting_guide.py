"""The porting guide: its tables, and links, sections and pages that the documentation names."""

import re
from pathlib import Path

import pytest

from tfpolicies import SACConfig
from tfpolicies.base import porting_tables as tables
from tfpolicies.compat import rllib_names
from tfpolicies.compat.rllib_extension import RECORDED_STATISTICS, RLlibExtension
from tfpolicies.config.migration_hints import find_setting_equivalent
from tfpolicies.config.rllib_settings import ALIASES

HOME = Path(__file__).parents[2]
GUIDE = HOME / "docs" / "migrate" / "rllib.md"
GUIDES = [GUIDE, *(HOME / "docs" / "migrate" / f"{name}.md" for name in ("sb3", "keras"))]
PAGES = sorted({*HOME.glob("*.md"), *HOME.glob("docs/**/*.md"), *HOME.glob("examples/*.md")})
PLACES = ("tfpolicies/**/*.py", "benchmarks/**/*.py", "tools/*.py", "tests/soak/*.py")
SOURCES = sorted({path for place in PLACES for path in HOME.glob(place)})


def table_lines() -> list[str]:
    names = GUIDE.read_text().partition("\n## Names\n")[2].partition("\n## ")[0]
    return [line for line in names.splitlines() if line.startswith(("| `", "| **"))]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


ROWS = [cells(line) for line in table_lines() if line.startswith("| `")]
"""Of the table: RLlib's names, what is here, and what differs."""


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page, by GitHub's rule for headings."""
    slugs = {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings(page)}
    return slugs | {*re.findall(r'<a id="([^"]*)">', page.read_text())}


def test_the_tables_of_the_guide_are_those_of_the_file():
    page = "".join(guide.read_text() for guide in GUIDES)
    headers = tables.RLLIB, tables.LATER_SETTINGS, tables.SB3, tables.KERAS
    for header in (*headers, *tables.SB3_SETTINGS):
        assert page.count(f"\n{header}\n|---|") == 1
    assert tables.update_tables(page) == page
    changed = page.replace("| `num_epochs` | `num_sgd_iter` |\n", "| `mine` | `yours` |\n")
    assert changed != page == tables.update_tables(changed)
    assert tables.update_tables("| Mine | here |\n|---|---|\n") == "| Mine | here |\n|---|---|\n"


def test_the_command_and_configs_go_by_the_tables():
    for old, new in (
        (("ray.rllib.policy.sample_batch", "SampleBatch"), ("tfpolicies", "SampleBatch")),
        (("ray.rllib.env", "EnvContext"), ("tfpolicies.compat", "EnvContext")),
        (("ray.train", "report"), ("tfpolicies.compat.tune", "report")),
    ):
        assert rllib_names.REPLACEMENTS[old] == new
    assert rllib_names.MODULES["ray.rllib.algorithms.ppo.ppo"] == "tfpolicies.algorithms.ppo"
    assert rllib_names.MODULES["ray.tune"] == "tfpolicies.compat.tune"
    assert ("ray.rllib.env.external_env", "ExternalEnv") not in rllib_names.REPLACEMENTS
    alternative = "Use SAC or BC with offline_data(input_=...). CQL and CRR are not offered yet."
    assert rllib_names.ALTERNATIVES["CQLConfig"] == alternative
    assert not rllib_names.ALTERNATIVES.keys() & {name for _, name in rllib_names.REPLACEMENTS}
    assert ALIASES["num_epochs"] == "num_sgd_iter"
    sections = dict.fromkeys(SACConfig().to_dict(), "training")
    assert find_setting_equivalent("ent_coef", sections) == "training(initial_alpha=...)"


def test_the_table_has_the_names_that_only_compat_makes_known():
    table_names = {
        word
        for names, here, _ in ROWS
        if here.startswith("not ") or "with `import tfpolicies.compat`" in here
        for word in re.findall(r"\w+", " ".join(code(names)))
    }
    assert table_names >= rllib_names.RLLIB_ATTRIBUTES
    added = {
        name
        for getters in (RLlibExtension.attributes, RLlibExtension.class_attributes)
        for names in getters.values()
        for name in names
    }
    recorded = {name for names in RECORDED_STATISTICS.values() for name in names}
    assert added - recorded - {"_value_fn_out"} == rllib_names.RLLIB_ATTRIBUTES


def test_the_table_is_sorted():
    names = [cells[0].replace("`", "").casefold() for cells in ROWS]
    assert names == sorted(names)
    assert len(names) == len({*names})
    part = ""
    for line in table_lines():
        match = re.match(r"\| \*\*(.*?)\*\*", line)
        part = match[1] if match else part
        assert match or line[3:].casefold().startswith(part.casefold())


def test_a_row_of_the_table_has_at_most_two_sentences():
    assert {len(row) for row in ROWS} == {3}
    texts = [re.sub(r"`[^`]*`", "x", differs) for _, _, differs in ROWS]
    assert [text for text in texts if len(re.findall(r"[.!?](?= |$)", text)) > 2] == []
    assert [text for text in texts if text and not text.endswith(".")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_every_link_of_a_page_has_a_target(page):
    for link in re.findall(r"\]\(([^)\s]*)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        generated = HOME / "docs" / "reference", HOME / "docs" / "tables" / "algorithms.md"
        is_generated = any(map(target.is_relative_to, generated))
        if not link.startswith("http") and not is_generated:
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_every_section_that_a_message_names_exists():
    assert {*rllib_names.SECTIONS.values(), "Names"} <= {*headings(GUIDE)}
    named = {
        result
        for source in SOURCES
        for result in re.findall(r'"([^"{}]+)" in `?docs/([\w./]+\.md)', source.read_text())
    }
    assert ("Views", "howto/models.md") in named
    lost = [(text, page) for text, page in named if text not in headings(HOME / "docs" / page)]
    assert lost == []


def test_every_page_that_a_message_names_exists():
    text = "".join(source.read_text() for source in SOURCES)
    pages = {*re.findall(r"docs/[\w/-]+\.md", text)}
    assert "docs/migrate/rllib.md" in pages
    assert [page for page in pages if not (HOME / page).exists()] == []
