"""A sweep while it runs: its folder is locked, its record is checked, and its table is open."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.signals import stop_listening
from lockstep.failures.start import whole_command
from lockstep.sweeps.folder import check_record, lock_sweep, read_code, write_record
from lockstep.sweeps.left_rows import left_by_earlier
from lockstep.sweeps.summary import exit_code, print_share, print_summary, resume_words
from lockstep.sweeps.table import RUNNING, STOPPED, SweepTable


@dataclass(frozen=True)
class SweepSettings:
    """The section `sweep` of the config, and what a sweep needs to know of the rest. mode: "min" or "max".

    epochs: of a job.
    """

    retry: str | None
    max_failures: int | None
    slots: int | str
    changes: str
    search: str
    eta: int
    first_rung: int
    trials: int | None
    seed: int
    constraints: list[str]
    objective: str
    mode: str
    epochs: int


class OpenSweep:
    """fixed: the words of each job's command. config: the flat config of a job without what the sweep varies.

    modules: {module: hash} of the user's modules that the jobs import. Raises ConfigError if the folder cannot be
    locked, or if its sweep is another one.
    """

    def __init__(
        self,
        folder: Path,
        settings: SweepSettings,
        fixed: Sequence[str],
        config: Mapping[str, Any],
        modules: dict[str, str],
    ) -> None:
        self.settings, self.fixed = settings, fixed
        self.lock = lock_sweep(folder)
        code = read_code(modules)
        check_record(folder, dict(config), code, settings.changes == "accept")
        self.table = SweepTable(folder)
        write_record(folder, sys.argv[1:], dict(config), code)
        for row in self.table:
            if row.state in (RUNNING, STOPPED):
                values = left_by_earlier(row, folder / row.folder) | self.table.read_best(row.number)
                self.table.update(row.number, **values)
        self.stop_code: int | None = None  # of the jobs that a signal has kept from their end
        self.failures = 0  # jobs that have failed in this command

    @property
    def is_hopeless(self) -> bool:
        """Whether `sweep.max_failures` jobs have failed."""
        return self.settings.max_failures is not None and self.failures >= self.settings.max_failures

    def finish(self) -> int:
        """Print the summary. Returns the exit code."""
        stop_listening()  # the sweep is over, and nothing is left to save
        words = whole_command(read_rank_info().started_by)
        script = words[: 1 + next((index for index, word in enumerate(words) if word.endswith("train.py")), 1)]
        resume = resume_words(script, self.table.folder)
        print_summary(self.table, self.settings.objective, self.settings.mode, [*script, *self.fixed], resume)
        print_share(self.table, self.settings.epochs)
        return exit_code(list(self.table), self.stop_code)
