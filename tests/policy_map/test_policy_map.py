"""The policy map: a dict of policies whose variables are paged, and whose handles stay."""

import functools
import gc
import textwrap
import weakref

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.differences import find_differences, get_owned, require_same
from helpers.factories import OBS, PLANE, TWO, assert_equal, batch_for, make, rows_of
from helpers.policy_maps import fill, get_number, make_filled, make_map, release_folder
from helpers.processes import run_python, run_threads
from tfpolicies import (
    DQNTF2Policy,
    PGTF2Policy,
    Policy,
    PolicyMap,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    SACTF1Policy,
    SACTF2Policy,
)
from tfpolicies.errors import (
    ConfigError,
    FrozenPolicyError,
    StashError,
    UnknownPolicyError,
    UsageError,
)
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.testing import random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

QUICK = {"inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [4]}}
ROWS = rows_of(OBS, 5)
FILTERED = {"observation_filter": "MeanStdFilter"}


class Always(Policy):
    """A custom policy: always the same action."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.full(len(obs_batch), self.config.get("action", 1)), [], {})


class Failing(PPOTF2Policy):
    def __init__(self, *args):
        super().__init__(*args)
        raise RuntimeError("no luck")


class Own(PPOTF2Policy):
    """A class outside the package."""


assert_same = functools.partial(require_same, what="a policy")


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Keeps the Programs of this file from being made again for each test."""
    policies = [make_used(policy_class, **config) for policy_class, config in KINDS.values()]
    yield
    policies.clear()


# -- signatures -----------------------------------------------------------------------------------


def test_both_signatures_and_their_capacities():
    old = PolicyMap(1, 2)
    assert (old.worker_index, old.num_workers, old.capacity) == (1, 2, 10)
    new = PolicyMap(policy_states_are_swappable=True)
    assert (new.worker_index, new.num_workers, new.capacity) == (0, 0, 100)
    assert new.policy_states_are_swappable is True
    assert PolicyMap(capacity_bytes=1000).capacity is None
    assert PolicyMap(0, 0, 3, None, {"gamma": 0.5}, None, 7).seed == 7
    with pytest.raises(TypeError):  # newer arguments have keywords
        PolicyMap(0, 0, 1, None, None, None, 0, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("capacity", x) for x in (0, -1, 1.5, True)),
        *(("capacity_bytes", 0), ("worker_index", -1), ("num_workers", "2"), ("seed", -3)),
        *(("session_creator", 3), ("policy_states_are_swappable", 1)),
    ],
)
def test_arguments_out_of_their_range_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        PolicyMap(**{name: value})


# -- a dict ---------------------------------------------------------------------------------------


@pytest.mark.core
def test_the_map_is_a_dict_of_policies():
    a, b, c = (make(seed=i) for i in range(3))
    m = PolicyMap(capacity=2)
    assert not m
    assert list(m) == []
    m["a"] = a
    m.update({"b": b})
    m.update([("c", c)], d=make())
    assert len(m) == 4
    assert set(m) == set(m.keys()) == {"a", "b", "c", "d"}
    assert m["a"] is a
    assert m.get("a") is a
    assert m.get("x") is None
    assert m.get("x", 5) == 5
    assert "a" in m
    assert "x" not in m
    assert dict(m.items())["b"] is b
    assert ("b", b) in m.items()
    assert ("b", a) not in m.items()
    assert c in m.values()
    assert make() not in m.values()
    assert m == m
    assert m.copy() == dict(m.items())
    assert m.setdefault("a", b) is a
    assert m.setdefault("e", e := make()) is e
    assert m.pop("e") is e
    assert m.pop("e", None) is None
    with pytest.raises(KeyError):
        m.pop("e")
    with pytest.raises(TypeError):
        m.pop("e", 1, 2)
    policy_id, policy = m.popitem()
    assert policy_id not in m
    assert isinstance(policy, PPOTF2Policy)
    m.clear()
    assert len(m) == 0
    with pytest.raises(KeyError, match="empty"):
        m.popitem()


@pytest.mark.core
def test_an_unknown_or_deleted_policy_is_named_with_the_known_ones():
    m = make_map("a", "b")
    del m["b"]
    for policy_id in ("x", "b"):
        with pytest.raises(UnknownPolicyError, match=f"'{policy_id}' not found.*'a'"):
            m[policy_id]
        with pytest.raises(KeyError):
            del m[policy_id]


@pytest.mark.parametrize("policy_id", ["", "a/b", "a.", "a ", 'a"', 3, None])
def test_invalid_ids_are_refused(policy_id):
    m = PolicyMap()
    with pytest.raises(ValueError, match="olicy"):
        m[policy_id] = make()
    with pytest.raises(ValueError, match="olicy"):
        m.create_policy(policy_id, PPOTF2Policy, OBS, TWO, {}, QUICK)
    assert len(m) == 0


def test_other_objects_than_policies_are_refused():
    m = make_map("a")
    with pytest.raises(UsageError, match="holds policies"):
        m["b"] = {"weights": 1}
    with pytest.raises(UsageError, match="holds policies"):
        m.setdefault("b")
    assert list(m) == ["a"]


@pytest.mark.parametrize("iterate", [PolicyMap.items, lambda m: ((x, m.get_handle(x)) for x in m)])
def test_deleting_while_iterating(iterate):
    m = make_map("a", "b", "c", capacity=1)
    for policy_id, policy in iterate(m):
        assert m.get_handle(policy_id) is policy
        del m[policy_id]
    assert len(m) == 0


