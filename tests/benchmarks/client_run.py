"""Running a client's action in a process of its own (client.py), and what it says it took."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CLIENT = [sys.executable, str(Path(__file__).with_name("client.py"))]
ACTION_LIMIT_S = 900


def run_client(action: str, target: Path, argument: str) -> tuple[float, float]:
    """(seconds, CPU seconds) that a client says an action took."""
    done = subprocess.run(
        [*CLIENT, action, str(target), argument],
        check=True,
        capture_output=True,
        text=True,
        timeout=ACTION_LIMIT_S,
    )
    wall_s, cpu_s = map(float, done.stdout.split())
    return wall_s, cpu_s
