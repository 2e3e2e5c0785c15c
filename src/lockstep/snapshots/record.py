"""The record of what was run: the composed config and the typed overrides, in the run folder's `.hydra`."""

import logging
from collections.abc import Mapping
from pathlib import Path

from lockstep.distributed.world import World

log = logging.getLogger(__name__)


def write_record(world: World, run_dir: str | Path, files: Mapping[str, str], step: int) -> None:
    """Write {file name: text} to `run_dir`/.hydra, on rank 0, once it holds the run folder's lock.

    A file of an earlier start whose text differs is kept as `<name>.until_step_<step>.yaml`: the folder then tells
    which config trained which steps. A full disk costs a warning, not the training.
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
