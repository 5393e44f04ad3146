"""Causes that keep runs from learning, found in their folders."""

import json
import math
import os

import gymnasium as gym
import numpy as np
import pytest

from helpers.made_runs import NUM_ROWS, make_run
from tfpolicies import PPOConfig, diagnose
from tfpolicies.algorithms.health_rules import RULES
from tfpolicies.analysis import diagnosis
from tfpolicies.analysis.run_record import read_run
from tfpolicies.errors import CheckpointError
from tfpolicies.reporting.run_folder import RunFolder

GROWING = np.linspace(20.0, 450.0, NUM_ROWS)
PLATEAU = np.minimum(GROWING, 100.0)
EPSILON = {"type": "EpsilonGreedy", "initial_epsilon": 1.0, "final_epsilon": 0.02}


def dqn(config=None, **changes):
    return {"algorithm": "DQN", "config": config, "columns": {}, **changes}


def find(tmp_path, **run):
    return diagnose(make_run(tmp_path / "run", **run))


@pytest.mark.parametrize(
    ("run", "name", "words"),
    [
        (
            {"config": {"gamma": 0.5}, "length": 200},
            "short_horizon",
            "gamma=0.5 looks 1 / (1 - gamma) = 2",
        ),
        ({"learner": {"cur_lr": 1e-7, "kl": 1e-9}}, "small_steps", "KL divergence of 1e-09"),
        ({"config": {"lr": 0.1}}, "unusual_setting", "lr is 0.1; 1e-05 to 0.003 is usual"),
        ({"learner": {"kl": 0.5}}, "large_steps", "a KL divergence of 0.5, far over"),
        ({"learner": {"kl": 0.5, "cur_kl_coeff": 0.0}}, "kl", "KL divergence of about 0.5"),
        ({"learner": {"kl": 1e-7}}, "kl", "The policy practically stays the same"),
        ({"learner": {"cur_kl_coeff": 900.0}}, "kl", "cur_kl_coeff has grown to 9e+02"),
        ({"learner": {"vf_clipped": 0.9}}, "clipped_value_errors", "vf_clip_param=10"),
        (
            {"learner": {"vf_loss": 4e6, "vf_explained_var": 0.0}},
            "large_rewards",
            "Values are wrong by 2e+03 on average",
        ),
        (
            {"columns": {"policy/default_policy/obs_magnitude": 5e4}},
            "large_observations",
            "Observations have magnitude 5e+04",
        ),
        (
            {"columns": {"policy/default_policy/obs_range": 0.0}},
            "equal_observations",
            "All observations are the same",
        ),
        (
            {"columns": {"episode_reward_min": 20.0, "episode_reward_max": 20.0}},
            "equal_returns",
            "the return was 20 in each of the last 100 episodes",
        ),
        (
            {"columns": {"episodes": 0}, "returns": math.nan},
            "endless_episodes",
            "after 40,000 steps",
        ),
        ({"config": {"explore": False}}, "exploration", "explore=False"),
        (
            {"config": {"clip_rewards": True}, "returns": -200.0},
            "clipped_rewards",
            "all negative (on average 10 per step), by -1",
        ),
        ({"config": {"normalize_actions": False}}, "unscaled_actions", "normalize_actions=False"),
        (
            {
                "config": {"lr_schedule": [[0, 1e-3], [8000, 0]]},
                "learner": {"cur_lr": np.maximum(0.0, 1e-3 - 1e-4 * np.arange(NUM_ROWS))},
            },
            "ended_schedule",
            "fell to 0 after 11,000 of 40,000 steps",
        ),
        (
            {"config": {"model": {"vf_share_layers": True}}, "learner": {"vf_loss": 5e4}},
            "shared_layers",
            "whose loss is 5e+04",
        ),
        ({"config": {"train_batch_size": 8000}}, "few_iterations", "make only 5 iterations"),
        ({"config": {"optimizer": {"type": "sgd"}}}, "unusual_choice", "The optimizer is SGD"),
        (
            {"config": {"exploration_config": {"type": "Random"}}},
            "unusual_choice",
            "all actions of training are random",
        ),
        (
            {"config": {"model": {"fcnet_activation": "linear"}}},
            "unusual_choice",
            "the network is linear",
        ),
        ({"std": 0.0}, "rare_rewards", "In 100% of the iterations"),
        ({"learner": {"vf_explained_var": 0.0}}, "untrained_values", "explains 0% of the variance"),
        (
            {"env": "CartPole-v1", "config": {"gamma": 0.97}},
            "differences_from_tuned",
            "(tuned: 256)",
        ),
        ({}, "no_progress", "it was 20 at first, 20 at best and is 20 now"),
        (dqn({"exploration_config": {**EPSILON, "initial_epsilon": 0.02}}), "exploration", "0.02"),
        (
            dqn({"exploration_config": {**EPSILON, "epsilon_timesteps": 500}}),
            "exploration",
            "exploration ended before learning had begun",
        ),
        (
            dqn({"exploration_config": {**EPSILON, "epsilon_timesteps": 90_000}}),
            "exploration",
            "epsilon is still 0.56 after 40,000 steps",
        ),
        (dqn({"rollout_fragment_length": 64}), "updates_per_step", "one update per 64 sampled"),
        (dqn({"training_intensity": 1e3}), "updates_per_step", "31 updates per sampled step"),
        (dqn({"target_network_update_freq": 10**6}), "target_network", "was updated 0 times"),
        (
            dqn({"target_network_update_freq": 1}),
            "target_network",
            "follows the learned one every 1 updates",
        ),
        (dqn({"tau": 1e-6}), "target_network", "tau=1e-06 moved the target networks only 0%"),
        (dqn({"replay_buffer_config": {"capacity": 100}}), "unusual_setting", "at least 10000"),
        (dqn({"num_steps_sampled_before_learning_starts": 30_000}), "late_learning", "30,000 of"),
        (
            dqn({"num_atoms": 51, "v_min": -1.0, "v_max": 1.0}),
            "value_range",
            "Values go from 0 to 20",
        ),
        (
            {
                "algorithm": "SAC",
                "learner": {"alpha_value": 5.0, "target_entropy": -1.0},
                "columns": {"episode_reward_min": -0.1, "episode_reward_max": 0.1},
            },
            "high_temperature",
            "worth about 5 per step, but rewards are only 0.005",
        ),
        (
            {
                "algorithm": "TD3",
                "config": {
                    "exploration_config": {
                        "type": "GaussianNoise",
                        "stddev": 0.0,
                        "random_timesteps": 0,
                    }
                },
            },
            "exploration",
            "The noise of actions is 0",
        ),
        (
            {
                "algorithm": "TD3",
                "config": {
                    "exploration_config": {
                        "type": "GaussianNoise",
                        "stddev": 0.1,
                        "random_timesteps": 39_000,
                    }
                },
            },
            "exploration",
            "random in the first 39,000 of 40,000 steps",
        ),
    ],
)
def test_the_likeliest_cause_comes_first_with_its_figure(run, name, words, tmp_path):
    result = find(tmp_path, **run)
    first = result.causes[0]
    assert (first.name, words in first.evidence) == (name, True), result
    assert first.advice
    assert first.policy_id == ""


