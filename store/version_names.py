"""The names of versions, and what people may write where a VERSION is asked for.

One rule: a text means at most one version, and what it means never depends on what else exists:
tags that look like a number, a version name or a keyword are refused when they are made.

    42, v42, v000042    the number
    v000042_2026…Z      the full name
    latest              the newest version, whatever its state
    latest-complete     the newest complete one
    step:N, step-N      the newest complete one that holds step N intact
    step:N~50           the same for the step nearest to N, at most 50 away (the earlier of two)
    time:2026-11-29T16:00[:SS][Z | +HH:MM]   the newest one made at or before; without a zone it
                        is UTC, as in the names, because nodes of a cluster differ in local time
    anything else       a tag

Source: ARCHITECTURE.md §8; FORMAT.md, "History".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from ckptfs.store.errors import InvalidRequest, NotFound
from ckptfs.store.history import State

LATEST = "latest"
LATEST_COMPLETE = "latest-complete"
MAX_TAG_BYTES = 255
_NUMBER = re.compile(r"v?([0-9]{1,18})")
_NAME = re.compile(r"v([0-9]{6,18})_[0-9]{8}T[0-9]{6}Z")
_STEP = re.compile(r"step:([0-9]{1,18})(?:~(?P<within>[0-9]{1,18}))?")
_STEP_LINK = re.compile(r"step-([0-9]{1,18})")
_TIME = re.compile(
    r"time:([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(?::[0-9]{2})?)(Z|[+-][0-9]{2}:[0-9]{2})?"
)
_RESERVED = re.compile(r"latest|latest-complete|v?[0-9]+|v[0-9]+_.*|(step|time):.*|step-[0-9]+", re.DOTALL)
_SECOND_NS = 1_000_000_000
_LAST_SECOND = 253_402_300_799  # 9999-12-31T23:59:59Z, where datetime ends


class Named(Protocol):
    """What of a version record a VERSION can ask for."""

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def state(self) -> State: ...
    @property
    def steps(self) -> tuple[int, ...]: ...


V = TypeVar("V", bound=Named)


def version_name(number: int, time_ns: int) -> str:
    """The name of version `number` made at `time_ns`: v000042_20261129T160211Z, always UTC."""
    moment = datetime.fromtimestamp(min(max(time_ns // _SECOND_NS, 0), _LAST_SECOND), UTC)
    return f"v{number:06d}_{moment:%Y%m%dT%H%M%S}Z"


def number_in_name(name: str) -> int | None:
    """The number in a full version name, None if `name` does not look like one."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_in_link(name: str) -> int | None:
    """N of "step-N" in its one spelling, else None."""
    match = _STEP_LINK.fullmatch(name)
    return int(match[1]) if match and step_link(int(match[1])) == name else None


def step_link(step: int) -> str:
    """The name under which `.versions` shows the version that holds `step`."""
    return f"step-{step}"


def check_tag(name: str) -> None:
    """InvalidRequest, with the reason, unless `name` may be a tag."""
    if not name or name in (".", "..") or len(name.encode("utf-8", "surrogateescape")) > MAX_TAG_BYTES:
        raise InvalidRequest(f"a tag has 1 to {MAX_TAG_BYTES} bytes and is not '.' or '..'")
    if not name.isprintable() or "/" in name or "@" in name:
        raise InvalidRequest(
            f"the tag {name!r} holds '/', '@' or a character that cannot be printed; leave it out"
        )
    if _RESERVED.fullmatch(name):
        raise InvalidRequest(
            f"the tag {name!r} would read as a version of its own; choose another, such as 'my-{name}'"
        )


def split_version(text: str) -> tuple[str, str | None]:
    """(path, VERSION) of "PATH@VERSION", (text, None) without one.

    The last '@' of the last path component divides, so a tag never holds one.
    """
    path, at, version = text.rpartition("@")
    return (path, version) if at and path and "/" not in version else (text, None)


