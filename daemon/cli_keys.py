"""Commands about what can be proven of the history: head, keys; and `log --verify`.

One rule: as in cli_versions.py. `log --verify` ends with 1 when something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, cast

import typer

from ckptfs.daemon.cli_output import AsJson, Failed, StoreDir, print_json, say, show_table

MaybePath = Annotated[
    str | None, typer.Argument(metavar="PATH", help="A unit, or something on the mount that is meant.")
]


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command()(head)
    keys = typer.Typer(help="The key that versions are signed with.", rich_markup_mode=None)
    keys.command("show")(show)
    keys.command("fingerprint")(fingerprint)
    keys.command("list")(list_keys)
    keys.command("rotate")(rotate)
    app.add_typer(keys, name="keys")


def head(path: MaybePath = None, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Print the newest link of each unit's history: keep it elsewhere, for `log --verify --expect`."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened, the_only_mount

    if path is None:
        path = the_only_mount() if store is None else "/"
    with opened(path, store) as (source, inner):
        heads = cast("Sequence[Mapping[str, object]]", source.ask(messages.Head(path=inner)))
    if as_json:
        print_json(heads)
        return
    rows = [[str(one["unit"]), str(one["head"]), str(one["key"] or "not signed")] for one in heads]
    show_table(("unit", "head", "key"), rows) if rows else say("no versions yet")


def show(path: MaybePath = None, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Print the public key, as a file for `log --verify --key`."""
    answer = _key(path, store)
    print_json(answer) if as_json else print(answer["public"], end="")


def fingerprint(path: MaybePath = None, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Print the fingerprint of the public key."""
    answer = _key(path, store)
    print_json(answer) if as_json else say(str(answer["fingerprint"]))


def list_keys(path: MaybePath = None, store: StoreDir = None, as_json: AsJson = False) -> None:
    """List the fingerprints of the key in use and of those before it, still trusted for what they signed."""
    answer = _key(path, store)
    if as_json:
        print_json(answer)
        return
    retired = cast("Sequence[Mapping[str, object]]", answer["retired"])
    rows = [(str(one["fingerprint"]), "retired") for one in retired]
    show_table(("key", "state"), [*rows, (str(answer["fingerprint"]), "in use")])


def rotate(
    path: MaybePath = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="F", help="Rotate the key in this file, which no running mount uses."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sign with a new key from now on. The old one signs that, so who knows it follows; then it is destroyed.

    For the owner of the store. Without a mount, the key in the usual place of this machine.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened, the_only_mount
    from ckptfs.store.errors import NotFound

    if path is None and key is None:
        try:
            path = the_only_mount()
        except NotFound:
            pass
    if path is not None and key is None:
        with opened(path, None) as (source, inner):
            answer = cast("Mapping[str, object]", source.ask(messages.RotateKey(path=inner)))
    else:
        answer = _rotated_here(key)
    print_json(answer) if as_json else say(f"new key: {answer['fingerprint']}; `ckptfs keys show` prints it")


def _rotated_here(key: str | None) -> Mapping[str, object]:
    """Rotate a key that no daemon uses."""
    import os
    import time

    from ckptfs.daemon.key_rotation import rotate_key
    from ckptfs.daemon.keys import default_key_path

    public = rotate_key(os.path.abspath(key or default_key_path()), time.time_ns()).public
    return {"fingerprint": public.fingerprint, "public": public.pem()}


def _key(path: str | None, store: str | None) -> Mapping[str, object]:
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened, the_only_mount

    if path is None:
        path = the_only_mount() if store is None else "/"
    with opened(path, store) as (source, inner):
        return cast("Mapping[str, object]", source.ask(messages.Keys(path=inner)))


def verify_history(
    path: str, store: str | None, key_files: Sequence[str], expect: str | None, *, as_json: bool
) -> None:
    """`log --verify`."""
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    keys: tuple[str, ...] = ()
    if key_files:
        from ckptfs.daemon.keys import read_public_key

        keys = tuple(read_public_key(file).raw.hex() for file in key_files)
    with opened(path, store) as (source, inner):
        request = messages.Log(path=inner, verify=True, keys=keys, expect=expect)
        answer = cast("Mapping[str, object]", source.ask(request))
    print_json(answer) if as_json else _show_proof(answer)
    if answer["findings"]:
        raise Failed(1)


def _show_proof(answer: Mapping[str, object]) -> None:
    findings = cast("Sequence[Mapping[str, object]]", answer["findings"])
    versions = cast("Sequence[Mapping[str, object]]", answer["versions"])
    for finding in findings:
        say(f"{finding['fault']}: {finding['message']}")
    unsigned = [str(version["number"]) for version in versions if not version["signed"]]
    if unsigned:
        shown = ", ".join(unsigned[:8]) + (" …" if len(unsigned) > 8 else "")
        say(f"not signed (made without a key, or before there were signatures): {shown}")
    if answer["keys"] and not answer["trusted"]:
        say("no public key is known here, so the one that the history itself names was taken (--key F)")
    signers = ", ".join(cast("Sequence[str]", answer["keys"])) or "nobody"
    signed = len(versions) - len(unsigned)
    say(f"{answer['unit']}: {len(versions)} versions, {signed} signed, by {signers}")
    say(f"head {answer['head']}; {len(findings)} findings")
