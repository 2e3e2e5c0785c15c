"""Errors that end a run, the exit codes of `src/train.py`, and what is in messages. `cli.exit_codes` shows an error."""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

EXIT_FINISHED = 0
EXIT_FAILED = 1  # an exception
EXIT_CONFIG = 2  # what the user can mend: the command, the config, the data or the run folder; see ConfigError
EXIT_HANG = 4  # no progress, or ranks that make different collective calls
EXIT_RESUMABLE = 75  # stopped early with a good snapshot. Slurm requeues a job only if it does not exit with 0
EXIT_STOPPED_WITHOUT_SNAPSHOT = 76  # stopped early, and the last step is in no snapshot; an older snapshot may exist
EXIT_INTERRUPTED = 130  # 128 + SIGINT: Ctrl-C before training, or a second one
STOP_EXITS = (EXIT_RESUMABLE, EXIT_STOPPED_WITHOUT_SNAPSHOT, EXIT_INTERRUPTED)  # after a signal
EXIT_CODES: tuple[int, ...] = (0, 1, 2, 4, 75, 76, 130)  # of a command


class ConfigError(Exception):
    """The user's input cannot work. The message is one sentence that ends in what to type; no traceback is shown. Lines
    below it are a library's own text."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence, "\n"))


class RankMissing(ConfigError, TimeoutError):
    """A rank did not come to the rendezvous within backend.timeout."""


class TrainingDiverged(Exception):
    """A loss, a gradient or a weight is not finite. what: the first words, with the step. advice: what to type."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}; {advice}" if advice else what)


class RanksDiffer(Exception):
    """Ranks that must hold the same weights do not. The message says which rank and which weights."""


class RankFailed(Exception):
    """A rank has failed: one that this process started, or the process itself where something else started it. screen:
    the failure report, empty if another rank prints it. report: of failure.json, as far as it is known."""

    def __init__(self, screen: str, report: dict[str, Any]) -> None:
        super().__init__(screen)
        self.report = report


class StoppedEarly(BaseException):
    """A signal asked the run to stop. The message says where it can go on. It is no Exception, as KeyboardInterrupt is
    none: it must end a whole sweep, not one job of it."""

    def __init__(self, message: str, code: int = EXIT_RESUMABLE) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def exits_are_failures(what: str) -> Iterator[None]:
    """In the block a sys.exit of the user's code is an error, whatever its code. what: the first words of it."""
    try:
        yield
    except SystemExit as error:
        how = error.code if isinstance(error.code, str) else f"exit code {error.code or 0}"
        raise Exception(f"{what}: {how}") from error  # no RuntimeError, which may be an echo


# The kinds of failures, as failure.json has them, and their exit codes.
KINDS: dict[type[Exception], str] = {ConfigError: "config", TrainingDiverged: "diverged", RanksDiffer: "different"}
RAISED_BY_ALL = tuple(KINDS.values())  # by all ranks alike, with a message that says what to type
KIND_CODES = {"config": EXIT_CONFIG, "hang": EXIT_HANG}  # of others EXIT_FAILED


def kind_of(error: BaseException) -> str:
    """The kind of the failure that an exception of a rank is."""
    return next((kind for of_type, kind in KINDS.items() if isinstance(error, of_type)), "exception")


def exit_code_of(error: BaseException) -> int:
    """The exit code of a run, or of a command, that `error` has ended."""
    if isinstance(error, StoppedEarly):
        return error.code
    if isinstance(error, RankFailed):
        return int(error.report.get("exit_code", EXIT_FAILED))
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else KIND_CODES.get(kind_of(error), EXIT_FAILED)


def show(value: object) -> str:
    """A value on one line, as it is typed on the command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return "".join(character if character.isprintable() else " " for character in text)


def first_line(error: BaseException) -> str:
    """Of an error's words; its type's name if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def differing(a: Mapping[str, Any], b: Mapping[str, Any], missing: Any = None) -> dict[str, tuple[Any, Any]]:
    """{key: (value in a, value in b)}, sorted, where they differ. missing: stands for a value that is not there."""
    keys = [key for key in sorted({*a, *b}) if key not in a or key not in b or a[key] != b[key]]
    return {key: (a.get(key, missing), b.get(key, missing)) for key in keys}


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table with two blanks between its columns. right: the columns of numbers, by their places."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if place in right else "<" for place in range(len(widths))]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*cells).rstrip() for cells in rows]


def print_line(text: object, stream: TextIO) -> None:
    """Print a line at once. A stream whose reader has gone, as in `| head`, costs the line and not the run."""
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def first_of(names: Sequence[object], most: int = 4) -> str:
    """The names, at most so many of them: "a, b and 3 more"."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def printable(text: str, kept: str = "") -> str:
    """`text` with escapes in place of characters that a terminal does not print, except those of `kept`."""
    return "".join(one if one.isprintable() or one in kept else one.encode("unicode_escape").decode() for one in text)


def path_value(path: str | Path) -> str:
    """A path as the value of a word to type, such as resume=: in quotes if Hydra might read it as something else."""
    from hydra.core.override_parser.types import Quote, QuotedString

    text = str(path)
    is_name = re.fullmatch(r"([A-Za-z/]|\.\.?/)[\w./@%+-]*", text, re.ASCII)  # 1_5 would be the number 15
    is_word = text.lower() in ("null", "true", "false", "nan", "inf")
    return text if is_name and not is_word else QuotedString(text, Quote.double).with_quotes()


def go_on_words(folder: str | Path) -> str:
    """What to add to the command, in a shell, to go on in the run folder."""
    return shlex.quote(f"hydra.run.dir={path_value(folder)}")
