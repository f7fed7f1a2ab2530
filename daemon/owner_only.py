"""A walk over a mount, in a process of its own: files that only their owner can read, where others can list.

    python -m ckptfs.daemon.owner_only DIRECTORY     prints their paths, each ended by a zero byte

One rule: it only looks. Whoever starts it bounds it, for it waits as long as the mount does.
"""

from __future__ import annotations

import os
import stat
import sys

_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
_OTHERS_LIST = stat.S_IXGRP | stat.S_IXOTH
_MOST = 1000


def main(directory: str) -> None:
    """The program."""
    found = 0
    device = os.lstat(directory).st_dev
    for folder, folders, names in os.walk(directory):
        above = os.lstat(folder)
        folders[:] = [one for one in folders if os.lstat(os.path.join(folder, one)).st_dev == device]
        if not above.st_mode & _OTHERS_LIST or not above.st_mode & _OTHERS_READ:
            continue
        for name in names:
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue
            if stat.S_ISREG(mode) and not mode & _OTHERS_READ:
                sys.stdout.buffer.write(os.fsencode(path) + b"\0")
                found += 1
                if found >= _MOST:
                    return


if __name__ == "__main__":
    main(sys.argv[1])
