"""Nested Gymnasium spaces as lists of leaves; the only module that walks them.

A batch of a `Dict` space is a dict of `[B, ...]` arrays, of a `Tuple` space a tuple of them. Models
and runtimes see flat lists of arrays instead, one per leaf, in the order of `leaves(space)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from tfpolicies.base.finite_checks import NON_NUMERIC_KINDS, is_finite
from tfpolicies.base.type_aliases import Structure
from tfpolicies.errors import ObservationError, SpaceError, UnsupportedSpaceError

MASK, OBSERVATIONS = "action_mask", "observations"
"""The keys of observations with an action mask, which policies apply."""

_MAX_PARTS = 1000
LEAF_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Leaf(NamedTuple):
    """One array-valued part of a space."""

    path: tuple[str, ...]  # () for a space that is not nested
    space: spaces.Space
    shape: tuple[int, ...]  # of one element
    dtype: np.dtype  # of its batches: float32, uint8, int64, or int8 for actions

    def name(self, prefix: str) -> str:
        """Returns `prefix` and the path joined by `_`: `obs`, `obs_camera`."""
        return "_".join((prefix, *self.path))


Leaves: TypeAlias = Sequence[Leaf]


def describe_space(space: spaces.Space | None) -> str:
    """Returns a space in a few words, without the bounds of Boxes.

    >>> describe_space(spaces.Box(-1.0, 1.0, (84, 84, 4)))
    'Box((84, 84, 4), float32)'
    >>> describe_space(spaces.Dict({"a": spaces.Discrete(2)}))
    'Dict(a: Discrete(2))'
    """
    if isinstance(space, spaces.Box):
        return f"Box({space.shape}, {space.dtype})"
    if isinstance(space, spaces.Tuple):
        return f"Tuple({', '.join(map(describe_space, space.spaces))})"
    if isinstance(space, spaces.Dict):
        parts = (f"{name}: {describe_space(part)}" for name, part in space.spaces.items())
        return f"Dict({', '.join(parts)})"
    return repr(space)[:80]


def leaves(space: spaces.Space) -> tuple[Leaf, ...]:
    """Returns the leaves of `space`, with the keys of a Dict in the space's order.

    Raises:
        UnsupportedSpaceError: for Text, Graph, Sequence and other spaces without a fixed shape.

    >>> [leaf.name("obs") for leaf in leaves(spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1)))]
    ['obs_a', 'obs_b']
    """
    return tuple(_collect_leaves(space, (), _get_obs_dtype, "ObservationWrapper"))


def action_leaves(space: spaces.Space) -> tuple[Leaf, ...]:
    """Returns the leaves of an action space, in the order of `leaves`.

    Only the dtypes differ: a policy's actions are 0-based int64, those of MultiBinary int8 and
    those of a Box of floats float32.

    Raises:
        UnsupportedSpaceError: for Text, Graph, Sequence and other spaces without a fixed shape.
    """
    return tuple(_collect_leaves(space, (), _get_action_dtype, "ActionWrapper"))


def require_non_empty(space: spaces.Space, argument: str) -> None:
    """Checks that a space, and each part of it, has something to observe or to choose."""
    count = 0
    for location, part in _iter_subspaces(space, argument):
        problem = None
        if not isinstance(part, spaces.Dict | spaces.Tuple):
            count += 1
            if 0 in (part.shape or ()):
                problem = f"= {part} has the shape {part.shape}, which holds no number"
        elif not part.spaces:
            problem = f"is a {type(part).__name__} without parts"
        if problem is not None:
            raise SpaceError(f"{location} {problem}. Remove it, or give it at least one number.")
        bad_keys = (
            [x for x in part if not isinstance(x, str)] if isinstance(part, spaces.Dict) else []
        )
        if bad_keys:
            raise UnsupportedSpaceError(
                f"{argument} has a Dict with the key {bad_keys[0]!r}, but keys are names of inputs "
                "and must be strings. Give the part a name."
            )
    if count > _MAX_PARTS:
        raise SpaceError(
            f"{argument} has {count} parts, but {_MAX_PARTS} are the limit: each is a separate "
            "input or output. Combine parts to one Box or MultiDiscrete."
        )


def _iter_subspaces(space: spaces.Space, location: str) -> Iterator[tuple[str, spaces.Space]]:
    yield location, space
    for key, part in _iter_parts(space):
        yield from _iter_subspaces(part, f"{location}[{key!r}]")


def _iter_parts(space: spaces.Space) -> Iterable[tuple[Any, spaces.Space]]:
    """Returns keys and parts of a Dict or Tuple; nothing for other spaces."""
    if isinstance(space, spaces.Dict):
        return space.items()
    return enumerate(space) if isinstance(space, spaces.Tuple) else ()


def is_float_box(space: spaces.Space) -> TypeGuard[spaces.Box]:
    """Returns whether `space` is a Box of floats; other Boxes hold integers."""
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)


def is_choice(space: spaces.Space) -> bool:
    """Returns whether `space` is Discrete or MultiDiscrete, which models see as one-hot rows."""
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete)


def choices_per_cell(space: Any) -> tuple[int, ...]:
    """Returns the number of choices of each cell of an integer space, in C order; a bit has two."""
    if isinstance(space, spaces.Discrete):
        return (int(space.n),)
    if isinstance(space, spaces.MultiBinary):
        return (2,) * math.prod(space.shape)
    if isinstance(space, spaces.MultiDiscrete):
        return tuple(int(n) for n in space.nvec.reshape(-1))
    # Python's integers: the width of a Box of int64 does not fit into int64.
    bounds = zip(space.low.reshape(-1).tolist(), space.high.reshape(-1).tolist(), strict=True)
    return tuple(int(high) - int(low) + 1 for low, high in bounds)


def flat_size(leaf: Leaf) -> int:
    """Returns the number of columns of a leaf in a flat row, with discrete leaves one-hot."""
    return sum(choices_per_cell(leaf.space)) if is_choice(leaf.space) else math.prod(leaf.shape)


def has_mask(space: spaces.Space) -> bool:
    """Returns whether observations are `{"observations": ..., "action_mask": ...}`."""
    return isinstance(space, spaces.Dict) and set(space) == {MASK, OBSERVATIONS}


def get_scale_and_center(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and center of the map from [-1, 1] to a Box's bounds.

    They are 1 and 0 for components that are not scaled, because a bound is missing or both are
    equal (then there is only one action).
    """
    is_scaled = np.isfinite(low) & np.isfinite(high) & (low < high)
    low, high = np.where(is_scaled, low, -1), np.where(is_scaled, high, 1)
    return high / 2 - low / 2, high / 2 + low / 2


