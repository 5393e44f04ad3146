"""Views that a model reads while it acts: in calls, sessions, samples, runtimes and exports."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import assert_equal, make
from helpers.marks import telling
from helpers.multi_agent_envs import SPACE, Crowd, Staggered, sampler_of
from helpers.short_envs import ShortEnv
from helpers.view_models import (
    GAPS_SEE,
    LINE,
    LOOKS_BACK,
    TWO,
    Counter,
    Reads,
    ReadsGaps,
    check_views,
    looks_back,
)
from helpers.workers import make_config, make_worker
from tfpolicies import PGTF2Policy, PolicyMap, PPOTF1Policy, PPOTF2Policy, ViewRequirement
from tfpolicies.algorithms.dqn import DQNTF2Policy
from tfpolicies.errors import BatchError, ModelError, UsageError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.testing import check_policy, random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

QUICK = {"seed": 0, "inference": "tf", "jit_compile": False}


def make_view_worker(
    policy_class=PPOTF2Policy, model=looks_back, env=Counter, *, max_seq_len=20, **settings
):
    model = {"custom_model": model, "max_seq_len": max_seq_len}
    settings = {"rollout_fragment_length": 6, **settings}
    return make_worker(lambda context: env(), policy_class, model=model, **settings)


def make_model_class(**views):
    """Returns a class of models that read views as a dict of requirements says."""
    return type("Reads", (Reads,), {"required": views})


def make_inputs(**shapes):
    return {name: keras.Input(shape, name=name) for name, shape in shapes.items()}


def add_heads(inputs, x, num_outputs):
    return keras.Model(inputs, [keras.layers.Dense(num_outputs)(x), keras.layers.Dense(1)(x)])


@pytest.mark.core
@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_the_last_steps_of_an_episode_and_zeros_before_it(policy_class):
    batch = make_view_worker(policy_class).sample()
    assert batch["obs"][:, 0].tolist() == [1, 2, 3, 4, 1, 2]
    assert batch["prev_n_obs"][..., 0].tolist() == [
        *([0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]),
        *([0, 0, 0, 1], [0, 0, 1, 2]),
    ]
    assert batch["prev_n_rewards"].tolist() == [
        *([0, 0, 0], [0, 0, 10], [0, 10, 20], [10, 20, 30]),
        *([0, 0, 0], [0, 0, 10]),
    ]
    a = batch["actions"].tolist()
    assert batch["prev_n_actions"].tolist() == [
        *([0, 0, 0], [0, 0, a[0]], [0, a[0], a[1]], [a[0], a[1], a[2]]),
        *([0, 0, 0], [0, 0, a[4]]),
    ]


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_episodes_look_back_across_fragments(mode):
    worker = make_view_worker(num_envs_per_worker=3, rollout_fragment_length=3, batch_mode=mode)
    check_views([worker.sample() for _ in range(6)], LOOKS_BACK)


@pytest.mark.core
@pytest.mark.parametrize("envs", [[Staggered], [Crowd, Crowd]])
def test_each_agent_looks_back_on_its_own_steps(envs):
    policy = make(obs=SPACE, actions=spaces.Discrete(3), model={"custom_model": looks_back})
    envs = [kind() if kind is Staggered else kind(i, 7 + i) for i, kind in enumerate(envs)]
    sampler = sampler_of(
        *envs, policies={"p": policy}, mapping=lambda *_, **__: "p", rollout_fragment_length=5
    )
    check_views([sampler.sample()["p"] for _ in range(12)], LOOKS_BACK)


@pytest.mark.core
@pytest.mark.parametrize("overrides", [False, True])
@pytest.mark.parametrize("model", [looks_back, ReadsGaps])
def test_an_open_end_is_valued_with_the_views_of_the_next_step(model, overrides):
    """With gamma 1 and lambda 0 an advantage is reward + next value - value."""

    class ByTrajectory(PPOTF2Policy):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)

    kind = ByTrajectory if overrides else PPOTF2Policy
    settings = {"gamma": 1.0, "lambda": 0.0, "num_envs_per_worker": 2}
    worker = make_view_worker(kind, model, rollout_fragment_length=1, **settings)
    samples = [worker.sample() for _ in range(7)]
    check_views(samples, LOOKS_BACK if model is looks_back else GAPS_SEE)
    compared = 0
    for now, later in itertools.pairwise(samples):
        valued = now["advantages"] + now["vf_preds"] - now["rewards"]
        same = now["eps_id"] == later["eps_id"]
        np.testing.assert_allclose(valued[same], later["vf_preds"][same], atol=1e-4)
        compared += int(same.sum())
    assert compared >= 8


def test_running_episodes_continue_with_the_rows_they_look_back_on():
    first, second = (make_view_worker(model=ReadsGaps, num_envs_per_worker=2) for _ in range(2))
    first.sample()
    second.sample()
    second.sampler.set_state(first.sampler.get_state())
    second.policy_map["default_policy"].set_state(first.policy_map["default_policy"].get_state())
    batch = first.sample()
    assert_equal(batch, second.sample())
    assert batch["some"].any()


def make_view_policy(inference, model=looks_back, **config):
    return make(obs=LINE, inference=inference, model={"custom_model": model}, **config)


def draw_inputs(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(rows, 1)).astype(np.float32),
        "prev_n_obs": rng.normal(size=(rows, 4, 1)).astype(np.float32),
        "prev_n_actions": rng.integers(2, size=(rows, 3)),
        "prev_n_rewards": rng.normal(size=(rows, 3)).astype(np.float32),
    }


@pytest.mark.core
def test_all_runtimes_and_calls_agree():
    inputs = draw_inputs(5)
    views = {name: x for name, x in inputs.items() if name != "obs"}
    results = []
    for inference in ("tf", "onnx", "session"):
        policy = make_view_policy(inference)
        acted = policy.compute_actions(inputs["obs"], views=views, explore=False)
        same = policy.compute_actions_from_input_dict(inputs, explore=False)
        np.testing.assert_array_equal(acted.actions, same.actions)
        one = {name: x[0] for name, x in inputs.items()}
        action, _, extras = policy.compute_single_action(input_dict=one, explore=False)
        assert action == acted.actions[0]
        logp = policy.compute_log_likelihoods(acted.actions, inputs["obs"], views=views)
        assert logp.shape == (5,)
        results.append(acted.extras)
    for extras in results[1:]:
        for name in ("action_dist_inputs", "vf_preds"):
            np.testing.assert_allclose(extras[name], results[0][name], atol=1e-5)
    other = {**views, "prev_n_rewards": views["prev_n_rewards"] + 1}
    changed = policy.compute_actions(inputs["obs"], views=other, explore=False).extras
    assert np.abs(changed["vf_preds"] - results[0]["vf_preds"]).max() > 1e-3


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_many_policies_with_views_act_in_one_call(inference):
    league, values = PolicyMap(), {}
    for i in range(3):
        league[str(i)] = make_view_policy(inference, seed=i)
        values[str(i)] = draw_inputs(2 + i, seed=i)
    obs = {name: x["obs"] for name, x in values.items()}
    together = league.compute_actions(obs, view_batches=values, explore=False)
    for name, policy in league.items():
        alone = policy.compute_actions(obs[name], views=values[name], explore=False)
        np.testing.assert_allclose(
            together[name].extras["vf_preds"], alone.extras["vf_preds"], atol=1e-5
        )


@pytest.mark.core
def test_a_missing_view_is_named_with_what_to_do():
    policy, values = make_view_policy("tf"), draw_inputs(2)
    with pytest.raises(UsageError, match=r"reads prev_n_obs.*session\(\).*input_dict"):
        policy.compute_actions(values["obs"])
    with pytest.raises(ValueError, match=r"views\['prev_n_obs'\] must be an array \[B, 4, 1\]"):
        policy.compute_actions(values["obs"], views={"prev_n_obs": values["obs"]})


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx", "session"])
def test_a_session_looks_back_as_a_sampler_does(inference):
    policy_class = PPOTF1Policy if inference == "session" else PPOTF2Policy
    config = {} if inference == "session" else {"inference": inference}
    worker = make_view_worker(policy_class, explore=False, **config)
    batch, env = worker.sample(), Counter()
    session = worker.get_policy().session()
    obs, reward = env.reset()[0], None
    for row in range(6):
        action = session.act(obs, reward)
        assert action == batch["actions"][row]
        obs, reward, _, truncated, _ = env.step(action)
        if truncated:
            session.reset()
            obs, reward = env.reset()[0], None


@pytest.mark.soak
@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
@pytest.mark.parametrize("model", [looks_back, ReadsGaps])
def test_policies_with_views_keep_their_contract(policy_class, model):
    config = {**QUICK, "model": {"custom_model": model}, "sgd_minibatch_size": 8}
    check_policy(policy_class(LINE, TWO, config), exports=model is looks_back)


def make_recurrent(observation_space, num_outputs):
    inputs = make_inputs(
        obs=(None, 1), prev_n_obs=(None, 3, 1), prev_n_rewards=(None, 2), state_in_0=(5,)
    )
    inputs["seq_lens"] = keras.Input((), name="seq_lens", dtype="int32")
    frames = keras.layers.Reshape((-1, 3))(inputs["prev_n_obs"])
    x = keras.layers.Concatenate()([inputs["obs"], frames, inputs["prev_n_rewards"]])
    steps = keras.ops.cumsum(keras.ops.ones_like(inputs["obs"][..., 0]), axis=1)
    mask = steps <= keras.ops.cast(inputs["seq_lens"], "float32")[:, None]
    x, after = keras.layers.GRU(5, return_sequences=True, return_state=True)(
        keras.layers.Rescaling(0.1)(x), initial_state=inputs["state_in_0"], mask=mask
    )
    outputs = {"action_dist_inputs": keras.layers.Dense(num_outputs)(x)}
    outputs |= {"vf_preds": keras.layers.Dense(1)(x), "state_out_0": after}
    return keras.Model(inputs, outputs)


@pytest.mark.soak
def test_a_recurrent_model_reads_views_of_padded_sequences():
    worker = make_view_worker(model=make_recurrent, max_seq_len=3, num_envs_per_worker=2)
    samples = [worker.sample() for _ in range(3)]
    views = {"prev_n_obs": ("obs", [-2, -1, 0]), "prev_n_rewards": ("rewards", [-2, -1])}
    check_views(samples, views)
    assert samples[0]["seq_lens"].tolist() == [3, 1, 2, 3, 1, 2]
    result = worker.get_policy().learn_on_batch(samples[0])
    assert np.isfinite(result["learner_stats"]["total_loss"])
    model = {"custom_model": make_recurrent, "max_seq_len": 3}
    check_policy(PPOTF2Policy(LINE, TWO, {**QUICK, "model": model}), exports=True)


NESTED = spaces.Dict(
    observations=spaces.Dict(
        place=spaces.Discrete(3, start=-1), speed=spaces.Box(-np.inf, np.inf, (2,), np.float32)
    ),
    action_mask=spaces.MultiBinary(2),
)


class Nested(ShortEnv):
    """Shows a nested observation with a mask; every action is allowed."""

    observation_space, action_space = NESTED, spaces.Tuple([TWO])

    def observe(self):
        speed = np.array([self.t, -self.t], np.float32)
        mask = np.ones(2, np.int8)
        return {"observations": {"place": self.t % 3 - 1, "speed": speed}, "action_mask": mask}


def test_views_of_nested_spaces_are_nested_and_have_no_mask():
    model = make_model_class(
        old=ViewRequirement("obs", shift="-2:-1"), acted=ViewRequirement("actions", shift="-2:-1")
    )
    worker = make_view_worker(model=model, env=Nested)
    batch = worker.sample()
    place, speed = (batch["old"][name] for name in ("place", "speed"))
    assert set(batch["old"]) == {"place", "speed"}
    assert place.tolist() == [[0, 0], [0, -1], [-1, 0], [0, 1], [0, 0], [0, -1]]
    assert speed[:, :, 0].tolist() == [[0, 0], [0, 0], [0, 1], [1, 2], [0, 0], [0, 0]]
    (acted,) = batch["acted"]
    first = batch["actions"][0]
    assert acted.tolist() == [
        *([0, 0], [0, first[0]], [first[0], first[1]], [first[1], first[2]]),
        *([0, 0], [0, first[4]]),
    ]
    policy = worker.get_policy()
    assert np.isfinite(policy.learn_on_batch(batch)["learner_stats"]["total_loss"])
    names = [port.name for port in policy.program.ports.view_ports]
    assert names == ["old_place", "old_speed", "acted_0"]
    drawn = random_batch(policy, 9, length=4)
    assert drawn["old"]["speed"].shape == (9, 2, 2)
    assert drawn["acted"][0][1:4, 1].tolist() == drawn["actions"][0][:3].tolist()
    policy.learn_on_batch(drawn)


def test_a_missing_reward_is_zero():
    session = make_view_policy("tf").session()
    session.act([1.0])
    session.act([2.0], reward=5.0)
    assert session.recurrent_state.get_state()["rewards"][0].tolist()[-2:] == [5.0, 0.0]
    session.act([3.0])
    assert session.recurrent_state.get_state()["rewards"][0].tolist()[-2:] == [0.0, 0.0]


def test_an_observation_filter_normalises_earlier_observations():
    policy = make_view_policy("onnx", observation_filter="MeanStdFilter")
    inputs = draw_inputs(3)
    raw = policy.compute_actions_from_input_dict(inputs, explore=False).extras["vf_preds"]
    policy.filter.observe([np.array([[3.0], [5.0], [7.0]], np.float32)])
    policy.driver.learning.flush_filters()
    shifted = {name: 2.0 * x + 5.0 if "obs" in name else x for name, x in inputs.items()}
    again = policy.compute_actions_from_input_dict(shifted, explore=False).extras["vf_preds"]
    np.testing.assert_allclose(again, raw, atol=1e-4)
    model = policy.to_keras()
    encoded = {**shifted, "prev_n_actions": np.eye(2, dtype=np.float32)[inputs["prev_n_actions"]]}
    np.testing.assert_allclose(np.asarray(model(encoded)[1])[:, 0], raw, atol=1e-4)


@pytest.mark.parametrize("policy_class", telling([PPOTF2Policy, PPOTF1Policy], PPOTF2Policy))
def test_exports_take_each_view_by_its_name(tmp_path, policy_class):
    policy = make_view_worker(policy_class).get_policy()
    saved = tf.saved_model.load(str(policy.export_model(tmp_path / "saved").path))
    onnx = policy.export_model(tmp_path / "onnx", onnx=True)
    inputs = draw_inputs(4)
    expected = policy.compute_actions_from_input_dict(inputs, explore=False)
    tensors = {name: tf.constant(x) for name, x in inputs.items()}
    served = saved.signatures["serving_default"](**tensors)
    session = onnxruntime.InferenceSession(str(onnx.path), providers=["CPUExecutionProvider"])
    assert [x.name for x in session.get_inputs()] == list(inputs)
    names = [x.name for x in session.get_outputs()]
    ran = dict(zip(names, session.run(None, inputs), strict=True))
    for outputs in (served, ran):
        np.testing.assert_array_equal(outputs["actions"], expected.actions)
        np.testing.assert_allclose(outputs["vf_preds"], expected.extras["vf_preds"], atol=1e-5)
    spec = OnnxPolicy(onnx.path).spec
    assert {view["name"]: (view["column"], view["shifts"]) for view in spec["views"]} == LOOKS_BACK


@pytest.mark.parametrize("model", [looks_back, ReadsGaps])
def test_the_player_of_an_export_looks_back_by_itself(tmp_path, model):
    policy = make_view_worker(model=model).get_policy()
    player = OnnxPolicy(policy.export_model(tmp_path, onnx=True).path)
    session, env = policy.session(), Counter(length=9)
    for _ in range(2):
        obs, reward = env.reset()[0], 0.0
        truncated = False
        while not truncated:
            action = player.act(obs, reward)
            assert action == session.act(obs, reward, explore=False)
            obs, reward, _, truncated, _ = env.step(action)
        player.reset()
        session.reset()


class Recall(ShortEnv):
    """Shows a sign once; three steps later the action must be it. Guessing earns 0.5."""

    observation_space, terminates = LINE, True

    def __init__(self, config=None):
        self.np_random = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sign = int(self.np_random.integers(2))
        return np.array([2.0 * self.sign - 1.0], np.float32), {}

    def observe(self):
        return np.zeros(1, np.float32)

    def pay(self, action):
        return float(self.t == 4 and int(action) == self.sign)


def last_four(observation_space, num_outputs):
    inputs = make_inputs(prev_n_obs=(4, 1), obs=(1,))
    x = keras.layers.Flatten()(inputs["prev_n_obs"])
    x = keras.layers.Dense(16, activation="tanh")(x)
    x = keras.layers.Concatenate()([x, inputs["obs"]])
    return add_heads(inputs, keras.layers.Dense(16, activation="tanh")(x), num_outputs)


def train(model):
    sizes = {"train_batch_size": 512, "sgd_minibatch_size": 128, "num_sgd_iter": 8}
    rollouts = {"num_envs_per_worker": 8, "rollout_fragment_length": 64}
    config = make_config(Recall, **sizes, **rollouts, lr=0.01, gamma=0.95, model=model, seed=3)
    algorithm = config.build()
    for _ in range(10):  # 5120 steps
        algorithm.train()
    return algorithm.get_policy()


def get_mean_return(act, episodes=60):
    env = Recall()
    total = 0.0
    for seed in range(episodes):
        obs, over, t = env.reset(seed=seed)[0], False, 0
        while not over:
            obs, reward, over, _, _ = env.step(act(obs, t))
            total, t = total + reward, t + 1
    return total / episodes


@pytest.mark.soak
def test_a_policy_with_four_observations_learns_to_recall_and_one_with_one_does_not():
    policy = train({"custom_model": last_four})
    session = policy.session()

    def by_session(obs, t):
        if t == 0:
            session.reset()
        return session.act(obs, explore=False)

    assert get_mean_return(by_session) == 1.0
    blind = train({"fcnet_hiddens": [16, 16]})
    assert get_mean_return(lambda obs, t: blind.compute_single_action(obs, explore=False)[0]) < 0.7


@pytest.mark.parametrize(
    ("name", "view", "words"),
    [
        ("x", ViewRequirement("infos", shift=-1), "'x'.*data_col 'infos'.*memory"),
        ("x", ViewRequirement("actions", shift="-1:0"), "'x'.*known up to the shift -1"),
        ("x", ViewRequirement("rewards"), "'x'.*known up to the shift -1"),
        ("x", ViewRequirement("obs", index=0), "'x'.*neither index"),
        ("x", ViewRequirement("obs", shift=-1, batch_repeat_value=4), "'x'.*batch_repeat_value"),
        ("prev_actions", ViewRequirement("actions", shift=-2), "'prev_actions'.*shift=-1"),
        ("rewards", ViewRequirement("rewards", shift=-1), "'rewards'.*a collected column"),
        ("last step", ViewRequirement("obs", shift=-1), "'last step'.*letters"),
    ],
)
def test_an_impossible_view_is_named(name, view, words):
    with pytest.raises(ModelError, match=words):
        make_view_policy("tf", make_model_class(**{name: view}))


def test_acting_cannot_look_ahead():
    with pytest.raises(BatchError, match="cannot look ahead, but 'x' has the shift '-1:1'"):
        make_view_policy("tf", make_model_class(x=ViewRequirement("obs", shift="-1:1")))


def functional(observation_space, num_outputs):
    """Returns a model with an attribute that describes one of its inputs."""
    inputs = make_inputs(obs=(1,), rare=(2, 1))
    x = keras.layers.Concatenate()([inputs["obs"], keras.layers.Flatten()(inputs["rare"])])
    model = add_heads(inputs, x, num_outputs)
    model.view_requirements = {"rare": ViewRequirement("obs", shift=[-4, -2])}
    return model


def test_a_functional_model_describes_its_input():
    (view,) = make_view_policy("tf", functional).program.ports.views
    assert (view.name, view.source, view.shifts) == ("rare", "obs", (-4, -2))
    with pytest.raises(ModelError, match=r"leaves out of copies.*factory"):
        make_view_policy("tf", functional(LINE, 2))


def test_a_name_is_an_input_once():
    space = spaces.Dict(x=LINE)
    model = {"custom_model": make_model_class(obs_x=ViewRequirement("actions", shift="-2:-1"))}
    with pytest.raises(ModelError, match=r"view 'obs_x'.*another name"):
        make(PGTF2Policy, space, TWO, model=model, **QUICK)


def test_an_input_has_a_number_of_steps():
    def unknown(space, num_outputs):
        inputs = make_inputs(obs=(1,), prev_n_obs=(None, 1))
        x = keras.layers.GlobalAveragePooling1D()(inputs["prev_n_obs"])
        return add_heads(inputs, keras.layers.Concatenate()([x, inputs["obs"]]), num_outputs)

    with pytest.raises(ModelError, match=r"'prev_n_obs'.*number of steps.*keras.Input\(\(4"):
        make_view_policy("tf", unknown)


def test_replayed_rows_have_no_views_for_q_networks():
    def q_network(space, num_outputs):
        inputs = make_inputs(obs=(1,), prev_n_obs=(2, 1))
        x = keras.layers.Concatenate()([keras.layers.Flatten()(x) for x in inputs.values()])
        return keras.Model(inputs, keras.layers.Dense(num_outputs)(x))

    with pytest.raises(ModelError, match="takes 'prev_n_obs'"):
        DQNTF2Policy(LINE, TWO, {**QUICK, "model": {"custom_model": q_network}})
