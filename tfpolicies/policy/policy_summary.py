"""The text of `TFPolicy.summary`: networks, parameters, memory, and what acts and learns where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.models.spaces import describe_space
from tfpolicies.program.policy_state import NetworkParts, Slot

_RUNTIME_NAMES = {"onnx": "ONNX Runtime", "tf": "TensorFlow", None: "TensorFlow"}
_UNITS = ("B", "KB", "MB", "GB")
_MAX_IDS_SHOWN = 8  # ids of policies with the same networks
_INDENT = 2  # spaces for each level of nested layers


def format_summary(policy: Any, name: str = "") -> list[str]:
    """Returns the lines of a policy's summary.

    Args:
        policy: a `TFPolicy`.
        name: the id of the policy, or several; "" if it has none.
    """
    title = f"{type(policy).__name__} {name}".rstrip()
    facts = {
        "observations": describe_space(policy.observation_space),
        "actions": f"{describe_space(policy.action_space)} from {_describe_distribution(policy)}",
        "acts": _describe_acting(policy),
        "learns": _describe_learning(policy),
        "memory": _describe_memory(policy),
    }
    width = max(map(len, facts)) + 2
    lines = [f"Policy: {title}", *(f"  {key:<{width}}{text}" for key, text in facts.items())]
    lines += ["", *_format_table(_NETWORK_HEADER, list(_iterate_networks(policy)))]
    for network_name, network in policy.program.functions.networks.items():
        rows = list(_iterate_layers(network.model))
        if rows:
            lines += ["", f"Layers of {network_name!r}:", *_format_table(_LAYER_HEADER, rows)]
    return lines


def format_policies(policies: Mapping[str, Any]) -> list[str]:
    """Returns the lines about several policies; those with the same networks are described once.

    Args:
        policies: by id.
    """
    groups: dict[object, list[str]] = {}
    for policy_id, policy in policies.items():
        program = getattr(policy, "program", None)
        groups.setdefault(policy_id if program is None else (type(policy), program), []).append(
            policy_id
        )
    lines: list[str] = []
    for ids in groups.values():
        policy = policies[ids[0]]
        more = f" and {len(ids) - _MAX_IDS_SHOWN} more" if len(ids) > _MAX_IDS_SHOWN else ""
        name = f"{', '.join(map(repr, ids[:_MAX_IDS_SHOWN]))}{more}"
        is_custom = not hasattr(policy, "program")
        text = [f"Policy: {type(policy).__name__} {name}"]
        lines += ["", *(text if is_custom else format_summary(policy, name))]
    return lines


_NETWORK_HEADER = ("Network", "Parameters", "Trainable", "Target copy", "Optimizer", "Rate")
_LAYER_HEADER = ("Layer (type)", "Output shape", "Parameters")


def _iterate_networks(policy: Any) -> Iterator[tuple[str, ...]]:
    functions, layout = policy.program.functions, policy.program.layout
    optimizers = functions.optimizers.class_names
    unset = policy.program.spec.get_unset_rates(policy.config)
    total = 0
    for name, network in functions.networks.items():
        parts = NetworkParts.for_network(name)
        count = _count(layout.get_weight_slots(parts.part))
        total += count
        trainable = sum(math.prod(v.shape) for v in network.model.trainable_variables)
        rate = "lr" if network.plan.lr in unset else network.plan.lr
        has_optimizer = name in optimizers
        yield (
            f"{name} (acts)" if name == "model" else name,
            f"{count:,}",
            f"{trainable:,}",
            "yes" if parts.target in layout.targets else "no",
            ", ".join(optimizers.get(name, ["none"])),
            f"{rate}={policy.get_hyperparameter(rate):g}" if has_optimizer else "",
        )
    if len(functions.networks) > 1:
        yield ("together", f"{total:,}", "", "", "", "")


def _count(slots: Sequence[Slot]) -> int:
    return sum(math.prod(slot.shape) for slot in slots)


def _iterate_layers(model: Any, level: int = 0) -> Iterator[tuple[str, ...]]:
    """Yields name, output shape and number of parameters of each layer, outer layers first."""
    for layer in getattr(model, "layers", ()):
        inner = [*_iterate_layers(layer, level + 1)]
        count = "" if inner else f"{layer.count_params():,}"
        name = f"{' ' * _INDENT * level}{layer.name} ({type(layer).__name__})"
        yield (name, _describe_output(layer), count)
        yield from inner


def _describe_output(layer: Any) -> str:
    try:
        output = layer.output
    except (AttributeError, ValueError):  # it was called several times, or in a subclassed model
        return ""
    shape = getattr(output, "shape", None)
    return "" if shape is None else str(tuple(shape))


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns columns: text to the left, numbers to the right."""
    cells = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    is_number = [
        all(row[i][:1].isdigit() or not row[i] for row in rows) for i in range(len(header))
    ]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    ]
    rule = "  ".join("-" * width for width in widths)
    return [f"  {line}" for line in (lines[0], rule, *lines[1:])]


def _describe_distribution(policy: Any) -> str:
    dist_class: Any = policy.dist_class
    classes = getattr(dist_class, "leaf_classes", (dist_class,))
    return ", ".join(dict.fromkeys(leaf_class.__name__ for leaf_class in classes))


def _describe_acting(policy: Any) -> str:
    inference = policy.driver.acting.inference
    runtime = _RUNTIME_NAMES.get(inference, inference)
    device = "/cpu:0" if inference == "onnx" else policy.program.functions.acting_device
    return f"through {runtime} on {device}"


def _describe_learning(policy: Any) -> str:
    if policy.driver.is_frozen:
        return "not: the policy is frozen"
    learning = policy.driver.learning
    if not learning.learns:
        return "not: it has no loss"
    updates = policy.num_grad_updates
    count = f"{updates:,} update{'' if updates == 1 else 's'} so far"
    return f"through {learning.compile_mode} on {', '.join(policy.devices)}; {count}"


def _describe_memory(policy: Any) -> str:
    layout = policy.program.layout
    parts = {
        "weights": (*layout.networks, "filter"),
        "target copies": layout.targets,
        "optimizers": layout.optimizers,
    }
    sizes = {
        label: sum(
            math.prod(slot.shape) * np.dtype(slot.dtype).itemsize
            for slot in layout.get_slots(*names)
        )
        for label, names in parts.items()
    }
    texts = [f"{label} {_format_bytes(size)}" for label, size in sizes.items() if size]
    return f"{_format_bytes(layout.num_bytes)} ({', '.join(texts)})"


def _format_bytes(size: float) -> str:
    """Returns a size in bytes for display.

    >>> _format_bytes(1536), _format_bytes(12)
    ('1.5 KB', '12 B')
    """
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"
