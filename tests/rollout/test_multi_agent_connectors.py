"""Connectors of single policies, in environments with several agents."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from helpers.multi_agent_envs import (
    SPACE,
    THREE,
    Crowd,
    Scripted,
    Staggered,
    Walker,
    World,
    flags,
    sampler_of,
)
from helpers.view_models import Counter
from helpers.workers import (
    assert_equal_batches,
    get_logits,
    make_config,
    make_worker,
    map_all_to,
    sampler_with,
)
from tfpolicies import AlgorithmConfig, PGTF2Policy, PolicySpec, PPOTF2Policy, RolloutWorker
from tfpolicies.connectors import (
    ActionConnector,
    ActionConnectorPipeline,
    AgentConnector,
    AgentConnectorPipeline,
    ClipObservations,
    ClipReward,
    FlattenObservations,
    FrameStack,
    ObservationConnector,
    register_connector,
)
from tfpolicies.errors import ConfigError, EnvError, ObservationError, SpaceError, UsageError
from tfpolicies.rollout.episode_summaries import summarize_episodes
from tfpolicies.rollout.sampler import EvaluationDuration

TWO_FRAMES = spaces.Box(-1.0, 1e6, (6,), np.float32)


def a_to_p(agent_id: str, episode: Any, **kwargs: Any) -> str:
    return "p" if agent_id == "a" else "q"


def a_to_p_or_r(agent_id: str, episode: Any, **kwargs: Any) -> str:
    return "p" if agent_id == "a" else "r"


def connect(policy: Any, *agent: Any, action: Any = (), space: Any = SPACE) -> Any:
    """Gives a policy connectors, as a worker does."""
    policy.agent_connectors = AgentConnectorPipeline(agent)
    policy.agent_connectors.connect(space)
    policy.action_connectors = ActionConnectorPipeline(action)
    policy.action_connectors.connect(policy.action_space)
    return policy


def stacking(**settings: Any) -> Walker:
    return connect(SixWalker(TWO_FRAMES, **settings), FrameStack(2))


def staggered(*policies: Any, envs: int = 1, length: int = 7, **settings: Any) -> Any:
    """Returns a sampler of `Staggered`: policy "p" for agent a, and "q" for b."""
    return sampler_of(
        *(Staggered() for _ in range(envs)),
        policies=dict(zip("pq", policies, strict=True)),
        mapping=a_to_p,
        rollout_fragment_length=length,
        **settings,
    )


class SixWalker(Walker):
    """Its value is of the last frame."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return super().compute_actions(obs_batch[:, 3:], state_batches, **kwargs)

    def compute_values(self, inputs):
        return super().compute_values([inputs[0][:, 3:]])


def frames(column: Any) -> list[list[float]]:
    """Returns the times of the frames of each row."""
    return [[row[i] for i in range(2, len(row), 3)] for row in column.tolist()]


def test_each_policy_sees_through_its_own_connectors():
    """Agent a sees each step, b every second; each earns 1 a step, so b earns 2, 2, 2 and 1."""
    sampler = staggered(stacking(), connect(Walker(seed=1), ClipReward(limit=1.5)))
    batch = sampler.sample()
    p, q = batch["p"], batch["q"]
    assert frames(p["obs"]) == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert frames(p["new_obs"]) == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]
    assert p["rewards"].tolist() == [1.0] * 7
    assert frames(q["obs"]) == [[0], [2], [4], [6]]
    assert frames(q["new_obs"]) == [[2], [4], [6], [7]]
    assert q["rewards"].tolist() == [1.5, 1.5, 1.5, 1.0]
    (metrics,) = sampler.metrics
    assert metrics.agent_rewards == {("a", "p"): 7.0, ("b", "q"): 5.5}
    assert metrics.episode_reward == 12.5
    assert set(metrics.connector_metrics) == {"p", "q"}
    assert metrics.connector_metrics["p"]["agent_connectors"]["FrameStack_ms"] > 0.0
    p = sampler.sample()["p"]
    assert frames(p["obs"])[:2] == [[0, 0], [0, 1]]
    assert [row[1] for row in p["obs"].tolist()] == [1.0] * 7


