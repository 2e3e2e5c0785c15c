"""The folder in TMPDIR that multiprocessing makes for the socket of a fork server. No torch here.

multiprocessing removes it while the interpreter is torn down, which this project's processes skip.
"""

import shutil
import sys


def temporary_folder() -> str | None:
    """Its path, None without one."""
    process = sys.modules.get("multiprocessing.process")  # else nobody has made one
    folder: str | None = None if process is None else process.current_process()._config.get("tempdir")
    return folder


def remove_temporary_folder() -> None:
    """Call it when nothing is left of this process to do but to exit."""
    folder = temporary_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
