"""Connectors: optional steps between environments and policies, for all rows at once."""

import json

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import make
from tfpolicies.connectors import (
    ActionConnector,
    ActionConnectorPipeline,
    ActionStep,
    AgentConnector,
    AgentConnectorPipeline,
    AgentStep,
    ClipActions,
    ClipObservations,
    ClipReward,
    FlattenObservations,
    FrameStack,
    UnsquashActions,
    connector_metrics,
    pipelines_from_state,
    pipelines_to_state,
    register_connector,
    restore,
)
from tfpolicies.errors import ConfigError, ObservationError, UnsupportedSpaceError, UsageError
from tfpolicies.models.action_mapping import ActionMapping

LINE = spaces.Box(-9.0, 9.0, (1,), np.float32)
GRAY = spaces.Box(0, 255, (2, 2), np.uint8)
BOUNDED = spaces.Box(np.array([0.0, -2.0], np.float32), np.array([10.0, 2.0], np.float32))
NESTED = spaces.Dict(
    goal=spaces.Discrete(3, start=1),
    limits=spaces.MultiDiscrete([2, 3]),
    pose=spaces.Tuple([spaces.Box(-1, 1, (2, 2), np.float64), spaces.MultiBinary(2)]),
)


@register_connector
class Doubling(AgentConnector):
    def __call__(self, step):
        return step._replace(obs=2 * step.obs)


def column(*values):
    return np.array(values, np.float32)[:, None]


def connect(connector, space=LINE):
    connector.connect(space)
    return connector


def stack(frames, values, env_ids, agents=None):
    return frames(AgentStep(column(*values), np.array(env_ids), None, agents)).obs.tolist()


def test_the_last_frames_are_seen_oldest_first():
    frames = connect(FrameStack(3))
    assert stack(frames, [1, 5], [0, 1]) == [[1, 1, 1], [5, 5, 5]]
    assert stack(frames, [2, 6], [0, 1]) == [[1, 1, 2], [5, 5, 6]]
    assert stack(frames, [3, 7], [0, 1]) == [[1, 2, 3], [5, 6, 7]]
    assert stack(frames, [4, 8], [0, 1]) == [[2, 3, 4], [6, 7, 8]]


def test_a_reset_forgets_only_one_environment():
    frames = connect(FrameStack(2))
    stack(frames, [1, 5, 7], [0, 1, 2])
    frames.reset(1)
    assert stack(frames, [2, 6, 8], [0, 1, 2]) == [[1, 2], [6, 6], [7, 8]]
    frames.reset(np.array([0, 2, 99]))
    assert stack(frames, [3, 7, 9], [0, 1, 2]) == [[3, 3], [6, 7], [9, 9]]


def test_rows_come_in_any_order_and_number():
    frames = connect(FrameStack(2))
    stack(frames, [1, 2, 3], [10, 4, 700])
    assert stack(frames, [30, 10], [700, 10]) == [[3, 30], [1, 10]]
    assert stack(frames, [20, 5], [4, 6]) == [[2, 20], [5, 5]]
    assert stack(frames, [31], [700]) == [[30, 31]]
    assert frames(AgentStep(np.zeros((0, 1), np.float32), [])).obs.shape == (0, 2)


def test_each_agent_of_an_environment_has_its_own_frames():
    frames = connect(FrameStack(2))
    both = np.array([0, 1])
    stack(frames, [1, 2], [0, 0], both)
    stack(frames, [3, 4], [1, 1], both)
    assert stack(frames, [5, 6], [0, 1], np.array([1, 0])) == [[2, 5], [3, 6]]
    frames.reset(0)
    assert stack(frames, [7, 8], [0, 1], np.array([1, 1])) == [[7, 7], [4, 8]]


def test_many_random_resets_agree_with_lists():
    rng = np.random.default_rng(0)
    frames, history = connect(FrameStack(3)), {}
    for value in range(200):
        ids = rng.permutation(6)[: rng.integers(1, 6)]
        for env in ids.tolist():
            history[env] = [*(history.get(env) or [value + env] * 2), value + env][-3:]
        result = stack(frames, [value + env for env in ids], ids)
        assert result == [history[env] for env in ids.tolist()]
        for env in rng.integers(0, 6, 2).tolist():
            frames.reset(env)
            history.pop(env, None)


