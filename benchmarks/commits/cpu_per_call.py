"""The CPU time of acting, sampling, learning and files, for `old_and_new`.

It measures the package that it imports, which `PYTHONPATH` chooses. The first line that it prints
says which that is, and what it can measure; then it measures what each line it reads names, and
prints the µs. By hand: `echo 32 | PYTHONPATH=. python benchmarks/commits/cpu_per_call.py acting
onnx`.
"""

import argparse
import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import probe
from benchmarks.overview import ours

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import tfpolicies
from tfpolicies import PolicyMap, PPOTF2Policy, RolloutWorker, SampleBatch
from tfpolicies.storage.checkpoint import read_checkpoint, write_checkpoint

Works = dict[str, Callable[[], int]]
"""What is measured, by name: functions that do something and return how many units that were."""


def acting(variant: str) -> Works:
    """Returns what calls `compute_actions` with 1 and with 32 observations."""
    policy = ours.policy_of(ours.config_of(inference=variant))

    def work_of(rows: int) -> Callable[[], int]:
        obs = probe.observations(rows)

        def work() -> int:
            for _ in range(100):
                policy.compute_actions(obs)
            return 100

        return work

    return {str(rows): work_of(rows) for rows in (1, 32)}


def sampling(variant: str) -> Works:
    """Returns what steps 1, 8 and 32 environments."""

    def work_of(num_envs: int) -> Callable[[], int]:
        worker = RolloutWorker(
            env_creator=ours.CREATORS[variant],
            config=ours.config_of(num_envs),
            default_policy_class=PPOTF2Policy,
        )
        return lambda: len(worker.sample())

    return {str(num_envs): work_of(num_envs) for num_envs in probe.ENV_COUNTS}


def updates(variant: str) -> Works:
    """Returns what takes gradient steps: 80 in one call, and one in a call of its own."""
    jit_compile = {"xla": "auto", "plain": False}[variant]
    policy = ours.policy_of(ours.config_of(jit_compile=jit_compile))
    rows = SampleBatch(probe.training_rows())
    few = rows.slice(0, probe.MINIBATCH)

    def many() -> int:
        policy.learn_epochs(rows, probe.EPOCHS, probe.MINIBATCH)
        return probe.EPOCHS * probe.ROWS // probe.MINIBATCH

    def one() -> int:
        policy.learn_on_batch(few)
        return 1

    return {"80 at once": many, "1": one}


def traffic(variant: str) -> Works:
    """Returns what steps 8 towns with 25 cars, 4 lights and three policies."""
    from traffic import MultiAgentTrafficGrid
    from traffic_grid import CAR_SPACE, KEEP_OR_SWITCH, LIGHT_SPACE, STAY_OR_GO

    cars = (None, CAR_SPACE, STAY_OR_GO, {})
    policies = {"cars": cars, "taxis": cars, "lights": (None, LIGHT_SPACE, KEEP_OR_SWITCH, {})}

    def mapping(agent_id: str, episode: Any, **kwargs: Any) -> str:
        kind, number = agent_id.split("_")
        return "lights" if kind == "light" else ("cars", "taxis")[int(number) % 2]

    config = ours.config_of(8).rollouts(rollout_fragment_length=50)
    worker = RolloutWorker(
        env_creator=lambda context: MultiAgentTrafficGrid(25),
        config=config.multi_agent(policies=policies, policy_mapping_fn=mapping),
        default_policy_class=PPOTF2Policy,
    )
    return {"8 copies": lambda: worker.sample().env_steps()}


def files(variant: str) -> Works:
    """Returns what writes and reads 100 MB of arrays, and pages a policy into a map."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    weights = {f"layer/{i}": np.full((1000, 1250), i, np.float32) for i in range(20)}
    policies = PolicyMap(capacity=1, path=folder / "map")
    for policy_id in ("a", "b"):
        policies[policy_id] = ours.policy_of(ours.config_of())
    obs = probe.observations(1)

    def write() -> int:
        weights["layer/0"] += 1.0  # what has not changed is not written
        write_checkpoint(folder / "written", "p.json", {"type": "P"}, {"weights": weights})
        return 1

    def read() -> int:
        read_checkpoint(folder / "written", "p.json", kind="P")
        return 1

    def page_in() -> int:
        for policy_id in ("a", "b") * 10:
            policies[policy_id].compute_actions(obs)
        return 20

    write()
    return {"write 100 MB": write, "read 100 MB": read, "page in": page_in}


MEASUREMENTS = {
    "traffic": traffic,
    "acting": acting,
    "sampling": sampling,
    "updates": updates,
    "files": files,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurement", choices=list(MEASUREMENTS))
    parser.add_argument("variant")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a stretch")
    options = parser.parse_args()
    works = MEASUREMENTS[options.measurement](options.variant)
    for work in works.values():
        work(), work(), work()
    tree = str(Path(tfpolicies.__file__).resolve().parents[1])
    print(json.dumps({"tree": tree, "figures": list(works)}), flush=True)
    for line in sys.stdin:
        print(probe.cpu_microseconds(works[line.strip()], options.seconds), flush=True)


if __name__ == "__main__":
    main()
