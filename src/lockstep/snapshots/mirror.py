"""Copies of a run's snapshots in another place: an object store, or whatever else fsspec has a file system for."""

import hashlib
import json
import logging
import shutil
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from lockstep.errors import CannotStartNow, ConfigError
from lockstep.files import write_whole
from lockstep.snapshots.files import list_snapshots
from lockstep.strategies.base import Strategy
from lockstep.text import first_line

log = logging.getLogger(__name__)

PAUSE = 5.0  # seconds before a copy is tried again
LAST_WAIT = 120.0  # seconds that the end of a run waits for the last copy
PIECE = 2**22  # bytes that are read at once


def validate_mirror(url: str | None, form: str, strategy: Strategy, resume: str | None, run_dir: Path) -> None:
    """Raise ConfigError for a mirror that cannot be opened, or that has the snapshots of another run.

    form: as snapshot.format. resume: as the key.
    """
    if url is None:
        return
    if strategy.shards_state and form != "full":
        raise ConfigError(
            "snapshot.mirror copies snapshots of one file, and this strategy may save parts; type snapshot.format=full"
        )
    if list_snapshots(run_dir / "snapshots") or str(resume).rstrip("/") == url.rstrip("/"):
        return
    if _Place("snapshot.mirror", url).newest() is not None:
        raise ConfigError(
            f"snapshot.mirror={url} has the snapshots of another run, which this one would replace; type "
            f"snapshot.mirror=<another place>, or resume={url} to go on with that run"
        )


class _Place:
    """A folder that fsspec opens. Snapshots lie there as <name>-<digest>.pt; <name>.json is written when such a file is
    whole, and lists it. key: by which it was typed."""

    def __init__(self, key: str, url: str) -> None:
        from fsspec.core import url_to_fs  # torch needs it, too
        from fsspec.registry import known_implementations

        self.key, self.url = key, url
        for name in ("botocore", "aiobotocore"):  # a line for each place where keys were found
            logging.getLogger(name).setLevel(logging.WARNING)
        try:
            self.files, self.folder = url_to_fs(url, skip_instance_cache=True)
        except ImportError:
            package = known_implementations[url.partition("://")[0]]["class"].partition(".")[0]
            raise ConfigError(f"{key}={url} needs {package}; type pip install {package}") from None
        except ValueError as error:
            raise ConfigError(f"{key}={url}: {error}; type {key}=s3://<bucket>/<folder>") from None

    def names(self) -> list[str]:
        """The names of the files in the folder. Raises CannotStartNow if it cannot be read."""
        self.files.invalidate_cache()
        try:
            return [Path(path).name for path in self.files.ls(self.folder, detail=False)]
        except FileNotFoundError:
            return []
        except Exception as error:  # of any library
            raise CannotStartNow(
                f"{self.key}={self.url} cannot be read ({first_line(error)}); type the command again when it can"
            ) from None

    def listed(self) -> list[str]:
        """The names of the whole snapshots, such as step_00000012 and best; the newest first, best at the end."""
        return sorted((name[:-5] for name in self.names() if name.endswith(".json")), reverse=True)

    def newest(self) -> str | None:
        """The name of the newest whole snapshot that a run can go on from."""
        return next((name for name in self.listed() if name != "best"), None)

    def entry(self, name: str) -> dict[str, Any]:
        """{"file": its name, "sha256", "bytes"} of a whole snapshot."""
        return dict(json.loads(self.files.cat_file(f"{self.folder}/{name}.json")))

    def copy_to(self, file: IO[bytes], entry: dict[str, Any]) -> None:
        """Write the snapshot of an entry to `file`. Raises ValueError if its digest is another one."""
        digest = hashlib.sha256()
        with self.files.open(f"{self.folder}/{entry['file']}", "rb") as source:
            while piece := source.read(PIECE):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != entry["sha256"]:
            raise ValueError("its SHA-256 is another one than that of its list")


