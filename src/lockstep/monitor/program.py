"""The monitor as a program of its own. `lockstep.monitor.start` starts it."""

import json
import os
import signal
import socket
import sys

from lockstep.monitor.options import MonitorOptions
from lockstep.monitor.process import Monitor


def main() -> None:
    """The program. Its argument is the descriptor of the socket to listen on; stdin has the options as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the ranks
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    address = listener.getsockname()
    try:
        Monitor(listener, MonitorOptions(**json.load(sys.stdin))).run()
    finally:
        if isinstance(address, str):  # not abstract: a file, where the system is not Linux
            os.unlink(address)
