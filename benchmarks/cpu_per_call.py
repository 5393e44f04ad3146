"""The CPU time of acting, sampling and learning, for `old_and_new`; prints one line of JSON.

It measures the package that it imports, which `PYTHONPATH` chooses. By hand:
`PYTHONPATH=. python benchmarks/cpu_per_call.py acting onnx`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import ours
import probe

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import tfpolicies
from tfpolicies import PPOTF2Policy, RolloutWorker, SampleBatch


def acting(variant: str, seconds: float) -> probe.Figures:
    """Returns the µs of one `compute_actions` on 1 and on 32 observations."""
    policy = ours.policy_of(ours.config_of(inference=variant))

    def figure(rows: int) -> float:
        obs = probe.observations(rows)

        def work() -> int:
            for _ in range(100):
                policy.compute_actions(obs)
            return 100

        return probe.cpu_microseconds(work, seconds)

    return {str(rows): figure(rows) for rows in (1, 32)}


def sampling(variant: str, seconds: float) -> probe.Figures:
    """Returns the µs of one environment step with 1, 8 and 32 environments."""

    def figure(num_envs: int) -> float:
        worker = RolloutWorker(
            env_creator=ours.CREATORS[variant],
            config=ours.config_of(num_envs),
            default_policy_class=PPOTF2Policy,
        )
        return probe.cpu_microseconds(lambda: len(worker.sample()), seconds)

    return {str(num_envs): figure(num_envs) for num_envs in probe.ENV_COUNTS}


def updates(variant: str, seconds: float) -> probe.Figures:
    """Returns the µs of a gradient step: of 80 in one call, and of one in a call of its own."""
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

    return {
        "80 at once": probe.cpu_microseconds(many, seconds),
        "1": probe.cpu_microseconds(one, seconds),
    }


def traffic(variant: str, seconds: float) -> probe.Figures:
    """Returns the µs of a step of 8 towns with 25 cars, 4 lights and three policies."""
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
    return {"8 copies": probe.cpu_microseconds(lambda: worker.sample().env_steps(), seconds)}


MEASUREMENTS = {"traffic": traffic, "acting": acting, "sampling": sampling, "updates": updates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurement", choices=list(MEASUREMENTS))
    parser.add_argument("variant")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    found = MEASUREMENTS[options.measurement](options.variant, options.seconds)
    tree = str(Path(tfpolicies.__file__).resolve().parents[1])
    print(json.dumps({"figures": found, "tree": tree}))


if __name__ == "__main__":
    main()
