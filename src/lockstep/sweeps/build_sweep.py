# until issue 45
"""From the words of a command with -m to a sweep that runs: its jobs are composed by Hydra, checked, and started.

Hydra calls `run_sweep` by this project's sweeper, and `launch_jobs` for one of its own: see `src/hydra_plugins`.
"""

import copy
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lockstep.cli import as_config_error, tell
from lockstep.config.check import check, check_values, flatten
from lockstep.config.nodes import check_nodes, instantiate_as, nodes_in, with_own_arguments
from lockstep.config.record import config_flags
from lockstep.config.schema import RunConfig, Sweep
from lockstep.distributed import signals
from lockstep.distributed.host import end_with_parent
from lockstep.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    CannotStartNow,
    ConfigError,
    RankFailed,
    RankMissing,
    StoppedEarly,
    exit_code_of,
)
from lockstep.launchers.base import Launcher
from lockstep.runs.record import loaded_code_facts
from lockstep.source_code import module_hashes
from lockstep.sweeps.process import Outcome, Slot, divide_machine
from lockstep.sweeps.runner import JobFailed, OpenSweep, SweepRunner, at_end, end_sweep, sweeper_goes_on
from lockstep.sweeps.search import (
    LIST,
    Choices,
    Job,
    JobList,
    Numbers,
    Plan,
    Search,
    Space,
    SweepSettings,
    add_jobs,
    build_search,
    changed_words,
    check_search,
    folder_name,
    interval,
    make_plan,
    to_run,
)
from lockstep.sweeps.table import FINISHED, OF_ONE_COMMAND, Row, read_table

OWN_SUBDIR = "${hydra.job.num}"  # of conf/config.yaml: the folders may be named by this file
KEPT_CONFIGS = 200  # of jobs, in memory

Checked = Sequence[tuple[Sequence[str], RunConfig]]
"""(overrides, config) of jobs."""


