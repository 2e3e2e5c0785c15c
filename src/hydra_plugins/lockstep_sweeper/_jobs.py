"""How the jobs of a sweep are composed and run with Hydra. The scan for plugins leaves this file out."""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hydra_plugins.lockstep_sweeper import LockstepLauncher, LockstepSweeper
from hydra_plugins.lockstep_sweeper._checks import check_jobs, constrained, preflight_jobs
from hydra_plugins.lockstep_sweeper._composing import Composer, sweep_folder, without_hydra
from hydra_plugins.lockstep_sweeper._outcomes import outcome_of
from hydra_plugins.lockstep_sweeper._searches import (
    Plan,
    build_search,
    check_search,
    make_plan,
    refuse_search,
    with_earlier_jobs,
)
from lockstep.cli import words_of_folders
from lockstep.config.schema import flatten, nodes_with_target
from lockstep.distributed.environment import read_rank_info
from lockstep.errors import EXIT_RESUMABLE, StoppedEarly
from lockstep.runs.record import loaded_code_facts
from lockstep.sweeps.ending import JobFailed, at_end, end_sweep, refuse_foreign_launcher, sweeper_goes_on
from lockstep.sweeps.in_world import restarted, run_in_world
from lockstep.sweeps.job_process import Outcome, wait_for_turn
from lockstep.sweeps.runner import SweepRunner
from lockstep.sweeps.search import Job, JobList, Search, add_jobs, folder_name, to_run, varied_keys
from lockstep.sweeps.slots import Slot, divide_machine
from lockstep.sweeps.sweep import OpenSweep, SweepSettings
from lockstep.sweeps.table import FINISHED, Row, read_rows

OWN_SUBDIR = "${hydra.job.num}"  # of conf/config.yaml: the folders may be named by this file


