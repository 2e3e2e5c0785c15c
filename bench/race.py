"""`make bench`: Lockstep against what one would run otherwise, by turns, on the same machine, net, data, batch and number of samples.

python bench/race.py [--quick] [--rounds=4] [--only=train,floor,startup,sweep,memory,help]

Every contender (bench/contenders/) is a command started as its users start it, on a terminal of its own. Lockstep is
src/train.py as it stands: Hydra, TensorBoard, progress bar, metrics and snapshots on. All of a group run once a round, one after
the other, each round in another order; a ratio is taken between two runs of one round, and its median, least and largest are shown.
Tables, plot, every run's figures and console go to a new folder under outputs/bench/.
"""

import argparse
import contextlib
import csv
import importlib.metadata
import json
import os
import platform
import pty
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTENDERS = ROOT / "bench" / "contenders"
TRAIN = str(ROOT / "src" / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]

PARTS = ("train", "floor", "startup", "sweep", "memory", "help")
OURS = {"fp32": "Lockstep", "bf16": "Lockstep, bf16"}
FLOORS = {"bare loop": (1, 0.97, 0.99), "bare DDP": (2, 0.95, 0.99), "no synchronisation": (2, 0.88, 0.95)}  # {name: (ranks, reach, moonshot)}
BESIDE = {precision: [f"trainer.precision={precision}"] for precision in OURS}  # {how Lockstep runs beside its floors: its overrides}
SOCKETS = {f"{how}, gloo": [*words, "gradient_sync=all_reduce"] for how, words in BESIDE.items()}  # and not what gradient_sync=auto takes
OTHERS = ("Lightning", "Accelerate", "references")
LAUNCHES = ("torchrun", "launch=torchrun", "launch=spawn", "launch=fork")  # of which conf/launch may lack some
CROWD = 8  # ranks whose memory is looked at
LIMIT = 600  # seconds that any command may take


@dataclass(frozen=True)
class Settings:
    data: str
    samples: int = 15360
    test_samples: int = 2560
    epochs: int = 2
    batch: int = 128
    worlds: tuple = (2, 4, 8)  # of the start-up
    jobs: int = 8  # of the sweep
    pairs: int = 6  # epochs of the floors


@dataclass(frozen=True)
class Contestant:
    """One row's worth of runs: `commands`, one after the other, over `ranks` processes. `parts`: who asks for it."""

    name: str
    ranks: int
    parts: frozenset
    commands: list = field(hash=False)


def torchrun(ranks):
    return [*TORCHRUN, f"--nproc_per_node={ranks}"]


def launches(ranks):
    """{launch: the words that start `ranks` ranks of src/train.py by it}, of those that conf/launch holds."""
    words = {"torchrun": [*torchrun(ranks), TRAIN]}
    words |= {launch: [sys.executable, TRAIN, launch, f"launch.nproc_per_node={ranks}"] for launch in LAUNCHES[1:]}
    return {launch: start for launch, start in words.items() if (ROOT / "conf" / "launch" / f"{launch.removeprefix('launch=')}.yaml").exists()}


def floored(how):
    """The name of Lockstep that runs beside its floors."""
    return f"Lockstep beside its floor, {how}"


