"""What a command and the daemon say to each other: one JSON object a line, each way.

One rule: a request is either one of the types below, whole, or refused with a sentence; nothing is
done on a request that was not understood completely.

    → {"do": "log", "path": "/run1"}
    ← {"progress": {"done": 1048576, "total": 4194304}}        any number of them, while it works
    ← {"ok": true, "result": …}   or   {"ok": false, "error": {"kind": "NotFound", "message": "…"}}

Paths are given as seen from the root of the mount ("/" is the mount itself). Bytes of a path that
are not UTF-8 travel as the lone surrogates of PEP 383, which only the standard library's JSON
accepts.
"""

from __future__ import annotations

import json
from typing import Literal, cast

import msgspec

from ckptfs.store import errors
from ckptfs.store.encoding_level import Level

MAX_REQUEST_BYTES = 64 * 1024
MAX_PATH_BYTES = 16 * 1024

Outcome = Literal["good", "suspect", "failed"]
"""What a drill has come to."""
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class Request(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do", tag=str.lower
):
    """Base of all requests; `path` is PATH, or PATH@VERSION where the command line takes that."""

    path: str = "/"

    @property
    def is_reading(self) -> bool:
        """Whether it changes nothing, and so may be given up when the caller goes away."""
        return isinstance(
            self, Status | Log | Head | Keys | Verify | Diff | Du | Prove | Digest | Health | Expect
        )


class Status(Request, frozen=True, kw_only=True):
    """How the mount is."""


class Log(Request, frozen=True, kw_only=True):
    """The versions of the unit that `path` is in.

    With `verify` its history is checked instead: against `keys` (public keys, 64 hex digits each; none:
    the daemon's own) and against `expect`, a head that was kept elsewhere.
    """

    verify: bool = False
    keys: tuple[str, ...] = ()
    expect: str | None = None


class Head(Request, frozen=True, kw_only=True):
    """The newest link of the unit that `path` is in, or of all units ("/")."""


class Keys(Request, frozen=True, kw_only=True):
    """The public half of the key that versions are signed with."""


class RotateKey(Request, frozen=True, kw_only=True):
    """Sign with a new key from now on; the answer is that of `Keys`."""


class Publish(Request, frozen=True, kw_only=True):
    """Make a version now, with a tag and a step if they are given."""

    tag: str | None = None
    step: int | None = None


class Tag(Request, frozen=True, kw_only=True):
    """Give the version `path` a name."""

    name: str


class Untag(Request, frozen=True, kw_only=True):
    """Take the name `name` from the unit that `path` is in."""

    name: str


class Pin(Request, frozen=True, kw_only=True):
    """Keep the version `path` whatever the space."""


class Unpin(Request, frozen=True, kw_only=True):
    """Undo a pin."""


class Forget(Request, frozen=True, kw_only=True):
    """Let the version `path` go."""


class Rollback(Request, frozen=True, kw_only=True):
    """Give the unit `path`, and those of `more`, the tree of the version `to`, in one step."""

    to: str
    more: tuple[str, ...] = ()


class Unit(Request, frozen=True, kw_only=True):
    """Version the directory `path` as a whole from now on."""


class Verify(Request, frozen=True, kw_only=True):
    """Read and hash every chunk of a version again."""


class Diff(Request, frozen=True, kw_only=True):
    """What is different in `other` from `path`, both PATH@VERSION."""

    other: str


class Prove(Request, frozen=True, kw_only=True):
    """The proof of the file `path`, or of the tensor `tensor` in it, for whoever has no store."""

    tensor: str | None = None


class Digest(Request, frozen=True, kw_only=True):
    """The digests of the whole files of a version."""


class Health(Request, frozen=True, kw_only=True):
    """What was found in the float tensors of a version."""


class Expect(Request, frozen=True, kw_only=True):
    """Which bytes the tensors of a version are (gpu/expected.py), for so many ranks that share the rows."""

    ways: int = 1


class Seal(Request, frozen=True, kw_only=True):
    """Sign what the file `path` of a version is."""


class Scrub(Request, frozen=True, kw_only=True):
    """Check the whole store, and put right what can be."""


class Du(Request, frozen=True, kw_only=True):
    """What a version, or all of them, take; with `by_dtype` also by the types of tensors' values."""

    by_dtype: bool = False


class Push(Request, frozen=True, kw_only=True):
    """Copy the versions of the unit that `path` is in, or the one that `path` names, or of all units ("/"),
    to `remote` (None: to all). `partial`: those too that are not complete. `again`: see to it that what was
    copied is still there; `verify`: read all of it back besides."""

    remote: str | None = None
    partial: bool = False
    again: bool = False
    verify: bool = False


class RemoteGc(Request, frozen=True, kw_only=True):
    """Let versions go at `remote` (None: the only one) that no policy keeps, and give back the room of what
    nothing needs there; of units of other nodes too with `every_node`. Or only say what that is. Of the units
    whose ids are in `give_up` (32 hex digits) what is damaged there holds nothing back: it is lost."""

    remote: str | None = None
    dry_run: bool = False
    every_node: bool = False
    give_up: tuple[str, ...] = ()


class Remotes(Request, frozen=True, kw_only=True):
    """What the remotes (or `remote`) hold: the units of all nodes and their versions, checked against `keys`
    (as in `Log`; none: whose seals there are)."""

    remote: str | None = None
    keys: tuple[str, ...] = ()


