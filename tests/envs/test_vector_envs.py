"""The adapters that step all environments: three autoreset modes, instances, EnvPool, names."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from helpers.environments import (
    MODES,
    BoxActionEnv,
    CountingEnv,
    NestedCountingEnv,
    SavedCountingEnv,
    SeededEnv,
    TwoArmsEnv,
    counting_creator,
    counting_vector,
)
from helpers.transitions import get_places
from tfpolicies.envs.env_factory import EnvContext, make_environments
from tfpolicies.envs.vector_adapters import GymVectorEnvAdapter, SyncEnvAdapter
from tfpolicies.errors import EnvError


def make_envs(mode, count=3, **options):
    return make_environments(counting_creator(mode, count, **options), count, EnvContext({}))


def get_reset_only(step):
    """Returns which environments were only reset in a step, as bool `[N]`."""
    return np.zeros(len(step.rewards), bool) if step.reset_only is None else step.reset_only


@pytest.mark.core
def test_only_next_step_mode_has_dead_steps():
    has_dead = {}
    for mode in MODES:
        envs = make_envs(mode)
        envs.reset(None)
        has_dead[mode] = any(get_reset_only(envs.step(np.zeros(3, int))).any() for _ in range(10))
    assert has_dead == {"plain": False, "next_step": True, "same_step": False, "disabled": False}


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_in_the_middle_starts_new_episodes_everywhere(mode):
    envs = make_envs(mode, lengths=(2, 5, 7))
    envs.reset(None)
    for _ in range(2):  # the first environment has ended and is about to be reset
        envs.step(np.zeros(3, int))
    assert get_places(envs.reset(None))[:, 2].tolist() == [0, 0, 0]
    step = envs.step(np.zeros(3, int))
    assert not get_reset_only(step).any()
    assert get_places(step.obs)[:, 2].tolist() == [1, 1, 1]


def test_a_same_step_environment_without_final_observations_is_refused():
    class Forgetful(gym.vector.SyncVectorEnv):
        def step(self, actions):
            *result, _ = super().step(actions)
            return (*result, {})

    envs = GymVectorEnvAdapter(
        Forgetful([lambda: CountingEnv(0, [1])], autoreset_mode=AutoresetMode.SAME_STEP)
    )
    envs.reset(None)
    with pytest.raises(EnvError, match="final_obs"):
        envs.step(np.zeros(1, int))


def step_together(mode, instances):
    """Returns the adapter of some environments that reset as `mode` says."""
    if mode == "plain":
        return SyncEnvAdapter(instances)
    makers = [lambda e=env: e for env in instances]
    mode = AutoresetMode[mode.upper()]
    return GymVectorEnvAdapter(gym.vector.SyncVectorEnv(makers, autoreset_mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_one_seed_for_each_environment_repeats_everything(mode):
    def history(seeds):
        envs = step_together(mode, [SeededEnv(), SeededEnv()])
        first = envs.reset(seeds).copy()
        return np.stack([first, *(envs.step(np.zeros(2, int)).obs.copy() for _ in range(12))])

    once = history([3, 4])
    np.testing.assert_array_equal(once, history([3, 4]))
    other = history([3, 5])
    np.testing.assert_array_equal(once[:, 0], other[:, 0])
    assert not np.array_equal(once[:, 1], other[:, 1])


def test_a_vector_environment_with_one_generator_is_seeded_by_the_first_seed():
    def history(seed):
        envs = make_environments("CartPole-v1", 3, EnvContext({}))
        first = envs.reset([seed, seed + 1, seed + 2]).copy()
        return np.stack([first, *(envs.step(np.ones(3, int)).obs.copy() for _ in range(30))])

    np.testing.assert_array_equal(history(7), history(7))
    assert not np.array_equal(history(7), history(8))


@pytest.mark.core
def test_plain_environments_get_the_seed_once_and_none_at_later_resets():
    env = CountingEnv(0, [1])
    envs = SyncEnvAdapter([env])
    envs.reset([5])
    envs.step(np.zeros(1, int))
    assert env.seeds == [5, None]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mode", MODES)
def test_actions_have_the_dtype_of_the_space_and_are_never_changed_afterwards(mode, dtype):
    instances = [BoxActionEnv(dtype), BoxActionEnv(dtype)]
    envs = step_together(mode, instances)
    envs.reset(None)
    actions = np.empty((2, 2), np.float32)
    for k in range(15):
        actions[...] = [[k, k + 1], [-k, 0.5]]
        envs.step(actions)
    actions[...] = 99.0
    for env in instances:
        assert {action.dtype for action in env.actions} == {np.dtype(dtype)}
        np.testing.assert_array_equal(np.array(env.actions), np.array(env.copies))


@pytest.mark.core
def test_discrete_actions_arrive_as_integers_whatever_the_policy_gives():
    env = CountingEnv(0, [9])
    envs = SyncEnvAdapter([env])
    envs.reset(None)
    for dtype in (np.int64, np.int32, np.float32):
        envs.step(np.array([2], dtype))
    assert env.actions == [2, 2, 2]
    assert all(env.action_space.contains(action) for action in env.actions)


def test_plain_environments_batch_nested_observations_and_narrow_float64():
    envs = SyncEnvAdapter([NestedCountingEnv(3), NestedCountingEnv(9)])
    obs = envs.reset(None)
    assert obs["where"][0].tolist() == [3, 9]
    assert obs["where"][1].dtype == np.float32
    assert obs["step"].dtype == np.uint8
    assert obs["step"].shape == (2, 1)


def test_an_observation_of_another_shape_is_refused_and_not_broadcast():
    class Shrinking(CountingEnv):
        def observation(self):
            return np.zeros(1, np.float32)

    with pytest.raises(EnvError, match=r"shape \(1,\).*\(3,\)"):
        SyncEnvAdapter([Shrinking()]).reset(None)


@pytest.mark.parametrize(
    ("instances", "words"),
    [
        ([CountingEnv(), CountingEnv(), NestedCountingEnv()], "^Environment 2 has the observation"),
        ([BoxActionEnv(high=5.0), BoxActionEnv(high=6.0)], "^Environment 1 has the action"),
    ],
)
def test_environments_of_one_worker_must_share_their_spaces(instances, words):
    with pytest.raises(EnvError, match=f"{words} space .*must have the same"):
        SyncEnvAdapter(instances)


@pytest.mark.core
def test_a_registered_name_with_a_vector_implementation_is_stepped_by_it():
    calls = []
    envs = make_environments("CartPole-v1", 4, EnvContext({}), lambda *args: calls.append(args))
    indices = [(env, context.vector_index, i) for env, context, i in calls]
    assert indices == [(envs.env, i, i) for i in range(4)]
    assert type(envs.env.unwrapped).__name__ == "CartPoleVectorEnv"
    assert envs.num_envs == 4
    assert envs.mode is AutoresetMode.NEXT_STEP
    assert envs.observation_space.shape == (4,)


def check_reset_steps(envs, seeds, steps):
    """Asserts that a step after an end only resets CartPole; returns the number of such steps."""
    obs = envs.reset(seeds).copy()
    ended, count = np.zeros(3, bool), 0
    for _ in range(steps):
        step = envs.step(np.ones(3, int))
        dead = get_reset_only(step)
        count += int(dead.sum())
        fell = np.abs(obs[:, 2]) > 12 * 2 * np.pi / 360
        np.testing.assert_array_equal(fell, ended)
        np.testing.assert_array_equal(dead, ended)
        assert np.abs(step.obs - obs)[~dead].max() < 1.0
        assert np.abs(step.obs[dead]).max(initial=0.0) <= 0.05  # first observations
        assert (step.rewards[dead] == 0.0).all()
        ended = step.terminateds | step.truncateds
        obs = step.obs.copy()
    return count


def test_vectorised_cartpole_never_joins_two_episodes():
    envs = make_environments("CartPole-v1", 3, EnvContext({}))
    assert check_reset_steps(envs, [1, 2, 3], 100) > 3


def test_a_registered_name_gets_the_env_config_as_arguments():
    envs = make_environments("CartPole-v1", 1, EnvContext({"sutton_barto_reward": True}))
    envs.reset([0])
    assert envs.step(np.ones(1, int)).rewards.tolist() == [0.0]


def test_an_argument_unknown_to_the_vector_implementation_falls_back_to_instances():
    envs = make_environments("CartPole-v1", 2, EnvContext({"max_episode_steps": 7}))
    assert envs.num_envs == 2
    envs.reset([0, 1])
    for _ in range(7):
        step = envs.step(np.array([0, 1]))
    assert step.truncateds.all() or step.terminateds.any()


def test_an_unknown_name_lists_near_matches():
    with pytest.raises(EnvError, match="CartPole-v1"):
        make_environments("CartPol-v1", 1, EnvContext({}))
    with pytest.raises(EnvError, match="Did you mean 'Pendulum-v1'"):
        make_environments("pendulumm", 1, EnvContext({}))


@pytest.mark.core
def test_a_context_takes_its_arguments_in_the_order_of_rllib():
    context = EnvContext({"a": 1}, 2, 3, True, 4, True).copy_with_overrides(vector_index=5)
    assert context == {"a": 1}
    assert (context.worker_index, context.vector_index, context.num_workers) == (2, 5, 4)
    assert (context.remote, context.recreated_worker) == (True, True)


@pytest.mark.core
@pytest.mark.parametrize(
    "source", ["helpers.environments:TwoArmsEnv", "helpers.environments.TwoArmsEnv", TwoArmsEnv]
)
def test_a_class_or_its_import_path_is_called_with_the_context(source):
    calls = []
    context = EnvContext({"arms": 2}, worker_index=3, num_workers=5)
    envs = make_environments(source, 2, context, lambda *args: calls.append(args))
    assert envs.num_envs == 2
    assert [index for *_, index in calls] == [0, 1]
    for env, context, index in calls:
        assert env.config == {"arms": 2}
        assert env.config.vector_index == context.vector_index == index
        assert (context.worker_index, context.num_workers) == (3, 5)


def test_a_creator_of_a_vector_environment_is_called_once_and_decides_the_number():
    calls = []

    def create(context):
        calls.append(context.vector_index)
        return counting_vector(AutoresetMode.SAME_STEP, 5)

    assert make_environments(create, 2, EnvContext({})).num_envs == 5
    assert calls == [0]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no_such_module:Env", "could not be imported"),
        ("helpers.environments:NoSuchEnv", "could not be imported"),
        (":Env", "could not be imported"),
        ("helpers.environments:HIGH", "10000.0"),
        (7, "registered name"),
        (lambda context: "a string", "gave str"),
        (lambda context: None, "gave NoneType"),
    ],
)
def test_sources_without_an_environment_are_refused_with_the_reason(source, words):
    with pytest.raises(EnvError, match=words):
        make_environments(source, 1, EnvContext({}))


def test_closing_closes_every_instance():
    instances = [CountingEnv(0), CountingEnv(1)]
    SyncEnvAdapter(instances).close()
    assert [env.closed for env in instances] == [1, 1]


def resume(make, steps):
    """Returns environments after some steps, and others that have their state."""
    first, second = make(), make()
    for envs in (first, second):
        envs.reset(None)
    for _ in range(steps):
        first.step(np.zeros(first.num_envs, int))
    second.set_state(first.get_state())
    return first, second


@pytest.mark.parametrize("mode", ["plain", "same_step", "disabled"])
def test_restored_environments_continue_where_they_were_saved(mode):
    first, second = resume(lambda: make_envs(mode, kind=SavedCountingEnv), 3)
    for _ in range(9):
        a, b = first.step(np.ones(3, int)), second.step(np.ones(3, int))
        np.testing.assert_array_equal(a.obs, b.obs)
        np.testing.assert_array_equal(a.terminateds, b.terminateds)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_envs("plain"),
        lambda: make_environments("CartPole-v1", 2, EnvContext({})),
        # Only the vector environment knows which parts are about to be reset.
        lambda: make_envs("next_step", kind=SavedCountingEnv),
        lambda: SyncEnvAdapter([gym.wrappers.FrameStackObservation(SavedCountingEnv(), 2)]),
    ],
    ids=["no get_state", "vector implementation", "next step", "wrapper with unknown state"],
)
def test_other_environments_have_no_state(make):
    assert make().get_state() is None


def test_a_vector_environment_that_saves_its_state_resumes_in_a_reset_step():
    class Saved(gym.vector.SyncVectorEnv):
        def get_state(self):
            return [env.get_state() for env in self.envs], self._autoreset_envs.copy()

        def set_state(self, state):
            for env, part in zip(self.envs, state[0], strict=True):
                env.set_state(part)
            self._autoreset_envs = state[1]

    _, envs = resume(lambda: GymVectorEnvAdapter(Saved([lambda: SavedCountingEnv(0, [2, 3])])), 2)
    step = envs.step(np.zeros(1, int))
    assert step.reset_only.tolist() == [True]
    assert step.obs.tolist() == [[0.0, 1.0, 0.0]]


def test_the_state_of_a_wrapped_environment_includes_its_time_limit():
    def limited():
        wrapped = gym.wrappers.TimeLimit(SavedCountingEnv(0, [100]), max_episode_steps=5)
        return SyncEnvAdapter([wrapped])

    _, envs = resume(limited, 3)
    ends = [bool(envs.step(np.zeros(1, int)).truncateds[0]) for _ in range(2)]
    assert ends == [False, True]


# EnvPool makes its space from float64 bounds.
PRECISION = pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")


def envpool_cartpole(context=None):
    envpool = pytest.importorskip("envpool")  # older versions of Python have no wheel
    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=1)


@PRECISION
def test_envpool_is_stepped_as_it_is_and_names_reset_steps():
    envs = make_environments(envpool_cartpole, 1, EnvContext({}))
    assert isinstance(envs, GymVectorEnvAdapter)
    assert envs.num_envs == 3
    assert isinstance(envs.action_space, spaces.Discrete)
    assert check_reset_steps(envs, None, 60) > 3


@PRECISION
def test_envpool_warns_that_a_seed_comes_too_late_and_resets_all_the_same():
    envs = make_environments(envpool_cartpole, 1, EnvContext({}))
    with pytest.warns(UserWarning, match="EnvPool seeds are fixed"):
        obs = envs.reset([5, 6, 7])
    assert obs.shape == (3, 4)


@pytest.mark.parametrize("checked", [True, False])
def test_gymnasiums_checker_watches_environments_unless_it_is_disabled(checked):
    envs = make_environments("CartPole-v1", 1, EnvContext({}), checked=checked)
    assert ("PassiveEnvChecker" in str(envs.get_sub_environments()[0])) is checked


def test_an_environment_that_cannot_be_made_says_why():
    gym.register("Broken-v0", entry_point="a_missing_package:Env")
    try:
        with pytest.raises(EnvError, match=r"'Broken-v0' could not be made: .*a_missing_package"):
            make_environments("Broken-v0", 1, EnvContext({}))
    finally:
        del gym.registry["Broken-v0"]
