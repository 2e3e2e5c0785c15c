"""An exception as a record for the failure report: its type, the line of the user's code, the operation, the shapes."""

import linecache
import re
import sys
import traceback
from itertools import dropwhile
from types import FrameType, TracebackType
from typing import Any

from lockstep.compat import BACKWARD, CALLED_OPERATOR, GENERATED
from lockstep.errors import ConfigError, kind_of, printable
from lockstep.source_code import PROJECT, is_library, is_project, is_users

LONGEST_MESSAGE = 4000  # characters
LOG_LINES = 20
PASSES_ON = "__torch_function__"  # of a mode, which sees each operation of a forward pass
COMPUTING = tuple(f"{PROJECT}/{package}/" for package in ("models", "tasks", "data"))  # no rank waits for others there
_OF_WORKER = "Original Traceback"  # torch's words before the traceback of an exception in a DataLoader worker
_FRAME_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def exception_record(error: BaseException) -> dict[str, Any]:
    """What the failure report needs to know of `error`, as JSON values."""
    while _is_wrapper(error) and error.__cause__ not in (None, error):
        error = error.__cause__
    return {
        "kind": kind_of(error),
        "type": type(error).__name__,
        "message": message_of(error),
        "is_communication": is_communication_error(error),
        **_place(error),
    }


def _is_wrapper(error: BaseException) -> bool:
    """Whether Hydra, or torch's pipeline, has made `error` of what a class of the user's raised."""
    entries = _entries(error.__traceback__)
    is_of_pipeline = bool(entries) and "/torch/distributed/pipelining/" in _file(entries[-1])
    return type(error).__name__ == "InstantiationException" or is_of_pipeline


def is_communication_error(error: BaseException) -> bool:
    """Whether `error` can come from the loss of another rank: it was raised where a rank waits for others.

    By its type and by the frame that raised it, not by its words: torch's own errors of communication; a broken
    connection, a timeout or a plain RuntimeError of C++ in torch.distributed, in a backward pass, in which torch
    averages gradients, in compiled code, in a `wait()`, or in this project's own code. A RuntimeError there may be a
    mistake of this rank alone, so the time decides, see `lockstep.failures.causes.first_to_fail`. An error while such a
    one is handled counts, too.
    """
    before: BaseException | None = error
    seen: set[int] = set()  # `raise error from error` is a chain without an end
    while before is not None and id(before) not in seen and not isinstance(before, ConfigError):  # it says what to type
        if _is_from_communication(before):
            return True
        seen.add(id(before))
        before = before.__cause__ or before.__context__
    return False


def _is_from_communication(error: BaseException) -> bool:
    """As `is_communication_error`, without what `error` was raised from."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, getattr(distributed, "DistError", ())):
        return True
    if type(error) is not RuntimeError and not isinstance(error, ConnectionError | TimeoutError):
        return False
    # Of code such as Python's socket.py it matters who has called it.
    entries = [entry for entry in _entries(error.__traceback__) if not _file(entry).endswith(CALLED_OPERATOR)]
    entries = [entry for entry in entries if "/torch/" in _file(entry) or not is_library(_file(entry))]
    if not entries:
        return False
    file = _file(entries[-1])
    if GENERATED in file:
        return True
    if is_library(file):
        is_backward = entries[-1].tb_frame.f_code.co_name == BACKWARD
        return is_backward or "/torch/distributed/" in file or "/torch/nn/parallel/" in file
    if is_project(file):
        return not file.startswith(COMPUTING)
    return _operation(entries[-1]).endswith(".wait()")


def message_of(error: BaseException) -> str:
    """At most LONGEST_MESSAGE characters that a terminal and a file can show."""
    text = _text(error)
    if _OF_WORKER in text:  # without the traceback that torch puts before it, and without the type, which is known
        lines = text.splitlines()
        last_frame = max((number for number, line in enumerate(lines) if line.startswith('  File "')), default=0)
        words = list(dropwhile(lambda line: line.startswith("    "), lines[last_frame + 1 :]))  # after a line of code
        text = re.sub(rf"^(\w+\.)*{type(error).__name__}: ", "", "\n".join(words)) if words else text
    return printable(text[:LONGEST_MESSAGE], kept="\n\t")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's may fail to describe itself
        return "(no message)"


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    """The frames from the outermost to the one that raised, but for those that pass on what another line has called."""
    entries = []
    while trace is not None:
        if trace.tb_frame.f_code.co_name != PASSES_ON or not is_project(_file(trace)):
            entries.append(trace)
        trace = trace.tb_next
    return entries


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def _runs_users_code(trace: TracebackType | None) -> bool:
    return any(is_users(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace))


def _owner(file: str) -> int:
    """2 for the user's code, 1 for this project's, 0 for libraries."""
    return 2 if is_users(file) else int(is_project(file))


def _place(error: BaseException) -> dict[str, Any]:
    """The innermost line of the user's code; of this project's if there is none; else the innermost of all."""
    text, trace, cause = _text(error), error.__traceback__, error.__cause__
    if _OF_WORKER in text and (frames := _FRAME_IN_TEXT.findall(text)):  # torch keeps its traceback as text only
        file, line, function, code = max(enumerate(frames), key=lambda item: (_owner(item[1][0]), item[0]))[1]
        return {"file": file, "line": int(line), "function": function, "code": code, "operation": code, "operands": {}}
    is_users_cause = isinstance(cause, SystemExit) or (cause is not None and _runs_users_code(cause.__traceback__))
    if cause is not None and is_users_cause and not _runs_users_code(trace):
        trace = cause.__traceback__
    entries = _entries(trace)
    if not entries:
        return {}
    chosen = max(enumerate(entries), key=lambda item: (_owner(_file(item[1])), item[0]))[1]
    frame, operation = chosen.tb_frame, _operation(chosen)
    return {
        "file": _file(chosen),
        "line": chosen.tb_lineno,
        "function": frame.f_code.co_name,
        "code": linecache.getline(_file(chosen), chosen.tb_lineno).strip(),
        "operation": operation,
        "operands": _operands(operation, frame),
    }


def _operation(entry: TracebackType) -> str:
    """The expression that failed, by the positions that Python 3.11 keeps of each instruction."""
    code = entry.tb_frame.f_code
    first, last, start, end = list(code.co_positions())[entry.tb_lasti // 2]
    line = linecache.getline(code.co_filename, entry.tb_lineno)
    if first is None or first != last or start is None or end is None:
        return line.strip()
    return line.encode()[start:end].decode(errors="replace")


def _operands(operation: str, frame: FrameType) -> dict[str, str]:
    """{name: "(32, 64) float32" or "Linear(in_features=64, ...)"} of the tensors and modules in `operation`."""
    operands = {}
    for name in dict.fromkeys(_NAME.findall(operation)):
        first, *rest = name.split(".")
        value: Any = frame.f_locals.get(first)
        try:
            for attribute in rest:
                value = getattr(value, attribute)
            if hasattr(value, "shape") and hasattr(value, "dtype"):
                operands[name] = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            elif hasattr(value, "extra_repr") and not isinstance(value, type):
                operands[name] = f"{type(value).__name__}({value.extra_repr()})"
        except Exception:  # the report must not fail on a property of the user's
            continue
    return operands


def last_lines(path: str | None) -> list[str]:
    """The last lines of a log file, none if it cannot be read."""
    if path is None:
        return []
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2**15))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
