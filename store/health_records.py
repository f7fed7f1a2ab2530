"""What is known of the health of saved tensors: of one, of a content, of a version. Pure.

One rule: health belongs to a content (a recipe id), and a tensor is called by where it lies in it: what it is
named the content says itself, so no name of a file's making is in a record for ever.

Source: FORMAT.md, "Health".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from ckptfs.store.content_rows import rows_by_content
from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.errors import Corrupt
from ckptfs.store.health import Health, element_bytes, has_health, named_counts
from ckptfs.store.ids import DIGEST_BYTES, ChunkId, RecipeId

# A model with its optimizer in one file has some thousands.
MOST_LISTED: Final = 4096
MOST_CONTENTS: Final = 512
# A record stays below about 64 KiB, unless one content alone has more to say.
_TENSORS_A_RECORD: Final = 1024
_COUNTS: Final = range(1 << 63)
_LARGEST = struct.Struct("<d")
_ROW_TYPES: Final = (int, int, str, *(int,) * 7, bytes)
_SUM_TYPES: Final = (*(int,) * 10, bytes)


class TensorHealth(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The counts of Health for the tensor of `length` bytes at byte `offset` of a content."""

    offset: int
    length: int
    dtype: str
    nan: int
    infinite: int
    saturated: int
    over_f16: int
    over_bf16: int
    subnormal: int
    zero: int
    largest: float

    @property
    def is_bad(self) -> bool:
        """Whether it holds what is no finite number."""
        return bool(self.nan or self.infinite)

    @property
    def elements(self) -> int:
        """How many values it has; of a complex number both parts."""
        return self.length // element_bytes(self.dtype)


