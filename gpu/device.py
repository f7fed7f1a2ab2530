"""Hashing in a device's memory, by PyCUDA in the primary context, which is torch's too.

One rule: the context is current only while a call of ours runs, and every call leaves the driver as it
found it. PyCUDA is imported here and nowhere else, and only when a device is asked for.

Source: PyCUDA's driver interface, and the CUDA driver API on primary contexts and stream order.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from ckptfs.gpu.crc64 import from_remainder
from ckptfs.gpu.extents import Extent
from ckptfs.gpu.fatbin import KERNELS, load_fatbin
from ckptfs.gpu.launch import JOIN_THREADS, SEGMENT_THREADS, Launch, plan
from ckptfs.store.errors import InvalidRequest, Unavailable, Unsupported

if TYPE_CHECKING:
    import pycuda.driver as cuda


def driver() -> ModuleType:
    """PyCUDA's driver module, initialised; Unsupported, saying what to install, where it cannot be."""
    try:
        import pycuda.driver
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"hashing on a GPU needs PyCUDA ({error}): pip install 'ckptfs[gpu]' as the README says, or use "
            "the CPU"
        ) from None
    except ImportError as error:
        raise Unsupported(
            f"PyCUDA finds no NVIDIA driver ({error}): install the driver (580 or newer), or use the CPU"
        ) from None
    try:
        pycuda.driver.init()
    except pycuda.driver.Error as error:
        raise Unsupported(
            f"the NVIDIA driver finds no device ({_line(error)}): give this machine or container one, or use "
            "the CPU"
        ) from None
    return pycuda.driver  # type: ignore[no-any-return]


def after_torch(ordinal: int) -> Callable[[int], None]:
    """`after` of a DeviceHasher where torch wrote the extents: waits for the caller's current stream."""
    import torch

    def wait(stream: int) -> None:
        ours = torch.cuda.get_stream_from_external(stream, torch.device("cuda", ordinal))
        ours.wait_stream(torch.cuda.current_stream(ordinal))

    return wait


class Kernels:
    """The four kernels, loaded into the current context. Launches return at once."""

    def __init__(self, pycuda_driver: ModuleType, fatbin: bytes | None = None) -> None:
        """Those of `fatbin`, or the shipped ones."""
        self._module = pycuda_driver.module_from_buffer(load_fatbin() if fatbin is None else fatbin)
        self._functions: dict[str, cuda.Function] = {}
        # No comprehension: its closure would keep the module alive past _let_go.
        for name in KERNELS:
            self._functions[name] = self._module.get_function(name)

    def blake3(self, launch: Launch, base: int, stream: cuda.Stream) -> None:
        """Flags and counts the bad extents; `base` is where the launch's layout begins on the device."""
        at = launch.layout
        segments = (at.extents, at.extent_of, at.nodes)
        self._call("blake3_segments", launch.segments, SEGMENT_THREADS, base, segments, stream)
        extents = (at.extents, at.nodes, at.expected, at.results, at.bad_count)
        self._call("blake3_extents", launch.count, JOIN_THREADS, base, extents, stream)

    def crc64(self, launch: Launch, base: int, stream: cuda.Stream) -> None:
        """Writes the remainder of each extent."""
        at = launch.layout
        segments = (at.extents, at.extent_of, at.nodes)
        self._call("crc64_segments", launch.segments, SEGMENT_THREADS, base, segments, stream)
        self._call(
            "crc64_extents", launch.count, JOIN_THREADS, base, (at.extents, at.nodes, at.results), stream
        )

    def _call(
        self, name: str, blocks: int, threads: int, base: int, places: Sequence[int], stream: cuda.Stream
    ) -> None:
        addresses = [np.uint64(base + place) for place in places]
        self._functions[name](*addresses, grid=(blocks, 1), block=(threads, 1, 1), stream=stream)


