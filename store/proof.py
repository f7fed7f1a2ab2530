"""The proof of a saved file, or of one tensor in it: what it holds, and its JSON.

One rule: a proof is complete by itself. Together with the file's bytes, and a public key or a head that
is known from elsewhere, it shows what was saved; no store is asked.

Source: FORMAT.md, "Proofs". What a proof shows is found out by proof_check.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.errors import Corrupt, InvalidRequest
from ckptfs.store.formats.bounded_json import MAX_JSON_BYTES, TooLarge, parse_members
from ckptfs.store.formats.layout import DTYPE_BITS, MAX_DIMENSION, Tensor, element_count
from ckptfs.store.frames import Frame
from ckptfs.store.hashing import sha3
from ckptfs.store.ids import DIGEST_BYTES, UNIT_ID_BYTES, ChunkId, UnitId
from ckptfs.store.keyring import Rotation, decode_rotation
from ckptfs.store.proof_fields import COUNTS, Fields
from ckptfs.store.recipe import HOLE, Piece
from ckptfs.store.seal import SEAL_BYTES, SealRecord, chained_all
from ckptfs.store.signing import KEY_BYTES, SIGNATURE_BYTES, SigningKey

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

KIND: Final = "ckptfs proof"
MAX_PROOF_BYTES: Final = MAX_JSON_BYTES
MAX_PIECES: Final = 400_000
"""So many pieces of ordinary lengths make a proof of at most MAX_PROOF_BYTES."""
MAX_ROTATIONS: Final = 1000
_PLAIN, _ROTATED = 1, 2
_CONTEXT = b"ckptfs proof %d\0"
_FIELDS = "kind version history file pieces tensor statement"
_NO_CHUNK = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one append to a history wrote: its records, the chain value `before` them, and their seal.

    Without a seal (`seal` None) the records are the version's alone.
    """

    unit: UnitId
    before: bytes
    records: tuple[Frame, ...]
    seal: SealRecord | None

    @property
    def head(self) -> bytes:
        """The chain value behind the records."""
        return chained_all(self.before, self.records)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenFile:
    """A file among those of a version: leaf number `leaf` of `leaves` under the version's root.

    `path` is relative to the unit; `size` is in bytes.
    """

    path: bytes
    size: int
    root: bytes
    leaf: int
    leaves: int
    inclusion: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenPieces:
    """Neighbouring pieces of a file: number `first` and on, of `count`, from byte `offset` of the file."""

    first: int
    count: int
    offset: int
    pieces: tuple[Piece, ...]
    inclusion: tuple[bytes, ...]

    @property
    def end(self) -> int:
        """The offset of the first byte behind them."""
        return self.offset + sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Statement:
    """What whoever made the proof signed of it: all that no root binds, and the unit's name."""

    name: bytes
    key: bytes
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The proof of a file, or, with `tensor`, of one tensor in it.

    Without a statement nobody has signed what lengths holes have and which bytes a tensor is. `rotations`
    lead from the key of the seal to that of the statement, if the key has been replaced in between; the
    statement then also says that the version stands in its history and was sealed while that key was in use.
    """

    batch: Batch
    file: ProvenFile
    pieces: ProvenPieces
    tensor: Tensor | None
    statement: Statement | None
    rotations: tuple[Rotation, ...] = ()

    @property
    def version(self) -> int:
        """Of its format; who reads only the first can still check what needs no more."""
        return _ROTATED if self.rotations else _PLAIN

    def stated(self, name: bytes) -> bytes:
        """The message that a statement signs, for a unit of this name."""
        tensor: Node = None if self.tensor is None else cast(Node, _tensor_json(self.tensor))
        stated: dict[str, Node] = {
            "name": name,
            "head": self.batch.head,
            "path": self.file.path,
            "size": self.file.size,
            "root": self.file.root,
            "first": self.pieces.first,
            "count": self.pieces.count,
            "offset": self.pieces.offset,
            "lengths": [piece.length for piece in self.pieces.pieces],
            "tensor": tensor,
        }
        if self.rotations:
            stated["rotations"] = [rotation.encode() for rotation in self.rotations]
        return _CONTEXT % self.version + self.batch.unit + sha3(encode_node(stated))


def make_statement(key: SigningKey, proof: Proof, name: bytes) -> Statement:
    """The statement of `key` about a proof and its unit's name."""
    return Statement(name, key.public.raw, key.sign(proof.stated(name)))


