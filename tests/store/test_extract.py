"""extract: a second reader, alone with the standard library, writes out the same bytes from a copy."""

from __future__ import annotations

import copy
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from encoded_series import BFLOAT16, PATH, saves
from saved_store import File, SavedStore, Special, Tree, contents

from ckptfs.store import extract as extract_module
from ckptfs.store.dagcbor import Node, encode_node
from ckptfs.store.encoding_plan import PlannedChunk
from ckptfs.store.hashing import crc64
from ckptfs.store.history import State
from ckptfs.store.ids import ChunkId
from ckptfs.store.index import Table
from ckptfs.store.reencode import Reencoder
from ckptfs.store.segment_format import Codec, decode_location, segment_paths

SCRIPT = Path(extract_module.__file__)
RUN, ROOT_FILES = b"run/1", b"@root"


class Made:
    """A store with a few versions, and a copy of the three parts of it that a backup holds."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        shared = rng.randbytes(1000)
        sparse = bytes(1 << 20) + rng.randbytes(200_000) + bytes(1 << 19)
        self.trees: list[Tree] = [
            {b"model.bin": rng.randbytes(400_000), b"small": b"v1"},
            {
                b"model.bin": rng.randbytes(400_000),
                b"empty": b"",
                b"sparse": File(sparse, holes=((0, 1 << 20), (len(sparse) - (1 << 19), 1 << 19))),
                b"script": File(b"#!", mode=0o750, xattrs=((b"user.note", b"\0x"),)),
                b"one": File(shared, link=7),
                b"latest": Special(b"step-1"),
                b"pipe": Special(),
                b"step-1": {b"two": File(shared, link=7), b"deep": {b"x": b"x" * 10}, b"none": {}},
                b"\xff\n": b"odd name",
            },
            {b"half": b"half a save"},
        ]
        self.store_root = folder / "store"
        self.copy = folder / "copy"
        trio.run(self._make)

    async def _make(self) -> None:
        store = SavedStore(self.store_root)
        states = (State.COMPLETE, State.COMPLETE, State.PARTIAL)
        for step, (tree, state) in enumerate(zip(self.trees, states, strict=True), 1):
            await store.publish(RUN, tree, state=state, step=step)
        gone = await store.publish(RUN, {b"gone": b"gone"})
        await store.publish(ROOT_FILES, {b"notes.txt": b"notes"})
        store.histories.forget(gone.unit, gone.number)
        store.histories.tag(gone.unit, 1, "good")
        store.close()
        self.copy.mkdir()
        shutil.copy(self.store_root / "format", self.copy / "format")
        for part in ("segments", "history"):
            shutil.copytree(self.store_root / part, self.copy / part)

    def run(self, *arguments: str, isolated: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the script; `isolated` hides every installed package, blake3 included."""
        flags = ["-I", "-S"] if isolated else ["-I"]
        command = [sys.executable, *flags, str(SCRIPT), str(self.copy), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
        )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Made:
    return Made(tmp_path_factory.mktemp("original"), random.Random(seed))


@pytest.fixture
def made(original: Made, tmp_path: Path) -> Made:
    """The store, with a copy of its own that a test may damage."""
    own = copy.copy(original)
    own.copy = tmp_path / "copy"
    shutil.copytree(original.copy, own.copy)
    return own


def files_below(root: Path) -> dict[bytes, bytes]:
    base = os.fsencode(root)
    found = {}
    for folder, _, names in os.walk(base):
        for name in names:
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "rb") as f:
                    found[os.path.relpath(path, base)] = f.read()
    return found


def test_list_shows_units_versions_and_tags(made: Made) -> None:
    done = made.run("list", isolated=True)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("@root  (unit ") and lines[2].startswith("run/1  (unit ")
    assert "complete step 1" in lines[3] and lines[3].endswith(" good")
    assert "partial step 3" in lines[5]
    assert len(lines) == 6, "the forgotten version is not there"


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(
    ("version", "which"),
    [("1", 0), ("good", 0), ("2", 1), ("latest-complete", 1), ("latest", 2), ("3", 2)],
)
def test_a_version_is_written_out_byte_for_byte(
    made: Made, tmp_path: Path, version: str, which: int, isolated: bool
) -> None:
    target = tmp_path / "out"
    done = made.run(f"run/1@{version}", str(target), isolated=isolated)
    assert done.returncode == 0, done.stderr
    assert files_below(target) == contents(made.trees[which])
    assert ("NOT verified" in done.stdout) == isolated


