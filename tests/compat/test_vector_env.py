"""RLlib's `VectorEnv`: steps of all environments, resets and failures of single ones."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.environments import CountingEnv, NestedCountingEnv
from helpers.factories import OBS, TWO
from helpers.vector_envs import Counting
from tfpolicies import AlgorithmConfig, DefaultCallbacks, RolloutWorker
from tfpolicies.compat import RandomPolicy, VectorEnv
from tfpolicies.errors import EnvError, UnsupportedMethodError


class Callbacks(DefaultCallbacks):
    """Records created environments, and puts the infos' steps into batches."""

    created = []

    def on_sub_environment_created(self, *, sub_environment, env_index, **kwargs):
        self.created.append((getattr(sub_environment, "number", None), env_index))

    def on_sample_end(self, *, worker, samples):
        samples["step"] = np.array([info["step"] for info in samples["infos"]])


def make_worker(env, count=1, *, restart=False, length=9):
    Callbacks.created.clear()
    config = AlgorithmConfig().environment(env).callbacks(Callbacks).debugging(seed=3)
    config.rollouts(num_envs_per_worker=count, rollout_fragment_length=length)
    config.fault_tolerance(restart_failed_sub_environments=restart)
    return RolloutWorker(config=config, default_policy_class=RandomPolicy)


@pytest.mark.parametrize("kind", [CountingEnv, NestedCountingEnv])
def test_a_vector_env_gives_the_batches_of_its_parts(kind):
    vector_class, batches = type("Vector", (Counting,), {"kind": kind}), []
    for env, count in ((vector_class, 1), (lambda context: kind(context.vector_index), 3)):
        worker = make_worker(env, count)
        batches.append([worker.sample() for _ in range(2)])
        assert worker.foreach_env(lambda env: env.number) == [0, 1, 2]
        assert Callbacks.created == [(0, 0), (1, 1), (2, 2)]
    for pair in zip(*batches, strict=True):
        for name in ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "step"):
            parts = zip(*(tf.nest.flatten(batch[name]) for batch in pair), strict=True)
            assert all(np.array_equal(left, right) for left, right in parts), name


def test_a_step_of_the_sampler_is_one_vector_step_and_resets_ended_environments():
    env = Counting()
    make_worker(lambda context: env, length=2).sample()
    assert env.calls == [
        ("vector_reset", [3, 4, 5]),
        ("vector_step", 3),
        ("reset_at", 1),  # its first episode has one step
        ("vector_step", 3),
    ]


def test_missing_methods_and_spaces_are_named():
    bare = VectorEnv(OBS, TWO, 2)
    assert bare.get_sub_environments() == []
    assert bare.try_render_at(1) is None
    assert bare.make_adapter().get_sub_environments() == [bare]
    calls = {"vector_reset": (), "reset_at": (0,), "restart_at": (0,), "vector_step": ([0, 0],)}
    for name, arguments in calls.items():
        with pytest.raises(UnsupportedMethodError, match=name):
            getattr(bare, name)(*arguments)
    with pytest.raises(EnvError, match="observation_space"):
        VectorEnv(None, TWO, 2).make_adapter()


class Mending(Counting):
    """Its second environment breaks in the third step and in the reset that follows."""

    def vector_step(self, actions):
        obs, rewards, terminateds, truncateds, infos = super().vector_step(actions)
        if sum(name == "vector_step" for name, _ in self.calls) == 3:
            self.restart_at(1)
            obs[1], terminateds[1] = ValueError("broke"), True
        return obs, rewards, terminateds, truncateds, infos

    def reset_at(self, index, *, seed=None, options=None):
        result = super().reset_at(index, seed=seed, options=options)
        return (ValueError("again"), {}) if self.calls.count(("reset_at", 1)) == 2 else result


def test_an_environment_that_restarts_itself_loses_only_its_episode():
    worker = make_worker(Mending, length=4)
    batch = worker.sample()
    numbers, episodes, _ = batch["obs"].T
    assert numbers.tolist() == [0, 0, 0, 0, 1, 11, 11, 11, 2, 2, 2, 2]
    assert episodes[5] == 1  # the first reset of the new one broke
    assert (11, 1) in Callbacks.created
    assert sum(m.episode_faulty for m in worker.get_metrics()) == 1


class Wrong(Counting):
    """The observation of its second environment is not finite in the second step."""

    broken_step = 2
    instances = 0

    def __init__(self, context=None):
        super().__init__()
        type(self).instances += 1

    def vector_step(self, actions):
        obs, *rest = super().vector_step(actions)
        if self.calls.count(("vector_step", 3)) == self.broken_step:
            obs[1] = np.full(3, np.nan, np.float32)
        return obs, *rest


def test_an_environment_that_leaves_its_space_is_restarted_if_that_is_allowed():
    with pytest.raises(EnvError, match=r"`step` of environment 1 of worker 0.*nan"):
        make_worker(Wrong, length=3).sample()
    worker = make_worker(Wrong, length=4, restart=True)
    assert worker.sample()["obs"][:, 0].tolist() == [0, 0, 0, 0, 1, 11, 11, 11, 2, 2, 2, 2]
    assert Callbacks.created[3:] == [(11, 1)]


class Raising(Wrong):
    def vector_step(self, actions):
        if self.calls.count(("vector_step", 3)) == 2 and self.instances % 2:
            raise OSError("lost")
        return Counting.vector_step(self, actions)


def test_all_environments_are_recreated_if_a_method_raises():
    Raising.instances = 0
    worker = make_worker(Raising, length=5, restart=True)
    batch = worker.sample()
    assert Raising.instances == 2
    assert Callbacks.created == [(0, 0), (1, 1), (2, 2)] * 2
    assert batch["obs"][:, 1].tolist() == [0.0, 0.0, *batch["obs"][2:, 1]]
    with pytest.raises(OSError, match="lost"):
        make_worker(Raising, length=5).sample()


class Brittle(CountingEnv):
    def step(self, action):
        if len(self.actions) == 2:
            self.actions.append(action)
            raise RuntimeError("brittle")
        return super().step(action)

    def render(self):
        return np.full((1, 1, 3), self.number, np.uint8)


def test_plain_environments_become_a_vector_environment():
    def vectorize(restart):
        envs = lambda i: CountingEnv(i + 20), [Brittle(7)], 2
        return VectorEnv.vectorize_gym_envs(*envs, restart_failed_sub_environments=restart)

    both = vectorize(restart=True)
    assert [env.number for env in both.get_sub_environments()] == [7, 21]
    assert both.try_render_at().tolist() == [[[7, 7, 7]]]
    worker = make_worker(lambda context: vectorize(restart=True), length=4)
    assert worker.sample()["obs"][:, 0].tolist() == [7, 20, 20, 20, 21, 21, 21, 21]
    with pytest.raises(RuntimeError, match="brittle"):
        make_worker(lambda context: vectorize(restart=False), length=4).sample()
    with pytest.raises(EnvError, match="make_env must be a function of the index"):
        VectorEnv.vectorize_gym_envs(existing_envs=[CountingEnv()], num_envs=2)
