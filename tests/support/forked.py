"""`python src/train.py` in a third of its time: a process that has imported what it needs forks a copy of itself.

Most of the time of a short command is the import of torch. A copy has the folder, environment, words, session and
output of the command, and runs `src/train.py` as its main program, or torchrun. What such a command starts with
multiprocessing before it has threads, such as the ranks of launch=spawn, is a copy of it, too. Only what
comes before is another's: the imports, and in /proc the environment. So a test of the start itself asks for a new
process, with the mark `new_process`.
"""

import ctypes
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
TRAIN = str(SOURCE / "train.py")
# Read by the interpreter or by a library while it is loaded: a copy would not see them.
READ_AT_THE_START = ("OMP_", "MKL_", "KMP_", "GOMP_", "ATEN_", "DNNL_", "TORCH", "GLOO_", "PYTHON", "LD_", "MALLOC_")
MODULES = ("lockstep.launchers.rank_imports", "lockstep.modes.train", "lockstep.cli", "lockstep.build")
MODULES += ("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.launcher.api")
MODULES += ("pydantic.type_adapter",)
OF_TORCHRUN = ["-m", "torch.distributed.run"]
ROOM = 16384  # bytes for the command line of a copy, in that of the server

SHARED = "LOCKSTEP_TEST_SERVER"

_held = []  # sockets: a server ends when its own is closed
_one_at_a_time = threading.Lock()  # commands may be started in several threads


def can_be_forked(command, env):
    """Whether a copy does the same as the command. env: the variables that its test adds."""
    own = [key for key in env if key.startswith(READ_AT_THE_START) and key != "PYTHONPATH"]
    is_known = command[:2] == [sys.executable, TRAIN] or command[:3] == [sys.executable, *OF_TORCHRUN]
    if own or not is_known or not hasattr(os, "pidfd_open"):
        return False
    import torch

    return not torch.cuda.is_available()  # a driver that was asked before the fork does not work after it


