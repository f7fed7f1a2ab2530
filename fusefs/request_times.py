"""How many requests of each kind were answered, how long that took, and with which errors.

One rule: it costs a request less than a microsecond, so it is always on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

BOUNDS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the classes of durations; what takes longer is in one class more."""


@dataclass(slots=True)
class Kind:
    """Requests of one kind. `classes` count those up to each of BOUNDS_S (not added up), and longer ones."""

    classes: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0
    errors: Counter[int] = field(default_factory=Counter)


class RequestTimes:
    """Counts requests since the mount. Belongs to the trio thread.

    `read_bytes` and `written_bytes` went through the daemon; what the kernel reads and writes by itself
    is nobody's to count.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self.read_bytes = 0
        self.written_bytes = 0

    def note(self, kind: str, elapsed_s: float, code: int = 0) -> None:
        """Account one answer; `code` is its errno, 0 for success."""
        one = self.kinds.get(kind)
        if one is None:
            one = self.kinds[kind] = Kind()
        one.classes[bisect_left(BOUNDS_S, elapsed_s)] += 1
        one.total_s += elapsed_s
        if code:
            one.errors[code] += 1
