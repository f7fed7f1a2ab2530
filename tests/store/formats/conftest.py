"""A reader over bytes and the one statement that every parsed file must satisfy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from bytes_reader import BytesReader

from ckptfs.store.formats import Layout, Reader, parse, probe_format

ParseBytes = Callable[..., Layout | None]


def _parse_bytes(
    content: bytes, name: str = "file", siblings: Mapping[str, bytes] | None = None
) -> Layout | None:
    """Parse and check what holds for every input, then return the layout."""

    def sibling(other: str) -> Reader | None:
        return BytesReader(siblings[other]) if siblings and other in siblings else None

    probe_format(content[:64], name)
    layout = parse(BytesReader(content), name, sibling if siblings is not None else None)
    if layout is not None:
        end = 0
        for tensor in layout.tensors:
            assert end <= tensor.offset and tensor.length > 0
            end = tensor.offset + tensor.length
            tensor.name.encode()
        assert end <= len(content)
        assert len({tensor.name for tensor in layout.tensors}) == len(layout.tensors)
    return layout


@pytest.fixture(scope="session")
def parse_bytes() -> ParseBytes:
    return _parse_bytes


@pytest.fixture(scope="session")
def bytes_reader() -> Callable[[bytes], Reader]:
    return BytesReader
