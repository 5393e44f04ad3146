"""Each policy's own connectors, in environments with several agents."""

from __future__ import annotations

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
    sampler_of,
)
from tfpolicies import (
    AlgorithmConfig,
    PGTF2Policy,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
)
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


def connect(policy: Any, *agent: Any, action: Any = (), space: Any = SPACE) -> Any:
    """Gives a policy connectors, as a worker does it."""
    policy.agent_connectors = AgentConnectorPipeline(agent)
    policy.agent_connectors.connect(space)
    policy.action_connectors = ActionConnectorPipeline(action)
    policy.action_connectors.connect(policy.action_space)
    return policy


def stacking(**settings: Any) -> Walker:
    return connect(SixWalker(TWO_FRAMES, **settings), FrameStack(2))


class SixWalker(Walker):
    """Its value is of the last frame."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return super().compute_actions(obs_batch[:, 3:], state_batches, **kwargs)

    def compute_values(self, inputs):
        return super().compute_values([inputs[0][:, 3:]])


def frames(column: Any) -> list[list[float]]:
    """The times of the frames of each row."""
    return [[row[i] for i in range(2, len(row), 3)] for row in column.tolist()]


# -- observations and rewards -----------------------------------------------------------------


def each_its_own(agent_id: str, episode: Any, **kwargs: Any) -> str:
    return "p" if agent_id == "a" else "q"


def test_each_policy_sees_through_its_own_connectors():
    """Agent a sees each step, b every second; everybody earns 1 a step: b 2, 2, 2 and 1."""
    policies = {"p": stacking(), "q": connect(Walker(seed=1), ClipReward(limit=1.5))}
    sampler = sampler_of(
        Staggered(), policies=policies, mapping=each_its_own, rollout_fragment_length=7
    )
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
    again = sampler.sample()
    assert frames(again["p"]["obs"])[:2] == [[0, 0], [0, 1]]
    assert [row[1] for row in again["p"]["obs"].tolist()] == [1.0] * 7


def test_a_truncated_fragment_ends_with_what_comes_next_and_the_next_one_goes_on():
    policies = {"p": stacking(), "q": connect(Walker(seed=1), ClipReward(sign=True))}
    sampler = sampler_of(
        Staggered(), policies=policies, mapping=each_its_own, rollout_fragment_length=3
    )
    first, second = sampler.sample(), sampler.sample()
    assert frames(first["p"]["new_obs"])[-1] == [2, 3] == frames(second["p"]["obs"])[0]
    assert frames(second["p"]["obs"]) == [[2, 3], [3, 4], [4, 5]]
    assert first["p"]["values_bootstrapped"][-1] == second["p"]["vf_preds"][0]
    assert frames(first["q"]["obs"]) == [[0]]
    assert frames(second["q"]["obs"]) == [[2], [4]]
    assert second["q"]["rewards"].tolist() == [1.0, 1.0]


def test_copies_that_wait_for_others_send_nothing_twice():
    policies = {"p": stacking(), "q": stacking(seed=1)}
    sampler = sampler_of(
        Staggered(),
        Staggered(),
        policies=policies,
        mapping=each_its_own,
        rollout_fragment_length=4,
        count_steps_by="agent_steps",
    )
    before: dict[tuple[int, str], list[float]] = {}
    for _ in range(4):
        batch = sampler.sample()
        for policy_id in ("p", "q"):
            rows = batch[policy_id]
            for eps, obs, new in zip(rows["eps_id"], rows["obs"], rows["new_obs"], strict=True):
                key = int(eps), policy_id
                expected = before.get(key, [obs[2], obs[2]])
                assert obs[[2, 5]].tolist() == expected
                assert new[2] == obs[5]
                before[key] = new[[2, 5]].tolist()


def test_agents_that_leave_and_come():
    """b leaves with a last observation, c comes, d comes and leaves without a last observation."""
    script = [
        (("a", "b", "c"), {"a": 5.0, "b": 5.0, "c": 9.0}, {"b": True}, {}),
        (("a", "c", "d"), {"a": 0.5, "b": 7.0, "c": 3.0}, {}, {}),
        (("a", "c"), {"c": 0.25, "d": 2.0}, {"d": True}, {}),
        (("a",), {"a": 4.0, "c": 6.0}, {"__all__": True}, {}),
    ]
    policy = connect(SixWalker(TWO_FRAMES), FrameStack(2), ClipReward(limit=1.0))
    sampler = sampler_of(
        Scripted(script),
        policies={"p": policy},
        mapping=lambda *_, **__: "p",
        rollout_fragment_length=4,
    )
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
    rewards = {
        agent: batch["rewards"][batch["agent_index"] == agent].tolist() for agent in range(4)
    }
    assert rewards == {0: [1.0, 0.5, 0.0, 1.0], 1: [1.0], 2: [1.0, 0.25, 1.0], 3: [1.0]}
    (metrics,) = sampler.metrics
    # c earned 9 in the step that it came in; b's 7 came after it had left
    assert metrics.agent_rewards == {
        ("a", "p"): 2.5,
        ("b", "p"): 8.0,
        ("c", "p"): 3.25,
        ("d", "p"): 1.0,
    }
    assert metrics.episode_reward == 14.75


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_random_crowds_keep_their_frames(mode):
    """Of every trajectory, each row's frames are the two observations before it."""
    worlds = [Crowd(i, seed=i) for i in range(3)]
    policies = {"p": stacking(), "q": stacking(seed=1)}
    sampler = sampler_of(
        *worlds, policies=policies, rollout_fragment_length=9, batch_mode=mode, seed=3
    )
    last: dict[tuple[int, int], list[float]] = {}
    rows = 0
    for _ in range(12):
        for part in sampler.sample().policy_batches.values():
            keys = zip(part["eps_id"].tolist(), part["agent_index"].tolist(), strict=True)
            for key, obs, new in zip(
                keys, part["obs"].tolist(), part["new_obs"].tolist(), strict=True
            ):
                before = last.get(key)
                assert obs == (before if before else obs[3:] + obs[3:])
                assert new == obs or new[:3] == obs[3:]
                last[key] = new
                rows += 1
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
        assert set(one.policy_batches) == set(other.policy_batches)
        for policy_id, part in one.policy_batches.items():
            for name, column in part.items():
                np.testing.assert_array_equal(column, other[policy_id][name], err_msg=name)
    assert [m[:3] for m in metrics] == [m[:3] for m in same]
    assert metrics[0].connector_metrics == {}


