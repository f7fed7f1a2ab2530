"""A seeded mixture of everything that writes to a store, small enough to be cut at every call.

One rule: what is done next depends on the seed and on what was answered, never on time.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import trio
from encoded_series import PATH, saves
from faceclient import FaceClient
from small_store import safetensors
from truth import FILE, FOLDER, LINK

UNITS = ("run0", "run1")
_PIECE_BYTES = 64 << 10
_MOST_LARGE = 4
_MOST_HANDLES = 3
_MOST_BYTES = 3 << 20
WEIGHTS = [save[PATH] for save in saves(6, values=12_000, counters=1000)]
Move = Callable[[], Awaitable[None]]


class Mixture:
    """Makes calls on a client, `units` only if that is given. `large` counts the large files, `weights` the
    saves of one run."""

    def __init__(self, client: FaceClient, chance: random.Random) -> None:
        self.client, self.chance = client, chance
        self.large = 0
        self.weights = 0
        self.units: Sequence[str] = UNITS
        self._names = 0

    async def begin(self) -> None:
        """What every mixture begins with; OSError if the disk does not let it."""
        for folder in (*UNITS, "run0/sub"):
            if folder not in self.client.truth.state.names and not await self.client.mkdir(folder):
                raise OSError(f"{folder} cannot be made")
        await self.save("run0/model.safetensors", self._model())
        await self.save("run1/notes.txt", b"one\n" * 40)

    async def save(self, path: str, payload: bytes, *, synced: bool = False) -> None:
        """A file written in a few requests, and closed."""
        key = await self.client.create(path)
        if key is None:
            return
        step = max(1, -(-len(payload) // self.chance.choice((1, 2, 3))))
        for at in range(0, len(payload), step):
            await self.client.write(key, at, payload[at : at + step])
        if synced:
            await self.client.fsync(key)
        await self.client.close(key)

    async def move(self) -> None:
        """One thing that a job or the daemon does."""
        moves: list[tuple[int, Move]] = [
            (6, self._new_file),
            (5, self._write),
            (4, self._save_over),
            (3, self._truncate),
            (4, self._fsync),
            (1, self._fsyncdir),
            (3, self._unlink),
            (2, self._link),
            (1, self._symlink),
            (2, self._make_folder),
            (1, self._remove_folder),
            (2, self._rename),
            (1, self._exchange),
            (1, self._rename_folder),
            (2, self._close),
            (3, self._large_file),
            (2, self._log),
            (2, self._save_weights),
        ]
        weights, made = zip(*moves, strict=True)
        await self.chance.choices(made, weights)[0]()

    async def upkeep(self) -> None:
        """One thing that the daemon does by itself, or is asked to do."""
        moves: list[tuple[int, Move]] = [
            (5, self._publish),
            (2, self._publish_beside_others),
            (3, self.client.commit),
            (2, self.client.reclaim),
            (1, self.client.flush),
            (1, self._forget),
            (3, self._roll_back),
            (2, self.client.collect),
            (2, self.client.encode),
        ]
        weights, made = zip(*moves, strict=True)
        await self.chance.choices(made, weights)[0]()

    # -- what a job does -------------------------------------------------------------------------------

    async def _new_file(self) -> None:
        key = await self.client.create(self._new_name())
        if key is None:
            return
        for at in range(self.chance.randint(0, 2)):
            await self.client.write(key, at * 3000, self._bytes(self.chance.choice((1, 300, 3000, 20_000))))
        if self.chance.random() < 0.3:
            await self.client.fsync(key)
        if len(self.client.handles) > _MOST_HANDLES or self.chance.random() < 0.6:
            await self.client.close(key)

    async def _large_file(self) -> None:
        if self.large >= _MOST_LARGE:
            await self._write()
            return
        self.large += 1
        await self.save(self._new_name(), self._model(), synced=self.chance.random() < 0.3)

    async def _save_weights(self) -> None:
        """The next save of a run: there is something to encode then, against the one before."""
        if self.weights >= len(WEIGHTS) or self._total() > _MOST_BYTES:
            await self._write()
            return
        payload, temporary = WEIGHTS[self.weights], "run1/weights.tmp"
        if "run1" not in self.client.truth.state.names or temporary in self.client.truth.state.names:
            return
        self.weights += 1
        await self.save(temporary, payload, synced=self.chance.random() < 0.3)
        if temporary in self.client.truth.state.names:
            await self.client.rename(temporary, "run1/weights.safetensors")
        if self.chance.random() < 0.7:
            await self.client.publish("run1")

    async def _write(self) -> None:
        key = await self._opened()
        if key is None:
            return
        size = len(self.client.truth.state.files[key].now)
        offset = self.chance.choice((0, size, self.chance.randint(0, size), size + 5000))
        if self._total() > _MOST_BYTES:
            offset = min(offset, size)
        await self.client.write(key, offset, self._bytes(self.chance.choice((1, 100, 5000, 9000))))

    async def _save_over(self) -> None:
        """The way that most jobs save: a temporary file, synced or not, renamed over the old one."""
        path = self._some(FILE)
        if path is None or path.endswith(".tmp"):
            return
        temporary = path + ".tmp"
        if temporary in self.client.truth.state.names:
            return
        key = await self.client.create(temporary)
        if key is None:
            return
        await self.client.write(key, 0, self._bytes(self.chance.choice((200, 6000, 30_000))))
        if self.chance.random() < 0.3:
            await self.client.fsync(key)
            if self.chance.random() < 0.3:
                await self.client.write(key, 100, self._bytes(900))
        early = self.chance.random() < 0.3
        if not early:
            await self.client.close(key)
        await self.client.rename(temporary, path)
        if early:
            await self.client.close(key)

    async def _truncate(self) -> None:
        path = self._some(FILE)
        if path is None:
            return
        key = self.client.truth.state.names[path].key
        size = len(self.client.truth.state.files[key].now)
        if self.chance.random() < 0.3 and key not in self.client.handles:
            if await self.client.open_truncated(key):
                await self.client.write(key, 0, self._bytes(700))
                await self.client.close(key)
            return
        await self.client.truncate(
            key, self.chance.choice((0, self.chance.randint(0, size), size // 2, size + 300))
        )

    async def _fsync(self) -> None:
        key = await self._opened()
        if key is not None:
            await self.client.fsync(key)

    async def _fsyncdir(self) -> None:
        await self.client.fsyncdir(self.chance.choice(self.units))

    async def _log(self) -> None:
        """A log that stays open and grows."""
        name = f"{self.chance.choice(self.units)}/train.log"
        node = self.client.truth.state.names.get(name)
        if node is not None and node.kind != FILE:
            return
        key = node.key if node is not None else await self.client.create(name)
        if key is None or (key not in self.client.handles and not await self.client.open(key)):
            return
        for _ in range(self.chance.randint(1, 3)):
            end = len(self.client.truth.state.files[key].now)
            await self.client.write(key, end, b"step %d loss %f\n" % (end, self.chance.random()) * 20)

    async def _unlink(self) -> None:
        path = self._some(FILE) or self._some(LINK)
        if path is not None:
            await self.client.unlink(path)

    async def _link(self) -> None:
        path = self._some(FILE)
        if path is not None:
            await self.client.link(path, self._new_name())

    async def _symlink(self) -> None:
        await self.client.symlink(self._new_name(), "model.safetensors")

    async def _make_folder(self) -> None:
        name = self._new_name()
        await self.client.mkdir(name)

    async def _remove_folder(self) -> None:
        for path, node in sorted(self.client.truth.state.names.items()):
            empty = not any(other.startswith(path + "/") for other in self.client.truth.state.names)
            if node.kind == FOLDER and empty and path not in UNITS and path.startswith(tuple(self.units)):
                await self.client.rmdir(path)
                return

    async def _rename(self) -> None:
        path = self._some(FILE)
        if path is None:
            return
        over = self._some(FILE) if self.chance.random() < 0.5 else None
        names = self.client.truth.state.names
        if over is not None and names[over].key != names[path].key:
            await self.client.rename(path, over)
        else:
            await self.client.rename(path, self._new_name())

    async def _exchange(self) -> None:
        one, two = self._some(FILE), self._some(FILE)
        if one is not None and two is not None and one != two:
            await self.client.rename(one, two, exchange=True)

    async def _rename_folder(self) -> None:
        path = self._some(FOLDER)
        if path is not None and path not in UNITS:
            folder = path.rpartition("/")[0]
            await self.client.rename(path, f"{folder}/{self._fresh()}.d")

    async def _close(self) -> None:
        if self.client.handles:
            await self.client.close(self.chance.choice(sorted(self.client.handles)))

    # -- what the daemon does --------------------------------------------------------------------------

    async def _publish(self) -> None:
        unit = self.chance.choice(self.units)
        tag = f"tag{self._fresh()}" if self.chance.random() < 0.2 else None
        await self.client.publish(unit, tag)

    async def _publish_beside_others(self) -> None:
        """A publish of one unit while a job works on the other."""
        unit, other = self.chance.sample(UNITS, 2)
        self.units = (other,)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.client.publish, unit)
            for _ in range(3):
                await self.move()
                await trio.lowlevel.checkpoint()
        self.units = UNITS

    async def _forget(self) -> None:
        tagged = {(unit, number) for (unit, _), (number, _) in self.client.truth.tags.items()}
        newest: dict[bytes, int] = {}
        for unit, number in self.client.truth.versions:
            newest[unit] = max(newest.get(unit, 0), number)
        may_go = [
            (unit, number)
            for (unit, number), version in sorted(self.client.truth.versions.items())
            if number != newest[unit] and (unit, number) not in tagged and not version.forgetting
        ]
        if may_go:
            await self.client.forget(*self.chance.choice(may_go))  # type: ignore[arg-type]

    async def _roll_back(self) -> None:
        unit = self.chance.choice(self.units)
        mine = self.client.parts.histories.unit_named(unit.encode())
        listed = [] if mine is None else self.client.parts.histories.numbers(mine.unit)
        known = [n for n in listed if mine is not None and (mine.unit, n) in self.client.truth.versions]
        if mine is not None and known:
            await self.client.rollback(unit, (mine.unit, self.chance.choice(known)))

    # -- inside ----------------------------------------------------------------------------------------

    async def _opened(self) -> int | None:
        """A file that is open for writing, opened if need be."""
        mine = [k for k in self.client.handles if self.client.name_of(k).startswith(tuple(self.units))]
        if mine and self.chance.random() < 0.5:
            return self.chance.choice(sorted(mine))
        path = self._some(FILE)
        if path is None:
            return None
        key = self.client.truth.state.names[path].key
        if key in self.client.handles:
            return key
        if len(self.client.handles) > _MOST_HANDLES:
            await self._close()
        return key if await self.client.open(key) else None

    def _some(self, kind: str) -> str | None:
        names = self.client.truth.state.names
        found = [p for p in sorted(names) if names[p].kind == kind and p.startswith(tuple(self.units))]
        return self.chance.choice(found) if found else None

    def _new_name(self) -> str:
        unit = self.chance.choice(self.units)
        folders = [
            path
            for path, node in sorted(self.client.truth.state.names.items())
            if node.kind == FOLDER and (path == unit or path.startswith(unit + "/"))
        ]
        return f"{self.chance.choice(folders)}/f{self._fresh()}"

    def _fresh(self) -> int:
        self._names += 1
        return self._names

    def _total(self) -> int:
        return sum(len(content.now) for content in self.client.truth.state.files.values())

    def _bytes(self, length: int) -> bytes:
        return self.chance.randbytes(length)

    def _model(self) -> bytes:
        """A save most of whose tensors are those of another one, so that there is something to punch."""
        old = [random.Random(number).randbytes(_PIECE_BYTES) for number in range(2)]
        tensors = {"frozen": old[0], "slow": old[self.chance.randrange(2)], "new": self._bytes(_PIECE_BYTES)}
        return safetensors({name: tensors[name] for name in sorted(tensors)})
