"""Workers and algorithms with several policies: adding, removing, mapping, training, restoring."""

import random

import numpy as np
import pytest
from gymnasium import spaces

from helpers.custom_policies import ZeroPolicy
from helpers.keras_models import two_layers, unregistered_layer
from helpers.multi_agent_envs import SPACE, THREE, Staggered
from helpers.two_policies import (
    Staged,
    a_and_b,
    all_left,
    all_new,
    make_config,
    make_worker,
    only_left,
    same,
)
from tfpolicies import (
    Algorithm,
    AlgorithmConfig,
    DQNConfig,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
)
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.errors import (
    CheckpointError,
    ConfigError,
    PolicyExistsError,
    UnknownPolicyError,
    UsageError,
    WeightsError,
)

pytestmark = pytest.mark.usefixtures("kept_programs")


def make_config_with_evaluation(**settings):
    return make_config().evaluation(evaluation_duration=1, **settings)


def get_evaluated_policies(algorithm):
    return set(algorithm.evaluate()["evaluation"]["policy_reward_mean"])


# -- the worker -------------------------------------------------------------------------------


def test_an_environment_may_leave_the_spaces_to_the_policies():
    class WithoutSpaces(Staged):
        observation_space = action_space = None
        _agent_ids = ()

    specs = {name: PolicySpec(None, SPACE, THREE) for name in ("left", "right")}
    algorithm = make_config(policies=specs).environment(WithoutSpaces).build()
    assert algorithm.train()["num_env_steps_sampled"] == 14


def test_each_policy_gets_the_rows_of_its_agents():
    worker = make_worker()
    batch = worker.sample()
    assert batch.env_steps() == 7
    counts = {pid: rows.count for pid, rows in batch.policy_batches.items()}
    assert counts == {"left": 7, "right": 4}
    assert batch["left"]["rewards"].tolist() == [1.0] * 7
    assert batch["right"]["rewards"].tolist() == [2.0, 2.0, 2.0, 1.0]


def test_policies_have_their_own_class_spaces_and_overrides():
    specs = {
        "left": PolicySpec(config={"gamma": 0.5}),
        "right": (PGTF2Policy, None, None, AlgorithmConfig.overrides(gamma=0.25, lr=0.5)),
    }
    worker = make_worker(policies=specs)
    left, right = worker.get_policy("left"), worker.get_policy("right")
    assert (type(left), type(right)) == (PPOTF2Policy, PGTF2Policy)
    assert left.get_hyperparameter("gamma") == left.config["gamma"] == 0.5
    assert right.get_hyperparameter("gamma") == 0.25
    assert right.get_hyperparameter("lr") == 0.5
    assert (left.observation_space, right.action_space) == (SPACE, THREE)
    assert worker.policy_dict["right"].policy_class is PGTF2Policy
    assert not same(left.get_weights(), make_worker().get_policy("right").get_weights())


def test_the_same_seed_gives_the_same_policies_and_batches():
    one, other = make_worker(), make_worker()
    assert same(one.get_weights()["left"], other.get_weights()["left"])
    batches = [worker.sample() for worker in (one, other)]
    assert (batches[0]["left"]["actions"] == batches[1]["left"]["actions"]).all()


def test_policies_need_several_agents_and_classes():
    with pytest.raises(ConfigError, match="Have multiple policies"):
        make_worker(make_config().environment("CartPole-v1"))
    with pytest.raises(ConfigError, match="no class for the policy 'left'"):
        make_worker(policy_class=None)


# -- adding and removing ----------------------------------------------------------------------


def test_a_policy_is_added_in_the_middle_of_an_episode_and_plays_from_the_next_one():
    worker = make_worker(make_config().rollouts(rollout_fragment_length=3))
    worker.sample()
    added = worker.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new, config={"gamma": 0.5})
    assert added is worker.get_policy("new")
    assert added.get_hyperparameter("gamma") == 0.5
    assert set(worker.sample().policy_batches) == {"left", "right"}  # the same episode
    third = worker.sample()  # its last step and two of the next
    assert set(third.policy_batches) == {"left", "right", "new"}
    assert set(worker.sample().policy_batches) == {"new"}


