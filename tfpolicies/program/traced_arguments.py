"""The objects that the code of a policy class gets while it is traced for a Program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfpolicies.base.extensions import EXTENSIONS, describe_import, describe_missing
from tfpolicies.base.type_aliases import Structure
from tfpolicies.errors import ConfigError, MissingColumnError, UsageError, suggest_similar_names
from tfpolicies.models.actor_critic_model import get_user_model
from tfpolicies.models.network import NetworkInputs, NetworkOutputs
from tfpolicies.models.ports import NOISE, SEQ_LENS
from tfpolicies.models.spaces import Leaf, batch_leaves, get_at_path
from tfpolicies.models.wrapped_model import WrappedModel

if TYPE_CHECKING:
    import keras

LOSS_MASK = "loss_mask"
"""Column of 0/1 row weights: a loss that reads it may run on padded minibatches."""


class TracedConfig(Mapping[str, Any]):
    """The config inside a traced function: hyperparameters are tensors, static keys are values.

    Any other key raises an error, since its value would be a constant in code that other policies
    share.

    Attributes:
        static: the static settings.
    """

    def __init__(
        self,
        names: Sequence[str],
        hyperparameters: tf.Tensor | None,
        static: Mapping[str, Any],
        owner: str,
    ) -> None:
        self._tensors = (
            {}
            if hyperparameters is None
            else {name: hyperparameters[i] for i, name in enumerate(names)}
        )
        self.static = static
        self._owner = owner

    def __getitem__(self, key: str) -> Any:
        if key in self._tensors:
            return self._tensors[key]
        if key in self.static:
            return self.static[key]
        keys, owner = [*self._tensors, *self.static], self._owner
        numbers, constants = ", ".join(self._tensors), ", ".join(self.static)
        raise ConfigError(
            f"config[{key!r}] cannot be read in traced code of {owner}: only hyperparameters "
            f"({numbers}) and static keys ({constants}) are shared by its "
            f"policies.{suggest_similar_names(key, keys)} Add the key to {owner}.hyperparameters "
            f"if it is a number that may differ between policies, or to {owner}.static_keys if it "
            "changes code or shapes."
        )

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self.static

    def __len__(self) -> int:
        return len(self._tensors) + len(self.static)


class TrainBatch(dict[str, Any]):
    """The columns of one minibatch as tensors; records which of them were read.

    Attributes:
        accessed_keys: the names of columns that were read.
        ignores_mask: whether the custom loss of a model does not weigh rows by the mask.
        is_weighed: whether the loss read the mask; reads by statistics do not count.
        reads_lengths: whether the loss itself read `seq_lens`, to tell real rows from padding.
    """

    is_training = True

    def __init__(self, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)
        self.accessed_keys: set[str] = set()
        self.ignores_mask = False
        self.is_weighed = False
        self.reads_lengths = False

    def __getitem__(self, key: str) -> Any:
        try:
            value = super().__getitem__(key)
        except KeyError:
            raise MissingColumnError(
                f"The train batch has no column {key!r}; it has {sorted(self)}."
                f"{suggest_similar_names(key, self)} Columns are added by `postprocess_trajectory`."
            ) from None
        self.accessed_keys.add(key)
        self.reads_lengths |= key == SEQ_LENS
        return value

    def get(self, key: str, default: object = None) -> Any:
        """Returns a column, or `default` if there is no such column."""
        return self[key] if key in self else default  # noqa: SIM401


class TracedModel:
    """The `model` argument of `loss`: call it on a batch, then read the values.

    `model(train_batch)` gives `(dist_inputs [N, n], state)`; `model.value_function()` then gives
    the values `[N]` of the same call.

    Args:
        network: a `Network`, or one with other weights.
        time_steps: the steps of each sequence, for recurrent models.
        training: whether layers such as Dropout are in training mode.
    """

    def __init__(self, network: Any, time_steps: tf.Tensor | int, *, training: bool) -> None:
        self._network = network
        self._time_steps = time_steps
        self._training = training
        self._outputs: NetworkOutputs | None = None

    def __call__(
        self,
        batch: Mapping[str, Any],
        state: Sequence[tf.Tensor] | None = None,
        seq_lens: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Runs the model on `batch["obs"]` and its other inputs in the batch.

        A noisy network also reads `noise`; without that column it uses its mean weights.

        Args:
            batch: columns as rows `[N, ...]`.
            state: the recurrent state `[S, ...]`; the batch's `state_in_*` by default.
            seq_lens: int `[S]`; those of the batch by default.
        """
        ports = self._network.ports
        obs = batch["obs"]
        view_arrays = [x for view in ports.views for x in view.flatten(batch[view.name])]
        steps: Any = 1
        if ports.is_recurrent:
            state = state or [batch[port.name] for port in ports.states]
            seq_lens = self._read_lengths(batch) if seq_lens is None else seq_lens
            steps = self._time_steps
        inputs = NetworkInputs(
            [get_at_path(obs, leaf.path) for leaf in ports.obs_leaves],
            view_arrays,
            state or [],
            seq_lens,
            steps,
            batch.get(NOISE) if ports.noise_size else None,
        )
        self._outputs = self._network(inputs, training=self._training)
        if not (isinstance(steps, int) and steps == 1):  # one step has no rows of padding
            self._outputs = _repeat_last_row(self._outputs, seq_lens, steps)
        return self._outputs.dist_inputs, self._outputs.states

    @staticmethod
    def _read_lengths(batch: Mapping[str, Any]) -> tf.Tensor:
        was_read = getattr(batch, "reads_lengths", False)
        lengths = batch[SEQ_LENS]
        if isinstance(batch, TrainBatch):
            batch.reads_lengths = was_read  # since the loss itself did not read them
        return lengths

    def value_function(self) -> tf.Tensor:
        """Returns the values `[B]` of the last call."""
        values = self._require_outputs("value_function").values
        if values is None:
            raise ConfigError(
                "model.value_function(): the model has no value output. Make `wants_value` of the "
                "policy class return True."
            )
        return values

    def raw_outputs(self) -> tf.Tensor:
        """Returns the outputs of the model in the last call, masked: `[B, num_outputs]`.

        The inputs of distributions are computed from them (`ActionDistribution.compute_inputs`).
        """
        return self._require_outputs("raw_outputs").outputs

    def _require_outputs(self, method: str) -> NetworkOutputs:
        if self._outputs is None:
            raise ConfigError(
                f"model.{method}(): the model was not called yet. Call `model(train_batch)` first."
            )
        return self._outputs

    @property
    def trainable_variables(self) -> list[Any]:
        return list(self._network.model.trainable_variables)

    def __getattr__(self, name: str) -> Any:
        """Returns the attribute of the user's model with that name, a layer or a method."""
        if name.startswith("__"):
            raise AttributeError(describe_missing(self, name))
        with contextlib.suppress(LookupError):
            return EXTENSIONS.get_attribute(self, name)
        model = get_user_model(self._network.model)
        try:
            return getattr(model.inner if isinstance(model, WrappedModel) else model, name)
        except AttributeError:
            hint = describe_import(self, name)
            if not hint:
                raise
            message = f"model.{name} is not available here: call the model{hint}"
            raise AttributeError(message) from None


