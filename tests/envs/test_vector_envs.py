"""Environments behind one step: three autoreset modes, plain instances, EnvPool, names."""

import sys

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
from tfpolicies.envs.env_factory import EnvContext, make_environments
from tfpolicies.envs.vector_adapters import GymVectorEnvAdapter, SyncEnvAdapter
from tfpolicies.errors import EnvError

STEPS = 40


def made(mode, count=3, **options):
    return make_environments(counting_creator(mode, count, **options), count, EnvContext({}))


def where(obs):
    """The observation of a counting environment, nested or not, as `[N, 3]` integers."""
    if isinstance(obs, dict):
        return np.stack([obs["where"][0], obs["where"][1][:, 0], obs["step"][:, 0]], 1).astype(int)
    return np.asarray(obs).astype(int)


def dead_in(step):
    """Which environments were only reset in a step, as bool `[N]`."""
    return np.zeros(len(step.rewards), bool) if step.reset_only is None else step.reset_only


def transitions(envs, steps=STEPS):
    """Steps with random actions; returns (obs, action, reward, reached, terminated, truncated)."""
    rng = np.random.default_rng(0)
    obs, rows = where(envs.reset(None)).copy(), []
    for _ in range(steps):
        actions = rng.integers(3, size=envs.num_envs)
        step = envs.step(actions)
        reached = where(step.obs).copy()
        following = reached.copy()
        if step.final_obs is not None:
            reached[step.final_obs[0]] = where(step.final_obs[1])
        for i in range(envs.num_envs):
            if not dead_in(step)[i]:
                ends = bool(step.terminateds[i]), bool(step.truncateds[i])
                rows.append((obs[i], int(actions[i]), float(step.rewards[i]), reached[i], *ends))
        obs = following
    return rows


@pytest.mark.core
@pytest.mark.parametrize("kind", [CountingEnv, NestedCountingEnv])
@pytest.mark.parametrize("mode", MODES)
def test_every_live_step_is_a_true_transition_of_one_episode(mode, kind):
    rows = transitions(made(mode, kind=kind))
    seen = {n: [] for n in range(3)}
    for obs, action, reward, reached, terminated, truncated in rows:
        number, episode, step = (int(x) for x in obs)
        reference = CountingEnv(number)
        last = step + 1 == reference.length(episode)
        assert reached.tolist() == [number, episode, step + 1]
        assert reward == reference.reward(episode, step, action)
        assert terminated == (last and not reference.truncates(episode))
        assert truncated == (last and reference.truncates(episode))
        seen[number].append((episode, step))
    for number, steps in seen.items():
        lengths = [CountingEnv(number).length(e) for e in range(STEPS)]
        history = [(e, s) for e, length in enumerate(lengths) for s in range(length)]
        assert steps == history[: len(steps)]
        dead = steps[-1][0] if mode == "next_step" else 0
        assert len(steps) in (STEPS - dead, STEPS - dead - 1)


@pytest.mark.core
def test_only_next_step_mode_has_dead_steps():
    has_dead = {}
    for mode in MODES:
        envs = made(mode)
        envs.reset(None)
        has_dead[mode] = any(dead_in(envs.step(np.zeros(3, int))).any() for _ in range(10))
    assert has_dead == {"plain": False, "next_step": True, "same_step": False, "disabled": False}


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_in_the_middle_starts_new_episodes_everywhere(mode):
    envs = made(mode, lengths=(2, 5, 7))
    envs.reset(None)
    for _ in range(2):  # the first environment has ended and is about to be reset
        envs.step(np.zeros(3, int))
    assert where(envs.reset(None))[:, 2].tolist() == [0, 0, 0]
    step = envs.step(np.zeros(3, int))
    assert not dead_in(step).any()
    assert where(step.obs)[:, 2].tolist() == [1, 1, 1]


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_vector_environments_that_reuse_their_arrays_lose_no_final_observation(mode):
    vector = counting_vector(AutoresetMode[mode.upper()], copy=False)
    for obs, _, _, reached, _, _ in transitions(GymVectorEnvAdapter(vector)):
        assert reached.tolist() == [*obs[:2], obs[2] + 1]


@pytest.mark.parametrize("mode", MODES)
def test_episode_ends_of_all_environments_in_one_step_keep_their_final_observations(mode):
    rows = transitions(made(mode, lengths=(1,)), steps=6)
    assert {tuple(reached[2:]) for _, _, _, reached, _, _ in rows} == {(1,)}


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


# -- seeds ------------------------------------------------------------------------------------


def seeded(mode):
    if mode == "plain":
        return SyncEnvAdapter([SeededEnv(), SeededEnv()])
    mode = AutoresetMode[mode.upper()]
    return GymVectorEnvAdapter(gym.vector.SyncVectorEnv([SeededEnv] * 2, autoreset_mode=mode))


