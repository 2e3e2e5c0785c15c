"""Every private name of torch, Hydra, OmegaConf and Python's library that this project uses, a section for each.

Each function says why the name is needed, in which version it was seen, and what happens where it is missing.
The imports are inside the functions: `--help` must not import torch.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Python's library, seen in 3.11.


def multiprocessing_folder() -> str | None:
    """The folder in TMPDIR that multiprocessing has made for the socket of a fork server, None without one.

    multiprocessing removes it while the interpreter is torn down, which this project's processes skip. Missing: None,
    and the folder stays.
    """
    process = sys.modules.get("multiprocessing.process")  # else nobody has made one
    folder: str | None = None
    if process is not None:
        folder = getattr(process.current_process(), "_config", {}).get("tempdir")
    return folder


def fork_server_pid() -> int | None:
    """The process that ranks are forked from, None without one. Missing: None, and its death is not noticed."""
    from multiprocessing import forkserver

    server = getattr(forkserver, "_forkserver", None)
    pid: int | None = getattr(server, "_forkserver_pid", None)
    return pid


# Hydra, seen in 1.3.8 and 1.4.0rc3. What differs between the two is here, too, though it is public.


def hydra_version_base() -> dict[str, str]:
    """The argument `version_base` of Hydra's functions: without it 1.3 warns, and with it 1.4 does."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


# OmegaConf, seen in 2.3.1 and 2.4.1rc1.


def register_resolver(name: str, function: Callable[..., object]) -> None:
    """`${name:...}` in a config calls `function`. 2.4 has another name for the function, and warns."""
    import omegaconf

    is_old = omegaconf.__version__.startswith("2.3.")
    register = getattr(omegaconf.OmegaConf, "register_new_resolver" if is_old else "register_resolver")
    register(name, function, replace=True)


# torch, seen in 2.14.1.


@contextmanager
def hidden_from_profiler() -> Iterator[None]:
    """For the start of a collective that may end after torch's profiler has stopped.

    A recorded collective writes its end into the profiler's memory, from a thread of gloo. If the profiler has stopped
    by then, this memory is freed, and the write corrupts the heap. Missing: the collective is recorded.
    """
    import torch

    enable = getattr(torch.autograd, "_enable_record_function", lambda enabled: None)
    enable(False)
    try:
        yield
    finally:
        enable(True)
