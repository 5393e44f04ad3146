"""Models of other libraries as policies, and refusals of files that do more than compute."""

import copy
import math
import os
import pickle
import zipfile

import gymnasium as gym
import keras
import numpy as np
import onnx
import pytest
import tensorflow as tf
from gymnasium import spaces
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from helpers import foreign_models
from helpers.foreign_models import POLE, SB3, TORQUE, assert_refused, make_dense, save_function
from helpers.quick_configs import quick_config
from tfpolicies import Policy, PolicyMap, PPOTF2Policy, import_policy
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import (
    CheckpointError,
    FrozenPolicyError,
    MissingModelFileError,
    ModelImportError,
    SpaceError,
    UsageError,
)
from tfpolicies.export import player

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def import_dense(model=None, **settings):
    """Imports a dense Keras model with its output as logits."""
    return import_policy(model or make_dense(), **POLE, names={"logits": "output_0"}, **settings)


def get_sign(x):
    return {"actions": x[:, 0] > 0}


def change_saved_model(folder, change):
    """Saves a SavedModel and changes its `MetaGraphDef`; returns the result of `change`."""
    path = save_function(folder, get_sign) / "saved_model.pb"
    model = SavedModel.FromString(path.read_bytes())
    result = change(model.meta_graphs[0])
    path.write_bytes(model.SerializeToString())
    return result


@pytest.mark.core
def test_policies_of_stable_baselines3_act_as_they_predict():
    with np.load(SB3 / "expected.npz") as stored:
        expected = dict(stored)
    logits = import_policy(SB3 / "ppo.onnx", **POLE)
    actions = logits.compute_actions(expected["ppo_obs"]).actions
    np.testing.assert_array_equal(actions, expected["ppo_actions"])
    squashed = import_policy(SB3 / "sac.onnx", **TORQUE, normalized=True)
    actions = squashed.compute_actions(expected["sac_obs"]).actions
    for_env = squashed.driver.acting.to_env([actions])[0]
    np.testing.assert_allclose(for_env, expected["sac_actions"], atol=1e-5)


@pytest.mark.parametrize("flat", [False, True], ids=["function", "signature"])
def test_a_policy_of_tf_agents_keeps_its_memory(flat, tmp_path):
    module = foreign_models.TFAgentsPolicy()
    if flat:
        tf.saved_model.save(tf.Module(), str(tmp_path), signatures=module.get_flat_signatures())
    else:
        tf.saved_model.save(module, str(tmp_path))
    both = {"observation_space": spaces.Box(-9, 9, (3,)), "action_space": spaces.Discrete(3)}
    policy = import_policy(tmp_path, **both, seed=1)
    np.testing.assert_array_equal(policy.get_initial_state(), [[0.25, 0.25, 0.25]])
    session, rows = policy.session(), ([0, 1, 0], [2, 0, 0], [0, 1, 0], [0, 1, 0])
    assert [int(session.act(row)) for row in rows] == [1, 0, 0, 1]
    batch = policy.compute_actions(np.array([[0, 0, 1], [1, 0, 0]], np.float32))
    assert batch.actions.tolist() == [2, 0]
    np.testing.assert_allclose(batch.state_outs, [[[0.25, 0.25, 1.25], [1.25, 0.25, 0.25]]])


@pytest.mark.core
def test_a_keras_model_acts_as_object_as_file_and_as_saved_model(tmp_path):
    model = make_dense()
    model.export(tmp_path / "exported", verbose=False)
    model.save(tmp_path / "model.keras")
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    expected = np.asarray(model(obs)).argmax(axis=1)
    for source in (model, tmp_path / "exported", tmp_path / "model.keras"):
        np.testing.assert_array_equal(import_dense(source).compute_actions(obs).actions, expected)


