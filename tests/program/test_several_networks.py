"""States with several networks: a loss and an optimizer each, targets, noise, skipped updates."""

import copy
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, TWO, assert_close, assert_equal, rows_of
from helpers.picklable import Corridor
from tfpolicies import AlgorithmConfig, SampleBatch, TFPolicy, WorkerSet
from tfpolicies.base.validators import FRACTION, POSITIVE
from tfpolicies.config.sections import TrainingSettings
from tfpolicies.config.setting import setting
from tfpolicies.distributed import worker_protocol
from tfpolicies.errors import ConfigError, NonFiniteError, WeightsError
from tfpolicies.models.losses import masked_mean
from tfpolicies.program.networks import NetworkPlan


class Temperature(keras.layers.Layer):
    """One number that learns."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self):
        return tf.convert_to_tensor(self.scale)


def critic():
    obs, actions = keras.Input((3,), name="obs"), keras.Input((1,), name="actions")
    joined = keras.layers.Concatenate()([obs, actions])
    return keras.Model([obs, actions], keras.layers.Dense(1, use_bias=False)(joined))


@dataclass(frozen=True, kw_only=True)
class Rates(TrainingSettings):
    """Learning rates of the networks."""

    lr: float = 0.1
    critic_lr: float = setting(0.2, POSITIVE)
    temperature_lr: float = setting(0.3, POSITIVE)
    tau: float = setting(0.25, FRACTION)


class ThreeConfig(AlgorithmConfig):
    """The config of `Three`."""

    training_section = Rates


class Three(TFPolicy):
    """An actor, a critic that learns values one above its target's, and a noisy temperature."""

    config_class = ThreeConfig
    hyperparameters = (*TFPolicy.hyperparameters, "critic_lr", "temperature_lr", "tau")

    def make_model(self):
        inputs = keras.Input((3,))
        return keras.Model(inputs, keras.layers.Dense(2, use_bias=False)(inputs))

    @classmethod
    def network_plans(cls, observation_space, dist_class, static):
        return {
            "model": NetworkPlan(),
            "critic": NetworkPlan(critic, target=True, lr="critic_lr"),
            "temperature": NetworkPlan(Temperature, lr="temperature_lr", every=2),
        }

    @classmethod
    def learning_noise_size(cls, dist_class, static):
        return 1

    def optimizer(self):
        return keras.optimizers.SGD()

    def loss(self, model, dist_class, train_batch):
        logits, _ = model(train_batch)
        entries = {"actions": tf.cast(train_batch["actions"], tf.float32)[:, None]}
        values = self.networks["critic"](train_batch["obs"], **entries)[:, 0]
        expected = self.target_networks["critic"](train_batch["obs"], **entries)[:, 0] + 1.0
        scale, mask = self.networks["temperature"](), train_batch["loss_mask"]
        self.record(mean_value=masked_mean(values, mask), noise=self.learning_noise[:, 0])
        return [
            # the gradient with respect to the critic does not count: each loss has one network
            masked_mean(0.5 * tf.reduce_sum(logits**2, -1) + 7.0 * values, mask),
            masked_mean(0.5 * (values - tf.stop_gradient(expected)) ** 2, mask),
            scale * masked_mean(self.learning_noise[:, 0], mask),
        ]


class Counter(keras.layers.Layer):
    """A number that no gradient changes: each call adds 1."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", name="count", trainable=False)

    def call(self):
        self.count.assign(self.count + 1.0)
        return tf.convert_to_tensor(self.count)


class Counting(Three):
    """`Three` with a network that counts updates, and has no loss."""

    @classmethod
    def network_plans(cls, observation_space, dist_class, static):
        model, *others = super().network_plans(observation_space, dist_class, static).items()
        return dict([model, ("counter", NetworkPlan(Counter)), *others])

    def loss(self, model, dist_class, train_batch):
        self.record(max_count=self.networks["counter"]())
        return super().loss(model, dist_class, train_batch)


class CountingInGraph(Counting):
    runtime = "session"


class InTurn(Three):
    """The actor's loss is multiplied by the sum of the critic's weights after the critic's step."""

    def loss(self, model, dist_class, train_batch):
        actor_loss, *others = super().loss(model, dist_class, train_batch)

        def multiply():
            factor = tf.reduce_sum(self.networks["critic"].model.trainable_variables[0])
            self.record(factor=factor)
            return factor * actor_loss

        return [multiply, *others]


