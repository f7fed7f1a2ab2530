"""What `ckptfs doctor` says: one line per thing that was looked at, and what to do where something is wrong.

One rule: a check that cannot be carried out says so and why; it is never silently left out, and one that
fails does not keep the others from being made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.store.errors import CkptfsError


class Level(StrEnum):
    """How bad it is; scripts may compare these words. Only a problem makes `doctor` end with 1."""

    FINE = "fine"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of `check` (a name that stays), and what to do. `mend` puts it right, where that is
    safe."""

    check: str
    level: Level
    said: str
    advice: str = ""
    mend: Callable[[], None] | None = None


Check = Callable[[], Iterator[Finding]]


def fine(check: str, said: str) -> Finding:
    """All is well."""
    return Finding(check, Level.FINE, said)


def note(check: str, said: str, advice: str = "") -> Finding:
    """Something to know."""
    return Finding(check, Level.NOTE, said, advice)


def problem(check: str, said: str, advice: str, mend: Callable[[], None] | None = None) -> Finding:
    """Something that will cost somebody something."""
    return Finding(check, Level.PROBLEM, said, advice, mend)


def carried_out(name: str, check: Check) -> Iterator[Finding]:
    """The findings of a check; if it breaks off, that is one."""
    try:
        yield from check()
    except (CkptfsError, OSError) as e:
        yield note(name, f"could not be looked at: {e}")


def mended(finding: Finding) -> Finding:
    """Put it right; what is the case then."""
    if finding.mend is None:
        return finding
    try:
        finding.mend()
    except (CkptfsError, OSError) as e:
        return problem(finding.check, f"{finding.said}; it could not be mended: {e}", finding.advice)
    return note(finding.check, f"{finding.said}: mended")
