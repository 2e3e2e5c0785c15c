"""Log files of each rank, and the console of rank 0."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, StoppedEarly, TrainingDiverged

log = logging.getLogger(__name__)

FILE_FORMAT = "[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"


@contextmanager
def rank_logs(folder: str | Path, rank: int) -> Iterator[None]:
    """Inside the block, every rank logs to folder/logs/rank<N>.log; rank 0 also to folder/train.log and to stdout.

    An exception that ends the block is written to the rank's own log. Raises ConfigError if the folder is not writable.
    """
    root, handlers = logging.getLogger(), open_handlers(Path(folder), rank)
    before = root.handlers, root.level
    root.handlers, root.level = handlers, logging.INFO
    try:
        yield
    except StoppedEarly as stopped:
        log.info("%s", stopped)
        raise
    except Exception as error:
        # Not on the console: the process that started the ranks prints the error there.
        root.handlers = [handler for handler in handlers if isinstance(handler, logging.FileHandler)]
        log.error("%s", error, exc_info=not isinstance(error, (ConfigError, TrainingDiverged)))
        raise
    finally:
        root.handlers, root.level = before
        close_all(handlers)


def open_handlers(folder: Path, rank: int) -> list[logging.Handler]:
    """The handlers of this rank. Creates the folder. Raises ConfigError if that fails."""
    handlers: list[logging.Handler] = []
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        handlers.append(QuietFileHandler(folder / "logs" / f"rank{rank}.log"))
        if rank == 0:
            handlers.append(QuietFileHandler(folder / "train.log"))
    except OSError as error:
        close_all(handlers)
        raise ConfigError(
            f"cannot write to the run folder {folder} ({error.strerror or error}); "
            "type hydra.run.dir=<a folder you can write to>"
        ) from error
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FILE_FORMAT))
    if rank == 0:
        console = QuietStreamHandler(sys.stdout)
        console.setFormatter(logging.Formatter("%(message)s"))
        handlers.append(console)
    return handlers


def close_all(handlers: list[logging.Handler]) -> None:
    for handler in handlers:
        with suppress(OSError):  # the last lines of a log do not fit on a full disk
            handler.close()


class QuietStreamHandler(logging.StreamHandler[Any]):
    """Drops lines that its stream no longer takes. The base class would print a traceback for each such line."""

    def handleError(self, record: logging.LogRecord) -> None:
        """The stream was closed: by the reader (`| head -1`) or by this process."""
        error = sys.exc_info()[1]
        closed_here = isinstance(error, ValueError) and getattr(self.stream, "closed", False)
        if not isinstance(error, BrokenPipeError) and not closed_here:
            super().handleError(record)


class QuietFileHandler(logging.FileHandler):
    """Drops lines that do not fit on a full disk. The base class would print a traceback for each such line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
