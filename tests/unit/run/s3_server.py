"""An S3 server of moto in this process, and a place in it for s3fs."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from tests.required import missing

_NEW = itertools.count()


def s3_url(monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place in a bucket of its own."""
    try:
        import s3fs
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        missing("s3", f"{error.name} is not installed")
    address = _address(ThreadedMotoServer)
    variables = {"AWS_ACCESS_KEY_ID": "ours", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL": address}
    for name, value in {**variables, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{next(_NEW)}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/runs/mine"


@cache
def _address(server_of: type) -> str:
    server = server_of(port=0)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"
