"""One S3 server for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from seaweed import S3Server, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server
