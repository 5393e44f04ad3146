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

from tfpolicies.errors import UsageError, near_matches
from tfpolicies.foreign.model import ForeignModel, Socket
from tfpolicies.models.spaces import Leaf, action_leaves, cell_sizes, leaves

ACTIONS, LOGITS = "actions", "logits"
_STEP_TYPE, _MIDDLE = "step_type", 1  # a step that is neither the first nor the last


class Wiring(NamedTuple):
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
        previous_actions: the input for each leaf of the last action: indices from 0, numbers from -1 to 1.
        has_time_axis: whether all inputs but the state have a time axis after the batch axis.
        extras: further outputs to return: name -> output.
    """

    obs: Sequence[str]
    outputs: Sequence[str]
    kind: str
    memory_in: Sequence[str] = ()
    memory_out: Sequence[str] = ()
    memory: Sequence[np.ndarray] = ()
    constants: Mapping[str, float] = {}
    rewards: Sequence[str] = ()
    previous: Sequence[str] = ()
    has_time: bool = False
    extras: Mapping[str, str] = {}


def wired(
    model: ForeignModel,
    observation_space: gym.Space,
    action_space: gym.Space,
    names: Mapping[str, str] | None,
) -> Wiring:
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
    seen, acted = leaves(observation_space), action_leaves(action_space)
    steps = [x.name for x in model.inputs if x.name.endswith(_STEP_TYPE)]
    if steps and names is None:
        found = _of_tf_agents(model, steps[0].removesuffix(_STEP_TYPE), seen, acted)
    else:
        found = _named(model, seen, acted, names or {})
    _check(model, found, seen, action_space)
    return found


# -- names that the user gives --------------------------------------------------------------------


def _named(
    model: ForeignModel, seen: Sequence[Leaf], acted: Sequence[Leaf], names: Mapping[str, str]
) -> Wiring:
    inputs, outputs = [x.name for x in model.inputs], [x.name for x in model.outputs]
    observed, done = [x.name("obs") for x in seen], [x.name(ACTIONS) for x in acted]
    memory = [f"state_in_{i}" for i in range(sum(x.startswith("state_in_") for x in names))]
    after = [name.replace("_in_", "_out_") for name in memory]
    known = [*observed, *done, LOGITS, *memory, *after]
    for name in names:
        if name not in known:
            swapped = (
                f" Did you mean {{{names[name]!r}: {name!r}}}?" if names[name] in known else ""
            )
            raise UsageError(
                f"names maps names of this package to the model's: its keys may be {known}, but "
                f"not {name!r}.{swapped or near_matches(str(name), known)}"
            )
    for there, keys in ((inputs, [*observed, *memory]), (outputs, [*done, LOGITS, *after])):
        for key in names.keys() & set(keys):
            if names[key] not in there:
                raise model.refusal(f"names[{key!r}]={names[key]!r} is not one of {there}")
    free = [x for x in inputs if x not in names.values()]
    obs = [_one(model, key, names, inputs, free, len(seen) == 1) for key in observed]
    kind = LOGITS if LOGITS in names or (LOGITS in outputs and not {*done} & {*names}) else ACTIONS
    wanted = [LOGITS] if kind == LOGITS else done
    free = [x for x in outputs if x not in [names.get(key) for key in after]]
    results = [_one(model, key, names, outputs, free, len(wanted) == 1) for key in wanted]
    sockets = {x.name: x for x in model.inputs}
    memory_in = [names[key] for key in memory]
    memory_out = [_one(model, key, names, outputs, [], False) for key in after]
    initial = [_zeros(sockets[x]) for x in memory_in]
    return Wiring(obs, results, kind, memory_in, memory_out, initial)


def _one(
    model: ForeignModel,
    key: str,
    names: Mapping[str, str],
    there: Sequence[str],
    free: Sequence[str],
    only: bool,
) -> str:
    """Returns the tensor for `key`: the user's name, or the same name, or the only one left."""
    if key in names:
        return names[key]
    if key in there:
        return key
    if only and len(free) == 1:
        return free[0]
    raise model.refusal(f"it is ambiguous which tensor is {key!r}; set names={{{key!r}: ...}}")


# -- TF-Agents ------------------------------------------------------------------------------------


def _of_tf_agents(
    model: ForeignModel, prefix: str, seen: Sequence[Leaf], acted: Sequence[Leaf]
) -> Wiring:
    """Returns the mapping of `action(time_step, policy_state)`.

    All parts of the time step have the prefix that `step_type` has: `0/`, or `arg_0_` in the
    signatures of newer versions of TensorFlow.
    """
    inputs, outputs = [x.name for x in model.inputs], [x.name for x in model.outputs]
    of_step = {f"{prefix}{name}" for name in (_STEP_TYPE, "reward", "discount")}
    observed = [x for x in inputs if x.startswith(f"{prefix}observation")]
    memory = [x for x in inputs if x not in of_step and x not in observed]
    after = [x for x in outputs if x.partition("/")[0] == "state"]
    initial = model.initial_memory() if memory else []
    if len(after) != len(memory) or (initial is not None and len(initial) != len(memory)):
        raise model.refusal("its recurrent state has different numbers of inputs and outputs")
    if initial is None:
        sizes = {x.name: x for x in model.inputs}
        initial = [_zeros(sizes[x]) for x in memory]
    obs = _by_path(model, "observation", observed, seen)
    named = [x for x in outputs if x.split("/")[0] == "action"]
    actions = _by_path(model, "action", named, acted)
    constants = {f"{prefix}{_STEP_TYPE}": _MIDDLE, f"{prefix}discount": 1.0}
    rewards = [x for x in inputs if x == f"{prefix}reward"]
    return Wiring(obs, actions, ACTIONS, memory, after, initial, constants, rewards)


