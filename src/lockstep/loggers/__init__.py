"""Loggers: TensorBoard, console, progress bar, CSV and log files; and the profiler."""
