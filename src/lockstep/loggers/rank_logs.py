"""Log files of each rank, and the console of rank 0."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler, WatchedFileHandler
from pathlib import Path

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.run_folder import unwritable
from lockstep.errors import CannotStartNow, ConfigError, RanksDiffer, StoppedEarly, TrainingDiverged
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
    """Where the log lines of this rank go: they are kept in memory until `open`, and on rank 0 also shown."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kept = MemoryHandler(KEPT, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
        self.files: list[logging.Handler] = [self.kept]
        self.console: list[logging.Handler] = [logging.StreamHandler(sys.stdout)] if rank == 0 else []
        log_to([*self.files, *self.console])

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
        log_to([*self.files, *self.console])

    def leave_console(self) -> None:
        """From here on the lines go to the files alone, or are kept."""
        log_to(self.files)


def log_to(handlers: Sequence[logging.Handler]) -> None:
    root = logging.getLogger()
    for handler in {*root.handlers} - {*handlers}:
        root.removeHandler(handler)
    for handler in handlers:
        root.addHandler(handler)


@contextmanager
def rank_logs() -> Iterator[RankLogs]:
    """Inside the block, this rank's log lines go to files as soon as they are open; on rank 0 also to stdout. A line
    that cannot be written, on a full disk or to a reader that is gone, is lost without a word.

    An exception that ends the block is written to the rank's own log.
    """
    root = logging.getLogger()
    before = [*root.handlers], root.level, logging.raiseExceptions
    logs = RankLogs(read_rank_info().rank)
    root.setLevel(logging.INFO)
    logging.raiseExceptions = False
    try:
        yield logs
    except StoppedEarly as stopped:
        log.info("%s", stopped)
        raise
    except Exception as error:
        heartbeat.fails(error)  # before the log has the traceback, which the report need not repeat
        logs.leave_console()  # the process that started the ranks prints the error there
        log.error("%s", message_of(error), exc_info=not isinstance(error, ConfigError | TrainingDiverged | RanksDiffer))
        raise
    finally:
        log_to(before[0])
        root.setLevel(before[1])
        logging.raiseExceptions = before[2]
        for handler in (*logs.files, *logs.console):
            with suppress(OSError):  # the last lines of a log do not fit on a full disk
                handler.close()
