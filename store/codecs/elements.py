"""What the values of a chunk are: their width, and how the codecs look at them.

One rule: an element is a number in stored bytes; its meaning never changes, a new one gets a new number.

Source: FORMAT.md, "Encoded chunks".
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from ckptfs.store.codecs.planes_twin import ROTATED, SIGN_MAGNITUDE


class Element(IntEnum):
    """How the bytes of a chunk are divided into values."""

    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    FLOAT8 = 5
    FLOAT16 = 6
    BFLOAT16 = 7
    FLOAT32 = 8
    FLOAT64 = 9


WIDTH: Final[dict[Element, int]] = {
    Element.INT8: 1,
    Element.INT16: 2,
    Element.INT32: 4,
    Element.INT64: 8,
    Element.FLOAT8: 1,
    Element.FLOAT16: 2,
    Element.BFLOAT16: 2,
    Element.FLOAT32: 4,
    Element.FLOAT64: 8,
}
"""Bytes of a value."""

# Rotating float16 makes it worse (1.19 instead of 1.24, measured): its exponent has 5 bits.
PARAMETERS: Final[dict[Element, int]] = {
    Element.INT8: 0,
    Element.INT16: 0,
    Element.INT32: 0,
    Element.INT64: 0,
    Element.FLOAT8: SIGN_MAGNITUDE,
    Element.FLOAT16: SIGN_MAGNITUDE,
    Element.BFLOAT16: SIGN_MAGNITUDE | ROTATED,
    Element.FLOAT32: SIGN_MAGNITUDE | ROTATED,
    Element.FLOAT64: SIGN_MAGNITUDE | ROTATED,
}
"""What the loops over planes are told of an element."""

FRACTION_BITS: Final[dict[Element, int]] = {
    Element.FLOAT16: 10,
    Element.BFLOAT16: 7,
    Element.FLOAT32: 23,
}
"""How many bits lie below the exponent, of the elements that codec 5 knows."""

_OF_DTYPE: Final[dict[str, Element]] = {
    "I8": Element.INT8,
    "U8": Element.INT8,
    "I16": Element.INT16,
    "U16": Element.INT16,
    "I32": Element.INT32,
    "U32": Element.INT32,
    "I64": Element.INT64,
    "U64": Element.INT64,
    "F8_E4M3": Element.FLOAT8,
    "F8_E5M2": Element.FLOAT8,
    "F8_E8M0": Element.FLOAT8,
    "F8_E4M3FNUZ": Element.FLOAT8,
    "F8_E5M2FNUZ": Element.FLOAT8,
    "F16": Element.FLOAT16,
    "BF16": Element.BFLOAT16,
    "F32": Element.FLOAT32,
    "C64": Element.FLOAT32,
    "F64": Element.FLOAT64,
    "C128": Element.FLOAT64,
}


def element_of(dtype: str | None) -> Element | None:
    """The element of a dtype as `store/formats` names it; None where only zstd is worth a try."""
    return _OF_DTYPE.get(dtype) if dtype is not None else None


def is_integer(element: Element) -> bool:
    """Whether its planes are coded with a search for matches: ids and counters repeat, floats do not."""
    return element in (Element.INT16, Element.INT32, Element.INT64)
