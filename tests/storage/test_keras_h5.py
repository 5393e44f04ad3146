"""Keras files: weights by layer; hostile and damaged files."""

import contextlib
import io
import zipfile

import h5py
import keras
import numpy as np
import pytest

from helpers.hdf5_objects import OBJECTS, add_object
from soak.fuzz_files import KINDS, fuzz_h5, sample_file, sample_model
from tfpolicies.errors import ModelImportError, TfPoliciesError
from tfpolicies.storage.keras_h5 import read_keras_weights

# Keras's own saving does not know NumPy's newer protocol.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One file of each kind, of the same model."""
    folder = tmp_path_factory.mktemp("files")
    model = sample_model()
    paths = {kind: folder / kind.replace(" ", "_") for kind in KINDS}
    for kind, path in paths.items():
        path.write_bytes(sample_file(model, kind, folder))
    return paths


@contextlib.contextmanager
def write_hdf5(path, **options):
    """Gives the group of a layer's weights in a new file."""
    with h5py.File(path, "w", **options) as file:
        yield file.create_group("layers/dense/vars")


def write_names(path, *names, weight="w:0"):
    """Writes layers of one weight, in the format of older versions of Keras."""
    with h5py.File(path, "w") as file:
        for i, name in enumerate(names):
            file.attrs[f"layer_names{i}" if len(names) > 1 else "layer_names"] = [name.encode()]
            file.create_group(name).attrs["weight_names"] = [weight.encode()]
            file[name][weight] = np.float32(1)
    return path


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_the_content_decides_the_kind(files, kind):
    weights = read_keras_weights(files[kind])
    assert weights.kind == kind
    assert sorted(layer.shapes[0] for layer in weights.layers) == [(3,), (3, 4), (4, 2), (4, 12)]
    assert all(w.array.dtype == np.float32 for layer in weights.layers for w in layer.weights)


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS[1:])
def test_layers_come_in_the_order_of_the_model(files, kind):
    names = [layer.name.split("/")[-1] for layer in read_keras_weights(files[kind]).layers]
    kinds = [name.rstrip("_0123456789") for name in names]
    assert kinds == ["lstm_cell", "batch_normalization", "dense", "logits"]


def test_layers_of_one_class_come_by_number_not_by_alphabet(tmp_path):
    layers = [keras.layers.Dense(n, name=f"fc{n}") for n in range(1, 13)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    model.save_weights(tmp_path / "x.weights.h5")
    names = [layer.name for layer in read_keras_weights(tmp_path / "x.weights.h5").layers]
    assert names == [f"fc{n}" for n in range(1, 13)]


def test_many_weights_in_one_group_come_by_number(tmp_path):
    with write_hdf5(tmp_path / "x") as group:
        for i in range(300):  # more than one node of the tree of names
            group[str(i)] = np.full((2,), i, ">f8")
    (layer,) = read_keras_weights(tmp_path / "x").layers
    assert [weight.array[0] for weight in layer.weights] == list(range(300))
    assert layer.weights[0].array.dtype.isnative


def test_a_list_of_names_that_keras_cut_into_pieces_is_joined(tmp_path):
    layers = read_keras_weights(write_names(tmp_path / "x", "one", "two")).layers
    assert [layer.name for layer in layers] == ["one", "two"]


@pytest.mark.core
def test_a_missing_file_is_a_file_not_found_error_of_the_package(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file '.*nowhere") as caught:
        read_keras_weights(tmp_path / "nowhere.h5")
    assert isinstance(caught.value, TfPoliciesError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused(files, kind, tmp_path):
    content = files[kind].read_bytes()
    path = tmp_path / "short"
    for size in (0, 1, 7, 8, 50, 96, 1000, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:size])
        with pytest.raises(ModelImportError, match="short"):
            read_keras_weights(path)


@pytest.mark.core
@pytest.mark.parametrize("name", ["a/" * 33 + "w", "a" * 1025])
def test_names_of_weights_without_end_are_refused(name, tmp_path):
    path = write_names(tmp_path / "x", "one", weight=name)
    with pytest.raises(ModelImportError, match="nested deeper than 32, or have long names"):
        read_keras_weights(path)


@pytest.mark.core
def test_folders_and_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("weights")
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    for name in (".", "text", "x.npz"):
        with pytest.raises(ModelImportError):
            read_keras_weights(tmp_path / name)
    with pytest.raises(ModelImportError, match="cannot be read"):
        read_keras_weights("a\0b")


def add_bools(group):
    group["0"] = np.array([True, False])


def add_circle(group):
    group.parent["again"] = group.parent.parent


def add_shared(group):
    group["0"] = np.ones(4000, np.float32)
    for i in range(1, 500):
        group[str(i)] = group["0"]


OTHERS = {"bools": add_bools, "circle": add_circle, "shared": add_shared, "empty": lambda x: None}


@pytest.mark.core
@pytest.mark.parametrize("kind", [*OBJECTS, *OTHERS])
def test_objects_that_keras_never_writes_are_refused(kind, tmp_path):
    with write_hdf5(tmp_path / "x.weights.h5") as group:
        OTHERS.get(kind, lambda group: add_object(group, "0", kind))(group)
    with pytest.raises(ModelImportError, match=r"x\.weights\.h5"):
        read_keras_weights(tmp_path / "x.weights.h5")


@pytest.mark.parametrize("libver", ["latest", "v110"])
def test_the_newer_format_is_refused_with_a_way_out(libver, tmp_path):
    with write_hdf5(tmp_path / "x", libver=libver) as group:
        group["0"] = np.ones(2)
    with pytest.raises(ModelImportError, match="save its weights again"):
        read_keras_weights(tmp_path / "x")


def write_archive(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.mark.core
def test_an_archive_that_unfolds_without_limit_is_refused(tmp_path):
    content = b"\x89HDF\r\n\x1a\n" + bytes(50_000_000)
    write_archive(tmp_path / "x.keras", {"config.json": "{}", "model.weights.h5": content})
    with pytest.raises(ModelImportError, match="unfolds"):
        read_keras_weights(tmp_path / "x.keras")


def test_an_archive_needs_each_part_once_and_a_config_that_is_json(files, tmp_path):
    with zipfile.ZipFile(io.BytesIO(files["keras3 archive"].read_bytes())) as sound:
        weights = sound.read("model.weights.h5")
    path = tmp_path / "x.keras"
    for config in ("{", "[" * 100_000, '{"config": ' * 5000, "\ud800".encode("utf-8", "replace")):
        write_archive(path, {"model.weights.h5": weights, "config.json": config})
        with pytest.raises(ModelImportError):
            read_keras_weights(path)
    write_archive(path, {"config.json": "{}"})
    with pytest.raises(ModelImportError, match=r"0 files 'model\.weights\.h5'"):
        read_keras_weights(path)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_load_right_or_are_refused(kind):
    result = fuzz_h5(300, seed=7, kinds=(kind,))
    assert result.other == []
    assert result.loaded + result.refused == 300
    assert result.loaded > 30
    assert result.refused > 100
