"""Models: the catalogue's MLP, and models of the user in every form."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.arrays import assert_arrays_equal
from helpers.factories import PLANE, assert_equal, batch_for, make
from helpers.keras_models import make_mlp
from tfpolicies import PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.architecture import compute_fingerprint

ZEROS = np.zeros((2, 3), np.float32)


def sequential(units=2, activation="tanh", **options):
    hidden = keras.layers.Dense(4, activation=activation, **options)
    return keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(units)])


class Subclassed(keras.Model):
    """Says how it is made, so that it can be cloned."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.out = keras.layers.Dense(units)

    def call(self, inputs):
        scaled = tf.nn.relu(inputs) + tf.math.tanh(inputs * tf.constant(2.0))
        return self.out(self.hidden(scaled))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Opaque(keras.Model):
    """Has no `get_config`, and makes its value itself, under names."""

    def __init__(self, units):
        super().__init__()
        self.out = keras.layers.Dense(units)
        self.value = keras.layers.Dense(1)

    def build(self, input_shape):
        self.scale = self.add_weight(name="scale", shape=(1,), initializer="ones")
        super().build(input_shape)

    def call(self, inputs):
        inputs = inputs * self.scale
        return {"action_dist_inputs": self.out(inputs), "vf_preds": self.value(inputs)}


def opaque_factory(observation_space, num_outputs, **config):
    return Opaque(num_outputs)


def weights_by_layer(policy):
    names = [variable.path for variable in policy.model.variables]
    return dict(zip(names, policy.get_weights().values(), strict=True))


@pytest.mark.core
def test_the_mlp_has_its_documented_layers_norms_and_zero_biases_at_any_depth():
    policy = make(model={"fcnet_hiddens": [5, 4]})
    weights = weights_by_layer(policy)
    assert sorted(weights) == sorted(
        f"{layer}/{role}"
        for layer in ("fc_1", "fc_2", "fc_out", "fc_value_1", "fc_value_2", "value_out")
        for role in ("kernel", "bias")
    )
    for name, values in weights.items():
        if name.endswith("bias"):
            assert not values.any()
        else:
            norm = 0.01 if "out" in name else 1.0
            np.testing.assert_allclose(np.linalg.norm(values, axis=0), norm, rtol=1e-5)
    assert len(make(model={"fcnet_hiddens": []}).get_weights()) == 4
    assert len(make(PGTF2Policy, model={"fcnet_hiddens": [2] * 70}).get_weights()) == 142


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_fresh_policy_has_zero_logits_and_values_for_zero_observations(inference):
    extras = make(inference=inference).compute_actions(ZEROS).extras
    assert not extras["action_dist_inputs"].any()
    assert not extras["vf_preds"].any()


def test_free_log_std_is_one_trained_vector_per_policy():
    model = {"fcnet_hiddens": [4], "free_log_std": True}
    first = make(actions=PLANE, model=model, lr=0.1)
    inputs = first.compute_actions(np.eye(3, dtype=np.float32)).extras["action_dist_inputs"]
    assert not inputs[:, 2:].any()
    first.learn_on_batch(batch_for(first, 8))
    assert weights_by_layer(first)["log_std/log_std"].all()
    second = make(actions=PLANE, model=model, lr=0.1, seed=7)
    assert second.program is first.program
    assert not weights_by_layer(second)["log_std/log_std"].any()
    policy = make(actions=PLANE, model={**model, "log_std_init": -2.0})
    inputs = policy.compute_actions(np.eye(3, dtype=np.float32)).extras["action_dist_inputs"]
    assert inputs[:, 2:].tolist() == [[-2, -2]] * 3
    with pytest.raises(ConfigError, match=r"log_std_init.*free_log_std'\]=True"):
        make(actions=PLANE, model={"log_std_init": -2.0})
    with pytest.raises(ConfigError, match=r"free_log_std.*Box"):
        make(model={"free_log_std": True})


def test_equal_seeds_give_equal_weights_and_other_seeds_or_ids_others():
    first = make(seed=3).get_weights()
    assert_equal(first, make(seed=3).get_weights())
    for other in (make(seed=4), make(seed=3, __policy_id="other")):
        assert not np.array_equal(other.get_weights()["layer_0/kernel"], first["layer_0/kernel"])


