"""Feeds damaged and hostile files to the readers, and counts what comes of it.

    python -m soak.fuzz_files --count 4000 --seed 0

Each file must either be loaded, weights in the right places and of the right shapes, or be refused
with the package's own error. Anything else is listed: another exception, a file that took more than
two seconds, an attempt to run or unpickle something. Peak memory is printed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import marshal
import random
import resource
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np

from tfpolicies.errors import ModelImportError
from tfpolicies.models.weight_mapping import match_weights
from tfpolicies.storage.keras_h5 import read_keras_weights

KINDS = ("keras3 weights", "keras3 archive", "keras2 weights", "keras2 model")
SLOW = 2.0  # seconds
_FORBIDDEN = (
    "exec",
    "compile",
    "marshal",
    "pickle",
    "os.system",
    "os.exec",
    "subprocess",
    "socket",
)


class FuzzResult(NamedTuple):
    """What became of the files."""

    loaded: int  # read, and every weight mapped
    refused: int  # a ModelImportError
    other: list[str]  # what must not be, one line each
    slowest: float  # seconds

    def __str__(self) -> str:
        """Returns the counts in one line."""
        return (
            f"loaded right {self.loaded}, refused {self.refused}, other {len(self.other)}, "
            f"slowest {1000 * self.slowest:.0f} ms"
        )


def fuzz_h5(count: int, seed: int, kinds: tuple[str, ...] = KINDS) -> FuzzResult:
    """Reads `count` damaged files of each kind; the same seed makes the same files."""
    loaded, refused, slowest, other = 0, 0, 0.0, []
    with tempfile.TemporaryDirectory() as folder:
        model = sample_model()
        keys = [f"{number}" for number in range(len(model.variables))]
        shapes = {key: tuple(v.shape) for key, v in zip(keys, model.variables, strict=True)}
        images = {kind: sample_file(model, kind, Path(folder)) for kind in kinds}
        path = Path(folder) / "damaged"
        for kind in kinds:
            path.write_bytes(images[kind])  # sound: loads, and imports what zipfile imports late
            match_weights(read_keras_weights(path), model, keys, path)
            for number in range(count):
                rng = random.Random(f"{seed} {kind} {number}")
                path.write_bytes(_mutated(images[kind], rng))
                start, seen = time.perf_counter(), ""
                try:
                    with nothing_runs() as events:
                        mapping = match_weights(read_keras_weights(path), model, keys, path)
                    if all(a.shape == shapes[key] for key, a in mapping.arrays.items()):
                        loaded += 1
                    else:
                        seen = "wrong shapes"
                except ModelImportError:
                    refused += 1
                except BaseException as error:
                    seen = repr(error)
                    if isinstance(error, KeyboardInterrupt):
                        raise
                took = time.perf_counter() - start
                slowest = max(slowest, took)
                seen = seen or (f"{took:.1f} s" if took > SLOW else "") or " ".join(events)
                if seen:
                    other.append(f"{kind} {number}: {seen}")
    return FuzzResult(loaded, refused, other, slowest)


def sample_model() -> keras.Model:
    """Returns a small model with a cell, moving statistics, seeds and layers in layers."""
    inputs = keras.Input((5, 4))
    hidden = keras.layers.LSTM(3)(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.1)], name="inner")
    return keras.Model(inputs, keras.layers.Dense(2, name="logits")(inner(hidden)))


def sample_file(model: keras.Model, kind: str, folder: Path) -> bytes:
    """Returns the bytes of a file of that kind with the weights of `model`."""
    if kind == "keras3 weights":
        path = folder / "sample.weights.h5"
        model.save_weights(path)
    elif kind == "keras3 archive":
        path = folder / "sample.keras"
        model.save(path)
    else:
        path = folder / "sample.h5"
        write_keras2(path, model, whole=kind == "keras2 model")
    return path.read_bytes()


def write_keras2(path: Path, model: keras.Model, *, whole: bool) -> None:
    """Writes a file as Keras 2 does; a whole model has a config with a Lambda that raises."""
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = b"2.15.0"
        file.attrs["backend"] = b"tensorflow"
        group = file
        if whole:
            file.attrs["model_config"] = json.dumps(_config_with_lambda()).encode()
            slots = file.create_group("optimizer_weights")
            slots.create_dataset("Adam/iter:0", data=np.int64(7))
            slots.attrs["weight_names"] = np.asarray([b"Adam/iter:0"])
            group = file.create_group("model_weights")
        layers = [layer for layer in model.layers if layer.weights]
        group.attrs["layer_names"] = np.asarray([layer.name.encode() for layer in model.layers])
        for layer in model.layers:
            part = group.create_group(layer.name)
            names = [f"{_keras2_scope(layer, v)}/{v.name}:0" for v in layer.weights]
            part.attrs["weight_names"] = np.asarray([name.encode() for name in names])
            for name, variable in zip(names, layer.weights if layer in layers else (), strict=True):
                part.create_dataset(name, data=np.asarray(variable))


def _keras2_scope(layer: keras.layers.Layer, variable: Any) -> str:
    scopes = variable.path.split("/")[:-1]
    if isinstance(layer, keras.Model):
        return scopes[-1]
    return "/".join(scopes[scopes.index(layer.name) :])


def _config_with_lambda() -> dict[str, Any]:
    code = compile("raise SystemExit('code of the file was run')", "file", "exec")
    function = [base64.b64encode(marshal.dumps(code)).decode(), None, None]
    config = {"name": "lambda", "function": function, "function_type": "lambda"}
    layers = [{"class_name": "Lambda", "config": config}]
    return {"class_name": "Sequential", "config": {"name": "sequential", "layers": layers}}


# Damage -------------------------------------------------------------------------------------------


def _mutated(image: bytes, rng: random.Random) -> bytes:
    if image.startswith(b"PK") and rng.random() < 0.7:  # a sound zip around damaged parts
        return _mutated_parts(image, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        image = rng.choice(_DAMAGES)(image, rng)
    return image


def _mutated_parts(image: bytes, rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(image)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            part = old.read(info)
            if info.filename == rng.choice(("config.json", "model.weights.h5", "model.weights.h5")):
                part = _mutated(part, rng)
            new.writestr(
                info.filename, part, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            )
    return buffer.getvalue()


def _flip(image: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(image)
    for _ in range(rng.choice((1, 2, 8, 64))):
        if damaged:
            damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 255, rng.randrange(256)))
    return bytes(damaged)


def _truncate(image: bytes, rng: random.Random) -> bytes:
    return image[: rng.randrange(len(image) + 1)]


def _number(image: bytes, rng: random.Random) -> bytes:
    """Overwrites an aligned field, as addresses and lengths are, with a telling number."""
    at = 8 * rng.randrange(len(image) // 8 + 1)
    number = rng.choice(
        (
            0,
            2**64 - 1,
            1 << rng.randrange(64),
            rng.randrange(len(image) + 8),
            8 * rng.randrange(999),
        )
    )
    return image[:at] + number.to_bytes(8, "little") + image[at + 8 :]


def _splice(image: bytes, rng: random.Random) -> bytes:
    size = rng.randrange(1, 600)
    to, source = rng.randrange(len(image) + 1), rng.randrange(len(image) + 1)
    return image[:to] + image[source : source + size] + image[to + size :]


def _shift(image: bytes, rng: random.Random) -> bytes:
    at, size = rng.randrange(len(image) + 1), rng.randrange(1, 64)
    if rng.random() < 0.5:
        return image[:at] + image[at + size :]
    return image[:at] + rng.randbytes(size) + image[at:]


_DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_flip, _flip, _number, _number),
    *(_truncate, _splice, _shift),
)


# Watching -----------------------------------------------------------------------------------------

_watchers: list[list[str]] = []


def _audit(event: str, _: tuple) -> None:
    if _watchers and event.startswith(_FORBIDDEN):
        _watchers[-1].append(event)


@contextlib.contextmanager
def nothing_runs() -> Iterator[list[str]]:
    """Collects the audit events of running, unpickling or connecting; an audit hook stays on."""
    if not hasattr(sys, "_tfpolicies_audit"):
        sys._tfpolicies_audit = True  # type: ignore[attr-defined]
        sys.addaudithook(_audit)
    events: list[str] = []
    _watchers.append(events)
    try:
        yield events
    finally:
        _watchers.pop()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="damaged files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    worst = 0
    for kind in KINDS:
        result = fuzz_h5(arguments.count, arguments.seed, (kind,))
        print(f"{kind}: {result}")
        print(*result.other, sep="\n", end="\n" if result.other else "")
        worst += len(result.other)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory {after / 1024:.0f} MiB, {(after - before) / 1024:.0f} MiB more than before")
    sys.exit(1 if worst else 0)


if __name__ == "__main__":
    main()
