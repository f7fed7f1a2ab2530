"""The process that looks at a mount for its daemon.

    python -m ckptfs.daemon.mount_looker MOUNTPOINT     answers each line on stdin with one on stdout

One rule: it only looks, and ends when nobody asks any more. Imports nothing of ours, to start fast.
"""

from __future__ import annotations

import os
import sys


def main(mountpoint: str) -> None:
    """The program."""
    for _ in sys.stdin:
        try:
            os.statvfs(mountpoint)
            answer = "answered"
        except OSError as e:
            answer = f"refused: {e.strerror}"
        try:
            os.write(sys.stdout.fileno(), f"{answer}\n".encode())
        except BrokenPipeError:
            return  # whoever asked has died meanwhile


if __name__ == "__main__":
    main(sys.argv[1])
