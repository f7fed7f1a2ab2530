"""Azurite serves as a remote; s3rver ignores conditions, and is refused before anything relies on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
from nodeservers import AZURE_ACCOUNT, AZURE_KEY, azurite, make_container, programs, s3rver
from saved_store import SavedStore, Tree, contents

from ckptfs.store.bucket_cloud import open_cloud
from ckptfs.store.errors import Unsupported
from ckptfs.store.remote.catalogue import read_unit
from ckptfs.store.remote.collecting import Collector
from ckptfs.store.remote.copied import CopiedUnits
from ckptfs.store.remote.heads import newest_heads
from ckptfs.store.remote.objects import Remote
from ckptfs.store.remote.pull import Puller
from ckptfs.store.remote.push import Pusher
from ckptfs.store.remote.retrying import RetryingBucket

pytestmark = pytest.mark.skipif(
    programs() is None,
    reason="Azurite and s3rver are not installed: ./dev test does that where there is npm",
)
TREE: Tree = {b"model": os.urandom(3_000_000), b"sub": {b"args": b"{}"}}


def test_azurite_serves_as_a_remote(tmp_path: Path) -> None:
    async def main(endpoint: str) -> None:
        options = {"endpoint": endpoint, "account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}
        bucket = RetryingBucket(open_cloud("az://tests/prefix", options))
        remote = Remote(bucket)
        store = SavedStore(tmp_path / "a")
        try:
            await store.publish(b"run", TREE)
            copied = CopiedUnits(store.index, "azure")
            pusher = Pusher(remote, store.disk, store.segments, store.histories, copied, "node")
            assert (await pusher.push(store.unit(b"run").unit)).safe == (1,)
            found = await Collector(remote, "node", os.urandom, lambda unit, now_ns: (), 0.0).collect()
            assert not found.is_off and found.kept_packs
        finally:
            store.close()
        (newest,) = await newest_heads(remote)
        assert newest.head is not None
        (version,) = (await read_unit(remote, newest.head)).versions
        store = SavedStore(tmp_path / "b")
        try:
            puller = Puller(remote, store.index, store.segments, store.ingest, store.histories, os.urandom)
            assert store.read_version((await puller.pull(version, b"run")).record) == contents(TREE)
        finally:
            store.close()

    with azurite(tmp_path / "azurite") as endpoint:
        make_container(endpoint, "tests")
        trio.run(main, endpoint)


def test_a_real_server_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    async def main(endpoint: str) -> None:
        options = {
            "endpoint": endpoint,
            "region": "us-east-1",
            "access_key_id": "S3RVER",
            "secret_access_key": "S3RVER",
        }
        bucket = open_cloud("s3://tests/prefix", options)
        with pytest.raises(Unsupported, match="If-None-Match"):
            await Remote(bucket).open(create=True)
        assert await bucket.list_objects("") == [], "nothing stays there"

    with s3rver(tmp_path / "s3rver", "tests") as endpoint:
        trio.run(main, endpoint)
