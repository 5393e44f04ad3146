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

from tfpolicies.envs.envpool import envpool_environments, is_envpool_name, require_task
from tfpolicies.envs.multi_agent_env import MultiAgentEnv
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.packages import register_namespace
from tfpolicies.envs.pettingzoo import (
    MOVED,
    is_pettingzoo,
    is_pettingzoo_name,
    pettingzoo_creator,
    pettingzoo_env,
)
from tfpolicies.envs.registry import ENVIRONMENTS, Source
from tfpolicies.envs.vector import (
    Environments,
    PlainEnvironments,
    SteppedTogether,
    VectorEnvironments,
)
from tfpolicies.errors import ConfigError, EnvError, near_matches

AnyEnv: TypeAlias = gym.Env | VectorEnv | SteppedTogether
_MANY = (VectorEnv, SteppedTogether)


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
        self, env_config: Mapping[str, Any] | None = None, **places: int | bool | None
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
        if unknown := places.keys() - vars(self):
            raise EnvError(
                f"An EnvContext has the attributes {sorted(vars(self))}, got {sorted(unknown)}. "
                "Give settings of the environment as `env_config`."
            )
        kept = {**vars(self), **{name: x for name, x in places.items() if x is not None}}
        return EnvContext(self if env_config is None else copy.deepcopy(env_config), **kept)

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
    source: Source,
    num_envs: int,
    context: EnvContext,
    on_created: OnCreated | None = None,
    *,
    checked: bool = True,
    may_be_none: bool = False,
    each_alone: bool = False,
) -> Environments | MultiAgentEnvironments | None:
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
            `SteppedTogether`, which determines the number of environments.
        num_envs: number of environments that are stepped together.
        context: the context of the first one.
        on_created: called with each environment, its context and its index; see `announce`.
        checked: whether Gymnasium's checker watches environments made by name.
        may_be_none: whether a creator may return None, for no environment.
        sequential: whether environments of a registered name are stepped one by one, even if the
            name has a vector implementation.

    Returns:
        `MultiAgentEnvironments` for environments with several agents, `Environments` for others;
        None if the creator returned None and may do so.

    Raises:
        EnvError: for an unknown name, if nothing usable is made, or if more than one environment
            is to be made of an instance.
    """
    made: Environments | MultiAgentEnvironments | None
    named = ENVIRONMENTS.find(source)
    if is_instance(source):
        require_alone(source, num_envs, context.num_workers, evaluates=False)
        made = _stepped([_of_our_api(source)])
    elif named is None and isinstance(source, str) and is_envpool_name(source):
        made = envpool_environments(source, num_envs, context)
    elif named is None and isinstance(source, str) and not is_import_path(source):
        made = _by_name(source, num_envs, context, checked=checked, each_alone=each_alone)
    else:
        create = _resolved(source) if named is None else _registered_call(named)
        made = _by_creator(create, source, num_envs, context)
    if made is None and not may_be_none:
        raise _unusable(source, made)
    if made is not None and on_created is not None:
        for i, env in enumerate(made.get_sub_environments()):
            announce(env, i, context, on_created)
    return made


def announce(env: AnyEnv, index: int, context: EnvContext, on_created: OnCreated) -> None:
    """Calls `on_created` for an environment, or for each one of a vector environment.

    A vector environment without a list of its parts is passed in the place of each part.

    Args:
        env: the environment.
        index: of a plain environment.
        context: of the first environment of the worker.
        on_created: called with the environment, its context and its index.
    """
    if not isinstance(env, _MANY):
        on_created(env, context.copy_with_overrides(vector_index=index), index)
        return
    parts: Sequence[Any] | None = getattr(env, "envs", None)
    if isinstance(env, SteppedTogether):
        parts = env.get_sub_environments()
    for i, part in enumerate(parts or [env] * env.num_envs):
        on_created(part, context.copy_with_overrides(vector_index=i), i)


def make_environments(
    source: Source,
    num_envs: int,
    context: EnvContext,
    on_created: OnCreated | None = None,
    *,
    checked: bool = True,
) -> Environments:
    """Makes environments of one agent; the arguments are those of `make_any_environments`.

    Raises:
        EnvError: for an unknown name, or if nothing usable is made; also for several agents.
    """
    made = make_any_environments(source, num_envs, context, on_created, checked=checked)
    if not isinstance(made, Environments):
        made.close()  # type: ignore[union-attr]
        raise EnvError(
            f"{source!r} has several agents, but one policy is to act in it. Configure which "
            "policies act for which agents, or use an environment with one agent."
        )
    return made


def is_instance(source: Source) -> TypeGuard[AnyEnv]:
    """Returns True for an environment instance, of which no second one can be made."""
    if isinstance(source, type):
        return False
    return isinstance(source, (gym.Env, *_MANY)) or is_pettingzoo(source)


def require_alone(
    env: AnyEnv, num_envs: int, num_workers: int, *, evaluates: bool, num_processes: int = 0
) -> None:
    """Checks that an environment instance is the only environment needed, and in this process.

    Raises:
        EnvError: if more environments are needed.
    """
    several = num_envs > 1 and not isinstance(env, _MANY)
    reasons = {
        f"{num_envs} environments are to be stepped together": several,
        f"{num_workers} remote workers need separate environments": num_workers > 0,
        "evaluation needs separate environments": evaluates,
        f"env_processes={num_processes} makes environments in other processes": bool(num_processes),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None:
        raise EnvError(
            f"env is one {type(env).__name__} object, but {why}. Give its class instead, or a "
            f"function that makes a new one at each call: lambda env_config: {type(env).__name__}"
            "(...)."
        )


def check_process_count(num_envs: int, num_processes: int) -> None:
    """Checks that each process has an environment.

    Raises:
        ConfigError: if there are more processes than environments.
    """
    if num_processes > num_envs:
        raise ConfigError(
            f"env_processes={num_processes} is more than num_envs_per_worker={num_envs}, the "
            "environments that are spread over the processes. Set num_envs_per_worker="
            f"{num_processes} for one environment in each, or fewer processes."
        )


def check_source(name: str) -> None:
    """Checks that a name is registered or can be imported, without making an environment.

    Raises:
        EnvError: if it is not.
    """
    if ENVIRONMENTS.find(name) is not None:
        return
    if is_envpool_name(name):
        require_task(name)
    elif is_pettingzoo_name(name):
        pettingzoo_creator(name)
    elif is_import_path(name):
        _resolved(name)
    else:
        gym_spec(name)


def is_import_path(name: str) -> bool:
    """Returns True if a text names something to import rather than a registered environment.

    >>> is_import_path("my.module:Env"), is_import_path("my.module.Env"), is_import_path("ALE/A.B")
    (True, True, False)
    """
    return ":" in name or ("." in name and "/" not in name and name not in gym.registry)


def _by_name(
    name: str, num_envs: int, context: EnvContext, *, checked: bool, each_alone: bool
) -> Environments:
    spec, arguments = gym_spec(name), dict(context)

    def make_vector(index: int) -> VectorEnv:
        mode = "vector_entry_point"
        return gym.make_vec(name, num_envs, vectorization_mode=mode, **arguments)

    def make(index: int) -> gym.Env:
        return gym.make(name, disable_env_checker=not checked, **arguments)

    try:
        if spec.vector_entry_point is not None and num_envs > 1 and not each_alone:
            vector = None
            with contextlib.suppress(TypeError):  # it may take fewer arguments than the plain one
                vector = make_vector(0)
            if vector is not None:
                return _made_by(make_vector, VectorEnvironments(vector))
        return _made_by(make, PlainEnvironments([make(i) for i in range(num_envs)]))
    except (gym.error.Error, ImportError) as error:  # for example, a package is missing
        raise EnvError(f"The environment {name!r} could not be made: {error}") from error


_Made = TypeVar("_Made", bound="Environments | MultiAgentEnvironments")


def _made_by(make: Callable[[int], Any], made: _Made) -> _Made:
    """Sets the function that re-creates one of the environments; returns them."""
    made.maker = make
    return made


def gym_spec(name: str) -> gym.envs.registration.EnvSpec:
    """Returns the Gymnasium spec of a registered name.

    Raises:
        EnvError: if the name is not registered; the message lists close matches.
    """
    register_namespace(name)
    try:
        return gym.spec(name)
    except gym.error.Error as error:
        known = [*gym.registry, *sorted(ENVIRONMENTS)]
        raise EnvError(
            f"No environment {name!r} is registered with Gymnasium."
            f"{near_matches(name, known)} For a custom environment, give its class or "
            "'package.module:Class', or name it with `register_environment(name, creator)` first."
        ) from error


def _registered_call(create: Callable[..., Any]) -> Callable[[EnvContext], Any]:
    """Returns a registered creator that always takes the context, if it takes an argument."""
    if isinstance(create, type) and not _takes_an_argument(create):
        return lambda context: create()
    return create


def _resolved(source: Source) -> Callable[[EnvContext], Any]:
    if isinstance(source, str) and is_pettingzoo_name(source):
        create = pettingzoo_creator(source)
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
            moved = MOVED if module_name.partition(".")[0] == "mpe" else ""
            raise EnvError(
                f"The environment {source!r} could not be imported: {error}. Check the name, "
                f"and that Python finds the module: PYTHONPATH=FOLDER adds a folder.{moved}"
            ) from error
    if not callable(source):
        raise EnvError(
            "env must be a registered name, 'package.module:Class', an environment or its class, "
            f"or a function that makes environments, got {source!r}."
        )
    return functools.partial(called, source)


def _by_creator(
    create: Callable[[EnvContext], Any], source: Source, num_envs: int, context: EnvContext
) -> Environments | MultiAgentEnvironments | None:
    first = create(context)
    if first is None:
        return None
    if not isinstance(first, (gym.Env, *_MANY)) and not is_pettingzoo(first):
        raise _unusable(source, first)
    count = 1 if isinstance(first, _MANY) else num_envs

    def get_context(index: int) -> EnvContext:
        return context.copy_with_overrides(vector_index=context.vector_index + index)

    envs = [first, *(create(get_context(i)) for i in range(1, count))]
    if len({id(env) for env in envs}) < count:
        raise EnvError(
            f"{source!r} returned the same environment twice, but {num_envs} are to be stepped "
            "together. Give a creator that makes a new one at each call."
        )

    def make(index: int) -> Any:
        return _of_our_api(create(get_context(index)))

    return _made_by(make, _stepped([_of_our_api(env) for env in envs]))


def _stepped(envs: Sequence[Any]) -> Environments | MultiAgentEnvironments:
    if isinstance(envs[0], VectorEnv):
        return VectorEnvironments(envs[0])
    if isinstance(envs[0], SteppedTogether):
        return envs[0].as_environments()
    if isinstance(envs[0], MultiAgentEnv):
        return MultiAgentEnvironments(envs)
    return PlainEnvironments(envs)


def _of_our_api(env: AnyEnv) -> Any:
    """Converts an environment of PettingZoo to a `MultiAgentEnv`; returns others as they are."""
    return pettingzoo_env(env) if is_pettingzoo(env) else env


def _unusable(source: Source, made: object) -> EnvError:
    return EnvError(
        f"{source!r} must give a gymnasium.Env, a gymnasium.vector.VectorEnv, a MultiAgentEnv or a "
        f"PettingZoo environment, but gave {type(made).__name__}. Subclass gymnasium.Env or "
        "MultiAgentEnv, or wrap it."
    )


def _takes_an_argument(kind: type) -> bool:
    try:
        inspect.signature(kind).bind(None)
    except TypeError:
        return False
    except ValueError:  # Python cannot determine the signature
        return True
    return True


_NAMES = ("config", "env_config", "context", "env_context")
_ANNOTATION = re.compile(r"(Optional\[)?(\w+\.)*(dict|Dict|(Mutable)?Mapping|\w*Context)\b")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def called(create: Callable[..., Any], context: Mapping[str, Any]) -> Any:
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

    Raises:
        EnvError: if none of these holds; it shows the signature.

    >>> called(lambda env_config: env_config["size"], {"size": 4})
    4
    >>> called(lambda render_mode=None, size=5: size, {"size": 4})
    4
    """
    try:
        signature = inspect.signature(create)
    except (TypeError, ValueError):  # unknown for some classes written in C
        return create(context)
    parameters = [p for p in signature.parameters.values() if p.kind not in _ANY_NUMBER]
    first = next((p for p in parameters if p.kind in _POSITIONAL), None)
    if first is not None and _is_for_all(first):
        return create(context)
    try:
        signature.bind(**context)  # a key that is not a text fits no parameter
    except TypeError as error:
        required = [p for p in parameters if p.default is p.empty]
        names = [p.name for p in parameters]
        if required == [first] and not set(names) & set(context):
            return create(context)
        unknown = next((key for key in context if key not in names), None)
        hint = "" if unknown is None else near_matches(str(unknown), names)
        raise EnvError(
            f"{getattr(create, '__name__', create)}{signature} cannot be called with env_config="
            f"{dict(context)!r}: {error}.{hint} Give the names of its parameters as keys; or name "
            "its first parameter `env_config`, which then gets the whole dict."
        ) from error
    return create(**context)


def _is_for_all(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    of_kind = any(_ANNOTATION.match(part.strip()) for part in text.split("|"))
    return parameter.name in _NAMES or of_kind
