"""Counting the health of a file's tensors while its bytes go by. Pure.

One rule: the bytes come once, in order, in pieces of any length; what is kept is one tensor's counts, a part
of an element, and a bounded list of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.store.formats import Tensor
from ckptfs.store.health import Health, element_bytes, has_health
from ckptfs.store.health_records import (
    MOST_LISTED,
    ContentHealth,
    HealthSum,
    TensorHealth,
    sum_of,
    tensor_health,
)

_ZEROS = bytes(1 << 18)


class HealthRun:
    """Used once, by one thread at a time; `update` frees the GIL while it counts."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors` as in a Layout: in order, none over another. Those of other dtypes are passed over."""
        self._tensors = [one for one in tensors if has_health(one.dtype)]
        self._next = 0
        self._at = 0
        self._health: Health | None = None
        self._part = b""
        self._total = HealthSum()
        self._rows: list[TensorHealth] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to look at."""
        return not self._tensors

    def update(self, payload: bytes | memoryview) -> None:
        """The next bytes of the file."""
        view = memoryview(payload)
        start, self._at = self._at, self._at + len(view)
        while self._next < len(self._tensors):
            tensor = self._tensors[self._next]
            first, last = max(tensor.offset, start), min(tensor.end, self._at)
            if first < last:
                self._add(tensor, view[first - start : last - start])
            if tensor.end > self._at:
                return
            self._end(tensor)

    def update_zeros(self, length: int) -> None:
        """The next `length` bytes, all zero."""
        for at in range(0, length, len(_ZEROS)):
            self.update(memoryview(_ZEROS)[: length - at])

    def finish(self) -> ContentHealth | None:
        """What there was, once all bytes of the file went by; None if it has no float tensor."""
        assert self._next == len(self._tensors), "the whole file went by"
        if not self._total.tensors:
            return None
        self._shorten(MOST_LISTED)
        return ContentHealth(self._total, tuple(self._rows))

    def _add(self, tensor: Tensor, window: memoryview) -> None:
        if self._health is None:
            self._health = Health(tensor.dtype)
        size = element_bytes(tensor.dtype)
        if self._part:
            lacking = size - len(self._part)
            self._part += bytes(window[:lacking])
            window = window[lacking:]
            if len(self._part) < size:
                return
            self._health.add(self._part)
            self._part = b""
        whole = len(window) // size * size
        self._health.add(window[:whole])
        self._part = bytes(window[whole:])

    def _end(self, tensor: Tensor) -> None:
        assert self._health is not None and not self._part, "a layout's tensors are whole elements"
        row = tensor_health(tensor.offset, tensor.length, self._health)
        self._total += sum_of([row])
        self._rows.append(row)
        self._next, self._health = self._next + 1, None
        if len(self._rows) >= 2 * MOST_LISTED:
            self._shorten(MOST_LISTED)

    def _shorten(self, most: int) -> None:
        """Keep those with NaN or infinity, then the first, in the order in which they lie."""
        if len(self._rows) > most:
            kept = sorted(self._rows, key=lambda row: not row.is_bad)[:most]
            self._rows = sorted(kept, key=lambda row: row.offset)
