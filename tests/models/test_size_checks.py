"""Sizes that files and users declare, measured before anything is allocated."""

from functools import partial

import keras
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from helpers.checkpoints import edit_manifest
from helpers.factories import OBS, TWO, make
from tfpolicies import DQNTF2Policy, Policy, PPOTF2Policy
from tfpolicies.errors import CheckpointError, ModelError, SpaceError
from tfpolicies.models.size_check import check_memory, limit_to_stored_weights, measure_size
from tfpolicies.storage.spaces_json import check_space_sizes, decode_space

HUGE = 10**9
IMAGE = {"type": "Box", "dtype": "uint8", "shape": [10**5, 10**5], "low": 0, "high": 255}


def discrete(n):
    return {"type": "Discrete", "dtype": "int64", "n": n, "start": 0}


def set_model(**settings):
    return lambda manifest: manifest["config"]["settings"]["model"].update(settings)


def set_space(kind, record):
    return lambda manifest: manifest.update({f"{kind}_space": record})


def set_layer(index, **config):
    def change(manifest):
        manifest["config"]["keras"]["config"]["layers"][index]["config"].update(config)

    return change


def defer_building(manifest):
    """Leaves a model of which nothing is built until it is called."""
    model = manifest["config"]["keras"]
    model["config"]["layers"] = model["config"]["layers"][1:]
    model["config"].pop("build_input_shape", None)
    for part in (model, *model["config"]["layers"]):
        part.pop("build_config", None)
    model["config"]["layers"][0]["config"]["units"] = HUGE


@pytest.mark.parametrize(
    "change",
    [
        set_space("observation", discrete(HUGE)),
        set_space("action", discrete(HUGE)),
        set_space("observation", {"type": "MultiBinary", "n": HUGE}),
        set_space("observation", IMAGE),
        set_space("observation", {"type": "Tuple", "spaces": [discrete(2)] * 2000}),
        set_model(fcnet_hiddens=[HUGE, HUGE]),
        set_model(max_seq_len=HUGE),
        lambda manifest: manifest["config"]["settings"].update(num_envs_per_worker=HUGE),
    ],
)
def test_a_checkpoint_that_declares_more_than_it_holds_is_refused(change, tmp_path):
    make().export_checkpoint(tmp_path)
    with edit_manifest(tmp_path / "policy.json") as manifest:
        change(manifest)
    with pytest.raises(
        (CheckpointError, SpaceError), match=r"no array|limit|that a file may choose"
    ):
        Policy.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        set_layer(1, units=HUGE),
        set_layer(0, batch_shape=[None, HUGE]),
        defer_building,
        set_space("observation", discrete(HUGE)),
    ],
)
def test_a_keras_model_that_declares_more_than_the_checkpoint_holds_is_refused(change, tmp_path):
    layers = [keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(2)]
    make(model={"custom_model": keras.Sequential(layers)}).export_checkpoint(tmp_path)
    with edit_manifest(tmp_path / "policy.json") as manifest:
        change(manifest)
    with pytest.raises(CheckpointError, match=r"no array|numbers|damaged"):
        Policy.from_checkpoint(tmp_path)


def make_square(units, *layers):
    return keras.Sequential([keras.Input((units,)), keras.layers.Dense(units), *layers])


def test_a_model_may_be_as_large_as_the_arrays_of_its_file():
    for stored in ([(64, 64), (64,)], 64 * 65):
        with limit_to_stored_weights("the file", stored):
            check_memory(lambda: make_square(64), "The model")
    other = limit_to_stored_weights("the file", [(64, 65), (64,)])
    with other, pytest.raises(CheckpointError, match=r"weight of shape \(64, 64\)"):
        check_memory(lambda: make_square(64), "The model")


def test_measuring_allocates_nothing_and_leaves_no_trace():
    before = keras.layers.Dense(1).name
    size = measure_size(lambda: make_square(HUGE, Named()))
    assert size.weight_shapes == [(HUGE, HUGE), (HUGE,)]
    number = int(before.rpartition("_")[2]) if "_" in before else 0
    assert keras.layers.Dense(1).name == f"dense_{number + 1}"
    assert keras.layers.Dense(2)(np.ones((1, 3))).shape == (1, 2)