def test_an_instance_is_added_as_it_is_but_one_of_another_worker_as_a_copy():
    worker, other = make_worker(), make_worker()
    tf_policy = PPOTF2Policy(SPACE, THREE, {"model": {"fcnet_hiddens": [4]}, "inference": "tf"})
    for policy_id, policy in {"tf": tf_policy, "zero": ZeroPolicy(SPACE, THREE)}.items():
        assert worker.add_policy(policy_id, policy=policy) is policy
    foreign = other.get_policy("left")
    copied = worker.add_policy("copy", policy=foreign)
    assert copied is not foreign
    assert same(copied.get_weights(), foreign.get_weights())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy_id": "bad/id"}, ConfigError, "bad/id"),
        ({"policy_id": "left", "policy_cls": None}, PolicyExistsError, "already exists"),
        ({"policy_cls": None}, UsageError, "Only one of"),
        ({"policy": ZeroPolicy(SPACE, THREE)}, UsageError, "Only one of"),
        ({"module_spec": 1}, ConfigError, "module_spec"),
        ({"policy_mapping_fn": "left"}, ConfigError, "policy_mapping_fn"),
        ({"policies_to_train": "left"}, UsageError, "policies_to_train"),
        ({"policy_state": {"weights": {}}}, WeightsError, "global_timestep"),
        ({"config": {"gama": 1}}, ConfigError, "gama"),
    ],
)
def test_a_policy_that_cannot_be_added_changes_nothing(arguments, error, message):
    worker = make_worker()
    before = worker.policy_mapping_fn, worker.is_policy_to_train, dict(worker.policy_dict)
    with pytest.raises(error, match=message):
        worker.add_policy(**{"policy_id": "new", "policy_cls": PPOTF2Policy, **arguments})
    assert set(worker.policy_map) == {"left", "right"}
    assert (worker.policy_mapping_fn, worker.is_policy_to_train, worker.policy_dict) == before
    worker.sample()


def test_a_removed_policy_leaves_no_trace_and_its_running_episodes_are_dropped():
    worker = make_worker(make_config().rollouts(rollout_fragment_length=3))
    worker.sample()
    worker.remove_policy(policy_id="right", policy_mapping_fn=all_left)
    batch = worker.sample()
    assert set(batch.policy_batches) == {"left"}
    assert batch["left"]["t"].min() == 0  # a new episode
    assert worker.get_policy("right") is None
    assert set(worker.policy_dict) == {"left"}
    for error in (UnknownPolicyError, ValueError):
        with pytest.raises(error, match="not in policy map"):
            worker.remove_policy(policy_id="right")


def map_by_episode(agent_id, episode, worker, **kwargs):
    return "right" if episode.length >= 0 and agent_id == "b" else "left"


def test_a_policy_that_agents_are_mapped_to_cannot_be_removed():
    algorithm = make_config_with_evaluation(evaluation_interval=1).build()
    worker = algorithm.worker
    before = worker.policy_mapping_fn, dict(worker.policy_dict)
    message = r"'right' cannot be removed: policy_mapping_fn \(a_and_b\) maps agent 'b' to it"
    for owner in (algorithm, worker, algorithm.workers):
        with pytest.raises(UsageError, match=message):
            owner.remove_policy(policy_id="right")
    with pytest.raises(UsageError, match=r"remove_policy\('left', policy_mapping_fn=\.{3}\)"):
        algorithm.remove_policy("left", policy_mapping_fn=all_left)
    worker.sample()
    with pytest.raises(UsageError, match="map_by_episode"):
        worker.remove_policy(policy_id="right", policy_mapping_fn=map_by_episode)
    assert (worker.policy_mapping_fn, worker.policy_dict) == before
    assert set(algorithm.evaluation_worker.policy_map) == {"left", "right"}
    algorithm.remove_policy("right", policy_mapping_fn=all_left)
    assert set(algorithm.evaluation_worker.policy_map) == {"left"}


def test_a_policy_that_is_drawn_at_random_cannot_be_removed():
    def draw(agent_id, episode, worker, **kwargs):
        return random.choice(["left", "right"])

    worker = make_worker(policy_mapping_fn=draw)
    for seed in range(5):
        random.seed(seed)
        before = random.getstate()
        with pytest.raises(UsageError, match="maps agent 'a' to it"):
            worker.remove_policy(policy_id="right")
        assert random.getstate() == before


