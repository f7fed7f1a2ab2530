"""Framework processes: the jobs that save to a mount, outside pytest and outside the daemon.

The one rule: a client never outlives its time limit, and its output is shown when it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

SCRIPTS = Path(__file__).parent / "scripts"
MARK = "@ckptfs "
Fields = dict[str, object]


class ClientError(AssertionError):
    """The client's operation raised; `number` is the errno, if the exception had one."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.number = number


class Client:
    """A running client script. All fields are the test thread's; a reader thread fills `_said`."""

    def __init__(self, script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._said: queue.SimpleQueue[Fields | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, **OFFLINE, **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._errors.close()

    def call(self, op: str, *, timeout_s: float = 60.0, **arguments: object) -> object:
        """Have one operation done; ClientError with what it raised if it failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self.next_line(timeout_s)
        assert answer is not None, f"the client ended in {op}:\n{self.errors()}"
        if "error" in answer:
            number = answer["errno"]
            assert number is None or isinstance(number, int)
            raise ClientError(f"{op}: {answer['error']}", number)
        return answer["result"]

    def go_on(self) -> None:
        """One line on its stdin, which says nothing."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def next_line(self, timeout_s: float = 60.0) -> Fields | None:
        """The next thing the script says; None once it has closed its stdout."""
        try:
            return self._said.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise AssertionError(f"the client said nothing for {timeout_s} s:\n{self.errors()}") from None

    def lines(self, timeout_s: float = 60.0) -> Iterator[Fields]:
        """Everything the script says from now on, each thing as soon as it is said."""
        while (line := self.next_line(timeout_s)) is not None:
            yield line

    def finish(self, *, expected: int = 0, timeout_s: float = 120.0) -> list[Fields]:
        """What the script still says until it ends, which it must do with this exit code."""
        said = list(self.lines(timeout_s))
        code = self._process.wait(timeout_s)
        assert code == expected, f"exit {code}:\n{self.errors()}"
        return said

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the script and whatever it started; does nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        self._reader.join(20)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def errors(self) -> str:
        """The end of its stderr."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under us by kill()
            for line in self._process.stdout:
                if line.startswith(MARK):
                    self._said.put(json.loads(line.removeprefix(MARK)))
        self._said.put(None)


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
}


def run_script(
    script: str,
    *arguments: str,
    timeout_s: float = 120.0,
    expected: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[Fields]:
    """Run a script to its end; all it said."""
    with Client(script, *arguments, environment=environment) as client:
        return client.finish(expected=expected, timeout_s=timeout_s)


def run_ranks(
    script: str,
    *arguments: str,
    ranks: int = 2,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Fields]:
    """Run one process per rank, told RANK and WORLD_SIZE; all that rank 0 said."""
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                Client(
                    script, *arguments, environment={**(environment or {}), **_rank_environment(rank, ranks)}
                )
            )
            for rank in range(ranks)
        ]
        first, *_ = [client.finish(timeout_s=timeout_s) for client in clients]
        return first


def _rank_environment(rank: int, ranks: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}


def named(lines: Sequence[Fields], event: str) -> list[Fields]:
    """Those lines that report this event."""
    return [line for line in lines if line.get("event") == event]
