"""Makes environments from a config's `env`: a name, an import path, a class or a creator."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import gymnasium as gym
from gymnasium.vector import VectorEnv

from tfpolicies.envs.env_registry import ENVIRONMENTS, EnvSource
from tfpolicies.envs.envpool import get_task, is_envpool_name, make_envpool_environments
from tfpolicies.envs.episode_state import accepts_arguments
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.multi_agent_env import MultiAgentEnv
from tfpolicies.envs.pettingzoo import (
    MPE_MOVED_HINT,
    get_pettingzoo_creator,
    is_pettingzoo,
    is_pettingzoo_name,
    pettingzoo_env,
)
from tfpolicies.envs.third_party import register_namespace
from tfpolicies.envs.vector_adapters import (
    CustomVectorEnv,
    GymVectorEnvAdapter,
    SyncEnvAdapter,
    VectorEnvAdapter,
)
from tfpolicies.errors import ConfigError, EnvError, suggest_similar_names

AnyEnv: TypeAlias = gym.Env | VectorEnv | CustomVectorEnv
_VECTOR_TYPES = (VectorEnv, CustomVectorEnv)


class EnvContext(dict[str, Any]):
    """The `env_config` for an environment's creator, with the place where the environment will run.

    Attributes:
        worker_index: 0 for the worker of this process.
        vector_index: index of the environment within its worker.
        remote: whether the environment runs in one of the `env_processes`.
        num_workers: remote workers of the run.
        recreated_worker: whether its worker replaces one that died.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any],
        worker_index: int = 0,
        vector_index: int = 0,
        remote: bool = False,
        num_workers: int = 0,
        recreated_worker: bool = False,
    ) -> None:
        super().__init__(env_config)
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.num_workers = num_workers
        self.remote = remote
        self.recreated_worker = recreated_worker

    def copy_with_overrides(
        self, env_config: Mapping[str, Any] | None = None, **overrides: int | bool | None
    ) -> EnvContext:
        """Returns the context of another environment.

        Args:
            env_config: its settings, which are copied; None: those of this context.
            **overrides: attributes that differ, such as `vector_index=1`; None: as in this context.

        Raises:
            EnvError: if there is no such attribute.

        >>> other = EnvContext({"a": 1}, worker_index=2).copy_with_overrides(vector_index=3)
        >>> other, other.worker_index, other.vector_index
        ({'a': 1}, 2, 3)
        """
        if unknown := overrides.keys() - vars(self):
            raise EnvError(
                f"An EnvContext has the attributes {sorted(vars(self))}, got {sorted(unknown)}. "
                "Give settings of the environment as `env_config`."
            )
        attributes = {**vars(self), **{name: x for name, x in overrides.items() if x is not None}}
        return EnvContext(self if env_config is None else copy.deepcopy(env_config), **attributes)

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Adds the settings that are missing.

        >>> context = EnvContext({"a": 1})
        >>> context.set_defaults({"a": -1, "b": 2})
        >>> context
        {'a': 1, 'b': 2}
        """
        self.update({key: value for key, value in defaults.items() if key not in self})


OnCreated: TypeAlias = Callable[[Any, EnvContext, int], None]


def make_any_environments(
    source: EnvSource,
    num_envs: int,
    context: EnvContext,
    on_created: OnCreated | None = None,
    *,
    checked: bool = True,
    may_be_none: bool = False,
    sequential: bool = False,
) -> VectorEnvAdapter | MultiAgentEnvAdapter | None:
    """Makes `num_envs` environments with one agent or with several.

    Args:
        source: one of these.

            - A name given by `register_environment`. Its creator is called with the context.
            - A name registered with Gymnasium; its vector implementation is used if it has one.
            - A name of PettingZoo's (`"pettingzoo:classic/tictactoe_v3"`), or a task of EnvPool
              (`"envpool:Pong-v5"`); made with the context's settings.
            - `"package.module:Class"`, an environment class, or a function. The signature decides
              between the context and its settings as keywords (see `called`).
            - An environment instance, if one is enough: no second one can be made of it.

            A creator may return a plain environment, a `MultiAgentEnv` or one of PettingZoo, and is
            then called once for each; or a vector environment (EnvPool included) or a
            `CustomVectorEnv`, which determines the number of environments.
        num_envs: number of environments that are stepped together.
        context: the context of the first one.
        on_created: called with each environment, its context and its index; see `notify_created`.
        checked: whether Gymnasium's checker watches environments made by name.
        may_be_none: whether a creator may return None, for no environment.
        sequential: whether environments of a registered name are stepped one by one, even if the
            name has a vector implementation.

    Returns:
        `MultiAgentEnvAdapter` for environments with several agents, `VectorEnvAdapter` for others;
        None if the creator returned None and may do so.

    Raises:
        EnvError: for an unknown name, if nothing usable is made, or if more than one environment
            is to be made of an instance.
    """
    envs: VectorEnvAdapter | MultiAgentEnvAdapter | None
    registered_creator = ENVIRONMENTS.find(source)
    if is_env_instance(source):
        check_instance_suffices(source, num_envs, context.num_workers, evaluates=False)
        envs = _make_adapter([_convert_pettingzoo(source)])
    elif registered_creator is None and isinstance(source, str) and is_envpool_name(source):
        envs = make_envpool_environments(source, num_envs, context)
    elif registered_creator is None and isinstance(source, str) and not is_import_path(source):
        envs = _make_by_name(source, num_envs, context, checked=checked, sequential=sequential)
    else:
        create = (
            _resolve_creator(source)
            if registered_creator is None
            else _make_context_creator(registered_creator)
        )
        envs = _make_by_creator(create, source, num_envs, context)
    if envs is None and not may_be_none:
        raise _make_unusable_error(source, envs)
    if envs is not None and on_created is not None:
        for i, env in enumerate(envs.get_sub_environments()):
            notify_created(env, i, context, on_created)
    return envs


def notify_created(env: AnyEnv, index: int, context: EnvContext, on_created: OnCreated) -> None:
    """Calls `on_created` for an environment, or for each one of a vector environment.

    A vector environment without a list of its parts is passed in the place of each part.

    Args:
        env: the environment.
        index: of a plain environment.
        context: of the first environment of the worker.
        on_created: called with the environment, its context and its index.
    """
    if not isinstance(env, _VECTOR_TYPES):
        on_created(env, context.copy_with_overrides(vector_index=index), index)
        return
    parts: Sequence[Any] | None = getattr(env, "envs", None)
    if isinstance(env, CustomVectorEnv):
        parts = env.get_sub_environments()
    for i, part in enumerate(parts or [env] * env.num_envs):
        on_created(part, context.copy_with_overrides(vector_index=i), i)


def make_environments(
    source: EnvSource,
    num_envs: int,
    context: EnvContext,
    on_created: OnCreated | None = None,
    *,
    checked: bool = True,
) -> VectorEnvAdapter:
    """Makes environments of one agent; the arguments are those of `make_any_environments`."""
    envs = make_any_environments(source, num_envs, context, on_created, checked=checked)
    if not isinstance(envs, VectorEnvAdapter):
        envs.close()  # type: ignore[union-attr]
        raise EnvError(
            f"{source!r} has several agents, but one policy is to act in it. Configure which "
            "policies act for which agents, or use an environment with one agent."
        )
    return envs


def is_env_instance(source: EnvSource) -> TypeGuard[AnyEnv]:
    """Returns True for an environment instance, of which no second one can be made."""
    if isinstance(source, type):
        return False
    return isinstance(source, (gym.Env, *_VECTOR_TYPES)) or is_pettingzoo(source)


def check_instance_suffices(
    env: AnyEnv, num_envs: int, num_workers: int, *, evaluates: bool, num_processes: int = 0
) -> None:
    """Checks that an environment instance is the only environment needed, and in this process."""
    is_batch = num_envs > 1 and not isinstance(env, _VECTOR_TYPES)
    reasons = {
        f"{num_envs} environments are to be stepped together": is_batch,
        f"{num_workers} remote workers need separate environments": num_workers > 0,
        "evaluation needs separate environments": evaluates,
        f"env_processes={num_processes} makes environments in other processes": bool(num_processes),
    }
    reason_text = next((reason for reason, holds in reasons.items() if holds), None)
    if reason_text is not None:
        raise EnvError(
            f"env is one {type(env).__name__} object, but {reason_text}. Give its class instead, "
            "or a function that makes a new one at each call: lambda env_config: "
            f"{type(env).__name__}(...)."
        )


def check_process_count(num_envs: int, num_processes: int) -> None:
    if num_processes > num_envs:
        raise ConfigError(
            f"env_processes={num_processes} is more than num_envs_per_worker={num_envs}, the "
            "environments that are spread over the processes. Set num_envs_per_worker="
            f"{num_processes} for one environment in each, or fewer processes."
        )


def check_env_name(name: str) -> None:
    """Checks that a name is registered or can be imported, without making an environment.

    Raises:
        EnvError: if it is not.
    """
    if ENVIRONMENTS.find(name) is not None:
        return
    if is_envpool_name(name):
        get_task(name)
    elif is_pettingzoo_name(name):
        get_pettingzoo_creator(name)
    elif is_import_path(name):
        _resolve_creator(name)
    else:
        get_gym_spec(name)


def is_import_path(name: str) -> bool:
    """Returns True if a text names something to import rather than a registered environment.

    >>> is_import_path("my.module:Env"), is_import_path("my.module.Env"), is_import_path("ALE/A.B")
    (True, True, False)
    """
    return ":" in name or ("." in name and "/" not in name and name not in gym.registry)


def _make_by_name(
    name: str, num_envs: int, context: EnvContext, *, checked: bool, sequential: bool
) -> VectorEnvAdapter:
    spec, arguments = get_gym_spec(name), dict(context)

    def make_vector(index: int) -> VectorEnv:
        mode = "vector_entry_point"
        return gym.make_vec(name, num_envs, vectorization_mode=mode, **arguments)

    def make(index: int) -> gym.Env:
        return gym.make(name, disable_env_checker=not checked, **arguments)

    try:
        if spec.vector_entry_point is not None and num_envs > 1 and not sequential:
            vector = None
            with contextlib.suppress(TypeError):  # it may take fewer arguments than the plain one
                vector = make_vector(0)
            if vector is not None:
                return _set_env_factory(make_vector, GymVectorEnvAdapter(vector))
        return _set_env_factory(make, SyncEnvAdapter([make(i) for i in range(num_envs)]))
    except (gym.error.Error, ImportError) as error:  # for example, a package is missing
        raise EnvError(f"The environment {name!r} could not be made: {error}") from error


_EnvsT = TypeVar("_EnvsT", bound="VectorEnvAdapter | MultiAgentEnvAdapter")


def _set_env_factory(make: Callable[[int], Any], envs: _EnvsT) -> _EnvsT:
    """Sets the function that re-creates one of the environments; returns them."""
    envs.env_factory = make
    return envs


def get_gym_spec(name: str) -> gym.envs.registration.EnvSpec:
    """Returns the Gymnasium spec of a registered name."""
    register_namespace(name)
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        registered_names = [*gym.registry, *sorted(ENVIRONMENTS)]
        raise EnvError(
            f"No environment {name!r} is registered with "
            f"Gymnasium.{suggest_similar_names(name, registered_names)} For a custom environment, "
            "give its class or 'package.module:Class', or name it with `register_environment(name, "
            "creator)` first."
        ) from error


def _make_context_creator(create: Callable[..., Any]) -> Callable[[EnvContext], Any]:
    """Returns a registered creator that always takes the context, if it takes an argument."""
    if isinstance(create, type) and not accepts_arguments(create, None):
        return lambda context: create()
    return create


def _resolve_creator(source: EnvSource) -> Callable[[EnvContext], Any]:
    if isinstance(source, str) and is_pettingzoo_name(source):
        create = get_pettingzoo_creator(source)
        return lambda context: create(**context)
    if isinstance(source, str):
        module_name, _, class_name = (
            source.partition(":") if ":" in source else source.rpartition(".")
        )
        try:
            module = importlib.import_module(module_name)
            if class_name in gym.registry and not hasattr(module, class_name):  # as in gym.make
                return lambda context: gym.make(class_name, **context)
            source = getattr(module, class_name)
        except (ImportError, AttributeError, ValueError) as error:
            mpe_hint = MPE_MOVED_HINT if module_name.partition(".")[0] == "mpe" else ""
            raise EnvError(
                f"The environment {source!r} could not be imported: {error}. Check the name, "
                f"and that Python finds the module: PYTHONPATH=FOLDER adds a folder.{mpe_hint}"
            ) from error
    if not callable(source):
        raise EnvError(
            "env must be a registered name, 'package.module:Class', an environment or its class, "
            f"or a function that makes environments, got {source!r}."
        )
    return functools.partial(call_env_factory, source)


def _make_by_creator(
    create: Callable[[EnvContext], Any], source: EnvSource, num_envs: int, context: EnvContext
) -> VectorEnvAdapter | MultiAgentEnvAdapter | None:
    first = create(context)
    if first is None:
        return None
    if not isinstance(first, (gym.Env, *_VECTOR_TYPES)) and not is_pettingzoo(first):
        raise _make_unusable_error(source, first)
    count = 1 if isinstance(first, _VECTOR_TYPES) else num_envs

    def get_context(index: int) -> EnvContext:
        return context.copy_with_overrides(vector_index=context.vector_index + index)

    envs = [first, *(create(get_context(i)) for i in range(1, count))]
    if len({id(env) for env in envs}) < count:
        raise EnvError(
            f"{source!r} returned the same environment twice, but {num_envs} are to be stepped "
            "together. Give a creator that makes a new one at each call."
        )

    def make(index: int) -> Any:
        return _convert_pettingzoo(create(get_context(index)))

    return _set_env_factory(make, _make_adapter([_convert_pettingzoo(env) for env in envs]))


def _make_adapter(envs: Sequence[Any]) -> VectorEnvAdapter | MultiAgentEnvAdapter:
    if isinstance(envs[0], VectorEnv):
        return GymVectorEnvAdapter(envs[0])
    if isinstance(envs[0], CustomVectorEnv):
        return envs[0].make_adapter()
    if isinstance(envs[0], MultiAgentEnv):
        return MultiAgentEnvAdapter(envs)
    return SyncEnvAdapter(envs)


def _convert_pettingzoo(env: AnyEnv) -> Any:
    """Converts an environment of PettingZoo to a `MultiAgentEnv`; returns others as they are."""
    return pettingzoo_env(env) if is_pettingzoo(env) else env


def _make_unusable_error(source: EnvSource, result: object) -> EnvError:
    return EnvError(
        f"{source!r} must give a gymnasium.Env, a gymnasium.vector.VectorEnv, a MultiAgentEnv or a "
        f"PettingZoo environment, but gave {type(result).__name__}. Subclass gymnasium.Env or "
        "MultiAgentEnv, or wrap it."
    )


def takes_no_arguments(create: object) -> bool:
    """Whether an environment creator is a function without parameters."""
    return inspect.isroutine(create) and not inspect.signature(create).parameters


_CONFIG_PARAMETER_NAMES = ("config", "env_config", "context", "env_context")
_CONFIG_ANNOTATION = re.compile(r"(Optional\[)?(\w+\.)*(dict|Dict|(Mutable)?Mapping|\w*Context)\b")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def call_env_factory(create: Callable[..., Any], context: Mapping[str, Any]) -> Any:
    """Calls an environment class or creator with the whole `env_config`, or with its keys.

    The signature decides, in this order:

    1. The first parameter is called `config`, `env_config`, `context` or `env_context`, or is
       annotated as a dict or context: it gets the whole.
    2. The keys are parameters, and none is missing: they are keywords.
    3. One parameter is required, and no key is a parameter: it gets the whole.

    `export/player.py` imports nothing of this package and has a copy of this rule; a test compares
    the two.

    Args:
        create: a class, or a function.
        context: the `env_config`.

    >>> call_env_factory(lambda env_config: env_config["size"], {"size": 4})
    4
    >>> call_env_factory(lambda render_mode=None, size=5: size, {"size": 4})
    4
    """
    try:
        signature = inspect.signature(create)
    except (TypeError, ValueError):  # unknown for some classes written in C
        return create(context)
    parameters = [p for p in signature.parameters.values() if p.kind not in _VARIADIC]
    first = next((p for p in parameters if p.kind in _POSITIONAL), None)
    if first is not None and _takes_whole_config(first):
        return create(context)
    try:
        signature.bind(**context)  # a key that is not a text fits no parameter
    except TypeError as error:
        required = [p for p in parameters if p.default is p.empty]
        names = [p.name for p in parameters]
        if required == [first] and not set(names) & set(context):
            return create(context)
        unknown = next((key for key in context if key not in names), None)
        hint = "" if unknown is None else suggest_similar_names(str(unknown), names)
        raise EnvError(
            f"{getattr(create, '__name__', create)}{signature} cannot be called with env_config="
            f"{dict(context)!r}: {error}.{hint} Give the names of its parameters as keys; or name "
            "its first parameter `env_config`, which then gets the whole dict."
        ) from error
    return create(**context)


def _takes_whole_config(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    is_mapping = any(_CONFIG_ANNOTATION.match(part.strip()) for part in text.split("|"))
    return parameter.name in _CONFIG_PARAMETER_NAMES or is_mapping
