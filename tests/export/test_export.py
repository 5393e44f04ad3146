"""Exports: SavedModel and ONNX do what the policy does, without this package."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import keras
import numpy as np
import onnx
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers import factories
from helpers.diverged import make_diverged
from tfpolicies import PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import ConfigError, ExportError, MissingPackageError, UnknownPolicyError
from tfpolicies.export.player import rebuild_model
from tfpolicies.export.verify import draw_observations, verify_onnx, verify_saved_model
from tfpolicies.models.spaces import leaves
from tfpolicies.program.runtimes.onnx import convert, make_cpu_session
from tfpolicies.system.folder_lock import FolderLock

pytestmark = pytest.mark.usefixtures("kept_programs")

OUTPUTS = ["action_dist_inputs", "action_logp", "actions", "actions_normalized"]
CARTPOLE = gym.make("CartPole-v1")
NESTED = spaces.Dict(
    camera=spaces.Box(0, 255, (10, 10, 1), np.uint8),
    pair=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiDiscrete([2, 4])]),
    flags=spaces.MultiBinary(2),
    speed=spaces.Box(-np.inf, np.inf, (2,), np.float32),
)


def make(obs=CARTPOLE.observation_space, actions=CARTPOLE.action_space, cls=PPOTF2Policy, **config):
    return factories.varied(factories.make(cls, obs, actions, **config))


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    """A policy for CartPole with both exports, and what the policy does on 1000 observations."""
    policy = make(model={"fcnet_hiddens": [16, 16]})
    folder = tmp_path_factory.mktemp("cartpole")
    results = policy.export_model(folder / "saved"), policy.export_model(folder / "onnx", onnx=True)
    obs = draw_observations(policy.program.spec.obs_leaves, 1000, np.random.default_rng(3))[0]
    actions, _, extras = policy.compute_actions(obs, explore=False)
    logp = policy.compute_log_likelihoods(actions, obs)
    arrays = {"obs": obs, "actions": actions, **extras, "action_logp": logp}
    np.savez(folder / "expected.npz", **arrays)
    np.savez(folder / "episode.npz", **greedy_episode(policy))
    return policy, folder, results


def greedy_episode(policy):
    env = gym.make("CartPole-v1")
    obs, done, seen, chosen = env.reset(seed=7)[0], False, [], []
    while not done:
        seen.append(obs)
        chosen.append(policy.compute_single_action(obs, explore=False)[0])
        obs, _, terminated, truncated, _ = env.step(policy.to_env_action(chosen[-1]))
        done = terminated or truncated
    return {"obs": np.stack(seen), "actions": np.stack(chosen)}


SERVE = {
    "saved_model": """
function = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
def serve(obs):
    return {k: v.numpy() for k, v in function(obs=tf.constant(obs)).items()}
""",
    "onnx": """
session = onnxruntime.InferenceSession(sys.argv[1])
names = [output.name for output in session.get_outputs()]
def serve(obs):
    return dict(zip(names, session.run(names, {"obs": obs})))
""",
}
COMPARE = """
worst = 0.0
expected = np.load(f"{sys.argv[2]}/expected.npz")
outputs = serve(expected["obs"])
for name in ("action_dist_inputs", "vf_preds", "action_logp"):
    scale = np.maximum(1, np.abs(expected[name]))
    worst = max(worst, float(np.max(np.abs(outputs[name] - expected[name]) / scale)))
