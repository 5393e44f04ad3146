"""Checks of learning: weights change, stay finite, and change the same way every time."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfpolicies.errors import NonFiniteError
from tfpolicies.program.learn_batch import to_loss_columns
from tfpolicies.program.traced_arguments import LOSS_MASK, TracedModel
from tfpolicies.testing.policy_under_test import PolicyUnderTest, collect_arrays, compare_arrays
from tfpolicies.testing.random_batches import random_batch
from tfpolicies.testing.report import CheckFailed, NotApplicable


def learning(subject: PolicyUnderTest) -> str:
    """An update changes the weights, keeps them finite, counts, and is the same every time."""
    subject.require_learning()
    policy, copy = subject.make_copy(), subject.make_copy()
    batch = random_batch(policy, subject.rows, seed=subject.seed)
    random_batch(copy, subject.rows, seed=subject.seed)
    before, updates = collect_arrays(policy.get_weights()), policy.num_grad_updates
    try:
        result = policy.learn_on_batch(batch)
    except NonFiniteError as error:
        raise _make_non_finite_failure(str(error)) from error
    copy.learn_on_batch(batch)
    after = collect_arrays(policy.get_weights())
    moved = [name for name in after if not np.array_equal(after[name], before[name])]
    if after and not moved:
        raise CheckFailed(
            "learn_on_batch to change at least one weight",
            f"the same {len(after)} weights",
            "Check that the loss depends on the weights, that the learning rate is not 0, and "
            "that gradients reach the variables.",
        )
    stats = result.get("learner_stats", {}) if isinstance(result, dict) else {}
    numbers = {f"learner_stats/{name}": np.asarray(x) for name, x in stats.items()}
    for name, array in {**after, **numbers}.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise _make_non_finite_failure(f"{array[~np.isfinite(array)].reshape(-1)[0]} in {name}")
    advice = "Let only the state and the batch decide an update: seed all random numbers."
    expected = "two policies in one state to learn the same from one batch"
    compare_arrays(collect_arrays(copy.get_weights()), after, expected, advice)
    if subject.is_tf and policy.num_grad_updates != updates + 1:
        raise CheckFailed(
            "one update to raise num_grad_updates by 1",
            f"{policy.num_grad_updates - updates}",
            "Call `super().learn_on_batch` exactly once in an override.",
        )
    return f"{len(moved)} of {len(after)} weights moved"


def _make_non_finite_failure(actual: str) -> CheckFailed:
    return CheckFailed(
        "weights and statistics to stay finite",
        actual,
        "Look for a logarithm of 0, a division by 0 or an exponential of a large number in the "
        "loss; lower lr or set grad_clip.",
    )


def gradients(subject: PolicyUnderTest) -> str:
    """`compute_gradients` returns a finite gradient per trainable variable and changes nothing."""
    subject.require_program("compute_gradients needs a Keras model")
    subject.require_learning()
    policy = subject.make_copy()
    batch = random_batch(policy, subject.rows, seed=subject.seed)
    before = policy.get_state()
    grads, _ = policy.compute_gradients(batch)
    noise = {key: before[key] for key in ("learning_rng",) if key in before}  # which it may draw
    after, advice = {**policy.get_state(), **noise}, "Apply gradients in `apply_gradients` only."
    expected = "compute_gradients to change nothing"
    compare_arrays(collect_arrays(after), collect_arrays(before), expected, advice, tolerance=0.0)
    shapes = [tuple(x.shape) for x in policy.program.functions.optimizers.gradient_variables]
    if [x.shape for x in grads] != shapes or not all(np.isfinite(x).all() for x in grads):
        raise CheckFailed(
            f"finite gradients of the shapes {shapes}",
            f"{[x.shape for x in grads]}, finite: {[bool(np.isfinite(x).all()) for x in grads]}",
            "Return a (gradient, variable) pair for each variable in `compute_gradients_fn`.",
        )
    return ""


def learner(subject: PolicyUnderTest) -> str:
    """The learner computes the same for each row of a batch as acting did when it was sampled.

    A noisy network acts with its mean weights here.
    """
    subject.require_program("a learner's view of a batch needs a Keras model")
    subject.require_learning()
    policy = subject.make_copy()
    program, network = policy.program, policy.program.functions.network
    is_noisy = program.ports.noise_size > 0
    batch = random_batch(policy, subject.rows, seed=subject.seed, explore=not is_noisy)
    if "action_dist_inputs" not in batch:
        raise NotApplicable("the batch has no action_dist_inputs")
    columns = tf.nest.map_structure(
        tf.constant, to_loss_columns(program.spec, program.ports, batch)
    )
    items = len(tf.nest.flatten(columns)[0])
    rows = program.functions.make_loss_columns(columns, tf.ones([items]))
    with program.lock:
        _ = policy.model  # loads the weights
        view = TracedModel(network, program.spec.max_seq_len, training=False)
        outputs = {"action_dist_inputs": view(rows)[0]}
        if program.has_values and "vf_preds" in batch:
            outputs["vf_preds"] = view.value_function()
    valid = rows[LOSS_MASK].numpy() > 0
    expected = "the learner to compute the same as acting for the same rows"
    advice = (
        "Rebuild each row's inputs in the batch as acting had them: memory at the beginning of "
        "each sequence, previous actions and rewards, masks, filters."
    )
    actual = {name: x.numpy()[valid] for name, x in outputs.items()}
    reference = {name: batch[name] for name in outputs}
    worst = compare_arrays(actual, reference, expected, advice, tolerance=1e-4)
    return f"largest difference {worst:.1e}"
