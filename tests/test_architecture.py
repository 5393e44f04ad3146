"""The rooms import only downwards, as ARCHITECTURE.md draws them."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

import tfpolicies

ROOT = Path(tfpolicies.__file__).parent
FLOORS = {
    "_version": -1,
    "errors": -1,
    "extensions": 0,
    "finite": 0,
    "onnx_graphs": 0,
    "keras_weights": 0,
    "lazy": -1,
    "marks": 0,
    "porting_tables": -1,
    "registers": 0,
    "rules": 0,
    "schedules": 0,
    "state": 0,
    "system": 0,
    "type_aliases": -1,
    "ways": 0,
    "batch": 1,
    "envs": 1,
    "models": 1,
    "reporting": 1,
    "storage": 1,
    "connectors": 1.5,
    "exploration": 1.5,
    "replay": 1.5,
    "config": 2,
    "program": 2,
    "export": 2.5,
    "policy": 3,
    "policy_map": 3.3,
    "serving": 3,
    "foreign": 3.5,
    "rollout": 4,
    "distributed": 4.5,
    "testing": 4,
    "algorithms": 5,
    "cli": 6,
    "extending": 6,
    "compat": 6,
    "__main__": 7,
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported_names(path: Path) -> frozenset[str]:
    """All that a file imports, anywhere in it: in functions, and for annotations, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name for name in found if name.startswith("tfpolicies."))


def imports_of(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported_names(path)} - {"__version__"}


MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_its_own_room_and_lower_floors(path):
    room = room_of(path)
    above = {other for other in imports_of(path) if other != room and FLOORS[other] >= FLOORS[room]}

    assert not above, f"{path.relative_to(ROOT)} imports {sorted(above)}"


def test_no_files_import_each_other_in_a_circle():
    """Without circles each file can be imported alone, and be read before those that use it."""
    files = {module_of(path): imported_names(path) for path in MODULES}
    imports = {
        module: {name if name in files else name.rpartition(".")[0] for name in names} & set(files)
        for module, names in files.items()
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_nothing_needs_the_names_that_exist_for_ported_code():
    others = [path for path in ROOT.rglob("*.py") if room_of(path) != "compat"]

    assert [path for path in others if "compat" in imports_of(path)] == []
    assert [path for path in others if "tfpolicies.compat" in path.read_text()] == []


def test_further_attributes_are_looked_up_in_one_place():
    """Other classes with a `__getattr__` pass on what they wrap, or name their own settings."""
    core = [path for path in MODULES if room_of(path) not in ("compat", "extensions")]
    having = {str(path.relative_to(ROOT)) for path in core if "def __getattr__" in path.read_text()}
    assert having == {
        "config/sectioned.py",  # settings
        "envs/process_environments.py",  # methods of environments elsewhere
        "models/catalog/memory.py",  # the model inside
        "policy/kind.py",  # what traced code must not read
        "program/traced_context.py",
        "program/view.py",  # the model inside
        "system/quiet_start.py",  # the module inside
    }


def test_nothing_needs_the_door_for_those_who_extend():
    others = [path for path in MODULES if room_of(path) != "extending"]

    assert [path for path in others if "extending" in imports_of(path)] == []


def test_every_room_is_drawn_in_the_architecture():
    drawn = (ROOT.parent / "ARCHITECTURE.md").read_text()
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}

    assert {room for room in rooms if f"`{room}/`" not in drawn} == set()