def _repeat_last_row(
    outputs: NetworkOutputs, seq_lens: tf.Tensor, time_steps: tf.Tensor | int
) -> NetworkOutputs:
    """Replaces the outputs for padded rows of `[S, T]` sequences by those for the last valid row.

    No gradient flows back through padded rows.
    """
    steps = tf.range(time_steps)
    last = tf.maximum(tf.cast(seq_lens, tf.int32) - 1, 0)[:, None]  # [S, 1]
    first = time_steps * tf.range(tf.shape(last)[0])[:, None]
    rows = tf.reshape(first + tf.minimum(steps, last), [-1])
    is_valid = tf.reshape(steps <= last, [-1])

    def fill(x: tf.Tensor) -> tf.Tensor:
        mask = is_valid if x.shape.rank == 1 else is_valid[:, None]
        return tf.where(mask, x, tf.stop_gradient(tf.gather(x, rows)))

    raw = fill(outputs.outputs)
    same = outputs.dist_inputs is outputs.outputs
    dist_inputs = raw if same else fill(outputs.dist_inputs)
    values = None if outputs.values is None else fill(outputs.values)
    return outputs._replace(dist_inputs=dist_inputs, outputs=raw, values=values)


@dataclass(frozen=True, eq=False)
class TapeOptimizer:
    """The `optimizer` argument of `compute_gradients_fn` and `apply_gradients_fn`.

    Args:
        tape: on which the loss was computed; None if gradients are given.
        optimizer: a Keras optimizer.
        variables: those for which it was built.
        takes: float32 scalar, 0 if it skips this update; None: it never skips updates.
    """

    tape: tf.GradientTape | None
    optimizer: Any
    variables: list[Any]
    is_active: tf.Tensor | None = None

    def compute_gradients(
        self, loss: tf.Tensor, variables: Sequence[Any] | None = None
    ) -> list[tuple[tf.Tensor | None, Any]]:
        """Returns `(gradient, variable)` pairs; a gradient is None where the loss is constant.

        An optimizer that skips this update gets zeros. If it may skip updates, constant losses also
        give zeros instead of None.

        Raises:
            UsageError: if gradients are given and only applied, so that there is no loss.
            ConfigError: if the loss depends on none of the variables.
        """
        if self.tape is None:
            raise UsageError(
                "Gradients can be computed in `compute_gradients_fn` only: `apply_gradients_fn` is "
                "given them."
            )
        tape, variables = self.tape, self.variables if variables is None else list(variables)
        if self.is_active is None:
            return list(zip(_compute_gradients(tape, loss, variables), variables, strict=True))

        def compute() -> list[tf.Tensor]:
            pairs = zip(_compute_gradients(tape, loss, variables), variables, strict=True)
            return [tf.zeros_like(x) if gradient is None else gradient for gradient, x in pairs]

        def make_zeros() -> list[tf.Tensor]:
            return [tf.zeros_like(variable) for variable in variables]

        return list(zip(tf.cond(self.is_active > 0.0, compute, make_zeros), variables, strict=True))

    def require_gradient(self, loss: tf.Tensor) -> None:
        """Raises a `ConfigError` if a loss depends on none of the variables."""
        if self.tape is not None:
            _compute_gradients(self.tape, loss, self.variables)

    def apply_gradients(self, pairs: Sequence[tuple[tf.Tensor | None, Any]]) -> None:
        """Updates the variables, unless the optimizer skips this update."""
        gradients = order_gradients(pairs, self.variables)

        def apply() -> tf.Tensor:
            apply_optimizer(self.optimizer, gradients, self.variables)
            return tf.constant(0)

        if self.is_active is None:
            apply()
        else:
            tf.cond(self.is_active > 0.0, apply, lambda: tf.constant(0))


