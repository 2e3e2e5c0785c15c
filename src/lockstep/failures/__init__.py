"""A run that fails or hangs explains itself: a process beside the ranks, its report and verdicts. No torch here."""
