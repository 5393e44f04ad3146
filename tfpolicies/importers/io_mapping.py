"""Maps inputs and outputs of an imported model to observations, actions and recurrent state.

Exports of this package are mapped by their `policy_spec.json`, policies of TF-Agents' PolicySaver
by their signature. Other models are mapped by the names that the user gives, or if there is only
one candidate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.errors import UsageError, suggest_similar_names
from tfpolicies.importers.imported_model import ImportedModel, TensorInfo
from tfpolicies.models.spaces import Leaf, action_leaves, choices_per_cell, leaves

ACTIONS, LOGITS = "actions", "logits"
_STEP_TYPE, _MID_STEP = "step_type", 1  # a step that is neither the first nor the last


class IOMapping(NamedTuple):
    """Mapping of a model's inputs and outputs.

    Attributes:
        obs: the input for each leaf of the observation space.
        outputs: the output for each leaf of the action space; for logits, the only one.
        kind: `ACTIONS` in the environment's units, or `LOGITS`.
        state_inputs: the inputs of the recurrent state.
        state_outputs: the outputs that are the next step's state.
        initial_state: the state at the start of an episode, without a batch axis.
        constants: inputs that are the same for all rows, and their values.
        rewards: the inputs for the last reward.
        previous_actions: the input for each leaf of the last action: indices from 0, numbers from
            -1 to 1.
        has_time_axis: whether all inputs but the state have a time axis after the batch axis.
        extras: further outputs to return: name -> output.
    """

    obs: Sequence[str]
    outputs: Sequence[str]
    kind: str
    state_inputs: Sequence[str] = ()
    state_outputs: Sequence[str] = ()
    initial_state: Sequence[np.ndarray] = ()
    constants: Mapping[str, float] = {}
    rewards: Sequence[str] = ()
    previous_actions: Sequence[str] = ()
    has_time_axis: bool = False
    extras: Mapping[str, str] = {}


def infer_io_mapping(
    model: ImportedModel,
    observation_space: gym.Space,
    action_space: gym.Space,
    names: Mapping[str, str] | None,
) -> IOMapping:
    """Returns the mapping of a model's inputs and outputs, checked against the spaces.

    Args:
        model: the imported model.
        observation_space: the policy's observations.
        action_space: the policy's actions.
        names: names given by the user; see `import_policy`.

    Raises:
        ModelImportError: if the mapping is ambiguous, or does not fit the spaces; the message lists
            inputs and outputs.
        UsageError: for a key of `names` that has no meaning.
    """
    obs_leaves, act_leaves = leaves(observation_space), action_leaves(action_space)
    step_types = [x.name for x in model.inputs if x.name.endswith(_STEP_TYPE)]
    if step_types and names is None:
        result = _map_tf_agents(
            model, step_types[0].removesuffix(_STEP_TYPE), obs_leaves, act_leaves
        )
    else:
        result = _map_by_names(model, obs_leaves, act_leaves, names or {})
    _check_mapping(model, result, obs_leaves, action_space)
    return result


# -- names that the user gives --------------------------------------------------------------------


def _map_by_names(
    model: ImportedModel,
    obs_leaves: Sequence[Leaf],
    act_leaves: Sequence[Leaf],
    names: Mapping[str, str],
) -> IOMapping:
    inputs, outputs = [x.name for x in model.inputs], [x.name for x in model.outputs]
    obs_keys, action_keys = (
        [x.name("obs") for x in obs_leaves],
        [x.name(ACTIONS) for x in act_leaves],
    )
    state_keys = [f"state_in_{i}" for i in range(sum(x.startswith("state_in_") for x in names))]
    next_state_keys = [name.replace("_in_", "_out_") for name in state_keys]
    allowed_keys = [*obs_keys, *action_keys, LOGITS, *state_keys, *next_state_keys]
    for name in names:
        if name not in allowed_keys:
            swapped = (
                f" Did you mean {{{names[name]!r}: {name!r}}}?"
                if names[name] in allowed_keys
                else ""
            )
            raise UsageError(
                f"names maps names of this package to the model's: its keys may be {allowed_keys}, "
                f"but not {name!r}.{swapped or suggest_similar_names(str(name), allowed_keys)}"
            )
    for tensor_names, keys in (
        (inputs, [*obs_keys, *state_keys]),
        (outputs, [*action_keys, LOGITS, *next_state_keys]),
    ):
        for key in names.keys() & set(keys):
            if names[key] not in tensor_names:
                raise model.make_import_error(
                    f"names[{key!r}]={names[key]!r} is not one of {tensor_names}"
                )
    unassigned = [x for x in inputs if x not in names.values()]
    obs = [
        _resolve_name(model, key, names, inputs, unassigned, len(obs_leaves) == 1)
        for key in obs_keys
    ]
    kind = (
        LOGITS
        if LOGITS in names or (LOGITS in outputs and not {*action_keys} & {*names})
        else ACTIONS
    )
    output_keys = [LOGITS] if kind == LOGITS else action_keys
    unassigned = [x for x in outputs if x not in [names.get(key) for key in next_state_keys]]
    output_names = [
        _resolve_name(model, key, names, outputs, unassigned, len(output_keys) == 1)
        for key in output_keys
    ]
    tensors = {x.name: x for x in model.inputs}
    state_inputs = [names[key] for key in state_keys]
    state_outputs = [
        _resolve_name(model, key, names, outputs, [], False) for key in next_state_keys
    ]
    initial_state = [_make_zeros(tensors[x]) for x in state_inputs]
    return IOMapping(obs, output_names, kind, state_inputs, state_outputs, initial_state)


def _resolve_name(
    model: ImportedModel,
    key: str,
    names: Mapping[str, str],
    tensor_names: Sequence[str],
    unassigned: Sequence[str],
    is_only_key: bool,
) -> str:
    """Returns the tensor for `key`: the user's name, or the same name, or the only one left."""
    if key in names:
        return names[key]
    if key in tensor_names:
        return key
    if is_only_key and len(unassigned) == 1:
        return unassigned[0]
    raise model.make_import_error(
        f"it is ambiguous which tensor is {key!r}; set names={{{key!r}: ...}}"
    )


