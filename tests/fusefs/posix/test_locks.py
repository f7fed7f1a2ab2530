"""flock(2), fcntl(2) locks: of the kernel's making, between processes."""

from __future__ import annotations

import fcntl
import os
import struct
import time

from posixplaces import Place, in_child, opened, outcome

LOCKS = (fcntl.LOCK_EX, fcntl.LOCK_SH)


def try_flock(place: Place, kind: int) -> str:
    def attempt() -> str:
        with opened(place.path / "lock", os.O_RDWR) as fd:
            return outcome(fcntl.flock, fd, kind | fcntl.LOCK_NB)

    return in_child(attempt)


def try_record(place: Place, kind: int, length: int, start: int) -> str:
    def attempt() -> str:
        with opened(place.path / "lock", os.O_RDWR) as fd:
            return outcome(fcntl.lockf, fd, kind | fcntl.LOCK_NB, length, start)

    return in_child(attempt)


def test_flock_between_processes(place: Place) -> None:
    path = place.file("lock")
    with opened(path, os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert [try_flock(place, kind) for kind in LOCKS] == ["EAGAIN", "EAGAIN"]
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert [try_flock(place, kind) for kind in LOCKS] == ["EAGAIN", "ok"]
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert try_flock(place, fcntl.LOCK_EX) == "ok"
        fcntl.flock(fd, fcntl.LOCK_EX)
    assert try_flock(place, fcntl.LOCK_EX) == "ok"


def test_records_between_processes(place: Place) -> None:
    path = place.file("lock", bytes(100))
    with opened(path, os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20)
        assert try_record(place, fcntl.LOCK_EX, 5, 0) == "ok"
        assert try_record(place, fcntl.LOCK_EX, 5, 25) == "EAGAIN"
        assert try_record(place, fcntl.LOCK_SH, 0, 0) == "EAGAIN"
        fcntl.lockf(fd, fcntl.LOCK_UN, 10, 20)
        assert try_record(place, fcntl.LOCK_SH, 0, 0) == "ok"


def test_records_go_with_any_close_of_the_process(place: Place) -> None:
    path = place.file("lock", bytes(100))
    with opened(path, os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        os.close(os.open(path, os.O_RDONLY))
        assert try_record(place, fcntl.LOCK_EX, 0, 0) == "ok"


def test_who_holds_it(place: Place) -> None:
    path = place.file("lock", bytes(100))
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with opened(path, os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 10, 5)

        def ask() -> bytes:
            with opened(path, os.O_RDWR) as other:
                return fcntl.fcntl(other, fcntl.F_GETLK, question)

        kind, _, start, length, pid = struct.unpack("hhqqi", in_child(ask)[: struct.calcsize("hhqqi")])
        assert (kind, start, length, pid) == (fcntl.F_WRLCK, 5, 10, os.getpid())


def test_a_lock_survives_ingest(place: Place) -> None:
    path = place.file("lock", b"content")
    with opened(path, os.O_RDONLY) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        place.let_store(path)
        assert try_flock(place, fcntl.LOCK_SH) == "EAGAIN"


def test_waiting_for_a_lock(place: Place) -> None:
    path = place.file("lock")
    with opened(path, os.O_RDWR) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        pid = os.fork()
        if pid == 0:
            with opened(path, os.O_RDWR) as other:
                fcntl.flock(other, fcntl.LOCK_EX)
                os._exit(0)
        time.sleep(0.1)
        assert os.waitpid(pid, os.WNOHANG)[0] == 0
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert os.waitpid(pid, 0)[1] == 0


def test_leases(place: Place) -> None:
    path = place.file("lock", b"x")
    with opened(path, os.O_RDONLY) as fd:
        said = outcome(fcntl.fcntl, fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        assert said in ("ok", "EAGAIN", "EINVAL")
