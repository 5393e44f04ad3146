"""Programs: traced once, shared by policies with equal specs, freed with them; separate states."""

import functools
import gc
import weakref
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import assert_close, assert_equal, batch_for, make
from helpers.marks import telling
from tfpolicies import PGConfig, PGTF1Policy, PGTF2Policy, PPOTF1Policy, PPOTF2Policy, TFPolicy
from tfpolicies.algorithms.pg import PGTrainingSettings
from tfpolicies.errors import BatchError, ConfigError, MissingColumnError, PolicyOwnedError
from tfpolicies.models.losses import clip_gradients, masked_mean
from tfpolicies.models.spaces import Leaf
from tfpolicies.program.compile_mode import CompileMode, analyze_graph
from tfpolicies.program.inference import RUNTIMES, RuntimeSpec
from tfpolicies.program.minibatches import compute_capacity, draw_minibatches
from tfpolicies.program.runtimes.runtime import ActingRuntime


class PlainMean(PGTF2Policy):
    """Its loss takes means over all rows and knows nothing of masks."""

    def loss(self, model, dist_class, train_batch):
        dist_inputs, _ = model(train_batch)
        logp = dist_class(dist_inputs).logp(train_batch["actions"])
        self._rows = tf.cast(tf.shape(logp)[0], tf.float32)
        return -tf.reduce_mean(logp * train_batch["advantages"])

    def stats_fn(self, train_batch):
        return {"min_rows": self._rows, "max_rows": self._rows, "rows": self._rows}


# -- one trace ------------------------------------------------------------------------------------


def test_a_hundred_policies_with_one_program_are_traced_once():
    first = make(lr=0.01, inference="onnx")
    batch = batch_for(first, 8)
    for i in range(100):
        numbers = {"lr": 1e-4 * (i + 1), "gamma": 0.9, "clip_param": 0.1 + i / 1000}
        policy = make(seed=i, inference="onnx", **numbers)
        assert policy.program is first.program
        obs = batch["obs"][: 1 + i % 5]
        assert len(policy.compute_actions(obs).actions) == len(obs)
        policy.compute_log_likelihoods(batch["actions"], batch["obs"])
        policy.learn_epochs(batch, 2, 1 + i % 8)
        policy.learn_on_batch(batch)
        policy.apply_gradients(policy.compute_gradients(batch)[0])
    plain = make(inference="tf")
    plain.compute_actions(batch["obs"])
    traces = first.program.functions.traces
    assert max(traces.values()) == 1, traces
    assert {"act", "act (onnx)", "log_likelihoods", "learn_epochs", "gradients"} <= set(traces)


def test_a_registered_runtime_acts_after_it_was_compared(monkeypatch):
    class Added(ActingRuntime):
        def __init__(self, runtime, error):
            self.runtime, self.rows, self.error = runtime, [], error

        def run(self, states, inputs, noise, params):
            self.rows.append(len(noise))
            result = self.runtime.run(states, inputs, noise, params)
            return result._replace(values=result.values + self.error)

    for name, error in (("right", 0.0), ("wrong", 1.0)):
        make_runtime = functools.partial(lambda error, it: Added(it.runtime, error), error)
        spec = RuntimeSpec(name, lambda it: False, make_runtime, lambda it: None)
        monkeypatch.setitem(RUNTIMES, name, spec)
    inference = make(model={"fcnet_hiddens": [2]}).program.inference
    assert inference.get_runtime("right").rows == [1, 7]
    assert inference.get_stacked_runtime("right") is None
    with pytest.raises(ConfigError, match=r"wrong gives different values .*difference 1\)"):
        inference.get_runtime("wrong")


def test_densities_beyond_float32_keep_no_runtime_from_acting():
    def make_model(observation_space, num_outputs):
        certain = keras.initializers.Constant(-5.0)
        layer = keras.layers.Dense(num_outputs, bias_initializer=certain)
        return keras.Sequential([keras.Input(observation_space.shape), layer])

    many = spaces.Box(-1.0, 1.0, (30,), np.float32)
    policy = make(actions=many, model={"custom_model": make_model}, inference="auto")
    acted = policy.compute_actions(np.zeros((3, 3), np.float32), explore=True)
    assert np.isinf(acted.extras["action_prob"]).all()
    assert np.isfinite(acted.extras["action_logp"]).all()
    assert policy.driver.acting.inference == "onnx"
    for name in ("onnx", "tf"):
        assert policy.program.inference.get_stacked_runtime(name) is not None


