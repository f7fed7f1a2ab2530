"""After a crash: the image is opened as the daemon opens it, and everything is checked.

One rule: what must be there comes from the truth alone; what else must be in order (chunks, rows, staging
files) is told by storecheck.py and extract.py, which share no code with recovery.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

import trio
from disklog import Event
from diskmodel import Image
from faultdisk import Log, RecordingDisk, SmallDisk, materialise, stores_on
from reopened import extracted_outlines, face_on, look_at, opened, version_outlines
from storecheck import Look
from truth import Truth, VersionId

from ckptfs.daemon.open_store import OpenStore
from ckptfs.fusefs.recording import Request
from ckptfs.store.errors import NotFound
from ckptfs.store.index import INDEX_PATH
from ckptfs.store.inode import ROOT_INO
from ckptfs.store.rebuild import rebuild

AFTER_NAME = "after-the-crash"
AFTER_BYTES = b"written after the crash" * 300
_MOST_SHOWN = 5


@dataclass(slots=True)
class Aftermath:
    """What came of one crash. `events` are those of the disk from the first call on, `rebuilt_at` the place
    among them where a rebuild had ended, `seen_at` that where the versions `versions` had been listed,
    `synced_at` that where a new file was synced."""

    findings: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    versions: set[VersionId] | None = None
    rebuilt_at: int = 0
    seen_at: int = 0
    begun_at: int = 0
    synced_at: int = 0


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash: at which place of the run's log, of which kind (`kill`, or one of DiskModel.power_cut), and
    what is checked besides: `again` closes and opens once more, `without_index` deletes the index first and
    rebuilds it, `rebuilds_again` runs the rebuild that was crashed once more. `later` says what a life
    between an earlier crash and this one has done."""

    place: int
    kind: str
    again: bool = False
    without_index: bool = False
    rebuilds_again: bool = False
    later: Later | None = None

    @property
    def is_rebuilt(self) -> bool:
        """Whether the live tree is that of the last versions."""
        return self.without_index or self.rebuilds_again


@dataclass(frozen=True, slots=True)
class Later:
    """A second crash, in the life after the first: versions that were listed by then, and whether the new
    file had been begun or synced."""

    versions: frozenset[VersionId]
    is_begun: bool
    is_synced: bool


