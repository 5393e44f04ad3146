"""Checkpoints that RLlib 2.10 wrote become policies that do the same."""

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


def state_of(model=None, weights=None, **more):
    """A state as RLlib pickles it, of a policy without hidden layers."""
    config = {"framework": "tf2", "model": {"fcnet_hiddens": [], "vf_share_layers": True}}
    config["model"] |= model or {}
    spec = {"policy_class": "PPOTF2Policy", "observation_space": VECTOR, "action_space": PAIR}
    spec["config"] = {**config, **more.pop("config", {})}
    own = [array(2, 2), array(2), array(2, 1), array(1)] if weights is None else weights
    return {"weights": own, "policy_spec": {**spec, **more}}


def written(folder: Path, state, **described) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy_state.pkl").write_bytes(pickle.dumps(state))
    results = {"type": "Policy", "checkpoint_version": "1.1", **described}
    (folder / "rllib_checkpoint.json").write_text(json.dumps(results))
    return folder


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
    (imported,) = import_checkpoint(written(tmp_path / "checkpoint", state_of())).values()
    _, _, extras = imported.policy.compute_actions(np.array([[1.0, 2.0]]), explore=False)
    np.testing.assert_allclose(extras["action_dist_inputs"], [[0.4 + 0.0, 0.7 + 0.1]], rtol=1e-6)
    np.testing.assert_allclose(extras["vf_preds"], [0.2], rtol=1e-6)


def q_state(weights, **config):
    """A state of DQN with one layer before its heads."""
    usual = {"hiddens": [1], "dueling": True, "noisy": False, "num_atoms": 1}
    model = {"fcnet_hiddens": [2], "fcnet_activation": "linear", "vf_share_layers": True}
    config = {**usual, "exploration_config": {"type": "EpsilonGreedy"}, **config}
    return state_of(model, weights, policy_class="DQNTFPolicy", config=config)


FEATURES = [np.eye(2, dtype="f4"), np.zeros(2, "f4"), array(2, 1), array(1)]  # and a value


@pytest.mark.core
@pytest.mark.parametrize("named", [False, True])
def test_heads_of_dqn_follow_the_features_and_a_value_of_no_use(named, tmp_path):
    advantage = [array(2, 1) + 1, array(1), np.array([[1, 3]], "f4"), np.zeros(2, "f4")]
    value = [array(2, 1) + 2, array(1), np.array([[10]], "f4"), np.ones(1, "f4")]
    weights = [*FEATURES, *advantage, *value]
    if named:
        weights = {f"default_policy/dense_{i}/anything": x for i, x in enumerate(weights)}
    (imported,) = import_checkpoint(written(tmp_path, q_state(weights))).values()
    assert imported.not_imported[-1].startswith("target networks, which RLlib does not save")
    policy = imported.policy
    assert policy.config["model"]["fcnet_hiddens"] == [2]
    extras = policy.compute_actions(np.ones((1, 2)), explore=False).extras
    a, v = 2.1, 4.1  # of the hidden units: 1 + 1.1, 2 + 2.1
    expected = [[10 * v + 1 - a, 10 * v + 1 + a]]  # V + A - mean(A), A = (a, 3 a)
    np.testing.assert_allclose(extras["q_values"], expected, rtol=1e-6)
    state = policy.get_state()
    kernels = {name: state[name] for name in ("weights", "target_weights")}
    for key, weight in kernels["weights"].items():
        np.testing.assert_array_equal(kernels["target_weights"][f"target/{key}"], weight)


@pytest.mark.core
def test_noisy_layers_and_networks_without_heads_of_dqn(tmp_path):
    noisy = [np.full((2, 2), 9, "f4"), np.full(2, 8, "f4"), np.eye(2, dtype="f4"), array(2)]
    state = q_state(
        [*FEATURES, array(2, 2), array(2), array(2, 2), array(2), *noisy],
        noisy=True,
        hiddens=[2],
        dueling=False,
    )
    (imported,) = import_checkpoint(written(tmp_path / "noisy", state)).values()
    weights = imported.policy.get_weights()
    results = [weights[f"layer_2/{role}"] for role in NOISY_ROLES]
    for array_of, values in zip(results, noisy, strict=True):
        np.testing.assert_array_equal(array_of, values)

    output = [np.array([[1, 2], [3, 4]], "f4"), array(2), array(2, 1), array(1)]
    state = q_state([*FEATURES[:2], *output], hiddens=[], dueling=False)
    (imported,) = import_checkpoint(written(tmp_path / "plain", state)).values()
    extras = imported.policy.compute_actions(np.ones((1, 2)), explore=False).extras
    np.testing.assert_allclose(extras["q_values"], [[4.0, 6.1]], rtol=1e-6)