def contestants(settings):
    """Groups of contestants; those of a group are compared with each other and run close together."""
    alone = [sys.executable]

    def script(name, *own, part=settings):
        """A contender's file and its arguments."""
        same = [f"--data={part.data}", f"--samples={part.samples}", f"--test-samples={part.test_samples}", f"--epochs={part.epochs}"]
        return [str(CONTENDERS / f"{name}.py"), *same, f"--batch={part.batch}", *own]

    def ours(*own, part=settings):
        """Overrides of src/train.py: the same data and batch, and the clock."""
        cut = [f"dataset.{split}._target_=ours.part_of_mnist" for split in ("train", "test")]
        cut += [f"+dataset.train.samples={part.samples}", f"+dataset.test.samples={part.test_samples}"]
        recipe = [f"trainer.batch_size_per_rank={part.batch}", f"trainer.epochs={part.epochs}"]
        return ["dataset=mnist", f"data_dir={part.data}", *cut, *recipe, "loop._target_=ours.train", "hydra.run.dir=run", *own]

    def one(name, ranks, parts, *commands):
        return Contestant(name, ranks, frozenset(parts.split()), list(commands))

    def beside(ranks, start, ways):
        """src/train.py with its floors by turns, in each of `ways`; more epochs, so that there are pairs to choose a middle from."""
        own = ["loop._target_=beside.train", f"trainer.epochs={settings.pairs}"]
        return [one(floored(how), ranks, "floor", [*start, TRAIN, *ours(*words, *own)]) for how, words in ways.items()]

    single = [
        one("tutorial", 1, "train memory", alone + script("mnist")),
        one(OURS["fp32"], 1, "train memory", [*alone, TRAIN, *ours()]),
        one("Lightning", 1, "train", alone + script("lightning_mnist")),
        one("Accelerate", 1, "train", [*alone, *ACCELERATE, *script("accelerate_mnist")]),
        one(OURS["bf16"], 1, "train", [*alone, TRAIN, *ours("trainer.precision=bf16")]),
        one("references", 1, "train", alone + script("references")),
        *beside(1, alone, BESIDE),
    ]
    two = torchrun(2)
    double = [
        one("tutorial", 2, "train memory", two + script("ddp_mnist")),
        one(OURS["fp32"], 2, "train memory", [*two, TRAIN, *ours()]),
        one("Lightning", 2, "train", alone + script("lightning_mnist", "--devices=2")),
        one("Accelerate", 2, "train", two + script("accelerate_mnist")),
        one(OURS["bf16"], 2, "train", [*two, TRAIN, *ours("trainer.precision=bf16")]),
        one("references", 2, "train", two + script("references")),
        *beside(2, two, BESIDE | SOCKETS),
    ]

    short = Settings(settings.data, samples=1024, test_samples=512, epochs=1, batch=settings.batch)
    starts = [[one("leanest", 1, "startup", alone + script("lean")), one("start by python", 1, "startup", [*alone, TRAIN, *ours(part=short)])]]
    for ranks in settings.worlds:
        by = [one(f"start by {name}", ranks, "startup", [*start, *ours(part=short)]) for name, start in launches(ranks).items()]
        starts.append([one("leanest", ranks, "startup", torchrun(ranks) + script("lean")), *by])

    job = ["trainer.epochs=1"]
    values = [f"optimizer.lr={0.01 * (number + 1):.2f}" for number in range(settings.jobs)]
    single_jobs = [[*two, TRAIN, *job, value, f"hydra.run.dir=run/{number}"] for number, value in enumerate(values)]
    sweeps = [one(f"{settings.jobs} commands", 2, "sweep", *single_jobs)]
    for name, start in launches(2).items():
        if name in ("launch=torchrun", "launch=fork"):
            asked = "optimizer.lr=" + ",".join(value.partition("=")[2] for value in values)
            sweep = [*start[:2], "-m", *start[2:], *job, asked, "hydra.sweep.dir=run"]
            sweeps.append(one(f"sweep by {name}", 2, "sweep", sweep))

    crowd = Settings(settings.data, samples=8 * CROWD * settings.batch, test_samples=2560, epochs=1, batch=settings.batch)
    crowds = [one("tutorial", CROWD, "memory", torchrun(CROWD) + script("ddp_mnist", part=crowd))]
    for name, start in launches(CROWD).items():
        if name in ("torchrun", "launch=fork"):
            crowds.append(one(f"Lockstep by {name}", CROWD, "memory", [*start, *ours(part=crowd)]))

    answers = [one(" ".join(words), 1, "help", [*alone, TRAIN, *words]) for words in (["--help"], ["--cfg", "job"])]
    return [single, double, *starts, sweeps, crowds, answers]


def run(contestant, folder):
    """Run it in the empty folder `folder`; returns what was measured, {quantity: number}, or raises RuntimeError."""
    folder.mkdir(parents=True)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{CONTENDERS}", "RACE_RECORD": str(folder / "record")}
    began, code = time.time(), 0
    for command in contestant.commands:
        code = on_a_terminal(command, folder, environment) or code
    wall = time.time() - began
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("record.*"))]
    expected = 0 if contestant.parts & {"sweep", "help"} else contestant.ranks
    if len(records) != expected or (code and not records):
        raise RuntimeError(
            f"{contestant.name} over {contestant.ranks} left {len(records)} records and exit code {code}, see {folder / 'console.log'}"
        )
    return {"wall": wall, "exit": code, **(figures(records, began) if records else {})}


