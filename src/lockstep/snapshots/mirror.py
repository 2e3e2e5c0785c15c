"""Copies of a run's snapshots in another place: an object store, or whatever else fsspec has a file system for."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.files import short_hash
from lockstep.snapshots.files import MANIFEST, files_of, list_snapshots, verify
from lockstep.text import first_line

log = logging.getLogger(__name__)

NAME = re.compile(r"(step|best)_\d+-[0-9a-f]{16}")


class Place:
    """A folder that fsspec opens. Snapshots are folders there, <name>-<hash of the manifest>; the manifest is written
    when all else is there. key: by which the place was typed."""

    def __init__(self, key: str, url: str) -> None:
        from fsspec.core import url_to_fs  # torch needs it, too

        self.url = url
        try:
            self.files, self.folder = url_to_fs(url, skip_instance_cache=True)
        except (ImportError, ValueError) as error:  # in its words, fsspec says what to install
            raise ConfigError(f"{key}={url}: {error}; type {key}=<an address that fsspec can open>") from None

    def names(self, kind: str, whole: bool = True) -> list[str]:
        """Of the folders of this kind, step or best, the newest first. whole: of those that have a manifest."""
        self.files.invalidate_cache()
        try:
            paths = self.files.find(self.folder)
        except FileNotFoundError:
            return []
        found = {Path(path).parent.name for path in paths if not whole or Path(path).name == MANIFEST}
        return sorted((name for name in found if NAME.fullmatch(name) and name.startswith(kind)), reverse=True)

    def put(self, path: Path) -> None:
        """Copy the snapshot `path`, if it is not there, and remove those of its kind that are no longer beside it."""
        manifest = (path / MANIFEST).read_bytes()
        copied = f"{path.name}-{short_hash(manifest)}"
        if copied in self.names(path.name[:4]):
            return
        self.files.makedirs(f"{self.folder}/{copied}", exist_ok=True)
        for name in files_of(manifest):
            self.files.put_file(str(path / name), f"{self.folder}/{copied}/{name}")
        if (path / MANIFEST).read_bytes() != manifest:
            raise ValueError("another one has replaced it")
        self.files.pipe_file(f"{self.folder}/{copied}/{MANIFEST}", manifest)
        here = {kept.name for kept in list_snapshots(path.parent, path.name[:4])} - {path.name}
        for old in self.names(path.name[:4], whole=False):
            if old != copied and old.partition("-")[0] not in here:
                if self.files.exists(f"{self.folder}/{old}/{MANIFEST}"):  # first: at once it is none
                    self.files.rm_file(f"{self.folder}/{old}/{MANIFEST}")
                self.files.rm(f"{self.folder}/{old}", recursive=True)

    def take(self, name: str, folder: Path) -> None:
        """Copy a whole snapshot into `folder`. Raises ValueError if what is there is not what its manifest says."""
        path = folder / name.partition("-")[0]
        unfinished = folder / f"{path.name}.tmp"
        unfinished.mkdir(parents=True, exist_ok=True)
        for file in [*files_of(self.files.cat_file(f"{self.folder}/{name}/{MANIFEST}")), MANIFEST]:
            self.files.get_file(f"{self.folder}/{name}/{file}", str(unfinished / file))
        verify(unfinished)
        unfinished.rename(path)


class Mirror:
    """Copies snapshots to the address `to` in a thread, each whole or not at all: of each kind the newest one.

    Whatever happens there costs a line in the log, and the training goes on. Snapshots that the run no longer has are
    removed there, too, when a newer one is whole.
    """

    def __init__(self, to: str) -> None:
        self.place = Place("snapshot.mirror.to", to)
        self.thread, self.is_behind = ThreadPoolExecutor(1, "mirror"), False

    def require_free(self, resume: str | None, run_dir: Path) -> None:
        """Raise ConfigError for a place that has the snapshots of another run. resume: as the key."""
        url = self.place.url
        if list_snapshots(run_dir / "snapshots") or str(resume).rstrip("/") == url.rstrip("/"):
            return
        if self.place.names("step"):
            raise ConfigError(
                f"snapshot.mirror.to={url} has the snapshots of another run, which this one would replace; type "
                f"snapshot.mirror.to=<another place>, or resume={url} to go on with that run"
            )

    def put(self, path: Path) -> None:
        """Copy the snapshot `path`, which is written, when those before are copied."""
        self.thread.submit(self._copy, path)

    def close(self) -> None:
        """Wait until all is copied."""
        self.thread.shutdown()

    def _copy(self, path: Path) -> None:
        try:
            if list_snapshots(path.parent, path.name[:4])[:1] == [path]:  # else a newer one waits, which stays longer
                self.place.put(path)
                self.is_behind = False
        except Exception as error:  # of any library
            if path.exists() and not self.is_behind:
                what = "is not copied to %s (%s); the next ones are tried, and the training goes on"
                log.warning(f"snapshot.mirror: %s {what}", path.name, self.place.url, first_line(error))
                self.is_behind = True


def fetch(url: str, folder: Path) -> None:
    """Copy the newest snapshot of a place whose files are right, and the best ones, to `folder`, which has none."""
    place = Place("resume", url)
    for kind in ("best", "step"):
        for name in place.names(kind):
            try:
                place.take(name, folder)
            except Exception as error:  # of any library
                log.warning("resume=%s: %s cannot be taken (%s)", url, name, first_line(error))
            if list_snapshots(folder):  # the newest one: the others are not needed
                return
    raise ConfigError(f"resume={url} lists no snapshot that can be read; type resume=<a run folder>")
