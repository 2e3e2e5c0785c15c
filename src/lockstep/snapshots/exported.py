"""The plain state dicts that a run leaves at its end: model.pt, and model_best.pt if the best weights are others."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lockstep.errors import ConfigError, path_word
from lockstep.snapshots.files import explain, save_file
from lockstep.snapshots.finding import load_first_good
from lockstep.strategies.stored_tensor import whole

log = logging.getLogger(__name__)

LAST, BEST = "model.pt", "model_best.pt"


def export_weights(run_dir: Path, last: dict[str, Any], best: dict[str, Any] | None) -> str | None:
    """Write the files. Returns None, or why one could not be written. For rank 0.

    last: the weights of model.pt, which is written after the other: a run that has it is complete. best: those of
    model_best.pt; None: there is none, or it is that of an earlier end of this run, which is removed.
    """
    try:
        if best is None:
            (run_dir / BEST).unlink(missing_ok=True)
        else:
            save_file(run_dir / BEST, best)
        # Beside tensors a state dict has what modules give in get_extra_state.
        save_file(run_dir / LAST, tree_map_only(torch.Tensor, lambda tensor: tensor.cpu().contiguous(), last))
    except OSError as error:
        reason = explain(error, run_dir)
        return f"no {LAST}: {reason} and type the command again with {path_word('hydra.run.dir', run_dir)}"
    return None


def weights_of_snapshot(path: Path, averaged: bool, step: int) -> dict[str, Any] | None:
    """What the snapshot of `step` holds of the model. averaged: with the averaged weights if it has them.

    None if it is damaged, not there, or that of another step: the rank that was writing it may have died.
    """
    if not path.exists():
        return None
    with suppress(ConfigError):  # a damaged one is in the log
        found = load_first_good([path])
        assert found is not None
        if found[0]["progress"]["step"] == step:
            return trained_weights(found[0], averaged)
        log.warning("no %s: the snapshot of the best evaluation, after step %d, could not be written", BEST, step)
    return None


def trained_weights(saved: dict[str, Any], averaged: bool) -> dict[str, Any]:
    """The model's state dict in a snapshot's contents. averaged: with the averaged weights if it has them."""
    weights: dict[str, Any] = whole(saved["model"] | ((saved["ema"] or {}) if averaged else {}))
    return weights


def is_exported(run_dir: Path, snapshot: Path | None) -> bool:
    """Whether model.pt is there and at least as new as `snapshot`."""
    model = run_dir / LAST
    return model.exists() and (snapshot is None or model.stat().st_mtime >= snapshot.stat().st_mtime)


def remove_unfinished(run_dir: Path) -> None:
    """Delete what a killed process left."""
    for name in (LAST, BEST):
        (run_dir / f"{name}.tmp").unlink(missing_ok=True)
