"""The quiet policy: what holds a directory back, and what makes its unit due."""

from __future__ import annotations

from ckptfs.fusefs.quiet import LOG_MAX_S, LOG_SETTLE_S, Quiet

RUN, STEP, FILE, OTHER = 10, 11, 20, 21


def writers_of(*busy: int, directory: int = RUN):
    return lambda asked: set(busy) if asked == directory else set()


def nobody(_: int) -> set[int]:
    return set()


def test_a_directory_is_due_once_it_was_quiet_for_settle_s() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.major(RUN, FILE, 100.0)
    assert not quiet.due([RUN], 101.9, nobody).publish
    due = quiet.due([RUN], 102.0, nobody)
    assert due.publish and due.quiet == {RUN}


def test_a_file_being_written_holds_back_its_own_directory_only() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.major(RUN, FILE, 100.0)
    quiet.major(STEP, OTHER, 100.0)
    due = quiet.due([RUN, STEP], 103.0, writers_of(FILE))
    assert due.publish and due.quiet == {STEP} and not due.settled_only


def test_a_log_neither_holds_back_nor_asks_for_versions() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.major(RUN, FILE, 0.0)
    assert quiet.due([RUN], 2.0, nobody).publish
    quiet.forget(RUN)
    for second in range(3, 60):
        quiet.minor(RUN, float(second))
        assert not quiet.due([RUN], second + 0.9, nobody).publish


def test_a_log_that_stopped_is_published_after_a_while() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.minor(RUN, 100.0)
    assert not quiet.due([RUN], 100.0 + LOG_SETTLE_S - 0.1, nobody).publish
    assert quiet.due([RUN], 100.0 + LOG_SETTLE_S, nobody).publish


def test_a_log_that_never_stops_is_published_now_and_then() -> None:
    quiet = Quiet(2.0, 30.0)
    published = []
    for second in range(int(3 * LOG_MAX_S)):
        quiet.minor(RUN, float(second))
        if quiet.due([RUN], float(second), nobody).publish:
            published.append(second)
            quiet.forget(RUN)
    assert len(published) == 2


def test_a_directory_that_is_never_quiet_gives_its_settled_files_after_settle_max_s() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.major(RUN, FILE, 0.0)
    due_at = None
    for second in range(60):
        quiet.major(RUN, OTHER, float(second))
        due = quiet.due([RUN], float(second), writers_of(OTHER))
        if due.publish:
            due_at = second
            assert due.settled_only == {RUN} and not due.quiet
            assert quiet.is_settled(RUN, FILE, second) and not quiet.is_settled(RUN, OTHER, second)
            break
    assert due_at == 30


def test_settled_files_that_were_published_do_not_ask_again() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.major(RUN, FILE, 0.0)
    quiet.major(RUN, OTHER, 30.0)
    assert quiet.due([RUN], 31.0, writers_of(OTHER)).publish
    quiet.published_settled(RUN, 31.0)
    assert not quiet.due([RUN], 32.0, writers_of(OTHER)).publish


def test_a_slow_save_makes_no_version_before_its_close() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.major(RUN, FILE, 0.0)
    for second in range(600):
        assert not quiet.due([RUN], float(second), writers_of(FILE)).publish
    quiet.major(RUN, FILE, 600.0)
    assert quiet.due([RUN], 602.0, nobody).publish


def test_after_a_restart_what_is_not_published_is_due_when_it_had_time_to_settle() -> None:
    quiet = Quiet(2.0, 30.0)
    assert not quiet.due([RUN], 500.0, nobody).publish
    assert quiet.due([RUN], 502.0, nobody).publish


def test_a_published_directory_with_an_open_log_waits_for_its_next_growth() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.major(RUN, FILE, 0.0)
    assert quiet.due([RUN], 2.0, nobody).publish
    quiet.published_open(RUN, 2.0)
    assert not quiet.due([RUN], 60.0, nobody).publish
    assert quiet.due([RUN], 2.0 + LOG_MAX_S + 2.0, nobody).publish


def test_what_could_not_be_taken_waits_and_goes_file_by_file_in_the_end() -> None:
    quiet = Quiet(2.0, 30.0)
    quiet.major(RUN, FILE, 0.0)
    tries = []
    for tenth in range(20, 400):
        now = tenth / 10
        due = quiet.due([RUN], now, nobody)
        if due.quiet and due.publish:
            tries.append(now)
            quiet.postpone(RUN, now)
        elif due.settled_only:
            break
    assert len(tries) <= 15 and 30 <= now <= 33
