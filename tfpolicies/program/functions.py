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
from tfpolicies.models.custom_model import get_input_ports
from tfpolicies.models.network import Network
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.models.spaces import unflatten
from tfpolicies.program.custom_loss import add_custom_loss, compute_custom_metrics
from tfpolicies.program.devices import CPU, choose_learner_device, device_scope, gather_rows
from tfpolicies.program.frozen_values import warn_of_frozen_draws, warn_of_frozen_numbers
from tfpolicies.program.minibatches import StepInputs, is_input
from tfpolicies.program.networks import (
    NetworkHandle,
    ResidentNetwork,
    collect_slots,
    make_layout,
    update_targets,
)
from tfpolicies.program.optimizers import Optimizers, strip_variables
from tfpolicies.program.policy_state import Slot
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.traced_acting import TracedActing
from tfpolicies.program.traced_arguments import LOSS_MASK, TracedModel, TrainBatch
from tfpolicies.program.traced_context import CalledModel, TracedContext
from tfpolicies.program.traces import TraceCounts

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


class LossGradients(NamedTuple):
    """A loss with its gradients."""

    pairs: Any  # a list of (gradient, variable); for several losses, a list of lists
    loss: tf.Tensor  # float32 scalar, the sum if there are several
    stats: dict[str, tf.Tensor]
    fetches: dict[str, tf.Tensor]  # the results of `extra_learn_fetches_fn`
    batch: TrainBatch
    last_step: tuple[
        Any, Any
    ]  # the arguments of `apply_gradients_fn` for the step that is left to do


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
    optimizers: Optimizers
    device: str = CPU

    def __post_init__(self) -> None:
        spec = self.spec
        slots = collect_slots(
            self.networks, self.network.filter_variables, self.optimizers.variables
        )
        self.resident = list(slots.values())
        self.layout = make_layout(self.networks, list(slots))
        sees_images = any(len(slot.shape) > 3 for slot in self.layout.acting_slots)
        self.acting_device = self.device if sees_images else CPU
        limit = spec.static["eager_max_retraces"] if spec.static["eager_tracing"] else None
        self.traces = TraceCounts(limit)

    @classmethod
    def build(cls, spec: ProgramSpec) -> ProgramFunctions:
        """Returns the functions over new variables, in the current eager context or graph."""
        device = choose_learner_device(spec.static["num_gpus"])
        with device_scope(device):
            network = _build_network(spec)
            networks = {}
            for name, plan in spec.networks.items():
                make = plan.make or spec.source.make
                model = network.model if plan.make is None else make()
                networks[name] = ResidentNetwork(plan, model, make() if plan.target else None)
            optimizer = Optimizers(spec.make_traced_self().optimizer, networks)
        return cls(spec, network, networks, optimizer, device)

    # -- acting -------------------------------------------------------------------------------

    def act(
        self,
        weights: Sequence[tf.Tensor],
        act_inputs: ActInputs,
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
        model_call = TracedActing(
            spec, self.network, weights, act_inputs.inputs, seq_lens, time_steps
        )
        traced_self = spec.make_traced_self()
        with warn_of_frozen_draws(f"acting of {spec.policy_class.__name__}"):
            sample = model_call.sample_actions(
                traced_self,
                noise=act_inputs.noise,
                params=act_inputs.params,
                explorer=spec.explorer if explorer is None else explorer,
            )
        env_actions = spec.action_mapping.to_env(
            sample.actions, cast=tf.cast, clip=tf.clip_by_value
        )
        values = model_call.values() if spec.has_values else None
        extras: dict[str, tf.Tensor] = {}
        if spec.policy_class._overrides("extra_action_out_fn"):
            model = CalledModel(spec.policy_class.__name__, sample.dist_inputs, values)
            context: TracedContext = traced_self._context
            context.model, context.dist_inputs, context.values = model, sample.dist_inputs, values
            result = {**traced_self.extra_action_out_fn()}
            if values is not None:
                result.pop(SampleBatch.VF_PREDS, None)  # values are an output anyway
            extras = {name: tf.convert_to_tensor(x) for name, x in result.items()}
        logp, states = sample.logp, sample.states
        prob = tf.exp(logp)
        return ActOutputs(
            sample.actions, env_actions, logp, prob, sample.dist_inputs, values, states, extras
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
        self.traces.record("log_likelihoods", inputs, actions)
        model_call = TracedActing(self.spec, self.network, weights, inputs)
        return model_call.logp(
            self.spec.make_traced_self(), unflatten(self.spec.action_space, actions)
        )

    # -- learning -----------------------------------------------------------------------------

    def compute_gradients(
        self,
        traced_self: Any,
        columns: Mapping[str, Any],
        active: tf.Tensor | None = None,
        *,
        in_turn: bool = False,
    ) -> LossGradients:
        """Runs the policy class's loss on one minibatch and differentiates it.

        Args:
            traced_self: the `self` of the class's code; see `make_loss_self`.
            columns: the minibatch as rows.
            active: for each optimizer, whether it applies the update; None: all do.
            in_turn: whether the optimizers of losses that are tensors step before losses that are
                functions are called; otherwise no optimizer steps.
        """
        batch = TrainBatch(columns)
        model = TracedModel(self.network, self.spec.max_seq_len, training=True)
        traced_self._context.model = model
        tape = tf.GradientTape(persistent=True)  # several losses, and a check of each
        with tape:
            loss = add_custom_loss(self.network, self._run_loss(traced_self, model, batch), batch)
        losses, list_or_single = self.optimizers.match_losses(loss), self.optimizers.list_or_single
        optimizers = self.optimizers.make_tape_optimizers(tape, active)
        parts = _split_losses(losses)
        steps: list[tuple[Any, Any]] = []  # the arguments of `apply_gradients_fn` for each part
        for part in parts:
            if steps and in_turn:
                traced_self.apply_gradients_fn(*steps[-1])
            for i in part:
                with tape:
                    losses[i] = self._evaluate(losses[i])
                    regularized = self._add_regularization(i, losses[i])
                if regularized is not losses[i]:  # its gradient would hide that the loss has none
                    optimizers[i].require_gradient(losses[i])
                losses[i] = regularized
            hook_optimizers = list_or_single([optimizers[i] for i in part])
            pairs = traced_self.compute_gradients_fn(
                hook_optimizers, list_or_single([losses[i] for i in part])
            )
            steps.append((hook_optimizers, pairs))
        batch.is_weighed = LOSS_MASK in batch.accessed_keys and not batch.ignores_mask
        reported = losses if isinstance(loss, list | tuple) else losses[:1]
        total = tf.add_n([tf.cast(tf.reduce_sum(part_loss), tf.float32) for part_loss in reported])
        all_pairs = _restore_order(parts, [pairs for _, pairs in steps])
        stats = {
            **traced_self.stats_fn(batch),
            **traced_self.grad_stats_fn(batch, strip_variables(all_pairs)),
        }
        stats = {name: tf.cast(value, tf.float32) for name, value in stats.items()}
        stats |= compute_custom_metrics(self.network)
        fetches = traced_self.extra_learn_fetches_fn()
        return LossGradients(all_pairs, total, stats, fetches, batch, steps[-1])

    def differentiate_minibatch(
        self,
        hyperparameters: tf.Tensor,
        columns: Mapping[str, Any],
        inputs: StepInputs,
        *,
        in_turn: bool = False,
    ) -> LossGradients:
        """Differentiates the loss of one minibatch without padding, whose inputs are `[1, ...]`.

        With `in_turn`, optimizers step as in an update; see `compute_gradients`.
        """
        weights = tf.ones([tf.shape(tf.nest.flatten(dict(columns))[0])[0]])
        rows, step_inputs = self.make_loss_columns(columns, weights), inputs.at(0)
        if not in_turn:
            return self.compute_gradients(self.make_loss_self(hyperparameters, step_inputs), rows)
        traced_self, active = (
            self._begin_update(hyperparameters, step_inputs),
            self._active_optimizers(step_inputs),
        )
        return self.compute_gradients(traced_self, rows, active, in_turn=True)

    def _run_loss(self, traced_self: Any, model: TracedModel, batch: TrainBatch) -> Any:
        """Returns one scalar, or a list of scalars and of functions that return one."""
        noise = getattr(traced_self._context, "learning_noise", None)
        dist_class = self.spec.dist_class.with_loss_noise(noise)
        cls, before = self.spec.policy_class, dict(vars(traced_self))
        with warn_of_frozen_draws(f"{cls.__name__}.loss", cls.loss):
            result = self._run_user_code(lambda: traced_self.loss(model, dist_class, batch))
        warn_of_frozen_numbers(f"{cls.__name__}.loss", before, vars(traced_self))
        is_list = isinstance(result, list | tuple)
        losses = [
            x if callable(x) else self._to_scalar(x) for x in (result if is_list else [result])
        ]
        return losses if is_list else self._evaluate(losses[0])

    def _evaluate(self, loss: tf.Tensor | Callable[[], tf.Tensor]) -> tf.Tensor:
        return self._to_scalar(self._run_user_code(loss)) if callable(loss) else loss

    def _run_user_code(self, code: Callable[[], Any]) -> Any:
        """Runs code of the class; explains errors about values of tensors, unknown in a trace."""
        try:
            return code()
        except tf.errors.OperatorNotAllowedInGraphError as error:
            raise ConfigError(
                f"{self.spec.policy_class.__name__}.loss uses the value of a tensor in Python "
                "(`if`, `and`, `while`), but it is traced once for all policies of its class, and "
                "hyperparameters such as self.config['lr'] are tensors in it. Add every term, "
                "times a coefficient that may be 0; or use tf.where."
            ) from error

    def _to_scalar(self, loss: tf.Tensor) -> tf.Tensor:
        if tf.is_tensor(loss) and loss.dtype.is_floating and loss.shape.num_elements() in (1, None):
            return tf.reshape(loss, [])
        description = f"a tensor of shape {loss.shape}" if tf.is_tensor(loss) else repr(loss)[:80]
        raise ConfigError(
            f"{self.spec.policy_class.__name__}.loss must return a scalar tensor, or a list of "
            f"them if it has several networks or optimizers; got {description}. Return a mean over "
            'the rows, such as masked_mean(x, train_batch["loss_mask"]), computed by TensorFlow.'
        )

    def _add_regularization(self, i: int, loss: tf.Tensor) -> tf.Tensor:
        """Adds the losses of a network's layers to loss `i` if it is the first of the network."""
        names = self.optimizers.network_names
        penalties = [] if names[i] in names[:i] else list(self.networks[names[i]].model.losses)
        return loss + tf.add_n(penalties) if penalties else loss

    def make_loss_self(self, hyperparameters: tf.Tensor, inputs: StepInputs) -> Any:
        """Returns the `self` of the class's code in one update."""
        result = self.spec.make_traced_self(hyperparameters)
        context: TracedContext = result._context
        context.networks, context.target_networks = {}, {}
        for name, network in self.networks.items():
            if network.plan.make is not None:
                context.networks[name] = NetworkHandle(network.model, self.network, training=True)
                if network.target is not None:
                    view = NetworkHandle(network.target, self.network, training=False)
                    context.target_networks[name] = view
            elif network.target is not None:
                target = self.network.with_model(network.target)
                context.target_model = TracedModel(target, self.spec.max_seq_len, training=False)
        if is_input(inputs.noise):
            context.learning_noise = tf.reshape(inputs.noise, [-1, self.spec.noise_size])
        if is_input(inputs.update_noise):
            context.update_noise = inputs.update_noise
        return result

    def learn_step(
        self,
        hyperparameters: tf.Tensor,
        columns: Mapping[str, Any],
        weights: tf.Tensor,
        inputs: StepInputs,
        *,
        stat_names: Sequence[str],
        clips_gradients: bool,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Runs one update on one minibatch; runtimes trace it separately, and count that.

        Args:
            hyperparameters: the hyperparameters `[H]`.
            columns: the minibatch, `[mb, ...]` each.
            weights: float32 `[mb]`, 0 for padding.
            inputs: the other inputs of the minibatch.
            stat_names: names of the statistics, in the order of the result.
            clips_gradients: whether gradients are limited; see `ProgramSpec.clips_gradients`.

        Returns:
            The statistics, followed by the loss: float32 `[S + 1]`; and the fetches.
        """
        traced_self = self._begin_update(
            hyperparameters if clips_gradients else self.spec.disable_clipping(hyperparameters),
            inputs,
        )
        rows = self.make_loss_columns(columns, weights)
        active = self._active_optimizers(inputs)
        gradients = self.compute_gradients(traced_self, rows, active, in_turn=True)
        traced_self.apply_gradients_fn(*gradients.last_step)
        if is_input(inputs.update_targets):
            update_targets(self.networks, inputs.update_targets * traced_self.config["tau"])
        stats = [*(gradients.stats[name] for name in stat_names), gradients.loss]
        return tf.stack(stats), dict(gradients.fetches)

    def _active_optimizers(self, inputs: StepInputs) -> list[tf.Tensor] | None:
        active = inputs.active_optimizers
        return tf.unstack(active, len(self.optimizers)) if is_input(active) else None

    def _begin_update(self, hyperparameters: tf.Tensor, inputs: StepInputs) -> Any:
        """Sets the learning rates; returns the `self` of the update."""
        traced_self = self.make_loss_self(hyperparameters, inputs)
        self.optimizers.set_learning_rates(traced_self.config)
        return traced_self

    def learn(
        self,
        hyperparameters: tf.Tensor,
        columns: Mapping[str, Any],
        index: tf.Tensor,
        mask: tf.Tensor,
        inputs: StepInputs,
        chunk: tf.Tensor,
        totals: tf.Tensor,
        *,
        step: Callable[..., Any],
        exact_rows: bool,
        fetches: bool,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Runs the minibatch updates of one chunk in one loop.

        Args:
            hyperparameters: the hyperparameters `[H]`.
            columns: the whole batch, `[N, ...]` each; N may be padded. For recurrent models its
                items are sequences, `[S, T, ...]` each, and `[S, ...]` for the recurrent state.
            index: int32 `[K, mb]`, the items of each minibatch of the whole update.
            mask: float32 `[K, mb]`, 0 where a minibatch is shorter than `mb`.
            inputs: the other inputs of each minibatch, `[K, ...]`.
            chunk: int32 `[2]`, the first minibatch and the end (exclusive), at most K.
            totals: mean, minimum and maximum of each statistic over the minibatches before the
                first, float32 `[3, S + 1]`; see `make_initial_totals`.
            step: `learn_step`, or a compiled version of it.
            exact_rows: gather only the rows of mask 1. For losses that do not read the mask; not
                for XLA, which needs static shapes.
            fetches: run only the first minibatch, outside of a loop, and return its fetches.

        Returns:
            The totals including the minibatches of the chunk; the fetches; and the new variables,
                by
            buffer.
        """
        self.traces.record(
            "learn_once" if fetches else "learn_epochs", hyperparameters, columns, index, mask
        )

        def run_minibatch(i: tf.Tensor) -> Any:
            rows, weights, now = index[i], mask[i], inputs.at(i)
            if exact_rows:
                if is_input(now.noise):
                    now = now._replace(noise=tf.boolean_mask(now.noise, weights > 0))
                rows = tf.boolean_mask(rows, weights > 0)
                weights = tf.ones_like(rows, tf.float32)
            minibatch = tf.nest.map_structure(lambda x: gather_rows(x, rows, self.device), columns)
            return step(hyperparameters, minibatch, weights, now)

        if fetches:
            step_inputs, fetched = run_minibatch(0)
            return tf.stack([step_inputs, step_inputs, step_inputs]), fetched, self.pack_buffers()

        def body(i: tf.Tensor, totals: tuple[tf.Tensor, ...]) -> Any:
            stats, _ = run_minibatch(i)
            mean, low, high = totals
            count = tf.cast(i, tf.float32)  # the number of minibatches before this one
            mean = (mean * count + stats) / (count + 1.0)
            return i + 1, (mean, tf.minimum(low, stats), tf.maximum(high, stats))

        _, reduced = tf.while_loop(
            lambda i, _: i < chunk[1],
            body,
            (chunk[0], tuple(tf.unstack(totals))),
            parallel_iterations=1,
        )
        return tf.stack(reduced), {}, self.pack_buffers()

    def compute_minibatch_gradients(
        self, hyperparameters: tf.Tensor, columns: Mapping[str, Any], inputs: StepInputs
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Returns the gradients by trainable variable, loss by loss, the statistics and fetches.

        `LOSS` is among the statistics. The `inputs` are those of one minibatch, `[1, ...]`.
        """
        self.traces.record("gradients", hyperparameters, columns)
        result = self.differentiate_minibatch(hyperparameters, columns, inputs)
        stats = {**result.stats, LOSS: result.loss}
        return self.optimizers.order_gradients(result.pairs), stats, dict(result.fetches)

    def make_loss_columns(self, columns: Mapping[str, Any], weights: tf.Tensor) -> dict[str, Any]:
        """Returns a minibatch of rows or sequences as rows for the loss, with its `loss_mask`."""
        if not self.network.ports.is_recurrent:
            return {**columns, LOSS_MASK: weights}
        steps = self.spec.max_seq_len

        def fold(column: tf.Tensor) -> tf.Tensor:
            return tf.reshape(column, [-1, *column.shape[2:]])

        loss_columns = {
            name: column if is_per_sequence(name) else tf.nest.map_structure(fold, column)
            for name, column in columns.items()
        }
        valid = tf.sequence_mask(columns[SEQ_LENS], steps, tf.float32)
        loss_columns[LOSS_MASK] = tf.reshape(valid * weights[:, None], [-1])
        return loss_columns

    def apply_gradients(
        self, hyperparameters: tf.Tensor, gradients: Sequence[tf.Tensor], inputs: StepInputs
    ) -> dict[str, tf.Tensor]:
        """Updates the trainable variables with gradients; returns the new variables by buffer."""
        self.traces.record("apply_gradients", hyperparameters, gradients)
        step_inputs = inputs.at(0)
        arguments = self.optimizers.make_apply_arguments(
            gradients, self._active_optimizers(step_inputs)
        )
        self._begin_update(hyperparameters, step_inputs).apply_gradients_fn(*arguments)
        return self.pack_buffers()

    # -- moving a state in and out ------------------------------------------------------------

    def load(self, segments: Mapping[str, tf.Tensor]) -> None:
        """Overwrites the resident variables with a state's segments."""
        self.traces.record("load", segments)
        parts = split_segments(segments, self.layout.slots)
        for variable, part in zip(self.resident, parts, strict=True):
            variable.assign(part)

    def pack_buffers(self) -> dict[str, tf.Tensor]:
        """Returns the current resident variables as the buffers of the layout."""
        slots, buffers = zip(self.layout.slots, self.resident, strict=True), {}
        tensors = {slot.key: tf.convert_to_tensor(variable) for slot, variable in slots}
        for name, buffer_slots in self.layout.buffers.items():
            parts = [tf.reshape(tensors[slot.key], [-1]) for slot in buffer_slots]
            buffers[name] = tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]
        return buffers


def _split_losses(losses: Sequence[Any]) -> list[list[int]]:
    """Returns the indices of losses that are differentiated together: tensors, then functions."""
    late = [i for i, loss in enumerate(losses) if callable(loss)]
    early = [i for i in range(len(losses)) if i not in late]
    return [part for part in (early, late) if part]


def _restore_order(parts: Sequence[Sequence[int]], pairs: Sequence[Any]) -> Any:
    """Returns the pairs of all losses in the order of the losses, as hooks return them."""
    if len(parts) == 1:
        return pairs[0]
    by_loss = dict(zip(chain(*parts), chain(*pairs), strict=True))
    return [by_loss[i] for i in sorted(by_loss)]


def make_initial_totals(stat_names: Sequence[str]) -> np.ndarray:
    """Returns the mean, minimum and maximum over no minibatches: float32 `[3, S + 1]`."""
    initial = np.array([[0.0], [np.inf], [-np.inf]], np.float32)
    return np.repeat(initial, len(stat_names) + 1, axis=1)


def _build_network(spec: ProgramSpec) -> Network:
    model = spec.source.make()
    ports = get_input_ports(model, spec.observation_space, spec.dist_class)
    ports = replace(ports, noise_size=spec.source.noise_size)
    return Network(model, ports, spec.dist_class, spec.indices_of_filtered_leaves)


def is_per_sequence(name: str) -> bool:
    """Returns whether a column has one row per sequence: the recurrent state and the lengths."""
    return name == SEQ_LENS or name.startswith("state_in_")


def split_segments(segments: Mapping[str, tf.Tensor], slots: Sequence[Slot]) -> list[tf.Tensor]:
    """Splits flat segments into the variables of slots, in their order."""
    parts = {}
    for name, segment in segments.items():
        sizes = [math.prod(slot.shape) for slot in slots if slot.segment == name]
        parts[name] = iter(tf.split(segment, sizes) if len(sizes) > 1 else [segment])
    return [tf.reshape(next(parts[slot.segment]), slot.shape) for slot in slots]
