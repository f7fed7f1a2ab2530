"""The way back from copies elsewhere: pull, of a version, a part of it, or what several nodes have of a step.

One rule: as in cli_versions.py. A list of what is there ends with 1 if something in it is wrong.
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
from ckptfs.daemon.cli_remotes import MaybeVersion, RemoteName, or_mount


def register(app: typer.Typer) -> None:
    """Add this group's command."""
    app.command()(pull)


def pull(
    path: MaybeVersion = None,
    remote: RemoteName = None,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="N", help="Whose, if several nodes copied such a unit."),
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
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Make one of what all nodes (or those of --node) have: of PATH@step:N, PATH@TAG, or the "
            "newest step that all of them have.",
        ),
    ] = False,
    prefer: Annotated[
        list[str] | None,
        typer.Option("--prefer", metavar="N", help="Whose content counts where it differs. Also several."),
    ] = None,
    keep_both: Annotated[
        bool, typer.Option("--keep-both", help="Where contents differ, keep the others as FILE~NODE.")
    ] = False,
    tensor: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor",
            metavar="NAME",
            help="Only this tensor, as a safetensors file (--as DIR/FILE). Also several.",
        ),
    ] = None,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a version, or a part of it, from a remote; without PATH list what is there."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened
    from ckptfs.daemon.key_files import read_public_key

    nodes = node or []
    if (prefer or keep_both) and not merge:
        raise typer.BadParameter("--prefer and --keep-both go with --merge")
    if len(nodes) > 1 and not merge:
        raise typer.BadParameter("several nodes go with --merge")
    if tensor and merge:
        raise typer.BadParameter("--tensor fetches from one node; it does not go with --merge")
    keys = tuple(read_public_key(file).raw.hex() for file in key or [])
    with opened(or_mount(path, store), store) as (source, inner), progress_shown("pull") as on_progress:
        if inner == "/":
            listing = source.ask(messages.Remotes(remote=remote, keys=keys))
            _show_remotes(cast("Sequence[Mapping[str, object]]", listing), as_json=as_json)
            return
        request = messages.Pull(
            path=inner,
            remote=remote,
            node=nodes[0] if nodes and not merge else None,
            merge=merge,
            nodes=tuple(nodes) if merge else (),
            prefer=tuple(prefer or ()),
            keep_both=keep_both,
            tensors=tuple(tensor or ()),
            name=name,
            live=live,
            keys=keys,
        )
        answer = cast("Mapping[str, object]", source.ask(request, on_progress))
    print_json(answer) if as_json else _show(answer)


def _show(answer: Mapping[str, object]) -> None:
    for passed in cast("Sequence[object]", answer["passed_over"]):
        say(f"passed over: {passed}")
    fetched = human_bytes(cast(int, answer["fetched_bytes"]))
    say(f"{answer['unit']} is now here as {answer['name']} ({answer['state']}, {fetched} fetched)")
    if "tensors" in answer:
        _show_tensors(answer)
    if "sources" in answer:
        _show_merge(answer)
    else:
        signed = answer["key"] or "nobody"
        say(f"it is version {answer['of']} of {answer['node']} on {answer['remote']}, signed by {signed}")
    if not answer["live"]:
        shown = str(answer["unit"]).replace("%", "%25").replace("/", "%2F")
        say(f"its directory was not made ({answer['why']}); see .versions/{shown}")


def _show_tensors(answer: Mapping[str, object]) -> None:
    for one in cast("Sequence[Mapping[str, object]]", answer["tensors"]):
        shape = ", ".join(str(size) for size in cast("Sequence[int]", one["shape"]))
        say(f"{one['name']}: {one['dtype']} [{shape}] of {one['path']}")
    say(f"{answer['file']} has {human_bytes(cast(int, answer['file_bytes']))}")


def _show_merge(answer: Mapping[str, object]) -> None:
    of_step = "" if answer["step"] is None else f"step {answer['step']}, "
    sources = cast("Sequence[Mapping[str, object]]", answer["sources"])
    say(f"it is {of_step}merged from {len(sources)} nodes on {answer['remote']}:")
    for one in sources:
        say(f"  version {one['of']} of {one['node']}, signed by {one['key'] or 'nobody'}")
    for missing in cast("Sequence[object]", answer["missing"]):
        say(f"missing: {missing}")
    for conflict in cast("Sequence[object]", answer["conflicts"]):
        say(f"differs: {conflict}")
    ranks = cast("Mapping[str, object] | None", answer["ranks"])
    if ranks is not None and ranks["silent"]:
        from ckptfs.daemon.merge_ranks import spans_text

        silent = spans_text(cast("Sequence[int]", ranks["silent"]))
        say(f"nothing of ranks {silent} of {ranks['world']} is in it, as far as the processes told")
    newer = [str(step) for step in cast("Sequence[object]", answer["newer_steps"])]
    if newer:
        say(f"not every node has the newer steps {', '.join(newer)}; PATH@step:N merges what there is")


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
