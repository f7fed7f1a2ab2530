"""A version of five files, one of them with tensors and a hole, and proofs of it: made without a store.

The one rule: everything in it follows from constants, so a proof made today is the one made yesterday.
"""

from __future__ import annotations

from dataclasses import replace

from ckptfs.store.formats import Tensor
from ckptfs.store.frames import Frame, decode_frames
from ckptfs.store.hashing import chunk_id
from ckptfs.store.history import GENESIS, RecordKind, State, UnitRecord, VersionRecord
from ckptfs.store.history_batch import batch_of
from ckptfs.store.ids import TreeId, UnitId
from ckptfs.store.keyring import make_rotation
from ckptfs.store.merkle import file_root, version_root
from ckptfs.store.proof import Json, Proof, make_statement, proof_json
from ckptfs.store.proof_making import batch_of_version, proven_file, proven_pieces
from ckptfs.store.recipe import Piece, Recipe
from ckptfs.store.signing import SigningKey
from ckptfs.store.tree import Entry
from ckptfs.store.units import Unit
from ckptfs.store.version_names import version_name

KEY = SigningKey(bytes(range(32)))
OTHER_KEY = SigningKey(b"o" * 32)
SECOND_KEY, THIRD_KEY = SigningKey(b"2" * 32), SigningKey(b"3" * 32)
UNIT = UnitId(b"\xa1" * 16)
NAME, PATH = b"runs/\xc3\xa9t\xff", b"step-7/model.safetensors"
TIME_NS = 1_796_000_000_000_000_000
HEADER = (
    b'{"a":{"dtype":"F32","shape":[2,50],"data_offsets":[0,400]},'
    b'"b":{"dtype":"U8","shape":[600],"data_offsets":[400,1000]},'
    b'"c":{"dtype":"BF16","shape":[300],"data_offsets":[1000,1600]}}  '
)
FRONT = len(HEADER).to_bytes(8, "little") + HEADER
A, B, C = (bytes(n * k % 251 for k in range(1, size + 1)) for n, size in ((3, 400), (5, 600), (7, 600)))
# The second half of b is a hole, and c is cut in two.
B = B[:300] + bytes(300)
PIECES = (FRONT, A, B[:300], None, C[:256], C[256:])
LENGTHS = (len(FRONT), 400, 300, 300, 256, 344)
CONTENT = FRONT + A + B + C
TENSOR_A = Tensor("a", len(FRONT), 400, "F32", (2, 50))
TENSOR_B = Tensor("b", len(FRONT) + 400, 600, "U8", (600,))
TENSOR_C = Tensor("c", len(FRONT) + 1000, 600, "BF16", (300,))


def recipe() -> Recipe:
    """How the file with tensors is cut."""
    pairs = zip(LENGTHS, PIECES, strict=True)
    return Recipe(Piece(length, None if part is None else chunk_id(part)) for length, part in pairs)


def files() -> list[tuple[bytes, bytes]]:
    """The (path, file root) pairs of the version."""
    others = [(f"step-7/part{n}".encode(), file_root([chunk_id(bytes([n]))])) for n in range(4)]
    return [*others, (PATH, file_root(recipe().root_leaves()))]


def frames(key: SigningKey | None, *, renamed: bool = True) -> tuple[list[Frame], VersionRecord]:
    """A history of a unit and one version, with the unit's new name in the same append."""
    unit = Unit(UNIT, b"old", 5, 1, GENESIS, 0, TIME_NS, 0, b"old", TIME_NS, 0, GENESIS)
    first, unit = batch_of(
        unit, GENESIS, key, ((RecordKind.UNIT, UnitRecord(UNIT, b"old", TIME_NS).encode()),)
    )
    top = Entry(
        name=b"top", mode=0o40755, uid=1000, gid=1000, mtime_ns=TIME_NS, ctime_ns=TIME_NS,
        tree=TreeId(chunk_id(b"a tree")),
    )  # fmt: skip
    record = VersionRecord(
        unit=UNIT,
        number=1,
        name=version_name(1, TIME_NS),
        time_ns=TIME_NS,
        origin="settled",
        top=top,
        root=version_root(files()),
        files=5,
        logical_bytes=len(CONTENT) + 4,
        state=State.COMPLETE,
        step=7,
        steps=(7,),
        missing=(),
        before=GENESIS,
    )
    rename = (RecordKind.RENAME, UnitRecord(UNIT, NAME, TIME_NS).encode())
    records = ((RecordKind.VERSION, record.encode()),)
    second, _ = batch_of(unit, unit.chain, key, (rename, *records) if renamed else records)
    return list(decode_frames(first + second)), record


def proof(
    tensor: Tensor | None = None,
    *,
    key: SigningKey | None = KEY,
    stated: bool = True,
    name: bytes = NAME,
) -> Proof:
    """The proof of the file with tensors, or of one of them."""
    history, record = frames(key)
    made = Proof(
        batch=batch_of_version(UNIT, history, record),
        file=proven_file(files(), PATH, len(CONTENT)),
        pieces=proven_pieces(recipe(), tensor),
        tensor=tensor,
        statement=None,
    )
    if key is None or not stated:
        return made
    return replace(made, statement=make_statement(key, made, name))


def rotated(tensor: Tensor | None = None) -> Proof:
    """The same, stated by the key that has replaced the one that replaced KEY."""
    rotations = (
        make_rotation(KEY, SECOND_KEY.public, TIME_NS + 1),
        make_rotation(SECOND_KEY, THIRD_KEY.public, TIME_NS + 2),
    )
    made = replace(proof(tensor, stated=False), rotations=rotations)
    return replace(made, statement=make_statement(THIRD_KEY, made, NAME))


def answer() -> dict[str, Json]:
    """What a daemon answers: the proof of the file, its unit's name one that every terminal shows."""
    return proof_json(proof(name=b"run"))
