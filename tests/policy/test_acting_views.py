"""Views that a model reads while it acts: by hand, in sessions, samples, runtimes and exports."""

from __future__ import annotations

import itertools

import gymnasium as gym
import keras
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import make
from helpers.marks import telling
from helpers.multi_agent_envs import SPACE, Crowd, Staggered, sampler_of
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
from tfpolicies import (
    PGTF2Policy,
    PolicyMap,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    RolloutWorker,
    ViewRequirement,
)
from tfpolicies.algorithms.dqn import DQNTF2Policy
from tfpolicies.errors import BatchError, ModelError, UsageError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.testing import check_policy, random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

QUICK = {"seed": 0, "inference": "tf", "jit_compile": False}


def worker_of(policy_class=PPOTF2Policy, model=looks_back, **config):
    config = {"model": {"custom_model": model}, "rollout_fragment_length": 6, **QUICK, **config}
    return RolloutWorker(
        env_creator=lambda context: Counter(), default_policy_class=policy_class, config=config
    )


def reads(**views):
    """Returns a class of models that read views as a dict of requirements says."""
    return type("Reads", (Reads,), {"required": views})


# -- sampling -----------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_the_last_steps_of_an_episode_and_zeros_before_it(policy_class):
    batch = worker_of(policy_class).sample()
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
def test_episodes_that_go_on_look_back_across_fragments(mode):
    worker = worker_of(num_envs_per_worker=3, rollout_fragment_length=3, batch_mode=mode)
    check_views([worker.sample() for _ in range(6)], LOOKS_BACK)


@pytest.mark.core
@pytest.mark.parametrize("envs", [[Staggered], [Crowd, Crowd]])
def test_each_agent_looks_back_on_its_own_steps(envs):
    policy = make(
        PPOTF2Policy, SPACE, spaces.Discrete(3), model={"custom_model": looks_back}, **QUICK
    )
    made = [kind() if kind is Staggered else kind(i, 7 + i) for i, kind in enumerate(envs)]
    sampler = sampler_of(
        *made, policies={"p": policy}, mapping=lambda *_, **__: "p", rollout_fragment_length=5
    )
    check_views([sampler.sample()["p"] for _ in range(12)], LOOKS_BACK)


@pytest.mark.core
@pytest.mark.parametrize("overrides", [False, True])
@pytest.mark.parametrize("model", [looks_back, ReadsGaps])
def test_an_open_end_is_valued_with_what_the_next_step_sees(model, overrides):
    """With gamma 1 and lambda 0 an advantage is reward + next value - value."""

    class ByTrajectory(PPOTF2Policy):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)

    kind = ByTrajectory if overrides else PPOTF2Policy
    settings = {"gamma": 1.0, "lambda": 0.0, "num_envs_per_worker": 2}
    worker = worker_of(kind, model, rollout_fragment_length=1, **settings)
    samples = [worker.sample() for _ in range(7)]
    check_views(samples, LOOKS_BACK if model is looks_back else GAPS_SEE)
    compared = 0
    for now, later in itertools.pairwise(samples):
        valued = now["advantages"] + now["vf_preds"] - now["rewards"]
        goes_on = now["eps_id"] == later["eps_id"]
        np.testing.assert_allclose(valued[goes_on], later["vf_preds"][goes_on], atol=1e-4)
        compared += int(goes_on.sum())
    assert compared >= 8


def test_running_episodes_are_continued_with_what_they_look_back_on():
    first, second = (worker_of(model=ReadsGaps, num_envs_per_worker=2) for _ in range(2))
    first.sample()
    second.sample()
    second.sampler.set_state(first.sampler.get_state())
    second.policy_map["default_policy"].set_state(first.policy_map["default_policy"].get_state())
    ours, theirs = first.sample(), second.sample()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert ours["some"].any()


# -- acting by hand, on all runtimes ------------------------------------------------------------


def policy_of(inference, model=looks_back, **config):
    return make(
        PPOTF2Policy, LINE, TWO, inference=inference, model={"custom_model": model}, **config
    )


def inputs_of(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.normal(size=(rows, 1)).astype(np.float32),
        "prev_n_obs": rng.normal(size=(rows, 4, 1)).astype(np.float32),
        "prev_n_actions": rng.integers(2, size=(rows, 3)),
        "prev_n_rewards": rng.normal(size=(rows, 3)).astype(np.float32),
    }