def test_outputs_differ_by_more_than_rounding_or_by_infinities_of_only_one():
    policy = make(model={"fcnet_hiddens": [2]})
    layout = policy.program.inference.layout
    sizes = ((2, 3), (2, policy.program.spec.explorer.noise_size), 0)
    inputs, noise, params = (np.zeros(size, np.float32) for size in sizes)
    acted = policy.program.runtime.run(policy.driver.acting.state, [inputs], noise, params)
    likely = ([90.0, np.inf], [88.7228, np.inf], [88.0, np.exp(88.0)], [-200.0, 0.0], [0.0, 1.0])
    for logp, prob in likely:
        one = acted._replace(logp=np.full(2, logp, np.float32), prob=np.full(2, prob, np.float32))
        assert layout.find_difference(one, one, 1e-4) is None
    wrong = acted._replace(prob=acted.prob + np.float32(0.5))
    assert layout.find_difference(wrong, acted, 1e-4) == ("prob", pytest.approx(0.5, abs=1e-6))
    endless = acted._replace(values=np.array([np.inf, 1.0], np.float32))
    assert layout.find_difference(endless, endless, 1e-4) is None
    for one, other in ((endless, acted), (acted, endless)):
        assert layout.find_difference(one, other, 1e-4) == ("values", np.inf)
    unknown = acted._replace(values=np.array([np.nan, 1.0], np.float32))
    assert layout.find_difference(unknown, unknown, 1e-4)[0] == "values"


def test_a_program_is_freed_when_its_policies_go():
    policy, twin = (make(model={"fcnet_hiddens": [3]}, inference="onnx") for _ in range(2))
    policy.learn_on_batch(batch_for(policy, 8))
    program = weakref.ref(policy.program)
    del policy
    gc.collect()
    assert program() is twin.program
    del twin
    gc.collect()
    assert program() is None


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize(
    ("kind", "stays"),
    telling([(PPOTF2Policy, 0), (PPOTF1Policy, 4)], (PPOTF2Policy, 0), soak=[(PPOTF1Policy, 4)]),
)
def test_graphs_of_updates_are_freed(kind, stays):
    def learn(width):
        policy = make(kind, model={"fcnet_hiddens": [width]})
        policy.learn_on_batch(batch_for(policy, 8))
        policy.learn_epochs(batch_for(policy, 8), 1, 4)
        return weakref.ref(policy.program)

    first = learn(2)
    graphs = [weakref.ref(x) for x in gc.get_objects() if isinstance(x, tf.Graph)]
    for i in range(stays):  # as many wait for another policy with their spec
        gc.collect()
        assert first() is not None
        learn(3 + i)
    gc.collect()
    assert first() is None
    assert {graph() for graph in graphs} <= {None, tf.compat.v1.get_default_graph()}


# -- separate states ------------------------------------------------------------------------


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_policies_that_take_turns_learn_as_if_each_were_alone(policy_class):
    settings = [
        {"lr": 0.01, "gamma": 0.9, "grad_clip": 0.1, "seed": 1},
        {"lr": 0.003, "gamma": 0.5, "grad_clip": None, "clip_param": 0.1, "seed": 2},
    ]

    def turn(policy, i):
        actions = policy.compute_actions(np.ones((3, 3), np.float32)).actions
        policy.learn_epochs(batch_for(policy, 20, seed=i), 2, 8)
        policy.close()  # in graph mode the session
        return actions.tolist()

    alone, states = [], []
    for config in settings:
        policy = make(policy_class, **config)
        alone.append([turn(policy, i) for i in range(3)])
        states.append(policy.get_state())
    policies = [make(policy_class, **config) for config in settings]
    assert policies[0].program is policies[1].program
    turns = [[turn(policy, i) for policy in policies] for i in range(3)]
    assert [[row[k] for row in turns] for k in range(2)] == alone
    for policy, expected in zip(policies, states, strict=True):
        assert_equal(policy.get_weights(), expected["weights"])
        assert_equal(policy.get_state()["_optimizer_variables"], expected["_optimizer_variables"])