def test_a_truncated_fragment_ends_with_the_next_observation_and_the_next_one_continues():
    sampler = staggered(stacking(), connect(Walker(seed=1), ClipReward(sign=True)), length=3)
    first, second = sampler.sample(), sampler.sample()
    assert frames(first["p"]["new_obs"])[-1] == [2, 3] == frames(second["p"]["obs"])[0]
    assert frames(second["p"]["obs"]) == [[2, 3], [3, 4], [4, 5]]
    assert first["p"]["values_bootstrapped"][-1] == second["p"]["vf_preds"][0]
    assert frames(first["q"]["obs"]) == [[0]]
    assert frames(second["q"]["obs"]) == [[2], [4]]
    assert second["q"]["rewards"].tolist() == [1.0, 1.0]


def test_agents_that_leave_and_come():
    """b leaves with a last observation, c comes, d comes and leaves without a last observation."""
    script = [
        (("a", "b", "c"), {"a": 5.0, "b": 5.0, "c": 9.0}, {"b": True}, {}),
        (("a", "c", "d"), {"a": 0.5, "b": 7.0, "c": 3.0}, {}, {}),
        (("a", "c"), {"c": 0.25, "d": 2.0}, {"d": True}, {}),
        (("a",), {"a": 4.0, "c": 6.0}, {"__all__": True}, {}),
    ]
    policy = connect(SixWalker(TWO_FRAMES), FrameStack(2), ClipReward(limit=1.0))
    sampler = sampler_with(policy, Scripted(script), length=4)
    batch = sampler.sample()["p"]
    results: dict[int, list] = {}
    for row in range(batch.count):
        results.setdefault(int(batch["agent_index"][row]), []).append(
            (frames(batch["obs"][row : row + 1])[0], frames(batch["new_obs"][row : row + 1])[0])
        )
    assert results == {
        0: [([0, 0], [0, 1]), ([0, 1], [1, 2]), ([1, 2], [2, 3]), ([2, 3], [3, 4])],
        1: [([0, 0], [0, 1])],
        2: [([1, 1], [1, 2]), ([1, 2], [2, 3]), ([2, 3], [2, 3])],
        3: [([2, 2], [2, 2])],
    }
    rewards = [batch["rewards"][batch["agent_index"] == agent].tolist() for agent in range(4)]
    assert rewards == [[1.0, 0.5, 0.0, 1.0], [1.0], [1.0, 0.25, 1.0], [1.0]]
    (metrics,) = sampler.metrics
    # c earned 9 in the step that it came in; b's 7 came after it had left
    rewards = {"a": 2.5, "b": 8.0, "c": 3.25, "d": 1.0}
    assert metrics.agent_rewards == {(agent, "p"): reward for agent, reward in rewards.items()}
    assert metrics.episode_reward == 14.75


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("unit", ["env_steps", "agent_steps"])
def test_random_crowds_keep_their_frames(mode, unit):
    """Of every trajectory, each row's frames are the two observations before it."""
    settings = {"batch_mode": mode, "count_steps_by": unit, "seed": 3}
    policies = {"p": stacking(), "q": stacking(seed=1)}
    worlds = [Crowd(i, seed=i) for i in range(3)]
    sampler = sampler_of(*worlds, policies=policies, rollout_fragment_length=9, **settings)
    last: dict[tuple[int, int], list[float]] = {}
    rows = 0
    for _ in range(12):
        for part in sampler.sample().policy_batches.values():
            names = ("eps_id", "agent_index", "obs", "new_obs")
            columns = (part[name].tolist() for name in names)
            for *key, obs, new in zip(*columns, strict=True):
                assert obs == last.get(tuple(key), obs[3:] + obs[3:])
                assert new == obs or new[:3] == obs[3:]
                last[tuple(key)] = new
            rows += part.count
    assert rows > 200


def test_without_connectors_and_with_idle_ones_batches_are_the_same():
    @register_connector
    class Idle(AgentConnector):
        def __call__(self, step):
            return step

    def batches(*agent: Any) -> list[Any]:
        policies = {name: Walker(seed=i) for i, name in enumerate("pq")}
        if agent:
            for policy in policies.values():
                connect(policy, *agent)
        worlds = [Crowd(i, seed=i) for i in range(2)]
        sampler = sampler_of(*worlds, policies=policies, rollout_fragment_length=11)
        return [sampler.sample() for _ in range(6)], sampler.metrics

    (plain, metrics), (idle, same) = batches(), batches(Idle())
    for one, other in zip(plain, idle, strict=True):
        assert_equal_batches(one, other)
    assert [m[:3] for m in metrics] == [m[:3] for m in same]
    assert metrics[0].connector_metrics == {}