def _collect_leaves(
    space: spaces.Space, path: tuple[str, ...], dtype: Callable[[Any], Any], wrapper: str
) -> list[Leaf]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return [
            leaf
            for key, part in _iter_parts(space)
            for leaf in _collect_leaves(part, (*path, str(key)), dtype, wrapper)
        ]
    if not isinstance(space, LEAF_SPACES):
        location = f" at {'/'.join(path)!r}" if path else ""
        raise UnsupportedSpaceError(
            f"{type(space).__name__}{location} cannot be used in a policy's space; supported are "
            "Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple. Encode it in the "
            f"environment, for example with a gymnasium.{wrapper}."
        )
    return [Leaf(path, space, tuple(space.shape or ()), np.dtype(dtype(space)))]


def _get_obs_dtype(space: spaces.Space) -> Any:
    if is_float_box(space):
        return np.float32
    if isinstance(space, spaces.Box) and space.dtype == np.uint8:
        return np.uint8
    return np.int64


def _get_action_dtype(space: spaces.Space) -> Any:
    if is_float_box(space):
        return np.float32
    return np.int8 if isinstance(space, spaces.MultiBinary) else np.int64


def get_at_path(batch: Any, path: tuple[str, ...]) -> Any:
    """Returns the part of a nested batch at a leaf's path."""
    for key in path:
        batch = batch[key] if isinstance(batch, Mapping) else batch[int(key)]
    return batch


def unflatten(space: spaces.Space, arrays: Sequence[Any]) -> Any:
    """Packs one array per leaf into the structure of `space`."""
    return _unflatten(space, iter(arrays))


def _unflatten(space: spaces.Space, arrays: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _unflatten(part, arrays) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_unflatten(part, arrays) for part in space)
    return next(arrays)


