"""Log files of each rank, and the console of rank 0."""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import MemoryHandler, WatchedFileHandler
from pathlib import Path
from types import TracebackType
from typing import Self

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.run_folder import unwritable
from lockstep.errors import KINDS, CannotStartNow, StoppedEarly
from lockstep.failures.record import heartbeat, message_of

log = logging.getLogger(__name__)

FILE_FORMAT = logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
KEPT = 10_000  # lines before the files are open


class LogFile(WatchedFileHandler):
    """It makes its file again if that was deleted. What cannot be written, to a folder that is gone, is lost."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)


class RankLogs:
    """Inside its block, this rank's log lines go to files as soon as they are open; on rank 0 also to stdout. A line
    that cannot be written, on a full disk or to a reader that is gone, is lost without a word.

    An exception that ends the block is written to the rank's own log.
    """

    def __init__(self) -> None:
        root = logging.getLogger()
        self.rank, self.before = read_rank_info().rank, ([*root.handlers], root.level, logging.raiseExceptions)
        self.kept = MemoryHandler(KEPT, logging.CRITICAL + 1, flushOnClose=False)
        self.files: list[logging.Handler] = [self.kept]
        self.console: list[logging.Handler] = [logging.StreamHandler(sys.stdout)] if self.rank == 0 else []

    def __enter__(self) -> Self:
        log_to([*self.files, *self.console], logging.INFO, False)
        return self

    def open(self, folder: str | Path) -> None:
        """Log to folder/logs/rank<N>.log, and on rank 0 to folder/train.log, also what was logged until now.

        Call it when this run holds the folder: a run that is refused must not write there. Raises CannotStartNow if
        the folder is not writable.
        """
        folder, names = Path(folder), [f"logs/rank{self.rank}.log", *["train.log"] * (self.rank == 0)]
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            # A traceback may hold any characters.
            self.files = [LogFile(folder / name, encoding="utf-8", errors="backslashreplace") for name in names]
        except OSError as error:
            raise CannotStartNow(unwritable(folder, error)) from error
        for file in self.files:
            file.setFormatter(FILE_FORMAT)
            for record in self.kept.buffer:
                file.handle(record)
        log_to([*self.files, *self.console], logging.INFO, False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StoppedEarly):
            log.info("%s", error)
        elif isinstance(error, Exception):
            heartbeat.fails(error)  # before the log has the traceback, which the report need not repeat
            log_to(self.files, logging.INFO, False)  # the process that started the ranks prints it on the console
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