def test_iterating_while_another_thread_deletes():
    m, first, is_done = PolicyMap(), make(), []

    def churn():
        while not is_done:
            for i in range(5):
                m[f"p{i}"] = first
            for i in range(5):
                m.pop(f"p{i}", None)

    def iterate():
        try:
            for _ in range(300):
                assert all(x is first for x in m.values())
                len(m.copy())
        finally:
            is_done.append(True)

    run_threads(churn, iterate)


@pytest.mark.core
def test_iterating_and_printing_bring_nothing_back():
    m = make_map("a", "b", "c", capacity=1)
    before = m.statistics
    assert "capacity=1" in str(m)
    assert "'a', 'b', 'c'" in repr(m)
    assert len(list(m.values())) == len(list(m.items())) == len(m) == 3
    assert m.get_handle("a") in m.values()
    assert "a" in m
    assert m.statistics == before
    assert m.in_memory() == ["c"]
    m.update({f"p{i:02}": m.get_handle("c") for i in range(30)})
    assert "'p16' and 13 more" in str(m)


# -- least recently used --------------------------------------------------------------------------


@pytest.mark.core
def test_the_least_recently_used_one_goes_first():
    m = make_map("a", "b", "c", capacity=2)
    assert m.in_memory() == ["b", "c"]
    assert get_number(m["b"]) == 2
    assert m.in_memory() == ["c", "b"]
    assert get_number(m["a"]) == 1
    assert m.in_memory() == ["b", "a"]
    m.get("b")
    assert m.in_memory() == ["a", "b"]
    m.get_handle("c").compute_actions(ROWS)
    assert m.in_memory() == ["b", "c"]


@pytest.mark.core
def test_handles_stay_whatever_is_stashed():
    m = make_map("a", "b", "c", capacity=1)
    a = m["a"]
    for i in range(3):
        fill(a, 10 + i)  # while others come and go
        assert get_number(m["b"]) == 2
        assert not a.driver.acting.state.is_in_memory
        assert m["a"] is a
        assert get_number(a) == 10 + i


@pytest.mark.parametrize("is_new", [True, False])
def test_setting_a_policy_in_memory_stashes_nothing(is_new):
    m = make_map("a", "b", capacity=2)
    m["a"] = make(seed=5) if is_new else m.get_handle("a")
    assert m.in_memory() == ["b", "a"]
    assert (m.statistics.evictions, m.statistics.policies) == (0, 2)


@pytest.mark.core
def test_a_replaced_policy_never_comes_back():
    m = make_map("a", "b", capacity=1)
    old = m.get_handle("a")
    m["a"] = make_filled(7)
    assert get_number(m["b"]) == 2
    assert get_number(m["a"]) == 7
    assert get_number(old) == 1  # the handle has another state
    fill(old, 8)
    assert get_number(m["a"]) == 7


def test_one_policy_under_two_ids():
    m = make_map("a", "b", capacity=1)
    m["twin"] = m["a"]
    assert m["twin"] is m["a"]
    assert (len(m), m.statistics.policies) == (3, 2)
    fill(m["twin"], 4)
    del m["a"]
    _ = m["b"]
    assert get_number(m["twin"]) == 4
    m["twin"] = make()
    assert m.statistics.policies == 2


def test_a_deleted_policy_stays_usable_and_may_join_another_map():
    m, other = make_map("a", "b", capacity=1), PolicyMap()
    a = m.get_handle("a")
    other["a"] = a  # a guest
    assert other["a"] is a
    assert other.statistics.policies == 0
    for call in (other.evict, other.pin, other.freeze):
        with pytest.raises(UsageError, match=r"shared.*another PolicyMap"):
            call("a")
    assert other.copy_policy("a", "b") is not a
    del other["a"], other["b"]
    assert len(other) == 0
    _ = m["b"]
    before = m.in_memory()
    del m["a"]
    assert m.in_memory() == before  # deleting it evicted no other policy
    assert get_number(a) == 1
    other["a"] = a
    assert get_number(other["a"]) == 1


def test_a_deleted_policy_leaves_nothing():
    m = make_map("a", "b", capacity=1)
    folder = m._cache.stash.folder
    assert len(list(folder.rglob("*.state"))) == 1
    states = [weakref.ref(m.get_handle(x).driver.acting.state) for x in "ab"]
    assert get_number(m["a"]) == 1
    del m["a"], m["b"]
    m["c"] = make()
    m["c"].compute_actions(ROWS)  # the Program remembers the last policy that acted
    gc.collect()
    assert [state() for state in states] == [None, None]
    assert list(folder.rglob("*.state")) == []


def test_a_temporary_stash_is_removed_with_the_map():
    m = make_map("a", "b", capacity=1)
    folder = m._cache.stash.folder
    assert folder.is_dir()
    del m
    gc.collect()
    assert not folder.exists()


def test_the_record_of_uses_stays_small():
    m = make_map("a", "b", capacity=5)
    for _ in range(500):
        m.evict("a")
        _ = m["a"]
    assert len(m._cache._order) < 200


def test_bytes_bound_the_memory():
    size = make().driver.acting.state.layout.num_bytes
    m = make_map("a", "b", "c", "d", capacity_bytes=2 * size)
    assert m.in_memory() == ["c", "d"]
    assert m.statistics.bytes_in_memory == m.statistics.bytes_on_disk == 2 * size
    tight = make_map("a", "b", capacity_bytes=1)  # less than one takes
    assert tight.in_memory() == ["b"]
    assert get_number(tight["a"]) == 1
    both = make_map("a", "b", "c", capacity=1, capacity_bytes=10 * size)
    assert both.in_memory() == ["c"]


