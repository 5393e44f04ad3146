"""Acting with many policies in one call: the same actions as one policy after the other."""

import functools
import gc
import itertools

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers import factories
from helpers.marks import telling
from helpers.processes import run_threads
from helpers.serving import MATRIX
from tfpolicies import Policy, PolicyMap, PPOTF2Policy
from tfpolicies.errors import ConfigError, ObservationError, UnknownPolicyError, UsageError
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.policy_map.stacked_acting import compute_actions
from tfpolicies.program.runtimes import stacked
from tfpolicies.program.runtimes.stacked import remove_gathers

pytestmark = pytest.mark.usefixtures("kept_programs")

BOTH = pytest.mark.parametrize("inference", ["tf", "onnx"])
SEEN = factories.OBS
PAIR = spaces.Tuple([factories.PLANE, factories.TWO])
NESTED = spaces.Dict(a=spaces.Discrete(3, start=1), b=PAIR)
KINDS = {
    "mlp": {},
    "memory": MATRIX["memory"],
    "image": MATRIX["image"],
    "normal distribution": {"actions": spaces.Box(-2, 5, (2,), np.float32)},
    "masked": {
        "obs": spaces.Dict(observations=SEEN, action_mask=spaces.MultiBinary(5)),
        "actions": spaces.MultiDiscrete([2, 3]),
    },
    "nested spaces and a filter": {
        "obs": spaces.Dict(x=SEEN, y=spaces.Discrete(4)),
        "actions": NESTED,
        "observation_filter": "MeanStdFilter",
    },
    "epsilon-greedy": {"exploration_config": {"type": "EpsilonGreedy", "epsilon_timesteps": 30}},
    "disturbed weights": {"exploration_config": {"type": "ParameterNoise", "random_timesteps": 5}},
}


def make_policies(count, **config):
    """Makes policies with one Program and other seeds, by id."""
    return {f"p{i}": factories.make(seed=i, **config) for i in range(count)}


def make_arguments(policies, rows, seed=0):
    """Returns observations, and what else the policies read, by policy id."""
    results = ({}, {}, {}, {})
    for i, (name, policy) in enumerate(policies.items()):
        n = rows[i] if isinstance(rows, list) else rows
        obs = factories.rows_of(policy.observation_space, n, seed + i)
        if isinstance(obs, dict) and "action_mask" in obs:
            obs["action_mask"][:, [0, 2]] = 1  # a choice for either cell
        results[0][name] = obs
        rng = np.random.default_rng(i)
        if policy.is_recurrent():
            shapes = [state.shape for state in policy.get_initial_state()]
            results[1][name] = [rng.normal(size=(n, *shape)) for shape in shapes]
        views = {view.name for view in policy.driver.acting.views}
        if "prev_actions" in views:
            results[2][name] = factories.rows_of(policy.action_space, n, seed)
        if "prev_rewards" in views:
            results[3][name] = rng.normal(size=n)
    return results


def one_by_one(policies, arguments, **options):
    obs, *others = arguments
    return {
        name: policies[name].compute_actions(obs[name], *(x.get(name) for x in others), **options)
        for name in obs
    }


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    for name, batch in expected.items():
        assert isinstance(actual[name], ActionBatch)
        assert list(actual[name].extras) == list(batch.extras)
        for left, right in zip(tf.nest.flatten(actual[name]), tf.nest.flatten(batch), strict=True):
            assert (left.shape, left.dtype) == (right.shape, right.dtype)
            np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)


def assert_same_counters(policies, twins):
    for name, policy in policies.items():
        twin = twins[name]
        generators = [each.driver.generator.bit_generator.state for each in (policy, twin)]
        assert generators[0] == generators[1]
        assert policy.global_timestep == twin.global_timestep
        assert policy.get_exploration_state() == twin.get_exploration_state()


def is_stacked(policy):
    """Whether policies of this kind act in one call of their runtime."""
    return policy.program.inference.get_stacked_runtime(policy.driver.acting.inference) is not None