def test_a_policy_that_agents_are_mapped_to_is_replaced_as_the_error_says():
    algorithm = make_config_with_evaluation(evaluation_interval=1).build()
    left = algorithm.get_policy("left")
    with pytest.raises(UsageError) as refusal:
        algorithm.remove_policy("right")
    for text in (
        "To replace the policy, then call add_policy('right', ..., policy_mapping_fn=...)",
        "get_policy('right').set_state(get_policy(OTHER).get_state())",
    ):
        assert text in str(refusal.value)
    algorithm.remove_policy("right", policy_mapping_fn=all_left)
    algorithm.add_policy("right", policy=left.copy("right"), policy_mapping_fn=a_and_b)
    assert set(algorithm.train()["evaluation"]["policy_reward_mean"]) == {"left", "right"}
    right = algorithm.get_policy("right")
    right.set_state(left.get_state())
    assert same(left.get_weights(), right.get_weights())


def test_a_policy_without_spaces_is_named():
    class Unlike(Staggered):
        observation_space = spaces.Dict({"a": SPACE, "b": spaces.Box(-1.0, 2e6, (3,))})
        _agent_ids = ("a", "b")

    config = make_config(policies={"left", "right", "spare"}).environment(Unlike)
    words = r"no spaces for the policy 'spare'.*policy_mapping_fn \(\w+\) maps none.*'spare' for an"
    with pytest.raises(ConfigError, match=words):
        make_worker(config)
    unmapped = AlgorithmConfig().environment(Unlike).multi_agent(policies={"left", "right"})
    with pytest.raises(ConfigError, match=r"policy_mapping_fn \(not set\).*--policy-mapping"):
        make_worker(unmapped)
    specs = {"spare": PolicySpec(None, THREE, None), "left": PolicySpec(), "right": PolicySpec()}
    worker = make_worker(config.copy(copy_frozen=False).multi_agent(policies=specs))
    assert worker.get_policy("spare").observation_space == THREE
    assert worker.get_policy("right").observation_space == Unlike.observation_space["b"]
    with pytest.raises(ConfigError, match="no spaces for the policy 'new'"):
        worker.add_policy("new", PPOTF2Policy)
    assert "new" not in worker.policy_map

    def by_name(agent_id, episode=None, worker=None, **kwargs):
        return {"a": "new", "b": "right"}[agent_id]

    worker.add_policy("new", PPOTF2Policy, policy_mapping_fn=by_name)
    assert worker.get_policy("new").observation_space == SPACE


def test_callbacks_are_called_with_new_policies():
    policy_ids = []

    class Noting(DefaultCallbacks):
        def on_create_policy(self, *, policy_id, policy):
            policy_ids.append(policy_id)

    make_worker(make_config().callbacks(Noting)).add_policy("new", PGTF2Policy)
    assert sorted(policy_ids) == ["left", "new", "right"]


# -- policies to train ------------------------------------------------------------------------


@pytest.mark.parametrize("to_train", [["left"], {"left"}, only_left], ids=["list", "set", "fn"])
def test_only_policies_to_train_learn(to_train):
    worker = make_worker(policies_to_train=to_train)
    before = worker.get_weights()
    batch = worker.sample()
    assert worker.get_policies_to_train() == {"left"}
    assert set(worker.learn_on_batch(batch)) == {"left"}
    gradients, infos = worker.compute_gradients(batch)
    assert set(gradients) == {"left"}
    assert infos["batch_count"] == 7
    worker.apply_gradients({**gradients, "right": gradients["left"]})
    after = worker.get_weights()
    assert not same(before["left"], after["left"])
    assert same(before["right"], after["right"])
    assert worker.foreach_policy_to_train(lambda policy, policy_id: policy_id) == ["left"]


def test_a_function_that_chooses_policies_to_train_is_given_the_batch():
    batches = []

    def has_many_rows(policy_id, batch=None):
        batches.append(batch)
        return batch is not None and batch[policy_id].count > 5

    worker = make_worker(policies_to_train=has_many_rows)
    assert set(worker.learn_on_batch(worker.sample())) == {"left"}
    assert all(batch is None or batch["left"].count == 7 for batch in batches)


def test_no_policy_is_trained_with_an_empty_list():
    worker = make_worker(policies_to_train=["left"])
    worker.set_is_policy_to_train([])
    assert worker.get_policies_to_train() == set()
    assert worker.learn_on_batch(worker.sample()) == {}
    with pytest.raises(UsageError):
        worker.set_is_policy_to_train(None)


