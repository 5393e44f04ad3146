"""Exports that are killed while they are placed: the folder has the old one, or the new one."""

import json
import os
import subprocess
import sys

import pytest

from tfpolicies.export.publish import (
    open_staging_folder,
    publish_files,
    publish_folder,
    publish_version,
)

_CHILD = """
import json, os, sys
from pathlib import Path
from helpers.children import call_at_step
from tfpolicies.export.publish import publish_files, publish_version, publish_folder
from tfpolicies.export.publish import open_staging_folder

root = Path(sys.argv[1])
NAMES = ["model.onnx", "play.py", "policy_spec.json"]


def export(target, content, version):
    with open_staging_folder(target) as staged:
        for name in NAMES:
            (staged / name).write_text("same" if name == "play.py" else content + name)
        if version:
            folder = staged / "1"
            folder.mkdir()
            for name in NAMES:
                os.rename(staged / name, folder / name)
            if not publish_folder(staged, target):
                publish_version(folder, target)
        else:
            publish_files(staged, target, NAMES)


def content(folder):
    return {str(x.relative_to(folder)): x.read_text() for x in folder.rglob("*")
            if x.is_file() and "tfp-tmp" not in str(x)}


results = []
for existed, version in ((False, False), (False, True), (True, False), (True, True)):
    for number in range(1, 200):
        target = root / f"{existed}{version}{number}" / "policy"
        if existed:
            export(target, "old ", version)
        child = os.fork()
        if not child:
            call_at_step(number, root)
            export(target, "new ", version)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        left = content(target) if target.exists() else None
        export(target, "next ", version)
        every = sorted(str(x) for x in target.parent.rglob("*"))
        leftovers = [name for name in every if "tfp-tmp" in name]
        results.append([existed, version, os.WIFSIGNALED(status), left, content(target), leftovers])
        if not os.WIFSIGNALED(status):
            break
print(json.dumps(results))
"""

MODEL, SPEC = "model.onnx", "policy_spec.json"


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Returns what is left of exports that were killed at each of their calls to the system."""
    root = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", _CHILD, str(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)


def whole(word):
    return {MODEL: f"{word} {MODEL}", "play.py": "same", SPEC: f"{word} {SPEC}"}


def versions(*words):
    results = [(str(i + 1), whole(word)) for i, word in enumerate(words)]
    return {f"{number}/{name}": x for number, files in results for name, x in files.items()}


def of(killed, existed, version):
    results = [each[2:] for each in killed if each[:2] == [existed, version]]
    assert len(results) > 10
    assert [was_killed for was_killed, *_ in results] == [True] * (len(results) - 1) + [False]
    return results


@pytest.mark.parametrize("version", [False, True])
def test_where_there_was_no_folder_a_killed_export_leaves_none_or_all_of_it(killed, version):
    new = versions("new") if version else whole("new")
    states = [left for _, left, _, _ in of(killed, False, version)]
    assert all(left in (None, new) for left in states), states
    assert states[-1] == new
    assert states[0] is None


@pytest.mark.core
def test_a_killed_version_is_there_as_a_whole_or_not_at_all(killed):
    states = [left for _, left, _, _ in of(killed, True, True)]
    assert all(left in (versions("old"), versions("old", "new")) for left in states), states


@pytest.mark.core
def test_files_that_are_replaced_have_their_own_spec_only_once_all_of_them_are_there(killed):
    states = [left for _, left, _, _ in of(killed, True, False)]
    mixed = {**whole("old"), MODEL: f"new {MODEL}"}  # which the checksums in the spec refuse
    assert all(left in (whole("old"), mixed, whole("new")) for left in states), states
    assert sum(left == mixed for left in states) == 1


@pytest.mark.core
def test_the_next_export_is_whole_and_removes_what_was_left(killed):
    for existed, version, _, left, after, leftovers in killed:
        before = ["old"] * existed + ["new"] * (left is not None and "new" in str(left))
        expected = versions(*before, "next") if version else whole("next")
        assert (after, leftovers) == (expected, [])


def test_files_with_the_same_content_stay_untouched(tmp_path):
    target = tmp_path / "policy"
    for word in ("a", "b"):
        with open_staging_folder(target) as staged:
            for name in ("one", "two"):
                (staged / name).write_text(word if name == "two" else "same")
            publish_files(staged, target, ["one", "two"])
        if word == "a":
            numbers = {name: (target / name).stat().st_ino for name in ("one", "two")}
    assert (target / "two").read_text() == "b"
    assert (target / "one").stat().st_ino == numbers["one"]
    assert sorted(x.name for x in target.iterdir()) == ["one", "two"]


def test_a_folder_that_another_export_made_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "policy"
    with open_staging_folder(target) as first, open_staging_folder(target) as second:
        for staged, word in ((first, "a"), (second, "b")):
            (staged / "1").mkdir()
            (staged / "1" / "file").write_text(word)
        assert publish_folder(first, target)
        assert not publish_folder(second, target)
        assert publish_version(second / "1", target) == target / "2"
    assert {x.name: (x / "file").read_text() for x in target.iterdir()} == {"1": "a", "2": "b"}
