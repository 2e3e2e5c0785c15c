"""Copies of a run's snapshots in another place: an object store, or whatever else fsspec has a file system for."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lockstep.errors import ConfigError, first_line
from lockstep.files import short_hash
from lockstep.snapshots.files import MANIFEST, files_of, list_snapshots, verify

log = logging.getLogger(__name__)

NAME = re.compile(r"(step|best)_\d+-[0-9a-f]{16}")


class Mirror:
    """Copies snapshots to the address `to` in a thread, each whole or not at all: of each kind the newest one. There
    they are folders, <name>-<hash of the manifest>; the manifest is written when all else is there. Whatever happens
    there costs a line in the log, and the training goes on. What the run no longer has is removed there, too, when a
    newer one is whole. key: by which the place was typed."""

    def __init__(self, to: str, key: str = "snapshot.mirror.to") -> None:
        from fsspec.core import url_to_fs  # torch needs it, too

        self.url, self.thread, self.is_behind, self.key = to, ThreadPoolExecutor(1, "mirror"), False, key
        try:
            self.files, self.folder = url_to_fs(to, skip_instance_cache=True)
        except (ImportError, ValueError) as error:  # in its words, fsspec says what to install
            raise ConfigError(f"{key}={to}: {error}; type {key}=<an address that fsspec can open>") from None

    def require_free(self, resume: str | None, run_dir: Path) -> None:
        """Raise ConfigError for a place that has the snapshots of another run. resume: as the key."""
        is_own = list_snapshots(run_dir / "snapshots") or str(resume).rstrip("/") == self.url.rstrip("/")
        if not is_own and self._names("step"):
            raise ConfigError(
                f"snapshot.mirror.to={self.url} has the snapshots of another run, which this one would replace; type "
                f"snapshot.mirror.to=<another place>, or resume={self.url} to go on with that run"
            )

    def put(self, path: Path) -> None:
        """Copy the snapshot `path`, which is written, when those before are copied."""
        self.thread.submit(self._copy, path)

    def close(self) -> None:
        """Wait until all is copied."""
        self.thread.shutdown()

    def fetch(self, folder: Path) -> None:
        """Copy the newest snapshot whose files are right, and the best ones, to `folder`, which has none."""
        for name in [*self._names("best"), *self._names("step")]:
            path, there = folder / name.partition("-")[0], f"{self.folder}/{name}"
            unfinished = folder / f"{path.name}.tmp"
            try:
                unfinished.mkdir(parents=True, exist_ok=True)
                for file in [*files_of(self.files.cat_file(f"{there}/{MANIFEST}")), MANIFEST]:
                    self.files.get_file(f"{there}/{file}", str(unfinished / file))
                verify(unfinished)
                unfinished.rename(path)
            except Exception as error:  # of any library
                log.warning("resume=%s: %s cannot be taken (%s)", self.url, name, first_line(error))
            if list_snapshots(folder):  # the newest one: the others are not needed
                return
        raise ConfigError(f"resume={self.url} lists no snapshot that can be read; type resume=<a run folder>")

    def _names(self, kind: str, file: str = MANIFEST) -> list[str]:
        """Of the folders of this kind, step or best, that have a file of this name; the newest first."""
        self.files.invalidate_cache()
        try:
            paths = [Path(path) for path in self.files.find(self.folder) if path.endswith(file)]
        except FileNotFoundError:
            return []
        except Exception as error:  # of any library
            advice = f"correct its keys and endpoint, or type {self.key}=<another place>"
            raise ConfigError(f"{self.url} cannot be read ({first_line(error)}); {advice}") from error
        names = {path.parent.name for path in paths}
        return sorted((name for name in names if NAME.fullmatch(name) and name.startswith(kind)), reverse=True)

    def _copy(self, path: Path) -> None:
        """Copy a snapshot that is not there, and remove those of its kind that are no longer beside it."""
        try:
            kind, here = path.name[:4], list_snapshots(path.parent, path.name[:4])
            if here[:1] != [path]:
                return  # a newer one waits, which stays longer
            manifest = (path / MANIFEST).read_bytes()
            copied = f"{path.name}-{short_hash(manifest)}"
            if copied not in self._names(kind):
                try:
                    self.files.makedirs(f"{self.folder}/{copied}", exist_ok=True)
                    for name in files_of(manifest):
                        self.files.put_file(str(path / name), f"{self.folder}/{copied}/{name}")
                    if (path / MANIFEST).read_bytes() != manifest:
                        raise ValueError("another one has replaced it")
                except Exception:
                    with suppress(Exception):  # a place that is full has room for the next one then
                        self.files.rm(f"{self.folder}/{copied}", recursive=True)
                    raise
                self.files.pipe_file(f"{self.folder}/{copied}/{MANIFEST}", manifest)
                kept = {other.name for other in list_snapshots(path.parent, kind)} - {path.name}
                for old in self._names(kind, file=""):
                    if old != copied and old.partition("-")[0] not in kept:
                        if self.files.exists(f"{self.folder}/{old}/{MANIFEST}"):  # first: at once it is none
                            self.files.rm_file(f"{self.folder}/{old}/{MANIFEST}")
                        self.files.rm(f"{self.folder}/{old}", recursive=True)
            self.is_behind = False
        except Exception as error:  # of any library
            if path.exists() and not self.is_behind:
                what = "is not copied to %s (%s); the next ones are tried, and the training goes on"
                log.warning(f"snapshot.mirror: %s {what}", path.name, self.url, first_line(error))
                self.is_behind = True
