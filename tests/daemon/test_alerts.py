"""The alert rules: each fires and clears, on made-up series and on what a daemon really says.

`promtool test rules` (Debian's package prometheus) evaluates them. What a daemon says is scraped when it is
well, when something is wrong and when it is well again, and given to promtool as a series, a sample a minute.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mounting
import pytest
import trio
from kernelmounts import poll
from mounting import Mount, sized_tmpfs
from saved_store import SavedStore

from ckptfs.daemon.metrics import Figures, UnitFigures, families
from ckptfs.fusefs.request_times import RequestTimes
from ckptfs.store.segment_counts import Stored

RULES = Path(__file__).parents[2] / "examples" / "prometheus" / "alerts.yml"
TEXT = RULES.read_text()
ALERTS = re.findall(r"- alert: (\w+)", TEXT)
UNIT = 'unit="01",live="yes"'
PROMTOOL = shutil.which(
    "promtool", path=os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])
)
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is missing: ./dev test fetches it where there is apt-get"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs, which needs root")


@dataclass(frozen=True)
class Case:
    """Series of one sample a minute; the alert is there at `fires` (minutes) and not at `quiet`."""

    alert: str
    series: Mapping[str, str]
    fires: Sequence[int]
    quiet: Sequence[int]


def named(name: str, labels: str = "") -> str:
    return f'{name}{{job="ckptfs",instance="node1"{"," + labels if labels else ""}}}'


AGE, NEWEST = named("ckptfs_unit_complete_age_seconds", UNIT), named("ckptfs_unit_newest_age_seconds", UNIT)
BAD = named("ckptfs_unit_bad_tensors", UNIT)
FREE, MIN_FREE = named("ckptfs_disk_free_bytes"), named("ckptfs_disk_min_free_bytes")
CASES = [
    Case("CkptfsDown", {named("up"): "1x10 0x10 1x10"}, [16], [5, 12, 25]),
    Case("CkptfsCompleteVersionTooOld", {AGE: "30000x30 5x10", NEWEST: "60x40"}, [15, 30], [5, 35]),
    Case("CkptfsCompleteVersionTooOld", {AGE: "30000x30", NEWEST: "30000x30"}, [], [15, 30]),
    Case("CkptfsCompleteVersionTooOld", {AGE: "300x30", NEWEST: "60x30"}, [], [15, 30]),
    Case("CkptfsNotFinite", {BAD: "_x5 0x5 2x10 0x10"}, [15], [3, 8, 25]),
    Case("CkptfsCorruption", {named("ckptfs_corrupt_chunks_total"): "0x10 1x100"}, [15, 60], [5, 100]),
    Case("CkptfsCorruption", {named("ckptfs_scrub_damage"): "0x10 2x10 0x10"}, [15], [5, 25]),
    Case("CkptfsDrillNotGood", {named("ckptfs_unit_drill_good", UNIT): "1x10 0x10 1x10"}, [15], [5, 25]),
    Case("CkptfsNearFull", {FREE: "9x10 4x20 9x10", MIN_FREE: "5x40"}, [25], [5, 15, 35]),
    Case("CkptfsIngestLag", {named("ckptfs_ingest_pending_bytes"): "0 20000000000x60 0x5"}, [45], [10, 63]),
    Case("CkptfsIngestLag", {named("ckptfs_ingest_pending_bytes"): "0 20000000000 " * 30}, [], [20, 50]),
    Case("CkptfsPublishLag", {named("ckptfs_publish_waiting_seconds"): "0+60x30 0x10"}, [25], [10, 18, 35]),
    Case("CkptfsNotKept", {named("ckptfs_session_kept"): "1x10 0x10 1x10"}, [18], [5, 13, 25]),
    Case("CkptfsRestarts", {named("process_start_time_seconds"): "1x5 2x5 3x5 4x200"}, [20], [8, 120]),
    Case(
        "CkptfsReadErrors",
        {named("ckptfs_request_errors_total", 'kind="read",errno="EIO"'): "0x5 3x60"}, [10], [3, 40],
    ),
    Case(
        "CkptfsReadErrors",
        {named("ckptfs_request_errors_total", 'kind="read",errno="EIO"'): "_x5 3x60"}, [10], [3, 40],
    ),
    Case(
        "CkptfsReadErrors",
        {named("ckptfs_request_errors_total", 'kind="lookup",errno="ENOENT"'): "0x5 3x60"}, [], [10],
    ),
]  # fmt: skip


def judged(case: Case, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """promtool's judgement; that an alert is there is asked as `ALERTS`, so labels do not matter."""
    query = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"}})'
    tests = [
        {"expr": f"{query} > 0" if at in case.fires else query, "eval_time": f"{at}m",
         "exp_samples": [{"labels": "{}", "value": 1}] if at in case.fires else []}
        for at in [*case.fires, *case.quiet]
    ]  # fmt: skip
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    written = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps(written))
    command = [str(PROMTOOL), "test", "rules", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@needs_promtool
def test_the_rules_are_rules() -> None:
    subprocess.run([str(PROMTOOL), "check", "rules", str(RULES)], check=True, capture_output=True, timeout=60)


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_each_alert_fires_and_clears(case: Case, tmp_path: Path) -> None:
    done = judged(case, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_that_fires_and_clears() -> None:
    assert {case.alert for case in CASES if case.fires and case.quiet} == set(ALERTS)


def known_metrics() -> set[str]:
    """The names of all series of a mount."""
    ages = {"newest_age_s": 1.0, "complete_age_s": 1.0, "drill_age_s": 1.0}
    unit = UnitFigures(name="01", live=True, versions=1, drill_good=True, bad_tensors=0, **ages)
    numbers = {
        name: 0
        for name in Figures.__dataclass_fields__
        if name not in ("release", "write_path", "units", "times", "stored")
    }
    times = RequestTimes()
    times.note("read", 0.1, 5)
    figures = Figures(
        release="1",
        write_path="plain",
        units=(unit,),
        times=times,
        stored=Stored(),
        **numbers,  # type: ignore[arg-type]
    )
    return {sample.name for family in families(figures) for sample in family.samples}


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bckptfs_\w+", text))


def test_the_rules_name_metrics_that_there_are() -> None:
    assert names_in(TEXT) <= known_metrics()


def test_the_dashboard_shows_what_there_is() -> None:
    dashboard = json.loads((RULES.parent / "grafana.json").read_text())
    asked = " ".join(one["expr"] for panel in dashboard["panels"] for one in panel["targets"])
    assert names_in(asked) <= known_metrics()
    shown, known = (
        {re.sub("_(bucket|count|sum)$", "", name) for name in names}
        for names in (names_in(asked), known_metrics())
    )
    # Each of these is beside one that is shown.
    assert known - shown == {
        "ckptfs_ingested_files_total", "ckptfs_disk_total_bytes", "ckptfs_unit_versions",
        "ckptfs_unit_newest_age_seconds", "ckptfs_session_kept",
    }  # fmt: skip
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in dashboard["panels"]}) == len(
        places
    )


