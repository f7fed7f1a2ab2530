"""A test run that is killed leaves no mount and no daemon: its watchdog sees to that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kernelmounts
from mounting import memory_folder

_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from mounting import Mount
folder = Path(sys.argv[2])
mount = Mount(folder / "a mount's", folder / "store", logs=folder)
mount.start()
print(mount.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_nothing() -> None:
    tests = str(Path(__file__).parents[1])
    with memory_folder() as folder:
        died = subprocess.run(
            [sys.executable, "-c", _KILLED, tests, str(folder)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        daemon = int(died.stdout)
        try:
            gone = kernelmounts.poll(lambda: kernelmounts.find(folder / "a mount's") is None, 60)
            ended = kernelmounts.poll(lambda: not Path(f"/proc/{daemon}").exists(), 60)
        finally:
            kernelmounts.remove(folder / "a mount's")
    assert gone, "the mount is still there"
    assert ended, "its daemon still runs"