logits = np.sort(expected["action_dist_inputs"])
clear = logits[:, 1] - logits[:, 0] > 1e-4
wrong = int(np.sum((outputs["actions"] != expected["actions"]) & clear))
episode = np.load(f"{sys.argv[2]}/episode.npz")
steps = [int(serve(row[None])["actions"][0]) for row in episode["obs"]]
print(json.dumps({
    "worst": worst, "wrong": wrong, "clear": int(clear.sum()),
    "loaded": [m for m in ("tensorflow", "keras", "tfpolicies") if m in sys.modules],
    "episode": steps == episode["actions"].tolist(), "steps": len(steps),
}))
"""


@pytest.mark.parametrize(
    ("form", "library"),
    [
        pytest.param("saved_model", "tensorflow as tf", marks=pytest.mark.core),
        ("onnx", "onnxruntime"),
    ],
)
def test_an_export_needs_its_own_library_only_and_equals_the_policy(cartpole, form, library):
    _, folder, results = cartpole
    path = results[form == "onnx"].path
    script = f"import json, sys\nimport numpy as np, {library}\n{SERVE[form]}{COMPARE}"
    command = [sys.executable, "-I", "-c", script, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert "tfpolicies" not in report["loaded"]
    assert form == "saved_model" or report["loaded"] == []
    assert report["worst"] <= 1e-5
    assert report["wrong"] == 0
    assert report["clear"] > 900
    assert report["episode"]
    assert report["steps"] >= 8


@pytest.mark.core
def test_a_loaded_saved_model_is_called_with_observations(cartpole):
    _, folder, (saved, written) = cartpole
    model = tf.saved_model.load(str(saved.path))
    obs = np.load(folder / "expected.npz")["obs"]
    served, signature = model(obs), model.signatures["serving_default"](obs=tf.constant(obs))
    assert served.keys() == signature.keys()
    for name, tensor in served.items():
        np.testing.assert_array_equal(tensor, signature[name], err_msg=name)
    text = str(saved)
    assert f"tf.saved_model.load({str(saved.path)!r})" in text
    assert f"{str(saved.path.parent)!r}, the folder of all versions" in text
    assert f"onnxruntime.InferenceSession({str(written.path)!r})" in str(written)


@pytest.mark.core
def test_signatures_have_the_documented_names_and_a_dynamic_batch(cartpole):
    _, _, (saved, written) = cartpole
    signatures = tf.saved_model.load(str(saved.path)).signatures
    assert sorted(signatures) == ["sample", "serving_default"]
    for name, inputs in (("serving_default", ["obs"]), ("sample", ["noise", "obs"])):
        specs = signatures[name].structured_input_signature[1]
        assert sorted(specs) == inputs
        assert all(spec.shape[0] is None for spec in specs.values())
        assert sorted(signatures[name].structured_outputs) == [*OUTPUTS, "vf_preds"]
    for name, inputs in (("model.onnx", ["obs"]), ("model_sample.onnx", ["obs", "noise"])):
        graph = onnx.load(written.path.with_name(name)).graph
        assert [x.name for x in graph.input] == inputs
        assert sorted(x.name for x in graph.output) == [*OUTPUTS, "vf_preds"]
        ports = [*graph.input, *graph.output]
        assert {x.type.tensor_type.shape.dim[0].dim_param for x in ports} == {"batch"}


def test_the_spec_file_says_everything_for_machines(cartpole):
    _, _, (saved, written) = cartpole
    spec = json.loads((saved.path / "policy_spec.json").read_text())
    assert (spec["format"], spec["format_version"]) == ("tfpolicies.policy_spec", 2)
    assert spec["policy_class"] == "PPOTF2Policy"
    assert sorted(spec["versions"]) == ["keras", "tensorflow", "tfpolicies"]
    assert spec["noise"] == {"input": "noise", "blocks": [["gumbel", 2]], "size": 2}
    assert spec["action_space"]["n"] == 2
    (obs,) = spec["signatures"]["serving_default"]["inputs"]
    assert obs == {"name": "obs", "dtype": "float32", "shape": ["batch", 4], "path": []}
    assert spec["parity"]["observations"] == 1000
    assert spec["parity"]["largest_difference"] == saved.parity.largest_difference <= 1e-5
    assert json.loads(written.path.with_name("policy_spec.json").read_text())["opset"] == 18


def test_sampling_with_the_noise_of_the_policy_gives_the_actions_of_the_policy(cartpole):
    policy, folder, (saved, _) = cartpole
    obs = np.load(folder / "expected.npz")["obs"]
    generator = np.random.default_rng()
    generator.bit_generator.state = policy.get_state()["rng"]
    noise = policy.dist_class.draw_noise(generator, len(obs))
    actions, _, extras = policy.compute_actions(obs, explore=True)
    assert 0 < np.mean(actions != np.argmax(extras["action_dist_inputs"], axis=-1)) < 1
    sample = tf.saved_model.load(str(saved.path)).signatures["sample"]
    served = sample(obs=tf.constant(obs), noise=tf.constant(noise))
    np.testing.assert_array_equal(served["actions_normalized"], actions)
    np.testing.assert_allclose(served["action_logp"], extras["action_logp"], atol=1e-6)


def open_client(path, **options):
    folder = path if path.is_dir() else path.parent
    return play_module(folder)["OnnxPolicy"](path, **options)


def play_module(folder):
    namespace = {"__name__": "play", "__file__": str(folder / "play.py")}
    exec(compile((folder / "play.py").read_text(), "play.py", "exec"), namespace)
    return namespace


def test_the_client_beside_an_onnx_file_acts_on_single_observations_and_batches(cartpole):
    policy, folder, _ = cartpole
    client = open_client(folder / "onnx" / "model.onnx")
    obs = np.load(folder / "expected.npz")["obs"][:50]
    expected = policy.compute_actions(obs, explore=False).actions
    np.testing.assert_array_equal(client.act(obs), expected)
    assert client.act(obs[0]) == expected[0]
    assert np.ndim(client.act(obs[0])) == 0
    with pytest.raises(ValueError, match=r"obs must have the shape \[4\]"):
        client.act(obs[:, :3])


def run_player(folder, *arguments):
    command = [sys.executable, "-I", str(folder / "onnx" / "play.py"), "--env", "CartPole-v1"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_client_plays_from_the_command_line_without_tensorflow(cartpole):
    _, folder, _ = cartpole
    text = run_player(folder, "--episodes", "5", "--seed", "7")
    assert "neither tensorflow nor tfpolicies" in text
    assert " over 5 episodes (min " in text.splitlines()[-1]
    report = json.loads(run_player(folder, "--episodes", "5", "--seed", "7", "--json"))
    assert report["loaded"] == []
    assert report["returns"][0] == len(np.load(folder / "episode.npz")["obs"])
    assert report["mean_return"] == np.mean(report["returns"])
    assert report["std_return"] == np.std(report["returns"])
    figures = f"mean return {report['mean_return']:.1f} +- {report['std_return']:.1f} over"
    assert figures in text


def test_the_client_imports_neither_tensorflow_nor_keras_from_within_the_package():
    code = (
        "import sys, tfpolicies.export.player\n"
        "print([name for name in ('tensorflow', 'keras') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_number_of_environments_does_not_change_what_is_played(cartpole):
    _, folder, _ = cartpole
    module = play_module(folder / "onnx")
    policy = module["OnnxPolicy"](folder / "onnx", sample=True, seed=0)
    one = module["play"](policy, "CartPole-v1", 6, seed=1, num_envs=1)
    four = module["play"](policy, "CartPole-v1", 6, seed=1, num_envs=4)
    assert one.returns == four.returns
    assert len(set(one.returns)) > 1


@pytest.mark.parametrize("normalize", [True, False])
def test_box_actions_are_ready_for_the_environment(tmp_path, normalize):
    env = gym.make("Pendulum-v1")
    how = {"normalize_actions": normalize, "clip_actions": True}
    policy = make(env.observation_space, env.action_space, **how)
    result = policy.export_model(tmp_path, onnx=True)
    client = open_client(result.path, sample=True, seed=0)
    obs = draw_observations(policy.program.spec.obs_leaves, 200, np.random.default_rng(0))
    noise = client.draw_noise(np.random.default_rng(0), 200)
    outputs = client.run(obs, noise)
    own = outputs["actions_normalized"]
    expected = np.clip(own * 2.0 if normalize else own, -2.0, 2.0)
    np.testing.assert_allclose(outputs["actions"], expected, rtol=1e-6)
    assert (np.abs(own) > (1.0 if normalize else 2.0)).any()
    assert all(env.action_space.contains(action) for action in client.act(obs[0]))
    assert env.action_space.contains(client.act(env.reset(seed=0)[0]))


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    policy = make(NESTED, spaces.Discrete(5, start=3))
    folder = tmp_path_factory.mktemp("nested")
    return policy, folder, policy.export_model(folder), policy.export_model(folder, onnx=True)


def test_nested_observations_are_one_named_input_per_leaf(nested):
    policy, _, saved, written = nested
    names = ["obs_camera", "obs_flags", "obs_pair_0", "obs_pair_1", "obs_speed"]
    signature = tf.saved_model.load(str(saved.path)).signatures["serving_default"]
    assert sorted(signature.structured_input_signature[1]) == names
    assert sorted(x.name for x in onnx.load(written.path).graph.input) == names
    NESTED.seed(0)
    obs = NESTED.sample()
    client = open_client(written.path)
    action, _, _ = policy.compute_single_action(obs, explore=False)
    assert client.act(obs) == policy.to_env_action(action) == action + 3
    rows = factories.rows_of(NESTED, 2)
    served = tf.saved_model.load(str(saved.path))(
        {**rows, "pair": tuple(rows["pair"]), "flags": rows["flags"].astype(np.int64)}
    )
    expected = policy.compute_actions(rows, explore=False).actions
    np.testing.assert_array_equal(served["actions_normalized"], expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("speed", r"no part 'speed': the policy reads .*'pair/0'.*\['camera"),
        (np.zeros(3, np.float32), r"no part 'camera'.*got ndarray"),
        ({"pair": (-2, [0, 0])}, r"'obs_pair_0' must be from -1 to 1, got -2 at \[0\]"),
        ({"pair": (-1, [0, 4])}, r"'obs_pair_1' must be from 0 to 3, got 4 at \[0, 1\]"),
    ],
)
def test_the_client_names_the_part_of_an_observation_that_is_wrong(nested, change, words):
    obs = dict(NESTED.sample())
    if isinstance(change, str):
        del obs[change]
    else:
        obs = {**obs, **change} if isinstance(change, dict) else change
    with pytest.raises(ValueError, match=words):
        open_client(nested[3].path).act(obs)


def test_discrete_observations_and_a_policy_without_values(tmp_path):
    policy = make(spaces.Discrete(6, start=2), cls=PGTF2Policy)
    policy.export_model(tmp_path, onnx=True)
    client = open_client(tmp_path)
    states = np.arange(2, 8)
    np.testing.assert_array_equal(
        client.act(states), policy.compute_actions(states, explore=False).actions
    )
    assert sorted(client.run([states])) == OUTPUTS


class Pair(keras.Model):
    def __init__(self, units=8, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = keras.layers.Dense(units, activation="relu")
        self.norm = keras.layers.BatchNormalization()
        self.heads = [keras.layers.Dense(2), keras.layers.Dense(1)]

    def call(self, inputs, training=False):
        hidden = self.norm(self.hidden(inputs), training=training)
        return [head(hidden) for head in self.heads]


def functional():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return keras.Model(inputs, [keras.layers.Dense(2)(hidden), keras.layers.Dense(1)(hidden)])


@pytest.mark.parametrize(
    "model",
    [
        lambda: keras.Sequential([keras.layers.Dense(8, activation="elu"), keras.layers.Dense(2)]),
        functional,
        Pair,
    ],
    ids=["sequential", "functional", "subclassed"],
)
def test_a_keras_model_of_the_users_own_is_exported_whole(model, tmp_path):
    policy = factories.make(obs=CARTPOLE.observation_space, model={"custom_model": model()})
    obs = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    _, _, extras = policy.compute_actions(obs, explore=False)
    saved = policy.export_model(tmp_path)
    served = tf.saved_model.load(str(saved.path)).signatures["serving_default"](obs=obs)
    for name in ("action_dist_inputs", "vf_preds"):
        np.testing.assert_allclose(served[name], extras[name], atol=1e-5)
    assert policy.export_model(tmp_path, onnx=True).parity.largest_difference <= 1e-5


class LogGamma(keras.Layer):
    """What ONNX has no operator for."""

    def call(self, inputs):
        return tf.math.lgamma(1.0 + inputs * inputs)


@pytest.mark.core
def test_an_operation_that_onnx_lacks_is_named(tmp_path):
    layers = [LogGamma(name="odd"), keras.layers.Dense(2)]
    policy = factories.make(model={"custom_model": keras.Sequential(layers)})
    for opset in (True, 11):
        with pytest.raises(
            ExportError, match=r"\(opset 1\d\) lacks .*: Lgamma \(.*odd.*/Lgamma\)$"
        ):
            policy.export_model(tmp_path / "out", onnx=opset)
    assert not (tmp_path / "out").exists()
    policy = factories.make(model={"custom_model": keras.Sequential(layers)}, inference="onnx")
    words = r"use inference='tf' for it.*lacks operators for it: Lgamma"
    with pytest.raises(ConfigError, match=words):
        policy.compute_actions(np.zeros((2, 3)))


def test_an_onnx_file_with_one_changed_weight_is_refused(cartpole, tmp_path):
    policy, _, (_, written) = cartpole
    for name in ("model.onnx", "model_sample.onnx"):
        (tmp_path / name).write_bytes(written.path.with_name(name).read_bytes())
    state = policy.driver.acting.state
    assert verify_onnx(tmp_path, policy.program, state).largest_difference <= 1e-5
    model = onnx.load(tmp_path / "model.onnx")
    weight = next(x for x in model.graph.initializer if list(x.dims) == [16, 16])
    changed = onnx.numpy_helper.to_array(weight).copy()
    changed[3, 5] += 0.05
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, weight.name))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"'serving_default'.*than the policy"):
        verify_onnx(tmp_path, policy.program, policy.driver.acting.state)
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(ExportError, match=r"cannot load model\.onnx"):
        verify_onnx(tmp_path, policy.program, policy.driver.acting.state)


def test_a_saved_model_of_other_weights_or_without_its_variables_is_refused(cartpole, tmp_path):
    policy, _, _ = cartpole
    other = make(model={"fcnet_hiddens": [16, 16]})
    assert other.program is policy.program
    weights = other.get_weights()
    next(iter(weights.values()))[0, 0] += 0.05
    other.set_weights(weights)
    path = other.export_model(tmp_path).path
    with pytest.raises(ExportError, match="than the policy"):
        verify_saved_model(path, policy.program, policy.driver.acting.state)
    (path / "variables" / "variables.index").unlink()
    with pytest.raises(ExportError, match="cannot be loaded"):
        verify_saved_model(path, policy.program, policy.driver.acting.state)


@pytest.fixture
def copied(cartpole, tmp_path):
    return shutil.copytree(cartpole[1] / "onnx", tmp_path / "onnx")


def edit_spec(folder, *way_and_value):
    *way, last, value = way_and_value
    spec = json.loads((folder / "policy_spec.json").read_text())
    functools.reduce(operator.getitem, way, spec)[last] = value
    (folder / "policy_spec.json").write_text(json.dumps(spec))


def test_the_client_refuses_a_model_that_its_spec_does_not_describe(copied):
    shutil.copy(copied / "model_sample.onnx", copied / "model.onnx")
    with pytest.raises(ValueError, match="is not the file"):
        open_client(copied)


FILE, BLOCKS = ("files", "serving_default"), ("noise", "blocks")
INPUT = ("signatures", "serving_default", "inputs", 0)


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((*FILE, "../onnx/model.onnx"), "which is not a file in its folder"),
        ((*FILE, "/etc/passwd"), "which is not a file in its folder"),
        ((*INPUT, "shape", ["batch", 10**6, 10**6]), "arrays of 1000000000000 numbers"),
        ((*INPUT, "dtype", "O"), "arrays of 'O'"),
        (
            (*BLOCKS, [["gumbel", 600_000], ["normal", 600_000]]),
            r"noise of \[600000, 600000\] numbers per row; .* at most 1000000",
        ),
        (
            (*BLOCKS, [["gumbel", 3], ["normal", -1]]),
            r"noise of \[3, -1\] numbers per row; each must be at least 0",
        ),
        ((*BLOCKS, [["gumbel", 1.5]]), r"its entry 'noise' is .*1\.5"),
        (
            (*BLOCKS, [["cauchy", 2]]),
            r"noise of the kinds \['cauchy'\]; there are \['gumbel', 'normal', 'logistic'\]",
        ),
    ],
)
def test_the_client_takes_a_foreign_spec_as_data(copied, change, words):
    edit_spec(copied, *change)
    with pytest.raises(ValueError, match=words):
        open_client(copied)


def places_in(tree, path=()):
    """Yields the way to each entry of JSON, to one of each list."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree[:1])
    for key, value in list(entries):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places_in(value, (*path, key))


