"""A signal that comes before the mount stands is answered then; nobody else is touched by that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

START = """
import os, signal, subprocess, sys, types
import trio
from ckptfs.daemon import cli_lifetime
from ckptfs.daemon.held_signals import SIGNALS, receiver

def serve(*args, **more):
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    fields = dict(line.split(":", 1) for line in status.splitlines())
    theirs = sum(1 << number - 1 for number in SIGNALS)
    print(*[int(fields[key], 16) & theirs for key in ("SigBlk", "SigIgn")])
    trio.run(watch)

async def watch():
    with receiver(SIGNALS) as signals:
        for _ in SIGNALS:
            print(signal.Signals(await anext(signals)).name, flush=True)
        os.kill(os.getpid(), signal.SIGHUP)
        print(signal.Signals(await anext(signals)).name, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

if sys.argv[1] == "kept":
    os.environ["LISTEN_PID"] = str(os.getpid())
sys.modules["ckptfs.daemon.serving"] = types.SimpleNamespace(serve_mount=serve)
cli_lifetime.mount("/mnt", "/store")
"""


def started(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, how],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_who_goes_on_with_a_session_is_told_all_once_it_serves() -> None:
    done = started("kept")
    said = done.stdout.split()
    assert said[:2] == ["0", "0"], "a child has nothing blocked, and ignores nothing"
    assert said[2:] == ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGHUP"], done.stderr
    assert done.returncode == -signal.SIGTERM, "behind the receiver a signal ends the process again"


def test_who_has_nothing_to_lose_is_stopped_at_once() -> None:
    done = started("anew")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_reload_while_a_service_starts_is_no_stop(number: int) -> None:
    program = (
        "import os, signal\nfrom ckptfs.daemon.held_signals import hold_early\n"
        f"hold_early({{}}, os.getpid())\nos.kill(os.getpid(), {int(number)})\nprint('goes on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"goes on\n")


def test_what_is_ignored_stays_ignored() -> None:
    program = (
        "import os, signal\nfrom ckptfs.daemon.held_signals import hold_early\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nhold_early({'LISTEN_PID': '7'}, 7)\n"
        "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN"
    )
    subprocess.run([sys.executable, "-c", program], env=dict(os.environ), timeout=60, check=True)
