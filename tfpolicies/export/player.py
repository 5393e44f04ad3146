"""Runs an exported policy; needs NumPy and ONNX Runtime, and Gymnasium to create environments.

This file is next to `model.onnx` as `play.py`. It never imports TensorFlow, Keras or the package
that made the export. As a program:

    python play.py --env CartPole-v1 --episodes 100 --seed 0

As a module:

    policy = OnnxPolicy("model.onnx")
    action = policy.act(observation)     # one observation or a batch [B, ...]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnxruntime

if TYPE_CHECKING:
    import gymnasium as gym

_OBSERVATION_PREFIXES = ("obs", "action_mask")
_NORMALIZED = "actions_normalized"
_REWARDS = "rewards"
NOT_NEEDED = ("tensorflow", "keras", "tfpolicies")
DEVICES = ("cpu", "cuda", "auto")
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def get_providers(device: str) -> list[str]:
    """Returns the providers of ONNX Runtime for a device.

    Args:
        device: "cpu", "cuda", or "auto": a GPU if ONNX Runtime can use one.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r:.200}.")
    if device == "auto":
        return [_CUDA, _CPU] if _CUDA in onnxruntime.get_available_providers() else [_CPU]
    return require_providers([_CUDA if device == "cuda" else _CPU])


def require_providers(providers: Sequence[str]) -> list[str]:
    available = onnxruntime.get_available_providers()
    if isinstance(providers, str) or not providers:
        raise ValueError(f"providers must be a list of names, such as [{_CPU!r}].")
    missing = [name for name in providers if name not in available]
    if missing:
        hint = _INSTALL_CUDA if _CUDA in missing else ""
        raise ValueError(
            f"providers has {missing[0]!r:.200}, but this ONNX Runtime has {available}.{hint}"
        )
    return [*providers]


_INSTALL_CUDA = (
    " For CUDA run `pip uninstall onnxruntime` and `pip install onnxruntime-gpu`: the two packages "
    "cannot be installed together."
)