class HydraJobs:
    """Composes and runs jobs.

    master: the config of the sweep as Hydra has composed it, without its jobs.
    fixed: the overrides that all jobs have.
    base: the config of a job without what the sweep varies.
    settings: what `base` says of the sweep.
    """

    def __init__(self, context: HydraContext, master: DictConfig, task: TaskFunction, fixed: Sequence[str]) -> None:
        self.context, self.master, self.task, self.fixed = context, master, task, fixed
        self.folder = Path(str(master.hydra.sweep.dir))
        setup_globals()
        # Hydra reads twenty files for a config, which takes 0.1 s. The jobs are forked with those that were checked.
        self.load = lru_cache(KEPT_CONFIGS)(lambda words: context.config_loader.load_sweep_config(master, list(words)))
        self.base: Any = _without_hydra(self.compose(fixed, 0))
        section: Any = OmegaConf.to_container(self.base.sweep)
        check_values("sweep", section, Sweep)
        base, objective = self.base, _objective(self.base)
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # a killed rank has failed its job: try it again
            section["retry"] = "failed"
        mode = base.task.get("metrics", {}).get(str(objective).partition("/")[2], "min")
        self.settings = SweepSettings(
            **section,
            objective=objective,
            mode=mode,
        )

    def compose(self, overrides: Sequence[str], number: int, folder: str | None = None) -> DictConfig:
        """The config of a job, with the node `hydra`. folder: its run folder inside the sweep's."""
        config: DictConfig = copy.deepcopy(self.load(tuple(overrides)))
        with read_write(config), read_write(config.hydra), open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
            if folder is not None:
                config.hydra.sweep.subdir = folder
                config.hydra.runtime.output_dir = str((self.folder / folder).absolute())
        return config

    def name(self, number: int, changed: str, overrides: Sequence[str]) -> str:
        """The folder of a job: what hydra.sweep.subdir says, where the user has chosen one."""
        section: Any = OmegaConf.to_container(self.master.hydra.sweep, resolve=False)
        if section["subdir"] == OWN_SUBDIR:
            return folder_name(number, changed)
        config = self.compose(overrides, number)
        HydraConfig.instance().set_config(config)
        return str(config.hydra.sweep.subdir)

    def run(self, job: Job, row: Row) -> Outcome:
        """Run a job in this process, and print its errors."""
        errors: list[Exception] = []

        def task(cfg: DictConfig) -> Any:
            try:
                return self.task(cfg)
            except Exception as error:
                errors.append(error)
                raise

        def call() -> Any:
            config = self.compose(job.overrides, job.number, row.folder)
            result = run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context)
            if errors:
                raise errors[0]
            return result.return_value

        objective, code, error = None, EXIT_FINISHED, None
        try:
            objective = call()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else EXIT_FAILED
        except (StoppedEarly, KeyboardInterrupt) as stopped:
            code, error = exit_code_of(stopped), None
        except Exception as failed:
            code, error = tell(failed), as_config_error(failed) or failed
        is_refused = isinstance(error, ConfigError) and not isinstance(error, CannotStartNow)
        return Outcome(code, objective, _in_words(error), is_refused, isinstance(error, RankMissing))

    def check(self, lists: Sequence[Sequence[str]]) -> Checked:
        """Raise ConfigError for the first job whose values alone are wrong. Writes nothing. Without torch."""
        finished = {row.overrides for row in read_table(self.folder) if row.state == FINISHED}
        checked: list[tuple[Sequence[str], RunConfig]] = []
        for number, overrides in enumerate(lists):
            if changed_words(overrides, set(self.fixed)) in finished:
                continue
            config = self.config(overrides, number)
            if len(checked) < KEPT_CONFIGS:
                checked.append((overrides, config))
        return checked

    def config(self, overrides: Sequence[str], number: int) -> RunConfig:
        """The config of a job. Raises ConfigError for wrong values, with what the job changes."""
        with _naming(overrides, self.fixed):
            config = self.compose(overrides, number, str(number))
            HydraConfig.instance().set_config(config)  # Hydra's own resolvers then answer for this job
            return check(with_own_arguments(_without_hydra(config), overrides))

    def slots(self, lists: Sequence[Sequence[str]]) -> list[Slot]:
        """How this machine is divided between jobs with these overrides. Raises ConfigError."""
        fixed = set(self.fixed)
        changes = {tuple(word for word in words if word.startswith("launch") and word not in fixed) for words in lists}
        configs = [self.base, *(self.compose([*self.fixed, *words], 0) for words in changes if words)]
        ranks = [config.launch.get("nproc_per_node", 1) for config in configs]
        named = [count for count in ranks if not isinstance(count, int)]
        return divide_machine(self.settings.slots, named[0] if named else max(ranks))

    def open(self, modules: dict[str, str]) -> OpenSweep:
        """The sweep in its folder. modules: {module: hash} of the user's that the jobs import. Raises ConfigError."""
        config = flatten(OmegaConf.to_container(self.base, resolve=False))
        fixed = [word for word in self.fixed if not word.startswith(("sweep.", "hydra."))]
        folders = config_flags(sys.argv[1:])
        left_out = ("-m", "--multirun", *OF_ONE_COMMAND)
        words = [word for word in sys.argv[1:] if not word.startswith(left_out)]
        return OpenSweep(self.folder, self.settings, [*fixed, *folders], config, modules, words)

    def run_here(self, sweep: OpenSweep, search: Search, slots: Sequence[Slot]) -> bool:
        """Run jobs in processes that are forked from this one, which imports and asks once what each of them needs: of
        this project only, as what a user's module does when it is imported is the job's own affair.

        Returns whether a signal has asked for the end.
        """
        targets = nodes_in(OmegaConf.to_container(self.base, resolve=False), "")
        modules = [node["_target_"].rpartition(".")[0] for _, node in targets]
        own = [name for name in modules if name.startswith("lockstep.")]
        for name in [*own, "lockstep.launchers.rank_imports", "lockstep.tasks.reports"]:
            with suppress(ImportError):  # the job that needs it reports the error
                importlib.import_module(name)
        loaded_code_facts()
        runner = SweepRunner(sweep, search, self.run, slots)
        runner.run()
        return runner.was_stopped


def _objective(base: Any) -> str:
    """What jobs with this config return, by its name."""
    held_out = base.trainer.final is None and (base.loader.validation is not None or base.loader.folds is not None)
    own = None if base.monitor == "auto" else base.monitor
    return str(own or f"{'val' if held_out else 'test'}/{base.task.get('monitor', 'loss')}")


