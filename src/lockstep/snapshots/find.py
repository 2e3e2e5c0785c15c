"""Which snapshot a run or a mode starts from, how all ranks load it, and how its run compares with this one."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.distributed.world import World
from lockstep.errors import ConfigError, path_value
from lockstep.failures.record import heartbeat
from lockstep.files import is_url
from lockstep.snapshots.files import MANIFEST, STATE, list_snapshots, load_tensors, verify
from lockstep.snapshots.state import restore_weights
from lockstep.text import differing, first_line
from lockstep.training.run import Run

log = logging.getLogger(__name__)

Found = tuple[dict[str, Any], Path]
"""What `state.pt` of a snapshot holds, and the snapshot's path."""

DISK_TIMEOUT = timedelta(hours=1)  # for a slow disk
NOT_COMPARED = ("launch.", "hydra.", "mode.")  # parts of the config that say where a run computes, not what
NOT_COMPARED_KEYS = ("run_dir", "resume", "trainer.pause_after")
FOLDER = ".run_dir"  # of a logger
MODE, PYTHON = ("resume", "mode.snapshot"), ("run", "which")  # by what a run and one of its snapshots are typed


@contextmanager
def disk_access(world: World) -> Iterator[None]:
    """Inside the block ranks read and write files. At its end they wait for each other, however slow a disk is.

    Every rank calls this. One that raises in the block does not come to its end, and the others notice its exit.
    They would not notice the loss of a machine, so with several machines they wait for `timeout` only.
    """
    with heartbeat.during("disk"):
        yield
    # In another phase: the watchdog is only patient with a rank that uses its disk.
    world.barrier(DISK_TIMEOUT if world.local_size >= world.size else None)


# The snapshots to try, newest first.


def find_snapshots(resume: str | Path | None, run_dir: Path) -> list[Path]:
    """Those of a training: its own, else those that `resume` names. Empty: a fresh start, or a remote copy whose
    snapshots become the run's own when it begins. Raises ConfigError if there is nothing in it to resume from.
    """
    own = run_dir / "snapshots"
    if list_snapshots(own) or any(own.glob("step_*.pt")):  # the latter of an earlier version
        return named_snapshots(own, "hydra.run.dir")
    if is_url(resume):
        from lockstep.snapshots.mirror import require_listed

        require_listed(str(resume))
    return [] if resume is None or is_url(resume) else named_snapshots(resume, "resume")


def snapshots_to_try(run: str | None, which: str, mode: str, keys: tuple[str, str] = MODE) -> list[Path]:
    """Those of a trained run that a mode uses.

    run: a run folder, a folder of snapshots, or a snapshot. which: last, best, or a snapshot, which wins.
    keys: by which the two were typed. Raises ConfigError if nothing is there.
    """
    if run is None:
        raise ConfigError(f"mode={mode} needs a trained run; type resume=<a run folder>")
    if which not in ("last", "best"):
        return named_snapshots(which, keys[1])
    paths = named_snapshots(run, keys[0])
    if which == "last":
        return paths
    if best := list_snapshots(paths[0].parent, "best"):
        return best
    saved, _ = load_first_good(paths, keys[1])
    step, earlier = saved["progress"]["best_step"], saved["config"].get("resume")
    why = f"no epoch was evaluated; type {keys[1]}=last"
    if step is not None:
        earlier = path_value(earlier) if earlier else "<the run that this one was resumed from>"
        why = (
            f"the best evaluation, at step {step}, is of an earlier folder; type {keys[0]}={earlier}, or {keys[1]}=last"
        )
    raise ConfigError(f"{keys[0]}={run} has no snapshots/best_*: {why}")


def named_snapshots(name: str | Path, key: str) -> list[Path]:
    """The snapshots that a name stands for: a run folder, a folder of snapshots, or a snapshot. key: what it was typed
    for. Raises ConfigError if there is none."""
    path = Path(name)
    if path.name in (STATE, MANIFEST):
        path = path.parent
    if os.path.isfile(path / MANIFEST):  # Path.is_file raises for a name that is too long
        return [path]
    for folder in (path / "snapshots", path) if os.path.isdir(path) else ():
        if found := list_snapshots(folder):
            return found
        if any(folder.glob("step_*.pt")):
            raise ConfigError(
                f"{folder} has snapshots of an earlier version of this project; type {key}=<another folder>"
            )
    what = "holds no finished snapshot" if os.path.isdir(path) else "is no snapshot"
    what = what if os.path.exists(path) else "does not exist"
    way = "to start afresh leave resume= out, else type" if key == "resume" else "type"
    places = "last, best" if key in (MODE[1], PYTHON[1]) else "a run folder"
    raise ConfigError(f"{key}={name} {what}; {way} {key}=<{places} or one of its snapshots/step_*>")


# Loading.


def load_first_good(paths: list[Path], key: str = "resume") -> Found:
    """The first of `paths`, one at least, that is not damaged. Others are passed over with a warning.

    key: what names another one. Raises ConfigError if all are damaged, since a silent fresh start would lose the run,
    and for a snapshot of another version.
    """
    for path in paths:
        try:
            verify(path)
            return load_tensors(path / STATE), path
        except ConfigError:
            raise
        except Exception as error:  # torch.load raises many types
            log.warning("snapshot %s is damaged (%s) and passed over", path, first_line(error))
    folder, best = paths[0].parent, "<a snapshot>"
    with suppress(Exception):  # there is none, or it is damaged
        newest = list_snapshots(folder, "best")[0]
        verify(newest)
        best = path_value(newest) if key == "resume" else "best"
    way = f"type {key}={best}"
    if key == "resume":
        way = f"to start afresh type hydra.run.dir=<a new folder>, and to go on from another one that and resume={best}"
    raise ConfigError(f"none of the {len(paths)} snapshots in {folder} can be read; {way}")


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
            if found is None:
                verify(path, digests=False)  # rank 0 has read all of it
                found = load_tensors(path / STATE), path
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

    def find() -> Found:
        saved, path = load_first_good(paths, "mode.snapshot")
        require_same_model(path, saved["identity"], model_config)
        return saved, path

    heartbeat.enter("resume")
    found = load_on_all_ranks(run.world, find)
    assert found is not None
    with disk_access(run.world):  # shards are read from their files now
        restore_weights(run, *found)
    return found


# How this run compares with the one that made the snapshot.


def require_same_run(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise ConfigError if the snapshot `path` is of another run, and name every key that differs.

    saved, ours: flat dicts of plain values: the model's config, the optimizer's class, the data and the seed.
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
    classes = [key for key in saved if key.endswith("._target_") and ours.get(key) != saved[key]]
    below = tuple(key.removesuffix("_target_") for key in classes)
    for config in (saved, ours):
        for key in [key for key in config if key.startswith(below) and key not in classes]:
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


def write_hydra_files(world: World, run_dir: str | Path, files: Mapping[str, str]) -> None:
    """Write the composed config and the typed overrides, {file name: text}, to `run_dir`/.hydra, on rank 0.

    It is called once the run holds the run folder's lock. A full disk costs a warning, not the training.
    """
    if world.is_rank_zero and files:
        folder = Path(run_dir) / ".hydra"
        try:
            folder.mkdir(exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
        except OSError as error:
            log.warning("the config could not be written to %s (%s); training goes on", folder, error)
