"""Starts the monitor of this machine, and asks it for the failure report."""

import json
import os
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Self

from lockstep.failures import channel
from lockstep.failures.report import MonitorOptions, Report

MPI_LAUNCHERS = ("mpirun", "mpiexec", "orterun")

# Without site-packages and PYTHON* variables the interpreter starts in 20 ms, and runs no code of the user's.
PROGRAM = "import sys; sys.path.insert(0, {source!r}); from lockstep.failures.monitor import main; main()"


def start_monitor(name: str, options: MonitorOptions) -> None:
    """Start the monitor called `name` as a process of its own. It ends with the ranks that connect to it, or
    with their launcher.

    A monitor that cannot be started costs the report, not the run.
    """
    try:
        listener = channel.listen(channel.address_of(name))
    except OSError:  # another rank of this machine has started it
        return
    with listener:
        run_monitor(listener, options)


def run_monitor(listener: socket.socket, options: MonitorOptions) -> None:
    """Start the process that takes the connections of `listener`."""
    program = PROGRAM.format(source=str(Path(__file__).parents[2]))
    try:
        monitor = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", program, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError:  # no process or no memory is left for it
        return
    assert monitor.stdin is not None
    # Options are not in its command line: `pkill -f train.py` must not end the monitor.
    with suppress(OSError), monitor.stdin as options_file:
        options_file.write(json.dumps(asdict(options)).encode())


class MonitorLink:
    """A launcher's connection to the monitor of its ranks, which it starts. A context manager: the end closes it.

    name: of the monitor, which ranks find in the environment variable ADDRESS of lockstep.failures.reporter.
    temporary_folder: see `MonitorOptions`.
    """

    def __init__(self, temporary_folder: str | None) -> None:
        self.name = uuid.uuid4().hex
        options = MonitorOptions(command=typed_command(), temporary_folder=temporary_folder)
        start_monitor(self.name, options)
        self.connection: socket.socket | None = channel.connect(channel.address_of(self.name), timeout=2)
        if self.connection is not None:
            self.reader = channel.Reader(self.connection)
            os.register_at_fork(after_in_child=self.connection.close)  # its end shows that the launcher has ended
            self._send({"launcher": True})

    def report(self, exit_codes: dict[int, int]) -> Report | None:
        """The report of the ranks, which have all ended. exit_codes: {pid: code}. None if no rank has failed, or
        the monitor does not answer.
        """
        if self.connection is None:
            return None
        self._send({"exit_codes": {str(pid): code for pid, code in exit_codes.items()}})
        answer = self.reader.wait_for("report")
        return None if answer is None else answer["report"]

    def close(self) -> None:
        """End the monitor."""
        self._send({"over": True})
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _send(self, message: channel.Message) -> None:
        if self.connection is not None:
            with suppress(OSError):  # the monitor was killed: the run goes on without a report
                channel.send(self.connection, message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def typed_command() -> list[str]:
    """The words that started this process."""
    return [os.path.basename(sys.executable), *sys.argv]


def start_for_rank(name: str, started_by: str) -> None:
    """Start the monitor for ranks that another program has started. The first rank of each machine calls it."""
    is_torchrun = started_by == "torchrun" and "TORCHELASTIC_RUN_ID" in os.environ
    # Before a restart torchrun goes on, so the report need not wait for its end.
    may_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    options = MonitorOptions(
        agent=os.getppid() if is_torchrun and not may_restart else None,
        command=whole_command(started_by),
    )
    start_monitor(name, options)


def whole_command(started_by: str) -> list[str]:
    """The words that started this process, with those of torchrun, mpirun or srun before them if it was one of these.

    started_by: see `RankInfo`. Only of srun the words are not known: it runs on another machine.
    """
    if started_by == "srun":
        return ["srun", *typed_command()]
    try:
        program, *words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return typed_command()
    program = os.path.basename(program)
    if program in MPI_LAUNCHERS:  # `-x NAME` for `-x NAME=VALUE`, which may be a secret; where the ranks meet is none
        is_value = [before == "-x" and not word.startswith("MASTER_") for before, word in pairwise(["", *words])]
        words = [word.partition("=")[0] if hides else word for word, hides in zip(words, is_value, strict=True)]
    elif "TORCHELASTIC_RUN_ID" not in os.environ:
        return typed_command()
    return [program, *words]
