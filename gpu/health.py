"""The health of a tensor: values that are no numbers, that another dtype cannot hold, or that lost precision.

One rule: every count is exact and of the bits as they are; nothing is rounded or converted first but BF16,
which float32 holds exactly.

Source: IEEE 754-2019, sections 3.4 (formats) and 7.4 (what overflows when it is rounded to nearest).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ckptfs.store.difference import is_float, values

# Half way from the largest finite value to the next power of two: from there on nearest is infinity.
_F16_OVERFLOW: Final = 65520.0
_BF16_OVERFLOW: Final = float(np.array([0x7F7F8000], np.uint32).view(np.float32)[0])


@dataclass(slots=True)
class Health:
    """Counts over all windows that were added. Of a complex number both parts count.

    `over_f16` and `over_bf16` are finite values that would become infinite in that dtype; `subnormal` are
    those below the smallest normal number of their own; `largest` is the largest finite magnitude.
    """

    dtype: str
    elements: int = 0
    nan: int = 0
    infinite: int = 0
    subnormal: int = 0
    over_f16: int = 0
    over_bf16: int = 0
    largest: float = 0.0

    def add(self, window: bytes | memoryview) -> None:
        """Add a window of whole elements; `is_float(dtype)`."""
        assert is_float(self.dtype), "only floats have a health"
        elements = values(window, self.dtype)
        self.elements += elements.size
        magnitudes = np.abs(elements)
        # Comparisons with a NaN are false, so each count leaves NaNs out by itself.
        self.nan += int(np.count_nonzero(np.isnan(elements)))
        infinite = int(np.count_nonzero(np.isinf(magnitudes)))
        self.infinite += infinite
        tiny = np.finfo(elements.dtype).tiny
        self.subnormal += int(np.count_nonzero((magnitudes < tiny) & (magnitudes > 0)))
        largest = float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))
        self.largest = max(self.largest, largest)
        # Nearly always the largest is small, and nothing has to be counted.
        if largest >= _F16_OVERFLOW:
            self.over_f16 += int(np.count_nonzero(magnitudes >= _F16_OVERFLOW)) - infinite
        if largest >= _BF16_OVERFLOW:
            self.over_bf16 += int(np.count_nonzero(magnitudes >= _BF16_OVERFLOW)) - infinite

    def facts(self) -> dict[str, int | float]:
        """The counts by the names that they have in JSON."""
        return {
            "nan": self.nan,
            "inf": self.infinite,
            "subnormal": self.subnormal,
            "over_f16": self.over_f16,
            "over_bf16": self.over_bf16,
            "largest": self.largest,
        }
