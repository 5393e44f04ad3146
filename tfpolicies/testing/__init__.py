"""Tools to test custom policies: `check_policy`, random batches, environments."""

from tfpolicies.testing.random_batches import random_batch
from tfpolicies.testing.report import CheckReport, CheckResult
from tfpolicies.testing.runner import check_policy

__all__ = ["CheckReport", "CheckResult", "check_policy", "random_batch"]
