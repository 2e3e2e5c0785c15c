"""How a run compares with the one that made a snapshot: what must be equal to resume, and what has changed."""

import hashlib
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.data.in_memory import InMemoryDataset
from lockstep.errors import ConfigError

log = logging.getLogger(__name__)

TENSOR_ROWS = 64  # sampled of a data set in memory
ITEMS = 16  # sampled of any other data set, where loading an item may take a while
NOT_COMPARED = ("launch.", "hydra.", "sweep.")  # parts of the config that say where a run computes, not what
NOT_COMPARED_KEYS = ("run_dir", "resume", "trainer.pause_after")


def data_fingerprint(dataset: Any) -> str:
    """16 hex digits over the length of a map-style data set and a sample of its content.

    In memory, samples and targets count. Elsewhere only numeric targets do, since random transforms change the inputs.
    An item that cannot be loaded counts as one without a target.
    """
    if isinstance(dataset, InMemoryDataset):
        return _digest(len(dataset.targets), *_sampled_rows(dataset))
    return _digest(len(dataset), str(_numeric_targets(dataset)).encode())


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


def plain_values(flat: dict[str, Any]) -> dict[str, Any]:
    """`flat` with lists, dicts and plain values only, as a snapshot can store it. Other values become text."""
    return {key: _plain_value(value) for key, value in flat.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict):
        return plain_values(value)
    return value if type(value) in (bool, int, float, str, type(None)) else str(value)


def _differences(saved: dict[str, Any], ours: dict[str, Any], here: str) -> list[str]:
    return [
        f"{key} ({saved.get(key, 'nothing')} in the snapshot, {ours.get(key, 'nothing')} {here})"
        for key in sorted({*saved, *ours})
        if key not in saved or key not in ours or saved[key] != ours[key]
    ]


def compared(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a flat config that says what is computed, without where."""
    return {
        key: value for key, value in config.items() if key not in NOT_COMPARED_KEYS and not key.startswith(NOT_COMPARED)
    }


def _digest(length: int, *content: bytes) -> str:
    digest = hashlib.sha256(str(length).encode())
    for part in content:
        digest.update(part)
    return digest.hexdigest()[:16]


def _sampled_rows(dataset: InMemoryDataset) -> Iterator[bytes]:
    rows = torch.tensor(_evenly_spaced(len(dataset.targets), TENSOR_ROWS), dtype=torch.int64)
    for tensor in (dataset.samples, dataset.targets):
        yield f"{tensor.dtype} {list(tensor.shape)}".encode()
        flat = tensor.detach()[rows.to(tensor.device)].cpu().reshape(-1)
        yield flat.view(torch.uint8).numpy().tobytes()


def _evenly_spaced(length: int, count: int) -> list[int]:
    """Up to `count` indices below `length`, evenly spaced, the first included."""
    count = min(count, length)
    return [index * length // count for index in range(count)]


def _numeric_targets(dataset: Any) -> list[float | None]:
    """The targets of a few items; None for a target that is not a number."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):  # a transform may draw random numbers; the run's must not change
            return [_numeric_target(dataset, index) for index in _evenly_spaced(len(dataset), ITEMS)]
    finally:
        random.setstate(state)


def _numeric_target(dataset: Any, index: int) -> float | None:
    try:
        item = dataset[index]
        if not isinstance(item, tuple | list) or not item:
            return None
        target = item[-1]
        if isinstance(target, int | float) or (torch.is_tensor(target) and target.dim() == 0):
            return float(target)
    except Exception:  # the data set's own code: training will show what is wrong
        return None
    return None