def _by_path(
    model: ForeignModel, what: str, found: Sequence[str], parts: Sequence[Leaf]
) -> list[str]:
    """Returns the tensor name for each leaf of a space: the name ends with the leaf's path."""
    if len(found) == len(parts) == 1:
        return [*found]
    wanted = ["/".join((what, *map(str, leaf.path))) for leaf in parts]
    chosen = [next((x for x in found if f"/{x}".endswith(f"/{end}")), "") for end in wanted]
    if "" in chosen:
        raise model.refusal(f"it has no {wanted[chosen.index('')]!r}")
    return chosen


# -- exports of this package ----------------------------------------------------------------------


def of_export(model: ForeignModel, spec: Mapping[str, Any]) -> Wiring:
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
            raise model.refusal(
                f"it reads the view {view['name']!r} of the steps {view['shifts']}. Load the "
                "policy's checkpoint instead, by Policy.from_checkpoint"
            )
    inputs, outputs = [x.name for x in model.inputs], [x.name for x in model.outputs]
    memory = [x for x in inputs if x.startswith("state_in_")]
    actions = [x for x in _spec_order(spec, "outputs") if x.startswith(ACTIONS)]
    return Wiring(
        [x for x in _spec_order(spec, "inputs") if x.startswith(("obs", "action_mask"))],
        [x for x in actions if not x.startswith("actions_normalized")],
        ACTIONS,
        memory,
        memory_out=[x.replace("_in_", "_out_") for x in memory],
        memory=[_zeros(x) for x in model.inputs if x.name in memory],
        constants={"seq_lens": 1} if "seq_lens" in inputs else {},
        rewards=[x for x in views if views[x]["column"] == "rewards"],
        previous=[x for x in views if views[x]["column"] == "actions"],
        has_time=bool(memory),
        extras={name: name for name in outputs if name in ("action_dist_inputs", "vf_preds")},
    )


def _spec_order(spec: Mapping[str, Any], side: str) -> list[str]:
    return [str(port["name"]) for port in spec["signatures"]["serving_default"][side]]


# -- checks ---------------------------------------------------------------------------------------


def _check(
    model: ForeignModel, wiring: Wiring, seen: Sequence[Leaf], action_space: gym.Space
) -> None:
    sockets = {x.name: x for x in model.inputs}
    for name, leaf in zip(wiring.obs, seen, strict=True):
        if not _fits(sockets[name], leaf.shape, 1 + wiring.has_time):
            raise model.refusal(
                f"the input {sockets[name]} takes {leaf.name('obs')}, but a row of it has the "
                f"shape {list(leaf.shape)}. Give the model's observation_space, or other names"
            )
    fed = {*wiring.obs, *wiring.memory_in, *wiring.constants, *wiring.rewards, *wiring.previous}
    if left := [name for name in sockets if name not in fed]:
        raise model.refusal(
            f"no values are defined for the inputs {left}. Recurrent state is named by "
            "state_in_0, ... and state_out_0, ..."
        )
    if wiring.kind == LOGITS:
        _check_logits(model, wiring.outputs[0], action_space)
    else:
        _check_actions(model, wiring, action_space)


def _check_actions(model: ForeignModel, wiring: Wiring, action_space: gym.Space) -> None:
    """Refuses outputs whose rows have another size than the actions of the space."""
    sockets = {x.name: x for x in model.outputs}
    for name, leaf in zip(wiring.outputs, action_leaves(action_space), strict=True):
        own = sockets[name].shape[1 + wiring.has_time :]
        if None in own or math.prod(own) == math.prod(leaf.shape):  # type: ignore[arg-type]
            continue
        is_choice = isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete)
        hint = "Give the model's action_space, or other names"
        if is_choice:
            hint = f"If they are logits, set names={{'logits': {name!r}}}"
        raise model.refusal(
            f"the output {sockets[name]} has {math.prod(own)} numbers for a row, and an action of "  # type: ignore[arg-type]
            f"{leaf.space} has {math.prod(leaf.shape)}. {hint}"
        )


def _check_logits(model: ForeignModel, name: str, action_space: gym.Space) -> None:
    if not isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete):
        raise model.refusal(
            f"logits are for Discrete and MultiDiscrete actions, but the action_space is "
            f"{action_space}. Name the output for actions"
        )
    count = int(sum(choices(action_space)))
    (socket,) = (x for x in model.outputs if x.name == name)
    if not _fits(socket, (count,), 1):
        raise model.refusal(f"{name!r} must have the {count} logits of {action_space}")


def _zeros(socket: Socket) -> np.ndarray:
    """Returns zeros for one row of an input, without the batch axis."""
    return np.zeros([size or 1 for size in socket.shape[1:]], socket.dtype)


def choices(action_space: gym.Space) -> list[int]:
    """Returns the number of choices of each part of a Discrete or MultiDiscrete space."""
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    return [int(n) for n in cell_sizes(action_space)]


def _fits(socket: Socket, shape: Sequence[int], axes: int) -> bool:
    own = socket.shape[axes:]
    if len(own) != len(shape):
        return False
    return all(size is None or size == given for size, given in zip(own, shape, strict=True))
