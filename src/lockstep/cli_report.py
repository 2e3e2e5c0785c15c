"""How the error that ends a command is shown, and the exit code that it gives."""

import os
import sys
import time
import traceback
from contextlib import suppress

from lockstep.errors import (
    EXIT_CONFIG,
    EXIT_DIVERGED,
    EXIT_FAILED,
    EXIT_FINISHED,
    ConfigError,
    RanksDiffer,
    TrainingDiverged,
)
from lockstep.failures.causes import LOST_RANK
from lockstep.failures.record import is_communication_error
from lockstep.launchers.base import RankFailed


def exit_code(error: BaseException) -> int:
    """The code of `lockstep.errors` for an error that ends the command."""
    if isinstance(error, SystemExit):
        return EXIT_FAILED if isinstance(error.code, str) else error.code or EXIT_FINISHED
    if isinstance(error, RankFailed):
        return error.code
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    return EXIT_DIVERGED if isinstance(error, TrainingDiverged) else EXIT_FAILED


def show_error(error: BaseException) -> None:
    """Print the error on stderr, a ConfigError as a sentence. If nobody reads stderr any more, the exit code tells."""
    with suppress(OSError, ValueError):
        _print_error(error)


def _print_error(error: BaseException) -> None:
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif isinstance(error, ConfigError):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Rank 0 of this machine usually prints the same sentence, and the launcher then ends this rank.
            time.sleep(1)
        print(f"lockstep: {error}", file=sys.stderr)
    elif isinstance(error, RankFailed):
        if str(error):  # else the monitor prints the report when all ranks have ended
            print(error, file=sys.stderr)
    elif isinstance(error, TrainingDiverged | RanksDiffer):
        print(f"lockstep: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
        if is_communication_error(error) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            print(f"lockstep: {'; '.join(LOST_RANK)}", file=sys.stderr)
