"""What the benchmarks share: arguments, commands on a terminal, rounds, ratios, tables.

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
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import truediv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRAIN = str(ROOT / "src" / "train.py")
MARK = "BENCH_COMMAND"  # in the environment of all processes of a command
CONTENDERS = ROOT / "bench" / "contenders"
# A run measures itself, and has the data of those it is compared with.
MEASURED = ["callbacks=[{_target_: measured.Steps}]", "loader.validation=null", "evaluation.test=every",
            "hydra.run.dir=run"]  # fmt: skip
# After MEASURED: a run takes turns with its floors. They have one group of parameters, so the run has one, too.
BESIDE_FLOORS = ["callbacks=[{_target_: measured.Floors}]", "parameters.no_decay=[]", "parameters.groups=[]"]
Part = Callable[[Path, int, bool], str]  # (folder, rounds, quick) -> table
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "bench")]


def parse(doc: str, name: str, parts: Iterable[str] = (), rounds: int = 0, **own: Any) -> argparse.Namespace:
    """--quick, --out (it exists), for parts --only, a list, and --rounds; own: others, and how they are added."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small and short, to see that everything runs")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / name, help="folder for the tables")
    known = ",".join(parts)
    if known:
        parser.add_argument("--only", default=known, help=f"some of {known}")
        parser.add_argument("--rounds", type=int, help=f"{rounds}, or 1 with --quick")
    for option, how in own.items():
        parser.add_argument(f"--{option}", **how)
    asked = parser.parse_args()
    if known:
        asked.only = asked.only.split(",")
        if unknown := [part for part in asked.only if part not in known.split(",")]:
            sys.exit(f"--only: unknown part {unknown[0]}; type --only= and some of {known}")
        asked.rounds = asked.rounds or (1 if asked.quick else rounds)
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    # Ranks end without teardown, so Python would report tqdm's lock as leaked.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker,ignore::FutureWarning"
    return asked


def run_parts(doc: str, name: str, rounds: int, **parts: Part) -> None:
    """The whole benchmark, whose parts give tables. They share a folder for files."""
    asked = parse(doc, name, parts, rounds)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as place:
        tables = [parts[part](Path(place), asked.rounds, asked.quick) for part in asked.only]
    save(asked.out, name, "\n".join([f"{processor()}\n", *tables]))


def run_on_terminal(command: Sequence[str], folder: Path, limit: float = 600, cwd: Any = None, **env: str) -> int:
    """The command's exit code, 124 after `limit` seconds. Its output goes to folder/console.log.

    The command sees a terminal, as its users' commands do. Processes that it leaves behind are killed, those of other
    sessions, too. cwd: where it runs, if not in folder.
    """
    reading, writing = pty.openpty()
    termios.tcsetwinsize(writing, (24, 80))  # a bar is cut to the width
    before = filter(None, [os.environ.get("PYTHONPATH")])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), str(CONTENDERS), *before])} | env
    env |= {"BENCH_RECORD": str(folder / "record"), MARK: uuid.uuid4().hex}
    streams = {"stdin": subprocess.DEVNULL, "stdout": writing, "stderr": writing}
    process = subprocess.Popen(command, cwd=cwd or folder, env=env, start_new_session=True, **streams)
    os.close(writing)
    with (folder / "console.log").open("ab") as console:  # a terminal is at its end when its last writer is gone
        reader = subprocess.Popen(["cat"], stdin=reading, stdout=console, stderr=subprocess.DEVNULL)
    os.close(reading)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for other in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if f"{MARK}={env[MARK]}".encode() in (other / "environ").read_bytes().split(b"\0"):
                    os.kill(int(other.name), signal.SIGKILL)
        reader.wait()


def run_whole(command: Sequence[str], folder: Path, limit: float) -> None:
    """A Python command that must end well; else its last words, and the end."""
    if code := run_on_terminal([sys.executable, *command], folder, limit):
        sys.exit(f"{' '.join(command)} ended with {code}:\n{(folder / 'console.log').read_text()[-3000:]}")


def records(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of a command measured of themselves, see bench/record.py."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("record.*"))]


def recorded(*command: str, limit: float = 3600) -> list[dict[str, Any]]:
    """The records of a whole Python command in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        run_whole(command, Path(folder), limit)
        return records(Path(folder))


def trained(ranks: int, *overrides: str) -> list[dict[str, Any]]:
    """The records of a training on the CPU."""
    return recorded(TRAIN, *MEASURED, "launch=fork", f"launch.nproc_per_node={ranks}", "backend=gloo", *overrides)


def step_seconds(record: Mapping[str, Any], clock: int) -> list[float]:
    """Of each step after the third. clock: 0 is the wall's, 1 that of CPU time."""
    return [late[clock] - early[clock] for early, late in pairwise(record["steps"][2:])]


def images(name: str, samples: int, test_samples: int) -> list[str]:
    """The overrides for so many images. name: mnist or noise, the functions of bench/measured.py."""
    words = ["classes=10", "shape=[1,28,28]", "mean=[0.1307]", "std=[0.3081]"]
    if name == "noise":  # in the shape of CIFAR-10
        words = ["classes=10", "shape=[3,32,32]", "mean=[0.4914,0.4822,0.4465]", "std=[0.247,0.2435,0.2616]"]
    for half, count in {"train": samples, "test": test_samples}.items():
        root = "${data_dir}"
        words.append(f"{half}={{_target_:measured.{name},root:{root},train:{half == 'train'},samples:{count}}}")
    return ["dataset=pair", *(f"+dataset.{word}" for word in words)]


def interleave(measure: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[Any]]:
    """{name: [measure[name]() of each round]}. Every round starts with another name."""
    found: dict[Any, list[Any]] = {name: [] for name in measure}
    for turn in range(rounds):
        first = turn * len(measure) // rounds
        for name in [*measure][first:] + [*measure][:first]:
            found[name].append(measure[name]())
    return found


def spread(values: Sequence[float]) -> str:
    """The median, and in brackets the smallest and the largest: "1.62 (1.57-1.65)". A dash without values."""
    if not values:
        return "-"
    middle, digits = statistics.median(values), 0 if min(values) >= 100 else 2
    brackets = f" ({min(values):.{digits}f}-{max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{middle:.{digits}f}{brackets}"


def ratios(ones: Iterable[float], others: Iterable[float]) -> str:
    """The spread of the ratios of paired runs."""
    return spread(list(map(truediv, ones, others)))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def save(out: Path, name: str, text: str) -> None:
    (out / f"{name}.md").write_text(text)
    print(f"{text}\ntables: {out / f'{name}.md'}")


def processor() -> str:
    """The CPU's name and the number of its cores that this process may use."""
    from lockstep.distributed.host import usable_cores

    about = Path("/proc/cpuinfo")
    names = re.findall("^model name\\s*: (.*)", about.read_text(), re.MULTILINE) if about.exists() else []
    return f"{[*names, platform.machine()][0]}, {len(usable_cores())} cores"
