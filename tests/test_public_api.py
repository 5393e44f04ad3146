"""The public surface is deliberate, documented, and costs nothing to import."""

import builtins
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import tfpolicies
from tfpolicies import errors

PUBLIC = Path(__file__).with_name("public_api.txt").read_text().split()

NAMES: dict[str, set[str]] = defaultdict(set)
"""By class; the names that `TFPolicy` has of `Policy` are listed there."""

TEXT = Path(__file__).with_name("public_names.txt").read_text().replace("\n  ", " ")
for cls_name, reason, listed in re.findall(r"(\w+) (\w+): (.*)", TEXT):
    assert reason in ("page", "override", "ours")
    NAMES[cls_name] |= set(listed.split())

CLASSES = [name for name in PUBLIC if isinstance(getattr(tfpolicies, name), type)]


def test_the_public_names_are_deliberate():
    assert sorted(tfpolicies.__all__) == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(tfpolicies))
    for name in PUBLIC:
        assert getattr(tfpolicies, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'PPOPolicy'"):
        _ = tfpolicies.PPOPolicy


def get_names(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


@pytest.mark.parametrize("name", NAMES)
def test_the_public_names_of_a_class_are_deliberate(name):
    base = get_names(tfpolicies.Policy) if name == "TFPolicy" else set()
    assert get_names(getattr(tfpolicies, name)) - base == NAMES[name]


@pytest.mark.parametrize(("cls", "most"), [("PPOTF2Policy", 81), ("SampleBatch", 64)])
def test_what_users_meet_first_is_small(cls, most):
    assert len(get_names(getattr(tfpolicies, cls))) <= most


def public_members(cls):
    for name, member in inspect.getmembers(cls):
        made_here = any(
            name in kind.__dict__ and kind.__module__.startswith("tfpolicies")
            for kind in cls.__mro__
        )
        is_code = callable(member) or isinstance(member, property)
        if made_here and is_code and not name.startswith("_"):
            yield name, member


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_is_documented(name):
    cls = getattr(tfpolicies, name)
    assert inspect.getdoc(cls), name
    undocumented = [member for member, code in public_members(cls) if not inspect.getdoc(code)]
    assert undocumented == []


@pytest.mark.parametrize("module", ["tfpolicies", "tfpolicies.extending", "tfpolicies.compat"])
def test_exported_functions_and_classes_are_documented(module):
    exporter = importlib.import_module(module)
    exported = {name: getattr(exporter, name) for name in exporter.__all__}
    code = {
        name: value
        for name, value in exported.items()
        if inspect.isfunction(value) or inspect.isclass(value)
    }
    assert len(code) > 20
    assert [name for name, value in code.items() if not value.__doc__] == []


def test_modules_of_public_classes_are_documented():
    homes = {getattr(tfpolicies, name).__module__ for name in CLASSES}
    assert all(importlib.import_module(home).__doc__ for home in homes)


ERRORS = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_also_a_builtin(kind):
    assert issubclass(kind, errors.TfPoliciesError)
    assert kind.__doc__
    if kind is not errors.TfPoliciesError:
        roots = {Exception, BaseException, object}
        builtin = [base for base in kind.__mro__ if vars(builtins).get(base.__name__) is base]
        assert set(builtin) - roots, f"{kind.__name__} is no builtin error"
        assert str(kind("the message")) == "the message"


def test_near_matches_are_offered_for_typos_only():
    assert errors.suggest_similar_names("Gama", ["gamma", "lr"]) == " Did you mean 'gamma'?"
    assert errors.suggest_similar_names("xyz", ["gamma", "lr"]) == ""


PROBE = """
import json, logging, os, sys, warnings
before = dict(os.environ), list(warnings.filters), list(logging.root.handlers), logging.root.level
import tfpolicies
after = dict(os.environ), list(warnings.filters), list(logging.root.handlers), logging.root.level
names = "tensorflow", "keras", "onnxruntime", "tf2onnx", "matplotlib", "gymnasium"
heavy = [name for name in names if name in sys.modules]
loggers = logging.Logger.manager.loggerDict
handlers = [name for name, logger in loggers.items() if getattr(logger, "handlers", None)]
sys.stderr.write(json.dumps([before == after, heavy, handlers]))
"""


def test_importing_the_package_loads_prints_and_changes_nothing():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert json.loads(done.stderr) == [True, [], []]