def proof_json(proof: Proof) -> dict[str, Json]:
    """The proof as a JSON value; InvalidRequest if it has more pieces than a proof takes."""
    pieces = proof.pieces.pieces
    if len(pieces) > MAX_PIECES:
        raise InvalidRequest(
            f"{len(pieces)} pieces are more than a proof takes ({MAX_PIECES}); "
            "prove the tensors of the file one by one"
        )
    made: dict[str, Json] = {
        "kind": KIND,
        "version": proof.version,
        "history": _batch_json(proof.batch),
        "file": {
            "path": proof.file.path.decode("utf-8", "surrogateescape"),
            "size": proof.file.size,
            "root": proof.file.root.hex(),
            "leaf": proof.file.leaf,
            "leaves": proof.file.leaves,
            "inclusion": _hex_list(proof.file.inclusion),
        },
        "pieces": {
            "first": proof.pieces.first,
            "count": proof.pieces.count,
            "offset": proof.pieces.offset,
            "rows": [f"{one.length} {_NO_CHUNK if one.chunk is None else one.chunk.hex()}" for one in pieces],
            "inclusion": _hex_list(proof.pieces.inclusion),
        },
        "tensor": None if proof.tensor is None else _tensor_json(proof.tensor),
        "statement": None
        if proof.statement is None
        else {
            "name": proof.statement.name.decode("utf-8", "surrogateescape"),
            "key": proof.statement.key.hex(),
            "signature": proof.statement.signature.hex(),
        },
    }
    if proof.rotations:
        made["rotations"] = _hex_list([rotation.encode() for rotation in proof.rotations])
    return made


def _batch_json(batch: Batch) -> Json:
    seal = batch.seal
    return {
        "unit": batch.unit.hex(),
        "before": batch.before.hex(),
        "records": [{"kind": frame.kind, "payload": frame.payload.hex()} for frame in batch.records],
        "head": batch.head.hex(),
        "seal": None if seal is None else {"key": seal.key.hex(), "seal": seal.seal.hex()},
    }


def _tensor_json(tensor: Tensor) -> dict[str, Json]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": [*tensor.shape],
        "offset": tensor.offset,
        "length": tensor.length,
    }


def _hex_list(digests: Sequence[bytes]) -> list[Json]:
    return [digest.hex() for digest in digests]


def encode_proof(proof: Json) -> bytes:
    """The file of a proof, one line. InvalidRequest if it is more than `check` reads."""
    encoded = json.dumps(proof, separators=(",", ":")).encode("ascii") + b"\n"
    if len(encoded) > MAX_PROOF_BYTES:
        raise InvalidRequest(f"the proof has {len(encoded)} bytes, more than {MAX_PROOF_BYTES}")
    return encoded


def decode_proof(encoded: bytes) -> Proof:
    """The proof in a file; Corrupt unless it has every field, each well-formed, and no other.

    Nothing is verified yet: not a hash, not a signature.
    """
    try:
        members = parse_members(encoded)
    except TooLarge:
        raise Corrupt(f"a proof has at most {MAX_PROOF_BYTES} bytes, and not that many values") from None
    except ValueError as e:
        raise Corrupt(f"that is no proof: it {e}") from None
    version = dict(members).get("version")
    if dict(members).get("kind") != KIND:
        raise Corrupt(f"that is no proof: its kind is not {KIND!r}")
    if type(version) is not int or version not in (_PLAIN, _ROTATED):
        raise Corrupt(f"the proof is of version {version}; this program knows {_PLAIN} and {_ROTATED}")
    top = Fields(members, "", f"{_FIELDS} rotations" if version == _ROTATED else _FIELDS)
    return Proof(
        batch=_batch(top.fields("history", "unit before records head seal")),
        file=_file(top.fields("file", "path size root leaf leaves inclusion")),
        pieces=_pieces(top.fields("pieces", "first count offset rows inclusion")),
        tensor=_tensor(top),
        statement=_statement(top),
        rotations=_rotations(top) if version == _ROTATED else (),
    )


