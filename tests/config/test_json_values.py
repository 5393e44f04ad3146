"""Config values, import paths and random generators through JSON."""

import importlib
import json
import math
import struct
import sys
import warnings

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tfpolicies import DefaultCallbacks, PGTF2Policy, Policy
from tfpolicies.base.allowlist import is_allowed
from tfpolicies.errors import CheckpointError, ConfigError, TfPoliciesError, UnsupportedSpaceError
from tfpolicies.storage.allowed_objects import AllowedObject, resolve_allowed
from tfpolicies.storage.generator_json import decode_generator, encode_generator
from tfpolicies.storage.json_values import (
    UnresolvedObject,
    decode_value,
    encode_value,
    find_unresolved,
    get_import_path,
    warn_unavailable_objects,
)


def through_json(value):
    text = json.dumps(encode_value(value), allow_nan=False)
    return decode_value(json.loads(text))


def same(a, b):
    """Equality that tells types, signs of zero, NaNs, dtypes and shapes apart."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return a == b


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan]),
    st.floats(allow_nan=False),
    st.text(),
    st.sampled_from(["$import", "$dict", "$"]),
    st.integers(-128, 127).map(np.int8),
    st.floats(width=32, allow_nan=False).map(np.float32),
    st.floats(width=16, allow_nan=False).map(np.float16),
    st.booleans().map(np.bool_),
)
KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.tuples(st.integers()))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=10,
)


@given(VALUES)
@settings(max_examples=150)
def test_nested_values_come_back_with_types_signs_and_order(value):
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        [math.inf, -math.inf, -0.0, math.nan],
        (64, (32,)),
        {1: "int", (1, 2): "tuple", None: "none", "$x": "dollar", 0.5: "float"},
        {"ids": {"b", "a"}, "frozen": frozenset({1})},
        np.array([np.inf, -np.inf, np.nan, 1e-45, 3.4e38], np.float32),
        np.array([2**64 - 1], np.uint64),
        np.array([-(2**63)], np.int64),
        [np.float64(0.1), np.float32("inf")],
        {"space": spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})},
    ],
)
def test_special_numbers_odd_keys_and_spaces_come_back_exactly(value):
    assert same(through_json(value), value)


def test_values_that_json_has_are_stored_as_they_are():
    value = {"lr": 0.001, "layers": [{"units": 64}], "name": "a", "flag": None}
    assert encode_value(value) == value


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_small_arrays_keep_dtype_shape_and_bits(dtype, shape):
    array = (np.random.default_rng(1).normal(size=shape) * 50).astype(dtype)
    assert same(through_json(np.asarray(array)), np.asarray(array))


def test_a_value_that_holds_an_unknown_space_is_refused():
    class Simplex(spaces.Box):
        pass

    with pytest.raises(UnsupportedSpaceError, match="Simplex"):
        encode_value([Simplex(0, 1)])


CALLBACKS = AllowedObject("callbacks")
MAPPING = AllowedObject("policy_mapping_fn", allows_functions=True)
PATH = "tfpolicies.config.callbacks:DefaultCallbacks"


def resolve(path, place, **options):
    """Resolves an object that is stored by its import path."""
    return resolve_allowed(decode_value({"$import": path}), place, **options)


def test_a_class_of_the_package_is_stored_by_path_and_resolved_where_it_is_allowed():
    assert encode_value(DefaultCallbacks) == {"$import": PATH}
    assert resolve(PATH, CALLBACKS) is DefaultCallbacks
    for elsewhere in (None, MAPPING, AllowedObject("policy_class"), {"callbacks": CALLBACKS}):
        assert resolve(PATH, elsewhere) == UnresolvedObject(PATH, importable=True)


def test_an_object_is_resolved_only_in_its_place():
    one, unresolved = DefaultCallbacks, UnresolvedObject(PATH, importable=True)
    places = {"callbacks": CALLBACKS, "each": {"*": {0: CALLBACKS}}}
    value = {"callbacks": one, "each": {"a": (one, one), "b": [one]}, one: {one}, 3: one}
    assert resolve_allowed(decode_value(encode_value(value)), places) == {
        "callbacks": one,
        "each": {"a": (one, unresolved), "b": [one]},
        unresolved: {unresolved},
        3: unresolved,
    }
    record = encode_value({"callbacks": [one]})
    assert resolve_allowed(decode_value(record), places) == {"callbacks": [unresolved]}


def test_spaces_stay_spaces_where_objects_are_looked_up():
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Tuple([spaces.Discrete(3)])})
    assert resolve_allowed({"space": space}, {"*": {"*": CALLBACKS}})["space"] is space


def test_an_abstract_class_is_allowed_nowhere():
    assert is_allowed(DefaultCallbacks, "callbacks")
    assert is_allowed(PGTF2Policy, "policy_class")
    assert not is_allowed(Policy, "policy_class")  # it is abstract
    assert not is_allowed(PGTF2Policy, "callbacks")


def test_lambdas_local_functions_and_instances_are_named_once_and_stay_unresolved():
    def local():
        return 0

    value = {"map": lambda agent: "main", "more": [local, object()], "lr": 0.1}
    record = encode_value(value)
    with pytest.warns(UserWarning, match="stored by name only") as caught:
        warn_unavailable_objects({"value": [record, record]})
    assert len(caught) == 1
    for name in ("<lambda>", "local", "builtins:object"):
        assert name in str(caught[0].message)
    back = decode_value(json.loads(json.dumps(record)))
    assert back["lr"] == 0.1
    assert sorted(find_unresolved(back)) == ["['map']", "['more'][0]", "['more'][1]"]
    assert not back["map"].importable


def test_an_unresolved_object_is_replaced_by_the_callers():
    record = encode_value({"map": lambda agent: "main"})
    name = record["map"]["$unavailable"]
    assert resolve_allowed(decode_value(record), None, objects={name: len}) == {"map": len}
    assert resolve("train:mapping", MAPPING, objects={"train:mapping": len}) is len


def test_markers_are_stored_again_without_a_warning():
    value = [UnresolvedObject("a:<lambda>"), UnresolvedObject("train:mapping", importable=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert through_json(value) == value


def test_unresolved_objects_are_found_in_every_collection():
    value = {
        "a": ({UnresolvedObject("x"): 1}, [UnresolvedObject("y")]),
        "b": frozenset({UnresolvedObject("z")}),
    }
    assert [marker.name for marker in find_unresolved(value).values()] == ["x", "y", "z"]
    assert find_unresolved({"a": [1, (2,)]}) == {}


HOSTILE = """
os:system subprocess:Popen builtins:eval numpy:load tfpolicies.storage.checkpoint:os.system
tfpolicies.storage.checkpoint:json.loads tfpolicies.storage.import_paths:importlib.import_module
tfpolicies.storage.json_values:Missing tfpolicies.storage.import_paths:Missing.__init__.__globals__
tfpolicies.__main__:main tfpolicies.cli:main
tfpolicies.config.callbacks:DefaultCallbacks.on_algorithm_init
tfpolicies.config.callbacks:DefaultCallbacks.__subclasses__
tfpolicies.config.callbacks:make_multi_callbacks tfpolicies: tfpolicies.:x tfpolicies..storage:x
tfpolicies/../evil:x tfpolicies.no_such_module:x __main__:anything :
"""


@pytest.mark.parametrize("path", ["", *HOSTILE.split()])
def test_a_strangers_import_path_reaches_nothing(path):
    for place in (CALLBACKS, MAPPING, AllowedObject("env", allows_functions=True), None):
        assert resolve(path, place) == UnresolvedObject(path, importable=True)


def test_a_module_outside_trusted_packages_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(resolve("evil_module:f", MAPPING), UnresolvedObject)
    assert "evil_module" not in sys.modules


def test_a_package_that_the_caller_trusts_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_project_x").mkdir()
    (tmp_path / "my_project_x" / "__init__.py").write_text("")
    (tmp_path / "my_project_x" / "maps.py").write_text("def mapping(agent):\n    return agent\n")
    monkeypatch.syspath_prepend(tmp_path)
    path, trusted = "my_project_x.maps:mapping", ("tfpolicies", "my_project_x")
    assert isinstance(resolve(path, MAPPING), UnresolvedObject)
    assert isinstance(resolve(path, CALLBACKS, trusted=trusted), UnresolvedObject)
    result = resolve(path, MAPPING, trusted=trusted)
    assert result is importlib.import_module("my_project_x.maps").mapping
    assert get_import_path(result) == path


MALFORMED = [
    {"$tuple": 3},
    {"$dict": [[1]]},
    {"$dict": [[[], 1]]},
    {"$set": [[]]},
    {"$float": "1"},
    {"$float": []},
    {"$array": {}},
    {"$array": {"dtype": "object", "shape": [], "elements": [1]}},
    {"$array": {"dtype": "float32", "shape": [2], "elements": [1.0]}},
    {"$array": {"dtype": "uint8", "shape": [1], "elements": [300]}},
    {"$array": {"dtype": "uint8", "shape": [1], "elements": ["1"]}},
    {"$array": {"dtype": "uint8", "shape": [-1], "elements": []}},
    {"$scalar": {"dtype": "int8", "value": None}},
    {"$space": {"type": "Box"}},
    {"$import": 3},
    {"$unavailable": None},
    {"$unknown": 1},
    {"$tuple": [], "$set": []},
    {"$tuple": [], "a": 1},
    pytest.param(object(), id="an object"),
]


@pytest.mark.parametrize("record", MALFORMED, ids=str)
def test_malformed_records_raise_a_checkpoint_error(record):
    with pytest.raises(CheckpointError):
        decode_value(record)


def test_values_that_contain_themselves_are_refused():
    value: list = []
    value.append(value)
    with pytest.raises(ConfigError, match="contains itself"):
        encode_value(value)


def test_encoding_does_not_change_its_argument():
    value = {"a": [1, (2, np.zeros(2))], "b": {3: "x"}}
    encode_value(value)
    assert list(value) == ["a", "b"]
    assert value["b"] == {3: "x"}
    assert isinstance(value["a"][1], tuple)


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_a_restored_generator_continues_bit_for_bit(name):
    rng = np.random.Generator(getattr(np.random, name)(5))
    rng.normal(size=3)
    rng.integers(0, 9, dtype=np.uint8)  # leaves half-used bits behind
    rng.spawn(1)
    twin = decode_generator(json.loads(json.dumps(encode_generator(rng))))
    for draw in (lambda g: g.integers(0, 9, 5, dtype=np.uint8), lambda g: g.normal(size=700)):
        np.testing.assert_array_equal(draw(rng), draw(twin))
    np.testing.assert_array_equal(rng.spawn(1)[0].random(4), twin.spawn(1)[0].random(4))


def test_a_generator_whose_seeds_would_fill_the_memory_is_refused():
    record = encode_generator(np.random.default_rng(5))
    record["seed_sequence"]["pool_size"] = 10**9
    with pytest.raises(CheckpointError, match="pool_size=1000000000, at most 1024"):
        decode_generator(record)


def test_encoding_a_generator_draws_nothing_from_it():
    rng, twin = np.random.default_rng(3), np.random.default_rng(3)
    encode_generator(rng)
    assert rng.random() == twin.random()


@pytest.mark.parametrize("key", ["state", "seed_sequence"])
@pytest.mark.parametrize("damage", [3, {}, {"bit_generator": "PCG64"}, {"bit_generator": "Evil"}])
def test_a_malformed_generator_record_raises(key, damage):
    record = encode_generator(np.random.default_rng(0))
    record[key] = damage
    if key == "seed_sequence" and damage == {}:
        record["state"] = None
    with pytest.raises(TfPoliciesError):
        decode_generator(record)
