"""What jobs that run at once print: whole lines with a job's number before each, and below them a bar for each job."""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress

from lockstep.distributed.run_folder import BAR_COLUMNS
from lockstep.sweeps.job_process import JobProcess
from lockstep.sweeps.output import show

UP_AND_ERASE = "\x1b[{}F\x1b[J"  # to the begin of the line so many lines above, then everything below
ROOM = len("[1000] ")  # columns before a job's bar


class Screen:
    """Shows the output of jobs. On a terminal the bars stay below the lines, each in a line of its own."""

    def __init__(self) -> None:
        self.columns = shutil.get_terminal_size().columns - ROOM if sys.stdout.isatty() else 0
        self.rests: dict[int, bytes] = {}  # job -> the begin of a line that it has printed
        self.bars: dict[int, str] = {}  # job -> its bar
        self.drawn: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        """What tells a job to draw a bar that this screen shows."""
        return {BAR_COLUMNS: str(self.columns)} if self.columns > 0 else {}

    def forward(self, process: JobProcess, to_end: bool = False) -> None:
        """Show what the job has printed since the last call. to_end: it has ended."""
        if process.output is None:
            return
        number = process.job.number
        text = self.rests.pop(number, b"")
        with suppress(BlockingIOError):
            while chunk := os.read(process.output, 65536):
                text += chunk
        *lines, rest = text.split(b"\n")
        if to_end:
            self.bars.pop(number, None)
            lines, rest = [*lines, *filter(None, [_after_bar(rest).encode()])], b""
        elif b"\r" in rest:  # a bar is drawn in one line again and again
            self.bars[number] = _after_bar(rest)[: self.columns]
            rest = rest[rest.rindex(b"\r") :]
        self.rests[number] = rest
        self.show([f"[{number}] {_after_bar(line)}" for line in lines])

    def show(self, lines: Sequence[str] = ()) -> None:
        """Print lines, and draw the bars below them."""
        bars = [f"[{number}] {bar}" for number, bar in sorted(self.bars.items()) if bar.strip()]
        if not lines and bars == self.drawn:
            return
        erased = UP_AND_ERASE.format(len(self.drawn)) if self.drawn else ""
        show(erased + "".join(f"{line}\n" for line in [*lines, *bars]), end="")
        self.drawn = bars


def _after_bar(line: bytes) -> str:
    """What stands in a line at last: a carriage return goes back to its begin."""
    return line.rpartition(b"\r")[2].decode(errors="replace")