def test_the_client_runs_or_refuses_any_spec(copied):
    spec = json.loads((copied / "policy_spec.json").read_text())
    client, messages = play_module(copied)["OnnxPolicy"], []
    junk = (10**400, -1, [], [[1]], {}, {"a": 1}, None, True, 0.5, "x" * 5000, "\ud800")
    for *way, last in places_in(spec):
        if "parity" in way or "versions" in way:  # which the client does not read
            continue
        for value in junk:
            (copied / "policy_spec.json").write_text(json.dumps(spec))
            edit_spec(copied, *way, last, value)
            try:
                client(copied)
            except ValueError as error:
                messages.append(str(error))
    assert len(messages) > 200
    longest = max(messages, key=len)
    assert len(longest) < 600, longest[:300]


@pytest.mark.core
def test_the_client_draws_as_much_noise_as_the_model_takes(copied):
    edit_spec(copied, *BLOCKS, [["gumbel", 900_000]])
    with pytest.raises(ValueError, match=r"noise of 900000 numbers per row, but .* takes \[2\]"):
        open_client(copied, sample=True)


@pytest.mark.core
@pytest.mark.parametrize("name", ["policy_spec.json", "model.onnx"])
def test_the_client_reads_regular_files_only(copied, name):
    (copied / name).unlink()
    os.mkfifo(copied / name)
    with pytest.raises(ValueError, match="not a regular file"):
        open_client(copied)