class Recording(ZeroPolicy):
    def on_global_var_update(self, global_vars):
        super().on_global_var_update(global_vars)
        self.global_vars = global_vars


def test_policies_are_given_the_global_variables_and_their_own_number_of_updates():
    worker = make_worker(policy_class=Recording)
    updates = {"num_grad_updates_per_policy": {"left": 2}}
    worker.set_global_vars({"timestep": 9, "phase": "late", **updates})
    for policy_id, count in (("left", 2), ("right", None)):
        expected = {"timestep": 9, "phase": "late", "num_grad_updates": count}
        assert worker.get_policy(policy_id).global_vars == expected
    assert worker.get_global_vars() == {"timestep": 9, **updates}


def test_counters_go_to_trained_policies_only():
    worker = make_worker(policies_to_train=["left"])
    updates = {"left": 3, "right": 4}
    worker.set_global_vars({"timestep": 100, "num_grad_updates_per_policy": updates})
    assert worker.get_policy("left").global_timestep == 100
    assert worker.get_policy("left").num_grad_updates == 3
    assert worker.get_policy("right").global_timestep == 0
    worker.set_global_vars({"timestep": 200}, policy_ids=["right"])
    assert worker.get_policy("left").global_timestep == 100


# -- weights and state ------------------------------------------------------------------------


def test_weights_of_one_number_are_set_once():
    worker = make_worker()
    zeros, ones = (
        {pid: {k: x * 0 + i for k, x in ws.items()} for pid, ws in worker.get_weights().items()}
        for i in range(2)
    )
    worker.set_weights(zeros, weights_seq_no=1)
    worker.set_weights(ones, weights_seq_no=1)
    assert all(not x.any() for x in worker.get_weights("left")["left"].values())
    worker.set_weights(ones, weights_seq_no=2)
    assert all((x == 1).all() for x in worker.get_weights(["left"])["left"].values())
    with pytest.raises(UnknownPolicyError):
        worker.set_weights({"nobody": {}})


def test_a_workers_state_goes_to_another_one_with_its_policies():
    worker, other = make_worker(), make_worker()
    worker.add_policy("new", PGTF2Policy, policy_mapping_fn=all_new, policies_to_train=["new"])
    worker.learn_on_batch(worker.sample())
    state = worker.get_state()
    assert sorted(state["policy_ids"]) == ["left", "new", "right"]
    other.set_state(state)
    assert type(other.get_policy("new")) is PGTF2Policy
    assert other.get_policies_to_train() == {"new"}
    assert other.policy_mapping_fn is all_new
    np.testing.assert_equal(other.get_weights(), worker.get_weights())


def test_a_state_in_which_all_are_trained_ends_a_choice():
    worker, other = make_worker(), make_worker(policies_to_train=["left"])
    other.set_state(worker.get_state())
    assert other.get_policies_to_train() == {"left", "right"}


@pytest.mark.parametrize("wrong", ["no state", {}, "id", "spec", "shape"])
def test_a_state_that_does_not_fit_a_worker_changes_nothing(wrong):
    worker, state = make_worker(), make_worker().get_state()
    policies = state["policy_states"]
    policies["left"]["weights"] = {n: x + 1 for n, x in policies["left"]["weights"].items()}
    if wrong == "id":
        policies["a/b"] = policies["right"]
    elif wrong == "spec":
        policies["new"] = {n: x for n, x in policies["right"].items() if n != "policy_spec"}
    elif wrong == "shape":
        policies["new"] = {**policies["right"], "weights": {}}
    else:
        state = wrong
    before = worker.get_weights()
    with pytest.raises((WeightsError, ConfigError)) as error:
        worker.set_state(state)
    assert {"id": "a/b", "spec": "'policy_spec'"}.get(str(wrong), "") in str(error.value)
    assert set(worker.policy_map) == {"left", "right"}
    assert same(worker.get_weights()["left"], before["left"])


