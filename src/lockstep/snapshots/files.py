"""The folder of a snapshot: written whole or not at all, read after its checksums were compared, and removed.

`step_00000123/` holds `state.pt`, of torch.save, with tensors and plain values only; `state_00003.pt`, the layers that
rank 3 alone has; the tensors of which each rank has a part, in `*.safetensors`; and `manifest.json`, the size and
SHA-256 of each file. It is filled under the name `step_00000123.tmp`, the manifest is written last, and one rename
makes it valid. `best_00000123/` is that of the best evaluation.
"""

import hashlib
import json
import logging
import re
import shutil
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import ConfigError, first_line
from lockstep.files import is_url, sync_folder, write_whole

log = logging.getLogger(__name__)

FORMAT = 8  # of the snapshots that this version writes and reads
STATE, MANIFEST = "state.pt", "manifest.json"
# old: a whole one that another of its step was replacing. pt: of an earlier version, and so none.
NAME = re.compile(r"(step|best)_(\d+)(\.old|\.pt)?")

Files = dict[str, tuple[int, str]]  # {name of a file: (its bytes, its SHA-256)}
Found = tuple[dict[str, Any], Path]  # what a snapshot holds beside its shards, and the snapshot's path


def list_snapshots(folder: Path, kind: str = "step") -> list[Path]:
    """The snapshots in `folder`, newest first, perhaps damaged: after an interval, or of the "best" evaluations."""
    names = sorted((path for path in folder.glob(f"{kind}_*") if NAME.fullmatch(path.name)), reverse=True)
    found = {step_of(path): path for path in names}  # step_1 comes after step_1.old
    return [found[step] for step in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    """The step of a snapshot. Raises ValueError for another name."""
    return int(path.name.partition(".")[0].partition("_")[2])


def named_snapshots(name: str | Path | None) -> list[Path]:
    """The snapshots, newest first, that a name stands for: a run folder, a folder of snapshots, or a snapshot. Empty
    without a name, and for a remote copy: its snapshots become the run's own when it begins. Raises ConfigError."""
    if name is None or is_url(name):
        return []
    path = Path(name)
    found = [path] if (path / MANIFEST).is_file() else list_snapshots(path / "snapshots") or list_snapshots(path)
    if not found:
        what = "holds no finished snapshot" if path.exists() else "does not exist"
        raise ConfigError(f"{name} {what}; type a run folder or one of its snapshots/step_*")
    return found


def snapshots_to_try(run: str | None, which: str, mode: str) -> list[Path]:
    """Those of a trained run that `mode` uses. which: last, best, or a snapshot, which wins. Raises ConfigError."""
    if run is None:
        raise ConfigError(f"mode={mode} needs a trained run; type resume=<a run folder>")
    paths = named_snapshots(run if which in ("last", "best") else which)
    if which == "best":
        paths = [best for path in paths[:1] for best in list_snapshots(path.parent, "best")]
    if not paths:
        raise ConfigError(f"{run} has no snapshots/{which}_*; type mode.snapshot=last, in Python last")
    return paths


def write_tensors(path: Path, contents: Any) -> None:
    """A file of torch.save, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: torch.save(contents, file))


def of_files(folder: Path, names: Iterable[str]) -> Files:
    """Sizes and SHA-256. Raises OSError."""
    found = Files()
    for name in names:
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = file.tell(), digest
    return found


def finish_snapshot(folder: Path, name: str, files: Files) -> Path:
    """Make what is in folder/<name>.tmp the snapshot folder/<name>. Raises OSError, and an older one is untouched."""
    path, unfinished, old = folder / name, folder / f"{name}.tmp", folder / f"{name}.old"
    write_whole(unfinished / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1))
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    unfinished.rename(path)
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)
    return path


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the newest snapshots, and the best ones but the newest and that which the newest snapshot knows: a
    run that goes on from there may come to another best one. Raises OSError."""
    numbered, best = list_snapshots(folder), list_snapshots(folder, "best")
    known = [path for path in best if numbered and step_of(path) <= step_of(numbered[0])]
    for path in [*numbered[keep_last:], *best[1:]]:
        if path not in known[:1]:
            remove(path)


def remove(path: Path) -> None:
    """Raises OSError."""
    shutil.rmtree(path.rename(path.with_name(f"{path.name}.tmp")))  # at once no snapshot, whenever this is killed


def remove_best(folder: Path, after: int) -> None:
    """Remove those after this step: of steps that are trained again, perhaps otherwise, or of another run."""
    for path in list_snapshots(folder, "best"):
        if step_of(path) > after:
            remove(path)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left unfinished in `folder`, and put back what it was about to replace."""
    for path in folder.glob("*.old"):
        if not path.with_suffix("").exists():
            path.rename(path.with_suffix(""))
    for path in [*folder.glob("*.tmp"), *folder.glob("*.old")]:
        shutil.rmtree(path, ignore_errors=True)


def files_of(manifest: bytes) -> Files:
    """What a manifest lists. Raises many types for one that is damaged, or of another version."""
    told = json.loads(manifest)
    if told["format"] != FORMAT:
        raise ValueError(f"it has the format {told['format']}, and this version reads format {FORMAT}")
    # Names without folders: a snapshot may be a stranger's.
    return {Path(name).name: (size, digest) for name, (size, digest) in told["files"].items()}


def verify(path: Path) -> None:
    """Raise an exception of any type if a file of the snapshot is missing or changed."""
    files = files_of((path / MANIFEST).read_bytes())
    for name, found in of_files(path, files).items():
        if found != files[name]:
            raise ValueError(f"its {name} is cut off or changed")


def load_tensors(path: Path) -> Any:
    """What torch.save has written, on the CPU. Raises many types, also where loading could run code."""
    # Mapped: the ranks of a machine share one copy.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def load_state(path: Path) -> dict[str, Any]:
    """What a snapshot holds beside its shards: state.pt, and the layers of other ranks. Raises many types."""
    saved: dict[str, Any] = load_tensors(path / STATE)
    for file in sorted(path.glob("state_*.pt")):
        for section, named in load_tensors(file).items():
            saved[section] |= named
    return saved


def load_first_good(paths: list[Path]) -> Found:
    """The first of `paths` that is not damaged. Others are passed over with a warning. Raises ConfigError if all are,
    since a silent fresh start would lose the run."""
    for path in paths:
        try:
            verify(path)
            return load_state(path), path
        except Exception as error:  # torch.load raises many types
            log.warning("snapshot %s is damaged (%s) and passed over", path, first_line(error))
    what = f"none of these {len(paths)} snapshots can be read: {', '.join(map(str, paths))}"
    raise ConfigError(f"{what}; type another one, such as a best one, and to go on hydra.run.dir=<a new folder>")


def require_safetensors(what: str) -> None:
    """Raise ConfigError, which says that `what` needs the package, if it is not installed."""
    if find_spec("safetensors") is None:
        raise ConfigError(f"{what} needs safetensors; type pip install safetensors")
