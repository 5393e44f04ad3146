"""Tools to test custom policies: `check_policy`, random batches, environments."""

from tfpolicies.testing.batches import random_batch
from tfpolicies.testing.checking import check_policy
from tfpolicies.testing.report import CheckReport, CheckResult

__all__ = ["CheckReport", "CheckResult", "check_policy", "random_batch"]
