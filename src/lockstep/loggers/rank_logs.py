"""Log files of each rank, and the console of rank 0."""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.run_folder import unwritable
from lockstep.errors import KINDS, ConfigError, StoppedEarly
from lockstep.failures.record import heartbeat, message_of

log = logging.getLogger(__name__)

FILE_FORMAT = logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")


class RankLogs:
    """Inside its block, this rank's log lines go to files once they are open; on rank 0 also to stdout. A line that
    cannot be written, on a full disk or to a reader that is gone, is lost without a word.

    An exception that ends the block is written to the rank's own log.
    """

    def __init__(self) -> None:
        root = logging.getLogger()
        self.rank, self.before = read_rank_info().rank, ([*root.handlers], root.level, logging.raiseExceptions)
        self.files: list[logging.FileHandler] = []
        self.console: list[logging.Handler] = [logging.StreamHandler(sys.stdout)] if self.rank == 0 else []

    def __enter__(self) -> Self:
        log_to([*self.files, *self.console], logging.INFO, False)
        return self

    def open(self, folder: str) -> None:
        """Log to folder/logs/rank<N>.log, and on rank 0 to folder/train.log, when this run holds the folder: one that
        is refused must not write there. Raises ConfigError if the folder is not writable."""
        names = [f"logs/rank{self.rank}.log", *["train.log"] * (self.rank == 0)]
        try:
            Path(folder, "logs").mkdir(parents=True, exist_ok=True)
            # A traceback may hold any characters.
            self.files = [logging.FileHandler(f"{folder}/{name}", "a", "utf-8", False, "replace") for name in names]
        except OSError as error:
            raise ConfigError(unwritable(folder, error)) from error
        for file in self.files:
            file.setFormatter(FILE_FORMAT)
        log_to([*self.files, *self.console], logging.INFO, False)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StoppedEarly):
            log.info("%s", error)
        elif isinstance(error, Exception):
            heartbeat.fails(error)  # before the log has the traceback, which the report need not repeat
            # The process that started the ranks prints it on the console.
            log_to(self.files or [logging.NullHandler()], logging.INFO, False)
            log.error("%s", message_of(error), exc_info=None if isinstance(error, tuple(KINDS)) else error)
        log_to(*self.before)
        for handler in (*self.files, *self.console):
            with suppress(OSError):  # the last lines of a log do not fit on a full disk
                handler.close()


def log_to(handlers: Sequence[logging.Handler], level: int, raises: bool) -> None:
    """What logging.basicConfig sets, without closing the handlers of before."""
    root, logging.raiseExceptions = logging.getLogger(), raises
    root.handlers[:] = handlers
    root.setLevel(level)
