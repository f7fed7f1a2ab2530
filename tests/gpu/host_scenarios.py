"""The host code, run by unmodified PyCUDA over the fake driver: one scenario a process.

    host_scenarios.py NAME

Ends with 0 and says nothing if all is as it should be; PyCUDA's warnings about clean-up go to stderr too.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from fake_driver import Alive, FakeDriver

from ckptfs.gpu.device import DeviceHasher
from ckptfs.gpu.extents import Extent
from ckptfs.gpu.fatbin import load_fatbin
from ckptfs.store.errors import CkptfsError, InvalidRequest, Unavailable, Unsupported
from ckptfs.store.hashing import chunk_id, crc64

NOTHING = Alive(0, 1, 0, 0, 0, 0, 0, 0, 0)
_OUT_OF_MEMORY, _LAUNCH_FAILED = 2, 719
_PAYLOAD = random.Random(6).randbytes(300_000)
_RANGES = ((0, 300_000), (3, 0), (5, 1000), (16, 4096), (131, 131_073))


class Memory:
    """Some of the device's, taken and given back by the driver's own functions; holds `payload`."""

    def __init__(self, driver: FakeDriver, payload: bytes) -> None:
        self._library = driver.library
        self._context = ctypes.c_void_p()
        address = ctypes.c_uint64()
        self._must(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0))
        with self._current():
            self._must(self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(len(payload))))
            self.address = int(address.value)
            self.write(0, payload)

    def write(self, offset: int, payload: bytes, stream: int = 0) -> None:
        """A copy in a stream. The context has to be current in the caller's thread, if there is a stream."""
        target = ctypes.c_uint64(self.address + offset)
        copy = self._library.cuMemcpyHtoDAsync_v2
        self._must(copy(target, payload, ctypes.c_size_t(len(payload)), ctypes.c_void_p(stream)))

    def free(self) -> None:
        with self._current():
            self._must(self._library.cuMemFree_v2(ctypes.c_uint64(self.address)))
        self._must(self._library.cuDevicePrimaryCtxRelease_v2(0))

    @contextmanager
    def _current(self) -> Iterator[None]:
        popped = ctypes.c_void_p()
        self._must(self._library.cuCtxPushCurrent_v2(self._context))
        yield
        self._must(self._library.cuCtxPopCurrent_v2(ctypes.byref(popped)))

    current = _current

    @staticmethod
    def _must(code: int) -> None:
        assert code == 0, f"the driver said {code}"


def extents_at(address: int) -> list[Extent]:
    return [Extent(address + at, size, chunk_id(_PAYLOAD[at : at + size])) for at, size in _RANGES]


def answers(driver: FakeDriver) -> None:
    """Right answers in every order of threads, and one number back from the device if all is well."""
    for order in range(3):
        driver.reset(order=order)
        memory = Memory(driver, _PAYLOAD)
        extents = extents_at(memory.address)
        with DeviceHasher() as hasher:
            assert hasher.device == "cuda:0"
            before = driver.downloaded()
            assert hasher.mismatches(extents) == []
            assert driver.downloaded() - before == 4
            assert hasher.crc64(extents) == [crc64(_PAYLOAD[at : at + size]) for at, size in _RANGES]
            with memory.current():
                memory.write(1003, bytes([_PAYLOAD[1003] ^ 1]))
            before = driver.downloaded()
            assert hasher.mismatches(extents) == [0, 2, 3, 4]
            assert driver.downloaded() - before == 4 + len(extents)
            assert hasher.mismatches([]) == [] and hasher.crc64([]) == []
        memory.free()
        assert driver.complaint() == ""


def the_fatbin_is_the_shipped_one(driver: FakeDriver) -> None:
    with DeviceHasher():
        pass
    assert driver.image() == load_fatbin()


def nothing_is_left(driver: FakeDriver) -> None:
    """Call by call: no context stays current, and one piece of memory serves all calls."""
    memory = Memory(driver, _PAYLOAD)
    for _ in range(3):
        hasher = DeviceHasher()
        for count in (1, 3, 200, 2):
            assert hasher.mismatches(extents_at(memory.address)[2:4] * count) == []
            alive = driver.alive()
            assert (alive.depth, alive.modules, alive.streams, alive.device_memory) == (0, 1, 1, 2)
            assert alive.pending == 0
        hasher.close()
    memory.free()


