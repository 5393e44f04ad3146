"""Array files of strangers, which are read in Python or refused."""

import contextlib
import io
import random
import time

import h5py
import numpy as np
import pytest

from soak.hostile_arrays import change_bytes
from tfpolicies.errors import CheckpointError
from tfpolicies.storage.hdf5_bytes import check_arrays, pack_arrays, unpack_arrays

TWELVE = pack_arrays({f"w{i}": np.ones(i + 1, np.float32) for i in range(12)})


@pytest.mark.core
@pytest.mark.parametrize(
    ("place", "value"), [(4222, 0), (4280, 0), (6967, 1), (6751, 0xDE), (4577, 0)]
)
def test_a_changed_byte_that_crashes_the_hdf5_library_is_read_or_refused(place, value):
    image = bytearray(TWELVE)
    image[place] = value
    arrays = {}
    with contextlib.suppress(CheckpointError):
        arrays = unpack_arrays(bytes(image))
    assert all((array == 1).all() for array in arrays.values())


@pytest.mark.core
def test_the_hdf5_library_sees_no_byte_of_an_array_file(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the HDF5 library was asked")

    monkeypatch.setattr(h5py, "File", refuse)
    monkeypatch.setattr(h5py.h5f, "open", refuse)
    assert len(unpack_arrays(TWELVE)) == 12


def link_name(number):
    return f"{number:03}/" + "layer" * 60


@pytest.mark.core
@pytest.mark.parametrize(
    "count",
    [
        *(8, 9),  # links in the header; in a heap of one block
        *(45, 46),  # an index of one node; of several levels
        2500,  # a heap of blocks in blocks in blocks
    ],
)
def test_groups_of_every_form_keep_names_values_and_order(count):
    names = [link_name(number) for number in random.Random(0).sample(range(count), count)]
    arrays = unpack_arrays(pack_arrays({name: np.array(i) for i, name in enumerate(names)}))
    assert list(arrays) == names
    assert [int(array) for array in arrays.values()] == list(range(count))


@pytest.mark.core
def test_reading_changed_bytes_takes_no_more_than_their_number_allows():
    image = pack_arrays({link_name(number): np.ones(3) for number in range(60)})
    outcomes, start = [], time.process_time()
    for number in range(500):
        try:
            unpack_arrays(change_bytes(image, random.Random(number)))
            outcomes.append("read")
        except CheckpointError:
            outcomes.append("refused")
    assert outcomes.count("refused") > 20
    assert outcomes.count("read") > 20
    assert time.process_time() - start < 60  # 500 images of 70 kB


def plain_group(**datasets):
    """Returns the image of a group without an order, as other programs may write it."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        group = file.create_group("arrays")
        for name, value in datasets.items():
            group[name] = value
    return buffer.getvalue()


def test_a_name_that_two_links_spell_is_refused():
    assert list(unpack_arrays(plain_group(a=1, b=2))) == ["a", "b"]
    with pytest.raises(CheckpointError, match="names an array twice"):
        unpack_arrays(plain_group(a=1, **{"%61": 2}))


@pytest.mark.core
def test_names_that_overlap_are_charged_as_often_as_they_are_read():
    count, longest = 500, "n" * 4000
    image = bytearray(plain_group(**{f"{i:03}": i for i in range(count)}, **{longest: 0}))
    assert len(unpack_arrays(bytes(image))) == count + 1
    names = image.index(longest.encode())
    heap = image.rindex(b"000\0", 0, names)  # the names of the group, of which this is the first
    offset, table, number = names - heap + 8, -1, 0
    while (table := image.find(b"SNOD", table + 1)) >= 0:
        entries = int.from_bytes(image[table + 6 : table + 8], "little")
        for entry in range(entries if entries > 1 else 0):  # the root has one
            place = table + 8 + 40 * entry
            image[place : place + 8] = (offset + number).to_bytes(8, "little")
            number += 1
    with pytest.raises(CheckpointError, match="together they are longer than the file"):
        unpack_arrays(bytes(image))


def test_a_bool_is_a_zero_or_a_one():
    image = pack_arrays({"done": np.array([True, False, True, True])})
    place = image.index(b"\1\0\1\1")
    changed = image[:place] + b"\2" + image[place + 1 :]
    with pytest.raises(CheckpointError, match="neither 0 nor 1"):
        unpack_arrays(changed)


def test_a_name_that_no_reader_accepts_is_refused_before_it_is_written():
    check_arrays("weights", {"x" * 4000: np.ones(1)})
    with pytest.raises(CheckpointError, match="at most 4000 bytes, got 4001 characters"):
        check_arrays("weights", {"x" * 4001: np.ones(1)})
    longest = {f"x{i}".ljust(4000, "y"): np.array(i) for i in range(12)}
    assert list(unpack_arrays(pack_arrays(longest))) == list(longest)


def test_blocks_of_a_heap_that_lead_back_to_themselves_are_refused():
    image = pack_arrays({link_name(number): np.array(number) for number in range(2500)})
    header = image.index(b"FRHP")
    root = int.from_bytes(image[header + 132 : header + 140], "little")
    rows = 9 * 4 * 8  # bytes that list blocks of links, before those that list tables
    place = root + 17 + rows
    assert image[root : root + 4] == b"FHIB"
    assert image[place : place + 8] != b"\xff" * 8
    circle = image[:place] + root.to_bytes(8, "little") + image[place + 8 :]
    with pytest.raises(CheckpointError, match="a block of a heap is in it twice"):
        unpack_arrays(circle)
