"""Algorithms, losses and strategies that users write, by the page that shows how."""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import tfpolicies
from helpers.factories import OBS, PLANE, TWO, batch_for, make, rows_of
from tfpolicies import (
    DQN,
    PPO,
    DQNConfig,
    PGTF2Policy,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
    TD3TF2Policy,
    extending,
)
from tfpolicies.base.extensions import EXTENSIONS
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import CheckpointError, ConfigError, UsageError
from tfpolicies.extending import (
    NON_NEGATIVE,
    POSITIVE_INT,
    Exploration,
    Greedy,
    Transform,
    lazy_class,
    masked_mean,
    setting,
)
from tfpolicies.testing import check_policy, random_batch
from tools.site.code_blocks import read_code_blocks

FOLDER = Path(__file__).parent.parent / "docs" / "howto" / "extending"
PAGES = [
    FOLDER / f"{name}.md"
    for name in (
        *("algorithm", "loss", "targets", "networks", "distribution", "exploration"),
        *("connector", "metric", "policy", "attributes"),
    )
]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Runs the pages in order as one module; returns its names."""
    home, before = tmp_path_factory.mktemp("page"), Path.cwd()
    blocks = [block.code for page in PAGES for block in read_code_blocks(page)]
    (home / "page.py").write_text("\n".join(blocks))
    spec = importlib.util.spec_from_file_location("page", home / "page.py")
    page = sys.modules["page"] = importlib.util.module_from_spec(spec)
    os.chdir(home)
    try:
        spec.loader.exec_module(page)
        yield vars(page) | {"home": home}
    finally:
        os.chdir(before)
        del sys.modules["page"]
        EXTENSIONS.pop("page:Shorthands", None)


@pytest.mark.soak
def test_the_python_of_the_page_runs_in_order(names):
    played = names["algorithm"].evaluate()["evaluation"]
    assert played["episode_reward_mean"] > 400.0
    assert names["again"].counters == names["algorithm"].counters
    assert (names["home"] / "exported/dagger/model.onnx").exists()
    assert names["policy"].num_weights == sum(map(np.size, names["policy"].get_weights().values()))
    assert tfpolicies.SampleBatch(eps_id=[7, 7, 9]).num_episodes == 2
    assert 0.5 <= names["learned"]["certainty"] <= 1.0
    stats = names["munchausen"].train()["info"]["learner"]["default_policy"]["learner_stats"]
    assert np.isfinite(stats["mean_q"])
    strategy = names["bursting"].build().get_policy().exploration
    assert [strategy.get_params(step, True).item() for step in (0, 199, 200, 1000)] == [1, 1, 0, 1]
    assert names["hidden"].get_policy().observation_space.shape == (2,)
    assert 0.0 < names["result"]["custom_metrics"]["last_angle_mean"] < 0.5


@pytest.mark.soak
def test_the_distribution_of_the_page_is_that_of_laplace(names):
    laplace = names["Laplace"]
    one = laplace(tf.zeros([1, 2]), spaces.Box(-1, 1, (1,)))
    wide = laplace(tf.constant([[3.0, np.log(2.0)]]), one.space)
    assert one.logp(tf.constant([[-1.0]])).numpy() == pytest.approx(-1.0 - np.log(2.0))
    assert wide.logp(tf.constant([[7.0]])).numpy() == pytest.approx(-2.0 - np.log(4.0))
    assert wide.entropy().numpy() == pytest.approx(1.0 + np.log(4.0))
    assert one.kl(one).numpy() == pytest.approx(0.0)
    assert one.kl(wide).numpy() == pytest.approx(np.log(2.0) + (np.exp(-3.0) + 3.0) / 2.0 - 1.0)
    assert wide.deterministic_sample().numpy().item() == 3.0
    noise = np.random.default_rng(0).gumbel(size=(100_000, 2)).astype(np.float32)
    drawn = laplace(tf.repeat(wide.inputs, 100_000, axis=0), one.space).sample(noise).numpy()
    assert np.mean(drawn) == pytest.approx(3.0, abs=0.03)
    assert np.mean(np.abs(drawn - 3.0)) == pytest.approx(2.0, rel=0.01)
    assert names["heavy"]["info"]["learner"]["default_policy"]["learner_stats"]["entropy"] > 0.0


@pytest.mark.soak
def test_the_policy_with_several_networks_of_the_page_learns(names):
    policy = names["awac"].get_policy()
    assert policy.num_grad_updates == 1001
    assert [*policy.program.layout.networks_with_targets] == ["critic"]
    assert {"learning", "learner", "exports"} <= {*check_policy(policy).passes}


@pytest.mark.soak
def test_the_custom_policy_of_the_page_plays_against_one_that_learns(names):
    poles = make_multi_agent("CartPole-v1")
    config = PPOConfig().environment(poles, env_config={"num_agents": 2})
    config.multi_agent(
        policies={"rule": PolicySpec(names["LeanPolicy"]), "main": PolicySpec()},
        policy_mapping_fn=lambda agent_id, *args, **kwargs: ["rule", "main"][agent_id],
        policies_to_train=["main"],
    )
    algorithm = config.training(train_batch_size=1000, sgd_minibatch_size=100).build()
    result = algorithm.train()
    assert result["policy_reward_mean"]["rule"] > 2 * result["policy_reward_mean"]["main"]
    assert list(result["info"]["learner"]) == ["main"]


def test_the_page_imports_from_the_doors_alone():
    text = "".join(page.read_text() for page in [*PAGES, FOLDER / "index.md"])
    imports = re.findall(r"^from (tfpolicies[\w.]*) import", text, re.MULTILINE)
    doors = {"", ".connectors", ".errors", ".extending", ".testing"}
    assert set(imports) == {f"tfpolicies{door}" for door in doors}


NAMES = """
ActorCriticConfig ActorCriticTFPolicy ActorCriticTrainingSettings AdditiveNoise BOOL Distribution
Exploration ExplorationContext Extension FRACTION Fragments Greedy NON_NEGATIVE NetworkPlan
OffPolicyAlgorithm OffPolicyConfig OffPolicyTFPolicy OffPolicyTrainingSettings POSITIVE
POSITIVE_INT SCHEDULE Sample ScheduledExploration TrainingSettings Transform Validator
discounted_returns explained_variance function generalized_advantages huber int_at_least
lazy_class masked_mean n_step_returns one_of register_box_distribution register_extension
register_tuned setting
"""
"""What stays where it is for those who extend the package."""


def test_the_names_for_extending_stay_and_the_page_has_each():
    assert sorted(extending.__all__) == sorted(NAMES.split())
    assert not set(extending.__all__) & set(tfpolicies.__all__)
    page = "".join(path.read_text() for path in [*PAGES, FOLDER / "index.md"])
    assert [name for name in extending.__all__ if not re.search(rf"\b{name}\b", page)] == []


@dataclass(frozen=True, kw_only=True)
class OwnTraining(PPOConfig.training_section):
    num_epochs: int = setting(5, POSITIVE_INT)
    num_workers: int = setting(1, POSITIVE_INT)
    fine: float = setting(0.1, NON_NEGATIVE)


class OwnConfig(PPOConfig):
    training_section = OwnTraining


def test_a_setting_of_ones_own_may_have_the_name_that_another_one_has_elsewhere():
    config = OwnConfig().training(num_epochs=7)
    assert config.num_epochs == config["num_epochs"] == 7
    assert config.num_sgd_iter == 30
    assert config.to_dict()["num_epochs"] == 7
    config.num_epochs = 8
    config["num_epochs"] += 1
    assert config.copy().num_epochs == 9
    assert "num_epochs" in config
    assert OwnConfig().update_from_dict({"num_epochs": 3}).num_epochs == 3
    with pytest.raises(ConfigError, match="num_epochs must be an integer >= 1, got 0"):
        config.training(num_epochs=0)
    assert PPOConfig().training(num_epochs=7).num_sgd_iter == 7
    both = OwnConfig().training(num_workers=4).rollouts(num_rollout_workers=2)
    again = OwnConfig.from_dict(both.to_dict())
    assert (again.num_workers, again.num_rollout_workers) == (4, 2)


def test_settings_that_a_policy_lists_and_its_config_lacks_are_named():
    class Without(PPOTF2Policy):
        hyperparameters = (*PPOTF2Policy.hyperparameters, "fine")

    class Static(PPOTF2Policy):
        static_keys = (*PPOTF2Policy.static_keys, "shape")

    message = r"Without.hyperparameters lists 'fine', .* Without.config_class, PPOConfig. Set `conf"
    with pytest.raises(ConfigError, match=message):
        Without(OBS, TWO, {})
    with pytest.raises(ConfigError, match=r"Static.static_keys lists 'shape'"):
        Static(OBS, TWO, {})


def test_a_config_with_more_settings_than_its_algorithm_knows_is_refused():
    config = OwnConfig()
    message = r"OwnConfig has the setting 'fine', but the config of PPO is PPOConfig, which has no "
    with pytest.raises(ConfigError, match=message):
        config.environment("CartPole-v1").build()


class OwnDefaults(PPO):
    """An algorithm that gives the same config whenever it is asked for its defaults."""

    defaults = OwnConfig().training(fine=0.25)

    @classmethod
    def get_default_config(cls):
        return cls.defaults


def test_an_algorithm_that_overrides_its_default_config_comes_back_from_a_checkpoint(tmp_path):
    config = OwnConfig(OwnDefaults).environment("CartPole-v1").training(fine=0.5, lr=0.125)
    config.training(model={"fcnet_hiddens": [4]}, train_batch_size=64, sgd_minibatch_size=32)
    algorithm = config.framework(jit_compile=False).build()
    algorithm.save(str(tmp_path))
    again = OwnDefaults.from_checkpoint(str(tmp_path))
    assert (again.config.fine, again.config.lr) == (0.5, 0.125)
    assert (OwnDefaults.defaults.fine, OwnDefaults.defaults.lr) == (0.25, PPOConfig().lr)
    assert OwnDefaults.defaults.env is None


def change_loss(base, change):
    """Returns a policy class whose loss is changed, given its model and batch."""

    class Wrong(base):
        def loss(self, model, dist_class, train_batch):
            loss = super().loss(model, dist_class, train_batch)
            return change(loss, model, train_batch)

    return Wrong


SCALAR = r"Wrong\.loss must return a scalar tensor.*"
CUT = r"A loss depends on none of the variables .*kernel' and \d+ more\), so they .* NumPy"
NONE = "A loss depends on none of the"
LOSSES = {
    "None": (PGTF2Policy, lambda loss, model, batch: None, SCALAR + "got None"),
    "a number for each row": (
        PGTF2Policy,
        lambda loss, model, batch: loss + batch["rewards"],
        SCALAR + r"of shape \(.+,\)",
    ),
    "a number": (PGTF2Policy, lambda loss, model, batch: 0.5, SCALAR + "got 0.5"),
    "a dict": (PGTF2Policy, lambda loss, model, batch: {"loss": loss}, SCALAR + "got {'loss'"),
    "an integer": (
        PGTF2Policy,
        lambda loss, model, batch: tf.cast(loss, tf.int32),
        SCALAR + r"of shape \(\)",
    ),
    "one tensor of several losses": (
        TD3TF2Policy,
        lambda losses, model, batch: tf.stack(losses) + 1.0,
        r"a list of them if it has several .* got a tensor",
    ),
    "cut by TensorFlow": (
        PGTF2Policy,
        lambda loss, model, batch: tf.stop_gradient(tf.reduce_mean(model(batch)[0])),
        CUT,
    ),
    "cut by NumPy": (
        PGTF2Policy,
        lambda loss, model, batch: tf.constant(np.mean(np.asarray(model(batch)[0])), tf.float32),
        CUT,
    ),
    "swapped": (TD3TF2Policy, lambda losses, model, batch: [*losses[::-1]], NONE),
    "one of two cut": (
        TD3TF2Policy,
        lambda losses, model, batch: [tf.stop_gradient(losses[0]), losses[1]],
        NONE,
    ),
}


@pytest.mark.parametrize(("base", "change", "message"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_no_scalar_of_its_networks_weights_is_refused(base, change, message):
    policy = make(change_loss(base, change), actions=PLANE if base is TD3TF2Policy else TWO)
    with pytest.raises(ConfigError, match=message):
        policy.learn_on_batch(random_batch(policy, 4))


def test_a_masked_mean_takes_rows_alone():
    assert masked_mean(tf.constant([1.0, 2.0, 6.0]), tf.constant([1.0, 1.0, 0.0])) == 1.5
    with pytest.raises(UsageError, match=r"one number for each row, \[B\], .* of shape \(3, 1\)"):
        masked_mean(tf.constant([[1.0], [2.0], [6.0]]), tf.constant([1.0, 1.0, 0.0]))


def test_postprocessing_that_forgets_its_batch_is_told_to_return_it():
    class Forgets(PGTF2Policy):
        def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
            batch["more"] = batch["rewards"]

    with pytest.raises(
        UsageError, match=r"Forgets\.postprocess_trajectory must return a SampleBatch, got NoneType"
    ):
        make(Forgets).learn_on_batch(batch_for(make(PGTF2Policy), 4))


class FinedPolicy(PPOTF2Policy):
    config_class = lazy_class("OwnConfig")
    hyperparameters = (*PPOTF2Policy.hyperparameters, "fine")


def test_a_policy_with_settings_of_its_own_has_them():
    assert FinedPolicy(OBS, TWO, {"fine": 0.5, "inference": "tf"}).get_hyperparameter("fine") == 0.5


class OtherDQN(DQN):
    """DQN under another name, with DQN's config."""


