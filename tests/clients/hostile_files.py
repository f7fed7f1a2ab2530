"""Files that somebody made to hurt whoever reads their headers, by the format that they pretend to be.

The one rule: each is made from bytes here, without the framework that it imitates, and all are deterministic.
A pickle that would run a command names the marker file that the command would make.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

MIB = 1 << 20
JSON_BYTES = 30 * MIB
TORCH_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
DCP_GLOBAL = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
Unit = Mapping[str, bytes]
"""The files of a run directory by their path in it."""


def running_pickles(marker: Path) -> dict[str, bytes]:
    """Pickles that make `marker` when they are loaded, each by another opcode."""
    command = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w').close()"
    text = command.encode()
    short = b"\x8c" + bytes([len(text)]) + text
    long = b"X" + struct.pack("<I", len(text)) + text

    class Reduced:
        def __reduce__(self) -> tuple[object, ...]:
            return exec, (python,)

    assert len(text) < 256
    return {
        "global": b"cos\nsystem\n(V" + text + b"\ntR.",
        "reduce": pickle.dumps(Reduced(), 2),
        "stack-global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + short + b"\x85R.",
        "inst": b"(S'" + text + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\n" + long + b"o.",
        "in-a-dict": b"\x80\x02}U\x01acos\nsystem\n" + long + b"\x85Rs.",
        "after-a-step": b"\x80\x02}(U\x0bglobal_stepK\x07U\x01acos\nsystem\n" + long + b"\x85Ru.",
    }


def torch_zip(pickled: bytes, *, tensor: bytes = bytes(400)) -> bytes:
    """An archive as torch.save makes one, around any pickle."""
    records = {"data.pkl": pickled, "byteorder": b"little", "data/0": tensor, "version": b"3\n"}
    return plain_zip({f"archive/{name}": content for name, content in records.items()})


def plain_zip(records: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def torch_legacy(pickled: bytes) -> bytes:
    """A file as torch.save made one before 1.6, around any pickle."""
    system = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)
    return TORCH_MAGIC + pickle.dumps(1001, 2) + system + pickled + pickle.dumps([], 2)


def safetensors(header: object, data: bytes, *, length: int | None = None) -> bytes:
    """A header (JSON text or what becomes it) with its length, or with one that lies."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def gguf(tensors: int, pairs: int, body: bytes) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, pairs) + body


def gguf_row(name: bytes, size: int, offset: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, size, 24, offset)


def pickle_units(marker: Path) -> dict[str, Unit]:
    """Every running pickle wherever the daemon looks into one."""
    units: dict[str, Unit] = {}
    for kind, pickled in running_pickles(marker).items():
        units[f"bare-{kind}"] = {
            "optimizer.pt": pickled,
            "training_args.bin": pickled,
            "rng_state.pth": pickled,
        }
        units[f"zip-{kind}"] = {"model.pt": torch_zip(pickled)}
        units[f"legacy-{kind}"] = {"model.pt": torch_legacy(pickled)}
        dcp = DCP_GLOBAL + pickled.removeprefix(b"\x80\x02").removeprefix(b"\x80\x04")
        units[f"dcp-{kind}"] = {"step-1/.metadata": dcp[:-1], "step-1/__0_0.distcp": torch_zip(pickled)}
    return units


def dcp_units() -> dict[str, Unit]:
    """A `.metadata` that says nothing of any shard: too short, or written over in its middle."""
    whole = DCP_GLOBAL + b")\x81}U\x0cstorage_dataU\x0d__0_0.distcpsb."
    shard = torch_zip(b"\x80\x02N.")
    texts = {"cut": whole[:-10], "zeros": whole[:60] + bytes(40) + b".", "not-a-pickle": b"x" * 500}
    return {kind: {"step-1/.metadata": text, "step-1/__0_0.distcp": shard} for kind, text in texts.items()}


