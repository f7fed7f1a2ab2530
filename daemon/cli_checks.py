"""Commands about the state of things: status, verify, diff, scrub, du, gc.

One rule: as in cli_versions.py. `verify` and `scrub` end with 1 when something is wrong, or was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, cast

import typer

from ckptfs.daemon.cli_memory import verify_on_device
from ckptfs.daemon.cli_output import (
    AsJson,
    Failed,
    StoreDir,
    human_bytes,
    print_json,
    progress_shown,
    say,
    show_diff,
    show_gc,
    show_status,
)
from ckptfs.store.encoding_level import Level
from ckptfs.store.errors import InvalidRequest

MaybeVersion = Annotated[str, typer.Argument(metavar="PATH[@VERSION]")]
MaybePath = Annotated[
    str | None, typer.Argument(metavar="PATH", help="Something on the mount that is meant.")
]


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    for command in (status, verify, diff, scrub, du, gc, encode):
        app.command()(command)


def status(path: MaybePath = None, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Show how a mount is: its write path, its units, its space."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened, the_only_mount

    if path is None:
        path = the_only_mount() if store is None else "/"
    with opened(path, store) as (source, inner):
        answer = cast("Mapping[str, object]", source.ask(messages.Status(path=inner)))
    print_json(answer) if as_json else show_status(answer)


def verify(
    path: MaybeVersion,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="D", help="Load its tensors into memory of cpu or cuda:0 and hash them there."
        ),
    ] = None,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Read a version (the latest, if none is named) and hash it again, chunk by chunk.

    With --device the files with tensors are read through the mount, as a job reads them.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    if device is not None:
        if store is not None:
            raise InvalidRequest("--device reads a version through its mount; leave out --store")
        verify_on_device(path, device, as_json=as_json)
        return
    with opened(path, store) as (source, inner), progress_shown("verify") as on_progress:
        answer = cast("Mapping[str, object]", source.ask(messages.Verify(path=inner), on_progress))
    corrupt = cast("Sequence[Mapping[str, object]]", answer["corrupt"])
    if as_json:
        print_json(answer)
    else:
        for one in corrupt:
            say(f"corrupt: {_named(one)}: chunk {one['chunk']} at {one['place']}")
        say(f"{answer['name']}: {_checked(answer)}, {len(corrupt)} corrupt")
    if corrupt:
        raise Failed(1)


def diff(
    before: Annotated[str, typer.Argument(metavar="PATH[@VERSION]")],
    after: Annotated[str, typer.Argument(metavar="PATH[@VERSION]")],
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what is different in a version from another, by file and by tensor."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened_all

    with opened_all([before, after], store) as (source, inner), progress_shown("diff") as on_progress:
        request = messages.Diff(path=inner[0], other=inner[1])
        answer = cast("Mapping[str, object]", source.ask(request, on_progress))
    print_json(answer) if as_json else show_diff(answer)


def scrub(path: MaybePath = None, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Read and check everything that the store holds, now; put right what has a second copy.

    For the owner of the store. Ends with 1 if anything was wrong, also if it was put right.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened, the_only_mount

    if path is None:
        path = the_only_mount() if store is None else "/"
    with opened(path, store) as (source, inner), progress_shown("scrub") as on_progress:
        answer = cast("Mapping[str, object]", source.ask(messages.Scrub(path=inner), on_progress))
    found = cast("Sequence[Mapping[str, object]]", answer["corrupt"])
    if as_json:
        print_json(answer)
    else:
        for one in found:
            state = "healed" if one["healed"] else "corrupt"
            say(f"{state}: {_named(one)}{': ' if one['path'] else ''}{one['what']} at {one['place']}")
        healed = sum(bool(one["healed"]) for one in found)
        left = len(found) - healed + cast(int, answer["more"])
        say(f"{_checked(answer)}, {left} corrupt, {healed} healed")
    if found:
        raise Failed(1)


def _named(one: Mapping[str, object]) -> str:
    tensor = f", tensor {one['tensor']}" if one["tensor"] else ""
    return f"{one['path'] or ''}{tensor}"


def _checked(answer: Mapping[str, object]) -> str:
    """How much was checked, and how fast."""
    count, elapsed_s = cast(int, answer["checked_bytes"]), cast(float, answer.get("elapsed_s", 0.0))
    rate = f" at {human_bytes(int(count / elapsed_s))}/s" if elapsed_s else ""
    return f"{human_bytes(count)} in {answer['chunks']} chunks checked{rate}"


def du(
    path: MaybeVersion,
    by_dtype: Annotated[
        bool, typer.Option("--by-dtype", help="By the types of tensors' values, too; looks into every file.")
    ] = False,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what a unit takes: every content in its history and on the mount counts once.

    With @VERSION only what that version holds. logical_bytes: the files' sizes (a file that did not
    change from one version to the next counts once); unique_bytes: the distinct chunks of them;
    stored_bytes: what these take in the store.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(path, store) as (source, inner):
        answer = cast("Mapping[str, object]", source.ask(messages.Du(path=inner, by_dtype=by_dtype)))
    if as_json:
        print_json(answer)
        return
    logical, unique, stored = (cast(int, answer[f"{key}_bytes"]) for key in ("logical", "unique", "stored"))
    say(f"logical {human_bytes(logical)}, unique {human_bytes(unique)}, stored {human_bytes(stored)}")
    by_codec = cast("Mapping[str, Mapping[str, int]]", answer["by_codec"])
    parts = [*by_codec.items()] if by_codec.keys() - {"raw"} else []
    parts += cast("Mapping[str, Mapping[str, int]]", answer.get("by_dtype") or {}).items()
    for name, sums in parts:
        say(f"  {name}: {human_bytes(sums['unique_bytes'])} in {human_bytes(sums['stored_bytes'])}")


def gc(
    path: MaybePath = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would go.")] = False,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Let go the versions that no policy keeps, give back the space of what nothing refers to any more,
    and say what holds the rest (each stored byte counts for the first of its reasons)."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened, the_only_mount

    if path is None:
        path = the_only_mount() if store is None else "/"
    with opened(path, store) as (source, inner):
        answer = cast("Mapping[str, object]", source.ask(messages.Gc(path=inner, dry_run=dry_run)))
    print_json(answer) if as_json else show_gc(answer)


def encode(
    path: MaybeVersion,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, say how much would be looked at.")
    ] = False,
    level: Annotated[
        Level | None,
        typer.Option(help="How small: small takes longer to make and to read. As configured, if not said."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Store the saves of a unit smaller, without loss: all but the newest of each kind, or a version's.

    For the owner of the store. What was encoded reads as before, a little slower.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(path, None) as (source, inner), progress_shown("encode") as on_progress:
        request = messages.Encode(path=inner, dry_run=dry_run, level=level)
        answer = cast("Mapping[str, object]", source.ask(request, on_progress))
    if as_json:
        print_json(answer)
        return
    looked_at, chunks = human_bytes(cast(int, answer["looked_at_bytes"])), answer["chunks"]
    if dry_run:
        say(f"{looked_at} in {chunks} chunks would be looked at")
        return
    plain, encoded = (human_bytes(cast(int, answer[key])) for key in ("plain_bytes", "encoded_bytes"))
    say(f"{looked_at} in {chunks} chunks looked at, {plain} of it in {encoded} now")
