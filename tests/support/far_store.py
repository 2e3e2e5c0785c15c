"""A local HTTP server of files that is slow, fails some requests, and is gone for a while."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support.object_store import KEYS


class FarStore:
    """Serves the files of `folder`, by ranges or whole. delay: seconds of a request. Each `fails`-th gets a 503."""

    def __init__(self, folder: Path, delay: float, fails: int, has_ranges: bool = True) -> None:
        self.requests, self.sent, self.gone_until, self.lock = 0, 0, 0.0, threading.Lock()
        self.is_silent = False
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                with store.lock:
                    store.requests += 1
                    number = store.requests
                time.sleep(delay)
                path = folder / self.path.strip("/")
                if time.monotonic() < store.gone_until:
                    if store.is_silent:
                        threading.Event().wait()  # for ever, as where the way to a store is lost
                    self.close_connection = True
                    return
                if number % fails == 0 or not path.is_file():
                    self.send_error(503 if path.is_file() else 404)
                    return
                content = path.read_bytes()
                range_asked = self.headers.get("Range", "") if has_ranges else ""
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", range_asked)
                part = content[int(asked[1]) : int(asked[2]) + 1] if asked else content
                self.send_response(206 if asked else 200)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
                self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(part)
                    with store.lock:
                        store.sent += len(part)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.variables = KEYS | {"AWS_ENDPOINT_URL": self.url}  # by which s3fs finds it, with folders as its buckets

    def vanish(self, seconds: float, is_silent: bool = False) -> None:
        """For so long a request's connection is closed, or never closed nor answered."""
        self.gone_until, self.is_silent = time.monotonic() + seconds, is_silent


@contextmanager
def far_store(folder: Path, delay: float = 0.01, fails: int = 20, has_ranges: bool = True) -> Iterator[FarStore]:
    store = FarStore(folder, delay, fails, has_ranges)
    thread = threading.Thread(target=store.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.server.shutdown()
        store.server.server_close()