@pytest.mark.parametrize("onnx", [None, True], ids=["SavedModel", "ONNX"])
@pytest.mark.parametrize("memory", [False, True])
def test_exports_of_this_package_need_no_names(onnx, memory, tmp_path):
    settings = {"fcnet_hiddens": [5], "use_lstm": memory, "lstm_cell_size": 4}
    settings |= {"lstm_use_prev_action": memory, "lstm_use_prev_reward": memory}
    space = spaces.Dict(a=spaces.Discrete(3, start=2), b=spaces.Box(-1, 1, (2,)))
    policy = PPOTF2Policy(space, spaces.Box(-2, 3, (2,)), {"model": settings})
    policy.export_model(tmp_path, onnx=onnx)
    other = import_policy(tmp_path)
    assert (other.observation_space, other.action_space) == (space, policy.action_space)
    states, other_states = (
        [np.stack([x] * 3) for x in p.get_initial_state()] for p in (policy, other)
    )
    before, for_env = np.zeros((3, 2), np.float32), np.full((3, 2), 0.5, np.float32)
    rng, rewards = np.random.default_rng(0), np.zeros(3)
    for _ in range(3):
        obs = {"a": np.array([2, 3, 4]), "b": rng.uniform(-1, 1, (3, 2)).astype(np.float32)}
        before, states, extras = policy.compute_actions(obs, states, before, rewards, explore=False)
        for_env, other_states, values = other.compute_actions(obs, other_states, for_env, rewards)
        np.testing.assert_allclose(for_env, policy.driver.acting.to_env([before])[0], atol=1e-5)
        np.testing.assert_allclose(values["vf_preds"], extras["vf_preds"], atol=1e-5)
        rewards = rng.normal(size=3)


def test_an_imported_policy_is_an_opponent_in_training_and_does_not_change():
    other = import_dense(explore=True, seed=0)
    config = quick_config(env=make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.multi_agent(
        policies={"main", "other"},
        policy_mapping_fn=lambda agent_id, episode, **kwargs: ["main", "other"][agent_id],
        policies_to_train=["main"],
    )
    algorithm = config.training(train_batch_size=64, sgd_minibatch_size=32).build()
    mapping = algorithm.worker.policy_mapping_fn
    with pytest.raises(UsageError, match="maps agent 1 to it"):
        algorithm.remove_policy("other")
    algorithm.remove_policy("other", policy_mapping_fn=lambda *args, **kwargs: "main")
    algorithm.add_policy(
        "other", policy=other, policy_mapping_fn=mapping, policies_to_train=["main"]
    )
    result = algorithm.train()
    assert {*result["info"]["learner"]} == {"main"}
    assert result["policy_reward_mean"].keys() == {"main", "other"}


@pytest.mark.core
def test_an_imported_policy_never_learns_and_copies_share_the_model():
    policy = import_dense(explore=True, seed=3)
    for learn in (
        lambda: policy.learn_on_batch({}),
        lambda: policy.apply_gradients([np.zeros(1)]),
        lambda: policy.set_weights({"a": np.zeros(1)}),
    ):
        with pytest.raises(FrozenPolicyError, match="is imported: it acts, but neither learns"):
            learn()
    obs = np.zeros((50, 4), np.float32)
    twin = copy.deepcopy(policy)
    actions = policy.compute_actions(obs).actions
    assert {*actions.tolist()} == {0, 1}
    np.testing.assert_array_equal(twin.compute_actions(obs).actions, actions)
    policies = PolicyMap(capacity=1)
    policies["a"], policies["b"] = policy, policy.copy("b")
    result = policies.compute_actions({"a": obs, "b": obs}, explore=False)
    np.testing.assert_array_equal(result["a"][0], result["b"][0])


def test_a_checkpoint_is_loaded_with_the_model(tmp_path):
    policy = import_dense()
    with pytest.warns(UserWarning, match="stored by name only"):
        policy.export_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="imported"):
        Policy.from_checkpoint(tmp_path)
    restored = Policy.from_checkpoint(tmp_path, config={"imported": policy.config["imported"]})
    obs = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(restored.compute_actions(obs)[0], policy.compute_actions(obs)[0])


def test_logits_of_several_choices_count_from_where_the_space_does(tmp_path):
    space = spaces.MultiDiscrete([2, 3], start=[0, 5])
    folder = save_function(tmp_path, lambda x: {"logits": tf.concat([x, x[:, :1]], axis=1)})
    policy = import_policy(folder, **{**POLE, "action_space": space})
    assert policy.compute_actions(np.array([[1, 2, 3, 9.0]])).actions.tolist() == [[1, 6]]


@pytest.mark.core
def test_a_model_of_one_row_acts_on_many(tmp_path):
    folder = save_function(tmp_path, get_sign, tf.TensorSpec([1, 4]))
    policy = import_policy(folder, **POLE)
    obs = np.array([[1.0, 0, 0, 0], [-1, 0, 0, 0], [2, 0, 0, 0]])
    assert policy.compute_actions(obs).actions.tolist() == [1, 0, 1]


