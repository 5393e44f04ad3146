"""Behaviour cloning: supervised learning of the actions of a batch (Pomerleau 1989).

    L = -E[log pi(a|s)]

It is MARWIL with beta = 0 (`marwil.py`, with the settings of its loss): no critic, and rewards are
not read.

Actions of a deterministic policy in a Box are learned much better with `model={"free_log_std":
True}`, one standard deviation for all states (Pendulum, 20 epochs: a score of 1.0 instead of -0.3).
Otherwise the standard deviation grows in states with few rows, and so the mean hardly learns there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfpolicies.algorithms.marwil import (
    MARWIL,
    MARWILConfig,
    MARWILTFPolicy,
    MARWILTrainingSettings,
)
from tfpolicies.base.validators import Validator, is_number
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.setting import setting

__all__ = ["BC", "BCConfig", "BCTF1Policy", "BCTF2Policy"]


class BCTFPolicy(MARWILTFPolicy):
    """The loss of behaviour cloning, for any runtime."""

    config_class = lazy_class("BCConfig")

    @classmethod
    def _derive_static_settings(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        del config
        return {"uses_critic": False}


class BCTF2Policy(BCTFPolicy):
    """Behaviour cloning on traced TensorFlow functions."""


class BCTF1Policy(BCTFPolicy):
    """Behaviour cloning in graph mode, in its own `tf.Graph` and session."""

    runtime = "session"


class BC(MARWIL):
    """The training loop of behaviour cloning; made by `BCConfig().build()`."""

    config_class = lazy_class("BCConfig")
    policy_classes = {"tf2": BCTF2Policy, "tf": BCTF1Policy}


_ZERO = Validator(
    lambda x: is_number(x) and x == 0, "0 (with another beta this is MARWIL: use MARWILConfig)"
)


@dataclass(frozen=True, kw_only=True)
class BCTrainingSettings(MARWILTrainingSettings):
    """The training settings of behaviour cloning."""

    beta: float = setting(0.0, _ZERO)


class BCConfig(MARWILConfig):
    """The config of behaviour cloning.

    >>> config = BCConfig().environment("CartPole-v1").training(lr=1e-3, sgd_minibatch_size=256)
    >>> config.beta, config.train_batch_size
    (0.0, 2000)
    """

    training_section = BCTrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or BC)
        self.offline_data(postprocess_inputs=False)
