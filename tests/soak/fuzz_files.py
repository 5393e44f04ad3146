"""Feeds damaged and hostile files to the readers, and counts what comes of it.

    python -m soak.fuzz_files --count 4000 --seed 0

Each file must either be loaded, weights in the right places and of the right shapes, or be refused
with the package's own error. Anything else is listed: another exception, a file that took more than
two seconds, an attempt to run or unpickle something. Peak memory is printed.
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

from helpers.keras_files import KINDS, sample_file, sample_model
from helpers.scripts import parse_options
from soak.attempt import Attempt, Tally, damage_bytes
from tfpolicies.errors import ModelImportError
from tfpolicies.models.weight_mapping import match_weights
from tfpolicies.storage.keras_h5 import read_keras_weights


def fuzz_h5(count: int, seed: int, kinds: tuple[str, ...] = KINDS) -> Tally:
    """Reads `count` damaged files of each kind; the same seed makes the same files."""
    tally, model = Tally(), sample_model()
    keys = [f"{number}" for number in range(len(model.variables))]
    shapes = {key: tuple(v.shape) for key, v in zip(keys, model.variables, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged"

        def load() -> None:
            mapping = match_weights(read_keras_weights(path), model, keys, path)
            if any(array.shape != shapes[key] for key, array in mapping.arrays.items()):
                raise AssertionError("wrong shapes")

        for kind in kinds:
            image = sample_file(model, kind, Path(folder))

            def damage(rng: random.Random, kind: str = kind, image: bytes = image) -> Attempt:
                path.write_bytes(_damage_image(image, rng))
                return Attempt(kind, load)

            path.write_bytes(image)  # sound: loads, and imports what zipfile imports late
            load()
            tally.attack(kind, damage, range(count), seed, refusal=ModelImportError)
    return tally


def _damage_image(image: bytes, rng: random.Random) -> bytes:
    """Damages a file, or one of the parts of a sound archive."""
    if not image.startswith(b"PK") or rng.random() >= 0.7:
        return damage_bytes(image, rng)
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(image)) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            part = old.read(info)
            if info.filename == rng.choice(("config.json", "model.weights.h5", "model.weights.h5")):
                part = _damage_image(part, rng)
            kind = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            new.writestr(info.filename, part, kind)
    return buffer.getvalue()


def main() -> int:
    options = parse_options(__doc__, count=(1000, "damaged files of each kind"), seed=0)
    warnings.simplefilter("ignore")
    tallies = {kind: fuzz_h5(options.count, options.seed, (kind,)) for kind in KINDS}
    for kind, tally in tallies.items():
        print(f"{kind}: {tally}", *tally.other, sep="\n    ")
    return int(any(tally.other for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
