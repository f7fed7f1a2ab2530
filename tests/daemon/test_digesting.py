"""digesting: each content once, the newest version first, out of the way of all else, never a wrong one."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from kernelmounts import poll
from mounting import Mount, memory_folder
from rotting import flip, place_of_chunk
from saved_store import SavedStore

from ckptfs.daemon import digesting as digesting_module
from ckptfs.daemon.cli_digests import sum_line
from ckptfs.daemon.digesting import Digesting
from ckptfs.store.digest_log import DigestLog
from ckptfs.store.digests import FileDigests, decode_digests_record
from ckptfs.store.errors import NoSpace, ReadOnly
from ckptfs.store.frames import decode_frames
from ckptfs.store.history import RecordKind, VersionRecord
from ckptfs.store.history_log import history_path
from ckptfs.store.ids import RecipeId, UnitId
from ckptfs.store.index import Change, Table
from ckptfs.store.whole_files import WholeFiles

MIB = 1 << 20


class World:
    """A store, what makes its digests, and the order in which it did."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = SavedStore(root)
        self.busy = False
        self.start()

    def start(self) -> None:
        """As after a start of the daemon."""
        one = self.store
        self.order: list[RecipeId] = []
        self.log = DigestLog(one.disk, one.index, one.histories)
        self.files = WholeFiles(one.disk, one.segments, trio.CapacityLimiter(1))
        whole = self.files.digests

        async def noted(recipe: RecipeId, *rest: object) -> FileDigests:
            self.order.append(recipe)
            return await whole(recipe, *rest)  # type: ignore[arg-type]

        self.files.digests = noted  # type: ignore[method-assign, assignment]
        self.digesting = Digesting(
            one.index, one.segments, one.histories, self.log, self.files, lambda: not self.busy
        )

    def publish(self, unit: str = "run", **files: bytes) -> VersionRecord:
        tree = {name.encode(): content for name, content in files.items()}
        return trio.run(lambda: self.store.publish(unit.encode(), tree))

    def recipe(self, record: VersionRecord, name: str) -> RecipeId:
        assert record.top.tree is not None
        entries = self.store.segments.read_tree(record.top.tree)
        (recipe,) = [entry.recipe for entry in entries if entry.name == name.encode()]
        assert recipe is not None
        return recipe

    def catch_up(self) -> None:
        trio.run(self.digesting.catch_up)

    def has(self, record: VersionRecord, name: str, content: bytes) -> bool:
        found = self.log.of(self.recipe(record, name))
        return found is not None and found.sha256 == hashlib.sha256(content).digest()

    def recorded(self, unit: UnitId) -> list[int]:
        """How many contents each DIGESTS record of a unit lists."""
        frames = decode_frames((self.root / history_path(unit)).read_bytes())
        records = [f.payload for f in frames if f.kind == RecordKind.DIGESTS]
        return [len(decode_digests_record(payload).contents) for payload in records]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(digesting_module, "LOOK_EVERY_S", 0.01)
    with memory_folder() as memory:
        world = World(memory / "store")
        yield world
        world.store.close()


def test_each_content_once_and_the_newest_version_first(world: World, rng: random.Random) -> None:
    a, b, c = (rng.randbytes(300_000) for _ in range(3))
    first = world.publish(a=a, b=b)
    other = world.publish("other", b=b, tiny=b"x")
    last = world.publish(a=a, c=c)
    assert trio.run(world.digesting.waiting_bytes) == 5 * 300_000 + 1, "nobody has taken it up yet"
    world.catch_up()
    assert trio.run(world.digesting.waiting_bytes) == 0
    assert world.has(first, "a", a) and world.has(first, "b", b) and world.has(last, "c", c)
    assert world.has(other, "b", b) and world.has(other, "tiny", b"x")
    assert set(world.order[:2]) == {world.recipe(last, "a"), world.recipe(last, "c")}
    assert set(world.order[2:]) == {world.recipe(other, "b"), world.recipe(other, "tiny")}
    assert len(world.order) == 4, "what two versions share is read once"
    assert world.recorded(first.unit) == world.recorded(other.unit) == [2]
    assert world.digesting.pending_bytes == 0


