"""Log files of each rank, and the console of rank 0."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.run_folder import unwritable
from lockstep.errors import CannotStartNow, ConfigError, RanksDiffer, StoppedEarly, TrainingDiverged
from lockstep.failures.record import heartbeat, message_of

log = logging.getLogger(__name__)

FILE_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"


class RankLogs:
    """Where the log lines of this rank go. They are kept in memory until `open` names the run folder."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kept: list[logging.LogRecord] = []
        self.files: list[logging.Handler] = [_KeepingHandler(self.kept)]
        self.console: list[logging.Handler] = []
        if rank == 0:
            console = QuietStreamHandler(sys.stdout)
            console.setFormatter(logging.Formatter("%(message)s"))
            self.console.append(console)

    def open(self, folder: str | Path) -> None:
        """Log to folder/logs/rank<N>.log, and on rank 0 to folder/train.log, also what was logged until now.

        Call it when this run holds the folder: a run that is refused must not write there. Raises CannotStartNow if
        the folder is not writable.
        """
        folder = Path(folder)
        names = [f"logs/rank{self.rank}.log", *(["train.log"] if self.rank == 0 else [])]
        files: list[logging.Handler] = []
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            for name in names:
                files.append(QuietFileHandler(folder / name))
        except OSError as error:
            close_all(files)
            raise CannotStartNow(unwritable(folder, error)) from error
        for file in files:
            file.setFormatter(logging.Formatter(FILE_FORMAT))
        self.files = files
        for record in self.kept:
            for file in self.files:
                file.handle(record)
        _log_to([*self.files, *self.console])

    def leave_console(self) -> None:
        """From here on the lines go to the files alone, or are kept."""
        _log_to(self.files)


class _KeepingHandler(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _log_to(handlers: Sequence[logging.Handler]) -> None:
    root = logging.getLogger()
    for handler in handlers:
        root.addHandler(handler)
    for handler in {*root.handlers} - {*handlers}:
        root.removeHandler(handler)


@contextmanager
def rank_logs() -> Iterator[RankLogs]:
    """Inside the block, this rank's log lines go to files as soon as they are open; on rank 0 also to stdout.

    An exception that ends the block is written to the rank's own log.
    """
    root, logs = logging.getLogger(), RankLogs(read_rank_info().rank)
    handlers, level = [*root.handlers], root.level
    _log_to([*logs.files, *logs.console])
    root.setLevel(logging.INFO)
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
        _log_to(handlers)
        root.setLevel(level)
        close_all([*logs.files, *logs.console])


def close_all(handlers: list[logging.Handler]) -> None:
    for handler in handlers:
        with suppress(OSError):  # the last lines of a log do not fit on a full disk
            handler.close()


class QuietStreamHandler(logging.StreamHandler[Any]):
    """Drops lines that its stream no longer takes. The base class would print a traceback for each such line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """The stream was closed, by the reader (`| head -1`) or by this process, or is a file on a full disk."""
        error = sys.exc_info()[1]
        closed_here = isinstance(error, ValueError) and getattr(self.stream, "closed", False)
        if not isinstance(error, OSError) and not closed_here:
            super().handleError(record)


class QuietFileHandler(WatchedFileHandler):
    """Drops lines that do not fit on a full disk, and makes its file again if that was deleted.

    The base class would print a traceback for each lost line.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")  # a traceback may hold any characters

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # its folder was deleted, too, and is not made again yet; or something else is there
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
