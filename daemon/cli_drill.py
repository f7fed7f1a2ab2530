"""The command `drill`: would it work to go on from this version?

One rule: as in cli_versions.py. It ends with 1 if it would not, or if that is in doubt.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ckptfs.daemon.cli_output import AsJson, Failed, StoreDir, print_json, progress_shown, say, write_whole

if TYPE_CHECKING:
    from ckptfs.daemon.drill_report import Drill
    from ckptfs.daemon.drilling import Options

_MIB = 1 << 20


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command()(drill)


def drill(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH[@VERSION]", help="A unit (a run), or something in it. Default: latest-complete."
        ),
    ],
    latest_complete: Annotated[
        bool, typer.Option("--latest-complete", help="The newest version that is whole.")
    ] = False,
    remote: Annotated[
        str | None, typer.Option("--remote", metavar="R", help="Fetch it from this remote of --config.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="N", help="Whose, if several nodes copied such a unit.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="F", help="With --remote: who must have signed it. Also several."),
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option("--probe", metavar="CMD", help="A shell command to run where the files are; 0 is good."),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write the report there, as JSON.")
    ] = None,
    limit: Annotated[
        float, typer.Option("--limit", metavar="S", help="How long loading, and the probe, may take.", min=1)
    ] = 3600.0,
    memory: Annotated[
        int | None,
        typer.Option(
            "--memory", metavar="MIB", help="How much loading may use. Default: by the files.", min=64
        ),
    ] = None,
    scratch: Annotated[
        str | None, typer.Option("--scratch", metavar="DIR", help="Where there is room for the version.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A TOML file, for its remotes.")
    ] = None,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Restore a version for practice: get it, prove it, load it, compare its shapes; a report with times."""
    from ckptfs.daemon.drilling import Options
    from ckptfs.store.errors import InvalidRequest
    from ckptfs.store.version_names import LATEST_COMPLETE, split_version

    place, version = split_version(path)
    if latest_complete and version is not None:
        raise InvalidRequest(f"{path} names a version; leave out --latest-complete")
    if config is None and remote is not None:
        raise InvalidRequest("say with --config FILE which configuration has the remote")
    options = Options(probe, limit, memory * _MIB if memory is not None else None, scratch)
    version = version or LATEST_COMPLETE
    if remote is not None:
        found = _of_remote(place, version, remote, node, key or [], str(config), options)
    else:
        found = _of_here(place, version, store, options)
    if out is not None:
        import json

        write_whole(out, json.dumps(found.as_json(), indent=2).encode() + b"\n")
    if as_json:
        print_json(found.as_json())
    else:
        for line in found.lines():
            say(line)
    if found.outcome != "good":
        raise Failed(1)


def _of_here(place: str, version: str, store: str | None, options: Options) -> Drill:
    from ckptfs.daemon.cli_source import locate, opened, seen_from_mount
    from ckptfs.daemon.drilling import drill_mounted, drill_stored
    from ckptfs.daemon.messages import unreported
    from ckptfs.store.layout import holder_of, open_store

    if store is None:
        mount, inner = locate(place)
        with opened(place, None) as (source, _):
            found = drill_mounted(source, mount.path, inner, version, options)
        _note(found, place)
        return found
    holder = holder_of(open_store(store, writing=False))
    if holder is not None and holder.mountpoint:
        return _of_here(os.path.join(holder.mountpoint, place.lstrip("/")), version, None, options)
    with progress_shown("drill") as on_progress:
        return drill_stored(store, "", seen_from_mount(place), version, options, on_progress or unreported)


def _of_remote(
    place: str, version: str, remote: str, node: str | None, keys: list[str], config: str, options: Options
) -> Drill:
    from ckptfs.daemon.cli_source import locate, seen_from_mount
    from ckptfs.daemon.config import load_config
    from ckptfs.daemon.drilling import drill_remote
    from ckptfs.daemon.key_files import read_public_key
    from ckptfs.daemon.messages import Pull, unreported
    from ckptfs.store.errors import NotFound

    try:
        inner, is_here = locate(place)[1], True
    except NotFound:
        inner, is_here = seen_from_mount(place), False
    request = Pull(path=f"{inner}@{version}", remote=remote, node=node, live=False)
    public = [read_public_key(file) for file in keys]
    with progress_shown("drill") as on_progress:
        found = drill_remote(load_config(config).remote, request, public, options, on_progress or unreported)
    if is_here:
        _note(found, place)
    return found


def _note(found: Drill, place: str) -> None:
    """Have the daemon show it, if we are its owner."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened
    from ckptfs.store.errors import CkptfsError, NotPermitted

    try:
        with opened(place, None) as (source, inner):
            source.ask(
                messages.Drilled(
                    path=f"{inner}@{found.number}",
                    outcome=found.outcome,
                    source=found.source,
                    recovery_s=found.recovery_s,
                )
            )
    except NotPermitted:
        pass
    except CkptfsError as e:
        print(f"ckptfs: the mount does not show this drill: {e}", file=sys.stderr)