def batch_leaves(space_leaves: Leaves, batch: Structure, argument: str) -> list[np.ndarray]:
    """Converts a batch to one array `[B, *leaf.shape]` of the leaf's dtype per leaf.

    Lists of rows and other dtypes are accepted; arrays that fit are returned without a copy.
    """
    if len(space_leaves) == 1 and not space_leaves[0].path:
        return [_to_leaf_array(space_leaves[0], batch, argument)]
    if isinstance(batch, list | np.ndarray):
        _check_nested(space_leaves, batch, argument)
    arrays = []
    for leaf in space_leaves:
        try:
            part = get_at_path(batch, leaf.path)
        except (KeyError, IndexError, TypeError, ValueError):
            raise ObservationError(
                f"{argument} has no part {'/'.join(leaf.path)!r}; the space is nested, so pass a "
                f"dict or tuple of [B, ...] arrays of the same structure, not "
                f"{type(batch).__name__}.{_pettingzoo_hint(leaf, batch)}"
            ) from None
        arrays.append(_to_leaf_array(leaf, part, leaf.name(argument)))
    sizes = {len(array) for array in arrays}
    if len(sizes) > 1:
        raise ObservationError(f"{argument} has parts of different batch sizes {sorted(sizes)}.")
    return arrays


def as_flat_rows(space_leaves: Leaves, batch: Structure) -> np.ndarray | None:
    """Returns a batch as `[B, F]` if it consists of flat rows of all leaves; else None."""
    try:
        rows = np.asarray(batch)
    except (TypeError, ValueError):
        return None
    has_flat_width = rows.ndim == 2 and rows.shape[1] == sum(map(flat_size, space_leaves))
    return rows if has_flat_width and rows.dtype.kind not in NON_NUMERIC_KINDS else None


def _check_nested(space_leaves: Leaves, batch: Structure, argument: str) -> None:
    """Raises an `ObservationError` for flat rows in place of a part for each leaf.

    If there are as many rows as parts, they are used as parts if their dtype fits the leaves.
    """
    rows = as_flat_rows(space_leaves, batch)
    if rows is None:
        return
    parts = len({leaf.path[0] for leaf in space_leaves})
    has_leaf_kinds = rows.dtype.kind != "f" or all(leaf.dtype.kind == "f" for leaf in space_leaves)
    if len(rows) != parts or not has_leaf_kinds:
        raise ObservationError(
            f"{argument} must be a dict or tuple of [B, ...] arrays, nested as the space is; got "
            f"flat rows {list(rows.shape)} of {rows.dtype}. Pass it as the environment returns it."
        )


def _pettingzoo_hint(leaf: Leaf, batch: Structure) -> str:
    is_pettingzoo_dict = isinstance(batch, Mapping) and "observation" in batch
    if not is_pettingzoo_dict or leaf.path[0] != "observations":
        return ""
    return (
        " PettingZoo's {'observation', 'action_mask'} is {'observations', 'action_mask'} here: "
        "pass {'observations': obs['observation'], 'action_mask': obs['action_mask']}."
    )


def _to_leaf_array(leaf: Leaf, batch: Structure, argument: str) -> np.ndarray:
    try:
        array = np.asarray(batch)
    except (TypeError, ValueError) as error:
        raise ObservationError(_describe_mismatch(leaf, batch, argument)) from error
    has_leaf_shape = array.ndim > 0 and array.shape[1:] == leaf.shape
    if array is batch and has_leaf_shape and array.dtype == leaf.dtype:
        return array
    if array.dtype.kind in NON_NUMERIC_KINDS and not _is_reset_pair(batch):
        _require_numbers(array, argument)
    if leaf.dtype.kind != "f" and not is_finite(array):
        raise ObservationError(f"{argument} must be integers, but has NaN or infinity.")
    if not has_leaf_shape:
        raise ObservationError(_describe_mismatch(leaf, batch, argument, array.shape))
    with np.errstate(invalid="ignore"):  # `_check_unchanged` reports numbers that do not fit
        converted = array.astype(leaf.dtype, copy=False)
    if leaf.dtype.kind != "f" and not np.can_cast(array.dtype, leaf.dtype):
        _check_unchanged(leaf, converted, array, argument)
    return converted