# -- actions ----------------------------------------------------------------------------------


@register_connector
class NamedActions(ActionConnector):
    """Gives each agent 10 x its environment + its number in place of its action."""

    def __call__(self, step):
        return step._replace(actions=10 * step.env_ids + step.agents)


def test_actions_go_back_through_the_policys_own():
    worlds = [Staggered(), Staggered()]
    policies = {"p": Walker(), "q": connect(Walker(seed=1), action=[NamedActions()])}
    sampler = sampler_of(
        *worlds, policies=policies, mapping=each_its_own, rollout_fragment_length=4
    )
    batch = sampler.sample()
    assert [acted["b"] for acted in worlds[0].acted if "b" in acted] == [1, 1]
    assert [acted["b"] for acted in worlds[1].acted if "b" in acted] == [11, 11]
    assert [acted["a"] for acted in worlds[0].acted] == batch["p"]["actions"][:4].tolist()
    assert set(batch["q"]["actions"].tolist()) <= {0, 1, 2}


def test_connectors_of_actions_are_timed_apart():
    @register_connector
    class Slow(ActionConnector):
        def __call__(self, step):
            sum(range(200_000))
            return step

    policies = {"p": connect(Walker(), action=[Slow()]), "q": Walker(seed=1)}
    sampler = sampler_of(Staggered(), policies=policies, rollout_fragment_length=7)
    sampler.sample()
    (metrics,) = sampler.metrics
    slow = metrics.connector_metrics["p"]["action_connectors"]["Slow_ms"]
    assert list(metrics.connector_metrics) == ["p"]
    assert metrics.perf_stats["mean_action_processing_ms"] == pytest.approx(slow, rel=0.5)


# -- what is refused --------------------------------------------------------------------------


class Mixed(World):
    """a and b see three numbers, c and d two."""

    observation_space = spaces.Dict(
        {x: SPACE if x in "ab" else spaces.Box(-1.0, 1e6, (2,), np.float32) for x in "abcd"}
    )

    def first(self):
        return self.obs("a")

    def play(self, actions):
        seen = self.obs("a")
        if self.now == 2:
            seen["c"] = np.zeros(2, np.float32)
        return seen, {"a": 1.0}, {"__all__": False}, {"__all__": False}, {}


