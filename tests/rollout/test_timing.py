"""What is reported of the time that sampling takes, by a clock that tests set forward."""

import pytest

from helpers.environments import CountingEnv
from helpers.multi_agent_envs import Staggered, Walker
from helpers.multi_agent_envs import sampler_of as many_sampler
from tfpolicies import AlgorithmConfig, PPOConfig, RolloutWorker
from tfpolicies.connectors import ActionConnector, AgentConnector, register_connector
from tfpolicies.errors import ConfigError
from tfpolicies.rollout import connector_env, evaluation, multi_agent_sampler, single_agent_sampler
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.episode_summaries import summarize_episodes
from tfpolicies.rollout.sampler import EvaluationDuration
from tfpolicies.rollout.timing import StepTimes

NAMES = {
    "mean_raw_obs_processing_ms",
    "mean_inference_ms",
    "mean_action_processing_ms",
    "mean_env_wait_ms",
    "mean_env_render_ms",
}


class Clock:
    ns = 0

    def __call__(self):
        return self.ns

    def go_on(self, ms):
        self.ns += round(1e6 * ms)


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch):
    for module in (connector_env, evaluation, multi_agent_sampler, single_agent_sampler):
        monkeypatch.setattr(module, "now", CLOCK)


class SlowEnv(CountingEnv):
    """Takes 4 ms for a step."""

    def step(self, action):
        CLOCK.go_on(4)
        return super().step(action)


class SlowWalker(Walker):
    """Takes 2 ms for its actions, whatever the number of rows."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        CLOCK.go_on(2)
        return super().compute_actions(obs_batch, state_batches, **kwargs)


@register_connector
class SlowToSee(AgentConnector):
    """Takes 1 ms."""

    def __call__(self, step):
        CLOCK.go_on(1)
        return step


@register_connector
class SlowToAct(ActionConnector):
    """Takes 0.5 ms."""

    def __call__(self, step):
        CLOCK.go_on(0.5)
        return step


def worker_of(**rollouts):
    config = AlgorithmConfig().debugging(seed=0)
    config.rollouts(num_envs_per_worker=2, rollout_fragment_length=6, **rollouts)
    return RolloutWorker(
        env_creator=lambda context: SlowEnv(context.vector_index, (3,)),
        config=config,
        default_policy_class=SlowWalker,
    )


def times(raw_obs_processing=0, inference=0, action_processing=0, env_wait=0):
    results = dict(locals())
    return pytest.approx(
        {f"mean_{k}_ms": x for k, x in results.items()} | {"mean_env_render_ms": 0}
    )


# -- StepTimes --------------------------------------------------------------------------------


def test_means_are_over_all_steps():
    kept = StepTimes()
    assert kept.means() == {}
    kept.add(0, 0, 0, 0, 0)
    assert kept.means() == {}
    for steps, ms in ((1, 1), (2, 8)):
        kept.add(steps, 10_000_000 * ms, 1_000_000 * ms, 0, 2_000_000 * ms)
    assert kept.means() == times(30, 3, 0, 6)


def test_with_a_coefficient_the_last_steps_count_for_more():
    kept = StepTimes(0.5)
    kept.add(1, 0, 0, 0, 8_000_000)
    assert kept.means() == times(env_wait=8)
    kept.add(1, 0, 0, 0, 4_000_000)
    assert kept.means() == times(env_wait=6)  # half of each
    kept.add(2, 4_000_000, 0, 0, 0)  # two steps of 2 ms: 1, then 1.5
    assert kept.means() == times(raw_obs_processing=1.5, env_wait=1.5)
    slow = StepTimes(0.01)
    for ms in (100, 1, 1, 2):  # fewer than 1 / 0.01 steps: the plain mean
        slow.add(1, 0, 1_000_000 * ms, 0, 0)
        slow.means()
    assert slow.means() == times(inference=26)


# -- in samplers ------------------------------------------------------------------------------


def test_episodes_tell_what_sampling_waited_for(clock):
    worker = worker_of()
    worker.sample()
    metrics = worker.get_metrics()
    assert len(metrics) == 4
    for each in metrics:
        assert each.perf_stats == times(inference=2, env_wait=8)  # two environments
    assert set(metrics[0].perf_stats) == NAMES


def test_connectors_count_as_processing(clock):
    worker = worker_of(agent_connectors=[SlowToSee()], action_connectors=[SlowToAct()])
    worker.sample()
    expected = times(4 / 3, 2, 0.5, 8)  # every third step sees last observations, too
    assert [each.perf_stats for each in worker.get_metrics()] == [expected] * 4


def test_a_worker_takes_the_coefficient_of_its_config(clock):
    worker = worker_of(sampler_perf_stats_ema_coef=0.5)
    worker.sample()
    result = worker.sampler.times
    result.add(1, 0, 10_000_000, 0, 0)
    assert result.means() == times(inference=6, env_wait=4)


class SlowStaggered(Staggered):
    """Takes 4 ms for a step and 9 ms for a reset."""

    def reset(self, *, seed=None, options=None):
        CLOCK.go_on(9)
        return super().reset(seed=seed, options=options)

    def step(self, action_dict):
        CLOCK.go_on(4)
        return super().step(action_dict)


def test_many_agents_tell_the_same(clock):
    policies = {"p": SlowWalker(), "q": SlowWalker(seed=1)}

    def both(agent_id, episode, **kwargs):
        return "p" if agent_id == "a" else "q"

    sampler = many_sampler(
        SlowStaggered(), SlowStaggered(), policies=policies, mapping=both, rollout_fragment_length=7
    )
    before = CLOCK.ns
    sampler.sample()
    assert len(sampler.metrics) == 2
    assert sampler.metrics[0].perf_stats == sampler.metrics[1].perf_stats
    calls = sum(len(policy.calls) for policy in policies.values())
    result = sampler.times.means()
    assert result == times(inference=2 * calls / 7, env_wait=8 + 18 / 7)
    assert 7 * sum(result.values()) == pytest.approx(1e-6 * (CLOCK.ns - before))


def test_evaluation_tells_them_too(clock):
    envs = many_sampler(SlowStaggered(), policies={"p": SlowWalker(), "q": SlowWalker()})
    (played,) = envs.play(EvaluationDuration(1, by_episodes=True), None).episodes
    assert set(played.perf_stats) == NAMES
    worker = worker_of()
    result = evaluation.play(worker, 2, by_episodes=True)
    assert [each.perf_stats for each in result.episodes] == [times(inference=2, env_wait=8)] * 2


# -- in results -------------------------------------------------------------------------------


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
    config = PPOConfig().environment(lambda context: CountingEnv())
    config.debugging(seed=0, log_level="ERROR")
    config.rollouts(rollout_fragment_length=16, sampler_perf_stats_ema_coef=0.1)
    config.training(train_batch_size=16, sgd_minibatch_size=8, num_sgd_iter=1)
    config.training(model={"fcnet_hiddens": [4]})
    result = config.framework(inference="tf", jit_compile=False).build().train()
    assert set(result["sampler_perf"]) == NAMES
    assert result["sampler_perf"]["mean_inference_ms"] > 0.0
    assert result["sampler_results"]["sampler_perf"] == result["sampler_perf"]


@pytest.mark.parametrize("value", [0, -0.1, 1.5, True, "0.1", float("nan")])
def test_a_coefficient_is_in_the_unit_interval(value):
    with pytest.raises(ConfigError, match=r"sampler_perf_stats_ema_coef must be None or a number"):
        AlgorithmConfig().rollouts(sampler_perf_stats_ema_coef=value)
