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

from tfpolicies.compat.rllib_names import (
    ALTERNATIVES,
    MODULES,
    REPLACEMENTS,
    RLLIB_ATTRIBUTES,
    find_section,
)
from tfpolicies.errors import UsageError
from tfpolicies.system.paths import resolve_path
from tfpolicies.system.regular_files import read_regular

SUMMARY = "change the imports of scripts that were written for RLlib"
_COMPAT_MODULE = "tfpolicies.compat"
_RLLIB_MODULES = ("ray.rllib", "ray.tune.registry")  # none of their names should remain
_AIR_MODULE = "ray.air"  # newer versions of Ray remove more and more of it
_WORKER_SETTINGS = ("num_rollout_workers", "num_workers", "evaluation_num_workers")
_RAY_CALLS = {"ray.init", "ray.shutdown", "ray.is_initialized"}
_RAY_ADVICE = "install `tfpolicies[ray]`, or set it to 0 to sample in one process."
_RLLIB_NAME = re.compile(r"ray\.(rllib|tune\.registry)\.[\w.]+")


class Remark(NamedTuple):
    """A name of RLlib that is not replaced."""

    line: int
    name: str  # with its module
    advice: str


class PortedScript(NamedTuple):
    """A script with replaced imports."""

    source: bytes
    remarks: list[Remark]
    remote_workers: list[tuple[int, str]]
    """Settings that start workers with Ray, with their lines."""
    unneeded: list[tuple[int, str]]
    """Statements that only start and stop Ray, with their lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a Python script")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit status 1 if anything is left to change, also by hand",
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
    new = {name: port_script(source, name) for name, source in old.items()}
    changed = [name for name in new if new[name].source != old[name]]
    for name in changed:
        if args.diff:
            print(_make_diff(name, old[name], new[name].source), end="")
        elif not args.check:
            paths[name].write_bytes(new[name].source)  # in place: keeps modes and links
    for name, script in new.items():
        for line, rllib_name, advice in script.remarks:
            print(f"{name}:{line}: {rllib_name} was not changed: {advice}")
        for line, setting in script.remote_workers:
            print(f"{name}:{line}: {setting} needs Ray: {_RAY_ADVICE}")
        for line, statement in script.unneeded:
            print(f"{name}:{line}: `{statement}` is not needed: remove it.")
    verb = "would change" if args.check or args.diff else "changed"
    print(f"{verb.capitalize()}: {len(changed)} of {len(new)}.")
    needs_work = any(script.remarks or script.unneeded for script in new.values())
    return int(args.check and (bool(changed) or needs_work))


def port_script(source: bytes, name: str = "the script") -> PortedScript:
    """Returns a script that imports this package in place of RLlib.

    Args:
        source: the script, in any encoding that Python reads.
        name: the script's name, for messages.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        script = _Script(source.decode(encoding).encode())
        new = script.replace_imports()
        script.require_same(_Script(new))
    except (SyntaxError, ValueError) as error:
        raise UsageError(
            f"{name} cannot be ported: {error}. Give a Python script; change an import of unusual "
            "form by hand."
        ) from error
    return PortedScript(
        new.decode().encode(encoding),
        sorted(script.make_remarks()),
        sorted(script.find_remote_workers()),
        sorted(script.find_unneeded_statements()),
    )


def _make_diff(name: str, old: bytes, new: bytes) -> str:
    old_lines, new_lines = (text.decode(errors="replace").splitlines(True) for text in (old, new))
    return "".join(difflib.unified_diff(old_lines, new_lines, name, name))


class _ImportedName(NamedTuple):
    module: str
    name: str  # "" for the module itself
    bound_name: str  # its name in the script; "" for `import a.b`

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}".removesuffix(".")


def _list_imported_names(node: ast.Import | ast.ImportFrom) -> list[_ImportedName]:
    if isinstance(node, ast.Import):
        return [_ImportedName(alias.name, "", alias.asname or "") for alias in node.names]
    module = "." * node.level + (node.module or "")
    return [_ImportedName(module, alias.name, alias.asname or alias.name) for alias in node.names]


