"""health: every count against floating point arithmetic; however the bytes come; records and rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from golden import broken, plain, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.store import health_records
from ckptfs.store.dagcbor import Node, decode_node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.formats import Tensor
from ckptfs.store.health import Health, element_bytes
from ckptfs.store.health_records import (
    MOST_CONTENTS,
    NO_TENSORS,
    ContentHealth,
    HealthRecord,
    HealthSum,
    TensorHealth,
    VersionHealth,
    decode_content_row,
    decode_content_sum,
    decode_health_record,
    decode_version_row,
    encode_content_row,
    encode_version_row,
    records_of,
    sum_of,
    tensor_health,
)
from ckptfs.store.health_run import HealthRun
from ckptfs.store.ids import ChunkId, RecipeId

# The smallest normal and the largest finite number of each dtype.
LIMITS = {
    "F64": (2.0**-1022, (2 - 2.0**-52) * 2.0**1023),
    "F32": (2.0**-126, (2 - 2.0**-23) * 2.0**127),
    "F16": (2.0**-14, 65504.0),
    "BF16": (2.0**-126, (2 - 2.0**-7) * 2.0**127),
}
UNSIGNED = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2"}
F16_OVERFLOWS_AT = 65520.0
BF16_OVERFLOWS_AT = (2 - 2.0**-8) * 2.0**127


def numbers(dtype: str, raw: bytes) -> npt.NDArray[np.float64]:
    """The values, exactly."""
    if dtype == "BF16":
        found = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        found = np.frombuffer(raw, f"<f{element_bytes(dtype)}")
    with np.errstate(invalid="ignore"):  # There are NaNs that signal.
        return found.astype(np.float64)


def expected(dtype: str, raw: bytes) -> Health:
    """The same by comparing numbers."""
    every = numbers(dtype, raw)
    finite = np.abs(every[np.isfinite(every)])
    normal, most = LIMITS[dtype]
    return Health(
        dtype,
        elements=every.size,
        nan=int(np.isnan(every).sum()),
        infinite=int(np.isinf(every).sum()),
        saturated=int((finite == most).sum()),
        over_f16=int((finite >= F16_OVERFLOWS_AT).sum()),
        over_bf16=int((finite >= BF16_OVERFLOWS_AT).sum()),
        subnormal=int(((finite > 0) & (finite < normal)).sum()),
        zero=int((finite == 0).sum()),
        largest=float(finite.max(initial=0)),
    )


def edges(dtype: str) -> list[int]:
    """Bits next to every limit, of both signs."""
    size = element_bytes(dtype)
    normal, most = LIMITS[dtype]
    found = []
    for number in (0.0, normal, most, math.inf, F16_OVERFLOWS_AT, BF16_OVERFLOWS_AT):
        with np.errstate(over="ignore"):
            if dtype == "BF16":
                bits = int(np.float32(number).view(np.uint32)) >> 16
            else:
                bits = int(np.array(number, f"<f{size}").view(UNSIGNED[dtype]))
        found += [bits + step for step in (-2, -1, 0, 1, 2)]
    sign = 1 << (8 * size - 1)
    return [one & (sign - 1) | negative for one in found for negative in (0, sign)]


def bits_of(dtype: str) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from(edges(dtype)), st.integers(0, (1 << 8 * element_bytes(dtype)) - 1))


def raw_of(dtype: str, most: int = 40) -> st.SearchStrategy[bytes]:
    size = element_bytes(dtype)
    return st.lists(bits_of(dtype), max_size=most).map(
        lambda bits: b"".join(one.to_bytes(size, "little") for one in bits)
    )


@pytest.mark.parametrize("dtype", LIMITS)
def test_every_limit(dtype: str) -> None:
    size = element_bytes(dtype)
    raw = b"".join(one.to_bytes(size, "little") for one in edges(dtype))
    found = Health(dtype)
    found.add(raw)
    assert found == expected(dtype, raw)
    assert min(found.nan, found.infinite, found.saturated, found.subnormal, found.zero) > 0


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_number_of_two_bytes(dtype: str) -> None:
    raw = np.arange(1 << 16, dtype="<u2").tobytes()
    found = Health(dtype)
    found.add(raw)
    assert found == expected(dtype, raw)


@settings(deadline=None)
@given(st.data())
def test_windows_at_any_address(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(LIMITS)))
    raws = data.draw(st.lists(raw_of(dtype), max_size=4))
    found = Health(dtype)
    for raw in raws:
        shift = data.draw(st.integers(0, 15))
        found.add(memoryview(bytes(shift) + raw)[shift:])
    assert found == expected(dtype, b"".join(raws))


def test_a_window_is_counted_in_parts() -> None:
    raw = np.concatenate(
        [np.full(200_000, 2.0, np.float32), np.array([np.nan, 1e38, 0], np.float32)]
    ).tobytes()
    found = Health("F32")
    found.add(raw)
    assert found == expected("F32", raw)


# ---- a run over a file ----------------------------------------------------------------------


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[Tensor]]:
    """Bytes, and where tensors lie in them: at any offset, with anything between them."""
    content, tensors = b"", []
    for number in range(draw(st.integers(0, 4))):
        content += draw(st.binary(max_size=9))
        dtype = draw(st.sampled_from([*LIMITS, "I32"]))
        raw = draw(raw_of(dtype if dtype in LIMITS else "F32", 12))
        if raw:
            shape = (len(raw) // (element_bytes(dtype) if dtype in LIMITS else 4),)
            tensors.append(Tensor(f"t{number}", len(content), len(raw), dtype, shape))
        content += raw
    return content + draw(st.binary(max_size=9)), tensors


@settings(deadline=None)
@given(files(), st.randoms(use_true_random=False))
def test_the_bytes_come_in_pieces_of_any_length(file: tuple[bytes, list[Tensor]], random: Any) -> None:
    content, tensors = file
    run, at = HealthRun(tensors), 0
    while at < len(content):
        length = random.choice((1, 3, 7, 64, 1000))
        run.update(content[at : at + length])
        at += length
    floats = [one for one in tensors if one.dtype in LIMITS]
    rows = [
        tensor_health(one.offset, one.length, expected(one.dtype, content[one.offset : one.end]))
        for one in floats
    ]
    assert run.is_empty == (not floats)
    assert run.finish() == (ContentHealth(sum_of(rows), tuple(rows)) if rows else None)


def test_a_hole_is_zeros() -> None:
    length = 1_000_003
    tensors = [Tensor("a", 1, 400_000, "F32", (100_000,)), Tensor("b", 400_001, 600_002, "BF16", (300_001,))]
    run = HealthRun(tensors)
    run.update(b"\1")
    run.update_zeros(length - 1)
    found = run.finish()
    assert found is not None and (found.total.zero, found.total.tensors) == (400_001, 2)


def test_of_many_tensors_the_bad_ones_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfs.store.health_run.MOST_LISTED", 4)
    values = np.ones(50, np.float32)
    values[[7, 33, 48]] = np.nan
    run = HealthRun([Tensor(f"t{n}", 4 * n, 4, "F32", (1,)) for n in range(50)])
    run.update(values.tobytes())
    found = run.finish()
    assert found is not None and found.total.tensors == 50 and found.total.bad == 3
    assert [row.offset // 4 for row in found.listed] == [0, 7, 33, 48]


# ---- records and rows -----------------------------------------------------------------------

ROWS = files().map(
    lambda file: [
        tensor_health(one.offset, one.length, expected(one.dtype, file[0][one.offset : one.end]))
        for one in file[1]
        if one.dtype in LIMITS
    ]
)
CONTENTS = ROWS.filter(bool).map(lambda rows: ContentHealth(sum_of(rows), tuple(rows)))
IDS = st.binary(min_size=32, max_size=32).map(lambda b: RecipeId(ChunkId(b)))
RECORDS = st.dictionaries(IDS, CONTENTS, min_size=1, max_size=3).map(HealthRecord)


@pytest.mark.parametrize("vector", vectors("health"), ids=lambda v: v["name"])
def test_golden_records(vector: dict[str, Any]) -> None:
    encoded = bytes.fromhex(vector["hex"])
    record = decode_health_record(encoded)
    assert record.encode() == encoded
    assert {recipe.hex(): plain(one) for recipe, one in record.contents.items()} == vector["contents"]
    rows = [encode_content_row(one).hex() for one in record.contents.values()]
    assert rows == vector["rows"]
    assert decode_version_row(bytes.fromhex(vector["version_row"])) == VersionHealth(
        sum((one.total for one in record.contents.values()), HealthSum()), 2
    )


@settings(deadline=None, max_examples=25)
@given(RECORDS)
def test_what_is_encoded_is_decoded(record: HealthRecord) -> None:
    assert decode_health_record(record.encode()) == record
    for one in record.contents.values():
        assert decode_content_row(encode_content_row(one)) == one
        assert decode_content_sum(encode_content_row(one)) == one.total
    version = VersionHealth(sum((one.total for one in record.contents.values()), HealthSum()), 3)
    assert decode_version_row(encode_version_row(version)) == version


def test_the_row_of_a_content_without_a_tensor() -> None:
    assert decode_content_row(NO_TENSORS) is None and decode_content_sum(NO_TENSORS) == HealthSum()


@settings(deadline=None, max_examples=300)
@given(broken(st.sampled_from([bytes.fromhex(vector["hex"]) for vector in vectors("health")])))
def test_any_bytes_are_a_record_or_corrupt(encoded: bytes) -> None:
    try:
        record = decode_health_record(encoded)
    except Corrupt:
        return
    assert record.encode() == encoded


ROW = TensorHealth(8, 40, "F32", 1, 1, 0, 1, 0, 2, 3, 70_000.0)
Edit = Callable[[list[Node]], object]


def encode_and_split(rows: list[TensorHealth]) -> list[Node]:
    content = ContentHealth(sum_of(rows), tuple(rows))
    node = decode_node(HealthRecord({RecipeId(ChunkId(bytes(32))): content}).encode())
    return node["health"][0]  # type: ignore[index, return-value, call-overload]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, -1), (0, 1 << 63), (0, True), (0, (1 << 63) - 20), (1, 0), (1, 41), (1, 8),
        (2, "I32"), (2, "F33"), (2, b"F32"),
        (3, -1), (3, 8), (9, 11), (8, 1 << 63), (10, bytes(7)), (10, 1),
        (10, np.float64(np.nan).tobytes()), (10, np.float64(np.inf).tobytes()),
        (10, np.float64(-1).tobytes()), (10, np.float64(-0.0).tobytes()),
    ],
)  # fmt: skip
def test_a_tensor_that_nobody_writes_is_corrupt(place: int, value: Node) -> None:
    row = encode_and_split([ROW])
    assert decode_health_record(encode_node({"health": [row]}))
    row[2][0][place] = value  # type: ignore[index, call-overload]
    with pytest.raises(Corrupt):
        decode_health_record(encode_node({"health": [row]}))


@pytest.mark.parametrize(
    "edit",
    [
        lambda row: row.pop(),
        lambda row: row.append(1),
        lambda row: row.__setitem__(0, bytes(31)),
        lambda row: row[1].pop(),
        lambda row: row[1].__setitem__(0, 0),
        lambda row: row[1].__setitem__(3, 2),
        lambda row: row[2].clear(),
        lambda row: row[2].append(row[2][0]),
        lambda row: row[2][0].append(0),
        lambda row: row.__setitem__(2, [1]),
    ],
    ids=range(10),
)
def test_a_content_that_nobody_writes_is_corrupt(edit: Edit) -> None:
    row = encode_and_split([ROW])
    edit(row)
    with pytest.raises(Corrupt):
        decode_health_record(encode_node({"health": [row]}))


def test_contents_rise_and_are_not_too_many() -> None:
    row = encode_and_split([ROW])
    named: list[Node] = [[number.to_bytes(32, "big"), *row[1:]] for number in range(MOST_CONTENTS + 1)]
    decode_health_record(encode_node({"health": named[:2]}))
    for rows in ([], named, [named[1], named[0]], [named[0], named[0]]):
        with pytest.raises(Corrupt):
            decode_health_record(encode_node({"health": rows}))


@pytest.mark.parametrize("encoded", [b"\x90", b"\xff", encode_version_row(VersionHealth(HealthSum(), -1))])
def test_a_row_that_nobody_writes_is_corrupt(encoded: bytes) -> None:
    for decode in (decode_content_row, decode_content_sum, decode_version_row):
        with pytest.raises(Corrupt):
            decode(encoded)


def test_a_record_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_records, "_TENSORS_A_RECORD", 5)
    two = [ROW, TensorHealth(48, 4, "F32", 0, 0, 0, 0, 0, 0, 0, 1.0)]
    contents = {
        RecipeId(ChunkId(bytes([number]) * 32)): ContentHealth(sum_of(two), tuple(two)) for number in range(7)
    }
    records = list(records_of(contents))
    assert [len(one.contents) for one in records] == [2, 2, 2, 1]
    assert {k: v for one in records for k, v in one.contents.items()} == contents
