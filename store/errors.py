"""Every error that ckptfs raises on purpose.

One rule: a type exists only where a caller would act differently. Messages are written for
the person who reads the log: what happened, to which file, tensor or chunk, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


class CkptfsError(Exception):
    """Base of all errors below; never raised itself."""


class NotFound(CkptfsError):
    """The thing that was named does not exist."""


class Unavailable(CkptfsError):
    """The operation may succeed later; the caller may retry."""


class Conflict(CkptfsError):
    """Somebody else holds or has made the thing that was asked for."""


class NoSpace(CkptfsError):
    """There is no room, and none could be made."""


class ReadOnly(CkptfsError):
    """The target can never be changed (a version, a segment, a failed writer)."""


class Unsupported(CkptfsError):
    """The format, flag or file system is one that this program does not handle."""


class InvalidRequest(CkptfsError):
    """The caller asked for something that makes no sense; nothing was changed."""


class NotPermitted(CkptfsError):
    """The caller lacks the right to do this."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes lie: a file of the store and a byte offset within it."""

    file: str
    offset: int

    def __str__(self) -> str:
        return f"{self.file} at byte {self.offset}"


class Corrupt(CkptfsError):
    """Bytes that were read are not the bytes that were stored. They were not passed on."""

    def __init__(
        self,
        message: str,
        *,
        expected: bytes | None = None,
        got: bytes | None = None,
        place: Place | None = None,
    ) -> None:
        where = f" ({place})" if place is not None else ""
        super().__init__(message + where)
        self.expected = expected
        self.got = got
        self.place = place