def large_pickle_units() -> dict[str, Unit]:
    """Pickles that take much memory or time if somebody lets them, in files that are whole otherwise."""
    return {
        "huge-memo": {"a.pt": torch_zip(b"\x80\x04" + b"N\x94" * (MIB * 3 // 4) + b".")},
        "huge-index": {"a.pt": torch_legacy(b"\x80\x02Nr\xff\xff\xff\x7f.")},
        "doubled": {"a.pt": torch_zip(b")" + b"2\x86" * 100_000 + b".")},
        "nested": {"a.pt": torch_legacy(b"]" * (MIB // 2) + b"a" * (MIB // 2 - 1) + b".")},
        "fields": {"a.pt": torch_zip(b"}(" + b"U\x01aN" * (MIB // 4) + b"u.")},
        "long-integer": {
            "a.pt": torch_legacy(b"\x8b" + struct.pack("<i", 4 * MIB) + b"\x7f" * (4 * MIB) + b".")
        },
        "digits": {"a.pt": torch_zip(b"I" + b"9" * (4 * MIB) + b"\n.")},
        "lying-length": {"a.pt": torch_zip(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.")},
    }


def safetensors_units() -> dict[str, Unit]:
    good = safetensors({"w": entry(0, 4096)}, bytes(range(256)) * 16)
    many = {f"t{i}": entry(0, 10) for i in range(30_000)}
    nested = b'{"a":' * (JSON_BYTES // 5)
    within_marks = b'{"a":' * 700_000
    files = {
        "cut-in-data": good[:-100],
        "cut-in-header": good[:20],
        "trailing": good + b"more",
        "length-2-64": safetensors({"w": entry(0, 16)}, bytes(16), length=(1 << 64) - 1),
        "length-100m": safetensors({"w": entry(0, 16)}, bytes(16), length=100_000_000),
        "length-short": safetensors({"w": entry(0, 16)}, bytes(16), length=5),
        "beyond-the-end": safetensors({"w": entry(0, 1 << 50)}, bytes(16)),
        "negative": safetensors({"w": entry(16, 0)}, bytes(16)),
        "overlap": safetensors({"w": entry(0, 16), "v": entry(8, 24)}, bytes(24)),
        "hole": safetensors({"w": entry(0, 8), "v": entry(16, 24)}, bytes(24)),
        "all-over-each-other": safetensors(many, bytes(10)),
        "shape-overflow": safetensors({"w": {**entry(0, 8), "shape": [1 << 62] * 60}}, bytes(8)),
        "not-json": safetensors(b"{" + b"\xff" * 1000, bytes(8)),
        "nested-30-mb": safetensors(nested, bytes(8)),
        "nested-within-bounds": safetensors(within_marks, bytes(8)),
        "digits-30-mb": safetensors(b'{"w":' + b"9" * JSON_BYTES + b"}", bytes(8)),
        "zeros": bytes(5000),
        "no-header": b"not a header at all " * 100,
    }
    return {name: {"model.safetensors": content} for name, content in files.items()}


def json_units() -> dict[str, Unit]:
    """JSON beside weights that are whole, and too much of it."""
    good = safetensors({"w": entry(0, 4096)}, bytes(range(256)) * 16)
    texts = {
        "objects": b'{"a":' * (JSON_BYTES // 5),
        "deep-but-few": b'{"global_step":' + b"[" * 1_000_000,
        "cut": b'{"global_step": 5, "log_history": [',
    }
    units: dict[str, Unit] = {}
    for kind, text in texts.items():
        units[f"trainer-{kind}"] = {
            "checkpoint-5/model.safetensors": good,
            "checkpoint-5/trainer_state.json": text,
        }
        units[f"index-{kind}"] = {
            "model-00001-of-00002.safetensors": good,
            "model.safetensors.index.json": text,
        }
    return units


def zip_units() -> dict[str, Unit]:
    good = torch_zip(b"\x80\x02}.", tensor=bytes(range(256)) * 64)
    directory = good.index(b"PK\x01\x02")
    tensor_entry = good.index(b"archive/data/0", directory) - 46
    files = {
        "cut-in-data": good[:5000],
        "cut-in-directory": good[: directory + 30],
        "cut-in-end": good[:-4],
        "trailing": good + b"x" * 70_000,
        "before": b"PK\x03\x04" + good,
        "overlapping": patched(good, tensor_entry + 42, "<I", 0),
        "beyond-the-end": patched(good, tensor_entry + 20, "<II", 1 << 31, 1 << 31),
        "local-header-lies": patched(good, good.index(b"archive/data/0") - 2, "<H", 0xFFFF),
        "directory-of-4-gb": patched(good, len(good) - 10, "<I", 0xFFFFFFFE),
        "all-entries-overlap": overlapping_zip(200_000),
        "ends-in-its-comment": good[:-2] + struct.pack("<H", 65528) + b"PK\x05\x06" * 16_382,
    }
    units: dict[str, Unit] = {name: {"model.pt": content} for name, content in files.items()}
    ends = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0, 0, 0, 0, 0)
    units["empty-archives"] = {"step-1/__0_0.distcp": ends * (4 * MIB // len(ends))}
    units["inflating"] = {"model.pt": deflated(b"archive/data.pkl", bytes(64 * MIB))}
    return units


def overlapping_zip(count: int) -> bytes:
    """So many directory entries that all have the whole archive as their payload."""
    local = torch_zip(b"\x80\x02}.")
    directory = local.index(b"PK\x01\x02")
    name = b"archive/data/0"
    size = directory - 30 - len(name)
    fixed = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, size, size, 14, 0, 0, 0, 0, 0, 0)
    body = local[directory : len(local) - 22] + (fixed + name) * count
    counted = min(count, 0xFFFE)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, counted, counted, len(body), directory, 0)
    return local[:directory] + body + end


def deflated(name: bytes, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(zipfile.ZipInfo(name.decode()), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def gguf_units() -> dict[str, Unit]:
    row = gguf_row(b"t", 64, 0)
    good = gguf(1, 0, row + bytes(-(24 + len(row)) % 32) + bytes(64))
    key = struct.pack("<Q1s", 1, b"k")
    # Four million items are the most that is looked at; behind so many strings the file just ends.
    strings = key + struct.pack("<IIQ", 9, 8, 2_100_000) + struct.pack("<Q", 0) * 2_100_000
    files = {
        "cut-in-data": good[:-30],
        "cut-in-header": good[:40],
        "trailing": good + bytes(5000),
        "tensors-2-63": gguf((1 << 63) + 5, 0, row),
        "pairs-2-63": gguf(1, (1 << 63) + 5, key + struct.pack("<IB", 0, 1)),
        "name-2-60": gguf(1, 0, struct.pack("<Q", 1 << 60) + b"x" * 100),
        "array-2-60": gguf(0, 1, key + struct.pack("<IIQ", 9, 4, 1 << 60) + bytes(100)),
        "arrays-in-arrays": gguf(0, 1, key + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 1_000_000),
        "two-million-strings": gguf(1, 1, strings),
        "alignment-0": gguf(1, 1, struct.pack("<Q17sII", 17, b"general.alignment", 4, 0) + row + bytes(200)),
        "dimensions": gguf(1, 0, struct.pack("<Q1sI", 1, b"t", 1 << 31) + bytes(200)),
        "overflow": gguf(1, 0, gguf_row(b"t", (1 << 64) - 1, 0) + bytes(200)),
        "overlapping": gguf(20_000, 0, gguf_row(b"t", 1000, 0) * 20_000 + bytes(2000)),
        "beyond-the-end": gguf(1, 0, gguf_row(b"t", 64, 1 << 50) + bytes(200)),
    }
    return {name: {"model.gguf": content} for name, content in files.items()}


def patched(content: bytes, at: int, layout: str, *values: int) -> bytes:
    """The same bytes with these numbers written over those at `at`."""
    changed = bytearray(content)
    struct.pack_into(layout, changed, at, *values)
    return bytes(changed)
