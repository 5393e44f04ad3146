"""The functions of a Program: pure tensor code that every runtime runs.

Acting takes the weights as inputs. Learning uses the *resident* variables of one network and one
Keras optimizer, which a runtime loads before and reads back after. Nothing here knows files,
sessions or policies; a function body runs once per runtime, when it is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ConfigError
from tfpolicies.models.layer_tree import idle_seeds
from tfpolicies.models.network import Network, ports_of, variable_keys
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.models.spaces import nest
from tfpolicies.program.acting_view import ActingView
from tfpolicies.program.devices import CPU, learner_device, placed
from tfpolicies.program.optimizers import FLAG, Optimizers, gradients_of
from tfpolicies.program.own_loss import own_stats, with_own_loss
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.traces import Traces
from tfpolicies.program.view import LOSS_MASK, ModelView, TrainBatch
from tfpolicies.state import UPDATED, Slot, StateLayout

LOSS = "__loss"
"""Among the statistics of an update: the loss, added up where there are several."""


class ActOutputs(NamedTuple):
    """What `act` computes for N rows; `values` is None for models without a value.

    `actions` and `env_actions` have one array per leaf of the action space.
    """

    actions: Any  # each [N, *shape], normalised
    env_actions: Any  # each [N, *shape], as the environment takes them
    logp: Any  # [N] float32
    prob: Any  # [N] float32
    dist_inputs: Any  # [N, n] float32
    values: Any  # [N] float32
    states: Any  # the memory after each sequence, [S, *shape] float32 each
    extras: Any  # what `extra_action_out_fn` adds, by name


class ActInputs(NamedTuple):
    """What `act` takes besides the weights."""

    inputs: Any  # one array per port: observations and previous ones [N, ...], memory [S, ...]
    noise: Any  # [N, noise_size] float32; zeros for the greedy actions
    params: Any  # [P] float32, of the exploration


class Differentiated(NamedTuple):
    """A loss with its gradients."""

    pairs: Any  # a list of (gradient, variable); for several losses, a list of lists
    loss: tf.Tensor  # float32 scalar, added up where there are several
    stats: dict[str, tf.Tensor]
    fetches: dict[str, tf.Tensor]  # what `extra_learn_fetches_fn` adds
    batch: TrainBatch
    optimizer: Any  # a TapeOptimizer; for several losses, a list of them


class ProgramFunctions:
    """The tensor functions of one Program over one resident network.

    Args:
        spec: what the policies of the kind share.
        network: the resident network.
        optimizer: of the network's trainable variables.
        target: the resident target network, of classes that have one.
        device: where learning runs.

    Attributes:
        resident: all variables, in the order of the layout.
        layout: where each of them lies in a state.
        traces: how often each function body ran, by name.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        network: Network,
        optimizer: Optimizers,
        target: Network | None = None,
        device: str = CPU,
    ) -> None:
        self.spec = spec
        self.device = device
        self.network = network
        self.optimizer = optimizer
        self.target = target
        slots = _slots(network, target, optimizer)
        self.resident = list(slots.values())
        self.layout = StateLayout(list(slots), _idle_keys(network))
        limit = spec.static["eager_max_retraces"] if spec.static["eager_tracing"] else None
        self.traces = Traces(limit)

    @classmethod
    def of(cls, spec: ProgramSpec) -> ProgramFunctions:
        """Returns the functions over new variables, in the present eager context or graph."""
        device = learner_device(spec.static["num_gpus"])
        with placed(device):
            network = _network(spec)
            target = _network(spec) if spec.policy_class._wants_target(spec.static) else None
            if target is not None:
                target.filter_variables = network.filter_variables  # what normalises is one
            variables = network.model.trainable_variables
            allowed = spec.static[FLAG]
            optimizer = Optimizers(spec.view().optimizer(), variables, allowed=allowed)
        return cls(spec, network, optimizer, target, device)

    # -- acting -------------------------------------------------------------------------------

    def act(
        self,
        weights: Sequence[tf.Tensor],
        given: ActInputs,
        *,
        seq_lens: tf.Tensor | None = None,
        time_steps: Any = 1,
        explorer: Any = None,
    ) -> ActOutputs:
        """Chooses actions for N rows; zero noise gives the greedy ones.

        Each runtime traces it once, and counts that under a name of its own.

        Args:
            weights: all variables of the network, in order.
            given: the inputs.
            seq_lens: int32 `[S]` the steps of each sequence that count; None for all.
            time_steps: the steps T of each of the S = N / T sequences.
            explorer: turns noise into actions; None for the configured one.
        """
        spec = self.spec
        acting = ActingView(spec, self.network, weights, given.inputs, seq_lens, time_steps)
        view = self._view(None)
        chosen = acting.choose(
            view,
            noise=given.noise,
            params=given.params,
            explorer=spec.explorer if explorer is None else explorer,
        )
        env_actions = spec.pipeline.to_env(chosen.actions)
        values = acting.values() if spec.with_value else None
        extras: dict[str, tf.Tensor] = {}
        if spec.policy_class._overrides("extra_action_out_fn"):
            view.__dict__.update(dist_inputs=chosen.dist_inputs, values=values)
            found = view.extra_action_out_fn()
            extras = {name: tf.convert_to_tensor(x) for name, x in found.items()}
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
            ConfigError: if the class says how actions are sampled, but not from what distribution.
        """
        self.traces.note("log_likelihoods", inputs, actions)
        acting = ActingView(self.spec, self.network, weights, inputs)
        return acting.distribution(self._view(None)).logp(nest(self.spec.action_space, actions))

    # -- learning -----------------------------------------------------------------------------

    def loss_and_gradients(self, hyper: tf.Tensor, columns: Mapping[str, Any]) -> Differentiated:
        """Runs the policy class's loss on one minibatch and differentiates it."""
        view = self._view(hyper)
        batch = TrainBatch(columns)
        model = self._model_view(self.network)
        view.__dict__["_loss_model"] = model
        with tf.GradientTape(persistent=self.optimizer.are_several) as tape:
            loss = self._loss(view, model, batch)
            self.optimizer.check(loss)
            loss = with_own_loss(self.network, loss, batch)
            batch.is_weighed = LOSS_MASK in batch.accessed_keys and not batch.ignores_mask
            if self.network.model.losses:  # the layers' own regularizers
                own = tf.add_n(self.network.model.losses)
                loss = [loss[0] + own, *loss[1:]] if self.optimizer.are_several else loss + own
        optimizer = self.optimizer.on_tape(tape)
        pairs = view.compute_gradients_fn(optimizer, loss)
        stats = {**view.stats_fn(batch), **view.grad_stats_fn(batch, gradients_of(pairs))}
        stats = {name: tf.cast(value, tf.float32) for name, value in stats.items()}
        stats |= own_stats(self.network)
        losses = loss if self.optimizer.are_several else [loss]
        whole = tf.add_n([tf.cast(tf.reduce_sum(each), tf.float32) for each in losses])
        fetches = view.extra_learn_fetches_fn()
        return Differentiated(pairs, whole, stats, fetches, batch, optimizer)

    def _loss(self, view: Any, model: ModelView, batch: TrainBatch) -> Any:
        try:
            return view.loss(model, self.spec.dist_class, batch)
        except tf.errors.OperatorNotAllowedInGraphError as error:
            raise ConfigError(
                f"{self.spec.policy_class.__name__}.loss asks in Python (`if`, `and`, `while`) "
                "what a tensor is, but it is traced once for all policies of the kind, and "
                "hyper-parameters such as self.config['lr'] are tensors in it. Add every term, "
                "times a coefficient that may be 0; or use tf.where."
            ) from error

    def _model_view(self, network: Network, *, training: bool = True) -> ModelView:
        return ModelView(network, self.spec.time_steps, training=training)

    def _view(self, hyper: tf.Tensor | None) -> Any:
        more = {}
        if self.target is not None:
            more["target_model"] = self._model_view(self.target, training=False)
        return self.spec.view(hyper, **more)

    def learn_step(
        self,
        hyper: tf.Tensor,
        columns: Mapping[str, Any],
        weights: tf.Tensor,
        *,
        stat_names: Sequence[str],
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Does one update on one minibatch; runtimes trace it by itself, and count that.

        Args:
            hyper: the hyper-parameters `[H]`.
            columns: the minibatch, `[mb, ...]` each.
            weights: float32 `[mb]`, 0 for items that only fill up.
            stat_names: names of the statistics, in the order of the result.

        Returns:
            The statistics and, behind them, the loss: float32 `[S + 1]`; and the fetches.
        """
        self.optimizer.set_learning_rate(hyper[self.spec.hyperparameters.index("lr")])
        found = self.loss_and_gradients(hyper, self.loss_columns(columns, weights))
        self._view(hyper).apply_gradients_fn(found.optimizer, found.pairs)
        stats = [*(found.stats[name] for name in stat_names), found.loss]
        return tf.stack(stats), dict(found.fetches)

    def learn(
        self,
        hyper: tf.Tensor,
        columns: Mapping[str, Any],
        index: tf.Tensor,
        mask: tf.Tensor,
        piece: tf.Tensor,
        totals: tf.Tensor,
        *,
        step: Callable[..., Any],
        exact_rows: bool,
        fetches: bool,
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Does the minibatch updates of one piece in one loop.

        Args:
            hyper: the hyper-parameters `[H]`.
            columns: the whole batch, `[N, ...]` each; N may be padded. For models with a memory
                its items are sequences, `[S, T, ...]` each, and `[S, ...]` for the memory.
            index: int32 `[K, mb]`, the items of each minibatch of the whole update.
            mask: float32 `[K, mb]`, 0 where a minibatch is shorter than `mb`.
            piece: int32 `[2]`, the first minibatch and the one behind the last, at most K.
            totals: mean, minimum and maximum of each statistic over the minibatches before the
                first, float32 `[3, S + 1]`; see `no_totals`.
            step: `learn_step`, or what runs it.
            exact_rows: gather only the rows of mask 1. For losses that do not read the mask; not
                for XLA, which needs static shapes.
            fetches: do the first minibatch alone, outside of a loop, and return its fetches.

        Returns:
            The totals with the minibatches of the piece among them; the fetches; and what is left
            of the variables, by segment.
        """
        self.traces.note("learn_once" if fetches else "learn_epochs", hyper, columns, index, mask)

        def at(i: Any) -> Any:
            rows, weights = index[i], mask[i]
            if exact_rows:
                rows = tf.boolean_mask(rows, weights > 0)
                weights = tf.ones_like(rows, tf.float32)
            minibatch = tf.nest.map_structure(lambda column: tf.gather(column, rows), columns)
            return step(hyper, minibatch, weights)

        if fetches:
            now, found = at(0)
            return tf.stack([now, now, now]), found, self.left()

        def body(i: tf.Tensor, totals: tuple[tf.Tensor, ...]) -> Any:
            now, _ = at(i)
            mean, low, high = totals
            count = tf.cast(i, tf.float32)  # as many as there were before
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
        self, hyper: tf.Tensor, columns: Mapping[str, Any]
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        """Returns the gradients by trainable variable, loss by loss, and the statistics.

        `LOSS` is among the statistics.
        """
        self.traces.note("gradients", hyper, columns)
        weights = tf.ones([tf.shape(tf.nest.flatten(dict(columns))[0])[0]])
        result = self.loss_and_gradients(hyper, self.loss_columns(columns, weights))
        return self.optimizer.by_variable(result.pairs), {**result.stats, LOSS: result.loss}

    def loss_columns(self, columns: Mapping[str, Any], weights: tf.Tensor) -> dict[str, Any]:
        """Returns a minibatch as rows, as the loss takes it, with its `loss_mask`.

        Args:
            columns: `[mb, ...]` each; sequences `[mb, T, ...]` for models with a memory.
            weights: float32 `[mb]`, 0 for items that only fill up.
        """
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
        self, hyper: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> dict[str, tf.Tensor]:
        """Updates the trainable variables with given gradients; returns what is `left`."""
        self.traces.note("apply_gradients", hyper, gradients)
        self.optimizer.set_learning_rate(hyper[self.spec.hyperparameters.index("lr")])
        self._view(hyper).apply_gradients_fn(*self.optimizer.with_pairs(gradients))
        return self.left()

    # -- moving a state in and out ------------------------------------------------------------

    def load(self, segments: Mapping[str, tf.Tensor]) -> None:
        """Overwrites the resident variables with a state's segments."""
        self.traces.note("load", segments)
        parts = unpack(segments, self.layout.slots)
        for variable, part in zip(self.resident, parts, strict=True):
            variable.assign(part)

    def left(self) -> dict[str, tf.Tensor]:
        """Returns the segments that an update changes, as the resident variables are now."""
        found: dict[str, list[tf.Tensor]] = {name: [] for name in self.layout.segments(*UPDATED)}
        for slot, variable in zip(self.layout.slots, self.resident, strict=True):
            if slot.part in UPDATED:
                found[slot.segment].append(tf.reshape(tf.convert_to_tensor(variable), [-1]))
        return {name: tf.concat(parts, axis=0) for name, parts in found.items()}


def no_totals(stat_names: Sequence[str]) -> np.ndarray:
    """Returns the mean, minimum and maximum over no minibatches yet: float32 `[3, S + 1]`."""
    start = np.array([[0.0], [np.inf], [-np.inf]], np.float32)
    return np.repeat(start, len(stat_names) + 1, axis=1)


def _network(spec: ProgramSpec) -> Network:
    model = spec.source.make(0)
    ports = ports_of(model, spec.observation_space, spec.dist_class)
    return Network(model, ports, spec.dist_class, spec.filtered)


def is_per_sequence(name: str) -> bool:
    """Whether a column has one row per sequence: the memory and the lengths."""
    return name == SEQ_LENS or name.startswith("state_in_")


def unpack(segments: Mapping[str, tf.Tensor], slots: Sequence[Slot]) -> list[tf.Tensor]:
    """Cuts flat segments into the variables of slots, in their order."""
    parts = {}
    for name, segment in segments.items():
        sizes = [math.prod(slot.shape) for slot in slots if slot.segment == name]
        parts[name] = iter(tf.split(segment, sizes) if len(sizes) > 1 else [segment])
    return [tf.reshape(next(parts[slot.segment]), slot.shape) for slot in slots]


def _slots(network: Network, target: Network | None, optimizer: Optimizers) -> dict[Slot, Any]:
    """Returns all variables by what they are in a state, in its order."""
    keys = variable_keys(network.model.variables)
    named = [(key, v, "model") for key, v in zip(keys, network.model.variables, strict=True)]
    for v in network.filter_variables:
        named.append((f"filter/{v.name.partition(':')[0]}", v, "filter"))
    targets = [] if target is None else zip(keys, target.model.variables, strict=True)
    named += [(f"target/{key}", v, "target") for key, v in targets]
    for i, v in enumerate(optimizer.variables):
        role = v.path.rpartition("/")[2]
        if i >= 2:  # a slot of a weight: its name repeats the weight's auto-numbered one
            role = role.rpartition("_")[2]
        named.append((f"optimizer/{i:03d}_{role}", v, "learner"))
    return {Slot(key, tuple(v.shape), _dtype(v), part): v for key, v, part in named}


def _idle_keys(network: Network) -> set[str]:
    """Returns the keys of variables that no layer reads."""
    variables, idle = network.model.variables, idle_seeds(network.model)
    pairs = zip(variable_keys(variables), variables, strict=True)
    keys = [key for key, v in pairs if id(v) in idle]
    return {f"{prefix}{key}" for key in keys for prefix in ("", "target/")}


def _dtype(variable: Any) -> str:
    return str(tf.as_dtype(variable.dtype).name)
