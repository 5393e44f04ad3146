"""Schedules as objects, by themselves and as settings."""

import pickle

import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, TWO
from helpers.quick_configs import quick_config
from tfpolicies import DQNConfig, DQNTF2Policy, PPOTF2Policy, compat
from tfpolicies.errors import ConfigError, UsageError

POINTS = [(0, 50.0), (25, 100.0), (30, 200.0)]
SCHEDULES = [
    (compat.ConstantSchedule(2.5), {0: 2.5, 77: 2.5}),
    (
        compat.LinearSchedule(schedule_timesteps=100, initial_p=2.0, final_p=1.0),
        {0: 2.0, 25: 1.75, 100: 1.0, 1000: 1.0},
    ),
    (compat.PolynomialSchedule(10, 0.5, None, 2.5), {0: 2.5, 5: 1.0, 10: 0.5, 99: 0.5}),
    (compat.ExponentialSchedule(10, None, 2.0, 0.25), {0: 2.0, 5: 1.0, 10: 0.5, 20: 0.125}),
    (
        compat.PiecewiseSchedule(POINTS, outside_value=14.5),
        {-1: 14.5, 0: 50.0, 5: 60.0, 25: 100.0, 27: 140.0, 30: 14.5},
    ),
]
NAMES = [type(schedule).__name__ for schedule, _ in SCHEDULES]


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES, ids=NAMES)
def test_a_schedule_is_a_function_of_the_time_step(schedule, expected):
    for t, value in expected.items():
        assert schedule(t) == schedule.value(t) == pytest.approx(value)
        assert type(schedule(t)) is float


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES, ids=NAMES)
def test_tensors_of_time_steps_or_a_framework_give_tensors_of_values(schedule, expected):
    times = tf.constant(list(expected), tf.int64)
    for run in (schedule, tf.function(schedule)):
        actual = run(times)
        assert actual.dtype == tf.float32
        np.testing.assert_allclose(actual, list(expected.values()), rtol=1e-6)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        actual = session.run(schedule(tf.constant(list(expected)[1])))
    assert actual == pytest.approx(list(expected.values())[1])
    for framework in ("tf", "tf2"):
        value = compat.ConstantSchedule(2.5, framework=framework)(7)
        assert tf.is_tensor(value)
        assert float(value) == 2.5
    assert type(compat.ConstantSchedule(2.5, framework="torch")(7)) is float


def test_pieces_may_jump_and_be_interpolated_otherwise():
    jumping = compat.PiecewiseSchedule([(0, 1.0), (4, 1.0), (4, 0.5), (8, 0.0)], outside_value=0.0)
    assert [jumping(t) for t in (3, 4, 6, 9)] == [1.0, 0.5, 0.25, 0.0]
    steps = compat.PiecewiseSchedule(
        [(0, 1.0), (4, 3.0)], interpolation=lambda left, right, alpha: left
    )
    assert [steps(t) for t in (0, 3)] == [1.0, 1.0]


def test_time_steps_without_a_value_are_refused():
    inside = compat.PiecewiseSchedule(POINTS)
    assert inside(29) == 180.0
    for t in (-1, 30, tf.constant(5)):
        with pytest.raises(AssertionError, match=r"from 0 to 30.*Give an `outside_value`"):
            inside(t)


def test_wrong_arguments_are_refused():
    for endpoints in ([(5, 1.0), (0, 2.0)], [], [1, 2], None):
        with pytest.raises(UsageError, match="`endpoints` must be"):
            compat.PiecewiseSchedule(endpoints)
    with pytest.raises(UsageError, match="`schedule_timesteps` must be more than 0, got 0"):
        compat.LinearSchedule(schedule_timesteps=0, final_p=0.0)
    with pytest.raises(UsageError, match="`schedule_timesteps` must be more than 0, got -1"):
        compat.ExponentialSchedule(-1)


class Halving(compat.Schedule):
    def __init__(self, every, framework=None):
        super().__init__(framework=framework)
        self.every = every

    def _value(self, t):
        return 0.5 ** (t / self.every)


def test_a_custom_schedule_computes_its_value():
    assert Halving(10)(20) == 0.25
    assert float(Halving(10, "tf2")(20)) == 0.25
    assert pickle.loads(pickle.dumps(compat.PiecewiseSchedule(POINTS)))(5) == 60.0


def test_settings_may_be_schedules():
    lr = compat.LinearSchedule(schedule_timesteps=100, initial_p=0.5, final_p=0.0)
    policy = PPOTF2Policy(OBS, TWO, quick_config(lr=lr).to_dict())
    policy.on_global_var_update({"timestep": 50})
    assert policy.get_hyperparameter("lr") == pytest.approx(0.25)
    explores = {"type": "EpsilonGreedy", "epsilon_schedule": Halving(10, "tf2")}
    config = quick_config(DQNConfig, exploration_config=explores)
    policy = DQNTF2Policy(OBS, TWO, config.to_dict())
    policy.compute_actions(np.zeros((1, *OBS.shape), np.float32), timestep=20)
    assert policy.get_exploration_state()["cur_epsilon"] == pytest.approx(0.25)


def test_a_config_names_the_class_of_a_schedule():
    settings = {"schedule_timesteps": 10, "final_p": 0.0}
    assert compat.from_config(compat.LinearSchedule, settings)(5) == 0.5
    assert compat.from_config(compat.LinearSchedule, settings, initial_p=4.0)(5) == 2.0
    module = "ray.rllib.utils.schedules.polynomial_schedule"
    named = {"type": f"{module}.PolynomialSchedule", **settings}
    assert compat.from_config(named)(5) == compat.from_config(compat.Schedule, named)(5) == 0.25
    assert named["type"].startswith(module)
    assert compat.from_config("ConstantSchedule", value=3.0)(1) == 3.0
    schedule = compat.ConstantSchedule(1.0)
    assert compat.from_config(compat.Schedule, schedule) is schedule
    for wrong in ({"type": "os.system"}, {"value": 1.0}, "Nothing"):
        with pytest.raises(ConfigError, match="`type` must be a class, or the name of one"):
            compat.from_config(wrong)