@register_connector
class NamedActions(ActionConnector):
    """Gives each agent 10 x its environment + its number in place of its action."""

    def __call__(self, step):
        return step._replace(actions=10 * step.env_ids + step.agents)


def test_actions_pass_the_connectors_of_their_policy():
    named = connect(Walker(seed=1), action=[NamedActions()])
    sampler = staggered(Walker(), named, envs=2, length=4)
    batch = sampler.sample()
    first, second = (env.acted for env in sampler.envs.get_sub_environments())
    assert [acted["b"] for acted in first if "b" in acted] == [1, 1]
    assert [acted["b"] for acted in second if "b" in acted] == [11, 11]
    assert [acted["a"] for acted in first] == batch["p"]["actions"][:4].tolist()
    assert set(batch["q"]["actions"].tolist()) <= {0, 1, 2}


def test_connectors_of_actions_are_timed_apart():
    @register_connector
    class Slow(ActionConnector):
        def __call__(self, step):
            time.sleep(0.02)
            return step

    sampler = staggered(connect(Walker(), action=[Slow()]), Walker(seed=1))
    sampler.sample()
    (metrics,) = sampler.metrics
    slow = metrics.connector_metrics["p"]["action_connectors"]["Slow_ms"]
    assert list(metrics.connector_metrics) == ["p"]
    assert metrics.perf_stats["mean_action_processing_ms"] == pytest.approx(slow, rel=0.5)


class Mixed(World):
    """a and b see three numbers, c and d two."""

    observation_space = spaces.Dict(
        dict.fromkeys("ab", SPACE) | dict.fromkeys("cd", spaces.Box(-1.0, 1e6, (2,)))
    )

    def first(self):
        return self.obs("a")

    def play(self, actions):
        obs = self.obs("a") | ({"c": np.zeros(2, np.float32)} if self.now == 2 else {})
        return obs, {"a": 1.0}, flags(), flags(), {}


def test_an_agent_with_other_observations_is_refused_when_it_is_mapped():
    sampler = sampler_with(stacking(), Mixed(), length=5)
    with pytest.raises(ConfigError) as caught:
        sampler.sample()
    for part in ("Policy 'p'", "agent 'c'", "(2,)", "(3,)", "(6,)", "FrameStack", "PolicySpec"):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="reset"):
        sampler.sample()


def test_connectors_that_know_no_space_take_that_of_the_first_agent():
    policy = SixWalker(TWO_FRAMES)
    policy.agent_connectors = AgentConnectorPipeline([FrameStack(2)])
    sampler = sampler_with(policy, Staggered(), length=2)
    assert policy.agent_connectors.space == SPACE
    assert frames(sampler.sample()["p"]["obs"])[:2] == [[0, 0], [0, 1]]
    other = Walker()
    other.agent_connectors = AgentConnectorPipeline([FrameStack(2)])
    with pytest.raises(ConfigError, match=r"returns Box.*\(6,\).*acts on Box.*\(3,\)"):
        sampler_with(other, Staggered())


def test_observations_of_environments_are_checked_before_connectors():
    class Broken(Staggered):
        def play(self, actions):
            obs, *rest = super().play(actions)
            if self.now == 3:
                obs["a"][1] = np.nan
            return obs, *rest

    with pytest.raises(EnvError, match=r"agent 'a'.*environment 0 gave policy 'p' is not finite"):
        sampler_with(stacking(), Broken(), length=9).sample()


@register_connector
class Dividing(ObservationConnector):
    """Gives NaN where an observation is 0."""

    def _transform_space(self, space):
        return space

    def _transform(self, space, arrays, step):
        with np.errstate(all="ignore"):
            return arrays[0] * (arrays[0] / arrays[0])


def test_outputs_of_connectors_are_checked():
    with pytest.raises(ObservationError, match=r"from the connectors of policy 'p' is not finite"):
        sampler_with(connect(Walker(), Dividing()), Staggered())