def test_a_policy_returns_copies():
    policy = make()
    batch = batch_for(policy, 8)
    policy.learn_on_batch(batch)
    state = policy.get_state()
    for arrays in (policy.get_weights(), policy.get_state()["_optimizer_variables"]):
        for array in arrays.values():
            array[...] = 9
    acted = policy.compute_actions(batch["obs"], explore=False)
    for array in (acted.actions, *acted.extras.values()):
        array[...] = 7
    again = policy.get_state()
    assert_equal(again["weights"], state["weights"])
    assert_equal(again["_optimizer_variables"], state["_optimizer_variables"])
    assert not (policy.compute_actions(batch["obs"], explore=False).actions == 7).any()
    copies = {key: array.copy() for key, array in state["weights"].items()}
    policy.set_weights(copies)
    for array in copies.values():
        array[...] = 5
    assert_equal(policy.get_weights(), state["weights"])


@pytest.mark.parametrize("base", [PlainMean, PGTF2Policy, PGTF1Policy])
def test_an_update_that_fails_half_way_leaves_the_policy_as_it_was(base):
    class Checked(base):
        def loss(self, model, dist_class, train_batch):
            good = tf.reduce_all(train_batch["advantages"] < 100.0)
            with tf.control_dependencies([tf.debugging.Assert(good, ["too large"])]):
                return super().loss(model, dist_class, train_batch)

    policy, twin = make(Checked, lr=0.1), make(Checked, lr=0.1)
    batch = batch_for(policy, 8)
    bad = batch.copy()
    bad["advantages"] = np.array([1, 2, 3, 4, 5, 6, 7, 1000], np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError):
        policy.learn_epochs(bad, 1, 2, shuffle=False)
    assert policy.num_grad_updates == 0
    for each in (policy, twin):
        each.learn_on_batch(batch)
    assert_equal(policy.get_weights(), twin.get_weights())


