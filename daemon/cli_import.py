"""The command `import`: directories that are there already become versions.

One rule: as in cli_versions.py. It ends with 1 if something could not be imported, or with --move not be
removed; with --follow it goes on until it is told to stop.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptfs.daemon.cli_output import (
    AsJson,
    Failed,
    StoreDir,
    human_bytes,
    print_json,
    progress_shown,
    say,
    show_table,
)

if TYPE_CHECKING:
    from ckptfs.daemon.cli_source import Source
    from ckptfs.daemon.following import Following
    from ckptfs.daemon.messages import Import
    from ckptfs.daemon.outside import Outside

_LOOK_AGAIN = 20
"""A directory that takes long to look at is looked at for a twentieth of the time at most."""
_TRY_AGAIN_S = 10.0
_LEFT_BYTES = 32_000


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command("import")(import_)


def import_(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run: a directory with checkpoints.")],
    unit: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="UNIT", help="The unit: a name, or a path on a mount. Default: DIR's name."
        ),
    ] = None,
    move: Annotated[
        bool, typer.Option("--move", help="Remove each checkpoint once a durable version has it.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on: make a version of each save that is done, until stopped.")
    ] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="S", help="With --follow: look every S seconds.", min=0.1)
    ] = 2.0,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Make the newest version the live directory as well.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    store: StoreDir = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="With --store or --follow: a TOML file to go by."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make versions of a directory that is there already, one of each checkpoint in it."""
    if follow and (move or dry_run):
        raise typer.BadParameter("--follow only reads; it goes with neither --move nor --dry-run")
    from ckptfs.daemon.config import load_config
    from ckptfs.daemon.messages import Import

    settings = load_config(config)
    source = os.path.abspath(directory)
    inner = _unit_in(unit, source, store)
    request = Import(
        path=inner[1], source=source, move=move, live=live and not follow, dry_run=dry_run, follows=follow
    )
    if follow:
        _follow(
            request, inner[0], store, settings.key, (settings.settle_s, settings.settle_max_s, every), as_json
        )
        return
    with _opened(inner[0], store, settings.key) as answerer, progress_shown("import") as on_progress:
        answer = cast("Mapping[str, object]", answerer.ask(_identified(request), on_progress))
    _show(answer, as_json=as_json)


def _unit_in(unit: str | None, source: str, store: str | None) -> tuple[str, str]:
    """The mount ("": the store is named) and the unit's path as seen from its root."""
    from ckptfs.daemon.cli_source import locate, seen_from_mount, the_only_mount
    from ckptfs.store.errors import InvalidRequest

    name = os.path.basename(source) if unit is None else unit
    if not name.strip("/"):
        raise InvalidRequest(f"what is the unit to be called? Say it with --as, such as --as {source}run")
    if store is not None:
        return "", seen_from_mount(name)
    if unit is not None and unit.startswith("/"):
        entry, inner = locate(unit)
        return entry.path, inner
    return the_only_mount(), seen_from_mount(name)


@contextmanager
def _opened(mount: str, store: str | None, key: str) -> Iterator[Source]:
    from ckptfs.daemon.cli_source import opened, store_for_import

    if store is None:
        with opened(mount, None) as (source, _):
            yield source
    else:
        with store_for_import(store, key) as source:
            yield source


def _identified(request: Import) -> Import:
    """The request, with what the directory is here: the daemon may be in another container."""
    from msgspec.structs import replace

    found = os.stat(request.source)
    return replace(request, device=found.st_dev, inode=found.st_ino)


def _show(answer: Mapping[str, object], *, as_json: bool) -> None:
    problems = [str(one) for one in cast("Sequence[object]", answer.get("problems", ()))]
    if as_json:
        print_json(answer)
    elif answer["dry_run"]:
        _show_plan(answer)
    else:
        for problem in problems:
            say(problem)
        _show_done(answer)
    if problems:
        raise Failed(1)


