"""Checks of acting: structure of results, independence of rows, and masks."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.leaves import split_rows
from tfpolicies.errors import ConfigError
from tfpolicies.exploration.strategies import StochasticSampling
from tfpolicies.models.distributions import SquashedGaussian
from tfpolicies.models.spaces import Leaf, batch_leaves, is_float_box, unflatten
from tfpolicies.policy.policy import ActionBatch, Policy
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.testing.policy_under_test import (
    DEFAULT_ROWS,
    PolicyUnderTest,
    check_finite,
    compare_arrays,
    draw_masks,
    iterate_choice_counts,
    map_to_env_actions,
    replace_masks,
)
from tfpolicies.testing.report import CheckFailed, NotApplicable

_DRAWS, _BATCH_ROWS = 10_000, 500
_FLOAT_COLUMNS = ("action_logp", "action_prob", "vf_preds", "action_dist_inputs")


def outputs(subject: PolicyUnderTest) -> str:
    """Actions, memory and extras have the promised structure, shapes and dtypes; B = 0 works."""
    policy, rng = subject.make_copy(), subject.make_rng()
    for rows in (1, DEFAULT_ROWS, 0):
        for explore in (True, False):
            result = subject.act(policy, subject.draw_inputs(rows, rng), explore)
            _check_form(subject, result, rows)
            logp, prob = (result.extras.get(name) for name in ("action_logp", "action_prob"))
            if logp is not None and prob is not None:
                advice = "Compute it as `np.exp(action_logp)`; greedy actions have 0 and 1."
                pair = {"action_prob": prob}, {"action_prob": np.exp(logp)}
                compare_arrays(*pair, "exp(action_logp)", advice)
    return ""


def _check_form(subject: PolicyUnderTest, result: ActionBatch, rows: int) -> None:
    arrays = subject.flatten_result(result, convert=False)
    call = f"compute_actions of {rows} rows"
    for leaf in subject.leaves:
        name, array = leaf.name("actions"), arrays.pop(leaf.name("actions"))
        kinds = "f" if leaf.dtype.kind == "f" else "iub"
        fits = array.dtype == leaf.dtype if subject.is_tf else array.dtype.kind in kinds
        if array.shape != (rows, *leaf.shape) or not fits:
            raise CheckFailed(
                f"{call} to return {name} as {leaf.dtype}{[rows, *leaf.shape]}",
                f"{array.dtype}{list(array.shape)}",
                "Return one action per row, nested as `action_space` is, in this dtype.",
            )
    for i, port in enumerate(subject.ports.states):
        state = arrays.pop(f"state_out_{i}", None)
        if state is None or state.shape != (rows, *port.shape):
            raise CheckFailed(
                f"{call} to return state_outs[{i}] of shape {[rows, *port.shape]}",
                "no such array" if state is None else f"shape {list(state.shape)}",
                "Return one array per array of `get_initial_state()`, with a batch axis.",
            )
    for name, array in arrays.items():
        has_wrong_shape = array.ndim == 0 or len(array) != rows
        if has_wrong_shape or (name in _FLOAT_COLUMNS and array.dtype != np.float32):
            raise CheckFailed(
                f"{call} to return extras[{name!r}] as one entry per row, float32 for "
                f"{', '.join(_FLOAT_COLUMNS)}",
                f"{array.dtype}{list(array.shape)}",
                "Convert it before returning it; leave out entries that do not belong to a row.",
            )
        check_finite(
            {name: array},
            f"{call} to return finite numbers in {{name}}",
            "Look for a division by zero, a logarithm of 0 or weights that are not finite.",
        )


def action_space(subject: PolicyUnderTest) -> str:
    """Actions are in the action space: exploring and greedy, also at extreme observations."""
    policy, rng = subject.make_copy(), subject.make_rng()
    batches = [subject.draw_inputs(4 * DEFAULT_ROWS, rng), _draw_extreme_inputs(subject, rng)]
    has_bounds = not subject.is_tf
    has_bounds = has_bounds or policy.config["normalize_actions"] or policy.config["clip_actions"]
    bounds = {} if has_bounds else {"clip": True}  # the config leaves them to the environment
    count = 0
    for inputs in batches:
        for explore in (True, False):
            result = subject.act(policy, inputs, explore)
            action_arrays = batch_leaves(subject.leaves, result.actions, "actions")
            for policy_action in split_rows(unflatten(policy.action_space, action_arrays)):
                _check_member(
                    policy, policy.to_env_action(policy_action, **bounds), "to_env_action", explore
                )
                count += 1
            if has_bounds:
                obs, views, states = subject.ports.split(inputs)
                env_actions_batch, _ = policy.driver.acting.act(obs, views, states, explore=explore)
                for member in split_rows(env_actions_batch):
                    _check_member(policy, member, "acting.columns", explore)
    return f"{count} actions"


def _check_member(policy: Policy, action: Structure, source: str, explore: bool) -> None:
    if not policy.action_space.contains(action):
        raise CheckFailed(
            f"actions of {source}(explore={explore}) to be in {policy.action_space}",
            f"{action!r}",
            "Map actions to the bounds, start and dtype of the space in `to_env_action`.",
        )


def _draw_extreme_inputs(subject: PolicyUnderTest, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns inputs whose observations are at the bounds, or at +-1e3 if there are none."""
    inputs = subject.draw_inputs(4, rng)
    for i, leaf in enumerate(subject.ports.obs_leaves):
        if isinstance(leaf.space, spaces.Box) and not subject.ports.is_mask[i]:
            low, high = (np.clip(x, -1e3, 1e3) for x in (leaf.space.low, leaf.space.high))
            low, high = np.maximum(low, leaf.space.low), np.minimum(high, leaf.space.high)
            inputs[i][0], inputs[i][1] = low.astype(leaf.dtype), high.astype(leaf.dtype)
    return inputs


