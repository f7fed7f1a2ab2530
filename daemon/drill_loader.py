"""Loads the files of a version on the CPU: `python -m ckptfs.daemon.drill_loader MEMORY_BYTES`.

One rule: what it reads is believed nothing. It can write no file and use no more memory than it was given;
what starts it (drill_loading.py) ends it after a time. Nothing is unpickled but by torch with weights_only.

Stdin has one path a line, as JSON. Stdout gets a LoadedFile for each, without its path, which need not be
UTF-8, and an empty line behind it; of a file whose format is not known the empty line alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ckptfs.daemon.drill_report import LoadedFile
from ckptfs.store.formats import Layout, Reader, parse

_WINDOW_BYTES = 16 << 20
_MOST_JSON_BYTES = 64 << 20
_MOST_ERROR = 500
_SIBLING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TORCH = ("torch-zip", "torch-legacy")
# A magic number, a protocol, facts of the machine, the object, the keys of its storages.
_LEGACY_PICKLES = 5


class FileReader:
    """A file as the parsers of `formats` read it. Closed by whoever opened `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the file ends."""
        return os.pread(self._fd, length, offset) if length > 0 <= offset else b""


@contextmanager
def file_reader(path: str) -> Iterator[FileReader]:
    """The file at `path`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield FileReader(fd)
    finally:
        os.close(fd)


def layout_of(path: str) -> Layout | None:
    """Where the tensors of a file lie; None if its format is not known. OSError as it comes."""
    folder = os.path.dirname(path)

    def sibling(name: str) -> Reader | None:
        try:
            fd = os.open(os.path.join(folder, name.replace("/", "_")), _SIBLING)
        except OSError:
            return None
        opened.append(fd)
        return FileReader(fd)

    opened: list[int] = []
    try:
        with file_reader(path) as reader:
            return parse(reader, path, sibling)
    finally:
        for fd in opened:
            os.close(fd)


def load(path: str) -> LoadedFile | None:
    """Load one file; None if there is nothing in it to be loaded."""
    size = os.stat(path).st_size
    if path.endswith(".json") and size <= _MOST_JSON_BYTES:
        return LoadedFile(path=path, bytes=size, loader="json", error=_said(_load_json, path))
    loader, tensors = "ckptfs", 0
    try:
        layout = layout_of(path)
        if layout is None:
            return None
        tensors = len(layout.tensors)
        if layout.damage is not None:
            return LoadedFile(path=path, bytes=size, loader=loader, tensors=tensors, error=layout.damage)
        if layout.format == "safetensors":
            loader = _load_safetensors(path) or loader
        elif layout.format in _TORCH:
            loader = _load_torch(path) or loader
        if loader == "ckptfs":
            _read_tensors(path, layout)
    except _Refused as e:
        return LoadedFile(path=path, bytes=size, loader="torch", tensors=tensors, refused=str(e))
    except Exception as e:  # whatever a library makes of hostile bytes is the file's fault
        return LoadedFile(path=path, bytes=size, loader=loader, tensors=tensors, error=_sentence(e))
    return LoadedFile(path=path, bytes=size, loader=loader, tensors=tensors)


class _Refused(Exception):
    """torch does not load it with weights_only."""


def _said(action: object, path: str) -> str | None:
    assert callable(action)
    try:
        action(path)
    except Exception as e:
        return _sentence(e)
    return None


def _load_json(path: str) -> None:
    with open(path, "rb") as file:
        json.load(file)


def _load_safetensors(path: str) -> str | None:
    """Who loaded it; None if nobody is there who can."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        return None
    load_file(path, device="cpu")
    return "safetensors"


def _load_torch(path: str) -> str | None:
    try:
        import pickle

        import torch
    except ImportError:
        return None
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        if "eights only load failed" in str(e) or "weights_only" in str(e):
            # That is said of a pickle that is broken as well.
            _walk_pickles(path)
            raise _Refused("it holds more than weights, which is not unpickled here") from None
        raise
    return "torch"


def _walk_pickles(path: str) -> None:
    """Go through a torch file's pickles, op by op, and do nothing that they say; an error if one is cut off
    or has an op that there is not."""
    import pickletools
    import zipfile

    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            for _ in range(_LEGACY_PICKLES):
                deque(pickletools.genops(file), 0)
        return
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith("/data.pkl"):
                with archive.open(name) as member:
                    deque(pickletools.genops(member), 0)


def _read_tensors(path: str, layout: Layout) -> None:
    with file_reader(path) as reader:
        for one in layout.tensors:
            for at in range(one.offset, one.end, _WINDOW_BYTES):
                length = min(_WINDOW_BYTES, one.end - at)
                if len(reader.pread(at, length)) != length:
                    raise ValueError(f"the tensor {one.name!r} ends before its end")


def _sentence(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MOST_ERROR else text[:_MOST_ERROR] + "…"


def _encoded(found: LoadedFile) -> bytes:
    def said(text: str | None) -> str | None:
        return None if text is None else text.encode("utf-8", "backslashreplace").decode()

    shown = msgspec.structs.replace(found, path="", refused=said(found.refused), error=said(found.error))
    return msgspec.json.encode(shown)


def _bound(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """See above."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries may print
    _bound(int(sys.argv[1]))
    for line in sys.stdin.buffer:
        found = load(json.loads(line))
        if found is not None:
            answers.write(_encoded(found) + b"\n")
        answers.write(b"\n")


if __name__ == "__main__":
    main()