FORMS = {
    "sequential": (sequential, 8),
    "functional": (make_mlp, 8),
    "functional with a value": (lambda: make_mlp(values=1), 6),
    "subclassed": (lambda: Subclassed(2), 8),
    "factory": (lambda: lambda space, units: sequential(units), 8),
    "factory of an opaque class": (lambda: opaque_factory, 5),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_any_form_acts_learns_and_gives_values(form):
    make_model, variables = FORMS[form]
    model = make_model()
    policy = make(model={"custom_model": model, "fcnet_hiddens": [4]}, lr=0.01)
    assert len(policy.get_weights()) == variables
    before = policy.get_weights()
    is_instance = isinstance(model, keras.Model)
    original = [w.copy() for w in model.get_weights()] if is_instance else []
    batch = batch_for(policy, 8)
    assert batch["vf_preds"].shape == (8,)
    policy.learn_on_batch(batch)
    after = policy.get_weights()
    assert not any(np.array_equal(before[key], after[key]) for key in before)
    assert_arrays_equal(model.get_weights() if is_instance else [], original)


@pytest.mark.core
def test_all_policies_take_the_weights_of_an_instance_and_draw_those_of_an_added_critic():
    model = sequential()
    policies = [make(PPOTF2Policy, model={"custom_model": model}, seed=seed) for seed in (0, 1, 1)]
    assert len({policy.program for policy in policies}) == 1
    first, second, third = (policy.get_weights() for policy in policies)
    for weights in (first, second, third):
        assert_arrays_equal([*weights.values()][: len(model.weights)], model.get_weights())
    assert_equal(second, third)
    assert not np.array_equal(first["layer_2/kernel"], second["layer_2/kernel"])


def test_equal_architectures_share_a_program_and_each_instance_gives_its_weights():
    fitted = sequential()
    fitted.compile("sgd", "mse")
    fitted.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    sequentials = [sequential(), sequential(name="another"), fitted]
    for models in (sequentials, [make_mlp(values=1) for _ in range(2)]):
        policies = [make(model={"custom_model": model}) for model in models]
        assert len({id(policy.program) for policy in policies}) == 1
        for policy, model in zip(policies, models, strict=True):
            weights = list(policy.get_weights().values())  # those of a critic may follow
            assert_arrays_equal(weights[: len(model.weights)], model.get_weights())


def test_other_architectures_never_share_a_program():
    models = [
        *(sequential(activation=name, name=name) for name in ("relu", "tanh")),
        *(make_mlp(values=1, activation=name) for name in ("relu", "tanh")),
        make_mlp(),
        Subclassed(2),
    ]
    programs = {make(model={"custom_model": model}).program for model in models}
    policies = [make(model={"custom_model": model}) for model in models]
    assert len({id(policy.program) for policy in policies}) == len(models) == len(programs)
    assert compute_fingerprint({"a": 1, "b": [2]}) == compute_fingerprint({"b": [2], "a": 1})
    assert compute_fingerprint({"a": 1}) != compute_fingerprint({"a": 2})


def test_a_variable_without_an_initializer_in_its_layer_starts_as_in_a_new_model():
    model = {"custom_model": opaque_factory}
    first = make(model=model, lr=0.1)
    first.learn_on_batch(batch_for(first, 8))
    name = next(key for key in first.get_weights() if key.endswith("/scale"))
    assert first.get_weights()[name][0] != 1.0
    second = make(model=model, lr=0.1)
    assert second.program is first.program
    assert second.get_weights()[name].tolist() == [1.0]


class Sevens(keras.initializers.Initializer):
    """An initializer that Keras's registry does not know."""

    def __call__(self, shape, dtype=None):
        return keras.ops.full(shape, 7.0, dtype)


def test_initializers_need_no_registration():
    def factory(space, units):
        dense = keras.layers.Dense(units, kernel_initializer=Sevens())
        return keras.Sequential([keras.Input((3,)), dense])

    policy = make(PGTF2Policy, model={"custom_model": factory})
    assert policy.get_weights()["layer_0/kernel"].tolist() == [[7, 7]] * 3


def test_a_trained_copy_for_the_caller_computes_what_the_policy_does():
    policy = make(PGTF2Policy, model={"custom_model": sequential()})
    policy.learn_on_batch(batch_for(policy, 8))
    copy, obs = policy.to_keras(), np.ones((2, 3), np.float32)
    logits = policy.compute_actions(obs).extras["action_dist_inputs"]
    np.testing.assert_allclose(copy(obs), logits, atol=1e-6)
    assert copy is not policy.model
    np.testing.assert_allclose(policy.make_rl_module()(obs), copy(obs), atol=1e-6)


def test_an_instance_that_keras_cannot_rebuild_works_and_names_the_factory_for_a_copy():
    policy = make(model={"custom_model": Opaque(2)})
    policy.learn_on_batch(batch_for(policy, 8))
    assert policy.num_grad_updates == 1
    with pytest.raises(ConfigError, match="factory f"):
        policy.to_keras()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: sequential(units=5), r"shape \[B, 2\].*got \[B, 5\].*Give its last layer 2 units"),
        (lambda: make_mlp(n=7), r"\[B, 3\]"),
        (lambda: make_mlp(values=4), r"\[B, 1\] or \[B\]; got \[B, 4\]"),
        (lambda: lambda space, units: "no model", "must return a keras.Model, but returned str"),
    ],
    ids=["wrong width", "wrong input", "wrong value", "factory of nothing"],
)
def test_a_model_that_does_not_fit_is_refused_with_the_reason(model, words):
    with pytest.raises(ModelError, match=words):
        make(model={"custom_model": model()})


