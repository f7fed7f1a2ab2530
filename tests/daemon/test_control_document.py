"""daemon/CONTROL.md names every request with its fields, and every error, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from ckptfs.daemon import messages
from ckptfs.daemon.control import IDLE_S, MAX_CLIENTS, MAX_CLIENTS_PER_USER

TEXT = (Path(__file__).parents[2] / "daemon" / "CONTROL.md").read_text()


def rows(section: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    body = TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def words(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_requests_and_their_fields() -> None:
    documented = {do: words(row[1]) for row in rows("Requests") for do in words(row[0])}
    known = {
        kind.__name__.lower(): [name for name in kind.__struct_fields__ if name != "path"]
        for kind in get_args(messages.AnyRequest)
    }
    assert {do: sorted(fields) for do, fields in documented.items()} == {
        do: sorted(fields) for do, fields in known.items()
    }


def test_fields_that_must_be_there() -> None:
    marked = {name for row in rows("Requests") for name in re.findall(r"`(\w+)`!", row[1])}
    required = {
        name
        for kind in get_args(messages.AnyRequest)
        for name in kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
    }
    by_keyword = {"name", "to", "other", "source", "outcome"}
    assert marked == by_keyword and required <= by_keyword | {"path"}


def test_errors() -> None:
    assert {words(row[0])[0] for row in rows("Errors")} == set(messages.KINDS)


def test_limits() -> None:
    for limit in (messages.MAX_REQUEST_BYTES, messages.MAX_PATH_BYTES):
        assert f"{limit:,}" in TEXT
    assert f"{MAX_CLIENTS_PER_USER} connections a user and {MAX_CLIENTS} in all" in TEXT
    assert f"silent for {IDLE_S:.0f} s" in TEXT
