"""The benchmark that runs RLlib's example scripts reads what they ask for and what they reached."""

import json
import math

from tools.rllib_examples import (
    NOT_COUNTED,
    SCRIPTS,
    chosen,
    own_options,
    release_arguments,
    reward_in,
)

SCRIPT = """
parser = argparse.ArgumentParser()
parser.add_argument("--as-test", action="store_true")
parser.add_argument("--stop-reward", type=float, default=7.5, help="when to stop")
print("done")
"""


def test_the_options_of_a_script_are_read_from_its_text(tmp_path):
    for script in (*SCRIPTS, *NOT_COUNTED):
        path = tmp_path / "examples" / f"{script}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SCRIPT)
    assert own_options(tmp_path, "custom_env") == {"--as-test": None, "--stop-reward": 7.5}
    assert chosen(tmp_path, ["centralized_critic", "cartpole_d,cartpole_l"]) == [
        "cartpole_lstm",
        "centralized_critic",
        "export/cartpole_dqn_export",
    ]


def test_the_reward_reached_is_that_of_the_best_trial_at_its_end(tmp_path):
    assert math.isnan(reward_in(tmp_path))
    for trial, rewards in {"a": [1.0, 9.0, 2.0], "b": [0.0, 5.0], "c": []}.items():
        folder = tmp_path / "ray_results" / "PPO" / trial
        folder.mkdir(parents=True)
        lines = [json.dumps({"episode_reward_mean": reward}) for reward in rewards]
        (folder / "result.json").write_text("\n".join(lines))
    assert reward_in(tmp_path) == 5.0


def test_arguments_are_those_of_the_releases_own_tests(tmp_path):
    (tmp_path / "BUILD").write_text(
        'load("//x", "py_test")\n'
        'py_test(name = "a_torch", main = "examples/a.py", srcs = glob(["*"]),\n'
        '        args = ["--as-test", "--framework=torch", "--stop-reward=9"])\n'
        'py_test(name = "a_tf", main = "examples/a.py", args = ["--as-test", "--stop-reward=5"])\n'
        'py_test(name = "b", main = "examples/b.py", args = ["--stop-iters=1"])\n'
    )
    assert release_arguments(tmp_path) == {"a": ["--as-test", "--stop-reward=5"]}
