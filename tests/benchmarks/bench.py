"""How fast a mount is, against the file system below it and against JuiceFS.

    ./dev bench [--mib 1268] [--rounds 9] [--chunks 10000000] [--only NAME]... [--peer NAME]...
                [--folder DIR] [--out DIR]

NAME is writing, reading, publishing, metadata, or one that sets up its places itself: ingest, scale (a large
index), slow-disk (a store on a disk of 150 MB/s), peers (JuiceFS, S3QL, restic, borg).

Each round runs every place once, in an order that changes, so that what the machine does meanwhile meets
all of them alike; figures are medians of ratios within a round. Nothing here asserts. Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkpoints
import ingest
import peers
import places
import report
import scale
import slow_disk
from client_run import run_client
from places import Asked, Place
from report import Figure

# After it says that it is ready a daemon starts the processes that hash.
_STARTED_S = 1.0
SIDE_BY_SIDE = ("writing", "reading", "publishing", "metadata")
ALONE: dict[str, Callable[[Asked], Iterator[Figure]]] = {
    "ingest": ingest.figures,
    "scale": scale.figures,
    "slow-disk": slow_disk.figures,
    "peers": peers.figures,
}


class Bench:
    """One run: its places, its input, and what was found so far."""

    def __init__(self, here: list[Place], folder: Path, mib: int, rounds: int) -> None:
        self._places = here
        self._folder = folder
        self._rounds = rounds
        self._source = folder / "source"
        self._bytes = checkpoints.make_set(self._source, mib)
        self.figures: list[Figure] = []

    def compare(
        self,
        name: str,
        action: str,
        goals: dict[str, float],
        *,
        before: Callable[[Place], None] = lambda place: None,
        folder: str | Callable[[Place], str] = "set",
        argument: str = "",
        moves_data: bool = True,
    ) -> None:
        """`rounds` rounds of one action at each place."""
        figures = {place.name: Figure(name, place.name, goal=goals.get(place.name)) for place in self._places}
        for number in range(self._rounds):
            at = number % len(self._places)
            for place in self._places[at:] + self._places[:at]:
                before(place)
                target = place.path / (folder if isinstance(folder, str) else folder(place))
                self._once(figures[place.name], place, action, target, argument)
        native = figures["native"].seconds
        for figure in figures.values():
            figure.native_s = list(native)
            figure.data_bytes = self._bytes if moves_data else 0
        self.figures += figures.values()
        report.show(list(figures.values()))

    def _once(self, figure: Figure, place: Place, action: str, target: Path, argument: str) -> None:
        daemon = place.cpu_s()
        seconds, cpu_s = run_client(action, target, argument)
        figure.seconds.append(seconds)
        figure.client_cpu_s.append(cpu_s)
        figure.daemon_cpu_s.append(place.cpu_s() - daemon)

    # -- the figures ----------------------------------------------------------------------------

    def writing(self) -> None:
        """Must show 1 and 2: copies into the place, fresh and onto warm blocks."""
        source = str(self._source)
        fresh = {"ckptfs auto": 0.80, "juicefs": 0.0}
        self.compare("cp, fresh files", "copy_in", fresh, before=self._remove, argument=source)
        warm = {"ckptfs auto": 0.90, "ckptfs plain": 0.4}
        self.compare("overwrite in place, warm", "overwrite", warm, argument=source)

    def reading(self) -> None:
        """Must show 1 and 2: what was saved is read back."""
        for place in self._places:
            if not (place.path / "set").exists():
                run_client("copy_in", place.path / "set", str(self._source))
            if place.mount is not None:
                place.mount.publish("set", timeout_s=600)
        goals = {"ckptfs auto": 0.9, "ckptfs plain": 0.5}
        for name, action in (
            ("read, warm", "read"),
            ("mmap, warm", "read_mapped"),
            ("torch.load, warm", "load_torch"),
            ("safetensors load_file, warm", "load_safetensors"),
        ):
            self.compare(name, action, goals)
        cold = {"ckptfs auto": 0.9, "ckptfs plain": 0.6}
        self.compare("read, nothing cached by the kernel", "read", cold, before=lambda place: _drop_caches())
        restarted = {"ckptfs auto": 0.5, "ckptfs plain": 0.5}
        self.compare("read after a restart", "read", restarted, before=_restart)
        self.compare("torch.load after a restart", "load_torch", restarted, before=_restart)
        self._reading_saves()

    def _reading_saves(self) -> None:
        """Must show 2: a save that shares chunks with the one before, and one that is three saves old."""
        saves = checkpoints.make_saves(self._folder / "saves", (self._bytes >> 20) // 4)
        for place in self._places:
            for save in saves:
                kept = place.path / ("run" if place.mount is not None else save.stem)
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(save, kept / "step.pt")
                if place.mount is not None:
                    place.mount.publish("run", timeout_s=600)
        (alone,) = checkpoints.make_saves(self._folder / "alone", (self._bytes >> 20) // 4, 1, seed=8)
        for place in self._places:
            (place.path / "alone").mkdir()
            shutil.copy(alone, place.path / "alone" / "step.pt")
            if place.mount is not None:
                place.mount.publish("alone", timeout_s=600)
        shutil.rmtree(self._folder / "saves")
        shutil.rmtree(self._folder / "alone")
        goals = {"ckptfs auto": 0.5, "ckptfs plain": 0.5}
        self.compare(
            "torch.load after a restart, a whole file", "load_torch", goals, before=_restart, folder="alone"
        )
        for name, number in (
            ("torch.load after a restart, duplicates punched", 1),
            ("torch.load after a restart, three saves old", 0),
        ):
            self.compare(
                name,
                "load_torch",
                goals,
                before=_restart,
                folder=lambda place, number=number: _save(place, number),  # type: ignore[misc]
            )

    def metadata(self) -> None:
        """Must show 5."""
        self.compare(
            "create + 4 KiB + close, ×1000",
            "create_small",
            {},
            before=self._remove_names,
            folder="names",
            moves_data=False,
        )
        self._bound("ckptfs auto", 1000 / 1500)
        archive = self._folder / "tree.tar"
        checkpoints.make_archive(archive)
        self.compare(
            "untar 5,000 small files",
            "untar",
            {},
            before=self._remove_names,
            folder="names",
            argument=str(archive),
            moves_data=False,
        )
        self._bound("ckptfs auto", 8)
        self.compare(
            "rm -rf of 10,000 files", "remove", {}, before=self._make_names, folder="names", moves_data=False
        )
        self._bound("ckptfs auto", 8)
        for place in self._places:
            self._make_names(place)
        self.compare(
            "ls -l of 10,000, cold", "list_long", {}, before=_restart, folder="names", moves_data=False
        )
        self._bound("ckptfs auto", 0.6)
        self.compare(
            "stat ×100,000, warm", "stat_warm", {"ckptfs auto": 0.8}, folder="names", moves_data=False
        )

    def publishing(self) -> None:
        """Must show 4: from the last close of a save to its version, on request."""
        for place in self._places:
            if place.mount is None:
                continue
            figure = Figure(
                "publish after close", place.name, goal=1.5, in_seconds=True, data_bytes=self._bytes
            )
            for number in range(self._rounds):
                self._remove(place)
                fresh = self._folder / "fresh"
                shutil.rmtree(fresh, ignore_errors=True)
                checkpoints.make_set(fresh, self._bytes >> 20, seed=100 + number)
                run_client("copy_in", place.path / "set", str(fresh))
                daemon, started = place.cpu_s(), time.perf_counter()
                place.mount.publish("set", timeout_s=600)
                figure.seconds.append(time.perf_counter() - started)
                figure.daemon_cpu_s.append(place.cpu_s() - daemon)
            self.figures.append(figure)
            report.show([figure])

    def _bound(self, place: str, seconds: float) -> None:
        """The newest figure of a place has a goal in seconds."""
        figure = next(one for one in reversed(self.figures) if one.place == place)
        figure.goal, figure.in_seconds = seconds, True

    def _remove(self, place: Place) -> None:
        shutil.rmtree(place.path / "set", ignore_errors=True)

    def _remove_names(self, place: Place) -> None:
        shutil.rmtree(place.path / "names", ignore_errors=True)

    def _make_names(self, place: Place) -> None:
        self._remove_names(place)
        run_client("make_names", place.path / "names", "")


def _save(place: Place, number: int) -> str:
    """The folder of a save; of ckptfs it is a version's."""
    if place.mount is None:
        return str(number)
    versions = place.path / "run" / ".versions"
    return str(next(versions.glob(f"v{number + 1:06d}_*")).relative_to(place.path))