@pytest.mark.parametrize(
    "run",
    [
        {"returns": GROWING},
        {"returns": GROWING, "learner": {"vf_clipped": 0.9, "entropy": 0.001, "kl": 0.5}},
        {"returns": GROWING, "config": {"lr": 0.5, "gamma": 0.5}, "length": 200},
        {"returns": PLATEAU, "config": {"lr": 0.02}, "learner": {"kl": 0.5, "entropy": 1e-9}},
        dqn(returns=GROWING),
        # The best return from the first iteration on
        {
            "env": "CartPole-v1",
            "returns": 500.0,
            "std": 0.0,
            "columns": {"episode_reward_min": 500.0, "episode_reward_max": 500.0},
        },
    ],
)
def test_a_run_that_learns_has_no_causes_and_shows_its_figures(run, tmp_path):
    result = find(tmp_path, **run)
    assert result.causes == (), result
    assert str(result).endswith("Nothing was found that keeps this run from learning.")
    assert result.figures["steps"] == 40_000
    assert result.figures["learning rate"] == 1e-3
    assert "last evaluation" not in result.figures


def test_a_plateau_at_an_unknown_level_names_only_definite_causes(tmp_path):
    [cause] = find(tmp_path, returns=PLATEAU, config={"lr": 0.2}, learner={"kl": 0.5}).causes
    assert (cause.name, cause.title) == ("unusual_setting", "lr is too large")


def test_a_symptom_is_left_out_if_a_cause_explains_it(tmp_path):
    learner = {"vf_clipped": 0.9, "entropy": 1e-6, "vf_explained_var": -1.0}
    result = find(tmp_path, config={"gamma": 0.0}, length=200, learner=learner)
    assert [cause.name for cause in result.causes] == ["short_horizon"]


