"""What a sweep shows at its end: the table sorted by objective, the causes of failures, and what to type next."""

import math
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import EXIT_FINISHED, EXIT_JOBS_FAILED, EXIT_RESUMABLE, path_value, path_word
from lockstep.sweeps.halving import read_results
from lockstep.sweeps.output import show
from lockstep.sweeps.plot import PLOT, plot_sweep
from lockstep.sweeps.table import FAILED, FINISHED, PRUNED, REFUSED, STATES, SUBMITTED, TABLE, Row, SweepTable
from lockstep.text import aligned

SHOWN = 40  # rows on the console
CAUSE = 100  # characters of a cause on the console
ORDER = (FINISHED, "pruned", "running", "stopped", "waiting", FAILED)


def sorted_rows(table: SweepTable, mode: str) -> list[Row]:
    """The finished rows first, best first, and the failed ones last. mode: "min" or "max"."""
    sign = -1 if mode == "max" else 1

    def place(row: Row) -> tuple[int, float, int]:
        value = row.best if row.objective is None else row.objective
        is_known = value is not None and not math.isnan(value)
        return ORDER.index(row.state), sign * value if is_known and value is not None else math.inf, row.number

    return sorted(table, key=place)


def print_summary(table: SweepTable, objective: str, mode: str, command: Sequence[str], resume: Sequence[str]) -> None:
    """command: the words of one run without what the sweep varies. resume: those that go on with this sweep."""
    rows = sorted_rows(table, mode)
    counts = [f"{count} {state}" for state in STATES if (count := sum(row.state == state for row in rows))]
    show(f"\nsweep: {', '.join(counts)}; {TABLE} in {table.folder.absolute()}")
    for line in _table(rows[:SHOWN], objective):
        show(line)
    if len(rows) > SHOWN:
        show(f"... and {len(rows) - SHOWN} more in {TABLE}")
    best = rows[0] if rows and rows[0].state == FINISHED else None
    if best is not None:
        show(f"best:       job {best.number}, {table.folder / best.folder}")
        _show_plot(table.folder, rows, objective, best)
        show(f"run it again: {shlex.join(command)} {best.overrides}".rstrip())
    if any(row.state not in (FINISHED, "pruned", FAILED) for row in rows):
        show(f"go on with: {shlex.join(resume)}")
    if any(row.state == FAILED and not row.cause.startswith(REFUSED) for row in rows):
        show(f"run what failed again: {shlex.join([*resume, 'sweep.retry=failed'])}")
    show(f"curves:     tensorboard --logdir {table.folder.absolute()}")


def _show_plot(folder: Path, rows: Sequence[Row], objective: str, best: Row) -> None:
    try:
        if plot_sweep(folder, rows, objective, best.number):
            show(f"plot:       {folder / PLOT}")
    except OSError as error:
        typed = path_word("sweep.resume", folder)
        show(f"plot:       {PLOT} cannot be written ({error.strerror}); to draw it, type -m {typed}")


def print_share(table: SweepTable, epochs: int) -> None:
    """After a search by halving: the share of all training that it took. epochs: of a whole job."""
    trained = [max(read_results(row), default=0) for row in table]
    if any(trained):
        share = sum(trained) / (epochs * len(trained))
        show(f"trained:    {sum(trained)} epochs, {share:.2f} of the {epochs * len(trained)} of all jobs")


def _table(rows: Sequence[Row], objective: str) -> list[str]:
    cells = [("job", "state", objective, "best", "at step", "seconds", "overrides")]
    cells += [
        (
            str(row.number),
            row.state,
            _number(row.objective),
            _number(row.best),
            "" if row.best_step is None else str(row.best_step),
            f"{row.seconds:.1f}",
            _with_cause(row),
        )
        for row in rows
    ]
    return [f"  {line}" for line in aligned(cells)]


def _with_cause(row: Row) -> str:
    if not row.cause:
        return row.overrides
    return f"{row.overrides}   {textwrap.shorten(row.cause, CAUSE, placeholder=' ...')}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def exit_code(rows: Sequence[Row], stop_code: int | None) -> int:
    """The exit code of the whole sweep: 0 only if every job has finished, or was submitted and is not waited for.

    stop_code: of jobs that a signal stopped.
    """
    if stop_code is not None:
        return stop_code
    states = {row.state for row in rows if row.cause != SUBMITTED}
    if FAILED in states:
        return EXIT_JOBS_FAILED
    return EXIT_FINISHED if states <= {FINISHED, PRUNED} else EXIT_RESUMABLE


def resume_words(script: Sequence[str], folder: Path) -> list[str]:
    """The command that goes on with the sweep in `folder`. script: such as python src/train.py."""
    return [*script, "-m", f"sweep.resume={path_value(folder)}"]
