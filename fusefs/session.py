"""The kernel session: mounting, serving, unmounting.

One rule: the process that serves a mount never touches it; what it needs to know of its own
mount it reads from /proc/self/mountinfo.

As root the session is our own (see kernel.py), which is what passthrough needs; else, and with
`write_path = "plain"` and no root, libfuse mounts as usual.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket

import pyfuse3
import trio

from ckptfs.fusefs import REPLIES, kernel
from ckptfs.fusefs.operations import CkptfsOperations
from ckptfs.fusefs.passthrough import Passthrough

log = logging.getLogger(__name__)
SUBTYPE = "ckptfs"
READ_AHEAD_KB = 2048
_INIT_LIMIT_S = 30
_MNT_DETACH = 2


class Session:
    """One mount. `run` serves it until it is unmounted or `stop` is called."""

    def __init__(
        self,
        operations: CkptfsOperations,
        passthrough: Passthrough,
        mountpoint: str,
        store: str,
        *,
        allow_other: bool,
        write_path: str = "auto",
    ) -> None:
        self.mountpoint = os.path.realpath(mountpoint)
        self._operations = operations
        self._passthrough = passthrough
        self._store = store
        self._wants_passthrough = write_path == "auto"
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._fuse_fd = -1
        self.serving = trio.Event()
        if os.geteuid() == 0:
            self._mount_ourselves(allow_other)
        else:
            self._mount_through_libfuse(allow_other)

    async def run(self) -> None:
        """Serve requests; returns after an unmount or `stop`."""
        if self._fuse_fd >= 0:
            with trio.fail_after(_INIT_LIMIT_S):
                await self._negotiate()
            self._set_read_ahead()
        self.serving.set()
        await pyfuse3.main(min_tasks=4, max_tasks=64)

    def stop(self) -> None:
        """Make `run` return; what is in flight is still answered."""
        pyfuse3.terminate()

    def close(self) -> None:
        """Unmount (lazily, if somebody is still in it) and let go of the session."""
        if self._fuse_fd >= 0:
            # EINVAL: somebody has unmounted it already, which is how `run` came to its end.
            ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(self.mountpoint), _MNT_DETACH)
            pyfuse3.close(unmount=False)
        else:
            pyfuse3.close(unmount=True)

    def _mount_ourselves(self, allow_other: bool) -> None:
        options = ["default_permissions", *(["allow_other"] if allow_other else [])]
        self._fuse_fd = kernel.open_mounted(self.mountpoint, self._store, SUBTYPE, options)
        self._pair = kernel.socket_pair()
        pyfuse3.init(self._operations, f"/dev/fd/{self._pair[1].fileno()}", set())

    def _mount_through_libfuse(self, allow_other: bool) -> None:
        options = {*pyfuse3.default_options, f"fsname={_escaped(self._store)}", f"subtype={SUBTYPE}"}
        if allow_other:
            options.add("allow_other")
        pyfuse3.init(self._operations, self.mountpoint, options)

    async def _negotiate(self) -> None:
        """Let libfuse answer INIT on the socket, amend its answer, put the real fd below it."""
        assert self._pair is not None
        ours, theirs = self._pair
        offer = kernel.read_offer(self._fuse_fd)
        offer = self._decided(offer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main, 1, 1)
            ours.send(offer.request)
            await trio.lowlevel.wait_readable(ours)
            answer = ours.recv(4096)
            # Cancelled, not told of a closed fd: the task may not be waiting for it at this moment.
            nursery.cancel_scope.cancel()
        os.write(self._fuse_fd, kernel.amended(answer, offer, kernel.stack_depth_for(self._store)))
        os.dup2(self._fuse_fd, theirs.fileno(), inheritable=False)
        ours.close()
        theirs.detach()  # libfuse closes this number at the end
        if offer.passthrough:
            self._enable_passthrough()
        self._operations.strips_privileges = offer.killpriv_v2

    def _decided(self, offer: kernel.Offer) -> kernel.Offer:
        refusal = None
        if not self._wants_passthrough:
            refusal = 'write_path = "plain" asks for it'
        elif REPLIES is None:
            refusal = "the reply extension is not built"
        elif not offer.passthrough:
            refusal = "the kernel has no passthrough (6.9 and newer have)"
        if refusal is None:
            return offer
        self._passthrough.refuse(refusal)
        return kernel.Offer(offer.request, False, offer.killpriv_v2)

    def _enable_passthrough(self) -> None:
        """Try it on a nameless file of the store before any client depends on it."""
        self._passthrough.enable(self._fuse_fd)
        try:
            fd = os.open(self._store, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as e:
            self._passthrough.refuse(f"no nameless file in the store: {e.strerror}")
            return
        try:
            kernel.close_backing(self._fuse_fd, kernel.open_backing(self._fuse_fd, fd))
        except OSError as e:
            self._passthrough.refuse(f"the kernel refused a backing file: {e.strerror}")
        finally:
            os.close(fd)

    def _set_read_ahead(self) -> None:
        """The default of 128 KiB costs half of a cold sequential read (0.59 against 1.06 GB/s).

        Only behind INIT, whose answer sets the kernel's default again.
        """
        device = device_of(self.mountpoint)
        if device is None:
            return
        try:
            with open(f"/sys/class/bdi/{device}/read_ahead_kb", "w") as f:
                f.write(str(READ_AHEAD_KB))
        except OSError as e:
            log.info("read-ahead stays as it is: %s", e)


def device_of(mountpoint: str) -> str | None:
    """The "major:minor" of the newest mount at a path, as /proc/self/mountinfo has it."""
    found = None
    with open("/proc/self/mountinfo") as table:
        for line in table:
            fields = line.split()
            path = fields[4].encode().decode("unicode_escape").encode("latin-1")
            if path.decode("utf-8", "surrogateescape") == mountpoint:
                found = fields[2]
    return found


def _escaped(store: str) -> str:
    return store.replace("\\", "\\\\").replace(",", "\\,")
