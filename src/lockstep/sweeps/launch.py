"""A sweep: Hydra lists its jobs; here they are composed, checked, run, and shown at the end. No torch at the top."""

import copy
import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict, read_write

from lockstep.cli import as_config_error
from lockstep.config.check import check, check_value
from lockstep.config.nodes import instantiate_as, with_own_arguments
from lockstep.config.record import config_flags, record_config, typed_overrides
from lockstep.config.schema import Count, RunConfig, Whole
from lockstep.distributed import signals
from lockstep.distributed.environment import SLURM_JOB_FILE, is_in_queue
from lockstep.distributed.run_folder import HeldFolder, require_same_run
from lockstep.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError, StoppedEarly, path_value
from lockstep.files import short_hash
from lockstep.launchers.base import print_line
from lockstep.runs.record import FINISHED, PAUSED, best_of, changes_no_number, find_runs, read_run, state_of
from lockstep.runs.table import choosing, frame, is_repeat, settings, show
from lockstep.source_code import hash_of_source
from lockstep.sweeps.jobs import Job, Jobs, Outcome, divide_machine, run_jobs, server

HYDRAS = "multirun.yaml"  # Hydra's sweeper writes it into the folder of a sweep before anything is checked
LONGEST_NAME = 120  # characters of a job's folder


@dataclass(frozen=True)
class Settings:
    """The keys of hydra.launcher."""

    n_jobs: Count | Literal["auto"]
    retries: Whole
    max_failures: Count | None