def beside_torch(driver: FakeDriver) -> None:
    """Somebody else has the primary context, and has made it current: it stays so, and there is one."""
    memory = Memory(driver, _PAYLOAD)
    with memory.current():
        before = driver.alive()
        with DeviceHasher() as hasher:
            assert hasher.mismatches(extents_at(memory.address)) == []
            assert driver.alive().depth == before.depth == 1
        assert driver.alive().retained == before.retained
        assert driver.alive().depth == before.depth
    memory.free()


def in_any_thread(driver: FakeDriver) -> None:
    memory = Memory(driver, _PAYLOAD)
    hasher = DeviceHasher()
    found: list[object] = []

    def in_a_thread(work: Callable[[], object]) -> None:
        def run() -> None:
            found.append(work())
            found.append(driver.alive().depth)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    extents = extents_at(memory.address)
    in_a_thread(lambda: hasher.mismatches(extents))
    in_a_thread(lambda: hasher.mismatches(extents * 4))
    in_a_thread(hasher.close)
    assert found == [[], 0, [], 0, None, 0]
    memory.free()


def waits_for_who_writes(driver: FakeDriver) -> None:
    """The bytes come by another stream, and that stream is late: `after` has to hold ours back."""
    memory = Memory(driver, bytes(len(_PAYLOAD)))
    extents = extents_at(memory.address)
    library, stream = driver.library, ctypes.c_void_p()
    with memory.current():
        assert library.cuStreamCreate(ctypes.byref(stream), 1) == 0

    def write_late() -> None:
        with memory.current():
            memory.write(0, bytes(len(_PAYLOAD)))
            memory.write(0, _PAYLOAD, stream.value or 0)

    def after(ours: int) -> None:
        event = ctypes.c_void_p()
        assert library.cuEventCreate(ctypes.byref(event), 2) == 0
        assert library.cuEventRecord(event, stream) == 0
        assert library.cuStreamWaitEvent(ctypes.c_void_p(ours), event, 0) == 0
        assert library.cuEventDestroy_v2(event) == 0

    write_late()
    with DeviceHasher() as unordered:
        assert unordered.mismatches(extents) == [0, 2, 3, 4], "the fake driver is as late as it may be"
    with DeviceHasher(after=after) as hasher:
        write_late()
        assert hasher.mismatches(extents) == []
        write_late()
        assert hasher.crc64(extents[:1]) == [crc64(_PAYLOAD)]
    with memory.current():
        assert library.cuStreamDestroy_v2(stream) == 0
    memory.free()


def after_may_raise(driver: FakeDriver) -> None:
    def after(ours: int) -> None:
        raise KeyError("no such stream")

    with DeviceHasher(after=after) as hasher:
        try:
            hasher.mismatches([Extent(0, 0, chunk_id(b""))])
        except KeyError:
            assert driver.alive().depth == 0
            return
    raise AssertionError("the error got lost")


def any_call_may_fail(driver: FakeDriver) -> None:
    """Whatever the driver refuses: one line that says so, nothing left behind, and the next try works."""
    memory = Memory(driver, _PAYLOAD)
    extents = extents_at(memory.address)
    extents[1] = Extent(extents[1].address, 7, chunk_id(b""))
    names = set()
    for code in (_OUT_OF_MEMORY, _LAUNCH_FAILED):
        call = 0
        while True:
            driver.reset()
            held = driver.alive()
            driver.fail(call, code)
            try:
                with DeviceHasher() as hasher, hasher.double_buffer(4096) as buffer:
                    buffer.send(0, 4096)
                    bad = hasher.mismatches(extents)
                    hasher.crc64(extents)
            except CkptfsError as error:
                assert isinstance(error, Unavailable | Unsupported), error
                assert "\n" not in str(error) and str(code) in str(error), error
                assert driver.failed() in str(error), (driver.failed(), error)
            else:
                # Giving back what is no longer needed may fail without a word.
                assert bad == [1] and driver.failed() in ("", "cuCtxPushCurrent", "cuStreamSynchronize"), (
                    bad,
                    driver.failed(),
                )
            if not driver.failed():
                break
            names.add(driver.failed())
            assert driver.complaint() == "", (driver.failed(), driver.complaint())
            # Without a context nothing can be freed but the context itself.
            if driver.failed() == "cuCtxPushCurrent":
                driver.forget(memory.address)
            left = vars_of(driver.alive())
            assert left == {**vars_of(held), "most_retained": left["most_retained"]}, (
                driver.failed(),
                left,
                held,
            )
            call += 1
    expected = {
        "cuInit",
        "cuMemAlloc",
        "cuMemHostAlloc",
        "cuModuleLoadDataEx",
        "cuLaunchKernel",
        "cuStreamSynchronize",
    }
    assert expected <= names, names
    driver.reset()
    memory.free()


