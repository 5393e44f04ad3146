"""What only code written for RLlib asks for: one hook, which `tfpolicies.compat` fills."""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from tfpolicies.errors import ConfigError

NAMES = frozenset(
    {
        "_create_exploration",
        "as_eager",
        "batch_builder",
        "entropy_coeff",
        "env_id",
        "from_batch",
        "from_dict",
        "get_single_step_input_dict",
        "kl_coeff",
        "last_extra_action_outs_for",
        "last_terminated_for",
        "last_truncated_for",
        "loss_initialized",
        "maybe_initialize_optimizer_and_loss",
        "policy_batches",
        "policy_map",
        "policy_mapping_fn",
        "prev_action_for",
        "prev_reward_for",
        "rnn_state_for",
        "started",
        "to_dict",
        "variables",
        "windowed_memory",
        "with_tracing",
    }
)
"""The names there are of policies, models and episodes."""

OF_ALGORITHMS = frozenset(
    ["_counters", "get_config", "load_checkpoint", "logdir", "save_checkpoint", "step"]
)
"""Those of algorithms."""

OF_CONFIGS = frozenset(
    [
        "get_rollout_fragment_length",
        "is_atari",
        "multiagent",
        "pop",
        "serialize",
        "total_train_batch_size",
    ]
)
"""Those of configs."""

OF_FILTERS = frozenset(["as_serializable", "buffer", "copy", "reset_buffer", "running_stats"])
"""Those of filters."""

OF_WORKER_SETS = frozenset(
    ["add_workers", "fetch_ready_async_reqs", "foreach_worker_async", "is_policy_to_train"]
)
"""Those of sets of workers."""

OF_WORKERS = frozenset(["assert_healthy", "env_context", "env_creator", "last_batch"])
"""Those of workers."""

EVERY = NAMES | OF_ALGORITHMS | OF_CONFIGS | OF_FILTERS | OF_WORKER_SETS | OF_WORKERS
"""All of them."""

MODULES: dict[str, str] = {}
"""The modules that know them, by name; imported on first use."""


def register(module: str) -> None:
    """Has a module asked for what objects of the core do not have.

    Args:
        module: its name. It has `lookup(obj, name)`, which returns what an object has under a name
            of ported code, or raises a `LookupError`; `statistics(view, train_batch)`, which
            returns the statistics by name that a ported loss kept in attributes of a traced view;
            `factory_of(given)`, which returns the factory of the models of a ported class, or what
            it was given; `keras_model(made, observation_space, action_space)`, which returns the
            Keras model that runs a ported one, or what it was given; `prepare_model(policy,
            model)`, which gives a policy's Keras model the attributes that ported code reads; and
            `shown(batch, space)`, a context in which a callback may read the observations of a
            batch as ported code does.
    """
    MODULES[module] = module


def lookup(obj: Any, name: str) -> Any:
    """Returns what ported code finds under a name that an object does not have.

    Raises:
        LookupError: if nobody knows the name.
    """
    for module in map(importlib.import_module, MODULES):
        with contextlib.suppress(LookupError):
            return module.lookup(obj, name)
    raise LookupError(name)


def missing(obj: Any, name: str, message: str, names: Collection[str] = NAMES) -> Any:
    """Does what `lookup` does for a name of ported code.

    Args:
        obj: the object.
        name: of the attribute.
        message: of the error where nobody knows the name.
        names: those that such objects have.

    Raises:
        AttributeError: if nobody knows the name. It says to import `tfpolicies.compat` if that
            has not been done and would help.
    """
    if name in names:
        with contextlib.suppress(LookupError):
            return lookup(obj, name)
        message += hint()
    raise AttributeError(message)


def hint() -> str:
    """Returns what an error about such a name adds while no module knows any."""
    return "" if MODULES else ". Code written for RLlib finds it after `import tfpolicies.compat`"


def factory_of(given: Any) -> Any:
    """Returns the factory of the models of a ported class; or what it was given, if it is none."""
    for module in map(importlib.import_module, MODULES):
        given = module.factory_of(given)
    return given


def keras_model(made: Any, observation_space: Any, action_space: Any) -> Any:
    """Returns the Keras model that runs a ported one; or what it was given, if it is none."""
    for module in map(importlib.import_module, MODULES):
        made = module.keras_model(made, observation_space, action_space)
    return made


def prepare_model(policy: Any, model: Any) -> Any:
    """Returns a policy's Keras model, with what ported code reads of it."""
    for module in map(importlib.import_module, MODULES):
        module.prepare_model(policy, model)
    return model


@contextlib.contextmanager
def shown(batch: Any, space: Any) -> Iterator[None]:
    """Has the observations of a batch read and changed as ported callbacks do meanwhile."""
    with contextlib.ExitStack() as contexts:
        for module in map(importlib.import_module, MODULES):
            contexts.enter_context(module.shown(batch, space))
        yield


class Count(int):
    """A whole number that ported code also reads as the variable that it is elsewhere.

    >>> Count(3), Count(3).numpy()
    (3, 3)
    """

    def numpy(self) -> int:
        """Returns the number."""
        return int(self)


class AskedByPorted(abc.ABCMeta):
    """The class of classes that ported code calls more of than they have."""

    if not TYPE_CHECKING:  # it would let any name pass

        def __getattr__(cls, name: str) -> Any:
            """Asks what only ported code calls."""
            return missing(cls, name, f"type object {cls.__name__!r} has no attribute {name!r}")


def statistics(view: Any, train_batch: Any) -> dict[str, Any]:
    """Returns the statistics that a loss kept in attributes, as RLlib's do.

    Raises:
        ConfigError: if it kept some, and nothing that reads them was imported.
    """
    unread = [name for name in vars(view) if name.startswith("_mean_") and not MODULES]
    if unread:
        raise ConfigError(
            f"{type(view).__name__}.loss keeps {', '.join(unread)} on self, where nothing reads "
            "them. Call self.record(kl=...) for statistics; or import the names for ported code, "
            f"which read RLlib's: import {__name__.partition('.')[0]}.compat."
        )
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, MODULES):
        found |= module.statistics(view, train_batch)
    return found