CRITIC = np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)  # whose sum is 2.5


class ThreeInGraph(Three):
    runtime = "session"


class InTurnInGraph(InTurn):
    runtime = "session"


def make_three(policy_class=Three, **config):
    settings = {"seed": 0, "inference": "tf", "jit_compile": False}
    return policy_class(OBS, TWO, {**settings, **config})


def make_batch(rows):
    return SampleBatch(obs=rows_of(OBS, rows), actions=np.arange(rows) % 2)


def make_in_turn(policy_class=InTurn, **config):
    """Makes a policy whose loss is a function, and whose critic has weights with the sum 2.5."""
    policy = make_three(policy_class, **config)
    policy.set_weights({**policy.get_weights(), "critic/layer_0/kernel": CRITIC})
    return policy


def draw_noise(policy, steps, rows=4):
    """Returns the noise of the next updates, which stays to be drawn."""
    rng = copy.deepcopy(policy.driver.state.learning_rng)
    return rng.standard_normal((steps, rows, 1), np.float32)


def assert_near(actual, expected, rtol=1e-5, atol=1e-6):
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=rtol, atol=atol)


def assert_same_state(left, right):
    """Asserts that two states have equal networks, optimizers and generators of noise."""
    for key in ("weights", "target_weights", "_optimizer_variables"):
        assert_equal(left[key], right[key])
    assert left["learning_rng"] == right["learning_rng"]


def update_by_numpy(weights, target, batch, noise, moves_target, updated=0, *, in_turn=False):
    """Returns the weights of actor, critic, temperature and target after updates."""
    (actor, value, scale), target = (x.astype(np.float64) for x in weights), target.copy()
    size = noise.shape[1]
    for k, moves in enumerate(moves_target):
        rows = slice(k * size, (k + 1) * size)
        obs = batch["obs"][rows].astype(np.float64)
        inputs = np.column_stack([obs, batch["actions"][rows]])
        error = inputs @ value - (inputs @ target + 1.0)
        value = value - 0.2 * inputs.T @ error / size
        factor = value.sum() if in_turn else 1.0
        actor = actor - 0.1 * factor * obs.T @ (obs @ actor) / size
        if (updated + k) % 2 == 0:
            scale = scale - 0.3 * noise[k].mean()
        if moves:
            target = 0.25 * value + 0.75 * target
    return actor, value, scale, target


@pytest.mark.parametrize(
    ("policy_class", "jit"), [(Counting, False), (Counting, True), (CountingInGraph, False)]
)
def test_a_network_without_trainable_variables_has_no_loss_and_is_changed_by_calls(
    policy_class, jit
):
    policy, three = make_three(policy_class, jit_compile=jit), make_three()
    three.set_state({**policy.get_state(), **_without_counter(policy)})
    batch = make_batch(12)
    stats = policy.learn_epochs(batch, 2, 4)["learner_stats"]
    three.learn_epochs(batch, 2, 4)
    weights = policy.get_weights()
    assert weights.pop("counter/layer_0/count") == stats["max_count"] == 6.0
    assert_close(weights, three.get_weights(), 1e-6)
    gradients, _ = policy.compute_gradients(batch)
    assert len(gradients) == 3
    policy.apply_gradients(gradients)
    assert policy.get_weights()["counter/layer_0/count"] == 6.0
    assert policy.copy().learn_on_batch(batch)["learner_stats"]["max_count"] == 7.0


def _without_counter(policy):
    """Returns the weights of a `Counting` policy that a `Three` has."""
    weights = policy.get_weights()
    del weights["counter/layer_0/count"]
    return {"weights": weights}