def on_a_terminal(command, folder, environment):
    """The command's exit code. What it shows is kept in folder/console.log; nothing that it starts outlives it."""
    ours, theirs = pty.openpty()
    with (folder / "console.log").open("ab") as console:
        console.write(" ".join(command).encode() + b"\n")
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)

        def keep():
            with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
                while chunk := os.read(ours, 65536):
                    console.write(chunk)

        reader = threading.Thread(target=keep)
        reader.start()
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()
            os.close(ours)


def figures(records, began):
    """{quantity: number} from the ranks' records: a time is the slowest rank's, CPU time is the sum of all ranks'.

    speed, first_epoch, later_epochs, evaluation: samples/s; cpu: CPU seconds for 1000 training samples; first_step: seconds
    since the command; rss, private, pss: MB of the rank that has most; of bare loop, ...: of a floor's speed, the middle of all epochs.
    """

    def laps(what, epochs=slice(None)):
        """(samples, wall seconds, CPU seconds)."""
        epochs = list(zip(*(record[what][epochs] for record in records), strict=True))
        return tuple(sum(how(lap[key] for lap in ranks) for ranks in epochs) for key, how in (("samples", max), ("seconds", max), ("cpu", sum)))

    found = {"first_step": max(record["first_step"] for record in records) - began}
    for quantity, lap in {
        "speed": laps("training"),
        "first_epoch": laps("training", slice(1)),
        "later_epochs": laps("training", slice(1, None)),
        "evaluation": laps("evaluation"),
    }.items():
        if lap[0]:
            found[quantity] = lap[0] / lap[1]
    samples, _, cpu = laps("training")
    if samples:
        found["cpu"] = 1000 * cpu / samples
    for name in FLOORS.keys() & records[0].keys():
        epochs = [slice(epoch, epoch + 1) for epoch in range(len(records[0][name]))]
        found[f"of {name}"] = statistics.median(laps(name, epoch)[1] / laps("training", epoch)[1] for epoch in epochs)
    found |= {key: max(record[key] for record in records) for key in ("rss", "private", "pss") if key in records[0]}
    if records[0]["accuracy"] is not None:
        found["accuracy"] = records[0]["accuracy"]
    return found


class Results:
    """The runs so far, [{"round", "name", "ranks", quantity: number, ...}], and the ratios between them."""

    def __init__(self, runs):
        self.runs = runs

    def values(self, name, ranks, quantity):
        """{round: value}"""
        mine = [run for run in self.runs if (run["name"], run["ranks"]) == (name, ranks)]
        return {run["round"]: run[quantity] for run in mine if quantity in run}

    def ratio(self, quantity, top, bottom):
        """The ratios of the rounds that both (name, ranks) ran in."""
        one, other = self.values(*top, quantity), self.values(*bottom, quantity)
        return [one[number] / other[number] for number in one if number in other]

    def median(self, name, ranks, quantity):
        values = self.values(name, ranks, quantity).values()
        return statistics.median(values) if values else None


def said(ratios, digits=2):
    """1.62 (1.57-1.65), or a dash."""
    if not ratios:
        return "-"
    middle, least, most = (f"{value:.{digits}f}" for value in (statistics.median(ratios), min(ratios), max(ratios)))
    return middle if len(ratios) == 1 else f"{middle} ({least}-{most})"


def number(value, digits=0):
    return "-" if value is None else f"{value:.{digits}f}"


def markdown(title, head, rows):
    """A table, or nothing where no row was measured."""
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]) if rows else ""


def training(results):
    tables = []
    for ranks in (1, 2):
        rows = [[ours, precision, number(results.median(ours, ranks, "speed")), *["-"] * 6] for precision, ours in OURS.items()]
        for other in ("tutorial", *OTHERS):
            for precision, ours in OURS.items():
                faster = [results.ratio(what, (ours, ranks), (other, ranks)) for what in ("speed", "first_epoch", "later_epochs", "evaluation")]
                shorter = [results.ratio(what, (other, ranks), (ours, ranks)) for what in ("cpu", "wall")]
                rows.append([other, precision, number(results.median(other, ranks, "speed")), *map(said, faster + shorter)])
        head = ["against", "ours in", "its samples/s", "training", "first epoch", "later epochs", "evaluation", "CPU time", "whole command"]
        title = f"Training over {processes(ranks)}: how many times as fast Lockstep is"
        tables.append(markdown(title, head, [row for row in rows if row[2 if row[0] in OURS.values() else 3] != "-"]))
    return "\n".join(filter(None, tables))