def _compute_gradients(
    tape: tf.GradientTape, loss: tf.Tensor, variables: Sequence[Any]
) -> list[Any]:
    """Returns the gradients of a loss, None where it is constant; raises if all are None."""
    gradients: list[Any] = tape.gradient(loss, variables)
    if variables and all(gradient is None for gradient in gradients):
        first = getattr(variables[0], "path", variables[0].name)
        suffix = f" and {len(variables) - 1} more" if len(variables) > 1 else ""
        raise ConfigError(
            "A loss depends on none of the variables that it is differentiated with respect to "
            f"({first!r}{suffix}), so they would never be updated. Compute it with TensorFlow "
            "from the outputs of their network in `loss`: NumPy, `tf.stop_gradient` and integers "
            "have no gradient. To freeze a network, return 0.0 times a loss that depends on it."
        )
    return gradients


def order_gradients(pairs: Sequence[tuple[Any, Any]], variables: Sequence[Any]) -> list[Any]:
    """Returns the gradients of `(gradient, variable)` pairs, in the order of `variables`.

    Missing ones become zeros.
    """
    by_id = {id(variable): gradient for gradient, variable in pairs}
    return [tf.zeros_like(v) if by_id.get(id(v)) is None else by_id[id(v)] for v in variables]


def apply_optimizer(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[Any]
) -> None:
    """Updates variables by a Keras optimizer; all optimizers are called here.

    It leaves the replica context of a distribution strategy: in a replica Keras sums gradients over
    replicas by an operation with a custom gradient, which TensorFlow keeps forever, together with
    the graph of the update.
    """
    replica = tf.distribute.get_replica_context()
    replica.merge_call(lambda strategy: optimizer.apply(gradients, variables))


def nest_rows(space_leaves: Sequence[Leaf], batch: Structure, argument: str) -> Any:
    """Checks a possibly nested column and converts its leaves to the dtypes of Programs."""
    arrays = iter(batch_leaves(space_leaves, batch, argument))
    return _build_tree(batch, space_leaves, arrays)


def _build_tree(batch: Structure, space_leaves: Sequence[Leaf], arrays: Iterator[Any]) -> Any:
    if len(space_leaves) == 1 and not space_leaves[0].path:
        return next(arrays)
    tree: dict[str, Any] = {}
    for leaf in space_leaves:
        node = tree
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = next(arrays)
    return tree
