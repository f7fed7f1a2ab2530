"""Does the mount answer? Asked by a process of its own, because a daemon must never touch its own mount.

One rule: the daemon waits for the answer with a bound, and goes on serving meanwhile; what hangs then is the
other process, and it is ended.
"""

from __future__ import annotations

import os
import subprocess
import sys

import trio

_END_S = 5.0
_HIDDEN = (
    "NOTIFY_SOCKET",
    "FDSTORE",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)


class MountProbe:
    """Looks at one mount. Belongs to the trio thread; used by one task."""

    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint
        self._process: trio.Process | None = None

    async def look(self, most_s: float) -> bool:
        """Whether the mount answered a statfs(2) within `most_s`."""
        with trio.move_on_after(most_s):
            try:
                return await self._asked()
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        await self.close()
        return False

    async def close(self) -> None:
        """End the other process, if there is one. Also when cancelled; bounded."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        with trio.move_on_after(_END_S, shield=True):
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await pipe.aclose()
            await process.wait()

    async def _asked(self) -> bool:
        if self._process is None:
            environment = {key: value for key, value in os.environ.items() if key not in _HIDDEN}
            self._process = await trio.lowlevel.open_process(
                [sys.executable, "-P", "-m", "ckptfs.daemon.mount_looker", self._mountpoint],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        await self._process.stdin.send_all(b"?\n")
        answer = b""
        while not answer.endswith(b"\n"):
            part = await self._process.stdout.receive_some(256)
            if not part:
                raise trio.BrokenResourceError("the other process has ended")
            answer += part
        return answer == b"answered\n"
