"""What stands in for the rest of RLlib while its own code runs here.

`tools.rllib_tests` runs its unit tests, `tools.rllib_examples` its example scripts.

Modules below the package `rllib_rest` that are not files there are made when they are imported.
Their names are stand-ins, whose use raises a `MissingName`, but for the few that tests need to be
tests at all. As a plugin of pytest it ends tests that take too long, and notes verdicts.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PACKAGE = "rllib_rest"
SECONDS, VERDICTS = "RLLIB_TESTS_SECONDS", "RLLIB_TESTS_VERDICTS"
"""The variables that say how long a test may take, and where verdicts go."""


class MissingName(Exception):
    """A name of RLlib that this package does not have was used."""


class _StandInKind(abc.ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingName(f"{cls.__qualname__}.{name}")

    def _refuse(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingName(next(kind for kind in cls.__mro__ if kind in _MADE).__qualname__)

    __call__ = __instancecheck__ = __getitem__ = __iter__ = __len__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __gt__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __float__ = __int__ = _refuse


_MADE: set[type] = set()


def stand_in(name: str) -> type:
    """Returns what can be imported, annotate and be a base class, and names itself when used."""
    made = _StandInKind(name.rpartition(".")[2], (), {"__qualname__": name})
    _MADE.add(made)
    return made


# -- helpers of tests -------------------------------------------------------------------------


def check(
    x: Any,
    y: Any,
    decimals: int = 5,
    atol: float | None = None,
    rtol: float | None = None,
    false: bool = False,
) -> None:
    """Asserts that two structures of numbers are close; with `false`, that they are not."""
    try:
        _require_close(x, y, 10.0**-decimals if atol is None else atol, rtol or 0.0)
    except AssertionError:
        if not false:
            raise
    else:
        assert not false, f"{x} is {y}"  # noqa: S101


def _require_close(x: Any, y: Any, atol: float, rtol: float) -> None:
    import tensorflow as tf

    if tf.is_symbolic_tensor(x):
        with tf.compat.v1.Session() as opened:
            x = opened.run(x)
    if isinstance(x, dict):
        assert x.keys() == y.keys(), f"{x.keys()} are not {y.keys()}"  # noqa: S101
        for key in x:
            _require_close(x[key], y[key], atol, rtol)
    elif isinstance(x, tuple | list):
        assert len(x) == len(y), f"{x} is not {y}"  # noqa: S101
        for one, other in zip(x, y, strict=True):
            _require_close(one, other, atol, rtol)
    elif isinstance(x, bool | np.bool_ | None) or np.asarray(x).dtype.kind in "OUS":
        assert np.array_equal(x, y), f"{x} is not {y}"  # noqa: S101
    else:
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=rtol)


def framework_iterator(
    config: Any = None,
    frameworks: Sequence[str] | str = ("tf2", "tf", "torch"),
    session: bool = False,
    **rest: Any,
) -> Iterator[Any]:
    """Yields TensorFlow's frameworks, each set in the config, with a session if asked for."""
    import tensorflow as tf

    names = [frameworks] if isinstance(frameworks, str) else frameworks
    for framework in [name for name in ("tf2", "tf") if name in names]:
        if isinstance(config, dict):
            config["framework"] = framework
        elif config is not None:
            config.framework(framework)
        if not session:
            yield framework
        elif framework == "tf2":
            yield framework, None
        else:
            with tf.Graph().as_default(), tf.compat.v1.Session() as opened:
                yield framework, opened


def check_compute_single_action(
    algorithm: Any, include_state: bool = False, include_prev_action_reward: bool = False
) -> None:
    """Asserts that an algorithm acts within its action space."""
    policy = algorithm.get_policy()
    options = {"state": policy.get_initial_state()} if include_state else {}
    if include_prev_action_reward:
        options |= {"prev_action": policy.action_space.sample(), "prev_reward": 1.0}
    for explore in (True, False):
        observation = policy.observation_space.sample()
        result = algorithm.compute_single_action(observation, explore=explore, **options)
        action = result[0] if include_state else result
        assert policy.action_space.contains(action), action  # noqa: S101


def check_train_results(results: Any) -> Any:
    """Asserts that a result has what every result has."""
    for key in ("config", "episode_reward_mean", "info", "timesteps_total", "training_iteration"):
        assert key in results, key  # noqa: S101
    return results


def check_learning_achieved(
    tune_results: Any,
    min_value: float,
    evaluation: bool = False,
    metric: str = "episode_reward_mean",
) -> None:
    """Asserts that the last result of some trial has a reward of at least that."""
    column = f"evaluation/{metric}" if evaluation else metric
    reached = tune_results.get_dataframe()[column].max()
    assert reached >= min_value, f"{metric} of {min_value} not reached, but {reached}"  # noqa: S101


def check_same_batch(one: Any, other: Any) -> None:
    """Asserts that two batches are equal; unroll ids, as in RLlib, only if both have them."""
    assert type(one) is type(other)  # noqa: S101
    assert len(one) == len(other), f"{one} and {other} differ in length"  # noqa: S101
    mine, others = (getattr(batch, "policy_batches", {"": batch}) for batch in (one, other))
    assert mine.keys() == others.keys(), f"{mine.keys()} are not {others.keys()}"  # noqa: S101
    for policy_id, batch in mine.items():
        pair = dict(batch), dict(others[policy_id])
        if not all("unroll_id" in columns for columns in pair):
            pair = tuple({k: x for k, x in c.items() if k != "unroll_id"} for c in pair)
        check(*pair)


