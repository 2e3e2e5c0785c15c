"""The folder of a snapshot: written whole or not at all, read after its checksums were compared, and removed.

`step_00000123/` holds `state.pt`, of torch.save, with tensors and plain values only; `state_00003.pt`, the layers that
rank 3 alone has; the tensors of which each rank has a part, in `*.safetensors`; and `manifest.json`, the size and
SHA-256 of each file. It is filled under the name `step_00000123.tmp`, the manifest is written last, and one rename
makes it valid. `best_00000123/` is that of the best evaluation. No torch at the top: whoever lists snapshots needs
none.
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

from lockstep.errors import ConfigError
from lockstep.files import sync_folder, write_whole

log = logging.getLogger(__name__)

FORMAT = 7  # of the snapshots that this version writes and reads
STATE, MANIFEST = "state.pt", "manifest.json"
# old: a whole one that another of its step was replacing. pt: of an earlier version, and so none.
NAME = re.compile(r"(step|best)_(\d+)(\.old|\.pt)?")

Files = dict[str, tuple[int, str]]
"""{name of a file: (its bytes, its SHA-256)}."""


def list_snapshots(folder: Path, kind: str = "step") -> list[Path]:
    """The snapshots in `folder`, newest first: after an interval, or, of the kind "best", of the best evaluations.

    Only `verify` tells whether they are damaged.
    """
    found = sorted((path for path in folder.glob(f"{kind}_*") if NAME.fullmatch(path.name)), reverse=True)
    by_step = {step_of(path): path for path in found}  # step_1 comes after step_1.old
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def step_of(path: Path) -> int:
    """The step of a snapshot. Raises ValueError for another name."""
    match = NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is no snapshot")
    return int(match[2])


def of_files(folder: Path, names: Iterable[str]) -> Files:
    """Sizes and SHA-256. Raises OSError."""
    found = Files()
    for name in names:
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[name] = file.tell(), digest
    return found


def write_tensors(path: Path, contents: Any) -> None:
    """A file of torch.save, whole or not at all. Raises OSError."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: torch.save(contents, file))


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


def files_of(manifest: bytes) -> Files:
    """What a manifest lists. Raises many types for one that is damaged, and ConfigError for one of another version."""
    told = json.loads(manifest)
    if told["format"] != FORMAT:
        what = f"a snapshot has the format {told['format']}, and this version reads format {FORMAT}"
        raise ConfigError(f"{what}; type resume=<a snapshot of this version>, or hydra.run.dir=<a new folder>")
    # Names without folders: a snapshot may be a stranger's.
    return {Path(name).name: (size, digest) for name, (size, digest) in told["files"].items()}


def verify(path: Path) -> None:
    """Raise an exception of any type if a file of the snapshot is missing or changed."""
    files = files_of((path / MANIFEST).read_bytes())
    for name, found in of_files(path, files).items():
        if found != files[name]:
            raise ValueError(f"its {name} is cut off or changed")


def load_tensors(path: Path) -> Any:
    """What torch.save has written to `path`, on the CPU. Tensors are mapped: the ranks of a machine share one copy.

    Raises many types; ValueError if loading it could run code.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        if type(error).__name__ == "UnpicklingError":  # in its message torch advises to switch the check off
            raise ValueError("it holds more than tensors and plain values, and loading that could run code") from None
        raise


def load_state(path: Path) -> dict[str, Any]:
    """What a snapshot holds beside its shards: state.pt, and the layers of other ranks. Raises many types."""
    saved: dict[str, Any] = load_tensors(path / STATE)
    files = files_of((path / MANIFEST).read_bytes())
    for name in sorted(files):
        if name.endswith(".pt") and name != STATE:
            for section, named in load_tensors(path / name).items():
                saved[section] |= named
    return saved


def require_safetensors(what: str) -> None:
    """Raise ConfigError, which says that `what` needs the package, if it is not installed."""
    if find_spec("safetensors") is None:
        raise ConfigError(f"{what} needs safetensors; type pip install safetensors")


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the newest snapshots, and the best ones but the newest and that which the newest snapshot knows: a
    run that goes on from there may come to another best one. Raises OSError.
    """
    numbered, best = list_snapshots(folder), list_snapshots(folder, "best")
    known = [path for path in best if numbered and step_of(path) <= step_of(numbered[0])]
    for path in [*numbered[keep_last:], *best[1:]]:
        if path not in known[:1]:
            remove(path)


def remove(path: Path) -> None:
    """Raises OSError."""
    unfinished = path.with_name(f"{path.name}.tmp")
    path.rename(unfinished)  # at once no snapshot, whenever this process is killed
    shutil.rmtree(unfinished)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left unfinished in `folder`, and put back what it was about to replace."""
    for path in folder.glob("*.old"):
        if not path.with_suffix("").exists():
            path.rename(path.with_suffix(""))
    for path in [*folder.glob("*.tmp"), *folder.glob("*.old")]:
        shutil.rmtree(path, ignore_errors=True)