def _batch(fields: Fields) -> Batch:
    rows = [Fields(one, "history.records", "kind payload") for one in fields.items("records")]
    records = tuple(Frame(row.count("kind"), 0, row.digest("payload", None)) for row in rows)
    if not records or any(not 0 < frame.kind < 256 for frame in records):
        raise fields.bad("records")
    before = fields.digest("before")
    head = chained_all(before, records)
    if fields.digest("head") != head:
        raise Corrupt("the proof does not hold: its records do not lead to the head that it names")
    seal = None
    if fields.of("seal") is not None:
        inner = fields.fields("seal", "key seal")
        signed = inner.digest("seal", SEAL_BYTES)
        seal = SealRecord(inner.digest("key", KEY_BYTES), before, len(records), head, signed)
    unit = UnitId(fields.digest("unit", UNIT_ID_BYTES))
    return Batch(unit=unit, before=before, records=records, seal=seal)


def _file(fields: Fields) -> ProvenFile:
    leaf, leaves = fields.count("leaf"), fields.count("leaves")
    if leaf >= leaves:
        raise fields.bad("leaf")
    return ProvenFile(
        path=fields.name("path"),
        size=fields.count("size"),
        root=fields.digest("root"),
        leaf=leaf,
        leaves=leaves,
        inclusion=fields.digests("inclusion"),
    )


def _pieces(fields: Fields) -> ProvenPieces:
    pieces = ProvenPieces(
        first=fields.count("first"),
        count=fields.count("count"),
        offset=fields.count("offset"),
        pieces=tuple(_piece(fields, row) for row in fields.items("rows")),
        inclusion=fields.digests("inclusion"),
    )
    if pieces.first + len(pieces.pieces) > pieces.count or pieces.end not in COUNTS:
        raise fields.bad("rows")
    return pieces


def _piece(fields: Fields, row: object) -> Piece:
    """`LENGTH HEX`, or `LENGTH -` for a hole."""
    digits, _, identity = row.partition(" ") if isinstance(row, str) else ("", "", "")
    if not (digits.isascii() and digits.isdigit()) or digits.startswith("0") or len(digits) > 19:
        raise fields.bad("rows")
    if identity == _NO_CHUNK:
        return Piece(int(digits), None)
    chunk = fields.unhex("rows", identity, DIGEST_BYTES)
    if chunk == HOLE:
        raise fields.bad("rows")
    return Piece(int(digits), ChunkId(chunk))


def _tensor(top: Fields) -> Tensor | None:
    if top.of("tensor") is None:
        return None
    fields = top.fields("tensor", "name dtype shape offset length")
    shape = fields.items("shape")
    if not all(type(one) is int and 0 <= one <= MAX_DIMENSION for one in shape):
        raise fields.bad("shape")
    sizes = tuple(cast("list[int]", shape))
    dtype, length, name = fields.text("dtype"), fields.count("length"), fields.text("name")
    elements = element_count(sizes)
    if elements is None or elements * DTYPE_BITS.get(dtype, 0) != length * 8 or not length:
        raise fields.bad("shape")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise fields.bad("name")
    return Tensor(name, fields.count("offset"), length, dtype, sizes)


def _statement(top: Fields) -> Statement | None:
    if top.of("statement") is None:
        return None
    fields = top.fields("statement", "name key signature")
    signature = fields.digest("signature", SIGNATURE_BYTES)
    return Statement(fields.name("name"), fields.digest("key", KEY_BYTES), signature)


def _rotations(top: Fields) -> tuple[Rotation, ...]:
    rows = top.items("rotations")
    if not 0 < len(rows) <= MAX_ROTATIONS:
        raise top.bad("rotations")
    return tuple(decode_rotation(top.unhex("rotations", row, None)) for row in rows)
