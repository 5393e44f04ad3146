"""Additions of policies as values, and the transaction that makes them everywhere or nowhere."""

import pytest

from helpers.multi_agent_envs import SPACE, THREE, Staggered
from tfpolicies import PPOConfig, PPOTF2Policy
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.errors import ConfigError, PolicyExistsError, UsageError
from tfpolicies.rollout.policy_changes import (
    MappingAndTrainable,
    PolicyAddition,
    PolicyTransaction,
)

pytestmark = pytest.mark.usefixtures("kept_programs")


def to_first(agent_id, episode, worker=None, **kwargs):
    return "first"


def to_second(agent_id, episode, worker=None, **kwargs):
    return "second"


class Staged(Staggered):
    """`Staggered`, made by a config."""

    def __init__(self, context):
        super().__init__()


class Holder:
    """Policies of a worker that does not exist: records calls."""

    def __init__(self, calls, name, *, refuses=False):
        self.calls, self.name, self.refuses = calls, name, refuses

    def apply(self, addition):
        self.calls.append((self.name, "apply", addition.policy_id))
        if self.refuses:
            raise ValueError(f"{self.name} refuses")
        return self.name

    def revert(self, policy_id, before):
        self.calls.append((self.name, "revert", policy_id, before.policies_to_train))


# -- the record -------------------------------------------------------------------------------


@pytest.mark.core
def test_arguments_become_one_value():
    config = {"lr": 0.5}
    addition = PolicyAddition.from_arguments(
        ["first"],
        "second",
        PPOTF2Policy,
        observation_space=SPACE,
        action_space=THREE,
        config=config,
        policy_mapping_fn=to_second,
        policies_to_train=["second"],
    )
    assert addition.spec == PolicySpec(PPOTF2Policy, SPACE, THREE, config)
    assert (addition.policy, addition.policy_state) == (None, None)
    assert addition.policy_mapping_fn is to_second
    assert [addition.is_policy_to_train(pid) for pid in ("first", "second")] == [False, True]
    assert addition.calls_on_create


def test_an_instance_is_not_announced_as_created():
    policy = PPOTF2Policy(SPACE, THREE, {"model": {"fcnet_hiddens": [4]}})
    addition = PolicyAddition.from_arguments([], "guest", policy=policy)
    assert (addition.spec, addition.policy, addition.calls_on_create) == (None, policy, False)


def test_for_other_workers_an_addition_has_the_state_only():
    addition = PolicyAddition.from_arguments([], "new", PPOTF2Policy, policy_mapping_fn=to_first)
    other = addition.with_state({"weights": 7})
    assert (other.spec, other.policy, other.policy_state) == (None, None, {"weights": 7})
    assert (other.policy_mapping_fn, other.calls_on_create) == (to_first, True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy_id": "a/b", "module_spec": 1}, ConfigError, "a/b"),
        ({"policy_id": "first", "module_spec": 1}, ConfigError, "module_spec must be None"),
        ({"policy_id": "first"}, PolicyExistsError, "already exists in policy map"),
        ({"policy_id": "new"}, UsageError, "Only one of `policy_cls` and `policy`"),
        ({"policy_id": "new", "policy": 5}, UsageError, "policy must be a Policy, got 5"),
        (
            {"policy_id": "new", "policy_cls": PPOTF2Policy, "policy_mapping_fn": 5},
            ConfigError,
            "policy_mapping_fn must be a function",
        ),
        (
            {"policy_id": "new", "policy_cls": PPOTF2Policy, "policies_to_train": 5},
            UsageError,
            "policies_to_train must be",
        ),
    ],
)
def test_wrong_arguments_are_named_in_one_order(arguments, error, message):
    with pytest.raises(error, match=message):
        PolicyAddition.from_arguments(["first"], **arguments)


# -- the transaction --------------------------------------------------------------------------


