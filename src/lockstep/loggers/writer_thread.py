"""A failed write ends TensorBoard's thread. The writer's next call raises the same error, so no traceback is needed."""

import threading

THREAD = "_AsyncWriterThread"  # TensorBoard's, which is private
_show_traceback = threading.excepthook


def hide_failed_writes() -> None:
    """From here on the OSError of a thread of TensorBoard's shows no traceback in this process."""
    threading.excepthook = _report


def _report(failed: threading.ExceptHookArgs) -> None:
    if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__name__ == THREAD):
        _show_traceback(failed)