class Check:
    """Checks one image; used once. `record`: keep what the opening does to the disk."""

    def __init__(self, image: Image, truth: Truth, crash: Crash, boot: str, *, record: bool = False) -> None:
        self._image = image.without(INDEX_PATH) if crash.without_index else image
        self._truth, self._crash, self._boot = truth, crash, boot
        self._record = record
        self.result = Aftermath()

    def run(self, folder: str) -> Aftermath:
        """Do it in `folder`/store, which is gone afterwards."""
        root = f"{folder}/store"
        numbers = materialise(self._image, root)
        log = Log(numbers)
        make = (lambda path: RecordingDisk(path, log)) if self._record else SmallDisk
        try:
            with stores_on(make):
                if self._crash.is_rebuilt:
                    self._rebuild(root, make)
                    self.result.rebuilt_at = len(log.events)
                self._first_life(root, log)
                self._look_at_files(root)
                if self._crash.again:
                    self._second_life(root)
        except Exception as e:
            self._find(f"{type(e).__name__}: {e}")
        finally:
            shutil.rmtree(root, ignore_errors=True)
        self.result.events = log.events
        return self.result

    def _rebuild(self, root: str, make: object) -> None:
        found = rebuild(make(root), boot_id=self._boot, now_ns=1)  # type: ignore[operator]
        for what in (*found.missing, *found.problems):
            self._find(f"rebuild: {what}")

    def _first_life(self, root: str, log: Log) -> None:
        with opened(root, self._boot) as parts:
            self._check_opened(parts)

            async def life() -> None:
                face = face_on(parts)
                found = await look_at(face)
                self._check_tree(dict(found))
                self._check_versions(parts)
                self.result.seen_at = len(log.events)
                await self._go_on(face, parts, log)

            trio.run(life)

    def _check_opened(self, parts: OpenStore) -> None:
        for problem in parts.histories.problems:
            self._find(f"a history is damaged: {problem}")

    def _check_tree(self, found: dict) -> None:  # type: ignore[type-arg]
        later = self._crash.later
        made = found.pop(AFTER_NAME, None) if later is not None and later.is_begun else None
        if later is not None and later.is_synced and (made is None or made.held != AFTER_BYTES):
            self._find(f"{AFTER_NAME} was synced and is {'not there' if made is None else 'another'}")
        if self._crash.is_rebuilt:
            return
        place = self._crash.place
        if self._crash.kind == "kill":
            problems = self._truth.check_killed(found, place)
        else:
            problems = self._truth.check_power_cut(found, place)
        for problem in problems[:_MOST_SHOWN]:
            self._find(problem)

    def _check_versions(self, parts: OpenStore) -> None:
        outlines = version_outlines(parts)
        self._compare("listed", outlines)
        self.result.versions = {*outlines}
        for (unit, tag), (number, since) in self._truth.tags.items():
            tags = parts.histories.tags(unit)  # type: ignore[arg-type]
            if since <= self._crash.place and tags.get(tag) != number:
                self._find(f"the tag {tag} of version {number} is gone")

    def _compare(self, how: str, found: dict[VersionId, dict[str, str]]) -> None:
        place, later = self._crash.place, self._crash.later
        if self.result.versions is not None:
            # What was published after the crash may have the number of what was not made before it.
            found = {identity: found[identity] for identity in found.keys() & self.result.versions}
        for identity, version in self._truth.versions.items():
            name = f"version {identity[1]} of {identity[0].hex()[:8]}"
            is_listed = version.answered <= place or (later is not None and identity in later.versions)
            if identity not in found:
                if is_listed and not 0 < version.forgetting <= place:
                    self._find(f"{name} is not {how}")
            elif version.began > place or (later is not None and version.answered > place):
                if later is None:
                    self._find(f"{name} is {how} before it was made")
            elif 0 < version.forgotten <= place:
                self._find(f"{name} is {how} and was forgotten")
            elif found[identity] != version.outline:
                self._find(f"{name} as {how}: {_difference(version.outline, found[identity])}")
        for identity, outline in found.items():
            for path, line in outline.items():
                if line.startswith("unreadable"):
                    self._find(f"version {identity[1]}, {path}: {line}")

    async def _go_on(self, face: object, parts: OpenStore, log: Log) -> None:
        """The store goes on: a new file, synced, and now and then a version."""
        from faceclient import FaceClient

        client = FaceClient(log, Truth())
        client.attach(parts)
        await client.reclaim()
        name = AFTER_NAME
        if client.face.namespace.child(ROOT_INO, name.encode()) is not None:
            return
        self.result.begun_at = len(log.events)
        key = await client.create(name)
        if key is not None:
            await client.write(key, 0, AFTER_BYTES)
            await client.fsync(key)
            self.result.synced_at = len(log.events)
            await client.close(key)
        if self._crash.again:
            for unit in ("run0", "run1"):
                ino = client.face.namespace.at_path(unit.encode())
                try:
                    if ino is not None:
                        await client.face.publisher.publish_now(ino, Request("command"))
                except NotFound:
                    pass
            await client.collect()
        for finding in client.findings:
            self._find(f"afterwards: {finding}")

    def _look_at_files(self, root: str) -> None:
        look = Look(root, set())
        for finding in sorted(look.findings)[:_MOST_SHOWN]:
            self._find(f"store: {finding}")
        outlines, warnings = extracted_outlines(root)
        self._compare("extracted", outlines)
        for warning in warnings:
            self._find(f"extract: {warning}")

    def _second_life(self, root: str) -> None:
        with opened(root, self._boot) as parts:
            self._check_opened(parts)

            async def life() -> None:
                found = dict(await look_at(face_on(parts)))
                made = found.get(AFTER_NAME)
                if made is None or made.held != AFTER_BYTES:
                    self._find(f"{AFTER_NAME} is {'gone' if made is None else 'another'} after a restart")
                self._compare("listed after a restart", version_outlines(parts))

            trio.run(life)

    def _find(self, what: str) -> None:
        self.result.findings.append(what)


def _difference(expected: dict[str, str], found: dict[str, str]) -> str:
    wrong = [
        f"{p}: {found.get(p, 'missing')}, not {line}" for p, line in expected.items() if found.get(p) != line
    ]
    wrong += [f"{p} should not be there" for p in found.keys() - expected.keys()]
    return "; ".join(wrong[:_MOST_SHOWN])