class Named(keras.layers.Layer):
    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("observation_space", "action_space", "model"),
    [
        (Discrete(10**10), TWO, {}),
        (OBS, Discrete(10**10), {}),
        (OBS, MultiBinary(10**10), {}),
        (OBS, MultiDiscrete([10**10] * 3), {}),
        (OBS, TWO, {"fcnet_hiddens": [10**10]}),
        (OBS, TWO, {"use_lstm": True, "lstm_cell_size": 10**8}),
        (OBS, TWO, {"use_attention": True, "attention_memory_inference": 10**11}),
    ],
)
def test_what_cannot_fit_the_memory_is_refused_before_it_is_made(
    observation_space, action_space, model
):
    with pytest.raises(ModelError, match=r"of memory are available"):
        PPOTF2Policy(observation_space, action_space, {"model": model})


def test_a_custom_model_that_cannot_fit_the_memory_is_refused_before_it_is_built():
    model = keras.Sequential([keras.layers.Dense(10**11), keras.layers.Dense(2)])
    with pytest.raises(ModelError, match="of memory are available"):
        PPOTF2Policy(OBS, TWO, {"model": {"custom_model": model}})
    assert not model.built


@pytest.mark.parametrize(
    ("empty", "place"),
    [
        (Box(0, 1, (0,)), " = Box"),
        (Box(0, 1, (2, 0)), " = Box"),
        (Dict({}), " is a Dict without parts"),
        (Tuple(()), " is a Tuple without parts"),
        (Dict(a=OBS, b=Tuple((Dict({}),))), r"\['b'\]\[0\] is a Dict without parts"),
    ],
)
def test_a_space_without_a_value_is_refused(empty, place):
    for policy_class in (PPOTF2Policy, DQNTF2Policy):
        with pytest.raises(SpaceError, match=f"observation_space{place}"):
            policy_class(empty, TWO, {})
    with pytest.raises(SpaceError, match=f"action_space{place}"):
        PPOTF2Policy(OBS, empty, {})


def test_a_space_with_a_single_value_is_a_space():
    policy = PPOTF2Policy(Discrete(1), Discrete(1), {"model": {"fcnet_hiddens": [4]}})
    assert policy.compute_single_action(0)[0] == 0


@pytest.mark.parametrize("kind", ["Tuple", "Sequence", "Graph"])
def test_spaces_of_a_file_are_nested_up_to_a_depth(kind):
    record = discrete(2)
    for _ in range(33):
        record = {
            "Tuple": {"type": "Tuple", "spaces": [record]},
            "Sequence": {"type": "Sequence", "feature_space": record, "stack": True},
            "Graph": {"type": "Graph", "node_space": record, "edge_space": None},
        }[kind]
    with pytest.raises(CheckpointError, match="deep"):
        check_space_sizes({"config": [record]})
    for _ in range(800):
        record = {"type": "Tuple", "spaces": [record]}
    with pytest.raises(CheckpointError, match="too deeply"):
        decode_space(record)


def test_the_bounds_of_all_spaces_in_a_file_are_limited_together():
    box = {"type": "Box", "dtype": "float32", "shape": [1 << 20], "low": 0.0, "high": 1.0}
    check_space_sizes({"spaces": [box] * 16})
    with pytest.raises(CheckpointError, match="71303168 bytes"):
        check_space_sizes({"spaces": [box] * 17})


@pytest.mark.parametrize("space", [Dict({0: OBS}), Tuple((Dict({"a": Dict({5: OBS})}),))])
def test_a_dict_whose_keys_are_not_strings_is_refused(space):
    with pytest.raises(SpaceError, match=r"observation_space has a Dict with the key [05], but"):
        make(obs=space)


def test_models_in_models_are_measured_once_at_each_depth():
    def nest(depth):
        inputs = keras.Input((3,))
        inner = nest(depth - 1) if depth else keras.layers.Activation("tanh")
        return keras.Model(inputs, inner(inputs))

    few, many = (len(measure_size(partial(nest, depth)).output_shapes) for depth in (6, 12))
    assert many <= 2 * few
