"""A process that cuts and hashes spans of files: `python -m ckptfs.daemon.cut_worker`, its socket as stdin.

One rule: it holds nothing. It reads through a mapping, which takes a fifth of the time of a copy, and may
die of that (SIGBUS, where a file is truncated or a disk fails); whoever asked then does without it.

Started by cut_workers.py, which says what goes over the socket.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
from contextlib import suppress

from ckptfs.store.regions import Mode
from ckptfs.store.spans import Span, cut_span

REQUEST = struct.Struct("<QQQB")
"""offset, end and region_end of a span, its mode as a number in MODES; the file goes with it (SCM_RIGHTS)."""
MODES = (Mode.FIXED, Mode.CONTENT)
REPLY = struct.Struct("<I")
"""The number of chunks, 0 where the file cannot be mapped; then their lengths (u32), then their ids, in the
machine's byte order."""


def main() -> None:
    """Serve until the other side has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon
    with socket.socket(fileno=0) as asked, suppress(OSError):  # it has gone
        asked.send(REPLY.pack(0))  # ready
        while True:
            request, files, _, _ = socket.recv_fds(asked, REQUEST.size, 1)
            if len(request) != REQUEST.size or len(files) != 1:
                return
            try:
                reply = _answer(request, files[0])
            finally:
                os.close(files[0])
            asked.send(reply)


def _answer(request: bytes, fd: int) -> bytes:
    offset, end, region_end, mode = REQUEST.unpack(request)
    span = Span(offset, end, region_end, MODES[mode])
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    try:
        mapped = mmap.mmap(fd, span.limit - start, flags=flags, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):
        return REPLY.pack(0)
    with mapped, memoryview(mapped) as whole, whole[offset - start :] as view:
        cuts = cut_span(view, span)
    return REPLY.pack(len(cuts.lengths)) + cuts.lengths.tobytes() + cuts.ids


if __name__ == "__main__":
    main()
