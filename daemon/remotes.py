"""The remotes of the configuration: opened by their URLs, with their keys.

One rule: a remote whose key cannot be read is not used at all; nothing is ever sent unencrypted instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ckptfs.daemon.config import CREDENTIAL, RemoteConfig
from ckptfs.store.bucket import Bucket
from ckptfs.store.bucket_directory import DirectoryBucket
from ckptfs.store.errors import InvalidRequest, NotPermitted
from ckptfs.store.remote.box import RemoteKey, remote_key_of
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pacing import PacedBucket
from ckptfs.store.remote.retrying import RetryingBucket

_CREDENTIALS = "CREDENTIALS_DIRECTORY"


def open_remote(config: RemoteConfig, environment: Mapping[str, str]) -> Remote:
    """The remote, of which nothing is known yet. InvalidRequest or NotPermitted: its URL, options or key
    cannot be used."""
    key = load_remote_key(config.key, environment) if config.key else None
    bucket = _bucket(config)
    if config.rate_mib_s:
        bucket = PacedBucket(bucket, config.rate_mib_s * (1 << 20))
    return Remote(RetryingBucket(bucket), key)


def _bucket(config: RemoteConfig) -> Bucket:
    if config.url.startswith("file://"):
        return DirectoryBucket(unquote(urlsplit(config.url).path), config.url.rstrip("/"))
    # The library starts slowly, and most mounts have no remote.
    from ckptfs.store.bucket_cloud import open_cloud

    options = {"endpoint": config.endpoint, "region": config.region}
    return open_cloud(config.url, {name: value for name, value in options.items() if value})


def load_remote_key(setting: str, environment: Mapping[str, str]) -> RemoteKey:
    """The key that `key` of a remote means: a file, or a credential of the service manager."""
    path = setting
    if setting.startswith(CREDENTIAL):
        folder = environment.get(_CREDENTIALS)
        if folder is None:
            raise InvalidRequest(f"{setting}: no service manager has handed credentials to this process")
        path = f"{folder}/{setting.removeprefix(CREDENTIAL)}"
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as e:
        raise NotPermitted(f"cannot read the key {path}: {e.strerror}") from None
    try:
        return remote_key_of(text)
    except InvalidRequest as e:
        raise InvalidRequest(f"{path}: {e}") from None


def default_node_name() -> str:
    """What this node is called on remotes."""
    return os.uname().nodename
