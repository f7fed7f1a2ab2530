"""The kernels as they are shipped: one fatbin, and the record of what it was made from.

One rule: a fatbin that was not made from the source beside it is never given to a device.

Source: the container's layout as `cuobjdump` shows it and the driver reads it (16 bytes of header, then
entries: u16 kind, u16 version, u32 header bytes, u64 payload bytes, …, u32 architecture at byte 28);
ELF-64 for machine code; PTX text for what is compiled by a newer device's driver.
"""

from __future__ import annotations

import re
import struct
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

from ckptfs.store.errors import Corrupt
from ckptfs.store.hashing import chunk_id

KERNELS = ("blake3_extents", "blake3_segments", "crc64_extents", "crc64_segments")
TARGETS = ("compute_80", "sm_80", "sm_90", "sm_100")
SOURCES = ("blake3.cu", "crc64.cu", "kernels.cu", "load.cuh")
FATBIN = "kernels.fatbin"
RECORD = "kernels.json"

_MAGIC = 0xBA55ED50
_FILE = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")
_PTX, _ELF = 1, 2
_ELF_MAGIC = b"\x7fELF\x02\x01"


class Usage(msgspec.Struct, frozen=True):
    """What the compiler says that one kernel needs on one target."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


class Record(msgspec.Struct, frozen=True):
    """Stands beside the fatbin. Digests are BLAKE3-256 in hex; usage is by target and kernel."""

    compiler: str
    sources: dict[str, str]
    fatbin: str
    usage: dict[str, dict[str, Usage]]


def folder() -> Traversable:
    """Where source, fatbin and record lie."""
    return resources.files("ckptfs.gpu").joinpath("native")


def digests(source: Traversable) -> dict[str, str]:
    """The digest of each source in a folder."""
    return {name: chunk_id(source.joinpath(name).read_bytes()).hex() for name in SOURCES}


def load_fatbin() -> bytes:
    """The shipped fatbin; Corrupt if it, or its source, is not what the record says."""
    try:
        record = msgspec.json.decode(folder().joinpath(RECORD).read_bytes(), type=Record)
        fatbin = folder().joinpath(FATBIN).read_bytes()
        made_of_these = record.sources == digests(folder())
    except (OSError, msgspec.MsgspecError) as error:
        raise Corrupt(f"the installed GPU kernels are incomplete ({error}): install ckptfs again") from None
    if not made_of_these or chunk_id(fatbin).hex() != record.fatbin:
        raise Corrupt(
            f"the installed GPU kernels ({FATBIN}) were not made from the source beside them: install ckptfs "
            "again, or make them anew with python -m ckptfs.gpu.build_fatbin"
        )
    return fatbin


def entry_points(fatbin: bytes) -> dict[str, list[str]]:
    """The kernels by target ("sm_90" is machine code, "compute_80" PTX); Corrupt if it is no fatbin."""
    try:
        magic, _, header_bytes, size = _FILE.unpack_from(fatbin, 0)
        if magic != _MAGIC or header_bytes + size != len(fatbin):
            raise Corrupt("not a fatbin: its header does not fit it")
        found: dict[str, list[str]] = {}
        at = header_bytes
        while at < len(fatbin):
            kind, _, entry_bytes, payload_bytes, *_, target = _ENTRY.unpack_from(fatbin, at)
            if entry_bytes < _ENTRY.size:
                raise Corrupt("not a fatbin: an entry's header is too short")
            payload = fatbin[at + entry_bytes : at + entry_bytes + payload_bytes]
            name = f"compute_{target}" if kind == _PTX else f"sm_{target}"
            found[name] = _of_ptx(payload) if kind == _PTX else _of_elf(payload)
            at += entry_bytes + payload_bytes
        return found
    except struct.error as error:
        raise Corrupt(f"not a fatbin: {error}") from None


def _of_ptx(text: bytes) -> list[str]:
    return sorted(name.decode() for name in re.findall(rb"\.visible \.entry (\w+)\(", text))


def _of_elf(image: bytes) -> list[str]:
    """The names behind ".text." of the sections: machine code has one for each kernel."""
    if not image.startswith(_ELF_MAGIC):
        raise Corrupt("a fatbin with an entry that is not ELF")
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 58)
    names_at, names_bytes = struct.unpack_from("<QQ", image, table + names_index * entry_bytes + 24)
    names = image[names_at : names_at + names_bytes]
    starts = [struct.unpack_from("<I", image, table + index * entry_bytes)[0] for index in range(count)]
    sections = [names[start : names.find(b"\0", start)].decode("ascii", "replace") for start in starts]
    return sorted(name.removeprefix(".text.") for name in sections if name.startswith(".text."))
