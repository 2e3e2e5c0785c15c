"""Which snapshot a run or a mode starts from, how all ranks load it, and how its run compares with this one."""

import logging
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.distributed.old_world import disk_access
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, path_value, path_word
from lockstep.failures import reporter
from lockstep.files import is_url
from lockstep.snapshots.files import FORMAT, FORMAT_IN_PARTS, list_snapshots, load_verified
from lockstep.snapshots.mirror import require_listed
from lockstep.snapshots.state import restore_weights
from lockstep.text import differing, first_line
from lockstep.training.run import Run

log = logging.getLogger(__name__)

Found = tuple[dict[str, Any], Path]
"""The contents of a snapshot, and its path."""

NOT_COMPARED = ("launch.", "hydra.", "mode.")  # parts of the config that say where a run computes, not what
NOT_COMPARED_KEYS = ("run_dir", "resume", "trainer.pause_after")
FOLDER = ".run_dir"  # of a logger


@dataclass(frozen=True)
class Keys:
    """The words by which a caller names snapshots, for the sentences of errors.

    run: that of a run.
    which: that of one of its snapshots; None for a training, which takes the newest, and can start afresh.
    """

    run: str = "resume"
    which: str | None = None

    @property
    def trains(self) -> bool:
        return self.which is None


TRAINING = Keys()
MODE = Keys("resume", "mode.snapshot")
PYTHON = Keys("run", "which")  # the arguments of `lockstep.load`


# The snapshots to try, newest first.


def find_snapshots(resume: str | Path | None, run_dir: Path) -> list[Path]:
    """Those of a training, best first: its own, else those that `resume` names. Empty: a fresh start, or a mirror whose
    snapshots become the run's own when it begins.

    resume: a run folder, a folder of snapshots, a snapshot file, the URL of a mirror, or None.
    Raises ConfigError if there is nothing in it to resume from.
    """
    own = list_snapshots(run_dir / "snapshots")
    if own or resume is None:
        return own
    if is_url(resume):
        require_listed(str(resume))
        return []
    return _named_snapshots(resume, TRAINING, TRAINING.run)


def snapshots_to_try(resume: str | None, which: str, mode: str, keys: Keys = MODE) -> list[Path]:
    """Those of a trained run that a mode uses.

    resume: a run folder, a folder of snapshots, or a snapshot.
    which: "last", "best" or a snapshot's file, which wins.
    mode: the name of what asks.
    Raises ConfigError if nothing is there.
    """
    if resume is None:
        raise ConfigError(f"mode={mode} needs a trained run; type resume=<a run folder>")
    if which == "last":
        return _named_snapshots(resume, keys, keys.run)
    key = str(keys.which)
    if which != "best":
        if not Path(which).exists():
            newest = path_value(_named_snapshots(resume, keys, keys.run)[0])
            raise ConfigError(
                f"{key}={which} is neither last, best nor a file; type {key}=last, {key}=best or {key}={newest}"
            )
        return _named_snapshots(which, keys, key)
    folder = Path(resume).parent if Path(resume).is_file() else Path(resume)
    for path in (folder / "snapshots" / "best.pt", folder / "best.pt"):
        if path.is_file():
            return _named_snapshots(path, keys, key)
    found = load_first_good(_named_snapshots(resume, keys, keys.run), keys)
    assert found is not None  # there is one at least
    step, earlier = found[0]["progress"]["best_step"], found[0]["config"].get("resume")
    if step is None:
        why = f"no epoch was evaluated; type {key}=last"
    else:
        earlier = path_value(earlier) if earlier else "<the run that this one was resumed from>"
        why = f"the best evaluation, at step {step}, is of an earlier folder; type {keys.run}={earlier}, or {key}=last"
    raise ConfigError(f"{keys.run}={resume} has no snapshots/best.pt: {why}")


def _named_snapshots(name: str | Path, keys: Keys, key: str) -> list[Path]:
    """The snapshots that a name stands for: a run folder, a folder of snapshots, or a snapshot file.

    key: the one of `keys` by which it was named.
    Raises ConfigError if there is none.
    """
    path = Path(name)
    if os.path.isfile(path):  # Path.is_file raises for a name that is too long
        _require_snapshot(path, keys, key)
        return [path]
    is_folder = os.path.isdir(path)
    found = list_snapshots(path / "snapshots") or list_snapshots(path) if is_folder else []
    if not found:
        what = "holds no finished snapshot" if is_folder else "does not exist"
        way = "to start afresh leave resume= out, to resume type" if keys.trains else "type"
        raise ConfigError(f"{key}={name} {what}; {way} {key}=<a run folder or one of its snapshots/step_*.pt>")
    return found


