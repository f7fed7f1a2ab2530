"""What becomes of a request whose handler raises, and how long each took.

One rule: no exception ends the daemon. Here is the one place where an error becomes an errno; what nobody
foresaw is logged with its operation and path, and the mount goes on.
"""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pyfuse3 import FUSEError

from ckptfs.fusefs.errnos import errno_of
from ckptfs.fusefs.failures import Failures
from ckptfs.fusefs.request_times import RequestTimes
from ckptfs.fusefs.requests import Requests
from ckptfs.fusefs.stored_reads import StoredReads


class Answers:
    """Belongs to the trio thread."""

    def __init__(
        self, requests: Requests, failures: Failures, stored_reads: StoredReads, times: RequestTimes
    ) -> None:
        self._requests = requests
        self._failures = failures
        self._stored_reads = stored_reads
        self._times = times

    async def answer(self, kind: str, args: tuple[Any, ...], work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """What `work` returns, for a request of this kind with these arguments; FUSEError if it raises."""
        begun, code = time.perf_counter(), 0
        self._requests.begin()
        try:
            return await work()
        except Exception as e:
            code = errno_of(e)
            self._failures.report(kind, args, e)
            if code == errno.ESTALE:
                self._stored_reads.expect_again(getattr(args[-1], "pid", 0))
            raise FUSEError(code) from None
        finally:
            self._times.note(kind, time.perf_counter() - begun, code)


class Answering(Protocol):
    """Whose handlers are answered."""

    answers: Answers


P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", bound=Answering)


def answered(
    handler: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[A, P], Coroutine[Any, Any, R]]:
    """Turn what a handler raises into an errno for the client, and never let it go further."""

    kind = handler.__name__

    @functools.wraps(handler)
    async def answer(self: A, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.answers.answer(kind, args, lambda: handler(self, *args, **kwargs))

    return answer
