"""What a run folder tells about its run: `run.json`, tables of runs, what two runs differ in. No torch here."""