def test_pinned_policies_stay():
    m = make_map("a", "b", "c", capacity=2)
    m.pin("a")
    assert m.in_memory() == ["c", "a"]
    _ = m["b"], m["c"]
    assert m.in_memory() == ["a", "c"]
    m.evict("a")
    assert "a" in m.in_memory()
    m.pin("b")
    m.pin("c")
    assert len(m.in_memory()) == 3  # more than capacity, if so many are pinned
    assert m.statistics.pinned == 3
    for policy_id in "abc":
        m.unpin(policy_id)
    assert m.in_memory() == ["b", "c"]
    for method in (m.pin, m.unpin, m.evict, m.freeze):
        with pytest.raises(UnknownPolicyError):
            method("x")


@pytest.mark.core
def test_statistics():
    m = make_map("a", "b", capacity=1)
    start = m.statistics
    assert (start.policies, start.in_memory, start.frozen, start.pinned) == (2, 1, 0, 0)
    _ = m["b"], m["a"], m["a"], m["b"]
    now = m.statistics
    counters = ("hits", "misses", "evictions", "writes")
    changes = [getattr(now, x) - getattr(start, x) for x in counters]
    assert changes == [2, 2, 2, 1]  # a was not changed since it was stashed
    assert now.seconds > start.seconds
    assert 0 < now.hit_rate < 1
    assert PolicyMap().statistics.hit_rate == 1


def test_using_a_policy_swaps_no_other():
    m = make_map("a", "b", "c", capacity=2)
    before = m.statistics
    a, b, c = (m.get_handle(x) for x in "abc")
    c.compute_actions(ROWS)
    c.learn_on_batch(batch_for(c, 4))
    for policy in (b, a):
        policy.on_global_var_update({"timestep": 5})
    a.set_hyperparameter("lr", 0.5)
    assert m.in_memory() == ["b", "c"]
    now = m.statistics
    assert (now.misses, now.evictions) == (before.misses, before.evictions)


# -- evicted policies ----------------------------------------------------------------------------

KINDS = {
    "ppo": (PPOTF2Policy, {}),
    "ppo with filter": (PPOTF2Policy, {**FILTERED, "reward_filter": "MeanStdFilter"}),
    "ppo through onnx": (PPOTF2Policy, {"inference": "onnx"}),
    "pg": (PGTF2Policy, {}),
    "dqn": (DQNTF2Policy, {}),
    "graph": (PPOTF1Policy, {}),
}
EACH_KIND = pytest.mark.parametrize(("policy_class", "config"), KINDS.values(), ids=KINDS)


def make_used(policy_class, seed=0, **config):
    """Makes a policy that acted, learned and was observed."""
    policy = make(policy_class, seed=seed, **config)
    for _ in range(2):
        policy.compute_actions(ROWS)
        policy.learn_epochs(batch_for(policy, 8), 1, 4)
    rewards = {"rewards": np.arange(5, dtype=np.float32).reshape(1, 5)}
    policy.driver.learning.observe([ROWS[None]], rewards)
    policy.driver.learning.flush_filters()
    return policy


@EACH_KIND
def test_an_evicted_policy_returns_exactly_as_it_was(policy_class, config):
    m, alone = PolicyMap(), make_used(policy_class, **config)
    m["p"] = make_used(policy_class, **config)
    for step in range(3):
        m.evict("p")
        assert m.in_memory() == []
        assert_same(get_owned(m.get_handle("p")), get_owned(alone))
        m.evict("p")
        actual, expected = (x.compute_actions(ROWS) for x in (m.get_handle("p"), alone))
        assert_same(actual._asdict(), expected._asdict())
        m.evict("p")
        for policy in (m.get_handle("p"), alone):
            policy.learn_epochs(batch_for(policy, 8, seed=step), 2, 4)
        m.evict("p")
        likely = [x.compute_log_likelihoods(expected.actions, ROWS) for x in (m["p"], alone)]
        np.testing.assert_array_equal(*likely)
    assert m["p"].num_grad_updates == alone.num_grad_updates > 0


def test_no_weights_of_another_policy_stay_in_shared_variables():
    m = make_map("a", "b", capacity=1)
    batch = batch_for(make(), 8)
    m["a"].learn_on_batch(batch)
    m.evict("a")
    fill(m["a"], 0.5)
    m["b"].learn_on_batch(batch)
    assert get_number(m["a"]) == 0.5
    assert np.isclose(m["a"].model.get_weights()[0], 0.5).all()
    m.evict("a")
    fill(m["b"], 0.25)
    assert np.isclose(m["a"].model.get_weights()[0], 0.5).all()


def test_gradients_and_exports_bring_a_policy_back(tmp_path):
    m = make_map("a", capacity=1)
    batch = batch_for(m["a"], 4)
    expected, _ = m["a"].compute_gradients(batch)
    m.evict("a")
    actual, _ = m["a"].compute_gradients(batch)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    for use in (lambda a: a.apply_gradients(actual), lambda a: a.export_checkpoint(tmp_path / "a")):
        m.evict("a")
        use(m["a"])
    m.evict("a")
    loaded = Policy.from_checkpoint(tmp_path / "a")
    assert_equal(loaded.get_weights(), m["a"].get_weights())


# -- custom policies ------------------------------------------------------------------------------


@pytest.mark.core
def test_custom_policies_stay_in_memory():
    m = PolicyMap(capacity=1)
    m.create_policy("one", Always, OBS, TWO, {}, {"action": 1})
    m["zero"] = Always(OBS, TWO, {"action": 0})
    m["learner"] = make()
    assert m["one"].compute_actions(ROWS).actions.tolist() == [1] * 5
    assert m["zero"].compute_actions(ROWS).actions.tolist() == [0] * 5
    assert m.in_memory() == ["learner"]
    m.pin("one")
    m.evict("one")
    m.unpin("one")
    m.flush()
    with pytest.raises(UsageError, match="cannot be frozen"):
        m.freeze("one")
    for call in (lambda: m.perturb("one", "lr"), lambda: m.copy_policy("one", "two", lr=0.5)):
        with pytest.raises(UsageError, match="no known hyperparameters"):
            call()
    assert m.copy_policy("one", "two") is m["two"]
    assert m["two"] is not m["one"]
    assert m["two"].policy_id == "two"
    del m["one"]
    m.close()


