"""LiteRT files do what the policy does, and say how much rounding their weights has changed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from gymnasium import spaces

from helpers import factories
from tfpolicies.errors import ExportError, MissingPackageError

pytestmark = pytest.mark.usefixtures("kept_programs")

WIDE = {"fcnet_hiddens": [64, 64]}
MEMORY = {"fcnet_hiddens": [4], "use_gru": True, "lstm_cell_size": 4, "max_seq_len": 5}


def make_runner(result):
    """Returns what runs the greedy signature; in a folder of its own, so that nothing is cached."""
    interpreter = Interpreter(str(result.path))
    return interpreter.get_signature_runner("serving_default")


@pytest.fixture(scope="module")
def wide():
    return factories.varied(factories.make(model=WIDE))


@pytest.fixture(scope="module")
def exact(wide, tmp_path_factory):
    return wide.export_model(tmp_path_factory.mktemp("exact"), litert=True)


@pytest.mark.core
def test_a_litert_file_takes_any_batch_and_equals_the_policy(wide, exact):
    assert exact.path.name == "model.tflite"
    assert exact.parity.largest_difference <= 1e-5
    assert exact.parity.tolerance == 1e-5
    assert exact.agreement == (1000, False, 1.0, 0.0)
    run = make_runner(exact)
    for rows in (1, 7, 3):
        obs = factories.rows_of(factories.OBS, rows, seed=rows)
        outputs = run(obs=obs)
        actions, _, extras = wide.compute_actions(obs, explore=False)
        np.testing.assert_array_equal(outputs["actions"], actions)
        np.testing.assert_allclose(outputs["vf_preds"], extras["vf_preds"], atol=1e-5)


@pytest.mark.core
def test_the_spec_beside_it_says_what_it_takes_and_how_well_it_agrees(exact):
    spec = json.loads(exact.path.with_name("policy_spec.json").read_text())
    assert (spec["artefact"], spec["weights"]) == ("litert", "float32")
    assert spec["files"] == {"serving_default": "model.tflite"}
    assert spec["signatures"]["serving_default"]["inputs"][0]["shape"] == ["batch", 3]
    assert spec["agreement"]["equal_actions"] == 1.0
    assert "ai_edge_litert" in spec["versions"]
    assert "100.0% of its actions on 1000 random observations are the policy's" in str(exact)


@pytest.mark.core
def test_a_litert_file_needs_litert_only(exact):
    script = """
    import json, sys
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter
    run = Interpreter(sys.argv[1]).get_signature_runner("serving_default")
    run(obs=np.zeros((2, 3), np.float32))
    others = ("tensorflow", "keras", "tfpolicies")
    print(json.dumps([name for name in others if name in sys.modules]))
    """
    command = [sys.executable, "-I", "-c", textwrap.dedent(script), str(exact.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.core
def test_a_policy_with_a_memory_takes_one_step_and_the_memory(tmp_path):
    policy = factories.varied(factories.make(model=MEMORY))
    result = policy.export_model(tmp_path, litert=True)
    run = make_runner(result)
    operations = {op["op_name"] for op in Interpreter(str(result.path))._get_ops_details()}
    assert "RANGE" not in operations, "one step has no padded rows to fill"
    kept = {"state_in_0": np.zeros((2, 4), np.float32)}
    state = [np.zeros((2, 4), np.float32)]
    for step in range(3):
        obs = factories.rows_of(factories.OBS, 2, seed=step)
        outputs = run(obs=obs, **kept)
        kept = {"state_in_0": outputs["state_out_0"]}
        _, state, extras = policy.compute_actions(obs, state, explore=False)
        expected = extras["action_dist_inputs"]
        np.testing.assert_allclose(outputs["action_dist_inputs"], expected, atol=1e-5)


@pytest.mark.parametrize(("weights", "share", "size"), [("float16", 0.98, 0.7), ("int8", 0.9, 0.6)])
def test_rounded_weights_are_smaller_and_the_share_of_equal_actions_is_told(
    wide, exact, weights, share, size, tmp_path, capfd
):
    obs = factories.rows_of(factories.OBS, 400)
    result = wide.export_model(tmp_path, litert=weights, observations=obs)
    assert capfd.readouterr() == ("", "")
    assert result.path.stat().st_size < size * exact.path.stat().st_size
    assert result.parity.tolerance is None
    assert result.parity.largest_difference > 1e-5
    expected = wide.compute_actions(obs, explore=False).actions
    equal = float(np.mean(make_runner(result)(obs=obs)["actions"] == expected))
    assert result.agreement[:3] == (400, True, equal)
    assert share <= equal <= 1.0
    spec = json.loads((tmp_path / "policy_spec.json").read_text())
    assert spec["agreement"]["equal_actions"] == equal
    assert spec["parity"]["tolerance"] is None
    assert f"{equal:.1%} of its actions on 400 given observations" in str(result)


def test_masks_survive_rounding_and_real_actions_are_compared_by_their_size(tmp_path):
    space = spaces.Dict(observations=factories.OBS, action_mask=spaces.MultiBinary(2))
    masked = factories.varied(factories.make(obs=space)).export_model(
        tmp_path / "masked", litert="float16"
    )
    obs = {"obs": np.zeros((2, 3), np.float32), "action_mask": np.int64([[1, 0], [0, 1]])}
    assert make_runner(masked)(**obs)["actions"].tolist() == [0, 1]
    plane = factories.varied(factories.make(actions=factories.PLANE, model=WIDE))
    result = plane.export_model(tmp_path / "plane", litert="int8")
    assert 0.0 < result.agreement.largest_difference < 0.2
    assert 0.0 < result.agreement.equal_actions < 1.0


@keras.saving.register_keras_serializable(package="tests")
class Inverse(keras.layers.Layer):
    """Computes what LiteRT cannot."""

    def call(self, inputs):
        return inputs + tf.math.digamma(1.0 + tf.square(inputs))

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.core
def test_what_cannot_be_converted_is_named_and_nothing_is_written(tmp_path, capfd):
    model = keras.Sequential([Inverse(), keras.layers.Dense(2)])
    policy = factories.make(model={"custom_model": model})
    with pytest.raises(ExportError, match="LiteRT has no operation for Digamma"):
        policy.export_model(tmp_path / "out", litert=True)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.core
@pytest.mark.parametrize(
    ("observations", "message"),
    [
        (np.zeros((2, 4)), r"observations must have the shape \[N, 3\], got \[2, 4\]"),
        (np.zeros(3), r"observations must have the shape \[N, 3\], got \[3\]"),
        (np.zeros((0, 3)), "at least one"),
        ("far", "cannot be read: ValueError"),
    ],
)
def test_observations_that_do_not_fit_are_refused(wide, observations, message, tmp_path):
    with pytest.raises(ExportError, match=message):
        wide.export_model(tmp_path / "out", litert=True, observations=observations)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.core
def test_a_missing_litert_is_named_with_what_to_install(wide, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)  # as if not installed
    with pytest.raises(MissingPackageError, match=r"pip install 'tfpolicies\[edge\]'"):
        wide.export_model(tmp_path / "out", litert=True)
    assert list(tmp_path.iterdir()) == []