def test_observation_fn_comes_before_connectors():
    def doubled(agent_obs, **kwargs):
        return {agent: 2 * obs for agent, obs in agent_obs.items()}

    sampler = staggered(stacking(), Walker(), observation_fn=doubled, length=3)
    assert frames(sampler.sample()["p"]["obs"])[:3] == [[0, 0], [0, 2], [2, 4]]


def test_other_connectors_begin_with_new_episodes():
    p, q = stacking(), connect(Walker(seed=1))
    sampler = staggered(p, q, length=3)
    (world,) = sampler.envs.get_sub_environments()
    sampler.sample()
    connect(p, FrameStack(2), ClipObservations(low=0.0, high=2.0))
    batch = sampler.sample()
    assert world.episode == 1
    assert frames(batch["p"]["obs"]) == [[0, 0], [0, 1], [1, 2]]
    assert frames(batch["p"]["new_obs"])[-1] == [2, 2]
    connect(q, ClipReward(limit=0.25))
    assert set(sampler.sample()["q"]["rewards"].tolist()) == {0.25}
    assert world.episode == 2


def test_running_episodes_with_connectors_have_no_state():
    class Saved(Staggered):
        def get_state(self):
            return {}

        def set_state(self, state):
            self.restored = state

    plain = sampler_of(Saved(), rollout_fragment_length=2)
    assert plain.get_state() is not None
    policies = {"p": stacking(), "q": Walker()}
    assert sampler_of(Saved(), policies=policies).get_state() is None


def test_episodes_of_an_evaluation_have_rewards_from_connectors():
    sampler = staggered(connect(Walker(), ClipReward(limit=0.5)), Walker(seed=1))
    episodes = sampler.play(EvaluationDuration(2, by_episodes=True), None).episodes
    assert [m.episode_reward for m in episodes] == [3.5 + 7.0] * 2
    assert [set(m.connector_metrics) for m in episodes] == [{"p"}] * 2


def test_rewards_are_clipped_for_learning_after_connectors():
    script = [(("a",), {"a": 4.0}, {}, {}), (("a",), {"a": 1.0}, {"__all__": True}, {})]
    policy = connect(Walker(), ClipReward(limit=1.5))
    sampler = sampler_with(policy, Scripted(script, ("a",)), length=2, clip_rewards=1.25)
    assert sampler.sample()["p"]["rewards"].tolist() == [1.25, 1.0]
    assert sampler.metrics[0].agent_rewards[("a", "p")] == 2.5


class Reading(SixWalker):
    """Reads the previous reward."""

    def reads_previous(self):
        return False, True


def test_models_read_previous_rewards_after_connectors():
    policy = connect(Reading(TWO_FRAMES), FrameStack(2), ClipReward(limit=0.5))
    batch = sampler_with(policy, Staggered(), length=7).sample()["p"]
    assert batch["prev_rewards"].tolist() == [0.0, *[0.5] * 6, 0.0, *[0.5] * 3]


class Pairs(Staggered):
    """Observations are pairs: a number, and the time by a Discrete."""

    observation_space = spaces.Tuple([spaces.Box(0.0, 9.0, (1,), np.float32), spaces.Discrete(8)])

    def obs(self, *agents):
        return {agent: (x[2:], int(x[2])) for agent, x in super().obs(*agents).items()}


class PairWalker(Walker):
    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        frames, times = obs_batch
        assert frames[:, 1].tolist() == times.tolist()
        return super().compute_actions(np.zeros((len(times), 3)), state_batches, **kwargs)

    def compute_values(self, inputs):
        return np.zeros(len(inputs[0]), np.float32)


def test_nested_observations_are_split_and_joined_again():
    space = spaces.Tuple([spaces.Box(0.0, 9.0, (2,), np.float32), spaces.Discrete(8)])
    policy = connect(PairWalker(space), FrameStack(2), space=Pairs.observation_space)
    sampler = sampler_with(policy, Pairs(), length=5)
    first, second = sampler.sample()["p"], sampler.sample()["p"]
    assert first["obs"][0][:5].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert first["new_obs"][1][:5].tolist() == [1, 2, 3, 4, 5]
    assert first["new_obs"][0][4].tolist() == second["obs"][0][0].tolist() == [4, 5]
    assert second["new_obs"][0][1].tolist() == [6, 7]


