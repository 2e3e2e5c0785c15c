"""What a rank sets up so that the monitor can examine it while it hangs. Nothing here runs in a step.

The monitor asks in two ways. On request a thread of the rank writes the Python stacks of all threads and sends torch's
flight record. This thread needs the GIL: without an answer, the GIL is held. Then SIGUSR2 makes `faulthandler` write
the stacks, in C and without the GIL. The signal comes second because it can crash a rank whose threads run Python, as
when torch's compiler traces a model.

A rank that crashes writes its stack to a pipe with room for one write. So the thread that crashes waits in its second
write until the monitor has read the first one. gloo ends a rank (SIGABRT, in a thread of its own) that receives more
than it expects: while that thread waits, the monitor can ask all ranks which collectives they have called.
"""

import faulthandler
import fcntl
import mmap
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

from lockstep.errors import EXIT_HANG

STACK_SIGNAL = getattr(signal, "SIGUSR2", None)
ASK, LEAVE = b"?", b"x"  # what the monitor may send
RECORDED_COLLECTIVES = "256"  # torch's default of 2000 takes 30 ms and 1 MB to send

_crash_pipe: int | None = None  # the end that faulthandler writes to


def install(stacks: int) -> tuple[str, list[int]]:
    """Called once in a rank before its process group is formed. stacks: the file that stacks are written to.

    Returns the identity of the main thread as stacks have it, and descriptors to send to the monitor: the socket on
    which the rank is asked for its stacks and its flight record, and the pipe of a crash. The caller closes them once
    they are sent. No descriptors where this is not Linux.
    """
    global _crash_pipe
    main_thread = f"0x{threading.main_thread().ident:016x}"
    if sys.platform != "linux" or STACK_SIGNAL is None:
        faulthandler.enable(stacks)
        return main_thread, []
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)
    # Loader workers that are forked from this rank inherit the file and the handler.
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    here, there = socket.socketpair()
    threading.Thread(target=_answer, args=(here, stacks), name="lockstep-probe", daemon=True).start()
    crash, _crash_pipe = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)  # each write is a packet of its own
    fcntl.fcntl(_crash_pipe, fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)  # of which there is room for one
    faulthandler.enable(_crash_pipe)
    return main_thread, [there.detach(), crash]


def remove() -> None:
    """Undo `install`. Its thread ends when the monitor closes the other end of the socket."""
    global _crash_pipe
    faulthandler.disable()
    if STACK_SIGNAL is not None:
        faulthandler.unregister(STACK_SIGNAL)
    if _crash_pipe is not None:
        os.close(_crash_pipe)
        _crash_pipe = None


def _answer(connection: socket.socket, stacks: int) -> None:
    """Do what the monitor asks for: write the stacks and send the flight record, as JSON and a line end, or leave."""
    with suppress(OSError), connection:
        while question := connection.recv(1):
            if question == LEAVE:
                os._exit(EXIT_HANG)
            faulthandler.dump_traceback(stacks, all_threads=True)
            connection.sendall(flight_record() + b"\n")


def flight_record() -> bytes:
    """torch's record of the last collectives of this process, as JSON; `{}` where this torch has none.

    Without stacks: torch looks up their lines while it holds the recorder's lock, which takes a second.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")  # an import could wait for an import that hangs
    try:
        return bytes(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))  # type: ignore[union-attr]
    except (AttributeError, RuntimeError, TypeError):  # torch 2.14: private
        return b"{}"