@pytest.mark.core
def test_a_transaction_that_ends_well_takes_nothing_back():
    calls = []
    with PolicyTransaction() as transaction:
        for name in ("here", "there"):
            holder = Holder(calls, name)
            assert transaction.add(holder, PolicyAddition("p"), MappingAndTrainable()) == name
    assert calls == [("here", "apply", "p"), ("there", "apply", "p")]


@pytest.mark.core
def test_if_one_refuses_all_are_taken_back_in_opposite_order():
    calls = []

    def add_to_both():
        with PolicyTransaction() as transaction:
            for number, name in enumerate(("here", "there"), start=1):
                holder = Holder(calls, name, refuses=name == "there")
                transaction.add(holder, PolicyAddition("p"), MappingAndTrainable(None, number))

    with pytest.raises(ValueError, match="there refuses"):
        add_to_both()
    assert calls == [
        ("here", "apply", "p"),
        ("there", "apply", "p"),
        ("there", "revert", "p", 2),
        ("here", "revert", "p", 1),
    ]


# -- all workers of an algorithm --------------------------------------------------------------


class Refuses(DefaultCallbacks):
    """Refuses a policy, by its id."""

    refuses = True

    def on_create_policy(self, *, policy_id, policy):
        if policy_id == "second" and self.refuses:
            raise RuntimeError("no second policy")


def algorithm_with(callbacks=DefaultCallbacks):
    return (
        PPOConfig()
        .environment(Staged)
        .framework(inference="tf", jit_compile=False)
        .rollouts(rollout_fragment_length=7)
        .training(model={"fcnet_hiddens": [4]}, train_batch_size=14, sgd_minibatch_size=8)
        .multi_agent(
            policies={"first": (None, SPACE, THREE, {})},
            policy_mapping_fn=to_first,
            policies_to_train=["first"],
        )
        .evaluation(evaluation_interval=1, evaluation_duration=1)
        .callbacks(callbacks)
        .debugging(seed=1, log_level="ERROR")
        .build()
    )


def roles_of(workers):
    local = workers.local_worker()
    return sorted(local.policy_map), sorted(local.policy_dict), local.policies.mapping_and_trainable


ADDED = {"policy_mapping_fn": to_second, "policies_to_train": ["second"]}


def test_a_policy_that_cannot_be_evaluated_is_added_to_nobody(monkeypatch):
    algorithm = algorithm_with()
    both = algorithm.workers, algorithm.evaluation_workers
    before = [roles_of(workers) for workers in both]

    def refuse(policy, policy_id):
        raise RuntimeError(f"no copy of {policy_id}")

    with monkeypatch.context() as patched:
        patched.setattr(algorithm._evaluator, "copy_policy", refuse)
        with pytest.raises(RuntimeError, match="no copy of second"):
            algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert [roles_of(workers) for workers in both] == before

    algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert [roles_of(workers)[0] for workers in both] == [["first", "second"]] * 2
    assert algorithm.train()["info"]["learner"].keys() == {"second"}
    algorithm.stop()


def test_a_policy_of_that_id_which_only_evaluates_stays_when_another_one_is_refused():
    algorithm = algorithm_with()
    algorithm.add_policy("second", PPOTF2Policy)
    algorithm.remove_policy("second", evaluation_workers=False)
    evaluated = algorithm.evaluation_worker.get_policy("second")
    with pytest.raises(PolicyExistsError):
        algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert algorithm.evaluation_worker.get_policy("second") is evaluated
    assert sorted(algorithm.worker.policy_map) == ["first"]
    assert algorithm.worker.policy_mapping_fn is to_first
    algorithm.stop()


def test_a_policy_that_a_callback_refuses_leaves_no_trace(monkeypatch):
    algorithm = algorithm_with(Refuses)
    both = algorithm.workers, algorithm.evaluation_workers
    before = [roles_of(workers) for workers in both]
    with pytest.raises(RuntimeError, match="no second policy"):
        algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert [roles_of(workers) for workers in both] == before
    monkeypatch.setattr(Refuses, "refuses", False)
    algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert [roles_of(workers)[0] for workers in both] == [["first", "second"]] * 2
    algorithm.stop()