# -- making policies ------------------------------------------------------------------------------


@pytest.mark.core
def test_create_policy():
    m = PolicyMap(0, 0, capacity=2, policy_config={**QUICK, "gamma": 0.5}, seed=3)
    merged = PPOConfig().training(lr=0.25).to_dict()
    assert m.create_policy("a", PPOTF2Policy, OBS, TWO, {"lr": 0.25}, {"lr": 0.25}) is None
    assert [m["a"].get_hyperparameter(x) for x in ("lr", "gamma")] == [0.25, 0.5]
    assert m["a"].policy_id == "a"
    assert m.specs["a"].policy_class is PPOTF2Policy
    assert m.specs["a"].config == {"lr": 0.25}
    m.create_policy("b", PPOTF2Policy, OBS, TWO, None, merged)
    assert [m["b"].get_hyperparameter(x) for x in ("lr", "gamma")] == [0.25, np.float32(0.99)]
    m.create_policy("c", PPOTF2Policy, OBS, TWO, {}, PPOConfig().training(lr=0.125))
    assert m["c"].get_hyperparameter("lr") == 0.125
    before = m["a"]
    m.create_policy("a", PGTF2Policy, OBS, PLANE, {}, {})
    assert m["a"] is not before
    assert m.specs["a"].policy_class is PGTF2Policy
    m["a"] = make()
    assert "a" not in m.specs  # it described another policy
    del m["b"]
    assert "b" not in m.specs


@pytest.mark.core
def test_seeds_differ_per_policy_and_repeat():
    def create(worker_index, seed=11):
        m = PolicyMap(worker_index, 2, seed=seed)
        for policy_id in ("a", "b"):
            m.create_policy(policy_id, PPOTF2Policy, OBS, TWO, {}, QUICK)
        return m

    first, again, elsewhere, other = create(0), create(0), create(1), create(0, seed=12)
    assert_equal(first["a"].get_weights(), again["a"].get_weights())
    assert_equal(first["a"].get_weights(), elsewhere["a"].get_weights())
    for policy in (first["b"], other["a"]):
        kernels = [next(iter(x.get_weights().values())) for x in (first["a"], policy)]
        assert (kernels[0] != kernels[1]).any()
    many = rows_of(OBS, 64)
    chosen = [x["a"].compute_actions(many).actions for x in (first, again, elsewhere)]
    assert (chosen[0] == chosen[1]).all()
    assert (chosen[0] != chosen[2]).any()
    config_wins = PolicyMap(0, 2, seed=99)
    config_wins.create_policy("a", PPOTF2Policy, OBS, TWO, {}, {**QUICK, "seed": 11})
    assert_equal(config_wins["a"].get_weights(), first["a"].get_weights())


@pytest.mark.core
@pytest.mark.parametrize("policy_class", [Failing, PPOTF1Policy])
def test_a_policy_that_cannot_be_made_changes_nothing(policy_class):
    def no_session():
        raise RuntimeError("no luck")

    m = PolicyMap(capacity=1, session_creator=no_session)
    m["a"], m["b"] = make(), make()
    a, graph = m.get_handle("a"), tf.compat.v1.get_default_graph()
    before = m.statistics
    with pytest.raises(RuntimeError, match="no luck"):
        m.create_policy("a", policy_class, OBS, TWO, {}, QUICK)
    with pytest.raises(ConfigError, match="lrr"):
        m.create_policy("c", PPOTF2Policy, OBS, TWO, {}, {**QUICK, "lrr": 1})
    with pytest.raises(ConfigError, match="subclass of Policy"):
        m.create_policy("c", dict, OBS, TWO, {}, QUICK)
    assert m.statistics == before
    assert m.get_handle("a") is a
    assert list(m.specs) == []
    assert set(m) == {"a", "b"}
    assert tf.executing_eagerly()
    assert tf.compat.v1.get_default_graph() is graph


@pytest.mark.core
def test_the_session_creator_is_called_once_per_graph_policy():
    graphs = []

    def create():
        graphs.append(tf.compat.v1.get_default_graph())
        return tf.compat.v1.Session()

    m = PolicyMap(capacity=2, session_creator=create, policy_config=QUICK)
    for policy_id, policy_class in zip("abcd", [*[PPOTF1Policy] * 3, PPOTF2Policy], strict=True):
        m.create_policy(policy_id, policy_class, OBS, TWO, {}, {})
        assert m[policy_id].compute_actions(ROWS).actions.shape == (5,)
    for policy_id in "db":
        m[policy_id].learn_on_batch(batch_for(m[policy_id], 4))
    assert graphs == [m["a"].get_session().graph] * 3  # an evicted policy passes its session on
    assert m["d"].get_session() is None
    assert m["a"].get_session() is not m["b"].get_session()
    m.close()


def test_a_creator_of_a_session_on_another_graph_is_refused():
    m = PolicyMap(session_creator=lambda: tf.compat.v1.Session(graph=tf.Graph()))
    with pytest.raises(ConfigError, match="on the default graph"):
        m.create_policy("a", PPOTF1Policy, OBS, TWO, {}, QUICK)
    assert len(m) == 0


# -- populations ----------------------------------------------------------------------------------


