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
from ckptfs.store.formats.bounded_json import MAX_JSON_BYTES, JsonObject, TooLarge, parse_members
from ckptfs.store.formats.layout import DTYPE_BITS, MAX_DIMENSION, Tensor, element_count
from ckptfs.store.frames import Frame
from ckptfs.store.hashing import sha3
from ckptfs.store.ids import DIGEST_BYTES, UNIT_ID_BYTES, ChunkId, UnitId
from ckptfs.store.recipe import HOLE, Piece
from ckptfs.store.seal import SEAL_BYTES, SealRecord, chained_all
from ckptfs.store.signing import KEY_BYTES, SIGNATURE_BYTES, SigningKey

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

KIND: Final = "ckptfs proof"
MAX_PROOF_BYTES: Final = MAX_JSON_BYTES
MAX_PIECES: Final = 400_000
"""So many pieces of ordinary lengths make a proof of at most MAX_PROOF_BYTES."""
_VERSION = 1
_CONTEXT = b"ckptfs proof 1\0"
_COUNTS = range(1 << 63)
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

    Without a statement nobody has signed what lengths holes have and which bytes a tensor is.
    """

    batch: Batch
    file: ProvenFile
    pieces: ProvenPieces
    tensor: Tensor | None
    statement: Statement | None

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
        return _CONTEXT + self.batch.unit + sha3(encode_node(stated))


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
    return {
        "kind": KIND,
        "version": _VERSION,
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
        top = _Fields(parse_members(encoded), "", "kind version history file pieces tensor statement")
    except TooLarge:
        raise Corrupt(f"a proof has at most {MAX_PROOF_BYTES} bytes, and not that many values") from None
    except ValueError as e:
        raise Corrupt(f"that is no proof: it {e}") from None
    if top.of("kind") != KIND:
        raise Corrupt(f"that is no proof: its kind is not {KIND!r}")
    if top.count("version") != _VERSION:
        raise Corrupt(f"the proof is of version {top.count('version')}; this program knows {_VERSION}")
    return Proof(
        batch=_batch(top.fields("history", "unit before records head seal")),
        file=_file(top.fields("file", "path size root leaf leaves inclusion")),
        pieces=_pieces(top.fields("pieces", "first count offset rows inclusion")),
        tensor=_tensor(top),
        statement=_statement(top),
    )


class _Fields:
    """An object of the JSON text: exactly the fields `names`, each read as what it must be, or Corrupt."""

    def __init__(self, members: object, where: str, names: str) -> None:
        pairs = members if isinstance(members, JsonObject) else []
        self._where = where
        self._values = dict(pairs)
        if len(self._values) != len(pairs):
            raise Corrupt(f"the proof has a field twice{f' in {where}' if where else ''}")
        if self._values.keys() != set(names.split()):
            raise Corrupt(f"the proof does not have the fields of one{f' in {where}' if where else ''}")

    def of(self, name: str) -> object:
        """The value as it is."""
        return self._values[name]

    def bad(self, name: str) -> Corrupt:
        """The error for a value that is not what it must be."""
        return Corrupt(f"the proof has a bad field {f'{self._where}.' if self._where else ''}{name}")

    def count(self, name: str) -> int:
        """A number from 0 to 2^63-1."""
        value = self._values[name]
        if type(value) is not int or value not in _COUNTS:
            raise self.bad(name)
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self._values[name]
        if not isinstance(value, str):
            raise self.bad(name)
        return value

    def name(self, name: str) -> bytes:
        """A path of names: without NUL, nothing in it empty, `.` or `..`."""
        try:
            path = self.text(name).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise self.bad(name) from None
        if b"\0" in path or any(part in (b"", b".", b"..") for part in path.split(b"/")):
            raise self.bad(name)
        return path

    def digest(self, name: str, length: int | None = DIGEST_BYTES) -> bytes:
        """Bytes of this length in lower-case hex digits (None: any length)."""
        return self.unhex(name, self._values[name], length)

    def digests(self, name: str) -> tuple[bytes, ...]:
        """A list of such."""
        return tuple(self.unhex(name, one, DIGEST_BYTES) for one in self.items(name))

    def items(self, name: str) -> list[object]:
        """A list."""
        value = self._values[name]
        if not isinstance(value, list) or isinstance(value, JsonObject):
            raise self.bad(name)
        return value

    def fields(self, name: str, names: str) -> _Fields:
        """An object."""
        return _Fields(self._values[name], f"{self._where}.{name}" if self._where else name, names)

    def unhex(self, name: str, value: object, length: int | None) -> bytes:
        """What `value`, found in the field `name`, says in lower-case hex digits."""
        try:
            digest = bytes.fromhex(value) if isinstance(value, str) else b""
        except ValueError:
            raise self.bad(name) from None
        if digest.hex() != value or (length is not None and len(digest) != length):
            raise self.bad(name)
        return digest


def _batch(fields: _Fields) -> Batch:
    rows = [_Fields(one, "history.records", "kind payload") for one in fields.items("records")]
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


def _file(fields: _Fields) -> ProvenFile:
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


def _pieces(fields: _Fields) -> ProvenPieces:
    pieces = ProvenPieces(
        first=fields.count("first"),
        count=fields.count("count"),
        offset=fields.count("offset"),
        pieces=tuple(_piece(fields, row) for row in fields.items("rows")),
        inclusion=fields.digests("inclusion"),
    )
    if pieces.first + len(pieces.pieces) > pieces.count or pieces.end not in _COUNTS:
        raise fields.bad("rows")
    return pieces


def _piece(fields: _Fields, row: object) -> Piece:
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


def _tensor(top: _Fields) -> Tensor | None:
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


def _statement(top: _Fields) -> Statement | None:
    if top.of("statement") is None:
        return None
    fields = top.fields("statement", "name key signature")
    signature = fields.digest("signature", SIGNATURE_BYTES)
    return Statement(fields.name("name"), fields.digest("key", KEY_BYTES), signature)
