"""Many of RLlib's traced TF2 policies, each called once; started by `benchmarks.league.stacked`.

Arguments are the number of policies and the rows of each. Says "ready", then answers each line on
standard input, a number of seconds, with the median milliseconds of asking all policies once.
"""

import sys
from typing import Any

from benchmarks import probe
from benchmarks.overview import peer_rllib  # first: it silences what the imports below would print


def main() -> None:
    count, rows = map(int, sys.argv[1:])
    first: Any = peer_rllib.worker_of("tf2").get_policy()
    spaces = first.observation_space, first.action_space
    policies = [first] + [type(first)(*spaces, first.config) for _ in range(count - 1)]
    obs = probe.observations(rows)

    def ask() -> None:
        for policy in policies:
            policy.compute_actions(obs)

    ask()
    print("ready", flush=True)
    for line in sys.stdin:
        print(probe.microseconds(ask, float(line)) / 1e3, flush=True)


if __name__ == "__main__":
    main()
