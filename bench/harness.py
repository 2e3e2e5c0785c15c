"""What the benchmarks share: arguments, commands on a terminal, worlds of ranks, rounds, ratios, tables.

Runs that are compared take turns in rounds, so that other work on the machine slows all of them alike. A ratio is taken
between two runs of one round; the median, the smallest and the largest of the rounds are shown.
"""

import argparse
import contextlib
import json
import os
import platform
import pty
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import termios
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRAIN = str(ROOT / "src" / "train.py")
MARK = "BENCH_COMMAND"  # in the environment of all processes of a command
CONTENDERS = ROOT / "bench" / "contenders"
MEASURED_STEPS = "callbacks=[{_target_: measured.Steps}]"
WHOLE = ["loader.validation=null", "evaluation.test=every"]  # the data of those it is compared with
DDP = [MEASURED_STEPS, *WHOLE]
RECORDER = "+logger.measured._target_=measured.EpochRecorder"
MEASURED = [*DDP, RECORDER]
# After MEASURED: a run takes turns with its floors. They have one group of parameters, so the run has one, too.
BESIDE_FLOORS = ["callbacks=[{_target_: lockstep_floors.Floors}]", "parameters.no_decay=[]", "parameters.groups=[]"]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "bench")]


def parser(doc: str, name: str, parts: Sequence[str] = (), rounds: int | None = None) -> argparse.ArgumentParser:
    """The arguments of every benchmark: --quick, --out, and where they make sense --only and --rounds."""
    arguments = argparse.ArgumentParser(description=doc.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="small and short, to see that everything runs")
    arguments.add_argument("--out", type=Path, default=ROOT / "outputs" / name, help="folder for the tables")
    if parts:
        arguments.add_argument("--only", default=",".join(parts), help=f"some of {','.join(parts)}")
    if rounds:
        arguments.add_argument("--rounds", type=int, help=f"{rounds}, or 1 with --quick")
    arguments.set_defaults(parts=parts, default_rounds=rounds)
    return arguments


def parse(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed command line: `out` exists, `only` is a list of known parts, `rounds` is a number."""
    asked = arguments.parse_args()
    if asked.parts:
        asked.only = asked.only.split(",")
        if unknown := [part for part in asked.only if part not in asked.parts]:
            sys.exit(f"--only: unknown part {unknown[0]}; type --only= and some of {','.join(asked.parts)}")
    if asked.default_rounds:
        asked.rounds = asked.rounds or (1 if asked.quick else asked.default_rounds)
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    # Ranks end without teardown, so Python would report tqdm's lock as leaked.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker,ignore::FutureWarning"
    return asked


def run_on_terminal(
    command: Sequence[str], folder: Path, limit: float = 600, cwd: Path | None = None, **env: str
) -> int:
    """The command's exit code, 124 after `limit` seconds. Its output goes to folder/console.log.

    The command sees a terminal, as its users' commands do. Its ranks write folder/record.<rank>, see `records`.
    Processes that it leaves behind are killed, those of other sessions, too. cwd: where it runs, if not in folder.
    """
    reading, writing = pty.openpty()
    termios.tcsetwinsize(writing, (24, 80))  # a bar is cut to the width
    before = filter(None, [os.environ.get("PYTHONPATH")])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), str(CONTENDERS), *before])} | env
    env |= {"BENCH_RECORD": str(folder / "record"), MARK: uuid.uuid4().hex}
    streams: dict[str, int] = {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": writing}
    process = subprocess.Popen(command, cwd=cwd or folder, env=env, start_new_session=True, **streams)
    os.close(writing)
    reader = threading.Thread(target=_copy, args=(reading, folder / "console.log"))
    reader.start()
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _kill_those_with(f"{MARK}={env[MARK]}")
        reader.join()
        os.close(reading)


def _kill_those_with(entry: str) -> None:
    """Kill the processes that have inherited this entry of the environment (Linux)."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if entry.encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _copy(reading: int, path: Path) -> None:
    with path.open("ab") as console, contextlib.suppress(OSError):  # a terminal raises it when its last writer is gone
        while chunk := os.read(reading, 65536):
            console.write(chunk)


def records(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of `run_on_terminal` measured of themselves, see bench/record.py, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("record.*"))]


def noise_images(samples: int, test_samples: int) -> list[str]:
    """The overrides that put random images into the place of CIFAR-10's."""
    same = ["shape=[3,32,32]", "classes=10", "mean=[0.4914,0.4822,0.4465]", "std=[0.247,0.2435,0.2616]"]
    found = ["dataset=cifar10", "dataset._target_=measured.Noise", *(f"dataset.{word}" for word in same)]
    return [*found, f"+dataset.samples={samples}", f"+dataset.test_samples={test_samples}"]


def training_flops(*overrides: str) -> float:
    """Floating-point operations of a training step on one sample, as torch counts them. Computes none of them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from lockstep.config.check import instantiate
    from support.configs import composed

    config = composed(*overrides)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        instantiate(config.model)(torch.empty(8, *config.dataset["shape"])).sum().backward()
    return counter.get_total_flops() / 8


def in_ranks(size: int, function: Callable[..., Any], *overrides: str) -> list[Any]:
    """[function(config) of each rank] in a fresh gloo world of `size`, with the config that `overrides` compose."""
    from support.configs import composed
    from support.worlds import in_world

    with tempfile.TemporaryDirectory() as folder:
        return in_world(size, function, composed(f"run_dir={folder}", "backend=gloo", *overrides), limit=1800)


def rotated(names: Sequence[Any], turn: int, rounds: int) -> list[Any]:
    """The order of round number `turn`: every round starts with another name."""
    first = turn * len(names) // rounds
    return [*names[first:], *names[:first]]


def interleave(measure: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[Any]]:
    """{name: [measure[name]() of each round]}"""
    found: dict[Any, list[Any]] = {name: [] for name in measure}
    for turn in range(rounds):
        for name in rotated(list(measure), turn, rounds):
            found[name].append(measure[name]())
    return found


def spread(values: Sequence[float]) -> str:
    """The median, and in brackets the smallest and the largest: "1.62 (1.57-1.65)". A dash without values."""
    if not values:
        return "-"
    middle, digits = statistics.median(values), 0 if min(values) >= 100 else 2
    brackets = f" ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{middle:.{digits}f}{brackets}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def save(out: Path, name: str, text: str) -> None:
    (out / f"{name}.md").write_text(text)
    print(f"tables: {out / f'{name}.md'}")


def processor() -> str:
    """The CPU's name and the number of its cores that this process may use."""
    about = Path("/proc/cpuinfo")
    names = re.findall("^model name\\s*: (.*)", about.read_text(), re.MULTILINE) if about.exists() else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores"


def pin_to_core() -> None:
    """Give this rank a core of its own, as far as there are enough: then torch uses one thread."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
