"""Checks of acting: structure of results, independence of rows, and masks."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.batch.leaves import unbatched
from tfpolicies.errors import ConfigError
from tfpolicies.exploration.strategies import StochasticSampling
from tfpolicies.models.distributions import SquashedGaussian
from tfpolicies.models.spaces import Leaf, batch_leaves, is_float_box, nest
from tfpolicies.policy.policy import ActionBatch, Policy
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.testing.report import Broken, NotApplicable
from tfpolicies.testing.subject import (
    ROWS,
    Subject,
    all_same,
    choices,
    env_actions,
    random_masks,
    require_finite,
    with_masks,
)
from tfpolicies.type_aliases import Structure

_DRAWS, _AT_ONCE = 10_000, 500
_FLOATS = ("action_logp", "action_prob", "vf_preds", "action_dist_inputs")


def outputs(subject: Subject) -> str:
    """Actions, memory and extras have the promised structure, shapes and dtypes; B = 0 works."""
    policy, rng = subject.twin(), subject.rng()
    for rows in (1, ROWS, 0):
        for explore in (True, False):
            found = subject.act(policy, subject.inputs(rows, rng), explore)
            _check_form(subject, found, rows)
            logp, prob = (found.extras.get(name) for name in ("action_logp", "action_prob"))
            if logp is not None and prob is not None:
                advice = "Compute it as `np.exp(action_logp)`; greedy actions have 0 and 1."
                pair = {"action_prob": prob}, {"action_prob": np.exp(logp)}
                all_same(*pair, "exp(action_logp)", advice)
    return ""


def _check_form(subject: Subject, acted: ActionBatch, rows: int) -> None:
    named = subject.flat(acted, convert=False)
    called = f"compute_actions of {rows} rows"
    for leaf in subject.leaves:
        name, array = leaf.name("actions"), named.pop(leaf.name("actions"))
        kinds = "f" if leaf.dtype.kind == "f" else "iub"
        fits = array.dtype == leaf.dtype if subject.is_tf else array.dtype.kind in kinds
        if array.shape != (rows, *leaf.shape) or not fits:
            raise Broken(
                f"{called} to return {name} as {leaf.dtype}{[rows, *leaf.shape]}",
                f"{array.dtype}{list(array.shape)}",
                "Return one action per row, nested as `action_space` is, in this dtype.",
            )
    for i, port in enumerate(subject.ports.states):
        state = named.pop(f"state_out_{i}", None)
        if state is None or state.shape != (rows, *port.shape):
            raise Broken(
                f"{called} to return state_outs[{i}] of shape {[rows, *port.shape]}",
                "no such array" if state is None else f"shape {list(state.shape)}",
                "Return one array per array of `get_initial_state()`, with a batch axis.",
            )
    for name, array in named.items():
        wrong = array.ndim == 0 or len(array) != rows
        if wrong or (name in _FLOATS and array.dtype != np.float32):
            raise Broken(
                f"{called} to return extras[{name!r}] as one entry per row, float32 for "
                f"{', '.join(_FLOATS)}",
                f"{array.dtype}{list(array.shape)}",
                "Convert it before returning it; leave out entries that do not belong to a row.",
            )
        require_finite(
            {name: array},
            f"{called} to return finite numbers in {{name}}",
            "Look for a division by zero, a logarithm of 0 or weights that are not finite.",
        )


def action_space(subject: Subject) -> str:
    """Actions are in the action space: exploring and greedy, also at extreme observations."""
    policy, rng = subject.twin(), subject.rng()
    batches = [subject.inputs(4 * ROWS, rng), _extremes(subject, rng)]
    has_bounds = not subject.is_tf
    has_bounds = has_bounds or policy.config["normalize_actions"] or policy.config["clip_actions"]
    bounds = {} if has_bounds else {"clip": True}  # the config leaves them to the environment
    count = 0
    for inputs in batches:
        for explore in (True, False):
            acted = subject.act(policy, inputs, explore)
            found = batch_leaves(subject.leaves, acted.actions, "actions")
            for own in unbatched(nest(policy.action_space, found)):
                _check_member(policy, policy.env_action(own, **bounds), "env_action", explore)
                count += 1
            if has_bounds:
                obs, seen, states = subject.ports.split(inputs)
                for_env, _ = policy.driver.acting.act(obs, seen, states, explore=explore)
                for member in unbatched(for_env):
                    _check_member(policy, member, "acting.columns", explore)
    return f"{count} actions"


def _check_member(policy: Policy, action: Structure, source: str, explore: bool) -> None:
    if not policy.action_space.contains(action):
        raise Broken(
            f"actions of {source}(explore={explore}) to be in {policy.action_space}",
            f"{action!r}",
            "Map actions to the bounds, start and dtype of the space in `env_action`.",
        )


def _extremes(subject: Subject, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns inputs whose observations are at the bounds, or at +-1e3 if there are none."""
    inputs = subject.inputs(4, rng)
    for i, leaf in enumerate(subject.ports.obs_leaves):
        if isinstance(leaf.space, spaces.Box) and not subject.ports.is_mask[i]:
            low, high = (np.clip(x, -1e3, 1e3) for x in (leaf.space.low, leaf.space.high))
            low, high = np.maximum(low, leaf.space.low), np.minimum(high, leaf.space.high)
            inputs[i][0], inputs[i][1] = low.astype(leaf.dtype), high.astype(leaf.dtype)
    return inputs


