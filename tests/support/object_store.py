"""A real S3 server on loopback, by moto, with one bucket."""

import hashlib
import io
import json
import os
import subprocess
import sys
import time
from urllib.request import urlopen

import torch

from support.ports import free_port

URL = "s3://bucket/run"
MIRROR = f'snapshot.mirror={{_target_:lockstep.snapshots.mirror.Mirror,to:"{URL}"}}'
KEYS = {"AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "own", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """variables: by which s3fs finds the server."""

    def __init__(self):
        self.port = free_port()
        self.variables = KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        self.start()
        self.files.mkdir("bucket")

    def start(self):
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=5).close()
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def stop(self):
        self.process.kill()
        self.process.wait()

    @property
    def files(self):
        import s3fs

        os.environ.update(KEYS)
        return s3fs.S3FileSystem(
            endpoint_url=self.variables["AWS_ENDPOINT_URL"], skip_instance_cache=True, use_listings_cache=False
        )


def listed(store):
    """{name: contents} of the whole snapshots in the store: each file has the digest that is written there."""
    found = {}
    for path in store.files.glob("bucket/run/*/manifest.json"):
        folder = path.rpartition("/")[0]
        contents = {}
        for name, (size, digest) in json.loads(store.files.cat_file(path))["files"].items():
            contents[name] = store.files.cat_file(f"{folder}/{name}")
            assert hashlib.sha256(contents[name]).hexdigest() == digest
            assert len(contents[name]) == size
        found[folder.rpartition("/")[2].partition("-")[0]] = torch.load(io.BytesIO(contents["state.pt"]))
    return found
