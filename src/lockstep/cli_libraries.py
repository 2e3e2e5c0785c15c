"""Loads torch's libraries while the config is composed: a fifth of torch's import, which needs no interpreter lock."""

import ctypes
import importlib.util
import os
from pathlib import Path
from threading import Thread

from lockstep.distributed.signals import blocked

# In the order and with the flags of torch's own import, which then finds them.
LIBRARIES = {"libtorch_global_deps.so": os.RTLD_NOW | os.RTLD_GLOBAL, "libtorch_python.so": os.RTLD_NOW}


def load_libraries() -> None:
    """Begin to load them in a thread. Where they are missing, or have other names, this does nothing."""
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        with blocked():  # a thread begins with the mask of its parent: signals are for the main thread
            Thread(target=_load, args=(Path(found.origin).parent / "lib",), daemon=True).start()


def _load(folder: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen  # called like this it releases the lock, unlike ctypes.CDLL(path)
    for name, flags in LIBRARIES.items():
        dlopen(str(folder / name).encode(), flags)
