"""What only a machine with a GPU can show: one stage a call, each ends with 0 if all is as it should be.

    on_device.py vectors      answers, and flipped bits, against the packages that define them
    on_device.py rates        GB/s of BLAKE3 and CRC-64 against the copy rate of the device
    on_device.py plain_adds FATBIN   the rates of other kernels, at one size
    on_device.py torch        a bf16 model of torch's, in one context, on a stream of its own
    on_device.py processor    the same digests on the CPU

Each prints its figures as one JSON object, in one line; with --small behind it, it does the same on little
memory. `on_device.sh` runs them all, tests/gpu what can be run over the fake driver.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from kernel_cases import every_length, few_lengths

from ckptfs.gpu.crc64 import combine
from ckptfs.gpu.device import DeviceHasher, Kernels, after_torch, driver
from ckptfs.gpu.extents import Extent
from ckptfs.gpu.launch import plan
from ckptfs.store.hashing import chunk_id, crc64

if TYPE_CHECKING:
    import pycuda.driver as cuda_driver
    import torch

Figures = dict[str, object]
_GIB = 1 << 30
_SEED = 6


# ---- vectors ----


def vectors(small: bool) -> Figures:
    """Each extent in memory of its own, so that compute-sanitizer knows where it ends."""
    cuda = driver()
    rng = random.Random(_SEED)
    wanted = few_lengths(rng) if small else every_length(rng)
    payloads = [rng.randbytes(length) for length, _ in wanted]
    with DeviceHasher() as hasher, hasher.current():
        held = [cuda.mem_alloc(skew + max(length, 1)) for length, skew in wanted]
        places = [int(each) + skew for each, (_, skew) in zip(held, wanted, strict=True)]
        for place, payload in zip(places, payloads, strict=True):
            if payload:
                cuda.memcpy_htod(place, payload)
        extents = [
            Extent(place, len(load), chunk_id(load)) for place, load in zip(places, payloads, strict=True)
        ]
        assert hasher.mismatches(extents) == []
        assert hasher.crc64(extents) == [crc64(payload) for payload in payloads]
        flips = sum(_flip_some(cuda, hasher, extents, payloads, rng) for _ in range(4 if small else 100))
        for each in held:
            each.free()
    return {"vectors": len(extents), "bytes": sum(map(len, payloads)), "flipped_bits_found": flips}


def _flip_some(
    cuda: ModuleType, hasher: DeviceHasher, extents: list[Extent], payloads: list[bytes], rng: random.Random
) -> int:
    """Flips one bit each in some extents on the device; exactly they are bad, by both digests."""
    chosen = sorted(index for index in rng.sample(range(len(extents)), 12) if extents[index].length)
    restore = []
    for index in chosen:
        at = rng.choice((0, extents[index].length - 1, rng.randrange(extents[index].length)))
        address, byte = extents[index].address + at, payloads[index][at]
        cuda.memcpy_htod(address, bytes([byte ^ 1 << rng.randrange(8)]))
        restore.append((address, bytes([byte])))
    assert hasher.mismatches(extents) == chosen
    some = [extents[index] for index in chosen]
    assert all(got != crc64(payloads[index]) for got, index in zip(hasher.crc64(some), chosen, strict=True))
    for address, right in restore:
        cuda.memcpy_htod(address, right)
    return len(chosen)


# ---- rates ----


def rates(small: bool) -> Figures:
    """Medians of 20 by the device's events, without the copy of the launch's tables; and of whole calls."""
    if small:
        return _rates([64 << 10], [1 << 20], None, small)
    return _rates([256 << 10, 1 << 20, 4 << 20], [_GIB, 8 * _GIB, 32 * _GIB], None, small)


def plain_adds(small: bool) -> Figures:
    """The same of the kernels in the file that is named on the command line."""
    fatbin = Path(sys.argv[2]).read_bytes()
    return (
        _rates([64 << 10], [1 << 20], fatbin, small)
        if small
        else _rates([256 << 10], [8 * _GIB], fatbin, small)
    )


def _rates(chunks: list[int], totals: list[int], fatbin: bytes | None, small: bool) -> Figures:
    cuda = driver()
    period = min(64 << 20, totals[-1])
    payload = random.Random(_SEED).randbytes(period)
    figures: Figures = {"device": cuda.Device(0).name(), "runs": _runs(small)}
    with DeviceHasher() as hasher, hasher.current():
        held = cuda.mem_alloc(totals[-1])
        # Random bytes: a chip computes faster on zeros. They repeat, so that the CPU need not hash it all.
        cuda.memcpy_htod(held, payload)
        for at in range(period, totals[-1], period):
            cuda.memcpy_dtod(int(held) + at, held, period)
        rows = []
        for chunk in chunks:
            ids = [chunk_id(payload[at : at + chunk]) for at in range(0, period, chunk)]
            for total in totals:
                count = total // chunk
                extents = [Extent(int(held) + n * chunk, chunk, ids[n % len(ids)]) for n in range(count)]
                row = _row(cuda, hasher, extents, Kernels(cuda, fatbin), small)
                rows.append({"chunk_KiB": chunk >> 10, "total_MiB": total >> 20, **row})
        figures["rows"] = rows
        figures["copy"] = _copy_rate(cuda, int(held), totals[-1], small)
        held.free()
    return figures


def _row(
    cuda: ModuleType, hasher: DeviceHasher, extents: list[Extent], kernels: Kernels, small: bool
) -> Figures:
    total = sum(extent.length for extent in extents)
    launch = plan(extents)
    stream = cuda.Stream()
    scratch = cuda.mem_alloc(launch.layout.size)
    cuda.memcpy_htod(scratch, launch.upload)
    blake3 = _median_ms(cuda, stream, small, lambda: kernels.blake3(launch, int(scratch), stream))
    bad = np.empty(1, np.uint32)
    cuda.memcpy_dtoh(bad, int(scratch) + launch.layout.bad_count)
    assert bad[0] == 0, "what was timed is right"
    crc = _median_ms(cuda, stream, small, lambda: kernels.crc64(launch, int(scratch), stream))
    scratch.free()
    started = time.perf_counter()
    assert hasher.mismatches(extents) == []
    call_ms = 1e3 * (time.perf_counter() - started)
    speeds = {
        "blake3_GBps": total / blake3 / 1e6,
        "crc64_GBps": total / crc / 1e6,
        "call_GBps": total / call_ms / 1e6,
    }
    return {**{name: round(speed, 1) for name, speed in speeds.items()}, "blake3_ms": blake3, "crc64_ms": crc}


def _copy_rate(cuda: ModuleType, held: int, size: int, small: bool) -> Figures:
    """One half onto the other: GB/s of what is copied; the memory moves twice as much."""
    stream = cuda.Stream()
    half = min(size // 2, 8 * _GIB)
    took = _median_ms(cuda, stream, small, lambda: cuda.memcpy_dtod_async(held + half, held, half, stream))
    return {
        "copied_GBps": round(half / took / 1e6, 1),
        "read_and_written_GBps": round(2 * half / took / 1e6, 1),
    }


def _runs(small: bool) -> int:
    return 2 if small else 20


def _median_ms(
    cuda: ModuleType, stream: cuda_driver.Stream, small: bool, work: Callable[[], object]
) -> float:
    for _ in range(1 if small else 3):
        work()
    events = [cuda.Event() for _ in range(_runs(small) + 1)]
    events[0].record(stream)
    for event in events[1:]:
        work()
        event.record(stream)
    stream.synchronize()
    return statistics.median(float(later.time_since(earlier)) for earlier, later in pairwise(events))


# ---- torch ----


def with_torch(small: bool) -> Figures:
    """A bf16 model, made and changed on a stream of torch's own, and hashed in torch's context at once."""
    import ctypes

    import torch

    width, layers = (256, 2) if small else (8192, 16)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.manual_seed(_SEED)
    with torch.cuda.stream(side):
        made = (torch.nn.Linear(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(layers))
        model = torch.nn.Sequential(*made)
    side.synchronize()
    tensors = [parameter.detach() for parameter in model.parameters()]
    extents, sums = [], []
    for tensor in tensors:
        raw = tensor.cpu().view(torch.uint8).numpy().reshape(-1).tobytes()
        pieces = [(at, raw[at : at + (256 << 10)]) for at in range(0, len(raw), 256 << 10)]
        extents += [Extent(tensor.data_ptr() + at, len(piece), chunk_id(piece)) for at, piece in pieces]
        sums.append((crc64(raw), len(raw), raw[:64]))
    current = ctypes.c_void_p()
    with DeviceHasher(0, after_torch(0)) as hasher, torch.cuda.stream(side):
        assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(current)) == 0
        with hasher.current() as context:
            assert context.handle == current.value, "ours is torch's context"
        started = time.perf_counter()
        assert hasher.mismatches(extents) == []
        call_ms = 1e3 * (time.perf_counter() - started)
        whole = [
            Extent(tensor.data_ptr(), size, chunk_id(b""))
            for tensor, (_, size, _) in zip(tensors, sums, strict=True)
        ]
        assert hasher.crc64(whole) == [crc for crc, _, _ in sums]
        found = _changes_are_seen(torch, tensors, extents, hasher)
    model_sum = 0
    for crc, size, _ in sums:
        model_sum = combine(model_sum, crc, size)
    # Torch goes on as before in the same context.
    assert torch.isfinite(model(torch.ones(1, width, device="cuda", dtype=torch.bfloat16))).all()
    total = sum(size for _, size, _ in sums)
    return {
        "model_GB": round(total / 1e9, 2),
        "call_GBps": round(total / call_ms / 1e6, 1),
        "crc64": f"{model_sum:016x}",
        "changes_found": found,
        "contexts": 1,
    }


def _changes_are_seen(
    torch: ModuleType, tensors: list[torch.Tensor], extents: list[Extent], hasher: DeviceHasher
) -> int:
    """A kernel of torch's that is still running when we are asked writes first; ours reads afterwards."""
    for turn in range(20):
        tensor = tensors[turn % len(tensors)]
        flat = tensor.view(torch.int16).view(-1)
        at = (turn * 131_071) % flat.numel()
        torch.cuda._sleep(20_000_000)
        flat[at] ^= 1
        address = tensor.data_ptr() + 2 * at
        wanted = [n for n, each in enumerate(extents) if each.address <= address < each.address + each.length]
        assert len(wanted) == 1 and hasher.mismatches(extents) == wanted
        flat[at] ^= 1
        assert hasher.mismatches(extents) == []
    return 20


