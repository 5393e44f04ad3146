"""Every kind of policy against the contract: `python -m soak.conformance`.

Runs `tfpolicies.testing.check_policy` on all combinations of observation space, action space and
model that make sense, and prints what ran, what failed and the largest difference of an export.
`--from N` resumes at combination N; `--only TEXT` runs those whose name contains it.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from helpers.policy_matrix import ACTIONS, MODELS, OBSERVATIONS, Combination, make_policy
from helpers.scripts import parse_options
from tfpolicies import PGTF2Policy, PPOTF2Policy
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.spaces import leaves
from tfpolicies.testing import CheckReport, check_policy


def possible(combination: Combination) -> bool:
    """Whether the combination makes sense: convolutions need an image, masks a choice."""
    if combination.model == "cnn":
        return any(leaf.dtype == np.uint8 for leaf in leaves(OBSERVATIONS[combination.observation]))
    if combination.model == "masked":
        return ActionDistribution.for_space(ACTIONS[combination.action]).mask_size > 0
    return True


def every_combination() -> list[Combination]:
    result = itertools.starmap(Combination, itertools.product(OBSERVATIONS, ACTIONS, MODELS))
    return [combination for combination in result if possible(combination)]


def runs(options: argparse.Namespace) -> Iterator[tuple[int, Any, Combination]]:
    results = [
        (cls, combination)
        for combination in every_combination()
        for cls in (PPOTF2Policy, PGTF2Policy)
        # PG has no value: once per model and action space is enough
        if cls is PPOTF2Policy or combination.observation in ("box", "image")
    ]
    for number, (cls, combination) in enumerate(results):
        named = f"{cls.__name__} {combination}"
        if number >= getattr(options, "from") and options.only in named:
            yield number, cls, combination
            if number + 1 >= options.to:
                return


def largest_difference(report: CheckReport) -> float:
    """Returns the figure in the note of the check `exports`."""
    notes = {result.check: result.note for result in report.results}
    match = re.search(r"largest difference (\S+)", notes.get("exports", ""))
    return float(match.group(1)) if match else 0.0


def main() -> int:
    options = parse_options(
        __doc__, **{"from": 0}, to=sys.maxsize, only=("", "a part of a name"), no_exports=False
    )
    failed, worst, started, count = [], 0.0, time.perf_counter(), 0
    for number, cls, combination in runs(options):
        count += 1
        begun, outcome = time.perf_counter(), "ok"
        try:
            policy = make_policy(combination, cls)
            report = check_policy(policy, exports=not options.no_exports)
            worst = max(worst, largest_difference(report))
        except Exception as error:
            failed.append(f"{number}: {cls.__name__} {combination}")
            outcome = f"FAILED: {type(error).__name__}: {error}\n"
        seconds = time.perf_counter() - begun
        print(f"{number:4d} {cls.__name__} {combination}: {seconds:.1f} s {outcome}", flush=True)
        keras.utils.clear_session()
    print(
        f"{count} combinations in {time.perf_counter() - started:.0f} s: {len(failed)} failed; "
        f"largest difference of an export {worst:.1e}",
        *(f"failed {line}" for line in failed),
        sep="\n",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
