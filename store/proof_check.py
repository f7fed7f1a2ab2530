"""What a proof shows: that a file's pieces, or those of one tensor, are in a version that a key has sealed.

One rule: what was checked is told apart from what was only said. A root, a seal or a statement that does
not fit is Corrupt; what nobody has signed is a gap, and it is for the caller to accept or refuse it.

Source: FORMAT.md, "Proofs".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.history import RecordKind, VersionRecord, decode_unit, decode_version
from ckptfs.store.merkle import root_behind_path, root_behind_range, root_of, version_leaf
from ckptfs.store.proof import Batch, Proof, Statement
from ckptfs.store.recipe import HOLE
from ckptfs.store.seal import Head
from ckptfs.store.signing import PublicKey


@dataclass(frozen=True, slots=True)
class Shown:
    """What a proof shows of itself; the file's bytes are still to be compared with its pieces.

    `sealed_by` is the key in the seal, None: nobody sealed the version. `name` is the unit's, as far as a
    statement tells it. `gaps` are sentences: what nobody has signed.
    """

    record: VersionRecord
    head: Head
    sealed_by: PublicKey | None
    stated_by: PublicKey | None
    name: bytes | None
    gaps: tuple[str, ...]


def check_proof(proof: Proof, keys: Sequence[PublicKey] = (), expected: Head | None = None) -> Shown:
    """What `proof` shows, given the public keys that may have signed, and a head that was kept elsewhere.

    Without keys the one in the proof's seal is taken. Of one key the rotations in the proof are followed:
    its successors state what it has sealed, and it states what its predecessors have; several keys are all
    that is accepted. Corrupt: something in it does not fit.
    """
    record = _version_of(proof.batch)
    head = Head(proof.batch.head, record.number)
    if expected is not None and expected not in (head, Head(head.chain)):
        raise _wrong(f"version {record.number} is not the one behind which the head is {expected}")
    keys = _with_rotations(proof, keys)
    sealed_by = _check_seal(proof.batch, record, keys)
    _check_roots(proof, record)
    _check_place(proof)
    stated_by = None if proof.statement is None else _check_statement(proof, proof.statement, sealed_by, keys)
    gaps = []
    if sealed_by is None and expected is None:
        gaps.append(f"nobody has signed version {record.number}: who wrote it is not shown")
    if stated_by is None and proof.tensor is not None:
        gaps.append("nobody has signed which bytes of the file the tensor is")
    elif stated_by is None and any(piece.chunk is None for piece in proof.pieces.pieces):
        gaps.append("nobody has signed how long the holes of the file are")
    name = None if proof.statement is None else proof.statement.name
    return Shown(record, head, sealed_by, stated_by, name, tuple(gaps))


def _version_of(batch: Batch) -> VersionRecord:
    *before, last = batch.records
    if last.kind != RecordKind.VERSION or any(one.kind != RecordKind.RENAME for one in before):
        raise _wrong("its records are not those of a version")
    units = {decode_unit(one.payload).unit for one in before}
    record = decode_version(last.payload)
    if units | {record.unit} != {batch.unit}:
        raise _wrong("its records are those of another unit")
    if before and batch.seal is None:
        raise _wrong("it has records that no seal binds to the version")
    return record


def _with_rotations(proof: Proof, keys: Sequence[PublicKey]) -> Sequence[PublicKey]:
    """The keys that may have signed: those that are given, or all on the way from the seal to the statement
    that a single one of them is on. That the way ends at the statement is what makes it hold backwards:
    a rotation alone is the word of the old key only."""
    if not proof.rotations:
        return keys
    seal, statement = proof.batch.seal, proof.statement
    if seal is None or statement is None:
        raise _wrong("it has rotations of a key, and not both a seal and a statement")
    way = [seal.key]
    for rotation in proof.rotations:
        if rotation.old != way[-1] or rotation.new in way or not rotation.is_signed():
            raise _wrong("its rotations do not follow from the key that sealed the version")
        way.append(rotation.new)
    if statement.key != way[-1]:
        raise _wrong("its rotations do not lead to the key of its statement")
    known = {key.raw for key in keys} or {seal.key}
    if len(known) == 1 and known <= set(way):
        return [_key(raw) for raw in way]
    return keys


def _check_seal(batch: Batch, record: VersionRecord, keys: Sequence[PublicKey]) -> PublicKey | None:
    if batch.seal is None:
        if keys:
            raise _wrong(f"nobody has signed version {record.number}, so no key can show who wrote it")
        return None
    if not batch.seal.is_whole(batch.unit):
        raise _wrong("its seal is damaged")
    key = _key(batch.seal.key)
    if keys and key not in keys:
        raise _wrong(f"version {record.number} is signed with another key, {key.fingerprint}")
    if not batch.seal.is_signed_by(key, batch.unit):
        raise _wrong(f"the signature of version {record.number} is not that of the key {key.fingerprint}")
    return key


def _check_roots(proof: Proof, record: VersionRecord) -> None:
    file, part = proof.file, proof.pieces
    leaf = version_leaf(file.path, file.root)
    # A path alone fits lists of several lengths; the record says which it is.
    if file.leaves != record.files:
        raise _wrong(f"version {record.number} has {record.files} files, not {file.leaves}")
    if root_behind_path(file.leaves, file.leaf, leaf, file.inclusion) != record.root:
        raise _wrong("the file is not in the version: its path and root do not lead to the version's root")
    leaves = [piece.chunk or HOLE for piece in part.pieces]
    if leaves:
        root = root_behind_range(part.count, part.first, leaves, part.inclusion)
    else:
        root = None if part.count or part.inclusion else root_of([])
    if root != file.root:
        raise _wrong("the pieces are not those of the file: they do not lead to the file's root")


def _check_place(proof: Proof) -> None:
    """Whether pieces and tensor lie in the file as the proof itself says."""
    file, part, tensor = proof.file, proof.pieces, proof.tensor
    if tensor is None:
        if (part.first, part.offset, part.end) != (0, 0, file.size) or len(part.pieces) != part.count:
            raise _wrong("its pieces are not all of the file")
        return
    if not part.pieces:
        raise _wrong("it has no piece of the tensor")
    first, last = part.pieces[0], part.pieces[-1]
    starts_in = part.offset <= tensor.offset < part.offset + first.length
    ends_in = part.end - last.length < tensor.end <= part.end <= file.size
    if not (starts_in and ends_in):
        raise _wrong("its pieces are not those that the tensor lies in")


def _check_statement(
    proof: Proof, statement: Statement, sealed_by: PublicKey | None, keys: Sequence[PublicKey]
) -> PublicKey:
    key = _key(statement.key)
    if sealed_by is None:
        raise _wrong("it has a statement about a version that nobody has signed")
    if key not in (keys or (sealed_by,)):
        raise _wrong(
            f"its statement is signed with another key, {key.fingerprint}; "
            "if you trust both, give both (--key)"
        )
    if not key.has_signed(proof.stated(statement.name), statement.signature):
        raise _wrong(
            "its statement is not what was signed: a length, a place, a name or the tensor is another"
        )
    return key


def _key(raw: bytes) -> PublicKey:
    try:
        return PublicKey(raw)
    except InvalidRequest as e:
        raise _wrong(str(e)) from None


def _wrong(what: str) -> Corrupt:
    return Corrupt(f"the proof does not hold: {what}")