@pytest.mark.core
def test_all_runtimes_and_both_calls_give_the_same():
    inputs = inputs_of(5)
    views = {name: x for name, x in inputs.items() if name != "obs"}
    results = []
    for inference in ("tf", "onnx", "session"):
        policy = policy_of(inference)
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
        league[str(i)] = policy_of(inference, seed=i)
        values[str(i)] = inputs_of(2 + i, seed=i)
    obs = {name: x["obs"] for name, x in values.items()}
    together = league.compute_actions(obs, view_batches=values, explore=False)
    for name, policy in league.items():
        alone = policy.compute_actions(obs[name], views=values[name], explore=False)
        np.testing.assert_allclose(
            together[name].extras["vf_preds"], alone.extras["vf_preds"], atol=1e-5
        )


@pytest.mark.core
def test_a_missing_view_is_named_with_what_to_do():
    policy, values = policy_of("tf"), inputs_of(2)
    with pytest.raises(UsageError, match=r"reads prev_n_obs.*session\(\).*input_dict"):
        policy.compute_actions(values["obs"])
    with pytest.raises(ValueError, match=r"views\['prev_n_obs'\] must be an array \[B, 4, 1\]"):
        policy.compute_actions(values["obs"], views={"prev_n_obs": values["obs"]})


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx", "session"])
def test_a_session_looks_back_as_a_sampler_does(inference):
    policy_class = PPOTF1Policy if inference == "session" else PPOTF2Policy
    config = {} if inference == "session" else {"inference": inference}
    worker = worker_of(policy_class, explore=False, **config)
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


def remembers(observation_space, num_outputs):
    """Has a memory and looks back, on sequences."""
    inputs = {
        "obs": keras.Input((None, 1), name="obs"),
        "prev_n_obs": keras.Input((None, 3, 1), name="prev_n_obs"),
        "prev_n_rewards": keras.Input((None, 2), name="prev_n_rewards"),
        "state_in_0": keras.Input((5,), name="state_in_0"),
        "seq_lens": keras.Input((), name="seq_lens", dtype="int32"),
    }
    frames = keras.layers.Reshape((-1, 3))(inputs["prev_n_obs"])
    x = keras.layers.Concatenate()([inputs["obs"], frames, inputs["prev_n_rewards"]])
    steps = keras.ops.cumsum(keras.ops.ones_like(inputs["obs"][..., 0]), axis=1)
    mask = steps <= keras.ops.cast(inputs["seq_lens"], "float32")[:, None]
    x, after = keras.layers.GRU(5, return_sequences=True, return_state=True)(
        keras.layers.Rescaling(0.1)(x), initial_state=inputs["state_in_0"], mask=mask
    )
    return keras.Model(
        inputs,
        {
            "action_dist_inputs": keras.layers.Dense(num_outputs)(x),
            "vf_preds": keras.layers.Dense(1)(x),
            "state_out_0": after,
        },
    )


@pytest.mark.soak
def test_a_model_with_a_memory_reads_views_of_padded_sequences():
    model = {"custom_model": remembers, "max_seq_len": 3}
    worker = RolloutWorker(
        env_creator=lambda context: Counter(),
        default_policy_class=PPOTF2Policy,
        config={"model": model, "rollout_fragment_length": 6, "num_envs_per_worker": 2, **QUICK},
    )
    samples = [worker.sample() for _ in range(3)]
    views = {"prev_n_obs": ("obs", [-2, -1, 0]), "prev_n_rewards": ("rewards", [-2, -1])}
    check_views(samples, views)
    assert samples[0]["seq_lens"].tolist() == [3, 1, 2, 3, 1, 2]
    result = worker.get_policy().learn_on_batch(samples[0])
    assert np.isfinite(result["learner_stats"]["total_loss"])
    check_policy(PPOTF2Policy(LINE, TWO, {**QUICK, "model": model}), exports=True)


NESTED = spaces.Dict(
    observations=spaces.Dict(
        place=spaces.Discrete(3, start=-1),
        speed=spaces.Box(-np.inf, np.inf, (2,), np.float32),
    ),
    action_mask=spaces.MultiBinary(2),
)


class Nested(gym.Env):
    """Shows a nested observation with a mask; every action is allowed."""

    observation_space, action_space = NESTED, spaces.Tuple([TWO])

    def shown(self):
        speed = np.array([self.t, -self.t], np.float32)
        mask = np.ones(2, np.int8)
        return {"observations": {"place": self.t % 3 - 1, "speed": speed}, "action_mask": mask}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.shown(), {}

    def step(self, action):
        self.t += 1
        return self.shown(), 1.0, False, self.t == 4, {}


