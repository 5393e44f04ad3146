"""Snapshots in a policy map: files that act as a policy did, mapped when they first act."""

import textwrap

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import OBS, PLANE, assert_equal, batch_for, make, rows_of
from helpers.policy_maps import fill, get_number, make_filled
from helpers.processes import run_python
from tfpolicies import PGTF2Policy, Policy, PolicyMap, PPOTF1Policy, PPOTF2Policy, SACTF2Policy
from tfpolicies.errors import CheckpointError, FrozenPolicyError, StashError, UsageError
from tfpolicies.testing import random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

ROWS = rows_of(OBS, 5)
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def act(policy):
    """Returns greedy actions and the inputs of their distribution."""
    memory = [np.stack([x] * len(ROWS)) for x in policy.get_initial_state()]
    result = policy.compute_actions(ROWS, memory, explore=False)
    return result.actions, result.extras["action_dist_inputs"]


def make_learned(policy_class=PPOTF2Policy, actions=None, **config):
    policy = make(policy_class, **({} if actions is None else {"actions": actions}), **config)
    policy.learn_on_batch(random_batch(policy.copy(), 8))
    return policy


def make_map_with_snapshot(folder, number=1.0, **config):
    """Returns a map of a learner whose weights are a number, and of its snapshot."""
    m = PolicyMap()
    m["main"] = make_filled(number, **config)
    file = m.write_snapshot("main", folder)
    m.add_snapshot("main_1", file, m["main"])
    return m, file


@pytest.mark.core
@pytest.mark.parametrize(
    ("policy_class", "actions", "config"),
    [
        (PPOTF2Policy, None, {}),
        (PPOTF1Policy, None, {}),
        (PPOTF2Policy, None, {"inference": "onnx"}),
        (PPOTF2Policy, None, {"observation_filter": "MeanStdFilter"}),
        (PPOTF2Policy, None, {"model": {"use_lstm": True, "lstm_cell_size": 4}}),
        (SACTF2Policy, BOX, {}),
    ],
)
def test_a_snapshot_acts_as_its_policy_did_when_the_file_was_written(
    policy_class, actions, config, tmp_path
):
    m = PolicyMap()
    m["main"] = make_learned(policy_class, actions, **config)
    expected, state = act(m["main"]), m["main"].get_state()
    file = m.write_snapshot("main", tmp_path)
    m["main"].learn_on_batch(random_batch(m["main"].copy(), 8))
    snapshot = m.add_snapshot("main_1", file, m["main"])
    assert not snapshot.driver.state.is_in_memory
    for values, reference in zip(act(snapshot), expected, strict=True):
        np.testing.assert_array_equal(values, reference)
    m.evict("main_1")
    np.testing.assert_array_equal(act(m["main_1"])[1], expected[1])
    later = snapshot.get_state()
    for key in ("hyperparameters", "num_grad_updates", "_exploration_state"):
        assert later[key] == state[key]
    assert not snapshot.driver.state.memory.flags.writeable
    with pytest.raises(FrozenPolicyError):
        snapshot.learn_on_batch(random_batch(m["main"].copy(), 8))


def test_the_file_is_named_by_its_content_and_holds_what_acting_reads(tmp_path):
    m = PolicyMap()
    m["main"] = make_learned(SACTF2Policy, BOX)
    first = m.write_snapshot("main", tmp_path)
    assert m.write_snapshot("main", tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]
    assert first.path.name == f"snapshot-{first.sha256[:16]}.state"
    acting = m["main"].driver.state.layout.acting.num_bytes
    assert acting < first.size < acting + 10_000
    assert m["main"].driver.state.layout.num_bytes > 3 * acting
    m["main"].learn_on_batch(random_batch(m["main"].copy(), 8))
    assert m.write_snapshot("main", tmp_path) != first


def test_settings_are_those_of_the_file_and_not_of_the_prototype(tmp_path):
    m = PolicyMap()
    m["main"] = make(observation_filter="MeanStdFilter", lr=0.1)
    batch = {"rewards": np.zeros((1, 5), np.float32)}
    m["main"].driver.learning.observe([ROWS[None]], batch)
    m["main"].driver.learning.flush_filters()
    file, expected = m.write_snapshot("main", tmp_path), m["main"].get_state()
    old = make(observation_filter="MeanStdFilter", lr=0.2)
    snapshot = m.add_snapshot("main_1", file, old)
    assert snapshot.get_state()["hyperparameters"]["lr"] == np.float32(0.1)
    assert_equal(snapshot.get_state()["filter"], expected["filter"])
    assert act(snapshot)[0].tolist() == act(m["main"])[0].tolist()
    assert old.get_hyperparameter("lr") == np.float32(0.2)


