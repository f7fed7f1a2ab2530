"""64 processes in one tree: nothing is lost, nothing is seen twice, makedirs races are nobody's error."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from posixplaces import Place

PROCESSES = 64
LIMIT_S = 60.0


def in_processes(work: Callable[[int], None], count: int = PROCESSES) -> None:
    """Run `work(number)` in that many forked children at once; each must end well."""
    start_end, go_end = os.pipe()
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(go_end)
                os.read(start_end, 1)
                work(number)
                code = 0
            except BaseException as e:
                os.write(2, f"process {number}: {type(e).__name__}: {e}\n".encode())
            finally:
                os._exit(code)
        pids.append(pid)
    os.close(go_end)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    os.close(start_end)
    assert codes == [0] * count


def test_makedirs_of_the_same_path(place: Place) -> None:
    def make(number: int) -> None:
        for turn in range(8):
            os.makedirs(place.path / str(turn) / "a" / "b" / "c", exist_ok=True)

    in_processes(make)
    for turn in range(8):
        assert os.listdir(place.path / str(turn) / "a" / "b") == ["c"]


def test_one_of_many_creates_exclusively(place: Place) -> None:
    def create(number: int) -> None:
        for turn in range(20):
            try:
                fd = os.open(place.path / f"lock{turn}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                continue
            os.write(fd, str(number).encode())
            os.close(fd)
            (place.path / f"won{turn}-by{number}").write_bytes(b"")

    in_processes(create)
    winners = [name for name in os.listdir(place.path) if name.startswith("won")]
    assert sorted(name.split("-")[0] for name in winners) == sorted(f"won{turn}" for turn in range(20))


def test_each_makes_renames_and_removes(place: Place, rng: random.Random) -> None:
    seeds = [rng.random() for _ in range(PROCESSES)]
    for name in "abc":
        (place.path / name).mkdir()

    def churn(number: int) -> None:
        own = random.Random(seeds[number])
        here = {}
        for step in range(8):
            name = f"{own.choice('abc')}/{number}-{step}"
            (place.path / name).write_bytes(f"{number} {step}".encode())
            here[name] = f"{number} {step}".encode()
            if own.random() < 0.6:
                old = own.choice(sorted(here))
                new = f"{own.choice('abc')}/{number}-moved-{step}"
                os.rename(place.path / old, place.path / new)
                here[new] = here.pop(old)
            if own.random() < 0.3:
                gone = own.choice(sorted(here))
                os.unlink(place.path / gone)
                del here[gone]
        for name, content in here.items():
            assert (place.path / name).read_bytes() == content
            (place.path / name).rename(place.path / f"{name}-kept")

    in_processes(churn)
    for name in "abc":
        names = os.listdir(place.path / name)
        assert len(names) == len(set(names))
        for kept in names:
            number = kept.split("-")[0]
            assert kept.endswith("-kept")
            assert (place.path / name / kept).read_bytes().split()[0] == number.encode()


def test_all_rename_over_one_target(place: Place) -> None:
    target = place.file("target", b"first" * 1000)

    def replace(number: int) -> None:
        content = f"{number:05d}".encode() * 1000
        for turn in range(4):
            temporary = place.path / f"tmp{number}-{turn}"
            temporary.write_bytes(content)
            temporary.rename(target)
            seen = target.read_bytes()
            assert len(seen) == 5000 and seen == seen[:5] * 1000

    in_processes(replace)
    assert os.listdir(place.path) == ["target"]


def test_one_directory_is_made_and_removed_by_all(place: Place) -> None:
    def fight(number: int) -> None:
        for _ in range(10):
            try:
                os.mkdir(place.path / "d")
            except FileExistsError:
                pass
            try:
                (place.path / "d" / str(number)).write_bytes(b"x")
                os.unlink(place.path / "d" / str(number))
            except FileNotFoundError:
                pass
            try:
                os.rmdir(place.path / "d")
            except OSError:
                pass

    in_processes(fight)
    assert set(os.listdir(place.path)) <= {"d"}
    if (place.path / "d").exists():
        (place.path / "d").rmdir()


def test_listing_while_entries_come_and_go(place: Place) -> None:
    staying = {f"stay{number:03d}" for number in range(200)}
    for name in staying:
        place.file(name)

    def churn(number: int) -> None:
        if number == 0:
            time.sleep(0.05)
        for turn in range(30):
            path = place.path / f"go{number}-{turn}"
            os.mknod(path, 0o100644)
            os.rename(path, place.path / f"gone{number}-{turn}")
            os.unlink(place.path / f"gone{number}-{turn}")

    def watch(number: int) -> None:
        if number >= 4:
            churn(number)
            return
        for _ in range(10):
            seen = os.listdir(place.path)
            assert len(seen) == len(set(seen))
            assert staying <= set(seen)

    in_processes(watch, 16)
    assert set(os.listdir(place.path)) == staying
