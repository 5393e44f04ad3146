"""The sdist and the wheel: complete, equal, readable on an index, and usable without sources."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from helpers.processes import HOME
from helpers.serving import without_python_path
from tfpolicies._version import __version__

pytestmark = pytest.mark.release

UV = [sys.executable, "-m", "uv", "-q"]
WHEEL, SDIST = f"tfpolicies-{__version__}-py3-none-any.whl", f"tfpolicies-{__version__}.tar.gz"
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", ".git", ".peers", "*.egg-info", ".*_cache")
SUFFIXES = (".cff", ".cfg", ".in", ".ini", ".md", ".py", ".toml")
FOLDERS = ("benchmarks", "distributions", "docs", "examples", "tfpolicies", "tools")


def call(*command: object, folder: Path) -> str:
    """Runs a command outside the source tree; returns its output, and asserts that it succeeds."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=without_python_path(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the source tree, where a build may leave files."""
    folder = tmp_path_factory.mktemp("source") / "tfpolicies"
    for name in FOLDERS:
        shutil.copytree(HOME / name, folder / name, ignore=NOT_SHIPPED)
    for path in HOME.iterdir():
        if path.suffix in SUFFIXES or path.name in ("LICENSE", "constraints.txt"):
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def built(source):
    """The folder of an sdist and the wheels of both distributions, from the source tree."""
    folder = source.parent / "dist"
    call(*UV, "build", "--sdist", "--out-dir", folder, source, folder=source.parent)
    for project in (source, source / "distributions" / "serve"):
        call(*UV, "build", "--wheel", "--out-dir", folder, project, folder=source.parent)
    return folder


def read_metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"tfpolicies-{__version__}.dist-info/METADATA").decode()
    return email.message_from_string(text)


def test_the_files_have_valid_metadata(built):
    names = sorted(built.glob("*.whl")) + sorted(built.glob("*.tar.gz"))
    assert len(names) == 3
    call(*UV, "tool", "run", "twine", "check", "--strict", *names, folder=built)
    call(*UV, "tool", "run", "cffconvert", "--validate", folder=HOME)


def test_the_wheel_has_every_file_of_the_package(built, source):
    expected = {
        str(path.relative_to(source))
        for path in (source / "tfpolicies").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built / WHEEL) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected


def test_the_sdist_has_the_package_its_pages_and_scripts(built, source):
    with tarfile.open(built / SDIST) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        str(path.relative_to(source))
        for folder in (*FOLDERS, "")
        for path in (source / folder).glob("**/*" if folder else "*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for_clones = {"tox.ini", "toxfile.py"}
    assert {x for x in expected - names - for_clones if not x.startswith(".")} == set()


def test_an_sdist_builds_the_same_wheel(built, tmp_path):
    call(*UV, "build", "--wheel", "--out-dir", tmp_path, built / SDIST, folder=tmp_path)
    with zipfile.ZipFile(built / WHEEL) as one, zipfile.ZipFile(tmp_path / WHEEL) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        different = [name for name in one.namelist() if one.read(name) != other.read(name)]
    assert [name for name in different if not name.endswith("/RECORD")] == []


def test_the_description_has_no_links_or_pictures_that_need_the_repository(built):
    metadata = read_metadata(built / WHEEL)
    description = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "![" not in description
    assert "| | |\n|---|---|\n\n" not in description
    assert "pip install" in description


def test_an_installed_wheel_trains_exports_and_plays_without_the_sources(built, tmp_path):
    python, command = tmp_path / "bin" / "python", tmp_path / "bin" / "tfpolicies"
    call(*UV, "venv", "--python", sys.executable, "--clear", tmp_path, folder=tmp_path)
    call(*UV, "pip", "install", "--python", python, built / WHEEL, folder=tmp_path)

    place = call(python, "-c", "import tfpolicies; print(tfpolicies.__file__)", folder=tmp_path)
    assert Path(place.strip()).is_relative_to(tmp_path)
    options = ["--steps", "2000", "--num-envs", "4", "--seed", "0"]
    call(command, "train", "CartPole-v1", *options, folder=tmp_path)
    assert "mean return" in call(command, "evaluate", "runs", "--episodes", "3", folder=tmp_path)
    assert "verified" in call(command, "export", "runs", "--to", "exported", folder=tmp_path)
    play = ["play-exported", "exported", "--env", "CartPole-v1", "--episodes", "3"]
    assert "without tensorflow and tfpolicies" in call(command, *play, folder=tmp_path)
    assert "PPO" in call(command, "list", "algorithms", folder=tmp_path)
    assert "CartPole-v1" in call(command, "list", "environments", folder=tmp_path)
    assert "HalfCheetah-v5" in call(command, "list", "tuned", folder=tmp_path)
