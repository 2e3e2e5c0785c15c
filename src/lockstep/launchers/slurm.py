"""launch=slurm: write an sbatch script into the run folder and submit it. Every requeue finds the same folder again."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep.config.record import config_flags
from lockstep.config.schema import Count, Whole
from lockstep.distributed.signals import Relay
from lockstep.errors import (
    EXIT_RESUMABLE,
    EXIT_STOPPED_WITHOUT_SNAPSHOT,
    ConfigError,
    RankFailed,
    StoppedEarly,
    path_value,
)
from lockstep.launchers.base import Launcher, Worker, print_line, refuse_nesting
from lockstep.runs.record import SWEEP

SCRIPT = """\
#!/bin/bash
{options}

{setup}
# USR1 comes {warning} s before the time limit, and TERM when another job takes the nodes. The ranks then save and exit
# with {resumable}, or with {unsaved} if the last step is in no snapshot.
srun --kill-on-bad-exit=1 {cpus}{command} &
ranks=$!
trap 'kill -USR1 $ranks' USR1
while kill -0 $ranks 2>/dev/null; do wait $ranks; done
wait $ranks
code=$?
# Slurm requeues no job that exits by itself, so a run that stopped early asks for it.
case $code in {resumable} | {unsaved}) scontrol requeue $SLURM_JOB_ID ;; esac
exit $code
"""


POLL_SECONDS = 1.0


class SlurmLauncher(Launcher):
    """Submits this run; srun starts its ranks on the job's nodes, and `launch=env` joins them there.

    nodes: machines.
    ntasks_per_node: ranks on each machine.
    cpus_per_task: CPU cores of each rank.
    partition: partition of the cluster.
    account: account that is charged.
    time: time limit; null: the partition's own.
    warning: seconds before the time limit at which the ranks save.
    options: more options of sbatch.
    setup: shell lines before srun.
    dry_run: print the script and submit nothing.
    run_dir: folder of this run, on a file system that all nodes share.
    """

    runs_elsewhere = True

    def __init__(
        self,
        nodes: Count,
        ntasks_per_node: Count,
        cpus_per_task: Count | None,
        partition: str | None,
        account: str | None,
        time: Count | str | None,
        warning: Whole,
        options: list[str],
        setup: list[str],
        dry_run: bool,
        run_dir: str,
    ) -> None:
        self.ranks, self.folder = (nodes * ntasks_per_node, ntasks_per_node), Path(run_dir).resolve()
        self.options, self.setup, self.warning, self.dry_run = options, setup, warning, dry_run
        self.values: dict[str, object] = {"nodes": nodes, "ntasks-per-node": ntasks_per_node}
        self.values |= {
            "cpus-per-task": cpus_per_task,
            "partition": partition,
            "account": account,
            "time": time,
            "signal": f"B:USR1@{warning}",
        }

    def validate(self) -> None:
        refuse_nesting()
        if not self.dry_run and not shutil.which("sbatch"):
            raise ConfigError("launch=slurm finds no sbatch here; type launch.dry_run=true to see the script")

    def num_ranks(self) -> tuple[int, int]:
        return self.ranks

    def launch(self, worker: Worker, *args: Any) -> None:
        """Submit the job, which starts `src/train.py` anew: `worker` and `args` are not used.

        That of a sweep is waited for, and cancelled at a signal: its ranks save. Then it raises StoppedEarly, and
        RankFailed for one that has failed. Raises ConfigError if sbatch refuses the job.
        """
        script = self.script()
        if self.dry_run:
            print(script, end="")
            return
        path = self.folder / "job.sh"
        path.write_text(script)
        is_swept = SWEEP in os.environ
        command = ["sbatch", "--parsable", *["--wait"] * is_swept, str(path)]
        with Relay() as relay:
            sbatch = Popen(command, stdout=PIPE, stderr=PIPE, text=True)
            job = next(sbatch.stdout or iter(()), "").split(";")[0].strip()
            if not job:
                said = " ".join((sbatch.stderr.read() if sbatch.stderr else "").split())
                raise ConfigError(f"sbatch refused the job ({said}); change launch.*, or {path}")
            told = f"submitted Slurm job {job}; its output: {self.folder}/slurm-{job}.out\nrun folder: {self.folder}"
            print_line(told, sys.stdout)
            is_cancelled = False
            while is_swept and sbatch.poll() is None:
                if relay.first is not None and not is_cancelled:
                    subprocess.run(["scancel", job])
                    is_cancelled = True
                time.sleep(POLL_SECONDS)
        if is_cancelled:
            raise StoppedEarly(f"Slurm job {job} was cancelled")
        if is_swept and sbatch.returncode:
            what = f"lockstep: Slurm job {job} ended with {sbatch.returncode}; see {self.folder}/slurm-{job}.out"
            raise RankFailed(what, {"exit_code": sbatch.returncode})

    def script(self) -> str:
        """The text of the sbatch script."""
        values = self.values | {"chdir": Path.cwd(), "output": self.folder / "slurm-%j.out", "open-mode": "append"}
        options = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None]
        # Each task runs this command, with launch=env in place of launch=slurm, and with a fixed run folder. Overrides
        # of Hydra's own config, such as hydra.searchpath=[...], hold there, too, but not those that started this job.
        command = [sys.executable, str(Path(sys.argv[0]).resolve()), *config_flags(sys.argv[1:])]
        of_hydra = re.compile(r"[+~]*hydra[./](?!(run\.dir|searchpath|sweep|sweeper|mode)\b)")
        command += [word for word in sys.argv[1:] if of_hydra.match(word)]
        # Unresolved: the script gets ${oc.env:KEY} as it was typed, and no secret.
        overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        command += [word for word in overrides if not re.match(r"[+~]*launch\b", word)]
        command += ["launch=env", f"hydra.run.dir={path_value(self.folder)}"]
        cores = self.values["cpus-per-task"]
        return SCRIPT.format(
            options="\n".join(f"#SBATCH {option}" for option in [*options, "--requeue", *self.options]),
            setup="\n".join([*self.setup, ""]),
            warning=self.warning,
            resumable=EXIT_RESUMABLE,
            unsaved=EXIT_STOPPED_WITHOUT_SNAPSHOT,
            cpus=f"--cpus-per-task={cores} " if cores else "",  # srun ignores sbatch's
            command=shlex.join(command),
        )
