"""Environments by group: each listed name can be chosen."""

import importlib.util

import gymnasium as gym
import pytest

from tfpolicies.envs.env_factory import EnvContext, check_env_name, make_environments
from tfpolicies.envs.env_listing import list_environments
from tfpolicies.envs.env_registry import ENVIRONMENTS, register_environment


@pytest.fixture(scope="module")
def groups():
    return {group.title: group for group in list_environments()}


@pytest.mark.core
def test_installed_groups_have_names_and_others_a_command(groups):
    assert "CartPole-v1" in groups["Gymnasium, classic control"].names
    for group in groups.values():
        assert bool(group.names) != bool(group.install)
    has_ale = importlib.util.find_spec("ale_py") is not None
    assert groups["ALE"].install == ("" if has_ale else "pip install ale-py")


def test_the_first_name_of_each_group_is_accepted(groups):
    for group in groups.values():
        for name in group.names[:1]:
            if not name.startswith("pettingzoo:atari"):  # needs another package
                check_env_name(name)


@pytest.mark.filterwarnings("ignore:builtin type .*Swig:DeprecationWarning")  # of Box2D
@pytest.mark.parametrize("title", ["Gymnasium, Box2D", "Gymnasium, MuJoCo", "Gymnasium, toy text"])
def test_listed_environments_of_gymnasium_can_be_made(groups, title):
    if groups[title].install:
        pytest.skip(groups[title].install)
    for name in [x for x in groups[title].names if not x.endswith("-v4")][::5]:
        make_environments(name, 1, EnvContext({})).close()


def test_names_that_only_raise_an_error_are_left_out(groups):
    names = {name for group in groups.values() for name in group.names}
    assert "Hopper-v2" in gym.registry
    assert "Hopper-v2" not in names


def test_a_part_of_a_name_selects_environments_of_any_group():
    register_environment("my-cheetah", lambda context: gym.make("CartPole-v1"))
    try:
        names = {group.title: group.names for group in list_environments("Cheetah")}
    finally:
        del ENVIRONMENTS["my-cheetah"]
    assert names["registered in this process"] == ("my-cheetah",)
    assert set(names["Gymnasium, MuJoCo"]) == {"HalfCheetah-v4", "HalfCheetah-v5"}
    assert "ALE" not in names
