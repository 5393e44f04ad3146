"""Results of `check_policy`: one per check, and exceptions by which a check ends."""

from __future__ import annotations

from typing import NamedTuple

from tfpolicies.errors import PolicyCheckError

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"


class CheckResult(NamedTuple):
    """The outcome of one check."""

    check: str  # its name
    outcome: str  # "passed", "failed" or "not applicable"
    note: str  # what failed, why it does not apply, or a figure of interest

    def __str__(self) -> str:
        if self.outcome == NOT_APPLICABLE:
            return f"{self.check}: not applicable because {self.note}"
        if self.outcome == FAILED:
            return f"{self.check}: {self.note}"
        return f"{self.check}: passed{f' ({self.note})' if self.note else ''}"


class CheckReport(NamedTuple):
    """The outcomes of all checks of one policy; `print(report)` gives a line per check."""

    policy: str
    results: tuple[CheckResult, ...]

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.outcome == FAILED)

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of the checks that passed."""
        return tuple(result.check for result in self.results if result.outcome == PASSED)

    def __str__(self) -> str:
        return "\n".join([f"check_policy: {self.policy}", *map(str, self.results)])

    def raise_failures(self) -> None:
        """Raises one error that lists all failures; does nothing if there are none.

        Raises:
            PolicyCheckError: naming each check, expected and actual values, and the next step.
        """
        if self.failures:
            count, total = len(self.failures), len(self.results)
            failure_list = "\n\n".join(map(str, self.failures))
            raise PolicyCheckError(
                f"{self.policy} fails {count} of {total} checks.\n\n{failure_list}"
            )


class CheckFailed(Exception):
    """Ends a check: the policy violates the policy API.

    Args:
        expected: the requirement.
        actual: the actual values.
        advice: the next step.
    """

    def __init__(self, expected: str, actual: str, advice: str) -> None:
        super().__init__(f"expected {expected}\n    got: {actual}\n    next step: {advice}")


class NotApplicable(Exception):
    """Ends a check that does not apply to this policy; the message is the reason."""
