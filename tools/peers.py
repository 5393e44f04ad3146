"""The peers' interpreters: one virtual environment each, made when it is missing."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int]
PEERS = Path(__file__).resolve().parents[1] / "benchmarks" / ".peers"
TORCH_WHEELS = "https://download.pytorch.org/whl/cpu"


class PeerError(RuntimeError):
    """A peer's virtual environment cannot be made."""


@dataclass(frozen=True)
class Peer:
    """A package to measure against, and what its virtual environment holds.

    Attributes:
        name: Folder of the environment.
        python: Version of Python that it needs, or None for the one that runs this.
        requirements: What is installed into it.
        torch: Version of torch to install first, as a CPU build, or None.
    """

    name: str
    python: Version | None
    requirements: tuple[str, ...]
    torch: str | None = None

    def wanted(self) -> str:
        """Returns the text of the file that marks a complete environment."""
        torch = (f"torch=={self.torch}",) if self.torch else ()
        return "\n".join((*torch, *self.requirements)) + "\n"


SB3 = Peer(
    "sb3",
    python=None,
    requirements=(
        "stable-baselines3==2.9.2",
        "gymnasium[box2d,classic-control,mujoco]==1.4.0",
        "mujoco==4.0.0",
        "envpool==1.2.5",
    ),
    torch="2.13.0",
)
SBX = Peer(
    "sbx",
    python=None,
    requirements=(
        "sbx-rl==0.28.0",
        "stable-baselines3==2.9.2",
        "jax==0.10.2",
        "flax==0.12.8",
        "optax==0.2.8",
        "tfp-nightly==0.26.0.dev20261027",
        "gymnasium[box2d,classic-control,mujoco]==1.4.0",
        "mujoco==4.0.0",
    ),
    torch="2.13.0",
)
RLLIB = Peer(
    "rllib",
    python=(3, 10),
    requirements=(
        "ray[rllib]==2.10.0",
        "tensorflow-cpu==2.15.1",
        "tensorflow-probability==0.23.0",
        "numpy<2",
        "gymnasium==0.28.1",
        "pyarrow<16",
        "setuptools<81",
        "psutil",
        "pygame",
    ),
)

TF_SERVING = Peer("tf-serving", python=None, requirements=("tensorflow-serving-api==2.21.0",))
MLSERVER = Peer("mlserver", python=(3, 11), requirements=("mlserver==1.7.1", "onnxruntime==1.22.1"))
KSERVE = Peer("kserve", python=(3, 11), requirements=("kserve==0.21.0",))


def interpreter(peer: Peer, folder: Path) -> Path:
    """Returns the interpreter of `peer` in `folder`, making its environment if need be.

    An environment counts as complete when it carries the list of what was to be installed; one
    that was left half-made, or that was made for another list, is made anew.

    Raises:
        PeerError: if no fitting Python is found, or an installation fails.
    """
    home = folder / peer.name
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    marker = home / "complete.txt"
    if marker.is_file() and marker.read_text() == peer.wanted():
        return python
    print(f"Making the environment of {peer.name} in {home} (once) ...", file=sys.stderr)
    if home.exists():
        shutil.rmtree(home)
    _make(peer, home)
    _install(peer, python)
    marker.write_text(peer.wanted())
    return python


def _make(peer: Peer, home: Path) -> None:
    """Makes an empty virtual environment that has pip."""
    result = _find_python(peer.python) if peer.python else sys.executable
    if uv := _uv():
        # Without a local Python of the version, uv brings one.
        version = result or ".".join(map(str, peer.python or ()))
        _run([uv, "venv", "--quiet", "--seed", "--python", version, str(home)])
    elif result:
        _run([result, "-m", "venv", str(home)])
    else:
        version = ".".join(map(str, peer.python or ()))
        raise PeerError(
            f"{peer.name} needs Python {version}, and neither PATH nor pyenv has it. Install it, "
            f"or install uv (which brings it), or name an interpreter that has the packages by "
            f"--{peer.name}-python."
        )


def _install(peer: Peer, python: Path) -> None:
    """Installs torch by pip (from the index of CPU builds), the rest by uv where there is one."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if peer.torch:
        _run([*pip, "--extra-index-url", TORCH_WHEELS, f"torch=={peer.torch}"])
    if uv := _uv():
        _run([uv, "pip", "install", "--quiet", "--python", str(python), *peer.requirements])
    else:
        _run([*pip, *peer.requirements])


def _uv() -> str | None:
    result = shutil.which("uv")
    return result if result and _output([result, "--version"]) else None


def _find_python(version: Version) -> str | None:
    """Returns an interpreter of this version that runs, or None."""
    ask = "import sys; print(*sys.version_info[:2])"
    expected = "{} {}".format(*version)
    return next(
        (path for path in _candidates(version) if _output([path, "-c", ask]) == expected), None
    )


def _candidates(version: Version) -> Iterator[str]:
    """Yields places where an interpreter of this version may be, the likeliest first."""
    name = "{}.{}".format(*version)
    yield sys.executable
    if on_path := shutil.which(f"python{name}"):
        yield on_path
    if (uv := _uv()) and (result := _output([uv, "python", "find", "--no-python-downloads", name])):
        yield result
    if (pyenv := shutil.which("pyenv")) and (root := _output([pyenv, "root"])):
        yield from map(str, sorted(Path(root).glob(f"versions/{name}.*/bin/python"), reverse=True))


def _output(command: list[str]) -> str | None:
    """Returns what `command` prints, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise PeerError(f"`{' '.join(command)}` failed with code {done.returncode}:\n{said}")
