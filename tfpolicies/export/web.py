"""A web page for an ONNX export, which runs it by the WebAssembly build of ONNX Runtime.

The page's files are in `web/` and are copied unchanged; all differences between exports are in
`policy_spec.json`. There the runtime's two files are named with their SHA-384, which the browser
checks before it runs either: those of a pinned version on a CDN, or copies next to the page.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tfpolicies.errors import ExportError
from tfpolicies.system.paths import describe_path, resolve_path

INDEX = "index.html"
PAGE_FILES = (INDEX, "policy.js", "page.js", "fields.js", "bars.js", "elements.js")
RUNTIME = "onnxruntime-web@1.30.0"
_CDN = f"https://cdn.jsdelivr.net/npm/{RUNTIME}/dist/"
_PAGE = Path(__file__).with_name("web")
_RUNTIME_FILES = {
    "script": "ort.wasm.bundle.min.mjs",
    "wasm": "ort-wasm-simd-threaded.wasm",
}
"""The files of the package that a page needs, by part; other builds are for GPUs."""
_PINNED_INTEGRITY = {
    "script": "sha384-PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG",
    "wasm": "sha384-vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
}
"""The integrity of the files of the pinned version."""


class WebPage(NamedTuple):
    """A page, and the runtime that it loads."""

    runtime: Mapping[str, Mapping[str, str]]  # by part, `url` and `integrity`
    runtime_files: tuple[Path, ...]  # the runtime's files to copy; empty for a CDN

    @classmethod
    def from_arguments(cls, web: bool, ort_web: str | os.PathLike[str] | None) -> WebPage | None:
        """Returns the page of an export; None for an export without one.

        Args:
            web: whether the export has a page.
            ort_web: the `dist` folder of the npm package onnxruntime-web, whose files are copied;
                None for a CDN.

        Raises:
            ExportError: for a runtime without a page, or one that lacks a file.
        """
        if not web and ort_web is not None:
            raise ExportError(
                f"ort_web is the runtime of a web page, got {str(ort_web)!r} without a page."
            ).add_advice("Add web=True.", {"web": True})
        if not web:
            return None
        if ort_web is None:
            urls = {part: f"{_CDN}{name}" for part, name in _RUNTIME_FILES.items()}
            return cls(
                {part: _make_entry(url, _PINNED_INTEGRITY[part]) for part, url in urls.items()}, ()
            )
        files = {part: _find_runtime_file(ort_web, name) for part, name in _RUNTIME_FILES.items()}
        entries = {
            part: _make_entry(path.name, compute_integrity(path)) for part, path in files.items()
        }
        return cls(entries, tuple(files.values()))

    def read_files(self) -> dict[str, bytes]:
        sources = [*self.runtime_files, *(_PAGE / name for name in PAGE_FILES)]
        return {source.name: source.read_bytes() for source in sources}


def compute_integrity(path: Path) -> str:
    """Returns the hash that a browser compares a file to, as in Subresource Integrity."""
    digest = hashlib.sha384(path.read_bytes()).digest()
    return f"sha384-{base64.b64encode(digest).decode()}"


def _make_entry(url: str, digest: str) -> dict[str, str]:
    return {"url": url, "integrity": digest}


def _find_runtime_file(ort_web: str | os.PathLike[str], name: str) -> Path:
    folder = resolve_path(ort_web)
    if (folder / name).is_file():
        return folder / name
    below: Any = folder / "dist" / name
    advice = (
        f"Give {str(below.parent)!r}."
        if below.is_file()
        else "Run `npm install onnxruntime-web` and give node_modules/onnxruntime-web/dist."
    )
    raise ExportError(
        f"ort_web must be the `dist` folder of the npm package onnxruntime-web, but "
        f"{describe_path(ort_web, folder)} has no file {name!r}. {advice}"
    )