# -- what traced code may read --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "error", "words"),
    [
        (lambda self: self.policy_id, PolicyOwnedError, r"self.policy_id.*belongs to one policy"),
        (lambda self: self.global_timestep, PolicyOwnedError, "self.global_timestep"),
        (lambda self: self._state, PolicyOwnedError, "self._state"),
        (lambda self: self.config["seed"], ConfigError, r"config\['seed'\].*static_keys"),
        (lambda self: self.config["gama"], ConfigError, "Did you mean 'gamma'"),
    ],
    ids=["attribute", "property", "state", "setting", "typo"],
)
def test_traced_code_cannot_read_what_belongs_to_one_policy(read, error, words):
    class Reader(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            read(self)
            return super().loss(model, dist_class, train_batch)

    policy = make(Reader)
    with pytest.raises(error, match=words):
        policy.learn_on_batch(batch_for(policy, 4))
    assert policy.num_grad_updates == 0


def test_hyper_parameters_are_tensors_and_scratch_attributes_reach_the_statistics():
    class Scratch(PlainMean):
        def loss(self, model, dist_class, train_batch):
            assert isinstance(self.config["gamma"], tf.Tensor)
            assert self.config["grad_clip_by"] == "global_norm"
            self.doubled = 2.0 * self.config["gamma"]
            return super().loss(model, dist_class, train_batch)

        def stats_fn(self, train_batch):
            return {"doubled": self.doubled}

        def grad_stats_fn(self, train_batch, grads):
            return {"gradients": tf.constant(float(len(grads)))}

    for gamma in (0.5, 0.25):
        policy = make(Scratch, gamma=gamma)
        stats = policy.learn_on_batch(batch_for(policy, 4))["learner_stats"]
        assert (stats["doubled"], stats["gradients"]) == (2.0 * gamma, 4.0)


def test_a_class_without_a_loss_acts_and_refuses_to_learn():
    policy = make(TFPolicy)
    assert policy.compute_actions(np.zeros((2, 3))).actions.shape == (2,)
    with pytest.raises(ConfigError, match="acts but does not learn"):
        policy.learn_on_batch({"obs": np.zeros((2, 3)), "new_obs": np.zeros((2, 3))})


# -- rows and masks -------------------------------------------------------------------------------


@pytest.mark.core
def test_a_loss_that_ignores_the_mask_gets_exactly_its_rows():
    policy = make(PlainMean, lr=0.0)
    stats = policy.learn_epochs(batch_for(policy, 10), 1, 4)["learner_stats"]
    assert (stats["min_rows"], stats["max_rows"]) == (2, 4)  # minibatches of 4, 4 and 2
    np.testing.assert_allclose(stats["rows"], 10 / 3, rtol=1e-6)


def test_exact_rows_and_masked_rows_give_the_same_update():
    plain, masked = make(PlainMean, lr=0.05), make(PGTF2Policy, lr=0.05)
    batch = batch_for(plain, 10)
    for policy in (plain, masked):
        policy.learn_epochs(batch, 3, 4)
    assert_close(plain.get_weights(), masked.get_weights(), atol=1e-6)


def test_xla_is_refused_for_a_loss_that_ignores_the_mask():
    policy = make(PlainMean, jit_compile=True)
    with pytest.raises(ConfigError, match=r"jit_compile=True.*train_batch\['loss_mask'\]"):
        policy.learn_on_batch(batch_for(policy, 4))
    auto = make(PlainMean, jit_compile="auto")
    auto.learn_on_batch(batch_for(auto, 4))
    assert auto.program.updates.compile_mode is CompileMode.PLAIN


def test_a_missing_or_misshapen_column_is_named_before_anything_changes():
    policy = make()
    batch = batch_for(policy, 6)
    policy.learn_on_batch(batch)
    before = policy.get_state()
    incomplete = {k: v for k, v in batch.items() if k != "advantages"}
    with pytest.raises(MissingColumnError, match="'advantages'"):
        policy.learn_on_batch(incomplete)
    with pytest.raises(BatchError, match=r"'advantages' has rows of shape \(2,\).*shape \(\)"):
        policy.learn_on_batch({**batch, "advantages": np.ones((6, 2), np.float32)})
    with pytest.raises(BatchError, match=r"same number of rows.*'actions': \[4\]"):
        policy.learn_on_batch({**batch, "actions": batch["actions"][:4]})
    with pytest.raises(BatchError, match="empty"):
        policy.learn_on_batch({key: column[:0] for key, column in batch.items()})
    after = policy.get_state()
    assert_equal(before["weights"], after["weights"])
    assert before["num_grad_updates"] == after["num_grad_updates"] == 1
    assert before["rng"] == after["rng"]


def test_a_loaded_batch_stays_as_it_was_when_a_policy_first_learned_from_it():
    policies = [make(), make()]
    batches = [batch_for(policy, 8) for policy in policies]
    for policy, batch in zip(policies, batches, strict=True):
        policy.load_batch_into_buffer(batch)
        policy.learn_on_loaded_batch()
    for name in ("obs", "advantages", "action_logp"):
        batches[1][name][...] = 0.0
    for policy in policies:
        policy.learn_on_loaded_batch()
    assert_equal(*(policy.get_weights() for policy in policies))


def test_minibatches_hold_each_row_once_per_epoch():
    drawn = draw_minibatches(10, 3, 4, np.random.default_rng(0))
    assert (drawn.steps, drawn.rows.shape[1], drawn.is_full_batch) == (9, 4, False)
    for epoch in range(3):
        part = slice(3 * epoch, 3 * epoch + 3)
        used = drawn.rows[part][drawn.mask[part] > 0]
        assert sorted(used.tolist()) == list(range(10))
    padded = drawn.pad_to(17)
    assert padded.rows.shape == (15, 4)
    assert padded.mask[9:].sum() == 0
    assert draw_minibatches(4, 2, 4, None).pad_to(6).mask.tolist() == [[1, 1, 1, 1, 0, 0]] * 2


def test_batches_below_a_minibatch_need_no_other_compilation(monkeypatch):
    drawn = draw_minibatches(3, 2, 8, None)
    assert drawn.rows.shape == (2, 8)
    assert drawn.mask.sum(axis=1).tolist() == [3, 3]
    assert drawn.pad_to(16).rows.shape == (4, 8)
    compiled, plain = (make(jit_compile=jit, lr=0.01) for jit in (True, False))
    compiled._learner.discover_columns()
    compiler, shapes = compiled.program.updates._compiler, set()
    learner = compiler.get_learn_function(CompileMode.LOOP, fetches=False, clips_gradients=False)

    def spy(state, *inputs, **kwargs):
        shapes.add(str([x.shape for x in tf.nest.flatten(inputs)]))
        return learner(state, *inputs, **kwargs)

    monkeypatch.setitem(compiler._learn_functions, (CompileMode.LOOP, False, False), spy)
    for rows in (40, 7, 3, 33, 12):
        batch = batch_for(plain, rows)
        for policy in (compiled, plain):
            policy.learn_epochs(batch, 2, 16)
    assert len(shapes) == 1
    assert_close(compiled.get_weights(), plain.get_weights(), atol=1e-5)


def test_padding_grows_by_doubling():
    capacities = [0]
    for rows in (2048, 2047, 2049, 2100, 5000, 3):
        capacities.append(compute_capacity(rows, 256, capacities[-1]))
    assert capacities == [0, 2048, 2048, 4096, 4096, 8192, 8192]


# -- settings ----------------------------------------------------------------------


def test_untraced_functions_give_the_same_numbers():
    traced, untraced = make(lr=0.01), make(lr=0.01, eager_tracing=False)
    assert traced.program is not untraced.program
    batch = batch_for(traced, 10)
    results = [policy.learn_epochs(batch, 2, 4) for policy in (traced, untraced)]
    assert_close(traced.get_weights(), untraced.get_weights(), atol=1e-6)
    assert results[0]["learner_stats"] == pytest.approx(results[1]["learner_stats"], abs=1e-5)
    left, right = (policy.compute_actions(batch["obs"]) for policy in (traced, untraced))
    np.testing.assert_array_equal(left.actions, right.actions)


def test_regularizers_of_layers_are_part_of_the_loss():
    def factory(space, units, weight):
        layer = keras.layers.Dense(units, kernel_regularizer=keras.regularizers.L2(weight))
        return keras.Sequential([keras.Input((3,)), layer])

    gradients = []
    for weight in (0.0, 0.25):
        model = {"custom_model": factory, "custom_model_config": {"weight": weight}}
        policy = make(PGTF2Policy, model=model)
        gradients.append(policy.compute_gradients(batch_for(policy, 6, seed=3))[0])
        kernel = policy.get_weights()["layer_0/kernel"]
    # The batches are equal: actions come from the same weights and noise.
    np.testing.assert_allclose(gradients[1][0] - gradients[0][0], 2 * 0.25 * kernel, atol=1e-6)


def test_the_optimizer_is_any_of_keras_with_its_settings():
    policy = make(optimizer={"type": "sgd", "momentum": 0.5}, lr=0.1)
    batch = batch_for(policy, 6)
    velocity = 0.0
    for _ in range(2):
        before = policy.get_weights()
        gradients, _ = policy.compute_gradients(batch)
        policy.learn_on_batch(batch)
        velocity = 0.5 * velocity - 0.1 * gradients[0]
        moved = policy.get_weights()["layer_0/kernel"] - before["layer_0/kernel"]
        np.testing.assert_allclose(moved, velocity, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"type": "nope"}, {"type": "sgd", "lrr": 1}, {"learning_rate": 0.1}]
)
def test_an_optimizer_that_keras_does_not_know_is_refused(settings):
    with pytest.raises(ConfigError, match="optimizer"):
        make(optimizer=settings)


