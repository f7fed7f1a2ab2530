"""The one table that turns errors into errnos.

One rule: nobody else chooses an errno for one of our own errors; POSIX refusals that depend on
the call (EEXIST, ENOTEMPTY, …) are raised as PosixError where the call is carried out.
"""

from __future__ import annotations

import errno
import os

from ckptfs.store.errors import (
    CkptfsError,
    Conflict,
    Corrupt,
    InvalidRequest,
    NoSpace,
    NotFound,
    NotPermitted,
    ReadOnly,
    Unavailable,
    Unsupported,
)


class PosixError(Exception):
    """The answer to one system call: `code` is its errno."""

    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.code = code


_TABLE: tuple[tuple[type[CkptfsError], int], ...] = (
    (NotFound, errno.ENOENT),
    (Corrupt, errno.EIO),
    (Unavailable, errno.EAGAIN),
    (Conflict, errno.EEXIST),
    (NoSpace, errno.ENOSPC),
    (ReadOnly, errno.EROFS),
    (Unsupported, errno.EOPNOTSUPP),
    (NotPermitted, errno.EPERM),
    (InvalidRequest, errno.EINVAL),
)


def errno_of(error: BaseException) -> int:
    """The errno a client sees for `error`; EIO for what nobody foresaw."""
    if isinstance(error, PosixError):
        return error.code
    if isinstance(error, OSError) and error.errno:
        # Host errors pass through: ENOSPC, EDQUOT, EFBIG and EIO mean the same to our client.
        return error.errno
    return next((code for kind, code in _TABLE if isinstance(error, kind)), errno.EIO)


def is_expected(error: BaseException) -> bool:
    """Whether `error` is an ordinary answer, not worth a line in the log."""
    if isinstance(
        error, PosixError | NotFound | ReadOnly | NoSpace | NotPermitted | Conflict | InvalidRequest
    ):
        return True
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