NOISY_ROLES = ("kernel_sigma", "bias_sigma", "kernel", "bias")


def sac_state(weights, **more):
    """A state of SAC without hidden layers."""
    model = {"fcnet_hiddens": [], "vf_share_layers": True}
    config = {"twin_q": True, "policy_model_config": model, "q_model_config": model}
    config |= more.pop("config", {})
    return state_of(model, weights, policy_class="SACTFPolicy", config=config, **more)


def test_actor_critics_and_temperature_of_sac_follow_each_other(tmp_path):
    networks = [[array(2, 2) + i, array(2) + i, array(2, 1), array(1)] for i in range(3)]
    weights = [x for network in networks for x in network]
    state = sac_state([*weights, np.float32(-1.5)])
    (imported,) = import_checkpoint(written(tmp_path / "whole", state)).values()
    result = imported.policy.get_state()
    kept = [network[:2] for network in networks]
    for values, own in zip(
        [x for pair in kept for x in pair], result["weights"].values(), strict=False
    ):
        np.testing.assert_array_equal(own, values)
    assert result["weights"]["temperature/layer_0/log_alpha"] == np.float32(-1.5)
    np.testing.assert_array_equal(
        result["target_weights"]["critic_target/layer_0/bias#1"], kept[2][1]
    )
    with pytest.raises(CheckpointError, match="13 arrays are expected, and there are 12"):
        import_checkpoint(written(tmp_path / "part", sac_state(weights)))


IMAGE = {"space": {"space": "box", "low": np.zeros((2, 2, 1), "u1"), "dtype": "|u1",
                   "high": np.full((2, 2, 1), 255, "u1"), "shape": (2, 2, 1)}}  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_convolutions_before_heads_are_as_wide_as_the_last_layer_and_see_0_to_255(shared, tmp_path):
    kernel = np.arange(8, dtype="f4").reshape(2, 2, 1, 2) / 1000
    convolution, head = [kernel, array(2)], [array(2, 2), array(2)]
    value = [array(2, 1), array(1)] if shared else [np.ones((1, 1, 7, 1), "f4"), array(1)]
    apart = [] if shared else [np.ones((2, 2, 1, 7), "f4"), np.zeros(7, "f4")]
    first = [*convolution, *value] if shared else [*apart, *value, *convolution]
    model = {
        "conv_filters": [[7, 2, 1]],  # 7 is not read: the width is that of `fcnet_hiddens`
        "conv_activation": "linear",
        "fcnet_hiddens": [2],
        "vf_share_layers": shared,
    }
    weights = [*first, *head, array(2, 2) + 1, array(2)]
    state = q_state(weights, model=model, hiddens=[2], dueling=False)
    state["policy_spec"]["observation_space"] = IMAGE
    (imported,) = import_checkpoint(written(tmp_path, state)).values()
    image = np.array([[[[10], [20]], [[30], [40]]]], "u1")
    features = np.float64(kernel).reshape(4, 2).T @ image.reshape(4) + array(2)
    hidden = np.maximum(features @ array(2, 2) + array(2), 0)
    expected = hidden @ (array(2, 2) + 1) + array(2)
    extras = imported.policy.compute_actions(image, explore=False).extras
    np.testing.assert_allclose(extras["q_values"], [expected], rtol=1e-5)


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
def test_layers_before_heads_end_in_one_of_their_own_width(model, order, settings):
    vector, acted = spaces.Box(-1, 1, (4,)), spaces.Discrete(3)
    heads = QHeads((5,), dueling=True, num_atoms=1, noisy=False, sigma0=0.5)
    config_values = {"fcnet_activation": "relu", "post_fcnet_activation": "swish", **model}
    result = make_q_network(heads, config_values, vector, acted)
    heads = [f"heads/{x}" for x in ("advantage_1", "advantage_out", "value_1", "value_out")]
    assert result.order == [*order, *heads]
    assert result.layer_names["fc_out"] == f"fc_{len(settings[0])}"
    kept = result.settings
    assert (kept["fcnet_hiddens"], kept["fcnet_activation"]) == settings
    assert (kept["post_fcnet_hiddens"], kept["no_final_linear"]) == ([], False)


