"""The daemon, which kills itself behind a step that chance has chosen: where a death could do harm.

    dying_daemon.py ARGUMENTS OF CKPTFS…
    CKPTFS_DIES_BY=FILE dying_daemon.py …       behind the next record of the journal once there is FILE

One rule: nothing is changed but that it dies, by SIGKILL, at one of the moments before and after something is
changed that outlives it: the journal, the state of the session, what is registered with the kernel.
"""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Callable
from typing import Any

from ckptfs.daemon.cli import main
from ckptfs.fusefs import kernel
from ckptfs.fusefs.kept_notes import Notes
from ckptfs.fusefs.kept_state import Counted, KeptState
from ckptfs.fusefs.requests import Requests
from ckptfs.store.journal import Journal

MOST_STEPS = 6000
PLACES: tuple[tuple[Any, str], ...] = (
    (Journal, "append"),
    (Notes, "put"),
    (Notes, "delete"),
    (Counted, "add"),
    (Counted, "void"),
    (KeptState, "set_count"),
    (Requests, "begin"),
    (kernel, "open_backing"),
    (kernel, "close_backing"),
)


class Steps:
    """Counts down."""

    def __init__(self, left: int) -> None:
        self.left = left

    def step(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            os.write(2, f"dies at {name}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            self.step(f"before {name}")
            answer = function(*args, **kwargs)
            self.step(f"after {name}")
            return answer

        return stepped


def die_by(sign: str) -> None:
    """Once there is a file of that name, remove it and die as soon as the journal has one more record."""
    append = Journal.append

    @functools.wraps(append)
    def appended(*args: Any, **kwargs: Any) -> Any:
        answer = append(*args, **kwargs)
        if os.path.exists(sign):
            os.unlink(sign)
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    Journal.append = appended  # type: ignore[method-assign]


if __name__ == "__main__":
    if sign := os.environ.get("CKPTFS_DIES_BY"):
        die_by(sign)
        main()
    steps = Steps(random.SystemRandom().randrange(1, MOST_STEPS))
    for owner, name in PLACES:
        setattr(owner, name, steps.around(getattr(owner, name), name))
    main()
