"""Views that are set on a policy: columns for postprocessing and learning."""

from __future__ import annotations

import copy
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.constant_policies import ConstantPolicy
from helpers.environments import SavedCountingEnv
from helpers.factories import assert_equal
from helpers.multi_agent_envs import SPACE, Crowd, Staggered, Walker, sampler_of
from helpers.short_envs import ShortEnv
from helpers.view_models import LINE, TWO, Counter, check_views
from helpers.workers import make_worker
from tfpolicies import PGTF1Policy, PGTF2Policy, PPOTF2Policy, ViewRequirement, errors
from tfpolicies.compat import ModelCatalog, TFModelV2
from tfpolicies.testing import check_policy

QUICK = {"seed": 0, "inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [4]}}
VIEWS = {f"obs{shift:+d}": ("obs", [shift]) for shift in range(-3, 2)} | {
    "rewards-3": ("rewards", [-3]),
    "rewards+1": ("rewards", [1]),
    "actions-1": ("actions", [-1]),
    "back": ("obs", [-3, -2, -1]),
    "around": ("obs", [-1, 0, 1]),
    "some": ("rewards", [-3, 0, 1]),
    "times": ("t", [-2, -1]),
}


def require(policy, views=VIEWS):
    """Sets views on a policy: name -> (source, shifts)."""
    for name, (source, shifts) in views.items():
        shift = shifts[0] if len(shifts) == 1 else shifts
        policy.view_requirements[name] = ViewRequirement(source, shift=shift)
    return policy


def make_view_worker(policy_class=PGTF2Policy, views=VIEWS, env=Counter, **settings):
    sizes = {"rollout_fragment_length": 6, "batch_mode": "truncate_episodes"}
    worker = make_worker(lambda context: env(), policy_class, **{**sizes, **settings})
    require(worker.get_policy(), views)
    return worker


@pytest.mark.core
def test_shifts_and_ranges_at_starts_and_ends_of_episodes():
    worker = make_view_worker()
    first, second = worker.sample(), worker.sample()
    assert first["obs"][:, 0].tolist() == [1, 2, 3, 4, 1, 2]
    assert second["obs"][:, 0].tolist() == [3, 4, 1, 2, 3, 4]
    # Each episode is cut after 4, where it shows 5.
    assert first["obs-3"][:, 0].tolist() == [0, 0, 0, 1, 0, 0]
    assert second["obs-3"][:, 0].tolist() == [0, 1, 0, 0, 0, 1]
    assert first["obs-2"][:, 0].tolist() == [0, 0, 1, 2, 0, 0]
    assert second["obs-2"][:, 0].tolist() == [1, 2, 0, 0, 1, 2]
    assert second["obs-1"][:, 0].tolist() == [2, 3, 0, 1, 2, 3]
    assert second["obs+0"][:, 0].tolist() == [3, 4, 1, 2, 3, 4]
    assert first["obs+1"][:, 0].tolist() == [2, 3, 4, 5, 2, 3]
    assert first["rewards+1"].tolist() == [20, 30, 40, 0, 20, 0]
    assert second["back"][..., 0].tolist() == [
        *([0, 1, 2], [1, 2, 3]),
        *([0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]),
    ]
    assert first["around"][..., 0].tolist() == [
        *([0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]),
        *([0, 1, 2], [1, 2, 3]),
    ]
    assert second["some"].tolist() == [
        *([0, 30, 40], [10, 40, 0]),
        *([0, 10, 20], [0, 20, 30], [0, 30, 40], [10, 40, 0]),
    ]


@pytest.mark.core
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_several_environments_look_back_across_fragments(mode):
    worker = make_view_worker(num_envs_per_worker=3, rollout_fragment_length=1, batch_mode=mode)
    check_views([worker.sample() for _ in range(9)], VIEWS)


@pytest.mark.core
@pytest.mark.parametrize("envs", [[Staggered], [Crowd, Crowd]])
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_each_agent_sees_its_own_trajectory(envs, mode):
    envs = [kind() if kind is Staggered else kind(i, 7 + i) for i, kind in enumerate(envs)]
    policies = {"p": require(Walker()), "q": Walker(seed=1)}
    sampler = sampler_of(*envs, policies=policies, rollout_fragment_length=3, batch_mode=mode)
    samples = [sampler.sample().policy_batches for _ in range(15)]
    check_views([x["p"] for x in samples if "p" in x], VIEWS)
    assert all("back" not in x["q"] for x in samples if "q" in x)


class SavedStaggered(Staggered):
    get_state, set_state = SavedCountingEnv.get_state, SavedCountingEnv.set_state


def make_sampler(several):
    if several:
        policies = {"p": require(Walker())}
        return sampler_of(SavedStaggered(), policies=policies, rollout_fragment_length=3)
    sampler = make_view_worker(num_envs_per_worker=2, rollout_fragment_length=3).sampler
    sampler.reset(None)
    return sampler


@pytest.mark.parametrize("several", [False, True], ids=["one agent", "agents"])
def test_a_checkpoint_of_a_sampler_holds_the_rows_that_are_looked_back_on(several):
    first, second = make_sampler(several), make_sampler(several)
    first.sample()
    second.set_state(copy.deepcopy(first.get_state()))
    batches = [x.sample().as_multi_agent().policy_batches.popitem()[1] for x in (first, second)]
    assert batches[0]["back"].any()
    names = ("back", "around", "some", "obs-3")
    assert_equal(*({name: batch[name] for name in names} for batch in batches))


class Curious(PGTF2Policy):
    """Reads views in postprocessing and in the loss; all policies of the class have them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.view_requirements["back"] = ViewRequirement("obs", shift="-3:-1")
        self.view_requirements["ahead"] = ViewRequirement("rewards", shift=1)

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
        batch["doubled"] = 2.0 * batch["ahead"]
        return batch

    def loss(self, model, dist_class, train_batch):
        self.seen = tf.reduce_sum(train_batch["back"]) + tf.reduce_sum(train_batch["doubled"])
        return 0.0 * self.seen + super().loss(model, dist_class, train_batch)

    def stats_fn(self, train_batch):
        return {"seen": self.seen}


class GraphCurious(Curious, PGTF1Policy):
    """The same in graph mode."""


@pytest.mark.parametrize("kind", [Curious, GraphCurious])
def test_postprocessing_and_the_loss_read_views(kind):
    worker = make_view_worker(kind, {})
    policy, batch = worker.get_policy(), worker.sample()
    assert batch["back"].shape == (6, 3, 1)
    assert batch["doubled"].tolist() == [40, 60, 80, 0, 40, 0]
    stats = policy.learn_on_batch(batch)["learner_stats"]
    assert stats["seen"] == batch["back"].sum() + batch["doubled"].sum()
    views = policy.view_requirements
    assert views["back"].used_for_training
    assert not views["back"].used_for_compute_actions
    assert "back" not in [port.name for port in policy.program.ports.all]
    policy.init_view_requirements()
    assert views["back"].shift == "-3:-1"
    check_policy(kind(LINE, TWO, dict(policy.config)))
    assert policy.copy().view_requirements["ahead"].shift == 1


def test_sequences_of_a_memory_have_views_of_their_rows():
    model = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 3, "max_seq_len": 4}
    worker = make_view_worker(Curious, {}, model=model)
    policy, batch = worker.get_policy(), worker.sample()
    assert batch["seq_lens"].tolist() == [4, 2]
    assert batch["back"][:, -1, 0].tolist() == [0, 1, 2, 3, 0, 1]
    stats = policy.learn_on_batch(batch)["learner_stats"]
    last_row = batch["back"][-1].sum() + batch["doubled"][-1]  # two copies of it pad the sequence
    assert stats["seen"] == batch["back"].sum() + batch["doubled"].sum() + 2 * last_row == 233


class Nested(ShortEnv):
    observation_space = spaces.Dict(a=LINE, b=spaces.Tuple([spaces.Discrete(9)]))

    def observe(self):
        return {"a": np.full(1, self.t, np.float32), "b": (self.t,)}


@pytest.mark.parametrize("memory", [{}, {"use_gru": True, "lstm_cell_size": 3, "max_seq_len": 3}])
def test_views_of_nested_observations_are_nested(memory):
    class SeesBoth(PGTF2Policy):
        def __init__(self, *args):
            super().__init__(*args)
            self.view_requirements["old"] = ViewRequirement("obs", shift="-2:-1")

        def loss(self, model, dist_class, train_batch):
            old = train_batch["old"]
            self.seen = tf.reduce_sum(old["a"]) + tf.reduce_sum(tf.cast(old["b"]["0"], tf.float32))
            return super().loss(model, dist_class, train_batch)

        def stats_fn(self, train_batch):
            return {"seen": self.seen}

    model = {"fcnet_hiddens": [4], **memory}
    worker = make_view_worker(SeesBoth, {}, Nested, rollout_fragment_length=5, model=model)
    batch = worker.sample()
    assert batch["old"]["a"][..., 0].tolist() == [[0, 0], [0, 0], [0, 1], [1, 2], [0, 0]]
    assert batch["old"]["b"][0].tolist() == [[0, 0], [0, 0], [0, 1], [1, 2], [0, 0]]
    stats = worker.get_policy().learn_on_batch(batch)["learner_stats"]
    # A sequence of the fourth row alone is padded with two copies of it: [1, 2] in a and in b.
    assert stats["seen"] == (8 + 2 * 2 * 3 if memory else 8)


def test_a_model_may_require_views_only_for_training():
    class Predicts(TFModelV2):
        def __init__(self, *args):
            super().__init__(*args)
            self.view_requirements["later"] = ViewRequirement(
                "obs", shift="1:2", used_for_compute_actions=False
            )
            self.out = keras.layers.Dense(self.num_outputs)

        def forward(self, input_dict, state, seq_lens):
            return self.out(input_dict["obs"]), state

        def custom_loss(self, policy_loss, loss_inputs):
            self.mean = tf.reduce_mean(loss_inputs["later"][:, 0])
            return [policy_loss[0] + 0.0 * self.mean]

        def metrics(self):
            return {"later": self.mean}

    ModelCatalog.register_custom_model("predicts", Predicts)
    worker = make_view_worker(PGTF2Policy, {}, model={"custom_model": "predicts"})
    batch = worker.sample()
    assert batch["later"][..., 0].tolist() == [[2, 3], [3, 4], [4, 5], [5, 0], [2, 3], [3, 0]]
    result = worker.get_policy().learn_on_batch(batch)["learner_stats"]
    assert result["model/later"] == batch["later"][:, 0].mean()


@pytest.mark.core
@pytest.mark.parametrize("kind", [PPOTF2Policy, ConstantPolicy])
def test_views_can_be_set_until_the_first_sample(kind):
    worker = make_view_worker(kind, {"old": ("obs", [-1])})
    policy = worker.get_policy()
    policy.view_requirements["other"] = ViewRequirement("obs", shift=-2)
    del policy.view_requirements["other"]
    batch = worker.sample()
    assert batch["old"][:, 0].tolist() == [0, 1, 2, 3, 0, 1]
    assert "other" not in batch
    with pytest.raises(errors.UsageError, match=r"'late'\].*before the first sample\(\)"):
        require(policy, {"late": ("obs", [-1])})
    require(policy, {"new_obs": ("obs", [1]), "state_in_0": ("state_out_0", [-1])})  # holds anyway
    policy.view_requirements["state_in_1"] = ViewRequirement("state_out_1", shift="-1:-1")
    require(policy.copy() if kind is PPOTF2Policy else kind(LINE, TWO, {}))


def test_views_can_be_set_until_the_first_update():
    worker = make_view_worker(PGTF2Policy, {})
    policy = PGTF2Policy(LINE, TWO, QUICK)
    require(policy)
    policy.learn_on_batch(worker.sample())
    with pytest.raises(errors.UsageError, match="first update"):
        require(policy, {"late": ("obs", [-1])})


@pytest.mark.parametrize("kind", [PGTF2Policy, ConstantPolicy])
def test_acting_reads_only_the_views_of_the_model(kind):
    policy = kind(LINE, TWO, QUICK)
    view = ViewRequirement("obs", shift="-3:0", used_for_compute_actions=True)
    with pytest.raises(
        errors.UnsupportedMethodError, match=r"'old'\].*model's constructor.*prev_n_obs"
    ):
        policy.view_requirements["old"] = view
    policy.view_requirements["old"] = dataclasses.replace(view, used_for_compute_actions=False)
    assert not policy.view_requirements["old"].used_for_compute_actions


@pytest.mark.parametrize(
    ("name", "view", "words"),
    [
        ("rewards", ViewRequirement("rewards", shift=-1), "cannot be changed.*shift 0"),
        ("state_in_0", ViewRequirement("state_out_0", shift="-2:-1"), "cannot be changed"),
        ("state_in_0", ViewRequirement("state_out_1", shift=-1), "cannot be changed"),
        ("state_out_0", ViewRequirement("state_out_0", shift=-1), "cannot be changed"),
        ("x", ViewRequirement("obs", batch_repeat_value=4), "batch_repeat_value=4.*leave it at 1"),
        ("x", ViewRequirement("infos"), "'infos'.*name another"),
        ("x", ViewRequirement(shift=-1), "'x'.*name another"),
    ],
)
def test_an_impossible_view_is_named(name, view, words):
    policy = PGTF2Policy(LINE, TWO, QUICK)
    with pytest.raises(
        errors.UnsupportedMethodError, match=rf"view_requirements\['{name}'\].*{words}"
    ):
        policy.view_requirements[name] = view
    with pytest.raises(errors.BatchUsageError, match="must be a ViewRequirement"):
        policy.view_requirements[name] = "obs"


def test_a_source_that_is_not_collected_is_named():
    worker = make_view_worker(ConstantPolicy, {"x": ("nothing", [-1])})
    with pytest.raises(errors.MissingColumnError, match="view 'x' needs the column 'nothing'"):
        worker.sample()


def test_a_view_may_announce_a_column_of_postprocessing():
    worker = make_view_worker(ConstantPolicy, {"advantages": ("advantages", [0])})
    assert "advantages" not in worker.sample()


def test_agents_without_rows_in_a_sample_keep_their_history():
    policy = require(Walker(SPACE), {"old": ("obs", [-1])})
    sampler = sampler_of(Staggered(), policies={"p": policy}, rollout_fragment_length=1)
    samples = [sampler.sample().policy_batches["p"] for _ in range(7)]
    assert [x.count for x in samples] == [1, 2, 1, 2, 1, 2, 2]  # "b" has none in every other one
    check_views(samples, {"old": ("obs", [-1])})