def _require_snapshot(path: Path, keys: Keys, key: str) -> None:
    """Raise ConfigError for a file that is none, and say what it is. A damaged one is found when it is loaded."""
    run_dir = path_value(path.parent) if list_snapshots(path.parent / "snapshots") else "<the run folder>"
    what = "is not a snapshot;"
    if path.suffix == ".pt":
        try:
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception:  # any file may have been named
            return
        if isinstance(contents, dict) and "format" in contents:
            return
        if isinstance(contents, dict) and contents and all(torch.is_tensor(value) for value in contents.values()):
            what = "holds only weights, and "
            what += "training also needs the optimizer's state;" if keys.trains else "a snapshot also tells their step;"
    instead = f"{key}=last" if key == keys.which else f"{key}={run_dir}"
    raise ConfigError(f"{key}={path} {what} type {instead}")


# Loading.


def load_first_good(paths: list[Path], keys: Keys = TRAINING) -> Found | None:
    """(contents on the CPU, path) of the first of `paths` that is not damaged; None if `paths` is empty.

    A damaged snapshot is passed over with a warning.
    Raises ConfigError if all are damaged, since a silent fresh start would lose the run, and for a snapshot of another
    format.
    """
    for path in paths:
        try:
            contents = load_verified(path)
        except Exception as error:  # torch.load raises many types for a damaged file
            reason = first_line(error)
            log.warning("snapshot %s is damaged (%s) and passed over", path, reason)
            continue
        form = contents.get("format", 1) if isinstance(contents, dict) else "unknown"
        if form not in (FORMAT, FORMAT_IN_PARTS):
            way = f"type {keys.run}=<a snapshot of this version>"
            afresh = ", or to start afresh hydra.run.dir=<a new folder>" if keys.trains else ""
            raise ConfigError(
                f"{path} has the snapshot format {form}, and this version reads format {FORMAT} and {FORMAT_IN_PARTS}; "
                f"{way}{afresh}"
            )
        return contents, path
    if paths:
        what = f"none of the {len(paths)} snapshots in {paths[0].parent} can be read"
        raise ConfigError(f"{what}; {_way_out(paths, keys)}")
    return None


def _way_out(damaged: list[Path], keys: Keys) -> str:
    """What to type if none of `damaged` can be read. Those of a folder are tried again as long as they are there."""
    folder = damaged[0].parent
    if damaged != list_snapshots(folder):  # one was named
        return f"type {keys.which or keys.run}=<another snapshot>"
    best, moved, best_is_good = folder / "best.pt", f"{folder}.damaged", False
    with suppress(Exception):  # it is not there, or damaged
        load_verified(best)
        best_is_good = True
    if keys.which is not None:
        return f"type {keys.which}={'best' if best_is_good else '<another snapshot>'}"
    start = f"to start afresh type {shlex.join(['mv', str(folder), moved])} and the command again"
    if best_is_good:
        typed = path_word("resume", f"{moved}/best.pt")
        return f"{start}; to go on from best.pt, which can be read, type that and {typed}"
    return f"{start}; to go on from elsewhere type that and resume=<another snapshot>"


def load_on_all_ranks(world: World, find: Callable[[], Found | None]) -> Found | None:
    """Rank 0 finds a good snapshot, and all ranks load it. A collective. None if `find` returns it.

    Raises a ConfigError of `find` on all ranks, and one if a rank cannot read the file.
    """
    found, sentence = None, None
    with disk_access(world):
        if world.is_rank_zero:
            try:
                found = find()
            except ConfigError as error:
                sentence = str(error)
    sentence, name = world.broadcast_json((sentence, str(found[1]) if found else None))
    if sentence is not None:
        raise ConfigError(sentence)
    if name is None:
        return None
    path, problem = Path(name), None
    with disk_access(world):
        try:
            found = found or (load_verified(path, check_parts=False), path)  # rank 0 has read the parts
        except (OSError, ValueError) as error:
            problem = str(error)
    for rank, text in enumerate(world.all_gather_json(problem)):
        if text is not None:
            raise ConfigError(
                f"rank {rank} cannot read {path} ({text}), which rank 0 has read: a run that still trains may have "
                f"deleted or replaced it; type the command again, or on several machines resume=<a folder that all see>"
            )
    return found


