"""The functions of a Program: pure tensor code that every runtime runs.

Acting takes the weights as inputs. Learning uses the *resident* variables of one network and one
Keras optimizer, which a runtime loads before and reads back after. Nothing here knows NumPy, files,
sessions or policies; a function body runs once per runtime, when it is traced.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpolicies.models.network import Network
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.view import ConfigView, ModelView, TapeOptimizer, TrainBatch

LOSS_MASK = "loss_mask"
"""Column of 0/1 row weights: a loss that reads it may run on padded minibatches."""


class ActOutputs(NamedTuple):
    """What `act` computes for a batch; `values` is None for models without a value."""

    actions: Any  # [B, *shape], normalised
    env_actions: Any  # [B, *shape], as the environment takes them
    logp: Any  # [B] float32
    prob: Any  # [B] float32
    dist_inputs: Any  # [B, n] float32
    values: Any  # [B] float32


class ProgramFunctions:
    """The tensor functions of one Program over one resident network.

    Args:
        spec: what the policies of the kind share.
        network: the resident network.
        optimizer: the Keras optimizer of the network's trainable variables, built.

    Attributes:
        traces: how often each function body ran, by name.
    """

    def __init__(self, spec: ProgramSpec, network: Network, optimizer: Any) -> None:
        self.spec = spec
        self.network = network
        self.optimizer = optimizer
        self.traces: Counter[str] = Counter()

    # -- acting -------------------------------------------------------------------------------

    def act(
        self, weights: Sequence[tf.Tensor], obs: Sequence[tf.Tensor], noise: tf.Tensor
    ) -> ActOutputs:
        """Chooses actions for observation leaves `[B, ...]`; zero noise gives the greedy ones.

        Each runtime traces it once, and counts that under a name of its own.
        """
        dist_inputs, values = self.network.stateless(weights, obs)
        distribution = self.spec.dist_class(dist_inputs)
        actions = distribution.sample(noise)
        logp = distribution.logp(actions)
        env_actions = self.spec.pipeline.to_env(actions)
        if not self.spec.with_value:
            values = None  # the model may have a value that this policy class does not use
        return ActOutputs(actions, env_actions, logp, tf.exp(logp), dist_inputs, values)

    def log_likelihoods(
        self, weights: Sequence[tf.Tensor], obs: Sequence[tf.Tensor], actions: tf.Tensor
    ) -> tf.Tensor:
        """Returns the log-probability of normalised actions, float32 `[B]`."""
        self.traces["log_likelihoods"] += 1
        dist_inputs, _ = self.network.stateless(weights, obs)
        return self.spec.dist_class(dist_inputs).logp(actions)

    # -- learning -----------------------------------------------------------------------------

    def loss_and_gradients(
        self, hyper: tf.Tensor, columns: Mapping[str, Any]
    ) -> tuple[list[tuple[tf.Tensor, Any]], dict[str, tf.Tensor], TrainBatch, TapeOptimizer]:
        """Runs the policy class's loss on one minibatch and differentiates it."""
        view = self._view(hyper)
        batch = TrainBatch(columns)
        model = ModelView(self.network, self.spec.obs_leaves)
        variables = self.network.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = view.loss(model, self.spec.dist_class, batch)
            if self.network.model.losses:  # the layers' own regularizers
                loss += tf.add_n(self.network.model.losses)
        optimizer = TapeOptimizer(tape, self.optimizer, variables)
        pairs = view.compute_gradients_fn(optimizer, loss)
        stats = {**view.stats_fn(batch), **view.grad_stats_fn(batch, [g for g, _ in pairs])}
        stats = {name: tf.cast(value, tf.float32) for name, value in stats.items()}
        return pairs, stats, batch, optimizer

    def _view(self, hyper: tf.Tensor) -> Any:
        spec = self.spec
        config = ConfigView(
            spec.hyperparameters, hyper, spec.static, owner=spec.policy_class.__name__
        )
        return spec.policy_class.traced_view(
            config=config,
            observation_space=spec.observation_space,
            action_space=spec.action_space,
            dist_class=spec.dist_class,
        )

    def learn_step(self, hyper: tf.Tensor, columns: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        """Does one update on one minibatch; returns its statistics."""
        self.optimizer.learning_rate.assign(hyper[self.spec.hyperparameters.index("lr")])
        pairs, stats, _, optimizer = self.loss_and_gradients(hyper, columns)
        self._view(hyper).apply_gradients_fn(optimizer, pairs)
        return stats

    def learn_epochs(
        self,
        hyper: tf.Tensor,
        columns: Mapping[str, Any],
        index: tf.Tensor,
        mask: tf.Tensor,
        steps: tf.Tensor,
        *,
        stat_names: Sequence[str],
        exact_rows: bool,
    ) -> tf.Tensor:
        """Does `steps` minibatch updates in one loop.

        Args:
            hyper: the hyper-parameters `[H]`.
            columns: the whole batch, `[N, ...]` each; N may be padded.
            index: int32 `[K, mb]`, the rows of each minibatch.
            mask: float32 `[K, mb]`, 0 where a minibatch is shorter than `mb`.
            steps: int32 scalar, at most K; the rest of `index` is padding.
            stat_names: names of the statistics, in the order of the result's columns.
            exact_rows: gather only the rows of mask 1. For losses that do not read the mask; not
                for XLA, which needs static shapes.

        Returns:
            Mean, minimum and maximum of each statistic over the steps, float32 `[3, S]`.
        """
        self.traces["learn_epochs"] += 1

        def body(step: tf.Tensor, totals: tuple[tf.Tensor, ...]) -> Any:
            rows, weights = index[step], mask[step]
            if exact_rows:
                rows = tf.boolean_mask(rows, weights > 0)
                weights = tf.ones_like(rows, tf.float32)
            minibatch = tf.nest.map_structure(lambda column: tf.gather(column, rows), columns)
            minibatch[LOSS_MASK] = weights
            stats = self.learn_step(hyper, minibatch)
            now = tf.stack([stats[name] for name in stat_names])
            mean, low, high = totals
            count = tf.cast(step, tf.float32)
            mean = (mean * count + now) / (count + 1.0)
            return step + 1, (mean, tf.minimum(low, now), tf.maximum(high, now))

        size = [len(stat_names)]
        start = (tf.zeros(size), tf.fill(size, float("inf")), tf.fill(size, float("-inf")))
        _, totals = tf.while_loop(
            lambda step, _: step < steps, body, (tf.constant(0), start), parallel_iterations=1
        )
        return tf.stack(totals)

    def gradients(
        self, hyper: tf.Tensor, columns: Mapping[str, Any]
    ) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        """Returns the gradient of each trainable variable, and the statistics; updates nothing."""
        self.traces["gradients"] += 1
        pairs, stats, _, _ = self.loss_and_gradients(hyper, columns)
        found = {id(variable): gradient for gradient, variable in pairs}
        variables = self.network.model.trainable_variables
        gradients = [found.get(id(variable)) for variable in variables]
        return [
            tf.zeros(v.shape) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(gradients, variables, strict=True)
        ], stats

    def apply_gradients(self, hyper: tf.Tensor, gradients: Sequence[tf.Tensor]) -> None:
        """Updates the trainable variables with given gradients."""
        self.traces["apply_gradients"] += 1
        self.optimizer.learning_rate.assign(hyper[self.spec.hyperparameters.index("lr")])
        self.optimizer.apply(list(gradients), self.network.model.trainable_variables)

    # -- moving a state in and out ------------------------------------------------------------

    def load(self, segments: Mapping[str, tf.Tensor]) -> None:
        """Overwrites the resident variables with a state's segments."""
        self.traces["load"] += 1
        for name, variables in self.variables_by_segment().items():
            shapes = [tuple(variable.shape) for variable in variables]
            (parts,) = unpack([segments[name]], [shapes])
            for variable, part in zip(variables, parts, strict=True):
                variable.assign(part)

    def read(self) -> dict[str, tf.Tensor]:
        """Returns the resident variables as segments."""
        self.traces["read"] += 1
        return {
            name: tf.concat([tf.reshape(_tf_variable(v), [-1]) for v in variables], axis=0)
            for name, variables in self.variables_by_segment().items()
        }

    def variables_by_segment(self) -> dict[str, list[Any]]:
        """Returns the resident variables of each segment, in the layout's order."""
        found: dict[str, list[Any]] = {}
        pairs = zip(self.spec_slots(), self.resident_variables(), strict=True)
        for segment, variable in pairs:
            found.setdefault(segment, []).append(variable)
        return found

    def resident_variables(self) -> list[Any]:
        """Returns all variables of the network, then of the optimizer."""
        return [*self.network.variables, *self.optimizer.variables]

    def spec_slots(self) -> list[str]:
        """Returns the segment of each resident variable."""
        model = [f"model/{_dtype(v)}" for v in self.network.variables]
        return model + [f"learner/{_dtype(v)}" for v in self.optimizer.variables]


def unpack(
    segments: Sequence[tf.Tensor], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[tf.Tensor]]:
    """Cuts each flat segment into variables of the given shapes."""
    found = []
    for segment, inner in zip(segments, shapes, strict=True):
        sizes = [math.prod(shape) for shape in inner]
        parts = tf.split(segment, sizes) if len(sizes) > 1 else [segment]
        found.append([tf.reshape(x, shape) for x, shape in zip(parts, inner, strict=True)])
    return found


def _dtype(variable: Any) -> str:
    return str(tf.as_dtype(variable.dtype).name)


def _tf_variable(variable: Any) -> Any:
    return variable.value if hasattr(variable, "value") else variable