# What a daemon says.

Scrape = dict[str, str]


def scraped(mount: Mount) -> Scrape:
    """The figures by their series, with the labels that Prometheus adds; written every 15 seconds."""
    path = Path(str(mount.config["metrics"]))
    return series_of(path.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetched(port: int) -> Scrape:
    """What Prometheus has of a daemon that serves its figures at a port: `up`, and those if it is."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return {named("up"): "1", **series_of(answer.read().decode())}
    except OSError:
        return {named("up"): "0"}


def fetched_when(port: int, holds: Callable[[Scrape], bool]) -> Scrape:
    """The first of which that holds."""

    def look() -> Scrape | None:
        found = fetched(port)
        return found if holds(found) else None

    found = poll(look, 60)
    assert found is not None, "the figures never say so"
    return found


def series_of(text: str) -> Scrape:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            metric, _, labels = name.rstrip("}").partition("{")
            found[named(metric, labels)] = value
    return found


def scraped_when(mount: Mount, holds: Callable[[Scrape], bool]) -> Scrape:
    """The first scrape of which that holds."""

    def look() -> Scrape | None:
        path = Path(str(mount.config["metrics"]))
        found = scraped(mount) if path.exists() else {}
        return found if found and holds(found) else None

    found = poll(look, 60)
    assert found is not None, "the figures never say so"
    return found


def case_of(alert: str, *stages: tuple[Scrape, int], fires: Sequence[int], quiet: Sequence[int]) -> Case:
    """Each scrape for so many minutes."""
    names = sorted({name for scrape, _ in stages for name in scrape})
    series = {
        name: " ".join(f"{scrape.get(name, '_')}x{minutes - 1}" for scrape, minutes in stages)
        for name in names
    }
    return Case(alert, series, fires, quiet)


def fired(case: Case, tmp_path: Path) -> None:
    done = judged(case, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_a_daemon_with_a_bad_chunk(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    mount = mount_factory(
        config={"metrics": str(tmp_path / "a.prom"), "write_path": "plain", "digests": False}
    )
    (mount.path / "run").mkdir()
    content = os.urandom(1_000_000)
    (mount.path / "run" / "file").write_bytes(content)
    mount.publish("run")
    mount.stop()
    (tmp_path / "a.prom").unlink()
    mount.start()
    well = scraped_when(mount, lambda found: True)
    (segment,) = [path for path in mount.store.glob("segments/*/*.seg") if path.stat().st_size >= 1_000_000]
    with segment.open("r+b") as file:
        file.seek(segment.read_bytes().index(content[5000:5100]))
        file.write(b"rotten")
    with pytest.raises(OSError):
        (mount.path / "run" / "file").read_bytes()
    bad = scraped_when(mount, lambda found: float(found[named("ckptfs_corrupt_chunks_total")]) > 0)
    fired(case_of("CkptfsCorruption", (well, 10), (bad, 100), fires=[15, 60], quiet=[5, 100]), tmp_path)
    fired(case_of("CkptfsReadErrors", (well, 10), (bad, 100), fires=[15], quiet=[5, 100]), tmp_path)


@needs_promtool
@needs_root
def test_a_daemon_on_a_full_disk(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    config = {"metrics": str(tmp_path / "a.prom"), "min_free": "5%"}
    with sized_tmpfs(tmp_path / "disk", 256 << 20) as disk:
        mount = mount_factory(config=config, store=disk / "store")
        well = scraped_when(mount, lambda found: True)
        assert float(well[FREE]) > float(well[MIN_FREE])
        (disk / "other").write_bytes(bytes(int(float(well[FREE])) - (40 << 20)))
        mount.configure({**config, "min_free": "25%"})
        mount.reload()
        full = scraped_when(mount, lambda found: float(found[FREE]) < float(found[MIN_FREE]))
        (disk / "other").unlink()
        again = scraped_when(mount, lambda found: float(found[FREE]) > float(found[MIN_FREE]))
        stages = (well, 10), (full, 20), (again, 10)
        fired(case_of("CkptfsNearFull", *stages, fires=[25], quiet=[5, 15, 35]), tmp_path)
        mount.stop()


@needs_promtool
def test_a_daemon_that_is_started_again(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    mount = mount_factory(config={"metrics": str(tmp_path / "a.prom")})
    began = named("process_start_time_seconds")
    scrapes = [scraped_when(mount, lambda found: True)]
    for _ in range(3):
        mount.kill9()
        mount.restart()
        before = scrapes[-1][began]
        scrapes.append(scraped_when(mount, lambda found, before=before: found[began] != before))
    stages = [(scrape, 5) for scrape in scrapes[:-1]] + [(scrapes[-1], 200)]
    fired(case_of("CkptfsRestarts", *stages, fires=[20], quiet=[3, 120]), tmp_path)


def heard(manager: socket.socket) -> list[bytes]:
    """All that it was told and has not heard yet."""
    said = []
    with suppress(BlockingIOError):
        while True:
            said.append(manager.recv(1 << 14, socket.MSG_DONTWAIT))
    return said


@needs_promtool
def test_a_daemon_whose_session_nobody_keeps(
    mount_factory: Callable[..., Mount], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager that started it keeps no descriptors, and does from the next start on."""
    kept, figures, scrapes = named("ckptfs_session_kept"), tmp_path / "a.prom", []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        for room in ("0", "4"):
            heard(manager)  # it has room for ten messages
            monkeypatch.setenv("FDSTORE", room)
            mount = mount_factory(config={"metrics": str(figures)}, store=tmp_path / "store")
            is_kept = float(room != "0")
            # The first figures may be older than the answer.
            scrapes.append(
                scraped_when(mount, lambda found, is_kept=is_kept: float(found.get(kept, "nan")) == is_kept)
            )
            mount.stop()
            figures.unlink()
    bad, well = scrapes
    fired(
        case_of("CkptfsNotKept", (well, 10), (bad, 20), (well, 10), fires=[25], quiet=[5, 12, 35]), tmp_path
    )


@needs_promtool
def test_a_daemon_whose_saves_are_not_whole_any_more(
    mount_factory: Callable[..., Mount], tmp_path: Path
) -> None:
    """The complete version was made months ago, the newest one just now."""
    store = SavedStore(tmp_path / "store")
    trio.run(lambda: store.publish(b"run", {b"model.bin": b"whole"}))
    store.close()
    mount = mount_factory(
        config={"metrics": str(tmp_path / "a.prom"), "settle_s": 0.1, "key": "none"}, store=tmp_path / "store"
    )
    (mount.path / "run").mkdir()
    (mount.path / "run" / "model.safetensors").write_bytes(b"\xff" * 100)
    mount.publish("run")
    ages = "ckptfs_unit_newest_age_seconds", "ckptfs_unit_complete_age_seconds"

    def is_told(found: Scrape) -> bool:
        newest, complete = (
            [float(value) for name, value in found.items() if name.startswith(age)] for age in ages
        )
        return bool(newest and complete) and newest[0] < 3600 < complete[0]

    bad = scraped_when(mount, is_told)
    good = {name: ("5" if name.startswith(ages[1]) else value) for name, value in bad.items()}
    fired(
        case_of("CkptfsCompleteVersionTooOld", (bad, 30), (good, 10), fires=[15, 29], quiet=[5, 35]), tmp_path
    )


@needs_promtool
def test_a_daemon_that_does_not_answer(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    port = free_port()
    mount = mount_factory(config={"metrics": f"127.0.0.1:{port}"})
    well = fetched_when(port, lambda found: found[named("up")] == "1")
    mount.kill9()
    down = fetched(port)
    mount.restart()
    again = fetched_when(port, lambda found: found[named("up")] == "1")
    stages = (well, 10), (down, 10), (again, 10)
    fired(case_of("CkptfsDown", *stages, fires=[16], quiet=[5, 12, 25]), tmp_path)


# Its figures are those of a quarter of an hour later.
LATER = """
import time
from types import SimpleNamespace
from ckptfs.daemon import measuring
from ckptfs.daemon.cli import main
measuring.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000, time_ns=time.time_ns)
main()
"""


@needs_promtool
def test_a_daemon_that_gets_nothing_done(
    mount_factory: Callable[..., Mount], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for ingest, and for being in a version; 12 GiB of it are a hole."""
    monkeypatch.setattr(mounting, "DAEMON", (sys.executable, "-c", LATER))
    port = free_port()
    config = {"metrics": f"127.0.0.1:{port}", "settle_s": 3600, "settle_max_s": 3600}
    mount = mount_factory(config=config)
    pending, waiting = named("ckptfs_ingest_pending_bytes"), named("ckptfs_publish_waiting_seconds")
    well = fetched_when(port, lambda found: found[named("up")] == "1" and float(found[waiting]) == 0)
    (mount.path / "run").mkdir()
    with (mount.path / "run" / "file").open("wb") as file:
        file.truncate(12 << 30)
    bad = fetched_when(port, lambda found: float(found[pending]) > 0)
    (mount.path / "run" / "file").unlink()
    mount.configure({**config, "settle_s": 0.1, "settle_max_s": 1.0})
    mount.reload()
    again = fetched_when(port, lambda found: float(found[waiting]) == float(found[pending]) == 0)
    stages = (well, 40), (bad, 60), (again, 40)
    fired(case_of("CkptfsIngestLag", *stages, fires=[80, 95], quiet=[20, 60, 105]), tmp_path)
    fired(case_of("CkptfsPublishLag", *stages, fires=[50, 95], quiet=[20, 42, 105]), tmp_path)