def test_what_was_gone_through_is_not_looked_at_again(world: World, rng: random.Random) -> None:
    world.publish(a=rng.randbytes(100_000))
    world.catch_up()
    world.start()
    world.store.segments.read_tree = None  # type: ignore[method-assign, assignment]
    world.catch_up()
    assert world.order == []
    del world.store.segments.read_tree  # type: ignore[method-assign]
    record = world.publish(b=b"new")
    world.catch_up()
    assert world.order == [world.recipe(record, "b")]


def test_after_the_loss_of_the_marks_nothing_is_made_again(world: World, rng: random.Random) -> None:
    record = world.publish(a=rng.randbytes(100_000))
    world.catch_up()
    change = digesting_module.Change()
    change.delete(Table.META, b"digested:" + record.unit)
    world.store.index.apply(change)
    world.start()
    world.catch_up()
    assert world.order == [] and world.recorded(record.unit) == [1]


def test_it_waits_while_something_is_urgent(world: World, rng: random.Random) -> None:
    content = rng.randbytes(40 * MIB)
    record = world.publish(a=content)
    world.busy = True

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.digesting.catch_up)
            await trio.sleep(0.3)
            assert world.order == [] and world.digesting.pending_bytes == len(content)
            world.busy = False

    trio.run(scenario)
    assert world.has(record, "a", content)


def test_it_takes_a_quarter_of_the_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    async def scenario() -> None:
        for _ in range(4):
            now[0] += 0.1
            await world.digesting._rest(1)

    monkeypatch.setattr(digesting_module, "LOOK_EVERY_S", 1.0)
    monkeypatch.setattr(digesting_module.trio, "sleep", sleep)
    monkeypatch.setattr(digesting_module.time, "monotonic", lambda: now[0])
    trio.run(scenario)
    assert slept[1:] == pytest.approx([0.3] * 3)


