"""How a command shows its answer: JSON for scripts, a table or a sentence for people.

One rule: `--json` prints what the daemon answered and nothing else; text for people may change, JSON
keys may only be added.

Names of files and tags are other people's bytes: control characters in them are shown, not obeyed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from ckptfs.daemon.messages import Progress

AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
StoreDir = Annotated[
    str | None,
    typer.Option("--store", metavar="DIR", help="Ask this store; PATH is then as seen from its mount."),
]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_WIDE = 10_000
_COMMIT_DIGITS = 10
_HEALTH = {
    "nan": "NaN",
    "inf": "infinite",
    "over_f16": "too large for FP16",
    "over_bf16": "too large for BF16",
    "saturated": "saturated",
    "subnormal": "subnormal",
}
# What is told of a tensor as it is; of the others it is told that they became more or fewer.
_TOLD = ("nan", "inf", "over_f16", "over_bf16")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class Failed(Exception):
    """The command has said all it had to say; the process ends with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def print_json(answer: object) -> None:
    """One JSON value on stdout."""
    print(json.dumps(answer, indent=2 if sys.stdout.isatty() else None))


def one_line(text: str) -> str:
    """`text` with everything that a terminal might obey made visible."""
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else _escaped(c) for c in text)


def say(text: str) -> None:
    """A sentence on stdout."""
    print(one_line(text))


def human_bytes(count: int) -> str:
    """1536 as "1.5 KiB"."""
    size = float(count)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def human_age(seconds: float) -> str:
    """90 as "1 min"."""
    for limit, divisor, word in ((_MINUTE, 1, "s"), (_HOUR, _MINUTE, "min"), (2 * _DAY, _HOUR, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds / divisor))} {word}"
    return f"{int(seconds / _DAY)} d"


def show_log(versions: Sequence[Mapping[str, object]]) -> None:
    """The versions of a unit as a table, the newest last."""
    if not versions:
        say("no versions yet")
        return
    rows = [_log_row(version, time.time_ns()) for version in versions]
    show_table(("no", "name", "age", "state", "step", "tags", "written by", "health", "missing"), rows)


def show_status(status: Mapping[str, object]) -> None:
    """One screen about a mount or a store."""
    for label, text in _status_lines(status):
        say(f"{label:<12}{text}")
    units = cast("Sequence[Mapping[str, object]]", status["units"])
    if units:
        print()
        heads = ("unit", "versions", "newest complete", "age", "last drill")
        show_table(heads, [_unit_row(unit) for unit in units])


def show_gc(answer: Mapping[str, object]) -> None:
    """What a collection freed, or would, and what holds the rest."""
    freed, forgotten = (
        human_bytes(cast(int, answer["freed_bytes"])),
        cast("Sequence[object]", answer["forgotten"]),
    )
    would = "would be " if answer["dry_run"] else ""
    say(f"{freed} {would}given back, {len(forgotten)} versions {would}forgotten")
    kept = cast("Mapping[str, Mapping[str, int]]", answer["kept"])
    held = {why: one for why, one in kept.items() if one["versions"] or one["stored_bytes"]}
    rows = [(why, str(one["versions"] or ""), human_bytes(one["stored_bytes"])) for why, one in held.items()]
    if rows:
        print()
        show_table(("kept for", "versions", "stored"), rows)


def show_diff(answer: Mapping[str, object]) -> None:
    """What is different in one version from another: a line for each file, one more for each tensor."""
    files = cast("Sequence[Mapping[str, object]]", answer["files"])
    for one in files:
        say(f"{one['change']:<8} {one['path']}{_file_difference(one)}")
        for tensor in cast("Sequence[Mapping[str, object]]", one.get("tensors", ())):
            say(f"           {tensor['change']:<8} {tensor['name']}{_tensor_difference(tensor)}")
    if not files:
        say(f"{answer['before']} and {answer['after']} show the same")


def show_health(files: Sequence[Mapping[str, object]], *, every: bool) -> None:
    """A line for each file, and below it one for each tensor of which there is something to say."""
    for one in files:
        listed = cast("Sequence[Mapping[str, object]]", one["listed"])
        found = health_text(one) or "nothing to say"
        say(f"{one['path']}: {one['tensors']} float tensors, up to {one['largest']:.6g}: {found}")
        if one["damage"] is not None:
            say(f"    (of the rest of it nothing can be told: {one['damage']})")
        for tensor in listed:
            text = health_text(tensor)
            if text or every:
                name = tensor["name"] if tensor["name"] is not None else f"at byte {tensor['offset']}"
                said = f": {text}" if text else ""
                say(f"    {name}: {tensor['dtype']}, up to {tensor['largest']:.6g}{said}")
        if len(listed) < cast(int, one["tensors"]):
            say(f"    (only {len(listed)} of them are listed)")
    if not files:
        say("there are no float tensors in a format that is known")


