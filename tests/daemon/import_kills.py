"""Imports that are killed at every kind of moment, begun again until one ends, and then looked at.

One rule: a kill is SIGKILL, sent by the process to itself at the Nth call that changes the store or the
directory that is imported, so a seed always dies in the same places.

    python tests/daemon/import_kills.py SEED…       prints one line for each; 1 if one of them went wrong

Each try opens the store as a mount does and first gives room back, as a mount does in the background.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_store import safetensors

from ckptfs.daemon.import_service import ImportService
from ckptfs.daemon.messages import Import
from ckptfs.daemon.offline import OfflineStore
from ckptfs.daemon.open_store import OpenStore, opened_store
from ckptfs.daemon.outside import Aside, Outside
from ckptfs.store.disk import Disk
from ckptfs.store.history import VersionRecord
from ckptfs.store.ids import TreeId
from ckptfs.store.keyring import Keyring
from ckptfs.store.layout import open_store
from ckptfs.store.signing import SigningKey

CHECKPOINTS = 20
KEY = SigningKey(b"i" * 32)
FIRST_S = 1_700_000_000
_DISK_CALLS = (
    "create",
    "pwrite",
    "truncate",
    "sync",
    "sync_dir",
    "link",
    "rename",
    "unlink",
    "punch",
)
_OUTSIDE_CALLS = ("has_no_writer", "remove_directory")
_ASIDE_CALLS = ("remove",)
_MOST_TRIES = 60


def make_run(folder: Path, checkpoints: int = CHECKPOINTS, size: int = 120_000) -> None:
    """A run as HF Trainer leaves one: checkpoints an hour apart, most of each as in the one before."""
    for number in range(1, checkpoints + 1):
        place = folder / f"checkpoint-{number * 50}"
        make_checkpoint(place, number * 50, size)
        for file in place.iterdir():
            os.utime(file, ns=(time_of(number), time_of(number)))
    (folder / "README.md").write_text("a run")
    os.symlink("checkpoint-50", folder / "first")


def make_checkpoint(place: Path, step: int, size: int) -> None:
    """A save of HF Trainer's; a fifth of its `size` is its own."""
    place.mkdir(parents=True)
    base, head = random.Random(1).randbytes(size), random.Random(step).randbytes(size // 16 * 4)
    (place / "model.safetensors").write_bytes(safetensors({"base": base, "head": head}))
    (place / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    (place / "config.json").write_text("{}")


def time_of(number: int) -> int:
    """The time of a checkpoint, in nanoseconds."""
    return (FIRST_S + 3600 * number) * 10**9


def state_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every file and link below a folder, with what a version keeps of it."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            found[str(path.relative_to(folder))] = (os.readlink(path),)
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


def run_seed(seed: int, *, move: bool, first_calls: int = 200) -> tuple[int, list[str]]:
    """(kills, what is wrong) of one import, whose first tries die within `first_calls` calls."""
    with tempfile.TemporaryDirectory(prefix="import-") as folder:
        store, run, kept = Path(folder) / "store", Path(folder) / "run", Path(folder) / "kept"
        make_run(run)
        shutil.copytree(run, kept, symlinks=True)
        open_store(str(store), create=True)
        chance, kills = random.Random(seed), 0
        for attempt in range(_MOST_TRIES):
            # The later tries get further, so that an end is reached.
            if not dies_at(chance.randrange(1, first_calls << attempt // 4), store, run, move=move):
                break
            kills += 1
        else:
            return kills, [f"it did not end in {_MOST_TRIES} tries"]
        dies_at(1 << 60, store, run, move=move)  # once more: nothing is new
        return kills, [*_wrong_in_store(store, kept), *_wrong_in_source(run, kept, move=move)]


def dies_at(call: int, store: Path, run: Path, *, move: bool) -> bool:
    """Import in a process of its own that dies in its call number `call`; whether it did."""
    child = os.fork()
    if not child:
        code = 99
        try:
            _import_and_die(call, store, run, move=move)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the import failed by itself; see above"
    return False


def _import_and_die(call: int, store: Path, run: Path, *, move: bool) -> None:
    calls = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        return counting

    with opened_store(str(store), "", "", lambda: Keyring(KEY)) as parts:
        for kind, names in ((Disk, _DISK_CALLS), (Outside, _OUTSIDE_CALLS), (Aside, _ASIDE_CALLS)):
            for name in names:
                setattr(kind, name, counted(getattr(kind, name)))
        trio.run(_import, parts, Import(path="/run", source=str(run), move=move))


async def _import(parts: OpenStore, request: Import) -> None:
    await parts.ingest.reclaim.execute()
    await ImportService(parts, None).answer(request, lambda progress: None)
    parts.index.commit()
    await parts.ingest.reclaim.execute()


def _wrong_in_store(store: Path, kept: Path) -> list[str]:
    wrong = []
    whole = state_of(kept)
    with OfflineStore(open_store(str(store), writing=False), "none") as offline:
        histories = offline._histories
        (unit,) = histories.units()
        versions = histories.versions(unit.unit)
        if len(versions) != CHECKPOINTS:
            wrong.append(f"{len(versions)} versions of {CHECKPOINTS} checkpoints")
        for number, record in enumerate(versions, 1):
            wrong += _wrong_in_version(offline, record, number, whole)
        findings: Any = offline.ask(_verified_log())
        if findings["findings"]:
            wrong.append(f"the chain: {findings['findings']}")
    return wrong


def _verified_log() -> Any:
    from ckptfs.daemon.messages import Log

    return Log(path="/run", verify=True, keys=(KEY.public.raw.hex(),))


def _wrong_in_version(
    offline: OfflineStore, record: VersionRecord, number: int, whole: dict[str, tuple[object, ...]]
) -> list[str]:
    shown: dict[str, tuple[object, ...]] = {}

    def walk(tree: TreeId | None, prefix: str) -> None:
        assert tree is not None
        for entry in offline._segments.read_tree(tree):
            path = prefix + os.fsdecode(entry.name)
            if entry.is_dir:
                walk(entry.tree, path + "/")
            elif entry.recipe is not None:
                recipe = offline._segments.read_recipe(entry.recipe)
                content = hashlib.sha256(offline._segments.read_file(recipe, 0, recipe.size)).hexdigest()
                shown[path] = (entry.mode, entry.mtime_ns, content)
            else:
                shown[path] = (os.fsdecode(entry.target or b""),)

    walk(record.top.tree, "")
    saves = {f"checkpoint-{one * 50}" for one in range(1, number + 1)}
    is_last = number == CHECKPOINTS
    due = {path: one for path, one in whole.items() if path.split("/")[0] in saves or is_last}
    facts = (record.number, record.step, record.state.value, record.time_ns // 10**9)
    wrong = (
        []
        if facts == (number, number * 50, "complete", FIRST_S + 3600 * number)
        else [f"{facts} at {number}"]
    )
    return wrong if shown == due else [*wrong, f"version {number} does not show what was there"]


def _wrong_in_source(run: Path, kept: Path, *, move: bool) -> list[str]:
    left = state_of(run)
    if move:
        return [f"not removed: {sorted(left)}"] if left else []
    return [] if left == state_of(kept) else ["the source was changed"]


def main() -> int:
    """See above."""
    bad = 0
    for seed in map(int, sys.argv[1:]):
        for move in (False, True):
            kills, wrong = run_seed(seed, move=move)
            bad += bool(wrong)
            print(
                f"seed {seed}, {'move' if move else 'copy'}: {kills} kills; {wrong or 'all is right'}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