def test_views_of_nested_spaces_are_nested_and_have_no_mask():
    requirements = {
        "old": ViewRequirement("obs", shift="-2:-1"),
        "acted": ViewRequirement("actions", shift="-2:-1"),
    }
    model = {"custom_model": reads(**requirements)}
    worker = RolloutWorker(
        env_creator=lambda context: Nested(),
        default_policy_class=PPOTF2Policy,
        config={"rollout_fragment_length": 6, **QUICK, "model": model},
    )
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


def test_a_reward_that_is_not_told_is_zero():
    session = policy_of("tf").session()
    past = session.recurrent_state._history["rewards"][0]
    session.act([1.0])
    session.act([2.0], reward=5.0)
    assert past[0].tolist()[-2:] == [5.0, 0.0]
    session.act([3.0])
    assert past[0].tolist()[-2:] == [0.0, 0.0]


def test_an_observation_filter_normalises_what_is_looked_back_on():
    policy = policy_of("onnx", observation_filter="MeanStdFilter")
    inputs = inputs_of(3)
    raw = policy.compute_actions_from_input_dict(inputs, explore=False).extras["vf_preds"]
    policy.filter.observe([np.array([[3.0], [5.0], [7.0]], np.float32)])
    policy.driver.learning.flush_filters()
    shifted = {name: 2.0 * x + 5.0 if "obs" in name else x for name, x in inputs.items()}
    again = policy.compute_actions_from_input_dict(shifted, explore=False).extras["vf_preds"]
    np.testing.assert_allclose(again, raw, atol=1e-4)
    kept = policy.to_keras()
    encoded = {**shifted, "prev_n_actions": np.eye(2, dtype=np.float32)[inputs["prev_n_actions"]]}
    np.testing.assert_allclose(np.asarray(kept(encoded)[1])[:, 0], raw, atol=1e-4)


# -- exports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_class", telling([PPOTF2Policy, PPOTF1Policy], PPOTF2Policy))
def test_exports_take_each_view_by_its_name(tmp_path, policy_class):
    policy = worker_of(policy_class).get_policy()
    saved = tf.saved_model.load(str(policy.export_model(tmp_path / "saved").path))
    onnx = policy.export_model(tmp_path / "onnx", onnx=True)
    inputs = inputs_of(4)
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
    policy = worker_of(model=model).get_policy()
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


# -- learning -------------------------------------------------------------------------------------


