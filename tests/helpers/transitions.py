"""Checks of samples of `CountingEnv`: rows are true transitions, and none is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from helpers.environments import CountingEnv

LENGTHS = (4, 1, 6)


def get_places(obs: Any) -> np.ndarray:
    """Returns (number, episode, step) of observations, nested or not, as `[N, 3]` integers."""
    if isinstance(obs, dict):
        return np.stack([obs["where"][0], obs["where"][1][:, 0], obs["step"][:, 0]], 1).astype(int)
    return np.asarray(obs).astype(int)


def split_pieces(batch: Any) -> list[Any]:
    """Cuts the batch where the unroll id changes."""
    cuts = np.flatnonzero(np.diff(batch["unroll_id"])) + 1
    edges = [0, *cuts.tolist(), batch.count]
    return [batch[start:end] for start, end in pairwise(edges)]


class History:
    """The samples of environments together, compared with what the environments did."""

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.lengths = lengths
        self.places: dict[int, list[tuple]] = defaultdict(list)
        self.actions: dict[int, list[int]] = defaultdict(list)
        self.ids: dict[tuple, set[int]] = defaultdict(set)
        self.unrolls: set[int] = set()

    def add(self, batch: Any) -> None:
        """Asserts that each row is a true transition, and that unrolls are new pieces."""
        reached = get_places(batch["new_obs"]).tolist()
        for i, place in enumerate(map(tuple, get_places(batch["obs"]).tolist())):
            number, episode, step = place
            env, action = CountingEnv(number, self.lengths), int(batch["actions"][i])
            last = step + 1 == env.length(episode)
            assert reached[i] == [number, episode, step + 1]
            assert batch["t"][i] == step
            assert batch["rewards"][i] == env.reward(episode, step, action)
            assert batch["terminateds"][i] == (last and not env.truncates(episode))
            assert batch["truncateds"][i] == (last and env.truncates(episode))
            self.places[number].append(place)
            self.actions[number].append(action)
            self.ids[place[:2]].add(int(batch["eps_id"][i]))
        self._add_pieces(split_pieces(batch))

    def _add_pieces(self, pieces: list[Any]) -> None:
        """An unroll is one piece of one episode, complete from cut to cut, and its id is new."""
        for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
            obs = get_places(piece["obs"])
            assert len(np.unique(obs[:, :2], axis=0)) == 1
            assert len(set(piece["eps_id"].tolist())) == 1
            np.testing.assert_array_equal(np.diff(obs[:, 2]), 1)
            assert piece["unroll_id"][0] not in self.unrolls
            self.unrolls.add(int(piece["unroll_id"][0]))
            if following is not None:
                ended = piece["terminateds"][-1] or piece["truncateds"][-1]
                assert ended or get_places(following["obs"])[0, 0] != obs[0, 0]

    def check(self, envs: list[CountingEnv]) -> None:
        """Asserts that the rows of each environment are its first steps, by their order."""
        for env in envs:
            places = self.places[env.number]
            steps = ((e, step) for e in range(len(places)) for step in range(env.length(e)))
            expected = [(env.number, *step) for step, _ in zip(steps, places, strict=False)]
            assert places == expected
            assert self.actions[env.number] == [int(a) for a in env.actions[: len(places)]]
        assert all(len(ids) == 1 for ids in self.ids.values())
        assert len(set().union(*self.ids.values())) == len(self.ids)