class DeviceHasher:
    """A Hasher of the memory of one device. Any thread may use it, one call runs at a time; close it.

    `after`, if given, is called before each launch, in the caller's thread, with the handle of our stream:
    it makes that stream wait for whoever writes the extents. Without it our stream is ordered with the
    legacy default stream alone, which is torch's unless the program chose another.

    Fields: those that begin with `_` belong to the thread that holds `_lock`. `_keeper` is the one thread
    that takes and gives back the primary context: PyCUDA leaves it pushed on the thread that gives it back.
    """

    def __init__(self, ordinal: int = 0, after: Callable[[int], None] | None = None) -> None:
        """Unsupported: no PyCUDA, driver or device, or one too old; InvalidRequest: no device `ordinal`."""
        self.device = f"cuda:{ordinal}"
        self._cuda = driver()
        self._after = after
        self._lock = threading.RLock()
        self._keeper = ThreadPoolExecutor(1, "ckptfs-cuda-context")
        self._context: cuda.Context | None = None
        self._stream: cuda.Stream | None = None
        self._kernels: Kernels | None = None
        self._scratch: cuda.DeviceAllocation | None = None
        self._scratch_bytes = 0
        self._buffers: list[DoubleBuffer] = []
        try:
            self._open(ordinal)
        except BaseException:
            self.close()
            raise

    def _open(self, ordinal: int) -> None:
        with self._answering():
            count = self._cuda.Device.count()
            if not 0 <= ordinal < count:
                raise InvalidRequest(f"there is no {self.device}: this machine has {count} CUDA device(s)")
            self._context = self._keeper.submit(self._cuda.Device(ordinal).retain_primary_context).result()
        with self.current():
            self._stream = self._cuda.Stream()
            try:
                self._kernels = Kernels(self._cuda)
            except self._cuda.Error as error:
                _let_go(error)
                raise Unsupported(
                    f"{self.device} refuses the kernels ({_line(error)}): they need compute capability 8.0 "
                    "and driver 580 or newer; update the driver, or use the CPU"
                ) from None

    def close(self) -> None:
        """Frees all that was taken of the device. Afterwards no other call is allowed. Raises nothing."""
        with self._lock:
            if self._context is not None:
                self._keeper.submit(self._free).result()
            self._keeper.shutdown()

    def _free(self) -> None:
        """PyCUDA frees what nobody refers to any more, in the context that is current."""
        assert self._context is not None, "the hasher is open"
        try:
            self._context.push()
        except self._cuda.Error:
            # The device is beyond use. PyCUDA would end the process if it failed to push the context itself,
            # but only warns about what was in a context that has been given back.
            self._context.detach()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._drop()
        else:
            self._settle()
            self._drop()
            self._cuda.Context.pop()
            self._context.detach()
        self._context = None

    def _settle(self) -> None:
        """Nothing that was queued reads memory of the host any more: a call that failed half way may leave a
        copy on its way. A device that does not even answer this reads nothing."""
        if self._stream is not None:
            with suppress(self._cuda.Error):
                self._stream.synchronize()

    def _drop(self) -> None:
        if self._scratch is not None:
            self._scratch.free()
        self._scratch = self._kernels = self._stream = None
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def mismatches(self, extents: Sequence[Extent]) -> list[int]:
        """As Hasher says. One number comes back from the device, and the flags if it is not zero."""
        if not extents:
            return []
        launch = plan(extents)
        with self.current():
            base = self._upload(launch)
            assert self._kernels is not None, "the hasher is open"
            self._kernels.blake3(launch, base, self._stream)
            if not self._download(base + launch.layout.bad_count, 4).any():
                return []
            flags = self._download(base + launch.layout.results, launch.count)
            return [int(index) for index in np.flatnonzero(flags)]

    def crc64(self, extents: Sequence[Extent]) -> list[int]:
        """As Hasher says."""
        if not extents:
            return []
        launch = plan(extents)
        with self.current():
            base = self._upload(launch)
            assert self._kernels is not None, "the hasher is open"
            self._kernels.crc64(launch, base, self._stream)
            remainders = (
                self._download(base + launch.layout.results, 8 * launch.count).view(np.uint64).tolist()
            )
        return [from_remainder(rest, extent.length) for rest, extent in zip(remainders, extents, strict=True)]

    @contextmanager
    def double_buffer(self, part_bytes: int) -> Iterator[DoubleBuffer]:
        """Room for parts of a file on their way to the device, until the end of the `with`."""
        with self.current():
            buffer = DoubleBuffer(self, self._cuda, part_bytes)
            self._buffers.append(buffer)
        try:
            yield buffer
        finally:
            with self.current():
                self._settle()
                self._buffers.remove(buffer)
                buffer.free()

    def copy_to_device(self, address: int, source: NDArray[np.uint8]) -> None:
        """Queues a copy, which is done before anything that is asked of the hasher from now on.

        `source` is pinned and stays as it is until that has been answered.
        """
        with self.current():
            self._cuda.memcpy_htod_async(address, source, self._stream)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """A failure of the device becomes Unavailable, in one line."""
        try:
            yield
        except (self._cuda.Error, self._cuda.MemoryError) as error:
            raise Unavailable(
                f"{self.device} failed ({_line(error)}): free memory on it or reset it, and try again, "
                "or use the CPU"
            ) from None

    @contextmanager
    def current(self) -> Iterator[cuda.Context]:
        """The device's primary context, current in this thread; no other thread is let in. May be nested."""
        with self._lock, self._answering():
            assert self._context is not None, "the hasher is open"
            self._context.push()
            try:
                yield self._context
            except BaseException as error:
                _let_go(error)
                raise
            finally:
                self._cuda.Context.pop()

    def _upload(self, launch: Launch) -> int:
        """Queues the launch's upload; returns the address of its layout on the device."""
        if self._scratch_bytes < launch.layout.size:
            if self._scratch is not None:
                self._scratch.free()
            self._scratch = None
            self._scratch_bytes = 0
            self._scratch = self._cuda.mem_alloc(launch.layout.size)
            self._scratch_bytes = launch.layout.size
        assert self._stream is not None, "the hasher is open"
        if self._after is not None:
            self._after(self._stream.handle)
        assert self._scratch is not None, "it has been allocated"
        base = int(self._scratch)
        self._cuda.memcpy_htod_async(base, launch.upload, self._stream)
        return base

    def _download(self, address: int, size: int) -> NDArray[np.uint8]:
        """Waits for all that was queued."""
        assert self._stream is not None, "the hasher is open"
        target = np.empty(size, np.uint8)
        self._cuda.memcpy_dtoh_async(target, address, self._stream)
        self._stream.synchronize()
        return target


