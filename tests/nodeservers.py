"""Storage servers that npm has: Azurite, which keeps its word, and s3rver, which does not.

The one rule: they are killed by their process ids, whatever happened. `./dev test` installs them where there
is npm (requirements/servers); elsewhere tests that want them are skipped.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_S = 120.0
# The account and key that Azurite has, as its documentation says.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def programs() -> Path | None:
    """The folder of the programs; None: they are not installed."""
    found = Path(sys.prefix) / "servers" / "node_modules" / ".bin"
    return found if (found / "azurite-blob").exists() and shutil.which("node") else None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """The blob service; its endpoint."""
    port = free_port()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    with _served("azurite-blob", [*options, "--skipApiVersionCheck"], port, folder):
        yield f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"


def make_container(endpoint: str, name: str) -> None:
    """Have a container there: the server makes none by itself, and obstore none at all."""
    now = email.utils.formatdate(usegmt=True)
    headers = f"x-ms-date:{now}\nx-ms-version:2021-08-06\n"
    # The account stands in the path of the endpoint, and once more in what is signed.
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    signed = "PUT" + "\n" * 12 + headers + resource
    digest = hmac.new(base64.b64decode(AZURE_KEY), signed.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT")
    request.add_header("x-ms-date", now)
    request.add_header("x-ms-version", "2021-08-06")
    request.add_header("Authorization", f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}")
    with urllib.request.urlopen(request, timeout=READY_S):
        pass


@contextlib.contextmanager
def s3rver(folder: Path, bucket: str) -> Iterator[str]:
    """A server that speaks S3, with one bucket; its endpoint."""
    port = free_port()
    options = ["-a", "127.0.0.1", "-p", str(port), "-d", str(folder), "--silent"]
    with _served("s3rver", [*options, "--configure-bucket", bucket], port, folder):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _served(name: str, options: Sequence[str], port: int, folder: Path) -> Iterator[None]:
    found = programs()
    assert found is not None, "Azurite and s3rver are not installed"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(found / name), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        until = time.monotonic() + READY_S
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{name} did not answer: {log.name}")
        yield
    finally:
        process.kill()
        process.wait(30)
