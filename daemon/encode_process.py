"""A process that encodes batches of chunks: `python -m ckptfs.daemon.encode_process STORE PARENT`.

One rule: it changes nothing but the one new segment of its batch, and runs when nothing else wants the core.

Started by encoding_worker.py, PARENT being that daemon. It says READY on stdout; then on stdin comes one
batch at a time, and on stdout goes what came of it: u32 length, then MessagePack.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from ckptfs.daemon.encode_orphan import hold_store
from ckptfs.daemon.idling import set_idle
from ckptfs.store.disk import Disk
from ckptfs.store.encoding_batch import EncodingBatch, encode_batch
from ckptfs.store.errors import CkptfsError, Corrupt, NoSpace

LENGTH = struct.Struct("<I")
READY = b"ready"


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Whether there is a segment now; if not, perhaps why: an errno, or that the disk is full or damaged."""

    is_built: bool = False
    error: str = ""
    code: int = 0
    is_full: bool = False
    is_corrupt: bool = False


_batches = msgspec.msgpack.Decoder(EncodingBatch)


def main() -> None:
    """Serve until the other side has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon
    set_idle(os.getpid(), True)
    disk = Disk(sys.argv[1])
    if not hold_store(disk, int(sys.argv[2])):
        return
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while (request := _received(sys.stdin.buffer)) is not None:
        reply = msgspec.msgpack.encode(_encoded(disk, _batches.decode(request)))
        sys.stdout.buffer.write(LENGTH.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()


def _received(stream: BinaryIO) -> bytes | None:
    header = stream.read(LENGTH.size)
    return stream.read(*LENGTH.unpack(header)) if len(header) == LENGTH.size else None


def _encoded(disk: Disk, batch: EncodingBatch) -> Outcome:
    try:
        return Outcome(encode_batch(disk, batch) is not None)
    except NoSpace as e:
        return Outcome(error=str(e), is_full=True)
    except Corrupt as e:
        return Outcome(error=str(e), is_corrupt=True)
    except CkptfsError as e:
        return Outcome(error=str(e))
    except OSError as e:
        return Outcome(error=e.strerror or str(e), code=e.errno or 0)


if __name__ == "__main__":
    main()