def processes(ranks):
    return f"{ranks} process{'es' * (ranks > 1)}"


def fractions(results):
    """[(floor, ranks, how Lockstep ran, the fractions of its speed that were kept)]"""
    return [
        (name, ranks, how, [*results.values(floored(how), ranks, f"of {name}").values()])
        for name, (ranks, _, _) in FLOORS.items()
        for how in BESIDE | SOCKETS
    ]


def floor(results):
    rows = [
        [name, str(ranks), how, number(results.median(floored(how), ranks, "speed")), said(kept)] for name, ranks, how, kept in fractions(results)
    ]
    head = ["of the speed of", "processes", "Lockstep in", "its samples/s", "fraction kept"]
    return markdown("The floor, by turns in the same processes", head, [row for row in rows if row[4] != "-"])


def startup(results):
    rows = []
    for ranks in sorted({run["ranks"] for run in results.runs if run["name"] == "leanest"}):
        for name in ("leanest", *(f"start by {way}" for way in ("python", *LAUNCHES))):
            seconds = results.values(name, ranks, "first_step")
            against = said(results.ratio("first_step", (name, ranks), ("leanest", ranks)))
            rows.append([name, str(ranks), said(list(seconds.values())), against, said(results.ratio("first_step", (name, ranks), ("leanest", 1)))])
    head = ["", "ranks", "seconds to the first step", "against the leanest on as many ranks", "against the leanest alone"]
    return markdown("Start-up: from the command to the end of the first optimizer step", head, [row for row in rows if row[2] != "-"])


def sweep(results):
    names = dict.fromkeys(run["name"] for run in results.runs if run["name"].startswith("sweep") or run["name"].endswith("commands"))
    commands = next((name for name in names if name.endswith("commands")), None)
    rows = [[name, said([*results.values(name, 2, "wall").values()], 1), said(results.ratio("wall", (name, 2), (commands, 2)))] for name in names]
    return markdown("A sweep of short jobs over 2 ranks", ["way", "seconds", "of the single commands"], rows)


def memory(results):
    rows = []
    for ranks in (1, 2, CROWD):
        for name in ("tutorial", "Lockstep", "Lockstep by torchrun", "Lockstep by launch=fork"):
            row = [name, str(ranks), *(number(results.median(name, ranks, key)) for key in ("rss", "private", "pss"))]
            rows.append([*row, said(results.ratio("rss", (name, ranks), ("tutorial", ranks)))])
    head = ["", "ranks", "peak RSS, MB", "private, MB", "PSS, MB", "peak RSS of the tutorial's"]
    return markdown("Memory of the rank that has most", head, [row for row in rows if row[2] != "-"])


def answers(results):
    rows = [[name, said([*results.values(name, 1, "wall").values()])] for name in ("--help", "--cfg job")]
    return markdown("Answers", ["", "seconds"], rows)


