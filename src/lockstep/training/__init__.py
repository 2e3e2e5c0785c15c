"""The training and evaluation loops, and what changes while they run."""