def batch_invariance(subject: PolicyUnderTest) -> str:
    """A row's greedy result depends neither on the other rows nor on its position."""
    policy, rng = subject.make_copy(), subject.make_rng()
    inputs = subject.draw_inputs(DEFAULT_ROWS, rng)
    batch_arrays = subject.act_as_arrays(policy, inputs, explore=False)
    advice = (
        "Compute each row only from that row: no means over the batch, no BatchNormalization in "
        "training mode, no state kept on the policy between rows."
    )
    order = rng.permutation(DEFAULT_ROWS)
    permuted = subject.act_as_arrays(policy, [x[order] for x in inputs], explore=False)
    reference = {name: x[order] for name, x in batch_arrays.items()}
    worst = compare_arrays(
        permuted, reference, "the same results for rows in another order", advice
    )
    for row in range(0, DEFAULT_ROWS, 3):
        row_arrays = subject.act_as_arrays(
            policy, [x[row : row + 1] for x in inputs], explore=False
        )
        reference = {name: x[row : row + 1] for name, x in batch_arrays.items()}
        expected = (
            f"row {row} of {DEFAULT_ROWS} to give the same by itself as in the batch, to 1e-05"
        )
        worst = max(worst, compare_arrays(row_arrays, reference, expected, advice))
    return f"largest difference {worst:.1e}"


def determinism(subject: PolicyUnderTest) -> str:
    """Greedy actions repeat; policies with the same state or seed explore alike."""
    first, second = subject.make_copy(), subject.make_copy()
    inputs = subject.draw_inputs(DEFAULT_ROWS, subject.make_rng())
    advice = (
        "Draw all noise from a generator that is part of the policy's state, never from global "
        "ones such as `np.random` or `random`."
    )
    first_greedy, second_greedy = (
        subject.act_as_arrays(first, inputs, explore=False) for _ in range(2)
    )
    compare_arrays(
        second_greedy, first_greedy, "explore=False to give the same twice", advice, tolerance=0.0
    )
    first, second = subject.make_copy(), subject.make_copy()
    for _ in range(3):
        first_arrays, second_arrays = (
            subject.act_as_arrays(policy, inputs, explore=True) for policy in (first, second)
        )
        expected = "two policies in the same state to explore alike"
        compare_arrays(first_arrays, second_arrays, expected, advice, tolerance=0.0)
    if subject.is_tf and first.config.get("seed") is not None:
        policy_spaces = (first.observation_space, first.action_space)
        config = subject.state["policy_spec"]["config"]
        first_arrays, second_arrays = (
            type(first)(*policy_spaces, config).get_weights() for _ in range(2)
        )
        expected = f"two new policies with seed={first.config['seed']} to have the same weights"
        advice = "Draw initial weights from initializers without a seed: the policy seeds them."
        compare_arrays(first_arrays, second_arrays, expected, advice, tolerance=0.0)
    return ""


