"""RLlib's own example scripts on this package: `python -m tools.rllib_examples --rllib PATH`.

`PATH` is the folder `rllib` of the sources of release 2.10.0. Its examples are ported by
`tfpolicies port` into a temporary folder, and each script of the table below is run there with its
smallest stop setting, in a separate process. What scripts import of RLlib that has no place here
is a stand-in that fails when it is used, naming itself (`rllib_stand_in.py`). Ray believes that
there are enough processors, and `ray.init()` does nothing. A trial of Tune that fails fails its
script.

Prints each verdict and how many run. `--table FILE` writes the table, with the scripts that do not
count and the reason; `--only NAME ...` runs some scripts, by path or a part of it.

`--learn` runs the scripts that have a `--stop-reward`, each with the arguments that the release's
own tests give it (its file `BUILD`), or else with its own settings. It prints the reward that is
asked for, the one that was reached, and the time.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tfpolicies.errors import UsageError
from tools.rllib_stand_in import PACKAGE
from tools.rllib_tests import markdown, write_folder

_ITERS = "--stop-iters 1"
_STOP = f"{_ITERS} --stop-timesteps 1000"
_TF2 = "--framework tf2"
_ALL = f"{_TF2} {_STOP}"
_SERVING = "inference_and_serving/policy_inference_after_training"
_EPISODES = f"{_ALL} --num-episodes-during-inference 1"

SCRIPTS = {
    "autoregressive_action_dist": _ALL,
    "cartpole_lstm": _ALL,
    "centralized_critic": _ALL,
    "centralized_critic_2": _ALL,
    "checkpoint_by_custom_criteria": _ALL,
    "curriculum_learning": _ALL,
    "custom_env": _ALL,
    "custom_eval": _ALL,
    "custom_experiment": "--train-iterations 1",
    "custom_model_api": _TF2,
    "custom_train_fn": _TF2,
    "deterministic_training": f"{_TF2} {_ITERS}",
    "documentation/custom_gym_env": "",
    "documentation/rllib_on_ray_readme": "",
    "documentation/rllib_on_rllib_readme": "",
    "documentation/saving_and_loading_algos_and_policies": "",
    "env_rendering_and_recording": _ALL,
    "export/cartpole_dqn_export": "",
    "export/onnx_tf": _TF2,
    "fractional_gpus": f"{_ALL} --num-gpus 0",
    "hierarchical_training": _ALL,
    f"{_SERVING}": _EPISODES,
    f"{_SERVING}_with_attention": _EPISODES,
    f"{_SERVING}_with_lstm": _EPISODES,
    "multi_agent_cartpole": _ALL,
    "multi_agent_different_spaces_for_agents": _ALL,
    "multi_agent_two_trainers": f"{_TF2} {_ITERS}",
    "parallel_evaluation_and_training": _ALL,
    "parametric_actions_cartpole": _ALL,
    "parametric_actions_cartpole_embeddings_learnt_by_model": _ALL,
    "restore_1_of_n_agents_from_checkpoint": f"{_ALL} --pre-training-iters 1",
    "rock_paper_scissors_multiagent": _ALL,
    "two_step_game": _ALL,
    "two_trainer_workflow": _STOP,
}
"""What is run, with its arguments."""

_BROKEN = "fails with RLlib, too:"
_NEW = "RLlib's new API stack"
_OFFLINE = "offline data"
_REMOTE = "remote_worker_envs: see docs/migrate/rllib.md"
_SERVER = "policy server and client"

NOT_COUNTED = {
    "action_masking": _NEW,
    "attention_net_supervised": f"{_BROKEN} imports a module `rllib`",
    "complex_struct_space": "Repeated spaces: see docs/migrate/rllib.md",
    "compute_adapted_gae_on_postprocess_trajectory": "callbacks to import, no script",
    "connectors/connector_v2_frame_stacking": _NEW,
    "connectors/connector_v2_mean_std_filtering": _NEW,
    "connectors/connector_v2_nested_observation_spaces": _NEW,
    "connectors/connector_v2_prev_actions_prev_rewards": _NEW,
    "connectors/v1/adapt_connector_policy": "APPO",
    "connectors/v1/run_connector_policy": "APPO",
    "connectors/v1/self_play_with_policy_checkpoint": "OpenSpiel and PyTorch",
    "custom_input_api": f"{_OFFLINE}, CQL",
    "custom_keras_model": f"{_BROKEN} its callback reads result['result']",
    "custom_logger": "ray.tune.logger.Logger, which Ray has no more",
    "custom_metrics_and_callbacks": f"{_BROKEN} its callback reads the column 'dones'",
    "custom_model_loss_and_metrics": _OFFLINE,
    "custom_recurrent_rnn_tokenizer": _NEW,
    "documentation/replay_buffer_demo": "replay buffers",
    "env/bandit_envs_recommender_system": "bandits, RecSim",
    "env/greyscale_env": "PyTorch, SuperSuit",
    "env/mbmpo_env": "MBMPO",
    "export/onnx_torch": "PyTorch",
    "inference_and_serving/serve_and_rllib": "Ray Serve",
    "learner/multi_agent_cartpole_ppo": _NEW,
    "learner/ppo_load_rl_modules": _NEW,
    "learner/ppo_tuner": _NEW,
    "learner/train_w_bc_finetune_w_ppo": _NEW,
    "multi_agent_custom_policy": _NEW,
    "multi_agent_independent_learning": "Waterworld of PettingZoo's SISL",
    "multi_agent_parameter_sharing": "Waterworld of PettingZoo's SISL",
    "nested_action_spaces": _NEW,
    "offline_rl": f"{_OFFLINE}, CQL",
    "remote_base_env_with_custom_api": _REMOTE,
    "remote_envs_with_inference_done_on_main_node": _REMOTE,
    "replay_buffer_api": "R2D2",
    "saving_experiences": _OFFLINE,
    "sb2rllib_rllib_example": f"{_BROKEN} asks Tune's results for trials",
    "sb2rllib_sb_example": "Stable-Baselines2",
    "self_play_league_based_with_open_spiel": "OpenSpiel",
    "self_play_with_open_spiel": "OpenSpiel",
    "serving/cartpole_client": _SERVER,
    "serving/cartpole_server": _SERVER,
    "serving/dummy_client_with_two_episodes": _SERVER,
    "serving/unity3d_client": "Unity",
    "serving/unity3d_dummy_client": "Unity",
    "serving/unity3d_server": "Unity",
    "unity3d_env_local": "Unity",
}
"""What is not run, because it is about something that is not offered."""

_RUN = "from tools.rllib_stand_in import run_script; run_script()"
_RAISED = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|MissingName|Exit)\b.*)")


class Verdict(NamedTuple):
    """How a script ended."""

    script: str
    verdict: str  # "runs", "fails", "late"
    reason: str


class Learned(NamedTuple):
    """How far a script learned."""

    script: str
    verdict: str  # "learns", "short" (it stopped before), "fails", "late"
    asked: float  # mean reward
    reached: float  # NaN where the script trains by itself, without Tune
    seconds: int
    reason: str


def run_example(
    folder: Path, script: str, seconds: int, arguments: Sequence[str] | None = None
) -> Verdict:
    """Runs a script in a separate process, with the arguments of the table unless others are given.

    What Tune writes goes below `folder/<the script's path>`.
    """
    module = f"{PACKAGE}.examples.{script.replace('/', '.')}"
    home = Path(__file__).parent.parent
    own = folder / script
    own.mkdir(parents=True, exist_ok=True)
    settings = {"PYTHONPATH": f"{folder}{os.pathsep}{home}", "HOME": str(own)}
    settings |= {"TF_CPP_MIN_LOG_LEVEL": "3", "RAY_DEDUP_LOGS": "0", "COLUMNS": "10000"}
    noted = _log(folder, script)
    words = SCRIPTS[script].split() if arguments is None else arguments
    with noted.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, module, *words],
            cwd=folder,
            env={**os.environ, **settings},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)  # its own session, with what it started
            process.wait()
    if status == 0:
        return Verdict(script, "runs", "")
    last = _raised(noted.read_text(errors="replace"))
    return Verdict(script, "late" if status is None else "fails", last)


def _log(folder: Path, script: str) -> Path:
    return folder / f"{script.replace('/', '.')}.log"


def _raised(text: str) -> str:
    """Returns the last line that says what was raised."""
    results = [match[1] for line in text.splitlines() if (match := _RAISED.match(line.strip()))]
    return results[-1] if results else ""


# -- learning ---------------------------------------------------------------------------------

_KEPT = ("--framework", "--num-gpus")  # of the arguments of the table; the others shorten


def learn_example(rllib: Path, folder: Path, script: str, seconds: int) -> Learned:
    """Runs a script as the release's own tests do, or else with its own settings, until it stops.

    A script that trains by itself, without Tune, counts if it is told to be a test of itself.
    """
    options = own_options(rllib, script)
    arguments = release_arguments(rllib).get(script, [])
    if not any(x.startswith("--framework") for x in arguments):
        words = SCRIPTS[script].split()
        pairs = zip(words[::2], words[1::2], strict=True)
        arguments = [*arguments, *(x for pair in pairs if pair[0] in _KEPT for x in pair)]
    results = dict(x.split("=", 1) for x in arguments if "=" in x)
    start = time.monotonic()
    _, verdict, reason = run_example(folder, script, seconds, arguments)
    taken = round(time.monotonic() - start)
    asked = float(results.get("--stop-reward", options["--stop-reward"]))
    reached = reward_in(folder / script)
    if verdict == "runs":
        has_learned = "--as-test" in arguments if math.isnan(reached) else reached >= asked
        verdict = "learns" if has_learned else "short"
    return Learned(script, verdict, asked, round(reached, 3), taken, reason)


@functools.cache
def release_arguments(rllib: Path) -> dict[str, list[str]]:
    """Returns with which arguments the release's own tests have scripts learn, by script."""
    results: dict[str, list[str]] = {}
    for call in ast.walk(ast.parse((rllib / "BUILD").read_text())):
        if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != "py_test":
            continue
        keywords = {x.arg: x.value for x in call.keywords if x.arg in ("main", "args")}
        if len(keywords) == 2:
            main, arguments = (ast.literal_eval(keywords[name]) for name in ("main", "args"))
            if "--as-test" in arguments and not _names_another(arguments):
                results.setdefault(main.removeprefix("examples/").removesuffix(".py"), arguments)
    return results