@pytest.mark.core
@pytest.mark.parametrize("nested", [False, True])
def test_the_client_refuses_weights_that_are_in_other_files(copied, nested):
    model = onnx.load(str(copied / "model.onnx"))
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=1)
    tensor.external_data.add(key="location", value="secret.bin")
    if nested:
        value = onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=tensor)
        model.graph.node.add(op_type="Constant", output=["w"]).attribute.append(value)
    else:
        model.graph.initializer.append(tensor)
    sound = (copied / "model.onnx").read_bytes()
    for content, words in (
        (model.SerializeToString(), "has weights in other files"),
        (sound[:-1], "is damaged"),
    ):
        (copied / "model.onnx").write_bytes(content)
        edit_spec(copied, "sha256", "model.onnx", hashlib.sha256(content).hexdigest())
        with pytest.raises(ValueError, match=words):
            open_client(copied)


@pytest.mark.parametrize("tag", [b"\x6a", b"\xea\x80\x80\x80\x00", b"\xea\x80\x80\x80\x10"])
def test_no_spelling_of_a_field_hides_that_weights_lie_in_other_files(tag):
    """The last one has a bit beyond 32, which ONNX Runtime cuts off."""

    def field(start, content):
        return start + bytes([len(content)]) + content

    entry = onnx.StringStringEntryProto(key="location", value="secret.bin").SerializeToString()
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[3], data_location=1).SerializeToString()
    graph = field(b"\x2a", tensor + field(tag, entry))
    with pytest.raises(ValueError, match=r"in other files|is damaged"):
        rebuild_model(Path("model.onnx"), field(b"\x3a", graph))


