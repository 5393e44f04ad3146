"""Names in files of earlier versions are those of today after loading."""

import json
from pathlib import Path

import pytest

from tfpolicies.cli.train_options import TrainSettings
from tfpolicies.config.settings_allowlist import decode_settings
from tfpolicies.storage.import_paths import UnresolvedObject, check_class_name, resolve_import_path
from tfpolicies.storage.json_values import encode_value
from tfpolicies.storage.migrations import OBJECTS, SETTINGS, VALUES, migrate_settings
from tools.subpackages import PACKAGE

ROLES = ("policy_class", "exploration", "custom_action_dist")


@pytest.mark.parametrize("old_path", OBJECTS)
def test_an_object_is_found_under_its_old_path_where_it_is_allowed(old_path):
    objects = [resolve_import_path(old_path, role) for role in ROLES]
    paths = [f"{x.__module__}:{x.__qualname__}" for x in objects if isinstance(x, type)]
    assert set(paths) <= {OBJECTS[old_path]}
    unresolved = UnresolvedObject(OBJECTS[old_path], importable=True)
    assert resolve_import_path(old_path, "callbacks") == unresolved


def test_a_class_name_of_a_file_becomes_the_present_path():
    old_name = "tfpolicies.compat.policies.RandomPolicy"
    name = "tfpolicies.compat.random_policy:RandomPolicy"
    assert check_class_name(old_name, "policy_class") == name
    assert check_class_name(old_name, "exploration") == UnresolvedObject(old_name, importable=True)


def test_old_paths_name_modules_or_objects_that_are_gone():
    for old_path in OBJECTS:
        module, _, name = old_path.partition(":")
        path = PACKAGE.parent / (module.replace(".", "/") + ".py")
        assert not path.exists() or f"class {name}(" not in path.read_text()


def test_settings_get_their_present_names_and_values_at_any_depth():
    specs = {"a": {"config": {"on_nan": "stop", "lr": 0.5}}, "b": {"on_nan": "warn"}}
    record = encode_value({"new_episodes_at_checkpoint": True, "policies": specs})
    assert decode_settings(record) == {
        "reset_episodes_at_checkpoint": True,
        "policies": {"a": {"config": {"on_nan": "raise", "lr": 0.5}}, "b": {"on_nan": "warn"}},
    }


def test_a_record_that_is_too_deep_to_decode_is_left_as_it_is():
    record = {"on_nan": "stop"}
    for _ in range(300):
        record = [record]
    migrated = migrate_settings(record)
    for _ in range(300):
        (migrated,) = migrated
    assert migrated == {"on_nan": "stop"}


def test_a_run_that_began_with_old_settings_continues_with_the_present_ones():
    stored = Path(__file__).parents[1] / "stored" / "18d25f4" / "command" / "run.json"
    train = json.loads(stored.read_text())["settings"]["train"]
    words = [*train["set"], "new_episodes_at_checkpoint=True", "on_nan=stop", "lr=stop"]
    settings = TrainSettings.from_json({**train, "set": words, "from_file": {"on_nan": "stop"}}, "")
    assert settings.set[-3:] == ("reset_episodes_at_checkpoint=True", "on_nan=raise", "lr=stop")
    assert settings.from_file == {"on_nan": "raise"}


def test_no_present_setting_has_an_old_name():
    from tfpolicies import PPOConfig

    config = PPOConfig()
    assert not [name for name in SETTINGS if name in config]
    assert all(name in config for name in SETTINGS.values())
    for (name, old_value), value in VALUES.items():
        assert config[name] == value != old_value
