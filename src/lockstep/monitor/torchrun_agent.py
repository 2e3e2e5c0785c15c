"""Waits for the program that has started the ranks, such as torchrun."""

import selectors

from lockstep.monitor.linux_processes import children
from lockstep.monitor.watched_rank import open_pid_file

AGENT_SECONDS = 35.0  # for torchrun to end after its ranks
POLL_SECONDS = 0.1


def has_ended(agent: int | None, ranks: set[int]) -> bool:
    """Wait for torchrun to end: its traceback comes before the report. False if it starts other ranks."""
    if agent is None or (pid_file := open_pid_file(agent)) is None:
        return True
    waiter = selectors.DefaultSelector()
    waiter.register(pid_file, selectors.EVENT_READ)
    for _ in range(round(AGENT_SECONDS / POLL_SECONDS)):
        if waiter.select(POLL_SECONDS):
            return True
        if set(children(agent)) - ranks:
            return False
    return False