def _without_hydra(config: DictConfig) -> DictConfig:
    """`config` itself, without the node `hydra`."""
    with read_write(config), open_dict(config):
        del config["hydra"]
    return config


def _in_words(error: BaseException | None) -> str:
    """The error of a job in one line. The failure report in its folder says more, if it has one."""
    if isinstance(error, RankFailed) and error.__cause__ is None:
        return str(error).partition("\n")[0].removeprefix("lockstep: ")
    if isinstance(error, RankFailed):
        error = error.__cause__  # this rank's own error
    if error is None:
        return ""
    return " ".join((str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}").split())


@contextmanager
def _naming(overrides: Sequence[str], fixed: Sequence[str]) -> Iterator[None]:
    """An error of the user's input becomes a ConfigError that begins with what the job changes."""
    try:
        yield
    except Exception as error:
        known = as_config_error(error)
        if known is None:
            raise
        changed = changed_words(overrides, set(fixed))
        raise ConfigError(f"the job {changed}: {known}" if changed else str(known)) from error


def preflight_jobs(checked: Checked, plan: Plan) -> dict[str, str]:
    """Raise ConfigError for the first job that would be refused when it starts, as far as this needs no data.

    Returns {module: hash} of the user's modules that the jobs import. Of jobs that are drawn at random some may be
    refused: their rows say it. A forked process checks them: this one may not ask CUDA, as the jobs are forked from
    it. If that process cannot tell, the job itself does.
    """
    import lockstep.launchers.rank_imports  # noqa: F401  (what the job imports, too: torch once for all of them)

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _preflight_in_child(checked, plan, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.loads(pipe.read() or "{}")
    os.waitpid(pid, 0)
    if answer.get("refusal"):
        raise ConfigError(answer["refusal"])
    modules: dict[str, str] = answer.get("modules", {})
    return modules


def _preflight_in_child(checked: Checked, plan: Plan, writer: int) -> NoReturn:
    try:
        signals.end_at_signals()
        end_with_parent()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)  # a module of the user's may print: each job prints it again
        os.dup2(nothing, 2)
        refusals = (_refusal(overrides, config, plan.fixed) for overrides, config in checked)
        if plan.are_drawn:  # refused if all of them are
            found = list(itertools.takewhile(bool, refusals))
            refusal = found[0] if found and len(found) == len(checked) else ""
        else:
            refusal = next(filter(None, refusals), "")
        with open(writer, "w") as pipe:
            json.dump({"refusal": refusal, "modules": module_hashes(users_only=True)}, pipe)
    finally:
        os._exit(0)


def _refusal(overrides: Sequence[str], config: RunConfig, fixed: Sequence[str]) -> str:
    """Why a job is refused, empty if it is not."""
    from lockstep.preflight import preflight  # imports torch, which refusals of values need not wait for

    try:
        with _naming(overrides, fixed):
            preflight(config, starts=False)
    except ConfigError as error:
        return str(error)
    return ""


def named_objective(config: RunConfig) -> str | None:
    """What chooses the best weights of a job."""
    from lockstep.build import objective_of
    from lockstep.tasks.base import Task

    return objective_of(config, instantiate_as(Task, config.task, "task"))


def run_sweep(context: HydraContext, master: DictConfig, task: TaskFunction, words: Sequence[str]) -> None:
    """Run the jobs that the words of a command ask for. master: see `HydraJobs`."""
    name = master.hydra.runtime.choices["hydra/launcher"]
    if name not in (None, "lockstep"):
        raise ConfigError(
            f"hydra/launcher={name} cannot run these jobs; leave it out, and type sweep.slots=2 for two at once"
        )
    parser = OverridesParser.create(config_loader=context.config_loader)
    overrides = parser.parse_overrides(list(words))
    rows = read_table(Path(str(master.hydra.sweep.dir)))
    varied = {key for row in rows for key in row.values}  # also if this command has one value of a key
    plain = [override for override in overrides if not override.is_sweep_override()]
    fixed = [word for word in _product(plain)[0] if word.partition("=")[0] not in varied]
    jobs = HydraJobs(context, master, task, fixed)
    settings = jobs.settings
    plan = make_plan(settings, fixed, lambda: _product(overrides), lambda: read_space(overrides, fixed))
    checked = jobs.check(plan.lists)
    node: Any = OmegaConf.to_container(jobs.base.launch, resolve=True)
    check_nodes("launch", node)
    launcher = instantiate_as(Launcher, node, "launch")
    objectives = list(filter(None, (named_objective(config) for _, config in checked)))
    check_search(settings, objectives, launcher.runs_elsewhere)
    modules = preflight_jobs(checked, plan)

    slots = jobs.slots(plan.lists)  # before the sweep is opened: a refused command leaves the folder as it is
    sweep = jobs.open(modules)
    search = build_search(sweep.table, settings, plan, jobs.name, len(slots))
    at_end(sweep.finish)
    jobs.run_here(sweep, search, slots)


def _product(overrides: Sequence[Override]) -> list[list[str]]:
    """The overrides of each job, of all combinations of what lists give. Raises ConfigError for an interval."""
    values: dict[str, list[str]] = {}  # of a key typed twice the last one counts
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise ConfigError(f"{override.input_line} is no list of values; type sweep.search=random sweep.trials=20")
    return [list(job) for job in itertools.product(*values.values())]


def read_space(overrides: Sequence[Override], fixed: Sequence[str]) -> Space:
    """What Hydra's sweep syntax lists. Raises ConfigError if nothing varies.

    A plain word that is not in `fixed` is of a key that earlier jobs of this sweep vary: here it has one value.
    """
    typed = {override.get_key_element(): override for override in overrides}  # of a key typed twice the last one
    if not any(override.is_sweep_override() for override in typed.values()):
        raise ConfigError("nothing varies in this sweep; type optimizer.lr=tag(log,interval(0.001,0.1))")
    space: dict[str, Numbers | Choices] = {}
    for key, override in typed.items():
        value = override.value()
        if not override.is_sweep_override():
            if f"{key}={override.get_value_element_as_str()}" not in fixed:
                space[key] = Choices((override.get_value_element_as_str(),))
        elif isinstance(value, IntervalSweep):
            assert value.start is not None
            assert value.end is not None
            space[key] = interval(key, value.start, value.end, set(value.tags))
        else:
            space[key] = Choices(tuple(dict.fromkeys(override.sweep_string_iterator())))
    return space


def launch_jobs(
    context: HydraContext,
    master: DictConfig,
    task: TaskFunction,
    lists: Sequence[Sequence[str]],
    sweep: OpenSweep | None,
) -> tuple[OpenSweep, list[JobReturn]]:
    """Run jobs for a sweeper of Hydra's. Returns the sweep, and what the jobs returned.

    sweep: of an earlier call. Raises StoppedEarly after a signal, and JobFailed after `sweep.max_failures`: the
    sweeper must not go on.
    """
    sweeper_goes_on(nothing_finished=False)  # until the results are there, an error is ours
    fixed = [word for word in lists[0] if word in set(sys.argv)]
    jobs = HydraJobs(context, master, task, fixed)
    slots = jobs.slots(lists)
    if sweep is None:
        if jobs.settings.search != LIST:
            raise ConfigError(
                f"sweep.search={jobs.settings.search} and hydra/sweeper= both choose the jobs; leave out one"
            )
        sweep = jobs.open({})
        at_end(sweep.finish)
    numbered = add_jobs(sweep.table, lists, set(fixed), jobs.name)
    if jobs.run_here(sweep, JobList(to_run(sweep.table, numbered, sweep.settings.retries_failed)), slots):
        sweep.note_stop()  # the sweeper has more jobs
        raise StoppedEarly("the sweep stopped early", end_sweep())
    if sweep.is_hopeless:
        raise JobFailed(f"sweep.max_failures={sweep.settings.max_failures}")
    sweeper_goes_on(nothing_finished=all(row.state != FINISHED for row in sweep.table))
    returned = []
    for job in numbered:
        row = sweep.table.rows[job.number]
        result = JobReturn(overrides=job.overrides)
        result.status = JobStatus.COMPLETED if row.state == FINISHED else JobStatus.FAILED
        result.return_value = row.objective if row.state == FINISHED else JobFailed(row.cause)
        returned.append(result)
    return sweep, returned
