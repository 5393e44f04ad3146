"""`algorithm.evaluate`: number of episodes, exploration, environment and seed."""

import numpy as np
import pytest

from helpers.environments import SeededEnv
from helpers.workers import make_small_config
from tfpolicies import PolicySpec
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import UsageError


class Bits(SeededEnv):
    """Five steps; action 1 earns 1."""

    def __init__(self, config=None):
        super().__init__()


class Doubled(Bits):
    def step(self, action):
        return super().step(2 * action)


def make_config(env=Bits, **settings):
    sizes = {"train_batch_size": 20, "sgd_minibatch_size": 20, "num_sgd_iter": 1}
    defaults = {"seed": 1, "lr": 0.0, "evaluation_duration": 3, "log_level": "WARN"}
    return make_small_config(env, **{**sizes, **defaults, **settings})


def build(**settings):
    algorithm = make_config(**settings).build()
    weights = algorithm.get_policy().get_weights()
    logits = {key: np.zeros_like(x) for key, x in weights.items()}
    bias = [key for key, x in logits.items() if x.shape == (2,) and "bias" in key][-1]
    logits[bias][1] = 0.5  # action 1 is greedy, and has 62 % of samples
    algorithm.get_policy().set_weights(logits)
    return algorithm


def returns(algorithm, *args, **kwargs):
    return algorithm.evaluate(*args, **kwargs)["evaluation"]["hist_stats"]["episode_reward"]


def test_evaluations_say_how_many_episodes_and_whether_they_are_greedy():
    algorithm = build()
    assert len(returns(algorithm)) == 3
    assert returns(algorithm, episodes=4, explore=False) == [5.0] * 4
    sampled = algorithm.evaluate(episodes=40)["evaluation"]  # as the config says
    sampled_returns = sampled["hist_stats"]["episode_reward"]
    assert len(sampled_returns) == 40
    assert 2.0 < np.mean(sampled_returns) < 4.2  # 3.1 are expected
    assert sampled["episode_reward_std"] == pytest.approx(np.std(sampled_returns))
    assert returns(algorithm, lambda done: 2 - done, explore=False) == [5.0] * 2


def test_another_environment_and_a_seed_are_of_one_call():
    algorithm = build(evaluation_config={"explore": True})
    assert returns(algorithm, env=Doubled, explore=False, episodes=2) == [10.0] * 2
    first, second = (returns(algorithm, seed=7, episodes=8) for _ in range(2))
    assert first == second
    assert returns(algorithm, seed=8, episodes=8) != first
    assert returns(algorithm, explore=False) == [5.0] * 3
    assert set(returns(algorithm, episodes=30)) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}


def test_evaluations_change_nothing_about_training():
    one, other = build(), build()
    other.evaluate(episodes=2, explore=False, seed=3)
    other.evaluate(env=Doubled)
    assert one.train()["hist_stats"] == other.train()["hist_stats"]


@pytest.mark.parametrize("explore", [None, True, False])
def test_learn_evaluates_greedily_unless_the_config_says_otherwise(capsys, explore):
    overrides = None if explore is None else {"explore": explore}
    algorithm = build(evaluation_interval=1, evaluation_config=overrides, evaluation_duration=20)
    results = []

    def record(algorithm, result):
        results.extend(result["evaluation"]["hist_stats"]["episode_reward"])

    algorithm.learn(40, callbacks=[record])
    assert len(results) == 40
    assert (set(results) != {5.0}) == bool(explore)
    assert ("Evaluations are greedy" in capsys.readouterr().out) == (explore is None)
    if explore is None:  # without `learn`, as the config says
        assert set(returns(algorithm, episodes=20)) != {5.0}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((20,), {}, r"duration_fn must be a function or None, got 20.*evaluate\(episodes=20\)"),
        ((lambda done: 1,), {"episodes": 2}, "either duration_fn or episodes"),
        ((), {"episodes": 0}, "episodes must be a whole number, 1 or more"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args, kwargs, message):
    algorithm = build()
    with pytest.raises(UsageError, match=message):
        algorithm.evaluate(*args, **kwargs)


def test_keywords_of_other_libraries_are_answered():
    algorithm = build()
    with pytest.raises(TypeError, match="Here 'n_eval_episodes' is episodes"):
        algorithm.evaluate(n_eval_episodes=5)
    with pytest.raises(TypeError, match="Here 'deterministic' is explore=False"):
        algorithm.evaluate(deterministic=True)
    with pytest.raises(AttributeError, match=r"get_policy\(\).predict\(obs\)"):
        algorithm.predict([0.0, 0.0])


def test_environments_are_made_once_whether_policies_explore_or_not():
    envs = []

    class Counted(Bits):
        def __init__(self, config=None):
            envs.append(self)

    algorithm = make_config(Counted, evaluation_interval=1, jit_compile="auto").build()
    count = len(envs)
    workers = algorithm.evaluation_workers
    algorithm.learn(40)
    algorithm.evaluate(explore=True)
    algorithm.evaluate(explore=False)
    assert len(envs) == count
    assert algorithm.evaluation_workers is workers
    assert algorithm.get_policy().config["explore"] is True


def test_a_policy_whose_own_config_says_whether_it_explores_keeps_to_it():
    def mapping(agent_id, episode, worker, **kwargs):
        return ["free", "fixed"][agent_id]

    env_config = {"num_agents": 2}
    config = make_config(make_multi_agent(Bits), env_config=env_config, inference="auto")
    specs = {"free": PolicySpec(), "fixed": PolicySpec(config={"explore": True})}
    config.multi_agent(policies=specs, policy_mapping_fn=mapping)
    algorithm = config.evaluation(evaluation_interval=1, evaluation_duration=1).build()
    algorithm.add_policy("late", policy=algorithm.get_policy("free").copy("late"))
    for settings, explores in (({"explore": False}, False), ({}, True)):
        algorithm.evaluate(**settings)
        policies = algorithm.evaluation_worker.policy_map
        actual = {policy_id: policy.config["explore"] for policy_id, policy in policies.items()}
        assert actual == {"free": explores, "fixed": True, "late": explores}


def test_evaluations_continue_with_their_seeds_when_exploration_changes():
    algorithm = build()
    algorithm.evaluate()
    before = algorithm.evaluation_worker.seeds.num_calls
    algorithm.evaluate(explore=False)
    assert algorithm.evaluation_worker.seeds.num_calls > before
