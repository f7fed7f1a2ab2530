"""log, verify, du and status over a store, and the same over a bare one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from filled_store import KEY, PIECE_BYTES, FilledStore, answered

from ckptfs.daemon import messages
from ckptfs.daemon.messages import Json
from ckptfs.daemon.offline import OfflineStore
from ckptfs.store.errors import InvalidRequest, NotFound, Unavailable
from ckptfs.store.ids import cid_text
from ckptfs.store.index import Change
from ckptfs.store.segment_files import place_of
from ckptfs.store.segment_format import segment_paths
from ckptfs.store.signing import SigningKey

A, B, C = (bytes([n]) * PIECE_BYTES for n in (1, 2, 3))


@pytest.fixture
def history(filled_store: FilledStore) -> FilledStore:
    """run: three versions. v1 {x: AB}, v2 {x: AB, d/y: AC}, v3 {x: C, d/y: AC}; live {x: C}."""
    filled_store.make("/run", mode=0o755)
    filled_store.make("/run/x", mode=0o644, content=C)
    filled_store.publish("run", {"x": A + B})
    filled_store.publish("run", {"x": A + B, "d/y": A + C})
    filled_store.publish("run", {"x": C, "d/y": A + C})
    return filled_store


def numbers(store: FilledStore, text: str) -> list[object]:
    rows = store.queries.log(store.addresses.find(text))
    assert isinstance(rows, list)
    return [answered(row)["number"] for row in rows]


def test_log(history: FilledStore) -> None:
    rows = history.queries.log(history.addresses.find("/run"))
    assert isinstance(rows, list)
    row = answered(rows[0])
    assert row["name"] == "v000001_20261130T005420Z" and row["time"] == "2026-11-30T00:54:20.000000Z"
    assert {"number", "name", "time", "step", "tags", "state", "missing", "root", "cid"} <= row.keys()
    assert str(row["cid"]).startswith("bafyr4i")
    assert numbers(history, "/run") == [1, 2, 3]
    assert numbers(history, "/run@2") == [2]


def test_log_of_a_place_lists_the_versions_that_have_it(history: FilledStore) -> None:
    assert numbers(history, "/run/d/y") == [2, 3]
    assert numbers(history, "/run/x") == [1, 2, 3]
    with pytest.raises(NotFound):
        numbers(history, "/run/never")


def test_addresses(history: FilledStore) -> None:
    find = history.addresses.find
    assert find("/run/x").inner == (b"x",)
    assert find("/run@2").version == "2" and find("/run/@2").is_whole
    assert find("/run/d@latest").inner == (b"d",)
    history.make("/run@2", mode=0o755)
    assert find("/run@2").version is None and find("/run@2").name == b"run@2"
    assert find("/").name == find("/@root").name == b"@root"
    for text in ("/absent", "/absent@3", "/absent/x"):
        with pytest.raises(NotFound):
            find(text)
    with pytest.raises(NotFound):
        history.addresses.record(find("/run/@"))


def test_removed_units_are_found_by_name(history: FilledStore) -> None:
    history.publish("old/run@7", {"x": A})
    assert numbers(history, "/old/run@7") == [1]
    assert numbers(history, "/old/run@7@latest") == [1]
    assert history.addresses.find("/old/run@7/x").top == 0
    assert history.verify("/old/run@7/x")["chunks"] == 2
    assert history.verify("/old/run@7/x@1")["number"] == 1
    with pytest.raises(NotFound, match="no version 9"):
        history.verify("/old/run@7/x@9")
    history.publish("old/run@7", {"x@1": B})
    assert history.verify("/old/run@7/x@1@latest")["number"] == 2


def test_versions_by_all_their_names(history: FilledStore) -> None:
    unit = history.histories.unit_named(b"run")
    assert unit is not None
    history.histories.tag(unit.unit, 2, "good")
    for text, number in (("1", 1), ("good", 2), ("latest", 3), ("time:2026-11-30T00:55:30", 2)):
        assert history.addresses.record(history.addresses.find(f"/run@{text}")).number == number
    with pytest.raises(NotFound, match="there is no version 9"):
        history.verify("/run@9")
    with pytest.raises(InvalidRequest):
        history.verify("/run@step:x")


def test_heads_and_proofs(history: FilledStore) -> None:
    (row,) = map(answered, listed(history.queries.heads(history.histories.units())))
    assert row["unit"] == "run" and row["number"] == 3 and row["key"] == KEY.public.fingerprint
    head = str(row["head"])
    answer, faults = history.prove("/run", expect=head)
    assert faults == [] and answer["head"] == head
    assert answer["trusted"] == answer["keys"] == [KEY.public.fingerprint]
    assert [answered(version)["number"] for version in listed(answer["versions"])] == [1, 2, 3]
    history.publish("run", {"x": A})
    assert history.prove("/run/d", expect=head)[1] == []
    assert history.prove("/run", keys=[SigningKey(b"x" * 32).public.raw.hex()])[1] == ["key"] * 5
    other = [SigningKey(b"x" * 32).public.raw.hex(), KEY.public.raw.hex()]
    assert history.prove("/run", keys=other)[1] == []
    assert history.prove("/run", expect="9:" + "00" * 32)[1] == ["head"]
    for bad in ({"keys": ["00"]}, {"keys": ["x"]}, {"expect": "12"}):
        with pytest.raises(InvalidRequest):
            history.prove("/run", **bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="leave out @2"):
        history.prove("/run@2")
    history.make("/new", mode=0o755)
    with pytest.raises(NotFound, match="no version yet"):
        history.prove("/new")


def listed(answer: Json) -> list[Json]:
    assert isinstance(answer, list)
    return answer


def test_du(history: FilledStore) -> None:
    small = {"logical_bytes": 2 * PIECE_BYTES, "unique_bytes": 2 * PIECE_BYTES}
    assert small.items() <= history.usage("/run@1").items()
    # x as AB and as C, d/y as AC: five pieces in three contents, three chunks.
    whole = history.usage("/run")
    assert whole["logical_bytes"] == 5 * PIECE_BYTES
    assert whole["unique_bytes"] == whole["stored_bytes"] == 3 * PIECE_BYTES
    assert history.usage("/run/d")["logical_bytes"] == 2 * PIECE_BYTES
    assert history.usage("/run/x@2")["logical_bytes"] == 2 * PIECE_BYTES
    with pytest.raises(NotFound):
        history.usage("/run/d/y@1")


def test_verify_finds_nothing_wrong(history: FilledStore) -> None:
    answer = history.verify("/run@2")
    # A, B and C, two recipes, two trees.
    assert answer["chunks"] == 7 and answer["corrupt"] == []
    assert history.verify("/run/x@1")["chunks"] == 3
    assert history.verify("/run")["number"] == 3
    with pytest.raises(NotFound):
        history.verify("/run/d@1")


def damage(store: FilledStore, chunk: bytes) -> str:
    """Flip a bit of a stored chunk; the place as verify names it."""
    from ckptfs.store.hashing import chunk_id

    location = store.segments.locate(chunk_id(chunk))
    assert location is not None
    path = Path(store.disk.absolute(segment_paths(location.segment)[location.in_idx]))
    content = bytearray(path.read_bytes())
    content[location.offset] ^= 1
    path.write_bytes(content)
    store.segments.evict(location.segment)
    return str(place_of(location))


def test_verify_names_file_chunk_and_place(history: FilledStore) -> None:
    from ckptfs.store.hashing import chunk_id

    place = damage(history, B)
    expected = {"path": "x", "tensor": None, "chunk": cid_text(chunk_id(B)), "place": place}
    assert history.verify("/run@2")["corrupt"] == [expected]
    assert history.verify("/run@3")["corrupt"] == []


def test_verify_names_the_tensor(filled_store: FilledStore) -> None:
    header = b'{"w":{"dtype":"U8","shape":[1992],"data_offsets":[0,1992]}}'
    content = len(header).to_bytes(8, "little") + header + os.urandom(1992)
    filled_store.publish("run", {"d/model.safetensors": content})
    damage(filled_store, content[PIECE_BYTES : 2 * PIECE_BYTES])
    (row,) = filled_store.verify("/run")["corrupt"]  # type: ignore[misc]
    assert answered(row)["tensor"] == "w" and answered(row)["path"] == "d/model.safetensors"


def test_verify_goes_on_beside_a_damaged_directory(history: FilledStore) -> None:
    from ckptfs.store.hashing import chunk_id

    record = history.addresses.record(history.addresses.find("/run@2"))
    assert record.top.tree is not None
    folder = next(e for e in history.segments.read_tree(record.top.tree) if e.name == b"d")
    assert folder.tree is not None
    location = history.segments.locate(folder.tree)
    assert location is not None
    payload = history.segments.read(folder.tree)
    assert chunk_id(payload) == folder.tree
    damage(history, payload)
    fresh = history.verify("/run@2")
    assert [answered(row)["path"] for row in fresh["corrupt"]] == ["d"]  # type: ignore[union-attr]
    assert fresh["chunks"] == 5  # what only the damaged directory names is out of reach


def test_a_chunk_that_the_index_lacks_is_corrupt(history: FilledStore) -> None:
    from ckptfs.store.hashing import chunk_id
    from ckptfs.store.index import Table

    change = Change()
    change.delete(Table.CHUNK, chunk_id(B))
    history.index.apply(change)
    (row,) = history.verify("/run@1")["corrupt"]  # type: ignore[misc]
    assert "the index does not know it" in str(answered(row)["place"])


def test_status(history: FilledStore) -> None:
    status = answered(trio.run(history.queries.status, history.histories.units()))
    assert {"version", "write_path", "why", "units", "stored_bytes", "free_bytes"} <= status.keys()
    (unit,) = status["units"]  # type: ignore[misc]
    assert answered(unit)["name"] == "run" and answered(unit)["versions"] == 3
    assert answered(unit)["newest_complete"] == "v000003_20261130T005620Z"


def untimed(answer: object) -> dict[str, object]:
    """What `verify` found, without how long it took."""
    assert isinstance(answer, dict)
    return {key: value for key, value in answer.items() if key != "elapsed_s"}


def test_a_bare_store_answers_the_same(history: FilledStore) -> None:
    expected = history.queries.log(history.addresses.find("/run"))
    used, verified = history.usage("/run"), untimed(history.verify("/run@2"))
    history.index.commit()
    history.index.close()
    with OfflineStore(history.disk) as store:
        assert store.ask(messages.Log(path="/run")) == expected
        assert store.ask(messages.Du(path="/run")) == used
        assert untimed(store.ask(messages.Verify(path="/run@2"))) == verified
        status = answered(store.ask(messages.Status()))  # type: ignore[arg-type]
        assert status["write_path"] is None and len(status["units"]) == 1  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match="needs a daemon"):
            store.ask(messages.Publish(path="/run"))
        with pytest.raises(NotFound):
            store.ask(messages.Log(path="/absent"))
    history.index.__init__(history.disk)  # type: ignore[misc]


def test_a_store_without_an_index_says_what_to_do(filled_store: FilledStore, tmp_path: Path) -> None:
    from ckptfs.store.layout import open_store

    disk = open_store(str(tmp_path / "other"), create=True)
    with pytest.raises(NotFound, match="rebuild"):
        OfflineStore(disk)


def test_verify_names_each_of_many_places(filled_store: FilledStore) -> None:
    """Wherever in a batch a chunk is, it is named with its file; a chunk of two files with the first."""
    pieces = [os.urandom(PIECE_BYTES) for _ in range(9)]
    tree = {
        "a": pieces[0] + pieces[1],
        "d/b": b"".join(pieces[2:7]),
        "d/c": pieces[1] + pieces[7] + pieces[8],
    }
    filled_store.publish("run", tree)
    paths = ["a"] * 2 + ["d/b"] * 5 + ["d/c"] * 2
    for piece, path in zip(pieces, paths, strict=True):
        place = damage(filled_store, piece)
        (row,) = filled_store.verify("/run")["corrupt"]  # type: ignore[misc]
        assert answered(row)["path"] == path and answered(row)["place"] == place
        damage(filled_store, piece)
    assert filled_store.verify("/run")["corrupt"] == []


def test_verify_of_many_batches(filled_store: FilledStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptfs.daemon import verifying

    monkeypatch.setattr(verifying, "_BATCH_CHUNKS", 3)
    tree = {f"d{n // 7}/f{n}": os.urandom(PIECE_BYTES * (n % 4)) for n in range(40)}
    filled_store.publish("run", tree)
    answer = filled_store.verify("/run")
    pieces = sum(len(content) // PIECE_BYTES for content in tree.values())
    recipes = len({content for content in tree.values()})
    assert answer["chunks"] == pieces + recipes + 1 + len({path.split("/")[0] for path in tree})
    bad = [content[-PIECE_BYTES:] for content in tree.values() if content][::5]
    places = {damage(filled_store, piece) for piece in bad}
    rows = filled_store.verify("/run")["corrupt"]
    assert {str(answered(row)["place"]) for row in rows} == places  # type: ignore[union-attr]


def test_what_a_thread_cannot_do_ends_the_verification(
    history: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfs.store.segment_files import SegmentFiles

    def fail(*_: object) -> bool:
        raise PermissionError("not allowed")

    with monkeypatch.context() as patched:
        patched.setattr(SegmentFiles, "read_into", fail)
        for _ in range(3):
            with pytest.raises(PermissionError):
                history.verify("/run")
    assert history.verify("/run")["corrupt"] == []


def test_a_chunk_that_moved_meanwhile_is_read_where_it_is(
    history: FilledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptfs.daemon import hashing_threads
    from ckptfs.store.hashing import chunk_id
    from ckptfs.store.index import Table
    from ckptfs.store.segment_format import Location, encode_location

    right = history.segments.locate(chunk_id(B))
    assert right is not None
    find, calls = hashing_threads.find_bad_places, []

    def put(location: Location) -> None:
        change = Change()
        change.put(Table.CHUNK, chunk_id(B), encode_location(location))
        history.index.apply(change)

    def move_back(*arguments: object) -> object:
        calls.append(arguments)
        bad = find(*arguments)  # type: ignore[arg-type]
        if bad:
            trio.from_thread.run_sync(put, right)
        return bad

    put(Location(right.segment, right.offset + 1, right.stored, right.length, right.codec, right.flags))
    monkeypatch.setattr(hashing_threads, "find_bad_places", move_back)
    assert history.verify("/run@2")["corrupt"] == []
    assert len(calls) == 2, "the batch, then the chunk in its new place"
