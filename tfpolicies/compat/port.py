"""`tfpolicies port`: changes the imports of scripts written for RLlib, and nothing else.

Python's parser finds the imports, which are replaced in place, byte by byte. The result
is parsed again, and must equal the old script except for the replaced imports.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import re
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tfpolicies.compat.rllib_names import ATTRIBUTES, INSTEAD, MODULES, PLACES, section_for
from tfpolicies.errors import UsageError
from tfpolicies.system.paths import resolve_path
from tfpolicies.system.regular_files import read_regular

SUMMARY = "change the imports of scripts that were written for RLlib"
_HOOK = "tfpolicies.compat"
_FOREIGN = ("ray.rllib", "ray.tune.registry")  # none of their names should remain
_AIR = "ray.air"  # newer versions of Ray remove more and more of it
_MENTIONED = re.compile(r"ray\.(rllib|tune\.registry)\.[\w.]+")


class Remark(NamedTuple):
    """A name of RLlib that is not replaced."""

    line: int
    name: str  # with its module
    advice: str


class Ported(NamedTuple):
    """A script with replaced imports."""

    source: bytes
    remarks: list[Remark]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a Python script")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit status 1 if a file would change, or a name cannot be ported",
    )
    parser.add_argument("--diff", action="store_true", help="write nothing; show what would change")


def run(args: argparse.Namespace) -> int:
    """Ports files in place, after all of them were parsed; returns the exit status.

    Raises:
        OSError: if one cannot be read or written.
        UsageError: if one is not a Python script, or cannot be changed safely.
    """
    paths = {name: resolve_path(name) for name in args.files}
    old = {name: read_regular(path) for name, path in paths.items()}
    new = {name: port(source, name) for name, source in old.items()}
    changed = [name for name in new if new[name].source != old[name]]
    for name in changed:
        if args.diff:
            print(_diff(name, old[name], new[name].source), end="")
        elif not args.check:
            paths[name].write_bytes(new[name].source)  # in place: keeps modes and links
    for name, (_, remarks) in new.items():
        for line, what, advice in remarks:
            print(f"{name}:{line}: {what} was not changed: {advice}")
    verb = "would change" if args.check or args.diff else "changed"
    print(f"{verb.capitalize()}: {len(changed)} of {len(new)}.")
    stay = [remark for _, remarks in new.values() for remark in remarks]
    return int(args.check and bool(changed or stay))


def port(source: bytes, name: str = "the script") -> Ported:
    """Returns a script that imports this package in place of RLlib.

    Args:
        source: the script, in any encoding that Python reads.
        name: the script's name, for messages.

    Raises:
        UsageError: if it is not a Python script, or if more than imports would change.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        script = _Script(source.decode(encoding).encode())
        new = script.ported()
        script.require_same(_Script(new))
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"{name} cannot be ported: {error}. Give a Python script; change an import of unusual "
            "form by hand."
        ) from error
    return Ported(new.decode().encode(encoding), sorted(script.remarks()))


def _diff(name: str, old: bytes, new: bytes) -> str:
    before, after = (text.decode(errors="replace").splitlines(True) for text in (old, new))
    return "".join(difflib.unified_diff(before, after, name, name))


class _Import(NamedTuple):
    module: str
    name: str  # "" for the module itself
    bound: str  # its name in the script; "" for `import a.b`

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}".removesuffix(".")


def _imported(node: ast.Import | ast.ImportFrom) -> list[_Import]:
    if isinstance(node, ast.Import):
        return [_Import(alias.name, "", alias.asname or "") for alias in node.names]
    module = "." * node.level + (node.module or "")
    return [_Import(module, alias.name, alias.asname or alias.name) for alias in node.names]


