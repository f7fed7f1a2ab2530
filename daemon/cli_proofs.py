"""Commands about proofs: prove, and check, which needs neither a store nor a daemon.

One rule: as in cli_versions.py. `check` ends with 1 unless every byte is proven, and, without --unsigned,
everything that the proof says is signed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ckptfs.daemon.cli_output import (
    AsJson,
    Failed,
    StoreDir,
    human_bytes,
    one_line,
    print_json,
    progress_shown,
    say,
    write_whole,
)

if TYPE_CHECKING:
    from ckptfs.daemon.checking import Checked
    from ckptfs.store.proof import Proof
    from ckptfs.store.proof_check import Shown


def register(app: typer.Typer) -> None:
    """Add this group's commands."""
    for command in (prove, check):
        app.command()(command)


def _key_of(config: str | None) -> str:
    if config is None:
        return ""
    from ckptfs.daemon.config import load_config

    return load_config(config).key


def prove(
    path: Annotated[str, typer.Argument(metavar="PATH@VERSION", help="A file in a version.")],
    tensor: Annotated[
        str | None, typer.Option("--tensor", metavar="NAME", help="Only this tensor of the file.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write the proof there, not to stdout.")
    ] = None,
    store: StoreDir = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="With --store: the daemon's, whose `key` signs."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a proof of what a file is in a version: `ckptfs check` needs nothing else but the file.

    Of a store without a daemon it is signed if you may read the key that has sealed the version.
    """
    from ckptfs.daemon import messages
    from ckptfs.daemon.cli_source import opened
    from ckptfs.store.proof import Json, decode_proof, encode_proof

    with opened(path, store, _key_of(config)) as (source, inner), progress_shown("prove") as on_progress:
        answer = source.ask(messages.Prove(path=inner, tensor=tensor), on_progress)
    encoded = encode_proof(cast(Json, answer))
    proof = decode_proof(encoded)
    shown = _shown_of(proof)
    for gap in shown.gaps:
        print(f"ckptfs: {one_line(gap)}", file=sys.stderr)
    if out is None:
        sys.stdout.write(encoded.decode("ascii"))
        return
    write_whole(out, encoded)
    facts = _facts(proof, shown)
    if as_json:
        print_json(facts | {"out": out, "bytes": len(encoded)})
    else:
        say(f"{out}: {_what(facts)}, {len(proof.pieces.pieces)} pieces")


def check(
    proof: Annotated[str, typer.Argument(metavar="PROOF", help="What `ckptfs prove` wrote.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file, under whatever name.")],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="F", help="A public key file that you trust. May be given again."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="HEAD", help="What `ckptfs head` said right behind this version."),
    ] = None,
    unsigned: Annotated[
        bool, typer.Option("--unsigned", help="Accept what nobody has signed: it may be made up.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a file against a proof, with no store and no daemon.

    Without --key and --expect it is shown that somebody with the key that the proof names has signed it:
    compare its fingerprint.
    """
    from ckptfs.daemon.checking import check_file
    from ckptfs.daemon.keys import read_public_key
    from ckptfs.store.seal import head_of

    keys = [read_public_key(one) for one in key or ()]
    expected = None if expect is None else head_of(expect)
    with progress_shown("check") as on_progress:
        checked = check_file(proof, file, keys, expected, on_progress)
    is_right = checked.difference is None and (unsigned or not checked.shown.gaps)
    facts = _facts(checked.proof, checked.shown) | _verdict(checked)
    facts |= {"ok": is_right, "trusted": bool(keys) or expected is not None}
    print_json(facts) if as_json else _show(facts, file)
    if not is_right:
        raise Failed(1)


def _shown_of(proof: Proof) -> Shown:
    """What a proof shows of itself; whoever checks it decides which key to trust."""
    from ckptfs.store.proof_check import check_proof
    from ckptfs.store.signing import PublicKey

    signed = [one.key for one in (proof.batch.seal, proof.statement) if one is not None]
    return check_proof(proof, [PublicKey(raw) for raw in signed])


def _facts(proof: Proof, shown: Shown) -> dict[str, object]:
    record, tensor = shown.record, proof.tensor
    return {
        "unit": record.unit.hex(),
        "unit_name": None if shown.name is None else os.fsdecode(shown.name),
        "path": os.fsdecode(proof.file.path),
        "size": proof.file.size,
        "tensor": None
        if tensor is None
        else {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": [*tensor.shape],
            "offset": tensor.offset,
            "bytes": tensor.length,
        },
        "number": record.number,
        "name": record.name,
        "time_ns": record.time_ns,
        "step": record.step,
        "state": record.state.value,
        "root": record.root.hex(),
        "head": str(shown.head),
        "sealed_by": None if shown.sealed_by is None else shown.sealed_by.fingerprint,
        "stated_by": None if shown.stated_by is None else shown.stated_by.fingerprint,
        "rotations": len(proof.rotations),
        "gaps": [*shown.gaps],
    }


def _verdict(checked: Checked) -> dict[str, object]:
    found = checked.difference
    difference = None
    if found is not None:
        difference = {"offset": found.offset, "tensor": found.tensor, "message": found.message}
    return {"checked_bytes": checked.checked_bytes, "difference": difference}


def _show(facts: Mapping[str, object], file: str) -> None:
    difference = cast("Mapping[str, object] | None", facts["difference"])
    if difference is not None:
        tensor = f" (tensor {difference['tensor']})" if difference["tensor"] else ""
        say(f"{file} is not {_what(facts)}: {difference['message']}{tensor}")
    else:
        say(f"{file} is {_what(facts)}: {human_bytes(cast(int, facts['checked_bytes']))} are right")
    for gap in cast("list[str]", facts["gaps"]):
        say(f"only consistent: {gap} (--unsigned accepts that)")
    signer = facts["sealed_by"]
    if signer is not None and facts["trusted"]:
        say(f"signed with {signer}")
    elif signer is not None:
        say(f"signed with {signer}, which the proof itself names: compare it, or give --key F")
    if facts["stated_by"] not in (None, signer):
        replaced = ", which has replaced it" if facts["rotations"] else ""
        say(f"stated with {facts['stated_by']}{replaced}")
    say(f"head {facts['head']}")


def _what(facts: Mapping[str, object]) -> str:
    """What is proven: `tensor w, F32 [2, 3], of a/model of run1, version 3 (v000003_…)`."""
    tensor = cast("Mapping[str, object] | None", facts["tensor"])
    part = "" if tensor is None else f"tensor {tensor['name']}, {tensor['dtype']} {tensor['shape']}, of "
    unit = facts["unit_name"] or f"unit {facts['unit']}"
    return f"{part}{facts['path']} of {unit}, version {facts['number']} ({facts['name']})"
