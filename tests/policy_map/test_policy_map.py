"""The policy map: a dict of policies whose variables page, behind handles that stay."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, PLANE, TWO, assert_equal, batch_for, make, rows_of
from tfpolicies import (
    DQNTF2Policy,
    PGTF2Policy,
    Policy,
    PolicyMap,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
)
from tfpolicies.errors import (
    ConfigError,
    FrozenPolicyError,
    StashError,
    UnknownPolicyError,
    UsageError,
)
from tfpolicies.policy.policy import ActionBatch

pytestmark = pytest.mark.usefixtures("kept_programs")

QUICK = {"inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [4]}}
ROWS = rows_of(OBS, 5)
FILTERED = {"observation_filter": "MeanStdFilter"}


class Always(Policy):
    """Written by hand: always the same action."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.full(len(obs_batch), self.config.get("action", 1)), [], {})


class Failing(PPOTF2Policy):
    def __init__(self, *args):
        super().__init__(*args)
        raise RuntimeError("no luck")


class Own(PPOTF2Policy):
    """A class outside the package."""


def weights(policy):
    return {key: value.copy() for key, value in policy.get_weights().items()}


def fill(policy, number):
    """Gives all weights one number."""
    policy.set_weights([np.full_like(x, number) for x in policy.get_weights().values()])


def number_of(policy):
    """Returns the one number that all weights have."""
    results = {float(x) for array in policy.get_weights().values() for x in array.flat}
    assert len(results) == 1
    return results.pop()


def state_of(policy):
    """Returns everything that a policy owns, flat."""
    state = policy.get_state()
    state.pop("policy_spec")
    return flat(state)


def flat(value, path=""):
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in flat(part, f"{path}/{key}").items()}
    return {path: value}