def test_a_wrong_chunk_has_no_digest_and_the_rest_has(
    world: World, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = rng.randbytes(300_000), rng.randbytes(200_000)
    record = world.publish(bad=bad, good=good)
    chunk = next(iter(world.store.segments.read_recipe(world.recipe(record, "bad")).chunks()))
    path, offset, _ = place_of_chunk(world.store, chunk)
    flip(path, 8 * offset + 3)
    world.catch_up()
    assert world.log.of(world.recipe(record, "bad")) is None
    assert world.has(record, "good", good) and world.recorded(record.unit) == [1]
    assert "no digest of bad of run in version 1" in caplog.text and "at byte" in caplog.text
    assert world.store.segments.damaged, "the quarantine is told"


def damaged_content(world: World, rng: random.Random) -> tuple[VersionRecord, bytes, Callable[[], None]]:
    """A version whose file `bad` has a flipped bit, its content, and what flips it back."""
    bad = rng.randbytes(300_000)
    record = world.publish(bad=bad, good=b"good")
    chunk = next(iter(world.store.segments.read_recipe(world.recipe(record, "bad")).chunks()))
    path, offset, _ = place_of_chunk(world.store, chunk)
    flip(path, 8 * offset + 3)
    world.catch_up()
    assert not world.has(record, "bad", bad) and world.has(record, "good", b"good")
    return record, bad, lambda: flip(path, 8 * offset + 3)


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_healed_gets_its_digest(world: World, rng: random.Random, restarts: bool) -> None:
    record, bad, _ = damaged_content(world, rng)
    asked = len(world.order)
    world.catch_up()
    assert len(world.order) == asked, "it is not read again and again"
    world.publish("other", again=bad, more=b"more")  # Writing it again heals it.
    if restarts:
        world.start()
    world.catch_up()
    assert world.has(record, "bad", bad)
    world.start()
    world.catch_up()
    assert world.order == [], "and nothing is left over"


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_put_right_in_its_place_gets_its_digest_later(
    world: World, rng: random.Random, restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, bad, put_right = damaged_content(world, rng)
    put_right()
    world.publish(new=b"new")
    if restarts:
        world.start()
    else:
        world.catch_up()
        assert not world.has(record, "bad", bad)
        now = digesting_module.time.monotonic() + 2 * digesting_module._TRY_AGAIN_S
        monkeypatch.setattr(digesting_module.time, "monotonic", lambda: now)
    world.catch_up()
    assert world.has(record, "bad", bad)


def test_files_of_a_directory_that_was_healed_get_their_digests(world: World, rng: random.Random) -> None:
    content = rng.randbytes(1000)
    tree = {b"below": {b"a": content}, b"b": b"b"}
    record = trio.run(lambda: world.store.publish(b"run", tree))
    assert record.top.tree is not None
    entries = {entry.name: entry for entry in world.store.segments.read_tree(record.top.tree)}
    folder = entries[b"below"].tree
    assert folder is not None
    recipe = world.store.segments.read_tree(folder)[0].recipe
    assert recipe is not None
    path, offset, _ = place_of_chunk(world.store, folder)
    flip(path, 8 * offset + 3)
    world.store.close()
    world.store = SavedStore(world.root)
    world.start()
    world.catch_up()
    assert world.log.of(recipe) is None and world.has(record, "b", b"b")
    flip(path, 8 * offset + 3)
    world.store.segments.evict(world.store.segments.locate(folder).segment)  # type: ignore[union-attr]
    world.start()
    world.catch_up()
    assert world.log.of(recipe) is not None


def test_a_file_that_is_nearly_all_hole_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    record = world.publish(a=b"x" * 100)
    monkeypatch.setattr(digesting_module, "_MOST_HOLE_BYTES", -1)
    world.catch_up()
    assert world.log.of(world.recipe(record, "a")) is None
    assert world.digesting.pending_bytes == 0


def test_a_full_disk_is_waited_for(world: World, rng: random.Random) -> None:
    content = rng.randbytes(1000)
    record = world.publish(a=content)
    real = world.store.histories.append_record

    def refuse(*_: object) -> None:
        raise NoSpace("full")

    world.store.histories.append_record = refuse  # type: ignore[method-assign]
    with pytest.raises(NoSpace):
        world.catch_up()
    assert world.log.of(world.recipe(record, "a")) is None and world.digesting.pending_bytes == len(content)
    world.store.histories.append_record = real  # type: ignore[method-assign]
    world.catch_up()
    assert world.has(record, "a", content)


def test_a_history_that_takes_nothing_more_holds_no_other_up(world: World, rng: random.Random) -> None:
    content = rng.randbytes(1000)
    older, newer = world.publish("older", a=content), world.publish("newer", b=b"b")
    real = world.store.histories.append_record

    def refuse(unit: UnitId, *rest: object) -> None:
        if unit == newer.unit:
            raise ReadOnly("broken")
        real(unit, *rest)  # type: ignore[arg-type]

    world.store.histories.append_record = refuse  # type: ignore[method-assign]
    world.catch_up()
    assert world.has(older, "a", content)
    world.store.histories.append_record = real  # type: ignore[method-assign]
    world.start()
    world.catch_up()
    assert world.has(newer, "b", b"b"), "the next start tries again"


def test_a_version_that_was_forgotten_meanwhile_is_passed_over(world: World) -> None:
    record = world.publish(a=b"a")
    world.publish(b=b"b")
    trio.run(world.digesting._gather)
    world.store.histories.forget(record.unit, record.number)
    world.catch_up()
    assert len(world.order) == 1


def test_a_version_that_goes_while_it_is_read_is_no_error(
    world: World, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector takes a chunk of it between two reads."""
    record = world.publish(a=rng.randbytes(300_000))
    world.publish(b=b"b")
    recipe = world.recipe(record, "a")
    chunk = next(iter(world.store.segments.read_recipe(recipe).chunks()))
    whole = world.files.digests

    async def collected(wanted: RecipeId, *rest: object) -> FileDigests:
        if wanted == recipe:
            world.store.histories.forget(record.unit, record.number)
            change = Change()
            change.delete(Table.CHUNK, chunk)
            world.store.index.apply(change)
        return await whole(wanted, *rest)  # type: ignore[arg-type]

    world.files.digests = collected  # type: ignore[method-assign, assignment]
    world.catch_up()
    assert recipe in world.order and world.log.of(recipe) is None
    assert not caplog.text


def test_a_name_with_an_odd_character_is_written_as_sha256sum_does() -> None:
    assert sum_line("ab", "a b") == "ab  a b"
    assert sum_line("ab", "a\nb\\c\r") == "\\ab  a\\nb\\\\c\\r"


# ---- on a mount -----------------------------------------------------------------------------

CONFIG = {"settle_s": 0.3}


def pending(mount: Mount) -> object:
    return mount.facts("status", str(mount.path))["digest_pending_bytes"]


def recorded(mount: Mount) -> int:
    """How many contents the histories of a store have digests of."""
    payloads = [
        frame.payload
        for path in mount.store.glob("history/*.log")
        for frame in decode_frames(path.read_bytes())
        if frame.kind == RecordKind.DIGESTS
    ]
    return sum(len(decode_digests_record(payload).contents) for payload in payloads)


def test_a_copy_is_checked_by_sha256sum(
    mount_factory: Callable[..., Mount], tmp_path: Path, rng: random.Random
) -> None:
    mount = mount_factory(config=CONFIG)
    run = mount.path / "run"
    (run / "below").mkdir(parents=True)
    (run / "model.bin").write_bytes(rng.randbytes(3 * MIB))
    (run / "below/odd\nname").write_bytes(b"odd")
    (run / "below/empty").write_bytes(b"")
    mount.publish("run")
    poll(lambda: recorded(mount) == 3, 30)
    poll(lambda: pending(mount) == 0, 30)
    shutil.copytree(run / ".versions/latest", tmp_path / "copy")
    sums = mount.cli("digest", f"{run}@latest").stdout
    done = subprocess.run(
        ["sha256sum", "-c", "-"],
        input=sums,
        cwd=tmp_path / "copy",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.count(": OK") == 3, (sums, done)
    mount.cli("log", str(run), "--verify")
    mount.stop()
    mount.cli("rebuild", "--store", str(mount.store))
    mount.start()
    mount.cli("log", str(run), "--verify")
    facts = mount.facts("digest", f"{run / 'model.bin'}@latest")
    (one,) = facts["files"]  # type: ignore[misc]
    assert one["path"] == "model.bin" and one["size"] == 3 * MIB
    assert one["sha256"] == hashlib.sha256((run / "model.bin").read_bytes()).hexdigest()
    assert len(one["blake3"]) == 64 and len(one["crc64"]) == 16


def test_without_them_they_are_made_when_asked_for(
    mount_factory: Callable[..., Mount], rng: random.Random
) -> None:
    mount = mount_factory(config={**CONFIG, "digests": False})
    content = rng.randbytes(MIB)
    (mount.path / "run").mkdir()
    (mount.path / "run/model.bin").write_bytes(content)
    mount.publish("run")
    assert pending(mount) is None
    digits = hashlib.sha256(content).hexdigest()
    assert mount.cli("digest", f"{mount.path / 'run'}@1").stdout == f"{digits}  model.bin\n"
    mount.stop()
    assert mount.cli("digest", "/run@1", "--store", str(mount.store)).stdout == f"{digits}  model.bin\n"
    assert recorded(mount) == 0
    assert '"ro_compat":["seals","writers"]' in (mount.store / "format").read_text()
