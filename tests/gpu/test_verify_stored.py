"""Tensors that several files hold parts of: what is put together, and what is said of the rest."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from ckptfs import gpu
from ckptfs.gpu.expected import Expectation, ExpectedFile, ExpectedTensor
from ckptfs.gpu.report import Reason, TensorReport
from ckptfs.gpu.stored import stored_tensors
from ckptfs.store.ids import ChunkId
from ckptfs.store.recipe import Piece, Recipe

WHOLE = np.arange(60, dtype=np.float32).reshape(12, 5)


def shard(number: int, name: str, part: np.ndarray, folder: str = "step") -> ExpectedFile:
    """A DCP shard that holds one block of a tensor."""
    content = part.tobytes()
    recipe = Recipe([Piece(len(content), ChunkId(blake3(content).digest()))])
    tensor = ExpectedTensor(name, 0, len(content), "F32", part.shape)
    return ExpectedFile(f"{folder}/__{number}_0.distcp", "dcp", recipe.encode(), (tensor,))


def version(*files: ExpectedFile) -> Expectation:
    return Expectation(unit="run", number=1, name="v", path=None, files=files)


def verified(array: np.ndarray, *files: ExpectedFile) -> TensorReport:
    (one,) = gpu.verify({"w": array}, version(*files)).tensors
    return one


def test_rows_are_put_together_in_the_order_of_their_offsets() -> None:
    files = (shard(0, "w[4,0]", WHOLE[4:9]), shard(1, "w[9,0]", WHOLE[9:]), shard(2, "w", WHOLE[:4]))
    assert not verified(WHOLE, *files).refusal
    wrong = WHOLE.copy()
    wrong[8, 4] = -1
    (bad,) = verified(wrong, *files).bad
    assert (bad.offset, bad.length, bad.path) == (4 * 20, 5 * 20, "step/__0_0.distcp")


def test_a_lost_rank_is_told() -> None:
    for files in (
        (shard(0, "w", WHOLE[:4]), shard(1, "w[9,0]", WHOLE[9:])),
        (shard(0, "w[4,0]", WHOLE[4:]),),
        (shard(0, "w", WHOLE[:4]), shard(1, "w[4,0]", WHOLE[4:, :3])),
    ):
        refusal = verified(WHOLE, *files).refusal
        assert refusal is not None and refusal.reason is Reason.DAMAGED, refusal


def test_a_lost_last_rank_makes_another_shape() -> None:
    refusal = verified(WHOLE, shard(0, "w", WHOLE[:4]), shard(1, "w[4,0]", WHOLE[4:9])).refusal
    assert refusal is not None and refusal.reason is Reason.SHAPE


def test_columns_are_not_put_together() -> None:
    files = (shard(0, "w", WHOLE[:, :3]), shard(1, "w[0,3]", WHOLE[:, 3:]))
    refusal = verified(WHOLE, *files).refusal
    assert refusal is not None and refusal.reason is Reason.COLUMN_SHARD


def test_the_shards_of_another_folder_are_another_tensor() -> None:
    files = (shard(0, "w", WHOLE, "a"), shard(0, "w", WHOLE, "b"))
    refusal = verified(WHOLE, *files).refusal
    assert refusal is not None and refusal.reason is Reason.AMBIGUOUS and "a, b" in refusal.sentence


def test_only_dcp_has_offsets_in_names() -> None:
    content = WHOLE.tobytes()
    recipe = Recipe([Piece(len(content), ChunkId(blake3(content).digest()))])
    tensors = (ExpectedTensor("w[4,0]", 0, len(content), "F32", WHOLE.shape),)
    for form, name in (("safetensors", "w[4,0]"), ("dcp", "w")):
        assert [*stored_tensors(version(ExpectedFile("m", form, recipe.encode(), tensors)))] == [name]
    odd = (ExpectedTensor("w[4]", 0, len(content), "F32", WHOLE.shape),)
    assert [*stored_tensors(version(ExpectedFile("m", "dcp", recipe.encode(), odd)))] == ["w[4]"]


def test_bytes_without_a_dtype_are_compared_as_bytes() -> None:
    """As those of a quantised GGUF tensor: only what they are is known, not how they are read."""
    content = WHOLE.tobytes()
    recipe = Recipe([Piece(len(content), ChunkId(blake3(content).digest()))])
    file = ExpectedFile("m", "gguf", recipe.encode(), (ExpectedTensor("w", 0, 240, "U8", (240,)),))
    assert not verified(WHOLE, file).bad and not verified(WHOLE, file).refusal
    assert verified(WHOLE + 1, file).bad
    refusal = verified(WHOLE[:6], file).refusal
    assert refusal is not None and refusal.reason is Reason.DTYPE


def test_a_shape_that_has_more_bytes_than_are_described_is_refused() -> None:
    """What is called verified was hashed to its last byte."""
    content = WHOLE.tobytes()
    recipe = Recipe([Piece(120, ChunkId(blake3(content[:120]).digest()))])
    tensor = ExpectedTensor("w", 0, 120, "F32", WHOLE.shape)
    for form in ("safetensors", "dcp"):
        refusal = verified(WHOLE, ExpectedFile("m", form, recipe.encode(), (tensor,))).refusal
        assert refusal is not None and refusal.reason is Reason.DAMAGED, form


def test_an_answer_that_contradicts_itself_refuses_its_tensor_only() -> None:
    good, other = shard(0, "w", WHOLE), shard(1, "v", WHOLE)
    short = ExpectedFile("x", "dcp", other.recipe, (ExpectedTensor("v", 8, 240, "F32", WHOLE.shape),))
    report = gpu.verify({"w": WHOLE, "v": WHOLE}, version(good, short))
    (one,) = report.unverifiable
    assert one.name == "v" and one.refusal is not None and one.refusal.reason is Reason.DAMAGED
    assert [row.name for row in report.verified] == ["w"]
