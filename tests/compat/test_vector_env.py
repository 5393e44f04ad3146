"""`VectorEnv` as RLlib's users write it: one step for all, resets and breaks one by one."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.environments import CountingEnv, NestedCountingEnv
from helpers.factories import OBS, TWO
from tfpolicies import AlgorithmConfig, DefaultCallbacks, RolloutWorker
from tfpolicies.compat import RandomPolicy, VectorEnv
from tfpolicies.errors import EnvError, UnsupportedMethodError


class Counting(VectorEnv):
    """Three environments that count, behind the methods of RLlib's vector environments."""

    kind = CountingEnv

    def __init__(self, context=None):
        self.parts = [self.kind(number) for number in range(3)]
        self.calls = []
        super().__init__(self.kind.observation_space, self.kind.action_space, 3)

    def vector_reset(self, *, seeds=None, options=None):
        self.calls.append(("vector_reset", seeds))
        results = [env.reset() for env in self.parts]
        return [obs for obs, _ in results], [info for _, info in results]

    def reset_at(self, index, *, seed=None, options=None):
        self.calls.append(("reset_at", index))
        return self.parts[index].reset(seed=seed, options=options)

    def restart_at(self, index):
        self.calls.append(("restart_at", index))
        self.parts[index] = self.kind(index + 10)

    def vector_step(self, actions):
        self.calls.append(("vector_step", len(actions)))
        results = [env.step(action) for env, action in zip(self.parts, actions, strict=True)]
        return tuple(list(part) for part in zip(*results, strict=True))

    def get_sub_environments(self):
        return self.parts


class NestedCounting(Counting):
    kind = NestedCountingEnv


class Callbacks(DefaultCallbacks):
    """Keeps which environments there were, and puts the infos' steps into batches."""

    created = []

    def on_sub_environment_created(self, *, sub_environment, env_index, **kwargs):
        self.created.append((getattr(sub_environment, "number", None), env_index))

    def on_sample_end(self, *, worker, samples):
        samples["step"] = np.array([info["step"] for info in samples["infos"]])


def worker_of(env, count=1, *, restart=False, length=9, **settings):
    Callbacks.created.clear()
    config = AlgorithmConfig().environment(env).callbacks(Callbacks).debugging(seed=3)
    config.rollouts(num_envs_per_worker=count, rollout_fragment_length=length)
    config.fault_tolerance(restart_failed_sub_environments=restart, **settings)
    return RolloutWorker(config=config, default_policy_class=RandomPolicy)


@pytest.mark.parametrize("kind", [Counting, NestedCounting])
def test_it_gives_the_batches_of_its_parts(kind):
    batches = []
    for env, count in ((kind, 1), (lambda context: kind.kind(context.vector_index), 3)):
        worker = worker_of(env, count)
        batches.append([worker.sample() for _ in range(2)])
        assert worker.foreach_env(lambda env: env.number) == [0, 1, 2]
        assert Callbacks.created == [(0, 0), (1, 1), (2, 2)]
    for own, plain in zip(*batches, strict=True):
        for name in ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds", "step"):
            parts = zip(tf.nest.flatten(own[name]), tf.nest.flatten(plain[name]), strict=True)
            assert all(np.array_equal(left, right) for left, right in parts), name


def test_a_step_of_the_sampler_is_one_vector_step_and_resets_what_ended():
    made = []
    worker = worker_of(lambda context: made.append(Counting()) or made[-1], length=2)
    worker.sample()
    assert made[0].calls == [
        ("vector_reset", [3, 4, 5]),
        ("vector_step", 3),
        ("reset_at", 1),  # its first episode has one step
        ("vector_step", 3),
    ]


def test_it_says_what_it_lacks():
    bare = VectorEnv(OBS, TWO, 2)
    assert bare.get_sub_environments() == []
    assert bare.try_render_at(1) is None
    assert bare.make_adapter().get_sub_environments() == [bare]
    for call, words in (
        (bare.vector_reset, "vector_reset"),
        (lambda: bare.reset_at(0), "reset_at"),
        (lambda: bare.restart_at(0), "restart_at"),
        (lambda: bare.vector_step([0, 0]), "vector_step"),
    ):
        with pytest.raises(UnsupportedMethodError, match=words):
            call()
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


def test_what_breaks_and_is_mended_by_itself_loses_its_episode_alone():
    worker = worker_of(Mending, length=4)
    batch = worker.sample()
    numbers, episodes, _ = batch["obs"].T
    assert numbers.tolist() == [0, 0, 0, 0, 1, 11, 11, 11, 2, 2, 2, 2]
    assert episodes[5] == 1  # the first reset of the new one broke
    assert (11, 1) in Callbacks.created
    assert sum(m.episode_faulty for m in worker.get_metrics()) == 1


class Wrong(Counting):
    """The observation of its second environment is not finite in the second step."""

    broken_step = 2
    made = 0

    def __init__(self, context=None):
        super().__init__()
        type(self).made += 1

    def vector_step(self, actions):
        obs, *rest = super().vector_step(actions)
        if self.calls.count(("vector_step", 3)) == self.broken_step:
            obs[1] = np.full(3, np.nan, np.float32)
        return obs, *rest


def test_an_environment_that_gives_what_is_not_of_its_space_is_restarted_where_that_is_allowed():
    with pytest.raises(EnvError, match=r"`step` of environment 1 of worker 0.*nan"):
        worker_of(Wrong, length=3).sample()
    worker = worker_of(Wrong, length=4, restart=True)
    assert worker.sample()["obs"][:, 0].tolist() == [0, 0, 0, 0, 1, 11, 11, 11, 2, 2, 2, 2]
    assert Callbacks.created[3:] == [(11, 1)]


class Raising(Wrong):
    def vector_step(self, actions):
        if self.calls.count(("vector_step", 3)) == 2 and self.made % 2:
            raise OSError("lost")
        return Counting.vector_step(self, actions)


def test_all_are_made_anew_if_a_method_raises():
    Raising.made = 0
    worker = worker_of(Raising, length=5, restart=True)
    batch = worker.sample()
    assert Raising.made == 2
    assert Callbacks.created == [(0, 0), (1, 1), (2, 2)] * 2
    assert batch["obs"][:, 1].tolist() == [0.0, 0.0, *batch["obs"][2:, 1]]
    with pytest.raises(OSError, match="lost"):
        worker_of(Raising, length=5).sample()


class Brittle(CountingEnv):
    """Breaks in its third step, once."""

    def step(self, action):
        if len(self.actions) == 2:
            self.actions.append(action)
            raise RuntimeError("brittle")
        return super().step(action)

    def render(self):
        return np.full((1, 1, 3), self.number, np.uint8)


def test_plain_environments_become_a_vector_environment():
    def vectorized(context):
        first = Brittle(7)
        return VectorEnv.vectorize_gym_envs(
            lambda i: CountingEnv(i + 20),
            [first],
            2,
            restart_failed_sub_environments=context["restart"],
        )

    made = vectorized({"restart": True})
    assert [env.number for env in made.get_sub_environments()] == [7, 21]
    assert made.try_render_at().tolist() == [[[7, 7, 7]]]
    worker = worker_of(lambda context: vectorized({"restart": True}), length=4)
    assert worker.sample()["obs"][:, 0].tolist() == [7, 20, 20, 20, 21, 21, 21, 21]
    with pytest.raises(RuntimeError, match="brittle"):
        worker_of(lambda context: vectorized({"restart": False}), length=4).sample()
    with pytest.raises(EnvError, match="make_env must be a function of the index"):
        VectorEnv.vectorize_gym_envs(existing_envs=[CountingEnv()], num_envs=2)