@pytest.mark.parametrize(
    ("kind", "inference"),
    telling(
        itertools.product(KINDS, ["tf", "onnx"]),
        *(("mlp", "onnx"), ("nested spaces and a filter", "onnx")),
        *(("memory", "tf"), ("image", "tf"), ("masked", "tf")),
    ),
)
def test_many_policies_act_as_one_by_one(kind, inference):
    policies, twins = (make_policies(3, inference=inference, **KINDS[kind]) for _ in range(2))
    for seed, options in enumerate([{}, {"explore": False}, {"timestep": 20}, {"explore": True}]):
        arguments = make_arguments(policies, 4, seed)
        result = compute_actions(policies, *arguments, **options)
        assert_same(result, one_by_one(twins, arguments, **options))
    assert_same_counters(policies, twins)
    assert is_stacked(policies["p0"])


@BOTH
def test_batches_of_other_lengths_are_filled_up_and_cut(inference):
    policies, twins = (make_policies(6, inference=inference) for _ in range(2))
    for rows in ([3, 1, 2, 3, 2, 3], [1, 100, 1, 0, 90, 2], [0, 0, 0, 0, 0, 0]):
        arguments = make_arguments(policies, rows)
        result = compute_actions(policies, *arguments)
        assert [len(batch.actions) for batch in result.values()] == rows
        assert_same(result, one_by_one(twins, arguments))
    assert_same_counters(policies, twins)


def test_lists_of_rows_and_other_dtypes_are_converted():
    policies, twins = make_policies(2), make_policies(2)
    arguments = ({"p0": [[0, 1, 2]], "p1": np.ones((2, 3))}, {}, {}, {})
    result = compute_actions(policies, arguments[0])
    assert_same(result, one_by_one(twins, arguments))


@pytest.mark.core
def test_policies_of_any_kind_may_act_together_in_any_order():
    class Always(Policy):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(np.full(len(obs_batch), 7), [], {})

    class Mine(PPOTF2Policy):
        def compute_actions(self, *args, **kwargs):
            return super().compute_actions(*args, **kwargs)._replace(state_outs=["mine"])

    def make_mixed():
        make, wide = factories.make, {"fcnet_hiddens": [8]}
        return {
            "wide": make(model=wide),
            "a": make(seed=1),
            "always": Always(SEEN, factories.TWO, {}),
            "graph": make(inference="session"),
            "other graph": make(inference="session", seed=3),
            "b": make(seed=2),
            "greedy": make(seed=4, explore=False),
            "mine": make(Mine),
            "other wide": make(model=wide, seed=5),
        }

    policies, twins = make_mixed(), make_mixed()
    obs = {name: factories.rows_of(SEEN, 3, i) for i, name in enumerate(policies)}
    result = compute_actions(policies, obs)
    assert list(result) == list(policies)
    assert result["always"].actions.tolist() == [7, 7, 7]
    assert result["mine"].state_outs == ["mine"]
    for name in set(policies) - {"always", "mine"}:
        assert_same({name: result[name]}, one_by_one(twins, ({name: obs[name]}, {}, {}, {})))
    assert policies["a"].program is policies["b"].program
    assert not is_stacked(policies["graph"])
    assert result["greedy"].extras["action_prob"].tolist() == [1, 1, 1]


def test_only_policies_with_observations_act():
    policies = make_policies(3)
    assert list(compute_actions(policies, {"p2": factories.rows_of(SEEN, 2)})) == ["p2"]
    assert compute_actions(policies, {}) == {}
    assert [policy.global_timestep for policy in policies.values()] == [0, 0, 2]


def test_one_policy_under_two_ids_draws_twice():
    policy, twin = factories.make(), factories.make()
    obs = factories.rows_of(SEEN, 3)
    result = compute_actions({"a": policy, "b": policy}, {"a": obs, "b": obs})
    assert_same(result, {name: twin.compute_actions(obs) for name in "ab"})
    assert policy.global_timestep == 6


def test_returned_arrays_stay_as_they_are():
    policies = make_policies(2, inference="onnx")
    obs = {name: factories.rows_of(SEEN, 3) for name in policies}
    first = compute_actions(policies, obs)
    before = {name: batch.extras["vf_preds"].copy() for name, batch in first.items()}
    first["p0"].extras["vf_preds"] += 1.0
    compute_actions(policies, {name: x + 1 for name, x in obs.items()})
    np.testing.assert_array_equal(first["p0"].extras["vf_preds"], before["p0"] + 1.0)
    np.testing.assert_array_equal(first["p1"].extras["vf_preds"], before["p1"])