def reach(results):
    """[(quantity, measured values, limit, moonshot or None)]; a limit is a least value where positive, else minus a largest."""
    rows = []
    for ranks, limits in {1: {"fp32": (1.6, 1.9), "bf16": (2.4, 3.0)}, 2: {"fp32": (1.6, 1.8), "bf16": (2.25, 2.7)}}.items():
        where = processes(ranks)
        for precision, limit in limits.items():
            ratios = results.ratio("speed", (OURS[precision], ranks), ("tutorial", ranks))
            rows.append((f"samples/s against the tutorial, {where}, {precision}", ratios, *limit))
        others = {other: results.ratio("speed", (OURS["fp32"], ranks), (other, ranks)) for other in OTHERS}
        others = {other: ratios for other, ratios in others.items() if ratios}
        if others:
            worst = min(others, key=lambda other: statistics.median(others[other]))
            rows.append((f"samples/s against the fastest other, {worst}, {where}, fp32", others[worst], 1.4, 1.6))
        for name, over, how, kept in fractions(results):
            if over == ranks:
                rows.append((f"of the speed of {name}, {where}, {how}", kept, *FLOORS[name][1:]))
        rows.append(
            (f"evaluation against the tutorial's, {where}, fp32", results.ratio("evaluation", (OURS["fp32"], ranks), ("tutorial", ranks)), 2.2, 4)
        )
    rows.append(("first step against the leanest, alone", results.ratio("first_step", ("start by python", 1), ("leanest", 1)), -1.15, None))
    for ranks in sorted({run["ranks"] for run in results.runs if run["name"] == "leanest"} - {1}):
        for launch in LAUNCHES:
            ratios = results.ratio("first_step", (f"start by {launch}", ranks), ("leanest", ranks))
            rows.append((f"first step against the leanest, {ranks} ranks by {launch}", ratios, -1.15, None))
        ratios = results.ratio("first_step", ("start by launch=fork", ranks), ("start by python", 1))
        rows.append((f"first step of {ranks} ranks by launch=fork against 1 process", ratios, None, -1.15))
    for launch in ("launch=torchrun", "launch=fork"):
        for commands in {run["name"] for run in results.runs if run["name"].endswith("commands")}:
            rows.append((f"a sweep by {launch} against {commands}", results.ratio("wall", (f"sweep by {launch}", 2), (commands, 2)), -0.4, -0.15))
    for ranks in (1, 2):
        ratios = results.ratio("rss", (OURS["fp32"], ranks), ("tutorial", ranks))
        rows.append((f"peak RSS against the tutorial's, {processes(ranks)}", ratios, -1.05, None))
    for launch in ("torchrun", "launch=fork"):
        private = [*results.values(f"Lockstep by {launch}", CROWD, "private").values()]
        rows.append((f"private MB of a rank, {CROWD} ranks by {launch}", private, None, -100))
    for words in ("--help", "--cfg job"):
        rows.append((f"seconds of {words}", [*results.values(words, 1, "wall").values()], -0.6, -0.3))
    return [row for row in rows if row[1]]


def reached(results):
    """The table of what was to be reached."""

    def kept(values, limit):
        middle = statistics.median(values)
        return limit is not None and (middle >= limit if limit > 0 else middle <= -limit)

    def shown(limit):
        return "-" if limit is None else f"{'>=' if limit > 0 else '<='} {abs(limit):g}"

    rows = []
    for quantity, values, limit, moonshot in reach(results):
        met = "moonshot" if kept(values, moonshot) else "-" if limit is None else "yes" if kept(values, limit) else "no"
        rows.append([quantity, said(values, 0 if max(values) >= 20 else 2), shown(limit), shown(moonshot), met])
    return markdown("Reach", ["quantity", "measured", "reach", "moonshot", "met"], rows)


def report(runs, settings):
    """The whole page, in markdown."""
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchvision", "lightning", "accelerate") if installed(name)
    )
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    rounds = 1 + max((run["round"] for run in runs), default=0)
    load = [run["load"] for run in runs]
    about = [
        f"{settings.samples} training and {settings.test_samples} test samples of MNIST, batch {settings.batch} a rank, {settings.epochs} epochs; "
        f"up to {rounds} rounds; median (least-largest) of paired runs. Above 1 Lockstep is better in speeds, CPU time and wall time.",
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, load before the runs {said(load, 1)}; Python {platform.python_version()}, {versions}.",
    ]
    late = [f"{run['name']} over {run['ranks']} (exit {run['exit']})" for run in runs if run["exit"]]
    if late:
        about.append(f"Ended with an error after all was measured: {', '.join(late)}.")
    results = Results(runs)
    tables = [part(results) for part in (reached, training, floor, startup, sweep, memory, answers)]
    return "# Lockstep against the others\n\n" + "\n\n".join(about) + "\n\n" + "\n".join(filter(None, tables))


