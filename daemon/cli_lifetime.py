"""Commands about a daemon's life and its store: mount, umount, rebuild.

One rule: as in cli_versions.py. `umount` ends when the daemon has ended, so that the next command
finds the store free.
"""

from __future__ import annotations

import os
from typing import Annotated, cast

import typer

from ckptfs.daemon.cli_output import AsJson, Failed, print_json, progress_shown, say


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    for command in (mount, umount, rebuild):
        app.command()(command)


def mount(
    mountpoint: Annotated[str, typer.Argument(metavar="MOUNTPOINT", help="An empty directory.")],
    store: Annotated[str, typer.Option("--store", metavar="DIR", help="Where everything is kept.")],
    config: Annotated[str | None, typer.Option("--config", metavar="FILE", help="A TOML file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Mount a store; stays in the foreground until it is unmounted or gets SIGTERM."""
    from ckptfs.daemon.held_signals import hold_early

    hold_early(os.environ, os.getpid())  # before the imports, which take most of a second
    from ckptfs.daemon.config import load_config
    from ckptfs.store.errors import InvalidRequest

    try:
        settings = load_config(config)
    except InvalidRequest as e:
        raise typer.BadParameter(str(e)) from None
    from ckptfs.daemon.serving import serve_mount

    path = os.path.abspath(config) if config is not None else None
    serve_mount(mountpoint, store, settings, path, as_json=as_json)


def umount(
    mountpoint: Annotated[str, typer.Argument(metavar="MNT")],
    as_json: AsJson = False,
) -> None:
    """Unmount; ends when everything is durable and the daemon has ended."""
    from ckptfs.daemon.unmounting import unmount

    path = unmount(mountpoint)
    print_json({"mountpoint": path}) if as_json else say(f"{path} is unmounted")


def rebuild(
    store: Annotated[str, typer.Option("--store", metavar="DIR", help="A store that no daemon holds.")],
    as_json: AsJson = False,
) -> None:
    """Make a store's index anew from its segments and its history."""
    from ckptfs.daemon.offline import rebuild_store

    with progress_shown("rebuild", "segments") as on_progress:
        answer = rebuild_store(store, on_progress)
    missing = cast("list[str]", answer["missing"])
    if as_json:
        print_json(answer)
    else:
        for note in (*missing, *cast("list[str]", answer["skipped"]), *cast("list[str]", answer["problems"])):
            say(f"note: {note}")
        counts = (f"{answer[key]} {key}" for key in ("segments", "units", "versions", "files"))
        say(f"the index of {store} is made anew: {', '.join(counts)}")
    if missing:
        raise Failed(1)
