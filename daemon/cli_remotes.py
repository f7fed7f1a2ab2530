"""Commands about copies elsewhere: push, pull, remote gc.

One rule: as in cli_versions.py. Both end with 1 if something could not be copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, cast

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

MaybeVersion = Annotated[
    str | None,
    typer.Argument(metavar="[PATH[@VERSION]]", help="A unit (a run), something in it, or a version of it."),
]
RemoteName = Annotated[
    str | None, typer.Option("--remote", metavar="R", help="A remote of the configuration.")
]


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command()(push)
    app.command()(pull)
    remote = typer.Typer(help="The places where copies are.", rich_markup_mode=None)
    remote.command("gc")(collect)
    app.add_typer(remote, name="remote")


def push(
    path: MaybeVersion = None,
    remote: RemoteName = None,
    partial: Annotated[bool, typer.Option("--partial", help="Versions too that are not complete.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="See to it that what was copied is still there.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all that is there back, and mend what is damaged.")
    ] = False,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Copy complete versions to the remotes: of a unit, or of all."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(_or_mount(path, store), store) as (source, inner), progress_shown("push") as on_progress:
        request = messages.Push(path=inner, remote=remote, partial=partial, again=again, verify=verify)
        rows = cast("Sequence[Mapping[str, object]]", source.ask(request, on_progress))
    problems = [str(problem) for row in rows for problem in cast("Sequence[object]", row["problems"])]
    failures = [row for row in rows if row["failure"] is not None]
    if as_json:
        print_json(rows)
    else:
        for row in failures:
            say(f"nothing copied to {row['remote']}: {row['failure']}")
        for problem in problems:
            say(problem)
        for row in rows:
            if row["failure"] is not None:
                continue
            copied, safe = (len(cast("Sequence[object]", row[key])) for key in ("copied", "safe"))
            sent = human_bytes(cast(int, row["sent_bytes"]))
            say(f"{row['unit']}: {copied} versions copied to {row['remote']} ({sent} sent), {safe} are there")
        if not rows:
            say("no versions yet")
    # With `copies` in the configuration it is enough that so many have everything.
    if problems or any(not row["enough"] for row in failures):
        raise Failed(1)


def pull(
    path: MaybeVersion = None,
    remote: RemoteName = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="N", help="Whose, if several nodes copied such a unit.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="What the unit is to be called here.")
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="F", help="Who must have signed it: a public key file. Also several."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Make it the live directory, or a version only.")
    ] = True,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a version, or a part of it, from a remote; without PATH list what is there."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened
    from ckptfs.daemon.key_files import read_public_key

    keys = tuple(read_public_key(file).raw.hex() for file in key or [])
    with opened(_or_mount(path, store), store) as (source, inner), progress_shown("pull") as on_progress:
        if inner == "/":
            listing = source.ask(messages.Remotes(remote=remote, keys=keys))
            _show_remotes(cast("Sequence[Mapping[str, object]]", listing), as_json=as_json)
            return
        request = messages.Pull(path=inner, remote=remote, node=node, name=name, live=live, keys=keys)
        answer = cast("Mapping[str, object]", source.ask(request, on_progress))
    if as_json:
        print_json(answer)
        return
    for passed in cast("Sequence[object]", answer["passed_over"]):
        say(f"passed over: {passed}")
    fetched, signed = human_bytes(cast(int, answer["fetched_bytes"])), answer["key"] or "nobody"
    say(f"{answer['unit']} is now here as {answer['name']} ({answer['state']}, {fetched} fetched)")
    say(f"it is version {answer['of']} of {answer['node']} on {answer['remote']}, signed by {signed}")
    if not answer["live"]:
        say(f"its directory was not made ({answer['why']}); see .versions/{answer['unit']}")


def collect(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A remote of the configuration, if there are several."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would go.")] = False,
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="Apply this node's policies to what other nodes copied, too.")
    ] = False,
    mount: Annotated[
        str | None, typer.Option(metavar="PATH", help="Something on the mount that is meant.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let go the versions on a remote that no policy keeps, and give back the room of what nothing needs.

    Others may copy to it and fetch from it meanwhile. What was sent within a day stays.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(_or_mount(mount, None), None) as (source, _):
        request = messages.RemoteGc(remote=name, dry_run=dry_run, every_node=all_nodes)
        answer = cast("Mapping[str, object]", source.ask(request))
    if as_json:
        print_json(answer)
        return
    if answer["called_off"]:
        say(f"nothing was taken from {answer['remote']}: somebody waited for it too long; try again")
        raise Failed(1)
    would = "would be " if dry_run else ""
    for one in cast("Sequence[Mapping[str, object]]", answer["forgotten"]):
        say(f"{one['unit']}: version {one['number']} {'would go' if dry_run else 'went'}: no policy keeps it")
    freed, kept = (human_bytes(cast(int, answer[key])) for key in ("freed_bytes", "kept_bytes"))
    copied = human_bytes(cast(int, answer["copied_bytes"]))
    say(f"{freed} {would}removed from {answer['remote']} ({copied} of it {would}copied over), {kept} stay")


def _or_mount(path: str | None, store: str | None) -> str:
    from ckptfs.daemon.cli_source import the_only_mount

    if path is not None:
        return path
    return the_only_mount() if store is None else "/"


def _show_remotes(remotes: Sequence[Mapping[str, object]], *, as_json: bool) -> None:
    problems = [str(problem) for one in remotes for problem in cast("Sequence[object]", one["problems"])]
    for one in [] if as_json else remotes:
        say(f"{one['remote']} ({one['url']})")
        rows = [
            (str(unit["unit"]), str(unit["node"]), *_version_cells(version))
            for unit in cast("Sequence[Mapping[str, object]]", one["units"])
            for version in cast("Sequence[Mapping[str, object]]", unit["versions"])
        ]
        show_table(("unit", "node", "version", "step", "state", "size", ""), rows) if rows else say("nothing")
    print_json(remotes) if as_json else list(map(say, problems))
    if problems:
        raise Failed(1)


def _version_cells(version: Mapping[str, object]) -> tuple[str, ...]:
    step = "" if version["step"] is None else str(version["step"])
    marks = [str(tag) for tag in cast("Sequence[object]", version["tags"])]
    if version["doubt"] is not None:
        marks.append(f"NOT TRUSTED: {version['doubt']}")
    size = human_bytes(cast(int, version["bytes"]))
    return str(version["name"]), step, str(version["state"]), size, ", ".join(marks)
