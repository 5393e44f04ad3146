"""Reported times of sampling, by a clock that tests advance."""

import pytest

from helpers.environments import CountingEnv
from helpers.multi_agent_envs import Staggered, Walker, sampler_of
from helpers.workers import make_config, make_worker
from tfpolicies import AlgorithmConfig
from tfpolicies.connectors import ActionConnector, AgentConnector, register_connector
from tfpolicies.errors import ConfigError
from tfpolicies.rollout import connector_env, evaluation, multi_agent_sampler, single_agent_sampler
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.episode_summaries import summarize_episodes
from tfpolicies.rollout.sampler import EvaluationDuration
from tfpolicies.rollout.timing import StepTimes

PARTS = "raw_obs_processing inference action_processing env_wait env_render"
NAMES = {f"mean_{part}_ms" for part in PARTS.split()}


class Clock:
    ns = 0

    def __call__(self):
        return self.ns

    def advance(self, ms):
        self.ns += round(1e6 * ms)


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch):
    for module in (connector_env, evaluation, multi_agent_sampler, single_agent_sampler):
        monkeypatch.setattr(module, "now", CLOCK)


class SlowEnv(CountingEnv):
    """Takes 4 ms for a step."""

    def step(self, action):
        CLOCK.advance(4)
        return super().step(action)


