"""digests.bin: reads it, and finds the first step at which two runs part.

A line of JSON with the names, then rows of 64-bit numbers: the step, and a digest for each name.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError, first_of

NAME = "digests.bin"
LOSS, GRADIENT = "loss", "gradient of "
NAMED = 5  # tensors in a sentence


@dataclass(frozen=True)
class StepTable:
    """names: what a row has a digest of. rows: {step: digests}, in the order of steps."""

    names: list[str]
    rows: Mapping[int, Sequence[int]]


def row_bytes(names: int) -> int:
    """The length of a row."""
    return 8 * (names + 1)


def read_digests(folder: Path) -> StepTable | None:
    """What trainer.digest has left in a run folder. None without the file. Raises ConfigError for a damaged one."""
    path = folder / NAME
    if not path.exists():
        return None
    with open(path, "rb") as file:
        try:
            names = list(json.loads(file.readline())["names"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is damaged: its first line has no names; type rm {path}") from None
        content = file.read()
    width = len(names) + 1
    numbers = array("q", content[: len(content) // row_bytes(len(names)) * row_bytes(len(names))])  # a kill cuts a row
    rows = {numbers[start]: numbers[start + 1 : start + width] for start in range(0, len(numbers), width)}
    return StepTable(names, rows)


def steps_of(path: Path) -> list[int]:
    """The steps of a file's whole rows."""
    table = read_digests(path.parent)
    return [] if table is None else list(table.rows)


def first_difference(one: StepTable, other: StepTable, with_loss: bool) -> str:
    """The sentence about the first step at which two runs have other digests, and the tensors that differ there.

    with_loss: False if rank 0 had other samples in the two runs, as with other numbers of ranks.
    """
    names = [name for name in one.names if name in other.names and (with_loss or name != LOSS)]
    if len(names) <= 1:
        return "the models have no weights of the same names, so their digests cannot be compared"
    pairs = [(one.names.index(name), other.names.index(name)) for name in names]
    steps = [step for step in one.rows if step in other.rows]
    if one.rows and other.rows and (max(one.rows) < min(other.rows) or max(other.rows) < min(one.rows)):
        a, b = (f"{min(table.rows)} to {max(table.rows)}" for table in (one, other))
        return f"no step is in both: A has digests of the steps {a}, and B of the steps {b}"
    if not steps:
        return "no step has digests in both; type the same trainer.digest= in both"
    before = None
    for step in steps:
        first, second = one.rows[step], other.rows[step]
        differing = [name for name, (i, j) in zip(names, pairs, strict=True) if first[i] != second[j]]
        if differing:
            return _describe(step, before, names, differing)
        before = step
    return f"all digests are the same, of {len(steps)} steps from {steps[0]} to {steps[-1]}"


def _describe(step: int, before: int | None, names: list[str], differing: list[str]) -> str:
    gradients = [name for name in differing if name.startswith(GRADIENT)]
    weights = [name for name in differing if name != LOSS and name not in gradients]
    if differing[0] == LOSS and not gradients:
        what = "the loss differs"
    elif differing[0] == LOSS:
        what = f"the loss differs, and {first_of(gradients, NAMED)}"
    elif gradients:
        what = f"the loss is the same, and {first_of(gradients, NAMED)} {_verb(gradients)}"
    else:
        what = (
            f"the loss and all gradients are the same, and after the update {first_of(weights, NAMED)} {_verb(weights)}"
        )
        all_weights = [name for name in names if name != LOSS and not name.startswith(GRADIENT)]
        what += f" ({len(weights)} of {len(all_weights)} weights and buffers)"
    sentence = f"the runs part at step {step}: {what}"
    if before is not None and step - before > 1:
        sentence += f"; the digests of step {before} are the same, and the steps between have none: "
        sentence += "type trainer.digest=1 in both runs for the exact step"
    elif before is None and step > 1:
        sentence += f"; this is the first step with digests: it may be one of 1 to {step}; "
        sentence += "type trainer.digest=1 in both runs for the exact step"
    return sentence


def _verb(names: list[str]) -> str:
    return "differs" if len(names) == 1 else "differ"