def test_what_ls_shows_comes_back_too(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "out"
    done = made.run("run/1@2", str(target))
    assert done.returncode == 0 and done.stderr == ""
    assert os.stat(target / "one").st_ino == os.stat(target / "step-1" / "two").st_ino
    assert os.readlink(target / "latest") == "step-1"
    assert stat.S_ISFIFO(os.lstat(target / "pipe").st_mode)
    script = os.stat(target / "script")
    assert stat.S_IMODE(script.st_mode) == 0o750 and script.st_mtime_ns % 10**9 == 10**9 - 5
    assert stat.S_IMODE(os.stat(target / "step-1" / "none").st_mode) == 0o750
    assert os.stat(target / "step-1").st_mtime_ns % 10**9 == 10**9 - 5
    assert os.getxattr(target / "script", "user.note") == b"\0x"
    sparse = os.stat(target / "sparse")
    assert sparse.st_blocks * 512 < 300_000 < sparse.st_size


def test_the_unit_of_the_root_and_a_unit_by_its_id(made: Made, tmp_path: Path) -> None:
    assert made.run("@root@latest", str(tmp_path / "a")).returncode == 0
    assert (tmp_path / "a" / "notes.txt").read_bytes() == b"notes"
    identity = next(path.stem for path in (made.copy / "history").iterdir())
    assert made.run(f"{identity}@1", str(tmp_path / "b")).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run/2@1", "X"], "there is no unit 'run/2'"),
        (["run/1@9", "X"], "has no version '9'"),
        (["run/1@4", "X"], "has no version '4'"),
        (["run/1@1", "."], "not an empty folder"),
    ],
)
def test_what_cannot_be_is_one_line(made: Made, tmp_path: Path, arguments: list[str], message: str) -> None:
    arguments = [
        str(tmp_path / "x") if one == "X" else str(tmp_path) if one == "." else one for one in arguments
    ]
    done = made.run(*arguments)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_usage(made: Made) -> None:
    done = made.run("extract", "this", "please")
    assert done.returncode == 2 and "UNIT@VERSION DEST" in done.stderr


def _largest_segment(root: Path) -> Path:
    return max(root.glob("segments/*/*.seg"), key=lambda path: path.stat().st_size)