@EACH_KIND
def test_a_copy_has_everything_but_the_generator(policy_class, config):
    m = PolicyMap(capacity=1)
    m["a"] = make_used(policy_class, **config)
    twin = m.copy_policy("a", "b")
    assert m["b"] is twin
    assert twin.policy_id == "b"
    states = [get_owned(m["a"]), get_owned(twin)]
    assert states[0].pop("rng") != states[1].pop("rng")
    assert_same(*states)
    before = get_owned(m["a"])
    twin.learn_epochs(batch_for(twin, 8), 1, 4)
    twin.compute_actions(ROWS)
    assert_same(before, get_owned(m["a"]))
    assert [*find_differences(get_owned(twin)["weights"], before["weights"])]


@pytest.mark.core
def test_a_copy_onto_a_policy_of_the_kind_keeps_its_handle():
    m = make_map("a", "b", capacity=1)
    b, generator = m["b"], m["b"].get_state()["rng"]
    assert m.copy_policy("a", "b", lr=0.5) is b
    assert get_number(b) == 1
    assert b.get_hyperparameter("lr") == 0.5
    assert m["a"].get_hyperparameter("lr") != 0.5
    assert b.get_state()["rng"] == generator
    fill(b, 9)
    assert get_number(m["a"]) == 1


def test_a_copy_onto_another_kind_replaces_it():
    m = make_map("a")
    m.create_policy("b", PGTF2Policy, OBS, TWO, {}, QUICK)
    b = m["b"]
    assert m.copy_policy("a", "b") is not b
    assert get_number(m["b"]) == 1
    assert "b" not in m.specs
    m.create_policy("c", PPOTF2Policy, OBS, TWO, {"lr": 0.5}, {**QUICK, "lr": 0.5})
    m.copy_policy("c", "d")
    assert m.specs["d"] == m.specs["c"]


def test_a_copy_onto_another_id_of_the_same_policy_parts_them():
    m = make_map("a")
    m["b"] = m["a"]
    m.copy_policy("a", "b", lr=0.5)
    assert m["b"] is not m["a"]
    assert m["a"].get_hyperparameter("lr") != 0.5


def test_a_copy_that_cannot_be_made_changes_nothing():
    m = make_map("a", "b")
    before = get_owned(m["b"])
    with pytest.raises(ConfigError, match="'lrr' is not a hyperparameter"):
        m.copy_policy("a", "b", lrr=1)
    with pytest.raises(UnknownPolicyError):
        m.copy_policy("x", "b")
    with pytest.raises(UsageError, match="must differ"):
        m.copy_policy("a", "a")
    with pytest.raises(ValueError, match="olicy"):
        m.copy_policy("a", "c/d")
    assert_same(before, get_owned(m["b"]))
    assert set(m) == {"a", "b"}


def test_a_policy_that_asked_for_td_errors_can_be_copied():
    m = PolicyMap()
    m["a"] = make_used(DQNTF2Policy)
    batch = batch_for(m["a"], 4)
    arguments = [batch[x] for x in ("obs", "actions", "rewards", "new_obs", "terminateds")]
    expected = m["a"].compute_td_error(*arguments, np.ones(4))
    m.copy_policy("a", "b")
    np.testing.assert_array_equal(m["b"].compute_td_error(*arguments, np.ones(4)), expected)


@pytest.mark.core
def test_perturbing():
    m = make_map("a")
    m["a"].set_hyperparameter("lr", 0.5)
    result = m.perturb("a", "lr", "gamma", factors=(2.0,), rng=np.random.default_rng(0))
    assert result == {"lr": 1.0, "gamma": m["a"].get_hyperparameter("gamma")}
    assert m["a"].get_hyperparameter("lr") == 1.0
    for _ in range(4):
        before = m["a"].get_hyperparameter("lr")
        assert m.perturb("a", "lr")["lr"] / before in (pytest.approx(0.8), pytest.approx(1.2))
    before = get_owned(m["a"])
    with pytest.raises(ConfigError, match="'lrr' is not a hyperparameter"):
        m.perturb("a", "lr", "lrr")
    assert_same(before, get_owned(m["a"]))


# -- frozen policies ------------------------------------------------------------------------------

CHANGES = {
    "set_weights": lambda p, b: p.set_weights(p.get_weights()),
    "set_state": lambda p, b: p.set_state(p.get_state() | {"rng": make(seed=9).get_state()["rng"]}),
    "learn_on_batch": lambda p, b: p.learn_on_batch(b),
    "learn_epochs": lambda p, b: p.learn_epochs(b, 2, 4),
    "learn_on_loaded_batch": lambda p, b: (p.load_batch_into_buffer(b), p.learn_on_loaded_batch()),
    "apply_gradients": lambda p, b: p.apply_gradients(p.compute_gradients(b)[0]),
    "set_hyper": lambda p, b: p.set_hyperparameter("lr", 0.5),
    "act_like": lambda p, b: p.driver.copy_from(make(seed=8, **FILTERED)),
    "apply_filter": lambda p, b: p.driver.apply_filters(),
}


def make_filtered_map():
    m = PolicyMap()
    m["a"] = make_used(PPOTF2Policy, **FILTERED)
    return m


@pytest.mark.core
@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_policy_refuses_every_change(change):
    m = make_filtered_map()
    batch = batch_for(m["a"], 8)
    m.freeze("a")
    before = get_owned(m["a"])
    with pytest.raises(FrozenPolicyError, match=r"'a' is frozen.*copy_policy"):
        CHANGES[change](m["a"], batch)
    assert_same(before, get_owned(m["a"]))


