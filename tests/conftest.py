"""Makes `tools` importable; a Ray cluster and quick collections for those who ask."""

import gc
import importlib.util
import logging
import os
import signal
import sys
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from helpers.chromium import Chromium

settings.register_profile(  # machines are shared: how long an example takes says nothing
    "shared", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

TOOLS = Path(__file__).parent.parent / "tools"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background, and inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "tools" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "tools", TOOLS / "__init__.py", submodule_search_locations=[str(TOOLS)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tools"] = module
    spec.loader.exec_module(module)


gc.disable()  # what imports make stays


def pytest_itemcollected(item):
    if "ray_cluster" in getattr(item, "fixturenames", ()):
        item.add_marker("ray")


def pytest_collection_finish():
    """Spares the garbage collector the million objects of imported modules, for good."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_log_level():
    """Takes back the log level that algorithms set for the whole process, of fixtures, too."""
    logger = logging.getLogger("tfpolicies")
    logger.setLevel(logging.NOTSET)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def own_ctrl_c():
    """Puts the handler of Ctrl-C back, which Ray Tune replaces for the whole process."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def quick_collections():
    """Has the garbage collector pass over what other tests left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def kept_programs():
    """Keeps all Programs until the last test of a file, so that a kind is traced once in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfpolicies.program.program._registry", {})
        yield
    gc.collect()


@pytest.fixture
def new_programs(monkeypatch):
    """Makes all Programs of a test anew, in a file that keeps them: it asks what is traced."""
    monkeypatch.setattr("tfpolicies.program.program._registry", weakref.WeakValueDictionary())


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster on this computer, for all tests that need one."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    yield ray
    ray.shutdown()


@pytest.fixture
def no_extensions(monkeypatch):
    """Has no extension registered, as before `import tfpolicies.compat`."""
    from tfpolicies.base.extensions import EXTENSIONS

    for name in list(EXTENSIONS):
        monkeypatch.delitem(EXTENSIONS, name)


@pytest.fixture(scope="session")
def browser_tools():
    """The folder that `tests/browser/prepare.sh` filled."""
    folder = os.environ.get("BROWSER_TOOLS")
    if not folder:
        pytest.skip("BROWSER_TOOLS does not name the folder of tests/browser/prepare.sh")
    assert Path(folder, "node_modules").is_dir(), f"run tests/browser/prepare.sh {folder}"
    return Path(folder)


@pytest.fixture(scope="module")
def chromium(browser_tools):
    browser = Chromium(browser_tools)
    yield browser
    browser.close()
