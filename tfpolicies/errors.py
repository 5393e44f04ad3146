"""All errors that the package raises.

Each class is also a builtin, so that code which catches the builtin keeps working::

    TfPoliciesError
    ├── ConfigError (ValueError)              an unknown, contradictory or out-of-range setting
    │   ├── UnknownSettingError (KeyError, AttributeError)  a setting that does not exist
    │   └── FrozenConfigError (AttributeError)    a change of a config that is in use
    ├── SpaceError (ValueError)               a Gymnasium space that cannot be used here
    │   └── UnsupportedSpaceError
    ├── ModelError (ValueError)               a Keras model that does not fit the policy
    │   └── ModelSettingError (ConfigError)       a setting of the `model` config
    ├── ModelImportError (ValueError)         third-party weights or models that do not fit
    │   └── MissingModelFileError (FileNotFoundError)
    ├── ObservationError (ValueError)         observations that do not fit the space
    ├── WeightsError (ValueError)             weights, gradients or states that do not fit
    │   └── MissingStateError (KeyError)
    ├── NonFiniteError (FloatingPointError)   an update that gave NaN or infinity
    ├── BatchError (ValueError)               a batch that lacks rows, columns or order
    │   ├── MissingColumnError (KeyError)
    │   └── BatchUsageError (AssertionError)
    ├── UsageError (ValueError, AssertionError)   arguments that exclude each other
    │   └── FrozenPolicyError                     a change of a policy that is frozen
    ├── UnsupportedMethodError (NotImplementedError)     a method that this class of policies lacks
    ├── PolicyOwnedError (AttributeError)     traced code that reads attributes of one policy
    ├── RetraceError (RuntimeError)           a function that is traced too often
    ├── ForkError (RuntimeError)              TensorFlow used in a process forked after its start
    ├── UnpicklableError (TypeError)          an object that cannot be sent to another process
    ├── UnknownPolicyError (KeyError, ValueError)   a policy id that does not exist
    ├── PolicyExistsError (KeyError)          a policy id that is in use
    ├── EnvError (ValueError)                 an environment that is unknown or violates its API
    │   └── SpaceMismatchError                    an observation that differs from its space
    ├── WorkerError (RuntimeError)            remote workers that died, or cannot be started
    ├── FolderInUseError (RuntimeError)       a folder that another process writes to
    ├── StashError (RuntimeError)             a stashed policy that cannot be written or read
    ├── CheckpointError (ValueError)          a checkpoint that is missing, foreign or damaged
    ├── ExportError (ValueError)              an artefact that failed or does not agree
    │   └── MissingPackageError (RuntimeError)    an export, or a video, that needs a package
    ├── RequestError (ValueError)             a request that a policy server cannot answer
    └── PolicyCheckError (AssertionError)     a policy that violates the policy API
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="TfPoliciesError")


class TfPoliciesError(Exception):
    """Base class of all errors raised by tfpolicies.

    Attributes:
        advice: the end of the message, if it says what to write in Python.
        settings: the settings in the advice, by name, with values as texts, for callers that
            phrase the advice differently.
    """

    __str__ = Exception.__str__  # KeyError would show the message's repr
    advice = ""
    settings: Mapping[str, str] = {}

    def add(self, sentence: str) -> None:
        """Appends context to the message while the error propagates."""
        self.args = (f"{self} {sentence}",)

    def add_advice(self: _Error, advice: str, settings: Mapping[str, Any]) -> _Error:
        """Adds advice for Python code, and the settings in it; returns the error.

        >>> error = ConfigError("It is dark.").add_advice("Set lamp=True.", {"lamp": True})
        >>> str(error), error.settings
        ('It is dark. Set lamp=True.', {'lamp': 'True'})
        """
        self.args = (f"{self} {advice}",)
        self.advice, self.settings = advice, {name: str(x) for name, x in settings.items()}
        return self


class ConfigError(TfPoliciesError, ValueError):
    """A setting is unknown, contradicts another one or is out of its range."""


class UnknownSettingError(ConfigError, KeyError, AttributeError):
    """A config does not have the setting that was read or set."""


class FrozenConfigError(ConfigError, AttributeError):
    """A config was changed after a worker or an algorithm began to use it."""


class SpaceError(TfPoliciesError, ValueError):
    """A Gymnasium space does not fit its use."""


class UnsupportedSpaceError(SpaceError):
    """A kind of Gymnasium space that the package does not handle."""


class ModelError(TfPoliciesError, ValueError):
    """A Keras model does not fit the policy's spaces, or cannot be used here."""


class ModelSettingError(ModelError, ConfigError):
    """A setting of the `model` config is unknown, out of its range or contradicts another one."""


class ModelImportError(TfPoliciesError, ValueError):
    """A file of weights or a third-party model is damaged, of unknown kind, or does not fit."""


class MissingModelFileError(ModelImportError, FileNotFoundError):
    """There is no file to import weights from."""