def batch_invariance(subject: Subject) -> str:
    """A row's greedy result depends neither on the other rows nor on its position."""
    policy, rng = subject.twin(), subject.rng()
    inputs = subject.inputs(ROWS, rng)
    whole = subject.acted(policy, inputs, explore=False)
    advice = (
        "Compute each row only from that row: no means over the batch, no BatchNormalization in "
        "training mode, no state kept on the policy between rows."
    )
    order = rng.permutation(ROWS)
    permuted = subject.acted(policy, [x[order] for x in inputs], explore=False)
    wanted = {name: x[order] for name, x in whole.items()}
    worst = all_same(permuted, wanted, "the same results for rows in another order", advice)
    for row in range(0, ROWS, 3):
        alone = subject.acted(policy, [x[row : row + 1] for x in inputs], explore=False)
        wanted = {name: x[row : row + 1] for name, x in whole.items()}
        expected = f"row {row} of {ROWS} to give the same by itself as in the batch, to 1e-05"
        worst = max(worst, all_same(alone, wanted, expected, advice))
    return f"largest difference {worst:.1e}"


def determinism(subject: Subject) -> str:
    """Greedy actions repeat; policies with the same state or seed explore alike."""
    first, second = subject.twin(), subject.twin()
    inputs = subject.inputs(ROWS, subject.rng())
    advice = (
        "Draw all noise from a generator that is part of the policy's state, never from global "
        "ones such as `np.random` or `random`."
    )
    once, again = (subject.acted(first, inputs, explore=False) for _ in range(2))
    all_same(again, once, "explore=False to give the same twice", advice, tolerance=0.0)
    first, second = subject.twin(), subject.twin()
    for _ in range(3):
        ours, theirs = (subject.acted(each, inputs, explore=True) for each in (first, second))
        expected = "two policies in the same state to explore alike"
        all_same(ours, theirs, expected, advice, tolerance=0.0)
    # the first policy made of a model instance starts with that model's weights
    is_copied = subject.is_tf and first.program.spec.source.template is not None
    if subject.is_tf and first.config.get("seed") is not None and not is_copied:
        spaces_of = (first.observation_space, first.action_space)
        config = subject.state["policy_spec"]["config"]
        ours, theirs = (type(first)(*spaces_of, config).get_weights() for _ in range(2))
        expected = f"two new policies with seed={first.config['seed']} to have the same weights"
        advice = "Draw initial weights from initializers without a seed: the policy seeds them."
        all_same(ours, theirs, expected, advice, tolerance=0.0)
    return ""