def test_mixed_precision_is_refused_even_if_an_equal_float32_model_is_in_use():
    policies = []  # that stay in use
    for _ in range(2):
        with pytest.raises(ModelError, match="float32 only"):
            make(PGTF2Policy, model={"custom_model": sequential(dtype="mixed_float16")})
        policies.append(make(PGTF2Policy, model={"custom_model": sequential()}))


@pytest.mark.parametrize("model", [{}, {"use_lstm": True}, {"use_attention": True}])
def test_models_of_the_catalog_refuse_a_global_mixed_precision(model):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(ModelError, match="float32 only, but Keras's global dtype policy is"):
            make(model={"fcnet_hiddens": [4], **model})
    finally:
        keras.config.set_dtype_policy(before)


def make_normalised(space, units):
    layers = [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dropout(0.5)]
    inputs = [keras.Input((3,)), keras.layers.Dense(4)]
    return keras.Sequential([*inputs, *layers, keras.layers.Dense(units)])


def test_batch_normalisation_and_dropout_learn_and_keep_their_state():
    model = {"custom_model": make_normalised}
    policy, clone = make(model=model, lr=0.01), make(model=model, lr=0.01)
    before = policy.get_weights()
    policy.learn_on_batch(batch_for(policy, 16))
    after = policy.get_weights()
    moved = {key.split("/")[1] for key in before if not np.array_equal(before[key], after[key])}
    assert {"moving_mean", "moving_variance", "seed_generator_state"} <= moved
    clone.set_state(policy.get_state())
    for learner in (policy, clone):
        learner.learn_on_batch(batch_for(learner, 16, seed=5))
    assert_equal(policy.get_weights(), clone.get_weights())
    obs = np.ones((4, 3), np.float32)
    acting = [policy.compute_actions(obs).extras["action_dist_inputs"] for _ in range(2)]
    np.testing.assert_array_equal(*acting)  # no dropout, no batch statistics while acting
    np.testing.assert_array_equal(acting[0][0], acting[0][3])


def test_computing_gradients_leaves_no_trace_in_layers_with_state():
    model = {"custom_model": make_normalised}
    policy, clone = make(model=model), make(model=model)
    batch = batch_for(policy, 16)
    before = policy.get_weights()
    policy.compute_gradients(batch)
    assert_equal(policy.get_weights(), before)
    policy.learn_on_batch(batch)
    clone.learn_on_batch(batch)
    assert_equal(policy.get_weights(), clone.get_weights())


def test_a_gradient_of_an_embedding_is_clipped_and_applied():
    def factory(space, units):
        inputs = keras.Input((3,))
        index = keras.layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x), "int32"))(inputs)
        embedded = keras.layers.Flatten()(keras.layers.Embedding(4, 2)(index))
        return keras.Model(inputs, keras.layers.Dense(units)(embedded))

    policy = make(PGTF2Policy, model={"custom_model": factory}, grad_clip=0.01)
    gradients, _ = policy.compute_gradients(batch_for(policy, 8))
    norm = np.sqrt(sum(np.square(g).sum() for g in gradients))
    np.testing.assert_allclose(norm, 0.01, rtol=1e-4)