def test_an_agent_whose_observations_do_not_go_in_is_refused_when_it_is_mapped():
    sampler = sampler_of(
        Mixed(), policies={"p": stacking()}, mapping=lambda *_, **__: "p", rollout_fragment_length=5
    )
    with pytest.raises(ConfigError) as caught:
        sampler.sample()
    for part in ("Policy 'p'", "agent 'c'", "(2,)", "(3,)", "(6,)", "FrameStack", "PolicySpec"):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="reset"):
        sampler.sample()


def test_connectors_that_know_no_space_take_that_of_the_first_agent():
    policy = SixWalker(TWO_FRAMES)
    policy.agent_connectors = AgentConnectorPipeline([FrameStack(2)])
    sampler = sampler_of(
        Staggered(), policies={"p": policy}, mapping=lambda *_, **__: "p", rollout_fragment_length=2
    )
    assert policy.agent_connectors.space == SPACE
    assert frames(sampler.sample()["p"]["obs"])[:2] == [[0, 0], [0, 1]]
    other = Walker()
    other.agent_connectors = AgentConnectorPipeline([FrameStack(2)])
    with pytest.raises(ConfigError, match=r"returns Box.*\(6,\).*acts on Box.*\(3,\)"):
        sampler_of(Staggered(), policies={"p": other}, mapping=lambda *_, **__: "p")


def test_observations_of_environments_are_checked_before_connectors():
    class Broken(Staggered):
        def play(self, actions):
            seen, *rest = super().play(actions)
            if self.now == 3:
                seen["a"][1] = np.nan
            return seen, *rest

    sampler = sampler_of(
        Broken(),
        policies={"p": stacking()},
        mapping=lambda *_, **__: "p",
        rollout_fragment_length=9,
    )
    with pytest.raises(EnvError, match=r"agent 'a'.*environment 0 gave policy 'p' is not finite"):
        sampler.sample()


@register_connector
class Dividing(ObservationConnector):
    """Gives NaN where an observation is 0."""

    def _transform_space(self, space):
        return space

    def _transform(self, space, arrays, step):
        with np.errstate(all="ignore"):
            return arrays[0] * (arrays[0] / arrays[0])


def test_what_connectors_give_is_checked():
    with pytest.raises(ObservationError, match=r"from the connectors of policy 'p' is not finite"):
        sampler_of(
            Staggered(),
            policies={"p": connect(Walker(), Dividing())},
            mapping=lambda *_, **__: "p",
        )


# -- policies that change ---------------------------------------------------------------------


def test_observation_fn_comes_before_connectors():
    def doubled(agent_obs, **kwargs):
        return {agent: 2 * obs for agent, obs in agent_obs.items()}

    policies = {"p": stacking(), "q": Walker()}
    sampler = sampler_of(
        Staggered(), policies=policies, observation_fn=doubled, rollout_fragment_length=3
    )
    assert frames(sampler.sample()["p"]["obs"])[:3] == [[0, 0], [0, 2], [2, 4]]


def test_other_connectors_begin_with_new_episodes():
    policies = {"p": stacking(), "q": connect(Walker(seed=1))}
    world = Staggered()
    sampler = sampler_of(world, policies=policies, mapping=each_its_own, rollout_fragment_length=3)
    sampler.sample()
    connect(policies["p"], FrameStack(2), ClipObservations(low=0.0, high=2.0))
    batch = sampler.sample()
    assert world.episode == 1
    assert frames(batch["p"]["obs"]) == [[0, 0], [0, 1], [1, 2]]
    assert frames(batch["p"]["new_obs"])[-1] == [2, 2]
    connect(policies["q"], ClipReward(limit=0.25))
    assert set(sampler.sample()["q"]["rewards"].tolist()) == {0.25}
    assert world.episode == 2


def test_running_episodes_with_connectors_are_not_told():
    class Told(Staggered):
        def get_state(self):
            return {}

    plain = sampler_of(Told(), rollout_fragment_length=2)
    assert plain.get_state() is not None
    policies = {"p": stacking(), "q": Walker()}
    assert sampler_of(Told(), policies=policies).get_state() is None