class Sweep(Jobs):
    """The sweep of a command, and the jobs that it lists. Raises ConfigError.

    master: the config as Hydra has composed it, without the jobs.
    """

    def __init__(self, context: HydraContext, master: DictConfig) -> None:
        keys = {name: value for name, value in master.hydra.launcher.items() if name != "_target_"}
        self.settings: Settings = check_value(Settings, keys, "hydra.launcher")
        self.loader, self.master, self.folder = context.config_loader, master, Path(str(master.hydra.sweep.dir))
        self.typed = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
        self.typed += typed_overrides(master.hydra)
        self.lists = str(master.hydra.sweeper._target_).endswith("BasicSweeper")
        overrides = OverridesParser.create(config_loader=self.loader).parse_overrides(self.typed)
        _refuse(overrides, self.lists)
        self.varied = sorted({one.get_key_element() for one in overrides if one.is_sweep_override()})
        self.results = dict[Path, Outcome]()  # of jobs that have ended, by their folders
        self.waiting, self.held = list[Job](), HeldFolder(self.folder, "sweep")
        self.code, self.ranks = EXIT_FINISHED, list[int | str]()
        self.objective: str | None = None
        self.direction = "min"
        setup_globals()
        self.known = [read_run(folder) for folder in find_runs([self.folder] * self.folder.exists())]

    def next(self) -> Job | None:
        return self.waiting.pop(0) if self.waiting else None

    def is_hopeless(self, job: Job) -> bool:
        return False

    def ended(self, job: Job, outcome: Outcome) -> None:
        self.results[job.folder] = outcome

    # ---- Jobs are composed and checked

    def check(self, lists: Sequence[Sequence[str]]) -> list[Job]:
        """The jobs with these overrides. Raises ConfigError for the first one that would be refused at its start."""
        from lockstep.build import direction_of, objective_of
        from lockstep.preflight import preflight
        from lockstep.tasks.base import Task

        jobs = []
        for job, config in map(self.compose, lists):
            try:
                preflight(config, starts=False)
                task = instantiate_as(Task, config.task, "task")
                self.objective = objective_of(config, task)
                self.direction = "min" if self.objective is None else direction_of(config, task, self.objective)
            except ConfigError as refusal:
                raise ConfigError(f"the job {job.title}: {refusal}") from refusal
            except Exception:  # for the job itself to report
                pass
            self.ranks.append(config.launch.get("nproc_per_node", 1))
            jobs.append(job)
        return jobs

    def compose(self, overrides: Sequence[str]) -> tuple[Job, RunConfig]:
        """Raises ConfigError for wrong values, with what the job changes."""
        changes = sorted(word for word in overrides if word.partition("=")[0] in self.varied)
        try:
            composed = self.loader.load_sweep_config(self.master, list(overrides))
            named = any(word.startswith("hydra.sweep.subdir=") for word in self.master.hydra.overrides.hydra)
            folder = self.folder / (str(composed.hydra.sweep.subdir) if named else folder_name(changes))
            with read_write(composed), read_write(composed.hydra), open_dict(composed):
                composed.hydra.runtime.output_dir = str(folder.absolute())
                HydraConfig.instance().set_config(copy.deepcopy(composed))  # its resolvers answer for this job
                del composed["hydra"]
            cfg = with_own_arguments(composed, overrides)
            config = check(cfg)
            record = record_config(cfg, config, HydraConfig.get(), sys.argv)
            values = json.loads(json.dumps(record.shown, default=str))
            run = next((run for run in self.known if same_values(values, run["config"])), None)
            folder = folder if run is None else Path(run["folder"])
            require_same_run(record, str(folder), "hydra.sweep.dir=<a new folder>")
        except Exception as error:
            if (known := as_config_error(error)) is None:
                raise
            raise ConfigError(f"the job {' '.join(changes)}: {known}" if changes else str(known)) from error
        if run is not None and state_of(run) in (FINISHED, PAUSED):
            self.results[folder] = Outcome("finished", run=run)
        with suppress(OSError):
            if is_in_queue((folder / SLURM_JOB_FILE).read_text().strip()):
                self.results.setdefault(folder, Outcome("submitted"))
        flags = [flag for flag in config_flags(sys.argv[1:]) if flag.startswith("-")]
        of_sweep = r"[+~]*hydra[./](run|sweep|sweeper|launcher|mode)\b"
        flags += [word for word in self.master.hydra.overrides.hydra if not re.match(of_sweep, word)]
        return Job(folder, (*flags, *overrides), " ".join(changes)), config

    # ---- Jobs run

    def launch(self, lists: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Run jobs for a sweeper of Hydra's. Raises StoppedEarly where the sweeper must not go on."""
        jobs = self.check(lists)
        waiting = list({job.folder: job for job in jobs if job.folder not in self.results}.values())
        of = f"of {len(waiting)}"
        self.waiting = [replace(job, title=f"job {n} {of}, {job.title}") for n, job in enumerate(waiting, 1)]
        self.run(self, len(waiting))
        if (self.code and self.lists) or self.code > EXIT_CONFIG or self.waiting:
            raise StoppedEarly("the sweep has ended", self.code)
        returned = []
        for job, outcome in ((job, self.results[job.folder]) for job in jobs):
            value = best_of(outcome.run)[0] if outcome.run else None
            state = JobStatus.FAILED if outcome.is_bad else JobStatus.COMPLETED
            failure = RuntimeError(outcome.cause) if outcome.is_bad else value
            returned.append(JobReturn(overrides=job.words, status=state, _return_value=failure))
        return returned

    def run(self, jobs: Jobs, count: int) -> None:
        """Run jobs of any source. count: how many there are at most."""
        words = [ranks for ranks in self.ranks if isinstance(ranks, str)]
        numbers = [ranks for ranks in self.ranks if isinstance(ranks, int)]
        slots = divide_machine(self.settings.n_jobs, words[0] if words else max(numbers))
        if self.held.file is None or jobs is not self:
            self.hold()
            said = f"sweep: {count} job{'s' * (count != 1)}{f', {len(slots)} at once' * (len(slots) > 1)}"
            source = hash_of_source()
            runs = [outcome.run for outcome in self.results.values() if outcome.run is not None]
            others = sum(run["code"].get("source") != source for run in runs)
            said += f"; {len(self.results)} have finished before" * bool(self.results)
            said += f", {others} of them with other code: compare with care" * bool(others)
            print_line(f"{said}; in {self.folder}", sys.stdout)
        failed = sum(outcome.is_bad for outcome in self.results.values())  # in earlier calls, by a sweeper of Hydra's
        left = math.inf if self.settings.max_failures is None else self.settings.max_failures - failed
        self.code = max(self.code, run_jobs(jobs, slots, self.settings.retries, left))

    def hold(self) -> None:
        """Lock the folder until this process ends. Raises ConfigError if another sweep holds it."""
        if (self.folder / "train.log").exists() or (self.folder / "snapshots").exists():
            raise ConfigError(f"{self.folder} is the folder of a run, not of a sweep; type hydra.sweep.dir=<another>")
        if self.held.file is None and (problem := self.held.lock()) is not None:
            raise ConfigError(problem)

    # ---- The end

    def show(self) -> int:
        """Print the table of runs, the best one, what choosing costs, and what to type. Returns the exit code."""
        signals.stop_listening()  # nothing is left to save
        states = [outcome.state for outcome in self.results.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines = [f"\nsweep: {counts or 'no job has ended'}, in {self.folder.absolute()}"]
        table = settings(frame([self.folder]))
        if not table.empty:
            keys = [key for key in (key.lstrip("+") for key in self.varied) if key in table.columns]
            optional = {"test": table["test"].notna().any(), "source": table["source"].nunique() > 1}
            optional["metric"] = table["metric"].nunique() > 1
            columns = ["state", "metric", "objective", "test", "best_step", "seconds", *keys, "source", "run"]
            columns = [name for name in columns if optional.get(name, True)]
            lines += show(table, columns)
            best, values = table.iloc[0], [f"{key}={table[key].iloc[0]}" for key in keys if not is_repeat(key)]
            if best["count"] and not optional["metric"]:
                mean = f"{', '.join(values) or 'the one setting'}, by the mean of {best['count']} runs"
                edges = [f"{key}={best[key]} is at the edge of its list" for key in keys if self._at_edge(table[key])]
                lines.append("; ".join([f"best:       {best['run'] if best['runs'] == 1 else mean}", *edges]))
            lines += [f"choosing:   {text}" for text in [choosing(table)] if text]
        bad = [(folder.name, outcome) for folder, outcome in self.results.items() if outcome.is_bad]
        lines += [f"{outcome.state + ':':12}{name}: {outcome.cause}" for name, outcome in bad]
        if self.code:
            words = [word for word in sys.argv if not word.startswith("hydra.sweep.dir=")]
            again = shlex.join(["python", *words, f"hydra.sweep.dir={path_value(self.folder)}"])
            lines.append(f"go on with: {again}")
        lines.append(f"curves:     {shlex.join(['tensorboard', '--logdir', str(self.folder.absolute())])}")
        for line in lines:
            print_line(line, sys.stdout)
        return self.code

    def _at_edge(self, column: Any) -> bool:
        """Whether the best value, the first, is the least or greatest of a list: a better one may lie beyond it."""
        numbers = {one for one in column if isinstance(one, int | float) and not isinstance(one, bool)}
        return self.lists and len(numbers) > 2 and column.iloc[0] in (min(numbers), max(numbers))


_sweeps: list[Sweep] = []  # that of this command: Hydra hands nothing back from a launcher


def open_sweep(context: HydraContext, master: DictConfig) -> Sweep:
    """As `Sweep`. It is shown at the end of the command."""
    _sweeps.append(Sweep(context, master))
    return _sweeps[-1]


def run_command(main: Callable[[], Any]) -> int:
    """Call a hydra.main function that runs a sweep, and show its end. Returns the exit code.

    An error with which a sweeper of Hydra's ends where jobs have failed becomes one line, for the end tells more.
    """
    server()  # it imports torch while Hydra composes
    try:
        main()
    except StoppedEarly:
        pass
    except Exception as error:
        if isinstance(error, ConfigError) or not any(sweep.code for sweep in _sweeps):
            for sweep in _sweeps:
                _remove_empty(sweep.folder)
            raise
        print_line(f"sweep: the sweeper ends with {type(error).__name__}: {error}", sys.stdout)
    return _sweeps[-1].show() if _sweeps else EXIT_FINISHED


def _remove_empty(folder: Path) -> None:
    """A refused command leaves no folder."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {HYDRAS}:
            shutil.rmtree(folder)
            folder.parent.rmdir()  # outputs/multirun/<day>


def _refuse(overrides: Sequence[Override], lists: bool) -> None:
    """Raise ConfigError for words that mean something else in a sweep, or nothing."""
    keys = [one.key_or_group for one in overrides]
    for one in overrides:
        if lists and one.is_sweep_override() and not one.is_discrete_sweep():
            what = f"{one.input_line} is no list of values"
            raise ConfigError(f"{what}; type hydra/sweeper=optuna hydra.sweeper.n_trials=20 for a search")
        key, is_list = one.key_or_group, one.is_sweep_override() and one.is_discrete_sweep()
        if keys.count(key) > 1 and is_list and any(text.startswith("{") for text in one.sweep_string_iterator()):
            what = f"{key} has lists of several keys twice, of which a sweep would drop one"
            raise ConfigError(f"{what}; type a list for each key, such as {key}.<key>=1,2")


def folder_name(changes: Sequence[str]) -> str:
    """A job's folder, safe for file systems and shells."""
    text = ",".join(word.lstrip("+") for word in changes) or "job"
    safe = re.sub(r"[^\w.,=+-]", "-", text, flags=re.ASCII)
    return text if safe == text and len(text) <= LONGEST_NAME else f"{safe[:LONGEST_NAME]}-{short_hash(text)[:8]}"


def same_values(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two runs compute the same. mine: flat values, of which null may wait for the data."""
    keys = [key for key in mine.keys() | theirs.keys() if not changes_no_number(key)]
    return all(mine.get(key, ...) in (theirs.get(key, ...), None, "balanced") for key in keys)
