"""A process that cuts and hashes parts of files: `python -m ckptfs.daemon.hashing_process`.

One rule: it holds nothing. It reads through a mapping, which takes a fifth of the time of a copy, and may
die of that (SIGBUS, where a file is truncated or a disk fails); whoever asked then does without it.

Started by hashing_worker.py, with a socket as stdin. Over that goes one request at a time, with the file
(SCM_RIGHTS), and its reply: the number of chunks, 0 where the file cannot be mapped; then, where it was cut,
how many of them are each span's, and their lengths (u32); then their ids. All in the machine's byte order.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import add

import numpy as np
import numpy.typing as npt

from ckptfs.store.bad_chunks import MOST_CHUNKS
from ckptfs.store.hashing import chunk_id
from ckptfs.store.regions import Mode
from ckptfs.store.spans import MOST_SPANS, Span, cut_span

_SPAN = struct.Struct("<QQQB")
_MODES = (Mode.FIXED, Mode.CONTENT)
REPLY = struct.Struct("<I")
_CUT, _HASH = b"c", b"h"
_PLACE_BYTES = array("Q").itemsize + array("I").itemsize
_REQUEST_BYTES = 1 + MOST_CHUNKS * _PLACE_BYTES


def cut_request(spans: Sequence[Span]) -> bytes:
    """A request for the cuts of spans that follow one another; at most MOST_SPANS."""
    assert 0 < len(spans) <= MOST_SPANS
    packed = [_SPAN.pack(one.offset, one.end, one.region_end, _MODES.index(one.mode)) for one in spans]
    return _CUT + b"".join(packed)


def hash_request(starts: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint32]) -> bytes:
    """A request for the ids of chunks that begin at `starts` of a file and are `lengths` long; at most
    MOST_CHUNKS."""
    assert 0 < len(starts) == len(lengths) <= MOST_CHUNKS
    return _HASH + starts.tobytes() + lengths.tobytes()


def main() -> None:
    """Serve until the other side has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon
    with socket.socket(fileno=0) as asked, suppress(OSError):  # it has gone
        asked.send(REPLY.pack(0))  # ready
        while True:
            request, files, _, _ = socket.recv_fds(asked, _REQUEST_BYTES, 1)
            if not request or len(files) != 1:
                return
            try:
                reply = (_cut if request.startswith(_CUT) else _hashed)(request[1:], files[0])
            except (OSError, ValueError):
                reply = REPLY.pack(0)
            finally:
                os.close(files[0])
            asked.send(reply)


def _cut(request: bytes, fd: int) -> bytes:
    spans = [Span(at, end, limit, _MODES[mode]) for at, end, limit, mode in _SPAN.iter_unpack(request)]
    base = spans[0].offset
    with _mapped(fd, base, max(one.limit for one in spans), mmap.MAP_POPULATE) as view:
        cut = [cut_span(view[one.offset - base : one.limit - base], one) for one in spans]
    counts = array("I", [len(one.lengths) for one in cut])
    lengths = b"".join([one.lengths.tobytes() for one in cut])
    return REPLY.pack(sum(counts)) + counts.tobytes() + lengths + b"".join([one.ids for one in cut])


def _hashed(request: bytes, fd: int) -> bytes:
    count = len(request) // _PLACE_BYTES
    starts, lengths = array("Q"), array("I")
    starts.frombytes(request[: count * starts.itemsize])
    lengths.frombytes(request[count * starts.itemsize :])
    base, end = min(starts), max(map(add, starts, lengths))
    # What lies between may be a hole, which a tmpfs fills where it is touched.
    with _mapped(fd, base, end, 0) as view:
        places = zip(starts, lengths, strict=True)
        ids = b"".join([chunk_id(view[start - base : start - base + length]) for start, length in places])
    return REPLY.pack(count) + ids


@contextmanager
def _mapped(fd: int, start: int, end: int, flags: int) -> Iterator[memoryview]:
    """Bytes `start` to `end` of a file; ValueError if it ends before."""
    at = start - start % mmap.ALLOCATIONGRANULARITY
    flags |= mmap.MAP_SHARED
    mapped = mmap.mmap(fd, end - at, flags=flags, prot=mmap.PROT_READ, offset=at)
    with mapped, memoryview(mapped) as whole, whole[start - at :] as view:
        yield view


if __name__ == "__main__":
    main()
