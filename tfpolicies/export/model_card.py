"""Model cards of exports: the facts of a trained policy, for `policy_spec.json` and for readers.

`MODEL_CARD.md` is written from `policy_spec.json`, so the two do not differ. Facts that are not
known are left out. Does not need TensorFlow.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tfpolicies.base.type_aliases import Json
from tfpolicies.export.spec_file import SPEC_FILE, read_spec
from tfpolicies.storage.spaces_json import decode_space
from tfpolicies.system.atomic import write_atomically

CARD_FILE = "MODEL_CARD.md"

_OMITTED_SETTINGS = {
    *("input_", "input_config", "output", "output_config", "logger_creator", "log_level"),
    *("extra_python_environs_for_driver", "extra_python_environs_for_worker"),
    *("inference", "jit_compile"),
}
"""Settings of files, variables, logs and speed on a machine, which learning does not depend on."""

_MAX_SPACE_TEXT = 300  # characters


@dataclass(frozen=True, kw_only=True)
class ReturnFigure:
    """A mean return of episodes.

    Attributes:
        mean_return: the mean of their undiscounted returns.
        episodes: their number; None if unknown.
        explores: whether actions were sampled, or else greedy; None if unknown.
    """

    mean_return: float
    episodes: int | None = None
    explores: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Facts of a trained policy; None where unknown.

    Attributes:
        policy_id: in its algorithm.
        algorithm: its name.
        environment: its name.
        seed: of all random numbers of the training.
        env_steps: environment steps of the training.
        gradient_updates: minibatch updates of the policy.
        training: the mean return of the newest training episodes.
        evaluation: the mean return of the newest evaluation.
        commit: that was checked out in the folder in which the training was started, or else in
            that of the export.
        versions: of the packages of the training.
        settings: those that differ from the algorithm's defaults, as JSON values.
    """

    policy_id: str | None = None
    algorithm: str | None = None
    environment: str | None = None
    seed: int | None = None
    env_steps: int | None = None
    gradient_updates: int | None = None
    training: ReturnFigure | None = None
    evaluation: ReturnFigure | None = None
    commit: str | None = None
    versions: Mapping[str, str] | None = None
    settings: Mapping[str, Json] | None = field(default=None)

    def fill_in(self, other: ModelCard) -> ModelCard:
        """Returns this card; facts that are unknown here are those of another card."""
        unknown = [x.name for x in fields(self) if getattr(self, x.name) is None]
        return replace(self, **{name: getattr(other, name) for name in unknown})

    def to_json(self) -> dict[str, Json]:
        """Returns the known facts as JSON values, without settings and paths of a machine."""
        record: dict[str, Any] = {x.name: getattr(self, x.name) for x in fields(self)}
        for name in ("training", "evaluation"):
            if record[name] is not None:
                record[name] = _drop_unknown(vars(record[name]))
        if self.settings is not None:
            public = {k: x for k, x in self.settings.items() if k not in _OMITTED_SETTINGS}
            record["settings"] = _make_public(public)
        return _drop_unknown(record)


def _drop_unknown(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}


