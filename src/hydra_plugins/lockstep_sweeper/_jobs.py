"""How the jobs of a sweep are composed and run with Hydra. The scan for plugins leaves this file out."""

import copy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hydra_plugins.lockstep_sweeper import LockstepLauncher, LockstepSweeper
from hydra_plugins.lockstep_sweeper._searches import Plan, build_search, check_search, make_plan, refuse_search
from lockstep import cli
from lockstep.config.check import flatten
from lockstep.distributed.environment import read_rank_info
from lockstep.errors import ConfigError, StoppedEarly
from lockstep.launchers.base import RankFailed
from lockstep.launchers.processes import preload
from lockstep.sweeps.ending import at_end, end_sweep
from lockstep.sweeps.in_world import restarted, run_in_world
from lockstep.sweeps.job_process import LONGEST_CAUSE, Outcome, cause_in_words
from lockstep.sweeps.runner import SweepRunner
from lockstep.sweeps.search import Job, JobList, Search, add_jobs, changed_words, folder_name, to_run, varied_keys
from lockstep.sweeps.slots import Slot, divide_machine
from lockstep.sweeps.sweep import OpenSweep, SweepSettings
from lockstep.sweeps.table import FAILED, FINISHED, RUNNING, Row, SweepTable, read_rows

KEPT = 200  # composed configs in memory
OWN_SUBDIR = "${hydra.job.num}"  # of conf/config.yaml: the folders may be named by this file


class HydraJobs:
    """Composes, checks and runs jobs. master: the config of the sweep as Hydra has composed it, without its jobs."""

    def __init__(self, context: HydraContext, master: DictConfig, task: TaskFunction) -> None:
        self.context, self.master, self.task = context, master, task
        self.folder = Path(str(master.hydra.sweep.dir))
        self.composed: dict[tuple[str, ...], DictConfig] = {}  # a job need not compose again what was checked: 0.1 s
        setup_globals()

    def compose(self, overrides: Sequence[str], number: int, folder: str | None = None) -> DictConfig:
        """The config of a job, with the node `hydra`. folder: its run folder inside the sweep's."""
        words = tuple(overrides)
        config = self.composed.get(words) or self.context.config_loader.load_sweep_config(self.master, list(words))
        if len(self.composed) < KEPT:
            self.composed[words] = config
        with open_dict(config), read_write(config.hydra):  # Hydra locks a config that it has used
            config.hydra.job.id = config.hydra.job.num = number
            if folder is not None:
                config.hydra.sweep.subdir = folder
                config.hydra.runtime.output_dir = str((self.folder / folder).absolute())
        return config

    def base(self, fixed: Sequence[str]) -> DictConfig:
        """The config of a job without what the sweep varies."""
        return _without_hydra(self.compose(fixed, 0))

    def name(self, number: int, changed: str, overrides: Sequence[str]) -> str:
        """The folder of a job: what hydra.sweep.subdir says, where the user has chosen one."""
        if OmegaConf.to_container(self.master.hydra.sweep, resolve=False)["subdir"] == OWN_SUBDIR:  # type: ignore[index, call-overload]
            return folder_name(number, changed)
        config = self.compose(overrides, number)
        HydraConfig.instance().set_config(config)
        return str(config.hydra.sweep.subdir)

    def check_all(self, lists: Sequence[Sequence[str]], fixed: set[str]) -> None:
        """Raise ConfigError, or an error of Hydra's, for the first job whose config is wrong. Writes nothing."""
        finished = {row.overrides for row in read_rows(self.folder) if row.state == FINISHED}
        for number, overrides in enumerate(lists):
            if changed_words(overrides, fixed) not in finished:
                config = self.compose(overrides, number, str(number))
                HydraConfig.instance().set_config(config)
                cli.check_input(_without_hydra(config))

    def run(self, job: Job, row: Row) -> Outcome:
        """Run a job in this process, and print its errors."""

        def call() -> None:
            config = self.compose(job.overrides, job.number, row.folder)
            result = run_job(self.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context)
            if result.status != JobStatus.COMPLETED:
                raise result._return_value
            values.append(result.return_value)

        values: list[Any] = []
        code, error = cli.end_of(call)
        return Outcome(code, values[0] if values else None, _cause(error))


