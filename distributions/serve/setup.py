"""The distribution `tfpolicies-serve`: the package `tfpolicies` with what serving depends on.

Everything is read from the repository's `setup.cfg`, so that nothing is written twice. Build wheels
in a clone; an sdist would lack the package.
"""

import configparser
import re
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

ROOT = "../.."
BASE = ("numpy", "onnxruntime", "psutil")  # of the packages that `tfpolicies` depends on
EXTRAS = ("data",)

config = configparser.ConfigParser(interpolation=None)
config.read(Path(ROOT, "setup.cfg"), encoding="utf-8")


def read_lines(section: str, option: str) -> list[str]:
    """Returns the lines of an option of `setup.cfg`."""
    return config[section][option].strip().splitlines()


def read_version() -> str:
    """Returns the version of the package."""
    source = Path(ROOT, "tfpolicies", "_version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]


packages = read_lines("options", "install_requires")
needed = [package for package in packages if re.match(r"\w+", package)[0] in BASE]
with tempfile.TemporaryDirectory() as build:  # files of an earlier build would get into the wheel
    setup(
        name="tfpolicies-serve",
        version=read_version(),
        description="Serves policies of tfpolicies over HTTP and gRPC, without TensorFlow.",
        long_description=Path("README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license=config["metadata"]["license"],
        license_files=["LICENSE"],
        keywords=config["metadata"]["keywords"],
        classifiers=read_lines("metadata", "classifiers"),
        python_requires=config["options"]["python_requires"],
        packages=find_packages(ROOT, include=read_lines("options.packages.find", "include")),
        package_dir={"": ROOT},
        package_data={"tfpolicies": read_lines("options.package_data", "tfpolicies")},
        install_requires=[*needed, *read_lines("options.extras_require", "serve")],
        extras_require={name: read_lines("options.extras_require", name) for name in EXTRAS},
        entry_points={
            group: read_lines("options.entry_points", group)
            for group in config["options.entry_points"]
        },
        options={"build": {"build_base": build}, "egg_info": {"egg_base": build}},
    )