def plot(results, path):
    """Ratios of speed, and start-up over the number of ranks. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    bars = [(f"{other}, {ranks}", other, ranks) for ranks in (1, 2) for other in ("tutorial", *OTHERS)]
    for shift, (precision, ours) in enumerate(OURS.items()):
        found = [(place, results.ratio("speed", (ours, ranks), (other, ranks))) for place, (_, other, ranks) in enumerate(bars)]
        found = [(place, statistics.median(ratios), min(ratios), max(ratios)) for place, ratios in found if ratios]
        if found:
            places, middles, least, most = zip(*found, strict=True)
            errors = [[m - a for m, a in zip(middles, least, strict=True)], [b - m for m, b in zip(middles, most, strict=True)]]
            left.bar([place + 0.4 * shift for place in places], middles, 0.4, yerr=errors, label=precision)
            left.legend()
    left.set_xticks([place + 0.2 for place in range(len(bars))], [name for name, *_ in bars], rotation=30, ha="right")
    left.axhline(1, color="grey", linewidth=1)
    left.set(ylabel="Lockstep's samples/s over the other's (processes)")
    worlds = sorted({run["ranks"] for run in results.runs if run["name"] == "leanest"})
    for name in ("leanest", *(f"start by {way}" for way in LAUNCHES)):
        seconds = {ranks: results.median(name, ranks, "first_step") for ranks in worlds}
        seconds = {ranks: value for ranks, value in seconds.items() if value is not None}
        if seconds:
            right.plot([*seconds], [*seconds.values()], "o-", label=name)
            right.legend()
    right.set(xlabel="ranks", ylabel="seconds to the first step", ylim=(0, None))
    figure.savefig(path, dpi=120)


def save(runs, settings, out):
    """race.md and race.csv, as far as the race is."""
    keys = list(dict.fromkeys(key for run in runs for key in run))
    with (out / "race.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(runs)
    (out / "race.md").write_text(report(runs, settings))


def installed(package):
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def download(folder):
    sys.path.insert(0, str(ROOT / "src"))
    from lockstep import datasets
    from lockstep.refusal import Refusal

    try:
        datasets.download(folder, "MNIST")
    except Refusal as refusal:
        sys.exit(str(refusal).partition("; type")[0] + "; type --data=<folder that holds MNIST>")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="one round, fewer ranks and jobs")
    options.add_argument("--rounds", type=int, help="of training and floors; the slow parts run half as many")
    options.add_argument("--only", default=",".join(PARTS), help=f"of {','.join(PARTS)}")
    options.add_argument("--samples", type=int, default=Settings.samples)
    options.add_argument("--test-samples", type=int, default=Settings.test_samples)
    options.add_argument("--epochs", type=int, default=Settings.epochs)
    options.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench")
    options.add_argument("--data", default=os.environ.get("LOCKSTEP_DATA", ROOT / "data"), type=Path, help="where MNIST/raw lies ($LOCKSTEP_DATA)")
    asked = options.parse_args()

    parts = set(asked.only.split(","))
    if not parts <= set(PARTS):
        sys.exit(f"--only={asked.only} asks for parts that are not there; type --only= and some of {','.join(PARTS)}")
    missing = [package for package in ("lightning", "accelerate") if not installed(package)] if "train" in parts else []
    if missing:
        sys.exit(f"{' and '.join(missing)} would take part and cannot be imported; type {sys.executable} -m pip install -r requirements-bench.txt")
    if parts - {"sweep", "help"}:
        download(asked.data)
    size = {"worlds": (2, 4), "jobs": 4, "pairs": 2} if asked.quick else {}
    settings = Settings(str(asked.data.resolve()), asked.samples, asked.test_samples, asked.epochs, **size)
    rounds = asked.rounds or (1 if asked.quick else 4)

    out, runs, failed = asked.out.resolve() / time.strftime("%Y-%m-%d_%H-%M-%S"), [], 0
    groups = [[each for each in group if each.parts & parts] for group in contestants(settings)]
    for turn in range(rounds):
        for group in groups:
            if turn >= (rounds if any(each.parts & {"train", "floor", "help"} for each in group) else -(-rounds // 2)):
                continue
            first = turn * len(group) // rounds
            for each in group[first:] + group[:first]:
                load = os.getloadavg()[0]
                try:
                    figures = run(each, out / f"{turn}-{each.name.replace(' ', '_').replace(',', '')}-{each.ranks}")
                except RuntimeError as error:
                    failed += 1
                    print(error, file=sys.stderr, flush=True)
                    continue
                runs.append({"round": turn, "name": each.name, "ranks": each.ranks, "load": load, **figures})
                shown = "   ".join(
                    f"{key} {figures[key]:.{digits}f}" for key, digits in (("speed", 0), ("first_step", 2), ("wall", 2)) if key in figures
                )
                print(f"{turn + 1}/{rounds}   {each.name} over {each.ranks}   {shown}", flush=True)
                save(runs, settings, out)
    print("\n" + report(runs, settings))
    print(f"tables: {out / 'race.md'}\nruns:   {out / 'race.csv'}")
    try:
        plot(Results(runs), out / "race.png")
        print(f"plot:   {out / 'race.png'}")
    except ImportError:
        print(f"no plot without matplotlib; type {sys.executable} -m pip install -r requirements-bench.txt", file=sys.stderr)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
