"""The tensor functions of a Program, which every runtime runs.

Acting takes the weights as inputs. Learning uses the *resident* variables of the networks and their
Keras optimizers, which a runtime loads before and reads after an update. This module does not know
files, sessions or policies. A function body runs once per runtime, when it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import ConfigError
from tfpolicies.exploration.transform import Transform
from tfpolicies.models.custom_model import ports_of
from tfpolicies.models.network import Network
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.models.spaces import nest
from tfpolicies.program.acting_view import ActingView
from tfpolicies.program.devices import CPU, gathered, learner_device, placed
from tfpolicies.program.frozen_values import warn_of_frozen_draws, warn_of_frozen_numbers
from tfpolicies.program.minibatches import StepInputs, is_input
from tfpolicies.program.networks import (
    NetworkView,
    ResidentNetwork,
    follow,
    layout_of,
    resident_slots,
)
from tfpolicies.program.optimizers import Optimizers, gradients_of
from tfpolicies.program.own_loss import own_stats, with_own_loss
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.traced_context import ActedModel, TracedContext
from tfpolicies.program.traces import Traces
from tfpolicies.program.view import LOSS_MASK, ModelView, TrainBatch
from tfpolicies.state import Slot

LOSS = "__loss"
"""The name of the loss among the statistics of an update: the sum if there are several."""


class ActOutputs(NamedTuple):
    """The outputs of `act` for N rows; `values` is None for models without a value.

    `actions` and `env_actions` have one array per leaf of the action space.
    """

    actions: Any  # each [N, *shape], normalised
    env_actions: Any  # each [N, *shape], as the environment takes them
    logp: Any  # [N] float32
    prob: Any  # [N] float32
    dist_inputs: Any  # [N, n] float32
    values: Any  # [N] float32
    states: Any  # the recurrent state after each sequence, [S, *shape] float32 each
    extras: Any  # the results of `extra_action_out_fn`, by name


class ActInputs(NamedTuple):
    """The inputs of `act`, without the weights."""

    inputs: Any  # one array per port: observations and views [N, ...], recurrent state [S, ...]
    noise: Any  # [N, noise_size] float32; zeros for the greedy actions
    params: Any  # [P] float32, of the exploration


class Differentiated(NamedTuple):
    """A loss with its gradients."""

    pairs: Any  # a list of (gradient, variable); for several losses, a list of lists
    loss: tf.Tensor  # float32 scalar, the sum if there are several
    stats: dict[str, tf.Tensor]
    fetches: dict[str, tf.Tensor]  # the results of `extra_learn_fetches_fn`
    batch: TrainBatch
    due: tuple[Any, Any]  # the arguments of `apply_gradients_fn` for the step that is left to do


@dataclass(eq=False)
class ProgramFunctions:
    """The tensor functions of one Program over its resident networks.

    Attributes:
        spec: of the Program.
        network: the network that acts.
        networks: the variables of all networks, by name, those of `network` first.
        optimizers: the optimizers of the trainable variables.
        device: the device for learning.
        resident: all variables, in the order of the layout.
        layout: the position of each of them in a state.
        acting_device: the device for acting: the same as for learning if it has convolutions.
        traces: the number of runs of each function body, by name.
    """

    spec: ProgramSpec
    network: Network
    networks: Mapping[str, ResidentNetwork]
    optimizer: Optimizers
    device: str = CPU

    def __post_init__(self) -> None:
        spec = self.spec
        slots = resident_slots(
            self.networks, self.network.filter_variables, self.optimizer.variables
        )
        self.resident = list(slots.values())
        self.layout = layout_of(self.networks, list(slots))
        sees_images = any(len(slot.shape) > 3 for slot in self.layout.acting)
        self.acting_device = self.device if sees_images else CPU
        limit = spec.static["eager_max_retraces"] if spec.static["eager_tracing"] else None
        self.traces = Traces(limit)

    @classmethod
    def of(cls, spec: ProgramSpec) -> ProgramFunctions:
        """Returns the functions over new variables, in the current eager context or graph."""
        device = learner_device(spec.static["num_gpus"])
        with placed(device):
            network = _network(spec)
            networks = {}
            for name, plan in spec.networks.items():
                make = plan.make or spec.source.make
                model = network.model if plan.make is None else make()
                networks[name] = ResidentNetwork(plan, model, make() if plan.target else None)
            optimizer = Optimizers(spec.view().optimizer, networks)
        return cls(spec, network, networks, optimizer, device)

    # -- acting -------------------------------------------------------------------------------

    def act(
        self,
        weights: Sequence[tf.Tensor],
        given: ActInputs,
        *,
        seq_lens: tf.Tensor | None = None,
        time_steps: tf.Tensor | int = 1,
        explorer: Transform | None = None,
    ) -> ActOutputs:
        """Chooses actions for N rows; zero noise gives the greedy ones.

        Each runtime traces it once, and counts that under a separate name.

        Args:
            weights: all variables of the network, in order.
            act_inputs: the inputs.
            seq_lens: int32 `[S]`, the number of valid steps of each sequence; None: all are valid.
            time_steps: the steps T of each of the S = N / T sequences.
            explorer: turns noise into actions; None for the configured one.
        """
        spec = self.spec
        acting = ActingView(spec, self.network, weights, given.inputs, seq_lens, time_steps)
        view = spec.view()
        with warn_of_frozen_draws(f"acting of {spec.policy_class.__name__}"):
            chosen = acting.choose(
                view,
                noise=given.noise,
                params=given.params,
                explorer=spec.explorer if explorer is None else explorer,
            )
        env_actions = spec.action_mapping.to_env(
            chosen.actions, cast=tf.cast, clip=tf.clip_by_value
        )
        values = acting.values() if spec.with_value else None
        extras: dict[str, tf.Tensor] = {}
        if spec.policy_class._overrides("extra_action_out_fn"):
            model = ActedModel(spec.policy_class.__name__, chosen.dist_inputs, values)
            context: TracedContext = view._context
            context.model, context.dist_inputs, context.values = model, chosen.dist_inputs, values
            result = {**view.extra_action_out_fn()}
            if values is not None:
                result.pop(SampleBatch.VF_PREDS, None)  # values are an output anyway
            extras = {name: tf.convert_to_tensor(x) for name, x in result.items()}
        logp, states = chosen.logp, chosen.states
        prob = tf.exp(logp)
        return ActOutputs(
            chosen.actions, env_actions, logp, prob, chosen.dist_inputs, values, states, extras
        )

    def log_likelihoods(
        self,
        weights: Sequence[tf.Tensor],
        inputs: Sequence[tf.Tensor],
        actions: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Returns the log-probability of normalised actions, one leaf each, float32 `[N]`.

        Raises:
            ConfigError: if the class defines how actions are sampled, but not their distribution.
        """
        self.traces.note("log_likelihoods", inputs, actions)
        acting = ActingView(self.spec, self.network, weights, inputs)
        return acting.logp(self.spec.view(), nest(self.spec.action_space, actions))

    # -- learning -----------------------------------------------------------------------------

    def loss_and_gradients(
        self,
        view: Any,
        columns: Mapping[str, Any],
        takes: tf.Tensor | None = None,
        *,
        in_turn: bool = False,
    ) -> Differentiated:
        """Runs the policy class's loss on one minibatch and differentiates it.

        Args:
            traced_self: the `self` of the class's code; see `loss_view`.
            columns: the minibatch as rows.
            active: for each optimizer, whether it applies the update; None: all do.
            in_turn: whether the optimizers of losses that are tensors step before losses that are
                functions are called; otherwise no optimizer steps.
        """
        batch = TrainBatch(columns)
        model = ModelView(self.network, self.spec.time_steps, training=True)
        view._context.model = model
        tape = tf.GradientTape(persistent=True)  # several losses, and a check of each
        with tape:
            found = with_own_loss(self.network, self._loss(view, model, batch), batch)
        losses, hooked = self.optimizer.losses(found), self.optimizer.hooked
        optimizers = self.optimizer.on_tape(tape, takes)
        parts = _early_and_late(losses)
        steps: list[tuple[Any, Any]] = []  # the arguments of `apply_gradients_fn` for each part
        for part in parts:
            if steps and in_turn:
                view.apply_gradients_fn(*steps[-1])
            for i in part:
                with tape:
                    losses[i] = self._evaluated(losses[i])
                    regularized = self._regularized(i, losses[i])
                if regularized is not losses[i]:  # its gradient would hide that the loss has none
                    optimizers[i].require_gradient(losses[i])
                losses[i] = regularized
            chosen = hooked([optimizers[i] for i in part])
            pairs = view.compute_gradients_fn(chosen, hooked([losses[i] for i in part]))
            steps.append((chosen, pairs))
        batch.is_weighed = LOSS_MASK in batch.accessed_keys and not batch.ignores_mask
        summed = losses if isinstance(found, list | tuple) else losses[:1]
        whole = tf.add_n([tf.cast(tf.reduce_sum(each), tf.float32) for each in summed])
        every = _in_order(parts, [pairs for _, pairs in steps])
        stats = {**view.stats_fn(batch), **view.grad_stats_fn(batch, gradients_of(every))}
        stats = {name: tf.cast(value, tf.float32) for name, value in stats.items()}
        stats |= own_stats(self.network)
        fetches = view.extra_learn_fetches_fn()
        return Differentiated(every, whole, stats, fetches, batch, steps[-1])

    def differentiated(
        self,
        hyper: tf.Tensor,
        columns: Mapping[str, Any],
        inputs: StepInputs,
        *,
        in_turn: bool = False,
    ) -> Differentiated:
        """Differentiates the loss of one minibatch without padding, whose inputs are `[1, ...]`.

        With `in_turn`, optimizers step as in an update; see `loss_and_gradients`.
        """
        weights = tf.ones([tf.shape(tf.nest.flatten(dict(columns))[0])[0]])
        rows, now = self.loss_columns(columns, weights), inputs.at(0)
        if not in_turn:
            return self.loss_and_gradients(self.loss_view(hyper, now), rows)
        view, active = self._begun(hyper, now), self._active_optimizers(now)
        return self.loss_and_gradients(view, rows, active, in_turn=True)

    def _loss(self, view: Any, model: ModelView, batch: TrainBatch) -> Any:
        """Returns one scalar, or a list of scalars and of functions that return one."""
        noise = getattr(view._context, "learning_noise", None)
        dist_class = self.spec.dist_class.drawing_from(noise)
        cls, before = self.spec.policy_class, dict(vars(view))
        with warn_of_frozen_draws(f"{cls.__name__}.loss", cls.loss):
            found = self._run(lambda: view.loss(model, dist_class, batch))
        warn_of_frozen_numbers(f"{cls.__name__}.loss", before, vars(view))
        listed = isinstance(found, list | tuple)
        losses = [x if callable(x) else self._scalar(x) for x in (found if listed else [found])]
        return losses if listed else self._evaluated(losses[0])

    def _evaluated(self, loss: tf.Tensor | Callable[[], tf.Tensor]) -> tf.Tensor:
        return self._scalar(self._run(loss)) if callable(loss) else loss

    def _run(self, code: Callable[[], Any]) -> Any:
        """Runs code of the class; explains errors about values of tensors, unknown in a trace."""
        try:
            return code()
        except tf.errors.OperatorNotAllowedInGraphError as error:
            raise ConfigError(
                f"{self.spec.policy_class.__name__}.loss uses the value of a tensor in Python "
                "(`if`, `and`, `while`), but it is traced once for all policies of its class, and "
                "hyper-parameters such as self.config['lr'] are tensors in it. Add every term, "
                "times a coefficient that may be 0; or use tf.where."
            ) from error

    def _scalar(self, loss: tf.Tensor) -> tf.Tensor:
        if tf.is_tensor(loss) and loss.dtype.is_floating and loss.shape.num_elements() in (1, None):
            return tf.reshape(loss, [])
        given = f"a tensor of shape {loss.shape}" if tf.is_tensor(loss) else repr(loss)[:80]
        raise ConfigError(
            f"{self.spec.policy_class.__name__}.loss must return a scalar tensor, or a list of "
            f"them if it has several networks or optimizers; got {given}. Return a mean over "
            'the rows, such as masked_mean(x, train_batch["loss_mask"]), computed by TensorFlow.'
        )

    def _regularized(self, i: int, loss: tf.Tensor) -> tf.Tensor:
        """Adds the losses of a network's layers to loss `i` if it is the first of the network."""
        names = self.optimizer.network_names
        own = [] if names[i] in names[:i] else list(self.networks[names[i]].model.losses)
        return loss + tf.add_n(own) if own else loss

    def loss_view(self, hyper: tf.Tensor, inputs: StepInputs) -> Any:
        """Returns the `self` of the class's code in one update."""
        result = self.spec.view(hyper)
        context: TracedContext = result._context
        context.networks, context.target_networks = {}, {}
        for name, each in self.networks.items():
            if each.plan.make is not None:
                context.networks[name] = NetworkView(each.model, self.network, training=True)
                if each.follower is not None:
                    view = NetworkView(each.follower, self.network, training=False)
                    context.target_networks[name] = view
            elif each.follower is not None:
                target = self.network.like(each.follower)
                context.target_model = ModelView(target, self.spec.time_steps, training=False)
        if is_input(inputs.noise):
            context.learning_noise = tf.reshape(inputs.noise, [-1, self.spec.noise_size])
        if is_input(inputs.update_noise):
            context.update_noise = inputs.update_noise
        return result

    def learn_step(
        self,
        hyper: tf.Tensor,
        columns: Mapping[str, Any],
        weights: tf.Tensor,
        inputs: StepInputs,
        *,
        stat_names: Sequence[str],
        clips: bool,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Runs one update on one minibatch; runtimes trace it separately, and count that.

        Args:
            hyper: the hyper-parameters `[H]`.
            columns: the minibatch, `[mb, ...]` each.
            weights: float32 `[mb]`, 0 for padding.
            inputs: the other inputs of the minibatch.
            stat_names: names of the statistics, in the order of the result.
            clips_gradients: whether gradients are limited; see `ProgramSpec.clips`.

        Returns:
            The statistics, followed by the loss: float32 `[S + 1]`; and the fetches.
        """
        view = self._begun(hyper if clips else self.spec.unclipped(hyper), inputs)
        rows = self.loss_columns(columns, weights)
        active = self._active_optimizers(inputs)
        found = self.loss_and_gradients(view, rows, active, in_turn=True)
        view.apply_gradients_fn(*found.due)
        if is_input(inputs.update_targets):
            follow(self.networks, inputs.update_targets * view.config["tau"])
        stats = [*(found.stats[name] for name in stat_names), found.loss]
        return tf.stack(stats), dict(found.fetches)

    def _active_optimizers(self, inputs: StepInputs) -> list[tf.Tensor] | None:
        active = inputs.active_optimizers
        return tf.unstack(active, len(self.optimizer)) if is_input(active) else None

    def _begun(self, hyper: tf.Tensor, inputs: StepInputs) -> Any:
        """Sets the learning rates; returns the `self` of the update."""
        view = self.loss_view(hyper, inputs)
        self.optimizer.set_learning_rates(view.config)
        return view

    def learn(
        self,
        hyper: tf.Tensor,
        columns: Mapping[str, Any],
        index: tf.Tensor,
        mask: tf.Tensor,
        inputs: StepInputs,
        piece: tf.Tensor,
        totals: tf.Tensor,
        *,
        step: Callable[..., Any],
        exact_rows: bool,
        fetches: bool,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Runs the minibatch updates of one chunk in one loop.

        Args:
            hyper: the hyper-parameters `[H]`.
            columns: the whole batch, `[N, ...]` each; N may be padded. For recurrent models its
                items are sequences, `[S, T, ...]` each, and `[S, ...]` for the recurrent state.
            index: int32 `[K, mb]`, the items of each minibatch of the whole update.
            mask: float32 `[K, mb]`, 0 where a minibatch is shorter than `mb`.
            inputs: the other inputs of each minibatch, `[K, ...]`.
            chunk: int32 `[2]`, the first minibatch and the end (exclusive), at most K.
            totals: mean, minimum and maximum of each statistic over the minibatches before the
                first, float32 `[3, S + 1]`; see `no_totals`.
            step: `learn_step`, or a compiled version of it.
            exact_rows: gather only the rows of mask 1. For losses that do not read the mask; not
                for XLA, which needs static shapes.
            fetches: run only the first minibatch, outside of a loop, and return its fetches.

        Returns:
            The totals including the minibatches of the chunk; the fetches; and the new variables,
                by
            buffer.
        """
        self.traces.note("learn_once" if fetches else "learn_epochs", hyper, columns, index, mask)

        def at(i: tf.Tensor) -> Any:
            rows, weights, now = index[i], mask[i], inputs.at(i)
            if exact_rows:
                if is_input(now.noise):
                    now = now._replace(noise=tf.boolean_mask(now.noise, weights > 0))
                rows = tf.boolean_mask(rows, weights > 0)
                weights = tf.ones_like(rows, tf.float32)
            minibatch = tf.nest.map_structure(lambda x: gathered(x, rows, self.device), columns)
            return step(hyper, minibatch, weights, now)

        if fetches:
            now, found = at(0)
            return tf.stack([now, now, now]), found, self.left()

        def body(i: tf.Tensor, totals: tuple[tf.Tensor, ...]) -> Any:
            now, _ = at(i)
            mean, low, high = totals
            count = tf.cast(i, tf.float32)  # the number of minibatches before this one
            mean = (mean * count + now) / (count + 1.0)
            return i + 1, (mean, tf.minimum(low, now), tf.maximum(high, now))

        _, done = tf.while_loop(
            lambda i, _: i < piece[1],
            body,
            (piece[0], tuple(tf.unstack(totals))),
            parallel_iterations=1,
        )
        return tf.stack(done), {}, self.left()

    def gradients(
        self, hyper: tf.Tensor, columns: Mapping[str, Any], inputs: StepInputs
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Returns the gradients by trainable variable, loss by loss, the statistics and fetches.

        `LOSS` is among the statistics. The `inputs` are those of one minibatch, `[1, ...]`.
        """
        self.traces.note("gradients", hyper, columns)
        result = self.differentiated(hyper, columns, inputs)
        stats = {**result.stats, LOSS: result.loss}
        return self.optimizer.by_variable(result.pairs), stats, dict(result.fetches)

    def loss_columns(self, columns: Mapping[str, Any], weights: tf.Tensor) -> dict[str, Any]:
        """Returns a minibatch of rows or sequences as rows for the loss, with its `loss_mask`."""
        if not self.network.ports.is_recurrent:
            return {**columns, LOSS_MASK: weights}
        steps = self.spec.time_steps

        def rows(column: tf.Tensor) -> tf.Tensor:
            return tf.reshape(column, [-1, *column.shape[2:]])

        found = {
            name: column if is_per_sequence(name) else tf.nest.map_structure(rows, column)
            for name, column in columns.items()
        }
        valid = tf.sequence_mask(columns[SEQ_LENS], steps, tf.float32)
        found[LOSS_MASK] = tf.reshape(valid * weights[:, None], [-1])
        return found

    def apply_gradients(
        self, hyper: tf.Tensor, gradients: Sequence[tf.Tensor], inputs: StepInputs
    ) -> dict[str, tf.Tensor]:
        """Updates the trainable variables with gradients; returns the new variables by buffer."""
        self.traces.note("apply_gradients", hyper, gradients)
        now = inputs.at(0)
        given = self.optimizer.with_pairs(gradients, self._active_optimizers(now))
        self._begun(hyper, now).apply_gradients_fn(*given)
        return self.left()

    # -- moving a state in and out ------------------------------------------------------------

    def load(self, segments: Mapping[str, tf.Tensor]) -> None:
        """Overwrites the resident variables with a state's segments."""
        self.traces.note("load", segments)
        parts = unpack(segments, self.layout.slots)
        for variable, part in zip(self.resident, parts, strict=True):
            variable.assign(part)

    def left(self) -> dict[str, tf.Tensor]:
        """Returns the current resident variables as the buffers of the layout."""
        slots, found = zip(self.layout.slots, self.resident, strict=True), {}
        tensors = {slot.key: tf.convert_to_tensor(variable) for slot, variable in slots}
        for name, piece in self.layout.pieces.items():
            parts = [tf.reshape(tensors[slot.key], [-1]) for slot in piece]
            found[name] = tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]
        return found


def _early_and_late(losses: Sequence[Any]) -> list[list[int]]:
    """Returns the indices of losses that are differentiated together: tensors, then functions."""
    late = [i for i, loss in enumerate(losses) if callable(loss)]
    early = [i for i in range(len(losses)) if i not in late]
    return [part for part in (early, late) if part]


def _in_order(parts: Sequence[Sequence[int]], pairs: Sequence[Any]) -> Any:
    """Returns the pairs of all losses in the order of the losses, as hooks return them."""
    if len(parts) == 1:
        return pairs[0]
    found = dict(zip(chain(*parts), chain(*pairs), strict=True))
    return [found[i] for i in sorted(found)]


def no_totals(stat_names: Sequence[str]) -> np.ndarray:
    """Returns the mean, minimum and maximum over no minibatches: float32 `[3, S + 1]`."""
    start = np.array([[0.0], [np.inf], [-np.inf]], np.float32)
    return np.repeat(start, len(stat_names) + 1, axis=1)


def _network(spec: ProgramSpec) -> Network:
    model = spec.source.make()
    ports = ports_of(model, spec.observation_space, spec.dist_class)
    ports = replace(ports, noise_size=spec.source.noise_size)
    return Network(model, ports, spec.dist_class, spec.filtered)


def is_per_sequence(name: str) -> bool:
    """Returns whether a column has one row per sequence: the recurrent state and the lengths."""
    return name == SEQ_LENS or name.startswith("state_in_")


def unpack(segments: Mapping[str, tf.Tensor], slots: Sequence[Slot]) -> list[tf.Tensor]:
    """Splits flat segments into the variables of slots, in their order."""
    parts = {}
    for name, segment in segments.items():
        sizes = [math.prod(slot.shape) for slot in slots if slot.segment == name]
        parts[name] = iter(tf.split(segment, sizes) if len(sizes) > 1 else [segment])
    return [tf.reshape(next(parts[slot.segment]), slot.shape) for slot in slots]