def test_filters_are_copied_to_another_worker():
    worker, other = (
        make_worker(make_config().rollouts(observation_filter="MeanStdFilter")) for _ in range(2)
    )
    worker.sample()
    result = worker.get_filters(flush_after=True)
    assert set(result) == {"left", "right"}
    assert result["left"].pending_count == 7
    assert worker.get_filters()["left"].pending_count == 0
    other.sync_filters(worker.get_filters())
    (expected,), (actual,) = (x.filters["left"].get_scalings() for x in (worker, other))
    assert (actual.mean == expected.mean).all()
    with pytest.raises(AssertionError, match=r"missing: \['right'\], unknown: \['x'\]"):
        other.sync_filters({"left": result["left"], "x": result["left"]})
    with pytest.raises(WeightsError, match="classes and shapes are equal"):
        other.sync_filters({"left": worker.filters["left"], "right": 1})
    assert other.filters["left"].statistics[0].count == 7


# -- algorithms -------------------------------------------------------------------------------


def test_an_algorithm_trains_some_of_its_policies_and_counts_steps():
    algorithm = make_config(policies_to_train=["left"]).build()
    before = algorithm.get_weights()
    result = algorithm.train()
    assert set(result["info"]["learner"]) == {"left"}
    assert result["num_env_steps_sampled"] == result["num_env_steps_trained"] == 14
    assert result["num_agent_steps_sampled"] == 22
    assert result["num_agent_steps_trained"] == 14
    assert result["timesteps_total"] == 14
    assert result["policy_reward_mean"] == {"left": 7.0, "right": 7.0}
    after = algorithm.get_weights()
    assert same(before["right"], after["right"])
    assert not same(before["left"], after["left"])


def test_agents_steps_are_counted_where_asked_for():
    algorithm = make_config(count_steps_by="agent_steps").training(train_batch_size=21).build()
    result = algorithm.train()
    assert result["num_agent_steps_sampled_this_iter"] >= 21
    assert result["timesteps_total"] == result["num_agent_steps_sampled"]


@pytest.mark.soak
@pytest.mark.parametrize("config_class", [PPOConfig, DQNConfig])
def test_policies_come_and_go_while_training(config_class):
    config = make_config(config_class)
    if config_class is DQNConfig:
        config.training(num_steps_sampled_before_learning_starts=10)
    config.evaluation(evaluation_duration=2, evaluation_config={"explore": False})
    algorithm = config.build()
    algorithm.train()
    algorithm.evaluate()
    snapshot = algorithm.get_policy("left").copy("new")
    added = algorithm.add_policy("new", policy=snapshot, policies_to_train=["left"])
    assert algorithm.evaluation_worker.get_policy("new") is not None
    assert same(added.get_weights(), algorithm.get_weights()["left"])
    algorithm.add_policy("other", type(added), policy_mapping_fn=all_new)
    for _ in range(3):
        result = algorithm.train()
    assert get_evaluated_policies(algorithm) == {"new"}
    assert set(result["info"]["learner"]) <= {"left"}
    algorithm.remove_policy("other")
    assert set(algorithm.evaluation_worker.policy_map) == {"left", "right", "new"}
    with pytest.raises(PolicyExistsError):
        algorithm.add_policy("new", policy=snapshot)
    with pytest.raises(UnknownPolicyError):
        algorithm.remove_policy("other")
    algorithm.train()


def test_evaluation_plays_whole_episodes_and_disturbs_nothing():
    quiet, busy = (make_config().evaluation(evaluation_duration=3).build() for _ in range(2))
    result = busy.evaluate()["evaluation"]
    assert result["hist_stats"]["episode_lengths"] == [7, 7, 7]
    assert result["num_env_steps_sampled_this_iter"] == 21
    assert result["num_agent_steps_sampled_this_iter"] == 33
    quiet.train(), busy.train()
    assert same(quiet.get_weights()["left"], busy.get_weights()["left"])


@pytest.mark.parametrize("nested", [False, True])
def test_evaluation_may_have_a_mapping_of_its_own(tmp_path, nested):
    overrides = {"policy_mapping_fn": all_left}
    overrides = {"multiagent": overrides} if nested else overrides
    algorithm = make_config_with_evaluation(evaluation_config=overrides).build()
    assert get_evaluated_policies(algorithm) == {"left"}
    assert set(algorithm.train()["info"]["learner"]) == {"left", "right"}
    algorithm.save(tmp_path)
    algorithm.restore(tmp_path)
    assert get_evaluated_policies(algorithm) == {"left"}
    algorithm.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new)
    assert get_evaluated_policies(algorithm) == {"new"}  # set for all workers