def test_the_actor_of_sac_is_of_both_configs_and_may_have_one_deviation_for_all(tmp_path):
    actor = [array(2), array(2, 3) + 1, array(3), array(3, 2) + 2, array(2), array(3, 1), array(1)]
    critic = [array(4, 1), array(1), array(4, 1), array(1)]
    config = {
        "model": {"fcnet_hiddens": [9], "vf_share_layers": True, "free_log_std": True},
        "policy_model_config": {"fcnet_hiddens": [3]},
        "q_model_config": {"fcnet_hiddens": [], "free_log_std": False},
        "twin_q": False,
    }
    state = sac_state([*actor, *critic, 0.5], config=config, action_space=VECTOR)
    (imported,) = import_checkpoint(written(tmp_path, state)).values()
    weights = {tuple(w.shape): w for w in imported.policy.get_weights().values()}
    for values in (actor[1], actor[2], actor[3], critic[0]):
        np.testing.assert_array_equal(weights[values.shape], values)
    assert imported.policy.config["model"]["free_log_std"] is True
    assert len(imported.policy.get_weights()) == 8


NESTED = {"space": {"space": "dict", "spaces": {"a": VECTOR["space"], "b": PAIR["space"]}}}
FLAT = {"space": {**VECTOR["space"], "low": -np.ones(4, "f4"), "high": np.ones(4, "f4"),
                  "shape": (4,)}, "original_space": NESTED}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(
    ("state", "words"),
    [
        (q_state([], hiddens=[]), r"DQN with hiddens=\[\] and dueling"),
        (q_state([], exploration_config={"type": "ParameterNoise"}), "LayerNormalization"),
        (q_state([], model={"use_lstm": True}), "replays single steps"),
        (
            sac_state([], config={"model": {"custom_model": "mine", "fcnet_hiddens": []}}),
            r"custom_model'\]='mine'",
        ),
        (sac_state([], config={"policy_model_config": {"free_log_std": True}}), "free_log_std"),
        (
            q_state([], model={"no_final_linear": True}, hiddens=[], dueling=False),
            "no_final_linear",
        ),
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
    ],
)
def test_networks_of_algorithms_that_replay_which_cannot_be_imported_are_named(
    state, words, tmp_path
):
    with pytest.raises(CheckpointError, match=words):
        import_checkpoint(written(tmp_path, state))


PAIR_OF_NUMBERS = np.array([1, 2])
HOSTILE = [
    *({"model": {name: value}} for name in ("fcnet_hiddens", "post_fcnet_hiddens", "conv_filters")
      for value in (3, PAIR_OF_NUMBERS, ["a"])),
    *({"model": {name: PAIR_OF_NUMBERS}} for name in ("custom_model", "use_lstm", "free_log_std")),
]  # fmt: skip


@pytest.mark.parametrize("config", HOSTILE, ids=str)
@pytest.mark.parametrize("of", ["PPO", "DQN", "SAC"])
def test_values_that_no_network_has_are_named(config, of):
    ((name, _),) = config["model"].items()
    state = {"PPO": state_of, "DQN": q_state, "SAC": sac_state}[of]
    spec = (state([], config=config) if of != "DQN" else state([], **config))["policy_spec"]
    if of == "SAC":
        spec["config"] |= {"policy_model_config": {}, "q_model_config": {}}
    vector, acted = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    with pytest.raises((CheckpointError, ModelSettingError), match=name):
        make_policy_networks(convert_policy_spec(spec), vector, acted)


@pytest.mark.core
def test_values_that_no_setting_has_stay_behind_and_the_networks_are_those_of_the_policy():
    strange = {"hiddens": 3, "noisy": PAIR_OF_NUMBERS, "num_atoms": "x", "dueling": 0,
               "exploration_config": {"type": PAIR_OF_NUMBERS}, "td_error_loss_fn": PAIR_OF_NUMBERS,
               "replay_buffer_config": {"replay_sequence_length": PAIR_OF_NUMBERS},
               "categorical_distribution_temperature": PAIR_OF_NUMBERS}  # fmt: skip
    result = convert_policy_spec(q_state([], **strange)["policy_spec"])
    assert sorted(line.partition("=")[0] for line in result.not_imported) == sorted(strange)
    vector, acted = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    (network,) = make_policy_networks(result, vector, acted).parts
    assert network.order[-2:] == ["heads/value_1", "heads/value_out"]

    pair = convert_policy_spec(sac_state([], config={"twin_q": PAIR_OF_NUMBERS})["policy_spec"])
    assert len(make_policy_networks(pair, vector, acted).parts) == 4
    assert [line.partition("=")[0] for line in pair.not_imported] == ["twin_q"]