def decorator(*args: Any, **kwargs: Any) -> Any:
    """Returns what it decorates, with arguments or without."""
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else decorator


_CHECKS = (
    check,
    check_compute_single_action,
    check_learning_achieved,
    check_same_batch,
    check_train_results,
    framework_iterator,
)
_HELPERS: dict[str, Any] = {
    f"{module}.{function.__name__}": function
    for module in ("utils", "utils.test_utils")
    for function in _CHECKS
}


# -- modules ----------------------------------------------------------------------------------


_ASKED = ("__", "pytest", "setUp", "setup_", "tearDown", "teardown_", "load_tests", "collect_")


@functools.cache
def lookup(module: str, name: str) -> Any:
    """Returns what stands for a name of a module below `rllib_rest`.

    Raises:
        AttributeError: for names that Python and pytest ask every module for.
    """
    own = f"{module}.{name}".removeprefix(f"{PACKAGE}.")
    if name.startswith(_ASKED):
        raise AttributeError(name)
    if own.startswith("ray."):
        return decorator if name in ("init", "shutdown") else getattr(_ray(), name)
    if own.startswith("utils.annotations.") or own == "torch.manual_seed":
        return decorator
    return _HELPERS.get(own) or stand_in(own if own.startswith("torch.") else f"ray.rllib.{own}")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return lookup(self.__name__, name)


def _ray() -> ModuleType:
    return importlib.import_module("ray")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.startswith(f"{PACKAGE}."):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []  # so that modules below it are looked for


class _Files(importlib.abc.MetaPathFinder):
    """Finds modules below `rllib_rest` that are files; what these lack when they run stands in."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        result = name.startswith(f"{PACKAGE}.") and PathFinder.find_spec(name, path, target)
        if result and result.loader:
            result.loader.exec_module = functools.partial(_executed, result.loader.exec_module)
        return result or None


def _executed(execute: Any, module: ModuleType) -> None:
    try:
        execute(module)
    except MissingName:
        module.__class__ = _Module  # the names behind the line that failed are stand-ins


def install() -> None:
    """Makes modules below `rllib_rest` importable, behind those that are files.

    `override` may stand above methods of stand-ins then, which have none.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Files())
        sys.meta_path.append(_Finder())
        compat: Any = importlib.import_module("tfpolicies.compat")
        compat.override = lambda parent: lambda method: method


# -- scripts ----------------------------------------------------------------------------------

_PROCESSORS = 16  # that Ray believes in, so that no worker waits for one
_TRIES = 5  # to start Ray, which gives up after 30 seconds on a machine that has much to do


def run_script() -> None:
    """Runs the module that the command line names, with the arguments behind it, as a script."""
    del sys.argv[0]
    ray, tune = _ray(), importlib.import_module("ray.tune")
    ray.init = functools.partial(_start, ray, ray.init)
    tune.Tuner.fit = functools.partialmethod(_fit, tune.Tuner.fit)
    _complete_ray()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _start(ray: Any, init: Any, *args: Any, **settings: Any) -> Any:
    """Starts Ray as it suits the machine, whatever a script says."""
    del args, settings
    for tries in range(_TRIES):
        try:
            return init(num_cpus=_PROCESSORS, include_dashboard=False, ignore_reinit_error=True)
        except Exception as error:
            if "timed out" not in str(error) or tries == _TRIES - 1:
                raise
            ray.shutdown()


def _fit(tuner: Any, fit: Any) -> Any:
    """Returns the results of a `Tuner`, all of whose trials have ended well."""
    results = fit(tuner)
    for error in results.errors:
        raise error
    return results


def _complete_ray() -> None:
    """Gives Ray's private module what scripts of RLlib's time ask it for."""
    utils: Any = importlib.import_module("ray._private.utils")
    utils.get_user_temp_dir = os.getcwd  # the folder that is thrown away


# -- pytest -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*args: Any) -> None:
        raise TimeoutError("the test took too long")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(int(os.environ[SECONDS]))
    try:
        yield
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """Ends a test that takes too long."""
    with _limited():
        return (yield)


def pytest_configure(config: Any) -> None:
    """Stands in for PyTorch."""
    compat: Any = importlib.import_module("tfpolicies.compat")
    torch, nn = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("torch", "torch.nn"))
    compat.try_import_torch = lambda error=False: (torch, nn)


def pytest_collection_finish(session: Any) -> None:
    """Completes Ray, if a test imports it."""
    if "ray._private.utils" in sys.modules:
        _complete_ray()


def pytest_runtest_logreport(report: Any) -> None:
    """Notes the verdict of a test, or what went wrong before or behind it."""
    if report.when == "call" or not report.passed:
        _note(report.nodeid, report)


def pytest_collectreport(report: Any) -> None:
    """Notes a file that cannot be imported."""
    if report.failed:
        _note(report.nodeid, report)


def _note(node: str, report: Any) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr or "")
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    reason = lines[0] if crash is not None else lines[-1]
    verdict = {"node": node, "outcome": report.outcome, "reason": reason.strip()}
    with Path(os.environ[VERDICTS]).open("a") as file:
        file.write(json.dumps(verdict) + "\n")