@pytest.mark.parametrize("early", [False, True])
def test_policies_that_are_added_explore_in_evaluation_as_the_others_do(tmp_path, early):
    algorithm = make_config_with_evaluation(evaluation_config={"explore": False}).build()
    if early:
        algorithm.evaluate()
    algorithm.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new)

    def check_exploration(algorithm):
        algorithm.evaluate()
        policies = algorithm.evaluation_worker.policy_map
        assert [policies[pid].config["explore"] for pid in ("left", "new")] == [False, False]
        assert algorithm.get_policy("new").config["explore"] is True
        obs = np.full((64, 3), 2.0, np.float32)
        assert len(set(policies["new"].driver.acting.act([obs])[1]["actions"].tolist())) == 1

    check_exploration(algorithm)
    algorithm.save(tmp_path)
    settings = {"policy_mapping_fn": all_new, "config": {"env": Staged}}
    check_exploration(Algorithm.from_checkpoint(tmp_path, **settings))


@pytest.mark.parametrize("early", [False, True])
def test_policies_that_are_added_are_evaluated_with_the_settings_of_evaluation(tmp_path, early):
    greedy = {"type": "EpsilonGreedy", "initial_epsilon": 0.25}
    overrides = {"exploration_config": greedy, "lambda_": 0.5, "use_gae": False}
    config = make_config_with_evaluation(evaluation_config={**overrides, "clip_actions": True})
    policies = {"left": PolicySpec(config={"lambda": 0.75}), "right": PolicySpec()}
    algorithm = config.multi_agent(policies=policies).build()
    if early:
        algorithm.evaluate()
    algorithm.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new)
    algorithm.add_policy("own", PPOTF2Policy, config={"lambda": 0.75})
    algorithm.add_policy("pg", PGTF2Policy)
    algorithm.get_policy("new").note = "kept"
    snapshot = algorithm.get_policy("new").copy("snapshot")
    algorithm.add_policy("snapshot", policy=snapshot)
    algorithm.train()

    def check_policies(algorithm):
        algorithm.evaluate()
        evaluated, trained = (w.policy_map for w in (algorithm.evaluation_worker, algorithm.worker))
        for policy_id, other_id, value, trained_value in (
            ("new", "right", 0.5, 1.0),
            ("own", "left", 0.75, 0.75),
            ("snapshot", "right", 0.5, 1.0),
        ):
            policy, other = evaluated[policy_id], evaluated[other_id]
            assert type(policy.exploration).__name__ == "EpsilonGreedy"
            assert policy.program is other.program is not trained[policy_id].program
            assert [x.get_hyperparameter("lambda") for x in (policy, other)] == [value, value]
            different = {name for name, x in policy.config.items() if x != other.config[name]}
            assert not different - {"env"}  # a class, which no file holds
            assert same(policy.get_weights(), trained[policy_id].get_weights())
            assert type(trained[policy_id].exploration).__name__ == "StochasticSampling"
            assert trained[policy_id].get_hyperparameter("lambda") == trained_value
        assert type(evaluated["pg"].exploration).__name__ == "EpsilonGreedy"
        assert "lambda" not in evaluated["pg"].config
        assert evaluated["pg"].config["clip_actions"] is True

    check_policies(algorithm)
    assert algorithm.evaluation_worker.get_policy("snapshot").note == "kept"
    algorithm.save(tmp_path)
    settings = {"policy_mapping_fn": all_new, "config": {"env": Staged}}
    check_policies(Algorithm.from_checkpoint(tmp_path, **settings))


def test_a_custom_policy_that_is_added_reads_the_settings_of_evaluation():
    policy = ZeroPolicy(SPACE, THREE, {"gamma": 0.99, "lr": 5e-5, "more": 3})
    algorithm = make_config_with_evaluation(evaluation_config={"gamma": 0.5}).build()
    algorithm.add_policy("zero", policy=policy, policy_mapping_fn=all_left)
    algorithm.evaluate()
    evaluated = algorithm.evaluation_worker.get_policy("zero")
    assert evaluated.config == {"gamma": 0.5, "lr": 5e-5, "more": 3}
    assert algorithm.get_policy("zero").config["gamma"] == 0.99