@pytest.mark.parametrize("mode", MODES)
def test_one_seed_for_each_environment_repeats_everything(mode):
    def history(seeds):
        envs = seeded(mode)
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


# -- actions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mode", MODES)
def test_actions_have_the_dtype_of_the_space_and_are_never_changed_afterwards(mode, dtype):
    instances = [BoxActionEnv(dtype), BoxActionEnv(dtype)]
    if mode == "plain":
        envs = SyncEnvAdapter(instances)
    else:
        makers = [lambda e=env: e for env in instances]
        mode = AutoresetMode[mode.upper()]
        envs = GymVectorEnvAdapter(gym.vector.SyncVectorEnv(makers, autoreset_mode=mode))
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


# -- observations -----------------------------------------------------------------------------


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


def test_environments_of_one_worker_must_share_their_observation_space():
    with pytest.raises(EnvError, match="Environment 1 has the observation space"):
        SyncEnvAdapter([CountingEnv(), NestedCountingEnv()])


def test_environments_of_one_worker_must_share_their_action_space():
    with pytest.raises(EnvError, match="Environment 1 has the action space"):
        SyncEnvAdapter([BoxActionEnv(high=5.0), BoxActionEnv(high=6.0)])


# -- making them ------------------------------------------------------------------------------


@pytest.mark.core
def test_a_registered_name_with_a_vector_implementation_is_stepped_by_it():
    created = []
    envs = make_environments(
        "CartPole-v1", 4, EnvContext({}), lambda *message: created.append(message)
    )
    assert [(env, context.vector_index, i) for env, context, i in created] == [
        (envs.env, i, i) for i in range(4)
    ]
    assert type(envs.env.unwrapped).__name__ == "CartPoleVectorEnv"
    assert envs.num_envs == 4
    assert envs.mode is AutoresetMode.NEXT_STEP
    assert envs.observation_space.shape == (4,)


def test_vectorised_cartpole_never_joins_two_episodes():
    envs = make_environments("CartPole-v1", 3, EnvContext({}))
    obs = envs.reset([1, 2, 3]).copy()
    ended = np.zeros(3, bool)
    for _ in range(100):
        step = envs.step(np.ones(3, int))
        np.testing.assert_array_equal(dead_in(step), ended)
        moved = np.abs(step.obs - obs).max(axis=1)
        fell = np.abs(obs[:, 2]) > 12 * 2 * np.pi / 360
        np.testing.assert_array_equal(fell, ended)  # after an end comes one dead step
        assert moved[~dead_in(step)].max() < 1.0
        ended = step.terminateds | step.truncateds
        obs = step.obs.copy()


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
    contexts = []
    context = EnvContext({"arms": 2}, worker_index=3, num_workers=5)
    envs = make_environments(source, 2, context, lambda e, c, i: contexts.append((e, c, i)))
    assert [env.config["arms"] for env, _, _ in contexts] == [2, 2]
    assert [env.config.vector_index for env, _, _ in contexts] == [0, 1]
    assert [(c.worker_index, c.vector_index, c.num_workers) for _, c, _ in contexts] == [
        (3, 0, 5),
        (3, 1, 5),
    ]
    assert [i for _, _, i in contexts] == [0, 1]
    assert envs.num_envs == 2


def test_a_class_whose_constructor_takes_no_argument_is_called_without():
    envs = make_environments(SeededEnv, 2, EnvContext({}))
    assert envs.num_envs == 2
    assert all(type(env) is SeededEnv for env in envs.get_sub_environments())


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
def test_what_gives_no_environment_is_refused_with_the_reason(source, words):
    with pytest.raises(EnvError, match=words):
        make_environments(source, 1, EnvContext({}))


def test_closing_closes_every_instance():
    instances = [CountingEnv(0), CountingEnv(1)]
    SyncEnvAdapter(instances).close()
    assert [env.closed for env in instances] == [1, 1]


# -- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["plain", "same_step", "disabled"])
def test_restored_environments_go_on_where_they_were_saved(mode):
    first, second = (made(mode, kind=SavedCountingEnv) for _ in range(2))
    first.reset(None)
    second.reset(None)
    for _ in range(3):
        first.step(np.zeros(3, int))
    second.set_state(first.get_state())
    for _ in range(9):
        a, b = first.step(np.ones(3, int)), second.step(np.ones(3, int))
        np.testing.assert_array_equal(a.obs, b.obs)
        np.testing.assert_array_equal(a.terminateds, b.terminateds)


def test_environments_without_get_state_have_none():
    assert made("plain").get_state() is None
    assert make_environments("CartPole-v1", 2, EnvContext({})).get_state() is None