def sweep_over(sweeper: LockstepSweeper, words: list[str]) -> None:
    """Run the jobs that the words of a command list."""
    assert sweeper.config is not None
    assert sweeper.hydra_context is not None
    assert sweeper.launcher is not None
    parser = OverridesParser.create(config_loader=sweeper.hydra_context.config_loader)
    overrides = parser.parse_overrides(words)
    ((fixed,),) = sweeper.split_arguments([word for word in overrides if not word.is_sweep_override()], None)
    jobs = HydraJobs(sweeper.hydra_context, sweeper.config, sweeper.task_function)
    varied = varied_keys(read_rows(jobs.folder))  # also if this command has one value of a key
    fixed = [word for word in fixed if word.partition("=")[0] not in varied]
    plan = make_plan(jobs.base(fixed), overrides, fixed, lambda: sweeper.split_arguments(overrides, None)[0])
    jobs.check_all(plan.lists, set(fixed))
    is_own = isinstance(sweeper.launcher, LockstepLauncher)
    check_search(jobs.base(fixed), plan, is_own)
    run_plan(sweeper.launcher, jobs, plan)


def run_plan(launcher: Launcher, jobs: HydraJobs, plan: Plan) -> None:
    """Run the jobs in the ranks that are there, in processes of their own, or with a launcher of Hydra's."""
    info = read_rank_info()

    def open_search() -> tuple[OpenSweep, Search]:
        sweep = open_sweep(jobs, plan.fixed)
        return sweep, build_search(sweep, plan, jobs.name, slots=1)

    if info.started_by != "python":
        run_in_world(info, open_search, jobs.run)
        return
    sweep = open_sweep(jobs, plan.fixed)
    if isinstance(launcher, LockstepLauncher):
        slots = slots_of(jobs, sweep)
        run_here(jobs, sweep, build_search(sweep, plan, jobs.name, len(slots)), slots)
    else:
        added = add_jobs(sweep.table, plan.lists, set(plan.fixed), jobs.name)
        run_by_launcher(launcher, sweep, to_run(sweep.table, added, sweep.settings.retry == "failed"))


def open_sweep(jobs: HydraJobs, fixed: Sequence[str]) -> OpenSweep:
    """The sweep in its folder. fixed: the overrides that all jobs have. Raises ConfigError."""
    base: Any = jobs.base(fixed)
    name = base.objective.removeprefix("test/")
    mode = base.task.get("metrics", {}).get(name, "min")
    told = {key: value for key, value in base.sweep.items() if key != "resume"}
    if restarted():
        told["retry"] = "failed"
    settings = SweepSettings(**told, objective=base.objective, mode=mode, epochs=base.trainer.epochs)
    sweep = OpenSweep(jobs.folder, settings, fixed, flatten(OmegaConf.to_container(base, resolve=False)))
    at_end(sweep.finish)
    return sweep


def slots_of(jobs: HydraJobs, sweep: OpenSweep) -> list[Slot]:
    """How this machine is divided between the jobs. Raises ConfigError."""
    return divide_machine(sweep.settings.slots, jobs.base(sweep.fixed).launch.get("nproc_per_node", 1))


def run_here(jobs: HydraJobs, sweep: OpenSweep, search: Search, slots: Sequence[Slot]) -> None:
    """Run jobs in processes that are forked from this one, which imports what they need."""
    preload("fork")
    runner = SweepRunner(sweep.table, search, jobs.run, sweep.settings.max_failures, slots)
    runner.run()
    sweep.stop_code = runner.stop_code