def same(left, right):
    assert_equal({k: np.asarray(v) for k, v in left.items()}, {k: right[k] for k in left})
    assert list(left) == list(right)


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Keeps what the policies of this file share from being made again for each test."""
    kept = [used(policy_class, **config) for policy_class, config in KINDS.values()]
    yield
    kept.clear()


def map_of(*ids, **arguments):
    """Makes a map of policies whose weights are 1, 2, 3..."""
    m = PolicyMap(**arguments)
    for i, policy_id in enumerate(ids):
        m[policy_id] = make(seed=i)
        fill(m.get_handle(policy_id), i + 1)
    return m


def files_of(m):
    return sorted(path.name for path in m._cache.stash.folder.rglob("*.state"))


# -- signatures -----------------------------------------------------------------------------------


def test_both_signatures_and_their_capacities():
    old = PolicyMap(1, 2)
    assert (old.worker_index, old.num_workers, old.capacity) == (1, 2, 10)
    new = PolicyMap(policy_states_are_swappable=True)
    assert (new.worker_index, new.num_workers, new.capacity) == (0, 0, 100)
    assert new.policy_states_are_swappable is True
    assert PolicyMap(capacity_bytes=1000).capacity is None
    assert PolicyMap(0, 0, 3, None, {"gamma": 0.5}, None, 7).seed == 7


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": -1}, "capacity"),
        ({"capacity": 1.5}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"worker_index": -1}, "worker_index"),
        ({"num_workers": "2"}, "num_workers"),
        ({"seed": -3}, "seed"),
        ({"session_creator": 3}, "session_creator"),
        ({"policy_states_are_swappable": 1}, "policy_states_are_swappable"),
    ],
)
def test_arguments_out_of_their_range_are_named(arguments, named):
    with pytest.raises(ConfigError, match=f"{named} must be"):
        PolicyMap(**arguments)


def test_new_arguments_are_by_keyword_only():
    with pytest.raises(TypeError):
        PolicyMap(0, 0, 1, None, None, None, 0, True)


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
    m = map_of("a", "b")
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


def test_what_is_no_policy_is_refused():
    m = map_of("a")
    with pytest.raises(UsageError, match="holds policies"):
        m["b"] = {"weights": 1}
    with pytest.raises(UsageError, match="holds policies"):
        m.setdefault("b")
    assert list(m) == ["a"]


def test_deleting_while_iterating():
    m = map_of("a", "b", "c", capacity=1)
    for policy_id, policy in m.items():
        assert m.get_handle(policy_id) is policy
        del m[policy_id]
    assert len(m) == 0
    m = map_of("a", "b", "c", capacity=1)
    for policy_id in m:
        del m[policy_id]
    assert len(m) == 0


def test_iterating_while_another_thread_deletes():
    m = PolicyMap()
    first = make()
    stop, wrong = threading.Event(), []

    def churn():
        while not stop.is_set():
            for i in range(5):
                m[f"p{i}"] = first
            for i in range(5):
                m.pop(f"p{i}", None)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            wrong += [x for x in m.values() if x is not first]
            len(m.copy())
    finally:
        stop.set()
        thread.join(30)
    assert wrong == []


@pytest.mark.core
def test_iterating_and_printing_bring_nothing_back():
    m = map_of("a", "b", "c", capacity=1)
    before = m.statistics
    assert "capacity=1" in str(m)
    assert "'a', 'b', 'c'" in repr(m)
    assert len(list(m.values())) == len(list(m.items())) == len(m) == 3
    assert m.get_handle("a") in m.values()
    assert "a" in m
    assert m.statistics == before
    assert m.in_memory() == ["c"]


def test_many_ids_are_abbreviated():
    m = PolicyMap()
    policy = make()
    m.update({f"p{i:02}": policy for i in range(30)})
    assert "'p19' and 10 more" in str(m)


# -- least recently used --------------------------------------------------------------------------


@pytest.mark.core
def test_the_least_recently_used_one_goes_first():
    m = map_of("a", "b", "c", capacity=2)
    assert m.in_memory() == ["b", "c"]
    assert number_of(m["b"]) == 2
    assert m.in_memory() == ["c", "b"]
    assert number_of(m["a"]) == 1
    assert m.in_memory() == ["b", "a"]
    m.get("b")
    assert m.in_memory() == ["a", "b"]
    m.get_handle("c").compute_actions(ROWS)
    assert m.in_memory() == ["b", "c"]


@pytest.mark.core
def test_handles_stay_whatever_is_stashed():
    m = map_of("a", "b", "c", capacity=1)
    a = m["a"]
    for i in range(3):
        fill(a, 10 + i)  # while others come and go
        assert number_of(m["b"]) == 2
        assert not a._state.is_in_memory
        assert m["a"] is a
        assert number_of(a) == 10 + i


def test_replacing_a_policy_in_memory_stashes_nothing():
    m = map_of("a", "b", capacity=2)
    _ = m["a"]
    m["a"] = make(seed=5)
    assert m.in_memory() == ["b", "a"]
    assert m.statistics.evictions == 0
    assert m.statistics.policies == 2


@pytest.mark.core
def test_a_replaced_policy_never_comes_back():
    m = map_of("a", "b", capacity=1)
    old = m.get_handle("a")
    m["a"] = make()
    fill(m["a"], 7)
    assert number_of(m["b"]) == 2
    assert number_of(m["a"]) == 7
    assert number_of(old) == 1  # what its handle holds is its own
    fill(old, 8)
    assert number_of(m["a"]) == 7


def test_setting_the_same_policy_again_only_touches_it():
    m = map_of("a", "b", capacity=2)
    m["a"] = m.get_handle("a")
    assert m.in_memory() == ["b", "a"]
    assert m.statistics.policies == 2


def test_one_policy_under_two_ids():
    m = map_of("a", "b", capacity=1)
    m["twin"] = m["a"]
    assert m["twin"] is m["a"]
    assert len(m) == 3
    assert m.statistics.policies == 2
    fill(m["twin"], 4)
    del m["a"]
    _ = m["b"]
    assert number_of(m["twin"]) == 4
    m["twin"] = make()
    assert m.statistics.policies == 2


def test_a_deleted_policy_stays_usable_and_may_join_another_map():
    m, other = map_of("a", "b", capacity=1), PolicyMap()
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
    assert m.in_memory() == before  # it took nobody's place to leave
    assert number_of(a) == 1
    other["a"] = a
    assert number_of(other["a"]) == 1


def test_a_deleted_policy_leaves_nothing_behind():
    m = map_of("a", "b", capacity=1)
    assert len(files_of(m)) == 1
    gone = weakref.ref(m.get_handle("a")._state)
    there = weakref.ref(m.get_handle("b")._state)
    assert number_of(m["a"]) == 1
    del m["a"], m["b"]
    m["c"] = make()
    m["c"].compute_actions(ROWS)  # the Program remembers whom it acted for last
    gc.collect()
    assert gone() is None
    assert there() is None
    assert files_of(m) == []


def test_what_is_noted_of_uses_stays_small():
    m = map_of("a", "b", capacity=5)
    for _ in range(500):
        m.evict("a")
        _ = m["a"]
    assert len(m._cache._order) < 200


def test_a_temporary_stash_goes_with_the_map():
    m = map_of("a", "b", capacity=1)
    folder = m._cache.stash.folder
    assert folder.is_dir()
    del m
    gc.collect()
    assert not folder.exists()


def test_bytes_bound_the_memory():
    size = make()._state.layout.num_bytes
    m = map_of("a", "b", "c", "d", capacity_bytes=2 * size)
    assert m.in_memory() == ["c", "d"]
    assert m.statistics.bytes_in_memory == 2 * size
    assert m.statistics.bytes_on_disk == 2 * size
    tight = map_of("a", "b", capacity_bytes=1)  # less than one takes
    assert tight.in_memory() == ["b"]
    assert number_of(tight["a"]) == 1
    both = map_of("a", "b", "c", capacity=1, capacity_bytes=10 * size)
    assert both.in_memory() == ["c"]


def test_pinned_policies_stay():
    m = map_of("a", "b", "c", capacity=2)
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
    m = map_of("a", "b", capacity=1)
    start = m.statistics
    assert (start.policies, start.in_memory, start.frozen, start.pinned) == (2, 1, 0, 0)
    _ = m["b"], m["a"], m["a"], m["b"]
    now = m.statistics
    assert now.hits - start.hits == 2
    assert now.misses - start.misses == 2
    assert now.evictions - start.evictions == 2
    assert now.writes - start.writes == 1  # a was not changed since it was stashed
    assert now.seconds > start.seconds
    assert 0 < now.hit_rate < 1
    assert PolicyMap().statistics.hit_rate == 1


def test_using_a_policy_swaps_no_other():
    m = map_of("a", "b", "c", capacity=2)
    before = m.statistics
    m.get_handle("c").compute_actions(ROWS)
    m.get_handle("c").learn_on_batch(batch_for(m.get_handle("c"), 4))
    m.get_handle("b").on_global_var_update({"timestep": 5})
    m.get_handle("a").on_global_var_update({"timestep": 5})
    m.get_handle("a").set_hyperparameter("lr", 0.5)
    assert m.in_memory() == ["b", "c"]
    assert m.statistics.misses == before.misses
    assert m.statistics.evictions == before.evictions


# -- what comes back ------------------------------------------------------------------------------

KINDS = {
    "ppo": (PPOTF2Policy, {}),
    "ppo with filter": (PPOTF2Policy, {**FILTERED, "reward_filter": "MeanStdFilter"}),
    "ppo through onnx": (PPOTF2Policy, {"inference": "onnx"}),
    "pg": (PGTF2Policy, {}),
    "dqn": (DQNTF2Policy, {}),
    "graph": (PPOTF1Policy, {}),
}


def used(policy_class, seed=0, **config):
    """Makes a policy that acted, learned and was observed."""
    policy = make(policy_class, seed=seed, **config)
    for _ in range(2):
        policy.compute_actions(ROWS)
        policy.learn_epochs(batch_for(policy, 8), 1, 4)
    rewards = {"rewards": np.arange(5, dtype=np.float32).reshape(1, 5)}
    policy.driver.learning.observe([ROWS[None]], rewards)
    policy.driver.learning.flush_filters()
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_an_evicted_policy_returns_exactly_as_it_was(kind):
    policy_class, config = KINDS[kind]
    m, alone = PolicyMap(), used(policy_class, **config)
    m["p"] = used(policy_class, **config)
    for step in range(3):
        m.evict("p")
        assert m.in_memory() == []
        same(state_of(m.get_handle("p")), state_of(alone))
        m.evict("p")
        actual, expected = (x.compute_actions(ROWS) for x in (m.get_handle("p"), alone))
        np.testing.assert_array_equal(actual.actions, expected.actions)
        np.testing.assert_array_equal(
            actual.extras["action_dist_inputs"], expected.extras["action_dist_inputs"]
        )
        m.evict("p")
        for policy in (m.get_handle("p"), alone):
            policy.learn_epochs(batch_for(policy, 8, seed=step), 2, 4)
        m.evict("p")
        likely = [x.compute_log_likelihoods(expected.actions, ROWS) for x in (m["p"], alone)]
        np.testing.assert_array_equal(*likely)
    assert m["p"].num_grad_updates == alone.num_grad_updates > 0


def test_nothing_of_another_policy_is_left_in_what_they_share():
    m = map_of("a", "b", capacity=1)
    batch = batch_for(make(), 8)
    m["a"].learn_on_batch(batch)
    m.evict("a")
    fill(m["a"], 0.5)
    m["b"].learn_on_batch(batch)
    assert number_of(m["a"]) == 0.5
    assert np.isclose(m["a"].model.get_weights()[0], 0.5).all()
    m.evict("a")
    fill(m["b"], 0.25)
    assert np.isclose(m["a"].model.get_weights()[0], 0.5).all()


def test_gradients_and_exports_bring_a_policy_back(tmp_path):
    m = map_of("a", capacity=1)
    batch = batch_for(m["a"], 4)
    expected, _ = m["a"].compute_gradients(batch)
    m.evict("a")
    actual, _ = m["a"].compute_gradients(batch)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    m.evict("a")
    m["a"].apply_gradients(actual)
    m.evict("a")
    m["a"].export_checkpoint(tmp_path / "a")
    m.evict("a")
    loaded = Policy.from_checkpoint(tmp_path / "a")
    assert_equal(weights(loaded), weights(m["a"]))


# -- written by hand ------------------------------------------------------------------------------


@pytest.mark.core
def test_hand_written_policies_stay_in_memory():
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
    with pytest.raises(UsageError, match="no known hyperparameters"):
        m.perturb("one", "lr")
    with pytest.raises(UsageError, match="no known hyperparameters"):
        m.copy_policy("one", "two", lr=0.5)
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
    assert (
        m["a"].get_hyperparameter("lr"),
        m["a"].get_hyperparameter("gamma"),
        m["a"].policy_id,
    ) == (0.25, 0.5, "a")
    assert m.specs["a"].policy_class is PPOTF2Policy
    assert m.specs["a"].config == {"lr": 0.25}
    m.create_policy("b", PPOTF2Policy, OBS, TWO, None, merged)
    assert (m["b"].get_hyperparameter("lr"), m["b"].get_hyperparameter("gamma")) == (
        0.25,
        np.float32(0.99),
    )
    m.create_policy("c", PPOTF2Policy, OBS, TWO, {}, PPOConfig().training(lr=0.125))
    assert m["c"].get_hyperparameter("lr") == 0.125
    before = m["a"]
    m.create_policy("a", PGTF2Policy, OBS, PLANE, {}, {})
    assert m["a"] is not before
    assert m.specs["a"].policy_class is PGTF2Policy
    m["a"] = make()
    assert "a" not in m.specs  # it told of another policy
    del m["b"]
    assert "b" not in m.specs


@pytest.mark.core
def test_seeds_differ_per_policy_and_repeat():
    def made(worker_index, seed=11, **config):
        m = PolicyMap(worker_index, 2, seed=seed)
        for policy_id in ("a", "b"):
            m.create_policy(policy_id, PPOTF2Policy, OBS, TWO, {}, {**QUICK, **config})
        return m

    first, again, elsewhere, other = made(0), made(0), made(1), made(0, seed=12)
    assert_equal(weights(first["a"]), weights(again["a"]))
    assert_equal(weights(first["a"]), weights(elsewhere["a"]))
    kernel = next(iter(weights(first["a"])))
    assert (weights(first["a"])[kernel] != weights(first["b"])[kernel]).any()
    assert (weights(first["a"])[kernel] != weights(other["a"])[kernel]).any()
    many = rows_of(OBS, 64)
    chosen = [x["a"].compute_actions(many).actions for x in (first, again, elsewhere)]
    assert (chosen[0] == chosen[1]).all()
    assert (chosen[0] != chosen[2]).any()
    config_wins = PolicyMap(0, 2, seed=99)
    config_wins.create_policy("a", PPOTF2Policy, OBS, TWO, {}, {**QUICK, "seed": 11})
    assert_equal(weights(config_wins["a"]), weights(first["a"]))


@pytest.mark.core
@pytest.mark.parametrize("policy_class", [Failing, PPOTF1Policy])
def test_a_policy_that_cannot_be_made_leaves_all_as_it_was(policy_class):
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

    def creator():
        graphs.append(tf.compat.v1.get_default_graph())
        return tf.compat.v1.Session()

    m = PolicyMap(capacity=2, session_creator=creator, policy_config=QUICK)
    for policy_id in ("a", "b", "c"):
        m.create_policy(policy_id, PPOTF1Policy, OBS, TWO, {}, {})
        assert m[policy_id].compute_actions(ROWS).actions.shape == (5,)
    assert len(graphs) == 3
    assert set(graphs) == {m["a"].get_session().graph}
    m.create_policy("eager", PPOTF2Policy, OBS, TWO, {}, {})
    m["eager"].compute_actions(ROWS)
    m["eager"].learn_on_batch(batch_for(m["eager"], 4))
    assert m["eager"].get_session() is None
    m["b"].learn_on_batch(batch_for(m["b"], 4))
    assert len(graphs) == 3  # sessions pass on between policies of a kind
    sessions = {m["a"].get_session(), m["b"].get_session()}
    assert len(sessions) == 2
    m.close()


def test_a_creator_of_a_session_elsewhere_is_refused():
    m = PolicyMap(session_creator=lambda: tf.compat.v1.Session(graph=tf.Graph()))
    with pytest.raises(ConfigError, match="on the default graph"):
        m.create_policy("a", PPOTF1Policy, OBS, TWO, {}, QUICK)
    assert len(m) == 0


# -- populations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_everything_but_the_generator(kind):
    policy_class, config = KINDS[kind]
    m = PolicyMap(capacity=1)
    m["a"] = used(policy_class, **config)
    twin = m.copy_policy("a", "b")
    assert m["b"] is twin
    assert twin.policy_id == "b"
    ours, theirs = state_of(m["a"]), state_of(twin)
    generators = [{k: x.pop(k) for k in list(x) if k.startswith("/rng")} for x in (ours, theirs)]
    assert generators[0] != generators[1]
    same(ours, theirs)
    before = state_of(m["a"])
    twin.learn_epochs(batch_for(twin, 8), 1, 4)
    twin.compute_actions(ROWS)
    same(before, state_of(m["a"]))
    assert (state_of(twin)[next(iter(before))] != before[next(iter(before))]).any()


@pytest.mark.core
def test_a_copy_onto_a_policy_of_the_kind_keeps_its_handle():
    m = map_of("a", "b", capacity=1)
    b, generator = m["b"], m["b"].get_state()["rng"]
    assert m.copy_policy("a", "b", lr=0.5) is b
    assert number_of(b) == 1
    assert b.get_hyperparameter("lr") == 0.5
    assert m["a"].get_hyperparameter("lr") != 0.5
    assert b.get_state()["rng"] == generator
    fill(b, 9)
    assert number_of(m["a"]) == 1


def test_a_copy_onto_another_kind_replaces_it():
    m = map_of("a")
    m.create_policy("b", PGTF2Policy, OBS, TWO, {}, QUICK)
    b = m["b"]
    assert m.copy_policy("a", "b") is not b
    assert number_of(m["b"]) == 1
    assert "b" not in m.specs
    m.create_policy("c", PPOTF2Policy, OBS, TWO, {"lr": 0.5}, {**QUICK, "lr": 0.5})
    m.copy_policy("c", "d")
    assert m.specs["d"] == m.specs["c"]


def test_a_copy_onto_another_id_of_the_same_policy_parts_them():
    m = map_of("a")
    m["b"] = m["a"]
    m.copy_policy("a", "b", lr=0.5)
    assert m["b"] is not m["a"]
    assert m["a"].get_hyperparameter("lr") != 0.5


def test_a_copy_that_cannot_be_made_changes_nothing():
    m = map_of("a", "b")
    before = state_of(m["b"])
    with pytest.raises(ConfigError, match="'lrr' is not a hyperparameter"):
        m.copy_policy("a", "b", lrr=1)
    with pytest.raises(UnknownPolicyError):
        m.copy_policy("x", "b")
    with pytest.raises(UsageError, match="must differ"):
        m.copy_policy("a", "a")
    with pytest.raises(ValueError, match="olicy"):
        m.copy_policy("a", "c/d")
    same(before, state_of(m["b"]))
    assert set(m) == {"a", "b"}


def test_a_policy_that_asked_for_td_errors_can_be_copied():
    m = PolicyMap()
    m["a"] = used(DQNTF2Policy)
    batch = batch_for(m["a"], 4)
    arguments = [batch[x] for x in ("obs", "actions", "rewards", "new_obs", "terminateds")]
    expected = m["a"].compute_td_error(*arguments, np.ones(4))
    m.copy_policy("a", "b")
    np.testing.assert_array_equal(m["b"].compute_td_error(*arguments, np.ones(4)), expected)


@pytest.mark.core
def test_perturbing():
    m = map_of("a")
    m["a"].set_hyperparameter("lr", 0.5)
    result = m.perturb("a", "lr", "gamma", factors=(2.0,), rng=np.random.default_rng(0))
    assert result == {"lr": 1.0, "gamma": m["a"].get_hyperparameter("gamma")}
    assert m["a"].get_hyperparameter("lr") == 1.0
    for _ in range(4):
        before = m["a"].get_hyperparameter("lr")
        assert m.perturb("a", "lr")["lr"] / before in (pytest.approx(0.8), pytest.approx(1.2))
    before = state_of(m["a"])
    with pytest.raises(ConfigError, match="'lrr' is not a hyperparameter"):
        m.perturb("a", "lr", "lrr")
    same(before, state_of(m["a"]))


# -- frozen policies ------------------------------------------------------------------------------

CHANGES = {
    "set_weights": lambda p, b: p.set_weights(p.get_weights()),
    "set_state": lambda p, b: p.set_state(
        {**p.get_state(), "rng": make(seed=9).get_state()["rng"]}
    ),
    "learn_on_batch": lambda p, b: p.learn_on_batch(b),
    "learn_epochs": lambda p, b: p.learn_epochs(b, 2, 4),
    "learn_on_loaded_batch": lambda p, b: (p.load_batch_into_buffer(b), p.learn_on_loaded_batch()),
    "apply_gradients": lambda p, b: p.apply_gradients(p.compute_gradients(b)[0]),
    "set_hyper": lambda p, b: p.set_hyperparameter("lr", 0.5),
    "act_like": lambda p, b: p.driver.copy_from(make(seed=8, **FILTERED)),
    "apply_filter": lambda p, b: p.driver.apply_filters(),
}


def frozen_map(**arguments):
    m = PolicyMap(**arguments)
    m["a"] = used(PPOTF2Policy, **FILTERED)
    return m


@pytest.mark.core
@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_policy_refuses_every_change(change):
    m = frozen_map()
    batch = batch_for(m["a"], 8)
    m.freeze("a")
    before = state_of(m["a"])
    with pytest.raises(FrozenPolicyError, match=r"'a' is frozen.*copy_policy"):
        CHANGES[change](m["a"], batch)
    same(before, state_of(m["a"]))


@pytest.mark.core
def test_a_frozen_policy_acts_and_observes_nothing():
    m, alone = frozen_map(), used(PPOTF2Policy, **FILTERED)
    m["a"].driver.learning.observe([ROWS[None]], {"rewards": np.zeros((1, 5), np.float32)})
    assert not m["a"].driver.is_frozen
    assert m.freeze("a") is m["a"]
    assert m.freeze("a") is m["a"]  # again
    assert m["a"].driver.is_frozen
    assert m.in_memory() == ["a"]
    before = state_of(m["a"])
    m["a"].driver.learning.observe([100 * ROWS[None]], {"rewards": np.zeros((1, 5), np.float32)})
    m["a"].driver.learning.flush_filters()  # what waited when it was frozen goes on waiting
    with pytest.raises(FrozenPolicyError):
        m.perturb("a", "lr")
    same(before, state_of(m["a"]))
    assert m.statistics.frozen == 1
    assert m.statistics.bytes_in_memory == 0
    np.testing.assert_array_equal(
        m["a"].compute_actions(ROWS).actions, alone.compute_actions(ROWS).actions
    )
    assert not m["a"]._state.memory.flags.writeable
    m["a"].on_global_var_update({"timestep": 10})
    m.evict("a")
    assert m.in_memory() == []
    m["a"].compute_actions(ROWS)
    assert_equal(weights(m["a"]), weights(alone))
    twin = m.copy_policy("a", "b")
    fill(twin, 3)
    assert_equal(weights(m["a"]), weights(alone))


def test_a_callback_hears_nothing_of_a_refused_update():
    m = frozen_map()
    batch = batch_for(m["a"], 8)
    heard = []

    class Listening:
        def on_learn_on_batch(self, **arguments):
            heard.append(arguments)

    m["a"].callbacks = Listening()
    m.freeze("a")
    for change in ("learn_on_batch", "learn_epochs", "learn_on_loaded_batch"):
        with pytest.raises(FrozenPolicyError):
            CHANGES[change](m["a"], batch)
    assert heard == []


def test_a_frozen_policy_can_be_deleted_and_its_id_frozen_anew():
    m = map_of("a", "b")
    m.freeze("a")
    a = m["a"]
    del m["a"]
    assert number_of(a) == 1
    m["a"] = make()
    fill(m["a"], 5)
    m.freeze("a")
    assert number_of(m["a"]) == 5
    assert number_of(a) == 1
    m.copy_policy("b", "a")  # in place of the frozen one
    assert not m["a"].driver.is_frozen
    assert number_of(m["a"]) == 2


def test_a_frozen_policy_that_is_pinned_stays_in_memory():
    m = map_of("a", "b", capacity=1)
    m.pin("a")
    m.freeze("a")
    _ = m["b"]
    assert "a" in m.in_memory()


def test_frozen_policies_count_no_bytes_and_evict_nobody_else():
    size = make()._state.layout.num_bytes
    m = map_of("a", "b", "c", capacity_bytes=3 * size)
    m.freeze("a")
    m["d"] = make()
    m.evict("a")
    assert number_of(m["a"]) == 1
    assert set(m.in_memory()) == {"a", "b", "c", "d"}


def test_at_most_so_many_frozen_policies_are_mapped(monkeypatch):
    monkeypatch.setattr("tfpolicies.policy_map.state_cache._MAX_MAPPED", 2)
    m = map_of("a", "b", "c", "d", "e")
    for policy_id in "abc":
        m.freeze(policy_id)
        m.evict(policy_id)
    assert [number_of(m[x]) for x in "abc"] == [1, 2, 3]
    assert m.in_memory() == ["d", "e", "b", "c"]


# -- a stash that is kept -------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_stash_is_found_again_with_everything(kind, tmp_path):
    policy_class, config = KINDS[kind]
    alone = used(policy_class, **config)
    with PolicyMap(0, 1, capacity=1, path=tmp_path) as m:
        m["a"] = used(policy_class, **config)
        m["b"] = used(policy_class, seed=1, **config)
        m["b"].set_hyperparameter("lr", 0.125)
    assert len(m) == 0
    with PolicyMap(0, 1, capacity=1, path=tmp_path) as m:
        assert set(m) == {"a", "b"}
        assert m.in_memory() == []
        same(state_of(m["a"]), state_of(alone))
        for policy in (m["a"], alone):
            policy.learn_epochs(batch_for(policy, 8), 2, 4)
        same(state_of(m["a"]), state_of(alone))
        actual, expected = (x.compute_actions(ROWS) for x in (m["a"], alone))
        np.testing.assert_array_equal(actual.actions, expected.actions)
        assert m["b"].get_hyperparameter("lr") == 0.125
        assert type(m["b"]) is policy_class
        assert m["a"].policy_id == "a"


@pytest.mark.core
def test_what_is_not_flushed_is_not_found_and_what_is_deleted_neither(tmp_path):
    m = map_of("a", "b", path=tmp_path)
    m.flush()
    m["c"] = make()
    del m["b"]
    a = m["a"]
    m._store._folder_lock.release()  # as if the process had ended
    again = PolicyMap(path=tmp_path)
    assert list(again) == ["a"]
    assert number_of(again["a"]) == number_of(a) == 1


def test_a_policy_that_was_replaced_unopened_does_not_come_back(tmp_path):
    map_of("a", "b", path=tmp_path).close()
    for _ in range(2):
        with PolicyMap(path=tmp_path) as m:
            m["a"] = make()
            fill(m["a"], 6)
            m.copy_policy("a", "b")
        with PolicyMap(path=tmp_path) as m:
            assert number_of(m["a"]) == 6
            assert number_of(m["b"]) == 6
        assert len(list((tmp_path / "worker_0").glob("*.state"))) == 2


def test_unopened_policies_can_be_deleted_and_survive_a_flush(tmp_path):
    map_of("a", "b", "c", path=tmp_path).close()
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
    with map_of("a", "b", path=tmp_path) as m:
        generator = m["b"].get_state()["rng"]
    with PolicyMap(path=tmp_path) as m:
        m.copy_policy("a", "b")
        assert m["b"].get_state()["rng"] == generator
        assert number_of(m["b"]) == 1


def test_one_policy_under_two_ids_is_found_again_under_both(tmp_path):
    with map_of("a", path=tmp_path) as m:
        m["b"] = m["a"]
    with PolicyMap(path=tmp_path) as m:
        assert set(m) == {"a", "b"}
        assert m["a"] is m["b"]
    with PolicyMap(path=tmp_path) as m:
        del m["a"]
        assert number_of(m["b"]) == 1


def test_policies_that_are_held_go_on_after_close(tmp_path):
    m = map_of("a", "b", capacity=1, path=tmp_path)
    a, b = m.get_handle("a"), m.get_handle("b")
    m.close()
    m.close()  # again
    with PolicyMap(path=tmp_path, capacity=1) as later:
        fill(later["a"], 5)
        _ = later["b"]
        fill(a, 7)
        fill(b, 8)
        assert (number_of(a), number_of(b)) == (7, 8)
        assert (number_of(later["a"]), number_of(later["b"])) == (5, 2)
    other = PolicyMap()
    other["a"] = a
    assert number_of(other["a"]) == 7


@pytest.mark.core
def test_two_maps_of_one_path_exclude_each_other(tmp_path):
    m = map_of("a", path=tmp_path)
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
def test_what_a_killed_map_left_half_written_goes_with_the_next_one(tmp_path):
    map_of("a", path=tmp_path).close()
    own = tmp_path / "worker_0"
    half = [own / ".a~1.state.0123abcd.tfp-tmp", own / ".a~frozen.json.0123abcd.tfp-tmp"]
    for path in half:
        path.write_bytes(b"half")
    with PolicyMap(path=tmp_path) as m:
        assert "a" in m
        m.freeze("a")
        assert list(tmp_path.rglob("*.tfp-tmp")) == []


def test_a_path_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StashError, match=r"file.*path"):
        PolicyMap(path=tmp_path / "file")


def test_strange_ids_are_files_too(tmp_path):
    ids = ["*", "ä ß", "..a", "x" * 300, "x" * 299 + "y", "a~b", "%41", "A", "a"]
    with map_of(*ids, path=tmp_path, capacity=2) as m:
        m.freeze("*")
    with PolicyMap(path=tmp_path, capacity=2) as m:
        assert set(m) == set(ids)
        assert [number_of(m[x]) for x in ids] == [i + 1 for i in range(len(ids))]


def test_a_class_of_ones_own_is_given_to_the_map(tmp_path):
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
    one["a"] = used(PPOTF2Policy)
    one["main"] = make()
    one.freeze("a")
    assert "a" not in two
    assert two["a"].driver.is_frozen  # it looks for it when asked
    assert_equal(weights(two["a"]), weights(one["a"]))
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


def test_a_frozen_policy_whose_owner_deleted_it_goes_on(tmp_path):
    one, two = PolicyMap(0, 2, path=tmp_path), PolicyMap(1, 2, path=tmp_path, capacity=1)
    one["a"] = make()
    one.freeze("a")
    expected = weights(two["a"])
    del one["a"]
    two["other"] = make(seed=3)  # evicts it
    assert two.in_memory() == ["other"]
    assert_equal(weights(two["a"]), expected)
    one["a"] = make(seed=5)
    one.freeze("a")
    assert_equal(weights(two["a"]), expected)


def test_a_freeze_cut_short_is_finished_by_the_next(tmp_path, monkeypatch):
    m = map_of("a", path=tmp_path)
    monkeypatch.setattr(m._store, "write_record", lambda *x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        m.freeze("a")
    monkeypatch.undo()
    assert not m["a"].driver.is_frozen
    m.freeze("a")
    with PolicyMap(1, 2, path=tmp_path) as other:
        assert number_of(other["a"]) == 1


SECOND = """
    import sys
    from pathlib import Path
    import numpy as np
    from tfpolicies import PolicyMap
    from tfpolicies.errors import FrozenPolicyError, StashError
    try:
        PolicyMap(0, 2, path=sys.argv[1])
        raise SystemExit("the first process has it")
    except StashError:
        pass
    m = PolicyMap(1, 2, path=sys.argv[1], capacity=1)
    a = m["a"]
    try:
        a.set_weights(a.get_weights())
        raise SystemExit("it is frozen")
    except FrozenPolicyError:
        pass
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [x for x in lines if "a~frozen" in x.replace("%7E", "~")]
    assert len(mapped) == 1, mapped
    assert mapped[0].split()[1].startswith("r--"), mapped
    obs = np.load(sys.argv[2])
    print(a.compute_actions(obs, explore=False).extras["action_dist_inputs"].tobytes().hex())