# -- TF-Agents ------------------------------------------------------------------------------------


def _map_tf_agents(
    model: ImportedModel, prefix: str, obs_leaves: Sequence[Leaf], act_leaves: Sequence[Leaf]
) -> IOMapping:
    """Returns the mapping of `action(time_step, policy_state)`.

    All parts of the time step have the prefix that `step_type` has: `0/`, or `arg_0_` in the
    signatures of newer versions of TensorFlow.
    """
    inputs, outputs = [x.name for x in model.inputs], [x.name for x in model.outputs]
    step_inputs = {f"{prefix}{name}" for name in (_STEP_TYPE, "reward", "discount")}
    obs_inputs = [x for x in inputs if x.startswith(f"{prefix}observation")]
    state_inputs = [x for x in inputs if x not in step_inputs and x not in obs_inputs]
    state_outputs = [x for x in outputs if x.partition("/")[0] == "state"]
    initial_state = model.get_initial_state() if state_inputs else []
    if len(state_outputs) != len(state_inputs) or (
        initial_state is not None and len(initial_state) != len(state_inputs)
    ):
        raise model.make_import_error(
            "its recurrent state has different numbers of inputs and outputs"
        )
    if initial_state is None:
        tensors = {x.name: x for x in model.inputs}
        initial_state = [_make_zeros(tensors[x]) for x in state_inputs]
    obs = _match_paths(model, "observation", obs_inputs, obs_leaves)
    action_outputs = [x for x in outputs if x.split("/")[0] == "action"]
    actions = _match_paths(model, "action", action_outputs, act_leaves)
    constants = {f"{prefix}{_STEP_TYPE}": _MID_STEP, f"{prefix}discount": 1.0}
    rewards = [x for x in inputs if x == f"{prefix}reward"]
    return IOMapping(
        obs, actions, ACTIONS, state_inputs, state_outputs, initial_state, constants, rewards
    )


def _match_paths(
    model: ImportedModel, prefix: str, names: Sequence[str], space_leaves: Sequence[Leaf]
) -> list[str]:
    """Returns the tensor name for each leaf of a space: the name ends with the leaf's path."""
    if len(names) == len(space_leaves) == 1:
        return [*names]
    endings = ["/".join((prefix, *map(str, leaf.path))) for leaf in space_leaves]
    matches = [next((x for x in names if f"/{x}".endswith(f"/{ending}")), "") for ending in endings]
    if "" in matches:
        raise model.make_import_error(f"it has no {endings[matches.index('')]!r}")
    return matches


# -- exports of this package ----------------------------------------------------------------------


