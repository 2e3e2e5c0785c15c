"""launch=slurm: write an sbatch script into the run folder and submit it. Every requeue finds the same folder again."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lockstep.config.record import config_flags
from lockstep.config.schema import Count, Whole
from lockstep.distributed.signals import Relay
from lockstep.errors import ConfigError, RankFailed, StoppedEarly, path_value, print_line
from lockstep.launchers.base import Launcher, Worker, refuse_nesting
from lockstep.runs.record import SWEEP

SCRIPT = """\
#!/bin/bash
{options}

{setup}
# USR1 comes {warning} s before the time limit, and TERM when another job takes the nodes. The ranks then save and exit
# with 75, or with 76 if the last step is in no snapshot.
srun --kill-on-bad-exit=1 {command} &
ranks=$!
trap 'kill -USR1 $ranks' USR1
while kill -0 $ranks 2>/dev/null; do wait $ranks; done
wait $ranks
code=$?
# Slurm requeues no job that exits by itself, so a run that stopped early asks for it.
case $code in 75 | 76) scontrol requeue $SLURM_JOB_ID ;; esac
exit $code
"""


@dataclass
class SlurmLauncher(Launcher):
    """Submits this run; srun starts its ranks on the job's nodes, and `launch=env` joins them there.
    conf/launch/slurm.yaml describes the keys."""

    runs_elsewhere = True

    nodes: Count
    ntasks_per_node: Count
    cpus_per_task: Count | None
    partition: str | None
    account: str | None
    time: Count | str | None
    warning: Whole
    options: list[str]
    setup: list[str]
    dry_run: bool
    run_dir: str

    def validate(self) -> None:
        refuse_nesting()
        if not self.dry_run and not shutil.which("sbatch"):
            raise ConfigError("launch=slurm finds no sbatch here; type launch.dry_run=true to see the script")

    def num_ranks(self) -> tuple[int, int]:
        return self.nodes * self.ntasks_per_node, self.ntasks_per_node

    def launch(self, worker: Worker, *args: Any) -> None:
        """Submit the job, which starts `src/train.py` anew: `worker` and `args` are not used. That of a sweep is waited
        for, and cancelled at a signal: its ranks save. Raises ConfigError if sbatch refuses the job."""
        script, folder, is_swept, is_cancelled = self.script(), Path(self.run_dir).resolve(), SWEEP in os.environ, False
        if self.dry_run:
            print(script, end="")
            return
        path = folder / "job.sh"
        path.write_text(script)
        with Relay() as relay:
            words = ["sbatch", "--parsable", *["--wait"] * is_swept, str(path)]
            sbatch = Popen(words, stdout=PIPE, stderr=PIPE, text=True)
            job = next(sbatch.stdout or iter(()), "").split(";")[0].strip()
            if not job:
                said = " ".join((sbatch.stderr.read() if sbatch.stderr else "").split())
                raise ConfigError(f"sbatch refused the job ({said}); change launch.*, or {path}")
            output = folder / f"slurm-{job}.out"
            print_line(f"submitted Slurm job {job}; its output: {output}\nrun folder: {folder}", sys.stdout)
            while is_swept and sbatch.poll() is None:
                if relay.first is not None and not is_cancelled:
                    subprocess.run(["scancel", job])
                    is_cancelled = True
                time.sleep(1)
        if is_cancelled:
            raise StoppedEarly(f"Slurm job {job} was cancelled")
        if is_swept and sbatch.returncode:
            what = f"lockstep: Slurm job {job} ended with {sbatch.returncode}; see {output}"
            raise RankFailed(what, {"exit_code": sbatch.returncode})

    def script(self) -> str:
        """The text of the sbatch script."""
        folder, names = Path(self.run_dir).resolve(), ("nodes", "ntasks_per_node", "partition", "account", "time")
        values = {name.replace("_", "-"): getattr(self, name) for name in (*names, "cpus_per_task")}
        values |= {"signal": f"B:USR1@{self.warning}", "open-mode": "append"}
        values |= {"chdir": Path.cwd(), "output": folder / "slurm-%j.out"}
        options = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None]
        # Each task runs this command, with launch=env in place of launch=slurm, and with a fixed run folder. Overrides
        # of Hydra's own config, such as hydra.searchpath=[...], hold there, too, but not those that started this job.
        of_hydra = re.compile(r"[+~]*hydra[./](?!(run\.dir|searchpath|sweep|sweeper|mode)\b)")
        # Unresolved: the script gets ${oc.env:KEY} as it was typed, and no secret.
        overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        command = [
            *[f"--cpus-per-task={self.cpus_per_task}"] * bool(self.cpus_per_task),  # srun ignores sbatch's
            *[sys.executable, str(Path(sys.argv[0]).resolve()), *config_flags(sys.argv[1:])],
            *[word for word in sys.argv[1:] if of_hydra.match(word)],
            *[word for word in overrides if not re.match(r"[+~]*launch\b", word)],
            *["launch=env", f"hydra.run.dir={path_value(folder)}"],
        ]
        return SCRIPT.format(
            options="\n".join(f"#SBATCH {option}" for option in [*options, "--requeue", *self.options]),
            setup="\n".join([*self.setup, ""]),
            warning=self.warning,
            command=shlex.join(command),
        )