def test_playing_tells_what_connectors_made_of_rewards():
    policies = {"p": connect(Walker(), ClipReward(limit=0.5)), "q": Walker(seed=1)}
    sampler = sampler_of(Staggered(), policies=policies, mapping=each_its_own)
    played = sampler.play(EvaluationDuration(2, by_episodes=True), None).episodes
    assert [m.episode_reward for m in played] == [3.5 + 7.0] * 2
    assert [set(m.connector_metrics) for m in played] == [{"p"}] * 2


# -- what comes before and after --------------------------------------------------------------


def test_rewards_are_clipped_for_learning_after_connectors():
    policies = {"p": connect(Walker(), ClipReward(limit=1.5)), "q": Walker(seed=1)}
    sampler = sampler_of(
        Scripted([(("a",), {"a": 4.0}, {}, {}), (("a",), {"a": 1.0}, {"__all__": True}, {})]),
        policies=policies,
        mapping=each_its_own,
        rollout_fragment_length=2,
        clip_rewards=1.25,
    )
    assert sampler.sample()["p"]["rewards"].tolist() == [1.25, 1.0]
    assert sampler.metrics[0].agent_rewards[("a", "p")] == 2.5


class Reading(SixWalker):
    """Reads the previous reward."""

    def reads_previous(self):
        return False, True


def test_models_read_previous_rewards_behind_connectors():
    policy = connect(Reading(TWO_FRAMES), FrameStack(2), ClipReward(limit=0.5))
    sampler = sampler_of(
        Staggered(), policies={"p": policy}, mapping=lambda *_, **__: "p", rollout_fragment_length=7
    )
    batch = sampler.sample()["p"]
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


def test_nested_observations_are_taken_apart_and_put_together():
    space = spaces.Tuple([spaces.Box(0.0, 9.0, (2,), np.float32), spaces.Discrete(8)])
    policy = connect(PairWalker(space), FrameStack(2), space=Pairs.observation_space)
    sampler = sampler_of(
        Pairs(), policies={"p": policy}, mapping=lambda *_, **__: "p", rollout_fragment_length=5
    )
    first, second = sampler.sample()["p"], sampler.sample()["p"]
    assert first["obs"][0][:5].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert first["new_obs"][1][:5].tolist() == [1, 2, 3, 4, 5]
    assert first["new_obs"][0][4].tolist() == second["obs"][0][0].tolist() == [4, 5]
    assert second["new_obs"][0][1].tolist() == [6, 7]


class Fragile(Staggered):
    """Whoever comes first to a third step gives what is no observation, while b is done."""

    broke: bool = False

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def play(self, actions):
        if self.now == 3 and not Fragile.broke:
            Fragile.broke = True
            seen = {"b": self.obs("b")["b"], "a": np.zeros(2)}
            return seen, {"a": 9.0}, {"b": True, "__all__": False}, {"__all__": False}, {}
        return super().play(actions)