class DoubleBuffer:
    """Two halves of pinned host memory, each with as much of the device's; the hasher owns both.

    While the hasher looks at one half, another thread may fill the other: fill `host(half)`, `send(half, …)`,
    ask the hasher about the address that this returns, and only then fill that half again.
    """

    def __init__(self, hasher: DeviceHasher, cuda: ModuleType, part_bytes: int) -> None:
        """Called with the hasher's context current, as `free` is."""
        self._hasher = hasher
        self._host = [cuda.pagelocked_empty(part_bytes, np.uint8) for _ in range(2)]
        self._device = [cuda.mem_alloc(part_bytes) for _ in range(2)]

    def host(self, half: int) -> memoryview:
        """The half 0 or 1, writable; valid until the buffer is freed."""
        return memoryview(self._host[half])

    def send(self, half: int, size: int) -> int:
        """Queues the copy of the first `size` bytes of a half; returns their address on the device."""
        address = int(self._device[half])
        self._hasher.copy_to_device(address, self._host[half][:size])
        return address

    def free(self) -> None:
        """Also while somebody still refers to a half; no copy of one is on its way any more."""
        while self._host:
            self._host.pop().base.free()
        while self._device:
            self._device.pop().free()


def _let_go(error: BaseException) -> None:
    """What the frames of a failed call hold of the device is freed here, where the context is current."""
    traceback.clear_frames(error.__traceback__)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
