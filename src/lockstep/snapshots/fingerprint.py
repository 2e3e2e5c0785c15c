"""How a run compares with the one that made a snapshot: what must be equal to resume, and what has changed."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.text import differing

log = logging.getLogger(__name__)

NOT_COMPARED = ("launch.", "hydra.", "sweep.", "mode.")  # parts of the config that say where a run computes, not what
NOT_COMPARED_KEYS = ("run_dir", "resume", "trainer.pause_after")


def check_fingerprint(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
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
    differences = _differences(of_model, ours, "here")
    if differences:
        raise ConfigError(
            f"{path} is of another model: {'; '.join(differences)}; type a data set with the shape and the classes "
            f"of the trained one's, and no model="
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
        key: value for key, value in config.items() if key not in NOT_COMPARED_KEYS and not key.startswith(NOT_COMPARED)
    }
