"""Training from Python: what a notebook or a script calls in place of the command line. See `lockstep.train`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lockstep import cli
from lockstep.compat import hydra_version_base
from lockstep.config.schema import CONF
from lockstep.distributed.environment import read_rank_info
from lockstep.distributed.host import ENDS_WITH_PARENT
from lockstep.errors import EXIT_CONFIG, EXIT_FINISHED, ConfigError, RankFailed, path_value
from lockstep.failures.report import read_report
from lockstep.hydra_errors import as_config_error, config_folders, typed_value
from lockstep.runs.table import COLUMNS, read_runs, sorted_groups, value_of
from lockstep.source_code import ROOT

if TYPE_CHECKING:
    from lockstep.modes.trained_net import TrainedNet

TRAIN = ROOT / "src" / "train.py"


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

    def net(self, which: str = "best", **options: Any) -> "TrainedNet":
        """The trained net, as `lockstep.load` gives it."""
        from lockstep import load

        return load(self.folder, which, **options)


def train(words: Sequence[str], ranks: int | None) -> Result:
    """See `lockstep.train`."""
    typed = [str(word) for word in words]
    info = read_rank_info()
    if not info.may_start_ranks:
        raise ConfigError(
            f"lockstep.train inside {info.started_by} would start every rank again; run it in one process"
        )
    if ranks is not None:
        if any(word.partition("=")[0] in ("launch", "launch.nproc_per_node") for word in typed):
            raise ConfigError(f"ranks={ranks} and a typed launch both say how ranks start; leave ranks= out")
        typed += ["launch=torchrun", f"launch.nproc_per_node={ranks}"]
    place = typed_value("hydra.run.dir", typed) or typed_value("run_dir", typed)
    folder = Path(place.strip("'\"")) if place is not None else _new_folder()
    if place is None:
        typed.append(f"hydra.run.dir={path_value(folder)}")
    path = os.pathsep.join(dict.fromkeys([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]))
    process = subprocess.Popen(
        [sys.executable, str(TRAIN), *typed],
        env=os.environ | {"PYTHONPATH": path, ENDS_WITH_PARENT: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a kernel's interrupt goes to its whole group: the training gets one, from here
    )
    lines, interrupted = _print_output(process)
    if interrupted:
        raise KeyboardInterrupt(f"stopped; to go on, type {_call(typed, ranks)}")
    if process.returncode != EXIT_FINISHED:
        said = [line for line in lines if line.startswith("lockstep: ")]
        sentence = said[-1 if process.returncode == EXIT_CONFIG else 0].removeprefix("lockstep: ") if said else ""
        if process.returncode == EXIT_CONFIG:
            raise ConfigError(sentence)
        raise RankFailed(sentence or f"the training ended with {process.returncode}", read_report(folder) or {})
    rows = history(folder)
    metrics = {tag: value for row in rows for tag, value in row.items() if tag != "step"}
    return Result(folder, metrics, rows)


def _new_folder() -> Path:
    """A run folder that is not there, named as the command line names it."""
    while (folder := Path("outputs", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))).exists():
        time.sleep(0.1)
    return folder


def _print_output(process: "subprocess.Popen[str]") -> tuple[list[str], bool]:
    """Print what the process prints, until it ends. Returns its lines, and whether it was interrupted.

    An interrupt is passed on, so that the ranks save and end. A second one kills them.
    """
    assert process.stdout is not None
    lines, interrupted = list[str](), False
    while True:
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                print(line, end="", flush=True)
            process.wait()
            return lines, interrupted
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            interrupted = True


def _call(typed: Sequence[str], ranks: int | None) -> str:
    own = [word for word in typed if ranks is None or not word.startswith("launch")]
    return f"lockstep.train({own!r}{'' if ranks is None else f', ranks={ranks}'})"


def history(folder: Path) -> list[dict[str, float]]:
    """The curves of a run folder, from its event files: see `Result`."""
    from lockstep.loggers.tensorboard import read_events

    rows: dict[int, dict[str, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in read_events(path):
            if event.HasField("session_log"):  # a resumed run: the points after its snapshot came again
                rows = {step: row for step, row in rows.items() if step < event.step}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    rows.setdefault(event.step, {"step": event.step})[value.tag] = value.simple_value
    return [rows[step] for step in sorted(rows)]


def compose(words: Sequence[str]) -> DictConfig:
    """See `lockstep.compose`."""
    typed = [str(word) for word in words]
    cli.register_resolvers()
    before: Any = HydraConfig.instance().cfg  # of a hydra.main around this, whose resolvers it answers
    try:
        overrides, flags = cli.split(cli.prepare_arguments([str(TRAIN), *typed])[1:])
        if flags:
            folders = [f"file://{folder.absolute()}" for folder in config_folders(flags)[1:]]
            overrides.append(f"hydra.searchpath=[{','.join(folders)}]")
        with initialize_config_dir(str(CONF), **hydra_version_base()):
            cfg = hydra_compose("config", overrides=overrides, return_hydra_config=True)
        with read_write(cfg), read_write(cfg.hydra), open_dict(cfg):
            OmegaConf.update(cfg, "hydra.runtime.output_dir", str(Path(str(cfg.hydra.run.dir)).absolute()))
            HydraConfig.instance().set_config(cfg)
            del cfg["hydra"]
        return cli.check_input(cfg)
    except Exception as error:
        known = as_config_error(error, typed)
        if known is None or known is error:
            raise
        raise known from None
    finally:
        if before is not None:
            HydraConfig.instance().set_config(before)


def table(folder: str | Path) -> list[dict[str, Any]]:
    """See `lockstep.table`."""
    runs, problems = read_runs([str(folder)])
    for problem in problems:
        print(f"lockstep: {problem}", file=sys.stderr)
    by_date = sorted_groups([[run] for run in runs], "date", reverse=False)
    return [{name: value_of(run, name) for name in COLUMNS} for (run,) in by_date]
