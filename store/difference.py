"""How two byte strings of one dtype differ: in how many bytes and, if they are floats, by how much.

One rule: bits decide whether something differs, values only by how much; so -0.0 and 0.0 differ, by 0,
and a NaN that stayed the same NaN does not.

Differences are taken in float64 between finite values; NaNs and infinities are counted instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# The largest element; a window of a multiple of this holds whole elements of every dtype.
ELEMENT_BYTES = 16
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<f4", "C128": "<f8"}


def is_float(dtype: str) -> bool:
    """Whether values of a dtype (as in formats/layout.py) can be compared as numbers here."""
    return dtype in _FLOATS


@dataclass(slots=True)
class Difference:
    """The sum over all windows that were added; `nan` and `infinite` are counts in the newer one."""

    dtype: str
    changed_bytes: int = 0
    largest: float = 0.0
    nan: int = 0
    infinite: int = 0
    _squares: float = 0.0

    @property
    def l2(self) -> float:
        """The Euclidean length of the difference."""
        return math.sqrt(self._squares)

    def add(self, before: bytes, after: bytes) -> None:
        """Add a window of both: the same number of bytes, whole elements."""
        assert len(before) == len(after), "windows of one length are compared"
        is_equal = before == after
        if not is_equal:
            old, new = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
            self.changed_bytes += int(np.count_nonzero(old != new))
        if not is_float(self.dtype):
            return
        newer = values(after, self.dtype)
        finite = np.isfinite(newer)
        if not finite.all():
            self.nan += int(np.count_nonzero(np.isnan(newer)))
            self.infinite += int(np.count_nonzero(np.isinf(newer)))
        if is_equal:
            return
        older = values(before, self.dtype)
        both = finite & np.isfinite(older)
        gap = np.abs(newer[both].astype(np.float64) - older[both].astype(np.float64))
        if gap.size:
            self.largest = max(self.largest, float(gap.max()))
            self._squares += float(np.dot(gap, gap))


def values(window: bytes | memoryview, dtype: str) -> npt.NDArray[Any]:
    """The elements of a dtype that `is_float`, BF16 as float32; of complex numbers both parts."""
    elements: npt.NDArray[Any] = np.frombuffer(window, _FLOATS[dtype])
    if dtype == "BF16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements
