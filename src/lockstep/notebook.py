"""Lockstep from Python: what a notebook or a script calls in place of the command line.

`overrides` are those of the command, and --config-dir=<folder>: a list, or one text. Errors are ConfigError and
RankFailed.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict, read_write

from lockstep import cli
from lockstep.compat import hydra_compose
from lockstep.config import check as checks
from lockstep.config.nodes import with_own_arguments
from lockstep.config.record import typed_overrides
from lockstep.config.schema import RunConfig
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.host import ENDS_WITH_PARENT
from lockstep.errors import EXIT_CONFIG, ConfigError, RankFailed, path_value, without_quotes
from lockstep.failures.report import read_report
from lockstep.source_code import ROOT


def train(overrides: str | Sequence[str] = (), ranks: int | None = None) -> "Result":
    """Train as `python src/train.py <overrides>` does, in processes of its own, and print what these print.

    They have this process's `sys.path`, but not what is defined in a cell. ranks: how many train together here. An
    interrupt lets them save a snapshot, and says what to call to go on.
    """
    words = _words(overrides)
    if ranks is not None:
        words += ["launch=torchrun", f"launch.nproc_per_node={ranks}"]
    place = cli.chosen("hydra.run.dir", words) or cli.chosen("run_dir", words)
    folder = Path(without_quotes(place or time.strftime("outputs/%Y-%m-%d/%H-%M-%S")))
    code, lines = _run(words if place else [*words, f"hydra.run.dir={path_value(folder)}"])
    if code:
        said = [line for line in lines if line.startswith("lockstep: ")] or [f"the training ended with {code}"]
        raise RankFailed(said[0].removeprefix("lockstep: "), read_report(folder) or {})
    return result_of(folder)


def check(overrides: str | Sequence[str] = ()) -> str:
    """Take a few steps as `python src/train.py <overrides> mode=check` does, and return its table of promises.

    `assert lockstep.check(["model=mine"])` is a test: AssertionError, with the table, if a promise does not hold.
    """
    code, lines = _run([*_words(overrides), "mode=check"])
    begin = next((number for number, line in enumerate(lines) if line.startswith("promise ")), None)
    if begin is None:
        raise RankFailed("the check has failed", {})
    if code:
        raise AssertionError("\n".join(["a promise does not hold", *lines[begin:]]))
    return "\n".join(lines[begin:])


def compose(overrides: str | Sequence[str] = ()) -> RunConfig:
    """The checked config of `python src/train.py <overrides>`. Starts nothing. A hydra.main around it goes on."""
    words = _words(overrides)
    cli.register_resolvers()
    of_caller: Any = HydraConfig.instance().cfg
    try:
        composed = [word for word in cli.with_overrides_of_run(words) if not word.startswith("-")]
        folders = ",".join(path_value(f"file://{folder.resolve()}") for folder in cli.config_dirs(words))
        cfg = hydra_compose([*composed, *[f"hydra.searchpath=[{folders}]"] * bool(folders)], with_hydra=True)
        HydraConfig.instance().set_config(cfg)
        runtime: Any = HydraConfig.get().runtime
        with read_write(runtime), open_dict(cfg):
            runtime.output_dir = os.path.abspath(cfg.hydra.run.dir)
            del cfg["hydra"]
        return checks.check(with_own_arguments(cli.with_values_of_run(cfg), typed_overrides(HydraConfig.get())))
    except Exception as error:
        raise cli.as_config_error(error, words) or error from None
    finally:
        HydraConfig.instance().cfg = of_caller


def _words(overrides: str | Sequence[str]) -> list[str]:
    words = shlex.split(overrides) if isinstance(overrides, str) else [str(word) for word in overrides]
    folders = [str(folder.resolve().parent) for folder in cli.config_dirs(words)]
    sys.path += [folder for folder in folders if folder not in sys.path]
    return words


def _run(words: Sequence[str]) -> tuple[int, list[str]]:
    """(exit code, lines) of a command, whose lines are printed as they come."""
    info, path = read_rank_info(), os.pathsep.join(map(os.path.abspath, sys.path))
    if not info.may_start_ranks:
        raise ConfigError(f"lockstep inside {info.started_by} would start every rank again; run it in one process")
    call, env = [sys.executable, str(ROOT / "src" / "train.py"), *words], {"PYTHONPATH": path, ENDS_WITH_PARENT: "1"}
    process = Popen(
        call, env=os.environ | env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace",
        start_new_session=True,  # a kernel's interrupt goes to its whole group: the training gets one, from here
    )  # fmt: skip
    lines, interrupted = list[str](), False
    while process.returncode is None:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip("\n"))
                print(line, end="", flush=True)
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            interrupted = True
    if interrupted:
        raise KeyboardInterrupt(f"stopped; to go on, type lockstep.train({list(words)!r})")
    if process.returncode == EXIT_CONFIG:
        raise ConfigError(
            ([line for line in lines if line.startswith("lockstep: ")] or lines)[-1].removeprefix("lockstep: ")
        )
    return process.returncode, lines


# until issue 45
@dataclass(frozen=True)
class Result:
    """What a training has left.

    folder: the run folder.
    metrics: {tag, such as "test/accuracy": its last value}.
    history: a row for each step at which something was logged: {"step": 23, "train/loss": 0.1, ...}, as
        `pandas.DataFrame` takes them. Empty with `logger=[]`.
    """

    folder: Path
    metrics: dict[str, float]
    history: list[dict[str, float]]

    def net(self, which: str | None = None, **options: Any) -> Any:
        """The trained net, as `lockstep.load` gives it: the best weights, or the last ones if nothing has chosen."""
        from lockstep import load

        has_best = (self.folder / "snapshots" / "best.pt").is_file()
        return load(self.folder, which or ("best" if has_best else "last"), **options)


# until issue 45
def result_of(folder: Path) -> Result:
    """Of a run folder, from its event files."""
    from lockstep.loggers.tensorboard import read_events

    rows: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in read_events(path):
            if event.HasField("session_log"):  # a resumed run: the points after its snapshot came again
                rows = {step: row for step, row in rows.items() if step < event.step}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    rows.setdefault(event.step, {"step": event.step})[value.tag] = value.simple_value
    history = [rows[step] for step in sorted(rows)]
    return Result(folder, {tag: value for row in history for tag, value in row.items() if tag != "step"}, history)


# until issue 45
def table(folder: str | Path = "outputs") -> list[dict[str, Any]]:
    """The runs at or below `folder`, oldest first: a dict of `python src/runs.py table`'s columns for each.

    `pandas.DataFrame` takes it. Raises ConfigError for a folder that is missing.
    """
    from lockstep.runs.table import COLUMNS, read_runs, sorted_groups, value_of

    runs, problems = read_runs([str(folder)])
    for problem in problems:
        print(f"lockstep: {problem}", file=sys.stderr)
    by_date = sorted_groups([[run] for run in runs], "date", reverse=False)
    return [{name: value_of(run, name) for name in COLUMNS} for (run,) in by_date]