@pytest.mark.core
def test_a_frozen_policy_acts_and_observes_nothing():
    m, alone = make_filtered_map(), make_used(PPOTF2Policy, **FILTERED)
    m["a"].driver.learning.observe([ROWS[None]], {"rewards": np.zeros((1, 5), np.float32)})
    assert not m["a"].driver.is_frozen
    assert m.freeze("a") is m["a"]
    assert m.freeze("a") is m["a"]  # again
    assert m["a"].driver.is_frozen
    assert m.in_memory() == ["a"]
    before = get_owned(m["a"])
    m["a"].driver.learning.observe([100 * ROWS[None]], {"rewards": np.zeros((1, 5), np.float32)})
    m["a"].driver.learning.flush_filters()  # rows that waited when it was frozen stay
    with pytest.raises(FrozenPolicyError):
        m.perturb("a", "lr")
    assert_same(before, get_owned(m["a"]))
    assert (m.statistics.frozen, m.statistics.bytes_in_memory) == (1, 0)
    actions = [each.compute_actions(ROWS).actions for each in (m["a"], alone)]
    np.testing.assert_array_equal(*actions)
    assert not m["a"].driver.acting.state.memory.flags.writeable
    m["a"].on_global_var_update({"timestep": 10})
    m.evict("a")
    assert m.in_memory() == []
    m["a"].compute_actions(ROWS)
    assert_equal(m["a"].get_weights(), alone.get_weights())
    twin = m.copy_policy("a", "b")
    fill(twin, 3)
    assert_equal(m["a"].get_weights(), alone.get_weights())