def test_an_environment_that_breaks_leaves_nothing_behind():
    config = town().environment(Fragile, disable_env_checking=True)
    config.rollouts(num_envs_per_worker=2)
    config.fault_tolerance(restart_failed_sub_environments=True)
    worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    p = worker.sample()["p"]
    whole = [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert frames(p["obs"]) == whole + whole
    assert p["rewards"].tolist() == [1.0] * 14
    assert [m.episode_faulty for m in worker.get_metrics()] == [True, False, False]
    worker.stop()


def test_filters_see_what_connectors_give():
    config = town(observation_filter="MeanStdFilter")
    worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    worker.sample()
    worker.sample()
    (stat,) = worker.filters["p"].statistics
    assert stat.count == 7
    np.testing.assert_allclose(stat.mean, [0, 0, 15 / 7, 0, 0, 3], rtol=1e-6)  # 0, 0..5; 0..6
    worker.stop()


# -- workers and algorithms -------------------------------------------------------------------


class Town(Staggered):
    """A staggered world as configs make it."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()


CLIPPED = spaces.Box(-1.0, 2.0, (3,), np.float32)


def town(**settings: Any) -> PPOConfig:
    """Policy p stacks two frames; q clips what it sees at 2, and rewards at 1.5, as all would."""
    made = PPOConfig().environment(Town).debugging(seed=0, log_level="ERROR")
    made.framework(inference="tf", jit_compile=False)
    made.training(train_batch_size=7, sgd_minibatch_size=7, num_sgd_iter=1)
    made.training(model={"fcnet_hiddens": [4]})
    made.rollouts(
        rollout_fragment_length=7,
        agent_connectors=[ClipObservations(low=-1.0, high=2.0), ClipReward(limit=1.5)],
        **settings,
    )
    own = PolicySpec(config=AlgorithmConfig.overrides(agent_connectors=[FrameStack(2)]))
    return made.multi_agent(policies={"p": own, "q": PolicySpec()}, policy_mapping_fn=each_its_own)


def logits(algorithm: Any, observation: Any, policy_id: str) -> list[float]:
    result = algorithm.compute_single_action(
        observation, policy_id=policy_id, explore=False, full_fetch=True
    )
    return result[2]["action_dist_inputs"].tolist()


def test_a_worker_makes_each_policy_for_what_its_own_connectors_give():
    worker = RolloutWorker(config=town(), default_policy_class=PPOTF2Policy)
    p, q = worker.get_policy("p"), worker.get_policy("q")
    assert p.observation_space == TWO_FRAMES
    assert q.observation_space == CLIPPED
    assert [spec.observation_space for spec in worker.policy_dict.values()] == [SPACE, SPACE]
    assert [each.name for each in q.agent_connectors] == ["ClipObservations", "ClipReward"]
    batch = worker.sample()
    assert frames(batch["p"]["obs"])[:3] == [[0, 0], [0, 1], [1, 2]]
    assert frames(batch["q"]["obs"]) == [[0], [2], [2], [2]]
    assert batch["q"]["rewards"].tolist() == [1.5, 1.5, 1.5, 1.0]
    assert p.get_connector_metrics()["agent_connectors"]["FrameStack_ms"] > 0.0
    worker.stop()


def test_an_empty_list_is_none_at_all():
    config = town().multi_agent(
        policies={"p": PolicySpec(config={"agent_connectors": []}), "q": PolicySpec()}
    )
    worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    p = worker.get_policy("p")
    assert (p.agent_connectors, p.observation_space) == (None, SPACE)
    assert worker.get_policy("q").observation_space == CLIPPED
    worker.stop()


def test_policies_written_by_hand_have_connectors_too():
    config = AlgorithmConfig().environment(Town).rollouts(rollout_fragment_length=7)
    made = {"p": PolicySpec(ByHand, config={"agent_connectors": [FrameStack(2)]})}
    config.multi_agent(policies=made, policy_mapping_fn=lambda *_, **__: "p")
    worker = RolloutWorker(config=config)
    assert worker.sample()["p"]["obs"].shape == (11, 6)
    made = ByHand(TWO_FRAMES, THREE, {"agent_connectors": [FrameStack(2)]})
    worker.add_policy("r", policy=made, policy_mapping_fn=lambda *_, **__: "r")
    worker.sample()
    assert worker.sample()["r"]["obs"].shape == (11, 6)
    assert worker.get_policy("r").agent_connectors.space == SPACE


class ByHand(SixWalker):
    def __init__(self, observation_space: Any, action_space: Any, config: Any) -> None:
        super().__init__(observation_space, action_space)
        self.config = dict(config)


def test_connectors_that_cannot_take_a_space_name_the_policy():
    class Words(World):
        observation_space = spaces.Text(3)

    config = town().environment(Words, disable_env_checking=True)
    flat = PolicySpec(config={"agent_connectors": [FlattenObservations()]})
    config.multi_agent(policies={"p": flat})
    with pytest.raises(SpaceError, match="policy 'p' cannot be used"):
        RolloutWorker(config=config, default_policy_class=PPOTF2Policy)


def test_off_means_off_for_each_policy():
    config = town().rollouts(enable_connectors=False, agent_connectors=[])
    with pytest.raises(ConfigError, match=r"agent_connectors of policies\['p'\] has 1 connectors"):
        config.validate()
    with pytest.raises(ConfigError, match=r"policies\['p'\].config\['agent_connectors'\] must be"):
        town().multi_agent(policies={"p": PolicySpec(config={"agent_connectors": [np.sign]})})


def test_training_evaluating_and_acting_use_each_policys_own():
    algorithm = town().evaluation(evaluation_duration=2).build()
    result = algorithm.train()
    assert set(result["connector_metrics"]) == {
        "ClipObservations_ms",
        "ClipReward_ms",
        "FrameStack_ms",
    }
    assert result["connector_metrics"] == result["sampler_results"]["connector_metrics"]
    assert result["policy_reward_mean"] == {"p": 7.0, "q": 5.5}
    evaluation = algorithm.evaluate()["evaluation"]
    assert evaluation["episode_reward_mean"] == 12.5
    assert evaluation["connector_metrics"]["FrameStack_ms"] > 0.0
    far, near, nearer = ([0.0, 0.0, x] for x in (9.0, 2.0, 1.0))
    assert logits(algorithm, far, "q") == logits(algorithm, near, "q")
    assert logits(algorithm, near, "q") != logits(algorithm, nearer, "q")
    actions = algorithm.compute_actions({"x": far, "y": near}, policy_id="q", explore=False)
    assert actions["x"] == actions["y"]
    with pytest.raises(UsageError, match="FrameStack needs a whole episode"):
        algorithm.compute_single_action(near, policy_id="p")
    algorithm.stop()


def test_a_checkpoint_brings_each_policys_own_back(tmp_path):
    algorithm = town().build()
    low = {"agent_connectors": [ClipObservations(low=-1.0, high=0.5)]}
    added = algorithm.add_policy("r", PPOTF2Policy, config=low, policy_mapping_fn=each_or_r)
    assert added.observation_space == spaces.Box(-1.0, 0.5, (3,), np.float32)
    algorithm.train()
    batch = algorithm.worker.sample()
    assert set(batch.policy_batches) == {"p", "r"}
    assert batch["r"]["obs"].max() <= 0.5
    algorithm.evaluate()
    algorithm.save(tmp_path)
    again = type(algorithm).from_checkpoint(
        tmp_path, config={"env": Town}, policy_mapping_fn=each_or_r
    )
    for policy_id in "pqr":
        old, new = (x.get_policy(policy_id) for x in (algorithm, again))
        assert new.observation_space == old.observation_space
        assert new.agent_connectors.to_state() == old.agent_connectors.to_state()
        assert new.agent_connectors.space == SPACE
        assert new.get_state()["connector_configs"] == old.get_state()["connector_configs"]
        assert again.worker.policy_dict[policy_id].observation_space == SPACE
    assert logits(again, [0.0, 0.0, 9.0], "r") == logits(algorithm, [0.0, 0.0, 9.0], "r")
    assert set(again.train()["connector_metrics"]) == {"ClipObservations_ms", "FrameStack_ms"}
    assert frames(again.worker.sample()["p"]["obs"])[0] == [0, 0]
    again.evaluate()
    restored = town().build()
    restored.restore(tmp_path)
    assert logits(restored, [0.0, 0.0, 9.0], "r") == logits(algorithm, [0.0, 0.0, 9.0], "r")
    restored.remove_policy("r", policy_mapping_fn=each_its_own)
    assert set(restored.worker.sample().policy_batches) == {"p", "q"}
    one = PPOTF2Policy.from_checkpoint(tmp_path, policy_ids=["r"])["r"]
    assert one.agent_connectors.space == SPACE
    for each in (algorithm, again, restored):
        each.stop()


def each_or_r(agent_id: str, episode: Any, **kwargs: Any) -> str:
    return "p" if agent_id == "a" else "r"


def test_states_of_workers_carry_connectors_along():
    one, other = (RolloutWorker(config=town(), default_policy_class=PPOTF2Policy) for _ in range(2))
    one.add_policy("r", PPOTF2Policy, config={"agent_connectors": [FrameStack(3)]})
    kept = other.get_policy("p").agent_connectors
    other.set_state(one.get_state())
    assert other.get_policy("p").agent_connectors is kept  # with all that it remembers
    r = other.get_policy("r")
    assert (r.agent_connectors.space, r.observation_space.shape) == (SPACE, (9,))
    assert other.policy_dict["r"].observation_space == SPACE
    other.set_policy_mapping_fn(each_or_r)
    other.sample()
    assert other.sample()["r"]["obs"].shape == (4, 9)
    for worker in (one, other):
        worker.stop()


def test_a_learner_whose_workers_sample_elsewhere_has_each_policys_own(ray_cluster, tmp_path):
    config = town(num_rollout_workers=1).resources(num_cpus_per_worker=0)
    algorithm = config.build()
    assert algorithm.get_policy("p").observation_space == TWO_FRAMES
    assert algorithm.get_policy("q").observation_space == CLIPPED
    assert logits(algorithm, [0.0, 0.0, 9.0], "q") == logits(algorithm, [0.0, 0.0, 2.0], "q")
    result = algorithm.train()
    assert result["policy_reward_mean"] == {"p": 7.0, "q": 5.5}
    low = {"agent_connectors": [ClipObservations(low=-1.0, high=0.5)]}
    added = algorithm.add_policy("r", PPOTF2Policy, config=low, policy_mapping_fn=each_or_r)
    assert added.agent_connectors.space == SPACE
    algorithm.train()
    assert algorithm.train()["policy_reward_mean"]["r"] == 7.0
    highest = algorithm.workers.foreach_worker(highest_of_r, local_worker=False)
    assert highest == [0.5]
    algorithm.save(tmp_path)
    algorithm.stop()
    alone = type(algorithm).from_checkpoint(
        tmp_path,
        config={"env": Town, "num_rollout_workers": 0},
        policy_mapping_fn=each_or_r,
    )
    assert alone.get_policy("r").agent_connectors.space == SPACE
    assert set(alone.worker.sample().policy_batches) == {"p", "r"}
    alone.stop()


def highest_of_r(worker: Any) -> float:
    return float(worker.sample()["r"]["obs"][:, 2].max())


def test_one_agents_policy_may_override_connectors_too():
    from rollout.test_connector_env import Counting

    config = AlgorithmConfig().environment(Counting).rollouts(rollout_fragment_length=4)
    config.rollouts(agent_connectors=[FrameStack(3)])
    config.multi_agent(
        policies={"default_policy": PolicySpec(config={"agent_connectors": [FrameStack(2)]})}
    )
    worker = RolloutWorker(config=config, default_policy_class=PGTF2Policy)
    assert worker.sample()["obs"].shape == (4, 2)
    (metrics,) = worker.get_metrics()
    times = metrics.connector_metrics["default_policy"]["agent_connectors"]
    assert summarize_episodes([metrics])["connector_metrics"] == times
    assert set(times) == {"FrameStack_ms"}
    worker.stop()


# -- games ------------------------------------------------------------------------------------


def game(name: str, *connectors: Any) -> Any:
    config = PPOConfig().environment(name).debugging(seed=0, log_level="ERROR")
    config.framework(inference="tf", jit_compile=False)
    config.training(model={"fcnet_hiddens": [4]})
    config.rollouts(rollout_fragment_length=40, num_envs_per_worker=2)
    config.rollouts(agent_connectors=[*connectors])
    config.multi_agent(policies={"all"}, policy_mapping_fn=lambda *_, **__: "all")
    return RolloutWorker(config=config, default_policy_class=PPOTF2Policy)


def test_a_game_of_pettingzoo():
    pytest.importorskip("mpe2")
    worker = game("mpe2:simple_spread_v3", FlattenObservations(), FrameStack(2))
    batch = worker.sample()["all"]
    assert batch["obs"].shape == (240, 36)
    first = batch["t"] == 0
    np.testing.assert_array_equal(batch["obs"][first, :18], batch["obs"][first, 18:])
    np.testing.assert_array_equal(batch["obs"][1:25, :18], batch["obs"][:24, 18:])
    np.testing.assert_array_equal(batch["new_obs"][:25, :18], batch["obs"][:25, 18:])
    worker.stop()


def test_masks_pass_beside_what_connectors_change():
    pytest.importorskip("pettingzoo")
    worker = game("pettingzoo:classic/connect_four_v3", FlattenObservations())
    policy = worker.get_policy("all")
    assert policy.observation_space["observations"].shape == (84,)
    batch = worker.sample()["all"]
    assert batch["obs"]["observations"].shape == (batch.count, 84)
    rows = np.arange(batch.count)
    assert batch["obs"]["action_mask"][rows, batch["actions"]].all()
    assert not batch["obs"]["action_mask"].all()
    worker.stop()