@pytest.mark.core
@pytest.mark.parametrize("how", ["global_norm", "norm", "value"])
def test_gradients_are_clipped_in_three_ways(how):
    gradients = [np.array([3.0, -4.0]), np.array([[0.3, 0.0]]), np.array([12.0])]
    limit = 1.5
    if how == "global_norm":
        expected = [g * limit / 13.0 for g in gradients]  # 9 + 16 + 144 = 13^2; 0.09 is too little
        expected = [g * 13.0 / np.sqrt(169.09) for g in expected]
    elif how == "norm":
        expected = [gradients[0] * limit / 5, gradients[1], gradients[2] * limit / 12]
    else:
        expected = [np.array([1.5, -1.5]), gradients[1], np.array([1.5])]
    pairs = [(tf.constant(g, tf.float32), None) for g in gradients]
    pairs.insert(1, (None, "unused"))
    clipped = clip_gradients(pairs, tf.constant(limit), how)
    assert clipped.pop(1) == (None, "unused")
    for (actual, _), right in zip(clipped, expected, strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-6)
    for clip in (clip_gradients, tf.function(clip_gradients)):  # the limit is a constant, an input
        unlimited = clip(pairs[:1], tf.constant(np.inf), how)[0][0]
        np.testing.assert_array_equal(unlimited, gradients[0])


