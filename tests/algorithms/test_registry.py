"""Names of algorithms: those of the package, and those that other packages register."""

from importlib import import_module
from pathlib import Path

import pytest

import tfpolicies
from tfpolicies import PG, PPO
from tfpolicies.algorithms.algorithm_registry import (
    find_algorithm,
    get_algorithm_names,
    get_exported_names,
    register_algorithm,
)
from tfpolicies.cli import main
from tfpolicies.errors import ConfigError

ENTROPY = """
from tfpolicies import PG, PGConfig, PGTF1Policy, PGTF2Policy
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.models.losses import masked_mean

class ENTTF2Policy(PGTF2Policy):
    config_class = lazy_class("ENTConfig")

    def loss(self, model, dist_class, train_batch):
        dist_inputs, _ = model(train_batch)
        entropy = masked_mean(dist_class(dist_inputs, model).entropy(), train_batch["loss_mask"])
        self.record(entropy=entropy)
        return super().loss(model, dist_class, train_batch) - 0.01 * entropy

class ENTTF1Policy(ENTTF2Policy):
    runtime = "session"

class ENT(PG):
    config_class = lazy_class("ENTConfig")
    policy_classes = {"tf2": ENTTF2Policy, "tf": ENTTF1Policy}

class ENTConfig(PGConfig):
    def __init__(self, algo_class=None):
        super().__init__(algo_class or ENT)
"""


@pytest.mark.parametrize("module", sorted(set(get_exported_names().values())))
def test_type_checkers_see_the_names_that_are_registered(module):
    registered = {name for name, home in get_exported_names().items() if home == module}
    assert set(import_module(module).__all__) == registered
    assert f"    from {module} import *\n" in Path(tfpolicies.__file__).read_text()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that installs a package with one entry point, and modules."""

    def install(name, value, **modules):
        info = tmp_path / "ported_things-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ported-things\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[tfpolicies.algorithms]\n{name} = {value}")
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return install


@pytest.mark.core
def test_algorithms_of_the_package_are_found_by_name():
    assert get_algorithm_names()[:5] == ["PPO", "PG", "A2C", "DQN", "SAC"]
    assert find_algorithm("PPO") is PPO
    assert find_algorithm("PG") is PG is tfpolicies.PG
    with pytest.raises(ConfigError, match=r"no algorithm 'DQM'; .*Did you mean 'DQN'"):
        find_algorithm("DQM")


def test_a_name_is_given_to_one_algorithm():
    register_algorithm("PPO", "tfpolicies.algorithms.ppo")
    with pytest.raises(ConfigError, match=r"'PPO' is that of tfpolicies\.algorithms\.ppo, not of"):
        register_algorithm("PPO", "mine.ppo")


def test_an_algorithm_of_another_package_trains_and_resumes_by_its_name(install, capfd):
    install("ENT", "entropic_algorithm", entropic_algorithm=ENTROPY)
    assert get_algorithm_names()[-1] == "ENT"
    words = ["--set", "jit_compile=False", "--set", "inference=tf", "--num-envs", "2"]
    assert main(["train", "CartPole-v1", "--algo", "ENT", "--steps", "400", *words]) == 0
    assert main(["train", "--resume", "--steps", "800"]) == 0
    assert main(["evaluate", "runs", "--episodes", "1"]) == 0
    assert "ENT on CartPole-v1" in capfd.readouterr().out
    assert not hasattr(tfpolicies, "ENT")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("absent_module", r"cannot be imported from 'absent_module': ModuleNotFoundError"),
        ("broken_module", r"cannot be imported from 'broken_module': ZeroDivisionError"),
        ("empty_module", r"cannot be imported from 'empty_module': AttributeError"),
        ("empty_module:number", r"is not an Algorithm: 3"),
    ],
)
def test_a_package_whose_algorithm_cannot_be_imported_is_named(value, text, install):
    install("ODD", value, broken_module="1 / 0", empty_module="number = 3")
    with pytest.raises(ConfigError, match=rf"'ODD' of the package ported-things 1\.2 {text}"):
        find_algorithm("ODD")
    assert find_algorithm("PPO") is PPO