def vars_of(alive: Alive) -> dict[str, int]:
    return {name: getattr(alive, name) for name in Alive.__dataclass_fields__}


def a_fault_on_the_device(driver: FakeDriver) -> None:
    """A tensor that was freed meanwhile: the device stops the kernel, and the message says what to do."""
    with DeviceHasher() as hasher:
        try:
            hasher.mismatches([Extent(64, 1000, chunk_id(b""))])
        except Unavailable as error:
            assert str(error).startswith("cuda:0 failed (") and "CPU" in str(error)
        else:
            raise AssertionError("the kernel read memory that is not there")
    assert "a load out of bounds" in driver.complaint()


def no_device(driver: FakeDriver) -> None:
    driver.reset(devices=0)
    try:
        DeviceHasher()
    except Unsupported as error:
        assert "the NVIDIA driver finds no device" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("a hasher without a device")
    driver.reset(devices=2)
    for ordinal in (2, -1):
        try:
            DeviceHasher(ordinal)
        except InvalidRequest as error:
            assert str(error) == f"there is no cuda:{ordinal}: this machine has 2 CUDA device(s)"
        else:
            raise AssertionError("a hasher of a device that is not there")


def parts_of_a_file(driver: FakeDriver) -> None:
    """Each half is filled while the other is hashed; every part arrives whole."""
    part = 70_000
    with DeviceHasher() as hasher, hasher.double_buffer(part) as buffer:
        assert driver.alive().host_memory == 2
        for number, start in enumerate(range(0, len(_PAYLOAD), part)):
            payload = _PAYLOAD[start : start + part]
            half = number % 2
            view = buffer.host(half)
            assert len(view) == part
            view[: len(payload)] = payload
            address = buffer.send(half, len(payload))
            other = np.frombuffer(buffer.host(1 - half), np.uint8)
            other[:] = 0
            wanted = [
                Extent(address, len(payload), chunk_id(payload)),
                Extent(address, 5, chunk_id(b"other")),
            ]
            assert hasher.mismatches(wanted) == [1]
        del view, other


def a_copy_is_on_its_way(driver: FakeDriver) -> None:
    """Whoever gives up between sending a half and asking about it leaves no copy that still reads it."""
    with DeviceHasher() as hasher:
        try:
            with hasher.double_buffer(4096) as buffer:
                buffer.send(1, 4096)
                assert driver.alive().pending == 1
                raise KeyError
        except KeyError:
            pass
        assert driver.complaint() == ""


SCENARIOS: dict[str, Callable[[FakeDriver], None]] = {
    each.__name__: each
    for each in (
        answers,
        the_fatbin_is_the_shipped_one,
        nothing_is_left,
        beside_torch,
        in_any_thread,
        waits_for_who_writes,
        after_may_raise,
        any_call_may_fail,
        a_fault_on_the_device,
        no_device,
        parts_of_a_file,
        a_copy_is_on_its_way,
    )
}


def main() -> int:
    driver = FakeDriver()
    SCENARIOS[sys.argv[1]](driver)
    left = vars_of(driver.alive())
    assert left == {**vars_of(NOTHING), "most_retained": left["most_retained"]}, left
    return 0


if __name__ == "__main__":
    sys.exit(main())
