"""Which snapshot a run or a mode starts from, how all ranks load it, and how its run compares with this one."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.distributed.world import World
from lockstep.errors import ConfigError
from lockstep.failures.record import heartbeat
from lockstep.files import is_url
from lockstep.snapshots.files import MANIFEST, list_snapshots, load_state, verify
from lockstep.snapshots.state import restore_weights
from lockstep.text import differing, first_line
from lockstep.training.run import Run

log = logging.getLogger(__name__)

Found = tuple[dict[str, Any], Path]
"""What a snapshot holds beside its shards, and the snapshot's path."""

DISK_TIMEOUT = timedelta(hours=1)  # for a slow disk
# Parts of the config that say where a run computes and writes, not what it computes.
NOT_COMPARED = ("launch.", "hydra.", "mode.", "logger.", "run_dir", "resume", "trainer.pause_after")


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
    snapshots become the run's own when it begins. Raises ConfigError if there is nothing to resume from.
    """
    own = list_snapshots(run_dir / "snapshots")
    return own if own or resume is None or is_url(resume) else named_snapshots(resume)


def snapshots_to_try(run: str | None, which: str, mode: str) -> list[Path]:
    """Those of a trained run that `mode` uses.

    run: a run folder, a folder of snapshots, or a snapshot. which: last, best, or a snapshot, which wins.
    Raises ConfigError if nothing is there.
    """
    if run is None:
        raise ConfigError(f"mode={mode} needs a trained run; type resume=<a run folder>")
    if which not in ("last", "best"):
        return named_snapshots(which)
    paths = named_snapshots(run)
    if which == "best":
        paths = list_snapshots(paths[0].parent, "best")
    if not paths:
        raise ConfigError(f"{run} has no snapshots/best_*; type mode.snapshot=last, in Python last")
    return paths


def named_snapshots(name: str | Path) -> list[Path]:
    """The snapshots that a name stands for: a run folder, a folder of snapshots, or a snapshot. Raises ConfigError."""
    path = Path(name)
    if (path / MANIFEST).is_file():
        return [path]
    found = list_snapshots(path / "snapshots") or list_snapshots(path)
    if not found:
        what = "holds no finished snapshot" if path.exists() else "does not exist"
        raise ConfigError(f"{name} {what}; type a run folder or one of its snapshots/step_*")
    return found


# Loading.


def load_first_good(paths: list[Path]) -> Found:
    """The first of `paths` that is not damaged. Others are passed over with a warning.

    Raises ConfigError for the snapshot of another version, and if all are damaged, since a silent fresh start would
    lose the run.
    """
    for path in paths:
        try:
            verify(path)
            return load_state(path), path
        except ConfigError:
            raise
        except Exception as error:  # torch.load raises many types
            log.warning("snapshot %s is damaged (%s) and passed over", path, first_line(error))
    what = f"none of these {len(paths)} snapshots can be read: {', '.join(map(str, paths))}"
    raise ConfigError(f"{what}; type another one, such as a best one, and to go on hydra.run.dir=<a new folder>")


def on_rank_zero(world: World, work: Callable[[], Any]) -> Any:
    """What `work`, which reads or writes files, returns on rank 0, which JSON can store, on all ranks. A collective.

    Raises a ConfigError of `work` on all ranks.
    """
    found, sentence = None, None
    with disk_access(world):
        if world.is_rank_zero:
            try:
                found = work()
            except ConfigError as error:
                sentence = str(error)
    sentence, found = world.broadcast_json((sentence, found))
    if sentence is not None:
        raise ConfigError(sentence)
    return found


def bring_back(
    run: Run, find: Callable[[], Path | None], restore: Callable[[Run, dict[str, Any], Path], None]
) -> Found | None:
    """Rank 0 finds a good snapshot, and all ranks `restore` it. A collective. None if `find` returns it.

    Raises a ConfigError of `find` on all ranks.
    """
    name = on_rank_zero(run.world, lambda: str(find() or ""))
    if not name:
        return None
    path = Path(name)
    with disk_access(run.world):
        saved = load_state(path)
    with disk_access(run.world):  # tensors are read from their files now
        restore(run, saved, path)
    return saved, path


def restore_trained(run: Run, paths: list[Path], model_config: dict[str, Any]) -> Found:
    """Bring the weights of the first good snapshot of `paths`, one at least, into `run`. A collective.

    model_config: {key: value} of the net that was built.
    Raises ConfigError on all ranks if the snapshot is of another net, and as `load_first_good` does.
    """

    def find() -> Path:
        saved, path = load_first_good(paths)
        of_model = {key: value for key, value in saved["identity"].items() if key.startswith("model.")}
        require_same(path, of_model, model_config, "leave model= out, and type data like that of the training")
        return path

    heartbeat.enter("resume")
    found = bring_back(run, find, restore_weights)
    assert found is not None
    return found


# How this run compares with the one that made the snapshot.


def require_same(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any], advice: str) -> None:
    """Raise ConfigError if the snapshot `path` is of another run or model, and name every key that differs.

    saved, ours: flat dicts of plain values, such as the model's config. advice: what to type.
    """
    if differences := _differences(saved, ours, "here"):
        raise ConfigError(f"{path} does not fit this run: {differences}; {advice}")


def log_config_changes(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """One line that names every key of two flat configs that differs, but for those that say where a run computes."""
    if differences := _differences(compared(saved), compared(ours), "now"):
        log.info("the config changed since the snapshot: %s", differences)


def _differences(saved: Mapping[str, Any], ours: Mapping[str, Any], here: str) -> str:
    found = differing(saved, ours, "nothing").items()
    return "; ".join(f"{key} ({then} in the snapshot, {now} {here})" for key, (then, now) in found)


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a flat config that says what is computed, without where."""
    return {key: value for key, value in config.items() if not key.startswith(NOT_COMPARED)}


def write_hydra_files(world: World, run_dir: str | Path, files: Mapping[str, str]) -> None:
    """Write the composed config and the typed overrides, {file name: text}, to `run_dir`/.hydra, on rank 0.

    It is called once the run holds the run folder's lock. A full disk costs the files, not the training.
    """
    if world.is_rank_zero and files:
        folder = Path(run_dir) / ".hydra"
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text)
