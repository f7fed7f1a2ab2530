"""Which format a file has, and its layout.

One rule: the first bytes decide. A name alone tells only that an empty or zero-filled file, or one
whose header is ruined, was meant to be a tensor file, so that its damage can be reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from ckptfs.store.formats import dcp, dcp_metadata, gguf, safetensors, torch_legacy, torch_zip
from ckptfs.store.formats.layout import Layout, Reader

PROBE_BYTES: Final = 64
_SUFFIXES: Final = {
    ".safetensors": safetensors.NAME,
    ".distcp": dcp.NAME,
    ".gguf": gguf.NAME,
    ".pt": torch_zip.NAME,
    ".pth": torch_zip.NAME,
    ".ckpt": torch_zip.NAME,
}
_TORCH_BIN: Final = re.compile(r"(?:pytorch_model|adapter_model|optimizer|scheduler|training_args).*\.bin")


def probe_format(first_bytes: bytes, name: str) -> str | None:
    """Return the format that a file seems to have, from its first (at most 64) bytes and its name.

    Cheap and without a proof: it tells a checkpoint that is being written from a log. A file that
    is still empty or zero is what its name says; otherwise only the bytes count.
    """
    base = name.rpartition("/")[2]
    first_bytes = first_bytes[:PROBE_BYTES]
    if not first_bytes.strip(b"\0"):
        return _format_by_name(base)
    if dcp_metadata.is_commit_name(base):
        return dcp.NAME if dcp_metadata.recognise(first_bytes) else None
    if torch_zip.recognise(first_bytes):
        return dcp.NAME if base.endswith(dcp.SUFFIX) else torch_zip.NAME
    recognisers = (safetensors, gguf, torch_legacy)
    return next((one.NAME for one in recognisers if one.recognise(first_bytes)), None)


def parse(reader: Reader, name: str, sibling: Callable[[str], Reader | None] | None = None) -> Layout | None:
    """Return where the tensors of a file lie, or None when its format is unknown (opaque).

    `name` is the file's name or path. `sibling` opens another file of the same directory by name
    (a DCP shard's tensor names stand in `.metadata`) and may return None. Broken and hostile
    input ends as None or as a layout with damage. Time and memory are linear in the header, whose
    size is bounded. Raises only what the reader raises.
    """
    base = name.rpartition("/")[2]
    first = reader.pread(0, PROBE_BYTES)
    if not first.strip(b"\0"):
        return _blank(reader, base)
    if dcp_metadata.is_commit_name(base):
        return dcp.parse_metadata(reader) if dcp_metadata.recognise(first) else None

    def archives() -> Layout | None:
        return (
            dcp.parse_shard(reader, base, sibling) if base.endswith(dcp.SUFFIX) else torch_zip.parse(reader)
        )

    layout = _parse_by_bytes(reader, first, archives)
    if layout is None and base.endswith(".safetensors"):
        return Layout(safetensors.NAME, (), "does not begin with a safetensors header")
    return layout


def parse_content(reader: Reader) -> Layout | None:
    """Return where the tensors of a file lie by its bytes alone; None when their format is unknown.

    For what is kept with a content: the answer is the same whatever the file is called and lies beside.
    Input, time, memory and errors are as for `parse`.
    """
    first = reader.pread(0, PROBE_BYTES)

    def archives() -> Layout | None:
        return dcp.parse_row(reader) or torch_zip.parse(reader)

    return _parse_by_bytes(reader, first, archives)


def _parse_by_bytes(reader: Reader, first: bytes, archives: Callable[[], Layout | None]) -> Layout | None:
    """`archives` parses what has no header of its own."""
    if safetensors.recognise(first):
        return safetensors.parse(reader)
    if gguf.recognise(first):
        return gguf.parse(reader)
    if torch_legacy.recognise(first):
        return torch_legacy.parse(reader)
    return archives()


def _format_by_name(base: str) -> str | None:
    if dcp_metadata.is_commit_name(base):
        return dcp.NAME
    if _TORCH_BIN.fullmatch(base):
        return torch_zip.NAME
    return next((kind for suffix, kind in _SUFFIXES.items() if base.endswith(suffix)), None)


def _blank(reader: Reader, base: str) -> Layout | None:
    kind = _format_by_name(base)
    if kind is None:
        return None
    return Layout(kind, (), "is empty" if reader.size == 0 else "begins with zeros")