class HydraJobs:
    """Composes, checks and runs jobs. master: the config of the sweep as Hydra has composed it, without its jobs.

    fixed: the overrides that all jobs have. base: the config of a job without what the sweep varies.
    """

    def __init__(self, context: HydraContext, master: DictConfig, task: TaskFunction, fixed: Sequence[str]) -> None:
        self.context, self.master, self.task, self.fixed = context, master, task, fixed
        self.folder = sweep_folder(master)
        self.composer = Composer(context.config_loader, master, fixed)
        setup_globals()
        self.base: Any = without_hydra(self.compose(fixed, 0))
        self.modules: dict[str, str] = {}  # those of the user's that the jobs import, and their hashes

    def compose(self, overrides: Sequence[str], number: int, folder: str | None = None) -> DictConfig:
        """The config of a job, with the node `hydra`. folder: its run folder inside the sweep's."""
        config = self.composer.compose(overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
            if folder is not None:
                config.hydra.sweep.subdir = folder
                config.hydra.runtime.output_dir = str((self.folder / folder).absolute())
        return config

    def config(self, overrides: Sequence[str], number: int) -> DictConfig:
        """The config of a job, in the folder of its number. Hydra's own resolvers then answer for this job."""
        config = self.compose(overrides, number, str(number))
        HydraConfig.instance().set_config(config)
        return without_hydra(config)

    def name(self, number: int, changed: str, overrides: Sequence[str]) -> str:
        """The folder of a job: what hydra.sweep.subdir says, where the user has chosen one."""
        if OmegaConf.to_container(self.master.hydra.sweep, resolve=False)["subdir"] == OWN_SUBDIR:  # type: ignore[index, call-overload]
            return folder_name(number, changed)
        config = self.compose(overrides, number)
        HydraConfig.instance().set_config(config)
        return str(config.hydra.sweep.subdir)

    def run(self, job: Job, row: Row) -> Outcome:
        """Run a job in this process, and print its errors."""

        def call() -> Any:
            config = self.compose(job.overrides, job.number, row.folder)
            result = run_job(self.task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context)
            if result.status != JobStatus.COMPLETED:
                wait_for_turn()  # before it prints what is wrong
                raise result._return_value
            return result.return_value

        return outcome_of(call)


def sweep_over(sweeper: LockstepSweeper, words: list[str]) -> None:
    """Run the jobs that the words of a command list."""
    assert sweeper.config is not None
    assert sweeper.hydra_context is not None
    if not isinstance(sweeper.launcher, LockstepLauncher):
        refuse_foreign_launcher(sweeper.config.hydra.runtime.choices["hydra/launcher"])
    parser = OverridesParser.create(config_loader=sweeper.hydra_context.config_loader)
    overrides = parser.parse_overrides(words)
    ((fixed,),) = sweeper.split_arguments([word for word in overrides if not word.is_sweep_override()], None)
    rows = read_rows(sweep_folder(sweeper.config))
    varied = varied_keys(rows)  # also if this command has one value of a key
    fixed = [word for word in fixed if word.partition("=")[0] not in varied]
    jobs = HydraJobs(sweeper.hydra_context, sweeper.config, sweeper.task_function, fixed)
    allows = constrained(jobs)
    plan = make_plan(jobs.base, overrides, fixed, lambda: sweeper.split_arguments(overrides, None)[0], allows)
    if jobs.base.sweep.resume is not None:
        plan = with_earlier_jobs(plan, rows, jobs.base.sweep.retry == "failed")
    checked = check_jobs(jobs, plan.lists)
    check_search(jobs.base, plan)
    jobs.modules = preflight_jobs(checked, plan)
    run_plan(jobs, plan)


def run_plan(jobs: HydraJobs, plan: Plan) -> None:
    """Run the jobs in the ranks that are there, or in processes of their own."""
    info = read_rank_info()

    def open_search() -> tuple[OpenSweep, Search]:
        sweep = open_sweep(jobs)
        return sweep, build_search(sweep, plan, jobs.name, slots=1)

    if not info.may_start_ranks:
        run_in_world(info, open_search, jobs.run)
        return
    slots = slots_of(jobs, plan.lists)  # before `open_sweep`: a refused command leaves the folder as it is
    sweep = open_sweep(jobs)
    run_here(jobs, sweep, build_search(sweep, plan, jobs.name, len(slots)), slots)


def open_sweep(jobs: HydraJobs) -> OpenSweep:
    """The sweep in its folder. Raises ConfigError."""
    base = jobs.base
    name = base.objective.removeprefix("test/")
    mode = base.task.get("metrics", {}).get(name, "min")
    told = {key: value for key, value in base.sweep.items() if key != "resume"}
    if restarted():
        told["retry"] = "failed"
    settings = SweepSettings(**told, objective=base.objective, mode=mode, epochs=base.trainer.epochs)
    config = flatten(OmegaConf.to_container(base, resolve=False))
    fixed = [word for word in jobs.fixed if not word.startswith(("sweep.", "hydra."))]
    sweep = OpenSweep(jobs.folder, settings, [*fixed, *words_of_folders(sys.argv[1:])], config, jobs.modules)
    at_end(sweep.finish)
    return sweep


def slots_of(jobs: HydraJobs, lists: Sequence[Sequence[str]]) -> list[Slot]:
    """How this machine is divided between jobs with these overrides. Raises ConfigError."""
    fixed = set(jobs.fixed)
    changes = {tuple(word for word in words if word.startswith("launch") and word not in fixed) for words in lists}
    configs = [jobs.base, *(jobs.compose([*jobs.fixed, *words], 0) for words in changes if words)]
    ranks = [config.launch.get("nproc_per_node", 1) for config in configs]
    named = [count for count in ranks if not isinstance(count, int)]
    return divide_machine(jobs.base.sweep.slots, named[0] if named else max(ranks))


def run_here(jobs: HydraJobs, sweep: OpenSweep, search: Search, slots: Sequence[Slot]) -> bool:
    """Run jobs in processes that are forked from this one, which imports what they need.

    Returns whether a signal has asked for the end.
    """
    named = [node["_target_"] for _, node in nodes_with_target(OmegaConf.to_container(jobs.base, resolve=False))]
    prepare_forks([name.rpartition(".")[0] for name in named if name.startswith("lockstep.")])
    runner = SweepRunner(sweep, search, jobs.run, slots)
    runner.run()
    return runner.was_stopped


def prepare_forks(modules: Sequence[str]) -> None:
    """Import and ask once, in the process that jobs are forked from, what each of them needs. modules: of this project:
    what a user's module does when it is imported is the job's own affair.
    """
    for name in [*modules, "lockstep.rank_imports", "lockstep.tasks.drawing"]:
        with suppress(ImportError):  # the job that needs it reports the error
            importlib.import_module(name)
    loaded_code_facts()


def launch_jobs(launcher: LockstepLauncher, lists: Sequence[Sequence[str]]) -> list[JobReturn]:
    """Run jobs for a sweeper of Hydra's, which may launch several times. Returns what they returned.

    Raises StoppedEarly after a signal, and JobFailed after `sweep.max_failures`: the sweeper must not go on.
    """
    sweeper_goes_on(nothing_finished=False)  # until the results are there, an error is ours
    typed = set(sys.argv)
    fixed = [word for word in lists[0] if word in typed]
    jobs = HydraJobs(launcher.context, launcher.config, launcher.task_function, fixed)
    slots = slots_of(jobs, lists)
    if launcher.opened is None:
        refuse_search(jobs.base)
        launcher.opened = open_sweep(jobs)
    numbered = add_jobs(launcher.opened.table, lists, set(fixed), jobs.name)
    chosen = to_run(launcher.opened.table, numbered, launcher.opened.settings.retry == "failed")
    if run_here(jobs, launcher.opened, JobList(chosen), slots):
        launcher.opened.stop_code = launcher.opened.stop_code or EXIT_RESUMABLE  # the sweeper has more jobs
        raise StoppedEarly("the sweep stopped early", end_sweep())
    if launcher.opened.is_hopeless:
        raise JobFailed(f"sweep.max_failures={launcher.opened.settings.max_failures}")
    sweeper_goes_on(nothing_finished=all(row.state != FINISHED for row in launcher.opened.table))
    return [_as_return(job, launcher.opened.table.rows[job.number]) for job in numbered]


def _as_return(job: Job, row: Row) -> JobReturn:
    is_finished = row.state == FINISHED
    value = row.objective if is_finished else JobFailed(row.cause)
    status = JobStatus.COMPLETED if is_finished else JobStatus.FAILED
    return JobReturn(overrides=job.overrides, status=status, _return_value=value)
