"""The files of the project that other programs read: constraints and citation."""

import re
from configparser import ConfigParser

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.processes import HOME
from tfpolicies._version import __version__
from tools.constraints import ENVIRONMENTS, FILE, format_constraints, normalize

SETUP = ConfigParser(interpolation=None)
SETUP.read(HOME / "setup.cfg", encoding="utf-8")
NEWEST_EXTRAS = {"mlflow", "wandb"}  # tested in an environment of their own
TEST_EXTRAS = set(SETUP["options.extras_require"]) - {"dev"} - NEWEST_EXTRAS


def read_constraints(python: str) -> dict[str, str]:
    """Returns the pinned version of each package for a version of Python."""
    versions: dict[str, str] = {}
    for line in FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate({"python_version": python}):
                assert pin.name not in versions, f"{pin.name} has two versions on {python}"
                (specifier,) = pin.specifier
                versions[canonicalize_name(pin.name)] = specifier.version
    return versions


def list_requirements(python: str) -> list[Requirement]:
    """Returns what the package and its extras depend on, on a version of Python."""
    sections = [SETUP["options"]["install_requires"]]
    sections += [SETUP["options.extras_require"][extra] for extra in sorted(TEST_EXTRAS)]
    requirements = [Requirement(line) for text in sections for line in text.strip().splitlines()]
    return [
        requirement
        for requirement in requirements
        if requirement.name != "tfpolicies"
        and (requirement.marker is None or requirement.marker.evaluate({"python_version": python}))
    ]


@pytest.mark.parametrize("python", ENVIRONMENTS)
def test_the_constraints_satisfy_each_requirement(python):
    versions = read_constraints(python)
    without_wheels = {"envpool"}  # on some versions of Python
    for requirement in list_requirements(python):
        name = canonicalize_name(requirement.name)
        if name not in without_wheels:
            assert name in versions, f"run `python -m tools.constraints`: {name} is missing"
        if name in versions:
            assert versions[name] in requirement.specifier, f"{requirement} on Python {python}"


def test_constraints_name_the_versions_of_python_only_where_they_differ():
    versions = {
        "3.10": {"a": "1", "b": "1", "c": "1"},
        "3.11": {"a": "1", "b": "2"},
        "3.12": {"a": "1", "b": "2", "c": "1"},
    }
    assert format_constraints(versions).splitlines() == [
        "a==1",
        'b==1; python_version == "3.10"',
        'b==2; python_version >= "3.11"',
        'c==1; python_version == "3.10" or python_version == "3.12"',
    ]
    assert normalize("Ray_Default.x") == "ray-default-x"


def test_each_supported_python_has_constraints():
    classifiers = SETUP["metadata"]["classifiers"]
    assert list(ENVIRONMENTS) == re.findall(r"Python :: (3\.\d+)", classifiers)
    tox = (HOME / "tox.ini").read_text()
    assert all(f"[testenv:{name}]" in tox or name in tox for name in ENVIRONMENTS.values())


def test_the_oldest_constraints_are_those_of_the_oldest_tested_environment():
    versions = read_constraints("3.10")
    tox = (HOME / "tox.ini").read_text().partition("[testenv:py310-oldest]")[2].partition("\n[")[0]
    pins = re.findall(r"^    ([\w-]+)(?:\[\S+\])?==(\S+)$", tox, re.MULTILINE)
    assert len(pins) > 10
    assert {name: versions[name] for name, _ in pins} == dict(pins)


def test_the_citation_names_this_version_and_license():
    text = (HOME / "CITATION.cff").read_text()
    entries = dict(re.findall(r"^([\w-]+): (.+)$", text, re.MULTILINE))
    assert entries["cff-version"] == "1.2.0"
    assert (entries["title"], entries["version"]) == ("tfpolicies", __version__)
    assert entries["license"] == SETUP["metadata"]["license"]


def test_the_security_page_names_this_version():
    text = (HOME / "SECURITY.md").read_text()
    assert f"The version is {__version__}" in text
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    assert [link for link in links if not (HOME / link).exists()] == []
