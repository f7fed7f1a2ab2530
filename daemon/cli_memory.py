"""Commands about tensors in memory: expect, and verify on a device.

One rule: as in cli_versions.py. A device that cannot be used ends with one line that says what to install.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptfs.daemon.cli_output import (
    AsJson,
    Failed,
    StoreDir,
    human_bytes,
    print_json,
    progress_shown,
    say,
    write_whole,
)
from ckptfs.store.errors import InvalidRequest

if TYPE_CHECKING:
    from ckptfs.daemon.messages import Progress
    from ckptfs.gpu.expected import Expectation
    from ckptfs.gpu.loading import BadPart, LoadingHasher, Read

    OnProgress = Callable[[Progress], None]


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command()(expect)


def expect(
    path: Annotated[str, typer.Argument(metavar="PATH[@VERSION]", help="A version, or something in it.")],
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write it there, not to stdout.")
    ] = None,
    ways: Annotated[
        int, typer.Option("--ways", metavar="N", help="Divide the rows of each tensor among N ranks.")
    ] = 1,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Print which bytes the tensors of a version are, as JSON: for `ckptfs.gpu.verify`, on any machine."""
    import json

    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(path, store) as (source, inner), progress_shown("expect") as on_progress:
        answer = cast("Mapping[str, object]", source.ask(messages.Expect(path=inner, ways=ways), on_progress))
    encoded = json.dumps(answer, separators=(",", ":"))
    if out is None:
        print(encoded)
        return
    write_whole(out, f"{encoded}\n".encode("ascii"))
    files = cast("Sequence[Mapping[str, Sequence[object]]]", answer["files"])
    facts = {"out": out, "files": len(files), "tensors": sum(len(file["tensors"]) for file in files)}
    if as_json:
        print_json(facts)
    else:
        say(f"{out}: {answer['name']}, {facts['tensors']} tensors in {facts['files']} files")


def verify_on_device(path: str, device: str, *, as_json: bool) -> None:
    """Load the files with tensors of a version into a device's memory and hash them there.

    They are read through the mount, as a job reads them. Failed(1) if anything is corrupt.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import locate, opened
    from ckptfs.gpu.expected import decode_expectation
    from ckptfs.gpu.hashers import hasher_for

    mount, _ = locate(path)
    with hasher_for(device) as hasher:
        with opened(path, None) as (source, inner), progress_shown("expect") as on_progress:
            expectation = decode_expectation(source.ask(messages.Expect(path=inner), on_progress))
        if not expectation.files:
            raise InvalidRequest(f"{expectation.name} has no file with tensors there; leave out --device")
        with progress_shown(f"verify on {device}") as on_progress:
            answer = _checked(expectation, mount.path, hasher, on_progress)
    corrupt = cast("list[Mapping[str, object]]", answer["corrupt"])
    if as_json:
        print_json(answer)
    else:
        _show(answer, corrupt)
    if corrupt:
        raise Failed(1)


def _checked(
    expectation: Expectation, mountpoint: str, hasher: LoadingHasher, on_progress: OnProgress | None
) -> dict[str, object]:
    """The answer: the keys of `verify`, and what is known of the device."""
    from ckptfs.daemon.messages import Progress
    from ckptfs.gpu.loading import WINDOW_BYTES, check_file

    total_bytes = sum(file.size_bytes for file in expectation.files)
    done_bytes, rows = 0, []

    def tell(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        if on_progress is not None:
            on_progress(Progress(done=done_bytes, total=total_bytes))

    started = time.monotonic()
    with hasher.double_buffer(WINDOW_BYTES) as buffer:
        for file in expectation.files:
            with _reading(f"{mountpoint}{expectation.path}/{file.path}") as read:
                rows += [_row(bad) for bad in check_file(file, read, hasher, buffer, tell)]
    return {
        "number": expectation.number,
        "name": expectation.name,
        "device": hasher.device,
        "files": len(expectation.files),
        "tensors": sum(len(file.tensors) for file in expectation.files),
        "others": list(expectation.others),
        "checked_bytes": done_bytes,
        "chunks": sum(len(file.parts()) for file in expectation.files),
        "elapsed_s": time.monotonic() - started,
        "corrupt": rows,
    }


@contextmanager
def _reading(path: str) -> Iterator[Read]:
    """A file as check_file reads it: past the page cache, which fails whole pages for one bad byte and asks
    for 128 KiB at a time (measured: 150 to 250 MB/s, against 500 to 600)."""
    with ExitStack() as stack:
        direct, buffered = (os.open(path, os.O_RDONLY | os.O_CLOEXEC | more) for more in (os.O_DIRECT, 0))
        for fd in (direct, buffered):
            stack.callback(os.close, fd)

        def read(buffer: memoryview, offset: int) -> int:
            try:
                return _filled(direct, buffer, offset)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                # The kernel reads the store's file by itself and wants it aligned.
                return _filled(buffered, buffer, offset)

        yield read


def _filled(fd: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _row(bad: BadPart) -> dict[str, object]:
    """As `verify` has it; `offset` counts from the tensor's first byte, or from that of the file."""
    from ckptfs.store.ids import cid_text

    part = bad.part
    first = bad.tensors[0] if bad.tensors else None
    start = max(part.offset, first.offset) if first is not None else part.offset
    stop = min(part.offset + part.length, first.end) if first is not None else part.offset + part.length
    return {
        "path": bad.path,
        "tensor": None if first is None else first.name,
        "tensors": [one.name for one in bad.tensors],
        "chunk": "hole" if part.chunk is None else cid_text(part.chunk),
        "place": f"byte {part.offset} of the file",
        "offset": start - (0 if first is None else first.offset),
        "length": stop - start,
    }


def _show(answer: Mapping[str, object], corrupt: list[Mapping[str, object]]) -> None:
    for one in corrupt:
        names = ", ".join(cast("list[str]", one["tensors"]))
        where = f", tensor {names}" if names else ""
        offset, length = cast(int, one["offset"]), cast(int, one["length"])
        say(f"corrupt: {one['path']}{where}: chunk {one['chunk']}, bytes {offset} to {offset + length}")
    checked, elapsed_s = cast(int, answer["checked_bytes"]), cast(float, answer["elapsed_s"])
    say(
        f"{answer['name']} on {answer['device']}: {human_bytes(checked)} of {answer['tensors']} tensors in "
        f"{answer['files']} files checked at {human_bytes(int(checked / max(elapsed_s, 1e-9)))}/s, "
        f"{len(corrupt)} corrupt"
    )
    if answer["others"]:
        say(f"{len(cast('list[str]', answer['others']))} files without tensors were not loaded")
