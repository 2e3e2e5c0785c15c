"""Where shards lie: files of this machine, and what fsspec reads, whose bytes are asked for again where that helps."""

import glob
import hashlib
import json
import logging
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from lockstep.data.shard_formats import CHUNK, Read, require_package
from lockstep.errors import ConfigError
from lockstep.failures.reporter import heartbeat
from lockstep.files import is_url

log = logging.getLogger(__name__)

OPEN_FILES = 128  # of a process
AT_ONCE = 16  # requests of a process
RETRY_SECONDS = 100.0  # less than `watch.timeout=null` waits: the error then says more than a hang
FIRST_WAIT, LONGEST_WAIT = 0.05, 5.0  # seconds before a request is made again
# A request that takes longer than so many seconds, and one for so many bytes, is made again. Without an answer aiohttp
# waits 300 s; s3fs asks again for 220 s by itself, and says nothing.
REQUEST_SECONDS, SLOWEST = 20.0, 2e5
SILENT_SECONDS = 2.0  # single requests fail all the time; a line in the log is for a store that is gone
SAME_SECONDS = 30.0  # one that fails again so soon after its last failure has not been back
VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "md5Hash")  # in what fsspec tells
FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ValueError)  # asking again does not help
FINAL_STATUS = (400, 401, 403, 404, 410)  # of HTTP

Shard = tuple[str, int, int | str]
"""(name, bytes, what says that it has changed: ns of the last change, or a tag)."""


def stem(shard: Sequence[Any]) -> str:
    """What a file is called, without its end, that is written of a shard as it is now."""
    return hashlib.sha256(json.dumps(shard).encode()).hexdigest()[:16]


def _opened(name: str) -> tuple[Any, str]:
    """(file system of fsspec, the name in it). Raises ConfigError for a package that is missing."""
    require_package("fsspec", name)
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(name)
    except (ImportError, ValueError) as error:  # a protocol whose package is not installed, or that is not known
        raise ConfigError(f"{name} cannot be read ({error}); type pip install <the package that it names>") from None
    return system, path


def expanded(urls: str | Sequence[str]) -> list[str]:
    """The shards that patterns name, in their order: {000..063} and {a,b} are written out, * and ? are looked up."""
    found = list[str]()
    for name in [urls] if isinstance(urls, str) else urls:
        braces = re.search(r"\{([^{}]*)\}", name)
        if braces is not None:
            first, _, last = braces[1].partition("..")
            words = braces[1].split(",")
            if first.isdecimal() and last.isdecimal():
                words = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
            found += expanded([name[: braces.start()] + word + name[braces.end() :] for word in words])
        elif is_url(name) and any(sign in name for sign in "*[?"):
            system, path = _opened(name)
            found += [system.unstrip_protocol(one) for one in asked(lambda: sorted(system.glob(path)), name)]  # noqa: B023
        elif not is_url(name) and glob.has_magic(name):
            found += sorted(glob.glob(name, recursive=True))
        else:
            found.append(name)
    return found


def states(names: Sequence[str], key: str) -> list[Shard]:
    """The shards with these names as they are now. Raises ConfigError for one that cannot be read.

    key: of the names in the config.
    """

    def state(name: str) -> Shard | Exception:
        try:
            if not is_url(name):
                status = os.stat(name)
                return name, status.st_size, status.st_mtime_ns
            system, path = _opened(name)
            about = asked(lambda: system.info(path, **_limit(system)), name)
            return name, int(about["size"]), str(next((about[tag] for tag in VERSIONS if about.get(tag)), ""))
        except (OSError, TypeError) as error:  # without a size, no range can be asked for
            return error

    are_far = any(map(is_url, names))
    with ThreadPoolExecutor(AT_ONCE if are_far else 1) as pool:
        found = list(pool.map(state, names)) if are_far else list(map(state, names))
    for name, one in zip(names, found, strict=True):
        if isinstance(one, Exception):
            reason = getattr(one, "strerror", None) or one
            raise ConfigError(
                f"the shard {name} cannot be read ({reason}); type dataset.{key}=<those that are there>"
            ) from None
    return [one for one in found if not isinstance(one, Exception)]


