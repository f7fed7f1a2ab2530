"""Who may do what through the service: the modes of today, the saved ones, the owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import trio
from filled_store import KEY, FilledStore, answered

from ckptfs.daemon import messages
from ckptfs.daemon.access import Rights
from ckptfs.daemon.control import Report
from ckptfs.daemon.drill_notes import DrillNotes
from ckptfs.daemon.messages import AnyRequest, Json, unreported
from ckptfs.daemon.peer import Peer
from ckptfs.daemon.rights import Caller, Modes
from ckptfs.daemon.service import Service
from ckptfs.fusefs.rollback import Rolled, Wanted
from ckptfs.store.encoding_level import Level
from ckptfs.store.errors import CkptfsError, Conflict, InvalidRequest, NotFound, NotPermitted
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import RecipeId
from ckptfs.store.signing import SigningKey
from ckptfs.store.units import Unit

NEW_KEY = SigningKey(b"n" * 32)
OWNER, MINE, OTHER = (Caller(uid, frozenset({uid})) for uid in (500, 1001, 1002))
ROOT = Caller(0, frozenset({0}))
FREED_BYTES = 12


@dataclass
class World:
    """A service over a small store; `above` are the modes of the directory above the mount point."""

    store: FilledStore
    service: Service
    above: list[Modes]
    made_units: list[int]
    rolling_back: RollingBack

    def ask(self, caller: Caller, request: AnyRequest) -> Json:
        """The result of a request by `caller`."""
        return trio.run(self.service.answer, request, Peer(1, caller), unreported)

    def refused(self, caller: Caller, request: AnyRequest) -> type[CkptfsError]:
        """The type of the refusal."""
        with pytest.raises(CkptfsError) as caught:
            self.ask(caller, request)
        return type(caught.value)


@dataclass
class Publishing:
    """A publisher that makes a version with nothing in it."""

    store: FilledStore

    async def publish_now(self, top: int, tag: str | None, step: int | None) -> VersionRecord:
        unit = self.store.histories.unit_of_ino(top)
        assert unit is not None
        found = self.store.histories.newest(unit.unit)
        assert found is not None
        return found


@dataclass
class RollingBack:
    """Notes who rolls back what."""

    store: FilledStore
    asked: list[tuple[list[Wanted], int | None]] = field(default_factory=list)

    async def roll_back(self, wanted: Sequence[Wanted], uid: int | None) -> list[Rolled]:
        self.asked.append((list(wanted), uid))
        return [Rolled(one.record, one.record) for one in wanted]


@pytest.fixture
def world(filled_store: FilledStore) -> World:
    """Live: open (0755, MINE's), closed (0700, MINE's) with closed/x, shared (0777). Removed: gone."""
    above = [Modes(0o40755, 0, 0)]
    for name, mode in (("open", 0o755), ("closed", 0o700), ("shared", 0o777)):
        filled_store.make(f"/{name}", mode=mode, uid=MINE.uid)
        filled_store.publish(name, {"x": b"1", "d/y": b"2"}, uid=MINE.uid, mode=mode)
    filled_store.make("/closed/x", mode=0o644, content=b"1")
    filled_store.publish("gone", {"x": b"1"}, uid=MINE.uid)
    made_units: list[int] = []
    rolling_back = RollingBack(filled_store)

    async def scrub(report: Report) -> Json:
        return {"corrupt": []}

    async def collect(dry_run: bool) -> Json:
        return {"freed_bytes": FREED_BYTES, "dry_run": dry_run}

    async def rotate() -> None:
        filled_store.keyring.signing = NEW_KEY

    async def encode(
        unit: Unit, contents: set[RecipeId] | None, report: Report, dry_run: bool, level: Level | None
    ) -> Json:
        return {
            "unit": unit.text,
            "contents": None if contents is None else len(contents),
            "dry_run": dry_run,
            "level": level,
        }

    rights = Rights(
        filled_store.namespace,
        filled_store.segments,
        filled_store.histories,
        filled_store.addresses,
        lambda: above,
        owner_uid=OWNER.uid,
        only_owner=False,
    )
    service = Service(
        filled_store.addresses,
        filled_store.queries,
        filled_store.prover,
        rights,
        filled_store.histories,
        Publishing(filled_store),
        rolling_back,
        made_units.append,
        filled_store.files,
        collect,
        scrub,
        rotate,
        cast(Any, None),  # no test here asks for a remote
        cast(Any, None),  # nor for an import
        DrillNotes(filled_store.index),
        encode,
    )
    return World(filled_store, service, above, made_units, rolling_back)


def reading(path: str) -> list[AnyRequest]:
    """The questions about a place."""
    return [
        messages.Log(path=path),
        messages.Verify(path=path),
        messages.Du(path=path),
        messages.Diff(path=path, other=path),
        messages.Digest(path=path),
        messages.Expect(path=path),
    ]


def test_whoever_may_read_may_ask(world: World) -> None:
    for caller in (ROOT, MINE, OTHER):
        for path in ("/open", "/open@1", "/shared", "/open/d/y"):
            for request in reading(path):
                world.ask(caller, request)


def test_who_may_not_read_is_refused(world: World) -> None:
    for path in ("/closed", "/closed@1", "/closed/x", "/closed/absent", "/closed/d/y@1"):
        for request in reading(path):
            assert world.refused(OTHER, request) is NotPermitted, request
            if path != "/closed/absent":
                world.ask(MINE, request)


def test_the_way_to_the_mount_counts(world: World) -> None:
    world.above[0] = Modes(0o40700, 0, 0)
    assert world.refused(OTHER, messages.Log(path="/open")) is NotPermitted
    world.ask(ROOT, messages.Log(path="/open"))


def test_what_was_saved_closed_stays_closed(world: World) -> None:
    world.store.publish("open", {"secret/x": b"3"}, uid=MINE.uid, mode=0o700)
    assert world.refused(OTHER, messages.Verify(path="/open")) is NotPermitted
    assert world.refused(OTHER, messages.Du(path="/open/secret/x@2")) is NotPermitted
    world.ask(OTHER, messages.Verify(path="/open@1"))
    world.ask(MINE, messages.Verify(path="/open"))


def test_a_diff_tells_nothing_of_what_was_saved_closed(world: World) -> None:
    world.store.publish("open", {"x": b"1", "d/y": b"2", "d/z": b"3"})
    request = messages.Diff(path="/open@1", other="/open@2")
    told = cast("dict[str, Any]", world.ask(MINE, request))["files"]
    assert "d/z" in [one["path"] for one in told]
    for path in ("/closed", "/closed@1"):
        assert world.refused(OTHER, messages.Diff(path="/open", other=path)) is NotPermitted
        assert world.refused(OTHER, messages.Diff(path=path, other="/open")) is NotPermitted


@pytest.mark.parametrize("closed", ["in", "y"])
@pytest.mark.parametrize("kind", [messages.Digest, messages.Expect])
def test_nothing_is_told_of_a_file_that_was_saved_closed(
    world: World, kind: type[messages.Digest | messages.Expect], closed: str
) -> None:
    """Names, shapes and digests of tensors are content; so one closed file refuses the whole answer."""
    world.store.publish("open", {"x": b"1", "in/y": b"2"}, uid=MINE.uid, closed={closed})
    assert world.refused(OTHER, kind(path="/open")) is NotPermitted
    assert world.refused(OTHER, kind(path="/open/in/y@2")) is NotPermitted
    world.ask(OTHER, kind(path="/open/x@2"))
    world.ask(MINE, kind(path="/open"))


def test_a_proof_is_for_whoever_may_read_the_file_and_log_the_unit(world: World) -> None:
    for path in ("/open/x@1", "/open/d/y"):
        for caller in (ROOT, MINE, OTHER):
            world.ask(caller, messages.Prove(path=path))
    for path in ("/closed/x", "/closed/d/y@1"):
        assert world.refused(OTHER, messages.Prove(path=path)) is NotPermitted
        world.ask(MINE, messages.Prove(path=path))
    world.store.publish("open", {"secret/x": b"3"}, uid=MINE.uid, mode=0o700)
    assert world.refused(OTHER, messages.Prove(path="/open/secret/x@2")) is NotPermitted
    world.ask(MINE, messages.Prove(path="/open/secret/x@2"))
    for path in ("/gone/x", "/gone/x@1"):
        world.ask(MINE, messages.Prove(path=path))
    assert world.refused(OTHER, messages.Prove(path="/gone/x")) is NotFound
    world.store.make("/passable", mode=0o711, uid=MINE.uid)
    world.store.publish("passable", {"x": b"1"}, uid=MINE.uid)
    assert world.refused(OTHER, messages.Prove(path="/passable/x@1")) is NotPermitted
    assert world.refused(OTHER, messages.Log(path="/passable")) is NotPermitted


def test_removed_units_are_their_owners(world: World) -> None:
    for request in reading("/gone"):
        world.ask(MINE, request)
        world.ask(ROOT, request)
        assert world.refused(OTHER, request) is NotFound
    assert world.refused(MINE, messages.Publish(path="/gone")) is InvalidRequest


def test_status_lists_what_the_caller_may_read(world: World) -> None:
    def names(caller: Caller) -> list[object]:
        status = world.ask(caller, messages.Status())
        assert isinstance(status, dict)
        units = status["units"]
        assert isinstance(units, list)
        return [unit["name"] for unit in units if isinstance(unit, dict)]

    assert names(ROOT) == names(MINE) == ["closed", "gone", "open", "shared"]
    assert names(OTHER) == ["open", "shared"]


def changing(path: str) -> list[AnyRequest]:
    """What whoever may write may do."""
    return [
        messages.Publish(path=path),
        messages.Tag(path=f"{path}@1", name="t"),
        messages.Untag(path=path, name="t"),
        messages.Pin(path=f"{path}@1"),
        messages.Unpin(path=f"{path}@1"),
    ]


def test_whoever_may_write_may_change(world: World) -> None:
    for caller in (ROOT, MINE, OTHER):
        for request in changing("/shared"):
            world.ask(caller, request)
    for request in changing("/open"):
        assert world.refused(OTHER, request) is NotPermitted
        world.ask(MINE, request)


def test_whoever_may_write_may_roll_back_bound_by_his_rights(world: World) -> None:
    for caller, uid in ((ROOT, None), (OWNER, None), (OTHER, OTHER.uid)):
        answer = world.ask(caller, messages.Rollback(path="/shared", to="1"))
        assert isinstance(answer, list) and isinstance(answer[0], dict)
        assert (answer[0]["unit"], answer[0]["number"]) == ("shared", 1)
        assert world.rolling_back.asked[-1][1] == uid
    assert world.refused(OTHER, messages.Rollback(path="/open", to="1")) is NotPermitted
    both = messages.Rollback(path="/shared", more=("/open",), to="1")
    assert world.refused(OTHER, both) is NotPermitted
    world.ask(MINE, both)
    assert [one.record.number for one in world.rolling_back.asked[-1][0]] == [1, 1]


def test_a_removed_unit_is_brought_back_by_its_owner_if_he_may_write_where_it_was(world: World) -> None:
    request = messages.Rollback(path="/gone", to="1")
    assert world.refused(OTHER, request) is NotFound
    assert world.refused(MINE, request) is NotPermitted  # the root of the mount is root's, 0755
    world.ask(ROOT, request)
    assert world.rolling_back.asked[-1][0][0].top == 0


def test_a_rollback_of_what_is_no_unit_is_refused(world: World) -> None:
    for path in ("/closed/x", "/open@1"):
        assert world.refused(ROOT, messages.Rollback(path=path, to="1")) is InvalidRequest
    twice = messages.Rollback(path="/open", more=("/open",), to="1")
    assert world.refused(ROOT, twice) is InvalidRequest
    assert world.refused(ROOT, messages.Rollback(path="/open", to="9")) is NotFound


def test_the_rest_is_the_owners(world: World) -> None:
    for request in (
        messages.Forget(path="/open@1"), messages.Unit(path="/open"), messages.Gc(), messages.Scrub(),
        messages.Encode(path="/open"), messages.Import(path="/new", source="/open"),
        messages.Drilled(path="/open@1", outcome="good"),
    ):  # fmt: skip
        assert world.refused(MINE, request) is NotPermitted
    note = world.ask(OWNER, messages.Drilled(path="/open@1", outcome="suspect", recovery_s=2.0))
    assert answered(note)["outcome"] == "suspect" and answered(note)["number"] == 1
    assert world.refused(MINE, messages.Seal(path="/open/x@1")) is NotPermitted
    assert answered(world.ask(OWNER, messages.Seal(path="/open/x@1")))["path"] == "x"
    assert world.ask(OWNER, messages.Gc()) == {"freed_bytes": FREED_BYTES, "dry_run": False}
    assert world.ask(OWNER, messages.Scrub()) == {"corrupt": []}
    whole = world.ask(OWNER, messages.Encode(path="/open", level="small"))
    assert whole == {"unit": "open", "contents": None, "dry_run": False, "level": "small"}
    named = world.ask(OWNER, messages.Encode(path="/open@1", dry_run=True))
    assert named == {"unit": "open", "contents": 2, "dry_run": True, "level": None}
    assert world.refused(OWNER, messages.Encode(path="/open/d")) is InvalidRequest
    world.ask(ROOT, messages.Forget(path="/open@1"))
    assert world.ask(ROOT, messages.Log(path="/open")) == []


def test_heads_are_for_whoever_may_read_and_the_key_is_the_owners(world: World) -> None:
    def units(caller: Caller, path: str = "/") -> list[object]:
        rows = world.ask(caller, messages.Head(path=path))
        assert isinstance(rows, list)
        return [row["unit"] for row in rows if isinstance(row, dict)]

    assert units(ROOT) == ["closed", "gone", "open", "shared"]
    assert units(OTHER) == ["open", "shared"] and units(OTHER, "/open/d") == ["open"]
    assert world.refused(OTHER, messages.Head(path="/closed")) is NotPermitted
    assert world.refused(OTHER, messages.Log(path="/closed", verify=True)) is NotPermitted
    assert world.refused(OTHER, messages.Log(path="/gone", verify=True)) is NotFound
    world.ask(OTHER, messages.Log(path="/open", verify=True))
    for caller in (MINE, OTHER):
        assert world.refused(caller, messages.Keys()) is NotPermitted
    for caller in (OWNER, ROOT):
        answer = world.ask(caller, messages.Keys())
        assert isinstance(answer, dict) and answer["fingerprint"] == KEY.public.fingerprint
    for caller in (OTHER, MINE):
        assert world.refused(caller, messages.RotateKey()) is NotPermitted
    assert answered(world.ask(OWNER, messages.RotateKey()))["fingerprint"] == NEW_KEY.public.fingerprint


def test_units_by_command(world: World) -> None:
    ino = world.store.make("/shared/sub", mode=0o755)
    assert world.ask(OWNER, messages.Unit(path="/shared/sub")) == {"name": "shared"}
    assert world.made_units == [ino]
    for path in ("/shared/absent", "/shared@1"):
        assert world.refused(OWNER, messages.Unit(path=path)) is NotFound
    assert world.refused(OWNER, messages.Unit(path="/")) is InvalidRequest


def test_requests_that_make_no_sense(world: World) -> None:
    assert world.refused(ROOT, messages.Tag(path="/open", name="t")) is InvalidRequest
    assert world.refused(ROOT, messages.Tag(path="/open@1", name="latest")) is InvalidRequest
    assert world.refused(ROOT, messages.Untag(path="/open", name="none")) is NotFound
    assert world.refused(ROOT, messages.Publish(path="/open@1")) is InvalidRequest
    assert world.refused(ROOT, messages.Publish(path="/open", step=-1)) is InvalidRequest
    world.ask(ROOT, messages.Tag(path="/open@1", name="t"))
    assert world.refused(ROOT, messages.Publish(path="/open", tag="t")) is Conflict
    assert world.refused(ROOT, messages.Forget(path="/open@1")) is Conflict


def test_a_mount_that_is_one_users_alone(world: World) -> None:
    rights = Rights(
        world.store.namespace,
        world.store.segments,
        world.store.histories,
        world.store.addresses,
        lambda: world.above,
        owner_uid=OWNER.uid,
        only_owner=True,
    )
    with pytest.raises(NotPermitted):
        rights.find(OTHER, "/open")
    rights.find(OWNER, "/open")