def count_updates(algorithm):
    return {pid: x.num_grad_updates for pid, x in algorithm.worker.policy_map.items()}


def test_each_policy_learns_with_its_own_epochs_and_minibatches(tmp_path):
    specs = {
        "left": PolicySpec(config={"num_sgd_iter": 1}),
        "right": PolicySpec(config={"sgd_minibatch_size": 3}),
    }
    algorithm = make_config(policies=specs).build()
    algorithm.train()
    # 14 rows of "left" and 8 of "right"; the algorithm's settings are 2 epochs of 8 rows
    assert count_updates(algorithm) == {"left": 2, "right": 6}
    algorithm.add_policy("new", PPOTF2Policy, config={"num_sgd_iter": 5, "lambda": 0.5})
    algorithm.save(tmp_path)
    settings = {"env": Staged, "num_sgd_iter": 3}
    restored = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=a_and_b, config=settings)
    restored.train()
    assert count_updates(restored) == {"left": 4, "right": 15, "new": 0}
    assert restored.get_policy("new").config["num_sgd_iter"] == 5


def test_an_added_policy_cannot_have_settings_of_the_whole_run(tmp_path):
    algorithm = make_config().build()
    with pytest.raises(ConfigError, match=r"'new'.* cannot have train_batch_size=50"):
        algorithm.add_policy("new", PPOTF2Policy, config={"train_batch_size": 50})
    assert set(algorithm.worker.policy_map) == {"left", "right"}
    algorithm.add_policy("new", PPOTF2Policy, config=algorithm.get_policy("left").config)
    algorithm.add_policy("other", PPOTF2Policy, config=make_config().training(gamma=0.5))
    foreign = PPOTF2Policy(SPACE, THREE, {"model": {"fcnet_hiddens": [4]}, "inference": "tf"})
    algorithm.add_policy("foreign", policy=foreign)  # with other settings of a run
    algorithm.save(tmp_path)
    settings = {"policy_mapping_fn": a_and_b, "config": {"env": Staged}}
    restored = Algorithm.from_checkpoint(tmp_path, **settings)
    assert set(restored.worker.policy_map) == {"left", "right", "new", "other", "foreign"}
    assert restored.get_policy("other").get_hyperparameter("gamma") == 0.5


def test_a_run_setting_may_change_on_restoring_though_a_policy_has_the_old_value(tmp_path):
    overrides = {"gamma": 0.5, "train_batch_size": 14, "sgd_minibatch_size": 14}
    specs = {"left": PolicySpec(config=overrides), "right": PolicySpec()}
    make_config(policies=specs).build().save(tmp_path)
    changes = {"env": Staged, "train_batch_size": 28}
    restored = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=a_and_b, config=changes)
    assert restored.config.policies["left"].config == {"gamma": 0.5, "sgd_minibatch_size": 14}
    assert restored.get_policy("left").get_hyperparameter("gamma") == 0.5


def test_a_policy_may_be_withheld_from_evaluation_workers():
    algorithm = make_config_with_evaluation().build()
    algorithm.evaluate()
    algorithm.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new, evaluation_workers=False)
    assert get_evaluated_policies(algorithm) == {"left", "right"}
    algorithm.remove_policy("new", policy_mapping_fn=a_and_b)
    assert "new" not in algorithm.worker.policy_map


def test_a_checkpoint_holds_policies_that_were_added_and_may_be_restored_in_part(tmp_path):
    algorithm = make_config().build()
    algorithm.train()
    mapping_and_trained = {"policy_mapping_fn": all_new, "policies_to_train": ["new", "left"]}
    algorithm.add_policy("new", PPOTF2Policy, **mapping_and_trained)
    algorithm.train()
    algorithm.save(tmp_path)
    env = {"env": Staged}
    with pytest.raises(CheckpointError, match=r"policy_mapping_fn.*all_new"):
        Algorithm.from_checkpoint(tmp_path, config=env)
    whole = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=all_new, config=env)
    assert set(whole.worker.policy_map) == {"left", "right", "new"}
    assert whole.worker.get_policies_to_train() == {"new", "left"}
    assert whole.worker.policy_mapping_fn is all_new
    assert whole.iteration == 2
    np.testing.assert_equal(whole.get_weights(), algorithm.get_weights())
    assert set(whole.train()["info"]["learner"]) == {"new"}
    left = {"policy_ids": ["left"], "policy_mapping_fn": all_left, "policies_to_train": only_left}
    part = Algorithm.from_checkpoint(tmp_path, **left, config=env)
    assert set(part.worker.policy_map) == {"left"}
    assert same(part.get_weights()["left"], algorithm.get_weights()["left"])
    assert set(part.train()["info"]["learner"]) == {"left"}
    with pytest.raises(UnknownPolicyError, match="nobody"):
        Algorithm.from_checkpoint(tmp_path, policy_ids=["nobody"])
    fresh = make_config().build()
    fresh.restore(tmp_path)
    assert set(fresh.worker.policy_map) == {"left", "right", "new"}