def test_a_setting_is_named_once(tmp_path):
    learner = {"entropy_coeff": 3.0, "entropy": 0.69}
    run = make_run(tmp_path / "run", {"entropy_coeff": 3.0, "lr": 0.5}, learner=learner)
    assert [x.name for x in diagnose(run).causes].count("unusual_setting") <= 2
    assert {*diagnose(run).causes[0].settings} == {"lr"}


def test_forgetting_is_a_fall_by_most_of_the_gain(tmp_path):
    returns = np.concatenate([np.linspace(20, 400, 20), np.linspace(400, 40, 20)])
    [cause] = find(tmp_path, returns=returns).causes
    assert cause.name == "forgetting"
    assert "The mean return was 3" in cause.evidence
    assert "is 68.42 now" in cause.evidence
    slight = np.concatenate([np.linspace(20, 400, 20), np.linspace(400, 300, 20)])
    assert diagnose(make_run(tmp_path / "slight", returns=slight)).causes == ()


@pytest.mark.parametrize(
    ("changes", "words", "setting"),
    [
        ({"env_config": {"wind": 3}}, "sets another environment (env_config={'wind': 3}", "env_"),
        ({"explore": False}, "Evaluations have a mean return of 20, training episodes", "explore"),
        ({"gamma": 0.5}, "evaluation_config sets {'gamma': 0.5}", "gamma"),
    ],
)
def test_evaluations_far_below_training_name_the_difference(changes, words, setting, tmp_path):
    columns = {"evaluation/episode_reward_mean": 20.0}
    config = {"evaluation_config": changes}
    [cause] = find(tmp_path, returns=GROWING, columns=columns, config=config).causes
    assert cause.name == "evaluation_gap"
    assert words in cause.evidence
    assert any(setting in name for name in cause.settings)
    columns = {"evaluation/episode_reward_mean": GROWING + 30}
    run = make_run(tmp_path / "other", config, columns, returns=GROWING)
    assert diagnose(run).causes == ()


# -- several policies -------------------------------------------------------------------------


def two_policies(**right):
    spec = {"$tuple": [None, None, None, right]}
    return {"left": {"$tuple": [None, None, None, None]}, "right": spec}


def test_a_policy_that_is_left_out_of_training_is_named(tmp_path):
    config = {"policies": two_policies(), "policies_to_train": ["left"]}
    [cause] = find(tmp_path, config=config, returns=GROWING, policies=("left",)).causes
    assert (cause.name, cause.policy_id) == ("untrained_policy", "right")
    assert "policies_to_train=['left'] leaves it out" in cause.evidence
    config["policies"]["right"]["$tuple"][0] = {"$import": "mine:Scripted"}
    frozen = make_run(tmp_path / "frozen", config, returns=GROWING, policies=("left",))
    assert diagnose(frozen).causes == ()


def test_a_policy_that_hardly_changes_is_named_while_the_other_learns(tmp_path):
    columns = {"learner/right/kl": 1e-8, "learner/right/cur_lr": 1e-9}
    columns |= {"policy/left/return_mean": GROWING, "policy/right/return_mean": 20.0}
    config = {"policies": two_policies(lr=1e-9)}
    result = find(
        tmp_path, config=config, columns=columns, returns=GROWING, policies=("left", "right")
    )
    first = result.causes[0]
    assert (first.name, first.policy_id) == ("lagging_policy", "right")
    assert first.settings == {"lr": 1e-9}
    assert {cause.policy_id for cause in result.causes} == {"right"}
    assert "(policy 'right')" in str(result)


def test_a_policy_whose_returns_do_not_grow_is_named_unless_rewards_cancel_out(tmp_path):
    columns = {"policy/left/return_mean": GROWING, "policy/right/return_mean": 20.0}
    run = {"columns": columns, "policies": ("left", "right"), "returns": GROWING}
    [cause] = find(tmp_path, **run).causes
    assert (cause.name, cause.policy_id) == ("unequal_progress", "right")
    columns["policy/right/return_mean"] = -GROWING
    run["columns"]["episode_reward_mean"] = 0.0
    assert diagnose(make_run(tmp_path / "game", **run)).causes == ()


def game(left, **changes):
    """Returns a run of two policies whose returns add up to 0."""
    columns = {f"episode_reward_{x}": 0.0 for x in ("mean", "min", "max")}
    for name, means in (("left", left), ("right", -left)):
        bounds = {"return_mean": means, "return_min": -1.0, "return_max": 1.0}
        columns |= {f"policy/{name}/{x}": value for x, value in bounds.items()}
    return {"columns": columns, "returns": 0.0, "std": 0.0, "policies": ("left",), **changes}