class Recall(gym.Env):
    """Shows a sign once; three steps later the action must tell it. Guessing earns 0.5."""

    observation_space, action_space = LINE, TWO

    def __init__(self, config=None):
        self.rng = np.random.default_rng(0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.sign = 0, int(self.rng.integers(2))
        return np.array([2.0 * self.sign - 1.0], np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t == 4
        right = float(over and int(action) == self.sign)
        return np.zeros(1, np.float32), right, over, False, {}


def last_four(observation_space, num_outputs):
    frames = keras.Input((4, 1), name="prev_n_obs")
    obs = keras.Input((1,), name="obs")
    x = keras.layers.Dense(16, activation="tanh")(keras.layers.Flatten()(frames))
    x = keras.layers.Dense(16, activation="tanh")(keras.layers.Concatenate()([x, obs]))
    outputs = [keras.layers.Dense(num_outputs)(x), keras.layers.Dense(1)(x)]
    return keras.Model({"prev_n_obs": frames, "obs": obs}, outputs)


def trained(model, iterations):
    config = (
        PPOConfig()
        .environment(Recall)
        .rollouts(num_rollout_workers=0, num_envs_per_worker=8, rollout_fragment_length=64)
        .training(
            train_batch_size=512,
            sgd_minibatch_size=128,
            num_sgd_iter=8,
            lr=0.01,
            gamma=0.95,
            model=model,
        )
        .framework(jit_compile=False)
        .debugging(seed=3)
    )
    algorithm = config.build()
    for _ in range(iterations):
        algorithm.train()
    return algorithm


def earned(act, episodes=60):
    env = Recall()
    total = 0.0
    for seed in range(episodes):
        obs, over, t = env.reset(seed=seed)[0], False, 0
        while not over:
            obs, reward, over, _, _ = env.step(act(obs, t))
            total, t = total + reward, t + 1
    return total / episodes


@pytest.mark.soak
def test_four_observations_learn_what_one_cannot_and_the_export_knows_it(tmp_path):
    algorithm = trained({"custom_model": last_four}, 10)  # 5120 steps
    policy = algorithm.get_policy()
    session = policy.session()

    def by_session(obs, t):
        if t == 0:
            session.reset()
        return session.act(obs, explore=False)

    assert earned(by_session) == 1.0
    onnx = policy.export_model(tmp_path / "onnx", onnx=True)
    run = onnxruntime.InferenceSession(str(onnx.path), providers=["CPUExecutionProvider"])
    exported = policy.export_model(tmp_path / "saved")
    serve = tf.saved_model.load(str(exported.path)).signatures["serving_default"]
    frames = np.zeros((1, 4, 1), np.float32)

    def by_hand(obs, t):
        """Carries the last four observations as any client would."""
        frames[:] = 0.0 if t == 0 else np.roll(frames, -1, axis=1)
        frames[0, -1] = obs
        values = {"prev_n_obs": frames, "obs": obs[None]}
        (action,) = run.run(["actions"], values)
        served = serve(**{name: tf.constant(x) for name, x in values.items()})
        assert action[0] == served["actions"].numpy()[0]
        return int(action[0])

    assert earned(by_hand) == 1.0
    blind = trained({"fcnet_hiddens": [16, 16]}, 10).get_policy()
    assert earned(lambda obs, t: blind.compute_single_action(obs, explore=False)[0]) < 0.7


# -- what cannot be made --------------------------------------------------------------------------


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
def test_a_view_that_cannot_be_had_is_named(name, view, words):
    with pytest.raises(ModelError, match=words):
        policy_of("tf", reads(**{name: view}))


def test_acting_cannot_look_ahead():
    with pytest.raises(BatchError, match="cannot look ahead, but 'x' has the shift '-1:1'"):
        policy_of("tf", reads(x=ViewRequirement("obs", shift="-1:1")))


def functional(observation_space, num_outputs):
    """Says in an attribute what one of its inputs is."""
    inputs = {
        "obs": keras.Input((1,), name="obs"),
        "rare": keras.Input((2, 1), name="rare"),
    }
    x = keras.layers.Concatenate()([inputs["obs"], keras.layers.Flatten()(inputs["rare"])])
    model = keras.Model(inputs, [keras.layers.Dense(num_outputs)(x), keras.layers.Dense(1)(x)])
    model.view_requirements = {"rare": ViewRequirement("obs", shift=[-4, -2])}
    return model


def test_a_functional_model_says_what_its_input_is():
    (view,) = policy_of("tf", functional).program.ports.views
    assert (view.name, view.source, view.shifts) == ("rare", "obs", (-4, -2))
    with pytest.raises(ModelError, match=r"leaves out of copies.*factory"):
        policy_of("tf", functional(LINE, 2))


def test_a_name_is_an_input_once():
    space = spaces.Dict(x=LINE)
    model = {"custom_model": reads(obs_x=ViewRequirement("actions", shift="-2:-1"))}
    with pytest.raises(ModelError, match=r"view 'obs_x'.*another name"):
        make(PGTF2Policy, space, TWO, model=model, **QUICK)


def test_an_input_must_say_how_many_steps_it_takes():
    def unknown(space, num_outputs):
        inputs = {
            "obs": keras.Input((1,), name="obs"),
            "prev_n_obs": keras.Input((None, 1), name="prev_n_obs"),
        }
        x = keras.layers.GlobalAveragePooling1D()(inputs["prev_n_obs"])
        x = keras.layers.Concatenate()([x, inputs["obs"]])
        return keras.Model(inputs, [keras.layers.Dense(num_outputs)(x), keras.layers.Dense(1)(x)])

    with pytest.raises(ModelError, match=r"'prev_n_obs'.*number of steps.*keras.Input\(\(4"):
        policy_of("tf", unknown)


def test_replayed_rows_have_no_views_for_q_networks():
    def q_network(space, num_outputs):
        inputs = {
            "obs": keras.Input((1,), name="obs"),
            "prev_n_obs": keras.Input((2, 1), name="prev_n_obs"),
        }
        x = keras.layers.Concatenate()([keras.layers.Flatten()(x) for x in inputs.values()])
        return keras.Model(inputs, keras.layers.Dense(num_outputs)(x))

    with pytest.raises(ModelError, match="takes 'prev_n_obs'"):
        DQNTF2Policy(LINE, TWO, {**QUICK, "model": {"custom_model": q_network}})
