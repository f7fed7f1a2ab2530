"""Commands about whole files: digest, health, seal, check-seal, export-oms.

One rule: as in cli_versions.py. `check-seal` needs neither a store nor a daemon, and ends with 1 when the
file is not what was sealed; `health` does when a tensor is not finite.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, cast

import typer

from ckptfs.daemon.cli_output import (
    AsJson,
    Failed,
    StoreDir,
    one_line,
    print_json,
    progress_shown,
    say,
    show_health,
)
from ckptfs.daemon.cli_versions import VersionArgument

MaybeVersion = Annotated[str, typer.Argument(metavar="PATH[@VERSION]")]
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    app.command()(digest)
    app.command()(health)
    app.command()(seal)
    app.command("check-seal")(check_seal)
    app.command("export-oms")(export_oms)


def digest(path: MaybeVersion, store: StoreDir = None, as_json: AsJson = False) -> None:
    """Print the SHA-256 of each file of a version (the latest, if none is named), as `sha256sum` does: in
    a copy of it `sha256sum -c` checks them. With --json also BLAKE3 and CRC-64/NVME.

    They are made in the background after a version was, and recorded in its history; what is not in a
    sealed record is said. Of a file without they are made now.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(path, store) as (source, inner), progress_shown("digest") as on_progress:
        answer = cast("Mapping[str, object]", source.ask(messages.Digest(path=inner), on_progress))
    _warn_of_unsealed(answer)
    if as_json:
        print_json(answer)
        return
    for one in cast("Sequence[Mapping[str, str]]", answer["files"]):
        line = sum_line(one["sha256"], one["path"])
        print(one_line(line) if sys.stdout.isatty() else line)


def _warn_of_unsealed(answer: Mapping[str, object]) -> None:
    """Say which digests nobody has signed."""
    files = cast("Sequence[Mapping[str, str]]", answer["files"])
    unsealed = [one["path"] for one in files if one.get("source") == "index"]
    if unsealed:
        more = f" and {len(unsealed) - 1} more" if len(unsealed) > 1 else ""
        print(
            f"ckptfs: the digests of {one_line(unsealed[0])}{more} are those of the index; "
            "no sealed record has them (see `ckptfs log --verify`)",
            file=sys.stderr,
        )


def sum_line(digits: str, path: str) -> str:
    """A line of `sha256sum`, in which a name with a backslash or a line's end is escaped."""
    escaped = path.translate(_ESCAPES)
    return f"{'' if escaped == path else chr(92)}{digits}  {escaped}"


def health(
    path: MaybeVersion,
    every: Annotated[
        bool, typer.Option("--all", help="Show tensors of which there is nothing to say as well.")
    ] = False,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Say which float tensors of a version (the latest, if none is named) hold NaN or infinity (then it ends
    with 1), values that FP16 or BF16 cannot hold, the largest value of their dtype, or subnormals. It ends
    with 1, too, if a file is damaged so that of a part of it nothing can be told.

    They are looked at in the background after a version was made; those that were not are looked at now.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(path, store) as (source, inner), progress_shown("health") as on_progress:
        answer = cast("Mapping[str, object]", source.ask(messages.Health(path=inner), on_progress))
    files = cast("Sequence[Mapping[str, object]]", answer["files"])
    if as_json:
        print_json(answer)
    else:
        show_health(files, every=every)
    if any(one["bad_tensors"] or one["damage"] for one in files):
        raise Failed(1)


def seal(
    path: VersionArgument,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write the 80 bytes to this new file.")
    ] = None,
    store: StoreDir = None,
    as_json: AsJson = False,
) -> None:
    """Sign one file of a version: with the seal, anybody who has the file and the public key (`ckptfs keys
    show`) can check it by `ckptfs check-seal`. Without --out the seal is printed in hex.

    For the owner of the store.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened

    with opened(path, store) as (source, inner), progress_shown("seal") as on_progress:
        answer = cast("Mapping[str, object]", source.ask(messages.Seal(path=inner), on_progress))
    if out is not None:
        with open(out, "xb") as file:
            file.write(bytes.fromhex(str(answer["seal"])))
    if as_json:
        print_json(answer)
    elif out is None:
        say(str(answer["seal"]))


def check_seal(
    file: Annotated[str, typer.Argument(metavar="FILE")],
    sealed: Annotated[str, typer.Argument(metavar="SEAL", help="The seal: 80 bytes, or hex.")],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="F", help="A public key file. May be given more than once."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that a file is what was sealed; ends with 1 if it is not. Needs no store and no daemon.

    Without --key the public key in the usual place on this machine is taken.
    """
    from ckptfs.daemon.sealed_files import check_sealed

    with progress_shown("check") as on_progress:
        found = check_sealed(file, sealed, key or [], on_progress)
    if as_json:
        print_json({"file": file, "good": found.is_good, "said": found.said, "keys": list(found.keys)})
    else:
        say(f"{file}: {found.said}")
    if not found.is_good:
        raise Failed(1)


def export_oms(
    path: VersionArgument,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="P256.pem", help="Sign with this private key; without, no signature."),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write it to this new file, not to stdout.")
    ] = None,
    store: StoreDir = None,
) -> None:
    """Write the manifest of a directory (or file) of a version as OpenSSF model signing has it, from the
    digests that are stored. Signed with a P-256 key, `model_signing verify key` accepts it for a copy.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened
    from ckptfs.daemon.exporting import exported

    with opened(path, store) as (source, inner), progress_shown("digest") as on_progress:
        answer = cast("Mapping[str, object]", source.ask(messages.Digest(path=inner), on_progress))
    _warn_of_unsealed(answer)
    manifest = exported(answer, inner, key)
    if out is None:
        print(manifest.decode("utf-8"))
        return
    with open(out, "xb") as file:
        file.write(manifest + b"\n")