@pytest.mark.core
def test_what_configs_of_networks_have_beside_is_listed_and_objects_are_configs_too():
    model = {"fcnet_hiddens": [], "of_the_future": 7}
    state = sac_state([], config={"policy_model_config": model})
    assert convert_policy_spec(state["policy_spec"]).not_imported == [
        "policy_model_config['of_the_future']=7"
    ]
    config = state["policy_spec"]["config"]
    config["framework_str"] = config.pop("framework")
    state["policy_spec"]["config"] = ObjectRecord("ray.rllib:SACConfig", None, config, [])
    result = convert_policy_spec(state["policy_spec"])
    assert result.policy_class.__name__ == "SACTF2Policy"
    assert len(make_policy_networks(result, spaces.Box(-1, 1, (2,)), spaces.Discrete(2)).parts) == 4


@pytest.mark.core
def test_buffers_are_those_of_the_names_here():
    module = "ray.rllib.utils.replay_buffers.multi_agent_prioritized_replay_buffer"
    stored = {
        "type": ObjectRecord(f"{module}:MultiAgentPrioritizedReplayBuffer", None, None, []),
        "prioritized_replay": -1,
        "capacity": 70,
        "prioritized_replay_alpha": 0.5,
        "replay_sequence_length": 1,
        "worker_side_prioritization": False,
    }
    result = convert_policy_spec(q_state([], replay_buffer_config=stored)["policy_spec"])
    assert result.not_imported == []
    kept = result.config["replay_buffer_config"]
    assert (kept["capacity"], kept["prioritized_replay_alpha"]) == (70, 0.5)
    assert kept["type"] == "MultiAgentPrioritizedReplayBuffer"
    unread = {**stored, "prioritized_replay": False}  # as SAC has it, and no code of RLlib reads
    again = convert_policy_spec(q_state([], replay_buffer_config=unread)["policy_spec"])
    assert again.config["replay_buffer_config"] == kept
    foreign = {**stored, "type": ObjectRecord("mine:Buffer", None, None, [])}
    (left,) = convert_policy_spec(
        q_state([], replay_buffer_config=foreign)["policy_spec"]
    ).not_imported
    assert left == "replay_buffer_config=<with custom objects>"


def test_several_policies_get_a_folder_each(tmp_path, capsys):
    whole = written(tmp_path / "whole", {}, type="Algorithm", policy_ids=["a", "b"])
    for name in "ab":
        written(whole / "policies" / name, state_of())
    assert main(["import-rllib", str(whole), str(tmp_path / "out")]) == 0
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == ["a", "b"]
    assert Policy.from_checkpoint(tmp_path / "out" / "b").policy_id == "b"
    assert main(["import-rllib", str(whole), str(tmp_path / "out")]) != 0
    assert "exists already" in capsys.readouterr().err


def test_nothing_is_written_if_one_policy_cannot_be_imported(tmp_path):
    whole = written(tmp_path / "whole", {}, type="Algorithm", policy_ids=["a", "b"])
    written(whole / "policies" / "a", state_of())
    written(whole / "policies" / "b", state_of(weights=[]))
    assert main(["import-rllib", str(whole), str(tmp_path / "out")]) != 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (state_of({"use_attention": True}), CheckpointError, "use_attention"),
        (state_of({"custom_model": "mine"}), CheckpointError, r"custom_model'\]='mine'"),
        (state_of(policy_class="SimpleQTFPolicy"), CheckpointError, "SAC, got 'SimpleQTFPolicy'"),
        (state_of(config={"framework": "torch"}), CheckpointError, "framework must be"),
        (
            state_of(weights=[array(2, 2)]),
            CheckpointError,
            "4 arrays are expected, and there are 1",
        ),
        (state_of(weights={"fc_out/kernel": array(2, 2)}), CheckpointError, "'fc_out/bias'"),
        (
            state_of(weights=[array(2, 3), array(3), array(2, 1), array(1)]),
            ModelImportError,
            r"\(2, 3\).*\(2, 2\)",
        ),
        (
            state_of(weights=[array(2, 2), array(2) * np.nan, array(2, 1), array(1)]),
            ModelImportError,
            "NaN",
        ),
        (state_of(action_space={"space": {"space": "text"}}), UnsupportedSpaceError, "'text'"),
        (state_of(observation_space=PAIR), CheckpointError, "ComplexInputNetwork"),
        (
            state_of(config={"observation_filter": "MeanStdFilter"}),
            CheckpointError,
            "enable_connectors=True",
        ),
        ({"weights": []}, CheckpointError, "policy_spec"),
        ([1], CheckpointError, "must hold a dict"),
    ],
)
def test_what_cannot_be_imported_is_named(state, error, words, tmp_path):
    with pytest.raises(error, match=words) as result:
        import_checkpoint(written(tmp_path, state))
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
        import_checkpoint(written(tmp_path, state_of(), **message))
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no rllib_checkpoint\.json"):
        import_checkpoint(tmp_path)


