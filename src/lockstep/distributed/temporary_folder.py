"""The folder in TMPDIR that multiprocessing makes for the socket of a fork server. No torch here.

multiprocessing removes it while the interpreter is torn down, which this project's processes skip.
"""

import shutil

from lockstep.compat import multiprocessing_folder


def remove_temporary_folder() -> None:
    """Call it when nothing is left of this process to do but to exit."""
    folder = multiprocessing_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