def get_digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_versions_count_up_and_onnx_files_are_replaced(tmp_path):
    policy = make()
    (tmp_path / "7").mkdir()
    (tmp_path / "notes").mkdir()
    paths = [policy.export_model(tmp_path).path.name for _ in range(2)]
    assert paths == ["8", "9"]
    policy.export_model(tmp_path, onnx=True)
    before = get_digests(tmp_path)
    factories.varied(policy, 1).export_model(tmp_path, onnx=True)
    changed = {name for name, value in get_digests(tmp_path).items() if before[name] != value}
    assert changed == {"model.onnx", "model_sample.onnx", "policy_spec.json", "MODEL_CARD.md"}
    assert policy.export_model(tmp_path / "new" / "place").path == tmp_path / "new" / "place" / "1"


def test_the_folder_of_all_versions_is_loaded_as_the_newest_one(tmp_path):
    policy = make()
    obs = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "mine").touch()
    for seed in (1, 2):
        factories.varied(policy, seed).export_model(tmp_path)
        served = tf.saved_model.load(tmp_path).signatures["serving_default"](obs=tf.constant(obs))
        logits = policy.compute_actions(obs)[2]["action_dist_inputs"]
        np.testing.assert_allclose(served["action_dist_inputs"], logits, rtol=1e-5)
    links = {path.name: os.readlink(path) for path in tmp_path.iterdir() if path.is_symlink()}
    files = ("saved_model.pb", "fingerprint.pb", "variables")
    assert links == {"newest": "2", **{name: f"newest/{name}" for name in files}}
    assert (tmp_path / "assets" / "mine").is_file()