@pytest.mark.core
@BOTH
def test_new_weights_act_at_once(inference):
    policies, twins = (make_policies(3, inference=inference) for _ in range(2))
    arguments = make_arguments(policies, 4)
    compute_actions(policies, *arguments)
    one_by_one(twins, arguments)
    for group in (policies, twins):
        batch = factories.batch_for(factories.make(seed=9), 8)
        group["p1"].learn_on_batch(batch)
        doubled = {key: 2 * x for key, x in group["p2"].get_weights().items()}
        group["p2"].set_weights(doubled)
    result = compute_actions(policies, *arguments)
    assert_same(result, one_by_one(twins, arguments))


def test_only_changed_rows_are_copied_and_dead_policies_are_forgotten():
    policies = make_policies(3)
    states = [policy.driver.acting.state for policy in policies.values()]
    stack = stacked.WeightStack(policies["p0"].program.layout.get_slots("model", "filter"), 3)
    stack.refresh(states)
    stack.refresh(states)
    assert stack.num_copies == 3
    stack.arrays[0][...] = 5.0  # to recognize copied rows
    policies["p1"].set_weights({k: 0 * x for k, x in policies["p1"].get_weights().items()})
    stack.refresh(states)
    assert [row.max() for row in stack.arrays[0]] == [5.0, 0.0, 5.0]
    stack.refresh(states[::-1])  # rows 0 and 2 change places
    assert stack.num_copies == 6
    assert not stack.has_dead_state()
    del policies, states
    gc.collect()
    assert stack.has_dead_state()


def test_policies_of_a_map_act_without_being_brought_back(tmp_path):
    policies = PolicyMap(capacity=2, path=tmp_path)
    policies.update(make_policies(5))
    twins = make_policies(5)
    arguments = make_arguments(twins, 3)
    brought_back = []
    for _ in range(3):
        assert_same(policies.compute_actions(*arguments), one_by_one(twins, arguments))
        brought_back.append(policies.statistics.misses)
    assert_same_counters({name: policies.get_handle(name) for name in policies}, twins)
    assert brought_back == [5, 5, 5]  # in the first call, for the stack
    assert len(policies.in_memory()) == 2
    policies.close()


def test_the_memory_of_stacks_is_bounded(monkeypatch):
    policies = make_policies(6)
    actor = policies["p0"].program.inference.get_stacked_runtime("tf")
    obs = make_arguments(policies, 2)[0]
    for i in range(6):
        for j in range(i):
            compute_actions(policies, {f"p{i}": obs[f"p{i}"], f"p{j}": obs[f"p{j}"]})
    assert len(actor._stacks) == 4
    monkeypatch.setattr(actor, "_max_rows", 5)
    compute_actions(policies, {name: obs[name] for name in ("p0", "p1", "p2")})
    assert [stack.rows for stack in actor._stacks.values()] == [2, 3]
    monkeypatch.setattr(actor, "max_states", 2)  # larger groups are split
    twins = make_policies(6)
    result = compute_actions(policies, obs, explore=False)
    assert_same(result, one_by_one(twins, (obs, {}, {}, {}), explore=False))
    assert max(stack.rows for stack in actor._stacks.values()) <= 3


def test_a_hundred_policies_of_a_kind_are_traced_once():
    policies = make_policies(100, model={"fcnet_hiddens": [3]})
    for rows in (1, 2, 5):
        for count in (2, 50, 100):
            names = list(policies)[:count]
            compute_actions(policies, {name: factories.rows_of(SEEN, rows) for name in names})
    traces = policies["p0"].program.functions.traces
    assert traces["act (stacked, tf)"] == 1


@BOTH
def test_several_threads_may_act_with_the_same_policies(inference):
    policies = make_policies(6, inference=inference)
    obs = make_arguments(policies, 3)[0]
    expected = one_by_one(policies, (obs, {}, {}, {}), explore=False)
    groups = list(itertools.combinations(policies, 3))  # more than there are stacks

    def act(seed):
        for i in np.random.default_rng(seed).permutation(len(groups)):
            chosen = {name: obs[name] for name in groups[i]}
            actual = compute_actions(policies, chosen, explore=False)
            assert_same(actual, {name: expected[name] for name in chosen})

    run_threads(*(functools.partial(act, seed) for seed in range(4)))
    assert [policy.global_timestep for policy in policies.values()] == [3 + 3 * 4 * 10] * 6


