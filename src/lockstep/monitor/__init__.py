"""The monitor: one process for the ranks of a machine, which records how each of them ends. No torch here."""