# ---- processor ----


def processor(small: bool) -> Figures:
    """The packages that define the answers, over chunks of 256 KiB: one thread, and all of them."""
    chunk, total = 256 << 10, (8 << 20) if small else 4 * _GIB
    block = random.Random(_SEED).randbytes(min(total, 256 << 20))
    views = [memoryview(block)[at : at + chunk] for at in range(0, len(block), chunk)] * (total // len(block))
    threads = os.cpu_count() or 1

    def rate(work: Callable[[memoryview], object], workers: int) -> float:
        with ThreadPoolExecutor(workers) as pool:
            started = time.perf_counter()
            for _ in pool.map(work, views, chunksize=16):
                pass
            return round(total / (time.perf_counter() - started) / 1e9, 2)

    names: dict[str, Callable[[memoryview], object]] = {"blake3": chunk_id, "crc64": crc64}
    rows = {f"{name}_{n}_threads_GBps": rate(work, n) for name, work in names.items() for n in (1, threads)}
    return {"threads": threads, **rows}


STAGES: dict[str, Callable[[bool], Figures]] = {
    "vectors": vectors,
    "rates": rates,
    "plain_adds": plain_adds,
    "torch": with_torch,
    "processor": processor,
}


def main() -> int:
    stage = sys.argv[1]
    print(json.dumps({"stage": stage, **STAGES[stage](sys.argv[-1] == "--small")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
