"""The code of documentation pages, and the comments that direct how it is run."""

import re

import pytest

from tools.site.code_blocks import ROOT, PageError, get_pages, read_code_blocks
from tools.site.run_page import run_in_process

PAGE = """# A page

<!-- quick: 200_000 -> 2_000 -->
<!-- picture: plot.png -> plot.png -->

```python
learn(200_000)
```

```text
not code
```

- In a list:

  ```sh
  echo done
  ```

<!-- not run: needs a cluster -->
```sh
kubectl apply
```
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.site.code_blocks.ROOT", tmp_path)

    def write_page(text):
        path = tmp_path / "page.md"
        path.write_text(text)
        return path

    return write_page


@pytest.mark.core
def test_blocks_have_their_lines_languages_and_directives(write):
    python, shell, cluster = read_code_blocks(write(PAGE))
    assert (python.language, python.line, python.code) == ("python", 7, "learn(200_000)\n")
    assert python.get_quick_code() == "learn(2_000)\n"
    assert python.pictures == (("plot.png", "plot.png"),)
    assert (shell.language, shell.code, shell.not_run) == ("sh", "echo done\n", "")
    assert str(shell) == "page.md:17"
    assert cluster.not_run == "needs a cluster"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nlearn()\n", r"page.md:1: the block of code has no end"),
        ("<!-- quick: 1 -> 2 -->\nText.\n", "page.md:2: no block of code follows"),
        ("<!-- quick: 1 to 2 -->\n```sh\necho 1\n```\n", "must be `A -> B`, got '1 to 2'"),
    ],
)
def test_wrong_directives_are_named_with_their_line(write, text, message):
    with pytest.raises(PageError, match=message):
        read_code_blocks(write(text))


def test_a_replacement_that_the_code_lacks_is_an_error(write):
    [block] = read_code_blocks(write("<!-- quick: 300 -> 3 -->\n```python\nlearn(200)\n```\n"))
    with pytest.raises(PageError, match=r"page.md:3: the code does not contain '300'"):
        block.get_quick_code()


@pytest.mark.parametrize("page", get_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_directives_of_a_page_fit_its_code(page):
    for block in read_code_blocks(page):
        assert block.get_quick_code() or block.not_run


def test_commands_of_pages_have_the_options_that_they_use():
    from tfpolicies.cli.arguments import _make_parsers

    parsers = _make_parsers()[1]
    options = {option for parser in parsers.values() for option in parser.options()} | {"--version"}
    for page in get_pages():
        lines = [
            line for block in read_code_blocks(page) for line in block.code.splitlines()
        ] + re.findall(r"`(tfpolicies [^`]*)`", page.read_text())
        commands = [line for line in lines if line.lstrip().startswith("tfpolicies ")]
        used = {option for line in commands for option in re.findall(r"(?<=\s)--[a-z][\w-]*", line)}
        assert used - options == set(), page


@pytest.fixture
def write_page(tmp_path):
    """Writes a page in the repository, from which pages are run in a process."""
    page = ROOT / "build" / "tests" / f"{tmp_path.name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)

    def write_text(text):
        page.write_text(text)
        return page

    yield write_text
    page.unlink()


def test_a_block_is_saved_in_a_file_that_later_blocks_import(tmp_path, write_page):
    page = write_page(
        "<!-- file: cart.py -->\n<!-- quick: 400 -> 4 -->\n```python\nwheels = 400\n```\n"
        "```python\nfrom cart import wheels\nassert wheels == 4\n```\n"
        '```sh\npython -c "import cart; assert cart.wheels == 4"\n```\n'
    )
    result = run_in_process(page, tmp_path, quick=True)
    assert result.returncode == 0, result.stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"cart.py"}


def test_a_page_runs_in_order_with_servers_in_the_background(tmp_path, write_page):
    page = write_page(
        "```sh\nmkdir www; echo hello > www/index.html\n"
        "python -m http.server 8765 -d www  # a comment\n```\n"
        "```python\nimport urllib.request\n"
        'text = urllib.request.urlopen("http://127.0.0.1:8765/index.html").read()\n```\n'
        "```python\nprint(text, __name__)\n```\n"
    )
    result = run_in_process(page, tmp_path, quick=False)
    assert result.returncode == 0, result.stdout
    assert "b'hello\\n' __main__" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"www"}
