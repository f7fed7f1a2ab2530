"""The share of powercut.py that every run of the tests takes, and the crashes that once lost something."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from encoded_series import saves
from faceclient import FaceClient
from mounting import memory_folder
from powercut import Cutter, cut_run
from recording_run import Run, record_script

from ckptfs.store.ids import UnitId

SHARE = 0.08
KINDS = ("kill", "synced", "names", "bytes", "torn512", "any")
Script = Callable[[FaceClient], Awaitable[None]]


def test_nothing_is_lost_wherever_the_process_or_the_power_ends(seed: int) -> None:
    tally = cut_run(f"{seed}.0", SHARE)
    assert tally.findings == [], "\n".join(tally.findings)
    assert sum(tally.points.values()) > 100


async def save(client: FaceClient, path: str, payload: bytes) -> int:
    """A file, open, not synced; its key."""
    key = await client.create(path)
    assert key is not None
    await client.write(key, 0, payload)
    return key


async def stored(client: FaceClient, path: str, payload: bytes) -> int:
    """A file in run0 that a version has; its key."""
    if "run0" not in client.truth.state.names:
        await client.mkdir("run0")
    key = await save(client, path, payload)
    await client.close(key)
    await client.publish("run0")
    return key


async def renamed_after_a_write_behind_its_sync(client: FaceClient) -> None:
    await stored(client, "run0/model", b"old" * 3000)
    key = await save(client, "run0/model.tmp", b"new" * 3000)
    await client.fsync(key)
    await client.write(key, 100, b"more" * 3000)
    await client.rename("run0/model.tmp", "run0/model")
    await client.fsyncdir("run0")


async def renamed_over_what_was_emptied(client: FaceClient) -> None:
    await client.mkdir("run0")
    old = await save(client, "run0/model", b"old" * 50)
    await client.fsync(old)
    await client.close(old)
    await client.open_truncated(old)
    await client.close(old)
    key = await save(client, "run0/model.tmp", b"new" * 60)
    await client.fsync(key)
    await client.write(key, 100, b"more" * 300)
    await client.rename("run0/model.tmp", "run0/model")
    await client.fsyncdir("run0")


async def renamed_with_a_second_name(client: FaceClient) -> None:
    await stored(client, "run0/model", b"old" * 3000)
    await save(client, "run0/model.tmp", b"new" * 3000)
    await client.link("run0/model.tmp", "run0/twin")
    await client.rename("run0/model.tmp", "run0/model")
    await client.fsyncdir("run0")


async def emptied_after_its_sync(client: FaceClient) -> None:
    key = await stored(client, "run0/model", b"first" * 3000)
    await client.open(key)
    await client.write(key, 0, b"second" * 3000)
    await client.fsync(key)
    await client.close(key)
    await client.open_truncated(key)
    await client.write(key, 0, b"third" * 3000)
    await client.fsyncdir("run0")


async def written_while_its_synced_bytes_are_pinned(client: FaceClient) -> None:
    await client.mkdir("run0")
    key = await save(client, "run0/model", b"synced" * 3000)
    await client.fsync(key)
    await client.close(key)
    other = await save(client, "run0/other", b"other" * 10)
    await client.close(other)
    await client.unlink("run0/other")
    await client.open(key)
    await client.write(key, 0, b"in place")
    await client.fsyncdir("run0")


async def never_synced_and_then_published(client: FaceClient) -> None:
    await client.mkdir("run0")
    await save(client, "run0/model", b"never synced" * 300)
    await client.fsyncdir("run0")


@pytest.mark.parametrize(
    "script",
    [
        renamed_after_a_write_behind_its_sync,
        renamed_over_what_was_emptied,
        renamed_with_a_second_name,
        emptied_after_its_sync,
        written_while_its_synced_bytes_are_pinned,
        never_synced_and_then_published,
    ],
)
def test_a_case_that_once_lost_something(script: Script) -> None:
    run = record_script(script.__name__, script)
    with memory_folder() as memory:
        cutter = Cutter(run, str(memory), always_again=True)
        last = len(run.events)
        findings: list[str] = []
        for place in range(max(1, last - 6), last + 1):
            for kind in KINDS:
                findings += cutter.cut_at(place, kind).findings
                cutter.tally.findings = []
        assert findings == [], "\n".join(findings)
        assert sum(cutter.tally.points.values()) > 10


async def encoded_and_let_go(client: FaceClient) -> None:
    """Saves are encoded against each other, raw bytes go, a parent is forgotten, and so on."""
    await client.mkdir("run0")
    for number, save in enumerate(saves(4, values=20_000, counters=3000)):
        for path, payload in save.items():
            key = await client.create(f"run0/{path}.tmp")
            assert key is not None
            await client.write(key, 0, payload)
            await client.close(key)
            await client.rename(f"run0/{path}.tmp", f"run0/{path}")
        await client.publish("run0")
        if number:
            await client.encode()
            await client.reclaim()
            await client.commit()
            await client.reclaim()
    assert client.encoding.total.encoded_chunks > 5
    oldest = min(client.truth.versions)
    await client.forget(UnitId(oldest[0]), oldest[1])
    await client.collect()


@pytest.fixture(scope="module")
def encoded_run() -> Run:
    return record_script("encoded", encoded_and_let_go)


def test_no_raw_byte_goes_before_its_encoding_is_committed_and_synced(encoded_run: Run, seed: int) -> None:
    """Wherever the process or the power ends: every version that was listed has its bytes."""
    assert encoded_run.findings == []
    with memory_folder() as memory:
        tally = Cutter(replace(encoded_run, seed=f"encoded {seed}"), str(memory), 0.12).cut_everywhere()
    assert tally.findings == [], "\n".join(tally.findings)
    assert sum(tally.points.values()) > 50


async def pinned_under_a_name_in_its_own_unit(client: FaceClient) -> None:
    await client.mkdir("run0")
    await client.mkdir("run1")
    key = await save(client, "run0/model", b"of two units" * 3000)
    await client.close(key)
    await client.link("run0/model", "run1/model")
    other = await save(client, "run1/other", b"other" * 10)
    await client.close(other)
    await client.unlink("run1/other")
    await client.publish("run1")


def test_a_file_of_two_units_is_pinned_in_the_one_that_loses_something() -> None:
    """It once was looked for above the other unit, for ever."""
    run = record_script("two units", pinned_under_a_name_in_its_own_unit)
    listed = [set(version.outline) for version in run.truth.versions.values()]
    assert run.findings == []
    assert listed == [{"model", "other"}, {"model"}]