@pytest.mark.core
def test_tensors_that_a_function_holds_become_constants_of_its_graph():
    factors = tf.constant([2.0, 3.0])
    spec = tf.TensorSpec([None, 2], tf.float32, name="x")
    content = convert(tf.function(lambda x: x * factors), [spec], ["y"])
    session = make_cpu_session(content)
    assert [x.name for x in session.get_inputs()] == ["x"]
    assert session.run(["y"], {"x": np.ones((1, 2), np.float32)})[0].tolist() == [[2.0, 3.0]]


@pytest.mark.core
def test_what_a_killed_export_left_goes_with_the_next_one_and_a_running_one_stays(tmp_path):
    killed, running = (tmp_path / f".export.0000000{i}.tfp-tmp" for i in (1, 2))
    for folder in (killed, running):
        (folder / "saved_model").mkdir(parents=True)
    lock = FolderLock(running)
    assert make().export_model(tmp_path).path.name == "1"
    assert {x.name for x in tmp_path.iterdir() if not x.is_symlink()} == {running.name, "1"}
    lock.release()


@keras.saving.register_keras_serializable(package="tests")
class PythonLayer(keras.layers.Layer):
    """Runs NumPy code, which neither format can hold."""

    def call(self, inputs):
        outputs = tf.numpy_function(lambda x: x * 2, [inputs], tf.float32)
        return tf.ensure_shape(outputs, inputs.shape)

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.parametrize("onnx_option", [None, True])
def test_a_failed_export_leaves_the_folder_as_it_was(tmp_path, onnx_option):
    good = make()
    good.export_model(tmp_path / "out", onnx=onnx_option)
    before = get_digests(tmp_path)
    diverged = make_diverged(make())
    model = keras.Sequential([PythonLayer(), keras.layers.Dense(2)])
    python = factories.make(obs=CARTPOLE.observation_space, model={"custom_model": model})
    for policy, reason in ((diverged, "not finite"), (python, "runs Python code")):
        for folder in (tmp_path / "out", tmp_path / "not" / "there"):
            with pytest.raises(ExportError, match=reason):
                policy.export_model(folder, onnx=onnx_option)
    assert get_digests(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_that_cannot_be_written_is_refused_and_old_files_are_put_back(tmp_path):
    policy = make()
    policy.export_model(tmp_path, onnx=True)
    (tmp_path / "policy_spec.json").unlink()
    (tmp_path / "policy_spec.json").mkdir()
    before = get_digests(tmp_path)
    with pytest.raises(ExportError, match="is a folder"):
        factories.varied(policy, 1).export_model(tmp_path, onnx=True)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ExportError, match="which is unchanged"):
        policy.export_model(tmp_path / "file")
    (tmp_path / "file").unlink()
    assert get_digests(tmp_path) == before