@pytest.mark.core
def test_settings_go_by_their_names_and_what_stays_behind_is_listed():
    stored = {
        "gamma": 0.9,
        "lambda": 0.5,
        "sgd_minibatch_size": 7,
        "num_sgd_iter": 3,
        "torch_compile_learner": False,
        "sample_async": -1,
        "_rl_module_spec": None,
        "callbacks": ObjectRecord(
            "ray.rllib.algorithms.callbacks:DefaultCallbacks", None, None, []
        ),
        "env": ObjectRecord("mine:Env", None, None, []),
        "sample_collector": ObjectRecord("ray.rllib:Collector", None, None, []),
        "remote_worker_envs": True,
        "of_the_future": 3,
    }
    result = convert_policy_spec(state_of(config=stored)["policy_spec"])
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
    turned = {"space": {"space": "dict", "spaces": dict(reversed(inner.items()))}}
    assert [*convert_space(turned, "observation_space").spaces] == ["b", "a"]
    state = {"_shape": (), "n": 4, "start": 1}
    pickled = ObjectRecord("gymnasium.spaces.discrete:Discrete", None, state, [])
    both = {"space": {"space": "tuple", "spaces": [pickled, PAIR["space"]]}}
    assert convert_space(both, "action_space") == spaces.Tuple(
        [spaces.Discrete(4, start=1), spaces.Discrete(2)]
    )
    with pytest.raises(UnsupportedSpaceError, match="os:system"):
        convert_space(ObjectRecord("os:system", ("true",), {}, []), "action_space")
    for broken in ({**VECTOR["space"], "shape": (3,)}, {"space": "box"}, {"space": ["box"]}, 3):
        with pytest.raises((CheckpointError, SpaceError)):
            convert_space({"space": broken} if broken != 3 else 3, "action_space")


@pytest.mark.core
def test_eager_lists_are_in_the_order_of_keras_2():
    vector, image = spaces.Box(-1, 1, (4,)), spaces.Box(0, 255, (42, 42, 3), np.uint8)
    acted = spaces.Discrete(3)
    dense = {"fcnet_hiddens": [8, 6], "vf_share_layers": False}
    assert make_network(dense, vector, acted).order == [
        *("fc_1", "fc_value_1", "fc_2", "fc_value_2", "fc_out", "value_out")
    ]
    lstm = {**dense, "fcnet_hiddens": [8], "use_lstm": True}
    assert make_network(lstm, vector, acted).order == [
        *("fc_value_1", "fc_1", "value_out", "lstm", "logits", "values")
    ]
    filters = {"conv_filters": [[2, 4, 2], [3, 4, 2], [4, 11, 1]], "vf_share_layers": False}
    assert make_network(filters, image, acted).order == [
        *("conv_value_1", "conv1", "conv_value_2", "conv2", "conv_value_3", "conv3"),
        *("conv_value_out", "conv_out"),
    ]


@pytest.mark.core
def test_images_of_0_to_255_are_images_of_0_to_1_with_larger_kernels():
    image = spaces.Box(0, 255, (10, 10, 1), np.uint8)
    network = make_network({"conv_filters": [[1, 10, 1]], "vf_share_layers": True}, image, None)
    weights = [np.ones((10, 10, 1, 1), "f4"), array(1), array(1, 1, 1, 2), array(2)]
    result = convert_network_weights([*weights, array(1, 1), array(1)], network)
    kernels = {layer.name: layer.weights[0].array for layer in result.layers}
    assert kernels["conv_1"].max() == kernels["conv_1"].min() == 255
    assert kernels["fc_out"].shape == (1, 2)
    with pytest.raises(CheckpointError, match="whose value shares no layers"):
        make_network({"post_fcnet_hiddens": [3], "vf_share_layers": False}, image, None)