class Quiet(DefaultCallbacks):
    """A class that no checkpoint can import by itself."""


def test_objects_that_no_file_holds_are_given_once_for_policies_that_were_added_too(tmp_path):
    config = make_config().callbacks(Quiet).training(model={"custom_model": two_layers})
    algorithm = config.build()
    algorithm.add_policy("new", PPOTF2Policy, config={"lr": 0.5, "model": {"max_seq_len": 7}})
    algorithm.train()
    algorithm.save(tmp_path)
    settings = {"env": Staged, "callbacks": Quiet, "model": {"custom_model": two_layers}}
    restored = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=a_and_b, config=settings)
    policy = restored.get_policy("new")
    assert policy.config["callbacks"] is Quiet
    assert policy.config["model"]["custom_model"] is two_layers
    assert (policy.config["lr"], policy.config["model"]["max_seq_len"]) == (0.5, 7)
    fresh = config.copy(copy_frozen=False).build()
    fresh.restore(tmp_path)
    for loaded in (restored, fresh):
        np.testing.assert_equal(loaded.get_weights(), algorithm.get_weights())
    algorithm.add_policy(
        "own", PPOTF2Policy, config={"model": {"custom_model": unregistered_layer}}
    )
    algorithm.save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"policy 'own' of .*custom_model.*unregistered_layer"
    ):
        Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=a_and_b, config=settings)


def test_a_mapping_that_a_file_cannot_hold_is_asked_for(tmp_path, caplog):
    config = make_config(policy_mapping_fn=lambda agent_id, *args, **kwargs: "left")
    config.debugging(log_level="WARN").build().save(tmp_path)
    assert "policy_mapping_fn (algorithms.test_many_policies:" in caplog.text
    with pytest.raises(CheckpointError, match=r"\(path, policy_mapping_fn=\.\.\.\)"):
        Algorithm.from_checkpoint(tmp_path, config={"env": Staged})
    again = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=all_left, config={"env": Staged})
    assert again.worker.policy_mapping_fn is all_left


def test_policies_act_by_their_ids_and_are_exported(tmp_path):
    algorithm = make_config().build()
    obs = {"a": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}
    greedy = {"policy_id": "right", "explore": False}
    actions = algorithm.compute_actions(obs, **greedy)
    assert set(actions) == {"a", "b"}
    assert actions["b"] == algorithm.compute_single_action(obs["b"], **greedy)
    algorithm.export_policy_checkpoint(tmp_path / "p", "right")
    loaded = Policy.from_checkpoint(tmp_path / "p")
    assert same(loaded.get_weights(), algorithm.get_weights("right")["right"])
    assert algorithm.export_policy_model(tmp_path / "m", "left").path.is_dir()
    with pytest.raises(KeyError, match="nobody"):
        algorithm.export_policy_checkpoint(tmp_path / "x", "nobody")
    with pytest.raises(KeyError, match="nobody"):
        algorithm.compute_actions(obs, policy_id="nobody")


def test_an_iteration_continues_until_it_trained_enough():
    config = make_config(policies_to_train=["right"])
    result = config.reporting(min_train_timesteps_per_iteration=40).build().train()
    assert result["num_env_steps_trained_this_iter"] == 42


def test_custom_metrics_of_single_episodes_are_kept_if_asked_for():
    class Noting(DefaultCallbacks):
        def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
            episode.custom_metrics["length"] = episode.length

    config = make_config().callbacks(Noting).reporting(keep_per_episode_custom_metrics=True)
    assert config.build().train()["custom_metrics"] == {"length": [7, 7]}
