"""An exception as a record for the failure report: its type, the line of the user's code, the operation, the shapes."""

import linecache
import re
import traceback
from itertools import dropwhile
from types import FrameType, TracebackType
from typing import Any

from lockstep.errors import ConfigError, RanksDiffer, StoppedEarly, TrainingDiverged, printable
from lockstep.source_code import is_library, is_project, is_users

LONGEST_MESSAGE = 4000  # characters
LOG_LINES = 20
_OF_WORKER = "Original Traceback"  # torch's words before the traceback of an exception in a DataLoader worker
_FRAME_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def exception_record(error: BaseException) -> dict[str, Any]:
    """What the failure report needs to know of `error`, as JSON values."""
    while type(error).__name__ == "InstantiationException" and error.__cause__ is not None:
        error = error.__cause__  # Hydra wraps what a class of the user's raises
    return {
        "kind": _kind(error),
        "type": type(error).__name__,
        "message": message_of(error),
        "is_local": is_local(error),
        **(_place_in_text(_text(error)) or _place(_traceback_of_user(error))),
    }


def message_of(error: BaseException) -> str:
    """At most LONGEST_MESSAGE characters that a terminal and a file can show."""
    text = _text(error)
    if _OF_WORKER in text:
        text = _words_of_worker(text, type(error).__name__)
    return printable(text[:LONGEST_MESSAGE], kept="\n\t")


def _words_of_worker(text: str, name: str) -> str:
    """What a DataLoader worker's exception says, without the traceback that torch puts before it.

    name: of its type, which is not repeated.
    """
    lines = text.splitlines()
    last_frame = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=0)
    said = list(dropwhile(lambda line: line.startswith("    "), lines[last_frame + 1 :]))  # the line of code
    return re.sub(rf"^(\w+\.)*{name}: ", "", "\n".join(said)) if said else text


def is_local(error: BaseException) -> bool:
    """Whether neither torch nor this project has raised it, so that it tells nothing of another rank."""
    if error.__cause__ is not None:
        return is_local(error.__cause__)
    if _OF_WORKER in _text(error):  # a DataLoader worker has raised it
        return True
    if type(error).__module__.startswith("torch") or "gloo/" in _text(error):
        return False
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and not is_project(files[-1]) and not ("/torch/" in files[-1] and is_library(files[-1]))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's may fail to describe itself
        return "(no message)"


def _kind(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return "config"
    if isinstance(error, TrainingDiverged):
        return "diverged"
    if isinstance(error, RanksDiffer):
        return "different"
    return "stopped" if isinstance(error, StoppedEarly) else "exception"


def _traceback_of_user(error: BaseException) -> TracebackType | None:
    """That of `error`. That of its cause if the user's code raised this one, or called sys.exit()."""
    cause = error.__cause__
    if cause is None or _runs_users_code(error.__traceback__):
        return error.__traceback__
    is_theirs = isinstance(cause, SystemExit) or _runs_users_code(cause.__traceback__)
    return cause.__traceback__ if is_theirs else error.__traceback__


def _runs_users_code(trace: TracebackType | None) -> bool:
    return any(is_users(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace))


def _place(trace: TracebackType | None) -> dict[str, Any]:
    """The innermost line of the user's code; of this project's if there is none; else the innermost of all."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    if not entries:
        return {}
    chosen = max(enumerate(entries), key=lambda item: (_owner(item[1].tb_frame.f_code.co_filename), item[0]))[1]
    frame = chosen.tb_frame
    operation = _operation(chosen)
    return {
        "file": frame.f_code.co_filename,
        "line": chosen.tb_lineno,
        "function": frame.f_code.co_name,
        "code": linecache.getline(frame.f_code.co_filename, chosen.tb_lineno).strip(),
        "operation": operation,
        "operands": _operands(operation, frame),
    }


def _place_in_text(message: str) -> dict[str, Any] | None:
    """The place that a DataLoader worker's exception has in the text that torch makes of it."""
    if _OF_WORKER not in message:
        return None
    frames = _FRAME_IN_TEXT.findall(message)
    if not frames:
        return None
    file, line, function, code = max(enumerate(frames), key=lambda item: (_owner(item[1][0]), item[0]))[1]
    return {"file": file, "line": int(line), "function": function, "code": code, "operation": code, "operands": {}}


def _owner(file: str) -> int:
    """2 for the user's code, 1 for this project's, 0 for libraries."""
    if is_users(file):
        return 2
    return 1 if is_project(file) else 0


def _operation(trace: TracebackType) -> str:
    """The expression that failed, by the positions that Python 3.11 keeps of each instruction."""
    code = trace.tb_frame.f_code
    positions = list(code.co_positions())
    first, last, start, end = positions[trace.tb_lasti // 2]
    line = linecache.getline(code.co_filename, trace.tb_lineno)
    if first is None or first != last or start is None or end is None:
        return line.strip()
    return line.encode()[start:end].decode(errors="replace")


def _operands(operation: str, frame: FrameType) -> dict[str, str]:
    """{name: "(32, 64) float32" or "Linear(in_features=64, ...)"} of the tensors and modules in `operation`."""
    found = {}
    for name in dict.fromkeys(_NAME.findall(operation)):
        first, *rest = name.split(".")
        value = frame.f_locals.get(first)
        try:
            for attribute in rest:
                value = getattr(value, attribute)
            text = _describe(value)
        except Exception:  # the report must not fail on a property of the user's
            continue
        if text is not None:
            found[name] = text
    return found


def _describe(value: Any) -> str | None:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if hasattr(value, "extra_repr") and not isinstance(value, type):
        return f"{type(value).__name__}({value.extra_repr()})"
    return None


def last_lines(path: str | None, count: int = LOG_LINES) -> list[str]:
    """The last lines of a log file, none if it cannot be read."""
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2**15))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
