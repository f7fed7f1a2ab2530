"""A model hub on this machine: just the answers that huggingface_hub needs to fill its cache from a folder.

The one rule: it listens on the loopback address only, and ends with the test.
Source: the requests that huggingface_hub sends for snapshot_download (`/api/models/…`, `/resolve/…`).
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from clients.recovery import digest_tree

REPOSITORY = "someone/model"


class LocalHub:
    """Serves what lies in `folder` as the newest commit of REPOSITORY. The fields are the test thread's."""

    def __init__(self, folder: Path) -> None:
        handler = type("_Handler", (_Answers,), {"folder": folder})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join(20)
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to ask this hub."""
        port = self._server.server_port
        return {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}


def commit_of(folder: Path) -> str:
    """The id of a folder's content, in the form of a commit."""
    return hashlib.sha1(json.dumps(sorted(digest_tree(folder).items())).encode()).hexdigest()


class _Answers(http.server.BaseHTTPRequestHandler):
    """One request, answered from `folder` as it is now."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            files = [{"rfilename": name} for name in sorted(digest_tree(self.folder))]
            self._send_json({"id": REPOSITORY, "sha": commit_of(self.folder), "siblings": files})
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            self._send_json([self._tree_entry(name) for name in sorted(digest_tree(self.folder))])
        else:
            self._send_file(path)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""

    def _tree_entry(self, name: str) -> dict[str, object]:
        content = (self.folder / name).read_bytes()
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, path: str) -> None:
        start = f"/{REPOSITORY}/resolve/"
        name = path.removeprefix(start).partition("/")[2]
        if not path.startswith(start) or not (self.folder / name).is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = (self.folder / name).read_bytes()
        entity = hashlib.sha1(content).hexdigest()
        self._send(200, content, {"ETag": f'"{entity}"', "X-Repo-Commit": commit_of(self.folder)})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
