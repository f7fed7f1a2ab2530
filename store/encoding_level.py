"""How much an encoding may cost. Pure, and imports nothing: the command line names levels, too.

One rule: a level decides what is tried, never what can be read.
"""

from __future__ import annotations

from typing import Literal

Level = Literal["fast", "small"]
"""At "small", differences to a parent are also coded by its exponents (codec 5; FORMAT.md, "Contexts"), which
takes five to eight times as long to make, and three to six times to read."""
