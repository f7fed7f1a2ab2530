"""JSON that somebody else wrote, parsed within a bound on the memory it can take.

One rule: the number of values is bounded before anything is built, for 3 bytes of hostile JSON can
become 60 bytes of Python objects.

Source: RFC 8259.
"""

from __future__ import annotations

import json
from typing import Final

MAX_JSON_BYTES: Final = 32 * 1024 * 1024
MAX_JSON_MARKS: Final = 1_500_000
"""A safetensors header has 12 a tensor, so this is some 120,000 tensors and 150 MB of objects."""

Members = list[tuple[str, object]]


class JsonObject(Members):
    """The members of an object, which an empty array is not."""

    __slots__ = ()


class TooLarge(Exception):
    """More than this reader takes; that says nothing about whether the text is right."""


def parse_members(raw: bytes) -> Members:
    """Return the members of a JSON object in their order, nested objects as such lists too.

    Equal keys are all returned. ValueError: not a JSON object. TooLarge: see the class.
    """
    if len(raw) > MAX_JSON_BYTES or sum(raw.count(mark) for mark in b"{[,:") > MAX_JSON_MARKS:
        raise TooLarge
    try:
        top = json.loads(raw.decode(), object_pairs_hook=JsonObject)
    except (ValueError, RecursionError) as error:
        raise ValueError("is not JSON") from error
    if not is_members(top):
        raise ValueError("is not a JSON object")
    return members(top)


def is_members(value: object) -> bool:
    """Tell whether a parsed value was a JSON object."""
    return isinstance(value, JsonObject)


def members(value: object) -> Members:
    """Return the members of a parsed value, none when it was no object."""
    return value if isinstance(value, JsonObject) else []
