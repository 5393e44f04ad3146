"""Additions of policies as values, and the transaction that applies them everywhere or nowhere."""

import pytest

from helpers.multi_agent_envs import SPACE, THREE, Staggered
from helpers.workers import make_callbacks, make_config, map_all_to
from tfpolicies import PPOTF2Policy
from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.errors import ConfigError, PolicyExistsError, UsageError
from tfpolicies.rollout.policy_changes import (
    MappingAndTrainable,
    PolicyAddition,
    PolicyTransaction,
)

pytestmark = pytest.mark.usefixtures("kept_programs")


to_first, to_second = map_all_to("first"), map_all_to("second")
ADDED = {"policy_mapping_fn": to_second, "policies_to_train": ["second"]}


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


@pytest.mark.core
def test_arguments_become_one_value():
    spec = {"observation_space": SPACE, "action_space": THREE, "config": {"lr": 0.5}}
    addition = PolicyAddition.from_arguments(["first"], "second", PPOTF2Policy, **spec, **ADDED)
    assert addition.spec == PolicySpec(PPOTF2Policy, **spec)
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


CLASS = {"policy_cls": PPOTF2Policy}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy_id": "a/b", "module_spec": 1}, ConfigError, "a/b"),
        ({"policy_id": "first", "module_spec": 1}, ConfigError, "module_spec must be None"),
        ({"policy_id": "first"}, PolicyExistsError, "already exists in policy map"),
        ({}, UsageError, "Only one of `policy_cls` and `policy`"),
        ({"policy": 5}, UsageError, "policy must be a Policy, got 5"),
        ({**CLASS, "policy_mapping_fn": 5}, ConfigError, "policy_mapping_fn must be a function"),
        ({**CLASS, "policies_to_train": 5}, UsageError, "policies_to_train must be"),
    ],
)
def test_wrong_arguments_are_named_in_one_order(arguments, error, message):
    with pytest.raises(error, match=message):
        PolicyAddition.from_arguments(["first"], **{"policy_id": "new", **arguments})


@pytest.mark.core
def test_a_transaction_that_succeeds_reverts_nothing():
    calls = []
    with PolicyTransaction() as transaction:
        for name in ("here", "there"):
            holder = Holder(calls, name)
            assert transaction.add(holder, PolicyAddition("p"), MappingAndTrainable()) == name
    assert calls == [("here", "apply", "p"), ("there", "apply", "p")]


@pytest.mark.core
def test_if_one_refuses_all_are_reverted_in_opposite_order():
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


@pytest.fixture
def build():
    """Builds algorithms, which are stopped after the test."""
    algorithms = []

    policies = {"policies": {"first": (None, SPACE, THREE, {})}, "policy_mapping_fn": to_first}
    policies |= {"policies_to_train": ["first"], "rollout_fragment_length": 7}
    policies |= {"train_batch_size": 14, "sgd_minibatch_size": 8}

    def build_one(**settings):
        settings |= {"evaluation_interval": 1, "evaluation_duration": 1}
        algorithms.append(make_config(Staggered, **policies, **settings).build())
        return algorithms[-1]

    yield build_one
    for algorithm in algorithms:
        algorithm.stop()


def get_roles(algorithm):
    workers = algorithm.workers.local_worker(), algorithm.evaluation_workers.local_worker()
    return [
        (sorted(x.policy_map), sorted(x.policy_dict), x.policies.mapping_and_trainable)
        for x in workers
    ]


def check_added(algorithm):
    algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert [policies for policies, *_ in get_roles(algorithm)] == [["first", "second"]] * 2


def test_a_policy_that_cannot_be_evaluated_is_not_added(build, monkeypatch):
    algorithm = build()
    before = get_roles(algorithm)

    def refuse(policy, policy_id):
        raise RuntimeError(f"no copy of {policy_id}")

    with monkeypatch.context() as patch:
        patch.setattr(algorithm._evaluator, "copy_policy", refuse)
        with pytest.raises(RuntimeError, match="no copy of second"):
            algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert get_roles(algorithm) == before
    check_added(algorithm)
    assert algorithm.train()["info"]["learner"].keys() == {"second"}


def test_an_evaluated_policy_of_that_id_stays_when_another_one_is_refused(build):
    algorithm = build()
    algorithm.add_policy("second", PPOTF2Policy)
    algorithm.remove_policy("second", evaluation_workers=False)
    evaluated = algorithm.evaluation_worker.get_policy("second")
    with pytest.raises(PolicyExistsError):
        algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert algorithm.evaluation_worker.get_policy("second") is evaluated
    assert sorted(algorithm.worker.policy_map) == ["first"]
    assert algorithm.worker.policy_mapping_fn is to_first


def test_a_policy_that_a_callback_refuses_leaves_no_trace(build):
    refusals = ["no second policy"]

    def on_create_policy(policy_id, policy):
        if policy_id == "second" and refusals:
            raise RuntimeError(refusals.pop())

    algorithm = build(callbacks=make_callbacks(on_create_policy=on_create_policy))
    before = get_roles(algorithm)
    with pytest.raises(RuntimeError, match="no second policy"):
        algorithm.add_policy("second", PPOTF2Policy, **ADDED)
    assert get_roles(algorithm) == before
    check_added(algorithm)
