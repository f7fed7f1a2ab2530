"""The health of a tensor: values that are no numbers, that another dtype cannot hold, or that lost precision.

One rule: every count is exact and of the bits as they are; nothing is converted. Without its sign a float is
an integer of the same order, so comparisons of integers tell NaN, infinite, too large and subnormal apart, in
every dtype alike.

Source: IEEE 754-2019, sections 3.4 (formats) and 7.4 (what overflows when it is rounded to nearest); the OCP
specifications of 8-bit floats and of scales (E8M0); the FNUZ kinds have no -0, and its bits are their NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# What is looked at in one go stays in the processor's cache; a multiple of every element's size.
_WINDOW_BYTES: Final = 1 << 18
_E8M0: Final = "F8_E8M0"
_IN_JSON: Final = {
    "nan": "nan",
    "inf": "infinite",
    "saturated": "saturated",
    "over_f16": "over_f16",
    "over_bf16": "over_bf16",
    "subnormal": "subnormal",
    "zero": "zero",
    "largest": "largest",
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A floating point format. `mask` leaves the sign out, `normal` is the smallest normal magnitude; from
    `beyond` on magnitudes are not finite, and `infinity` is the infinite one of them. From `over_f16` and
    `over_bf16` on those dtypes round to infinity. None: there is no such magnitude."""

    unsigned: str
    mask: int
    normal: int
    bias: int
    beyond: int
    infinity: int | None
    over_f16: int | None = None
    over_bf16: int | None = None
    is_fnuz: bool = False

    def value(self, magnitude: int) -> float:
        """The number that finite bits without a sign stand for."""
        if not self.normal:
            return math.ldexp(1.0, magnitude - self.bias)
        exponent, mantissa = divmod(magnitude, self.normal)
        scale = 1 - self.bias - (self.normal.bit_length() - 1)
        if exponent == 0:
            return math.ldexp(mantissa, scale)
        return math.ldexp(mantissa + self.normal, scale + exponent - 1)


# 65520 lies half way from the largest FP16 to the next power of two, and so does for BF16 the float of which
# the bits are 0x7F7F8000: from there on nearest is infinity.
_F64 = _Kind("<u8", (1 << 63) - 1, 1 << 52, 1023, 0x7FF << 52, 0x7FF << 52, 0x40EFFE << 40, 0x47EFF << 44)
_F32 = _Kind("<u4", 0x7FFFFFFF, 1 << 23, 127, 0x7F800000, 0x7F800000, 0x477FF000, 0x7F7F8000)
_KINDS: Final[dict[str, _Kind]] = {
    "F64": _F64,
    "C128": _F64,
    "F32": _F32,
    "C64": _F32,
    "F16": _Kind("<u2", 0x7FFF, 1 << 10, 15, 0x7C00, 0x7C00),
    "BF16": _Kind("<u2", 0x7FFF, 1 << 7, 127, 0x7F80, 0x7F80, 0x4780),
    "F8_E4M3": _Kind("u1", 0x7F, 1 << 3, 7, 0x7F, None),
    "F8_E5M2": _Kind("u1", 0x7F, 1 << 2, 15, 0x7C, 0x7C),
    "F8_E4M3FNUZ": _Kind("u1", 0x7F, 1 << 3, 8, 0x80, None, is_fnuz=True),
    "F8_E5M2FNUZ": _Kind("u1", 0x7F, 1 << 2, 16, 0x80, None, is_fnuz=True),
    _E8M0: _Kind("u1", 0xFF, 0, 127, 0xFF, None, over_f16=127 + 16),
}
_FNUZ_NAN: Final = 0x80


def has_health(dtype: str) -> bool:
    """Whether values of a dtype (as in formats/layout.py) are looked at here: floats of at least a byte."""
    return dtype in _KINDS


def element_bytes(dtype: str) -> int:
    """The size of what counts as one element of a dtype that `has_health`: of a complex number, a part."""
    return np.dtype(_KINDS[dtype].unsigned).itemsize


@dataclass(slots=True)
class Health:
    """Counts over all windows that were added. Of a complex number both parts count.

    `over_f16` and `over_bf16` are finite values that would become infinite in that dtype, `saturated` those
    of the largest finite magnitude of their own (what a cast that clamps leaves), `subnormal` those below its
    smallest normal number, `zero` those that are 0; `largest` is the largest finite magnitude.
    """

    dtype: str
    elements: int = 0
    nan: int = 0
    infinite: int = 0
    saturated: int = 0
    over_f16: int = 0
    over_bf16: int = 0
    subnormal: int = 0
    zero: int = 0
    largest: float = 0.0

    def add(self, window: bytes | memoryview) -> None:
        """Add a window of whole elements, at any address; `has_health(dtype)`. Any thread; the GIL is
        released while it is counted."""
        kind = _KINDS[self.dtype]
        view = memoryview(window)
        for start in range(0, len(view), _WINDOW_BYTES):
            self._add(kind, np.frombuffer(view[start : start + _WINDOW_BYTES], kind.unsigned))

    def _add(self, kind: _Kind, bits: npt.NDArray[Any]) -> None:
        self.elements += bits.size
        magnitudes = bits & bits.dtype.type(kind.mask)
        # Nearly always all values are ordinary, and these two say so.
        if int(magnitudes.min()) < kind.normal:
            self._add_small(kind, bits, magnitudes)
        largest = int(magnitudes.max())
        if largest >= kind.beyond:
            self._add_not_finite(kind, magnitudes)
            magnitudes = magnitudes[magnitudes < kind.beyond]
            if not magnitudes.size:
                return
            largest = int(magnitudes.max())
        if kind.is_fnuz and largest == 0:
            return  # A NaN looks like 0 here, and is no magnitude.
        self.largest = max(self.largest, kind.value(largest))
        if largest == kind.beyond - 1:
            self.saturated += _count(magnitudes == largest)
        if kind.over_f16 is not None and largest >= kind.over_f16:
            self.over_f16 += _count(magnitudes >= kind.over_f16)
        if kind.over_bf16 is not None and largest >= kind.over_bf16:
            self.over_bf16 += _count(magnitudes >= kind.over_bf16)

    def _add_small(self, kind: _Kind, bits: npt.NDArray[Any], magnitudes: npt.NDArray[Any]) -> None:
        zero = _count(magnitudes == 0)
        self.subnormal += _count(magnitudes < kind.normal) - zero
        nan = _count(bits == _FNUZ_NAN) if kind.is_fnuz else 0
        self.nan += nan
        self.zero += zero - nan

    def _add_not_finite(self, kind: _Kind, magnitudes: npt.NDArray[Any]) -> None:
        infinite = 0 if kind.infinity is None else _count(magnitudes == kind.infinity)
        self.infinite += infinite
        self.nan += _count(magnitudes >= kind.beyond) - infinite

    def facts(self) -> dict[str, int | float]:
        """The counts by the names that they have in JSON."""
        return named_counts(self)


def named_counts(of: object) -> dict[str, int | float]:
    """The counts of one tensor, or of several together, by the names that they have in JSON."""
    return {name: getattr(of, field) for name, field in _IN_JSON.items()}


def _count(chosen: npt.NDArray[Any]) -> int:
    return int(np.count_nonzero(chosen))