class OnnxPolicy:
    """A policy in an ONNX file, described by `policy_spec.json` in the same folder.

    Attributes:
        spec: the content of `policy_spec.json`.
        file: the ONNX file.
        observation_ports: the input ports for observations, from the spec.
        action_ports: the output ports that are actions for the environment, from the spec.
        get_run_options: returns the options of ONNX Runtime for each call, by which others can end
            it; None for ONNX Runtime's defaults.

    Args:
        path: `model.onnx`, or its folder.
        sample: draw actions from the distribution instead of choosing the most likely one.
        seed: seeds the draws; None for a random seed.
        threads: the number of threads per call.
        prepare: called with the checked model; returns the model to run, which may have fewer
            outputs.
        limited: whether time and memory are limited, by `LimitedSession`. Files that you trust need
            no limits.
        providers: the providers of ONNX Runtime, the best one first; None: the CPU. If the CPU is
            not among them, a GPU that cannot be used is an error.

    Raises:
        FileNotFoundError: if a file of the export is missing, or is not a regular file.
        ValueError: if the files do not belong together, are not as an export writes them, or need
            too many resources.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        sample: bool = False,
        seed: int | None = None,
        threads: int = 1,
        prepare: Callable[[bytes], bytes] = bytes,
        limited: bool = True,
        providers: Sequence[str] | None = None,
    ) -> None:
        location = Path(os.path.expanduser(path)).absolute()
        folder = location if location.is_dir() else location.parent
        if not (folder / "policy_spec.json").exists():
            raise FileNotFoundError(
                f"{os.fspath(path)!r} ({location}) is not an export: {folder} has no "
                "policy_spec.json."
            )
        self.spec = _read_spec(folder / "policy_spec.json")
        signature = "sample" if sample else "serving_default"
        self.file = folder / _check_file_name(_get_entry(self.spec["files"], signature))
        content = _read_file(self.file)
        if hashlib.sha256(content).hexdigest() != _get_entry(self.spec["sha256"], self.file.name):
            raise ValueError(
                f"{self.file} is not the file that {folder / 'policy_spec.json'} describes; "
                "export the policy again."
            )
        self.get_run_options: Callable[[], onnxruntime.RunOptions] | None = None
        ports = _get_entry(self.spec["signatures"], signature)
        _check_ports([*ports["inputs"], *ports["outputs"]], self.spec["noise"]["blocks"])
        if sample:
            _check_noise(ports["inputs"], self.spec["noise"]["blocks"])
        full_model = rebuild_model(self.file, content, limited=limited)
        name, model = str(self.file), prepare(full_model)
        self._model = LimitedSession(
            name, model, threads, limited=limited, trial_model=full_model, providers=providers
        )
        self._inputs = [port for port in ports["inputs"] if port["name"] != "noise"]
        session_outputs = {output.name for output in self._model.session.get_outputs()}
        self._outputs = [
            port["name"] for port in ports["outputs"] if port["name"] in session_outputs
        ]
        if prepare is bytes and len(self._outputs) < len(ports["outputs"]):
            raise ValueError(
                f"{self.file} lacks outputs that {folder / 'policy_spec.json'} lists; export the "
                "policy again."
            )
        views = self.spec.get("views") or _make_previous_step_views(self._inputs)
        view_names = {name for view in views for name in view["inputs"]}
        other_ports = [port for port in self._inputs if port["name"] not in view_names]
        self.observation_ports = [
            port for port in other_ports if port["name"].startswith(_OBSERVATION_PREFIXES)
        ]
        self._state_ports = [port for port in other_ports if port["name"].startswith("state_in_")]
        self._state_outputs = {
            x["name"]: x["name"].replace("_in_", "_out_") for x in self._state_ports
        }
        observation_names = [
            x["name"] for x in self.observation_ports if not x["name"].startswith("action_mask")
        ]
        by_name = {port["name"]: port for port in self._inputs}
        self._view_inputs = [
            _ViewInput.from_port(
                by_name[name], view, observation_names[i] if view["column"] == "obs" else ""
            )
            for view in views
            for i, name in enumerate(view["inputs"])
        ]
        self.action_ports = [
            port
            for port in ports["outputs"]
            if port["name"].startswith("actions") and not port["name"].startswith(_NORMALIZED)
        ]
        if not self.observation_ports:
            raise ValueError("The policy_spec.json has no input for observations.")
        try:
            self._choices = _find_choice_inputs(
                self.observation_ports, self.spec["observation_space"]
            )
            self._masks = _MaskInputs.from_ports(self.observation_ports, self.spec["action_space"])
        except (AttributeError, KeyError, OverflowError, TypeError) as error:
            raise ValueError(
                f"The spaces in policy_spec.json do not fit its inputs ({error!r:.200}); export "
                "the policy again."
            ) from error
        self.sample = sample
        self._rng = np.random.default_rng(seed)
        self._carry: dict[str, np.ndarray] = {}

    def reset(self) -> None:
        """Resets the recurrent state and earlier steps, before new episodes."""
        self._carry = {}

    def act(self, obs: Any, reward: Any = 0.0) -> Any:
        """Returns the action for one observation, or `[B, ...]` for a batch `[B, ...]` of them.

        Observations are nested as the environment's space is; actions are ready for it. The
        recurrent state is kept from call to call; call `reset` before a new episode.

        Args:
            obs: the observation of the environment.
            reward: the reward of the last action, for policies that read it.

        Raises:
            ValueError: if it is not in the space, or has a mask that allows no action.
        """
        leaves, single = self._to_batch(obs)
        self.check_observations(
            {port["name"]: x for port, x in zip(self.observation_ports, leaves, strict=True)}
        )
        rows = len(leaves[0])
        noise = self.draw_noise(self._rng, rows) if self.sample else None
        carry = self._carry or self.make_initial_carry(rows)
        if _REWARDS in carry:
            carry[_REWARDS][:, -1] = reward
        outputs = self.run(leaves, noise, carry)
        self._carry = self.update_carry(outputs, leaves, carry)
        actions = self.get_env_actions(outputs)
        return _nest_leaves(
            self.spec["action_space"], iter([x[0] for x in actions] if single else actions)
        )

    def check_observations(
        self,
        feed: Mapping[str, np.ndarray],
        valid: np.ndarray | None = None,
        first_row: int = 0,
    ) -> None:
        """Checks that choices are in their range, and that masks allow an action in each row.

        Args:
            feed: observations by input, `[B, ...]`, or `[B, T, ...]` with `valid`.
            valid: bool `[B, T]`, the steps of sequences that are not padding.
            first_row: the number of the first row in messages.

        Raises:
            ValueError: if one does not; the message names input, rule and row.
        """
        for choice in self._choices:
            choice.check(feed[choice.name], valid, first_row)
        if self._masks is not None:
            self._masks.check(feed, valid, first_row)

    def make_initial_carry(self, rows: int) -> dict[str, np.ndarray]:
        """Returns the carry for the first steps of episodes: zeros, by name.

        The carry is the recurrent state, and the earlier steps that the policy reads, `[rows,
        steps, ...]` each, the newest one last.
        """
        carry = {
            x["name"]: np.zeros((rows, *_get_row_shape(x)), x["dtype"]) for x in self._state_ports
        }
        for view_input in sorted(
            self._view_inputs, key=lambda seen: -min(seen.shifts)
        ):  # the longest last
            shape = (rows, -min(view_input.shifts), *view_input.shape)
            carry[view_input.source] = np.zeros(shape, view_input.dtype)
        return carry

    def update_carry(
        self,
        outputs: Mapping[str, np.ndarray],
        leaves: Sequence[np.ndarray],
        carry: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Returns the carry for the next steps; the reward of this step is 0 until it is set.

        Args:
            outputs: the result of `run`.
            leaves: the observations of `run`.
            carry: the carry of `run`.
        """
        observations = {
            port["name"]: x for port, x in zip(self.observation_ports, leaves, strict=True)
        }
        result = {name: outputs[output_name] for name, output_name in self._state_outputs.items()}
        for name in {view_input.source for view_input in self._view_inputs}:
            past = carry[name]
            if past.shape[1]:
                newest = (
                    np.zeros(len(past)) if name == _REWARDS else {**outputs, **observations}[name]
                )
                past = np.concatenate([past[:, 1:], newest[:, None]], axis=1, dtype=past.dtype)
            result[name] = past
        return result

    def get_env_actions(self, outputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Returns the actions for the environment, one array `[B, ...]` per leaf."""
        return [outputs[port["name"]] for port in self.action_ports]

    def nest_action(self, leaves: Sequence[Any]) -> Any:
        """Returns one action in the structure of the environment's space."""
        return _nest_leaves(self.spec["action_space"], iter(leaves))

    def draw_noise(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Draws the noise of `rows` actions, float32 `[rows, size]`."""
        blocks = [
            _NOISE_SAMPLERS[kind](rng, (rows, size)) for kind, size in self.spec["noise"]["blocks"]
        ]
        return np.concatenate([np.zeros((rows, 0), np.float32), *blocks], axis=1)

    def run(
        self,
        leaves: Sequence[np.ndarray],
        noise: np.ndarray | None = None,
        carry: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns all outputs of one step by name, one row per environment.

        Args:
            leaves: one array `[B, ...]` per observation leaf.
            noise: `[B, size]`, or None for the greedy actions.
            carry: the result of `fresh` or `after`, for policies that read earlier steps.
        """
        return self.drop_time_axis(self.infer(self.make_feed(leaves, noise, carry)))

    def make_feed(
        self,
        leaves: Sequence[np.ndarray],
        noise: np.ndarray | None = None,
        carry: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the file's inputs for one step, by name; has the arguments of `run`."""
        rows = len(leaves[0])
        feed = {port["name"]: x for port, x in zip(self.observation_ports, leaves, strict=True)}
        carry = self.make_initial_carry(rows) if carry is None else carry
        for view_input in self._view_inputs:
            feed[view_input.name] = view_input.gather_steps(
                carry[view_input.source], feed.get(view_input.source)
            )
        if noise is not None:
            feed["noise"] = noise
        if self._state_ports:  # one step of each sequence
            feed = {name: x[:, None] for name, x in feed.items()}
            feed |= {name: carry[name] for name in self._state_outputs}
            feed["seq_lens"] = np.ones(rows, np.int32)
        return feed

    def infer(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the file's outputs by name for all of its inputs: rows, or sequences.

        Raises:
            ValueError: if it needs too much time or memory.
        """
        options = self.get_run_options() if self.get_run_options else None
        return dict(zip(self._outputs, self._model.run(self._outputs, feed, options), strict=True))

    def drop_time_axis(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Removes the time axis that outputs of recurrent policies have."""
        if not self._state_ports:
            return {**outputs}
        state_names = self._state_outputs.values()
        return {k: x if k in state_names else x[:, 0] for k, x in outputs.items()}

    def stack_observations(self, observations: Sequence[Any]) -> list[np.ndarray]:
        """Stacks single observations to one array `[B, ...]` per leaf."""
        rows = [self._to_batch(obs)[0] for obs in observations]
        return [np.concatenate(parts) for parts in zip(*rows, strict=True)]

    def _get_part(self, obs: Any, port: Mapping[str, Any]) -> Any:
        try:
            return _pick(obs, port["path"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            parts = [
                "/".join(observation_port["path"]) for observation_port in self.observation_ports
            ]
            actual = list(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise ValueError(
                f"The observation has no part {'/'.join(port['path'])!r}: the policy reads the "
                f"parts {parts}, got {actual}. Give it as the environment returns it."
            ) from error

    def _to_batch(self, obs: Any) -> tuple[list[np.ndarray], bool]:
        """Returns a batch per leaf, and whether `obs` was a single observation."""
        leaves, single = [], []
        for port in self.observation_ports:
            array = _cast(np.asarray(self._get_part(obs, port)), port)
            shape = _get_row_shape(port)
            single.append(array.shape == shape)
            array = array[None] if single[-1] else array
            if array.shape[1:] != shape:
                raise ValueError(
                    f"{port['name']} must have the shape {list(shape)} or ['B', "
                    f"{', '.join(map(str, shape))}], got {list(array.shape)}."
                )
            leaves.append(array)
        if len(set(single)) > 1 or len({len(leaf) for leaf in leaves}) > 1:
            raise ValueError("All parts of an observation need the same batch size.")
        return leaves, single[0]


def _cast(values: np.ndarray, port: Mapping[str, Any]) -> np.ndarray:
    """Returns numbers in the dtype of an input, if that does not change them."""
    with np.errstate(invalid="ignore"):
        array = values.astype(port["dtype"], copy=False)
    if array.dtype.kind != "f" and array.dtype != values.dtype and (array != values).any():
        raise ValueError(
            f"{port['name']} must have numbers of {port['dtype']}, as its space does, got "
            f"{values[array != values].reshape(-1)[0]}. Give it as the environment returns it."
        )
    return array


class _ChoiceInput(NamedTuple):
    """An input of choices, from `Discrete` and `MultiDiscrete` spaces."""

    name: str
    start: np.ndarray  # int64, `()` or the shape of a row
    size: np.ndarray  # uint64, `()` or the shape of a row

    def check(self, array: np.ndarray, valid: np.ndarray | None, first_row: int) -> None:
        """Raises a `ValueError` unless all valid entries are among `size` numbers from `start`."""
        inside = (array - self.start).view(np.uint64) < self.size  # negative numbers wrap around
        if valid is not None:
            inside[~valid] = True
        if 0 in inside.tobytes():
            at = tuple(np.argwhere(~inside)[0].tolist())
            low, size = (int(np.broadcast_to(x, array.shape)[at]) for x in self[1:])
            raise ValueError(
                f"Input {self.name!r} must be from {low} to {low + size - 1}, got {array[at]} at "
                f"{[at[0] + first_row, *at[1:]]}."
            )


def _find_choice_inputs(
    observed: Sequence[Mapping[str, Any]], space: Mapping[str, Any]
) -> list[_ChoiceInput]:
    inputs = []
    for port in observed:
        leaf = space
        for key in port["path"]:
            entries = leaf["spaces"]
            inner = dict(enumerate(entries)) if leaf["type"] == "Tuple" else dict(entries)
            leaf = {str(name): part for name, part in inner.items()}[key]
        if leaf["type"] in ("Discrete", "MultiDiscrete") and port["dtype"] == "int64":
            start, count = np.asarray(leaf["start"], np.int64), leaf.get("n", leaf.get("nvec"))
            parts = start, np.asarray(count, np.uint64)
            shaped = [x.reshape(_get_row_shape(port)) if x.ndim else x for x in parts]
            inputs.append(_ChoiceInput(port["name"], *shaped))
    return inputs


class _MaskInputs(NamedTuple):
    """The inputs for action masks, concatenated."""

    names: tuple[str, ...]
    widths: tuple[int, ...]  # in columns
    choices: tuple[slice, ...]  # the columns of which one must be allowed

    @classmethod
    def from_ports(
        cls, observed: Sequence[Mapping[str, Any]], space: Mapping[str, Any]
    ) -> _MaskInputs | None:
        """Returns the masks for an action space; None if there are none."""
        ports = [port for port in observed if port["name"].startswith("action_mask")]
        if not ports:
            return None
        widths = tuple(math.prod(_get_row_shape(port)) for port in ports)
        choices, start = [], 0
        for size, is_choice in _iter_choice_sizes(space, sum(widths)):
            if is_choice:
                choices.append(slice(start, start + size))
            start += size
        return cls(tuple(port["name"] for port in ports), widths, tuple(choices))

    def check(
        self, feed: Mapping[str, np.ndarray], valid: np.ndarray | None, first_row: int
    ) -> None:
        """Raises a `ValueError` unless each valid row allows an action for each choice."""
        axes = 1 if valid is None else 2
        pairs = zip(self.names, self.widths, strict=True)
        flat = [feed[name].reshape(*feed[name].shape[:axes], width) for name, width in pairs]
        allowed = flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)
        for choice in self.choices:
            columns = allowed if len(self.choices) == 1 else allowed[..., choice]
            is_open = np.logical_or.reduce(columns, axis=-1)
            if valid is not None:
                is_open[~valid] = True
            if 0 in is_open.tobytes():
                row, *step = at = tuple(np.argwhere(~is_open)[0].tolist())
                location = f"row {row + first_row}" + "".join(f", step {x}" for x in step)
                if len(self.choices) > 1:
                    location += f", columns {choice.start} to {choice.stop - 1}"
                raise ValueError(
                    f"Each row of {', '.join(map(repr, self.names))} must allow an action, but "
                    f"{location} is {columns[at].tolist()!s:.200}."
                )


def _iter_choice_sizes(space: Mapping[str, Any], max_columns: int) -> Iterator[tuple[int, bool]]:
    """Yields the number of mask columns of each part of an action, and whether one must be allowed.

    The bits of a MultiBinary may all be forbidden, and a Box of floats has no columns.
    """
    kind = space["type"]
    if kind in ("Dict", "Tuple"):
        for part in space["spaces"]:
            yield from _iter_choice_sizes(part[1] if kind == "Dict" else part, max_columns)
    elif kind == "Discrete":
        yield space["n"], True
    elif kind == "MultiBinary":
        yield int(np.prod(space["n"])), False
    elif kind == "MultiDiscrete":
        yield from ((n, True) for n in np.ravel(space["nvec"]).tolist())
    elif not space["dtype"].startswith("float"):
        count = math.prod(space["shape"])
        if count > max_columns:
            raise ValueError(
                f"The policy_spec.json has a mask of {max_columns} columns for {count} parts."
            )
        low, high = (np.broadcast_to(space[name], count).tolist() for name in ("low", "high"))
        yield from ((y - x + 1, True) for x, y in zip(low, high, strict=True))


class _ViewInput(NamedTuple):
    """An input with steps of the past, relative to the current one."""

    name: str
    source: str  # the observation, normalised action or "rewards" that it shows
    shifts: tuple[int, ...]
    is_window: bool  # whether it has an axis of steps
    shape: tuple[int, ...]  # of one step
    dtype: str

    @classmethod
    def from_port(
        cls, port: Mapping[str, Any], view: Mapping[str, Any], observation_name: str
    ) -> _ViewInput:
        """Returns the view input of a port; `observation_name` is its observation, if any."""
        source = view["column"]
        if source == "obs":
            source = observation_name
        elif source == "actions":
            source = _NORMALIZED + port["name"].removeprefix(view["name"])
        shape = _get_row_shape(port)
        shifts, is_window = tuple(map(int, view["shifts"])), bool(view["window"])
        if not shifts or max(shifts) > 0 or -min(shifts) * math.prod(shape) > _MAX_NUMBERS:
            raise ValueError(f"The policy_spec.json has a view of the steps {list(shifts)[:9]}.")
        return cls(port["name"], source, shifts, is_window, shape[is_window:], port["dtype"])

    def gather_steps(self, past: np.ndarray, current: np.ndarray | None) -> np.ndarray:
        """Returns the input `[B, ...]` from past steps `[B, steps, ...]` and the current one."""
        present = past.shape[1]
        if 0 in self.shifts and current is not None:
            past = np.concatenate([past, current[:, None]], axis=1, dtype=past.dtype)
        steps = past.take([shift + present for shift in self.shifts], axis=1)
        return steps if self.is_window else steps[:, 0]


def _make_previous_step_views(ports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the views of exports whose spec does not list them."""
    views = []
    for column in ("actions", "rewards"):
        name = f"prev_{column}"
        inputs = [port["name"] for port in ports if port["name"].startswith(name)]
        if inputs:
            view = {"name": name, "column": column, "shifts": [-1], "window": False}
            views.append({**view, "inputs": inputs})
    return views


def _get_row_shape(port: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(size for size in port["shape"] if not isinstance(size, str))


def _draw_gumbel(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    tiny = np.finfo(np.float32).tiny
    return -np.log(np.maximum(rng.standard_exponential(size, np.float32), tiny))


_NOISE_SAMPLERS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "gumbel": _draw_gumbel,
    "normal": lambda rng, size: rng.standard_normal(size, np.float32),
    "logistic": lambda rng, size: rng.logistic(size=size).astype(np.float32),
}


def _nest_leaves(space: Mapping[str, Any], leaves: Iterator[Any]) -> Any:
    if space["type"] == "Dict":
        return {key: _nest_leaves(sub, leaves) for key, sub in space["spaces"]}
    if space["type"] == "Tuple":
        return tuple(_nest_leaves(sub, leaves) for sub in space["spaces"])
    return next(leaves)


def _read_spec(path: Path) -> dict[str, Any]:
    spec = json.loads(_read_file(path))
    spec = spec if isinstance(spec, dict) else {}
    kind, version = spec.get("format"), spec.get("format_version")
    if kind != "tfpolicies.policy_spec" or version != 2 or spec.get("artefact") != "onnx":
        raise ValueError(f"{path} does not describe an ONNX export of version 2.")
    for name, schema in _SPEC_SCHEMA.items():
        if name not in spec and name in _OPTIONAL_ENTRIES:
            continue
        if not _matches_schema(spec.get(name), schema):
            raise ValueError(
                f"{path} is malformed: its entry {name!r} is {spec.get(name)!r:.200}. Export the "
                "policy again."
            )
    return spec


_PORT_SCHEMA = {"name": str, "dtype": str, "shape": [str | int], "path": [str]}
_VIEW_SCHEMA = {"name": str, "column": str, "shifts": [int], "window": bool, "inputs": [str]}
_SPEC_SCHEMA: dict[str, Any] = {
    "files": {str: str},
    "sha256": {str: str},
    "signatures": {str: {"inputs": [_PORT_SCHEMA], "outputs": [_PORT_SCHEMA]}},
    "views": [_VIEW_SCHEMA],
    "noise": {"blocks": [(str, int)]},
    "observation_space": {"type": str},
    "action_space": {"type": str},
}
"""The schemas of entries: objects with some entries, or with any entries of one schema (the key is
`str`); lists of one schema, and lists of a fixed length (tuples)."""

_OPTIONAL_ENTRIES = ("views",)  # not in earlier exports


def _matches_schema(value: Any, schema: Any) -> bool:
    if isinstance(schema, tuple):
        has_length = isinstance(value, list) and len(value) == len(schema)
        return has_length and all(map(_matches_schema, value, schema))
    if isinstance(schema, list):
        return isinstance(value, list) and all(_matches_schema(item, schema[0]) for item in value)
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return False
        if str in schema:
            return all(_matches_schema(item, schema[str]) for item in value.values())
        return all(_matches_schema(value.get(name), item) for name, item in schema.items())
    return isinstance(value, schema) and (schema is bool or not isinstance(value, bool))


def _get_entry(entries: Mapping[str, Any], name: str) -> Any:
    if name not in entries:
        raise ValueError(
            f"The policy_spec.json has no entry for {name!r}; export the policy again."
        )
    return entries[name]


def _read_file(path: Path) -> bytes:
    """Returns the content of a file of the export; refuses pipes and devices, which never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file; export the policy again.")
        return file.read(status.st_size)


def _check_file_name(name: str) -> str:
    """Returns a file name if it is in the folder of the spec."""
    if not 0 < len(name) < 256 or Path(name).name != name:
        raise ValueError(
            f"The policy_spec.json names {name!r:.200}, which is not a file in its folder."
        )
    return name


_MAX_NUMBERS = 100_000_000  # numbers of one row
_MAX_NOISE = 1_000_000  # numbers per row
_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")


def _check_ports(ports: Sequence[Mapping[str, Any]], noise: Sequence[Any]) -> None:
    """Checks dtypes and sizes of the arrays in a spec, which the caller will allocate."""
    sizes = [math.prod(_get_row_shape(port)) for port in ports]
    if not all(0 <= size <= _MAX_NUMBERS for size in sizes):
        raise ValueError(f"The policy_spec.json has arrays of {max(sizes)!r:.200} numbers per row.")
    drawn = [size for _, size in noise]
    is_count = all(type(size) is int and size >= 0 for size in drawn)
    if not is_count or sum(drawn) > _MAX_NOISE:
        raise ValueError(
            f"The policy_spec.json asks for noise of {drawn!s:.200} numbers per row; each must be "
            f"at least 0, and all together at most {_MAX_NOISE}."
        )
    unknown = [kind for kind, _ in noise if kind not in _NOISE_SAMPLERS]
    if unknown:
        raise ValueError(
            f"The policy_spec.json asks for noise of the kinds {unknown!r:.200}; there are "
            f"{list(_NOISE_SAMPLERS)}."
        )
    for port in ports:
        if not _DTYPES.fullmatch(port["dtype"]):
            raise ValueError(f"The policy_spec.json has arrays of {port['dtype']!r:.200}.")


def _check_noise(inputs: Sequence[Mapping[str, Any]], noise: Sequence[Any]) -> None:
    """Checks that the drawn noise has the size of the model's input."""
    input_sizes = [math.prod(_get_row_shape(port)) for port in inputs if port["name"] == "noise"]
    drawn = sum(size for _, size in noise)
    if input_sizes != [drawn]:
        raise ValueError(
            f"The policy_spec.json asks for noise of {drawn} numbers per row, but the input "
            f"'noise' takes {input_sizes}; export the policy again."
        )


_ALLOWED_DOMAINS = (b"", b"ai.onnx", b"ai.onnx.ml")
_KEPT_FIELDS: dict[str, dict[int, str]] = {
    "model": {1: "", 7: "graph", 8: "opset"},
    "opset": {1: "", 2: ""},
    "graph": {1: "node", 2: "", 5: "tensor", 11: "value", 12: "value", 13: "value", 15: "sparse"},
    "node": {1: "", 2: "", 3: "", 4: "", 5: "attribute", 7: ""},
    "attribute": {
        **dict.fromkeys((1, 2, 3, 4, 7, 8, 9, 20), ""),
        **dict.fromkeys((5, 10), "tensor"),
        **dict.fromkeys((6, 11), "graph"),
        **dict.fromkeys((14, 15), "type"),
        **dict.fromkeys((22, 23), "sparse"),
    },
    "tensor": dict.fromkeys((1, 2, 4, 5, 7, 8, 9, 10, 11), ""),
    "sparse": {1: "tensor", 2: "tensor", 3: ""},
    "value": {1: "", 2: "type"},
    "type": {1: "array", 4: "inner type", 8: "array", 9: "inner type"},
    "inner type": {1: "type"},
    "array": {1: "", 2: "shape"},
    "shape": {1: "axis"},
    "axis": {1: "", 2: ""},
}
"""The fields of ONNX's messages that are needed for computing, by number: the kind of message in
the field, or "" for none.

`quantization_annotation`, `metadata_props`, documentation and unknown fields are left out.
"""


def _refuse_domain(content: memoryview) -> str:
    if content in _ALLOWED_DOMAINS:
        return ""
    return f"has operators of {bytes(content[:100]).decode(errors='replace')!r}"


_REFUSED_FIELDS: dict[tuple[str, int], Callable[[memoryview], str]] = {
    ("model", 20): lambda content: "has a part for training",
    ("model", 25): lambda content: "has functions",
    ("attribute", 21): lambda content: "has functions",
    **dict.fromkeys([("opset", 1), ("node", 7)], _refuse_domain),
    ("node", 4): lambda content: _HAS_TEXTS if bytes(content[:6]) == b"String" else "",
    ("attribute", 1): lambda content: _HAS_TEXTS if b"string" in bytes(content) else "",
    ("tensor", 2): lambda content: (
        _HAS_TEXTS if _decode_varint(content, 0)[0] == _STRING_TYPE else ""
    ),
    ("tensor", 6): lambda content: _HAS_TEXTS,
    ("tensor", 13): lambda content: "has weights in other files",
    ("tensor", 14): lambda content: "has weights in other files" if any(content) else "",
}
"""Checks of fields that let a model do more than compute numbers: the problem, or ""."""

_EXTERNAL_ENTRY, _EXTERNAL_LOCATION, _RAW_DATA = ("tensor", 13), ("tensor", 14), 9
_ReadExternal = Callable[[Mapping[str, str]], bytes]

_NAME_FIELDS = {("graph", 2), ("value", 1), ("axis", 2), ("attribute", 1), ("tensor", 8)}
_NAME_FIELDS |= {("node", field) for field in (1, 2, 3, 4)}
"""Fields with names, which ONNX Runtime reads as UTF-8."""

_HAS_TEXTS = "has tensors of texts"  # ONNX Runtime does not count their memory
_STRING_TYPE = 8  # the number of strings in `TensorProto.DataType`
_MAX_PARTS, _MAX_NODES, _MAX_DEPTH = 200_000, 10_000, 60


class _ModelRebuilder:
    """Copies the fields of an ONNX model that are needed for computing; refuses other features."""

    def __init__(self, limited: bool, read_external: _ReadExternal | None = None) -> None:
        self._nodes_left = _MAX_NODES if limited else math.inf
        self._parts_left = _MAX_PARTS if limited else math.inf
        self._read_external = read_external

    def copy(self, kind: str, message: memoryview, depth: int = 0) -> bytearray:
        """Returns a message with its fields in the canonical encoding.

        Raises:
            LookupError: if it is damaged.
            ValueError: if it is refused.
        """
        if depth > _MAX_DEPTH:
            raise ValueError("is nested too deeply")
        result, external = bytearray(), dict[str, str]()
        for field, wire, content in _iterate_fields(message):
            inner_kind = _KEPT_FIELDS[kind].get(field)
            self._parts_left -= 1
            self._nodes_left -= inner_kind == "node"
            if min(self._parts_left, self._nodes_left) < 0:
                raise ValueError(f"has more than {_MAX_NODES} nodes or {_MAX_PARTS} parts")
            if self._read_external and (kind, field) == _EXTERNAL_ENTRY:
                external |= _read_entry(content)
                continue
            problem = (kind, field) in _REFUSED_FIELDS and _REFUSED_FIELDS[kind, field](content)
            if problem and not (self._read_external and (kind, field) == _EXTERNAL_LOCATION):
                raise ValueError(problem)
            if inner_kind is None:
                continue
            if (kind, field) in _NAME_FIELDS:
                _require_utf8(content)
            if inner_kind:
                if wire != 2:
                    raise IndexError
                content = memoryview(self.copy(inner_kind, content, depth + 1))
            result += encode_varint(field << 3 | wire)
            if wire == 2:
                result += encode_varint(len(content))
            result += content
        if self._read_external and external:
            weights = self._read_external(external)
            result += encode_varint(_RAW_DATA << 3 | 2) + encode_varint(len(weights)) + weights
        return result


def _iterate_fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yields number, wire type and content of each field of a message.

    Raises:
        LookupError: if it is damaged.
    """
    at, end = 0, len(message)
    while at < end:
        tag, start = _decode_varint(message, at)
        field, wire = tag >> 3, tag & 7
        if tag >= 1 << 32 or not field:  # a reader may truncate it and read another field
            raise IndexError
        if wire == 2:
            size, start = _decode_varint(message, start)
            at = start + size
        else:
            at = _decode_varint(message, start)[1] if wire == 0 else start + _FIXED_SIZES[wire]
        if at > end:
            raise IndexError
        yield field, wire, message[start:at]


def _read_entry(message: memoryview) -> dict[str, str]:
    """Returns key and value of an entry that locates the external data of a tensor.

    Raises:
        LookupError: if it is damaged.
    """
    texts = ["", ""]
    for field, wire, content in _iterate_fields(message):
        if field > len(texts) or wire != 2:
            raise IndexError
        _require_utf8(content)
        texts[field - 1] = str(content, "utf-8")
    return {texts[0]: texts[1]}


def _require_utf8(content: memoryview) -> None:
    try:
        str(content, "utf-8")
    except UnicodeDecodeError:
        raise IndexError from None


_FIXED_SIZES = {1: 8, 5: 4}  # bytes of a field, by its wire type


def rebuild_model(
    path: Path, content: bytes, *, limited: bool = True, read_external: _ReadExternal | None = None
) -> bytes:
    """Returns an ONNX model rebuilt from the checked parts of a file, for `LimitedSession`.

    It has only ONNX's standard operators, contains its weights, and nothing that is not needed for
    computing. A file in another format, such as ONNX Runtime's own, which cannot be checked in this
    way, is refused.

    Args:
        path: of the file, for messages.
        content: of the file.
        limited: whether the number of nodes and other parts is limited.
        read_external: returns the bytes of a tensor in another file, by the entries that locate it:
            `location`, and optionally `offset` and `length`. A ValueError refuses them; its text is
            a verb with an object. By default such tensors are refused.
    """
    if content[4:8] == b"ORTM":
        raise ValueError(
            f"{path} is in the format of ONNX Runtime, which cannot be checked; save it as ONNX."
        )
    try:
        model = _ModelRebuilder(limited, read_external).copy("model", memoryview(content))
    except LookupError:
        raise ValueError(f"{path} is damaged; export the policy again.") from None
    except ValueError as error:
        raise ValueError(
            f"{path} {error}, which is refused: a policy may have only ONNX's standard operators "
            "on numbers, and its weights in the file. Export it again without."
        ) from None
    return bytes(model)


def _decode_varint(message: memoryview, at: int) -> tuple[int, int]:
    """Returns a number of variable length, at most ten bytes, and its end."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError


def encode_varint(value: int) -> bytes:
    """Returns the shortest encoding of a non-negative number that `_decode_varint` reads."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


# -- limits of time and memory --------------------------------------------------------------------

_MEMORY = 1 << 30  # bytes between operators, of all limited models of a process together
CALL_SECONDS = 30.0  # of one call
_TRIAL_ROWS, _TRIAL_MEMORY = 16, 400_000_000
_TRIAL_SECONDS = 1.0, 1e-7  # CPU time: base, and per byte of the model
_TRIAL_WAIT = 120.0  # seconds of wall-clock time, for busy machines


class LimitedSession:
    """A session of ONNX Runtime for one model, with limits of time and memory.

    A model from an untrusted source can need any amount of time and memory, whatever its size. It
    is first loaded and run on 16 rows in a separate process, which ends if that takes too much. In
    this process its operators share 1 GiB with those of all other limited models. A call that takes
    30 seconds ends between two operators, and the model is then stopped permanently.

    Attributes:
        session: the `onnxruntime.InferenceSession`.

    Args:
        source: the name of the model in messages.
        model: from `rebuild_model`.
        threads: the number of threads per call.
        limited: whether there are limits. Models that you trust need no limits.
        trial_model: a larger model that contains this one, to be tried instead of it.
        providers: see `OnnxPolicy`.

    Raises:
        ValueError: if it cannot be loaded or needs too much, or a provider is missing.
    """

    def __init__(
        self,
        source: str,
        model: bytes,
        threads: int = 1,
        *,
        limited: bool = True,
        trial_model: bytes = b"",
        providers: Sequence[str] | None = None,
    ) -> None:
        providers = require_providers([_CPU] if providers is None else providers)
        self._source, self._limited = source, limited
        self._options, self._is_late = onnxruntime.RunOptions(), False
        if limited:
            _run_trial(source, trial_model or model)
        try:
            self.session = _open_session(model, threads, limited, providers)
        except Exception as error:  # ONNX Runtime's errors have no public class
            raise ValueError(f"{source} cannot be loaded: {error!s:.500}") from error
        if _CPU not in providers and self.session.get_providers()[0] != providers[0]:
            raise ValueError(
                f"{source} cannot run by {providers[0]}: ONNX Runtime has it but could not start "
                "it. Check the driver and the CUDA libraries, or run it on the CPU."
            )

    def run(
        self,
        names: Sequence[str],
        feed: Mapping[str, np.ndarray],
        options: onnxruntime.RunOptions | None = None,
    ) -> list[np.ndarray]:
        """Returns outputs by name.

        Args:
            names: of the outputs.
            feed: all inputs by name.
            options: of this call, by which the caller can end it; then its time is not limited
                here.
        """
        is_timed = self._limited and options is None
        if is_timed:
            CALL_CLOCK.start(self.stop)
        try:
            return self.session.run(names, feed, options or self._options)
        except Exception as error:
            advice = "; give it fewer rows at once" + _UNLIMITED
            if self._is_late:
                reason = f"a call did not end in {CALL_SECONDS:.3g} seconds, and it is stopped"
            elif self._limited and _is_memory_error(error):
                reason = f"a call needs more than the {_MEMORY >> 20} MiB that all models share"
            else:
                raise
            raise ValueError(f"{self._source} takes too much: {reason}{advice}") from error
        finally:
            if is_timed:
                CALL_CLOCK.stop()

    def stop(self) -> None:
        """Ends calls in other threads, between two operators, and prevents further ones."""
        self._is_late = True
        self._options.terminate = True


_UNLIMITED = (
    ", or set limited=False (of import_policy: model_work_limit=math.inf) if you trust its source."
)


class CallClock:
    """Stops models whose calls take longer than `CALL_SECONDS`, from a background thread."""

    def __init__(self) -> None:
        self._due: dict[int, tuple[float, Callable[[], None]]] = {}  # by the thread of the call
        self._process = 0  # the ID of the process with the thread, which may be forked

    def start(self, stop: Callable[[], None]) -> None:
        """Starts the time limit of a call in this thread; `stop` is called when it is exceeded."""
        if self._process != os.getpid():
            self._process, self._due = os.getpid(), {}
            threading.Thread(target=self._watch, daemon=True).start()
        self._due[threading.get_ident()] = time.monotonic() + CALL_SECONDS, stop

    def stop(self) -> None:
        """Ends the time limit of this thread's call."""
        self._due.pop(threading.get_ident(), None)

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, CALL_SECONDS / 4))
            for due, stop in list(self._due.values()):
                if time.monotonic() > due:
                    stop()


CALL_CLOCK = CallClock()


def _is_memory_error(error: BaseException) -> bool:
    words = ("Available memory of", "bad_alloc", "bad allocation", "Failed to allocate memory")
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in words)


@functools.cache
def _share_memory() -> None:
    """Registers the shared memory of limited models, once per process."""
    arena = onnxruntime.OrtArenaCfg({"max_mem": _MEMORY, "arena_extend_strategy": 1})
    kinds = onnxruntime.OrtAllocatorType, onnxruntime.OrtMemType
    place = onnxruntime.OrtMemoryInfo("Cpu", kinds[0].ORT_ARENA_ALLOCATOR, 0, kinds[1].DEFAULT)
    with contextlib.suppress(RuntimeError):  # older versions refuse a second one: it is shared
        onnxruntime.create_and_register_allocator(place, arena)


def _open_session(
    model: bytes, threads: int, limited: bool, providers: Sequence[str] = (_CPU,)
) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised anyway
    options.add_session_config_entry("session.load_model_format", "ONNX")
    skipped = []
    if limited:
        _share_memory()
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        skipped = ["ConstantFolding"]  # it computes while loading, which cannot be interrupted
    return onnxruntime.InferenceSession(
        model, options, providers=[*providers], disabled_optimizers=skipped
    )


_LOADED, _REFUSED, _TOO_LARGE = 0, 3, 4  # exit codes of a trial
_START_TRIAL = """
import runpy, sys
file, seconds, memory, *sys.path[:] = sys.argv[1:]
runpy.run_path(file)["_try"](float(seconds), int(memory))
"""
_passed_trials: set[bytes] = set()  # the hashes of models that passed their trial in this process


def _run_trial(source: str, model: bytes) -> None:
    """Loads and runs a model in a separate process with limits."""
    digest = hashlib.sha256(model).digest()
    if digest in _passed_trials:
        return
    seconds = _TRIAL_SECONDS[0] + _TRIAL_SECONDS[1] * len(model)
    memory = _TRIAL_MEMORY + 4 * len(model)
    is_python = sys.executable and not getattr(sys, "frozen", False)
    if not is_python or not Path(__file__).is_file():  # for example in a zip, or in exec()
        raise ValueError(f"{source} cannot be tried in another process{_UNLIMITED}")
    limits, path = [str(seconds), str(memory)], [*filter(None, sys.path)]
    command = [sys.executable, "-I", "-c", _START_TRIAL, __file__, *limits, *path]
    try:
        trial = subprocess.run(
            command, input=model, capture_output=True, timeout=_TRIAL_WAIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{source} takes too much time{_UNLIMITED}") from None
    output = trial.stdout.decode(errors="replace").strip()
    if trial.returncode == _LOADED:
        _passed_trials.add(digest)
        return
    if trial.returncode == _REFUSED:
        raise ValueError(f"{source} cannot be loaded: {output:.500}")
    if trial.returncode in (_TOO_LARGE, -getattr(signal, "SIGPROF", 0)):
        limit = f"than {seconds:.3g} s of CPU time or {memory >> 20} MiB"
        raise ValueError(
            f"{source} takes too much for {_TRIAL_ROWS} rows: more {limit}{_UNLIMITED}"
        )
    output = (output or trial.stderr.decode(errors="replace").strip())[-300:]
    raise ValueError(
        f"{source} is refused: the process that tried it ended with {trial.returncode}. {output}"
    )


def _try(seconds: float, memory: int) -> None:
    """Loads and runs the model from the standard input, within limits, and ends this process."""
    model, output_descriptor = sys.stdin.buffer.read(), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # hide the output of ONNX Runtime
    _limit_process(seconds, memory)
    status, text = _LOADED, ""
    try:
        session = _open_session(model, 1, limited=True)
        try:
            session.run(None, {port.name: _make_trial_input(port) for port in session.get_inputs()})
        except Exception as error:  # other errors, such as refused inputs, do not matter here
            status = _TOO_LARGE if _is_memory_error(error) else _LOADED
    except Exception as error:
        status, text = (_TOO_LARGE if _is_memory_error(error) else _REFUSED), str(error)
    os.write(output_descriptor, text[:2000].encode(errors="replace"))
    os._exit(status)


def _make_trial_input(port: onnxruntime.NodeArg) -> np.ndarray:
    sizes = [size if isinstance(size, int) else 1 for size in port.shape]
    if sizes and not isinstance(port.shape[0], int):
        sizes[0] = _TRIAL_ROWS
    kind = port.type[len("tensor(") : -1]
    return np.ones(sizes, {"float": "float32", "double": "float64"}.get(kind, kind))


def _limit_process(seconds: float, memory: int) -> None:
    """Limits the CPU time and the memory of this process from now on."""
    try:
        import resource
    except ImportError:  # Windows: only the parent's time limit applies
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process, in C++ too
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + memory,) * 2)


def _pick(obs: Any, path: Sequence[str]) -> Any:
    for key in path:
        obs = obs[key] if isinstance(obs, Mapping) else obs[int(key)]
    return obs


class PlayResult(NamedTuple):
    """The returns and lengths of episodes, by their numbers."""

    returns: list[float]
    lengths: list[int]
    seconds: float


_StepRequest = tuple[Any, np.random.Generator, dict[str, np.ndarray]]
_StepAnswer = tuple[Any, dict[str, np.ndarray]]


def _play_in_env(
    policy: OnnxPolicy,
    env: gym.Env,
    episodes: Sequence[int],
    seed: int,
    finished: dict[int, tuple[float, int]],
) -> Generator[_StepRequest, _StepAnswer, None]:
    """Runs some of the episodes in one environment.

    They are chosen before the first step, and each is run to its end, so that short episodes count
    no more than long ones. Yields an observation, the generator of its noise and the carry into the
    step; receives an action and the carry out of it.

    Args:
        policy: creates the carry.
        env: the environment.
        episodes: their numbers.
        seed: of environments and noise.
        finished: receives return and length of each episode.
    """
    for number in episodes:
        rng = np.random.default_rng([seed, number])
        obs, _ = env.reset(seed=seed + number)
        carry = {name: x[0] for name, x in policy.make_initial_carry(1).items()}
        total, length, is_over = 0.0, 0, False
        while not is_over:
            action, carry = yield obs, rng, carry
            obs, reward, terminated, truncated, _ = env.step(action)
            if _REWARDS in carry:
                carry[_REWARDS][-1] = reward
            total += float(reward)
            length += 1
            is_over = terminated or truncated
        finished[number] = total, length


def play(
    policy: OnnxPolicy,
    env: Any,
    episodes: int,
    *,
    seed: int = 0,
    num_envs: int = 16,
    render: bool = False,
    env_config: Mapping[str, Any] | None = None,
) -> PlayResult:
    """Runs whole episodes in several environments that are stepped together.

    Episode k is reset with `seed + k` and has separate noise, so the result does not depend on
    `num_envs` (except for rounding in batches of another size).

    Args:
        policy: the policy that acts.
        env: a Gymnasium ID, `module:id` to import a module first, `module:Class`, a class or a
            function that creates environments, or a single environment.
        episodes: the number of episodes, at least 1.
        seed: of environments and noise, at least 0.
        num_envs: the maximum number of environments at once; with `render` there is one.
        render: show a window.
        env_config: keywords for a Gymnasium ID. A class or function gets them as keywords, or as a
            dict if its first parameter is called `env_config`, `config`, `context` or
            `env_context`, or is annotated as a dict.
    """
    if episodes < 1 or num_envs < 1 or seed < 0:
        raise ValueError(
            f"episodes and num_envs must be at least 1 and seed at least 0, got {episodes}, "
            f"{num_envs} and {seed}."
        )
    import gymnasium as gym

    count = 1 if render or isinstance(env, gym.Env) else min(num_envs, episodes)
    started = time.perf_counter()
    config = {**(env_config or {}), **({"render_mode": "human"} if render else {})}
    envs = [make_env(env, config) for _ in range(count)]
    finished: dict[int, tuple[float, int]] = {}
    try:
        shares = [range(i, episodes, count) for i in range(count)]
        pairs = zip(envs, shares, strict=True)
        _play_all(policy, [_play_in_env(policy, *pair, seed, finished) for pair in pairs])
    finally:
        for created in envs:
            created.close()
    returns, lengths = zip(*(finished[number] for number in range(episodes)), strict=True)
    return PlayResult(list(returns), list(lengths), time.perf_counter() - started)


def make_env(env: Any, env_config: Mapping[str, Any]) -> gym.Env:
    """Creates an environment from an `env` argument of `play`.

    Raises:
        ValueError: if it has several agents.
    """
    import gymnasium as gym

    if isinstance(env, gym.Env):
        return env
    if not isinstance(env, str):
        return _call_factory(env, dict(env_config))
    dotted = ":" not in env and "/" not in env and env not in gym.registry
    module, _, name = env.rpartition("." if dotted else ":")
    if module in ("pettingzoo", "mpe2"):
        raise ValueError(_SEVERAL_AGENTS.format(env))
    create = getattr(importlib.import_module(module), name, None) if module else None
    created = (
        gym.make(env, **env_config) if create is None else _call_factory(create, dict(env_config))
    )
    is_pettingzoo = not isinstance(created, gym.Env) and hasattr(created, "possible_agents")
    if is_pettingzoo or hasattr(created, "get_agent_ids"):
        created.close()
        raise ValueError(_SEVERAL_AGENTS.format(env))
    return created


_SEVERAL_AGENTS = (
    "an exported policy plays environments with one agent, but {} has several. Play with the "
    "policies of the run, `tfpolicies evaluate RUN`, or write your own loop that calls "
    "OnnxPolicy(FILE).act(observation)."
)
_CONFIG_NAMES = ("config", "env_config", "context", "env_context")
_CONFIG_ANNOTATION = re.compile(r"(Optional\[)?(\w+\.)*(dict|Dict|(Mutable)?Mapping|\w*Context)\b")


def _call_factory(create: Callable[..., Any], config: dict[str, Any]) -> Any:
    """Calls an environment factory with its settings, by its signature as in training.

    Its first parameter gets all of them if its name or annotation says so; else they are keywords;
    else all go to the only required parameter.
    """
    try:
        signature = inspect.signature(create)
    except (TypeError, ValueError):  # the signature is unknown
        return create(config)
    kinds = inspect.Parameter
    any_number = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    parameters = [p for p in signature.parameters.values() if p.kind not in any_number]
    first = next((p for p in parameters if p.kind != kinds.KEYWORD_ONLY), None)
    if first is not None:
        annotation = first.annotation
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        if first.name in _CONFIG_NAMES or any(
            _CONFIG_ANNOTATION.match(x.strip()) for x in text.split("|")
        ):
            return create(config)
    try:
        signature.bind(**config)
    except TypeError as error:
        required = [p for p in parameters if p.default is p.empty]
        if required == [first] and not {p.name for p in parameters} & set(config):
            return create(config)
        name = getattr(create, "__name__", create)
        raise ValueError(
            f"{name}{signature} cannot be called with env_config={config!r}: {error}. Give the "
            "names of its parameters as keys."
        ) from error
    return create(**config)


def _play_all(
    policy: OnnxPolicy, env_loops: Sequence[Generator[_StepRequest, _StepAnswer, None]]
) -> None:
    requests = {env_loop: next(env_loop) for env_loop in env_loops}
    while requests:
        observations, rngs, carries = zip(*requests.values(), strict=True)
        noise = None
        if policy.sample:
            noise = np.concatenate([policy.draw_noise(rng, 1) for rng in rngs])
        carry = {name: np.stack([x[name] for x in carries]) for name in carries[0]}
        batch = policy.stack_observations(observations)
        outputs = policy.run(batch, noise, carry)
        leaves, next_carry = (
            policy.get_env_actions(outputs),
            policy.update_carry(outputs, batch, carry),
        )
        for i, env_loop in enumerate([*requests]):
            action = policy.nest_action([leaf[i] for leaf in leaves])
            try:
                requests[env_loop] = env_loop.send(
                    (action, {name: x[i] for name, x in next_carry.items()})
                )
            except StopIteration:
                del requests[env_loop]


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plays an exported policy with ONNX Runtime.")
    parser.add_argument("--env", required=True, help="Gymnasium id, module:id or module:Class")
    parser.add_argument("--env-config", type=json.loads, default={}, help="its settings, as JSON")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-envs", type=int, default=16, help="maximum stepped together")
    parser.add_argument("--sample", action="store_true", help="draw actions instead of the best")
    parser.add_argument("--render", action="store_true", help="show a window; one environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--model", default=None, help="model.onnx or its folder; default: here")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where it computes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs episodes as the command line says and prints the mean return; returns 0."""
    options = _parse_arguments(argv)
    try:
        providers = get_providers(options.device)
    except ValueError as error:
        sys.exit(f"--device {options.device}: {error}")
    path = options.model or Path(__file__).parent
    policy = OnnxPolicy(path, sample=options.sample, providers=providers)
    if ":" in options.env and "" not in sys.path:  # isolated interpreters do not search here
        sys.path.append(str(Path.cwd()))
    setting_names = ("seed", "num_envs", "render", "env_config")
    settings = {name: getattr(options, name) for name in setting_names}
    result = play(policy, options.env, options.episodes, **settings)
    loaded = [name for name in NOT_NEEDED if name in sys.modules]
    returns, steps = result.returns, sum(result.lengths)
    mean, std = float(np.mean(returns)), float(np.std(returns))
    if options.json:
        reported_options = {
            name: getattr(options, name) for name in ("env", "episodes", "seed", "sample")
        }
        report = {
            **reported_options,
            "model": policy.file.name,
            "mean_return": mean,
            "std_return": std,
            "min_return": min(returns),
            "max_return": max(returns),
            **result._asdict(),
            "steps": steps,
            "loaded": loaded,
        }
        print(json.dumps(report))
        return 0
    print(
        f"played {options.env} with {policy.file.name} through ONNX Runtime "
        f"{onnxruntime.__version__}: {steps} steps in {result.seconds:.1f} s"
    )
    print(f"loaded in this process: {', '.join(loaded) or 'neither tensorflow nor tfpolicies'}")
    print(
        f"mean return {mean:.1f} +- {std:.1f} over {options.episodes} episodes "
        f"(min {min(returns):g}, max {max(returns):g})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
