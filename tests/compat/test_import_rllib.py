"""Import of checkpoints that RLlib 2.10 wrote."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import Policy
from tfpolicies.cli import main
from tfpolicies.compat.import_rllib import import_checkpoint
from tfpolicies.compat.pickle_process import ObjectRecord
from tfpolicies.compat.rllib_checkpoint_config import convert_policy_spec
from tfpolicies.compat.rllib_networks import convert_network_weights, make_network, make_q_network
from tfpolicies.compat.rllib_policies import make_policy_networks
from tfpolicies.compat.rllib_spaces import convert_space
from tfpolicies.errors import (
    CheckpointError,
    ModelImportError,
    ModelSettingError,
    SpaceError,
    UnsupportedSpaceError,
)
from tfpolicies.models.catalog.q_network import QHeads
from tools.import_rllib import MOST, differences

STORED = Path(__file__).parents[1] / "stored" / "rllib"
KINDS = ("mlp", "cnn", "lstm", "dqn", "sac")
CASES = [f"{case}-{framework}" for case in KINDS for framework in ("tf", "tf2")]
CLASSES = {"dqn": "DQN", "sac": "SAC"}
COUNTS = {"dqn": (1000, 25), "sac-tf": (520, 13), "sac-tf2": (120, 3)}  # steps and updates
MORE = {**{kind: ["vf_preds"] for kind in ("mlp", "cnn", "lstm")}, "sac-tf2": ["critic_values"]}
VECTOR = {"space": {"space": "box", "low": -np.ones(2, "f4"), "high": np.ones(2, "f4"),
                    "shape": (2,), "dtype": "<f4"}}  # fmt: skip
PAIR = {"space": {"space": "discrete", "n": 2, "start": 0}}


def array(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 10


def make_state(model=None, weights=None, **more):
    """Returns a state as RLlib pickles it, of a policy without hidden layers."""
    config = {"framework": "tf2", "model": {"fcnet_hiddens": [], "vf_share_layers": True}}
    config["model"] |= model or {}
    spec = {"policy_class": "PPOTF2Policy", "observation_space": VECTOR, "action_space": PAIR}
    spec["config"] = {**config, **more.pop("config", {})}
    if weights is None:
        weights = [array(2, 2), array(2), array(2, 1), array(1)]
    return {"weights": weights, "policy_spec": {**spec, **more}}


def write(folder: Path, state, **description) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy_state.pkl").write_bytes(pickle.dumps(state))
    record = {"type": "Policy", "checkpoint_version": "1.1", **description}
    (folder / "rllib_checkpoint.json").write_text(json.dumps(record))
    return folder


def import_state(folder: Path, state):
    (imported,) = import_checkpoint(write(folder, state)).values()
    return imported


def convert(state):
    return convert_policy_spec(state["policy_spec"])


def get_class(path):
    return ObjectRecord(path, None, None, [])


def act(folder, state, obs):
    """Imports a policy; returns the extra outputs of its greedy actions."""
    return import_state(folder, state).policy.compute_actions(obs, explore=False).extras


@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.soak) for x in CASES])
def test_an_imported_policy_acts_as_it_did_in_rllib(case, tmp_path, capsys):
    assert main(["import-rllib", str(STORED / case), str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "Not imported" in output
    assert "the state of the optimizer" in output
    kind, framework = case.split("-")
    assert ("clip=None" in output) == (kind in ("mlp", "dqn", "sac"))
    policy = Policy.from_checkpoint(tmp_path / "out")
    runtime = "TF2" if framework == "tf2" else "TF1"
    assert type(policy).__name__ == f"{CLASSES.get(kind, 'PPO')}{runtime}Policy"
    counted = COUNTS.get(case, COUNTS.get(kind, (40, 2)))
    assert (policy.global_timestep, policy.num_grad_updates) == counted
    assert policy.config["lr"] == 1e-3
    with np.load(STORED / case / "expected.npz") as expected:
        actual = differences(policy, dict(expected))
    assert actual.keys() == {"actions", "action_dist_inputs", *MORE.get(case, MORE.get(kind, ()))}
    assert max(actual.values()) <= MOST


@pytest.mark.core
def test_weights_of_a_list_go_by_their_order(tmp_path):
    extras = act(tmp_path, make_state(), np.array([[1.0, 2.0]]))
    np.testing.assert_allclose(extras["action_dist_inputs"], [[0.4 + 0.0, 0.7 + 0.1]], rtol=1e-6)
    np.testing.assert_allclose(extras["vf_preds"], [0.2], rtol=1e-6)


def q_state(weights, **config):
    """Returns a state of DQN with one layer before its heads."""
    model = {"fcnet_hiddens": [2], "fcnet_activation": "linear", "vf_share_layers": True}
    defaults = {"hiddens": [1], "dueling": True, "noisy": False, "num_atoms": 1}
    config = {**defaults, "exploration_config": {"type": "EpsilonGreedy"}, **config}
    return make_state(model, weights, policy_class="DQNTFPolicy", config=config)


FEATURES = [np.eye(2, dtype="f4"), np.zeros(2, "f4"), array(2, 1), array(1)]  # and a value


@pytest.mark.core
@pytest.mark.parametrize("named", [False, True])
def test_heads_of_dqn_come_after_the_features_and_an_unused_value(named, tmp_path):
    advantage = [array(2, 1) + 1, array(1), np.array([[1, 3]], "f4"), np.zeros(2, "f4")]
    value = [array(2, 1) + 2, array(1), np.array([[10]], "f4"), np.ones(1, "f4")]
    weights = [*FEATURES, *advantage, *value]
    if named:
        weights = {f"default_policy/dense_{i}/anything": x for i, x in enumerate(weights)}
    imported = import_state(tmp_path, q_state(weights))
    assert imported.not_imported[-1].startswith("target networks, which RLlib does not save")
    policy = imported.policy
    assert policy.config["model"]["fcnet_hiddens"] == [2]
    extras = policy.compute_actions(np.ones((1, 2)), explore=False).extras
    a, v = 2.1, 4.1  # of the hidden units: 1 + 1.1, 2 + 2.1
    expected = [[10 * v + 1 - a, 10 * v + 1 + a]]  # V + A - mean(A), A = (a, 3 a)
    np.testing.assert_allclose(extras["q_values"], expected, rtol=1e-6)
    state = policy.get_state()
    for key, weight in state["weights"].items():
        np.testing.assert_array_equal(state["target_weights"][f"target/{key}"], weight)


@pytest.mark.core
def test_noisy_layers_and_networks_without_heads_of_dqn(tmp_path):
    noisy = [np.full((2, 2), 9, "f4"), np.full(2, 8, "f4"), np.eye(2, dtype="f4"), array(2)]
    weights = [*FEATURES, array(2, 2), array(2), array(2, 2), array(2), *noisy]
    state = q_state(weights, noisy=True, hiddens=[2], dueling=False)
    weights = import_state(tmp_path / "noisy", state).policy.get_weights()
    for role, values in zip(("kernel_sigma", "bias_sigma", "kernel", "bias"), noisy, strict=True):
        np.testing.assert_array_equal(weights[f"layer_2/{role}"], values)

    output = [np.array([[1, 2], [3, 4]], "f4"), array(2), array(2, 1), array(1)]
    state = q_state([*FEATURES[:2], *output], hiddens=[], dueling=False)
    extras = act(tmp_path / "plain", state, np.ones((1, 2)))
    np.testing.assert_allclose(extras["q_values"], [[4.0, 6.1]], rtol=1e-6)


def sac_state(weights, **more):
    """Returns a state of SAC without hidden layers."""
    model = {"fcnet_hiddens": [], "vf_share_layers": True}
    config = {"twin_q": True, "policy_model_config": model, "q_model_config": model}
    config |= more.pop("config", {})
    return make_state(model, weights, policy_class="SACTFPolicy", config=config, **more)


def test_weights_of_sac_are_in_the_order_actor_critics_and_temperature(tmp_path):
    networks = [[array(2, 2) + i, array(2) + i, array(2, 1), array(1)] for i in range(3)]
    weights = [x for network in networks for x in network]
    state = sac_state([*weights, np.float32(-1.5)])
    result = import_state(tmp_path / "whole", state).policy.get_state()
    expected = [x for network in networks for x in network[:2]]
    for values, weight in zip(expected, result["weights"].values(), strict=False):
        np.testing.assert_array_equal(weight, values)
    assert result["weights"]["temperature/layer_0/log_alpha"] == np.float32(-1.5)
    bias = result["target_weights"]["critic_target/layer_0/bias#1"]
    np.testing.assert_array_equal(bias, networks[2][1])
    with pytest.raises(CheckpointError, match="13 arrays are expected, and there are 12"):
        import_checkpoint(write(tmp_path / "part", sac_state(weights)))


IMAGE = {"space": {"space": "box", "low": np.zeros((2, 2, 1), "u1"), "dtype": "|u1",
                   "high": np.full((2, 2, 1), 255, "u1"), "shape": (2, 2, 1)}}  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_convolutions_before_heads_have_the_width_of_the_last_layer(shared, tmp_path):
    kernel = np.arange(8, dtype="f4").reshape(2, 2, 1, 2) / 1000
    convolution, head = [kernel, array(2)], [array(2, 2), array(2)]
    value = [array(2, 1), array(1)] if shared else [np.ones((1, 1, 7, 1), "f4"), array(1)]
    apart = [] if shared else [np.ones((2, 2, 1, 7), "f4"), np.zeros(7, "f4")]
    first = [*convolution, *value] if shared else [*apart, *value, *convolution]
    model = {
        "conv_filters": [[7, 2, 1]],  # 7 is not used: the width is that of `fcnet_hiddens`
        "conv_activation": "linear",
        "fcnet_hiddens": [2],
        "vf_share_layers": shared,
    }
    weights = [*first, *head, array(2, 2) + 1, array(2)]
    state = q_state(weights, model=model, hiddens=[2], dueling=False)
    state["policy_spec"]["observation_space"] = IMAGE
    image = np.array([[[[10], [20]], [[30], [40]]]], "u1")
    features = np.float64(kernel).reshape(4, 2).T @ image.reshape(4) + array(2)
    hidden = np.maximum(features @ array(2, 2) + array(2), 0)
    expected = hidden @ (array(2, 2) + 1) + array(2)
    np.testing.assert_allclose(act(tmp_path, state, image)["q_values"], [expected], rtol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(
    ("model", "order", "settings"),
    [
        ({"fcnet_hiddens": []}, ["fc_out", "value_out"], ([256], "swish")),
        (
            {"fcnet_hiddens": [8, 6], "vf_share_layers": True},
            ["fc_1", "fc_out", "value_out"],
            ([8, 6], "relu"),
        ),
        (
            {"fcnet_hiddens": [8], "post_fcnet_hiddens": [6]},
            ["fc_value_1", "fc_1", "fc_value_2", "fc_out", "value_out"],
            ([8, 8], "relu"),
        ),
    ],
)
def test_layers_before_heads_end_in_one_without_an_activation(model, order, settings):
    heads = QHeads((5,), dueling=True, num_atoms=1, noisy=False, sigma0=0.5)
    config_values = {"fcnet_activation": "relu", "post_fcnet_activation": "swish", **model}
    result = make_q_network(heads, config_values, spaces.Box(-1, 1, (4,)), spaces.Discrete(3))
    heads = [f"heads/{x}" for x in ("advantage_1", "advantage_out", "value_1", "value_out")]
    assert result.order == [*order, *heads]
    assert result.layer_names["fc_out"] == f"fc_{len(settings[0])}"
    assert (result.settings["fcnet_hiddens"], result.settings["fcnet_activation"]) == settings
    assert result.settings["post_fcnet_hiddens"] == []
    assert not result.settings["no_final_linear"]


def test_the_actor_of_sac_has_both_configs_and_may_have_one_deviation_for_all(tmp_path):
    actor = [array(2), array(2, 3) + 1, array(3), array(3, 2) + 2, array(2), array(3, 1), array(1)]
    critic = [array(4, 1), array(1), array(4, 1), array(1)]
    config = {
        "model": {"fcnet_hiddens": [9], "vf_share_layers": True, "free_log_std": True},
        "policy_model_config": {"fcnet_hiddens": [3]},
        "q_model_config": {"fcnet_hiddens": [], "free_log_std": False},
        "twin_q": False,
    }
    state = sac_state([*actor, *critic, 0.5], config=config, action_space=VECTOR)
    policy = import_state(tmp_path, state).policy
    weights = {tuple(w.shape): w for w in policy.get_weights().values()}
    for values in (actor[1], actor[2], actor[3], critic[0]):
        np.testing.assert_array_equal(weights[values.shape], values)
    assert policy.config["model"]["free_log_std"] is True
    assert len(policy.get_weights()) == 8


NESTED = {"space": {"space": "dict", "spaces": {"a": VECTOR["space"], "b": PAIR["space"]}}}
FLAT = {"space": {**VECTOR["space"], "low": -np.ones(4, "f4"), "high": np.ones(4, "f4"),
                  "shape": (4,)}, "original_space": NESTED}  # fmt: skip


PAIR_OF_NUMBERS = np.array([1, 2])
HOSTILE = [
    *({"model": {name: value}} for name in ("fcnet_hiddens", "post_fcnet_hiddens", "conv_filters")
      for value in (3, PAIR_OF_NUMBERS, ["a"])),
    *({"model": {name: PAIR_OF_NUMBERS}} for name in ("custom_model", "use_lstm", "free_log_std")),
]  # fmt: skip


def make_networks(result):
    return make_policy_networks(result, spaces.Box(-1, 1, (2,)), spaces.Discrete(2)).parts


def get_names(result):
    return [line.partition("=")[0] for line in result.not_imported]


@pytest.mark.parametrize("config", HOSTILE, ids=str)
@pytest.mark.parametrize("algorithm", ["PPO", "DQN", "SAC"])
def test_values_that_no_network_has_are_named(config, algorithm):
    ((name, _),) = config["model"].items()
    if algorithm == "DQN":
        state = q_state([], **config)
    elif algorithm == "PPO":
        state = make_state([], config=config)
    else:
        state = sac_state([], config={"policy_model_config": {}, "q_model_config": {}, **config})
    with pytest.raises((CheckpointError, ModelSettingError), match=name):
        make_networks(convert(state))


@pytest.mark.core
def test_wrong_values_of_settings_are_listed_and_the_networks_imported():
    strange = {"hiddens": 3, "noisy": PAIR_OF_NUMBERS, "num_atoms": "x", "dueling": 0,
               "exploration_config": {"type": PAIR_OF_NUMBERS}, "td_error_loss_fn": PAIR_OF_NUMBERS,
               "replay_buffer_config": {"replay_sequence_length": PAIR_OF_NUMBERS},
               "categorical_distribution_temperature": PAIR_OF_NUMBERS}  # fmt: skip
    result = convert(q_state([], **strange))
    assert sorted(get_names(result)) == sorted(strange)
    (network,) = make_networks(result)
    assert network.order[-2:] == ["heads/value_1", "heads/value_out"]

    result = convert(sac_state([], config={"twin_q": PAIR_OF_NUMBERS}))
    assert len(make_networks(result)) == 4
    assert get_names(result) == ["twin_q"]


@pytest.mark.core
def test_unknown_settings_of_networks_are_listed_and_a_config_may_be_an_object():
    model = {"fcnet_hiddens": [], "of_the_future": 7}
    state = sac_state([], config={"policy_model_config": model})
    assert convert(state).not_imported == ["policy_model_config['of_the_future']=7"]
    config = state["policy_spec"]["config"]
    config["framework_str"] = config.pop("framework")
    state["policy_spec"]["config"] = ObjectRecord("ray.rllib:SACConfig", None, config, [])
    result = convert(state)
    assert result.policy_class.__name__ == "SACTF2Policy"
    assert len(make_networks(result)) == 4


@pytest.mark.core
def test_replay_buffers_are_found_by_their_names():
    module = "ray.rllib.utils.replay_buffers.multi_agent_prioritized_replay_buffer"
    stored = {"prioritized_replay": -1, "capacity": 70, "prioritized_replay_alpha": 0.5}
    stored |= {"replay_sequence_length": 1, "worker_side_prioritization": False}
    stored |= {"type": get_class(f"{module}:MultiAgentPrioritizedReplayBuffer")}
    result = convert(q_state([], replay_buffer_config=stored))
    assert result.not_imported == []
    buffer = result.config["replay_buffer_config"]
    assert (buffer["capacity"], buffer["prioritized_replay_alpha"]) == (70, 0.5)
    assert buffer["type"] == "MultiAgentPrioritizedReplayBuffer"
    unread = {**stored, "prioritized_replay": False}  # as SAC has it, and no code of RLlib reads
    result = convert(q_state([], replay_buffer_config=unread))
    assert result.config["replay_buffer_config"] == buffer
    custom = {**stored, "type": get_class("mine:Buffer")}
    result = convert(q_state([], replay_buffer_config=custom))
    assert result.not_imported == ["replay_buffer_config=<with custom objects>"]


def test_several_policies_get_a_folder_each_or_none_is_written(tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    write(whole, {}, type="Algorithm", policy_ids=["a", "b"])
    write(whole / "policies" / "a", make_state())
    write(whole / "policies" / "b", make_state(weights=[]))
    assert main(["import-rllib", str(whole), str(out)]) != 0
    assert not out.exists()
    write(whole / "policies" / "b", make_state())
    assert main(["import-rllib", str(whole), str(out)]) == 0
    assert sorted(x.name for x in out.iterdir()) == ["a", "b"]
    assert Policy.from_checkpoint(out / "b").policy_id == "b"
    assert main(["import-rllib", str(whole), str(out)]) != 0
    assert "exists already" in capsys.readouterr().err


REFUSED = [
    (make_state({"use_attention": True}), "use_attention"),
    (make_state({"custom_model": "mine"}), r"custom_model'\]='mine'"),
    (make_state(policy_class="SimpleQTFPolicy"), "SAC, got 'SimpleQTFPolicy'"),
    (make_state(config={"framework": "torch"}), "framework must be"),
    (make_state(weights=[array(2, 2)]), "4 arrays are expected, and there are 1"),
    (make_state(weights={"fc_out/kernel": array(2, 2)}), "'fc_out/bias'"),
    (make_state(observation_space=PAIR), "ComplexInputNetwork"),
    (make_state(config={"observation_filter": "MeanStdFilter"}), "enable_connectors=True"),
    ({"weights": []}, "policy_spec"),
    ([1], "must hold a dict"),
    (q_state([], hiddens=[]), r"DQN with hiddens=\[\] and dueling"),
    (q_state([], exploration_config={"type": "ParameterNoise"}), "LayerNormalization"),
    (q_state([], model={"use_lstm": True}), "replays single steps"),
    (q_state([], model={"no_final_linear": True}, hiddens=[], dueling=False), "no_final_linear"),
    (
        sac_state([], config={"model": {"custom_model": "mine", "fcnet_hiddens": []}}),
        r"custom_model'\]='mine'",
    ),
    (sac_state([], config={"policy_model_config": {"free_log_std": True}}), "free_log_std"),
    (
        sac_state([], action_space=VECTOR, config={"_use_beta_distribution": True}),
        "_use_beta_distribution",
    ),
    (
        sac_state([], config={"q_model_config": None}),
        "`q_model_config` in the checkpoint.s config must be a dict, got None",
    ),
    (
        sac_state([], observation_space=FLAT, action_space=VECTOR),
        r"SAC's critics for the observation space Dict\(",
    ),
]
WRONG_SHAPE = [array(2, 3), array(3), array(2, 1), array(1)]
NOT_FINITE = [array(2, 2), array(2) * np.nan, array(2, 1), array(1)]


@pytest.mark.core
@pytest.mark.parametrize(
    ("state", "words", "error"),
    [
        *((*case, CheckpointError) for case in REFUSED),
        (make_state(weights=WRONG_SHAPE), r"\(2, 3\).*\(2, 2\)", ModelImportError),
        (make_state(weights=NOT_FINITE), "NaN", ModelImportError),
        (make_state(action_space={"space": {"space": "text"}}), "'text'", UnsupportedSpaceError),
    ],
)
def test_a_policy_that_cannot_be_imported_is_named_with_the_reason(state, words, error, tmp_path):
    with pytest.raises(error, match=words) as result:
        import_checkpoint(write(tmp_path, state))
    assert str(result.value).startswith(f"Policy 'default_policy' of {str(tmp_path)!r}: ")


@pytest.mark.core
@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "RLModule"}, "must be a checkpoint of an Algorithm or Policy, got 'RLModule'"),
        ({"format": "msgpack"}, "checkpoint_format='cloudpickle'"),
        ({"type": "Algorithm"}, "names no policies"),
        *(
            ({"type": "Algorithm", "policy_ids": [name, "p"]}, "which is not a valid id")
            for name in ("../a", "..", ".", "", "a\0b", 3)
        ),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(message, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        import_checkpoint(write(tmp_path, make_state(), **message))
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no rllib_checkpoint\.json"):
        import_checkpoint(tmp_path)


@pytest.mark.core
def test_settings_are_converted_by_their_names_and_others_are_listed():
    settings = {"gamma": 0.9, "lambda": 0.5, "sgd_minibatch_size": 7, "num_sgd_iter": 3}
    defaults = {"torch_compile_learner": False, "sample_async": -1, "_rl_module_spec": None}
    defaults |= {"sample_collector": get_class("ray.rllib:Collector")}
    defaults |= {"callbacks": get_class("ray.rllib.algorithms.callbacks:DefaultCallbacks")}
    others = {"env": get_class("mine:Env"), "remote_worker_envs": True, "of_the_future": 3}
    result = convert(make_state(config={**settings, **defaults, **others}))
    assert [result.config[name] for name in ("gamma", "lambda_", "num_sgd_iter")] == [0.9, 0.5, 3]
    assert result.config["sgd_minibatch_size"] == 7
    assert result.policy_class.__name__ == "PPOTF2Policy"
    env, future, remote = result.not_imported
    assert env == "env=<mine:Env>"
    assert future.startswith("of_the_future=3 (Invalid property name")
    assert remote.startswith("remote_worker_envs=True (env_processes=N spreads")


@pytest.mark.core
def test_spaces_are_rebuilt_from_records_and_from_pickled_objects():
    inner = {"a": VECTOR["space"], "b": PAIR["space"]}
    result = convert_space({"space": {"space": "dict", "spaces": inner}}, "observation_space")
    assert result == spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Discrete(2))
    reverse = {"space": {"space": "dict", "spaces": dict(reversed(inner.items()))}}
    assert [*convert_space(reverse, "observation_space").spaces] == ["b", "a"]
    state = {"_shape": (), "n": 4, "start": 1}
    pickled = ObjectRecord("gymnasium.spaces.discrete:Discrete", None, state, [])
    both = {"space": {"space": "tuple", "spaces": [pickled, PAIR["space"]]}}
    expected = spaces.Tuple([spaces.Discrete(4, start=1), spaces.Discrete(2)])
    assert convert_space(both, "action_space") == expected
    with pytest.raises(UnsupportedSpaceError, match="os:system"):
        convert_space(ObjectRecord("os:system", ("true",), {}, []), "action_space")
    for broken in ({**VECTOR["space"], "shape": (3,)}, {"space": "box"}, {"space": ["box"]}, 3):
        with pytest.raises((CheckpointError, SpaceError)):
            convert_space({"space": broken} if broken != 3 else 3, "action_space")


@pytest.mark.core
def test_eager_lists_are_in_the_order_of_keras_2():
    vector, image = spaces.Box(-1, 1, (4,)), spaces.Box(0, 255, (42, 42, 3), np.uint8)

    def get_order(space, **model):
        settings = {"vf_share_layers": False, **model}
        return " ".join(make_network(settings, space, spaces.Discrete(3)).order)

    expected = "fc_1 fc_value_1 fc_2 fc_value_2 fc_out value_out"
    assert get_order(vector, fcnet_hiddens=[8, 6]) == expected
    expected = "fc_value_1 fc_1 value_out lstm logits values"
    assert get_order(vector, fcnet_hiddens=[8], use_lstm=True) == expected
    expected = "conv_value_1 conv1 conv_value_2 conv2 conv_value_3 conv3 conv_value_out conv_out"
    assert get_order(image, conv_filters=[[2, 4, 2], [3, 4, 2], [4, 11, 1]]) == expected


@pytest.mark.core
def test_kernels_for_images_of_0_to_255_are_scaled_to_images_of_0_to_1():
    image = spaces.Box(0, 255, (10, 10, 1), np.uint8)
    network = make_network({"conv_filters": [[1, 10, 1]], "vf_share_layers": True}, image, None)
    weights = [np.ones((10, 10, 1, 1), "f4"), array(1), array(1, 1, 1, 2), array(2)]
    result = convert_network_weights([*weights, array(1, 1), array(1)], network)
    kernels = {layer.name: layer.weights[0].array for layer in result.layers}
    assert kernels["conv_1"].max() == kernels["conv_1"].min() == 255
    assert kernels["fc_out"].shape == (1, 2)
    with pytest.raises(CheckpointError, match="whose value shares no layers"):
        make_network({"post_fcnet_hiddens": [3], "vf_share_layers": False}, image, None)