def _make_public(value: Any) -> Any:
    """Returns JSON values for readers: paths without folders, and infinity as a text."""
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return value["$float"]
        return {name: _make_public(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_make_public(x) for x in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value


_FACTS: ContextVar[ModelCard | None] = ContextVar("card_facts", default=None)


@contextlib.contextmanager
def export_facts(card: ModelCard) -> Iterator[None]:
    """Adds facts to the cards of all exports in the block.

    A policy does not know the run that trained it. Callers that do cannot pass a card to
    `export_model`, since policy classes may override it with fewer arguments.
    """
    token = _FACTS.set(card)
    try:
        yield
    finally:
        _FACTS.reset(token)


def get_export_facts() -> ModelCard:
    """Returns the facts that `export_facts` added; an empty card outside of it."""
    return _FACTS.get() or ModelCard()


def make_card_entry(card: ModelCard) -> dict[str, Json]:
    """Returns the entry `card` of `policy_spec.json`, with the date of the export."""
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return {**card.to_json(), "exported": today.isoformat()}


def add_evaluation(folder: Path, figure: ReturnFigure) -> None:
    """Records an evaluation of an export in its spec and its card."""
    spec = read_spec(folder / SPEC_FILE)
    spec["card"] = {**spec.get("card", {}), "evaluation": _drop_unknown(vars(figure))}
    write_atomically(folder / SPEC_FILE, format_spec(spec).encode())
    write_atomically(folder / CARD_FILE, format_card(spec).encode())


def format_spec(spec: Mapping[str, Any]) -> str:
    """Returns the text of `policy_spec.json`."""
    return json.dumps(spec, indent=2) + "\n"


def format_card(spec: Mapping[str, Any]) -> str:
    """Returns the text of `MODEL_CARD.md` for the content of a `policy_spec.json`."""
    card = spec["card"]
    name = card.get("algorithm") or spec["policy_class"]
    environment = card.get("environment")
    lines = [f"# {name} on {environment}" if environment else f"# {name}", ""]
    lines += [
        "A reinforcement-learning policy that tfpolicies exported. Unknown facts are left out."
    ]
    lines += ["", *_make_table(("", ""), _list_facts(spec)), ""]
    lines += ["## Inputs and outputs", "", *_describe_interface(spec), ""]
    if card.get("settings"):
        settings = json.dumps(card["settings"], indent=2)
        lines += ["## Settings", "", "They differ from the defaults of the algorithm:", ""]
        lines += ["```json", settings, "```", ""]
    lines += ["## Limits", "", *(f"- {limit}" for limit in _list_limits(spec))]
    return "\n".join(lines) + "\n"


def _make_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    table = [header, ["---"] * len(header), *escaped]
    return [f"| {' | '.join(row)} |" for row in table]


def _list_facts(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    card = spec["card"]
    versions = {**spec["versions"], **card.get("versions", {})}
    facts = {
        "Algorithm": card.get("algorithm"),
        "Policy class": spec["policy_class"],
        "Policy id": card.get("policy_id"),
        "Environment": card.get("environment"),
        "Environment steps": _format_count(card.get("env_steps")),
        "Gradient updates": _format_count(card.get("gradient_updates")),
        "Seed": card.get("seed"),
        "Mean return in training": _format_figure(card.get("training"), "the newest "),
        "Mean return in evaluation": _format_figure(card.get("evaluation")),
        "Exported": card.get("exported"),
        "Commit": card.get("commit"),
        "Versions": ", ".join(f"{name} {x}" for name, x in sorted(versions.items())),
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _format_count(count: int | None) -> str | None:
    return None if count is None else f"{count:,}"


def _format_figure(figure: Mapping[str, Any] | None, which: str = "") -> str | None:
    if figure is None:
        return None
    text = f"{figure['mean_return']:,.6g}"
    modes = {True: "actions are sampled", False: "actions are greedy"}
    mode = modes.get(figure.get("explores"))  # type: ignore[arg-type]
    if (episodes := figure.get("episodes")) is not None:
        text += f" over {which}{episodes:,} episode{'' if episodes == 1 else 's'}"
    return text if mode is None else f"{text}; {mode}"


def _describe_interface(spec: Mapping[str, Any]) -> list[str]:
    signature = spec["signatures"]["serving_default"]
    rows = [
        (kind[:-1], f"`{port['name']}`", port["dtype"], f"[{', '.join(map(str, port['shape']))}]")
        for kind in ("inputs", "outputs")
        for port in signature[kind]
    ]
    lines = [
        f"- Observations: `{_describe_space(spec['observation_space'])}`",
        f"- Actions: `{_describe_space(spec['action_space'])}`",
        "",
    ]
    return lines + _make_table(("", "name", "dtype", "shape"), rows)


def _describe_space(record: Json) -> str:
    text = " ".join(str(decode_space(record)).split())
    return text if len(text) <= _MAX_SPACE_TEXT else f"{text[:_MAX_SPACE_TEXT]}..."


def _list_limits(spec: Mapping[str, Any]) -> list[str]:
    card, parity = spec["card"], spec["parity"]
    limits = [
        "The file takes observations of the space above only.",
        f"Its outputs were compared with the policy's on {parity['observations']:,} random "
        f"observations: the largest relative difference is {parity['largest_difference']:.1e}.",
    ]
    if spec.get("weights", "float32") != "float32":
        limits.append(f"Its weights are rounded to {spec['weights']}.")
    if "evaluation" not in card:
        limits.append("No evaluation of these weights is recorded.")
    if "training" in card or "evaluation" in card:
        place = f" in {card['environment']}" if "environment" in card else ""
        seed = f", with seed {card['seed']}" if "seed" in card else "; its seed is not recorded"
        limits.append(f"The returns are those of one training{place}{seed}.")
        limits.append("No test in another environment is recorded.")
    return limits