@pytest.mark.parametrize(
    ("policy_class", "jit"), [(Three, False), (Three, True), (ThreeInGraph, False)]
)
def test_updates_are_those_of_numpy(policy_class, jit):
    policy, batch = make_three(policy_class, jit_compile=jit), make_batch(12)
    before = list(policy.get_weights().values())
    names = ["layer_0/kernel", "critic/layer_0/kernel", "temperature/layer_0/scale"]
    assert list(policy.get_weights()) == names
    np.testing.assert_array_equal(policy.get_state()["target_weights"].popitem()[1], before[1])
    noise, moves_target = draw_noise(policy, 3), np.array([False, True, True])
    result = policy.driver.learning.replay(batch, 4, moves_target)
    state = policy.get_state()
    actual = [*policy.get_weights().values(), *state["target_weights"].values()]
    assert_near(actual, update_by_numpy(before, before[1], batch, noise, moves_target))
    assert result["num_grad_updates_lifetime"] == 3
    rates = {name: result["learner_stats"][f"cur_{name}"] for name in ("lr", "critic_lr")}
    assert rates == pytest.approx({"lr": 0.1, "critic_lr": 0.2})
    slots = state["_optimizer_variables"]
    assert {name: int(x) for name, x in slots.items() if name.endswith("_iteration")} == {
        "optimizer/000_iteration": 3,
        "critic_optimizer/000_iteration": 3,
        "temperature_optimizer/000_iteration": 2,
    }


@pytest.mark.parametrize(
    ("policy_class", "jit"), [(InTurn, False), (InTurn, True), (InTurnInGraph, False)]
)
def test_a_loss_that_is_a_function_reads_the_other_networks_after_their_steps(policy_class, jit):
    policy, batch = make_in_turn(policy_class, jit_compile=jit), make_batch(12)
    before = list(policy.get_weights().values())
    target = next(iter(policy.get_state()["target_weights"].values()))
    noise, moves_target = draw_noise(policy, 3), [False, True, True]
    policy.driver.learning.replay(batch, 4, np.array(moves_target))
    expected = update_by_numpy(before, target, batch, noise, moves_target, in_turn=True)
    assert_near(policy.get_weights().values(), expected[:3])
    once = update_by_numpy(before, target, batch, noise, [False], in_turn=True)
    assert abs(once[1].sum() - 2.5) > 0.01  # the critic's step matters


def test_functions_do_not_wait_for_each_other():
    class TwoWait(InTurn):
        def loss(self, model, dist_class, train_batch):
            actor_loss, critic_loss, scale_loss = super().loss(model, dist_class, train_batch)
            return [actor_loss, lambda: critic_loss, scale_loss]

    policy, batch = make_in_turn(TwoWait), make_batch(4)
    assert policy.learn_on_batch(batch)["learner_stats"]["factor"] == 2.5
    assert not np.array_equal(policy.get_weights()["critic/layer_0/kernel"], CRITIC)


def test_hooks_are_called_for_the_tensors_and_then_for_the_functions():
    class Hooked(InTurn):
        def compute_gradients_fn(self, optimizer, loss):
            if isinstance(loss, list):
                calls.append(("compute", len(optimizer), len(loss)))
            return super().compute_gradients_fn(optimizer, loss)

        def apply_gradients_fn(self, optimizer, grads):
            calls.append(("apply", len(optimizer), len(grads)))
            super().apply_gradients_fn(optimizer, grads)

    calls = []
    policy, batch = make_three(Hooked), make_batch(4)
    policy.compute_gradients(batch)
    assert set(calls) == {("compute", 2, 2), ("compute", 1, 1)}
    calls.clear()
    policy.learn_on_batch(batch)
    assert calls == [("compute", 2, 2), ("apply", 2, 2), ("compute", 1, 1), ("apply", 1, 1)]


def test_the_cause_is_found_where_only_a_function_is_not_finite():
    class Breaks(Three):
        def loss(self, model, dist_class, train_batch):
            actor_loss, *others = super().loss(model, dist_class, train_batch)
            before = tf.reduce_sum(self.networks["critic"].model.trainable_variables[0])

            def multiply():
                now = tf.reduce_sum(self.networks["critic"].model.trainable_variables[0])
                factor = tf.where(now == before, 1.0, np.inf)
                self.record(factor=factor)
                return actor_loss * factor

            return [multiply, *others]

    policy, batch = make_three(Breaks), make_batch(8)
    before = policy.get_weights()
    with pytest.raises(NonFiniteError, match=r"factor \(inf\)"):
        policy.learn_on_batch(batch)
    assert_equal(before, policy.get_weights())


def test_gradients_of_functions_are_those_before_any_step():
    policy, plain, batch = make_in_turn(), make_in_turn(Three), make_batch(4)
    gradients, info = policy.compute_gradients(batch)
    others, _ = plain.compute_gradients(batch)
    assert_near(gradients, [2.5 * others[0], *others[1:]], atol=0)
    assert info["learner_stats"]["factor"] == 2.5