class Failures:
    """When a request has last failed for long: a process shares it with its forks, so that one of them tells."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self.last = context.Value("d", -math.inf)

    def is_first(self, begun: float) -> bool:
        """Whether no other request has failed for long since shortly before `begun`."""
        with self.last.get_lock():
            is_known, self.last.value = begun < self.last.value + SAME_SECONDS, time.monotonic()
        return not is_known


@cache
def _own_failures() -> Failures:
    return Failures()  # of the requests that no reader makes


def asked(request: Callable[[], Any], name: str, failures: Failures | None = None) -> Any:
    """What `request()` returns, which is made again for some time where it fails. Raises OSError.

    failures: the processes that share them tell once that a store is gone.
    """
    begun, wait = time.monotonic(), FIRST_WAIT
    while True:
        try:
            return request()
        except Exception as error:  # of many packages: aiohttp, botocore, ...
            # fsspec says that a file is not there where an HTTP server has not told its size for any reason.
            cause = error.__cause__ or error
            if isinstance(cause, FINAL) or getattr(cause, "status", None) in FINAL_STATUS:
                raise
            reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
            seconds = time.monotonic() - begun
            if seconds > RETRY_SECONDS:
                raise OSError(f"{name} does not answer for {seconds:.0f} s ({reason})") from error
            if seconds > SILENT_SECONDS and (failures or _own_failures()).is_first(begun):
                log.warning("%s does not answer (%s); asking again for up to %.0f s", name, reason, RETRY_SECONDS)
        heartbeat()
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT)


def reading_ahead(read: Read, size: int) -> Read:
    """`read` for a shard of `size` bytes that is read from its beginning to its end: it asks for many bytes at once."""
    start, chunk = 0, b""

    def read_ahead(begin: int, length: int) -> bytes:
        nonlocal start, chunk
        if begin < start or begin + length > start + len(chunk):
            start, chunk = begin, read(begin, max(length, min(CHUNK, size - begin)))
        return chunk[begin - start : begin - start + length]

    return read_ahead


class ShardReader:
    """Reads bytes of shards. A process has files of its own open."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.files: dict[int, int] = {}  # {number: descriptor}
        self.pool: tuple[int, ThreadPoolExecutor] | None = None  # of a process: a fork has no threads
        self.failures = Failures()  # of all workers of a rank

    def read(self, shard: int, begin: int, length: int) -> bytes:
        """Raises OSError for a shard that is missing, has changed, or ends before these bytes do."""
        name = self.shards[shard][0]
        if is_url(name):
            system, path = _opened(name)
            stored = asked(partial(_range, system, path, begin, length), name, self.failures)
        else:
            stored = self._read_local(shard, begin, length)
        if len(stored) > length:
            came = f"{len(stored)} bytes came for {length}"
            raise OSError(f"the server of {name} does not answer ranges ({came}); copy its files to this machine")
        if len(stored) != length:
            raise OSError(f"{name} ends at byte {begin + len(stored)}, before byte {begin + length}")
        return bytes(stored)

    def read_all(self, places: Sequence[tuple[int, int, int]]) -> list[bytes | Exception]:
        """As `read` of each of them, at the same time; an error in the place of bytes that cannot be read."""

        def read(place: tuple[int, int, int]) -> bytes | Exception:
            try:
                return self.read(*place)
            except Exception as error:
                return error

        if self.pool is None or self.pool[0] != os.getpid():
            self.pool = os.getpid(), ThreadPoolExecutor(AT_ONCE)
        return list(self.pool[1].map(read, places))

    def _read_local(self, shard: int, begin: int, length: int) -> bytes:
        name, size, changed = self.shards[shard]
        file = self.files.get(shard)
        if file is None:
            if len(self.files) >= OPEN_FILES:
                os.close(self.files.pop(next(iter(self.files))))
            file = self.files[shard] = os.open(name, os.O_RDONLY)
        stored = os.pread(file, length, begin)
        while len(stored) < length and (more := os.pread(file, length - len(stored), begin + len(stored))):
            stored += more  # of more than 2 GB, Linux gives a part
        status = os.fstat(file)  # after it was read: it may be written again in its place
        if (status.st_size, status.st_mtime_ns) != (size, changed):
            os.close(self.files.pop(shard))
            raise OSError(f"{name} has changed since its samples were counted; type the command again")
        return stored


def _limit(system: Any, length: int = 0) -> dict[str, float]:
    """The option with which a call of one of fsspec's asynchronous file systems ends in time. length: of the answer."""
    return {"timeout": REQUEST_SECONDS + length / SLOWEST} if system.async_impl else {}


def _range(system: Any, path: str, begin: int, length: int) -> bytes:
    stored: bytes = system.cat_file(path, start=begin, end=begin + length, **_limit(system, length))
    if len(stored) < length:
        raise OSError(f"{len(stored)} of {length} bytes came")  # a connection was cut
    return stored
