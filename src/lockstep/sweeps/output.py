"""What a sweep prints. It goes on when nobody reads that any more."""

import os
import sys


def show(text: str, end: str = "\n") -> None:
    """Print text. After the first write that fails, as with `| head -1`, this process and its jobs print nothing."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