def test_a_function_that_gives_no_number_is_refused():
    class Wrong(Three):
        def loss(self, model, dist_class, train_batch):
            return [lambda: None, *super().loss(model, dist_class, train_batch)[1:]]

    with pytest.raises(ConfigError, match=r"Wrong\.loss must return a scalar tensor.* got None"):
        make_three(Wrong).learn_on_batch(make_batch(4))


def test_a_custom_loss_of_a_model_refuses_losses_that_are_functions():
    class Greedy(keras.Model):
        def custom_loss(self, policy_loss, loss_inputs):
            return [2.0 * loss for loss in policy_loss]

    class Doubled(InTurn):
        def make_model(self):
            inputs = keras.Input((3,))
            return Greedy(inputs, keras.layers.Dense(2, use_bias=False)(inputs))

    policy = make_three(Doubled)
    with pytest.raises(ConfigError, match=r"custom_loss of .* needs all losses"):
        policy.learn_on_batch(make_batch(4))
    assert policy.num_grad_updates == 0


def test_an_update_continues_the_count_of_the_others():
    policy, batch = make_three(), make_batch(4)
    noise, weights = draw_noise(policy, 2), list(policy.get_weights().values())
    result = policy.learn_on_batch(batch)
    policy.learn_on_batch(batch)
    np.testing.assert_array_equal(result["noise"], noise[0, :, 0])
    once = update_by_numpy(weights, weights[1], batch, noise[:1], [False])
    twice = update_by_numpy(once[:3], once[3], batch, noise[1:], [False], updated=1)
    assert_near(policy.get_weights().values(), twice[:3])


def test_gradients_are_those_of_each_networks_own_variables():
    policy, batch = make_three(), make_batch(4)
    twin = make_three()
    gradients, _ = policy.compute_gradients(batch)
    assert [x.shape for x in gradients] == [(3, 2), (4, 1), ()]
    policy.apply_gradients(gradients)
    twin.learn_on_batch(batch)  # its noise is the same
    assert_close(policy.get_weights(), twin.get_weights(), atol=1e-6)


def test_acting_leaves_the_noise_of_learning_alone():
    policy, twin, batch = make_three(), make_three(), make_batch(8)
    twin.compute_actions(batch["obs"])
    for each in (policy, twin):
        each.learn_epochs(batch, 2, 3)
    assert_equal(policy.get_weights(), twin.get_weights())


@pytest.mark.parametrize("policy_class", [Three, ThreeInGraph])
def test_a_checkpoint_continues_to_the_bit(policy_class, tmp_path):
    policy, batch, moves_target = make_three(policy_class), make_batch(8), np.array([True, False])
    policy.driver.learning.replay(batch, 4, moves_target)
    policy.export_checkpoint(tmp_path)
    twin = policy_class.from_checkpoint(tmp_path)
    for each in (policy, twin):
        each.driver.learning.replay(batch, 4, moves_target)
    assert_same_state(policy.get_state(), twin.get_state())


def test_the_weights_of_the_network_that_acts_are_enough():
    policy, other = make_three(), make_three(seed=1)
    before, weights = policy.get_weights(), other.get_weights()
    actor = {"layer_0/kernel": weights["layer_0/kernel"]}
    policy.set_weights(actor)
    assert_equal(policy.get_weights(), {**before, **actor})
    policy.set_weights(weights)
    assert_equal(policy.get_weights(), weights)
    target = policy.get_state()["target_weights"]["critic_target/layer_0/kernel"]
    np.testing.assert_array_equal(target, weights["critic/layer_0/kernel"])
    with pytest.raises(WeightsError, match="has 2 arrays, but this policy has 3"):
        policy.set_weights(list(weights.values())[:2])


def test_an_update_that_is_not_finite_changes_no_network_target_or_noise():
    policy, batch = make_three(), make_batch(8)
    policy.driver.learning.replay(batch, 4, np.array([True, True]))
    before = policy.get_state()
    bad = batch.copy()
    bad["obs"] = np.where(np.arange(8)[:, None] == 5, np.inf, batch["obs"]).astype(np.float32)
    with pytest.raises(NonFiniteError, match=r"train_batch\['obs'\].* in minibatch 2 of 2"):
        policy.driver.learning.replay(bad, 4, np.array([True, True]))
    assert_same_state(before, policy.get_state())