@pytest.mark.parametrize("policy_class", [SACTF2Policy, SACTF1Policy, PPOTF1Policy])
def test_a_frozen_policy_keeps_only_the_variables_that_acting_reads(policy_class, tmp_path):
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    quick = {"inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [4]}, "seed": 3}
    m, alone = PolicyMap(), policy_class(OBS, space, quick)
    m["a"] = policy_class(OBS, space, quick)
    batch = random_batch(alone.copy(), 8)
    for policy in (m["a"], alone):
        policy.learn_on_batch(batch)
    num_bytes = m["a"].driver.state.layout.num_bytes
    assert m.freeze("a").driver.state.layout.num_bytes < 0.4 * num_bytes
    actor = [slot.key for slot in alone.program.layout.get_weight_slots("model")]
    assert list(m["a"].get_weights()) == actor
    assert "_optimizer_variables" not in m["a"].get_state()
    actions = [policy.compute_actions(ROWS).actions for policy in (m["a"], alone)]
    np.testing.assert_array_equal(*actions)
    expected = {key: alone.get_weights()[key] for key in actor}
    m["a"].export_checkpoint(tmp_path / "a")
    loaded = policy_class.from_checkpoint(tmp_path / "a")
    for policy in (m.copy_policy("a", "b"), loaded):
        assert_equal({key: policy.get_weights()[key] for key in actor}, expected)
        assert not policy.driver.is_frozen
        policy.learn_on_batch(batch)
    outputs = [tf.nest.flatten(policy.model(ROWS))[0] for policy in (m["a"], alone)]
    np.testing.assert_array_equal(*outputs)


def test_a_refused_update_calls_no_callback():
    m, calls = make_filtered_map(), []
    batch = batch_for(m["a"], 8)

    class Recording:
        def on_learn_on_batch(self, **kwargs):
            calls.append(kwargs)

    m["a"].callbacks = Recording()
    m.freeze("a")
    for change in ("learn_on_batch", "learn_epochs", "learn_on_loaded_batch"):
        with pytest.raises(FrozenPolicyError):
            CHANGES[change](m["a"], batch)
    assert calls == []


def test_a_frozen_policy_can_be_deleted_and_its_id_frozen_again():
    m = make_map("a", "b")
    m.freeze("a")
    a = m["a"]
    del m["a"]
    assert get_number(a) == 1
    m["a"] = make_filled(5)
    m.freeze("a")
    assert get_number(m["a"]) == 5
    assert get_number(a) == 1
    m.copy_policy("b", "a")  # in place of the frozen one
    assert not m["a"].driver.is_frozen
    assert get_number(m["a"]) == 2


def test_a_frozen_policy_that_is_pinned_stays_in_memory():
    m = make_map("a", "b", capacity=1)
    m.pin("a")
    m.freeze("a")
    _ = m["b"]
    assert "a" in m.in_memory()


def test_frozen_policies_count_no_bytes_and_evict_no_others():
    size = make().driver.acting.state.layout.num_bytes
    m = make_map("a", "b", "c", capacity_bytes=3 * size)
    m.freeze("a")
    m["d"] = make()
    m.evict("a")
    assert get_number(m["a"]) == 1
    assert set(m.in_memory()) == {"a", "b", "c", "d"}


def test_the_number_of_mapped_frozen_policies_is_bounded(monkeypatch):
    monkeypatch.setattr("tfpolicies.policy_map.state_cache._MAX_MAPPED", 2)
    m = make_map("a", "b", "c", "d", "e")
    for policy_id in "abc":
        m.freeze(policy_id)
        m.evict(policy_id)
    assert [get_number(m[x]) for x in "abc"] == [1, 2, 3]
    assert m.in_memory() == ["d", "e", "b", "c"]


# -- stashes with a path -------------------------------------------------------------------------


@pytest.mark.core
@EACH_KIND
def test_a_kept_stash_is_restored_whole(policy_class, config, tmp_path):
    alone = make_used(policy_class, **config)
    with PolicyMap(0, 1, capacity=1, path=tmp_path) as m:
        m["a"] = make_used(policy_class, **config)
        m["b"] = make_used(policy_class, seed=1, **config)
        m["b"].set_hyperparameter("lr", 0.125)
    assert len(m) == 0
    with PolicyMap(0, 1, capacity=1, path=tmp_path) as m:
        assert set(m) == {"a", "b"}
        assert m.in_memory() == []
        assert_same(get_owned(m["a"]), get_owned(alone))
        for policy in (m["a"], alone):
            policy.learn_epochs(batch_for(policy, 8), 2, 4)
        assert_same(get_owned(m["a"]), get_owned(alone))
        actual, expected = (x.compute_actions(ROWS) for x in (m["a"], alone))
        np.testing.assert_array_equal(actual.actions, expected.actions)
        assert m["b"].get_hyperparameter("lr") == 0.125
        assert type(m["b"]) is policy_class
        assert m["a"].policy_id == "a"


@pytest.mark.core
def test_neither_unflushed_nor_deleted_policies_are_restored(tmp_path):
    m = make_map("a", "b", path=tmp_path)
    m.flush()
    m["c"] = make()
    del m["b"]
    release_folder(m)
    again = PolicyMap(path=tmp_path)
    assert list(again) == ["a"]
    assert get_number(again["a"]) == get_number(m["a"]) == 1


def test_a_policy_that_was_replaced_unopened_does_not_come_back(tmp_path):
    make_map("a", "b", path=tmp_path).close()
    for _ in range(2):
        with PolicyMap(path=tmp_path) as m:
            m["a"] = make_filled(6)
            m.copy_policy("a", "b")
        with PolicyMap(path=tmp_path) as m:
            assert [get_number(m[x]) for x in "ab"] == [6, 6]
        assert len(list((tmp_path / "worker_0").glob("*.state"))) == 2


def test_unopened_policies_can_be_deleted_and_survive_a_flush(tmp_path):
    make_map("a", "b", "c", path=tmp_path).close()
    with PolicyMap(path=tmp_path) as m:
        del m["a"]
        assert m.statistics.policies == 0  # none was opened
        m.flush()
        assert m.statistics.policies == 0
        assert m.pop("b").get_weights()
    with PolicyMap(path=tmp_path) as m:
        assert list(m) == ["c"]
        m.clear()
    with PolicyMap(path=tmp_path) as m:
        assert len(m) == 0


def test_a_copy_onto_an_unopened_policy_keeps_its_generator(tmp_path):
    with make_map("a", "b", path=tmp_path) as m:
        generator = m["b"].get_state()["rng"]
    with PolicyMap(path=tmp_path) as m:
        m.copy_policy("a", "b")
        assert m["b"].get_state()["rng"] == generator
        assert get_number(m["b"]) == 1


def test_one_policy_under_two_ids_is_found_again_under_both(tmp_path):
    with make_map("a", path=tmp_path) as m:
        m["b"] = m["a"]
    with PolicyMap(path=tmp_path) as m:
        assert set(m) == {"a", "b"}
        assert m["a"] is m["b"]
    with PolicyMap(path=tmp_path) as m:
        del m["a"]
        assert get_number(m["b"]) == 1


def test_policies_that_are_held_stay_usable_after_close(tmp_path):
    m = make_map("a", "b", capacity=1, path=tmp_path)
    a, b = m.get_handle("a"), m.get_handle("b")
    m.close()
    m.close()  # again
    with PolicyMap(path=tmp_path, capacity=1) as later:
        fill(later["a"], 5)
        _ = later["b"]
        fill(a, 7)
        fill(b, 8)
        assert (get_number(a), get_number(b)) == (7, 8)
        assert (get_number(later["a"]), get_number(later["b"])) == (5, 2)
    other = PolicyMap()
    other["a"] = a
    assert get_number(other["a"]) == 7


@pytest.mark.core
def test_two_maps_of_one_path_exclude_each_other(tmp_path):
    m = make_map("a", path=tmp_path)
    with pytest.raises(StashError, match=r"in use by another PolicyMap.*worker_index"):
        PolicyMap(path=tmp_path)
    with PolicyMap(1, 2, path=tmp_path) as other:
        assert "a" not in other
    m.close()
    PolicyMap(path=tmp_path).close()
    lost = PolicyMap(path=tmp_path)
    del lost
    gc.collect()
    PolicyMap(path=tmp_path).close()


@pytest.mark.core
def test_files_that_a_killed_map_half_wrote_are_removed_by_the_next_one(tmp_path):
    make_map("a", path=tmp_path).close()
    for name in (".a~1.state.0123abcd.tfp-tmp", ".a~frozen.json.0123abcd.tfp-tmp"):
        (tmp_path / "worker_0" / name).write_bytes(b"half")
    with PolicyMap(path=tmp_path) as m:
        assert "a" in m
        m.freeze("a")
        assert list(tmp_path.rglob("*.tfp-tmp")) == []


def test_a_path_to_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StashError, match=r"file.*path"):
        PolicyMap(path=tmp_path / "file")


def test_strange_ids_are_files_too(tmp_path):
    ids = ["*", "ä ß", "..a", "x" * 300, "x" * 299 + "y", "a~b", "%41", "A", "a"]
    with make_map(*ids, path=tmp_path, capacity=2) as m:
        m.freeze("*")
    with PolicyMap(path=tmp_path, capacity=2) as m:
        assert set(m) == set(ids)
        assert [get_number(m[x]) for x in ids] == [i + 1 for i in range(len(ids))]


def test_a_custom_class_is_named_to_the_map(tmp_path):
    with PolicyMap(path=tmp_path) as m:
        m["a"] = make(Own)
        m["b"] = make()
    with PolicyMap(path=tmp_path) as m:
        with pytest.raises(StashError, match=r"'a' cannot be loaded.*policy_classes"):
            _ = m["a"]
        assert isinstance(m["b"], PPOTF2Policy)  # others are not concerned
        m.flush()
    with PolicyMap(path=tmp_path, policy_classes=[Own]) as m:
        assert type(m["a"]) is Own