def test_input_names_that_would_collide_are_numbered_and_odd_ones_are_made_identifiers(tmp_path):
    box = spaces.Box(-1, 1, (1,))
    policy = make(spaces.Dict({"a_b": box, "a": spaces.Dict(b=box)}))
    path = policy.export_model(tmp_path / "out", onnx=True).path
    assert [x.name for x in onnx.load(path).graph.input] == ["obs_a_b", "obs_a_b_1"]
    policy = make(spaces.Dict({"left/arm": box, "right arm": box}))
    path = policy.export_model(tmp_path, onnx=True).path
    assert [x.name for x in onnx.load(path).graph.input] == ["obs_left_arm", "obs_right_arm"]
    action = policy.compute_single_action({"left/arm": [0.5], "right arm": [-1.0]}, explore=False)
    client = open_client(path)
    assert client.act({"left/arm": [0.5], "right arm": [-1.0]}) == action[0]


def test_the_opset_is_honoured(tmp_path):
    policy = make()
    for opset in (11, 13, 17):
        path = policy.export_model(tmp_path, onnx=opset).path
        assert {x.domain: x.version for x in onnx.load(path).opset_import}[""] == opset
        assert json.loads((tmp_path / "policy_spec.json").read_text())["opset"] == opset
    before = get_digests(tmp_path)
    for opset in (3, 10, 19, 99, -1, 0, "13", "", 13.0, 0.0):
        for form in ({}, {"web": True}, {"layout": "triton"}, {"litert": True}):
            with pytest.raises(ExportError, match=f"an integer from 11 to 18, got {opset!r}"):
                policy.export_model(tmp_path, onnx=opset, **form)
    with pytest.raises(ExportError) as caught:
        policy.export_model(tmp_path, onnx="x" * 10_000)
    assert len(str(caught.value)) < 400
    assert get_digests(tmp_path) == before


