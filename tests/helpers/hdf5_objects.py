"""Objects of HDF5 files that a reader of plain numbers refuses."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

LINKS = {
    "soft link": h5py.SoftLink("/arrays/y"),
    "external link": h5py.ExternalLink("/etc/passwd", "/"),
}
DATASETS: dict[str, dict[str, Any]] = {
    "external storage": {"shape": (4,), "dtype": "u1", "external": [("/etc/passwd", 0, 4)]},
    "objects": {"data": ["a", "b"], "dtype": h5py.string_dtype()},
    "fixed text": {"data": np.array(b"abc")},
    "variable length": {"shape": (2,), "dtype": h5py.vlen_dtype(np.int32)},
    "reference": {"shape": (1,), "dtype": h5py.ref_dtype},
    "compound": {"data": np.zeros(2, [("a", "f4")])},
    "enumeration": {"shape": (2,), "dtype": h5py.enum_dtype({"RED": 0}, basetype="i4")},
    "compressed": {"data": np.zeros(10_000), "compression": "gzip"},
    "nothing": {"data": h5py.Empty("f4")},
    "bomb": {"shape": (10**12,), "dtype": "f8"},  # a small file: HDF5 allocates late
}
OBJECTS = (*LINKS, *DATASETS, "virtual")


def add_object(group: h5py.Group, name: str, kind: str) -> None:
    """Adds an object of `OBJECTS` to a group."""
    if kind in LINKS:
        group[name] = LINKS[kind]
    elif kind in DATASETS:
        group.create_dataset(name, **DATASETS[kind])
    else:
        layout = h5py.VirtualLayout((4,), "u1")
        layout[:] = h5py.VirtualSource("/etc/passwd", "data", (4,))
        group.create_virtual_dataset(name, layout)
