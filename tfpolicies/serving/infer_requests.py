"""A request for actions and its response, independent of the transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import RequestError, suggest_similar_names
from tfpolicies.serving.request_texts import MAX_NAME_LENGTH, quote, require_short

VALUE_OUTPUT = "vf_preds"
"""The only output that needs the critic."""

_SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")
_PARAMETERS = ("seed", "explore", *_SEQUENCE_PARAMETERS)
_IGNORED_PARAMETERS = (
    "priority",
    "timeout",
    "binary_data_output",
)  # sent by clients of other servers


class InferOptions(NamedTuple):
    """Parameters of a request.

    Attributes:
        explore: sample the actions from the distribution; False for the most likely ones.
        seed: of the samples; None for fresh random noise.
        sequence: the name of the sequence whose state is kept; None if there is none.
        starts_sequence: whether the sequence begins with this request.
        ends_sequence: whether it ends with this request.
    """

    explore: bool = False
    seed: int | None = None
    sequence: int | str | None = None
    starts_sequence: bool = False
    ends_sequence: bool = False

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> InferOptions:
        if not parameters:
            return cls()
        for name in parameters:
            if name not in _PARAMETERS and name not in _IGNORED_PARAMETERS:
                require_short("a parameter", name)
                raise RequestError(
                    "There is no parameter "
                    f"{quote(name)}.{suggest_similar_names(name, _PARAMETERS)} Parameters "
                    f"are {', '.join(_PARAMETERS)}."
                )
        seed = _get_parameter(parameters, "seed", int, None)
        explore = _get_parameter(parameters, "explore", bool, seed is not None)
        sequence = parameters.get("sequence_id")
        is_name = type(sequence) is str and len(sequence) <= MAX_NAME_LENGTH
        if not (sequence is None or type(sequence) is int or is_name):
            raise RequestError(
                f"Parameter sequence_id must be an int, or a str of at most {MAX_NAME_LENGTH} "
                f"characters, got {quote(sequence):.60}."
            )
        sequence = sequence or None  # 0 and "" mean none
        starts = _get_parameter(parameters, "sequence_start", bool, False)
        ends = _get_parameter(parameters, "sequence_end", bool, False)
        if seed is not None and seed < 0:
            raise RequestError(f"Parameter seed must be at least 0, got {seed}.")
        if seed is not None and not explore:
            raise RequestError(
                f"Parameter seed samples actions, got {seed} with explore={explore}. Leave the "
                "seed out for greedy actions."
            )
        if sequence is None and (starts or ends):
            raise RequestError(
                "Parameters sequence_start and sequence_end need a sequence_id that is neither 0 "
                "nor empty."
            )
        return cls(explore, seed, sequence, starts, ends)


def _get_parameter(
    parameters: Mapping[str, Any], name: str, value_type: type, default: bool | None
) -> Any:
    value = parameters.get(name, default)
    if value is not default and type(value) is not value_type:
        raise RequestError(
            f"Parameter {name} must be of {value_type.__name__}, got {quote(value)}."
        )
    return value


class InferRequest(NamedTuple):
    """A request for actions.

    Attributes:
        inputs: arrays by name, with the shapes and dtypes of the request.
        options: the parameters.
        outputs: the names of the requested outputs; None for all.
        id: repeated in the response; "" for none.
        version: the only version that may answer; "" for the newest.
    """

    inputs: Mapping[str, np.ndarray]
    options: InferOptions = InferOptions()
    outputs: Sequence[str] | None = None
    id: str = ""
    version: str = ""


class InferVariant(NamedTuple):
    """The variant of a model's graph that answers a request.

    Attributes:
        explore: whether actions are sampled.
        values: whether the value of the observation is computed.
    """

    explore: bool
    values: bool

    @classmethod
    def for_request(cls, request: InferRequest) -> InferVariant:
        return cls(
            request.options.explore, request.outputs is None or VALUE_OUTPUT in request.outputs
        )


INFER_VARIANTS = [
    InferVariant(explore, values) for explore in (False, True) for values in (False, True)
]


class InferResponse(NamedTuple):
    """The response of a model.

    Attributes:
        version: of the model.
        outputs: arrays by name.
    """

    version: str
    outputs: Mapping[str, np.ndarray]

    @classmethod
    def from_outputs(
        cls, request: InferRequest, version: str, outputs: Mapping[str, np.ndarray]
    ) -> InferResponse:
        """Selects the outputs that a request asks for; all of them exist."""
        names = outputs if request.outputs is None else request.outputs
        return cls(version, {name: outputs[name] for name in names})