"""


def test_a_second_process_shares_frozen_policies(tmp_path):
    m = PolicyMap(0, 2, path=tmp_path / "stash")
    m["a"] = used(PPOTF2Policy)
    m.freeze("a")
    np.save(tmp_path / "obs.npy", ROWS)
    arguments = [str(tmp_path / "stash"), str(tmp_path / "obs.npy")]
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SECOND), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    expected = m["a"].compute_actions(ROWS, explore=False).extras["action_dist_inputs"]
    assert ran.stdout.strip() == expected.tobytes().hex()


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ppo", "ppo through onnx", "graph"])
def test_questions_never_see_half_a_change_nor_hold_one_up(kind):
    """Values and likelihoods of a policy that learns, is set and evicted by other threads."""
    policy_class, config = KINDS[kind]
    m = PolicyMap(capacity=1)
    for policy_id in ("a", "b"):
        m[policy_id] = make(policy_class, **config)
        fill(m[policy_id], 0)
    a, batch, actions = m["a"], batch_for(make(policy_class, **config), 4), np.zeros(5, np.int64)
    half, failed, expected = np.log(0.5).astype(np.float32), [], []
    for number in (0, 1):
        alone = make(policy_class, **config)
        fill(alone, number)
        expected.append(alone.compute_values([ROWS]).tolist())

    def repeat(count, *questions):
        try:
            for i in range(count):
                for question in questions:
                    question(i)
        except BaseException as error:
            failed.append(error)

    def ask(i):
        for policy in (a, m.get_handle("b")):
            np.testing.assert_allclose(policy.compute_log_likelihoods(actions, ROWS), half)
            assert policy.compute_values([ROWS]).tolist() in expected

    def change(i):
        fill(a, i % 2)  # equal weights: all actions are as likely

    def learn(i):
        a.compute_gradients(batch)
        a.set_state(a.get_state())

    plans = [(100, ask), (100, ask), (100, change), (60, learn), (300, lambda i: m.evict("a"))]
    threads = [threading.Thread(target=repeat, args=plan, daemon=True) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []
    fill(a, 0.5)
    alone = make(policy_class, **config)
    fill(alone, 0.5)
    np.testing.assert_array_equal(a.compute_values([ROWS]), alone.compute_values([ROWS]))
