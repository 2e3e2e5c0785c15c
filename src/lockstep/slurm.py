"""launch=slurm: write an sbatch script for this run and submit it. The folder is fixed here, so every requeue finds it again."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from lockstep.launch import refuse_nesting
from lockstep.refusal import Refusal
from lockstep.signals import RESUMABLE

SCRIPT = """\
#!/bin/bash
{options}

{setup}
# USR1 comes {warning} s before the time limit, TERM to the ranks when another job takes their nodes: they save and leave with {resumable}.
srun --kill-on-bad-exit=1 {cpus}{command} &
ranks=$!
trap 'kill -USR1 $ranks' USR1
while kill -0 $ranks 2>/dev/null; do wait $ranks; done
wait $ranks
code=$?
# A job that exits, with 0 or not, is over: whoever stopped early asks for another turn.
[ $code = {resumable} ] && scontrol requeue $SLURM_JOB_ID
exit $code
"""


def slurm(work, cfg, run_dir, overrides, nodes, ntasks_per_node, cpus_per_task, partition, account, time, warning, options, setup, dry_run):
    """Submit this very run, its ranks started by srun; returns nothing, for the job has yet to run.

    run_dir: the run's folder, on a file system that all nodes share; overrides: the words that composed this run;
    time: the limit as sbatch reads it; warning: seconds before it at which the ranks are told to save; options: more
    lines for sbatch; setup: shell lines before srun. `work` and `cfg` are the job's own to make anew.

    Raises Refusal inside another launcher or job, where sbatch is missing, and where it says no.
    """
    refuse_nesting("slurm")
    if "SLURM_JOB_ID" in os.environ:
        raise Refusal(f"launch=slurm inside Slurm job {os.environ['SLURM_JOB_ID']} would submit another one; type srun python src/train.py ...")
    folder = Path(run_dir).resolve()
    asked = {"nodes": nodes, "ntasks-per-node": ntasks_per_node, "cpus-per-task": cpus_per_task, "partition": partition, "account": account,
             "time": time, "signal": f"B:USR1@{warning}", "chdir": Path.cwd(), "output": folder / "slurm-%j.out", "open-mode": "append",
             "job-name": "lockstep"}  # fmt: skip
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in asked.items() if value is not None]
    same = [word for word in overrides if not re.match(r"[+~]*launch\b", word)]
    command = [sys.executable, Path(sys.argv[0]).resolve(), *same, "launch=env", f'hydra.run.dir="{folder}"']
    script = SCRIPT.format(
        options="\n".join(f"#SBATCH {line}" for line in [*lines, "--requeue", *options]),
        setup="\n".join([*setup, ""]), warning=warning, resumable=RESUMABLE,
        cpus=f"--cpus-per-task={cpus_per_task} " if cpus_per_task else "",  # srun does not take it over from sbatch
        command=shlex.join(map(str, command)),
    )  # fmt: skip
    if dry_run:
        print(script, end="")
        return
    if not shutil.which("sbatch"):
        raise Refusal("launch=slurm wants Slurm's sbatch and this machine has none; type launch.dry_run=true to see the script, or launch=torchrun")
    path = folder / "job.sh"
    path.write_text(script)
    answer = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True)
    if answer.returncode:
        raise Refusal(f"sbatch said no ({' '.join(answer.stderr.split())}); type launch.partition=, launch.time= ... to suit, or sbatch {path}")
    job = answer.stdout.split(";")[0].strip()
    print(f"submitted Slurm job {job}: squeue -j {job} shows its state, tail -F {folder}/slurm-{job}.out its output\nrun folder: {folder}")