def show_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; not folded where stdout is no terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    _console().print(table)


def write_whole(path: str, encoded: bytes) -> None:
    """A new file at `path`, whole or not at all; its content is synced, its name is not."""
    import secrets

    from ckptfs.store.errors import InvalidRequest

    path = os.path.realpath(path)
    if os.path.lexists(path) and not os.path.isfile(path):
        raise InvalidRequest(f"{path} is not a file; leave out --out to write to stdout")
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    with open(temporary, "xb") as file:
        try:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


@contextmanager
def progress_shown(what: str, unit: str = "bytes") -> Iterator[Callable[[Progress], None] | None]:
    """A progress bar on stderr while the block runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(binary_units=True)
        if unit == "bytes"
        else rich_progress.TextColumn(f"{{task.completed}} {unit}"),
        *([rich_progress.TransferSpeedColumn()] if unit == "bytes" else []),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda p: bar.update(task, completed=p.done, total=p.total or None)


def _console() -> Console:
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=_WIDE, no_color=True)


def _file_difference(one: Mapping[str, object]) -> str:
    if one["change"] != "changed":
        return ""
    said = ["attributes"] if one.get("attributes") else []
    if one.get("changed_bytes"):
        changed, size = (human_bytes(cast(int, one[key])) for key in ("changed_bytes", "after_bytes"))
        said.append(f"{changed} of {size}")
    return f": {', '.join(said)}" if said else ""


def _tensor_difference(tensor: Mapping[str, object]) -> str:
    shape = f"{tensor['dtype']} {tensor['shape']}"
    before = cast("Mapping[str, object] | None", tensor.get("before"))
    if before is not None:
        return f": {before['dtype']} {before['shape']} became {shape}"
    if "changed_bytes" not in tensor:
        return f": {shape}"
    text = f": {shape}, {human_bytes(cast(int, tensor['changed_bytes']))} differ"
    if "max_difference" in tensor:
        text += f", by at most {tensor['max_difference']:.3g} (L2 {tensor['l2_difference']:.3g})"
    return text + _health_difference(tensor)


def _health_difference(tensor: Mapping[str, object]) -> str:
    before = cast("Mapping[str, object]", tensor.get("health_before", {}))
    said = []
    for key, word in _HEALTH.items():
        now, was = tensor.get(key, 0), before.get(key, tensor.get(key, 0))
        if now != was:
            said.append(f"{now} {word} (before {was})")
        elif now and key in _TOLD:
            said.append(f"{now} {word}")
    return "".join(f", {one}" for one in said)


def _log_row(version: Mapping[str, object], now_ns: int) -> list[str]:
    step, missing = version["step"], cast("Sequence[str]", version["missing"])
    tags = [*cast("Sequence[str]", version["tags"]), *(["(pinned)"] if version.get("pinned") else [])]
    return [
        str(version["number"]),
        str(version["name"]),
        human_age((now_ns - cast(int, version["time_ns"])) / 1e9),
        str(version["state"]),
        "" if step is None else str(step),
        " ".join(tags),
        _writers_text(version),
        _version_health(version),
        "; ".join(missing),
    ]


def health_text(counts: Mapping[str, object], told: Sequence[str] = tuple(_HEALTH)) -> str:
    """ "3 NaN, 1 infinite"; what there is none of is left out."""
    return ", ".join(f"{counts[key]} {word}" for key, word in _HEALTH.items() if key in told and counts[key])


def _version_health(version: Mapping[str, object]) -> str:
    """Nothing as long as nobody looked, or where there is no float."""
    health = cast("Mapping[str, object] | None", version.get("health"))
    if health is None or not health["tensors"]:
        return ""
    bad = cast(int, health["bad_tensors"])
    if not bad:
        return "finite" if not health["unknown_files"] else "finite as far as it was looked at"
    return f"{health_text(health, ('nan', 'inf'))} in {bad} tensor{'s' if bad > 1 else ''}"


def _writers_text(version: Mapping[str, object]) -> str:
    """The first writer in a few words, and how many more there were, or what it was merged from; --json has
    all."""
    merged = cast("Mapping[str, Sequence[Mapping[str, object]]] | None", version.get("merged"))
    if merged is not None:
        return "merged from " + ", ".join(f"{one['node']}:{one['of']}" for one in merged["sources"])
    writers = cast("Sequence[Mapping[str, object]]", version.get("writers", ()))
    if not writers:
        return ""
    first, more = writers[0], len(writers) - 1 + cast(int, version["other_writers"])
    ids = cast("Mapping[str, str]", first["ids"])
    job, pod = ids.get("SLURM_JOB_ID"), ids.get("POD_NAME")
    words = [
        str(first["program"]),
        *cast("Sequence[str]", first["arguments"])[:1],
        f"by {first['user'] or first['uid']}",
        *([f"job {job}"] if job else [f"pod {pod}"] if pod else []),
        *([f"at {str(first['commit'])[:_COMMIT_DIGITS]}"] if first["commit"] else []),
        *([f"and {more} more"] if more else []),
    ]
    return " ".join(word for word in words if word)


def _remote_line(remote: Mapping[str, object]) -> tuple[str, str]:
    waiting = cast(int, remote["waiting_versions"])
    waits = f"{waiting} versions wait" if waiting else "all complete versions are safe there"
    safe = f", the newest that is safe is of {remote['newest_safe']}" if remote["newest_safe"] else ""
    failure = f"; {remote['failure']}" if remote["failure"] else ""
    return f"to {remote['name']}", f"{waits}{safe}{failure}"


def _copies_line(copies: Mapping[str, object] | None) -> Iterator[tuple[str, str]]:
    if copies is not None:
        waiting, wanted = copies["waiting_versions"], copies["wanted"]
        yield (
            "copies",
            f"{waiting} complete versions have fewer than {wanted}" if waiting else f"{wanted} of all",
        )


def _status_lines(status: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "ckptfs", str(status["version"])
    if status.get("mountpoint"):
        yield "mount", str(status["mountpoint"])
    yield "store", str(status["store"])
    yield (
        "write path",
        f"{status['write_path']} ({status['why']})" if status["write_path"] else str(status["why"]),
    )
    yield "key", str(status.get("key") or "none is known: versions are not signed, or not by this user")
    yield "stored", _stored_text(status)
    yield "free", human_bytes(cast(int, status["free_bytes"]))
    yield from _scrub_line(cast("Mapping[str, object] | None", status.get("scrub")))
    yield from map(_remote_line, cast("Sequence[Mapping[str, object]]", status.get("remotes") or ()))
    yield from _copies_line(cast("Mapping[str, object] | None", status.get("copies")))
    yield "to ingest", human_bytes(cast(int, status["ingest_pending_bytes"]))
    if status.get("digest_pending_bytes") is not None:
        yield "to digest", f"at most {human_bytes(cast(int, status['digest_pending_bytes']))}"
    yield from _encoding_lines(cast("Mapping[str, int] | None", status.get("encoding")))


def _stored_text(status: Mapping[str, object]) -> str:
    total = human_bytes(cast(int, status["stored_bytes"]))
    stored = cast("Mapping[str, int] | None", status.get("stored"))
    if stored is None or not stored["encoded_bytes"]:
        return total
    raw, plain, encoded = (human_bytes(stored[f"{name}_bytes"]) for name in ("raw", "plain", "encoded"))
    return f"{total} ({raw} raw; {plain} in {encoded} encoded)"


def _encoding_lines(encoding: Mapping[str, int] | None) -> Iterator[tuple[str, str]]:
    if encoding is None:
        return
    if encoding["encoded_bytes"]:
        plain, encoded = (human_bytes(encoding[f"{name}_bytes"]) for name in ("plain", "encoded"))
        yield "encoded", f"{plain} in {encoded} since the mount"
    if encoding["pending_bytes"]:
        yield "to encode", f"at most {human_bytes(encoding['pending_bytes'])}"
    if encoding["left_raw_chunks"]:
        yield (
            "left raw",
            f"{encoding['left_raw_chunks']} chunks that the encoder fails of; the log names them",
        )


def _scrub_line(scrub: Mapping[str, object] | None) -> Iterator[tuple[str, str]]:
    if scrub is None:
        return
    text = "never"
    if scrub["age_s"] is not None:
        age = human_age(cast(float, scrub["age_s"]))
        text = f"{age} ago: {scrub['corrupt']} corrupt, {scrub['healed']} healed"
    if scrub["under_way_bytes"] is not None:
        text += f"; one under way, {human_bytes(cast(int, scrub['under_way_bytes']))} checked"
    yield "scrubbed", text


def _unit_row(unit: Mapping[str, object]) -> list[str]:
    newest, age = unit["newest_complete"], unit["newest_complete_age_s"]
    drill = cast("Mapping[str, object] | None", unit.get("drill"))
    name = f"{unit['name']}{'' if unit['live'] else ' (removed)'}"
    return [
        name,
        str(unit["versions"]),
        str(newest or ""),
        "" if age is None else human_age(cast(float, age)),
        "" if drill is None else f"{drill['outcome']}, {human_age(cast(float, drill['age_s']))} ago",
    ]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
