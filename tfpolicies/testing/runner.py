"""`check_policy`: runs named checks of the policy API."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from tfpolicies.errors import UsageError, suggest_similar_names
from tfpolicies.policy.policy import Policy
from tfpolicies.testing import (
    acting_checks,
    distribution_checks,
    learning_checks,
    memory_checks,
    runtime_checks,
    state_checks,
)
from tfpolicies.testing.policy_under_test import PolicyUnderTest
from tfpolicies.testing.report import (
    FAILED,
    NOT_APPLICABLE,
    PASSED,
    CheckFailed,
    CheckReport,
    CheckResult,
    NotApplicable,
)

CHECKS: dict[str, Callable[[PolicyUnderTest], str]] = {
    check.__name__: check
    for check in (
        acting_checks.outputs,
        acting_checks.action_space,
        acting_checks.batch_invariance,
        acting_checks.determinism,
        memory_checks.memory,
        acting_checks.masks,
        acting_checks.log_likelihoods,
        distribution_checks.distribution,
        state_checks.aliasing,
        state_checks.state,
        state_checks.checkpoint,
        learning_checks.learning,
        learning_checks.gradients,
        learning_checks.learner,
        runtime_checks.traces,
        runtime_checks.runtimes,
        runtime_checks.exports,
        state_checks.untouched,
    )
}
"""Every check by name, in the order in which they run."""


def check_policy(
    policy: Policy,
    *,
    checks: Sequence[str] | None = None,
    exports: bool = True,
    rows: int = 48,
    seed: int = 0,
) -> CheckReport:
    """Checks a policy, a built-in or custom one, against the policy API.

    Actions are in their space, rows do not influence each other, memory continues, masks are never
    violated, nothing is aliased, states and checkpoints restore everything, seeds decide, updates
    are finite, runtimes and exports agree, and nothing is traced twice. `CHECKS` has one function
    for each, whose docstring states the requirement. Checks that do not apply (the policy has no
    memory, mask or Keras model) are reported as not applicable.

    The policy itself does not change: checks act and learn on copies of it. Copies of a custom
    policy are made by `copy.deepcopy` and `set_state(get_state())`.

    Args:
        policy: any policy.
        checks: names of `CHECKS` to run; None for all.
        exports: whether the policy is exported as SavedModel and ONNX, which takes seconds.
        rows: of the training batches.
        seed: of all random inputs.

    Returns:
        The outcome of each check; `print` it.

    Raises:
        PolicyCheckError: after all checks, if some failed: their names, expected and actual values,
            and the next step. It is also an AssertionError.
        UsageError: for an unknown name in `checks`.

    >>> import gymnasium as gym, numpy as np
    >>> class Zeros(Policy):
    ...     def compute_actions(self, obs_batch, state_batches=None, **kwargs):
    ...         return np.zeros(len(obs_batch), int), [], {}
    >>> policy = Zeros(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), {})
    >>> print(check_policy(policy, checks=["action_space", "batch_invariance", "memory"]))
    check_policy: Zeros
    action_space: passed (104 actions)
    batch_invariance: passed (largest difference 0.0e+00)
    memory: not applicable because the policy has no memory
    """
    names = list(CHECKS) if checks is None else list(checks)
    for name in names:
        if name not in CHECKS:
            raise UsageError(
                f"checks has {name!r}, which is not a check.{suggest_similar_names(name, CHECKS)} "
                f"There are {', '.join(CHECKS)}."
            )
    subject = PolicyUnderTest(policy, rows=rows, seed=seed, exports=exports)
    report = CheckReport(type(policy).__name__, tuple(_run_check(name, subject) for name in names))
    report.raise_failures()
    return report


def _run_check(name: str, subject: PolicyUnderTest) -> CheckResult:
    try:
        return CheckResult(name, PASSED, CHECKS[name](subject))
    except NotApplicable as reason:
        return CheckResult(name, NOT_APPLICABLE, str(reason))
    except CheckFailed as failure:
        return CheckResult(name, FAILED, str(failure))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        advice = f"Look at {frame.filename}:{frame.lineno} in {frame.name}, where it was raised."
        check_failure = CheckFailed("no error", f"{type(error).__name__}: {error}", advice)
        return CheckResult(name, FAILED, str(check_failure))
