"""Protocol for Keras models that wrap an object of another API."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from tfpolicies.base.extensions import Extensible


@runtime_checkable
class WrappedModel(Protocol):
    """A Keras model around a user's object that is not a Keras model, such as a `TFModelV2`.

    It is called like any other model; the core uses only these two names beyond that.

    Attributes:
        inner: the user's object. In `loss`, `model.<name>` reads its attribute of that name.
    """

    inner: Any

    def bind_policy(self, policy: Extensible) -> None:
        """Records the policy whose weights the methods looked up from now on use.

        It is called when `policy.model` is read, since policies with the same program share it.
        """