class ObservationError(TfPoliciesError, ValueError):
    """Observations do not fit the observation space."""


class WeightsError(TfPoliciesError, ValueError):
    """Weights, gradients or a state do not fit the policy."""


class MissingStateError(WeightsError, KeyError):
    """A state lacks a part that every state has."""


class NonFiniteError(TfPoliciesError, FloatingPointError):
    """An update gave NaN or infinity.

    Attributes:
        term: the first term that is not finite, with its value, such as "vf_loss (nan)".
        policy_id: of the policy.
        iteration: of the training; None outside of an algorithm.
        checkpoint: folder of the last good checkpoint of the algorithm; None if there is none.
    """

    term = ""
    policy_id = ""
    iteration: int | None = None
    checkpoint: str | None = None


class BatchError(TfPoliciesError, ValueError):
    """A batch lacks rows or columns, or its parts do not fit together."""


class MissingColumnError(BatchError, KeyError):
    """A batch does not have the column that was read."""


class BatchUsageError(BatchError, AssertionError):
    """A batch was called in a way that its documentation rules out."""


class UsageError(TfPoliciesError, ValueError, AssertionError):
    """Arguments of one call exclude each other or have the wrong form."""


class FrozenPolicyError(UsageError):
    """An attempt to change a frozen policy."""


class UnsupportedMethodError(TfPoliciesError, NotImplementedError):
    """A method that another class of policies has was called on one that lacks it."""


class PolicyOwnedError(TfPoliciesError, AttributeError):
    """Traced code read an attribute that belongs to one policy and not to its Program."""


class RetraceError(TfPoliciesError, RuntimeError):
    """A function was traced more often than `eager_max_retraces` allows."""


class ForkError(TfPoliciesError, RuntimeError):
    """TensorFlow was used in a process that was forked after it had started."""


class UnpicklableError(TfPoliciesError, TypeError):
    """An object, or a part of it, cannot be pickled."""


class UnknownPolicyError(TfPoliciesError, KeyError, ValueError):
    """There is no policy of that id."""


class PolicyExistsError(TfPoliciesError, KeyError):
    """There already is a policy of that id."""


class EnvError(TfPoliciesError, ValueError):
    """An environment is unknown or violates its API."""


class SpaceMismatchError(EnvError):
    """An observation has another dtype than its space, or is outside its bounds.

    Sampling accepts and converts it, so building an algorithm only warns.
    """


class WorkerError(TfPoliciesError, RuntimeError):
    """Remote workers died, or cannot be started."""


class FolderInUseError(TfPoliciesError, RuntimeError):
    """Another process, or another part of this one, writes to a folder.

    Attributes:
        owner: the process, such as "process 123".
    """

    def __init__(self, message: str, owner: str = "another process") -> None:
        super().__init__(message)
        self.owner = owner


class StashError(TfPoliciesError, RuntimeError):
    """A policy's state cannot be written to the stash, or is missing or damaged there."""


class CheckpointError(TfPoliciesError, ValueError):
    """A checkpoint is missing, foreign, of another version or damaged."""


class ExportError(TfPoliciesError, ValueError):
    """An exported model could not be written, or does not act as the policy does."""


class MissingPackageError(ExportError, RuntimeError):
    """An export, a server or a video needs a package that is not installed."""


class RequestError(TfPoliciesError, ValueError):
    """A request to a policy server is wrong, or cannot be answered now.

    Attributes:
        status: the HTTP status of the response: 400, 401, 403, 404, 405, 408, 413, 415, 429, 503 or
            504.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class PolicyCheckError(TfPoliciesError, AssertionError):
    """A policy violates the policy API that `tfpolicies.testing.check_policy` checks."""


def show_value(value: object, limit: int = 200) -> str:
    """Returns the `repr` of a value for a message, cut to `limit` characters.

    >>> show_value(["a", 1]), show_value("x" * 300, limit=8)
    ("['a', 1]", "'xxxx...")
    """
    try:
        text = repr(value)
    except Exception as error:  # for example, an integer with more digits than Python prints
        text = f"a {type(value).__name__} that cannot be shown ({error})"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


_MAX_COMPARED_LENGTH = 256  # characters; the time of a comparison grows with their square


def suggest_similar_names(name: object, candidates: Iterable[str], limit: int = 3) -> str:
    """Returns a hint such as ``" Did you mean 'gamma'?"``, or an empty string.

    >>> suggest_similar_names("gama", ["gamma", "lr"])
    " Did you mean 'gamma'?"
    >>> suggest_similar_names("zzz", ["gamma", "lr"])
    ''
    """
    if not isinstance(name, str) or len(name) > _MAX_COMPARED_LENGTH:
        return ""
    names = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), list(names), n=limit, cutoff=0.6)
    if not close:
        return ""
    return f" Did you mean {' or '.join(repr(names[c]) for c in close)}?"