def test_norms_are_computed_only_where_gradients_are_limited():
    free, bound = make(), make(grad_clip=0.01)
    assert free.program is bound.program
    batch, updates = batch_for(free, 6), free.program.updates
    free.learn_on_batch(batch)
    bound.learn_on_batch(batch)
    unlimited, limited = updates._compiler._steps.values()
    counts = [analyze_graph(step.graph).num_operations for step in (unlimited, limited)]
    assert counts[0] < counts[1]
    kernels = [next(iter(policy.get_weights().values())) for policy in (free, bound)]
    assert not np.array_equal(*kernels)
    bound.set_state(make(grad_clip=0.01).get_state())
    bound.set_hyperparameter("grad_clip", None)
    bound.learn_on_batch(batch)
    assert_equal(bound.get_weights(), free.get_weights())
    assert free.program.functions.traces["learn_step"] == 2


def test_a_policy_clips_as_its_config_says():
    for how in ("global_norm", "norm", "value"):
        free, bound = make(grad_clip_by=how), make(grad_clip_by=how, grad_clip=0.01)
        assert free.program is bound.program
        batch = batch_for(free, 6)
        (raw, _), (clipped, _) = (policy.compute_gradients(batch) for policy in (free, bound))
        pairs = [(tf.constant(g), None) for g in raw]
        expected = clip_gradients(pairs, tf.constant(0.01), how)
        for actual, (right, _) in zip(clipped, expected, strict=True):
            np.testing.assert_allclose(actual, right, rtol=1e-4, atol=1e-9)


def test_the_masked_mean_of_no_rows_is_zero():
    assert float(masked_mean(tf.constant([5.0]), tf.constant([0.0]))) == 0.0


def test_settings_that_change_code_make_another_program_and_numbers_do_not():
    base = make()
    assert make(lr=1e-5, kl_coeff=0.0, entropy_coeff=1.0, gamma=0.1).program is base.program
    relu = {"fcnet_hiddens": [4], "fcnet_activation": "relu"}
    changes = {"use_critic": False, "optimizer": {"type": "sgd"}, "grad_clip_by": "value"}
    for change in ({name: x} for name, x in {**changes, "model": relu}.items()):
        assert make(**change).program is not base.program
    assert make(PlainMean).program is not make(PGTF2Policy).program


def test_a_custom_class_adds_hyper_parameters_through_its_config():
    @dataclass(frozen=True, kw_only=True)
    class Training(PGTrainingSettings):
        bonus: float = 0.0  # added to the loss

    class Config(PGConfig):
        training_section = Training

    class Bonus(PGTF2Policy):
        config_class = Config
        hyperparameters = (*PGTF2Policy.hyperparameters, "bonus")

        def stats_fn(self, train_batch):
            return {"bonus": self.config["bonus"]}

    policies = [make(Bonus, bonus=bonus) for bonus in (1.5, -2.0)]
    assert policies[0].program is policies[1].program
    stats = [p.learn_on_batch(batch_for(p, 4))["learner_stats"]["bonus"] for p in policies]
    assert stats == [1.5, -2.0]


def test_leaves_of_the_program_are_those_of_the_space():
    policy = make(PPOTF2Policy)
    (leaf,) = policy.program.spec.obs_leaves
    assert isinstance(leaf, Leaf)
    assert (leaf.path, leaf.shape, leaf.dtype.name) == ((), (3,), "float32")


def test_without_shuffling_minibatches_are_slices_in_order():
    ordered, by_hand = make(lr=0.01), make(lr=0.01)
    batch = batch_for(ordered, 10)
    ordered.learn_epochs(batch, 1, 4, shuffle=False)
    for start in (0, 4, 8):
        by_hand.learn_on_batch(batch[start : start + 4])
    assert_close(ordered.get_weights(), by_hand.get_weights(), atol=1e-6)
