"""Models: the catalogue's MLP, and models of the user in every form."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, PLANE, assert_equal, batch_for, make
from tfpolicies import PGTF2Policy
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.architecture import compute_fingerprint

ZEROS = np.zeros((2, 3), np.float32)


def sequential(units=2, activation="tanh", **names):
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation=activation, **names),
            keras.layers.Dense(units),
        ]
    )


def functional(with_value=False):
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    logits = keras.layers.Dense(2)(hidden)
    outputs = [logits, keras.layers.Dense(1)(hidden)] if with_value else logits
    return keras.Model(inputs, outputs)


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


# -- the catalogue's networks ---------------------------------------------------------------------


@pytest.mark.core
def test_the_mlp_has_its_documented_layers_norms_and_zero_biases():
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


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_fresh_policy_has_zero_logits_and_values_for_zero_observations(inference):
    extras = make(inference=inference).compute_actions(ZEROS).extras
    assert not extras["action_dist_inputs"].any()
    assert not extras["vf_preds"].any()


def test_actor_and_critic_share_hidden_layers_if_asked():
    shared = weights_by_layer(make(model={"fcnet_hiddens": [4], "vf_share_layers": True}))
    assert {name.split("/")[0] for name in shared} == {"fc_1", "fc_out", "value_out"}
    without = weights_by_layer(make(PGTF2Policy))
    assert {name.split("/")[0] for name in without} == {"fc_1", "fc_out"}


def test_free_log_std_is_one_trained_vector_that_each_policy_has_for_itself():
    model = {"fcnet_hiddens": [4], "free_log_std": True}
    first = make(actions=PLANE, model=model, lr=0.1)
    inputs = first.compute_actions(np.eye(3, dtype=np.float32)).extras["action_dist_inputs"]
    assert not inputs[:, 2:].any()
    first.learn_on_batch(batch_for(first, 8))
    assert weights_by_layer(first)["log_std/log_std"].all()
    second = make(actions=PLANE, model=model, lr=0.1, seed=7)
    assert second.program is first.program
    assert not weights_by_layer(second)["log_std/log_std"].any()


def test_a_free_log_std_begins_where_the_settings_say():
    model = {"fcnet_hiddens": [4], "free_log_std": True, "log_std_init": -2.0}
    policy = make(actions=PLANE, model=model)
    inputs = policy.compute_actions(np.eye(3, dtype=np.float32)).extras["action_dist_inputs"]
    assert inputs[:, 2:].tolist() == [[-2, -2]] * 3
    with pytest.raises(ConfigError, match=r"log_std_init.*free_log_std'\]=True"):
        make(actions=PLANE, model={"log_std_init": -2.0})


def test_nested_observations_are_flattened_and_joined():
    space = spaces.Dict(a=spaces.Box(-1, 1, (2, 2)), b=spaces.Discrete(3), c=OBS)
    policy = make(obs=space)
    assert weights_by_layer(policy)["fc_1/kernel"].shape == (4 + 3 + 3, 4)
    obs = {"a": np.zeros((5, 2, 2)), "b": np.zeros(5, int), "c": np.zeros((5, 3))}
    assert policy.compute_actions(obs).actions.shape == (5,)


def test_model_settings_that_make_no_sense_are_refused():
    for hiddens in (4, ["a"], [0], [True]):
        with pytest.raises(ConfigError, match="list of integers >= 1"):
            make(model={"fcnet_hiddens": hiddens})
    with pytest.raises(ModelError, match=r"fcnet_activation.*nope"):
        make(model={"fcnet_activation": "nope"})
    with pytest.raises(ConfigError, match=r"free_log_std.*Box"):
        make(model={"free_log_std": True})


def test_an_mlp_may_have_no_hidden_layer_or_very_many():
    assert len(make(model={"fcnet_hiddens": []}).get_weights()) == 4
    assert len(make(PGTF2Policy, model={"fcnet_hiddens": [2] * 70}).get_weights()) == 142


def test_equal_seeds_give_equal_weights_and_other_seeds_or_ids_others():
    first = make(seed=3).get_weights()
    assert_equal(first, make(seed=3).get_weights())
    for other in (make(seed=4), make(seed=3, __policy_id="other")):
        assert not np.array_equal(other.get_weights()["layer_0/kernel"], first["layer_0/kernel"])


# -- models of the user ---------------------------------------------------------------------------

FORMS = {
    "sequential": (lambda: sequential(), 8),
    "functional": (lambda: functional(), 8),
    "functional with a value": (lambda: functional(with_value=True), 6),
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
    kept = [w.copy() for w in model.get_weights()] if isinstance(model, keras.Model) else []
    batch = batch_for(policy, 8)
    assert batch["vf_preds"].shape == (8,)
    policy.learn_on_batch(batch)
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(before.values(), policy.get_weights().values(), strict=True)
    ]
    assert all(changed)
    if isinstance(model, keras.Model):
        for ours, theirs in zip(kept, model.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg="the instance was changed")


def test_a_model_with_a_value_serves_a_class_without_one_on_both_runtimes():
    for inference in ("tf", "onnx"):
        model = {"custom_model": functional(with_value=True)}
        policy = make(PGTF2Policy, model=model, inference=inference)
        assert "vf_preds" not in policy.compute_actions(ZEROS).extras


@pytest.mark.core
def test_the_first_policy_takes_the_weights_of_an_instance_and_the_second_draws_its_own():
    model = sequential()
    first, second = (make(PGTF2Policy, model={"custom_model": model}, seed=s) for s in (0, 1))
    third = make(PGTF2Policy, model={"custom_model": model}, seed=1)
    assert first.program is second.program
    for ours, theirs in zip(first.get_weights().values(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(second.get_weights()["layer_0/kernel"], model.get_weights()[0])
    assert_equal(second.get_weights(), third.get_weights())


def test_equal_architectures_share_a_program_whatever_their_names():
    one, two = sequential(), sequential(name="another")
    assert one.name != two.name
    first, second = (make(model={"custom_model": model}) for model in (one, two))
    assert first.program is second.program
    # Each instance is the first policy's start, though the Program is the other one's.
    np.testing.assert_array_equal(second.get_weights()["layer_0/kernel"], two.get_weights()[0])
    a, b = (make(model={"custom_model": functional()}) for _ in range(2))
    assert a.program is b.program


def test_other_architectures_never_share_a_program():
    models = [
        sequential(activation="relu", name="relu"),
        sequential(activation="tanh", name="tanh"),
        functional(),
        functional(with_value=True),
        Subclassed(2),
    ]
    programs = {make(model={"custom_model": model}).program for model in models}
    policies = [make(model={"custom_model": model}) for model in models]
    assert len({id(policy.program) for policy in policies}) == len(models) == len(programs)


def test_a_compiled_and_fitted_model_is_of_the_kind_of_a_fresh_one():
    fitted = sequential()
    fitted.compile("sgd", "mse")
    fitted.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    fresh = make(model={"custom_model": sequential()})
    policy = make(model={"custom_model": fitted})
    assert policy.program is fresh.program
    np.testing.assert_array_equal(policy.get_weights()["layer_0/kernel"], fitted.get_weights()[0])


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
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(units, kernel_initializer=Sevens())]
        )

    policy = make(PGTF2Policy, model={"custom_model": factory})
    assert policy.get_weights()["layer_0/kernel"].tolist() == [[7, 7]] * 3


def test_a_trained_copy_for_the_caller_computes_what_the_policy_does():
    model = sequential()
    policy = make(PGTF2Policy, model={"custom_model": model})
    policy.learn_on_batch(batch_for(policy, 8))
    copy = policy.to_keras()
    obs = np.ones((2, 3), np.float32)
    np.testing.assert_allclose(
        copy(obs), policy.compute_actions(obs).extras["action_dist_inputs"], atol=1e-6
    )
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
        (lambda: keras.Sequential([keras.Input((7,)), keras.layers.Dense(2)]), r"\[B, 3\]"),
        (lambda: lambda space, units: "no model", "must return a keras.Model, but returned str"),
        (
            lambda: keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(2, dtype="mixed_float16")]
            ),
            "float32 only",
        ),
    ],
    ids=["wrong width", "wrong input", "factory of nothing", "mixed precision"],
)
def test_a_model_that_does_not_fit_is_refused_with_the_reason(model, words):
    with pytest.raises(ModelError, match=words):
        make(PGTF2Policy, model={"custom_model": model()})


def test_what_is_no_model_is_refused_with_the_config():
    with pytest.raises(ConfigError, match=r"the name of a registered model .*, got 'a st"):
        make(PGTF2Policy, model={"custom_model": "a string"})


def test_mixed_precision_is_refused_even_if_an_equal_float32_model_is_in_use():
    keep = make(PGTF2Policy, model={"custom_model": sequential()})
    mixed = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh", dtype="mixed_float16"),
            keras.layers.Dense(2),
        ]
    )
    with pytest.raises(ModelError, match="float32 only"):
        make(PGTF2Policy, model={"custom_model": mixed})
    assert keep.num_grad_updates == 0


@pytest.mark.parametrize("model", [{}, {"use_lstm": True}, {"use_attention": True}])
def test_models_of_the_catalog_refuse_a_global_mixed_precision(model):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(ModelError, match="float32 only, but Keras's global dtype policy is"):
            make(model={"fcnet_hiddens": [4], **model})
    finally:
        keras.config.set_dtype_policy(before)


def test_a_value_of_the_wrong_shape_is_refused():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(4)(inputs)])
    with pytest.raises(ModelError, match=r"\[B, 1\] or \[B\]; got \[B, 4\]"):
        make(model={"custom_model": model})


def normalised(space, units):
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(units),
        ]
    )


def test_batch_normalisation_and_dropout_learn_and_keep_their_state():
    model = {"custom_model": normalised}
    policy, twin = make(model=model, lr=0.01), make(model=model, lr=0.01)
    before = policy.get_weights()
    policy.learn_on_batch(batch_for(policy, 16))
    after = policy.get_weights()
    moved = {key.split("/")[1] for key in before if not np.array_equal(before[key], after[key])}
    assert {"moving_mean", "moving_variance", "seed_generator_state"} <= moved
    twin.set_state(policy.get_state())
    for each in (policy, twin):
        each.learn_on_batch(batch_for(each, 16, seed=5))
    assert_equal(policy.get_weights(), twin.get_weights())
    obs = np.ones((4, 3), np.float32)
    acting = [policy.compute_actions(obs).extras["action_dist_inputs"] for _ in range(2)]
    np.testing.assert_array_equal(*acting)  # no dropout, no batch statistics while acting
    np.testing.assert_array_equal(acting[0][0], acting[0][3])


def test_computing_gradients_leaves_no_trace_in_layers_with_state():
    model = {"custom_model": normalised}
    policy, twin = make(model=model), make(model=model)
    batch = batch_for(policy, 16)
    before = policy.get_weights()
    policy.compute_gradients(batch)
    assert_equal(policy.get_weights(), before)
    policy.learn_on_batch(batch)
    twin.learn_on_batch(batch)
    assert_equal(policy.get_weights(), twin.get_weights())


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


def test_fingerprints_do_not_depend_on_the_order_of_keys():
    assert compute_fingerprint({"a": 1, "b": [2]}) == compute_fingerprint({"b": [2], "a": 1})
    assert compute_fingerprint({"a": 1}) != compute_fingerprint({"a": 2})