SHAPES = [((), (4,)), ((3,), (12,)), ((2, 2), (2, 2, 4)), ((2, 2, 1), (2, 2, 4))]
SHAPES += [((2, 2, 3), (2, 2, 12))]


@pytest.mark.parametrize(("shape", "result"), SHAPES)
def test_the_stack_has_the_shape_of_its_space(shape, result):
    space = spaces.Box(0, 255, shape, np.uint8)
    frames = FrameStack(4)
    seen = frames.connect(space)
    assert seen == frames.observation_space(space) == spaces.Box(0, 255, result, np.uint8)
    space.seed(0)
    obs = np.stack([space.sample() for _ in range(3)])
    for row in frames(AgentStep(obs, np.arange(3))).obs:
        assert row in seen
    newest = frames(AgentStep(obs // 2, np.arange(3))).obs[..., -1]
    np.testing.assert_array_equal(newest, (obs // 2)[..., -1] if len(shape) % 2 else obs // 2)


def test_nested_boxes_are_stacked_and_other_leaves_and_masks_pass():
    space = spaces.Dict(
        action_mask=spaces.Box(0, 1, (2,), np.int8),
        observations=spaces.Dict(n=spaces.Discrete(5), x=LINE),
    )
    frames = FrameStack(2)
    seen = frames.connect(space)
    assert seen["observations"]["x"].shape == (2,)
    assert seen["observations"]["n"] == spaces.Discrete(5)
    assert seen["action_mask"] == space["action_mask"]
    obs = {"action_mask": [[1, 0]], "observations": {"n": [4], "x": [[7.0]]}}
    result = frames(AgentStep(obs, np.array([0]))).obs
    assert result["observations"]["x"].tolist() == [[7, 7]]
    assert result["observations"]["n"].tolist() == [4]
    assert result["action_mask"].tolist() == [[1, 0]]


def test_rows_that_do_not_fit_are_refused():
    for number in (0, 1.5, True, None):
        with pytest.raises(ConfigError, match="`num_frames`"):
            FrameStack(number)
    with pytest.raises(UsageError, match="connect"):
        stack(FrameStack(2), [1], [0])
    frames = connect(FrameStack(2))
    with pytest.raises(UsageError, match="twice"):
        stack(frames, [1, 2], [3, 3])
    for ids in ([-1], [0.5], [0, 1], ["a"], [2**50]):
        with pytest.raises(UsageError, match="`env_ids`"):
            stack(frames, [1], ids)
    with pytest.raises(UsageError, match="`agents`"):
        stack(frames, [1], [0], np.array([2**30]))
    with pytest.raises(ObservationError, match="obs must be an array"):
        frames(AgentStep(np.zeros((2, 3)), np.arange(2)))
    assert stack(frames, [1, 2], [0, 1]) == [[1, 1], [2, 2]]


def test_rewards_are_clipped_or_signed():
    step = AgentStep(column(0, 0, 0), np.arange(3), np.array([-3.0, 0.25, 0.0]))
    assert ClipReward(limit=0.5)(step).rewards.tolist() == [-0.5, 0.25, 0]
    assert ClipReward(sign=True)(step).rewards.tolist() == [-1, 1, 0]
    assert step.rewards.tolist() == [-3, 0.25, 0]
    assert ClipReward(sign=True)(step._replace(rewards=None)).rewards is None
    for wrong in ({}, {"sign": True, "limit": 1.0}, {"limit": -1.0}, {"limit": "1"}, {"sign": 1}):
        with pytest.raises(ConfigError, match="ClipReward"):
            ClipReward(**wrong)


def test_floats_of_observations_are_clipped():
    clip = ClipObservations(-1, 2)
    space = spaces.Dict(image=GRAY, x=LINE)
    seen = clip.connect(space)
    assert seen == spaces.Dict(image=GRAY, x=spaces.Box(-1.0, 2.0, (1,), np.float32))
    obs = {"image": np.full((2, 2, 2), 200, np.uint8), "x": column(-5, 5)}
    result = clip(AgentStep(obs, np.arange(2))).obs
    assert result["x"].tolist() == [[-1], [2]]
    assert result["image"].max() == 200
    for bounds in ((1, 1), (-np.inf, 1), ("a", 1)):
        with pytest.raises(ConfigError, match="ClipObservations"):
            ClipObservations(*bounds)


def test_any_observation_becomes_one_vector():
    flatten = FlattenObservations()
    seen = flatten.connect(NESTED)
    assert seen.shape == (3 + 5 + 4 + 2,)
    assert seen.dtype == np.float32
    assert seen.low.tolist() == [0] * 8 + [-1] * 4 + [0] * 2
    obs = {
        "goal": [3, 1],
        "limits": [[1, 0], [0, 2]],
        "pose": (np.array([[[0.5, -1], [0, 1]]] * 2), [[0, 1], [1, 1]]),
    }
    result = flatten(AgentStep(obs, np.arange(2))).obs
    assert result.tolist() == [
        [0, 0, 1, 0, 1, 1, 0, 0, 0.5, -1, 0, 1, 0, 1],
        [1, 0, 0, 1, 0, 0, 0, 1, 0.5, -1, 0, 1, 1, 1],
    ]
    with pytest.raises(ObservationError, match="obs_goal must hold members"):
        flatten(AgentStep({**obs, "goal": [0, 4]}, np.arange(2)))
    with pytest.raises(UnsupportedSpaceError):
        flatten.connect(spaces.Text(3))


def test_normalised_actions_are_mapped_into_the_space():
    unsquash = connect(UnsquashActions(), BOUNDED)
    actions = np.array([[-1, -1], [0, 0], [1, 1], [-7, 7]], np.float32)
    actual = unsquash(ActionStep(actions, np.arange(4))).actions
    assert actual.tolist() == [[0, -2], [5, 0], [10, 2], [0, 2]]
    mapping = ActionMapping(BOUNDED, normalize=True, clip=False)
    (expected,) = mapping.to_env([actions])
    np.testing.assert_array_equal(actual, expected)


def test_actions_are_clipped_and_discrete_ones_pass():
    space = spaces.Dict(move=BOUNDED, jump=spaces.Discrete(2))
    clip = connect(ClipActions(), space)
    result = clip(ActionStep({"move": np.array([[11.0, 0.5]]), "jump": [1]}, [0])).actions
    assert result["move"].tolist() == [[10, 0.5]]
    assert result["move"].dtype == np.float32
    assert result["jump"].tolist() == [1]


def test_actions_of_integers_begin_at_their_start():
    parts = [spaces.Discrete(3, start=-1), spaces.Box(2, 9, (2,), np.int32)]
    parts += [spaces.MultiBinary(2), spaces.MultiDiscrete([2, 2], start=[5, 6])]
    unsquash = connect(UnsquashActions(), spaces.Tuple(parts))
    actions = (np.array([0]), np.array([[0, 7]]), np.array([[0, 1]]), np.array([[1, 0]]))
    result = unsquash(ActionStep(actions, [0])).actions
    assert [part.tolist() for part in result] == [[-1], [[2, 9]], [[0, 1]], [[6, 6]]]


def test_actions_that_do_not_fit_are_refused():
    clip = connect(ClipActions(), spaces.Dict(move=BOUNDED))
    for actions in ({"move": [[1.0]]}, {}, np.zeros((1, 2))):
        with pytest.raises(UsageError, match="Actions must be nested"):
            clip(ActionStep(actions, [0]))


def test_connectors_are_called_in_their_order():
    pipeline = AgentConnectorPipeline([Doubling(), FrameStack(2), ClipReward(limit=1.0)])
    assert pipeline.connect(LINE).shape == (2,)
    step = pipeline(AgentStep(column(1), np.array([0]), np.array([5.0])))
    assert step.obs.tolist() == [[2, 2]]
    assert step.rewards.tolist() == [1]
    assert pipeline(AgentStep(column(2), np.array([0]))).obs.tolist() == [[2, 4]]
    pipeline.reset(0)
    assert pipeline(AgentStep(column(3), np.array([0]))).obs.tolist() == [[6, 6]]


def test_a_pipeline_is_edited_by_names_and_positions():
    pipeline = AgentConnectorPipeline([FrameStack(2)])
    pipeline.prepend(Doubling())
    pipeline.append(ClipReward(sign=True))
    pipeline.insert_after("Doubling", ClipObservations(-1, 1))
    pipeline.insert_before("FrameStack", FlattenObservations())
    expected = ["Doubling", "ClipObservations", "FlattenObservations", "FrameStack", "ClipReward"]
    assert [connector.name for connector in pipeline] == expected
    pipeline.remove("ClipObservations")
    pipeline.remove("FlattenObservations")
    assert [connector.name for connector in pipeline] == ["Doubling", "FrameStack", "ClipReward"]
    assert len(pipeline) == 3
    assert pipeline["FrameStack"] is pipeline[1]
    assert repr(pipeline).startswith("AgentConnectorPipeline([Doubling(), FrameStack(num_frames=2)")


ROWS = "must return one row of obs for each of the 3 rows that it got; it returned "
WRONG_RESULTS = {
    "nothing": (lambda step: None, "must return the AgentStep that it got, changed by .* None"),
    "an array": (lambda step: step.obs, r"that it got, changed by .* returned array\("),
    "fewer rows": (lambda step: step._replace(obs=step.obs[:1]), ROWS + "1"),
    "fewer nested rows": (lambda step: step._replace(obs={"a": (step.obs[:2],)}), ROWS + "2"),
    "fewer rows of one part": (
        lambda step: step._replace(obs={"a": step.obs, "b": step.obs[:2]}),
        ROWS + "2",
    ),
    "no rows": (lambda step: step._replace(obs=3.0), ROWS + "0"),
    "rewards in a column": (
        lambda step: step._replace(rewards=step.rewards[:, None]),
        r"must return rewards \[3\], a number for each row; it returned the shape \[3, 1\]",
    ),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_an_agent_connector_that_returns_something_else_is_named(name):
    change, message = WRONG_RESULTS[name]
    kind = type("Wrong", (AgentConnector,), {"__call__": lambda self, step: change(step)})
    with pytest.raises(UsageError, match=f"Wrong .*{message}"):
        AgentConnectorPipeline([kind()])(AgentStep(column(1, 2, 3), np.arange(3), np.zeros(3)))


def test_an_action_connector_that_returns_something_else_is_named():
    kind = type("Wrong", (ActionConnector,), {"__call__": lambda self, step: step.actions})
    with pytest.raises(UsageError, match="Wrong must return the ActionStep that it got"):
        ActionConnectorPipeline([kind()])(ActionStep(column(1, 2), np.arange(2)))


def test_a_change_that_fails_leaves_the_pipeline_as_it_was():
    pipeline = connect(AgentConnectorPipeline([FrameStack(2)]))
    stack(pipeline, [1], [0])
    with pytest.raises(UsageError, match="one connector of each name"):
        pipeline.append(FrameStack(3))
    for wrong in (ClipActions(), AgentConnectorPipeline(), "FrameStack"):
        with pytest.raises(UsageError, match="subclasses of AgentConnector"):
            pipeline.append(wrong)
    for change in (pipeline.remove, lambda name: pipeline.insert_before(name, Doubling())):
        with pytest.raises(UsageError, match="has no connector 'Other'"):
            change("Other")
    assert stack(pipeline, [2], [0]) == [[1, 2]]
    pipeline.append(FlattenObservations())
    assert stack(pipeline, [3], [0]) == [[3, 3]]
    assert pipeline.observation_space(LINE).shape == (2,)


def test_each_connector_is_timed_in_its_own_pipeline():
    agent = connect(AgentConnectorPipeline([FrameStack(2)]))
    action = ActionConnectorPipeline([UnsquashActions(), ClipActions()])
    assert agent.timers == {"FrameStack_ms": 0}
    for value in range(3):
        stack(agent, [value], [0])
    metrics = connector_metrics(agent, action)
    assert 0 < metrics["agent_connectors"]["FrameStack_ms"] < 1000
    assert metrics["action_connectors"] == {"UnsquashActions_ms": 0, "ClipActions_ms": 0}
    action.reset(0)


def test_pipelines_are_restored_from_json():
    agent = AgentConnectorPipeline([Doubling(), FrameStack(2), ClipReward(limit=0.5)])
    action = ActionConnectorPipeline([UnsquashActions()])
    state = json.loads(json.dumps(pipelines_to_state(agent, action)))
    again, actions_again = pipelines_from_state(state)
    assert repr(again) == repr(agent)
    assert [connector.name for connector in actions_again] == ["UnsquashActions"]
    again.connect(LINE)
    assert stack(again, [1], [0]) == [[2, 2]]
    assert again["FrameStack"] is not agent["FrameStack"]
    assert pipelines_to_state(None, None) == {}
    assert pipelines_from_state({}) == (None, None)


@pytest.mark.parametrize(
    "connector",
    [FrameStack(3), ClipReward(limit=2.0), ClipObservations(-1, 1), FlattenObservations()],
    ids=repr,
)
def test_every_connector_has_a_state(connector):
    again = restore(*json.loads(json.dumps(connector.to_state())))
    assert type(again) is type(connector)
    assert again.to_state() == connector.to_state()


def test_unknown_names_and_bad_states_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'FrameStack'"):
        restore("FrameStak", {})
    with pytest.raises(ConfigError, match="no connector 3"):
        restore(3, {})
    for params in (None, {"frames": 2}, {}, {"num_frames": "2"}):
        with pytest.raises(ConfigError, match="num_frames"):
            restore("FrameStack", params)
    for params in ({}, {"connectors": [["FrameStack"]]}, {"connectors": "FrameStack"}, []):
        with pytest.raises(ConfigError, match="state of AgentConnectorPipeline"):
            restore("AgentConnectorPipeline", params)
    with pytest.raises(ConfigError, match="'ClipActions' is not an AgentConnector"):
        restore("AgentConnectorPipeline", {"connectors": [["ClipActions", {}]]})
    with pytest.raises(ConfigError, match="cannot be used"):
        restore("AgentConnectorPipeline", {"connectors": [["FlattenObservations", {}]] * 2})
    for state in (None, {"agent": []}, {"other": []}, {"agent": ["ClipActions", {}]}):
        with pytest.raises(ConfigError, match="`connector_configs`"):
            pipelines_from_state(state)


def test_a_name_belongs_to_one_class():
    other = type("FrameStack", (Doubling,), {})
    with pytest.raises(UsageError, match=r"registered already, as tfpolicies\.connectors"):
        register_connector(other)
    with pytest.raises(UsageError, match="subclasses of Connector"):
        register_connector(int)
    assert register_connector(Doubling) is Doubling


@pytest.mark.parametrize("what", ["The export", "session()"])
def test_connectors_that_are_left_out_are_logged(what, tmp_path, caplog):
    policy = make()

    def get_messages():
        caplog.clear()
        policy.session() if what == "session()" else policy.export_model(tmp_path, onnx=True)
        return caplog.messages

    assert get_messages() == []
    policy.agent_connectors = AgentConnectorPipeline([ClipReward(sign=True)])
    assert get_messages() == []
    policy.agent_connectors.append(ClipObservations(-1.0, 1.0))
    policy.action_connectors = ActionConnectorPipeline([ClipActions()])
    before, after = get_messages()
    assert before.startswith(f"{what} does not include the connectors ClipObservations: give it")
    assert after.startswith(f"{what} does not include the connectors ClipActions: pass its actions")
    assert get_messages() == []
