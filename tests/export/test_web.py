"""A page beside an ONNX export: what is written, whole or not at all, and what it says."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from tfpolicies import DQNTF2Policy, PGTF2Policy
from tfpolicies.__main__ import main
from tfpolicies.errors import ExportError
from tfpolicies.export import web
from tfpolicies.export.distribution import describe_distribution
from tfpolicies.export.web import PAGE_FILES, RUNTIME, WebPage

pytestmark = pytest.mark.usefixtures("kept_programs")

EXPORTED = {"MODEL_CARD.md", "model.onnx", "model_sample.onnx", "play.py", "policy_spec.json"}
SCRIPT, WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"


@pytest.fixture
def dist(tmp_path):
    """A folder that looks like `dist` of onnxruntime-web."""
    folder = tmp_path / "onnxruntime-web" / "dist"
    folder.mkdir(parents=True)
    (folder / SCRIPT).write_bytes(b"export const env = {};")
    (folder / WASM).write_bytes(b"\0asm")
    (folder / "ort.all.js").write_bytes(b"of no use here")
    return folder


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def sha384(content):
    return "sha384-" + base64.b64encode(hashlib.sha384(content).digest()).decode()


def test_a_page_lies_beside_the_export_and_names_a_pinned_runtime(tmp_path):
    result = factories.make().export_model(tmp_path / "web", web=True)
    assert result.path == tmp_path / "web" / "model.onnx"
    assert "python3 -m http.server -d" in str(result)
    assert names_in(tmp_path / "web") == EXPORTED | set(PAGE_FILES)
    runtime = json.loads((tmp_path / "web" / "policy_spec.json").read_text())["web"]
    start = f"https://cdn.jsdelivr.net/npm/{RUNTIME}/dist/"
    assert [runtime[part]["url"] for part in ("script", "wasm")] == [start + SCRIPT, start + WASM]
    digests = [part["integrity"].removeprefix("sha384-") for part in runtime.values()]
    assert [len(base64.b64decode(digest)) for digest in digests] == [48, 48]
    assert RUNTIME.partition("@")[2].count(".") == 2  # one version, not a range


def test_with_a_copy_of_the_runtime_nothing_is_named_that_lies_elsewhere(tmp_path, dist):
    folder = tmp_path / "web"
    factories.make().export_model(folder, onnx=17, web=True, ort_web=dist)
    assert names_in(folder) == EXPORTED | set(PAGE_FILES) | {SCRIPT, WASM}
    spec = json.loads((folder / "policy_spec.json").read_text())
    assert spec["opset"] == 17
    assert spec["web"] == {
        "script": {"url": SCRIPT, "integrity": sha384(b"export const env = {};")},
        "wasm": {"url": WASM, "integrity": sha384(b"\0asm")},
    }
    texts = [(folder / name).read_text() for name in PAGE_FILES]
    assert [text for text in texts if "https://" in text] == []


def test_every_module_that_the_page_imports_is_written():
    there = {name: (web._PAGE / name).read_text() for name in PAGE_FILES}
    assert {path.name for path in web._PAGE.iterdir()} == set(there)
    for text in there.values():
        code = "\n".join(line for line in text.splitlines() if not line.startswith(" *"))
        assert set(re.findall(r'from "\./(.*?)"', code)) <= set(there)


@pytest.mark.parametrize("missing", [SCRIPT, WASM])
def test_a_runtime_that_lacks_a_file_is_refused_by_its_name(tmp_path, dist, missing):
    (dist / missing).unlink()
    with pytest.raises(ExportError, match=f"has no file '{missing}'. Run `npm install onnx"):
        factories.make().export_model(tmp_path / "web", web=True, ort_web=dist)
    assert not (tmp_path / "web").exists()


def test_other_mistakes_with_the_runtime_name_the_next_step(tmp_path, dist):
    policy = factories.make()
    with pytest.raises(ExportError, match=r"must be the `dist` folder .* Give '.*/dist'\."):
        policy.export_model(tmp_path / "web", web=True, ort_web=dist.parent)
    with pytest.raises(ExportError, match=r"without a page\. Add web=True\."):
        policy.export_model(tmp_path / "web", ort_web=dist)
    assert not (tmp_path / "web").exists()


def test_a_page_that_cannot_be_placed_leaves_the_folder_as_it_was(tmp_path, dist):
    folder = tmp_path / "web"
    (folder / "policy.js").mkdir(parents=True)
    (folder / "index.html").write_text("mine")
    with pytest.raises(ExportError, match=r"policy\.js' is a folder"):
        factories.make().export_model(folder, web=True, ort_web=dist)
    assert names_in(folder) == {"policy.js", "index.html"}
    assert (folder / "index.html").read_text() == "mine"


def test_the_command_writes_the_page_and_says_how_to_see_it(tmp_path, dist, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    factories.make().export_checkpoint("checkpoint")
    phrases = ["export", "checkpoint", "--to", "out"]
    assert main([*phrases, "--web", "--ort-web", str(dist)]) == 0
    assert "python3 -m http.server -d out/onnx" in capsys.readouterr().out
    assert names_in(tmp_path / "out") == {"onnx"}
    assert (tmp_path / "out" / "onnx" / WASM).is_file()
    assert main([*phrases, "--ort-web", str(dist)]) == 2
    assert "without a page. Give --web." in capsys.readouterr().err


# -- what the spec says of the distribution -------------------------------------------------------


def test_the_leaves_of_a_nested_action_are_told_with_the_columns_of_their_inputs():
    actions = spaces.Dict(
        count=spaces.Box(-1, 1, (1,), np.int64),
        gas=spaces.Box(np.float32([0, -1]), np.float32([4, np.inf])),
        keys=spaces.MultiBinary(2),
        move=spaces.Discrete(3, start=1),
        pair=spaces.MultiDiscrete([2, 4], start=[5, -1]),
    )
    result = describe_distribution(factories.make(actions=actions).program)
    assert result == [
        {"path": ["count"], "kind": "choices", "columns": [0, 3], "sizes": [3], "first": [-1]},
        {
            "path": ["gas"],
            "kind": "normal",
            "columns": [3, 7],
            "low": [0.0, -1.0],
            "high": [4.0, None],
            "half_width": [2.0, 1.0],
            "middle": [2.0, 0.0],
            "clipped": True,
        },
        {"path": ["keys"], "kind": "bits", "columns": [7, 9], "sizes": [2, 2], "first": [0, 0]},
        {"path": ["move"], "kind": "choices", "columns": [9, 12], "sizes": [3], "first": [1]},
        {
            "path": ["pair"],
            "kind": "choices",
            "columns": [12, 18],
            "sizes": [2, 4],
            "first": [5, -1],
        },
    ]


def test_actions_in_the_environments_own_units_are_told_as_such():
    plain = {"normalize_actions": False, "clip_actions": False}
    model = {"custom_action_dist": "squashed_gaussian", "fcnet_hiddens": [4]}
    box = spaces.Box(0.0, 4.0, (1,))
    (leaf,) = describe_distribution(factories.make(actions=box, model=model, **plain).program)
    assert leaf["kind"] == "squashed_normal"
    assert leaf["log_std_range"] == [-5.0, 2.0]
    assert (leaf["half_width"], leaf["middle"], leaf["clipped"]) == ([1.0], [0.0], False)


def test_values_of_actions_are_not_taken_for_logits():
    (leaf,) = describe_distribution(factories.make(DQNTF2Policy).program)
    assert (leaf["kind"], leaf["columns"]) == ("values", [0, 2])


class Mirrored(PGTF2Policy):
    """Takes the second action where the first would have been chosen, and the other way round."""

    def make_model(self):
        inputs = keras.Input(self.observation_space.shape)
        return keras.Model(inputs, keras.layers.Dense(2)(inputs))

    def action_sampler_fn(self, model, *, obs_batch, state_batches, noise, **kwargs):
        dist_inputs, states = model({"obs": obs_batch}, state_batches)
        return 1 - self.dist_class(dist_inputs).sample(noise), None, dist_inputs, states


def test_of_a_policy_that_samples_by_itself_nothing_is_told():
    (leaf,) = describe_distribution(factories.make(Mirrored).program)
    assert (leaf["kind"], leaf["columns"]) == ("other", [0, 0])


def test_the_page_of_a_cdn_copies_nothing():
    assert WebPage.from_arguments(True, None).runtime_files == ()
    assert WebPage.from_arguments(False, None) is None
