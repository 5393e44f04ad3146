"""Names and sentences use the language of the field.

Run as a script, it prints the counts for a source tree: `python tests/test_words.py [TREE]`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

GUARD_WORDS = {
    "anew": r"\banew\b",
    "nobody, somebody, anybody": r"\b(?:no|some|any)body\b",
    "likewise": r"\blikewise\b",
    "told": r"\btold\b",
    "behind": r"\bbehind\b",
    "goes on": r"\bgo(?:es)? on\b",
    "is no": r"(?<!there )\b(?:is|are) no (?!longer)\w+",
    "one's own": r"\bone's own\b",
    "headless what": (
        r"\bwhat (?:a|an|the|it|they|is|was|this|these|all|each|one|others)\b"
        r"(?![^.]*\?)"  # questions may ask
    ),
    "headless who": r"(?:\b(?:of|to|for|by)|[.;:]) who ",
}

QUESTION_WORDS = re.compile(r"(?:What|Who|Whose|Where|How|Which|Why)\b")

IRREGULAR_PARTICIPLES = """
begun bound born broken brought built caught chosen dealt done drawn driven eaten fallen fed
felt forgotten found frozen given gone grown heard held hidden kept known laid led left lent
lost made meant met paid risen said seen sent shown sold sought spent spoken stolen stood sunk
swept taken taught thought thrown told torn understood woken won worn wound written
"""
NOT_PARTICIPLES = """
bleed breed embed exceed feed indeed need proceed reseed seed shed speed succeed
"""

LOCALS = frozenset({"found", "given", "known", "told", "made", "wanted"})

EXPORTS = frozenset({"__all__", "_NAMES"})
"""Variables of a subpackage that list its exported names."""

# Names of RLlib, Keras and Gymnasium, which stay.
NAMES_OF_OTHERS = """
Deprecated required_model_output_shape sampled_action_logp sampled_action_logp_op standardized
unwrapped
"""

# At most 30 together: names and phrases that a rule finds, and the reasons why they stay.
ALLOWED_NAMES = {
    "explained_variance": "a statistic, by its usual name",
    "discounted_returns": "a quantity, by its usual name",
    "generalized_advantages": "a quantity, by its usual name",
    "masked_mean": "a reduction, by its usual name",
    "sampled_logp": "RLlib's term for the log-probability of a sample",
    "is_one_of": "a predicate",
    "one_of": "a validator, as in schema languages",
    "_accepts_state_of": "a predicate",
    "untouched": "the name of a check that reports print",
}
ALLOWED_DOUBLES: dict[str, str] = {}
ALLOWED_PHRASES: dict[str, str] = {}
ALLOWED_LOCALS = {"tfpolicies/export/action_agreement.py": "a key of `policy_spec.json`"}


class Finding(NamedTuple):
    """A place that breaks a rule."""

    rule: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(root: Path) -> list[Path]:
    return sorted((root / "tfpolicies").rglob("*.py"))


def pages(root: Path) -> list[Path]:
    tops = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"]
    inside = [
        path
        for folder in ("docs", "tfpolicies")
        for path in (root / folder).rglob("*")
        if path.suffix in (".md", ".txt") and path.name != "allowed_ops.txt"
    ]
    return [path for path in (*(root / top for top in tops), *sorted(inside)) if path.exists()]


def functions_in(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_boolean(function: Function) -> bool:
    return isinstance(function.returns, ast.Name) and function.returns.id == "bool"


def is_participle(name: str) -> bool:
    word = name.strip("_").split("_")[0]
    return word in IRREGULAR_PARTICIPLES.split() or (
        word.endswith("ed") and word not in NOT_PARTICIPLES.split()
    )


def find_participles(root: Path) -> Iterator[Finding]:
    """Functions and methods named by a participle, where they are no boolean."""
    for path in python_files(root):
        for function in functions_in(ast.parse(path.read_text())):
            name = function.name
            if name in NAMES_OF_OTHERS.split() or name in ALLOWED_NAMES:
                continue
            if is_participle(name) and not is_boolean(function):
                yield Finding("participle", str(path.relative_to(root)), function.lineno, name)


def find_getters(root: Path) -> Iterator[Finding]:
    for path in python_files(root):
        for function in functions_in(ast.parse(path.read_text())):
            if function.name.endswith("_of") and function.name not in ALLOWED_NAMES:
                place = str(path.relative_to(root))
                yield Finding("x_of", place, function.lineno, function.name)


def find_question_docstrings(root: Path) -> Iterator[Finding]:
    """Docstrings of modules, classes and functions that open with a question word."""
    for path in python_files(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if QUESTION_WORDS.match(text):
                    line = getattr(node, "lineno", 1)
                    opening = text.splitlines()[0]
                    yield Finding("question", str(path.relative_to(root)), line, opening)


def assigned_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def find_locals(root: Path) -> Iterator[Finding]:
    for path in python_files(root):
        for name, line in assigned_names(ast.parse(path.read_text())):
            if name in LOCALS and str(path.relative_to(root)) not in ALLOWED_LOCALS:
                yield Finding("local", str(path.relative_to(root)), line, name)


def find_doubles(root: Path) -> Iterator[Finding]:
    """Public classes, and modules, that share their name with another one."""
    modules, classes = defaultdict(list), defaultdict(list)
    for path in python_files(root):
        place = str(path.relative_to(root))
        if "/compat/" in place:
            continue
        if not path.stem.startswith("__"):
            modules[path.stem].append(Finding("double module", place, 1, path.stem))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                finding = Finding("double class", place, node.lineno, node.name)
                classes[node.name].append(finding)
    for group in (*modules.values(), *classes.values()):
        if len(group) > 1 and group[0].text not in ALLOWED_DOUBLES:
            yield from group


def docstrings_and_messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Constants with more than one word: sentences, in docstrings and elsewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and " " in str(node.value).strip():
            yield node.lineno, str(node.value)


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose(page: str) -> str:
    """The page without its code, with as many lines."""
    page = re.sub(
        r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page, flags=re.M | re.S
    )
    return re.sub(r"`[^`\n]*`", "``", page)


def sentences(root: Path, *, in_pages: bool) -> Iterator[tuple[str, int, str]]:
    if in_pages:
        for path in pages(root):
            for line, text in enumerate(prose(path.read_text()).splitlines(), 1):
                yield str(path.relative_to(root)), line, text
        return
    for path in python_files(root):
        source = path.read_text()
        texts = [*docstrings_and_messages(ast.parse(source)), *comments(source)]
        for first, text in sorted(texts):
            for offset, line in enumerate(text.splitlines()):
                yield str(path.relative_to(root)), first + offset, line


def find_guard_words(root: Path, *, in_pages: bool) -> Iterator[Finding]:
    for path, line, text in sentences(root, in_pages=in_pages):
        for rule, pattern in GUARD_WORDS.items():
            for match in re.finditer(pattern, text, re.IGNORECASE):
                if not any(phrase in text for phrase in ALLOWED_PHRASES):
                    start = max(match.start() - 40, 0)
                    yield Finding(rule, path, line, text[start : match.end() + 30].strip())


def public_names(root: Path) -> set[str]:
    """Names exported to users, to authors of algorithms and to ported code, and their bases."""
    names = set((root / "tests/public_api.txt").read_text().split())
    for node in ast.parse((root / "tfpolicies/extending.py").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    for path in root.glob("tfpolicies/*/__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in EXPORTS:
                constants = (c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant))
                names |= {name for text in constants for name in str(text).split()}
    bases = get_base_names(root)
    unvisited = list(names)
    while unvisited:
        new = bases.get(unvisited.pop(), set()) - names
        names |= new
        unvisited += new
    return names


def get_base_names(root: Path) -> dict[str, set[str]]:
    """Returns the names of the base classes of each class in the package."""
    bases: dict[str, set[str]] = {}
    for path in python_files(root):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                used = {ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases}
                bases.setdefault(node.name, set()).update(used)
    return bases


def code_lines(source: str) -> set[int]:
    """Numbers of the lines with more than a comment or nothing on them."""
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def docstring_share(root: Path) -> float:
    """Lines of docstrings per 100 lines of function bodies, where functions are not public."""
    public = public_names(root)
    described = written = 0
    for path in python_files(root):
        source = path.read_text()
        lines = code_lines(source)
        for outer in ast.parse(source).body:
            if getattr(outer, "name", "_") in public:
                continue
            for function in functions_in(outer):
                body = function.body
                if ast.get_docstring(function) is not None:
                    described += (body[0].end_lineno or 0) - body[0].lineno + 1
                    body = body[1:]
                if body:
                    last = function.end_lineno or 0
                    written += len(lines & set(range(body[0].lineno, last + 1)))
    return 100 * described / written


FINDERS = (
    find_participles,
    find_getters,
    find_question_docstrings,
    find_locals,
    find_doubles,
    partial(find_guard_words, in_pages=False),
    partial(find_guard_words, in_pages=True),
)


@pytest.mark.parametrize("find", FINDERS)
def test_names_and_sentences_follow_the_rules(find):
    assert [str(finding) for finding in find(ROOT)] == []


def test_functions_that_are_not_public_have_few_docstrings():
    assert docstring_share(ROOT) <= 25


def test_few_exceptions_are_allowed():
    assert sum(map(len, (ALLOWED_NAMES, ALLOWED_DOUBLES, ALLOWED_PHRASES, ALLOWED_LOCALS))) <= 30


if __name__ == "__main__":
    tree = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    for rule, number in Counter(finding.rule for find in FINDERS for finding in find(tree)).items():
        print(f"{number:>8} {rule}")
    print(f"{docstring_share(tree):>8.1f} docstring lines per 100 of non-public functions")
    print(f"{len(list((tree / 'tfpolicies').glob('*.py'))):>8} modules at the root")
