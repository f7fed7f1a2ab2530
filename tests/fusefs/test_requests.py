"""Requests that come again, against a daemon that dies at every single step of what it did before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.fusefs import requests
from ckptfs.fusefs.kept_notes import Kind
from ckptfs.fusefs.kept_state import Count, KeptState
from ckptfs.fusefs.requests import Requests
from ckptfs.store.disk import Disk
from ckptfs.store.errors import Corrupt
from ckptfs.store.index import Change, Index, Table

AGAIN = 1 << 63
NODE, FH = 7, 14


class Kernel:
    """Says which request was read last."""

    def __init__(self) -> None:
        self.number = 0

    def request(self) -> int:
        return self.number


class Daemon:
    """What one daemon has; the next one gets the same index and state."""

    def __init__(self, index: Index, state: KeptState, kernel: Kernel) -> None:
        self.index, self.state, self.kernel = index, state, kernel
        self.requests = Requests(state)

    def next(self) -> Daemon:
        daemon = Daemon(self.index, KeptState(self.state.fd), self.kernel)
        daemon.requests.resume(self.index)
        return daemon

    def begin(self, number: int) -> Requests:
        self.kernel.number = number
        self.requests.begin()
        return self.requests

    def do(self, number: int, ino: int) -> None:
        """A request that makes an inode, as far as the journal."""
        change = Change()
        self.begin(number).record(change, ino)
        self.index.apply(change)

    def held(self, node: int = NODE) -> int:
        return self.state.count(Kind.HELD, node)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    kernel = Kernel()
    monkeypatch.setattr(requests, "REPLIES", kernel)
    index, state = Index(Disk(str(tmp_path))), KeptState.make()
    one = Daemon(index, state, kernel)
    one.requests.begin_anew(index)
    yield one
    one.begin(0)
    index.close()
    state.close()


def test_what_was_done_is_answered_once_more_and_only_to_the_same_request(daemon: Daemon) -> None:
    daemon.do(2, 100)
    daemon.do(4, 101)
    after = daemon.next()
    assert after.begin(4 | AGAIN).made == 101
    assert after.begin(6 | AGAIN).made is None
    assert after.begin(2 | AGAIN).made == 100
    assert after.begin(8).made is None
    assert after.begin(4 | AGAIN).made is None, "with the first new request all others have come"


def test_records_outlive_deaths_in_a_row(daemon: Daemon) -> None:
    """The worst case: 63 others are done before the one whose answer got lost, one by each daemon."""
    daemon.do(2, 100)
    for number in range(63):
        daemon = daemon.next()
        daemon.do(4 + 2 * number | AGAIN, number)
    assert daemon.next().begin(2 | AGAIN).made == 100


def test_there_are_never_more_records_than_slots(daemon: Daemon) -> None:
    for number in range(1000):
        daemon.do(2 + 2 * number, number)
    assert daemon.index.count(Table.REQUEST) == 128
    assert daemon.next().begin(2000 | AGAIN).made == 999


def test_a_new_session_begins_without_records(daemon: Daemon) -> None:
    daemon.do(2, 100)
    daemon.requests.begin_anew(daemon.index)
    assert daemon.index.count(Table.REQUEST) == 0


def test_nothing_is_recorded_outside_of_a_request(daemon: Daemon) -> None:
    change = Change()
    daemon.begin(0).record(change, 1)
    assert change.operations == []


def test_a_node_of_a_lost_answer_is_counted_once(daemon: Daemon) -> None:
    daemon.begin(2).add(Kind.HELD, NODE)
    daemon.begin(4).add(Kind.HELD, NODE)
    after = daemon.next()
    assert after.held() == 2
    after.begin(4 | AGAIN).add(Kind.HELD, NODE)
    assert after.held() == 2


def test_a_node_of_an_answer_that_arrived_stays_counted(daemon: Daemon) -> None:
    daemon.begin(2).add(Kind.HELD, NODE)
    after = daemon.next()
    after.begin(6 | AGAIN).add(Kind.HELD, NODE)
    after.begin(8).add(Kind.HELD, NODE)
    assert after.next().held() == 3


def test_a_daemon_that_dies_between_noting_and_counting(daemon: Daemon) -> None:
    daemon.begin(2).add(Kind.HELD, NODE)
    daemon.begin(4)
    daemon.state.counted.add(Count(4, Kind.HELD, NODE, 1))
    after = daemon.next()
    after.begin(4 | AGAIN).add(Kind.HELD, NODE)
    assert after.held() == 2
    assert [count.before for count in after.next().state.counted][-1] == 1


def test_a_listing_that_is_lost_over_several_deaths(daemon: Daemon) -> None:
    nodes = range(10, 40)
    for node in nodes:
        daemon.begin(2).add(Kind.HELD, node)
    for died_after in (0, 5, 30):
        daemon = daemon.next()
        taken_up = daemon.begin(2 | AGAIN)
        for node in nodes[:died_after]:
            taken_up.add(Kind.HELD, node)
    assert [daemon.held(node) for node in nodes] == [1] * 30


@pytest.mark.parametrize("dies_again", [False, True])
def test_a_handle_of_a_lost_answer_is_opened_and_released_once(daemon: Daemon, dies_again: bool) -> None:
    daemon.begin(2).add(Kind.HANDLE, FH)
    after = daemon.next()
    assert after.requests.is_open(FH)
    assert after.begin(2 | AGAIN).handle == FH
    if dies_again:
        after = after.next()
        assert after.begin(2 | AGAIN).handle == FH
    assert after.begin(4).handle is None
    after.requests.take(Kind.HANDLE, FH)
    last = after.next()
    assert last.begin(4 | AGAIN).handle == FH
    assert not last.requests.is_open(FH)


def test_a_node_is_not_taken_back_while_its_handle_is_remembered(daemon: Daemon) -> None:
    """A create: node and handle for one request, and the daemon dies again before it is answered."""
    daemon.begin(2).add(Kind.HELD, NODE)
    daemon.requests.add(Kind.HANDLE, FH)
    for _ in range(3):
        daemon = daemon.next()
        assert daemon.begin(2 | AGAIN).handle == FH
        daemon.requests.add(Kind.HELD, NODE)
        assert daemon.held() == 1
    assert daemon.state.count(Kind.HANDLE, FH) == 1


def test_a_row_that_cannot_be_read_is_refused(daemon: Daemon) -> None:
    """Left out, its request would be done twice."""
    daemon.do(2, 100)
    assert [(unique, ino) for _, unique, ino in requests.read_rows(daemon.index)] == [(2, 100)]
    change = Change()
    change.put(Table.REQUEST, bytes(8), b"short")
    daemon.index.apply(change)
    with pytest.raises(Corrupt):
        daemon.next()