class Mirror:
    """Copies snapshots to `url` in a thread, each whole or not at all, the newest one first.

    Whatever happens there costs a line in the log, and is tried again; the training goes on. Numbered snapshots that
    `folder` no longer has are removed there, too.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.place, self.folder = _Place("snapshot.mirror", url), folder
        self.waiting: dict[str, Path] = {}  # "best" or "numbered": the newest one that is not copied yet
        self.changed, self.ends_at = threading.Condition(), float("inf")
        self.has_failed = False
        self.thread = threading.Thread(target=self._copy_all, name="mirror", daemon=True)
        self.thread.start()

    def put(self, path: Path) -> None:
        """Copy the snapshot `path`, which is written, when the one before is copied."""
        with self.changed:
            self.waiting["best" if path.stem == "best" else "numbered"] = path
            self.changed.notify()

    def close(self) -> None:
        """Wait until all is copied, LAST_WAIT seconds at most."""
        with self.changed:
            self.ends_at = time.monotonic() + LAST_WAIT
            self.changed.notify()
        self.thread.join(LAST_WAIT)
        if self.waiting or self.thread.is_alive():
            names = ", ".join(path.name for path in self.waiting.values())
            log.warning("snapshot.mirror: the run ends without a copy of %s", names or "its last snapshot")

    def _copy_all(self) -> None:
        while True:
            with self.changed:
                while not self.waiting and self.ends_at == float("inf"):
                    self.changed.wait()
                if not self.waiting or time.monotonic() > self.ends_at:
                    return
                kind = next(iter(self.waiting))
                path = self.waiting.pop(kind)
            try:
                self._copy(path)
                if self.has_failed:
                    log.info("snapshot.mirror: %s is copied again", path.name)
                self.has_failed = False
            except Exception as error:  # of any library
                if not self.has_failed:
                    log.warning(
                        "snapshot.mirror: %s is not copied to %s (%s); it is tried again, and the training goes on",
                        *(path.name, self.place.url, first_line(error)),
                    )
                self.has_failed = True
                with self.changed:
                    self.waiting.setdefault(kind, path)
                    self.changed.wait(PAUSE)

    def _copy(self, path: Path) -> None:
        place = self.place
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open(path, "rb"))  # also while it is replaced or removed here
            except FileNotFoundError:  # a newer one comes
                return
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size, name = file.tell(), f"{path.stem}-{digest[:16]}.pt"
            file.seek(0)
            place.files.makedirs(place.folder, exist_ok=True)
            with place.files.open(f"{place.folder}/{name}", "wb") as copy:
                shutil.copyfileobj(file, copy, PIECE)
        entry = json.dumps({"file": name, "sha256": digest, "bytes": size})
        place.files.pipe_file(f"{place.folder}/{path.stem}.json", entry.encode())
        if path.stem != "best":  # before a newer one is there, the old one is all that a run can go on from
            here = {kept.stem for kept in list_snapshots(self.folder)} | {"best", path.stem}
            for old in set(place.listed()) - here:
                place.files.rm_file(f"{place.folder}/{old}.json")
        used = {place.entry(name)["file"] for name in place.listed()}
        for old in place.names():
            if old.endswith(".pt") and old not in used:
                place.files.rm_file(f"{place.folder}/{old}")


def require_listed(url: str) -> None:
    """Raise ConfigError if `resume=<url>` has nothing to resume from."""
    if _Place("resume", url).newest() is None:
        raise ConfigError(
            f"resume={url} lists no snapshot; to start afresh leave resume= out, else type resume=<a run folder>"
        )


def fetch(url: str, folder: Path) -> None:
    """Copy the newest snapshot of a mirror whose digest is right, and its best one, to `folder`, which has none."""
    place, has_newest = _Place("resume", url), False
    folder.mkdir(parents=True, exist_ok=True)
    for name in place.listed():
        if name != "best" and has_newest:
            continue
        try:
            entry = place.entry(name)
            write_whole(folder / f"{name}.pt", lambda file, entry=entry: place.copy_to(file, entry))  # type: ignore[misc]
            has_newest |= name != "best"
        except Exception as error:  # of any library
            log.warning("resume=%s: %s cannot be taken (%s)", url, name, first_line(error))
    if not has_newest:
        raise ConfigError(f"resume={url} lists no snapshot that can be read; type resume=<a run folder>")
