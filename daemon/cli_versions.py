"""Commands about versions: log, publish, tag, untag, pin, unpin, forget, rollback, unit.

One rule: a command turns its arguments into one request and shows the answer; what a request does
stands in service.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptfs.daemon.cli_output import AsJson, StoreDir, print_json, say, show_log

if TYPE_CHECKING:
    from ckptfs.daemon.messages import AnyRequest

PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="A unit (a run), or something in it.")]
VersionArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH@VERSION",
        help="VERSION: number, name, tag, latest, latest-complete, step:N, step:N~50, time:2026-11-29T16:00.",
    ),
]
TagArgument = Annotated[str, typer.Argument(metavar="NAME")]


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    for command in (log, publish, tag, untag, pin, unpin, forget, rollback, unit):
        app.command()(command)


def log(
    path: PathArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the history: signatures, order, completeness.")
    ] = False,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="F", help="Verify: a public key file. May be given more than once."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="HEAD", help="Verify: the unit goes on from this `ckptfs head`."),
    ] = None,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """List the versions of a unit, the newest last; or verify its history."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    if verify or key or expect is not None:
        from ckptfs.daemon.cli_keys import verify_history

        verify_history(path, store, key or [], expect, as_json=as_json)
        return
    with opened(path, store) as (source, inner):
        versions = source.ask(messages.Log(path=inner))
    print_json(versions) if as_json else show_log(cast("list[Mapping[str, object]]", versions))


def publish(
    path: PathArgument,
    tag: Annotated[str | None, typer.Option("--tag", metavar="T", help="Name the version as well.")] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="The step that it holds.")] = None,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a version of a unit now."""
    from ckptfs.daemon import messages

    version = _asked(path, store, lambda inner: messages.Publish(path=inner, tag=tag, step=step))
    if as_json:
        print_json(version)
    else:
        at = "" if version["step"] is None else f", step {version['step']}"
        say(f"{version['name']} ({version['state']}{at})")


def tag(path: VersionArgument, name: TagArgument, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Name a version; a tagged version is never let go for space."""
    from ckptfs.daemon import messages

    version = _asked(path, store, lambda inner: messages.Tag(path=inner, name=name))
    print_json(version) if as_json else say(f"{version['name']} is now {name} too")


def untag(path: PathArgument, name: TagArgument, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Take a name away; its version stays."""
    from ckptfs.daemon import messages

    version = _asked(path, store, lambda inner: messages.Untag(path=inner, name=name))
    print_json(version) if as_json else say(f"{version['name']} is no longer {name}")


def pin(path: VersionArgument, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Keep a version, whatever the space."""
    from ckptfs.daemon import messages

    version = _asked(path, store, lambda inner: messages.Pin(path=inner))
    print_json(version) if as_json else say(f"{version['name']} is pinned")


def unpin(path: VersionArgument, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Let a version go again when space is needed."""
    from ckptfs.daemon import messages

    version = _asked(path, store, lambda inner: messages.Unpin(path=inner))
    print_json(version) if as_json else say(f"{version['name']} is no longer pinned")


def forget(path: VersionArgument, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Let a version go, for good."""
    from ckptfs.daemon import messages

    version = _asked(path, store, lambda inner: messages.Forget(path=inner))
    print_json(version) if as_json else say(f"{version['name']} is forgotten")


def rollback(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Units (runs); all in one step.")],
    to: Annotated[str, typer.Option("--to", metavar="VERSION", help="The version, as behind PATH@.")],
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Make units what they were in a version; what is there now becomes a version first."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened_all

    with opened_all(paths, store) as (source, inner):
        answer = source.ask(messages.Rollback(path=inner[0], more=tuple(inner[1:]), to=to))
    if as_json:
        print_json(answer)
        return
    for one in cast("list[Mapping[str, object]]", answer):
        say(f"{one['unit']} is what it was in {one['to']} ({one['name']}); before, it was {one['before']}")


def unit(
    path: Annotated[str, typer.Argument(metavar="DIR")], store: StoreDir = None, as_json: AsJson = False
) -> None:
    """Version a directory as a whole from now on."""
    from ckptfs.daemon import messages

    answer = _asked(path, store, lambda inner: messages.Unit(path=inner))
    print_json(answer) if as_json else say(f"{answer['name']} is a unit")


def _asked(path: str, store: str | None, build: Callable[[str], AnyRequest]) -> Mapping[str, object]:
    from ckptfs.daemon.cli_source import opened

    with opened(path, store) as (source, inner):
        return cast("Mapping[str, object]", source.ask(build(inner)))