def run_by_launcher(launcher: Launcher, sweep: OpenSweep, chosen: Sequence[Job]) -> None:
    """Run jobs with a launcher of Hydra's, such as joblib's, which returns when all of them have ended."""
    table, batch = sweep.table, []
    for job in chosen:
        row = table.update(job.number, state=RUNNING, cause="")
        # A worker composes the config again: without these words it would choose a folder of its own.
        folders = [f"hydra.sweep.dir='{table.folder.absolute()}'", f"hydra.sweep.subdir='{row.folder}'"]
        batch.append([*job.overrides, *folders])
    started = time.monotonic()
    try:
        results = launcher.launch(batch, initial_job_idx=chosen[0].number) if batch else []
    except Exception as error:  # such as submitit's, when one of its workers was killed
        traceback.print_exception(error)
        for job in chosen:
            table.update(job.number, state=FAILED, cause=f"the launcher failed: {_cause(error)}"[:LONGEST_CAUSE])
        return
    finally:
        end_joblib_workers()
    seconds = round((time.monotonic() - started) / max(1, len(batch)), 2)
    for job, result in zip(chosen, results, strict=True):
        record_return(table, job, result, seconds)


def record_return(table: SweepTable, job: Job, result: JobReturn, seconds: float) -> None:
    """Write what a launcher of Hydra's returned for a job to its row. seconds: the mean of the jobs of its batch."""
    value = result._return_value
    if result.status == JobStatus.COMPLETED:
        table.update(job.number, state=FINISHED, objective=value, seconds=seconds, **table.read_best(job.number))
    else:
        table.update(job.number, state=FAILED, seconds=seconds, cause=_cause(value)[:LONGEST_CAUSE])


def end_joblib_workers() -> None:
    """joblib keeps its workers for later calls, and they would outlive this command."""
    loky = sys.modules.get("joblib.externals.loky")
    if loky is not None:
        loky.get_reusable_executor().shutdown(wait=True)


def launch_jobs(launcher: LockstepLauncher, lists: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run jobs for a sweeper of Hydra's, which may launch several times. Returns what they returned.

    Raises StoppedEarly after a signal: the sweeper must not go on.
    """
    jobs = HydraJobs(launcher.context, launcher.config, launcher.task_function)
    typed = set(sys.argv)
    fixed = [word for word in lists[0] if word in typed]
    if launcher.opened is None:
        refuse_search(jobs.base(fixed))
        launcher.opened = open_sweep(jobs, fixed)
    numbered = add_jobs(launcher.opened.table, lists, set(fixed), jobs.name)
    chosen = to_run(launcher.opened.table, numbered, launcher.opened.settings.retry == "failed")
    run_here(jobs, launcher.opened, JobList(chosen), slots_of(jobs, launcher.opened))
    if launcher.opened.stop_code is not None:
        raise StoppedEarly("the sweep stopped early", end_sweep())
    return [_as_return(job, launcher.opened.table.rows[job.number]) for job in numbered]


def _as_return(job: Job, row: Row) -> JobReturn:
    is_finished = row.state == FINISHED
    value = row.objective if is_finished else RuntimeError(row.cause)
    status = JobStatus.COMPLETED if is_finished else JobStatus.FAILED
    return JobReturn(overrides=job.overrides, status=status, _return_value=value)


def _cause(error: BaseException | None) -> str:
    """The error of a job in one line."""
    if error is None:
        return ""
    if isinstance(error, RankFailed) and "first" in error.contents:
        return cause_in_words(error.contents)
    if isinstance(error, RankFailed) and error.__cause__ is None:
        return error.headline.removeprefix("lockstep: ")
    if isinstance(error, RankFailed):
        error = error.__cause__  # this rank's own error
    return " ".join((str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}").split())


def _without_hydra(config: DictConfig) -> DictConfig:
    job = copy.deepcopy(config)
    with open_dict(job):
        del job["hydra"]
    return job