def steps_held(versions: Iterable[Named]) -> dict[int, int]:
    """step → number of the newest complete version that holds it intact. `versions` oldest first."""
    return {
        step: version.number
        for version in versions
        if version.state is State.COMPLETE
        for step in version.steps
    }


def resolve(text: str, versions: Sequence[V], tags: Mapping[str, int]) -> V:
    """The version that `text` means, of `versions` (oldest first) with `tags`.

    NotFound if there is none, InvalidRequest if `text` can never mean one; both name what there is.
    """
    if match := _NUMBER.fullmatch(text):
        return _by_number(int(match[1]), versions)
    if (number := number_in_name(text)) is not None:
        return _by_name(text, _by_number(number, versions))
    if text in (LATEST, LATEST_COMPLETE):
        return _newest(versions, complete=text == LATEST_COMPLETE)
    if text.startswith("time:"):
        return _by_time(text, versions)
    if text.startswith("step:") or step_in_link(text) is not None:
        return _by_step(text, versions)
    return _by_tag(text, versions, tags)


def _by_tag(tag: str, versions: Sequence[V], tags: Mapping[str, int]) -> V:
    if tag in tags:
        return _by_number(tags[tag], versions)
    known = ", ".join(sorted(tags)[:8]) or "none"
    raise NotFound(f"there is no version or tag {tag!r} (tags: {known}); `ckptfs log` lists what there is")


def _newest(versions: Sequence[V], *, complete: bool) -> V:
    for version in reversed(versions):
        if not complete or version.state is State.COMPLETE:
            return version
    if not versions:
        raise NotFound("there is no version yet; `ckptfs publish` makes one")
    newest = versions[-1]
    raise NotFound(
        f"no version is complete; the newest is {newest.number} ({newest.state}), see `ckptfs log`"
    )


def _by_number(number: int, versions: Sequence[V]) -> V:
    low, high = 0, len(versions)
    while low < high:
        middle = (low + high) // 2
        if versions[middle].number < number:
            low = middle + 1
        else:
            high = middle
    if low < len(versions) and versions[low].number == number:
        return versions[low]
    near = " and ".join(str(v.number) for v in versions[max(low - 1, 0) : low + 1])
    nearest = f"the nearest is {near}" if near else "there is none yet"
    raise NotFound(f"there is no version {number}; {nearest}, see `ckptfs log`")


def _by_name(name: str, version: V) -> V:
    if version.name != name:
        raise NotFound(f"there is no version {name}; number {version.number} is {version.name}")
    return version


def _by_step(text: str, versions: Sequence[V]) -> V:
    match = _STEP.fullmatch(text) or _STEP_LINK.fullmatch(text)
    if not match:
        raise InvalidRequest(f"{text!r} is not step:N or step:N~M, such as step:1000~50")
    step, within = int(match[1]), int(match.groupdict().get("within") or 0)
    held = steps_held(versions)
    near = sorted(held, key=lambda s: (abs(s - step), s))
    if near and abs(near[0] - step) <= within:
        return _by_number(held[near[0]], versions)
    known = (
        f"the nearest steps are {', '.join(map(str, sorted(near[:2])))}" if near else "none holds any step"
    )
    raise NotFound(
        f"no complete version holds step {step}{f' or one within {within}' if within else ''}; {known}"
    )


def _by_time(text: str, versions: Sequence[V]) -> V:
    match = _TIME.fullmatch(text)
    try:
        moment = datetime.fromisoformat(match[1] + (match[2] or "Z")) if match else None
    except ValueError:
        moment = None
    if moment is None:
        raise InvalidRequest(
            f"{text!r} is not a time such as time:2026-11-29T16:00 or time:2026-11-29T16:02:11Z (UTC)"
        )
    # Names show whole seconds, so a version made within the second that was asked for counts.
    latest = int((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds())
    found = [v for v in versions if v.time_ns // _SECOND_NS <= latest]
    if found:
        return found[-1]
    oldest = f"the oldest is {versions[0].name}" if versions else "there is none at all"
    raise NotFound(f"no version was made at or before {text[5:]} (UTC unless a zone is given); {oldest}")