class ForkedProcess:
    """A command in a copy. Has what tests use of subprocess.Popen.

    prepared_by: a module whose function `prepare` the server calls first.
    """

    def __init__(self, command, cwd, env, prepared_by=""):
        self.args = command
        self.returncode = None
        self.answers, of_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader, writer = os.pipe()
        self.reader, self.output, self.is_read = reader, b"", False
        request = json.dumps([command[1:], str(cwd), env]).encode()
        with of_server:
            with _one_at_a_time:
                address = server_address(prepared_by)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
                server.connect(address)
                socket.send_fds(server, [request], [writer, writer, of_server.fileno()])
        os.close(writer)
        self.pid = int(self.answers.recv(16))

    def poll(self):
        return self._ended(0)

    def wait(self, timeout=None):
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout=None):
        """The output up to its end, when all processes that hold it have ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_read:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.reader], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            part = os.read(self.reader, 65536)
            self.output += part
            if not part:
                self.is_read = True
                os.close(self.reader)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self.output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n"), None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def _ended(self, timeout):
        if self.returncode is None and select.select([self.answers], [], [], timeout)[0]:
            self.returncode = int(self.answers.recv(16))
            self.answers.close()
        return self.returncode


def python_in(folder):
    """A folder for PATH whose `python src/train.py`, typed in a script of a shell with an open output, is forked."""
    file = folder / "python"
    folder.mkdir()
    file.write_text(f"#!{sys.executable} -IS\n{TYPED.format(python=sys.executable, address=server_address())}")
    file.chmod(0o755)
    return folder


TYPED = """import json, os, socket, sys
if not "".join(sys.argv[1:2]).endswith("src/train.py"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
answers, of_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [request], [1, 2, of_server.fileno()])
of_server.close()
answers.recv(16)
code = int(answers.recv(16))
sys.exit(code if code >= 0 else 128 - code)
"""


def share_server():
    """Start a server that the workers of pytest share: they inherit the variable that says where it listens."""
    if hasattr(os, "pidfd_open"):
        os.environ[SHARED] = server_address().hex()


@cache
def server_address(prepared_by=""):
    """Where the server listens: the shared one, or one of this process, which it starts and which ends with it."""
    if SHARED in os.environ and not prepared_by:
        return bytes.fromhex(os.environ[SHARED])
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # at a name that is no file
        listener.listen()
        kept = [its.fileno(), listener.fileno()]
        # As code without a file, its frames are of no user's code: the verdict of a hang shows that.
        code = f"__file__ = {__file__!r}; exec(compile(open(__file__).read(), '<forked>', 'exec'))"
        words = [sys.executable, "-c", code, *map(str, kept), prepared_by, "-" * ROOM]
        subprocess.Popen(words, pass_fds=kept, stdin=subprocess.DEVNULL, start_new_session=True)
        _held.append(ours)
        return listener.getsockname()


def _serve(starter, listener, prepared_by):
    _import_all(prepared_by)
    running = {}  # {pidfd: (pid, answers)}
    while True:
        ready, _, _ = select.select([starter, listener, *running], [], [])
        for ended in [one for one in ready if isinstance(one, int)]:
            pid, answers = running.pop(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):
                os.write(answers, str(code).encode())
            os.close(answers)
            os.close(ended)
        if starter in ready:  # it has ended
            os._exit(0)
        if listener not in ready:
            continue
        with listener.accept()[0] as asked:
            request, descriptors, _, _ = socket.recv_fds(asked, 2**18, 3)
        if not request:  # who has asked has ended
            continue
        output, errors, answers = descriptors
        pid = os.fork()
        if pid == 0:
            for file in (starter, listener):
                file.close()
            for descriptor in (answers, *running, *[answers for _, answers in running.values()]):
                os.close(descriptor)
            _become(*json.loads(request), output, errors)
        os.close(output)
        os.close(errors)
        os.write(answers, str(pid).encode())
        running[os.pidfd_open(pid)] = pid, answers


def _import_all(prepared_by):
    sys.path[0] = str(SOURCE)
    for name in MODULES:
        importlib.import_module(name)
    if prepared_by:
        sys.path.insert(1, str(SOURCE.with_name("tests")))
        importlib.import_module(prepared_by).prepare()
        del sys.path[1]
    del sys.path[0]


def _become(words, folder, env, output, errors):
    """Turn this copy into the command. Never returns."""
    os.setsid()
    os.chdir(folder)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    added = [os.path.abspath(path) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(SOURCE), *added, *[path for path in sys.path if path not in before]]
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    del sys.modules["__mp_main__"]  # this file, as multiprocessing has noted it
    sys.modules["numpy"].random.seed()  # each new process draws other numbers
    _show_command_line([sys.executable, *words])
    if words[:2] == OF_TORCHRUN:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        sys.exit()
    multiprocessing.util.spawnv_passfds = _start_copy
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        os._exit(70)  # train.py ends its process itself


def _show_command_line(words):
    """In /proc, for tests and for the command that a report shows, the words are those of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"".join(os.fsencode(word) + b"\0" for word in words)  # multiprocessing has bytes, too
    ctypes.memmove(start, line[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _start_copy(path, words, kept, start_anew=multiprocessing.util.spawnv_passfds):
    """Start, for multiprocessing, what imports what this process has: as a copy of it. Returns its pid.

    kept: the descriptors that it gets.
    """
    number = words.index("-c") + 1
    starts_torch = "multiprocessing.forkserver" in words[number] or "multiprocessing.spawn" in words[number]
    if not starts_torch or len(os.listdir("/proc/self/task")) > 1:
        return start_anew(path, words, kept)
    pid = os.fork()
    if pid:
        return pid
    try:
        for signal_number in signal.valid_signals():
            if callable(signal.getsignal(signal_number)):
                signal.signal(signal_number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
            with suppress(OSError):  # that of the list itself
                os.close(descriptor)
        _show_command_line(words)
        sys.argv = ["-c", *words[number + 1 :]]
        exec(words[number], {})
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code or 0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])), sys.argv[3])