def test_a_missing_converter_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)  # as if it were not installed
    with pytest.raises(MissingPackageError, match="requires `tf2onnx`") as caught:
        make().export_model(tmp_path / "out", onnx=True)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)
    assert not (tmp_path / "out").exists()


def test_exporting_draws_no_noise_and_counts_no_steps(tmp_path):
    policy = make()
    before = policy.get_state()
    policy.export_model(tmp_path)
    after = policy.get_state()
    assert (after["rng"], after["global_timestep"]) == (before["rng"], before["global_timestep"])


def test_an_algorithm_exports_its_policies_by_id(tmp_path, small_algorithm):
    result = small_algorithm.export_policy_model(tmp_path)
    assert (result.path / "saved_model.pb").exists()
    with pytest.raises(UnknownPolicyError, match="No policy 'nobody'"):
        small_algorithm.export_policy_model(tmp_path, "nobody")


def test_random_observations_lie_in_their_space_and_near_zero_where_it_has_no_bounds():
    space = spaces.Dict(
        a=spaces.Box(-np.inf, np.inf, (3,)),
        b=spaces.Box(np.array([5.0, -3e38], "f"), np.array([np.inf, 3e38], "f")),
        c=spaces.Box(0, 255, (2,), np.uint8),
        d=spaces.Box(-3, 4, (), np.int64),
        e=spaces.MultiDiscrete([2, 3], start=[1, -1]),
        f=spaces.Discrete(2, start=9),
        g=spaces.MultiBinary([2, 2]),
    )
    rows = draw_observations(leaves(space), 300, np.random.default_rng(0))
    for leaf, batch in zip(leaves(space), rows, strict=True):
        assert batch.dtype == leaf.dtype
        assert batch.shape == (300, *leaf.shape)
        assert all(leaf.space.contains(np.asarray(row, leaf.space.dtype)) for row in batch)
        assert len(np.unique(batch, axis=0)) > 1
    assert 1.0 < np.abs(rows[0]).max() < 100.0
    assert np.abs(rows[1]).max() < 100.0


@pytest.mark.core
@pytest.mark.parametrize("fails", ["convert.from_function", "optimizer._optimizers"])
def test_a_graph_is_optimized_in_place_and_on_copies_where_that_fails(monkeypatch, fails):
    """An optimizer that fails is left out, which needs the graph as it was before."""

    def failing(*args, **kwargs):
        raise ValueError(fails)

    replacement = {"first": failing} if fails.endswith("optimizers") else failing
    monkeypatch.setattr(f"tf2onnx.{fails}", replacement)
    spec = tf.TensorSpec([None, 2], tf.float32, name="x")
    function = tf.function(lambda x: (2.0 * x + 1.0,), input_signature=[spec], autograph=False)
    session = make_cpu_session(convert(function, [spec], ["y"]))
    (result,) = session.run(["y"], {"x": np.array([[1.0, -3.0]], np.float32)})
    assert result.tolist() == [[3.0, -5.0]]