def restore_trained(run: Run, paths: list[Path], model_config: dict[str, Any]) -> Found:
    """Bring the weights of the first good snapshot of `paths`, one at least, into `run`. A collective.

    model_config: {key: value} of the net that was built.
    Raises ConfigError on all ranks if the snapshot is of another net, and as `load_first_good` does.
    """

    def find() -> Found | None:
        found = load_first_good(paths, MODE)
        if found is not None:
            require_same_model(found[1], found[0]["fingerprint"], model_config)
        return found

    reporter.enter("resume")
    found = load_on_all_ranks(run.world, find)
    assert found is not None
    with disk_access(run.world):  # parts are read from their files now
        restore_weights(run, found[0])
    return found


# How this run compares with the one that made the snapshot.


def require_same_run(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise ConfigError if the snapshot `path` was made with another fingerprint, and name every key that differs.

    A fingerprint is a flat dict of plain values: the model's config, the optimizer's class, the data and the seed.
    """
    differences = _differences(saved, ours, "here")
    if differences:
        raise ConfigError(
            f"{path} does not fit this run: {'; '.join(differences)}; type the overrides that it was made with, "
            f"or to start afresh leave resume= out and type hydra.run.dir=<a new folder>"
        )


def require_same_model(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise ConfigError if the snapshot `path` is of another model than `ours`, the keys of a model's config."""
    of_model = {key: value for key, value in saved.items() if key.startswith("model.")}
    differences = "; ".join(_differences(of_model, ours, "here"))
    if any(of_model[key] != ours[key] for key in of_model.keys() & ours.keys()):
        raise ConfigError(
            f"{path} is of another model: {differences}; type a data set with the shape and the classes of the trained "
            f"one's, and leave out model="
        )
    if differences:  # nobody can type a key away
        raise ConfigError(
            f"{path} was saved by another version of the code: {differences}; type git checkout <the commit in the "
            f"run.json of the run>"
        )


def log_config_changes(saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """One line that names every key of two flat configs that differs, but for those that say where a run computes.

    Of a class that was replaced by another one only the class is named: its keys have no counterpart.
    """
    saved, ours = compared(saved), compared(ours)
    replaced = [
        key.removesuffix("_target_") for key in saved if key.endswith("._target_") and ours.get(key) != saved[key]
    ]
    for prefix in replaced:
        for config in (saved, ours):
            for key in [key for key in config if key.startswith(prefix) and key != f"{prefix}_target_"]:
                del config[key]
    differences = _differences(saved, ours, "now")
    if differences:
        log.info("the config changed since the snapshot: %s", "; ".join(differences))


def _differences(saved: dict[str, Any], ours: dict[str, Any], here: str) -> list[str]:
    return [
        f"{key} ({then} in the snapshot, {now} {here})"
        for key, (then, now) in differing(saved, ours, "nothing").items()
    ]


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a flat config that says what is computed, without where."""
    return {
        key: value
        for key, value in config.items()
        if key not in NOT_COMPARED_KEYS and not key.startswith(NOT_COMPARED) and not key.endswith(FOLDER)
    }


def write_hydra_files(world: World, run_dir: str | Path, files: Mapping[str, str], step: int) -> None:
    """Write the composed config and the typed overrides, {file name: text}, to `run_dir`/.hydra, on rank 0.

    It is called once the run holds the run folder's lock. A file of an earlier start whose text differs is kept as
    `<name>.until_step_<step>.yaml`: the folder then tells which config trained which steps. A full disk costs a
    warning, not the training.
    """
    if not world.is_rank_zero or not files:
        return
    folder = Path(run_dir) / ".hydra"
    try:
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            path = folder / name
            kept = folder / f"{path.stem}.until_step_{step:08d}.yaml"
            # If `kept` exists, the start before this one saved no step of its own.
            if path.exists() and path.read_text() != text and not kept.exists():
                path.replace(kept)
            path.write_text(text)
    except OSError as error:
        log.warning("the config could not be written to %s (%s); training goes on", folder, error)
