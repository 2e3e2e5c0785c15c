"""Why Slurm ends a job, as Slurm itself says. No torch here."""

import os
import subprocess

ANSWER_SECONDS = 3.0  # Slurm kills the ranks 30 s after it has asked them to end, by default


def slurm_reason() -> str:
    """ " as Slurm ..." if this rank is in a job that Slurm ends; empty if Slurm confirms no reason. Asks Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return ""
    try:
        command = ["scontrol", "--oneliner", "show", "job", job]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    words = answer.split()
    if "Reason=TimeLimit" in words:
        return " as Slurm's time limit is reached"
    if any(word.startswith("PreemptTime=") for word in words) and "PreemptTime=None" not in words:
        return " as Slurm gives the nodes to another job"
    return ""
