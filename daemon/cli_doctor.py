"""`ckptfs doctor`: look at machine, stores and mounts, say what is wrong and what to do about it.

One rule: it ends with 1 if there is a problem, and changes nothing without --fix; with it only what cannot
lose anything (a dead mount, the mode of a key).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptfs.daemon.cli_output import AsJson, Failed, print_json, say
from ckptfs.daemon.diagnosis import Finding, Level, carried_out, mended

if TYPE_CHECKING:
    from ckptfs.daemon.mounts import MountEntry

_SIGNS = {Level.FINE: "  ", Level.NOTE: "- ", Level.PROBLEM: "! "}
_WIDTH = 13


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    path: Annotated[str | None, typer.Argument(metavar="PATH", help="On the mount that is meant.")] = None,
    store: Annotated[str | None, typer.Option("--store", metavar="DIR", help="This store too.")] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="The configuration of the mount.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Put right what cannot lose anything.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with this machine, the mounts on it and their stores."""
    from ckptfs.daemon.config import load_config

    load_config(config)  # what is wrong in it is said before anything else
    found = []
    for one in _findings(path, store, config):
        if fix:
            one = mended(one)
        found.append(one)
        if not as_json:
            _show(one)
    if as_json:
        print_json(
            [
                {"check": one.check, "level": one.level, "said": one.said, "advice": one.advice}
                for one in found
            ]
        )
    if any(one.level is Level.PROBLEM for one in found):
        raise Failed(1)


def _findings(path: str | None, store: str | None, config: str | None) -> Iterator[Finding]:
    from ckptfs.daemon import doctor_machine
    from ckptfs.daemon.mounts import find_mounted, mount_table

    for name, check in (
        ("kernel", doctor_machine.kernel),
        ("fuse", doctor_machine.fuse),
        ("fusermount3", doctor_machine.tools),
        ("other users", doctor_machine.other_users),
        ("limits", doctor_machine.limits),
    ):
        yield from carried_out(name, check)
    if path is not None:
        mounts = [find_mounted(path).mount]
    else:
        mounts = [entry for entry in mount_table() if entry.is_ckptfs] if store is None else []
    if not mounts:
        yield from carried_out("clock", lambda: doctor_machine.clock(time.time_ns(), None))
    for entry in mounts:
        yield from _of_mount(entry, config)
    if store is not None:
        yield from _of_store(store, config, 0)


def _of_mount(entry: MountEntry, config: str | None) -> Iterator[Finding]:
    """`config`: the file that was given; else the one that the daemon says it has read."""
    from ckptfs.daemon import doctor_machine, doctor_mount

    answers = list(carried_out("mount", lambda: doctor_mount.answering(entry)))
    yield from answers
    yield from carried_out("containers", lambda: doctor_mount.seen_by(entry))
    if any(one.level is Level.PROBLEM for one in answers):
        yield from _of_store(entry.source, config, 0)
        return
    newest: list[Mapping[str, object]] = []
    read: list[str | None] = [config]

    def status() -> Iterator[Finding]:
        said = doctor_mount.ask(entry)
        read.append(config or cast("str | None", said.get("config")))
        newest.extend(doctor_mount.newest_versions(entry, said))
        yield from doctor_mount.said_by(said)

    yield from carried_out("status", status)
    times = [cast(int, one["time_ns"]) for one in newest]
    yield from carried_out("clock", lambda: doctor_machine.clock(time.time_ns(), max(times, default=None)))
    yield from carried_out("modes", lambda: doctor_mount.owner_only(entry))
    yield from _of_store(
        entry.source, read[-1], max((cast(int, one["logical_bytes"]) for one in newest), default=0)
    )


def _of_store(store: str, config: str | None, save_bytes: int) -> Iterator[Finding]:
    from ckptfs.daemon import doctor_store
    from ckptfs.daemon.config import load_config
    from ckptfs.daemon.keys import key_path

    yield from carried_out("store", lambda: doctor_store.store(store))
    yield from carried_out("holes", lambda: doctor_store.punching(store))
    yield from carried_out("room", lambda: doctor_store.room(store, save_bytes))
    yield from carried_out("key", lambda: doctor_store.key(key_path(load_config(config).key), store))
    yield from carried_out("kept aside", lambda: doctor_store.kept_aside(store))


def _show(one: Finding) -> None:
    say(f"{_SIGNS[one.level]}{one.check:<{_WIDTH}}{one.said}")
    if one.advice:
        say(f"  {'':<{_WIDTH}}→ {one.advice}")