def log_likelihoods(subject: Subject) -> str:
    """`compute_log_likelihoods` returns `action_logp` of the sampled actions."""
    subject.needs_tf("compute_log_likelihoods needs a distribution")
    policy = subject.twin()
    if not isinstance(policy.exploration, StochasticSampling):
        kind = type(policy.exploration).__name__
        raise NotApplicable(f"{kind} does not draw only from the distribution")
    inputs = subject.inputs(ROWS, subject.rng())
    acted = subject.act(policy, inputs, explore=True)
    given = subject.arguments(policy, inputs)
    found = policy.compute_log_likelihoods(acted.actions, **given)
    # An action in [-1, 1] has lost digits of the argument of tanh.
    squashed = any(issubclass(kind, SquashedGaussian) for kind in policy.dist_class.kinds)
    expected = "compute_log_likelihoods to give the action_logp of the same rows"
    advice = (
        "Let acting and `compute_log_likelihoods` use one distribution with the same inputs: "
        "observations, masks, memory and previous actions."
    )
    wanted, tolerance = acted.extras["action_logp"], 1e-2 if squashed else 1e-4
    worst = all_same({"logp": found}, {"logp": wanted}, expected, advice, tolerance=tolerance)
    if not any(is_float_box(leaf.space) for leaf in subject.leaves):
        own = batch_leaves(subject.leaves, acted.actions, "actions")
        for_env = env_actions(policy, own)
        found = policy.compute_log_likelihoods(for_env, actions_normalized=False, **given)
        expected = "actions_normalized=False to take the environment's actions"
        all_same({"logp": found}, {"logp": wanted}, expected, advice, tolerance=tolerance)
    return f"largest difference {worst:.1e}"


def masks(subject: Subject) -> str:
    """No forbidden action is ever chosen, and log-probabilities, entropy and KL stay finite."""
    if not any(subject.ports.is_mask):
        raise NotApplicable("observations have no 'action_mask'")
    policy, rng = subject.twin(), subject.rng()
    for start in range(0, _DRAWS, _AT_ONCE):
        inputs = subject.inputs(_AT_ONCE, rng)
        mask = random_masks(subject.ports, subject.leaves, _AT_ONCE, rng)
        shown = with_masks(subject.ports, inputs, mask)
        found = subject.acted(policy, shown, explore=start % 2 == 0)
        _check_allowed(subject, found, mask, explore=start % 2 == 0)
        _check_finite(subject, policy, found)
    return f"{_DRAWS} draws"


def _check_allowed(
    subject: Subject, found: dict[str, np.ndarray], mask: np.ndarray, *, explore: bool
) -> None:
    start, sizes = 0, iter(choices(subject.leaves))
    for leaf in subject.leaves:
        if is_float_box(leaf.space):
            continue
        actions = found[leaf.name("actions")]
        actions = actions.reshape(len(mask), -1).astype(np.int64)
        first = _first_choice(leaf, subject)
        for cell in range(actions.shape[1]):
            size = next(sizes)
            allowed = mask[:, start : start + size]
            start += size
            chosen = actions[:, cell] - first[cell]
            if isinstance(leaf.space, spaces.MultiBinary):
                wrong = (chosen == 1) & ~allowed[:, 0]
            else:
                inside = np.clip(chosen, 0, size - 1)
                wrong = (chosen != inside) | ~allowed[np.arange(len(mask)), inside]
            if wrong.any():
                row = int(np.argmax(wrong))
                raise Broken(
                    f"{leaf.name('actions')} to be allowed by the mask, explore={explore}",
                    f"{int(actions[row, cell])} under the mask {allowed[row].astype(int).tolist()}"
                    f" ({int(wrong.sum())} of {len(mask)} rows)",
                    "Give forbidden choices the least possible logit before anything is drawn, "
                    "and also apply the mask when exploring at random.",
                )


def _first_choice(leaf: Leaf, subject: Subject) -> np.ndarray:
    space: Any = leaf.space
    cells = int(np.prod(leaf.shape))
    if subject.is_tf or isinstance(space, spaces.MultiBinary):
        return np.zeros(cells, np.int64)
    start = space.low if isinstance(space, spaces.Box) else space.start
    return np.broadcast_to(np.asarray(start, np.int64).reshape(-1), cells)


def _check_finite(subject: Subject, policy: TFPolicy, found: dict[str, np.ndarray]) -> None:
    numbers = {n: x for n, x in found.items() if n in _FLOATS}
    if subject.is_tf:
        inputs, model = found["action_dist_inputs"], policy.model
        distribution = policy.dist_class(tf.constant(inputs), model)
        shifted = policy.dist_class(tf.constant(np.roll(inputs, 1, axis=0)), model)
        with contextlib.suppress(ConfigError):  # some distributions have no closed form
            numbers["entropy"] = distribution.entropy().numpy()
            numbers["KL to itself"] = distribution.kl(distribution).numpy()
            numbers["KL to another row's mask"] = distribution.kl(shifted).numpy()
    require_finite(
        numbers,
        "{name} to be finite under any mask that allows something",
        "Mask with a large finite negative logit (`tfpolicies.models.distributions.MASKED_LOGIT`), "
        "not with -inf.",
    )
