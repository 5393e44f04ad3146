"""Searches settings that learn well: `tune`, which trains many runs and compares them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
from rich.console import Console

from tfpolicies.base.validators import POSITIVE_INT, is_finite, is_int_at_least
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.description import encode_settings
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.distributed.registry_sync import pack_registries
from tfpolicies.envs.env_registry import get_env_name
from tfpolicies.errors import ConfigError, UnpicklableError, UsageError, show_value
from tfpolicies.system.atomic import write_atomically
from tfpolicies.system.paths import shorten_path
from tfpolicies.tuning.console import SearchConsole
from tfpolicies.tuning.options import TuneOptions
from tfpolicies.tuning.picture import draw_search
from tfpolicies.tuning.search import Search
from tfpolicies.tuning.search_folder import SearchFolder, make_search_name
from tfpolicies.tuning.search_results import TuneResult, find_best, make_best_json
from tfpolicies.tuning.search_space import SearchSpace, nest
from tfpolicies.tuning.shipped_spaces import add_free_log_std, get_search_space
from tfpolicies.tuning.study import import_optuna
from tfpolicies.tuning.trial_process import ProcessSetup, TrialProcess

_RUNS = "runs"  # the folder of all runs
_MAY_CHANGE = ("trials", "jobs", "until")  # options that a resumed search may change


def tune(
    config: AlgorithmConfig,
    space: Mapping[str, Any] | None = None,
    *,
    trials: int = 30,
    seeds: int = 1,
    steps: int = 100_000,
    jobs: int = 1,
    until: float | None = None,
    seed: int | None = None,
    eval_episodes: int = 10,
    folder: str | PathLike[str] | None = None,
    progress: bool = True,
) -> TuneResult:
    """Searches settings with which an algorithm learns well.

    Each trial trains `seeds` runs with settings of the space, and its result is the mean return of
    greedy episodes after training, over its runs. Trial 0 has the settings of the config. Optuna
    proposes the others by its TPE sampler, and after five complete trials it prunes by the median
    rule: an evaluation happens after each tenth of the steps, and a trial ends early if the best
    one of its first run is worse than the median of the earlier trials. A run that fails or
    diverges makes its trial the worst one.

    All runs with the same position in their trials have the same seed. With one job, the same
    arguments give the same trials. Each run has an ordinary run folder.

    A search that was interrupted or killed continues if you call `tune` again with its folder:
    finished trials stay, and others run again with the same settings. `trials`, `jobs` and `until`
    may change then.

    Args:
        config: of the algorithm, with its environment; it is not changed.
        space: the searched settings: `{"lr": log_uniform(1e-5, 1e-2), "model.fcnet_hiddens":
            choice([[64, 64], [256, 256]])}`, with the ranges of `tfpolicies.tuning`. Plain values
            are constants of all trials but trial 0. None: the space of the algorithm, which
            `tfpolicies tune --show-space` prints.
        trials: how many there are.
        seeds: runs of each trial.
        steps: environment steps of each run.
        jobs: trials that train at the same time, each in its process.
        until: the search ends when the mean return of a trial reaches this.
        seed: of the sampler and of the first run of each trial; None: that of the config, or 0.
        eval_episodes: greedy episodes of each evaluation.
        folder: of the search; None: a new one in `runs`.
        progress: whether to print a line for each trial, and a summary.

    Raises:
        ConfigError: if the config cannot be built, does not accept the space, or if the first five
            trials fail.
        UsageError: for an invalid argument, or a folder that holds something else.
        FolderInUseError: if another process searches there.
        MissingPackageError: if Optuna is not installed.
        UnpicklableError: if the config cannot be sent to the processes of the trials.

    Example::

        config = PPOConfig().environment("CartPole-v1")
        space = {"lr": log_uniform(1e-5, 1e-2), "gamma": choice([0.95, 0.99])}
        result = tune(config, space, trials=20, steps=50_000)
        config.update_from_dict(result.best_settings)
    """
    if not isinstance(config, AlgorithmConfig):
        raise UsageError(
            "tune takes a config, such as PPOConfig().environment('CartPole-v1'), got "
            f"{show_value(config)}."
        )
    seed = seed if seed is not None else config.seed if config.seed is not None else 0
    options = TuneOptions(
        trials=trials,
        seeds=seeds,
        steps=steps,
        seed=seed,
        jobs=jobs,
        until=until,
        eval_episodes=eval_episodes,
    )
    plan = SearchPlan(config, None if space is None else SearchSpace.from_mapping(space), options)
    if folder is None:
        folder = Path(_RUNS, make_search_name(*_get_names(config)))
    return run_search(plan, SearchFolder(folder), Console(quiet=not progress))


class SearchPlan(NamedTuple):
    """Plan of a search.

    Attributes:
        config: with the environment, without settings of trials.
        space: the ranges; None for those of the algorithm, without `preset_names`.
        options: of the search.
        preset_names: settings that the space of the algorithm leaves as they are in the config.
        bases: further configs for which `best.json` gives the best settings.
        command: the settings of the command, for `tune.json`.
    """

    config: AlgorithmConfig
    space: SearchSpace | None
    options: TuneOptions
    preset_names: Sequence[str] = ()
    bases: Sequence[AlgorithmConfig] = ()
    command: Mapping[str, Any] | None = None


def run_search(plan: SearchPlan, folder: SearchFolder, console: Console) -> TuneResult:
    """Runs or resumes a search and writes its results.

    Args:
        plan: of the search.
        folder: a new one, or that of a search with the same plan.
        console: shows the progress.

    Raises:
        As `tune`.
    """
    import_optuna()
    options = _check_options(plan.options)
    config = _prepare_config(plan.config, options)
    if plan.space is not None:
        plan.space.check(config)
    pickled = _pickle(config)
    is_new_folder = not folder.path.exists()
    with ExitStack() as stack:
        stack.enter_context(folder.acquire())
        space = _resume_space(plan, config, folder) if folder.is_search else None
        setup = ProcessSetup(pickled, pack_registries(), folder.log, options.jobs)
        try:
            with console.status("building"):
                process = TrialProcess(setup)
                stack.callback(process.close)
                has_box_actions = process.receive_check()
            if space is None:
                space = _make_space(plan, config, has_box_actions=has_box_actions)
                space.check(config)
                folder.write(_describe(plan, config, space))
        except BaseException:
            if is_new_folder and not folder.is_search:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        unit = "step" if needs_environment(config.input_) else "row"
        search_console = SearchConsole(console, options, unit)
        search = Search(folder, config, space, options, setup, process, search_console)
        search_console.print_start(folder, space, len(search.rows))
        try:
            with search_console:
                search.run()
        finally:
            _write_best(plan, config, folder, search)
        result = _write_results(plan, config, folder, search)
        search_console.print_result(result, space, config)
        return result


def _get_names(config: AlgorithmConfig) -> tuple[str, str]:
    """Returns the names of algorithm and environment."""
    algorithm = getattr(config.algo_class, "__name__", "Algorithm")
    return algorithm, "data" if config.env is None else get_env_name(config.env)


def _check_options(options: TuneOptions) -> TuneOptions:
    for name in ("trials", "seeds", "steps", "jobs", "eval_episodes"):
        value = getattr(options, name)
        if not POSITIVE_INT.is_valid(value):
            raise UsageError(f"{name} must be a whole number, 1 or more, got {value!r}.")
    if not is_int_at_least(options.seed, 0):
        raise UsageError(f"seed must be a whole number, 0 or more, got {options.seed!r}.")
    if options.until is not None and not is_finite(options.until):
        raise UsageError(f"until must be a number or None, got {options.until!r}.")
    return options


def _prepare_config(config: AlgorithmConfig, options: TuneOptions) -> AlgorithmConfig:
    """Returns the config of the runs, which evaluates greedily when a trial asks for it."""
    if config.env is None and config.evaluation_config is None:
        raise ConfigError("tune needs an environment to play in: config.environment(...).")
    config = config.copy(copy_frozen=False)
    config.evaluation(
        evaluation_interval=None,
        evaluation_duration=options.eval_episodes,
        evaluation_duration_unit="episodes",
        evaluation_config={**(config.evaluation_config or {}), "explore": False},
    )
    return config


def _pickle(config: AlgorithmConfig) -> bytes:
    try:
        return cloudpickle.dumps(config)
    except Exception as error:
        raise UnpicklableError(
            f"The config cannot be sent to the processes of the trials: {error}. Define its "
            "classes and functions at the top level of a module, and give them without open files "
            "or locks."
        ) from error


def _describe(
    plan: SearchPlan, config: AlgorithmConfig, space: SearchSpace | None
) -> dict[str, Any]:
    """Returns the content of `tune.json`."""
    algorithm, env = _get_names(config)
    return {
        "created": datetime.now().isoformat(timespec="seconds"),
        "algorithm": algorithm,
        "env": env,
        "options": dataclasses.asdict(plan.options),
        "space": None if space is None else space.to_json(),
        "config": encode_settings(config.to_dict()),
        "command": None if plan.command is None else dict(plan.command),
    }


def _resume_space(plan: SearchPlan, config: AlgorithmConfig, folder: SearchFolder) -> SearchSpace:
    """Returns the space of a search that is resumed, and updates its `tune.json`.

    Raises:
        UsageError: if it is another search.
    """
    stored = folder.read()
    content = _describe(plan, config, plan.space) | {"created": stored["created"]}
    if plan.space is None:
        content["space"] = stored["space"]
    _require_same_search(content, stored, folder)
    folder.write(content)
    return SearchSpace.from_json(content["space"])


def _make_space(plan: SearchPlan, config: AlgorithmConfig, *, has_box_actions: bool) -> SearchSpace:
    """Returns the space of a new search: that of the plan, or of the algorithm."""
    if plan.space is not None:
        return plan.space
    space = get_search_space(config)
    space = add_free_log_std(space, config) if has_box_actions else space
    return space.without(plan.preset_names) if plan.preset_names else space


def _require_same_search(
    content: Mapping[str, Any], stored: Mapping[str, Any], folder: SearchFolder
) -> None:
    """Checks that a folder holds a search with the same config, space and options."""
    current = {name: content[name] for name in ("algorithm", "env", "space")}
    before = {name: stored.get(name) for name in current}
    for part in ("options", "config"):
        current |= {name: x for name, x in content[part].items() if name not in _MAY_CHANGE}
        before |= {name: x for name, x in stored.get(part, {}).items() if name not in _MAY_CHANGE}
    different = [name for name in current if current[name] != before.get(name)]
    if different:
        differences = ", ".join(
            f"{name} (there {show_value(before.get(name), 60)}, here "
            f"{show_value(current[name], 60)})"
            for name in different[:3]
        )
        raise UsageError(
            f"{shorten_path(folder.path)} holds another search: {differences}. Give another folder "
            "for a new search, or the same arguments to resume that one."
        )


def _write_best(
    plan: SearchPlan, config: AlgorithmConfig, folder: SearchFolder, search: Search
) -> None:
    """Writes `best.json`, unless no trial is complete."""
    best = find_best(search.rows)
    if best is not None:
        content = make_best_json(config, best, [type(config)(), *plan.bases])
        write_atomically(folder.best_json, content)


def _write_results(
    plan: SearchPlan, config: AlgorithmConfig, folder: SearchFolder, search: Search
) -> TuneResult:
    rows = search.rows
    best = find_best(rows)
    if best is None:
        raise ConfigError(
            f"No trial succeeded. {shorten_path(folder.trials_csv)} has the reasons, and "
            f"{shorten_path(folder.log)} the tracebacks."
        )
    importances = search.study.compute_importances()
    title = " on ".join(_get_names(config))
    draw_search(rows, importances, folder.picture, title=title, target=plan.options.until)
    return TuneResult(
        best_return=best.mean_return,  # type: ignore[arg-type]
        best_settings=nest(best.settings),
        trials=rows,
        importances=importances,
        folder=folder.path,
        best_json=folder.best_json,
        trials_csv=folder.trials_csv,
        picture=folder.picture,
    )