def _check_unchanged(
    leaf: Leaf, converted: np.ndarray, original: np.ndarray, argument: str
) -> None:
    """Raises an `ObservationError` if the conversion to the leaf's dtype changed numbers."""
    changed = converted != original
    if changed.any():
        index = tuple(int(i[0]) for i in np.nonzero(changed))
        is_image = leaf.dtype == np.uint8 and len(leaf.shape) == 3
        hint = ", and do not divide images by 255: the policy does" if is_image else ""
        raise ObservationError(
            f"{argument} must have numbers of {leaf.dtype}, as its space does, but "
            f"{argument}[{', '.join(map(str, index))}] is {original[index]}. Pass it as the "
            f"environment returns it{hint}."
        )


def to_float32(value: ArrayLike, argument: str) -> np.ndarray:
    """Converts a value to float32.

    Raises:
        ObservationError: if it holds strings, objects or complex numbers.
    """
    array = np.asarray(value)
    _require_numbers(array, argument)
    return array.astype(np.float32, copy=False)


def _require_numbers(array: np.ndarray, argument: str) -> None:
    if array.dtype.kind in NON_NUMERIC_KINDS:
        example = next(iter(array.flat), None)
        raise ObservationError(
            f"{argument} must be an array of real numbers, but has the dtype {array.dtype}, such "
            f"as {example!r:.80}. Convert it to numbers first."
        )


def _is_reset_pair(batch: Structure) -> bool:
    return isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], dict)


def _describe_mismatch(
    leaf: Leaf, batch: Structure, argument: str, shape: tuple[int, ...] | None = None
) -> str:
    expected = ", ".join(("B", *map(str, leaf.shape)))
    if _is_reset_pair(batch):
        return (
            f"{argument} is a pair (observation, info), as `env.reset()` returns it; unpack it "
            "first: `obs, info = env.reset()`."
        )
    got = f"shape {shape}" if shape is not None else f"a {type(batch).__name__} of ragged rows"
    hint = ""
    if shape is not None and tuple(shape) == leaf.shape:
        hint = " For one observation use `compute_single_action(obs)`, or add a batch axis."
    return f"{argument} must be an array [{expected}] of {leaf.dtype}; got {got}.{hint}"


def space_key(space: spaces.Space) -> tuple:
    """Returns a hashable value that is equal for equal spaces."""
    if isinstance(space, spaces.Dict):
        return ("Dict", tuple((key, space_key(part)) for key, part in space.items()))
    if isinstance(space, spaces.Tuple):
        return ("Tuple", tuple(space_key(part) for part in space))
    if isinstance(space, spaces.Box):
        bounds = (space.low.tobytes(), space.high.tobytes())
        return ("Box", space.shape, str(space.dtype), *bounds)
    if isinstance(space, spaces.Discrete):
        return ("Discrete", int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = (space.nvec.tobytes(), space.start.tobytes())
        return ("MultiDiscrete", space.shape, *sizes)
    return (type(space).__name__, space.shape, str(space.dtype))


def port_names(space_leaves: Leaves, prefix: str) -> list[str]:
    """Returns one unique name per leaf for a model's inputs, of letters, digits and `_`.

    >>> box = spaces.Box(0, 1)
    >>> port_names(leaves(spaces.Dict({"a_b": box, "a": spaces.Dict(b=box), "c/d": box})), "obs")
    ['obs_a_b', 'obs_a_b_1', 'obs_c_d']
    """
    names: list[str] = []
    for i, leaf in enumerate(space_leaves):
        name = re.sub(r"\W", "_", leaf.name(prefix), flags=re.ASCII)
        if name in names:
            name = f"{name}_{i}"
        while name in names:
            name += "_"
        names.append(name)
    return names


def space_struct(space: spaces.Space) -> Any:
    """Returns a space as nested dicts and tuples of leaf spaces.

    >>> space_struct(spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Discrete(3)])))
    {'a': Discrete(2), 'b': (Discrete(3),)}
    """
    if isinstance(space, spaces.Dict):
        return {key: space_struct(part) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(space_struct(part) for part in space)
    return space
