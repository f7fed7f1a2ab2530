"""A cache bounded by weight, the least recently used going first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Keeps values up to a total weight; the newest stays even if it alone is heavier."""

    __slots__ = ("_limit", "_rows", "_weight")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._weight = 0
        self._rows: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of `key`, or None."""
        row = self._rows.get(key)
        if row is None:
            return None
        self._rows.move_to_end(key)
        return row[0]

    def put(self, key: K, value: V, weight: int) -> None:
        """Keep `value`, which costs `weight`."""
        if key in self._rows:
            self._weight -= self._rows.pop(key)[1]
        self._rows[key] = (value, weight)
        self._weight += weight
        while self._weight > self._limit and len(self._rows) > 1:
            self._weight -= self._rows.popitem(last=False)[1][1]