@pytest.mark.core
def test_frozen_policies_are_seen_by_maps_of_the_same_path(tmp_path):
    one, two = PolicyMap(0, 2, path=tmp_path), PolicyMap(1, 2, path=tmp_path)
    one["a"] = make_used(PPOTF2Policy)
    one["main"] = make()
    one.freeze("a")
    assert "a" not in two
    assert two["a"].driver.is_frozen  # it looks for it when asked
    assert_equal(two["a"].get_weights(), one["a"].get_weights())
    with pytest.raises(FrozenPolicyError):
        fill(two["a"], 1)
    one.copy_policy("main", "b")
    one.freeze("b")
    assert two.refresh() == ["b"]
    assert set(two) == {"a", "b"}
    del two["b"]
    assert two.refresh() == []
    assert one["b"].driver.is_frozen
    one.evict("b")
    assert one["b"].get_weights()
    two["main"] = make(seed=4)
    two.copy_policy("main", "b")
    with pytest.raises(StashError, match="Another policy was already frozen as 'b'"):
        two.freeze("b")
    assert not two["b"].driver.is_frozen
    two.copy_policy("a", "c")
    two["c"].set_weights(one["main"].get_weights())
    one.close()
    two.close()
    with PolicyMap(0, 2, path=tmp_path) as again:
        assert again["a"].driver.is_frozen
        assert set(again) == {"a", "b", "main"}
        del again["a"], again["b"]  # which it froze itself: opened or not, they are gone
    with PolicyMap(0, 2, path=tmp_path) as again:
        assert set(again) == {"main"}
    with PolicyMap(1, 2, path=tmp_path) as two:
        assert set(two) == {"main", "b", "c"}


def test_the_same_weights_may_be_frozen_twice(tmp_path):
    one, two = PolicyMap(0, 2, path=tmp_path), PolicyMap(1, 2, path=tmp_path)
    for m in (one, two):
        m["a"] = make()
        m.freeze("a")
        assert m["a"].driver.is_frozen
    del two["a"]  # which is not its own
    one.evict("a")
    assert one["a"].get_weights()


def test_a_frozen_policy_whose_owner_deleted_it_stays(tmp_path):
    one, two = PolicyMap(0, 2, path=tmp_path), PolicyMap(1, 2, path=tmp_path, capacity=1)
    one["a"] = make()
    one.freeze("a")
    expected = two["a"].get_weights()
    del one["a"]
    two["other"] = make(seed=3)  # evicts it
    assert two.in_memory() == ["other"]
    assert_equal(two["a"].get_weights(), expected)
    one["a"] = make(seed=5)
    one.freeze("a")
    assert_equal(two["a"].get_weights(), expected)


def test_a_freeze_cut_short_is_finished_by_the_next(tmp_path, monkeypatch):
    m = make_map("a", path=tmp_path)
    monkeypatch.setattr(m._store, "write_record", lambda *x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        m.freeze("a")
    monkeypatch.undo()
    assert not m["a"].driver.is_frozen
    m.freeze("a")
    with PolicyMap(1, 2, path=tmp_path) as other:
        assert get_number(other["a"]) == 1


SECOND = """
    import sys
    from pathlib import Path
    import numpy as np
    from tfpolicies import PolicyMap
    a = PolicyMap(1, 2, path=sys.argv[1], capacity=1)["a"]
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [x for x in lines if "a~frozen" in x.replace("%7E", "~")]
    assert len(mapped) == 1, mapped
    assert mapped[0].split()[1].startswith("r--"), mapped
    obs = np.load(sys.argv[2])
    print(a.compute_actions(obs, explore=False).extras["action_dist_inputs"].tobytes().hex())
"""


def test_a_second_process_shares_frozen_policies(tmp_path):
    m = PolicyMap(0, 2, path=tmp_path / "stash")
    m["a"] = make_used(PPOTF2Policy)
    m.freeze("a")
    np.save(tmp_path / "obs.npy", ROWS)
    printed = run_python(textwrap.dedent(SECOND), tmp_path / "stash", tmp_path / "obs.npy").stdout
    expected = m["a"].compute_actions(ROWS, explore=False).extras["action_dist_inputs"]
    assert printed.strip() == expected.tobytes().hex()


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ppo", "ppo through onnx", "graph"])
def test_queries_never_see_half_a_change_nor_block_it(kind):
    """Values and likelihoods of a policy that learns, is set and evicted by other threads."""
    policy_class, config = KINDS[kind]

    def make_kind(number):
        return make_filled(number, policy_class, **config)

    def compute_values(number):
        return make_kind(number).compute_values([ROWS]).tolist()

    m = PolicyMap(capacity=1)
    m["a"], m["b"] = make_kind(0), make_kind(0)
    a, batch, actions = m["a"], batch_for(make(policy_class, **config), 4), np.zeros(5, np.int64)
    half, expected = np.log(0.5).astype(np.float32), [compute_values(0), compute_values(1)]

    def query():
        for _ in range(100):
            for policy in (a, m.get_handle("b")):
                np.testing.assert_allclose(policy.compute_log_likelihoods(actions, ROWS), half)
                assert policy.compute_values([ROWS]).tolist() in expected

    def change():
        for i in range(100):
            fill(a, i % 2)  # equal weights: all actions are as likely

    def learn():
        for _ in range(60):
            a.compute_gradients(batch)
            a.set_state(a.get_state())

    def evict():
        for _ in range(300):
            m.evict("a")

    run_threads(query, query, change, learn, evict)
    assert fill(a, 0.5).compute_values([ROWS]).tolist() == compute_values(0.5)
