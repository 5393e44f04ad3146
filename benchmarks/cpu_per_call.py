"""The CPU time of acting and sampling, for `old_and_new`; prints one line of JSON.

It measures the package that it imports, which `PYTHONPATH` chooses. By hand:
`PYTHONPATH=. python benchmarks/cpu_per_call.py acting onnx`.
"""

import argparse
import json
from pathlib import Path

import ours
import probe

import tfpolicies
from tfpolicies import PPOTF2Policy, RolloutWorker


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurement", choices=["acting", "sampling"])
    parser.add_argument("variant")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    measure = {"acting": acting, "sampling": sampling}[options.measurement]
    found = measure(options.variant, options.seconds)
    tree = str(Path(tfpolicies.__file__).resolve().parents[1])
    print(json.dumps({"figures": found, "tree": tree}))


if __name__ == "__main__":
    main()