def test_a_prototype_that_has_diverged_does_not_matter(tmp_path):
    m = PolicyMap()
    m["main"] = make_learned()
    expected, file = act(m["main"]), m.write_snapshot("main", tmp_path)
    with m["main"].driver.allow_non_finite():
        fill(m["main"], np.nan)
    snapshot = m.add_snapshot("main_1", file, m["main"])
    for values, reference in zip(act(snapshot), expected, strict=True):
        np.testing.assert_array_equal(values, reference)


def test_noise_depends_on_the_id_and_the_worker_but_not_on_the_file(tmp_path):
    m, file = make_map_with_snapshot(tmp_path)
    m.add_snapshot("main_2", file, m["main"])
    again, _ = make_map_with_snapshot(tmp_path)
    rows = rows_of(OBS, 100)
    first, other, repeated = (
        policy.compute_actions(rows).actions.tolist()
        for policy in (m["main_1"], m["main_2"], again["main_1"])
    )
    assert first == repeated != other


SECOND = """
    import sys
    from pathlib import Path
    import numpy as np
    from helpers.factories import OBS, make
    from tfpolicies import PolicyMap
    from tfpolicies.storage.content_file import ContentFile
    path, digest, size, obs = sys.argv[1:]
    m = PolicyMap()
    m.add_snapshot("x", ContentFile(Path(path), digest, int(size)), make(seed=7))
    result = m["x"].compute_actions(np.load(obs), explore=False)
    [mapped] = [x for x in Path("/proc/self/maps").read_text().splitlines() if "snapshot-" in x]
    assert mapped.split()[1].startswith("r--"), mapped
    print(result.extras["action_dist_inputs"].tobytes().hex())
"""


def test_another_process_maps_the_file(tmp_path):
    m = PolicyMap()
    m["main"] = make_learned()
    file = m.write_snapshot("main", tmp_path / "snapshots")
    np.save(tmp_path / "obs.npy", ROWS)
    words = (file.path, file.sha256, file.size, tmp_path / "obs.npy")
    printed = run_python(textwrap.dedent(SECOND), *words).stdout
    assert printed.strip() == act(m["main"])[1].tobytes().hex()


def test_the_map_treats_a_snapshot_as_any_policy(tmp_path):
    m, file = make_map_with_snapshot(tmp_path, 2.0)
    assert sorted(m) == ["main", "main_1"]
    assert m.get_snapshot_file("main_1") == file
    assert m.get_snapshot_file("main") is None
    fill(m["main"], 3.0)
    copied = m.copy_policy("main_1", "learner")
    assert get_number(copied) == 2.0
    assert not copied.driver.is_frozen
    copied.learn_on_batch(batch_for(copied, 8))
    snapshot = m["main_1"]
    del m["main_1"]
    assert "main_1" not in m
    assert file.exists
    assert get_number(snapshot) == 2.0  # a handle stays usable
    m.add_snapshot("main_1", file, m["main"])
    m["main_1"] = make_filled(5.0)
    assert get_number(m["main_1"]) == 5.0
    assert m.get_snapshot_file("main_1") is None


def test_a_persistent_stash_leaves_snapshots_to_their_files(tmp_path):
    with PolicyMap(path=tmp_path / "stash") as m:
        m["main"] = make()
        m.add_snapshot("main_1", m.write_snapshot("main", tmp_path / "files"), m["main"])
        m.flush()
    with PolicyMap(path=tmp_path / "stash") as again:
        assert list(again) == ["main"]


def test_only_a_policy_with_the_same_model_is_a_prototype(tmp_path):
    m, file = make_map_with_snapshot(tmp_path)
    others = [make(obs=PLANE), make(PGTF2Policy), make(model={"fcnet_hiddens": [5]}), Policy]
    others[-1] = type("Custom", (Policy,), {"compute_actions": lambda *_: None})(OBS, BOX, {})
    for other in others:
        with pytest.raises(UsageError, match="cannot be the prototype of the snapshot 'x'"):
            m.add_snapshot("x", file, other)
    with pytest.raises(UsageError, match=r"There is a policy 'main_1' already\."):
        m.add_snapshot("main_1", file, m["main"])
    assert sorted(m) == ["main", "main_1"]
    m["custom"] = others[-1]
    with pytest.raises(UsageError, match="There can be no snapshot of"):
        m.write_snapshot("custom", tmp_path)


def test_a_damaged_file_is_refused_and_names_the_snapshot(tmp_path):
    m, file = make_map_with_snapshot(tmp_path)
    content = bytearray(file.path.read_bytes())
    content[-1] ^= 1
    file.path.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        m.add_snapshot("x", file, m["main"])
    with pytest.raises(StashError, match=r"The snapshot 'main_1' cannot be loaded.*SHA-256"):
        act(m.get_handle("main_1"))
    file.path.unlink()
    with pytest.raises(StashError, match="The snapshot 'main_1' cannot be loaded"):
        act(m.get_handle("main_1"))
    act(m["main"])
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(StashError, match="The snapshot of 'main' cannot be written"):
        m.write_snapshot("main", blocker / "folder")
