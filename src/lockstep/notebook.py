"""Lockstep from Python. `overrides` are the words of `python src/train.py <overrides>`, as a list or as one text."""

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import Any

from hydra.core.hydra_config import HydraConfig

from lockstep import cli
from lockstep.compat import hydra_composed
from lockstep.config import check as checks
from lockstep.config.record import typed_overrides
from lockstep.config.schema import RunConfig
from lockstep.distributed import environment, host
from lockstep.errors import EXIT_CONFIG, ConfigError, RankFailed
from lockstep.failures.report import read_report
from lockstep.files import ROOT
from lockstep.runs.record import read_run

TABLE = "promise  "  # the beginning of what mode=check prints


def train(overrides: str | Sequence[str] = (), ranks: int | None = None) -> "Result":
    """Train in processes of its own, on so many ranks, and print what they print. They have this process's `sys.path`.
    Raises ConfigError, RankFailed, and at an interrupt, after a snapshot, KeyboardInterrupt with what to call next."""
    words = _words(overrides)
    words += [] if ranks is None else ["launch=torchrun", f"launch.nproc_per_node={ranks}"]
    place = cli.chosen("hydra.run.dir", words) or cli.chosen("run_dir", words)
    folder = Path(place or time.strftime("outputs/%Y-%m-%d/%H-%M-%S"))
    _run(words if place else [*words, f"hydra.run.dir={folder}"], folder)
    run = read_run(folder)
    last = {tag: value for row in run["history"] for tag, value in row.items() if tag not in ("epoch", "step")}
    tested = {f"test/{name}": value for name, value in (run["test"] or {}).get("metrics", {}).items()}
    return Result(folder, last | tested, run["history"])


def check(overrides: str | Sequence[str] = ()) -> str:
    """The table of mode=check: `assert lockstep.check("model=mine")` is a test. Raises AssertionError if a promise does
    not hold, else as `train`."""
    return _run([*_words(overrides), "mode=check"])


def compose(overrides: str | Sequence[str] = ()) -> RunConfig:
    """The checked config of a command. Starts nothing. A `hydra.main` function may call it. Raises ConfigError."""
    words = _words(overrides)
    cli.register_resolvers()
    try:
        with hydra_composed(cli.with_overrides_of_run(words), cli.config_dirs(words)) as cfg:
            typed = typed_overrides(HydraConfig.get())
            return checks.check(checks.with_own_arguments(cli.with_values_of_run(cfg), typed))
    except Exception as error:
        raise cli.as_config_error(error, words) or error from None


def _words(overrides: str | Sequence[str]) -> list[str]:
    return cli.words_of(shlex.split(overrides) if isinstance(overrides, str) else map(str, overrides))


def _run(words: Sequence[str], folder: Path = Path()) -> str:
    """Print the output of a command as it comes. Returns the table of mode=check. folder: where a run has failed."""
    if not environment.read_rank_info().may_start_ranks:
        raise ConfigError("lockstep inside a rank would start every rank again; run it in one process")
    line = [sys.executable, str(ROOT / "src" / "train.py"), *words]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), host.ENDS_WITH_PARENT: "1"}
    run, printed = Popen(line, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace"), ""
    try:
        for text in run.stdout or ():
            print(text, end="", flush=True)
            printed += text
        code = run.wait()
    except KeyboardInterrupt:  # the training gets it, too, as one of this process's group
        print(*(run.stdout or ()), sep="", flush=True)  # until it has saved
        raise KeyboardInterrupt(f"stopped; to go on, type lockstep.train({list(words)!r})") from None
    said = re.findall("(?m)^(?:lockstep|train.py: error): (.*)", printed) or [printed]
    table = printed[printed.find(TABLE) :]
    if code == EXIT_CONFIG:
        raise ConfigError(said[-1])
    if code:
        raise AssertionError(table) if TABLE in table else RankFailed(said[0], read_report(folder) or {})
    return table


@dataclass(frozen=True)
class Result:
    """What a training has left in its run folder.
    metrics: {tag, such as "test/accuracy": its last value}. history: a row an epoch, as `pandas.DataFrame` takes
    them."""

    folder: Path
    metrics: dict[str, float]
    history: list[dict[str, float]]

    def net(self, which: str | None = None, **options: Any) -> Any:
        """The trained net, as `lockstep.load` gives it: the best weights, or the last ones if nothing has chosen."""
        from lockstep import load

        has_best = any((self.folder / "snapshots").glob("best_*"))
        return load(self.folder, which or ("best" if has_best else "last"), **options)