def write(x):
    tf.io.write_file("canary", "x")
    return x[:, :2]


def read(x):
    return x[:, :2] + tf.cast(tf.strings.length(tf.io.read_file("canary")), tf.float32)


def call_python(x):
    return tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32), [None, 4])


def restore(x):  # by the operator of SavedModels' own savers
    arguments = {"tensor_names": ["b"], "shape_and_slices": [""], "dtypes": [tf.float32]}
    return x[:, :2] + tf.raw_ops.RestoreV2(prefix="a", **arguments)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (write, "WriteFile"),
        (read, "ReadFile"),
        (call_python, "PyFunc"),
        (lambda x: tf.cond(x[0, 0] > 0, lambda: read(x), lambda: x[:, :2]), "ReadFile"),
        (restore, "RestoreV2"),
    ],
)
def test_a_saved_model_that_does_more_than_compute_is_not_loaded(function, operator, tmp_path):
    folder = save_function(tmp_path, function)
    assert_refused(folder, rf"was refused before it was run.*{operator}")


@pytest.mark.core
def test_an_onnx_file_has_only_standard_operators_and_its_own_weights(tmp_path):
    model = onnx.load(SB3 / "ppo.onnx")
    model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
    onnx.save(model, tmp_path / "domain.onnx")
    del model.opset_import[-1]
    hidden = onnx.ModelProto()
    hidden.CopyFrom(model)
    hidden.graph.node[0].domain = "com.microsoft"  # which ONNX Runtime always has
    onnx.save(hidden, tmp_path / "hidden.onnx")
    weight = model.graph.initializer[0]
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="/etc/hostname")
    weight.ClearField("raw_data")
    (tmp_path / "outside.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "damaged.onnx").write_bytes(b"\x08\x07" * 9)
    assert_refused(tmp_path / "domain.onnx", "com.example")
    assert_refused(tmp_path / "hidden.onnx", "com.microsoft")
    assert_refused(tmp_path / "outside.onnx", "another file, .*not the name")
    assert_refused(tmp_path / "damaged.onnx", ".")


def test_a_saved_model_with_a_file_that_never_ends_is_refused(tmp_path):
    save_function(tmp_path, get_sign)
    os.mkfifo(tmp_path / "variables" / "variables.data-00001-of-00002")
    assert_refused(tmp_path, "is not a regular file")


@pytest.mark.core
@pytest.mark.parametrize("place", ["root", "serving_default"])
def test_a_saved_model_whose_signature_is_a_variable_is_refused(place, tmp_path):
    def change(graph):
        nodes = graph.object_graph_def.nodes
        places = {x.local_name: x.node_id for node in nodes for x in node.children}
        node = nodes[places.get(place, 0)]
        node.Clear()
        node.variable.dtype = 1

    change_saved_model(tmp_path, change)
    assert_refused(tmp_path, r"cannot be loaded|is not a function of tensors")


@pytest.mark.core
def test_a_saved_model_whose_constants_have_other_types_is_refused(tmp_path):
    def change(graph):
        functions = graph.graph_def.library.function
        constant = next(x for each in functions for x in each.node_def if x.op == "Const")
        constant.attr["value"].tensor.dtype = 14
        return constant.name

    name = change_saved_model(tmp_path, change)
    assert_refused(tmp_path, f"constants {name} are not of the typ")


def test_a_model_with_another_number_of_output_rows_is_named(tmp_path):
    save_function(tmp_path, lambda x: {"actions": tf.boolean_mask(x[:, 0], x[:, 0] > 0.0)})
    policy = import_policy(tmp_path, **POLE)
    assert policy.compute_actions(np.ones((2, 4), np.float32)).actions.tolist() == [1, 1]
    with pytest.raises(ModelImportError, match=r"'actions' has the shape \[1\] for 2 rows"):
        policy.compute_actions(np.float32([[1, 0, 0, 0], [-1, 0, 0, 0]]))


def test_a_saved_model_that_fails_when_it_runs_is_named(tmp_path):
    def fail(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 5.0)]):
            return {"actions": x[:, 0] > 0}

    policy = import_policy(save_function(tmp_path, fail), **POLE)
    with pytest.raises(ModelImportError, match="was loaded, but does not run"):
        policy.compute_actions(np.full((1, 4), 9.0))