def test_each_network_needs_a_loss_and_one_optimizer():
    class TwoOfThree(Three):
        def loss(self, model, dist_class, train_batch):
            return super().loss(model, dist_class, train_batch)[:2]

    class Listed(Three):
        def optimizer(self):
            return [keras.optimizers.SGD()]

    with pytest.raises(ConfigError, match="returned a list of 2, but `optimizer` a list of 3"):
        make_three(TwoOfThree).learn_on_batch(make_batch(4))
    with pytest.raises(ConfigError, match=r"called for each of the 3 networks\. Return one"):
        make_three(Listed)


def test_one_loss_of_several_networks_is_that_of_all():
    class Summed(Three):
        def loss(self, model, dist_class, train_batch):
            return tf.add_n(super().loss(model, dist_class, train_batch))

    policy, twin, batch = make_three(Summed), make_three(), make_batch(4)
    both = [each.compute_gradients(batch)[0] for each in (policy, twin)]
    for i in (0, 2):
        np.testing.assert_allclose(both[0][i], both[1][i], rtol=1e-5)
    inputs = np.column_stack([batch["obs"], batch["actions"]]).mean(axis=0)[:, None]
    np.testing.assert_allclose(both[0][1], both[1][1] + 7.0 * inputs, rtol=1e-4, atol=1e-5)


def test_copies_of_a_policy_learn_separately():
    policy, batch = make_three(), make_batch(8)
    twin = policy.copy("twin")
    twin.driver.learning.replay(batch, 4, np.array([True, True]))
    assert_equal(policy.get_weights(), make_three().get_weights())
    assert twin.get_state()["target_weights"].keys() == policy.get_state()["target_weights"].keys()
    assert twin.driver.state.learning_rng is not policy.driver.state.learning_rng


def test_sampling_workers_get_the_network_that_acts_and_the_others_on_demand(ray_cluster):
    config = ThreeConfig().rollouts(num_rollout_workers=1, rollout_fragment_length=10)
    config.debugging(seed=0)
    workers = WorkerSet(config=config, default_policy_class=Three, env_creator=Corridor)
    try:
        local = workers.local_worker()
        local.policy_map["default_policy"].learn_on_batch(make_batch(8))
        result = worker_protocol.make_weights_update(local, ["default_policy"], inference_only=True)
        assert result.partial == {"default_policy"}
        assert list(result.weights["default_policy"]) == ["layer_0/kernel"]
        workers.sync_weights()
        assert workers.sample()[0].count == 10
        left, right = workers.foreach_worker(lambda worker: worker.get_weights())
        assert_equal(left["default_policy"], right["default_policy"])
    finally:
        workers.stop()


UNKNOWN_RATE = r"has lr='pace', which is not in Wrong\.hyperparameters: lr, gamma, .*Add it there"
WRONG_PLANS = [
    ("critic", critic, "must be a NetworkPlan, got <function critic"),
    ("critic", NetworkPlan(), "must have a `make`, a function"),
    ("model", NetworkPlan(critic), "must not have a `make`; override `make_model`"),
    ("critic_target", NetworkPlan(critic), "needs another name: a word in lower case"),
    ("a/b", NetworkPlan(critic), "needs another name"),
    ("critic", NetworkPlan(critic, every=0), "needs an `every` that is an integer >= 1, got 0"),
    ("critic", NetworkPlan(critic, lr="pace"), UNKNOWN_RATE),
]
LIST = "must return a dict of NetworkPlans whose first key is .* got"
REVERSED = r"first key is 'model', the network that acts; got \['temperature', 'critic', 'model'\]"


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plans: [*plans.values()], LIST),
        (lambda plans: dict(reversed(plans.items())), REVERSED),
        *(
            (lambda plans, new={name: plan}: plans | new, f"the plan of '{name}' {words}")
            for name, plan, words in WRONG_PLANS
        ),
    ],
)
def test_a_wrong_plan_is_refused_when_a_policy_is_made(change, message):
    class Wrong(Three):
        @classmethod
        def network_plans(cls, observation_space, dist_class, static):
            return change(super().network_plans(observation_space, dist_class, static))

    with pytest.raises(ConfigError, match=message):
        make_three(Wrong)