def _names_another(arguments: Sequence[str]) -> bool:
    """Whether a test is of PyTorch, or of an algorithm that is not offered."""
    return any(x in arguments for x in ("--framework=torch", "--run=IMPALA"))


def own_options(rllib: Path, script: str) -> dict[str, Any]:
    """Returns the defaults of a script's options that are written out, by name."""
    tree = ast.parse((rllib / "examples" / f"{script}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    named = [(node.args[0], {x.arg: x.value for x in node.keywords}) for node in calls]
    return {
        name.value: getattr(keywords.get("default"), "value", None)
        for name, keywords in named
        if isinstance(name, ast.Constant) and str(name.value).startswith("--")
    }


def reward_in(home: Path) -> float:
    """Returns the highest mean reward that the last result of a trial has; NaN if there is none."""
    files = [path.read_text().splitlines() for path in home.glob("ray_results/*/*/result.json")]
    last = [json.loads(lines[-1]) for lines in files if lines]
    return max((float(x.get("episode_reward_mean", "nan")) for x in last), default=float("nan"))


# -- the run ----------------------------------------------------------------------------------


def chosen(rllib: Path, only: list[str]) -> list[str]:
    """Returns the scripts that run, in the order of the table.

    Raises:
        UsageError: if one of them is not there.
    """
    names = [name for text in only for name in text.split(",")]
    results = [script for script in SCRIPTS if any(_is_meant(script, name) for name in names)]
    for script in (*results, *NOT_COUNTED):
        path = rllib / "examples" / f"{script}.py"
        if not path.is_file():
            raise UsageError(f"--rllib: no {path}. Give the folder `rllib` of release 2.10.0.")
    return results


def _is_meant(script: str, name: str) -> bool:
    return script == name if name in SCRIPTS else name in script


def rows(verdicts: list[Verdict]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table: what ran, then what does not count."""
    yield from verdicts
    for script, reason in NOT_COUNTED.items():
        yield script, "not counted", reason


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.rllib_examples", description=__doc__)
    parser.add_argument("--rllib", type=Path, required=True, help="the folder of its sources")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="or parts of names")
    parser.add_argument("--seconds", type=int, help="for one script (default 900; to learn, 1800)")
    parser.add_argument("--learn", action="store_true", help="until the scripts' own reward")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where the table goes")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="where what they print goes")
    return parser


def main() -> int:
    """Runs the scripts and prints the verdicts."""
    options = _parser().parse_args()
    scripts = chosen(options.rllib, options.only)
    if options.learn:
        scripts = [x for x in scripts if "--stop-reward" in own_options(options.rllib, x)]
    seconds = options.seconds or (1800 if options.learn else 900)
    console = Console()
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(options.rllib, folder)
        for script in scripts:
            if options.learn:
                results.append(learn_example(options.rllib, folder, script, seconds))
            else:
                results.append(run_example(folder, script, seconds))
            console.print(*results[-1], soft_wrap=True, markup=False, highlight=False)
            if options.table:
                lines = iter(results) if options.learn else rows(results)
                options.table.write_text(markdown(type(results[0])._fields, lines))
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                log = _log(folder, script)
                (options.logs / log.name).write_bytes(log.read_bytes())
    console.print(_summary(results))
    return 0


def _summary(result: Sequence[Any]) -> str:
    good = sum(each.verdict in ("runs", "learns") for each in result)
    if result and isinstance(result[0], Learned):
        return f"{good} of {len(result)} learn to their own reward."
    return f"{good} of {len(result)} run; {len(NOT_COUNTED)} do not count."


if __name__ == "__main__":
    sys.exit(main())