def _restart(place: Place) -> None:
    """Nothing is known of before: not to the kernel, not to the daemon."""
    if place.mount is not None:
        place.mount.stop()
        place.mount.restart()
        time.sleep(_STARTED_S)
    _drop_caches()


def _drop_caches() -> None:
    """What the kernel keeps of files and names; what lies on a tmpfs stays."""
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3")


@contextmanager
def all_places(folder: Path) -> Iterator[list[Place]]:
    """Native first."""
    with ExitStack() as stack:
        here = [stack.enter_context(places.native(folder))]
        here += [stack.enter_context(places.ckptfs(folder, path)) for path in ("auto", "plain")]
        if places.has_juicefs():
            here.append(stack.enter_context(places.juicefs(folder)))
        yield here


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1268)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunks", type=int, default=10_000_000, help="in the largest index of `scale`")
    parser.add_argument("--only", action="append", choices=[*SIDE_BY_SIDE, *ALONE])
    parser.add_argument("--peer", action="append", default=[], help="the only one (or ones) of `peers`")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="the file system to measure on")
    parser.add_argument("--out", type=Path, default=Path("benchmark"), help="where the JSON and the chart go")
    options = parser.parse_args()
    names = options.only or [*SIDE_BY_SIDE, *ALONE]
    figures: list[Figure] = []
    if wanted := [name for name in names if name in SIDE_BY_SIDE]:
        with _own_folder(options.folder) as folder, all_places(folder) as here:
            bench = Bench(here, folder, options.mib, options.rounds)
            for name in wanted:
                getattr(bench, name)()
        figures += bench.figures
    for name in [name for name in names if name in ALONE]:
        with _own_folder(options.folder) as folder:
            asked = Asked(folder, options.mib, options.rounds, options.chunks, tuple(options.peer))
            for figure in ALONE[name](asked):
                print(
                    f"{figure.name}, {figure.place}: {median(figure.seconds):.3f} {figure.unit}", flush=True
                )
                figures.append(figure)
    options.out.mkdir(parents=True, exist_ok=True)
    report.save(figures, options.out / "figures.json")
    report.show(figures)
    report.draw(figures, options.out / "figures.png")


@contextmanager
def _own_folder(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
