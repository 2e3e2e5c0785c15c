"""What Slurm itself says of a job. No torch here."""

import os
import subprocess

JOB_FILE = "slurm_job"  # in the run folder: the number of the job that was submitted for it
ANSWER_SECONDS = 3.0  # Slurm kills the ranks 30 s after it has asked them to end, by default


def slurm_reason() -> str:
    """ " as Slurm ..." if this rank is in a job that Slurm ends; empty if Slurm confirms no reason. Asks Slurm."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return ""
    words = _ask("scontrol", "--oneliner", "show", "job", job)[0].split()
    if "Reason=TimeLimit" in words:
        return " as Slurm's time limit is reached"
    if any(word.startswith("PreemptTime=") for word in words) and "PreemptTime=None" not in words:
        return " as Slurm gives the nodes to another job"
    return ""


def is_in_queue(job: str) -> bool:
    """Whether Slurm runs this job, or will. True if Slurm does not answer."""
    told, problem = _ask("squeue", "--noheader", "--format=%i", f"--jobs={job}")
    return bool(told.strip() or problem) and "Invalid job id" not in problem


def _ask(*command: str) -> tuple[str, str]:
    """(what a command of Slurm's prints, why it has failed). The second is empty if it has not."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return answer.stdout, answer.stderr if answer.returncode else ""