class SlowWalker(Walker):
    """Takes 2 ms for its actions, whatever the number of rows."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        CLOCK.advance(2)
        return super().compute_actions(obs_batch, state_batches, **kwargs)


@register_connector
class SlowToSee(AgentConnector):
    """Takes 1 ms."""

    def __call__(self, step):
        CLOCK.advance(1)
        return step


@register_connector
class SlowToAct(ActionConnector):
    """Takes 0.5 ms."""

    def __call__(self, step):
        CLOCK.advance(0.5)
        return step


def worker_of(**settings):
    settings |= {"num_envs_per_worker": 2, "rollout_fragment_length": 6}
    settings["env"] = lambda context: SlowEnv(context.vector_index, (3,))
    return make_worker(policy_class=SlowWalker, config_class=AlgorithmConfig, **settings)


def times(*values):
    """Returns expected means, in the order of `PARTS`; those left out are 0."""
    names = [f"mean_{part}_ms" for part in PARTS.split()]
    return pytest.approx(dict.fromkeys(names, 0) | dict(zip(names, values, strict=False)))


def test_means_are_over_all_steps():
    step_times = StepTimes()
    assert step_times.means() == {}
    step_times.add(0, 0, 0, 0, 0)
    assert step_times.means() == {}
    for steps, ms in ((1, 1), (2, 8)):
        step_times.add(steps, 10_000_000 * ms, 1_000_000 * ms, 0, 2_000_000 * ms)
    assert step_times.means() == times(30, 3, 0, 6)


def test_with_a_coefficient_the_last_steps_count_for_more():
    step_times = StepTimes(0.5)
    step_times.add(1, 0, 0, 0, 8_000_000)
    assert step_times.means() == times(0, 0, 0, 8)
    step_times.add(1, 0, 0, 0, 4_000_000)
    assert step_times.means() == times(0, 0, 0, 6)  # half of each
    step_times.add(2, 4_000_000, 0, 0, 0)  # two steps of 2 ms: 1, then 1.5
    assert step_times.means() == times(1.5, 0, 0, 1.5)
    slow = StepTimes(0.01)
    for ms in (100, 1, 1, 2):  # fewer than 1 / 0.01 steps: the plain mean
        slow.add(1, 0, 1_000_000 * ms, 0, 0)
        slow.means()
    assert slow.means() == times(0, 26)


def test_episodes_report_the_times_of_their_sampling(clock):
    worker = worker_of()
    worker.sample()
    metrics = worker.get_metrics()
    assert len(metrics) == 4
    for episode in metrics:
        assert episode.perf_stats == times(0, 2, 0, 8)  # two environments
    assert set(metrics[0].perf_stats) == NAMES


def test_connectors_count_as_processing(clock):
    worker = worker_of(agent_connectors=[SlowToSee()], action_connectors=[SlowToAct()])
    worker.sample()
    expected = times(4 / 3, 2, 0.5, 8)  # every third step also has last observations
    assert [episode.perf_stats for episode in worker.get_metrics()] == [expected] * 4


def test_a_worker_uses_the_coefficient_of_its_config(clock):
    worker = worker_of(sampler_perf_stats_ema_coef=0.5)
    worker.sample()
    result = worker.sampler.times
    result.add(1, 0, 10_000_000, 0, 0)
    assert result.means() == times(0, 6, 0, 4)


class SlowStaggered(Staggered):
    """Takes 4 ms for a step and 9 ms for a reset."""

    def reset(self, *, seed=None, options=None):
        CLOCK.advance(9)
        return super().reset(seed=seed, options=options)

    def step(self, action_dict):
        CLOCK.advance(4)
        return super().step(action_dict)


def test_many_agents_report_the_same(clock):
    policies = {"p": SlowWalker(), "q": SlowWalker(seed=1)}
    settings = {"policies": policies, "rollout_fragment_length": 7}
    settings["mapping"] = lambda agent_id, episode, **kwargs: "p" if agent_id == "a" else "q"
    sampler = sampler_of(SlowStaggered(), SlowStaggered(), **settings)
    before = CLOCK.ns
    sampler.sample()
    assert len(sampler.metrics) == 2
    assert sampler.metrics[0].perf_stats == sampler.metrics[1].perf_stats
    calls = sum(len(policy.calls) for policy in policies.values())
    result = sampler.times.means()
    assert result == times(0, 2 * calls / 7, 0, 8 + 18 / 7)
    assert 7 * sum(result.values()) == pytest.approx(1e-6 * (CLOCK.ns - before))


def test_evaluation_reports_the_same(clock):
    envs = sampler_of(SlowStaggered(), policies={"p": SlowWalker(), "q": SlowWalker()})
    (played,) = envs.play(EvaluationDuration(1, by_episodes=True), None).episodes
    assert set(played.perf_stats) == NAMES
    worker = worker_of()
    result = evaluation.play(worker, 2, by_episodes=True)
    assert [episode.perf_stats for episode in result.episodes] == [times(0, 2, 0, 8)] * 2


def test_summaries_have_the_means_over_episodes():
    one, other = {"mean_inference_ms": 1.0}, {"mean_inference_ms": 4.0}
    episodes = [
        RolloutMetrics(perf_stats=one),
        RolloutMetrics(perf_stats=other),
        RolloutMetrics(),
        RolloutMetrics(episode_faulty=True, perf_stats={"mean_inference_ms": 99.0}),
    ]
    assert summarize_episodes(episodes)["sampler_perf"] == {"mean_inference_ms": 2.5}
    assert summarize_episodes([])["sampler_perf"] == {}


def test_training_results_have_them():
    settings = {"rollout_fragment_length": 16, "train_batch_size": 16, "sgd_minibatch_size": 8}
    settings |= {"num_sgd_iter": 1, "sampler_perf_stats_ema_coef": 0.1}
    result = make_config(lambda context: CountingEnv(), **settings).build().train()
    assert set(result["sampler_perf"]) == NAMES
    assert result["sampler_perf"]["mean_inference_ms"] > 0.0
    assert result["sampler_results"]["sampler_perf"] == result["sampler_perf"]


@pytest.mark.parametrize("value", [0, -0.1, 1.5, True, "0.1", float("nan")])
def test_a_coefficient_is_in_the_unit_interval(value):
    with pytest.raises(ConfigError, match=r"sampler_perf_stats_ema_coef must be None or a number"):
        AlgorithmConfig().rollouts(sampler_perf_stats_ema_coef=value)