class Fragile(Staggered):
    """The first instance in a third step returns a wrong observation, while b is done."""

    broke: bool = False

    def play(self, actions):
        if self.now == 3 and not Fragile.broke:
            Fragile.broke = True
            obs = {"b": self.obs("b")["b"], "a": np.zeros(2)}
            return obs, {"a": 9.0}, flags(b=True), flags(), {}
        return super().play(actions)


def test_no_rows_of_a_broken_environment_remain():
    faults = {"restart_failed_sub_environments": True, "disable_env_checking": True}
    worker = town_worker(env=Fragile, num_envs_per_worker=2, **faults)
    p = worker.sample()["p"]
    times = [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert frames(p["obs"]) == times + times
    assert p["rewards"].tolist() == [1.0] * 14
    assert [m.episode_faulty for m in worker.get_metrics()] == [True, False, False]


def test_filters_see_outputs_of_connectors():
    worker = town_worker(observation_filter="MeanStdFilter")
    worker.sample()
    worker.sample()
    (stat,) = worker.filters["p"].statistics
    assert stat.count == 7
    np.testing.assert_allclose(stat.mean, [0, 0, 15 / 7, 0, 0, 3], rtol=1e-6)  # 0, 0..5; 0..6


CLIPPED = spaces.Box(-1.0, 2.0, (3,), np.float32)
CLIPPING = [ClipObservations(low=-1.0, high=2.0), ClipReward(limit=1.5)]
LOW = {"agent_connectors": [ClipObservations(low=-1.0, high=0.5)]}
FAR, NEAR, NEARER = ([0.0, 0.0, x] for x in (9.0, 2.0, 1.0))


def connected_by(*connectors: Any) -> PolicySpec:
    return PolicySpec(config=AlgorithmConfig.overrides(agent_connectors=[*connectors]))


def town(**settings: Any) -> dict[str, Any]:
    """Policy p stacks two frames; q clips what it sees at 2, and rewards at 1.5, as the config."""
    training = {"train_batch_size": 7, "sgd_minibatch_size": 7, "num_sgd_iter": 1}
    policies = {"p": connected_by(FrameStack(2)), "q": PolicySpec()}
    defaults = {"env": Staggered, "policies": policies, "policy_mapping_fn": a_to_p, **training}
    defaults |= {"rollout_fragment_length": 7, "agent_connectors": CLIPPING}
    return {**defaults, **settings}


def town_worker(**settings: Any) -> RolloutWorker:
    return make_worker(**town(**settings))


def town_algorithm(**settings: Any) -> Any:
    return make_config(**town(**settings)).build()


def test_a_worker_makes_each_policy_for_the_outputs_of_its_connectors():
    worker = town_worker()
    p, q = worker.get_policy("p"), worker.get_policy("q")
    assert p.observation_space == TWO_FRAMES
    assert q.observation_space == CLIPPED
    assert [spec.observation_space for spec in worker.policy_dict.values()] == [SPACE, SPACE]
    assert [x.name for x in q.agent_connectors] == ["ClipObservations", "ClipReward"]
    batch = worker.sample()
    assert frames(batch["p"]["obs"])[:3] == [[0, 0], [0, 1], [1, 2]]
    assert frames(batch["q"]["obs"]) == [[0], [2], [2], [2]]
    assert batch["q"]["rewards"].tolist() == [1.5, 1.5, 1.5, 1.0]
    assert p.get_connector_metrics()["agent_connectors"]["FrameStack_ms"] > 0.0


def test_an_empty_list_of_connectors_is_none():
    worker = town_worker(policies={"p": connected_by(), "q": PolicySpec()})
    p = worker.get_policy("p")
    assert (p.agent_connectors, p.observation_space) == (None, SPACE)
    assert worker.get_policy("q").observation_space == CLIPPED


class CustomWalker(SixWalker):
    def __init__(self, observation_space: Any, action_space: Any, config: Any) -> None:
        super().__init__(observation_space, action_space)
        self.config = dict(config)


def test_custom_policies_have_connectors():
    connectors = {"agent_connectors": [FrameStack(2)]}
    policies = {"p": PolicySpec(CustomWalker, config=connectors)}
    settings = {"policies": policies, "policy_mapping_fn": map_all_to("p")}
    worker = make_worker(Staggered, None, rollout_fragment_length=7, **settings)
    assert worker.sample()["p"]["obs"].shape == (11, 6)
    policy = CustomWalker(TWO_FRAMES, THREE, connectors)
    worker.add_policy("r", policy=policy, policy_mapping_fn=map_all_to("r"))
    worker.sample()
    assert worker.sample()["r"]["obs"].shape == (11, 6)
    assert worker.get_policy("r").agent_connectors.space == SPACE


def test_connectors_that_cannot_take_a_space_name_the_policy():
    class Words(World):
        observation_space = spaces.Text(3)

    policies = {"p": connected_by(FlattenObservations())}
    with pytest.raises(SpaceError, match="policy 'p' cannot be used"):
        town_worker(env=Words, disable_env_checking=True, policies=policies)


def test_connectors_that_are_disabled_are_refused_for_each_policy():
    config = make_config(**town(enable_connectors=False, agent_connectors=[]))
    with pytest.raises(ConfigError, match=r"agent_connectors of policies\['p'\] has 1 connectors"):
        config.validate()
    with pytest.raises(ConfigError, match=r"policies\['p'\].config\['agent_connectors'\] must be"):
        make_config(policies={"p": PolicySpec(config={"agent_connectors": [np.sign]})})


def test_training_evaluating_and_acting_use_each_policys_own():
    algorithm = town_algorithm(evaluation_duration=2)
    result = algorithm.train()
    names = {"ClipObservations_ms", "ClipReward_ms", "FrameStack_ms"}
    assert set(result["connector_metrics"]) == names
    assert result["connector_metrics"] == result["sampler_results"]["connector_metrics"]
    assert result["policy_reward_mean"] == {"p": 7.0, "q": 5.5}
    evaluation = algorithm.evaluate()["evaluation"]
    assert evaluation["episode_reward_mean"] == 12.5
    assert evaluation["connector_metrics"]["FrameStack_ms"] > 0.0
    near = get_logits(algorithm, NEAR, "q")
    assert get_logits(algorithm, FAR, "q") == near != get_logits(algorithm, NEARER, "q")
    actions = algorithm.compute_actions({"x": FAR, "y": NEAR}, policy_id="q", explore=False)
    assert actions["x"] == actions["y"]
    with pytest.raises(UsageError, match="FrameStack needs a whole episode"):
        algorithm.compute_single_action(NEAR, policy_id="p")
    algorithm.stop()


def test_a_checkpoint_restores_the_connectors_of_each_policy(tmp_path):
    algorithm = town_algorithm()
    added = algorithm.add_policy("r", PPOTF2Policy, config=LOW, policy_mapping_fn=a_to_p_or_r)
    assert added.observation_space == spaces.Box(-1.0, 0.5, (3,), np.float32)
    algorithm.train()
    batch = algorithm.worker.sample()
    assert set(batch.policy_batches) == {"p", "r"}
    assert batch["r"]["obs"].max() <= 0.5
    algorithm.evaluate()
    algorithm.save(tmp_path)
    restore, config = type(algorithm).from_checkpoint, {"env": Staggered}
    again = restore(tmp_path, config=config, policy_mapping_fn=a_to_p_or_r)
    for policy_id in "pqr":
        old, new = (x.get_policy(policy_id) for x in (algorithm, again))
        assert new.observation_space == old.observation_space
        assert new.agent_connectors.to_state() == old.agent_connectors.to_state()
        assert new.agent_connectors.space == SPACE
        assert new.get_state()["connector_configs"] == old.get_state()["connector_configs"]
        assert again.worker.policy_dict[policy_id].observation_space == SPACE
    assert get_logits(again, FAR, "r") == get_logits(algorithm, FAR, "r")
    assert set(again.train()["connector_metrics"]) == {"ClipObservations_ms", "FrameStack_ms"}
    assert frames(again.worker.sample()["p"]["obs"])[0] == [0, 0]
    again.evaluate()
    restored = town_algorithm()
    restored.restore(tmp_path)
    assert get_logits(restored, FAR, "r") == get_logits(algorithm, FAR, "r")
    restored.remove_policy("r", policy_mapping_fn=a_to_p)
    assert set(restored.worker.sample().policy_batches) == {"p", "q"}
    one = PPOTF2Policy.from_checkpoint(tmp_path, policy_ids=["r"])["r"]
    assert one.agent_connectors.space == SPACE
    for run in (algorithm, again, restored):
        run.stop()


def test_states_of_workers_have_connectors():
    one, other = town_worker(), town_worker()
    one.add_policy("r", PPOTF2Policy, config={"agent_connectors": [FrameStack(3)]})
    connectors = other.get_policy("p").agent_connectors
    other.set_state(one.get_state())
    assert other.get_policy("p").agent_connectors is connectors  # with their memory
    r = other.get_policy("r")
    assert (r.agent_connectors.space, r.observation_space.shape) == (SPACE, (9,))
    assert other.policy_dict["r"].observation_space == SPACE
    other.set_policy_mapping_fn(a_to_p_or_r)
    other.sample()
    assert other.sample()["r"]["obs"].shape == (4, 9)


def test_a_learner_whose_workers_sample_elsewhere_has_each_policys_own(ray_cluster, tmp_path):
    algorithm = town_algorithm(num_rollout_workers=1, num_cpus_per_worker=0)
    assert algorithm.get_policy("p").observation_space == TWO_FRAMES
    assert algorithm.get_policy("q").observation_space == CLIPPED
    assert get_logits(algorithm, FAR, "q") == get_logits(algorithm, NEAR, "q")
    result = algorithm.train()
    assert result["policy_reward_mean"] == {"p": 7.0, "q": 5.5}
    added = algorithm.add_policy("r", PPOTF2Policy, config=LOW, policy_mapping_fn=a_to_p_or_r)
    assert added.agent_connectors.space == SPACE
    algorithm.train()
    assert algorithm.train()["policy_reward_mean"]["r"] == 7.0
    highest = algorithm.workers.foreach_worker(
        lambda worker: float(worker.sample()["r"]["obs"][:, 2].max()), local_worker=False
    )
    assert highest == [0.5]
    algorithm.save(tmp_path)
    algorithm.stop()
    local = {"env": Staggered, "num_rollout_workers": 0}
    restore = type(algorithm).from_checkpoint
    alone = restore(tmp_path, config=local, policy_mapping_fn=a_to_p_or_r)
    assert alone.get_policy("r").agent_connectors.space == SPACE
    assert set(alone.worker.sample().policy_batches) == {"p", "r"}
    alone.stop()


def test_the_policy_of_one_agent_may_override_connectors():
    policies = {"default_policy": connected_by(FrameStack(2))}
    settings = {"policies": policies, "agent_connectors": [FrameStack(3)]}
    settings |= {"env_config": {"length": 3}, "rollout_fragment_length": 4}
    worker = make_worker(Counter, PGTF2Policy, **settings)
    assert worker.sample()["obs"].shape == (4, 2)
    (metrics,) = worker.get_metrics()
    times = metrics.connector_metrics["default_policy"]["agent_connectors"]
    assert summarize_episodes([metrics])["connector_metrics"] == times
    assert set(times) == {"FrameStack_ms"}


def game(name: str, *connectors: Any) -> Any:
    settings = {"rollout_fragment_length": 40, "num_envs_per_worker": 2}
    settings |= {"policies": {"all"}, "policy_mapping_fn": map_all_to("all")}
    return make_worker(name, agent_connectors=[*connectors], **settings)


def test_a_game_of_pettingzoo():
    pytest.importorskip("mpe2")
    worker = game("mpe2:simple_spread_v3", FlattenObservations(), FrameStack(2))
    batch = worker.sample()["all"]
    assert batch["obs"].shape == (240, 36)
    first = batch["t"] == 0
    np.testing.assert_array_equal(batch["obs"][first, :18], batch["obs"][first, 18:])
    np.testing.assert_array_equal(batch["obs"][1:25, :18], batch["obs"][:24, 18:])
    np.testing.assert_array_equal(batch["new_obs"][:25, :18], batch["obs"][:25, 18:])


def test_masks_pass_connectors_unchanged():
    pytest.importorskip("pettingzoo")
    worker = game("pettingzoo:classic/connect_four_v3", FlattenObservations())
    policy = worker.get_policy("all")
    assert policy.observation_space["observations"].shape == (84,)
    batch = worker.sample()["all"]
    assert batch["obs"]["observations"].shape == (batch.count, 84)
    rows = np.arange(batch.count)
    assert batch["obs"]["action_mask"][rows, batch["actions"]].all()
    assert not batch["obs"]["action_mask"].all()
