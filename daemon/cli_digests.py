"""Commands about whole files: digest.

One rule: as in cli_versions.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, cast

import typer

from ckptfs.daemon.cli_output import AsJson, StoreDir, one_line, print_json, progress_shown

MaybeVersion = Annotated[str, typer.Argument(metavar="PATH[@VERSION]")]
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command()(digest)


def digest(path: MaybeVersion, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Print the SHA-256 of each file of a version (the latest, if none is named), as `sha256sum` does: in
    a copy of it `sha256sum -c` checks them. With --json also BLAKE3 and CRC-64/NVME.

    They are made in the background after a version was; of a file without they are made now.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(path, store) as (source, inner), progress_shown("digest") as on_progress:
        answer = cast("Mapping[str, object]", source.ask(messages.Digest(path=inner), on_progress))
    if as_json:
        print_json(answer)
        return
    for one in cast("Sequence[Mapping[str, str]]", answer["files"]):
        line = sum_line(one["sha256"], one["path"])
        print(one_line(line) if sys.stdout.isatty() else line)


def sum_line(digits: str, path: str) -> str:
    """A line of `sha256sum`, in which a name with a backslash or a line's end is escaped."""
    escaped = path.translate(_ESCAPES)
    return f"{'' if escaped == path else chr(92)}{digits}  {escaped}"