class Pull(Request, frozen=True, kw_only=True):
    """Fetch the version `path`, or a part of it, from `remote` (None: the only one). `node` says whose, where
    several copied a unit of that name; `name` is what it is to be called here; `live`: make it the live
    directory as well. `keys` as in `Remotes`. `merge`: what all nodes (or `nodes`) have of one step becomes
    one version; where contents differ those of `prefer` are taken, and with `keep_both` the others kept too.
    `tensors`: only these, as a safetensors file; `name` is then DIR/FILE."""

    remote: str | None = None
    node: str | None = None
    merge: bool = False
    nodes: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    keep_both: bool = False
    tensors: tuple[str, ...] = ()
    name: str | None = None
    live: bool = True
    keys: tuple[str, ...] = ()


class Gc(Request, frozen=True, kw_only=True):
    """Give back the space of what nothing refers to and no policy keeps, or only say what that is."""

    dry_run: bool = False


class Encode(Request, frozen=True, kw_only=True):
    """Encode the saves of a unit that are not the newest, or those of a version; or say how much that is.
    `level`: None is what the configuration says."""

    dry_run: bool = False
    level: Level | None = None


class Import(Request, frozen=True, kw_only=True):
    """Make versions of the unit `path` of the directory `source`, as the daemon sees it: one of each
    checkpoint in it. `device` and `inode` say which directory the caller means by that, unless they are 0.
    `move`: remove what is in a version. `left`: paths below it that are left as they were in the last
    version, "." its own files. `follows`: the caller goes on importing it, so its checkpoints may lie deeper,
    and that something has gone is news; what changed after `looked_ns` (by the times of its file system; 0:
    no matter) it has not judged, so that is left. `live`: make the newest the live directory, unless there
    is one. `dry_run`: only say what would be done."""

    source: str
    move: bool = False
    live: bool = True
    dry_run: bool = False
    left: tuple[str, ...] = ()
    follows: bool = False
    looked_ns: int = 0
    device: int = 0
    inode: int = 0


class Drilled(Request, frozen=True, kw_only=True):
    """A drill of the version `path` has ended with `outcome`: it was got from `source`, in `recovery_s`
    seconds."""

    outcome: Outcome
    source: str = ""
    recovery_s: float = 0.0


AnyRequest = (
    Status
    | Log
    | Head
    | Keys
    | RotateKey
    | Publish
    | Tag
    | Untag
    | Pin
    | Unpin
    | Forget
    | Rollback
    | Unit
    | Verify
    | Diff
    | Prove
    | Digest
    | Health
    | Expect
    | Seal
    | Scrub
    | Du
    | Push
    | RemoteGc
    | Remotes
    | Pull
    | Gc
    | Encode
    | Import
    | Drilled
)
KINDS = tuple(kind.__name__ for kind in (*errors.CkptfsError.__subclasses__(),))


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a long request is: `done` of `total` bytes (total 0: not known)."""

    done: int = 0
    total: int = 0


def unreported(progress: Progress) -> None:
    """Takes the progress of a request of which nobody wants to see it."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was not carried out: an error class of store/errors.py and its sentence."""

    kind: str
    message: str


def encode_request(request: AnyRequest) -> bytes:
    """The line of a request."""
    return _line(cast("dict[str, Json]", msgspec.to_builtins(request)))


def decode_request(line: bytes) -> AnyRequest:
    """The request in a line; InvalidRequest says what is wrong with it."""
    try:
        decoded = _decode(line)
        request = cast(AnyRequest, msgspec.convert(decoded, AnyRequest))
    except msgspec.ValidationError as e:
        raise errors.InvalidRequest(f"the request is not one that ckptfs knows: {e}") from None
    for path in _paths_of(request):
        _check_path(path)
    return request


def _paths_of(request: AnyRequest) -> tuple[str, ...]:
    match request:
        case Rollback():
            return request.path, *request.more
        case Diff():
            return request.path, request.other
        case Import():
            return request.path, request.source
    return (request.path,)


def encode_progress(progress: Progress) -> bytes:
    """A line that says how far the work is."""
    return _line({"progress": {"done": progress.done, "total": progress.total}})


def encode_result(result: Json) -> bytes:
    """The line of a good answer."""
    return _line({"ok": True, "result": result})


def encode_failure(kind: str, message: str) -> bytes:
    """The line of a refusal."""
    return _line({"ok": False, "error": {"kind": kind, "message": message}})


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Any line from the daemon, as the client reads it; `progress` is set in those that precede."""

    ok: bool = False
    result: object = None
    error: Failure | None = None
    progress: Progress | None = None


def decode_reply(line: bytes) -> Reply:
    """A line from the daemon; InvalidRequest if it is not one."""
    try:
        return msgspec.convert(_decode(line), Reply)
    except msgspec.ValidationError as e:
        raise errors.InvalidRequest(f"the daemon gave an answer that is none: {e}") from None


def error_of(failure: Failure) -> errors.CkptfsError:
    """The error that the daemon met, as the same type here (Unavailable if this side lacks it)."""
    found = getattr(errors, failure.kind, None) if failure.kind in KINDS else None
    kind = cast("type[errors.CkptfsError]", found or errors.Unavailable)
    return kind(failure.message)


def _line(message: dict[str, Json]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def _decode(line: bytes) -> object:
    try:
        decoded: object = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise errors.InvalidRequest("the request is not a line of JSON") from None
    return decoded


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _check_path(path: str) -> None:
    try:
        encoded = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise errors.InvalidRequest("the path holds a code point that no file name can") from None
    if not path.startswith("/") or "\0" in path:
        raise errors.InvalidRequest("the path does not start at the root of the mount")
    if len(encoded) > MAX_PATH_BYTES:
        raise errors.InvalidRequest(f"the path is longer than {MAX_PATH_BYTES} bytes")
    if any(part in (".", "..") for part in path.split("/")):
        raise errors.InvalidRequest("the path goes up or stands still (`..` or `.`)")
