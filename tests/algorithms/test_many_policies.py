"""Workers and algorithms with several policies: adding, removing, mapping, training, restoring."""

import random

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers.multi_agent_envs import SPACE, THREE, Staggered
from tfpolicies import (
    Algorithm,
    AlgorithmConfig,
    DQNConfig,
    MultiAgentEnv,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
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
from tfpolicies.policy.policy import ActionBatch

pytestmark = pytest.mark.usefixtures("kept_programs")


def a_and_b(agent_id, episode, worker=None, **kwargs):
    return "left" if agent_id == "a" else "right"


def all_left(agent_id, episode, worker=None, **kwargs):
    return "left"


def all_new(agent_id, episode, worker=None, **kwargs):
    return "new"


def only_left(policy_id, batch=None):
    return policy_id == "left"


class Staged(Staggered):
    """`Staggered`, made by a config."""

    def __init__(self, context):
        super().__init__()


class Zero(Policy):
    """Always takes action 0."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})


def config_of(kind=PPOConfig, **multi_agent):
    config = kind().environment(Staged).framework(inference="tf", jit_compile=False)
    config.rollouts(rollout_fragment_length=7).debugging(seed=1, log_level="ERROR")
    config.training(model={"fcnet_hiddens": [4]}, train_batch_size=14, lr=0.01)
    if kind is PPOConfig:
        config.training(sgd_minibatch_size=8, num_sgd_iter=2)
    settings = {"policies": {"left", "right"}, "policy_mapping_fn": a_and_b, **multi_agent}
    return config.multi_agent(**settings)


def worker_of(kind=PPOConfig, policy_class=PPOTF2Policy, **multi_agent):
    return RolloutWorker(config=config_of(kind, **multi_agent), default_policy_class=policy_class)


def same(one, other):
    return all(np.array_equal(one[key], other[key]) for key in one)


# -- the worker -------------------------------------------------------------------------------


def test_an_environment_may_leave_the_spaces_to_the_policies():
    class Untold(MultiAgentEnv):
        def __init__(self, context):
            self._told = Staggered()

        def reset(self, *, seed=None, options=None):
            return self._told.reset(seed=seed, options=options)

        def step(self, actions):
            return self._told.step(actions)

    specs = {name: PolicySpec(None, SPACE, THREE) for name in ("left", "right")}
    algorithm = config_of(policies=specs).environment(Untold).build()
    assert algorithm.train()["num_env_steps_sampled"] == 14
    algorithm.stop()


def test_each_policy_gets_the_rows_of_its_agents():
    worker = worker_of()
    batch = worker.sample()
    assert batch.env_steps() == 7
    assert {pid: rows.count for pid, rows in batch.policy_batches.items()} == {
        "left": 7,
        "right": 4,
    }
    assert batch["left"]["rewards"].tolist() == [1.0] * 7
    assert batch["right"]["rewards"].tolist() == [2.0, 2.0, 2.0, 1.0]


def test_policies_have_their_own_class_spaces_and_overrides():
    specs = {
        "left": PolicySpec(config={"gamma": 0.5}),
        "right": (PGTF2Policy, None, None, AlgorithmConfig.overrides(gamma=0.25, lr=0.5)),
    }
    worker = worker_of(policies=specs)
    left, right = worker.get_policy("left"), worker.get_policy("right")
    assert type(left) is PPOTF2Policy
    assert type(right) is PGTF2Policy
    assert left.get_hyperparameter("gamma") == 0.5
    assert left.config["gamma"] == 0.5
    assert right.get_hyperparameter("gamma") == 0.25
    assert right.get_hyperparameter("lr") == 0.5
    assert left.observation_space == SPACE
    assert right.action_space == THREE
    assert worker.policy_dict["right"].policy_class is PGTF2Policy
    assert not same(left.get_weights(), worker_of().get_policy("right").get_weights())


def test_the_same_seed_gives_the_same_policies_and_batches():
    one, other = worker_of(), worker_of()
    assert same(one.get_weights()["left"], other.get_weights()["left"])
    batches = [worker.sample() for worker in (one, other)]
    assert (batches[0]["left"]["actions"] == batches[1]["left"]["actions"]).all()


def test_several_policies_need_several_agents():
    config = config_of().environment("CartPole-v1")
    with pytest.raises(ConfigError, match="Have multiple policies"):
        RolloutWorker(config=config, default_policy_class=PPOTF2Policy)


def test_a_policy_without_a_class_is_named():
    with pytest.raises(ConfigError, match="no class for the policy 'left'"):
        RolloutWorker(config=config_of(), default_policy_class=None)


# -- adding and removing ----------------------------------------------------------------------


def test_a_policy_is_added_in_the_middle_of_an_episode_and_plays_from_the_next_one():
    worker = worker_of(policies={"left", "right"})
    worker.config  # noqa: B018
    half = RolloutWorker(
        config=config_of().rollouts(rollout_fragment_length=3), default_policy_class=PPOTF2Policy
    )
    half.sample()
    added = half.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new, config={"gamma": 0.5})
    assert added is half.get_policy("new")
    assert added.get_hyperparameter("gamma") == 0.5
    assert set(half.sample().policy_batches) == {"left", "right"}  # the episode goes on as it was
    third = half.sample()  # its last step and two of the next
    assert set(third.policy_batches) == {"left", "right", "new"}
    assert set(half.sample().policy_batches) == {"new"}


def test_an_instance_is_added_as_it_is_but_one_of_another_worker_as_a_copy():
    worker, other = worker_of(), worker_of()
    own = PPOTF2Policy(SPACE, THREE, {"model": {"fcnet_hiddens": [4]}, "inference": "tf"})
    assert worker.add_policy("mine", policy=own) is own
    foreign = other.get_policy("left")
    copied = worker.add_policy("theirs", policy=foreign)
    assert copied is not foreign
    assert same(copied.get_weights(), foreign.get_weights())
    written_by_hand = Zero(SPACE, THREE, {})
    assert worker.add_policy("zero", policy=written_by_hand) is written_by_hand


def test_a_state_is_put_into_the_new_policy():
    worker = worker_of()
    state = worker.get_policy("left").get_state()
    added = worker.add_policy("new", PPOTF2Policy, policy_state=state)
    assert same(added.get_weights(), worker.get_policy("left").get_weights())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy_id": "bad/id", "policy_cls": PPOTF2Policy}, ConfigError, "bad/id"),
        ({"policy_id": "left", "policy_cls": None}, PolicyExistsError, "already exists"),
        ({"policy_id": "new"}, UsageError, "Only one of"),
        (
            {"policy_id": "new", "policy_cls": Zero, "policy": Zero(SPACE, THREE, {})},
            UsageError,
            "Only one of",
        ),
        (
            {"policy_id": "new", "policy_cls": PPOTF2Policy, "module_spec": 1},
            ConfigError,
            "module_spec",
        ),
        (
            {"policy_id": "new", "policy_cls": PPOTF2Policy, "policy_mapping_fn": "left"},
            ConfigError,
            "policy_mapping_fn",
        ),
        (
            {"policy_id": "new", "policy_cls": PPOTF2Policy, "policies_to_train": "left"},
            UsageError,
            "policies_to_train",
        ),
        (
            {"policy_id": "new", "policy_cls": PPOTF2Policy, "policy_state": {"weights": {}}},
            WeightsError,
            "global_timestep",
        ),
        (
            {"policy_id": "new", "policy_cls": PPOTF2Policy, "config": {"gama": 1}},
            ConfigError,
            "gama",
        ),
    ],
)
def test_what_cannot_be_added_changes_nothing(arguments, error, message):
    worker = worker_of()
    before = worker.policy_mapping_fn, worker.is_policy_to_train, dict(worker.policy_dict)
    with pytest.raises(error, match=message):
        worker.add_policy(**arguments)
    assert set(worker.policy_map) == {"left", "right"}
    assert (worker.policy_mapping_fn, worker.is_policy_to_train, worker.policy_dict) == before
    worker.sample()


def test_a_removed_policy_leaves_no_trace_and_its_running_episodes_are_dropped():
    config = config_of().rollouts(rollout_fragment_length=3)
    worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    worker.sample()
    worker.remove_policy(policy_id="right", policy_mapping_fn=all_left)
    batch = worker.sample()
    assert set(batch.policy_batches) == {"left"}
    assert batch["left"]["t"].min() == 0  # a new episode
    assert worker.get_policy("right") is None
    assert set(worker.policy_dict) == {"left"}
    with pytest.raises(UnknownPolicyError, match="not in policy map"):
        worker.remove_policy(policy_id="right")
    with pytest.raises(ValueError, match="not in policy map"):
        worker.remove_policy(policy_id="right")


def mapped_by_episode(agent_id, episode, worker, **kwargs):
    return "right" if episode.length >= 0 and agent_id == "b" else "left"


def test_a_policy_that_agents_are_mapped_to_cannot_be_removed():
    algorithm = config_of().evaluation(evaluation_interval=1, evaluation_duration=1).build()
    worker = algorithm.worker
    before = worker.policy_mapping_fn, dict(worker.policy_dict)
    message = r"'right' cannot be removed: policy_mapping_fn \(a_and_b\) maps agent 'b' to it"
    for owner in (algorithm, worker, algorithm.workers):
        with pytest.raises(UsageError, match=message):
            owner.remove_policy(policy_id="right")
    with pytest.raises(UsageError, match=r"remove_policy\('left', policy_mapping_fn=\.{3}\)"):
        algorithm.remove_policy("left", policy_mapping_fn=all_left)
    worker.sample()
    with pytest.raises(UsageError, match="mapped_by_episode"):
        worker.remove_policy(policy_id="right", policy_mapping_fn=mapped_by_episode)
    assert (worker.policy_mapping_fn, worker.policy_dict) == before
    assert set(algorithm.evaluation_worker.policy_map) == {"left", "right"}
    algorithm.remove_policy("right", policy_mapping_fn=all_left)
    assert set(algorithm.evaluation_worker.policy_map) == {"left"}
    algorithm.stop()


def test_a_policy_that_is_drawn_at_random_cannot_be_removed():
    def draw(agent_id, episode, worker, **kwargs):
        return random.choice(["left", "right"])

    worker = RolloutWorker(
        config=config_of().multi_agent(policy_mapping_fn=draw), default_policy_class=PPOTF2Policy
    )
    for seed in range(5):
        random.seed(seed)
        before = random.getstate()
        with pytest.raises(UsageError, match="maps agent 'a' to it"):
            worker.remove_policy(policy_id="right")
        assert random.getstate() == before


def test_a_policy_that_agents_are_mapped_to_is_replaced_as_the_error_says():
    algorithm = config_of().evaluation(evaluation_interval=1, evaluation_duration=1).build()
    left = algorithm.get_policy("left")
    with pytest.raises(UsageError) as refused:
        algorithm.remove_policy("right")
    assert "To replace the policy, then call add_policy('right', ..., policy_mapping_fn=...)" in (
        str(refused.value)
    )
    assert "get_policy('right').set_state(get_policy(OTHER).get_state())" in str(refused.value)
    algorithm.remove_policy("right", policy_mapping_fn=all_left)
    algorithm.add_policy("right", policy=left.copy("right"), policy_mapping_fn=a_and_b)
    assert set(algorithm.train()["evaluation"]["policy_reward_mean"]) == {"left", "right"}
    right = algorithm.get_policy("right")
    right.set_state(left.get_state())
    for name, array in left.get_weights().items():
        np.testing.assert_array_equal(right.get_weights()[name], array)
    algorithm.stop()


def test_a_policy_for_which_nobody_has_spaces_is_named():
    class Unlike(Staggered):
        observation_space = spaces.Dict({"a": SPACE, "b": spaces.Box(-1.0, 2e6, (3,))})
        _agent_ids = ("a", "b")

    config = config_of(policies={"left", "right", "spare"}).environment(Unlike)
    words = r"no spaces for the policy 'spare'.*policy_mapping_fn \(\w+\) maps none.*'spare' for an"
    with pytest.raises(ConfigError, match=words):
        RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    forgotten = AlgorithmConfig().environment(Unlike).multi_agent(policies={"left", "right"})
    with pytest.raises(ConfigError, match=r"policy_mapping_fn \(not set\).*--policy-mapping"):
        RolloutWorker(config=forgotten, default_policy_class=PPOTF2Policy)
    values = {"spare": PolicySpec(None, THREE, None), "left": PolicySpec(), "right": PolicySpec()}
    worker = RolloutWorker(
        config=config.copy(copy_frozen=False).multi_agent(policies=values),
        default_policy_class=PPOTF2Policy,
    )
    assert worker.get_policy("spare").observation_space == THREE
    with pytest.raises(ConfigError, match="no spaces for the policy 'new'"):
        worker.add_policy("new", PPOTF2Policy)
    assert "new" not in worker.policy_map


def test_callbacks_hear_of_new_policies():
    made = []

    class Noting(DefaultCallbacks):
        def on_create_policy(self, *, policy_id, policy):
            made.append(policy_id)

    worker = RolloutWorker(config=config_of().callbacks(Noting), default_policy_class=PPOTF2Policy)
    worker.add_policy("new", PGTF2Policy)
    assert sorted(made) == ["left", "new", "right"]


# -- who is trained ---------------------------------------------------------------------------


@pytest.mark.parametrize("to_train", [["left"], {"left"}, only_left], ids=["list", "set", "fn"])
def test_only_policies_to_train_learn(to_train):
    worker = worker_of(policies_to_train=to_train)
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


def test_a_function_sees_the_batch():
    seen = []

    def if_many(policy_id, batch=None):
        seen.append((policy_id, batch))
        return batch is not None and batch[policy_id].count > 5

    worker = worker_of(policies_to_train=if_many)
    batch = worker.sample()
    assert set(worker.learn_on_batch(batch)) == {"left"}
    assert all(values is None or values["left"].count == 7 for _, values in seen)


def test_nobody_is_trained_with_an_empty_list(caplog):
    worker = worker_of(policies_to_train=["left"])
    worker.set_is_policy_to_train([])
    assert worker.get_policies_to_train() == set()
    assert worker.learn_on_batch(worker.sample()) == {}
    with pytest.raises(UsageError):
        worker.set_is_policy_to_train(None)


class Told(Zero):
    """Keeps what it is told."""

    def on_global_var_update(self, global_vars):
        super().on_global_var_update(global_vars)
        self.told = global_vars


def test_policies_are_told_everything_about_the_run_but_other_policies():
    worker = RolloutWorker(config=config_of(), default_policy_class=Told)
    values = {"timestep": 9, "phase": "late", "num_grad_updates_per_policy": {"left": 2}}
    worker.set_global_vars(values)
    actual = {pid: worker.get_policy(pid).told for pid in ("left", "right")}
    assert actual["left"] == {"timestep": 9, "phase": "late", "num_grad_updates": 2}
    assert actual["right"] == {"timestep": 9, "phase": "late", "num_grad_updates": None}
    assert worker.get_global_vars() == {
        "timestep": 9,
        "num_grad_updates_per_policy": {"left": 2},
    }


def test_counters_go_to_trained_policies_only():
    worker = worker_of(policies_to_train=["left"])
    updates = {"left": 3, "right": 4}
    worker.set_global_vars({"timestep": 100, "num_grad_updates_per_policy": updates})
    assert worker.get_policy("left").global_timestep == 100
    assert worker.get_policy("left").num_grad_updates == 3
    assert worker.get_policy("right").global_timestep == 0
    worker.set_global_vars({"timestep": 200}, policy_ids=["right"])
    assert worker.get_policy("left").global_timestep == 100


# -- weights and state ------------------------------------------------------------------------


def test_weights_of_one_number_are_set_once():
    worker = worker_of()
    zeros = {
        pid: {key: 0 * x for key, x in result.items()}
        for pid, result in worker.get_weights().items()
    }
    worker.set_weights(zeros, weights_seq_no=1)
    ones = {pid: {key: x + 1 for key, x in result.items()} for pid, result in zeros.items()}
    worker.set_weights(ones, weights_seq_no=1)
    assert all(not x.any() for x in worker.get_weights("left")["left"].values())
    worker.set_weights(ones, weights_seq_no=2)
    assert all((x == 1).all() for x in worker.get_weights(["left"])["left"].values())
    with pytest.raises(UnknownPolicyError):
        worker.set_weights({"nobody": {}})


def test_a_workers_state_goes_to_another_one_with_its_policies():
    worker, other = worker_of(), worker_of()
    worker.add_policy("new", PGTF2Policy, policy_mapping_fn=all_new, policies_to_train=["new"])
    worker.learn_on_batch(worker.sample())
    state = worker.get_state()
    assert sorted(state["policy_ids"]) == ["left", "new", "right"]
    other.set_state(state)
    assert type(other.get_policy("new")) is PGTF2Policy
    assert other.get_policies_to_train() == {"new"}
    assert other.policy_mapping_fn is all_new
    for pid, weights in worker.get_weights().items():
        assert same(weights, other.get_weights()[pid])


def test_a_state_in_which_all_are_trained_ends_a_choice():
    worker, other = worker_of(), worker_of(policies_to_train=["left"])
    other.set_state(worker.get_state())
    assert other.get_policies_to_train() == {"left", "right"}


@pytest.mark.parametrize("wrong", ["text", "empty", "id", "spec", "shape"])
def test_a_state_that_does_not_fit_a_worker_changes_nothing(wrong):
    worker, state = worker_of(), worker_of().get_state()
    policies = state["policy_states"]
    policies["left"]["weights"] = {n: x + 1 for n, x in policies["left"]["weights"].items()}
    if wrong == "id":
        policies["a/b"] = policies["right"]
    elif wrong == "spec":
        policies["new"] = {n: x for n, x in policies["right"].items() if n != "policy_spec"}
    elif wrong == "shape":
        policies["new"] = {**policies["right"], "weights": {}}
    elif wrong == "empty":
        state = {}
    elif wrong == "text":
        state = "no state"
    before = worker.get_weights()
    with pytest.raises((WeightsError, ConfigError)) as result:
        worker.set_state(state)
    assert {"id": "a/b", "spec": "'policy_spec'"}.get(wrong, "") in str(result.value)
    assert set(worker.policy_map) == {"left", "right"}
    assert same(worker.get_weights()["left"], before["left"])


def test_filters_are_taken_over():
    def filtered():
        config = config_of().rollouts(observation_filter="MeanStdFilter")
        return RolloutWorker(config=config, default_policy_class=PPOTF2Policy)

    worker, other = filtered(), filtered()
    worker.sample()
    result = worker.get_filters(flush_after=True)
    assert set(result) == {"left", "right"}
    assert result["left"].pending_count == 7
    assert worker.get_filters()["left"].pending_count == 0
    other.sync_filters(worker.get_filters())
    for mine, theirs in zip(
        worker.filters["left"].get_scalings(), other.filters["left"].get_scalings(), strict=True
    ):
        assert (mine.mean == theirs.mean).all()
    with pytest.raises(AssertionError, match=r"missing: \['right'\], unknown: \['x'\]"):
        other.sync_filters({"left": result["left"], "x": result["left"]})
    with pytest.raises(WeightsError, match="classes and shapes are equal"):
        other.sync_filters({"left": worker.filters["left"], "right": 1})
    assert other.filters["left"].statistics[0].count == 7


# -- algorithms -------------------------------------------------------------------------------


def test_an_algorithm_trains_some_of_its_policies_and_counts_steps():
    algorithm = config_of(policies_to_train=["left"]).build()
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
    algorithm = config_of(count_steps_by="agent_steps").training(train_batch_size=21).build()
    result = algorithm.train()
    assert result["num_agent_steps_sampled_this_iter"] >= 21
    assert result["timesteps_total"] == result["num_agent_steps_sampled"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig])
def test_policies_come_and_go_while_training(kind):
    config = config_of(kind)
    if kind is DQNConfig:
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
    assert set(algorithm.evaluate()["evaluation"]["policy_reward_mean"]) == {"new"}
    assert set(result["info"]["learner"]) <= {"left"}
    algorithm.remove_policy("other")
    assert set(algorithm.evaluation_worker.policy_map) == {"left", "right", "new"}
    with pytest.raises(PolicyExistsError):
        algorithm.add_policy("new", policy=snapshot)
    with pytest.raises(UnknownPolicyError):
        algorithm.remove_policy("other")
    algorithm.train()
    algorithm.stop()


def test_evaluation_plays_whole_episodes_and_disturbs_nothing():
    quiet, busy = (config_of().evaluation(evaluation_duration=3).build() for _ in range(2))
    result = busy.evaluate()["evaluation"]
    assert result["hist_stats"]["episode_lengths"] == [7, 7, 7]
    assert result["num_env_steps_sampled_this_iter"] == 21
    assert result["num_agent_steps_sampled_this_iter"] == 33
    quiet.train(), busy.train()
    assert same(quiet.get_weights()["left"], busy.get_weights()["left"])


@pytest.mark.parametrize("nested", [False, True])
def test_evaluation_may_have_a_mapping_of_its_own(tmp_path, nested):
    own = {"policy_mapping_fn": all_left}
    overrides = {"multiagent": own} if nested else own
    config = config_of().evaluation(evaluation_duration=1, evaluation_config=overrides)
    algorithm = config.build()

    def evaluated():
        return set(algorithm.evaluate()["evaluation"]["policy_reward_mean"])

    assert evaluated() == {"left"}
    assert set(algorithm.train()["info"]["learner"]) == {"left", "right"}
    algorithm.save(tmp_path)
    algorithm.restore(tmp_path)
    assert evaluated() == {"left"}
    algorithm.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new)
    assert evaluated() == {"new"}  # said of all workers


@pytest.mark.parametrize("early", [False, True])
def test_policies_that_are_added_explore_in_evaluation_as_the_others_do(tmp_path, early):
    config = config_of().evaluation(evaluation_duration=1, evaluation_config={"explore": False})
    algorithm = config.build()
    if early:
        algorithm.evaluate()
    algorithm.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new)
    algorithm.evaluate()
    evaluated = algorithm.evaluation_worker.policy_map
    assert [evaluated[pid].config["explore"] for pid in ("left", "new")] == [False, False]
    assert algorithm.get_policy("new").config["explore"] is True
    policy, obs = evaluated["new"], np.full((64, 3), 2.0, np.float32)
    assert len(set(policy.driver.acting.act([obs])[1]["actions"].tolist())) == 1
    algorithm.save(tmp_path)
    settings = {"policy_mapping_fn": all_new, "config": {"env": Staged}}
    restored = Algorithm.from_checkpoint(tmp_path, **settings)
    restored.evaluate()
    evaluated = restored.evaluation_worker.policy_map
    assert [evaluated[pid].config["explore"] for pid in ("left", "new")] == [False, False]
    assert restored.get_policy("new").config["explore"] is True


@pytest.mark.parametrize("early", [False, True])
def test_policies_that_are_added_are_in_evaluation_what_those_of_the_config_are(tmp_path, early):
    overrides = {
        "exploration_config": {"type": "EpsilonGreedy", "initial_epsilon": 0.25},
        "lambda_": 0.5,
        "use_gae": False,
        "clip_actions": True,
    }
    config = config_of(
        policies={"left": PolicySpec(config={"lambda": 0.75}), "right": PolicySpec()}
    )
    algorithm = config.evaluation(evaluation_duration=1, evaluation_config=overrides).build()
    if early:
        algorithm.evaluate()
    algorithm.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new)
    algorithm.add_policy("own", PPOTF2Policy, config={"lambda": 0.75})
    algorithm.add_policy("pg", PGTF2Policy)
    algorithm.get_policy("new").note = "kept"
    snapshot = algorithm.get_policy("new").copy("snapshot")
    algorithm.add_policy("snapshot", policy=snapshot)
    algorithm.train()

    def require_alike(algorithm):
        algorithm.evaluate()
        evaluated, trained = (w.policy_map for w in (algorithm.evaluation_worker, algorithm.worker))
        for pid, twin in {"new": "right", "own": "left", "snapshot": "right"}.items():
            policy, like = evaluated[pid], evaluated[twin]
            assert type(policy.exploration).__name__ == "EpsilonGreedy"
            assert policy.program is like.program is not trained[pid].program
            assert (
                policy.get_hyperparameter("lambda")
                == like.get_hyperparameter("lambda")
                == (0.5, 0.75)[pid == "own"]
            )
            different = {name for name, x in policy.config.items() if x != like.config[name]}
            assert not different - {"env"}  # a class, which no file holds
            assert same(policy.get_weights(), trained[pid].get_weights())
            assert type(trained[pid].exploration).__name__ == "StochasticSampling"
            assert trained[pid].get_hyperparameter("lambda") == (1.0, 0.75)[pid == "own"]
        assert type(evaluated["pg"].exploration).__name__ == "EpsilonGreedy"
        assert "lambda" not in evaluated["pg"].config
        assert evaluated["pg"].config["clip_actions"] is True

    require_alike(algorithm)
    assert algorithm.evaluation_worker.get_policy("snapshot").note == "kept"
    algorithm.save(tmp_path)
    settings = {"policy_mapping_fn": all_new, "config": {"env": Staged}}
    require_alike(Algorithm.from_checkpoint(tmp_path, **settings))


def test_a_hand_written_policy_that_is_added_reads_the_settings_of_evaluation():
    class Fixed(Zero):
        def __init__(self, number):
            super().__init__(SPACE, THREE, {"gamma": 0.99, "lr": 5e-5, "more": number})

    config = config_of().evaluation(evaluation_duration=1, evaluation_config={"gamma": 0.5})
    algorithm = config.build()
    algorithm.add_policy("fixed", policy=Fixed(3), policy_mapping_fn=all_left)
    algorithm.evaluate()
    result = algorithm.evaluation_worker.get_policy("fixed")
    assert result.config == {"gamma": 0.5, "lr": 5e-5, "more": 3}
    assert algorithm.get_policy("fixed").config["gamma"] == 0.99


def test_a_policy_may_be_kept_from_those_who_evaluate():
    algorithm = config_of().evaluation(evaluation_duration=1).build()
    algorithm.evaluate()
    algorithm.add_policy("new", PPOTF2Policy, policy_mapping_fn=all_new, evaluation_workers=False)
    result = algorithm.evaluate()["evaluation"]
    assert set(result["policy_reward_mean"]) == {"left", "right"}
    algorithm.remove_policy("new", policy_mapping_fn=a_and_b)
    assert "new" not in algorithm.worker.policy_map


def test_a_checkpoint_holds_policies_that_were_added_and_may_be_restored_in_part(tmp_path):
    algorithm = config_of().build()
    algorithm.train()
    algorithm.add_policy(
        "new", PPOTF2Policy, policy_mapping_fn=all_new, policies_to_train=["new", "left"]
    )
    algorithm.train()
    algorithm.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"policy_mapping_fn.*all_new"):
        Algorithm.from_checkpoint(tmp_path, config={"env": Staged})
    whole = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=all_new, config={"env": Staged})
    assert set(whole.worker.policy_map) == {"left", "right", "new"}
    assert whole.worker.get_policies_to_train() == {"new", "left"}
    assert whole.worker.policy_mapping_fn is all_new
    assert whole.iteration == 2
    for pid, weights in algorithm.get_weights().items():
        assert same(weights, whole.get_weights()[pid])
    assert set(whole.train()["info"]["learner"]) == {"new"}
    part = Algorithm.from_checkpoint(
        tmp_path,
        policy_ids=["left"],
        policy_mapping_fn=all_left,
        policies_to_train=only_left,
        config={"env": Staged},
    )
    assert set(part.worker.policy_map) == {"left"}
    assert same(part.get_weights()["left"], algorithm.get_weights()["left"])
    assert set(part.train()["info"]["learner"]) == {"left"}
    with pytest.raises(UnknownPolicyError, match="nobody"):
        Algorithm.from_checkpoint(tmp_path, policy_ids=["nobody"])
    fresh = config_of().build()
    fresh.restore(tmp_path)
    assert set(fresh.worker.policy_map) == {"left", "right", "new"}


class Quiet(DefaultCallbacks):
    """A class that no checkpoint can import by itself."""


def linear(observation_space, num_outputs, **config):
    seen = keras.Input(observation_space.shape)
    outputs = [keras.layers.Dense(num_outputs)(seen), keras.layers.Dense(1)(seen)]
    return keras.Model(seen, outputs)


class Scaled(keras.layers.Layer):
    """A layer that no file can name."""

    def call(self, inputs):
        return 2.0 * inputs


def another(observation_space, num_outputs, **config):
    seen = keras.Input(observation_space.shape)
    outputs = linear(observation_space, num_outputs)(Scaled()(seen))
    return keras.Model(seen, outputs)


def test_what_a_file_cannot_hold_is_given_once_for_policies_that_were_added_too(tmp_path):
    config = config_of().callbacks(Quiet).training(model={"custom_model": linear})
    algorithm = config.build()
    algorithm.add_policy("new", PPOTF2Policy, config={"lr": 0.5, "model": {"max_seq_len": 7}})
    algorithm.train()
    algorithm.save(tmp_path)
    settings = {"env": Staged, "callbacks": Quiet, "model": {"custom_model": linear}}
    restored = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=a_and_b, config=settings)
    policy = restored.get_policy("new")
    assert policy.config["callbacks"] is Quiet
    assert policy.config["model"]["custom_model"] is linear
    assert (policy.config["lr"], policy.config["model"]["max_seq_len"]) == (0.5, 7)
    fresh = config.copy(copy_frozen=False).build()
    fresh.restore(tmp_path)
    for pid, weights in algorithm.get_weights().items():
        assert same(weights, restored.get_weights()[pid])
        assert same(weights, fresh.get_weights()[pid])
    algorithm.add_policy("own", PPOTF2Policy, config={"model": {"custom_model": another}})
    algorithm.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"policy 'own' of .*custom_model.*another"):
        Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=a_and_b, config=settings)


def test_a_mapping_that_a_file_cannot_hold_is_asked_for(tmp_path, caplog):
    config = config_of(policy_mapping_fn=lambda agent_id, *args, **kwargs: "left")
    config.debugging(log_level="WARN").build().save(tmp_path)
    assert "policy_mapping_fn (algorithms.test_many_policies:" in caplog.text
    with pytest.raises(CheckpointError, match=r"\(path, policy_mapping_fn=\.\.\.\)"):
        Algorithm.from_checkpoint(tmp_path, config={"env": Staged})
    again = Algorithm.from_checkpoint(tmp_path, policy_mapping_fn=all_left, config={"env": Staged})
    assert again.worker.policy_mapping_fn is all_left


def test_policies_act_by_their_ids_and_are_exported(tmp_path):
    algorithm = config_of().build()
    obs = {"a": np.zeros(3, np.float32), "b": np.ones(3, np.float32)}
    actions = algorithm.compute_actions(obs, policy_id="right", explore=False)
    assert set(actions) == {"a", "b"}
    single = algorithm.compute_single_action(obs["b"], policy_id="right", explore=False)
    assert actions["b"] == single
    algorithm.export_policy_checkpoint(tmp_path / "p", "right")
    loaded = Policy.from_checkpoint(tmp_path / "p")
    assert same(loaded.get_weights(), algorithm.get_weights("right")["right"])
    assert algorithm.export_policy_model(tmp_path / "m", "left").path.is_dir()
    for call in (
        lambda: algorithm.export_policy_checkpoint(tmp_path / "x", "nobody"),
        lambda: algorithm.compute_actions(obs, policy_id="nobody"),
    ):
        with pytest.raises(KeyError, match="nobody"):
            call()


def test_an_iteration_goes_on_until_it_trained_enough():
    config = config_of(policies_to_train=["right"])
    result = config.reporting(min_train_timesteps_per_iteration=40).build().train()
    assert result["num_env_steps_trained_this_iter"] == 42


def test_custom_metrics_of_single_episodes_are_kept_if_asked_for():
    class Noting(DefaultCallbacks):
        def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
            episode.custom_metrics["length"] = episode.length

    config = config_of().callbacks(Noting).reporting(keep_per_episode_custom_metrics=True)
    assert config.build().train()["custom_metrics"] == {"length": [7, 7]}


def test_spaces_may_differ_between_agents():
    class Mixed(Staged):
        _agent_ids = ("a", "b")
        observation_space = spaces.Dict(a=SPACE, b=SPACE)
        action_space = spaces.Dict(a=THREE, b=spaces.Discrete(5))

    worker = RolloutWorker(config=config_of().environment(Mixed), default_policy_class=PPOTF2Policy)
    assert worker.get_policy("left").action_space == THREE
    assert worker.get_policy("right").action_space == spaces.Discrete(5)
    with pytest.raises(ConfigError, match="different"):
        RolloutWorker(
            config=config_of(policy_mapping_fn=all_left).environment(Mixed),
            default_policy_class=PPOTF2Policy,
        )