def _parse(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the user's script do not matter here
        return ast.parse(source.decode())


_RAY = _ImportedName("ray", "", "")


class _Script:
    """A script, and the replacements of its imports.

    Args:
        source: its text, in UTF-8.
    """

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.tree = _parse(source)
        self.nodes = [*ast.walk(self.tree)]
        self.imports = [n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        self.attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        self.lines = [0, *(match.end() for match in re.finditer(rb"\r\n?|\n", source))]
        self.newline = b"\r\n" if b"\r\n" in source else b"\n"

    # -- replacements --------------------------------------------------------------------------

    def find_replacement(self, old: _ImportedName) -> _ImportedName:
        """Returns the import that replaces another; the same one if there is none."""
        if not f"{old.module}.".startswith("ray."):
            return old
        if replacement := REPLACEMENTS.get((old.module, old.name)):
            return _ImportedName(*replacement, old.bound_name)
        target = self.find_module(old.full_name, old.bound_name)
        if not old.name:
            return _ImportedName(target or old.module, "", old.bound_name)
        package, _, name = target.rpartition(".")
        return _ImportedName(package, name, old.bound_name) if package else old

    def find_module(self, module: str, bound_name: str) -> str:
        """Returns the module that replaces one of RLlib's; "" if none has all of its used names."""
        if module in MODULES and bound_name:
            return MODULES[module]
        replacements = {
            name: REPLACEMENTS.get((module, name)) for name in self.find_attributes(bound_name)
        }
        modules = {new[0] if new and new[1] == name else "" for name, new in replacements.items()}
        return modules.pop() if len(modules) == 1 else ""

    def find_attributes(self, bound_name: str) -> set[str]:
        """Returns the attributes that are read from a name, with "" if it is used on its own."""
        attributes = {id(node.value): node.attr for node in self.attributes}
        names = (
            node for node in self.nodes if isinstance(node, ast.Name) and node.id == bound_name
        )
        return {attributes.get(id(node), "") for node in names}

    # -- the new text --------------------------------------------------------------------------

    def replace_imports(self) -> bytes:
        new = self.source
        for node in sorted(self.imports, key=self.span, reverse=True):
            start, end = self.span(node)
            new = new[:start] + self.rewrite_statement(node) + new[end:]
        return new if new == self.source else _Script(new).add_compat_import()

    def rewrite_statement(self, node: ast.Import | ast.ImportFrom) -> bytes:
        """Returns the statements that replace one: one for each module with some of its names."""
        start, end = self.span(node)
        replacements = [self.find_replacement(old) for old in _list_imported_names(node)]
        if replacements == _list_imported_names(node):
            return self.source[start:end]
        if isinstance(node, ast.Import):
            return self.rewrite_import(node, replacements, start, end)
        line_start = self.source[:start].rpartition(b"\n")[2]  # the start of its line
        separator = b"; " if line_start.strip() else self.newline + line_start
        modules = dict.fromkeys(replacement.module for replacement in replacements)
        return separator.join(
            self.rewrite_from_import(node, replacements, module) for module in modules
        )

    def rewrite_import(
        self, node: ast.Import, replacements: list[_ImportedName], start: int, end: int
    ) -> bytes:
        """Returns an `import a as b, ...` of the new modules."""
        text = b""
        for alias, replacement in zip(node.names, replacements, strict=True):
            name_start, name_end = self.span(alias)
            text += self.source[start:name_start] + self.format_name(alias, replacement)
            start = name_end
        return text + self.source[start:end]

    def rewrite_from_import(
        self, node: ast.ImportFrom, replacements: list[_ImportedName], module: str
    ) -> bytes:
        """Returns the import of the names that one module has, with the comments next to them."""
        start, end = self.span(node)
        firsts, lasts = zip(*map(self.span, node.names), strict=True)
        in_brackets = self.source[lasts[-1] : end].endswith(b")")
        names_start = self.source.index(b"(", start) + 1 if in_brackets else firsts[0]
        gaps = zip((names_start, *lasts), (*firsts, end - in_brackets), strict=True)
        cuts = [(in_brackets and self.source.find(b"\n", *gap) + 1) or gap[1] for gap in gaps]
        head = re.sub(rb"^(from\s+)[\w.]+", rb"\1" + module.encode(), self.source[start : cuts[0]])
        body = b"".join(
            self.source[cuts[i] : firsts[i]]
            + self.format_name(node.names[i], replacement)
            + self.source[lasts[i] : cuts[i + 1]]
            for i, replacement in enumerate(replacements)
            if replacement.module == module
        )
        if replacements[-1].module != module:  # remove the remaining comma
            body = re.sub(rb",[ \t]*\Z" if in_brackets else rb",[\s\\]*\Z", b"", body)
        body = body if head.endswith(b"\n") else body.lstrip()
        return head + body + self.source[cuts[-1] : end]

    def format_name(self, alias: ast.alias, replacement: _ImportedName) -> bytes:
        """Returns the text of an imported name; the original text if it has not changed."""
        start, end = self.span(alias)
        name = replacement.name or replacement.module
        if name == alias.name:
            return self.source[start:end]
        return (
            name if name == replacement.bound_name else f"{name} as {replacement.bound_name}"
        ).encode()

    def add_compat_import(self) -> bytes:
        """Returns the text, with an import of `compat` if its attributes need one."""
        top = (
            old
            for node in self.imports
            if node in self.tree.body
            for old in _list_imported_names(node)
        )
        uses_rllib_attributes = (
            node.attr in RLLIB_ATTRIBUTES or node.attr[:6] == "_mean_" for node in self.attributes
        )
        if not any(uses_rllib_attributes) or any(
            f"{old.full_name}.".startswith(f"{_COMPAT_MODULE}.") for old in top
        ):
            return self.source
        first_statement = next(node for node in self.tree.body if not _must_come_first(node))
        line = min(
            n.lineno for n in (first_statement, *getattr(first_statement, "decorator_list", ()))
        )
        offset = self.lines[line - 1]
        statement = f"import {_COMPAT_MODULE}".encode() + self.newline
        return self.source[:offset] + statement + self.source[offset:]

    def span(self, node: ast.stmt | ast.alias) -> tuple[int, int]:
        end_line, column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[end_line - 1] + column

    def require_same(self, new: _Script) -> None:
        expected = Counter(
            self.find_replacement(old)
            for node in self.imports
            for old in _list_imported_names(node)
        )
        imported = Counter(old for node in new.imports for old in _list_imported_names(node))
        added = {*(imported - expected)} - {_ImportedName(_COMPAT_MODULE, "", "")}
        if (
            expected - imported
            or added
            or self.dump_without_imports() != new.dump_without_imports()
        ):
            raise ValueError("its imports are written in a way that cannot be changed safely")

    def dump_without_imports(self) -> str:
        return ast.dump(_NoImports().visit(_parse(self.source)))

    # -- remarks -------------------------------------------------------------------------------

    def make_remarks(self) -> Iterator[Remark]:
        """Yields the names of RLlib that are not replaced, in imports and elsewhere."""
        for node in self.imports:
            for alias, old in zip(node.names, _list_imported_names(node), strict=True):
                if old.full_name.startswith(_RLLIB_MODULES) or _AIR_MODULE in (
                    old.module,
                    old.full_name,
                ):
                    yield from (Remark(alias.lineno, *remark) for remark in self.find_unported(old))
        inner = {id(node.value) for node in self.attributes}
        for rllib_node in self.nodes:
            if isinstance(rllib_node, ast.Attribute | ast.Constant) and id(rllib_node) not in inner:
                text = (
                    rllib_node.value
                    if isinstance(rllib_node, ast.Constant)
                    else ast.unparse(rllib_node)
                )
                if isinstance(text, str) and _RLLIB_NAME.fullmatch(text):
                    yield Remark(rllib_node.lineno, text, _make_reference(text))

    def find_remote_workers(self) -> Iterator[tuple[int, str]]:
        """Yields the settings whose value is a number of remote workers above 0."""
        for node in self.nodes:
            pairs: list[tuple[object, ast.expr]] = []
            if isinstance(node, ast.Call):
                pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
            elif isinstance(node, ast.Dict):
                keys = [getattr(key, "value", None) for key in node.keys]
                pairs = list(zip(keys, node.values, strict=True))
            for name, node_value in pairs:
                number = getattr(node_value, "value", None)
                if name in _WORKER_SETTINGS and type(number) is int and number > 0:
                    yield node_value.lineno, f"{name}={number}"

    def find_unneeded_statements(self) -> Iterator[tuple[int, str]]:
        """Yields statements that start and stop Ray, and its import if nothing else uses it."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _RAY_CALLS:
                yield node.lineno, f"{ast.unparse(node.func)}()"
        names = {f"ray.{name}" for name in self.find_attributes("ray")}
        for node in self.imports:
            if names and names <= _RAY_CALLS and _list_imported_names(node) == [_RAY]:
                yield node.lineno, "import ray"

    def find_unported(self, old: _ImportedName) -> Iterator[tuple[str, str]]:
        """Yields the names of an import that are not replaced, with advice."""
        if self.find_replacement(old) == old:
            yield old.full_name, _get_advice(old)
        elif old.full_name in MODULES:
            for name in self.find_attributes(old.bound_name) - {""}:
                module, new_name = REPLACEMENTS.get((old.full_name, name), ("", ""))
                if new_name != name:
                    place = f"use `{module}.{new_name}`" if new_name else ""
                    yield f"{old.full_name}.{name}", place or _make_reference(old.full_name)


def _get_advice(old: _ImportedName) -> str:
    if old.name == "*" or not old.bound_name:
        return f"write `from {old.module} import NAME`, and port it again"
    return f"{ALTERNATIVES.get(old.name, '')} {_make_reference(old.full_name)}".strip()


class _NoImports(ast.NodeTransformer):
    def visit_Import(self, node: ast.AST) -> None:
        return None

    visit_ImportFrom = visit_Import


def _must_come_first(node: ast.stmt) -> bool:
    """Returns whether a statement must come first: a docstring, or an import from `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _make_reference(name: str) -> str:
    return f'see "{find_section(name)}" on the page "From RLlib\'s TensorFlow stack"'
