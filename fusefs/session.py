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
from collections.abc import Callable
from dataclasses import replace

import pyfuse3
import trio

from ckptfs.fusefs import REPLIES, kernel
from ckptfs.fusefs.kept_state import KeptState, Negotiated
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
        state: KeptState,
        mountpoint: str,
        store: str,
        *,
        allow_other: bool,
        write_path: str = "auto",
        taken_over: int | None = None,
        keep: Callable[[int, int], str] | None = None,
    ) -> None:
        """`mountpoint` is a real path: looking at it would wait for ourselves. `taken_over` is the fd of the
        session of a daemon that died, whose state the operations go on with. `keep` is told the two fds, of
        the session and of its state, that the mount outlives us with; it returns why they are not kept.
        """
        self.mountpoint = mountpoint
        self._operations = operations
        self._passthrough = passthrough
        self._state = state
        self._store = store
        self._wants_passthrough = write_path == "auto"
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._fuse_fd = -1
        self._device = device_of(mountpoint) if taken_over is not None else None
        self._keep = keep
        self.is_kept = taken_over is not None
        self.kept_why = "it was taken over" if self.is_kept else ""
        self.serving = trio.Event()
        if taken_over is not None:
            self._fuse_fd = taken_over
            self._begin_libfuse()
        elif os.geteuid() == 0:
            self._mount_ourselves(allow_other)
        else:
            self._mount_through_libfuse(allow_other)

    async def run(self) -> None:
        """Serve requests; returns after an unmount or `stop`."""
        if self._fuse_fd >= 0:
            with trio.fail_after(_INIT_LIMIT_S):
                await (self._resume() if self.is_kept else self._negotiate())
        else:
            self.kept_why = "only a mount that root made can be"
            self._tell_refusal()
        self.serving.set()
        await pyfuse3.main(min_tasks=4, max_tasks=64)

    @property
    def kept(self) -> bool | None:
        """Whether the mount outlives this process; None: nobody is there who could keep it. `kept_why` says
        it in a few words."""
        return self.is_kept if self._keep is not None else None

    def stop(self) -> None:
        """Make `run` return; what is in flight is still answered."""
        pyfuse3.terminate()

    def close(self, *, leave_mounted: bool = False) -> None:
        """Unmount (lazily, if somebody is still in it) and let go of the session; or leave it to whoever
        takes it over."""
        if leave_mounted and self.is_kept:
            pyfuse3.close(unmount=False)
        elif self._fuse_fd >= 0:
            # Somebody may have unmounted it already, which is how `run` came to its end; what is there then
            # is another mount, below ours.
            if device_of(self.mountpoint) == self._device:
                ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(self.mountpoint), _MNT_DETACH)
            pyfuse3.close(unmount=False)
        else:
            pyfuse3.close(unmount=True)

    def _mount_ourselves(self, allow_other: bool) -> None:
        options = ["default_permissions", *(["allow_other"] if allow_other else [])]
        self._fuse_fd = kernel.open_mounted(self.mountpoint, self._store, SUBTYPE, options)
        self._device = device_of(self.mountpoint)
        self._begin_libfuse()

    def _begin_libfuse(self) -> None:
        self._pair = kernel.socket_pair()
        pyfuse3.init(self._operations, f"/dev/fd/{self._pair[1].fileno()}", set())

    def _mount_through_libfuse(self, allow_other: bool) -> None:
        options = {*pyfuse3.default_options, f"fsname={_escaped(self._store)}", f"subtype={SUBTYPE}"}
        if allow_other:
            options.add("allow_other")
        pyfuse3.init(self._operations, self.mountpoint, options)

    async def _negotiate(self) -> None:
        """Let libfuse answer INIT on the socket, amend its answer, put the real fd below it."""
        offer = self._decided(kernel.read_offer(self._fuse_fd))
        answer = kernel.amended(
            await self._answer_of_libfuse(offer.request), offer, kernel.stack_depth_for(self._store)
        )
        os.write(self._fuse_fd, answer)
        self._put_below_libfuse()
        if offer.passthrough:
            self._enable_passthrough()
        self._operations.strips_privileges = offer.killpriv_v2
        self._set_read_ahead()
        self._keep_session(offer, answer)

    async def _resume(self) -> None:
        """Bring libfuse to where the daemon before us had it, and have the kernel ask again what that one
        has read and not answered."""
        negotiated = self._state.negotiated
        answer = await self._answer_of_libfuse(kernel.within(negotiated.request, negotiated.answer))
        if not kernel.agree(answer, negotiated.answer):
            log.warning("libfuse now answers the kernel's offer in another way than when this was mounted")
        self._put_below_libfuse()
        if negotiated.passthrough:
            self._passthrough.resume(self._fuse_fd)
            self._probe_passthrough()
        else:
            self._passthrough.refuse("it was mounted without")
        self._operations.strips_privileges = negotiated.killpriv_v2
        kernel.ask_again(self._fuse_fd)

    async def _answer_of_libfuse(self, request: bytes) -> bytes:
        assert self._pair is not None
        ours, _ = self._pair
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main, 1, 1)
            ours.send(request)
            await trio.lowlevel.wait_readable(ours)
            answer = ours.recv(4096)
            # Cancelled, not told of a closed fd: the task may not be waiting for it at this moment.
            nursery.cancel_scope.cancel()
        return answer

    def _put_below_libfuse(self) -> None:
        assert self._pair is not None
        ours, theirs = self._pair
        os.dup2(self._fuse_fd, theirs.fileno(), inheritable=False)
        ours.close()
        theirs.detach()  # libfuse closes this number at the end

    def _keep_session(self, offer: kernel.Offer, answer: bytes) -> None:
        """From here on the mount outlives us, if somebody keeps the two fds."""
        device = device_of(self.mountpoint)
        self.kept_why = self._refusal_to_keep(offer, device)
        if self.kept_why or self._keep is None or device is None:
            self._tell_refusal()
            return
        self._state.negotiated = Negotiated(
            self.mountpoint,
            self._store,
            int(device.partition(":")[2]),
            offer.request,
            answer,
            offer.passthrough,
            offer.killpriv_v2,
        )
        self.kept_why = self._keep(self._fuse_fd, self._state.fd)
        if self.kept_why:
            self._tell_refusal()
            return
        self.is_kept, self.kept_why = True, "the service manager has its session"

    def _refusal_to_keep(self, offer: kernel.Offer, device: str | None) -> str:
        if self._keep is None:
            return "no service manager has started its daemon"
        if REPLIES is None:
            return "the reply extension is not built"
        if not offer.resend:
            return "the kernel cannot ask again (6.9 and newer can)"
        return "" if device is not None else "it was unmounted at once"

    def _tell_refusal(self) -> None:
        if self._keep is not None:
            log.error("the mount ends with this daemon, whatever is open in it: %s", self.kept_why)

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
        return replace(offer, passthrough=False)

    def _enable_passthrough(self) -> None:
        """Try it on a nameless file of the store before any client depends on it."""
        self._passthrough.enable(self._fuse_fd)
        self._probe_passthrough()

    def _probe_passthrough(self) -> None:
        try:
            fd = os.open(self._store, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as e:
            self._passthrough.refuse(f"no nameless file in the store: {e.strerror}")
            return
        try:
            backing_id = kernel.open_backing(self._fuse_fd, fd)
            kernel.close_backing(self._fuse_fd, backing_id)
            if self.is_kept:  # ids are given in order, so only the one before can be nobody's
                self._passthrough.close_unnamed(backing_id - 1)
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
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            path = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1")
            if path.decode("utf-8", "surrogateescape") == mountpoint:
                found = fields[2]
    return found


def _escaped(store: str) -> str:
    return store.replace("\\", "\\\\").replace(",", "\\,")
