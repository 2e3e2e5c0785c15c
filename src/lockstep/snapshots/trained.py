"""The weights of a trained run: which snapshot, and back into the net of this rank."""

from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, path_value
from lockstep.failures import rank as monitor
from lockstep.snapshots.finding import Keys, load_first_good, named_snapshots
from lockstep.snapshots.fingerprint import require_same_model
from lockstep.snapshots.loading import Found, load_on_all_ranks
from lockstep.snapshots.state_dict import restore_weights
from lockstep.training.state import TrainState

MODE = Keys("resume", "mode.snapshot")
PYTHON = Keys("run", "which")  # the arguments of `lockstep.load`


def snapshots_to_try(resume: str | None, which: str, mode: str, keys: Keys = MODE) -> list[Path]:
    """The snapshots that `resume` and `which` name, newest first.

    resume: a run folder, a folder of snapshots, or a snapshot. which: "last", "best" or a snapshot's file, which wins.
    mode: the name of what asks. Raises ConfigError if nothing is there.
    """
    if resume is None:
        raise ConfigError(f"mode={mode} wants a trained run; type resume=<a run folder>")
    if which == "last":
        return named_snapshots(resume, keys, keys.run)
    key = keys.which
    if which != "best":
        if not Path(which).exists():
            newest = path_value(named_snapshots(resume, keys, keys.run)[0])
            raise ConfigError(
                f"{key}={which} is neither last, best nor a file; type {key}=last, {key}=best or {key}={newest}"
            )
        return named_snapshots(which, keys, str(key))
    folder = Path(resume).parent if Path(resume).is_file() else Path(resume)
    for path in (folder / "snapshots" / "best.pt", folder / "best.pt"):
        if path.is_file():
            return named_snapshots(path, keys, str(key))
    raise ConfigError(f"{keys.run}={resume} has no snapshots/best.pt: {_where_best_is(resume, keys)}")


def _where_best_is(resume: str, keys: Keys) -> str:
    """Why a run has no best.pt, and what to type. Reads its newest snapshot."""
    found = load_first_good(named_snapshots(resume, keys, keys.run), keys)
    assert found is not None  # `named_snapshots` gave one at least
    saved, _ = found
    step = saved["progress"]["best_step"]
    if step is None:
        return f"no epoch was evaluated; type {keys.which}=last"
    earlier = saved["config"].get("resume")
    earlier = path_value(earlier) if earlier else "<the run that this one was resumed from>"
    what = f"the best evaluation, at step {step}, is of an earlier folder"
    return f"{what}; type {keys.run}={earlier}, or {keys.which}=last"


def restore_trained(state: TrainState, paths: list[Path], model_config: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Bring the weights of the first good snapshot of `paths` into `state`. Returns it, and its contents. A collective.

    model_config: {key: value} of the net that was built. Raises ConfigError on all ranks if the snapshot is of another
    net, and as `load_first_good` does.
    """
    monitor.enter("resume")
    found = load_on_all_ranks(state.strategy.world, lambda: _find(paths, model_config))
    assert found is not None
    saved, path = found
    with state.strategy.world.disk_access():  # parts are read from their files now
        restore_weights(state, saved)
    return path, saved


def _find(paths: list[Path], model_config: dict[str, Any]) -> Found:
    found = load_first_good(paths, MODE)
    assert found is not None  # `snapshots_to_try` gave one at least
    saved, path = found
    require_same_model(path, saved["fingerprint"], model_config)
    return found
