"""check: the file is read piece by piece, in bounded memory, and never further than it is right."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import sample_proofs as sample

from ckptfs.daemon.checking import Checked, _opened, _other_layout, check_file
from ckptfs.daemon.messages import Progress
from ckptfs.store.errors import InvalidRequest
from ckptfs.store.formats import Tensor
from ckptfs.store.frames import Frame
from ckptfs.store.hashing import chunk_id, chunk_id_of
from ckptfs.store.history import GENESIS, RecordKind
from ckptfs.store.merkle import file_root, version_root
from ckptfs.store.proof import Batch, Proof, encode_proof, proof_json
from ckptfs.store.proof_making import proven_file, proven_pieces
from ckptfs.store.recipe import Piece, Recipe

MIB = 1 << 20


def written(path: Path, proof: Proof) -> str:
    path.write_bytes(encode_proof(proof_json(proof)))
    return str(path)


def unsigned(pieces: Iterable[Piece], name: bytes = b"f") -> Proof:
    """The proof of a file that is cut like this, in a version that nobody has sealed."""
    recipe = Recipe(pieces)
    files = [(name, file_root(recipe.root_leaves()))]
    record = replace(sample.frames(None)[1], root=version_root(files), files=1)
    frame = Frame(RecordKind.VERSION, 0, record.encode())
    return Proof(
        batch=Batch(unit=sample.UNIT, before=GENESIS, records=(frame,), seal=None),
        file=proven_file(files, name, recipe.size),
        pieces=proven_pieces(recipe, None),
        tensor=None,
        statement=None,
    )


def check(tmp_path: Path, proof: Proof, content: bytes) -> Checked:
    (tmp_path / "file").write_bytes(content)
    return check_file(written(tmp_path / "proof", proof), str(tmp_path / "file"), (), None, None)


@pytest.mark.parametrize("tensor", [None, sample.TENSOR_A, sample.TENSOR_B, sample.TENSOR_C])
def test_every_byte_of_what_is_proven_counts_and_no_other(tmp_path: Path, tensor: Tensor | None) -> None:
    proof = sample.proof(tensor)
    assert check(tmp_path, proof, sample.CONTENT).difference is None
    start, end = proof.pieces.offset, proof.pieces.end
    for at in range(len(sample.FRONT), len(sample.CONTENT), 13):
        content = bytearray(sample.CONTENT)
        content[at] ^= 0x80
        found = check(tmp_path, proof, bytes(content)).difference
        assert (found is not None) == (start <= at < end), at
        if found is not None:
            begins = [
                start + sum(p.length for p in proof.pieces.pieces[:n])
                for n in range(len(proof.pieces.pieces))
            ]
            assert found.offset == max(one for one in begins if one <= at)
            assert found.tensor == (
                "a" if at < 400 + len(sample.FRONT) else "b" if at < 1000 + len(sample.FRONT) else "c"
            )


def test_files_of_another_length(tmp_path: Path) -> None:
    whole, tensor = sample.proof(), sample.proof(sample.TENSOR_A)
    for length in range(0, len(sample.CONTENT), 97):
        found = check(tmp_path, whole, sample.CONTENT[:length]).difference
        assert found is not None and found.offset <= length and "ends at byte" in found.message
    found = check(tmp_path, whole, sample.CONTENT + b"\0").difference
    assert found is not None and (found.offset, found.tensor) == (len(sample.CONTENT), None)
    assert check(tmp_path, tensor, sample.CONTENT[: sample.TENSOR_A.end]).difference is None
    assert check(tmp_path, tensor, sample.CONTENT[: sample.TENSOR_A.end - 1]).difference is not None


def test_memory_does_not_grow_with_the_file_or_with_a_piece(tmp_path: Path) -> None:
    size = 192 * MIB
    block = bytes(4 * MIB)
    zeros = chunk_id_of(block for _ in range(size // len(block)))
    assert chunk_id_of([block, block]) == chunk_id(block * 2)
    proof = unsigned([Piece(size, zeros), Piece(size, None), Piece(5, chunk_id(b"bytes"))])
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2 * size)
        file.seek(2 * size)
        file.write(b"bytes")
    seen: list[Progress] = []
    name = written(tmp_path / "proof", proof)
    tracemalloc.start()
    checked = check_file(name, str(path), (), None, seen.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checked.difference is None and checked.checked_bytes == 2 * size + 5 and peak < 24 * MIB
    assert seen[-1] == Progress(done=2 * size + 5, total=2 * size + 5)
    os.truncate(path, 2 * size)
    found = check_file(name, str(path), (), None, None).difference
    assert found is not None and found.offset == 2 * size


def test_a_proof_may_claim_any_length_of_a_short_file(tmp_path: Path) -> None:
    for pieces in ([Piece((1 << 63) - 1, None)], [Piece((1 << 62), chunk_id(b"x")), Piece(1 << 61, None)]):
        found = check(tmp_path, unsigned(pieces), b"x").difference
        assert found is not None and found.offset == 0


def test_a_shard_is_named_by_its_metadata_only(tmp_path: Path) -> None:
    """The names in `.metadata` are not part of the proof, so a shard may be checked without it."""
    proof = sample.proof(sample.TENSOR_A)
    shard = replace(proof.file, path=b"step-7/__0_0.distcp")
    (tmp_path / "file").write_bytes(sample.CONTENT)
    renamed = replace(sample.TENSOR_A, name="model.a")
    with _opened(str(tmp_path / "file")) as file:
        assert _other_layout(replace(proof, file=shard, tensor=renamed), file) is None
        assert _other_layout(replace(proof, tensor=renamed), file) is not None
        turned = replace(renamed, dtype="I32")
        assert _other_layout(replace(proof, file=shard, tensor=turned), file) is not None


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    proof = written(tmp_path / "proof", sample.proof())
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(InvalidRequest, match="not a regular file"):
            check_file(proof, str(name), (), None, None)