@pytest.mark.core
def test_a_saved_model_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(player, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(player, "CALL_CLOCK", player.CallClock())

    def act(x):  # ends if no observation is over 4
        (out,) = tf.while_loop(lambda out: tf.reduce_max(out) > 4.0, lambda out: (out + 1.0,), (x,))
        return {"actions": out[:, :1]}

    folder = save_function(tmp_path / "model", act, foreign_models.per_row(3))
    policy, other = (import_policy(folder, **TORQUE) for _ in range(2))
    restored = pickle.loads(pickle.dumps(policy))
    obs = np.array([[0.5, 2.0, 3.0]])
    assert policy.compute_actions(obs).actions.tolist() == [[0.5]]
    late = r"takes too long: it did not finish in 0\.5 seconds, and was stopped"
    for each in (policy, restored):
        with pytest.raises(ModelImportError, match=late):
            each.compute_actions(obs + 3)
    with pytest.raises(ModelImportError, match="was stopped"):
        policy.compute_actions(obs)
    assert other.compute_actions(obs).actions.tolist() == [[0.5]]
    free = import_policy(folder, **TORQUE, model_work_limit=math.inf)
    assert free.compute_actions(obs).actions.tolist() == [[0.5]]


def test_a_keras_file_that_holds_code_is_refused(tmp_path):
    layers = [keras.Input((4,)), keras.layers.Lambda(lambda x: x[:, :2])]
    keras.Sequential(layers).save(tmp_path / "code.keras")
    assert_refused(tmp_path / "code.keras", "Lambda")


def test_a_keras_file_that_is_nested_without_end_is_refused(tmp_path):
    make_dense().save(tmp_path / "deep.keras")
    twice = pytest.warns(UserWarning, match="Duplicate name")
    with zipfile.ZipFile(tmp_path / "deep.keras", "a") as archive, twice:
        archive.writestr("config.json", "[" * 100_000)
    assert_refused(tmp_path / "deep.keras", "was refused")


@pytest.mark.core
@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"observation_space": None}, SpaceError, "Give observation_space: the ONNX file"),
        ({"action_space": 3}, SpaceError, "Give action_space: .* 3 is not a gymnasium space"),
        ({"action_space": gym.spaces.Text(3)}, SpaceError, "Text"),
        ({"observation_space": spaces.Box(0, 1, (3,))}, ModelImportError, r"\[3\].*'observation'"),
        ({"action_space": spaces.Discrete(3)}, ModelImportError, "3 logits"),
        ({"action_space": spaces.Box(0, 1, (2,))}, ModelImportError, "logits are for Discrete"),
        ({"names": {"obs": "image"}}, ModelImportError, "'image' is not one of.*Its inputs are"),
        ({"names": {"ob": "observation"}}, UsageError, "but not 'ob'. Did you mean 'obs'"),
        ({"names": {"observation": "obs"}}, UsageError, "mean {'obs': 'observation'}"),
        (
            {"names": {"obs": "observation", "actions": "logits"}},
            ModelImportError,
            r"the output 'logits' float32 \[None, 2\] has 2 numbers .* Discrete\(2\) has 1\. If "
            r"they are logits, set names={'logits': 'logits'}",
        ),
    ],
)
def test_a_refusal_of_spaces_or_names_lists_inputs_and_outputs(values, error, words):
    with pytest.raises(error, match=words):
        import_policy(SB3 / "ppo.onnx", **{**POLE, **values})


@pytest.mark.core
def test_missing_files_and_ambiguous_inputs_are_named(tmp_path):
    for name in ("a.onnx", "a.keras", "folder"):
        with pytest.raises(MissingModelFileError):
            import_policy(tmp_path / name, **POLE)
    (tmp_path / "weights.h5").write_bytes(b"weights")
    with pytest.raises(MissingModelFileError, match=r"neither a SavedModel, nor a \.onnx or"):
        import_policy(tmp_path / "weights.h5", **POLE)
    with pytest.raises(UsageError, match=r"takes the path of a model, .* got None"):
        import_policy(None, **POLE)
    two = keras.Input((2,), name="left"), keras.Input((2,), name="right")
    model = keras.Model(two, keras.layers.Concatenate()(two))
    assert_refused(model, r"which tensor is 'obs'.*'left' float32.*'right'")
