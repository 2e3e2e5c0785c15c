"""Loggers: TensorBoard, console, progress bar, log files; and the profiler."""