def test_untraced_policies_act_one_by_one():
    policies = make_policies(2, eager_tracing=False)
    result = compute_actions(policies, make_arguments(policies, 2)[0])
    assert len(result) == 2
    assert not is_stacked(policies["p0"])


def test_a_stack_that_gives_other_numbers_is_not_used(monkeypatch, caplog):
    right = stacked.StackedFunctionRuntime._call

    def wrong(self, *inputs):
        out = right(self, *inputs)
        return out._replace(logp=out.logp + 0.5)

    monkeypatch.setattr(stacked.StackedFunctionRuntime, "_call", wrong)
    policies, twins = (make_policies(2, model={"fcnet_hiddens": [7]}) for _ in range(2))
    arguments = make_arguments(policies, 2)
    with caplog.at_level("INFO", "tfpolicies"):
        result = compute_actions(policies, *arguments)
    assert_same(result, one_by_one(twins, arguments))
    assert "one by one: stacked, logp differ by 0.5" in caplog.text


def test_an_input_read_by_all_rows_is_no_longer_copied():
    onnx = pytest.importorskip("onnx")
    make, numbers = onnx.helper.make_node, onnx.TensorProto
    nodes = [
        make("Shape", ["x"], ["shape"]),
        make("Gather", ["x", "rows"], ["all"]),  # as `vectorized_map` makes it
        make("Gather", ["all", "one"], ["y"]),  # of the model itself: stays
    ]
    info = onnx.helper.make_tensor_value_info
    inputs = [info("x", numbers.FLOAT, [None, 2])]
    inputs += [info(name, numbers.INT64, [None]) for name in ("rows", "one")]
    graph = onnx.helper.make_graph(nodes, "g", inputs, [info("y", numbers.FLOAT, [None, 2])])
    model = onnx.helper.make_model(graph).SerializeToString()
    nodes = onnx.load_from_string(remove_gathers(model)).graph.node
    kinds = [(node.op_type, list(node.input)) for node in nodes]
    assert kinds == [("Identity", ["x"]), ("Gather", ["all", "one"])]


MISSING = r"obs_batches has 'p9', but .*'p0', 'p1', 'p2'"
MISSHAPEN = r"Policy 'p2': obs_batch must be an array \[B, 3\]"


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: [[1]], UsageError, "obs_batches must be a dict by policy id, got list"),
        (lambda x: [x, 3], UsageError, "state_batches must be a dict by policy id, got int"),
        (lambda x: [x, {"p7": []}], UsageError, "state_batches has the policy 'p7', which"),
        (lambda x: [x, {"p1": [0]}], UsageError, "Policy 'p1': state_batches has 1 arrays"),
        (lambda x: [{"p0": 0, "q": 0}], ObservationError, "Policy 'p0': obs_batch must be"),
        (lambda x: [{**x, "p9": x["p0"]}], UnknownPolicyError, MISSING),
        (lambda x: [{**x, "p2": np.zeros((2, 4))}], ObservationError, MISSHAPEN),
    ],
)
def test_wrong_arguments_are_named_before_anything_changes(change, error, message):
    policies, twins = make_policies(3), make_policies(3)
    obs = make_arguments(policies, 2)[0]
    with pytest.raises(error, match=message):
        compute_actions(policies, *change(obs))
    assert_same_counters(policies, twins)


def test_a_runtime_that_cannot_act_is_named(monkeypatch):
    policies = make_policies(2, inference="onnx", model={"fcnet_hiddens": [6]})

    def refuse(inference):
        raise ConfigError("the model cannot run in ONNX Runtime")

    monkeypatch.setattr(policies["p0"].program.inference, "get_runtime", refuse)
    with pytest.raises(ConfigError, match="Policy 'p0': the model cannot run"):
        compute_actions(policies, make_arguments(policies, 2)[0])
    assert policies["p0"].global_timestep == 0
