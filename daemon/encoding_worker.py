"""The process that encodes: started with the first batch, ended when there is nothing more to do.

One rule: whatever becomes of it, it is gone before anybody removes or reads what it wrote.

It is a process and not a thread because a thread that runs only when nothing else wants the core, and then
stops with the interpreter's lock held, would stop every request of the mount with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import msgspec
import trio

from ckptfs.daemon.encode_process import LENGTH, READY, Outcome
from ckptfs.store.disk import Disk
from ckptfs.store.encoding_batch import EncodingBatch
from ckptfs.store.errors import Corrupt, NoSpace, Unavailable
from ckptfs.store.packing import Built, remove_segment_files
from ckptfs.store.segment_files import read_idx

# glibc gives a freed chunk's pages back to the kernel at once, which has to clear them for the next one:
# that takes as long as to encode (0.53 GB/s instead of 0.92 without a parent, 0.33 instead of 0.46 with one).
_ALLOCATOR: Final = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
_outcomes = msgspec.msgpack.Decoder(Outcome)


class EncoderDied(Unavailable):
    """The process ended with a batch in hand: something in that, or somebody, has killed it."""


class EncodingWorker:
    """Runs batches, one at a time. Belongs to the index thread."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._process: trio.Process | None = None

    async def run(self, batch: EncodingBatch) -> Built | None:
        """As encode_batch; EncoderDied if the process died of it, Unavailable if there is none to be had.
        Then there is no segment."""
        is_done = False
        try:
            await self._start()
            outcome = await self._asked(batch)
            if outcome.error:
                raise _error_of(outcome)
            built = None
            if outcome.is_built:
                built = Built(await trio.to_thread.run_sync(read_idx, self._disk, batch.number))
            is_done = True
            return built
        finally:
            if not is_done:
                with trio.CancelScope(shield=True):
                    await self.close()
                    await trio.to_thread.run_sync(remove_segment_files, self._disk, batch.number)

    async def close(self) -> None:
        """End the process, if there is one, and wait for its end."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        await stream.aclose()

    async def _start(self) -> None:
        if self._process is not None:
            return
        try:
            self._process = await self._started()
            assert self._process.stdout is not None, "it is a pipe"
            if await _exactly(self._process.stdout, len(READY)) != READY:
                raise OSError("it says something else")
        except (OSError, trio.BrokenResourceError) as e:
            raise Unavailable(f"the process that encodes cannot be started: {e}") from e

    async def _asked(self, batch: EncodingBatch) -> Outcome:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "it runs"
        request = msgspec.msgpack.encode(batch)
        try:
            await process.stdin.send_all(LENGTH.pack(len(request)) + request)
            (length,) = LENGTH.unpack(await _exactly(process.stdout, LENGTH.size))
            return _outcomes.decode(await _exactly(process.stdout, length))
        except (OSError, trio.BrokenResourceError, msgspec.DecodeError) as e:
            raise EncoderDied(f"the process that encodes has died: {e}") from e

    async def _started(self) -> trio.Process:
        return await trio.lowlevel.open_process(
            # Never looked for below the working directory, which may lie in the mount.
            [sys.executable, "-P", "-m", "ckptfs.daemon.encode_process", self._disk.root, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
            env={**os.environ, **_ALLOCATOR, "PYTHONPATH": os.pathsep.join(sys.path)},
        )


async def _exactly(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = await stream.receive_some(count - len(found))
        if not part:
            raise OSError("it has ended")
        found += part
    return found


def _error_of(outcome: Outcome) -> Exception:
    if outcome.is_full:
        return NoSpace(outcome.error)
    if outcome.is_corrupt:
        return Corrupt(outcome.error)
    return OSError(outcome.code, outcome.error) if outcome.code else Unavailable(outcome.error)