def test_an_algorithm_that_shares_the_config_of_its_base_is_what_its_default_config_builds():
    config = OtherDQN.get_default_config()
    assert config.algo_class is OtherDQN
    assert isinstance(config.environment("CartPole-v1").build(), OtherDQN)
    assert DQN.get_default_config() == DQNConfig()


WAITING = """
import cloudpickle, sys
from tfpolicies import PG, PGConfig, PGTF2Policy
from tfpolicies.extending import lazy_class

class Mine(PG):
    config_class = lazy_class("MineConfig")

class MineConfig(PGConfig):
    pass

sys.stdout.buffer.write(cloudpickle.dumps(Mine))
"""


@pytest.mark.ray
def test_classes_of_a_script_that_wait_for_others_travel_to_other_processes():
    """As Ray sends them: by value, since no other process has the script as `__main__`."""
    command = [sys.executable, "-c", WAITING]
    sent = subprocess.run(command, capture_output=True, check=True).stdout
    travelled = pickle.loads(sent)
    assert travelled.__module__ == "__main__"
    assert travelled.config_class.__name__ == "MineConfig"
    assert travelled.get_default_config().algo_class is travelled


def test_a_class_that_is_waited_for_and_never_comes_is_named():
    class Waiting(PPOTF2Policy):
        config_class = lazy_class("NoSuchConfig")

    with pytest.raises(UsageError, match=r"refers to a class 'NoSuchConfig', but .*_extend"):
        Waiting(OBS, TWO, {})