def log_likelihoods(subject: PolicyUnderTest) -> str:
    """`compute_log_likelihoods` returns `action_logp` of the sampled actions."""
    subject.require_program("compute_log_likelihoods needs a distribution")
    policy = subject.make_copy()
    if not isinstance(policy.exploration, StochasticSampling):
        kind = type(policy.exploration).__name__
        raise NotApplicable(f"{kind} does not draw only from the distribution")
    inputs = subject.draw_inputs(DEFAULT_ROWS, subject.make_rng())
    result = subject.act(policy, inputs, explore=True)
    arguments = subject.make_arguments(policy, inputs)
    logp = policy.compute_log_likelihoods(result.actions, **arguments)
    # An action in [-1, 1] has lost digits of the argument of tanh.
    squashed = any(issubclass(kind, SquashedGaussian) for kind in policy.dist_class.leaf_classes)
    expected = "compute_log_likelihoods to give the action_logp of the same rows"
    advice = (
        "Let acting and `compute_log_likelihoods` use one distribution with the same inputs: "
        "observations, masks, memory and previous actions."
    )
    reference, tolerance = result.extras["action_logp"], 1e-2 if squashed else 1e-4
    worst = compare_arrays(
        {"logp": logp}, {"logp": reference}, expected, advice, tolerance=tolerance
    )
    if not any(is_float_box(leaf.space) for leaf in subject.leaves):
        policy_actions = batch_leaves(subject.leaves, result.actions, "actions")
        actions_in_env = map_to_env_actions(policy, policy_actions)
        logp = policy.compute_log_likelihoods(actions_in_env, actions_normalized=False, **arguments)
        expected = "actions_normalized=False to take the environment's actions"
        compare_arrays({"logp": logp}, {"logp": reference}, expected, advice, tolerance=tolerance)
    return f"largest difference {worst:.1e}"


def masks(subject: PolicyUnderTest) -> str:
    """No forbidden action is ever chosen, and log-probabilities, entropy and KL stay finite."""
    if not any(subject.ports.is_mask):
        raise NotApplicable("observations have no 'action_mask'")
    policy, rng = subject.make_copy(), subject.make_rng()
    for start in range(0, _DRAWS, _BATCH_ROWS):
        inputs = subject.draw_inputs(_BATCH_ROWS, rng)
        mask = draw_masks(subject.ports, subject.leaves, _BATCH_ROWS, rng)
        masked_inputs = replace_masks(subject.ports, inputs, mask)
        arrays = subject.act_as_arrays(policy, masked_inputs, explore=start % 2 == 0)
        _check_allowed(subject, arrays, mask, explore=start % 2 == 0)
        _check_finite(subject, policy, arrays)
    return f"{_DRAWS} draws"


def _check_allowed(
    subject: PolicyUnderTest, arrays: dict[str, np.ndarray], mask: np.ndarray, *, explore: bool
) -> None:
    start, sizes = 0, iter(iterate_choice_counts(subject.leaves))
    for leaf in subject.leaves:
        if is_float_box(leaf.space):
            continue
        actions = arrays[leaf.name("actions")]
        actions = actions.reshape(len(mask), -1).astype(np.int64)
        first = _first_choice(leaf, subject)
        for cell in range(actions.shape[1]):
            size = next(sizes)
            allowed = mask[:, start : start + size]
            start += size
            chosen = actions[:, cell] - first[cell]
            if isinstance(leaf.space, spaces.MultiBinary):
                is_forbidden = (chosen == 1) & ~allowed[:, 0]
            else:
                inside = np.clip(chosen, 0, size - 1)
                is_forbidden = (chosen != inside) | ~allowed[np.arange(len(mask)), inside]
            if is_forbidden.any():
                row = int(np.argmax(is_forbidden))
                raise CheckFailed(
                    f"{leaf.name('actions')} to be allowed by the mask, explore={explore}",
                    f"{int(actions[row, cell])} under the mask {allowed[row].astype(int).tolist()}"
                    f" ({int(is_forbidden.sum())} of {len(mask)} rows)",
                    "Give forbidden choices the least possible logit before anything is drawn, "
                    "and also apply the mask when exploring at random.",
                )


def _first_choice(leaf: Leaf, subject: PolicyUnderTest) -> np.ndarray:
    space: Any = leaf.space
    cells = int(np.prod(leaf.shape))
    if subject.is_tf or isinstance(space, spaces.MultiBinary):
        return np.zeros(cells, np.int64)
    start = space.low if isinstance(space, spaces.Box) else space.start
    return np.broadcast_to(np.asarray(start, np.int64).reshape(-1), cells)


def _check_finite(
    subject: PolicyUnderTest, policy: TFPolicy, arrays: dict[str, np.ndarray]
) -> None:
    numbers = {n: x for n, x in arrays.items() if n in _FLOAT_COLUMNS}
    if subject.is_tf:
        inputs, model = arrays["action_dist_inputs"], policy.model
        distribution = policy.dist_class(tf.constant(inputs), model)
        shifted = policy.dist_class(tf.constant(np.roll(inputs, 1, axis=0)), model)
        with contextlib.suppress(ConfigError):  # some distributions have no closed form
            numbers["entropy"] = distribution.entropy().numpy()
            numbers["KL to itself"] = distribution.kl(distribution).numpy()
            numbers["KL to another row's mask"] = distribution.kl(shifted).numpy()
    check_finite(
        numbers,
        "{name} to be finite under any mask that allows something",
        "Mask with a large finite negative logit (`tfpolicies.models.distributions.MASKED_LOGIT`), "
        "not with -inf.",
    )