def _show_plan(answer: Mapping[str, object]) -> None:
    versions = cast("Sequence[Mapping[str, object]]", answer["versions"])
    rows = [
        (
            str(one["time"]),
            "" if one["step"] is None else str(one["step"]),
            str(one["files"]),
            human_bytes(cast(int, one["bytes"])),
            " ".join(map(str, cast("Sequence[object]", one["names"]))),
        )
        for one in versions
    ]
    say(f"{answer['unit']} would get {len(versions)} versions")
    if rows:
        show_table(("time", "step", "files", "to read", "of"), rows)


def _show_done(answer: Mapping[str, object]) -> None:
    versions = cast("Sequence[Mapping[str, object]]", answer["versions"])
    taken = cast("Mapping[str, int]", answer["bytes"])
    ways = ", ".join(f"{human_bytes(count)} {way}" for way, count in taken.items() if count) or "nothing read"
    removed = f", {answer['removed_files']} files removed" if answer["removed_files"] else ""
    say(f"{answer['unit']} has {len(versions)} new versions, up to {answer['newest']} ({ways}{removed})")
    if not answer["live"]:
        say(f"its directory was not made ({answer['why']}); see .versions/{answer['unit']}")


# ---- following -----------------------------------------------------------------------------------


def _follow(
    request: Import, mount: str, store: str | None, key: str, times: tuple[float, float, float], as_json: bool
) -> None:
    from ckptfs.daemon.following import Following
    from ckptfs.daemon.outside import Outside
    from ckptfs.store.errors import Conflict, NoSpace, NotFound, Unavailable

    settle_s, settle_max_s, every_s = times
    outside: Outside | None = None
    following: Following | None = None
    said = ""
    while True:
        began = time.monotonic()
        pause_s, trouble = every_s, ""
        try:
            if outside is not None and _is_another(outside):
                outside.close()
                outside = following = None  # what has its name now may not be one that can be opened
            if outside is None or following is None:
                outside = Outside(request.source)
                following = Following(outside, settle_s, settle_max_s)
            top = outside.scan()
            ready = following.look(top, began)
            looked_s = time.monotonic() - began
            pause_s = max(every_s, _LOOK_AGAIN * looked_s)
            if ready is not None:
                asked = _leaving(request, _left(ready.left), ready.looked_ns)
                with _opened(mount, store, key) as answerer:
                    answer = cast("Mapping[str, object]", answerer.ask(_identified(asked)))
                following.taken(began)
                _tell(answer, as_json=as_json)
        except (Unavailable, NotFound, NoSpace, Conflict, OSError) as e:
            # The writer, the daemon, the directory or room: all of them come back.
            trouble, pause_s = str(e), max(pause_s, min(_TRY_AGAIN_S, settle_s))
            if following is not None:
                following.refused(began)
        if trouble and trouble != said:
            typer.echo(f"ckptfs: {trouble}; trying again", err=True)
        said = trouble
        time.sleep(pause_s)


def _is_another(outside: Outside) -> bool:
    """Whether something else has the directory's name now."""
    now = os.stat(outside.path)
    return (now.st_dev, now.st_ino) != (outside.status.st_dev, outside.status.st_ino)


def _left(paths: Sequence[tuple[bytes, ...]]) -> tuple[str, ...]:
    """As the request has them."""
    from ckptfs.store.errors import Unavailable

    said = tuple(sorted(os.fsdecode(b"/".join(path)) or "." for path in paths))
    if sum(map(len, said)) > _LEFT_BYTES:
        raise Unavailable(f"{len(said)} places are being written at once; that is waited for")
    return said


def _leaving(request: Import, left: tuple[str, ...], looked_ns: int) -> Import:
    from msgspec.structs import replace

    return replace(request, left=left, looked_ns=looked_ns)


def _tell(answer: Mapping[str, object], *, as_json: bool) -> None:
    """One line for each version."""
    for version in cast("Sequence[Mapping[str, object]]", answer["versions"]):
        if as_json:
            print(json.dumps({"unit": answer["unit"], **version}))
        else:
            step = "" if version["step"] is None else f", step {version['step']}"
            say(f"{answer['unit']}: {version['name']} ({version['state']}{step})")
    sys.stdout.flush()
