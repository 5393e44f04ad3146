"""What the core needs to know of models that run an object of another API."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from tfpolicies.extensions import Extensible


@runtime_checkable
class AdaptedModel(Protocol):
    """A Keras model around a user's object that is no Keras model, such as a `TFModelV2`.

    It is called like any other; these two are all that the core asks of it beyond that.

    Attributes:
        inner: the user's object. In `loss`, `model.<name>` is what it has under that name.
    """

    inner: Any

    def hand_to(self, policy: Extensible) -> None:
        """Takes down the policy whose weights methods that are looked up now run with.

        It is called when somebody asks for `policy.model`, since all policies of a kind share it.
        """