class Nudged(Exploration):
    """Acts greedily until a step, and at random from there."""

    def __init__(self, where, *, until=0):
        super().__init__(Transform(Greedy(), where.leaves, mixed=True))
        self.until = until

    def get_params(self, timestep, explore):
        return np.array([explore and timestep >= self.until], np.float32)


def test_a_strategy_that_is_given_again_keeps_its_arguments(tmp_path):
    policy = make(PGTF2Policy, exploration_config={"type": Nudged, "until": 7})
    policy.export_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"\['exploration_config'\]\['type'\] .*Nudged"):
        PGTF2Policy.from_checkpoint(tmp_path)

    def again(**values):
        config = {"exploration_config": values}
        return PGTF2Policy.from_checkpoint(tmp_path, config=config).exploration.until

    assert again(type=Nudged) == 7
    assert again(type=f"{Nudged.__module__}.Nudged") == 7
    assert again(type=Nudged, until=9) == 9


@pytest.mark.parametrize(
    ("method", "values", "message"),
    [
        ("get_params", 1.0, r"return a NumPy array float32 \[1\], got 1\.0"),
        ("get_params", np.ones(1), r".* float32 \[1\], got float64 \[1\]"),
        ("get_params", np.ones(2, np.float32), r".* \[1\], got float32 \[2\]"),
        ("draw_noise", np.ones((4, 1), np.float32), r".* float32 \[4, 2\], got float32 \[4, 1\]"),
    ],
    ids=["a number", "float64", "too many", "a narrow one"],
)
def test_a_strategy_that_gives_something_else_is_named(method, values, message):
    kind = type("Wrong", (Nudged,), {method: lambda self, *args, **kwargs: values})
    policy = make(PGTF2Policy, exploration_config={"type": kind})
    with pytest.raises(UsageError, match=rf"Wrong\.{method} must {message}"):
        policy.compute_actions(rows_of(OBS, 4))


def test_another_strategy_has_its_own_arguments(tmp_path):
    make(PGTF2Policy, exploration_config={"type": Nudged, "until": 7}).export_checkpoint(tmp_path)
    config = {"exploration_config": {"type": "Random"}}
    result = PGTF2Policy.from_checkpoint(tmp_path, config=config)
    assert result.config["exploration_config"] == {"type": "Random"}
