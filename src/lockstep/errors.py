"""Errors that end a run, and the exit codes of `src/train.py`."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2  # the command or the config cannot work; nothing was trained
# EX_TEMPFAIL: stopped early with a good snapshot. Slurm requeues a job only if it does not exit with 0.
EXIT_RESUMABLE = 75


class ConfigError(Exception):
    """The user's input cannot work. The message is one sentence that ends in what to type; no traceback is shown."""


class TrainingDiverged(Exception):
    """The loss is not finite, so training cannot continue. The message says at which step and what to type."""


class StoppedEarly(BaseException):
    """A signal asked the run to stop. Its snapshot is written and it can be resumed.

    It derives from BaseException, like KeyboardInterrupt: it must end a whole sweep, not one job of it.
    """