def test_damage_is_named_and_the_rest_is_written(made: Made, tmp_path: Path) -> None:
    for seg in made.copy.glob("segments/*/*.seg"):
        if seg.stat().st_size == 400_000:
            damaged = bytearray(seg.read_bytes())
            damaged[200_000] ^= 1
            seg.write_bytes(damaged)
    done = made.run("run/1@1", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "model.bin: chunk " in done.stderr and ".seg at byte" in done.stderr
    assert files_below(tmp_path / "out") == {b"small": b"v1"}
    assert "1 files written, 1 failed" in done.stdout


def test_a_damaged_idx_is_told(made: Made, tmp_path: Path) -> None:
    idx = _largest_segment(made.copy).with_suffix(".idx")
    damaged = bytearray(idx.read_bytes())
    damaged[60] ^= 1
    idx.write_bytes(damaged)
    done = made.run("run/1@2", str(tmp_path / "out"))
    assert done.returncode == 1 and "its checksum is wrong" in done.stderr


def test_another_codec_is_told(made: Made, tmp_path: Path) -> None:
    from ckptfs.store.segment_format import decode_idx

    for idx in made.copy.glob("segments/*/*.idx"):
        encoded = bytearray(idx.read_bytes())
        rows = len(decode_idx(bytes(encoded)).rows)
        for row in range(rows):
            encoded[len(encoded) - 8 - 52 * (row + 1) + 48] = 9
        encoded[-8:] = crc64(encoded[:-8]).to_bytes(8, "little")
        idx.write_bytes(encoded)
    done = made.run("run/1@1", str(tmp_path / "out"))
    assert done.returncode == 1 and "its place says codec 9" in done.stderr


@pytest.mark.parametrize("form", ["", "{}", '{"kind":"ckptfs store","version":1,"incompat":["erasure"]}'])
def test_a_store_of_another_format_is_refused(made: Made, form: str) -> None:
    (made.copy / "format").write_text(form)
    done = made.run("list")
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_a_torn_history_ends_at_its_last_whole_record(made: Made) -> None:
    for log in (made.copy / "history").iterdir():
        log.write_bytes(log.read_bytes() + b"CKFR\1\2torn")
    assert made.run("list").stdout.count("\n") == 6


def test_damage_inside_a_history_hides_only_what_it_hit(made: Made) -> None:
    (log,) = (path for path in (made.copy / "history").iterdir() if b"run/1" in path.read_bytes())
    damaged = bytearray(log.read_bytes())
    damaged[damaged.index(b"v000002_")] ^= 1
    log.write_bytes(damaged)
    listed = made.run("list").stdout
    assert "v000001_" in listed and "v000003_" in listed and "v000002_" not in listed


def test_its_checksum_and_its_cbor_are_those_of_the_store(rng: random.Random) -> None:
    assert extract_module.crc64(b"123456789") == 0xAE8B14860A799888
    for _ in range(100):
        payload = rng.randbytes(rng.randrange(50))
        assert extract_module.crc64(payload) == crc64(payload)
        node = _random_node(rng, 3)
        assert extract_module.cbor(encode_node(node)) == node


def _random_node(rng: random.Random, depth: int) -> Node:
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [_random_node(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind == 6:
        return {str(rng.random()): _random_node(rng, depth - 1) for _ in range(rng.randrange(5))}
    number = rng.randrange(1 << rng.randrange(1, 64))
    simple: list[Node] = [rng.choice([None, True, False]), number, -1 - number, rng.randbytes(300), "é" * 30]
    return simple[kind]


def test_any_bytes_are_cbor_or_damaged(rng: random.Random) -> None:
    for _ in range(3000):
        mutated = bytearray(encode_node(_random_node(rng, 3)) or b"\0")
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        try:
            extract_module.cbor(bytes(mutated[: rng.randrange(1, len(mutated) + 1)]))
        except extract_module.Damaged:
            pass


def test_it_needs_the_standard_library_and_for_encoded_chunks_one_file_beside_it() -> None:
    def imports(script: Path) -> set[str]:
        lines = (line.split() for line in script.read_text().splitlines())
        names = {words[1].split(".")[0] for words in lines if words[:1] in (["import"], ["from"])}
        return names - set(sys.stdlib_module_names) - {"compression"}

    assert imports(SCRIPT) == {"blake3", "extract_codecs"}
    assert imports(SCRIPT.with_name("extract_codecs.py")) == {"numpy", "zstandard"}
    assert segment_paths(1)[0].startswith("segments/")


def encoded_store(root: Path) -> list[dict[str, bytes]]:
    """A store of a few saves, all but the newest encoded, in `root`; their files."""
    files = saves(4, values=40_000)

    async def make() -> None:
        store = SavedStore(root)
        before: dict[str, list[ChunkId]] = {}
        one = Reencoder(store.disk, store.index, store.segments, store.ingest.committer)
        for step, save in enumerate(files):
            record = await store.publish(RUN, {path.encode(): one for path, one in save.items()}, step=step)
            assert record.top.tree is not None
            chunks = {
                entry.name.decode(): [*store.segments.read_recipe(entry.recipe).chunks()]
                for entry in store.segments.read_tree(record.top.tree)
                if entry.recipe is not None
            }
            if step < len(files) - 1:
                await one.encode([*planned(chunks, before)], "small" if step % 2 else "fast")
            before = chunks
        codecs = {decode_location(value).codec for _, value in store.index.scan(Table.CHUNK)}
        assert codecs >= {Codec.RAW, Codec.ZSTD, Codec.PLANES, Codec.DELTA, Codec.CAST, Codec.CONTEXT}
        store.index.commit()
        await store.ingest.reclaim.execute()
        store.close()

    def planned(chunks: dict[str, list[ChunkId]], before: dict[str, list[ChunkId]]) -> Iterator[PlannedChunk]:
        """Chunk by chunk against the save before; the first chunk of a file is its header."""
        for path, dtype in ((PATH, "F32"), (BFLOAT16, "BF16")):
            for at, chunk in enumerate(chunks[path]):
                parent = before[path][at] if before else None
                cast_of = (chunks[PATH][1],) if path == BFLOAT16 and at == 1 else ()
                yield PlannedChunk(chunk, 0, dtype if at else None, parent if at else None, cast_of)

    trio.run(make)
    return files


@pytest.mark.parametrize("has_numpy", [True, False])
def test_encoded_saves_are_written_out(tmp_path: Path, has_numpy: bool) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    files = encoded_store(store)
    shutil.rmtree(store / "index")
    for number, save in enumerate(files, 1):
        arguments = [str(store), f"run/1@{number}", str(out / str(number))]
        run = "import runpy, sys; " + ("" if has_numpy else "sys.modules['numpy'] = None; ")
        run += f"sys.argv[1:] = {arguments!r}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
        done = subprocess.run([sys.executable, "-I", "-c", run], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert {one.name: one.read_bytes() for one in (out / str(number)).iterdir()} == save


def test_without_zstd_it_says_what_is_missing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    encoded_store(store)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), str(store), "run/1@1", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and ("zstandard" in done.stderr or sys.version_info >= (3, 14))
