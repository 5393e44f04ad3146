"""`algorithm.evaluate`: how many episodes, greedy or not, of which environment, by which seed."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import PolicySpec, PPOConfig
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import UsageError


class Bits(gym.Env):
    """Five steps; action 1 earns `worth`."""

    observation_space = spaces.Box(-1.0, 1.0, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, config=None):
        self.worth = (config or {}).get("worth", 1.0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return obs, self.worth * float(action), self.steps == 5, False, {}


class Doubled(Bits):
    def __init__(self, config=None):
        super().__init__({"worth": 2.0})


def build(**evaluation):
    config = PPOConfig().environment(Bits).framework("tf2", inference="tf", jit_compile=False)
    config.training(train_batch_size=20, sgd_minibatch_size=20, num_sgd_iter=1, lr=0.0)
    config.training(model={"fcnet_hiddens": [2]}).debugging(seed=1)
    config.evaluation(**{"evaluation_duration": 3, **evaluation})
    algorithm = config.build()
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
    each = sampled["hist_stats"]["episode_reward"]
    assert len(each) == 40
    assert 2.0 < np.mean(each) < 4.2  # 3.1 are expected
    assert sampled["episode_reward_std"] == pytest.approx(np.std(each))
    assert returns(algorithm, lambda done: 2 - done, explore=False) == [5.0] * 2
    algorithm.stop()


def test_another_environment_and_a_seed_are_of_one_call():
    algorithm = build(evaluation_config={"explore": True})
    assert returns(algorithm, env=Doubled, explore=False, episodes=2) == [10.0] * 2
    first, second = (returns(algorithm, seed=7, episodes=8) for _ in range(2))
    assert first == second
    assert returns(algorithm, seed=8, episodes=8) != first
    assert returns(algorithm, explore=False) == [5.0] * 3
    assert set(returns(algorithm, episodes=30)) <= {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
    algorithm.stop()


def test_evaluations_change_nothing_about_training():
    one, other = build(), build()
    other.evaluate(episodes=2, explore=False, seed=3)
    other.evaluate(env=Doubled)
    for algorithm in (one, other):
        algorithm.train()
    assert one._last_result["hist_stats"] == other._last_result["hist_stats"]
    for algorithm in (one, other):
        algorithm.stop()


@pytest.mark.parametrize(("asked", "explores"), [(None, False), (True, True), (False, False)])
def test_learn_evaluates_greedily_unless_the_config_says_otherwise(capsys, asked, explores):
    own = None if asked is None else {"explore": asked}
    algorithm = build(evaluation_interval=1, evaluation_config=own, evaluation_duration=20)
    results = []

    def look(algorithm, result):
        results.extend(result["evaluation"]["hist_stats"]["episode_reward"])

    algorithm.learn(40, callbacks=[look])
    assert len(results) == 40
    assert (set(results) != {5.0}) == explores
    assert ("Evaluations are greedy" in capsys.readouterr().out) == (asked is None)
    if asked is None:  # without `learn`, as the config says
        assert set(returns(algorithm, episodes=20)) != {5.0}
    algorithm.stop()


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
    algorithm.stop()


def test_keywords_of_other_libraries_are_answered():
    algorithm = build()
    with pytest.raises(TypeError, match="Here 'n_eval_episodes' is episodes"):
        algorithm.evaluate(n_eval_episodes=5)
    with pytest.raises(TypeError, match="Here 'deterministic' is explore=False"):
        algorithm.evaluate(deterministic=True)
    with pytest.raises(AttributeError, match=r"get_policy\(\).predict\(obs\)"):
        algorithm.predict([0.0, 0.0])
    algorithm.stop()


def test_environments_are_made_once_whether_policies_explore_or_not():
    made = []

    class Counted(Bits):
        def __init__(self, config=None):
            super().__init__()
            made.append(config.worker_index)

    config = PPOConfig().environment(Counted).training(train_batch_size=20, num_sgd_iter=1)
    config.training(model={"fcnet_hiddens": [2]}, sgd_minibatch_size=20)
    algorithm = config.evaluation(evaluation_interval=1, evaluation_duration=3).build()
    count = len(made)
    workers = algorithm.evaluation_workers
    algorithm.learn(40)
    algorithm.evaluate(explore=True)
    algorithm.evaluate(explore=False)
    assert len(made) == count
    assert algorithm.evaluation_workers is workers
    assert algorithm.get_policy().config["explore"] is True
    algorithm.stop()


def test_a_policy_whose_own_config_says_whether_it_explores_keeps_to_it():
    def mapping(agent_id, episode, worker, **kwargs):
        return ["free", "fixed"][agent_id]

    config = PPOConfig().environment(make_multi_agent(Bits), env_config={"num_agents": 2})
    specs = {"free": PolicySpec(), "fixed": PolicySpec(config={"explore": True})}
    config.multi_agent(policies=specs, policy_mapping_fn=mapping)
    config.training(train_batch_size=20, sgd_minibatch_size=20, model={"fcnet_hiddens": [2]})
    algorithm = config.evaluation(evaluation_interval=1, evaluation_duration=1).build()
    late = algorithm.get_policy("free").copy("late")
    algorithm.add_policy("late", policy=late)
    inside = algorithm.evaluation_worker.policy_map

    def explores():
        return {policy_id: policy.config["explore"] for policy_id, policy in inside.items()}

    algorithm.evaluate(explore=False)
    assert explores() == {"free": False, "fixed": True, "late": False}
    algorithm.evaluate()
    assert explores() == {"free": True, "fixed": True, "late": True}
    algorithm.stop()


def test_evaluations_continue_with_their_seeds_when_exploration_changes():
    algorithm = build()
    algorithm.evaluate()
    before = algorithm.evaluation_worker.seeds.num_calls
    algorithm.evaluate(explore=False)
    assert algorithm.evaluation_worker.seeds.num_calls > before
    algorithm.stop()
