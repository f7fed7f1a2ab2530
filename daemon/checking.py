"""Check: whether a file is what a proof says, with nothing but the two of them at hand.

One rule: the proof and the file are somebody else's; the first byte that is not proven ends it, and
memory does not grow with either beyond the proof's own bounded size.

Source: FORMAT.md, "Proofs".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ckptfs.daemon.messages import Progress
from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.formats import Layout, Reader, parse
from ckptfs.store.formats.layout import tensor as described
from ckptfs.store.hashing import chunk_id_of
from ckptfs.store.proof import MAX_PROOF_BYTES, Proof, decode_proof
from ckptfs.store.proof_check import Shown, check_proof
from ckptfs.store.recipe import Piece
from ckptfs.store.seal import Head
from ckptfs.store.signing import PublicKey

_BLOCK_BYTES = 4 << 20
_READ_BYTES = 1 << 20
_ZEROS = bytes(_BLOCK_BYTES)
_DCP_SUFFIX = b".distcp"
Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first piece of a file that is not the saved one: its offset, and the tensor that lies there."""

    offset: int
    tensor: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What was checked: the proof, what it shows, and where the file is another (None: nowhere)."""

    proof: Proof
    shown: Shown
    checked_bytes: int
    difference: Difference | None


def check_file(
    proof_path: str, path: str, keys: Sequence[PublicKey], expected: Head | None, report: Report | None
) -> Checked:
    """Check the file at `path` against the proof at `proof_path`.

    Corrupt: that is no proof, or it does not hold. OSError: one of the two cannot be read.
    """
    proof = _read_proof(proof_path)
    try:
        shown = check_proof(proof, keys, expected)
    except Corrupt as e:
        raise Corrupt(f"{proof_path}: {e}") from None
    with _opened(path) as file:
        checked, difference = _compared(proof, file, report)
        if difference is None:
            difference = _other_layout(proof, file) if proof.tensor else _other_size(proof, file)
    return Checked(proof, shown, checked, difference)


def _read_proof(path: str) -> Proof:
    encoded = bytearray()
    with open(path, "rb") as file:
        while len(encoded) <= MAX_PROOF_BYTES and (more := file.read(_READ_BYTES)):
            encoded += more
    try:
        return decode_proof(bytes(encoded))
    except Corrupt as e:
        raise Corrupt(f"{path}: {e}") from None


class _File:
    """A file of the host, behind the Reader protocol; `beside(name)` opens one in the same folder."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self.size = os.fstat(fd).st_size

    def pread(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only where the file ends."""
        parts = []
        while length > 0 and (part := os.pread(self._fd, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def blocks(self, offset: int, length: int) -> Iterator[bytes]:
        """The same in blocks of at most 4 MiB."""
        end = min(offset + length, self.size)
        while offset < end and (block := self.pread(offset, min(_BLOCK_BYTES, end - offset))):
            yield block
            offset += len(block)

    @contextmanager
    def beside(self, name: str) -> Iterator[_File | None]:
        """Another file of the same folder, None: there is none that can be read."""
        try:
            with _opened(os.path.join(os.path.dirname(self._path), name)) as file:
                yield file
        except (OSError, InvalidRequest):
            yield None


@contextmanager
def _opened(path: str) -> Iterator[_File]:
    # Opening a pipe would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidRequest(f"{path} is not a regular file")
        yield _File(fd, path)
    finally:
        os.close(fd)


def _compared(proof: Proof, file: _File, report: Report | None) -> tuple[int, Difference | None]:
    """How many bytes are right, and the first piece that is not."""
    start = offset = proof.pieces.offset
    total = proof.pieces.end - start
    for piece in proof.pieces.pieces:
        if not _is_piece(piece, file, offset):
            return offset - start, _difference(proof, file, piece, offset)
        offset += piece.length
        if report is not None:
            report(Progress(done=offset - start, total=total))
    return offset - start, None


def _is_piece(piece: Piece, file: _File, offset: int) -> bool:
    if offset + piece.length > file.size:
        return False
    blocks = file.blocks(offset, piece.length)
    if piece.chunk is not None:
        return chunk_id_of(blocks) == piece.chunk
    zeros = 0
    for block in blocks:
        if block != _ZEROS[: len(block)]:
            return False
        zeros += len(block)
    return zeros == piece.length


def _difference(proof: Proof, file: _File, piece: Piece, offset: int) -> Difference:
    end = offset + piece.length
    if end > file.size:
        what = f"the file ends at byte {file.size}; what was saved has {proof.file.size} bytes"
    else:
        what = f"bytes {offset} to {end} are not those that were saved"
    return Difference(offset, _tensor_in(proof, file, offset, end), what)


def _tensor_in(proof: Proof, file: _File, start: int, end: int) -> str | None:
    """The first tensor that has bytes in a range of the file, as far as the file tells."""
    layout = _layout(proof, file)
    tensors = [one for one in (proof.tensor,) if one is not None]
    tensors += () if layout is None else layout.tensors
    return next((one.name for one in tensors if one.offset < end and one.end > start), None)


def _other_size(proof: Proof, file: _File) -> Difference | None:
    more = file.size - proof.file.size
    if not more:
        return None
    return Difference(proof.file.size, None, f"the file goes on for {more} bytes behind what was saved")


def _other_layout(proof: Proof, file: _File) -> Difference | None:
    """Whether the file itself calls something else by the tensor's name: who reads it goes by that."""
    wanted, layout = proof.tensor, _layout(proof, file)
    assert wanted is not None
    # The names in a shard stand in another file, which nothing here proves.
    is_shard = proof.file.path.endswith(_DCP_SUFFIX)
    for one in () if layout is None else layout.tensors:
        name = wanted.name if is_shard else one.name
        if described(name, one.offset, one.length, one.dtype, one.shape) == wanted:
            return None
    what = f"the file itself does not say that this {wanted.dtype} {list(wanted.shape)} lies at these bytes"
    return Difference(wanted.offset, wanted.name, what)


def _layout(proof: Proof, file: _File) -> Layout | None:
    """Where the file says that its tensors lie; what it is called is up to who has it now."""
    name = os.fsdecode(proof.file.path.rpartition(b"/")[2])
    with ExitStack() as stack:

        def sibling(other: str) -> Reader | None:
            return stack.enter_context(file.beside(other))

        return parse(file, name, sibling)
