"""What the benchmarks share: arguments, commands on a terminal, worlds of ranks, rounds, ratios, tables, plots.

Runs that are compared take turns in rounds, so that other work on the machine slows all of them alike. A ratio is taken
between two runs of one round; the median, the smallest and the largest of the rounds are shown.
"""

import argparse
import contextlib
import os
import platform
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRAIN = str(ROOT / "src" / "train.py")
RESULTS = ROOT / "bench" / "RESULTS.md"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "bench")]


def parser(doc: str, name: str, parts: Sequence[str] = (), rounds: int | None = None) -> argparse.ArgumentParser:
    """The arguments of every benchmark: --quick, --out, and where they make sense --only and --rounds."""
    arguments = argparse.ArgumentParser(description=doc.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="small and short, to see that everything runs")
    arguments.add_argument("--out", type=Path, default=ROOT / "outputs" / name, help="folder for tables and plots")
    if parts:
        arguments.add_argument("--only", default=",".join(parts), help=f"some of {','.join(parts)}")
    if rounds:
        arguments.add_argument("--rounds", type=int, help=f"{rounds}, or 1 with --quick")
    arguments.set_defaults(parts=tuple(parts), default_rounds=rounds)
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


def run_on_terminal(command: Sequence[str], folder: Path, env: Mapping[str, str], limit: float = 600) -> int:
    """The command's exit code, 124 after `limit` seconds. Its output goes to folder/console.log.

    The command sees a terminal, as its users' commands do. Processes that it leaves behind are killed.
    """
    reading, writing = pty.openpty()
    termios.tcsetwinsize(writing, (24, 80))  # a bar is cut to the width
    with (folder / "console.log").open("ab") as console:
        console.write(" ".join(command).encode() + b"\n")
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing,
            start_new_session=True,
        )  # fmt: skip
        os.close(writing)
        reader = threading.Thread(target=_copy, args=(reading, console))
        reader.start()
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()
            os.close(reading)


def _copy(reading: int, console: Any) -> None:
    with contextlib.suppress(OSError):  # a terminal raises it when its last writer is gone
        while chunk := os.read(reading, 65536):
            console.write(chunk)


def in_ranks(size: int, function: Callable[..., Any], *overrides: str) -> list[Any]:
    """[function(cfg) of each rank] in a fresh world of `size`, with the config that `overrides` compose."""
    from support.configs import composed
    from support.worlds import in_world

    with tempfile.TemporaryDirectory() as folder:
        return in_world(size, function, composed(f"run_dir={folder}", *overrides), limit=1800)


def interleave(measure: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[Any]]:
    """{name: [measure[name]() of each round]}. Every round starts with another name."""
    found: dict[Any, list[Any]] = {name: [] for name in measure}
    names = list(measure)
    for turn in range(rounds):
        first = turn * len(names) // rounds
        for name in names[first:] + names[:first]:
            found[name].append(measure[name]())
    return found


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and in brackets the smallest and the largest: "1.62 (1.57-1.65)". A dash without values."""
    if not values:
        return "-"
    middle, smallest, largest = (
        f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({smallest}-{largest})"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def replace_section(section: str, text: str) -> str:
    """`text` with `section`, which begins with "## ", in place of the section with the same heading, or at the end."""
    parts = text.split("\n## ")
    section = section.removeprefix("## ").rstrip("\n") + "\n"
    heading = section.partition("\n")[0]
    headings = [part.partition("\n")[0] for part in parts]
    if heading in headings:
        parts[headings.index(heading)] = section
    else:
        parts.append(section)
    return "\n## ".join(part.rstrip("\n") + "\n" for part in parts)


def write_section(section: str, path: Path) -> None:
    """Put `section` into the file `path`, see `replace_section`."""
    path.write_text(replace_section(section, path.read_text() if path.exists() else "# Results\n"))
    print(f"written to {path}")


def save(out: Path, name: str, text: str, panels: Sequence[Mapping[str, Any]] = (), columns: int = 3) -> None:
    """Write out/name.md and, where matplotlib is installed, out/name.png."""
    (out / f"{name}.md").write_text(text)
    print(f"tables: {out / f'{name}.md'}")
    if panels:
        plot(out / f"{name}.png", panels, columns)


def plot(path: Path, panels: Sequence[Mapping[str, Any]], columns: int) -> None:
    """A panel each: {"lines": {label: [(x, y), ...]}, and what Axes.set takes}. Says so where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(
            f"no plot without matplotlib; type {sys.executable} -m pip install -r requirements-bench.txt",
            file=sys.stderr,
        )
        return
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=False):
        for label, points in panel["lines"].items():
            axes.plot(*zip(*points, strict=True), ".-", label=label)
        axes.set(**{key: value for key, value in panel.items() if key != "lines"})
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    print(f"plot:   {path}")


def processor() -> str:
    """The CPU's name and the number of its cores that this process may use."""
    lines: Iterator[str] = iter(())
    if Path("/proc/cpuinfo").exists():
        lines = iter(Path("/proc/cpuinfo").read_text().splitlines())
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores"


def pin_to_core() -> None:
    """Give this rank a core of its own, as far as there are enough: then torch uses one thread."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})


def timestamp() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")
