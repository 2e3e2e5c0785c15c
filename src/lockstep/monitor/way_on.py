"""Where a run that has failed can go on: its newest snapshot, the steps that are lost, the command."""

import re
import shlex
import time
from pathlib import Path
from typing import Any

from lockstep.errors import path_value
from lockstep.monitor.options import MonitorOptions
from lockstep.monitor.watched_rank import WatchedRank


def way_on(folder: Path | None, first: WatchedRank, options: MonitorOptions) -> dict[str, Any]:
    """The part `run` of a failure report. first: the rank that failed first."""
    step = first.position()["step"]
    newest, saved_step = first.resumed_from, first.resumed_step
    # A snapshot of a later step than the rank's was passed over as damaged.
    own = None if folder is None else newest_snapshot(folder, up_to=None if newest is None else max(step, saved_step))
    if own is not None:
        newest, saved_step = str(own), _step_of(own)
    return {
        "folder": None if folder is None else str(folder),
        "newest_snapshot": newest,
        "steps_lost": max(0, step - saved_step),
        "resume": resume_command(options.command, folder),
        "time": time.time() - first.clock_ahead,
    }


def newest_snapshot(run_dir: Path, up_to: int | None = None) -> Path | None:
    """The newest numbered snapshot that is written whole: its companion exists. up_to: the last step that counts."""
    numbered = [path for path in run_dir.glob("snapshots/step_*.pt") if re.fullmatch(r"step_\d+", path.stem)]
    whole = [path for path in numbered if path.with_suffix(".json").exists()]
    return max((path for path in whole if up_to is None or _step_of(path) <= up_to), default=None)


def resume_command(words: list[str], folder: Path | None) -> str:
    """The command that goes on in the same run folder, or in the same folder of a sweep."""
    if not words or folder is None:
        return ""
    script = next((index for index, word in enumerate(words) if word.endswith("train.py")), 0)
    is_sweep = bool({"-m", "--multirun"} & set(words[script:]))
    if is_sweep:
        added = [f"hydra.sweep.dir={path_value(folder.parent)}", "sweep.retry=failed"]
    else:
        added = [f"hydra.run.dir={path_value(folder)}"]
    keys = tuple(f"{word.partition('=')[0]}=" for word in added)
    return shlex.join([*(word for word in words if not word.startswith(keys)), *added])


def _step_of(snapshot: Path) -> int:
    return int(snapshot.stem.removeprefix("step_"))