RISING = np.linspace(-0.72, 0.33, NUM_ROWS)
MIN_MAX = ("min", "max")
FLAT = np.tile([-0.1, 0.1], NUM_ROWS // 2)


def test_a_policy_that_beats_its_opponent_has_learned_though_the_sum_is_constant(tmp_path):
    config = {"policies": two_policies(), "policies_to_train": ["left"]}
    learned = find(tmp_path, **game(RISING, config=config))
    assert learned.causes == ()
    assert learned.figures["left: first return"] == -0.72
    [cause] = diagnose(make_run(tmp_path / "flat", **game(FLAT))).causes
    assert (cause.name, cause.policy_id) == ("no_progress", "left")
    assert "has not grown: it was -0.1 at first" in cause.evidence
    fallen = np.concatenate([RISING[::2], RISING[::-2]])
    [cause] = diagnose(make_run(tmp_path / "fallen", **game(fallen))).causes
    assert (cause.name, cause.policy_id) == ("forgetting", "left")


def test_returns_of_policies_that_learn_against_each_other_need_not_rise(tmp_path):
    assert find(tmp_path, **game(FLAT, policies=("left", "right"))).causes == ()


def test_opponents_that_also_pay_for_each_step_need_not_rise_both(tmp_path):
    wins = RISING + 0.2 * np.sin(np.arange(NUM_ROWS))
    columns = {"policy/left/return_mean": wins, "policy/right/return_mean": -wins - 0.1}
    run = {"columns": columns, "returns": np.linspace(-0.5, -0.1, NUM_ROWS)}
    assert find(tmp_path, **run, policies=("left", "right")).causes == ()


def test_a_run_is_judged_by_the_only_policy_that_learns(tmp_path):
    columns = {"policy/left/return_mean": GROWING, "policy/right/return_mean": 30.0 - GROWING}
    run = {"columns": columns, "returns": 30.0, "policies": ("left",)}
    learned = find(tmp_path, **run, config={"policies_to_train": ["left"]})
    assert learned.causes == ()
    assert "left: last return" in learned.figures


def test_a_constant_sum_is_judged_by_evaluations_of_ones_own(tmp_path):
    run = game(FLAT)
    run["columns"]["evaluation/episode_reward_mean"] = np.linspace(0.2, 0.9, NUM_ROWS)
    assert find(tmp_path, **run).causes == ()
    run["columns"]["evaluation/episode_reward_mean"] = 0.9
    assert diagnose(make_run(tmp_path / "flat", **run)).causes[0].name == "no_progress"


@pytest.mark.parametrize(("end", "names"), [(60.0, []), (30.0, ["equal_returns"])])
def test_equal_returns_are_no_cause_if_the_returns_rose_to_them(end, names, tmp_path):
    half = NUM_ROWS // 2
    returns = np.concatenate([np.linspace(43.0, end, half), np.full(NUM_ROWS - half, end)])
    spread = np.where(returns == end, 0.0, 20.0)  # more than the gain
    columns = {"episode_reward_min": returns - spread, "episode_reward_max": returns + spread}
    causes = find(tmp_path, columns=columns, returns=returns, std=spread).causes
    assert [cause.name for cause in causes] == names


def test_rewards_that_no_policy_gets_are_rare(tmp_path):
    run = game(np.zeros(NUM_ROWS))
    run["columns"] |= {f"policy/{x}/return_{y}": 0.0 for x in ("left", "right") for y in MIN_MAX}
    names = [cause.name for cause in find(tmp_path, **run).causes]
    assert names[0] == "equal_returns"
    run["columns"]["episodes"] = 80  # too few for that
    assert diagnose(make_run(tmp_path / "few", **run)).causes[0].name == "rare_rewards"


# -- recorded experience ----------------------------------------------------------------------


def test_imitation_of_data_names_data_rate_and_coverage(tmp_path, monkeypatch):
    facts = diagnosis.RunHistory.get_action_facts
    monkeypatch.setattr(
        diagnosis.RunHistory,
        "get_action_facts",
        lambda self, policy_id: facts(self, policy_id)._replace(max_entropy=math.log(2)),
    )

    def get_first(name, loss, evaluation=20.0, **learner):
        columns = {f"recent_returns/{x}": math.nan for x in ("mean", "std", "episodes")}
        columns |= {f"episode_reward_{x}": math.nan for x in ("mean", "min", "max")}
        columns |= {"episodes": 0, "evaluation/episode_reward_mean": evaluation}
        columns |= {"evaluation/episode_reward_std": 5.0}
        statistics = {"policy_loss": loss, "kl": None, "entropy": None, **learner}
        run = make_run(
            tmp_path / name,
            {"input_": "data.parquet"},
            columns,
            algorithm="BC",
            env="CartPole-v1",
            learner=statistics,
        )
        return next(iter(diagnose(run).causes), None)

    cause = get_first("random", 0.69)
    assert cause.name == "unpredictable_actions"
    assert "guessing has 0.693" in cause.evidence
    cause = get_first("rate", 0.69, cur_lr=1e-8)
    assert cause.title == "lr is too small"
    learned = np.concatenate([np.linspace(0.69, 0.1, 10), np.full(NUM_ROWS - 10, 0.1)])
    assert get_first("coverage", learned).name == "poor_data"
    assert get_first("falling", np.linspace(0.69, 0.5, NUM_ROWS)).name == "falling_loss"
    assert get_first("learned", learned, 490.0) is None


# -- how a run ended --------------------------------------------------------------------------


def test_an_error_comes_first(tmp_path):
    run = make_run(tmp_path / "run", {"gamma": 0.0}, length=200)
    (run / "error.txt").write_text("Traceback ...\nValueError: no such map\n")
    first, second = diagnose(run).causes
    assert "ValueError: no such map" in first.evidence
    assert (first.name, second.name) == ("error", "short_horizon")


def test_an_update_that_is_not_finite_is_a_symptom(tmp_path):
    text = "Traceback\ntfpolicies.errors.NonFiniteError: The update is not finite.\n"
    for name, config, expected in (("a", {}, "non_finite_error"), ("b", {"lr": 1.0}, "unusual_")):
        run = make_run(tmp_path / name, config, returns=GROWING if not config else 20.0)
        (run / "error.txt").write_text(text)
        assert diagnose(run).causes[0].name.startswith(expected)


def test_an_error_before_a_run_was_resumed_is_not_named(tmp_path):
    run = make_run(tmp_path / "run", returns=GROWING)
    (run / "error.txt").write_text("ValueError: no\n")
    os.utime(run / "error.txt", (1, 1))
    assert diagnose(run).causes == ()


def test_a_script_whose_environment_fails_leaves_its_error(tmp_path):
    class Failing(Bandit):
        steps = 0

        def step(self, action):
            Failing.steps += 1
            if Failing.steps > 300:
                raise RuntimeError("the motor is stuck")
            return super().step(action)

    with pytest.raises(Exception, match="the motor is stuck"):
        learn_bandit(tmp_path / "run", env=Failing)
    cause, *_ = diagnose(tmp_path / "run").causes
    assert cause.name == "error"
    assert "the motor is stuck" in cause.evidence


def test_a_run_that_was_killed_before_its_first_checkpoint(tmp_path):
    [cause] = find(tmp_path, returns=GROWING, has_checkpoint=False).causes
    assert cause.name == "no_checkpoint"
    assert "ended after 40 iterations, before its first checkpoint" in cause.evidence


def test_a_run_that_trains_is_not_called_killed(tmp_path):
    path = make_run(tmp_path / "run", returns=GROWING, has_checkpoint=False)
    with RunFolder.open(path).acquire():
        result = diagnose(path)
    assert (result.causes, result.is_training) == ((), True)
    assert not diagnose(path).is_training


def test_a_run_of_the_command_that_was_ended_early(tmp_path):
    command = {"algo": "PPO", "env": "Unknown-v0", "steps": 1_000_000}
    assert find(tmp_path, command=command).causes[0].name == "killed"


def test_exploration_of_a_run_that_trains_may_end_later(tmp_path):
    config = {"exploration_config": {**EPSILON, "epsilon_timesteps": 90_000}}
    path = make_run(tmp_path / "run", config, algorithm="DQN")
    assert diagnose(path).causes[0].title == "Exploration has not ended"
    with RunFolder.open(path).acquire():
        assert "exploration" not in [cause.name for cause in diagnose(path).causes]


@pytest.mark.parametrize("algo", ["PPO", "DQN"])
def test_a_run_far_shorter_than_tuned_ones(algo, tmp_path):
    config = {"train_batch_size": 100}
    [first, *_] = find(tmp_path, algorithm=algo, env="CartPole-v1", config=config, rows=5).causes
    assert first.name == "short_run"
    assert "The run has 5,000 steps" in first.evidence


def test_a_short_run_that_forgets_is_not_merely_short(tmp_path):
    returns = np.concatenate([np.linspace(20, 929, 30), np.linspace(929, 58, 10)])
    run = {"env": "Hopper-v5", "returns": returns, "length": 200.0}
    assert [cause.name for cause in find(tmp_path, **run).causes] == ["forgetting"]
    run["returns"] = 20.0
    assert diagnose(make_run(tmp_path / "short", **run)).causes[0].name == "short_run"


def test_a_run_that_ended_before_learning_started(tmp_path):
    learner = dict.fromkeys(["cur_lr", "mean_q", "max_q", "min_q", "mean_td_error"])
    columns = {"policy/default_policy/obs_magnitude": 1.0}
    config = {"num_steps_sampled_before_learning_starts": 50_000}
    result = find(tmp_path, algorithm="DQN", config=config, columns=columns, learner=learner)
    assert result.causes[0].name == "no_learning_yet"
    assert "learning starts after" in result.causes[0].evidence


@pytest.mark.parametrize(
    ("error", "words"),
    [("", "progress.csv has no iteration"), ("Trace\nOSError: full\n", "OSError: full")],
)
def test_a_run_without_an_iteration(error, words, tmp_path):
    run = RunFolder.create_at(tmp_path / "run", {"learn": "PPO"})
    assert diagnose(run.path).causes == ()  # its first iteration runs
    run.release()
    if error:
        run.error_txt.write_text(error)
    [cause] = diagnose(run.path).causes
    assert cause.name == "no_iteration"
    assert words in cause.evidence


def test_folders_that_are_no_runs_or_damaged_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run folder"):
        diagnose(tmp_path)
    run = make_run(tmp_path / "run")
    (run / "progress.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CheckpointError, match="is not a progress file"):
        diagnose(run)


def test_a_diagnosis_is_json_for_machines(tmp_path):
    run = make_run(tmp_path / "run", {"vf_clip_param": {"$float": "inf"}, "lr": 0.5})
    content = diagnose(read_run(run)).to_json()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["causes"][0]["settings"] == {"lr": 0.5}
    assert content["figures"]["iterations"] == NUM_ROWS


def test_every_rule_has_a_rank():
    rules = [*diagnosis._HISTORY_RULES, *RULES]
    assert sorted(diagnosis._RANKING) == sorted(rules)


STRANGE = [0, -1, 1e9, "x", [], {"$float": "nan"}, {"$unavailable": "a:b"}, True, [[0, 1]]]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
@pytest.mark.parametrize("algorithm", ["PPO", "DQN", "SAC", "mine:Own"])
def test_settings_of_another_type_do_not_stop_a_diagnosis(algorithm, value, tmp_path):
    names = ["gamma", "train_batch_size", "exploration_config", "tau", "training_intensity"]
    names += ["rollout_fragment_length", "policies", "evaluation_config", "model", "vf_clip_param"]
    names += ["num_steps_sampled_before_learning_starts", "num_envs_per_worker", "clip_rewards"]
    run = make_run(tmp_path / "run", dict.fromkeys(names, value), algorithm=algorithm, rows=3)
    assert diagnose(run).to_json()["figures"]["iterations"] == 3


# -- real runs --------------------------------------------------------------------------------


class Bandit(gym.Env):
    """Rewards an action by its value, in episodes of one step."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
    action_space = gym.spaces.Box(0.0, 1000.0, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 1).astype(np.float32), {}

    def step(self, action):
        obs = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return obs, float(action[0]) / 1000 - 0.5, True, False, {}


def learn_bandit(path, env=Bandit, **environment):
    config = PPOConfig().environment(env, **environment).debugging(seed=1)
    config.training(train_batch_size=64, sgd_minibatch_size=32, num_sgd_iter=5, lr=1e-3)
    config.training(model={"fcnet_hiddens": [16]}).rollouts(num_envs_per_worker=4)
    algorithm = config.build()
    algorithm.learn(64 * 15, run_dir=path, progress=False)
    algorithm.stop()
    return diagnose(path)


def test_a_real_run_names_the_bounds_of_its_actions(tmp_path):
    cause, *_ = learn_bandit(tmp_path / "run", normalize_actions=False, clip_actions=True).causes
    assert cause.name == "unscaled_actions"
    assert "as large as 1000" in cause.evidence
