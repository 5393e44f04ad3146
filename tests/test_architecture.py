"""Subpackages import only their own layer and those below it, as ARCHITECTURE.md draws them."""

import graphlib

import pytest

from tools import subpackages
from tools.subpackages import EVERYWHERE, LAYERS, PACKAGE, import_graph, imported_names, modules

LAYER_BY_SUBPACKAGE = {name: i for i, names in enumerate(LAYERS.values()) for name in names}
MODULES = modules()


def get_module_name(path):
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def get_imported_subpackages(path):
    names = {name.split(".")[1] for name in imported_names(path)}
    return names - {*EVERYWHERE, "__version__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_its_own_layer_and_lower_ones(path):
    layer = LAYER_BY_SUBPACKAGE.get(subpackages.get_subpackage(path), -1)
    above = {name for name in get_imported_subpackages(path) if LAYER_BY_SUBPACKAGE[name] > layer}

    assert not above, f"{path.relative_to(PACKAGE)} imports {sorted(above)}"


def test_subpackages_do_not_import_each_other_in_a_circle():
    graphlib.TopologicalSorter(import_graph()).prepare()


def test_six_layers_have_all_subpackages():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", *EVERYWHERE}

    assert len(LAYERS) == 6
    assert set(LAYER_BY_SUBPACKAGE) == folders | files


def test_the_picture_shows_the_imports():
    assert subpackages.PICTURE.read_text() == subpackages.draw(import_graph())


def test_no_files_import_each_other_in_a_circle():
    """Without circles each file can be imported alone, and be read before those that use it."""
    files = {get_module_name(path): imported_names(path) for path in MODULES}
    imports = {
        module: {name if name in files else name.rpartition(".")[0] for name in names} & set(files)
        for module, names in files.items()
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_nothing_imports_the_names_for_ported_code():
    others = [
        path for path in PACKAGE.rglob("*.py") if subpackages.get_subpackage(path) != "compat"
    ]

    assert [path for path in others if "compat" in get_imported_subpackages(path)] == []
    texts = [path for path in others if "tfpolicies.compat" in path.read_text()]
    assert [path.name for path in texts] == ["migrations.py"]  # names in files


def test_further_attributes_are_looked_up_in_one_place():
    """Other classes with a `__getattr__` pass on what they wrap, or name their own settings."""
    core = [path for path in MODULES if subpackages.get_subpackage(path) != "compat"]
    modules_with_fallback = {
        str(path.relative_to(PACKAGE)) for path in core if "def __getattr__" in path.read_text()
    }
    assert modules_with_fallback == {
        "algorithms/callback_model.py",  # the model inside
        "base/extensions.py",  # the registry
        "config/base_config.py",  # settings
        "envs/subprocess_adapter.py",  # methods of environments elsewhere
        "models/catalog/recurrent_models.py",  # the model inside
        "policy/hooks.py",  # what traced code must not read
        "program/traced_context.py",
        "program/traced_arguments.py",  # the model inside
        "system/quiet_start.py",  # the module inside
    }


def test_nothing_needs_the_module_for_authors_of_algorithms():
    others = [path for path in MODULES if subpackages.get_subpackage(path) != "extending"]

    assert [path for path in others if "extending" in get_imported_subpackages(path)] == []


def test_the_architecture_names_every_subpackage():
    page = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    names = {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }

    assert {name for name in names if f"`{name}/`" not in page} == set()