def map_export(model: ImportedModel, spec: Mapping[str, Any]) -> IOMapping:
    """Returns the mapping of an export of this package.

    Args:
        model: the function `serving_default`.
        spec: its `policy_spec.json`.

    Raises:
        ModelImportError: if they do not belong together, or the policy reads steps before the last
            one.
    """
    views = {name: view for view in spec["views"] for name in view["inputs"]}
    for view in views.values():
        if view["column"] == "obs" or view["shifts"] != [-1] or view["window"]:
            raise model.make_import_error(
                f"it reads the view {view['name']!r} of the steps {view['shifts']}. Load the "
                "policy's checkpoint instead, by Policy.from_checkpoint"
            )
    inputs, outputs = [x.name for x in model.inputs], [x.name for x in model.outputs]
    state_inputs = [x for x in inputs if x.startswith("state_in_")]
    actions = [x for x in _get_tensor_names(spec, "outputs") if x.startswith(ACTIONS)]
    return IOMapping(
        [x for x in _get_tensor_names(spec, "inputs") if x.startswith(("obs", "action_mask"))],
        [x for x in actions if not x.startswith("actions_normalized")],
        ACTIONS,
        state_inputs,
        state_outputs=[x.replace("_in_", "_out_") for x in state_inputs],
        initial_state=[_make_zeros(x) for x in model.inputs if x.name in state_inputs],
        constants={"seq_lens": 1} if "seq_lens" in inputs else {},
        rewards=[x for x in views if views[x]["column"] == "rewards"],
        previous_actions=[x for x in views if views[x]["column"] == "actions"],
        has_time_axis=bool(state_inputs),
        extras={name: name for name in outputs if name in ("action_dist_inputs", "vf_preds")},
    )


def _get_tensor_names(spec: Mapping[str, Any], side: str) -> list[str]:
    return [str(port["name"]) for port in spec["signatures"]["serving_default"][side]]


# -- checks ---------------------------------------------------------------------------------------


def _check_mapping(
    model: ImportedModel, io_mapping: IOMapping, obs_leaves: Sequence[Leaf], action_space: gym.Space
) -> None:
    tensors = {x.name: x for x in model.inputs}
    for name, leaf in zip(io_mapping.obs, obs_leaves, strict=True):
        if not _shape_fits(tensors[name], leaf.shape, 1 + io_mapping.has_time_axis):
            raise model.make_import_error(
                f"the input {tensors[name]} takes {leaf.name('obs')}, but a row of it has the "
                f"shape {list(leaf.shape)}. Give the model's observation_space, or other names"
            )
    mapped = {
        *io_mapping.obs,
        *io_mapping.state_inputs,
        *io_mapping.constants,
        *io_mapping.rewards,
        *io_mapping.previous_actions,
    }
    if unmapped := [name for name in tensors if name not in mapped]:
        raise model.make_import_error(
            f"no values are defined for the inputs {unmapped}. Recurrent state is named by "
            "state_in_0, ... and state_out_0, ..."
        )
    if io_mapping.kind == LOGITS:
        _check_logits(model, io_mapping.outputs[0], action_space)
    else:
        _check_actions(model, io_mapping, action_space)


def _check_actions(model: ImportedModel, io_mapping: IOMapping, action_space: gym.Space) -> None:
    """Refuses outputs whose rows have another size than the actions of the space."""
    tensors = {x.name: x for x in model.outputs}
    for name, leaf in zip(io_mapping.outputs, action_leaves(action_space), strict=True):
        row_shape = tensors[name].shape[1 + io_mapping.has_time_axis :]
        if None in row_shape or math.prod(row_shape) == math.prod(leaf.shape):  # type: ignore[arg-type]
            continue
        is_choice = isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete)
        hint = "Give the model's action_space, or other names"
        if is_choice:
            hint = f"If they are logits, set names={{'logits': {name!r}}}"
        raise model.make_import_error(
            f"the output {tensors[name]} has {math.prod(row_shape)} "  # type: ignore[arg-type]
            f"numbers for a row, and an action of {leaf.space} has {math.prod(leaf.shape)}. {hint}"
        )


def _check_logits(model: ImportedModel, name: str, action_space: gym.Space) -> None:
    if not isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete):
        raise model.make_import_error(
            f"logits are for Discrete and MultiDiscrete actions, but the action_space is "
            f"{action_space}. Name the output for actions"
        )
    count = int(sum(count_choices(action_space)))
    (tensor,) = (x for x in model.outputs if x.name == name)
    if not _shape_fits(tensor, (count,), 1):
        raise model.make_import_error(f"{name!r} must have the {count} logits of {action_space}")


def _make_zeros(tensor: TensorInfo) -> np.ndarray:
    """Returns zeros for one row of an input, without the batch axis."""
    return np.zeros([size or 1 for size in tensor.shape[1:]], tensor.dtype)


def count_choices(action_space: gym.Space) -> list[int]:
    """Returns the number of choices of each part of a Discrete or MultiDiscrete space."""
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    return [int(n) for n in choices_per_cell(action_space)]


def _shape_fits(tensor: TensorInfo, shape: Sequence[int], axes: int) -> bool:
    row_shape = tensor.shape[axes:]
    if len(row_shape) != len(shape):
        return False
    return all(
        size is None or size == expected for size, expected in zip(row_shape, shape, strict=True)
    )
