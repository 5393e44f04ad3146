"""A sum tree in NumPy: draws leaves in proportion to their values, many in one call.

Schaul et al. 2016 (arXiv:1511.05952, appendix B.2.1). A node has 16 children. The upper levels are
replaced by one array of at most 4096 nodes, which is summed and searched as a whole: a million
leaves are three arrays. Loops run over levels, never over leaves. A node's sum is the running sum
of its children in float64, recomputed when one of them changes: it does not drift, and equal leaves
have equal sums, whatever the order of updates.
"""

from __future__ import annotations

import numpy as np

_WIDTH = 16  # children of a node
_MAX_TOP_NODES = 4096  # nodes that are searched as a whole


class SumTree:
    """The sum and the minimum of non-negative numbers, its leaves; all are 0 initially.

    Args:
        capacity: the number of leaves, at least 1.

    >>> tree = SumTree(4)
    >>> tree.set(np.array([2, 3]), np.array([1.0, 3.0]))
    >>> tree.total, tree.minimum, tree.find(np.array([0.0, 0.99, 1.0, 3.9])).tolist()
    (4.0, 1.0, [2, 2, 3, 3])
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        nodes = -(-capacity // _WIDTH)
        self._sums, self._minima = [np.zeros((nodes, _WIDTH))], []
        while self._sums[-1].size > _MAX_TOP_NODES:
            nodes = -(-nodes // _WIDTH)
            self._sums.append(np.zeros((nodes, _WIDTH)))
            self._minima.append(np.full((nodes, _WIDTH), np.inf))

    @property
    def total(self) -> float:
        return float(self._sums[-1].cumsum()[-1])

    @property
    def minimum(self) -> float:
        """The smallest leaf that is not 0; infinity if all are."""
        top = len(self._sums) - 1
        return float(self._compute_minima(top, np.arange(len(self._sums[top]))).min())

    def __getitem__(self, indices: np.ndarray | slice) -> np.ndarray:
        """Returns the leaves at the indices `indices`, float64."""
        return self._sums[0].reshape(-1)[: self.capacity][indices]

    def set(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        """Sets leaves; for an index that occurs twice, the last value counts.

        Args:
            indices: indices `[B]`, in `[0, capacity)`.
            values: `[B]`, or one for all; finite and not negative.
        """
        self._sums[0].reshape(-1)[indices] = values
        for k, below in enumerate(self._sums[:-1]):
            indices = indices // _WIDTH
            if len(indices) > len(below):
                indices = np.arange(len(below))
            sums = below.take(indices, axis=0).cumsum(axis=1)[:, -1]
            self._sums[k + 1].reshape(-1)[indices] = sums
            self._minima[k].reshape(-1)[indices] = self._compute_minima(k, indices)

    def find(self, masses: np.ndarray) -> np.ndarray:
        """Returns the first leaf up to which the sum is greater than each mass, int64 `[B]`.

        A leaf that is 0 is never found.

        Args:
            masses: `[B]`, in `[0, total)`; `total` must be greater than 0.
        """
        top, rows = self._sums[-1].reshape(-1), np.arange(len(masses))
        ends = top.cumsum()
        masses = np.minimum(masses, np.nextafter(ends[-1], 0.0))  # products are rounded
        nodes = ends.searchsorted(masses, side="right")
        masses = masses - np.where(nodes > 0, ends[nodes - 1], 0.0)
        sums = top[nodes]
        for level in reversed(self._sums[:-1]):
            masses = np.minimum(masses, np.nextafter(sums, 0.0))  # differences are rounded
            ends = level.take(nodes, axis=0).cumsum(axis=1)
            child = (ends <= masses[:, None]).argmin(axis=1)  # the first that is not
            masses = masses - np.where(child > 0, ends[rows, child - 1], 0.0)
            sums = level[nodes, child]
            nodes = nodes * _WIDTH + child
        return nodes

    def _compute_minima(self, level: int, nodes: np.ndarray) -> np.ndarray:
        """Returns the smallest leaf that is not 0 under each of some nodes of a level."""
        if level:
            return self._minima[level - 1].take(nodes, axis=0).min(axis=1)
        leaves = self._sums[0].take(nodes, axis=0)
        return np.where(leaves > 0, leaves, np.inf).min(axis=1)