class HealthSum(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The counts of several tensors together, of which `bad` hold a NaN or an infinity."""

    tensors: int = 0
    bad: int = 0
    elements: int = 0
    nan: int = 0
    infinite: int = 0
    saturated: int = 0
    over_f16: int = 0
    over_bf16: int = 0
    subnormal: int = 0
    zero: int = 0
    largest: float = 0.0

    def __add__(self, other: HealthSum) -> HealthSum:
        counts = (a + b for a, b in zip(_counts(self), _counts(other), strict=True))
        return _sum(counts, max(self.largest, other.largest))

    def facts(self) -> dict[str, int | float]:
        """The counts by the names that they have in JSON."""
        return {
            "tensors": self.tensors,
            "bad_tensors": self.bad,
            "elements": self.elements,
            **named_counts(self),
        }


class ContentHealth(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sum over all float tensors of a content, at least one, and those that are listed, as they lie. If
    there are more than MOST_LISTED, then those that hold a NaN or an infinity come before the others."""

    total: HealthSum
    listed: tuple[TensorHealth, ...]


class VersionHealth(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sum over the contents of a version, each counted once; of `unknown` contents nothing is known."""

    total: HealthSum
    unknown: int


def tensor_health(offset: int, length: int, health: Health) -> TensorHealth:
    """The row of a tensor all of which was counted."""
    one = health
    return TensorHealth(
        offset, length, one.dtype, one.nan, one.infinite, one.saturated, one.over_f16, one.over_bf16,
        one.subnormal, one.zero, one.largest,
    )  # fmt: skip


def sum_of(tensors: Iterable[TensorHealth]) -> HealthSum:
    """The sum over tensors."""
    rows = [
        (1, one.is_bad, one.elements, one.nan, one.infinite, one.saturated, one.over_f16, one.over_bf16,
         one.subnormal, one.zero, one.largest)
        for one in tensors
    ]  # fmt: skip
    *counts, largest = zip(*rows, strict=True) if rows else [()] * len(_SUM_TYPES)
    return _sum(map(sum, cast("list[tuple[int, ...]]", counts)), max(largest, default=0.0))


# The rows of the index.

_encoder = msgspec.msgpack.Encoder()
_content_decoder = msgspec.msgpack.Decoder(ContentHealth)
_version_decoder = msgspec.msgpack.Decoder(VersionHealth)
# The row of a content without a float tensor.
NO_TENSORS: Final = b""


class _SumFirst(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """ContentHealth, of which only the sum is looked at."""

    total: HealthSum
    listed: msgspec.Raw


_sum_decoder = msgspec.msgpack.Decoder(_SumFirst)


def encode_content_row(content: ContentHealth) -> bytes:
    """The value of a row of HEALTH."""
    return _encoder.encode(content)


def decode_content_row(encoded: bytes) -> ContentHealth | None:
    """What a row of HEALTH says, None if it has no float tensor; or Corrupt."""
    if encoded == NO_TENSORS:
        return None
    try:
        content = _content_decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"the index holds a bad row of health: {e}") from None
    _check_content(content)
    return content


def decode_content_sum(encoded: bytes) -> HealthSum:
    """The sum in a row of HEALTH, in microseconds where all of it may take milliseconds; or Corrupt."""
    if encoded == NO_TENSORS:
        return HealthSum()
    try:
        total = _sum_decoder.decode(encoded).total
    except msgspec.DecodeError as e:
        raise Corrupt(f"the index holds a bad row of health: {e}") from None
    _check_numbers(_counts(total), total.largest)
    if not total.tensors:
        raise Corrupt("the health of a content is that of no tensor")
    return total


def encode_version_row(version: VersionHealth) -> bytes:
    """The value of a row META `health:`."""
    return _encoder.encode(version)


def decode_version_row(encoded: bytes) -> VersionHealth:
    """What a row META `health:` says, or Corrupt."""
    try:
        version = _version_decoder.decode(encoded)
    except msgspec.DecodeError as e:
        raise Corrupt(f"the index holds a bad row of a version's health: {e}") from None
    if version.unknown not in _COUNTS:
        raise Corrupt("a version's health has a number out of range")
    _check_numbers(_counts(version.total), version.total.largest)
    return version


# The records of the histories.


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """The payload of a HEALTH frame: the health of 1 to MOST_CONTENTS contents."""

    contents: Mapping[RecipeId, ContentHealth]

    def encode(self) -> bytes:
        """Canonical bytes."""
        assert 0 < len(self.contents) <= MOST_CONTENTS
        rows: list[Node] = [
            [recipe, _sum_node(one.total), [_tensor_node(tensor) for tensor in one.listed]]
            for recipe, one in sorted(self.contents.items())
        ]
        return encode_node({"health": rows})


def records_of(contents: Mapping[RecipeId, ContentHealth]) -> Iterable[HealthRecord]:
    """The records that contents make, each of a size to be read in one go."""
    some: dict[RecipeId, ContentHealth] = {}
    tensors = 0
    for recipe, one in sorted(contents.items()):
        if some and (len(some) == MOST_CONTENTS or tensors + len(one.listed) > _TENSORS_A_RECORD):
            yield HealthRecord(some)
            some, tensors = {}, 0
        some[recipe] = one
        tensors += len(one.listed)
    if some:
        yield HealthRecord(some)


def encoded_records(contents: Mapping[RecipeId, ContentHealth]) -> list[tuple[HealthRecord, bytes]]:
    """The records that contents make, with their bytes, which decode to them. Takes some 20 ms for a thousand
    tensors; any thread."""
    made = [(record, record.encode()) for record in records_of(contents)]
    for record, encoded in made:
        assert decode_health_record(encoded) == record, "a health record does not decode to itself"
    return made


def decode_health_record(encoded: bytes) -> HealthRecord:
    """The record in `encoded`; Corrupt unless it is one, canonical, its contents rising."""
    return HealthRecord(rows_by_content(encoded, "health", MOST_CONTENTS, _content_of))


def _content_of(row: Node) -> tuple[RecipeId, ContentHealth]:
    if not isinstance(row, list) or [type(one) for one in row] != [bytes, list, list]:
        raise Corrupt("a health record has a row of other fields")
    recipe, total, listed = cast("tuple[bytes, list[Node], list[Node]]", tuple(row))
    if len(recipe) != DIGEST_BYTES or tuple(map(type, total)) != _SUM_TYPES:
        raise Corrupt("a health record has a row of other fields")
    *counts, largest = total
    tensors = tuple(_tensor_of(one) for one in listed)
    content = ContentHealth(_sum(cast("list[int]", counts), _float_of(largest)), tensors)
    _check_content(content)
    if len(tensors) == content.total.tensors and sum_of(tensors) != content.total:
        raise Corrupt("the health of a content is not the sum of its tensors'")
    return RecipeId(ChunkId(recipe)), content


def _tensor_of(row: Node) -> TensorHealth:
    if not isinstance(row, list) or tuple(map(type, row)) != _ROW_TYPES:
        raise Corrupt("a health record has a tensor of other fields")
    fields = [*row[:-1], _float_of(row[-1])]
    return msgspec.convert(fields, TensorHealth)


def _float_of(encoded: Node) -> float:
    if not isinstance(encoded, bytes) or len(encoded) != _LARGEST.size:
        raise Corrupt("a health record has a magnitude that is none")
    (number,) = _LARGEST.unpack(encoded)
    return cast(float, number)


def _sum_node(total: HealthSum) -> Node:
    return [*_counts(total), _LARGEST.pack(total.largest)]


def _tensor_node(one: TensorHealth) -> Node:
    return [one.offset, one.length, one.dtype, *_counts_of(one), _LARGEST.pack(one.largest)]


def _sum(counts: Iterable[int], largest: float) -> HealthSum:
    return msgspec.convert([*counts, largest], HealthSum)


def _counts(total: HealthSum) -> tuple[int, ...]:
    return cast("tuple[int, ...]", msgspec.structs.astuple(total)[:-1])


def _counts_of(one: TensorHealth) -> tuple[int, ...]:
    return cast("tuple[int, ...]", msgspec.structs.astuple(one)[3:-1])


def _check_content(content: ContentHealth) -> None:
    """Corrupt unless these could be the tensors of a file."""
    total, end = content.total, 0
    _check_numbers(_counts(total), total.largest)
    if not 0 < len(content.listed) <= min(total.tensors, MOST_LISTED):
        raise Corrupt("the health of a content lists more tensors than it has, or none")
    for one in content.listed:
        if not has_health(one.dtype) or one.length <= 0 or one.length % element_bytes(one.dtype):
            raise Corrupt("the health of a content has a tensor of no floats")
        if one.offset < end or one.offset + one.length not in _COUNTS:
            raise Corrupt("the tensors in the health of a content overlap, or end nowhere")
        end = one.offset + one.length
        _check_numbers(_counts_of(one), one.largest)
        if one.nan + one.infinite + one.subnormal + one.zero > one.elements:
            raise Corrupt("the health of a tensor counts more than its elements")


def _check_numbers(counts: Iterable[int], largest: float) -> None:
    if not all(count in _COUNTS for count in counts):
        raise Corrupt("a count of health is out of range")
    if not (math.isfinite(largest) and largest >= 0) or math.copysign(1, largest) < 0:
        raise Corrupt("a magnitude of health is no finite magnitude")
