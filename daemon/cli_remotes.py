"""Commands about copies elsewhere: push and remote gc; cli_pull.py has the way back.

One rule: as in cli_versions.py. Push ends with 1 if something could not be copied.
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

    with opened(or_mount(path, store), store) as (source, inner), progress_shown("push") as on_progress:
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


def collect(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A remote of the configuration, if there are several."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would go.")] = False,
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="Apply this node's policies to what other nodes copied, too.")
    ] = False,
    give_up: Annotated[
        list[str] | None,
        typer.Option(
            "--give-up",
            metavar="UNIT",
            help="Take what is damaged of this unit (its id) for lost: its node is gone. Also several.",
        ),
    ] = None,
    mount: Annotated[
        str | None, typer.Option(metavar="PATH", help="Something on the mount that is meant.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let go the versions on a remote that no policy keeps, and give back the room of what nothing needs.

    Others may copy to it and fetch from it meanwhile. What was sent within a day stays. Where something is
    damaged nothing is taken, and the error says what to do.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(or_mount(mount, None), None) as (source, _):
        request = messages.RemoteGc(
            remote=name, dry_run=dry_run, every_node=all_nodes, give_up=tuple(give_up or ())
        )
        answer = cast("Mapping[str, object]", source.ask(request))
    if as_json:
        print_json(answer)
        return
    would = "would be " if dry_run else ""
    for one in cast("Sequence[Mapping[str, object]]", answer["forgotten"]):
        say(f"{one['unit']}: version {one['number']} {'would go' if dry_run else 'went'}: no policy keeps it")
    for one in cast("Sequence[Mapping[str, object]]", answer["lost"]):
        what = "something" if one["number"] is None else f"version {one['number']}"
        say(f"{one['unit']}: {what} {would}given up as lost: {one['why']}")
    if answer["called_off"]:
        say(f"nothing was removed from {answer['remote']}: somebody waited for it too long; try again")
        raise Failed(1)
    freed, kept = (human_bytes(cast(int, answer[key])) for key in ("freed_bytes", "kept_bytes"))
    copied = human_bytes(cast(int, answer["copied_bytes"]))
    say(f"{freed} {would}removed from {answer['remote']} ({copied} of it {would}copied over), {kept} stay")
    if answer.get("unfinished_objects"):
        size = human_bytes(cast(int, answer["unfinished_bytes"]))
        count = answer["unfinished_objects"]
        say(f"{size} {would}swept up of {count} objects that dead writers left half-made")


def or_mount(path: str | None, store: str | None) -> str:
    """What a command is about that names nothing: the only mount."""
    from ckptfs.daemon.cli_source import the_only_mount

    if path is not None:
        return path
    return the_only_mount() if store is None else "/"
