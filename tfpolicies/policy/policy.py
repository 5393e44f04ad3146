"""The abstract policy: NumPy in, NumPy out, no TensorFlow."""

from __future__ import annotations

import abc
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.errors import UsageError
from tfpolicies.models.ports import action_ports
from tfpolicies.models.spaces import action_leaves, batch_leaves, nest
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.session import Session


class ActionBatch(NamedTuple):
    """What acting gives; unpacks as `actions, state_outs, extras`."""

    actions: Any  # [B, *action_shape], normalised; nested for nested action spaces
    state_outs: list[np.ndarray]  # each [B, size]; [] for a policy without memory
    extras: dict[str, np.ndarray]  # each [B, ...]: action_logp, action_prob, vf_preds, ...


class Policy(abc.ABC):
    """Something that chooses actions for observations, and may learn to do it better.

    A hand-written policy implements `compute_actions`; one that learns also `learn_on_batch`,
    `get_weights` and `set_weights`.

    Args:
        observation_space: of the environment, possibly nested.
        action_space: of the environment.
        config: settings, as a dict or an `AlgorithmConfig`.

    >>> class Always(Policy):
    ...     def compute_actions(self, obs_batch, state_batches=None, **kwargs):
    ...         return ActionBatch(np.full(len(obs_batch), 1), [], {})
    >>> space = gym.spaces.Discrete(2)
    >>> policy = Always(gym.spaces.Box(-1, 1, (3,)), space, {})
    >>> int(policy.compute_single_action([0.0, 0.0, 0.0])[0])
    1
    """

    def __init__(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.config = config if isinstance(config, dict) else dict(config)

    # -- acting -------------------------------------------------------------------------------

    @abc.abstractmethod
    def compute_actions(
        self,
        obs_batch: Any,
        state_batches: Sequence[np.ndarray] | None = None,
        prev_action_batch: Any = None,
        prev_reward_batch: Any = None,
        info_batch: Any = None,
        episodes: Any = None,
        explore: bool | None = None,
        timestep: int | None = None,
        **kwargs: Any,
    ) -> ActionBatch:
        """Chooses one action for each row of `obs_batch` `[B, ...]`.

        Args:
            obs_batch: observations, nested as the space is; lists of rows are accepted.
            state_batches: the memory of each row, one array `[B, size]` per state tensor.
            prev_action_batch: the last actions `[B, ...]`, for models that read them.
            prev_reward_batch: the last rewards `[B]`, likewise.
            info_batch: accepted and unused.
            episodes: accepted and unused.
            explore: sample (True) or be greedy (False); None takes `config["explore"]`.
            timestep: the time step for schedules of exploration; None takes the policy's own.
            **kwargs: accepted for ported code and unused.

        Returns:
            The actions, the new memory, and extras such as `action_logp`.
        """

    def compute_actions_from_input_dict(
        self,
        input_dict: Mapping[str, Any],
        explore: bool | None = None,
        timestep: int | None = None,
        episodes: Any = None,
        **kwargs: Any,
    ) -> ActionBatch:
        """Is `compute_actions` for a batch: reads `obs`, `state_in_*`, `prev_*` from it.

        Raises:
            KeyError: if `input_dict` has no `obs`.
        """
        states = sorted(
            (key for key in input_dict if key.startswith("state_in_")),
            key=lambda key: int(key.removeprefix("state_in_")),
        )
        return self.compute_actions(
            input_dict["obs"],
            [input_dict[key] for key in states] or None,
            prev_action_batch=input_dict.get("prev_actions"),
            prev_reward_batch=input_dict.get("prev_rewards"),
            info_batch=input_dict.get("infos"),
            explore=explore,
            timestep=timestep,
            episodes=episodes,
            **kwargs,
        )

    def compute_single_action(
        self,
        obs: Any = None,
        state: Sequence[np.ndarray] | None = None,
        *,
        prev_action: Any = None,
        prev_reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        input_dict: Mapping[str, Any] | None = None,
        episode: Any = None,
        explore: bool | None = None,
        timestep: int | None = None,
        **kwargs: Any,
    ) -> tuple[Any, list[np.ndarray], dict[str, Any]]:
        """Chooses the action for one observation.

        Args:
            obs: one observation, without a batch axis.
            state: the memory, one array `[size]` per state tensor.
            prev_action: the last action.
            prev_reward: the last reward.
            info: the last info.
            input_dict: gives all of these under their column names instead.
            episode: accepted and unused.
            explore: as in `compute_actions`.
            timestep: as in `compute_actions`.
            **kwargs: passed on.

        Returns:
            The action, the new memory and the extras, all without a batch axis.
        """
        if input_dict is None:
            if obs is None:
                raise UsageError("compute_single_action needs obs or input_dict; both are missing.")
            given = {
                "obs": obs,
                "prev_actions": prev_action,
                "prev_rewards": prev_reward,
                "infos": info,
            }
            input_dict = {key: value for key, value in given.items() if value is not None}
            input_dict.update({f"state_in_{i}": part for i, part in enumerate(state or ())})
        batch = {
            key: value if key == "seq_lens" else _with_batch_axis(value)
            for key, value in input_dict.items()
        }
        actions, states, extras = self.compute_actions_from_input_dict(
            batch, explore=explore, timestep=timestep, episodes=[episode], **kwargs
        )
        first = {key: value[0] for key, value in extras.items()}
        return _first_row(actions), [part[0] for part in states], first

    def act_columns(
        self,
        obs: Sequence[np.ndarray],
        previous: Sequence[np.ndarray] = (),
        states: Sequence[np.ndarray] = (),
        *,
        explore: bool | None = None,
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Acts for a sampler, on inputs that are known to fit.

        Args:
            obs: observation leaves `[N, ...]`.
            previous: leaves of the previous actions and the previous rewards, as far as the policy
                reads them.
            states: the memory, `[N, ...]` each.
            explore: sample or be greedy; None takes `config["explore"]`.

        Returns:
            Actions for the environment, and the columns to keep of each row: `actions` (one column
            per leaf), extras, and the new memory `state_out_<i>`. The arrays are valid until the
            next call.
        """
        del previous
        batch = nest(self.observation_space, obs)
        actions, after, extras = self.compute_actions(batch, list(states) or None, explore=explore)
        found = action_leaves(self.action_space)
        ports = action_ports("actions", found)
        parts = batch_leaves(found, actions, "actions")
        columns = {port.name: part for port, part in zip(ports, parts, strict=True)}
        columns |= {f"state_out_{i}": np.asarray(state) for i, state in enumerate(after)}
        return actions, {**columns, **extras}

    def reads_previous(self) -> tuple[bool, bool]:
        """Whether acting reads the previous action, and the previous reward."""
        return False, False

    def session(self, batch_size: int | None = None) -> Session:
        """Returns an object that acts step by step and keeps the memory in between.

        Args:
            batch_size: how many environments act together; None for one, without a batch axis.
        """
        return Session(self, batch_size)

    def env_action(
        self, action: Any, *, unsquash: bool | None = None, clip: bool | None = None
    ) -> Any:
        """Returns one action as the environment takes it; here as it is."""
        del unsquash, clip
        return action

    # -- trajectories -------------------------------------------------------------------------

    def has_own_postprocessing(self) -> bool:
        """Whether `postprocess_trajectory` must be called for each trajectory."""
        return type(self).postprocess_trajectory is not Policy.postprocess_trajectory

    def postprocess_fragments(self, fragments: Fragments) -> None:
        """Adds columns for all trajectories of a sample at once; none by default."""
        del fragments

    def postprocess_trajectory(
        self,
        sample_batch: Any,
        other_agent_batches: Mapping[Any, tuple[str, Policy, Any]] | None = None,
        episode: Any = None,
    ) -> Any:
        """Returns the batch of one trajectory with the columns added that learning needs.

        Args:
            sample_batch: rows of one agent of one episode, in order.
            other_agent_batches: by agent id, `(policy_id, policy, batch)` of the other agents.
            episode: the episode, where there is one.
        """
        del other_agent_batches, episode
        return sample_batch

    # -- learning and weights -----------------------------------------------------------------

    def learn_on_batch(self, samples: Any) -> dict[str, Any]:
        """Does one update; a policy that does not learn returns `{}`."""
        del samples
        return {}

    def get_weights(self) -> Any:
        """Returns copies of the weights; `{}` for a policy without any."""
        return {}

    def set_weights(self, weights: Any) -> None:
        """Overwrites the weights with values as `get_weights` returns them.

        Raises:
            UsageError: if this policy has no weights but some are given.
        """
        if weights:
            raise UsageError(f"{type(self).__name__} has no weights to set; got {len(weights)}.")

    def get_state(self) -> dict[str, Any]:
        """Returns everything that `set_state` restores."""
        return {"weights": self.get_weights()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self.set_weights(state["weights"])

    def on_global_var_update(self, global_vars: Mapping[str, Any]) -> None:
        """Is called when the counters of the whole run change; does nothing here."""
        _ = global_vars["timestep"]

    # -- facts --------------------------------------------------------------------------------

    @property
    def num_grad_updates(self) -> int:
        """Updates done so far; 0 for a policy that does not count them."""
        return 0

    def is_recurrent(self) -> bool:
        """Whether acting needs a memory."""
        return self.num_state_tensors() > 0

    def num_state_tensors(self) -> int:
        """Returns the number of arrays of the memory."""
        return len(self.get_initial_state())

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns the memory at the start of an episode, one array `[size]` per state tensor."""
        return []

    def get_exploration_state(self) -> dict[str, Any]:
        """Returns the state of the exploration; `{}` if it has none."""
        return {}

    def get_session(self) -> Any:
        """Returns the TensorFlow session of a graph-mode policy, None for others."""
        return None

    def close(self) -> None:  # noqa: B027 - most policies hold nothing
        """Gives back what the policy holds outside of Python's memory; here nothing."""

    def get_host(self) -> str:
        """Returns the computer's network name, "" if it has none."""
        return socket.gethostname()

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns `func(self, *args, **kwargs)`."""
        return func(self, *args, **kwargs)

    def __repr__(self) -> str:
        return type(self).__name__


def _with_batch_axis(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_batch_axis(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_with_batch_axis(part) for part in value)
    return np.asarray(value)[None]


def _first_row(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _first_row(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_first_row(part) for part in value)
    return value[0]
