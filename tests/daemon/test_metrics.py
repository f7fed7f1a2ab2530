"""Metrics: what a scrape says against what was done, and that it tells nobody where things lie."""

from __future__ import annotations

import errno
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelmounts import poll
from mounting import Mount
from prometheus_client.parser import text_string_to_metric_families

from ckptfs.daemon.config import metrics_address, parse_config
from ckptfs.fusefs.request_times import BOUNDS_S, RequestTimes
from ckptfs.store.errors import InvalidRequest

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def samples_of(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            key = (one.name, tuple(sorted(one.labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = one.value
    return found


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def test_a_scrape_says_what_was_done(mount_factory: Callable[..., Mount]) -> None:
    port = free_port()
    config = {"settle_s": 0.2, "write_path": "plain", "metrics": f"127.0.0.1:{port}"}
    mount = mount_factory(config=config)
    before = samples_of(scraped(port))
    run = mount.path / "secret-run"
    run.mkdir()
    content = os.urandom(3_000_000)
    for number in range(5):
        (run / f"file{number}").write_bytes(content[number:])
    with pytest.raises(FileNotFoundError):
        (run / "missing").read_bytes()
    with pytest.raises(OSError):
        (run / "file0").rmdir()
    assert (run / "file0").read_bytes() == content
    version = mount.publish("secret-run")

    def scraped_at_rest() -> str | None:
        """What settles by itself may be published meanwhile."""
        text, versions = scraped(port), len(mount.versions("secret-run"))
        told, stored = samples_of(text), mount.count("status", "stored_bytes", str(mount.path))
        is_at_rest = value(told, "ckptfs_stored_bytes") == stored
        return text if is_at_rest and value(told, "ckptfs_versions_made_total") == versions else None

    text = poll(scraped_at_rest, 60)
    assert text is not None, "figures and `status` never agree"
    after = samples_of(text)

    def rise(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    logical = sum(3_000_000 - number for number in range(5))
    assert rise("ckptfs_written_bytes_total") == logical
    assert rise("ckptfs_ingested_bytes_total") == logical
    assert rise("ckptfs_ingested_files_total") == 5
    assert rise("ckptfs_read_bytes_total") >= 0
    assert rise("ckptfs_request_duration_seconds_count", kind="create") == 5
    assert rise("ckptfs_request_duration_seconds_count", kind="mkdir") == 1
    assert rise("ckptfs_request_duration_seconds_bucket", kind="create", le="+Inf") == 5
    made = rise("ckptfs_versions_made_total")
    assert made >= 1
    (unit,) = [dict(labels)["unit"] for name, labels in after if name == "ckptfs_unit_versions"]
    assert value(after, "ckptfs_unit_versions", unit=unit, live="yes") == made
    assert 0 <= value(after, "ckptfs_unit_newest_age_seconds", unit=unit, live="yes") < 600
    assert value(
        after, "ckptfs_mount", release=str(mount.facts("status", str(mount.path))["version"]), path="plain"
    )
    writer = mount.ask("log", str(run))[-1]["writers"][0]  # type: ignore[index]
    programs = (writer["program"], sys.executable, "pytest", f'"{writer["pid"]}"', str(writer["cgroup"]))
    places = ("secret", "file0", str(mount.path), str(mount.store), "/proc", str(version["name"]))
    assert writer["program"]
    for told in (*places, *[one for one in programs if one != "/"]):
        assert told not in text, f"{told} is told to whoever reaches the port"


def test_units_by_name_where_the_owner_wants_it(mount_factory: Callable[..., Mount]) -> None:
    port = free_port()
    mount = mount_factory(config={"metrics": f"127.0.0.1:{port}", "metrics_names": True})
    (mount.path / "run").mkdir()
    (mount.path / "run" / "file").write_bytes(b"content")
    mount.publish("run")
    assert value(samples_of(scraped(port)), "ckptfs_unit_versions", unit="run", live="yes") >= 1


def test_a_file_for_the_node_exporter(mount_factory: Callable[..., Mount], tmp_path: Path) -> None:
    where = tmp_path / "ckptfs.prom"
    mount_factory(config={"metrics": str(where)})
    poll(where.exists, 30)
    assert value(samples_of(where.read_text()), "ckptfs_disk_total_bytes") > 0


def test_an_address_that_is_taken_does_not_stop_the_mount(mount_factory: Callable[..., Mount]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = int(holder.getsockname()[1])
        mount = mount_factory(config={"metrics": f"127.0.0.1:{port}"})
        (mount.path / "file").write_bytes(b"content")
        poll(lambda: "metrics cannot be served" in mount.log_tail(), 30)
        assert mount.is_alive()


def test_nothing_listens_by_default(mount_factory: Callable[..., Mount]) -> None:
    mount = mount_factory()
    sockets = Path(f"/proc/{mount.pid}/net/tcp").read_text().splitlines()[1:]
    descriptors = {os.readlink(one) for one in Path(f"/proc/{mount.pid}/fd").iterdir()}
    listening = {f"socket:[{line.split()[9]}]" for line in sockets if line.split()[3] == "0A"}
    assert not listening & descriptors


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from([0, errno.ENOENT, errno.EIO]))))
def test_every_request_is_in_one_class(requests: list[tuple[float, int]]) -> None:
    times = RequestTimes()
    for elapsed_s, code in requests:
        times.note("read", elapsed_s, code)
    if not requests:
        assert not times.kinds
        return
    kind = times.kinds["read"]
    bounds = [0.0, *BOUNDS_S]
    for at, count in enumerate(kind.classes[:-1]):
        low, high = bounds[at], bounds[at + 1]
        assert count == sum((low < took or at == 0) and took <= high for took, _ in requests)
    assert sum(kind.classes) == len(requests)
    assert kind.total_s == pytest.approx(sum(took for took, _ in requests))
    assert kind.errors.total() == sum(code != 0 for _, code in requests)


@pytest.mark.parametrize("wrong", ["9469", "localhost", "localhost:", ":9469", "::1:x", "a:70000", "/x/y"])
def test_other_places_are_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequest, match="`metrics`"):
        parse_config(f'metrics = "{wrong}"')


def test_addresses() -> None:
    assert metrics_address("127.0.0.1:9469") == ("127.0.0.1", 9469)
    assert metrics_address("[::1]:9469") == ("::1", 9469)