def _parsed(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the user's script do not matter here
        return ast.parse(source.decode())


class _Script:
    """A script, and the replacements of its imports.

    Args:
        source: its text, in UTF-8.
    """

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.tree = _parsed(source)
        self.nodes = [*ast.walk(self.tree)]
        self.imports = [n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        self.attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        self.lines = [0, *(found.end() for found in re.finditer(rb"\r\n?|\n", source))]
        self.newline = b"\r\n" if b"\r\n" in source else b"\n"

    # -- replacements --------------------------------------------------------------------------

    def place(self, old: _Import) -> _Import:
        """Returns the import that replaces another; the same one if there is none."""
        if not f"{old.module}.".startswith("ray."):
            return old
        if found := PLACES.get((old.module, old.name)):
            return _Import(*found, old.bound)
        home = self.home(old.full, old.bound)
        if not old.name:
            return _Import(home or old.module, "", old.bound)
        package, _, name = home.rpartition(".")
        return _Import(package, name, old.bound) if package else old

    def home(self, module: str, bound: str) -> str:
        """Returns the module that replaces one of RLlib's; "" if none has all of its used names."""
        if module in MODULES and bound:
            return MODULES[module]
        homes = {PLACES.get((module, name), ("",))[0] for name in self.used(bound)}
        return homes.pop() if len(homes) == 1 else ""

    def used(self, bound: str) -> set[str]:
        """Returns the attributes that are read from a name, with "" if it is used on its own."""
        attributes = {id(node.value): node.attr for node in self.attributes}
        names = (node for node in self.nodes if isinstance(node, ast.Name) and node.id == bound)
        return {attributes.get(id(node), "") for node in names}

    # -- the new text --------------------------------------------------------------------------

    def ported(self) -> bytes:
        new = self.source
        for node in sorted(self.imports, key=self.span, reverse=True):
            start, end = self.span(node)
            new = new[:start] + self.replaced(node) + new[end:]
        return new if new == self.source else _Script(new).hooked()

    def replaced(self, node: ast.Import | ast.ImportFrom) -> bytes:
        """Returns the statements that replace one: one for each module with some of its names."""
        start, end = self.span(node)
        places = [self.place(old) for old in _imported(node)]
        if places == _imported(node):
            return self.source[start:end]
        if isinstance(node, ast.Import):
            return self.with_names(node, places, start, end)
        before = self.source[:start].rpartition(b"\n")[2]  # the start of its line
        joint = b"; " if before.strip() else self.newline + before
        modules = dict.fromkeys(place.module for place in places)
        return joint.join(self.part(node, places, module) for module in modules)

    def with_names(self, node: ast.Import, places: list[_Import], start: int, end: int) -> bytes:
        """Returns an `import a as b, ...` of the new modules."""
        text = b""
        for alias, place in zip(node.names, places, strict=True):
            first, last = self.span(alias)
            text += self.source[start:first] + self.written(alias, place)
            start = last
        return text + self.source[start:end]

    def part(self, node: ast.ImportFrom, places: list[_Import], module: str) -> bytes:
        """Returns the import of the names that one module has, with the comments next to them."""
        start, end = self.span(node)
        firsts, lasts = zip(*map(self.span, node.names), strict=True)
        in_brackets = self.source[lasts[-1] : end].endswith(b")")
        opened = self.source.index(b"(", start) + 1 if in_brackets else firsts[0]
        gaps = zip((opened, *lasts), (*firsts, end - in_brackets), strict=True)
        cuts = [(in_brackets and self.source.find(b"\n", *gap) + 1) or gap[1] for gap in gaps]
        head = re.sub(rb"^(from\s+)[\w.]+", rb"\1" + module.encode(), self.source[start : cuts[0]])
        body = b"".join(
            self.source[cuts[i] : firsts[i]]
            + self.written(node.names[i], place)
            + self.source[lasts[i] : cuts[i + 1]]
            for i, place in enumerate(places)
            if place.module == module
        )
        if places[-1].module != module:  # remove the remaining comma
            body = re.sub(rb",[ \t]*\Z" if in_brackets else rb",[\s\\]*\Z", b"", body)
        body = body if head.endswith(b"\n") else body.lstrip()
        return head + body + self.source[cuts[-1] : end]

    def written(self, alias: ast.alias, place: _Import) -> bytes:
        """Returns the text of an imported name; the original text if it has not changed."""
        start, end = self.span(alias)
        name = place.name or place.module
        if name == alias.name:
            return self.source[start:end]
        return (name if name == place.bound else f"{name} as {place.bound}").encode()

    def hooked(self) -> bytes:
        """Returns the text, with an import of `compat` if its attributes need one."""
        top = (old for node in self.imports if node in self.tree.body for old in _imported(node))
        hidden = (node.attr in ATTRIBUTES or node.attr[:6] == "_mean_" for node in self.attributes)
        if not any(hidden) or any(f"{old.full}.".startswith(f"{_HOOK}.") for old in top):
            return self.source
        first = next(node for node in self.tree.body if not _leads(node))
        line = min(n.lineno for n in (first, *getattr(first, "decorator_list", ())))
        place = self.lines[line - 1]
        hook = f"import {_HOOK}".encode() + self.newline
        return self.source[:place] + hook + self.source[place:]

    def span(self, node: ast.stmt | ast.alias) -> tuple[int, int]:
        last, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[last - 1] + column

    def require_same(self, new: _Script) -> None:
        """Compares the script with its ported version.

        Raises:
            ValueError: if anything differs except the intended imports.
        """
        meant = Counter(self.place(old) for node in self.imports for old in _imported(node))
        found = Counter(old for node in new.imports for old in _imported(node))
        added = {*(found - meant)} - {_Import(_HOOK, "", "")}
        if meant - found or added or self.rest() != new.rest():
            raise ValueError("its imports are written in a way that cannot be changed safely")

    def rest(self) -> str:
        return ast.dump(_NoImports().visit(_parsed(self.source)))

    # -- remarks -------------------------------------------------------------------------------

    def remarks(self) -> Iterator[Remark]:
        """Yields the names of RLlib that are not replaced, in imports and elsewhere."""
        for node in self.imports:
            for alias, old in zip(node.names, _imported(node), strict=True):
                if old.full.startswith(_FOREIGN) or _AIR in (old.module, old.full):
                    yield from (Remark(alias.lineno, *told) for told in self.left(old))
        inner = {id(node.value) for node in self.attributes}
        for found in self.nodes:
            if isinstance(found, ast.Attribute | ast.Constant) and id(found) not in inner:
                text = found.value if isinstance(found, ast.Constant) else ast.unparse(found)
                if isinstance(text, str) and _MENTIONED.fullmatch(text):
                    yield Remark(found.lineno, text, _see(text))

    def left(self, old: _Import) -> Iterator[tuple[str, str]]:
        """Yields the names of an import that are not replaced, with advice."""
        if self.place(old) == old:
            yield old.full, _advice(old)
        elif old.full in MODULES:
            for name in self.used(old.bound) - {""}:
                if (old.full, name) not in PLACES:
                    yield f"{old.full}.{name}", _see(old.full)


def _advice(old: _Import) -> str:
    if old.name == "*" or not old.bound:
        return f"write `from {old.module} import NAME`, and port it again"
    return f"{INSTEAD.get(old.name, '')} {_see(old.full)}".strip()


class _NoImports(ast.NodeTransformer):
    def visit_Import(self, node: ast.AST) -> None:
        return None

    visit_ImportFrom = visit_Import


def _leads(node: ast.stmt) -> bool:
    """Returns whether a statement must come first: a docstring, or an import from `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _see(name: str) -> str:
    return f'see "{section_for(name)}" in docs/porting.md'