def test_a_vector_environment_that_resets_in_the_next_step_has_no_state_by_its_parts():
    # Which parts are about to be reset is known to the vector environment alone.
    assert made("next_step", kind=SavedCountingEnv).get_state() is None


def test_a_vector_environment_with_a_state_of_its_own_resumes_in_a_dead_step():
    class Saved(gym.vector.SyncVectorEnv):
        def get_state(self):
            return [env.get_state() for env in self.envs], self._autoreset_envs.copy()

        def set_state(self, state):
            for env, part in zip(self.envs, state[0], strict=True):
                env.set_state(part)
            self._autoreset_envs = state[1]

    first, second = (
        GymVectorEnvAdapter(Saved([lambda: SavedCountingEnv(0, [2, 3])])) for _ in range(2)
    )
    first.reset(None)
    second.reset(None)
    for _ in range(2):
        first.step(np.zeros(1, int))
    second.set_state(first.get_state())
    step = second.step(np.zeros(1, int))
    assert step.reset_only.tolist() == [True]
    assert step.obs.tolist() == [[0.0, 1.0, 0.0]]


def test_the_state_of_a_wrapped_environment_includes_its_time_limit():
    def limited():
        wrapped = gym.wrappers.TimeLimit(SavedCountingEnv(0, [100]), max_episode_steps=5)
        return SyncEnvAdapter([wrapped])

    first, second = limited(), limited()
    first.reset(None)
    second.reset(None)
    for _ in range(3):
        first.step(np.zeros(1, int))
    second.set_state(first.get_state())
    ends = [bool(second.step(np.zeros(1, int)).truncateds[0]) for _ in range(2)]
    assert ends == [False, True]


def test_an_environment_in_a_wrapper_with_unknown_state_has_no_state():
    wrapped = gym.wrappers.FrameStackObservation(SavedCountingEnv(), 2)
    assert SyncEnvAdapter([wrapped]).get_state() is None


# -- EnvPool ----------------------------------------------------------------------------------

if sys.version_info >= (3, 11):  # older ones have no EnvPool wheel
    # EnvPool makes its space from float64 bounds.
    PRECISION = pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")

    def envpool_cartpole(context=None):
        envpool = pytest.importorskip("envpool")
        return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=1)

    @PRECISION
    def test_envpool_is_stepped_as_it_is_and_says_which_steps_are_dead():
        envs = make_environments(envpool_cartpole, 1, EnvContext({}))
        assert isinstance(envs, GymVectorEnvAdapter)
        assert envs.num_envs == 3
        assert isinstance(envs.action_space, spaces.Discrete)
        obs = envs.reset(None).copy()
        ended, deaths = np.zeros(3, bool), 0
        for _ in range(60):
            step = envs.step(np.ones(3, int))
            np.testing.assert_array_equal(dead_in(step), ended)
            deaths += int(ended.sum())
            dead = dead_in(step)
            assert np.abs(step.obs - obs)[~dead].max() < 1.0
            assert np.abs(step.obs[dead]).max(initial=0.0) <= 0.05  # first observations
            assert (step.rewards[dead] == 0.0).all()
            ended = step.terminateds | step.truncateds
            obs = step.obs.copy()
        assert deaths > 3

    @PRECISION
    def test_envpool_says_that_a_seed_comes_too_late_and_resets_all_the_same():
        envs = make_environments(envpool_cartpole, 1, EnvContext({}))
        with pytest.warns(UserWarning, match="EnvPool seeds are fixed"):
            obs = envs.reset([5, 6, 7])
        assert obs.shape == (3, 4)


@pytest.mark.parametrize("checked", [True, False])
def test_gymnasiums_checker_watches_environments_unless_it_is_disabled(checked):
    envs = make_environments("CartPole-v1", 1, EnvContext({}), checked=checked)
    assert ("PassiveEnvChecker" in str(envs.get_sub_environments()[0])) is checked


def test_an_environment_that_cannot_be_made_says_why():
    gym.register("Broken-v0", entry_point="a_package_nobody_has:Env")
    try:
        with pytest.raises(EnvError, match=r"'Broken-v0' could not be made: .*a_package_nobody_ha"):
            make_environments("Broken-v0", 1, EnvContext({}))
    finally:
        del gym.registry["Broken-v0"]


def test_environments_with_other_spaces_than_the_first_one_are_refused():
    envs = [gym.make(name) for name in ("CartPole-v1", "CartPole-v1", "Pendulum-v1")]
    with pytest.raises(
        EnvError, match=r"^Environment 2 has the observation space Box.*must have the same"
    ):
        SyncEnvAdapter(envs)
