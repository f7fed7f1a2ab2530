"""Making the parts of a proof out of what a store holds.

One rule: only what is good itself is put into a proof: a record that stands in the history, with a seal
that was checked. Whoever makes a proof checks it again as a whole (proof_check.py) before it is handed out.

Source: FORMAT.md, "Proofs".
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfs.store.errors import Corrupt
from ckptfs.store.formats.layout import Tensor
from ckptfs.store.frames import Frame
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.ids import UnitId
from ckptfs.store.merkle import audit_path, range_path, version_leaf
from ckptfs.store.proof import Batch, ProvenFile, ProvenPieces
from ckptfs.store.recipe import Recipe
from ckptfs.store.seal import chain_behind, chained_all, decode_seal
from ckptfs.store.signing import PublicKey


def batch_of_version(unit: UnitId, frames: Sequence[Frame], record: VersionRecord) -> Batch:
    """The append that wrote `record`, out of all frames of a history.

    Corrupt if the history does not hold this record, or if the seal behind it is not good.
    """
    payload, kind = record.encode(), RecordKind.VERSION
    at = next((i for i, frame in enumerate(frames) if (frame.kind, frame.payload) == (kind, payload)), None)
    if at is None:
        raise Corrupt(
            f"the history does not hold version {record.number} as the index shows it; see `log --verify`"
        )
    if at + 1 == len(frames) or frames[at + 1].kind != RecordKind.SEAL:
        before = chain_behind(frames[:at])
        return Batch(unit=unit, before=before, records=(_bare(frames[at]),), seal=None)
    seal = decode_seal(frames[at + 1].payload)
    records = tuple(map(_bare, frames[max(0, at + 1 - seal.records) : at + 1]))
    is_good = len(records) == seal.records and chained_all(seal.before, records) == seal.head
    if not is_good or not seal.is_whole(unit) or not seal.is_signed_by(PublicKey(seal.key), unit):
        raise Corrupt(f"the seal of version {record.number} is not good; see `ckptfs log --verify`")
    return Batch(unit=unit, before=seal.before, records=records, seal=seal)


def _bare(frame: Frame) -> Frame:
    """The part of a frame that the chain runs over."""
    return Frame(frame.kind, 0, frame.payload)


def proven_file(files: Sequence[tuple[bytes, bytes]], path: bytes, size: int) -> ProvenFile:
    """The place of the file `path`, of `size` bytes, among all (path, file root) pairs of a version."""
    ordered = sorted(files)
    leaf = next(at for at, (other, _) in enumerate(ordered) if other == path)
    leaves = [version_leaf(*pair) for pair in ordered]
    return ProvenFile(
        path=path,
        size=size,
        root=ordered[leaf][1],
        leaf=leaf,
        leaves=len(leaves),
        inclusion=tuple(audit_path(leaves, leaf)),
    )


def proven_pieces(recipe: Recipe, tensor: Tensor | None) -> ProvenPieces:
    """All pieces of a file, or those that a tensor in it lies in."""
    first, stop = 0, len(recipe)
    if tensor is not None:
        first, stop = recipe.index_at(tensor.offset), recipe.index_at(tensor.end - 1) + 1
    leaves = list(recipe.root_leaves())
    return ProvenPieces(
        first=first,
        count=len(recipe),
        offset=recipe.start(first),
        pieces=tuple(recipe.piece(at) for at in range(first, stop)),
        inclusion=tuple(range_path(leaves, first, stop)) if leaves else (),
    )
