"""Every private name of torch, Hydra, OmegaConf and Python's library that this project uses. No torch at the top.

Each has its reason, the version that it was seen in (torch 2.14.1, hydra-core 1.3.8 and 1.4.0rc3, omegaconf 2.3.1 and
2.4.1rc1, Python 3.11), and what happens where it is missing. Functions import inside: `--help` imports no torch.
"""

# torch

# hydra

# omegaconf

# python


def multiprocessing_folder() -> str | None:
    """The folder in TMPDIR that multiprocessing has made in this process, or in the one that started it, if any.

    Why: it holds the socket of a fork server, and Python removes it in a teardown that this project's processes skip.
    Name: `multiprocessing.process.current_process()._config`, Python 3.11 to 3.14. Missing: None, and the folder stays.
    """
    import sys

    process = sys.modules.get("multiprocessing.process")  # else nobody has made one
    config = {} if process is None else getattr(process.current_process(), "_config", {})
    folder: str | None = config.get("tempdir")
    return folder


def remove_multiprocessing_folder() -> None:
    """Remove that folder. Call it when nothing is left of this process to do but to exit."""
    import shutil

    folder = multiprocessing_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
